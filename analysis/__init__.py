"""A run's store as Dask DataFrames, one partition per shard, so that it may be larger than memory.

>>> from hpcrl_analysis import calls, frame
>>> frame("runs/mine").groupby("task_kind").success.mean().compute()  # doctest: +SKIP

What is in no shard yet isn't here: `hpcrl store compact` first. A table that fits in memory, with what is in segments:
`hpcrl.store.index.Store(run).query()`.
"""

from __future__ import annotations

import logging
from functools import partial
from pathlib import Path
from typing import Any

import dask.dataframe as dd
import numpy as np
import pandas as pd

from hpcrl.layout import RunPaths
from hpcrl.store.compact import shards
from hpcrl.store.query import decoded
from hpcrl.store.records import Kind, from_json
from hpcrl.store.rows import IDENTITY, TRAJECTORIES, Table, table
from hpcrl.store.shard import Shard
from hpcrl.types import StoreError

logger = logging.getLogger(__name__)

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
    Rows are in the order of the shards, and within one in that in which it first met each trajectory: sort by `wall`.
    """
    return _frame(run, _trajectories, TRAJECTORIES)


def calls(run: str | Path) -> Any:
    """One row per tool call: which trajectory, attempt, step; the tool's name, `status` (ok, error, timeout or
    refused), how long it took, and the bytes of its output that no model saw.

    In the order in which they lie: shard by shard, a trajectory's steps side by side; that is no order in time (`wall`
    is). A record that is damaged is left out, and the log (`hpcrl_analysis`) names it."""
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
    rows: list[tuple[Any, ...]] = []
    with Shard(Path(path)) as shard:
        for number, trajectory in enumerate(shard.ids):
            try:
                steps = shard.steps(number)
            except StoreError as error:
                logger.error("left out: the calls of %r: %s", trajectory, error)
                continue
            for at in np.flatnonzero(steps["kind"] == Kind.OBSERVE):
                place = (trajectory, *steps[["attempt", "step", "wall"]][at])
                try:
                    found = from_json(shard.meta(steps[at : at + 1]))["meta"]["results"]
                    rows += [(*place, *(one[name] for name in list(CALLS)[4:])) for one in found]
                except (ValueError, LookupError, TypeError) as error:
                    logger.error("left out: the calls of %r, step %d: %s", trajectory, place[2], error)
    return _pandas(table(rows, CALLS))
