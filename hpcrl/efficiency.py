"""What a run's jobs were given, what that went to, and what of it came to nothing.

jobs.jsonl + Slurm's accounting, where it answers -> what was allocated   --+
metrics/usage (telemetry.Usage)                   -> what its time went to  +-> `efficiency`: one JSON object
ledger, progress, store (observe/tokens.py)       -> what became of tokens --+

A pool's *units* are its engines (rollout) or ranks (learner). A unit counts as its GPUs; as one where it has none. So

    allocated unit-seconds of a pool = sum of its uses

    learning     a rank is in an update: data read, forward, backward, step
    generating   an engine is up and has at least one request in it
    retry        of these two, what was done again or for nothing: the share of sampled tokens that lie off their
                 trajectory's chain (the whole run's share, for each pool), of updates that a resume made void
    weight_sync  a rank publishes a version, an engine loads and checks one
    saving       a rank writes a checkpoint
    starting     of a job and its units, from the allocation's first second; its end, after the role's
    waiting      a rank has no data; an engine is up and has no request; GPUs that no unit of the job has
    gaps         no engine is up, and none is being started
    unknown      what nobody recorded: a job's last seconds when it was killed, jobs of an older hpcrl
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from hpcrl import launch
from hpcrl.config import Config
from hpcrl.launch.sacct import Account, accounts
from hpcrl.launch.slurm import SlurmError
from hpcrl.layout import RunPaths, listed, read_json, read_lines
from hpcrl.observe.tokens import tokens
from hpcrl.store.ledger import UpdateRow, lineage
from hpcrl.types import StoreError

USES = ("learning", "generating", "retry", "weight_sync", "saving", "starting", "waiting", "gaps", "unknown")
_WORK = {"rollout": "generating", "learner": "learning"}
RECORDED = {
    "role", "index", "pool", "job", "life", "rank", "node", "began", "wall", "seconds", "ended", "cpu_s", "peak_bytes",
    "generated", "units",
}  # fmt: skip
Record = Mapping[str, Any]  # what telemetry.Usage wrote


@dataclass(frozen=True, slots=True, kw_only=True)
class Life:
    """A job with all that is known of it."""

    job: launch.Job
    records: Sequence[Record]  # of its tasks; of one that was requeued, several of each
    ended: float | None  # wall, as control saw it
    account: Account | None

    @property
    def name(self) -> str:
        return f"job {self.job.id} ({self.job.role}-{self.job.index})"

    @property
    def seconds(self) -> float | None:
        """That it had its nodes; None when nothing tells."""
        recorded = max((sum(row["seconds"] for row in rows) for rows in self.by_rank().values()), default=0.0)
        if self.account is not None:
            return max(self.account.seconds, recorded)  # in whole seconds
        if not self.records:
            return self.ended - self.job.wall if self._is_local and self.ended is not None else None
        last = max(self.records, key=lambda row: float(row["wall"]))
        tail = 0.0 if last["ended"] or self.ended is None else max(0.0, self.ended - last["wall"])
        return max(recorded, last["wall"] - self._began) + tail if self._is_local else recorded + tail

    @property
    def _is_local(self) -> bool:
        return self.job.executor == "local"

    @property
    def _began(self) -> float | None:
        """The allocation's first second; locally that is when it was submitted."""
        if self._is_local:
            return self.job.wall
        return self.account.began if self.account else None

    def by_rank(self) -> dict[int, list[Record]]:
        found: dict[int, list[Record]] = {}
        for row in sorted(self.records, key=lambda row: float(row["began"])):
            found.setdefault(row["rank"], []).append(row)
        return found

    def outside(self, rows: Sequence[Record], seconds: float) -> tuple[float, float]:
        """Of these seconds of a rank what it didn't record: before it began and after its orderly end; unknown."""
        left = max(0.0, seconds - sum(row["seconds"] for row in rows))
        if all(row["ended"] for row in rows):
            return left, 0.0
        before = 0.0 if self._began is None else min(max(0.0, rows[0]["began"] - self._began), left)
        return before, left - before


@dataclass(slots=True)
class Pool:
    """What the jobs of a pool had, in unit-seconds: GPU-seconds where its units have GPUs."""

    role: str
    gpus: int = 0  # of a unit
    jobs: int = 0
    allocated: float = 0.0
    each: dict[str, float] = field(default_factory=dict)  # seconds of units by use, whatever their GPUs
    uses: dict[str, float] = field(default_factory=dict)
    notes: list[str] = field(default_factory=list)  # what isn't in these figures, or in the use unknown; why

    def add(self, weight: int, uses: Mapping[str, float]) -> None:
        for use, seconds in uses.items():
            self.uses[use] = self.uses.get(use, 0.0) + weight * seconds
            self.allocated += weight * seconds
            self.each[use] = self.each.get(use, 0.0) + seconds


def efficiency(paths: RunPaths, config: Config) -> dict[str, Any]:
    """All that `hpcrl seff` shows. What isn't known is None, with the reason in a list of `notes`."""
    found, source, trouble = lives(paths, config)
    updates = lineage(paths)
    made = tokens(paths, config, updates, _generated(found))
    voided = _voided(paths, updates)
    pools = _pools(found, config)
    shares = {"rollout": made["retry_share"] or 0.0, "learner": voided["share"]}
    for pool in pools.values():
        work = _WORK[pool.role]
        pool.uses["retry"] = shares[pool.role] * pool.uses.get(work, 0.0)
        pool.uses[work] = pool.uses.get(work, 0.0) - pool.uses["retry"]
    return {
        "run": str(paths.root),
        "accounting": {"source": source, "trouble": trouble},
        "jobs": len(found),
        "pools": {name: _pool_row(pool) for name, pool in pools.items()},
        "engines": _engines(pools.values()),
        "updates": voided,
        "tokens": made,
        "roles": _roles(found),
    }


# ---- jobs -----------------------------------------------------------------------------------------------------------


def lives(paths: RunPaths, config: Config) -> tuple[list[Life], str, str]:
    """Every job of the run; who keeps the accounts; why it isn't Slurm where that should."""
    jobs = launch.jobs(paths)
    source, trouble = "the run's own records", ""
    kept: dict[str, Account] = {}
    slurm = [job for job in jobs if job.executor == "slurm"]
    if slurm:
        try:
            kept, source = accounts(slurm, config.name), "sacct"
        except SlurmError as error:
            trouble = str(error)
    rows, _ = read_lines(paths.jobs, skip_torn=True)
    ends = [row for row in rows if row.get("event") == "ended"]
    mine: dict[str, list[Record]] = {job.key: [] for job in jobs}
    for record in _records(paths):
        same = [
            job for job in jobs
            if (job.role, job.index, job.id) == (record["role"], record["index"], record["job"])
        ]  # fmt: skip
        if same:  # the same id twice: locally, pids come back
            by_then = [job for job in same if job.wall <= record["began"] + 1.0]
            mine[(by_then or same[:1])[-1].key].append(record)
    found = []
    for job in jobs:
        if config.launch.fleet == "presubmitted" and not mine[job.key]:
            continue  # its turn never came
        walls = [row["wall"] for row in ends if row["id"] == job.id and row["role"] == job.role]
        walls = [wall for wall in walls if wall >= job.wall]
        account = kept.get(job.id) if job.executor == "slurm" else None
        found.append(Life(job=job, records=mine[job.key], ended=min(walls, default=None), account=account))
    return found, source, trouble


def _records(paths: RunPaths) -> list[Record]:
    """What tasks have recorded; of a file that can't be read, nothing."""
    found: list[Record] = []
    for path in listed(paths.usage, "*.json"):
        try:
            row = read_json(path)
        except StoreError:
            continue
        if row is not None and row.keys() >= RECORDED:
            found.append(row)
    return found


# ---- uses -----------------------------------------------------------------------------------------------------------


def _pools(found: Sequence[Life], config: Config) -> dict[str, Pool]:
    """By name, all uses but retry apart."""
    pools: dict[str, Pool] = {}
    for life in found:
        role, index = life.job.role, life.job.index
        if role not in _WORK:
            continue
        name = life.records[0]["pool"] if life.records else _pool_name(config, role, index)
        pool = pools.setdefault(f"{role}.{name}" if role == "rollout" else role, Pool(role))
        pool.jobs += 1
        _spend(pool, life, config)
    return {name: pool for name, pool in pools.items() if pool.allocated or pool.notes}


def _pool_name(config: Config, role: str, index: int) -> str:
    return str(config.pool(role, index).name) if role in ("rollout", "sandbox") else role


def _spend(pool: Pool, life: Life, config: Config) -> None:
    """Add to a pool what one of its jobs had."""
    seconds = life.seconds
    if seconds is None:
        pool.notes.append(f"{life.name} left no record of its use: it waits, died early, or is an older hpcrl's")
        return
    count, gpus = config.learner.ranks, config.learner.gpus
    if pool.role == "rollout":
        table = config.pool("rollout", life.job.index)
        count, gpus = table.engines, table.gpus
    units: list[tuple[int, dict[str, float]]] = []
    unseen = 0.0
    for rows in life.by_rank().values():
        before, lost = life.outside(rows, seconds)
        known = max(len(row["units"]) for row in rows)
        for number in range(known or (count if pool.role == "rollout" else 1)):
            uses = {"starting": before, "unknown": lost}
            for row in rows:
                # Without any, it was starting.
                here = number < len(row["units"])
                unit: Record = row["units"][number] if here else {"uses": {"starting": row["seconds"]}}
                gpus = unit.get("gpus", gpus)
                for use, spent in unit["uses"].items():
                    uses[use] = uses.get(use, 0.0) + spent
            units.append((gpus, uses))
        unseen = max(unseen, lost)
    if unseen > 1.0:
        why = "it still runs" if life.account and life.account.state == "RUNNING" else "it was killed, or still runs"
        pool.notes.append(f"{life.name}: nothing is recorded of {unseen:.0f} s: {why}")
    # A pool's number of engines may have changed since, a learner's ranks each have a record.
    missing = max(0, count - len(units)) if pool.role == "learner" or not life.records else 0
    if missing and seconds:
        units += [(gpus, {"unknown": seconds})] * missing
        pool.notes.append(f"{life.name}: {missing} of its engines or ranks left no record")
    pool.gpus = gpus
    for own, uses in units:
        pool.add(own or 1, uses)
    spare = (life.account.gpus or 0) - sum(own for own, _ in units) if life.account else 0
    if spare > 0:
        pool.notes.append(f"{life.name} has {spare} GPUs that no engine or rank of it uses" + ", waiting" * bool(gpus))
    if spare > 0 and gpus:
        pool.uses["waiting"] = pool.uses.get("waiting", 0.0) + spare * seconds
        pool.allocated += spare * seconds


def _pool_row(pool: Pool) -> dict[str, Any]:
    known = pool.allocated or not pool.notes
    unit = "GPU" if pool.gpus else {"rollout": "engine", "learner": "rank"}[pool.role]
    return {
        "role": pool.role, "unit": unit, "jobs": pool.jobs, "allocated_s": pool.allocated if known else None,
        "uses_s": {use: pool.uses.get(use, 0.0) for use in USES} if known else None, "notes": pool.notes,
    }  # fmt: skip


def _engines(pools: Iterable[Pool]) -> dict[str, Any]:
    """Engine-seconds, whatever the GPUs of an engine: allocated, and of these idle, gaps included."""
    mine = [pool.each for pool in pools if pool.role == "rollout"]
    whole = sum(sum(each.values()) for each in mine)
    found = {use: sum(each.get(use, 0.0) for each in mine) for use in ("waiting", "gaps", "unknown")}
    idle = found["waiting"] + found["gaps"]
    row = {"allocated_s": whole, "idle_s": idle, **{f"{use}_s": seconds for use, seconds in found.items()}}
    return row if whole > found["unknown"] else dict.fromkeys(row)


def _voided(paths: RunPaths, updates: Sequence[UpdateRow]) -> dict[str, Any]:
    """Of the seconds that the learner spent in updates, the share of those that are in no lineage any more."""
    kept_s = sum(map(_spent_in, (row.metrics for row in updates)))
    made = [row for path in listed(paths.progress, "*.jsonl") for row in read_lines(path, skip_torn=True)[0]]
    made = [row for row in made if row.get("trajectories")]
    made_s = sum(_spent_in(row.get("metrics") or {}) for row in made)
    kept = sum(bool(row.trajectories) for row in updates)
    return {"made": len(made), "void": len(made) - kept, "share": max(0.0, 1.0 - kept_s / made_s) if made_s else 0.0}


def _spent_in(metrics: Mapping[str, float]) -> float:
    return sum(metrics.get(f"{part}_s", 0.0) for part in ("read", "forward_backward", "step"))


def _generated(found: Sequence[Life]) -> int | None:
    """Tokens that engines have counted; None where one hasn't, or had no time for its last count."""
    mine = [life for life in found if life.job.role == "rollout"]
    rows = [row for life in mine for row in life.records]
    if not all(life.records for life in mine) or any(row["generated"] is None or not row["ended"] for row in rows):
        return None
    return sum(int(row["generated"]) for row in rows)


# ---- CPU and memory -------------------------------------------------------------------------------------------------


def _roles(found: Sequence[Life]) -> dict[str, Any]:
    """Asked against used, by role: CPU-seconds in all; memory of the job, or node of a job, that needs the most."""
    out: dict[str, Any] = {}
    for role in launch.ROLES:
        mine = [life for life in found if life.job.role == role]
        if not mine:
            continue
        records = [row for life in mine for row in life.records]
        told = [life.account for life in mine if life.account]
        on_nodes: dict[tuple[str, str], list[Record]] = {}
        for row in records:
            on_nodes.setdefault((row["life"], row["node"]), []).append(row)
        asked_cpu_s = [row["asked_cpus"] * row["seconds"] for row in records if row["asked_cpus"]]
        finished = [one for one in told if one.cpu_s is not None]
        out[role] = {
            "jobs": len(mine),
            "cpu": {
                "asked": max((_sum(rows, "asked_cpus") or 0 for rows in on_nodes.values()), default=0) or None,
                "used_s": sum(row["cpu_s"] for row in records) if records else None,
                "mean": sum(row["cpu_s"] for row in records) / max(1e-9, _job_seconds(mine)) if records else None,
                "share": _share(sum(row["cpu_s"] for row in records if row["asked_cpus"]), sum(asked_cpu_s)),
                "sacct_used_s": sum(one.cpu_s or 0.0 for one in finished) if finished else None,
                "sacct_share": _share(
                    sum(one.cpu_s or 0.0 for one in finished), sum(one.cpus * one.seconds for one in finished)
                ),
            },
            "memory": {
                "asked_bytes": max((row["asked_bytes"] or 0 for row in records), default=0) or None,
                "peak_bytes": max((_sum(rows, "peak_bytes") or 0 for rows in on_nodes.values()), default=0) or None,
                "sacct_asked_bytes": max((one.asked_bytes or 0 for one in told), default=0) or None,
                "sacct_peak_bytes": max((one.peak_bytes or 0 for one in told), default=0) or None,
            },
        }
    return out


def _job_seconds(found: Sequence[Life]) -> float:
    return sum(max((sum(row["seconds"] for row in rows) for rows in life.by_rank().values()), default=0.0)
               for life in found)  # fmt: skip


def _sum(rows: Sequence[Record], key: str) -> int | None:
    values = [row[key] for row in rows if row[key] is not None]
    return sum(values) if values else None


def _share(part: float, whole: float) -> float | None:
    return part / whole if whole else None
