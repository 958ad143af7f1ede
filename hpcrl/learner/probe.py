"""The probe batch: a few texts, the same for a whole run, whose logprobs go beside every published version."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import numpy as np
import torch
from torch import Tensor

from hpcrl.learner.policy import Policy
from hpcrl.rollout.render import load_tokenizer
from hpcrl.types import ConfigError
from hpcrl.weights.load import Probe

ROWS, SHORTEST, LONGEST = 8, 16, 64
# Ordinary text: of random tokens every logprob is far out, where bf16 alone would move it beyond any useful tolerance.
TEXT = """\
The store keeps every step of a trajectory, and the learner reads what was scored. A group shares one task. When a
node goes away, another takes up the work from the last record that it finds. Let us count: 1, 2, 3, 4, 5, 6, 7.
def add(left, right):
    return left + right

Q: What is 12 + 30? A: The sum of 12 and 30 is 42. Files: A1 B2 C3 D4. find B; cat B2 -> 417; answer 417. The quick
brown fox jumps over the lazy dog, and then it sleeps in the shade of a tree until the evening comes.
"""


def probe_rows(folder: Path, seed: int) -> tuple[Tensor, Tensor]:
    """Token ids int32 [8, T <= 64] and lengths int32 [8], from the model's own tokenizer, the same for the same seed.

    Raises ConfigError naming the folder whose tokenizer can't be loaded.
    """
    try:
        tokenizer = load_tokenizer(folder)
        # Not verbose: the whole text may be longer than the model's context, its rows are not.
        text = tokenizer(TEXT, add_special_tokens=False, verbose=False)["input_ids"]
    except (OSError, ValueError, KeyError) as error:
        raise ConfigError(f"model.source: no tokenizer can be loaded from {folder} ({error})") from error
    if len(text) <= SHORTEST:
        raise ConfigError(f"model.source: the tokenizer in {folder} makes only {len(text)} tokens of a paragraph")
    rng = np.random.default_rng(seed)
    rows: list[Sequence[int]] = []
    for _ in range(ROWS):
        length = int(rng.integers(SHORTEST, min(LONGEST, len(text)) + 1))
        start = int(rng.integers(0, len(text) - length + 1))
        rows.append(text[start : start + length])
    ids = np.zeros((ROWS, max(map(len, rows))), np.int32)
    for index, row in enumerate(rows):
        ids[index, : len(row)] = row
    return torch.from_numpy(ids), torch.tensor([len(row) for row in rows], dtype=torch.int32)


def score_probe(policy: Policy, ids: Tensor, lengths: Tensor, device: torch.device) -> Probe:
    """The policy's logprobs of the rows, at temperature 1. A collective where the policy is sharded."""
    width = ids.shape[1]
    inside = torch.arange(1, width)[None, :] < lengths[:, None]  # [B, T-1], of the targets
    rows, columns = inside.nonzero(as_tuple=True)
    targets = ids[rows, columns + 1].long()
    with torch.no_grad():
        found, _ = policy(ids.long().to(device), (rows * width + columns).to(device), targets.to(device), 1.0)
    logprobs = torch.zeros(ids.shape, dtype=torch.float32)
    logprobs[rows, columns + 1] = found.float().cpu()
    return Probe(ids=ids, lengths=lengths, logprobs=logprobs)
