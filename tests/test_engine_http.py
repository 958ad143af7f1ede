"""UnixHttp against a server that does what real ones do wrong."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable
from pathlib import Path

import pytest

from hpcrl.rollout.unix_http import AnswerError, UnixHttp

Handler = Callable[[int, bytes, asyncio.StreamWriter], Awaitable[bool]]
OK = b"HTTP/1.1 200 OK\r\nContent-Length: 2\r\n\r\n{}"


class Server:
    """Counts connections and requests; `handle(request number, head, writer)` says whether to keep the connection."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self.connections = self.requests = self.broken = 0
        self.handle: Handler = self.answer

    async def answer(self, number: int, head: bytes, writer: asyncio.StreamWriter) -> bool:
        writer.write(OK)
        return True

    async def serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self.connections += 1
        try:
            while True:
                head = await reader.readuntil(b"\r\n\r\n")
                self.requests += 1
                if not await self.handle(self.requests, head, writer):
                    break
        except (asyncio.IncompleteReadError, ConnectionError):
            self.broken += 1
        finally:
            writer.close()


@pytest.fixture
async def server(tmp_path: Path) -> AsyncIterator[Server]:
    one = Server(tmp_path / "s")
    listener = await asyncio.start_unix_server(one.serve, one.path)
    yield one
    listener.close()


async def test_connections_are_used_again(server: Server) -> None:
    http = UnixHttp(server.path)
    for _ in range(3):
        answers = await asyncio.gather(*(http.request("GET", "/x") for _ in range(8)))
        assert [(answer.status, answer.json()) for answer in answers] == [(200, {})] * 8
    assert (server.connections, server.requests) == (8, 24)
    await http.close()


async def test_a_connection_that_the_server_closed_while_it_rested(server: Server) -> None:
    async def answer_then_close(number: int, head: bytes, writer: asyncio.StreamWriter) -> bool:
        writer.write(OK)
        return False

    server.handle = answer_then_close
    http = UnixHttp(server.path)
    for _ in range(3):
        assert (await http.request("POST", "/x", {"a": 1})).status == 200
        await asyncio.sleep(0.05)
    assert (server.connections, server.requests) == (3, 3)
    await http.close()


@pytest.mark.parametrize(
    "answer",
    [
        b"",
        b"HTTP/1.1 200 OK\r\nCont",
        b"HTTP/1.1 200 OK\r\nContent-Length: 20\r\n\r\n{}",
        b"SSH-2.0-OpenSSH\r\n\r\n",
    ],
)
async def test_answers_that_are_none(server: Server, answer: bytes) -> None:
    async def broken(number: int, head: bytes, writer: asyncio.StreamWriter) -> bool:
        writer.write(answer)
        return False

    server.handle = broken
    http = UnixHttp(server.path)
    with pytest.raises(AnswerError):
        await http.request("GET", "/x")
    server.handle = server.answer
    assert (await http.request("GET", "/x")).status == 200
    await http.close()


async def test_nobody_listens(tmp_path: Path) -> None:
    http = UnixHttp(tmp_path / "none")
    with pytest.raises(OSError):
        await http.request("GET", "/x")
    await http.close()


async def test_cancelling_closes_the_connection(server: Server) -> None:
    async def never(number: int, head: bytes, writer: asyncio.StreamWriter) -> bool:
        return True

    server.handle = never
    http = UnixHttp(server.path)
    with pytest.raises(TimeoutError):
        async with asyncio.timeout(0.1):
            await http.request("GET", "/x")
    await asyncio.sleep(0.05)
    assert server.broken == 1
    await http.close()
