"""A Dask worker as a guest of a process; what all such processes share: Dask's settings, TLS, listeners."""

from __future__ import annotations

import asyncio
import contextlib
import importlib.metadata
import logging
import os
import sys
import time
from collections.abc import Awaitable, Callable, Mapping
from pathlib import Path
from typing import Any

import dask
from distributed import Worker
from distributed.comm import listen
from distributed.comm.addressing import parse_host_port
from distributed.security import Security

from hpcrl.config import Config
from hpcrl.layout import RunPaths, node_name, read_json
from hpcrl.node import host_of
from hpcrl.types import ConfigError, StoreError

logger = logging.getLogger(__name__)

TOPIC = "hpcrl"  # one topic for all receipts: Dask never frees a topic
LEAVING = "hpcrl-leaving"  # of the addresses of sandbox nodes that take nothing new

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
    logging.getLogger("distributed").setLevel(logging.WARNING)  # who came and went, we say ourselves


def versions() -> dict[str, str]:
    """What two processes must have alike to understand each other."""
    packages = {name: importlib.metadata.version(name) for name in ("dask", "distributed", "msgpack")}
    return {"python": ".".join(map(str, sys.version_info[:2])), **packages}


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
        self._security = security(paths)
        self.stop = asyncio.Event()
        self.worker: Worker | None = None

    async def serve(self) -> None:
        """Returns when `stop` is set, or when no control was there for `launch.control_timeout_s`."""
        last_seen = time.monotonic()
        while not self.stop.is_set():
            if time.monotonic() - last_seen > self._config.launch.control_timeout_s:
                logger.warning("no control for %g s: this process ends", self._config.launch.control_timeout_s)
                return
            try:
                scheduler = read_json(self._paths.scheduler)
            except StoreError as error:  # control will write it anew
                logger.warning("%s", error)
                scheduler = None
            if (
                scheduler is None
                or "address" not in scheduler
                or not await _listens(scheduler["address"], self._security)
            ):
                await self._pause(min(1.0, self._config.store.poll_s))
                continue
            if others := [f"{name} {found}" for name, found in versions().items() if found != scheduler.get(name)]:
                there = [f"{name} {scheduler.get(name, '?')}" for name in versions()]
                raise ConfigError(
                    f"{node_name()} has {', '.join(others)}, control has {', '.join(there)}: make them alike"
                )
            try:
                worker = Worker(
                    scheduler["address"], nthreads=self._nthreads, name=f"{self._name}-{os.getpid()}",
                    security=self._security, memory_limit=0, host=host_of(self._config), dashboard=False,
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

    def has_tasks(self) -> bool:
        """Whether Dask tasks are here, or what they came to, which control has not taken yet."""
        return self.worker is not None and bool(self.worker.state.tasks)

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


def ahead(concurrent: int) -> int:
    """Tickets that are given out where so many run: more wait beside them, so that no place stands empty while an end
    is on its way to the disk and to control."""
    return concurrent + max(1, concurrent // 4)


async def _listens(address: str, secure: Security) -> bool:
    """Whether the scheduler is there: one that was killed leaves its address behind."""
    host, port = parse_host_port(address.partition("://")[2])
    ssl = secure.get_connection_args("worker")["ssl_context"]
    try:
        async with asyncio.timeout(5):
            _, writer = await asyncio.open_connection(host, port, ssl=ssl)
    except (OSError, TimeoutError):
        return False
    writer.close()
    return True


async def open_listener(config: Config, secure: Security, serve: Callable[[Any], Awaitable[None]]) -> Any:
    """Listen with the run's TLS on the first free port of `launch.ports`. Raises ConfigError when none is free."""
    low, high = config.launch.port_range
    host = host_of(config)
    for port in range(low, high + 1):
        try:
            listener = listen(f"tls://{host}:{port}", serve, **secure.get_listen_args("worker"))
            await listener
        except OSError:
            continue
        return listener
    raise ConfigError(f"launch.ports: no free port in {config.launch.ports}; give a wider range")
