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
from collections.abc import Callable
from pathlib import Path
from typing import Any

import crash_victim
from crash_check import Expected, Totals, check, flip
from crash_victim import Plan, draw
from crc32c import crc32c
from store_parts import run_folder

from hpcrl.layout import RunPaths
from hpcrl.store import index, records, segment, shard
from hpcrl.store.compact import compact
from hpcrl.store.index import Store
from hpcrl.store.records import CHAINED

SEEDS = Path(__file__).with_name("crash_seeds.txt")
IMAGE_BYTES = 48 << 20
ROUND = {"kill": 10, "cut": 8}  # restarts of one run folder
PR_SET_PDEATHSIG = 1  # linux/prctl.h: a victim doesn't outlive the harness
START_S = 5.0  # for a victim to get to its first acknowledgement, at most
FLIPS = 10  # per round of kills


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
            totals.orphans += sum(info.num_orphans for name in store.names() if (info := store.info(name)))
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
