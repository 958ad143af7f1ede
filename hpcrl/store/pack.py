"""From records to a shard's tables and columns: what write_shard writes. No I/O.

A trajectory's records lie side by side, in the order that they were added; equal records (by hash) are packed once.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np
from crc32c import crc32c

from hpcrl.store.records import COLUMNS, Kind, Parts, from_json
from hpcrl.store.rows import FRAGMENT, STEPS, TRAJECTORIES, Row, Table, number, summarize, table, version_range

REWARDS: Mapping[str, str] = {
    "trajectory": "S",
    "step": "<i4",
    "source": "S",
    "value": "<f8",
    "wall": "<f8",
    "late": "?",  # of a REWARD record, not of an END
}
TRANSITIONS: Mapping[str, str] = {
    "trajectory": "S",
    "attempt": "<i4",
    "state": "S",
    "fault": "S",
    "wall": "<f8",
    "mono": "<f8",
    "boot_id": "S",
}
_KEPT = frozenset({Kind.ADOPT, Kind.END, Kind.REWARD, Kind.TRANSITION})  # whose meta becomes columns
_KINDS = {int(kind): kind for kind in Kind}
_DEFAULTS = {name: np.array([default], dtype).tobytes() for name, (dtype, default) in COLUMNS.items()}


Buffer = bytes | memoryview


@dataclass(slots=True)
class _Item:
    row: Row
    source: int
    text: memoryview
    arrays: Mapping[str, memoryview]


def _sampled(arrays: Mapping[str, memoryview]) -> tuple[int, int, int]:
    """The lowest and the highest version of the sampled tokens (-1 without), and how many these are."""
    sampled, versions = arrays.get("sampled", b""), arrays.get("versions", b"")
    count = bytes(sampled).count(1)
    if 0 < count == len(sampled) and versions == bytes(versions[:4]) * count:
        (version,) = np.frombuffer(versions[:4], "<i4").tolist()
        return version, version, count
    found = np.frombuffer(versions, "<i4")
    return *version_range(found[np.frombuffer(sampled, "?")] if len(found) == len(sampled) else found), count


class Packer:
    def __init__(self) -> None:
        self._items: dict[str, dict[bytes, _Item]] = {}
        self._metas: dict[str, Mapping[str, Any]] = {}
        self._filler: dict[str, memoryview] = {}

    def __len__(self) -> int:
        return sum(map(len, self._items.values()))

    def add(self, source: int, offset: int, kind: int, digest: bytes, parts: Parts) -> None:
        """A frame's kind, hash and payload (as `records.split` cuts it), and where it lay; the payload is kept."""
        head, text, arrays = parts
        items = self._items.setdefault(head.trajectory, {})
        if digest in items:
            return
        name = digest.hex()
        low, high, num_sampled = _sampled(arrays) if "sampled" in arrays or "versions" in arrays else (-1, -1, 0)
        row = Row(
            name, head.parent, head.meta.root or "", _KINDS[kind], head.attempt, head.step,
            math.nan if head.meta.wall is None else head.meta.wall, head.arrays.get("ids", 0), num_sampled, low, high,
            "", 0, offset, "", 0,
        )  # fmt: skip
        items[digest] = _Item(row, source, text, arrays)
        if kind in _KEPT:
            self._metas[name] = from_json(text)["meta"]

    def pack(self, nodes: list[str]) -> tuple[dict[str, Table], dict[str, list[Buffer]]]:
        """The tables, and the columns in pieces, which are views of what was added. `nodes`: of each source."""
        steps: list[tuple[Any, ...]] = []
        summaries: list[tuple[Any, ...]] = []
        parts: dict[str, list[Buffer]] = {name: [] for name in (*COLUMNS, "meta")}
        columns = [(name, dtype.itemsize, parts[name]) for name, (dtype, _) in COLUMNS.items()]
        token = letter = 0
        for index, (trajectory, items) in enumerate(self._items.items()):
            first = len(steps)
            for item in items.values():
                row = item.row
                row.node = nodes[item.source]
                crcs = []
                for name, size, pieces in columns:
                    part = item.arrays.get(name)
                    if part is None:
                        part = self._fill(name, row.num_tokens * size)
                    crcs.append(crc32c(part))
                    pieces.append(part)
                parts["meta"].append(item.text)
                steps.append((
                    row.kind, index, row.attempt, row.step, row.hash, row.parent, row.root, row.wall, token,
                    row.num_tokens, row.num_sampled, row.min_version, row.max_version, letter, len(item.text),
                    item.source, row.offset, crc32c(item.text), *crcs,
                ))  # fmt: skip
                token += row.num_tokens
                letter += len(item.text)
            rows = [item.row for item in items.values()]
            summaries.append((*summarize(trajectory, rows, self._metas), first, len(rows), 0))
        tables = {
            "steps": table(steps, STEPS),
            "trajectories": table(summaries, {**TRAJECTORIES, **FRAGMENT}),
            "rewards": table(list(self._rewards()), REWARDS),
            "transitions": table(list(self._transitions()), TRANSITIONS),
        }
        for found in tables["trajectories"]:
            first, stop = int(found["first_row"]), int(found["first_row"] + found["num_rows"])
            found["crc_rows"] = crc32c(tables["steps"][first:stop].tobytes())
        return tables, parts

    def _fill(self, column: str, size: int) -> memoryview:
        """The default, so often that it makes `size` bytes."""
        filler = self._filler.get(column)
        if filler is None or len(filler) < size:
            one = _DEFAULTS[column]
            filler = self._filler[column] = memoryview(one * (max(size, 65536) // len(one)))
        return filler[:size]

    def _of(self, kind: Kind) -> Iterable[tuple[str, Row, Mapping[str, Any]]]:
        for trajectory, items in self._items.items():
            for item in items.values():
                if item.row.kind is kind:
                    yield trajectory, item.row, self._metas[item.row.hash]

    def _rewards(self) -> Iterable[tuple[Any, ...]]:
        for trajectory, row, meta in self._of(Kind.END):
            for source, value in (meta.get("rewards") or {}).items():
                yield trajectory, row.step, str(source), number(value), row.wall, False
        for trajectory, row, meta in self._of(Kind.REWARD):
            yield trajectory, row.step, str(meta.get("source", "")), number(meta.get("value")), row.wall, True

    def _transitions(self) -> Iterable[tuple[Any, ...]]:
        for trajectory, row, meta in self._of(Kind.TRANSITION):
            fault = (meta.get("fault") or {}).get("cause", "")
            boot, mono = str(meta.get("boot_id", "")), number(meta.get("mono"))
            yield trajectory, row.attempt, str(meta.get("state", "")), fault, row.wall, mono, boot
