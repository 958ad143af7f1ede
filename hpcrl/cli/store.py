"""`hpcrl store`: look into a run's trajectory store, and keep it in order. Parses and prints; the store room works."""

from __future__ import annotations

import json
import sys
from dataclasses import asdict
from typing import Annotated

import typer

from hpcrl.cli.common import AsJson, RunFolder
from hpcrl.layout import RunPaths

app = typer.Typer(help="Look into a run's trajectory store, and keep it in order.", no_args_is_help=True)


@app.command("ls")
def ls(run: RunFolder, as_json: AsJson = False) -> None:
    """One line per trajectory."""
    from hpcrl.store.index import Store

    with Store(RunPaths.of(run), open_segments=True) as store:
        rows = list(store.summaries())
    if as_json:
        print(json.dumps([{key: None if value != value else value for key, value in row.items()} for row in rows]))
        return
    print(f"{'status':10} {'kind':6} {'steps':>5} {'sampled':>7} {'reward':>6} {'attempt':>7}  trajectory")
    for row in rows:
        reward = "–" if row["reward"] != row["reward"] else f"{row['reward']:g}"
        print(
            f"{row['status'] or 'open':10} {row['kind']:6} {row['num_steps']:5} {row['num_sampled']:7} {reward:>6} "
            f"{row['attempt']:7}  {row['id']}"
        )


@app.command("show")
def show(run: RunFolder, trajectory: Annotated[str, typer.Argument()]) -> None:
    """Every record of one trajectory, as text."""
    from hpcrl.rollout.render import Renderer
    from hpcrl.store.index import Store
    from hpcrl.types import StoreError

    paths = RunPaths.of(run)
    with Store(paths, open_segments=True, only=trajectory) as store:
        records = store.records(trajectory)
    if not records:
        raise StoreError(f"{run}: has no trajectory {trajectory!r}; `hpcrl store ls {run}` lists them")
    renderer = Renderer(paths.model)
    for record in records:
        print(f"{record.kind.name:10} attempt {record.attempt} step {record.step} {record.hash}")
        if len(record.ids):
            print(f"           {renderer.transcript(record.ids)!r}")
        for key in ("calls", "results", "status", "rewards", "fault"):
            if record.meta.get(key):
                print(f"           {key}: {json.dumps(record.meta[key], ensure_ascii=False)}")


@app.command("verify")
def verify(run: RunFolder, as_json: AsJson = False) -> None:
    """Read every record back: checksums, chains, required fields, the ledger. Exit 1 when anything is wrong."""
    from hpcrl.store.verify import verify

    report = verify(RunPaths.of(run))
    if as_json:
        print(json.dumps(asdict(report) | {"ok": report.ok}))
    else:
        for key, value in asdict(report).items():
            print(f"{key.replace('_', ' ')}: {value}")
        print("ok" if report.ok else "NOT OK")
    sys.exit(0 if report.ok else 1)
