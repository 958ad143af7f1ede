"""Which trajectories become the next update, and how they are cut over ranks and micro-batches. Decisions only.

ledger entries -> Replay.add -> Replay.fire -> Chosen -> pack -> slices [rank][micro-batch][row]
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Sequence
from dataclasses import dataclass

from hpcrl.config import Phase
from hpcrl.types import Entry

Position = tuple[int, int]  # (incarnation, line) of a ledger entry


@dataclass(frozen=True, slots=True, kw_only=True)
class Chosen:
    """The trajectories of one update, in ledger order."""

    positions: tuple[Position, ...]
    entries: tuple[Entry, ...]

    @property
    def trajectories(self) -> tuple[str, ...]:
        return tuple(entry.trajectory for entry in self.entries)

    def without(self, groups: Collection[str]) -> Chosen | None:
        """None when nothing is left."""
        rows = [row for row in zip(self.positions, self.entries, strict=True) if row[1].group not in groups]
        return Chosen(positions=tuple(row[0] for row in rows), entries=tuple(row[1] for row in rows)) if rows else None


class Replay:
    """The entries that wait to be trained, by phase. A trajectory is given out once, whatever the ledger repeats."""

    def __init__(self, trained: Collection[str] = ()) -> None:
        self._taken = set(trained)
        self._waiting: dict[str, dict[str, list[tuple[Position, Entry]]]] = {}  # phase -> group -> members

    def add(self, rows: Iterable[tuple[Position, Entry]]) -> None:
        """Take in ledger entries, in ledger order; those of a trajectory already seen are dropped."""
        for position, entry in rows:
            if entry.trajectory not in self._taken:
                self._taken.add(entry.trajectory)
                self._waiting.setdefault(entry.phase, {}).setdefault(entry.group, []).append((position, entry))

    def fire(self, phase: Phase, since_s: float) -> Chosen | None:
        """The next update's trajectories, or None while no trigger is met; what is given out is gone from here.

        Whole groups only, those of the oldest version first: a group that one slow member held up is to be trained
        before it is too old. Only as many as the first met trigger needs, so that an update's size does not depend on
        how long the learner slept. `since_s`: seconds since the last update.
        """
        groups = self._waiting.get(phase.name, {})
        whole = [members for members in groups.values() if len(members) >= members[0][1].group_size]
        whole.sort(key=lambda members: (min(entry.min_version for _, entry in members), members[-1][0]))
        taken, trajectories, steps, tokens = 0, 0, 0, 0
        for members in whole:
            taken += 1
            trajectories += len(members)
            steps += sum(entry.num_steps for _, entry in members)
            tokens += sum(entry.num_sampled for _, entry in members)
            if _met(phase.trajectories, trajectories) or _met(phase.steps, steps) or _met(phase.tokens, tokens):
                return self._take(phase, whole[:taken])
        if taken and phase.seconds and since_s >= phase.seconds:
            return self._take(phase, whole)
        return None

    def _take(self, phase: Phase, whole: Sequence[list[tuple[Position, Entry]]]) -> Chosen:
        for members in whole:
            del self._waiting[phase.name][members[0][1].group]
        rows = sorted((row for members in whole for row in members), key=lambda row: row[0])
        return Chosen(positions=tuple(row[0] for row in rows), entries=tuple(row[1] for row in rows))

    def waiting(self, phase: str) -> int:
        """Trajectories of `phase` that wait, in whole groups or not."""
        return sum(map(len, self._waiting.get(phase, {}).values()))


def _met(trigger: int, count: int) -> bool:
    return trigger > 0 and count >= trigger


def pack(lengths: Sequence[int], ranks: int, micro_batch_tokens: int) -> list[list[list[int]]]:
    """Cut rows of these lengths into [rank][micro-batch][row index]: ranks balanced, micro-batches padded little.

    A micro-batch's rows are of like length and its padded size (rows x longest) is at most `micro_batch_tokens`, but
    for a row that alone is longer. Every rank gets the same number of micro-batches (some may be empty): ranks meet in
    collectives at each. Right padding needs no attention mask: under causal attention no real token sees a pad.

    >>> pack([5, 9, 8, 4], 2, 18)
    [[[1, 3]], [[2, 0]]]
    """
    mine: list[list[int]] = [[] for _ in range(ranks)]
    loads = [0] * ranks
    for row in sorted(range(len(lengths)), key=lambda index: (-lengths[index], index)):
        rank = loads.index(min(loads))
        mine[rank].append(row)
        loads[rank] += lengths[row]
    cuts: list[list[list[int]]] = []
    for rows in mine:
        batches: list[list[int]] = []
        for row in rows:  # longest first, so a batch's first row is its width
            if batches and lengths[batches[-1][0]] * (len(batches[-1]) + 1) <= micro_batch_tokens:
                batches[-1].append(row)
            else:
                batches.append([row])
        cuts.append(batches)
    most = max(map(len, cuts))
    return [batches + [[]] * (most - len(batches)) for batches in cuts]
