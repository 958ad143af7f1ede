"""The system calls that no command in a sandbox may make, as the program that bwrap loads (`--seccomp`).

Namespaces already keep commands from the machine; this closes what is left inside: memory that no process owns
(memfd, System V), state that survives a reset (keyrings, queues), another process's limits (the runner's), and sockets
that no network namespace holds back (AF_VSOCK leads to the hypervisor).
"""

from __future__ import annotations

import errno
import platform
import socket
import struct

from hpcrl.types import SandboxError

# Numbers from the kernel's tables: (audit architecture, {name: number}).
_MACHINES = {
    "x86_64": (
        0xC000003E,
        {
            "socket": 41,
            "shmget": 29,
            "semget": 64,
            "msgget": 68,
            "add_key": 248,
            "request_key": 249,
            "keyctl": 250,
            "mq_open": 240,
            "syslog": 103,
            "prlimit64": 302,
            "perf_event_open": 298,
            "memfd_create": 319,
            "bpf": 321,
            "userfaultfd": 323,
            "io_uring_setup": 425,
            "memfd_secret": 447,
        },
    ),
    "aarch64": (
        0xC00000B7,
        {
            "socket": 198,
            "shmget": 194,
            "semget": 190,
            "msgget": 186,
            "add_key": 217,
            "request_key": 218,
            "keyctl": 219,
            "mq_open": 180,
            "syslog": 116,
            "prlimit64": 261,
            "perf_event_open": 241,
            "memfd_create": 279,
            "bpf": 280,
            "userfaultfd": 282,
            "io_uring_setup": 425,
            "memfd_secret": 447,
        },
    ),
}
_LOAD, _EQUAL, _AT_LEAST, _RETURN = 0x20, 0x15, 0x35, 0x06  # BPF: ld word, jeq, jge, ret
_NUMBER, _ARCH, _ARG0 = 0, 4, 16  # offsets in struct seccomp_data (little endian: low half of args[0])
_ALLOW, _KILL, _ERRNO = 0x7FFF0000, 0x80000000, 0x00050000
_FAMILIES = (socket.AF_UNSPEC, socket.AF_UNIX, socket.AF_INET, socket.AF_INET6, socket.AF_NETLINK)
_X32 = 0x40000000  # x86_64's second numbering of the same calls


def call_numbers(machine: str = "") -> dict[str, int]:
    """The calls of the table above, by the kernel's numbers for this machine, and those that have one number on all."""
    return {**_MACHINES[machine or platform.machine()][1], "pidfd_getfd": 438}


def filter_program(machine: str = "") -> bytes:
    """A BPF program: foreign architectures are killed, the calls above fail with EPERM, the rest goes through.

    `prlimit64` of oneself (pid 0) stays allowed, and `socket` of the usual families.
    Raises SandboxError on a machine whose call numbers we don't know.
    """
    machine = machine or platform.machine()
    if machine not in _MACHINES:
        raise SandboxError(f"no system call filter for {machine}; sandboxes run on: {', '.join(_MACHINES)}")
    arch, calls = _MACHINES[machine]
    refuse = _ERRNO | errno.EPERM
    code = [
        (_LOAD, 0, 0, _ARCH),
        (_EQUAL, 1, 0, arch),
        (_RETURN, 0, 0, _KILL),
        (_LOAD, 0, 0, _NUMBER),
        (_AT_LEAST, 0, 1, _X32),
        (_RETURN, 0, 0, refuse),
    ]
    for name, number in calls.items():
        if name not in ("prlimit64", "socket"):
            code += [(_EQUAL, 0, 1, number), (_RETURN, 0, 0, refuse)]
    usual = [(_EQUAL, len(_FAMILIES) - index, 0, family) for index, family in enumerate(_FAMILIES)]
    code += [
        (_EQUAL, 0, len(usual) + 3, calls["socket"]),
        (_LOAD, 0, 0, _ARG0),
        *usual,
        (_RETURN, 0, 0, _ERRNO | errno.EAFNOSUPPORT),
        (_RETURN, 0, 0, _ALLOW),
    ]
    code += [
        (_EQUAL, 0, 3, calls["prlimit64"]),
        (_LOAD, 0, 0, _ARG0),
        (_EQUAL, 1, 0, 0),
        (_RETURN, 0, 0, refuse),
        (_RETURN, 0, 0, _ALLOW),
    ]
    return b"".join(struct.pack("<HBBI", *instruction) for instruction in code)
