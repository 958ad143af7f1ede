"""Makes room: removes the oldest shards, beyond a size to keep, but nothing that the run still needs.

    shards, the newest first, as many as fit -> kept
    of the others:  needed records, those of trajectories that go on in what is kept, prompts and contents of these
        more than half of a shard -> it is kept too;   else -> carried into a new shard, then the old one goes

So no trajectory that is left is cut in two. `shards/pruned.json` names the shards that went, and when.
"""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from hpcrl.layout import RunPaths, publish_json, read_json, sync_folder
from hpcrl.store.catalog import mendable
from hpcrl.store.compact import SHARD_BYTES, claim, provenance, shard_path, shards
from hpcrl.store.index import Store
from hpcrl.store.ledger import entries, lineage
from hpcrl.store.pack import Packer
from hpcrl.store.records import COLUMNS, GENERATED, Kind, Record, split
from hpcrl.store.rows import Row, generated, text
from hpcrl.store.segment import CLOSED, OPEN, read_header, segments
from hpcrl.store.shard import SEGMENTS, Shard, write_shard
from hpcrl.types import ConfigError, State, StoreError, is_number

_UNITS = {"MiB": 1 << 20, "GiB": 1 << 30, "TiB": 1 << 40}
OPEN_REASON = "has not ended"
UNTRAINED = "is in the ledger and not yet trained, as of the oldest checkpoint"
UNSCORED = "is of a group, in a phase that goes on, which is not in the ledger"
EVALUATION = "is of an evaluation under way"
NUMBERING = "has the highest number of its phase, from which groups are counted on"
CONTINUES = "goes on in a shard that is kept"


@dataclass(frozen=True, slots=True, kw_only=True)
class Pruned:
    removed: tuple[str, ...]
    kept: tuple[str, ...]  # with the reason
    freed_bytes: int  # less what was carried (unless dry_run)
    left_bytes: int
    carried: Mapping[str, int]  # reason -> trajectories carried over from the removed shards
    carried_records: int
    dry_run: bool


@dataclass(slots=True)
class _Choice:
    """What becomes of the shards."""

    kept: dict[str, str] = field(default_factory=dict)  # shard's name -> why
    carried: dict[str, dict[int, list[int]]] = field(default_factory=dict)  # of a removed one: fragment -> rows within
    reasons: Counter[str] = field(default_factory=Counter)


def size(word: str) -> int:
    """Bytes of "50GiB" and the like. Raises ConfigError.

    >>> size("1.5GiB")
    1610612736
    """
    for unit, scale in _UNITS.items():
        number = word.removesuffix(unit).strip()
        if number != word.strip() and is_number(number.replace(".", "", 1)):
            return int(float(number) * scale)
    raise ConfigError(f"--keep: {word!r} is no size; give a number and one of {', '.join(_UNITS)}, such as 50GiB")


def prune(paths: RunPaths, keep_bytes: int, *, dry_run: bool = False) -> Pruned:
    """Of a run that isn't running. Safe to kill anywhere: what is carried is published before its old shard goes.

    Raises StoreError where anything is damaged, open or being compacted.
    """
    if left_open := segments(paths.log, OPEN):
        raise StoreError(f"{left_open[0]}: is open; `hpcrl store seal` first")
    with Store(paths) as store:
        if store.damaged:
            raise StoreError(next(iter(store.damaged.values())))
        sizes = {path.name: path.stat().st_size for path in shards(paths)}
        choice = _choose(store, needed(paths, store), sizes, keep_bytes)
        gone = [name for name in sizes if name not in choice.kept]
        before = sum(sizes.values())
        if dry_run:
            for _ in _carried(paths, store, choice, gone):  # to meet what is damaged, as `_remove` would
                pass
        else:
            _remove(paths, store, choice, gone)
    left = before - sum(sizes[name] for name in gone) if dry_run else sum(p.stat().st_size for p in shards(paths))
    return Pruned(
        removed=tuple(gone), kept=tuple(f"{name}: {why}" for name, why in choice.kept.items()),
        freed_bytes=before - left, left_bytes=left, carried=dict(choice.reasons),
        carried_records=sum(len(at) for one in choice.carried.values() for at in one.values()), dry_run=dry_run,
    )  # fmt: skip


def needed(paths: RunPaths, store: Store) -> dict[str, str]:
    """Trajectories that the run still needs -> why: what flow and the learner read back when it goes on."""
    # A resume takes the newest checkpoint that is whole: at worst the oldest that there is, at best none.
    certain = min(paths.checkpointed(), default=0)
    rows = [row for row in lineage(paths) if row.update <= certain]
    trained = {trajectory for row in rows for trajectory in row.trajectories}
    phases = list(dict.fromkeys(row.phase for row in rows if row.phase))
    over = {*phases[:-1], *(phases[-1:] if rows and rows[-1].done else ())}
    ledger = {entry.trajectory: entry for _, entry in entries(paths)}
    members = Counter(entry.group for entry in ledger.values())
    whole = {entry.group for entry in ledger.values() if members[entry.group] >= entry.group_size}
    evaluated = {path.stem for path in paths.evals.glob("*.json")}
    found: dict[str, str] = {}
    highest: dict[str, tuple[int, str]] = {}
    for row in store.summaries():
        trajectory, group, phase, kind = row["id"], row["group"], row["phase"], row["kind"]
        label = group.rsplit(".", 1)[-1]
        prefix = label.rstrip("0123456789")
        if phase not in over and kind in ("train", "expert"):
            number = int(label[len(prefix) :][-18:] or 0)
            highest[prefix] = max(highest.get(prefix, (-1, "")), (number, trajectory))
        if not row["status"]:
            found[trajectory] = OPEN_REASON
        elif trajectory in ledger:
            if trajectory not in trained:
                found[trajectory] = UNTRAINED
        elif row["status"] == State.CANCELLED or kind == "user":
            continue
        elif kind == "eval":
            if phase not in evaluated:
                found[trajectory] = EVALUATION
        elif group not in whole and phase not in over:
            found[trajectory] = UNSCORED
    return {trajectory: NUMBERING for _, trajectory in highest.values()} | found


def _choose(store: Store, needs: Mapping[str, str], sizes: Mapping[str, int], keep_bytes: int) -> _Choice:
    kept: dict[str, str] = {}
    total = 0
    for name in reversed(list(sizes)):
        total += sizes[name]
        if not kept:
            kept[name] = "the newest: numbers must not come back"
        elif total <= keep_bytes:
            kept[name] = "within the size to keep"
        else:
            break
    while True:
        choice = _carry(store, needs, kept, sizes)
        more = {}
        for name, fragments in choice.carried.items():
            shard = store.shard(name)
            steps = [shard.steps(number)[at] for number, at in fragments.items()]
            carried = sum(_bytes(rows) for rows in steps)
            if 2 * carried > sizes[name]:
                more[name] = f"more than half of it is needed ({carried} bytes)"
        if not more:
            return choice
        kept |= more  # and what goes on in these has to be carried too


def _bytes(steps: Any) -> int:
    width = sum(COLUMNS[name][0].itemsize for name in GENERATED)
    tokens = int(steps["num_tokens"].sum()) * COLUMNS["ids"][0].itemsize + int(generated(steps)[1].sum()) * width
    return tokens + int(steps["meta_bytes"].sum()) + len(steps) * int(steps.dtype.itemsize)


def _carry(store: Store, needs: Mapping[str, str], kept: Mapping[str, str], sizes: Mapping[str, int]) -> _Choice:
    """What of the shards that aren't kept must stay: records of needed trajectories, of those that go on in what is
    kept, and the prompts and contents that these or kept records name."""
    choice = _Choice(kept={name: kept[name] for name in sizes if name in kept})
    seen: dict[str, set[str]] = {}  # trajectory -> hashes that are kept or carried
    roots = store.fresh_roots()
    for name in kept:
        roots |= {root.decode() for root in np.unique(store.shard(name).whole("steps")["root"]).tolist()}
    left = {trajectory for name in kept for trajectory in store.shard(name).ids}
    for name in sizes:
        shard = store.shard(name)
        for number, trajectory in enumerate(() if name in kept else shard.ids):
            if not trajectory:
                continue
            within = [place for place in store.places(trajectory) if place[0].path.name in kept]
            if not within and trajectory not in needs and not store.is_fresh(trajectory):
                continue
            if trajectory not in seen:
                seen[trajectory] = {row.hash for place, at in within for row in place.rows(at)}
            rows = shard.rows(number)
            if at := [at for at, row in enumerate(rows) if row.hash not in seen[trajectory]]:
                choice.carried.setdefault(name, {})[number] = at
                choice.reasons[needs.get(trajectory, CONTINUES)] += 1
            seen[trajectory] |= {row.hash for row in rows}
            roots |= {row.root for row in rows}
            left.add(trajectory)
    going = [row for name in sizes if name not in kept for _, rows in _shared(store.shard(name)) for row in rows]
    if any(row.kind is Kind.CONTENT for row in going):  # to know who names them, records must be read
        left |= {trajectory for trajectory in store.names() if store.is_fresh(trajectory)}
        roots |= {hash[:32] for trajectory in left for hash in store.contents(trajectory)}
    for name in sorted(sizes, key=lambda name: name not in kept):  # what a kept shard has needn't be carried
        for number, rows in _shared(store.shard(name)):
            at = [at for at, row in enumerate(rows) if row.hash in roots]
            roots -= {rows[at].hash for at in at}
            if at and name not in kept:
                choice.carried.setdefault(name, {})[number] = at
    return choice


def _shared(shard: Shard) -> Iterable[tuple[int, list[Row]]]:
    return ((number, shard.rows(number)) for number, name in enumerate(shard.ids) if not name)


def _remove(paths: RunPaths, store: Store, choice: _Choice, gone: Sequence[str]) -> None:
    """Some of the oldest at a time: carry, publish, unlink."""
    waiting: list[str] = []
    load = 0
    for name in gone:
        shard = store.shard(name)
        waiting.append(name)
        load += sum(_bytes(shard.steps(number)[at]) for number, at in choice.carried.get(name, {}).items())
        if load >= SHARD_BYTES:
            _replace(paths, store, choice, waiting)
            waiting, load = [], 0
    if waiting:
        _replace(paths, store, choice, waiting)


def _replace(paths: RunPaths, store: Store, choice: _Choice, names: Sequence[str]) -> None:
    with claim(paths) as number:
        if isinstance(number, str):
            raise StoreError(number)
        _unlink_left_over(paths, [store.shard(name) for name in names])
        packer = Packer()
        slots: dict[tuple[str, int], int] = {}  # (shard, source in it) -> source in the new one
        counts: Counter[int] = Counter()
        for name, source, offset, record in _carried(paths, store, choice, names):
            slot = slots.setdefault((name, source), len(slots))
            packer.add(slot, offset, bytes.fromhex(record.hash), split(record.kind, record.payload))
            counts[slot] += 1
        sources = []
        for (name, source), slot in slots.items():
            found = store.shard(name).sources[source]
            sources.append({**{key: found[key].item() for key in SEGMENTS}, "node": text(found["node"])})
            sources[-1]["records"] = counts[slot]
        for torn in paths.shards.glob(f".{paths.pruned.name}.*.tmp"):  # of one that was killed here
            torn.unlink(missing_ok=True)
        before = read_json(paths.pruned) or {}
        if len(packer):
            write_shard(shard_path(paths, number), packer, sources, provenance(paths))
        try:
            publish_json(paths.pruned, before | dict.fromkeys(names, time.time()))
        except OSError:
            shard_path(paths, number).unlink(missing_ok=True)  # all that is in it is still in the old ones
            raise
        for name in names:
            (paths.shards / name).unlink(missing_ok=True)
        sync_folder(paths.shards)


def _carried(
    paths: RunPaths, store: Store, choice: _Choice, names: Sequence[str]
) -> Iterator[tuple[str, int, int, Record]]:
    """Of these shards what is carried over: shard, source in it, offset there, record. Raises StoreError at damage."""
    for name in names:
        shard = store.shard(name)
        for fragment, at in choice.carried.get(name, {}).items():
            first, steps = int(shard.trajectories[fragment]["first_row"]), shard.steps(fragment)[at]
            for row, source, offset in zip(at, steps["segment"].tolist(), steps["offset"].tolist(), strict=True):
                try:
                    record = shard.record(first + row)
                except StoreError as error:
                    raise StoreError(f"of {shard.ids[fragment] or 'all'}: {mendable(error, paths)}") from error
                yield name, source, offset, record


def _unlink_left_over(paths: RunPaths, going: Sequence[Shard]) -> None:
    """Segments that a crash left beside their shard: once that is gone nobody would know that they were compacted."""
    uids = {uid for shard in going for uid in shard.sources["uid"].tolist()}
    for path in segments(paths.log, CLOSED):
        if read_header(path)[0].uid.encode() in uids:
            path.unlink(missing_ok=True)
    sync_folder(paths.log)
