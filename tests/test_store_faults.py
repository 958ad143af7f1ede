"""The n-th I/O call fails, for n = 1, 2, … until an operation runs clean: nothing acknowledged is lost, nothing
half-written is read, and the operation, done again when the fault is gone, succeeds."""

from __future__ import annotations

import contextlib
import errno
import itertools
import json
import os
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path

import pytest
from io_faults import FAULTS, STALE_READ, STALE_STAT, Fault, Io
from store_parts import open_log, run_folder, trajectory
from test_store_ledger import entry

from hpcrl.layout import ProcessId, RunPaths, publish_json, read_json
from hpcrl.store.compact import compact, shards
from hpcrl.store.index import Store
from hpcrl.store.ledger import LedgerWriter, ProgressWriter, UpdateRow, entries, lineage
from hpcrl.store.log import Log
from hpcrl.store.records import Record
from hpcrl.store.seal import seal
from hpcrl.store.segment import CLOSED, OPEN, Header, read_segment, segments
from hpcrl.store.shard import Shard
from hpcrl.store.verify import verify

STEPS = 3


class Trial:
    """One run folder: an operation that meets a fault, the same again without, and what must be true of both."""

    def __init__(self, root: Path, like: Trial | None = None) -> None:
        self.submitted: dict[str, Record] = dict(like.submitted) if like else {}
        self.acknowledged: set[str] = set(like.acknowledged) if like else set()
        self.refused = False
        if like:
            shutil.copytree(like.paths.root, root)
        self.paths = run_folder(root)

    async def prepare(self) -> None:
        """What is there before; made once, and copied for each trial."""

    async def begin(self) -> None:
        """What comes right before the fault, in each trial."""

    async def run(self) -> None:
        """The operation. Raises OSError where it tells of the fault that way."""
        raise NotImplementedError

    async def again(self) -> None:
        """The operation once more, with the fault gone; it must succeed."""
        raise NotImplementedError

    async def append(self, log: Log, records: list[Record]) -> None:
        self.submitted |= {record.hash: record for record in records}
        await log.append([record.frame() for record in records])
        self.acknowledged |= {record.hash for record in records}

    async def write(self, name: str, segment_bytes: int = 1 << 20) -> None:
        """A whole trajectory, in closed segments."""
        log = open_log(self.paths, segment_bytes=segment_bytes)
        for record in trajectory(name, steps=STEPS):
            await self.append(log, [record])
        await log.close()

    def found(self) -> dict[str, Record]:
        with Store(self.paths, open_segments=True) as store:
            records = [store.record("", hash) for hash in store.prompts()]
            records += [record for name in store.names() for record in store.records(name)]
            assert not store.damaged
        assert len({record.hash for record in records}) == len(records)
        return {record.hash: record for record in records}

    def judge(self, done: bool) -> None:
        """`done`: after `again`."""
        found = self.found()
        assert not self.acknowledged - set(found), "acknowledged, and lost"
        for hash, record in found.items():
            assert record == self.submitted[hash] and record.true_hash == hash
        if done:
            assert set(found) == set(self.submitted) == self.acknowledged
            report = verify(self.paths)
            assert report.ok, report.problems


class Appending(Trial):
    """Append, close for size, seal; the same log goes on when the fault is gone."""

    log: Log | None = None

    def open_log(self) -> Log:
        return open_log(self.paths, segment_bytes=1500)

    def batches(self) -> list[list[Record]]:
        records = trajectory("a", steps=STEPS)
        return [records[i : i + 2] for i in range(0, len(records), 2)]

    async def run(self) -> None:
        self.log = self.open_log()
        for batch in self.batches():
            await self.append(self.log, batch)
        await self.log.seal()

    async def again(self) -> None:
        if self.log is None:
            self.log = self.open_log()
        for batch in self.batches():
            if not {record.hash for record in batch} <= self.acknowledged:
                await self.append(self.log, batch)
        await self.log.seal()
        assert not segments(self.paths.log, OPEN)
        await self.append(self.log, trajectory("z"))
        await self.log.close()
        numbers = [path.name for path in segments(self.paths.log, CLOSED)]
        assert len(set(numbers)) == len(numbers) and not segments(self.paths.log, OPEN)


class AppendingLocally(Appending):
    """The same with the log on the node's own disk, from which closed segments move into the run folder."""

    def open_log(self) -> Log:
        return open_log(self.paths, segment_bytes=1500, scratch=self.paths.root / "scratch")

    def found(self) -> dict[str, Record]:
        """What has not moved is there too, as long as the node is; it may move while we look."""
        found: dict[str, Record] = {}
        for suffix in (OPEN, CLOSED):
            for path in segments(self.paths.root / "scratch", suffix):
                with contextlib.suppress(FileNotFoundError):
                    found |= {record.hash: record for _, record in read_segment(path)}
        return found | super().found()

    def judge(self, done: bool) -> None:
        super().judge(done)
        if done:
            assert set(super().found()) == self.acknowledged and not list((self.paths.root / "scratch").iterdir())


class Closing(Trial):
    """Close a log; what could not be closed is closed by whoever comes when its owner is gone."""

    async def begin(self) -> None:
        self.log = open_log(self.paths)
        await self.append(self.log, trajectory("a", steps=STEPS))

    async def run(self) -> None:
        await self.log.close()

    async def again(self) -> None:
        seal(self.paths, gone=["n1"])
        assert not segments(self.paths.log, OPEN)
        await self.write("z")


class Recovering(Trial):
    """Take over a node's log whose owner died: one segment with a torn tail, one without a header."""

    async def prepare(self) -> None:
        records = trajectory("a", steps=STEPS)
        self.submitted |= {record.hash: record for record in records}
        self.acknowledged |= set(self.submitted)
        header = Header("n1", 1, "u1", ProcessId(1, 0, "another boot")).encode()
        frames = b"".join(record.frame() for record in records)
        (self.paths.log / "n1-1.open").write_bytes(header + frames + records[0].frame()[:-1])
        (self.paths.log / "n1-2.open").write_bytes(header[:20])

    async def run(self) -> None:
        open_log(self.paths)

    async def again(self) -> None:
        await self.write("z")
        assert [path.name for path in self.paths.log.glob("*-*")] and not segments(self.paths.log, OPEN)
        assert (self.paths.log / "n1-1.seg").exists()


class Compacting(Trial):
    """Closed segments become two shards, beside a shard, a segment that was left over, and a dead compactor's claim."""

    async def prepare(self) -> None:
        await self.write("a")
        (left_over,) = segments(self.paths.log, CLOSED)
        shutil.copy(left_over, self.paths.root / left_over.name)
        compact(self.paths)
        shutil.move(self.paths.root / left_over.name, left_over)
        for name in ("b", "c"):
            await self.write(name, segment_bytes=3000)
        me = ProcessId.me()
        claim = {"pid": me.pid, "start": 1, "boot": me.boot}
        (self.paths.shards / "000002.claim").write_text(json.dumps(claim))
        (self.paths.shards / ".000002.h5.7.tmp").write_bytes(b"half")

    async def run(self) -> None:
        compact(self.paths, shard_bytes=5000)

    async def again(self) -> None:
        me = ProcessId.me()
        for claim in self.paths.shards.glob("*.claim"):  # compaction is a process of its own, which has ended then
            claim.write_text(claim.read_text().replace(f'"start": {me.start}', '"start": 1'))
            os.utime(claim, (time.time() - 11,) * 2)  # one that could not be written says nothing for ten seconds
        report = compact(self.paths, shard_bytes=5000)
        assert not report.refused and not report.damaged
        assert [path.name for path in self.paths.log.iterdir() if not path.name.startswith(".")] == ["n1.last"]
        assert sorted(path.name for path in self.paths.shards.iterdir()) == [p.name for p in shards(self.paths)]
        rows = [hash for path in shards(self.paths) for hash in Shard(path).whole("steps")["hash"].tolist()]
        assert len(rows) == len(self.submitted) + 2  # the prompt of all three lies in each shard
        assert len(shards(self.paths)) == 3


class Scoring(Trial):
    """Ledger and progress; after an error a new incarnation goes on from what is there."""

    wrote: tuple[str, ...] = ()

    async def run(self) -> None:
        ledger = LedgerWriter(self.paths)
        progress = ProgressWriter(self.paths, None)
        for names in (("a",), ("b", "c")):
            ledger.append(map(entry, names))
            self.wrote += names
            progress.append(UpdateRow(update=len(self.wrote), phase="rl", phase_update=1, trajectories=names))
            self.acknowledged |= {f"update {len(self.wrote)}"}
        ledger.close()
        progress.close()

    def names(self) -> list[str]:
        return [found.trajectory for _, found in entries(self.paths)]

    async def again(self) -> None:
        known = self.names()
        LedgerWriter(self.paths).append(entry(name) for name in ("a", "b", "c") if name not in known)

    def judge(self, done: bool) -> None:
        names = self.names()
        assert names[: len(self.wrote)] == list(self.wrote) and names == ["a", "b", "c"][: len(names)]
        assert not done or len(names) == 3
        updates = {f"update {row.update}" for row in lineage(self.paths)}
        assert self.acknowledged <= updates <= {"update 1", "update 3"}


class Publishing(Trial):
    """A small file is replaced: a reader sees the old one or the new one."""

    @property
    def path(self) -> Path:
        return self.paths.root / "it.json"

    async def prepare(self) -> None:
        publish_json(self.path, {"is": "old"})

    async def run(self) -> None:
        publish_json(self.path, {"is": "new"})
        self.acknowledged = {"new"}

    async def again(self) -> None:
        publish_json(self.path, {"is": "new"})
        self.acknowledged = {"new"}

    def judge(self, done: bool) -> None:
        value = read_json(self.path)
        assert value is not None and value["is"] in (self.acknowledged or {"old", "new"})
        assert not done or not list(self.paths.root.glob(".it.json*"))


@pytest.fixture
def memory(tmp_path: Path) -> Iterator[Path]:
    """A folder where a sync costs nothing, if there is one: what a disk does is injected."""
    shm = Path("/dev/shm")
    if not os.access(shm, os.W_OK):
        yield tmp_path
        return
    with tempfile.TemporaryDirectory(prefix="hpcrl-faults-", dir=shm) as folder:
        yield Path(folder)


async def until_clean(make: type[Trial], fault: Fault, folder: Path, *, must_go_on: bool = False) -> int:
    """Trials with the fault at call 1, 2, …; how many calls there were. `must_go_on`: the operation sees no fault."""
    first = make(folder / "first")
    await first.prepare()
    for at in itertools.count(1):
        trial = make(folder / str(at), first)
        await trial.begin()
        with Io(trial.paths.root, fault, at) as io:
            try:
                await trial.run()
            except OSError as error:
                trial.refused = True
                if must_go_on:
                    raise AssertionError(f"call {at} met ({io.calls[0]})") from error
        try:
            trial.judge(done=False)
            await trial.again()
            trial.judge(done=True)
        except Exception as error:
            raise AssertionError(
                f"with call {at} met ({', '.join(io.calls)}): {type(error).__name__}: {error}"
            ) from error
        shutil.rmtree(trial.paths.root)
        if not io.fired:
            assert not trial.refused
            return at - 1
    raise AssertionError


# Compaction has the most calls and takes the longest: most of its faults are tried in `make test-slow`.
_QUICK = ("ENOSPC from then on", "a lost write", "a short write, then ENOSPC")


@pytest.mark.parametrize(
    ("make", "fault"),
    [
        pytest.param(make, fault, marks=pytest.mark.slow if make is Compacting and fault not in _QUICK else ())
        for make in (Appending, AppendingLocally, Closing, Recovering, Compacting, Scoring, Publishing)
        for fault in FAULTS
    ],
)
async def test_a_fault_at_any_call(make: type[Trial], fault: str, memory: Path) -> None:
    count = await until_clean(make, FAULTS[fault], memory)
    print(f"{count} calls")
    assert count >= 1 or (make, fault) == (Recovering, "") or "write" in fault


class Reading(Trial):
    """Read everything there is, by every reader."""

    async def prepare(self) -> None:
        await self.write("a")
        compact(self.paths)
        await self.write("b")
        log = open_log(self.paths)
        await self.append(log, trajectory("d", steps=STEPS))  # and leave it open
        LedgerWriter(self.paths).append([entry("a"), entry("b")])
        ProgressWriter(self.paths, None).append(UpdateRow(update=1, phase="rl", phase_update=1, trajectories=("a",)))
        publish_json(self.paths.heartbeat, {"is": "there"})

    async def run(self) -> None:
        heads = {name: trajectory(name, steps=STEPS)[-1].hash for name in "abd"}
        with Store(RunPaths.of(self.paths.root), open_segments=True) as store:
            assert sorted(store.names()) == list(heads) and not store.damaged
            assert len(store.summary()) == 3 and len(store.rewards()) == 3
            for name, head in heads.items():
                assert [record.hash for record in store.chain(name, head)] == [
                    record.hash for record in trajectory(name, steps=STEPS)[1:]
                ]
                assert store.complete(name, head) and len(store.steps([(name, 0)])[0].ids) == 3
            assert {record.trajectory for record in store.unsettled("d", heads["d"])} >= {"d"}
            assert store.batch(["a", "d"])["lengths"].tolist() == [11, 11]
        for path in shards(self.paths):
            Shard(path).check()
        assert [found.trajectory for _, found in entries(self.paths)] == ["a", "b"]
        assert [row.update for row in lineage(self.paths)] == [1]
        assert read_json(self.paths.heartbeat) == {"is": "there"}
        report = verify(self.paths)
        assert report.records == len(self.submitted) and report.damaged == report.missing_parents == 0


def test_no_write_of_a_shard_that_fails_ends_the_process(memory: Path) -> None:
    """HDF5 crashes where a write of its own fails; every call is failed below Python where a C compiler is here."""
    here = Path(__file__).parent
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join([str(here.parent), str(here)])}
    if compiler := shutil.which("cc"):
        library = memory / "h5_faults.so"
        subprocess.run([compiler, "-shared", "-fPIC", "-o", library, here / "h5_faults.c", "-ldl"], check=True)
        environment["LD_PRELOAD"] = str(library)
    else:
        print(
            "no C compiler is here: the calls of C code are not failed one by one, only by a limit on the file's size"
        )
    command = [sys.executable, here / "h5_faults.py", memory / "runs"]
    done = subprocess.run(command, env=environment, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr[-2000:]
    counts = json.loads(done.stdout)
    assert len(counts) == (5 if compiler else 1) and min(counts.values()) > 20, counts


@pytest.mark.parametrize("make", [Appending, AppendingLocally, Recovering, Compacting, Scoring, Publishing])
async def test_estale_once_is_survived_by_name(make: type[Trial], memory: Path) -> None:
    """A network filesystem says so, once, for a name that came to mean another file."""
    print(await until_clean(make, STALE_READ, memory, must_go_on=True), "calls")


@pytest.mark.parametrize("fault", [STALE_READ, STALE_STAT], ids=["open and read", "stat"])
async def test_every_reader_survives_estale(fault: Fault, memory: Path) -> None:
    everything = Reading(memory / "run")
    await everything.prepare()
    for at in itertools.count(1):
        with Io(everything.paths.root, fault, at) as io:
            await everything.run()
        if not io.fired:
            break
    print(at - 1, "calls")
    assert at > (100 if fault is STALE_READ else 1)


def test_a_folder_that_cannot_be_listed_is_not_taken_for_empty(memory: Path) -> None:
    """A compactor that saw no shards would pack what is in them once more."""
    paths = run_folder(memory / "run")
    readers = [lambda: compact(paths), lambda: Store(paths), lambda: entries(paths), lambda: verify(paths)]
    for reader in readers:
        for error in (errno.EACCES, errno.EIO):
            with Io(paths.root, Fault(frozenset({"list"}), error), 1) as io, pytest.raises(OSError) as caught:
                reader()
            assert io.calls == ["list"] and caught.value.errno == error
