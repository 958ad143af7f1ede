"""Sandbox nodes, and the lines by which hosts call them, worker to worker."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import time
from collections.abc import Mapping, Sequence
from dataclasses import asdict
from typing import Any

from distributed.batched import BatchedSend
from distributed.comm import connect
from distributed.security import Security

from hpcrl.config import Config
from hpcrl.layout import RunPaths
from hpcrl.rollout.loop import AttemptFault
from hpcrl.sandbox.pool import Lease, Pool
from hpcrl.types import (
    Cause,
    CommandResult,
    Fault,
    HpcrlError,
)
from hpcrl.workers.guest import LEAVING, Guest, open_listener, security

logger = logging.getLogger(__name__)

LEAVE_S = 30.0  # in which what control had just placed here has come
RELEASE_S = 5.0  # for a node to take a sandbox back
LINE = "2ms"  # what gathers in that time goes between host and sandbox node as one message


class SandboxNode:
    """Serves a pool of sandboxes to hosts, over a listener of its own that outlives the Dask worker."""

    def __init__(self, paths: RunPaths, config: Config, pool: Pool, capacity: int, name: str) -> None:
        self._paths, self._config, self._pool, self._capacity, self._name = paths, config, pool, capacity, name
        self._listener: Any = None
        self._taking: dict[tuple[str, int], asyncio.Task[Lease]] = {}
        self._leaving = False
        self.guest: Guest | None = None

    async def start(self) -> None:
        """Raises what keeps the first sandboxes from starting."""
        await self._pool.warm()
        self._listener = await open_listener(self._config, security(self._paths), self._serve)

    async def call(self, method: str, arguments: Mapping[str, Any]) -> Any:
        match method:
            case "describe":
                return {
                    "role": "sandbox",
                    "node": self._name,
                    "address": self._listener.contact_address,
                    "capacity": 0 if self._leaving else self._capacity,
                }  # of tickets
            case "stop":
                assert self.guest is not None
                self.guest.stop.set()
                return None
        raise ValueError(f"a sandbox node has no method {method!r}")

    async def leave(self, within_s: float) -> None:
        """Have control place nothing new here; end when nothing is lent any more, or `within_s` are over."""
        assert self.guest is not None
        self._leaving, until = True, time.monotonic() + within_s
        if self.guest.worker is not None:  # else control hears of it when it is back
            with contextlib.suppress(Exception):
                self.guest.worker.log_event(LEAVING, self._listener.contact_address)
        await asyncio.sleep(min(within_s, LEAVE_S))
        while (self._taking or self._pool.stats().leased) and time.monotonic() < until:  # noqa: ASYNC110 (of many)
            await asyncio.sleep(0.1)
        self.guest.stop.set()

    async def close(self) -> None:
        if self._listener is not None:
            stopping = self._listener.stop()
            if asyncio.iscoroutine(stopping):
                await stopping
        await self._pool.close()

    async def _serve(self, comm: Any) -> None:
        """One host's line: calls come in, each is served beside the others, answers go back in any order."""
        answers = BatchedSend(interval=LINE)
        answers.start(comm)
        calls: set[asyncio.Task[None]] = set()
        leases: set[tuple[str, int]] = set()
        try:
            while True:
                for message in await comm.read():
                    task = asyncio.create_task(self._answer(answers, leases, message))
                    calls.add(task)
                    task.add_done_callback(calls.discard)
        except OSError:
            pass  # the host went away; its trajectories are taken up by flow
        finally:
            for task in calls:
                task.cancel()
            await asyncio.gather(*calls, return_exceptions=True)
            answers.abort()
            for trajectory, attempt in leases:  # the host will not give them back
                await self._pool.release(trajectory, attempt)

    async def _answer(self, answers: Any, leases: set[tuple[str, int]], message: dict[str, Any]) -> None:
        try:
            value = await self._perform(leases, **message["call"])
            answer = {"id": message["id"], "value": value}
        except Exception as error:
            kind = "invalid" if isinstance(error, ValueError) and not isinstance(error, HpcrlError) else "lost"
            number = error.errno if isinstance(error, OSError) else None
            text = getattr(error, "strerror", None) or f"{type(error).__name__}: {error}"
            text = text.encode(errors="backslashreplace").decode()
            answer = {"id": message["id"], "error": text, "errno": number, "kind": kind}
        with contextlib.suppress(OSError):
            answers.send(answer)

    async def _perform(
        self,
        leases: set[tuple[str, int]],
        op: str,
        trajectory: str,
        attempt: int,
        first: bool = False,
        **arguments: Any,
    ) -> Any:
        who = (trajectory, attempt)
        taking = self._taking.get(who)
        if op == "release":
            leases.discard(who)
            if taking is not None:  # it was given up while it waited for a sandbox
                taking.cancel()
                await asyncio.wait({taking})
            return await self._pool.release(trajectory, attempt)
        if first and taking is None:
            leases.add(who)
            taking = self._taking[who] = asyncio.create_task(self._pool.acquire(trajectory, attempt))
            taking.add_done_callback(lambda _: self._taking.pop(who, None))
            await asyncio.wait({taking})
            if not taking.cancelled():
                taking.result()
        elif taking is not None:
            await asyncio.wait({taking})
        lease = self._pool.lease(trajectory, attempt)  # a lost one is never silently a fresh one
        match op:
            case "run":
                command = list(map(_text, arguments.pop("command")))
                return asdict(await lease.run(command, **arguments))
            case "write":
                return await lease.write({_text(path): data for path, data in arguments["files"]})
            case "read":
                return await lease.read(_text(arguments["path"]), cap_bytes=arguments["cap_bytes"])
            case "renew":
                return await lease.renew()
        raise ValueError(f"a sandbox has no operation {op!r}")


class Line:
    """A host's one connection to a sandbox node; many calls share it."""

    def __init__(self, address: str, secure: Security) -> None:
        self._address, self._secure = address, secure
        self._calls: Any = None  # what sends them, several in one message
        self._opening = asyncio.Lock()
        self._waiting: dict[int, asyncio.Future[Any]] = {}
        self._reader: asyncio.Task[None] | None = None
        self._number = 0

    async def call(self, **call: Any) -> Any:
        """Raises what the sandbox raised (OSError with errno, ValueError); AttemptFault when it or its node is lost."""
        try:
            async with self._opening:
                if self._calls is None or self._calls.closed():
                    await self._open()
            self._number += 1
            answer: asyncio.Future[Any] = asyncio.get_running_loop().create_future()
            self._waiting[self._number] = answer
            self._calls.send({"id": self._number, "call": call})
            message = await answer
        except OSError as error:
            text = f"sandbox node {self._address}: {error}"
            raise AttemptFault(Fault(cause=Cause.PLATFORM, where="sandbox", message=text)) from error
        if "error" not in message:
            return message["value"]
        if message["errno"]:
            raise OSError(message["errno"], message["error"])
        if message["kind"] == "invalid":
            raise ValueError(message["error"])
        raise AttemptFault(Fault(cause=Cause.PLATFORM, where="sandbox", message=message["error"]))

    async def _open(self) -> None:
        comm = await connect(self._address, timeout=5, **self._secure.get_connection_args("worker"))
        self._calls = BatchedSend(interval=LINE)
        self._calls.start(comm)
        self._reader = asyncio.create_task(self._read(comm, self._calls))

    async def _read(self, comm: Any, calls: Any) -> None:
        error = ConnectionError("closed")
        try:
            while True:
                for message in await comm.read():
                    answer = self._waiting.pop(message["id"], None)
                    if answer is not None and not answer.done():
                        answer.set_result(message)
        except OSError as failure:
            error = ConnectionError(str(failure))
        finally:
            calls.abort()
            if self._calls is calls:  # else there is a new connection already, and those who wait, wait for it
                waiting, self._waiting = self._waiting, {}
                for answer in waiting.values():
                    if not answer.done():
                        answer.set_exception(error)

    def close(self) -> None:
        if self._reader is not None:
            self._reader.cancel()
        if self._calls is not None:
            self._calls.abort()


class RemoteSandbox:
    """A trajectory's sandbox on another node (implements types.Sandbox); its first call takes one from the pool."""

    def __init__(self, line: Line, trajectory: str, attempt: int) -> None:
        self._line, self._who = line, {"trajectory": trajectory, "attempt": attempt}
        self._held = False

    async def run(
        self, command: Sequence[str], *, stdin: bytes = b"", timeout_s: float = 30.0, cap_bytes: int = 65536
    ) -> CommandResult:
        words = list(map(_bytes, command))
        row = await self._call(op="run", command=words, stdin=stdin, timeout_s=timeout_s, cap_bytes=cap_bytes)
        return CommandResult(**row)

    async def write(self, files: Mapping[str, bytes]) -> None:
        await self._call(op="write", files=[(_bytes(path), data) for path, data in files.items()])

    async def read(self, path: str, *, cap_bytes: int = 1 << 20) -> bytes:
        data: bytes = await self._call(op="read", path=_bytes(path), cap_bytes=cap_bytes)
        return data

    async def renew(self) -> None:
        await self._call(op="renew")

    async def release(self) -> None:
        """Give it back, if its node can be reached: one that is gone has nothing to take, one that hangs finds out."""
        if self._held:
            with contextlib.suppress(AttemptFault, OSError, TimeoutError):
                async with asyncio.timeout(RELEASE_S):
                    await self._line.call(op="release", **self._who)

    async def _call(self, **call: Any) -> Any:
        first, self._held = not self._held, True
        return await self._line.call(**call, **self._who, first=first)


def _bytes(text: str) -> bytes:
    """What an agent wrote may be no valid text (a lone surrogate), which Dask's messages don't take."""
    return text.encode(errors="surrogatepass")


def _text(data: bytes) -> str:
    return data.decode(errors="surrogatepass")


class NoSandbox:
    """For environments that need none."""

    async def run(self, command: Sequence[str], **_: Any) -> CommandResult:
        raise RuntimeError("this run has no sandbox pool: add a [[sandbox]] table")

    async def write(self, files: Mapping[str, bytes]) -> None:
        await self.run(())

    async def read(self, path: str, **_: Any) -> bytes:
        await self.run(())
        return b""

    async def renew(self) -> None:
        await self.run(())

    async def release(self) -> None:
        return None
