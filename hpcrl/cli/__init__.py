"""The `hpcrl` command. Exit codes: 0 done, 1 the run failed, 2 the user's mistake.

runs     train, resume, stop, scale, config      looks    status, watch, logs; efficiency: seff
store    store ls, show, query, verify, and the store's care
models   model tiny, model smollm2                        bench    bench store
sandbox  sandbox attack
common   the arguments that they share
"""

from __future__ import annotations

import sys
from typing import Annotated

import typer

from hpcrl import __version__
from hpcrl.cli import bench, efficiency, looks, models, runs, sandbox, store
from hpcrl.cli.common import fail
from hpcrl.types import HpcrlError

HELP = """Train LLM agents with reinforcement learning on Slurm clusters.

A run is a folder: `train` makes one, `stop` and `resume` end and continue it, `status` and `watch` look at it.
"""

app = typer.Typer(help=HELP, no_args_is_help=True, add_completion=False, pretty_exceptions_enable=False)
app.add_typer(runs.app)
app.add_typer(looks.app)
app.add_typer(efficiency.app)
app.add_typer(models.app, name="model")
app.add_typer(store.app, name="store")
app.add_typer(bench.app, name="bench")
app.add_typer(sandbox.app, name="sandbox")


def main() -> None:
    """Entry point: user errors become one line and exit code 2, as does a disk that is full, or a place that can't be
    read or written."""
    try:
        app()
    except HpcrlError as error:
        sys.exit(fail(str(error)))
    except OSError as error:
        sys.exit(fail(f"{error.filename}: {error.strerror}" if error.filename and error.strerror else str(error)))


@app.callback(invoke_without_command=True)
def version(show: Annotated[bool, typer.Option("--version", help="Print the version.")] = False) -> None:
    if show:
        print(__version__)
        raise typer.Exit
