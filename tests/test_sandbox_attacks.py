"""What code in a sandbox must not be able to do, one property per test, by real bwrap sessions.

Where an attack is harmless it is also shown to work without the sandbox, so that its failure inside means something.
"""

from __future__ import annotations

import os
import socket
import subprocess
import sys
import time
from collections.abc import AsyncIterator
from pathlib import Path

import psutil
import pytest

from hpcrl.config import SandboxPool
from hpcrl.sandbox.backend import find_backend, host_uids, process_tree
from hpcrl.sandbox.pool import Lease, Pool
from hpcrl.types import CommandResult

CONFIG = SandboxPool(sessions=2, warm=0, memory_mib=256, processes=32, disk_mib=16)


@pytest.fixture(scope="module")
def backend():  # type: ignore[no-untyped-def]
    return find_backend()


@pytest.fixture
async def pool(backend) -> AsyncIterator[Pool]:  # type: ignore[no-untyped-def]
    pool = Pool(CONFIG, backend)
    yield pool
    await pool.close()


@pytest.fixture
async def box(pool: Pool) -> Lease:
    return await pool.acquire("t", 1)


async def python(box: Lease, code: str, timeout_s: float = 20.0, cap_bytes: int = 65536) -> CommandResult:
    return await box.run(["python3", "-"], stdin=code.encode(), timeout_s=timeout_s, cap_bytes=cap_bytes)


def outside(code: str) -> subprocess.CompletedProcess[bytes]:
    return subprocess.run([sys.executable, "-"], input=code.encode(), capture_output=True, timeout=20)


def pid_of(lease: Lease) -> int:
    return lease._session.pid


# ---- who and where


async def test_it_is_nobody_on_the_host(box: Lease) -> None:
    assert 0 not in host_uids(pid_of(box))
    result = await python(box, "print(open('/proc/self/status').read())")
    text = result.stdout.decode()
    for name in ("CapInh", "CapPrm", "CapEff", "CapBnd", "CapAmb"):
        assert f"{name}:\t0000000000000000" in text
    assert "NoNewPrivs:\t1" in text
    assert "Seccomp:\t2" in text


@pytest.mark.parametrize("path", ["/proc/sys/kernel/core_pattern", "/proc/sysrq-trigger", "/sys/kernel/uevent_helper"])
async def test_kernel_settings_cannot_be_written(box: Lease, path: str) -> None:
    result = await python(box, f"open({path!r}, 'w')")
    assert result.code == 1
    assert b"PermissionError" in result.stderr or b"Read-only" in result.stderr or b"No such file" in result.stderr


async def test_no_home_and_no_file_of_the_host(box: Lease, tmp_path: Path) -> None:
    secret = tmp_path / "secret"
    secret.write_text("42")
    secret.chmod(0o644)
    attack = f"print(open({str(secret)!r}).read())"
    assert outside(attack).stdout == b"42\n"
    result = await python(box, attack)
    assert b"FileNotFoundError" in result.stderr
    listing = await box.run(["ls", "/", "/tmp", "/run", "/home", "/root"])
    assert str(Path.home()).encode() not in listing.stdout
    assert not {b"home", b"root", b"srv", b"mnt", b"var"} & set(listing.stdout.split())


async def test_nothing_but_its_own_places_can_be_written(box: Lease) -> None:
    result = await python(
        box,
        "import os\n"
        "for place in ('/', '/etc', '/usr', '/dev', '/run', '/usr/lib', '/proc', '/box', '/tmp', '/dev/shm'):\n"
        "    try:\n"
        "        open(place + '/x', 'w').close(); print(place)\n"
        "    except OSError: pass\n",
    )
    assert result.stdout.split() == [b"/box", b"/tmp", b"/dev/shm"]


async def test_no_network(box: Lease) -> None:
    with socket.create_server(("127.0.0.1", 0)) as server:
        attack = f"import socket; socket.create_connection(('127.0.0.1', {server.getsockname()[1]}), 3); print('in')"
        assert outside(attack).stdout == b"in\n"
        assert b"ConnectionRefusedError" in (await python(box, attack)).stderr
    result = await python(box, "import socket; socket.create_connection(('192.0.2.1', 80), 3)")
    assert b"unreachable" in result.stderr


async def test_no_abstract_socket_of_the_host(box: Lease) -> None:
    with socket.socket(socket.AF_UNIX) as server:
        server.bind(f"\0hpcrl-test-{os.getpid()}")
        server.listen()
        attack = f"import socket; socket.socket(socket.AF_UNIX).connect('\\0hpcrl-test-{os.getpid()}'); print('in')"
        assert outside(attack).stdout == b"in\n"
        assert b"ConnectionRefusedError" in (await python(box, attack)).stderr


async def test_no_process_of_the_host_is_seen(box: Lease) -> None:
    attack = "import os; print(len([name for name in os.listdir('/proc') if name.isdigit()]))"
    assert int(outside(attack).stdout) > 3
    assert int((await python(box, attack)).stdout) == 2  # the runner and itself


async def test_no_new_namespaces(box: Lease) -> None:
    result = await box.run(["unshare", "-Ur", "true"])
    assert result.code != 0
    assert b"unshare failed" in result.stderr


# ---- the runner


async def test_the_runner_cannot_be_killed_or_stopped(box: Lease) -> None:
    result = await python(
        box,
        "import os\nfor number in range(1, 65):\n    if number not in (32, 33): os.kill(1, number)\nprint('sent')",
    )
    assert result.stdout == b"sent\n"
    assert (await box.run(["echo", "still"])).stdout == b"still\n"


FORGE = """
import os, sys
target, hits = int(sys.argv[1]) if len(sys.argv) > 1 else {target}, []
for name in ("mem", "environ", "maps", "auxv"):
    try:
        open(f"/proc/{{target}}/{{name}}", "rb").read(0); hits.append(name)
    except OSError: pass
try:
    hits += ["fd"] * bool(os.listdir(f"/proc/{{target}}/fd"))
except OSError: pass
print(hits)
"""


async def test_the_runner_cannot_be_read_or_its_replies_forged(box: Lease) -> None:
    assert b"mem" in outside(FORGE.format(target="os.getppid()")).stdout
    assert (await python(box, FORGE.format(target=1))).stdout == b"[]\n"
    ptrace = "import ctypes; print(ctypes.CDLL(None, use_errno=True).ptrace(16, 1, 0, 0), ctypes.get_errno())"
    assert (await python(box, ptrace)).stdout == b"-1 1\n"
    vm = (
        "import ctypes; c = ctypes.CDLL(None, use_errno=True); b = (ctypes.c_char * 8)(); v = (ctypes.c_void_p * 2)"
        "(ctypes.addressof(b), 8); print(c.process_vm_readv(1, v, 1, v, 1, 0), ctypes.get_errno())"
    )
    assert (await python(box, vm)).stdout == b"-1 1\n"
    assert (await python(box, "import os; os.pidfd_open(1); print('pidfd')")).stdout == b"pidfd\n"
    getfd = "import ctypes, os; print(ctypes.CDLL(None).syscall(438, os.pidfd_open(1), 3, 0))"
    assert (await python(box, getfd)).stdout == b"-1\n"


async def test_no_descriptor_is_inherited(box: Lease) -> None:
    result = await python(box, "import os; print(sorted(map(int, os.listdir('/proc/self/fd')))[:-1])")
    assert result.stdout == b"[0, 1, 2]\n"  # less the one of listdir itself
    result = await box.run(["sh", "-c", "ls -l /proc/self/fd"])
    assert b"socket" not in result.stdout


async def test_the_runners_limits_cannot_be_changed(box: Lease) -> None:
    attack = "import resource; resource.prlimit(1, resource.RLIMIT_NOFILE, (0, 0))"
    assert b"PermissionError" in (await python(box, attack)).stderr
    assert (
        await python(box, "import resource; print(resource.prlimit(0, resource.RLIMIT_CORE))")
    ).stdout == b"(0, 0)\n"


async def test_frames_on_its_outputs_are_just_output(box: Lease) -> None:
    forged = (
        'import sys; sys.stdout.buffer.write(b\'\\x14\\0\\0\\0\\0\\0\\0\\0{"id":1,"killed":""}\'); raise SystemExit(3)'
    )
    result = await python(box, forged)
    assert (result.code, result.stdout[8:]) == (3, b'{"id":1,"killed":""}')


# ---- leftovers


async def test_what_a_command_left_running_is_dead(box: Lease) -> None:
    started = time.monotonic()
    result = await box.run(["sh", "-c", "setsid sleep 1000 & (setsid nohup sleep 1000 &) & echo done; exit 7"])
    assert (result.code, result.stdout, result.killed) == (7, b"done\n", "")
    assert time.monotonic() - started < 5
    assert len(process_tree(pid_of(box))) == 2


async def test_a_leftover_that_holds_the_pipe_does_not_change_success(box: Lease) -> None:
    for _ in range(20):
        result = await box.run(["sh", "-c", "sleep 1000 & exit 0"])
        assert (result.code, result.killed) == (0, "")


async def test_timeout_ends_what_ignores_sigterm_and_has_its_own_session(box: Lease) -> None:
    attack = (
        "import os, signal, time\n"
        "signal.signal(signal.SIGTERM, signal.SIG_IGN)\n"
        "if os.fork() == 0: os.setsid()\n"
        "print('up', flush=True)\ntime.sleep(1000)"
    )
    result = await python(box, attack, timeout_s=1.0)
    assert (result.code, result.killed, result.stdout) == (None, "timeout", b"up\nup\n")
    assert 1.0 <= result.duration_s < 3.0
    assert len(process_tree(pid_of(box))) == 2


# ---- limits


async def test_fork_bomb(box: Lease) -> None:
    bomb = "import os\nwhile True:\n    try: os.fork()\n    except OSError: pass"
    result = await python(box, bomb, timeout_s=10.0)
    assert result.killed == "processes"
    assert len(process_tree(pid_of(box))) == 2
    assert (await box.run(["echo", "alive"])).stdout == b"alive\n"


async def test_memory_of_many_processes(box: Lease) -> None:
    bomb = (
        "import os, time\n"
        "for _ in range(8):\n"
        "    if os.fork() == 0:\n"
        "        held = []\n"
        "        for _ in range(15):\n"
        "            held.append(b'x' * (8 << 20)); time.sleep(0.02)\n"
        "        time.sleep(30)\n"
        "time.sleep(30)"
    )
    result = await python(box, bomb, timeout_s=20.0)
    assert (result.code, result.killed) == (None, "memory")
    assert (await box.run(["echo", "alive"])).stdout == b"alive\n"


async def test_memory_of_one_process_meets_a_limit(box: Lease) -> None:
    result = await python(box, "held = []\nwhile True: held.append(b'x' * (64 << 20))")
    assert result.killed == "memory" or b"MemoryError" in result.stderr


async def test_memory_shared_by_forks_is_counted_once(box: Lease) -> None:
    code = "import os, time\nheld = b'x' * (100 << 20)\nfor _ in range(6):\n    if os.fork() == 0: break\ntime.sleep(1)"
    result = await python(box, code)
    assert (result.code, result.killed) == (0, "")


async def test_memory_that_no_process_owns_is_refused(box: Lease) -> None:
    assert outside("import os; os.memfd_create('x')").returncode == 0
    assert b"PermissionError" in (await python(box, "import os; os.memfd_create('x')")).stderr
    shm = "import ctypes; print(ctypes.CDLL(None).shmget(0, 1 << 30, 0o1600))"
    assert (await python(box, shm)).stdout == b"-1\n"


async def test_disk(box: Lease) -> None:
    code = (
        "import errno, os\n"
        "for place in ('/box', '/tmp', '/dev/shm'):\n"
        "    total = 0\n"
        "    try:\n"
        "        for number in range(1000):\n"
        "            with open(f'{place}/{number}', 'wb') as file: total += file.write(bytes(1 << 20))\n"
        "    except OSError as error: print(place, total >> 20, errno.errorcode[error.errno])\n"
    )
    result = await python(box, code)
    assert result.stdout == b"/box 16 ENOSPC\n/tmp 8 ENOSPC\n/dev/shm 8 ENOSPC\n"


async def test_output_flood_is_counted_not_kept(box: Lease) -> None:
    process = psutil.Process()
    before = process.memory_info().rss
    result = await box.run(["head", "-c", str(1 << 30), "/dev/zero"], cap_bytes=1000, timeout_s=60.0)
    assert (result.code, len(result.stdout), result.stdout_bytes) == (0, 1000, 1 << 30)
    assert process.memory_info().rss - before < 20 << 20
    runner = process_tree(pid_of(box))[-1]
    assert psutil.Process(runner).memory_info().rss < 30 << 20


async def test_endless_output_is_ended(box: Lease) -> None:
    result = await box.run(["sh", "-c", "yes >&2"], cap_bytes=10, timeout_s=1.0)
    assert result.killed in ("timeout", "output")
    assert (result.stderr, result.stdout) == (b"y\n" * 5, b"")


# ---- files read by the host


async def test_links_and_devices_are_not_read(box: Lease) -> None:
    await box.write({"real/file": b"content"})
    made = await box.run(
        ["sh", "-c", "ln -s /etc/passwd link; ln -s real folder; mkfifo fifo; mkdir dir; ln -s link chain; ln -s . dot"]
    )
    assert made.code == 0
    assert await box.read("real/file") == b"content"
    assert (await box.run(["cat", "link"])).stdout.startswith(b"agent:")  # the link itself works, inside
    for path in ("link", "folder/file", "fifo", "dir", "chain", "dot/real/file", "../etc/passwd", "/etc/passwd", ""):
        started = time.monotonic()
        with pytest.raises(OSError):
            await box.read(path)
        assert time.monotonic() - started < 2
    with pytest.raises(OSError):
        await box.write({"link": b"x"})
    with pytest.raises(OSError):
        await box.write({"folder/new": b"x"})


async def test_read_keeps_to_its_cap(box: Lease) -> None:
    await box.run(["sh", "-c", "head -c 5000 /dev/zero > big; truncate -s 10M sparse"])
    assert len(await box.read("big")) == 5000
    with pytest.raises(OSError, match="exceeds the cap"):
        await box.read("sparse", cap_bytes=1 << 20)


async def test_odd_names(box: Lease) -> None:
    await box.write({"-rf": b"1", "a\nb": b"2", "ü/…": b"3"})
    assert await box.read("a\nb") == b"2"
    assert await box.read("ü/…") == b"3"
    with pytest.raises(FileNotFoundError):
        await box.read("no")
