"""The whole product with its real processes: a run from start to end, killed, stopped, resumed."""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import json
import os
import random
import re
import signal
import time
from pathlib import Path
from typing import Any

import h5py
import psutil
import pytest
from run_parts import Receipts, Running, hpcrl, nothing_left, processes_of, running, verified, write_config

from hpcrl import Run, launch
from hpcrl.layout import RunPaths, read_json
from hpcrl.store.index import Store
from hpcrl.store.ledger import lineage
from hpcrl.store.records import Kind
from hpcrl.types import Receipt

pytestmark = [pytest.mark.vllm, pytest.mark.timeout(1800)]


def test_a_run_from_start_to_end(tiny_model: Path, tmp_path: Path) -> None:
    run = tmp_path / "my run ü"
    config = write_config(tmp_path, tiny_model)
    with running("train", config, "--run", run, "--set", "seed=1", run=run) as live:
        live.until("a trajectory under way", lambda row: row["accounting"]["admitted"] > 0)
        trajectory, receipts = asyncio.run(_submit(run))
        assert live.wait() == 0, live.tail()
        assert "held-out success after rl" in live.tail()
    assert nothing_left(run)
    kinds = [receipt.kind for receipt in receipts]
    assert kinds[0] == Kind.ADOPT.name and kinds[-1] == Kind.END.name and kinds[1] == Kind.ACT.name
    assert {receipt.trajectory for receipt in receipts} == {trajectory}

    row = json.loads(hpcrl("status", run, "--json").stdout)
    assert row["state"] == "done" and row["updates"] == {"done": 7, "total": 7}
    assert set(row["success"]) == {"before", "after_warm_start", "after_rl", "tasks", "interval"}
    assert row["success"]["tasks"] == 8
    accounting = row["accounting"]
    ended = sum(accounting.get(name, 0) for name in ("COMPLETED", "TRUNCATED", "FAILED", "CANCELLED"))
    assert accounting["admitted"] == ended + accounting["open"] and accounting["open"] == 0
    assert (run / "reward.png").stat().st_size > 5000

    report = verified(run)
    assert report["segments"] == 0, "a stopped run leaves no segment"
    rows = [update for update in lineage(RunPaths.of(run)) if update.trajectories]
    assert [update.phase_update for update in rows] == [1, 2, 3, 4, 1, 2, 3]
    assert all(len(update.trajectories) == 16 for update in rows)
    # Between engine and learner: the same weights give the same logprobs, for tokens sampled by the very version.
    fresh = [update.metrics for update in rows if update.metrics.get("mismatch_tokens", 0) > 0]
    assert fresh and all(metrics["mismatch"] <= 1e-4 for metrics in fresh)
    for path in (run / "shards").glob("*.h5"):
        with h5py.File(path) as shard:
            assert len(shard["tokens/ids"]) > 0


async def _submit(run: Path) -> tuple[str, list[Receipt]]:
    from hpcrl_envs import find

    handle = Run.open(str(run))
    trajectory = handle.submit(next(iter(find.tasks("heldout", 0))))
    return trajectory, [receipt async for receipt in handle.steps(trajectory)]


def test_kill_every_process_in_turn(tiny_model: Path, tmp_path: Path) -> None:
    run = tmp_path / "run"
    config = write_config(tmp_path, tiny_model, updates=4000, tasks=4)
    with running("train", config, "--run", run, "--set", "launch.restarts=50", run=run) as live:
        live.until("the first RL update", lambda row: row["phases"]["rl"][0] >= 1)
        receipts = Receipts(run)
        receipts.start()
        live.until("receipts", lambda row: len(receipts.hashes) > 0)
        victims = {
            "learner rank": lambda: live.role("learner", rank=1).pid,
            "learner rank 0": lambda: live.role("learner").pid,
            "host": lambda: node(live)["hosts"][0],
            "sandbox node": lambda: live.role("sandbox").pid,
            "supervisor": lambda: node(live)["pid"],
            "control": lambda: live.role("control").pid,
            # submitit's own processes, the parents of what does the work
            "controller of the rollout job": lambda: live.role("rollout").ppid(),
            "controller of control": lambda: live.role("control").ppid(),
            "engine": lambda: node(live)["engines"][0],
        }
        for name, find in victims.items():
            engine = node(live)["engines"]
            began = time.monotonic()
            incarnation = live.status()["incarnation"]
            os.kill(find(), signal.SIGKILL)
            if name.endswith("control"):
                live.until("a new control", lambda row, old=incarnation: row["incarnation"] > old)
            trained = live.status()["phases"]["rl"][0]
            live.until(f"updates after {name} was killed", lambda row, old=trained: row["phases"]["rl"][0] >= old + 3)
            print(f"{name} killed: three more updates after {time.monotonic() - began:.1f} s")
            if name != "engine":
                assert node(live)["engines"] == engine, f"losing the {name} restarted the engine"
        acknowledged = receipts.stop()
        assert hpcrl("stop", run).returncode == 0
        assert live.wait() == 0, live.tail()
    assert nothing_left(run)
    report = verified(run)
    assert report["trained_twice"] == 0
    store = Store(RunPaths.of(run))
    there = {*store.prompts(), *(hash for name in store.names() for hash in store.rows(name))}
    lost = acknowledged - there
    assert len(acknowledged) > 500 and not lost
    counts = [update.update for update in lineage(RunPaths.of(run)) if update.trajectories]
    assert counts == list(range(1, len(counts) + 1)), "updates without gap or repeat"
    print(f"{len(acknowledged)} acknowledged records followed, 0 lost; {len(counts)} updates; {report}")


@pytest.mark.slow
@pytest.mark.parametrize("seed", [0, 1])
def test_kills_at_any_moment(tiny_model: Path, tmp_path: Path, seed: int) -> None:
    """Any process of the run, helpers and sandboxes included, from its first second to its last."""
    run = tmp_path / "run"
    config = write_config(tmp_path, tiny_model, updates=40, tasks=16)
    chance = random.Random(seed)
    killed = []
    with running("train", config, "--run", run, "--set", "launch.restarts=50", run=run) as live:
        live.until("control", lambda row: True)
        while live.process.poll() is None:
            time.sleep(chance.uniform(0, 12))
            kinds: dict[str, list[psutil.Process]] = {}
            for process in processes_of(run):
                with contextlib.suppress(psutil.Error):
                    kinds.setdefault(_kind(process), []).append(process)
            kinds.pop("command", None)
            if kinds and len(killed) < 40:
                kind = chance.choice(sorted(kinds))  # a kind first: else nearly all would be sandboxes
                with contextlib.suppress(psutil.Error):
                    chance.choice(kinds[kind]).kill()
                    killed.append(kind)
        assert live.process.returncode == 0, f"{killed}\n{live.tail()}"
    assert nothing_left(run), killed
    report = verified(run)
    assert report["trained_twice"] == 0
    assert report["open_trajectories"] == 0
    rows = [update for update in lineage(RunPaths.of(run)) if update.trajectories]
    assert [update.update for update in rows] == list(range(1, 45)), killed
    print(f"killed: {killed}; {report}")


def _kind(process: psutil.Process) -> str:
    command = process.cmdline()
    words = " ".join(command)
    if "hpcrl.cli" in command:
        return "command"
    for mark in ("hpcrl.roles submit", "hpcrl.roles host", "store.compact", "guard.py", "submitit", "bwrap"):
        if mark in words:
            role = next((role for role in ("control", "rollout", "sandbox", "learner") if f"/{role}-0" in words), "")
            return f"{mark} {role}"
    return command[0] if command else process.name()


def node(live: Running) -> dict[str, list[int]]:
    (row,) = live.status()["nodes"].values()
    return row


def test_stop_and_resume_then_kill_all_and_resume(tiny_model: Path, tmp_path: Path) -> None:
    run = tmp_path / "run"
    config = write_config(tmp_path, tiny_model, updates=20, tasks=4)
    with running("train", config, "--run", run, "--set", "store.segment_age_s=600", run=run) as live:
        live.until("trajectories", lambda row: row["accounting"].get("COMPLETED", 0) > 0)
        assert live.status()["updates"]["done"] == 0, "the learner reads what is closed"
        closed = ""
        while live.status()["phases"]["rl"][0] < 3:
            sealed = hpcrl("store", "seal", run)
            assert sealed.returncode == 0, sealed
            closed += sealed.stdout
        assert re.search(r"closed .*\.seg\n", closed)
        live.process.send_signal(signal.SIGINT)  # Ctrl-C
        assert live.wait() == 0, live.tail()
    assert nothing_left(run)
    before = json.loads(hpcrl("status", run, "--json").stdout)
    assert before["state"] == "stopped" and 7 <= before["updates"]["done"] < 20
    verified(run)
    refused = hpcrl("resume", run, "--set", "rl.lr=0.5")
    assert refused.returncode == 2 and "phase.rl.lr is fixed for this run: it was 0.0001, now 0.5" in refused.stderr
    # Resumed, everything is killed at once, the command too; and resumed again.
    with running("resume", run, "--set", "store.segment_age_s=0.5", run=run) as live:
        live.until("an update more", lambda row: row["updates"]["done"] > before["updates"]["done"])
        live.process.kill()
        for process in processes_of(run):
            with contextlib.suppress(psutil.NoSuchProcess):
                process.kill()
    assert nothing_left(run)
    assert json.loads(hpcrl("status", run, "--json").stdout)["state"] == "broken off"
    with running("resume", run, run=run) as live:
        assert live.wait() == 0, live.tail()
    assert nothing_left(run)
    after = json.loads(hpcrl("status", run, "--json").stdout)
    assert after["state"] == "done" and after["updates"]["done"] == 24
    assert verified(run)["trained_twice"] == 0
    rows = [update for update in lineage(RunPaths.of(run)) if update.trajectories]
    assert [update.update for update in rows] == list(range(1, 25))
    versions = [update.version for update in rows if update.version >= 0]
    assert all(one < two for one, two in itertools.pairwise(versions)), "version numbers never go back"


@pytest.mark.parametrize("shrinks", [False, pytest.param(True, marks=pytest.mark.slow)])
def test_a_sandbox_pool_fits_its_size_to_the_need(tiny_model: Path, tmp_path: Path, shrinks: bool) -> None:
    run = tmp_path / "run"
    config = write_config(tmp_path, tiny_model, updates=0, tasks=0)
    text = re.sub(r'\[\[phase\]\]\nname = "rl"[^[]+', "", config.read_text())
    config.write_text(text.replace("updates = 4", f"updates = {200 if shrinks else 4000}"))
    sets = ("rollout.engines=0", "sandbox.sessions=2", "sandbox.warm=1", "sandbox.maximum_jobs=3")
    words = [word for text in sets for word in ("--set", text)]
    with running("train", config, "--run", run, *words, run=run) as live:
        live.until("three sandbox jobs", lambda _: len(_sandboxes(run)) == 3, 120)
        live.until("trajectories", lambda row: row["accounting"].get("COMPLETED", 0) > 100, 120)
        said = hpcrl("logs", run, "control", "--lines", 1000).stdout
        assert "sandbox pool sandbox: 3 jobs, was 1: " in said
        if shrinks:

            def all_are_made(row: dict[str, Any]) -> bool:  # while the learner, and who replaces it, hangs
                with contextlib.suppress(IndexError, psutil.Error):
                    live.role("learner").suspend()
                return row["accounting"]["open"] == 0

            live.until("an end to the trajectories that are needed", all_are_made, 400)
            live.until("one sandbox job", lambda row: all_are_made(row) and len(_sandboxes(run)) == 1, 300)
            live.role("learner").resume()
        assert hpcrl("stop", run).returncode == 0 and live.wait() == 0, live.tail()
    assert nothing_left(run)
    verified(run)


def _sandboxes(run: Path) -> list[launch.Job]:
    return [job for job in launch.living(RunPaths.of(run)) if job.role == "sandbox"]


@pytest.mark.slow
def test_a_stop_outlives_the_control_that_was_carrying_it_out(tiny_model: Path, tmp_path: Path) -> None:
    run = tmp_path / "run"
    config = write_config(tmp_path, tiny_model, updates=0, tasks=0)
    text = re.sub(r'\[\[phase\]\]\nname = "rl"[^[]+', "", config.read_text())
    config.write_text(text.replace("updates = 4", "updates = 4000"))
    with running("train", config, "--run", run, "--set", "rollout.engines=0", run=run) as live:
        live.until("updates", lambda row: row["updates"]["done"] >= 1)
        learner = live.role("learner")
        learner.suspend()  # so that control waits for it
        with Running("stop", run, run=run).process as stop:
            live.until("a stop", lambda _: bool(list(live.paths.inbox.glob("stop-*"))), 60)
            time.sleep(3)  # it has seen that, and waits for the learner
            live.role("control").kill()
            live.until("another control", lambda row: row["incarnation"] == 2)
            learner.resume()
            assert stop.wait(200) == 0 and live.wait() == 0, live.tail()
    outcome = read_json(RunPaths.of(run).stopped)
    assert outcome is not None and outcome["outcome"] == "stopped"
    assert nothing_left(run) and not list(RunPaths.of(run).inbox.glob("stop-*"))
    verified(run)
