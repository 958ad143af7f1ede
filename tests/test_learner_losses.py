"""Losses and advantages against numbers worked out with numpy in float64."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from hpcrl.learner.losses import group_advantages, grpo_loss, sft_loss, token_logprobs


def test_group_advantages_are_standardised_within_each_group() -> None:
    found = group_advantages([1, 0, 0, 1, 0.25, 0.75, 0.5], ["a", "b", "a", "b", "c", "c", "c"])
    half = np.sqrt(0.5)
    np.testing.assert_allclose(found, [half, -half, -half, half, -1, 1, 0], atol=1e-12)


@pytest.mark.parametrize(
    "rewards", [[0.1 + 0.2, 0.3, 0.3, 0.1 + 0.2], [0.0] * 4, [1.0] * 4, [1e6, 1e6 + 1e-4], [0.7], [-0.1, -0.1]]
)
def test_equal_rewards_give_exactly_zero_whatever_the_float_noise(rewards: list[float]) -> None:
    assert group_advantages(rewards, ["g"] * len(rewards)).tolist() == [0.0] * len(rewards)


def test_a_lone_loser_keeps_its_whole_group() -> None:
    rewards = [0.95] * 7 + [0.0]
    found = group_advantages(rewards, ["g"] * 8)
    mean, std = 0.95 * 7 / 8, np.std(rewards, ddof=1)
    np.testing.assert_allclose(found, [(r - mean) / std for r in rewards], rtol=1e-12)
    assert (found != 0).all()


def test_rewards_that_are_no_number_are_refused() -> None:
    with pytest.raises(ValueError, match="finite"):
        group_advantages([1.0, float("nan")], ["g", "g"])


def test_token_logprobs_at_a_temperature_equal_the_softmax_written_out() -> None:
    rng = np.random.default_rng(0)
    logits, targets = rng.normal(size=(5, 7)) * 4, rng.integers(0, 7, size=5)
    shares = np.exp(logits / 0.6) / np.exp(logits / 0.6).sum(1, keepdims=True)
    logprobs, entropy = token_logprobs(torch.tensor(logits), torch.tensor(targets), 0.6)
    np.testing.assert_allclose(logprobs, np.log(shares[np.arange(5), targets]), rtol=1e-12)
    np.testing.assert_allclose(entropy, -(shares * np.log(shares)).sum(1), rtol=1e-10)


def test_sft_loss_is_the_mean_when_the_denominator_counts_its_tokens() -> None:
    logprobs = torch.tensor([-1.0, -2.5, -0.25], dtype=torch.float64)
    assert sft_loss(logprobs, 3).item() == pytest.approx(1.25, abs=1e-15)


def test_grpo_loss_and_gradient_equal_the_formula_written_out() -> None:
    # ratios below, within and above the clip range, for gains and losses; weights below and above the cap
    log_ratio = np.array([np.log(0.5), np.log(0.5), 0.0, np.log(1.25), np.log(1.5), np.log(1.5)])
    advantages = np.array([1.0, -2.0, 0.5, 1.5, 1.0, -1.0])
    proximal = np.array([-1.0, -0.5, -2.0, -0.1, -3.0, -0.7])
    behaviour = np.array([-1.2, -0.5, -4.0, -0.05, -2.0, -0.9])
    low, high, cap, denominator = 0.2, 0.28, 2.0, 11.0
    ratio, weight = np.exp(log_ratio), np.minimum(np.exp(proximal - behaviour), cap)
    value, gradient = 0.0, []
    for r, a, w in zip(ratio, advantages, weight, strict=True):
        clipped = min(max(r, 1 - low), 1 + high)
        value -= w * min(r * a, clipped * a) / denominator
        gradient.append(-w * a * r / denominator if r * a <= clipped * a else 0.0)

    logprobs = torch.tensor(proximal + log_ratio, requires_grad=True)
    loss, terms = grpo_loss(
        logprobs,
        torch.tensor(proximal),
        torch.tensor(behaviour),
        torch.tensor(advantages),
        clip_low=low,
        clip_high=high,
        is_cap=cap,
        denominator=denominator,
    )
    loss.backward()
    assert loss.item() == pytest.approx(value, rel=1e-12)
    np.testing.assert_allclose(logprobs.grad, gradient, rtol=1e-12)
    assert terms.clipped.tolist() == [False, True, False, False, True, False]
    assert terms.capped.tolist() == [False, False, True, False, False, False]


def test_cutting_a_batch_changes_no_gradient() -> None:
    rng = np.random.default_rng(1)
    columns = [torch.tensor(rng.normal(size=10)) for _ in range(3)]
    settings = {"clip_low": 0.2, "clip_high": 0.28, "is_cap": 2.0, "denominator": 10.0}

    def gradient(cuts: list[slice]) -> torch.Tensor:
        logprobs = torch.tensor(rng_logprobs, requires_grad=True)
        for cut in cuts:
            grpo_loss(logprobs[cut], *(column[cut] for column in columns), **settings)[0].backward()
        assert logprobs.grad is not None
        return logprobs.grad

    rng_logprobs = rng.normal(size=10)
    torch.testing.assert_close(
        gradient([slice(0, 10)]), gradient([slice(0, 3), slice(3, 3), slice(3, 10)]), rtol=0, atol=1e-15
    )
