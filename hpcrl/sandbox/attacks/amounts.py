"""Memory and other amounts, and what outlives a command."""

from __future__ import annotations

from hpcrl.sandbox.attacks.witnesses import kept_output, leftovers
from hpcrl.sandbox.attacks.words import Attack

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
AMOUNTS = (
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
        witness=kept_output,
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

BOMBS = (
    Attack(
        name="daemon",
        tries="outlive the command: forked twice, in a session of its own",
        program="background()\ntime.sleep(8)",
        witness=leftovers,
    ),
    Attack(
        name="background-child",
        tries="outlive the command as a plain child",
        program="subprocess.Popen(['sleep', '8'], stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)\nlost('ended')",
        witness=leftovers,
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
        witness=leftovers,
        refusals=("timeout",),
        timeout_s=0.7,
    ),
    Attack(
        name="fork-at-exit",
        tries="outlive the command through a hook at exit",
        program="import atexit\natexit.register(lambda: (background(), time.sleep(8)))\nlost('ended')",
        witness=leftovers,
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
        witness=leftovers,
    ),
)
