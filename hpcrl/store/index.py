"""The reader of a run's store: an index over shards and segments, derived from them, in memory, never the truth.

    refresh: new shards and new bytes of segments -> rows (hash, parent, where it lies; no payload) -> trajectories
    read:    hash -> row -> one pread per column (shard) or frame (segment); a file that went is found again by name

A record that lies in two files (a segment and its shard, or appended twice) is one row: rows are keyed by hash.
"""

from __future__ import annotations

import errno
import logging
import math
import os
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np

from hpcrl.layout import RunPaths
from hpcrl.store.compact import shards
from hpcrl.store.records import CHAINED, COLUMNS, Kind, Record, Torn
from hpcrl.store.rows import Row, Trajectory, TrajectoryInfo, leaf
from hpcrl.store.segment import CLOSED, OPEN, name_parts, read_at, read_header, read_segment, segments
from hpcrl.store.shard import Shard
from hpcrl.types import Ended, Receipt, Sequence_, StoreError, Task

logger = logging.getLogger(__name__)


class Store:
    """Reads shards and closed segments; with `open_segments` also what is in open ones (for lost owners and tests).

    Not thread-safe. Holds files open: `close` it, or use it as a context manager.
    """

    _MAX_FILES = 64

    def __init__(self, paths: RunPaths, *, open_segments: bool = False) -> None:
        self._paths = paths
        self._open_too = open_segments
        self.damaged: dict[str, str] = {}  # file -> what is wrong with it; what could be read of it is indexed
        self._shards: dict[str, Shard] = {}
        self._used: dict[str, Shard] = {}  # those that may hold a file open
        self._uids: set[str] = set()  # of segments that are in a shard
        self._ends: dict[str, int | None] = {}  # segment -> bytes indexed, None when it is closed and done
        self._fds: dict[str, int] = {}
        self._rows: dict[str, Row] = {}
        self._names: dict[str, str] = {}  # hash -> trajectory
        self._trajectories: dict[str, Trajectory] = {}

    def __enter__(self) -> Store:
        self.refresh()
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def __len__(self) -> int:
        """How many records are indexed."""
        return len(self._rows)

    def close(self) -> None:
        for shard in self._used.values():
            shard.close()
        for fd in self._fds.values():
            os.close(fd)
        self._used.clear()
        self._fds.clear()

    # ---- taking in

    def refresh(self) -> None:
        """Take in what is new in the folder; costs in proportion to that. A file that is damaged goes to `damaged`."""
        while not self._look():
            pass

    def _look(self) -> bool:
        """One pass; False when a segment went away meanwhile (into a shard, so that another pass finds it)."""
        # Segments are listed before shards: one that goes missing in between is in a shard that the next list has.
        suffixes = (CLOSED, OPEN) if self._open_too else (CLOSED,)
        listed = [path for suffix in suffixes for path in segments(self._paths.log, suffix)]
        for path in shards(self._paths):
            if path.name not in self._shards and path.name not in self.damaged:
                with self._noting_damage(path):
                    self._take_shard(path)
        for path in listed:
            try:
                if path.name not in self.damaged:
                    with self._noting_damage(path):
                        self._take_segment(path)
            except FileNotFoundError:
                return False
        return True

    @contextmanager
    def _noting_damage(self, path: Path) -> Iterator[None]:
        try:
            yield
        except StoreError as error:
            logger.error("%s", error)
            self.damaged[path.name] = str(error)

    def _take_shard(self, path: Path) -> None:
        shard = Shard(path)
        self._shards[path.name] = shard
        self._uids |= {source["uid"] for source in shard.sources}
        for source in shard.sources:
            self._forget_file(Path(source["name"]).stem)
        steps = {name: shard.steps[name].tolist() for name in shard.steps}
        for at in range(len(shard)):
            source = shard.sources[steps["segment"][at]]
            row = Row(
                hash=steps["hash"][at].decode(),
                parent=steps["parent"][at].decode(),
                kind=Kind(steps["kind"][at]),
                attempt=steps["attempt"][at],
                step=steps["step"][at],
                num_sampled=steps["num_sampled"][at],
                node=source["node"],
                segment=source["number"],
                offset=steps["offset"][at],
                file=path.name,
                at=at,
            )
            known = row.hash in self._rows
            wanted = not known and row.kind in (Kind.ADOPT, Kind.END, Kind.REWARD)
            self._add(row, shard.trajectories[steps["trajectory"][at]], shard.header(at)["meta"] if wanted else None)

    def _take_segment(self, path: Path) -> None:
        done = self._ends.get(path.stem, 0)
        if done is None:
            return
        if not done:
            try:
                header, done = read_header(path)
            except Torn as torn:
                if path.suffix == OPEN:
                    return
                raise StoreError(f"{path}: damaged at byte 0: {torn}") from torn
            if header.uid in self._uids:
                self._ends[path.stem] = None
                return
        node, number = name_parts(path)
        for offset, record in read_segment(path, done):
            row = Row(
                hash=record.hash,
                parent=record.parent,
                kind=record.kind,
                attempt=record.attempt,
                step=record.step,
                num_sampled=int(record.sampled.sum()),
                node=node,
                segment=number,
                offset=offset,
                file=path.stem,
                at=offset,
            )
            self._add(row, record.trajectory, record.meta)
            done = offset + record.size
        self._ends[path.stem] = None if path.suffix == CLOSED else done

    def _add(self, row: Row, trajectory: str, meta: Mapping[str, Any] | None) -> None:
        known = self._rows.get(row.hash)
        if known is not None:
            if row.file in self._shards:
                known.file, known.at = row.file, row.at
            return
        self._rows[row.hash] = row
        self._names[row.hash] = trajectory
        if not trajectory:
            return
        entry = self._trajectories.setdefault(trajectory, Trajectory())
        entry.rows[row.hash] = row
        entry.chain = None
        if meta is not None and row.kind in (Kind.ADOPT, Kind.END, Kind.REWARD):
            entry.meta[row.hash] = meta

    def _forget_file(self, stem: str) -> None:
        fd = self._fds.pop(stem, None)
        if fd is not None:
            os.close(fd)

    # ---- reading

    def has(self, hash: str) -> bool:
        return hash in self._rows

    def record(self, hash: str) -> Record:
        """Raises StoreError when it isn't here or is damaged."""
        row = self._rows.get(hash)
        if row is None:
            raise StoreError(f"{self._paths.root}: no record {hash}")
        for _ in range(3):
            shard = self._shards.get(row.file)
            if shard is not None:
                self._used[row.file] = shard
                if len(self._used) > self._MAX_FILES:
                    self._used.pop(next(iter(self._used))).close()
                return shard.record(row.at)
            try:
                return read_at(self._fd(row.file), row.at, f"{self._paths.log / row.file}")
            except OSError as error:
                if error.errno not in (errno.ENOENT, errno.ESTALE):
                    raise
            # Its segment became a shard, which knows the row by its hash.
            self._forget_file(row.file)
            self.refresh()
        raise StoreError(f"{self._paths.log / row.file}: is gone, and no shard holds record {hash}")

    def _fd(self, stem: str) -> int:
        fd = self._fds.get(stem)
        if fd is None:
            if len(self._fds) >= self._MAX_FILES:
                self._forget_file(next(iter(self._fds)))
            path = self._paths.log / f"{stem}{CLOSED}"
            try:
                fd = os.open(path, os.O_RDONLY)
            except FileNotFoundError:
                fd = os.open(path.with_suffix(OPEN), os.O_RDONLY)
            self._fds[stem] = fd
        return fd

    def _walk(self, head: str) -> list[Row]:
        """Rows from the chain's root to `head`."""
        rows: list[Row] = []
        hash = head
        while hash:
            row = self._rows.get(hash)
            if row is None:
                child = f", the parent of {rows[-1].hash}" if rows else ""
                raise StoreError(f"{self._paths.root}: no record {hash}{child}")
            rows.append(row)
            hash = row.parent
        return rows[::-1]

    def complete(self, head: str) -> bool:
        """Whether `head` and every record before it on its chain are here."""
        try:
            return bool(self._walk(head))
        except StoreError:
            return False

    def chain(self, head: str) -> list[Record]:
        """Root (the first ADOPT) to head. Raises StoreError naming a parent that isn't here."""
        return [self.record(row.hash) for row in self._walk(head)]

    def sequence(self, head: str, reward: float) -> Sequence_:
        """The chain that ends in `head` as training data: the tokens of its newest context, in order.

        Raises StoreError when a record is missing, or the chain names no root.
        """
        records = self.chain(head)
        first = max((i for i, record in enumerate(records) if record.meta.get("root")), default=-1)
        if first < 0:
            raise StoreError(f"{self._paths.root}: the chain to {head} names no root prompt")
        root = self.record(records[first].meta["root"])
        parts = [root, *(record for record in records[first:] if len(record.ids))]
        columns = {name: np.concatenate([part.filled(name) for part in parts]) for name in COLUMNS}
        steps = np.repeat([-1, *(part.step for part in parts[1:])], [len(part.ids) for part in parts])
        return Sequence_(trajectory=records[-1].trajectory, steps=steps.astype(np.int32), reward=reward, **columns)

    def context(self, head: str) -> Sequence_:
        """`sequence` before there is a reward (nan): what an attempt that adopts `head` continues with."""
        return self.sequence(head, math.nan)

    # ---- trajectories

    def _chain_of(self, trajectory: str) -> list[Row]:
        """The rows of the highest attempt's chain; from its first known record when a parent is missing."""
        entry = self._trajectories[trajectory]
        if entry.chain is None:
            rows = [row for row in entry.rows.values() if row.kind in CHAINED]
            highest = max((row.attempt for row in rows), default=0)
            chain = [row for row in rows if row.attempt == highest]
            last = leaf(chain)
            entry.chain = []
            while last is not None:
                entry.chain.append(last)
                last = self._rows.get(last.parent)
            entry.chain.reverse()
        return entry.chain

    def head(self, trajectory: str) -> str | None:
        """The last record of the highest attempt's chain (END where it ended); None when nothing of it is here."""
        if trajectory not in self._trajectories or not self._chain_of(trajectory):
            return None
        return self._chain_of(trajectory)[-1].hash

    def ended(self, head: str) -> Ended | None:
        """What the END record `head` says; None when it is another kind of record, or not here. Reads nothing."""
        row = self._rows.get(head)
        if row is None or row.kind is not Kind.END:
            return None
        return Ended.from_json({**self._trajectories[self._names[head]].meta[head], "head": head})

    def unsettled(self, head: str) -> list[Record]:
        """Of the chain to `head` and its prompts: what only open segments hold; their owner may not have synced it."""
        chain = self.chain(head)
        roots = [self.record(hash) for record in chain if (hash := record.meta.get("root"))]
        open_files = {file for file, end in self._ends.items() if end is not None}
        return [record for record in (*roots, *chain) if self._rows[record.hash].file in open_files]

    def task(self, trajectory: str) -> Task:
        """Raises StoreError when no ADOPT record of it is here."""
        for meta in self._metas(trajectory, Kind.ADOPT):
            return Task(**meta["task"])
        raise StoreError(f"{self._paths.root}: no trajectory {trajectory!r} in the store")

    def _metas(self, trajectory: str, kind: Kind) -> Iterator[Mapping[str, Any]]:
        entry = self._trajectories.get(trajectory) or Trajectory()
        return (meta for hash, meta in entry.meta.items() if entry.rows[hash].kind is kind)

    def names(self) -> Iterable[str]:
        """The ids of all trajectories, in the order that they were first read."""
        return self._trajectories.keys()

    def trajectories(self) -> Iterator[TrajectoryInfo]:
        for trajectory in list(self._trajectories):
            info = self.info(trajectory)
            if info is not None:
                yield info

    def info(self, trajectory: str) -> TrajectoryInfo | None:
        """None when no record of its chain is here."""
        entry = self._trajectories.get(trajectory)
        chain = self._chain_of(trajectory) if entry else []
        if entry is None or not chain:
            return None
        adopts = [entry.meta[row.hash] for row in chain if row.kind is Kind.ADOPT]
        adopt = adopts[-1] if adopts else next(self._metas(trajectory, Kind.ADOPT), {})
        ended = entry.meta[chain[-1].hash] if chain[-1].kind is Kind.END else {}
        rewards = dict(ended.get("rewards") or {})
        for meta in self._metas(trajectory, Kind.REWARD):
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
            num_orphans=sum(row.kind in CHAINED for row in entry.rows.values()) - len(chain),
            node=chain[-1].node,
        )

    def records(self, trajectory: str) -> list[Record]:
        """All of a trajectory's records, orphans, rewards and transitions included, in the order they were read."""
        entry = self._trajectories.get(trajectory)
        return [self.record(hash) for hash in entry.rows] if entry else []

    def receipts(self, trajectory: str) -> list[Receipt]:
        """Of the chain, in its order. Reads nothing."""
        if trajectory not in self._trajectories:
            return []
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

    def rows(self) -> Iterator[tuple[str, Row]]:
        """(trajectory, row) of every record."""
        return ((self._names[hash], row) for hash, row in self._rows.items())
