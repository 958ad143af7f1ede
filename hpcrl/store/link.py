"""From hosts to their node's log, over a Unix socket: many appends, few bytes and wake-ups.

on connecting, owner -> host: length u32, node name, failures u32, local u32
host -> owner: length u32, failures u32, whole frames (all that one loop tick queued); none: move it all to other nodes
owner -> host, for each batch in turn: errno i32 (0: durable), failures u32, segment u32, offset u64 of its first frame

`failures` counts batches that the log could not store. A host says how many it knew of when it sent a batch; where
there were more since, the batch is refused: what is in it may build on a record that isn't there.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import struct
from collections import deque
from collections.abc import Sequence
from errno import EIO
from pathlib import Path

from hpcrl.store.log import Log, Place
from hpcrl.store.records import SHARED, Kind, Record
from hpcrl.types import Receipt

_LENGTH = struct.Struct("<I")
_SENT = struct.Struct("<II")
_ANSWER = struct.Struct("<iIIQ")

NOTHING = Record(kind=Kind.TRANSITION)  # stands for the request to move the log

_Sent = list[tuple[Record, int, asyncio.Future[Receipt]]]  # record, bytes of its frame, the future given out


class LogServer:
    """Lets this node's hosts append to the log. Stop it before the log closes."""

    def __init__(self, log: Log, socket_path: Path) -> None:
        self._log, self._path = log, socket_path
        self._server: asyncio.Server | None = None
        self._hosts: set[asyncio.Task[None]] = set()

    async def start(self) -> None:
        old = os.umask(0o177)
        try:
            self._server = await asyncio.start_unix_server(self._serve, self._path)
        finally:
            os.umask(old)

    async def close(self) -> None:
        """Answer what was received, then hang up."""
        if self._server is not None:
            self._server.close()
            for task in self._hosts:
                task.cancel()
            await asyncio.gather(*self._hosts, return_exceptions=True)
            self._path.unlink(missing_ok=True)

    async def _serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        task = asyncio.current_task()
        assert task is not None
        self._hosts.add(task)
        name = self._log.node.encode()
        answers: asyncio.Queue[asyncio.Future[list[Place]] | None] = asyncio.Queue()
        answering = asyncio.create_task(self._answer(answers, writer))
        try:
            writer.write(_LENGTH.pack(len(name)) + name + _SENT.pack(self._log.failures, self._log.local))
            while True:
                size, known = _SENT.unpack(await reader.readexactly(_SENT.size))
                frames = await reader.readexactly(size)
                if not size:
                    answers.put_nowait(asyncio.ensure_future(self._settle()))
                elif known == self._log.failures:
                    answers.put_nowait(self._log.submit([frames]))
                else:
                    answers.put_nowait(_refused(self._log.last_error))
        except (asyncio.IncompleteReadError, OSError):
            pass  # the host is gone (or the log is closed); what it had sent whole is committed all the same
        except asyncio.CancelledError:
            pass  # by `close`, which waits for us
        finally:
            answers.put_nowait(None)
            await answering
            writer.close()
            self._hosts.discard(task)

    async def _settle(self) -> list[Place]:
        await self._log.seal()
        return [(0, 0)]

    async def _answer(
        self, answers: asyncio.Queue[asyncio.Future[list[Place]] | None], writer: asyncio.StreamWriter
    ) -> None:
        while (future := await answers.get()) is not None:
            try:
                ((segment, offset),) = await future
                answer = _ANSWER.pack(0, self._log.failures, segment, offset)
            except OSError as error:
                answer = _ANSWER.pack(error.errno or EIO, self._log.failures, 0, 0)
            with contextlib.suppress(OSError):
                writer.write(answer)
                await writer.drain()


class LogClient:
    """A host's side. `async with LogClient(path) as log: receipt = await log.append(record)`.

    Make it in a running loop. `closed` resolves when the owner is gone.
    """

    _SHARED = 4096  # remembered, so that a group's prompt and equal contents are stored once

    def __init__(self, socket_path: Path) -> None:
        self._path = socket_path
        self.node = ""
        self.closed: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self._queue: _Sent = []
        self._frames: list[bytes] = []
        self._sent: deque[_Sent] = deque()
        self._shared: dict[str, asyncio.Future[Receipt]] = {}
        self._task: asyncio.Task[None] | None = None

    async def __aenter__(self) -> LogClient:
        await self.connect()
        return self

    async def __aexit__(self, *_: object) -> None:
        await self.close()

    async def connect(self) -> None:
        """Raises OSError when no owner listens."""
        reader, self._writer = await asyncio.open_unix_connection(self._path)
        (size,) = _LENGTH.unpack(await reader.readexactly(_LENGTH.size))
        self.node = (await reader.readexactly(size)).decode()
        self._failures, self._local = _SENT.unpack(await reader.readexactly(_SENT.size))
        self._task = asyncio.create_task(self._receive(reader), name="log client")

    def append(self, record: Record) -> asyncio.Future[Receipt]:
        """Send a record; the future resolves when it is durable.

        It fails with OSError when the log couldn't store it, with ConnectionError when the owner went away (then it may
        be stored or not: append it again to the next owner, equal records count once). Records become durable in the
        order of the calls. Raises TypeError or ValueError at once when the record's meta is not JSON.
        """
        known = self._shared.get(record.hash) if record.kind in SHARED else None
        if known is not None and not (known.done() and (known.cancelled() or known.exception())):
            return known
        frame = record.frame()
        future: asyncio.Future[Receipt] = asyncio.get_running_loop().create_future()
        if self.closed.done():
            future.set_exception(self._error())
            return future
        if record.kind in SHARED:
            self._shared[record.hash] = future
            if len(self._shared) > self._SHARED:
                del self._shared[next(iter(self._shared))]
        if not self._queue:
            asyncio.get_running_loop().call_soon(self._send)
        self._queue.append((record, len(frame), future))
        self._frames.append(frame)
        return future

    async def flush(self) -> None:
        """Wait until what was appended is durable. Raises the first of the errors, if any failed."""
        futures = [future for batch in (*self._sent, self._queue) for _, _, future in batch]
        for result in await asyncio.gather(*futures, return_exceptions=True):
            if isinstance(result, BaseException):
                raise result

    async def settle(self) -> None:
        """Wait until other nodes can read what is durable: where the log is on this node's disk, until that has moved.

        Raises OSError when it can't be moved, or the owner is gone.
        """
        if not self._local:
            return
        self._send()
        future: asyncio.Future[Receipt] = asyncio.get_running_loop().create_future()
        if self.closed.done():
            raise self._error()
        self._sent.append([(NOTHING, 0, future)])
        self._writer.write(_SENT.pack(0, self._failures))
        await future

    async def close(self) -> None:
        """Flush (errors stay with their futures) and hang up."""
        if self._task is not None:
            with contextlib.suppress(OSError):
                await self.flush()
            self._task.cancel()
            await asyncio.gather(self._task, return_exceptions=True)

    def _send(self) -> None:
        batch, self._queue = self._queue, []
        frames, self._frames = self._frames, []
        if not batch:
            return  # it failed meanwhile
        if self.closed.done():
            self._fail([batch])
            return
        self._sent.append(batch)
        self._writer.writelines([_SENT.pack(sum(map(len, frames)), self._failures), *frames])

    async def _receive(self, reader: asyncio.StreamReader) -> None:
        try:
            while True:
                number, failures, segment, offset = _ANSWER.unpack(await reader.readexactly(_ANSWER.size))
                batch = self._sent.popleft()
                if number and failures > self._failures:
                    self._failures = failures
                    self._fail([*self._sent, self._queue], number)
                    self._queue, self._frames = [], []
                for record, size, future in batch:
                    if future.done():
                        pass
                    elif number:
                        future.set_exception(self._error(number))
                    else:
                        future.set_result(_receipt(record, self.node, segment, offset))
                    offset += size
        except (asyncio.IncompleteReadError, OSError):
            pass
        finally:
            if not self.closed.done():
                self.closed.set_result(None)
            self._fail([*self._sent, self._queue])
            self._sent.clear()
            self._writer.close()

    def _fail(self, batches: Sequence[_Sent], number: int = 0) -> None:
        """These will not be stored: they were appended when it was not yet known that one before them failed."""
        for batch in batches:
            for _, _, future in batch:
                if not future.done():
                    future.set_exception(self._error(number))

    def _error(self, number: int = 0) -> OSError:
        if not number:
            return ConnectionError("the log's owner is gone")
        return OSError(number, os.strerror(number), f"log of {self.node}")


def _refused(error: OSError) -> asyncio.Future[list[Place]]:
    future: asyncio.Future[list[Place]] = asyncio.get_running_loop().create_future()
    future.set_exception(OSError(*error.args))
    return future


def _receipt(record: Record, node: str, segment: int, offset: int) -> Receipt:
    return Receipt(
        trajectory=record.trajectory,
        attempt=record.attempt,
        step=record.step,
        kind=record.kind.name,
        hash=record.hash,
        node=node,
        segment=segment,
        offset=offset,
    )
