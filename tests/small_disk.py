"""A disk that is soon full: a small tmpfs, mounted for a while."""

from __future__ import annotations

import contextlib
import os
import shutil
import subprocess
from collections.abc import Iterator
from pathlib import Path

import pytest


@contextlib.contextmanager
def small_disk(mount: Path, size: str) -> Iterator[Path]:
    """`size`: as mount takes it, such as 48m. Skips the test where it can't be mounted."""
    if os.geteuid():
        pytest.skip("needs root, to mount a small tmpfs")
    mount.mkdir()
    command = ["mount", "-t", "tmpfs", "-o", f"size={size}", "tmpfs", mount]
    done = subprocess.run(command, capture_output=True, text=True)
    if done.returncode:
        if "permission denied" in done.stderr:
            pytest.skip("root may not mount here (a container without CAP_SYS_ADMIN)")
        pytest.fail(done.stderr)
    try:
        yield mount
    finally:
        subprocess.run(["umount", "-l", mount], check=False)


def fill(disk: Path, left: int = 0) -> Path:
    """Leave so many bytes or fewer, whatever others take and give back meanwhile; the file that takes the rest."""
    path = disk / "ballast"
    with path.open("wb") as ballast:
        for _ in range(100):
            free = shutil.disk_usage(disk).free
            if free <= left:
                break
            with contextlib.suppress(OSError):
                os.posix_fallocate(ballast.fileno(), os.fstat(ballast.fileno()).st_size, free - left)
    return path
