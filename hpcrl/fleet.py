"""How many jobs of each role there are: submits what is missing, replaces what died, ends them in order."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import signal
import time
from collections import Counter

from hpcrl.config import Config
from hpcrl.launch import Job, Role, newest, record, submit_async
from hpcrl.layout import RunPaths
from hpcrl.types import HpcrlError

logger = logging.getLogger(__name__)

RANKS_START_S = 10.0  # in which a learner's ranks are all started


class Fleet:
    """The jobs of a run but control's own. Jobs that an earlier control left running are taken over, not replaced."""

    def __init__(self, paths: RunPaths, config: Config, control: int) -> None:
        self._paths, self._config, self._control = paths, config, control
        self.wanted: dict[tuple[Role, int], Job | None] = {}
        counts: tuple[tuple[Role, int], ...] = (
            ("rollout", sum(pool.jobs for pool in config.rollout)),
            ("sandbox", sum(pool.jobs for pool in config.sandbox)),
            ("learner", 1),
        )
        for role, count in counts:
            for index in range(count):
                self.wanted[role, index] = newest(paths, role, index)
        self.deaths: Counter[tuple[Role, int]] = Counter()  # since the last update
        self.restarts: Counter[Role] = Counter()  # in all
        self.done: set[Role] = set()  # roles whose work is over: not replaced
        self._not_before: dict[tuple[Role, int], float] = {}
        self._submitting: asyncio.Task[Job] | None = None

    def updated(self) -> None:
        """The learner made an update: the run moves, so earlier deaths are forgiven."""
        self.deaths.clear()

    async def ensure(self) -> str | None:
        """Bring every job up. Returns why the run must stop when a role dies again and again without an update."""
        now = time.monotonic()
        for (role, index), job in self.wanted.items():
            if job is not None and role == "learner" and self._lost_a_rank(job):
                logger.warning("a rank of job %s (learner) is gone: ending the others", job.id)
                job.kill()
            if role in self.done or (job is not None and job.alive) or now < self._not_before.get((role, index), 0):
                continue
            if job is not None and (role, index) in self._not_before:  # one of ours
                self.deaths[role, index] += 1
                self.restarts[role] += 1
                record(self._paths, "ended", role=role, index=index, id=job.id, wall=time.time(), why="died")
                logger.warning("job %s of %s-%d died; starting another", job.id, role, index)
                if self.deaths[role, index] > self._config.launch.restarts:
                    log = self._paths.submitit / f"{role}-{index}"
                    return (
                        f"{role}-{index} died {self.deaths[role, index]} times without an update in between: see {log}"
                    )
            self._submitting = asyncio.create_task(submit_async(self._paths, role, index, self._control))
            self.wanted[role, index] = await asyncio.shield(self._submitting)
            deaths = self.deaths[role, index]
            self._not_before[role, index] = now + min(2.0 ** (deaths - 1), 30.0) if deaths else now
        return None

    def _lost_a_rank(self, job: Job) -> bool:
        """submitit's controller waits for all ranks, and those left may wait for data for as long as there is none."""
        started = time.time() - job.wall > RANKS_START_S
        return started and job.alive and 0 < len(job.tasks()) < self._config.learner.ranks

    async def stop(self, grace_s: float) -> None:
        """Wait for every job to end by itself; then ask by SIGTERM; then end it."""
        if self._submitting is not None:  # one may be on its way
            with contextlib.suppress(HpcrlError):
                job = await self._submitting
                self.wanted[job.role, job.index] = job
        living = [job for job in self.wanted.values() if job is not None and job.alive]
        for step, wait_s in ((None, grace_s), (signal.SIGTERM, grace_s), (signal.SIGKILL, 5.0)):
            alive = [job for job in living if job.alive]
            for job in alive:
                if step is signal.SIGKILL:
                    logger.warning("job %s of %s-%d did not end: killed", job.id, job.role, job.index)
                    job.kill()
                elif step is not None:
                    job.signal(step)
            for _ in range(int(wait_s / 0.1)):
                if not any(job.alive for job in alive):
                    break
                await asyncio.sleep(0.1)
        for job in living:
            record(self._paths, "ended", role=job.role, index=job.index, id=job.id, wall=time.time(), why="stopped")
