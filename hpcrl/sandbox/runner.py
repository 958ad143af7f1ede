"""Pid 1 of a sandbox: runs one call at a time for the host, and leaves nothing running after it.

This file is copied into the sandbox and run there by whatever Python >= 3.9 it has: standard library only, nothing of
hpcrl, and one file (so a few lines longer than our others may be). It owns the frames of the pipe to the host:

    frame = header length (u32 LE) | body length (u32 LE) | header (JSON) | body

    run    {id, argv, timeout, cap, stdin}    -> {id, code, killed, duration, stdout, stderr, sizes} + the two outputs
    write  {id, files: [[path, size], …]}     -> {id}
    read   {id, path, cap}                    -> {id} + content
    reset  {id}                               -> {id, clean, why}
    kill   {id, why}                          no reply of its own: ends the run with that id

The commands run as the same uid as this process, and some want to forge its replies (a reward for free). What stops
them: pid 1 can't be signalled from inside, a process that isn't dumpable can't be traced and its /proc files can't be
opened, the pipe's descriptor is closed on exec, and a command's processes are all dead before the next call is read.
"""

from __future__ import annotations

import collections
import contextlib
import ctypes
import errno
import fcntl
import json
import os
import resource
import select
import signal
import stat
import struct
import sys
import time

TYPE_CHECKING = False
if TYPE_CHECKING:  # `typing` takes longer to import than all else here
    from typing import Any

    Header = dict[str, Any]
    Reply = tuple[Header, bytes]

FRAME = struct.Struct("<II")
PR_SET_DUMPABLE = 4
CHUNK = 1 << 16
ENV = {"PATH": "/usr/local/bin:/usr/bin:/bin:/usr/sbin:/sbin", "HOME": "", "LANG": "C.UTF-8", "USER": "agent"}
SYSVIPC = ("/proc/sysvipc/shm", "/proc/sysvipc/sem", "/proc/sysvipc/msg")


class Channel:
    """Frames in and out of the socket to the host. Its end means that the host is gone: so are we then."""

    def __init__(self, fd: int) -> None:
        self.fd = fd
        self._data = bytearray()
        self.calls: collections.deque[tuple[Header, bytes]] = collections.deque()

    def receive(self) -> None:
        """Take what has come in (blocks when there is nothing); whole frames go to `calls`."""
        data = os.read(self.fd, CHUNK)
        if not data:
            os._exit(0)
        self._data += data
        while len(self._data) >= FRAME.size:
            head, body = FRAME.unpack_from(self._data)
            stop = FRAME.size + head + body
            if len(self._data) < stop:
                return
            header = json.loads(self._data[FRAME.size : FRAME.size + head])
            self.calls.append((header, bytes(self._data[FRAME.size + head : stop])))
            del self._data[:stop]

    def send(self, header: Header, body: bytes = b"") -> None:
        text = json.dumps(header).encode()
        view = memoryview(FRAME.pack(len(text), len(body)) + text + body)
        while view:
            view = view[os.write(self.fd, view) :]


class Stream:
    """One output of a command: the first `cap` bytes kept, the rest counted and dropped."""

    def __init__(self, cap: int) -> None:
        self.cap = cap
        self.kept = bytearray()
        self.size = 0
        self.read_fd, self.write_fd = os.pipe()
        os.set_blocking(self.read_fd, False)

    def pump(self) -> bool:
        """Read once; False at the end of the stream."""
        try:
            data = os.read(self.read_fd, CHUNK)
        except BlockingIOError:
            return True
        self.size += len(data)
        if len(self.kept) < self.cap:
            self.kept += data[: self.cap - len(self.kept)]
        return bool(data)

    def drain(self) -> None:
        """What is left, now that every writer is dead."""
        while self.pump():
            pass

    def close(self) -> None:
        os.close(self.read_fd)


class Command:
    """One running command: the child, its pipes, and how it ended."""

    def __init__(self, argv: list[str], stdin: bytes, cap: int) -> None:
        self.streams = (Stream(cap), Stream(cap))
        self.stdin = memoryview(stdin)
        self.stdin_fd = -1
        self.status: int | None = None
        child_in = os.open("/dev/null", os.O_RDONLY | os.O_CLOEXEC)
        if stdin:
            os.close(child_in)
            child_in, self.stdin_fd = os.pipe()
            os.set_blocking(self.stdin_fd, False)
        actions = [(os.POSIX_SPAWN_DUP2, child_in, 0)]
        actions += [(os.POSIX_SPAWN_DUP2, stream.write_fd, fd) for fd, stream in enumerate(self.streams, 1)]
        try:
            signals = [signal.SIGPIPE, signal.SIGXFSZ, signal.SIGINT]
            self.pid = os.posix_spawnp(argv[0], argv, ENV, file_actions=actions, setsid=True, setsigdef=signals)
        except BaseException:
            self.close()
            raise
        finally:
            for fd in (child_in, *(stream.write_fd for stream in self.streams)):
                os.close(fd)

    def feed(self) -> None:
        """Hand over more of stdin; the pipe closes when all is written or nobody reads."""
        try:
            self.stdin = self.stdin[os.write(self.stdin_fd, self.stdin[:CHUNK]) :]
        except BlockingIOError:
            return
        except OSError:
            self.stdin = memoryview(b"")
        if not self.stdin:
            os.close(self.stdin_fd)
            self.stdin_fd = -1

    def close(self) -> None:
        if self.stdin_fd >= 0:
            os.close(self.stdin_fd)
        for stream in self.streams:
            stream.close()


class Runner:
    def __init__(self, channel: Channel, wake_fd: int, config: Header) -> None:
        self.channel = channel
        self.wake_fd = wake_fd
        self.config = config
        self.work = config["work"]
        self.places = (self.work, *config["places"])
        self.inodes = config["inodes"]
        self.command: Command | None = None
        self.condition = condition()

    def serve(self) -> None:
        operations = {"run": self.run, "write": self.write, "read": self.read, "reset": self.reset}
        while True:
            while not self.channel.calls:
                self.channel.receive()
            header, body = self.channel.calls.popleft()
            if header["op"] == "kill":
                continue  # its run ended before the kill arrived
            try:
                reply, data = operations[header["op"]](header, body)
            except OSError as error:
                reply, data = {"errno": error.errno, "error": error.strerror}, b""
            except ValueError as error:  # a NUL in a path, text that is no text
                reply, data = {"errno": errno.EINVAL, "error": str(error)}, b""
            self.channel.send({"id": header["id"], **reply}, data)

    # ---- run

    def run(self, header: Header, body: bytes) -> Reply:
        start = time.monotonic()
        try:
            self.command = command = Command(header["argv"], body, header["cap"])
        except (OSError, ValueError) as error:  # ValueError: a NUL in an argument, text that is no text
            self.sweep()
            missing = 126 if getattr(error, "errno", 0) == errno.EACCES else 127  # as a shell has it
            text = f"{header['argv'][0]}: {getattr(error, 'strerror', error)}\n".encode("utf-8", "replace")
            return {"code": missing, "killed": "", "duration": time.monotonic() - start, "sizes": [0, len(text)],
                    "kept": [0, len(text)]}, text  # fmt: skip
        try:
            killed = self.watch(command, header["id"], start + header["timeout"])
            # Only now that the child's status is known: what it left behind would otherwise turn success into a kill.
            self.sweep()
            for stream in command.streams:
                stream.drain()
            code = None if killed or command.status is None else os.waitstatus_to_exitcode(command.status)
            out, err = command.streams
            reply = {"code": code, "killed": killed, "duration": time.monotonic() - start,
                     "sizes": [out.size, err.size], "kept": [len(out.kept), len(err.kept)]}  # fmt: skip
            return reply, bytes(out.kept + err.kept)
        finally:
            self.command = None
            command.close()

    def watch(self, command: Command, number: int, deadline: float) -> str:
        """Move the command's data until its child ended; the limit that it hit, "" where it hit none."""
        poll = select.poll()
        streams = {stream.read_fd: stream for stream in command.streams}
        for fd in (self.channel.fd, self.wake_fd, *streams):
            poll.register(fd, select.POLLIN)
        if command.stdin_fd >= 0:
            poll.register(command.stdin_fd, select.POLLOUT)
        look_at = 0.0
        while command.status is None:
            left = deadline - time.monotonic()
            if left <= 0:
                return "timeout"
            if sum(stream.size for stream in command.streams) > self.config["output_bytes"]:
                return "output"
            if time.monotonic() >= look_at:
                look_at = time.monotonic() + 0.25
                if any(num_inodes(place) > self.inodes for place in self.places):
                    return "memory"  # inodes of a tmpfs are memory that no size limits
            for fd, _ in poll.poll(min(left, 0.25) * 1000 + 1):
                if fd == self.wake_fd:
                    os.read(fd, CHUNK)
                    self.reap()
                elif fd == self.channel.fd:
                    why = self.killed_by_host(number)
                    if why:
                        return why
                elif fd in streams:
                    if not streams[fd].pump():
                        poll.unregister(fd)
                else:
                    command.feed()
                    if command.stdin_fd < 0:
                        poll.unregister(fd)
        return ""

    def killed_by_host(self, number: int) -> str:
        self.channel.receive()
        for header, _ in self.channel.calls:
            if header["op"] == "kill" and header["id"] == number:
                return str(header["why"])
        return ""

    def reap(self, block: bool = False) -> bool:
        """Collect the dead, orphans too. Returns True when no child is left."""
        while True:
            try:
                pid, status = os.waitpid(-1, 0 if block else os.WNOHANG)
            except ChildProcessError:
                return True
            if pid == 0:
                return False
            if self.command and pid == self.command.pid:
                self.command.status = status

    def sweep(self) -> None:
        """Kill everything in this pid namespace but ourselves, and wait until it is gone."""
        while not self.reap():
            with contextlib.suppress(ProcessLookupError):
                os.kill(-1, signal.SIGKILL)
            self.reap(block=True)

    # ---- files

    def parent_of(self, path: str, make: bool) -> tuple[int, bytes]:
        """A descriptor of the folder that holds `path`, reached without following a link or leaving the work folder."""
        parts = [part for part in os.fsencode(path).split(b"/") if part not in (b"", b".")]
        if not parts or b".." in parts or path.startswith("/"):
            raise OSError(errno.EINVAL, "path must lie below the work folder")
        flags = os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW
        folder = os.open(self.work, flags)
        for part in parts[:-1]:
            try:
                if make:
                    with contextlib.suppress(FileExistsError):
                        os.mkdir(part, 0o755, dir_fd=folder)
                deeper = os.open(part, flags, dir_fd=folder)
            finally:
                os.close(folder)
            folder = deeper
        return folder, parts[-1]

    def open(self, path: str, flags: int, make: bool = False) -> tuple[int, int]:
        """A regular file below the work folder. O_NONBLOCK: a FIFO that the agent left must not hold us."""
        folder, name = self.parent_of(path, make)
        try:
            fd = os.open(name, flags | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_NOCTTY, 0o644, dir_fd=folder)
        finally:
            os.close(folder)
        info = os.fstat(fd)
        if not stat.S_ISREG(info.st_mode):
            os.close(fd)
            raise OSError(errno.EINVAL, "not a regular file")
        return fd, info.st_size

    def write(self, header: Header, body: bytes) -> Reply:
        view = memoryview(body)
        for path, size in header["files"]:
            fd, _ = self.open(path, os.O_WRONLY | os.O_CREAT, make=True)
            try:
                os.ftruncate(fd, 0)
                data, view = view[:size], view[size:]
                while data:
                    data = data[os.write(fd, data) :]
            finally:
                os.close(fd)
        return {}, b""

    def read(self, header: Header, body: bytes) -> Reply:
        fd, size = self.open(header["path"], os.O_RDONLY)
        try:
            if size > header["cap"]:
                raise OSError(errno.EFBIG, f"file of {size} bytes exceeds the cap of {header['cap']}")
            with os.fdopen(os.dup(fd), "rb") as file:
                return {}, file.read(header["cap"])
        finally:
            os.close(fd)

    # ---- reset

    def reset(self, header: Header, body: bytes) -> Reply:
        """Remove every trace of what ran before, and say whether that is certain."""
        self.sweep()
        try:
            for place, mode in zip(self.places, (0o700, 0o1777, 0o1777)):  # noqa: B905 (Python 3.9 may run this)
                os.chmod(place, mode)  # noqa: PTH101
                wipe(place)
                for name in os.listxattr(place):
                    os.removexattr(place, name)
                os.utime(place, (0, 0))
        except (OSError, RecursionError) as error:
            return {"clean": False, "why": f"can't be wiped: {error}"}, b""
        if condition() != self.condition:
            return {"clean": False, "why": "scheduling, limits or IPC of the sandbox were changed"}, b""
        if not self.reap():
            return {"clean": False, "why": "a process is left"}, b""
        return {"clean": True, "why": ""}, b""


def num_inodes(place: str) -> int:
    info = os.statvfs(place)
    return info.f_files - info.f_ffree


def wipe(folder: str) -> None:
    with os.scandir(folder) as entries:
        for entry in entries:
            if entry.is_dir(follow_symlinks=False):
                os.chmod(entry.path, 0o700)  # noqa: PTH101
                wipe(entry.path)
                os.rmdir(entry.path)  # noqa: PTH106
            else:
                os.unlink(entry.path)  # noqa: PTH108


def condition() -> tuple[object, ...]:
    """What a command could change about this process or its IPC namespace, and so hand to the next trajectory."""
    limits = [resource.getrlimit(number) for number in range(16)]
    ipc = []
    for path in SYSVIPC:
        if os.path.exists(path):  # noqa: PTH110
            with open(path) as file:  # noqa: PTH123
                ipc.append(len(file.readlines()))
    return os.nice(0), os.sched_getscheduler(0), os.sched_getaffinity(0), limits, ipc


def limit(config: Header) -> None:
    """Limits that commands inherit. Each has soft == hard, so that no command can raise it."""
    wanted = {
        # Less than a page: no file. And of all values it alone keeps the kernel from starting core_pattern's program.
        resource.RLIMIT_CORE: 1,
        resource.RLIMIT_FSIZE: config["disk_bytes"],
        resource.RLIMIT_NOFILE: 1024,
        resource.RLIMIT_MEMLOCK: 64 << 10,
        resource.RLIMIT_MSGQUEUE: 0,
        # Writable private memory of one process: so far it gets before the host's watchdog looks again.
        resource.RLIMIT_DATA: 2 * config["memory_bytes"],
    }
    release = os.uname().release.split("-")[0].split(".")
    if tuple(int(part) for part in release[:2] if part.isascii() and part.isdecimal()) >= (5, 14):
        # Older kernels count the user's processes in all namespaces together; there the watchdog alone counts.
        wanted[resource.RLIMIT_NPROC] = config["processes"] + 1
    for number, value in wanted.items():
        hard = resource.getrlimit(number)[1]
        value = value if hard == resource.RLIM_INFINITY else min(value, hard)
        resource.setrlimit(number, (value, value))


def main() -> None:
    if ctypes.CDLL(None, use_errno=True).prctl(PR_SET_DUMPABLE, 0, 0, 0, 0):
        raise OSError(ctypes.get_errno(), "prctl(PR_SET_DUMPABLE)")
    if os.getpid() != 1:
        raise RuntimeError("the runner must be pid 1 of its sandbox")
    config = json.loads(sys.argv[1])
    channel = Channel(fcntl.fcntl(0, fcntl.F_DUPFD_CLOEXEC, 3))
    wake_fd, wake_write = os.pipe()
    for fd in (wake_fd, wake_write):
        os.set_blocking(fd, False)
    signal.set_wakeup_fd(wake_write, warn_on_full_buffer=False)
    signal.signal(signal.SIGCHLD, lambda *_: None)
    signal.signal(signal.SIGINT, signal.SIG_DFL)  # pid 1 ignores from inside what it has no handler for
    os.chdir(config["work"])
    ENV["HOME"] = config["work"]
    if config["path"]:
        ENV["PATH"] = config["path"] + ":" + ENV["PATH"]
    os.environ["PATH"] = ENV["PATH"]
    os.umask(0o022)
    limit(config)
    runner = Runner(channel, wake_fd, config)
    channel.send({"id": 0, "ready": os.getpid()})
    null = os.open("/dev/null", os.O_RDWR)
    for fd in (0, 1, 2):
        os.dup2(null, fd, inheritable=False)
    os.close(null)
    runner.serve()


if __name__ == "__main__":
    main()
