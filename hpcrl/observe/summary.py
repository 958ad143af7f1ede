"""What a run came to: success on held-out tasks with its interval, the reward curve as a picture."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any


def wilson(successes: int, tasks: int) -> tuple[float, float]:
    """95% interval of a share (E. B. Wilson, JASA 22, 1927: the score interval). (0, 1) for no tasks."""
    if not tasks:
        return 0.0, 1.0
    z = 1.959964
    share = successes / tasks
    centre = share + z * z / (2 * tasks)
    half = z * math.sqrt(share * (1 - share) / tasks + z * z / (4 * tasks * tasks))
    scale = 1 + z * z / tasks
    return max(0.0, (centre - half) / scale), min(1.0, (centre + half) / scale)


def success(evaluations: Mapping[str, Mapping[str, Any]]) -> dict[str, Any]:
    """`{before, after_<phase>…, tasks, interval: {name: [low, high]}}` of the evaluations that were made."""
    out: dict[str, Any] = {}
    interval: dict[str, list[float]] = {}
    for name, row in evaluations.items():
        out[name] = round(row["successes"] / row["tasks"], 4) if row["tasks"] else None
        interval[name] = [round(bound, 4) for bound in wilson(row["successes"], row["tasks"])]
    out["tasks"] = min((row["tasks"] for row in evaluations.values()), default=0)
    out["interval"] = interval
    return out


def plot(curve: Sequence[Mapping[str, Any]], evaluations: Mapping[str, Mapping[str, Any]], path: Path) -> None:
    """Mean reward per update, one line per phase, and the held-out evaluations with their intervals, as a PNG."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    figure, axes = pyplot.subplots(figsize=(8, 4.5), dpi=120)
    ends: dict[str, int] = {}
    for phase in dict.fromkeys(row["phase"] for row in curve):
        rows = [row for row in curve if row["phase"] == phase]
        updates = [row["update"] for row in rows]
        ends.setdefault(list(evaluations)[-2] if len(evaluations) > 1 else "before", updates[0])
        ends[f"after_{phase}"] = updates[-1]
        axes.plot(updates, [row["reward"] for row in rows], label=f"{phase}: mean reward of a batch", linewidth=1.2)
    for name, row in evaluations.items():
        if name in ends and row["tasks"]:
            share = row["successes"] / row["tasks"]
            low, high = wilson(row["successes"], row["tasks"])
            axes.errorbar(
                [ends[name]], [share], yerr=[[share - low], [high - share]], fmt="o", color="black", capsize=4, zorder=5
            )
            axes.annotate(f"{share:.2f}", (ends[name], share), textcoords="offset points", xytext=(7, 5))
    axes.errorbar([], [], yerr=[], fmt="o", color="black", capsize=4, label="held-out success, 95% interval")
    axes.set_xlabel("update")
    axes.set_ylabel("reward, success")
    axes.set_ylim(-0.03, 1.05)
    axes.grid(alpha=0.3)
    axes.legend(loc="best", fontsize=8)
    figure.tight_layout()
    figure.savefig(path)
    pyplot.close(figure)
