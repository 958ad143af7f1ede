"""`hpcrl bench store DIR`: how near the store comes to what this filesystem can do. Ratios within one run, medians.

Each figure compares the store's way with the plainest one that does the same work, one after the other and many times
over, on data of one generator: Zipf-distributed token ids, source code as text, steps of about 17 kB.

Over 400 lines: one part to each figure, which share little.
"""

from __future__ import annotations

import asyncio
import functools
import gc
import os
import random
import shutil
import statistics
import sys
import time
from collections import deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np

from hpcrl.layout import RunPaths
from hpcrl.store.compact import compact, shards
from hpcrl.store.index import Store
from hpcrl.store.link import LogClient, LogServer
from hpcrl.store.log import Log
from hpcrl.store.pack import Packer
from hpcrl.store.records import COLUMNS, Record, joined, prompt, raw_frame, split
from hpcrl.store.sample import GROUP, Sample, sample_steps
from hpcrl.store.segment import CLOSED, segments
from hpcrl.store.shard import Shard, write_shard

REPEATS = 5
BATCH = 64  # steps to a sync
METADATA_CALLS = frozenset(f"os.{name}" for name in ("rename", "remove", "listdir", "scandir", "mkdir")) | {"open"}


Part = Callable[[Path, float], dict[str, Any]]


def run_bench(
    folder: Path, more: Mapping[str, Part], *, scale: float, say: Callable[[str], None] = lambda text: None
) -> dict[str, Any]:
    """All figures, and those of `more` parts. `scale` < 1 shrinks the amounts (the result says how far)."""
    found: dict[str, Any] = {"scale": scale}
    with _workspace(folder) as root:
        parts: dict[str, Part] = {
            "append": bench_append,
            "compact and read": bench_compact,
            "deltas": bench_deltas,
            "persisting": bench_persist,
            "a long trajectory": bench_long,
            "index": bench_index,
        }
        for name, part in {**parts, **more}.items():
            began = time.monotonic()
            part_root = root / name.replace(" ", "-")
            part_root.mkdir()
            found |= part(part_root, scale)
            shutil.rmtree(part_root)
            say(f"{name}: {time.monotonic() - began:.1f} s")
    return found


@contextmanager
def _workspace(folder: Path) -> Iterator[Path]:
    root = folder / f".hpcrl-bench-{os.getpid()}"
    root.mkdir(parents=True)
    try:
        yield root
    finally:
        shutil.rmtree(root, ignore_errors=True)


def _paths(root: Path) -> RunPaths:
    paths = RunPaths(root)
    paths.make()
    paths.config.write_text("{}\n")
    return paths


def _log(paths: RunPaths, **options: Any) -> Log:
    values: dict[str, Any] = {"segment_bytes": 64 << 20, "segment_age_s": 3600.0, "commit_interval_s": 0.0}
    return Log(paths.log, "bench", **{**values, **options})


def _fresh(record: Record) -> Record:
    """The same record with nothing computed yet."""
    names = ("kind", "trajectory", "attempt", "step", "parent", "meta", *COLUMNS)
    return Record(**{name: getattr(record, name) for name in names})


# ---- append ---------------------------------------------------------------------------------------------------------


def bench_append(root: Path, scale: float) -> dict[str, Any]:
    """64 steps to a sync, while the next 64 are made ready; against ready bytes written and synced.

    `append_vs_raw`: of records that are encoded: framed, checksummed, through the log, to durable. `encode_vs_raw`:
    from Python objects, encoded and hashed besides, by the same process; in a run that is shared by a node's hosts.
    """
    count = BATCH * max(4, int(64 * scale))  # 64: a segment, whose beginning and end cost several syncs
    made = list(sample_steps(count))
    batches = [[record for step in made[start : start + BATCH] for record in step] for start in range(0, count, BATCH)]
    ready = [b"".join(record.frame() for record in batch) for batch in batches]
    ratios, encoded, rates = [], [], []
    for number in range(REPEATS + 1):
        plain = _write_raw(root / f"raw-{number}", ready)
        ours = asyncio.run(_append(_paths(root / f"run-{number}"), batches))
        objects = [[_fresh(record) for record in batch] for batch in batches]
        slower = asyncio.run(_append(_paths(root / f"encode-{number}"), objects))
        if number:  # the first warms up
            ratios.append(plain / ours)
            encoded.append(plain / slower)
            rates.append(sum(map(len, ready)) / ours / 1e6)
        for name in ("run", "encode"):
            shutil.rmtree(root / f"{name}-{number}")
        (root / f"raw-{number}").unlink()
    median = statistics.median
    return {"append_vs_raw": median(ratios), "encode_vs_raw": median(encoded), "append_mb_s": median(rates)}


def _write_raw(path: Path, batches: Sequence[bytes]) -> float:
    fd = os.open(path, os.O_WRONLY | os.O_CREAT, 0o644)
    began = time.perf_counter()
    for data in batches:
        os.write(fd, data)
        os.fdatasync(fd)
    spent = time.perf_counter() - began
    os.close(fd)
    return spent


async def _append(paths: RunPaths, batches: Sequence[Sequence[Record]]) -> float:
    gc.collect()
    log = _log(paths)
    began = time.perf_counter()
    waiting: deque[asyncio.Future[Any]] = deque()
    for batch in batches:
        waiting.append(log.submit([record.frame() for record in batch]))
        await (waiting.popleft() if len(waiting) > 1 else asyncio.sleep(0))  # one is synced, one waits for that
    await waiting.popleft()
    spent = time.perf_counter() - began
    await log.close()
    return spent


async def _fill(paths: RunPaths, records: Iterator[Sequence[Record]], chunk: int = 512) -> None:
    log = _log(paths)
    frames: list[bytes] = []
    for step in records:
        frames += [record.frame() for record in step]
        if len(frames) >= chunk:
            await log.append(frames)
            frames = []
    await log.append(frames)
    await log.close()


# ---- compaction and reading -----------------------------------------------------------------------------------------


def bench_compact(root: Path, scale: float) -> dict[str, Any]:
    """Segments to a shard, against reading them and writing the same bytes; random steps, against bare pread."""
    count = max(500, int(5000 * scale))
    source = _paths(root / "source")
    asyncio.run(_fill(source, sample_steps(count)))
    ratios = []
    for number in range(REPEATS + 1):
        copy = root / f"copy-{number}"
        shutil.copytree(source.root, copy)
        os.sync()
        files = segments(RunPaths(copy).log, CLOSED)
        began = time.perf_counter()
        with (copy / "raw").open("wb") as out:
            for path in files:
                out.write(path.read_bytes())
            out.flush()
            os.fsync(out.fileno())
        plain = time.perf_counter() - began
        (copy / "raw").unlink()
        began = time.perf_counter()
        report = compact(RunPaths(copy))
        assert report.shards and not report.damaged
        if number:
            ratios.append(plain / (time.perf_counter() - began))
        if number < REPEATS:
            shutil.rmtree(copy)
    found = {"compact_vs_raw": statistics.median(ratios)}
    return found | _bench_read(RunPaths(root / f"copy-{REPEATS}"), count)


def _bench_read(paths: RunPaths, count: int) -> dict[str, Any]:
    chance = random.Random(0)
    with Store(paths) as store:
        names = list(store.names())
    ratios = []
    for number in range(2 * REPEATS + 1):
        picked = [(chance.choice(names), chance.randrange(20)) for _ in range(256)]
        with Store(paths) as store:
            ranges = _ranges(store, picked)
        _forget(paths)
        with Store(paths) as store:
            began = time.perf_counter()
            store.steps(picked)
            ours = time.perf_counter() - began
        _forget(paths)
        files = {path: os.open(path, os.O_RDONLY) for path, _, _ in ranges}
        began = time.perf_counter()
        for path, offset, size in ranges:
            os.pread(files[path], size, offset)
        plain = time.perf_counter() - began
        for fd in files.values():
            os.close(fd)
        if number:
            ratios.append(plain / ours)
    return {"batch_read_vs_pread": statistics.median(ratios), "read_steps": count}


def _ranges(store: Store, picked: Sequence[tuple[str, int]]) -> list[tuple[Path, int, int]]:
    """(file, offset, size) of what `Store.steps` has to read."""
    ranges: list[tuple[Path, int, int]] = []

    def noting(shard: Shard) -> Callable[[int, int], bytes]:
        read = shard._pread

        def pread(offset: int, size: int) -> bytes:
            ranges.append((shard.path, offset, size))
            return read(offset, size)

        return pread

    for shard in store._shards.values():
        shard._pread = noting(shard)  # type: ignore[method-assign, assignment]
    store.steps(picked)
    return ranges


def _forget(paths: RunPaths) -> None:
    """Take the shards out of the page cache."""
    for path in shards(paths):
        fd = os.open(path, os.O_RDONLY)
        os.fsync(fd)
        os.posix_fadvise(fd, 0, 0, os.POSIX_FADV_DONTNEED)
        os.close(fd)


# ---- deltas ---------------------------------------------------------------------------------------------------------


def bench_deltas(root: Path, scale: float) -> dict[str, Any]:
    """20 steps of 2k tokens, prompt of 2k, groups of 16: tokens stored, against every step with its whole context."""
    sample = Sample(1)
    opening = prompt(sample.ids(2000))
    paths = _paths(root / "run")
    records = [list(sample.trajectory(f"g.{member}", steps=20, opening=opening)) for member in range(GROUP)]
    asyncio.run(_fill(paths, iter([[opening], *records])))
    compact(paths)
    whole = sum(2000 * (step + 2) for step in range(20)) * GROUP
    with Store(paths) as store:
        stored = sum(shard.directory["datasets"]["tokens/ids"][1] for shard in store._shards.values())
        head = store.head("g.3")
        assert head is not None
        rows = [row for row in store._walk("g.3", head) if row.num_tokens]  # as Store.sequence puts a context together
        pieces = [store._tokens("g.3", store._located("g.3", run))["ids"] for run in store._runs(rows)]
    parts = [opening.ids, *pieces]
    flat = np.concatenate(parts)
    ratios = []
    for _ in range(200):
        began = time.perf_counter()
        joined(parts, "ids")
        middle = time.perf_counter()
        flat.copy()
        ratios.append((middle - began) / (time.perf_counter() - middle))
    return {"dedup_ratio": whole / stored, "rebuild_vs_memcpy": statistics.median(ratios)}


# ---- persisting -----------------------------------------------------------------------------------------------------


def bench_persist(root: Path, scale: float) -> dict[str, Any]:
    """500 trajectories of one host, a step a second each, through socket and log at the default pace."""
    return asyncio.run(_persist(_paths(root / "run"), max(3.0, 10.0 * scale)))


async def _persist(paths: RunPaths, seconds: float, trajectories: int = 500) -> dict[str, Any]:
    made = [list(step) for step in sample_steps(trajectories * 2, seed=2, steps=2)]
    calls = 0

    def count(event: str, _: Any) -> None:
        nonlocal calls
        calls += counting and event in METADATA_CALLS

    counting = False
    sys.addaudithook(count)
    log = _log(paths, commit_interval_s=0.5, segment_age_s=60.0)
    server = LogServer(log, paths.root / "log.sock")
    await server.start()
    done = 0
    waits: list[float] = []
    async with LogClient(paths.root / "log.sock") as client:
        chance = random.Random(3)

        def waited(began: float, _: Any) -> None:
            waits.append(time.monotonic() - began)

        async def live(number: int) -> None:
            nonlocal done
            await asyncio.sleep(chance.random())
            while time.monotonic() < until:
                began = time.monotonic()
                future: asyncio.Future[Any] | None = None
                for record in made[2 * number]:
                    future = client.append(_fresh(record))
                assert future is not None
                future.add_done_callback(functools.partial(waited, began))
                done += 1
                await asyncio.sleep(1.0)

        async def idle() -> None:
            await asyncio.sleep(chance.random())
            for _ in range(max(1, int(seconds / 2))):
                await asyncio.sleep(1.0)

        cpu = time.process_time()
        await asyncio.gather(*(idle() for _ in range(trajectories)))
        spare = time.process_time() - cpu
        counting, syncs, calls = True, log.num_syncs, 0
        began, until = time.monotonic(), time.monotonic() + seconds
        cpu = time.process_time()
        await asyncio.gather(*(live(number) for number in range(trajectories)))
        await client.flush()
        cpu, wall = time.process_time() - cpu - 2 * spare, time.monotonic() - began
        counting, syncs = False, log.num_syncs - syncs
    await server.close()
    await log.close()
    return {
        "persist_share": (cpu + log.sync_s * syncs) / done,  # of a step of one second
        "syncs_per_s": syncs / wall,
        "metadata_ops_per_1000_steps": 1000 * (calls + syncs) / done,
        "receipt_wait_s": statistics.median(waits),
    }


# ---- one long trajectory --------------------------------------------------------------------------------------------


def bench_long(root: Path, scale: float) -> dict[str, Any]:
    """10,000 steps of one trajectory: append, read, resume, view; what a step costs at the end, against the 100th."""
    steps = max(1000, int(10_000 * scale))
    paths = _paths(root / "run")
    sample = Sample(4)
    opening = prompt(sample.ids(200))
    records = list(sample.trajectory("long.0", steps=steps, act=20, observe=20, opening=opening))
    costs: dict[str, float] = {}
    early, late = records[1:401], records[-401:-1]

    def timed(part: Sequence[Record]) -> float:
        began = time.process_time()
        for record in part:
            _fresh(record).frame()
        return time.process_time() - began

    costs["append"] = statistics.median(timed(late) / timed(early) for _ in range(REPEATS))
    asyncio.run(_fill(paths, iter([[opening, *records]])))
    heads = {count: records[2 * count].hash for count in (steps // 10, steps)}
    compact(paths)
    for name in ("read", "resume", "view"):
        spent: dict[int, list[float]] = {count: [] for count in heads}
        for _ in range(REPEATS):
            for count, head in heads.items():
                with Store(paths) as store:
                    store.rows("long.0")  # the rows are read whole, whatever the head: not what is compared
                    began = time.perf_counter()
                    if name == "read":
                        store.sequence("long.0", head, 0.0)
                    elif name == "resume":
                        store.complete("long.0", head)
                        store.context("long.0", head)
                    else:  # one after the other, as they are shown
                        for row in store._walk("long.0", head):
                            store.record("long.0", row.hash)
                    spent[count].append(time.perf_counter() - began)
        medians = {count: statistics.median(times) / count for count, times in spent.items()}
        costs[name] = medians[steps] / medians[steps // 10]
    return {"long_step_ratio": max(costs.values()), **{f"long_{name}_ratio": value for name, value in costs.items()}}


# ---- the index ------------------------------------------------------------------------------------------------------


def bench_index(root: Path, scale: float) -> dict[str, Any]:
    """A store of a million small steps: opened, queried, one trajectory found."""
    paths = _paths(root / "run")
    per_shard, steps = 20_000, 20
    num_shards = max(2, int(50 * scale))
    sample = Sample(5)
    frames = []
    for number in range(per_shard // steps):
        for record in sample.trajectory(f"x{number:06d}", steps=steps, act=4, observe=4):
            frames.append(record.frame())
    for shard in range(num_shards):  # the same records under other names: what an index costs is in their number
        packer = Packer()
        for frame in frames:
            kind, digest, payload, _ = raw_frame(memoryview(frame), 0)
            parts = split(kind, payload)
            parts[0].trajectory = f"s{shard:04d}.{parts[0].trajectory}"
            packer.add(0, 0, digest, parts)
        source = {"name": f"bench-{shard}.seg", "uid": f"{shard:032x}", "node": "bench", "number": shard}
        write_shard(paths.shards / f"{shard + 1:06d}.h5", packer, [{**source, "records": len(packer)}], {})
    opens, queries, finds = [], [], []
    for number in range(REPEATS):
        _forget(paths)
        began = time.perf_counter()
        with Store(paths) as store:
            opens.append(time.perf_counter() - began)
            store.query()
            for _ in range(REPEATS):
                began = time.perf_counter()
                store.query(kind="train", task_kind="fix", reward_below=0.5)
                queries.append(time.perf_counter() - began)
        began = time.perf_counter()
        name = f"s{num_shards // 2:04d}.x{number:06d}"
        with Store(paths, only=name) as store:
            assert store.head(name)
        finds.append(time.perf_counter() - began)
    return {
        "index_steps": num_shards * per_shard,
        "open_s": statistics.median(opens),
        "query_ms": 1000 * statistics.median(queries),
        "find_s": statistics.median(finds),
    }
