"""`hpcrl store`: look into a run's trajectory store, and keep it in order. Parses and prints; the store room works."""

from __future__ import annotations

import json
import sys
import time
from collections.abc import Callable, Mapping
from dataclasses import asdict
from pathlib import Path
from typing import Annotated, Any, Literal

import typer

from hpcrl.cli.common import AsJson, RunFolder, refuse_running
from hpcrl.layout import RunPaths, publish_json
from hpcrl.types import ConfigError, HpcrlError, StoreError

SEAL_S = 120.0  # for a running run to close its segments
PROGRESS_S = 2.0  # between two words of how far an export is
COLUMNS = "status,kind,num_steps,num_sampled,reward,attempt,trajectory"

# The conditions of `query` and `export`.
Kinds = Annotated[list[str] | None, typer.Option("--kind", help="train, eval, expert or user.")]
Environments = Annotated[list[str] | None, typer.Option("--environment", help="The task's environment.")]
TaskKinds = Annotated[list[str] | None, typer.Option(help="The task's kind, as its environment calls it.")]
Tasks = Annotated[list[str] | None, typer.Option("--task", help="The task's id.")]
Phases = Annotated[list[str] | None, typer.Option("--phase", help="The phase that it served.")]
Statuses = Annotated[list[str] | None, typer.Option(help="COMPLETED, TRUNCATED, FAILED, CANCELLED or open.")]
Faults = Annotated[list[str] | None, typer.Option("--fault", help="The cause of the fault that ended it.")]
Since = Annotated[str | None, typer.Option(help="Begun then or later.", metavar="TIME")]
Until = Annotated[str | None, typer.Option(help="Begun before.", metavar="TIME")]
Reward = Annotated[float | None, typer.Option()]
Version = Annotated[int | None, typer.Option("--version", help="Of the weights that sampled any of its tokens.")]

app = typer.Typer(help="Look into a run's trajectory store, and keep it in order.", no_args_is_help=True)


@app.command("ls")
def ls(
    run: RunFolder,
    limit: Annotated[int | None, typer.Option(help="The newest alone, so many.", min=1)] = None,
    columns: Annotated[str, typer.Option(help="Of `query --csv`, in their order.", metavar="NAME,…")] = COLUMNS,
    as_json: AsJson = False,
) -> None:
    """One line per trajectory, the newest last. Exit 1 when a file is damaged."""
    from hpcrl.store.index import Store
    from hpcrl.store.rows import TRAJECTORIES

    names = ["id" if name == "trajectory" else name for name in columns.split(",")]
    if wrong := [name for name in names if name not in TRAJECTORIES]:
        known = ", ".join("trajectory" if name == "id" else name for name in TRAJECTORIES)
        raise ConfigError(f"--columns: no column {wrong[0]!r}; there are: {known}")
    with Store(RunPaths.of(run), open_segments=True) as store:
        rows = sorted(store.summaries(), key=lambda row: (row["wall"] == row["wall"], row["wall"]))[-(limit or 0) :]
        damaged = _say_damage(store.damaged)
    if as_json:
        print(json.dumps([{key: None if value != value else value for key, value in row.items()} for row in rows]))
    else:
        table = [["trajectory" if name == "id" else name for name in names]]
        table += [[_cell(name, row[name]) for name in names] for row in rows]
        widths = [max(map(len, column)) for column in zip(*table, strict=True)]
        for line in table:
            print("  ".join(cell.ljust(width) for cell, width in zip(line, widths, strict=True)).rstrip())
    sys.exit(damaged)


def _cell(name: str, value: Any) -> str:
    if name == "status":
        return value or "open"
    if isinstance(value, float):
        return "–" if value != value else f"{value:.3f}" if name.endswith("wall") else f"{value:g}"
    return str(value)


@app.command("show")
def show(run: RunFolder, trajectory: Annotated[str, typer.Argument()]) -> None:
    """Every record of one trajectory, as text. Exit 1 when a file is damaged; what is intact is shown."""
    from hpcrl.rollout.render import Renderer
    from hpcrl.store.index import Store
    from hpcrl.store.records import Kind, named

    paths = RunPaths.of(run)
    with Store(paths, open_segments=True, only=trajectory) as store:
        records = store.records(trajectory)
        prompts = {}
        for root in {record.meta["root"] for record in records if record.meta.get("root")}:
            try:
                prompts[root] = store.record("", root)
            except StoreError as error:
                store.damaged[root] = str(error)
        damaged = _say_damage(store.damaged)
    if not records and not damaged:
        raise StoreError(f"{run}: has no trajectory {trajectory!r}; `hpcrl store ls {run}` lists them")
    renderer = Renderer(paths.model)
    for record in records:
        if root := record.meta.get("root"):
            text = repr(renderer.transcript(prompts[root].ids)) if root in prompts else f"{root} can't be read"
            print(f"PROMPT     {text}")
        print(f"{record.kind.name:10} attempt {record.attempt} step {record.step} {record.hash}")
        if len(record.ids):
            print(f"           {renderer.transcript(record.ids)!r}")
        shown = {result.get("content") for result in record.meta.get("results") or ()}
        for name in dict.fromkeys(name for name in named(record.meta) if name not in shown):
            print(f"           content: {name}")
        for key in ("task", "calls", "results", "state", "status", "rewards", "fault"):
            if record.meta.get(key) and (key != "state" or record.kind is Kind.TRANSITION):
                print(f"           {key}: {json.dumps(record.meta[key])}")
    sys.exit(damaged)


@app.command("content")
def content(run: RunFolder, hash: Annotated[str, typer.Argument(metavar="SHA256")]) -> None:
    """Write what `show` names by a hash (`content`) to standard output, byte by byte."""
    from hpcrl.store.index import Store

    with Store(RunPaths.of(run), open_segments=True) as store:
        sys.stdout.buffer.write(store.content(hash))


@app.command("query")
def query(
    run: RunFolder,
    kind: Kinds = None,
    environment: Environments = None,
    task_kind: TaskKinds = None,
    task: Tasks = None,
    phase: Phases = None,
    status: Statuses = None,
    fault: Faults = None,
    since: Since = None,
    until: Until = None,
    reward_below: Reward = None,
    reward_above: Reward = None,
    version: Version = None,
    as_json: AsJson = False,
    as_csv: Annotated[bool, typer.Option("--csv", help="Comma-separated values, all columns.")] = False,
) -> None:
    """The trajectories that meet every condition; an option given twice means either.

    TIME: ISO 8601, or seconds since 1970. Exit 1 when a file is damaged.
    """
    conditions = _conditions(locals())
    from hpcrl.store.index import Store
    from hpcrl.store.query import as_rows

    with Store(RunPaths.of(run), open_segments=True) as store:
        found = store.query(**conditions)
        damaged = _say_damage(store.damaged)
    if as_json:
        print(json.dumps(as_rows(found)))
    elif as_csv:
        print(found.to_csv(index=False), end="")
    else:
        few = ["status", "kind", "phase", "task_kind", "num_steps", "num_tokens", "reward", "max_version", "trajectory"]
        print(found[few].to_string(index=False) if len(found) else "none")
        print(f"{len(found)} trajectories", file=sys.stderr)
    sys.exit(damaged)


def _conditions(given: Mapping[str, Any]) -> dict[str, Any]:
    """Of a command's arguments those that `Store.query` knows."""
    from hpcrl.store.query import CONDITIONS

    return {name: value for name, value in given.items() if name in CONDITIONS}


@app.command("seal")
def seal(
    run: RunFolder,
    gone: Annotated[
        list[str] | None, typer.Option(help="A node whose job has surely ended, though that can't be seen from here.")
    ] = None,
) -> None:
    """Close the open segments, so that they can be read everywhere and compacted. A run that is running closes its own;
    of one that isn't, those that its last owners left."""
    from hpcrl import launch
    from hpcrl.store.seal import seal
    from hpcrl.store.segment import CLOSED, OPEN, segments

    paths = RunPaths.of(run)
    control = None if launch.at_rest(paths) else launch.current(paths)
    if launch.alive(control):
        were_open, before = segments(paths.log, OPEN), segments(paths.log, CLOSED)
        _ask_to_seal(paths, lambda: launch.alive(control))
        left = [path for path in were_open if path in segments(paths.log, OPEN, anew=True)]
        if left:  # its node's host is being replaced, say: nobody could be asked
            raise StoreError(f"{left[0]}: is still open; try again, or see {paths.logs}")
        # Those that lay on their nodes' own disks were not listed as open; those that were may be in a shard by now.
        known = {*before} - {path.with_suffix(CLOSED) for path in were_open}
        found = {*segments(paths.log, CLOSED, anew=True), *(path.with_suffix(CLOSED) for path in were_open)}
        closed = sorted(found - known)
    else:
        closed = seal(paths, gone or ())
    print("\n".join(f"closed {path}" for path in closed) or "nothing was open")


def _ask_to_seal(paths: RunPaths, running: Callable[[], bool]) -> None:
    """Raises StoreError when the run doesn't do it."""
    asked = paths.inbox / f"seal-{time.time_ns()}.json"
    publish_json(asked, {"command": "seal"})
    until = time.monotonic() + SEAL_S
    while asked.exists() and running() and time.monotonic() < until:
        time.sleep(0.1)
    left = asked.exists()
    asked.unlink(missing_ok=True)
    if left or asked.with_suffix(".refused").exists():
        raise StoreError(f"{paths.root}: not every node closed its segment within {SEAL_S:.0f} s; see {paths.logs}")


@app.command("compact")
def compact(
    run: RunFolder,
    as_json: AsJson = False,
    with_mpi: Annotated[
        bool,
        typer.Option(
            "--mpi", help="Share the work: `srun --mpi=pmi2 --kill-on-bad-exit hpcrl store compact RUN --mpi`."
        ),
    ] = False,
) -> None:
    """Make HDF5 shards of the closed segments. Exit 1 when a segment is damaged."""
    from hpcrl.store.compact import Alone, compact, mpi
    from hpcrl.store.seal import seal_dead_here

    paths = RunPaths.of(run)
    comm = mpi() if with_mpi else Alone()
    try:
        if comm.rank == 0:
            seal_dead_here(paths)
        report = compact(paths, comm=comm)
    except (HpcrlError, OSError) as error:
        if comm.rank == 0:
            print(f"hpcrl: {error}", file=sys.stderr)
        sys.exit(2 if isinstance(error, HpcrlError) else 1)
    if comm.rank == 0:
        _print(asdict(report), as_json)
    sys.exit(1 if report.damaged or report.refused else 0)


@app.command("verify")
def verify(
    run: RunFolder,
    deep: Annotated[bool, typer.Option("--deep", help="Read every byte, and every record.")] = False,
    as_json: AsJson = False,
) -> None:
    """Checksums of the index, chains, ledger, progress; with --deep also of all that they point to. Exit 1 when
    anything is wrong."""
    from hpcrl.store.verify import verify

    report = verify(RunPaths.of(run), deep=deep)
    _print(asdict(report) | {"ok": report.ok}, as_json)
    sys.exit(0 if report.ok else 1)


@app.command("repair")
def repair(run: RunFolder, as_json: AsJson = False) -> None:
    """Rescue what is intact in damaged shards and segments into new shards, and name what is lost. Exit 1 when anything
    is."""
    from hpcrl.store.repair import repair

    paths = RunPaths.of(run)
    refuse_running(paths)
    done = repair(paths)
    if as_json:
        print(json.dumps([asdict(one) for one in done]))
    elif not done:
        print("nothing is damaged")
    for one in () if as_json else done:
        print(f"{one.damage}")
        print(f"  rescued {one.rescued} records" + (f" into {one.shard}" if one.shard else ""), end="")
        print(f"; {one.elsewhere} more are in other files as well")
        for lost in one.lost:
            print(f"  lost: {lost}")
        print(f"  moved to {one.moved_to}" if one.moved_to else f"  left where it is: {one.file}")
    sys.exit(1 if any(one.lost or not one.moved_to for one in done) else 0)


@app.command("prune")
def prune(
    run: RunFolder,
    keep: Annotated[str, typer.Option(help="The newest shards, as many as fit in this: 50GiB.", metavar="SIZE")],
    dry_run: Annotated[bool, typer.Option("--dry-run", help="Only say what would go.")] = False,
    as_json: AsJson = False,
) -> None:
    """Remove the oldest shards, but nothing that resuming the run, or a trajectory that is kept, needs."""
    from hpcrl.store.prune import prune, size

    paths, keep_bytes = RunPaths.of(run), size(keep)
    refuse_running(paths)
    _print(asdict(prune(paths, keep_bytes, dry_run=dry_run)), as_json)


@app.command("export")
def export(
    run: RunFolder,
    to: Annotated[Path, typer.Option("--to", help="A folder for the files.", metavar="DIR")],
    format: Annotated[Literal["parquet", "jsonl"], typer.Option("--format")] = "parquet",
    kind: Kinds = None,
    environment: Environments = None,
    task_kind: TaskKinds = None,
    task: Tasks = None,
    phase: Phases = None,
    status: Statuses = None,
    fault: Faults = None,
    since: Since = None,
    until: Until = None,
    reward_below: Reward = None,
    reward_above: Reward = None,
    version: Version = None,
    as_json: AsJson = False,
) -> None:
    """Trajectories with their steps, texts, calls, results and rewards, for other programs; all, or those that meet the
    conditions of `query`. Exit 1 when some can't be read, or a file is damaged."""
    conditions = _conditions(locals())
    from hpcrl.rollout.render import Renderer
    from hpcrl.store.export import export

    paths = RunPaths.of(run)
    decode = Renderer(paths.model).transcript if paths.model.is_dir() else None
    if decode is None:
        print(f"hpcrl: {paths.model}: isn't there, so that tokens stay without text", file=sys.stderr)
    said = time.monotonic()

    def progress(done: int, total: int) -> None:
        nonlocal said
        if time.monotonic() - said > PROGRESS_S:
            said = time.monotonic()
            print(f"{done} of {total} trajectories", file=sys.stderr)

    report = export(paths, to, format, decode, conditions=conditions, progress=progress)
    _print(asdict(report), as_json)
    sys.exit(1 if report.left_out or report.damaged else 0)


def _print(report: Mapping[str, Any], as_json: bool) -> None:
    """Counts, texts and lists of texts, as JSON or in words."""
    if as_json:
        print(json.dumps(report))
        return
    for key, value in report.items():
        if isinstance(value, list | tuple):
            print(f"{key.replace('_', ' ')}: {len(value)}")
            print("".join(f"  {line}\n" for line in value), end="")
        elif isinstance(value, dict):
            print(f"{key.replace('_', ' ')}: {sum(value.values())}")
            print("".join(f"  {count}: {name}\n" for name, count in value.items()), end="")
        elif value != "":
            print(f"{key.replace('_', ' ')}: {value}")


def _say_damage(damaged: Mapping[str, str]) -> int:
    """The exit code that tells of it."""
    for text in damaged.values():
        print(f"hpcrl: damaged: {text}", file=sys.stderr)
    return 1 if damaged else 0
