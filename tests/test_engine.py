"""A real vLLM server on the CPU against transformers with the same weights."""

from __future__ import annotations

import asyncio
import contextlib
import time
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from conftest import EOS, MAX_MODEL_LEN, NUM_TOKENS, EngineRig

from hpcrl.layout import RunPaths
from hpcrl.rollout import guard
from hpcrl.rollout.engine import ContextTooLong, EngineFault, VllmEngine
from hpcrl.rollout.supervisor import EngineSlot
from hpcrl.types import Cause, Generation, Int32Array, Sampling, StoreError

pytestmark = pytest.mark.vllm


def context(length: int, seed: int) -> Int32Array:
    return np.random.default_rng(seed).integers(5, NUM_TOKENS, length, dtype=np.int32)


def difference(rig: EngineRig, version: int, ids: Int32Array, got: Generation, temperature: float = 1.0) -> Any:
    """|engine - transformers| of each sampled token, [T]."""
    whole = [*ids.tolist(), *got.ids.tolist()]
    return np.abs(rig.reference(version, whole, temperature)[len(ids) - 1 :] - got.logprobs)


async def until(what: Any, seconds: float = 5.0) -> None:
    async with asyncio.timeout(seconds):
        while not await what():  # noqa: ASYNC110
            await asyncio.sleep(0.02)


async def test_engine_outlives_its_supervisor(rig: EngineRig, engine: VllmEngine) -> None:
    await asyncio.sleep(2 * guard.POLL_S)
    assert rig.process.alive
    assert rig.process.pid == rig.first_pid
    assert (await engine.stats()).version == 0
    assert rig.process.folder.stat().st_mode & 0o077 == 0


@pytest.mark.parametrize("temperature", [1.0, 0.6, 1.5])
async def test_logprobs_are_those_of_the_distribution_sampled_from(
    rig: EngineRig, engine: VllmEngine, temperature: float
) -> None:
    ids = context(40, 1)
    sampling = Sampling(temperature=temperature, max_tokens=50)
    got = await asyncio.gather(*(engine.generate(ids, sampling, request=f"r{index}") for index in range(8)))
    worst = np.concatenate([difference(rig, 0, ids, one, temperature) for one in got])
    assert worst.mean() < 1e-5
    for one in got:
        assert [(span.version, span.start, span.stop) for span in one.spans] == [(0, 0, len(one.ids))]
        if one.finish_reason == "stop":
            assert one.ids[-1] == EOS
            assert EOS not in one.ids[:-1]
        else:
            assert (one.finish_reason, len(one.ids)) == ("length", 50)
            assert EOS not in one.ids
    assert len({one.ids.tobytes() for one in got}) > 1


async def test_it_counts_what_it_samples_and_not_what_it_scores(engine: VllmEngine) -> None:
    before = await engine.generated()
    sampling = Sampling(temperature=1.0, max_tokens=20)
    got = await asyncio.gather(*(engine.generate(context(30, 7), sampling, request=f"c{index}") for index in range(3)))
    await engine.score([context(20, 8), context(25, 9)])
    count = sum(len(one.ids) for one in got)

    async def counted() -> bool:
        return await engine.generated() - before == count

    await until(counted)


async def test_room_in_the_context(engine: VllmEngine) -> None:
    sampling = Sampling(temperature=1.0, max_tokens=20)
    got = await engine.generate(context(MAX_MODEL_LEN - 1, 2), sampling, request="last")
    assert len(got.ids) == 1
    with pytest.raises(ContextTooLong, match=f"{MAX_MODEL_LEN} tokens"):
        await engine.generate(context(MAX_MODEL_LEN, 2), sampling, request="over")


async def test_cancelling_ends_the_request_in_the_engine(rig: EngineRig) -> None:
    # No stop ids: each would run for more than 200 tokens.
    engine = VllmEngine(rig.process.socket, stop_ids=(), max_model_len=MAX_MODEL_LEN)
    sampling = Sampling(temperature=1.0, max_tokens=240)
    calls: list[asyncio.Task[Generation]] = []

    async def running(count: int) -> bool:
        return (await engine.stats()).running == count

    async def all_run() -> bool:
        nonlocal calls
        if all(call.done() for call in calls):  # at first, and where they were through before anyone looked
            calls = [asyncio.create_task(engine.generate(context(8, 3), sampling, request=f"c{i}")) for i in range(16)]
        return await running(16)

    await until(all_run)
    assert not any(call.done() for call in calls)
    for call in calls:
        call.cancel()
    await asyncio.gather(*calls, return_exceptions=True)
    began = time.monotonic()
    await until(lambda: running(0))
    took = time.monotonic() - began
    await engine.close()
    assert took < 1.0


async def test_load_in_place_then_back(rig: EngineRig, engine: VllmEngine) -> None:
    assert await engine.probe(rig.version(0)) < 1e-5
    assert await engine.probe(rig.version(1)) > 0.1
    for version in (1, 2, 0):
        await engine.load(version, rig.version(version))
        assert await engine.probe(rig.version(version)) < 1e-5
        assert await engine.version() == version


async def test_requests_in_flight_survive_a_load(rig: EngineRig) -> None:
    engine = VllmEngine(rig.process.socket, stop_ids=(), max_model_len=MAX_MODEL_LEN)
    ids = context(40, 4)
    sampling = Sampling(temperature=1.0, max_tokens=200, seed=5)  # a seed once killed the engine here

    async def load_while(calls: list[asyncio.Task[Generation]]) -> list[Generation]:
        async def running() -> bool:
            return (await engine.stats()).running > 0 or all(call.done() for call in calls)

        await until(running)
        await engine.load(1, rig.version(1))
        got = await asyncio.gather(*calls)
        await engine.load(0, rig.version(0))
        return got

    met = False
    for number in range(10):  # on a busy machine all of them may have ended before the load
        requests = [engine.generate(ids, sampling, request=f"f{number}-{index}") for index in range(4)]
        got = await load_while([asyncio.create_task(request) for request in requests])
        assert [len(one.ids) for one in got] == [200] * 4
        for one in got:
            for span in one.spans:  # the part after the load attends to nothing that the old weights computed
                assert difference(rig, span.version, ids, one)[span.start : span.stop].mean() < 1e-5
        met = met or [0, 1] in [[span.version for span in one.spans] for one in got]
        if met:
            break
    await engine.close()
    assert met, "no load came between"


async def test_no_stale_prefix_after_a_load(rig: EngineRig, engine: VllmEngine) -> None:
    ids, sampling = context(200, 5), Sampling(temperature=1.0, max_tokens=20)
    await engine.generate(ids, sampling, request="first")
    again = await engine.generate(ids, sampling, request="again")
    assert again.cached_tokens == 128
    await engine.load(1, rig.version(1))
    fresh = await engine.generate(ids, sampling, request="fresh")
    assert fresh.cached_tokens == 0
    assert difference(rig, 1, ids, fresh).mean() < 1e-5
    await engine.load(0, rig.version(0))


class Killed(BaseException):
    pass


class Dying(VllmEngine):
    """The client of a supervisor that is killed after so many of its calls."""

    calls = 0

    async def _post(self, path: str, body: Any = None) -> dict[str, Any]:
        if not self.calls:
            raise Killed
        self.calls -= 1
        return await super()._post(path, body)


@pytest.mark.parametrize("calls", range(7))
async def test_a_load_whose_supervisor_died_is_ended_by_the_next(rig: EngineRig, tmp_path: Path, calls: int) -> None:
    paths = RunPaths(tmp_path / "run")
    paths.root.mkdir()
    paths.weights.symlink_to(rig.folder)
    dying = Dying(rig.process.socket, stop_ids=(EOS,), max_model_len=MAX_MODEL_LEN)
    engine = VllmEngine(rig.process.socket, stop_ids=(EOS,), max_model_len=MAX_MODEL_LEN)
    slot = EngineSlot(rig.process, dying, 1e-4, paths)
    await slot.start()
    dying.calls = calls
    with contextlib.suppress(Killed):
        await slot.load(1)
    running = asyncio.create_task(
        engine.generate(context(40, 9), Sampling(temperature=1.0, max_tokens=50), request=f"meanwhile{calls}")
    )
    await asyncio.sleep(0.1)
    assert rig.process.half_loaded == 1
    following = EngineSlot(rig.process, engine, 1e-4, paths)
    await following.start()
    assert following.ready and rig.process.pid == rig.first_pid, "no restart"
    got = await running
    for span in got.spans:
        assert difference(rig, span.version, context(40, 9), got)[span.start : span.stop].mean() < 1e-5
    assert following.version == 1 and rig.process.half_loaded is None
    assert (await following.load(0))["ok"]
    await dying.close()
    await engine.close()


async def test_half_of_a_damaged_version_asks_for_a_restart(rig: EngineRig, engine: VllmEngine, tmp_path: Path) -> None:
    paths = RunPaths(tmp_path / "run")
    paths.root.mkdir()
    paths.weights.symlink_to(rig.folder)
    try:
        for version, why in ((3, "part-00001-of-00002"), (4, "Out of range float"), (9, "no whole version")):
            rig.process.half_loaded = version
            slot = EngineSlot(rig.process, engine, 1e-4, paths)
            with pytest.raises(EngineFault, match=why):
                await slot.start()
            assert not slot.ready and rig.process.half_loaded == version
    finally:
        rig.process.half_loaded = None
        await engine.load(0, rig.version(0))


async def test_damaged_part_is_refused_and_the_old_version_stays(rig: EngineRig, engine: VllmEngine) -> None:
    with pytest.raises(StoreError, match="part-00001-of-00002"):
        await engine.load(3, rig.version(3))
    with pytest.raises(StoreError, match="no whole version"):
        await engine.load(9, rig.folder)
    assert await engine.version() == 0
    assert await engine.probe(rig.version(0)) < 1e-5
    ids = context(30, 6)
    got = await engine.generate(ids, Sampling(temperature=1.0, max_tokens=10), request="on")
    assert got.spans[0].version == 0


async def test_logprobs_that_are_no_numbers_are_the_engines_fault(rig: EngineRig, engine: VllmEngine) -> None:
    await engine.load(4, rig.version(4))
    try:
        with pytest.raises(EngineFault, match="NaN") as caught:
            await engine.generate(context(30, 7), Sampling(temperature=1.0, max_tokens=3), request="nan")
        assert caught.value.fault.cause is Cause.ENGINE
        with pytest.raises(EngineFault, match="Out of range float"):
            await engine.probe(rig.version(4))
    finally:
        await engine.load(0, rig.version(0))
    assert await engine.probe(rig.version(0)) < 1e-5


async def test_nobody_listens(tmp_path: Path) -> None:
    engine = VllmEngine(tmp_path / "none", stop_ids=(EOS,), max_model_len=64, name="engine n1-0")
    with pytest.raises(EngineFault) as caught:
        await engine.generate(context(4, 8), Sampling(temperature=1.0, max_tokens=3), request="x")
    assert (caught.value.fault.cause, caught.value.fault.where) == (Cause.ENGINE, "engine n1-0")
    assert not await engine.healthy()
