"""The client of one vLLM server: token ids in, token ids and logprobs out, over its Unix socket.

Owns vLLM's wire format. Knows nothing of how the server is started (server.py) or what tokens mean (render.py).

    generate: POST /inference/v1/generate                       (hosts; hundreds at a time over one client)
    load:     check -> /pause keep -> update -> /resume         (the supervisor, one at a time)

What an engine does wrong rises as EngineFault; what it can't be asked at all as EngineError.
"""

from __future__ import annotations

import asyncio
import math
import re
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from hpcrl.rollout.unix_http import Answer, UnixHttp
from hpcrl.types import (
    Cause,
    EngineError,
    EngineStats,
    Fault,
    Float32Array,
    Generation,
    Int32Array,
    Sampling,
    Span,
    StoreError,
    is_number,
)

UNNAMED = -1  # the version of an engine that nobody named yet
FLOOR = -9000.0  # vLLM sends -9999 in place of NaN and -inf; no honest float32 logprob is as low
HEALTH_TIMEOUT_S = 10.0


class EngineFault(Exception):
    """The engine failed, not the policy: it is gone, answers 5xx, or sampled from logits that are no numbers."""

    def __init__(self, message: str, where: str = "engine") -> None:
        super().__init__(message)
        self.fault = Fault(cause=Cause.ENGINE, where=where, message=message)


class ContextTooLong(EngineError):
    """The context leaves no room for a token; nothing was sent."""


class VllmEngine:
    """Implements types.Engine. One per process and engine, shared by all its trajectories; bound to its event loop."""

    def __init__(
        self,
        socket: Path,
        *,
        stop_ids: Sequence[int],
        max_model_len: int,
        name: str = "engine",
        seeds: bool = False,
    ) -> None:
        """stop_ids: tokens that end a generation (and are its last id), as Renderer.stop_ids.

        max_model_len: of the server; a longer context is refused here. name: the `where` of its faults. seeds: pass
        `Sampling.seed` on. Not to a CPU engine: one of vLLM 0.32 dies when a seeded request in flight is computed again
        after an update ("CPU Generator does not use offset", gpu_model_runner's _bookkeeping_sync).
        """
        self._seeds = seeds
        self.socket = socket
        self._stop_ids = list(stop_ids)
        self._max_model_len = max_model_len
        self._name = name
        self._loading = asyncio.Lock()
        self._num_scored = 0  # rows; the server counts a token for each
        # No time limits here: how long a generation may take is its caller's deadline.
        self._http = UnixHttp(socket)

    async def close(self) -> None:
        await self._http.close()

    # ---- generation ---------------------------------------------------------------------------------------------

    async def generate(self, ids: Int32Array, sampling: Sampling, *, request: str) -> Generation:
        """Sample a continuation of `ids`, [T], up to a stop token (included) or sampling.max_tokens.

        Raises ContextTooLong before anything is sent, EngineFault when the engine fails. A generation that
        max_model_len cuts short of max_tokens ends with "length". Cancelling it ends the request in the engine.
        """
        room = self._max_model_len - len(ids)
        if room < 1:
            raise ContextTooLong(f"context of {len(ids)} tokens, {self._name} takes {self._max_model_len - 1}")
        parameters: dict[str, Any] = {
            "temperature": sampling.temperature,
            "max_tokens": min(sampling.max_tokens, room),
            "logprobs": 0,
            "stop_token_ids": self._stop_ids,
            "ignore_eos": True,  # the only stops are ours
            "detokenize": False,
            "seed": sampling.seed if self._seeds else None,
        }
        began = time.monotonic()
        answer = await self._ask(ids, parameters, request)
        duration_s = time.monotonic() - began
        choice = answer["choices"][0]
        reason = choice["finish_reason"]
        if reason not in ("stop", "length"):  # "abort": cut off by somebody, not ended by the policy
            raise EngineFault(f"request {request} ended with {reason!r}", self._name)
        rows = choice["logprobs"]["content"] if choice["logprobs"] else []
        sampled = np.asarray(choice["token_ids"], np.int32)
        logprobs = np.asarray([row["logprob"] for row in rows], np.float32)
        if len(logprobs) != len(sampled):
            raise EngineFault(f"request {request}: {len(sampled)} ids but {len(logprobs)} logprobs", self._name)
        self._refuse_no_numbers(logprobs, request)
        details = (answer.get("usage") or {}).get("prompt_tokens_details") or {}
        return Generation(
            ids=sampled,
            logprobs=logprobs,
            spans=_spans(choice.get("weight_versions") or (), len(sampled)),
            finish_reason=reason,
            cached_tokens=int(details.get("cached_tokens") or 0),
            duration_s=duration_s,
        )

    async def score(self, rows: Sequence[Int32Array]) -> list[Float32Array]:
        """log p(ids[t] | ids[:t]) at T = 1 for t = 1 … T-1, [T-1], of each row of ids, [T], by the loaded weights."""
        return list(await asyncio.gather(*(self._score(row, index) for index, row in enumerate(rows))))

    async def _score(self, ids: Int32Array, index: int) -> Float32Array:
        if len(ids) >= self._max_model_len:
            raise ContextTooLong(f"row {index} has {len(ids)} tokens, {self._name} takes {self._max_model_len - 1}")
        parameters = {"temperature": 1.0, "max_tokens": 1, "prompt_logprobs": 0, "detokenize": False}
        answer = await self._ask(ids, parameters, f"score-{index}")
        self._num_scored += 1
        given = answer["prompt_logprobs"][1:]
        # vLLM adds the likeliest token to each position's mapping; the given one is found by its id.
        row = [
            entry[str(token)]["logprob"] if entry else math.nan
            for token, entry in zip(ids[1:].tolist(), given, strict=True)
        ]
        logprobs = np.asarray(row, np.float32)
        self._refuse_no_numbers(logprobs, f"score-{index}")
        return logprobs

    async def _ask(self, ids: Int32Array, parameters: Mapping[str, Any], request: str) -> dict[str, Any]:
        body = {"request_id": request, "token_ids": ids.tolist(), "sampling_params": parameters}
        return await self._post("/inference/v1/generate", body)

    def _refuse_no_numbers(self, logprobs: Float32Array, request: str) -> None:
        if not np.all(np.isfinite(logprobs) & (logprobs > FLOOR)):
            raise EngineFault(f"request {request}: a logprob is NaN or -inf", self._name)

    # ---- weights ------------------------------------------------------------------------------------------------

    async def load(self, version: int, folder: Path) -> None:
        """Take a published version without dropping a request: the tokens that follow are sampled by `version`.

        All cached keys and values go, those of requests in flight too (they are computed again): under the new weights
        nothing of an older version is attended to. Raises StoreError when the folder is damaged (the engine goes on as
        it was) and EngineFault when loading failed half-way (the engine must be restarted).
        """
        async with self._loading:
            problems = await self._post("/collective_rpc", {"method": "check_version", "args": [str(folder)]})
            for problem in problems["results"]:
                if problem:
                    raise StoreError(problem)
            await self._post("/pause?mode=keep&clear_cache=true")
            # From here on a failure leaves it paused: nothing may be sampled from weights that are half loaded.
            await self._post("/start_weight_update")
            await self._post("/update_weights", {"update_info": {"folder": str(folder)}})
            await self._post("/finish_weight_update", {"weight_version": str(version)})
            await self._post("/resume")

    async def name_version(self, version: int) -> None:
        """Say which version the weights are that the server was started with."""
        await self._post("/update_weight_version", {"new_version": str(version)})

    async def version(self) -> int:
        return _version(str((await self._send("GET", "/weight_info")).json()["weight_version"]))

    async def probe(self, folder: Path) -> float:
        """Mean |logprob of this engine - logprob of the learner| on the probe batch that lies in a version's folder."""

        def read() -> Any:
            from hpcrl.weights.load import read_probe  # takes torch seconds to import, which a host has no use for

            return read_probe(folder)

        probe = await asyncio.to_thread(read)
        ids, logprobs = probe.ids.numpy(), probe.logprobs.numpy()  # [B, T]
        lengths = probe.lengths.tolist()
        ours = await self.score([row[:length] for row, length in zip(ids, lengths, strict=True)])
        theirs = [row[1:length] for row, length in zip(logprobs, lengths, strict=True)]
        return float(np.abs(np.concatenate(ours).astype(np.float64) - np.concatenate(theirs)).mean())

    # ---- state --------------------------------------------------------------------------------------------------

    async def healthy(self) -> bool:
        try:
            async with asyncio.timeout(HEALTH_TIMEOUT_S):
                return (await self._http.request("GET", "/health")).status == 200
        except (OSError, TimeoutError):
            return False

    async def stats(self) -> EngineStats:
        """From the server's metrics page: for every few seconds, not for every step."""
        text = (await self._send("GET", "/metrics")).body.decode()
        return EngineStats(
            running=int(_metric(text, "num_requests_running")),
            waiting=int(_metric(text, "num_requests_waiting")),
            kv_share=_metric(text, "kv_cache_usage_perc"),
            version=await self.version(),
        )

    async def generated(self) -> int:
        """Tokens that the server has sampled since its start, those of requests that were cut off too; but not what
        this client had it score. Raises EngineFault."""
        text = (await self._send("GET", "/metrics")).body.decode()
        return int(_metric(text, "generation_tokens_total")) - self._num_scored

    async def _post(self, path: str, body: Mapping[str, Any] | None = None) -> dict[str, Any]:
        answer = (await self._send("POST", path, body)).json()
        assert isinstance(answer, dict)
        return answer

    async def _send(self, method: str, path: str, body: Mapping[str, Any] | None = None) -> Answer:
        try:
            answer = await self._http.request(method, path, body)
        except OSError as error:
            raise EngineFault(f"{path}: {type(error).__name__}: {error}", self._name) from error
        if answer.status >= 400:
            said = f"{path}: {answer.status} {answer.body[:500].decode(errors='replace')}"
            # prompt_logprobs are not floored: vLLM finds that JSON has no NaN, and calls it the asker's mistake.
            if answer.status >= 500 or b"Out of range float values" in answer.body:
                raise EngineFault(said, self._name)
            raise EngineError(f"{self._name} refused {said}")
        return answer


def _spans(rows: Sequence[Mapping[str, Any]], length: int) -> tuple[Span, ...]:
    spans = tuple(Span(version=_version(row["version"]), start=row["start"], stop=row["end"]) for row in rows)
    covered = 0
    for span in spans:
        if span.start != covered:
            raise EngineFault(f"weight versions leave a gap at token {covered}")
        covered = span.stop
    if covered != length:
        raise EngineFault(f"weight versions cover {covered} of {length} tokens")
    return spans


def _version(label: str) -> int:
    return int(label) if is_number(label) else UNNAMED


def _metric(text: str, name: str) -> float:
    """The sum over engine cores of a gauge or counter of vLLM's metrics page."""
    return sum(float(value) for value in re.findall(rf"^vllm:{name}\{{[^}}]*\}} (\S+)$", text, re.MULTILINE))
