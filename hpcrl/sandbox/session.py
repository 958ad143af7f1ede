"""A session: one running sandbox and the calls to it. Owns the host's end of the runner's pipe.

    caller -> Session.run/write/read/reset -> frame -> runner (pid 1 of the sandbox) -> frame -> future

A session that broke raises `SandboxLost` from every call: a fault of the platform, never the policy's doing by itself.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import socket
import subprocess
from collections.abc import Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any

from hpcrl.sandbox.backend import PLACES, WORK, Backend, Limits, host_uids, kill
from hpcrl.sandbox.runner import FRAME
from hpcrl.sandbox.watch import Watch
from hpcrl.types import CommandResult, SandboxError

START_TIMEOUT_S = 60.0  # the machine may be busy starting hundreds
GRACE_S = 10.0  # how much later than its timeout a command may end before its sandbox is given up
FILES_TIMEOUT_S = 60.0
MAX_FRAME_BYTES = 1 << 30


class SandboxLost(ConnectionError):
    """The sandbox ended, or had to be ended: its files are gone. A new attempt replays its calls."""


# bwrap dies with the thread that started it, so one thread that lives as long as this process starts them all.
_starter = ThreadPoolExecutor(max_workers=1, thread_name_prefix="sandbox-starter")


class Session(asyncio.Protocol):
    """One sandbox (see `hpcrl.types.Sandbox`). Made by `start`; belongs to the event loop that made it."""

    def __init__(self, limits: Limits, watch: Watch) -> None:
        self.limits = limits
        self.lost = ""  # why the session ended
        self.commands = 0
        self._watch = watch
        self._transport: asyncio.Transport | None = None
        self._process: subprocess.Popen[bytes] | None = None
        self._buffer = bytearray()
        self._replies: dict[int, asyncio.Future[tuple[dict[str, Any], bytes]]] = {}
        self._next = 1
        self._lock = asyncio.Lock()  # the runner takes one call at a time

    @classmethod
    async def start(cls, backend: Backend, limits: Limits, watch: Watch) -> Session:
        """Raises SandboxLost when it doesn't come up, SandboxError when it would run as the host's root."""
        session = cls(limits, watch)
        loop = asyncio.get_running_loop()
        ours, theirs = socket.socketpair()
        ready = session._expect(0)
        errors = os.memfd_create("hpcrl-errors")
        try:
            starting = loop.run_in_executor(_starter, _spawn, backend, limits, theirs, errors)
            try:
                session._process = await asyncio.shield(starting)
            except asyncio.CancelledError:
                starting.add_done_callback(_discard)
                ours.close()
                raise
            await loop.create_unix_connection(lambda: session, sock=ours)
            await asyncio.wait_for(ready, START_TIMEOUT_S)
            if 0 in host_uids(session._process.pid):
                raise SandboxError("a sandbox came up as the host's uid 0")
        except (SandboxLost, TimeoutError, OSError) as error:
            await session.close()
            os.lseek(errors, 0, os.SEEK_SET)
            said = os.read(errors, 4096).decode(errors="replace").strip()
            raise SandboxLost(f"sandbox did not start: {said or error or 'timeout'}") from error
        except BaseException:
            await session.close()
            raise
        finally:
            os.close(errors)
            session._replies.pop(0, None)
        return session

    @property
    def alive(self) -> bool:
        return self._transport is not None and not self.lost

    @property
    def pid(self) -> int:
        """The bwrap process, on the host."""
        assert self._process is not None
        return self._process.pid

    # ---- calls

    async def run(
        self, command: Sequence[str], *, stdin: bytes = b"", timeout_s: float = 30.0, cap_bytes: int = 65536
    ) -> CommandResult:
        """Run a command in the work folder. `cap_bytes` bounds what is kept of each stream.

        When it ends, by itself or by a limit, everything that it started is dead too.
        """
        if not command:
            raise ValueError("an empty command")
        header = {"op": "run", "argv": list(command), "timeout": timeout_s, "cap": cap_bytes}
        self.commands += 1
        reply, body = await self._call(header, stdin, timeout_s + GRACE_S, watched=True)
        kept, sizes = reply["kept"], reply["sizes"]
        return CommandResult(
            code=reply["code"],
            stdout=body[: kept[0]],
            stderr=body[kept[0] :],
            duration_s=reply["duration"],
            killed=reply["killed"],
            stdout_bytes=sizes[0],
            stderr_bytes=sizes[1],
        )

    async def write(self, files: Mapping[str, bytes]) -> None:
        """Write whole files below the work folder, making folders. Raises OSError for a path that leads elsewhere."""
        table = [[path, len(data)] for path, data in files.items()]
        await self._call({"op": "write", "files": table}, b"".join(files.values()), FILES_TIMEOUT_S, str(list(files)))

    async def read(self, path: str, *, cap_bytes: int = 1 << 20) -> bytes:
        """A regular file's content. Raises FileNotFoundError, or OSError for a link, a device, or more than the cap."""
        header = {"op": "read", "path": path, "cap": cap_bytes}
        return (await self._call(header, b"", FILES_TIMEOUT_S, path))[1]

    async def reset(self) -> str:
        """Remove every trace of what ran before. Returns "" when that is certain, else why it isn't."""
        reply, _ = await self._call({"op": "reset"}, b"", FILES_TIMEOUT_S)
        return str(reply["why"])

    async def close(self) -> None:
        """End the sandbox and everything in it; returns when its processes are gone."""
        self._end("closed")
        if self._process is not None:
            await asyncio.shield(asyncio.get_running_loop().run_in_executor(_starter, _reap, self._process))

    def kill(self, why: str) -> None:
        """End the running command; for the watch (called on the session's loop)."""
        if self.alive and self._replies:
            self._send({"op": "kill", "id": max(self._replies), "why": why})

    # ---- frames

    async def _call(
        self, header: dict[str, Any], body: bytes, timeout_s: float, what: str = "", watched: bool = False
    ) -> tuple[dict[str, Any], bytes]:
        async with self._lock:
            if not self.alive:
                raise SandboxLost(f"sandbox lost: {self.lost or 'never started'}")
            number, self._next = self._next, self._next + 1
            future = self._expect(number)
            if watched:
                self._watch.enter(self)
            timer = future.get_loop().call_later(timeout_s, self._end, "it stopped answering")
            try:
                self._send({"id": number, **header}, body)
                reply, data = await future
            except asyncio.CancelledError:
                if self.alive:
                    self._send({"op": "kill", "id": number, "why": "cancelled"})
                raise
            finally:
                timer.cancel()
                self._replies.pop(number, None)
                if watched:
                    self._watch.leave(self)
        if "errno" in reply:
            raise OSError(reply["errno"], reply["error"], what)
        return reply, data

    def _expect(self, number: int) -> asyncio.Future[tuple[dict[str, Any], bytes]]:
        self._replies[number] = asyncio.get_running_loop().create_future()
        return self._replies[number]

    def _send(self, header: Mapping[str, Any], body: bytes = b"") -> None:
        assert self._transport is not None
        text = json.dumps(header).encode()
        self._transport.write(FRAME.pack(len(text), len(body)) + text + body)

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        assert isinstance(transport, asyncio.Transport)
        self._transport = transport

    def data_received(self, data: bytes) -> None:
        self._buffer += data
        while len(self._buffer) >= FRAME.size:
            head, size = FRAME.unpack_from(self._buffer)
            stop = FRAME.size + head + size
            if stop > MAX_FRAME_BYTES:
                self._end("it sent a frame that is too large")
                return
            if len(self._buffer) < stop:
                return
            header = json.loads(bytes(self._buffer[FRAME.size : FRAME.size + head]))
            body = bytes(self._buffer[FRAME.size + head : stop])
            del self._buffer[:stop]
            future = self._replies.get(header["id"])  # None: its caller was cancelled
            if future is not None and not future.done():
                future.set_result((header, body))

    def connection_lost(self, error: Exception | None) -> None:
        self._end("its processes ended")

    def _end(self, why: str) -> None:
        if self._process is not None and not self.lost:
            _starter.submit(_reap, self._process)
        self.lost = self.lost or why
        if self._transport is not None:
            self._transport.close()
        for future in self._replies.values():
            if not future.done():
                future.set_exception(SandboxLost(f"sandbox lost: {self.lost}"))
                future.exception()  # a caller that was cancelled won't ask


def _spawn(backend: Backend, limits: Limits, theirs: socket.socket, errors: int) -> subprocess.Popen[bytes]:
    config = {
        "work": WORK,
        "places": PLACES,
        "path": f"{backend.prefix}/bin" if backend.prefix else "",
        "memory_bytes": limits.memory_bytes,
        "processes": limits.processes,
        "disk_bytes": limits.disk_bytes,
        "output_bytes": limits.output_bytes,
        "inodes": limits.inodes,
    }
    with theirs:
        return backend.spawn(
            limits, ["RUNNER", json.dumps(config)], stdin=theirs.fileno(), stdout=subprocess.DEVNULL, stderr=errors
        )


def _reap(process: subprocess.Popen[bytes], patience_s: float = 5.0) -> None:
    """Kill and collect a bwrap process; its sandbox dies with it."""
    kill(process)
    with contextlib.suppress(subprocess.TimeoutExpired):
        process.wait(patience_s)


def _discard(starting: asyncio.Future[subprocess.Popen[bytes]]) -> None:
    if not starting.cancelled() and starting.exception() is None:
        _starter.submit(_reap, starting.result())
