"""The nouns of hpcrl: plain frozen data that the rooms hand to each other, and the protocols of the seams.

Read this file first. Words have the one meaning that the glossary in docs/words.md gives them. Nothing here does I/O.

    Task -> Ticket -> (act, observe)* -> Ended -> Entry -> Sequence_
"""

from __future__ import annotations

import enum
import hashlib
import json
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from typing import Any, Literal, Protocol, runtime_checkable

import numpy as np
from numpy.typing import NDArray

Int32Array = NDArray[np.int32]
Float32Array = NDArray[np.float32]
BoolArray = NDArray[np.bool_]

TrajectoryKind = Literal["train", "eval", "expert", "user"]


class HpcrlError(ValueError):
    """What a user can fix: names the key or file, what was found, what is allowed. The CLI exits with 2.

    HpcrlError (ValueError)
    ├── ConfigError     a key, a value, an option
    ├── StoreError      a file of a run folder that is damaged, missing or newer than this reader
    ├── SandboxError    no isolation to be had here
    └── EngineError     an engine that can't be started or can't do what is asked
    """


class ConfigError(HpcrlError):
    pass


class StoreError(HpcrlError):
    pass


class SandboxError(HpcrlError):
    pass


class EngineError(HpcrlError):
    pass


def is_number(text: str) -> bool:
    """Whether it is a number in ASCII digits that fits an int64. `str.isdigit` takes "²" and "٣" for digits as well.

    >>> is_number("007"), is_number("²"), is_number("-1"), is_number(""), is_number("1" + 18 * "0")
    (True, False, False, False, False)
    """
    return text.isascii() and text.isdecimal() and len(text) <= 18


class Cause(enum.StrEnum):
    """Whose failure it was. Only POLICY failures say anything about the policy."""

    POLICY = "policy"
    ENVIRONMENT = "environment"
    TOOL = "tool"
    REWARD = "reward"
    ENGINE = "engine"
    PLATFORM = "platform"
    CANCELLED = "cancelled"


class State(enum.StrEnum):
    """A trajectory's states; the last four are terminal (RETRYING is PENDING with a higher attempt to come)."""

    PENDING = "PENDING"
    RUNNING = "RUNNING"
    WAITING_TOOL = "WAITING_TOOL"
    SCORING = "SCORING"
    RETRYING = "RETRYING"
    COMPLETED = "COMPLETED"
    TRUNCATED = "TRUNCATED"
    FAILED = "FAILED"
    CANCELLED = "CANCELLED"

    @property
    def terminal(self) -> bool:
        return self in (State.COMPLETED, State.TRUNCATED, State.FAILED, State.CANCELLED)


@dataclass(frozen=True, slots=True, kw_only=True)
class Fault:
    cause: Cause
    where: str  # the part that failed: "sandbox", "engine", "host n1-0"
    message: str

    @classmethod
    def from_json(cls, row: Mapping[str, str] | None) -> Fault | None:
        return None if row is None else cls(cause=Cause(row["cause"]), where=row["where"], message=row["message"])


@dataclass(frozen=True, slots=True, kw_only=True)
class Part:
    """One piece of a message: text, or the bytes of a medium, which the store holds once and names by their SHA-256."""

    type: Literal["text", "image", "audio", "video"] = "text"
    text: str = ""
    media: bytes = b""
    unseen_bytes: int = 0  # these four: as of a ToolResult, where the part was cut without one
    cut_reason: str = ""
    unseen_hash: str = ""
    content: str = ""


@dataclass(frozen=True, slots=True, kw_only=True)
class Message:
    role: str  # "system", "user", "assistant", "tool"
    parts: tuple[Part, ...]

    @classmethod
    def of(cls, role: str, text: str) -> Message:
        return cls(role=role, parts=(Part(text=text),))

    @property
    def text(self) -> str:
        return "".join(part.text for part in self.parts)


@dataclass(frozen=True, slots=True, kw_only=True)
class ToolSpec:
    name: str
    description: str = ""
    # pure: may be run again blindly. keyed: asks by its idempotency key. effect: outcome unknown after a crash.
    effects: Literal["pure", "keyed", "effect"] = "pure"
    schema: Mapping[str, Any] = field(default_factory=dict)


@dataclass(frozen=True, slots=True, kw_only=True)
class ToolCall:
    name: str
    arguments: Mapping[str, Any]
    key: str = ""  # idempotency key: trajectory/step/index
    legal: bool = True  # judged against the tools offered at this step; False also for what could not be parsed
    effects: Literal["pure", "keyed", "effect"] = "pure"


@dataclass(frozen=True, slots=True, kw_only=True)
class ToolResult:
    name: str
    status: Literal["ok", "error", "timeout", "refused"]
    text: str
    duration_s: float = 0.0
    unseen_bytes: int = 0  # what a cap removed before the model could see it
    cut_reason: str = ""
    unseen_hash: str = ""  # SHA-256
    content: str = ""  # the same of the whole output, where the store has it


@dataclass(frozen=True, slots=True, kw_only=True)
class Task:
    """A problem for the agent. `id` is environment + content hash, so equal content is one task everywhere."""

    environment: str
    payload: Mapping[str, Any]  # JSON
    kind: str = ""  # the environment's own sub-kind, for strata and reports

    @property
    def id(self) -> str:
        text = json.dumps(dict(self.payload), sort_keys=True, separators=(",", ":"), ensure_ascii=False)
        return f"{self.environment}-{hashlib.sha256(text.encode(errors='surrogatepass')).hexdigest()[:12]}"


@dataclass(frozen=True, slots=True, kw_only=True)
class Sampling:
    temperature: float
    max_tokens: int  # per step
    seed: int | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class Ticket:
    """Leave to run one attempt of one trajectory: everything a host must know, small enough for a Dask task.

    Ids are deterministic: group = "<task>.<counter>", trajectory = "<group>.<member>".
    """

    trajectory: str
    attempt: int  # 1, 2, …
    kind: TrajectoryKind
    task: Task
    group: str
    member: int
    phase: str  # the [[phase]] that it serves
    seed: int
    sampling: Sampling
    max_steps: int
    max_context: int  # tokens
    deadline_s: float  # seconds that remain when the ticket is taken
    incarnation: int  # of the control that granted it
    sandbox: str = ""  # address of the sandbox node that serves it; "" where the environment needs none
    pinned: int = -1  # version that an evaluation is about
    verdict: Fault | None = None  # flow has given up: only record the end
    adopt: str = ""  # hash of the record that this attempt continues; "" for a first attempt


@dataclass(frozen=True, slots=True, kw_only=True)
class Span:
    """Tokens [start, stop) of a generation were sampled by `version`."""

    version: int
    start: int
    stop: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Generation:
    """What an engine answers: one request's sampled tokens."""

    ids: Int32Array  # [T]
    logprobs: Float32Array  # [T], natural log, of the sampled token, at the sampling temperature
    spans: tuple[Span, ...]  # cover [0, T)
    finish_reason: Literal["stop", "length"]
    cached_tokens: int = 0
    queue_s: float = 0.0
    duration_s: float = 0.0


@dataclass(frozen=True, slots=True, kw_only=True)
class Receipt:
    """The acknowledgement of a durable record: a pointer into the store, never the payload."""

    trajectory: str
    attempt: int
    step: int
    kind: str  # record kind, see hpcrl.store.records
    hash: str  # of the record (hex, 32 characters)
    node: str
    segment: int  # number of the node's segment
    offset: int  # bytes from the segment's start


@dataclass(frozen=True, slots=True, kw_only=True)
class Ended:
    """What a host reports of an attempt that ended; the whole is in the store."""

    trajectory: str
    attempt: int
    kind: TrajectoryKind
    group: str
    phase: str
    status: State
    head: str  # hash of the terminal record
    rewards: Mapping[str, float]  # by source; empty where there is none
    num_steps: int
    num_sampled: int  # tokens that the policy sampled
    num_tokens: int  # context length at the end
    min_version: int
    max_version: int
    duration_s: float
    num_calls: int = 0
    num_valid_calls: int = 0
    fault: Fault | None = None  # None with status RETRYING: it moved, as its host is about to leave

    def to_json(self) -> dict[str, Any]:
        return asdict(self)

    @classmethod
    def from_json(cls, row: Mapping[str, Any]) -> Ended:
        """From what `to_json` gave; keys that are no field are left out, so an END record's meta will do."""
        values = {key: value for key, value in row.items() if key in cls.__dataclass_fields__}
        return cls(**{**values, "status": State(values["status"]), "fault": Fault.from_json(values["fault"])})


@dataclass(frozen=True, slots=True, kw_only=True)
class Entry:
    """A line of the ledger: one scored trajectory for the learner, in the order that it may take them."""

    trajectory: str
    attempt: int
    head: str
    group: str
    phase: str
    reward: float
    num_tokens: int
    num_sampled: int
    num_steps: int
    min_version: int
    group_size: int  # members of the group that are in the ledger: those lost to faults are not


@dataclass(frozen=True, slots=True, kw_only=True)
class Sequence_:
    """One trajectory as training data (the chain, root to head)."""

    trajectory: str
    ids: Int32Array  # [T]
    logprobs: Float32Array  # [T], behaviour logprob; 0 where not sampled
    sampled: BoolArray  # [T], True where the policy sampled the token (the loss mask)
    versions: Int32Array  # [T], version that sampled it; -1 where not sampled
    steps: Int32Array  # [T], step that added it; -1 for the root prompt
    reward: float


@dataclass(frozen=True, slots=True, kw_only=True)
class StepOutcome:
    """What an environment makes of an act."""

    results: tuple[ToolResult, ...]
    messages: tuple[Message, ...]  # appended to the context; may be empty when `done`
    done: bool
    truncated: str = ""  # reason, when the environment cuts the trajectory short
    fault: Fault | None = None
    context: tuple[Message, ...] | None = None  # takes the place of all before `messages`: a compacted context


@dataclass(frozen=True, slots=True, kw_only=True)
class EngineStats:
    running: int
    waiting: int
    kv_share: float
    version: int


# ---- the seams --------------------------------------------------------------------------------------------------


@runtime_checkable
class Engine(Protocol):
    """Token ids in, token ids and logprobs out."""

    async def generate(self, ids: Int32Array, sampling: Sampling, *, request: str) -> Generation: ...

    async def stats(self) -> EngineStats: ...

    async def close(self) -> None: ...


@dataclass(frozen=True, slots=True, kw_only=True)
class CommandResult:
    code: int | None  # exit status; None when killed
    stdout: bytes
    stderr: bytes
    duration_s: float
    killed: Literal["", "timeout", "memory", "output", "processes"] = ""
    stdout_bytes: int = 0  # true size, before the cap
    stderr_bytes: int = 0


@runtime_checkable
class Sandbox(Protocol):
    """A place of its own for one trajectory. Paths are relative to its work folder."""

    async def run(
        self, command: Sequence[str], *, stdin: bytes = b"", timeout_s: float = 30.0, cap_bytes: int = 65536
    ) -> CommandResult: ...

    async def write(self, files: Mapping[str, bytes]) -> None: ...

    async def read(self, path: str, *, cap_bytes: int = 1 << 20) -> bytes: ...

    async def renew(self) -> None:
        """Put another in its place, in which nothing has run and nothing is written."""


class Environment(Protocol):
    """One object per trajectory, living in the host. All effects go through the sandbox and the tools."""

    def __init__(self, task: Task, seed: int) -> None: ...

    def tools(self) -> tuple[ToolSpec, ...]:
        """The tools offered at the coming step."""

    async def reset(self, sandbox: Sandbox) -> tuple[Message, ...]:
        """Prepare the world; the messages that open the context."""

    def parse(self, text: str) -> tuple[ToolCall, ...]:
        """The calls in an act's text; what can't be parsed becomes a call with `legal=False`. No effects."""

    async def step(self, calls: Sequence[ToolCall], sandbox: Sandbox) -> StepOutcome: ...

    async def rewards(self, sandbox: Sandbox) -> Mapping[str, float]:
        """Reward by source, once the trajectory ended. 1.0 of the source "outcome" is success.

        The sandbox is the agent's, with all that it left there to deceive: take from it what is to be judged, and
        `renew` it before anything of it is run.
        """

    def state(self) -> bytes: ...

    def restore(self, state: bytes) -> None: ...


class EnvironmentFamily(Protocol):
    """What an entry point of the group `hpcrl.environments` names: a module or object with these."""

    name: str
    needs_sandbox: bool

    def tasks(self, split: Literal["train", "heldout"], seed: int) -> Iterator[Task]:
        """An endless (train) or long, finite (heldout) stream, the same for the same seed; splits share no task."""

    def make(self, task: Task, seed: int) -> Environment: ...

    def expert(self, task: Task, transcript: str, seed: int) -> str:
        """A scripted policy's next act, for `kind = expert` (deliberately imperfect where a test says so)."""
