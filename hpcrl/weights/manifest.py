"""A version of the weights as a folder: what its manifest says. The one owner of the manifest's keys and file names.

weights/v000012/
  part-00000-of-00002.safetensors   written, hashed and renamed by rank 0
  part-00001-of-00002.safetensors   by rank 1
  probe.safetensors                 token ids and the learner's logprobs of them, to check an engine that loaded it
  manifest.json                     last: a folder without it is no version
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterable, Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from hpcrl.types import StoreError

FORMAT = 1
MANIFEST = "manifest.json"
PROBE = "probe.safetensors"


@dataclass(frozen=True, slots=True, kw_only=True)
class TensorEntry:
    part: str  # file name
    dtype: str  # "float32", "bfloat16", …
    shape: tuple[int, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class FileEntry:
    bytes: int
    blake2b: str  # of the whole file, 32 hex characters


@dataclass(frozen=True, slots=True, kw_only=True)
class Manifest:
    version: int
    update: int  # of the learner, when it published; 0: the starting model
    parent: int  # the version that these weights were trained from; -1: none
    fingerprint: str  # of names and shapes: what an engine must have loaded to take these tensors
    tensors: Mapping[str, TensorEntry]  # by Hugging Face name; a tied tensor once
    files: Mapping[str, FileEntry]  # parts and probe
    format: int = FORMAT

    def dump(self) -> str:
        return json.dumps(asdict(self), indent=1) + "\n"


def part_name(rank: int, world: int) -> str:
    return f"part-{rank:05d}-of-{world:05d}.safetensors"


def fingerprint(shapes: Iterable[tuple[str, tuple[int, ...]]]) -> str:
    text = json.dumps(sorted((name, list(shape)) for name, shape in shapes), separators=(",", ":"))
    return hashlib.blake2b(text.encode(), digest_size=16).hexdigest()


def hash_file(path: Path) -> FileEntry:
    digest = hashlib.blake2b(digest_size=16)
    size = 0
    with path.open("rb") as file:
        while block := file.read(1 << 22):
            digest.update(block)
            size += len(block)
    return FileEntry(bytes=size, blake2b=digest.hexdigest())


def read_manifest(folder: Path) -> Manifest:
    """The manifest of a whole version. Raises StoreError naming the file when it is missing, damaged or too new."""
    path = folder / MANIFEST
    try:
        row: dict[str, Any] = json.loads(path.read_text())
        if row["format"] != FORMAT:
            raise StoreError(f"{path}: format {row['format']}, this hpcrl reads {FORMAT}")
        tensors = {
            name: TensorEntry(part=entry["part"], dtype=entry["dtype"], shape=tuple(entry["shape"]))
            for name, entry in row.pop("tensors").items()
        }
        files = {name: FileEntry(**entry) for name, entry in row.pop("files").items()}
        return Manifest(tensors=tensors, files=files, **row)
    except FileNotFoundError as error:
        raise StoreError(f"{path}: missing, so {folder.name} is no whole version") from error
    except (OSError, json.JSONDecodeError, UnicodeDecodeError, KeyError, TypeError, AttributeError) as error:
        raise StoreError(f"{path}: not a manifest ({error!r})") from error
