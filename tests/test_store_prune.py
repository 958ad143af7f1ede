"""`store prune`: what goes, what stays because something needs it, and that nothing is cut in two."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from store_parts import act, adopt, end, killed_everywhere, observe, open_log, run_folder, trajectory

from hpcrl.layout import RunPaths
from hpcrl.store import prune as pruning
from hpcrl.store.compact import compact, shards
from hpcrl.store.index import Store
from hpcrl.store.ledger import LedgerWriter, ProgressWriter, UpdateRow
from hpcrl.store.prune import Pruned, prune, size
from hpcrl.store.records import Record, prompt
from hpcrl.store.verify import verify
from hpcrl.types import ConfigError, Entry, StoreError

FAT = 400  # steps, so that what is carried of a shard is less than half of it


async def shard(paths: RunPaths, *records: Record) -> None:
    log = open_log(paths)
    await log.append([record.frame() for record in records])
    await log.close()
    assert compact(paths).shards == 1


def of(records: list[Record], **changes: Any) -> list[Record]:
    """The same trajectory with other fields in ADOPT and END."""
    made: list[Record] = [records[0]]
    hashes = {"": "", records[0].hash: records[0].hash}
    for record in records[1:]:
        meta = {**record.meta, **{key: value for key, value in changes.items() if key in record.meta}}
        made.append(
            Record(
                kind=record.kind, trajectory=record.trajectory, attempt=record.attempt, step=record.step,
                parent=hashes[record.parent], meta=meta, ids=record.ids, logprobs=record.logprobs,
                versions=record.versions, sampled=record.sampled,
            )
        )  # fmt: skip
        hashes[record.hash] = made[-1].hash
    return made


def entry(records: list[Record], group: str, size: int = 1) -> Entry:
    last = records[-1]
    return Entry(
        trajectory=last.trajectory, attempt=1, head=last.hash, group=group, phase="rl", reward=1.0, num_tokens=9,
        num_sampled=4, num_steps=2, min_version=4, group_size=size,
    )  # fmt: skip


def names(paths: RunPaths) -> set[str]:
    with Store(paths) as store:
        return set(store.names())


def reasons(done: Pruned) -> dict[str, int]:
    return dict(done.carried)


async def test_what_is_needed_stays(tmp_path: Path) -> None:
    """One old shard: fat trained trajectories and one of each kind that something needs."""
    paths = run_folder(tmp_path)
    trained = of(trajectory("trained", steps=FAT), group="f.p0n1")
    numbered = of(trajectory("numbered"), group="f.p0n7")
    waiting = of(trajectory("waiting"), group="f.p0n2")
    undone = of(trajectory("undone"), group="f.p0n6")  # trained, but after the oldest checkpoint
    lone = of(trajectory("lone"), group="f.p0n3")
    failed = of(trajectory("failed", steps=FAT), group="f.p0n1", status="FAILED")
    cancelled = of(trajectory("cancelled"), group="f.p0n4", status="CANCELLED")
    user = of(trajectory("user"), group="f.u0", kind="user")
    judged = of(trajectory("judged"), group="f.e0", kind="eval", phase="before")
    under_way = of(trajectory("under_way"), group="f.e1", kind="eval", phase="after")
    open_one = of(trajectory("open"), group="f.p0n5")[:-1]
    every = [trained, numbered, waiting, undone, lone, failed, cancelled, user, judged, under_way, open_one]
    await shard(paths, *(record for records in every for record in records))
    newest = of(trajectory("newest"), group="f.p0n6")
    await shard(paths, *newest)
    ledger = LedgerWriter(paths)
    groups = {"trained": trained, "numbered": numbered, "waiting": waiting, "undone": undone, "newest": newest}
    ledger.append([entry(records, records[-1].meta["group"]) for records in groups.values()])
    (paths.evals / "before.json").write_text("{}")
    progress = ProgressWriter(paths, None)
    row = UpdateRow(update=1, phase="rl", phase_update=1, trajectories=("trained", "numbered"))
    progress.append(row)
    progress.append(UpdateRow(update=2, phase="rl", phase_update=2, trajectories=("undone",)))
    paths.checkpoint(1).mkdir()
    paths.checkpoint(2).mkdir()
    before = {path.name: path.read_bytes() for path in shards(paths)}
    told = prune(paths, 0, dry_run=True)
    assert {path.name: path.read_bytes() for path in shards(paths)} == before and not paths.pruned.exists()
    done = prune(paths, 0)
    assert told.removed == done.removed == ("000001.h5",) and told.carried == done.carried
    assert reasons(done) == {
        pruning.NUMBERING: 1,
        pruning.UNTRAINED: 2,
        pruning.UNSCORED: 1,
        pruning.EVALUATION: 1,
        pruning.OPEN_REASON: 1,
    }
    assert names(paths) == {"numbered", "waiting", "undone", "lone", "under_way", "open", "newest"}
    assert [path.name for path in shards(paths)] == ["000002.h5", "000003.h5"]
    assert done.freed_bytes > 0 and done.left_bytes == sum(path.stat().st_size for path in shards(paths))
    with Store(paths) as store:
        assert store.records("waiting") == waiting[1:] and store.complete("waiting", waiting[-1].hash)
        assert store.receipts("waiting")[0].node == "n1" and store.receipts("waiting")[0].segment == 1
    report = verify(paths, deep=True)
    assert report.ok and report.ledger_heads_pruned == 1, report.problems
    assert prune(paths, 0).removed == ("000002.h5",)  # now an old one itself: no trained fat is left to lose
    assert names(paths) == {"numbered", "waiting", "undone", "lone", "under_way", "open", "newest"}


async def test_nothing_is_cut_in_two_and_prompts_stay(tmp_path: Path) -> None:
    paths = run_folder(tmp_path)
    shared = prompt([1, 2, 3])
    first = adopt("long")
    turn0 = act(first, 0, [10], root=shared.hash)
    await shard(paths, shared, first, turn0, *trajectory("fat", prompt_ids=(7,), steps=FAT)[0:])
    seen0 = observe(turn0, [11])
    await shard(paths, seen0, *trajectory("fat2", prompt_ids=(8,), steps=FAT))
    turn1 = act(seen0, 1, [12])
    last = end(turn1)
    sibling = trajectory("sibling")[1:]  # whose prompt is in the first shard alone
    await shard(paths, turn1, last, *sibling)
    with Store(paths) as store:
        expected = {name: store.trajectory(name).ids.tolist() for name in ("long", "sibling")}
    paths.checkpoint(1).mkdir()
    ProgressWriter(paths, None).append(UpdateRow(update=1, phase="rl", phase_update=1, done=True))
    done = prune(paths, 0)
    assert len(done.removed) == 2 and reasons(done) == {pruning.CONTINUES: 2} and done.carried_records == 4
    assert names(paths) == {"long", "sibling"}
    with Store(paths) as store:
        assert {name: store.trajectory(name).ids.tolist() for name in expected} == expected
        assert set(store.prompts()) == {shared.hash}
    assert verify(paths, deep=True).ok
    assert prune(paths, 1 << 30).removed == ()


async def test_a_shard_that_is_mostly_needed_stays_whole(tmp_path: Path) -> None:
    paths = run_folder(tmp_path)
    await shard(paths, *trajectory("waits", steps=FAT))
    await shard(paths, *trajectory("new"))
    done = prune(paths, 0)
    assert done.removed == () and "more than half of it is needed" in done.kept[0]


async def test_the_newest_stay_that_fit(tmp_path: Path) -> None:
    paths = run_folder(tmp_path)
    for name in "abcd":
        await shard(paths, *of(trajectory(name, steps=50), kind="user"))
    sizes = [path.stat().st_size for path in shards(paths)]
    done = prune(paths, sizes[3] + sizes[2] + 10)
    assert done.removed == ("000001.h5", "000002.h5") and reasons(done) == {}
    assert names(paths) == {"c", "d"}
    with Store(paths) as store:
        assert store.complete("c", trajectory("c", steps=50)[-1].hash) is False  # its hashes are those of kind user
        assert len(store.trajectory("c").ids) == 3 + 50 * 2 + 49  # the prompt was carried


async def test_refusals(tmp_path: Path) -> None:
    paths = run_folder(tmp_path)
    log = open_log(paths)
    await log.append([record.frame() for record in trajectory("a")])
    with pytest.raises(StoreError, match="store seal"):
        prune(paths, 0)
    await log.close()
    compact(paths)
    (path,) = shards(paths)
    path.write_bytes(path.read_bytes()[:5000])
    with pytest.raises(StoreError, match="store repair"):
        prune(paths, 0)
    assert size("50GiB") == 50 << 30 and size(" 1.5 MiB") == 3 << 19
    for wrong in ("50", "50GB", "-1GiB", "GiB", "1.2.3GiB", "nanGiB"):
        with pytest.raises(ConfigError, match="--keep"):
            size(wrong)


WORK = "from hpcrl.store.prune import prune; prune(paths, 0)"


async def test_killed_anywhere(tmp_path: Path) -> None:
    paths = run_folder(tmp_path / "source")
    await shard(paths, *of(trajectory("old", steps=FAT), kind="user"), *trajectory("open")[1:-1])
    log = open_log(paths)
    left_over = of(trajectory("old2", steps=FAT), kind="user")
    await log.append([record.frame() for record in (*left_over, *trajectory("open2")[1:-1])])
    await log.close()
    (segment,) = paths.log.glob("*.seg")
    saved = segment.read_bytes()
    compact(paths)
    await shard(paths, *trajectory("new"))
    segment.write_bytes(saved)  # as if a crash between rename and unlink had left it
    copies = await killed_everywhere(
        paths.root, tmp_path / "copies", "from hpcrl.store.prune import prune; prune(paths, 0)"
    )
    for paths in copies:
        assert verify(paths).ok
        assert {"open", "open2", "new"} <= names(paths)
        prune(paths, 0)
        assert names(paths) == {"open", "open2", "new"} and compact(paths).records == 0
        with Store(paths) as store:
            assert store.records("open2") == trajectory("open2")[1:-1]
            assert all(row.root in store.prompts() for row in store.rows("open2").values() if row.root)
        assert all(path.suffix in (".h5", ".json") for path in paths.shards.iterdir())
