"""What flow must know of a run's earlier life, read back from its folder."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence

from hpcrl import flow as f
from hpcrl.config import Config
from hpcrl.layout import RunPaths, read_json
from hpcrl.store.index import Store
from hpcrl.store.ledger import UpdateRow, entries
from hpcrl.types import Ended, State


def restore(paths: RunPaths, config: Config, store: Store, rows: Sequence[UpdateRow]) -> f.Restored:
    """Read back from the run folder what flow must know of a run's earlier life. `rows`: progress' lineage."""
    updates: Counter[str] = Counter()
    versions: dict[str, int] = {}
    trained: Counter[str] = Counter()
    for update in rows:
        if update.phase:
            updates[update.phase] = update.phase_update
            trained[update.phase] += len(update.trajectories)
        if update.version >= 0 and update.phase:
            versions[update.phase] = update.version
    ledgered: Counter[str] = Counter()
    groups_done = set()
    members: Counter[str] = Counter()
    units: dict[str, tuple[int, int]] = {}
    seen: set[str] = set()
    for _, entry in entries(paths):
        if entry.trajectory in seen:
            continue
        seen.add(entry.trajectory)
        ledgered[entry.phase] += 1
        steps, tokens = units.get(entry.phase, (0, 0))
        units[entry.phase] = (steps + entry.num_steps, tokens + entry.num_sampled)
        members[entry.group] += 1
        if members[entry.group] == entry.group_size:  # else its line was torn off; it is written again
            groups_done.add(entry.group)
    evaluations = {}
    for path in paths.evals.glob("*.json"):
        row_ = read_json(path)
        if row_ is not None:
            evaluations[path.stem] = f.EvaluationResult(**row_)
    evaluations = dict(sorted(evaluations.items(), key=lambda item: item[1].version))
    counts = f.Counts()
    ended: dict[str, Ended] = {}
    attempts: dict[str, int] = {}
    num_groups: dict[str, int] = {}
    prefixes = {f"p{index}n": phase.name for index, phase in enumerate(config.phase)}
    phases = {phase.name: phase for phase in config.phase}
    finished = set()
    counted = ("status", "kind", "num_steps", "num_calls", "num_valid_calls")
    for row in store.summaries():
        trajectory, group = row["id"], row["group"]
        label = group.rsplit(".", 1)[-1]
        for prefix, name in prefixes.items():
            if label.startswith(prefix):
                num_groups[name] = max(num_groups.get(name, 0), int(label.removeprefix(prefix)) + 1)
        phase = phases.get(row["phase"])
        done_with = phase is None or updates[phase.name] >= phase.updates or group in groups_done
        if row["kind"] == "eval":
            done_with = row["phase"] in evaluations
        if not row["status"]:
            attempts[trajectory] = row["attempt"]
        elif row["status"] == State.CANCELLED or done_with:
            counts.admitted += 1
            counts.end(**{name: row[name] for name in counted})
            if row["kind"] == "user":
                finished.add(trajectory)
        elif store.head(trajectory) == row["head"] and (end := store.ended(trajectory, row["head"])):
            ended[trajectory] = end
        else:  # its end is there and something before it is not: it goes on from before that
            attempts[trajectory] = row["attempt"]
    published = [int(path.parent.name[1:]) for path in paths.weights.glob("v*/manifest.json")]
    return f.Restored(
        ledgered=ledgered, trained=trained, updates=updates, versions=versions, newest=max(published, default=-1),
        groups_done=frozenset(groups_done), ended=ended, attempts=attempts, num_groups=num_groups,
        evaluations=evaluations, units=units, counts=counts, finished=frozenset(finished),
    )  # fmt: skip
