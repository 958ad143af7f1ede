"""What the commands share: their arguments, and how a user's mistake is told."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Annotated

import typer

from hpcrl import launch
from hpcrl.layout import RunPaths
from hpcrl.types import ConfigError

Sets = Annotated[
    list[str] | None,
    typer.Option(
        "--set",
        help="Override a key: `--set seed=3 --set rl.lr=1e-4` (a phase or pool by its name).",
        metavar="KEY=VALUE",
    ),
]
RunFolder = Annotated[Path, typer.Argument(help="A run folder.", metavar="RUN")]
ConfigFile = Annotated[Path, typer.Argument(help="A TOML file, such as configs/quickstart.toml.", metavar="CONFIG")]
AsJson = Annotated[bool, typer.Option("--json", help="One JSON object.")]


def fail(message: str) -> int:
    print(f"hpcrl: {message}", file=sys.stderr)
    return 2


def refuse_running(paths: RunPaths) -> None:
    """Raises ConfigError while any job of the run lives."""
    if launch.at_rest(paths):
        return
    alive = [f"{job.role}-{job.index} (job {job.id})" for job in launch.living(paths)]
    if alive:
        raise ConfigError(f"{paths.root}: is running: {', '.join(alive)}; `hpcrl stop {paths.root}` first")
