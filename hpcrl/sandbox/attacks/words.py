"""An attack, where it runs, and what every program begins with."""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Mapping
from dataclasses import dataclass
from typing import Any, Protocol

from hpcrl.types import CommandResult

FORGED = 77  # exit status in a forged reply; no program exits with it

PRELUDE = """
import ctypes, errno, fcntl, json, mmap, os, resource, signal, socket, stat, struct, subprocess, sys, threading, time
bait = json.loads(BAIT)
runner, victim, places, token = bait["runner"], bait["victim"], bait["places"], bait["token"]
libc = ctypes.CDLL(None, use_errno=True)
MIB = 1 << 20
NEWNS, NEWUTS, NEWIPC, NEWUSER, NEWNET = 0x20000, 0x4000000, 0x8000000, 0x10000000, 0x40000000

def won(what):
    os.write(1, f"\\nSUCCEEDED {what}\\n".encode(errors="backslashreplace"))

def lost(what):
    os.write(1, f"\\nREFUSED {what}\\n".encode(errors="backslashreplace"))

def judge(success, what):
    won(what) if success else lost(what)

def hook(kind, error, trace):
    if isinstance(error, (OSError, MemoryError)):
        number = getattr(error, "errno", None) or (errno.ETIMEDOUT if isinstance(error, TimeoutError) else errno.ENOMEM)
        lost(f"{errno.errorcode.get(number, number)} {error}")
    else:
        sys.__excepthook__(kind, error, trace)
sys.excepthook = hook

def call(name, *arguments):
    '''A function of libc, or a system call by the name that the judge knows its number under. Raises OSError.'''
    words = [ctypes.c_long(word) if isinstance(word, int) else word for word in arguments]
    if name in bait["calls"]:
        name, words = "syscall", [ctypes.c_long(bait["calls"][name]), *words]
    answer = getattr(libc, name)(*words)
    if answer == -1:
        raise OSError(ctypes.get_errno(), os.strerror(ctypes.get_errno()))
    return answer

def first(*tries):
    '''What the first of these that isn't refused gives; raises the last one's error.'''
    for number, attempt in enumerate(tries, 1):
        try:
            return attempt()
        except OSError:
            if number == len(tries):
                raise

def as_root(flags=0):
    '''Root of a user namespace of our own, where the machine lets us.'''
    uid = os.getuid()
    try:
        call("unshare", NEWUSER | flags)
        for name, text in (("setgroups", "deny"), ("uid_map", f"0 {uid} 1"), ("gid_map", f"0 {uid} 1")):
            with open(f"/proc/self/{name}", "w") as file:
                file.write(text)
    except OSError:
        pass

def put(path, size):
    '''Write so many bytes, for good.'''
    fd = os.open(path, os.O_CREAT | os.O_WRONLY, 0o600)
    for _ in range(size // MIB):
        if os.write(fd, bytes(MIB)) != MIB:
            raise OSError(errno.ENOSPC, "short write")
    return fd

def background():
    '''Go on as a daemon: forked twice, in a session of its own, with none of the pipes. The first process ends.'''
    if os.fork():
        os._exit(0)
    os.setsid()
    if os.fork():
        os._exit(0)
    null = os.open("/dev/null", os.O_RDWR)
    for fd in range(3):
        os.dup2(null, fd)

def many_files():
    hard = resource.getrlimit(resource.RLIMIT_NOFILE)[1]
    resource.setrlimit(resource.RLIMIT_NOFILE, (min(hard, 1 << 16) if hard > 0 else 1 << 16, hard))
"""


class Ground(Protocol):
    """Where an attack runs: in a sandbox, or bare."""

    bait: Mapping[str, Any]
    last: CommandResult  # of the last run

    async def run(self, program: str, timeout_s: float = 10.0) -> CommandResult:
        """Raises SandboxLost when the runner no longer answers."""

    async def read(self, path: str) -> bytes:
        """As the platform reads a file that the agent was to write. Raises OSError, TimeoutError when it hangs."""

    async def write(self, path: str, data: bytes) -> None: ...

    async def reset(self) -> str:
        """Between two trajectories. Returns why it isn't clean, "" where it is."""

    def leftovers(self) -> int:
        """Processes of the agent that live though no command runs."""


Witness = Callable[[Ground], Awaitable[str]]  # evidence of success, "" where there is none


@dataclass(frozen=True, slots=True, kw_only=True)
class Attack:
    name: str
    tries: str
    program: str
    after: str = ""  # the next trajectory's program, after a reset
    witness: Witness | None = None
    bare: str = ""  # why it isn't run bare
    refusals: tuple[str, ...] = ()  # what counts as held: errors and limits; () for any but a timeout
    machine: tuple[str, ...] = ()  # errors by which some machines refuse it to anybody: no bare run there
    timeout_s: float = 10.0
