"""The reader of a run's store: an index over shards and segments, derived from them, in memory, never the truth."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass

from hpcrl.layout import RunPaths
from hpcrl.store.records import Record
from hpcrl.types import Receipt, Sequence_, Task


@dataclass(frozen=True, slots=True, kw_only=True)
class TrajectoryInfo:
    """What the index knows of a trajectory without reading its tokens."""

    trajectory: str
    kind: str  # "train", "eval", "expert"
    group: str
    phase: str
    task: str  # its id
    status: str  # of the END record of the highest attempt, or "open"
    attempt: int  # the highest
    head: str  # hash of the chain's last record
    rewards: Mapping[str, float]  # by source: END's, then those of REWARD records
    num_steps: int  # ACT records on the chain
    num_sampled: int  # tokens on the chain that the policy sampled
    num_orphans: int  # records off the chain, of lower attempts
    node: str  # that made the last record


class Store:
    """Reads shards and closed segments; with `open_segments` also what is in open ones (for lost owners and tests)."""

    def __init__(self, paths: RunPaths, *, open_segments: bool = False) -> None:
        raise NotImplementedError

    def refresh(self) -> None:
        """Take in what is new in the folder. Costs in proportion to that."""
        raise NotImplementedError

    def has(self, hash: str) -> bool:
        raise NotImplementedError

    def record(self, hash: str) -> Record:
        raise NotImplementedError

    def chain(self, head: str) -> list[Record]:
        """Root (the first ADOPT) to head. Raises StoreError naming a missing parent."""
        raise NotImplementedError

    def context(self, head: str) -> Sequence_:
        """The tokens of the chain from its newest root, reward nan."""
        raise NotImplementedError

    def sequence(self, head: str, reward: float) -> Sequence_:
        """The chain that ends in `head` as training data, from its newest root on."""
        raise NotImplementedError

    def head(self, trajectory: str) -> str | None:
        """The last record of the highest attempt's chain; None for a trajectory that isn't here."""
        raise NotImplementedError

    def task(self, trajectory: str) -> Task:
        raise NotImplementedError

    def trajectories(self) -> Iterator[TrajectoryInfo]:
        raise NotImplementedError

    def records(self, trajectory: str) -> list[Record]:
        """All of a trajectory's records, orphans, rewards and transitions included, in the order they were read."""
        raise NotImplementedError

    def receipts(self, trajectory: str) -> list[Receipt]:
        """In chain order."""
        raise NotImplementedError
