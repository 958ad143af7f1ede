"""Carries out what flow decides, with Dask, and turns the world into flow's events.

Dask (workers come and go, tasks end) -+
progress/ (updates, versions) ---------+--> events -> Flow -> instructions -> tickets, ledger, loads, evals/
control/inbox (commands) --------------+

Over 400 lines, since one object meets all of the world's events; each watcher in it reads by itself.
"""

from __future__ import annotations

import asyncio
import contextlib
import errno
import json
import logging
import re
import shutil
import subprocess
import sys
import threading
import time
from collections import Counter, deque
from collections.abc import Coroutine, Iterator, Mapping
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

from distributed import Client, Scheduler, SchedulerPlugin

from hpcrl import flow as f
from hpcrl.config import Config, check_resume, dump, with_sets
from hpcrl.fleet import Fleet
from hpcrl.layout import RunPaths, is_full, node_name, publish, publish_json, read_json
from hpcrl.node import job_of
from hpcrl.observe.summary import plot
from hpcrl.restore import restore
from hpcrl.rollout.loop import DISK
from hpcrl.store.index import Store
from hpcrl.store.ledger import LedgerWriter, ProgressReader, UpdateRow, lineage
from hpcrl.store.seal import seal_ended
from hpcrl.types import Ended, Entry, EnvironmentFamily, HpcrlError, StoreError, Task
from hpcrl.workers.guest import LEAVING, TOPIC, ahead, versions
from hpcrl.workers.hosts import run_ticket

logger = logging.getLogger(__name__)

TICK_S = 0.25
PROBE_S = 1.0  # between two looks at a node's engines
END_GRACE_S = 30.0
MOVED = "moved"
CALL_S, LOAD_S = 30.0, 900.0  # for an answer; for one to a load
TRAJECTORY = re.compile(r"[A-Za-z0-9._-]{1,200}\.0")  # of one that a user asks for: the only one of its group
LEAST_FREE_BYTES = 1 << 20  # with less than that in the run folder's filesystem a run ends itself


class TaskStream:
    """The run's tasks by number (flow's `Tasks`), drawn from the environment's streams as far as needed."""

    def __init__(self, family: EnvironmentFamily, seed: int) -> None:
        self._family, self._seed = family, seed
        self._streams: dict[int, tuple[Iterator[Task], list[Task]]] = {}

    def train(self, phase: int, number: int) -> Task:
        return self._get(phase, number)

    def heldout(self, number: int) -> Task:
        return self._get(-1, number)

    def _get(self, key: int, number: int) -> Task:
        if key not in self._streams:
            # Phases draw different tasks; evaluations of runs that differ only in their seed share theirs.
            tasks = (
                self._family.tasks("heldout", 0) if key < 0 else self._family.tasks("train", self._seed * 1000 + key)
            )
            self._streams[key] = (iter(tasks), [])
        stream, drawn = self._streams[key]
        while len(drawn) <= number:
            task = next(stream)
            _check(task, self._family.name)
            drawn.append(task)
        return drawn[number]


def _check(task: Task, environment: str) -> None:
    """Raises HpcrlError for one that could not be stored, or run here."""
    if task.environment != environment:
        raise HpcrlError(f"a task of environment {task.environment!r}; this run has {environment!r}")
    if not isinstance(task.payload, Mapping) or not isinstance(task.kind, str):
        raise HpcrlError(f"a task of environment {environment!r}: payload must be a mapping and kind a string")
    try:
        json.dumps(dict(task.payload), allow_nan=False)
        if not all(isinstance(key, str) for key in task.payload):
            raise ValueError("keys must be strings")
    except (TypeError, ValueError, RecursionError) as error:
        raise HpcrlError(f"a task of environment {environment!r}: its payload is no JSON: {error}") from error


class Arrivals(SchedulerPlugin):  # type: ignore[misc]
    """Puts workers that come and go onto a queue."""

    def __init__(self, queue: asyncio.Queue[tuple[str, str]]) -> None:
        self._queue = queue

    def add_worker(self, scheduler: Scheduler, worker: str) -> None:
        self._queue.put_nowait(("joined", worker))

    def remove_worker(self, scheduler: Scheduler, worker: str, **_: Any) -> None:
        self._queue.put_nowait(("left", worker))


class Driver:
    def __init__(
        self,
        paths: RunPaths,
        config: Config,
        *,
        scheduler: Scheduler,
        client: Client,
        ledger: LedgerWriter,
        family: EnvironmentFamily,
    ) -> None:
        self._paths, self._config, self._scheduler, self._client = paths, config, scheduler, client
        self._ledger, self._incarnation = ledger, ledger.incarnation
        self._store = Store(paths, open_segments=True)
        self._reading = asyncio.Lock()  # of the store, which isn't thread-safe
        self._stream = TaskStream(family, config.seed)
        self._progress = ProgressReader(paths)
        rows = self._progress.read()
        restored = restore(paths, config, self._store, rows)
        self.flow = f.Flow(config, self._stream, restored, incarnation=ledger.incarnation, now=time.monotonic())
        self._trained = Counter(restored.trained)
        learnt = any(row.done for row in rows)
        used_s = 0.0  # of the controls before
        with contextlib.suppress(StoreError, TypeError, AttributeError):  # their last word may be junk
            used_s = 3600.0 * (read_json(paths.heartbeat) or {}).get("gpu_hours", 0.0)
        self._fleet = Fleet(paths, config, ledger.incarnation, used_s)
        if learnt:
            self._fleet.done.add("learner")
        self._arrivals: asyncio.Queue[tuple[str, str]] = asyncio.Queue()
        self._roles: dict[str, dict[str, Any]] = {}  # worker address -> what it said of itself
        self._nodes: dict[str, dict[str, Any]] = {}  # node -> its supervisor's last word
        self._stats: dict[str, dict[str, Any]] = {}  # host address -> its last figures
        self._last = next((row for row in reversed(rows) if row.trajectories), None)
        self._rates: deque[tuple[float, float, float, int]] = deque(maxlen=30)  # time, tokens, busy s, updates
        self._receipts = 0
        self._scaling = f.Scaling()
        self._begun = False  # there has been something for a learner
        self._busy_at = time.monotonic()  # when there was last
        self._outcome = asyncio.Event()
        self._reason = ""
        self._tasks: asyncio.TaskGroup
        self._failed_loads: list[str] = []
        self._loads = {"count": 0, "max_mismatch": 0.0, "max_seconds": 0.0}  # of versions that were taken
        self._spawned: set[asyncio.Task[None]] = set()
        self._sealing: set[Path] = set()  # commands that are being carried out
        self._abandoning: set[asyncio.Task[None]] = set()
        self._scored: list[Entry] = []  # for the ledger, written together: one sync, not one a group
        self._writing = threading.Lock()
        self._space_at = time.monotonic()  # when the disk last took something
        self._submitted: set[str] = set()  # trajectories that users asked for

    async def run(self) -> str:
        """Until the run is over; returns the outcome: "done", "stopped", "failed: why" or "full: where"; or until
        control leaves: MOVED."""
        self._scheduler.add_plugin(Arrivals(self._arrivals), name="hpcrl")
        for worker in self._scheduler.workers:  # that were quicker than the plugin
            self._arrivals.put_nowait(("joined", worker))
        self._client.subscribe_topic(TOPIC, self._receive)  # before anything is submitted: late ones get no past events
        self._client.subscribe_topic(LEAVING, lambda event: self._handle(f.SandboxLeft(sandbox=event[1])))
        try:
            await self._until_over()
        except* OSError as errors:
            if not any(is_full(error) for error in errors.exceptions):
                raise
            self._reason = self._full()
        if self._reason == MOVED:
            with contextlib.suppress(OSError):  # what it loses, the next control finds in the store
                self._write_ledger()
        else:
            await self._wind_down()
        return self._reason

    async def _until_over(self) -> None:
        async with asyncio.TaskGroup() as self._tasks:
            for coroutine in (
                self._watch_workers(), self._watch_files(), self._watch_fleet(), self._watch_nodes(),
                self._tick(), self._report(), self._compact(),
            ):  # fmt: skip
                self._spawn(coroutine)
            await self._outcome.wait()
            if self._abandoning:  # so that the store says how they ended
                await asyncio.wait(set(self._abandoning), timeout=CALL_S)
            for task in self._spawned:
                task.cancel()

    def _spawn(self, coroutine: Coroutine[Any, Any, None], *also: set[asyncio.Task[None]]) -> None:
        task = self._tasks.create_task(coroutine)
        for tasks in (self._spawned, *also):
            tasks.add(task)
            task.add_done_callback(tasks.discard)

    def _full(self) -> str:
        free = shutil.disk_usage(self._paths.root).free
        root = self._paths.root
        return f"full: disk full: {root} has {free} bytes free; free some space, then `hpcrl resume {root}`"

    def stop(self) -> None:
        self._handle(f.StopAsked(reason="stopped"))

    def leave(self) -> None:
        """End control alone: its allocation ends, and another control goes on with what runs."""
        self._reason = MOVED
        self._outcome.set()

    # -- events and instructions --

    def _handle(self, event: f.Event) -> None:
        for instruction in self.flow.handle(event, time.monotonic()):
            self._carry_out(instruction)

    def _carry_out(self, instruction: f.Instruction) -> None:
        match instruction:
            case f.Start(ticket=ticket, host=host):
                self._spawn(self._attach(ticket, host))
            case f.Abandon():
                arguments = {name: getattr(instruction, name) for name in ("trajectory", "attempt", "cancelled")}
                self._spawn(self._call(instruction.host, "abandon", **arguments), self._abandoning)
            case f.WriteLedger(entries=rows):
                self._scored += rows
            case f.Load(node=node, version=version):
                self._spawn(self._load(node, version))
            case f.Promote(version=version):
                publish(self._paths.current, f"{version}\n")
            case f.RecordEvaluation(result=result):
                publish_json(self._paths.evals / f"{result.name}.json", asdict(result))
            case f.Finish(outcome=outcome):
                self._reason = outcome
                self._outcome.set()

    async def _attach(self, ticket: Any, host: str) -> None:
        """One attempt as a Dask task: submit, wait, tell flow how it ended."""
        if ticket.attempt > 1 and not ticket.adopt:
            async with self._reading:
                await asyncio.to_thread(self._store.refresh, anew=True)
                head = self._store.head(ticket.trajectory) or ""
                ended = self._store.ended(ticket.trajectory, head)
                ticket = replace(ticket, adopt=head)
            row = self.flow.open.get(ticket.trajectory)
            if row is None or row.ticket.attempt != ticket.attempt:
                return  # given up meanwhile
            if ended is not None:  # it had, and the word of it was lost
                self._handle(f.AttemptEnded(ended=replace(ended, attempt=ticket.attempt)))
                return
        key = f"{ticket.trajectory}.{ticket.attempt}.{self._incarnation}"
        try:
            future = self._client.submit(
                run_ticket, ticket, key=key, workers=[host], allow_other_workers=False, pure=False, retries=0
            )
            answer = await future
        except asyncio.CancelledError:
            me = asyncio.current_task()
            if me is not None and me.cancelling():
                raise  # we are to end; else it is Dask's task that was cancelled
            self._lost(ticket, "its Dask task was cancelled")
        except Exception as error:
            self._lost(ticket, f"{type(error).__name__}: {error}")
        else:
            done = Ended.from_json(answer)
            if done.fault is not None and done.fault.where == DISK:
                self._handle(f.StopAsked(reason=self._full()))
            self._handle(f.AttemptEnded(ended=done))

    def _lost(self, ticket: Any, message: str) -> None:
        logger.info("%s, attempt %d, lost: %s", ticket.trajectory, ticket.attempt, message)
        self._handle(f.AttemptLost(trajectory=ticket.trajectory, attempt=ticket.attempt, message=message))

    async def _call(self, worker: str, method: str, /, **arguments: Any) -> Any:
        """A call to a host or sandbox node, directly. None when it doesn't answer in time, or failed."""
        limit_s = LOAD_S if arguments.get("method") == "load" else CALL_S
        try:
            async with asyncio.timeout(limit_s):
                return await self._scheduler.rpc(worker).hpcrl(method=method, arguments=arguments)
        except Exception as error:  # whatever the other side raised, Dask gives as a bare Exception
            logger.info("%s of %s: %s: %s", method, worker, type(error).__name__, error)
            return None

    async def _load(self, node: str, version: int) -> None:
        host = next((address for address, role in self._roles.items() if role.get("node") == node), None)
        answer = None
        if host is not None:
            arguments = {"method": "load", "version": version}
            answer = await self._call(host, "supervisor", **arguments)
        ok = bool(answer and answer["ok"])
        if answer is not None:
            logger.info("version %d on %s: %s", version, node, answer)
            if ok:
                self._loads["count"] += 1
                for key in ("mismatch", "seconds"):
                    self._loads[f"max_{key}"] = max(self._loads[f"max_{key}"], answer[key])
            else:
                self._failed_loads.append(f"version {version} on {node}: {answer['message']}")
        refused = bool(answer and answer.get("refused"))
        reached = answer is not None
        self._handle(f.LoadDone(node=node, version=version, ok=ok, refused=refused, reached=reached))

    def _receive(self, event: tuple[float, list[dict[str, Any]]]) -> None:
        self._receipts += len(event[1])

    # -- the watchers --

    async def _watch_workers(self) -> None:
        while True:
            what, worker = await self._arrivals.get()
            if what == "joined":
                self._spawn(self._joined(worker))
                continue
            role = self._roles.pop(worker, {})
            self._stats.pop(worker, None)
            if role.get("role") == "host":
                if role["node"] not in self._hosts().values():
                    self._nodes.pop(role["node"], None)
                self._handle(f.HostLeft(host=worker))
            elif role.get("role") == "sandbox":
                self._handle(f.SandboxLeft(sandbox=role["address"]))

    async def _joined(self, worker: str) -> None:
        role = None
        while role is None:
            role = await self._call(worker, "describe", incarnation=self._incarnation)
            if worker not in self._scheduler.workers:
                return
            if role is None:
                await asyncio.sleep(PROBE_S)
        self._roles[worker] = role
        if role["role"] == "sandbox":
            self._handle(f.SandboxJoined(sandbox=role["address"], capacity=role["capacity"]))
            return
        await self._look_at(worker, role["node"])
        held = [(trajectory, attempt, sandbox) for trajectory, attempt, sandbox in role["held"]]
        if worker in self._roles:
            self._handle(f.HostJoined(host=worker, node=role["node"], capacity=role["capacity"], held=held))

    async def _watch_nodes(self) -> None:
        while True:
            await asyncio.sleep(PROBE_S)
            await asyncio.gather(*(self._probe(worker, node) for worker, node in self._hosts().items()))

    def _hosts(self) -> dict[str, str]:
        """Address -> node."""
        return {worker: role["node"] for worker, role in self._roles.items() if role["role"] == "host"}

    async def _probe(self, worker: str, node: str) -> None:
        await self._look_at(worker, node)
        stats = await self._call(worker, "stats")
        if stats is not None and worker in self._roles:
            self._stats[worker] = stats
            self._fleet.rollout_leaves_s = max(row["leaves_s"] for row in self._stats.values())

    async def _look_at(self, worker: str, node: str) -> None:
        row = await self._call(worker, "supervisor", method="status")
        if row is None:
            return
        known = self.flow.nodes.get(node)
        if row["full"] != (node in self.flow.full):
            logger.warning("log of %s: %s", node, "the disk is full, waiting for space" if row["full"] else "goes on")
            self._handle(f.LogFull(node=node, full=row["full"]))
        self._nodes[node] = row
        if known is None or known.ready != row["ready"] or (known.loading < 0 and known.version != row["version"]):
            self._handle(f.EngineChanged(node=node, ready=row["ready"], version=row["version"]))

    async def _watch_files(self) -> None:
        while True:
            self._read_progress()
            if self._ledger.is_superseded(self._paths):
                logger.warning("another control has begun since: this one leaves")
                self.leave()
            for path in sorted(self._paths.inbox.glob("*.json")):
                self._command(path)
            if self._config.launch.executor != "local":
                self._fleet.here = {job_of(role["node"]) for role in self._roles.values()}
                ended = self._fleet.ended - self._fleet.here
                is_ended = lambda node, ended=ended: job_of(node) in ended  # noqa: E731
                for path in await asyncio.to_thread(seal_ended, self._paths, is_ended):
                    logger.info("%s: closed, as the job of its owner has ended", path)
            await asyncio.sleep(self._config.store.poll_s)

    def _read_progress(self) -> None:
        for row in self._progress.read():
            self._updated(row)

    def _command(self, path: Path) -> None:
        """Take a command that a login node left. A submitted task's file stays until its trajectory has ended."""
        try:
            row = read_json(path)
            if row is None:
                return  # gone, though this node may list it for a while
            command = row.get("command")
            if command not in ("submit", "stop", "seal", "scale"):
                raise ValueError(f"unknown command {command!r}")
            if command == "scale":
                scaled = with_sets(self._config, row["sets"])
                check_resume(self._config, scaled)
            if command == "submit":
                task = Task(**row["task"])
                _check(task, self._config.environment.name)
                if not TRAJECTORY.fullmatch(row["trajectory"]):
                    raise ValueError(f"trajectory {row['trajectory']!r}: must match {TRAJECTORY.pattern}")
        except (ValueError, KeyError, TypeError, AttributeError, RecursionError, OSError) as error:
            logger.warning("%s: refused: %s: %s", path, type(error).__name__, error)
            path.rename(path.with_suffix(".refused"))
            return
        if command == "submit":
            self._submit(path, row["trajectory"], task)
        elif command == "seal":
            if path not in self._sealing:
                self._sealing.add(path)
                self._spawn(self._seal(path))
        elif command == "scale":
            self._rescale(scaled)
            path.unlink()
        else:  # the file stays until the run has come to rest: a control that is started again goes on with it
            self._handle(f.StopAsked(reason="stopped"))

    def _rescale(self, scaled: Config) -> None:
        publish(self._paths.config, dump(scaled))  # for roles that start later, and the next control
        self._config = scaled
        self._fleet.rescale(scaled)

    async def _seal(self, path: Path) -> None:
        """Have every node close its open segment; the command's file goes when they have."""
        by_node = {node: worker for worker, node in self._hosts().items()}
        answers = [self._call(worker, "supervisor", method="seal") for worker in by_node.values()]
        failed = [node for node, answer in zip(by_node, await asyncio.gather(*answers), strict=True) if answer is None]
        with contextlib.suppress(FileNotFoundError):  # who asked has given up
            if failed:
                logger.warning("%s: no answer from %s", path, ", ".join(failed))
                path.rename(path.with_suffix(".refused"))
            else:
                path.unlink()
        self._sealing.discard(path)

    def _submit(self, path: Path, trajectory: str, task: Task) -> None:
        if trajectory not in self._submitted:
            self._submitted.add(trajectory)
            self._handle(f.Submitted(trajectory=trajectory, task=task))
        elif trajectory not in self.flow.open:
            self._submitted.discard(trajectory)
            path.unlink()

    def _updated(self, row: UpdateRow) -> None:
        if row.version >= 0:
            self._handle(f.Published(version=row.version))
        if row.done:
            self._fleet.done.add("learner")
        if not row.trajectories:
            return
        self._fleet.updated()
        self._busy_at = time.monotonic()
        if self._last is not None and row.update <= self._last.update:
            # The learner went back to a checkpoint: what it had trained beyond is void, and trained again.
            self._trained.clear()
            for made in lineage(self._paths):
                self._trained[made.phase] += len(made.trajectories)
        else:
            self._trained[row.phase] += len(row.trajectories)
        self._last = row
        num_trained = self._trained[row.phase]
        self._handle(
            f.Updated(phase=row.phase, phase_update=row.phase_update, version=row.version, num_trained=num_trained)
        )

    async def _watch_fleet(self) -> None:
        while True:
            self._read_progress()  # first: a learner that is done has ended, not died
            if self._config.launch.executor == "slurm":
                self._spare_the_learner(time.monotonic())
            try:
                outcome = await self._fleet.ensure()
            except HpcrlError as error:
                # Who submits writes to the run folder: on a full disk it may die without a word, and is started again.
                full = shutil.disk_usage(self._paths.root).free < LEAST_FREE_BYTES
                logger.warning("%s%s", "waiting for space: " if full else "", error)
                outcome = None if full else f"failed: {error}"
            if outcome:
                self._handle(f.StopAsked(reason=outcome))
            self._fit_sandboxes(time.monotonic())
            await asyncio.sleep(1.0)

    def _fit_sandboxes(self, now: float) -> None:
        """Change the number of sandbox jobs between its bounds, by need."""
        if not any(pool.maximum_jobs for pool in self._config.sandbox):
            return
        (pool,) = self._config.sandbox
        used = sum(place.used for place in self.flow.sandboxes.values())
        short = self.flow.short_of_sandboxes if len(self.flow.sandboxes) >= pool.jobs else 0  # else some are to come
        jobs = self._scaling.jobs(pool, ahead(pool.sessions), used, short, now)
        if jobs != pool.jobs:
            why = f"{used} trajectories have a sandbox" + (f", {short} more could run" if short else "")
            logger.info("sandbox pool %s: %d jobs, was %d: %s", pool.name, jobs, pool.jobs, why)
            self._rescale(with_sets(self._config, [f"sandbox.{pool.name}.jobs={jobs}"]))

    def _spare_the_learner(self, now: float) -> None:
        """Its nodes are not to stand idle: it is submitted when there are rollouts, or something to train, and released
        when there has been nothing to train for long."""
        waits = self.flow.update_waits
        self._begun = self._begun or waits or any(node.ready for node in self.flow.nodes.values())
        if waits or not self._begun:
            self._busy_at = now
        idle_s = self._config.learner.idle_s
        idle = idle_s > 0 and now - self._busy_at > idle_s
        if idle and not self._fleet.released:
            logger.info("nothing to train for %g s (learner.idle_s): the learner's job is released", idle_s)
        self._fleet.held = {"learner"} if idle or not self._begun else set()
        self._fleet.released = {"learner"} if idle else set()

    async def _tick(self) -> None:
        while True:
            await asyncio.sleep(1.0 if self._ledger.closed else TICK_S)
            with self._waiting_for_space():
                await asyncio.to_thread(self._write_ledger)
            self._handle(f.Tick())

    @contextlib.contextmanager
    def _waiting_for_space(self) -> Iterator[None]:
        """What a full disk refuses is tried again, until `store.full_patience_s` is over."""
        try:
            yield
            self._space_at = time.monotonic()
        except OSError as error:
            patient = time.monotonic() - self._space_at < self._config.store.full_patience_s
            if not is_full(error) or not patient:
                raise
            logger.warning("waiting for space: %s", error)

    def _write_ledger(self) -> None:
        """What a crash loses of it is found in the store again: all members of the group have ended there."""
        with self._writing:
            if self._ledger.closed:  # an append failed: what it left half-written is not written after
                self._ledger = LedgerWriter(self._paths)
            rows = list(self._scored)
            if rows:
                self._ledger.append(rows)
                del self._scored[: len(rows)]

    async def _compact(self) -> None:
        while True:
            await asyncio.sleep(self._config.store.compact_every_s)
            await self._compact_once()

    async def _compact_once(self) -> None:
        """In a process of its own: packing is work, and control must stay awake."""
        with (self._paths.logs / "compact.log").open("ab") as log:
            process = await asyncio.create_subprocess_exec(
                sys.executable, "-m", "hpcrl.store.compact", str(self._paths.root), stdout=log, stderr=subprocess.STDOUT
            )
            try:
                code = await process.wait()
            finally:
                if process.returncode is None:
                    process.terminate()
        if code:
            logger.warning("compaction failed (exit %d): see %s", code, log.name)

    # -- what a person sees --

    async def _report(self) -> None:
        while True:
            with self._waiting_for_space():
                publish_json(self._paths.heartbeat, self.status())
                self._publish_address()
                if shutil.disk_usage(self._paths.root).free < LEAST_FREE_BYTES:
                    raise OSError(errno.ENOSPC, "less than a MiB is free in the run folder's filesystem")
            await asyncio.sleep(self._config.launch.status_s)

    def _publish_address(self) -> None:
        """Where hosts and sandbox nodes find control; again, should the file have gone, or say something else."""
        row = {"address": self._scheduler.address, "incarnation": self._incarnation, **versions()}
        with contextlib.suppress(StoreError):
            if read_json(self._paths.scheduler) == row:
                return
        publish_json(self._paths.scheduler, row)

    def status(self) -> dict[str, Any]:
        """Everything that `hpcrl status` shows, as JSON."""
        flow, config = self.flow, self._config
        stats = list(self._stats.values())
        total = sum(phase.updates for phase in config.phase)
        done = sum(flow.updates.values())
        tokens = sum(row["tokens"] for row in stats)
        busy = sum(row["busy_s"] for row in stats) / max(1, len(stats))
        now = time.monotonic()
        self._rates.append((now, tokens, busy, done))
        first = self._rates[0]
        span = max(1e-9, now - first[0])
        fresh = len(self._rates) > 1
        phase = flow.phase
        rate = (done - first[3]) / span  # of late: phases differ
        return {
            "state": "running",
            "phase": phase.name if phase else "",
            "updates": {"done": done, "total": total},
            "phases": {row.name: [flow.updates[row.name], row.updates] for row in config.phase},
            "reward": sum(flow.recent) / len(flow.recent) if flow.recent else None,
            "evaluations": {name: asdict(result) for name, result in flow.evaluations.items()},
            "evaluating": flow.evaluating[0] if flow.evaluating else "",
            "trajectories": {
                "running": sum(row["running"] for row in stats),
                "waiting": sum(row["waiting"] for row in stats),
                "pending": sum(not row.host for row in flow.open.values()),
                "scored": sum(flow.ledgered.values()),
                "trained": sum(flow.trained.values()),
            },
            "accounting": {
                "admitted": flow.counts.admitted, "open": len(flow.open), **flow.counts.status,
                "faults": dict(flow.counts.faults),
            },
            "last_fault": flow.last_fault,
            "wrong": self._wrong(),
            "pending": self._fleet.pending(),
            "steps": flow.counts.steps,
            "valid_calls": flow.counts.valid_calls / flow.counts.calls if flow.counts.calls else None,
            "receipts": self._receipts,
            "tokens_per_s": max(0.0, (tokens - first[1]) / span) if fresh else 0.0,
            "busy_share": min(1.0, max(0.0, (busy - first[2]) / span)) if fresh else 0.0,
            "lag": round(self._last.metrics.get("lag", 0.0), 2) if self._last else 0.0,
            "eta_s": (total - done) / rate if rate > 0 else None,
            "version": flow.promoted,
            "newest": flow.newest,
            "nodes": self._nodes,
            "restarts": dict(self._fleet.restarts),
            "gpu_hours": self._fleet.gpu_s / 3600,
            "loads": self._loads,
            "refused": self._failed_loads,
            "metrics": dict(self._last.metrics) if self._last else {},
            "dashboard": getattr(self._scheduler.services.get("dashboard"), "port", None),
            "node": node_name(),
            "incarnation": self._incarnation,
            "wall": time.time(),
        }  # fmt: skip

    def _wrong(self) -> list[str]:
        """What keeps the run from going on as it should, and what to do; the worst first."""
        found = self._fleet.wrong()
        found += [f"{node}: {row['trouble']}" for node, row in self._nodes.items() if row["trouble"]]
        found += [f"{node}: the disk is full, steps wait until there is space again" for node in self.flow.full]
        refused = self._failed_loads[-1:] if self.flow.promoted < self.flow.newest else []
        return [" ".join(text.split()) for text in found + refused]

    # -- the end --

    async def _wind_down(self) -> None:
        """End all roles in order: learner told by the ledger, loops parked, engines, sandboxes; then seal the store."""
        if self._reason.startswith("full"):
            self._paths.reserve.unlink(missing_ok=True)
        with contextlib.suppress(OSError):  # what it loses, a resume finds in the store
            self._write_ledger()
        if self._reason != "done":
            self._tell_learner_to_stop()
        beat = asyncio.create_task(self._report())  # whoever waits for the end sees that this goes on
        hosts = self._hosts()
        await asyncio.gather(*(self._call(worker, "park") for worker in hosts))
        by_node = {node: worker for worker, node in hosts.items()}
        await asyncio.gather(*(self._call(worker, "supervisor", method="stop") for worker in by_node.values()))
        nodes = [worker for worker, role in self._roles.items() if role["role"] == "sandbox"]
        await asyncio.gather(*(self._call(worker, "stop") for worker in nodes))
        self._stats.clear()
        left = await self._fleet.stop(self._grace_s())
        await self._compact_once()
        beat.cancel()
        await asyncio.gather(beat, return_exceptions=True)
        curve = [
            {"update": row.update, "phase": row.phase, "reward": row.metrics.get("reward", 0.0)}
            for row in lineage(self._paths)
            if row.trajectories and not self._config.phase_named(row.phase).from_expert  # that reward is the expert's
        ]
        evaluations = {name: asdict(result) for name, result in self.flow.evaluations.items()}
        if curve:
            try:
                plot(curve, evaluations, self._paths.plot)
            except Exception as error:  # a picture is not worth the end of a run
                logger.warning("no reward curve: %s: %s", type(error).__name__, error)
        final = self.status() | {"state": self._reason.partition(":")[0], "reason": self._reason}
        publish_json(self._paths.heartbeat, final)
        row = {"outcome": self._reason, "wall": time.time(), "left": [job.id for job in left]}
        publish_json(self._paths.stopped, row)
        for pattern in ("stop-*.json", "scale-*.json"):
            for asked in self._paths.inbox.glob(pattern):
                asked.unlink(missing_ok=True)

    def _tell_learner_to_stop(self) -> None:
        """By the ledger; by another incarnation's where this one's file failed. It is also asked by SIGTERM, later."""
        for _ in range(2):
            try:
                self._ledger.stop(self._reason)
                return
            except OSError as error:
                logger.warning("the ledger takes no stop: %s", error)
                with contextlib.suppress(OSError):
                    self._ledger = LedgerWriter(self._paths)

    def _grace_s(self) -> float:
        """For jobs to end by themselves: the learner looks for a stop between two updates, and these may be long."""
        metrics = self._last.metrics if self._last else {}
        spent = sum(metrics.get(f"{part}_s", 0.0) for part in ("read", "forward_backward", "step", "publish"))
        return max(END_GRACE_S, 2 * spent)
