"""Jobs as steps of the allocation that we are in: by srun, without sbatch.

A step outlives the srun that began it, and the step in which that ran. Slurm tells whether it lives: by its name, which
is ours alone, as the numbers of steps begin anew when an allocation is requeued.
"""

from __future__ import annotations

import functools
import os
import shlex
import signal
import subprocess
import sys
import time
from collections.abc import Sequence

from hpcrl.config import Config
from hpcrl.launch.jobs import GONE, Job, Role, State, jobs
from hpcrl.launch.slurm import OF_A_JOB, SlurmError, ask, container_of, seconds_left, size_of
from hpcrl.layout import RunPaths, read_json
from hpcrl.types import ConfigError

# What srun goes by; the rest describes the step that we may be in.
_KEPT = ("SLURM_CONF", "SLURM_JOB_ID", "SLURM_HET_SIZE", "SLURM_JOB_ID_HET_GROUP_")
LOOK_S = 0.5
PATIENCE_S = 60  # for room in the allocation: a step that has just ended may hold it yet


def look(jobs: Sequence[Job]) -> dict[str, State]:
    """How each step stands. Raises SlurmError when Slurm doesn't say."""
    if not jobs:
        return {}
    steps = _steps(_allocations(jobs))
    said = ask("squeue", "--noheader", _allocations(jobs), "--format=%A|%L")
    left = dict(row.split("|", 1) for row in said.splitlines() if "|" in row)
    states = {}
    for job in jobs:
        number, node = steps.get(job.id, ("", ""))
        left_s = seconds_left(left.get(job.id.partition(".")[0], ""))
        states[job.key] = State(alive=True, name="RUNNING", node=node, reason=number, left_s=left_s) if number else GONE
    return states


def _allocations(jobs: Sequence[Job]) -> str:
    return f"--jobs={','.join(sorted({job.id.partition('.')[0] for job in jobs}))}"


def _steps(asked: str) -> dict[str, tuple[str, str]]:
    """(Slurm's own id, nodes) of the steps that run, by name."""
    said = ask("squeue", "--noheader", "--steps", asked, "--format=%i|%N|%j")
    rows = [row.split("|", 2) for row in said.splitlines()]
    return {row[2]: (row[0], row[1]) for row in rows if len(row) == 3}


def send(jobs: Sequence[Job], number: signal.Signals) -> None:
    """To the tasks of each; SIGKILL ends the step."""
    if not jobs:
        return
    steps = _steps(_allocations(jobs))
    ids = [steps[job.id][0] for job in jobs if job.id in steps]
    if ids:
        ask("scancel", f"--signal={number.name.removeprefix('SIG')}", *ids)


def submit(paths: RunPaths, config: Config, role: Role, index: int, body: functools.partial[None], after: str) -> Job:
    """Begin a step, and wait until Slurm has it; for good in this process, whose environment the step takes over.

    Raises SlurmError in srun's words when there is no room for it in the allocation, ConfigError outside of one.
    """
    assert not after, "a step waits for no other"
    allocation = allocation_of(config, role, index)
    prefix = f"{allocation}.{role[0]}{index}.{paths.root.stat().st_ino:x}."
    known = jobs(paths)
    for name in _steps(f"--jobs={allocation}"):
        if name.startswith(prefix) and name not in {job.id for job in known}:
            # Whoever asked for it died before it could be recorded.
            return Job(role=role, index=index, executor="steps", id=name, wall=time.time())
    for name in [name for name in os.environ if name.startswith(OF_A_JOB) and not name.startswith(_KEPT)]:
        del os.environ[name]
    name = os.environ["HPCRL_JOB"] = f"{prefix}{len(known)}"
    said = paths.submitit / f"{role}-{index}" / f"{name}_srun.err"
    said.parent.mkdir(parents=True, exist_ok=True)
    words = [*_srun(paths, config, role, index, name), *(str(word) for word in body.args)]
    with said.open("wb") as file:
        srun = subprocess.Popen(words, stdin=subprocess.DEVNULL, stdout=file, stderr=file, start_new_session=True)
    try:
        while name not in _steps(f"--jobs={allocation}"):
            if srun.poll() is None:
                time.sleep(LOOK_S)
            elif any(said.parent.glob(f"{name}_*_log.out")):
                break  # it has been there
            else:
                raise SlurmError(
                    f"no step for it in job {allocation}: {said.read_text(errors='replace')[-500:].strip()}"
                )
    except BaseException:
        srun.terminate()  # it would go on trying
        raise
    return Job(role=role, index=index, executor="steps", id=name, wall=time.time())


def allocation_of(config: Config, role: Role, index: int) -> str:
    """The job in which a role is a step: of a heterogeneous one, the component that its config names."""
    if "SLURM_JOB_ID" not in os.environ:
        raise ConfigError(
            "launch.executor: is 'steps', which needs an allocation around it, and there is none (no SLURM_JOB_ID): "
            "begin with salloc, or with sbatch slurm/steps.sbatch"
        )
    group, size = config.slurm_of(role, index).het_group, int(os.environ.get("SLURM_HET_SIZE") or 1)
    if group >= size:
        raise ConfigError(f"slurm.het_group: {role}-{index} wants component {group}, this job has 0 to {size - 1}")
    return os.environ.get(f"SLURM_JOB_ID_HET_GROUP_{group}") or os.environ["SLURM_JOB_ID"]


def script(paths: RunPaths, config: Config, role: Role, index: int) -> str:
    """What srun would be given."""
    return shlex.join([*_srun(paths, config, role, index, f"{role}-{index}"), str(paths.root), role, str(index)]) + "\n"


def _srun(paths: RunPaths, config: Config, role: Role, index: int, name: str) -> list[str]:
    asked, size = config.slurm_of(role, index), size_of(config, role, index)
    excluded = (read_json(paths.excluded) or {"nodes": []})["nodes"]
    python, more = container_of(paths, asked)
    memory = f"--mem-per-cpu={asked.memory_per_cpu}" if asked.memory_per_cpu else f"--mem={asked.memory or 0}"
    given = {
        "--het-group": str(asked.het_group) if int(os.environ.get("SLURM_HET_SIZE") or 1) > 1 else "",
        "--gres": asked.gres.replace("{gpus}", str(size["gpus"])) if size["gpus"] else "none",  # else it takes them all
        "--exclude": ",".join(found for found in (asked.exclude, *excluded) if found),
    }  # fmt: skip
    return [
        "srun", "--exact", f"--immediate={PATIENCE_S}", f"--job-name={name}", f"--nodes={size['nodes']}",
        f"--ntasks={size['nodes'] * size['tasks']}", f"--ntasks-per-node={size['tasks']}",
        f"--cpus-per-task={asked.cpus or size['cpus']}", memory, "--kill-on-bad-exit=1",
        f"--output={paths.submitit}/{role}-{index}/{name}_%t_log.out",
        *(f"{flag}={value}" for flag, value in given.items() if value), *more, *asked.directives,
        *(python or [sys.executable]), "-m", "hpcrl.roles", "run",
    ]  # fmt: skip
