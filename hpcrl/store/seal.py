"""Closing the open segments of owners that are gone, so that compaction and other nodes may have them."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Collection, Iterable
from pathlib import Path

from hpcrl.layout import RunPaths
from hpcrl.store.remains import find_frame
from hpcrl.store.segment import OPEN, name_parts, owner_of, recover, segments
from hpcrl.types import StoreError


def seal_dead_here(paths: RunPaths) -> list[Path]:
    """Close the open segments of owners that were processes of this machine and are gone, by pid and start time; the
    closed segments.

    Each file by its own header: the node may have a new owner already. One without a whole header says nothing; it may
    be that owner's, just made. The node's next owner closes or removes it.
    """
    dead = []
    for path in segments(paths.log, OPEN):
        with contextlib.suppress(FileNotFoundError):
            owner = owner_of(path)
            if owner is not None and owner.lives() is False:
                dead.append(path)
    return _close(dead)


def seal_ended(paths: RunPaths, ended: Callable[[str], bool]) -> list[Path]:
    """Close the open segments of nodes whose owner has surely ended, as the caller knows; the closed segments."""
    return _close([path for path in segments(paths.log, OPEN) if ended(name_parts(path)[0])])


def seal(paths: RunPaths, gone: Collection[str] = ()) -> list[Path]:
    """Close all open segments of a run that isn't running; the closed segments. `gone`: nodes whose owner has ended,
    as the caller knows (their job has ended).

    Raises StoreError, and closes none, while an owner lives or can't be seen from here. Of a file without a whole
    header nobody can say whose it is; one that holds no record either stays: its owner may be about to write.
    """
    dead = []
    for path in segments(paths.log, OPEN):
        node = name_parts(path)[0]
        with contextlib.suppress(FileNotFoundError):
            owner = owner_of(path)
            lives = False if node in gone else owner is not None and owner.lives()
            if owner is not None and lives:
                raise StoreError(f"{path}: its owner, process {owner.pid} on node {node}, lives; stop the run first")
            if owner is not None and lives is None:
                raise StoreError(
                    f"{path}: its owner, process {owner.pid} on node {node}, can't be seen from here (another machine, "
                    f"or before a reboot); where its job has surely ended, say so with `--gone {node}`"
                )
            if owner is not None or node in gone:
                dead.append(path)
    for path in ownerless(paths):
        if path not in dead:
            raise StoreError(how_to_close(path))
    return _close(dead)


def ownerless(paths: RunPaths) -> list[Path]:
    """Open segments that hold records, and whose header is damaged."""
    found = []
    for path in segments(paths.log, OPEN):
        with contextlib.suppress(FileNotFoundError):
            # Again at the end: one that was just being made has its header when it has a record.
            if owner_of(path) is None and find_frame(path.read_bytes(), 0) and owner_of(path) is None:
                found.append(path)
    return found


def how_to_close(path: Path) -> str:
    """What to tell of an ownerless segment."""
    node = name_parts(path)[0]
    return (
        f"{path}: its header is damaged, so that its owner isn't known; where the job of node {node} has surely ended, "
        f"`hpcrl store seal` closes it with `--gone {node}`"
    )


def _close(dead: Iterable[Path]) -> list[Path]:
    closed = []
    for path in dead:
        with contextlib.suppress(FileNotFoundError):  # somebody else has closed it meanwhile
            closed.append(recover(path))
    return [path for path in closed if path is not None]
