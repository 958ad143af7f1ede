"""Checkpoints of the learner: model, optimizer, random state, and where in the run they were taken.

    checkpoints/update-000400.tmp/   torch.distributed.checkpoint, every rank its own files
    checkpoints/update-000400.tmp/complete.json   last: what each file must be
    checkpoints/update-000400/       the rename; only now is an older one removed

One that is torn or damaged is never chosen: `newest_whole` compares every file with complete.json.
"""

from __future__ import annotations

import dataclasses
import json
import logging
import os
import shutil
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.checkpoint import state_dict_loader, state_dict_saver
from torch.distributed.checkpoint.state_dict import get_state_dict, set_state_dict

from hpcrl.layout import RunPaths, publish, read_json, sync_folder
from hpcrl.learner.policy import Policy
from hpcrl.types import StoreError
from hpcrl.weights.manifest import FileEntry, hash_file

COMPLETE = "complete.json"
FORMAT = 1
log = logging.getLogger("hpcrl.learner")


@dataclass(frozen=True, slots=True, kw_only=True)
class Position:
    """Where in the run a checkpoint stands."""

    update: int  # optimizer steps so far, over all phases
    phase: int  # index of the phase that it was taken in
    phase_update: int  # updates done in it
    version: int  # the newest version when it was taken
    progress: int  # incarnation of the progress file that holds this update's row


def save(paths: RunPaths, policy: Policy, optimizer: torch.optim.Optimizer, position: Position, keep: int) -> None:
    """Write a checkpoint durably and remove those beyond the newest `keep`. A collective of all ranks."""
    final = paths.checkpoint(position.update)
    temporary = final.with_name(final.name + ".tmp")
    rank = dist.get_rank()
    if rank == 0:
        shutil.rmtree(temporary, ignore_errors=True)
        temporary.mkdir(parents=True)
    dist.barrier()
    model, optim = get_state_dict(policy, optimizer)
    state_dict_saver.save({"model": model, "optim": optim, "rng": torch.get_rng_state()}, checkpoint_id=temporary)
    mine = list(temporary.glob(f"__{rank}_*.distcp")) + ([temporary / ".metadata"] if rank == 0 else [])
    files = {path.name: dataclasses.asdict(_settle(path)) for path in mine}
    gathered: list[dict[str, Any]] = [{} for _ in range(dist.get_world_size())]
    dist.all_gather_object(gathered, files)
    if rank == 0:
        whole = {name: entry for part in gathered for name, entry in part.items()}
        row = {"format": FORMAT, "position": dataclasses.asdict(position), "files": whole}
        publish(temporary / COMPLETE, json.dumps(row, indent=1) + "\n")
        # One of this number is damaged or of a lineage that was left: nothing else writes a number again.
        shutil.rmtree(final, ignore_errors=True)
        temporary.rename(final)
        sync_folder(paths.checkpoints)
        there = paths.checkpointed()
        left = [update for update in there if update > position.update]  # damaged, or of a lineage that was left
        for old in [*left, *there[len(left) + keep :]]:
            shutil.rmtree(paths.checkpoint(old), ignore_errors=True)
    dist.barrier()


def _settle(path: Path) -> FileEntry:
    fd = os.open(path, os.O_RDONLY)
    try:
        os.fsync(fd)
    finally:
        os.close(fd)
    return hash_file(path)


def newest_whole(paths: RunPaths) -> tuple[Path, Position] | None:
    """The newest checkpoint whose every file is as it was written; damaged ones are logged and passed over."""
    for update in paths.checkpointed():
        folder = paths.checkpoint(update)
        try:
            return folder, _check(folder)
        except StoreError as error:
            log.warning("checkpoint passed over: %s", error)
    return None


def _check(folder: Path) -> Position:
    row = read_json(folder / COMPLETE)
    if row is None or row.get("format") != FORMAT:
        raise StoreError(f"{folder / COMPLETE}: missing, or not of format {FORMAT}")
    for name, entry in row["files"].items():
        path = folder / name
        if not path.is_file() or dataclasses.asdict(hash_file(path)) != entry:
            raise StoreError(f"{path}: missing or damaged")
    return Position(**row["position"])


def load(folder: Path, policy: Policy, optimizer: torch.optim.Optimizer) -> None:
    """Take a checkpoint's state into policy, optimizer and random state; the number of ranks may differ. Collective."""
    model, optim = get_state_dict(policy, optimizer)
    state: dict[str, Any] = {"model": model, "optim": optim, "rng": torch.get_rng_state()}
    state_dict_loader.load(state, checkpoint_id=folder)
    set_state_dict(policy, optimizer, model_state_dict=state["model"], optim_state_dict=state["optim"])
    torch.set_rng_state(state["rng"])
