"""A real Slurm for tests: the testbed of slurm/testbed, in a folder of its own."""

from __future__ import annotations

import os
import subprocess
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import pytest

TESTBED = Path(__file__).parents[1] / "slurm" / "testbed"


@dataclass(frozen=True)
class Slurm:
    state: Path

    @classmethod
    def start(cls, state: Path, *options: str) -> Slurm:
        """Skips the test where a testbed can't be."""
        slurm = cls(state)
        done = slurm.script("up", *options)
        if done.returncode == 2:
            pytest.skip(done.stderr.strip())
        if done.returncode:
            slurm.script("down")
            pytest.fail(done.stderr)
        assert done.stdout == f"export SLURM_CONF={slurm.conf}\n"
        return slurm

    def stop(self) -> None:
        done = self.script("down")
        assert done.returncode == 0, done.stderr
        assert not self.state.exists()
        left = [words for pid, words in _processes() if str(self.state) in words and pid != os.getpid()]
        assert not left, left

    @property
    def conf(self) -> Path:
        return self.state / "slurm.conf"

    def script(self, name: str, *words: object) -> subprocess.CompletedProcess[str]:
        return self.run(sys.executable, TESTBED / name, "--state", self.state, *words)

    def run(self, *words: object, timeout: float = 120, **environment: str) -> subprocess.CompletedProcess[str]:
        """Any command, Slurm's above all. Slurm's variables of the caller's own job, if it's in one, don't count."""
        own = {name: value for name, value in os.environ.items() if not name.startswith(("SLURM_", "PMI_"))}
        command = [str(word) for word in words]
        variables = {**own, "SLURM_CONF": str(self.conf), **environment}
        try:
            return subprocess.run(command, env=variables, capture_output=True, text=True, timeout=timeout, check=False)
        except subprocess.TimeoutExpired as error:
            pytest.fail(f"no end after {timeout} s: {error.cmd}\n{error.output!r}\n{error.stderr!r}")

    def ask(self, *words: object) -> str:
        """What a command prints that has to succeed."""
        done = self.run(*words, timeout=30)
        assert done.returncode == 0, (words, done.stderr)
        return done.stdout.strip()

    def job(self, number: str) -> dict[str, str]:
        text = self.ask("scontrol", "--oneliner", "show", "job", number)
        return dict(word.split("=", 1) for word in text.split() if "=" in word)


def until(done: Callable[[], object], limit_s: float = 60) -> None:
    end = time.monotonic() + limit_s
    while not done():
        assert time.monotonic() < end, f"not within {limit_s} s"
        time.sleep(0.1)


def _processes() -> list[tuple[int, str]]:
    found = []
    for folder in Path("/proc").glob("[0-9]*"):
        try:
            found.append((int(folder.name), (folder / "cmdline").read_bytes().decode(errors="replace")))
        except OSError:
            continue
    return found
