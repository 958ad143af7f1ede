"""An engine whose acts come from a function: records expert trajectories, and stands in for vLLM in other rooms' tests.

It keeps to the Engine's contract (stop token included, cut at max_tokens, one logprob per id) but samples nothing.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable

import numpy as np

from hpcrl.rollout.render import Renderer
from hpcrl.types import EngineStats, Generation, Int32Array, Sampling, Span

SCRIPTED = -1  # the version of tokens that no published weights sampled


class ScriptedEngine:
    """`act(transcript)` is asked for the text of each act; `transcript` is the context with its special tokens."""

    def __init__(self, act: Callable[[str], str], renderer: Renderer, *, delay_s: float = 0.0) -> None:
        self._act = act
        self._renderer = renderer
        self._delay_s = delay_s
        self._running = 0

    async def generate(self, ids: Int32Array, sampling: Sampling, *, request: str) -> Generation:
        began = time.monotonic()
        self._running += 1
        try:
            if self._delay_s:
                await asyncio.sleep(self._delay_s)
            said = self._renderer.act(self._act(self._renderer.transcript(ids)))
        finally:
            self._running -= 1
        cut = len(said) > sampling.max_tokens
        said = said[: sampling.max_tokens]
        return Generation(
            ids=said,
            logprobs=np.zeros(len(said), np.float32),
            spans=(Span(version=SCRIPTED, start=0, stop=len(said)),),
            finish_reason="length" if cut else "stop",
            duration_s=time.monotonic() - began,
        )

    async def stats(self) -> EngineStats:
        return EngineStats(running=self._running, waiting=0, kv_share=0.0, version=SCRIPTED)

    async def close(self) -> None:
        """Holds nothing."""
