"""Jobs as processes of this machine: submitit's local executor."""

from __future__ import annotations

import contextlib
import functools
import os
import signal
import time
from collections.abc import Sequence
from pathlib import Path

import psutil

from hpcrl.config import Config
from hpcrl.launch.jobs import GONE, Job, Role, State, wanted
from hpcrl.layout import ProcessId, RunPaths, node_name
from hpcrl.types import ConfigError

# submitit's local executor ends a job after its limit, two minutes unless told: a local job has none.
MINUTES = 60 * 24 * 365


def look(jobs: Sequence[Job]) -> dict[str, State]:
    running = State(alive=True, name="RUNNING", node=node_name())
    return {job.key: GONE if _process(job) is None else running for job in jobs}


def send(jobs: Sequence[Job], number: signal.Signals) -> None:
    """To the jobs' tasks, as Slurm would; SIGKILL to all that these started, too."""
    for job in jobs:
        process = _process(job)
        if process is None:
            continue
        with contextlib.suppress(psutil.Error):
            victims = [process, *process.children(recursive=True)] if number == signal.SIGKILL else tasks(job)
            for victim in victims:
                with contextlib.suppress(psutil.Error):
                    victim.send_signal(number)


def tasks(job: Job) -> list[psutil.Process]:
    """The processes that do the job's work (the role's own, not what they started)."""
    process = _process(job)
    with contextlib.suppress(psutil.Error):
        children = process.children() if process else []
        return [child for child in children if child.status() != psutil.STATUS_ZOMBIE]
    return []


def _process(job: Job) -> psutil.Process | None:
    if ProcessId(int(job.id), job.start, job.boot).lives():
        with contextlib.suppress(psutil.Error):
            return psutil.Process(int(job.id))
    return None


def submit(paths: RunPaths, config: Config, role: Role, index: int, body: functools.partial[None], after: str) -> Job:
    """Hand `body` to submitit; for good in this process, whose environment the job takes over."""
    import submitit

    assert not after, "a local job waits for no other"
    os.environ.pop("HPCRL_JOB", None)
    if role in ("rollout", "learner"):  # control hands its own environment on
        os.environ["CUDA_VISIBLE_DEVICES"] = ",".join(devices_of(config, role, index, visible_devices()))
    executor = submitit.LocalExecutor(folder=paths.submitit / f"{role}-{index}")
    executor.update_parameters(
        timeout_min=MINUTES, tasks_per_node=config.learner.ranks if role == "learner" else 1, stderr_to_stdout=True
    )
    id = executor.submit(body).job_id
    process = ProcessId.of(int(id))
    return Job(
        role=role, index=index, executor="local", id=id, wall=time.time(), start=process.start, boot=process.boot
    )


def script(paths: RunPaths, config: Config, role: Role, index: int) -> str:
    """What the job would be, as a shell would have it; its devices by number where this machine has too few."""
    total = sum(count for _, _, count in _shares(config))
    there = visible_devices()
    devices = there if len(there) >= total else [str(number) for number in range(total)]
    mine = ",".join(devices_of(config, role, index, devices))
    tasks = config.learner.ranks if role == "learner" else 1
    given = f"CUDA_VISIBLE_DEVICES={mine} " if role in ("rollout", "learner") else ""
    return f"{given}python -m submitit.core._submit {paths.submitit}/{role}-{index}  # {tasks} times\n"


# ---- devices --------------------------------------------------------------------------------------------------------


def check_devices(config: Config) -> None:
    """Refuse a config that asks for GPUs which this machine does not have."""
    wanted = sum(count for _, _, count in _shares(config))
    found = len(visible_devices()) if wanted else 0
    if wanted > found:
        raise ConfigError(
            f"rollout.gpus and learner.gpus ask for {wanted} GPUs, this machine has {found}; set them to 0 for CPU"
        )


def visible_devices() -> list[str]:
    """This machine's GPUs as CUDA_VISIBLE_DEVICES names them, or those that it names already."""
    there = sorted((path.name.removeprefix("nvidia") for path in Path("/dev").glob("nvidia[0-9]*")), key=int)
    given = os.environ.get("CUDA_VISIBLE_DEVICES")
    return there if given is None or not there else [name for name in given.split(",") if name]


def devices_of(config: Config, role: Role, index: int, devices: Sequence[str]) -> list[str]:
    """A local job's own GPUs: no device serves two jobs."""
    start = 0
    for other, number, count in _shares(config):
        if (other, number) == (role, index):
            return list(devices[start : start + count])
        start += count
    return []


def _shares(config: Config) -> list[tuple[Role, int, int]]:
    """(role, index of the job, GPUs that it takes) of every job."""
    return [(role, index, config.gpus_of(role, index)) for role, index in wanted(config)]
