"""A sandbox node's process whose sandboxes end in every way there is; the last way is that it is killed itself.

python tests/sandbox_victim.py SEED COUNT       prints "up" with each sandbox that stands, and "over"
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import random
import signal
import sys

from hpcrl.config import SandboxPool
from hpcrl.sandbox.backend import find_backend, process_tree
from hpcrl.sandbox.pool import Pool, StaleAttempt
from hpcrl.sandbox.session import SandboxLost

BUSY = ["sh", "-c", "touch /tmp/x /dev/shm/y z; setsid sleep 1000 & (setsid nohup sleep 1000 &) & exec sleep 1000"]
WAYS = ("released", "runner killed", "bwrap killed", "deadline", "client gone", "taken over", "released in mid-call")


async def one(pool: Pool, name: str, luck: random.Random) -> None:
    lease = await pool.acquire(name, 1)
    print("up", flush=True)
    way = luck.choice(WAYS)
    call = asyncio.create_task(lease.run(BUSY, timeout_s=0.2 if way == "deadline" else 1000))
    await asyncio.sleep(luck.uniform(0, 0.1))
    tree = process_tree(lease.pid)
    match way:
        case "runner killed" if len(tree) > 1:
            os.kill(tree[1], signal.SIGKILL)
        case "bwrap killed":
            os.kill(tree[0], signal.SIGKILL)
        case "client gone":
            call.cancel()
        case "taken over":
            await pool.acquire(name, 2)
        case "released in mid-call" | "released":
            await pool.release(name)
    with contextlib.suppress(SandboxLost, StaleAttempt, asyncio.CancelledError):
        await call
    await pool.release(name)


async def main(seed: int, count: int) -> None:
    luck = random.Random(seed)
    pool = Pool(SandboxPool(sessions=12, warm=4, memory_mib=64, disk_mib=2), find_backend())
    await asyncio.gather(*(one(pool, f"t{number}", luck) for number in range(count)))
    print("over", flush=True)
    await asyncio.sleep(luck.choice((0, 1000)))
    await pool.close()


if __name__ == "__main__":
    asyncio.run(main(int(sys.argv[1]), int(sys.argv[2])))
