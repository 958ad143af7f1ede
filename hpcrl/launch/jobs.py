"""The jobs of a run, as jobs.jsonl has them. Whether one lives, its executor says (local.py, slurm.py)."""

from __future__ import annotations

import functools
import logging
import signal
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Literal, Protocol

import msgspec

from hpcrl.config import Config
from hpcrl.layout import Appender, RunPaths, read_lines
from hpcrl.types import is_number

logger = logging.getLogger(__name__)

Role = Literal["control", "rollout", "sandbox", "learner"]
ROLES: tuple[Role, ...] = ("control", "rollout", "sandbox", "learner")

STATIC = {  # of every role's environment, on whatever node: one thread per process unless a role decides otherwise
    "OMP_NUM_THREADS": "1",
    "HF_HUB_OFFLINE": "1",
    "TOKENIZERS_PARALLELISM": "false",
    "PYTHONUNBUFFERED": "1",
}


@dataclass(frozen=True, slots=True, kw_only=True)
class Job:
    """A submitted job. Locally its id is the pid of submitit's controller, whose children are the job's tasks; of a
    step it is the name that we gave it."""

    role: Role
    index: int
    executor: Literal["local", "slurm", "steps"]
    id: str
    wall: float  # when it was submitted
    start: int = 0  # locally: of that process, as ProcessId tells it from a later namesake
    boot: str = ""

    @property
    def key(self) -> str:
        """Names it among the jobs of a run: its id, but pids come back."""
        return f"{self.id}/{self.start}" if self.executor == "local" else self.id


@dataclass(frozen=True, slots=True, kw_only=True)
class State:
    """How a job stands."""

    alive: bool  # it runs, or will; False only when that is sure
    name: str  # in the executor's words: PENDING, RUNNING, …
    node: str = ""
    reason: str = ""  # why it waits or ended
    left_s: float | None = None  # of its time limit


GONE = State(alive=False, name="GONE")


def jobs(paths: RunPaths) -> list[Job]:
    """Every job that was submitted for this run, oldest first. A line that can't be one is passed over, aloud: control
    goes on with what it knows, and whoever ends the run asks for `complaints` as well."""
    found, strange = _read(paths)
    for text in strange:
        _warn_once(text)
    return found


def complaints(paths: RunPaths) -> list[str]:
    """What can't be read of jobs.jsonl: there may be jobs that nobody knows."""
    return _read(paths)[1]


def _read(paths: RunPaths) -> tuple[list[Job], list[str]]:
    rows, _ = read_lines(paths.jobs, skip_torn=True)
    found, strange = [], []
    for row in rows:
        if isinstance(row, dict) and row.get("event") == "submitted":
            try:
                job = msgspec.convert({"executor": "local", **row}, Job)
                if job.executor == "local" and not is_number(job.id):
                    raise msgspec.ValidationError(f"{job.id!r} is the id of no process")
                found.append(job)
            except msgspec.ValidationError as error:
                strange.append(f"{paths.jobs}: unreadable: {error}")
    return found, strange


@functools.cache
def _warn_once(text: str) -> None:
    logger.warning("%s", text)


def ahead(paths: RunPaths) -> tuple[list[Job], bool]:
    """Of a run whose jobs are submitted ahead: those of the latest start, and whether these are all."""
    rows, _ = read_lines(paths.jobs, skip_torn=True)
    marks = [row for row in rows if isinstance(row, dict) and row.get("event") in ("ahead", "whole")]
    began = next((row["wall"] for row in reversed(marks) if row["event"] == "ahead"), 0.0)
    return [job for job in jobs(paths) if job.wall >= began], not marks or marks[-1]["event"] == "whole"


def newest(paths: RunPaths, role: Role, index: int = 0) -> Job | None:
    return next((job for job in reversed(jobs(paths)) if job.role == role and job.index == index), None)


def wanted(config: Config) -> list[tuple[Role, int]]:
    """(role, index) of every job of a run."""
    counts: dict[Role, int] = {
        "control": 1,
        "sandbox": sum(pool.jobs for pool in config.sandbox),  # before those that may queue for long, and need them
        "rollout": sum(pool.jobs for pool in config.rollout),
        "learner": 1,
    }
    return [(role, index) for role, count in counts.items() for index in range(count)]


def record(paths: RunPaths, event: str, **fields: Any) -> None:
    appender = Appender(paths.jobs)
    try:
        appender.append({"event": event, **fields})
    finally:
        appender.close()


class Executor(Protocol):
    """What a module of executors has: jobs of one kind."""

    def look(self, jobs: Sequence[Job]) -> dict[str, State]:
        """How each stands, by its key. Raises SlurmError when that can't be known now."""

    def send(self, jobs: Sequence[Job], number: signal.Signals) -> None:
        """To the tasks of each; SIGKILL ends the whole job."""

    def submit(
        self, paths: RunPaths, config: Config, role: Role, index: int, body: functools.partial[None], after: str
    ) -> Job:
        """Have `body` run, in this process's environment. `after`: what it waits for, in the executor's words, or
        ""."""

    def script(self, paths: RunPaths, config: Config, role: Role, index: int) -> str:
        """What the job would be, for people."""
