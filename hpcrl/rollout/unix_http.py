"""HTTP/1.1 to a server on a Unix socket: as many connections as there are requests in flight, kept for the next ones.

Speaks just what vLLM's server answers (a length, then a body). httpx costs a host 2.3 ms of CPU per request with one
connection each and 14 ms with its pool at 64 in flight (the pool is quadratic: httpcore 1.0); this costs 0.2 ms.
"""

from __future__ import annotations

import asyncio
import json
import time
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

IDLE_S = 30.0  # a connection that rested longer is not used again; the server closes at KEEP_ALIVE_S
KEEP_ALIVE_S = 60
HEADER_BYTES = 1 << 16


class AnswerError(OSError):
    """No answer, or none that HTTP allows."""


@dataclass(frozen=True, slots=True)
class Answer:
    status: int
    body: bytes

    def json(self) -> Any:
        return json.loads(self.body)


class UnixHttp:
    """Connections to one Unix socket. Cancelling a call closes its connection, which is how a server learns of it."""

    def __init__(self, socket: Path) -> None:
        self._socket = str(socket)
        self._resting: list[tuple[float, asyncio.StreamReader, asyncio.StreamWriter]] = []

    async def request(self, method: str, path: str, body: Mapping[str, Any] | None = None) -> Answer:
        """Raises OSError: nobody listens, or the answer broke off. No time limit: use `asyncio.timeout`."""
        data = b"" if body is None else json.dumps(body, separators=(",", ":")).encode()
        head = f"{method} {path} HTTP/1.1\r\nhost: engine\r\ncontent-length: {len(data)}\r\n"
        if body is not None:
            head += "content-type: application/json\r\n"
        message = head.encode() + b"\r\n" + data
        while (rested := self._take()) is not None:
            answer = await self._exchange(*rested, message)
            if answer is not None:
                return answer
            # The server closed it while it rested; it has seen nothing of the request.
        answer = await self._exchange(*await self._open(), message)
        if answer is None:
            raise AnswerError(f"{path}: the server closed the connection without an answer")
        return answer

    async def close(self) -> None:
        while self._resting:
            _, _, writer = self._resting.pop()
            writer.close()

    async def _open(self) -> tuple[asyncio.StreamReader, asyncio.StreamWriter]:
        return await asyncio.open_unix_connection(self._socket, limit=HEADER_BYTES)

    def _take(self) -> tuple[asyncio.StreamReader, asyncio.StreamWriter] | None:
        """The connection that rested shortest, so that surplus ones age and go."""
        oldest = time.monotonic() - IDLE_S
        while self._resting and self._resting[0][0] < oldest:
            self._resting.pop(0)[2].close()
        while self._resting:
            _, reader, writer = self._resting.pop()
            if not (reader.at_eof() or writer.is_closing()):
                return reader, writer
            writer.close()
        return None

    async def _exchange(
        self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter, message: bytes
    ) -> Answer | None:
        """None: the connection was closed before a byte of an answer."""
        whole = False
        try:
            writer.write(message)
            try:
                head = (await reader.readuntil(b"\r\n\r\n")).decode("latin-1").lower()
            except asyncio.IncompleteReadError as error:
                if error.partial:
                    raise AnswerError("the answer broke off in its head") from error
                return None
            except ConnectionError:
                return None
            status, fields = _parse(head)
            try:
                body = await reader.readexactly(int(fields["content-length"]))
            except (KeyError, ValueError) as error:
                raise AnswerError(f"an answer without a length: {head.splitlines()[0]}") from error
            except asyncio.IncompleteReadError as error:
                raise AnswerError(f"the answer broke off after {len(error.partial)} bytes") from error
            whole = fields.get("connection") != "close"
            return Answer(status, body)
        finally:
            if whole:
                self._resting.append((time.monotonic(), reader, writer))
            else:
                writer.close()


def _parse(head: str) -> tuple[int, dict[str, str]]:
    first, *lines = head.split("\r\n")
    fields = dict(line.split(": ", 1) for line in lines if ": " in line)
    try:
        return int(first.split(" ", 2)[1]), fields
    except (IndexError, ValueError) as error:
        raise AnswerError(f"not an HTTP answer: {first[:100]!r}") from error
