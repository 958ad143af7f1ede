"""The store's crash test: kill -9, power cuts and flipped bits, again and again; what was acknowledged must be there.

    python tests/crash.py --kills 1000 --cuts 200 --flips 1000 --seed 1

    seed -> round -> restart -> Plan -> victim (crash_victim.py) --acknowledgements--> Expected (here, outside it)
                        ^                  |  kill -9, at a moment or at an I/O call; then perhaps a power cut:
                        |                  v  the image under the file system is copied, and the copy mounted
                        +---- all right <- check: every acknowledged record, every file, every chain, no doubles

A round that fails prints its seed, and with --keep adds it to crash_seeds.txt, whose rounds run in every test run.
`--without sync|chain|crc` takes a safeguard out of the store: then this test has to fail (test_store_crash.py).
"""

from __future__ import annotations

import argparse
import contextlib
import ctypes
import os
import random
import select
import shutil
import signal
import subprocess
import sys
import tempfile
import time
import traceback
from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import crash_victim
import h5py
from crash_victim import Plan, draw
from crc32c import crc32c
from store_parts import run_folder

from hpcrl.layout import RunPaths
from hpcrl.store import index, records, segment, shard
from hpcrl.store.compact import compact, shards
from hpcrl.store.index import Store
from hpcrl.store.records import CHAINED, Kind
from hpcrl.store.segment import CLOSED, OPEN, read_header, read_segment, segments
from hpcrl.store.shard import Shard
from hpcrl.store.verify import verify
from hpcrl.types import StoreError

SEEDS = Path(__file__).with_name("crash_seeds.txt")
IMAGE_BYTES = 48 << 20
ROUND = {"kill": 10, "cut": 8}  # restarts of one run folder
PR_SET_PDEATHSIG = 1  # linux/prctl.h: a victim doesn't outlive the harness
START_S = 5.0  # for a victim to get to its first acknowledgement, at most
FLIPS = 10  # per round of kills


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


# ---- one restart


def live(paths: RunPaths, plan: Plan, sockets: Path, expected: Expected, totals: Totals) -> None:
    """Start the victim, read its acknowledgements, kill it; all its processes are gone when this returns."""
    read, write = os.pipe()
    victims = {fork(lambda: crash_victim.run(paths, plan, sockets, write)): "victim"}
    if plan.beside:
        victims[fork(lambda: crash_victim.beside(paths, plan))] = "compactor beside it"
    os.close(write)
    dies_at = time.monotonic() + (START_S if plan.from_first else plan.life_s)
    data = b""
    while True:
        ready, _, _ = select.select([read], [], [], max(0.0, dies_at - time.monotonic()))
        if not ready:
            break
        piece = os.read(read, 1 << 16)
        if not piece:
            break
        if not data and plan.from_first:
            dies_at = time.monotonic() + plan.life_s
        data += piece
    for pid in victims:
        with contextlib.suppress(ProcessLookupError):
            os.kill(pid, signal.SIGKILL)
    while piece := os.read(read, 1 << 16):
        data += piece
    os.close(read)
    for pid, name in victims.items():
        status = os.waitpid(pid, 0)[1]
        if not (os.WIFSIGNALED(status) and os.WTERMSIG(status) == signal.SIGKILL):
            totals.errors += 1
            print(f"the {name} ended by itself (status {status}): see its traceback above", flush=True)
    before = len(expected.records)
    for line in data[: data.rfind(b"\n") + 1].decode().splitlines():
        expected.take(line)
    totals.acknowledged += len(expected.records) - before


def fork(call: Callable[[], None]) -> int:
    """Run a call in a child, which has the parent's modules (quicker than an interpreter of its own); its pid."""
    sys.stdout.flush()
    pid = os.fork()
    if pid:
        return pid
    code = 1
    try:
        ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, signal.SIGKILL)
        signal.signal(signal.SIGTERM, signal.SIG_DFL)
        call()
        code = 0
    except BaseException:
        traceback.print_exc()
        sys.stderr.flush()
    finally:
        os._exit(code)
    return 0


# ---- what is there


def check(paths: RunPaths, expected: Expected, totals: Totals, follower: Store | None) -> list[str]:
    """Everything that is wrong with a run folder whose writers are dead."""
    problems: list[str] = []

    def problem(kind: str, text: str) -> None:
        setattr(totals, kind, getattr(totals, kind) + 1)
        problems.append(text)

    there = _raw(paths, totals, problem)
    for hash, count in there.copies.items():
        if there.kinds[hash] is not Kind.PROMPT and count > 1 + expected.again[hash]:
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
            row = (store.rows(known.trajectory) if known.trajectory else store.prompts())[hash]
            once = known.kind is not Kind.PROMPT and not expected.again[hash]
            if once and known.places != {(row.node, row.segment, row.offset)}:
                problem("wrong", f"{hash} lies at {row.node} {row.segment} {row.offset}, acknowledged: {known.places}")
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
    path = chance.choice(shards(paths) + segments(paths.log, CLOSED))
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


# ---- power cuts


class Disk:
    """An ext4 image, mounted. `cut` takes the power: what the file system had not written to the image is gone."""

    def __init__(self, folder: Path) -> None:
        self._folder, self._number = folder, 0
        self._image = folder / "0.img"
        with self._image.open("wb") as file:
            file.truncate(IMAGE_BYTES)
        # Nothing may be written behind our back: no lazy initialisation, no commits by the clock while it is copied.
        options = ["-O", "^resize_inode", "-E", "lazy_itable_init=0,lazy_journal_init=0", "-J", "size=4", "-m", "0"]
        _command("mkfs.ext4", "-q", *options, self._image)
        self._mount()

    @property
    def root(self) -> Path:
        return self._folder / f"{self._number}"

    def _mount(self) -> None:
        self.root.mkdir()
        _command("mount", "-o", "loop,commit=300", self._image, self.root)

    def cut(self) -> None:
        image = self._folder / f"{self._number + 1}.img"
        _command("cp", "--sparse=always", self._image, image)
        self.close()
        self._image, self._number = image, self._number + 1
        self._mount()

    def close(self) -> None:
        _command("umount", self.root)
        self._image.unlink()


def _command(*command: str | Path) -> None:
    done = subprocess.run(command, capture_output=True, text=True)
    if done.returncode:
        raise OSError(f"{command[0]}: {done.stderr.strip() or done.returncode}")


def no_disk(folder: Path) -> str:
    """Why power can't be cut here; "" where it can."""
    folder.mkdir()
    try:
        Disk(folder).close()
    except OSError as error:
        return str(error)
    return ""


# ---- rounds


def one_round(kind: str, seed: int, restarts: int, scratch: Path, totals: Totals, *, flips: int = 0) -> list[str]:
    """Restarts of one run folder, or power cuts of one disk; stops at the first that isn't all right."""
    chance = random.Random(f"{kind} {seed}")
    folder = Path(tempfile.mkdtemp(prefix=f"{kind}-{seed}-", dir=scratch))
    disk = Disk(folder) if kind == "cut" else None
    expected, follower = Expected(), None
    problems: list[str] = []
    try:
        paths = run_folder((disk.root if disk else folder) / "run")
        os.sync()
        if disk is None:
            follower = Store(paths, open_segments=True)
        for restart in range(restarts):
            plan = draw(chance)
            live(paths, plan, folder, expected, totals)
            if disk is None:
                totals.kills += 1
            else:
                disk.cut()
                totals.cuts += 1
                paths = RunPaths(disk.root / "run")
            problems = check(paths, expected, totals, follower)
            if problems:
                print(f"{kind} {seed}: restart {restart}: {plan}", flush=True)
                break
        if follower is not None:
            follower.close()
        if not problems and flips:
            crash_victim.seal_dead_here(paths)
            compact(paths, shard_bytes=1 << 30)
            for _ in range(flips):
                problems += flip(paths, chance, totals)
        with Store(paths) as store:
            totals.orphans += sum(info.num_orphans for info in store.trajectories())
    finally:
        if disk is not None:
            disk.close()
    for text in problems[:10]:
        print(f"{kind} {seed}: {text}", flush=True)
    shutil.rmtree(folder)
    return problems


def take_out(what: str) -> None:
    """A safeguard of the store, so that it is seen that this test notices."""
    if what == "sync":
        crash_victim.without_sync()  # of the victims, which are forked from here
    elif what == "chain":
        # A reader that takes a trajectory's records as they come.
        def every(self: Store, trajectory: str) -> list[Any]:
            return [row for row in self.rows(trajectory).values() if row.kind in CHAINED]

        index.Store._chain_of = every  # type: ignore[method-assign]
    elif what == "crc":

        class Agreeable(int):
            def __eq__(self, other: object) -> bool:
                return True

            def __ne__(self, other: object) -> bool:
                return False

            __hash__ = int.__hash__

        def agree(data: Any, value: int = 0) -> int:
            return Agreeable(crc32c(data, value))

        for module in (segment, shard):
            module.crc32c = agree  # type: ignore[attr-defined]
        records.checksum = lambda *_: Agreeable(0)


def seeds() -> list[tuple[str, int]]:
    """The rounds that failed once."""
    lines = [line.split("#")[0].split() for line in SEEDS.read_text().splitlines()]
    return [(line[0], int(line[1])) for line in lines if line]


def main(arguments: list[str]) -> int:
    parser = argparse.ArgumentParser(description="The store's crash test.")
    parser.add_argument("--seed", type=int, default=0, help="of the first round; 0: from the clock")
    parser.add_argument("--kills", type=int, default=0)
    parser.add_argument("--cuts", type=int, default=0, help="simulated power cuts; they need root, for loop devices")
    parser.add_argument("--flips", type=int, default=0, help="flipped bits, in rounds of kills")
    parser.add_argument("--old", action="store_true", help="first the rounds of crash_seeds.txt")
    parser.add_argument("--keep", action="store_true", help="add the seeds of rounds that fail to crash_seeds.txt")
    parser.add_argument("--without", choices=("sync", "chain", "crc"), help="take this out of the store; must fail")
    parser.add_argument("--scratch", type=Path, help="where run folders and images lie for a while")
    parser.add_argument("--limit-s", type=float, default=float("inf"), help="begin no new round after that")
    options = parser.parse_args(arguments)
    began = time.monotonic()
    first = options.seed or time.time_ns() // 1000 % (1 << 31)
    scratch = Path(tempfile.mkdtemp(prefix="crash-", dir=options.scratch))
    totals = Totals()
    try:
        why = no_disk(scratch / "try") if options.cuts or options.old else ""
        if why:
            print(f"NO POWER IS CUT HERE, the file system can't be mounted: {why}", flush=True)
        rounds = [(*each, ROUND[each[0]]) for each in seeds()] if options.old else []
        for kind, wanted in (("kill", options.kills), ("cut", options.cuts)):
            counts = [min(ROUND[kind], wanted - done) for done in range(0, wanted, ROUND[kind])]
            rounds += [(kind, first + i, count) for i, count in enumerate(counts)]
        if options.without:
            take_out(options.without)
        failed = []
        left = options.flips
        for kind, seed, count in rounds:
            if (kind == "cut" and why) or time.monotonic() - began > options.limit_s:
                continue
            flips = min(left, FLIPS) if kind == "kill" else 0
            left -= flips
            if one_round(kind, seed, count, scratch, totals, flips=flips) and (kind, seed) not in failed:
                failed.append((kind, seed))
                if options.keep and (kind, seed) not in seeds():
                    with SEEDS.open("a") as file:
                        file.write(f"{kind} {seed}\n")
            if (totals.kills + totals.cuts) // 100 > (totals.kills + totals.cuts - count) // 100:
                print(totals.line(), flush=True)
    finally:
        shutil.rmtree(scratch, ignore_errors=True)
    if failed:
        print("failed: " + ", ".join(f"{kind} {seed}" for kind, seed in failed))
    print("when the victims died there was: " + ", ".join(f"{n} times {what}" for what, n in totals.stages.items()))
    print(f"seeds from {first}, {time.monotonic() - began:.0f} s")
    print(totals.line() + (f" (no power was cut: {why})" if why else ""), flush=True)
    return 0 if totals.ok else 1


if __name__ == "__main__":
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(1))  # so that what is mounted is unmounted
    sys.exit(main(sys.argv[1:]))
