"""`hpcrl sandbox attack`: every attack of the table, by the command; and that the suite can fail.

The attacks themselves are in `hpcrl/sandbox/attacks/`, one property each.
"""

from __future__ import annotations

import dataclasses
import json
import os
import subprocess
import sys
from typing import Any

import pytest

from hpcrl.sandbox.attacks import ATTACKS, named
from hpcrl.sandbox.attacks.words import Attack
from hpcrl.sandbox.backend import Backend, Limits, find_backend
from hpcrl.sandbox.judge import Judged, run_attacks

# Becomes another user once all is imported: our interpreter may lie where that user can't go.
AS_USER = """
import ctypes, os, sys
import hpcrl.cli, hpcrl.sandbox.judge
if int(sys.argv[1]) != os.getuid():
    os.setgroups([])
    os.setresgid(*[int(sys.argv[1])] * 3)
    os.setresuid(*[int(sys.argv[1])] * 3)
    ctypes.CDLL(None).prctl(4, 1, 0, 0, 0)  # PR_SET_DUMPABLE, as any process of that user is
del sys.argv[1]
hpcrl.cli.main()
"""
NO_BARE_RUN = {
    "fork-storm", "real-time-priority", "kill-all", "clock", "core-pattern", "sysrq", "kernel-messages",
    "release-agent", "device-node", "load-module",
}  # fmt: skip


@pytest.mark.parametrize("uid", [os.getuid(), *([60998] if os.getuid() == 0 else [])])
def test_every_attack_is_held(uid: int) -> None:
    command = [sys.executable, "-c", AS_USER, str(uid), "sandbox", "attack", "--backend", "bwrap", "--json"]
    result = subprocess.run(command, capture_output=True, text=True, timeout=280)
    report = json.loads(result.stdout)
    rows: list[dict[str, Any]] = report["attacks"]
    assert (report["backend"], report["uid"]) == ("bwrap", uid)
    assert [row for row in rows if not row["held"]] == []
    assert [row for row in rows if row["works_bare"] is False] == []
    assert {row["name"] for row in rows} == {attack.name for attack in ATTACKS}
    assert len({row["name"] for row in rows}) == len(rows) >= 50
    unproven = {row["name"]: row["bare"] for row in rows if row["works_bare"] is None}
    for name in set(unproven) - NO_BARE_RUN:  # this machine refuses it to anybody, in a way that the table expects
        assert unproven[name].split()[0] in named([name])[0].machine
    assert result.returncode == 0, result.stderr


def test_what_cannot_be_attacked_is_named() -> None:
    for arguments, words in ((["--backend", "dock"], "there are: bwrap"), (["--only", "leave-file"], "'leave-files'?")):
        command = [sys.executable, "-m", "hpcrl.cli", "sandbox", "attack", *arguments]
        result = subprocess.run(command, capture_output=True, text=True, timeout=60)
        assert result.returncode == 2
        assert words in result.stderr


class Weak(Backend):
    """A sandbox without one of its walls: words of bwrap's command line, or of the runner, left out."""

    without: tuple[str, ...] = ()
    runner: tuple[str, str] = ("", "")

    def argv(self, limits: Limits, files: dict[str, int], filter_fd: int) -> list[str]:
        fd = files["/run/runner.py"]
        text = os.pread(fd, 1 << 20, 0).decode()
        os.pwrite(fd, text.replace(*self.runner).encode().ljust(len(text.encode())), 0)
        argv = super().argv(limits, files, filter_fd)
        for words in self.without:
            first, *_ = parts = words.split()
            at = argv.index(first)
            while argv[at : at + len(parts)] != parts:
                at = argv.index(first, at + 1)
            del argv[at : at + len(parts) + (first == "--seccomp")]
        return argv


def weak(without: tuple[str, ...] = (), runner: tuple[str, str] = ("", "")) -> Backend:
    found = find_backend()
    values = {field.name: getattr(found, field.name) for field in dataclasses.fields(found)}
    return type("Weaker", (Weak,), {"without": without, "runner": runner})(**values)  # type: ignore[no-any-return]


async def attacked(backend: Backend, *names: str) -> dict[str, Judged]:
    return {row.name: row for row in await run_attacks(backend, named(names))}


@pytest.mark.parametrize(
    ("without", "names"),
    [
        (("--unshare-net",), ["loopback", "loopback-udp", "own-address", "abstract-socket"]),
        (("--unshare-ipc",), ["memory-segment-of-others"]),
        (("--seccomp",), ["memory-of-nobody-memfd", "io-uring", "vsock"]),
        (("--remount-ro /proc",), ["namespaced-settings"]),
        (("--disable-userns",), ["new-user-namespace"]),
        (("--remount-ro /",), ["write-elsewhere"]),
    ],
)
async def test_a_missing_wall_is_seen(without: tuple[str, ...], names: list[str]) -> None:
    for row in (await attacked(weak(without), *names, "read-secret")).values():
        assert row.held == (row.name == "read-secret" or row.works_bare is None), row


async def test_a_runner_that_can_be_taken_over_is_seen() -> None:
    backend = weak(runner=("prctl(PR_SET_DUMPABLE, 0, 0, 0, 0)", "getpid() - 1"))
    rows = await attacked(backend, "read-runner-memory", "steal-runner-fd", "write-runner-memory-blind", "stop-runner")
    assert {name for name, row in rows.items() if row.held} == {"stop-runner"}  # pid 1 stays pid 1


async def test_a_reset_that_forgets_is_seen() -> None:
    backend = weak(runner=("                wipe(place)\n", "                pass\n"))
    rows = await attacked(backend, "leave-files", "leave-odd-names", "leave-process")
    assert {name for name, row in rows.items() if row.held} == {"leave-process"}


async def test_a_program_that_breaks_holds_nothing_off() -> None:
    programs = {"typo": "wonn('x')", "module": "import no_such", "silent": "pass", "hangs": "time.sleep(60)"}
    attacks = [
        Attack(name=name, tries="nothing", program=program, bare="a test", timeout_s=1.0)
        for name, program in programs.items()
    ]
    attacks.append(
        Attack(name="other", tries="nothing", program="open('/none')", bare="a test", refusals=("EPERM", "EROFS"))
    )
    rows = await run_attacks(find_backend(), attacks)
    assert [(row.name, row.held) for row in rows] == [(attack.name, False) for attack in attacks]
    assert "NameError" in rows[0].evidence
    assert "timeout" in rows[3].evidence
    assert rows[4].evidence.startswith("refused by another error than expected: ENOENT")
