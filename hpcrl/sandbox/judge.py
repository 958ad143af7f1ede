"""Runs the table of attacks against a way of making sandboxes, and judges which are held off: `hpcrl sandbox attack`.

    attack --> a fresh session, the program, (a reset, the next program), the host's witness --> held?
           \\-> bare: the same through a naive runner of an ordinary user                    --> did it work at all?

A program that neither succeeded nor was refused in words (a typo, a missing module, a hang) holds nothing off.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import secrets
import shutil
import signal
import subprocess
import tempfile
from collections.abc import AsyncIterator, Mapping, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

from hpcrl.sandbox.attacks import ATTACKS
from hpcrl.sandbox.attacks.words import FORGED, PRELUDE, Attack, Ground
from hpcrl.sandbox.backend import PLACES, WORK, Backend, Limits, process_tree
from hpcrl.sandbox.bait import becoming, give, scene, servers
from hpcrl.sandbox.runner import FRAME
from hpcrl.sandbox.session import SandboxLost, Session
from hpcrl.sandbox.watch import Watch
from hpcrl.types import CommandResult

LIMITS = Limits(memory_bytes=128 << 20, processes=32, disk_bytes=16 << 20, output_bytes=32 << 20, inodes=2000)
AT_ONCE = 4
DEADLINE_S = 60.0  # of one attack, sandboxed or bare
CAP_BYTES = 1 << 16  # of output that the host wants
READ_S = 3.0  # until a bare read counts as hung

# A runner as one would naively write it: its own output is the command's as well, and nothing is cleaned up. It stands
# for the platform when an attack runs bare.
_NAIVE = """
import ctypes, json, os, subprocess, sys
ctypes.CDLL(None).prctl(0x59616D61, ctypes.c_ulong(-1), 0, 0, 0)  # where Yama is: anyone may trace us
kept = open(sys.argv[2])
os.set_inheritable(kept.fileno(), True)
for line in sys.stdin:
    job = json.loads(line)
    reply = {"code": None, "killed": "timeout"}
    try:
        done = subprocess.run([sys.argv[1], "-"], input=job["program"].encode(), timeout=job["timeout"],
                              stderr=subprocess.STDOUT, close_fds=False, start_new_session=True)
        reply = {"code": done.returncode, "killed": ""}
    except subprocess.TimeoutExpired:
        pass
    print("\\n" + json.dumps({"reply": reply}), flush=True)
"""
Outcome = Literal["succeeded", "refused", "broken"]


@dataclass(frozen=True, slots=True, kw_only=True)
class Judged:
    """One attack's row in the report."""

    name: str
    held: bool
    evidence: str
    works_bare: bool | None  # None: it wasn't run, or this machine refuses it to anybody
    bare: str  # what the bare run said, or why there was none

    @property
    def fine(self) -> bool:
        return self.held and self.works_bare is not False


async def run_attacks(backend: Backend, attacks: Sequence[Attack] = ATTACKS) -> list[Judged]:
    """Each attack in a sandbox of its own and bare, a few at a time; in the order given."""
    token, slots, watch = secrets.token_hex(16), asyncio.Semaphore(AT_ONCE), Watch()
    os.environ["HPCRL_TOKEN"] = token  # a secret of the host's environment, for attacks that look for one
    try:
        with servers(token) as doors:

            async def one(attack: Attack) -> Judged:
                async with slots:
                    return await _both(attack, backend, watch, {"token": token, **doors})

            return list(await asyncio.gather(*map(one, attacks)))
    finally:
        del os.environ["HPCRL_TOKEN"]
        watch.close()


async def _both(attack: Attack, backend: Backend, watch: Watch, bait: Mapping[str, Any]) -> Judged:
    async with scene(backend, bait) as bait:
        async with _sandboxed(backend, watch, bait) as ground:
            outcome, evidence = await _attempt(attack, ground)
        held = outcome == "refused"
        if attack.bare:
            return Judged(name=attack.name, held=held, evidence=evidence, works_bare=None, bare=attack.bare)
        async with _bare(backend, bait) as ground:
            bare, said = await _attempt(attack, ground)
    works = None if bare == "refused" and said.split()[0] in attack.machine else bare == "succeeded"
    return Judged(name=attack.name, held=held, evidence=evidence, works_bare=works, bare=said)


async def _attempt(attack: Attack, ground: Ground) -> tuple[Outcome, str]:
    """Run the attack here: what came of it, and the evidence (for "refused": first the error or the limit)."""
    try:
        async with asyncio.timeout(DEADLINE_S):
            result = await ground.run(attack.program, attack.timeout_s)
            outcome, evidence = _said(attack, result)
            if attack.after and outcome == "refused":
                trouble = await ground.reset()
                if trouble:
                    return "refused", f"replaced, for it is not clean: {trouble}"
                outcome, evidence = _said(attack, await ground.run(attack.after, attack.timeout_s))
            if attack.witness and outcome != "succeeded":
                seen = await attack.witness(ground)
                if seen:
                    return "succeeded", seen
        return outcome, evidence
    except SandboxLost as error:
        if "used too much" in str(error):
            return "refused", f"memory: {error}"
        return "succeeded", str(error)
    except TimeoutError:
        return "broken", f"no end after {DEADLINE_S:.0f} s"


def _said(attack: Attack, result: CommandResult) -> tuple[Outcome, str]:
    lines = result.stdout.decode(errors="replace").splitlines()
    for word, outcome in (("SUCCEEDED ", "succeeded"), ("REFUSED ", "refused")):
        for line in lines:
            if line.startswith(word):
                what = line.removeprefix(word)
                if outcome == "refused" and attack.bare and what.split()[0] not in attack.refusals:
                    return "broken", f"refused by another error than expected: {what}"
                return outcome, what  # type: ignore[return-value]
    if result.killed and (result.killed in attack.refusals or (not attack.refusals and result.killed != "timeout")):
        return "refused", f"{result.killed}: killed"
    if attack.witness and result.code == 0:
        return "refused", "without effect, as the host sees it"
    tail = (result.stderr or result.stdout)[-300:].decode(errors="replace").strip()
    return "broken", f"it neither succeeded nor was refused (status {result.code} {result.killed}): {tail}"


# ---- where they run


class _Sandboxed:
    """`Ground`: a session."""

    def __init__(self, session: Session, bait: Mapping[str, Any]) -> None:
        self._session = session
        self.bait = bait
        self.last = _NOTHING

    async def run(self, program: str, timeout_s: float = 10.0) -> CommandResult:
        text = _complete(program, self.bait)
        self.last = await self._session.run(
            ["python3", "-"], stdin=text, timeout_s=timeout_s, cap_bytes=CAP_BYTES
        )  # fmt: skip
        return self.last

    async def read(self, path: str) -> bytes:
        return await self._session.read(path)

    async def write(self, path: str, data: bytes) -> None:
        await self._session.write({path: data})

    async def reset(self) -> str:
        return await self._session.reset()

    def leftovers(self) -> int:
        return len(process_tree(self._session.pid)) - 2 if self._session.alive else 0


class _Bare:
    """`Ground`: subprocesses of an ordinary user, in a scratch folder."""

    def __init__(
        self,
        runner: asyncio.subprocess.Process,
        replies: asyncio.StreamReader,
        become: list[str],
        bait: Mapping[str, Any],
    ) -> None:
        self._runner = runner
        self._replies = replies
        self._become = become
        self.bait = bait
        self.last = _NOTHING

    async def run(self, program: str, timeout_s: float = 10.0) -> CommandResult:
        assert self._runner.stdin
        job = {"program": _complete(program, self.bait).decode(), "timeout": timeout_s}
        output = b""
        try:
            async with asyncio.timeout(timeout_s + 3):
                self._runner.stdin.write(json.dumps(job).encode() + b"\n")
                await self._runner.stdin.drain()
                while line := await self._replies.readline():
                    if line.startswith(b'{"reply"'):
                        reply = json.loads(line)["reply"]
                        self.last = CommandResult(stdout=output, stderr=b"", duration_s=0.0, **reply)
                        return self.last
                    output += line
        except TimeoutError as error:
            raise SandboxLost("the runner no longer answers") from error
        except OSError as error:
            raise SandboxLost(f"the runner is gone: {error}") from error
        raise SandboxLost("the runner is gone")

    async def read(self, path: str) -> bytes:
        return await self._tool(["head", "-c", str((1 << 20) + 1), "--", path], b"")

    async def write(self, path: str, data: bytes) -> None:
        await self._tool(["tee", "--", path], data)

    async def reset(self) -> str:
        return ""

    def leftovers(self) -> int:
        return len(_marked_processes(self.bait["mark"]) - {self._runner.pid})

    async def _tool(self, command: list[str], data: bytes) -> bytes:
        """As the host would do it without care; in a process, so that it may hang."""
        pipe = subprocess.PIPE
        process = await asyncio.create_subprocess_exec(
            *self._become, *command, stdin=pipe, stdout=pipe, stderr=pipe, cwd=self.bait["places"][0]
        )
        try:
            async with asyncio.timeout(READ_S):
                out, err = await process.communicate(data)
        finally:
            if process.returncode is None:
                process.kill()
                await process.wait()
        if process.returncode:
            raise OSError(0, err.decode(errors="replace"))
        return out


_NOTHING = CommandResult(code=None, stdout=b"", stderr=b"", duration_s=0.0)


def _complete(program: str, bait: Mapping[str, Any]) -> bytes:
    """The program with what it starts from; of the bait what is no function of the host's."""
    told = json.dumps({name: value for name, value in bait.items() if not callable(value)})
    return (PRELUDE.replace("BAIT", repr(told)) + program).encode()


@asynccontextmanager
async def _sandboxed(backend: Backend, watch: Watch, bait: Mapping[str, Any]) -> AsyncIterator[Ground]:
    header = {"id": 1, "code": FORGED, "killed": "", "duration": 0.0, "sizes": [0, 0], "kept": [0, 0]}
    text = json.dumps(header).encode()
    forged = (FRAME.pack(len(text), 0) + text).hex()
    session = await Session.start(backend, LIMITS, watch)
    try:
        more = {"runner": 1, "runner_file": "/run/runner.py", "places": [WORK, *PLACES], "forged": forged}
        yield _Sandboxed(session, {**bait, **more})
    finally:
        await session.close()


@asynccontextmanager
async def _bare(backend: Backend, bait: Mapping[str, Any]) -> AsyncIterator[Ground]:
    forged = ("\n" + json.dumps({"reply": {"code": FORGED, "killed": ""}}) + "\n").encode().hex()
    become, folder, mark = becoming(backend), Path(bait["folder"]), secrets.token_hex(8)
    work, naive = folder / "work", folder / "naive.py"
    naive.write_text(_NAIVE)
    shm = Path(tempfile.mkdtemp(prefix="hpcrl-attack-", dir="/dev/shm"))
    for place in (work, work / "tmp", work / "bin", shm):
        place.mkdir(exist_ok=True)
    for path in (naive, work, work / "tmp", work / "bin", shm):
        give(path)
    env = {"PATH": f"{work}/bin:/usr/bin:/bin", "HOME": str(work), "LANG": "C.UTF-8", "HPCRL_MARK": mark}
    read_fd, write_fd = os.pipe()
    give(write_fd)
    replies = asyncio.StreamReader(limit=1 << 26)
    protocol = asyncio.StreamReaderProtocol(replies)
    pipe, _ = await asyncio.get_running_loop().connect_read_pipe(lambda: protocol, os.fdopen(read_fd, "rb"))
    runner = await asyncio.create_subprocess_exec(
        *become, backend.python, str(naive), backend.python, bait["secret"], stdin=subprocess.PIPE,
        stdout=write_fd, cwd=work, env={**env, "HPCRL_TOKEN": bait["token"]}, start_new_session=True,
    )  # fmt: skip
    os.close(write_fd)
    places = [str(work), str(work / "tmp"), str(shm)]
    more = {"runner": runner.pid, "runner_file": str(naive), "places": places, "forged": forged, "mark": mark}
    try:
        yield _Bare(runner, replies, become, {**bait, **more})
    finally:
        while left := _marked_processes(mark):
            for pid in left:
                with contextlib.suppress(ProcessLookupError):
                    os.kill(pid, signal.SIGKILL)
            await asyncio.sleep(0.02)
        await runner.wait()
        pipe.close()
        shutil.rmtree(shm, ignore_errors=True)


def _marked_processes(mark: str) -> set[int]:
    """Processes with this mark in their environment: what a bare run has started."""
    found = set()
    for path in Path("/proc").glob("[0-9]*"):
        with contextlib.suppress(OSError):
            if mark.encode() in (path / "environ").read_bytes():
                found.add(int(path.name))
    return found
