"""The agent loop over a real log: what it records, how it goes on from any record, how faults are labelled."""

from __future__ import annotations

import asyncio
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from loop_parts import loop, node_log, right_way, stored, ticket

from hpcrl.layout import RunPaths
from hpcrl.rollout.engine import EngineFault
from hpcrl.rollout.loop import DISK, UNKNOWN, AttemptFault, History, history_of
from hpcrl.rollout.render import Renderer
from hpcrl.rollout.scripted import ScriptedEngine
from hpcrl.sandbox.memory import MemorySandbox
from hpcrl.store.index import Store
from hpcrl.store.link import LogClient
from hpcrl.store.records import Kind, Record
from hpcrl.store.verify import missing
from hpcrl.types import (
    Cause,
    Ended,
    Fault,
    Message,
    Span,
    State,
    StepOutcome,
    ToolCall,
    ToolSpec,
)


async def test_a_trajectory_is_a_chain_of_complete_records(log: LogClient, renderer: Renderer, tmp_path: Path) -> None:
    ended = await loop(log, renderer, ticket()).run()
    assert (ended.status, ended.rewards, ended.num_steps) == (State.COMPLETED, {"outcome": 1.0}, 3)
    store = await stored(tmp_path)
    chain = store.chain(ended.trajectory, ended.head)
    act, observe = Kind.ACT, Kind.OBSERVE
    assert [row.kind for row in chain] == [Kind.ADOPT, act, observe, act, observe, act, observe, Kind.END]
    assert not [name for row in store.records(ended.trajectory) for name in missing(row)]
    sequence = store.sequence(ended.trajectory, ended.head, 1.0)
    text = renderer.transcript(sequence.ids)
    assert text == "<bos><u>find N<e><a>ls<e><t>D7 N5 V1 Y6<e><a>cat N5<e><t>233<e><a>answer 233<e>"
    said = renderer.transcript(sequence.ids[sequence.sampled])
    assert said == "ls<e>cat N5<e>answer 233<e>"
    assert ended.num_sampled == int(sequence.sampled.sum()) and ended.num_tokens == len(sequence.ids)


async def test_a_chain_cut_after_any_record_ends_as_the_undisturbed_one(
    log: LogClient, renderer: Renderer, tmp_path: Path
) -> None:
    ended = await loop(log, renderer, ticket()).run()
    store = await stored(tmp_path)
    whole = store.chain(ended.trajectory, ended.head)
    tokens = store.sequence(ended.trajectory, ended.head, 1.0)
    for cut in range(1, len(whole)):
        head = whole[cut - 1].hash
        history = history_of(store, ended.trajectory, head)
        assert isinstance(history, History)
        again = await loop(log, renderer, ticket(attempt=1 + cut, adopt=head), history=history).run()
        assert replace(again, attempt=1, head="", duration_s=0) == replace(ended, head="", duration_s=0)
        store.refresh()
        other = store.sequence(again.trajectory, again.head, 1.0)
        for column in ("ids", "sampled", "logprobs", "versions"):
            assert np.array_equal(getattr(other, column), getattr(tokens, column)), (cut, column)
        assert {row.attempt for row in store.chain(again.trajectory, again.head)} == ({1, 1 + cut})


async def test_what_an_open_segment_alone_holds_is_stored_again_by_who_adopts_it(
    log: LogClient, renderer: Renderer, tmp_path: Path
) -> None:
    ended = await loop(log, renderer, ticket()).run()
    store = await stored(tmp_path)
    head = next(row.hash for row in store.chain(ended.trajectory, ended.head) if row.kind is Kind.OBSERVE)
    history = history_of(store, ended.trajectory, head)
    assert isinstance(history, History)
    assert [row.kind for row in history.unsettled] == [Kind.PROMPT, Kind.ADOPT, Kind.ACT, Kind.OBSERVE]
    async with node_log(tmp_path / "other", "n2") as second:
        again = await loop(second, renderer, ticket(attempt=2, adopt=head), history=history).run()
    other = RunPaths(tmp_path / "other")
    # The first node's log was lost to a power cut: the second's alone holds the whole chain.
    with Store(other) as alone:
        assert alone.complete(again.trajectory, again.head)
        tokens = alone.sequence(again.trajectory, again.head, 1.0)
    assert np.array_equal(tokens.ids, store.sequence(ended.trajectory, ended.head, 1.0).ids)
    # Once its segment is closed nothing is stored twice.
    with Store(other) as settled:
        assert not settled.unsettled(again.trajectory, again.head)


async def test_the_store_says_how_one_has_ended(log: LogClient, renderer: Renderer, tmp_path: Path) -> None:
    ended = await loop(log, renderer, ticket()).run()
    store = await stored(tmp_path)
    assert store.head(ended.trajectory) == ended.head
    assert store.ended(ended.trajectory, ended.head) == ended
    before = store.chain(ended.trajectory, ended.head)[-2].hash
    assert store.ended(ended.trajectory, before) is None


@pytest.mark.parametrize("lost", [0, 1, 2, 3])
async def test_one_record_that_was_not_stored_stops_the_attempt_before_it(
    log: LogClient, renderer: Renderer, tmp_path: Path, lost: int
) -> None:
    """One batch of the log fails, those after it don't: nothing may rest on what isn't there."""
    broken = await loop(FailingLog(log, lost, count=1), renderer, ticket()).run()
    assert broken.status is State.RETRYING and broken.head == ""
    assert broken.fault is not None and broken.fault.cause is Cause.PLATFORM
    store = await stored(tmp_path)
    rows = store.rows(broken.trajectory)
    assert all(not row.parent or row.parent in rows for row in rows.values()), "nothing is stored after the hole"
    head = store.head(broken.trajectory) or ""
    history = history_of(store, broken.trajectory, head) if head else None
    ended = await loop(log, renderer, ticket(attempt=2, adopt=head), history=history).run()
    assert (ended.status, ended.rewards) == (State.COMPLETED, {"outcome": 1.0})
    store.refresh()
    assert store.head(ended.trajectory) == ended.head and store.complete(ended.trajectory, ended.head)
    assert renderer.transcript(store.sequence(ended.trajectory, ended.head, 1.0).ids).count("answer 233") == 1


@pytest.mark.parametrize("value", [1e300, float("nan"), float("inf"), "much"])
async def test_a_reward_that_is_no_number_is_the_rewards_fault(log: LogClient, renderer: Renderer, value: Any) -> None:
    ended = await loop(log, renderer, ticket(), environment=Odd("", value)).run()
    assert (ended.status, ended.rewards) == (State.FAILED, {})
    assert ended.fault is not None and ended.fault.cause is Cause.REWARD


class Broken:
    """An environment that fails at one place."""

    def __init__(self, where: str, effects: str = "pure") -> None:
        self.where, self.effects, self.steps = where, effects, 0

    def tools(self) -> tuple[ToolSpec, ...]:
        return ()

    async def reset(self, sandbox: Any) -> tuple[Message, ...]:
        self.fail("reset")
        return (Message.of("user", "go"),)

    def parse(self, text: str) -> tuple[ToolCall, ...]:
        self.fail("parse")
        return (ToolCall(name="t", arguments={}, effects=self.effects),)  # type: ignore[arg-type]

    async def step(self, calls: Sequence[ToolCall], sandbox: Any) -> StepOutcome:
        self.fail("step")
        self.steps += 1
        if self.where == "sleep":
            await asyncio.sleep(30)
        return StepOutcome(results=(), messages=(Message.of("tool", "x"),), done=self.where == "rewards")

    async def rewards(self, sandbox: Any) -> Mapping[str, float]:
        self.fail("rewards")
        return {"outcome": 0.0}

    def state(self) -> bytes:
        return b""

    def restore(self, state: bytes) -> None:
        pass

    def fail(self, where: str) -> None:
        if self.where == where:
            raise TimeoutError("no answer")


@pytest.mark.parametrize("where", ["reset", "parse", "step"])
async def test_an_environment_that_breaks_is_not_the_policys_fault(
    log: LogClient, renderer: Renderer, tmp_path: Path, where: str
) -> None:
    ended = await loop(log, renderer, ticket(), environment=Broken(where)).run()
    assert ended.status is State.RETRYING and not ended.rewards
    assert ended.fault is not None and ended.fault.cause is Cause.ENVIRONMENT and ended.fault.where == f"find.{where}"
    store = await stored(tmp_path)
    assert not [row for row in store.records(ended.trajectory) if row.kind is Kind.END], "it is open, to be taken up"


class Odd(Broken):
    """An environment that returns what its protocol doesn't allow, or ends more than itself."""

    def tools(self) -> Any:
        return self.odd("tools", ())

    async def reset(self, sandbox: Any) -> Any:
        return self.odd("reset", (Message.of("user", "go"),))

    def parse(self, text: str) -> Any:
        return self.odd("parse", (ToolCall(name="t", arguments={}),))

    async def step(self, calls: Any, sandbox: Any) -> Any:
        return self.odd("step", StepOutcome(results=(), messages=(), done=True))

    def __init__(self, where: str, reward: Any = 0.0) -> None:
        super().__init__(where)
        self.reward = reward

    async def rewards(self, sandbox: Any) -> Any:
        return {"outcome": self.reward}

    def odd(self, where: str, value: Any) -> Any:
        place, _, what = self.where.partition(":")
        if place != where:
            return value
        if what == "exit":
            raise SystemExit(3)
        if what == "cancel":
            raise asyncio.CancelledError
        surrogate = (Message.of("tool", "\ud800"),)
        return {"none": None, "text": "text", "surrogate": surrogate}[what]


@pytest.mark.parametrize(
    "where",
    ["tools:none", "reset:none", "reset:text", "reset:exit", "reset:cancel", "parse:none", "parse:exit", "step:none"],
)
async def test_whatever_an_environment_returns_or_raises_is_its_own_fault(
    log: LogClient, renderer: Renderer, where: str
) -> None:
    ended = await loop(log, renderer, ticket(), environment=Odd(where)).run()
    assert ended.status is State.RETRYING and ended.fault is not None
    assert (ended.fault.cause, ended.fault.where) == (Cause.ENVIRONMENT, f"find.{where.partition(':')[0]}")


async def test_a_cancelled_loop_is_cancelled_and_no_fault(log: LogClient, renderer: Renderer) -> None:
    running = asyncio.create_task(loop(log, renderer, ticket(), environment=Broken("sleep")).run())
    await asyncio.sleep(0.2)
    running.cancel()
    with pytest.raises(asyncio.CancelledError):
        await running


class Scored(Broken):
    """Scored in a sandbox, which is lost meanwhile for the first attempt."""

    async def rewards(self, sandbox: Any) -> Mapping[str, float]:
        await sandbox.renew()
        if self.where == "lost":
            raise AttemptFault(Fault(cause=Cause.PLATFORM, where="sandbox", message="gone"))
        return {"outcome": float(not sandbox.files)}


async def test_a_trajectory_whose_scoring_loses_its_sandbox_is_scored_again(
    log: LogClient, renderer: Renderer, tmp_path: Path
) -> None:
    box = MemorySandbox()
    await box.write({"left": b"by the agent"})
    ended = await loop(log, renderer, ticket(), environment=Scored("lost"), sandbox=box).run()
    assert (ended.status, ended.rewards) == (State.RETRYING, {})
    assert ended.fault is not None and ended.fault.cause is Cause.PLATFORM
    ended = await loop(log, renderer, ticket(), environment=Scored("rewards"), sandbox=box).run()
    assert (ended.status, ended.rewards) == (State.COMPLETED, {"outcome": 1.0})


async def test_a_reward_that_fails_is_no_reward(log: LogClient, renderer: Renderer) -> None:
    ended = await loop(log, renderer, ticket(), environment=Broken("rewards")).run()
    assert (ended.status, ended.rewards) == (State.FAILED, {})
    assert ended.fault is not None and ended.fault.cause is Cause.REWARD


async def test_the_deadline_keeps_what_there_is(log: LogClient, renderer: Renderer, tmp_path: Path) -> None:
    ended = await loop(log, renderer, ticket(deadline_s=0.3), environment=Broken("sleep")).run()
    assert ended.status is State.TRUNCATED and ended.fault is not None and ended.fault.cause is Cause.ENVIRONMENT
    kinds = [row.kind for row in (await stored(tmp_path)).chain(ended.trajectory, ended.head)]
    assert kinds == [Kind.ADOPT, Kind.ACT, Kind.END]


async def test_context_and_steps_run_out_as_the_policys_own(log: LogClient, renderer: Renderer) -> None:
    short = await loop(log, renderer, ticket(max_context=20)).run()
    assert short.status is State.TRUNCATED and short.fault is not None and short.fault.where == "context"
    few = await loop(log, renderer, ticket(trajectory="b.0", max_steps=2)).run()
    assert few.status is State.TRUNCATED and few.fault is not None and few.fault.where == "steps"
    assert few.rewards == {"outcome": 0.0}


async def test_an_engine_that_fails_is_named(log: LogClient, renderer: Renderer) -> None:
    class Gone(ScriptedEngine):
        async def generate(self, *args: Any, **kwargs: Any) -> Any:
            raise EngineFault("connection refused", "engine n-0")

    ended = await loop(log, renderer, ticket(), engine=Gone(right_way, renderer)).run()
    assert ended.status is State.RETRYING
    assert ended.fault == Fault(cause=Cause.ENGINE, where="engine n-0", message="connection refused")


async def test_tokens_of_another_version_are_no_part_of_a_pinned_evaluation(
    log: LogClient, renderer: Renderer, tmp_path: Path
) -> None:
    class Loading(ScriptedEngine):
        """Loads the next version after its first act."""

        version = 3

        async def generate(self, *args: Any, **kwargs: Any) -> Any:
            made = await super().generate(*args, **kwargs)
            spans = (Span(version=self.version, start=0, stop=len(made.ids)),)
            self.version += 1
            return replace(made, spans=spans)

    task = ticket(kind="eval", pinned=3)
    ended = await loop(log, renderer, task, engine=Loading(right_way, renderer)).run()
    assert (ended.status, ended.min_version, ended.max_version) == (State.RETRYING, 3, 3)
    assert (
        ended.fault is not None and ended.fault.cause is Cause.ENGINE and "version 4, not of 3" in ended.fault.message
    )
    store = await stored(tmp_path)
    assert [receipt.kind for receipt in store.receipts(task.trajectory)] == ["ADOPT", "ACT", "OBSERVE"]
    again = Loading(right_way, renderer)
    again.version = 4
    ended = await loop(log, renderer, ticket(kind="eval", pinned=-1), engine=again).run()
    assert (ended.status, ended.min_version, ended.max_version) == (State.COMPLETED, 4, 6)


class FailingLog:
    """Refuses `count` records from the n-th on; all of them, as a full disk does."""

    def __init__(self, log: LogClient, after: int, count: int = 1000) -> None:
        self.log, self.left, self.count = log, after, count

    def append(self, record: Record) -> Any:
        self.left -= 1
        if self.left >= 0 or self.left < -self.count:
            return self.log.append(record)
        future = asyncio.get_running_loop().create_future()
        future.set_exception(OSError(28, "No space left on device"))
        return future

    async def settle(self) -> None:
        await self.log.settle()


async def test_a_slow_commit_holds_up_nobody_else(log: LogClient, renderer: Renderer) -> None:
    """Two loops, one slot: the second acts while the end of the first is on its way to the disk."""

    class Slow:
        def __init__(self) -> None:
            self.commits: list[tuple[asyncio.Future[Any], asyncio.Future[Any]]] = []

        def append(self, record: Record) -> Any:
            future = asyncio.get_running_loop().create_future()
            self.commits.append((log.append(record), future))
            return future

        async def sync(self) -> None:
            for commit, future in self.commits:
                future.set_result(await commit)
            self.commits.clear()

    slow, slot = Slow(), asyncio.Semaphore(1)
    loops = [loop(slow, renderer, ticket(trajectory=f"s.{number}"), slot=slot) for number in range(2)]
    running = [asyncio.create_task(one.run()) for one in loops]
    async with asyncio.timeout(5):
        while any(one.state is not State.SCORING for one in loops):  # noqa: ASYNC110 (a state, no event)
            await asyncio.sleep(0.01)
    assert not any(task.done() for task in running), "an end that isn't durable is no end"
    await slow.sync()
    assert [(await task).status for task in running] == [State.COMPLETED] * 2


@pytest.mark.parametrize("after", range(9))
async def test_what_is_not_durable_has_not_happened(log: LogClient, renderer: Renderer, after: int) -> None:
    ended = await loop(FailingLog(log, after), renderer, ticket()).run()
    assert ended.status is State.RETRYING and not ended.head and not ended.rewards
    assert ended.fault is not None and (ended.fault.cause, ended.fault.where) == (Cause.PLATFORM, DISK)


async def test_a_call_with_effects_waits_for_its_act_and_is_not_repeated(
    log: LogClient, renderer: Renderer, tmp_path: Path
) -> None:
    refused = await loop(FailingLog(log, 2), renderer, ticket(), environment=Broken("", "effect")).run()
    assert refused.fault is not None and refused.fault.where == DISK
    environment = Broken("", "effect")
    failing = loop(FailingLog(log, 2), renderer, ticket(trajectory="e.0"), environment=environment)
    await failing.run()
    assert environment.steps == 0, "the call ran before its act was durable"
    # Killed between act and observe: whether the call happened is not known, so it is said, not done again.
    first = await loop(log, renderer, ticket(trajectory="f.0", max_steps=1), environment=Broken("", "effect")).run()
    store = await stored(tmp_path)
    act = next(row for row in store.chain(first.trajectory, first.head) if row.kind is Kind.ACT)
    history = history_of(store, act.trajectory, act.hash)
    environment = Broken("", "effect")
    again = ticket(trajectory="f.0", attempt=2, adopt=act.hash)
    assert isinstance(history, History)
    ended = await loop(log, renderer, again, environment=environment, history=history).run()
    assert environment.steps == 0
    assert ended.status is State.TRUNCATED
    assert ended.fault == Fault(cause=Cause.PLATFORM, where="resume", message=UNKNOWN)


async def test_a_call_with_effects_waits_until_other_nodes_can_read_its_act(renderer: Renderer, tmp_path: Path) -> None:
    seen = []

    class Looking(Broken):
        async def step(self, calls: Any, sandbox: Any) -> Any:
            with Store(RunPaths(tmp_path)) as store:
                seen.append([receipt.kind for receipt in store.receipts("e.0")])
            return await super().step(calls, sandbox)

    async with node_log(tmp_path, scratch=tmp_path / "scratch") as client:
        await loop(client, renderer, ticket(trajectory="e.0", max_steps=1), environment=Looking("", "effect")).run()
        await loop(client, renderer, ticket(trajectory="p.0", max_steps=1), environment=Looking("", "pure")).run()
    assert seen[0] == ["ADOPT", "ACT"]


async def test_a_verdict_only_records_the_end(log: LogClient, renderer: Renderer, tmp_path: Path) -> None:
    fault = Fault(cause=Cause.ENVIRONMENT, where="sandbox", message="gone")
    ended = await loop(log, renderer, ticket(attempt=3, verdict=fault)).run()
    assert (ended.status, ended.fault, ended.rewards) == (State.FAILED, fault, {})
    kinds = [row.kind for row in (await stored(tmp_path)).chain(ended.trajectory, ended.head)]
    assert kinds == [Kind.ADOPT, Kind.END]
    assert Ended.from_json(ended.to_json()) == ended


async def test_a_loop_whose_host_leaves_ends_at_a_step_and_goes_on_elsewhere(
    log: LogClient, renderer: Renderer, tmp_path: Path
) -> None:
    """At whatever step: no token that was sampled is thrown away, and the end is the undisturbed one's."""
    undisturbed = await loop(log, renderer, ticket(trajectory="find-x.p1n1.0")).run()
    for steps in range(3):
        name = f"find-x.p1n2.{steps}"
        acts = 0

        def say(transcript: str) -> str:
            nonlocal acts
            acts += 1
            first.leaving = acts == steps  # noqa: B023 (called within this round alone)
            return right_way(transcript)

        first = loop(log, renderer, ticket(trajectory=name), engine=ScriptedEngine(say, renderer))
        first.leaving = steps == 0
        moved = await first.run()
        assert (moved.status, moved.fault, moved.num_steps) == (State.RETRYING, None, steps)
        store = await stored(tmp_path)
        head = store.head(name)
        assert head is not None
        history = history_of(store, name, head)
        again = await loop(log, renderer, ticket(trajectory=name, attempt=2, adopt=head), history=history).run()
        assert (again.status, again.rewards, again.num_steps, again.num_sampled) == (
            undisturbed.status, undisturbed.rewards, undisturbed.num_steps, undisturbed.num_sampled,
        )  # fmt: skip
        store.refresh()
        sampled = sum(len(row.ids) for row in store.records(name) if row.kind is Kind.ACT)
        assert sampled == undisturbed.num_sampled, "what was sampled is all in the chain"
