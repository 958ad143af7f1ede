"""A run folder with a tiny model and trajectories in a real store and ledger, for the learner's tests."""

from __future__ import annotations

import asyncio
from pathlib import Path
from typing import Any

import numpy as np

from hpcrl import config as configs
from hpcrl.config import Config
from hpcrl.layout import RunPaths, publish
from hpcrl.learner.models import make_tiny
from hpcrl.store.ledger import LedgerWriter
from hpcrl.store.log import Log
from hpcrl.store.records import Kind, Record, prompt
from hpcrl.types import Entry

END_ID = 4


def make_config(phases: list[dict[str, Any]], **tables: Any) -> Config:
    return Config.model_validate({"phase": phases, **tables})


def make_run(root: Path, config: Config, model: Path) -> RunPaths:
    paths = RunPaths(root)
    paths.make()
    publish(paths.config, configs.dump(config))
    paths.model.mkdir()
    for file in model.iterdir():
        (paths.model / file.name).write_bytes(file.read_bytes())
    return paths


def make_model(folder: Path, seed: int = 0) -> Path:
    make_tiny(folder, seed, stages=())
    return folder


def trajectory(
    name: str, rng: np.random.Generator, *, version: int = 0, logprobs: Any = None
) -> tuple[list[Record], np.ndarray, np.ndarray]:
    """Two turns of random tokens: its records, its ids [T] and where they were sampled [T].

    `logprobs(ids) -> [T]` gives the behaviour logprob of each token after those before it; zeros without it.
    """
    opening = rng.integers(6, 102, size=8)
    first = np.append(rng.integers(6, 102, size=int(rng.integers(2, 9))), END_ID)
    result = rng.integers(6, 102, size=int(rng.integers(2, 7)))
    second = np.append(rng.integers(6, 102, size=int(rng.integers(2, 9))), END_ID)
    ids = np.concatenate([opening, first, result, second]).astype(np.int32)
    sampled = np.repeat([False, True, False, True], [len(opening), len(first), len(result), len(second)])
    scores = logprobs(ids) if logprobs else np.zeros(len(ids), np.float32)
    a, b, c = np.cumsum([len(opening), len(first), len(result)])
    start = prompt(opening.astype(np.int32))
    records = [start]
    parent = ""
    for kind, step, part, meta in (
        (Kind.ADOPT, -1, slice(0, 0), {}),
        (Kind.ACT, 0, slice(a, b), {"root": start.hash}),
        (Kind.OBSERVE, 0, slice(b, c), {}),
        (Kind.ACT, 1, slice(c, None), {"root": ""}),
        (Kind.END, 1, slice(0, 0), {"status": "COMPLETED"}),
    ):
        act = kind is Kind.ACT
        record = Record(
            kind=kind,
            trajectory=name,
            attempt=1,
            step=step,
            parent=parent,
            meta=meta,
            ids=ids[part],
            logprobs=scores[part] if act else np.zeros(0, np.float32),
            versions=np.full(len(ids[part]), version, np.int32) if act else np.zeros(0, np.int32),
            sampled=np.ones(len(ids[part]), bool) if act else np.zeros(0, bool),
        )
        records.append(record)
        parent = record.hash
    return records, ids, sampled


def entry(name: str, records: list[Record], ids: np.ndarray, sampled: np.ndarray, **values: Any) -> Entry:
    fields: dict[str, Any] = {
        "trajectory": name,
        "attempt": 1,
        "head": records[-1].hash,
        "group": name,
        "phase": "warmup",
        "reward": 1.0,
        "num_tokens": len(ids),
        "num_sampled": int(sampled.sum()),
        "num_steps": 2,
        "min_version": 0,
        "group_size": 1,
    }
    return Entry(**{**fields, **values})


def store_and_enter(paths: RunPaths, rows: list[tuple[list[Record], Entry]]) -> None:
    """Append all records through a real log, close its segment, and write the ledger."""

    async def write() -> None:
        log = Log(paths.log, "n1", segment_bytes=1 << 26, segment_age_s=60.0, commit_interval_s=0.0)
        await log.append([record.frame() for records, _ in rows for record in records])
        await log.close()

    asyncio.run(write())
    ledger = LedgerWriter(paths)
    ledger.append([row for _, row in rows])
    ledger.close()
