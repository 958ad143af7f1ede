"""Shared fixtures: one real vLLM engine for the whole session, with the models and versions that it is tried on."""

from __future__ import annotations

import asyncio
import os
import shutil
import signal
import subprocess
import sys
import tempfile
from collections.abc import AsyncIterator, Callable, Generator, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from loop_parts import node_log
from slurm_parts import Slurm

from hpcrl.config import Rollout
from hpcrl.rollout import guard
from hpcrl.rollout.engine import VllmEngine
from hpcrl.rollout.render import Renderer
from hpcrl.rollout.server import EngineProcess
from hpcrl.store.link import LogClient

EOS = 4  # <e> of the tiny model
NUM_TOKENS = 102
MAX_MODEL_LEN = 256

# Run by the process that starts the engine and is killed then.
OWNER = """
import asyncio, pickle, sys, time
process = pickle.loads(bytes.fromhex(sys.argv[1]))
asyncio.run(process.start())
print("started", flush=True)
time.sleep(1000)
"""


@pytest.hookimpl(wrapper=True)
def pytest_runtest_makereport(item: pytest.Item) -> Generator[None, pytest.TestReport, pytest.TestReport]:
    """With HPCRL_NO_SKIPS (the gate sets it) a test that would skip fails, with its reason."""
    report = yield
    if report.skipped and os.environ.get("HPCRL_NO_SKIPS"):
        report.outcome = "failed"
        report.longrepr = f"{item.nodeid} may not be skipped here: {report.longrepr}"
    return report


@dataclass
class EngineRig:
    process: EngineProcess  # adopted from an owner that was killed
    first_pid: int  # of the server, as that owner started it
    folder: Path
    models: dict[int, Any]  # version -> the same weights in transformers, fp32

    def version(self, number: int) -> Path:
        return self.folder / f"v{number:06d}"

    def reference(self, version: int, ids: list[int], temperature: float = 1.0) -> np.ndarray[Any, Any]:
        """log p(ids[t] | ids[:t]) for t >= 1 by transformers, float64 [T-1]."""
        import torch

        with torch.no_grad():
            logits = self.models[version](torch.tensor([ids])).logits[0, :-1].double() / temperature
        picked = torch.log_softmax(logits, -1).gather(1, torch.tensor(ids[1:])[:, None])
        return np.asarray(picked[:, 0])


def publish_version(folder: Path, version: int, model: Any) -> None:
    """A version as a learner of two ranks would publish it."""
    import torch

    from hpcrl.weights.load import Probe
    from hpcrl.weights.publish import write_manifest, write_part

    folder.mkdir()
    tensors = {name: tensor for name, tensor in model.state_dict().items() if name != "lm_head.weight"}
    names = list(tensors)
    parts = [write_part(folder, rank, 2, {name: tensors[name] for name in names[rank::2]}) for rank in range(2)]
    ids = torch.from_numpy(np.random.default_rng(version).integers(5, NUM_TOKENS, (4, 48), dtype=np.int32))
    with torch.no_grad():
        logprobs = torch.log_softmax(model(ids.long()).logits.float(), -1)
    picked = torch.zeros(ids.shape)
    picked[:, 1:] = logprobs[:, :-1].gather(2, ids[:, 1:, None].long())[..., 0]
    probe = Probe(ids=ids, lengths=torch.tensor([48, 48, 20, 2], dtype=torch.int32), logprobs=picked)
    write_manifest(folder, parts, probe, version=version, update=version, parent=version - 1)


@pytest.fixture(scope="session")
def tiny_model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The tiny model with random weights, as a Hugging Face folder."""
    from hpcrl.learner.models import make_tiny

    folder = tmp_path_factory.mktemp("tiny") / "model"
    make_tiny(folder, 0, stages=())
    return folder


@pytest.fixture(scope="session")
def rig(tiny_model: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[EngineRig]:
    """A running engine with versions 0, 1, 2, a damaged 3 and a 4 that is not numbers; version 0 is loaded."""
    import pickle

    import torch
    from transformers import AutoModelForCausalLM

    torch.set_num_threads(1)
    folder = tmp_path_factory.mktemp("versions")
    private = Path(tempfile.mkdtemp(prefix="hpcrl-"))
    pool = Rollout(max_model_len=MAX_MODEL_LEN, memory_gib=0.25, start_timeout_s=280)
    process = EngineProcess(
        pool, model=tiny_model, dtype="float32", folder=private / "engine-0", log=folder / "engine.log"
    )
    owner = subprocess.Popen(
        [sys.executable, "-c", OWNER, pickle.dumps(process).hex()], stdout=subprocess.PIPE, text=True
    )
    try:
        models = {}
        for version in range(5):
            model = AutoModelForCausalLM.from_pretrained(tiny_model, dtype=torch.float32).eval()
            if version:
                torch.manual_seed(version)
                for tensor in model.parameters():
                    torch.nn.init.normal_(tensor, std=0.2) if tensor.dim() > 1 else torch.nn.init.ones_(tensor)
            if version == 4:
                model.model.norm.weight.data.fill_(float("nan"))
            models[version] = model
            publish_version(folder / f"v{version:06d}", version, model)
        part = sorted((folder / "v000003").glob("part-*"))[1]
        data = bytearray(part.read_bytes())
        data[-5] ^= 1
        part.write_bytes(data)
        assert owner.stdout is not None
        assert owner.stdout.readline() == "started\n", process.last_words()
        first = process.pid
        os.kill(owner.pid, signal.SIGKILL)
        owner.wait()
        assert asyncio.run(process.adopt())
        yield EngineRig(process=process, first_pid=first, folder=folder, models=models)
        group = process.pid
        asyncio.run(process.stop())
        assert not group or not guard.group_lives(group), "the engine left processes behind"
    finally:
        owner.kill()
        owner.wait()
        asyncio.run(process.stop())
        shutil.rmtree(private)


@pytest.fixture
async def engine(rig: EngineRig) -> AsyncIterator[VllmEngine]:
    client = VllmEngine(rig.process.socket, stop_ids=(EOS,), max_model_len=MAX_MODEL_LEN)
    yield client
    await client.close()


@pytest.fixture(scope="session")
def slurm(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Slurm]:
    """A real Slurm of three CPU nodes and two GPU nodes, without accounting. Whoever kills a node runs `up` again."""
    testbed = Slurm.start(tmp_path_factory.mktemp("slurm") / "state")
    try:
        yield testbed
    finally:
        testbed.stop()


@pytest.fixture
def command(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[[str, str], Path]:
    """Puts a command of that name, with that shell body, in front of all others; each call leaves a line in a file."""
    folder = tmp_path / "bin"
    folder.mkdir()
    monkeypatch.setenv("PATH", str(folder), prepend=os.pathsep)

    def make(name: str, body: str) -> Path:
        calls = tmp_path / f"{name}.calls"
        calls.touch()
        (folder / name).write_text(f'#!/bin/bash\necho "$@" >> {calls}\n{body}\n')
        (folder / name).chmod(0o755)
        return calls

    return make


@pytest.fixture(scope="session")
def renderer(tiny_model: Path) -> Renderer:
    return Renderer(tiny_model)


@pytest.fixture
async def log(tmp_path: Path) -> AsyncIterator[LogClient]:
    """A host's way to the log of a node, the run folder being `tmp_path`."""
    async with node_log(tmp_path) as client:
        yield client
