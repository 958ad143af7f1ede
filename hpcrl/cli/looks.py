"""The commands that look at a run, and what they print of it."""

from __future__ import annotations

import json
import sys
import time
from collections.abc import Sequence
from dataclasses import asdict
from typing import Annotated, Any

import typer
from rich.console import Console

from hpcrl import config, launch
from hpcrl.cli.common import AsJson, RunFolder, passing_over
from hpcrl.layout import RunPaths, read_json, read_lines
from hpcrl.types import ConfigError

SILENT_S = 60.0  # without a word of control's, after which something is wrong
LOGS = (*launch.ROLES, "host")

app = typer.Typer()


@app.command()
def logs(
    run: RunFolder,
    role: Annotated[str, typer.Argument(help="control, rollout, sandbox, learner or host; all without it.")] = "",
    lines: Annotated[int, typer.Option("--lines", "-n", help="How many of the latest.", min=1)] = 100,
) -> None:
    """What a run's processes said last, in the order that they said it."""
    paths = RunPaths.of(run)
    if role not in ("", *LOGS):
        raise ConfigError(f"{role}: is no role; there are {', '.join(LOGS)}")
    rows: list[dict[str, Any]] = []
    for path in paths.logs.glob("*.jsonl"):
        if path.name.startswith(role):
            with passing_over(path):
                found, _ = read_lines(path, skip_torn=True)
                rows += [row for row in found[-lines:] if _is_line(row)]
    for row in sorted(rows, key=lambda row: float(row["time"]))[-lines:]:
        when = time.strftime("%m-%d %H:%M:%S", time.localtime(row["time"]))
        print(f"{when} {row.get('role')} {row.get('node')} {row.get('level')}: {row.get('message')}")


def _is_line(row: Any) -> bool:
    when = row.get("time") if isinstance(row, dict) else None
    return isinstance(when, int | float) and 0 <= when < 1e11


@app.command()
def status(run: RunFolder, as_json: AsJson = False) -> None:
    """How a run stands: updates, success, engines, accounting of every trajectory."""
    paths = RunPaths.of(run)
    row = full_status(paths)
    if as_json:
        print(json.dumps(row))
        return
    from hpcrl.observe.live import line, panel

    console = Console()
    if row["updates"]["total"]:
        console.print(panel(row) if console.is_terminal else line(row), highlight=False, markup=False)
    console.print(f"state: {row['state']}" + (f" ({row['reason']})" if row.get("reason") else ""), highlight=False)
    for job in row["jobs"]:
        if job["alive"] or job["executor"] == "local":
            print("  " + job_line(job))
    if row.get("trouble"):
        print(f"Slurm: {row['trouble']}")
    print_success(row["success"])
    if row["state"] == "running" and row.get("dashboard"):
        port = row["dashboard"]
        through = "" if row["executor"] == "local" else f", after `ssh -L {port}:127.0.0.1:{port} {row['node']}`"
        print(f"Dask dashboard: http://127.0.0.1:{port}/status{through}")


@app.command()
def watch(run: RunFolder) -> None:
    """Follow a run from another terminal; leaving it with Ctrl-C leaves the run alone."""
    from hpcrl.observe.live import Watch

    paths = RunPaths.of(run)
    asked = -float("inf")
    with Watch() as view:
        try:
            while read_json(paths.stopped) is None:
                row = heartbeat(paths)
                if row is not None:
                    with passing_over(paths.heartbeat):
                        view.show(row)
                silent = row is None or time.time() - row["wall"] > SILENT_S
                if silent and time.monotonic() - asked > SILENT_S:
                    asked, row = time.monotonic(), full_status(paths)
                    if row["state"] != "running":
                        view.say(f"{row['state']}: {row['reason']}" if row.get("reason") else row["state"])
                    for job in row["jobs"]:
                        if job["alive"]:
                            view.say("  " + job_line(job))
                    if row["state"] == "broken off":
                        sys.exit(1)
                time.sleep(1.0)
        except KeyboardInterrupt:
            return
    print_summary(paths)


def heartbeat(paths: RunPaths) -> dict[str, Any] | None:
    """What control last knew of the run; None where it has not said, or nobody can make it out."""
    from hpcrl.observe.live import panel
    from hpcrl.observe.summary import success

    with passing_over(paths.heartbeat):
        row = read_json(paths.heartbeat)
        if row is not None:
            row["updates"]["done"] + 0, success(row["evaluations"]), row["state"] + "", row["wall"] + 0
            if row["updates"]["total"]:
                panel(row)
        return row
    return None


def full_status(paths: RunPaths) -> dict[str, Any]:
    from hpcrl.observe.summary import success

    settings = config.load_resolved(paths.config)
    row = heartbeat(paths) or {
        "state": "starting",
        "updates": {"done": 0, "total": 0},
        "evaluations": {},
    }
    jobs: list[dict[str, Any]] = []
    found: list[launch.Job] | None = None
    with passing_over(paths.jobs):
        found = launch.jobs(paths)
    if found:
        try:
            ended = {job.key: launch.State(alive=False, name="ENDED") for job in found}
            states = ended if launch.at_rest(paths) else launch.look(found)
        except launch.SlurmError as error:
            row["trouble"] = str(error)
            states = {job.key: launch.State(alive=True, name="UNKNOWN") for job in found}
        controls_found = [job for job in found if job.role == "control"]
        if controls_found and not any(states[job.key].alive for job in controls_found):
            states[controls_found[-1].key] = _believed(paths, controls_found[-1], states[controls_found[-1].key])
        jobs = [asdict(job) | asdict(states[job.key]) for job in found]
    stopped = read_json(paths.stopped)
    controls = [job for job in jobs if job["role"] == "control"]
    if stopped is not None:
        row["state"], _, reason = str(stopped.get("outcome", "stopped")).partition(": ")
        row = {**row, "reason": reason, "wrong": []}
    elif found is not None and not any(job["alive"] for job in controls):
        row["state"], row["reason"] = _broken_off(paths, row["state"], controls)
    elif row["state"] == "running" and (silent_s := time.time() - row["wall"]) > SILENT_S:
        said = f"control has said nothing for {silent_s:.0f} s: it hangs, or the clocks of its node and of this differ"
        for job in controls:
            if job["name"] == "SUSPENDED":
                said = f"control is suspended: `scontrol resume {job['id']}` lets it go on"
        row["wrong"] = [said, *row.get("wrong", [])]
    if row["state"] == "running" and any(paths.inbox.glob("stop-*.json")):
        row["state"], row["reason"] = "stopping", "as `hpcrl stop` has asked"
    return row | {
        "name": settings.name, "executor": settings.launch.executor, "seed": settings.seed, "run": str(paths.root),
        "jobs": jobs, "success": success(row["evaluations"]),
    }  # fmt: skip


def state_of(paths: RunPaths, control: launch.Job | None) -> launch.State:
    """How the newest control stands; GONE without one. Raises SlurmError when Slurm doesn't say."""
    return launch.GONE if control is None else _believed(paths, control, launch.look([control])[control.key])


def _believed(paths: RunPaths, control: launch.Job, state: launch.State) -> launch.State:
    """As Slurm says, but a control that it doesn't list lives while its heartbeat is fresh and the run hasn't ended: an
    answer may be cut short."""
    patience_s = launch.GONE_S.get(control.executor, 0.0)
    if state.name != launch.GONE.name or not patience_s or paths.stopped.exists():
        return state
    row = heartbeat(paths)
    fresh = row is not None and time.time() - row["wall"] < patience_s
    return launch.State(alive=True, name="UNKNOWN") if fresh else state


def _broken_off(paths: RunPaths, state: str, controls: Sequence[dict[str, Any]]) -> tuple[str, str]:
    """State and reason of a run that has no control, and did not end."""
    again = f"`hpcrl resume {paths.root}`"
    if not controls:
        return "starting", f"none of its jobs is known yet; if no `hpcrl train` is at it, {again} starts it"
    if state == "running":
        return "broken off", f"control is gone; {again} continues"
    ended = controls[-1]
    why = f"job {ended['id']}, control, ended ({ended['name'].lower()}) before it said anything"
    return "broken off", f"{why}; `hpcrl logs {paths.root} control` may say why, {again} tries again"


def job_line(job: dict[str, Any]) -> str:
    """A job of `full_status`, for people."""
    words = [f"{job['role']}-{job['index']}: job {job['id']}, {job['name'].lower()}"]
    if job["node"] and job["executor"] != "local":
        words.append(f"on {job['node']}")
    if job["name"] == "PENDING":
        words.append(f"for {(time.time() - job['wall']) / 60:.0f} min")
    if job["reason"]:
        words.append(f"({job['reason']})")
    if job["left_s"] is not None:
        left = f"{job['left_s'] / 3600:.1f} h" if job["left_s"] >= 3600 else f"{job['left_s'] / 60:.0f} min"
        words.append(f"of {left}" if job["name"] == "PENDING" else f"{left} left")
    return " ".join(words)


def print_success(shares: dict[str, Any]) -> None:
    for name, share in shares.items():
        if name not in ("tasks", "interval") and share is not None:
            low, high = shares["interval"][name]
            print(f"held-out success {name.replace('_', ' ')}: {share:.3f}  (95% {low:.3f}–{high:.3f})")


def print_summary(paths: RunPaths) -> None:
    """What a run came to, and where to look further."""
    row = full_status(paths)
    print(
        f"\n{row['state']}: update {row['updates']['done']} of {row['updates']['total']}"
        + (f" ({row['reason']})" if row.get("reason") not in (None, "", row["state"]) else "")
    )
    print_success(row["success"])
    if row["success"]["tasks"]:
        print(f"  on {row['success']['tasks']} held-out tasks, sampled at the configured temperature")
    if row.get("valid_calls") is not None:
        print(f"share of valid tool calls: {row['valid_calls']:.3f}")
    print(f"run folder: {paths.root}")
    if paths.plot.exists():
        print(f"reward curve: {paths.plot}")
    print("look further:")
    commands = [("status", "jobs, accounting, success"), ("store ls", "every trajectory")]
    commands.append(("store verify", "checksums, chains, nothing trained twice"))
    if row["state"] != "done":
        commands.append(("resume", "go on"))
    for command, what in commands:
        print(f"  hpcrl {command} {paths.root}   # {what}")
