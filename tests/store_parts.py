"""What the store's tests share: real records, a run folder, a log."""

from __future__ import annotations

import asyncio
import subprocess
import sys
from hashlib import sha256
from pathlib import Path
from typing import Any

import numpy as np

from hpcrl.layout import RunPaths
from hpcrl.store.compact import shards
from hpcrl.store.log import Log
from hpcrl.store.records import Kind, Record, content, prompt
from hpcrl.store.segment import CLOSED, segments
from hpcrl.store.shard import Shard


def run_folder(root: Path) -> RunPaths:
    paths = RunPaths(root)
    paths.make()
    paths.config.write_text("{}\n")
    return paths


def open_log(paths: RunPaths, node: str = "n1", **options: Any) -> Log:
    sizes: dict[str, Any] = {"segment_bytes": 1 << 20, "segment_age_s": 60.0, "commit_interval_s": 0.0}
    return Log(paths.log, node, **{**sizes, **options})


TASK = {"environment": "find", "payload": {"n": 3}, "kind": ""}


def adopt(trajectory: str, attempt: int = 1, parent: str = "", step: int = -1) -> Record:
    meta = {
        "task": TASK,
        "kind": "train",
        "group": "g",
        "member": 0,
        "phase": "rl",
        "seed": 7,
        "sampling": {},
        "job": "1",
        "node": "n1",
        "incarnation": 1,
        "sandbox": "",
        "pinned": -1,
        "wall": 1.0,
        "mono": 2.0,
        "boot_id": "b",
        "state": "",
    }
    return Record(kind=Kind.ADOPT, trajectory=trajectory, attempt=attempt, parent=parent, step=step, meta=meta)


def act(parent: Record, step: int, ids: list[int], *, root: str = "", version: int = 4, mark: str = "") -> Record:
    call = {"name": "ls", "arguments": {"path": "."}, "key": f"{step}/0", "legal": True, "effects": "pure"}
    meta = {
        "root": root,
        "tools": [],
        "calls": [call],
        "finish_reason": "stop",
        "seed": 1,
        "request": mark,
        "spans": [[version, 0, len(ids)]],
        "cached_tokens": 0,
        "queue_s": 0.0,
        "duration_s": 0.5,
        "wall": 1.0,
        "mono": 2.0,
    }
    return Record(
        kind=Kind.ACT,
        trajectory=parent.trajectory,
        attempt=parent.attempt,
        step=step,
        parent=parent.hash,
        meta=meta,
        ids=np.array(ids, np.int32),
        logprobs=np.array([-0.1 * (i + 1) for i in range(len(ids))], np.float32),
        versions=np.full(len(ids), version, np.int32),
        sampled=np.ones(len(ids), np.bool_),
    )


def observe(parent: Record, ids: list[int], text: str = "é\ud800", *, whole: bytes = b"") -> Record:
    """`whole`: the content that its result names."""
    result = {"name": "ls", "status": "ok", "duration_s": 0.1, "cut_reason": "", "unseen_bytes": 0, "unseen_hash": ""}
    result |= {"content": sha256(whole).hexdigest()} if whole else {}
    meta = {
        "parts": [{"role": "tool", "type": "text", "text": text}],
        "results": [result],
        "state": "",
        "fault": None,
        "done": False,
        "truncated": "",
        "wall": 1.0,
        "mono": 2.0,
    }
    return Record(
        kind=Kind.OBSERVE,
        trajectory=parent.trajectory,
        attempt=parent.attempt,
        step=parent.step,
        parent=parent.hash,
        meta=meta,
        ids=np.array(ids, np.int32),
    )


def end(parent: Record, status: str = "COMPLETED", reward: float = 1.0, num_sampled: int = 4) -> Record:
    meta = {
        "status": status,
        "fault": None,
        "rewards": {"outcome": reward},
        "num_steps": 2,
        "num_sampled": num_sampled,
        "num_tokens": 9,
        "min_version": 4,
        "max_version": 4,
        "duration_s": 1.0,
        "num_calls": 1,
        "num_valid_calls": 1,
        "trajectory": parent.trajectory,
        "attempt": parent.attempt,
        "kind": "train",
        "group": "g",
        "phase": "rl",
        "wall": 1.0,
        "mono": 2.0,
    }
    step, attempt = parent.step, parent.attempt
    return Record(
        kind=Kind.END, trajectory=parent.trajectory, attempt=attempt, step=step, parent=parent.hash, meta=meta
    )


def trajectory(
    name: str, *, prompt_ids: tuple[int, ...] = (1, 2, 3), steps: int = 2, whole: bytes = b""
) -> list[Record]:
    """A whole one: its PROMPT, ADOPT, `steps` of ACT and OBSERVE (the last without), END; first `whole`, the content
    that its OBSERVEs name."""
    start = prompt(prompt_ids)
    records = [*([content(whole)] if whole else []), start, adopt(name)]
    for step in range(steps):
        records.append(act(records[-1], step, [10 + step, 20], root=start.hash if step == 0 else ""))
        if step < steps - 1:
            records.append(observe(records[-1], [30 + step], whole=whole))
    return [*records, end(records[-1], num_sampled=2 * steps)]


async def write(paths: RunPaths, *names: str, segment_bytes: int = 1 << 20) -> None:
    """So many trajectories, in closed segments."""
    log = open_log(paths, segment_bytes=segment_bytes)
    for name in names:
        await log.append([record.frame() for record in trajectory(name)])
    await log.close()


def assert_same_store(one: RunPaths, other: RunPaths) -> None:
    """Two run folders hold the same shards, byte for byte but for their provenance, and the same segments; no more."""
    assert [path.name for path in shards(other)] == [path.name for path in shards(one)]
    for mine, theirs in zip(shards(one), shards(other), strict=True):
        a, b = Shard(mine), Shard(theirs)
        assert set(a.directory["datasets"]) == set(b.directory["datasets"])
        for name in a.directory["datasets"]:
            assert a.whole(name).tobytes() == b.whole(name).tobytes(), (mine, name)
    assert [path.name for path in segments(other.log, CLOSED)] == [path.name for path in segments(one.log, CLOSED)]
    assert not list(other.shards.glob("*.claim")) and not list(other.shards.glob(".*"))


_KILLER = """
import os, shutil, signal, sys
from pathlib import Path
from hpcrl.layout import RunPaths
source, target = sys.argv[1:]
EVENTS = ("open", "os.rename", "os.remove", "os.listdir", "os.scandir", "os.mkdir")
n = 0
while True:
    n += 1
    paths = RunPaths(Path(f"{target}/{n}"))
    shutil.copytree(source, paths.root)
    pid = os.fork()
    if not pid:
        left = [n]
        def hook(event, args):
            if event in EVENTS and str(args[0]).startswith(str(paths.root)):
                left[0] -= 1
                if not left[0]:
                    os.kill(os.getpid(), signal.SIGKILL)
        sys.addaudithook(hook)
        WORK
        os._exit(0)
    if os.waitpid(pid, 0)[1] == 0:
        break
"""


async def killed_everywhere(source: Path, target: Path, work: str) -> list[RunPaths]:
    """Do `work` (Python, of `paths`) on copies of a run folder, in children that are killed before the n-th file
    operation in it, for n = 1, 2, 3, … until one gets through; the copies."""
    target.mkdir()
    command = [sys.executable, "-c", _KILLER.replace("WORK", work), source, target]
    await asyncio.to_thread(subprocess.run, command, check=True)
    return [RunPaths(root) for root in target.iterdir()]
