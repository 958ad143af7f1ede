"""What a user does wrong: one line that names the thing and the remedy, exit code 2, nothing left behind."""

from __future__ import annotations

import json
import shutil
import socket
import time
from pathlib import Path

import pytest
from run_parts import hpcrl, nothing_left, running, write_config
from small_disk import fill, small_disk


def refused(*words: object, expect: str) -> None:
    done = hpcrl(*words)
    assert done.returncode == 2, done.stdout + done.stderr
    assert expect in done.stderr
    assert len(done.stderr.strip().splitlines()) == 1, done.stderr


def test_unknown_key(tiny_model: Path, tmp_path: Path) -> None:
    config = write_config(tmp_path, tiny_model)
    run = tmp_path / "run"
    refused("train", config, "--run", run, "--set", "learner.rank=2", expect="did you mean 'ranks'?")
    assert not run.exists()


def test_model_without_tokenizer(tiny_model: Path, tmp_path: Path) -> None:
    model = tmp_path / "model"
    shutil.copytree(tiny_model, model)
    for path in model.glob("tokenizer*"):
        path.unlink()
    run = tmp_path / "run"
    refused("train", write_config(tmp_path, model), "--run", run, expect="tokenizer")
    assert not run.exists() and nothing_left(run)


def test_model_that_is_not_there(tmp_path: Path) -> None:
    refused("train", write_config(tmp_path, tmp_path / "none"), "--run", tmp_path / "run", expect="none")
    assert not (tmp_path / "run").exists()


def test_run_folder_that_exists(tiny_model: Path, tmp_path: Path) -> None:
    run = tmp_path / "run"
    run.mkdir()
    (run / "mine").write_text("kept")
    refused("train", write_config(tmp_path, tiny_model), "--run", run, expect="give another --run")
    (run / "config.json").write_text("{}")
    refused("train", write_config(tmp_path, tiny_model), "--run", run, expect="hpcrl resume")
    assert (run / "mine").read_text() == "kept"


def test_gpu_that_is_not_there(tiny_model: Path, tmp_path: Path) -> None:
    run = tmp_path / "run"
    config = write_config(tmp_path, tiny_model)
    refused("train", config, "--run", run, "--set", "rollout.gpus=64", expect="ask for 64 GPUs, this machine has")
    assert not run.exists()


def test_ports_in_use(tiny_model: Path, tmp_path: Path) -> None:
    config = write_config(tmp_path, tiny_model, ports="21500-21501")
    with socket.socket() as one, socket.socket() as two:
        for taken, port in ((one, 21500), (two, 21501)):
            taken.bind(("127.0.0.1", port))
            taken.listen()
        refused("train", config, "--run", tmp_path / "run", expect="0 free ports in 21500-21501, this run needs 6")
    assert not (tmp_path / "run").exists()


def test_environment_that_is_not_there(tiny_model: Path, tmp_path: Path) -> None:
    config = write_config(tmp_path, tiny_model)
    words = ("train", config, "--run", tmp_path / "run", "--set", "environment.name=fnd")
    refused(*words, expect="find")


def test_not_a_run_folder(tmp_path: Path) -> None:
    for command in ("status", "stop", "resume", "watch"):
        refused(command, tmp_path, expect="not a run folder")


@pytest.mark.vllm
@pytest.mark.timeout(1200)
def test_disk_that_fills_up(tiny_model: Path, tmp_path: Path) -> None:
    with small_disk(tmp_path / "disk", "48m") as disk:
        run = disk / "run"
        config = write_config(tmp_path, tiny_model, updates=4000)
        with running("train", config, "--run", run, "--set", "store.full_patience_s=20", run=run) as live:
            live.until("a trajectory under way", lambda row: row["accounting"]["admitted"] > 0)
            fill(disk, 1 << 18)
            time.sleep(8)  # for a short time: the run waits
            (disk / "ballast").unlink()
            done = live.status()["updates"]["done"]
            live.until("updates after a short time without space", lambda row: row["updates"]["done"] > done + 3)
            fill(disk, 1 << 18)  # for too long
            assert live.wait() == 2, live.tail()
            last = live.tail().strip().splitlines()[-1]
            assert "disk full" in last and "hpcrl resume" in last, live.tail()
        assert nothing_left(run)
        (disk / "ballast").unlink()
        # The run can be continued once there is space.
        with running("resume", run, run=run) as live:
            first = json.loads(hpcrl("status", run, "--json").stdout)["updates"]["done"]
            live.until("more updates", lambda row: row["updates"]["done"] > first + 1)
            assert hpcrl("stop", run).returncode == 0
            assert live.wait() == 0, live.tail()
        assert nothing_left(run)
        assert hpcrl("store", "verify", run, "--deep").returncode == 0
