"""Structured logs: one JSON line per event with time, role, job, node and process. What each task of a job has used."""

from __future__ import annotations

import contextlib
import json
import logging
import os
import sys
import threading
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import psutil

from hpcrl.layout import node_name, publish_json

logger = logging.getLogger(__name__)

SAMPLE_S, WRITE_S = 5.0, 60.0  # between two looks at a task's processes; between two writes of what it has used


class JsonLines(logging.Formatter):
    def __init__(self, role: str, job: str) -> None:
        super().__init__()
        self._fixed = {"role": role, "job": job, "node": node_name(), "pid": os.getpid()}

    def format(self, record: logging.LogRecord) -> str:
        row = {
            "time": round(record.created, 3),
            "level": record.levelname.lower(),
            **self._fixed,
            "logger": record.name,
            "message": record.getMessage(),
        }
        if record.exc_info:
            row["traceback"] = self.formatException(record.exc_info)
        return json.dumps(row)


def start_logging(folder: Path, role: str, job: str) -> None:
    """Send this process's logs to `folder/<role>-<job>.jsonl`, warnings to standard error too (the job's own log)."""
    file = logging.FileHandler(folder / f"{role}-{job}.jsonl", encoding="utf-8")
    file.setFormatter(JsonLines(role, job))
    stream = logging.StreamHandler(sys.stderr)
    stream.setLevel(logging.WARNING)
    stream.setFormatter(logging.Formatter("%(asctime)s %(levelname)s %(name)s: %(message)s"))
    logging.basicConfig(level=logging.INFO, handlers=[file, stream], force=True)
    for name in ("httpx", "httpcore", "distributed.core", "distributed.scheduler", "distributed.worker", "submitit"):
        logging.getLogger(name).setLevel(logging.WARNING)


class Meter:
    """For how long one thing, an engine or a rank, was in each use. It is in one at a time: they add up to its life."""

    def __init__(self, use: str = "starting") -> None:
        self._use, self._since = use, time.monotonic()
        self._spent: dict[str, float] = {}
        self._lock = threading.Lock()  # one thread changes the use, another reads

    def to(self, use: str) -> None:
        """From now on it is in this use."""
        with self._lock:
            now = time.monotonic()
            self._spent[self._use] = self._spent.get(self._use, 0.0) + now - self._since
            self._use, self._since = use, now

    def seconds(self) -> dict[str, float]:
        """By use, as of now."""
        self.to(self._use)
        return dict(self._spent)


class Usage:
    """What this process and those below it use, as one task of a job, in a file: written at its start, after 5, 10, 20
    seconds and so on, each minute, and at its end, unless it is killed. What can't be written is a warning: no run ends
    for its accounts.

        {…facts, "began": wall, "wall": of this writing, "seconds", "ended", "cpu_s", "peak_bytes", "generated",
         "units": [{"gpus", "uses": {use: seconds}}]}       a unit's uses add up to the seconds
    """

    def __init__(self, path: Path, **facts: Any) -> None:
        self._path = path
        born = min(psutil.Process().create_time(), time.time())
        self._facts = {**facts, "began": born}
        self._began = time.monotonic() - (time.time() - born)
        self._cpu_s, self._peak = 0.0, 0
        self._over = threading.Event()
        self._thread = threading.Thread(target=self._keep, daemon=True)
        # Set by the role, where it has any: its engines or its rank with the GPUs of each; processes that do its work
        # and are not below it; how many tokens its engines have made.
        self.units: Sequence[tuple[int, Meter]] = ()
        self.pids: Callable[[], Sequence[int]] = list
        self.generated: Callable[[], int | None] = lambda: None

    def __enter__(self) -> Usage:
        self._write(ended=False)
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._over.set()
        self._thread.join()
        self._write(ended=True)

    def _keep(self) -> None:
        due = SAMPLE_S
        while not self._over.wait(SAMPLE_S):
            self._sample()
            age = time.monotonic() - self._began
            if age >= due:
                self._write(ended=False)
                due = min(2 * age, age + WRITE_S)

    def _sample(self) -> None:
        """CPU time of all processes, of those that ended what their parents know; memory that is resident in all of
        them at once, where what they share counts for each."""
        processes: dict[int, psutil.Process] = {}
        for pid in (os.getpid(), *filter(None, self.pids())):
            with contextlib.suppress(psutil.Error):
                process = psutil.Process(pid)
                processes |= {one.pid: one for one in (process, *process.children(recursive=True))}
        cpu_s, resident = 0.0, 0
        for process in processes.values():
            with contextlib.suppress(psutil.Error), process.oneshot():
                cpu_s += sum(process.cpu_times()[:4])  # user, system, and both of its children that ended
                resident += process.memory_info().rss
        self._cpu_s, self._peak = max(self._cpu_s, cpu_s), max(self._peak, resident)

    def _write(self, *, ended: bool) -> None:
        self._sample()
        spent = [(gpus, meter.seconds()) for gpus, meter in self.units]
        seconds = time.monotonic() - self._began
        for _, uses in spent:  # what was before there was a meter
            uses["starting"] = uses.get("starting", 0.0) + seconds - sum(uses.values())
        units = [{"gpus": gpus, "uses": uses} for gpus, uses in spent]
        row = {
            **self._facts, "wall": time.time(), "seconds": seconds, "ended": ended, "cpu_s": self._cpu_s,
            "peak_bytes": self._peak, "generated": self.generated(), "units": units,
        }  # fmt: skip
        try:
            self._path.parent.mkdir(parents=True, exist_ok=True)
            publish_json(self._path, row)
        except OSError as error:
            logger.warning("what this job uses is not on record: %s", error)
