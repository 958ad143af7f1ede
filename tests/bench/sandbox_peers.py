"""Sandboxes against what else runs an agent's commands, in one run.

    python tests/bench/sandbox_peers.py      (pip install 'hpcrl[sandbox]' swe-rex)

Prints one JSON object: the figures of `hpcrl bench sandbox`, and those of swe-rex's local deployment, which starts a
server and a shell per agent and isolates nothing: `start_ms` until the first shell answers, `command_ms` of `true` in
it. `…_vs_swerex` say how many times as long swe-rex took.
"""

from __future__ import annotations

import asyncio
import json
import statistics
import time

from swerex.deployment.local import LocalDeployment
from swerex.runtime.abstract import BashAction, CreateBashSessionRequest

from hpcrl.sandbox.bench import run_bench

STARTS, COMMANDS = 10, 50


async def swerex() -> dict[str, float]:
    starts, commands = [], []
    for _ in range(STARTS):
        began = time.perf_counter()
        deployment = LocalDeployment()
        await deployment.start()
        runtime = deployment.runtime
        await runtime.create_session(CreateBashSessionRequest())
        starts.append(1000 * (time.perf_counter() - began))
        for _ in range(COMMANDS // STARTS):
            began = time.perf_counter()
            await runtime.run_in_session(BashAction(command="/usr/bin/true"))
            commands.append(1000 * (time.perf_counter() - began))
        await deployment.stop()
    return {"swerex_start_ms": statistics.median(starts), "swerex_command_ms": statistics.median(commands)}


def main() -> None:
    found = run_bench() | asyncio.run(swerex())
    found["start_vs_swerex"] = found["swerex_start_ms"] / found["session_start_ms_warm"]
    found["cold_start_vs_swerex"] = found["swerex_start_ms"] / found["session_start_ms_cold"]
    found["command_vs_swerex"] = found["swerex_command_ms"] / found["command_ms"]
    print(json.dumps(found, indent=2))


if __name__ == "__main__":
    main()
