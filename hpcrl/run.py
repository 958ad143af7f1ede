"""A run folder in Python: submit a task to a running run, follow a trajectory's receipts. Files alone, no Dask."""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator
from pathlib import Path

from hpcrl.layout import RunPaths, publish_json
from hpcrl.store.index import Store
from hpcrl.store.records import Kind
from hpcrl.types import Receipt, Task


class Run:
    """A run folder in Python: submit tasks to a running run, follow a trajectory's receipts."""

    def __init__(self, paths: RunPaths) -> None:
        self._paths = paths

    @classmethod
    def open(cls, run: str | Path) -> Run:
        """Raises StoreError when `run` is no run folder."""
        return cls(RunPaths.of(run))

    def submit(self, task: Task) -> str:
        """Ask the run to try `task` beside its training (the ledger never sees it); returns the trajectory's id.

        The request is a file in the run folder, kept until the trajectory has ended, so no restart loses it.
        """
        trajectory = f"{task.id}.u{time.time_ns()}.0"
        row = {
            "command": "submit",
            "trajectory": trajectory,
            "task": {"environment": task.environment, "payload": dict(task.payload), "kind": task.kind},
        }
        publish_json(self._paths.inbox / f"{trajectory}.json", row)
        return trajectory

    async def steps(self, trajectory: str, *, poll_s: float = 0.5) -> AsyncIterator[Receipt]:
        """Each durable record's receipt, in chain order, from the first on, until the trajectory has ended.

        Reads the log, which is the truth: a control that was restarted meanwhile loses none.
        """
        seen: set[str] = set()
        with Store(self._paths, open_segments=True) as store:
            while True:
                for receipt in store.receipts(trajectory):
                    if receipt.hash not in seen:
                        seen.add(receipt.hash)
                        yield receipt
                        if receipt.kind == Kind.END.name:
                            return
                await asyncio.sleep(poll_s)
                await asyncio.to_thread(store.refresh)
