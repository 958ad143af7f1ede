"""The agent loop: one coroutine per trajectory, from its ticket to its end, every step a record before it counts.

    adopt -> prompt -> ( generate -> act -> tools -> observe )* -> rewards -> end

Knows an engine, an environment, a sandbox and a log; nothing of Dask or of who asked. An `act` is handed to the log
before its calls run, and awaited there when a call's effects leave the sandbox; commits never hold up the next
generation, and a trajectory has ended only when all its records are durable.

Over 400 lines, since the loop and the records that it writes are one thing: what is recorded is what can be resumed.
"""

from __future__ import annotations

import asyncio
import base64
import contextlib
import dataclasses
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractAsyncContextManager
from dataclasses import dataclass
from hashlib import sha256
from typing import Any, Protocol

import numpy as np

from hpcrl.layout import is_full
from hpcrl.rollout.caps import Cap
from hpcrl.rollout.engine import EngineFault
from hpcrl.rollout.render import Renderer
from hpcrl.store.index import Store
from hpcrl.store.records import Kind, Record, content, prompt
from hpcrl.types import (
    Cause,
    Ended,
    Engine,
    Environment,
    Fault,
    Generation,
    Int32Array,
    Message,
    Part,
    Receipt,
    Sandbox,
    State,
    StepOutcome,
    Ticket,
    ToolCall,
    ToolResult,
    ToolSpec,
)

DISK = "disk"  # `where` of the fault of a disk or quota that is used up
MAX_REWARD = 1e6
REWARD_S = 600.0  # that scoring may take
UNKNOWN = "outcome unknown: the call may or may not have happened"


class Log(Protocol):
    """What the loop needs of the node's log (`hpcrl.store.link.LogClient`)."""

    def append(self, record: Record) -> asyncio.Future[Receipt]: ...

    async def settle(self) -> None: ...


@dataclass(frozen=True, slots=True, kw_only=True)
class Where:
    """The place that a loop runs at, as its records name it."""

    node: str
    job: str
    boot_id: str


@dataclass(frozen=True, slots=True, kw_only=True)
class History:
    """What an earlier attempt left: the chain, root to head, and the context that it makes, [T]."""

    chain: Sequence[Record]
    context: Int32Array
    unsettled: Sequence[Record] = ()  # of these: what its log may yet lose; stored once more, equal records count once


class AttemptFault(Exception):
    """Ends an attempt with a labelled cause."""

    def __init__(self, fault: Fault) -> None:
        super().__init__(fault.message)
        self.fault = fault


class Loop:
    """One attempt. `state` may be read by others while it runs; `run` returns how it ended and does not raise
    but for cancellation."""

    def __init__(
        self,
        ticket: Ticket,
        *,
        engine: Engine,
        environment: Environment | None,  # None only where the ticket's verdict is all that is to be recorded
        sandbox: Sandbox,
        log: Log,
        renderer: Renderer,
        where: Where,
        history: History | None = None,
        cap: Cap | None = None,
        slot: AbstractAsyncContextManager[Any] | None = None,
        on_receipt: Callable[[Receipt], None] = lambda receipt: None,
        on_step: Callable[[float], None] = lambda seconds: None,
    ) -> None:
        """`slot`: held while it uses engine and tools, which bounds how many do; not while its end becomes durable."""
        self.ticket = ticket
        self.state = State.PENDING
        self.leaving = False  # set from outside: end at the next step boundary, to go on elsewhere
        self._slot = slot or contextlib.nullcontext()
        self._engine, self._sandbox = engine, sandbox
        self._world, self._cap = environment, cap
        self._log, self._renderer, self._where, self._history = log, renderer, where, history
        self._on_receipt, self._on_step = on_receipt, on_step
        self._parent = ticket.adopt
        self._root: dict[str, Any] = {"root": ""}  # what the next act says of a context that begins with it
        self._commits: set[asyncio.Future[Receipt]] = set()
        self._context: list[Int32Array] = []
        self._num_tokens = self._num_sampled = self._num_steps = 0
        self._num_calls = self._num_valid_calls = 0
        self._versions: list[int] = []
        self._offered: tuple[ToolSpec, ...] | None = None
        self._began = time.monotonic()
        self._waited_s = 0.0  # of it, for tools

    @property
    def _environment(self) -> Environment:
        assert self._world is not None
        return self._world

    async def run(self) -> Ended:
        """Raises CancelledError alone: when the host parks (the chain stays open) or abandons the trajectory."""
        fault: Fault | None = None
        status = State.RETRYING
        try:
            self._adopt()
            if self.ticket.verdict is not None:
                status, fault = State.FAILED, self.ticket.verdict
            else:
                async with self._slot, asyncio.timeout(self.ticket.deadline_s):
                    status, fault = await self._steps()
        except TimeoutError:
            # The clock ran out between or within steps; what is stored stays, and counts as cut short.
            status = State.TRUNCATED
            fault = Fault(cause=Cause.ENVIRONMENT, where="deadline", message=f"over {self.ticket.deadline_s:g} s")
        except AttemptFault as error:
            fault = error.fault
        except EngineFault as error:
            fault = error.fault
        except Exception as error:  # ours or the node's: nothing that the policy did
            fault = self._platform(error)
        return await self._end(status, fault)

    # -- the loop --

    async def _steps(self) -> tuple[State, Fault | None]:
        if self._history and (done := await self._resume(self._history)) is not None:
            return done
        if not self._context and not self.leaving:
            await self._open()
        ticket = self.ticket
        while self._num_steps < ticket.max_steps:
            if self.leaving:
                return State.RETRYING, None
            began = time.monotonic()
            room = min(ticket.sampling.max_tokens, ticket.max_context - self._num_tokens)
            if room <= 0:
                return State.TRUNCATED, Fault(cause=Cause.POLICY, where="context", message="max_context reached")
            self.state = State.RUNNING
            sampling = dataclasses.replace(ticket.sampling, max_tokens=room, seed=ticket.seed + self._num_steps)
            request = f"{ticket.trajectory}/{ticket.attempt}/{self._num_steps}"
            generation = await self._engine.generate(self._whole(), sampling, request=request)
            versions = {span.version for span in generation.spans}
            if ticket.pinned >= 0 and versions - {ticket.pinned}:
                raise EngineFault(f"request {request}: tokens of version {max(versions)}, not of {ticket.pinned}")
            calls = self._calls(generation)
            self._act(generation, calls, request)
            if any(call.effects != "pure" for call in calls):
                await self._durable()
                await self._log.settle()  # whoever takes over must know of the call
            outcome = await self._step(calls)
            done = await self._observe(outcome, generation.finish_reason)
            self._on_step(time.monotonic() - began)
            if done is not None:
                return done
        return State.TRUNCATED, Fault(
            cause=Cause.POLICY, where="steps", message=f"max_steps ({ticket.max_steps}) reached"
        )

    async def _open(self) -> None:
        """Reset the world and put the opening messages into the context."""
        messages = await self._environmental("reset", self._environment.reset(self._sandbox))
        with self._guarded("reset"):
            ids = self._renderer.start(messages)
            self._root = {"contents": self._contents(messages), "root": self._begin(ids)}

    def _begin(self, ids: Int32Array) -> str:
        """Begin a context; the name of its root."""
        opening = prompt(ids)
        self._write(opening)
        self._context, self._num_tokens = [], 0
        self._add(ids)
        return opening.hash

    def _contents(self, messages: Sequence[Message]) -> list[str]:
        """Store the media of these messages; the names of all the contents that belong to them."""
        names = []
        for part in [part for message in messages for part in message.parts]:
            if part.media:
                self._write(content(part.media))
            names += [name for name in (_media(part), part.content) if name]
        return names

    async def _resume(self, history: History) -> tuple[State, Fault | None] | None:
        """Bring environment and sandbox back by running the recorded calls again, then go on after the last record."""
        chain = [record for record in history.chain if record.kind in (Kind.ACT, Kind.OBSERVE)]
        if not chain:
            return None  # it had not begun: open it
        await self._environmental("reset", self._environment.reset(self._sandbox))
        for index, record in enumerate(chain):
            if record.kind is not Kind.ACT:
                continue
            self._num_steps += 1
            self._num_sampled += len(record.ids)
            self._versions += [span["version"] for span in record.meta["spans"]]
            calls = tuple(ToolCall(**call) for call in record.meta["calls"])
            self._count(calls)
            observed = chain[index + 1] if index + 1 < len(chain) else None
            if observed is not None:
                if all(call.effects == "pure" for call in calls):  # others have happened, and are not done again
                    self._checked(await self._environmental("replay", self._environment.step(calls, self._sandbox)))
                self._environment.restore(base64.b64decode(observed.meta["state"]))
        self._add(history.context)
        last = chain[-1]
        if last.kind is Kind.OBSERVE:
            return self._verdict(last.meta["done"], last.meta["truncated"], Fault.from_json(last.meta["fault"]))
        calls = tuple(ToolCall(**call) for call in last.meta["calls"])
        if any(call.effects != "pure" for call in calls):
            results = tuple(ToolResult(name=call.name, status="error", text=UNKNOWN) for call in calls)
            fault = Fault(cause=Cause.PLATFORM, where="resume", message=UNKNOWN)
            outcome = StepOutcome(results=results, messages=(), done=True, truncated=UNKNOWN, fault=fault)
        else:
            outcome = await self._step(calls)
        return await self._observe(outcome, last.meta["finish_reason"])

    def _calls(self, generation: Generation) -> tuple[ToolCall, ...]:
        step = f"{self.ticket.trajectory}/{self._num_steps}"
        with self._guarded("tools"):
            effects = {tool.name: tool.effects for tool in self._environment.tools()}  # the tool's word, not the call's
        with self._guarded("parse"):
            calls = self._environment.parse(self._renderer.text(generation.ids))
            return tuple(
                dataclasses.replace(call, key=f"{step}/{index}", effects=effects.get(call.name, call.effects))
                for index, call in enumerate(calls)
            )
        raise AssertionError

    async def _step(self, calls: Sequence[ToolCall]) -> StepOutcome:
        self.state = State.WAITING_TOOL
        began = time.monotonic()
        outcome: StepOutcome = await self._environmental("step", self._environment.step(calls, self._sandbox))
        self._waited_s += time.monotonic() - began
        return self._checked(outcome)

    def _checked(self, outcome: StepOutcome) -> StepOutcome:
        """What isn't the policy's fault ends the attempt: an answer that rests on it says nothing of the policy."""
        if not isinstance(outcome, StepOutcome):
            raise self._broken("step", TypeError(f"returned {type(outcome).__name__}, not a StepOutcome"))
        if outcome.fault is not None and outcome.fault.cause is not Cause.POLICY:
            raise AttemptFault(outcome.fault)
        return outcome

    async def _environmental(self, what: str, awaitable: Any) -> Any:
        """The boundary around an environment's code: what it raises is its fault, unless it says whose it was."""
        with self._guarded(what):
            return await awaitable

    @contextlib.contextmanager
    def _guarded(self, what: str, cause: Cause = Cause.ENVIRONMENT) -> Iterator[None]:
        try:
            yield
        except (AttemptFault, EngineFault):
            raise
        except asyncio.CancelledError as error:
            me = asyncio.current_task()
            if me is None or me.cancelling():
                raise  # we are to end; else it is the environment's own doing
            raise self._broken(what, error, cause) from error
        except (Exception, SystemExit, KeyboardInterrupt) as error:
            raise self._broken(what, error, cause) from error

    def _broken(self, what: str, error: BaseException, cause: Cause = Cause.ENVIRONMENT) -> AttemptFault:
        where = f"{self.ticket.task.environment}.{what}" if cause is Cause.ENVIRONMENT else what
        return AttemptFault(Fault(cause=cause, where=where, message=f"{type(error).__name__}: {error}"))

    # -- the records --

    def _adopt(self) -> None:
        ticket = self.ticket
        for record in self._history.unsettled if self._history else ():
            self._write(record)
        meta = {
            "task": {
                "environment": ticket.task.environment, "payload": dict(ticket.task.payload), "kind": ticket.task.kind
            },
            "kind": ticket.kind, "group": ticket.group, "member": ticket.member, "phase": ticket.phase,
            "seed": ticket.seed, "sampling": dataclasses.asdict(ticket.sampling), "pinned": ticket.pinned,
            "job": self._where.job, "node": self._where.node, "incarnation": ticket.incarnation,
            "sandbox": ticket.sandbox, "boot_id": self._where.boot_id, "state": self._state(),
        }  # fmt: skip
        self._chain(Kind.ADOPT, -1, meta)

    def _act(self, generation: Generation, calls: Sequence[ToolCall], request: str) -> None:
        versions = np.full(len(generation.ids), -1, np.int32)
        for span in generation.spans:
            versions[span.start : span.stop] = span.version
        self._count(calls)
        self._versions += [span.version for span in generation.spans]
        self._num_sampled += len(generation.ids)
        meta = {
            **self._root,
            "tools": self._tools(),
            "calls": [dataclasses.asdict(call) for call in calls],
            "finish_reason": generation.finish_reason,
            "spans": [dataclasses.asdict(span) for span in generation.spans],
            "seed": self.ticket.seed + self._num_steps,
            "request": request,
            "cached_tokens": generation.cached_tokens,
            "queue_s": generation.queue_s,
            "duration_s": generation.duration_s,
        }
        sampled = np.ones(len(generation.ids), np.bool_)
        self._chain(
            Kind.ACT, self._num_steps, meta,
            ids=generation.ids, logprobs=generation.logprobs, versions=versions, sampled=sampled,
        )  # fmt: skip
        self._root = {"root": ""}
        self._add(generation.ids)
        self._num_steps += 1

    async def _observe(self, outcome: StepOutcome, finish_reason: str) -> tuple[State, Fault | None] | None:
        with self._guarded("step"):
            if self._cap is not None:
                outcome, wholes = await self._cap.apply(outcome, lambda: self._guarded("tools.cap", Cause.TOOL))
                for whole in wholes:
                    self._write(content(whole))
            over = outcome.done or bool(outcome.truncated)
            ids, root = np.empty(0, np.int32), ""
            if outcome.context is not None and not over:
                ids, root = self._replaced((*outcome.context, *outcome.messages))
            elif outcome.messages and not over:
                ids = self._renderer.extend(outcome.messages, after_stop=finish_reason == "stop")
            contents = self._contents((*(outcome.context or ()), *outcome.messages))
        meta = {
            **({"root": root} if root else {}),
            **({"contents": contents} if outcome.context and contents else {}),
            "parts": [_part(message.role, part) for message in outcome.messages for part in message.parts],
            "results": [_result(result, outcome.messages) for result in outcome.results],
            "state": self._state(),
            "fault": dataclasses.asdict(outcome.fault) if outcome.fault else None,
            "done": outcome.done,
            "truncated": outcome.truncated,
        }
        try:
            self._chain(Kind.OBSERVE, self._num_steps - 1, meta, ids=ids)
        except (TypeError, ValueError) as error:  # no JSON
            raise self._broken("step", error) from error
        self._add(ids)
        return self._verdict(outcome.done, outcome.truncated, outcome.fault)

    def _replaced(self, messages: Sequence[Message]) -> tuple[Int32Array, str]:
        """The environment has put `messages` in the context's place: the ids that this adds where it goes on from what
        was there, else its root."""
        before, ids = self._whole(), self._renderer.start(messages)
        if np.array_equal(ids[: len(before)], before):
            return ids[len(before) :], ""
        if len(ids) >= self.ticket.max_context:
            raise ValueError(f"its new context has {len(ids)} tokens, max_context is {self.ticket.max_context}")
        return np.empty(0, np.int32), self._begin(ids)

    @staticmethod
    def _verdict(done: bool, truncated: str, fault: Fault | None = None) -> tuple[State, Fault | None] | None:
        if truncated:
            fault = fault or Fault(cause=Cause.ENVIRONMENT, where="environment", message=truncated)
            return State.TRUNCATED, fault
        return (State.COMPLETED, fault) if done else None

    async def _end(self, status: State, fault: Fault | None) -> Ended:
        """The terminal record, or, when the trajectory is to be taken up again, a transition that says why."""
        rewards: Mapping[str, float] = {}
        self.state = State.SCORING
        if status in (State.COMPLETED, State.TRUNCATED):
            try:
                rewards = await self._rewards()
            except AttemptFault as error:  # the sandbox was lost: taken up again, it is scored in another
                status, fault = State.RETRYING, error.fault
            except Exception as error:
                status = State.FAILED
                fault = Fault(cause=Cause.REWARD, where="rewards", message=f"{type(error).__name__}: {error}")
        ended = self._ended(status, fault, rewards, head="")
        try:
            if status.terminal:
                row = ended.to_json()
                row.pop("head")
                ended = dataclasses.replace(ended, head=self._chain(Kind.END, -1, row))
                self._transition(status, fault)
            else:
                self._transition(State.RETRYING, fault)
            await self._durable()
        except OSError as error:
            # Not acknowledged, so it has not ended: the trajectory is taken up again from its last durable record.
            return self._ended(State.RETRYING, self._platform(error), {}, head="")
        self.state = status
        return ended

    async def _rewards(self) -> Mapping[str, float]:
        async with asyncio.timeout(REWARD_S):
            found = await self._environment.rewards(self._sandbox)
        rewards = {str(source): float(value) for source, value in found.items()}
        if not all(abs(value) <= MAX_REWARD for value in rewards.values()):
            raise ValueError(f"a reward is no number within ±{MAX_REWARD:g}: {rewards}")
        return rewards

    def _ended(self, status: State, fault: Fault | None, rewards: Mapping[str, float], head: str) -> Ended:
        ticket = self.ticket
        return Ended(
            trajectory=ticket.trajectory, attempt=ticket.attempt, kind=ticket.kind, group=ticket.group,
            phase=ticket.phase, status=status, head=head, rewards=dict(rewards), num_steps=self._num_steps,
            num_sampled=self._num_sampled, num_tokens=self._num_tokens,
            min_version=min(self._versions, default=-1), max_version=max(self._versions, default=-1),
            duration_s=time.monotonic() - self._began, num_calls=self._num_calls,
            num_valid_calls=self._num_valid_calls, fault=fault,
        )  # fmt: skip

    def cancelled(self) -> Ended:
        """Close an abandoned trajectory's chain (it is not awaited: nothing depends on it)."""
        fault = Fault(cause=Cause.CANCELLED, where="flow", message="no longer needed")
        ended = self._ended(State.CANCELLED, fault, {}, head="")
        row = ended.to_json()
        row.pop("head")
        return dataclasses.replace(ended, head=self._chain(Kind.END, -1, row))

    # -- helpers --

    def _chain(self, kind: Kind, step: int, meta: Mapping[str, Any], **arrays: Any) -> str:
        self._refuse_holes()
        record = Record(
            kind=kind, trajectory=self.ticket.trajectory, attempt=self.ticket.attempt, step=step, parent=self._parent,
            meta={**meta, "wall": time.time(), "mono": time.monotonic()}, **arrays,
        )  # fmt: skip
        self._write(record)
        self._parent = record.hash
        return record.hash

    def _transition(self, state: State, fault: Fault | None) -> None:
        meta = {
            "state": state.value,
            "fault": dataclasses.asdict(fault) if fault else None,
            "waited_s": self._waited_s,
            "wall": time.time(),
            "mono": time.monotonic(),
            "boot_id": self._where.boot_id,
        }
        ticket = self.ticket
        self._write(Record(kind=Kind.TRANSITION, trajectory=ticket.trajectory, attempt=ticket.attempt, meta=meta))

    def _write(self, record: Record) -> None:
        commit = self._log.append(record)
        self._commits.add(commit)
        commit.add_done_callback(self._committed)

    def _committed(self, commit: asyncio.Future[Receipt]) -> None:
        if not commit.cancelled() and commit.exception() is None:
            self._commits.discard(commit)
            self._on_receipt(commit.result())

    async def _durable(self) -> None:
        """Wait for every record so far. Raises OSError when one could not be made durable."""
        while self._commits:
            # Not gathered: a cancelled loop must not cancel a prompt's commit, which its siblings share.
            done, _ = await asyncio.wait(self._commits, return_when=asyncio.FIRST_EXCEPTION)
            for commit in done:
                commit.result()
                self._commits.discard(commit)

    def _refuse_holes(self) -> None:
        """Go no further than a record that could not be stored: nothing after it would count. Raises its OSError."""
        for commit in self._commits:
            if commit.done():
                commit.result()

    def _add(self, ids: Int32Array) -> None:
        self._context.append(ids)
        self._num_tokens += len(ids)

    def _whole(self) -> Int32Array:
        if len(self._context) > 1:
            self._context = [np.concatenate(self._context)]
        return self._context[0]

    def _tools(self) -> list[dict[str, Any]] | None:
        """The tools offered now, as JSON; None where they are those of the attempt's act before."""
        tools = self._environment.tools()
        if tools == self._offered:
            return None
        self._offered = tools
        return [dataclasses.asdict(tool) for tool in tools]

    def _count(self, calls: Sequence[ToolCall]) -> None:
        self._num_calls += len(calls)
        self._num_valid_calls += sum(call.legal for call in calls)

    def _platform(self, error: Exception) -> Fault:
        where = DISK if is_full(error) else self._where.node
        return Fault(cause=Cause.PLATFORM, where=where, message=f"{type(error).__name__}: {error}")

    def _state(self) -> str:
        if self._world is None:
            return ""
        try:
            return base64.b64encode(self._environment.state()).decode()
        except Exception as error:
            raise self._broken("state", error) from error


def _part(role: str, part: Part) -> dict[str, Any]:
    row = {**dataclasses.asdict(part), "media": _media(part)}
    return {"role": role, "type": part.type, "text": part.text, **{key: row[key] for key in row if row[key]}}


def _media(part: Part) -> str:
    return sha256(part.media).hexdigest() if part.media else ""


def _result(result: ToolResult, messages: Sequence[Message]) -> dict[str, Any]:
    """As it is stored: its text only where the model doesn't see it whole, for what it sees is stored anyhow."""
    row = dataclasses.asdict(result)
    if any(result.text in part.text for message in messages for part in message.parts):
        del row["text"]
    return row


def unbegun(ticket: Ticket, fault: Fault | None) -> Ended:
    """An attempt that came to nothing: there is no record of it. Without a fault its host is about to leave."""
    return Ended(
        trajectory=ticket.trajectory, attempt=ticket.attempt, kind=ticket.kind, group=ticket.group, phase=ticket.phase,
        status=State.RETRYING, head="", rewards={}, num_steps=0, num_sampled=0, num_tokens=0, min_version=-1,
        max_version=-1, duration_s=0.0, fault=fault,
    )  # fmt: skip


def history_of(store: Store, trajectory: str, head: str) -> History:
    """The stored chain that ends in `head`, to go on from. Raises StoreError when some of it is missing or damaged."""
    chain = store.chain(trajectory, head)
    begun = any(record.kind is Kind.ACT for record in chain)
    context = store.context(trajectory, head).ids if begun else np.empty(0, np.int32)
    return History(chain=chain, context=context, unsettled=store.unsettled(trajectory, head))
