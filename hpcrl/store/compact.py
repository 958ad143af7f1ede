"""Closed segments become shards. Safe to kill anywhere, and two at once do no harm.

    claim shards/<n>.claim -> read segments -> publish shards/<n>.h5 -> unlink the segments -> drop the claim

A shard lists the segments that it was made from, so those that a crash left behind are known, never read twice, and
unlinked by the next run. A number belongs to whoever made its claim (O_EXCL) and never comes back, so nobody can
rename a shard over another's. Of two claims by living processes the lower wins.

The one place where MPI is: batches may be dealt out to its ranks.
"""

from __future__ import annotations

import contextlib
import gc
import json
import logging
import os
import sys
import time
import traceback
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, dataclass
from functools import partial
from hashlib import sha256
from importlib import metadata
from pathlib import Path
from typing import Any, Protocol

from hpcrl.layout import ProcessId, RunPaths, by_name, listed, next_number, numbered, sync_folder
from hpcrl.store.pack import Packer
from hpcrl.store.records import Torn, split
from hpcrl.store.seal import seal_dead_here
from hpcrl.store.segment import CLOSED, raw_segment, read_header, segments, uid_of
from hpcrl.store.shard import Source, sources_of, write_shard
from hpcrl.types import ConfigError, StoreError, is_number

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
    refused: str = ""  # why some or all of it was not done: another compactor is at work, or what it did is seen late


class Comm(Protocol):
    """Of an MPI communicator, what is used here."""

    @property
    def rank(self) -> int: ...

    @property
    def size(self) -> int: ...

    def allgather(self, sendobj: Any) -> list[Any]: ...


class Alone:
    """The one rank where there are no others."""

    rank, size = 0, 1

    def allgather(self, sendobj: Any) -> list[Any]:
        return [sendobj]


def mpi() -> Comm:
    """All ranks of this MPI job. Raises ConfigError when there is no MPI, or ranks that don't know of each other."""
    with contextlib.suppress(metadata.PackageNotFoundError):
        # MPICH 5.0 over UCX sends 4 KiB of its heap as a rank's address, in lines of which some are longer than the
        # 1,024 bytes that Slurm's pmi2 plugin takes for a request: depending on what the heap holds, MPI_Init never
        # returns (mpich issue 7957 may be the same). Over OFI, which PyPI's wheel has too, an address is short.
        metadata.version("mpich")
        if {"PMI_FD", "SLURM_STEP_ID"} <= os.environ.keys():
            os.environ.setdefault("MPIR_CVAR_CH4_NETMOD", "ofi")
    try:
        from mpi4py import MPI
    except (ImportError, RuntimeError) as error:
        first = str(error).partition("\n")[0]
        raise ConfigError(
            f"--mpi: needs mpi4py and an MPI library, `pip install 'hpcrl[mpi]' mpich` ({first})"
        ) from error
    told = {name: os.environ.get(name, "") for name in ("PMI_SIZE", "SLURM_STEP_NUM_TASKS", "SLURM_NTASKS")}
    several = [f"{name}={value}" for name, value in told.items() if is_number(value) and int(value) > 1]
    comm: Comm = MPI.COMM_WORLD
    if comm.size == 1 and several:
        raise ConfigError(
            f"--mpi: {several[0]}, but this process came up as an MPI job of its own: its MPI doesn't understand this "
            "launcher; try `srun --mpi=pmi2` (`srun --mpi=list` names what there is), or leave out --mpi"
        )
    return comm


@dataclass(frozen=True, slots=True, kw_only=True)
class _Plan:
    left_over: int
    refused: str = ""
    number: int = 0  # of the first batch's shard, which is claimed
    batches: Sequence[Sequence[Path]] = ()


def compact(paths: RunPaths, *, shard_bytes: int = SHARD_BYTES, comm: Comm | None = None) -> Report:
    """Move every closed segment into shards; a damaged one stays where it is and is reported.

    With a `comm` of several ranks each of them calls this, and gets the report of all. Rank 0 plans, and its claim
    stands for all; the batches are dealt out in turn, so that the shards are those that one rank makes. What goes
    wrong on one is raised on all.

    Raises StoreError when a shard's list of sources can't be read, OSError when the disk is full.
    """
    comm = comm or Alone()
    done = Report()
    sources: dict[Path, set[str]] = {}
    while True:
        with contextlib.ExitStack() as held:
            work = _nothing if comm.rank else _plan
            plan = _together(comm, work, paths, sources, done.damaged, shard_bytes, held)[0]
            done = _plus(done, Report(left_over=plan.left_over, refused=plan.refused))
            mine = list(enumerate(plan.batches))[comm.rank :: comm.size]
            for report in _together(comm, _compact_all, paths, plan.number, mine):
                done = _plus(done, report)
        if done.refused or not plan.batches:
            break
    if comm.rank == 0 and (done.segments or done.left_over):
        sync_folder(paths.log)
    return done


def _together(comm: Comm, work: Callable[..., Any], *args: Any) -> list[Any]:
    """What `work` gives on each rank, on every rank; what it raises on any, on all of them."""
    result: Any = None
    failure: Exception | None = None
    try:
        result = work(*args)
    except (StoreError, OSError) as error:
        failure = error
    except Exception:
        if comm.size == 1:
            raise
        failure = RuntimeError(f"rank {comm.rank}: {traceback.format_exc()}")  # may be none that can be sent
    found = comm.allgather((result, failure))
    for _, failed in found:
        if failed is not None:
            raise failed
    return [each for each, _ in found]


def _nothing(*_: object) -> None:
    pass


def _plan(
    paths: RunPaths, sources: dict[Path, set[str]], damaged: Sequence[str], shard_bytes: int, held: contextlib.ExitStack
) -> _Plan:
    """What is to do now. Unlinks segments that a shard has already; the claim stays in `held`."""
    left_over = 0
    number: int | str = 0
    try:
        fresh, left_over = _fresh(paths, sources, damaged)
        if not fresh:
            _rival(paths, None)
            return _Plan(left_over=left_over)
        number = held.enter_context(claim(paths))
        if isinstance(number, str):
            return _Plan(left_over=left_over, refused=number)
        fresh, more = _fresh(paths, sources, damaged)  # again, under the claim: another may have compacted since
        return _Plan(left_over=left_over + more, number=number, batches=_batches(fresh, shard_bytes))
    except FileNotFoundError as error:
        return _Plan(left_over=left_over, refused=_gone(paths, number, error))


def _gone(paths: RunPaths, number: int | str, error: FileNotFoundError) -> str:
    """Why a file is gone that nobody else may remove."""
    if isinstance(number, int) and number:
        try:
            _see_claim(paths, number)
        except FileNotFoundError:
            return f"{_claim_path(paths, number)} was taken from us: we were away for too long"
    return f"{error.filename} is listed and not to be found: this node sees late what another did"


def _see_claim(paths: RunPaths, number: int) -> None:
    """Raises FileNotFoundError when it is gone. Opened: that asks the file server, stat may not."""
    os.close(by_name(os.open, _claim_path(paths, number), os.O_RDONLY))


def _fresh(paths: RunPaths, sources: dict[Path, set[str]], damaged: Sequence[str]) -> tuple[list[Path], int]:
    """The segments that are in no shard and not damaged; those that are in one go: how many."""
    sources |= {path: sources_of(path) for path in shards(paths) if path not in sources}
    known = set[str]().union(*sources.values())
    found: list[Path] = []
    left_over = 0
    for path in segments(paths.log, CLOSED):
        with contextlib.suppress(FileNotFoundError):  # another compactor's now
            if uid_of(path) in known:
                path.unlink(missing_ok=True)
                left_over += 1
            elif str(path) not in damaged:
                found.append(path)
    return found, left_over


def _compact_all(paths: RunPaths, first: int, batches: Sequence[tuple[int, Sequence[Path]]]) -> Report:
    done = Report()
    for index, batch in batches:
        number = first + index
        with contextlib.nullcontext() if not index else _claim_this(paths, number) as refused:
            if refused:
                done = _plus(done, Report(refused=refused))
                continue
            try:
                done = _plus(done, _compact(paths, number, batch))
            except FileNotFoundError as error:
                done = _plus(done, Report(refused=_gone(paths, number, error)))
    return done


def shards(paths: RunPaths, *, anew: bool = False) -> list[Path]:
    return sorted(numbered(paths.shards, ".h5", anew=anew), key=lambda path: int(path.stem))


def _batches(fresh: Sequence[Path], shard_bytes: int) -> list[list[Path]]:
    """Segments in their order, as many as fit one shard (at least one) in each batch."""
    batches: list[list[Path]] = []
    total = 0
    for path in fresh:
        size = by_name(path.stat).st_size
        total += size
        if not batches or total > shard_bytes:
            batches.append([])
            total = size
        batches[-1].append(path)
    return batches


@contextlib.contextmanager
def _without_gc() -> Iterator[None]:
    """Of a million objects that all stay for a while, the collector would look at each again and again."""
    was = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if was:
            gc.enable()


@_without_gc()
def _compact(paths: RunPaths, number: int, batch: Sequence[Path]) -> Report:
    sources: list[Source] = []
    packer = Packer()
    damaged: list[str] = []
    for path in batch:
        try:
            # All of it is read before any of it is packed.
            found = [(offset, digest, split(kind, payload)) for offset, kind, digest, payload in raw_segment(path)]
            header = read_header(path)[0]
        except (Torn, StoreError) as error:
            logger.error("not compacted: %s: %s", path, error)
            damaged.append(str(path))
            continue
        for frame in found:
            packer.add(len(sources), *frame)
        names = {"name": path.name, "uid": header.uid, "node": header.node, "number": header.number}
        sources.append({**names, "records": len(found)})
    if not sources:
        return Report(damaged=tuple(damaged))
    held = partial(_see_claim, paths, number)
    count = write_shard(shard_path(paths, number), packer, sources, provenance(paths), before_publishing=held)
    for source in sources:
        (paths.log / source["name"]).unlink(missing_ok=True)
    return Report(shards=1, segments=len(sources), records=count, damaged=tuple(damaged))


def shard_path(paths: RunPaths, number: int) -> Path:
    return paths.shards / f"{number:06d}.h5"


def provenance(paths: RunPaths) -> dict[str, str | float]:
    config = by_name(paths.config.read_bytes) if paths.config.is_file() else b""
    return {
        "hpcrl_version": metadata.version("hpcrl"),
        "config_sha256": sha256(config).hexdigest(),
        "created_wall": time.time(),
    }


@contextlib.contextmanager
def claim(paths: RunPaths) -> Iterator[int | str]:
    """A shard number of one's own, or why there is none now."""
    number = next_number(path.stem for folder in (paths.shards, paths.damaged_shards) for path in listed(folder, "*.*"))
    while True:
        with _claim_this(paths, number) as taken:
            if not taken:
                yield _rival(paths, _claim_path(paths, number)) or number
                return
        number += 1


@contextlib.contextmanager
def _claim_this(paths: RunPaths, number: int) -> Iterator[str]:
    """Hold the claim of this number; the path of what stands against that, "" when it is held."""
    path = _claim_path(paths, number)
    text = json.dumps(asdict(ProcessId.me())).encode()  # ready, since an empty claim says nothing of its maker
    try:
        fd = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o644)
    except FileExistsError:
        yield f"{path} is held by another compactor"
        return
    try:
        os.write(fd, text)
        os.close(fd)
        # Its maker may have published, and dropped its claim, since we looked. Listed: what a network filesystem says
        # of a single name may be old, but having made the claim this node asks for the list again.
        yield f"{shard_path(paths, number)} exists" if shard_path(paths, number) in shards(paths) else ""
    finally:
        path.unlink(missing_ok=True)


def _claim_path(paths: RunPaths, number: int) -> Path:
    return paths.shards / f"{number:06d}.claim"


def _rival(paths: RunPaths, mine: Path | None) -> str:
    """Who holds a claim lower than mine. Claims of the dead are removed, with what they had begun to write.

    One that was thought dead may go on: before it publishes it looks whether it has its claim. So the claim goes first,
    then what was begun: either it sees that it lost the claim, or what it would publish is gone.
    """
    begun = listed(paths.shards, ".*.h5.*.tmp")  # before the claims: whoever writes has made one before
    claims = sorted(numbered(paths.shards, ".claim"))
    claimed = {path.stem for path in claims}
    for path in claims:
        if mine is not None and path.stem >= mine.stem:
            continue
        try:
            owner = _claimant(path)
            lives = owner.lives() if owner is not None else None
            if lives is None and mine is not None:
                # Ages by the file server's clock alone: both files were dated by it.
                lives = mine.stat().st_mtime - path.stat().st_mtime < (STALE_S if owner is not None else 10.0)
        except FileNotFoundError:
            lives = None  # dropped just now; or made just now, and this node's word that it isn't there is old
        if lives is not False:
            return f"{path} is held by a compactor that lives or can't be seen from here"
        path.unlink(missing_ok=True)
        claimed.discard(path.stem)
    for torn in begun:
        if torn.name.split(".")[1] not in claimed:
            torn.unlink(missing_ok=True)
    return ""


def _claimant(path: Path) -> ProcessId | None:
    """Who made a claim; None where that isn't whole: its maker died, or is, between making and writing it."""
    try:
        return ProcessId(**json.loads(by_name(path.read_text)))
    except (ValueError, TypeError, RecursionError):
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
