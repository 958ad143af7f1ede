"""Odd ways of launching that clusters see: an array of runs, a path with all that a path may have, reached by a link; a
job that is requeued again and again."""

from __future__ import annotations

import shutil
import sys
import tempfile
from collections import Counter
from pathlib import Path

import pytest
from drill_parts import config_of
from run_parts import HPCRL
from slurm_parts import Slurm, until

from hpcrl import launch
from hpcrl.layout import RunPaths, read_json
from hpcrl.store.ledger import lineage
from hpcrl.store.verify import verify

pytestmark = pytest.mark.slurm

# Each of two tasks starts a run of its own.
ARRAY = """#!/bin/bash
exec "$HPCRL" train "$1" --run "$2-$SLURM_ARRAY_TASK_ID" --set "seed=$SLURM_ARRAY_TASK_ID" --detach "${@:3}"
"""
SMALL = {"rollout.jobs": 1, "sandbox.jobs": 1, "learner.nodes": 1, "learner.ranks": 1}


@pytest.mark.slow
@pytest.mark.timeout(900)
def test_an_array_of_runs_in_an_odd_place(slurm: Slurm, tiny_model: Path) -> None:
    top = Path(tempfile.mkdtemp(prefix="array"))
    place, link = top / "my runs ü' $HOME", top / "link"
    place.mkdir()
    link.symlink_to(place)
    command = top / "bin"  # the environment, too, is reached by a link
    command.symlink_to(Path(sys.executable).parent)
    (place / "run.toml").write_text(config_of(model=tiny_model, updates=4000))
    (top / "array.sh").write_text(ARRAY)
    sets = [word for key, value in SMALL.items() for word in ("--set", f"{key}={value}")]
    words = (top / "array.sh", link / "run.toml", link / "run", *sets)
    said = slurm.run(
        "sbatch", "--wait", "--array=0-1", "--mem=500M", f"--output={top}/%a.out", *words, HPCRL=str(command / "hpcrl")
    )
    assert said.returncode == 0, (said.stderr, [path.read_text() for path in top.glob("*.out")])
    runs = [RunPaths(place / f"run-{number}") for number in range(2)]

    def updates(paths: RunPaths) -> int:
        return int((read_json(paths.heartbeat) or {"updates": {"done": 0}})["updates"]["done"])

    until(lambda: all(updates(paths) >= 3 for paths in runs), 300)
    for paths in runs:
        found = launch.jobs(paths)
        assert Counter(job.role for job in found) == {"control": 1, "rollout": 1, "sandbox": 1, "learner": 1}
        assert all(job.id.isdecimal() for job in found)

    (sandbox,) = [job for job in launch.jobs(runs[0]) if job.role == "sandbox"]
    lives = lambda: list(runs[0].usage.glob(f"sandbox-0-{sandbox.id}.*"))  # noqa: E731
    for life in range(1, 4):
        slurm.ask("scontrol", "requeue", sandbox.id)
        until(lambda: slurm.job(sandbox.id)["JobState"] == "PENDING", 60)
        slurm.run("scontrol", "update", f"JobId={sandbox.id}", "StartTime=now")
        until(lambda life=life: len(lives()) == life + 1, 120)
        before = updates(runs[0])
        until(lambda before=before: updates(runs[0]) > before + 1, 120)
    log = (runs[0].logs / f"sandbox-0-{sandbox.id}.jsonl").read_text()
    assert log.count(f"starts as job {sandbox.id}") == 4, "no life's log is written over"

    # One is stopped by one path and goes on by the other.
    assert slurm.run(*HPCRL, "stop", link / "run-1").returncode == 0
    done = updates(runs[1])
    assert slurm.run(*HPCRL, "resume", place / "run-1", "--detach").returncode == 0
    until(lambda: updates(runs[1]) > done + 1, 240)
    for paths in runs:
        assert slurm.run(*HPCRL, "stop", paths.root).returncode == 0
        made = [row.update for row in lineage(paths) if row.trajectories]
        assert made == list(range(1, len(made) + 1))
        report = verify(paths, deep=True)
        assert report.ok and not report.trained_twice, report
    shutil.rmtree(top)
