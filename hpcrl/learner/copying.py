"""The tiny model's copy stage: synthetic rows that teach it to repeat what it was shown, before it clones anything.

Without it, cloning learns the acts' form and never their content. Three kinds of rows, random but for what is repeated:

    opening   <bos><u>head TEXT<e><a>prefix TEXT<e>                         the whole again
    tool      <bos><u>junk<e><a>junk<e><t>TEXT<e><a>prefix TEXT<e>          the same out of the newest message
    pairs     <bos><u>junk<e><a>junk<e><t>k1 m7 pX<e><a>junk m7 k1 pX<e>    what followed a character follows it again

The order matters: a model that can't repeat yet learns neither of the later kinds in any useful time.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

Row = tuple[list[int], list[bool]]  # token ids, where the loss counts: only what can be predicted


@dataclass(frozen=True, slots=True)
class Alphabet:
    """Token ids of the tiny vocabulary."""

    bos: int
    user: int
    assistant: int
    tool: int
    end: int
    pad: int
    space: int
    letters: NDArray[np.int64]
    lower: NDArray[np.int64]
    characters: NDArray[np.int64]  # digits and letters


def _draw(rng: np.random.Generator, among: NDArray[np.int64], low: int, high: int) -> list[int]:
    """Between `low` and `high` - 1 of them."""
    return rng.choice(among, size=int(rng.integers(low, high))).tolist()  # type: ignore[no-any-return]


def opening(rng: np.random.Generator, a: Alphabet) -> Row:
    text = _draw(rng, a.characters, 2, 9)
    start = [a.bos, a.user, *_draw(rng, a.letters, 0, 5), a.space, *text, a.end, a.assistant]
    return _repeat([*start, *_draw(rng, a.lower, 0, 7), a.space], [*text, a.end])


def tool(rng: np.random.Generator, a: Alphabet) -> Row:
    text = _draw(rng, a.characters, 2, 9)
    start = [a.bos, a.user, *_draw(rng, a.lower, 0, 5)]
    if rng.random() < 0.5:
        start += [a.space, *text, a.end, a.assistant]
    else:
        start += [a.end, a.assistant, *_draw(rng, a.lower, 0, 5), a.end, a.tool, *text, a.end, a.assistant]
    return _repeat([*start, *_draw(rng, a.lower, 1, 7), a.space], [*text, a.end])


def pairs(rng: np.random.Generator, a: Alphabet) -> Row:
    keys = rng.choice(a.characters, int(rng.integers(4, 9)), replace=False).tolist()
    words = [[key, int(rng.choice(a.characters))] for key in keys]
    ids = [a.bos, a.user, *_draw(rng, a.lower, 0, 4), a.end, a.assistant, *_draw(rng, a.lower, 0, 4), a.end, a.tool]
    for index, word in enumerate(words):
        ids += [a.space, *word] if index else word
    ids += [a.end, a.assistant, *_draw(rng, a.lower, 0, 5)]
    counts = [False] * len(ids)
    for index in rng.permutation(len(words)):
        ids += [a.space, *words[index]]
        counts += [False, False, True]
    return [*ids, a.end], [*counts, True]


def _repeat(start: list[int], again: list[int]) -> Row:
    return start + again, [False] * len(start) + [True] * len(again)


@dataclass(frozen=True, slots=True)
class Stage:
    kinds: Sequence[Any]  # taken in turn, row by row
    rows: int
    steps: int
    lr: float


# Found by trial: about 40 s of one thread; after it, cloning 6,000 episodes of envs/find gets to .3-.4 success.
STAGES = (
    Stage((opening,), rows=24, steps=250, lr=3e-3),
    Stage((pairs, pairs, tool, pairs), rows=16, steps=500, lr=3e-3),
    Stage((pairs, tool), rows=16, steps=100, lr=1e-3),
)
RAMP_STEPS = 20


def batch(
    rng: np.random.Generator, alphabet: Alphabet, kinds: Sequence[Any], rows: int
) -> tuple[NDArray[np.int64], NDArray[np.bool_]]:
    """Ids [B, T], right padded, and where the loss counts [B, T]."""
    made: list[Row] = [kinds[index % len(kinds)](rng, alphabet) for index in range(rows)]
    width = max(len(ids) for ids, _ in made)
    ids = np.array([ids + [alphabet.pad] * (width - len(ids)) for ids, _ in made], np.int64)
    return ids, np.array([counts + [False] * (width - len(counts)) for _, counts in made])


def copy_stage(model: Any, alphabet: Alphabet, seed: int, stages: Sequence[Stage] = STAGES) -> None:
    """Train `model` (a causal language model on the CPU) in place, the same way for the same seed."""
    rng = np.random.default_rng(seed)
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.0, betas=(0.9, 0.95), weight_decay=0.0)
    steps = 0
    for stage in stages:
        for _ in range(stage.steps):
            steps += 1
            for group in optimizer.param_groups:
                group["lr"] = stage.lr * min(1.0, steps / RAMP_STEPS)
            ids, counts = map(torch.from_numpy, batch(rng, alphabet, stage.kinds, stage.rows))
            logits = model(input_ids=ids[:, :-1], use_cache=False).logits  # [B, T-1, V]
            targets = torch.where(counts[:, 1:], ids[:, 1:], -100)
            loss = torch.nn.functional.cross_entropy(logits.flatten(0, 1), targets.flatten(), ignore_index=-100)
            optimizer.zero_grad(set_to_none=True)
            torch.autograd.backward(loss)
            torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
            optimizer.step()
