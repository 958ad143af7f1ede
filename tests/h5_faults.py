"""Every write of a shard fails in turn, whoever makes it, Python or HDF5; in a process of its own, for it may crash.

    LD_PRELOAD=h5_faults.so python h5_faults.py FOLDER     prints {fault: how many places it came at}

Without the preloaded library there is only the limit on a file's size, which needs no compiler.
"""

from __future__ import annotations

import asyncio
import ctypes
import errno
import functools
import itertools
import json
import resource
import shutil
import sys
from pathlib import Path

import h5py
from store_parts import open_log, run_folder, trajectory

from hpcrl.layout import RunPaths
from hpcrl.store.compact import compact, shards
from hpcrl.store.segment import CLOSED, segments
from hpcrl.store.shard import Shard

FAULTS = {  # errno, whether it lasts
    "ENOSPC once": (errno.ENOSPC, 0),
    "ENOSPC from then on": (errno.ENOSPC, 1),
    "EIO once": (errno.EIO, 0),
    "a short write": (0, 0),
}


def write(paths: RunPaths) -> set[str]:
    """Closed segments to compact; their records' hashes."""

    async def fill() -> set[str]:
        log = open_log(paths)
        records = trajectory("a", steps=20) + trajectory("b")
        await log.append([record.frame() for record in records])
        await log.close()
        return {record.hash for record in records}

    return asyncio.run(fill())


def limited(paths: RunPaths, size: int) -> bool:
    """Compact where no file may grow beyond `size` bytes (an error, as Python ignores SIGXFSZ); whether it failed."""
    _, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (size, hard))
    try:
        compact(paths)
    except OSError:
        return True
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (hard, hard))
    return False


def shimmed(paths: RunPaths, shim: ctypes.CDLL, at: int, number: int, lasts: int) -> bool:
    """Compact with a call that fails. Whether there were so many calls."""
    shim.fault_arm(bytes(paths.shards), at, number, lasts)
    refused = False
    try:
        compact(paths)
    except OSError:
        refused = True
    met = shim.fault_count() > 0
    shim.fault_arm(b"", 0, 0, 0)
    assert met or not refused
    return met


def judge(paths: RunPaths, expected: set[str], fault: str) -> None:
    """What is there is whole; compaction, done again, succeeds and leaves nothing behind."""
    made = shards(paths)
    for path in made:
        Shard(path).check()
    assert made or segments(paths.log, CLOSED), f"{fault}: records are gone"
    assert not compact(paths).refused, fault
    (path,) = shards(paths)
    assert not segments(paths.log, CLOSED) and list(paths.shards.iterdir()) == [path], fault
    Shard(path).check()
    with h5py.File(path) as file:
        assert {hash.decode() for hash in file["steps"]["hash"]} == expected, fault


def main(folder: Path) -> None:
    counts = {}
    first = run_folder(folder / "first")
    expected = write(first)
    shim = ctypes.CDLL(None)
    trials = {"file size limit": lambda paths, at: limited(paths, 200 + 400 * at)}
    if hasattr(shim, "fault_arm"):
        for name, (number, lasts) in FAULTS.items():
            trials[name] = functools.partial(
                lambda paths, at, number, lasts: shimmed(paths, shim, at, number, lasts), number=number, lasts=lasts
            )
    for name, trial in trials.items():
        for at in itertools.count(1):
            paths = RunPaths(folder / f"{name} {at}".replace(" ", "-"))
            shutil.copytree(first.root, paths.root)
            met = trial(paths, at)
            judge(paths, expected, f"{name}, {at}")
            if not met:
                break
        counts[name] = at - 1
    print(json.dumps(counts))


if __name__ == "__main__":
    main(Path(sys.argv[1]))
