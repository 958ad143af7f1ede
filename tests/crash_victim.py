"""The crash test's victim: a process that appends, seals and compacts until it is killed. crash.py judges what is left.

It tells of each acknowledgement over a pipe, after the store gave it: what is expected lies outside the victim. A line
is `a <hash> <kind> <attempt> <trajectory> <parent> <node> <segment> <offset> <crc32c of the payload>` for a record that
was acknowledged, `s <hash>` for one that is about to be appended once more.
"""

from __future__ import annotations

import asyncio
import contextlib
import importlib
import importlib.util
import os
import random
import stat
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from crc32c import crc32c
from io_faults import KILL, Io
from store_parts import act, adopt, end, observe

from hpcrl.layout import RunPaths
from hpcrl.store.compact import compact
from hpcrl.store.index import Store
from hpcrl.store.link import LogClient, LogServer
from hpcrl.store.log import Log
from hpcrl.store.records import Kind, Record, content, prompt
from hpcrl.store.seal import seal_dead_here
from hpcrl.types import Receipt

# Mends what is mendable in a run folder, where this version has it; then it runs beside compaction, and is killed too.
REPAIR: Callable[[RunPaths], Any] | None = (
    getattr(importlib.import_module("hpcrl.store.repair"), "repair", None)
    if importlib.util.find_spec("hpcrl.store.repair")
    else None
)


@dataclass(frozen=True, slots=True, kw_only=True)
class Plan:
    """One life of the victim, drawn from the seed at each restart."""

    seed: int
    nodes: tuple[str, ...]
    num_hosts: int  # per node; one of them is in the owner's process, without a socket
    num_tasks: int  # trajectories at a time per host
    segment_bytes: int
    segment_age_s: float
    commit_interval_s: float
    tokens: int  # of a record, at most
    seal_every_s: float  # 0: never
    compact_every_s: float  # in the victim; 0: never
    beside: bool  # whether a process of its own compacts as well
    shard_bytes: int
    life_s: float  # after which it is killed from outside
    from_first: bool  # counted from its first acknowledgement, not from its start
    kill_at: int  # I/O call at which it kills itself before that; 0: none
    beside_kill_at: int


def draw(chance: random.Random) -> Plan:
    by_call = chance.random() < 0.5
    return Plan(
        seed=chance.randrange(1 << 30),
        nodes=("n1", "n2")[: chance.choice((1, 1, 2))],
        num_hosts=chance.choice((1, 2, 4)),
        num_tasks=chance.choice((1, 3, 6)),
        segment_bytes=int(2 ** chance.uniform(10, 17)),
        segment_age_s=chance.choice((0.01, 0.05, 0.2, 60.0)),
        commit_interval_s=chance.choice((0.0, 0.0, 0.002, 0.02)),
        tokens=chance.choice((1, 20, 500, 5000)),
        seal_every_s=chance.choice((0.0, 0.01, 0.05)),
        compact_every_s=chance.choice((0.0, 0.005, 0.03)),
        beside=chance.random() < 0.3,
        shard_bytes=int(2 ** chance.uniform(11, 20)),
        life_s=0.3 if by_call else chance.uniform(0, 0.3),
        from_first=by_call or chance.random() < 0.8,
        kill_at=int(2 ** chance.uniform(0, 10)) if by_call else 0,
        beside_kill_at=chance.choice((0, int(2 ** chance.uniform(0, 8)))),
    )


def run(paths: RunPaths, plan: Plan, sockets: Path, report: int) -> None:
    """The victim itself. Ends by SIGKILL, or by an error (which is a failure of the test)."""
    with Io(paths.root, KILL, plan.kill_at):
        asyncio.run(_Victim(paths, plan, sockets, report).run())


def beside(paths: RunPaths, plan: Plan) -> None:
    """Another process that compacts, as control's does; also closes what dead owners left open."""
    with Io(paths.root, KILL, plan.beside_kill_at):
        while True:
            seal_dead_here(paths)
            compact(paths, shard_bytes=plan.shard_bytes)
            if REPAIR is not None:
                REPAIR(paths)
            time.sleep(0.005)


@dataclass(frozen=True, slots=True)
class _Unfinished:
    attempt: int
    head: Record
    unsettled: list[Record]  # of its chain: what lies in open segments, whose owners may not have synced it


class _Victim:
    def __init__(self, paths: RunPaths, plan: Plan, sockets: Path, report: int) -> None:
        self.paths, self.plan, self.sockets, self.report = paths, plan, sockets, report
        self.chance = random.Random(plan.seed)
        self.serial = 0

    async def run(self) -> None:
        plan = self.plan
        logs = [
            Log(
                self.paths.log,
                node,
                segment_bytes=plan.segment_bytes,
                segment_age_s=plan.segment_age_s,
                commit_interval_s=plan.commit_interval_s,
            )
            for node in plan.nodes
        ]
        left = self._unfinished()
        async with contextlib.AsyncExitStack() as clients, asyncio.TaskGroup() as tasks:
            for log in logs:
                socket = self.sockets / f"{log.node}.{os.getpid()}.sock"
                server = LogServer(log, socket)
                await server.start()
                for host in range(plan.num_hosts):
                    client = await clients.enter_async_context(LogClient(socket)) if host else None
                    for _ in range(plan.num_tasks):
                        tasks.create_task(self._host(_Writer(self, log, client), left))
                if plan.seal_every_s:
                    tasks.create_task(self._seal(log))
            if plan.compact_every_s:
                tasks.create_task(self._compact())

    async def _seal(self, log: Log) -> None:
        while True:
            await asyncio.sleep(self.plan.seal_every_s)
            await log.seal()

    async def _compact(self) -> None:
        while True:
            await asyncio.sleep(self.plan.compact_every_s)
            await asyncio.to_thread(compact, self.paths, shard_bytes=self.plan.shard_bytes)

    def _unfinished(self) -> list[_Unfinished]:
        """What control would find at a restart: trajectories that have no END."""
        with Store(self.paths, open_segments=True) as store:
            return [
                _Unfinished(
                    info.attempt,
                    store.record(info.trajectory, info.head),
                    store.unsettled(info.trajectory, info.head),
                )
                for info in map(store.info, store.names())
                if info is not None and info.status == "open"
            ]

    async def _host(self, writer: _Writer, left: list[_Unfinished]) -> None:
        while True:
            if left and self.chance.random() < 0.5:
                found = left.pop(self.chance.randrange(len(left)))
                for record in found.unsettled:
                    writer.again(record)
                await self._attempt(writer, found.head.trajectory, found.attempt + 1, found.head)
            else:
                self.serial += 1
                await self._attempt(writer, f"{os.getpid()}.{self.plan.seed}.{self.serial}", 1, None)
            await asyncio.sleep(0)

    async def _attempt(self, writer: _Writer, name: str, attempt: int, before: Record | None) -> None:
        """An attempt, from its ADOPT on; perhaps it is granted anew on the way, and the old one writes on a while."""
        chance = self.chance
        step = before.step if before is not None else -1
        last = writer.append(adopt(name, attempt, before.hash if before is not None else "", step))
        fresh = before is None or before.kind is Kind.ADOPT
        for _ in range(chance.randrange(1, 6)):
            step += 1
            start = prompt([chance.randrange(20)])
            if fresh:
                writer.append(start)
            ids = [chance.randrange(1 << 20) for _ in range(chance.randrange(self.plan.tokens) + 1)]
            last = writer.append(act(last, step, ids, root=start.hash if fresh else "", mark=f"{chance.random()}"))
            if chance.random() < 0.05:
                writer.again(last)  # as if the answer had been lost
            fresh = False
            if chance.random() < 0.3:
                await writer.settle()
            if chance.random() < 0.15:
                old = last
                attempt += 1
                last = writer.append(adopt(name, attempt, old.hash, step))
                writer.append(observe(old, [chance.randrange(9)], f"late {chance.random()}"))  # an orphan
            whole = b"unseen" * chance.randrange(20) if chance.random() < 0.3 else b""
            if whole:
                writer.append(content(whole))
            last = writer.append(observe(last, [chance.randrange(9)], f"{chance.random()}", whole=whole))
            if chance.random() < 0.7:
                await writer.settle()
        if chance.random() < 0.6:
            last = writer.append(end(last))
        if chance.random() < 0.2:
            meta = {"source": "judge", "value": chance.random(), "wall": 3.0}
            writer.append(Record(kind=Kind.REWARD, trajectory=name, step=step, meta=meta))
        if chance.random() < 0.2:
            meta = {"state": "DONE", "fault": None, "waited_s": chance.random(), "wall": 1, "mono": 2, "boot_id": "b"}
            writer.append(Record(kind=Kind.TRANSITION, trajectory=name, attempt=attempt, meta=meta))
        await writer.settle()


class _Writer:
    """Appends through a socket, or (no client) straight to the log, and reports what was acknowledged."""

    def __init__(self, victim: _Victim, log: Log, client: LogClient | None) -> None:
        self._victim, self._log, self._client = victim, log, client
        self._waits: list[asyncio.Future[Any]] = []

    def again(self, record: Record) -> None:
        os.write(self._victim.report, f"s {record.hash}\n".encode())
        self.append(record)

    def append(self, record: Record) -> Record:
        wait: asyncio.Future[Any]
        wait = self._client.append(record) if self._client is not None else self._log.submit([record.frame()])
        wait.add_done_callback(lambda done: self._acknowledged(record, done))
        self._waits.append(wait)
        return record

    def _acknowledged(self, record: Record, done: asyncio.Future[Any]) -> None:
        if done.cancelled() or done.exception():
            return
        result = done.result()
        if isinstance(result, Receipt):
            node, segment, offset = result.node, result.segment, result.offset
        else:
            node, (segment, offset) = self._log.node, result[0]
        line = (
            f"a {record.hash} {record.kind.name} {record.attempt} {record.trajectory or '-'} {record.parent or '-'} "
            f"{node} {segment} {offset} {crc32c(record.payload)}\n"
        )
        os.write(self._victim.report, line.encode())

    async def settle(self) -> None:
        waits, self._waits = self._waits, []
        await asyncio.gather(*waits)


def without_sync() -> None:
    """The store with its syncs taken out, those of folders excepted."""
    fsync = os.fsync
    os.fdatasync = lambda fd: None
    os.fsync = lambda fd: fsync(fd) if stat.S_ISDIR(os.fstat(fd).st_mode) else None
