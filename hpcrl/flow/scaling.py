"""How many jobs an elastic pool has."""

from __future__ import annotations

import math

from hpcrl.config import SandboxPool

SHRINK_S = 120.0  # for so long a pool must have been too large


class Scaling:
    """Grows a pool at once where there is use for more; shrinks it to what it needed at most of late."""

    def __init__(self) -> None:
        self._since: float | None = None  # when it was first seen to be too large
        self._most = 0  # jobs that were needed since then

    def jobs(self, pool: SandboxPool, places: int, used: int, short: int, now: float) -> int:
        """How many it is to have, within its bounds.

        `places`: trajectories that one job takes. `used`: those that have a sandbox. `short`: those that could run if
        they had one. `now` in seconds.
        """
        needed = min(max(math.ceil((used + short) / places), pool.minimum_jobs), pool.maximum_jobs)
        if needed >= pool.jobs:
            self._since = None
            return needed
        if self._since is None:
            self._since, self._most = now, needed
        self._most = max(self._most, needed)
        if now - self._since < SHRINK_S:
            return pool.jobs
        self._since = None
        return self._most
