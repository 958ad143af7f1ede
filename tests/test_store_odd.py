"""What is odd in a run folder, in a command's words or on the disk: named in one line, and in nobody's way."""

from __future__ import annotations

import json
import os
import shutil
from collections.abc import Callable
from dataclasses import replace
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
import pytest
from hpcrl_analysis import calls
from run_parts import hpcrl
from small_disk import fill, small_disk
from store_parts import adopt, open_log, run_folder, trajectory, write

from hpcrl import config
from hpcrl.cli.looks import full_status
from hpcrl.layout import RunPaths, numbered
from hpcrl.store.compact import compact, shards
from hpcrl.store.index import Store
from hpcrl.store.ledger import LedgerReader, LedgerWriter, UpdateRow, entries, lineage
from hpcrl.store.prune import prune, size
from hpcrl.store.records import Kind, Record, from_json, to_json
from hpcrl.store.repair import repair
from hpcrl.store.segment import CLOSED, MAGIC, segments
from hpcrl.store.shard import Shard, parse_directory
from hpcrl.store.verify import verify
from hpcrl.types import ConfigError, Entry, StoreError, is_number

ARABIC = "\u0663"  # 3
DEEP = b"[" * 100_000 + b"]" * 100_000


def flip(path: Path, dataset: str, at: int) -> None:
    """Damage a byte of a shard's dataset."""
    with Shard(path) as shard:
        offset = int(shard.directory["datasets"][dataset][0])
    data = bytearray(path.read_bytes())
    data[offset + at] ^= 1
    path.write_bytes(data)


def meta_of(paths: RunPaths, trajectory: str, kind: str) -> tuple[Path, int, str]:
    """Where the header of a trajectory's first record of this kind lies in its shard's `text/meta`, and its hash."""
    with Store(paths) as store:
        row = next(row for row in store.rows(trajectory).values() if row.kind.name == kind)
        return paths.shards / row.file, int(store.shard(row.file)._one(row.at)["meta_start"][0]), row.hash


# ---- files


@pytest.mark.timeout(60)
async def test_what_is_no_file_of_the_store_is_named_and_never_opened(tmp_path: Path) -> None:
    paths = run_folder(tmp_path)
    await write(paths, "a")
    compact(paths)
    await write(paths, "b")
    LedgerWriter(paths).append([])
    odd = []
    for folder, names in {
        paths.shards: ("000009.h5", f"{ARABIC}.h5", "000010.claim", "1" * 19 + ".h5", "x-000001.h5"),
        paths.log: ("n1-9.seg", "n1-\u00b2.seg", "n1-10.open", "n1.seg"),
        paths.ledger: ("000009.jsonl", f"{ARABIC}.jsonl"),
        paths.progress: ("000009.jsonl",),
    }.items():
        odd += [folder / name for name in names]
    for number, path in enumerate(odd):
        makers: list[Callable[[Path], object]] = [os.mkfifo, Path.mkdir, lambda path: path.symlink_to("nowhere")]
        makers[number % 3](path)
    with Store(paths, open_segments=True) as store:
        assert sorted(store.names()) == ["a", "b"] and not store.damaged
    assert entries(paths) == [] and lineage(paths) == []
    assert compact(paths).segments == 1 and len(shards(paths)) == 2
    await write(paths, "c")
    report = verify(paths, deep=True)
    assert report.strays == len(odd) and report.damaged == 0 and not report.ok
    for path in odd:
        assert any(str(path) in problem for problem in report.problems), path
    done = hpcrl("store", "ls", paths.root, "--json")
    assert done.returncode == 0 and len(json.loads(done.stdout)) == 3
    assert done.stderr.count(f"{odd[0]}:") == 1
    LedgerWriter(paths)
    assert entries(paths) == []


def test_a_link_to_a_file_is_one(tmp_path: Path) -> None:
    (tmp_path / "elsewhere").write_bytes(b"")
    (tmp_path / "7.h5").symlink_to("elsewhere")
    assert numbered(tmp_path, ".h5") == [tmp_path / "7.h5"]


@pytest.mark.parametrize("text", ["\u00b2", ARABIC, "", "-1", "1.0", "1" * 19])
def test_what_is_no_number(text: str) -> None:
    assert not is_number(text)
    with pytest.raises(ConfigError, match="no size"):
        size(f"{text if text != '1.0' else '1.0.0'}GiB")


async def test_a_reader_goes_on_when_a_shard_has_gone(tmp_path: Path) -> None:
    paths = run_folder(tmp_path)
    for name in ("a", "b"):
        await write(paths, name)
        compact(paths)
    readers: list[Callable[[Store], Any]] = [
        lambda store: [record.hash for record in store.records("a")],
        lambda store: store.trajectory("a").ids.tolist(),
        lambda store: store.steps([("a", 0), ("b", 1)])[0].ids.tolist(),
        lambda store: sorted(store.rewards()["trajectory"]),
    ]
    stores = [Store(paths) for _ in readers]
    known = [sorted(reader(store)) for reader, store in zip(readers, stores, strict=True)]
    gone = shards(paths)[0]
    flip(gone, "tokens/ids", 0)  # of the prompt, which b has as well
    repair(paths)
    assert not gone.exists()
    for reader, store, before in zip(readers, stores, known, strict=True):
        store.close()  # as if 64 other files had been read since
        store._cache.clear()
        assert sorted(reader(store)) == before
    for path in shards(paths):
        path.unlink()
    stores[0].close()
    stores[0]._cache.clear()
    assert stores[0].records("a") == [] and stores[0].rewards().empty
    with pytest.raises(StoreError, match="no trajectory 'a'"):
        stores[0].trajectory("a")


# ---- ledger and progress


ENTRY = {
    "trajectory": "a", "attempt": 1, "head": "h", "group": "g", "phase": "p", "reward": 0.5, "num_tokens": 1,
    "num_sampled": 1, "num_steps": 1, "min_version": 0, "group_size": 1,
}  # fmt: skip
UPDATE = {"update": 1, "phase": "p", "phase_update": 1, "positions": [[1, 1]], "trajectories": ["a"]}


@pytest.mark.parametrize(
    "line",
    [
        "junk", "[]", "3", "\u00e9", json.dumps(ENTRY | {"attempt": "x"}), json.dumps(ENTRY | {"reward": None}),
        json.dumps(ENTRY | {"trajectory": 5}), "{}", '{"a": ' + DEEP.decode() + "}", json.dumps(ENTRY | {"head": [1]}),
        json.dumps(ENTRY).replace("0.5", "1" * 5000), json.dumps(ENTRY | {"num_steps": 1e400}),
    ],
)  # fmt: skip
def test_odd_lines_of_the_ledger(tmp_path: Path, line: str) -> None:
    paths = run_folder(tmp_path)
    LedgerWriter(paths).append([Entry(**ENTRY)])  # type: ignore[arg-type]
    path = paths.ledger / "000001.jsonl"
    path.write_text(path.read_text() + line + "\n", encoding="latin-1")
    with pytest.raises(StoreError, match=r"000001\.jsonl"):
        entries(paths)
    report = verify(paths)
    assert report.damaged == 1 and "000001.jsonl" in report.problems[0]


@pytest.mark.parametrize(
    "change",
    [
        {"update": "1"}, {"positions": 5}, {"positions": [[1, "x"]]}, {"positions": [[1]]}, {"trajectories": None},
        {"metrics": []}, {"version": 1.5},
    ],
)  # fmt: skip
def test_odd_lines_of_progress(tmp_path: Path, change: dict[str, Any]) -> None:
    paths = run_folder(tmp_path)
    path = paths.progress / "000001.jsonl"
    path.write_text('{"resumed_from": null}\n' + json.dumps(UPDATE) + "\n")
    assert lineage(paths) == [UpdateRow(update=1, phase="p", phase_update=1, positions=((1, 1),), trajectories=("a",))]
    path.write_text(path.read_text() + json.dumps(UPDATE | change) + "\n")
    assert verify(paths).damaged == 1
    with pytest.raises(StoreError, match="not a UpdateRow"):
        lineage(paths)


@pytest.mark.parametrize("first", ["5", '"x"', "[1]", '{"incarnation": 1}', '{"incarnation": 1, "lines": "2"}'])
def test_odd_first_lines(tmp_path: Path, first: str) -> None:
    paths = run_folder(tmp_path)
    LedgerWriter(paths)
    (paths.ledger / "000002.jsonl").write_text(f'{{"follows": {first}}}\n')
    with pytest.raises(StoreError, match=r"000002\.jsonl: damaged"):
        LedgerReader(paths).read()


def test_verify_tells_of_what_the_ledger_repeats(tmp_path: Path) -> None:
    paths = run_folder(tmp_path)
    LedgerWriter(paths).append([Entry(**ENTRY)] * 3)  # type: ignore[arg-type]
    report = verify(paths)
    assert (report.ledger_entries, report.ledger_repeats) == (3, 2)


# ---- JSON


def test_json_that_is_nested_too_deeply_is_malformed() -> None:
    for read in (from_json, lambda text: Record.decode(len(text).to_bytes(4, "little") + text)):
        with pytest.raises(ValueError, match="nested too deeply"):
            read(DEEP)
    value: Any = []
    for _ in range(2000):
        value = [value]
    with pytest.raises(ValueError, match="nested too deeply"):
        to_json({"a": value})


@pytest.mark.parametrize(
    "change",
    [
        lambda _: DEEP.decode(),
        lambda _: "[]",
        lambda row: json.dumps(row | {"datasets": {**row["datasets"], "steps": [1 << 62, 9, "|u1", 0]}}),
        lambda row: json.dumps(row | {"datasets": {**row["datasets"], "steps": [-8, 1, "|u1", 0]}}),
        lambda row: json.dumps(row | {"datasets": {**row["datasets"], "steps": [0, 1, "junk", 0]}}),
        lambda row: json.dumps(row | {"schema": "x"}),
    ],
)
async def test_a_directory_that_makes_no_sense_is_damage(tmp_path: Path, change: Callable[[Any], str]) -> None:
    from crc32c import crc32c

    paths = run_folder(tmp_path)
    await write(paths, "a")
    compact(paths)
    (path,) = shards(paths)
    start = path.read_bytes()
    body = change(parse_directory(path, start)[0]).encode()
    block = 1 << 18
    whole = (start[:8] + block.to_bytes(4, "little") + len(body).to_bytes(4, "little") + body).ljust(block - 4, b"\0")
    path.write_bytes(whole + crc32c(whole).to_bytes(4, "little"))
    with pytest.raises(StoreError, match=r"000001\.h5: damaged"):
        Shard(path)


@pytest.mark.parametrize("field", [{"attempt": 1 << 40}, {"step": 10**30}])
def test_a_record_out_of_range_is_malformed(field: dict[str, Any]) -> None:
    payload = Record(kind=Kind.REWARD, trajectory="a", **field).payload
    with pytest.raises(StoreError, match="out of range"):
        Record.decode(payload)


@pytest.mark.parametrize("text", [b"[]", b"{}", b"[" * 2000, b'{"format": "x"}'])
def test_a_segments_header_that_makes_no_sense_is_damage(tmp_path: Path, text: bytes) -> None:
    from crc32c import crc32c

    paths = run_folder(tmp_path)
    path = paths.log / "n1-1.seg"
    path.write_bytes(MAGIC + len(text).to_bytes(4, "little") + text + crc32c(text).to_bytes(4, "little"))
    with Store(paths) as store:
        assert "damaged at byte 0: header makes no sense" in store.damaged[path.name]


# ---- damage


async def test_verify_knows_what_repair_found_lost(tmp_path: Path) -> None:
    paths = run_folder(tmp_path)
    await write(paths, "a", "b")
    compact(paths)
    with Store(paths) as store:
        heads = {name: store.head(name) or "" for name in ("a", "b")}
    LedgerWriter(paths).append([Entry(**ENTRY | {"trajectory": n, "head": h}) for n, h in heads.items()])  # type: ignore[arg-type]
    assert verify(paths, deep=True).ok
    path, start, hash = meta_of(paths, "a", "OBSERVE")
    flip(path, "text/meta", start + 90)
    report = verify(paths, deep=True)
    line = next(line for line in report.problems if hash in line)
    assert "OBSERVE" in line and " of a: " in line and f"`hpcrl store repair {paths.root}`" in line
    assert len(repair(paths)[0].lost) == 1
    report = verify(paths, deep=True)
    assert report.ok and report.lost_recorded == 1, report.problems
    path, start, _ = meta_of(paths, "b", "OBSERVE")
    flip(path, "text/meta", start + 90)
    report = verify(paths, deep=True)
    assert report.lost_recorded == 1 and report.damaged >= 1 and not report.ok, "new damage is told apart"
    (paths.damaged_shards / "000001.h5.lost.json").write_text("[]")
    assert any("lost.json" in line for line in verify(paths).problems)


async def test_repair_names_what_nobody_can_make_out_but_others_name(tmp_path: Path) -> None:
    paths = run_folder(tmp_path)
    await write(paths, "a", "b", "c")
    with Store(paths) as store:
        heads = {name: store.head(name) or "" for name in "abc"}
    LedgerWriter(paths).append([Entry(**ENTRY | {"trajectory": n, "head": h}) for n, h in heads.items()])  # type: ignore[arg-type]
    (path,) = segments(paths.log, CLOSED)
    data = bytearray(path.read_bytes())
    start = data.index(b'"trajectory":"a"') + 500
    data[start : start + 1500] = bytes(1500)  # the end of a, the beginning of b
    path.write_bytes(data)
    lost = {row.hash for row in repair(paths)[0].lost}
    report = verify(paths, deep=True)
    assert report.ok and report.ledger_heads_missing == 2 and report.missing_parents >= 1, report.problems
    assert heads["a"] in lost and heads["b"] not in lost and report.lost_recorded == len(lost)


async def test_what_is_damaged_does_not_hide_the_rest(tiny_model: Path, tmp_path: Path) -> None:
    paths = run_folder(tmp_path)
    shutil.copytree(tiny_model, paths.model)
    await write(paths, "a", "b")
    compact(paths)
    with Store(paths) as store:
        whole = [record.hash for record in store.records("a")]
    path, start, hash = meta_of(paths, "a", "OBSERVE")
    flip(path, "text/meta", start + 90)
    with Store(paths) as store:
        assert [record.hash for record in store.records("a")] == [one for one in whole if one != hash]
        assert "OBSERVE" in store.damaged[hash]
    assert calls(paths.root).compute()["trajectory"].tolist() == ["b"]
    done = hpcrl("store", "show", paths.root, "a")
    assert done.returncode == 1 and "END" in done.stdout and hash in done.stderr, done.stderr
    assert hpcrl("store", "show", paths.root, "b").returncode == 0
    done = hpcrl("store", "export", paths.root, "--to", tmp_path / "to", "--format", "jsonl", "--json")
    assert done.returncode == 1 and hash in json.loads(done.stdout)["left_out"][0]
    flip(path, "steps", 8)  # its rows, too
    done = hpcrl("store", "show", paths.root, "a")
    assert done.returncode == 1 and "repair" in done.stderr and len(done.stderr.splitlines()) < 9, done.stderr


async def test_a_prune_that_would_stop_at_damage_says_so_beforehand(tmp_path: Path) -> None:
    paths = run_folder(tmp_path)
    log = open_log(paths)
    await log.append([record.frame() for record in trajectory("open", steps=2)[:-1]])  # is carried over
    await log.append([record.frame() for name in range(9) for record in trajectory(f"t{name}", steps=9)])
    await log.seal()
    compact(paths)
    await log.append([record.frame() for record in trajectory("late")])
    await log.close()
    compact(paths)
    LedgerWriter(paths).append(
        Entry(**ENTRY | {"trajectory": f"t{name}", "group": "g", "group_size": 9})  # type: ignore[arg-type]
        for name in range(9)
    )
    rows = [{"resumed_from": None}, UPDATE | {"positions": [], "trajectories": [f"t{name}" for name in range(9)]}]
    (paths.progress / "000001.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    paths.checkpoint(1).mkdir()
    assert prune(paths, 0, dry_run=True).carried_records > 3
    path, start, _ = meta_of(paths, "open", "ACT")
    flip(path, "text/meta", start + 90)
    for dry_run in (True, False):
        with pytest.raises(StoreError, match=r"of open: .*000001\.h5: damaged.*store repair"):
            prune(paths, 0, dry_run=dry_run)
    assert len(shards(paths)) == 2 and not paths.pruned.exists()


# ---- words


async def test_conditions_that_no_trajectory_can_meet(tmp_path: Path) -> None:
    paths = run_folder(tmp_path)
    await write(paths, "a", "b")
    with Store(paths) as store:
        for bad, expect in [
            ({"kind": "foo"}, "no kind 'foo'; there are: train, eval, expert, user"), ({"kind": {"eval", "x"}}, "'x'"),
            ({"status": ["DONE"]}, "no status 'DONE'; there are: COMPLETED, TRUNCATED, FAILED, CANCELLED, open"),
            ({"status": 5}, "no status 5"), ({"fault": "polcy"}, "policy"), ({"task": 5}, "task must be text, not 5"),
            ({"attempt": "1"}, "attempt must be a number"), ({"reward_below": "x"}, "reward_below must be a number"),
            ({"reward_above": float("nan")}, "number"), ({"version": "x"}, "version"), ({"colour": 1}, "no condition"),
            ({"since": object()}, "no time"), ({"until": pd.NaT}, "no time"),
        ]:  # fmt: skip
            with pytest.raises(ConfigError, match=expect):
                store.query(**bad)
        assert store.query(kind="eval").empty and store.query(status="open").empty
        for kinds in ({"train", "eval"}, ("train",), np.array(["train"]), pd.Series(["train"]), "train"):
            assert len(store.query(kind=kinds, attempt=1, version=np.int64(4))) == 2
        for later, time in [
            (False, datetime(1970, 1, 1, tzinfo=UTC)), (True, datetime(1970, 1, 1, 0, 0, 2, tzinfo=UTC)),
            (True, pd.Timestamp(2, unit="s", tz="UTC")), (False, "1970-01-01T00:00:01Z"), (False, 1),
            (True, np.datetime64("2020-01-01", "ns")),
        ]:  # fmt: skip
            assert store.query(since=time).empty is later and store.query(until=time).empty is not later
    for words in (("--kind", "foo"), ("--since", ""), ("--fault", "x")):
        done = hpcrl("store", "query", paths.root, *words)
        assert done.returncode == 2 and len(done.stderr.splitlines()) == 1, done.stderr


async def test_a_list_that_is_short_and_an_export_of_some(tmp_path: Path) -> None:
    paths = run_folder(tmp_path)
    log = open_log(paths)
    for wall, name in enumerate("cab"):
        one = adopt(name)
        await log.append([replace(one, meta={**one.meta, "wall": float(wall)}).frame()])
    await log.close()
    done = hpcrl("store", "ls", paths.root, "--limit", 2, "--columns", "trajectory,num_steps,wall")
    assert [line.split() for line in done.stdout.splitlines()] == [
        ["trajectory", "num_steps", "wall"], ["a", "0", "1.000"], ["b", "0", "2.000"],
    ]  # fmt: skip
    done = hpcrl("store", "ls", paths.root, "--columns", "colour")
    assert done.returncode == 2 and "num_steps" in done.stderr
    assert [row["id"] for row in json.loads(hpcrl("store", "ls", paths.root, "--json").stdout)] == ["c", "a", "b"]
    words = ("store", "export", paths.root, "--to", tmp_path / "to", "--format", "jsonl", "--json")
    assert json.loads(hpcrl(*words, "--since", 1, "--until", 2).stdout)["trajectories"] == 1
    row = json.loads((tmp_path / "to" / "trajectories.jsonl").read_text())
    assert row["trajectory"] == "a"


async def test_what_is_no_contents_name(tmp_path: Path) -> None:
    paths = run_folder(tmp_path)
    await write(paths, "a")
    with Store(paths) as store:
        prompt = next(iter(store.prompts()))
    for name, expect in ((prompt, "no content's name"), (prompt * 2, "no content"), ("x", "no content's name")):
        done = hpcrl("store", "content", paths.root, name)
        assert done.returncode == 2 and expect in done.stderr and len(done.stderr.splitlines()) == 1


# ---- places


async def test_a_full_disk_is_one_line_and_leaves_nothing(tmp_path: Path) -> None:
    with small_disk(tmp_path / "disk", "24m") as disk:
        paths = run_folder(disk / "run")
        log = open_log(paths)
        for number in range(40):
            await log.append([record.frame() for record in trajectory(f"t{number}", steps=90)])
        await log.close()
        compact(paths)
        await write(paths, "late")
        compact(paths)
        path, start, _ = meta_of(paths, "t7", "OBSERVE")
        whole = path.read_bytes()
        flip(path, "text/meta", start + 90)
        there = {*disk.rglob("*")}
        fill(disk, 4096)

        def refused(*words: object) -> None:
            done = hpcrl("store", *words)
            lines = [line for line in done.stderr.splitlines() if line.startswith("hpcrl: ")]
            assert done.returncode == 2 and "No space left" in lines[-1] and str(disk) in lines[-1], done.stderr
            assert "Traceback" not in done.stderr and {*disk.rglob("*")} - {disk / "ballast"} - there <= {
                paths.damaged_shards
            }

        for format in ("jsonl", "parquet"):
            refused("export", paths.root, "--to", disk / "to", "--format", format)
        refused("repair", paths.root)
        assert path.exists()
        (disk / "ballast").unlink()
        path.write_bytes(whole)
        fill(disk, 0)
        done = hpcrl("store", "prune", paths.root, "--keep", "1MiB")
        assert done.returncode in (0, 2) and "Traceback" not in done.stderr, done.stderr


async def test_impossible_places(tmp_path: Path) -> None:
    paths = run_folder(tmp_path / "run")
    await write(paths, "a", "b")
    compact(paths)
    (tmp_path / "file").write_bytes(b"")
    for place in (tmp_path / "file", tmp_path / "file" / "within", Path("/proc/nothing")):
        done = hpcrl("store", "export", paths.root, "--to", place, "--format", "jsonl")
        lines = [line for line in done.stderr.splitlines() if line.startswith("hpcrl: /")]
        assert done.returncode == 2 and str(place) in lines[-1] and "Traceback" not in done.stderr, done.stderr
    path, start, _ = meta_of(paths, "a", "OBSERVE")
    flip(path, "text/meta", start + 90)
    paths.damaged_shards.write_bytes(b"")
    done = hpcrl("store", "repair", paths.root)
    assert done.returncode == 2 and done.stderr.splitlines() == [f"hpcrl: {paths.damaged_shards}: Not a directory"]
    assert shards(paths) == [path] and not segments(paths.log, CLOSED)


# ---- looking at a run


def junk_run(tmp_path: Path, jobs: str, status: str) -> RunPaths:
    paths = run_folder(tmp_path)
    settings = config.load(Path(__file__).parent.parent / "configs" / "quickstart.toml", ())
    paths.config.write_text(config.dump(settings))
    paths.jobs.write_text(jobs)
    paths.heartbeat.write_text(status)
    return paths


@pytest.mark.parametrize(
    "junk",
    [
        "", "junk", "[]", "5", '{"state": 5}', '{"state": "running", "updates": {"done": 1, "total": 3}}',
        '{"state": "running", "updates": {"done": 1, "total": 3}, "evaluations": {"before": 3}}',
        '{"state": "running", "updates": {"done": 1, "total": 0}, "evaluations": {"before": 3}}',
    ],
)  # fmt: skip
def test_a_status_of_junk_is_named_and_passed_over(tmp_path: Path, junk: str, caplog: pytest.LogCaptureFixture) -> None:
    paths = junk_run(tmp_path, "", junk)
    assert full_status(paths)["state"] == "starting"
    assert f"{paths.heartbeat}: unreadable" in caplog.text


JOB = {"event": "submitted", "role": "control", "index": 0, "executor": "local", "id": "1", "wall": 1.0}


@pytest.mark.parametrize("change", [{"id": "x"}, {"id": [1]}, {"executor": "foo"}, None])
def test_jobs_of_junk_are_named_and_passed_over(
    tmp_path: Path, change: dict[str, Any] | None, caplog: pytest.LogCaptureFixture
) -> None:
    line = "junk" if change is None else json.dumps({**JOB, "start": 1, "boot": "", **change})
    paths = junk_run(tmp_path, f"{line}\n", "")
    assert full_status(paths)["state"] == "starting"
    assert str(paths.jobs) in caplog.text


def test_commands_that_look_at_a_run_of_junk(tmp_path: Path) -> None:
    paths = junk_run(tmp_path, json.dumps({**JOB, "start": 1, "boot": "", "id": "x"}) + "\n", "junk")
    (paths.logs / "control-0.jsonl").write_text('junk\n{"time": 1.0, "message": "hello"}\n')
    (paths.logs / "control-1.jsonl").mkdir()
    done = hpcrl("status", paths.root)
    assert done.returncode == 0 and "state: starting" in done.stdout, done.stderr
    assert "status.json" in done.stderr and "jobs.jsonl" in done.stderr and "Traceback" not in done.stderr
    done = hpcrl("logs", paths.root)
    assert done.returncode == 0 and "hello" in done.stdout, done.stderr
    assert "control-0.jsonl" in done.stderr and "control-1.jsonl" in done.stderr
    done = hpcrl("stop", paths.root)
    assert done.returncode == 2 and "jobs.jsonl: unreadable" in done.stderr.splitlines()[-1], done.stderr
    assert list(paths.inbox.glob("stop-*.json")), "control, if there is one, is asked whatever the other lines say"
    paths.stopped.write_text('{"outcome": "stopped"}')
    done = hpcrl("watch", paths.root)
    assert done.returncode == 0 and "Traceback" not in done.stderr, done.stderr
