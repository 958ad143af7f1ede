"""Taking over the runner, or its replies."""

from __future__ import annotations

from hpcrl.sandbox.attacks.witnesses import answers, forged, rewritten
from hpcrl.sandbox.attacks.words import Attack

RUNNER = (
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
        witness=forged,
    ),
    Attack(
        name="forge-reply-on-stdout",
        tries="print a reply of its own",
        program="""
for fd in (1, 2):
    os.write(fd, bytes.fromhex(bait["forged"]))
lost("printed, and not believed")
""",
        witness=forged,
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
        witness=answers,
        timeout_s=3.0,
    ),
    Attack(
        name="stop-runner",
        tries="stop the runner, so that it never answers",
        program="os.kill(runner, signal.SIGSTOP)\nlost('sent')",
        witness=answers,
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
        witness=rewritten,
    ),
)
