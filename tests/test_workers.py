"""Sandbox nodes and the lines to them: a real pool behind a real listener, called as hosts call it."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import pytest
from store_parts import run_folder

from hpcrl import launch
from hpcrl.config import Config, SandboxPool
from hpcrl.rollout.loop import AttemptFault
from hpcrl.sandbox.backend import find_backend
from hpcrl.sandbox.pool import Pool
from hpcrl.types import Cause
from hpcrl.workers import sandboxes
from hpcrl.workers.guest import security
from hpcrl.workers.hosts import leaves_s
from hpcrl.workers.sandboxes import Line, RemoteSandbox, SandboxNode

SESSIONS = 2


@pytest.fixture
async def node(tmp_path: Path) -> AsyncIterator[tuple[SandboxNode, Line]]:
    paths = run_folder(tmp_path)
    launch.make_certificate(paths)
    config = Config.model_validate({"phase": [{"name": "p", "trajectories": 2, "group_size": 2}]})
    settings = SandboxPool(sessions=SESSIONS, warm=SESSIONS, memory_mib=64, disk_mib=2)
    served = SandboxNode(paths, config, Pool(settings, find_backend()), SESSIONS, "here-s0")
    await served.start()
    address = (await served.call("describe", {}))["address"]
    line = Line(address, security(paths))
    yield served, line
    line.close()
    await served.close()


def box(line: Line, trajectory: str, attempt: int = 1) -> RemoteSandbox:
    return RemoteSandbox(line, trajectory, attempt)


@pytest.mark.parametrize(
    ("left_s", "took", "leaves"),
    [(21, [], False), (19, [], True), (60, [1.0] * 95 + [300.0] * 5, True), (60, [1.0] * 96 + [300.0] * 4, False),
     (330, [300.0], False), (310, [300.0], True), (float("inf"), [1e9], False)],
)  # fmt: skip
def test_a_host_leaves_while_there_is_time_for_a_step(left_s: float, took: list[float], leaves: bool) -> None:
    assert (left_s < leaves_s(took)) is leaves


@pytest.fixture
def told(node: tuple[SandboxNode, Line], monkeypatch: pytest.MonkeyPatch) -> asyncio.Event:
    """Set when the node, which leaves without delay, ends."""
    monkeypatch.setattr(sandboxes, "LEAVE_S", 0.0)
    stop = asyncio.Event()
    node[0].guest = cast(Any, SimpleNamespace(worker=None, stop=stop))
    return stop


async def test_a_sandbox_node_that_leaves_waits_for_what_is_lent(
    node: tuple[SandboxNode, Line], told: asyncio.Event
) -> None:
    (served, line), stop = node, told
    held = box(line, "t")
    await held.run(["true"])
    leaving = asyncio.create_task(served.leave(60))
    await asyncio.sleep(0.3)
    assert not stop.is_set() and (await served.call("describe", {}))["capacity"] == 0
    assert (await held.run(["echo", "still"])).stdout == b"still\n"
    await held.release()
    await leaving
    assert stop.is_set()


async def test_a_sandbox_node_that_leaves_waits_no_longer_than_it_may(
    node: tuple[SandboxNode, Line], told: asyncio.Event
) -> None:
    (served, line), stop = node, told
    await box(line, "t").run(["true"])
    await served.leave(0.3)
    assert stop.is_set()


async def test_sandboxes_stand_before_the_first_call(node: tuple[SandboxNode, Line]) -> None:
    assert node[0]._pool.stats().idle == SESSIONS


async def test_a_call_given_up_while_it_waited_for_a_sandbox_costs_none(node: tuple[SandboxNode, Line]) -> None:
    _, line = node
    holders = [box(line, f"t{number}") for number in range(SESSIONS)]
    for holder in holders:
        await holder.run(["true"])
    waiter = box(line, "waiter")
    call = asyncio.create_task(waiter.run(["true"]))
    await asyncio.sleep(0.2)  # it has reached the node, which has no sandbox left
    call.cancel()
    await waiter.release()
    for holder in holders:
        await holder.release()
    async with asyncio.timeout(10):
        for round_ in range(3 * SESSIONS):  # each sandbox can be had, again and again
            taken = [box(line, f"r{round_}.{number}") for number in range(SESSIONS)]
            assert [(await one.run(["echo", "x"])).stdout for one in taken] == [b"x\n"] * SESSIONS
            for one in taken:
                await one.release()


async def test_first_calls_at_once_share_one_sandbox(node: tuple[SandboxNode, Line]) -> None:
    served, line = node
    one = box(line, "t")
    results = await asyncio.gather(one.write({"a": b"1"}), one.run(["sleep", "0.1"]), one.run(["echo", "2"]))
    assert results[2].stdout == b"2\n" and served._pool.stats().leased == 1
    assert await one.read("a") == b"1"


async def test_what_the_policy_wrote_is_no_fault_of_the_platform(node: tuple[SandboxNode, Line]) -> None:
    _, line = node
    one, other = box(line, "t"), box(line, "u")
    await other.write({"kept": b"here"})
    for word in ("\ud800", "a\0b"):  # no valid text; no valid argument
        result = await one.run(["echo", word])
        assert result.code == 127 or word not in ("a\0b",)
        with pytest.raises(OSError, match=r"embedded null|utf-8|surrogates"):
            await one.read(f"name{word}")
    assert (await one.run(["echo", "on"])).stdout == b"on\n"
    assert await other.read("kept") == b"here"  # the line that they share lives


async def test_errors_keep_their_type_on_the_way(node: tuple[SandboxNode, Line]) -> None:
    _, line = node
    one = box(line, "t")
    with pytest.raises(FileNotFoundError):
        await one.read("nothing")
    with pytest.raises(OSError, match="below the work folder"):
        await one.write({"../out": b""})
    with pytest.raises(ValueError, match="empty command"):
        await one.run([])
    await box(line, "t", attempt=2).run(["true"])  # takes the sandbox over
    with pytest.raises(AttemptFault) as lost:
        await one.run(["true"])
    assert lost.value.fault.cause is Cause.PLATFORM


async def test_a_host_that_goes_away_gives_its_sandboxes_back(node: tuple[SandboxNode, Line], tmp_path: Path) -> None:
    served, line = node
    other = Line(served._listener.contact_address, line._secure)
    held: list[Any] = [box(other, f"t{number}") for number in range(SESSIONS)]
    for one in held:
        await one.run(["true"])
    other.close()
    async with asyncio.timeout(10):
        assert (await box(line, "new").run(["echo", "x"])).stdout == b"x\n"
