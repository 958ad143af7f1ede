"""Whole runs as a user starts them: `hpcrl` as a process, its roles as processes of its own."""

from __future__ import annotations

import contextlib
import json
import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import psutil

from hpcrl.layout import RunPaths, read_json

HPCRL = (sys.executable, "-m", "hpcrl.cli")

SMALL = """
name = "small"
[model]
source = "{model}"
[environment]
name = "find"
[sampling]
max_tokens = 14
max_steps = 5
max_context = 200
deadline_s = 60
[[phase]]
name = "warm_start"
objective = "sft"
lr = 1e-3
updates = 4
trajectories = 16
publish_every = 0
[[phase]]
name = "rl"
objective = "grpo"
lr = 1e-4
updates = {updates}
trajectories = 16
group_size = 4
[evaluation]
tasks = {tasks}
[[rollout]]
name = "rollout"
concurrent = 24
max_model_len = 256
max_num_seqs = 32
block_size = 32
memory_gib = 0.1
[[sandbox]]
name = "sandbox"
sessions = 24
warm = 4
memory_mib = 64
disk_mib = 2
[learner]
ranks = 2
checkpoint_every = 2
collective_timeout_s = 60
[store]
segment_age_s = 0.5
commit_interval_s = 0.02
poll_s = 0.1
compact_every_s = 5
[launch]
status_s = 0.3
ports = "{ports}"
"""


def write_config(folder: Path, model: Path, *, updates: int = 3, tasks: int = 8, ports: str = "21000-21399") -> Path:
    path = folder / "small.toml"
    path.write_text(SMALL.format(model=model, updates=updates, tasks=tasks, ports=ports))
    return path


def hpcrl(*words: object, timeout: float = 400, **options: Any) -> subprocess.CompletedProcess[str]:
    command = [*HPCRL, *map(str, words)]
    return subprocess.run(command, capture_output=True, text=True, timeout=timeout, check=False, **options)


class Running:
    """`hpcrl train` or `resume` in the background; its output is kept."""

    def __init__(self, *words: object, run: Path, within: Sequence[str] = ()) -> None:
        """`within`: a command that starts it."""
        self.run = run
        self.output = run.parent / f"{run.name}.out"
        with self.output.open("ab") as out:
            self.process = subprocess.Popen([*within, *HPCRL, *map(str, words)], stdout=out, stderr=subprocess.STDOUT)

    @property
    def paths(self) -> RunPaths:
        return RunPaths.of(self.run)

    def status(self) -> dict[str, Any]:
        return read_json(RunPaths(self.run).heartbeat) or {}

    def until(self, what: str, condition: Callable[[dict[str, Any]], bool], timeout: float = 400) -> dict[str, Any]:
        """Wait for a condition on control's status; fail with the run's output when it does not come."""
        until = time.monotonic() + timeout
        while time.monotonic() < until:
            row = self.status()
            if row and condition(row):
                return row
            if self.process.poll() is not None:
                break
            time.sleep(0.1)
        raise AssertionError(f"{what}: not within {timeout:g} s; status {row}\n{self.tail()}")

    def tail(self) -> str:
        return self.output.read_text(errors="replace")[-3000:]

    def wait(self, timeout: float = 400) -> int:
        try:
            return self.process.wait(timeout)
        except subprocess.TimeoutExpired:
            raise AssertionError(f"still running after {timeout:g} s: {self.status()}\n{self.tail()}") from None

    def role(self, role: str, index: int = 0, rank: int = 0) -> psutil.Process:
        """The process that does a role's work (submitit's task, not its controller)."""
        folder = str(self.paths.submitit / f"{role}-{index}")
        tasks = []
        for process in psutil.process_iter():
            with contextlib.suppress(psutil.Error):
                command = process.cmdline()
                if "submitit.core._submit" in command and folder in command:
                    tasks.append(process)
        tasks.sort(key=lambda process: process.environ().get("SUBMITIT_LOCAL_GLOBALID", "0"))
        return tasks[rank]

    def end(self) -> None:
        """Leave nothing behind, whatever happened."""
        if self.process.poll() is None:
            self.process.send_signal(signal.SIGINT)
            with contextlib.suppress(subprocess.TimeoutExpired):
                self.process.wait(60)
        if self.process.poll() is None:
            self.process.kill()
        for process in processes_of(self.run):
            with contextlib.suppress(psutil.Error):
                process.kill()


@contextlib.contextmanager
def running(*words: object, run: Path, within: Sequence[str] = ()) -> Iterator[Running]:
    run_ = Running(*words, run=run, within=within)
    try:
        yield run_
    finally:
        run_.end()


def processes_of(run: Path) -> list[psutil.Process]:
    """Every living process that a run started: it names the run folder or its private folder, or is below one."""
    marks = [str(run.resolve())]
    with contextlib.suppress(Exception):
        marks.append(str(RunPaths.of(run).private()))
    found: dict[int, psutil.Process] = {}
    for process in psutil.process_iter():
        with contextlib.suppress(psutil.Error):
            if process.pid == os.getpid() or process.status() == psutil.STATUS_ZOMBIE:
                continue
            text = " ".join(process.cmdline())
            if any(mark in text for mark in marks):
                for one in (process, *process.children(recursive=True)):
                    if one.status() != psutil.STATUS_ZOMBIE:
                        found[one.pid] = one
    return list(found.values())


def nothing_left(run: Path, within_s: float = 15) -> bool:
    until = time.monotonic() + within_s
    while processes_of(run):
        if time.monotonic() > until:
            return False
        time.sleep(0.2)
    return True


class Receipts(threading.Thread):
    """Follows the receipts that hosts stream to control, across controls, from outside of the run."""

    def __init__(self, run: Path) -> None:
        super().__init__(daemon=True)
        self._run = run
        self._over = threading.Event()
        self.hashes: set[str] = set()

    def run(self) -> None:
        from distributed import Client

        from hpcrl.workers.guest import TOPIC, configure_dask, security

        configure_dask()
        paths = RunPaths.of(self._run)
        served = None
        while not self._over.is_set():
            row = read_json(paths.scheduler)
            if row is None or row["address"] == served:
                time.sleep(0.05)
                continue
            with contextlib.suppress(Exception):
                client = Client(row["address"], security=security(paths), set_as_default=False, timeout=5)
                client.subscribe_topic(TOPIC, lambda event: self.hashes.update(one["hash"] for one in event[1]))
                served = row["address"]
                while not self._over.is_set() and client.status == "running":
                    time.sleep(0.05)
                with contextlib.suppress(Exception):
                    client.close(timeout=2)

    def stop(self) -> set[str]:
        self._over.set()
        self.join(10)
        return self.hashes


def verified(run: Path) -> dict[str, Any]:
    done = hpcrl("store", "verify", run, "--deep", "--json")
    row: dict[str, Any] = json.loads(done.stdout.splitlines()[-1])
    assert done.returncode == 0 and row["ok"], done.stdout + done.stderr
    return row
