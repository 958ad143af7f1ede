"""What belongs to the host."""

from __future__ import annotations

from hpcrl.sandbox.attacks.witnesses import marked, on_terminal, victim
from hpcrl.sandbox.attacks.words import Attack

HOST = (
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
        witness=marked,
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
        witness=victim,
    ),
    Attack(
        name="kill-all",
        tries="kill whatever it may",
        program="os.kill(-1, signal.SIGTERM)\nlost('sent')",
        witness=victim,
        bare="it would end all that this user runs",
        refusals=("ESRCH", "sent"),
    ),
    Attack(
        name="slow-down-others",
        tries="lower the priority of a process of the host",
        program="os.setpriority(os.PRIO_PROCESS, victim, 10)\nlost('set')",
        witness=victim,
    ),
    Attack(
        name="limit-others",
        tries="lower the limits of a process of the host",
        program="resource.prlimit(victim, resource.RLIMIT_NOFILE, (64, 64))\nlost('set')",
        witness=victim,
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
        witness=on_terminal,
    ),
)
