"""Closing the open segments of owners that are gone, so that compaction and other nodes may have them."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Collection
from pathlib import Path

from hpcrl.layout import RunPaths
from hpcrl.store.records import Torn, raw_frame
from hpcrl.store.remains import find_frame
from hpcrl.store.segment import OPEN, name_parts, read_header, recover, segments
from hpcrl.types import StoreError


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


def seal(paths: RunPaths, gone: Collection[str] = ()) -> list[Path]:
    """Close all open segments of a run that isn't running; the closed segments. `gone`: nodes whose owner has ended,
    as the caller knows (their job has ended).

    Raises StoreError, and closes none, while an owner lives or can't be seen from here; or where whole records lie
    behind damage, which closing would cut off.
    """
    headless = set()
    for path in segments(paths.log, OPEN):
        try:
            header, start = read_header(path)
        except Torn:
            headless.add(path)  # nothing in it was acknowledged; its owner may be about to write
            continue
        except FileNotFoundError:
            continue
        owner, node = header.owner, header.node
        lives = False if node in gone else owner.lives()
        if lives:
            raise StoreError(f"{path}: its owner, process {owner.pid} on node {node}, lives; stop the run first")
        if lives is None:
            raise StoreError(
                f"{path}: its owner, process {owner.pid} on node {node}, can't be seen from here (another machine, or "
                f"before a reboot); where its job has surely ended, say so with `--gone {node}`"
            )
        _refuse_damage(path, start)
    known = {name_parts(path)[0] for path in segments(paths.log, OPEN) if path not in headless} | set(gone)
    return seal_dead(paths, lambda node: node not in known)


def _refuse_damage(path: Path, start: int) -> None:
    data = path.read_bytes()
    end = start
    with contextlib.suppress(Torn):
        while end < len(data):
            *_, end = raw_frame(memoryview(data), end)
    if end < len(data) and find_frame(data, end) is not None:
        raise StoreError(f"{path}: damaged at byte {end}, whole records lie behind; `hpcrl store repair` rescues them")
