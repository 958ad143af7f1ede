"""Closed segments become shards. Safe to kill anywhere, and two at once do no harm.

    claim shards/<n>.claim -> read segments -> publish shards/<n>.h5 -> unlink the segments -> drop the claim

A shard lists the segments that it was made from, so those that a crash left behind are known, never read twice, and
unlinked by the next run. A number belongs to whoever made its claim (O_EXCL) and never comes back, so nobody can
rename a shard over another's. Of two claims by living processes the lower wins.
"""

from __future__ import annotations

import contextlib
import json
import logging
import os
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, dataclass
from hashlib import sha256
from importlib import metadata
from pathlib import Path

from hpcrl.layout import ProcessId, RunPaths, by_name, listed, sync_folder
from hpcrl.store.pack import Packer
from hpcrl.store.records import Torn, split
from hpcrl.store.segment import CLOSED, OPEN, name_parts, raw_segment, read_header, recover, segments
from hpcrl.store.shard import Source, sources_of, write_shard
from hpcrl.types import StoreError

logger = logging.getLogger(__name__)

SHARD_BYTES = 256 << 20  # of segments, read into memory for one shard
STALE_S = 900.0  # after which a claim that another machine made no longer holds


@dataclass(frozen=True, slots=True, kw_only=True)
class Report:
    shards: int = 0
    segments: int = 0
    records: int = 0
    left_over: int = 0  # segments that were in a shard already
    damaged: tuple[str, ...] = ()  # segments that could not be read; `store verify` names the place
    refused: str = ""  # why nothing was done: another compactor is at work


def compact(paths: RunPaths, *, shard_bytes: int = SHARD_BYTES) -> Report:
    """Move every closed segment into shards; a damaged one stays where it is and is reported.

    Raises StoreError when a shard's list of sources can't be read, OSError when the disk is full.
    """
    done = Report()
    sources: dict[Path, set[str]] = {}

    def fresh() -> list[Path]:
        """The segments that are in no shard and not damaged; those that are in one go."""
        nonlocal done
        sources.update({path: sources_of(path) for path in shards(paths) if path not in sources})
        found = []
        for path in segments(paths.log, CLOSED):
            with contextlib.suppress(FileNotFoundError):  # another compactor's now
                uid = _uid(path)
                if any(uid in uids for uids in sources.values()):
                    path.unlink(missing_ok=True)
                    done = _plus(done, Report(left_over=1))
                elif str(path) not in done.damaged:
                    found.append(path)
        return found

    while True:
        if not fresh():
            _rival(paths, None)
            break
        with _claim(paths) as number:
            if isinstance(number, str):
                done = _plus(done, Report(refused=number))
                break
            try:
                # Looked at again under the claim: another may have compacted since.
                done = _plus(done, _compact(paths, number, _batch(fresh(), shard_bytes)))
            except FileNotFoundError:
                claim = _claim_path(paths, number)
                if claim.exists():
                    raise
                done = _plus(done, Report(refused=f"{claim} was taken from us: we were away for too long"))
                break
    if done.segments or done.left_over:
        sync_folder(paths.log)
    return done


def shards(paths: RunPaths) -> list[Path]:
    found = [path for path in listed(paths.shards, "*.h5") if path.stem.isdigit()]
    return sorted(found, key=lambda path: int(path.stem))


def seal_dead(paths: RunPaths, alive: Callable[[str], bool]) -> list[Path]:
    """Close the open segments of owners whose node is not `alive`; the closed segments. Only for owners known dead."""
    sealed = []
    for path in segments(paths.log, OPEN):
        if not alive(name_parts(path)[0]):
            with contextlib.suppress(FileNotFoundError):
                sealed.append(recover(path))
    return [path for path in sealed if path is not None]


def seal_dead_here(paths: RunPaths) -> list[Path]:
    """`seal_dead` for owners that were processes of this machine, by pid and start time.

    Each file by its own header: the node may have a new owner already. One without a whole header says nothing; it may
    be that owner's, just made. The node's next owner removes it.
    """
    sealed = []
    for path in segments(paths.log, OPEN):
        with contextlib.suppress(Torn, FileNotFoundError):
            if read_header(path)[0].owner.lives() is False:
                sealed.append(recover(path))
    return [path for path in sealed if path is not None]


def _uid(path: Path) -> str:
    """Of a closed segment; "" when its header is damaged. Raises FileNotFoundError when it is gone."""
    try:
        return read_header(path)[0].uid
    except (Torn, StoreError):
        return ""


def _batch(fresh: Sequence[Path], shard_bytes: int) -> list[Path]:
    """The first segments that fit one shard (at least one)."""
    batch: list[Path] = []
    total = 0
    for path in fresh:
        total += by_name(path.stat).st_size
        if batch and total > shard_bytes:
            break
        batch.append(path)
    return batch


def _compact(paths: RunPaths, number: int, batch: Sequence[Path]) -> Report:
    sources: list[Source] = []
    packer = Packer()
    damaged: list[str] = []
    for path in batch:
        try:
            # All of it is read before any of it is packed.
            found = [(offset, kind, digest, split(payload)) for offset, kind, digest, payload in raw_segment(path)]
            header = read_header(path)[0]
        except (Torn, StoreError, ValueError, KeyError) as error:
            logger.error("not compacted: %s: %s", path, error)
            damaged.append(str(path))
            continue
        for frame in found:
            packer.add(len(sources), *frame)
        names = {"name": path.name, "uid": header.uid, "node": header.node, "number": header.number}
        sources.append({**names, "records": len(found)})
    if not sources:
        return Report(damaged=tuple(damaged))
    held = _claim_path(paths, number).stat
    count = write_shard(_shard(paths, number), packer, sources, _provenance(paths), before_publishing=held)
    for source in sources:
        (paths.log / source["name"]).unlink(missing_ok=True)
    return Report(shards=1, segments=len(sources), records=count, damaged=tuple(damaged))


def _shard(paths: RunPaths, number: int) -> Path:
    return paths.shards / f"{number:06d}.h5"


def _claim_path(paths: RunPaths, number: int) -> Path:
    return _shard(paths, number).with_suffix(".claim")


def _provenance(paths: RunPaths) -> dict[str, str | float]:
    config = by_name(paths.config.read_bytes) if paths.config.is_file() else b""
    return {
        "hpcrl_version": metadata.version("hpcrl"),
        "config_sha256": sha256(config).hexdigest(),
        "created_wall": time.time(),
    }


@contextlib.contextmanager
def _claim(paths: RunPaths) -> Iterator[int | str]:
    """A shard number of one's own, or why there is none now."""
    number = max((int(p.stem) for p in listed(paths.shards) if p.stem.isdigit()), default=0) + 1
    while True:
        path = _claim_path(paths, number)
        try:
            fd = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o644)
        except FileExistsError:
            number += 1
            continue
        try:
            os.write(fd, json.dumps(asdict(ProcessId.me())).encode())
            os.close(fd)
            if _shard(paths, number).exists():  # its maker published, and dropped its claim, since we looked
                number += 1
                path.unlink()
                continue
            yield _rival(paths, path) or number
        finally:
            path.unlink(missing_ok=True)
        return


def _rival(paths: RunPaths, mine: Path | None) -> str:
    """Who holds a claim lower than mine. Claims of the dead are removed, with what they had begun to write.

    One that was thought dead may go on: before it publishes it looks whether it has its claim. So the claim goes first,
    then what was begun: either it sees that it lost the claim, or what it would publish is gone.
    """
    for path in sorted(listed(paths.shards, "*.claim")):
        if mine is not None and path.stem >= mine.stem:
            continue
        with contextlib.suppress(FileNotFoundError):
            owner = _claimant(path)
            lives = owner.lives() if owner is not None else None
            if lives is None and mine is not None:
                # Ages by the file server's clock alone: both files were dated by it.
                lives = mine.stat().st_mtime - path.stat().st_mtime < (STALE_S if owner is not None else 10.0)
            if lives is not False:
                return f"{path} is held by a compactor that lives or can't be seen from here"
            path.unlink(missing_ok=True)
    for torn in listed(paths.shards, ".*.h5.*.tmp"):
        if not (paths.shards / torn.name.split(".")[1]).with_suffix(".claim").exists():
            torn.unlink(missing_ok=True)
    return ""


def _claimant(path: Path) -> ProcessId | None:
    """Who made a claim; None where that isn't whole: its maker died, or is, between making and writing it."""
    try:
        return ProcessId(**json.loads(by_name(path.read_text)))
    except (ValueError, TypeError):
        return None


def _plus(a: Report, b: Report) -> Report:
    return Report(
        shards=a.shards + b.shards,
        segments=a.segments + b.segments,
        records=a.records + b.records,
        left_over=a.left_over + b.left_over,
        damaged=a.damaged + b.damaged,
        refused=a.refused or b.refused,
    )


def main(run: str) -> int:
    """`python -m hpcrl.store.compact RUN`: also closes what dead owners of this machine left open."""
    try:
        paths = RunPaths.of(run)
        seal_dead_here(paths)
        report = compact(paths)
    except (StoreError, OSError) as error:
        print(f"hpcrl.store.compact: {error}", file=sys.stderr)
        return 2 if isinstance(error, StoreError) else 1
    print(json.dumps(asdict(report)))
    return 1 if report.damaged else 0


if __name__ == "__main__":
    sys.exit(main(*sys.argv[1:2] or [""]))
