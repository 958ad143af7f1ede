"""Flow's decisions: instructions compared one by one, then whole runs in simulated time with seeded faults."""

from __future__ import annotations

import random
from dataclasses import replace
from typing import Any

import pytest

from hpcrl import flow as f
from hpcrl.config import Config, SandboxPool
from hpcrl.flow.scaling import SHRINK_S
from hpcrl.replay import Replay
from hpcrl.types import Cause, Ended, Fault, State, Task, Ticket

PHASES: list[dict[str, Any]] = [
    {"name": "warm", "objective": "sft", "updates": 3, "trajectories": 4, "publish_every": 0},
    {"name": "rl", "objective": "grpo", "updates": 4, "trajectories": 8, "group_size": 4, "max_lag": 1},
]


def settings(**over: Any) -> Config:
    tree: dict[str, Any] = {"phase": PHASES, "evaluation": {"tasks": 5}, "sandbox": [{"sessions": 64}]} | over
    return Config.model_validate(tree)


class Numbers:
    """Tasks by number."""

    def train(self, phase: int, number: int) -> Task:
        return Task(environment="t", payload={"phase": phase, "number": number})

    def heldout(self, number: int) -> Task:
        return Task(environment="t", payload={"heldout": number})


def make(config: Config | None = None, restored: f.Restored | None = None, incarnation: int = 1) -> f.Flow:
    return f.Flow(config or settings(), Numbers(), restored or f.Restored(), incarnation=incarnation, now=0.0)


def ended(
    ticket: Ticket, *, status: State = State.COMPLETED, reward: float = 1.0, version: int = 0, **over: Any
) -> Ended:
    values: dict[str, Any] = {
        "trajectory": ticket.trajectory, "attempt": ticket.attempt, "kind": ticket.kind, "group": ticket.group,
        "phase": ticket.phase, "status": status, "head": f"head-{ticket.trajectory}", "rewards": {"outcome": reward},
        "num_steps": 3, "num_sampled": 20, "num_tokens": 50, "min_version": version, "max_version": version,
        "duration_s": 1.0,
    }  # fmt: skip
    return Ended(**(values | over))


def starts(instructions: list[f.Instruction]) -> list[f.Start]:
    return [row for row in instructions if isinstance(row, f.Start)]


def joined(flow: f.Flow, capacity: int = 16, now: float = 0.0) -> list[f.Instruction]:
    out = flow.handle(f.SandboxJoined(sandbox="s", capacity=64), now)
    out += flow.handle(f.HostJoined(host="h", node="n", capacity=capacity, held=()), now)
    return out


def test_expert_needs_no_engine_and_training_does() -> None:
    flow = make()
    first = starts(joined(flow))
    assert len(first) == 12  # all that the sft phase will train
    assert {row.ticket.kind for row in first} == {"expert"}
    assert {(row.host, row.ticket.sandbox) for row in first} == {("h", "s")}
    assert len({row.ticket.trajectory for row in first}) == 12


def test_a_trajectory_that_moves_costs_no_retry_and_its_host_gets_no_more() -> None:
    flow = make(settings(retries={"platform": 0}))
    first = starts(joined(flow, capacity=6))
    assert len(first) == 6
    flow.handle(f.HostJoined(host="h2", node="n2", capacity=16, held=()), 1.0)
    for row in [row for row in first if row.host == "h"][:2]:
        moved = ended(row.ticket, status=State.RETRYING, rewards={}, head="")
        out = starts(flow.handle(f.AttemptEnded(ended=moved), 2.0))
        assert [(one.ticket.trajectory, one.ticket.attempt, one.host) for one in out][:1] == [
            (row.ticket.trajectory, 2, "h2")
        ]
        assert all(one.host == "h2" for one in out)
    assert not flow.counts.faults and not flow.last_fault


def test_a_node_that_never_comes_back_is_forgotten() -> None:
    flow = make(settings(phase=PHASES[1:], evaluation={"tasks": 0}))
    joined(flow)
    flow.handle(f.Published(version=0), 0.0)
    flow.handle(f.EngineChanged(node="n", ready=True, version=0), 0.0)
    flow.handle(f.HostJoined(host="h2", node="n", capacity=4, held=()), 0.0)
    flow.handle(f.HostLeft(host="h"), 1.0)
    assert "n" in flow.nodes, "another host of it is there"
    flow.handle(f.HostLeft(host="h2"), 1.0)
    assert not flow.nodes


def test_evaluation_waits_for_its_version_and_goes_first() -> None:
    flow = make()
    joined(flow, capacity=20)
    assert not starts(flow.handle(f.Published(version=0), 1.0))  # no engine yet
    out = starts(flow.handle(f.EngineChanged(node="n", ready=True, version=0), 2.0))
    assert [row.ticket.kind for row in out] == ["eval"] * 5
    assert {row.ticket.pinned for row in out} == {0}


def test_weights_load_only_when_the_evaluation_is_over() -> None:
    flow = make(settings(phase=PHASES[1:]))
    joined(flow)
    flow.handle(f.Published(version=0), 0.0)
    evals = starts(flow.handle(f.EngineChanged(node="n", ready=True, version=0), 0.0))[:5]
    assert not any(isinstance(row, f.Load) for row in flow.handle(f.Published(version=1), 0.0))
    for row in evals[:4]:
        assert not any(isinstance(i, f.Load) for i in flow.handle(f.AttemptEnded(ended=ended(row.ticket)), 0.0))
    out = flow.handle(f.AttemptEnded(ended=ended(evals[4].ticket, reward=0.0)), 0.0)
    results = [row.result for row in out if isinstance(row, f.RecordEvaluation)]
    assert [(row.name, row.tasks, row.successes) for row in results] == [("before", 5, 4)]
    assert [row for row in out if isinstance(row, f.Load)] == [f.Load(node="n", version=1)]


def test_a_group_goes_to_the_ledger_whole_without_members_lost_to_faults() -> None:
    config = settings(phase=PHASES[1:], evaluation={"tasks": 0}, retries={"environment": 0})
    flow = make(config)
    joined(flow)
    flow.handle(f.Published(version=0), 0.0)
    rows = starts(flow.handle(f.EngineChanged(node="n", ready=True, version=0), 0.0))
    group = [row.ticket for row in rows if row.ticket.group == rows[0].ticket.group]
    fault = Fault(cause=Cause.ENVIRONMENT, where="sandbox", message="gone")
    assert not _ledger(flow.handle(f.AttemptEnded(ended=ended(group[0], reward=0.0)), 0.0))
    flow.handle(f.AttemptEnded(ended=ended(group[1], status=State.RETRYING, fault=fault, rewards={})), 0.0)
    assert not _ledger(flow.handle(f.AttemptEnded(ended=ended(group[2])), 0.0))
    assert not _ledger(flow.handle(f.AttemptEnded(ended=ended(group[3])), 0.0))
    # The budget is used up: the next attempt only records the end, and the group is complete without it.
    last = starts(flow.handle(f.Tick(), 1.0))[0].ticket
    assert (last.trajectory, last.attempt, last.verdict) == (group[1].trajectory, 2, fault)
    entries = _ledger(flow.handle(f.AttemptEnded(ended=ended(last, status=State.FAILED, rewards={}, fault=fault)), 1.0))
    assert [row.trajectory for row in entries] == [group[i].trajectory for i in (0, 2, 3)]
    assert flow.counts.status == {"COMPLETED": 3, "FAILED": 1}


def test_what_is_admitted_can_be_trained_within_max_lag() -> None:
    flow = make(settings(phase=PHASES[1:], evaluation={"tasks": 0}, rollout=[{"concurrent": 64}]))
    joined(flow, capacity=64)
    flow.handle(f.Published(version=0), 0.0)
    rows = starts(flow.handle(f.EngineChanged(node="n", ready=True, version=0), 0.0))
    assert len(rows) == 16  # the batch that is trained next, and one that may wait a version
    for row in rows[:8]:
        assert not starts(flow.handle(f.AttemptEnded(ended=ended(row.ticket)), 0.0))  # the learner is slow: no more
    more = starts(flow.handle(f.Updated(phase="rl", phase_update=1, version=1, num_trained=8), 0.0))
    assert not more, "of version 0 these would be two updates behind when they are trained"
    assert len(starts(flow.handle(f.LoadDone(node="n", version=1, ok=True), 0.0))) == 8


@pytest.mark.parametrize(("engine", "admitted"), [(5, 24), (4, 16), (3, 8), (2, 0)])
def test_an_engine_that_is_behind_gets_what_can_still_be_trained(engine: int, admitted: int) -> None:
    phases = [PHASES[1] | {"max_lag": 2}]
    flow = make(settings(phase=phases, evaluation={"tasks": 0}, rollout=[{"concurrent": 64}]))
    joined(flow, capacity=64)
    flow.handle(f.Published(version=5), 0.0)
    assert len(starts(flow.handle(f.EngineChanged(node="n", ready=True, version=engine), 0.0))) == admitted


def test_an_engine_that_stays_behind_holds_up_no_other() -> None:
    flow = make(settings(phase=PHASES[1:], evaluation={"tasks": 0}, rollout=[{"concurrent": 64}]))
    joined(flow, capacity=64)
    flow.handle(f.HostJoined(host="i", node="m", capacity=20, held=()), 0.0)
    flow.handle(f.Published(version=5), 0.0)
    assert not starts(flow.handle(f.EngineChanged(node="n", ready=True, version=2), 0.0))
    rows = starts(flow.handle(f.EngineChanged(node="m", ready=True, version=5), 0.0))
    assert len(rows) == 16 and {row.host for row in rows} == {"i"}


def test_how_many_more_would_run_were_there_sandboxes() -> None:
    flow = make(settings(phase=PHASES[1:], evaluation={"tasks": 0}, rollout=[{"concurrent": 64}]))
    flow.handle(f.HostJoined(host="h", node="n", capacity=12, held=()), 0.0)
    flow.handle(f.Published(version=0), 0.0)
    flow.handle(f.EngineChanged(node="n", ready=True, version=0), 0.0)
    assert flow.short_of_sandboxes == 12  # of 16 that lag allows
    assert len(starts(flow.handle(f.SandboxJoined(sandbox="s", capacity=3), 0.0))) == 3
    assert flow.short_of_sandboxes == 9
    assert len(starts(flow.handle(f.SandboxJoined(sandbox="t", capacity=30), 0.0))) == 9
    assert flow.short_of_sandboxes == 0  # the host is full
    flow.handle(f.HostJoined(host="i", node="n", capacity=12, held=()), 0.0)
    assert flow.short_of_sandboxes == 0  # all that lag allows run


def test_an_elastic_pool_grows_at_once_and_shrinks_to_what_it_needed_of_late() -> None:
    pool = SandboxPool(jobs=2, minimum_jobs=1, maximum_jobs=4)
    scaling = f.Scaling()

    def jobs(used: int, short: int, now: float) -> int:
        return scaling.jobs(pool, 10, used, short, now)

    assert jobs(20, 0, 0) == 2
    assert jobs(20, 1, 1) == 3
    assert jobs(20, 500, 2) == 4
    assert jobs(0, 0, 3) == 2, "not at once"
    assert jobs(20, 0, 60) == 2
    assert jobs(0, 0, 100) == 2, "it was in use a while ago"
    assert jobs(5, 0, 100 + SHRINK_S - 1) == 2
    assert jobs(5, 0, 100 + SHRINK_S) == 1
    pool = SandboxPool(jobs=4, minimum_jobs=1, maximum_jobs=4)
    for now, used in ((0, 5), (60, 25), (110, 0), (SHRINK_S - 1, 0)):
        assert jobs(used, 0, 1000 + now) == 4
    assert jobs(0, 0, 1000 + SHRINK_S) == 3, "it has needed three"


def test_a_late_word_of_an_older_attempt_changes_nothing() -> None:
    flow = make()
    ticket = starts(joined(flow))[0].ticket
    flow.handle(f.AttemptLost(trajectory=ticket.trajectory, attempt=1, message="gone"), 0.0)
    again = next(row for row in starts(flow.handle(f.Tick(), 5.0)) if row.ticket.trajectory == ticket.trajectory)
    assert again.ticket.attempt == 2
    assert not _ledger(flow.handle(f.AttemptEnded(ended=ended(ticket)), 6.0))
    assert _ledger(flow.handle(f.AttemptEnded(ended=ended(again.ticket)), 7.0))


def test_a_restarted_control_lets_hosts_claim_what_they_still_run() -> None:
    before = make()
    tickets = [row.ticket for row in starts(joined(before))]
    restored = f.Restored(
        attempts={ticket.trajectory: 1 for ticket in tickets[:3]},
        ended={tickets[3].trajectory: ended(tickets[3])},
        num_groups={"warm": 4},
    )
    flow = make(restored=restored, incarnation=2)
    out = flow.handle(f.SandboxJoined(sandbox="s", capacity=64), 0.0)
    assert [row.trajectory for row in _ledger(out)] == [tickets[3].trajectory]  # had ended, was not in the ledger
    held = [(tickets[0].trajectory, 1, "s"), ("stranger", 4, "s")]
    out = flow.handle(f.HostJoined(host="h", node="n", capacity=32, held=held), 1.0)
    assert f.Abandon(trajectory="stranger", attempt=4, host="h") in out
    attached = {row.ticket.trajectory: row.ticket.attempt for row in starts(out)}
    assert attached[tickets[0].trajectory] == 1  # the very attempt that goes on
    assert tickets[1].trajectory not in attached  # another host may yet claim it
    late = {row.ticket.trajectory: row.ticket.attempt for row in starts(flow.handle(f.Tick(), f.CLAIM_S + 1))}
    assert late == {tickets[1].trajectory: 2, tickets[2].trajectory: 2}


@pytest.mark.parametrize("first", ["host", "sandbox"])
def test_what_a_host_still_runs_fills_its_sandbox_node_after_a_restart(first: str) -> None:
    tickets = [row.ticket for row in starts(joined(make()))][:3]
    restored = f.Restored(attempts={ticket.trajectory: 1 for ticket in tickets}, num_groups={"warm": 3})
    flow = make(restored=restored, incarnation=2)
    held = [(ticket.trajectory, 1, "s") for ticket in tickets]
    events = [
        f.HostJoined(host="h", node="n", capacity=32, held=held),
        f.SandboxJoined(sandbox="s", capacity=4),
    ]
    for event in events if first == "host" else events[::-1]:
        flow.handle(event, 1.0)
    # Three of its four sandboxes are taken already: one more fits, and no further one.
    assert flow.sandboxes["s"].used == 4
    assert sum(row.host != "" for row in flow.open.values()) == 4
    for ticket in tickets:
        flow.handle(f.AttemptEnded(ended=ended(ticket)), 2.0)
    assert flow.sandboxes["s"].used == sum(row.host != "" for row in flow.open.values()) == 4


def test_a_restarted_control_counts_on_from_what_was() -> None:
    counts = f.Counts(admitted=3)
    for status in (State.COMPLETED, State.COMPLETED, State.TRUNCATED):
        counts.end(status=status, kind="train", num_steps=5, num_calls=4, num_valid_calls=3)
    flow = make(restored=f.Restored(counts=counts, num_groups={}), incarnation=2)
    ticket = starts(joined(flow))[0].ticket
    flow.handle(f.AttemptEnded(ended=replace(ended(ticket), kind="train", num_steps=2, num_calls=2)), 1.0)
    assert (flow.counts.steps, flow.counts.calls, flow.counts.valid_calls) == (17, 14, 9)
    assert flow.counts.admitted == sum(flow.counts.status.values()) + len(flow.open)


def test_an_environment_that_always_fails_ends_the_run_with_its_words() -> None:
    flow = make(settings(evaluation={"tasks": 0}))
    out = joined(flow)
    now = 0.0
    for _ in range(400):
        now += 40.0
        for row in starts(out):
            broken = Fault(cause=Cause.ENVIRONMENT, where="t.reset", message="reset broken")
            if row.ticket.verdict is not None:
                failed = replace(ended(row.ticket, status=State.FAILED), rewards={}, fault=broken)
                flow.handle(f.AttemptEnded(ended=failed), now)
            else:
                flow.handle(f.AttemptEnded(ended=replace(ended(row.ticket), status=State.RETRYING, fault=broken)), now)
        out = flow.handle(f.Tick(), now + 35.0)
        over = [row.outcome for row in out if isinstance(row, f.Finish)]
        if over or flow.finished:
            break
    assert flow.finished and flow.barren >= 8
    assert flow.last_fault == "environment, t.reset: reset broken"


def test_scoring_that_always_fails_ends_the_run_with_its_words() -> None:
    flow = make(settings(evaluation={"tasks": 0}))
    out, count = joined(flow), 0
    said: list[f.Instruction] = []
    while not flow.finished and count < 4000:
        for row in starts(out):
            broken = Fault(cause=Cause.REWARD, where="rewards", message="ValueError: no")
            failed = replace(ended(row.ticket, status=State.FAILED), rewards={}, fault=broken)
            said += flow.handle(f.AttemptEnded(ended=failed), float(count))
            count += 1
            if flow.finished:
                break
        out = [] if flow.finished else flow.handle(f.Tick(), float(count))
        said += out
    (over,) = [row.outcome for row in said if isinstance(row, f.Finish)]
    assert flow.counts.faults == {Cause.REWARD: count} and "(reward, rewards: ValueError: no)" in over


def loads(instructions: list[f.Instruction]) -> list[int]:
    return [row.version for row in instructions if isinstance(row, f.Load)]


def test_a_version_that_an_engine_refused_is_not_tried_on_it_again() -> None:
    flow = make(settings(phase=PHASES[1:], evaluation={"tasks": 0}))
    joined(flow)
    flow.handle(f.EngineChanged(node="n", ready=True, version=0), 0.0)
    assert loads(flow.handle(f.Published(version=2), 0.0)) == [2]
    flow.handle(f.LoadDone(node="n", version=2, ok=True), 0.0)
    assert loads(flow.handle(f.Published(version=3), 0.0)) == [3]
    assert not loads(flow.handle(f.LoadDone(node="n", version=3, ok=False, refused=True), 0.0))
    # Restarted from the base model meanwhile, it gets the last good version, not the refused one.
    flow.handle(f.EngineChanged(node="n", ready=False, version=2), 0.0)
    assert loads(flow.handle(f.EngineChanged(node="n", ready=True, version=0), 0.0)) == [2]
    flow.handle(f.LoadDone(node="n", version=2, ok=True), 0.0)
    assert loads(flow.handle(f.Published(version=4), 0.0)) == [4]
    assert f.Promote(version=4) in flow.handle(f.LoadDone(node="n", version=4, ok=True), 0.0)


def test_an_engine_that_fails_in_loading_is_asked_again() -> None:
    flow = make(settings(phase=PHASES[1:], evaluation={"tasks": 0}))
    joined(flow)
    flow.handle(f.EngineChanged(node="n", ready=True, version=0), 0.0)
    assert loads(flow.handle(f.Published(version=1), 0.0)) == [1]
    for _ in range(f.MAX_LOAD_FAILURES - 1):
        flow.nodes["n"].ready = False
        assert not loads(flow.handle(f.LoadDone(node="n", version=1, ok=False), 0.0))
        assert loads(flow.handle(f.EngineChanged(node="n", ready=True, version=0), 0.0)) == [1]
    assert not loads(flow.handle(f.LoadDone(node="n", version=1, ok=False), 0.0)), "then the version is to blame"


def _ledger(instructions: list[f.Instruction]) -> list[Any]:
    return [entry for row in instructions if isinstance(row, f.WriteLedger) for entry in row.entries]


class World:
    """A run in simulated time: hosts, engines, learner and the faults between them, all from one seed."""

    def __init__(self, seed: int) -> None:
        self.random = random.Random(seed)
        self.config = settings()
        self.flow = make(self.config)
        self.now = 0.0
        self.running: dict[tuple[str, int], tuple[Ticket, str]] = {}
        self.ledger: list[Any] = []
        self.consumed = 0
        self.updates = {"warm": 0, "rl": 0}
        self.version = 0
        self.engine = 0
        self.loads: list[f.Load] = []
        self.hosts: set[str] = set()
        self.lags: list[int] = []
        self.outcome = ""
        self.evaluations: dict[str, f.EvaluationResult] = {}
        self.finished: dict[str, int] = {}

    def feed(self, event: f.Event) -> None:
        for row in self.flow.handle(event, self.now):
            match row:
                case f.Start(ticket=ticket, host=host):
                    assert host in self.hosts
                    assert not any(ticket.trajectory == key[0] for key in self.running), "two attempts at once"
                    self.running[ticket.trajectory, ticket.attempt] = (ticket, host)
                case f.WriteLedger(entries=entries):
                    self.ledger += entries
                case f.Load():
                    self.loads.append(row)
                case f.RecordEvaluation(result=result):
                    assert result.name not in self.evaluations
                    self.evaluations[result.name] = result
                case f.Abandon():
                    self.running.pop((row.trajectory, row.attempt), None)
                case f.Finish(outcome=outcome):
                    self.outcome = outcome

    def join(self, host: str) -> None:
        self.hosts.add(host)
        self.feed(f.HostJoined(host=host, node="n", capacity=6, held=()))

    def step(self) -> None:
        self.now += self.random.random()
        match self.random.choice(
            ["end"] * 12 + ["fault"] * 2 + ["learn"] * 4 + ["load"] * 3 + ["tick", "host", "engine"]
        ):
            case "end" if self.running:
                ticket, _ = self.running.pop(self.random.choice(list(self.running)))
                status = State.FAILED if ticket.verdict else State.COMPLETED
                self.finished[ticket.trajectory] = self.finished.get(ticket.trajectory, 0) + 1
                rewards = {} if ticket.verdict else {"outcome": float(self.random.random() < 0.5)}
                self.feed(f.AttemptEnded(ended=ended(ticket, status=status, rewards=rewards, version=self.engine)))
            case "fault" if self.running:
                ticket, _ = self.running.pop(self.random.choice(list(self.running)))
                fault = Fault(cause=self.random.choice([Cause.ENGINE, Cause.ENVIRONMENT]), where="x", message="x")
                self.feed(f.AttemptEnded(ended=ended(ticket, status=State.RETRYING, rewards={}, fault=fault)))
            case "learn":
                self.learn()
            case "load" if self.loads:
                load = self.loads.pop(0)
                self.engine = load.version
                self.feed(f.LoadDone(node=load.node, version=load.version, ok=True))
            case "host":
                if len(self.hosts) > 1:
                    gone = self.random.choice(sorted(self.hosts))
                    self.hosts.discard(gone)
                    self.running = {key: row for key, row in self.running.items() if row[1] != gone}
                    self.feed(f.HostLeft(host=gone))
                else:
                    self.join(f"h{self.now}")
            case "engine" if not self.loads:
                self.feed(f.EngineChanged(node="n", ready=False, version=self.engine))
                self.engine = 0  # restarted from the base model
                self.feed(f.EngineChanged(node="n", ready=True, version=0))
            case _:
                self.feed(f.Tick())

    def learn(self) -> None:
        phase = next((row for row in self.config.phase if self.updates[row.name] < row.updates), None)
        if phase is None:
            return
        batch = [entry for entry in self.ledger[self.consumed :] if entry.phase == phase.name][: phase.trajectories]
        if len(batch) < phase.trajectories:
            return
        self.consumed = self.ledger.index(batch[-1]) + 1
        self.updates[phase.name] += 1
        if phase.name == "rl":
            self.lags += [self.version - entry.min_version for entry in batch]
        last = self.updates[phase.name] == phase.updates
        version = -1
        if last or phase.publish_every:
            self.version += 1
            version = self.version
        self.feed(
            f.Updated(
                phase=phase.name,
                phase_update=self.updates[phase.name],
                version=version,
                num_trained=self.updates[phase.name] * phase.trajectories,
            )
        )


@pytest.mark.parametrize("seed", range(40))
def test_simulated_run_ends_with_everything_accounted_for(seed: int) -> None:
    world = World(seed)
    world.feed(f.SandboxJoined(sandbox="s", capacity=64))
    world.join("h")
    world.feed(f.Published(version=0))
    world.feed(f.EngineChanged(node="n", ready=True, version=0))
    for _ in range(20_000):
        if world.outcome:
            break
        world.step()
    assert world.outcome == "done"
    counts = world.flow.counts
    assert counts.admitted == sum(counts.status.values()) + len(world.flow.open)
    assert not world.flow.open
    trajectories = [entry.trajectory for entry in world.ledger]
    assert len(trajectories) == len(set(trajectories))
    assert set(world.finished.values()) == {1}
    assert list(world.evaluations) == ["before", "after_warm", "after_rl"]
    assert all(row.tasks + row.failed == 5 for row in world.evaluations.values())
    assert {row.name: row.version for row in world.evaluations.values()} == {
        "before": 0, "after_warm": 1, "after_rl": 5,
    }  # fmt: skip


def test_numbers_of_a_ticket_do_not_depend_on_the_order_of_events() -> None:
    one = {row.ticket.trajectory: row.ticket for row in starts(joined(make(), capacity=16))}
    flow = make()
    two = {row.ticket.trajectory: row.ticket for row in starts(joined(flow, capacity=3))}
    for ticket in list(two.values()):
        for row in starts(flow.handle(f.AttemptEnded(ended=ended(ticket)), 1.0)):
            two[row.ticket.trajectory] = row.ticket
    assert {key: replace(ticket, sandbox="") for key, ticket in two.items()}.items() <= {
        key: replace(ticket, sandbox="") for key, ticket in one.items()
    }.items()


@pytest.mark.parametrize("cause", [Cause.ENVIRONMENT, Cause.PLATFORM, Cause.TOOL, Cause.ENGINE])
def test_another_parts_fault_is_in_no_score_and_no_baseline(cause: Cause) -> None:
    flow = make(settings(phase=PHASES[1:], evaluation={"tasks": 0}))
    joined(flow)
    flow.handle(f.Published(version=0), 0.0)
    rows = starts(flow.handle(f.EngineChanged(node="n", ready=True, version=0), 0.0))
    group = [row.ticket for row in rows if row.ticket.group == rows[0].ticket.group]
    fault = Fault(cause=cause, where="x", message="x")
    flow.handle(f.AttemptEnded(ended=ended(group[0], status=State.TRUNCATED, reward=0.0, fault=fault)), 0.0)
    own = Fault(cause=Cause.POLICY, where="steps", message="max_steps")
    flow.handle(f.AttemptEnded(ended=ended(group[1], status=State.TRUNCATED, reward=0.0, fault=own)), 0.0)
    flow.handle(f.AttemptEnded(ended=ended(group[2], status=State.TRUNCATED, reward=0.0, num_sampled=0)), 0.0)
    entries = _ledger(flow.handle(f.AttemptEnded(ended=ended(group[3])), 0.0))
    assert [(row.trajectory, row.group_size) for row in entries] == [(group[i].trajectory, 2) for i in (1, 3)]


def test_a_claim_ends_once_whatever_event_comes_first() -> None:
    before = make()
    tickets = [row.ticket for row in starts(joined(before))]
    restored = f.Restored(attempts={tickets[0].trajectory: 1}, num_groups={"warm": 1})
    flow = make(restored=restored, incarnation=2)
    flow.handle(f.SandboxJoined(sandbox="s", capacity=64), 0.0)
    out = flow.handle(f.HostJoined(host="h", node="n", capacity=1, held=()), f.CLAIM_S - 1)
    other = starts(out)[0].ticket
    # The claim's time is over: placed elsewhere, it is the next attempt, once.
    out = starts(flow.handle(f.AttemptEnded(ended=ended(other)), f.CLAIM_S + 0.1))
    assert [(row.ticket.trajectory, row.ticket.attempt) for row in out] == [(tickets[0].trajectory, 2)]
    flow.handle(f.HostLeft(host="h"), f.CLAIM_S + 1)
    out = starts(flow.handle(f.HostJoined(host="h2", node="n", capacity=9, held=()), f.CLAIM_S + 9))
    assert {row.ticket.trajectory: row.ticket.attempt for row in out}[tickets[0].trajectory] == 3


def test_a_host_that_comes_back_after_the_claims_time_keeps_what_nobody_else_took() -> None:
    tickets = [row.ticket for row in starts(joined(make()))]
    flow = make(restored=f.Restored(attempts={tickets[0].trajectory: 1}, num_groups={"warm": 1}), incarnation=2)
    flow.handle(f.SandboxJoined(sandbox="s", capacity=64), 0.0)
    flow.handle(f.Tick(), f.CLAIM_S + 5)
    held = [(tickets[0].trajectory, 1, "s")]
    out = flow.handle(f.HostJoined(host="h", node="n", capacity=4, held=held), f.CLAIM_S + 6)
    assert not [row for row in out if isinstance(row, f.Abandon)]
    assert (tickets[0].trajectory, 1) in [(row.ticket.trajectory, row.ticket.attempt) for row in starts(out)]


def test_a_trajectorys_life_is_one_whatever_its_attempts() -> None:
    flow = make()
    ticket = starts(joined(flow))[0].ticket
    assert ticket.deadline_s == flow.config.sampling.deadline_s
    flow.handle(f.AttemptLost(trajectory=ticket.trajectory, attempt=1, message="gone"), 100.0)
    (again,) = [row for row in starts(flow.handle(f.Tick(), 130.0)) if row.ticket.trajectory == ticket.trajectory]
    assert again.ticket.deadline_s == flow.config.sampling.deadline_s - 100.0


def test_an_evaluation_that_met_another_version_goes_on_at_its_own() -> None:
    flow = make(settings(phase=PHASES[1:], evaluation={"tasks": 3}))
    flow.handle(f.Published(version=0), 0.0)
    flow.handle(f.EngineChanged(node="n", ready=True, version=0), 0.0)
    out = starts(joined(flow, capacity=64))
    evals = [row.ticket for row in out if row.ticket.kind == "eval"]
    assert len(evals) == 3
    results = []
    for number, ticket in enumerate(evals):
        one = ended(ticket, version=0)
        if number == 1:  # the engine went away and came back with other weights: the loop says so, and ends there
            fault = Fault(cause=Cause.ENGINE, where="engine", message="tokens of version 7, not of 0")
            one = replace(one, status=State.RETRYING, fault=fault, rewards={})
        results += flow.handle(f.AttemptEnded(ended=one), 1.0)
    assert not [row for row in results if isinstance(row, f.RecordEvaluation)]
    (again,) = [row.ticket for row in starts(flow.handle(f.Tick(), 2.0)) if row.ticket.kind == "eval"]
    assert (again.trajectory, again.attempt, again.pinned) == (evals[1].trajectory, 2, 0)
    out = flow.handle(f.AttemptEnded(ended=ended(again, version=0)), 3.0)
    (row,) = [row for row in out if isinstance(row, f.RecordEvaluation)]
    assert (row.result.tasks, row.result.failed, row.result.successes) == (3, 0, 3)


def test_a_load_that_nobody_answered_says_nothing_of_the_version() -> None:
    flow = make(settings(phase=PHASES[1:], evaluation={"tasks": 0}))
    joined(flow)
    flow.handle(f.EngineChanged(node="n", ready=True, version=0), 0.0)
    assert loads(flow.handle(f.Published(version=1), 0.0)) == [1]
    for _ in range(10):
        assert not loads(flow.handle(f.LoadDone(node="n", version=1, ok=False, reached=False), 0.0))
        assert loads(flow.handle(f.EngineChanged(node="n", ready=True, version=0), 0.0)) == [1]


def test_a_run_whose_needed_version_no_engine_takes_fails_aloud() -> None:
    flow = make(settings(phase=PHASES[1:], evaluation={"tasks": 2}))
    joined(flow)
    flow.handle(f.Published(version=0), 0.0)
    flow.handle(f.EngineChanged(node="n", ready=True, version=5), 0.0)
    (finish,) = [
        row
        for row in flow.handle(f.LoadDone(node="n", version=0, ok=False, refused=True), 0.0)
        if isinstance(row, f.Finish)
    ]
    assert finish.outcome.startswith("failed: no engine takes version 0")


@pytest.mark.parametrize("trigger", [{"steps": 100}, {"tokens": 700}, {"trajectories": 21}])
def test_any_trigger_is_fed(trigger: dict[str, int]) -> None:
    """With the learner's own replay: enough is admitted that each update fires, whatever counts."""
    phase = {"name": "rl", "objective": "grpo", "updates": 4, "group_size": 4, "max_lag": 1, **trigger}
    config = settings(phase=[phase], evaluation={"tasks": 0})
    flow, replay = make(config), Replay()
    todo = starts(joined(flow, capacity=64))
    flow.handle(f.Published(version=0), 0.0)
    todo += starts(flow.handle(f.EngineChanged(node="n", ready=True, version=0), 0.0))
    updates = trained = line = 0
    for _ in range(3000):
        if updates == 4:
            break
        assert todo, f"nothing is admitted, {replay.waiting('rl')} wait, {updates} updates"
        out = flow.handle(f.AttemptEnded(ended=ended(todo.pop(0).ticket)), 0.0)
        todo += starts(out)
        replay.add(((1, line := line + 1), entry) for entry in _ledger(out))
        chosen = replay.fire(config.phase[0], 0.0)
        if chosen is not None:
            updates, trained = updates + 1, trained + len(chosen.entries)
            made = f.Updated(phase="rl", phase_update=updates, version=updates, num_trained=trained)
            todo += starts(flow.handle(made, 0.0))
            todo += starts(flow.handle(f.LoadDone(node="n", version=updates, ok=True), 0.0))
    assert updates == 4
