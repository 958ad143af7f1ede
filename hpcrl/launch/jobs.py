"""The jobs of a run, as jobs.jsonl has them. Whether one lives, its executor says (local.py, slurm.py)."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Literal

from hpcrl.config import Config
from hpcrl.layout import Appender, RunPaths, read_lines

Role = Literal["control", "rollout", "sandbox", "learner"]
ROLES: tuple[Role, ...] = ("control", "rollout", "sandbox", "learner")


@dataclass(frozen=True, slots=True, kw_only=True)
class Job:
    """A submitted job. Locally its id is the pid of submitit's controller, whose children are the job's tasks."""

    role: Role
    index: int
    executor: str
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
    """Every job that was submitted for this run, oldest first."""
    rows, _ = read_lines(paths.jobs, skip_torn=True)
    names = Job.__dataclass_fields__
    whole = [{"executor": "local", **row} for row in rows if row.get("event") == "submitted"]
    return [Job(**{name: row[name] for name in names}) for row in whole if all(name in row for name in names)]


def newest(paths: RunPaths, role: Role, index: int = 0) -> Job | None:
    return next((job for job in reversed(jobs(paths)) if job.role == role and job.index == index), None)


def wanted(config: Config) -> list[tuple[Role, int]]:
    """(role, index) of every job of a run."""
    counts: dict[Role, int] = {
        "control": 1,
        "rollout": sum(pool.jobs for pool in config.rollout),
        "sandbox": sum(pool.jobs for pool in config.sandbox),
        "learner": 1,
    }
    return [(role, index) for role, count in counts.items() for index in range(count)]


def record(paths: RunPaths, event: str, **fields: Any) -> None:
    appender = Appender(paths.jobs)
    try:
        appender.append({"event": event, **fields})
    finally:
        appender.close()
