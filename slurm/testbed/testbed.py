"""What `up`, `down`, `kill-node` and `preempt` share: a testbed's state folder, its machines, its processes.

    munged   [mariadbd -> slurmdbd]   slurmctld ("ctl")   slurmd ("cpu1" … "gpu2")

All but munged and mariadbd run on a *machine* each: namespaces of its own for PIDs, mounts, IPC, network and host name,
with an address on a bridge that leads nowhere but here, an /etc/hosts that knows all machines, and a /dev/shm. Killing
its first process kills all that runs on it at once, as a power failure does; nothing can escape that. Files are shared:
one shared filesystem.

Needs no more than Python's standard library.
"""

from __future__ import annotations

import argparse
import contextlib
import fcntl
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path

NODES = {"cpu1": 11, "cpu2": 12, "cpu3": 13, "gpu1": 21, "gpu2": 22}  # name -> last part of its address
MACHINES = {"ctl": 1, "slurmdbd": 2, **NODES}
FREEZER = Path("/sys/fs/cgroup/freezer")
PATH = "/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin"

NETNS = Path("/run/netns")
UNSHARE = ("unshare", "--pid", "--fork", "--kill-child", "--mount-proc", "--uts", "--ipc", "--propagation", "slave")

# The first process of a machine. $1: state folder, $2: its name, $3: cgroup of the testbed or "".
MACHINE = """
set -eu
state=$1 name=$2 freezer=$3
shift 3
ulimit -c 0  # a rank that aborts leaves no core file where the job happens to be
hostname "$name"
mount --bind "$state/hosts" /etc/hosts
mount -t tmpfs -o size=1g,mode=1777 tmpfs /dev/shm
if [ -n "$freezer" ]; then mkdir -p "$freezer/$name"; mount --bind "$freezer/$name" "${freezer%/*}"; fi
"$@" &
wait $!
"""


class Refusal(Exception):
    """What the user can mend; exit code 2."""


def parser(text: str) -> argparse.ArgumentParser:
    made = argparse.ArgumentParser(description=text)
    default = Path(os.environ.get("XDG_RUNTIME_DIR") or "/tmp") / f"hpcrl-testbed-{os.getuid()}"
    made.add_argument("--state", type=Path, default=default, help="the testbed's folder; default: %(default)s")
    return made


def main(work: Callable[[], None]) -> None:
    """Run a script's body. Exit code 2 for what the user can mend, 1 for what failed."""
    name = Path(sys.argv[0]).name
    try:
        work()
    except Refusal as error:
        print(f"{name}: {error}", file=sys.stderr)
        sys.exit(2)
    except (OSError, RuntimeError) as error:
        sys.exit(f"{name}: {error}")


class Testbed:
    def __init__(self, state: Path) -> None:
        self.state = state.absolute()
        self.conf = self.state / "slurm.conf"
        self._lock = self.state / "testbed.lock"  # also says that the folder is a testbed's

    @property
    def tag(self) -> str:
        """In the names of what isn't in the folder: bridge, network namespaces, cgroup."""
        return f"hp{self.state.stat().st_ino & 0xFFFFFFFF:08x}"

    @property
    def freezer(self) -> Path:
        """The cgroup of all its jobs, where there are such cgroups."""
        return FREEZER / self.tag

    @contextlib.contextmanager
    def locked(self, *, create: bool = False) -> Iterator[None]:
        """One script at a time. Refuses a folder that others may write to, or that is something else."""
        if os.getuid():
            raise Refusal("needs root: a node is a namespace of its own")
        if create:
            self.state.mkdir(mode=0o700, parents=True, exist_ok=True)
            found = self.state.lstat()
            if self.state.is_symlink() or found.st_uid != os.getuid() or found.st_mode & 0o077:
                raise Refusal(f"{self.state}: should be a folder of yours alone, with mode 0700; name another --state")
            if not self._lock.exists() and any(self.state.iterdir()):
                raise Refusal(f"{self.state}: holds something else; name another --state")
        if not self._lock.exists() and not create:
            raise Refusal(f"no testbed is at {self.state}; `up` starts one")
        with self._lock.open("w") as lock:
            fcntl.flock(lock, fcntl.LOCK_EX)
            yield

    # ---- processes

    def start(self, name: str, *command: object, machine: bool = False, **environment: str) -> None:
        """In the background, with its output in log/<name>. As the one job of a machine of that name if asked for."""
        words = [str(word) for word in command]
        if machine:
            freezer = str(self.freezer) if self.freezer.exists() else ""
            remove_cgroups(self.freezer / name)  # of its life before, as a reboot does
            inside = ("nsenter", f"--net={NETNS}/{self.tag}-{name}")
            words = [*inside, *UNSHARE, "bash", "-c", MACHINE, "bash", str(self.state), name, freezer, *words]
        with (self.state / "log" / name).open("ab") as log:
            process = subprocess.Popen(
                words,
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=log,
                cwd="/",
                env={"PATH": PATH, "SLURM_CONF": str(self.conf), **environment},
                start_new_session=True,
            )
        pid_file = self.state / "pid" / name
        pid_file.with_suffix(".new").write_text(f"{process.pid} {_born(process.pid)}")
        pid_file.with_suffix(".new").rename(pid_file)

    def pid(self, name: str) -> int:
        """0 when it doesn't live."""
        try:
            pid, born = map(int, (self.state / "pid" / name).read_text().split())
        except FileNotFoundError:
            return 0
        return pid if _born(pid) == born else 0

    def kill(self, name: str) -> None:
        """With everything that runs on it, where it is a machine; returns when all of that is gone."""
        if pid := self.pid(name):
            # `unshare` ends when the first process of its PID namespace is reaped: when all others there are gone.
            children = Path(f"/proc/{pid}/task/{pid}/children").read_text().split()
            for target in map(int, children or [pid]):
                with contextlib.suppress(ProcessLookupError):
                    os.kill(target, signal.SIGKILL)
            self.wait(f"the end of {name}, process {pid}", lambda: not self.pid(name))

    def wait(self, what: str, done: Callable[[], object], *, needs: Sequence[str] = (), limit_s: float = 60) -> None:
        """Until done. Raises RuntimeError after `limit_s`, or when a process that it `needs` has ended."""
        end = time.monotonic() + limit_s
        while not done():
            for name in needs:
                if not self.pid(name):
                    raise RuntimeError(f"{name} has ended: {self._last_words(name)}")
            if time.monotonic() > end:
                words = "".join(f"\n{name}: {self._last_words(name)}" for name in needs)
                raise RuntimeError(f"waited {limit_s:.0f} s for {what}, in vain{words}")
            time.sleep(0.05)

    def _last_words(self, name: str) -> str:
        return (self.state / "log" / name).read_text(errors="replace")[-2000:]

    # ---- the network

    def connect(self, net: str) -> None:
        """Bridge and network namespaces of all machines, on addresses `net`.x."""
        self.disconnect()
        lines = [f"link add {self.tag} type bridge", f"addr add {net}.254/24 dev {self.tag}", f"link set {self.tag} up"]
        for name, last in MACHINES.items():
            port, inside = f"{self.tag}-{last}", f"{self.tag}-{name}"
            lines += [f"netns add {inside}", f"link add {port} type veth peer name eth0 netns {inside}"]
            lines += [f"link set {port} master {self.tag} up"]
        self.call("ip", "-batch", "-", input="\n".join(lines))
        for name, last in MACHINES.items():
            lines = ["link set lo up", f"addr add {net}.{last}/24 dev eth0", "link set eth0 up"]
            self.call("ip", "-netns", f"{self.tag}-{name}", "-batch", "-", input="\n".join(lines))

    def disconnect(self) -> None:
        for inside in NETNS.glob(f"{self.tag}-*"):
            self.call("ip", "netns", "delete", inside.name)
        if Path("/sys/class/net", self.tag).exists():
            self.call("ip", "link", "delete", self.tag)

    # ---- commands

    def call(self, *command: str, input: str = "") -> str:
        """What a command prints. Raises RuntimeError when it fails or hangs, as Slurm's do without a controller."""
        environment = {**os.environ, "PATH": f"{PATH}:{os.environ.get('PATH', '')}", "SLURM_CONF": str(self.conf)}
        try:
            done = subprocess.run(
                command, env=environment, input=input, capture_output=True, text=True, timeout=30, check=True
            )
        except subprocess.CalledProcessError as error:
            raise RuntimeError(f"{' '.join(command)}: {error.stderr.strip()}") from error
        except subprocess.TimeoutExpired as error:
            raise RuntimeError(f"{' '.join(command)}: no answer for 30 s") from error
        return done.stdout

    def works(self, *command: str) -> bool:
        try:
            self.call(*command)
        except RuntimeError:
            return False
        return True

    def job(self, number: str) -> dict[str, str]:
        """A job as `scontrol show job` has it."""
        text = self.call("scontrol", "--oneliner", "show", "job", number)
        return dict(word.split("=", 1) for word in text.split() if "=" in word)


def remove_cgroups(root: Path) -> None:
    for folder, _, _ in os.walk(root, topdown=False):
        Path(folder).rmdir()


def _born(pid: int) -> int:
    """When a process started, in ticks after boot; 0 when it's gone or a zombie. Pids come back, this pair doesn't."""
    try:
        fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    except OSError:
        return 0
    return 0 if fields[0] in "ZX" else int(fields[19])
