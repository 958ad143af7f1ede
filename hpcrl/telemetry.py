"""Structured logs: one JSON line per event with time, role, job, node and process."""

from __future__ import annotations

import json
import logging
import os
import sys
from pathlib import Path

from hpcrl.layout import node_name


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
