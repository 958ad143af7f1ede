"""What a run folder is made with: stripes on Lustre, set through an `lfs` that stands in for the real one."""

from __future__ import annotations

import logging
from pathlib import Path

import pytest

from hpcrl.layout import RunPaths

# Says what it was asked; knows a file system of $OSTS OSTs, one of them switched off, where $LUSTRE is set.
LFS = """#!/bin/sh
echo "$*" >> "$CALLS"
case $1 in
getstripe) [ -n "$LUSTRE" ] || { echo "error: getstripe failed: Inappropriate ioctl for device" >&2; exit 25; } ;;
osts)
    echo "OBDS:"
    for at in $(seq 0 $((OSTS - 1))); do echo "$at: scratch-OST000${at}_UUID ACTIVE"; done
    echo "$OSTS: scratch-OST000${OSTS}_UUID INACTIVE" ;;
setstripe) [ -z "$FAILS" ] || { echo "error: setstripe: $FAILS" >&2; exit 1; } ;;
esac
"""


@pytest.fixture
def calls(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    lfs = tmp_path / "bin" / "lfs"
    lfs.parent.mkdir()
    lfs.write_text(LFS)
    lfs.chmod(0o755)
    for name, value in {"PATH": f"{lfs.parent}:/usr/bin:/bin", "CALLS": f"{tmp_path}/calls", "LUSTRE": "yes"}.items():
        monkeypatch.setenv(name, value)
    for name in ("OSTS", "FAILS"):
        monkeypatch.delenv(name, raising=False)
    return tmp_path / "calls"


@pytest.mark.parametrize(("osts", "middle", "most"), [(1, 1, 1), (3, 3, 3), (6, 4, 6), (9, 4, 8)])
def test_a_run_folder_is_striped(
    calls: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, osts: int, middle: int, most: int
) -> None:
    monkeypatch.setenv("OSTS", str(osts))
    run = tmp_path / "my run"
    RunPaths(run).make()
    asked, listed, *set_ = calls.read_text().splitlines()
    assert asked == f"getstripe -d {run}/log" and listed == f"osts {run}/log"
    layout = f"setstripe -E 64M -c 1 -E 1G -c {middle} -E -1 -c {most}"
    assert set_ == [f"{layout} {run}/{folder}" for folder in ("log", "shards", "weights", "checkpoints")]
    RunPaths(run).make()  # a resume
    assert len(calls.read_text().splitlines()) == 6, "what a user set since stays"


def test_other_file_systems_are_left_alone(calls: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("LUSTRE")
    RunPaths(tmp_path / "run").make()
    assert calls.read_text() == f"getstripe -d {tmp_path}/run/log\n"
    (tmp_path / "bin" / "lfs").unlink()
    RunPaths(tmp_path / "other").make()
    assert len(calls.read_text().splitlines()) == 1


def test_what_lfs_refuses_is_said_and_no_hindrance(
    calls: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setenv("OSTS", "2")
    monkeypatch.setenv("FAILS", "Operation not permitted")
    with caplog.at_level(logging.WARNING, "hpcrl"):
        RunPaths(tmp_path / "run").make()
    command = f"lfs setstripe -E 64M -c 1 -E 1G -c 2 -E -1 -c 2 {tmp_path}/run/log"
    assert caplog.messages == [f"no stripes set: `{command}`: error: setstripe: Operation not permitted"]
    assert (tmp_path / "run" / "evals").is_dir() and len(calls.read_text().splitlines()) == 3
