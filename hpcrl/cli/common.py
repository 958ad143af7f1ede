"""What the commands share: their arguments, and how a user's mistake is told."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Annotated

import typer

from hpcrl import launch
from hpcrl.layout import RunPaths, warn_once
from hpcrl.types import ConfigError, HpcrlError

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


# What reading the wrong types raises.
_JUNK = (LookupError, ArithmeticError, TypeError, ValueError, AttributeError, RecursionError)


def fail(message: str) -> int:
    print(f"hpcrl: {message}", file=sys.stderr)
    return 2


@contextmanager
def passing_over(path: Path) -> Iterator[None]:
    """What is done within goes undone where this file holds junk (wrong types, no JSON): that is said, once."""
    try:
        yield
    except (*_JUNK, OSError) as error:
        why = str(error) if isinstance(error, HpcrlError) else f"{type(error).__name__}: {error}"
        warn_once(f"hpcrl: {path}: unreadable, going on without it ({why})")


def refuse_running(paths: RunPaths) -> None:
    """Raises ConfigError while any job of the run lives."""
    if launch.at_rest(paths):
        return
    alive = [f"{job.role}-{job.index} (job {job.id})" for job in launch.living(paths)]
    if alive:
        raise ConfigError(f"{paths.root}: is running: {', '.join(alive)}; `hpcrl stop {paths.root}` first")
