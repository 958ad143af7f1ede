"""Which records lie where in a run's shards and segments: derived from them, in memory, never the truth.

    refresh   new shards -> their trajectory tables;  new bytes of segments -> rows
    rows      trajectory -> its fragments -> rows;  read: row -> record

Of a shard only the table of trajectories is in memory: a trajectory's rows are read when it is asked for. What is in no
shard yet is in memory row by row. A record that lies in two files (a segment and its shard, or appended twice) is one
row: rows are keyed by hash.

Over 400 lines: to follow files that come, go and break is one matter.
"""

from __future__ import annotations

import errno
import functools
import logging
import os
import re
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from hashlib import sha256
from pathlib import Path
from typing import Any, ParamSpec, Self, TypeVar

from hpcrl.layout import RunPaths
from hpcrl.store.compact import shards
from hpcrl.store.records import Kind, NewerError, Record, Torn
from hpcrl.store.rows import Row, Table, text
from hpcrl.store.salvage import salvage
from hpcrl.store.segment import CLOSED, OPEN, name_parts, read_at, read_header, read_segment, segments
from hpcrl.store.shard import Shard
from hpcrl.types import ConfigError, StoreError

logger = logging.getLogger(__name__)

SETTLE_S = 90.0  # after which each node sees what another did: NFS keeps what it knows of a folder for up to 60 s
_NAMED = (Kind.ADOPT, Kind.END, Kind.REWARD)  # rows of segments whose meta is kept
Place = tuple[Shard, int]  # a trajectory's fragment: the shard, and its number in the shard's table


_P = ParamSpec("_P")
_T = TypeVar("_T")


def again(method: Callable[_P, _T]) -> Callable[_P, _T]:
    """A reader's method, which is called once more, by what is there then, where a shard that it reads has gone.
    Raises StoreError where one has gone again."""

    @functools.wraps(method)
    def called(*args: _P.args, **kwargs: _P.kwargs) -> _T:
        try:
            return method(*args, **kwargs)
        except FileNotFoundError:
            store: Any = args[0]
            store._reindex()
        try:
            return method(*args, **kwargs)
        except FileNotFoundError as error:
            raise StoreError(f"{error.filename}: has gone while it was read, again and again") from error

    return called


def mendable(error: Exception, paths: RunPaths) -> str:
    """What is damaged, and what to do."""
    return f"{error}" + ("" if isinstance(error, NewerError) else f"; mend it with `hpcrl store repair {paths.root}`")


def _prompts(shard: Shard) -> dict[str, Row]:
    rows = (row for number, trajectory in enumerate(shard.ids) if not trajectory for row in shard.rows(number))
    return {row.hash: row for row in rows if row.kind is Kind.PROMPT}


class Catalog:
    """Which records there are, and where. `store.index.Store` says what they mean."""

    _MAX_FILES = 64
    _MAX_CACHED = 1024  # trajectories whose rows are kept

    def __init__(self, run: RunPaths | str | Path, *, open_segments: bool = False, only: str = "") -> None:
        """Raises StoreError when `run` is no run folder."""
        self._paths = run if isinstance(run, RunPaths) else RunPaths.of(run)
        self._open_too, self._only = open_segments, only
        self.damaged: dict[str, str] = {}  # file -> what is wrong with it; what could be read of it is indexed
        self._shards: dict[str, Shard] = {}
        self._used: dict[str, Shard] = {}  # those that may hold a file open
        self._uids: set[str] = set()  # of segments that are in a shard
        self._packed: set[str] = set()  # their names
        self._ends: dict[str, int | None] = {}  # segment -> bytes indexed, None when it is closed and done
        self._fds: dict[str, int] = {}
        self._places: dict[str, list[Place]] = {}
        self._fresh: dict[str, dict[str, Row]] = {}  # trajectory -> hash -> row of a segment
        self._metas: dict[str, Mapping[str, Any]] = {}  # of these
        self._prompts: dict[str, Row] = {}
        self._rescued: dict[str, Record] = {}  # of damaged files
        self._cache: dict[str, tuple[tuple[int, int], dict[str, Row]]] = {}
        try:
            self.refresh(anew=True)
        except BaseException:
            self.close()
            raise

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def __len__(self) -> int:
        """How many records are indexed."""
        return sum(len(self.rows(name)) for name in ("", *self.names()))

    def close(self) -> None:
        for shard in self._used.values():
            shard.close()
        for fd in self._fds.values():
            os.close(fd)
        self._used.clear()
        self._fds.clear()

    # ---- taking in

    def _reindex(self) -> None:
        """Forget shards that have gone (`store repair` and `store prune` take some away), take in what is there."""
        there = {path.name for path in shards(self._paths, anew=True)}
        for shard in [shard for name, shard in self._shards.items() if name not in there]:
            self._drop_shard(shard)
        self.refresh(anew=True)

    def refresh(self, *, anew: bool = False) -> None:
        """Take in what is new in the folder; costs in proportion to that. A file that is damaged goes to `damaged`.

        What other nodes did of late may show only with `anew`, or at a later call, as the folder is on a network
        filesystem (`layout.listed`). Where a file is listed and not to be found, this waits until either changes.
        """
        until, pause_s = time.monotonic() + SETTLE_S, 0.0
        while unseen := self._look(anew):
            if time.monotonic() > until:
                logger.error("listed and not to be found, passed over: %s", ", ".join(sorted(map(str, unseen))))
                return
            time.sleep(pause_s)
            anew, pause_s = True, min(pause_s + 0.1, 1.0)

    def _look(self, anew: bool) -> set[Path]:
        """One pass; the files that are listed and not to be found: a segment that went into a shard which is not listed
        yet, or a name of which this node still believes that it isn't there."""
        # Listed in the order that a record takes: what has gone from one list before it was made is in the next.
        being_written = segments(self._paths.log, OPEN, anew=anew) if self._open_too else []
        closed = segments(self._paths.log, CLOSED, anew=anew and not self._open_too)
        new = [path for path in shards(self._paths, anew=anew) if path.name not in self._shards]
        unseen: set[Path] = set()
        for path in (*new, *closed, *being_written):
            if path.name not in self.damaged:
                try:
                    with self._noting_damage(path):
                        (self._take_segment if path.suffix in (OPEN, CLOSED) else self._take_shard)(path)
                except FileNotFoundError:
                    unseen.add(path)
        # An open one may be listed as a closed one, too.
        return {path for path in unseen if path.stem not in self._packed and self._ends.get(path.stem, 0) is not None}

    @contextmanager
    def _noting_damage(self, path: Path) -> Iterator[None]:
        """What is intact of a damaged file is read all the same, into memory: only what is damaged is missing."""
        try:
            yield
        except StoreError as error:
            self.damaged[path.name] = mendable(error, self._paths)
            logger.error("%s", self.damaged[path.name])
            with suppress(StoreError):
                if not isinstance(error, NewerError):
                    self._rescue(path)

    @contextmanager
    def _reading(self, shard: Shard) -> Iterator[None]:
        """Reading its tables: where one is damaged, so is the file."""
        with self._noting_damage(shard.path):
            try:
                yield
            except StoreError:
                self._drop_shard(shard)
                raise

    def _rescue(self, path: Path) -> None:
        found = salvage(path)
        for record, number, offset in found.records:
            if self._wants(record.trajectory):
                self._rescued.setdefault(record.hash, record)
                node, segment = found.sources[number]["node"], found.sources[number]["number"]
                self._add(Row.of(record, node=node, segment=segment, offset=offset, file=path.name), record)

    def _take_shard(self, path: Path) -> None:
        shard = Shard(path)
        self._prompts |= _prompts(shard)
        self._shards[path.name] = shard
        self._changed()
        self._uids |= {text(uid) for uid in shard.sources["uid"].tolist()}
        for name in shard.sources["name"].tolist():
            self._packed.add(Path(text(name)).stem)
            self._drop_segment(Path(text(name)).stem)
        for number, trajectory in enumerate(shard.ids):
            if self._wants(trajectory):
                self._places.setdefault(trajectory, []).append((shard, number))
        self._keep_open(shard)

    def _drop_shard(self, shard: Shard) -> None:
        del self._shards[shard.path.name]
        self._used.pop(shard.path.name, None)
        shard.close()
        for trajectory in {*shard.ids} & {*self._places}:
            self._places[trajectory] = [place for place in self._places[trajectory] if place[0] is not shard]
            self._cache.pop(trajectory, None)
        self._prompts = {hash: row for hash, row in self._prompts.items() if row.file != shard.path.name}
        for other in self._shards.values():  # it may have held what others hold as well
            self._prompts |= _prompts(other)
        self._changed()

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
            self._add(Row.of(record, node=node, segment=number, offset=offset, file=path.stem), record)
            done = offset + record.size
        self._ends[path.stem] = None if path.suffix == CLOSED else done

    def _add(self, row: Row, record: Record) -> None:
        if row.kind is Kind.PROMPT:
            self._prompts.setdefault(row.hash, row)
        if self._wants(record.trajectory):
            self._changed()
            self._fresh.setdefault(record.trajectory, {}).setdefault(row.hash, row)
            if row.kind in _NAMED:
                self._metas[row.hash] = record.meta

    def _wants(self, trajectory: str) -> bool:
        """ "": of what is of no trajectory."""
        return not self._only or trajectory in ("", self._only)

    def _changed(self) -> None:
        """Something new of a trajectory is known."""

    def _drop_segment(self, stem: str) -> None:
        """Its records are in a shard now."""
        self._forget_file(stem)
        if self._ends.pop(stem, 0) == 0:
            return
        self._ends[stem] = None
        for trajectory, rows in list(self._fresh.items()):
            gone = [hash for hash, row in rows.items() if row.file == stem]
            for hash in gone:
                del rows[hash]
                self._metas.pop(hash, None)
            if gone:
                self._cache.pop(trajectory, None)
            if not rows:
                del self._fresh[trajectory]

    def _forget_file(self, stem: str) -> None:
        fd = self._fds.pop(stem, None)
        if fd is not None:
            os.close(fd)

    # ---- records

    @again
    def rows(self, trajectory: str) -> Mapping[str, Row]:
        """A trajectory's records by hash, those of shards first, else in the order that they were read; of "": those
        that are of none, PROMPT and CONTENT."""
        places, fresh = self._places.get(trajectory, ()), self._fresh.get(trajectory, {})
        stamp = (len(places), len(fresh))
        known = self._cache.get(trajectory)
        if known is not None and known[0] == stamp:
            return known[1]
        found: dict[str, Row] = {}
        for shard, number in places:
            with self._reading(shard):
                for row in self._keep_open(shard).rows(number):
                    found.setdefault(row.hash, row)
        if places is not self._places.get(trajectory, ()):  # a damaged one was dropped, what is intact of it is fresh
            return self.rows(trajectory)
        for hash, row in fresh.items():
            found.setdefault(hash, row)
        self._cache[trajectory] = (stamp, found)
        if len(self._cache) > self._MAX_CACHED:
            del self._cache[next(iter(self._cache))]
        return found

    def prompts(self) -> Mapping[str, Row]:
        """The PROMPT records by hash."""
        return self._prompts

    def read(self, row: Row) -> Record:
        """A row's record. Raises StoreError when it is damaged, or its file is gone and no shard has it."""
        if row.hash in self._rescued:
            return self._rescued[row.hash]
        if row.file in self._shards:
            return self._keep_open(self._shards[row.file]).record(row.at)
        try:
            return read_at(self._fd(row.file), row.at, f"{self._paths.log / row.file}")
        except OSError as error:
            if error.errno not in (errno.ENOENT, errno.ESTALE):
                raise
        raise _Moved(f"{self._paths.log / row.file}: is gone, and no shard holds record {row.hash}")

    @again
    def record(self, trajectory: str, hash: str) -> Record:
        """Raises StoreError when it isn't here or is damaged."""
        until, pause_s = time.monotonic() + SETTLE_S, 0.0
        while True:
            row = self.rows(trajectory).get(hash) if trajectory or hash not in self._prompts else self._prompts[hash]
            if row is None:
                raise StoreError(f"{self._paths.root}: no record {hash}")
            try:
                return self.read(row)
            except _Moved:
                if time.monotonic() > until:
                    raise
            self._forget_file(row.file)
            time.sleep(pause_s)
            pause_s = min(pause_s + 0.1, 1.0)
            self.refresh(anew=True)  # its segment became a shard

    def content(self, hash: str) -> bytes:
        """The bytes that a record names by their SHA-256 (64 hexadecimal characters).

        Raises ConfigError for what is no such name, StoreError when they aren't here, or damaged.
        """
        if not re.fullmatch("[0-9a-f]{64}", hash):
            raise ConfigError(
                f"{hash}: no content's name, the 64 digits (SHA-256) that `hpcrl store show` gives; the 32 of a hash "
                "name a record, and a prompt has token ids alone, which `show` prints as text"
            )
        record = self.record("", hash[:32])
        if record.kind is not Kind.CONTENT or sha256(record.data).hexdigest() != hash:
            raise StoreError(f"{self._paths.root}: no content {hash}")
        return record.data

    def ahead(self, trajectories: Iterable[str]) -> None:
        """Ask the disk for what `rows` of these will read."""
        for trajectory in trajectories:
            if trajectory not in self._cache:
                for shard, number in self._places.get(trajectory, ()):
                    self._keep_open(shard).ahead_steps(number)

    def _keep_open(self, shard: Shard) -> Shard:
        self._used[shard.path.name] = shard
        if len(self._used) > self._MAX_FILES:
            self._used.pop(next(iter(self._used))).close()
        return shard

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

    def names(self) -> Iterable[str]:
        """The ids of all trajectories, in the order that they were first read."""
        return [name for name in {**dict.fromkeys(self._places), **dict.fromkeys(self._fresh)} if name]

    def tables(self, name: str) -> Iterator[Table]:
        """One of the tables of every shard, such as "rewards" or "transitions". Of one where it is damaged, what can be
        rescued is `fresh` from then on."""
        done: set[str] = set()
        while left := [shard for file, shard in self._shards.items() if file not in done]:
            done.add(left[0].path.name)
            try:
                with self._reading(left[0]):
                    found = self._keep_open(left[0]).whole(name)
                    yield found
            except FileNotFoundError:
                self._reindex()

    def fresh(self) -> Iterator[tuple[str, Row, Mapping[str, Any]]]:
        """(trajectory, row, meta) of each ADOPT, END and REWARD record that is in no shard yet."""
        for trajectory, rows in self._fresh.items():
            for row in rows.values():
                if row.hash in self._metas:
                    yield trajectory, row, self._metas[row.hash]

    def shard(self, name: str) -> Shard:
        return self._keep_open(self._shards[name])

    def places(self, trajectory: str) -> Sequence[Place]:
        """Its fragments in shards."""
        return self._places.get(trajectory, ())

    def is_fresh(self, trajectory: str) -> bool:
        """Whether any of its records is in no shard yet."""
        return trajectory in self._fresh

    def fresh_roots(self) -> set[str]:
        """The prompts that records name which are in no shard yet."""
        return {row.root for rows in self._fresh.values() for row in rows.values() if row.root}


class _Moved(StoreError):
    """A segment's file is gone."""
