"""What became of the tokens that engines made, and of trajectories: used, pending, or thrown away, by cause."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from hpcrl.config import Config
from hpcrl.layout import RunPaths, read_json
from hpcrl.store.index import Store
from hpcrl.store.ledger import UpdateRow, entries
from hpcrl.store.records import Kind
from hpcrl.types import Cause, State


def tokens(paths: RunPaths, config: Config, updates: Sequence[UpdateRow], engines: int | None) -> dict[str, Any]:
    """What became of the tokens that engines made, and of the trajectories: used, pending, thrown away by cause. What
    isn't known is None, with the reason in `notes`.

    `updates`: progress' lineage. `engines`: how many tokens they have counted themselves; None: not all have.
    """
    over = (read_json(paths.stopped) or {}).get("outcome") == "done"
    trained = {name for row in updates for name in row.trajectories}
    scored = {entry.trajectory for _, entry in entries(paths)}
    notes: list[str] = []
    classes: dict[str, dict[str, list[int]]] = {"used": {}, "pending": {}, "thrown_away": {}}  # -> [tokens, number]
    sampled: dict[str, tuple[int, int]] = {}  # trajectory of an engine's -> tokens, lowest version

    def count(what: str, why: str, num_tokens: int, number: int = 1) -> None:
        row = classes[what].setdefault(why, [0, 0])
        row[0] += num_tokens
        row[1] += number

    with Store(paths, open_segments=True) as store:
        for row in store.summaries():
            own = 0 if row["kind"] == "expert" else row["num_sampled"]
            sampled[row["id"]] = own, row["min_version"]
            count(*_fate(row, row["id"] in trained, row["id"] in scored, over), own)
            if row["attempt"] > 1 and row["kind"] != "expert":
                acts = [one.num_sampled for one in store.rows(row["id"]).values() if one.kind is Kind.ACT]
                if (off := sum(acts) - own) > 0:
                    count("thrown_away", "sampled again, after a fault", off)
        if store.damaged:
            notes.append(f"{len(store.damaged)} files of the store are damaged: what they held isn't counted")
    if paths.pruned.exists():
        notes.append("shards were pruned: the trajectories that they held aren't counted")
    lagged = _masked(config, updates, sampled)
    used = classes["used"].get("trained", [0, 0])
    for why, (num_tokens, number) in lagged.items():
        if num_tokens:
            used[0] -= num_tokens
            count("thrown_away", why, num_tokens, number)
    stored = sum(row[0] for rows in classes.values() for row in rows.values())
    # Of requests whose caller went away: the store never saw them.
    cut = engines - stored if engines is not None and engines >= stored else None
    if cut is None:
        why = "not all rollout jobs have recorded, at their end, what their engines made"
        if engines is not None:
            why = f"engines have counted {engines}, fewer than the store holds"
        notes.append(f"tokens of requests that were cut off: {why}")
    elif cut:
        count("thrown_away", "cut off within a request", cut, 0)
    made = stored + (cut or 0)
    lost = sum(row[0] for row in classes["thrown_away"].values())
    again = classes["thrown_away"].get("sampled again, after a fault", [0, 0])[0]
    return {
        "generated": made,
        "thrown_away": lost,
        "thrown_away_share": lost / made if made else None,
        "retry_share": again / stored if stored else None,
        "cut_off": cut,
        "classes": {
            what: {why: {"tokens": row[0], "trajectories": row[1]} for why, row in sorted(rows.items())}
            for what, rows in classes.items()
        },
        "retried_attempts": ((read_json(paths.heartbeat) or {}).get("accounting") or {}).get("faults"),
        "notes": notes,
    }


def _fate(row: Mapping[str, Any], trained: bool, scored: bool, over: bool) -> tuple[str, str]:
    """What became of a trajectory, of which the store's summary is `row`."""
    fault = row["fault"] if row["fault"] not in ("", Cause.POLICY) else ""
    if trained:
        return "used", "trained, of the expert" if row["kind"] == "expert" else "trained"
    if not row["status"]:
        return ("thrown_away", "dropped: open when the run was done") if over else ("pending", "under way")
    if row["status"] == State.CANCELLED:
        return "thrown_away", "dropped: no longer needed"
    if row["status"] == State.FAILED:
        return "thrown_away", f"failed: {fault or Cause.POLICY}"
    if fault:
        return "thrown_away", f"cut short: {fault}"
    if row["kind"] in ("eval", "user"):
        return "used", {"eval": "evaluation", "user": "asked for by users"}[row["kind"]]
    what = "scored" if scored else "of a group that isn't whole"
    return ("thrown_away", f"dropped: {what}, never trained") if over else ("pending", f"{what}, not trained yet")


def _masked(
    config: Config, updates: Sequence[UpdateRow], sampled: Mapping[str, tuple[int, int]]
) -> dict[str, tuple[int, int]]:
    """Tokens of trained trajectories that took no part: (tokens, trajectories) by cause. From what updates report of
    the tokens that they trained, and of the share that they masked."""
    old = broken = context = num_old = 0
    for row in updates:
        if "masked_share" not in row.metrics or "broken_logprobs" not in row.metrics:
            continue
        taken, share = row.metrics["tokens"], row.metrics["masked_share"]
        held = sum(sampled.get(name, (0, -1))[0] for name in row.trajectories)
        if not held:
            continue  # an expert's
        seen = round(taken / (1.0 - share)) if share < 1.0 else held
        bad = round(row.metrics["broken_logprobs"])
        masked = max(0, seen - round(taken) - bad)
        old, broken, context = old + masked, broken + bad, context + max(0, held - seen)
        oldest = row.parent_version - config.phase_named(row.phase).max_lag
        num_old += sum(0 <= sampled.get(name, (0, -1))[1] < oldest for name in row.trajectories)
    return {
        "lagged: older than max_lag": (old, num_old),
        "logprobs that are no numbers": (broken, 0),
        "of a context that was replaced": (context, 0),
    }
