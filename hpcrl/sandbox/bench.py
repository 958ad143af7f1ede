"""`hpcrl bench sandbox`: what a sandbox costs on this machine. Medians; beside each, in turns, what has no sandbox.

Sandboxes and commands are real ones of the backend that the probe found; nothing is left behind.
"""

from __future__ import annotations

import asyncio
import statistics
import subprocess
import time
from collections.abc import Awaitable, Callable
from functools import partial
from pathlib import Path

from hpcrl.config import SandboxPool
from hpcrl.sandbox.backend import find_backend, process_tree
from hpcrl.sandbox.pool import Lease, Pool
from hpcrl.sandbox.watch import memory_bytes

COMMAND = ["/usr/bin/true"]
STARTS, COMMANDS = 20, 200
MANY, WATCHED = 64, 256  # sandboxes
LONG_S = 5.0  # that what counts by time is counted for


def run_bench(say: Callable[[str], None] = lambda text: None) -> dict[str, float]:
    """Needs about a minute and 3 GiB of memory. Raises SandboxError where no sandbox can be made.

    session_start_ms_cold, session_start_ms_warm    one for a trajectory, from an empty pool; a warm one
    command_ms, bare_ms, command_vs_bare            `true` in a sandbox; by `subprocess.run`; the first by the second
    commands_per_s                                  of `true`, by 64 sandboxes at once
    sessions_per_gib                                idle ones, by the memory that is their share (PSS)
    watchdog_cpu                                    of one core, with a command under way in each of 256 sandboxes
    """
    return asyncio.run(_run(say))


async def _run(say: Callable[[str], None]) -> dict[str, float]:
    found = {}
    say("starts and commands")
    pool = await _pool(sessions=STARTS, warm=0)
    cold = [await _timed_ms(partial(pool.acquire, f"t{number}", 1)) for number in range(STARTS)]
    lease = pool.lease("t0", 1)
    commands, bare = [], []
    for _ in range(COMMANDS):
        commands.append(await _timed_ms(partial(lease.run, COMMAND)))
        bare.append(_bare_ms())
    await pool.close()

    pool = await _pool(sessions=4 * STARTS, warm=STARTS)
    await pool.warm()
    warm = []
    for number in range(STARTS):
        warm.append(await _timed_ms(partial(pool.acquire, f"t{number}", 1)))
        await pool.warm()
    await pool.close()
    found["session_start_ms_cold"] = statistics.median(cold)
    found["session_start_ms_warm"] = statistics.median(warm)
    found["command_ms"] = statistics.median(commands)
    found["bare_ms"] = statistics.median(bare)
    found["command_vs_bare"] = found["command_ms"] / found["bare_ms"]

    say(f"{MANY} sandboxes at once")
    pool = await _pool(sessions=WATCHED, warm=0)
    leases = [await pool.acquire(f"t{number}", 1) for number in range(MANY)]
    pids = [pid for lease in leases for pid in process_tree(lease.pid)]
    found["sessions_per_gib"] = MANY * (1 << 30) / memory_bytes(pids, 0)
    found["commands_per_s"] = await _commands_per_s(leases)

    say(f"{WATCHED} sandboxes with a long command")
    leases += [await pool.acquire(f"t{number}", 1) for number in range(MANY, WATCHED)]
    found["watchdog_cpu"] = await _watchdog_cpu(pool, leases)
    await pool.close()
    return found


async def _pool(*, sessions: int, warm: int) -> Pool:
    config = SandboxPool(sessions=sessions, warm=warm)
    return Pool(config, await asyncio.to_thread(find_backend))


async def _timed_ms(work: Callable[[], Awaitable[object]]) -> float:
    began = time.perf_counter()
    await work()
    return 1000 * (time.perf_counter() - began)


def _bare_ms() -> float:
    began = time.perf_counter()
    subprocess.run(COMMAND, check=True, capture_output=True)
    return 1000 * (time.perf_counter() - began)


async def _commands_per_s(leases: list[Lease]) -> float:
    until, began, count = time.monotonic() + LONG_S, time.monotonic(), 0

    async def work(lease: Lease) -> None:
        nonlocal count
        while time.monotonic() < until:
            await lease.run(COMMAND)
            count += 1

    await asyncio.gather(*map(work, leases))
    return count / (time.monotonic() - began)


async def _watchdog_cpu(pool: Pool, leases: list[Lease]) -> float:
    calls = [asyncio.create_task(lease.run(["sleep", "60"], timeout_s=60)) for lease in leases]
    await asyncio.sleep(2)  # all are under way
    began, used = time.monotonic(), _cpu_s(pool.watch_thread)
    await asyncio.sleep(LONG_S)
    share = (_cpu_s(pool.watch_thread) - used) / (time.monotonic() - began)
    for call in calls:
        call.cancel()
    await asyncio.gather(*calls, return_exceptions=True)
    return share


def _cpu_s(thread: int) -> float:
    return int(Path(f"/proc/self/task/{thread}/schedstat").read_text().split()[0]) / 1e9
