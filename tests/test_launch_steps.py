"""Roles as steps of one allocation, with commands that stand in for Slurm's; test_slurm_steps.py has the real ones."""

from __future__ import annotations

import asyncio
import functools
import os
import signal
import time
from collections.abc import Callable
from pathlib import Path

import pytest
from run_parts import hpcrl
from test_launch import Cluster, load

from hpcrl import config, launch, roles
from hpcrl.fleet import Fleet
from hpcrl.launch import SlurmError, slurm, steps
from hpcrl.layout import RunPaths
from hpcrl.node import is_earlier_life, job_id, job_of, node_id
from hpcrl.types import ConfigError

HET = '[launch]\nexecutor = "steps"\n[learner]\nslurm = {het_group = 1, memory = "2G"}\n'


@pytest.fixture
def allocation(monkeypatch: pytest.MonkeyPatch) -> None:
    for name, value in {"SLURM_JOB_ID": "7", "SLURM_STEP_ID": "3", "SLURM_MEM_PER_NODE": "9", "HPCRL_JOB": ""}.items():
        monkeypatch.setenv(name, value)


def made(tmp_path: Path, settings: config.Config) -> RunPaths:
    paths = RunPaths(tmp_path / "run")
    paths.root.mkdir()
    paths.make()
    paths.config.write_text(config.dump(settings))
    return paths


def body(paths: RunPaths, role: str) -> functools.partial[None]:
    return functools.partial(roles.run_role, str(paths.root), role, 0, 1)


def test_outside_of_an_allocation_is_said_at_once(tmp_path: Path) -> None:
    load(tmp_path, HET)
    done = hpcrl("train", tmp_path / "run.toml", "--run", tmp_path / "run")
    assert done.returncode == 2 and "needs an allocation around it, and there is none" in done.stderr
    assert not (tmp_path / "run").exists()


def test_a_component_of_a_heterogeneous_job(
    allocation: None, command: Callable[[str, str], Path], monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    settings = load(tmp_path, HET)
    paths = made(tmp_path, settings)
    with pytest.raises(ConfigError, match=r"^slurm.het_group: learner-0 wants component 1, this job has 0 to 0$"):
        steps.allocation_of(settings, "learner", 0)
    for name, value in {"SIZE": "2", "GROUP_0": "7", "GROUP_1": "8"}.items():
        monkeypatch.setenv(f"SLURM_{'JOB_ID_' if 'GROUP' in name else ''}HET_{name}", value)
    name = f"8.l0.{paths.root.stat().st_ino:x}.0"
    asked = command("srun", f"env > {tmp_path}/environment; echo '8.2|gpu1|{name}' > {tmp_path}/steps; sleep 20")
    command("squeue", f"case $* in *--steps*) cat {tmp_path}/steps 2>/dev/null; true ;; *) echo '8|9:59' ;; esac")
    job = steps.submit(paths, settings, "learner", 0, body(paths, "learner"), "")
    assert (job.id, job.executor) == (name, "steps")
    for word in ("--het-group=1 ", "--gres=none ", "--mem=2G ", f"-m hpcrl.roles run {paths.root} learner 0 1\n"):
        assert word in asked.read_text()
    given = dict(line.split("=", 1) for line in (tmp_path / "environment").read_text().splitlines() if "=" in line)
    kept = {name for name in given if name.startswith(("SLURM", "HPCRL_JOB"))}
    assert kept == {
        "SLURM_JOB_ID",
        "SLURM_HET_SIZE",
        "SLURM_JOB_ID_HET_GROUP_0",
        "SLURM_JOB_ID_HET_GROUP_1",
        "HPCRL_JOB",
    }
    state = steps.look([job])[job.key]
    assert (state.alive, state.node, state.reason, state.left_s) == (True, "gpu1", "8.2", 599.0)
    told = command("scancel", ":")
    steps.send([job], signal.SIGUSR2)
    assert told.read_text() == "--signal=USR2 8.2\n"
    # What a role calls itself is what Slurm is asked for.
    monkeypatch.setenv("HPCRL_JOB", given["HPCRL_JOB"])
    assert job_id() == name and job_of(node_id("r0")) == name and not is_earlier_life(node_id("r0"))
    again = steps.submit(paths, settings, "learner", 0, body(paths, "learner"), "")
    assert again.id == job.id, "not recorded, as whoever asked for it had died: not begun twice"


def test_no_room_is_said_in_sruns_words_and_nothing_goes_on_trying(
    allocation: None, command: Callable[[str, str], Path], monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    settings = load(tmp_path, '[launch]\nexecutor = "steps"\n')
    paths = made(tmp_path, settings)
    command("squeue", ":")
    asked = command("srun", "echo 'srun: error: Unable to create step for job 7: Requested nodes are busy' >&2; exit 1")
    with pytest.raises(SlurmError, match=r"^no step for it in job 7: .*Requested nodes are busy$"):
        steps.submit(paths, settings, "sandbox", 0, body(paths, "sandbox"), "")
    assert "--immediate=60 " in asked.read_text()
    command("srun", f"echo $$ > {tmp_path}/pid; exec sleep 60")
    command("squeue", f"test -e {tmp_path}/pid && echo down >&2 && exit 1; true")
    monkeypatch.setattr(slurm.time, "sleep", lambda seconds: None)
    with pytest.raises(SlurmError, match="Slurm doesn't answer"):
        steps.submit(paths, settings, "sandbox", 0, body(paths, "sandbox"), "")
    os.waitpid(-1, 0)  # it has been told
    with pytest.raises(ProcessLookupError):
        os.kill(int((tmp_path / "pid").read_text()), 0)


async def test_a_run_stops_in_order_when_its_allocation_is_nearly_over(
    command: Callable[[str, str], Path], tmp_path: Path
) -> None:
    settings = load(tmp_path, '[launch]\nexecutor = "steps"\nlook_s = 0.001\n[slurm]\nsignal_s = 60\n')
    paths = made(tmp_path, settings)
    rows = []
    for role, index in launch.wanted(settings):
        id = f"7.{role[0]}{index}.1.0"
        launch.record(
            paths, "submitted", role=role, index=index, executor="steps", id=id, wall=time.time(), start=0, boot=""
        )
        rows.append(f"7.{len(rows)}|n1|{id}")
    (tmp_path / "steps").write_text("\n".join(rows) + "\n")
    (tmp_path / "left").write_text("7|1:01\n")
    command("squeue", f"case $* in *--steps*) cat {tmp_path}/steps ;; *) cat {tmp_path}/left ;; esac")
    fleet = Fleet(paths, settings, 1)
    assert await fleet.ensure() is None and not fleet.ended
    (tmp_path / "left").write_text("7|0:59\n")
    fleet._looked = 0.0
    assert await fleet.ensure() == "stopped: the time of this allocation is nearly over"


async def test_what_was_submitted_ahead_is_not_submitted_again(
    command: Callable[[str, str], Path], tmp_path: Path
) -> None:
    cluster = Cluster(tmp_path, command, gpu_hours=9, fleet='"presubmitted"', lives=2)
    first = await asyncio.to_thread(launch.start, cluster.paths, cluster.settings)
    made = launch.jobs(cluster.paths)
    assert [(job.role, job.index) for job in made[::2]] == launch.wanted(cluster.settings)
    assert first == made[0] and launch.successor(cluster.paths, first) == made[1]
    after = [
        line for job in made for line in (tmp_path / f"{job.id}.sh").read_text().splitlines() if "dependency" in line
    ]
    assert [line.replace("'", "") for line in after] == [
        f"#SBATCH --dependency={what}" for what in (
            "afterany:100", "after:100", "after:102+58?afterany:102", "after:100", "after:104+58?afterany:104",
            "after:100", "after:106+58?afterany:106", "after:100", "afterany:108",
        )
    ]  # fmt: skip
    cluster.fleet = Fleet(cluster.paths, cluster.settings, 1)
    cluster.all_run(_108="FAILED|0:00|n1")
    assert await cluster.ensure() is None
    assert launch.jobs(cluster.paths) == made
    cluster.all_run(_108="FAILED|0:00|n1", _109="TIMEOUT|0:00|n1")
    assert await cluster.ensure() == "stopped: learner: the jobs that were submitted ahead are used up"
    cluster.fleet.ended.clear()
    cluster.all_run(_104="FAILED|0:00|n1", _105="FAILED|0:00|n1", _106="FAILED|0:00|n1", _107="FAILED|0:00|n1")
    assert await cluster.ensure() == "failed: rollout pool r: the jobs that were submitted ahead are used up"
    cluster.fleet.done.add("learner")
    cluster.all_run(_108="COMPLETED|0:00|n1", _109="PENDING|59:00|")
    cluster.fleet.ended.clear()
    assert await cluster.ensure() is None
    assert "--state=PENDING 109\n" in cluster.cancelled.read_text(), "there is nothing to do for it"
    (tmp_path / "refuse").touch()
    cluster.say()
    with pytest.raises(launch.HpcrlError, match="QOSMaxSubmitJob"):
        await asyncio.to_thread(launch.start, cluster.paths, cluster.settings)
