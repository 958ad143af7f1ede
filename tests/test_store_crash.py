"""Crashes of whole processes: killed, without power, stopped. The crash test is tried here on broken stores, too."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

HERE = Path(__file__).parent
ENVIRONMENT = {**os.environ, "PYTHONPATH": os.pathsep.join([str(HERE.parent), str(HERE)])}


def scratch(tmp_path: Path) -> Path:
    """Memory if there is any: a process that is killed loses no more there, and a disk is slow."""
    return Path("/dev/shm") if os.access("/dev/shm", os.W_OK) else tmp_path


def crash(tmp_path: Path, *arguments: str | int) -> tuple[int, dict[str, int], str]:
    """Run the crash test: its exit code, its totals, all that it said."""
    command = [sys.executable, HERE / "crash.py", "--scratch", scratch(tmp_path), *map(str, arguments)]
    done = subprocess.run(command, env=ENVIRONMENT, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)
    last = done.stdout.rstrip().rpartition("\n")[2]
    totals = {name.strip(): int(count) for count, name in re.findall(r"(\d+) ([a-z ]+)", last)}
    assert "acknowledged" in totals, done.stdout[-3000:]
    return done.returncode, totals, done.stdout


def test_nothing_acknowledged_is_lost(tmp_path: Path) -> None:
    """A short form of `make crash-test`, after the rounds that failed once."""
    code, totals, said = crash(tmp_path, "--old", "--kills", 30, "--cuts", 8, "--flips", 30, "--limit-s", 40)
    print(said[-1500:])
    assert code == 0, said[-3000:]
    assert totals["kills"] >= 10 and totals["acknowledged"] > 100 and totals["files"] > 20
    bad = ("lost", "wrong", "unreadable", "duplicates", "broken chains", "errors")
    assert [totals[name] for name in bad] == [0] * len(bad)


@pytest.mark.parametrize(
    ("without", "arguments", "seen_as"),
    [
        ("sync", ("--cuts", 24), "lost"),
        ("chain", ("--kills", 20), "broken chains"),
        ("crc", ("--kills", 10, "--flips", 10), "wrong"),
    ],
)
def test_the_crash_test_fails_on_a_store_without(
    without: str, arguments: tuple[str | int, ...], seen_as: str, tmp_path: Path
) -> None:
    code, totals, said = crash(tmp_path, "--seed", 1, "--without", without, *arguments)
    if "NO POWER IS CUT HERE" in said:
        pytest.skip(said.splitlines()[0] + "; as root, where loop devices are, it can")
    assert code == 1 and totals[seen_as] > 0, said[-3000:]


@pytest.mark.parametrize(
    ("what", "how", "least"),
    [
        *(("owner", "stop", 50), ("compactor", "stop", 80), ("taker", "stop", 30)),
        *(("owner", "kill", 50), ("compactor", "kill", 80), ("taker", "kill", 30)),
        pytest.param("sleeper", "stop", 80, marks=pytest.mark.slow),
    ],
)
def test_who_is_stopped_anywhere_does_no_harm(what: str, how: str, least: int, tmp_path: Path) -> None:
    """SIGSTOP before each I/O call in turn, others take over, SIGCONT; or SIGKILL, half of a write done."""
    folder = scratch(tmp_path) / f"hpcrl-stopped-{os.getpid()}-{what}"
    done = subprocess.run(
        [sys.executable, HERE / "stopped.py", folder, what, how], env=ENVIRONMENT, capture_output=True, text=True
    )
    subprocess.run(["rm", "-rf", folder], check=True)
    assert done.returncode == 0, done.stderr[-3000:]
    print(done.stdout)
    found = re.search(r"at (\d+) calls; (\d+) orphans", done.stdout)
    assert found is not None and int(found[1]) >= least
    # What a stopped owner appended when it went on is kept, and counted.
    assert (int(found[2]) > 100) == (what == "owner" and how == "stop")
