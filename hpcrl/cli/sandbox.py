"""`hpcrl sandbox`: whether the sandboxes of this machine hold."""

from __future__ import annotations

import asyncio
import json
import os
import sys
from dataclasses import asdict
from typing import Annotated

import typer

from hpcrl.cli.common import AsJson
from hpcrl.types import ConfigError

BACKENDS = ("bwrap",)

app = typer.Typer(help="Whether the sandboxes of this machine hold.", no_args_is_help=True)


@app.callback()
def group() -> None:
    """Typer makes a group of one command only where there is a callback."""


@app.command("attack")
def attack(
    backend: Annotated[str, typer.Option(help="How sandboxes are made: bwrap.")] = BACKENDS[0],
    only: Annotated[list[str] | None, typer.Option(help="This attack alone; may be repeated.", metavar="NAME")] = None,
    as_json: AsJson = False,
) -> None:
    """Run every attack that we know in a sandbox, and without one to show that it works. Exit 1 when one isn't held."""
    from hpcrl.sandbox.attacks import named
    from hpcrl.sandbox.backend import find_backend
    from hpcrl.sandbox.judge import run_attacks

    if backend not in BACKENDS:
        raise ConfigError(f"--backend: no backend {backend!r}; there are: {', '.join(BACKENDS)}")
    attacks = named(only or ())
    found = asyncio.run(run_attacks(find_backend(), attacks))
    if as_json:
        print(json.dumps({"backend": backend, "uid": os.getuid(), "attacks": [asdict(row) for row in found]}))
    else:
        for row in found:
            bare = {True: "works bare", False: f"DOES NOT WORK BARE: {row.bare}", None: f"not bare: {row.bare}"}
            print(f"{'held' if row.held else 'NOT HELD':9} {row.name:26} {row.evidence}  [{bare[row.works_bare]}]")
        num_held, num_bare = sum(row.held for row in found), sum(row.works_bare is True for row in found)
        print(f"{num_held} of {len(found)} attacks held; {num_bare} work without a sandbox")
    sys.exit(not all(row.fine for row in found))
