"""The watchdog: one thread that looks at the sandboxes with a running command and ends what uses too much.

It runs outside the sandboxes, where their commands can't starve or stop it. Memory has no limit per sandbox that an
ordinary user could set without a cgroup (rlimits are per process), so the sum over its processes is measured. Idle
sandboxes cost nothing. At the limit the command is killed; at twice the limit, or when that had no effect, the sandbox.

A look costs 50 us, so at many sandboxes there is one a second at each instead of ten. In between one number tells
whether any can have grown: the memory of all this machine's processes together.
"""

from __future__ import annotations

import asyncio
import os
import threading
import time
from pathlib import Path
from typing import Protocol

from hpcrl.sandbox.backend import Limits, process_tree, read_proc

INTERVAL_S = 0.1
LOOKS_PER_S = 250.0  # at single sandboxes, unless memory grows
PATIENCE = 10  # looks after which a command that outlived its kill costs the sandbox
_PAGE = os.sysconf("SC_PAGESIZE")


class Watched(Protocol):
    limits: Limits

    @property
    def pid(self) -> int: ...

    def kill(self, why: str) -> None: ...

    def _end(self, why: str) -> None: ...


class Watch:
    """`enter` when a command starts, `leave` when it ended; both on the loop that owns the session."""

    def __init__(self) -> None:
        self._running: dict[Watched, asyncio.AbstractEventLoop] = {}
        self._over: dict[Watched, int] = {}
        self._wake = threading.Event()
        self._closed = False
        self._thread = threading.Thread(target=self._loop, name="sandbox-watch", daemon=True)
        self._thread.start()

    def enter(self, session: Watched) -> None:
        self._running[session] = asyncio.get_running_loop()
        if not self._wake.is_set():
            self._wake.set()

    def leave(self, session: Watched) -> None:
        self._running.pop(session, None)
        self._over.pop(session, None)

    @property
    def thread_id(self) -> int:
        return self._thread.native_id or 0

    def close(self) -> None:
        self._closed = True
        self._wake.set()
        self._thread.join()

    def _loop(self) -> None:
        pause = threading.Event()
        looked, lowest = 0.0, 0  # when at all; the memory of the machine's processes since then
        while not self._closed:
            self._wake.wait()
            pause.wait(INTERVAL_S)
            if not self._running:
                self._wake.clear()
                if self._running and not self._closed:
                    self._wake.set()  # one entered in between
                continue
            running, used, now = list(self._running.items()), processes_bytes(), time.monotonic()
            lowest = min(lowest, used)
            grown = used - lowest > min(session.limits.memory_bytes for session, _ in running) // 4
            if grown or now - looked >= len(running) / LOOKS_PER_S:
                looked, lowest = now, used
                for session, loop in running:
                    self._look(session, loop)

    def _look(self, session: Watched, loop: asyncio.AbstractEventLoop) -> None:
        limits, tree = session.limits, process_tree(session.pid)
        num_commands = len(tree) - 2  # less bwrap and the runner
        used = memory_bytes(tree, limits.memory_bytes)
        why = "memory" if used > limits.memory_bytes else "processes" if num_commands >= limits.processes else ""
        if not why:
            self._over.pop(session, None)
            return
        times = self._over[session] = self._over.get(session, 0) + 1
        try:
            if used > 2 * limits.memory_bytes or times > PATIENCE:
                loop.call_soon_threadsafe(session._end, f"used too much ({why}), and a kill did not help")
            elif why == "memory" or times > 1:  # a program may stand at its full count for a moment
                loop.call_soon_threadsafe(session.kill, why)
        except RuntimeError:
            self.leave(session)  # its loop is closed


def processes_bytes() -> int:
    """Memory that belongs to the machine's processes, shared segments and tmpfs files included, the page cache not."""
    rows = dict(line.split(b":", 1) for line in read_proc("/proc/meminfo").splitlines())
    return sum(int(rows[name].split()[0]) << 10 for name in (b"AnonPages", b"Shmem"))


def memory_bytes(pids: list[int], enough: int) -> int:
    """Memory of these processes together: the sum of RSS where that stays within `enough`, else of PSS.

    RSS counts a shared page once per process, PSS its share; PSS costs the kernel far more.
    """
    rss = sum(_rss_bytes(pid) for pid in pids)
    return rss if rss <= enough else sum(_pss_bytes(pid) for pid in pids)


def _rss_bytes(pid: int) -> int:
    try:
        return int(read_proc(f"/proc/{pid}/statm").split()[1]) * _PAGE
    except (OSError, IndexError):
        return 0


def _pss_bytes(pid: int) -> int:
    try:
        for line in Path(f"/proc/{pid}/smaps_rollup").read_text().splitlines():
            if line.startswith("Pss:"):
                return int(line.split()[1]) * 1024
    except OSError:
        pass
    return _rss_bytes(pid)  # the runner can't be read; older kernels have no rollup
