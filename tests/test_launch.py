"""What Slurm is asked for and what its answers are taken for; the cluster itself is in test_slurm_run.py."""

from __future__ import annotations

import asyncio
import concurrent.futures
import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from dataclasses import asdict, replace
from pathlib import Path

import pytest
from run_parts import hpcrl

from hpcrl import config, launch, node
from hpcrl.cli import runs
from hpcrl.config import Config, seconds_of
from hpcrl.fleet import Fleet
from hpcrl.launch import Job, SlurmError, slurm
from hpcrl.launch.slurm import ask, look, state_of
from hpcrl.launch.watch import ControlWatch
from hpcrl.layout import RunPaths, publish_json, read_json
from hpcrl.types import ConfigError, HpcrlError

ROOT = Path(__file__).parents[1]
SCRIPTS = Path(__file__).with_name("scripts")
RL = '[[phase]]\nname = "rl"\nobjective = "sft"\ntrajectories = 1\n[evaluation]\ntasks = 0\n'


def load(tmp_path: Path, text: str, *sets: str) -> Config:
    path = tmp_path / "run.toml"
    path.write_text(RL + text)
    return config.load(path, sets)


# ---- scripts --------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", ["cluster", "one_node", "testbed", "steps"])
def test_the_scripts_of_a_dry_run(name: str, tmp_path: Path) -> None:
    """To make them anew: delete the file, and look at what git says of the new one."""
    path = ROOT / "configs" / f"{name}.toml"
    if name in ("testbed", "steps"):
        path = tmp_path / "testbed.toml"
        path.write_text(f'include = ["{ROOT}/configs/quickstart.toml", "{ROOT}/slurm/sites/testbed.toml"]\n')
        if name == "steps":
            path.write_text(path.read_text() + '[launch]\nexecutor = "steps"\n')
    done = hpcrl("train", path, "--dry-run", "--run", "/runs/one", "--set", "rollout.slurm={partition='odd one'}")
    assert done.returncode == 0, done.stderr
    said = done.stdout.replace(sys.executable, "PYTHON")
    kept = SCRIPTS / f"{name}.txt"
    if not kept.exists():
        kept.write_text(said)
        pytest.fail(f"{kept} was missing: it has been made, look at it")
    assert said == kept.read_text()
    assert not Path("/runs").exists()


def test_a_container_and_lines_of_a_sites_own(tmp_path: Path) -> None:
    text = '[launch]\nexecutor = "slurm"\n[slurm]\nmodules = ["cuda/12"]\nsetup = ["ulimit -n 4096"]\n'
    text += 'directives = ["--reservation=school", "--overcommit"]\nmemory_per_cpu = "2G"\n'
    text += 'container = "/images/a b.sif"\n[control]\nslurm = {container_runtime = "pyxis", memory_per_cpu = ""}\n'
    settings = load(tmp_path, text)
    rollout, control = (slurm.script(RunPaths(tmp_path), settings, role, 0) for role in ("rollout", "control"))
    for line in ("ulimit -n 4096", "#SBATCH --reservation=school", "#SBATCH --overcommit"):
        assert line in rollout.splitlines()
    assert "\nmodule load cuda/12 || " in rollout
    assert "#SBATCH --mem-per-cpu=2G" in rollout and "--mem=" not in rollout
    assert f"apptainer exec --nv --bind {tmp_path} '/images/a b.sif' python3 -u -m submitit" in rollout
    assert "'--container-image=/images/a b.sif'" in control and "mem" not in control


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ('[slurm]\ntime = "72h"', "slurm.time: '72h' is no time that Slurm knows"),
        ("[slurm]\ntime = 0", "slurm.time: must be more than nothing"),
        ('[slurm]\npartion = "gpu"', "unknown key 'slurm.partion'; did you mean 'partition'?"),
        ('[learner]\nslurm = {partion = "gpu"}', "unknown key 'learner.slurm.partion'; did you mean 'partition'?"),
        ('[control]\nslurm = {memory = "4 GB"}', "control.slurm.memory: "),
        ('[slurm]\nmemory = "4G"\nmemory_per_cpu = "1G"', "memory and memory_per_cpu exclude each other"),
        ('[slurm]\ndirectives = ["-p gpu"]', "slurm.directives"),
        ('[slurm]\ndirectives = ["--array=0-9"]', "'--array=0-9' can't be given, it is hpcrl's to set"),
        ("[slurm]\ntime = 1\nsignal_s = 60", "signal_s (60) must be less than time (1)"),
        ('[slurm]\naccount = "a\\rb"', "slurm.account"),
        ("[learner]\nranks = 3\nnodes = 2", "ranks (3) must be a multiple of nodes (2)"),
        ('[launch]\nexecutor = "slurm"\n[learner]\ngpus = 1', "launch.gpu_hours: is 0; jobs that follow one another"),
        ('[[rollout]]\nname = "r"\nengines = 0\n[evaluation]\ntasks = 3', "rollout: no pool has engines"),
        ('[launch]\nexecutor = "pbs"', "launch.executor"),
    ],
)
def test_what_is_refused(text: str, message: str, tmp_path: Path) -> None:
    path = tmp_path / "run.toml"
    own = "" if "[evaluation]" in text else "\n[evaluation]\ntasks = 0\n"
    path.write_text(RL.partition("[evaluation]")[0] + text + own)
    with pytest.raises(ConfigError) as caught:
        config.load(path)
    assert message in str(caught.value)


def test_names_that_break_out_of_a_script_are_refused(tmp_path: Path) -> None:
    for name in ("a\ntouch b", "b%j"):
        done = hpcrl("train", ROOT / "configs" / "cluster.toml", "--dry-run", "--run", tmp_path / name)
        assert done.returncode == 2 and "can't have %" in done.stderr and not done.stdout
    text = '[launch]\nexecutor = "slurm"\n[slurm]\nmodules = ["cuda; touch b", "$(id)"]\ngres = "gpu:{gpus.x}"\n'
    made = slurm.script(RunPaths(tmp_path), load(tmp_path, text), "rollout", 0)
    assert "module load 'cuda; touch b'" in made and "module load '$(id)'" in made


def test_the_only_pool_needs_no_name(tmp_path: Path) -> None:
    settings = load(tmp_path, "", "rollout.slurm.qos=high", "sandbox.slurm.cpus=3", "sandbox.jobs=2")
    assert settings.slurm_of("rollout", 0).qos == "high" and settings.slurm_of("sandbox", 1).cpus == 3
    with pytest.raises(ConfigError, match=r"unknown key 'rollout.*qs'"):
        load(tmp_path, "", "rollout.slurm.qs=high")


@pytest.mark.parametrize(
    ("text", "seconds"),
    [
        ("4320", 259200), ("72:00:00", 259200), ("3-0", 259200), ("3-00:00:00", 259200), ("1-2:3", 93780),
        ("90:30", 5430), ("1:02:03", 3723), ("0", 0),
    ],
)  # fmt: skip
def test_times(text: str, seconds: int) -> None:
    assert seconds_of(text) == seconds


@pytest.mark.parametrize("text", ["", "72h", "1d", "-5", "1:2:3:4", "UNLIMITED", "1-", "٣"])
def test_no_times(text: str) -> None:
    with pytest.raises(ValueError, match="no time that Slurm knows"):
        seconds_of(text)


# ---- answers --------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("row", "alive", "node", "reason", "left_s"),
    [
        ("12|RUNNING|1-02:00:00|gpu[1-2]|None", True, "gpu[1-2]", "", 93600.0),
        ("12|PENDING|10:00||Resources", True, "", "Resources", 600.0),
        ("12|PENDING|UNLIMITED||(ReqNodeNotAvail, a|b)", True, "", "(ReqNodeNotAvail, a|b)", None),
        ("12|COMPLETING|0:00|n1|None", True, "n1", "", 0.0),
        ("12|REQUEUE_HOLD|INVALID||job requeued in held state", True, "", "job requeued in held state", None),
        ("12|A_STATE_OF_TOMORROW|0:01|n1|None", True, "n1", "", 1.0),
        ("12|NODE_FAIL|0:00|n1|None", False, "n1", "", 0.0),
        ("12|OUT_OF_MEMORY|0:00|n1|OutOfMemory", False, "n1", "OutOfMemory", 0.0),
    ],
)  # fmt: skip
def test_states(row: str, alive: bool, node: str, reason: str, left_s: float | None) -> None:
    found = state_of(row)
    assert (found.alive, found.node, found.reason, found.left_s) == (alive, node, reason, left_s)


def jobs(count: int) -> list[Job]:
    return [Job(role="sandbox", index=index, executor="slurm", id=str(100 + index), wall=0.0) for index in range(count)]


def test_one_question_for_all_jobs_and_none_is_taken_for_dead_without_an_answer(
    command: Callable[[str, str], Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("SQUEUE_FORMAT", "%A")  # a user's own
    monkeypatch.setenv("SLURM_CLUSTERS", "another")
    calls = command("squeue", 'test -z "$SQUEUE_FORMAT$SLURM_CLUSTERS" && echo "100|RUNNING|1:00|n1|None"')
    found = look(jobs(200))
    (asked,) = calls.read_text().splitlines()
    assert "--me" not in asked and ",".join(sorted(str(100 + index) for index in range(200))) in asked
    assert [key for key, state in found.items() if state.alive] == ["100"]
    monkeypatch.setattr(slurm, "ANSWER_S", 0.2)
    monkeypatch.setattr(slurm.time, "sleep", lambda seconds: None)
    calls = command("squeue", "exec sleep 30")
    with pytest.raises(SlurmError, match=r"squeue: no answer for 0.2 s"):
        look(jobs(1))
    assert len(calls.read_text().splitlines()) == 1 + slurm.TRIES
    command("squeue", "echo 'slurm_load_jobs error: Unable to contact slurm controller' >&2; exit 1")
    with pytest.raises(SlurmError, match="Unable to contact"):
        look(jobs(1))
    monkeypatch.setenv("PATH", "/nowhere")
    with pytest.raises(SlurmError, match="squeue: not found on PATH"):
        ask("squeue")


def test_jobs_that_slurm_has_forgotten_are_gone_and_garbage_is_no_answer(
    command: Callable[[str, str], Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(slurm.time, "sleep", lambda seconds: None)
    command("squeue", "echo 'slurm_load_jobs error: Invalid job id specified' >&2; exit 1")
    assert [state.alive for state in look(jobs(1)).values()] == [False]
    for garbage in ("100", "100|RUNNING", "100|RUNNING|1:00|n"):
        command("squeue", f"echo '{garbage}'")
        with pytest.raises(SlurmError, match="can't read"):
            look(jobs(1))
    command("squeue", r"printf '7|RUNNING|1:00|\xff\xfe|x\n100|RUNNING|1:00|n\xff|x\n'")
    assert look(jobs(1))["100"].alive
    command("scancel", "echo 'scancel: error: Kill job error on job id 100: Invalid job id specified' >&2; exit 1")
    launch.send(jobs(1), signal.SIGKILL)
    command("scancel", "echo 'Unable to contact slurm controller' >&2; exit 1")
    with pytest.raises(SlurmError, match="Unable to contact"):
        launch.send(jobs(1), signal.SIGKILL)


def test_a_run_at_rest_needs_no_slurm(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PATH", "/nowhere")
    paths = RunPaths(tmp_path / "run")
    paths.root.mkdir()
    paths.make()
    paths.config.write_text(config.dump(load(tmp_path, '[launch]\nexecutor = "slurm"\n')))
    for job in jobs(2):
        launch.record(paths, "submitted", **asdict(job))
    for words in (("store", "repair"), ("stop",)):
        asked = hpcrl(*words, paths.root)
        assert asked.returncode == 2 and "squeue: not found on PATH" in asked.stderr
    paths.stopped.write_text('{"outcome": "done", "wall": 1.0, "left": []}')
    assert hpcrl("stop", paths.root).returncode == 0
    assert hpcrl("store", "repair", paths.root).returncode == 0
    said = hpcrl("status", paths.root)
    assert said.returncode == 0 and "squeue" not in said.stdout


async def test_a_fleet_leaves_its_jobs_alone_while_slurm_is_away(
    command: Callable[[str, str], Path], monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    settings = load(tmp_path, '[launch]\nexecutor = "slurm"\n[[rollout]]\nname = "r"\nengines = 0\n')
    paths = RunPaths(tmp_path / "run")
    paths.root.mkdir()
    paths.make()
    for role, index in launch.wanted(settings):
        launch.record(
            paths, "submitted", role=role, index=index, executor="slurm", id=f"{role}7", wall=0.0, start=0, boot=""
        )
    monkeypatch.setattr(slurm.time, "sleep", lambda seconds: None)
    command("squeue", "exit 1")
    submitted = command("sbatch", "exit 1")
    fleet = Fleet(paths, settings, 1)
    assert await fleet.ensure() is None and not submitted.read_text()
    assert not fleet.ended


def test_a_job_inherits_nothing_of_the_job_that_submits_it(
    command: Callable[[str, str], Path], monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    for name in ("SLURM_JOB_ID", "SLURM_MEM_PER_CPU", "SLURM_HET_SIZE", "SBATCH_PARTITION", "CUDA_VISIBLE_DEVICES"):
        monkeypatch.setenv(name, "7")
    monkeypatch.setenv("SLURM_CONF", "/etc/here")
    monkeypatch.setenv("SBATCH_ACCOUNT", "mine")
    seen = tmp_path / "environment"
    command("sbatch", f"env > {seen}; echo Submitted batch job 42")
    command("squeue", ":")
    paths = RunPaths(tmp_path / "my run ü")
    paths.root.mkdir()
    paths.make()
    paths.config.write_text(config.dump(load(tmp_path, '[launch]\nexecutor = "slurm"\n')))
    job = launch.submit(paths, "sandbox")
    assert (job.id, job.executor) == ("42", "slurm")
    assert [row.id for row in launch.jobs(paths)] == ["42"]
    given = dict(line.split("=", 1) for line in seen.read_text().splitlines() if "=" in line)
    assert {name for name in given if name.startswith(("SLURM", "SBATCH", "CUDA"))} == {"SLURM_CONF", "SBATCH_ACCOUNT"}
    command("sbatch", "echo 'sbatch: error: invalid partition specified: gpu' >&2; exit 1")
    with pytest.raises(HpcrlError, match=r"^job sandbox-0 could not be submitted: sbatch: error: invalid partition"):
        launch.submit(paths, "sandbox")
    assert len(launch.jobs(paths)) == 1


def test_a_job_that_was_taken_without_an_answer_is_not_submitted_twice(
    command: Callable[[str, str], Path], tmp_path: Path
) -> None:
    paths = RunPaths(tmp_path / "run")
    paths.root.mkdir()
    paths.make()
    settings = load(tmp_path, '[launch]\nexecutor = "slurm"\n')
    paths.config.write_text(config.dump(settings))
    said = "echo note: your job 2 of 50 today; echo Submitted batch job 42; echo and job 3 runs"
    submitted = command("sbatch", said)
    asked = command("squeue", "echo 77")
    cancelled = command("scancel", ":")
    folder = paths.submitit / "sandbox-0"
    folder.mkdir(parents=True)
    (folder / f"{'0f' * 16}.pkl").write_bytes(b"what it runs")  # as who was killed after sbatch's answer leaves it
    assert launch.submit(paths, "sandbox").id == "77" and not submitted.read_text()
    assert (folder / "77_submitted.pkl").read_bytes() == b"what it runs"
    assert f"--name=run.sandbox-0.{paths.root.stat().st_ino:x} " in asked.read_text()
    assert launch.submit(paths, "sandbox").id == "42", "77 is known now: another one is wanted beside it"
    command("squeue", "echo 78")
    assert launch.submit(paths, "sandbox").id == "42" and cancelled.read_text() == "78\n", "it had nothing to run"


def test_what_nobody_wrote_down_is_cancelled_at_the_end(command: Callable[[str, str], Path], tmp_path: Path) -> None:
    paths = RunPaths(tmp_path / "run")
    paths.root.mkdir()
    paths.make()
    inode = f"{paths.root.stat().st_ino:x}"
    rows = (f"5|run.control-0.{inode}", "6|run.control-0.abc", f"7|run.sandbox-0.{inode}", f"8|other.control-0.{inode}")
    command("squeue", "\n".join(f"echo '{row}'" for row in rows))
    cancelled = command("scancel", ":")
    launch.record(paths, "submitted", role="sandbox", index=0, executor="slurm", id="7", wall=1.0)
    launch.slurm.cancel_strays(paths, load(tmp_path, '[launch]\nexecutor = "slurm"\n'))
    assert cancelled.read_text() == "5\n"


def test_only_one_command_starts_a_run(command: Callable[[str, str], Path], tmp_path: Path) -> None:
    paths = RunPaths(tmp_path / "run")
    paths.root.mkdir()
    paths.make()
    settings = load(tmp_path, '[launch]\nexecutor = "slurm"\n')
    paths.config.write_text(config.dump(settings))
    command("sbatch", "sleep 2; echo Submitted batch job 42")
    command("squeue", "case $* in *--jobs=*) echo '42|RUNNING|1:00:00|n1|None' ;; esac")
    with concurrent.futures.ThreadPoolExecutor() as pool:
        starts = [pool.submit(launch.start, paths, settings) for _ in range(2)]
        failures = [start.exception() for start in starts]
    (failure,) = [failure for failure in failures if failure is not None]
    assert isinstance(failure, ConfigError) and "another command has been starting it" in str(failure)
    with pytest.raises(ConfigError, match=r"is running \(job 42\)"):
        launch.start(paths, settings)
    assert len(launch.jobs(paths)) == 1


def test_stop_reaches_control_though_slurm_does_not_answer(command: Callable[[str, str], Path], tmp_path: Path) -> None:
    paths = RunPaths(tmp_path / "run")
    paths.root.mkdir()
    paths.make()
    paths.config.write_text(config.dump(load(tmp_path, '[launch]\nexecutor = "slurm"\n')))
    launch.record(paths, "submitted", role="control", index=0, executor="slurm", id="42", wall=time.time())
    command("squeue", "echo 'slurm_load_jobs error: Unable to contact slurm controller' >&2; exit 1")
    said = hpcrl("stop", paths.root)
    assert said.returncode and "has been asked to stop all the same" in said.stderr
    assert [read_json(path) for path in paths.inbox.glob("stop-*.json")] == [{"command": "stop"}]


HEARTBEAT = {
    "state": "running", "phase": "rl", "updates": {"done": 1, "total": 9}, "reward": None, "evaluations": {}, "lag": 0,
    "trajectories": {"running": 0, "waiting": 0, "scored": 0}, "tokens_per_s": 0.0, "busy_share": 0.0, "eta_s": None,
    "accounting": {"faults": {}}, "evaluating": "", "version": 0, "last_fault": "",
}  # fmt: skip


@pytest.mark.parametrize(
    ("answer", "heard_s", "expected"),
    [
        ("42|FAILED|0:00|n1|NonZeroExitCode", None, "state: broken off (job 42, control, ended (failed) before it"),
        ("42|CANCELLED|0:00|n1|None", 5, "state: broken off (control is gone; `hpcrl resume"),
        ("42|RUNNING|59:00|n1|None", 400, "wrong: control has said nothing for 40"),
        ("42|PENDING|59:00||Resources", None, "control-0: job 42, pending for 0 min (Resources) of 59 min"),
    ],
)
def test_status_tells_a_run_that_does_not_go_on(
    answer: str, heard_s: float | None, expected: str, command: Callable[[str, str], Path], tmp_path: Path
) -> None:
    paths = RunPaths(tmp_path / "run")
    paths.root.mkdir()
    paths.make()
    paths.config.write_text(config.dump(load(tmp_path, '[launch]\nexecutor = "slurm"\n')))
    launch.record(paths, "submitted", role="control", index=0, executor="slurm", id="42", wall=time.time())
    command("squeue", f"echo '{answer}'")
    if heard_s is not None:
        publish_json(paths.heartbeat, HEARTBEAT | {"wall": time.time() - heard_s})
    said = hpcrl("status", paths.root, env=os.environ | {"COLUMNS": "1000"})
    assert expected in said.stdout, said


# ---- this node ------------------------------------------------------------------------------------------------------


def test_an_interface_that_is_not_there_is_refused_with_those_that_are() -> None:
    with pytest.raises(ConfigError, match=r"launch.interface: .* has no interface 'ib7' with IPv4; it has .*lo \(127"):
        node.address("ib7")


TWO_NETWORKS = """
set -e
hostname node7
printf '%s\\n' "$1" > "$2"
mount --bind "$2" /etc/hosts
ip link set lo up
for name in eth7:10.0.0.5 ib7:10.1.0.5; do
    ip link add "${name%:*}" type veth peer name "${name%:*}p"
    ip link set "${name%:*}p" up
    ip addr add "${name#*:}/24" dev "${name%:*}"
    ip link set "${name%:*}" up
done
shift 2
exec "$@"
"""
ADDRESS = """
import sys
from hpcrl import node
from hpcrl.types import ConfigError
try:
    found = node.address(sys.argv[1])
    print(found, node.interface_of(found))
except ConfigError as error:
    print(error)
"""


@pytest.mark.parametrize(
    ("hosts", "interface", "expected"),
    [
        (
            "127.0.1.1 node7",
            "",
            "can't tell by which address other nodes reach node7; it has eth7 (10.0.0.5), ib7 (10.1",
        ),
        ("127.0.1.1 node7", "ib7", "10.1.0.5 ib7"),
        ("10.0.0.5 node7", "", "10.0.0.5 eth7"),
        ("10.9.9.9 node7", "", "can't tell by which address"),
        ("127.0.1.1 node7", "ib9", "has no interface 'ib9' with IPv4; it has eth7 (10.0.0.5), ib7 (10.1.0.5), lo"),
    ],
)
def test_the_address_of_a_node_on_two_networks(hosts: str, interface: str, expected: str, tmp_path: Path) -> None:
    """In a network, a host name and an /etc/hosts of its own."""
    own = ("unshare", "--net", "--uts", "--mount", "bash", "-c", TWO_NETWORKS, "bash")
    words = (*own, hosts, tmp_path / "hosts", sys.executable, "-c", ADDRESS, interface)
    done = subprocess.run(words, capture_output=True, text=True, timeout=60, check=False)
    if done.returncode and "Operation not permitted" in done.stderr:
        pytest.skip("needs root, to make a network of its own (unshare --net)")
    assert expected in done.stdout, (done.stdout, done.stderr)


def test_a_node_of_slurms_is_named_by_job_and_life(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("SUBMITIT_LOCAL_JOB_ID", raising=False)
    monkeypatch.setenv("SLURMD_NODENAME", "gpu-07")
    monkeypatch.setenv("SLURM_JOB_ID", "123")
    assert node.node_id("r0") == "gpu-07-r0-j123.0"
    monkeypatch.setenv("SLURM_RESTART_COUNT", "2")
    assert node.job_of(node.node_id("r0")) == "123" and node.node_id("r0").endswith(".2")
    assert node.job_of("host-j1-r0") == ""


def test_when_the_allocation_ends(
    command: Callable[[str, str], Path], monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    settings = load(tmp_path, '[launch]\nexecutor = "slurm"\n[slurm]\ntime = "2:00:00"\n')
    for name in ("SLURM_JOB_ID", "SLURM_JOB_END_TIME"):
        monkeypatch.delenv(name, raising=False)
    assert node.ends_at(settings, "learner", 0) == float("inf")
    monkeypatch.setenv("SLURM_JOB_ID", "7")
    monkeypatch.setenv("TZ", "UTC")
    time.tzset()
    asked = command("scontrol", "echo 'JobId=7 EndTime=2026-12-01T00:00:10 Deadline=N/A'")
    assert node.ends_at(settings, "learner", 0) == 1796083210.0
    assert asked.read_text() == "--oneliner show job 7\n"
    command("scontrol", "echo 'JobId=7 EndTime=Unknown'")
    assert node.ends_at(settings, "learner", 0) == float("inf")
    command("scontrol", "echo down >&2; exit 1")
    assert 7190 < node.ends_at(settings, "learner", 0) - time.time() <= 7200, "as asked for"
    monkeypatch.setenv("SLURM_JOB_END_TIME", "1796083211")
    assert node.ends_at(settings, "learner", 0) == 1796083211.0


def test_jobs_of_a_time_before_there_were_executors_are_local(tmp_path: Path) -> None:
    paths = RunPaths(tmp_path)
    row = {"event": "submitted", "role": "control", "index": 0, "id": "1", "start": 5, "boot": "b", "wall": 1.0}
    paths.jobs.write_text(json.dumps(row) + "\n")
    (job,) = launch.jobs(paths)
    assert (job.executor, job.key) == ("local", "1/5")


# ---- the fleet ------------------------------------------------------------------------------------------------------


class Cluster:
    """Commands that stand in for Slurm's: jobs are lines of a file, ids are counted from 100."""

    def __init__(self, folder: Path, command: Callable[[str, str], Path], **launch_keys: object) -> None:
        self.file = folder / "jobs"
        self.file.touch()
        self.submitted = command("sbatch", self._sbatch(folder))
        command("squeue", f"case $* in *--name=*) ;; *) cat {self.file} ;; esac")
        self.cancelled = command("scancel", ":")
        keys = "".join(f"{name} = {value}\n" for name, value in {"look_s": 0.001, **launch_keys}.items())
        text = f'[launch]\nexecutor = "slurm"\n{keys}[slurm]\ntime = 60\nsignal_s = 60\nlead_s = 60\n'
        self.settings = load(folder, text + '[[rollout]]\nname = "r"\njobs = 2\ngpus = 4\n')
        self.paths = RunPaths(folder / "run")
        self.paths.root.mkdir()
        self.paths.make()
        self.paths.config.write_text(config.dump(self.settings))
        self.fleet = Fleet(self.paths, self.settings, 1)

    def _sbatch(self, folder: Path) -> str:
        refuse = f"test -e {folder}/refuse && {{ echo 'sbatch: error: QOSMaxSubmitJobPerUserLimit' >&2; exit 1; }}"
        number = f"id=$((100 + $(wc -l < {folder}/ids 2>/dev/null || echo 0))); echo $id >> {folder}/ids"
        return f'{refuse}\n{number}\ncp "$1" {folder}/$id.sh; echo "Submitted batch job $id"'

    def say(self, **states: str) -> None:
        """How jobs stand: _100="RUNNING|1:00:00|n1"."""
        self.file.write_text("".join(f"{name[1:]}|{row}|None\n" for name, row in states.items()))

    async def ensure(self) -> str | None:
        await asyncio.sleep(0.002)
        return await self.fleet.ensure()

    def retry(self, later_s: float = 0.0) -> None:
        """Time has passed: what was refused may be tried again."""
        for key, refused in self.fleet._refusals.items():
            self.fleet._refusals[key] = replace(refused, since=refused.since - later_s, pause_until=0.0)

    def all_run(self, **others: str) -> None:
        left = {f"_{job.id}": "RUNNING|59:00|n1" for job in launch.jobs(self.paths)}
        self.say(**(left | others))


async def test_a_submission_that_slurm_refuses_is_tried_again_and_the_run_goes_on(
    command: Callable[[str, str], Path], tmp_path: Path
) -> None:
    cluster = Cluster(tmp_path, command, gpu_hours=9, control_timeout_s=100)
    (tmp_path / "refuse").touch()
    assert await cluster.ensure() is None and not launch.jobs(cluster.paths)
    assert await cluster.ensure() is None, "not at once"
    (said,) = cluster.fleet.wrong()
    assert said.startswith("sandbox-0, rollout-0, rollout-1, learner-0 refused, tried again; where that"), said
    assert said.count("QOSMaxSubmit") == 1 and "--set" in said, said
    (tmp_path / "refuse").unlink()
    cluster.retry()
    await cluster.ensure()
    assert not cluster.fleet.wrong() and sorted((job.role, job.index) for job in launch.jobs(cluster.paths)) == [
        ("learner", 0), ("rollout", 0), ("rollout", 1), ("sandbox", 0),
    ]  # fmt: skip
    first = launch.newest(cluster.paths, "rollout", 0)
    assert first is not None
    cluster.all_run(**{f"_{first.id}": "COMPLETED|0:00|n1"})
    (tmp_path / "refuse").touch()
    for _ in range(3):
        cluster.retry()
        await cluster.ensure()
    assert cluster.fleet.restarts["rollout"] == 1, "one job ended once, however often the next is refused"
    cluster.retry(later_s=101)
    with pytest.raises(HpcrlError, match="rollout-0 could not be submitted: sbatch: error: QOSMaxSubmit"):
        await cluster.ensure()


async def test_a_job_has_its_successor_before_its_time_is_over(
    command: Callable[[str, str], Path], tmp_path: Path
) -> None:
    cluster = Cluster(tmp_path, command, gpu_hours=9)
    await cluster.ensure()
    cluster.all_run()
    before = launch.jobs(cluster.paths)
    await cluster.ensure()
    assert launch.jobs(cluster.paths) == before
    ids = {(job.role, job.index): job.id for job in before}
    short = {f"_{id}": "RUNNING|1:59|n1" for id in ids.values()}
    cluster.say(**short)
    for _ in range(3):
        await cluster.ensure()
        cluster.all_run(**short)
    fresh = launch.jobs(cluster.paths)[len(before) :]
    assert sorted((job.role, job.index) for job in fresh) == [("rollout", 0), ("rollout", 1), ("sandbox", 0)]
    assert not cluster.fleet.restarts


async def test_an_answer_that_is_cut_short_ends_nothing(
    command: Callable[[str, str], Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    cluster = Cluster(tmp_path, command, gpu_hours=9)
    await cluster.ensure()
    cluster.all_run()
    await cluster.ensure()
    before = launch.jobs(cluster.paths)
    cluster.say(_100="RUNNING|59:00|n1")  # and not a word of the others
    for _ in range(3):
        await cluster.ensure()
    assert launch.jobs(cluster.paths) == before and not cluster.fleet.ended
    cluster.all_run()
    await cluster.ensure()
    monkeypatch.setitem(launch.GONE_S, "slurm", 0.01)
    cluster.fleet.here = {"101"}  # connected to control
    cluster.say(_100="RUNNING|59:00|n1")
    await cluster.ensure()
    await asyncio.sleep(0.02)
    await cluster.ensure()
    assert cluster.fleet.ended == {job.key for job in before} - {"100", "101"}


def test_jobs_submitted_ahead_are_those_of_the_latest_start(tmp_path: Path) -> None:
    paths = RunPaths(tmp_path)
    assert launch.ahead(paths) == ([], True)
    job = {"role": "control", "index": 0, "executor": "slurm"}
    for start in (1.0, 10.0):
        launch.record(paths, "ahead", wall=start)
        for number in (1, 2):
            launch.record(paths, "submitted", **job, id=f"{start + number:g}", wall=start + number)
            found, whole = launch.ahead(paths)
            assert [one.id for one in found] == [f"{start + so_far:g}" for so_far in range(1, number + 1)] and not whole
        launch.record(paths, "whole", wall=start + 3)
        assert launch.ahead(paths) == (found, True)


def test_a_watcher_believes_no_single_answer(
    command: Callable[[str, str], Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    cluster = Cluster(tmp_path, command, gpu_hours=9)
    job = Job(role="control", index=0, executor="slurm", id="7", wall=time.time())
    look = runs.LookAt(job, cluster.settings)
    cluster.say(_7="RUNNING|59:00|n1")
    assert look.alive and look.waits() == "control-0: job 7, running"
    cluster.say()
    time.sleep(0.01)
    assert look.alive
    time.sleep(0.01)
    monkeypatch.setitem(launch.GONE_S, "slurm", 0.0)
    assert not look.alive


async def test_hosts_with_long_steps_leave_sooner_and_have_their_successors_sooner(
    command: Callable[[str, str], Path], tmp_path: Path
) -> None:
    cluster = Cluster(tmp_path, command, gpu_hours=9)
    await cluster.ensure()
    cluster.all_run()
    await cluster.ensure()
    before = launch.jobs(cluster.paths)
    left = {f"_{job.id}": "RUNNING|15:00|n1" for job in before}
    cluster.say(**left)
    await cluster.ensure()
    assert launch.jobs(cluster.paths) == before
    cluster.fleet.rollout_leaves_s = 14.5 * 60
    for _ in range(3):
        await cluster.ensure()
        cluster.all_run(**left)
    fresh = launch.jobs(cluster.paths)[len(before) :]
    assert sorted((job.role, job.index) for job in fresh) == [("rollout", 0), ("rollout", 1)]


async def test_a_role_that_rests_is_told_to_leave_and_comes_back(
    command: Callable[[str, str], Path], tmp_path: Path
) -> None:
    cluster = Cluster(tmp_path, command, gpu_hours=9)
    cluster.fleet.held.add("learner")
    await cluster.ensure()
    assert launch.newest(cluster.paths, "learner") is None
    cluster.fleet.held.clear()
    cluster.all_run()
    await cluster.ensure()
    first = launch.newest(cluster.paths, "learner")
    assert first is not None
    cluster.all_run()
    cluster.fleet.held.add("learner")
    await cluster.ensure()
    await cluster.ensure()
    assert not cluster.cancelled.read_text(), "it is only not submitted"
    cluster.fleet.released.add("learner")
    for _ in range(2):
        await cluster.ensure()
    assert f"--signal=USR2 --state=RUNNING {first.id}\n" in cluster.cancelled.read_text()
    cluster.all_run(**{f"_{first.id}": "COMPLETED|0:00|n1"})
    await cluster.ensure()
    assert launch.newest(cluster.paths, "learner") == first and not cluster.fleet.restarts
    cluster.fleet.held.clear()
    await cluster.ensure()
    assert launch.newest(cluster.paths, "learner") != first and not cluster.fleet.restarts


async def test_a_budget_that_is_used_up_ends_the_run(command: Callable[[str, str], Path], tmp_path: Path) -> None:
    cluster = Cluster(tmp_path, command, gpu_hours=1.0)
    await cluster.ensure()
    cluster.all_run()
    assert await cluster.ensure() is None
    began = cluster.fleet.gpu_s
    await asyncio.sleep(0.5)
    assert await cluster.ensure() is None
    assert 8 * 0.5 <= cluster.fleet.gpu_s - began < 8 * 5.0, "of two rollout jobs with four GPUs each"
    cluster.fleet.gpu_s = 3600.0
    assert "the budget of 1 GPU-hours is used up" in str(await cluster.ensure())


async def test_a_node_on_which_jobs_fail_again_and_again_gets_no_more(
    command: Callable[[str, str], Path], tmp_path: Path
) -> None:
    cluster = Cluster(tmp_path, command, gpu_hours=9, restarts=9)
    await cluster.ensure()
    for _ in range(3):
        newest = launch.newest(cluster.paths, "rollout", 0)
        assert newest is not None
        cluster.all_run(**{f"_{newest.id}": "FAILED|0:00|bad7"})
        cluster.fleet._not_before = dict.fromkeys(cluster.fleet._not_before, 0.0)
        assert "bad7" not in (tmp_path / f"{newest.id}.sh").read_text()
        await cluster.ensure()
    newest = launch.newest(cluster.paths, "rollout", 0)
    assert newest is not None and "#SBATCH --exclude=bad7\n" in (tmp_path / f"{newest.id}.sh").read_text()


async def test_a_pool_may_change_while_a_job_is_being_submitted(
    command: Callable[[str, str], Path], tmp_path: Path
) -> None:
    cluster = Cluster(tmp_path, command, gpu_hours=9)
    submitting = asyncio.create_task(cluster.ensure())
    await asyncio.sleep(0.3)
    cluster.fleet.rescale(config.with_sets(cluster.settings, ["rollout.jobs=1"]))
    await submitting
    cluster.all_run()
    cluster.fleet._looked = -float("inf")
    await cluster.ensure()
    alive = {(job.role, job.index) for job in launch.jobs(cluster.paths)}
    assert ("rollout", 1) not in cluster.fleet.wanted
    if ("rollout", 1) in alive:  # it was on its way
        assert "USR2" in cluster.cancelled.read_text()
    assert await cluster.ensure() is None


def test_a_run_that_hung_or_left_jobs_is_not_at_rest(tmp_path: Path) -> None:
    paths = RunPaths(tmp_path)
    paths.make()
    launch.record(paths, "submitted", **asdict(jobs(1)[0]))
    for row, rests in (({"outcome": "stopped", "wall": 1.0}, False), ({"left": ["100"]}, False), ({"left": []}, True)):
        paths.stopped.write_text(json.dumps(row))
        assert launch.at_rest(paths) is rests


def test_what_an_earlier_life_of_this_job_left_is_known(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("SUBMITIT_LOCAL_JOB_ID", raising=False)
    monkeypatch.setenv("SLURM_JOB_ID", "123")
    monkeypatch.setenv("SLURM_RESTART_COUNT", "2")
    found = {
        name: node.is_earlier_life(name) for name in ("a-r0-j123.0", "b-r0-j123.1", "a-r0-j123.2", "a-r0-j12.0", "a")
    }
    assert [name for name, earlier in found.items() if earlier] == ["a-r0-j123.0", "b-r0-j123.1"]


def test_junk_in_a_heartbeat_is_no_word_of_control(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    paths = RunPaths(tmp_path / "run")
    paths.root.mkdir()
    paths.make()
    monkeypatch.setattr(ControlWatch, "LOOK_S", 0.0)
    control = ControlWatch(paths, load(tmp_path, "[launch]\ncontrol_timeout_s = 0.3\n"))
    publish_json(paths.heartbeat, {"wall": 1.0})
    assert not control.gone()
    paths.heartbeat.write_text('{"junk')
    assert not control.gone()
    time.sleep(0.4)
    assert control.gone()
