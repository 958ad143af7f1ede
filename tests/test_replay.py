"""Which trajectories the next update takes, and how they are cut."""

from __future__ import annotations

from dataclasses import replace

import numpy as np

from hpcrl.config import Phase
from hpcrl.replay import Replay, pack
from hpcrl.types import Entry


def entry(name: str, group: str, phase: str = "rl", steps: int = 2, tokens: int = 10, size: int = 1) -> Entry:
    return Entry(
        trajectory=name,
        attempt=1,
        head=name,
        group=group,
        phase=phase,
        reward=0.0,
        num_tokens=30,
        num_sampled=tokens,
        num_steps=steps,
        min_version=0,
        group_size=size,
    )


def rows(*entries: Entry, start: int = 1) -> list[tuple[tuple[int, int], Entry]]:
    return [((1, start + index), row) for index, row in enumerate(entries)]


def test_only_whole_groups_are_taken_and_in_ledger_order() -> None:
    replay = Replay()
    phase = Phase(name="rl", trajectories=4, group_size=2)
    first = [entry(name, name[0], size=2) for name in ("a0", "b0", "c0", "c1")]
    replay.add(rows(*first, entry("x", "x", "other")))
    assert replay.fire(phase, 1e9) is None
    replay.add(rows(entry("a1", "a", size=2), entry("b1", "b", size=2), start=6))
    chosen = replay.fire(phase, 0.0)
    assert chosen is not None
    assert chosen.trajectories == ("a0", "c0", "c1", "a1")  # c was whole first, then a; b is left for the next
    assert chosen.positions == ((1, 1), (1, 3), (1, 4), (1, 6))
    assert replay.fire(phase, 0.0) is None
    assert replay.waiting("rl") == 2


def test_the_oldest_group_goes_first() -> None:
    replay = Replay()
    phase = Phase(name="rl", trajectories=2, group_size=2)
    new = [replace(entry(name, "new", size=2), min_version=7) for name in ("n0", "n1")]
    old = [replace(entry(name, "old", size=2), min_version=version) for name, version in (("o0", 9), ("o1", 6))]
    replay.add(rows(old[0], *new, old[1]))
    taken = [replay.fire(phase, 0.0), replay.fire(phase, 0.0)]
    assert [chosen and chosen.trajectories for chosen in taken] == [("o0", "o1"), ("n0", "n1")]


def test_a_group_that_lost_members_is_whole_without_them() -> None:
    replay = Replay()
    replay.add(rows(*(entry(f"a{i}", "a", size=3) for i in range(3)), entry("b0", "b", size=4)))
    chosen = replay.fire(Phase(name="rl", trajectories=2, group_size=4), 0.0)
    assert chosen is not None and chosen.trajectories == ("a0", "a1", "a2")


def test_what_was_trained_or_seen_is_never_given_out_again() -> None:
    replay = Replay(trained={"a0"})
    phase = Phase(name="rl", objective="sft", trajectories=1)
    replay.add(rows(entry("a0", "a"), entry("b0", "b")))
    replay.add(rows(entry("b0", "b"), start=3))  # a ledger may repeat an entry after control's restart
    chosen = replay.fire(phase, 0.0)
    assert chosen is not None and chosen.trajectories == ("b0",)
    replay.add(rows(entry("b0", "b"), start=4))
    assert replay.fire(phase, 0.0) is None


def test_each_trigger_fires_by_itself() -> None:
    for trigger, first in (({"steps": 5}, 3), ({"tokens": 15}, 2), ({"trajectories": 4}, 4)):
        replay = Replay()
        replay.add(rows(*(entry(f"t{i}", f"g{i}") for i in range(6))))
        chosen = replay.fire(Phase(name="rl", objective="sft", **trigger), 0.0)
        assert chosen is not None and len(chosen.entries) == first, trigger


def test_seconds_fire_with_at_least_one_whole_group() -> None:
    replay = Replay()
    phase = Phase(name="rl", seconds=5, trajectories=100, group_size=2)
    replay.add(rows(entry("a0", "a", size=2)))
    assert replay.fire(phase, 6.0) is None
    replay.add(rows(entry("a1", "a", size=2), start=2))
    assert replay.fire(phase, 4.0) is None
    chosen = replay.fire(phase, 5.0)
    assert chosen is not None and chosen.trajectories == ("a0", "a1")


def test_pack_covers_every_row_once_balanced_and_within_budget() -> None:
    rng = np.random.default_rng(0)
    for ranks in (1, 2, 3):
        lengths = rng.integers(5, 300, size=50).tolist()
        cuts = pack(lengths, ranks, 1000)
        assert sorted(row for rank in cuts for batch in rank for row in batch) == list(range(50))
        loads = [sum(lengths[row] for batch in rank for row in batch) for rank in cuts]
        assert max(loads) - min(loads) <= max(lengths)
        assert len({len(rank) for rank in cuts}) == 1  # ranks meet in every micro-batch
        for batch in (batch for rank in cuts for batch in rank if batch):
            assert len(batch) * max(lengths[row] for row in batch) <= 1000


def test_pack_gives_a_row_above_the_budget_a_micro_batch_of_its_own() -> None:
    assert pack([5000, 10, 10], 2, 1000) == [[[0]], [[1, 2]]]
    assert pack([7], 2, 1000) == [[[0]], [[]]]
