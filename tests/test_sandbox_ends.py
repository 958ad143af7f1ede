"""Sandboxes by the hundred: however they end, nothing is left of them, and nothing of one is seen in the next."""

from __future__ import annotations

import asyncio
import ctypes
import os
import random
import subprocess
import sys
import tempfile
import time
from collections import Counter
from pathlib import Path

import pytest

from hpcrl.config import SandboxPool
from hpcrl.sandbox.backend import find_backend, process_tree
from hpcrl.sandbox.pool import Pool

VICTIM = Path(__file__).with_name("sandbox_victim.py")
PR_SET_CHILD_SUBREAPER = 36
ROUNDS, EACH = 10, 50
TESTBED = "/hp0"  # how mounts and cgroups of a Slurm testbed are named, which may come and go beside this


@pytest.mark.timeout(600)
def test_five_hundred_that_end_in_every_way_leave_nothing(tmp_path: Path) -> None:
    ctypes.CDLL(None).prctl(PR_SET_CHILD_SUBREAPER, 1, 0, 0, 0)  # orphans become ours, so that we see them
    before, up = _traces(), 0
    for seed in range(ROUNDS):
        luck = random.Random(seed)
        command = [sys.executable, str(VICTIM), str(seed), str(EACH)]
        victim = subprocess.Popen(command, stdout=subprocess.PIPE, env={**os.environ, "TMPDIR": str(tmp_path)})
        assert victim.stdout
        until = luck.choice((EACH // 2, EACH + 1))  # killed in the midst of it, or when all have ended
        for line in victim.stdout:
            up += line == b"up\n"
            until -= 1
            if until <= 0:
                break
        time.sleep(luck.uniform(0, 0.05))
        victim.kill()
        victim.wait()
        victim.stdout.close()
    assert up > ROUNDS * EACH * 0.6
    deadline = time.monotonic() + 10
    while _traces() != before and time.monotonic() < deadline:
        _reap()
        time.sleep(0.05)
    assert _traces() == before
    assert not list(tmp_path.iterdir())
    ctypes.CDLL(None).prctl(PR_SET_CHILD_SUBREAPER, 0, 0, 0, 0)


def _traces() -> dict[str, object]:
    """What a sandbox could leave: processes, mounts, cgroups, System V memory, folders in the places for such."""
    return {
        "processes": len(process_tree(os.getpid())),
        "mounts": Counter(name for name in _mounts() if TESTBED not in name),
        "cgroups": Counter(str(path) for path in Path(_cgroup()).rglob("cgroup.procs") if TESTBED not in str(path)),
        "shared memory": len(Path("/proc/sysvipc/shm").read_text().splitlines()),
        "folders": {path.name for path in Path(tempfile.gettempdir()).glob("*bubblewrap*")},
    }


def _mounts() -> list[str]:
    return [line.split()[4] for line in Path("/proc/self/mountinfo").read_text().splitlines()]


def _cgroup() -> str:
    own = Path("/proc/self/cgroup").read_text().splitlines()[-1].rpartition(":")[2]
    return f"/sys/fs/cgroup{own}"


def _reap() -> None:
    for pid in process_tree(os.getpid())[1:]:
        try:
            os.waitpid(pid, os.WNOHANG)
        except ChildProcessError:
            continue


PLANT = """
import os, subprocess, sys
mark = sys.argv[1]
for place in ("/box", "/tmp", "/dev/shm"):
    os.makedirs(f"{place}/{mark}", exist_ok=True)
    open(f"{place}/{mark}/{mark}", "w").write(mark)
subprocess.Popen(["sleep", "1000"], env={"MARK": mark}, start_new_session=True)
"""
LOOK = """
import os, sys
found = set()
for root, folders, files in os.walk("/", onerror=None):
    if root.startswith(("/usr", "/sys", "/proc", "/lib", "/opt")):
        folders.clear(); continue
    for name in folders + files:
        found |= {name.partition(".")[0]} if name.startswith("mark-") else set()
    for path in (os.path.join(root, name) for name in files):
        try: text = open(path, errors="replace").read() if os.path.isfile(path) and not os.path.islink(path) else ""
        except OSError: continue
        found |= {word for word in text.split() if word.startswith("mark-")}
for pid in os.listdir("/proc"):
    for part in ("environ", "cmdline"):
        try: text = open(f"/proc/{pid}/{part}").read()
        except OSError: continue
        found |= {word.partition("=")[2] for word in text.split("\\0") if word.startswith("MARK=")}
print(*sorted(found))
"""


async def test_of_sixty_four_at_once_none_sees_a_trace_of_another() -> None:
    pool = Pool(SandboxPool(sessions=8, warm=8, memory_mib=128, disk_mib=4), await asyncio.to_thread(find_backend))

    async def one(number: int) -> None:
        mark = f"mark-{number}"
        lease = await pool.acquire(mark, 1)
        assert (await lease.run(["python3", "-c", LOOK])).stdout.split() == []
        assert (await lease.run(["python3", "-c", PLANT, mark])).code == 0
        await lease.write({f"{mark}.txt": mark.encode()})
        assert (await lease.run(["python3", "-c", LOOK])).stdout.split() == [mark.encode()]
        assert await lease.read(f"{mark}/{mark}") == mark.encode()
        await pool.release(mark)

    await asyncio.gather(*map(one, range(64)))
    stats = pool.stats()
    assert stats.reused >= 50 and stats.replaced == 0
    await pool.close()
