"""Write a version: every rank its own part, rank 0 the manifest last.

all ranks: write_part -> PartReport --gather--> rank 0: write_manifest        (a crash before it leaves no version)
"""

from __future__ import annotations

import shutil
from collections.abc import Collection, Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path

import torch
from safetensors.torch import save_file

from hpcrl.layout import RunPaths, listed, publish, publishing, sync_folder
from hpcrl.types import StoreError, is_number
from hpcrl.weights.load import Probe, newest
from hpcrl.weights.manifest import (
    MANIFEST,
    PROBE,
    FileEntry,
    Manifest,
    TensorEntry,
    fingerprint,
    hash_file,
    part_name,
)


@dataclass(frozen=True, slots=True, kw_only=True)
class PartReport:
    """What one rank wrote."""

    name: str
    file: FileEntry
    tensors: Mapping[str, TensorEntry]


def next_version(paths: RunPaths) -> int:
    """One more than the highest folder there is, whole or torn: numbers never go back, and never mean two things.

    Where there is no whole version yet, torn folders of a start that failed go away and the first is 0.
    """
    if not newest(paths, 1):
        for torn in listed(paths.weights, "v*", anew=True):
            if not listed(torn, MANIFEST, anew=True):  # else it is whole, and this node knew it not
                shutil.rmtree(torn)
    numbers = [int(path.name[1:]) for path in listed(paths.weights, "v*", anew=True) if is_number(path.name[1:])]
    return max(numbers, default=-1) + 1


def write_part(folder: Path, rank: int, world: int, tensors: Mapping[str, torch.Tensor]) -> PartReport:
    """Write this rank's whole (unsharded) tensors durably under its own name. The folder must exist."""
    name = part_name(rank, world)
    ready = {key: tensor.detach().cpu().contiguous() for key, tensor in tensors.items()}
    with publishing(folder / name) as temporary:
        save_file(ready, temporary)
        temporary.chmod(0o644)
        file = hash_file(temporary)
    entries = {
        key: TensorEntry(part=name, dtype=str(tensor.dtype).removeprefix("torch."), shape=tuple(tensor.shape))
        for key, tensor in ready.items()
    }
    return PartReport(name=name, file=file, tensors=entries)


def write_manifest(
    folder: Path, parts: Iterable[PartReport], probe: Probe, *, version: int, update: int, parent: int
) -> Manifest:
    """Rank 0, once all parts are written: the probe, then the manifest. Only with it the version exists."""
    with publishing(folder / PROBE) as temporary:
        save_file({"ids": probe.ids, "lengths": probe.lengths, "logprobs": probe.logprobs}, temporary)
        temporary.chmod(0o644)
        files = {PROBE: hash_file(temporary)}
    tensors: dict[str, TensorEntry] = {}
    for part in parts:
        tensors.update(part.tensors)
        files[part.name] = part.file
    manifest = Manifest(
        version=version,
        update=update,
        parent=parent,
        fingerprint=fingerprint((name, entry.shape) for name, entry in tensors.items()),
        tensors=tensors,
        files=files,
    )
    publish(folder / MANIFEST, manifest.dump())
    sync_folder(folder.parent)
    return manifest


def prune(paths: RunPaths, keep: int, protect: Collection[int] = ()) -> list[int]:
    """Remove whole versions but the newest `keep`, the one that CURRENT names, and `protect`; the numbers removed.

    The highest number always stays, so that numbers can't go back. The manifest goes first: a reader meets a whole
    version or none.
    """
    kept = {*protect, *newest(paths, keep)}
    current = paths.current.read_text().strip() if paths.current.exists() else ""
    removed = []
    for version in newest(paths):
        folder = paths.version(version)
        if version in kept or current in (folder.name, str(version)):
            continue
        (folder / MANIFEST).unlink()
        shutil.rmtree(folder, ignore_errors=True)
        removed.append(version)
    return removed


def start_folder(paths: RunPaths, version: int) -> Path:
    """Rank 0: make the folder of a version to come. Raises StoreError if the number is taken."""
    folder = paths.version(version)
    try:
        folder.mkdir(parents=True)
    except FileExistsError as error:
        raise StoreError(f"{folder}: exists; another learner publishes into this run") from error
    return folder
