"""Makes the small shard and segment that are kept of each version of the store's formats, and says what is in them.

Run it once when SCHEMA or FORMAT goes up (`python tests/keep.py`), before anything else changes; what is there already
is never made again. tests/test_store_kept.py opens all of them with the reader of today.
"""

from __future__ import annotations

import asyncio
import json
import shutil
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
from store_parts import act, adopt, end, observe, open_log, run_folder, trajectory

from hpcrl.store.compact import compact, shards
from hpcrl.store.records import COLUMNS, FORMAT, Kind, Record, content
from hpcrl.store.segment import CLOSED, segments
from hpcrl.store.shard import SCHEMA

KEPT = Path(__file__).with_name("kept")


def told(record: Record) -> dict[str, Any]:
    """A record as plain JSON."""
    names = ("trajectory", "attempt", "step", "parent", "hash")
    arrays = {name: np.asarray(getattr(record, name)).tolist() for name in COLUMNS}
    return {"kind": record.kind.name, "meta": record.meta, **{name: getattr(record, name) for name in names}, **arrays}


def sample() -> list[Record]:
    """Every kind of record: whole trajectories, an open one, two attempts, a score, a change of state, a content."""
    whole = trajectory("find-x.p1n0.0", steps=3)
    opening, first = whole[0], adopt("find-x.p1n0.1")
    said = act(first, 0, [7, 8, 9], root=opening.hash, version=2)
    again = adopt("find-x.p1n0.1", attempt=2, parent=said.hash, step=0)
    seen = observe(again, [40, 41], text="naïve \U0001f600 \ud800")
    last = act(seen, 1, [5], version=3)
    orphan = observe(said, [1])
    score = {"source": "judge", "value": 0.25, "wall": 5.0}
    change = {"state": "RUNNING", "fault": None, "waited_s": 0.5, "wall": 1.0, "mono": 2.0, "boot_id": "b"}
    name = whole[1].trajectory
    beside = [
        Record(kind=Kind.REWARD, trajectory=name, step=1, meta=score),
        Record(kind=Kind.TRANSITION, trajectory=name, attempt=1, meta=change),
    ]
    open_one = adopt("find-y.p1n0.0")
    return [
        content(b"\x00 what no model saw \xff"),
        *whole,
        first,
        said,
        again,
        orphan,
        seen,
        last,
        end(last, reward=0.0),
        *beside,
        open_one,
    ]


async def _write(paths: Any, records: Sequence[Record]) -> None:
    log = open_log(paths)
    await log.append([record.frame() for record in records])
    await log.close()


def main() -> None:
    records = sample()
    with tempfile.TemporaryDirectory() as folder:
        paths = run_folder(Path(folder))
        asyncio.run(_write(paths, records))
        (segment,) = segments(paths.log, CLOSED)
        KEPT.mkdir(exist_ok=True)
        for name, number, made in (("format", FORMAT, segment), ("schema", SCHEMA, None)):
            if made is None:
                compact(paths)
                (made,) = shards(paths)
            place = KEPT / f"{name}-{number}{made.suffix}"
            if not place.exists():
                shutil.copy(made, place)
                lines = [json.dumps(told(record), sort_keys=True) for record in records]
                place.with_name(f"{place.name}.jsonl").write_text("\n".join(lines) + "\n")
                print(f"made {place}")


if __name__ == "__main__":
    main()
