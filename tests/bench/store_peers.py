"""The store against what else could hold the same steps, in one run: ratios of times, and bytes on disk.

    python tests/bench/store_peers.py [DIR] [--steps 10000] [--repeats 5]      (pip install 'hpcrl[analysis,bench]')

Prints one JSON object. `append_vs_X` and `batch_read_vs_X` say how many times as long X took; `bytes_vs_X` how many
times as much it takes on disk. Each is the median over repetitions, in each of which the store and X took turns; the
files lie in DIR, which decides what a sync costs.

**Append.** Steps in batches of 64, and each batch durable (fsync) before it counts; texts and calls as JSON. What each
does with a batch:

- store: encodes, hashes and checksums each record; one write and one sync, while the next batch is encoded.
- naive_h5py: a resizable dataset per column (of variable length where a step has several values), one row per step;
  resized, written and flushed step by step, so that a crash costs no more than that step; one fsync per batch; not
  compressed, as is the default. `naive_h5py_batch`: flushed once per batch only. `naive_h5py_sync`: an fsync for every
  step, as by one who acknowledges each step and knows no group commit.
- parquet: one file per batch, since what has no footer can't be read; zstd; fsync of file and folder.
- lmdb: a key per step (JSON, then the arrays' bytes), a transaction per batch, which LMDB syncs by itself.

**Read.** The tokens of 256 random steps (ids, logprobs, versions, sampled) as arrays, from files that are not in the
page cache. Each knows beforehand where each step is: the store is open, a footer is read, LMDB's file is mapped.

- store: compacted into shards.
- parquet: one file, zstd, row groups of 64 steps. Each row group that is needed is read once, its four columns alone,
  all groups in one parallel call. `parquet_each`: step by step, each with its row group. `parquet_default`: the file as
  `write_table` makes it when told nothing (snappy, dictionaries, one row group), of which the four columns are read.
- lmdb: without read-ahead, which random reads are better without.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import random
import shutil
import statistics
import tempfile
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import h5py
import lmdb
import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq

from hpcrl.layout import sync_file, sync_folder
from hpcrl.store.bench import BATCH, _append, _fill, _forget, _fresh, _paths
from hpcrl.store.compact import compact
from hpcrl.store.index import Store
from hpcrl.store.records import COLUMNS, Kind, Record
from hpcrl.store.sample import sample_steps

PICKED = 256
DTYPES = {name: dtype for name, (dtype, _) in COLUMNS.items()}
Tokens = dict[str, np.ndarray[Any, Any]]


@dataclass(frozen=True)
class Step:
    """What the records of one step hold, for those who know no records."""

    trajectory: str
    step: int
    prompt: np.ndarray[Any, Any]  # token ids, where a trajectory begins
    tokens: Tokens
    metas: list[Any]

    @classmethod
    def of(cls, records: Sequence[Record]) -> Step:
        turns = [record for record in records if record.kind in (Kind.ACT, Kind.OBSERVE)]
        prompts = [record.ids for record in records if record.kind is Kind.PROMPT]
        whole = {name: np.concatenate([_filled(record, name) for record in turns]) for name in COLUMNS}
        metas = [[record.kind.name, record.meta] for record in records]
        none = np.empty(0, np.int32)
        return cls(turns[0].trajectory, turns[0].step, prompts[0] if prompts else none, whole, metas)


def _filled(record: Record, name: str) -> np.ndarray[Any, Any]:
    dtype, default = COLUMNS[name]
    found = getattr(record, name)
    return found if len(found) else np.full(len(record.ids), default, dtype)


Batches = Sequence[Sequence[Step]]


def sync(path: Path) -> None:
    sync_file(path)
    sync_folder(path.parent)


# ---- naive h5py


def append_h5py(folder: Path, batches: Batches, *, each: str = "flush") -> None:
    """`each`: what is done after each step: "flush", "sync" or "" for nothing."""
    path = folder / "steps.h5"
    with h5py.File(path, "w") as file:
        kinds: dict[str, Any] = {name: h5py.vlen_dtype(dtype) for name, dtype in {"prompt": "<i4", **DTYPES}.items()}
        kinds |= {"trajectory": h5py.string_dtype(), "step": "<i4", "meta": h5py.string_dtype()}
        columns = {name: file.create_dataset(name, (0,), maxshape=(None,), dtype=kinds[name]) for name in kinds}
        row = 0
        for batch in batches:
            for step in batch:
                named = {"trajectory": step.trajectory, "step": step.step, "meta": json.dumps(step.metas)}
                for name, value in (named | step.tokens | {"prompt": step.prompt}).items():
                    columns[name].resize(row + 1, axis=0)
                    columns[name][row] = value
                row += 1
                if each:
                    file.flush()
                if each == "sync":
                    sync_file(path)
            file.flush()
            sync(path)


# ---- parquet


def table(batch: Sequence[Step]) -> pa.Table:
    lists = {"prompt": [step.prompt for step in batch]}
    lists |= {name: [step.tokens[name] for step in batch] for name in COLUMNS}
    columns: dict[str, Any] = {
        "trajectory": [step.trajectory for step in batch],
        "step": np.array([step.step for step in batch], np.int32),
        "meta": [json.dumps(step.metas) for step in batch],
    }
    for name, arrays in lists.items():
        offsets = np.cumsum([0, *map(len, arrays)]).astype(np.int32)
        columns[name] = pa.ListArray.from_arrays(offsets, pa.array(np.concatenate(arrays)))
    return pa.table(columns)


def append_parquet(folder: Path, batches: Batches) -> None:
    for number, batch in enumerate(batches):
        path = folder / f"{number:06d}.parquet"
        pq.write_table(table(batch), path, compression="zstd", use_dictionary=False)
        sync(path)


def write_parquet(path: Path, steps: Sequence[Step], **options: Any) -> None:
    path.parent.mkdir()
    pq.write_table(table(steps), path, **options)


class ParquetReader:
    def __init__(self, path: Path, group: int) -> None:
        self._file = pq.ParquetFile(path)
        self._group = group

    def steps(self, rows: Sequence[int]) -> list[Tokens]:
        groups = sorted({row // self._group for row in rows})
        place = {group: index * self._group for index, group in enumerate(groups)}
        found = self._file.read_row_groups(groups, columns=[*COLUMNS])
        at = [place[row // self._group] + row % self._group for row in rows]
        flat = {}
        for name in COLUMNS:
            column = found.column(name).combine_chunks()
            flat[name] = column.values.to_numpy(zero_copy_only=False), column.offsets.to_numpy()
        return [{name: v[o[row] : o[row + 1]] for name, (v, o) in flat.items()} for row in at]

    def each(self, rows: Sequence[int]) -> list[Tokens]:
        return [self.steps([row])[0] for row in rows]

    def close(self) -> None:
        self._file.close()


# ---- LMDB


def lmdb_value(step: Step) -> bytes:
    head = json.dumps({"metas": step.metas, "prompt": len(step.prompt), "tokens": len(step.tokens["ids"])}).encode()
    parts = (len(head).to_bytes(4, "little"), head, step.prompt.tobytes())
    return b"".join((*parts, *(step.tokens[name].tobytes() for name in COLUMNS)))


def lmdb_key(trajectory: str, step: int) -> bytes:
    return f"{trajectory}/{step:06d}".encode()


def append_lmdb(folder: Path, batches: Batches) -> None:
    with lmdb.open(str(folder), map_size=1 << 34) as env:
        for batch in batches:
            with env.begin(write=True) as transaction:
                for step in batch:
                    transaction.put(lmdb_key(step.trajectory, step.step), lmdb_value(step))


class LmdbReader:
    def __init__(self, folder: Path) -> None:
        self._env = lmdb.open(str(folder), readonly=True, readahead=False, map_size=1 << 34)

    def steps(self, keys: Sequence[bytes]) -> list[Tokens]:
        found = []
        with self._env.begin() as transaction:
            for key in keys:
                data = transaction.get(key)
                end = 4 + int.from_bytes(data[:4], "little")
                head = json.loads(data[4:end])
                place, tokens = end + 4 * head["prompt"], {}
                for name, dtype in DTYPES.items():
                    tokens[name] = np.frombuffer(data, dtype, head["tokens"], place)
                    place += tokens[name].nbytes
                found.append(tokens)
        return found

    def close(self) -> None:
        self._env.close()


# ---- the comparison


def timed(work: Callable[[], Any]) -> float:
    began = time.perf_counter()
    work()
    return time.perf_counter() - began


def size(folder: Path) -> int:
    return sum(path.stat().st_size for path in folder.rglob("*") if path.is_file())


def forget(folder: Path) -> None:
    """Take its files out of the page cache."""
    for path in folder.iterdir():
        with path.open("rb") as file:
            os.fsync(file.fileno())
            os.posix_fadvise(file.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)


def compare_appends(root: Path, records: Sequence[Sequence[Record]], steps: Sequence[Step], repeats: int) -> Any:
    peers: dict[str, Callable[[Path, Batches], None]] = {
        "naive_h5py": append_h5py,
        "naive_h5py_batch": partial(append_h5py, each=""),
        "naive_h5py_sync": partial(append_h5py, each="sync"),
        "parquet": append_parquet,
        "lmdb": append_lmdb,
    }
    batches = [steps[start : start + BATCH] for start in range(0, len(steps), BATCH)]
    ratios: dict[str, list[float]] = {name: [] for name in peers}
    for number in range(repeats + 1):  # the first warms up
        for name, append in peers.items():
            fresh = [
                [_fresh(record) for step in records[start : start + BATCH] for record in step]
                for start in range(0, len(records), BATCH)
            ]
            ours, theirs = root / f"store-{number}", root / f"{name}-{number}"
            theirs.mkdir()
            spent = asyncio.run(_append(_paths(ours), fresh))
            ratios[name] += [timed(lambda: append(theirs, batches)) / spent] if number else []  # noqa: B023
            shutil.rmtree(ours)
            shutil.rmtree(theirs)
    return {f"append_vs_{name}": statistics.median(found) for name, found in ratios.items()}


def compare_reads(root: Path, records: Sequence[Sequence[Record]], steps: Sequence[Step], repeats: int) -> Any:
    paths, keys = _paths(root / "store"), root / "lmdb"
    asyncio.run(_fill(paths, iter(records)))
    compact(paths)
    zstd, default = root / "zstd" / "steps.parquet", root / "default" / "steps.parquet"
    write_parquet(zstd, steps, compression="zstd", use_dictionary=False, row_group_size=BATCH)
    write_parquet(default, steps)
    keys.mkdir()
    append_lmdb(keys, [steps[start : start + BATCH] for start in range(0, len(steps), BATCH)])

    peers: dict[str, tuple[Path, Callable[[], Any], str]] = {
        "parquet": (zstd.parent, lambda: ParquetReader(zstd, BATCH), "steps"),
        "parquet_each": (zstd.parent, lambda: ParquetReader(zstd, BATCH), "each"),
        "parquet_default": (default.parent, lambda: ParquetReader(default, 1 << 20), "steps"),
        "lmdb": (keys, lambda: LmdbReader(keys), "steps"),
    }
    chance = random.Random(0)
    ratios: dict[str, list[float]] = {name: [] for name in peers}
    for number in range(repeats + 1):  # the first warms up
        rows = [chance.randrange(len(steps)) for _ in range(PICKED)]
        named = [(steps[row].trajectory, steps[row].step) for row in rows]
        for name, (folder, opened, method) in peers.items():
            _forget(paths)
            with Store(paths) as store:
                began = time.perf_counter()
                mine = store.steps(named)
                spent = time.perf_counter() - began
            forget(folder)
            reader = opened()
            asked = [lmdb_key(*one) for one in named] if name == "lmdb" else rows
            began = time.perf_counter()
            theirs = getattr(reader, method)(asked)
            ratios[name] += [(time.perf_counter() - began) / spent] if number else []
            for a, b in zip(mine, theirs, strict=True):
                assert all(np.array_equal(getattr(a, column), b[column]) for column in COLUMNS), (name, a.trajectory)
            reader.close()
    found: dict[str, Any] = {f"batch_read_vs_{name}": statistics.median(each) for name, each in ratios.items()}
    own = size(paths.shards)
    return found | {"bytes": own, "bytes_vs_parquet": size(zstd.parent) / own, "bytes_vs_lmdb": size(keys) / own}


def main() -> None:
    flags = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    flags.add_argument("folder", nargs="?", type=Path, default=Path(), metavar="DIR")
    flags.add_argument("--steps", type=int, default=10_000)
    flags.add_argument("--repeats", type=int, default=5)
    options = flags.parse_args()
    records = list(sample_steps(options.steps))
    steps = [Step.of(one) for one in records]
    few = min(len(steps), 16 * BATCH)
    with tempfile.TemporaryDirectory(dir=options.folder, prefix=".hpcrl-peers-") as folder:
        root = Path(folder)
        found = {"steps": len(steps), "appended": few, "repeats": options.repeats}
        found |= compare_appends(root, records[:few], steps[:few], options.repeats)
        found |= compare_reads(root, records, steps, options.repeats)
    print(json.dumps(found, indent=1))


if __name__ == "__main__":
    main()
