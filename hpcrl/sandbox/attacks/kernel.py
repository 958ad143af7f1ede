"""The kernel."""

from __future__ import annotations

from hpcrl.sandbox.attacks.words import Attack

KERNEL = (
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
