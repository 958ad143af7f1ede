"""The learner: one rank's loop, from the ledger to the next version of the weights.

    for each phase, for each of its updates:
        plan (rank 0 waits for data, outside collectives) -> read own rows -> forward and backward -> step
        -> publish if due -> progress row -> checkpoint if due

The progress row comes before the checkpoint: a resume trains again at most what the newest checkpoint doesn't hold,
and then as part of another lineage. So no trajectory is in two updates of the weights that there are.
"""

from __future__ import annotations

import logging
import math
import socket
import time
from collections import deque
from collections.abc import Callable
from typing import Any

import torch

from hpcrl.config import Config, Phase
from hpcrl.layout import RunPaths
from hpcrl.learner import checkpoint
from hpcrl.learner.batch import Counts, MicroBatch, build
from hpcrl.learner.checkpoint import Position
from hpcrl.learner.feed import Feed, Plan, read_rows
from hpcrl.learner.losses import grpo_loss, sft_loss
from hpcrl.learner.policy import Policy, shard, whole
from hpcrl.learner.probe import probe_rows, score_probe
from hpcrl.learner.ranks import Ranks
from hpcrl.store.index import Store
from hpcrl.store.ledger import ProgressWriter, UpdateRow, lineage
from hpcrl.telemetry import Meter
from hpcrl.weights.load import newest
from hpcrl.weights.publish import next_version, prune, start_folder, write_manifest, write_part

log = logging.getLogger("hpcrl.learner")

# What is summed over tokens, micro-batches and ranks to become a mean; see `_sums`.
SUMS = ("loss", "entropy", "ratio", "clip_share", "is_weight", "is_cap_share", "mismatch", "mismatch_tokens")

LEAVING_S = 5.0  # for a process to end


def run_learner(
    paths: RunPaths,
    config: Config,
    rank: int,
    world: int,
    master_addr: str,
    master_port: int,
    stop: Callable[[float], bool],
    control: int = 0,
    listener: socket.socket | None = None,
    meter: Meter | None = None,
) -> None:
    """Train until the phases are done, the ledger says stop, or `stop(s)` (rank 0's counts), where s are the seconds
    that one more update may take, and the checkpoint after it; resume from what there is.

    `control`: the incarnation that asked for this learner; a stop that an earlier one wrote is not for it. `listener`:
    where rank 0 is met, when it has one already. `meter`: told what this rank's time goes to.

    Raises ConfigError for a port or GPU that can't be had, and whatever a collective raises when a peer is gone.
    """
    torch.set_num_threads(config.learner.threads)
    torch.manual_seed(config.seed)
    timeout_s = config.learner.collective_timeout_s
    ranks = Ranks(
        rank, world, master_addr, master_port, gpus=config.learner.gpus, timeout_s=timeout_s, listener=listener
    )
    try:
        meter = meter or Meter()
        learner = Learner(paths, config, ranks, stop, control, meter)
        learner.run()
        meter.to("waiting")
    finally:
        ranks.close()


def publishes(phase: Phase, update: int) -> bool:
    """Whether a version is published with the phase's update of this number (1, 2, …)."""
    return update == phase.updates or (phase.publish_every > 0 and update % phase.publish_every == 0)


def rate(phase: Phase, done: int) -> float:
    """Learning rate of the phase's next update, when `done` are done.

    Constant for RL. Cloning is one pass over recorded data, from a fresh optimizer: its rate rises over a tenth of its
    updates, so that the first steps spoil nothing, and falls linearly to a twentieth, so that the last ones leave no
    noise (the tiny model, 5,000 episodes: success .31 against .21).
    """
    if phase.objective != "sft":
        return phase.lr
    rise = min(1.0, (done + 1) / (phase.updates // 10 + 1))
    return phase.lr * rise * max(0.05, 1.0 - done / phase.updates)


class Learner:
    """One rank. Rank 0 alone has `_feed` and `_progress`, and alone writes manifests and rows."""

    def __init__(
        self, paths: RunPaths, config: Config, ranks: Ranks, stop: Callable[[float], bool], control: int, meter: Meter
    ) -> None:
        self.paths, self.config, self.ranks, self._meter = paths, config, ranks, meter
        self.skipped = 0  # updates without a step, for a gradient that was no finite number
        self._store = Store(paths)
        self._first = ranks.rank == 0
        begun = time.monotonic()
        self.policy = Policy.from_folder(paths.model).to(ranks.device)
        self._save_s = 3 * (time.monotonic() - begun)  # that a checkpoint takes: with two moments of each weight
        shard(self.policy, ranks.mesh(), low_precision=config.model.dtype == "bfloat16")
        self._probe = probe_rows(paths.model, config.seed)
        found = ranks.share(checkpoint.newest_whole(paths) if self._first else None)
        self.at = Position(update=0, phase=0, phase_update=0, version=0, progress=0)
        self.optimizer = self._make_optimizer(config.phase[0])
        if found:
            folder, self.at = found
            self.optimizer = self._make_optimizer(config.phase[self.at.phase])
            checkpoint.load(folder, self.policy, self.optimizer)
        self._ends: set[int] = set()  # versions at the ends of phases: they are evaluated, however late
        self._saved = self.at.update  # a checkpoint of this update is not needed
        self._took: deque[float] = deque(maxlen=20)  # seconds of the latest updates
        self._exact = True  # the weights are exactly those of version at.version
        self._begin_lineage(bool(found), stop, control)
        self._last_update = time.monotonic()

    def _begin_lineage(self, resumed: bool, stop: Callable[[float], bool], control: int) -> None:
        """Open progress, see what is trained already, and publish where engines could hold other weights than ours."""
        phase = self.config.phase[self.at.phase]
        if self._first:
            since = {"incarnation": self.at.progress, "update": self.at.update} if resumed else None
            self._progress = ProgressWriter(self.paths, since)
            rows = lineage(self.paths)
            trained = {trajectory for row in rows for trajectory in row.trajectories}
            last = {phase.name: phase.updates for phase in self.config.phase}
            self._ends = {row.version for row in rows if row.phase_update == last.get(row.phase)}
            stop_now = lambda: stop(self._needed_s())  # noqa: E731
            self._feed = Feed(self.paths, self._store, trained, stop_now, control, self.config.store.poll_s)
        there = self.ranks.share(newest(self.paths, 1) if self._first else None)
        if there != [self.at.version]:
            parent = self.at.version if there else -1
            self._publish(parent)
            if self._first:
                self._progress.append(self._row(phase, published=True, parent=parent))
        elif resumed:
            self._exact = publishes(phase, self.at.phase_update)

    def _make_optimizer(self, phase: Phase) -> torch.optim.AdamW:
        """A phase begins with a fresh optimizer: another objective's moments are no guide. Fused: DTensors make the
        plain loop many times slower at small sizes."""
        learner = self.config.learner
        return torch.optim.AdamW(
            self.policy.parameters(),
            lr=phase.lr,
            betas=(float(learner.betas[0]), float(learner.betas[1])),
            weight_decay=learner.weight_decay,
            fused=True,
        )

    # ---- the loop ------------------------------------------------------------------------------------------------

    def run(self) -> None:
        for index in range(self.at.phase, len(self.config.phase)):
            phase = self.config.phase[index]
            if index > self.at.phase:
                self._move(phase=index, phase_update=0)
                self.optimizer = self._make_optimizer(phase)
            while self.at.phase_update < phase.updates:
                begun = time.monotonic()
                self._meter.to("waiting")
                plan = self._next_plan(phase)
                if plan.stop:
                    self._save()
                    return
                self._meter.to("learning")
                metrics = {"wait_s": (planned := time.monotonic()) - begun} | self._update(phase, plan)
                self._after(phase, plan, metrics)
                self._took.append(time.monotonic() - planned)
        if self._first:
            self._progress.append(self._row(self.config.phase[-1], done=True))

    def _needed_s(self) -> float:
        """For an update and a checkpoint, as the slowest of late were; half as much again, as they vary."""
        return 1.5 * (max(self._took, default=0.0) + self._save_s) + LEAVING_S

    def _next_plan(self, phase: Phase) -> Plan:
        if not self._first:
            return Plan(**self.ranks.receive())
        budget = self.config.learner.micro_batch_tokens
        plan = self._feed.next(phase, self._last_update, self.ranks.world, budget)
        self.ranks.hand_out(plan.dump())
        return plan

    def _after(self, phase: Phase, plan: Plan, metrics: dict[str, float]) -> None:
        """Publish, report, save: each if due."""
        parent = self.at.version
        self._move(update=self.at.update + 1, phase_update=self.at.phase_update + 1)
        publish = publishes(phase, self.at.phase_update)
        begun = time.monotonic()
        if publish:
            self._publish(parent)
        metrics["publish_s"] = time.monotonic() - begun
        if self._first:
            self._progress.append(self._row(phase, plan, metrics, published=publish, parent=parent))
        if self.at.phase_update == phase.updates or self.at.update % self.config.learner.checkpoint_every == 0:
            self._save()
        self._last_update = time.monotonic()

    def _row(
        self,
        phase: Phase,
        plan: Plan | None = None,
        metrics: dict[str, float] | None = None,
        *,
        published: bool = False,
        parent: int = -1,
        done: bool = False,
    ) -> UpdateRow:
        return UpdateRow(
            update=self.at.update,
            phase=phase.name,
            phase_update=self.at.phase_update,
            version=self.at.version if published else -1,
            parent_version=parent,
            positions=tuple(plan.positions) if plan else (),
            trajectories=tuple(plan.trajectories) if plan else (),
            metrics=metrics or {},
            wall=time.time(),
            done=done,
        )

    def _move(self, **changes: int) -> None:
        progress = self._progress.incarnation if self._first else 0
        values = {"progress": progress, **changes}
        self.at = Position(**{name: values.get(name, getattr(self.at, name)) for name in Position.__slots__})

    # ---- one update ----------------------------------------------------------------------------------------------

    def _update(self, phase: Phase, plan: Plan) -> dict[str, float]:
        begun = time.monotonic()
        batches, counts = self._read(phase, plan)
        read = time.monotonic()
        totals = self.ranks.sum(
            torch.tensor([counts.trained, counts.too_old, counts.broken, counts.lag], dtype=torch.float64)
        ).tolist()
        denominator = max(totals[0], 1.0)
        self.optimizer.zero_grad(set_to_none=True)
        sums = torch.zeros(len(SUMS), dtype=torch.float64)
        for batch in batches:
            sums += self._forward_backward(phase, batch.to(self.ranks.device), denominator)
        done = time.monotonic()
        lr = rate(phase, self.at.phase_update)
        norm = self._step(lr)
        metrics = dict(zip(SUMS, self.ranks.sum(sums).tolist(), strict=True))
        for name in ("entropy", "ratio", "clip_share", "is_weight", "is_cap_share"):
            metrics[name] /= denominator
        metrics["mismatch"] /= max(metrics["mismatch_tokens"], 1.0)
        if phase.objective == "sft":
            metrics = {name: metrics[name] for name in ("loss", "entropy")}
        sampled = max(sum(totals[:3]), 1.0)
        return metrics | {
            "grad_norm": norm if math.isfinite(norm) else -1.0,
            "lr": lr,
            "reward": sum(plan.rewards) / len(plan.rewards),
            "trajectories": float(len(plan.heads)),
            "tokens": totals[0],
            "lag": totals[3] / denominator,
            "masked_share": (totals[1] + totals[2]) / sampled,
            "broken_logprobs": totals[2],
            "skipped": float(self.skipped),
            "read_s": read - begun,
            "forward_backward_s": done - read,
            "step_s": time.monotonic() - done,
        }

    def _read(self, phase: Phase, plan: Plan) -> tuple[list[MicroBatch], Counts]:
        mine = plan.cuts[self.ranks.rank]
        max_lag = None if phase.objective == "sft" else phase.max_lag
        batches, found = [], []
        for rows in mine:
            sequences = read_rows(self._store, plan, rows, self.config.learner.collective_timeout_s)
            advantages = [plan.advantages[row] for row in rows]
            batch, counts = build(sequences, advantages, version=self.at.version, max_lag=max_lag)
            batches.append(batch)
            found.append(counts)
        names = Counts.__slots__
        return batches, Counts(**{name: sum(getattr(counts, name) for counts in found) for name in names})

    def _forward_backward(self, phase: Phase, batch: MicroBatch, denominator: float) -> torch.Tensor:
        """Add this micro-batch's gradient; what it adds to SUMS, float64 on the CPU."""
        temperature = float(self.config.sampling.temperature)
        logprobs, entropy = self.policy(batch.ids, batch.positions, batch.targets, temperature)
        proximal = logprobs.detach()  # one minibatch per update: the learner at its start is the learner now
        if phase.objective == "sft":
            loss = sft_loss(logprobs, denominator)
            shares = [torch.zeros(())] * 4
        else:
            loss, terms = grpo_loss(
                logprobs,
                proximal,
                batch.behaviour,
                batch.advantages,
                clip_low=phase.clip_low,
                clip_high=phase.clip_high,
                is_cap=phase.is_cap,
                denominator=denominator,
            )
            shares = [terms.ratio.sum(), terms.clipped.sum(), terms.weight.sum(), terms.capped.sum()]
        # FSDP2 takes the mean over ranks; the denominator is global already.
        torch.autograd.backward(loss * self.ranks.world)
        exact = batch.current & self._exact
        off = ((proximal - batch.behaviour).abs() * exact).sum()
        found = [loss.detach(), entropy.sum(), *shares, off, exact.sum()]
        return torch.stack([value.double().cpu() for value in found])

    def _step(self, lr: float) -> float:
        """Clip and step; the gradient's norm before. One that is not finite is counted and changes nothing."""
        total = torch.nn.utils.clip_grad_norm_(self.policy.parameters(), self.config.learner.grad_clip)
        norm = float(whole(total))
        if math.isfinite(norm):
            for group in self.optimizer.param_groups:
                group["lr"] = lr
            self.optimizer.step()
            self._exact = False
        else:
            self.skipped += 1
            log.warning("update %d: the gradient is not finite, no step taken", self.at.update + 1)
        self.optimizer.zero_grad(set_to_none=True)
        return norm

    # ---- what it leaves behind -----------------------------------------------------------------------------------

    def _publish(self, parent: int) -> None:
        """Write the weights as the next version. A collective."""
        self._meter.to("weight_sync")
        dtype = torch.bfloat16 if self.config.model.dtype == "bfloat16" else torch.float32
        version = 0
        if self._first:
            version = next_version(self.paths)
            start_folder(self.paths, version)
        version = self.ranks.share(version)
        folder = self.paths.version(version)
        probe = score_probe(self.policy, *self._probe, self.ranks.device)
        mine: dict[str, Any] = {}
        for index, (name, tensor) in enumerate(self.policy.tensors()):
            full = whole(tensor)
            if index % self.ranks.world == self.ranks.rank:
                mine[name] = full.to(dtype) if full.is_floating_point() else full
        parts = self.ranks.gather(write_part(folder, self.ranks.rank, self.ranks.world, mine))
        if self._first:
            write_manifest(folder, parts, probe, version=version, update=self.at.update, parent=parent)
            if self.at.phase_update == self.config.phase[self.at.phase].updates:
                self._ends.add(version)
            prune(self.paths, self.config.learner.keep_versions, self._ends)
        self._move(version=version)
        self._exact = True

    def _save(self) -> None:
        if self._saved != self.at.update:
            self._meter.to("saving")
            begun = time.monotonic()
            checkpoint.save(self.paths, self.policy, self.optimizer, self.at, self.config.learner.keep_checkpoints)
            self._save_s = time.monotonic() - begun
            self._saved = self.at.update
