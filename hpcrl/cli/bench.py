"""`hpcrl bench`: how near hpcrl comes, on this machine and filesystem, to what they can do."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Annotated

import typer

from hpcrl.cli.common import AsJson

app = typer.Typer(help="Measure this machine and filesystem.", no_args_is_help=True)


@app.command("store")
def store(
    folder: Annotated[Path, typer.Argument(metavar="DIR", help="A folder of the filesystem that runs will lie on.")],
    as_json: AsJson = False,
    scale: Annotated[float, typer.Option(help="Of the amounts; 0.1 for a first look.", min=0.01, max=10)] = 1.0,
) -> None:
    """The trajectory store, against the plainest way to do the same work; ratios within one run, medians of five."""
    from hpcrl.rollout.bench import bench_slow_sync
    from hpcrl.store.bench import run_bench

    found = run_bench(
        folder, {"slow syncs": bench_slow_sync}, scale=scale, say=lambda text: print(text, file=sys.stderr)
    )
    _show(found, as_json)


@app.command("sandbox")
def sandbox(as_json: AsJson = False) -> None:
    """What a sandbox costs here: to start, for each command, in memory and to be watched."""
    from hpcrl.sandbox.bench import run_bench

    _show(run_bench(lambda text: print(text, file=sys.stderr)), as_json)


def _show(found: dict[str, float], as_json: bool) -> None:
    if as_json:
        print(json.dumps(found))
        return
    for name, value in found.items():
        print(f"{name}: {value:.4g}")
