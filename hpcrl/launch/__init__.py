"""A role as a job: submit it, tell how it stands, end it. Owns jobs.jsonl and the run's certificate.

Each submission is made by a short helper process in a session of its own (`python -m hpcrl.roles submit`), so
that a job shares neither the terminal's signals nor the environment of whoever asked for it.
"""

from __future__ import annotations

import asyncio
import contextlib
import functools
import json
import os
import signal
import sys
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import asdict

from hpcrl.config import Config, load_resolved, seconds_of
from hpcrl.launch import local, slurm, steps
from hpcrl.launch.jobs import (
    GONE,
    ROLES,
    STATIC,
    Executor,
    Job,
    Role,
    State,
    ahead,
    complaints,
    jobs,
    newest,
    record,
    wanted,
)
from hpcrl.launch.slurm import SUBMIT_S, SlurmError
from hpcrl.layout import RunPaths, listed, next_number, publish, read_json
from hpcrl.types import ConfigError, HpcrlError

__all__ = [
    "GONE", "ROLES", "Job", "Role", "SlurmError", "State", "ahead", "complaints", "jobs", "newest", "record", "wanted",
]  # fmt: skip

EXECUTORS: dict[str, Executor] = {"local": local, "slurm": slurm, "steps": steps}


def look(jobs: Iterable[Job]) -> dict[str, State]:
    """How each job stands, by its key. Raises SlurmError when Slurm doesn't say."""
    found: dict[str, State] = {}
    for name, mine in _by_executor(jobs).items():
        found |= EXECUTORS[name].look(mine)
    return found


# For so long a job must not be listed to be held to have ended; steps aren't once they have.
GONE_S = {"slurm": 60.0, "steps": 5.0}


def alive(job: Job | None) -> bool:
    return job is not None and look([job])[job.key].alive


def current(paths: RunPaths, role: Role = "control") -> Job | None:
    """The first job of a role that lives; the last one where none does."""
    found = [job for job in jobs(paths) if job.role == role]
    states = look(found)
    return next((job for job in found if states[job.key].alive), found[-1] if found else None)


def successor(paths: RunPaths, before: Job) -> Job | None:
    """The job that was submitted to follow that one, if any was by now."""
    found = [job for job in jobs(paths) if (job.role, job.index) == (before.role, before.index)]
    keys = [job.key for job in found]
    return next(iter(found[keys.index(before.key) + 1 :]), None) if before.key in keys else None


def living(paths: RunPaths) -> list[Job]:
    """The jobs of a run that live."""
    found = jobs(paths)
    states = look(found)
    return [job for job in found if states[job.key].alive]


def at_rest(paths: RunPaths) -> bool:
    """Whether control said that the run has ended, and all its jobs: then Slurm, which may be out of reach, need not be
    asked."""
    stopped, found = read_json(paths.stopped), jobs(paths)
    return stopped is not None and stopped.get("left") == [] and bool(found) and found[-1].executor != "local"


def send(jobs: Iterable[Job], number: signal.Signals) -> None:
    """SIGTERM asks the jobs to end, SIGKILL ends them. Raises SlurmError when Slurm doesn't answer."""
    for name, mine in _by_executor(jobs).items():
        EXECUTORS[name].send(mine, number)


def _by_executor(jobs: Iterable[Job]) -> dict[str, list[Job]]:
    found: dict[str, list[Job]] = {}
    for job in jobs:
        found.setdefault(job.executor, []).append(job)
    return found


def start(paths: RunPaths, config: Config, prepare: Callable[[], None] = lambda: None) -> Job:
    """Submit control, which submits the rest. Where it may not: every job, and those that are to follow it.

    `prepare` is called first, once nobody else can be at it. Returns control's first job. Raises HpcrlError when one is
    refused, those before it are cancelled; ConfigError when the run has a control, or another command is about to give
    it one.
    """
    with _only_one(paths):
        before = current(paths)
        if before is not None and alive(before):
            raise ConfigError(f"{paths.root}: is running (job {before.id}); watch it with `hpcrl watch {paths.root}`")
        prepare()
        if config.launch.fleet == "presubmitted":
            record(paths, "ahead", wall=time.time())
        control = submit(paths, "control")
    if config.launch.fleet == "live":
        return control
    submitted = [control]
    number = next_number(path.stem for path in listed(paths.ledger, "*.jsonl"))  # of the control to come
    try:
        for role, index in wanted(config):
            before = control if role == "control" else None
            for _ in range(config.launch.lives - (role == "control")):
                # Before there is a control it would wait for one, on its nodes.
                after = f"after:{control.id}" if before is None else _turn(config, before)
                before = submit(paths, role, index, number, after=after)
                submitted.append(before)
    except BaseException:
        with contextlib.suppress(SlurmError):
            send(submitted, signal.SIGKILL)
        raise
    record(paths, "whole", wall=time.time())
    return control


@contextlib.contextmanager
def _only_one(paths: RunPaths) -> Iterator[None]:
    """Two that start a run at once would give it two controls."""
    claim = paths.control / "start.claim"
    while True:
        try:
            os.close(os.open(claim, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o644))
            break
        except FileExistsError:
            with contextlib.suppress(FileNotFoundError):
                if (age_s := time.time() - claim.stat().st_mtime) < 2 * SUBMIT_S:
                    said = f"another command has been starting it for {age_s:.0f} s"
                    raise ConfigError(f"{paths.root}: {said}; wait for it, or remove {claim}") from None
                claim.unlink()  # of one that was killed
    try:
        yield
    finally:
        claim.unlink(missing_ok=True)


def _turn(config: Config, before: Job) -> str:
    """When the job that follows may begin: when that one has ended; or a while before, where two may be at once."""
    asked = config.slurm_of(before.role, before.index)
    ended = f"afterany:{before.id}"
    if before.role not in ("rollout", "sandbox") or not asked.ahead_s():
        return ended
    return f"after:{before.id}+{(seconds_of(asked.time) - asked.ahead_s()) // 60}?{ended}"


def submit(paths: RunPaths, role: Role, index: int = 0, control: int = 0, *, after: str = "") -> Job:
    """Submit one job, for the control of that incarnation. `after`: Slurm's word for what it waits for. Raises
    HpcrlError with the executor's own words when it is refused."""
    return asyncio.run(submit_async(paths, role, index, control, after=after))


async def submit_async(paths: RunPaths, role: Role, index: int, control: int, *, after: str = "") -> Job:
    """`submit` without holding up the event loop. `after`: as there."""
    process = await asyncio.create_subprocess_exec(
        *_helper(paths, role, index, control),
        after,
        stdout=asyncio.subprocess.PIPE,
        stderr=asyncio.subprocess.PIPE,
        start_new_session=True,
    )
    try:
        async with asyncio.timeout(SUBMIT_S):
            out, err = await process.communicate()
    except TimeoutError as error:
        with contextlib.suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)  # sbatch, too, which may yet have its job taken
        raise SlurmError(f"job {role}-{index} could not be submitted: no answer for {SUBMIT_S:g} s") from error
    return _submitted(role, index, process.returncode, out, err)


def _helper(paths: RunPaths, role: Role, index: int, control: int) -> Sequence[str]:
    return (sys.executable, "-m", "hpcrl.roles", "submit", str(paths.root), role, str(index), str(control))


def _submitted(role: Role, index: int, code: int | None, out: bytes, err: bytes) -> Job:
    if code:
        # submitit repeats what sbatch has said by itself.
        lines = dict.fromkeys(line.strip() for line in err.decode(errors="replace").splitlines())
        said = "; ".join(line for line in lines if line)[-500:] or f"exit code {code}"
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


def node_environment(paths: RunPaths) -> dict[str, str]:
    """What a role's environment has besides STATIC: caches off HOME, in a folder of the node's own."""
    private = paths.private()
    caches = private / "cache"
    caches.mkdir(exist_ok=True)
    return {
        "DASK_CONFIG": str(private / "dask"),
        "XDG_CACHE_HOME": str(caches),
        "HF_HOME": str(caches / "huggingface"),
        "TRITON_CACHE_DIR": str(caches / "triton"),
        "TORCHINDUCTOR_CACHE_DIR": str(caches / "inductor"),
        "MPLCONFIGDIR": str(caches / "matplotlib"),
    }


def submit_here(paths: RunPaths, role: Role, index: int, body: functools.partial[None], after: str) -> None:
    """The helper's part: hand one job to submitit; record it, print the record.

    It records itself, so that a job is known even when whoever asked for it died meanwhile.
    """
    config = load_resolved(paths.config)
    # A local controller must not hold the pipe by which we answer, else our caller waits for the job's end.
    answer = os.dup(1)
    os.set_inheritable(answer, False)
    null = os.open(os.devnull, os.O_RDWR)
    for fd in (0, 1, 2) if config.launch.executor == "local" else (0, 1):
        os.dup2(null, fd)
    os.environ.update(STATIC)
    job = EXECUTORS[config.launch.executor].submit(paths, config, role, index, body, after)
    record(paths, "submitted", **asdict(job))
    os.write(answer, json.dumps(asdict(job)).encode() + b"\n")


def scripts(paths: RunPaths, config: Config) -> list[tuple[str, str]]:
    """(job, script) of each job that a run would submit."""
    executor = EXECUTORS[config.launch.executor]
    times = f" ({config.launch.lives} times)" if config.launch.fleet == "presubmitted" else ""
    found = []
    for role, index in wanted(config):
        of = f" of pool {config.pool(role, index).name}" if role in ("rollout", "sandbox") else ""
        found.append((f"{role}-{index}{of}{times}", executor.script(paths, config, role, index)))
    return found
