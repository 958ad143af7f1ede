"""What flow hears and says: events, instructions, and what the run folder tells of a run's earlier life."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Protocol

from hpcrl.types import Ended, Entry, Task, Ticket


class Tasks(Protocol):
    """The run's tasks by number: the same number is the same task in every life of control."""

    def train(self, phase: int, number: int) -> Task: ...

    def heldout(self, number: int) -> Task: ...


# ---- events -----------------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True, kw_only=True)
class HostJoined:
    host: str  # address
    node: str
    capacity: int  # trajectories
    # (trajectory, attempt, sandbox node) that it runs, or has ended and not yet reported
    held: Sequence[tuple[str, int, str]]


@dataclass(frozen=True, slots=True, kw_only=True)
class HostLeft:
    host: str


@dataclass(frozen=True, slots=True, kw_only=True)
class SandboxJoined:
    sandbox: str  # address
    capacity: int


@dataclass(frozen=True, slots=True, kw_only=True)
class SandboxLeft:
    sandbox: str


@dataclass(frozen=True, slots=True, kw_only=True)
class EngineChanged:
    node: str
    ready: bool
    version: int


@dataclass(frozen=True, slots=True, kw_only=True)
class LogFull:
    """A node's log waits for space, or does no longer."""

    node: str
    full: bool


@dataclass(frozen=True, slots=True, kw_only=True)
class LoadDone:
    node: str
    version: int
    ok: bool
    refused: bool = False  # the version is not fit for this engine; else the engine failed, and may be asked again
    reached: bool = True  # False: nobody answered, so nothing is known


@dataclass(frozen=True, slots=True, kw_only=True)
class AttemptEnded:
    ended: Ended


@dataclass(frozen=True, slots=True, kw_only=True)
class AttemptLost:
    """The host went, or the Dask task that was attached to the loop failed."""

    trajectory: str
    attempt: int
    message: str


@dataclass(frozen=True, slots=True, kw_only=True)
class Published:
    version: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Updated:
    """The learner made an optimizer step."""

    phase: str
    phase_update: int  # updates of this phase done, this one included
    version: int  # published with it; -1: none
    num_trained: int  # trajectories of this phase trained so far, in the lineage of the weights that there are


@dataclass(frozen=True, slots=True, kw_only=True)
class Submitted:
    """A user asks for one trajectory beside the training; the ledger never sees it."""

    trajectory: str
    task: Task


@dataclass(frozen=True, slots=True, kw_only=True)
class StopAsked:
    reason: str


@dataclass(frozen=True, slots=True, kw_only=True)
class Tick:
    pass


Event = (
    HostJoined | HostLeft | SandboxJoined | SandboxLeft | EngineChanged | LogFull | LoadDone
    | AttemptEnded | AttemptLost | Published | Updated | Submitted | StopAsked | Tick
)  # fmt: skip


# ---- instructions -----------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True, kw_only=True)
class Start:
    ticket: Ticket
    host: str


@dataclass(frozen=True, slots=True, kw_only=True)
class Abandon:
    """The loop of this attempt, or an older one, is to end."""

    trajectory: str
    attempt: int
    host: str
    cancelled: bool = False  # the trajectory ends with it; else another attempt goes on, and this one says nothing


@dataclass(frozen=True, slots=True, kw_only=True)
class WriteLedger:
    entries: tuple[Entry, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class Load:
    node: str
    version: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Promote:
    version: int


@dataclass(frozen=True, slots=True, kw_only=True)
class RecordEvaluation:
    result: EvaluationResult


@dataclass(frozen=True, slots=True, kw_only=True)
class Finish:
    outcome: str  # "done" or why the run stopped


Instruction = Start | Abandon | WriteLedger | Load | Promote | RecordEvaluation | Finish


@dataclass(frozen=True, slots=True, kw_only=True)
class EvaluationResult:
    name: str
    version: int
    tasks: int  # scored
    successes: int
    reward: float  # mean
    failed: int  # lost to faults, in no score


@dataclass(slots=True)
class Counts:
    """Every admitted trajectory is counted exactly once: admitted = ended by status + open."""

    admitted: int = 0
    status: Counter[str] = field(default_factory=Counter)
    faults: Counter[str] = field(default_factory=Counter)
    steps: int = 0
    calls: int = 0
    valid_calls: int = 0

    def end(self, *, status: str, kind: str, num_steps: int, num_calls: int, num_valid_calls: int) -> None:
        self.status[status] += 1
        self.steps += num_steps
        if kind != "expert":
            self.calls += num_calls
            self.valid_calls += num_valid_calls


# ---- an earlier life ---------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True, kw_only=True)
class Restored:
    """What the run folder says of a run's earlier life."""

    ledgered: Mapping[str, int] = field(default_factory=dict)  # phase -> entries in the ledger
    units: Mapping[str, tuple[int, int]] = field(default_factory=dict)  # phase -> their steps and sampled tokens
    trained: Mapping[str, int] = field(default_factory=dict)  # phase -> trajectories trained
    updates: Mapping[str, int] = field(default_factory=dict)  # phase -> updates done
    versions: Mapping[str, int] = field(default_factory=dict)  # phase -> last version published in it
    newest: int = -1  # newest version published
    groups_done: frozenset[str] = frozenset()  # groups in the ledger
    ended: Mapping[str, Ended] = field(default_factory=dict)  # trajectory -> its end, for groups not in the ledger
    attempts: Mapping[str, int] = field(default_factory=dict)  # open trajectory -> highest attempt so far
    num_groups: Mapping[str, int] = field(default_factory=dict)  # phase -> groups ever opened
    evaluations: Mapping[str, EvaluationResult] = field(default_factory=dict)
    finished: frozenset[str] = frozenset()  # trajectories that users asked for and that have ended
    counts: Counts = field(default_factory=Counts)  # of trajectories that are done with
