"""hpcrl_analysis: partitions are shards, what ADOPT says is there in each, and the example page runs."""

from __future__ import annotations

import asyncio
import math
import subprocess
import sys
from pathlib import Path
from typing import Any

import hpcrl_analysis
import pytest
from hpcrl_analysis import calls, frame
from store_parts import act, adopt, end, observe, open_log, run_folder, trajectory

from hpcrl.layout import RunPaths
from hpcrl.store.compact import compact, shards
from hpcrl.store.records import Record, prompt
from hpcrl.types import StoreError

EXAMPLE = Path(hpcrl_analysis.__file__).with_name("example.py")


async def shard(paths: RunPaths, *records: Record) -> None:
    log = open_log(paths)
    await log.append([record.frame() for record in records])
    await log.close()
    assert compact(paths).shards == 1


async def store(paths: RunPaths) -> None:
    """`long` goes through three shards, ADOPT in the first and END in the last."""
    root = prompt([1, 2, 3])
    first = adopt("long")
    turn0 = act(first, 0, [10], root=root.hash)
    seen0 = observe(turn0, [11])
    turn1 = act(seen0, 1, [12])
    await shard(paths, root, first, turn0, *trajectory("a")[1:])
    await shard(paths, seen0, turn1, *trajectory("b"))
    await shard(paths, end(turn1, reward=0.25))


async def test_one_partition_per_shard_and_what_adopt_says_everywhere(tmp_path: Path) -> None:
    paths = run_folder(tmp_path)
    with pytest.raises(StoreError, match="store compact"):
        frame(paths.root)
    await store(paths)
    made = frame(paths.root)
    assert made.npartitions == len(shards(paths)) == 3
    parts = [made.partitions[number].compute() for number in range(3)]
    assert [sorted(part.trajectory) for part in parts] == [["a", "long"], ["b", "long"], ["long"]]
    whole = made.compute()
    assert set(whole.kind) == {"train"} and set(whole.phase) == {"rl"} and set(whole.environment) == {"find"}
    assert list(whole[whole.trajectory == "long"].status) == ["open", "open", "COMPLETED"]
    ended = made[made.status != "open"].compute().set_index("trajectory")
    assert ended.reward.to_dict() == {"a": 1.0, "b": 1.0, "long": 0.25} and ended.success["long"] == 0.0
    assert ended.num_tokens["long"] == 9 and ended.ended_wall["a"] == 1.0
    assert made.groupby("task_kind").reward.mean().compute().to_dict() == {"": 0.75}
    assert {name: str(kind) for name, kind in made.dtypes.items()} == {n: str(k) for n, k in whole.dtypes.items()}
    assert math.isnan(whole[whole.status == "open"].reward.iloc[0])


async def test_calls(tmp_path: Path) -> None:
    paths = run_folder(tmp_path)
    await store(paths)
    found = calls(paths.root).compute()
    rows: list[tuple[Any, ...]] = sorted(found[["trajectory", "step", "name", "status"]].itertuples(index=False))
    assert rows == [("a", 0, "ls", "ok"), ("b", 0, "ls", "ok"), ("long", 0, "ls", "ok")]
    assert found.duration_s.tolist() == [0.1] * 3


async def test_the_example_page(tmp_path: Path) -> None:
    assert len(EXAMPLE.read_text().splitlines()) <= 20
    paths = run_folder(tmp_path / "run")
    await store(paths)
    command = [sys.executable, EXAMPLE, paths.root]
    done = await asyncio.to_thread(
        subprocess.run, command, cwd=tmp_path, capture_output=True, encoding="utf-8", check=True
    )
    assert "## Success by minute" in done.stdout and "0.667" in done.stdout  # two of three
    assert (tmp_path / "example.png").read_bytes().startswith(b"\x89PNG")
    page = EXAMPLE.with_name("example.md").read_text()
    assert [line for line in page.splitlines() if line.startswith("## ")] == [
        line for line in done.stdout.splitlines() if line.startswith("## ")
    ]
