"""The store as pandas tables: trajectories with conditions, rewards. The one place where pandas is."""

from __future__ import annotations

import math
import operator
from collections.abc import Iterable, Mapping
from contextlib import suppress
from datetime import datetime
from numbers import Real
from typing import TYPE_CHECKING, Any, get_args

import numpy as np
import pandas as pd

from hpcrl.store.rows import REWARDS, Table, scores, text
from hpcrl.types import Cause, ConfigError, State, TrajectoryKind

if TYPE_CHECKING:
    from hpcrl.store.index import Store

STATUSES = (*(state.value for state in State if state.terminal), "open")
_FEW = ("status", "fault", "kind", "environment", "task_kind", "phase", "node")  # columns of few different values
# What `Store.query` takes: keyword -> (column, comparison).
CONDITIONS: Mapping[str, tuple[str, str]] = {
    **{name: (name, "is") for name in (*_FEW, "task", "group", "attempt", "success")},
    "since": ("wall", ">="),
    "until": ("wall", "<"),
    "reward_below": ("reward", "<"),
    "reward_above": ("reward", ">"),
    "version": ("max_version", ">="),  # and min_version <= it: that sampled any of its tokens
}
_COMPARISONS = {"<": operator.lt, ">": operator.gt, ">=": operator.ge}
_KNOWN = {"status": STATUSES, "kind": get_args(TrajectoryKind), "fault": tuple(Cause)}  # though none is in the store


def frame(store: Store) -> pd.DataFrame:
    """One row per trajectory, in the order that they were first read: the columns of rows.TRAJECTORIES.

    `status` is "open" where the trajectory has not ended. `reward` counts a REWARD record in place of what END says of
    the same source and step.
    """
    found = store.summary()
    columns: dict[str, Any] = {}
    for name in found.dtype.names or ():
        values = found[name]
        if values.dtype.kind != "S":
            columns[name] = values
        elif name in _FEW:
            few, codes = np.unique(values, return_inverse=True)
            columns[name] = pd.Categorical.from_codes(codes, pd.Index([text(one) for one in few.tolist()]))
        else:
            columns[name] = [text(one) for one in values.tolist()]
    columns["status"] = columns["status"].rename_categories({"": "open"})
    made = pd.DataFrame(columns).rename(columns={"id": "trajectory"})
    given = rewards(store)
    late = given.loc[given["late"], "trajectory"].unique()
    if len(late):
        latest = given[given["trajectory"].isin(late)].sort_values(["late", "wall"], kind="stable")
        latest = latest.drop_duplicates(["trajectory", "step", "source"], keep="last")
        sums = made["trajectory"].map(latest.groupby("trajectory")["value"].sum())
        made["reward"] = sums.where(sums.notna(), made["reward"])
    return made


def rewards(store: Store) -> pd.DataFrame:
    """One row per score: the columns of rows.REWARDS."""
    tables = [decoded(table) for table in store.tables("rewards")]
    fresh = [one for name, row, meta in store.fresh() for one in scores(name, row.kind, row.step, meta)]
    tables.append(pd.DataFrame(fresh, columns=list(REWARDS)))
    found = pd.concat([table for table in tables if len(table)] or tables[-1:], ignore_index=True)
    return found.drop_duplicates(ignore_index=True).astype({"late": bool})


def moment(time: Any) -> float:
    """Seconds since 1970 of a datetime, of what pandas or numpy have for it, of ISO 8601 text (without an offset: this
    machine's), or of such seconds.

    >>> moment("1970-01-02T00:00:00Z"), moment("86400.5"), moment(pd.Timestamp("1970-01-02", tz="UTC"))
    (86400.0, 86400.5, 86400.0)
    """
    seconds = math.nan
    with suppress(ValueError, TypeError, OverflowError):
        if not isinstance(time, str | Real):
            seconds = pd.Timestamp(time).to_pydatetime().timestamp()
        else:
            try:
                seconds = float(time)
            except ValueError:
                seconds = datetime.fromisoformat(str(time).strip()).timestamp()
    if not math.isfinite(seconds):
        raise ConfigError(
            f"{time!r:.60}: no time; give ISO 8601 (2026-03-01T12:30, 2026-03-01T12:30+02:00) or seconds since 1970"
        )
    return seconds


def as_rows(frame: pd.DataFrame) -> list[dict[str, Any]]:
    """A table as JSON knows it: what is no number (nan, infinity) is None."""

    def plain(value: Any) -> Any:
        return None if isinstance(value, float) and not math.isfinite(value) else value

    return [{str(name): plain(value) for name, value in row.items()} for row in frame.to_dict("records")]


def decoded(table: Table) -> pd.DataFrame:
    """A shard's table with its strings as text."""
    values = {name: table[name] for name in table.dtype.names or ()}
    return pd.DataFrame({
        name: [text(one) for one in column.tolist()] if column.dtype.kind == "S" else column
        for name, column in values.items()
    })  # fmt: skip


def query(made: pd.DataFrame, conditions: Mapping[str, Any]) -> pd.DataFrame:
    """The rows of `frame` that meet every condition (see CONDITIONS); several values (a list, a set) mean any of them.

    Raises ConfigError for a condition that there isn't, and a value that no row can have.
    """
    mask = np.ones(len(made), bool)
    for name, value in conditions.items():
        if value is None:
            continue
        if name not in CONDITIONS:
            raise ConfigError(f"query: no condition {name!r}; there are: {', '.join(CONDITIONS)}")
        column, comparison = CONDITIONS[name]
        series = made[column]
        if comparison == "is":
            mask &= series.isin(_values(name, value, series)).to_numpy(bool)
            continue
        bound = moment(value) if column == "wall" else value
        if not _is_number(bound):
            raise ConfigError(f"query: {name} must be a number, not {value!r}")
        mask &= _COMPARISONS[comparison](series.to_numpy(), bound)
        if name == "version":
            mask &= made["min_version"].to_numpy() <= bound
    return made[mask]


def _values(name: str, value: Any, series: pd.Series[Any]) -> list[Any]:
    """A condition's values, each of which a row may have."""
    values = [value] if isinstance(value, str) or not isinstance(value, Iterable) else list(value)
    if known := _KNOWN.get(name):
        there = list(dict.fromkeys([*known, *series.unique()]))
        for one in values:
            if one not in there:
                raise ConfigError(f"query: no {name} {one!r}; there are: {', '.join(filter(None, there))}")
    fits, what = (_is_number, "a number") if series.dtype.kind in "if" else (lambda one: isinstance(one, str), "text")
    for one in values:
        if not fits(one):
            raise ConfigError(f"query: {name} must be {what}, not {one!r}")
    return values


def _is_number(value: Any) -> bool:
    return isinstance(value, Real) and value == value
