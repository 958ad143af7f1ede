"""Nodes as they are on clusters: a login shell's limits and locale, a home that nothing may be written to, another
version of a library."""

from __future__ import annotations

import asyncio
import contextlib
import multiprocessing
import os
import signal
import socket
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from drill_parts import config_of
from run_parts import HPCRL, nothing_left, running, verified, write_config
from store_parts import run_folder

from hpcrl import launch, roles
from hpcrl.config import Config, dump
from hpcrl.layout import publish_json, read_json
from hpcrl.learner.ranks import Ranks
from hpcrl.node import listener_of, port_is_free
from hpcrl.types import ConfigError
from hpcrl.workers.guest import Guest, security, versions


@pytest.mark.timeout(600)
def test_a_bare_environment(tmp_path: Path, tiny_model: Path) -> None:
    """Of a batch job at its worst: no locale, a home of which nothing is to be touched, 256 open files."""
    home, run = tmp_path / "home", tmp_path / "my run ü"
    home.mkdir()
    path = tmp_path / "run.toml"
    path.write_text(config_of(model=tiny_model, updates=3))
    sets = [f"--set={one}" for one in ("launch.executor=local", "learner.nodes=1", "launch.ports=21400-21499")]
    command = ("bash", "-c", 'ulimit -Sn 256; exec "$@"', "-", *HPCRL, "train", str(path), "--run", str(run), *sets)
    bare = {"PATH": os.environ["PATH"], "LC_ALL": "C", "HOME": str(home)}
    kept = {name: os.environ[name] for name in ("PYTHONPATH",) if name in os.environ}
    done = subprocess.run(command, env=bare | kept, capture_output=True, timeout=540, check=False)
    assert done.returncode == 0, done.stderr.decode(errors="replace")
    assert (read_json(run / "control" / "stopped.json") or {})["outcome"] == "done"
    assert not list(home.iterdir())


def test_another_version_of_a_library_is_refused_by_name(tmp_path: Path) -> None:
    paths = run_folder(tmp_path / "run")
    launch.make_certificate(paths)
    ssl = security(paths).get_listen_args("scheduler")["ssl_context"]
    config = Config.model_validate({"phase": [{"name": "p", "trajectories": 2, "group_size": 2}]})

    async def call(*_: object) -> None:
        raise AssertionError

    async def join(server: asyncio.Server) -> None:
        host, port = server.sockets[0].getsockname()
        row = {"address": f"tls://{host}:{port}", "incarnation": 1, **versions(), "msgpack": "0.0.1"}
        publish_json(paths.scheduler, row)
        await Guest(paths, config, "host", call, nthreads=1, local=tmp_path).serve()

    async def main() -> None:
        async with await asyncio.start_server(lambda *_: None, "127.0.0.1", 0, ssl=ssl) as server:
            await join(server)

    ours = rf"python {sys.version_info[0]}\.{sys.version_info[1]}"
    with pytest.raises(
        ConfigError, match=rf" has msgpack [1-9].*, control has {ours}.* msgpack 0\.0\.1: make them alike$"
    ):
        asyncio.run(main())


@pytest.mark.parametrize(("place", "visible", "expected"), [(3, 1, 0), (3, 4, 3), (0, 8, 0), (5, 4, 1)])
def test_a_ranks_gpu_is_one_that_it_sees(
    place: int, visible: int, expected: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The sixth rank, wherever it is: Slurm may show all GPUs of a node to each task, or to each its own."""
    chosen: list[torch.device] = []
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: visible)
    monkeypatch.setattr(torch.cuda, "set_device", chosen.append)
    monkeypatch.delenv("SUBMITIT_LOCAL_LOCALID", raising=False)
    monkeypatch.setenv("SLURM_PROCID", "5")
    monkeypatch.setenv("SLURM_LOCALID", str(place))
    assert Ranks._device(1) == torch.device("cuda", expected)
    assert chosen == [torch.device("cuda", expected)]


@pytest.mark.slow
@pytest.mark.vllm
@pytest.mark.timeout(900)
def test_a_full_dev_shm_is_named_and_waited_out(tmp_path: Path, tiny_model: Path) -> None:
    """Before the engine's start, and when it has to start again; TMPDIR is full all the while."""
    if os.geteuid():
        pytest.skip("needs root, to mount a small /dev/shm of its own")
    run, small = tmp_path / "run", tmp_path / "small"
    small.mkdir()
    config = write_config(tmp_path, tiny_model, updates=20, tasks=0)
    mounted = " && ".join(
        f"mount -t tmpfs -o size=300m tmpfs {place} && (cat /dev/zero > {place}/fill || true)"
        for place in ("/dev/shm", small)
    )
    script = f'{mounted} && export TMPDIR={small} && exec "$@"'
    begin = ("unshare", "--mount", "bash", "-c", script, "-")
    with running("train", config, "--run", run, run=run, within=begin) as live:
        fill = Path(f"/proc/{live.process.pid}/root/dev/shm/fill")

        def full(row: dict[str, Any]) -> bool:
            return bool(row["wrong"]) and "/dev/shm has 0 MiB free: make room there" in row["wrong"][0]

        row = live.until("a word of the full /dev/shm", full)
        assert "Insufficient space in /dev/shm" in row["wrong"][0]
        fill.unlink()
        row = live.until("updates", lambda row: row["phases"]["rl"][0] >= 2)
        assert not row["wrong"] and row["accounting"]["faults"] == {}
        made = len(list(fill.parent.glob("psm_*")))
        subprocess.run(["bash", "-c", f"cat /dev/zero > {fill}"], check=False, capture_output=True)
        (node,) = row["nodes"].values()
        os.kill(node["engines"][0], signal.SIGKILL)
        live.until("a word of the full /dev/shm", full)
        fill.unlink()
        trained = row["phases"]["rl"][0]
        live.until("updates", lambda row: row["phases"]["rl"][0] > trained + 1)
        assert 0 < len(list(fill.parent.glob("psm_*"))) <= made, "the engine that died left none behind"
        assert live.wait() == 0, live.tail()
        assert "wrong: " in live.output.read_text()
    assert nothing_left(run)
    verified(run)


def test_listeners_that_are_opened_at_once_all_get_a_port() -> None:
    """Twenty times, eight at a time, in a range of eight."""
    low = next(low for low in range(22000, 30000, 8) if all(port_is_free(port) for port in range(low, low + 8)))
    tree = {"phase": [{"name": "p", "trajectories": 2, "group_size": 2}], "launch": {"ports": f"{low}-{low + 7}"}}
    config = Config.model_validate(tree)
    fork = multiprocessing.get_context("fork")
    for _ in range(20):
        start, end, found = fork.Barrier(8), fork.Barrier(8), fork.Queue()

        def take(start: Any = start, end: Any = end, found: Any = found) -> None:
            start.wait(30)
            try:
                with listener_of(config, "127.0.0.1") as made:
                    found.put(made.getsockname()[1])
                    end.wait(30)
            except ConfigError:
                found.put(0)
                end.abort()

        takers = [fork.Process(target=take) for _ in range(8)]
        for taker in takers:
            taker.start()
        ports = [found.get(timeout=60) for _ in takers]
        for taker in takers:
            taker.join()
        assert sorted(ports) == list(range(low, low + 8))


async def test_a_scheduler_takes_the_next_port_when_another_was_quicker(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    paths = run_folder(tmp_path / "run")
    launch.make_certificate(paths)
    tree = {"phase": [{"name": "p", "trajectories": 2, "group_size": 2}]}
    config = Config.model_validate(tree | {"launch": {"ports": "22000-22999", "dashboard": False}})
    monkeypatch.setattr(roles, "port_is_free", lambda *_: True)
    with socket.socket() as quicker:
        quicker.bind(("127.0.0.1", 22000))
        quicker.listen()
        scheduler = await roles._scheduler(config, security(paths))
        assert scheduler.port > 22000
        await scheduler.close()


def test_a_config_that_no_control_can_run_with_ends_the_run_with_the_reason(tmp_path: Path) -> None:
    paths = run_folder(tmp_path / "run")
    launch.make_certificate(paths)
    tree = {"phase": [{"name": "p", "trajectories": 2, "group_size": 2}]}
    config = Config.model_validate(tree | {"launch": {"executor": "slurm", "interface": "ib7"}})
    paths.config.write_text(dump(config))
    command = (sys.executable, "-m", "hpcrl.roles", "control", str(paths.root))
    done = subprocess.run(command, capture_output=True, timeout=120, check=False)
    assert done.returncode == roles.FINAL, done.stderr
    said = (read_json(paths.stopped) or {})["outcome"]
    assert said.startswith("failed: launch.interface: ") and "has no interface 'ib7'" in said


@pytest.mark.slow
@pytest.mark.vllm
@pytest.mark.timeout(3600)
def test_eight_engines_and_two_runs_that_start_at_once(tmp_path: Path, tiny_model: Path) -> None:
    for number in range(3):
        with contextlib.ExitStack() as runs:
            live = []
            for name in ("one", "two"):
                run = tmp_path / f"{name}-{number}"
                run.mkdir()
                config = write_config(run, tiny_model, updates=1, tasks=0, ports="22000-22099")
                words = ("--set", "rollout.jobs=2", "--set", "rollout.engines=2", "--run", run / "run")
                live.append(runs.enter_context(running("train", config, *words, run=run / "run")))
            for one in live:
                assert one.wait(1200) == 0, one.tail()
                row = one.status()
                assert not row["restarts"] and not any(node["restarts"] for node in row["nodes"].values()), row
