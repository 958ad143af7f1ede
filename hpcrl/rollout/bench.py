"""What slow syncs cost the engine: agent loops over a real log whose syncs are as slow as a shared filesystem's can be.

An hour in less than a minute: a step of one second takes 10 ms, and so does everything else that is timed.
"""

from __future__ import annotations

import asyncio
import math
import random
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from hpcrl.layout import RunPaths
from hpcrl.rollout.loop import Loop, Where
from hpcrl.sandbox.memory import MemorySandbox
from hpcrl.store.link import LogClient, LogServer
from hpcrl.store.log import Log
from hpcrl.types import (
    EngineStats,
    Generation,
    Int32Array,
    Message,
    Sampling,
    Sandbox,
    Span,
    StepOutcome,
    Task,
    Ticket,
    ToolCall,
    ToolSpec,
)

SCALE = 0.01  # seconds here to one second there
LOOPS, AHEAD, STEPS = 8, 2, 20  # more loops at this pace fill a core: then it is the interpreter that is measured


class TimedEngine:
    """Takes a second for every act; counts what it made."""

    def __init__(self) -> None:
        self.acts = self._running = 0

    async def generate(self, ids: Int32Array, sampling: Sampling, *, request: str) -> Generation:
        self._running += 1
        try:
            await asyncio.sleep(SCALE * random.uniform(0.5, 1.5))
        finally:
            self._running -= 1
        self.acts += 1
        made = np.arange(8, dtype=np.int32) + 10
        spans = (Span(version=0, start=0, stop=8),)
        return Generation(ids=made, logprobs=np.zeros(8, np.float32), spans=spans, finish_reason="stop")

    async def stats(self) -> EngineStats:
        return EngineStats(running=self._running, waiting=0, kv_share=0.0, version=0)

    async def close(self) -> None:
        """Holds nothing."""


class Letters:
    """A renderer without a model: one token to a letter."""

    def start(self, messages: Sequence[Message]) -> Int32Array:
        return np.array([ord(letter) for message in messages for letter in message.text], np.int32)

    def extend(self, messages: Sequence[Message], *, after_stop: bool) -> Int32Array:
        return self.start(messages)

    def text(self, ids: Int32Array) -> str:
        return ""


class Turns:
    """An environment of so many turns."""

    def __init__(self) -> None:
        self._left = STEPS

    def tools(self) -> tuple[ToolSpec, ...]:
        return ()

    async def reset(self, sandbox: Any) -> tuple[Message, ...]:
        return (Message.of("user", "go"),)

    def parse(self, text: str) -> tuple[ToolCall, ...]:
        return ()

    async def step(self, calls: Sequence[ToolCall], sandbox: Any) -> StepOutcome:
        self._left -= 1
        return StepOutcome(results=(), messages=(Message.of("tool", "on"),), done=self._left == 0)

    async def rewards(self, sandbox: Sandbox) -> Mapping[str, float]:
        return {"outcome": 1.0}

    def state(self) -> bytes:
        return b""

    def restore(self, state: bytes) -> None:
        """Nothing to bring back."""


class SlowSync:
    """5 ms in the middle, 1 s at the 99th percentile, 30 s once an hour (log-normal between the first two)."""

    def __init__(self, seconds: float) -> None:
        self._chance = random.Random(0)
        self._worst_at = time.monotonic() + seconds / 2
        self.took: list[float] = []

    def __call__(self, fd: int) -> None:
        spent = 0.005 * math.exp(self._chance.gauss(0, math.log(200) / 2.326))
        spent = min(spent, 10.0)
        if time.monotonic() > self._worst_at:
            spent, self._worst_at = 30.0, math.inf
        self.took.append(spent)
        time.sleep(spent * SCALE)


def bench_slow_sync(root: Path, scale: float) -> dict[str, Any]:
    """`slow_sync_cost`: the share of the engine's acts that are lost where syncs are slow, against syncs that cost
    nothing, turn about; each for `scale` hours of the simulated time."""
    seconds = max(4.0, 36.0 * scale)
    acts: dict[bool, list[int]] = {True: [], False: []}
    worst = 0.0
    for number in range(2):
        for slow in (False, True):
            sync = SlowSync(seconds) if slow else (lambda fd: None)
            acts[slow].append(asyncio.run(_run(root / f"{number}-{slow}", seconds, sync)))
            if isinstance(sync, SlowSync):
                worst = max(worst, *sync.took)
    return {
        "slow_sync_cost": 1.0 - sum(acts[True]) / sum(acts[False]),
        "slow_sync_hours": seconds / SCALE / 3600,
        "slow_sync_worst_s": worst,
    }


async def _run(root: Path, seconds: float, sync: Any) -> int:
    """The loops of one host for so long: as many places as LOOPS, AHEAD tickets waiting beside them."""
    paths = RunPaths(root)
    paths.make()
    log = Log(paths.log, "bench", segment_bytes=64 << 20, segment_age_s=60, commit_interval_s=0.5 * SCALE, sync=sync)
    server = LogServer(log, root / "log.sock")
    await server.start()
    engine, places, renderer = TimedEngine(), asyncio.Semaphore(LOOPS), Letters()
    until = time.monotonic() + seconds
    async with LogClient(root / "log.sock") as client:

        async def tickets(number: int) -> None:
            count = 0
            while time.monotonic() < until:
                loop = Loop(
                    _ticket(f"b{number}.{count}"), engine=engine, environment=Turns(), sandbox=MemorySandbox(),
                    log=client, renderer=renderer,  # type: ignore[arg-type]
                    where=Where(node="bench", job="0", boot_id=""), slot=places,
                )  # fmt: skip
                await loop.run()
                count += 1

        running = [asyncio.create_task(tickets(number)) for number in range(LOOPS + AHEAD)]
        await asyncio.sleep(seconds)
        done = engine.acts
        for task in running:
            task.cancel()
        await asyncio.gather(*running, return_exceptions=True)
    await server.close()
    await log.close()
    return done


def _ticket(trajectory: str) -> Ticket:
    task = Task(environment="bench", payload={})
    return Ticket(
        trajectory=trajectory, attempt=1, kind="train", task=task, group="b", member=0, phase="rl", seed=0,
        sampling=Sampling(temperature=1.0, max_tokens=16), max_steps=STEPS + 1, max_context=100_000, deadline_s=600.0,
        incarnation=1,
    )  # fmt: skip
