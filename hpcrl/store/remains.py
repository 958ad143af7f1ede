"""Records in bytes that are damaged: the next one that is intact, and what is left of one that isn't."""

from __future__ import annotations

import contextlib
import itertools
import json
import re
from collections.abc import Iterator
from typing import Any

from hpcrl.store.records import COLUMNS, FRAME, LENGTH, MAX_PAYLOAD, Kind, Record, checksum, from_json, sound
from hpcrl.types import StoreError

_JSON_START = b'{"arrays":{'  # of every payload's header: its keys are sorted


def find_frame(data: bytes, start: int) -> tuple[int, int, bytes, memoryview, int] | None:
    """The first record at or after `start` that is intact: offset of its frame, kind, hash, payload, offset after it.

    Intact is a payload that agrees with the frame's checksum or with its hash: a frame's own fields may be damaged.
    """
    for offset in _starts(data, start, len(data)):
        _, _, crc, digest = FRAME.unpack_from(data, offset)
        payload = _payload_at(data, offset + FRAME.size)
        if payload is not None:
            with contextlib.suppress(StoreError):
                record = Record.decode(bytes(payload), digest.hex())
                true = bytes.fromhex(record.true_hash)
                end = offset + FRAME.size + len(payload)
                if checksum(record.kind, true, payload) == crc:
                    return offset, record.kind, true, payload, end
                if true == digest:
                    return offset, record.kind, true, memoryview(sound(record).payload), end
    return None


def _starts(data: bytes, start: int, stop: int) -> Iterator[int]:
    """Where in [start, stop) a frame may begin, by how the JSON in it begins."""
    ahead = FRAME.size + LENGTH.size
    at = data.find(_JSON_START, start + ahead, stop)
    while at >= 0:
        yield at - ahead
        at = data.find(_JSON_START, at + 1, stop)


def remains(data: bytes, start: int, stop: int) -> Iterator[tuple[int, dict[str, Any]]]:
    """Of the damaged frames in [start, stop): where each began, and what is left to say which record it was."""
    begins = [start, *(at for at in _starts(data, start + 1, stop)), stop]
    for at, end in itertools.pairwise(begins):
        found = what_is_left(data[at:end])
        if at == start or "kind" in found:
            if end - at >= FRAME.size:
                _, kind, _, digest = FRAME.unpack_from(data, at)
                found = {"hash": digest.hex(), **({"kind": kind} if kind in [*Kind] else {}), **found}
            yield at, found


def _payload_at(data: bytes, start: int) -> memoryview | None:
    """The payload that begins at `start`, as long as it says itself; None where it doesn't make sense."""
    (size,) = LENGTH.unpack_from(data, start)
    text = data[start + LENGTH.size : start + LENGTH.size + min(size, MAX_PAYLOAD)]
    try:
        arrays = from_json(text)["arrays"]
        end = start + LENGTH.size + size + sum(arrays.get(name, 0) * COLUMNS[name][0].itemsize for name in COLUMNS)
    except (ValueError, KeyError, TypeError, AttributeError):
        return None
    return memoryview(data)[start:end] if start < end <= len(data) else None


_HEAD_LEFT = re.compile(rb'\{"arrays":\{[^{}]*\},"attempt":(\d{1,18}),"kind":(\d{1,18}),"meta":')
_TAIL_LEFT = re.compile(rb',"parent":"([0-9a-f]*)","step":(-?\d{1,18}),"trajectory":("(?:[^"\\]|\\.)*")\}')


def what_is_left(data: bytes) -> dict[str, Any]:
    """What a damaged header's JSON still says of its record: some of kind, trajectory, attempt, step, parent."""
    found: dict[str, Any] = {}
    if head := _HEAD_LEFT.search(data):
        found |= {"attempt": int(head[1]), "kind": int(head[2])}
    if tail := _TAIL_LEFT.search(data):
        with contextlib.suppress(ValueError):
            found |= {"parent": tail[1].decode(), "step": int(tail[2]), "trajectory": json.loads(tail[3])}
    return found
