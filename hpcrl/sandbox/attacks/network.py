"""The network."""

from __future__ import annotations

from hpcrl.sandbox.attacks.words import Attack

_HEAR = """
door.settimeout(3)
judge(door.recv(100) == token.encode(), "the server's secret")
"""
NETWORK = (
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
