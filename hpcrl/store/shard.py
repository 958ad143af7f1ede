"""One shard: a sealed, immutable HDF5 file of records. The one owner of its layout; docs/store-format.md tells it.

    tokens/{ids,logprobs,versions,sampled} [T]   all records' tokens, one after the other, defaults filled in
    text/meta [M]                                all records' header JSON (records.py), one after the other
    steps/*        [R]  one row per record, a trajectory's side by side; `*_start`, `*_stop` slice the columns above
    trajectories/* [K]  id, first row, number of rows
    rewards/*, transitions/*                     what END, REWARD and TRANSITION records say, as columns

Every column is contiguous, so that one `pread` at its offset gets a slice; h5py is needed to open the file only.
Each row carries the checksum that its frame had; the columns that aren't covered by those have one of their own.
"""

from __future__ import annotations

import json
import os
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

import google_crc32c
import h5py
import numpy as np
from numpy.typing import NDArray

from hpcrl.layout import publishing
from hpcrl.store.records import COLUMNS, LENGTH, Kind, Record, checksum
from hpcrl.types import StoreError

SCHEMA = 1
# A source: the segment that a row came from, as in the attribute "segments": {name, uid, node, number, records}.
Source = Mapping[str, Any]
Row = tuple[Record, int, int]  # record, index of its source, byte offset in it

_STEPS: Mapping[str, str] = {
    "kind": "u1",
    "trajectory": "<i4",
    "attempt": "<i4",
    "step": "<i4",
    "hash": "S32",
    "parent": "S32",
    "token_start": "<i8",
    "token_stop": "<i8",
    "num_sampled": "<i4",
    "meta_start": "<i8",
    "meta_stop": "<i8",
    "crc32c": "<u4",
    "segment": "<i4",
    "offset": "<i8",
}


def write_shard(path: Path, rows: Iterable[Row], sources: Sequence[Source], attrs: Mapping[str, Any]) -> int:
    """Write, sync and rename into place; the number of records. Equal records (by hash) are stored once.

    Raises OSError when there is no space; then nothing is at `path`.
    """
    by_trajectory: dict[str, dict[str, Row]] = {}
    for row in rows:
        by_trajectory.setdefault(row[0].trajectory, {}).setdefault(row[0].hash, row)
    ordered = [row for group in by_trajectory.values() for row in group.values()]
    counts = [len(group) for group in by_trajectory.values()]
    groups: dict[str, dict[str, NDArray[Any]]] = {
        "tokens": {name: _join([row[0].filled(name) for row in ordered], COLUMNS[name][0]) for name in COLUMNS},
        "text": {"meta": np.frombuffer(b"".join(_header(record) for record, _, _ in ordered), np.uint8)},
        "steps": _steps(ordered, list(by_trajectory)),
        "trajectories": {
            "id": _strings(list(by_trajectory)),
            "first_row": np.cumsum([0, *counts])[:-1].astype("<i8"),
            "num_rows": np.array(counts, "<i8"),
        },
        **_extras(ordered),
    }
    with publishing(path) as temporary, h5py.File(temporary, "w", locking=False) as file:
        file.attrs.update({"schema": SCHEMA, "segments": json.dumps(list(sources)), **attrs})
        for group, columns in groups.items():
            folder = file.create_group(group)
            for name, column in columns.items():
                folder.create_dataset(name, data=column)  # no chunks, no filter: contiguous
        file.attrs["crc32c"] = _directory_checksum(groups)
        whole = {f"{group}/{name}": _crc(groups[group][name]) for group in ("tokens", "text") for name in groups[group]}
        file.attrs["columns_crc32c"] = json.dumps(whole)
    return len(ordered)


def _header(record: Record) -> bytes:
    (size,) = LENGTH.unpack_from(record.payload)
    return record.payload[LENGTH.size : LENGTH.size + size]


def _join(arrays: Sequence[NDArray[Any]], dtype: np.dtype[Any]) -> NDArray[Any]:
    return np.concatenate(arrays) if arrays else np.empty(0, dtype)


def _strings(values: Sequence[str]) -> NDArray[Any]:
    return np.array([value.encode() for value in values] or np.empty(0, "S1"), "S")


def _steps(rows: Sequence[Row], trajectories: Sequence[str]) -> dict[str, NDArray[Any]]:
    number = {name: index for index, name in enumerate(trajectories)}
    token = np.cumsum([0, *(len(record.ids) for record, _, _ in rows)])
    meta = np.cumsum([0, *(len(_header(record)) for record, _, _ in rows)])
    values = {
        "kind": [record.kind for record, _, _ in rows],
        "trajectory": [number[record.trajectory] for record, _, _ in rows],
        "attempt": [record.attempt for record, _, _ in rows],
        "step": [record.step for record, _, _ in rows],
        "hash": [record.hash.encode() for record, _, _ in rows],
        "parent": [record.parent.encode() for record, _, _ in rows],
        "token_start": token[:-1],
        "token_stop": token[1:],
        "meta_start": meta[:-1],
        "meta_stop": meta[1:],
        "num_sampled": [int(record.sampled.sum()) for record, _, _ in rows],
        "crc32c": [checksum(record.kind, record.payload) for record, _, _ in rows],
        "segment": [source for _, source, _ in rows],
        "offset": [offset for _, _, offset in rows],
    }
    return {name: np.array(values[name], dtype) for name, dtype in _STEPS.items()}


def _extras(rows: Sequence[Row]) -> dict[str, dict[str, NDArray[Any]]]:
    """The columns of rewards/* and transitions/*: copies for people with h5py; this reader doesn't use them."""
    rewards: list[tuple[str, int, str, float, float]] = []
    changes: list[tuple[str, str, float, float, str]] = []
    for record, _, _ in rows:
        meta, name = record.meta, record.trajectory
        wall = _number(meta.get("wall"))
        if record.kind is Kind.REWARD:
            rewards.append((name, record.step, str(meta.get("source", "")), _number(meta.get("value")), wall))
        elif record.kind is Kind.END:
            given = meta.get("rewards") or {}
            rewards += [(name, record.step, source, _number(value), wall) for source, value in given.items()]
        elif record.kind is Kind.TRANSITION:
            boot = str(meta.get("boot_id", ""))
            changes.append((name, str(meta.get("state", "")), wall, _number(meta.get("mono")), boot))
    return {
        "rewards": _columns(rewards, {"trajectory": "S", "step": "<i4", "source": "S", "value": "<f8", "wall": "<f8"}),
        "transitions": _columns(
            changes, {"trajectory": "S", "state": "S", "wall": "<f8", "mono": "<f8", "boot_id": "S"}
        ),
    }


def _number(value: Any) -> float:
    return float(value) if isinstance(value, int | float) else float("nan")


def _columns(rows: Sequence[tuple[Any, ...]], dtypes: Mapping[str, str]) -> dict[str, NDArray[Any]]:
    table = list(zip(*rows, strict=True)) or [()] * len(dtypes)
    return {
        name: _strings(values) if dtype == "S" else np.array(values, dtype)
        for (name, dtype), values in zip(dtypes.items(), table, strict=True)
    }


def _directory_checksum(groups: Mapping[str, Mapping[str, NDArray[Any]]]) -> int:
    """Over all columns but tokens and text, whose slices have theirs."""
    crc = 0
    for group in ("steps", "trajectories", "rewards", "transitions"):
        for name in sorted(groups[group]):
            crc = _crc(groups[group][name], crc)
    return crc


def _crc(column: NDArray[Any], crc: int = 0) -> int:
    return int(google_crc32c.extend(crc, np.ascontiguousarray(column).tobytes()))


class Shard:
    """An open shard. `steps` and `trajectories` are in memory, payloads are read when asked for.

    Raises StoreError when the file is damaged or newer than this reader, FileNotFoundError when it isn't there.
    """

    def __init__(self, path: Path) -> None:
        self.path = path
        try:
            self._load()
        except FileNotFoundError:
            raise
        except (OSError, KeyError, ValueError, RuntimeError) as error:
            raise error if isinstance(error, StoreError) else StoreError(f"{path}: damaged: {error}") from error
        self._fd = -1  # opened when a payload is asked for

    def _load(self) -> None:
        with h5py.File(self.path, "r", locking=False) as file:
            schema = int(file.attrs["schema"])
            if schema > SCHEMA:
                raise StoreError(f"{self.path}: schema {schema}; this hpcrl reads up to {SCHEMA}: use a newer one")
            self.attrs: dict[str, Any] = dict(file.attrs)
            self.sources: list[Source] = json.loads(self.attrs["segments"])
            names = ("steps", "trajectories", "rewards", "transitions")
            groups = {name: {key: file[name][key][()] for key in file[name]} for name in names}
            if _directory_checksum(groups) != int(self.attrs["crc32c"]):
                raise StoreError(f"{self.path}: damaged: the checksum of its index columns differs")
            self.steps: dict[str, NDArray[Any]] = groups["steps"]
            self.trajectories = [name.decode() for name in groups["trajectories"]["id"]]
            # None where a column is empty: it has no place in the file.
            self._offsets = {name: file["tokens"][name].id.get_offset() for name in COLUMNS}
            self._text = file["text"]["meta"].id.get_offset()

    def __len__(self) -> int:
        return len(self.steps["kind"])

    def header(self, row: int) -> dict[str, Any]:
        """The header of a row (kind, …, meta), without its tokens; not checked against its checksum."""
        try:
            head = json.loads(self._slice(self._text, int(self.steps["meta_start"][row]), self._meta_bytes(row)))
        except ValueError as error:
            raise self._damage(row, str(error)) from error
        assert isinstance(head, dict)
        return head

    def record(self, row: int) -> Record:
        """Raises StoreError naming file and row when a checksum or the hash differs."""
        text = self._slice(self._text, int(self.steps["meta_start"][row]), self._meta_bytes(row))
        try:
            present = json.loads(text)["arrays"]
        except (ValueError, KeyError) as error:
            raise self._damage(row, str(error)) from error
        start, stop = int(self.steps["token_start"][row]), int(self.steps["token_stop"][row])
        parts = [LENGTH.pack(len(text)), text]
        for name, (dtype, _) in COLUMNS.items():
            if name in present:
                size = dtype.itemsize
                parts.append(self._slice(self._offsets[name], start * size, (stop - start) * size))
        payload = b"".join(parts)
        if checksum(int(self.steps["kind"][row]), payload) != int(self.steps["crc32c"][row]):
            raise self._damage(row, "checksum differs")
        record = Record.decode(payload)
        if record.hash.encode() != self.steps["hash"][row]:
            raise self._damage(row, "hash differs")
        return record

    def check(self) -> None:
        """Read tokens and text whole, what no record needs (filled-in defaults) included. Raises StoreError."""
        try:
            with h5py.File(self.path, "r", locking=False) as file:
                for name, crc in json.loads(file.attrs["columns_crc32c"]).items():
                    if _crc(file[name][()]) != crc:
                        raise StoreError(f"{self.path}: damaged: the checksum of {name} differs")
        except (OSError, KeyError, RuntimeError) as error:
            raise StoreError(f"{self.path}: damaged: {error}") from error

    def close(self) -> None:
        """Close the file; reading a payload opens it again."""
        if self._fd >= 0:
            os.close(self._fd)
            self._fd = -1

    def _meta_bytes(self, row: int) -> int:
        return int(self.steps["meta_stop"][row] - self.steps["meta_start"][row])

    def _slice(self, base: int | None, start: int, size: int) -> bytes:
        if base is None:
            return b""
        if self._fd < 0:
            self._fd = os.open(self.path, os.O_RDONLY)
        return os.pread(self._fd, size, base + start)

    def _damage(self, row: int, why: str) -> StoreError:
        return StoreError(f"{self.path}: damaged at row {row}: {why}")


def sources_of(path: Path) -> list[Source]:
    """The segments that a shard was made from, without reading more of it."""
    try:
        with h5py.File(path, "r", locking=False) as file:
            sources: list[Source] = json.loads(file.attrs["segments"])
            return sources
    except FileNotFoundError:
        raise
    except (OSError, KeyError, ValueError) as error:
        raise StoreError(f"{path}: damaged: {error}") from error
