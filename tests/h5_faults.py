"""Run with h5_faults.so preloaded: every call by which a shard is written fails in turn, those of HDF5 too.

    LD_PRELOAD=h5_faults.so python h5_faults.py FOLDER     prints {fault: number of calls}
"""

from __future__ import annotations

import asyncio
import contextlib
import ctypes
import errno
import itertools
import json
import sys
from pathlib import Path

import h5py
from store_parts import open_log, run_folder, trajectory

from hpcrl.layout import RunPaths
from hpcrl.store.compact import compact, shards
from hpcrl.store.segment import CLOSED, segments
from hpcrl.store.shard import Shard

FAULTS = {
    **{f"{errno.errorcode[number]} once": (number, 0) for number in (errno.ENOSPC, errno.EDQUOT, errno.EIO)},
    **{f"{errno.errorcode[number]} from then on": (number, 1) for number in (errno.ENOSPC, errno.EIO, errno.EROFS)},
    "a short write": (0, 0),
    "short writes from then on": (0, 1),
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


def main(folder: Path) -> None:
    shim = ctypes.CDLL(None)
    counts = {}
    for name, (number, lasts) in FAULTS.items():
        for at in itertools.count(1):
            paths = run_folder(folder / f"{name} {at}".replace(" ", "-"))
            expected = write(paths)
            shim.fault_arm(bytes(paths.shards), at, number, lasts)
            refused = False
            try:
                compact(paths)
            except OSError:
                refused = True
            count = shim.fault_count()
            shim.fault_arm(b"", 0, 0, 0)
            made = shards(paths)
            for path in made:
                Shard(path).check()  # what is there is whole
            assert made or segments(paths.log, CLOSED), f"{name} at call {at}: records are gone"
            compact(paths)
            (path,) = shards(paths)
            assert not segments(paths.log, CLOSED) and list(paths.shards.iterdir()) == [path], f"{name} at call {at}"
            Shard(path).check()
            with h5py.File(path) as file:
                assert {hash.decode() for hash in file["steps"]["hash"]} == expected, f"{name} at call {at}"
            if count <= 0:
                assert not refused
                break
        counts[name] = at - 1
    print(json.dumps(counts))


if __name__ == "__main__":
    with contextlib.suppress(KeyboardInterrupt):
        main(Path(sys.argv[1]))
