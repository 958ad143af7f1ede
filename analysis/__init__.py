"""A run's store as Dask DataFrames, one partition per shard, so that it may be larger than memory.

>>> from hpcrl_analysis import calls, frame
>>> frame("runs/mine").groupby("task_kind").success.mean().compute()  # doctest: +SKIP

What is in no shard yet isn't here: `hpcrl store compact` first. A table that fits in memory, with what is in segments:
`hpcrl.store.index.Store(run).query()`.
"""

from __future__ import annotations

import json
from functools import partial
from pathlib import Path
from typing import Any

import dask.dataframe as dd
import pandas as pd

from hpcrl.layout import RunPaths
from hpcrl.store.compact import shards
from hpcrl.store.query import decoded
from hpcrl.store.records import Kind
from hpcrl.store.rows import IDENTITY, TRAJECTORIES, Table, table
from hpcrl.store.shard import Shard
from hpcrl.types import StoreError

CALLS = {
    "trajectory": "S",
    "attempt": "<i4",
    "step": "<i4",
    "wall": "<f8",
    "name": "S",
    "status": "S",
    "duration_s": "<f8",
    "unseen_bytes": "<i8",
}


def frame(run: str | Path) -> Any:
    """One row per trajectory and shard that holds records of it: the columns of docs/store-format.md, `trajectories`.

    `status` is "open" where the trajectory doesn't end in that shard. Of one that goes through several shards, the row
    with another status tells all of it: `frame[frame.status != "open"]` has one row per trajectory that has ended.
    """
    return _frame(run, _trajectories, TRAJECTORIES)


def calls(run: str | Path) -> Any:
    """One row per tool call: which trajectory, attempt, step; the tool's name, `status` (ok, error, timeout or
    refused), how long it took, and the bytes of its output that no model saw."""
    return _frame(run, _calls, CALLS)


def _frame(run: str | Path, read: Any, fields: Any) -> Any:
    found = [str(path) for path in shards(RunPaths.of(run))]
    if not found:
        raise StoreError(f"{run}: has no shards yet; `hpcrl store compact {run}` makes them of what is closed")
    return dd.from_map(partial(read, found), found, meta=_pandas(table([], fields)))


def _pandas(found: Table) -> pd.DataFrame:
    made = decoded(found).rename(columns={"id": "trajectory"})
    texts = [name for name in found.dtype.names or () if found.dtype[name].kind == "S"]
    made = made.astype({"trajectory" if name == "id" else name: "str" for name in texts})
    return made.replace({"status": {"": "open"}}) if len(made) else made


def _trajectories(every: list[str], path: str) -> pd.DataFrame:
    made = _fragments(path).set_index("trajectory")
    for before in reversed(every[: every.index(path)]):
        lacking = made.index[made["kind"] == ""]  # their ADOPT lies in a shard before this one, mostly the last
        if not len(lacking):
            break
        known = _fragments(before).set_index("trajectory")
        known = known.loc[known.index.isin(lacking) & (known["kind"] != ""), list(IDENTITY)]
        made.loc[known.index, list(IDENTITY)] = known
    return made.reset_index()


def _fragments(path: str) -> pd.DataFrame:
    shard = Shard(Path(path))
    shard.close()
    found = shard.trajectories
    return _pandas(found[found["id"] != b""][list(TRAJECTORIES)])


def _calls(every: list[str], path: str) -> pd.DataFrame:
    shard = Shard(Path(path))
    text = shard.whole("text/meta")
    rows = []
    for number, trajectory in enumerate(shard.ids):
        steps = shard.steps(number)
        for step in steps[steps["kind"] == Kind.OBSERVE]:
            start = int(step["meta_start"])
            meta = json.loads(text[start : start + int(step["meta_bytes"])].tobytes())["meta"]
            for one in meta["results"]:
                place = (trajectory, step["attempt"], step["step"], step["wall"])
                rows.append((*place, *(one[name] for name in ("name", "status", "duration_s", "unseen_bytes"))))
    shard.close()
    return _pandas(table(rows, CALLS))
