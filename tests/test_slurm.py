"""What needs a real Slurm: compaction by MPI ranks on two nodes, and the testbed itself."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
import time
from pathlib import Path

import psutil
import pytest
from run_parts import hpcrl
from slurm_parts import Slurm, until
from store_parts import assert_same_store, run_folder, trajectory, write

from hpcrl.layout import RunPaths
from hpcrl.store.compact import compact
from hpcrl.store.index import Store
from hpcrl.store.segment import CLOSED, segments
from hpcrl.store.verify import verify

pytestmark = pytest.mark.slurm

SHARD_BYTES = 9000
NAMES = [f"t{number}" for number in range(30)]

# `hpcrl` with small shards, on a heap that is full of what isn't zero. KILL=event: rank 1 is killed before its second
# such operation on a file of the run.
RANK = f"""
import ctypes, os, signal, sys
import h5py, hpcrl.store.index, mpi4py
from hpcrl.cli import main
from hpcrl.store.compact import compact
compact.__kwdefaults__["shard_bytes"] = {SHARD_BYTES}
seen = 0
def hook(event, args):
    global seen
    if event == os.environ["KILL"] and sys.argv[3] in str(args[0]) and "claim" not in str(args[0]):
        seen += 1
        if seen == 2:
            os.kill(os.getpid(), signal.SIGKILL)
libc = ctypes.CDLL(None)
libc.malloc.restype = ctypes.c_void_p
litter = [(ctypes.c_void_p(libc.malloc(size)), size) for size in range(100, 20000, 32) for _ in range(8)]
for place, size in litter:
    ctypes.memset(place, 0xA5, size)
for place, _ in litter[::2]:
    libc.free(place)
if "KILL" in os.environ and os.environ["SLURM_PROCID"] == "1":
    sys.addaudithook(hook)
main()
"""


def compact_by_ranks(
    slurm: Slurm, paths: RunPaths, *options: str, **environment: str
) -> subprocess.CompletedProcess[str]:
    words = (sys.executable, "-c", RANK, "store", "compact", paths.root, "--mpi", "--json")
    return slurm.run("srun", "--nodes=2", *options, *words, **environment)


async def filled(root: Path) -> RunPaths:
    paths = run_folder(root)
    await write(paths, *NAMES, segment_bytes=4000)
    return paths


@pytest.mark.parametrize("ranks", [2, 4])
async def test_ranks_on_two_nodes_make_the_shards_that_one_makes(slurm: Slurm, tmp_path: Path, ranks: int) -> None:
    one = await filled(tmp_path / "one")
    damaged = segments(one.log, CLOSED)[3]
    damaged.write_bytes(damaged.read_bytes()[:-1])
    many = RunPaths(shutil.copytree(one.root, tmp_path / "many"))
    done = compact(one, shard_bytes=SHARD_BYTES)
    assert done.shards > 4
    by_ranks = compact_by_ranks(slurm, many, "--mpi=pmi2", f"--ntasks={ranks}")
    assert by_ranks.returncode == 1, by_ranks.stderr  # of the damaged one
    report = json.loads(by_ranks.stdout)
    assert (report["shards"], report["segments"], report["records"]) == (done.shards, done.segments, done.records)
    assert [Path(path).name for path in report["damaged"]] == [damaged.name]
    assert_same_store(one, many)


async def test_ranks_that_know_nothing_of_each_other_are_refused(slurm: Slurm, tmp_path: Path) -> None:
    paths = await filled(tmp_path / "run")
    before = sorted(paths.root.rglob("*"))
    done = compact_by_ranks(slurm, paths, "--mpi=none", "--ntasks=2")
    assert done.returncode == 2 and not done.stdout
    assert done.stderr.count("came up as an MPI job of its own") == 2, done.stderr
    assert "SLURM_STEP_NUM_TASKS=2" in done.stderr and "srun --mpi=pmi2" in done.stderr
    assert sorted(paths.root.rglob("*")) == before


@pytest.mark.parametrize("event", ["os.rename", "os.remove"])
async def test_a_rank_that_is_killed_loses_nothing(slurm: Slurm, tmp_path: Path, event: str) -> None:
    """Before a shard is in place, and after that, before its segments are gone."""
    paths = await filled(tmp_path / "run")
    options = ("--mpi=pmi2", "--ntasks=2", "--kill-on-bad-exit")
    done = compact_by_ranks(slurm, paths, *options, KILL=event)
    assert done.returncode not in (0, 2) and "task 1: Killed" in done.stderr, done.stderr
    assert segments(paths.log, CLOSED), "nothing was left to do"
    assert_nothing_is_lost(paths)
    # From where the ranks can't be seen (here; on other nodes) their claims are waited for.
    claims = list(paths.shards.glob("*.claim"))
    assert claims
    waits = hpcrl("store", "compact", paths.root)
    assert waits.returncode == 1 and f"{min(claims)} is held by a compactor that" in waits.stdout, waits
    for claim in claims:
        os.utime(claim, (time.time() - 1000,) * 2)
    done = compact_by_ranks(slurm, paths, *options)
    assert done.returncode == 0, done.stderr
    assert not segments(paths.log, CLOSED) and not list(paths.shards.glob(".*")) + list(paths.shards.glob("*.claim"))
    assert_nothing_is_lost(paths)


def assert_nothing_is_lost(paths: RunPaths) -> None:
    assert verify(paths, deep=True).ok
    with Store(paths) as store:
        assert sorted(store.names()) == sorted(NAMES)
        for name in NAMES:
            assert [record.hash for record in store.records(name)] == [record.hash for record in trajectory(name)[1:]]


# ---- the testbed


def test_a_node_whose_power_fails(slurm: Slurm, tmp_path: Path) -> None:
    """Nothing on it survives, its job starts again elsewhere, and the node comes back."""
    script = tmp_path / "job"
    script.write_text(
        f"""#!/bin/bash
echo "$(hostname) ${{SLURM_RESTART_COUNT:-0}}" >> {tmp_path}/started
setsid sleep 600 &
srun --overlap sleep 600
"""
    )
    job = slurm.ask("sbatch", "--parsable", "--output=/dev/null", script)
    started = tmp_path / "started"
    until(started.exists)
    node = started.read_text().split()[0]
    assert node == slurm.job(job)["NodeList"]
    machine = int((slurm.state / "pid" / node).read_text().split()[0])
    until(lambda: sum(words.split()[0].endswith("sleep") for words in under(machine) if words) == 2)
    assert slurm.script("kill-node", node).returncode == 0
    assert not under(machine)
    assert slurm.script("kill-node", node).returncode == 2
    slurm.ask("scontrol", "update", f"NodeName={node}", "State=DOWN", "Reason=power")
    until(lambda: slurm.job(job)["JobState"] == "PENDING")
    slurm.ask("scontrol", "update", f"JobId={job}", "StartTime=now")
    until(lambda: len(started.read_text().splitlines()) == 2)
    # Slurm may have noticed by itself, too: then it was requeued twice.
    assert started.read_text().split()[2] != node and int(started.read_text().split()[3]) >= 1
    slurm.ask("scancel", job)
    done = slurm.script("up")
    assert done.returncode == 0, done.stderr
    assert slurm.ask("srun", f"--nodelist={node}", "hostname") == node


def test_a_job_that_is_preempted(slurm: Slurm, tmp_path: Path) -> None:
    """It is told, killed when its grace is over, requeued, and starts again."""
    script = tmp_path / "job"
    script.write_text(
        f"""#!/bin/bash
#SBATCH --signal=B:USR2@60
trap 'echo told >> {tmp_path}/said; scontrol requeue $SLURM_JOB_ID' USR2
echo start >> {tmp_path}/said
for second in {{1..600}}; do sleep 0.1; done
"""
    )
    options = ("--parsable", "--output=/dev/null", "--partition=gpu", "--gres=gpu:2", script)
    job = slurm.ask("sbatch", *options)
    said = tmp_path / "said"
    until(said.exists)
    done = slurm.script("preempt", job)
    assert done.returncode == 0 and done.stdout == "requeued\n", done
    until(lambda: said.read_text().split() == ["start", "told", "start"])
    assert slurm.job(job)["Restarts"] == "1"
    slurm.ask("scancel", job)
    until(lambda: slurm.job(job)["JobState"] == "CANCELLED")
    assert f"job {job} is CANCELLED" in slurm.script("preempt", job).stderr


def test_accounting(tmp_path: Path, slurm: Slurm) -> None:
    """A second testbed beside the first, with accounting."""
    accounted = Slurm.start(tmp_path / "state", "--accounting")
    try:
        assert accounted.script("up").returncode == 2, "it is up with accounting"
        assert sorted(accounted.ask("srun", "--nodes=2", "hostname").split()) == ["cpu1", "cpu2"]
        until(lambda: "COMPLETED" in accounted.ask("sacct", "--noheader", "--format=State", "--jobs=1"))
    finally:
        accounted.stop()
    assert slurm.ask("srun", "--nodelist=cpu3", "hostname") == "cpu3", "the first still works"


def under(pid: int) -> list[str]:
    """The command lines of all that a process started."""
    try:
        return [" ".join(process.cmdline()) for process in psutil.Process(pid).children(recursive=True)]
    except psutil.NoSuchProcess:
        return []
