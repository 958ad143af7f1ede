"""The model as the learner sees it: loaded from a Hugging Face folder, sharded over the ranks, asked for logprobs.

from_folder -> Policy (plain) -> shard -> Policy (FSDP2) -> policy(ids, positions, targets) -> logprobs, entropy
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any, cast

import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard
from torch.distributed.tensor import DTensor

from hpcrl.learner.losses import token_logprobs
from hpcrl.types import ConfigError

# Families that scale or cap logits after the head: our head path would silently compute something else.
UNSUPPORTED = ("final_logit_softcapping", "logits_scaling", "logit_scale")


class Policy(nn.Module):
    """A causal language model whose head sees only the positions that are asked for.

    It is the root that FSDP2 wraps, so everything must go through `forward`, never through parts of `lm`.
    """

    def __init__(self, lm: nn.Module) -> None:
        super().__init__()
        self.lm = lm

    @classmethod
    def from_folder(cls, folder: Path, dtype: torch.dtype = torch.float32) -> Policy:
        """Load the weights as `dtype` (the masters are float32). Raises ConfigError for one that can't be used."""
        from transformers import AutoModelForCausalLM
        from transformers.utils import logging

        logging.disable_progress_bar()

        try:
            lm = AutoModelForCausalLM.from_pretrained(folder, dtype=dtype, attn_implementation="sdpa")
        except (OSError, ValueError, KeyError) as error:
            raise ConfigError(f"model.source: {folder} can't be loaded: {str(error).splitlines()[0]}") from error
        for key in UNSUPPORTED:
            if getattr(lm.config, key, None) not in (None, 1, 1.0):
                raise ConfigError(f"model.source: {folder} sets {key}, which the learner does not support")
        return cls(lm)

    def forward(self, ids: Tensor, positions: Tensor, targets: Tensor, temperature: float) -> tuple[Tensor, Tensor]:
        """Logprob and entropy, float32 [N] each, of `targets` [N] after flat `positions` [N] of `ids` [B, T].

        `positions[n] = b * T + t` of the token *before* the target. Rows are right-padded: causal, so no mask.
        """
        lm = cast(Any, self.lm)
        hidden = lm.get_decoder()(input_ids=ids, use_cache=False).last_hidden_state  # [B, T, H]
        chosen = hidden.flatten(0, 1).index_select(0, positions)  # [N, H]
        logits = lm.get_output_embeddings()(chosen)  # [N, V]
        return token_logprobs(logits, targets, temperature)

    def tensors(self) -> Iterator[tuple[str, Tensor]]:
        """(Hugging Face name, parameter or persistent buffer), a tied one once; sharded ones as DTensors."""
        tied = {id(parameter) for _, parameter in self.lm.named_parameters()}
        yield from self.lm.named_parameters()
        persistent = self.lm.state_dict().keys()
        for name, buffer in self.lm.named_buffers():
            if name in persistent and id(buffer) not in tied:
                yield name, buffer


def shard(policy: Policy, mesh: DeviceMesh, *, low_precision: bool) -> None:
    """Shard in place, each decoder layer and then the root. `low_precision`: compute in bf16, keep and sum in fp32.

    Make the optimizer after this. The root reshards after its forward too: by FSDP2's default it stays whole, and a
    no_grad forward between backward and step would then lose the update (seen with torch 2.13).
    """
    precision = (
        MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)
        if low_precision
        else MixedPrecisionPolicy()
    )
    for layer in cast(Any, policy.lm).get_decoder().layers:
        fully_shard(layer, mesh=mesh, mp_policy=precision, reshard_after_forward=True)
    fully_shard(policy, mesh=mesh, mp_policy=precision, reshard_after_forward=True)


def whole(tensor: Tensor) -> Tensor:
    """The full tensor of a sharded one. A collective: all ranks must ask, in the same order."""
    return tensor.full_tensor() if isinstance(tensor, DTensor) else tensor.detach()
