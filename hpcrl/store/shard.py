"""One shard: a sealed, immutable HDF5 file of records. The one owner of its layout; docs/store-format.md tells it.

    user block            magic | length | JSON: where each dataset lies, its type and CRC, the file's | padding | CRC
    steps [R]             one row per record, a trajectory's side by side; slices of the columns below, a CRC of each
    trajectories [K]      one row per trajectory: a summary, its slice of steps and that slice's CRC
    rewards, transitions  what END, REWARD and TRANSITION records say, as rows
    segments              what it was made from
    tokens/ids [T], text/meta [M]             all records', one after the other
    tokens/{logprobs,versions,sampled} [G]    those of the records that have any of them, defaults filled in

Every dataset is contiguous, and the user block says where: so this reader needs no HDF5, one `pread` gets a slice. Each
slice that is read is checked against its CRC before anything is made of it.
"""

from __future__ import annotations

import errno
import functools
import json
import os
from collections.abc import Callable, Collection, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from functools import cached_property
from pathlib import Path
from struct import Struct
from typing import Any

import numpy as np
from crc32c import crc32c
from numpy.typing import NDArray

from hpcrl.layout import by_name, place, publishing, write_at
from hpcrl.store.pack import Packer
from hpcrl.store.records import COLUMNS, GENERATED, LENGTH, Kind, NewerError, Record, filler, from_json
from hpcrl.store.rows import STEPS, Buffer, Row, Table, generated, table, text
from hpcrl.store.skeleton import dtype_of, lay_out
from hpcrl.types import StoreError

SCHEMA = 3  # 2: logprobs, versions and sampled as long as ids; 1: no CONTENT, headers in text/meta were all ASCII
MAGIC = b"hpcrlshd"
_HEAD = Struct("<8sII")  # magic, bytes of the user block, bytes of the JSON
_CRC = Struct("<I")
_PIECE_BYTES = 1 << 20  # read at a time
SEGMENTS = {"name": "S", "uid": "S", "node": "S", "number": "<i8", "records": "<i8"}
Source = Mapping[str, Any]  # a segment: the fields of SEGMENTS
PATHS = {**{name: f"tokens/{name}" for name in COLUMNS}, "meta": "text/meta"}
_STEPS_DTYPE = np.dtype([*STEPS.items()])
_DTYPES = {**{f"tokens/{name}": dtype for name, (dtype, _) in COLUMNS.items()}, "text/meta": np.dtype("u1")}


# ---- writing ------------------------------------------------------------------------------------------------------


def write_shard(
    path: Path,
    packer: Packer,
    sources: Sequence[Source],
    attrs: Mapping[str, Any],
    before_publishing: Callable[[], object] = lambda: None,
) -> int:
    """Write, sync and rename into place; the number of records.

    Raises OSError when there is no space, or what `before_publishing` raises; then nothing is at `path`.
    """
    columns: dict[str, Sequence[Buffer]] = {PATHS[name]: pieces for name, pieces in packer.columns().items()}
    tables = packer.tables([source["node"] for source in sources])
    tables["segments"] = table([[source[name] for name in SEGMENTS] for source in sources], SEGMENTS)
    sizes = {name: (sum(map(len, pieces)) // _DTYPES[name].itemsize, _DTYPES[name]) for name, pieces in columns.items()}
    sizes |= {"steps": (len(packer), _STEPS_DTYPE), **{name: (len(rows), rows.dtype) for name, rows in tables.items()}}
    # As the directory has them: offset, count, dtype, CRC (the first and the last later).
    places = {name: [1 << 60, count, _descr(dtype), 1 << 32] for name, (count, dtype) in sizes.items()}
    head: dict[str, Any] = {
        "schema": SCHEMA,
        "bytes": 1 << 60,
        "crc32c": 1 << 32,
        "datasets": places,
        "attrs": dict(attrs),
    }
    block = 4096
    while block < _HEAD.size + _CRC.size + len(json.dumps(head)):
        block *= 2
    with publishing(path) as temporary:
        skeleton = lay_out(block, places, {"schema": SCHEMA, **attrs})
        fd = os.open(temporary, os.O_RDWR | os.O_CREAT | os.O_TRUNC, 0o644)
        try:
            os.ftruncate(fd, skeleton.size)
            for offset, data in skeleton.written:
                write_at(fd, offset, [data])
            for name, pieces in columns.items():
                write_at(fd, places[name][0], pieces)
            with ThreadPoolExecutor(1) as disk:
                synced = disk.submit(os.fdatasync, fd)  # while we go through it all
                tables["steps"] = packer.steps(tables["trajectories"])
                written: dict[str, Sequence[Buffer]] = {name: [rows.tobytes()] for name, rows in tables.items()}
                for name, pieces in {
                    **columns,
                    **written,
                }.items():  # not of the file: a write may be lost
                    places[name][3] = functools.reduce(lambda crc, piece: crc32c(piece, crc), pieces, 0)
                for name, pieces in written.items():
                    write_at(fd, places[name][0], pieces)
                head["crc32c"], head["bytes"] = _crc_from(lambda at, size: by_name(os.pread, fd, size, at), block)
                synced.result()
            body = json.dumps(head).encode()
            whole = (_HEAD.pack(MAGIC, block, len(body)) + body).ljust(block - _CRC.size, b"\0")
            write_at(fd, 0, [whole + _CRC.pack(crc32c(whole))])
        finally:
            os.close(fd)
        before_publishing()
    return len(packer)


# ---- reading ------------------------------------------------------------------------------------------------------


class Shard:
    """An open shard. Directory and trajectories are in memory, all else is read when asked for.

    Raises StoreError when the file is damaged or newer than this reader, FileNotFoundError when it isn't there.
    """

    def __init__(self, path: Path) -> None:
        self.path = path
        self._fd = -1
        self._latest: tuple[int, Table] = (-1, np.empty(0, np.void))  # the fragment whose steps were read last
        try:
            self._load()
        except BaseException as error:
            self.close()
            if isinstance(error, KeyError | ValueError | TypeError) and not isinstance(error, StoreError):
                raise StoreError(f"{path}: damaged: {error}") from error
            raise

    def __enter__(self) -> Shard:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def _load(self) -> None:
        size, start = 4096, self._pread(0, 4096)
        if len(start) >= _HEAD.size and start.startswith(MAGIC):
            _, size, _ = _HEAD.unpack_from(start)
        if size > len(start):
            start = self._pread(0, size) if size <= 1 << 26 else b""
        self._block = size
        self.directory, self._places = parse_directory(self.path, start)
        self.trajectories = self.whole("trajectories")
        self.sources = self.whole("segments")
        self.ids = [text(one) for one in self.trajectories["id"].tolist()]

    def __len__(self) -> int:
        return self._places["steps"][1]

    def close(self) -> None:
        """Close the file; reading opens it again."""
        if self._fd >= 0:
            os.close(self._fd)
            self._fd = -1

    def whole(self, name: str) -> Table:
        """A whole dataset. Raises StoreError when its checksum differs."""
        offset, count, dtype, crc = self._places[name]
        data = self._pread(offset, count * dtype.itemsize)
        if len(data) != count * dtype.itemsize or crc32c(data) != crc:
            raise StoreError(f"{self.path}: damaged: the checksum of {name} differs")
        return _array(data, dtype)

    def steps(self, fragment: int) -> Table:
        """The rows of one trajectory (its number in `trajectories`), checked."""
        if self._latest[0] == fragment:
            return self._latest[1]
        found = self.trajectories[fragment]
        offset, _, dtype, _ = self._places["steps"]
        data = self._pread(offset + int(found["first_row"]) * dtype.itemsize, int(found["num_rows"]) * dtype.itemsize)
        if crc32c(data) != found["crc_rows"]:
            raise StoreError(f"{self.path}: damaged: the checksum of the rows of {self.ids[fragment]!r} differs")
        self._latest = (fragment, np.frombuffer(data, dtype))
        return self._latest[1]

    def rows(self, fragment: int) -> list[Row]:
        """`steps` as Rows."""
        first = int(self.trajectories[fragment]["first_row"])
        return [
            Row(
                hash=row[4].decode(), parent=row[5].decode(), root=row[6].decode(), kind=Kind(row[0]), attempt=row[2],
                step=row[3], wall=row[7], num_tokens=row[9], num_sampled=row[10], min_version=row[11],
                max_version=row[12], node=self._nodes[row[15]], segment=self._numbers[row[15]], offset=row[16],
                file=self.path.name, at=first + at,
            )
            for at, row in enumerate(self.steps(fragment).tolist())
        ]  # fmt: skip

    @cached_property
    def _nodes(self) -> list[str]:
        return [text(one) for one in self.sources["node"].tolist()]

    @cached_property
    def _numbers(self) -> list[int]:
        found: list[int] = self.sources["number"].tolist()
        return found

    def tokens(self, steps: Table, names: Collection[str] = COLUMNS) -> dict[str, NDArray[Any]]:
        """The token columns, [T] each, of rows of `steps` whose tokens lie side by side; each row's checked."""
        counts: list[int] = steps["num_tokens"].tolist()
        start, lengths = generated(steps)
        found: dict[str, NDArray[Any]] = {}
        if "ids" in names:
            found["ids"] = self._slices("ids", int(steps["token_start"][0]), counts, steps["crc_ids"].tolist())
        sizes = lengths.tolist()
        for name in [name for name in GENERATED if name in names]:
            part = self._slices(name, int(start[0]), sizes, steps[f"crc_{name}"].tolist())
            found[name] = part if sizes == counts else _spread(part, sizes, counts, name)
        return found

    def meta(self, steps: Table) -> bytes:
        """The headers' JSON, one after the other, likewise."""
        counts = steps["meta_bytes"].tolist()
        return self._slices("meta", int(steps["meta_start"][0]), counts, steps["crc_meta"].tolist()).tobytes()

    def _slices(self, name: str, start: int, counts: Sequence[int], crcs: Sequence[int]) -> NDArray[Any]:
        offset, _, dtype, _ = self._places[PATHS[name]]
        width = dtype.itemsize
        if not any(counts):
            return np.empty(0, dtype)
        data = self._pread(offset + start * width, sum(counts) * width)
        view, at = memoryview(data), 0
        for count, crc in zip(counts, crcs, strict=True):
            end = at + count * width
            if len(data) < end or crc32c(view[at:end]) != crc:
                raise StoreError(f"{self.path}: damaged: the checksum of {PATHS[name]} at byte {offset + at} differs")
            at = end
        return _array(data, dtype)

    def ahead(self, steps: Table) -> None:
        """Ask the disk for what `tokens` of these rows will read."""
        extents = [
            (int(at[0]), int(at[-1] + of[-1]))
            for at, of in ((steps["token_start"], steps["num_tokens"]), generated(steps))
        ]
        for name in COLUMNS:
            start, stop = extents[name != "ids"]
            offset, _, dtype, _ = self._places[PATHS[name]]
            self._ahead(offset + start * dtype.itemsize, (stop - start) * dtype.itemsize)

    def ahead_steps(self, fragment: int) -> None:
        """Ask the disk for what `steps` will read."""
        offset, _, dtype, _ = self._places["steps"]
        found = self.trajectories[fragment]
        self._ahead(offset + int(found["first_row"]) * dtype.itemsize, int(found["num_rows"]) * dtype.itemsize)

    def _ahead(self, offset: int, size: int) -> None:
        if self._fd < 0:
            self._fd = by_name(os.open, self.path, os.O_RDONLY)
        if size:  # 0 would mean: to the end of the file
            os.posix_fadvise(self._fd, offset, size, os.POSIX_FADV_WILLNEED)

    def record(self, row: int) -> Record:
        """Raises StoreError naming the file when a checksum differs."""
        step = self._one(row)
        head = self.meta(step)
        present = from_json(head)["arrays"]
        tokens = self.tokens(step, present) if present else {}
        arrays = [tokens[name].tobytes() for name in COLUMNS if name in present]
        return Record.decode(b"".join((LENGTH.pack(len(head)), head, *arrays)), step["hash"][0].decode())

    def _one(self, row: int) -> Table:
        fragment = int(np.searchsorted(self.trajectories["first_row"], row, side="right")) - 1
        at = row - int(self.trajectories[fragment]["first_row"])
        return self.steps(fragment)[at : at + 1]

    def check(self) -> None:
        """Read every byte. Raises StoreError when any is not what was written."""
        crc, size = _crc_from(self._pread, self._block)
        if size != self.directory["bytes"] or crc != self.directory["crc32c"]:
            for name in self._places:
                self.whole(name)
            raise StoreError(f"{self.path}: damaged: the checksum of the file differs, that of each dataset doesn't")

    def _pread(self, offset: int, size: int) -> bytes:
        for again in (True, False):
            try:
                if self._fd < 0:
                    self._fd = os.open(self.path, os.O_RDONLY)
                return os.pread(self._fd, size, offset)
            except OSError as error:
                if error.errno != errno.ESTALE or not again:
                    place(error, self.path)
                    raise
                self.close()  # a network filesystem says so once; by name it is found
        raise AssertionError


def _crc_from(pread: Callable[[int, int], bytes], at: int) -> tuple[int, int]:
    """The CRC of a file from byte `at` on, and its size. `pread`: offset, size -> bytes.

    Not through a mapping: there, what the disk can't read, or another node cuts off, ends the process (SIGBUS).
    """
    crc = 0
    while piece := pread(at, _PIECE_BYTES):
        crc = crc32c(piece, crc)
        at += len(piece)
    return crc, at


Places = dict[str, tuple[int, int, np.dtype[Any], int]]  # of datasets: offset, count, dtype, CRC


def parse_directory(path: Path, start: bytes) -> tuple[dict[str, Any], Places]:
    """The directory in a shard's first bytes. Raises StoreError when it is damaged or newer than this reader."""
    if len(start) < _HEAD.size or not start.startswith(MAGIC):
        raise StoreError(f"{path}: damaged or no shard: it has no directory")
    _, size, length = _HEAD.unpack_from(start)
    end = size - _CRC.size
    if not _HEAD.size <= end <= len(start) - _CRC.size or crc32c(start[:end]) != _CRC.unpack_from(start, end)[0]:
        raise StoreError(f"{path}: damaged: the checksum of its directory differs")
    try:
        directory: dict[str, Any] = from_json(start[_HEAD.size : _HEAD.size + length])
        if directory["schema"] > SCHEMA:
            raise NewerError(f"{path}: schema {directory['schema']}; this hpcrl reads up to {SCHEMA}: use a newer one")
        places = {name: (*row[:2], dtype_of(row[2]), row[3]) for name, row in directory["datasets"].items()}
        ends = [offset + count * dtype.itemsize for offset, count, dtype, _ in places.values()]
        if min(*ends, *(min(row[:2]) for row in places.values())) < 0 or max(ends) > directory["bytes"]:
            raise ValueError("a dataset lies outside of the file")
    except (ValueError, LookupError, TypeError, AttributeError) as error:
        if isinstance(error, NewerError):
            raise
        raise StoreError(f"{path}: damaged: its directory makes no sense: {error}") from error
    return directory, places


def _spread(part: NDArray[Any], lengths: Sequence[int], counts: Sequence[int], name: str) -> NDArray[Any]:
    """A column at full length: each row's slice where the row's tokens begin, the default where it has none."""
    pieces: list[Any] = []
    at = 0
    for length, count in zip(lengths, counts, strict=True):
        pieces.append(part[at : at + length] if length else filler(name, count))
        at += length
    return np.frombuffer(bytearray().join(pieces), COLUMNS[name][0])


def _array(data: bytes, dtype: np.dtype[Any]) -> NDArray[Any]:
    return np.frombuffer(data, dtype) if data else np.empty(0, dtype)


def _descr(dtype: np.dtype[Any]) -> Any:
    return dtype.descr if dtype.names else dtype.str


def sources_of(path: Path) -> set[str]:
    """The uids of the segments that a shard was made from."""
    with Shard(path) as shard:
        return {text(uid) for uid in shard.sources["uid"].tolist()}
