"""Store, ledger, progress and weights with the roles on two mounts of one folder, each of which sees late what the other
did (slow_mount.py): nothing acknowledged is lost or doubled, nothing crashes, late sight only delays."""

from __future__ import annotations

import asyncio
import json
import os
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from slow_mount import slow_mounts
from store_parts import act, adopt, end, observe, open_log, run_folder, trajectory
from test_store_ledger import entry, names, update

from hpcrl.config import Phase
from hpcrl.layout import ProcessId, RunPaths, next_incarnation
from hpcrl.learner.feed import Feed, read_rows
from hpcrl.store.compact import compact, seal_dead_here, shards
from hpcrl.store.index import Store
from hpcrl.store.ledger import LedgerReader, LedgerWriter, ProgressReader, ProgressWriter, entries, lineage
from hpcrl.store.records import Record, prompt
from hpcrl.store.segment import CLOSED, OPEN, Header, segments
from hpcrl.store.verify import verify
from hpcrl.types import Entry, StoreError

pytestmark = pytest.mark.timeout(300)
SECONDS = 3.0


@pytest.fixture
def nodes(tmp_path: Path) -> Iterator[tuple[RunPaths, RunPaths]]:
    """One run folder as two nodes see it."""
    with slow_mounts(tmp_path, SECONDS) as (a, b):
        yield run_folder(a / "run"), RunPaths(b / "run")


async def write(paths: RunPaths, *records: Record, node: str = "n1") -> None:
    log = open_log(paths, node)
    for record in records:
        await log.append([record.frame()])
    await log.close()


def until(condition: Callable[[], Any], within_s: float = SECONDS + 2) -> Any:
    began = time.monotonic()
    while not (found := condition()):
        assert time.monotonic() - began < within_s, "late sight must only delay"
        time.sleep(0.05)
    return found


def there(paths: RunPaths) -> list[str]:
    """The hashes of all rows of all files, as a reader without caches finds them."""
    backing = RunPaths(paths.root.parent.parent / "shared" / "run")
    found = []
    with Store(backing) as store:
        for path in shards(backing):
            shard = store.shard(path.name)
            found += [shard.record(row).hash for row in range(len(shard))]
        found += [row.hash for name in store.names() for row in store.rows(name).values() if row.file not in found]
    return found
