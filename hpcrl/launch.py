"""A role as a job: submit it, tell whether it lives, end it. Owns jobs.jsonl and the run's certificate.

Each submission is made by a short helper process in a session of its own (`python -m hpcrl.roles submit`), so
that a job shares neither the terminal's signals nor the environment of whoever asked for it.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, Literal

import psutil

from hpcrl.config import Config, load_resolved
from hpcrl.layout import Appender, ProcessId, RunPaths, publish, read_lines
from hpcrl.types import ConfigError, HpcrlError

Role = Literal["control", "rollout", "sandbox", "learner"]
ROLES: tuple[Role, ...] = ("control", "rollout", "sandbox", "learner")

# submitit's local executor ends a job after its limit, two minutes unless told: a local job has none.
LOCAL_MINUTES = 60 * 24 * 365


@dataclass(frozen=True, slots=True, kw_only=True)
class Job:
    """A submitted job. Locally its id is the pid of submitit's controller, whose children are the job's tasks."""

    role: Role
    index: int
    id: str
    start: int  # of that process, as ProcessId tells it from a later namesake
    boot: str
    wall: float  # when it was submitted

    @property
    def process(self) -> psutil.Process | None:
        if ProcessId(int(self.id), self.start, self.boot).lives():
            with contextlib.suppress(psutil.Error):
                return psutil.Process(int(self.id))
        return None

    @property
    def alive(self) -> bool:
        return self.process is not None

    def tasks(self) -> list[psutil.Process]:
        """The processes that do the job's work (the role's own, not what they started)."""
        process = self.process
        with contextlib.suppress(psutil.Error):
            children = process.children() if process else []
            return [child for child in children if child.status() != psutil.STATUS_ZOMBIE]
        return []

    def signal(self, number: signal.Signals) -> None:
        """Send to the job's tasks, as Slurm would."""
        for task in self.tasks():
            with contextlib.suppress(psutil.Error):
                task.send_signal(number)

    def kill(self) -> None:
        """End the job and all that its tasks started, at once."""
        process = self.process
        if process is None:
            return
        with contextlib.suppress(psutil.Error):
            for victim in [process, *process.children(recursive=True)]:
                with contextlib.suppress(psutil.Error):
                    victim.kill()


def jobs(paths: RunPaths) -> list[Job]:
    """Every job that was submitted for this run, oldest first."""
    rows, _ = read_lines(paths.jobs, skip_torn=True)
    names = Job.__dataclass_fields__
    whole = [row for row in rows if row.get("event") == "submitted" and all(name in row for name in names)]
    return [Job(**{name: row[name] for name in names}) for row in whole]


def newest(paths: RunPaths, role: Role, index: int = 0) -> Job | None:
    return next((job for job in reversed(jobs(paths)) if job.role == role and job.index == index), None)


def record(paths: RunPaths, event: str, **fields: Any) -> None:
    appender = Appender(paths.jobs)
    try:
        appender.append({"event": event, **fields})
    finally:
        appender.close()


def submit(paths: RunPaths, role: Role, index: int = 0, control: int = 0) -> Job:
    """Submit one job, for the control of that incarnation. Raises HpcrlError with the executor's own words when it is
    refused."""
    done = subprocess.run(
        _helper(paths, role, index, control), capture_output=True, start_new_session=True, check=False
    )
    return _submitted(role, index, done.returncode, done.stdout, done.stderr)


async def submit_async(paths: RunPaths, role: Role, index: int, control: int) -> Job:
    """`submit` without holding up the event loop."""
    process = await asyncio.create_subprocess_exec(
        *_helper(paths, role, index, control), stdout=subprocess.PIPE, stderr=subprocess.PIPE, start_new_session=True
    )
    out, err = await process.communicate()
    return _submitted(role, index, process.returncode, out, err)


def _helper(paths: RunPaths, role: Role, index: int, control: int) -> Sequence[str]:
    return (sys.executable, "-m", "hpcrl.roles", "submit", str(paths.root), role, str(index), str(control))


def _submitted(role: Role, index: int, code: int | None, out: bytes, err: bytes) -> Job:
    if code:
        said = err.decode(errors="replace").strip()[-500:] or f"exit code {code}"
        raise HpcrlError(f"job {role}-{index} could not be submitted: {said}")
    return Job(**json.loads(out.splitlines()[-1]))


def make_certificate(paths: RunPaths) -> None:
    """A key and a certificate of the run's own, readable by this user alone: Dask's roles prove themselves with it."""
    if (paths.tls / "key.pem").exists():
        return
    from distributed.security import Security

    fresh = Security.temporary()
    paths.tls.mkdir(mode=0o700, exist_ok=True)
    for name, text in (
        ("ca.pem", fresh.tls_ca_file),
        ("cert.pem", fresh.tls_client_cert),
        ("key.pem", fresh.tls_client_key),
    ):
        publish(paths.tls / name, text, mode=0o600)


def role_environment(paths: RunPaths) -> dict[str, str]:
    """What every role's environment has: caches off HOME, one thread per process unless a role decides otherwise."""
    private = paths.private()
    environment = dict(os.environ)
    caches = private / "cache"
    caches.mkdir(exist_ok=True)
    environment |= {
        "OMP_NUM_THREADS": "1",
        "DASK_CONFIG": str(private / "dask"),
        "XDG_CACHE_HOME": str(caches),
        "HF_HOME": str(caches / "huggingface"),
        "HF_HUB_OFFLINE": "1",
        "TRITON_CACHE_DIR": str(caches / "triton"),
        "TORCHINDUCTOR_CACHE_DIR": str(caches / "inductor"),
        "MPLCONFIGDIR": str(caches / "matplotlib"),
        "TOKENIZERS_PARALLELISM": "false",
        "PYTHONUNBUFFERED": "1",
    }
    return environment


def check_devices(config: Config) -> None:
    """Refuse a config that asks for GPUs which this machine does not have (local executor)."""
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
    """(role, index of the job, GPUs that it takes) of the jobs that may take any."""
    pools = [pool for pool in config.rollout for _ in range(pool.jobs)]
    rollout: list[tuple[Role, int, int]] = [("rollout", i, pool.engines * pool.gpus) for i, pool in enumerate(pools)]
    return [*rollout, ("learner", 0, config.learner.ranks * config.learner.gpus)]


def submit_here(paths: RunPaths, role: Role, index: int, control: int, body: Callable[..., None]) -> None:
    """The helper's part: hand one job, `body(root, role, index, control)`, to submitit; record it, print the record.

    It records itself, so that a job is known even when whoever asked for it died meanwhile.
    """
    import submitit

    config = load_resolved(paths.config)
    environment = role_environment(paths)
    if role in ("rollout", "learner"):  # control hands its own environment on
        environment["CUDA_VISIBLE_DEVICES"] = ",".join(devices_of(config, role, index, visible_devices()))
    os.environ.clear()
    os.environ.update(environment)
    executor = submitit.LocalExecutor(folder=paths.submitit / f"{role}-{index}")
    executor.update_parameters(
        timeout_min=LOCAL_MINUTES,
        tasks_per_node=config.learner.ranks if role == "learner" else 1,
        stderr_to_stdout=True,
    )
    # The controller must not hold the pipe by which we answer, else our caller waits for the job's end.
    answer = os.dup(1)
    os.set_inheritable(answer, False)
    null = os.open(os.devnull, os.O_RDWR)
    for fd in (0, 1, 2):
        os.dup2(null, fd)
    submitted = executor.submit(body, str(paths.root), role, index, control)
    process = ProcessId.of(int(submitted.job_id))
    job = Job(
        role=role, index=index, id=submitted.job_id, start=process.start, boot=process.boot, wall=time.time()
    )  # fmt: skip
    record(paths, "submitted", **asdict(job))
    os.write(answer, json.dumps(asdict(job)).encode() + b"\n")
