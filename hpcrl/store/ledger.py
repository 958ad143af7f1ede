"""The two files between control and learner: the ledger (scored trajectories) and progress (one row per update).

Each start of control or learner takes an incarnation: a file of its own, made with O_EXCL, whose first line says what
it continues. So a process that was thought dead and still writes is not read: what counts is the walk back from the
newest incarnation that has a first line.

    ledger/000001.jsonl   {"follows": {"incarnation": 0, "lines": 0}}, entries…           <- lines 0..n-1 count
    ledger/000002.jsonl   {"follows": {"incarnation": 1, "lines": n}}, entries…, {"stop": reason}
    progress/000002.jsonl {"resumed_from": {"incarnation": 1, "update": 40}}, updates…    <- updates <= 40 of 1 count
"""

from __future__ import annotations

import contextlib
import dataclasses
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import msgspec

from hpcrl.layout import Appender, RunPaths, by_name, next_incarnation, numbered, read_lines, sync_file
from hpcrl.types import Entry, StoreError

_COUNTED = {"follows": "lines", "resumed_from": "update"}  # what of the file before counts, in each kind of first line
Position = tuple[int, int]  # (incarnation, line); line 0 is the first line of the file, so entries begin at 1


@dataclass(frozen=True, slots=True, kw_only=True)
class UpdateRow:
    """One optimizer step, as the learner's rank 0 reports it."""

    update: int  # 1, 2, … over the whole run
    phase: str
    phase_update: int  # 1, 2, … within the phase
    version: int = -1  # published with this update; -1: none
    parent_version: int = -1
    positions: tuple[Position, ...] = ()  # ledger entries trained on
    trajectories: tuple[str, ...] = ()
    metrics: Mapping[str, float] = field(default_factory=dict)
    wall: float = 0.0  # seconds since the epoch
    done: bool = False  # the last row of the run: nothing more will be trained


class _Files:
    """The incarnation files of one folder, followed: each whole line is given once."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._looked = False
        self._heads: dict[int, dict[str, Any]] = {}
        self._ends: dict[int, tuple[int, int]] = {}  # incarnation -> (byte, line) read so far

    def path(self, incarnation: int) -> Path:
        return self._folder / f"{incarnation:06d}.jsonl"

    def look(self) -> list[int]:
        """The incarnations that have a first line, ascending. One that died before it wrote one says nothing.

        The newest is read first: what it continues had a first line before it had one itself.
        """
        anew, self._looked = not self._looked, True
        for name in sorted(numbered(self._folder, ".jsonl", anew=anew), reverse=True):
            if int(name.stem) in self._heads:
                continue
            line = by_name(_first_line, name)
            if line.endswith(b"\n"):
                rows, _ = read_lines(name)
                self._heads[int(name.stem)] = rows[0]
                self._ends[int(name.stem)] = (len(line), 1)
        return sorted(self._heads)

    def link(self, incarnation: int, key: str) -> dict[str, Any] | None:
        """What an incarnation's first line says that it continues; None when nothing.

        Raises StoreError when that isn't there: what was trained would be forgotten without a word.
        """
        value = self._heads[incarnation].get(key) or {"incarnation": 0, _COUNTED[key]: 0}
        numbers = [value.get(name) for name in ("incarnation", _COUNTED[key])] if isinstance(value, dict) else []
        if [type(number) for number in numbers] != [int, int]:
            raise StoreError(f"{self.path(incarnation)}: damaged: its first line says {key} {value!r:.80}")
        before = value["incarnation"]
        if not before:
            return None
        if before >= incarnation:
            raise StoreError(f"{self.path(incarnation)}: continues {before}, which is not before it")
        if before not in self._heads:
            raise StoreError(
                f"{self.path(before)}: missing or empty, though {self.path(incarnation).name} continues it"
            )
        link: dict[str, Any] = value
        return link

    def new(self, incarnation: int, stop: int | None = None) -> list[tuple[int, dict[str, Any]]]:
        """(line, row) not given yet, lines below `stop` only."""
        byte, line = self._ends[incarnation]
        if stop is not None and line >= stop:
            return []
        rows, byte = read_lines(self.path(incarnation), byte)
        self._ends[incarnation] = (byte, line + len(rows))
        return [(line + i, row) for i, row in enumerate(rows) if stop is None or line + i < stop]


def _first_line(path: Path) -> bytes:
    with path.open("rb") as file:
        return file.readline()


class _Writer:
    def __init__(self, folder: Path) -> None:
        folder.mkdir(parents=True, exist_ok=True)
        self.incarnation, path = next_incarnation(folder)
        self._path = path
        self._file: Appender | None = Appender(path)

    def _append(self, *rows: Mapping[str, Any]) -> None:
        if self._file is None:
            raise OSError(f"{self._path}: closed, or an append failed before; take a new incarnation")
        try:
            self._file.append(*rows)
        except OSError:
            # A line may be torn and a failed sync can't be trusted: nothing may be written after it in this file.
            self.close()
            raise

    @property
    def closed(self) -> bool:
        return self._file is None

    def close(self) -> None:
        if self._file is not None:
            with contextlib.suppress(OSError):
                self._file.close()
            self._file = None


class LedgerWriter(_Writer):
    """Control's side. Taking it takes control's incarnation number (`.incarnation`).

    `append` and `stop` are durable when they return. After an OSError this writer is closed and a new one is needed.
    """

    def __init__(self, paths: RunPaths) -> None:
        super().__init__(paths.ledger)
        files = _Files(paths.ledger)
        before = [number for number in files.look() if number < self.incarnation]
        last, lines = 0, 0
        if before:
            last = before[-1]
            # Its last lines may not have been synced by whoever died then; as they count from here on, they must stay.
            sync_file(files.path(last))
            lines = 1 + len(files.new(last))
        self._append({"follows": {"incarnation": last, "lines": lines}})
        self._lines = 1

    def is_superseded(self, paths: RunPaths) -> bool:
        """Whether another control has begun since."""
        return max(_Files(paths.ledger).look(), default=0) > self.incarnation

    def append(self, entries: Iterable[Entry]) -> list[Position]:
        rows = [dataclasses.asdict(entry) for entry in entries]
        if not rows:
            return []
        self._append(*rows)
        start = self._lines
        self._lines += len(rows)
        return [(self.incarnation, start + i) for i in range(len(rows))]

    def stop(self, reason: str) -> None:
        """Tell the learner to save and end."""
        self._append({"stop": reason})
        self._lines += 1


class LedgerReader:
    """Follows the ledger. Reads nothing but new lines."""

    def __init__(self, paths: RunPaths) -> None:
        self._files = _Files(paths.ledger)
        self._stopped: tuple[int, str | None] = (0, None)

    @property
    def stopped(self) -> str | None:
        """The reason, when (as of the last `read`) the newest incarnation ends with a stop line."""
        return self._stopped[1]

    @property
    def incarnation(self) -> int:
        """The newest incarnation of control, as of the last `read`; 0 before any."""
        return self._stopped[0]

    def read(self) -> list[tuple[Position, Entry]]:
        """The entries that count and were not returned before, in order. Raises StoreError on a damaged line."""
        numbers = self._files.look()
        if not numbers:
            return []
        walk: list[tuple[int, int | None]] = [(numbers[-1], None)]
        while link := self._files.link(walk[-1][0], "follows"):
            walk.append((link["incarnation"], link["lines"]))
        if self._stopped[0] != numbers[-1]:
            self._stopped = (numbers[-1], None)
        found: list[tuple[Position, Entry]] = []
        for incarnation, stop in reversed(walk):
            for line, row in self._files.new(incarnation, stop):
                newest = incarnation == numbers[-1]
                if newest:
                    self._stopped = (incarnation, row.get("stop"))
                if "stop" not in row:
                    found.append(((incarnation, line), _parse(Entry, row, self._files.path(incarnation))))
        return found


def entries(paths: RunPaths) -> list[tuple[Position, Entry]]:
    """Every ledger entry that counts."""
    return LedgerReader(paths).read()


class ProgressWriter(_Writer):
    """The learner's side, rank 0 only. `resumed_from`: {"incarnation", "update"} of the checkpoint, or None."""

    def __init__(self, paths: RunPaths, resumed_from: Mapping[str, int] | None) -> None:
        super().__init__(paths.progress)
        self._append({"resumed_from": dict(resumed_from) if resumed_from else None})

    def append(self, row: UpdateRow) -> None:
        """Durable when it returns."""
        self._append(dataclasses.asdict(row))


class ProgressReader:
    """Follows progress: the rows of the lineage that ends in the newest incarnation.

    After the learner resumed from an older checkpoint, `read` gives the repeated updates again, as new rows; what it
    gave before beyond that checkpoint is void (`lineage` leaves it out).
    """

    def __init__(self, paths: RunPaths) -> None:
        self._files = _Files(paths.progress)
        self.incarnation = 0  # the newest, as of the last `read`

    def read(self) -> list[UpdateRow]:
        numbers = self._files.look()
        if not numbers:
            return []
        self.incarnation = numbers[-1]
        walk: list[tuple[int, int | None]] = [(numbers[-1], None)]
        while link := self._files.link(walk[-1][0], "resumed_from"):
            limit = walk[-1][1]
            walk.append((link["incarnation"], link["update"] if limit is None else min(limit, link["update"])))
        found = []
        for incarnation, limit in reversed(walk):
            rows = [_parse(UpdateRow, row, self._files.path(incarnation)) for _, row in self._files.new(incarnation)]
            found += [row for row in rows if limit is None or row.update <= limit]
        return found


def lineage(paths: RunPaths) -> list[UpdateRow]:
    """The updates that made the present weights, in order."""
    return ProgressReader(paths).read()


def repeats(ledger: Iterable[tuple[Position, Entry]]) -> list[str]:
    """Trajectories that the ledger names again, once for each time: where an append failed that was written after all.
    Nobody takes one twice."""
    counts = Counter(entry.trajectory for _, entry in ledger)
    return [trajectory for trajectory, count in counts.items() for _ in range(count - 1)]


def trained_twice(rows: Sequence[UpdateRow]) -> list[str]:
    """Trajectories that are in two updates of a lineage, or twice in one."""
    seen: set[str] = set()
    twice: set[str] = set()
    for row in rows:
        for trajectory in row.trajectories:
            (twice if trajectory in seen else seen).add(trajectory)
    return sorted(twice)


def _parse(kind: type[Any], row: Mapping[str, Any], path: Path) -> Any:
    try:
        return msgspec.convert(row, kind)  # keys that it doesn't know pass: later versions may add some
    except (msgspec.ValidationError, RecursionError) as error:
        raise StoreError(f"{path}: not a {kind.__name__} ({error})") from error
