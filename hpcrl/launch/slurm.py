"""Jobs of a Slurm cluster: submitit's scripts, and what squeue and scancel say and do.

Slurm's commands hang for minutes while its controller is away: each gets a time limit and a few tries. One call asks
after all jobs.
"""

from __future__ import annotations

import functools
import logging
import math
import os
import re
import shlex
import signal
import subprocess
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from hpcrl.config import Config, seconds_of
from hpcrl.config import Slurm as SlurmTable
from hpcrl.launch.jobs import GONE, STATIC, Job, Role, State, jobs, wanted
from hpcrl.layout import RunPaths, read_json
from hpcrl.types import HpcrlError

logger = logging.getLogger(__name__)

ANSWER_S, TRIES = 20.0, 3
SUBMIT_S = 120.0
_ENDED = """
BOOT_FAIL CANCELLED COMPLETED DEADLINE FAILED NODE_FAIL OUT_OF_MEMORY PREEMPTED REVOKED TIMEOUT
"""
ENDED = frozenset(_ENDED.split())
# Of a job that submits another: what describes the one and would be taken for the other's.
OF_A_JOB = (
    "HPCRL_JOB",
    "SLURM",
    "SBATCH_",
    "SRUN_",
    "PMI",
    "SUBMITIT_",
    "GPU_DEVICE",
    "CUDA_VISIBLE",
    "ROCR_VISIBLE",
    "ZE_AFFINITY",
)
# Of a user's own; they would change what we read, or ask another cluster than the one that has our jobs.
_FORMATS = ("SQUEUE_", "SCANCEL_", "SACCT_", "SCONTROL_", "SLURM_TIME_FORMAT", "SLURM_CLUSTERS")
_NO_SUCH_JOB = "Invalid job id"


NO_MODULES = "HPCRL_NO_MODULES"  # in a job's environment: those that could not be loaded


class SlurmError(HpcrlError):
    """Slurm doesn't answer, or refuses: in its own words."""


def ask(*command: str, tries: int = TRIES) -> str:
    """What one of Slurm's commands prints; "" when it knows none of the jobs that it is asked for. Raises SlurmError
    when it gives no answer in time, or fails."""
    environment = {name: value for name, value in os.environ.items() if not name.startswith(_FORMATS)} | {"LC_ALL": "C"}
    said = ""
    for number in range(tries):
        if number:
            time.sleep(2.0**number)
        try:
            done = subprocess.run(
                command, env=environment, stdin=subprocess.DEVNULL, capture_output=True, text=True, errors="replace",
                timeout=ANSWER_S,
            )  # fmt: skip
        except FileNotFoundError as error:
            raise SlurmError(f"{command[0]}: not found on PATH; on a Slurm cluster it is") from error
        except subprocess.TimeoutExpired:
            said = f"no answer for {ANSWER_S:g} s"
            continue
        wrong = [line for line in done.stderr.splitlines() if line.strip() and _NO_SUCH_JOB not in line]
        if done.returncode == 0 or (_NO_SUCH_JOB in done.stderr and not wrong):
            return done.stdout
        said = wrong[-1].strip() if wrong else f"exit code {done.returncode}"
    raise SlurmError(f"Slurm doesn't answer ({command[0]}: {said})")


# ---- how jobs stand -------------------------------------------------------------------------------------------------


def look(jobs: Sequence[Job]) -> dict[str, State]:
    """How each job stands. Raises SlurmError when Slurm doesn't say."""
    # By id, whoever asks: what isn't there has ended long ago. Jobs that ended stay for some minutes (MinJobAge).
    said = ask(*SQUEUE, f"--jobs={','.join(sorted({job.id for job in jobs}))}") if jobs else ""
    found = {row.partition("|")[0]: row for row in said.splitlines()}
    return {job.key: state_of(found[job.id]) if job.id in found else GONE for job in jobs}


SQUEUE = ("squeue", "--noheader", "--states=all", "--format=%i|%T|%L|%N|%r")


def state_of(row: str) -> State:
    """A line of squeue's. Raises SlurmError for what is none."""
    try:
        _, name, left, node, reason = row.split("|", 4)
    except ValueError as error:
        raise SlurmError(f"squeue: can't read {row[:200]!r}; expected five fields between |") from error
    alive = name not in ENDED
    return State(
        alive=alive, name=name, node=node, reason="" if reason == "None" else reason, left_s=seconds_left(left)
    )


def seconds_left(text: str) -> float | None:
    try:
        return float(seconds_of(text))
    except ValueError:  # UNLIMITED, NOT_SET, INVALID
        return None


def send(jobs: Sequence[Job], number: signal.Signals) -> None:
    """SIGTERM: jobs that wait are cancelled, the tasks of those that run are told. SIGKILL: all are cancelled."""
    ids = [job.id for job in jobs]
    if not ids:
        return
    if number == signal.SIGKILL:
        ask("scancel", *ids)
        return
    ask("scancel", "--state=PENDING", *ids)
    ask("scancel", f"--signal={number.name.removeprefix('SIG')}", "--state=RUNNING", *ids)


# ---- submitting -----------------------------------------------------------------------------------------------------


def submit(paths: RunPaths, config: Config, role: Role, index: int, body: functools.partial[None], after: str) -> Job:
    """Hand `body` to sbatch; for good in this process, whose environment the job takes over, but for what is of a job.
    `after`: what it waits for, as Slurm's dependencies say it, or "". Raises SlurmError in sbatch's words."""
    kept = ("SLURM_CONF",) if config.slurm_of(role, index).account else ("SLURM_CONF", "SBATCH_ACCOUNT")
    for name in [name for name in os.environ if name.startswith(OF_A_JOB) and name not in kept]:
        del os.environ[name]  # of SBATCH_*, since sbatch would have it overrule the script
    if unknown := _unrecorded(paths, config, role, index):
        return Job(role=role, index=index, executor="slurm", id=unknown, wall=time.time())
    executor = _executor(paths, config, role, index)
    if after:
        executor.update_parameters(dependency=after)
    try:
        id = executor.submit(body).job_id
    except Exception as error:  # submitit's own kinds, among others
        raise SlurmError(str(error) or type(error).__name__) from error
    return Job(role=role, index=index, executor="slurm", id=id, wall=time.time())


def _unrecorded(paths: RunPaths, config: Config, role: Role, index: int) -> str:
    """The id of such a job that sbatch took while whoever asked had given up, or died; "" without one."""
    name = job_name(paths, config, role, index)
    found = ask("squeue", "--me", "--noheader", "--states=PENDING,RUNNING", f"--name={name}", "--format=%i").split()
    known = {job.id for job in jobs(paths)}
    for id in found:
        if id not in known:
            if _has_body(paths.submitit / f"{role}-{index}", id):
                return id
            ask("scancel", id)  # it would wait for it in vain
    return ""


def _has_body(folder: Path, id: str) -> bool:
    """Whether what a job is to run is there under its id, where submitit's process looks for it: who was killed between
    sbatch's answer and that left it under a name of its own."""
    wanted = folder / f"{id}_submitted.pkl"
    left = sorted(folder.glob("[0-9a-f]" * 32 + ".pkl"), key=lambda path: path.stat().st_mtime)
    if not wanted.exists() and left:
        left[-1].rename(wanted)
    return wanted.exists()


def cancel_strays(paths: RunPaths, config: Config) -> None:
    """Cancel what sbatch took of this run and nobody wrote down. Raises SlurmError when Slurm doesn't answer."""
    known = {job.id for job in jobs(paths)}
    mine = [job_name(paths, config, *one) for one in wanted(config)]
    said = ask("squeue", "--me", "--noheader", "--states=PENDING,RUNNING", "--format=%i|%j")
    rows = [row.partition("|") for row in said.splitlines()]
    if strays := [id for id, _, name in rows if name in mine and id not in known]:
        ask("scancel", *strays)


def script(paths: RunPaths, config: Config, role: Role, index: int) -> str:
    """What sbatch would be given."""
    executor = _executor(paths, config, role, index)
    made: str = executor._make_submission_file_text(executor._submitit_command_str, "")
    return made


def _executor(paths: RunPaths, config: Config, role: Role, index: int) -> Any:
    import submitit

    class SlurmExecutor(submitit.SlurmExecutor):  # type: ignore[misc]
        @classmethod
        def affinity(cls) -> int:
            return 2  # a script can be made where there is no srun; sbatch says it if it is missing

        @staticmethod
        def _get_job_id_from_submission_command(string: bytes | str) -> str:
            """Of a whole line: a site's sbatch may speak of other jobs, too."""
            said = string if isinstance(string, str) else string.decode(errors="replace")
            found = re.findall(r"^Submitted batch job (\d+)\b.*$", said, re.MULTILINE)
            if not found:
                raise SlurmError(f"sbatch names no job: {said[:300]!r}")
            return str(found[-1])

    python, _ = container_of(paths, config.slurm_of(role, index))
    executor = SlurmExecutor(folder=paths.submitit / f"{role}-{index}", python=shlex.join(python) or None)
    executor.update_parameters(**parameters(paths, config, role, index))
    return executor


def container_of(paths: RunPaths, asked: SlurmTable) -> tuple[list[str], list[str]]:
    """The words that call Python in a container, and srun's options for it; none without one."""
    if not asked.container:
        return [], []
    if asked.container_runtime == "pyxis":
        return [asked.container_python], [
            f"--container-image={asked.container}",
            f"--container-mounts={paths.root}",
        ]
    words = (asked.container_runtime, "exec", "--nv", "--bind", str(paths.root))
    return [*words, asked.container, asked.container_python], []


def job_name(paths: RunPaths, config: Config, role: Role, index: int) -> str:
    """Tells a user which job is which, and us which are this run's: its last part is the run folder's inode."""
    return f"{config.name}.{role}-{index}.{paths.root.stat().st_ino if paths.root.exists() else 0:x}"


def parameters(paths: RunPaths, config: Config, role: Role, index: int) -> dict[str, Any]:
    """submitit's parameters of a role's job."""
    asked = config.slurm_of(role, index)
    size = size_of(config, role, index)
    excluded = (read_json(paths.excluded) or {"nodes": []})["nodes"]
    cpus = asked.cpus or size["cpus"]
    srun_args = [f"--cpus-per-task={cpus}"]  # since 22.05 srun doesn't take it from the job
    if role == "learner":
        srun_args.append("--kill-on-bad-exit=1")
    srun_args += container_of(paths, asked)[1]
    more = dict(_directive(line) for line in asked.directives)
    for flag, value in (("mem", asked.memory), ("mem-per-cpu", asked.memory_per_cpu)):
        if value:
            more[flag] = value
    if size["gpus"] and asked.gres:
        more["gres"] = asked.gres.replace("{gpus}", str(size["gpus"]))
    if asked.requeue:
        more["requeue"] = True
    given = {
        "partition": asked.partition, "account": asked.account, "qos": asked.qos, "constraint": asked.constraint,
        "exclude": ",".join(name for name in (asked.exclude, *excluded) if name),
    }  # fmt: skip
    return {
        **{name: value for name, value in given.items() if value},
        "job_name": job_name(paths, config, role, index),
        "time": math.ceil(seconds_of(asked.time) / 60),
        "nodes": size["nodes"],
        "ntasks_per_node": size["tasks"],
        "cpus_per_task": cpus,
        **({"exclusive": True} if asked.exclusive else {}),
        "signal_delay_s": asked.signal_s,
        "stderr_to_stdout": True,
        "setup": [*map(_module, asked.modules), *asked.setup, *_exports()],
        "srun_args": srun_args,
        "additional_parameters": more,
        "wckey": None,  # submitit's own default is one that sites which know their keys refuse
    }


def _module(name: str) -> str:
    """Load it, or have the role say that it isn't there."""
    return f'module load {shlex.quote(name)} || export {NO_MODULES}="${{{NO_MODULES}:-}} "{shlex.quote(name)}'


def _exports() -> list[str]:
    """What must be set before Python starts."""
    return [f"export {name}={shlex.quote(value)}" for name, value in STATIC.items()]


def _directive(line: str) -> tuple[str, str | bool]:
    """`--key=value` or `--flag`."""
    key, equals, value = line.removeprefix("--").partition("=")
    return key, value if equals else True


def size_of(config: Config, role: Role, index: int) -> dict[str, int]:
    """Nodes, tasks per node, CPUs per task, GPUs per node that a role needs where the config doesn't say."""
    match role:
        case "rollout":
            pool = config.pool("rollout", index)
            threads = max(1, pool.threads) if not pool.gpus else 2  # vLLM's core and front end are busy on any device
            cpus = pool.engines * (threads + pool.gpus) + pool.hosts
            return {"nodes": 1, "tasks": 1, "cpus": cpus, "gpus": config.gpus_of(role, index)}
        case "learner":
            per_node = config.learner.ranks // config.learner.nodes
            gpus = config.gpus_of(role, index) // config.learner.nodes
            return {"nodes": config.learner.nodes, "tasks": per_node, "cpus": config.learner.threads, "gpus": gpus}
        case _:
            return {"nodes": 1, "tasks": 1, "cpus": 2, "gpus": 0}
