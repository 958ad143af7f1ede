"""The watchdog: one thread that looks at the sandboxes with a running command and ends what uses too much.

It runs outside the sandboxes, where their commands can't starve or stop it. Memory has no limit per sandbox that an
ordinary user could set without a cgroup (rlimits are per process), so the sum over its processes is measured. Idle
sandboxes cost nothing. At the limit the command is killed; at twice the limit, or when that had no effect, the sandbox.

A look costs 50 us, so at many sandboxes there is one a second at each instead of ten. In between one number tells
whether any can have grown: the memory of this machine that is in use.
"""

from __future__ import annotations

import asyncio
import contextlib
import ctypes
import errno
import fcntl
import os
import select
import socket
import stat
import struct
import termios
import threading
import time
from pathlib import Path
from typing import Protocol

from hpcrl.sandbox.backend import Limits, process_tree, read_proc

INTERVAL_S = 0.1
LOOKS_PER_S = 250.0  # at single sandboxes, unless memory grows
PATIENCE = 10  # looks after which a command that outlived its kill costs the sandbox
USUAL_FILES = 4  # that a process has open
FEW_FILES = 8  # open besides, of all processes: so few may be sockets whose buffers nobody looks at (some MiB each)
MAX_LOOKS = 2048  # at files of one sandbox at a time (some 10 µs each); of the others each counts as
UNSEEN_BYTES = 64 << 10
MAX_FILES = 1024  # of one process (the runner's limit)
_PAGE = os.sysconf("SC_PAGESIZE")
_PIDFD_GETFD = 438
_SO_MEMINFO = 55
_libc = ctypes.CDLL(None, use_errno=True)


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
        looked, lowest = 0.0, 0  # when at all; the machine's memory since then
        while not self._closed:
            self._wake.wait()
            pause.wait(INTERVAL_S)
            if not self._running:
                self._wake.clear()
                if self._running and not self._closed:
                    self._wake.set()  # one entered in between
                continue
            running, used, now = list(self._running.items()), machine_bytes(), time.monotonic()
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


def machine_bytes() -> int:
    """Memory of the machine that isn't free and can't be had back: all but caches."""
    text = read_proc("/proc/meminfo")
    total, shared, *caches = (
        _kib(text, name) << 10
        for name in (b"MemTotal:", b"Shmem:", b"MemFree:", b"Buffers:", b"\nCached:", b"SReclaimable:")
    )
    return total + shared - sum(caches)  # what is shared counts as cached there


def memory_bytes(pids: list[int], enough: int) -> int:
    """Memory of these processes together: pages, page tables, and what the kernel holds in their sockets and pipes.

    The less sure it is to stay within `enough`, the more exact: all that is mapped, where that is less than half of it;
    else of the pages the sum of RSS, which counts a shared page once per process; else that of PSS, which counts its
    share, and costs the kernel far more.
    """
    many_files = sum(max(0, _num_files(pid) - USUAL_FILES) for pid in pids[2:]) > FEW_FILES  # less bwrap and the runner
    mapped = sum(_mapped_bytes(pid) for pid in pids)
    if mapped <= enough // 2 and not many_files:
        return mapped  # nor can its page tables be much: the usual case, to be told at little cost
    sizes = [_sizes(pid) for pid in pids]
    rss, others = sum(size[0] for size in sizes), sum(size[1] for size in sizes)
    if many_files:
        others += buffered_bytes(pids[2:])
    if rss + others <= enough:
        return rss + others
    return others + sum(_pss_bytes(pid, rss) for pid, (rss, _) in zip(pids, sizes, strict=True))


def _mapped_bytes(pid: int) -> int:
    try:
        return int(read_proc(f"/proc/{pid}/statm").split()[0]) * _PAGE
    except (OSError, IndexError):
        return 0


def _sizes(pid: int) -> tuple[int, int]:
    """(RSS, bytes that belong to it and are no resident page: page tables, swap)"""
    try:
        text = read_proc(f"/proc/{pid}/status")
    except OSError:
        return 0, 0
    rss, tables, swap = (_kib(text, name) * 1024 for name in (b"VmRSS:", b"VmPTE:", b"VmSwap:"))
    return rss, tables + swap


def _kib(text: bytes, name: bytes) -> int:
    start = text.find(name)
    return int(text[start + len(name) : text.index(b"kB", start)]) if start >= 0 else 0


def _num_files(pid: int) -> int:
    try:
        return os.stat(f"/proc/{pid}/fd").st_size or len(os.listdir(f"/proc/{pid}/fd"))  # noqa: PTH116, PTH208
    except OSError:  # (the size is there since Linux 6.2)
        return 0


def buffered_bytes(pids: list[int]) -> int:
    """What the kernel holds for these processes in sockets and pipes; it takes each for a moment to ask it.

    So many that this would take long count without a look. Not seen: what a socket has received, as a datagram, from
    one that was closed.
    """
    total, looks, seen = 0, 0, set()
    for pid in pids:
        try:
            pidfd = os.pidfd_open(pid)
        except OSError:
            continue
        try:
            numbers = [int(name) for name in os.listdir(f"/proc/{pid}/fd")]  # noqa: PTH208
        except OSError:
            numbers = list(range(MAX_FILES))  # it hides them, for it made itself undumpable
        total += UNSEEN_BYTES * max(0, looks + len(numbers) - MAX_LOOKS)
        for number in numbers[: max(0, MAX_LOOKS - looks)]:
            looks += 1
            fd = _libc.syscall(_PIDFD_GETFD, pidfd, number, 0)
            if fd < 0:
                total += UNSEEN_BYTES * (ctypes.get_errno() == errno.EPERM)
                continue
            info = os.fstat(fd)
            if (info.st_dev, info.st_ino) not in seen:
                seen.add((info.st_dev, info.st_ino))
                with contextlib.suppress(OSError):
                    total += _buffered(fd, info.st_mode)
            os.close(fd)
        os.close(pidfd)
    return total


def _buffered(fd: int, mode: int) -> int:
    if stat.S_ISFIFO(mode):
        return int(fcntl.fcntl(fd, fcntl.F_GETPIPE_SZ)) if _waiting(fd) else 0
    if not stat.S_ISSOCK(mode):
        return 0
    with socket.socket(fileno=os.dup(fd)) as door:
        words = struct.unpack("=9I", door.getsockopt(socket.SOL_SOCKET, _SO_MEMINFO, 36))
    received, _, sent, _, ahead, queued, options, backlog, _ = words
    poll = select.poll()
    poll.register(fd, select.POLLRDHUP)
    if poll.poll(0):  # a Unix socket's data counts as its sender's, and when that was closed, as nobody's
        received = max(received, _waiting(fd))
    return int(received + max(sent, queued) + ahead + options + backlog)


def _waiting(fd: int) -> int:
    return int.from_bytes(fcntl.ioctl(fd, termios.FIONREAD, bytes(4)), "little")


def _pss_bytes(pid: int, rss: int) -> int:
    try:
        for line in Path(f"/proc/{pid}/smaps_rollup").read_text().splitlines():
            if line.startswith("Pss:"):
                return int(line.split()[1]) * 1024
    except OSError:
        pass
    return rss  # the runner can't be read; older kernels have no rollup
