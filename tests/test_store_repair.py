"""`store repair`: all that is intact comes back, what is lost is named, and no crash in between does harm."""

from __future__ import annotations

import asyncio
import contextlib
import errno
import json
import os
import random
import resource
import shutil
from collections import Counter
from collections.abc import Callable
from pathlib import Path

import pytest
from store_parts import killed_everywhere, open_log, run_folder, trajectory

from hpcrl.layout import ProcessId, RunPaths
from hpcrl.store.compact import compact, shards
from hpcrl.store.compact import main as compact_main
from hpcrl.store.index import Store
from hpcrl.store.records import Kind, Record
from hpcrl.store.repair import _check_shard, _damage, repair
from hpcrl.store.seal import seal
from hpcrl.store.segment import CLOSED, OPEN, Header, segments
from hpcrl.store.shard import Shard
from hpcrl.store.verify import verify
from hpcrl.types import StoreError


async def write(paths: RunPaths, *names: str, steps: int = 4) -> list[Record]:
    log = open_log(paths)
    records = [record for name in names for record in trajectory(name, steps=steps, whole=b"unseen" * 9)]
    await log.append([record.frame() for record in records])
    await log.close()
    return records


def held(paths: RunPaths) -> dict[str, Record]:
    """Every record that can be read, by hash."""
    with Store(paths) as store:
        found = [store.record("", hash) for hash in store.rows("")]
        found += [record for name in store.names() for record in store.records(name)]
        assert not store.damaged
    assert all(record.hash == record.true_hash for record in found)
    return {record.hash: record for record in found}


def label(record: Record) -> tuple[object, ...]:
    return record.trajectory, record.attempt, record.step, record.kind.name, record.hash


def flip(path: Path, at: int, count: int = 1) -> None:
    data = bytearray(path.read_bytes())
    for byte in range(at, min(at + count, len(data))):
        data[byte] ^= 0x55
    path.write_bytes(data)


async def one_file(paths: RunPaths, where: str, *names: str) -> tuple[dict[str, Record], Path]:
    """Records by hash, and the shard or segment that holds them."""
    records = {record.hash: record for record in await write(paths, *names)}
    if where == "shard":
        compact(paths)
    (path,) = shards(paths) if where == "shard" else segments(paths.log, CLOSED)
    return records, path


@pytest.mark.parametrize("where", ["shard", "segment"])
async def test_a_damaged_byte_costs_the_record_it_lies_in_and_that_one_is_named(tmp_path: Path, where: str) -> None:
    source = run_folder(tmp_path / "source")
    records, original = await one_file(source, where, "a", "bé")
    size = original.stat().st_size
    chance = random.Random(1)
    losses: Counter[int] = Counter()
    for at in [0, 9, 13, *(chance.randrange(size) for _ in range(100))]:
        shutil.copytree(source.root, tmp_path / "run")
        paths = RunPaths(tmp_path / "run")
        path = paths.root / original.relative_to(source.root)
        flip(path, at)
        (done,) = repair(paths)
        kept = held(paths)
        assert set(kept) <= set(records) and all(kept[hash] == records[hash] for hash in kept), at
        missing = set(records) - set(kept)
        losses[len(missing)] += 1
        assert len(missing) <= 1, at
        # Of a lost one everything is known, unless it is that which the damage hit.
        assert len(done.lost) == len(missing), at
        for lost in done.lost:
            (record,) = (records[hash] for hash in missing)
            told = (lost.trajectory, lost.attempt, lost.step, lost.kind, lost.hash)
            same = [mine == true for mine, true in zip(told, label(record), strict=True)]
            assert sum(same) >= 4 or (not lost.sure and lost.hash == record.hash), (at, told, label(record))
            assert not lost.sure or all(same), (at, told)
        assert done.rescued == len(kept) and Path(done.moved_to).is_file() and not path.exists()
        written = json.loads(Path(f"{done.moved_to}.lost.json").read_text())["lost"]
        assert [row["hash"] for row in written] == [lost.hash for lost in done.lost]
        assert repair(paths) == []
        shutil.rmtree(paths.root)
    assert losses[1] > 20 and losses[0] > 3, losses


@pytest.mark.parametrize("where", ["shard", "segment"])
async def test_larger_damage(tmp_path: Path, where: str) -> None:
    """A run of bytes, a file that is cut short, two files at once."""
    source = run_folder(tmp_path / "source")
    records, original = await one_file(source, where, "a", "b", "c")
    size = original.stat().st_size
    chance = random.Random(2)
    lost_most = 0
    for round in range(24):
        shutil.copytree(source.root, tmp_path / "run")
        paths = RunPaths(tmp_path / "run")
        path = paths.root / original.relative_to(source.root)
        if round % 2:
            flip(path, chance.randrange(size // 2), chance.randrange(size // 8))
        else:
            path.write_bytes(path.read_bytes()[: chance.randrange(size // 2, size)])
        done = repair(paths)
        kept = held(paths)
        assert all(kept[hash] == records[hash] for hash in kept)
        lost_most = max(lost_most, len(records) - len(kept))
        if done and done[0].moved_to:  # else the file's end was that of a frame, or nothing could be made out
            assert done[0].rescued == len(kept)
            assert where == "segment" or len(done[0].lost) == len(records) - len(kept)
        shutil.rmtree(paths.root)
    assert lost_most > 3


async def test_only_the_directory_is_damaged(tmp_path: Path) -> None:
    paths = run_folder(tmp_path)
    records = await write(paths, "a", "b")
    compact(paths)
    (path,) = shards(paths)
    flip(path, 0, 4096)  # all of the user block
    with pytest.raises(StoreError, match="no directory"):
        Shard(path)
    with pytest.raises(StoreError):
        compact(paths)  # which segments it was made from can't be known
    (done,) = repair(paths)
    assert done.lost == () and done.rescued == len({record.hash for record in records})
    assert done.moved_to == str(paths.damaged_shards / "000001.h5") and done.shard == str(paths.shards / "000002.h5")
    assert set(held(paths)) == {record.hash for record in records}
    assert verify(paths, deep=True).ok
    assert Shard(Path(done.shard)).sources["node"].tolist() == [b"n1"]


async def test_what_another_file_has_is_not_lost_and_not_written_twice(tmp_path: Path) -> None:
    paths = run_folder(tmp_path)
    records = await write(paths, "a", "b")
    (segment,) = segments(paths.log, CLOSED)
    saved = segment.read_bytes()
    compact(paths)
    segment.write_bytes(saved)  # as if the crash had come between rename and unlink
    (path,) = shards(paths)
    shard = Shard(path)
    offset = shard.directory["datasets"]["tokens/logprobs"][0]
    flip(path, offset, 400)
    (done,) = repair(paths)
    assert done.lost == () and done.rescued == 0 and done.shard == "" and done.elsewhere > 0
    assert compact(paths).segments == 1
    assert set(held(paths)) == {record.hash for record in records}
    assert [found.name for found in shards(paths)] == ["000002.h5"], "a number doesn't come back"


def left_open(paths: RunPaths, records: list[Record], at: int | None = None) -> Path:
    """A dead owner's open segment with a torn tail; `at`: the byte that is flipped, counted from the second frame (from
    the file's start where it is negative)."""
    me = ProcessId.me()
    frames = [record.frame() for record in records]
    head = Header("n1", 1, "u", ProcessId(me.pid, 1, me.boot)).encode()
    path = paths.log / f"n1-1{OPEN}"
    path.write_bytes(head + b"".join(frames) + b"torn")
    if at is not None:
        flip(path, -at if at < 0 else len(head) + len(frames[0]) + at)
    return path


CLOSERS: dict[str, Callable[[RunPaths], object]] = {
    "the node's next owner": open_log,
    "control's compaction": lambda paths: compact_main(str(paths.root)),
    "store seal": seal,
    "store seal --gone": lambda paths: seal(paths, ["n1"]),
    "store repair": lambda paths: None,
}


@pytest.mark.parametrize("closer", CLOSERS)
async def test_an_open_segment_of_a_dead_owner_is_cut_where_nothing_whole_lies_behind(
    tmp_path: Path, closer: str
) -> None:
    whole = run_folder(tmp_path / "whole")
    records = trajectory("t")
    left_open(whole, records)
    CLOSERS[closer](whole)
    assert repair(whole) == []  # a torn tail is no damage
    assert set(held(whole)) == {record.hash for record in records} and not segments(whole.log, OPEN)
    for at in (60, 0, 5):  # in a frame's payload, in its length, in its checksum
        paths = run_folder(tmp_path / f"damaged-{at}")
        left_open(paths, records, at)
        CLOSERS[closer](paths)
        (done,) = repair(paths)
        lost = records[1:2] if at == 60 else []
        assert [(one.kind, one.trajectory, one.hash) for one in done.lost] == [
            (record.kind.name, "t", record.hash) for record in lost
        ]
        assert set(held(paths)) == {record.hash for record in records if record not in lost}
        assert not segments(paths.log, OPEN) and repair(paths) == []


@pytest.mark.parametrize("at", [-20, -3], ids=["JSON", "magic"])
@pytest.mark.parametrize("closer", CLOSERS)
async def test_no_record_goes_with_a_damaged_header(tmp_path: Path, closer: str, at: int) -> None:
    """Who owns the file can't be known: its node's next owner closes it, or who says that the last one has ended."""
    paths = run_folder(tmp_path)
    records = trajectory("t")
    path = left_open(paths, records, at)
    if closer == "store seal":
        with pytest.raises(StoreError, match=r"header is damaged.*--gone n1"):
            seal(paths)
    else:
        CLOSERS[closer](paths)
    if closer not in ("the node's next owner", "store seal --gone"):
        (left,) = repair(paths)
        assert left.file == str(path) and "--gone n1" in left.damage and not left.moved_to and path.exists()
        seal(paths, ["n1"])
    assert [path.name for path in segments(paths.log, CLOSED)] == ["n1-1.seg"] and not segments(paths.log, OPEN)
    with Store(paths) as store:
        assert "n1-1.seg" in store.damaged and store.complete("t", records[-1].hash)
    (done,) = repair(paths)
    assert done.rescued == len(records) and done.lost == ()
    assert set(held(paths)) == {record.hash for record in records} and verify(paths, deep=True).ok


async def test_what_the_disk_can_not_read_is_damage(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    paths = run_folder(tmp_path)
    records, path = await one_file(paths, "shard", "a", "b")
    assert verify(paths, deep=True).ok
    with Shard(path) as shard:
        bad = shard.directory["datasets"]["tokens/logprobs"][0]
    inode, pread = path.stat().st_ino, os.pread

    def with_a_bad_block(fd: int, size: int, offset: int) -> bytes:
        if os.fstat(fd).st_ino == inode and offset <= bad < offset + size:
            raise OSError(errno.EIO, "Input/output error")
        return pread(fd, size, offset)

    monkeypatch.setattr(os, "pread", with_a_bad_block)
    report = verify(paths, deep=True)
    assert report.damaged > 0 and "Input/output error" in report.problems[0]
    (done,) = repair(paths)
    assert "Input/output error" in done.damage and Path(done.moved_to).exists()
    assert set(held(paths)) == set(records), "what could be read after all"


def test_more_shards_than_may_be_open(tmp_path: Path) -> None:
    paths = run_folder(tmp_path)
    _, path = asyncio.run(one_file(paths, "shard", "a"))
    for number in range(2, 60):
        shutil.copy(path, paths.shards / f"{number:06d}.h5")
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    with contextlib.ExitStack() as held:
        held.callback(resource.setrlimit, resource.RLIMIT_NOFILE, (soft, hard))
        highest = max(int(fd.name) for fd in Path("/proc/self/fd").iterdir())  # a whole run of tests has many open
        resource.setrlimit(resource.RLIMIT_NOFILE, (highest + 100, hard))
        files = []
        with contextlib.suppress(OSError):
            while True:
                files.append(held.enter_context(path.open("rb")))
        assert len(files) >= 20
        for file in files[-20:]:
            file.close()
        assert repair(paths) == []
        with contextlib.suppress(OSError):
            while True:
                held.enter_context(path.open("rb"))
        with pytest.raises(OSError, match="Too many open files"):
            _damage(path, _check_shard)
    assert len(shards(paths)) == 59 and not paths.damaged_shards.exists()


async def test_what_can_not_be_made_out_stays(tmp_path: Path) -> None:
    paths = run_folder(tmp_path)
    (paths.shards / "000001.h5").write_bytes(b"no shard at all" * 100)
    (done,) = repair(paths)
    assert done.moved_to == "" and (paths.shards / "000001.h5").exists()


WORK = "from hpcrl.store.repair import repair; repair(paths)"


async def test_killed_anywhere(tmp_path: Path) -> None:
    source = run_folder(tmp_path / "source")
    records = await write(source, "a")
    compact(source)
    records += await write(source, "b")
    (path,), (segment,) = shards(source), segments(source.log, CLOSED)
    act = next(record for record in records if record.kind is Kind.ACT and record.trajectory == "a")
    shard = Shard(path)
    row = shard.whole("steps")["hash"].tolist().index(act.hash.encode())
    flip(path, shard.directory["datasets"]["tokens/ids"][0] + 4 * int(shard.whole("steps")["token_start"][row]))
    flip(segment, segment.stat().st_size - 40)  # in b's END
    expected = {record.hash for record in records} - {act.hash, records[-1].hash}
    copies = await killed_everywhere(
        source.root, tmp_path / "copies", "from hpcrl.store.repair import repair; repair(paths)"
    )
    stages: Counter[tuple[str, ...]] = Counter()
    for paths in copies:
        files = (
            path.relative_to(paths.root) for path in paths.root.rglob("*") if path.suffix in (".h5", ".seg", ".json")
        )
        stages[tuple(sorted(map(str, files)))] += 1
        compact(paths)  # between a crash and the next repair
        repair(paths)
        assert set(held(paths)) == expected
        assert sorted(path.name for path in paths.damaged_shards.glob("*.h5")) == ["000001.h5"]
        assert [path.name for path in paths.damaged_log.glob("*.seg")] == [segment.name]
        assert all(path.suffix == ".h5" for path in paths.shards.iterdir() if path.is_file())
        rows = [hash for path in shards(paths) for hash in Shard(path).whole("steps")["hash"].tolist()]
        assert len(rows) == len(set(rows))
    assert len(stages) >= 6, stages  # shard: before, new one there, list there, moved; segment: the same
