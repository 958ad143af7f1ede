"""Processes that stop at their n-th I/O call while others take over, and then go on (or are killed there), for n = 1,
2, … until one isn't met.

    python stopped.py FOLDER owner|compactor|sleeper|taker stop|kill      prints at how many calls, and what came of it

owner      appends; meanwhile its trajectory is granted to another node, which reads its open segment
compactor  closes what a dead owner left open, and compacts; meanwhile a new owner of that node appends
sleeper    a compactor that is away for so long that another takes its claim
taker      a new owner, of what a dead one left open; meanwhile somebody else closes and compacts that
"""

from __future__ import annotations

import asyncio
import itertools
import os
import signal
import sys
import time
from collections.abc import Callable
from pathlib import Path

from crash import fork
from crash_check import Expected, Totals, check
from crc32c import crc32c
from io_faults import KILL, STOP, Fault, Io
from store_parts import act, adopt, end, observe, open_log, run_folder, trajectory

from hpcrl.layout import ProcessId
from hpcrl.store.compact import STALE_S, compact, shards
from hpcrl.store.index import Store
from hpcrl.store.log import Log
from hpcrl.store.records import Record, prompt
from hpcrl.store.seal import seal_dead_here
from hpcrl.store.segment import CLOSED, OPEN, Header, segments
from hpcrl.store.shard import Shard

STEPS = 4
START = prompt([1, 2, 3])


def owners() -> list[Record]:
    """What the owner appends, one after the other."""
    records = [START, adopt("t")]
    for step in range(STEPS):
        records.append(act(records[-1], step, [step], root="" if step else START.hash))
        records.append(observe(records[-1], [9]))
    return [*records, end(records[-1])]


class Writer:
    """Appends, and reports what was acknowledged as a victim of the crash test does."""

    def __init__(self, log: Log, report: Callable[[str], None]) -> None:
        self.log, self._report = log, report

    async def append(self, record: Record) -> None:
        ((segment, offset),) = await self.log.append([record.frame()])
        self._report(
            f"a {record.hash} {record.kind.name} {record.attempt} {record.trajectory or '-'} {record.parent or '-'} "
            f"{self.log.node} {segment} {offset} {crc32c(record.payload)}"
        )


class Trial:
    def __init__(self, root: Path, at: int, how: Fault) -> None:
        self.paths, self.at, self.how = run_folder(root), at, how
        self.expected, self.totals = Expected(), Totals()

    def prepare(self) -> None:
        """Before anything runs."""

    def stops(self, report: Callable[[str], None]) -> None:
        """In a child, which meets it at its n-th I/O call."""
        raise NotImplementedError

    def meanwhile(self) -> None:
        """While the child is stopped, or after it was killed."""

    def afterwards(self, met: bool) -> None:
        """When it has ended."""

    def report(self, line: str) -> None:
        self.expected.take(line)

    def run(self) -> bool:
        """Whether the child had so many calls."""
        self.prepare()
        read, write = os.pipe()

        def child() -> None:
            with Io(self.paths.root, self.how, self.at):
                self.stops(lambda line: os.write(write, f"{line}\n".encode()) and None)

        pid = fork(child)
        os.close(write)
        status = os.waitpid(pid, os.WUNTRACED)[1]
        met = os.WIFSTOPPED(status) or (os.WIFSIGNALED(status) and os.WTERMSIG(status) == signal.SIGKILL)
        if met:
            os.set_blocking(read, False)
            try:
                data = os.read(read, 1 << 16)
            except BlockingIOError:
                data = b""
            os.set_blocking(read, True)
            for line in data.decode().splitlines():
                self.expected.take(line)
            self.meanwhile()
            if self.how is STOP:
                os.kill(pid, signal.SIGCONT)
                status = os.waitpid(pid, 0)[1]
            else:
                status = 0
        assert status == 0, f"call {self.at}: the child ended with status {status}: see its traceback"
        with os.fdopen(read) as rest:
            for line in rest:
                self.expected.take(line)
        self.afterwards(met)
        problems = check(self.paths, self.expected, self.totals, None)
        assert not problems, f"call {self.at}: {problems}"
        seal_dead_here(self.paths)
        for claim in self.paths.shards.glob("*.claim"):
            os.utime(claim, (time.time() - 11,) * 2)  # one that its maker could not write is obeyed for ten seconds
        assert not compact(self.paths).refused
        problems = check(self.paths, self.expected, self.totals, None)
        assert not problems and not segments(self.paths.log, CLOSED), f"call {self.at}: {problems}"
        return met


class Owner(Trial):
    def stops(self, report: Callable[[str], None]) -> None:
        async def run() -> None:
            writer = Writer(open_log(self.paths, segment_bytes=2500), report)
            for record in owners():
                await writer.append(record)
            await writer.log.close()

        asyncio.run(run())

    def meanwhile(self) -> None:
        left_open = segments(self.paths.log, OPEN)
        closed = segments(self.paths.log, CLOSED)
        if self.how is STOP:
            assert seal_dead_here(self.paths) == [], "its owner lives"
            assert compact(self.paths).segments == len(closed)
            assert segments(self.paths.log, OPEN) == left_open and not segments(self.paths.log, CLOSED)
        with Store(self.paths, open_segments=True) as store:
            self.head = store.head("t")
            unsettled = store.unsettled("t", self.head) if self.head else []
            known = [record.hash for record in owners()]
            before = known[: known.index(self.head) + 1] if self.head else []
            assert set(self.expected.records) <= {*before, START.hash}, "acknowledged, and not seen"

        async def take_over() -> None:
            log = open_log(self.paths, "n2")
            writer = Writer(log, self.report)
            for record in unsettled:
                self.expected.again[record.hash] += 1
                await writer.append(record)
            first = adopt("t", 2, self.head or "", -1)
            await writer.append(START)
            last = act(first, 9, [7], root=START.hash)
            for record in (first, last, end(last)):
                await writer.append(record)
            await log.close()

        asyncio.run(take_over())
        compact(self.paths)

    def afterwards(self, met: bool) -> None:
        """The owner knew nothing, and appended all: what came after the grant is off the chain, kept and counted."""
        records = owners()
        assert self.how is not STOP or {record.hash for record in records} <= set(self.expected.records)
        with Store(self.paths, open_segments=True) as store:
            info = store.info("t")
            assert info is not None and info.attempt == (2 if met else 1) and info.status == "COMPLETED"
            if met and self.how is STOP:
                hashes = [record.hash for record in records]
                after = hashes[hashes.index(self.head) + 1 :] if self.head else hashes[1:]
                assert info.num_orphans == len(after) and not set(after) & {
                    receipt.hash for receipt in store.receipts("t")
                }
                self.totals.orphans += len(after)


class _LeftOpen(Trial):
    """A dead owner of n1 left a segment open, with a torn tail; another is closed."""

    def prepare(self) -> None:
        async def write() -> None:
            log = open_log(self.paths)
            for record in trajectory("a"):
                await Writer(log, self.report).append(record)
            await log.close()

        asyncio.run(write())
        me = ProcessId.me()
        header = Header("n1", 7, "left-open", ProcessId(me.pid, 1, me.boot)).encode()
        frames = b""
        for record in trajectory("b"):
            self.report(
                f"a {record.hash} {record.kind.name} {record.attempt} {record.trajectory or '-'} "
                f"{record.parent or '-'} n1 7 {len(header + frames)} {crc32c(record.payload)}"
            )
            frames += record.frame()
        (self.paths.log / "n1-7.open").write_bytes(header + frames + b"torn")


class Compactor(_LeftOpen):
    log: Log | None = None

    def stops(self, report: Callable[[str], None]) -> None:
        seal_dead_here(self.paths)
        compact(self.paths)

    def meanwhile(self) -> None:
        self.loop = asyncio.new_event_loop()
        self.log = self.loop.run_until_complete(self._open())
        compact(self.paths)

    async def _open(self) -> Log:
        log = open_log(self.paths)
        await self._append(log, "c")
        return log

    async def _append(self, log: Log, name: str) -> None:
        for record in trajectory(name):
            await Writer(log, self.report).append(record)

    def afterwards(self, met: bool) -> None:
        if self.log is not None:
            self.loop.run_until_complete(self._append(self.log, "d"))
            self.loop.run_until_complete(self.log.close())
            self.loop.close()


class Sleeper(Compactor):
    """The compactor is on a machine that can't be seen from here, and for so long that its claim is taken."""

    def meanwhile(self) -> None:
        for claim in self.paths.shards.glob("*.claim"):
            claim.write_text(claim.read_text().replace(ProcessId.me().boot, "elsewhere"))
            os.utime(claim, (time.time() - STALE_S - 60,) * 2)
        super().meanwhile()
        assert not segments(self.paths.log, CLOSED)


class Taker(_LeftOpen):
    def stops(self, report: Callable[[str], None]) -> None:
        async def run() -> None:
            log = open_log(self.paths)
            for record in trajectory("c"):
                await Writer(log, report).append(record)
            await log.close()

        asyncio.run(run())

    def meanwhile(self) -> None:
        seal_dead_here(self.paths)
        compact(self.paths)


def main(folder: Path, what: str, how: str) -> None:
    make = {"owner": Owner, "compactor": Compactor, "sleeper": Sleeper, "taker": Taker}[what]
    orphans = num_shards = 0
    for at in itertools.count(1):
        trial = make(folder / str(at), at, {"stop": STOP, "kill": KILL}[how])
        if not trial.run():
            break
        orphans += trial.totals.orphans
        num_shards += sum(1 for path in shards(trial.paths) if len(Shard(path)))
    print(f"{what}: {how} at {at - 1} calls; {orphans} orphans, {num_shards} shards; nothing lost, nothing doubled")


if __name__ == "__main__":
    main(Path(sys.argv[1]), sys.argv[2], sys.argv[3])
