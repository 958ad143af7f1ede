"""One flipped bit anywhere in a shard or a segment: found, never returned as data, and nobody else's loss."""

from __future__ import annotations

import asyncio
import atexit
import shutil
import tempfile
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from store_parts import open_log, run_folder, trajectory

from hpcrl.layout import RunPaths
from hpcrl.store.compact import compact, shards
from hpcrl.store.index import Store
from hpcrl.store.records import Kind, Record
from hpcrl.store.segment import CLOSED, segments
from hpcrl.store.verify import verify
from hpcrl.types import Sequence_, StoreError

GROUPS = {"a": (1, 2, 3), "b": (1, 2, 3), "c": (4, 5), "d": (4, 5)}  # trajectory -> its group's prompt
COLUMNS = ("ids", "logprobs", "versions", "sampled", "steps")


class Sound:
    """A run of one file, and all that can be read of it."""

    def __init__(self, where: str) -> None:
        folder = tempfile.mkdtemp(prefix="hpcrl-flips-", dir="/dev/shm")
        atexit.register(shutil.rmtree, folder, ignore_errors=True)
        self.paths = run_folder(Path(folder))
        self.records: dict[str, Record] = {}
        for name, ids in GROUPS.items():
            late = Record(kind=Kind.REWARD, trajectory=name, step=1, meta={"source": "x", "value": 0.25, "wall": 5.0})
            made = [*trajectory(name, prompt_ids=ids, steps=3), late]
            self.records |= {record.hash: record for record in made}
        asyncio.run(self._write())
        if where == "shard":
            compact(self.paths)
        (self.path,) = shards(self.paths) if where == "shard" else segments(self.paths.log, CLOSED)
        self.data = self.path.read_bytes()
        with Store(self.paths) as store:
            self.sequences = {name: store.trajectory(name) for name in GROUPS}
        assert all(one.reward == 1.25 for one in self.sequences.values())

    async def _write(self) -> None:
        log = open_log(self.paths)
        await log.append([record.frame() for record in self.records.values()])
        await log.close()


_SOUND: dict[str, Sound] = {}


@pytest.fixture(params=["shard", "segment"])
def sound(request: Any) -> Sound:
    if request.param not in _SOUND:
        _SOUND[request.param] = Sound(request.param)
    return _SOUND[request.param]


def is_start_of(found: Sequence_, whole: Sequence_) -> bool:
    return all(np.array_equal(getattr(found, key), getattr(whole, key)[: len(found.ids)]) for key in COLUMNS)


def hurt(store: Store, sound: Sound) -> set[str]:
    """The trajectories of which not everything is given back as it was; what is given back is always right."""
    found = set()
    for name, whole in sound.sequences.items():
        try:
            one = store.trajectory(name)
            assert is_start_of(one, whole) and (one.reward in (1.0, 1.25, 0.25) or np.isnan(one.reward))
            if len(one.ids) < len(whole.ids) or one.reward != whole.reward:
                found.add(name)
        except StoreError:
            found.add(name)
        for hash, record in sound.records.items():
            if record.trajectory == name:
                try:
                    read = store.record(name, hash)
                    assert read == record and read.true_hash == hash
                except StoreError:
                    found.add(name)
    return found


flips = given(place=st.floats(0, 1, exclude_max=True), bit=st.integers(0, 7))


def tries(count: int) -> settings:
    checks = list(HealthCheck)
    return settings(max_examples=count, deadline=None, derandomize=True, suppress_health_check=checks, database=None)


@tries(250)
@flips
def test_a_flipped_bit_is_found_and_costs_one_trajectory_or_one_groups_prompt(
    sound: Sound, place: float, bit: int
) -> None:
    one_flip(sound, place, bit)


@pytest.mark.slow
@tries(2000)
@flips
def test_so_do_thousands(sound: Sound, place: float, bit: int) -> None:
    one_flip(sound, place, bit)


def one_flip(sound: Sound, place: float, bit: int) -> None:
    at = int(place * len(sound.data))
    data = bytearray(sound.data)
    data[at] ^= 1 << bit
    sound.path.write_bytes(data)
    assert not verify(sound.paths, deep=True).ok
    with Store(RunPaths(sound.paths.root)) as store:
        lost = hurt(store, sound)
        assert len({GROUPS[name] for name in lost}) <= 1, lost
        if len(lost) > 1:
            (ids,) = {GROUPS[name] for name in lost}
            prompts = [hash for hash, record in sound.records.items() if record.kind is Kind.PROMPT]
            gone = [hash for hash in prompts if hash not in store.prompts() or not _readable(store, hash)]
            assert gone and [tuple(sound.records[hash].ids) for hash in gone] == [ids], (
                "more than one is lost for one bit"
            )
        table = store.query().set_index("trajectory")
        assert set(table.index) >= set(GROUPS) - lost
        assert (table.loc[sorted(set(GROUPS) - lost), "reward"] == 1.25).all()
        scores = store.rewards()
        assert len(scores[~scores["trajectory"].isin(lost)]) == 2 * (4 - len(lost))
        assert set(scores["value"]) <= {1.0, 0.25}


def _readable(store: Store, prompt: str) -> bool:
    try:
        store.record("", prompt)
    except StoreError:
        return False
    return True
