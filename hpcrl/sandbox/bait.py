"""What is there to be attacked, beside the sandbox itself: a host in small, all of it the suite's own.

servers   a scheduler, an engine's Unix socket, … that say a secret to whoever reaches them
scene     files, a victim process, a terminal; they belong to whoever attacks
"""

from __future__ import annotations

import asyncio
import contextlib
import hashlib
import json
import os
import pty
import secrets
import selectors
import shutil
import socket
import subprocess
import tempfile
import threading
from collections.abc import AsyncIterator, Callable, Iterator, Mapping
from contextlib import asynccontextmanager, contextmanager
from pathlib import Path
from typing import Any

from hpcrl.sandbox.backend import STRANGER, Backend
from hpcrl.sandbox.seccomp import call_numbers

# A process of the host: what attacks on processes are aimed at.
_VICTIM = """
import ctypes, json, os, sys
libc = ctypes.CDLL(None)
libc.prctl(0x59616D61, ctypes.c_ulong(-1), 0, 0, 0)
token = os.environ["HPCRL_TOKEN"].encode()
buffer = ctypes.create_string_buffer(token)
kept = open("deleted", "w+")
kept.write(os.environ["HPCRL_TOKEN"])
kept.flush()
os.unlink("deleted")
segment = libc.shmget(0, 4096, 0o1600)
libc.shmat.restype = ctypes.c_void_p
address = libc.shmat(segment, None, 0)
libc.shmctl(segment, 0, 0)  # it goes with us
ctypes.memmove(address, buffer, len(token))
print(json.dumps({"pid": os.getpid(), "address": ctypes.addressof(buffer), "segment": segment}), flush=True)
sys.stdin.read()
"""


@asynccontextmanager
async def scene(backend: Backend, bait: Mapping[str, Any]) -> AsyncIterator[dict[str, Any]]:
    """What is there to be attacked: files, a victim, a terminal. All of it belongs to whoever attacks."""
    become = becoming(backend)
    folder = Path(tempfile.mkdtemp(prefix="hpcrl-attack-", dir="/tmp"))
    master, slave = pty.openpty()
    os.set_blocking(master, False)
    victim = None
    try:
        folder.chmod(0o755)
        secret, marker = folder / "secret", folder / "marker"
        secret.write_text(bait["token"])
        marker.write_text("untouched")
        for path in (folder, secret, marker, Path(os.ttyname(slave))):
            give(path)
        pipe = subprocess.PIPE
        victim = await asyncio.create_subprocess_exec(
            *become, backend.python, "-c", _VICTIM, bait["token"], stdin=pipe, stdout=pipe, cwd=folder,
            env={"HPCRL_TOKEN": bait["token"]}, start_new_session=True,
        )  # fmt: skip
        assert victim.stdout
        facts = json.loads(await victim.stdout.readline())
        before = _standing(victim)
        yield {
            **bait,
            "calls": call_numbers(),
            "folder": str(folder),
            "secret": str(secret),
            "marker": str(marker),
            "accounts": hashlib.sha256(Path("/etc/passwd").read_bytes()).hexdigest(),
            "tty": os.ttyname(slave),
            "victim": facts["pid"],
            "address": facts["address"],
            "segment": facts["segment"],
            "oom_score_adj": int(Path("/proc/self/oom_score_adj").read_text()),
            "terminal": lambda: _pending(master),
            "changed": lambda: marker.is_symlink() or not marker.is_file() or marker.read_text() != "untouched",
            "hurt": lambda: "" if _standing(victim) == before else f"{before} became {_standing(victim)}",
        }
    finally:
        if victim is not None and victim.returncode is None:
            with contextlib.suppress(ProcessLookupError):
                victim.kill()
            await victim.wait()
        os.close(master)
        os.close(slave)
        shutil.rmtree(folder, ignore_errors=True)


def becoming(backend: Backend) -> list[str]:
    """A command's first words that make an ordinary user of us where we aren't one: the user of the sandboxes."""
    words = [backend.setpriv, "--reuid", str(STRANGER), "--regid", str(STRANGER), "--clear-groups"]
    return words if backend.setpriv else []


def give(path: Path | int) -> None:
    """To that user, so that nothing but the sandbox is in the way."""
    if os.geteuid() == 0:
        os.chown(path, STRANGER, STRANGER)


def _standing(process: asyncio.subprocess.Process) -> tuple[object, ...]:
    """A process as its attackers would change it: stopped or dead, priority, affinity, open files allowed."""
    try:
        fields = Path(f"/proc/{process.pid}/stat").read_text().rpartition(")")[2].split()
        limits = [line.split() for line in Path(f"/proc/{process.pid}/limits").read_text().splitlines()]
        files = [line[3] for line in limits if line[:3] == ["Max", "open", "files"]]
        state = "gone" if fields[0] in "ZX" else "stopped" if fields[0] in "Tt" else "runs"
        return state, fields[16], os.sched_getaffinity(process.pid), files
    except OSError:
        return ("gone",)


def _pending(fd: int) -> bytes:
    try:
        return os.read(fd, 65536)
    except OSError:
        return b""


@contextmanager
def servers(token: str) -> Iterator[dict[str, Any]]:
    """Servers as a node has them, open to whoever reaches them; each says the token."""
    folder = Path(tempfile.mkdtemp(prefix="hpcrl-attack-", dir="/tmp"))
    folder.chmod(0o755)
    doors: dict[str, Any] = {"tcp": 0, "tcp6": 0, "wide": 0, "udp": 0}
    stop = threading.Event()
    with contextlib.ExitStack() as stack, selectors.DefaultSelector() as selector:
        stack.callback(shutil.rmtree, folder, ignore_errors=True)

        def listen(family: int, kind: int, address: Any) -> socket.socket:
            door = stack.enter_context(socket.socket(family, kind))
            door.bind(address)
            if kind == socket.SOCK_STREAM:
                door.listen(64)
            door.setblocking(False)
            selector.register(door, selectors.EVENT_READ)
            return door

        doors["tcp"] = listen(socket.AF_INET, socket.SOCK_STREAM, ("127.0.0.1", 0)).getsockname()[1]
        doors["wide"] = listen(socket.AF_INET, socket.SOCK_STREAM, ("0.0.0.0", 0)).getsockname()[1]
        doors["udp"] = listen(socket.AF_INET, socket.SOCK_DGRAM, ("127.0.0.1", 0)).getsockname()[1]
        with contextlib.suppress(OSError):  # no IPv6 here
            doors["tcp6"] = listen(socket.AF_INET6, socket.SOCK_STREAM, ("::1", 0)).getsockname()[1]
        doors["unix"] = str(folder / "engine.sock")
        listen(socket.AF_UNIX, socket.SOCK_STREAM, doors["unix"])
        os.chmod(doors["unix"], 0o777)  # noqa: PTH101
        doors["abstract"] = f"hpcrl-attack-{secrets.token_hex(8)}"
        listen(socket.AF_UNIX, socket.SOCK_STREAM, "\0" + doors["abstract"])
        doors["host_address"] = _address()
        thread = threading.Thread(target=_answer_all, args=(selector, token.encode(), stop.is_set), daemon=True)
        thread.start()
        stack.callback(thread.join)
        stack.callback(stop.set)
        yield doors


def _answer_all(selector: selectors.BaseSelector, token: bytes, stopped: Callable[[], bool]) -> None:
    while not stopped():
        for key, _ in selector.select(0.1):
            door = key.fileobj
            assert isinstance(door, socket.socket)
            with contextlib.suppress(OSError):
                if door.type == socket.SOCK_DGRAM:
                    door.sendto(token, door.recvfrom(100)[1])
                    continue
                with door.accept()[0] as visitor:
                    visitor.sendall(token)


def _address() -> str:
    """This machine's address on its network, 127.0.0.1 where it has none."""
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
        try:
            probe.connect(("192.0.2.1", 9))
        except OSError:
            return "127.0.0.1"
        return str(probe.getsockname()[0])
