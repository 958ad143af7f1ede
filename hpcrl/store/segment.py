"""One segment file: its name, its header, reading it, and making a dead owner's segment whole. Owns no policy.

    <node>-<number>.open   being written by its owner       <node>-<number>.seg   closed, never written again
    file = magic | header length u32 | header JSON | crc32c of the JSON u32 | frames (records.py)

`<node>.last` holds the highest number that was ever given on the node, so that none comes back after compaction.
"""

from __future__ import annotations

import contextlib
import json
import logging
import os
import shutil
import struct
import uuid
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from pathlib import Path

from crc32c import crc32c

from hpcrl.layout import (
    ProcessId,
    by_name,
    listed,
    next_number,
    numbered,
    publish,
    publishing,
    read_from,
    sync_file,
    sync_folder,
)
from hpcrl.store.records import FORMAT, FRAME, NewerError, Record, Torn, from_json, raw_frame, read_frame
from hpcrl.store.remains import find_frame
from hpcrl.types import StoreError, is_number

logger = logging.getLogger(__name__)

MAGIC = b"hpcrlseg"
_U32 = struct.Struct("<I")
OPEN, CLOSED = ".open", ".seg"


@dataclass(frozen=True, slots=True)
class Header:
    node: str
    number: int
    uid: str  # of this file, whatever its name: what a shard lists as its source
    owner: ProcessId
    format: int = FORMAT

    def encode(self) -> bytes:
        text = json.dumps(asdict(self)).encode()
        return MAGIC + _U32.pack(len(text)) + text + _U32.pack(crc32c(text))


def name_parts(path: Path) -> tuple[str, int]:
    """(node, number) of a segment file's name."""
    node, _, number = path.stem.rpartition("-")
    if not node or not is_number(number):
        raise StoreError(f"{path}: not a segment's name (<node>-<number>{CLOSED})")
    return node, int(number)


def segments(folder: Path, suffix: str, *, anew: bool = False) -> list[Path]:
    """The segments with this suffix, by node and number."""
    return sorted(numbered(folder, suffix, named=True, anew=anew), key=name_parts)


def create(folder: Path, node: str, home: Path) -> tuple[Path, int, Header, bytes]:
    """Make an open segment: its path, file descriptor, and the header with its bytes, which are still to be written.

    `home`: the run's log folder, where closed segments end up; its numbers hold for `folder`, too.
    """
    last = home / f"{node}.last"
    names = [(place, suffix) for place in {folder, home} for suffix in (OPEN, CLOSED)]
    taken = [path.stem.rpartition("-") for place, suffix in names for path in listed(place, f"*{suffix}")]
    highest = ""
    with contextlib.suppress(FileNotFoundError):
        highest = by_name(read_from, last, 0).decode(errors="replace").strip()
        if highest and not is_number(highest):
            raise StoreError(f"{last}: must hold the highest number that was given on this node, not {highest[:40]!r}")
    number = next_number((highest, *(number for name, _, number in taken if name == node)))
    publish(last, f"{number}\n")
    path = folder / f"{node}-{number}{OPEN}"
    fd = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o644)
    header = Header(node, number, uuid.uuid4().hex, ProcessId.me())
    return path, fd, header, header.encode()


def close_name(path: Path) -> Path:
    """Rename an open segment to its closed name, durably."""
    closed = path.with_suffix(CLOSED)
    path.rename(closed)
    sync_folder(path.parent)
    return closed


def ship(path: Path, home: Path) -> None:
    """Move a closed segment into another filesystem's folder, durably. Killed in between it lies in both."""
    with publishing(home / path.name) as temporary:
        shutil.copyfile(path, temporary)
    path.unlink()


def _read(path: Path, start: int = 0, size: int = -1) -> bytes:
    return by_name(read_from, path, start, size)


def read_header(path: Path, data: bytes | None = None) -> tuple[Header, int]:
    """The header and the offset of the first frame. Raises Torn when it isn't whole, StoreError when it isn't ours.

    `data`: what the file holds, where it has been read.
    """
    data = _read(path, 0, 4096) if data is None else data[:4096]
    start = len(MAGIC) + _U32.size
    if len(data) < start:
        raise Torn("header cut short")
    if not data.startswith(MAGIC):
        raise Torn("no segment header") if not data.strip(b"\0") else StoreError(f"{path}: not a segment")
    (size,) = _U32.unpack_from(data, len(MAGIC))
    text = data[start : start + size]
    if len(data) < start + size + _U32.size:
        raise Torn("header cut short")
    if _U32.unpack_from(data, start + size)[0] != crc32c(text):
        raise Torn("header's checksum differs")
    try:
        row = from_json(text)
        if row["format"] > FORMAT:
            raise NewerError(f"{path}: format {row['format']}; this hpcrl reads up to {FORMAT}: use a newer one")
        return Header(**{**row, "owner": ProcessId(**row["owner"])}), start + size + _U32.size
    except (LookupError, TypeError, ValueError) as error:
        if isinstance(error, NewerError):
            raise
        raise Torn(f"header makes no sense: {error}") from error


def read_segment(path: Path, start: int | None = None) -> Iterator[tuple[int, Record]]:
    """`raw_segment`, decoded."""
    for offset, _, digest, payload in raw_segment(path, start):
        try:
            yield offset, Record.decode(bytes(payload), digest.hex())
        except StoreError as error:
            raise StoreError(f"{path}: damaged at byte {offset}: {error}") from error


def raw_segment(path: Path, start: int | None = None) -> Iterator[tuple[int, int, bytes, memoryview]]:
    """(offset, kind, hash, payload) of each frame from byte `start` on (default: the first frame).

    A closed segment must be whole: StoreError names file and offset of any damage. An open one ends at its torn tail,
    and what was read of it is synced here first: its owner may have written it and not yet synced it.
    """
    is_open = path.suffix == OPEN
    try:
        offset = read_header(path)[1] if start is None else start
    except Torn as torn:
        if is_open:
            return
        raise StoreError(f"{path}: damaged at byte 0: {torn}") from torn
    base = offset
    data = memoryview(_read(path, base))
    if is_open and data:
        sync_file(path)
    while offset - base < len(data):
        try:
            kind, digest, payload, end = raw_frame(data, offset - base)
        except Torn as torn:
            if is_open:
                return
            raise StoreError(f"{path}: damaged at byte {offset}: {torn}") from torn
        yield offset, kind, digest, payload
        offset = base + end


def read_at(fd: int, offset: int, name: str) -> Record:
    """The record of one frame of an open file; `name` for the StoreError that damage raises."""
    head = os.pread(fd, FRAME.size, offset)
    try:
        if len(head) < FRAME.size:
            raise Torn("header cut short")
        return read_frame(head + os.pread(fd, FRAME.unpack(head)[0], offset + FRAME.size), 0)[0]
    except (Torn, StoreError) as torn:
        raise StoreError(f"{name}: damaged at byte {offset}: {torn}") from torn


def owner_of(path: Path) -> ProcessId | None:
    """Who writes, or wrote, a segment; None where its header isn't whole: just being made, or damaged.

    Raises NewerError, FileNotFoundError.
    """
    try:
        return read_header(path)[0].owner
    except NewerError:
        raise
    except (Torn, StoreError):
        return None


def uid_of(path: Path) -> str:
    """ "" when its header is damaged. Raises FileNotFoundError when it is gone."""
    try:
        return read_header(path)[0].uid
    except (Torn, StoreError):
        return ""


def whole_until(data: bytes, start: int, stop: int | None = None) -> tuple[int, str]:
    """Where the whole frames end that follow each other from byte `start` on, up to `stop`; why it goes on no further,
    "" where it is through."""
    view, end = memoryview(data), start
    while end < (len(data) if stop is None else stop):
        try:
            *_, end = raw_frame(view, end)
        except Torn as torn:
            return end, str(torn)
    return end, ""


def recover(path: Path, limit: int | None = None) -> Path | None:
    """Close an open segment whose owner is gone: trim what lies behind its last whole record or beyond `limit`, sync,
    rename.

    Returns the closed segment's path, or None when no record was in it (then it is unlinked). Whole records behind what
    isn't whole may have been acknowledged (damage came later), or not (a power cut left a hole): they stay, with what
    lies before them, readers take what is intact, and `store repair` says what isn't. Nothing else that is cut was
    acknowledged: that comes after the sync of everything before it. Raises StoreError where the file isn't whole up to
    `limit`, the bytes that a sync confirmed; or is no segment, nor holds a record.
    """
    data = _read(path)
    strange: StoreError | None = None
    try:
        first = read_header(path, data)[1]
        end, why = whole_until(data, first, limit)
    except NewerError:
        raise
    except (Torn, StoreError) as error:
        first = end = 0
        why, strange = str(error), error if isinstance(error, StoreError) else None
    if limit is not None and end != limit:
        raise StoreError(f"{path}: is whole up to byte {end} ({why}), but {limit} bytes were made durable")
    last = end
    while limit is None and why and (behind := find_frame(data, last)) is not None:
        last, why = whole_until(data, behind[-1])
    if last > end:
        logger.error("%s: damaged at byte %d, whole records lie behind; `hpcrl store repair` rescues them", path, end)
    elif strange is not None:
        raise strange
    if last < len(data):
        logger.warning("%s: cut at byte %d, %d bytes (%s)", path, last, len(data) - last, why or "never acknowledged")
    if last == first:
        path.unlink()
        sync_folder(path.parent)
        return None
    fd = os.open(path, os.O_RDWR)
    try:
        os.ftruncate(fd, last)
        os.fsync(fd)
    finally:
        os.close(fd)
    return close_name(path)
