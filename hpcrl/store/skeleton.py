"""What HDF5 says of a shard's datasets, made in memory: where each lies, in one piece. What is in them isn't here."""

from __future__ import annotations

import io
import os
from collections.abc import Mapping
from typing import Any

import h5py
import numpy as np


class Skeleton(io.RawIOBase):
    """The file that HDF5 writes, in memory: what it says of datasets, without their content.

    HDF5 itself writes to no disk: where a write fails, as on a full one, it crashes the process sooner or later
    (h5py/h5py#914, closed as a bug of HDF5's; seen with HDF5 2.0).
    """

    def __init__(self) -> None:
        self.written: list[tuple[int, bytes]] = []
        self.size = self._at = 0

    def write(self, data: Any) -> int:
        self.written.append((self._at, bytes(data)))
        self._at += len(data)
        self.size = max(self.size, self._at)
        return len(data)

    def readinto(self, buffer: Any) -> int:
        found = bytearray(len(buffer))
        for offset, data in self.written:
            start, stop = max(offset, self._at), min(offset + len(data), self._at + len(found))
            if start < stop:
                found[start - self._at : stop - self._at] = data[start - offset : stop - offset]
        buffer[:] = found
        self._at += len(found)
        return len(found)

    def seek(self, offset: int, whence: int = os.SEEK_SET) -> int:
        self._at = offset + {os.SEEK_SET: 0, os.SEEK_CUR: self._at, os.SEEK_END: self.size}[whence]
        return self._at

    def tell(self) -> int:
        return self._at

    def truncate(self, size: int | None = None) -> int:
        self.size = self._at if size is None else size
        return self.size


def lay_out(block: int, places: Mapping[str, list[Any]], attrs: Mapping[str, Any]) -> Skeleton:
    """An HDF5 file with room for every dataset, each in one piece; fills in where they lie."""
    links = h5py.h5p.create(h5py.h5p.LINK_CREATE)
    links.set_create_intermediate_group(True)
    layout = h5py.h5p.create(h5py.h5p.DATASET_CREATE)
    layout.set_layout(h5py.h5d.CONTIGUOUS)
    layout.set_alloc_time(h5py.h5d.ALLOC_TIME_EARLY)
    layout.set_fill_time(h5py.h5d.FILL_TIME_NEVER)
    made = Skeleton()
    with h5py.File(made, "w", userblock_size=block) as file:
        file.attrs.update(attrs)
        for name, place in places.items():
            kind = h5py.h5t.py_create(dtype_of(place[2]), logical=True)
            space = h5py.h5s.create_simple((place[1],))
            dataset = h5py.h5d.create(file.id, name.encode(), kind, space, layout, lcpl=links)
            place[0] = dataset.get_offset() if place[1] else 0
    return made


def dtype_of(descr: Any) -> np.dtype[Any]:
    """As a shard's directory tells it: numpy's name, or [name, numpy's name] of each field."""
    return np.dtype([(name, dtype) for name, dtype in descr] if isinstance(descr, list) else descr)
