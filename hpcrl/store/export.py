"""Trajectories for other programs: as JSON lines, or as Parquet. The one place where pyarrow is.

    jsonl     trajectories.jsonl: one object per trajectory, its steps and scores within
    parquet   trajectories.parquet, steps.parquet, rewards.parquet: flat tables; what has no fixed shape (tools with
              their schemas, calls with their arguments, parts, results, task) is JSON in a string, lest Arrow makes one
              type of all of them and pads each with the others' fields
    contents  what parts and results name (media, unseen output): contents.jsonl or .parquet, each once, by its SHA-256

docs/store.md lists the fields. What is no number (nan) is null in both.
"""

from __future__ import annotations

import base64
import contextlib
import json
import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import numpy as np

from hpcrl.layout import RunPaths, publishing
from hpcrl.store.index import Store
from hpcrl.store.records import COLUMNS, Kind, Record, named
from hpcrl.store.rows import REWARDS, TRAJECTORIES, scores
from hpcrl.types import ConfigError, Int32Array, StoreError

Format = Literal["jsonl", "parquet"]
Decode = Callable[[Int32Array], str]
Fields = Mapping[str, Any]

# Column -> type: those of numpy, "S" a string, "J" JSON in a string, "B" bytes, "[…" a list.
_TRAJECTORY = {
    "trajectory": "S",
    **{name: kind for name, kind in TRAJECTORIES.items() if name != "id"},
    "task": "J",
    "task_id": "S",
    "seed": "<i8",
    "sampling": "J",
}
_STEP = {
    "trajectory": "S",
    "attempt": "<i4",
    "step": "<i4",
    "wall": "<f8",
    "prompt": "S",
    "text": "S",
    "finish_reason": "S",
    "tools": "J",
    "calls": "J",
    "observation": "S",
    "parts": "J",
    "results": "J",
    "fault": "J",
    "done": "?",
    "truncated": "S",
    "queue_s": "<f8",
    "duration_s": "<f8",
    "prompt_ids": "[<i4",
    "contents": "J",
    **{name: f"[{dtype.str}" for name, (dtype, _) in COLUMNS.items()},
}
_CONTENT = {"content": "S", "data": "B"}
_TOKENS = 4 << 20  # in memory before they are written, and so in one row group


@dataclass(frozen=True, slots=True, kw_only=True)
class Exported:
    files: tuple[str, ...]
    trajectories: int
    steps: int
    left_out: tuple[str, ...]  # trajectories that can't be read whole, and contents, each with the reason
    damaged: tuple[str, ...]  # files; what is intact of them is exported


def export(
    paths: RunPaths,
    folder: Path,
    format: Format,
    decode: Decode | None = None,
    *,
    conditions: Mapping[str, Any] | None = None,
    progress: Callable[[int, int], object] = lambda done, total: None,
) -> Exported:
    """The chains of the trajectories that meet the conditions of `Store.query` into new files in `folder`. `decode`:
    token ids [T] to text; without, texts are null. `progress` hears how many of how many trajectories are through.

    Raises ConfigError when a file is there already, OSError where they can't be written; then none is there.
    """
    tables = ("trajectories", "contents") if format == "jsonl" else tuple(_TABLES)
    names = [f"{table}.{format}" for table in tables]
    if folder.exists() and not folder.is_dir():
        raise ConfigError(f"{folder}: is no folder; give another")
    for name in names:
        if (folder / name).exists():
            raise ConfigError(f"{folder / name}: exists; give another folder")
    left_out: list[str] = []
    trajectories = steps = 0
    with contextlib.ExitStack() as stack:
        stack.enter_context(_or_nothing(folder, names))
        store = stack.enter_context(Store(paths, open_segments=True))
        opened = [stack.enter_context(publishing(folder / name)) for name in names]
        sink: _Jsonl | _Parquet = _Jsonl(opened) if format == "jsonl" else _Parquet(opened)
        stack.callback(sink.close)
        given: set[str] = set()  # contents
        frame = store.query(**conditions or {})
        for number, values in enumerate(frame.itertuples(index=False, name=None)):
            progress(number, len(frame))
            summary: Fields = dict(zip(frame.columns, values, strict=True))
            try:
                whole = _whole(store, summary, decode)
            except (StoreError, KeyError) as error:
                left_out.append(f"{summary['trajectory']}: {error}")
                continue
            sink.add(*whole)
            trajectories += 1
            steps += len(whole[1])
            for hash in sorted({hash for step in whole[1] for hash in named(step)} - given):
                given.add(hash)
                try:
                    sink.add_content(hash, store.content(hash))
                except StoreError as error:
                    left_out.append(f"{summary['trajectory']}: {error}")
    files = tuple(str(folder / name) for name in names)
    damaged = tuple(store.damaged.values())  # also what was found on the way
    return Exported(files=files, trajectories=trajectories, steps=steps, left_out=tuple(left_out), damaged=damaged)


@contextlib.contextmanager
def _or_nothing(folder: Path, names: Sequence[str]) -> Iterator[None]:
    """What is written into a folder within, and the folder itself where it is new, goes again when that fails."""
    new = not folder.exists()
    folder.mkdir(parents=True, exist_ok=True)
    try:
        yield
    except BaseException:
        with contextlib.suppress(OSError):
            for name in names:
                (folder / name).unlink(missing_ok=True)
            if new:
                folder.rmdir()
        raise


# ---- what is exported ---------------------------------------------------------------------------------------------


def _whole(store: Store, summary: Fields, decode: Decode | None) -> tuple[Fields, list[Fields], list[Fields]]:
    """A trajectory, its steps, its scores."""
    trajectory = summary["trajectory"]
    records = {record.hash: record for record in store.records(trajectory)}
    receipts = store.receipts(trajectory)
    if unread := [receipt.hash for receipt in receipts if receipt.hash not in records]:
        raise StoreError(store.damaged[unread[0]])
    chain = [records[receipt.hash] for receipt in receipts]
    if not chain:
        raise StoreError("none of its chain is here")
    if chain[0].parent:
        raise StoreError(f"no record {chain[0].parent}, the parent of {chain[0].hash}")
    adopt = chain[0].meta
    more = {"task": adopt["task"], "task_id": summary["task"], "seed": adopt["seed"], "sampling": adopt["sampling"]}
    row = {name: _plain(value) for name, value in {**summary, **more}.items()}
    given = [one for record in records.values() for one in scores(trajectory, record.kind, record.step, record.meta)]
    return row, list(_steps(store, chain, decode)), [dict(zip(REWARDS, map(_plain, one), strict=True)) for one in given]


def _steps(store: Store, chain: Sequence[Record], decode: Decode | None) -> Iterator[Fields]:
    """One per act, with what came of it."""
    root, contents = "", None  # of a context that has begun since the last act
    for at, act in enumerate(chain):
        if act.meta.get("root"):
            root, contents = act.meta["root"], act.meta.get("contents")
        if act.kind is not Kind.ACT:
            continue
        after = chain[at + 1] if at + 1 < len(chain) and chain[at + 1].kind is Kind.OBSERVE else None
        seen = after.meta if after else {}
        prompt_ids = store.record("", root).ids if root else None
        tokens = {
            name: np.concatenate([one.filled(name) for one in (act, after) if one is not None]).tolist()
            for name in COLUMNS
        }
        tokens["logprobs"] = [_plain(value) for value in tokens["logprobs"]]
        yield {
            "trajectory": act.trajectory,
            "attempt": act.attempt,
            "step": act.step,
            **{name: _plain(act.meta.get(name)) for name in ("wall", "finish_reason", "queue_s", "duration_s")},
            **{name: act.meta.get(name) for name in ("tools", "calls")},
            **{name: seen.get(name) for name in ("parts", "results", "fault", "done", "truncated")},
            "prompt": decode(prompt_ids) if decode and prompt_ids is not None else None,
            "text": decode(act.ids) if decode else None,
            "observation": "".join(part.get("text", "") for part in seen["parts"]) if after else None,
            "prompt_ids": prompt_ids.tolist() if prompt_ids is not None else None,
            "contents": contents,
            **tokens,
        }
        root, contents = "", None


def _plain(value: Any) -> Any:
    return None if isinstance(value, float) and not math.isfinite(value) else value


# ---- how it is written --------------------------------------------------------------------------------------------


class _Jsonl:
    def __init__(self, files: Sequence[Path]) -> None:
        self._file, self._contents = (file.open("wb") for file in files)

    def close(self) -> None:
        self._file.close()
        self._contents.close()

    def add_content(self, hash: str, data: bytes) -> None:
        row = {"content": hash, "data": base64.b64encode(data).decode()}
        self._contents.write(json.dumps(row).encode() + b"\n")

    def add(self, trajectory: Fields, steps: Sequence[Fields], scores: Sequence[Fields]) -> None:
        row = {**trajectory, "steps": _without_name(steps), "rewards": _without_name(scores)}
        # Half a surrogate pair can't be UTF-8: it becomes "?".
        self._file.write(json.dumps(row, ensure_ascii=False, allow_nan=False).encode(errors="replace") + b"\n")


def _without_name(rows: Sequence[Fields]) -> list[Fields]:
    return [{name: value for name, value in row.items() if name != "trajectory"} for row in rows]


_TABLES = {"trajectories": _TRAJECTORY, "steps": _STEP, "rewards": REWARDS, "contents": _CONTENT}


class _Parquet:
    def __init__(self, files: Sequence[Path]) -> None:
        try:
            import pyarrow
            from pyarrow import parquet
        except ImportError as error:
            raise ConfigError("--format parquet: needs pyarrow: pip install 'hpcrl[analysis]'") from error
        self._arrow = pyarrow
        self._schemas = {
            table: pyarrow.schema([(name, self._type(kind)) for name, kind in fields.items()])
            for table, fields in _TABLES.items()
        }
        self._rows: dict[str, list[Fields]] = {table: [] for table in _TABLES}
        self._tokens = 0
        self._writers = {
            table: parquet.ParquetWriter(file, self._schemas[table], compression="zstd")
            for table, file in zip(_TABLES, files, strict=True)
        }

    def _type(self, kind: str) -> Any:
        if kind.startswith("["):
            return self._arrow.list_(self._type(kind[1:]))
        if kind == "B":
            return self._arrow.binary()
        return self._arrow.string() if kind[0] in "SJ" else self._arrow.from_numpy_dtype(np.dtype(kind))

    def close(self) -> None:
        self._write()
        for writer in self._writers.values():
            writer.close()

    def add(self, trajectory: Fields, steps: Sequence[Fields], scores: Sequence[Fields]) -> None:
        for table, rows in (("trajectories", [trajectory]), ("steps", steps), ("rewards", scores)):
            fields = _TABLES[table]
            self._rows[table] += [{name: _cell(row.get(name), kind) for name, kind in fields.items()} for row in rows]
        self._grow(sum(len(step["ids"]) for step in steps) + 100)

    def add_content(self, hash: str, data: bytes) -> None:
        self._rows["contents"].append({"content": hash, "data": data})
        self._grow(len(data) // 16)

    def _grow(self, tokens: int) -> None:
        self._tokens += tokens
        if self._tokens >= _TOKENS:
            self._write()

    def _write(self) -> None:
        for table, rows in self._rows.items():
            if rows:
                self._writers[table].write_table(self._arrow.Table.from_pylist(rows, schema=self._schemas[table]))
            rows.clear()
        self._tokens = 0


def _cell(value: Any, kind: str) -> Any:
    if value is None:
        return None
    if kind == "J":
        return json.dumps(value, allow_nan=False)  # ASCII: half a surrogate pair stays what it is
    return str(value).encode(errors="replace").decode() if kind == "S" else value
