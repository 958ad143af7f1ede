"""HTTP to a server on a Unix socket: as many connections as there are requests in flight, kept for the next ones.

aiohttp, not httpx: with 64 requests in flight httpx's pool costs a host 14 ms of CPU per request, since it is quadratic
(httpcore 1.0), and 2.3 ms with a client per connection.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import aiohttp

IDLE_S = 30.0  # a connection that rested longer is not used again; the server closes at KEEP_ALIVE_S
KEEP_ALIVE_S = 60


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
        self._session: aiohttp.ClientSession | None = None

    async def request(self, method: str, path: str, body: Mapping[str, Any] | None = None) -> Answer:
        """Raises OSError: nobody listens, or the answer broke off. No time limit: use `asyncio.timeout`."""
        if self._session is None:  # a session belongs to the loop that it is made in
            connector = aiohttp.UnixConnector(self._socket, limit=0, keepalive_timeout=IDLE_S)
            self._session = aiohttp.ClientSession(connector=connector, timeout=aiohttp.ClientTimeout(total=None))
        try:
            async with self._session.request(method, f"http://engine{path}", json=body) as answer:
                return Answer(answer.status, await answer.read())
        except aiohttp.ClientError as error:
            raise AnswerError(f"{type(error).__name__}: {error}") from error

    async def close(self) -> None:
        if self._session is not None:
            await self._session.close()
