"""Store, ledger, progress and weights with the roles on two mounts of one folder (slow_mount.py), that see each other
late: nothing acknowledged is lost, nothing doubled, nothing crashes; late sight only delays."""

from __future__ import annotations

import asyncio
import errno
import fcntl
import os
import signal
import subprocess
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from crash import fork
from slow_mount import slow_mounts
from store_parts import act, adopt, end, observe, open_log, run_folder, trajectory
from test_store_ledger import entry, names, update

from hpcrl.config import Phase
from hpcrl.layout import ProcessId, RunPaths, listed, next_incarnation, publish
from hpcrl.learner.feed import Feed, read_rows
from hpcrl.store.compact import compact, seal_dead_here, shards
from hpcrl.store.index import Store
from hpcrl.store.ledger import LedgerReader, LedgerWriter, ProgressReader, ProgressWriter, entries, lineage
from hpcrl.store.records import Record, prompt
from hpcrl.store.segment import CLOSED, OPEN, segments
from hpcrl.store.verify import verify
from hpcrl.types import Entry

pytestmark = pytest.mark.timeout(300)
Nodes = tuple[RunPaths, RunPaths]


@pytest.fixture(params=[30.0])
def nodes(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[Nodes]:
    """One run folder as two nodes see it."""
    with slow_mounts(tmp_path, request.param) as (a, b):
        yield run_folder(a / "run"), RunPaths(b / "run")


seconds = lambda value: pytest.mark.parametrize("nodes", [value], indirect=True)  # noqa: E731


def write(paths: RunPaths, records: list[Record], node: str = "n1") -> None:
    async def append() -> None:
        log = open_log(paths, node)
        for record in records:
            await log.append([record.frame()])
        await log.close()

    asyncio.run(append())


def inside(folder: Path) -> set[str]:
    return {path.name for path in folder.iterdir()}


def look(paths: RunPaths) -> None:
    """Fill this node's caches with what is there now, and what is not."""
    for folder in (paths.log, paths.shards, paths.ledger, paths.progress, paths.weights):
        listed(folder, anew=True)
    for number in range(1, 9):
        (paths.shards / f"{number:06d}.h5").exists()
        (paths.shards / f"{number:06d}.claim").exists()


def truth(nodes: Nodes) -> RunPaths:
    """The folder without a mount."""
    return RunPaths(nodes[0].root.parent.parent / "shared" / "run")


def stored(nodes: Nodes) -> Counter[str]:
    """How often each record is in shards, by hash."""
    paths = truth(nodes)
    with Store(paths) as store:
        found = [store.shard(path.name) for path in shards(paths)]
        return Counter(shard.record(row).hash for shard in found for row in range(len(shard)))


def expect(nodes: Nodes, records: list[Record]) -> None:
    """All of these are in shards, once, and nothing else."""
    compact(truth(nodes))
    assert stored(nodes) == Counter({record.hash for record in records})
    assert not segments(truth(nodes).log, CLOSED) and verify(truth(nodes), deep=True).ok
    assert [path.name for path in truth(nodes).shards.iterdir() if path.suffix != ".h5"] == []


class Together:
    """Runs what roles do, each in a thread; what one raises is raised at the end."""

    def __init__(self) -> None:
        self.over = threading.Event()
        self._threads: list[threading.Thread] = []
        self._errors: list[BaseException] = []

    def start(self, call: Callable[[], object]) -> threading.Thread:
        def run() -> None:
            try:
                call()
            except BaseException as error:
                self._errors.append(error)

        thread = threading.Thread(target=run)
        thread.start()
        self._threads.append(thread)
        return thread

    def again(self, call: Callable[[], object], pause_s: float) -> None:
        def run() -> None:
            while not self.over.wait(pause_s):
                call()

        self.start(run)

    def end(self) -> None:
        self.over.set()
        for thread in self._threads:
            thread.join()
        if self._errors:
            raise ExceptionGroup("roles", self._errors)  # type: ignore[type-var]


@seconds(1.0)
def test_the_mounts_are_as_bad_as_they_say(nodes: Nodes) -> None:
    """Else the other tests would show nothing."""
    a, b = (paths.root for paths in nodes)
    assert not (b / "x").exists() and "x" not in inside(b)
    (a / "x").write_text("one")
    assert not (b / "x").exists() and "x" not in inside(b), "what was not there, nor listed"
    time.sleep(1.1)
    assert (b / "x").exists() and "x" in inside(b)
    (b / "x").stat()
    with (a / "x").open("a") as file:
        file.write(", two")
    assert (b / "x").stat().st_size == 3, "its size"
    assert (b / "x").read_text() == "one, two", "but not once it is opened anew"
    fd = os.open(b / "x", os.O_RDONLY)
    (a / "x").rename(a / "y")
    assert (b / "x").read_text() == "one, two" and "x" in inside(b) and "y" not in inside(b)
    (b / "x").stat()
    (a / "y").unlink()
    assert (b / "x").exists(), "by its kept name"
    with pytest.raises(FileNotFoundError):
        (b / "x").read_text()
    assert "x" in inside(b), "listed, and not to be found"
    (b / "z").touch()
    assert "x" not in inside(b), "who changes a folder lists it anew"
    time.sleep(1.1)
    with pytest.raises(OSError, match="Stale"):
        os.pread(fd, 100, 0)
    os.close(fd)
    with (b / "z").open("w") as file:
        for lock in (fcntl.flock, fcntl.lockf):
            with pytest.raises(OSError) as error:
                lock(file, fcntl.LOCK_EX)
            assert error.value.errno == errno.ENOLCK


@seconds(1.0)
def test_owner_compactors_and_readers_all_at_once(nodes: Nodes) -> None:
    a, b = nodes
    acknowledged: list[Record] = []

    async def owner() -> None:
        log = open_log(a, segment_bytes=1500)
        for number in range(25):
            for record in trajectory(f"t{number}", prompt_ids=(number, 2, 3)):
                await log.append([record.frame()])
                acknowledged.append(record)
            await asyncio.sleep(0.05)
        await log.close()

    def read(store: Store, closed_only: bool) -> None:
        """All that was acknowledged is there; but for what is still in the open segment, where that is not read."""
        before = len(acknowledged)
        store.refresh(anew=True)
        for record in acknowledged[:before]:
            if record.trajectory and not (closed_only and record.hash not in store.rows(record.trajectory)):
                assert store.record(record.trajectory, record.hash) == record

    roles = Together()
    writing = roles.start(lambda: asyncio.run(owner()))
    roles.again(lambda: compact(a), 0.3)
    roles.again(lambda: compact(b), 0.2)
    stores = [Store(paths, open_segments=too) for paths in nodes for too in (False, True)]
    for at, store in enumerate(stores):
        roles.again(lambda store=store, at=at: read(store, at % 2 == 0), 0.2)
    writing.join(120)
    roles.end()
    for store in stores:
        read(store, False)
        store.close()
    assert len(acknowledged) == 150
    expect(nodes, acknowledged)


def test_what_went_into_a_shard_is_never_missed(nodes: Nodes) -> None:
    """The reader's node still lists the segments, no longer finds them, and does not list the shard."""
    a, b = nodes
    first, second = trajectory("t"), trajectory("u")
    write(a, first)
    follower = Store(b)
    follower.refresh()
    write(a, second)
    look(b)
    compact(a)
    assert len(inside(b.log)) == 3 and not inside(b.shards), "or this shows nothing"
    assert follower.chain("t", first[-1].hash) == first[1:]
    late = Store(b)  # as a process that has just been started
    for store in (follower, late):
        store.refresh()
        assert store.sequence("u", second[-1].hash, 1.0).ids.tolist() == [1, 2, 3, 10, 20, 30, 11, 20]
        assert len(store) == 11 and not store.damaged
        store.close()
    assert verify(b).ok
    expect(nodes, first + second)


@seconds(3.0)
def test_who_may_not_write_waits_until_the_node_asks_again(nodes: Nodes) -> None:
    a, b = nodes
    records = trajectory("t")
    write(a, records)
    subprocess.run(["mount", "-o", "bind,ro", b.root, b.root], check=True)
    try:
        look(b)
        compact(a)
        began = time.monotonic()
        with Store(b) as store:
            assert store.chain("t", records[-1].hash) == records[1:]
        assert 0.5 < time.monotonic() - began < 10
    finally:
        subprocess.run(["umount", "-l", b.root], check=True)


def test_a_shard_is_never_written_over(nodes: Nodes) -> None:
    """Each of the two nodes thinks, in turn, that the next number is free."""
    a, b = nodes
    records = []
    for number in range(6):
        compactor, other = (a, b) if number % 2 else (b, a)
        look(other)
        more = trajectory(f"t{number}", prompt_ids=(number,))
        write(a, more)
        records += more
        assert not compact(compactor).damaged
    for paths in (a, b):
        listed(paths.log, anew=True)
        compact(paths)
    expect(nodes, records)


def test_two_compactors_at_once(nodes: Nodes) -> None:
    a, b = nodes
    records = []
    for number in range(8):
        look(a), look(b)
        for name in ("x", "y"):
            more = trajectory(f"{name}{number}", prompt_ids=(number, ord(name)), steps=3)
            write(a, more, name)
            records += more
        roles = Together()
        for paths in nodes:
            roles.start(lambda paths=paths: compact(paths, shard_bytes=1000))
        roles.end()
    expect(nodes, records)


def test_claims_of_the_dead_go_and_those_of_the_living_stay(nodes: Nodes) -> None:
    a, b = nodes
    records = trajectory("t")
    write(a, records)
    look(b)
    pid = fork(lambda: time.sleep(60))
    me = ProcessId.of(pid)
    claim = f'{{"pid": {pid}, "start": {me.start}, "boot": "{me.boot}"}}'
    (a.shards / "000001.claim").write_text(claim)
    (a.shards / ".000001.h5.9.tmp").write_bytes(b"half")
    assert "000001.claim is held by a compactor that lives" in compact(b).refused
    assert (a.shards / ".000001.h5.9.tmp").exists()
    os.kill(pid, signal.SIGKILL)
    os.waitpid(pid, 0)
    assert compact(b).segments == 1
    expect(nodes, records)


def test_a_lost_owners_open_segment_is_adopted_whole(nodes: Nodes) -> None:
    """Its node is gone; control's node knew of an older state, and grants the next attempt from the last record."""
    a, b = nodes
    start, first = prompt([1, 2]), adopt("t")
    turn = act(first, 0, [3], root=start.hash)
    write(a, [start, first, turn])
    control = Store(b, open_segments=True)
    control.refresh()
    look(b)
    rest = [observe(turn, [4])]
    for step in range(1, 6):
        rest.append(act(rest[-1], step, [step]))
        rest.append(observe(rest[-1], [9]))

    def owner() -> None:
        async def append() -> None:
            log = open_log(a)
            for record in rest:
                await log.append([record.frame()])
            os.kill(os.getpid(), signal.SIGKILL)

        asyncio.run(append())

    os.waitpid(fork(owner), 0)
    assert segments(truth(nodes).log, OPEN) and not segments(b.log, OPEN), "or this shows nothing"
    control.refresh(anew=True)
    assert control.head("t") == rest[-1].hash
    again = adopt("t", 2, rest[-1].hash, rest[-1].step)
    last = end(again)
    write(b, [*control.unsettled("t", rest[-1].hash), again, last], "n2")
    assert [path.name for path in seal_dead_here(b)] == ["n1-2.seg"]
    assert {path.name for path in seal_dead_here(a)} <= {"n1-2.seg"}, "again, by the name that this node still knows"
    host = Store(a, open_segments=True)
    host.refresh(anew=True)
    assert [record.hash for record in host.chain("t", last.hash)] == [
        record.hash for record in (first, turn, *rest, again, last)
    ]
    compact(b)
    assert host.chain("t", last.hash)[-1] == last
    control.close(), host.close()
    expect(nodes, [start, first, turn, *rest, again, last])


@seconds(1.0)
def test_ledger_and_progress_between_nodes(nodes: Nodes) -> None:
    """Control on one, the learner on the other, and both are started again on the other's node."""
    control, learner = nodes
    look(control), look(learner)
    ledger, progress = LedgerReader(learner), ProgressReader(control)
    found: list[str] = []
    updates: list[int] = []
    written: list[str] = []
    for life in range(4):
        scored, made = (
            LedgerWriter(control),
            ProgressWriter(learner, {"incarnation": life, "update": 5 * life} if life else None),
        )
        assert (scored.incarnation, made.incarnation) == (life + 1, life + 1)
        for number in range(5 * life + 1, 5 * life + 6):
            scored.append([entry(f"t{number}")])
            written.append(f"t{number}")
            made.append(update(number, f"t{number}"))
            found += names(ledger.read())
            updates += [row.update for row in progress.read()]
            time.sleep(0.1)
        scored.stop("asked")
        assert names(entries(learner)) == names(entries(control)) == written, "what looks once sees all"
        assert [row.update for row in lineage(control)] == list(range(1, 5 * life + 6))
        control, learner = learner, control
    time.sleep(1.1)
    found += names(ledger.read())
    updates += [row.update for row in progress.read()]
    assert found == written and updates == list(range(1, 21))
    assert ledger.stopped == "asked" and ledger.incarnation == 4


def test_incarnations_are_never_given_twice(nodes: Nodes) -> None:
    taken: list[int] = []
    roles = Together()
    for paths in nodes:
        look(paths)
        roles.start(lambda paths=paths: taken.extend(next_incarnation(paths.ledger)[0] for _ in range(30)))
    roles.end()
    assert sorted(taken) == list(range(1, 61))


@seconds(1.0)
def test_the_learner_gets_every_update(nodes: Nodes) -> None:
    """Rollout node and rank 1 on one node; control, compaction and rank 0 on the other."""
    a, b = nodes
    phase = Phase(name="rl", objective="grpo", lr=1e-4, updates=10, trajectories=4, group_size=2)
    ledger = LedgerWriter(b)
    plans = []

    async def rollout() -> None:
        log = open_log(a, segment_bytes=2000)
        for number in range(40):
            records = trajectory(f"t{number}")
            await log.append([record.frame() for record in records])
            ledger.append([_scored(records[-1], number)])
            await asyncio.sleep(0.02)
        await log.close()

    def learner() -> None:
        other = Store(a)
        feed = Feed(b, Store(b), (), lambda: False, 1, 0.05)
        for _ in range(10):
            plans.append(plan := feed.next(phase, time.monotonic(), 2, 64))
            rows = read_rows(other, plan, range(4), 30.0)
            assert [row.trajectory for row in rows] == list(plan.trajectories)
            assert all(row.ids.tolist() == [1, 2, 3, 10, 20, 30, 11, 20] for row in rows)

    roles = Together()
    roles.again(lambda: compact(b), 0.2)
    training = roles.start(learner)
    roles.start(lambda: asyncio.run(rollout()))
    training.join(120)
    roles.end()
    assert sorted(one for plan in plans for one in plan.trajectories) == sorted(f"t{number}" for number in range(40))


def _scored(last: Record, number: int) -> Entry:
    return Entry(
        trajectory=last.trajectory, attempt=1, head=last.hash, group=f"g{number // 2}", phase="rl", reward=number % 2,
        num_tokens=8, num_sampled=4, num_steps=2, min_version=4, group_size=2,
    )  # fmt: skip


@seconds(1.0)
def test_weights_published_on_one_node_are_loaded_on_the_other(nodes: Nodes) -> None:
    import torch

    from hpcrl.weights.load import Probe, check, iter_tensors, newest, read_probe
    from hpcrl.weights.publish import next_version, start_folder, write_manifest, write_part

    learner, engine = nodes
    rows = {"ids": torch.ones(1, 3, dtype=torch.int32), "lengths": torch.tensor([3], dtype=torch.int32)}
    for version in range(4):
        assert next_version(learner) == version
        folder = start_folder(learner, version)
        assert newest(engine) == list(range(version))[::-1], "half of one is none"
        tensors = {f"layer.{k}": torch.full((1000,), float(version + k)) for k in range(4)}
        parts = [write_part(folder, rank, 2, dict(list(tensors.items())[rank::2])) for rank in range(2)]
        written = Probe(**rows, logprobs=torch.full((1, 3), float(version)))
        write_manifest(folder, parts, written, version=version, update=version, parent=version - 1)
        publish(learner.current, f"{version}\n")
        began = time.monotonic()
        while newest(engine, 1) != [version]:
            assert time.monotonic() - began < 5
            time.sleep(0.1)
        loaded = engine.version(version)
        assert check(loaded).version == version and engine.current.read_text() == f"{version}\n"
        assert all(torch.equal(tensor, tensors[name]) for name, tensor in iter_tensors(loaded))
        assert read_probe(loaded).logprobs[0, 0] == version
        learner, engine = engine, learner  # a learner that is started again there goes on counting


def test_a_version_is_not_torn_because_this_node_knows_it_not(nodes: Nodes) -> None:
    """Nobody clears away a folder whose manifest another node has just written."""
    from hpcrl.weights.load import newest
    from hpcrl.weights.manifest import MANIFEST
    from hpcrl.weights.publish import next_version, start_folder

    a, b = nodes
    folder = start_folder(a, 0)
    assert newest(b) == []
    (folder / MANIFEST).write_text("{}")
    assert newest(b) == [], "or this shows nothing"
    assert next_version(b) == 1 and (folder / MANIFEST).exists()
