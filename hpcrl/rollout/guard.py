"""The parent of one engine, in a process of its own: no engine outlives everything.

Starts the command it was given as the leader of a process group, and ends the whole group when the command exits, on
SIGTERM, or when no living process owned it for a while. The owner is a supervisor, which may die and be replaced while
the engine notices nothing: its pid and start time lie in a file that its successor rewrites.

Stays tiny: the standard library only, run by path (`python -I -S guard.py …`): it imports nothing of hpcrl.

    python -I -S guard.py FOLDER LOG GRACE_S STOP_S COMMAND…
    FOLDER/owner.json   {"pid", "start"}                                       written by the supervisor
    FOLDER/engine.json  {"guard": {"pid", "start"}, "engine": {…}, "command"}  written here
    FOLDER/shared.json  {"among": pid namespace, "files": {name: inode}}: the shared memory that the engine made, which
                        goes with it: vLLM that is killed leaves it, and a node's /dev/shm is full some day
"""

from __future__ import annotations

# os and open, not pathlib: that takes longer to import than all else here.
import contextlib
import ctypes
import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator

POLL_S = 0.5
OWNER = "owner.json"
ENGINE = "engine.json"
SHARED = "shared.json"
SHM = "/dev/shm"
PR_SET_PDEATHSIG = 1


def started_at(pid: int) -> int:
    """When process `pid` started, in clock ticks since boot; 0 when it is gone or a zombie. Pids are used again."""
    try:
        with open(f"/proc/{pid}/stat", "rb") as file:  # noqa: PTH123
            fields = file.read().rpartition(b")")[2].split()
    except OSError:
        return 0
    return 0 if fields[0] in (b"Z", b"X") else int(fields[19])


def identity(pid: int) -> dict[str, int]:
    return {"pid": pid, "start": started_at(pid)}


def lives(row: object) -> bool:
    """Whether the process that `identity` described is still that process."""
    if not isinstance(row, dict):
        return False
    pid, start = row.get("pid"), row.get("start")
    return isinstance(pid, int) and isinstance(start, int) and start > 0 and started_at(pid) == start


def read(path: str) -> dict[str, object]:
    """A JSON object; empty where there is none, or none yet."""
    try:
        with open(path, "rb") as file:  # noqa: PTH123
            row = json.load(file)
    except (OSError, ValueError):
        return {}
    return row if isinstance(row, dict) else {}


def end_group(group: int, stop_s: float) -> None:
    """SIGTERM to every process of the group, SIGKILL to those that remain after `stop_s`."""
    for number, wait_s in ((signal.SIGTERM, stop_s), (signal.SIGKILL, 2.0)):
        try:
            os.killpg(group, number)
        except ProcessLookupError:
            return
        deadline = time.monotonic() + wait_s
        while time.monotonic() < deadline:
            if not group_lives(group):
                return
            time.sleep(0.05)


def group_lives(group: int) -> bool:
    """Whether the group has a member that is no zombie."""
    return next(members(group), None) is not None


def members(group: int) -> Iterator[str]:
    """The pids of a group, zombies left out."""
    for name in os.listdir("/proc"):  # noqa: PTH208
        if name.isascii() and name.isdecimal():
            try:
                with open(f"/proc/{name}/stat", "rb") as file:  # noqa: PTH123
                    fields = file.read().rpartition(b")")[2].split()
            except OSError:
                continue
            if int(fields[2]) == group and fields[0] not in (b"Z", b"X"):
                yield name


def among() -> str:
    """Names the processes that can be seen from here: /tmp may be shared by nodes, or by containers of one."""
    return os.readlink("/proc/self/ns/pid")  # noqa: PTH115


def shared_by(group: int) -> dict[str, int]:
    """Name and inode of what processes of the group have mapped of /dev/shm."""
    found = {}
    for pid in members(group):
        try:
            with open(f"/proc/{pid}/maps", errors="surrogateescape") as file:  # noqa: PTH123
                lines = [line.split(None, 5) for line in file if f" {SHM}/" in line]
        except OSError:
            continue
        found.update({fields[5].rstrip("\n")[len(SHM) + 1 :]: int(fields[4]) for fields in lines})
    return found


class Shared:
    """Writes down what a group makes in /dev/shm."""

    def __init__(self, folder: str, group: int) -> None:
        self._path, self._group = f"{folder}/{SHARED}", group
        self._found: dict[str, int] = {}
        self._there: list[str] = []
        self._looks = 0

    def note(self) -> None:
        """Looks at the group's processes when /dev/shm has changed: once more than that, as what is new there may not
        be mapped yet. On a full disk the next note makes up for it."""
        try:
            there = os.listdir(SHM)  # noqa: PTH208
            if there != self._there:
                self._there, self._looks = there, 2
            if self._looks:
                self._looks -= 1
                self._found.update(shared_by(self._group))
                write(self._path, {"among": among(), "files": self._found})
        except OSError:
            self._looks = 1


def remove_shared(folder: str) -> None:
    """What an engine of this folder left in /dev/shm, once it is gone."""
    files = read(f"{folder}/{SHARED}").get("files")
    for name, inode in files.items() if isinstance(files, dict) else ():
        try:
            if os.stat(f"{SHM}/{name}").st_ino == inode:  # noqa: PTH116
                os.unlink(f"{SHM}/{name}")  # noqa: PTH108
        except OSError:
            continue
    with contextlib.suppress(OSError):
        os.unlink(f"{folder}/{SHARED}")  # noqa: PTH108


def write(path: str, row: dict[str, object]) -> None:
    with open(f"{path}.tmp", "w") as file:  # noqa: PTH123
        json.dump(row, file)
    os.replace(f"{path}.tmp", path)  # noqa: PTH105


def main(folder: str, log: str, grace_s: float, stop_s: float, command: list[str]) -> int:
    signals = {signal.SIGTERM, signal.SIGINT, signal.SIGHUP, signal.SIGCHLD}
    signal.pthread_sigmask(signal.SIG_BLOCK, signals)  # taken by sigtimedwait below
    libc = ctypes.CDLL(None)

    def before_exec() -> None:
        os.setsid()
        libc.prctl(PR_SET_PDEATHSIG, signal.SIGTERM)  # a guard that is killed takes the engine along
        signal.pthread_sigmask(signal.SIG_UNBLOCK, signals)

    with open(log, "ab", buffering=0) as out:  # noqa: PTH123
        engine = subprocess.Popen(
            command, stdin=subprocess.DEVNULL, stdout=out, stderr=out, preexec_fn=before_exec, close_fds=True
        )
    row: dict[str, object] = {"guard": identity(os.getpid()), "engine": identity(engine.pid), "command": command}
    write(f"{folder}/{ENGINE}", row)
    owned = time.monotonic()
    shared = Shared(folder, engine.pid)
    while engine.poll() is None:
        shared.note()
        if lives(read(f"{folder}/{OWNER}")):
            owned = time.monotonic()
        taken = signal.sigtimedwait(signals, POLL_S)
        told = taken is not None and taken.si_signo != signal.SIGCHLD
        if told or time.monotonic() - owned > grace_s:
            break
    # The group, not the leader alone: vLLM's core and workers are left behind by a leader that is killed.
    end_group(engine.pid, stop_s)
    code = engine.wait()
    remove_shared(folder)
    return code if code >= 0 else 128 - code


if __name__ == "__main__":
    sys.exit(main(sys.argv[1], sys.argv[2], float(sys.argv[3]), float(sys.argv[4]), sys.argv[5:]))
