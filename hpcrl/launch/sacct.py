"""What Slurm's accounting has of a run's jobs: one `sacct` for all. Sites may lack it: who asks must do without."""

from __future__ import annotations

import re
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from datetime import datetime

from hpcrl.config import seconds_of
from hpcrl.launch.jobs import Job
from hpcrl.launch.slurm import SlurmError, ask

FIELDS = (
    *("JobIDRaw", "JobName", "State", "Start", "Elapsed", "TotalCPU", "MaxRSS", "ReqMem"),
    *("NNodes", "AllocCPUS", "AllocTRES"),
)
_UNSAID = frozenset({"", "Unknown", "None", "INVALID", "UNLIMITED", "Partition_Limit"})
_EARLY = "allocation"  # a job's name while the database has only heard of its steps


@dataclass(frozen=True, slots=True, kw_only=True)
class Account:
    """A job in all its lives (requeued, it keeps its id). None: Slurm doesn't say, or not yet."""

    state: str  # of its last life
    began: float | None  # the first
    seconds: float  # that it had its nodes
    cpus: int  # allocated, on all nodes
    gpus: int | None
    cpu_s: float | None
    peak_bytes: int | None  # of the largest task: as often as the site looks (JobAcctGatherFrequency)
    asked_bytes: int | None  # on all nodes


def accounts(jobs: Sequence[Job], run: str) -> dict[str, Account]:
    """What there is of these jobs, by id. `run`: the config's name, by which a job is told from an unrelated one that
    had its id. Raises SlurmError when accounting is off, doesn't answer, or says what can't be read."""
    if not jobs:
        return {}
    by_id = {job.id: job for job in jobs}
    lives: dict[str, list[list[dict[str, str]]]] = {}  # id -> lives -> rows: the job's, then its steps'
    said = ask(
        *("sacct", "--noheader", "--parsable2", "--duplicates", f"--format={','.join(FIELDS)}"),
        f"--jobs={','.join(by_id)}",
        tries=1,
    )
    for line in said.splitlines():
        values = line.split("|")
        if len(values) != len(FIELDS):
            raise SlurmError(f"sacct: can't read {line[:200]!r}; expected {len(FIELDS)} fields between |")
        row = dict(zip(FIELDS, values, strict=True))
        id, dot, _ = row["JobIDRaw"].partition(".")
        if not dot:
            lives.setdefault(id, []).append([row])
        elif id in lives:
            lives[id][-1].append(row)
    found = {}
    for id, job in by_id.items():
        names = (f"{run}.{job.role}-{job.index}.", _EARLY)
        if mine := [rows for rows in lives.get(id, []) if rows[0]["JobName"].startswith(names)]:
            found[id] = _account(mine)
    return found


def _account(lives: Sequence[Sequence[dict[str, str]]]) -> Account:
    heads = [rows[0] for rows in lives]
    steps = [row for rows in lives for row in rows]
    counts = [{name: _count(head, name) for name in ("NNodes", "AllocCPUS")} for head in heads]
    asked = [_memory(head, "ReqMem", *count.values()) for head, count in zip(heads, counts, strict=True)]
    return Account(
        state=heads[-1]["State"].partition(" ")[0],  # "CANCELLED by 1000"
        began=_least(_moment(head) for head in heads),
        seconds=sum(_seconds(head, "Elapsed") or 0.0 for head in heads),
        cpus=max(count["AllocCPUS"] for count in counts),
        gpus=_most(_gpus(row) for row in steps),
        # While a step runs, its figures are sstat's: here they are 0 and empty.
        cpu_s=sum(_seconds(head, "TotalCPU") or 0.0 for head in heads) or None,
        peak_bytes=_most(_memory(row, "MaxRSS") for row in steps),
        asked_bytes=_most(asked),
    )


def _most(values: Iterable[int | None]) -> int | None:
    return max((value for value in values if value is not None), default=None)


def _least(values: Iterable[float | None]) -> float | None:
    return min((value for value in values if value is not None), default=None)


def _refused(row: dict[str, str], name: str, allowed: str) -> SlurmError:
    return SlurmError(f"sacct: can't read {name} {row[name][:50]!r} of job {row['JobIDRaw'][:50]}; expected {allowed}")


def _count(row: dict[str, str], name: str) -> int:
    if not row[name].isdecimal():
        raise _refused(row, name, "a number")
    return int(row[name])


def _seconds(row: dict[str, str], name: str) -> float | None:
    """Of [[D-]H:]MM:SS[.mmm]."""
    text = row[name]
    if text in _UNSAID:
        return None
    whole, dot, part = text.partition(".")
    try:
        if ":" not in whole or (dot and not part.isdecimal()):
            raise ValueError(text)
        return seconds_of(whole) + (float(f"0.{part}") if dot else 0.0)
    except ValueError as error:
        raise _refused(row, name, "[[D-]HH:]MM:SS[.mmm]") from error


def _moment(row: dict[str, str]) -> float | None:
    if row["Start"] in _UNSAID:
        return None
    try:
        return datetime.fromisoformat(row["Start"]).timestamp()
    except ValueError as error:
        raise _refused(row, "Start", "YYYY-MM-DDTHH:MM:SS") from error


def _memory(row: dict[str, str], name: str, nodes: int = 1, cpus: int = 1) -> int | None:
    """Bytes. Slurm before 21.08 gives ReqMem per node ("4Gn") or per CPU ("4Gc"). None: not said, or 0 for all."""
    text = row[name]
    if text in _UNSAID or text.endswith("?"):
        return None
    found = re.fullmatch(r"(\d+(?:\.\d+)?)([KMGTPE]?)([nc]?)", text, re.ASCII)
    if found is None:
        raise _refused(row, name, "a number with K, M, G, T, P or E, then n or c in ReqMem of old")
    number, unit, each = found.groups()
    return int(float(number) * 1024.0 ** " KMGTPE".index(unit or " ") * {"": 1, "n": nodes, "c": cpus}[each]) or None


def _gpus(row: dict[str, str]) -> int | None:
    """AllocTRES names GPUs where the site accounts for them: "cpu=2,gres/gpu=1,gres/gpu:a100=1,mem=2G,node=1"."""
    found = re.search(r"(?:^|,)gres/gpu=(\d+)", row["AllocTRES"])
    return int(found[1]) if found else None
