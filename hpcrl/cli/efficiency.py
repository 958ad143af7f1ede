"""`hpcrl seff`: what hpcrl/efficiency.py finds, on one screen."""

from __future__ import annotations

import json
from collections.abc import Iterable, Sequence
from typing import Any

import typer

from hpcrl.cli.common import AsJson, RunFolder
from hpcrl.config import load_resolved
from hpcrl.layout import RunPaths, read_json

LOSS = {"thrown_away": "thrown away", "pending": "pending", "used": "used"}

app = typer.Typer()


@app.command()
def seff(run: RunFolder, as_json: AsJson = False) -> None:
    """What a run's GPU-hours went to, what was wasted and why, CPU and memory asked against used."""
    from hpcrl import efficiency

    paths = RunPaths.of(run)
    row = efficiency.efficiency(paths, load_resolved(paths.config))
    if as_json:
        print(json.dumps(row))
        return
    state = read_json(paths.heartbeat) or {"state": "starting"}
    print(f"{paths.root}: {state['state']}; {row['jobs']} jobs; accounts: {row['accounting']['source']}")
    if row["accounting"]["trouble"]:
        print(f"  no accounts of Slurm's: {row['accounting']['trouble']}")
    for part in (_uses(row), _waste(row), _resources(row)):
        print()
        print("\n".join(part))


def _table(head: Sequence[str], rows: Iterable[Sequence[str]]) -> list[str]:
    """Lines of columns, the first aligned left, the others right."""
    whole = [head, *rows]
    widths = [max(len(row[column]) for row in whole) for column in range(len(head))]
    return [
        "  ".join(
            cell.rjust(width) if at else cell.ljust(width)
            for at, (cell, width) in enumerate(zip(row, widths, strict=True))
        ).rstrip()
        for row in whole
    ]


def _uses(row: dict[str, Any]) -> list[str]:
    from hpcrl.efficiency import USES

    pools = dict(row["pools"])
    notes = [f"  ? {note}" for pool in pools.values() for note in pool["notes"]]
    known = [pool for pool in pools.values() if pool["unit"] == "GPU" and pool["uses_s"]]
    if len(known) > 1:
        uses = {use: sum(pool["uses_s"][use] for pool in known) for use in USES}
        pools["all"] = {"unit": "GPU", "allocated_s": sum(uses.values()), "uses_s": uses}
    on_gpus = any(pool["unit"] == "GPU" for pool in pools.values())
    head = ["GPU-hours by use" if on_gpus else "hours by use (no GPUs: of engines, of ranks)"]
    head += [name if pool["unit"] == "GPU" else f"{name} ({pool['unit']}s)" for name, pool in pools.items()]
    lines = [["allocated", *(_hours(pool["allocated_s"]) + " " * 5 for pool in pools.values())]]
    for use in USES:
        cells = [_part(pool, use) for pool in pools.values()]
        if any(pool["uses_s"] and pool["uses_s"][use] for pool in pools.values()):
            lines.append([f"  {use.replace('_', ' ')}", *cells])
    return _table(head, lines) + _few(notes)


def _few(notes: Sequence[str], most: int = 4) -> list[str]:
    left = len(notes) - most
    return [*notes[:most], f"  ? and {left} more: --json has them"] if left > 0 else list(notes)


def _hours(seconds: float | None) -> str:
    return "?" if seconds is None else f"{seconds / 3600:.3f}"


def _part(pool: dict[str, Any], use: str) -> str:
    if pool["uses_s"] is None:
        return "?" + " " * 5
    seconds = pool["uses_s"][use]
    return f"{seconds / 3600:.3f} {seconds / pool['allocated_s']:4.0%}" if seconds else "–" + " " * 5


def _waste(row: dict[str, Any]) -> list[str]:
    made, engines, updates = row["tokens"], row["engines"], row["updates"]
    lines = [["generated", f"{made['generated']:,}", "", ""]]
    for what, title in LOSS.items():
        rows = made["classes"][what]
        if not rows and what == "pending":
            continue
        total = sum(one["tokens"] for one in rows.values())
        lines.append([f"  {title}", f"{total:,}", _share(total, made["generated"]), ""])
        lines += [
            [
                f"    {why}",
                f"{one['tokens']:,}",
                _share(one["tokens"], made["generated"]),
                str(one["trajectories"] or ""),
            ]
            for why, one in rows.items()
        ]
    found = _table(["tokens that engines made", "tokens", "share", "trajectories"], lines)
    found += _few([f"  ? {note}" for note in made["notes"]])
    if retried := made["retried_attempts"]:
        causes = ", ".join(f"{count} {cause}" for cause, count in retried.items())
        found.append(f"attempts that failed and were taken up again, since control began: {causes}")
    if updates["void"]:
        found.append(f"updates made void by a resume: {updates['void']} of {updates['made']}: {updates['share']:.1%}")
    if engines["allocated_s"] is None:
        found.append("engine-seconds idle: ? (no engine's time is on record)")
    else:
        found.append(
            f"engine-seconds: {engines['allocated_s']:.0f} allocated, {engines['idle_s']:.0f} idle "
            f"({_share(engines['idle_s'], engines['allocated_s'])}), {engines['gaps_s']:.0f} of it without an engine"
        )
    return found


def _share(part: float, whole: float) -> str:
    return f"{part / whole:.1%}" if whole else ""


def _resources(row: dict[str, Any]) -> list[str]:
    by_sacct = row["accounting"]["source"] == "sacct"
    head = ["asked and used", "jobs", "CPUs asked", "used", "share", "memory asked", "peak"]
    if by_sacct:
        head += ["CPU by sacct", "MaxRSS"]
    lines: list[list[str]] = []
    why: dict[str, list[str]] = {}  # it isn't known: the roles
    for role, one in row["roles"].items():
        cpu, memory = one["cpu"], one["memory"]
        asked = memory["asked_bytes"] or memory["sacct_asked_bytes"]
        line = [role, str(one["jobs"]), _number(cpu["asked"], "{}"), _number(cpu["mean"], "{:.2f}")]
        line += [_number(cpu["share"], "{:.0%}"), _size(asked), _size(memory["peak_bytes"])]
        if by_sacct:
            line += [_number(cpu["sacct_share"], "{:.0%}"), _size(memory["sacct_peak_bytes"])]
        lines.append(line)
        if cpu["used_s"] is None:
            why.setdefault("no job left a record of its use", []).append(role)
        elif cpu["asked"] is None:
            why.setdefault("what was asked for isn't on record; local jobs ask for nothing", []).append(role)
        elif asked is None:
            why.setdefault("no amount of memory was asked for", []).append(role)
        if by_sacct and memory["sacct_peak_bytes"] is None:
            why.setdefault("sacct has no MaxRSS yet, or the site gathers none", []).append(role)
    return _table(head, lines) + [f"  ? {', '.join(roles)}: {text}" for text, roles in why.items()]


def _number(value: float | None, form: str) -> str:
    return "?" if value is None else form.format(value)


def _size(count: int | None) -> str:
    if count is None:
        return "?"
    return f"{count / (1 << 30):.2f} GiB" if count >= 1 << 30 else f"{count / (1 << 20):.0f} MiB"
