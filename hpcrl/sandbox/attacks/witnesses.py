"""What only the host can see of an attack: each looks alike at a sandbox and at a bare run."""

from __future__ import annotations

import asyncio

from hpcrl.sandbox.attacks.words import FORGED, Ground, Witness


async def answers(ground: Ground) -> str:
    await ground.run("lost('alive')", 3.0)  # SandboxLost is success
    return ""


async def forged(ground: Ground) -> str:
    return "the host took a forged reply" if ground.last.code == FORGED else ""


async def leftovers(ground: Ground) -> str:
    await asyncio.sleep(0.3)
    number = ground.leftovers()
    return f"{number} processes outlived their command" if number else ""


def reads(path: str, times: int = 1) -> Witness:
    """The host reads this file of the work folder, and gets the secret. `{secret}` stands for the bait's."""

    async def witness(ground: Ground) -> str:
        for _ in range(times):
            try:
                data = await ground.read(path.format_map(ground.bait))
            except TimeoutError:
                return "the host's read hung"
            except OSError:
                continue
            if ground.bait["token"].encode() in data:
                return "the host read its own secret through it"
            if len(data) > 1 << 20:
                return "the host read more than its cap"
        return ""

    return witness


def writes(path: str, look: str = "") -> Witness:
    """The host writes this file of the work folder; a file of the host was changed, or `look`, a program, says so."""

    async def witness(ground: Ground) -> str:
        try:
            await ground.write(path, b"from the host")
        except TimeoutError:
            return "the host's write hung"
        except OSError:
            pass
        if ground.bait["changed"]():
            return "the host's write changed another file of the host"
        result = await ground.run(look or "lost('nothing')")
        return "the host's write landed elsewhere" if b"SUCCEEDED" in result.stdout else ""

    return witness


async def written_and_read(ground: Ground) -> str:
    try:
        await ground.write("note", b"1")
        return "" if await ground.read("note") == b"1" else "the host's file isn't what it wrote"
    except OSError as error:
        return f"the host can use the work folder no more: {error}"


async def kept_output(ground: Ground) -> str:
    size = len(ground.last.stdout)
    return f"the host keeps {size} bytes" if size > 1 << 20 else ""


async def rewritten(ground: Ground) -> str:
    """The platform writes a reward file into the work folder after the command, and reads it later."""
    await ground.write("reward.json", b"0.0")
    await asyncio.sleep(0.6)
    return "the reward file was rewritten" if await ground.read("reward.json") != b"0.0" else ""


async def on_terminal(ground: Ground) -> str:
    return (
        "what it typed is on the host's terminal" if ground.bait["token"].encode() in ground.bait["terminal"]() else ""
    )


async def marked(ground: Ground) -> str:
    return "a file of the host was changed" if ground.bait["changed"]() else ""


async def victim(ground: Ground) -> str:
    return ground.bait["hurt"]()  # type: ignore[no-any-return]
