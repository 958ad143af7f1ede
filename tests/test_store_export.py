"""`store export`: what other programs read is what the store holds, whatever is in it."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from pyarrow import parquet
from store_parts import act, adopt, end, observe, open_log, run_folder, trajectory
from typer.testing import CliRunner

from hpcrl.cli.store import app
from hpcrl.layout import RunPaths
from hpcrl.store.compact import compact, shards
from hpcrl.store.export import Format, export
from hpcrl.store.records import Kind, Record, prompt
from hpcrl.store.segment import CLOSED, segments
from hpcrl.types import ConfigError, Int32Array

TOOLS = [
    {"name": "ls", "description": "é", "effects": "pure", "schema": {"properties": {"path": {"type": "string"}}}},
    {"name": "add", "description": "", "effects": "pure", "schema": {"properties": {"a": {"minimum": 1}, "b": None}}},
    {"name": "none", "description": "", "effects": "pure", "schema": {}},
]
ARGUMENTS: list[Any] = [{"path": "."}, {"a": 1, "b": [None, {"c": 2.5}]}, {}, "not even an object", {"a": "text"}]


def decode(ids: Int32Array) -> str:
    return "".join(f"<{one}>" for one in ids.tolist())


def changed(record: Record, logprobs: list[float] | None = None, **meta: Any) -> Record:
    return Record(
        kind=record.kind, trajectory=record.trajectory, attempt=record.attempt, step=record.step, parent=record.parent,
        meta={**record.meta, **meta}, ids=record.ids, versions=record.versions, sampled=record.sampled,
        logprobs=record.logprobs if logprobs is None else np.array(logprobs, np.float32),
    )  # fmt: skip


async def store(paths: RunPaths) -> None:
    big = prompt(range(200_000))
    first = adopt("t")
    calls = [{"name": "ls", "arguments": one, "key": "k", "legal": True, "effects": "pure"} for one in ARGUMENTS]
    turn0 = changed(act(first, 0, [10, 11], root=big.hash), [-0.5, float("nan")], tools=TOOLS, calls=calls)
    seen0 = observe(turn0, [12], text="é\ud800 \x00 end")
    turn1 = act(seen0, 1, [13, 14], version=5)
    last = changed(end(turn1), rewards={"outcome": 1.0, "rule": -0.25})
    late = Record(kind=Kind.REWARD, trajectory="t", step=0, meta={"source": "judge", "value": 0.5, "wall": 9.0})
    empty = prompt([])
    other = [adopt("open"), act(adopt("open"), 0, [], root=empty.hash)]
    log = open_log(paths)
    records = [big, first, turn0, seen0, turn1, last, late, empty, *other]
    await log.append([record.frame() for record in records])
    await log.close()


def read(files: tuple[str, ...], format: Format) -> tuple[list[Any], list[Any], list[Any]]:
    """Trajectories, steps and rewards, as a strict reader of that format gives them."""
    if format == "parquet":
        found = [parquet.read_table(file).to_pylist() for file in files]
        for row, names in (
            *((row, ("task", "sampling")) for row in found[0]),
            *((row, ("tools", "calls", "parts", "results", "fault")) for row in found[1]),
        ):
            for name in names:
                if row[name] is not None:
                    row[name] = json.loads(row[name])
        return found[0], found[1], found[2]

    def refuse(word: str) -> None:
        raise AssertionError(f"{word} is no JSON")

    lines = Path(files[0]).read_bytes().decode("utf-8", "strict").splitlines()
    rows = [json.loads(line, parse_constant=refuse) for line in lines]
    steps = [{"trajectory": row["trajectory"], **step} for row in rows for step in row["steps"]]
    return rows, steps, [{"trajectory": row["trajectory"], **one} for row in rows for one in row["rewards"]]


@pytest.mark.parametrize("format", ["jsonl", "parquet"])
async def test_what_is_exported_is_what_is_stored(tmp_path: Path, format: Format) -> None:
    paths = run_folder(tmp_path / "run")
    await store(paths)
    compact(paths)
    done = export(paths, tmp_path / "out", format, decode)
    assert (done.trajectories, done.steps, done.left_out) == (2, 3, ())
    (whole, opened), (step0, step1, step_open), rewards = read(done.files, format)
    assert (whole["trajectory"], whole["status"], whole["kind"], whole["reward"]) == ("t", "COMPLETED", "train", 1.25)
    assert whole["task"] == {"environment": "find", "payload": {"n": 3}, "kind": ""} and whole["seed"] == 7
    assert (opened["status"], opened["reward"], opened["ended_wall"]) == ("open", None, None)
    # Verbatim: no field of one schema shows up in another's, and none is lost.
    assert step0["tools"] == TOOLS and step1["tools"] == []
    assert [call["arguments"] for call in step0["calls"]] == ARGUMENTS
    assert step0["prompt_ids"] == list(range(200_000)) and len(step0["prompt"]) > 1_000_000
    assert step1["prompt_ids"] is None and (step_open["prompt_ids"], step_open["prompt"]) == ([], "")
    assert (step0["text"], step1["text"], step_open["text"]) == ("<10><11>", "<13><14>", "")
    assert step0["observation"] == "é? \x00 end" and step1["observation"] is None
    if format == "parquet":
        assert step0["parts"][0]["text"] == "é\ud800 \x00 end"
    assert step0["results"][0]["status"] == "ok" and step1["results"] is None
    assert step0["ids"] == [10, 11, 12] and step0["sampled"] == [True, True, False]
    assert step0["logprobs"] == [-0.5, None, 0.0] and step0["versions"] == [4, 4, -1] and step1["versions"] == [5, 5]
    scores = {(row["trajectory"], row["step"], row["source"]): (row["value"], row["late"]) for row in rewards}
    assert scores == {
        ("t", 1, "outcome"): (1.0, False),
        ("t", 1, "rule"): (-0.25, False),
        ("t", 0, "judge"): (0.5, True),
    }
    with pytest.raises(ConfigError, match="exists"):
        export(paths, tmp_path / "out", format, decode)


async def test_types_do_not_depend_on_what_is_there(tmp_path: Path) -> None:
    schemas = []
    for name in ("full", "empty"):
        paths = run_folder(tmp_path / name)
        if name == "full":
            await store(paths)
        done = export(paths, tmp_path / f"{name}-out", "parquet")
        schemas.append([parquet.read_schema(file) for file in done.files])
    assert schemas[0] == schemas[1]
    assert str(schemas[0][1].field("tools").type) == "string"
    assert str(schemas[0][1].field("logprobs").type) == "list<element: float>"


async def test_a_damaged_file_is_named_and_what_is_intact_of_it_exported(tmp_path: Path) -> None:
    paths = run_folder(tmp_path / "run")
    await store(paths)
    (path,) = segments(paths.log, CLOSED)
    data = bytearray(path.read_bytes())
    data[data.index(b'"source":"judge"') + 12] ^= 1  # in the late REWARD
    path.write_bytes(data)
    command = CliRunner().invoke(app, ["export", str(paths.root), "--to", str(tmp_path / "out"), "--json"])
    done = json.loads(command.stdout)
    assert command.exit_code == 1 and (done["trajectories"], done["steps"], done["left_out"]) == (2, 3, [])
    assert len(done["damaged"]) == 1 and path.name in done["damaged"][0]


async def test_what_can_not_be_read_is_named_and_left_out(tmp_path: Path) -> None:
    paths = run_folder(tmp_path / "run")
    log = open_log(paths)
    lame = trajectory("lame")
    await log.append([record.frame() for record in (*trajectory("whole"), *lame[1:3], *lame[4:])])
    await log.close()
    done = export(paths, tmp_path / "out", "jsonl")
    assert done.trajectories == 1 and len(done.left_out) == 1
    assert done.left_out[0].startswith("lame: ") and lame[3].hash in done.left_out[0]
    assert not segments(paths.log, CLOSED)[1:] and not shards(paths)
    (row,) = map(json.loads, Path(done.files[0]).read_text().splitlines())
    assert row["trajectory"] == "whole" and row["steps"][0]["text"] is None
