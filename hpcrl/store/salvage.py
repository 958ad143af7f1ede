"""What can be rescued of a damaged shard or segment: every record that is intact, and what is left of the others."""

from __future__ import annotations

import errno
import io
import itertools
import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from struct import error as StructError
from typing import Any

import h5py
import numpy as np
from crc32c import crc32c
from numpy.typing import NDArray

from hpcrl.store.records import COLUMNS, GENERATED, LENGTH, Record, Torn, from_json, raw_frame, sound
from hpcrl.store.remains import find_frame, remains, what_is_left
from hpcrl.store.rows import Table, generated
from hpcrl.store.segment import CLOSED, OPEN, name_parts, read_header
from hpcrl.store.shard import PATHS, SEGMENTS, Source, parse_directory
from hpcrl.types import StoreError


@dataclass(frozen=True, slots=True, kw_only=True)
class Salvage:
    records: Sequence[tuple[Record, int, int]]  # record, number of its source, offset there
    sources: Sequence[Source]
    lost: Sequence[Mapping[str, Any]]  # what is left of hash, kind, trajectory, attempt, step of each


def salvage(path: Path) -> Salvage:
    """Every record of a damaged file, as far as it can be made out. Raises StoreError when none can."""
    return _in_segment(path) if path.suffix in (OPEN, CLOSED) else _in_shard(path)


def _in_segment(path: Path) -> Salvage:
    """Frame by frame; behind damage, from the next whole frame on."""
    data = read_blocks(path)
    view = memoryview(data)
    found: list[tuple[Record, int, int]] = []
    said: list[dict[str, Any]] = []
    try:
        end = read_header(path, data)[1]
    except (Torn, StoreError):
        first = find_frame(data, 0)
        end = first[0] if first else len(data)
    while end < len(data):
        try:
            _, digest, payload, after = raw_frame(view, end)
            record = Record.decode(bytes(payload), digest.hex())
            found.append((record, 0, end))
            end = after
        except (Torn, StoreError):
            behind = find_frame(data, end)
            if path.suffix == OPEN and behind is None:
                break  # a torn tail
            stop = behind[0] if behind else len(data)
            if stop > end:
                said += [left for _, left in remains(data, end, stop)]
            if behind:
                offset, _, digest, payload, stop = behind
                found.append((Record.decode(bytes(payload), digest.hex()), 0, offset))
            end = stop
    if not found:
        raise StoreError(f"{path}: damaged, and no whole record can be found in it")
    node, number = name_parts(path)
    children = {record.parent: record for record, _, _ in found}
    for left in said:
        child = children.get(left.get("hash", ""))
        if child is not None:  # which names it by hash
            left |= {"trajectory": child.trajectory}
    # A name of its own, lest the compactor takes the damaged file for one that a shard has wholly, and unlinks it.
    source = {"name": path.name, "uid": f"rescued from {path.name}", "node": node, "number": number}
    return Salvage(records=found, sources=[source], lost=said)


@dataclass(frozen=True, slots=True, kw_only=True)
class _Row:
    """A row of a damaged shard."""

    record: Record | None  # None when it is lost
    source: int  # in the list of sources, and the offset there
    offset: int
    said: Mapping[str, Any]  # of a lost one


def _in_shard(path: Path) -> Salvage:
    """A row counts when its record has the row's hash, or each of its slices the row's checksum; where a row's own
    places are damaged, those that its neighbours leave for it are tried. Raises StoreError when there is no table of
    rows."""
    data = read_blocks(path)
    found = _datasets(path, data)
    try:
        steps, columns = found["steps"], {name: found[at] for name, at in PATHS.items()}
        rows = [_salvage(found, steps, columns, at) for at in range(len(steps))]
        names = [{name: _plain(one[name]) for name in SEGMENTS} for one in found["segments"]]
    except (KeyError, ValueError, TypeError, IndexError) as error:
        raise StoreError(f"{path}: damaged, and no rows of records can be made out in it: {error}") from error
    return Salvage(
        records=[(row.record, row.source, row.offset) for row in rows if row.record is not None],
        sources=names,
        lost=[row.said for row in rows if row.record is None],
    )


def read_blocks(path: Path, size: int = 4096) -> bytes:
    """The whole file; zeros for what the disk can't read."""
    with path.open("rb") as file:
        try:
            return file.read()
        except OSError as error:
            if error.errno != errno.EIO:
                raise
        blocks = []
        for offset in range(0, os.fstat(file.fileno()).st_size, size):
            try:
                blocks.append(os.pread(file.fileno(), size, offset))
            except OSError:
                blocks.append(bytes(size))
        return b"".join(blocks)


def _datasets(path: Path, data: bytes) -> dict[str, NDArray[Any]]:
    """By the directory, else by HDF5; unchecked. What a shortened file lacks is zeros."""
    try:
        found = {}
        for name, (offset, count, dtype, _) in parse_directory(path, data)[1].items():
            part = data[offset : offset + count * dtype.itemsize].ljust(count * dtype.itemsize, b"\0")
            found[name] = np.frombuffer(part, dtype)
        return found
    except (StructError, ValueError, KeyError, TypeError) as error:
        damaged = error
    try:
        with h5py.File(io.BytesIO(data), "r") as file:
            names = ("steps", "trajectories", "segments", *PATHS.values())
            return {name: file[name][:] for name in names}
    except (OSError, KeyError, RuntimeError, ValueError) as error:
        raise StoreError(
            f"{path}: its directory is damaged ({damaged}), and it can't be read as HDF5 ({error})"
        ) from error


def _salvage(found: Mapping[str, Table], steps: Table, columns: Mapping[str, NDArray[Any]], at: int) -> _Row:
    row = steps[at]
    before, after = steps[at - 1] if at else None, steps[at + 1] if at + 1 < len(steps) else None
    starts, lengths = generated(steps[max(at - 1, 0) : at + 1])
    tokens, letters = [int(row["token_start"])], [(int(row["meta_start"]), int(row["meta_start"] + row["meta_bytes"]))]
    end = int(after["meta_start"]) if after is not None else len(columns["meta"])
    tokens.append(int(before["token_start"] + before["num_tokens"]) if before is not None else 0)
    gens = [int(starts[-1]), int(starts[0] + lengths[0]) if before is not None else 0]
    letters.append((int(before["meta_start"] + before["meta_bytes"]) if before is not None else 0, end))
    place = {"source": min(max(int(row["segment"]), 0), len(found["segments"]) - 1), "offset": int(row["offset"])}
    for first, gen, (start, stop) in itertools.product(tokens, gens, letters):
        if 0 <= start < stop <= len(columns["meta"]):
            record = _intact(row, columns, first, gen, columns["meta"][start:stop].tobytes())
            if record is not None:
                return _Row(record=record, said={}, **place)
    start, stop = letters[0]
    text_left = columns["meta"][max(start, 0) : max(stop, 0)].tobytes()
    said: dict[str, Any] = {name: _plain(row[name]) for name in ("hash", "kind", "attempt", "step")}
    number = int(row["trajectory"])
    if 0 <= number < len(found["trajectories"]):
        fragment = found["trajectories"][number]
        said["trajectory"] = _plain(fragment["id"])
        first, last = int(fragment["first_row"]), int(fragment["first_row"] + fragment["num_rows"])
        said["sure"] = crc32c(steps[first:last].tobytes()) == fragment["crc_rows"]
    if not said.get("sure"):
        said |= what_is_left(text_left)
        said["sure"] = crc32c(text_left) == row["crc_meta"]
    return _Row(record=None, said=said, **place)


def _intact(row: Any, columns: Mapping[str, NDArray[Any]], first: int, gen: int, head: bytes) -> Record | None:
    """The record whose header is `head`, whose ids begin at `first` and the columns beside at `gen`, when it is the
    row's."""
    try:
        counts = from_json(head)["arrays"]
        size = counts.get("ids", 0)
        whole = {"ids": columns["ids"][first : first + size]}
        if len(columns["sampled"]) < len(columns["ids"]) and counts.keys().isdisjoint(GENERATED):
            size = 0
        whole |= {name: columns[name][gen : gen + size] for name in GENERATED}
        arrays = [whole[name][: counts[name]].tobytes() for name in COLUMNS if name in counts]
        record = Record.decode(b"".join((LENGTH.pack(len(head)), head, *arrays)), _plain(row["hash"]))
    except (ValueError, KeyError, TypeError, AttributeError):
        return None
    if record.true_hash == _plain(row["hash"]):
        return sound(record)
    sums = [crc32c(head) == row["crc_meta"], *(crc32c(whole[name].tobytes()) == row[f"crc_{name}"] for name in COLUMNS)]
    return Record.decode(record.payload) if all(sums) else None  # the row's hash is what is damaged


def _plain(value: Any) -> Any:
    return value.decode(errors="replace") if isinstance(value, bytes) else value.item()
