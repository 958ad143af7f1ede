"""Every path in a run folder, and the ways to put a file there so that it survives a crash.

Owns names and durability of files; knows nothing of what is in them.
"""

from __future__ import annotations

import contextlib
import errno
import json
import os
import socket
import tempfile
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from hpcrl.types import StoreError


@dataclass(frozen=True, slots=True)
class RunPaths:
    """A run folder. Each name below is spelled here and nowhere else."""

    root: Path

    @classmethod
    def of(cls, run: str | Path) -> RunPaths:
        """An existing run folder, by any path that leads to it."""
        root = Path(run).expanduser().resolve()
        paths = cls(root)
        if not paths.config.is_file():
            raise StoreError(f"{run}: not a run folder (it has no config.json)")
        return paths

    @property
    def config(self) -> Path:
        return self.root / "config.json"

    @property
    def model(self) -> Path:
        return self.root / "model"

    @property
    def jobs(self) -> Path:
        return self.root / "jobs.jsonl"

    @property
    def submitit(self) -> Path:
        return self.root / "logs" / "submitit"

    @property
    def logs(self) -> Path:
        return self.root / "logs"

    @property
    def control(self) -> Path:
        return self.root / "control"

    @property
    def scheduler(self) -> Path:
        """Address of the Dask scheduler, with control's incarnation."""
        return self.control / "scheduler.json"

    @property
    def heartbeat(self) -> Path:
        """What control last knew of the run, rewritten every few seconds."""
        return self.control / "status.json"

    @property
    def tls(self) -> Path:
        return self.control / "tls"

    @property
    def inbox(self) -> Path:
        return self.control / "inbox"

    @property
    def stopped(self) -> Path:
        """Written by control when the run came to rest: its outcome."""
        return self.control / "stopped.json"

    @property
    def reserve(self) -> Path:
        """Space kept aside; given back when the disk is full, so that the end can still be written down."""
        return self.control / "reserve"

    @property
    def log(self) -> Path:
        return self.root / "log"

    @property
    def shards(self) -> Path:
        return self.root / "shards"

    @property
    def damaged_shards(self) -> Path:
        """Where `store repair` puts what it has rescued all from."""
        return self.shards / "damaged"

    @property
    def pruned(self) -> Path:
        """Which shards `store prune` removed, and when."""
        return self.shards / "pruned.json"

    @property
    def damaged_log(self) -> Path:
        return self.log / "damaged"

    @property
    def ledger(self) -> Path:
        return self.root / "ledger"

    @property
    def progress(self) -> Path:
        return self.root / "progress"

    @property
    def weights(self) -> Path:
        return self.root / "weights"

    def version(self, version: int) -> Path:
        return self.weights / f"v{version:06d}"

    @property
    def current(self) -> Path:
        return self.weights / "CURRENT"

    @property
    def checkpoints(self) -> Path:
        return self.root / "checkpoints"

    def checkpoint(self, update: int) -> Path:
        return self.checkpoints / f"update-{update:06d}"

    def checkpointed(self) -> list[int]:
        """The updates that there are checkpoints of, whole or damaged, the newest first."""
        names = [path.name.removeprefix("update-") for path in self.checkpoints.glob("update-*")]
        return sorted((int(name) for name in names if name.isdigit()), reverse=True)

    @property
    def evals(self) -> Path:
        return self.root / "evals"

    @property
    def plot(self) -> Path:
        return self.root / "reward.png"

    def make(self) -> None:
        for folder in (
            self.logs,
            self.submitit,
            self.control,
            self.inbox,
            self.log,
            self.shards,
            self.ledger,
            self.progress,
            self.weights,
            self.checkpoints,
            self.evals,
        ):
            folder.mkdir(parents=True, exist_ok=True)
        self.control.chmod(0o700)

    def private(self) -> Path:
        """A folder on this node, for sockets and process files, that only this user can enter.

        Socket paths are limited to 107 bytes, so it lies in /tmp under a short name made from the run's path.
        """
        info = self.root.stat()
        folder = Path(tempfile.gettempdir()) / f"hpcrl-{os.getuid()}-{info.st_dev:x}-{info.st_ino:x}"
        folder.mkdir(mode=0o700, exist_ok=True)
        owner = folder.stat()
        if owner.st_uid != os.getuid() or owner.st_mode & 0o077:
            raise StoreError(f"{folder}: must belong to this user with mode 0700; remove it")
        return folder


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
    boot: str

    @classmethod
    def of(cls, pid: int) -> ProcessId:
        return cls(pid, _start_of(pid) or 0, boot_id())

    @classmethod
    def me(cls) -> ProcessId:
        return cls.of(os.getpid())

    def lives(self) -> bool | None:
        """None when it ran on another machine or before a reboot: that can't be seen from here."""
        if self.boot != boot_id():
            return None
        return _start_of(self.pid) == self.start


def _start_of(pid: int) -> int | None:
    """None when it is gone or a zombie."""
    try:
        fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    except OSError:
        return None
    return None if fields[0] in "ZX" else int(fields[19])


def sync_folder(folder: Path) -> None:
    """Make the entries of `folder` (creations, renames, unlinks) durable."""
    fd = os.open(folder, os.O_RDONLY | os.O_DIRECTORY)
    try:
        os.fsync(fd)
    finally:
        os.close(fd)


@contextlib.contextmanager
def publishing(path: Path) -> Iterator[Path]:
    """Yield a temporary path beside `path`; on success make it durable and rename it into place."""
    temporary = path.with_name(f".{path.name}.{os.getpid()}.tmp")
    try:
        yield temporary
        fd = os.open(temporary, os.O_RDONLY)
        try:
            os.fsync(fd)
        finally:
            os.close(fd)
        temporary.replace(path)
        sync_folder(path.parent)
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
    """A JSON object that `publish_json` wrote, or None where there is none."""
    try:
        value = json.loads(path.read_text())
    except FileNotFoundError:
        return None
    except json.JSONDecodeError as error:
        raise StoreError(f"{path}: not JSON ({error})") from error
    return value if isinstance(value, dict) else None


def is_full(error: BaseException) -> bool:
    """Whether an error says that the disk or the quota is used up."""
    return isinstance(error, OSError) and error.errno in (errno.ENOSPC, errno.EDQUOT)


def next_incarnation(folder: Path, suffix: str = ".jsonl") -> tuple[int, Path]:
    """Take the next number in `folder` for oneself: the file made with O_EXCL is the proof."""
    number = max((int(path.stem) for path in folder.glob(f"*{suffix}") if path.stem.isdigit()), default=0) + 1
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
        self._fd = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o644)

    def append(self, *rows: Mapping[str, Any]) -> None:
        data = b"".join(json.dumps(row).encode() + b"\n" for row in rows)
        if os.write(self._fd, data) != len(data):
            raise OSError(errno.ENOSPC, "only a part of a line could be written")
        os.fdatasync(self._fd)

    def close(self) -> None:
        os.close(self._fd)


def read_lines(path: Path, start: int = 0) -> tuple[list[dict[str, Any]], int]:
    """Whole lines from byte `start` on, and the byte after the last of them; a torn last line waits."""
    try:
        with path.open("rb") as file:
            file.seek(start)
            data = file.read()
    except FileNotFoundError:
        return [], start
    end = data.rfind(b"\n") + 1
    rows = []
    for line in data[:end].splitlines():
        try:
            rows.append(json.loads(line))
        except json.JSONDecodeError as error:
            raise StoreError(f"{path}: line that is not JSON ({error})") from error
    return rows, start + end
