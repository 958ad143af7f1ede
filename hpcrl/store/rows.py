"""What the index keeps of a record and of a trajectory, and which record a chain ends in. No I/O."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from hpcrl.store.records import Kind


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
    num_orphans: int  # records of the chain's kinds that are off it
    node: str  # that stored the chain's last record


@dataclass(slots=True)
class Row:
    """Where a record lies, and what is needed to walk chains without reading it."""

    hash: str
    parent: str
    kind: Kind
    attempt: int
    step: int
    num_sampled: int
    node: str
    segment: int  # number of the segment that it was first written to, and the offset there: the receipt's
    offset: int
    file: str  # where it lies now: a shard's name, or a segment's without its suffix
    at: int  # row in the shard, or byte offset in the segment


@dataclass(slots=True)
class Trajectory:
    rows: dict[str, Row] = field(default_factory=dict)  # by hash, in the order read
    meta: dict[str, Mapping[str, Any]] = field(default_factory=dict)  # of ADOPT, END and REWARD rows
    chain: list[Row] | None = None  # cached; None after new rows


def leaf(rows: list[Row]) -> Row | None:
    """The last record of one attempt's rows: of several branches (an append that failed may be there, and what was
    appended in its place) the one that ended, else the longest, else the last read."""
    depth: dict[str, int] = {}
    by_hash = {row.hash: row for row in rows}
    for row in rows:
        path = []
        at: Row | None = row
        while at is not None and at.hash not in depth:
            path.append(at)
            at = by_hash.get(at.parent)
        base = depth[at.hash] if at is not None else 0
        for count, each in enumerate(reversed(path), 1):
            depth[each.hash] = base + count
    ranked = [(row.kind is Kind.END, depth[row.hash], order, row) for order, row in enumerate(rows)]
    return max(ranked, key=lambda item: item[:3])[3] if ranked else None
