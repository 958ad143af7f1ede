"""The one generator of benchmark data: Zipf-distributed token ids, source code as text, the shapes of agents' steps."""

from __future__ import annotations

import asyncio
import inspect
import json
import random
import shutil
from collections.abc import Iterator
from typing import Any

import numpy as np

from hpcrl.store.records import Kind, Record, prompt

VOCABULARY = 151_936
GROUP = 16


class Sample:
    """Trajectories as agents make them, the same for the same seed."""

    def __init__(self, seed: int = 0) -> None:
        rng = np.random.default_rng(seed)
        self._ids = (rng.zipf(1.2, 1 << 20) % VOCABULARY).astype("<i4")
        self._logprobs = -rng.exponential(0.7, 1 << 20).astype("<f4")
        modules = (asyncio.tasks, inspect, json, random, shutil)
        self._text = "".join(inspect.getsource(module) for module in modules)
        self._chance = random.Random(seed)

    def ids(self, count: int) -> Any:
        start = self._chance.randrange(len(self._ids) - count)
        return self._ids[start : start + count]

    def text(self, size: int) -> str:
        start = self._chance.randrange(len(self._text) - size)
        return self._text[start : start + size]

    def trajectory(
        self, name: str, *, steps: int, act: int = 400, observe: int = 1600, opening: Record | None = None
    ) -> Iterator[Record]:
        """ADOPT, then `steps` pairs of ACT and OBSERVE of so many tokens, then END."""
        opening = opening or prompt(self.ids(2000))
        group = name.rpartition(".")[0] or name
        version = self._chance.randrange(100)
        kind_of_task = self._chance.choice(("fix", "find", "plan"))
        task = {"environment": "bench", "payload": {"name": group}, "kind": kind_of_task}
        turns = [(kind, step) for step in range(steps) for kind in (Kind.ACT, Kind.OBSERVE)]
        parent = ""
        for kind, step in [(Kind.ADOPT, -1), *turns, (Kind.END, -1)]:
            wall = 1.7e9 + self._chance.random() * 1e6
            meta: dict[str, Any] = {"wall": wall, "mono": wall}
            arrays: dict[str, Any] = {}
            match kind:
                case Kind.ADOPT:
                    meta |= {"task": task, "kind": "train", "group": group, "phase": "rl"}
                case Kind.ACT:
                    more, arrays = self._act(act, version, step)
                    meta |= {**more, "root": "" if step else opening.hash}
                case Kind.OBSERVE:
                    meta |= self._observe(observe)
                    arrays = {"ids": self.ids(observe)}
                case _:
                    rewards = {"outcome": float(self._chance.random() < 0.4)}
                    meta |= {"status": "COMPLETED", "rewards": rewards, "fault": None, "duration_s": 60.0}
                    meta |= {"num_steps": steps, "num_sampled": act * steps}
                    meta |= {"min_version": version, "max_version": version}
            record = Record(kind=kind, trajectory=name, attempt=1, step=step, parent=parent, meta=meta, **arrays)
            parent = record.hash
            yield record

    def _act(self, count: int, version: int, step: int) -> tuple[dict[str, Any], dict[str, Any]]:
        start = self._chance.randrange(len(self._logprobs) - count)
        code = {"code": self.text(min(count, 300))}
        call = {"name": "python", "arguments": code, "key": f"k/{step}", "legal": True, "effects": "pure"}
        spans = [{"version": version, "start": 0, "stop": count}]
        return {"tools": [], "calls": [call], "finish_reason": "stop", "spans": spans}, {
            "ids": self.ids(count),
            "logprobs": self._logprobs[start : start + count],
            "versions": np.full(count, version, "<i4"),
            "sampled": np.ones(count, "?"),
        }

    def _observe(self, count: int) -> dict[str, Any]:
        part = {"role": "tool", "type": "text", "text": self.text(3 * count)}
        result = {"name": "python", "status": "ok", "duration_s": 0.4, "cut_reason": "", "unseen_bytes": 0}
        return {"parts": [part], "results": [result], "state": "", "fault": None, "done": False, "truncated": ""}


def sample_steps(count: int, seed: int = 0, steps: int = 20) -> Iterator[tuple[Record, ...]]:
    """So many steps, each its records (the first of a trajectory brings ADOPT, the last END)."""
    sample = Sample(seed)
    opening = prompt(sample.ids(2000))
    made = 0
    while made < count:
        if made // steps % GROUP == 0:
            opening = prompt(sample.ids(2000))
        name = f"t{made // steps // GROUP:06d}.{made // steps % GROUP}"
        records = list(sample.trajectory(name, steps=steps, opening=opening))
        for step in range(steps):
            part = records[1 + 2 * step : 3 + 2 * step]
            yield (*((opening, records[0]) if step == 0 else ()), *part, *(records[-1:] if step == steps - 1 else ()))
            made += 1
            if made == count:
                return
