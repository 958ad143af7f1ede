"""Decisions only: what is admitted, where it runs, what is retried, which weights an engine loads, when a run is over.

A state machine without I/O, clock or Dask: events in, instructions out. The driver turns the world into events and
carries out the instructions; a restarted control builds the same state again from the run folder (`Restored`).

    events   HostJoined HostLeft SandboxJoined SandboxLeft EngineChanged LogFull LoadDone
             AttemptEnded AttemptLost Published Updated Submitted StopAsked Tick
    -> Flow.handle(event, now) ->
    instructions   Start Abandon WriteLedger Load Promote RecordEvaluation Finish

One class, one file over 400 lines: the state is one, and every rule reads it.
"""

from __future__ import annotations

import hashlib
import math
from collections import Counter, deque
from collections.abc import Iterator
from dataclasses import dataclass, field, replace

from hpcrl.config import Config, Phase
from hpcrl.flow.words import (
    Abandon,
    AttemptEnded,
    AttemptLost,
    Counts,
    EngineChanged,
    EvaluationResult,
    Event,
    Finish,
    HostJoined,
    HostLeft,
    Instruction,
    Load,
    LoadDone,
    LogFull,
    Promote,
    Published,
    RecordEvaluation,
    Restored,
    SandboxJoined,
    SandboxLeft,
    Start,
    StopAsked,
    Submitted,
    Tasks,
    Tick,
    Updated,
    WriteLedger,
)
from hpcrl.types import Cause, Ended, Entry, Fault, Sampling, State, Task, Ticket, TrajectoryKind

# A restarted control waits this long for hosts to claim the trajectories that they still run.
CLAIM_S = 10.0
MAX_LOAD_FAILURES = 3  # of an engine at the same version, before that version is taken for the cause


@dataclass(slots=True)
class Open:
    """A trajectory that has not ended."""

    ticket: Ticket
    host: str = ""  # where its attempt runs; "" while pending
    not_before: float = 0.0
    claim_until: float = 0.0  # restored: may still run on a host that has not joined yet
    begun: bool = False  # restored: an earlier life began this attempt; placed elsewhere it is the next
    placed_at: float = 0.0
    spent_s: float = 0.0  # of its life, in attempts that are over
    faults: Counter[Cause] = field(default_factory=Counter)


@dataclass(slots=True)
class Group:
    phase: str
    size: int
    ended: list[Ended] = field(default_factory=list)


@dataclass(slots=True)
class Place:
    capacity: int
    node: str = ""
    used: int = 0


@dataclass(slots=True)
class Node:
    ready: bool
    version: int
    loading: int = -1
    refused: frozenset[int] = frozenset()  # versions whose check failed here
    failures: int = 0  # loads in a row in which the engine failed


def says_of_policy(ended: Ended) -> bool:
    """Whether a reward says something of the policy: not where it sampled nothing, nor where another's fault had a
    part in the end."""
    blameless = ended.fault is None or ended.fault.cause is Cause.POLICY
    return blameless and bool(ended.rewards) and ended.num_sampled > 0


class Flow:
    def __init__(self, config: Config, tasks: Tasks, restored: Restored, *, incarnation: int, now: float) -> None:
        self.config = config
        self.tasks = tasks
        self.incarnation = incarnation
        self.hosts: dict[str, Place] = {}
        self.sandboxes: dict[str, Place] = {}
        self.nodes: dict[str, Node] = {}
        self.open: dict[str, Open] = {}
        self.pending: deque[str] = deque()
        self.groups: dict[str, Group] = {}
        self.updates = Counter(restored.updates)
        self.trained = Counter(restored.trained)
        self.ledgered = Counter(restored.ledgered)
        self.ledgered_units = {phase.name: restored.units.get(phase.name, (0, 0)) for phase in config.phase}
        self.versions = dict(restored.versions)
        self.num_groups = Counter(restored.num_groups)
        self.newest = restored.newest
        self.promoted = -1
        self.evaluations = dict(restored.evaluations)
        self.evaluating: tuple[str, int] | None = None  # (name, version) of the evaluation under way
        self.eval_ended: list[Ended] = []
        self.eval_failed = 0
        self.counts: Counts = restored.counts
        self.recent: deque[float] = deque(maxlen=256)  # rewards of the latest scored training trajectories
        self.full: frozenset[str] = frozenset()  # nodes whose log waits for space: nothing new is admitted
        self.barren = 0  # groups in a row that gave the ledger nothing
        self.last_fault = ""
        self.finished = False
        self.backlog: list[Instruction] = []  # what restoring found to be done
        self._restored = restored
        self._claim_until = now + CLAIM_S
        self._restore_groups()

    # -- the one entry point --

    def handle(self, event: Event, now: float) -> list[Instruction]:
        if self.finished:
            return []
        match event:
            case HostJoined():
                # What a restored evaluation still runs there must be known before the host's loops are judged.
                out = self._evaluate()
                out += self._host_joined(event)
            case HostLeft(host=host):
                self._host_left(host, now)
                out = []
            case SandboxJoined(sandbox=sandbox, capacity=capacity):
                used = sum(row.host != "" and row.ticket.sandbox == sandbox for row in self.open.values())
                self.sandboxes[sandbox] = Place(capacity, used=used)
                out = []
            case SandboxLeft(sandbox=sandbox):
                self.sandboxes.pop(sandbox, None)
                for row in self.open.values():  # they report the fault themselves; a namesake must not pay for them
                    if row.ticket.sandbox == sandbox:
                        row.ticket = replace(row.ticket, sandbox="")
                out = []
            case EngineChanged(node=node, ready=ready, version=version):
                known = self.nodes.setdefault(node, Node(ready, version))
                known.ready, known.version = ready, version
                if ready:
                    self.promoted = max(self.promoted, version)  # it was checked when it was loaded
                out = []
            case LogFull(node=node, full=full):
                self.full = self.full | {node} if full else self.full - {node}
                out = []
            case LoadDone():
                out = self._load_done(event)
            case AttemptEnded(ended=ended):
                out = self._attempt_ended(ended, now)
            case AttemptLost(trajectory=trajectory, attempt=attempt, message=message):
                fault = Fault(cause=Cause.PLATFORM, where="host", message=message)
                out = self._retry(trajectory, attempt, fault, now)
            case Published(version=version):
                self.newest = max(self.newest, version)
                out = []
            case Updated():
                out = self._updated(event)
            case Submitted(trajectory=trajectory, task=task):
                group = trajectory.rsplit(".", 1)[0]
                if trajectory not in self._restored.finished and trajectory not in self.open:
                    self._reopen(self._admit("user", task, group, 0, "", self.config.sampling.temperature))
                out = []
            case StopAsked(reason=reason):
                self.finished = True
                return [Finish(outcome=reason)]
            case Tick():
                out = []
        out, self.backlog = self.backlog + out, []
        out += self._evaluate()
        out += self._load()
        out += self._fill(now)
        out += self._over()
        return out

    # -- phases --

    @property
    def phase(self) -> Phase | None:
        """The phase that trajectories are made for now; None when all are done."""
        return next((phase for phase in self.config.phase if self.updates[phase.name] < phase.updates), None)

    def _base_version(self, phase: Phase) -> int:
        """The version that the phase starts from: the last one of the phase before it."""
        names = [row.name for row in self.config.phase]
        before = names[: names.index(phase.name)]
        return max((self.versions.get(name, 0) for name in before), default=0)

    def _least_version(self, phase: Phase, behind: int) -> int:
        """What an engine must have that may be so many versions behind the newest."""
        return max(self._base_version(phase), self.newest - behind)

    def _updated(self, event: Updated) -> list[Instruction]:
        self.updates[event.phase] = event.phase_update
        self.trained[event.phase] = event.num_trained
        if event.version >= 0:
            self.versions[event.phase] = event.version
            self.newest = max(self.newest, event.version)
        current = self.phase
        done = [row.name for row in self.config.phase if row is not current and self.updates[row.name] >= row.updates]
        self.groups = {key: group for key, group in self.groups.items() if group.phase not in done}
        out: list[Instruction] = []
        for key, row in list(self.open.items()):
            if row.ticket.phase in done:
                if row.host:
                    out.append(Abandon(trajectory=key, attempt=row.ticket.attempt, host=row.host, cancelled=True))
                self._release(row)
                del self.open[key]
                self.counts.status[State.CANCELLED] += 1
        return out

    # -- admission --

    def _room_in_phase(self, phase: Phase, behind: int = 0) -> int:
        """How many more trajectories may be opened: what training needs, and what lag allows where the engine is so
        many versions `behind` the newest."""
        open_now = sum(row.ticket.phase == phase.name for row in self.open.values())
        open_now += sum(len(group.ended) for group in self.groups.values() if group.phase == phase.name)
        waiting = self.ledgered[phase.name] - self.trained[phase.name]
        batch = self._batch(phase)
        needed = batch * (phase.updates - self.updates[phase.name]) - waiting - open_now
        if phase.from_expert:
            return needed
        # What is opened now is trained after what waits: it may be at most max_lag updates behind by then.
        return min(needed, batch * (1 + phase.max_lag - behind) - waiting - open_now)

    @property
    def update_waits(self) -> bool:
        """Whether the learner has what it takes for an update, or for its end."""
        phase = self.phase
        return phase is None or self.ledgered[phase.name] - self.trained[phase.name] >= self._batch(phase)

    def _batch(self, phase: Phase) -> int:
        """Trajectories that an update takes, in whole groups: as configured, or as other triggers came to."""
        wanted = float(phase.trajectories)
        if not wanted:
            ledgered, updates = self.ledgered[phase.name], self.updates[phase.name]
            steps, tokens = self.ledgered_units[phase.name]
            guesses = [4.0 * phase.group_size]
            if updates:
                guesses.append(self.trained[phase.name] / updates)
            if phase.steps and steps:
                guesses.append(phase.steps * ledgered / steps)
            if phase.tokens and tokens:
                guesses.append(phase.tokens * ledgered / tokens)
            wanted = max(guesses)
        return math.ceil(wanted / phase.group_size) * phase.group_size

    def _fill(self, now: float) -> list[Instruction]:
        out: list[Instruction] = []
        for _ in range(len(self.pending)):
            key = self.pending.popleft()
            row = self.open.get(key)
            if row is None or row.host:
                continue
            start = self._place(row, now)
            if start is None:
                self.pending.append(key)
            else:
                out.append(start)
        phase = self.phase
        while phase is not None and not self._eval_waits() and not self.full:
            allowed = [lag for lag in range(phase.max_lag + 1) if self._room_in_phase(phase, lag) > 0]
            if not allowed:
                break
            least = self._least_version(phase, allowed[-1])
            if not self._host_for(phase.from_expert, least, -1):
                break
            if self._needs_sandbox and not self._sandbox():
                break
            for key in self._open_group(phase, self.num_groups[phase.name]):
                start = self._place(self.open[key], now, least)
                if start is None:
                    self.pending.append(key)
                else:
                    out.append(start)
        return out

    def _eval_waits(self) -> bool:
        """Evaluation goes first: while some of it is pending, nothing new is admitted for training."""
        return any(key in self.open and self.open[key].ticket.kind == "eval" for key in self.pending)

    def _open_group(self, phase: Phase, number: int) -> list[str]:
        index = self.config.phase.index(phase)
        self.num_groups[phase.name] = max(self.num_groups[phase.name], number + 1)
        task = self.tasks.train(index, number)
        group = f"{task.id}.p{index}n{number}"
        self.groups[group] = Group(phase.name, phase.group_size)
        keys = []
        for member in range(phase.group_size):
            kind: TrajectoryKind = "expert" if phase.from_expert else "train"
            keys.append(self._admit(kind, task, group, member, phase.name, self.config.sampling.temperature))
        return keys

    def _admit(
        self,
        kind: TrajectoryKind,
        task: Task,
        group: str,
        member: int,
        phase: str,
        temperature: float,
        pinned: int = -1,
    ) -> str:
        trajectory = f"{group}.{member}"
        seed = int.from_bytes(hashlib.sha256(f"{self.config.seed}/{trajectory}".encode()).digest()[:4], "big") >> 1
        sampling = self.config.sampling
        ticket = Ticket(
            trajectory=trajectory, attempt=1, kind=kind, task=task, group=group, member=member, phase=phase, seed=seed,
            sampling=Sampling(temperature=temperature, max_tokens=sampling.max_tokens, seed=seed),
            max_steps=sampling.max_steps, max_context=sampling.max_context, deadline_s=sampling.deadline_s,
            incarnation=self.incarnation, pinned=pinned,
        )  # fmt: skip
        self.open[trajectory] = Open(ticket)
        self.counts.admitted += 1
        return trajectory

    # -- placement --

    @property
    def _needs_sandbox(self) -> bool:
        return any(pool.jobs for pool in self.config.sandbox)

    @property
    def short_of_sandboxes(self) -> int:
        """How many more trajectories hosts would run, were there sandboxes for them."""
        phase = self.phase
        if not self._needs_sandbox or self._sandbox():
            return 0
        free = sum(max(0, place.capacity - place.used) for place in self.hosts.values())
        room = 0 if phase is None or self.full or self._eval_waits() else max(0, self._room_in_phase(phase))
        return min(free, len(self.pending) + room)

    def _host_for(self, any_engine: bool, least: int, exactly: int) -> str:
        """The host with most room whose engine is ready at version >= `least` (and == `exactly`, unless that is -1)."""
        best, most = "", 0
        for address, place in self.hosts.items():
            node = self.nodes.get(place.node)
            fits = any_engine or (
                node is not None and node.ready and node.version >= least and exactly in (-1, node.version)
                and (exactly == -1 or node.loading == -1)
            )  # fmt: skip
            if fits and place.capacity - place.used > most:
                best, most = address, place.capacity - place.used
        return best

    def _sandbox(self) -> str:
        free = {address: place.capacity - place.used for address, place in self.sandboxes.items()}
        best = max(free, key=lambda address: free[address], default="")
        return best if best and free[best] > 0 else ""

    def _place(self, row: Open, now: float, least: int = 0) -> Start | None:
        if now < max(row.not_before, row.claim_until):
            return None
        ticket = row.ticket
        verdict = ticket.verdict is not None
        if ticket.kind == "train":
            phase = self.config.phase_named(ticket.phase)
            least = max(least, self._least_version(phase, phase.max_lag))
        host = self._host_for(ticket.kind == "expert" or verdict, least, ticket.pinned)
        sandbox = self._sandbox() if self._needs_sandbox and not verdict else ""
        if not host or (self._needs_sandbox and not verdict and not sandbox):
            return None
        deadline_s = max(0.0, self.config.sampling.deadline_s - row.spent_s)
        attempt = ticket.attempt + row.begun
        row.ticket = replace(ticket, sandbox=sandbox, attempt=attempt, deadline_s=deadline_s)
        row.host, row.placed_at, row.begun = host, now, False
        self.hosts[host].used += 1
        if sandbox:
            self.sandboxes[sandbox].used += 1
        return Start(ticket=row.ticket, host=host)

    def _release(self, row: Open) -> None:
        if row.host and row.host in self.hosts:
            self.hosts[row.host].used -= 1
        if row.host and row.ticket.sandbox in self.sandboxes:
            self.sandboxes[row.ticket.sandbox].used -= 1
        row.host = ""

    # -- hosts --

    def _host_joined(self, event: HostJoined) -> list[Instruction]:
        place = self.hosts[event.host] = Place(event.capacity, event.node)
        out: list[Instruction] = []
        for trajectory, attempt, sandbox in event.held:
            row = self.open.get(trajectory)
            current = row.ticket.attempt if row else 0
            if row is None or row.host or attempt < current:
                out.append(Abandon(trajectory=trajectory, attempt=attempt, host=event.host))
                continue
            # The loop went on while control was away: attach to it again, under the attempt that it has.
            row.ticket = replace(row.ticket, attempt=attempt, sandbox=sandbox)
            row.host, row.claim_until, row.begun = event.host, 0.0, False
            place.used += 1
            if sandbox in self.sandboxes:
                self.sandboxes[sandbox].used += 1
            out.append(Start(ticket=row.ticket, host=event.host))
        return out

    def _host_left(self, host: str, now: float) -> None:
        place = self.hosts.pop(host, None)
        if place is not None and all(other.node != place.node for other in self.hosts.values()):
            self.nodes.pop(place.node, None)  # it may never come back; of one that does we hear again
            self.full -= {place.node}
        fault = Fault(cause=Cause.PLATFORM, where=host, message="the host process went away")
        for key in [key for key, row in self.open.items() if row.host == host]:
            self._retry(key, self.open[key].ticket.attempt, fault, now)

    # -- ends --

    def _attempt_ended(self, ended: Ended, now: float) -> list[Instruction]:
        row = self.open.get(ended.trajectory)
        if row is None or row.ticket.attempt != ended.attempt:
            return []  # a late word of an attempt that was given up
        if not ended.status.terminal:
            if ended.fault is None:
                self._moved(row, now)
                return []
            return self._retry(ended.trajectory, ended.attempt, ended.fault, now)
        if ended.status is State.FAILED and ended.fault is not None and row.ticket.verdict is None:
            self._note(ended.fault)  # of its scoring: it was never taken up again for that
        self._release(row)
        del self.open[ended.trajectory]
        return self._count_end(ended)

    def _count_end(self, ended: Ended) -> list[Instruction]:
        self.counts.end(
            status=ended.status, kind=ended.kind, num_steps=ended.num_steps, num_calls=ended.num_calls,
            num_valid_calls=ended.num_valid_calls,
        )  # fmt: skip
        if ended.kind == "eval":
            self._eval_end(ended)
            return []
        if ended.rewards and ended.kind == "train":
            self.recent.append(sum(ended.rewards.values()))
        group = self.groups.get(ended.group)
        if group is None:
            return []
        group.ended.append(ended)
        if len(group.ended) < group.size:
            return []
        del self.groups[ended.group]
        return self._score_group(group)

    def _score_group(self, group: Group) -> list[Instruction]:
        """All members ended: those with a reward go to the ledger together, in member order."""
        scored = sorted((ended for ended in group.ended if says_of_policy(ended)), key=lambda ended: ended.trajectory)
        if len(scored) < min(2, group.size):
            self.barren += 1
            return []  # no baseline to be had
        self.barren = 0
        entries = tuple(
            Entry(
                trajectory=ended.trajectory, attempt=ended.attempt, head=ended.head, group=ended.group,
                phase=ended.phase, reward=sum(ended.rewards.values()), num_tokens=ended.num_tokens,
                num_sampled=ended.num_sampled, num_steps=ended.num_steps, min_version=ended.min_version,
                group_size=len(scored),
            )
            for ended in scored
        )  # fmt: skip
        steps, tokens = self.ledgered_units[group.phase]
        steps += sum(entry.num_steps for entry in entries)
        self.ledgered_units[group.phase] = (steps, tokens + sum(entry.num_sampled for entry in entries))
        self.ledgered[group.phase] += len(entries)
        return [WriteLedger(entries=entries)]

    def _moved(self, row: Open, now: float) -> None:
        """Its host is about to leave, which is nobody's fault: it goes on elsewhere, and nothing is placed there."""
        if row.host in self.hosts:
            self.hosts[row.host].capacity = 0
        self._take_up(row, now)

    def _take_up(self, row: Open, now: float) -> None:
        self._release(row)
        row.spent_s += now - row.placed_at
        row.ticket = replace(row.ticket, attempt=row.ticket.attempt + 1, sandbox="")
        self.pending.appendleft(row.ticket.trajectory)

    def _retry(self, trajectory: str, attempt: int, fault: Fault, now: float) -> list[Instruction]:
        """Take the trajectory up again, or give it up when its cause has used its budget."""
        row = self.open.get(trajectory)
        if row is None or row.ticket.attempt != attempt or not row.host:
            return []
        self._take_up(row, now)
        self._note(fault)
        row.faults[fault.cause] += 1
        tries = row.faults[fault.cause]
        budget = getattr(self.config.retries, fault.cause.value, 0)
        verdict = fault if tries > budget else None
        row.ticket = replace(row.ticket, verdict=verdict)
        row.not_before = now + min(0.25 * 2 ** (tries - 1), 30.0)
        return []

    def _note(self, fault: Fault) -> None:
        self.counts.faults[fault.cause] += 1
        self.last_fault = f"{fault.cause}, {fault.where}: {fault.message}"[:500]

    # -- evaluation --

    def _boundaries(self) -> Iterator[tuple[str, int]]:
        """(name, version) of each evaluation that is due: at the start, and at the end of each phase."""
        if self.newest >= 0:
            yield "before", 0
        for phase in self.config.phase:
            if self.updates[phase.name] < phase.updates or phase.name not in self.versions:
                return
            yield f"after_{phase.name}", self.versions[phase.name]

    def _evaluate(self) -> list[Instruction]:
        wanted = self.config.evaluation.tasks
        if self.evaluating:
            name, version = self.evaluating
            if len(self.eval_ended) + self.eval_failed < wanted:
                return []
            scores = [sum(ended.rewards.values()) for ended in self.eval_ended]
            result = EvaluationResult(
                name=name, version=version, tasks=len(scores), failed=self.eval_failed,
                successes=sum(ended.rewards.get("outcome", 0.0) >= 1.0 for ended in self.eval_ended),
                reward=sum(scores) / max(1, len(scores)),
            )  # fmt: skip
            self.evaluations[name] = result
            self.evaluating = None
            return [RecordEvaluation(result=result)]
        due = next(((name, version) for name, version in self._boundaries() if name not in self.evaluations), None)
        if due is None or not wanted:
            return []
        self.evaluating, (name, version) = due, due
        self.eval_ended, self.eval_failed = [], 0
        for number in range(wanted):
            task = self.tasks.heldout(number)
            group = f"{task.id}.{name}-{number}"
            key = self._admit("eval", task, group, 0, name, self.config.evaluation.temperature, version)
            ended = self._restored.ended.get(key)
            if ended is not None:
                del self.open[key]
                self._count_end(ended)
            else:
                self._reopen(key)
        return []

    def _eval_end(self, ended: Ended) -> None:
        if self.evaluating is None or ended.phase != self.evaluating[0]:
            return
        if says_of_policy(ended):
            self.eval_ended.append(ended)
        else:
            self.eval_failed += 1

    # -- weights --

    def _load(self) -> list[Instruction]:
        """Bring each engine to the version that is wanted: an evaluation's, else the newest, else the last good one."""
        wanted = self.evaluating[1] if self.evaluating else self.newest
        out: list[Instruction] = []
        for name, node in self.nodes.items():
            target = self.promoted if wanted in node.refused else wanted
            if node.ready and node.loading < 0 and 0 <= target != node.version and target not in node.refused:
                node.loading = target
                out.append(Load(node=name, version=target))
        return out

    def _load_done(self, event: LoadDone) -> list[Instruction]:
        node = self.nodes.get(event.node)
        if node is None:
            return []
        node.loading = -1
        if not event.ok:
            if not event.refused:
                node.ready = False  # until it is seen to be again
            if not event.reached:
                return []
            node.failures += 1
            if event.refused or node.failures >= MAX_LOAD_FAILURES:
                node.refused |= {event.version}
                node.failures = 0
            return []
        node.version, node.failures = event.version, 0
        if event.version > self.promoted:
            self.promoted = event.version
            return [Promote(version=event.version)]
        return []

    # -- the end --

    def _over(self) -> list[Instruction]:
        phase = self.phase
        if phase is not None and self.barren >= max(8, 2 * self._batch(phase) // phase.group_size):
            self.finished = True
            what = f"the last {self.barren} groups gave nothing to train on ({self.last_fault})"
            return [Finish(outcome=f"failed: {what}")]
        stuck = self._refused_by_all()
        if stuck >= 0:
            self.finished = True
            return [
                Finish(outcome=f"failed: no engine takes version {stuck}, which the run needs; `hpcrl status` says why")
            ]
        if self.phase is not None or self.evaluating or self.open:
            return []
        if self.config.evaluation.tasks and any(name not in self.evaluations for name, _ in self._boundaries()):
            return []
        self.finished = True
        return [Finish(outcome="done")]

    def _refused_by_all(self) -> int:
        """A version that the run can't go on without and that every engine has refused; -1: none."""
        phase = self.phase
        needed = self.evaluating[1] if self.evaluating else -1
        if needed < 0 and phase is not None and not phase.from_expert:
            needed = self._base_version(phase)
        return needed if self.nodes and all(needed in node.refused for node in self.nodes.values()) else -1

    # -- restoring --

    def _reopen(self, key: str) -> None:
        """Queue a trajectory; one that an earlier life began goes on as its next attempt, unless a host claims it."""
        row = self.open[key]
        attempt = self._restored.attempts.get(key, 0)
        if attempt:
            row.ticket = replace(row.ticket, attempt=attempt)
            row.claim_until, row.begun = self._claim_until, True
        self.pending.append(key)

    def _restore_groups(self) -> None:
        phase = self.phase
        if phase is None:
            return
        for number in range(self._restored.num_groups.get(phase.name, 0)):
            index = self.config.phase.index(phase)
            if f"{self.tasks.train(index, number).id}.p{index}n{number}" in self._restored.groups_done:
                continue
            for key in self._open_group(phase, number):
                ended = self._restored.ended.get(key)
                if ended is None:
                    self._reopen(key)
                    continue
                del self.open[key]
                self.backlog += self._count_end(ended)
