"""The record: what one is, its hash, its bytes. No other file knows the format, which makes this one over 400 lines;
docs/store-format.md explains it.

    frame = length u32 | kind u8 | crc32c u32 | hash 16 bytes | payload      (little endian; length: the payload's)
    payload = header length u32 | header JSON | ids | logprobs | versions | sampled     (raw arrays, present ones only)

The chain of a trajectory, each record naming its parent by hash:

    ADOPT -> ACT -> OBSERVE -> ACT -> … -> END
             |root                     off the chain: PROMPT, CONTENT (shared by all that name them), REWARD, TRANSITION

The invariant by which a context comes back: the ids of the PROMPT that the newest `root` names, then the ids of the
record that names it and of every record after that, in chain order.
"""

from __future__ import annotations

import base64
import json
import math
import struct
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from enum import IntEnum
from functools import cached_property
from hashlib import blake2b, sha256
from typing import Annotated, Any

import msgspec
import numpy as np
from crc32c import crc32c
from numpy.typing import ArrayLike, NDArray

from hpcrl.types import BoolArray, Float32Array, Int32Array, StoreError

FORMAT = 3  # 2: no CONTENT, the header's JSON was all ASCII, its hash blake2b
FRAME = struct.Struct("<IBI16s")
LENGTH = struct.Struct("<I")
MAX_PAYLOAD = 1 << 30  # bytes; a longer length is damage, not a record


class Kind(IntEnum):
    PROMPT = 1  # token ids that open a context; keyed by them alone, so a host stores a group's once
    ADOPT = 2  # an attempt begins
    ACT = 3  # what the policy sampled, and the calls in it
    OBSERVE = 4  # what came of it, and the tokens that it adds
    END = 5  # the attempt's terminal record
    REWARD = 6  # a score given beside the chain
    TRANSITION = 7  # a change of state
    CONTENT = 8  # bytes that other records name by their SHA-256: media, tool output that the model didn't see


KINDS: Mapping[int, Kind] = {int(kind): kind for kind in Kind}
CHAINED = frozenset({Kind.ADOPT, Kind.ACT, Kind.OBSERVE, Kind.END})
SHARED = frozenset({Kind.PROMPT, Kind.CONTENT})  # of no trajectory; keyed by what they hold alone
SUMMED = frozenset({Kind.ADOPT, Kind.END, Kind.REWARD, Kind.TRANSITION})  # whose meta becomes rows of a shard's tables

# The meta keys that a record of each kind must have (docs/store-format.md); `store verify --deep` refuses one without.
REQUIRED: Mapping[Kind, tuple[str, ...]] = {
    Kind.PROMPT: (),
    Kind.ADOPT: (
        *("task", "kind", "group", "member", "phase", "seed", "sampling"),
        *("job", "node", "incarnation", "sandbox", "pinned", "wall", "mono", "boot_id", "state"),
    ),
    Kind.ACT: (
        *("root", "tools", "calls", "finish_reason", "spans", "seed", "request", "cached_tokens"),
        *("queue_s", "duration_s", "wall", "mono"),
    ),
    Kind.OBSERVE: ("parts", "results", "state", "fault", "done", "truncated", "wall", "mono"),
    Kind.END: (
        *("status", "fault", "rewards", "num_steps", "num_sampled", "num_tokens", "min_version", "max_version"),
        *("duration_s", "num_calls", "num_valid_calls", "wall", "mono"),
        *("trajectory", "attempt", "kind", "group", "phase"),
    ),
    Kind.REWARD: ("source", "value", "wall"),
    Kind.TRANSITION: ("state", "fault", "waited_s", "wall", "mono", "boot_id"),
    Kind.CONTENT: ("data",),
}
# The keys of each element of the lists within.
REQUIRED_WITHIN: Mapping[tuple[Kind, str], tuple[str, ...]] = {
    (Kind.ACT, "calls"): ("name", "arguments", "key", "legal", "effects"),
    (Kind.OBSERVE, "parts"): ("role", "type", "text"),
    (Kind.OBSERVE, "results"): (*("name", "status", "duration_s", "cut_reason", "unseen_bytes", "unseen_hash"),),
}

COLUMNS: Mapping[str, tuple[np.dtype[Any], Any]] = {  # of tokens: dtype, value where the record has none
    "ids": (np.dtype("<i4"), 0),
    "logprobs": (np.dtype("<f4"), 0.0),
    "versions": (np.dtype("<i4"), -1),
    "sampled": (np.dtype("?"), False),
}
GENERATED = ("logprobs", "versions", "sampled")  # those that only a record of what the policy sampled has

_FIELDS = {"trajectory": str, "attempt": int, "step": int, "parent": str, "meta": dict}  # of a header
_SIZES = [(name, dtype.itemsize) for name, (dtype, _) in COLUMNS.items()]
NO_IDS = np.empty(0, "<i4")
NO_LOGPROBS = np.empty(0, "<f4")
NO_SAMPLED = np.empty(0, "?")


@dataclass(frozen=True, kw_only=True, eq=False)
class Record:
    """One record. `ids` [T]; the other arrays are [T], or empty where the policy sampled none of the tokens.

    Equal content has an equal `hash`, in whatever file it lies. That of a PROMPT is made of its ids alone, that of a
    CONTENT is the first half of its data's SHA-256.
    """

    kind: Kind
    trajectory: str = ""  # "" for PROMPT and CONTENT
    attempt: int = 0
    step: int = -1  # -1 before the first step
    parent: str = ""  # hash of the record before it on the chain; "" for a first ADOPT and off the chain
    meta: Mapping[str, Any] = field(default_factory=dict)  # JSON; finite numbers only
    ids: Int32Array = field(default_factory=lambda: NO_IDS)
    # Natural log, at the sampling temperature; 0 where not sampled.
    logprobs: Float32Array = field(default_factory=lambda: NO_LOGPROBS)
    versions: Int32Array = field(default_factory=lambda: NO_IDS)  # that sampled the token; -1 where not sampled
    sampled: BoolArray = field(default_factory=lambda: NO_SAMPLED)

    def __post_init__(self) -> None:
        for name, (dtype, _) in COLUMNS.items():
            array = np.ascontiguousarray(getattr(self, name), dtype)
            assert array.ndim == 1 and len(array) in (0, len(self.ids)), f"{name}: {array.shape}, ids {len(self.ids)}"
            object.__setattr__(self, name, array)

    @cached_property
    def hash(self) -> str:
        """32 hexadecimal characters. A record that was read has the one that was stored with it; `true_hash` is made
        anew."""
        return self.true_hash

    @property
    def true_hash(self) -> str:
        if self.kind is Kind.PROMPT:
            return prompt_hash(self.ids)
        if self.kind is Kind.CONTENT:
            return sha256(self.data).hexdigest()[:32]
        made = sha256(self.payload).hexdigest()[:32]
        stored: str = self.__dict__.get("hash", made)
        if stored != made and stored == blake2b(self.payload, digest_size=16).hexdigest():
            return stored  # of a format before 3
        return made

    @property
    def data(self) -> bytes:
        """What a CONTENT holds."""
        return base64.b64decode(self.meta["data"], validate=True)

    @cached_property
    def payload(self) -> bytes:
        """Raises TypeError or ValueError when `meta` is not JSON."""
        arrays = {name: array for name in COLUMNS if len(array := getattr(self, name))}
        head = {
            "kind": int(self.kind),
            "trajectory": self.trajectory,
            "attempt": self.attempt,
            "step": self.step,
            "parent": self.parent,
            "meta": self.meta,
            "arrays": {name: len(array) for name, array in arrays.items()},
        }
        text = to_json(head)
        text += b" " * (-len(text) % 4)  # so that the arrays are aligned where they lie
        return b"".join((LENGTH.pack(len(text)), text, *arrays.values()))

    @classmethod
    def decode(cls, payload: bytes, hash: str = "") -> Record:
        """`hash`: as it was stored with the payload. Raises StoreError when the bytes are no record."""
        try:
            text, rest = _cut(payload)
            head = from_json(text)
            if wrong := [name for name, kind in _FIELDS.items() if type(head[name]) is not kind]:
                raise ValueError(f"{wrong[0]} is {head[wrong[0]]!r:.80}")
            if max(abs(head["attempt"]), abs(head["step"])) >= 1 << 31:
                raise ValueError(f"attempt {head['attempt']}, step {head['step']}: out of range")
            arrays = _arrays(rest, head.pop("arrays"))
            values = {name: np.frombuffer(view, COLUMNS[name][0]) for name, view in arrays.items()}
            record = cls(**{**head, **values, "kind": Kind(head["kind"])})
            _ = record.data if record.kind is Kind.CONTENT else b""
        except (struct.error, ValueError, KeyError, TypeError, AttributeError, AssertionError) as error:
            raise StoreError(f"not a record: {error}") from error
        record.__dict__["payload"] = payload
        if hash:
            record.__dict__["hash"] = hash
        return record

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Record) and self.payload == other.payload

    def __hash__(self) -> int:
        return hash(self.payload)

    def filled(self, column: str) -> NDArray[Any]:
        """A token column at full length [T], with the default where the record has none."""
        array: NDArray[Any] = getattr(self, column)
        if len(array) == len(self.ids):
            return array
        dtype, default = COLUMNS[column]
        return np.full(len(self.ids), default, dtype)

    @property
    def size(self) -> int:
        """Bytes of its frame."""
        return FRAME.size + len(self.payload)

    def frame(self) -> bytes:
        digest = bytes.fromhex(self.hash)
        return (
            FRAME.pack(len(self.payload), self.kind, checksum(self.kind, digest, self.payload), digest) + self.payload
        )


def joined(parts: Sequence[NDArray[Any]], column: str) -> NDArray[Any]:
    """The parts of a token column, one after the other: numpy's concatenate, in a third of the time for small parts."""
    if len(parts) == 1:
        return parts[0]
    buffers: Any = parts  # as mypy doesn't know of numpy's
    return np.frombuffer(bytearray().join(buffers), COLUMNS[column][0])


_fillers: dict[str, memoryview] = {}


def filler(column: str, count: int) -> memoryview:
    """A token column's default, `count` times, as bytes."""
    dtype, default = COLUMNS[column]
    made = _fillers.get(column)
    if made is None or len(made) < count * dtype.itemsize:
        made = _fillers[column] = memoryview(np.full(max(count, 4096), default, dtype).tobytes())
    return made[: count * dtype.itemsize]


def prompt(ids: ArrayLike) -> Record:
    """The PROMPT record of these token ids [T]."""
    return Record(kind=Kind.PROMPT, ids=np.asarray(ids, COLUMNS["ids"][0]))


def content(data: bytes) -> Record:
    """The CONTENT record of these bytes."""
    return Record(kind=Kind.CONTENT, meta={"data": base64.b64encode(data).decode()})


def named(meta: Mapping[str, Any]) -> list[str]:
    """The contents that a record's meta names, by their SHA-256."""
    rows = (*(meta.get("parts") or ()), *(meta.get("results") or ()))
    return [row[key] for row in rows for key in ("media", "content") if row.get(key)] + list(meta.get("contents") or ())


def sound(record: Record) -> Record:
    """As it must have been: a hash of what a shared record holds doesn't cover the rest of it, but that is known."""
    if record.kind is Kind.CONTENT:
        return content(record.data)
    return prompt(record.ids) if record.kind is Kind.PROMPT else record


def prompt_hash(ids: Int32Array) -> str:
    return blake2b(np.ascontiguousarray(ids, "<i4").tobytes(), digest_size=16, person=b"prompt").hexdigest()


def checksum(kind: int, digest: bytes, payload: bytes | memoryview) -> int:
    """CRC-32C (Castagnoli) of a frame's kind, hash and payload."""
    return int(crc32c(payload, crc32c(bytes((kind,)) + digest)))


_encode = msgspec.json.Encoder(order="sorted").encode
_TOO_DEEP = "JSON that is nested too deeply"
_SIMPLE, _KEYS = frozenset({str, int, bool, type(None)}), frozenset({str})


def to_json(value: Mapping[str, Any]) -> bytes:
    """Compact and sorted, so that equal content gives equal bytes. Raises TypeError or ValueError for what is no JSON.

    UTF-8; ASCII where there is a lone surrogate, as in a tool's output, which UTF-8 has no bytes for.
    """
    try:
        if _is_plain(value):
            return _encode(value)
    except (ValueError, OverflowError, RecursionError):
        pass
    try:
        return json.dumps(value, sort_keys=True, separators=(",", ":"), allow_nan=False).encode()
    except RecursionError as error:
        raise ValueError(_TOO_DEEP) from error


def _is_plain(value: Any) -> bool:
    """Whether it is what JSON has, and nothing that would silently become that. Not of what is huge, or in itself."""
    todo = [value]
    for one in todo:
        kind = type(one)
        if kind is dict:
            if not _KEYS.issuperset(map(type, one)):
                return False
            todo += one.values()
        elif kind is list or kind is tuple:
            todo += one
        elif kind not in _SIMPLE and not (kind is float and math.isfinite(one)):
            return False
        if len(todo) > 100_000:
            return False
    return True


def from_json(text: bytes | memoryview) -> Any:
    """Raises ValueError."""
    try:
        try:
            return msgspec.json.decode(text)
        except msgspec.DecodeError:  # of a lone surrogate, for one
            return json.loads(bytes(text))
    except RecursionError as error:
        raise ValueError(_TOO_DEEP) from error


_Int32 = Annotated[int, msgspec.Meta(ge=-(1 << 31), lt=1 << 31)]


class Skimmed(msgspec.Struct):
    """Of a header, what places a record: of the rest no objects are made."""

    class Meta(msgspec.Struct):
        root: str | None = None
        wall: float | None = None

    kind: int
    trajectory: str
    attempt: _Int32
    step: _Int32
    parent: str
    arrays: dict[str, int]
    meta: Meta


_skim = msgspec.json.Decoder(Skimmed).decode
Parts = tuple[Skimmed, memoryview, dict[str, memoryview], Mapping[str, Any]]


def split(kind: int, payload: bytes | memoryview) -> Parts:
    """A payload's header, the header's JSON, the bytes of each array that is there, and the meta of those SUMMED.

    Raises StoreError when the bytes are no record of that kind.
    """
    try:
        text, rest = _cut(payload)
        try:
            head = _skim(text)
        except msgspec.DecodeError:  # a root or time that is none, half a surrogate pair
            whole = from_json(text)
            root, wall = whole["meta"].get("root"), whole["meta"].get("wall")
            placed = {"root": str(root or ""), "wall": float(wall) if isinstance(wall, int | float) else None}
            head = msgspec.convert({**whole, "meta": placed}, Skimmed)
        if head.kind != kind or kind not in KINDS:
            raise ValueError(f"kind {kind} in the frame, {head.kind} within")
        return head, text, _arrays(rest, head.arrays), from_json(text)["meta"] if kind in SUMMED else {}
    except (struct.error, ValueError, KeyError, TypeError, AttributeError, OverflowError, RecursionError) as error:
        raise StoreError(f"not a record: {error}") from error


def _cut(payload: bytes | memoryview) -> tuple[memoryview, memoryview]:
    """The header's JSON, and what follows."""
    view = memoryview(payload)
    start = LENGTH.size + LENGTH.unpack_from(view)[0]
    return view[LENGTH.size : start], view[start:]


def _arrays(rest: memoryview, counts: Mapping[str, int]) -> dict[str, memoryview]:
    arrays: dict[str, memoryview] = {}
    start = 0
    num_tokens = counts.get("ids", 0)
    for name, size in _SIZES:
        if count := counts.get(name, 0):
            if count != num_tokens:
                raise ValueError(f"{name}: {count}, ids: {num_tokens}")
            arrays[name] = rest[start : start + count * size]
            start += count * size
    if start != len(rest):
        raise ValueError(f"arrays of {len(rest)} bytes where the header says {start}")
    return arrays


class NewerError(StoreError):
    """A file that a newer hpcrl wrote: not to be read here, but not damaged."""


class Torn(Exception):
    """The bytes at an offset are no whole frame: a torn tail in an open segment, damage in a closed one."""


def raw_frame(data: memoryview, offset: int) -> tuple[int, bytes, memoryview, int]:
    """Kind, hash and payload of the frame at `offset`, the offset after it. Raises Torn where there is no whole one."""
    if len(data) - offset < FRAME.size:
        raise Torn("header cut short")
    size, kind, crc, digest = FRAME.unpack_from(data, offset)
    start = offset + FRAME.size
    if size > MAX_PAYLOAD or len(data) - start < size:
        raise Torn(f"payload of {size} bytes cut short")
    payload = data[start : start + size]
    if checksum(kind, digest, payload) != crc:
        raise Torn("checksum differs")
    return kind, digest, payload, start + size


def read_frame(data: bytes | memoryview, offset: int) -> tuple[Record, int]:
    """The record at `offset` and the offset after it. Raises Torn, with the reason, where there is no whole one."""
    kind, digest, payload, end = raw_frame(memoryview(data), offset)
    record = Record.decode(bytes(payload), digest.hex())
    if record.kind != kind:
        raise Torn(f"kind {kind} in the frame, {record.kind} within")
    return record, end
