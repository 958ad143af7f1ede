"""Is a run's store sound? Everything that should agree is compared.

Without `deep` what the index is made of is read: directories, tables and rows of shards, whole segments, of each
trajectory what began and ended it, ledger and progress. With `deep` every byte of every file, and every record: its
hash, and the fields that it must have.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

from hpcrl.layout import RunPaths, read_json
from hpcrl.store.compact import shards
from hpcrl.store.index import Store
from hpcrl.store.ledger import entries, lineage, trained_twice
from hpcrl.store.records import CHAINED, missing, named
from hpcrl.store.rows import Row
from hpcrl.store.segment import CLOSED, OPEN, segments
from hpcrl.store.shard import Shard
from hpcrl.types import StoreError

_SHOWN = 20  # of each kind of problem


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
    missing_contents: int  # of the records read: contents that they name and that aren't here
    missing_parents: int  # records whose parent, or whose root prompt, isn't here
    out_of_order: int  # records acknowledged before their parent
    lacking_fields: int  # of the records read: fields that docs/store-format.md requires
    ledger_entries: int
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
    problems: dict[str, list[str]] = {}

    def problem(kind: str, text: str) -> None:
        problems.setdefault(kind, []).append(text)

    with Store(paths, open_segments=True) as store:
        for text in store.damaged.values():
            problem("damaged", text)
        for path in shards(paths):
            try:
                with Shard(path) as shard:
                    if deep:
                        shard.check()
                    for name in ("rewards", "transitions"):
                        shard.whole(name)
            except StoreError as error:
                if path.name not in store.damaged:
                    problem("damaged", str(error))
        prompts, shared = store.prompts(), set[str]()
        num_records = num_read = trajectories = open_trajectories = orphans = 0
        for trajectory in ("", *store.names()):
            try:
                rows = store.rows(trajectory)
                info = store.info(trajectory) if trajectory else None
            except StoreError as error:
                problem("damaged", str(error))
                continue
            shared = shared if trajectory else set(rows)
            num_records += len(rows)
            if info is not None:
                trajectories += 1
                open_trajectories += info.status == "open"
                orphans += info.num_orphans
            for row in rows.values():
                label = f"{row.kind.name} {row.hash} of {trajectory or 'all'}"
                if deep:
                    num_read += 1
                    for kind, text in _read(store, trajectory, row, label, shared):
                        problem(kind, text)
                for name, hash, known in (("parent", row.parent, rows), ("root", row.root, prompts)):
                    if hash and hash not in known:
                        problem("parents", f"{label}: its {name} {hash} is missing")
                parent = rows.get(row.parent)
                together = parent is not None and row.kind in CHAINED and parent.node == row.node
                if together and parent and (parent.segment, parent.offset) > (row.segment, row.offset):
                    problem("order", f"{label}: was stored before its parent")
        ledger, updates = entries(paths), lineage(paths)
        trained = {trajectory for row in updates for trajectory in row.trajectories} if read_json(paths.pruned) else ()
        pruned = 0
        for position, entry in ledger:
            if entry.trajectory in trained and not store.rows(entry.trajectory):
                pruned += 1
            elif not store.complete(entry.trajectory, entry.head):
                problem("heads", f"ledger {position}: head {entry.head} of {entry.trajectory} is missing")
    named = {entry.trajectory for _, entry in ledger}
    for update in updates:
        for trajectory in sorted({*update.trajectories} - named):
            problem("unledgered", f"update {update.update}: trained {trajectory}, which no ledger names")
    for trajectory in trained_twice(updates):
        problem("twice", f"{trajectory}: trained twice")
    return VerifyReport(
        shards=len(shards(paths)),
        segments=len(segments(paths.log, CLOSED)) + len(segments(paths.log, OPEN)),
        records=num_records,
        records_read=num_read,
        trajectories=trajectories,
        open_trajectories=open_trajectories,
        orphans=orphans,
        damaged=len(problems.get("damaged", ())),
        missing_contents=len(problems.get("contents", ())),
        missing_parents=len(problems.get("parents", ())),
        out_of_order=len(problems.get("order", ())),
        lacking_fields=len(problems.get("lacking", ())),
        ledger_entries=len(ledger),
        ledger_heads_missing=len(problems.get("heads", ())),
        ledger_heads_pruned=pruned,
        trained_unledgered=len(problems.get("unledgered", ())),
        updates=sum(bool(row.trajectories) for row in updates),
        trained_twice=len(problems.get("twice", ())),
        problems=tuple(text for texts in problems.values() for text in texts[:_SHOWN]),
    )


def _read(store: Store, trajectory: str, row: Row, label: str, shared: set[str]) -> Iterator[tuple[str, str]]:
    """(kind, text) of what is wrong with one record itself."""
    try:
        record = store.record(trajectory, row.hash)
    except (StoreError, OSError) as error:
        yield "damaged", str(error)
        return
    if record.true_hash != row.hash:
        yield "damaged", f"{label}: its hash differs, {record.true_hash}"
    for key in missing(record):
        yield "lacking", f"{label}: no field {key}"
    for hash in named(record.meta):
        if hash[:32] not in shared:
            yield "contents", f"{label}: the content {hash} that it names is missing"
