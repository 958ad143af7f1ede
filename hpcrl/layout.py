"""Every path in a run folder, and the ways to put a file there so that it survives a crash.

Owns names, listing and durability of files; knows nothing of what is in them. Over 400 lines, since each of these has
one place.
"""

from __future__ import annotations

import contextlib
import errno
import fnmatch
import json
import logging
import os
import shutil
import socket
import stat
import subprocess
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeVar

from hpcrl.types import StoreError, is_number

logger = logging.getLogger(__name__)

_T = TypeVar("_T")
_IOV_MAX = 1000  # of writev(2): 1024
_STRIPES = (("64M", 1), ("1G", 4), ("-1", 8))  # a file's bytes up to here -> OSTs
_QUIET: Any = {"capture_output": True, "text": True, "timeout": 60, "stdin": subprocess.DEVNULL}


class _Under:
    """A path in a run folder, as an attribute of RunPaths."""

    def __init__(self, *parts: str) -> None:
        self._parts = parts

    def __get__(self, paths: RunPaths, _: type[RunPaths]) -> Path:
        return paths.root.joinpath(*self._parts)


@dataclass(frozen=True, slots=True)
class RunPaths:
    """A run folder. Each name below is spelled here and nowhere else."""

    root: Path

    config = _Under("config.json")
    model = _Under("model")
    jobs = _Under("jobs.jsonl")
    logs = _Under("logs")
    submitit = _Under("logs", "submitit")
    control = _Under("control")
    scheduler = _Under("control", "scheduler.json")  # address of the Dask scheduler, with control's incarnation
    heartbeat = _Under("control", "status.json")  # what control last knew of the run, rewritten every few seconds
    tls = _Under("control", "tls")
    inbox = _Under("control", "inbox")
    excluded = _Under("control", "excluded.json")  # nodes on which jobs failed again and again
    stopped = _Under("control", "stopped.json")  # written by control when the run came to rest: its outcome
    reserve = _Under("control", "reserve")  # space kept aside; given back when the disk is full, to write the end down
    log = _Under("log")
    damaged_log = _Under("log", "damaged")
    shards = _Under("shards")
    damaged_shards = _Under("shards", "damaged")  # where `store repair` puts what it has rescued all from
    pruned = _Under("shards", "pruned.json")  # which shards `store prune` removed, and when
    ledger = _Under("ledger")
    progress = _Under("progress")
    weights = _Under("weights")
    current = _Under("weights", "CURRENT")
    checkpoints = _Under("checkpoints")
    evals = _Under("evals")
    plot = _Under("reward.png")
    usage = _Under("metrics", "usage")  # what each job's tasks have used, a file each

    @classmethod
    def of(cls, run: str | Path) -> RunPaths:
        """An existing run folder, by any path that leads to it."""
        root = Path(run).expanduser().resolve()
        paths = cls(root)
        if not by_name(paths.config.is_file):
            raise StoreError(f"{run}: not a run folder (it has no config.json)")
        return paths

    def version(self, version: int) -> Path:
        return self.weights / f"v{version:06d}"

    def checkpoint(self, update: int) -> Path:
        return self.checkpoints / f"update-{update:06d}"

    def checkpointed(self) -> list[int]:
        """The updates that there are checkpoints of, whole or damaged, the newest first."""
        names = [path.name.removeprefix("update-") for path in listed(self.checkpoints, "update-*", anew=True)]
        return sorted((int(name) for name in names if is_number(name)), reverse=True)

    def make(self) -> None:
        new = not self.log.exists()
        folders = (self.logs, self.submitit, self.control, self.inbox, self.log, self.shards, self.ledger)
        for folder in (*folders, self.progress, self.weights, self.checkpoints, self.evals, self.usage):
            folder.mkdir(parents=True, exist_ok=True)
        self.control.chmod(0o700)
        if new:
            stripe(self.log, self.shards, self.weights, self.checkpoints)

    def private(self) -> Path:
        """A folder on this node, for sockets and process files, that only this user can enter.

        Socket paths are limited to 107 bytes, so it lies in /tmp (TMPDIR may be long, and differ by job) under a
        short name made from the run folder's identity.
        """
        info = self.root.stat()
        folder = Path("/tmp") / f"hpcrl-{os.getuid()}-{info.st_dev:x}-{info.st_ino:x}"
        folder.mkdir(mode=0o700, exist_ok=True)
        check_private(folder)
        return folder

    def scratch_log(self, local_dir: str) -> Path:
        """A folder on this node's disk for a log of `store.durability = "local"`; it outlives the run's end there."""
        info = self.root.stat()
        return Path(local_dir) / f"hpcrl-{os.getuid()}-{info.st_dev:x}-{info.st_ino:x}-log"


def check_private(folder: Path) -> None:
    """Raises StoreError where a folder isn't this user's, or others may enter it: its name can be guessed."""
    info = folder.lstat()
    if not stat.S_ISDIR(info.st_mode) or info.st_uid != os.getuid() or info.st_mode & 0o077:
        raise StoreError(f"{folder}: must be a folder of this user's with mode 0700; remove it")


def node_name() -> str:
    """This node, by Slurm's name where Slurm runs us (its nodes may share a hostname), else the hostname."""
    return os.environ.get("SLURMD_NODENAME") or socket.gethostname().split(".")[0]


def boot_id() -> str:
    """Names this boot of this machine: monotonic times compare only within one."""
    return Path("/proc/sys/kernel/random/boot_id").read_text().strip()


@dataclass(frozen=True, slots=True)
class ProcessId:
    """A process, so that another can tell whether it still lives."""

    pid: int
    start: int  # clock ticks after boot at which it started: pids come back, this pair doesn't
    boot: str  # and its pid namespace: containers number their processes anew

    @classmethod
    def of(cls, pid: int) -> ProcessId:
        return cls(pid, _start_of(pid) or 0, _pid_space())

    @classmethod
    def me(cls) -> ProcessId:
        return cls.of(os.getpid())

    def lives(self) -> bool | None:
        """None when it ran on another machine, in another container or before a reboot: it can't be seen from here."""
        if self.boot != _pid_space():
            return None
        return _start_of(self.pid) == self.start


def _pid_space() -> str:
    return f"{boot_id()}/{Path('/proc/self/ns/pid').stat().st_ino}"


def _start_of(pid: int) -> int | None:
    """None when it is gone or a zombie."""
    try:
        fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    except OSError:
        return None
    return None if fields[0] in "ZX" else int(fields[19])


def by_name(call: Callable[..., _T], *args: Any) -> _T:
    """`call(*args)`, which finds a file by its name; again where a network filesystem says ESTALE: it says so once for
    a name that came to mean another file, and again where that happens several times a second."""
    for pause_s in (0.0, 0.05, 0.2, 0.8):
        try:
            return call(*args)
        except OSError as error:
            if error.errno != errno.ESTALE:
                raise
        time.sleep(pause_s)
    return call(*args)


def listed(folder: Path, pattern: str = "*", *, anew: bool = False) -> list[Path]:
    """What is in a folder, [] where there is none. Unlike `Path.glob` it raises OSError for one that can't be read: who
    takes that for an empty folder does harm.

    On a network filesystem it may be what this node saw a minute ago: lack files, have some that are gone. With `anew`
    it is what is there now, where we may write to the folder: a client that changes one (here its time) asks again.
    """
    return [folder / entry.name for entry in _entries(folder, anew) if fnmatch.fnmatch(entry.name, pattern)]


def numbered(folder: Path, suffix: str, *, named: bool = False, anew: bool = False) -> list[Path]:
    """`listed`, of the files that a folder is for: `<number><suffix>`, `named`: `<name>-<number><suffix>`.

    Only what is a regular file, by a name with a number in ASCII digits, is one of them. Whatever else has the suffix
    (a FIFO, a folder, a link that leads nowhere, "٣.h5") is never opened: a warning names it, once.
    """
    found = []
    for entry in _suffixed(folder, suffix, anew):
        if what := _stray(entry, suffix, named):
            warn_once(f"{folder / entry.name}: {what}; passed over")
        else:
            found.append(folder / entry.name)
    return found


def strays(folder: Path, suffix: str, *, named: bool = False) -> list[str]:
    """What `numbered` passes over, and why."""
    found = ((entry, _stray(entry, suffix, named)) for entry in _suffixed(folder, suffix, True))
    return [f"{folder / entry.name}: {what}" for entry, what in found if what]


def _stray(entry: os.DirEntry[str], suffix: str, named: bool) -> str:
    """Why it is none of the folder's files; "" where it is one."""
    before, dash, number = entry.name.removesuffix(suffix).rpartition("-")
    if not is_number(number) or bool(before if named else dash) != named:
        return f"is not named as a file of this folder ({'<name>-' * named}<number>{suffix})"
    # Of what a network filesystem lists and no longer has, nothing is known: who opens it finds out.
    if not entry.is_file() and (entry.is_symlink() or os.path.lexists(entry.path)):
        return "is no regular file, though it is named as one"
    return ""


def _suffixed(folder: Path, suffix: str, anew: bool) -> list[os.DirEntry[str]]:
    return [entry for entry in _entries(folder, anew) if entry.name.endswith(suffix)]


def _entries(folder: Path, anew: bool) -> list[os.DirEntry[str]]:
    if anew:
        with contextlib.suppress(OSError):
            os.utime(folder)
    try:
        return by_name(_scan, folder)
    except FileNotFoundError:
        return []


def _scan(folder: Path) -> list[os.DirEntry[str]]:
    with os.scandir(folder) as entries:
        return list(entries)


_warned: set[str] = set()


def warn_once(text: str) -> None:
    if text not in _warned:
        _warned.add(text)
        logger.warning("%s", text)


def stripe(*folders: Path) -> None:
    """On Lustre: the larger a file that is made below `folders`, the more OSTs it is spread over. Elsewhere nothing.

    1 up to 64 MiB, 4 up to 1 GiB, 8 above, never more than there are. What fails is a warning: slower, not wrong.
    """
    if shutil.which("lfs") is None:
        return
    try:
        if subprocess.run(["lfs", "getstripe", "-d", folders[0]], **_QUIET).returncode:
            return
        listing = subprocess.run(["lfs", "osts", folders[0]], check=True, **_QUIET).stdout
        num_osts = sum("_UUID" in line and "INACTIVE" not in line for line in listing.splitlines())
        counts = [part for end, most in _STRIPES for part in ("-E", end, "-c", str(max(1, min(most, num_osts))))]
        for folder in folders:
            subprocess.run(["lfs", "setstripe", *counts, folder], check=True, **_QUIET)
    except (subprocess.CalledProcessError, subprocess.TimeoutExpired) as error:
        command = " ".join(map(str, error.cmd))
        logger.warning("no stripes set: `%s`: %s", command, str(error.stderr or error).strip())


def sync_folder(folder: Path) -> None:
    """Make the entries of `folder` (creations, renames, unlinks) durable."""
    fd = by_name(os.open, folder, os.O_RDONLY | os.O_DIRECTORY)
    try:
        os.fsync(fd)
    finally:
        os.close(fd)


def sync_file(path: Path) -> None:
    """Make what anybody wrote to a file durable."""
    with by_name(path.open, "rb") as file:
        os.fdatasync(file.fileno())


def write_at(fd: int, offset: int, pieces: Sequence[bytes | memoryview]) -> None:
    """Write pieces (views of bytes, so that their len says how many), one behind the other, from byte `offset` on."""
    for start in range(0, len(pieces), _IOV_MAX):
        batch = pieces[start : start + _IOV_MAX]
        left = sum(map(len, batch))
        while left:
            written = os.pwritev(fd, batch, offset)
            offset += written
            left -= written
            if left:
                done = 0
                while written >= len(batch[done]):
                    written -= len(batch[done])
                    done += 1
                batch = [memoryview(batch[done])[written:], *batch[done + 1 :]]


@contextlib.contextmanager
def publishing(path: Path) -> Iterator[Path]:
    """Yield a temporary path beside `path`; on success make it durable and rename it into place."""
    temporary = path.with_name(f".{path.name}.{os.getpid()}.tmp")
    try:
        yield temporary
        fd = by_name(os.open, temporary, os.O_RDONLY)
        try:
            os.fsync(fd)
        finally:
            os.close(fd)
        temporary.replace(path)
        sync_folder(path.parent)
    except OSError as error:
        place(error, path)
        raise
    finally:
        with contextlib.suppress(OSError):
            temporary.unlink(missing_ok=True)


def publish(path: Path, data: bytes | str, *, mode: int = 0o644) -> None:
    """Write a whole file so that a reader sees the old one or the new one, and a crash loses neither."""
    with publishing(path) as temporary:
        fd = os.open(temporary, os.O_WRONLY | os.O_CREAT | os.O_TRUNC, mode)
        with os.fdopen(fd, "wb") as file:
            file.write(data.encode() if isinstance(data, str) else data)


def publish_json(path: Path, value: Mapping[str, Any]) -> None:
    publish(path, json.dumps(value) + "\n")


def read_json(path: Path) -> dict[str, Any] | None:
    """A JSON object that `publish_json` wrote, or None where there is none. Raises StoreError for anything else."""
    try:
        value = json.loads(by_name(read_from, path, 0))
        if not isinstance(value, dict):
            raise ValueError(f"{type(value).__name__} where an object should be")
    except FileNotFoundError:
        return None
    except (ValueError, RecursionError) as error:
        raise StoreError(f"{path}: not a JSON object ({error}); remove it") from error
    return value


def place(error: OSError, path: Path) -> None:
    """Have the error name a place where it names none, as those of calls on a descriptor."""
    if error.errno is not None and error.filename is None:
        error.filename = str(path)


def is_full(error: BaseException) -> bool:
    """Whether an error says that the disk or the quota is used up."""
    return isinstance(error, OSError) and error.errno in (errno.ENOSPC, errno.EDQUOT)


def is_unreadable(error: BaseException) -> bool:
    """Whether an error says that the disk can't read what is there."""
    return isinstance(error, OSError) and error.errno == errno.EIO


def next_number(names: Iterable[str]) -> int:
    """One more than the highest of those that are numbers. Raises StoreError where that would be none any more."""
    number = max((int(name) for name in names if is_number(name)), default=0) + 1
    if not is_number(str(number)):
        raise StoreError(f"a file has the number {number - 1}, and no higher one is left; remove it")
    return number


def next_incarnation(folder: Path, suffix: str = ".jsonl") -> tuple[int, Path]:
    """Take the next number in `folder` for oneself: the file made with O_EXCL is the proof."""
    number = next_number(path.stem for path in listed(folder, f"*{suffix}"))
    while True:
        path = folder / f"{number:06d}{suffix}"
        try:
            os.close(os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o644))
        except FileExistsError:
            number += 1
            continue
        sync_folder(folder)
        return number, path


class Appender:
    """An append-only file of JSON lines, each durable when `append` returns."""

    def __init__(self, path: Path) -> None:
        self._fd = os.open(path, os.O_RDWR | os.O_CREAT | os.O_APPEND, 0o644)
        size = os.fstat(self._fd).st_size
        torn = size > 0 and os.pread(self._fd, 1, size - 1) != b"\n"
        self._start = b"\n" if torn else b""  # a line that a full disk cut short must not swallow the next one

    def append(self, *rows: Mapping[str, Any]) -> None:
        data = self._start + b"".join(json.dumps(row).encode() + b"\n" for row in rows)
        self._start = b""
        if os.write(self._fd, data) != len(data):
            raise OSError(errno.ENOSPC, "only a part of a line could be written")
        os.fdatasync(self._fd)

    def close(self) -> None:
        os.close(self._fd)


def read_from(path: Path, start: int, size: int = -1) -> bytes:
    """Up to `size` bytes (-1: all) from byte `start` on. Raises StoreError for what is no regular file."""
    fd = os.open(path, os.O_RDONLY | os.O_NONBLOCK)  # else to open a FIFO waits for who writes to it
    if not stat.S_ISREG(os.fstat(fd).st_mode):
        os.close(fd)
        raise StoreError(f"{path}: is no regular file")
    with os.fdopen(fd, "rb") as file:
        file.seek(start)
        return file.read(size)


def read_lines(path: Path, start: int = 0, *, skip_torn: bool = False) -> tuple[list[dict[str, Any]], int]:
    """Whole lines from byte `start` on, and the byte after the last of them; a torn last line waits.

    Raises StoreError at a line that is no JSON, unless it is to be skipped: a warning says so, once.
    """
    try:
        data = by_name(read_from, path, start)
    except FileNotFoundError:
        return [], start
    end = data.rfind(b"\n") + 1
    rows = []
    for line in data[:end].splitlines():
        try:
            row = json.loads(line)
            if not isinstance(row, dict):
                raise ValueError(f"{type(row).__name__} where an object should be")
            rows.append(row)
        except (ValueError, RecursionError) as error:
            if not skip_torn:
                raise StoreError(f"{path}: line that is no JSON object ({error})") from error
            warn_once(f"{path}: holds a line that is no JSON object ({error}); passed over")
    return rows, start + end
