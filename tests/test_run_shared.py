"""A real run whose control sees the run folder through one mount and all other roles through another (slow_mount.py):
stopped, broken off and resumed, it loses nothing and trains nothing twice."""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
from pathlib import Path

import psutil
import pytest
from run_parts import Receipts, hpcrl, nothing_left, processes_of, running, verified, write_config
from slow_mount import slow_mounts

from hpcrl.layout import RunPaths
from hpcrl.store.index import Store
from hpcrl.store.ledger import lineage

pytestmark = [pytest.mark.vllm, pytest.mark.slow, pytest.mark.timeout(1800)]

# Read by every Python process at its start: each role gets its own mount, at the path that all of them know.
NAMESPACE = """
import ctypes, os, sys

words = " ".join(sys.orig_argv)
if "submitit.core._submit" in words and os.environ["SLOW_AT"] in words:
    side = os.environ["SLOW_CONTROL" if "/control-" in words else "SLOW_OTHERS"].encode()
    libc = ctypes.CDLL(None, use_errno=True)
    if (
        libc.unshare(0x20000)  # CLONE_NEWNS
        or libc.mount(b"none", b"/", None, 0x44000, None)  # MS_REC | MS_PRIVATE
        or libc.mount(side, os.environ["SLOW_AT"].encode(), None, 0x1000, None)  # MS_BIND
    ):
        os._exit(71)
"""


def test_stop_and_resume_then_kill_all_and_resume(
    tiny_model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    at, site = tmp_path / "seen", tmp_path / "site"
    at.mkdir(), site.mkdir()
    run = at / "run"
    (site / "sitecustomize.py").write_text(NAMESPACE)
    config = write_config(tmp_path, tiny_model, updates=25, tasks=4)
    with slow_mounts(tmp_path) as (a, b):
        for name, value in {"SLOW_AT": at, "SLOW_CONTROL": b, "SLOW_OTHERS": a}.items():
            monkeypatch.setenv(name, str(value))
        monkeypatch.setenv("PYTHONPATH", f"{site}:{os.environ.get('PYTHONPATH', '')}")
        subprocess.run(["mount", "--bind", a, at], check=True)
        try:
            _train_stop_break_resume(run, config)
        finally:
            subprocess.run(["umount", "-l", at], check=True)


def _train_stop_break_resume(run: Path, config: Path) -> None:
    with running("train", config, "--run", run, run=run) as live:
        live.until("some RL updates", lambda row: row["phases"]["rl"][0] >= 2)
        seen = [
            Path(f"/proc/{live.role(role).pid}/root{run}").stat().st_dev for role in ("control", "learner", "rollout")
        ]
        assert seen[0] != seen[1] == seen[2], "control is on a mount of its own"
        live.process.send_signal(signal.SIGINT)
        assert live.wait() == 0, live.tail()
    assert nothing_left(run)
    done = lineage(RunPaths.of(run))[-1].update
    verified(run)
    with running("resume", run, run=run) as live:
        receipts = Receipts(run)
        receipts.start()
        live.until("an update more", lambda row: row["updates"]["done"] > done and len(receipts.hashes) > 100)
        live.process.kill()
        for process in processes_of(run):
            with contextlib.suppress(psutil.NoSuchProcess):
                process.kill()
        acknowledged = receipts.stop()
    assert nothing_left(run)
    with running("resume", run, run=run) as live:
        assert live.wait() == 0, live.tail()
    assert nothing_left(run)
    assert '"state": "done"' in hpcrl("status", run, "--json").stdout
    assert verified(run)["trained_twice"] == 0
    with Store(RunPaths.of(run)) as store:
        there = {*store.prompts(), *(hash for name in store.names() for hash in store.rows(name))}
    assert len(acknowledged) > 100 and not acknowledged - there
    rows = [update for update in lineage(RunPaths.of(run)) if update.trajectories]
    assert [update.update for update in rows] == list(range(1, 30))
    assert len({update.version for update in rows if update.version >= 0}) == 26
