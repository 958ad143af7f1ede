"""Records and the log: what was acknowledged is there, whatever happens to the process or the disk."""

from __future__ import annotations

import asyncio
import errno
import itertools
import os
import random
import shutil
import time
from pathlib import Path

import numpy as np
import pytest
from small_disk import fill, small_disk
from store_parts import act, adopt, observe, open_log, run_folder, trajectory

from hpcrl.layout import ProcessId
from hpcrl.store.compact import compact
from hpcrl.store.index import Store
from hpcrl.store.link import LogClient, LogServer
from hpcrl.store.log import Log, _Segment, take_over
from hpcrl.store.records import REQUIRED, Kind, Record, prompt, read_frame
from hpcrl.store.segment import CLOSED, OPEN, Header, read_header, read_segment, segments
from hpcrl.store.verify import missing
from hpcrl.types import StoreError


def stored(folder: Path) -> list[str]:
    paths = segments(folder, CLOSED) + segments(folder, OPEN)
    return [record.hash for path in paths for _, record in read_segment(path)]


def test_record_round_trip_keeps_every_bit() -> None:
    record = act(adopt("t"), 3, [5, 6, 7])
    odd = Record(
        kind=Kind.ACT,
        trajectory="t",
        meta={"x": [1, 0.1, None, "\ud800"]},
        ids=np.array([1, 2], np.int32),
        logprobs=np.array([np.nan, -0.0], np.float32),
    )
    for before in (record, odd, observe(record, [9]), prompt([4, 5]), adopt("t")):
        after, size = read_frame(before.frame(), 0)
        assert (after, after.hash, size) == (before, before.hash, len(before.frame()))
        assert after.payload == before.payload
        assert after.logprobs.tobytes() == before.logprobs.tobytes()
    assert list(observe(record, [9]).filled("versions")) == [-1]
    assert prompt([4, 5]).hash != prompt([4, 6]).hash
    assert act(adopt("t"), 3, [5, 6, 8]).hash != record.hash
    assert act(adopt("u"), 3, [5, 6, 7]).hash != record.hash


def test_missing_fields_are_named() -> None:
    for record in trajectory("t"):
        assert missing(record) == []
    assert missing(Record(kind=Kind.REWARD, meta={"source": "x"})) == ["value", "wall"]
    bare = Record(kind=Kind.OBSERVE, meta={**dict.fromkeys(REQUIRED[Kind.OBSERVE]), "results": [{"name": "ls"}]})
    assert missing(bare)[0] == "results[0].status"


def test_meta_that_is_not_json_is_refused() -> None:
    with pytest.raises(ValueError, match="JSON"):
        _ = Record(kind=Kind.END, meta={"x": float("nan")}).payload
    with pytest.raises(TypeError):
        _ = Record(kind=Kind.END, meta={"x": object()}).payload


async def test_group_commit_shares_syncs_and_acknowledges_after(tmp_path: Path) -> None:
    paths = run_folder(tmp_path)
    log = open_log(paths, commit_interval_s=0.05)
    records = [act(adopt(f"t{i}"), 0, [i]) for i in range(200)]
    began = time.monotonic()
    waits = [asyncio.ensure_future(log.append([record.frame()])) for record in records]
    places = [(await wait)[0] for wait in waits]
    assert log.num_syncs <= 3  # the first wakes alone; the rest share
    assert places == sorted(places) and len(set(places)) == 200
    by_offset = dict(read_segment(segments(paths.log, OPEN)[0]))
    assert [by_offset[offset].hash for _, offset in places] == [record.hash for record in records]
    for i in range(3):
        await log.append([act(adopt("u"), i, [i]).frame()])
    assert time.monotonic() - began >= 3 * 0.05 * 0.9  # at least the interval between syncs
    await log.close()
    assert stored(paths.log)[:200] == [record.hash for record in records]
    assert not segments(paths.log, OPEN)
    with pytest.raises(OSError, match="closed"):
        await log.append([records[0].frame()])


async def test_segments_close_at_size_and_age_and_never_empty(tmp_path: Path) -> None:
    paths = run_folder(tmp_path)
    log = open_log(paths, segment_bytes=1500, segment_age_s=0.2)
    assert not list(paths.log.iterdir())
    for i in range(20):
        await log.append([act(adopt("t"), i, [i]).frame()])
    assert len(segments(paths.log, CLOSED)) >= 3
    await asyncio.sleep(0.4)  # nothing is appended
    assert not segments(paths.log, OPEN)
    count = len(segments(paths.log, CLOSED))
    await asyncio.sleep(0.3)
    await log.seal()
    assert len(segments(paths.log, CLOSED)) == count
    await log.append([adopt("t").frame()])
    await log.close()
    assert len(stored(paths.log)) == 21
    numbers = [read_header(path)[0].number for path in segments(paths.log, CLOSED)]
    assert numbers == list(range(1, len(numbers) + 1))
    for path in paths.log.glob(f"*{CLOSED}"):
        path.unlink()  # as compaction does
    log = open_log(paths)
    assert (await log.append([adopt("t").frame()]))[0][0] == numbers[-1] + 1  # a number never comes back
    with pytest.raises(StoreError, match="stop it first"):
        open_log(paths)
    await log.close()


def test_torn_tail_is_trimmed_wherever_it_is_torn(tmp_path: Path) -> None:
    records = trajectory("t")
    path = run_folder(tmp_path).log / "n2-1.open"
    whole = Header("n2", 1, "u", ProcessId(1, 0, "another boot")).encode() + b"".join(r.frame() for r in records)
    path.write_bytes(whole)
    starts = [offset for offset, _ in read_segment(path)]
    for cut in [*range(starts[-2], len(whole), 37), len(whole), starts[0], 5, 0]:
        path.write_bytes(whole[:cut])
        expected = [r.hash for r, stop in zip(records, [*starts[1:], len(whole)], strict=True) if stop <= cut]
        assert [record.hash for _, record in read_segment(path)] == expected
        open_log(run_folder(tmp_path), "n2")
        assert stored(path.parent) == expected
        path.with_suffix(CLOSED).unlink(missing_ok=True)
    path.write_bytes(whole[: starts[-1]] + bytes(4096))  # a power cut may leave zeros
    open_log(run_folder(tmp_path), "n2")
    assert stored(path.parent) == [r.hash for r in records[:-1]]


async def test_any_flipped_byte_in_a_closed_segment_is_found(tmp_path: Path) -> None:
    paths = run_folder(tmp_path)
    log = open_log(paths)
    await log.append([record.frame() for record in trajectory("t")])
    await log.close()
    (path,) = segments(paths.log, CLOSED)
    whole = path.read_bytes()
    for at in range(0, len(whole), 7):
        path.write_bytes(whole[:at] + bytes((whole[at] ^ 0x10,)) + whole[at + 1 :])
        with pytest.raises(StoreError, match=path.name):
            list(read_segment(path))
    path.write_bytes(whole[:-3])
    with pytest.raises(StoreError, match=r"damaged at byte \d+"):
        list(read_segment(path))


async def test_full_disk_refuses_and_recovers(tmp_path: Path) -> None:
    with small_disk(tmp_path / "small", "256k") as mount:
        paths = run_folder(mount)
        log = open_log(paths)
        acknowledged, refused = [], []
        for i in range(200):
            record = act(adopt("t"), i, list(range(500)))
            try:
                await log.append([record.frame()])
                acknowledged.append(record.hash)
            except OSError as error:
                assert error.errno == errno.ENOSPC
                refused.append(record.hash)
                if len(refused) == 5:
                    break
        assert len(acknowledged) >= 10 and len(refused) == 5
        assert stored(paths.log) == acknowledged  # nothing half-written stays, nothing acknowledged is gone
        shutil.move(segments(paths.log, CLOSED)[0], tmp_path / "n1-1.seg")  # room again
        record = act(adopt("t"), 999, [1])
        await log.append([record.frame()])
        await log.close()
        assert stored(paths.log) == [record.hash]
        assert [r.hash for _, r in read_segment(tmp_path / "n1-1.seg")] == acknowledged


async def test_a_log_on_the_nodes_disk_moves_what_is_closed(tmp_path: Path) -> None:
    paths, scratch = run_folder(tmp_path / "run"), tmp_path / "scratch"
    log = open_log(paths, scratch=scratch)
    records = [act(adopt("t"), i, [i]) for i in range(6)]
    await log.append([records[0].frame()])
    assert stored(scratch) == [records[0].hash] and not stored(paths.log)
    await log.seal()
    assert stored(paths.log) == [records[0].hash] and not stored(scratch)
    await log.append([records[1].frame()])
    del log  # as if killed: its process lives, so the next owner must be told that it doesn't
    (left,) = segments(scratch, OPEN)
    header, start = read_header(left)
    frames = left.read_bytes()[start:]
    left.write_bytes(Header(header.node, header.number, header.uid, ProcessId(1, 1, "no boot")).encode() + frames)
    log = open_log(paths, scratch=scratch)
    assert stored(paths.log) == [record.hash for record in records[:2]] and not stored(scratch)
    # Killed between its copy and its end, a segment lies in both places; compaction and the move end that in any order.
    for compacted_first in (True, False):
        await log.append([records[2 + compacted_first].frame()])
        await log.seal()
        *_, moved = segments(paths.log, CLOSED)
        shutil.copy(moved, scratch)
        if compacted_first:
            compact(paths)
        await log.seal()
        compact(paths)
        assert not stored(scratch) and not stored(paths.log)
        with Store(paths) as store:
            assert len(store.rows("t")) == (3 if compacted_first else 4)
    shutil.rmtree(scratch)  # a new disk: numbers go on all the same
    scratch.mkdir()
    (place,) = await log.append([records[4].frame()])
    assert place[0] == 5
    await log.close()
    assert stored(paths.log) == [records[4].hash]


async def test_a_folder_that_others_can_enter_is_no_scratch(tmp_path: Path) -> None:
    """Its name can be guessed, and /tmp is everybody's: what somebody put there must not get into the run."""
    paths, scratch = run_folder(tmp_path / "run"), tmp_path / "scratch"
    scratch.mkdir(mode=0o755)
    planted = Header("n1", 1, "u", ProcessId(1, 1, "no boot")).encode() + b"".join(r.frame() for r in trajectory("t"))
    (scratch / "n1-1.seg").write_bytes(planted)
    for make in (lambda: open_log(paths, scratch=scratch), lambda: take_over(scratch, "n1", paths.log)):
        with pytest.raises(StoreError, match="scratch: must be a folder of this user's with mode 0700"):
            make()
    if not os.geteuid():
        scratch.chmod(0o700)
        os.chown(scratch, 12345, -1)
        with pytest.raises(StoreError, match="0700"):
            open_log(paths, scratch=scratch)
        os.chown(scratch, 0, -1)
    (tmp_path / "link").symlink_to(scratch)
    with pytest.raises(StoreError, match="link: must be a folder"):
        open_log(paths, scratch=tmp_path / "link")
    assert not stored(paths.log)
    scratch.chmod(0o700)
    await open_log(paths, scratch=scratch).close()
    assert len(stored(paths.log)) == 6


async def test_what_a_killed_owner_had_half_moved_goes(tmp_path: Path) -> None:
    paths = run_folder(tmp_path)
    ours = [paths.log / name for name in (".n1-4.seg.77.tmp", ".n1-15.seg.7.tmp")]
    others = [paths.log / name for name in (".n1-b-4.seg.77.tmp", ".n2-4.seg.77.tmp", ".n1.last.5.tmp")]
    for path in ours + others:
        path.write_bytes(b"half")
    await open_log(paths).close()
    assert [path for path in ours if path.exists()] == [] and all(path.exists() for path in others)


async def test_what_cannot_be_moved_yet_stays_and_is_moved_later(tmp_path: Path) -> None:
    scratch = tmp_path / "scratch"
    with small_disk(tmp_path / "small", "256k") as mount:
        paths = run_folder(mount)
        # A copy that fails takes the space of the next number for a moment.
        log = open_log(paths, scratch=scratch, segment_bytes=20_000, full_patience_s=30.0)
        records = [act(adopt("t"), i, list(range(500))) for i in range(12)]
        await log.append([records[0].frame()])
        fill(mount, left=8192)  # its numbers still fit
        for record in records[1:]:
            await log.append([record.frame()])  # the run goes on
        with pytest.raises(OSError, match="No space left"):
            await log.seal()
        assert sorted(stored(scratch) + stored(paths.log)) == sorted(record.hash for record in records)
        (mount / "ballast").unlink()
        await log.close()
        assert sorted(stored(paths.log)) == sorted(record.hash for record in records) and not stored(scratch)


async def test_settled_is_what_other_nodes_can_read(tmp_path: Path) -> None:
    paths = run_folder(tmp_path / "run")
    for scratch in (None, tmp_path / "scratch"):
        log = open_log(paths, node="far" if scratch else "near", scratch=scratch)
        server = LogServer(log, tmp_path / "log.sock")
        await server.start()
        async with LogClient(tmp_path / "log.sock") as client:
            record = adopt("far" if scratch else "near")
            client.append(record)
            await client.settle()
            if scratch:
                assert record.hash in stored(paths.log)
                (tmp_path / "away").mkdir()
                await client.append(act(record, 0, [1]))
                paths.log.rename(tmp_path / "away" / "log")
                with pytest.raises(OSError):
                    await client.settle()
                (tmp_path / "away" / "log").rename(paths.log)
                await client.settle()
                assert len(stored(paths.log)) == 3
        await server.close()
        await log.close()


@pytest.mark.parametrize("hosts", [1, 2])
async def test_nothing_is_durable_that_came_after_what_is_not(tmp_path: Path, hosts: int) -> None:
    """A sync fails while more is on its way: none of that may get through, for it may build on what failed."""
    paths = run_folder(tmp_path)
    syncs = itertools.count(1)

    def sync(fd: int) -> None:
        time.sleep(0.02)
        if next(syncs) % 4 == 0:
            raise OSError(errno.EIO, "no")
        os.fdatasync(fd)

    log = open_log(paths, sync=sync)
    server = LogServer(log, tmp_path / "log.sock")
    await server.start()
    chance = random.Random(hosts)
    failed = chains = 0

    async def chain(client: LogClient, name: str) -> None:
        """As a loop does it: every record names the one before, without waiting; on an error it ends."""
        nonlocal failed, chains
        parent, commits = adopt(name), []
        for step in range(40):
            if any(one.done() and one.exception() for one in commits):
                failed += 1
                break
            commits.append(client.append(parent))
            parent = act(parent, step, [step])
            await asyncio.sleep(chance.uniform(0, 0.01))
        await asyncio.gather(*commits, return_exceptions=True)
        chains += 1

    async def host(number: int) -> None:
        async with LogClient(tmp_path / "log.sock") as client:
            for round_ in range(3):
                await asyncio.gather(*(chain(client, f"{number}.{round_}.{k}") for k in range(8)))

    await asyncio.gather(*(host(number) for number in range(hosts)))
    await server.close()
    await log.close()
    records = [record for path in segments(paths.log, CLOSED) for _, record in read_segment(path)]
    there = {record.hash for record in records}
    assert chains == 24 * hosts and failed > 3 and len(records) > 100
    assert [record.step for record in records if record.parent and record.parent not in there] == []


async def test_a_short_time_without_space_only_delays(tmp_path: Path) -> None:
    with small_disk(tmp_path / "small", "1m") as mount:
        paths = run_folder(mount)
        log = open_log(paths, full_patience_s=60.0)
        records = [act(adopt("t"), i, list(range(500))) for i in range(20)]
        await log.append([record.frame() for record in records[:10]])
        ballast = fill(mount)
        waiting = [log.submit([record.frame()]) for record in records[10:]]
        await asyncio.sleep(1.5)
        assert log.full and not any(one.done() for one in waiting)
        assert stored(paths.log) == [record.hash for record in records[:10]]
        ballast.unlink()
        await asyncio.wait_for(asyncio.gather(*waiting), 10)
        assert not log.full
        await log.close()
        assert stored(paths.log) == [record.hash for record in records]


def slow(fd: int) -> None:
    time.sleep(0.01)
    os.fdatasync(fd)


async def append_until(log: Log, over: asyncio.Event, number: int) -> int:
    """One record after the other; how many. Begun a little later than the number before: in step, they would all wait
    for the same syncs, and nothing would come in behind."""
    name = f"t{number}"
    await asyncio.sleep(0.003 * number)
    for i in itertools.count():
        if over.is_set():
            return i
        await log.append([act(adopt(name), i, [i]).frame()])
    raise AssertionError


async def test_who_seals_need_not_wait_for_the_load_to_end(tmp_path: Path) -> None:
    """Where syncs aren't paced, the commit thread takes in what comes while it works: there is always more."""
    paths = run_folder(tmp_path)
    log, over = open_log(paths, sync=slow), asyncio.Event()
    load = [asyncio.create_task(append_until(log, over, number)) for number in range(8)]
    for count in range(1, 6):
        await asyncio.sleep(0.1)
        await asyncio.wait_for(log.seal(), 3)
        assert len(segments(paths.log, CLOSED)) >= count
    over.set()
    count = sum(await asyncio.gather(*load))
    await log.close()
    assert len(stored(paths.log)) == count > 8


async def test_a_disk_that_fills_up_late_is_waited_for_too(tmp_path: Path) -> None:
    """The time that it may be full counts from when it is, not from when the load began."""
    paths = run_folder(tmp_path)
    began, met = time.monotonic(), []

    def sync(fd: int) -> None:
        if time.monotonic() - began > 1.0 and not met:
            met.append(fd)
            raise OSError(errno.ENOSPC, "No space left on device")
        slow(fd)

    log, over = open_log(paths, sync=sync, full_patience_s=0.5), asyncio.Event()
    load = [asyncio.create_task(append_until(log, over, number)) for number in range(8)]
    await asyncio.sleep(2.5)
    over.set()
    count = sum(await asyncio.gather(*load))  # and none was refused
    await log.close()
    assert met and log.failures == 0 and len(stored(paths.log)) == count


async def test_who_is_cancelled_while_closing_leaves_nobody_waiting(tmp_path: Path) -> None:
    paths = run_folder(tmp_path)

    def sync(fd: int) -> None:
        time.sleep(0.3)
        os.fdatasync(fd)

    log = open_log(paths, sync=sync)
    waits = [log.submit([adopt("t").frame()])]
    closing = asyncio.create_task(log.close())
    await asyncio.sleep(0.1)
    closing.cancel()
    with pytest.raises(asyncio.CancelledError):
        await closing
    (((number, offset),),) = await asyncio.wait_for(asyncio.gather(*waits), 5)
    await log.close()
    (path,) = segments(paths.log, CLOSED)
    assert number == 1 and [(at, record.hash) for at, record in read_segment(path)] == [(offset, adopt("t").hash)]
    assert not segments(paths.log, OPEN)


async def test_what_is_no_error_of_the_disk_ends_the_log_in_order_too(tmp_path: Path) -> None:
    paths = run_folder(tmp_path)
    errors = [ValueError("a mistake in the log")]

    def sync(fd: int) -> None:
        if log.num_syncs and errors:
            raise errors.pop()
        os.fdatasync(fd)

    log = open_log(paths, sync=sync)
    await log.append([adopt("t").frame()])
    with pytest.raises(OSError, match="a mistake"):
        await log.append([act(adopt("t"), 0, [1]).frame()])
    with pytest.raises(ValueError, match="a mistake"):
        await log.close()
    assert stored(paths.log) == [adopt("t").hash] and not segments(paths.log, OPEN)
    with pytest.raises(RuntimeError, match="shutdown"):
        log._thread.submit(int)


async def test_the_segment_may_be_closed_between_two_looks_at_it(tmp_path: Path) -> None:
    class Closing(Log):
        """The commit thread is as quick as it can be."""

        @property
        def _segment(self) -> _Segment | None:  # type: ignore[override]
            found, self._held = self._held, None
            return found

        @_segment.setter
        def _segment(self, segment: _Segment | None) -> None:
            self._held = segment

    paths = run_folder(tmp_path)
    log = Closing(paths.log, "n1", segment_bytes=1, segment_age_s=60.0, commit_interval_s=0.0)
    segment = _Segment(paths.log, "n1", paths.log, time.monotonic(), None)
    log._held = segment
    assert not log._is_due()
    segment.end, log._held = 1, segment
    assert log._is_due()
    segment.drop()


async def test_five_hundred_appenders_over_a_real_socket(tmp_path: Path) -> None:
    paths = run_folder(tmp_path)
    log = open_log(paths, commit_interval_s=0.02)
    server = LogServer(log, tmp_path / "log.sock")
    await server.start()
    assert (tmp_path / "log.sock").stat().st_mode & 0o077 == 0
    receipts = []

    async def host(name: int) -> None:
        async with LogClient(tmp_path / "log.sock") as client:
            start = prompt([name])

            async def appender(member: int) -> None:
                client.append(start)
                last = await client.append(adopt(f"{name}.{member}"))
                for step in range(4):
                    last = await client.append(act(adopt(f"{name}.{member}"), step, [member, step]))
                    receipts.append(last)
                assert last.node == "n1" and last.kind == "ACT" and last.step == 3

            await asyncio.gather(*(appender(member) for member in range(250)))
            await client.flush()

    cpu = time.process_time()
    await asyncio.gather(host(0), host(1))
    print(f"client and server: {(time.process_time() - cpu) / 2500 * 1e6:.0f} µs of CPU per record")
    await server.close()
    await log.close()
    assert log.num_syncs < 60
    everything = {
        (read_header(path)[0].number, offset): record
        for path in segments(paths.log, CLOSED)
        for offset, record in read_segment(path)
    }
    assert len(receipts) == 2000
    assert all(everything[(r.segment, r.offset)].hash == r.hash for r in receipts)
    assert len(everything) == 2 + 500 + 2000  # each prompt once


async def test_client_hears_of_errors_and_of_a_dead_owner(tmp_path: Path) -> None:
    paths = run_folder(tmp_path)
    log = open_log(paths)
    server = LogServer(log, tmp_path / "log.sock")
    await server.start()
    client = LogClient(tmp_path / "log.sock")
    await client.connect()
    await client.append(adopt("t"))
    await log.seal()
    await asyncio.to_thread(shutil.rmtree, paths.log)
    with pytest.raises(OSError) as caught:
        await client.append(prompt([1]))
    assert caught.value.errno == errno.ENOENT
    paths.log.mkdir()
    again = await client.append(prompt([1]))  # a prompt that failed isn't taken for stored
    assert stored(paths.log) == [again.hash]
    await server.close()
    await asyncio.wait_for(client.closed, 5)
    with pytest.raises(ConnectionError):
        await client.append(adopt("t"))
    await client.close()
    await log.close()
    with pytest.raises(OSError):
        await LogClient(tmp_path / "log.sock").connect()


async def test_a_failed_sync_is_never_trusted_again(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    paths = run_folder(tmp_path)
    log = open_log(paths)
    records = [act(adopt("t"), i, [i]) for i in range(4)]
    await log.append([records[0].frame()])
    real, failing = os.fdatasync, [True]

    def fdatasync(fd: int) -> None:  # as a disk that lost the write: the kernel reports it once, then calls it clean
        if failing:
            failing.pop()
            raise OSError(errno.EIO, "Input/output error")
        real(fd)

    monkeypatch.setattr(os, "fdatasync", fdatasync)
    waits = [asyncio.ensure_future(log.append([record.frame()])) for record in records[1:3]]
    for wait in waits:
        with pytest.raises(OSError) as caught:
            await wait
        assert caught.value.errno == errno.EIO
    assert [path.name for path in segments(paths.log, CLOSED)] == ["n1-1.seg"]
    assert stored(paths.log) == [records[0].hash]  # whole, closed at the last byte that a sync had confirmed
    assert (await log.append([records[3].frame()]))[0][0] == 2
    await log.close()
    assert stored(paths.log) == [records[0].hash, records[3].hash]
