"""Advantages and losses as pure functions of tensors. No model, no ranks, no I/O.

Every loss is a *sum* over the trained tokens of what it was given, divided by `denominator`: the number of trained
tokens of the whole update, over all ranks and micro-batches. So the sum over ranks and micro-batches is the token-level
mean, and the gradient does not depend on how a batch was cut.
"""

from __future__ import annotations

from collections.abc import Hashable, Sequence
from dataclasses import dataclass

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

# A spread below this, relative to the rewards' size, is float noise: .1 + .2 against .3 must not become a signal of ±1.
NOISE = 1e-6


def group_advantages(rewards: Sequence[float], groups: Sequence[Hashable]) -> NDArray[np.float64]:
    """Advantage of each trajectory within its group: (r - mean) / std, with the sample std (n - 1).

    GRPO, Shao et al. 2024 (arXiv 2402.03300), section 4.1.2. A group of one, or one whose rewards are equal up to float
    noise, gets exactly 0. Raises ValueError for a reward that is not finite.

    >>> group_advantages([1.0, 0.0, 1.0, 1.0], ["a", "a", "b", "b"]).round(4).tolist()
    [0.7071, -0.7071, 0.0, 0.0]
    """
    values = np.asarray(rewards, np.float64)
    if not np.isfinite(values).all():
        raise ValueError("rewards must be finite")
    members: dict[Hashable, list[int]] = {}
    for index, group in enumerate(groups):
        members.setdefault(group, []).append(index)
    advantages = np.zeros(len(values))
    for indexes in members.values():
        row = values[indexes]
        if len(row) > 1 and np.ptp(row) > NOISE * max(1.0, float(np.abs(row).max())):
            advantages[indexes] = (row - row.mean()) / row.std(ddof=1)
    return advantages


def sft_loss(logprobs: Tensor, denominator: float) -> Tensor:
    """Negative log-likelihood of the trained tokens: -sum(logprobs) / denominator. `logprobs` is [N]; a scalar."""
    return -logprobs.sum() / denominator


@dataclass(frozen=True, slots=True, kw_only=True)
class PolicyTerms:
    """What a policy loss saw of its N tokens, detached, each [N]."""

    ratio: Tensor  # learner / proximal
    clipped: Tensor  # bool: the clip took this token's gradient away
    weight: Tensor  # truncated importance weight
    capped: Tensor  # bool: the cap cut this weight


def grpo_loss(
    logprobs: Tensor,
    proximal: Tensor,
    behaviour: Tensor,
    advantages: Tensor,
    *,
    clip_low: float,
    clip_high: float,
    is_cap: float,
    denominator: float,
) -> tuple[Tensor, PolicyTerms]:
    """Token-level clipped policy loss with truncated importance sampling; all inputs [N], over the trained tokens.

        loss = -1/denominator * sum_t  w_t * min(rho_t * A_t, clip(rho_t, 1 - clip_low, 1 + clip_high) * A_t)
        rho_t = exp(logprobs_t - proximal_t)           w_t = min(exp(proximal_t - behaviour_t), is_cap), no gradient

    `proximal` is the learner's own logprob at the start of the update (with one minibatch: `logprobs` detached), and
    `behaviour` the engine's at sampling. PPO's clip: Schulman et al. 2017 (arXiv 1707.06347), eq. 7; the two-sided
    clip and the token-level mean: DAPO, Yu et al. 2025 (arXiv 2503.14476), eq. 8; the decoupling of proximal from
    behaviour policy: Hilton et al. 2021 (arXiv 2110.00641), eq. 2; truncation: Ionides 2008.
    """
    log_ratio = logprobs - proximal.detach()
    ratio = log_ratio.exp()
    plain = ratio * advantages
    bounded = ratio.clamp(1.0 - clip_low, 1.0 + clip_high) * advantages
    raw = (proximal.detach() - behaviour).exp()
    weight = raw.clamp(max=is_cap)
    loss = -(weight * torch.minimum(plain, bounded)).sum() / denominator
    terms = PolicyTerms(
        ratio=ratio.detach(), clipped=(bounded < plain).detach(), weight=weight.detach(), capped=raw.detach() > is_cap
    )
    return loss, terms


def token_logprobs(logits: Tensor, targets: Tensor, temperature: float) -> tuple[Tensor, Tensor]:
    """Logprob of each target and the entropy (detached) of its distribution, at the sampling temperature, in float32.

    `logits` [N, V] of any float type, `targets` int64 [N] -> two float32 [N] (float64 logits stay float64). Logprobs
    must be taken at the temperature that sampled, or the ratio to the engine's is no ratio.
    """
    wide = logits if logits.dtype == torch.float64 else logits.float()
    if temperature != 1.0:
        wide = wide / temperature
    total = wide.logsumexp(-1)
    chosen = wide.gather(-1, targets[:, None])[:, 0] - total
    with torch.no_grad():
        shares = (wide.detach() - total.detach()[:, None]).exp()
        entropy = total.detach() - (shares * wide.detach()).sum(-1)
    return chosen, entropy
