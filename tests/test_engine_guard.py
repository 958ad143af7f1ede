"""The guard with real processes (it starts whatever it is told), and the ways in which an engine's start goes wrong."""

from __future__ import annotations

import asyncio
import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from multiprocessing.shared_memory import SharedMemory
from pathlib import Path

import pytest

from hpcrl.config import Rollout
from hpcrl.rollout import guard, server
from hpcrl.rollout.server import EngineProcess
from hpcrl.types import EngineError

# A leader with a child, both deaf to SIGTERM.
DEAF = ["bash", "-c", "trap '' TERM; (trap '' TERM; while :; do sleep 0.1; done) & while :; do sleep 0.1; done"]
POLITE = ["bash", "-c", "sleep 1000 & sleep 1000"]


class Guarded:
    def __init__(self, folder: Path, command: list[str], grace_s: float, owner: int) -> None:
        self.folder = folder
        self.own(owner)
        start = [sys.executable, "-I", "-S", guard.__file__, str(folder), str(folder / "log"), str(grace_s), "0.5"]
        self.guard = subprocess.Popen([*start, *command], start_new_session=True)
        self.wait_for(lambda: (folder / guard.ENGINE).exists())
        self.group = json.loads((folder / guard.ENGINE).read_text())["engine"]["pid"]
        time.sleep(0.3)  # for the shell to start its child

    def own(self, pid: int) -> None:
        (self.folder / guard.OWNER).write_text(json.dumps(guard.identity(pid)))

    @staticmethod
    def wait_for(what: object, seconds: float = 5.0) -> None:
        deadline = time.monotonic() + seconds
        while not what():  # type: ignore[operator]
            assert time.monotonic() < deadline
            time.sleep(0.02)

    @property
    def over(self) -> bool:
        return self.guard.poll() is not None and not guard.group_lives(self.group)


@pytest.fixture
def sleeper() -> Iterator[subprocess.Popen[bytes]]:
    process = subprocess.Popen(["sleep", "1000"])
    yield process
    process.kill()
    process.wait()


def end(guarded: Guarded) -> None:
    guarded.guard.kill()
    guarded.guard.wait()
    guard.end_group(guarded.group, 0.0)


def test_an_orphan_is_ended_after_the_grace(tmp_path: Path, sleeper: subprocess.Popen[bytes]) -> None:
    guarded = Guarded(tmp_path, DEAF, 1.0, sleeper.pid)
    try:
        time.sleep(2.0)
        assert guard.group_lives(guarded.group)
        sleeper.send_signal(signal.SIGKILL)  # a zombie of ours now: dead all the same
        time.sleep(0.6)
        assert guard.group_lives(guarded.group)
        guarded.wait_for(lambda: guarded.over)
    finally:
        end(guarded)


def test_a_new_owner_in_time_keeps_it(tmp_path: Path, sleeper: subprocess.Popen[bytes]) -> None:
    guarded = Guarded(tmp_path, POLITE, 1.5, sleeper.pid)
    try:
        sleeper.kill()
        time.sleep(0.5)
        guarded.own(os.getpid())
        time.sleep(2.5)
        assert not guarded.over
        # The same pid with another start time is another process.
        (tmp_path / guard.OWNER).write_text(json.dumps({"pid": os.getpid(), "start": 1}))
        guarded.wait_for(lambda: guarded.over)
    finally:
        end(guarded)


@pytest.mark.parametrize("command", [DEAF, POLITE])
def test_sigterm_to_the_guard_ends_all(tmp_path: Path, command: list[str]) -> None:
    guarded = Guarded(tmp_path, command, 60.0, os.getpid())
    try:
        guarded.guard.terminate()
        guarded.wait_for(lambda: guarded.over, 3.0)
    finally:
        end(guarded)


def test_children_of_a_killed_leader_are_ended(tmp_path: Path) -> None:
    guarded = Guarded(tmp_path, DEAF, 60.0, os.getpid())
    try:
        os.kill(guarded.group, signal.SIGKILL)
        guarded.wait_for(lambda: guarded.over)
        assert guarded.guard.returncode == 128 + signal.SIGKILL
    finally:
        end(guarded)


def test_a_killed_guard_takes_the_leader_along(tmp_path: Path) -> None:
    guarded = Guarded(tmp_path, ["sleep", "1000"], 60.0, os.getpid())
    try:
        guarded.guard.kill()
        guarded.wait_for(lambda: not guard.group_lives(guarded.group))
    finally:
        end(guarded)


SHARING = """
import signal, sys, time
from multiprocessing.shared_memory import SharedMemory
made = SharedMemory(create=True, size=4096)
signal.signal(signal.SIGTERM, signal.SIG_IGN)
open(sys.argv[1], "w").write(made.name)
time.sleep(1000)
"""


@pytest.mark.parametrize("killed", ["engine", "all"])
def test_shared_memory_of_a_killed_engine_is_freed(tmp_path: Path, killed: str) -> None:
    """And no other's."""
    others = SharedMemory(create=True, size=4096)
    folder = tmp_path / "n" / "engine-0"
    folder.mkdir(parents=True)
    guarded = Guarded(folder, [sys.executable, "-c", SHARING, str(tmp_path / "name")], 60.0, os.getpid())
    try:
        guarded.wait_for((tmp_path / "name").exists)
        made = Path("/dev/shm", (tmp_path / "name").read_text())
        guarded.wait_for(lambda: made.name in str(guard.read(str(folder / guard.SHARED))))
        if killed == "all":  # as at the end of an allocation
            guarded.guard.kill()
            guarded.guard.wait()
        os.killpg(guarded.group, signal.SIGKILL)
        guarded.wait_for(lambda: guarded.over)
        if killed == "all":
            assert made.exists()
            tmp_path.chmod(0o700)
            with pytest.MonkeyPatch.context() as patch:
                patch.setattr(guard, "among", lambda: "pid:[1]")
                server.sweep_shared([tmp_path])
            assert made.exists(), "of another node that shares /tmp, or a container: not to be judged from here"
            server.sweep_shared([tmp_path])
        guarded.wait_for(lambda: not made.exists())
        assert Path("/dev/shm", others.name).exists()
    finally:
        end(guarded)
        others.close()
        others.unlink()


def test_what_a_start_failed_for_is_found_among_what_followed_from_it(tmp_path: Path) -> None:
    engine = process(tmp_path, Rollout())
    engine.log.write_text(
        "WARNING no such module: ImportError: not there\n(EngineCore pid=1) ERROR [core.py:1] RuntimeError: no space\n"
        "(APIServer pid=2) ERROR RuntimeError: Engine core initialization failed.\n"
    )
    assert engine.last_words() == f"{engine.log} says: RuntimeError: no space"


def process(tmp_path: Path, pool: Rollout, **more: object) -> EngineProcess:
    places = {"folder": tmp_path / "engine-0", "log": tmp_path / "engine.log"}
    return EngineProcess(pool, model=tmp_path / "none", dtype="float32", **places, **more)  # type: ignore[arg-type]


@pytest.mark.parametrize("devices", [(), ("0",)])
def test_gpus_that_are_not_there_are_named(tmp_path: Path, devices: tuple[str, ...]) -> None:
    with pytest.raises(EngineError, match=r"rollout\.big\.gpus = 2: engine 0 finds too few GPUs here"):
        process(tmp_path, Rollout(name="big", gpus=2, tensor_parallel=2), devices=devices)


def test_a_folder_too_deep_for_a_socket(tmp_path: Path) -> None:
    with pytest.raises(EngineError, match="longer than 107 bytes"):
        process(tmp_path / ("d" * 110), Rollout())


async def test_a_start_that_ends_at_once(tmp_path: Path) -> None:
    failing = process(tmp_path, Rollout())
    failing._command = ["bash", "-c", "sleep 1000 & echo no such flag; exit 2"]
    with pytest.raises(EngineError, match=r"(?s)exited while starting.*no such flag"):
        await failing.start()
    assert failing.pid == 0
    assert not failing.alive


@pytest.mark.slow
@pytest.mark.vllm
async def test_a_start_that_fails_shows_the_log_and_leaves_nothing(tmp_path: Path) -> None:
    failing = process(tmp_path, Rollout(start_timeout_s=120))
    (tmp_path / "engine.log").write_text("words of an earlier engine\n")
    with pytest.raises(EngineError, match="exited while starting") as caught:
        await failing.start()
    assert str(tmp_path / "none") in str(caught.value)
    assert "earlier" not in str(caught.value)
    assert not failing.alive
    assert not await failing.adopt()


@pytest.mark.vllm
async def test_a_start_that_takes_too_long_is_ended(tmp_path: Path) -> None:
    slow = process(tmp_path, Rollout(start_timeout_s=1.0))
    starting = asyncio.create_task(slow.start())
    await asyncio.sleep(0.8)
    group = slow.pid
    with pytest.raises(EngineError, match="no engine after 1 s"):
        await starting
    assert group
    assert not guard.group_lives(group)
