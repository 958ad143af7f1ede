"""Nodes as they are on clusters: a login shell's limits and locale, a home that nothing may be written to, another
version of a library."""

from __future__ import annotations

import asyncio
import os
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from drill_parts import config_of
from run_parts import HPCRL, nothing_left, running, verified, write_config
from store_parts import run_folder

from hpcrl import launch
from hpcrl.config import Config
from hpcrl.layout import publish_json, read_json
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
