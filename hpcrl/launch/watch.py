"""Whether control is there, for those that it has jobs for."""

from __future__ import annotations

import contextlib
import logging
import time

from hpcrl.config import Config
from hpcrl.layout import RunPaths, read_json
from hpcrl.types import StoreError

logger = logging.getLogger(__name__)


class ControlWatch:
    """Tells when control has been gone for too long: by its heartbeat standing still, not by comparing clocks."""

    LOOK_S = 5.0

    def __init__(self, paths: RunPaths, config: Config) -> None:
        self._paths, self._patience_s = paths, config.launch.control_timeout_s
        self._seen: float | None = None
        self._moved, self._looked = time.monotonic(), 0.0

    def gone(self) -> bool:
        now = time.monotonic()
        if now - self._looked > self.LOOK_S:
            self._looked = now
            with contextlib.suppress(StoreError):  # junk is no word of control's
                row = read_json(self._paths.heartbeat)
                if row is not None and row.get("wall") != self._seen:
                    self._seen, self._moved = row.get("wall"), now
        if now - self._moved <= self._patience_s:
            return False
        logger.warning("no control for %g s: this role ends", self._patience_s)
        return True
