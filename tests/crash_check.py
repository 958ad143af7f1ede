"""What the crash test holds a run folder against, and counts: what is expected lies outside the victims."""

from __future__ import annotations

import contextlib
import random
from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path

import h5py
from crc32c import crc32c

from hpcrl.layout import RunPaths
from hpcrl.store import records
from hpcrl.store.compact import shards
from hpcrl.store.index import Store
from hpcrl.store.records import CHAINED, SHARED, Kind
from hpcrl.store.segment import CLOSED, OPEN, read_header, read_segment, segments
from hpcrl.store.shard import Shard
from hpcrl.store.verify import verify
from hpcrl.types import StoreError


@dataclass
class Totals:
    kills: int = 0
    cuts: int = 0
    flips: int = 0
    acknowledged: int = 0
    lost: int = 0
    wrong: int = 0  # records, or their places, that are not what was acknowledged; flipped bits not found
    files: int = 0
    unreadable: int = 0
    duplicates: int = 0
    broken_chains: int = 0
    orphans: int = 0
    errors: int = 0  # a victim that ended by itself; whatever verify says
    stages: Counter[str] = field(default_factory=Counter)  # what lay there when it died

    @property
    def ok(self) -> bool:
        return not (self.lost + self.wrong + self.unreadable + self.duplicates + self.broken_chains + self.errors)

    def line(self) -> str:
        counts = ", ".join(
            f"{value} {name.replace('_', ' ')}" for name, value in vars(self).items() if isinstance(value, int)
        )
        return f"crash test: {counts}: {'ok' if self.ok else 'FAILED'}"


@dataclass(frozen=True, slots=True)
class Acknowledged:
    kind: Kind
    attempt: int
    trajectory: str
    parent: str
    places: set[tuple[str, int, int]]
    crc: int


class Expected:
    """What victims said was acknowledged."""

    def __init__(self) -> None:
        self.records: dict[str, Acknowledged] = {}
        self.again: Counter[str] = Counter()

    def take(self, line: str) -> None:
        what, hash, *rest = line.split()
        if what == "s":
            self.again[hash] += 1
            return
        kind, attempt, trajectory, parent, node, number, offset, crc = rest
        known = self.records.setdefault(
            hash,
            Acknowledged(Kind[kind], int(attempt), trajectory.strip("-"), parent.strip("-"), set(), int(crc)),
        )
        known.places.add((node, int(number), int(offset)))


def check(paths: RunPaths, expected: Expected, totals: Totals, follower: Store | None) -> list[str]:
    """Everything that is wrong with a run folder whose writers are dead."""
    problems: list[str] = []

    def problem(kind: str, text: str) -> None:
        setattr(totals, kind, getattr(totals, kind) + 1)
        problems.append(text)

    there = _raw(paths, totals, problem)
    for hash, count in there.copies.items():
        if there.kinds[hash] not in SHARED and count > 1 + expected.again[hash]:
            problem("duplicates", f"{hash} lies in {count} places and was appended {1 + expected.again[hash]} times")
    with Store(paths, open_segments=True) as store:
        for hash, known in expected.records.items():
            try:
                record = store.record(known.trajectory, hash)
            except (StoreError, OSError) as error:
                problem("lost", f"lost: {known.kind.name} {hash} of {known.trajectory}: {error}")
                continue
            if crc32c(record.payload) != known.crc or record.true_hash != hash or record.parent != known.parent:
                problem("wrong", f"{known.kind.name} {hash} of {known.trajectory} is not what was acknowledged")
            row = store.rows(known.trajectory)[hash]
            once = known.kind not in SHARED and not expected.again[hash]
            if once and known.places != {(row.node, row.segment, row.offset)}:
                problem("wrong", f"{hash} lies at {row.node} {row.segment} {row.offset}, acknowledged: {known.places}")
        for name in store.names():
            for hash in store.contents(name):
                if hash[:32] not in store.rows(""):
                    problem("lost", f"lost: content {hash}, which a record of {name} names")
        _check_chains(store, there, expected, problem)
        names = store.summary()["id"].tolist()
        if len(names) != len(set(names)):
            problem("duplicates", "a trajectory has two rows in the summary")
        scores = store.rewards()
        if scores.duplicated(["trajectory", "step", "source", "late", "wall", "value"]).any():
            problem("duplicates", "a score is read twice")
        if follower is not None:
            follower.refresh()
            one, other = ({name: set(each.rows(name)) for name in each.names()} for each in (store, follower))
            if one != other or follower.damaged:
                problem("wrong", f"a reader that followed along sees something else: {follower.damaged}")
    report = verify(paths)
    for text in report.problems:
        problem("errors", f"verify: {text}")
    return problems


@dataclass
class _There:
    """What the files hold, read without the index: closed and open segments, shards by plain h5py."""

    copies: Counter[str] = field(default_factory=Counter)
    kinds: dict[str, Kind] = field(default_factory=dict)
    chains: dict[str, dict[str, tuple[int, str]]] = field(default_factory=dict)  # trajectory -> hash -> attempt, parent

    def add(self, hash: str, kind: Kind, trajectory: str, attempt: int, parent: str) -> None:
        self.copies[hash] += 1
        self.kinds[hash] = kind
        if kind in CHAINED:
            self.chains.setdefault(trajectory, {})[hash] = (attempt, parent)


def _raw(paths: RunPaths, totals: Totals, problem: Callable[[str, str], None]) -> _There:
    there = _There()
    uids: set[str] = set()
    for path in shards(paths):
        totals.files += 1
        try:
            with Shard(path) as found:
                found.check()
            with h5py.File(path, "r") as file:
                steps, names = file["steps"][:], file["trajectories"]["id"].tolist()
                sources = {uid.decode() for uid in file["segments"]["uid"].tolist()}
        except (StoreError, OSError) as error:
            problem("unreadable", f"{path}: {error}")
            continue
        if both := sources & uids:
            problem("duplicates", f"{path}: segments {both} are in another shard, too")
        uids |= sources
        for row in steps:
            name = names[row["trajectory"]].decode()
            there.add(row["hash"].decode(), Kind(row["kind"]), name, int(row["attempt"]), row["parent"].decode())
    for path in segments(paths.log, CLOSED) + segments(paths.log, OPEN):
        totals.files += 1
        try:
            if path.suffix == CLOSED and read_header(path)[0].uid in uids:
                totals.stages["a left-over segment"] += 1
                continue
            for _, record in read_segment(path):
                there.add(record.hash, record.kind, record.trajectory, record.attempt, record.parent)
        except (StoreError, OSError, records.Torn) as error:
            problem("unreadable", f"{path}: {error}")
        totals.stages["an open segment"] += path.suffix == OPEN
    totals.stages["a claim"] += bool(list(paths.shards.glob("*.claim")))
    totals.stages["half a shard"] += bool(list(paths.shards.glob(".*.tmp")))
    return there


def _check_chains(store: Store, there: _There, expected: Expected, problem: Callable[[str, str], None]) -> None:
    acknowledged: dict[str, dict[str, int]] = {}
    for hash, known in expected.records.items():
        if known.kind in CHAINED:
            acknowledged.setdefault(known.trajectory, {})[hash] = known.attempt
    for name, rows in there.chains.items():
        top = max(attempt for attempt, _ in rows.values())
        highest = {hash for hash, (attempt, _) in rows.items() if attempt == top}
        ends = highest - {parent for _, parent in rows.values()}
        chain: list[str] = []
        at = next(iter(ends), "")
        while at in rows:
            chain.append(at)
            at = rows[at][1]
        chain.reverse()
        if at or len(ends) != 1:
            problem("broken_chains", f"{name}: attempt {top} ends {len(ends)} times; its parent {at!r} is missing")
            continue
        found = [receipt.hash for receipt in store.receipts(name)]
        if found != chain:
            problem("broken_chains", f"{name}: the store's chain is {found}, by the files it is {chain}")
            continue
        info = store.info(name)
        orphans = len(rows) - len(chain)
        if info is None or info.num_orphans != orphans or info.head != chain[-1]:
            problem("broken_chains", f"{name}: {orphans} orphans, head {chain[-1]}; the store says {info}")
        mine = acknowledged.get(name, {})
        if any(attempt > top for attempt in mine.values()):
            problem("broken_chains", f"{name}: attempt {top} is the highest, a higher one was acknowledged")
        if off := {hash for hash, attempt in mine.items() if attempt == top} - set(chain):
            problem("broken_chains", f"{name}: acknowledged records of attempt {top} are off its chain: {off}")


def flip(paths: RunPaths, chance: random.Random, totals: Totals) -> list[str]:
    """Flip one bit of a closed file, and back: it is found, and no record reads as anything but what it was."""
    files = shards(paths) + segments(paths.log, CLOSED)
    if not files:
        return []  # every victim died before it acknowledged anything
    path = chance.choice(files)
    good = path.read_bytes()
    payloads = set(_payloads(path))
    at, bit = chance.randrange(len(good)), 1 << chance.randrange(8)
    problems = []
    path.write_bytes(good[:at] + bytes((good[at] ^ bit,)) + good[at + 1 :])
    try:
        totals.flips += 1
        try:
            if path.suffix == CLOSED:
                list(read_segment(path))
            else:
                with Shard(path) as found:
                    found.check()
            problems.append(f"{path}: bit {bit} of byte {at} is flipped, and nothing says so")
        except StoreError:
            pass
        changed = [payload for payload in _payloads(path, suppress=StoreError) if payload not in payloads]
        if changed:
            problems.append(f"{path}: bit {bit} of byte {at} is flipped, and {len(changed)} records read changed")
    except Exception as error:  # anything but a StoreError that names the file
        problems.append(f"{path}: bit {bit} of byte {at} is flipped: {type(error).__name__}: {error}")
    finally:
        path.write_bytes(good)
    totals.wrong += bool(problems)
    return problems


def _payloads(path: Path, suppress: type[Exception] = OSError) -> Iterator[bytes]:
    with contextlib.suppress(suppress):
        if path.suffix == CLOSED:
            for _, record in read_segment(path):
                yield record.payload
        else:
            with Shard(path) as found:
                for row in range(len(found)):
                    with contextlib.suppress(suppress):
                        yield found.record(row).payload
