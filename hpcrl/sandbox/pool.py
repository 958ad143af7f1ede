"""The sandboxes of one node: started ahead, lent to one attempt of a trajectory at a time, reset, lent again.

    acquire(trajectory, attempt) -> Lease -> run/write/read … -> release(trajectory, attempt)

A sandbox goes to the next trajectory only when its reset was proven clean; else it is replaced.
"""

from __future__ import annotations

import asyncio
from collections import OrderedDict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from hpcrl.config import SandboxPool
from hpcrl.sandbox.backend import Backend, Limits
from hpcrl.sandbox.session import SandboxLost, Session
from hpcrl.sandbox.watch import Watch
from hpcrl.types import CommandResult

_REMEMBERED = 10_000  # trajectories whose highest attempt is known after their release


class StaleAttempt(PermissionError):
    """A call of an attempt that another attempt of the same trajectory has replaced."""


@dataclass(frozen=True, slots=True, kw_only=True)
class PoolStats:
    leased: int
    idle: int
    waiting: int  # acquire calls
    started: int  # sandboxes, since the pool was made
    reused: int  # leases served by a sandbox that had served before
    replaced: int  # sandboxes not proven clean, or lost
    commands: int


class Lease:
    """A sandbox as one attempt sees it (`hpcrl.types.Sandbox`). Ends when released or when a higher attempt comes."""

    def __init__(self, pool: Pool, trajectory: str, attempt: int, session: Session, timeout_s: float) -> None:
        """`timeout_s`: the most that any command may take."""
        self._pool, self._timeout_s = pool, timeout_s
        self.trajectory = trajectory
        self.attempt = attempt
        self._session = session
        self._ended = ""

    @property
    def alive(self) -> bool:
        return not self._ended and self._session.alive

    @property
    def pid(self) -> int:
        """The bwrap process, on the host."""
        return self._session.pid

    async def run(
        self, command: Sequence[str], *, stdin: bytes = b"", timeout_s: float = 30.0, cap_bytes: int = 65536
    ) -> CommandResult:
        limit_s = min(timeout_s, self._timeout_s)
        result = await self._live().run(command, stdin=stdin, timeout_s=limit_s, cap_bytes=cap_bytes)
        self._live()  # if the lease ended meanwhile, the command was killed for that
        return result

    async def write(self, files: Mapping[str, bytes]) -> None:
        await self._live().write(files)

    async def read(self, path: str, *, cap_bytes: int = 1 << 20) -> bytes:
        return await self._live().read(path, cap_bytes=cap_bytes)

    async def renew(self) -> None:
        """Raises SandboxLost when no other comes up."""
        self._live()
        fresh = await self._pool._fresh()
        if self._ended:
            await fresh.close()
        old, self._session = self._live(), fresh
        await self._pool._discard(old)

    def _live(self) -> Session:
        if self._ended:
            raise StaleAttempt(f"{self.trajectory}: sandbox of attempt {self.attempt} {self._ended}")
        return self._session


class Pool:
    """Belongs to one event loop. `close()` leaves no process behind."""

    def __init__(self, config: SandboxPool, backend: Backend) -> None:
        self._config = config
        self._backend = backend
        self._limits = Limits.of(config)
        self._watch = Watch()
        self._slots = asyncio.Semaphore(config.sessions)
        self._waiting = 0
        self._idle: list[Session] = []
        self._leases: dict[str, Lease] = {}
        self._returning: set[Session] = set()  # given back, not yet proven clean
        self._attempts: OrderedDict[str, int] = OrderedDict()  # highest seen
        self._refill: asyncio.Task[None] | None = None
        self._closed = False
        self._started = self._reused = self._replaced = self._commands = 0

    async def acquire(self, trajectory: str, attempt: int) -> Lease:
        """A clean sandbox for this attempt; waits while all are lent. The same attempt gets its own again.

        A lower attempt's lease ends here and its sandbox is reset: the new attempt replays what it continues.
        Raises StaleAttempt for an attempt below the highest seen, SandboxLost when no sandbox comes up.
        """
        self._check(trajectory, attempt)
        held = self._leases.get(trajectory)
        if held is not None and held.attempt == attempt and held.alive:
            return held
        self._note(trajectory, attempt)
        if held is not None:
            await self.release(trajectory, held.attempt, f"was taken over by attempt {attempt}")
        self._waiting += 1
        try:
            await self._slots.acquire()
        finally:
            self._waiting -= 1
        try:
            session = await self._session()
            try:
                self._check(trajectory, attempt)  # a higher one may have come while we waited
                if trajectory in self._leases:
                    raise StaleAttempt(f"{trajectory}: attempt {attempt} was acquired twice at once")
            except StaleAttempt:
                self._idle.append(session)
                raise
        except BaseException:
            self._slots.release()
            raise
        lease = self._leases[trajectory] = Lease(self, trajectory, attempt, session, self._config.command_timeout_s)
        self._top_up()
        return lease

    def lease(self, trajectory: str, attempt: int) -> Lease:
        """The sandbox that this attempt holds. Raises StaleAttempt, or SandboxLost when there is none."""
        self._check(trajectory, attempt)
        lease = self._leases.get(trajectory)
        if lease is None or lease.attempt != attempt:
            raise SandboxLost(f"{trajectory}: attempt {attempt} holds no sandbox here")
        return lease

    async def release(self, trajectory: str, attempt: int | None = None, why: str = "was released") -> None:
        """Take the sandbox back: reset and kept, or replaced. Nothing happens if `attempt` doesn't hold one."""
        lease = self._leases.get(trajectory)
        if lease is None or (attempt is not None and lease.attempt != attempt):
            return
        del self._leases[trajectory]
        lease._ended = why
        await asyncio.shield(self._take_back(lease._session))

    async def _take_back(self, session: Session) -> None:
        self._returning.add(session)
        try:
            session.kill("cancelled")
            try:
                trouble = session.lost or await session.reset()
            except (SandboxLost, OSError) as error:
                trouble = str(error)
            if trouble or self._closed:
                self._replaced += not self._closed
                await self._discard(session)
            else:
                self._idle.append(session)
        finally:
            self._returning.discard(session)
            self._slots.release()
            self._top_up()

    @property
    def watch_thread(self) -> int:
        """Its id, as /proc/self/task has it."""
        return self._watch.thread_id

    def stats(self) -> PoolStats:
        sessions = [*self._idle, *(lease._session for lease in self._leases.values())]
        return PoolStats(
            leased=len(self._leases),
            idle=len(self._idle),
            waiting=self._waiting,
            started=self._started,
            reused=self._reused,
            replaced=self._replaced,
            commands=self._commands + sum(session.commands for session in sessions),
        )

    async def close(self) -> None:
        """End all sandboxes; leases raise SandboxLost from then on."""
        self._closed = True
        if self._refill is not None:
            self._refill.cancel()
            await asyncio.gather(self._refill, return_exceptions=True)
        leases, self._leases = self._leases, {}
        sessions = [*self._idle, *self._returning, *(lease._session for lease in leases.values())]
        self._idle.clear()
        for _ in leases:
            self._slots.release()  # whoever waits hears that the pool is closed
        await asyncio.gather(*(session.close() for session in sessions))
        self._watch.close()

    async def warm(self) -> None:
        """Wait until the warm sandboxes stand. Raises what kept one from starting."""
        self._top_up()
        if self._refill is not None:
            await asyncio.shield(self._refill)

    async def _session(self) -> Session:
        while self._idle:
            session = self._idle.pop()
            if session.alive:
                self._reused += session.commands > 0
                return session
            self._replaced += 1
            await session.close()
        return await self._start()

    async def _fresh(self) -> Session:
        """One in which nothing has run yet."""
        found = next((session for session in self._idle if session.alive and not session.commands), None)
        if found is None:
            return await self._start()
        self._idle.remove(found)
        self._top_up()
        return found

    async def _discard(self, session: Session) -> None:
        self._commands += session.commands
        await session.close()

    async def _start(self) -> Session:
        if self._closed:
            raise SandboxLost("the pool is closed")
        session = await Session.start(self._backend, self._limits, self._watch)
        self._started += 1
        if self._closed:
            await session.close()
            raise SandboxLost("the pool is closed")
        return session

    def _room(self) -> bool:
        free = self._config.sessions - len(self._leases)
        return not self._closed and len(self._idle) < min(self._config.warm, free)

    def _top_up(self) -> None:
        if (self._refill is None or self._refill.done()) and self._room():
            self._refill = asyncio.create_task(self._fill())
            self._refill.add_done_callback(lambda task: task.cancelled() or task.exception())

    async def _fill(self) -> None:
        # One after the other: starts don't get faster side by side, and the calls of running agents come first.
        while self._room():
            self._idle.append(await self._start())

    def _check(self, trajectory: str, attempt: int) -> None:
        highest = self._attempts.get(trajectory, 0)
        if attempt < highest:
            raise StaleAttempt(f"{trajectory}: attempt {attempt} was replaced by attempt {highest}")

    def _note(self, trajectory: str, attempt: int) -> None:
        self._attempts[trajectory] = attempt
        self._attempts.move_to_end(trajectory)
        while len(self._attempts) > _REMEMBERED:
            self._attempts.popitem(last=False)
