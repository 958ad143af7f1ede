"""Shards, compaction, the index: the same records, whatever file they lie in, and damage is named."""

from __future__ import annotations

import contextlib
import dataclasses
import json
import os
import random
import shutil
import time
from pathlib import Path
from typing import Any

import h5py
import numpy as np
import pytest
from store_parts import TASK, act, adopt, end, observe, open_log, run_folder, trajectory

from hpcrl.layout import ProcessId, RunPaths
from hpcrl.store import compact as compaction
from hpcrl.store.compact import compact, shards
from hpcrl.store.index import Store
from hpcrl.store.ledger import LedgerWriter, ProgressWriter, UpdateRow
from hpcrl.store.pack import Packer
from hpcrl.store.records import FRAME, LENGTH, REQUIRED, REQUIRED_WITHIN, Kind, Record, checksum, prompt, split
from hpcrl.store.rows import Row
from hpcrl.store.seal import seal, seal_dead_here
from hpcrl.store.segment import CLOSED, OPEN, Header, segments
from hpcrl.store.shard import Shard
from hpcrl.store.verify import verify
from hpcrl.types import Entry, StoreError, Task


async def write(paths: RunPaths, records: list[Record], node: str = "n1", segment_bytes: int = 1 << 20) -> None:
    log = open_log(paths, node, segment_bytes=segment_bytes)
    for record in records:
        await log.append([record.frame()])
    await log.close()


def hashes(store: Store) -> set[str]:
    records = [store.record("", hash) for hash in store.prompts()]
    records += [record for name in store.names() for record in store.records(name)]
    assert all(record.hash == record.true_hash for record in records)
    return {record.hash for record in records}


async def test_a_shard_reads_back_the_same_records(tmp_path: Path) -> None:
    paths = run_folder(tmp_path)
    beside = [
        Record(kind=Kind.REWARD, trajectory="a", step=1, meta={"source": "judge", "value": 0.25, "wall": 5.0}),
        Record(kind=Kind.TRANSITION, trajectory="a", meta={"state": "RUNNING", "wall": 1, "mono": 2, "boot_id": "b"}),
    ]
    a, b = trajectory("a"), trajectory("b")
    mixed = [record for pair in zip(a, b, strict=True) for record in pair] + beside
    await write(paths, mixed, segment_bytes=1500)
    count = len(segments(paths.log, CLOSED))
    assert count >= 3
    report = compact(paths)
    assert (report.shards, report.segments, report.records) == (1, count, len(mixed) - 1)  # the prompt once
    assert [path.name for path in paths.log.iterdir()] == ["n1.last"]
    assert [path.name for path in paths.shards.iterdir()] == ["000001.h5"]
    shard = Shard(shards(paths)[0])
    assert {shard.record(row) for row in range(len(shard))} == set(mixed)
    with h5py.File(shards(paths)[0]) as file:  # plain h5py
        assert all(file["tokens"][name].chunks is None for name in file["tokens"])
        steps, found = file["steps"][:], file["trajectories"][:]
        assert found["id"].tolist() == [b"", b"a", b"b"] and found["status"].tolist() == [
            b"",
            b"COMPLETED",
            b"COMPLETED",
        ]
        first, rows = found["first_row"][1], found["num_rows"][1]
        assert set(steps["trajectory"][first : first + rows]) == {1}  # side by side
        row = next(row for row in steps[first : first + rows] if row["kind"] == Kind.ACT and row["step"] == 1)
        tokens = slice(row["token_start"], row["token_start"] + row["num_tokens"])
        assert file["tokens/ids"][tokens].tolist() == [11, 20]
        sampled = slice(row["gen_start"], row["gen_start"] + row["num_gen"])
        assert file["tokens/sampled"][sampled].tolist() == [True, True]
        text = file["text/meta"][row["meta_start"] : row["meta_start"] + row["meta_bytes"]].tobytes()
        assert json.loads(text)["meta"]["calls"][0]["key"] == "1/0"
        rewards = file["rewards"][:]
        assert sorted(zip(rewards["source"], rewards["value"], rewards["late"], strict=True)) == [
            (b"judge", 0.25, True),
            (b"outcome", 1.0, False),
            (b"outcome", 1.0, False),
        ]
        assert file["transitions"]["state"].tolist() == [b"RUNNING"]
        assert file.attrs["schema"] == 3 and len(file.attrs["config_sha256"]) == 64
        assert file["segments"]["records"].sum() == len(mixed)


async def test_a_flipped_byte_anywhere_in_a_shard_is_found_and_never_returned(tmp_path: Path) -> None:
    paths = run_folder(tmp_path)
    await write(paths, trajectory("a", steps=6) + trajectory("b", steps=2))
    compact(paths)
    (path,) = shards(paths)
    good = path.read_bytes()
    whole = Shard(path)
    expected = {row: whole.record(row).payload for row in range(len(whole))}
    whole.check()
    chance = random.Random(1)
    read = 0
    for _ in range(2000):
        at, bit = chance.randrange(len(good)), 1 << chance.randrange(8)
        path.write_bytes(good[:at] + bytes((good[at] ^ bit,)) + good[at + 1 :])
        with pytest.raises(StoreError, match=r"000001\.h5: (damaged|schema)"):
            Shard(path).check()
        with contextlib.suppress(StoreError):
            shard = Shard(path)
            for row, payload in expected.items():
                with contextlib.suppress(StoreError):
                    assert shard.record(row).payload == payload
                    read += 1
    assert read > 1000 * len(expected), "what is not damaged can still be read"
    path.write_bytes(good[: len(good) // 2])
    assert verify(paths).damaged == 1
    path.write_bytes(good)
    assert verify(paths).ok


async def test_what_is_lost_of_a_shard_whose_table_is_damaged_is_missed_at_once(tmp_path: Path) -> None:
    """A table and a prompt of the same shard: the first is found when scores are asked for, the second then."""
    paths = run_folder(tmp_path)
    await write(paths, trajectory("a") + trajectory("b", prompt_ids=(7, 8)))
    compact(paths)
    (path,) = shards(paths)
    with Store(paths) as store:
        assert set(store.rewards()["trajectory"]) == {"a", "b"}
        (lost,) = [hash for hash in store.prompts() if store.record("", hash).ids.tolist() == [7, 8]]
        found = Shard(path)
        row = store.rows("")[lost].at
        at = found.directory["datasets"]["tokens/ids"][0] + 4 * int(found.whole("steps")["token_start"][row])
        rewards = found.directory["datasets"]["rewards"][0]
    with Store(paths) as store:
        data = bytearray(path.read_bytes())
        data[at] ^= 1
        data[rewards] ^= 1
        path.write_bytes(data)
        assert set(store.rewards()["trajectory"]) == {"a", "b"}  # from the records themselves
        assert list(store.damaged) == [path.name]
        assert store.trajectory("a").ids.tolist()[:3] == [1, 2, 3]
        assert lost not in store.prompts(), "else it is waited for, as for a file that this node can't see yet"
        with pytest.raises(StoreError):
            store.trajectory("b")


@pytest.mark.parametrize("where", ["segment", "shard", "open"])
async def test_the_store_reads_chains(tmp_path: Path, where: str) -> None:
    paths = run_folder(tmp_path)
    start = prompt([1, 2, 3])
    first = adopt("t")
    turn0 = act(first, 0, [10, 11], root=start.hash, version=4)
    seen0 = observe(turn0, [12])
    turn1 = act(seen0, 1, [13, 14, 15], version=5)
    late = observe(turn1, [99])  # the old owner wrote on after the next attempt was granted from turn1's parent
    again = adopt("t", attempt=2, parent=seen0.hash, step=0)
    turn1b = act(again, 1, [16], version=6)
    last = end(turn1b, reward=0.5)
    await write(paths, [start, first, turn0, seen0, turn1], "n1")
    log = open_log(paths, "n2")
    await log.append([record.frame() for record in (again, turn1b, last)])
    if where != "open":
        await log.close()
    await write(paths, [late], "n1")
    if where == "shard":
        compact(paths)
    with Store(paths, open_segments=where == "open") as store:
        assert store.head("t") == last.hash and store.head("u") is None
        assert [record.hash for record in store.chain("t", last.hash)] == [
            record.hash for record in (first, turn0, seen0, again, turn1b, last)
        ]
        sequence = store.sequence("t", last.hash, 0.5)
        assert sequence.ids.tolist() == [1, 2, 3, 10, 11, 12, 16] and sequence.ids.dtype == np.int32
        assert sequence.steps.tolist() == [-1, -1, -1, 0, 0, 0, 1]
        assert sequence.sampled.tolist() == [False] * 3 + [True, True, False, True]
        assert sequence.versions.tolist() == [-1, -1, -1, 4, 4, -1, 6]
        assert np.allclose(sequence.logprobs, [0, 0, 0, -0.1, -0.2, 0, -0.1]) and sequence.reward == 0.5
        assert store.sequence("t", turn1.hash, 0).ids.tolist() == [1, 2, 3, 10, 11, 12, 13, 14, 15]
        (name,) = store.names()
        info = store.info(name)
        assert info is not None
        assert (info.status, info.attempt, info.num_steps, info.num_sampled) == ("COMPLETED", 2, 2, 3)
        assert (info.num_orphans, info.rewards, info.group, info.phase) == (2, {"outcome": 0.5}, "g", "rl")
        assert info.task.startswith("find-") and info.task == Task(**TASK).id
        assert len(store.records("t")) == 8
        receipts = store.receipts("t")
        assert [receipt.kind for receipt in receipts] == ["ADOPT", "ACT", "OBSERVE", "ADOPT", "ACT", "END"]
        assert [receipt.node for receipt in receipts] == ["n1"] * 3 + ["n2"] * 3
        assert late.hash in store.rows("t") and "0" * 32 not in store.rows("t")
        assert verify(paths).ok and verify(paths).orphans == 2
    if where == "open":
        await log.close()


async def test_a_new_root_begins_a_new_context(tmp_path: Path) -> None:
    paths = run_folder(tmp_path)
    before, after = prompt([1, 2]), prompt([7])
    first = adopt("t")
    turn0 = act(first, 0, [3], root=before.hash)
    seen0 = observe(turn0, [4])
    turn1 = act(seen0, 1, [5], root=after.hash)
    seen1 = observe(turn1, [6])
    await write(paths, [before, first, turn0, seen0, after, turn1, seen1])
    with Store(paths) as store:
        assert store.sequence("t", seen0.hash, 0).ids.tolist() == [1, 2, 3, 4]
        sequence = store.sequence("t", seen1.hash, 0)
        assert sequence.ids.tolist() == [7, 5, 6] and sequence.steps.tolist() == [-1, 1, 1]
        with pytest.raises(StoreError, match="no root"):
            store.sequence("t", first.hash, 0)


async def test_missing_and_incomplete_records_are_named(tmp_path: Path) -> None:
    paths = run_folder(tmp_path)
    records = trajectory("t")
    bare = Record(kind=Kind.REWARD, trajectory="t", meta={"source": "judge"})
    await write(paths, [*records[1:3], *records[4:], bare])
    with Store(paths) as store:
        with pytest.raises(StoreError, match=f"no record {records[3].hash}, the parent of {records[4].hash}"):
            store.chain("t", records[-1].hash)
        assert records[-1].hash in store.rows("t") and not store.complete("t", records[-1].hash)
    report = verify(paths, deep=True)
    assert (report.missing_parents, report.lacking_fields, report.ok) == (
        2,
        2,
        False,
    )  # OBSERVE and PROMPT; value, wall
    assert any("no field value" in text for text in report.problems)


async def test_an_append_that_failed_and_its_successor(tmp_path: Path) -> None:
    """A refused append may have reached the disk; what was appended in its place is the chain."""
    paths = run_folder(tmp_path)
    start, first = prompt([1]), adopt("t")
    refused, kept = act(first, 0, [8], root=start.hash), act(first, 0, [9], root=start.hash)
    tail = observe(kept, [2])
    await write(paths, [start, first, kept, tail, refused])
    with Store(paths) as store:
        assert store.head("t") == tail.hash
        info = store.info("t")
        assert info is not None and info.num_orphans == 1


@pytest.mark.parametrize("lost", ["PROMPT", "ADOPT", "ACT", "OBSERVE"])
async def test_a_chain_with_a_hole_goes_on_before_the_hole(tmp_path: Path, lost: str) -> None:
    """One batch of the log failed, later ones didn't: what comes after the hole can't be continued from."""
    paths = run_folder(tmp_path)
    start, *chain = trajectory("t")
    first = {record.kind.name: record for record in reversed([start, *chain])}[lost]
    await write(paths, [record for record in (start, *chain) if record is not first])
    expected = {"PROMPT": chain[0].hash, "ADOPT": None, "ACT": chain[0].hash, "OBSERVE": chain[1].hash}[lost]
    with Store(paths) as store:
        assert store.head("t") == expected
        assert store.ended("t", expected or "") is None
    # The next attempt goes on from there, and its chain is the trajectory's.
    again = adopt("t", attempt=2, parent=expected or "")
    await write(paths, [again], "n2")
    with Store(paths) as store:
        assert store.head("t") == again.hash and store.complete("t", again.hash)


async def test_refresh_takes_in_only_what_is_new_and_follows_compaction(tmp_path: Path) -> None:
    paths = run_folder(tmp_path)
    await write(paths, trajectory("a"))
    store = Store(paths)
    store.refresh()
    log = open_log(paths)
    b = trajectory("b")
    await log.append([record.frame() for record in b])
    store.refresh()
    assert b[-1].hash not in store.rows("b")  # an open segment
    await log.close()
    store.refresh()
    assert b[-1].hash in store.rows("b") and len(store) == 11
    compact(paths)  # the segments go while the store still points at them, one of them held open
    assert [record.hash for record in store.chain("b", b[-1].hash)] == [record.hash for record in b[1:]]
    store.refresh()
    assert len(store) == 11 and len(store.records("a")) == 5 and hashes(store) == {r.hash for r in trajectory("a") + b}
    began = time.perf_counter()
    for _ in range(100):
        store.refresh()
    assert (time.perf_counter() - began) / 100 < 0.01
    store.close()
    follower = Store(paths, open_segments=True)
    log = open_log(paths)
    for i, record in enumerate(trajectory("c")):
        await log.append([record.frame()])
        follower.refresh()
        assert len(follower) == 11 + i  # the prompt is known
    await log.close()
    follower.refresh()
    assert len(follower) == 16
    follower.close()


async def test_left_over_segments_are_never_read_twice(tmp_path: Path) -> None:
    paths = run_folder(tmp_path)
    await write(paths, trajectory("a"))
    (path,) = segments(paths.log, CLOSED)
    shutil.copy(path, tmp_path / path.name)
    compact(paths)
    shutil.copy(tmp_path / path.name, path)  # as if the crash had come between rename and unlink
    with Store(paths) as store:
        assert len(store) == 6
    report = compact(paths)
    assert (report.left_over, report.shards, report.records) == (1, 0, 0)
    assert not segments(paths.log, CLOSED) and len(shards(paths)) == 1


async def test_one_compactor_at_a_time_and_dead_claims_go(tmp_path: Path) -> None:
    paths = run_folder(tmp_path)
    await write(paths, trajectory("a"))
    claim = paths.shards / "000001.claim"
    claim.write_text(json.dumps({"pid": os.getpid(), "start": ProcessId.me().start, "boot": ProcessId.me().boot}))
    assert "000001.claim" in compact(paths).refused and not shards(paths)
    claim.write_text(json.dumps({"pid": os.getpid(), "start": 1, "boot": ProcessId.me().boot}))  # a pid that came back
    (paths.shards / ".000001.h5.7.tmp").write_bytes(b"half")
    assert compact(paths).shards == 1
    assert [path.name for path in paths.shards.iterdir()] == ["000002.h5"]
    await write(paths, trajectory("b"))
    claim = paths.shards / "000007.claim"
    claim.write_text(json.dumps({"pid": 1, "start": 1, "boot": "another machine"}))
    assert "can't be seen from here" in compact(paths).refused
    os.utime(claim, (time.time() - compaction.STALE_S - 9,) * 2)
    assert compact(paths).shards == 1 and [path.name for path in shards(paths)][-1] == "000008.h5"


async def test_a_damaged_segment_stays_and_the_rest_is_compacted(tmp_path: Path) -> None:
    paths = run_folder(tmp_path)
    await write(paths, trajectory("a"))
    await write(paths, trajectory("b"))
    path = segments(paths.log, CLOSED)[0]
    data = bytearray(path.read_bytes())
    data[len(data) // 2] ^= 1
    path.write_bytes(data)
    report = compact(paths)
    assert (report.damaged, report.shards, report.records) == ((str(path),), 1, 6)
    with Store(paths) as store:
        assert path.name in store.damaged and "damaged at byte" in store.damaged[path.name]
        assert store.complete("b", trajectory("b")[-1].hash) and not store.complete("a", trajectory("a")[-1].hash)
    assert verify(paths).damaged >= 1 and not verify(paths).ok


ODD_HEADERS = {
    "no JSON": b'{"arrays":{}',
    "no object": b"[]",
    "no meta": b'{"arrays":{},"attempt":1,"kind":2,"meta":[],"parent":"","step":1,"trajectory":"a"}',
    "no number": b'{"arrays":{},"attempt":"1","kind":2,"meta":{"root":5},"parent":"","step":1,"trajectory":"a"}',
    "no name": b'{"arrays":{},"attempt":1,"kind":2,"meta":{"root":5},"parent":"","step":1,"trajectory":[]}',
    "no text": b'{"arrays":{},"attempt":1,"kind":2,"meta":{"x":"\xff"},"parent":"","step":1,"trajectory":"a"}',
    "too large": b'{"arrays":{},"attempt":99999999999,"kind":2,"meta":{},"parent":"","step":1,"trajectory":"a"}',
    "a wall too large": b'{"arrays":{},"attempt":1,"kind":2,"meta":{"wall":1%b},"parent":"","step":1,"trajectory":"a"}'
    % (b"0" * 400),
    "another kind": b'{"arrays":{},"attempt":1,"kind":3,"meta":{},"parent":"","step":1,"trajectory":"a"}',
}


@pytest.mark.parametrize("odd", [*ODD_HEADERS, "an unknown kind", "no length"])
async def test_what_is_under_a_right_checksum_and_no_record_holds_nothing_else_up(tmp_path: Path, odd: str) -> None:
    paths = run_folder(tmp_path)
    kind = 77 if odd == "an unknown kind" else 2
    text = ODD_HEADERS.get(odd, ODD_HEADERS["another kind"].replace(b'"kind":3', b'"kind":77'))
    payload = b"ab" if odd == "no length" else LENGTH.pack(len(text)) + text
    digest = bytes(16)
    frame = FRAME.pack(len(payload), kind, checksum(kind, digest, payload), digest) + payload
    log = open_log(paths)
    await log.append([adopt("a").frame(), frame])
    await log.close()
    await write(paths, trajectory("b"))
    report = compact(paths)
    assert (report.damaged, report.shards, report.records) == ((str(segments(paths.log, CLOSED)[0]),), 1, 6)
    with Store(paths) as store:
        assert store.complete("b", trajectory("b")[-1].hash)


def test_a_row_says_the_same_of_a_record_in_a_segment_and_in_a_shard() -> None:
    """Whichever of its columns are there."""
    full = act(adopt("t"), 0, [5, 6, 7])
    mixed = dataclasses.replace(full, versions=np.array([9, 3, 4], np.int32), sampled=np.array([False, True, True]))
    empty = np.empty(0, np.int32)
    for record, expected in (
        (full, (4, 4, 3)),
        (mixed, (3, 4, 2)),
        (dataclasses.replace(full, versions=empty), (-1, -1, 3)),
        (dataclasses.replace(mixed, versions=empty), (-1, -1, 2)),
        (dataclasses.replace(full, sampled=np.empty(0, np.bool_)), (-1, -1, 0)),
        (dataclasses.replace(full, sampled=np.zeros(3, np.bool_)), (-1, -1, 0)),
        (adopt("t"), (-1, -1, 0)),
    ):
        row = Row.of(record, node="n", segment=1, offset=0, file="f")
        packer = Packer()
        packer.add(0, 0, bytes.fromhex(record.hash), split(record.kind, record.payload))
        step = packer.steps(packer.tables(["n"])["trajectories"])[0]
        assert (row.min_version, row.max_version, row.num_sampled) == expected
        assert (step["min_version"], step["max_version"], step["num_sampled"]) == expected


async def test_nothing_is_asked_of_the_disk_where_there_is_nothing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A length of 0 would mean: all of the file from there on."""
    paths = run_folder(tmp_path)
    records = trajectory("t")
    await write(paths, records)
    compact(paths)
    (path,) = shards(paths)
    with Shard(path) as shard:
        asked: list[int] = []
        real = os.posix_fadvise
        monkeypatch.setattr(
            os, "posix_fadvise", lambda fd, at, size, how: (asked.append(size), real(fd, at, size, how))
        )
        observed = next(row for row in shard.rows(shard.ids.index("t")) if row.kind is Kind.OBSERVE)
        step = shard._one(observed.at)
        shard.ahead(step)
        assert asked == [4], "its one token; it has no logprobs"
        assert shard.record(observed.at) == records[3]
        assert shard.tokens(step)["versions"].tolist() == [-1]


def test_open_segments_of_the_dead_are_closed(tmp_path: Path) -> None:
    paths = run_folder(tmp_path)
    records = trajectory("t")
    frames = b"".join(record.frame() for record in records)
    me = ProcessId.me()
    for node, owner in (("n1", ProcessId(me.pid, 1, me.boot)), ("n2", me), ("n-3", ProcessId(1, 1, "elsewhere"))):
        (paths.log / f"{node}-1{OPEN}").write_bytes(Header(node, 1, node, owner).encode() + frames + b"torn")
    assert [path.name for path in seal_dead_here(paths)] == ["n1-1.seg"]
    with pytest.raises(StoreError, match="n2, lives"):
        seal(paths, gone=["n-3"])
    assert [path.name for path in segments(paths.log, OPEN)] == ["n-3-1.open", "n2-1.open"]
    segments(paths.log, OPEN)[1].unlink()
    assert [path.name for path in seal(paths, gone=["n-3"])] == ["n-3-1.seg"]
    assert compact(paths).records == len(records)


async def test_verify_checks_ledger_and_progress(tmp_path: Path) -> None:
    paths = run_folder(tmp_path)
    a = trajectory("a")
    await write(paths, a)
    entry = Entry(
        trajectory="a",
        attempt=1,
        head=a[-1].hash,
        group="g",
        phase="rl",
        reward=1.0,
        num_tokens=9,
        num_sampled=4,
        num_steps=2,
        min_version=4,
        group_size=1,
    )
    LedgerWriter(paths).append([entry])
    progress = ProgressWriter(paths, None)
    progress.append(UpdateRow(update=1, phase="rl", phase_update=1, trajectories=("a",)))
    report = verify(paths)
    assert report.ok and (report.ledger_entries, report.updates, report.records) == (1, 1, 6)
    with Store(paths) as store:
        frame = store.query()
    assert frame.loc[0, "reward"] == frame.loc[0, "success"] == 1.0 and frame.loc[0, "num_sampled"] == 4
    progress.append(UpdateRow(update=2, phase="rl", phase_update=2, trajectories=("a",)))
    segments(paths.log, CLOSED)[0].unlink()
    report = verify(paths)
    assert (report.trained_twice, report.ledger_heads_missing, report.ok) == (1, 1, False)
    assert "a: trained twice" in report.problems and not report.trained_unledgered
    for path in paths.ledger.iterdir():
        path.unlink()
    report = verify(paths)
    assert report.trained_unledgered == 2 and "update 1: trained a, which no ledger names" in report.problems


async def test_the_format_page_names_every_field_and_its_example_runs(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    page = (Path(__file__).parents[1] / "docs" / "store-format.md").read_text()
    for kind, keys in REQUIRED.items():
        section = page.split(f"### {kind.name} ({int(kind)})")[1].split("\n##")[0]
        within = [key for (of, _), names in REQUIRED_WITHIN.items() if of is kind for key in names]
        assert [key for key in keys if f"`{key}`" not in section] == []
        assert [key for key in within if key not in section] == []
    paths = run_folder(tmp_path / "runs" / "demo")
    await write(paths, trajectory("a"))
    compact(paths)
    shard_part = page.split("## Shards")[1].split("\n## ")[0]
    for group, columns in h5py.File(shards(paths)[0]).items():
        names = columns if isinstance(columns, h5py.Group) else columns.dtype.names
        assert f"`{group}" in shard_part and [name for name in names if name not in shard_part] == []
    monkeypatch.chdir(tmp_path)
    exec(page.split("```python\n")[1].split("```")[0], {})
    assert capsys.readouterr().out.startswith("a 0 -0.3")


async def test_an_ended_trajectory_that_lost_a_record_is_not_read_as_a_shorter_one(tmp_path: Path) -> None:
    paths = run_folder(tmp_path)
    records = trajectory("a", steps=3)
    lost = [record for record in records if record.kind is Kind.ACT][1]
    await write(paths, [record for record in records if record is not lost])
    compact(paths)
    with Store(paths) as store:
        for read in (store.trajectory, lambda name: store.batch([name])):
            with pytest.raises(StoreError, match="records of 'a', which has ended, are lost"):
                read("a")
        assert len(store.records("a")) == len(records) - 2  # all but the prompt, which is nobody's, and the lost one


@pytest.mark.parametrize(
    ("kind", "odd"),
    [
        (Kind.ADOPT, {"task": {"environment": "e", "payload": {}, "kind": "k", "of_tomorrow": 1}}),
        (Kind.ADOPT, {"task": {"environment": "e"}}),
        (Kind.ADOPT, {"task": "t"}),
        (Kind.END, {"num_steps": 2**70}),
        (Kind.END, {"num_steps": "x", "num_tokens": None}),
        (Kind.END, {"rewards": [1]}),
        (Kind.END, {"fault": "boom"}),
    ],
)
async def test_what_makes_no_sense_in_one_record_keeps_no_other_from_being_read(
    tmp_path: Path, kind: Kind, odd: dict[str, Any]
) -> None:
    paths = run_folder(tmp_path)
    strange = []
    for record in trajectory("odd"):
        meta = {**record.meta, **odd} if record.kind is kind else record.meta
        strange.append(dataclasses.replace(record, meta=meta))
    await write(paths, [*strange, *trajectory("a")])
    for _ in range(2):  # in a segment, in a shard
        with Store(paths) as store:
            table = store.query().set_index("trajectory")
            assert table.loc["a", "status"] == "COMPLETED" and set(table.index) == {"a", "odd"}
            assert store.trajectory("a").reward == 1.0
        assert not compact(paths).damaged


@pytest.mark.parametrize("size", [0, 1, 2, 3, 15, 1 << 31])
async def test_a_user_block_of_an_impossible_size_is_damage(tmp_path: Path, size: int) -> None:
    paths = run_folder(tmp_path)
    await write(paths, trajectory("a"))
    compact(paths)
    (path,) = shards(paths)
    data = bytearray(path.read_bytes())
    data[8:12] = size.to_bytes(4, "little")
    path.write_bytes(data)
    with pytest.raises(StoreError, match=r"000001\.h5: damaged"):
        Shard(path)
