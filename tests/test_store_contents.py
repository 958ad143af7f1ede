"""Contents (media, output that the model didn't see): stored once by their hash, and there as long as a record names
them."""

from __future__ import annotations

import base64
import dataclasses
import json
from hashlib import sha256
from pathlib import Path

import numpy as np
import pytest
from pyarrow import parquet
from store_parts import open_log, run_folder, trajectory
from test_store_prune import of
from typer.testing import CliRunner

from hpcrl.cli.store import app
from hpcrl.layout import RunPaths
from hpcrl.store.compact import compact, shard_path, shards
from hpcrl.store.export import Format, export
from hpcrl.store.index import Store
from hpcrl.store.link import LogClient, LogServer
from hpcrl.store.prune import prune
from hpcrl.store.records import Kind, Record, content, prompt
from hpcrl.store.repair import repair
from hpcrl.store.segment import CLOSED, read_segment, segments
from hpcrl.store.verify import verify
from hpcrl.types import StoreError

WHOLE = bytes(range(256)) * 10
NAME = sha256(WHOLE).hexdigest()


async def write(paths: RunPaths, *records: Record) -> None:
    log = open_log(paths)
    await log.append([record.frame() for record in records])
    await log.close()


async def test_a_content_is_stored_once_per_host_and_once_per_shard(tmp_path: Path) -> None:
    paths = run_folder(tmp_path)
    for node in ("n1", "n2"):
        log = open_log(paths, node)
        server = LogServer(log, tmp_path / f"{node}.sock")
        await server.start()
        async with LogClient(tmp_path / f"{node}.sock") as client:
            receipts = [await client.append(content(WHOLE)) for _ in range(3)]
            assert len({(receipt.segment, receipt.offset) for receipt in receipts}) == 1
            for record in trajectory(node, whole=WHOLE):
                await client.append(record)
        await server.close()
        await log.close()
    found = [row.hash for path in segments(paths.log, CLOSED) for _, row in read_segment(path)]
    assert found.count(NAME[:32]) == 2, "once per node"
    with Store(paths) as store:
        before = store.content(NAME)
        assert sorted(store.names()) == ["n1", "n2"] and len(store) == 2 * 5 + 2
        compact(paths)
        store.refresh()  # one that followed along
        assert store.content(NAME) == before == WHOLE
        (path,) = shards(paths)
        steps = store.shard(path.name).whole("steps")
        assert steps["hash"].tolist().count(NAME[:32].encode()) == 1, "once per shard"
        assert store.contents("n1") == {NAME} and sorted(store.names()) == ["n1", "n2"] and len(store) == 12
        assert len(store.summary()) == 2
    assert verify(paths, deep=True).ok


def test_a_content_comes_back_from_its_bytes(tmp_path: Path) -> None:
    for data in (b"", b"\n", "\ud800€".encode("utf-8", "surrogatepass"), WHOLE):
        record = content(data)
        again = Record.decode(record.payload, record.hash)
        assert again == record and again.data == data and again.true_hash == sha256(data).hexdigest()[:32]
    for meta in ({}, {"data": 3}, {"data": "é"}, {"data": "abc"}):
        with pytest.raises(StoreError, match="not a record"):
            Record.decode(Record(kind=Kind.CONTENT, meta=meta).payload)


async def test_what_an_adopter_stores_again_includes_contents(tmp_path: Path) -> None:
    paths = run_folder(tmp_path)
    records = trajectory("t", whole=WHOLE)
    log = open_log(paths)
    await log.append([content(b"of another").frame(), *(record.frame() for record in records)])
    with Store(paths, open_segments=True) as store:
        lost = store.unsettled("t", records[-1].hash)
        assert {record.hash for record in lost} == {record.hash for record in records}
        assert [record.kind for record in lost[:2]] == [Kind.PROMPT, Kind.CONTENT], "before those that name them"
    await log.close()
    with Store(paths) as store:
        assert not store.unsettled("t", records[-1].hash)


async def test_verify_names_a_content_that_is_missing(tmp_path: Path) -> None:
    paths = run_folder(tmp_path)
    await write(paths, *trajectory("t", whole=WHOLE)[1:])
    report = verify(paths, deep=True)
    assert report.missing_contents == 1 and not report.ok
    assert report.problems == (f"{report.problems[0].split(': ')[0]}: the content {NAME} that it names is missing",)
    with Store(paths) as store, pytest.raises(StoreError, match=f"no record {NAME[:32]}"):
        store.content(NAME)
    await write(paths, content(WHOLE))
    assert verify(paths, deep=True).ok


@pytest.mark.parametrize("fresh", [False, True])
async def test_prune_keeps_the_contents_that_what_is_left_names(tmp_path: Path, fresh: bool) -> None:
    """`a_going` is in the oldest shard alone; `goes_on` has its contents there, its records beyond."""
    paths = run_folder(tmp_path)
    going, other = trajectory("a_going", steps=400, whole=b"only here"), trajectory("goes_on", whole=WHOLE, steps=3)
    both = trajectory("both", whole=b"of both")
    ended = of(going[1:], status="CANCELLED")
    await write(paths, going[0], *ended, *other[:4], *both[:2])
    compact(paths)
    await write(paths, *other[4:], *both[1:])
    if not fresh:
        compact(paths)
        await write(paths, prompt([1]))
        compact(paths)
    keep = shard_path(paths, 2).stat().st_size + shard_path(paths, 3).stat().st_size if not fresh else 0
    if fresh:
        await write(paths, prompt([1]))
        (left,) = [path for path in segments(paths.log, CLOSED) if path.name.startswith("n1-2")]
        aside = left.rename(tmp_path / left.name)  # so that the newest shard isn't made of it
        compact(paths)
        aside.rename(left)
    done = prune(paths, keep)
    assert done.removed == ("000001.h5",)
    with Store(paths) as store:
        assert store.content(NAME) == WHOLE and store.content(sha256(b"of both").hexdigest()) == b"of both"
        with pytest.raises(StoreError):
            store.content(sha256(b"only here").hexdigest())
        assert "a_going" not in list(store.names())
    report = verify(paths, deep=True)
    assert report.ok, report.problems


@pytest.mark.parametrize("where", ["shard", "segment"])
@pytest.mark.parametrize("part", ["data", "header"])
async def test_repair_rescues_a_content_or_names_it(tmp_path: Path, where: str, part: str) -> None:
    paths = run_folder(tmp_path)
    await write(paths, *trajectory("t", whole=WHOLE))
    if where == "shard":
        compact(paths)
    (path,) = shards(paths) if where == "shard" else segments(paths.log, CLOSED)
    data = bytearray(path.read_bytes())
    encoded = base64.b64encode(WHOLE)
    at = data.index(encoded) + 100 if part == "data" else data.index(b'"step":-1', data.index(encoded)) + 8
    data[at] ^= 1
    path.write_bytes(data)
    (done,) = repair(paths)
    with Store(paths) as store:
        assert "t" in list(store.names())
        if part == "header":  # its hash says that the data is right: the rest of it is known
            assert not done.lost and store.record("", NAME[:32]) == content(WHOLE)
        else:
            (lost,) = done.lost
            assert (lost.kind, lost.trajectory, lost.hash) == ("CONTENT", "", NAME[:32])
            assert str(lost).startswith("CONTENT of all, ")
    assert verify(paths, deep=True).missing_contents == (part == "data")


@pytest.mark.parametrize("format", ["jsonl", "parquet"])
async def test_export_has_each_content_once(tmp_path: Path, format: Format) -> None:
    paths = run_folder(tmp_path)
    await write(paths, *trajectory("a", steps=3, whole=WHOLE), *trajectory("b", whole=WHOLE), content(b"unnamed"))
    await write(paths, *trajectory("c", whole=b"gone")[1:])
    done = export(paths, tmp_path / "out", format)
    file = next(file for file in done.files if "contents" in file)
    if format == "parquet":
        rows = [(row["content"], row["data"]) for row in parquet.read_table(file).to_pylist()]
    else:
        lines = [json.loads(line) for line in Path(file).read_text().splitlines()]
        rows = [(row["content"], base64.b64decode(row["data"])) for row in lines]
    assert rows == [(NAME, WHOLE)]
    assert done.trajectories == 3 and [text.split(":")[0] for text in done.left_out] == ["c"]


async def test_export_shows_where_a_context_begins(tmp_path: Path) -> None:
    """With an OBSERVE that names a root the context of the step after it begins."""
    paths = run_folder(tmp_path)
    records = trajectory("t", steps=3)
    start, other = records[0], prompt([7, 8, 9])
    made: list[Record] = []
    hashes = {"": ""}
    for record in records[1:]:
        meta = {**record.meta, **({"root": other.hash} if record.kind is Kind.OBSERVE and record.step == 1 else {})}
        ids = np.empty(0, np.int32) if "root" in meta and record.kind is Kind.OBSERVE else record.ids
        made.append(
            Record(
                kind=record.kind, trajectory="t", attempt=1, step=record.step, parent=hashes[record.parent], meta=meta,
                ids=ids, logprobs=record.logprobs, versions=record.versions, sampled=record.sampled,
            )
        )  # fmt: skip
        hashes[record.hash] = made[-1].hash
    await write(paths, start, other, *made)
    done = export(paths, tmp_path / "out", "jsonl")
    (row,) = [json.loads(line) for line in Path(done.files[0]).read_text().splitlines()]
    assert [step["prompt_ids"] for step in row["steps"]] == [[1, 2, 3], None, [7, 8, 9]]
    with Store(paths) as store:
        assert store.trajectory("t").ids.tolist() == [7, 8, 9, 12, 20]


async def test_show_names_all_that_content_can_be_given(tmp_path: Path, tiny_model: Path) -> None:
    paths = run_folder(tmp_path)
    paths.model.symlink_to(tiny_model)
    records = trajectory("t", whole=WHOLE)
    names = {name: sha256(name.encode()).hexdigest() for name in ("picture", "cut", "context", "message")}
    for at, meta in (
        (3, {"contents": [names["message"]]}),
        (4, {
            "parts": [{"role": "tool", "type": "image", "text": "", "media": names["picture"]},
                      {"role": "user", "type": "text", "text": "", "content": names["cut"]}],
            "contents": [names["context"]],
        }),
    ):  # fmt: skip
        record = records[at]
        records[at] = dataclasses.replace(record, meta={**record.meta, **meta})
        records[at + 1] = dataclasses.replace(records[at + 1], parent=records[at].hash)
    await write(paths, *records[:5])
    shown = CliRunner().invoke(app, ["show", str(paths.root), "t"])
    assert shown.exit_code == 0, shown.output
    assert {name: shown.stdout.count(name) for name in (*names.values(), NAME)} == dict.fromkeys(
        (*names.values(), NAME), 1
    )


async def test_the_command_writes_the_bytes(tmp_path: Path) -> None:
    paths = run_folder(tmp_path)
    await write(paths, *trajectory("t", whole=WHOLE))
    run = CliRunner()
    assert run.invoke(app, ["content", str(paths.root), NAME]).stdout_bytes == WHOLE
    wrong = run.invoke(app, ["content", str(paths.root), "0" * 64])
    assert isinstance(wrong.exception, StoreError) and "no record 0000" in str(wrong.exception)
