"""From records to a shard's tables and columns: what write_shard writes. No I/O.

A trajectory's records lie side by side, in the order that they were added; equal records (by hash) are packed once.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from crc32c import crc32c

from hpcrl.store.records import COLUMNS, KINDS, SUMMED, Kind, Parts, filler
from hpcrl.store.rows import (
    FRAGMENT,
    REWARDS,
    STEPS,
    TRAJECTORIES,
    Row,
    Table,
    mapping,
    number,
    sampled_by,
    scores,
    summarize,
    table,
)

TRANSITIONS: Mapping[str, str] = {
    "trajectory": "S",
    "attempt": "<i4",
    "state": "S",
    "fault": "S",
    "wall": "<f8",
    "mono": "<f8",
    "boot_id": "S",
}
_ZEROS = (0,) * len(COLUMNS)


@dataclass(slots=True)
class _Item:
    row: Row
    source: int
    text: memoryview
    arrays: Sequence[memoryview]  # none, the ids, or all COLUMNS


class Packer:
    def __init__(self) -> None:
        self._items: dict[str, dict[bytes, _Item]] = {}
        self._metas: dict[str, Mapping[str, Any]] = {}

    def __len__(self) -> int:
        return sum(map(len, self._items.values()))

    def add(self, source: int, offset: int, digest: bytes, parts: Parts) -> None:
        """A frame's hash and payload (as `records.split` cuts it), and where it lay; the payload is kept."""
        head, text, arrays, meta = parts
        items = self._items.setdefault(head.trajectory, {})
        if digest in items:
            return
        name = digest.hex()
        low, high, num_sampled = (
            sampled_by(arrays["sampled"], arrays.get("versions", b"")) if "sampled" in arrays else (-1, -1, 0)
        )
        row = Row(
            name, head.parent, head.meta.root or "", KINDS[head.kind], head.attempt, head.step,
            math.nan if head.meta.wall is None else head.meta.wall, head.arrays.get("ids", 0), num_sampled, low, high,
            "", 0, offset, "", 0,
        )  # fmt: skip
        whole = list(arrays.values())
        if 1 < len(whole) < len(COLUMNS):
            whole = [arrays.get(column) or filler(column, head.arrays["ids"]) for column in COLUMNS]
        items[digest] = _Item(row, source, text, whole)
        if head.kind in SUMMED:
            self._metas[name] = meta

    def columns(self) -> dict[str, list[memoryview]]:
        """What was added, in its order: each column's pieces."""
        items = [item for items in self._items.values() for item in items.values()]
        made = {name: [item.arrays[at] for item in items if len(item.arrays) > at] for at, name in enumerate(COLUMNS)}
        return {**made, "meta": [item.text for item in items]}

    def tables(self, nodes: Sequence[str]) -> dict[str, Table]:
        """All but `steps`; no row of `trajectories` has its CRC yet. `nodes`: of each source."""
        summaries: list[tuple[Any, ...]] = []
        first = 0
        for trajectory, items in self._items.items():
            for item in items.values():
                item.row.node = nodes[item.source]
            rows = [item.row for item in items.values()]
            summaries.append((*summarize(trajectory, rows, self._metas), first, len(rows), 0))
            first += len(rows)
        return {
            "trajectories": table(summaries, {**TRAJECTORIES, **FRAGMENT}),
            "rewards": table(list(self._rewards()), REWARDS),
            "transitions": table(list(self._transitions()), TRANSITIONS),
        }

    def steps(self, trajectories: Table) -> Table:
        """The rows of all records. Enters their CRCs into `trajectories`."""
        steps: list[tuple[Any, ...]] = []
        token = generated = letter = 0
        for index, items in enumerate(self._items.values()):
            for item in items.values():
                row = item.row
                num_gen = row.num_tokens if len(item.arrays) > 1 else 0
                crcs = [crc32c(part) for part in item.arrays]
                steps.append((
                    row.kind, index, row.attempt, row.step, row.hash, row.parent, row.root, row.wall, token,
                    row.num_tokens, row.num_sampled, row.min_version, row.max_version, letter, len(item.text),
                    item.source, row.offset, crc32c(item.text), *crcs, *_ZEROS[len(crcs) :], generated, num_gen,
                ))  # fmt: skip
                token += row.num_tokens
                generated += num_gen
                letter += len(item.text)
        made = table(steps, STEPS)
        for found in trajectories:
            first, stop = int(found["first_row"]), int(found["first_row"] + found["num_rows"])
            found["crc_rows"] = crc32c(made[first:stop].tobytes())
        return made

    def _of(self, kind: Kind) -> Iterable[tuple[str, Row, Mapping[str, Any]]]:
        for trajectory, items in self._items.items():
            for item in items.values():
                if item.row.kind is kind:
                    yield trajectory, item.row, self._metas[item.row.hash]

    def _rewards(self) -> Iterable[tuple[Any, ...]]:
        for kind in (Kind.END, Kind.REWARD):
            for trajectory, row, meta in self._of(kind):
                yield from scores(trajectory, kind, row.step, meta)

    def _transitions(self) -> Iterable[tuple[Any, ...]]:
        for trajectory, row, meta in self._of(Kind.TRANSITION):
            fault = str(mapping(meta.get("fault")).get("cause", ""))
            boot, mono = str(meta.get("boot_id", "")), number(meta.get("mono"))
            yield trajectory, row.attempt, str(meta.get("state", "")), fault, row.wall, mono, boot
