"""Makes the n-th I/O call under a folder fail, or kill or stop the process: what disks do at the worst moment.

    with Io(folder, FAULTS["ENOSPC, from then on"], at=3) as io:   # the third call that writes, and all after it
        ...
    io.fired                                                       # whether it came so far

The calls of `os` and of `open` are wrapped in this process; what C code does by itself is not seen here (h5_faults.c).
"""

from __future__ import annotations

import builtins
import contextlib
import errno
import io
import os
import signal
import threading
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

WRITES = frozenset({"create", "write", "truncate", "rename", "unlink"})
SYNCS = frozenset({"sync"})
CLOSES = frozenset({"close"})
READS = frozenset({"open", "read", "stat", "list"})
CHANGES = WRITES | SYNCS | CLOSES  # every call that can fail where something is written


@dataclass(frozen=True)
class Fault:
    """What the n-th call of these kinds meets: an `errno`, or (0) something that `does` names."""

    kinds: frozenset[str]
    errno: int = 0
    does: str = "fail"  # or "short", "lose", "kill", "stop"
    lasts: bool = False  # every such call from then on, not that one alone


FAULTS: Mapping[str, Fault] = {
    # A full disk refuses what needs room; deleting works. Quotas of network filesystems are told at sync and close.
    "ENOSPC once": Fault(CHANGES - {"unlink"}, errno.ENOSPC),
    "ENOSPC from then on": Fault(frozenset({"create", "write", "sync"}), errno.ENOSPC, lasts=True),
    "EDQUOT once": Fault(CHANGES - {"unlink"}, errno.EDQUOT),
    "EDQUOT from then on": Fault(frozenset({"create", "write", "close"}), errno.EDQUOT, lasts=True),
    "EIO once": Fault(CHANGES | READS, errno.EIO),
    "EIO from then on": Fault(CHANGES | READS, errno.EIO, lasts=True),
    "EROFS from then on": Fault(WRITES | SYNCS, errno.EROFS, lasts=True),
    "ESTALE once": Fault(CHANGES | READS, errno.ESTALE),
    # The kernel tells of a lost write once, and calls the pages clean from then on.
    "a lost write": Fault(SYNCS, errno.EIO, does="lose"),
    "a lost page": Fault(SYNCS, errno.EIO, does="lose page"),
    "a short write": Fault(frozenset({"write"}), does="short"),
    "short writes from then on": Fault(frozenset({"write"}), does="short", lasts=True),
    "a short write, then ENOSPC": Fault(frozenset({"write"}), errno.ENOSPC, does="short", lasts=True),
}
KILL = Fault(CHANGES | READS, does="kill")
STOP = Fault(CHANGES | READS, does="stop")
STALE_READ = Fault(READS - {"stat"}, errno.ESTALE)
STALE_STAT = Fault(frozenset({"stat"}), errno.ESTALE)


class Io:
    """Counts this process's calls on files under `root`; the `at`-th of the fault's kinds meets it."""

    def __init__(self, root: Path, fault: Fault, at: int) -> None:
        self._root, self._fault, self._at = os.fspath(root), fault, at
        self._lock = threading.Lock()
        self._synced: dict[int, int] = {}  # inode -> bytes that a sync has confirmed
        for path in root.rglob("*"):
            with contextlib.suppress(FileNotFoundError):
                info = path.stat()
                self._synced[info.st_ino] = info.st_size  # what is here already counts as synced
        self.count = 0
        self.calls: list[str] = []  # those that met the fault

    def synced_bytes(self, path: Path) -> int:
        """How much of a file a sync has confirmed in this process, or was there before."""
        return self._synced.get(path.stat().st_ino, 0)

    @property
    def fired(self) -> bool:
        return bool(self.calls)

    def __enter__(self) -> Io:
        real = self._real = {name: getattr(os, name) for name in _WRAPPED} | {"io.open": io.open}
        for name, wrap in _WRAPPED.items():
            setattr(os, name, wrap(self, real[name]))
        io.open = builtins.open = self._open_file
        return self

    def __exit__(self, *_: object) -> None:
        builtins.open = io.open = self._real.pop("io.open")
        for name, call in self._real.items():
            setattr(os, name, call)

    # ---- deciding

    def _ours(self, path: Any) -> bool:
        if isinstance(path, int):
            try:
                path = self._real["readlink"](f"/proc/self/fd/{path}")
            except OSError:
                return False
        try:
            return os.fsdecode(path).startswith(self._root)
        except TypeError:
            return False

    def meets(self, kind: str, path: Any) -> bool:
        """Whether this call meets the fault."""
        if kind not in self._fault.kinds or not self._ours(path):
            return False
        with self._lock:
            self.count += 1
            met = self.count == self._at or (self.count > self._at and self._fault.lasts)
            if met:
                self.calls.append(kind)
        return met

    def act(self, path: Any, *, short: Callable[[], int] | None = None, fd: int = -1) -> int:
        """Let the fault happen; returns (what `short` did) only where the call then goes on."""
        match self._fault.does:
            case "kill":
                if short is not None:
                    short()
                os.kill(os.getpid(), signal.SIGKILL)
                threading.Event().wait()  # this thread does nothing more
            case "stop":
                os.kill(os.getpid(), signal.SIGSTOP)
                return -1
            case "short":
                if short is not None and (not self._fault.errno or len(self.calls) == 1):
                    return short()
            case "lose" | "lose page":
                self._lose(fd, 4096 if self._fault.does == "lose page" else None)
        number = self._fault.errno
        raise OSError(number, f"{os.strerror(number)} (injected)", None if isinstance(path, int) else os.fspath(path))

    def _lose(self, fd: int, size: int | None) -> None:
        """Zeros where the file has what no sync confirmed, or in the first `size` bytes of that."""
        info = self._real["fstat"](fd)
        start = self._synced.get(info.st_ino, 0)
        if fd >= 0 and info.st_size > start and not os.path.isdir(f"/proc/self/fd/{fd}"):  # noqa: PTH112
            stop = min(info.st_size, start + size) if size else info.st_size
            own = self._real["open"](f"/proc/self/fd/{fd}", os.O_WRONLY)
            self._real["pwrite"](own, bytes(stop - start), start)
            self._real["close"](own)

    def synced(self, fd: int) -> None:
        info = self._real["fstat"](fd)
        self._synced[info.st_ino] = info.st_size

    # ---- files of `open`

    def _open_file(self, file: Any, mode: str = "r", buffering: int = -1, *args: Any, **options: Any) -> Any:
        if not self._ours(file) or not set(mode) <= set("rwab+t"):
            return self._real["io.open"](file, mode, buffering, *args, **options)
        writing = bool(set(mode) & set("wa"))
        if not isinstance(file, int) and self.meets("create" if writing else "open", file):
            self.act(file)
        raw = _Raw(self, file, mode.replace("b", "").replace("t", ""), closefd=options.pop("closefd", True))
        kind = io.BufferedRandom if "+" in mode else io.BufferedWriter if writing else io.BufferedReader
        return kind(raw) if "b" in mode else io.TextIOWrapper(kind(raw), *args, **options)


class _Raw(io.FileIO):
    def __init__(self, faults: Io, file: Any, mode: str, closefd: bool) -> None:
        super().__init__(file, mode, closefd)
        self._faults = faults

    def readinto(self, buffer: Any) -> int | None:
        if self._faults.meets("read", self.fileno()):
            self._faults.act(self.fileno())
        return super().readinto(buffer)

    def readall(self) -> bytes:
        if self._faults.meets("read", self.fileno()):
            self._faults.act(self.fileno())
        return super().readall()

    def write(self, data: Any) -> int | None:
        if self._faults.meets("write", self.fileno()):
            half = memoryview(data)[: (len(data) + 1) // 2]
            done = self._faults.act(self.fileno(), short=lambda: super(_Raw, self).write(half) or 0)
            if done >= 0:
                return done
        return super().write(data)

    def close(self) -> None:
        met = not self.closed and self.writable() and self._faults.meets("close", self.fileno())
        name = self.name
        super().close()
        if met:
            self._faults.act(name)


# ---- the wrappers: each gets the Io and the real call


def _open(io_: Io, real: Any) -> Any:
    def call(path: Any, flags: int, *args: Any, **options: Any) -> int:
        if io_.meets("create" if flags & (os.O_WRONLY | os.O_RDWR | os.O_CREAT) else "open", path):
            io_.act(path)
        return int(real(path, flags, *args, **options))

    return call


def _write(io_: Io, real: Any) -> Any:
    def call(fd: int, data: Any, *place: int) -> int:
        if io_.meets("write", fd):
            whole = memoryview(b"".join(data) if isinstance(data, list | tuple) else data)
            half = whole[: (len(whole) + 1) // 2]
            short = io_._real["pwrite" if place else "write"]
            done = io_.act(fd, short=lambda: short(fd, half, *place))
            if done >= 0:
                return done
        return int(real(fd, data, *place))

    return call


def _sync(io_: Io, real: Any) -> Any:
    def call(fd: int) -> None:
        if io_.meets("sync", fd):
            io_.act(fd, fd=fd)
        real(fd)
        io_.synced(fd)

    return call


def _close(io_: Io, real: Any) -> Any:
    def call(fd: int) -> None:
        met = io_.meets("close", fd)
        real(fd)  # as Linux does it: it may fail, and is closed all the same
        if met:
            io_.act(fd)

    return call


def _by(kind: str) -> Callable[[Io, Any], Any]:
    """For calls whose first argument is a path or a descriptor."""

    def wrap(io_: Io, real: Any) -> Any:
        def call(*args: Any, **options: Any) -> Any:
            if args and io_.meets(kind, args[0]):
                io_.act(args[0])
            return real(*args, **options)

        return call

    return wrap


_WRAPPED: Mapping[str, Callable[[Io, Any], Any]] = {
    "open": _open,
    "write": _write,
    "writev": _write,
    "pwrite": _write,
    "pwritev": _write,
    "fsync": _sync,
    "fdatasync": _sync,
    "close": _close,
    "rename": _by("rename"),
    "replace": _by("rename"),
    "unlink": _by("unlink"),
    "ftruncate": _by("truncate"),
    "pread": _by("read"),
    "stat": _by("stat"),
    "fstat": _by(""),
    "readlink": _by(""),
    "listdir": _by("list"),
    "scandir": _by("list"),
}
