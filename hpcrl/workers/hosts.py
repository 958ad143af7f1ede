"""Hosts: processes that run agent loops, a few hundred each. A Dask task only attaches to its loop."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import math
import os
import threading
import time
from collections import deque
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import asdict
from typing import Any, Protocol

from hpcrl.config import Config
from hpcrl.layout import RunPaths
from hpcrl.node import CLOSING_S
from hpcrl.rollout.caps import load_cap
from hpcrl.rollout.loop import History, Loop, Where, history_of, unbegun
from hpcrl.rollout.render import Renderer
from hpcrl.rollout.scripted import ScriptedEngine
from hpcrl.store.index import Store
from hpcrl.store.link import LogClient
from hpcrl.types import (
    Cause,
    Ended,
    Engine,
    Environment,
    EnvironmentFamily,
    Fault,
    Receipt,
    State,
    Ticket,
)
from hpcrl.workers.guest import TOPIC, Guest, ahead, security
from hpcrl.workers.sandboxes import Line, NoSandbox, RemoteSandbox

logger = logging.getLogger(__name__)

EVENT_S = 0.02  # least time between two event messages of a worker
TELL_S = 2.0  # for the supervisor to hear of it


class Supervisor(Protocol):
    """What a host asks of its node's supervisor."""

    async def call(self, method: str, **arguments: Any) -> Any: ...


class Busy:
    """Measures for what share of the time at least one request was in an engine."""

    def __init__(self, engine: Engine) -> None:
        self._engine = engine
        self._running = 0
        self._since = 0.0
        self.busy_s = 0.0
        self.tokens = 0

    async def generate(self, *args: Any, **kwargs: Any) -> Any:
        if not self._running:
            self._since = time.monotonic()
        self._running += 1
        try:
            generation = await self._engine.generate(*args, **kwargs)
            self.tokens += len(generation.ids)
            return generation
        finally:
            self._running -= 1
            if not self._running:
                self.busy_s += time.monotonic() - self._since

    def total_s(self) -> float:
        return self.busy_s + (time.monotonic() - self._since if self._running else 0.0)

    @property
    def running(self) -> int:
        return self._running

    async def stats(self) -> Any:
        return await self._engine.stats()

    async def close(self) -> None:
        await self._engine.close()


class Host:
    """Runs agent loops. Loops belong to it; the Dask task of a trajectory only attaches to its loop."""

    def __init__(
        self,
        paths: RunPaths,
        config: Config,
        *,
        where: Where,
        concurrent: int,
        family: EnvironmentFamily,
        renderer: Renderer,
        log: LogClient,
        engines: Sequence[Engine],
        supervisor: Supervisor,
        ends: float = math.inf,
    ) -> None:
        """`ends`: when this node's allocation does, in seconds since the epoch."""
        self._paths, self._config, self._where, self._concurrent = paths, config, where, concurrent
        self._slots = asyncio.Semaphore(concurrent)
        self._family, self._renderer, self._log, self._supervisor = family, renderer, log, supervisor
        self._cap = load_cap(config.tools)
        self._engines = [Busy(engine) for engine in engines]
        self._security = security(paths)
        self._lines: dict[str, Line] = {}
        self._loops: dict[str, tuple[Ticket, Loop, asyncio.Task[Ended]]] = {}
        self._store: Store | None = None  # made when first needed
        self._reading = threading.Lock()  # of the store, which isn't thread-safe
        self._beginning = asyncio.Lock()
        self._receipts: list[Receipt] = []
        self._took: deque[float] = deque(maxlen=512)  # seconds of the latest steps
        self._incarnation = 0
        self._ends = ends
        self._leaving = False
        self.beat = time.monotonic()  # when its event loop last came round
        self.guest: Guest | None = None

    # -- tickets --

    async def attach(self, ticket: Ticket) -> dict[str, Any]:
        """Run this attempt, or wait for the loop that already does, and say how it ended.

        Raises ValueError for a ticket of a lower attempt or of a lower control than this host has seen.
        """
        if ticket.incarnation < self._incarnation:
            raise ValueError(f"{ticket.trajectory}: granted by control {ticket.incarnation}, now {self._incarnation}")
        self._incarnation = ticket.incarnation
        async with self._beginning:  # else two askers could each begin one
            held = self._loops.get(ticket.trajectory)
            if held is not None and held[0].attempt > ticket.attempt:
                raise ValueError(f"{ticket.trajectory}: attempt {ticket.attempt} came after {held[0].attempt}")
            if held is not None and held[0].attempt < ticket.attempt:
                await self._end_loop(ticket.trajectory)
                held = None
            task = held[2] if held is not None else await self._begin(ticket)
        try:
            ended = await asyncio.shield(task)
        except asyncio.CancelledError:
            if task.cancelled():  # parked or abandoned, not our own waiting that was cut off
                raise ValueError(f"{ticket.trajectory}: attempt {ticket.attempt} was let go") from None
            raise
        if self._loops.get(ticket.trajectory, (None, None, None))[2] is task:
            del self._loops[ticket.trajectory]
        return ended.to_json()

    async def _begin(self, ticket: Ticket) -> asyncio.Future[Ended]:
        if self._leaving:
            return _already(unbegun(ticket, None))
        history: History | None = None
        environment: Environment | None = None
        if ticket.verdict is None:
            if ticket.adopt:
                history = await asyncio.to_thread(self._adopted, ticket.trajectory, ticket.adopt)
            try:
                environment = self._family.make(ticket.task, ticket.seed)
            except Exception as error:  # the environment's own code
                text = f"{type(error).__name__}: {error}"
                fault = Fault(cause=Cause.ENVIRONMENT, where=f"{ticket.task.environment}.make", message=text)
                return _already(unbegun(ticket, fault))
        if ticket.kind == "expert":
            engine: Engine = ScriptedEngine(self._expert(ticket), self._renderer)
        else:
            engine = min(self._engines, key=lambda engine: engine.running)
        sandbox = self._sandbox(ticket)
        loop = Loop(
            ticket, engine=engine, environment=environment, sandbox=sandbox, log=self._log, renderer=self._renderer,
            where=self._where, history=history, cap=self._cap, slot=self._slots, on_receipt=self._receipts.append,
            on_step=self._took.append,
        )  # fmt: skip
        task = asyncio.create_task(self._run(loop, sandbox), name=ticket.trajectory)
        self._loops[ticket.trajectory] = (ticket, loop, task)
        return task

    async def _run(self, loop: Loop, sandbox: RemoteSandbox | NoSandbox) -> Ended:
        try:
            return await loop.run()
        finally:
            with contextlib.suppress(asyncio.CancelledError):
                await asyncio.shield(sandbox.release())

    def _expert(self, ticket: Ticket) -> Callable[[str], str]:
        return lambda transcript: self._family.expert(ticket.task, transcript, ticket.seed)

    def _sandbox(self, ticket: Ticket) -> RemoteSandbox | NoSandbox:
        if not ticket.sandbox:
            return NoSandbox()
        line = self._lines.get(ticket.sandbox)
        if line is None:
            line = self._lines[ticket.sandbox] = Line(ticket.sandbox, self._security)
        return RemoteSandbox(line, ticket.trajectory, ticket.attempt)

    def _adopted(self, trajectory: str, head: str) -> History:
        """In a thread: it may read much, and the other loops go on."""
        with self._reading:
            if self._store is None:
                self._store = Store(self._paths, open_segments=True)
            else:
                self._store.refresh(anew=True)
            return history_of(self._store, trajectory, head)

    async def _end_loop(self, trajectory: str, *, cancelled: bool = False) -> None:
        held = self._loops.pop(trajectory, None)
        if held is None:
            return
        _, loop, task = held
        task.cancel()
        await asyncio.wait({task})
        if cancelled and task.cancelled():
            loop.cancelled()

    # -- calls of the driver --

    async def call(self, method: str, arguments: Mapping[str, Any]) -> Any:
        match method:
            case "describe":
                self._incarnation = max(self._incarnation, arguments["incarnation"])
                return {
                    "role": "host",
                    "node": self._where.node,
                    "capacity": 0 if self._leaving else ahead(self._concurrent),
                    "held": [(key, ticket.attempt, ticket.sandbox) for key, (ticket, _, _) in self._loops.items()],
                }
            case "stats":
                return self.stats()
            case "abandon":
                held = self._loops.get(arguments["trajectory"])
                if held is not None and held[0].attempt <= arguments["attempt"]:
                    await self._end_loop(arguments["trajectory"], cancelled=arguments["cancelled"])
                return None
            case "park":
                await self.park()
                return None
            case "supervisor":
                return await self._supervisor.call(**arguments)
        raise ValueError(f"a host has no method {method!r}")

    async def park(self) -> None:
        """End every loop at what is stored; the trajectories stay open, to be continued."""
        await asyncio.gather(*(self._end_loop(trajectory) for trajectory in list(self._loops)))
        await self._log.flush()

    async def leave(self) -> None:
        """Begin nothing more, let every loop end at its next step boundary; returns when control has heard of them."""
        self._leaving = True
        for _, loop, _ in self._loops.values():
            loop.leaving = True
        assert self.guest is not None
        while self._loops or self.guest.has_tasks():  # noqa: ASYNC110 (many, each waited for where it was attached)
            await asyncio.sleep(0.1)

    def stats(self) -> dict[str, Any]:
        loops = [loop for _, loop, _ in self._loops.values()]
        return {
            "running": sum(loop.state is State.RUNNING for loop in loops),
            "waiting": sum(loop.state is State.WAITING_TOOL for loop in loops),
            "tokens": sum(engine.tokens for engine in self._engines),
            "busy_s": sum(engine.total_s() for engine in self._engines) / max(1, len(self._engines)),
            "leaves_s": leaves_s(self._took),
            "mono": time.monotonic(),
        }

    async def announce(self) -> None:
        """Stream receipts to the driver: hints for speed, so what a missing scheduler can't take is dropped. Tell the
        supervisor which engines have requests of ours, when that has changed; and when it's time to leave."""
        told = [False] * len(self._engines)
        asked = False
        while True:
            await asyncio.sleep(EVENT_S)
            self.beat = time.monotonic()
            if self._receipts:
                rows, self._receipts[:] = [asdict(receipt) for receipt in self._receipts], []
                worker = self.guest.worker if self.guest else None
                if worker is not None:
                    with contextlib.suppress(Exception):
                        worker.log_event(TOPIC, rows)
            busy = [engine.running > 0 for engine in self._engines]
            if busy != told:
                with contextlib.suppress(OSError, TimeoutError):
                    async with asyncio.timeout(TELL_S):
                        await self._supervisor.call("busy", host=os.getpid(), engines=busy)
                    told = busy
            left_s = self._ends - time.time()
            near = left_s < CLOSING_S + max(self._took, default=0.0)  # else there's no need to sort
            if not asked and not self._leaving and near and left_s < leaves_s(self._took):
                with contextlib.suppress(OSError, TimeoutError):
                    async with asyncio.timeout(TELL_S):
                        await self._supervisor.call("leave")
                    asked = True

    async def close(self) -> None:
        await self.park()
        for line in self._lines.values():
            line.close()
        for engine in self._engines:
            await engine.close()


def leaves_s(took: Collection[float]) -> float:
    """What must remain of an allocation, in seconds: what nearly every step takes (the 95th percentile of `took`), and
    saving it."""
    return CLOSING_S + (sorted(took)[int(0.95 * len(took))] if took else 0.0)


def _already(ended: Ended) -> asyncio.Future[Ended]:
    future: asyncio.Future[Ended] = asyncio.get_running_loop().create_future()
    future.set_result(ended)
    return future


_HOSTS: list[Host] = []  # this process's host, for the Dask task below


def serve(host: Host) -> None:
    """Make `host` the one that this process's Dask tasks attach to."""
    _HOSTS[:] = [host]


async def run_ticket(ticket: Ticket) -> dict[str, Any]:
    """The Dask task of one attempt of a trajectory: attaches to its loop, returns `Ended` as JSON."""
    (host,) = _HOSTS
    return await host.attach(ticket)
