"""The reader of a run's store: chains, their tokens, and trajectories as they are asked for.

read   trajectory -> its fragments -> rows (catalog.py) -> chain -> one pread per column (shard) or frame (segment)
"""

from __future__ import annotations

import logging
import math
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray

from hpcrl.layout import RunPaths, is_unreadable
from hpcrl.store.catalog import Catalog, again, mendable
from hpcrl.store.records import CHAINED, COLUMNS, Kind, Record, joined, named
from hpcrl.store.rows import TRAJECTORIES, Row, Table, TrajectoryInfo, leaf, merge, summarize, table, text
from hpcrl.store.shard import Shard
from hpcrl.types import Ended, Receipt, Sequence_, StoreError, Task

if TYPE_CHECKING:
    import pandas as pd

logger = logging.getLogger(__name__)

# Rows that lie side by side: of a shard, with their rows there; or one of a segment.
Piece = tuple[Shard | None, Table, Sequence[Row]]


class Store(Catalog):
    """Reads shards and closed segments; with `open_segments` also what is in open ones (for lost owners and tests).

    Knows what was there when it was made; `refresh` takes in what came since. `only`: one trajectory, the others are
    left out. Not thread-safe. Holds files open: `close` it, or use it as a context manager.
    """

    def __init__(self, run: RunPaths | str | Path, *, open_segments: bool = False, only: str = "") -> None:
        """Raises StoreError when `run` is no run folder."""
        self._merged: Table | None = None
        self._frame: pd.DataFrame | None = None
        super().__init__(run, open_segments=open_segments, only=only)

    def _changed(self) -> None:
        self._merged = self._frame = None

    # ---- chains

    def _walk(self, trajectory: str, head: str) -> list[Row]:
        """Rows from the chain's root to `head`."""
        known = self.rows(trajectory)
        found: list[Row] = []
        hash = head
        while hash:
            row = known.get(hash)
            if row is None:
                child = f", the parent of {found[-1].hash}" if found else ""
                raise StoreError(f"{self._paths.root}: {trajectory}: no record {hash}{child}")
            found.append(row)
            hash = row.parent
        return found[::-1]

    def complete(self, trajectory: str, head: str) -> bool:
        """Whether `head`, every record before it on its chain, and their prompts are here."""
        return head != "" and not self.lacking(trajectory, head)

    def lacking(self, trajectory: str, head: str) -> str:
        """The hash of the first record that isn't here on the way back from `head`, a prompt's too; "" for none."""
        known, hash = self.rows(trajectory), head
        while hash in known:
            row = known[hash]
            if row.root and row.root not in self._prompts:
                return row.root
            hash = row.parent
        return hash

    def chain(self, trajectory: str, head: str) -> list[Record]:
        """Root (the first ADOPT) to head. Raises StoreError naming a parent that isn't here."""
        return [self.record(trajectory, row.hash) for row in self._walk(trajectory, head)]

    @again
    def sequence(self, trajectory: str, head: str, reward: float) -> Sequence_:
        """The chain that ends in `head` as training data: the tokens of its newest context, in order.

        Raises StoreError when a record is missing, or the chain names no root.
        """
        rows = self._walk(trajectory, head)
        first = max((i for i, row in enumerate(rows) if row.root), default=-1)
        if first < 0:
            raise StoreError(f"{self._paths.root}: the chain to {head} names no root prompt")
        root = self.record("", rows[first].root)
        rows = [row for row in rows[first:] if row.num_tokens]
        columns = {name: [root.filled(name)] for name in COLUMNS}
        for run in self._runs(rows):
            for name, part in self._tokens(trajectory, self._located(trajectory, run)).items():
                columns[name].append(part)
        steps = np.repeat([-1, *(row.step for row in rows)], [len(root.ids), *(row.num_tokens for row in rows)])
        whole = {name: joined(parts, name) for name, parts in columns.items()}
        return Sequence_(trajectory=trajectory, steps=steps.astype(np.int32), reward=reward, **whole)

    def _runs(self, rows: Sequence[Row]) -> Iterator[list[Row]]:
        """Cut into rows that lie side by side in one shard."""
        run: list[Row] = []
        for row in rows:
            if run and not (row.file in self._shards and row.file == run[-1].file and row.at == run[-1].at + 1):
                yield run
                run = []
            run.append(row)
        if run:
            yield run

    def _step(self, trajectory: str, step: int) -> list[Piece]:
        """Where the tokens lie that a step added. Raises StoreError for a step that isn't."""
        straight = self._straight(trajectory)
        if straight is not None:
            shard, chain = straight
            steps = chain[(chain["step"] == step) & (chain["num_tokens"] > 0)]
            pieces: list[Piece] = [(shard, steps, ())] if len(steps) else []
        else:
            rows = [row for row in self._chain_of(trajectory) if row.step == step and row.num_tokens]
            pieces = [self._located(trajectory, run) for run in self._runs(rows)]
        if not pieces:
            raise StoreError(f"{self._paths.root}: {trajectory!r} has no step {step}")
        return pieces

    def _straight(self, trajectory: str) -> tuple[Shard, Table] | None:
        """The chain of a trajectory that has one attempt, nothing beside it, and lies in one shard, as most do: as it
        lies there. No row of it is made an object."""
        places = self._places.get(trajectory, ())
        if len(places) != 1 or trajectory in self._fresh:
            return None
        shard, number = places[0]
        steps = self._keep_open(shard).steps(number)
        chain = steps[(steps["kind"] >= Kind.ADOPT) & (steps["kind"] <= Kind.END)]
        follows = chain["parent"][1:] == chain["hash"][:-1]
        return (shard, chain) if len(chain) and not chain["parent"][0] and follows.all() else None

    def _tokens(self, trajectory: str, piece: Piece) -> Mapping[str, Any]:
        """The token columns of rows that lie side by side."""
        shard, steps, run = piece
        if shard is None:
            record = self.record(trajectory, run[0].hash)
            return {name: record.filled(name) for name in COLUMNS}
        return self._keep_open(shard).tokens(steps)

    def _located(self, trajectory: str, run: Sequence[Row]) -> Piece:
        shard = self._shards.get(run[0].file)
        if shard is None:
            return None, np.empty(0, np.void), run
        number = next(number for place, number in self._places[trajectory] if place is shard)
        first = run[0].at - int(shard.trajectories[number]["first_row"])
        return shard, shard.steps(number)[first : first + len(run)], run

    def trajectory(self, trajectory: str) -> Sequence_:
        """The whole of a trajectory's tokens, root to head, with its reward (nan where it has none)."""
        head = self.head(trajectory)
        if head is None:
            raise StoreError(f"{self._paths.root}: no trajectory {trajectory!r} in the store")
        info = self.info(trajectory)
        assert info is not None
        last = self._head(trajectory)
        if last is not None and last.kind is Kind.END and last.hash != head:
            raise StoreError(
                f"{self._paths.root}: records of {trajectory!r}, which has ended, are lost or can't be read; "
                "`Store.records` gives those that can"
            )
        return self.sequence(trajectory, head, sum(info.rewards.values()) if info.rewards else math.nan)

    def batch(self, trajectories: Sequence[str]) -> dict[str, NDArray[Any]]:
        """Trajectories side by side, padded right with the columns' defaults: `ids`, `logprobs`, `sampled`, `versions`
        and `steps` are [B, T]; `lengths` and `rewards` are [B]."""
        found = [self.trajectory(one) for one in trajectories]
        lengths = np.array([len(one.ids) for one in found], np.int32)
        shape = (len(found), int(lengths.max(initial=0)))
        made: dict[str, NDArray[Any]] = {
            name: np.full(shape, default, dtype) for name, (dtype, default) in COLUMNS.items()
        }
        made["steps"] = np.full(shape, -1, np.int32)
        for row, one in enumerate(found):
            for name, column in made.items():
                column[row, : lengths[row]] = getattr(one, name)
        rewards = np.array([one.reward for one in found], np.float32)
        return {**made, "lengths": lengths, "rewards": rewards}

    @again
    def steps(self, ids: Sequence[tuple[str, int]]) -> list[Sequence_]:
        """The tokens that each (trajectory, step) added: the act's, then the observation's.

        All that is needed is asked of the disk before any of it is waited for. Raises StoreError for a step that isn't.
        """
        self.ahead(trajectory for trajectory, _ in ids)
        wanted = [self._step(trajectory, step) for trajectory, step in ids]
        for pieces in wanted:
            for shard, steps, _ in pieces:
                if shard is not None:
                    self._keep_open(shard).ahead(steps)
        found = []
        for (trajectory, step), pieces in zip(ids, wanted, strict=True):
            parts = [self._tokens(trajectory, piece) for piece in pieces]
            whole = {name: joined([part[name] for part in parts], name) for name in COLUMNS}
            numbers = np.full(len(whole["ids"]), step, np.int32)
            found.append(Sequence_(trajectory=trajectory, steps=numbers, reward=math.nan, **whole))
        return found

    def context(self, trajectory: str, head: str) -> Sequence_:
        """`sequence` before there is a reward (nan): what an attempt that adopts `head` continues with."""
        return self.sequence(trajectory, head, math.nan)

    def unsettled(self, trajectory: str, head: str) -> list[Record]:
        """Of the chain to `head`, its prompts and contents: what only open segments hold; their owner may not have
        synced it."""
        chain = self._walk(trajectory, head)
        open_files = {file for file, end in self._ends.items() if end is not None}
        lost = [self.record(trajectory, row.hash) for row in chain if row.file in open_files]
        shared = [self._prompts[row.root] for row in chain if row.root in self._prompts]
        fresh = self._fresh.get("", {})
        shared += [fresh[hash[:32]] for record in lost for hash in named(record.meta) if hash[:32] in fresh]
        return [self.record("", row.hash) for row in shared if row.file in open_files] + lost

    # ---- trajectories

    def contents(self, trajectory: str) -> set[str]:
        """The contents that a trajectory's records name."""
        rows = (row for row in self.rows(trajectory).values() if row.kind in (Kind.ACT, Kind.OBSERVE))
        return {hash for row in rows for hash in named(self._meta(trajectory, row))}

    def _head(self, trajectory: str, *, whole: bool = False) -> Row | None:
        """The last record of the highest attempt's chain; with `whole` among those alone whose chain is all here."""
        chained = [row for row in self.rows(trajectory).values() if row.kind in CHAINED]
        if whole:
            chained = self._whole(trajectory, chained)
        highest = max((row.attempt for row in chained), default=0)
        return leaf([row for row in chained if row.attempt == highest])

    def _whole(self, trajectory: str, chained: Sequence[Row]) -> list[Row]:
        """Of these rows: those before which no record and no prompt is missing."""
        known = self.rows(trajectory)
        whole = {"": True}
        for row in chained:
            path = []
            hash = row.hash
            while hash not in whole:
                path.append(hash)
                here = known.get(hash)
                if here is None or (here.root and here.root not in self._prompts):
                    whole[hash] = False
                    break
                hash = here.parent
            for one in path:
                whole[one] = whole[hash]
        return [row for row in chained if whole[row.hash]]

    def _chain_of(self, trajectory: str) -> list[Row]:
        """The rows of the highest attempt's chain; from its first known record when a parent is missing."""
        known = self.rows(trajectory)
        chain: list[Row] = []
        row = self._head(trajectory)
        while row is not None:
            chain.append(row)
            row = known.get(row.parent)
        return chain[::-1]

    def head(self, trajectory: str) -> str | None:
        """The last record of the highest attempt's chain (END where it ended) before which nothing is missing.

        None when there is none. What an append that failed left a hole before is passed over.
        """
        row = self._head(trajectory, whole=True)
        return row.hash if row else None

    def _meta(self, trajectory: str, row: Row) -> Mapping[str, Any]:
        if row.hash in self._metas:
            return self._metas[row.hash]
        return self.record(trajectory, row.hash).meta

    def ended(self, trajectory: str, head: str) -> Ended | None:
        """What the END record `head` says; None when it is another kind of record, or not here."""
        row = self.rows(trajectory).get(head)
        if row is None or row.kind is not Kind.END:
            return None
        return Ended.from_json({**self._meta(trajectory, row), "head": head})

    def summary(self) -> Table:
        """One row per trajectory, the fields of rows.TRAJECTORIES; kept until something new is taken in."""
        if self._merged is None:
            fresh = [summarize(name, rows.values(), self._metas) for name, rows in self._fresh.items()]
            found = [shard.trajectories for shard in self._shards.values()]
            merged = merge([*found, table(fresh, TRAJECTORIES)])
            merged = merged[merged["id"] != b""]
            self._merged = merged[merged["id"] == self._only.encode()] if self._only else merged
            for at in np.flatnonzero(self._merged["status"] == b""):
                try:
                    chain = self._chain_of(text(self._merged["id"][at]))
                except StoreError as error:
                    logger.error("%s", error)  # its last fragment's counts must do
                    continue
                self._merged["num_steps"][at] = sum(row.kind is Kind.ACT for row in chain)
                self._merged["num_sampled"][at] = sum(row.num_sampled for row in chain)
                self._merged["num_tokens"][at] = sum(row.num_tokens for row in chain)
        return self._merged

    def summaries(self) -> Iterator[dict[str, Any]]:
        """`summary`, one dict per trajectory, strings decoded."""
        found = self.summary()
        for values in found.tolist():
            names = zip(found.dtype.names or (), values, strict=True)
            yield {name: text(value) if isinstance(value, bytes) else value for name, value in names}

    def query(self, **conditions: Any) -> pd.DataFrame:
        """The trajectories that meet all conditions (`store.query.CONDITIONS`), one row each; without any, all.

        >>> store.query(kind="eval", task_kind="count_bits", reward_below=0.5, since=wall)  # doctest: +SKIP
        """
        from hpcrl.store import query

        if self._frame is None:
            self._frame = query.frame(self)
        return query.query(self._frame, conditions)

    def rewards(self) -> pd.DataFrame:
        """One row per score, late ones included."""
        from hpcrl.store import query

        return query.rewards(self)

    def info(self, trajectory: str) -> TrajectoryInfo | None:
        """None when no record of its chain is here. Reads its rows: for all trajectories, `summary` is quicker."""
        chain = self._chain_of(trajectory)
        if not chain:
            return None
        rows = self.rows(trajectory).values()
        adopts = [row for row in chain if row.kind is Kind.ADOPT] or [row for row in rows if row.kind is Kind.ADOPT]
        adopt = self._meta(trajectory, adopts[-1]) if adopts else {}
        ended = self._meta(trajectory, chain[-1]) if chain[-1].kind is Kind.END else {}
        rewards = dict(ended.get("rewards") or {})
        for row in rows:
            if row.kind is Kind.REWARD:
                meta = self._meta(trajectory, row)
                rewards[meta.get("source", "")] = meta.get("value")
        return TrajectoryInfo(
            trajectory=trajectory,
            kind=adopt.get("kind", ""),
            group=adopt.get("group", ""),
            phase=adopt.get("phase", ""),
            task=Task(**adopt["task"]).id if "task" in adopt else "",
            status=ended.get("status", "") if ended else "open",
            attempt=chain[-1].attempt,
            head=chain[-1].hash,
            rewards=rewards,
            num_steps=sum(row.kind is Kind.ACT for row in chain),
            num_sampled=sum(row.num_sampled for row in chain),
            num_orphans=sum(row.kind in CHAINED for row in rows) - len(chain),
            node=chain[-1].node,
        )

    def records(self, trajectory: str) -> list[Record]:
        """All of a trajectory's records, orphans, rewards and transitions included, in the order they were read. Those
        that can't be read are left out, and `damaged` has them by their hash."""
        found = []
        for hash, row in self.rows(trajectory).items():
            try:
                found.append(self.record(trajectory, hash))
            except (StoreError, OSError) as error:
                if isinstance(error, OSError) and not is_unreadable(error):
                    raise
                label = f"{row.kind.name} {hash} of {trajectory or 'all'}"
                self.damaged[hash] = f"{label}: {mendable(error, self._paths)}"
        return found

    def receipts(self, trajectory: str) -> list[Receipt]:
        """Of the chain, in its order. Reads no payload."""
        return [
            Receipt(
                trajectory=trajectory,
                attempt=row.attempt,
                step=row.step,
                kind=row.kind.name,
                hash=row.hash,
                node=row.node,
                segment=row.segment,
                offset=row.offset,
            )
            for row in self._chain_of(trajectory)
        ]
