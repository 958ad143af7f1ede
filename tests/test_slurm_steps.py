"""Runs on sites that are otherwise, on a real Slurm: all roles within one allocation; no sbatch on compute nodes."""

from __future__ import annotations

import shutil
import tempfile
from collections.abc import Iterator
from pathlib import Path

import pytest
from drill_parts import Drill
from slurm_parts import Slurm, until

from hpcrl import launch
from hpcrl.layout import read_json
from hpcrl.store.verify import verify

pytestmark = [pytest.mark.slurm, pytest.mark.timeout(900)]


@pytest.fixture
def folder() -> Iterator[Path]:
    made = Path(tempfile.mkdtemp(prefix="steps"))
    yield made
    shutil.rmtree(made)


class InOneAllocation(Drill):
    def begin(self, *options: str) -> None:
        nodes = ("--nodes=3", "--ntasks-per-node=4", "--mem=3500M", "--time=30")
        said = self.sbatch("steps.sbatch", *nodes, *options, words=[self.run])
        self.allocation = said.split()[-1]

    def steps(self) -> dict[str, str]:
        """Slurm's ids of the run's steps, by our names."""
        said = self.slurm.ask("squeue", "--noheader", "--steps", f"--jobs={self.allocation}", "--format=%j|%i")
        rows = dict(line.split("|") for line in said.splitlines())
        return {name: id for name, id in rows.items() if id.split(".")[1].isdecimal()}

    def outcome(self) -> str | None:
        row = read_json(self.paths.stopped)
        return None if row is None or self.slurm.ask("squeue", "--noheader") else row["outcome"]


def test_a_run_within_one_allocation(slurm: Slurm, folder: Path, tiny_model: Path) -> None:
    run = InOneAllocation(slurm, folder, model=tiny_model, updates=150)
    until(lambda: run.updates >= 3, 400)
    steps = run.steps()
    assert sorted(name.split(".")[1] for name in steps) == ["c0", "l0", "r0", "r1", "s0", "s1"]
    acknowledged = run.acknowledged()
    lost = next(name for name in steps if ".r0." in name)
    slurm.ask("scancel", steps[lost])
    until(lambda: lost not in run.steps() and sum(".r0." in name for name in run.steps()) == 1, 120)
    run.goes_on()
    # The allocation's end is near: the run stops in order, by itself.
    slurm.ask("scancel", "--signal=USR2", run.allocation)
    until(lambda: run.outcome() == "stopped", 180)
    # Another allocation goes on with it, to its end.
    assert run.updates < 150
    run.begin()
    until(lambda: run.outcome() == "done", 500)
    assert run.updates == 150
    assert not acknowledged - run.acknowledged()
    report = verify(run.paths, deep=True)
    assert report.ok and not report.trained_twice, report


@pytest.mark.slow
def test_a_learner_that_has_nothing_to_do_gives_its_nodes_back(slurm: Slurm, folder: Path, tiny_model: Path) -> None:
    run = Drill(slurm, folder, "--set", "learner.idle_s=10", model=tiny_model)
    until(lambda: run.updates >= 2, 300)
    slurm.ask("scontrol", "update", "PartitionName=gpu", "State=DOWN")
    slurm.ask("scancel", *(job["id"] for job in run.jobs("rollout")))
    until(lambda: not run.jobs("learner"), 180)
    slurm.ask("scontrol", "update", "PartitionName=gpu", "State=UP")
    run.goes_on()
    run.stop()


def test_where_compute_nodes_may_not_submit(slurm: Slurm, folder: Path, tiny_model: Path) -> None:
    ahead = ("--set", "launch.fleet=presubmitted", "--set", "launch.lives=2")
    run = Drill(slurm, folder, *ahead, model=tiny_model, updates=400)
    submitted = launch.jobs(run.paths)
    assert len(submitted) == 12
    reasons = [slurm.job(job.id)["Reason"] for job in submitted[1::2]]
    assert reasons == ["Dependency"] * 6
    until(lambda: run.updates >= 2, 300)
    first, second = (job.id for job in submitted if job.role == "control")
    slurm.ask("scancel", first)
    until(lambda: slurm.job(second)["JobState"] == "RUNNING", 60)
    until(lambda: (read_json(run.paths.stopped) or {}).get("outcome") == "done", 300)
    until(lambda: not slurm.ask("squeue", "--noheader"), 60)
    assert launch.jobs(run.paths) == submitted, "nothing was submitted later"
    report = verify(run.paths, deep=True)
    assert report.ok and not report.trained_twice, report
