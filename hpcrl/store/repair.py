"""Rescues what is intact in damaged shards and segments, and says which records are lost.

    damaged file -> its intact records that no sound file has -> a new shard -> <name>.lost.json -> the file moves aside

Safe to kill anywhere, and to run again: until the file has moved, a second run finds the same damage, and nothing left
to do for the records that the first has published. A damaged file is kept, in `shards/damaged/` or `log/damaged/`.
"""

from __future__ import annotations

import contextlib
import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

import msgspec
import numpy as np

from hpcrl.layout import RunPaths, is_unreadable, listed, publish, read_json, sync_folder
from hpcrl.store.compact import claim, provenance, shard_path, shards
from hpcrl.store.index import Store
from hpcrl.store.ledger import entries
from hpcrl.store.pack import Packer
from hpcrl.store.records import Kind, NewerError, Record, split
from hpcrl.store.salvage import salvage
from hpcrl.store.seal import how_to_close, ownerless, seal_dead_here
from hpcrl.store.segment import CLOSED, raw_segment, read_segment, segments, uid_of
from hpcrl.store.shard import Shard, Source, write_shard
from hpcrl.types import StoreError


@dataclass(frozen=True, slots=True, kw_only=True)
class Lost:
    """A record that could not be rescued, as far as what is left of it tells; "" or None where that is damaged too."""

    trajectory: str | None  # "" of a PROMPT or CONTENT
    attempt: int | None
    step: int | None
    kind: str
    hash: str
    sure: bool  # whether all of that was under a checksum that is right

    def __str__(self) -> str:
        of = "?" if self.trajectory is None else self.trajectory or "all"
        attempt, step = ("?" if value is None else value for value in (self.attempt, self.step))
        doubt = "" if self.sure else ", as far as can be made out"
        return f"{self.kind or '?'} of {of}, attempt {attempt}, step {step}, hash {self.hash or '?'}{doubt}"


@dataclass(frozen=True, slots=True, kw_only=True)
class Repaired:
    """What came of one damaged file."""

    file: str
    damage: str
    moved_to: str  # "" when it was left where it is: nothing in it could be made out
    shard: str  # the new one; "" when there was nothing to write
    rescued: int  # records in it
    elsewhere: int  # intact records that another file has as well
    lost: tuple[Lost, ...]


def repair(paths: RunPaths) -> list[Repaired]:
    """Do it for every damaged file of a run that isn't running, after closing what dead owners of this machine left
    open. Raises StoreError while a compactor is at work."""
    seal_dead_here(paths)
    damaged = {path: text for path in shards(paths) if (text := _damage(path, _check_shard))}
    damaged |= {path: text for path in segments(paths.log, CLOSED) if (text := _damage(path, _check_segment))}
    done = [one for path in damaged if (one := _repair(paths, path, damaged)) is not None]
    for one in done:
        if not all(lost.sure for lost in one.lost):  # what else was there, nobody can say of the bytes
            more = _named(paths)
            done[done.index(one)] = replace(one, lost=(*one.lost, *more))
            _write_down(Path(one.moved_to), one.damage, (*one.lost, *more))
            break
    return done + [_left(path, how_to_close(path)) for path in ownerless(paths)]


def recorded(paths: RunPaths) -> list[Lost]:
    """All that repairs of this run have found lost. Raises StoreError where what they wrote down can't be read."""
    files = [path for at in (paths.damaged_shards, paths.damaged_log) for path in listed(at, "*.lost.json", anew=True)]
    found: list[Lost] = []
    for path in files:
        try:
            found += msgspec.convert((read_json(path) or {})["lost"], list[Lost])
        except (KeyError, msgspec.ValidationError) as error:
            raise StoreError(f"{path}: not what `hpcrl store repair` writes ({error})") from error
    return found


def _damage(path: Path, check: Callable[[Path], None]) -> str:
    """What is wrong with a file, "" where nothing is, or it is gone (a segment is in a shard by now). Raises OSError
    where that doesn't tell of the file."""
    try:
        check(path)
    except (NewerError, FileNotFoundError):
        return ""
    except (StoreError, OSError) as error:
        if isinstance(error, OSError) and not is_unreadable(error):
            raise
        return str(error)
    return ""


def _check_shard(path: Path) -> None:
    with Shard(path) as shard:
        shard.check()


def _check_segment(path: Path) -> None:
    for _ in read_segment(path):
        pass


def _left(path: Path, damage: str) -> Repaired:
    return Repaired(file=str(path), damage=damage, moved_to="", shard="", rescued=0, elsewhere=0, lost=())


def _repair(paths: RunPaths, path: Path, damaged: Mapping[Path, str]) -> Repaired | None:
    """None when somebody else has dealt with it meanwhile."""
    is_shard = path.parent == paths.shards
    with claim(paths) as number:
        if isinstance(number, str):
            raise StoreError(number)
        try:
            found = salvage(path)
        except FileNotFoundError:
            return None
        except StoreError as error:
            return _left(path, str(error))
        all_lost = [_lost(said) for said in found.lost]
        wanted = {record.hash for record, _, _ in found.records} | {lost.hash for lost in all_lost}
        elsewhere = _elsewhere(paths, wanted, damaged)
        fresh = [row for row in found.records if row[0].hash not in elsewhere]
        there = elsewhere | {record.hash for record, _, _ in found.records}  # a prompt, say, that lies here twice
        lost = tuple(row for row in all_lost if row.hash not in there)
        folder = paths.damaged_shards if is_shard else paths.damaged_log
        folder.mkdir(exist_ok=True)
        shard, rescued = "", 0
        if fresh:
            shard = str(shard_path(paths, number))
            rescued = _write(paths, number, fresh, found.sources)
        _write_down(folder / path.name, damaged[path], lost)
        path.rename(folder / path.name)
        sync_folder(folder)
        sync_folder(path.parent)
    return Repaired(
        file=str(path), damage=damaged[path], moved_to=str(folder / path.name), shard=shard, rescued=rescued,
        elsewhere=len(found.records) - len(fresh), lost=lost,
    )  # fmt: skip


def _write_down(moved: Path, damage: str, lost: Sequence[Lost]) -> None:
    rows = [asdict(row) for row in lost]
    publish(moved.with_name(f"{moved.name}.lost.json"), json.dumps({"damage": damage, "lost": rows}, indent=1) + "\n")


def _named(paths: RunPaths) -> list[Lost]:
    """What records that are there, and the ledger of their trajectories, name, that isn't here or known to be lost."""
    found: dict[str, str] = {}  # hash -> trajectory
    with Store(paths) as store:
        for trajectory in store.names():
            known = store.rows(trajectory)
            found |= {row.parent: trajectory for row in known.values() if row.parent and row.parent not in known}
            found |= {row.root: "" for row in known.values() if row.root and row.root not in store.prompts()}
        with contextlib.suppress(StoreError):  # a ledger that can't be read: `verify` says so
            for _, entry in entries(paths):
                if store.rows(entry.trajectory) and (hash := store.lacking(entry.trajectory, entry.head)):
                    found.setdefault(hash, entry.trajectory)
    for row in recorded(paths):
        found.pop(row.hash, None)
    return [Lost(trajectory=of, attempt=None, step=None, kind="", hash=hash, sure=False) for hash, of in found.items()]


def _lost(said: Mapping[str, Any]) -> Lost:
    kind = said.get("kind", 0)
    return Lost(
        trajectory=said.get("trajectory"), attempt=said.get("attempt"), step=said.get("step"),
        kind=Kind(kind).name if kind in [*Kind] else "", hash=said.get("hash", ""), sure=bool(said.get("sure")),
    )  # fmt: skip


def _elsewhere(paths: RunPaths, wanted: set[str], damaged: Mapping[Path, str]) -> set[str]:
    """Which of these hashes are in a sound file."""
    found: set[str] = set()
    encoded = np.array([hash.encode() for hash in wanted], "S32")
    for path in shards(paths):
        if path not in damaged:
            shard = Shard(path)
            hashes = shard.whole("steps")["hash"]
            found |= {hash.decode() for hash in hashes[np.isin(hashes, encoded)].tolist()}
            shard.close()
    for path in segments(paths.log, CLOSED):
        if path not in damaged:
            found |= {digest.hex() for _, _, digest, _ in raw_segment(path)} & wanted
    return found


def _write(
    paths: RunPaths, number: int, rows: Sequence[tuple[Record, int, int]], sources: Sequence[Mapping[str, Any]]
) -> int:
    """Publish these records as a shard; how many, equal ones counted once."""
    here = set()
    for path in segments(paths.log, CLOSED):
        with contextlib.suppress(FileNotFoundError):
            here.add(uid_of(path))
    packer = Packer()
    counts = [0] * len(sources)
    for record, at, offset in rows:
        packer.add(at, offset, bytes.fromhex(record.hash), split(record.kind, record.payload))
        counts[at] += 1
    listed: list[Source] = []
    for source, count in zip(sources, counts, strict=True):
        # A segment that is still there is compacted anew: what is missing here may be in it.
        uid = f"rescued-{source['uid']}" if source["uid"] in here else source["uid"]
        listed.append({**source, "uid": uid, "records": count})
    return write_shard(shard_path(paths, number), packer, listed, provenance(paths))
