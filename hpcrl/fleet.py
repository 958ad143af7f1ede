"""How many jobs of each role there are: submits what is missing, replaces what ended, ends them in order."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import math
import signal
import time
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass

from hpcrl import launch
from hpcrl.config import Config
from hpcrl.launch import Job, Role, SlurmError, State, local, newest, record, submit_async
from hpcrl.layout import RunPaths, publish_json
from hpcrl.node import job_id
from hpcrl.types import HpcrlError

logger = logging.getLogger(__name__)

RANKS_START_S = 10.0  # in which a learner's ranks are all started
LOCAL_LOOK_S = 0.1
# Ends that speak against a job; others, such as the end of its time, are nobody's fault where it has lived for a while.
FAILED = frozenset({"GONE", "FAILED", "OUT_OF_MEMORY", "BOOT_FAIL"})
SHORT_S = 60.0
EXCLUDE_AFTER = 3
PENDING_MINUTES = 10
SLOW_S = 10.0  # a refusal that took so long is no answer
MAX_PAUSE_S = 60.0  # between two tries to submit


@dataclass(frozen=True, slots=True)
class Refusal:
    since: float
    pause_until: float
    said: str


class Fleet:
    """The jobs of a run but control's own. Jobs that an earlier control left running are taken over, not replaced."""

    def __init__(self, paths: RunPaths, config: Config, control: int, gpu_s: float = 0.0) -> None:
        self._paths, self._config, self._control = paths, config, control
        self.wanted: dict[tuple[Role, int], Job | None] = {
            (role, index): newest(paths, role, index) for role, index in launch.wanted(config) if role != "control"
        }
        self.deaths: Counter[tuple[Role, int]] = Counter()  # since the last update
        self.restarts: Counter[Role] = Counter()  # in all
        self._failures: Counter[str] = Counter()  # of jobs, by node
        paths.excluded.unlink(missing_ok=True)
        self.done: set[Role] = set()  # roles whose work is over: not replaced
        self.held: set[Role] = set()  # roles that have nothing to do for now: not submitted
        self.released: set[Role] = set()  # of these, those whose jobs are told to leave
        self._jobs = [job for job in launch.jobs(paths) if job.role != "control"]  # all that may still live
        self._submitted_ahead: list[Job] = []
        self._all_are_known = True  # of those
        self.states: dict[str, State] = {}  # by job's key, as last seen
        self._missing: dict[str, float] = {}  # since when a job, by its key, isn't listed
        self.here: set[str] = set()  # ids of jobs that are connected to control: they live, whatever Slurm says
        self.ended: set[str] = set()  # keys of jobs that surely have ended
        self.gpu_s = gpu_s  # GPU-seconds that jobs have had
        self.rollout_leaves_s = 0.0  # how long before its end a rollout job leaves by itself, as its steps are so long
        # To be told that they are no longer wanted.
        self._leaving = [job for job in self._jobs if (job.role, job.index) not in self.wanted]
        self._look_s = LOCAL_LOOK_S if config.launch.executor == "local" else config.launch.look_s
        self._looked = -float("inf")
        self._not_before: dict[tuple[Role, int], float] = {}
        self._submitting: asyncio.Task[Job] | None = None
        self._refusals: dict[tuple[Role, int], Refusal] = {}

    def updated(self) -> None:
        """The learner made an update: the run moves, so earlier deaths are forgiven."""
        self.deaths.clear()

    def rescale(self, config: Config) -> None:
        """From now on the jobs are those of this config: more are submitted, those that are too many leave."""
        self._config = config
        keys = [key for key in launch.wanted(config) if key[0] != "control"]
        for key in keys:
            self.wanted.setdefault(key, None)
        for key in [key for key in self.wanted if key not in keys]:
            job = self.wanted.pop(key)
            self._refusals.pop(key, None)
            if job is not None:
                self._leaving.append(job)
        self._looked = -float("inf")

    async def ensure(self) -> str | None:
        """Bring every job up. Returns the outcome with which the run must end: a role dies again and again without an
        update, a budget is used up, the time of all of it is nearly over."""
        now = time.monotonic()
        since_s = now - self._looked
        if since_s < self._look_s:
            return None
        self._looked = now
        self._take_note()
        try:
            await self._look(self._jobs)
        except SlurmError as error:
            logger.warning("jobs are left as they are: %s", error)
            return None
        if reason := self._over_budget(since_s):
            return f"failed: {reason}"
        if end := self._end_of_all():
            logger.warning("the run ends: %s", end)
            return end
        if self._config.launch.fleet == "presubmitted":
            self._leaving = [job for job in self._jobs if job.role in self.done and self._is_pending(job)]
            await self._send_away()
            return None
        await self._send_away()
        for (role, index), job in list(self.wanted.items()):
            refused = self._refusals.get((role, index))
            if (role, index) not in self.wanted or (refused is not None and now < refused.pause_until):
                continue  # rescaled meanwhile
            state = self.states[job.key] if job is not None else None
            if job is not None and role == "learner" and self._lost_a_rank(job):
                logger.warning("a rank of job %s (learner) is gone: ending the others", job.id)
                launch.send([job], signal.SIGKILL)
            if role in self.held:
                if state is None or not state.alive:
                    self.wanted[role, index] = None
                elif role in self.released and job is not None:
                    self._leaving.append(job)
                continue
            ends = state is not None and state.alive and self._ends_soon(role, index, state)
            if role in self.done or now < self._not_before.get((role, index), 0):
                continue
            if ends:
                logger.info("the time of %s-%d is nearly over: its successor is submitted", role, index)
            elif state is not None and state.alive:
                continue
            elif job is not None and (role, index) in self._not_before:  # one of ours
                self.wanted[role, index] = None
                if reason := self._died(job):
                    return f"failed: {reason}"
            if not await self._submit(role, index, now) and time.monotonic() - now > SLOW_S:
                break  # Slurm doesn't answer: neither would it for the others
        return None

    def wrong(self) -> list[str]:
        """What is wrong with the jobs, each with what to do about it."""
        reasons: dict[str, list[str]] = {}
        for (role, index), refused in self._refusals.items():
            reasons.setdefault(refused.said, []).append(f"{role}-{index}")
        again = f"where that can't change, stop it and `hpcrl resume {self._paths.root} --set …`"
        found = [f"{', '.join(names)} refused, tried again; {again}: {said}" for said, names in reasons.items()]
        dead = [(count, role, index) for (role, index), count in self.deaths.items() if count > 1]
        for count, role, index in sorted(dead, reverse=True):
            of = f"of {self._config.launch.restarts + 1} that end the run"
            found.append(
                f"{role}-{index} died {count} times without an update, {of}: see `hpcrl logs {self._paths.root} {role}`"
            )
        for job in self._jobs:
            minutes = (time.time() - job.wall) / 60
            if job.key in self.states and self.states[job.key].name == "SUSPENDED":
                found.append(f"{job.role}-{job.index} is suspended: `scontrol resume {job.id}`, if it was you")
            if self._queues(job) and minutes > PENDING_MINUTES:
                why = self.states[job.key].reason or "no reason given"
                found.append(f"{job.role}-{job.index} (job {job.id}) has been pending for {minutes:.0f} min: {why}")
        return found

    def pending(self) -> list[str]:
        """The jobs that wait to begin, and why, as Slurm says: not wrong by itself, but where a quiet run stands."""
        waiting = [job for job in self.wanted.values() if job is not None and self._queues(job)]
        return [f"{job.role}-{job.index} ({self.states[job.key].reason or 'no reason given'})" for job in waiting]

    def _take_note(self) -> None:
        """Of jobs that were submitted ahead some may have come after this control began."""
        if self._config.launch.fleet == "presubmitted":
            found, self._all_are_known = launch.ahead(self._paths)
            self._submitted_ahead = [job for job in found if job.role != "control"]
            self._jobs = [job for job in self._submitted_ahead if job.key not in self.ended]

    async def _submit(self, role: Role, index: int, now: float) -> bool:
        """Whether it was taken. Raises HpcrlError when it is refused for good: for `launch.control_timeout_s` where it
        is Slurm that refuses, which may be away for a while, or at a limit."""
        self._submitting = asyncio.create_task(submit_async(self._paths, role, index, self._control))
        try:
            submitted = await asyncio.shield(self._submitting)
        except HpcrlError as error:
            since = self._refusals[role, index].since if (role, index) in self._refusals else now
            patience_s = 0.0 if self._config.launch.executor == "local" else self._config.launch.control_timeout_s
            if now - since >= patience_s:
                raise
            logger.warning("to be tried again: %s", error)
            said = str(error).removeprefix(f"job {role}-{index} could not be submitted: ")
            self._refusals[role, index] = Refusal(since, now + min(max(1.0, now - since), MAX_PAUSE_S), said)
            return False
        self._refusals.pop((role, index), None)
        self._submitting = None
        self._jobs.append(submitted)
        if (role, index) not in self.wanted:  # rescaled meanwhile
            self._leaving.append(submitted)
            return True
        self.wanted[role, index] = submitted
        deaths = self.deaths[role, index]
        self._not_before[role, index] = now + min(2.0 ** (deaths - 1), 30.0) if deaths else now
        return True

    async def _send_away(self) -> None:
        """Tell jobs that are no longer wanted; those that wait are cancelled."""
        leaving, self._leaving = self._leaving, []
        try:
            await asyncio.to_thread(launch.send, leaving, signal.SIGUSR2)
        except SlurmError as error:
            logger.warning("to be told later that they are too many: %s", error)
            self._leaving += leaving

    def _over_budget(self, since_s: float) -> str | None:
        """Account for the time since the last look. Returns why the run must stop when its GPU-hours are used up."""
        if math.isfinite(since_s):
            running = [job for job in self._jobs if self.states[job.key].name == "RUNNING"]
            self.gpu_s += since_s * sum(self._config.gpus_of(job.role, job.index) for job in running)
        budget = self._config.launch.gpu_hours
        if not budget or self.gpu_s < budget * 3600:
            return None
        return f"launch.gpu_hours: the budget of {budget:g} GPU-hours is used up"

    def _end_of_all(self) -> str:
        """The outcome of a run that can't go on: its only allocation ends, or a pool has had all its jobs; else ""."""
        if self._config.launch.executor == "steps":
            ends = [state.left_s for state in self.states.values() if state.alive and state.left_s is not None]
            near = bool(ends) and min(ends) < self._config.slurm_of("control", 0).signal_s
            return "stopped: the time of this allocation is nearly over" if near else ""
        if self._config.launch.fleet == "presubmitted" and self._all_are_known:
            last = {self._pool(job): job for job in self._submitted_ahead if job.role not in self.done}
            for pool in last.keys() - {self._pool(job) for job in self._jobs}:
                failed = self.states[last[pool].key].name in FAILED
                return f"{'failed' if failed else 'stopped'}: {pool}: the jobs that were submitted ahead are used up"
        return ""

    def _pool(self, job: Job) -> str:
        table = self._config.pool(job.role, job.index) if job.role in ("rollout", "sandbox") else None
        return f"{job.role} pool {table.name}" if table is not None else job.role

    def _ends_soon(self, role: Role, index: int, state: State) -> bool:
        """Whether a job's successor should be on its way: of those that several may be of at once."""
        if (
            self._config.launch.executor != "slurm"
            or role == "learner"
            or state.left_s is None
            or state.name != "RUNNING"
        ):
            return False
        needed_s = self.rollout_leaves_s if role == "rollout" else 0.0
        return state.left_s < self._config.slurm_of(role, index).ahead_s(needed_s)

    def _died(self, job: Job) -> str | None:
        """Account for a job that ended though its work isn't over. Returns why the run must stop."""
        role, index, state = job.role, job.index, self.states[job.key]
        self.restarts[role] += 1
        fails = state.name in FAILED or time.time() - job.wall < SHORT_S
        self.deaths[role, index] += fails
        if fails or state.name == "NODE_FAIL":
            self._exclude(state.node)
        record(self._paths, "ended", role=role, index=index, id=job.id, wall=time.time(), why=state.name)
        logger.warning("job %s of %s-%d ended (%s); starting another", job.id, role, index, state.name)
        if self.deaths[role, index] <= self._config.launch.restarts:
            return None
        log = self._paths.submitit / f"{role}-{index}"
        return f"{role}-{index} died {self.deaths[role, index]} times without an update in between: see {log}"

    def _exclude(self, node: str) -> None:
        """A node on which jobs fail again and again gets no more of this run's, until it is stopped and resumed."""
        self._failures[node] += 1
        if self._failures[node] == EXCLUDE_AFTER and node and "[" not in node and "," not in node:
            bad = sorted(name for name, count in self._failures.items() if count >= EXCLUDE_AFTER)
            publish_json(self._paths.excluded, {"nodes": bad})
            logger.warning("%d jobs failed on node %s: no more are submitted to it", EXCLUDE_AFTER, node)

    async def _look(self, jobs: Sequence[Job]) -> None:
        found = await asyncio.to_thread(launch.look, jobs) if jobs else {}
        found = {job.key: self._believed(job, found[job.key]) for job in jobs}
        self.states |= found
        self.ended |= {key for key, state in found.items() if not state.alive}
        self._jobs = [job for job in self._jobs if job.key not in self.ended]

    def _believed(self, job: Job, state: State) -> State:
        """What an answer doesn't list lives on as before for a while: an answer may be cut short, and a job's end is
        seen before it is forgotten."""
        patience_s = launch.GONE_S.get(job.executor, 0.0)
        if state.name == launch.GONE.name and job.id in self.here:
            return self.states.get(job.key, State(alive=True, name="UNKNOWN"))
        if state.name != launch.GONE.name or not patience_s:
            self._missing.pop(job.key, None)
            return state
        if time.monotonic() - self._missing.setdefault(job.key, time.monotonic()) >= patience_s:
            return state
        return self.states.get(job.key, State(alive=True, name="UNKNOWN"))

    def _lost_a_rank(self, job: Job) -> bool:
        """submitit's local controller waits for all ranks, and those left may wait for data for as long as there is
        none. Slurm's srun ends them all."""
        if job.executor != "local" or time.time() - job.wall <= RANKS_START_S:
            return False
        return 0 < len(local.tasks(job)) < self._config.learner.ranks

    async def stop(self, grace_s: float) -> list[Job]:
        """Wait for every job to end by itself; then ask by SIGTERM; then end it. What hasn't begun is cancelled.
        Returns those that may live even so: Slurm didn't say."""
        if self._submitting is not None:  # one may be on its way
            with contextlib.suppress(HpcrlError):
                self._jobs.append(await self._submitting)
        self._take_note()
        mine = job_id()  # control's successors have nothing to do any more
        self._jobs += [job for job in launch.jobs(self._paths) if job.role == "control" and job.id != mine]
        living = await self._alive(self._jobs)
        for step, wait_s in ((None, grace_s), (signal.SIGTERM, grace_s), (signal.SIGKILL, 5.0)):
            left = await self._alive(living)
            if step is signal.SIGKILL:
                for job in left:
                    logger.warning("job %s of %s-%d did not end: killed", job.id, job.role, job.index)
            asked = left if step else [job for job in left if self._is_pending(job)]
            with contextlib.suppress(SlurmError):
                await asyncio.to_thread(launch.send, asked, step or signal.SIGKILL)
            until = time.monotonic() + wait_s
            while left and time.monotonic() < until:
                await asyncio.sleep(min(self._look_s, 2.0))
                left = await self._alive(left)
        for job in living:
            record(self._paths, "ended", role=job.role, index=job.index, id=job.id, wall=time.time(), why="stopped")
        return await self._alive(living)

    async def _alive(self, jobs: Sequence[Job]) -> list[Job]:
        """Those that live, for all that is known."""
        with contextlib.suppress(SlurmError):
            await self._look(jobs)
        return [job for job in jobs if job.key not in self.states or self.states[job.key].alive]

    def _is_pending(self, job: Job) -> bool:
        return job.key in self.states and self.states[job.key].name == "PENDING"

    def _queues(self, job: Job) -> bool:
        """Whether it is pending, and not for the job before it to end."""
        return self._is_pending(job) and self.states[job.key].reason != "Dependency"
