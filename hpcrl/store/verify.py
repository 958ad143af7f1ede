"""Is a run's store sound? Everything that should agree is compared.

Without `deep` what the index is made of is read: directories, tables and rows of shards, whole segments, of each
trajectory what began and ended it, ledger and progress. With `deep` every byte of every file, and every record: its
hash, and the fields that it must have.
"""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import TypeVar

from hpcrl.layout import RunPaths, is_unreadable, read_json, strays
from hpcrl.store.catalog import mendable
from hpcrl.store.compact import shards
from hpcrl.store.index import Store
from hpcrl.store.ledger import entries, lineage, repeats, trained_twice
from hpcrl.store.records import CHAINED, REQUIRED, REQUIRED_WITHIN, Record, named
from hpcrl.store.repair import recorded
from hpcrl.store.rows import Row
from hpcrl.store.seal import how_to_close, ownerless
from hpcrl.store.segment import CLOSED, OPEN, segments
from hpcrl.store.shard import Shard
from hpcrl.types import StoreError

_T = TypeVar("_T")
_SHOWN = 20  # of each kind of problem
_FILES = (*(("log", suffix) for suffix in (OPEN, CLOSED)), *(("shards", suffix) for suffix in (".h5", ".claim")))
_FILES += (("ledger", ".jsonl"), ("progress", ".jsonl"))  # folder of RunPaths, suffix of what lies there


class _Problems(defaultdict[str, list[str]]):
    """By kind. What is missing because of a record that is known to be lost is counted, and no problem."""

    def __init__(self) -> None:
        super().__init__(list)
        self.lost: set[str] = set()  # hashes
        self.recorded = Counter[str]()

    def miss(self, kind: str, text: str, hash: str = "") -> None:
        if hash not in self.lost:
            self[kind].append(text)
        else:
            self.recorded[kind] += 1

    def count(self, kind: str) -> int:
        return len(self[kind]) + self.recorded[kind]


@dataclass(frozen=True, slots=True, kw_only=True)
class VerifyReport:
    """Counts; the first of each kind of problem are told in `problems`. Orphans and open trajectories are none."""

    shards: int
    segments: int  # closed and open
    records: int
    records_read: int  # all of them when `deep`
    trajectories: int
    open_trajectories: int
    orphans: int  # records of lower attempts, off the chain
    damaged: int  # files and records whose checksum or hash differs
    strays: int  # files that bear the store's suffixes and are none of its files; nobody opens them
    lost_recorded: int  # records that `store repair` found lost; what misses these is counted below, and no problem
    missing_contents: int  # of the records read: contents that they name and that aren't here
    missing_parents: int  # records whose parent, or whose root prompt, isn't here
    out_of_order: int  # records acknowledged before their parent
    lacking_fields: int  # of the records read: fields that docs/store-format.md requires
    ledger_entries: int
    ledger_repeats: int  # of them: of a trajectory that was there already; nobody takes it again
    ledger_heads_missing: int
    ledger_heads_pruned: int  # of trained trajectories that `store prune` removed
    trained_unledgered: int  # trajectories of updates that no ledger names: a ledger's file is gone
    updates: int  # of the lineage that made the present weights
    trained_twice: int  # trajectories in two of these
    problems: tuple[str, ...]

    @property
    def ok(self) -> bool:
        return not self.problems


def verify(paths: RunPaths, *, deep: bool = False) -> VerifyReport:
    """Compare records, chains, ledger and progress; with `deep`, read every byte of them."""
    problems = _Problems()
    counts = Counter[str]()
    with Store(paths, open_segments=True) as store:
        _files(paths, store, deep, problems)
        lost = _or_damaged(problems, recorded, paths)
        problems.lost |= {row.hash for row in lost if row.hash}
        _records(paths, store, deep, problems, counts)
        _training(paths, store, problems, counts)
        problems["damaged"][:0] = store.damaged.values()  # also what was found on the way
    return VerifyReport(
        shards=len(shards(paths)),
        segments=len(segments(paths.log, CLOSED)) + len(segments(paths.log, OPEN)),
        records=counts["records"],
        records_read=counts["read"],
        trajectories=counts["trajectories"],
        open_trajectories=counts["open"],
        orphans=counts["orphans"],
        damaged=len(problems["damaged"]),
        strays=len(problems["strays"]),
        lost_recorded=len(lost),
        missing_contents=problems.count("contents"),
        missing_parents=problems.count("parents"),
        out_of_order=len(problems["order"]),
        lacking_fields=len(problems["lacking"]),
        ledger_entries=counts["ledger"],
        ledger_repeats=counts["repeats"],
        ledger_heads_missing=problems.count("heads"),
        ledger_heads_pruned=counts["pruned"],
        trained_unledgered=len(problems["unledgered"]),
        updates=counts["updates"],
        trained_twice=len(problems["twice"]),
        problems=tuple(text for texts in problems.values() for text in texts[:_SHOWN]),
    )


def _files(paths: RunPaths, store: Store, deep: bool, problems: _Problems) -> None:
    problems["damaged"] += [how_to_close(path) for path in ownerless(paths)]
    for folder, suffix in _FILES:
        problems["strays"] += strays(getattr(paths, folder), suffix, named=folder == "log")
    for path in shards(paths):
        try:
            with Shard(path) as shard:
                if deep:
                    shard.check()
                for name in ("rewards", "transitions"):
                    shard.whole(name)
        except (StoreError, OSError) as error:
            if isinstance(error, OSError) and not is_unreadable(error):
                raise
            if path.name not in store.damaged:
                problems["damaged"].append(mendable(error, paths))


def _or_damaged(problems: _Problems, read: Callable[[RunPaths], Sequence[_T]], paths: RunPaths) -> Sequence[_T]:
    """What `read` gives; nothing where that is damaged."""
    try:
        return read(paths)
    except StoreError as error:
        problems["damaged"].append(str(error))
        return ()


def _records(paths: RunPaths, store: Store, deep: bool, problems: _Problems, counts: Counter[str]) -> None:
    prompts, shared = store.prompts(), set[str]()
    for trajectory in ("", *store.names()):
        try:
            rows = store.rows(trajectory)
            info = store.info(trajectory) if trajectory else None
        except StoreError as error:
            problems["damaged"].append(f"{trajectory or 'prompts and contents'}: {mendable(error, paths)}")
            continue
        shared = shared if trajectory else set(rows)
        counts["records"] += len(rows)
        if info is not None:
            counts.update(trajectories=1, open=info.status == "open", orphans=info.num_orphans)
        for row in rows.values():
            label = f"{row.kind.name} {row.hash} of {trajectory or 'all'}"
            if deep:
                counts["read"] += 1
                for kind, *said in _read(paths, store, trajectory, row, label, shared):
                    problems.miss(kind, *said)
            for name, hash, known in (("parent", row.parent, rows), ("root", row.root, prompts)):
                if hash and hash not in known:
                    problems.miss("parents", f"{label}: its {name} {hash} is missing", hash)
            parent = rows.get(row.parent)
            together = parent is not None and row.kind in CHAINED and parent.node == row.node
            if together and parent and (parent.segment, parent.offset) > (row.segment, row.offset):
                problems["order"].append(f"{label}: was stored before its parent")


def _training(paths: RunPaths, store: Store, problems: _Problems, counts: Counter[str]) -> None:
    """What was trained, against what is there."""
    ledger, updates = _or_damaged(problems, entries, paths), _or_damaged(problems, lineage, paths)
    pruned = _or_damaged(problems, lambda paths: [*(read_json(paths.pruned) or ())], paths)
    trained = {trajectory for row in updates for trajectory in row.trajectories} if pruned else ()
    for position, entry in ledger:
        if entry.trajectory in trained and not store.rows(entry.trajectory):
            counts["pruned"] += 1
            continue
        lacking = store.lacking(entry.trajectory, entry.head)
        if lacking or not entry.head:
            what = f"head {entry.head}" if lacking == entry.head else f"before head {entry.head}: {lacking}"
            text = f"ledger {position}: {what} of {entry.trajectory} is missing"
            problems.miss("heads", text, lacking)
    counts["repeats"] = len(repeats(ledger))
    ledgered = {entry.trajectory for _, entry in ledger}
    for update in updates:
        for trajectory in sorted({*update.trajectories} - ledgered):
            problems["unledgered"].append(f"update {update.update}: trained {trajectory}, which no ledger names")
    for trajectory in trained_twice(updates):
        problems["twice"].append(f"{trajectory}: trained twice")
    counts.update(ledger=len(ledger), updates=sum(bool(row.trajectories) for row in updates))


def _read(
    paths: RunPaths, store: Store, trajectory: str, row: Row, label: str, shared: set[str]
) -> Iterator[tuple[str, ...]]:
    """(kind, text) of what is wrong with one record itself, and the hash of what it misses."""
    try:
        record = store.record(trajectory, row.hash)
    except (StoreError, OSError) as error:
        yield "damaged", f"{label}: {mendable(error, paths)}"
        return
    if record.true_hash != row.hash:
        yield "damaged", f"{label}: its hash differs, {record.true_hash}"
    for key in missing(record):
        yield "lacking", f"{label}: no field {key}"
    for hash in named(record.meta):
        if hash[:32] not in shared:
            yield "contents", f"{label}: the content {hash} that it names is missing", hash[:32]


def missing(record: Record) -> list[str]:
    """The required fields that a record lacks, as `key` or `key[3].within`."""
    lacking = [key for key in REQUIRED[record.kind] if key not in record.meta]
    for (kind, key), within in REQUIRED_WITHIN.items():
        if kind is record.kind:
            for index, row in enumerate(record.meta.get(key) or ()):
                lacking += [f"{key}[{index}].{name}" for name in within if name not in row]
    return lacking
