"""One rank's part of an update as tensors: sequences in, micro-batches with advantages and masks out."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from hpcrl.types import Sequence_


@dataclass(frozen=True, slots=True, kw_only=True)
class MicroBatch:
    """Rows for one forward, and of their N trained tokens what the loss needs."""

    ids: Tensor  # int64 [B, T], right padded with 0
    positions: Tensor  # int64 [N], flat index of the token before each trained one
    targets: Tensor  # int64 [N]
    behaviour: Tensor  # float32 [N], logprob at sampling
    advantages: Tensor  # float32 [N]
    current: Tensor  # bool [N], sampled by the version that the learner now holds

    def to(self, device: torch.device) -> MicroBatch:
        return MicroBatch(**{name: getattr(self, name).to(device) for name in self.__slots__})


@dataclass(frozen=True, slots=True, kw_only=True)
class Counts:
    """Sampled tokens of one rank's rows, by what becomes of them."""

    trained: int = 0
    too_old: int = 0  # lag above the phase's max_lag
    broken: int = 0  # a logprob that is no finite number: the engine's fault, not trained
    lag: int = 0  # of the trained ones, summed


def build(
    sequences: Sequence[Sequence_], advantages: Sequence[float], *, version: int, max_lag: int | None
) -> tuple[MicroBatch, Counts]:
    """A micro-batch of these rows. `max_lag` None: behaviour cloning, where no policy of ours sampled the tokens.

    An empty list gives one row with nothing to train: its rank still takes part in the forward's collectives.
    """
    width = max((len(sequence.ids) for sequence in sequences), default=2)
    ids = np.zeros((max(len(sequences), 1), width), np.int64)
    parts: list[tuple[np.ndarray, ...]] = []
    too_old = broken = lag = 0
    for row, (sequence, advantage) in enumerate(zip(sequences, advantages, strict=True)):
        ids[row, : len(sequence.ids)] = sequence.ids
        at = np.flatnonzero(sequence.sampled)
        at = at[at > 0]  # nothing comes before the first token, so nothing predicts it
        if max_lag is not None:
            fresh = version - sequence.versions[at] <= max_lag
            finite = np.isfinite(sequence.logprobs[at])
            too_old += int((~fresh).sum())
            broken += int((fresh & ~finite).sum())
            at = at[fresh & finite]
            lag += int((version - sequence.versions[at]).sum())
        parts.append(
            (
                row * width + at - 1,
                sequence.ids[at].astype(np.int64),
                sequence.logprobs[at],
                np.full(len(at), advantage, np.float32),
                sequence.versions[at] == version,
            )
        )
    empty = (np.zeros(0, np.int64), np.zeros(0, np.int64), np.zeros(0, np.float32), np.zeros(0, np.float32))
    columns = list(zip(*parts, strict=True)) if parts else [[column] for column in (*empty, np.zeros(0, bool))]
    positions, targets, behaviour, gains, current = (torch.from_numpy(np.concatenate(column)) for column in columns)
    batch = MicroBatch(
        ids=torch.from_numpy(ids),
        positions=positions,
        targets=targets,
        behaviour=behaviour.float(),
        advantages=gains,
        current=current,
    )
    return batch, Counts(trained=len(positions), too_old=too_old, broken=broken, lag=lag)
