"""Where updates come from: rank 0 follows ledger and store, and writes the plan that all ranks then read their rows by.

ledger -> Replay (fires) -> all heads in closed segments or shards? -> Plan -> each rank: Store.sequence of its rows
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Collection, Sequence
from dataclasses import asdict, dataclass
from typing import Any

import numpy as np

from hpcrl.config import Phase
from hpcrl.layout import RunPaths
from hpcrl.learner.losses import group_advantages
from hpcrl.replay import Chosen, Position, Replay, pack
from hpcrl.store.index import Store
from hpcrl.store.ledger import LedgerReader
from hpcrl.types import Entry, Sequence_, StoreError

POLL_S = 0.1
SAY_AFTER_S = 60.0
GIVE_UP_S = 900.0  # after which records that are nowhere to be read cost their group its place
log = logging.getLogger("hpcrl.learner")


@dataclass(frozen=True, slots=True, kw_only=True)
class Plan:
    """One update for all ranks (JSON on the way). An empty one says: stop."""

    heads: Sequence[str] = ()
    rewards: Sequence[float] = ()
    advantages: Sequence[float] = ()
    cuts: Sequence[Sequence[Sequence[int]]] = ()  # [rank][micro-batch][row]
    trajectories: Sequence[str] = ()
    positions: Sequence[Position] = ()

    @property
    def stop(self) -> bool:
        return not self.heads

    def dump(self) -> dict[str, Any]:
        return asdict(self)


class Feed:
    """Rank 0's side. `trained`: the trajectories of the lineage that this learner continues. `control`: the incarnation
    that asked for it; what earlier ones wrote of stopping is not meant for it."""

    def __init__(
        self,
        paths: RunPaths,
        store: Store,
        trained: Collection[str],
        stop: Callable[[], bool],
        control: int,
        poll_s: float,
    ) -> None:
        self._ledger = LedgerReader(paths)
        self._store = store
        self._replay = Replay(trained)
        self._stop, self._control, self._poll_s = stop, control, poll_s
        self._replay.add(self._ledger.read())

    def _stopping(self) -> bool:
        return self._stop() or (self._ledger.stopped is not None and self._ledger.incarnation >= self._control)

    def next(self, phase: Phase, since: float, ranks: int, micro_batch_tokens: int) -> Plan:
        """Wait for the next update of `phase` (`since`: monotonic time of the last one), or for the word to stop."""
        chosen: Chosen | None = None
        asked = said = time.monotonic()
        while not self._stopping():
            self._replay.add(self._ledger.read())
            if chosen is None:
                chosen = self._replay.fire(phase, time.monotonic() - since)
                asked = said = time.monotonic()
            if chosen is not None:
                missing = self._missing(chosen)
                if not missing:
                    return _plan(chosen, ranks, micro_batch_tokens)
                now = time.monotonic()
                if now - said > SAY_AFTER_S:
                    first = missing[0]
                    text = "%d trajectories are in no closed segment yet, first %s, head %s"
                    log.warning(text, len(missing), first.trajectory, first.head)
                    said = now
                if now - asked > GIVE_UP_S:
                    lost = {entry.group for entry in missing}
                    log.error("given up, not to be read anywhere: groups %s", ", ".join(sorted(lost)))
                    chosen = chosen.without(lost)
            time.sleep(self._poll_s)
        return Plan()

    def _missing(self, chosen: Chosen) -> list[Entry]:
        lost = [entry for entry in chosen.entries if not self._store.complete(entry.trajectory, entry.head)]
        if lost:
            self._store.refresh()
            lost = [entry for entry in lost if not self._store.complete(entry.trajectory, entry.head)]
        return lost


def _plan(chosen: Chosen, ranks: int, micro_batch_tokens: int) -> Plan:
    rewards = [entry.reward for entry in chosen.entries]
    return Plan(
        heads=[entry.head for entry in chosen.entries],
        rewards=rewards,
        advantages=group_advantages(rewards, [entry.group for entry in chosen.entries]).tolist(),
        cuts=pack([entry.num_tokens for entry in chosen.entries], ranks, micro_batch_tokens),
        trajectories=chosen.trajectories,
        positions=chosen.positions,
    )


def read_rows(store: Store, plan: Plan, rows: Sequence[int], timeout_s: float) -> list[Sequence_]:
    """This rank's sequences. Rank 0 saw them; on another node they may show a little later. StoreError if not.

    One that can't be read for damage becomes two tokens that nobody sampled: it trains nothing, and holds nobody up.
    """
    until = time.monotonic() + timeout_s
    while lost := [plan.heads[row] for row in rows if not store.complete(plan.trajectories[row], plan.heads[row])]:
        store.refresh()
        if all(store.complete(plan.trajectories[row], plan.heads[row]) for row in rows):
            break
        if time.monotonic() > until:
            raise StoreError(f"{len(lost)} trajectories of the plan can't be found in the store, first head {lost[0]}")
        time.sleep(POLL_S)
    return [_sequence(store, plan, row) for row in rows]


def _sequence(store: Store, plan: Plan, row: int) -> Sequence_:
    try:
        return store.sequence(plan.trajectories[row], plan.heads[row], plan.rewards[row])
    except StoreError as error:
        log.error("%s trains nothing: %s", plan.trajectories[row], error)
        none = np.full(2, -1, np.int32)
        return Sequence_(
            trajectory=plan.trajectories[row], ids=np.zeros(1, np.int32), logprobs=np.zeros(1, np.float32),
            sampled=np.zeros(1, np.bool_), versions=none, steps=none, reward=plan.rewards[row],
        )  # fmt: skip
