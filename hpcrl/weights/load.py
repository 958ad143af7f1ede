"""Read a version: find whole ones, check them against their manifest, hand out tensors and the probe."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import load_file

from hpcrl.layout import RunPaths
from hpcrl.types import StoreError, is_number
from hpcrl.weights.manifest import MANIFEST, PROBE, Manifest, hash_file, read_manifest


@dataclass(frozen=True, slots=True, kw_only=True)
class Probe:
    """Texts with the learner's logprobs under a version: an engine that loaded it must score them alike."""

    ids: torch.Tensor  # int32 [B, T], right padded
    lengths: torch.Tensor  # int32 [B]
    logprobs: torch.Tensor  # float32 [B, T]: of ids[b, t] given ids[b, :t], at temperature 1; 0 at t = 0 and at pads


def newest(paths: RunPaths, count: int | None = None) -> list[int]:
    """Numbers of the whole versions (those with a manifest), newest first."""
    found = [
        int(path.name[1:])
        for path in paths.weights.glob("v*")
        if is_number(path.name[1:]) and (path / MANIFEST).is_file()
    ]
    return sorted(found, reverse=True)[:count]


def check(folder: Path) -> Manifest:
    """Read every file of a version and compare size and hash. Raises StoreError naming the first part that differs."""
    manifest = read_manifest(folder)
    for name, entry in manifest.files.items():
        path = folder / name
        if not path.is_file():
            raise StoreError(f"{path}: missing, though the manifest names it")
        found = hash_file(path)
        if found != entry:
            what = f"{found.bytes} bytes" if found.bytes != entry.bytes else "other content"
            raise StoreError(f"{path}: damaged: {what} than the manifest says; remove {folder.name} or copy it again")
    return manifest


def iter_tensors(folder: Path) -> Iterator[tuple[str, torch.Tensor]]:
    """(name, tensor) of a whole version, in the order of its parts. Hashes are `check`'s business.

    Raises StoreError naming the part that can't be read or whose tensors aren't those of the manifest.
    """
    manifest = read_manifest(folder)
    for part in sorted({entry.part for entry in manifest.tensors.values()}):
        expected = [name for name, entry in manifest.tensors.items() if entry.part == part]
        try:
            with safe_open(folder / part, framework="pt") as file:
                if sorted(file.keys()) != sorted(expected):
                    raise StoreError(f"{folder / part}: its tensors aren't those that the manifest names")
                for name in expected:
                    yield name, file.get_tensor(name)
        except (OSError, SafetensorError) as error:
            raise StoreError(f"{folder / part}: can't be read ({error})") from error


def read_probe(folder: Path) -> Probe:
    path = folder / PROBE
    try:
        return Probe(**load_file(path))
    except (OSError, SafetensorError, TypeError) as error:
        raise StoreError(f"{path}: can't be read as a probe ({error})") from error
