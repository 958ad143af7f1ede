"""What the tests of the agent loop share: a node's log, a ticket for `find`, a loop over real parts."""

from __future__ import annotations

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

from hpcrl_envs import find

from hpcrl.layout import RunPaths
from hpcrl.rollout.loop import Loop, Where
from hpcrl.rollout.render import Renderer
from hpcrl.rollout.scripted import ScriptedEngine
from hpcrl.sandbox.memory import MemorySandbox
from hpcrl.store.index import Store
from hpcrl.store.link import LogClient, LogServer
from hpcrl.store.log import Log
from hpcrl.types import Sampling, Task, Ticket

WHERE = Where(node="n", job="1", boot_id="b")
TASK = Task(environment="find", payload={"key": "N", "files": {"D7": "418", "N5": "233", "V1": "902", "Y6": "118"}})


@asynccontextmanager
async def node_log(folder: Path, node: str = "n", scratch: Path | None = None) -> AsyncIterator[LogClient]:
    """A host's way to the log of a node whose run folder is `folder`."""
    paths = RunPaths(folder)
    paths.make()
    owner = Log(paths.log, node, segment_bytes=1 << 20, segment_age_s=60, commit_interval_s=0, scratch=scratch)
    server = LogServer(owner, folder / f"{node}.sock")
    await server.start()
    async with LogClient(folder / f"{node}.sock") as client:
        yield client
    await server.close()
    await owner.close()


def ticket(**over: Any) -> Ticket:
    values: dict[str, Any] = {
        "trajectory": "find-x.p1n0.0", "attempt": 1, "kind": "train", "task": TASK, "group": "find-x.p1n0", "member": 0,
        "phase": "rl", "seed": 7, "sampling": Sampling(temperature=1.0, max_tokens=14), "max_steps": 5,
        "max_context": 200, "deadline_s": 20.0, "incarnation": 1,
    }  # fmt: skip
    return Ticket(**(values | over))


def right_way(transcript: str) -> str:
    """Plays the task without a mistake, from what it sees alone."""
    seen = transcript.split("<t>")[1:]
    if not seen:
        return "ls"
    if len(seen) == 1:
        return "cat N5"
    return "answer " + seen[1].split("<e>")[0]


def loop(log: Any, renderer: Renderer, task: Ticket, **over: Any) -> Loop:
    values: dict[str, Any] = {
        "engine": ScriptedEngine(right_way, renderer), "environment": find.make(task.task, task.seed),
        "sandbox": MemorySandbox(), "log": log, "renderer": renderer, "where": WHERE,
    }  # fmt: skip
    return Loop(task, **(values | over))


async def stored(tmp_path: Path) -> Store:
    return Store(RunPaths(tmp_path), open_segments=True)
