"""Versions of the weights: round trip, damage, numbers, pruning."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch

from hpcrl.layout import RunPaths
from hpcrl.types import StoreError
from hpcrl.weights.load import Probe, check, iter_tensors, newest, read_probe
from hpcrl.weights.manifest import Manifest, read_manifest
from hpcrl.weights.publish import next_version, prune, start_folder, write_manifest, write_part

TENSORS = {
    "a.weight": torch.arange(12, dtype=torch.float32).reshape(3, 4),
    "b.weight": torch.tensor([1.5, -2.25], dtype=torch.bfloat16),
    "c.bias": torch.tensor([7, 8, 9]),
}


def paths_of(root: Path) -> RunPaths:
    paths = RunPaths(root)
    paths.make()
    return paths


def probe() -> Probe:
    return Probe(
        ids=torch.tensor([[1, 2, 3], [4, 5, 0]], dtype=torch.int32),
        lengths=torch.tensor([3, 2], dtype=torch.int32),
        logprobs=torch.tensor([[0, -1.5, -2.5], [0, -0.5, 0]]),
    )


def publish(paths: RunPaths, *, parent: int = -1, update: int = 0) -> Manifest:
    """Two ranks' parts, one after the other."""
    version = next_version(paths)
    folder = start_folder(paths, version)
    names = list(TENSORS)
    parts = [write_part(folder, rank, 2, {name: TENSORS[name] for name in names[rank::2]}) for rank in range(2)]
    return write_manifest(folder, parts, probe(), version=version, update=update, parent=parent)


def test_what_is_published_comes_back_bit_for_bit(tmp_path: Path) -> None:
    paths = paths_of(tmp_path)
    publish(paths)
    publish(paths, parent=0, update=7)
    folder = paths.version(1)
    manifest = check(folder)
    assert (manifest.version, manifest.parent, manifest.update) == (1, 0, 7)
    assert manifest == read_manifest(folder)
    found = dict(iter_tensors(folder))
    assert found.keys() == TENSORS.keys()
    for name, tensor in TENSORS.items():
        assert found[name].dtype == tensor.dtype and torch.equal(found[name], tensor)
        assert manifest.tensors[name].dtype == str(tensor.dtype).removeprefix("torch.")
        assert manifest.tensors[name].shape == tuple(tensor.shape)
    assert torch.equal(read_probe(folder).logprobs, probe().logprobs)
    assert all(path.stat().st_mode & 0o777 == 0o644 for path in folder.iterdir())


def test_a_flipped_byte_a_short_and_a_missing_part_are_named(tmp_path: Path) -> None:
    paths = paths_of(tmp_path)
    publish(paths)
    folder = paths.version(0)
    for name in read_manifest(folder).files:
        path = folder / name
        whole = path.read_bytes()
        flipped = bytearray(whole)
        flipped[-1] ^= 1
        for damaged in (bytes(flipped), whole[:-3]):
            path.write_bytes(damaged)
            with pytest.raises(StoreError, match=f"{name}: damaged"):
                check(folder)
        path.unlink()
        with pytest.raises(StoreError, match=f"{name}: missing"):
            check(folder)
        path.write_bytes(whole)
    check(folder)


def test_a_folder_without_a_whole_manifest_is_no_version(tmp_path: Path) -> None:
    paths = paths_of(tmp_path)
    publish(paths)
    torn = start_folder(paths, 1)
    write_part(torn, 0, 2, TENSORS)
    assert newest(paths) == [0]
    with pytest.raises(StoreError, match="no whole version"):
        check(torn)
    (torn / "manifest.json").write_text('{"format": 1, "tens')
    with pytest.raises(StoreError, match="not a manifest"):
        check(torn)
    (torn / "manifest.json").write_text(json.dumps({"format": 99}))
    with pytest.raises(StoreError, match="format 99"):
        check(torn)


def test_numbers_never_go_back_or_mean_two_things(tmp_path: Path) -> None:
    paths = paths_of(tmp_path)
    start_folder(paths, 0)  # a start that failed before anything was published: 0 is still to come
    assert publish(paths).version == 0
    assert publish(paths).version == 1
    start_folder(paths, 2)  # torn, yet an engine may have heard of it
    assert publish(paths).version == 3
    with pytest.raises(StoreError, match="another learner"):
        start_folder(paths, 3)


def test_prune_keeps_the_newest_and_the_current_one(tmp_path: Path) -> None:
    paths = paths_of(tmp_path)
    for _ in range(6):
        publish(paths)
    paths.current.write_text("v000001\n")
    assert sorted(prune(paths, 2, protect=[2])) == [0, 3]
    assert newest(paths) == [5, 4, 2, 1]
    assert not paths.version(0).exists()
    assert next_version(paths) == 6


def test_the_fingerprint_tells_models_apart(tmp_path: Path) -> None:
    paths = paths_of(tmp_path)
    first, second = publish(paths), publish(paths)
    assert first.fingerprint == second.fingerprint
    folder = start_folder(paths, 2)
    part = write_part(folder, 0, 1, {"a.weight": torch.zeros(4, 3)})
    assert write_manifest(folder, [part], probe(), version=2, update=0, parent=1).fingerprint != first.fingerprint
