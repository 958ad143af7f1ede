"""Whole runs on a real Slurm: every role a job, and what happens to jobs on clusters happens to them."""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import shutil
import signal
import sys
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from distributed.comm import connect
from distributed.security import Security
from drill_parts import ENGINES, ROLES, Drill, pids
from length_bias import compare
from slurm_parts import TESTBED, Slurm, until

from hpcrl import launch
from hpcrl.layout import read_json
from hpcrl.store.ledger import lineage
from hpcrl.workers.guest import security

pytestmark = pytest.mark.slurm

STOPPED_S = 330.0  # longer than every patience of a drill's run: control_timeout_s is 300


@pytest.fixture(scope="module")
def drill(slurm: Slurm, tiny_model: Path) -> Iterator[Drill]:
    """One run that all drills are done to; at its end it is stopped, verified, and nothing of it is left."""
    folder = Path(tempfile.mkdtemp(prefix="drill"))
    folder.chmod(0o755)  # others may enter: what they can't read is so by our doing
    made = Drill(slurm, folder, model=tiny_model)
    until(made.is_whole, 300)
    made.goes_on()
    yield made
    made.stop()
    shutil.rmtree(folder)


@pytest.fixture(autouse=True)
def all_nodes(slurm: Slurm) -> Iterator[None]:
    yield
    slurm.script("up")


def test_a_job_that_is_cancelled_behind_our_back_is_replaced(drill: Drill) -> None:
    job = drill.jobs("rollout")[0]["id"]
    with drill.drill("scancel of a rollout job"):
        drill.slurm.ask("scancel", job)
        until(lambda: job not in [row["id"] for row in drill.jobs("rollout")])


def test_a_rollout_node_that_is_told_of_its_end_moves_its_trajectories(drill: Drill) -> None:
    faults = drill.status()["accounting"]["faults"].get("platform", 0)
    job = drill.jobs("rollout")[0]["id"]
    with drill.drill("USR2 to a rollout job"):
        drill.slurm.ask("scancel", "--signal=USR2", job)
        until(lambda: job not in [row["id"] for row in drill.jobs("rollout")])
    assert drill.status()["accounting"]["faults"].get("platform", 0) == faults, "moving is no fault"


def test_control_that_is_told_of_its_end_hands_over(drill: Drill) -> None:
    before = drill.jobs("control")[0]["id"], drill.jobs("rollout"), drill.status()["incarnation"]
    with drill.drill("USR2 to control"):
        drill.slurm.ask("scancel", "--signal=USR2", before[0])
        until(lambda: drill.status()["incarnation"] > before[2], 240)
    assert drill.jobs("control")[0]["id"] != before[0]
    assert drill.jobs("rollout") == before[1], "they carried on"


def test_control_that_is_told_of_its_end_while_it_starts_hands_over(drill: Drill) -> None:
    before, incarnation = drill.jobs("control")[0]["id"], drill.status()["incarnation"]
    with drill.drill("USR2 to a control that starts"):
        for pid in pids(drill.run, "hpcrl.roles", "control"):
            os.kill(pid, signal.SIGKILL)
        until(lambda: pids(drill.run, "hpcrl.roles", "control"), 60)
        drill.slurm.ask("scancel", "--signal=USR2", before)
        until(lambda: drill.jobs("control") and drill.jobs("control")[0]["id"] != before, 240)
        until(lambda: drill.status()["incarnation"] > incarnation, 240)


def test_control_that_is_killed_comes_back_within_its_job(drill: Drill) -> None:
    before = drill.jobs("control"), drill.jobs("rollout")
    with drill.drill("kill -9 of control"):
        for pid in pids(drill.run, "hpcrl.roles", "control"):
            os.kill(pid, signal.SIGKILL)
    assert (drill.jobs("control"), drill.jobs("rollout")) == before


def test_a_learner_that_is_requeued_goes_on_at_its_next_update(drill: Drill) -> None:
    (job,) = drill.jobs("learner")
    with drill.drill("requeue of the learner"):
        drill.slurm.ask("scontrol", "requeue", job["id"])
        drill.start_now(job["id"])
    assert drill.jobs("learner")[0]["id"] == job["id"]


def test_a_node_that_dies_takes_nothing_with_it(drill: Drill) -> None:
    """Of control, both sandboxes and a rank of the learner: where there is room for them all they share a node."""
    node = drill.jobs("control")[0]["nodes"]
    with drill.drill(f"{node} dies, with control"):
        kill_node(drill, node)


def test_a_pool_grows_and_shrinks_while_it_runs(drill: Drill) -> None:
    for size, wrong in (
        ("rollout=x", "POOL=JOBS"),
        ("rolout=3", "one of these pools: rollout, sandbox"),
        ("rollout=0", "0"),
    ):
        said = drill.hpcrl("scale", drill.run, size)
        assert said.returncode == 2 and wrong in said.stderr
    assert drill.hpcrl("scale", drill.run, "rollout=3").returncode == 0
    until(lambda: [job["state"] for job in drill.jobs("rollout")] == ["RUNNING"] * 3, 120)
    until(lambda: len(drill.status()["nodes"]) == 3, 120)
    newest = drill.jobs("rollout")[-1]["id"]
    with drill.drill("scaled down"):
        assert drill.hpcrl("scale", drill.run, "rollout=2").returncode == 0
        until(lambda: newest not in [job["id"] for job in drill.jobs("rollout")], 120)
    said = drill.hpcrl("logs", drill.run, "rollout", "--lines", 200)
    assert "leaving: trajectories move at their next step" in said.stdout


STRANGER = """
import asyncio, json, os, sys, tempfile
from pathlib import Path
from distributed import Client
from distributed.comm import connect
from distributed.security import Security

run, private, addresses = Path(sys.argv[1]), Path(sys.argv[2]), sys.argv[3:]
mine = Security.temporary()
os.setgroups([])
os.setgid(65534)
os.setuid(65534)
found = {"uid": os.getuid()}

def trying(name, call):
    try:
        found[name] = f"got {call()!r}"[:200]
    except Exception as error:
        found[name] = type(error).__name__

trying("config", lambda: (run / "config.json").read_bytes())
trying("key", lambda: (run / "control" / "tls" / "key.pem").read_bytes())
trying("inbox", lambda: (run / "control" / "inbox" / "stop.json").write_text("{}"))
trying("sockets", lambda: os.listdir(private))

async def ask(address, secure):
    arguments = secure.get_connection_args("client") if secure else {}
    comm = await asyncio.wait_for(connect(address, timeout=5, **arguments), 10)
    await comm.write({"op": "identity", "reply": True})
    return await asyncio.wait_for(comm.read(), 5)

for number, address in enumerate(addresses):
    trying(f"{number} with its own certificate", lambda: asyncio.run(ask(address, mine)))
    trying(f"{number} in the clear", lambda: asyncio.run(ask(address.replace("tls://", "tcp://"), None)))
print(json.dumps(found))
"""


def test_a_stranger_on_the_machine_reaches_nothing(drill: Drill) -> None:
    """Another uid, on the network that the nodes are on."""
    scheduler = read_json(drill.paths.scheduler)
    assert scheduler is not None
    workers = [row for row in listeners(drill) if row != scheduler["address"]]
    assert workers, "hosts and sandbox nodes listen"
    addresses = (scheduler["address"], *workers[:3])
    said = drill.slurm.ask(sys.executable, "-c", STRANGER, drill.run, drill.paths.private(), *addresses)
    found = json.loads(said.splitlines()[-1])
    assert found.pop("uid") == 65534
    assert found.pop("config").startswith("got"), "it may look around in the run folder, where the umask lets it"
    assert {name: error for name, error in found.items() if error.startswith("got")} == {}
    assert (found["key"], found["inbox"], found["sockets"]) == ("PermissionError",) * 3
    ours = security(drill.paths)  # and the run's own certificate opens the same door
    assert asyncio.run(identity(scheduler["address"], ours))["type"] == "Scheduler"


async def identity(address: str, secure: Security) -> dict[str, Any]:
    comm = await connect(address, **secure.get_connection_args("client"))
    await comm.write({"op": "identity", "reply": True})
    answer: dict[str, Any] = await comm.read()
    await comm.close()
    return answer


def listeners(drill: Drill) -> list[str]:
    """Addresses at which hosts and sandbox nodes say that they have joined or are to be reached."""
    found = asyncio.run(identity(read_json(drill.paths.scheduler)["address"], security(drill.paths)))  # type: ignore[index]
    return list(found["workers"])


@pytest.mark.slow
@pytest.mark.parametrize("role", ["rollout", "learner"])
def test_a_node_of_any_role_that_dies_takes_nothing_with_it(drill: Drill, role: str) -> None:
    nodes = drill.slurm.ask("scontrol", "show", "hostnames", drill.jobs(role)[0]["nodes"]).split()
    with drill.drill(f"{nodes[-1]} dies, with a {role} job", 400):
        kill_node(drill, nodes[-1])


@pytest.mark.slow
@pytest.mark.parametrize("role", ROLES)
def test_any_job_may_be_requeued(drill: Drill, role: str) -> None:
    job = drill.jobs(role)[0]["id"]
    with drill.drill(f"requeue of {role}", 400):
        drill.slurm.ask("scontrol", "requeue", job)
        drill.start_now(job)


@pytest.mark.slow
def test_rollout_jobs_give_way_to_a_higher_partition(drill: Drill) -> None:
    with drill.drill("preemption of all rollout jobs", 400):
        for job in drill.jobs("rollout"):
            drill.slurm.script("preempt", job["id"])


@pytest.mark.slow
def test_nothing_happens_while_slurm_is_away(drill: Drill) -> None:
    sys.path.insert(0, str(TESTBED))
    from testbed import Testbed  # type: ignore[import-not-found]

    jobs = {role: drill.jobs(role) for role in ROLES}
    with drill.drill("slurmctld stopped for 60 s"):
        Testbed(drill.slurm.state).kill("ctl")
        began = time.monotonic()
        said = drill.hpcrl("status", drill.run, timeout=100)
        assert said.returncode == 0 and "Slurm: Slurm doesn't answer" in said.stdout, (said.stdout, said.stderr)
        time.sleep(max(0.0, 60 - (time.monotonic() - began)))
        drill.slurm.script("up")
    assert {role: drill.jobs(role) for role in ROLES} == jobs


@pytest.mark.slow
@pytest.mark.parametrize("what", ["control", "host", "sandbox", "learner"])
def test_a_process_that_was_stopped_for_longer_than_all_patience(drill: Drill, what: str) -> None:
    words = {"control": ("hpcrl.roles", "control"), "host": ("hpcrl.roles", "host")}
    found = pids(drill.run, *words.get(what, ("submitit.core._submit", f"{drill.run}/logs/submitit/{what}-0")))
    with drill.drill(f"SIGSTOP of a {what} for {STOPPED_S:g} s", 400):
        os.kill(found[0], signal.SIGSTOP)
        time.sleep(STOPPED_S)
        with contextlib.suppress(ProcessLookupError):  # a learner's job has been ended meanwhile, and replaced
            os.kill(found[0], signal.SIGCONT)


@pytest.mark.slow
def test_a_run_whose_jobs_were_all_cancelled_is_resumed(drill: Drill) -> None:
    drill.slurm.ask("scancel", *(job["id"] for role in ROLES for job in drill.jobs(role)))
    until(lambda: not any(drill.jobs(role) for role in ROLES))
    with drill.drill("everything cancelled, then resumed", 400):
        said = drill.hpcrl("resume", drill.run, "--detach")
        assert said.returncode == 0, said.stderr


@pytest.mark.slow
@pytest.mark.vllm
@pytest.mark.timeout(1800)
def test_engines_outlive_control_and_a_node_of_theirs_is_replaced(slurm: Slurm, tiny_model: Path) -> None:
    folder = Path(tempfile.mkdtemp(prefix="engines"))
    run = Drill(slurm, folder, model=tiny_model, **ENGINES)
    until(run.is_whole, 600)
    until(lambda: run.updates >= 2, 600)
    engines = {node: row["engines"] for node, row in run.status()["nodes"].items()}
    with run.drill("kill -9 of control, with engines", 400):
        for pid in pids(run.run, "hpcrl.roles", "control"):
            os.kill(pid, signal.SIGKILL)
    nodes = run.status()["nodes"]
    assert {node: row["engines"] for node, row in nodes.items()} == engines
    assert not any(row["restarts"] for row in nodes.values())
    with run.drill("a node with an engine dies", 600):
        kill_node(run, run.jobs("rollout")[0]["nodes"])
    run.stop()
    shutil.rmtree(folder)


@pytest.mark.slow
@pytest.mark.timeout(3000)
def test_allocations_of_four_minutes_follow_one_another(slurm: Slurm, tiny_model: Path, tmp_path: Path) -> None:
    """Of each role three at least; nothing is missing, nothing done twice, and no trajectory is lost for its length."""
    folder = Path(tempfile.mkdtemp(prefix="walltime"))
    run = Drill(slurm, folder, model=tiny_model, time="4", signal_s=45, lead_s=45)
    lives = lambda role: {job.id for job in launch.jobs(run.paths) if job.role == role}  # noqa: E731
    until(lambda: all(len(lives(role)) >= 3 * count for role, count in ROLES.items()), 1500)
    run.goes_on(10, 400)
    run.stop()
    updates = [row.update for row in lineage(run.paths) if row.trajectories]
    assert updates == list(range(1, len(updates) + 1))
    told = json.loads(run.hpcrl("status", run.run, "--json").stdout)
    undisturbed = folder / "undisturbed"
    more = ("--set", "launch.executor=local", "--set", "learner.nodes=1", "--set", "phase.warm_start.updates=100")
    said = run.hpcrl("train", folder / "drill.toml", *more, "--run", undisturbed, timeout=900)
    assert said.returncode == 0, said.stderr
    found = compare(run.run, undisturbed)
    print(f"{len(updates)} updates; faults {told['accounting']['faults']}; lengths: {found}", flush=True)
    assert found["disturbed"] == found["undisturbed"] and found["num_steps_p"] > 0.01
    shutil.rmtree(folder)


@pytest.mark.slow
@pytest.mark.vllm
@pytest.mark.timeout(3000)
def test_tokens_that_engines_of_four_minutes_make_are_not_thrown_away(slurm: Slurm, tiny_model: Path) -> None:
    folder = Path(tempfile.mkdtemp(prefix="walltime"))
    lagging = {"phase": f"{ENGINES['phase']}\nmax_lag = 4"}
    run = Drill(slurm, folder, model=tiny_model, time="4", signal_s=45, lead_s=70, **(ENGINES | lagging))
    lives = lambda role: {job.id for job in launch.jobs(run.paths) if job.role == role}  # noqa: E731
    until(lambda: all(len(lives(role)) >= 3 * count for role, count in ROLES.items()), 2400)
    run.goes_on(10, 600)
    run.stop()
    updates = [row.update for row in lineage(run.paths) if row.trajectories]
    assert updates == list(range(1, len(updates) + 1))
    found = json.loads(run.hpcrl("seff", run.run, "--json").stdout)
    print(f"{len(updates)} updates; tokens {found['tokens']}; engine-seconds {found['engines']}", flush=True)
    assert found["tokens"]["thrown_away_share"] <= 0.02
    shutil.rmtree(folder)


def kill_node(drill: Drill, node: str) -> None:
    drill.slurm.script("kill-node", node)
    # Slurm notices by itself, after half a minute; that is not what is measured.
    drill.slurm.ask("scontrol", "update", f"NodeName={node}", "State=DOWN", "Reason=power")
    until(lambda: any(job["state"] == "PENDING" for role in ROLES for job in drill.jobs(role)), 60)
    for job in [job for role in ROLES for job in drill.jobs(role) if job["state"] == "PENDING"]:
        drill.slurm.run("scontrol", "update", f"JobId={job['id']}", "StartTime=now")


def test_jobs_are_on_record(drill: Drill) -> None:
    said = read_json(drill.paths.heartbeat)
    assert said is not None and said["state"] == "running"
    status = drill.hpcrl("status", drill.run).stdout
    for role in ROLES:
        (job, *_) = drill.jobs(role)
        assert f"{role}-0: job {job['id']}, running on {job['nodes']}" in status
