"""A run at a glance in a terminal: from control's status file alone, so it works wherever the run folder is seen."""

from __future__ import annotations

import time
from collections.abc import Mapping
from typing import Any

from rich.console import Console, Group
from rich.live import Live
from rich.progress_bar import ProgressBar
from rich.table import Table
from rich.text import Text

from hpcrl.observe.summary import success

PLAIN_S = 10.0  # between two plain lines


class Watch:
    """Shows statuses as they come: a live panel on a terminal, else one line every few seconds and at each change."""

    def __init__(self, console: Console | None = None) -> None:
        self.console = console or Console()
        self._live = Live(console=self.console, auto_refresh=False) if self.console.is_terminal else None
        self._last_line = 0.0
        self._last_key: Any = None

    def __enter__(self) -> Watch:
        if self._live:
            self._live.start()
        return self

    def __exit__(self, *_: object) -> None:
        if self._live:
            self._live.stop()

    def show(self, status: Mapping[str, Any]) -> None:
        if self._live:
            self._live.update(panel(status), refresh=True)
            return
        key = (status["state"], status["phase"], status["evaluating"], len(status["evaluations"]), wrong(status))
        if key != self._last_key or time.monotonic() - self._last_line > PLAIN_S:
            self._last_key, self._last_line = key, time.monotonic()
            self.console.print(line(status), highlight=False, markup=False, soft_wrap=True)

    def say(self, text: str) -> None:
        (self._live.console if self._live else self.console).print(text, highlight=False, markup=False, soft_wrap=True)


def line(status: Mapping[str, Any]) -> str:
    """The status on one line."""
    updates, counts = status["updates"], status["trajectories"]
    parts = [
        f"[{status['phase'] or status['state']}]",
        f"update {updates['done']}/{updates['total']}",
        f"reward {number(status['reward'])}",
        f"held-out {latest(status)}",
        f"running {counts['running']} / tools {counts['waiting']} / scored {counts['scored']}",
        f"{status['tokens_per_s']:.0f} tokens/s",
        f"engine busy {status['busy_share']:.0%}",
        f"lag {status['lag']}",
        f"ETA {duration(status['eta_s'])}",
    ]
    if status.get("pending"):
        parts.append(f"pending {', '.join(status['pending'])}")
    if faults := sum(status["accounting"]["faults"].values()):
        parts.append(f"faults {faults}")
    if status["evaluating"]:
        parts.insert(1, f"evaluating {status['evaluating']}")
    return "  ".join(parts) + (f"\nwrong: {wrong(status)}" if wrong(status) else "")


def panel(status: Mapping[str, Any]) -> Group:
    updates, counts = status["updates"], status["trajectories"]
    table = Table.grid(padding=(0, 2))
    for label, value in (
        ("phase", status["phase"] + (f"  (evaluating {status['evaluating']})" if status["evaluating"] else "")),
        ("updates", f"{updates['done']} of {updates['total']}   ETA {duration(status['eta_s'])}"),
        ("reward", number(status["reward"])),
        ("held-out success", latest(status)),
        (
            "trajectories",
            f"{counts['running']} running, {counts['waiting']} waiting for tools, {counts['scored']} scored",
        ),
        (
            "engine",
            f"{status['tokens_per_s']:.0f} tokens/s, busy {status['busy_share']:.0%}, version {status['version']}",
        ),
        ("lag", str(status["lag"])),
        ("faults", faults(status)),
        *([("pending jobs", ", ".join(status["pending"]))] if status.get("pending") else []),
        *([("wrong", wrong(status))] if wrong(status) else []),
    ):
        table.add_row(Text(label, style="bold"), value)
    return Group(table, ProgressBar(total=max(1, updates["total"]), completed=updates["done"], width=60))


def faults(status: Mapping[str, Any]) -> str:
    """How many attempts failed, by cause, and why the latest did."""
    counts = ", ".join(f"{count} {cause}" for cause, count in status["accounting"]["faults"].items())
    return f"{counts}; the latest: {status['last_fault'][:150]}" if counts else "none"


def wrong(status: Mapping[str, Any]) -> str:
    """The worst of what is wrong, and how much more there is."""
    found: list[str] = status.get("wrong", [])  # a control of before had none
    more = f" (and {len(found) - 1} more: `hpcrl status --json`)" if len(found) > 1 else ""
    return found[0][:400] + more if found else ""


def latest(status: Mapping[str, Any]) -> str:
    """The newest evaluation."""
    if not status["evaluations"]:
        return "–"
    shares = success(status["evaluations"])
    name = list(status["evaluations"])[-1]
    return f"{number(shares[name])} ({name.replace('_', ' ')})"


def number(value: float | None) -> str:
    return "–" if value is None else f"{value:.3f}"


def duration(seconds: float | None) -> str:
    if seconds is None:
        return "–"
    minutes, rest = divmod(int(seconds), 60)
    hours, minutes = divmod(minutes, 60)
    return f"{hours}:{minutes:02}:{rest:02}" if hours else f"{minutes}:{rest:02}"
