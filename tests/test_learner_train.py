"""The learner's loop on a real store, ledger and model: one rank in this process, two in processes of their own."""

from __future__ import annotations

import socket
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import h5py
import numpy as np
import pytest
import torch
from learner_parts import entry, make_config, make_model, make_run, store_and_enter, trajectory
from transformers import AutoModelForCausalLM

from hpcrl.config import Config
from hpcrl.layout import RunPaths
from hpcrl.learner.train import LEAVING_S, rate, run_learner
from hpcrl.replay import Replay
from hpcrl.store.compact import compact
from hpcrl.store.index import Store
from hpcrl.store.ledger import LedgerWriter, UpdateRow, entries, lineage, trained_twice
from hpcrl.store.records import Kind
from hpcrl.weights.load import check, iter_tensors, newest, read_probe

RANK = """
import sys
from pathlib import Path
from hpcrl.config import load_resolved
from hpcrl.layout import RunPaths
from hpcrl.learner.train import rate, run_learner
paths = RunPaths.of(sys.argv[1])
rank, world, port = map(int, sys.argv[2:])
run_learner(paths, load_resolved(paths.config), rank, world, "127.0.0.1", port, lambda _: False)
"""


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_model(tmp_path_factory.mktemp("model"))


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


def alone(paths: RunPaths, config: Config, stop: Callable[[float], bool] = lambda _: False, control: int = 1) -> None:
    run_learner(paths, config, 0, 1, "127.0.0.1", free_port(), stop, control)


def warmup(updates: int, **values: Any) -> dict[str, Any]:
    return {
        "name": "warmup",
        "objective": "sft",
        "lr": 1e-2,
        "updates": updates,
        "trajectories": 6,
        "publish_every": 0,
    } | values


def test_clonings_rate_rises_and_falls_and_rls_stays() -> None:
    cloning = make_config([warmup(100, lr=1.0)]).phase[0]
    rates = [rate(cloning, done) for done in range(100)]
    assert rates[0] == pytest.approx(1 / 11) and max(rates) == rates[10] == pytest.approx(0.9)
    assert rates[55] == pytest.approx(0.45) and rates[-1] == pytest.approx(0.05)
    assert rate(make_config([warmup(5, lr=1.0)]).phase[0], 0) == 1.0
    rl = make_config([{"name": "rl", "lr": 0.5, "updates": 10, "group_size": 2, "steps": 1}]).phase[0]
    assert {rate(rl, done) for done in range(10)} == {0.5}


def sft_rows(count: int, seed: int = 0) -> list[Any]:
    rng = np.random.default_rng(seed)
    rows = []
    for index in range(count):
        records, ids, sampled = trajectory(f"t{index:03d}", rng, version=-1)
        rows.append((records, entry(f"t{index:03d}", records, ids, sampled)))
    return rows


def trained_rows(paths: RunPaths) -> list[UpdateRow]:
    return [row for row in lineage(paths) if row.trajectories]


def plain_losses(model: Path, paths: RunPaths, updates: int, lr: float, clip: float) -> tuple[list[float], Any]:
    """The same training in plain torch: one process, all rows padded into one batch, the head on every position."""
    lm = AutoModelForCausalLM.from_pretrained(model)
    optimizer = torch.optim.AdamW(lm.parameters(), lr=lr, betas=(0.9, 0.95), weight_decay=0.0)
    losses = []
    with Store(paths) as store:
        rows = [store.sequence(row.trajectory, row.head, row.reward) for _, row in entries(paths)]
    for update in range(updates):
        for group in optimizer.param_groups:
            group["lr"] = lr * (1 - update / updates)  # cloning's rate falls linearly
        batch = rows[6 * update : 6 * update + 6]
        width = max(len(row.ids) for row in batch)
        ids = torch.zeros(6, width, dtype=torch.long)
        labels = torch.full((6, width), -100)
        for index, row in enumerate(batch):
            ids[index, : len(row.ids)] = torch.from_numpy(row.ids)
            labels[index, : len(row.ids)][row.sampled] = torch.from_numpy(row.ids[row.sampled]).long()
        logits = lm(input_ids=ids).logits[:, :-1]
        loss = torch.nn.functional.cross_entropy(logits.flatten(0, 1), labels[:, 1:].flatten(), ignore_index=-100)
        optimizer.zero_grad()
        loss.backward()
        torch.nn.utils.clip_grad_norm_(lm.parameters(), clip)
        optimizer.step()
        losses.append(loss.item())
    return losses, lm


def test_two_ranks_train_as_one_process_of_plain_torch_does(tmp_path: Path, model: Path) -> None:
    config = make_config([warmup(5)], learner={"ranks": 2, "micro_batch_tokens": 64, "collective_timeout_s": 60})
    paths = make_run(tmp_path / "run", config, model)
    store_and_enter(paths, sft_rows(30))
    port = free_port()
    command = [sys.executable, "-c", RANK, str(paths.root)]
    ranks = [subprocess.Popen([*command, str(rank), "2", str(port)]) for rank in range(2)]
    try:
        assert [rank.wait(timeout=120) for rank in ranks] == [0, 0]
    finally:
        for rank in ranks:
            rank.kill()

    losses, lm = plain_losses(model, paths, 5, 1e-2, 1.0)
    found = [row.metrics["loss"] for row in trained_rows(paths)]
    np.testing.assert_allclose(found, losses, atol=1e-5)
    assert losses[0] - losses[-1] > 0.1  # it did learn, so that equality says something

    assert newest(paths) == [1, 0]
    manifest = check(paths.version(1))
    assert (manifest.update, manifest.parent, len(manifest.files)) == (5, 0, 3)
    published = dict(iter_tensors(paths.version(1)))
    assert published.keys() == dict(lm.named_parameters()).keys()  # a tied tensor once
    for name, tensor in published.items():
        # In the mean: AdamW takes a full step where the gradient is all rounding.
        assert (tensor - lm.get_parameter(name).detach()).abs().mean() < 1e-4

    lm.load_state_dict(published, strict=False)
    probe = read_probe(paths.version(1))
    with torch.no_grad():
        scores = lm(input_ids=probe.ids.long()).logits.log_softmax(-1)
    for row, length in enumerate(probe.lengths.tolist()):
        expected = scores[row, : length - 1].gather(1, probe.ids[row, 1:length, None].long())[:, 0]
        torch.testing.assert_close(probe.logprobs[row, 1:length], expected, rtol=0, atol=1e-5)
        assert probe.logprobs[row, 0] == 0 and (probe.logprobs[row, length:] == 0).all()
    rows = lineage(paths)
    assert rows[-1].done and [row.done for row in rows[:-1]] == [False] * (len(rows) - 1)


def test_a_resumed_run_goes_on_exactly_and_trains_nothing_twice(tmp_path: Path, model: Path) -> None:
    config = make_config([warmup(5)], learner={"checkpoint_every": 2, "keep_checkpoints": 3})
    straight = make_run(tmp_path / "straight", config, model)
    store_and_enter(straight, sft_rows(30))
    alone(straight, config)

    broken = make_run(tmp_path / "broken", config, model)
    store_and_enter(broken, sft_rows(30))
    alone(broken, config, stop=lambda _: len(trained_rows(broken)) >= 4)
    assert [folder.name for folder in sorted(broken.checkpoints.iterdir())] == ["update-000002", "update-000004"]
    # The newest checkpoint is damaged, and one was cut short while being written: the one before must be chosen.
    part = next((broken.checkpoints / "update-000004").glob("*.distcp"))
    data = bytearray(part.read_bytes())
    data[len(data) // 2] ^= 1
    part.write_bytes(data)
    torn = broken.checkpoints / "update-000006.tmp"
    torn.mkdir()
    (torn / "__0_0.distcp").write_bytes(b"half")
    alone(broken, config)

    there, here = trained_rows(straight), trained_rows(broken)
    assert [row.update for row in here] == [1, 2, 3, 4, 5]
    assert [row.metrics["loss"] for row in here] == [row.metrics["loss"] for row in there]
    assert [row.trajectories for row in here] == [row.trajectories for row in there]
    assert trained_twice(lineage(broken)) == []
    left, right = (dict(iter_tensors(paths.version(1))) for paths in (straight, broken))
    assert all(torch.equal(left[name], right[name]) for name in left)


def test_the_only_good_checkpoint_stays_when_a_newer_one_is_damaged(tmp_path: Path, model: Path) -> None:
    config = make_config([warmup(6)], learner={"checkpoint_every": 2, "keep_checkpoints": 2})
    paths = make_run(tmp_path / "run", config, model)
    store_and_enter(paths, sft_rows(36))
    alone(paths, config, stop=lambda _: len(trained_rows(paths)) >= 4)
    part = next((paths.checkpoints / "update-000004").glob("*.distcp"))
    part.write_bytes(part.read_bytes()[:-9])
    # Goes on from update 2 and is stopped at 3: the damaged 4 must not push 3 or 2 out.
    alone(paths, config, stop=lambda _: trained_rows(paths)[-1].update >= 3 and lineage(paths)[-1].update == 3)
    assert [folder.name for folder in sorted(paths.checkpoints.iterdir())] == ["update-000002", "update-000003"]
    alone(paths, config)
    assert [row.update for row in trained_rows(paths)] == [1, 2, 3, 4, 5, 6]


def test_what_can_not_be_read_trains_nothing_and_holds_nobody_up(tmp_path: Path, model: Path) -> None:
    config = make_config([warmup(2)])
    tokens = {}
    for name in ("whole", "damaged"):
        paths = make_run(tmp_path / name, config, model)
        store_and_enter(paths, sft_rows(12))
        compact(paths)
        (shard,) = paths.shards.glob("*.h5")
        with h5py.File(shard) as file:
            row = next(row for row in file["steps"][:] if row["kind"] == Kind.ACT)
            at = file["tokens/ids"].id.get_offset() + 4 * int(row["token_start"])
            lost = int(file["trajectories"]["num_sampled"][row["trajectory"]])
        if name == "damaged":
            data = bytearray(shard.read_bytes())
            data[at] ^= 1
            shard.write_bytes(data)
        alone(paths, config)
        assert [row.update for row in trained_rows(paths)] == [1, 2]
        tokens[name] = sum(row.metrics["tokens"] for row in trained_rows(paths))
    assert tokens["damaged"] == tokens["whole"] - lost


def test_a_stop_is_heard_by_the_learner_that_it_is_meant_for(tmp_path: Path, model: Path) -> None:
    config = make_config([warmup(2)])
    paths = make_run(tmp_path / "run", config, model)
    store_and_enter(paths, sft_rows(12))
    first = LedgerWriter(paths)
    first.stop("asked")  # while the learner was still starting
    alone(paths, config, control=first.incarnation)
    assert trained_rows(paths) == []
    second = LedgerWriter(paths)
    alone(paths, config, control=second.incarnation)  # the next sitting's
    assert [row.update for row in trained_rows(paths)] == [1, 2]


def test_an_allocation_that_ends_has_room_for_the_checkpoint(tmp_path: Path, model: Path) -> None:
    config = make_config([warmup(4)], learner={"checkpoint_every": 3})
    paths = make_run(tmp_path / "run", config, model)
    store_and_enter(paths, sft_rows(24))
    needed: list[float] = []
    alone(paths, config, stop=lambda seconds: needed.append(seconds) or len(trained_rows(paths)) >= 2)  # type: ignore[func-returns-value]
    assert LEAVING_S < needed[0] < needed[-1], "first by what loading took, then by an update, too"
    assert [row.update for row in trained_rows(paths)] == [1, 2]
    assert (paths.checkpoints / "update-000002").exists(), "though none was due"


def test_weights_of_a_lost_lineage_are_published_over(tmp_path: Path, model: Path) -> None:
    """The run died after publishing a version that no checkpoint holds: engines must be given other weights again."""
    config = make_config([warmup(4, publish_every=1)], learner={"checkpoint_every": 2, "keep_checkpoints": 9})
    paths = make_run(tmp_path / "run", config, model)
    store_and_enter(paths, sft_rows(24))
    alone(paths, config, stop=lambda _: len(trained_rows(paths)) >= 3)
    last = paths.checkpoints / "update-000003"
    last.rename(paths.root / "gone")
    assert newest(paths, 1) == [3]
    alone(paths, config)
    rows = lineage(paths)
    assert [(row.update, row.version, row.parent_version) for row in rows if row.version >= 0] == [
        (0, 0, -1),
        (1, 1, 0),
        (2, 2, 1),
        (2, 4, 2),
        (3, 5, 4),
        (4, 6, 5),
    ]
    lost, again = dict(iter_tensors(paths.version(2))), dict(iter_tensors(paths.version(4)))
    assert all(torch.equal(lost[name], again[name]) for name in lost)
    assert trained_twice(rows) == []


def test_grpo_sees_what_the_engine_saw_and_masks_what_is_too_old(tmp_path: Path, model: Path) -> None:
    temperature = 0.7
    lm = AutoModelForCausalLM.from_pretrained(model)

    def behaviour(ids: np.ndarray) -> np.ndarray:
        with torch.no_grad():
            scores = (lm(input_ids=torch.from_numpy(ids).long()[None]).logits[0] / temperature).log_softmax(-1)
        found = scores[:-1].gather(1, torch.from_numpy(ids[1:]).long()[:, None])[:, 0]
        return np.append(0, found.numpy()).astype(np.float32)

    rng = np.random.default_rng(3)
    rows: list[Any] = []
    sampled_by: dict[int, int] = {0: 0, -3: 0}
    for index in range(8):
        version = 0 if index < 6 else -3
        records, ids, sampled = trajectory(f"g{index}", rng, version=version, logprobs=behaviour)
        sampled_by[version] += int(sampled.sum())
        values = {"group": f"group{index // 4}", "phase": "rl", "reward": float(index % 2), "group_size": 4}
        rows.append((records, entry(f"g{index}", records, ids, sampled, **values)))
    phase = {"name": "rl", "objective": "grpo", "lr": 1e-3, "updates": 1, "trajectories": 8, "group_size": 4}
    config = make_config([phase], sampling={"temperature": temperature}, learner={"micro_batch_tokens": 64})
    paths = make_run(tmp_path / "run", config, model)
    store_and_enter(paths, rows)
    alone(paths, config)
    (row,) = trained_rows(paths)
    metrics = row.metrics
    assert metrics["tokens"] == metrics["mismatch_tokens"] == sampled_by[0]
    assert metrics["masked_share"] == pytest.approx(sampled_by[-3] / sum(sampled_by.values()))
    assert metrics["mismatch"] < 1e-5
    assert metrics["ratio"] == pytest.approx(1.0, abs=1e-6)
    assert metrics["is_weight"] == pytest.approx(1.0, abs=1e-4)
    assert metrics["is_cap_share"] == metrics["clip_share"] == 0.0
    assert metrics["reward"] == 0.5
    assert 0 < metrics["grad_norm"] < 100


def test_a_logprob_that_is_no_number_is_not_trained(tmp_path: Path, model: Path) -> None:
    rng = np.random.default_rng(4)
    rows: list[Any] = []
    for index in range(2):
        bad = np.nan if index else 0.0
        records, ids, sampled = trajectory(
            f"g{index}", rng, logprobs=lambda ids, bad=bad: np.full(len(ids), -1.0 + bad, np.float32)
        )
        rows.append(
            (
                records,
                entry(f"g{index}", records, ids, sampled, group="g", group_size=2, phase="rl", reward=float(index)),
            )
        )
    phase = {"name": "rl", "objective": "grpo", "lr": 1e-3, "updates": 1, "trajectories": 2, "group_size": 2}
    config = make_config([phase])
    paths = make_run(tmp_path / "run", config, model)
    store_and_enter(paths, rows)
    alone(paths, config)
    metrics = trained_rows(paths)[0].metrics
    assert metrics["broken_logprobs"] == rows[1][1].num_sampled
    assert metrics["tokens"] == rows[0][1].num_sampled
    assert np.isfinite(list(metrics.values())).all()


def test_the_ledgers_trained_trajectories_are_skipped_by_a_new_replay(tmp_path: Path, model: Path) -> None:
    config = make_config([warmup(2)])
    paths = make_run(tmp_path / "run", config, model)
    store_and_enter(paths, sft_rows(14))
    alone(paths, config)
    trained = {name for row in lineage(paths) for name in row.trajectories}
    replay = Replay(trained)
    replay.add(entries(paths))
    chosen = replay.fire(config.phase[0].model_copy(update={"trajectories": 2}), 0.0)
    assert chosen is not None and chosen.trajectories == ("t012", "t013")


def test_bf16_is_published_as_bf16_and_the_probe_is_its_own(tmp_path: Path, model: Path) -> None:
    config = make_config([warmup(2)], model={"dtype": "bfloat16"})
    paths = make_run(tmp_path / "run", config, model)
    store_and_enter(paths, sft_rows(12))
    alone(paths, config)
    published = dict(iter_tensors(paths.version(1)))
    assert {tensor.dtype for tensor in published.values()} == {torch.bfloat16}
    lm = AutoModelForCausalLM.from_pretrained(model, dtype=torch.bfloat16)
    lm.load_state_dict(published, strict=False)
    probe = read_probe(paths.version(1))
    with torch.no_grad():
        scores = lm(input_ids=probe.ids.long()).logits.float().log_softmax(-1)
    expected = scores[:, :-1].gather(2, probe.ids[:, 1:, None].long())[..., 0]
    inside = torch.arange(1, probe.ids.shape[1]) < probe.lengths[:, None]
    assert (probe.logprobs[:, 1:] - expected)[inside].abs().mean() < 0.05
    assert trained_rows(paths)[1].metrics["loss"] < trained_rows(paths)[0].metrics["loss"]
