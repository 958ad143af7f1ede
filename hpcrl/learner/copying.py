"""How the tiny model comes to repeat what it was shown, before it clones anything: a start, and a copy stage.

Without it, cloning learns the acts' form and never their content. The start lays an induction circuit into the weights
(Olsson et al. 2022, arXiv 2209.11895): left to chance, one forms after 500 steps with one seed and not after 1,500 with
another. The stage then trains it on four kinds of rows, random but for what is repeated:

    opening   <bos><u>head TEXT<e><a>prefix TEXT<e>                         the whole again
    tool      <bos><u>junk<e><a>junk<e><t>TEXT<e><a>prefix TEXT<e>          the same out of the newest message
    named     <bos><u>junk m<e><a>junk<e><t>k1 m7 pX<e><a>junk m7<e>        the one that the opening names
    pairs     <bos><u>junk<e><a>junk<e><t>k1 m7 pX<e><a>junk m7 k1 pX<e>    what followed a character follows it again
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


def named(rng: np.random.Generator, a: Alphabet) -> Row:
    words = _words(rng, a)
    word = words[int(rng.integers(len(words)))]
    start = [a.bos, a.user, *_draw(rng, a.lower, 1, 5), a.space, word[0], a.end, *_listing(rng, a, words)]
    return _repeat([*start, a.space], [*word, a.end])


def _words(rng: np.random.Generator, a: Alphabet) -> list[list[int]]:
    """Three to six words of two characters, no two beginning alike."""
    keys = rng.choice(a.characters, int(rng.integers(3, 7)), replace=False).tolist()
    return [[key, int(rng.choice(a.characters))] for key in keys]


def _listing(rng: np.random.Generator, a: Alphabet, words: list[list[int]]) -> list[int]:
    """`<a>junk<e><t>k1 m7 pX<e><a>junk`."""
    ids = [a.assistant, *_draw(rng, a.lower, 0, 4), a.end, a.tool]
    for index, word in enumerate(words):
        ids += [a.space, *word] if index else word
    return [*ids, a.end, a.assistant, *_draw(rng, a.lower, 0, 5)]


def pairs(rng: np.random.Generator, a: Alphabet) -> Row:
    words = _words(rng, a)
    ids = [a.bos, a.user, *_draw(rng, a.lower, 0, 4), a.end, *_listing(rng, a, words)]
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


# About 15 s of one thread. With seeds 0 to 4 the model then repeats 96% of what it should.
STAGES = (
    Stage((pairs, named, tool, opening), rows=16, steps=400, lr=3e-3),
    Stage((pairs, named, tool, opening), rows=16, steps=80, lr=1e-3),
)
RAMP_STEPS = 20


@torch.no_grad()
def induction_start(model: Any) -> None:
    """Make head 0 of the second layer lean to what followed an earlier occurrence of the present token, and copy it.

    Layer 0, head 0 attends to the token before: its query and key read only dimension 0 of the embedding, which is the
    same for all tokens, so that rotary phases alone decide. Its output marks each position with the token before it.
    Layer 1, head 0: the query reads the present token, the key that mark, both in the slowly rotating dimensions, where
    distance counts little. Its output is its input's direction again, which the tied head reads as that token.
    """
    config = model.config
    size = config.head_dim
    theta = config.rope_parameters["rope_theta"]
    turn = theta ** (-torch.arange(size // 2) / (size // 2))  # radians per token, of dimensions i and i + size / 2
    first, second = (layer.self_attn for layer in model.model.layers[:2])
    model.model.embed_tokens.weight[:, 0] = 0.3

    fast = (turn > 0.25) * 1.7  # these tell the token before from its neighbours
    for weight in (first.q_proj.weight, first.k_proj.weight):
        weight[:size] = 0.0
    first.q_proj.weight[: size // 2, 0] = fast
    first.k_proj.weight[:size, 0] = torch.cat([fast * turn.cos(), fast * turn.sin()])  # peaks one token back

    written, _, read = torch.linalg.svd(first.o_proj.weight[:, :size] @ first.v_proj.weight[:size])
    slow = (turn < 0.06).repeat(2).nonzero()[:, 0]
    for weight, directions in ((second.q_proj.weight, read), (second.k_proj.weight, written.T)):
        weight[:size] = 0.0
        weight[slow] = 1.2 * directions[: len(slow)]
    second.o_proj.weight[:, :size] = 0.5 / config.initializer_range * second.v_proj.weight[:size].T
    second.o_proj.weight[0, :size] = 0.0  # dimension 0 says nothing of tokens


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
