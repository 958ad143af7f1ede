"""`hpcrl seff`: on a real run, whose figures are found again in its store, progress and jobs; and beside Slurm's
accounting, which says much, little, nothing, or can't be read."""

from __future__ import annotations

import json
import os
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

import pytest
from run_parts import hpcrl, running, write_config
from store_parts import act, adopt, end, open_log

from hpcrl import config, efficiency, launch
from hpcrl.config import Config
from hpcrl.launch import Job, SlurmError, slurm
from hpcrl.launch.sacct import accounts
from hpcrl.layout import RunPaths, read_json, read_lines
from hpcrl.store.index import Store
from hpcrl.store.ledger import ProgressWriter, UpdateRow, lineage
from hpcrl.store.records import Kind, prompt
from hpcrl.telemetry import Meter, Usage


def seff(run: Path) -> dict[str, Any]:
    done = hpcrl("seff", run, "--json")
    assert done.returncode == 0, done.stderr
    row: dict[str, Any] = json.loads(done.stdout)
    for name, pool in row["pools"].items():
        if pool["uses_s"] is not None:
            assert sum(pool["uses_s"].values()) == pytest.approx(pool["allocated_s"]), name
            assert all(seconds >= 0 for seconds in pool["uses_s"].values()), (name, pool)
    return row


# ---- a real run -----------------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def run(tiny_model: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    """A run from its start to its end, whose host and supervisor are killed on the way."""
    folder = tmp_path_factory.mktemp("seff")
    path = write_config(folder, tiny_model, updates=4, ports="26400-26799")
    with running("train", path, "--run", folder / "run", run=folder / "run") as live:
        row = live.until("the first RL update", lambda row: row["phases"]["rl"][0] >= 1)
        (node,) = row["nodes"].values()
        os.kill(node["hosts"][0], signal.SIGKILL)
        live.until(
            "a new host", lambda row: [one["hosts"] for one in row["nodes"].values()] not in ([], [node["hosts"]])
        )
        (node,) = live.status()["nodes"].values()
        os.kill(node["pid"], signal.SIGKILL)
        assert live.wait() == 0, live.tail()
    yield folder / "run"


@pytest.mark.vllm
@pytest.mark.timeout(900)
def test_a_pools_allocation_is_the_sum_of_its_uses_and_each_is_found_elsewhere(run: Path) -> None:
    paths = RunPaths.of(run)
    row = seff(run)
    assert row["accounting"]["source"] == "the run's own records"
    learner, rollout = row["pools"]["learner"], row["pools"]["rollout.rollout"]
    assert (learner["unit"], rollout["unit"]) == ("rank", "engine")

    # Allocated: from submission to the last word that the role logged, or, where it was killed, to its death.
    rows, _ = read_lines(paths.jobs)
    deaths = {one["id"]: one["wall"] for one in rows if one["event"] == "ended" and one["why"] != "stopped"}
    lived = {"learner": 0.0, "rollout": 0.0}
    for job in launch.jobs(paths):
        if job.role in lived:
            logged = [
                one["time"] for path in paths.logs.glob(f"{job.role}*-{job.id}.jsonl") for one in read_lines(path)[0]
            ]
            lived[job.role] += deaths.get(job.id, max(logged)) - job.wall
    assert rollout["jobs"] == 2, "the supervisor's job was replaced"
    assert rollout["allocated_s"] == pytest.approx(lived["rollout"], abs=2.0)
    assert learner["allocated_s"] == pytest.approx(2 * lived["learner"], abs=4.0)

    # Learning and publishing: what the learner's own rows say, for each of two ranks.
    updates = [one.metrics for one in lineage(paths) if one.trajectories]
    spent = sum(one[f"{part}_s"] for one in updates for part in ("read", "forward_backward", "step"))
    assert learner["uses_s"]["learning"] + learner["uses_s"]["retry"] == pytest.approx(2 * spent, rel=0.2, abs=1.0)
    # Of publishing rank 0 reports the time; the others leave it sooner, as it writes the manifest alone.
    synced = [0.0, 0.0]
    for path in paths.usage.glob("learner-*.json"):
        record = json.loads(path.read_text())
        synced[record["rank"]] += sum(unit["uses"].get("weight_sync", 0.0) for unit in record["units"])
    assert synced[0] >= sum(one["publish_s"] for one in updates) and synced[0] >= synced[1] > 0
    assert learner["uses_s"]["weight_sync"] == pytest.approx(sum(synced))
    assert learner["uses_s"]["saving"] > 0 and learner["uses_s"]["waiting"] > 0

    # Generating: the time in which the store's acts say that any request was in the engine; what a kill cut off is not
    # in the store, and while weights are loaded requests wait.
    with_requests = union(spans(paths))
    generating = rollout["uses_s"]["generating"] + rollout["uses_s"]["retry"]
    assert generating > 0
    assert abs(generating - with_requests) <= rollout["uses_s"]["weight_sync"] + rollout["uses_s"]["unknown"] + 5.0
    assert rollout["uses_s"]["weight_sync"] > 0 and rollout["uses_s"]["starting"] > 0
    engines = row["engines"]
    assert engines["allocated_s"] == pytest.approx(rollout["allocated_s"])
    assert engines["idle_s"] == pytest.approx(rollout["uses_s"]["waiting"] + rollout["uses_s"]["gaps"])


def spans(paths: RunPaths) -> list[tuple[float, float]]:
    """(begin, end) of the requests of all acts that an engine answered."""
    found = []
    with Store(paths) as store:
        for row in store.summaries():
            if row["kind"] != "expert":
                acts = [record.meta for record in store.records(row["id"]) if record.kind is Kind.ACT]
                found += [(meta["wall"] - meta["duration_s"], meta["wall"]) for meta in acts]
    return sorted(found)


def union(found: list[tuple[float, float]]) -> float:
    total, end = 0.0, 0.0
    for begin, stop in found:
        total += max(0.0, stop - max(begin, end))
        end = max(end, stop)
    return total


@pytest.mark.vllm
@pytest.mark.timeout(900)
def test_every_token_is_accounted_for(run: Path) -> None:
    paths = RunPaths.of(run)
    made = seff(run)["tokens"]
    classes = made["classes"]
    assert made["generated"] == sum(row["tokens"] for rows in classes.values() for row in rows.values())
    assert made["thrown_away"] == sum(row["tokens"] for row in classes["thrown_away"].values())
    updates = [row for row in lineage(paths) if row.phase == "rl" and row.trajectories]
    assert classes["used"]["trained"] == {
        "tokens": sum(row.metrics["tokens"] for row in updates),
        "trajectories": sum(len(row.trajectories) for row in updates),
    }
    assert classes["used"]["trained, of the expert"] == {"tokens": 0, "trajectories": 64}
    assert not classes["pending"], "a run that is done has nothing under way"
    with Store(paths) as store:
        acts = [
            one.num_sampled
            for row in store.summaries() if row["kind"] != "expert"
            for one in store.rows(row["id"]).values() if one.kind is Kind.ACT
        ]  # fmt: skip
    assert made["generated"] == sum(acts) + (made["cut_off"] or 0)
    # The supervisor that was killed took its engine's last count along.
    assert made["cut_off"] is None and "tokens of requests that were cut off: not all" in made["notes"][0]
    assert made["retried_attempts"]["platform"] > 0


@pytest.mark.vllm
@pytest.mark.timeout(900)
def test_what_jobs_used_and_the_screen(run: Path) -> None:
    roles = seff(run)["roles"]
    assert set(roles) == {"control", "rollout", "sandbox", "learner"}
    for role, row in roles.items():
        assert row["cpu"]["used_s"] > 0.5 and row["cpu"]["asked"] is None, role
        assert row["memory"]["peak_bytes"] > 30 << 20, role
    assert roles["rollout"]["memory"]["peak_bytes"] > 500 << 20, "the engine is below its supervisor"
    said = hpcrl("seff", run).stdout
    print(said)
    assert len(said.splitlines()) < 60
    for text in (
        "allocated",
        "generating",
        "weight sync",
        "thrown away",
        "engine-seconds:",
        "local jobs ask for nothing",
    ):
        assert text in said


@pytest.mark.vllm
@pytest.mark.timeout(900)
def test_what_is_not_on_record_is_not_zero(run: Path, tmp_path: Path) -> None:
    copy = shutil.copytree(run, tmp_path / "old")
    shutil.rmtree(copy / "metrics")
    row = seff(copy)
    pool = row["pools"]["rollout.rollout"]
    assert pool["uses_s"]["unknown"] == pool["allocated_s"] > 0, "its jobs' ends are on record, their uses are not"
    assert row["engines"]["idle_s"] is None and row["roles"]["learner"]["memory"]["peak_bytes"] is None
    assert row["tokens"]["cut_off"] is None
    said = hpcrl("seff", copy).stdout
    assert "0.000" not in said and "engine-seconds idle: ?" in said


# ---- a task's record ------------------------------------------------------------------------------------------------


def test_a_meters_uses_add_up_to_its_life() -> None:
    began = time.monotonic()
    meter = Meter()
    for use in ("waiting", "generating", "waiting"):
        time.sleep(0.05)
        meter.to(use)
    found = meter.seconds()
    assert sum(found.values()) == pytest.approx(time.monotonic() - began, abs=0.01)
    assert found["starting"] >= 0.05 and found["waiting"] >= 0.05 and found["generating"] >= 0.05


TASK = """
import subprocess, sys, time
from pathlib import Path
from hpcrl import telemetry
from hpcrl.telemetry import Meter, Usage
telemetry.SAMPLE_S = 0.1
child = "x = bytearray(200 << 20); import time; t = time.process_time()\\nwhile time.process_time() - t < 1: pass"
with Usage(Path(sys.argv[1]), job="1") as usage:
    usage.units = [(2, Meter())]
    usage.units[0][1].to("generating")
    subprocess.run([sys.executable, "-c", child], check=True)
    print("done", flush=True)
    if len(sys.argv) > 2:
        time.sleep(60)
"""


@pytest.mark.parametrize("killed", [False, True])
def test_a_task_records_what_it_and_its_children_used(tmp_path: Path, killed: bool) -> None:
    path = tmp_path / "metrics" / "usage" / "one.json"
    command = [sys.executable, "-c", TASK, str(path), *["wait"] * killed]
    began = time.time()
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None and process.stdout.readline() == "done\n"
        if killed:
            time.sleep(1.0)
            process.kill()
    row = read_json(path)
    assert row is not None and row["ended"] is not killed and row["job"] == "1"
    assert row["peak_bytes"] > 200 << 20
    (unit,) = row["units"]
    assert unit["gpus"] == 2 and sum(unit["uses"].values()) == pytest.approx(row["seconds"])
    assert unit["uses"]["starting"] > 0 and began - 1 < row["began"] < row["wall"]
    if not killed:
        assert 1.0 <= row["cpu_s"] < 20 and unit["uses"]["generating"] >= 1.0
    assert [one.name for one in path.parent.iterdir()] == ["one.json"]


def test_a_full_disk_ends_no_task(tmp_path: Path) -> None:
    (tmp_path / "metrics").write_text("in the way")
    with Usage(tmp_path / "metrics" / "one.json"):
        pass


# ---- beside Slurm's accounting --------------------------------------------------------------------------------------

CONFIG = """
name = "mine"
[[phase]]
name = "rl"
trajectories = 4
group_size = 2
[evaluation]
tasks = 0
[[rollout]]
name = "big"
engines = 2
gpus = 2
[learner]
ranks = 2
gpus = 1
[launch]
executor = "slurm"
gpu_hours = 10
"""
# As Slurm 22.05 says it: a job that is done, with its steps; one that was requeued and runs; one that waits.
SAID = """\
71|mine.rollout-0.3bc64e|COMPLETED|2026-11-30T05:54:30|00:01:40|00:03.553||600M|1|2|billing=2,cpu=2,gres/gpu=4,mem=600M,node=1
71.batch|batch|COMPLETED|2026-11-30T05:54:30|00:01:40|00:00.019|10652K||1|2|cpu=2,gres/gpu=4,mem=600M,node=1
71.0|python|COMPLETED|2026-11-30T05:54:31|00:01:39|00:03.534|1.5G||1|2|cpu=2,gres/gpu=4,mem=600M,node=1
72|mine.learner-0.3bc64e|REQUEUED|2026-11-30T05:54:30|00:00:30|00:10.000||4Gn|2|4|billing=4,cpu=4,mem=8G,node=2
72.0|python|CANCELLED|2026-11-30T05:54:31|00:00:30|00:10.000|72344K||2|4|cpu=4,mem=8G,node=2
72|mine.learner-0.3bc64e|RUNNING|2026-11-30T05:56:30|00:00:40|00:00:00||4Gn|2|4|billing=4,cpu=4,mem=8G,node=2
72.0|python|RUNNING|2026-11-30T05:56:31|00:00:39|00:00:00|||2|4|cpu=4,mem=8G,node=2
73|mine.control-0.3bc64e|PENDING|Unknown|00:00:00|00:00:00||16?|0|0|
74|somebodys job|COMPLETED|2020-11-30T05:54:30|9-01:01:40|00:03.553||600M|1|2|billing=2,cpu=2,mem=600M,node=1
"""
BEGAN = time.mktime((2026, 11, 30, 5, 54, 30, 0, 0, -1))


@pytest.fixture
def folder(tmp_path: Path) -> tuple[RunPaths, Config]:
    """A run folder as jobs of Slurm leave it: a rollout job that ended, a learner whose first life was killed."""
    paths = RunPaths(tmp_path / "run")
    paths.root.mkdir()
    paths.make()
    (tmp_path / "run.toml").write_text(CONFIG)
    settings = config.load(tmp_path / "run.toml")
    paths.config.write_text(config.dump(settings))
    for role, id in (("rollout", "71"), ("learner", "72"), ("control", "73"), ("sandbox", "74")):
        job = Job(role=role, index=0, executor="slurm", id=id, wall=BEGAN - 60)  # type: ignore[arg-type]
        launch.record(paths, "submitted", **asdict(job))
    units = [[{"gpus": 2, "uses": {"starting": 20, "generating": 60, "waiting": 10}}] * 2]
    record(paths, "rollout", "71", 0, BEGAN + 6, 90, units=units[0], pool="big", generated=0)
    for rank in (0, 1):
        learning = [{"gpus": 1, "uses": {"starting": 5, "learning": 15}}]
        record(paths, "learner", "72", rank, BEGAN + 4, 20, units=learning, ended=False, asked_bytes=4 << 30)
        record(paths, "learner", "72", rank, BEGAN + 124, 20, units=learning, ended=False, asked_bytes=4 << 30, life=1)
    return paths, settings


def record(paths: RunPaths, role: str, job: str, rank: int, began: float, seconds: float, **more: Any) -> None:
    life = f"{job}.{more.pop('life', 0)}"
    row = {
        "role": role, "index": 0, "pool": role, "job": job, "life": life, "rank": rank, "node": f"n{rank}",
        "asked_cpus": 2, "asked_bytes": None, "began": began, "wall": began + seconds, "seconds": seconds,
        "ended": True, "cpu_s": 10.0, "peak_bytes": 1 << 30, "generated": None, **more,
    }  # fmt: skip
    (paths.usage / f"{role}-0-{life}-{rank}-{began:.0f}.json").write_text(json.dumps(row))


def test_what_sacct_says(command: Callable[[str, str], Path], folder: tuple[RunPaths, Config]) -> None:
    calls = command("sacct", f"cat <<'END'\n{SAID}END")
    found = accounts(launch.jobs(folder[0]), "mine")
    (asked,) = calls.read_text().splitlines()
    assert "--jobs=71,72,73,74" in asked and "--duplicates" in asked
    assert set(found) == {"71", "72", "73"}, "somebody's job had the id of one of ours"
    one = found["71"]
    assert (one.state, one.seconds, one.cpus, one.gpus, one.began) == ("COMPLETED", 100.0, 2, 4, BEGAN)
    assert (one.cpu_s, one.peak_bytes, one.asked_bytes) == (3.553, 3 << 29, 600 << 20)
    two = found["72"]
    assert (two.state, two.seconds, two.cpus, two.gpus) == ("RUNNING", 70.0, 4, None), "two lives"
    assert (two.cpu_s, two.peak_bytes, two.asked_bytes) == (10.0, 72344 << 10, 8 << 30), "4Gn on two nodes"
    assert (found["73"].seconds, found["73"].cpu_s, found["73"].asked_bytes) == (0.0, None, None)


@pytest.mark.parametrize(
    ("field", "text", "value"),
    [
        ("Elapsed", "1-02:03:04", 93784.0), ("Elapsed", "02:03:04", 7384.0), ("Elapsed", "00:09", 9.0),
        ("Elapsed", "INVALID", 0.0), ("TotalCPU", "01:02.250", 62.25), ("TotalCPU", "1-00:00:01", 86401.0),
        ("TotalCPU", "UNLIMITED", None), ("TotalCPU", "", None), ("ReqMem", "?", None), ("ReqMem", "", None),
        ("ReqMem", "2Gc", 8 << 30), ("ReqMem", "512Mn", 1 << 30), ("ReqMem", "1.50T", 3 << 39), ("ReqMem", "0n", None),
        ("MaxRSS", "812", 812), ("MaxRSS", "0", None), ("MaxRSS", "10652K", 10652 << 10), ("MaxRSS", "2.5G", 5 << 29),
        ("State", "CANCELLED by 1000", "CANCELLED"), ("Start", "None", None),
        ("AllocTRES", "cpu=2,gres/gpu:a100=3,gres/gpu=3,mem=2G", 3), ("AllocTRES", "", None),
    ],
)  # fmt: skip
def test_forms(command: Callable[[str, str], Path], field: str, text: str, value: Any) -> None:
    assert getattr(_one(command, field, text), ATTRIBUTES[field]) == value


@pytest.mark.parametrize(
    ("field", "text"),
    [
        ("Elapsed", "100"), ("Elapsed", "1:2:3:4"), ("Elapsed", "00:01.x"), ("TotalCPU", "3 s"), ("ReqMem", "4 GB"),
        ("ReqMem", "4Gx"), ("MaxRSS", "-1K"), ("MaxRSS", "1KiB"), ("AllocCPUS", "2+"), ("NNodes", ""),
        ("Start", "yesterday"),
    ],
)  # fmt: skip
def test_forms_that_are_refused_by_name(command: Callable[[str, str], Path], field: str, text: str) -> None:
    with pytest.raises(SlurmError, match=rf"sacct: can't read {field} .* of job 7; expected "):
        _one(command, field, text)


ATTRIBUTES = {
    "Elapsed": "seconds", "TotalCPU": "cpu_s", "ReqMem": "asked_bytes", "MaxRSS": "peak_bytes", "State": "state",
    "Start": "began", "AllocTRES": "gpus",
}  # fmt: skip


def _one(command: Callable[[str, str], Path], field: str, text: str) -> Any:
    row = {
        "JobIDRaw": "7", "JobName": "mine.sandbox-0.1", "State": "COMPLETED", "Start": "2026-11-30T05:54:30",
        "Elapsed": "00:01:00", "TotalCPU": "00:01.000", "MaxRSS": "", "ReqMem": "1G", "NNodes": "2", "AllocCPUS": "4",
        "AllocTRES": "cpu=4", field: text,
    }  # fmt: skip
    command("sacct", f"echo '{'|'.join(row.values())}'")
    return accounts([Job(role="sandbox", index=0, executor="slurm", id="7", wall=0.0)], "mine")["7"]


def test_a_line_of_other_fields_is_no_answer(command: Callable[[str, str], Path]) -> None:
    command("sacct", "echo '7|mine.sandbox-0.1|COMPLETED'")
    with pytest.raises(SlurmError, match="expected 11 fields"):
        accounts([Job(role="sandbox", index=0, executor="slurm", id="7", wall=0.0)], "mine")


def test_gpu_seconds_beside_accounting(command: Callable[[str, str], Path], folder: tuple[RunPaths, Config]) -> None:
    paths = folder[0]
    command("sacct", f"cat <<'END'\n{SAID}END")
    row = seff(paths.root)
    assert row["accounting"] == {"source": "sacct", "trouble": ""}
    rollout = row["pools"]["rollout.big"]
    # 100 s of 4 GPUs; what the job had before its role began and after it ended is its start.
    assert (rollout["unit"], rollout["allocated_s"]) == ("GPU", 400.0)
    used = {use: seconds for use, seconds in rollout["uses_s"].items() if seconds}
    assert used == {"starting": 4 * 30.0, "generating": 4 * 60.0, "waiting": 4 * 10.0}
    assert row["engines"]["allocated_s"] == 200.0 and row["engines"]["idle_s"] == 20.0
    # Two lives of 30 and 40 s, each with 20 s on record and no end: the first 4 s were its start.
    used = {use: seconds for use, seconds in row["pools"]["learner"]["uses_s"].items() if seconds}
    assert used == pytest.approx({"learning": 2 * 30.0, "starting": 2 * 14.0, "unknown": 2 * 26.0})
    assert row["pools"]["learner"]["notes"] == ["job 72 (learner-0): nothing is recorded of 26 s: it still runs"]
    learner = row["roles"]["learner"]
    assert learner["memory"]["asked_bytes"] == 4 << 30 and learner["memory"]["peak_bytes"] == 1 << 30
    assert learner["memory"]["sacct_peak_bytes"] == 72344 << 10
    assert learner["cpu"]["sacct_share"] == pytest.approx(10 / (4 * 70))
    said = hpcrl("seff", paths.root).stdout
    assert (
        "GPU-hours by use  rollout.big     learner         all" in said
        and "MaxRSS" in said
        and "accounts: sacct" in said
    )


def test_gpus_that_nothing_uses_wait(command: Callable[[str, str], Path], folder: tuple[RunPaths, Config]) -> None:
    command("sacct", f"cat <<'END'\n{SAID.replace('gres/gpu=4', 'gres/gpu=8')}END")
    rollout = seff(folder[0].root)["pools"]["rollout.big"]
    assert rollout["allocated_s"] == 800.0 and rollout["uses_s"]["waiting"] == 40.0 + 400.0
    assert rollout["notes"] == ["job 71 (rollout-0) has 4 GPUs that no engine or rank of it uses, waiting"]


@pytest.mark.parametrize(
    ("body", "said"),
    [
        (None, "sacct: not found on PATH"),
        ("echo 'Slurm accounting storage is disabled' >&2; exit 1", "Slurm accounting storage is disabled"),
        ("exec sleep 30", "sacct: no answer for 0.2 s"),
        ("echo '71|mine.rollout-0.1|COMPLETED|x|00:01:00|00:01.000||1G|2|4|'", "can't read Start 'x' of job 71"),
    ],
)
def test_without_accounting_the_runs_own_records_do(
    command: Callable[[str, str], Path],
    monkeypatch: pytest.MonkeyPatch,
    folder: tuple[RunPaths, Config],
    body: str | None,
    said: str,
) -> None:
    monkeypatch.setattr(slurm, "ANSWER_S", 0.2 if body and "sleep" in body else 20.0)
    if body is None:
        monkeypatch.setenv("PATH", "/nowhere")
    else:
        command("sacct", body)
    began = time.monotonic()
    row = efficiency.efficiency(*folder)
    assert time.monotonic() - began < 10
    assert row["accounting"]["source"] == "the run's own records" and said in row["accounting"]["trouble"]
    rollout, learner = row["pools"]["rollout.big"], row["pools"]["learner"]
    assert rollout["allocated_s"] == 4 * 90.0 and rollout["uses_s"]["generating"] == 4 * 60.0
    assert learner["allocated_s"] == 2 * 40.0 and sum(learner["uses_s"].values()) == 80.0
    assert row["roles"]["sandbox"]["cpu"]["used_s"] is None, "no record, no account"


def test_the_end_that_control_saw_is_a_jobs_end(
    folder: tuple[RunPaths, Config], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("PATH", "/nowhere")
    paths, settings = folder
    launch.record(paths, "ended", role="learner", index=0, id="72", wall=BEGAN + 150, why="NODE_FAIL")
    learner = efficiency.efficiency(paths, settings)["pools"]["learner"]
    assert learner["allocated_s"] == 2 * 46.0 and learner["uses_s"]["unknown"] == pytest.approx(2 * 6.0)
    for name in paths.usage.iterdir():
        name.write_text("{")  # what can't be read is no record
    pool = efficiency.efficiency(paths, settings)["pools"]["learner"]
    assert pool["allocated_s"] is None and pool["uses_s"] is None and "left no record" in pool["notes"][0]


# ---- tokens ---------------------------------------------------------------------------------------------------------


async def test_tokens_that_come_to_nothing_by_cause(folder: tuple[RunPaths, Config]) -> None:
    """Two that were trained, of which one lost an attempt after seven tokens and two tokens were masked; and others."""
    paths, settings = folder
    ended = [
        ("a", 2, "COMPLETED", None, 4), ("b", 1, "COMPLETED", None, 6), ("c", 1, "FAILED", "engine", 3),
        ("d", 1, "CANCELLED", "cancelled", 2), ("e", 1, "", None, 5), ("f", 1, "TRUNCATED", "environment", 1),
    ]  # fmt: skip
    log = open_log(paths)
    for name, attempt, status, cause, num_tokens in ended:
        root = prompt([1, 2, 3])
        one = adopt(name)
        records = [root, one]
        if attempt == 2:
            records.append(act(one, 0, list(range(7)), root=root.hash))  # is lost: the next attempt knows only `one`
            one = adopt(name, 2, one.hash)
            records.append(one)
        records.append(act(one, 0, list(range(num_tokens)), root=root.hash, version=1))
        if status:
            last = end(records[-1], status, num_sampled=num_tokens)
            fault = {"cause": cause, "where": "x", "message": "y"} if cause else None
            records.append(replace(last, meta={**last.meta, "fault": fault, "min_version": 1}))
        await log.append([one.frame() for one in records])
    await log.close()
    progress = ProgressWriter(paths, None)
    metrics = {"tokens": 8.0, "masked_share": 0.2, "broken_logprobs": 1.0, "step_s": 3.0}
    row = UpdateRow(update=1, phase="rl", phase_update=1, parent_version=3, trajectories=("a", "b"), metrics=metrics)
    progress.append(row)
    # A second update that a resume from the first made void.
    progress.append(replace(row, update=2, phase_update=2, trajectories=("f",), metrics={"step_s": 1.0}))
    progress.close()
    ProgressWriter(paths, {"incarnation": 1, "update": 1}).close()
    found = efficiency.efficiency(paths, settings)
    made = found["tokens"]
    assert made["classes"] == {
        "used": {"trained": {"tokens": 8, "trajectories": 2}},
        "pending": {"under way": {"tokens": 5, "trajectories": 1}},
        "thrown_away": {
            "cut short: environment": {"tokens": 1, "trajectories": 1},
            "dropped: no longer needed": {"tokens": 2, "trajectories": 1},
            "failed: engine": {"tokens": 3, "trajectories": 1},
            "lagged: older than max_lag": {"tokens": 1, "trajectories": 2},
            "logprobs that are no numbers": {"tokens": 1, "trajectories": 0},
            "sampled again, after a fault": {"tokens": 7, "trajectories": 1},
        },
    }
    assert (made["generated"], made["thrown_away"], made["retry_share"]) == (28, 15, 7 / 28)
    assert made["cut_off"] is None, "its engines have counted none"
    for path in paths.usage.glob("rollout-*"):
        path.write_text(json.dumps({**json.loads(path.read_text()), "generated": 30}))
    again = efficiency.efficiency(paths, settings)["tokens"]
    assert (again["cut_off"], again["generated"], again["thrown_away"]) == (2, 30, 17)
    assert found["updates"] == {"made": 2, "void": 1, "share": 0.25}
    for pool, work in (("rollout.big", "generating"), ("learner", "learning")):
        uses = found["pools"][pool]["uses_s"]
        assert uses["retry"] == pytest.approx((uses["retry"] + uses[work]) / 4) and uses["retry"] > 0
