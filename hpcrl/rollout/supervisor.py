"""One plain process per rollout node: owns the node's log, starts and restarts its engines and hosts.

supervisor -+- log.sock         hosts append records
            +- supervisor.sock  hosts ask: status, load, stop; and say: busy (one JSON line each way)
            +- engine-<k>/      vLLM servers in process groups of their own, found again by a next supervisor
            +- hosts            started by the caller's `start_host`, restarted when they die
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import logging
import os
import shutil
import signal
import time
from collections.abc import Awaitable, Callable, Sequence
from pathlib import Path
from typing import Any

from hpcrl.config import Config, Rollout
from hpcrl.layout import RunPaths
from hpcrl.rollout.engine import EngineFault, VllmEngine
from hpcrl.rollout.server import EngineProcess, sweep_shared
from hpcrl.store.link import LogServer
from hpcrl.store.log import Log, take_over
from hpcrl.telemetry import Meter
from hpcrl.types import EngineError, StoreError

logger = logging.getLogger(__name__)

HostStarter = Callable[[int], Awaitable[asyncio.subprocess.Process]]
MAX_DEATHS = 5  # of an engine or host in a row, without having been ready in between
MAX_PAUSE_S = 30.0  # between two starts
SHM, ROOM_BYTES = Path("/dev/shm"), 256 << 20  # vLLM 0.32 asks for 160 MiB of shared memory
HOST_GRACE_S = 10.0
COUNT_S = 2.0  # for an engine to say how many tokens it has made
HEALTH_S, HEALTH_TRIES = 10.0, 6  # between two looks at an engine; misses in a row that mean it hangs


def node_folder(paths: RunPaths, node: str) -> Path:
    """Where a node's sockets lie; hosts find their supervisor there."""
    folder = paths.private() / node
    folder.mkdir(mode=0o700, exist_ok=True)
    return folder


def engine_folder(folder: Path, index: int) -> Path:
    return folder / f"engine-{index}"


def full_places(folder: Path) -> str:
    """What to say of places that engines need and that have little space; "" where there is enough."""
    free = {place: shutil.disk_usage(place).free for place in (SHM, folder.parent) if place.is_dir()}
    little = [
        f"{place} has {size >> 20} MiB free: make room there" for place, size in free.items() if size < ROOM_BYTES
    ]
    return "".join(f"; {text}" for text in little)


class Link:
    """A host's line to its supervisor."""

    def __init__(self, folder: Path) -> None:
        self._path = folder / "supervisor.sock"

    async def call(self, method: str, **arguments: Any) -> Any:
        """Raises OSError when the supervisor is gone."""
        reader, writer = await asyncio.open_unix_connection(self._path)
        try:
            writer.write(json.dumps({"method": method, **arguments}).encode() + b"\n")
            await writer.drain()
            line = await reader.readline()
        finally:
            writer.close()
        if not line:
            raise ConnectionError("the supervisor hung up")
        return json.loads(line)


class EngineSlot:
    """One engine of the node: its server process, our client, what it has loaded, what its time goes to."""

    def __init__(self, process: EngineProcess, client: VllmEngine, tolerance: float, paths: RunPaths) -> None:
        self.process, self.client, self._tolerance, self._paths = process, client, tolerance, paths
        self.ready = False
        self.version = 0
        self.mismatch: float | None = None
        self.restarts = 0
        self.trouble = ""  # why it is not up, when it should be
        self.busy = False  # a host has a request in it
        self._doing = "starting"
        self.meter = Meter()
        self._counted = self._num_tokens = 0  # tokens that it made before; that its server counts
        self._has_count = True

    def account(self, doing: str | None = None) -> None:
        """What its time goes to from now on. `doing`: what is being done to it, "" when that is over."""
        self._doing = self._doing if doing is None else doing
        own = "generating" if self.busy else "waiting"
        self.meter.to(self._doing or (own if self.ready else "gaps"))

    async def count(self) -> bool:
        """Take in how many tokens its server has made. Whether it said so."""
        with contextlib.suppress(EngineFault, EngineError, TimeoutError):
            async with asyncio.timeout(COUNT_S):
                now = await self.client.generated()
            self._counted += self._num_tokens if now < self._num_tokens else 0  # of a server before this one
            self._num_tokens = now
            return True
        return False

    @property
    def generated(self) -> int | None:
        """Tokens that it has made under this supervisor, as last counted; None where that can't be told."""
        return self._counted + self._num_tokens if self._has_count else None

    async def start(self) -> None:
        """Take over a server that an earlier supervisor left running, else start one."""
        self.account("starting")
        if await self.process.adopt():
            self.version = max(0, await self.client.version())
            if (half_loaded := self.process.half_loaded) is not None:
                await self._load_again(half_loaded)
            self._has_count = await self.count()
            self._counted = -self._num_tokens  # these are that supervisor's
            logger.info("%s: taken over, version %d", self.process.name, self.version)
        else:
            await self.process.start()
            self.version = 0
        self.ready, self.trouble = True, ""
        self.account("")

    async def load(self, version: int) -> dict[str, Any]:
        """Load a version and score its probe; a failed check brings the old version back."""
        if not self.ready:
            return {"ok": False, "refused": False, "message": f"{self.process.name} is not up"}
        self.account("weight_sync")
        try:
            return await self._load(version)
        finally:
            self.account("")

    async def _load(self, version: int) -> dict[str, Any]:
        began = time.monotonic()
        old = self.version
        try:
            await self._take(version)
            wrong = await self._probe(version)
        except StoreError as error:  # refused before anything changed
            return {"ok": False, "refused": True, "message": str(error)}
        except (EngineFault, EngineError) as error:
            self.ready = False  # half-loaded: only a restart makes it trustworthy again
            await self.process.stop()
            return {"ok": False, "refused": False, "message": str(error)}
        if wrong:
            await self._bring_back(old)
            return {"ok": False, "refused": True, "message": wrong}
        return {"ok": True, "message": "", "mismatch": self.mismatch, "seconds": time.monotonic() - began}

    async def _take(self, version: int) -> None:
        """Raises StoreError when the engine goes on as it was, else it must be restarted."""
        self.process.half_loaded = version
        try:
            await self.client.load(version, self._paths.version(version))
        except StoreError:
            self.process.half_loaded = None
            raise

    async def _load_again(self, version: int) -> None:
        """What a supervisor was loading when it died. Raises EngineFault when the engine must be restarted."""
        try:
            await self.client.load(version, self._paths.version(version))
            wrong = await self._probe(version)
        except StoreError as error:
            wrong = str(error)
        if wrong:
            raise EngineFault(f"{self.process.name} is half loaded with version {version}: {wrong}")

    async def _probe(self, version: int) -> str:
        """Whether the engine computes what the learner did; it has the version then. What is wrong, else ""."""
        try:
            mismatch = await self.client.probe(self._paths.version(version))
        except StoreError as error:
            return str(error)
        if not mismatch <= self._tolerance:
            return f"mean |Δlogprob| on the probe is {mismatch:.3g}, at most {self._tolerance:g} is allowed"
        self.process.half_loaded = None
        self.version, self.mismatch = version, mismatch
        return ""

    async def _bring_back(self, version: int) -> None:
        try:
            await self._take(version)
            self.process.half_loaded = None
        except (StoreError, EngineFault, EngineError) as error:
            logger.warning("%s: version %d did not come back either: %s", self.process.name, version, error)
            self.ready = False
            await self.process.stop()


class Supervisor:
    def __init__(
        self,
        paths: RunPaths,
        config: Config,
        pool: Rollout,
        node: str,
        *,
        stop_ids: tuple[int, ...],
        start_host: HostStarter,
    ) -> None:
        self._paths, self._config, self._pool, self.node = paths, config, pool, node
        self._folder = node_folder(paths, node)
        self._start_host = start_host
        self.stop = asyncio.Event()
        self._leaving = False
        self.on_leave: Callable[[], None] = lambda: None  # when a host sees that it's time
        self._log: Log | None = None
        self._hosts: dict[int, asyncio.subprocess.Process] = {}
        self._busy: dict[int, Sequence[bool]] = {}  # pid of a host -> in which engines it has requests
        self.slots: list[EngineSlot] = []
        for index in range(pool.engines):
            process = EngineProcess(
                pool, model=paths.model, dtype=config.model.dtype, folder=engine_folder(self._folder, index),
                log=paths.logs / f"engine-{node}-{index}.log", index=index, seed=config.seed,
            )  # fmt: skip
            client = VllmEngine(
                process.socket, stop_ids=stop_ids, max_model_len=pool.max_model_len, name=f"engine {node}-{index}"
            )
            self.slots.append(EngineSlot(process, client, pool.probe_tolerance, paths))

    def engine_pids(self) -> list[int]:
        """Those that an earlier supervisor started are not below this process."""
        return [slot.process.pid for slot in self.slots]

    def generated(self) -> int | None:
        """Tokens that the engines have made under this supervisor; None where that can't be told."""
        counts = [slot.generated for slot in self.slots]
        return None if None in counts else sum(filter(None, counts))

    async def run(self) -> None:
        """Until `stop` is set. Raises EngineError when an engine or host can't be kept alive."""
        store = self._config.store
        scratch = self._paths.scratch_log(store.local_dir)
        if scratch.is_dir() and store.durability == "shared":
            take_over(scratch, self.node, self._paths.log)  # of a time when durability was local
        log = Log(
            self._paths.log, self.node, segment_bytes=store.segment_mib << 20, segment_age_s=store.segment_age_s,
            commit_interval_s=store.commit_interval_s, full_patience_s=store.full_patience_s,
            scratch=scratch if store.durability == "local" else None,
        )  # fmt: skip
        if log.local:
            logger.warning("store.durability = local: steps of %s are lost with this node", log.folder)
        self._log = log
        await asyncio.to_thread(sweep_shared, Path("/tmp").glob(f"hpcrl-{os.getuid()}-*"))  # all runs of this user
        server = LogServer(log, self._folder / "log.sock")
        door = self._folder / "supervisor.sock"
        for stale in (self._folder / "log.sock", door):
            stale.unlink(missing_ok=True)
        await server.start()
        listener = await asyncio.start_unix_server(self._serve, door)
        watchers: list[asyncio.Task[None]] = []
        try:
            watchers = [asyncio.create_task(self._keep_host(index)) for index in range(self._pool.hosts)]
            watchers += [asyncio.create_task(self._keep_engine(slot)) for slot in self.slots]
            stopping = asyncio.create_task(self.stop.wait())
            done, _ = await asyncio.wait({stopping, *watchers}, return_when=asyncio.FIRST_COMPLETED)
            for task in done:
                task.result()  # a watcher ends only by giving up
        finally:
            for task in watchers:
                task.cancel()
            await asyncio.gather(*watchers, return_exceptions=True)
            try:
                await self._end_hosts()
                listener.close()
                await server.close()
                await log.close()
            finally:  # a full disk must not leave engines behind
                await asyncio.gather(*(slot.count() for slot in self.slots))
                for slot in self.slots:
                    await slot.client.close()
                await asyncio.gather(*(slot.process.stop() for slot in self.slots))
                door.unlink(missing_ok=True)

    async def leave(self, within_s: float) -> None:
        """The allocation ends soon: let the hosts move their trajectories, then stop. Engines serve until then."""
        self._leaving = True
        logger.warning("leaving: trajectories move at their next step, within %g s", within_s)
        hosts = [process for process in self._hosts.values() if process.returncode is None]
        for process in hosts:
            with contextlib.suppress(ProcessLookupError):
                process.send_signal(signal.SIGUSR2)
        if hosts:
            await asyncio.wait([asyncio.create_task(process.wait()) for process in hosts], timeout=within_s)
        self.stop.set()

    async def _keep_engine(self, slot: EngineSlot) -> None:
        deaths, since = 0, time.monotonic()
        while True:
            try:
                await slot.start()
                deaths = 0
                message = await self._until_bad(slot)
                since = time.monotonic()
            except (EngineError, EngineFault) as error:
                message = str(error)
            slot.ready = False
            slot.account("")
            slot.restarts += 1
            deaths += 1
            full = full_places(slot.process.folder)
            patient = bool(full) and time.monotonic() - since < self._pool.start_timeout_s  # others may make room
            if deaths > MAX_DEATHS and not patient:
                raise EngineError(f"{message}; gave up after {deaths} tries{full}")
            slot.trouble = f"{message}{full}"
            logger.warning("%s; starting it again", slot.trouble)
            await slot.process.stop()  # nothing of the old one is left behind
            await asyncio.sleep(min(0.5 * 2 ** (deaths - 1), MAX_PAUSE_S))

    async def _until_bad(self, slot: EngineSlot) -> str:
        """Wait until the engine is gone, or has not answered for HEALTH_TRIES times; why."""
        ended = asyncio.create_task(slot.process.ended())
        missed = 0
        try:
            while missed < HEALTH_TRIES:
                done, _ = await asyncio.wait({ended}, timeout=HEALTH_S)
                if done:
                    return f"{slot.process.name} ended by itself"
                missed = 0 if await slot.client.healthy() else missed + 1
                if not missed:
                    await slot.count()
        finally:
            ended.cancel()
        return f"{slot.process.name} does not answer"

    async def _keep_host(self, index: int) -> None:
        deaths = 0
        while True:
            began = time.monotonic()
            process = self._hosts[index] = await self._start_host(index)
            code = await process.wait()
            self._is_busy(process.pid, ())
            if self._leaving:
                await self.stop.wait()
                return
            if self._log is not None and self._log.local:  # whoever takes its trajectories over must see what it stored
                with contextlib.suppress(OSError):  # the log says so, and moves it with the next segment
                    await self._log.seal()
            deaths = deaths + 1 if time.monotonic() - began < 60 else 1
            if deaths > MAX_DEATHS:
                raise EngineError(f"host {self.node}-{index} ended {deaths} times (exit {code}); see the job's log")
            logger.warning("host %s-%d ended (exit %s); starting another", self.node, index, code)
            await asyncio.sleep(min(0.2 * 2 ** (deaths - 1), 30))

    def _is_busy(self, host: int, engines: Sequence[bool]) -> None:
        """Account for which engines a host has requests in: for none, when it has ended."""
        living = {process.pid for process in self._hosts.values() if process.returncode is None}
        self._busy = {pid: row for pid, row in {**self._busy, host: engines}.items() if pid in living}
        for number, slot in enumerate(self.slots):
            slot.busy = any(row[number] for row in self._busy.values())
            slot.account()

    async def _end_hosts(self) -> None:
        for step in ("terminate", "kill"):
            alive = [process for process in self._hosts.values() if process.returncode is None]
            for process in alive:
                with contextlib.suppress(ProcessLookupError):
                    getattr(process, step)()
            if alive:
                await asyncio.wait([asyncio.create_task(process.wait()) for process in alive], timeout=HOST_GRACE_S)

    async def _serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        try:
            request = json.loads(await reader.readline() or b"{}")
            answer = await self._answer(**request) if request else None
            writer.write(json.dumps(answer).encode() + b"\n")
            await writer.drain()
        except OSError:
            pass  # the asking host is gone
        finally:
            writer.close()

    async def _answer(self, method: str, version: int = -1, host: int = 0, engines: Sequence[bool] = ()) -> Any:
        match method:
            case "busy":
                return self._is_busy(host, engines)
            case "status":
                return {
                    "ready": bool(self.slots) and all(slot.ready for slot in self.slots),
                    "version": min((slot.version for slot in self.slots), default=-1),
                    "mismatch": max((slot.mismatch or 0.0 for slot in self.slots), default=0.0),
                    "restarts": sum(slot.restarts for slot in self.slots),
                    "trouble": next((slot.trouble for slot in self.slots if slot.trouble), ""),
                    "full": self._log is not None and self._log.full,
                    "pid": os.getpid(),
                    "engines": [slot.process.pid for slot in self.slots],
                    "hosts": [process.pid for process in self._hosts.values()],
                }
            case "load":
                answers = await asyncio.gather(*(slot.load(version) for slot in self.slots))
                bad = [answer for answer in answers if not answer["ok"]]
                return bad[0] if bad else max(answers, key=lambda answer: answer["seconds"])
            case "seal":
                if self._log is not None:
                    await self._log.seal()
                return {}
            case "leave":
                return self.on_leave()
            case "stop":
                asyncio.get_running_loop().call_later(0.05, self.stop.set)  # after this answer left
                return None
        raise ValueError(f"a supervisor has no method {method!r}")
