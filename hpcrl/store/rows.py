"""The tables that an index is made of: one row per record, one per trajectory. No I/O.

A trajectory's row in one file tells what that file holds of it (a *fragment*); `merge` puts fragments together.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from hpcrl.store.records import CHAINED, Kind, Record
from hpcrl.types import Task

Table = NDArray[np.void]  # structured
Buffer = bytes | memoryview  # of bytes each, so that len says how many

# Field -> dtype; "S" is as wide as its longest value. What a shard stores, and docs/store-format.md explains.
STEPS: Mapping[str, str] = {
    "kind": "u1",
    "trajectory": "<i4",
    "attempt": "<i4",
    "step": "<i4",
    "hash": "S32",
    "parent": "S32",
    "root": "S32",
    "wall": "<f8",
    "token_start": "<i8",
    "num_tokens": "<i4",
    "num_sampled": "<i4",
    "min_version": "<i4",
    "max_version": "<i4",
    "meta_start": "<i8",
    "meta_bytes": "<i4",
    "segment": "<i4",
    "offset": "<i8",
    "crc_meta": "<u4",
    "crc_ids": "<u4",
    "crc_logprobs": "<u4",
    "crc_versions": "<u4",
    "crc_sampled": "<u4",
    "gen_start": "<i8",  # where its slice of GENERATED begins
    "num_gen": "<i4",  # num_tokens, or 0 where the record has none of them
}
TRAJECTORIES: Mapping[str, str] = {
    "id": "S",
    "attempt": "<i4",  # the highest
    "status": "S",  # of that attempt's END; "" where it isn't here
    "head": "S32",  # hash of that END
    "fault": "S",  # its cause
    "reward": "<f8",  # sum over END's sources; nan without
    "success": "<f8",  # of the source "outcome": 1.0 or 0.0; nan without
    "kind": "S",
    "environment": "S",
    "task": "S",
    "task_kind": "S",
    "group": "S",
    "phase": "S",
    "node": "S",
    "num_steps": "<i4",
    "num_sampled": "<i8",
    "num_tokens": "<i8",
    "num_calls": "<i4",
    "num_valid_calls": "<i4",
    "min_version": "<i4",
    "max_version": "<i4",
    "wall": "<f8",  # its first record's
    "ended_wall": "<f8",  # END's; nan without
    "duration_s": "<f8",  # of the attempt that ended; nan without
}
REWARDS: Mapping[str, str] = {
    "trajectory": "S",
    "step": "<i4",
    "source": "S",
    "value": "<f8",
    "wall": "<f8",
    "late": "?",  # of a REWARD record, not of an END
}
FRAGMENT: Mapping[str, str] = {"first_row": "<i8", "num_rows": "<i4", "crc_rows": "<u4"}  # in shards, besides
# What ADOPT alone says, so that a fragment without it lacks that.
IDENTITY = ("kind", "environment", "task", "task_kind", "group", "phase")


@dataclass(frozen=True, slots=True, kw_only=True)
class TrajectoryInfo:
    """What the index knows of a trajectory without reading its tokens."""

    trajectory: str
    kind: str  # "train", "eval", "expert", "user"
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
    """A record without its payload: what is needed to walk chains, and where it lies."""

    hash: str
    parent: str
    root: str
    kind: Kind
    attempt: int
    step: int
    wall: float
    num_tokens: int
    num_sampled: int
    min_version: int  # of the sampled tokens; -1 without
    max_version: int
    node: str
    segment: int  # number of the segment that it was first written to, and the offset there: the receipt's
    offset: int
    file: str  # where it lies now: a shard's name, or a segment's without its suffix
    at: int  # row in the shard, or byte offset in the segment

    @classmethod
    def of(cls, record: Record, *, node: str, segment: int, offset: int, file: str) -> Row:
        low, high, count = sampled_by(record.sampled.tobytes(), record.versions.tobytes())
        return cls(
            hash=record.hash, parent=record.parent, root=str(record.meta.get("root") or ""), kind=record.kind,
            attempt=record.attempt, step=record.step, wall=number(record.meta.get("wall")), num_tokens=len(record.ids),
            num_sampled=count, min_version=low, max_version=high, node=node,
            segment=segment, offset=offset, file=file, at=offset,
        )  # fmt: skip


def generated(steps: Table) -> tuple[NDArray[np.int64], NDArray[np.int32]]:
    """Of each row its slice of GENERATED: where it begins, its length. Before schema 3 these were as long as ids."""
    if "gen_start" in (steps.dtype.names or ()):
        return steps["gen_start"], steps["num_gen"]
    return steps["token_start"], steps["num_tokens"]


def sampled_by(sampled: Buffer, versions: Buffer) -> tuple[int, int, int]:
    """The lowest and the highest version of the sampled tokens (-1 unless both columns are there), and how many these
    are. Of the columns' bytes."""
    mask, numbers = bytes(sampled), bytes(versions)
    count = mask.count(1)
    if not count or not numbers:
        return -1, -1, count
    if count == len(mask) and numbers == numbers[:4] * count:  # as most are
        version = int.from_bytes(numbers[:4], "little", signed=True)
        return version, version, count
    found = np.frombuffer(numbers, "<i4")[np.frombuffer(mask, "?")]
    return int(found.min()), int(found.max()), count


def scores(
    trajectory: str, kind: Kind, step: int, meta: Mapping[str, Any]
) -> Iterator[tuple[str, int, str, float, float, bool]]:
    """The rows of REWARDS that a record makes: one for each source of an END, one of a REWARD, none of others."""
    given: Mapping[str, Any] = {}
    if kind is Kind.END:
        given = mapping(meta.get("rewards"))
    elif kind is Kind.REWARD:
        given = {str(meta.get("source", "")): meta.get("value")}
    for source, value in given.items():
        yield trajectory, step, str(source), number(value), number(meta.get("wall")), kind is Kind.REWARD


def mapping(value: Any) -> Mapping[str, Any]:
    """Empty for what is none."""
    return value if isinstance(value, Mapping) else {}


def _count(value: Any, default: int) -> int:
    return value if type(value) is int and abs(value) < 1 << 31 else default


def _task_id(task: Mapping[str, Any]) -> str:
    try:
        return Task(**{name: task[name] for name in Task.__dataclass_fields__ if name in task}).id if task else ""
    except (TypeError, ValueError, AttributeError):
        return ""


def number(value: Any) -> float:
    """nan for what is none, or too large an int."""
    try:
        return float(value) if isinstance(value, int | float) else math.nan
    except OverflowError:
        return math.nan


def table(rows: Sequence[Sequence[Any]], fields: Mapping[str, str]) -> Table:
    """Rows of values, in the order of `fields`, as a structured array."""
    columns = list(zip(*rows, strict=True)) or [()] * len(fields)
    arrays = {}
    for (name, dtype), values in zip(fields.items(), columns, strict=True):
        if dtype.startswith("S"):
            encoded = [value.encode(errors="surrogatepass") if isinstance(value, str) else value for value in values]
            arrays[name] = np.array(encoded or np.empty(0, "S1"), dtype)
        else:
            arrays[name] = np.array(values, dtype)
    found = np.empty(len(rows), [(name, array.dtype) for name, array in arrays.items()])
    for name, array in arrays.items():
        found[name] = array
    return found


def text(value: bytes) -> str:
    return value.decode(errors="surrogatepass")


def summarize(trajectory: str, rows: Iterable[Row], metas: Mapping[str, Mapping[str, Any]]) -> tuple[Any, ...]:
    """The values of TRAJECTORIES for one trajectory, from these rows alone. `metas`: of its ADOPT and END rows; what of
    them makes no sense counts as not said, lest one record keeps all others from being read."""
    chained = [row for row in rows if row.kind in CHAINED]
    attempt = max((row.attempt for row in chained), default=0)
    ends = [row for row in chained if row.kind is Kind.END and row.attempt == attempt]
    adopts = [metas[row.hash] for row in chained if row.kind is Kind.ADOPT]
    adopt = adopts[-1] if adopts else {}
    end = metas[ends[-1].hash] if ends else {}
    task = mapping(adopt.get("task"))
    acts = [row for row in chained if row.kind is Kind.ACT]
    rewards = mapping(end.get("rewards"))
    counts = {
        "num_steps": len(acts),
        "num_sampled": sum(row.num_sampled for row in acts),
        "num_tokens": sum(row.num_tokens for row in chained),
        "num_calls": 0,
        "num_valid_calls": 0,
        "min_version": min((row.min_version for row in acts), default=-1),
        "max_version": max((row.max_version for row in acts), default=-1),
    }
    values = {
        "id": trajectory,
        "attempt": attempt,
        "status": str(end.get("status", "")),
        "head": ends[-1].hash if ends else "",
        "fault": str(mapping(end.get("fault")).get("cause", "")),
        "reward": sum(map(number, rewards.values())) if rewards else math.nan,
        "success": float(number(rewards["outcome"]) >= 1.0) if "outcome" in rewards else math.nan,
        "environment": str(task.get("environment", "")),
        "task": _task_id(task),
        "task_kind": str(task.get("kind", "")),
        "node": chained[-1].node if chained else "",
        "wall": min((row.wall for row in chained), default=math.nan),
        "ended_wall": ends[-1].wall if ends else math.nan,
        "duration_s": number(end.get("duration_s")),
        **{name: _count(end.get(name), default) for name, default in counts.items()},
    }
    values |= {name: str(adopt.get(name, "")) for name in ("kind", "group", "phase")}
    return tuple(values[name] for name in TRAJECTORIES)


def merge(tables: Sequence[Table]) -> Table:
    """Fragments of all files, in their order, as one row per trajectory: what its highest attempt came to.

    An open trajectory's counts are those of its last fragment: who needs them exactly walks its chain.
    """
    whole = np.concatenate([found[list(TRAJECTORIES)] for found in tables]) if tables else table([], TRAJECTORIES)
    _, first, inverse, counts = np.unique(whole["id"], return_index=True, return_inverse=True, return_counts=True)
    if len(first) == len(whole):
        return whole
    order = np.lexsort((np.arange(len(whole)), whole["status"] != b"", whole["attempt"], inverse))
    best = order[np.cumsum(counts) - 1]
    merged = whole[best]
    many = np.flatnonzero(counts > 1)
    named = np.flatnonzero(whole["kind"] != b"")
    namer = np.full(len(counts), -1)
    namer[inverse[named]] = named
    lacking = many[(merged["kind"][many] == b"") & (namer[many] >= 0)]
    for name in IDENTITY:
        merged[name][lacking] = whole[name][namer[lacking]]
    walls = np.full(len(counts), np.inf)
    np.fmin.at(walls, inverse, whole["wall"])
    merged["wall"] = walls
    ordered: Table = merged[np.argsort(first, kind="stable")]  # in the order that they were first seen
    return ordered


def leaf(rows: Sequence[Row]) -> Row | None:
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
