"""What runs inside Dask workers: hosts of agent loops, sandbox nodes, and the lines between them.

The Dask worker is a guest in these processes: loops and sandboxes belong to the process, and the worker is made again
at the next scheduler's address when control was restarted.

    scheduler --task(ticket)--> host ==one multiplexed line per pair==> sandbox node
    driver --call(method)----> host, sandbox node        host --events--> scheduler
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import os
import time
from collections.abc import Awaitable, Callable, Mapping, Sequence
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any, Protocol

import dask
from distributed import Worker
from distributed.batched import BatchedSend
from distributed.comm import connect, listen
from distributed.comm.addressing import parse_host_port
from distributed.security import Security

from hpcrl.config import Config
from hpcrl.layout import RunPaths, read_json
from hpcrl.rollout.loop import AttemptFault, History, Loop, Where, history_of, unbegun
from hpcrl.rollout.render import Renderer
from hpcrl.rollout.scripted import ScriptedEngine
from hpcrl.sandbox.pool import Pool
from hpcrl.store.index import Store
from hpcrl.store.link import LogClient
from hpcrl.types import (
    Cause,
    CommandResult,
    ConfigError,
    Ended,
    Engine,
    Environment,
    EnvironmentFamily,
    Fault,
    Receipt,
    State,
    Ticket,
)

logger = logging.getLogger(__name__)

TOPIC = "hpcrl"  # one topic for all receipts: Dask never frees a topic
LINE_S = 0.002  # what gathers in that time goes between host and sandbox node as one message
EVENT_S = 0.02  # least time between two event messages of a worker

# Flow decides every retry, placement and cancellation; these take the decisions away from Dask.
DASK = {
    "distributed.scheduler.allowed-failures": 0,
    "distributed.scheduler.work-stealing": False,
    "distributed.scheduler.worker-saturation": "inf",
    "distributed.scheduler.active-memory-manager.start": False,
    "distributed.worker.daemon": False,
    "distributed.worker.memory.target": False,
    "distributed.worker.memory.spill": False,
    "distributed.worker.memory.pause": False,
    "distributed.worker.memory.terminate": False,
    "distributed.worker.profile.enabled": False,
    "distributed.comm.timeouts.connect": "10s",
    "distributed.comm.require-encryption": True,
    "distributed.admin.system-monitor.gil.enabled": False,
    "distributed.scheduler.worker-ttl": "5 minutes",
}


def configure_dask() -> None:
    dask.config.set(DASK)


def security(paths: RunPaths) -> Security:
    """Mutual TLS with the run's own certificate, by file."""
    return Security(
        require_encryption=True,
        **{
            f"tls_{key}": str(paths.tls / name)
            for key, name in (
                ("ca_file", "ca.pem"),
                ("scheduler_cert", "cert.pem"),
                ("scheduler_key", "key.pem"),
                ("worker_cert", "cert.pem"),
                ("worker_key", "key.pem"),
                ("client_cert", "cert.pem"),
                ("client_key", "key.pem"),
            )
        },
    )


# ---- the guest ----------------------------------------------------------------------------------------------------


class Guest:
    """Keeps a Dask worker of this process at whatever scheduler the run folder names, until `stop` is set."""

    def __init__(
        self,
        paths: RunPaths,
        config: Config,
        name: str,
        call: Callable[[str, Mapping[str, Any]], Awaitable[Any]],
        *,
        nthreads: int,
        local: Path,
    ) -> None:
        self._paths, self._config, self._name = paths, config, name
        self._call, self._nthreads, self._local = call, nthreads, local
        self.stop = asyncio.Event()
        self.worker: Worker | None = None

    async def serve(self) -> None:
        """Returns when `stop` is set, or when no control was there for `launch.control_timeout_s`."""
        last_seen = time.monotonic()
        while not self.stop.is_set():
            scheduler = read_json(self._paths.scheduler)
            if scheduler is None or not await _listens(scheduler["address"]):
                if time.monotonic() - last_seen > self._config.launch.control_timeout_s:
                    logger.warning("no control for %g s: this process ends", self._config.launch.control_timeout_s)
                    return
                await self._pause(0.25)
                continue
            try:
                worker = Worker(
                    scheduler["address"], nthreads=self._nthreads, name=f"{self._name}-{os.getpid()}",
                    security=security(self._paths), memory_limit=0, host="127.0.0.1", dashboard=False,
                    port=self._config.launch.ports.replace("-", ":"), local_directory=str(self._local),
                    death_timeout=15,
                )  # fmt: skip
                worker.handlers["hpcrl"] = self._handle
                async with worker:
                    self.worker = worker
                    last_seen = time.monotonic()
                    logger.info("joined control %s at %s", scheduler["incarnation"], scheduler["address"])
                    await self._until_left(worker)
                    last_seen = time.monotonic()
            except (
                TimeoutError,
                OSError,
                ValueError,
                RuntimeError,
            ) as error:  # RuntimeError: what Dask wraps others in
                logger.info("control at %s can't be joined: %s", scheduler["address"], error)
                await self._pause(0.5)
            finally:
                self.worker = None

    async def _until_left(self, worker: Worker) -> None:
        stopped = asyncio.create_task(self.stop.wait())
        finished = asyncio.create_task(worker.finished())
        try:
            await asyncio.wait({stopped, finished}, return_when=asyncio.FIRST_COMPLETED)
        finally:
            stopped.cancel()
            finished.cancel()

    async def _pause(self, seconds: float) -> None:
        with contextlib.suppress(asyncio.TimeoutError):
            await asyncio.wait_for(self.stop.wait(), seconds)

    async def _handle(self, method: str, arguments: Mapping[str, Any]) -> Any:
        return await self._call(method, arguments)


async def _listens(address: str) -> bool:
    """Whether anyone is there: a scheduler that was killed leaves its address behind."""
    host, port = parse_host_port(address.partition("://")[2])
    try:
        async with asyncio.timeout(2):
            _, writer = await asyncio.open_connection(host, port)
    except (OSError, TimeoutError):
        return False
    writer.close()
    return True


# ---- sandbox nodes ------------------------------------------------------------------------------------------------


class SandboxNode:
    """Serves a pool of sandboxes to hosts, over a listener of its own that outlives the Dask worker."""

    def __init__(self, paths: RunPaths, config: Config, pool: Pool, capacity: int) -> None:
        self._paths, self._config, self._pool, self._capacity = paths, config, pool, capacity
        self._listener: Any = None
        self.guest: Guest | None = None

    async def start(self) -> None:
        self._listener = await open_listener(self._config, security(self._paths), self._serve)

    async def call(self, method: str, arguments: Mapping[str, Any]) -> Any:
        match method:
            case "describe":
                return {"role": "sandbox", "address": self._listener.contact_address, "capacity": self._capacity}
            case "stop":
                assert self.guest is not None
                self.guest.stop.set()
                return None
        raise ValueError(f"a sandbox node has no method {method!r}")

    async def close(self) -> None:
        if self._listener is not None:
            stopping = self._listener.stop()
            if asyncio.iscoroutine(stopping):
                await stopping
        await self._pool.close()

    async def _serve(self, comm: Any) -> None:
        """One host's line: calls come in, each is served beside the others, answers go back in any order."""
        answers = BatchedSend(interval=LINE_S)
        answers.start(comm)
        calls: set[asyncio.Task[None]] = set()
        leases: set[tuple[str, int]] = set()
        try:
            while True:
                for message in await comm.read():
                    task = asyncio.create_task(self._answer(answers, leases, message))
                    calls.add(task)
                    task.add_done_callback(calls.discard)
        except OSError:
            pass  # the host went away; its trajectories are taken up by flow
        finally:
            for task in calls:
                task.cancel()
            answers.abort()
            for trajectory, attempt in leases:  # the host will not give them back
                await self._pool.release(trajectory, attempt)

    async def _answer(self, answers: Any, leases: set[tuple[str, int]], message: dict[str, Any]) -> None:
        try:
            value = await self._perform(leases, **message["call"])
            answer = {"id": message["id"], "value": value}
        except Exception as error:
            answer = {"id": message["id"], "error": f"{type(error).__name__}: {error}"}
        with contextlib.suppress(OSError):
            answers.send(answer)

    async def _perform(
        self,
        leases: set[tuple[str, int]],
        op: str,
        trajectory: str,
        attempt: int,
        first: bool = False,
        **arguments: Any,
    ) -> Any:
        if op == "release":
            leases.discard((trajectory, attempt))
            return await self._pool.release(trajectory, attempt)
        if first:
            await self._pool.acquire(trajectory, attempt)
            leases.add((trajectory, attempt))
        lease = self._pool.lease(trajectory, attempt)  # a lost one is never silently a fresh one
        match op:
            case "run":
                return asdict(await lease.run(**arguments))
            case "write":
                return await lease.write(**arguments)
            case "read":
                return await lease.read(**arguments)
        raise ValueError(f"a sandbox has no operation {op!r}")


async def open_listener(config: Config, secure: Security, serve: Callable[[Any], Awaitable[None]]) -> Any:
    """Listen with the run's TLS on the first free port of `launch.ports`. Raises ConfigError when none is free."""
    low, high = config.launch.port_range
    for port in range(low, high + 1):
        try:
            listener = listen(f"tls://127.0.0.1:{port}", serve, **secure.get_listen_args("worker"))
            await listener
        except OSError:
            continue
        return listener
    raise ConfigError(f"launch.ports: no free port in {config.launch.ports}; give a wider range")


class Line:
    """A host's one connection to a sandbox node; many calls share it."""

    def __init__(self, address: str, secure: Security) -> None:
        self._address, self._secure = address, secure
        self._calls: Any = None  # what sends them, several in one message
        self._opening = asyncio.Lock()
        self._waiting: dict[int, asyncio.Future[Any]] = {}
        self._reader: asyncio.Task[None] | None = None
        self._number = 0

    async def call(self, **call: Any) -> Any:
        """Raises AttemptFault: PLATFORM when the node can't be reached, ENVIRONMENT when the sandbox refuses."""
        try:
            async with self._opening:
                if self._calls is None or self._calls.closed():
                    await self._open()
            self._number += 1
            answer: asyncio.Future[Any] = asyncio.get_running_loop().create_future()
            self._waiting[self._number] = answer
            self._calls.send({"id": self._number, "call": call})
            message = await answer
        except OSError as error:
            text = f"sandbox node {self._address}: {error}"
            raise AttemptFault(Fault(cause=Cause.PLATFORM, where="sandbox", message=text)) from error
        if "error" in message:
            raise AttemptFault(Fault(cause=Cause.ENVIRONMENT, where="sandbox", message=message["error"]))
        return message["value"]

    async def _open(self) -> None:
        comm = await connect(self._address, timeout=5, **self._secure.get_connection_args("worker"))
        self._calls = BatchedSend(interval=LINE_S)
        self._calls.start(comm)
        self._reader = asyncio.create_task(self._read(comm))

    async def _read(self, comm: Any) -> None:
        error = ConnectionError("closed")
        try:
            while True:
                for message in await comm.read():
                    answer = self._waiting.pop(message["id"], None)
                    if answer is not None and not answer.done():
                        answer.set_result(message)
        except OSError as failure:
            error = ConnectionError(str(failure))
        finally:
            self._calls.abort()
            waiting, self._waiting = self._waiting, {}
            for answer in waiting.values():
                if not answer.done():
                    answer.set_exception(error)

    def close(self) -> None:
        if self._reader is not None:
            self._reader.cancel()
        if self._calls is not None:
            self._calls.abort()


class RemoteSandbox:
    """A trajectory's sandbox on another node (implements types.Sandbox); its first call takes one from the pool."""

    def __init__(self, line: Line, trajectory: str, attempt: int) -> None:
        self._line, self._who = line, {"trajectory": trajectory, "attempt": attempt}
        self._held = False

    async def run(
        self, command: Sequence[str], *, stdin: bytes = b"", timeout_s: float = 30.0, cap_bytes: int = 65536
    ) -> CommandResult:
        row = await self._call(
            op="run", command=list(command), stdin=stdin, timeout_s=timeout_s, cap_bytes=cap_bytes
        )  # fmt: skip
        return CommandResult(**row)

    async def write(self, files: Mapping[str, bytes]) -> None:
        await self._call(op="write", files=dict(files))

    async def read(self, path: str, *, cap_bytes: int = 1 << 20) -> bytes:
        data: bytes = await self._call(op="read", path=path, cap_bytes=cap_bytes)
        return data

    async def release(self) -> None:
        if self._held:
            await self._line.call(op="release", **self._who)

    async def _call(self, **call: Any) -> Any:
        first, self._held = not self._held, True
        return await self._line.call(**call, **self._who, first=first)


class NoSandbox:
    """For environments that need none."""

    async def run(self, command: Sequence[str], **_: Any) -> CommandResult:
        raise RuntimeError("this run has no sandbox pool: add a [[sandbox]] table")

    async def write(self, files: Mapping[str, bytes]) -> None:
        await self.run(())

    async def read(self, path: str, **_: Any) -> bytes:
        await self.run(())
        return b""

    async def release(self) -> None:
        return None


# ---- hosts --------------------------------------------------------------------------------------------------------


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
        capacity: int,
        family: EnvironmentFamily,
        renderer: Renderer,
        log: LogClient,
        engines: Sequence[Engine],
        supervisor: Supervisor,
    ) -> None:
        self._paths, self._config, self._where, self._capacity = paths, config, where, capacity
        self._family, self._renderer, self._log, self._supervisor = family, renderer, log, supervisor
        self._engines = [Busy(engine) for engine in engines]
        self._security = security(paths)
        self._lines: dict[str, Line] = {}
        self._loops: dict[str, tuple[Ticket, Loop, asyncio.Task[Ended]]] = {}
        self._store: Store | None = None
        self._receipts: list[Receipt] = []
        self._incarnation = 0
        self.guest: Guest | None = None

    # -- tickets --

    async def attach(self, ticket: Ticket) -> dict[str, Any]:
        """Run this attempt, or wait for the loop that already does, and say how it ended.

        Raises ValueError for a ticket of a lower attempt or of a lower control than this host has seen.
        """
        if ticket.incarnation < self._incarnation:
            raise ValueError(f"{ticket.trajectory}: granted by control {ticket.incarnation}, now {self._incarnation}")
        self._incarnation = ticket.incarnation
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
        history: History | None = None
        environment: Environment | None = None
        if ticket.adopt:
            found = self._adopted(ticket.adopt)
            if isinstance(found, Ended):
                return _already(replace(found, attempt=ticket.attempt))
            history = found
        if ticket.verdict is None:
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
            where=self._where, history=history, on_receipt=self._receipts.append,
        )  # fmt: skip
        task = asyncio.create_task(self._run(loop, sandbox), name=ticket.trajectory)
        self._loops[ticket.trajectory] = (ticket, loop, task)
        return task

    async def _run(self, loop: Loop, sandbox: RemoteSandbox | NoSandbox) -> Ended:
        try:
            return await loop.run()
        finally:
            with contextlib.suppress(AttemptFault, asyncio.CancelledError):
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

    def _adopted(self, head: str) -> History | Ended:
        if self._store is None:
            self._store = Store(self._paths, open_segments=True)
        self._store.refresh()
        return history_of(self._store, head)

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
                    "capacity": self._capacity,
                    "held": [(key, ticket.attempt) for key, (ticket, _, _) in self._loops.items()],
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
        for trajectory in list(self._loops):
            await self._end_loop(trajectory)
        await self._log.flush()

    def stats(self) -> dict[str, Any]:
        loops = [loop for _, loop, _ in self._loops.values()]
        return {
            "running": sum(loop.state is State.RUNNING for loop in loops),
            "waiting": sum(loop.state is State.WAITING_TOOL for loop in loops),
            "tokens": sum(engine.tokens for engine in self._engines),
            "busy_s": sum(engine.total_s() for engine in self._engines) / max(1, len(self._engines)),
            "mono": time.monotonic(),
        }

    async def announce(self) -> None:
        """Stream receipts to the driver: hints for speed, so what a missing scheduler can't take is dropped."""
        while True:
            await asyncio.sleep(EVENT_S)
            if self._receipts:
                rows, self._receipts[:] = [asdict(receipt) for receipt in self._receipts], []
                worker = self.guest.worker if self.guest else None
                if worker is not None:
                    with contextlib.suppress(Exception):
                        worker.log_event(TOPIC, rows)

    async def close(self) -> None:
        await self.park()
        for line in self._lines.values():
            line.close()
        for engine in self._engines:
            await engine.close()


def _already(ended: Ended) -> asyncio.Future[Ended]:
    future: asyncio.Future[Ended] = asyncio.get_running_loop().create_future()
    future.set_result(ended)
    return future


HOST: Host | None = None  # this process's host, for the Dask task below


async def run_ticket(ticket: Ticket) -> dict[str, Any]:
    """The Dask task of one attempt of a trajectory: attaches to its loop, returns `Ended` as JSON."""
    assert HOST is not None, "not a host process"
    return await HOST.attach(ticket)
