"""A run folder in Python: submit a task to a running run, follow a trajectory's receipts. Files alone, no Dask."""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator
from pathlib import Path

from hpcrl.config import load_resolved
from hpcrl.layout import RunPaths, publish_json
from hpcrl.store.index import Store
from hpcrl.store.records import Kind
from hpcrl.types import ConfigError, Ended, Receipt, Task


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
        environment = load_resolved(self._paths.config).environment.name
        if task.environment != environment:
            raise ConfigError(f"task of environment {task.environment!r}: this run has {environment!r}")
        if self._paths.stopped.exists():
            raise ConfigError(f"{self._paths.root}: is not running; `hpcrl resume` continues one that was stopped")
        trajectory = f"{task.id}.u{time.time_ns()}.0"
        row = {
            "command": "submit",
            "trajectory": trajectory,
            "task": {"environment": task.environment, "payload": dict(task.payload), "kind": task.kind},
        }
        publish_json(self._paths.inbox / f"{trajectory}.json", row)
        return trajectory

    def result(self, trajectory: str) -> Ended | None:
        """How a trajectory ended (status, rewards, fault, counts); None while it has not."""
        with Store(self._paths, open_segments=True, only=trajectory) as store:
            head = store.head(trajectory)
            return store.ended(trajectory, head) if head else None

    async def steps(self, trajectory: str, *, poll_s: float = 0.5) -> AsyncIterator[Receipt]:
        """Each durable record's receipt, in chain order, until the trajectory has ended or the run came to rest.

        Reads the log, which is the truth: a control that was restarted meanwhile loses none.
        """
        seen: set[str] = set()
        over = False
        with Store(self._paths, open_segments=True) as store:
            while True:
                for receipt in store.receipts(trajectory):
                    if receipt.hash not in seen:
                        seen.add(receipt.hash)
                        yield receipt
                        if receipt.kind == Kind.END.name:
                            return
                if over:
                    return
                await asyncio.sleep(poll_s)
                over = self._paths.stopped.exists()
                await asyncio.to_thread(store.refresh, anew=over)
