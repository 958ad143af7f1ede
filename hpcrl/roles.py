"""The body of each job: what a process of a role does from its first line to its last.

Each role imports its own rooms only when it runs: a learner never loads Dask, a sandbox node never loads torch.

Over 400 lines: five bodies of which each reads from top to bottom, and what they share.
"""

from __future__ import annotations

import asyncio
import contextlib
import ctypes
import errno
import faulthandler
import functools
import logging
import math
import os
import signal
import sys
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

from hpcrl import launch
from hpcrl.config import Config, load_resolved
from hpcrl.launch import node_environment, submit_async
from hpcrl.launch.slurm import NO_MODULES
from hpcrl.launch.watch import ControlWatch
from hpcrl.layout import RunPaths, boot_id, listed, node_name, publish_json, read_json
from hpcrl.node import (
    CLOSING_S,
    asked,
    ends_at,
    host_of,
    interface_of,
    is_earlier_life,
    job_id,
    job_life,
    listener_of,
    node_id,
    port_is_free,
    task_rank,
)
from hpcrl.telemetry import Meter, Usage, start_logging
from hpcrl.types import ConfigError, HpcrlError

logger = logging.getLogger(__name__)

STUCK_S = 120.0
DAY_S = 86400.0
TOLD = (signal.SIGTERM, signal.SIGINT, signal.SIGUSR2)
FINAL = 2  # exit code of a control that would fail again
LONG_S = 600.0  # a control that lived for so long dies for the first time


def run_role(root: str, role: str, index: int, control_number: int) -> None:
    """What runs in each task of a role's job, which the control of that incarnation asked for."""
    paths = RunPaths.of(root)
    config = load_resolved(paths.config)
    os.environ.update(node_environment(paths))
    job = job_id()
    die_with_parent()
    start_logging(paths.logs, f"{role}-{index}" if role != "learner" else f"learner-r{task_rank()}", job)
    logger.info("%s-%d starts as job %s, pid %d", role, index, job, os.getpid())
    if missing := os.environ.get(NO_MODULES):
        logger.warning("`module load` failed, the job goes on without:%s", missing)
    if config.launch.fleet == "presubmitted" and listed(paths.control, paths.stopped.name, anew=True):
        logger.info("the run has ended: nothing is left to do")
        return
    with _usage(paths, config, role, index) as usage, _errors_in_the_log():
        match role:
            case "control":
                local = config.launch.executor == "local"
                asyncio.run(control(paths, config) if local else keep_control(paths, config))
            case "rollout":
                asyncio.run(rollout(paths, config, index, usage))
            case "sandbox":
                asyncio.run(sandbox(paths, config, index))
            case "learner":
                learner(paths, config, control_number, usage)
            case _:
                raise ValueError(f"no role {role!r}")
    logger.info("%s-%d ends", role, index)


@contextlib.contextmanager
def _errors_in_the_log() -> Iterator[None]:
    """Where `hpcrl logs` finds them; what submitit says of them, it says in a file of its own."""
    try:
        yield
    except HpcrlError as error:
        logger.error("%s", error)
        raise
    except Exception as error:
        logger.exception("%s", type(error).__name__)
        raise


def _usage(paths: RunPaths, config: Config, role: str, index: int) -> Usage:
    """For this task of a job. Its file is named after the life of the job, and its start: locally pids come back."""
    pool = config.pool(role, index).name if role in ("rollout", "sandbox") else role
    rank = task_rank()
    return Usage(
        paths.usage / f"{role}-{index}-{job_life()}-{rank}-{time.time():.0f}.json",
        role=role, index=index, pool=pool, job=job_id(), life=job_life(), rank=rank, node=node_name(), **asked(),
    )  # fmt: skip


def die_with_parent() -> None:
    """A role whose executor was killed is not to go on beside the one that takes its place (prctl PR_SET_PDEATHSIG)."""
    ctypes.CDLL(None, use_errno=True).prctl(1, signal.SIGKILL, 0, 0, 0)
    if os.getppid() == 1:
        os.kill(os.getpid(), signal.SIGKILL)


def on_signal(call: Callable[[], object], leave: Callable[[], object] | None = None) -> None:
    """Call once asked to end; `leave` once told that the allocation ends soon. submitit has handlers of its own in the
    job, so this must come after its start."""
    loop = asyncio.get_running_loop()
    for number in (signal.SIGTERM, signal.SIGINT):
        loop.add_signal_handler(number, call)
    loop.add_signal_handler(signal.SIGUSR2, leave or call)
    signal.pthread_sigmask(signal.SIG_UNBLOCK, TOLD)  # what came before comes now


# ---- control ------------------------------------------------------------------------------------------------------


async def keep_control(paths: RunPaths, config: Config) -> None:
    """Control in a process of its own that is started again when it dies: in Slurm's jobs nobody else would do it.

    Raises HpcrlError when it dies `launch.restarts` times in a row, each time soon after its start.
    """
    deaths = 0
    asked: signal.Signals | None = None
    process: asyncio.subprocess.Process | None = None

    def tell(number: signal.Signals) -> None:
        nonlocal asked
        asked = number
        if process is not None and process.returncode is None:
            process.send_signal(number)

    for number in TOLD:
        asyncio.get_running_loop().add_signal_handler(number, tell, number)
    while True:
        began = time.monotonic()
        signal.pthread_sigmask(signal.SIG_BLOCK, TOLD)  # in it they wait until it has handlers (on_signal)
        try:
            process = await asyncio.create_subprocess_exec(
                sys.executable, "-m", "hpcrl.roles", "control", str(paths.root)
            )
        finally:
            signal.pthread_sigmask(signal.SIG_UNBLOCK, TOLD)
        if asked is not None:
            process.send_signal(asked)
        code = await process.wait()
        # Told that this job ends soon, and dead: the next one, told again, sees to a successor.
        if code in (0, FINAL) or asked not in (None, signal.SIGUSR2):
            return
        deaths = deaths + 1 if time.monotonic() - began < LONG_S else 1
        if deaths > config.launch.restarts:
            raise HpcrlError(f"control died {deaths} times in a row (exit {code}); see {paths.submitit / 'control-0'}")
        logger.error("control died (exit %d); starting it again (%d of %d)", code, deaths, config.launch.restarts)
        await asyncio.sleep(min(0.5 * 2 ** (deaths - 1), 30.0))


async def control(paths: RunPaths, config: Config) -> None:
    from distributed import Client

    from hpcrl.driver import MOVED, Driver
    from hpcrl.rollout.environments import load_family
    from hpcrl.store.ledger import LedgerWriter
    from hpcrl.workers.guest import configure_dask, security, versions

    configure_dask()
    paths.stopped.unlink(missing_ok=True)
    ledger = LedgerWriter(paths)
    secure = security(paths)
    scheduler = await _scheduler(config, secure)
    try:
        where = {"address": scheduler.address, "incarnation": ledger.incarnation}
        publish_json(paths.scheduler, where | versions())
        logger.info("control %d: scheduler at %s", ledger.incarnation, scheduler.address)
        async with Client(scheduler.address, asynchronous=True, security=secure, set_as_default=False) as client:
            family = load_family(config.environment.name, config.environment.options)
            driver = Driver(paths, config, scheduler=scheduler, client=client, ledger=ledger, family=family)
            told = False

            def leave() -> None:
                nonlocal told
                told = True
                me = next((job for job in launch.jobs(paths) if job.role == "control" and job.id == job_id()), None)
                if config.launch.fleet == "presubmitted" and (me is None or launch.successor(paths, me) is None):
                    driver.stop()  # nobody would go on with it
                else:
                    driver.leave()

            # Slurm's SIGTERM means this job alone: who wants the run to end leaves a command.
            # The end of an allocation that all roles share is the run's, for now.
            alone = config.launch.executor == "slurm"
            on_signal(driver.leave if alone else driver.stop, leave if alone else driver.stop)
            outcome = await driver.run()
            logger.info("control leaves" if outcome == MOVED else "the run is over: %s", outcome)
            if told and outcome == MOVED and config.launch.fleet == "live":
                await _hand_over(paths)
    finally:
        row = read_json(paths.scheduler)
        if row is not None and row["incarnation"] == ledger.incarnation:  # a successor's stays
            paths.scheduler.unlink(missing_ok=True)
        await scheduler.close()
        ledger.close()


async def _hand_over(paths: RunPaths) -> None:
    """Submit the next control, to begin when this one has ended; tried for as long as the allocation lasts."""
    me = next((job for job in launch.jobs(paths) if job.role == "control" and job.id == job_id()), None)
    while me is None or launch.successor(paths, me) is None:  # else one that died after it had submitted it did so
        try:
            successor = await submit_async(paths, "control", 0, 0, after=f"afterany:{job_id()}")
        except HpcrlError as error:
            logger.error("no successor yet: %s", error)
            await asyncio.sleep(5.0)
            continue
        logger.info("job %s is the next control", successor.id)
        return


async def _scheduler(config: Config, secure: Any) -> Any:
    """A Dask scheduler on the first free port of the range. Raises ConfigError when none is free."""
    from distributed import Scheduler

    low, high = config.launch.port_range
    host = host_of(config)
    dashboard = None
    if config.launch.dashboard:
        with listener_of(config, "127.0.0.1") as found:  # the highest; the scheduler takes the lowest
            dashboard = f"127.0.0.1:{found.getsockname()[1]}"
    for port in range(low, high + 1):
        if not port_is_free(port, host) or dashboard == f"127.0.0.1:{port}":
            continue
        scheduler = Scheduler(
            host=host, port=port, protocol="tls", security=secure, dashboard=config.launch.dashboard,
            dashboard_address=dashboard,
        )  # fmt: skip
        try:
            await scheduler
        except RuntimeError as error:  # what Dask wraps others in
            await scheduler.close()
            if isinstance(error.__cause__, OSError) and error.__cause__.errno == errno.EADDRINUSE:
                continue  # someone was quicker
            raise
        return scheduler
    raise ConfigError(f"launch.ports: no free port in {config.launch.ports}; give a wider range")


# ---- rollout ------------------------------------------------------------------------------------------------------


async def rollout(paths: RunPaths, config: Config, index: int, usage: Usage) -> None:
    from hpcrl.rollout.render import Renderer
    from hpcrl.rollout.supervisor import Supervisor
    from hpcrl.store.seal import seal_ended

    for path in seal_ended(paths, is_earlier_life):
        logger.info("%s: closed, this job's earlier life left it open", path)
    node = node_id(f"r{index}")
    pool = config.pool("rollout", index)

    async def start_host(number: int) -> asyncio.subprocess.Process:
        command = (sys.executable, "-m", "hpcrl.roles", "host", str(paths.root), node, str(index), str(number))
        return await asyncio.create_subprocess_exec(*command)

    renderer = Renderer(paths.model)
    supervisor = Supervisor(paths, config, pool, node, stop_ids=renderer.stop_ids, start_host=start_host)
    usage.units = [(pool.gpus, slot.meter) for slot in supervisor.slots]
    usage.pids, usage.generated = supervisor.engine_pids, supervisor.generated
    leaving: set[asyncio.Task[None]] = set()

    ends = ends_at(config, "rollout", index)
    if math.isfinite(ends):
        os.environ["SLURM_JOB_END_TIME"] = f"{ends:.0f}"  # for the hosts

    def leave() -> None:
        if not leaving:
            within_s = min(ends - time.time(), DAY_S) - CLOSING_S
            leaving.add(asyncio.create_task(supervisor.leave(max(1.0, within_s))))

    def leave_now() -> None:
        """Told by Slurm: there may be less time than until the limit."""
        within_s = max(1.0, config.slurm_of("rollout", index).signal_s - CLOSING_S)
        asyncio.get_running_loop().call_later(within_s, supervisor.stop.set)
        leave()

    supervisor.on_leave = leave
    on_signal(supervisor.stop.set, leave_now)
    lost = asyncio.create_task(_end_without_control(ControlWatch(paths, config), supervisor.stop))
    try:
        await supervisor.run()
    finally:
        lost.cancel()


async def _end_without_control(watch: ControlWatch, stop: asyncio.Event) -> None:
    while not watch.gone():  # noqa: ASYNC110 (a file changes, no event)
        await asyncio.sleep(ControlWatch.LOOK_S)
    stop.set()


async def host(paths: RunPaths, config: Config, node: str, index: int, number: int) -> None:
    """An agent loops' process, started by its node's supervisor."""
    from hpcrl.rollout.engine import VllmEngine
    from hpcrl.rollout.environments import load_family
    from hpcrl.rollout.loop import Where
    from hpcrl.rollout.render import Renderer
    from hpcrl.rollout.server import SOCKET
    from hpcrl.rollout.supervisor import Link, engine_folder, node_folder
    from hpcrl.store.link import LogClient
    from hpcrl.workers.guest import Guest, ahead, configure_dask
    from hpcrl.workers.hosts import Host, serve

    configure_dask()
    pool = config.pool("rollout", index)
    folder = node_folder(paths, node)
    renderer = Renderer(paths.model)
    async with LogClient(folder / "log.sock") as log:
        engines = [
            VllmEngine(
                engine_folder(folder, k) / SOCKET, stop_ids=renderer.stop_ids, max_model_len=pool.max_model_len,
                name=f"engine {node}-{k}", seeds=pool.gpus > 0,
            )
            for k in range(pool.engines)
        ]  # fmt: skip
        served = Host(
            paths, config, where=Where(node=node, job=job_id(), boot_id=boot_id()), concurrent=pool.concurrent,
            family=load_family(config.environment.name, config.environment.options), renderer=renderer, log=log,
            engines=engines, supervisor=Link(folder), ends=ends_at(config, "rollout", index),
        )  # fmt: skip
        serve(served)
        local = folder / f"dask-{number}"
        guest = Guest(
            paths, config, f"host-{node}-{number}", served.call, nthreads=ahead(pool.concurrent) + 8, local=local
        )
        served.guest = guest
        leaving: set[asyncio.Task[None]] = set()

        async def leave() -> None:
            await served.leave()
            guest.stop.set()

        on_signal(guest.stop.set, lambda: leaving.add(asyncio.create_task(leave())))
        die = lambda _: os._exit(3)  # noqa: E731
        log.closed.add_done_callback(die)  # without its log a host can promise nothing
        announcing = asyncio.create_task(served.announce())
        threading.Thread(target=_end_when_stuck, args=(served,), daemon=True).start()
        try:
            await guest.serve()
        finally:
            announcing.cancel()
            log.closed.remove_done_callback(die)
            await served.close()


def _end_when_stuck(served: Any) -> None:
    """An environment that blocks holds up every loop of its host, deadlines included: then a new host must do."""
    while time.monotonic() - served.beat < STUCK_S:
        time.sleep(5.0)
    logger.error("this host's event loop stood still for %g s; where each thread is, the job's log says", STUCK_S)
    faulthandler.dump_traceback()
    os._exit(4)


# ---- sandbox ------------------------------------------------------------------------------------------------------


async def sandbox(paths: RunPaths, config: Config, index: int) -> None:
    from hpcrl.sandbox.backend import find_backend
    from hpcrl.sandbox.pool import Pool
    from hpcrl.workers.guest import Guest, ahead, configure_dask
    from hpcrl.workers.sandboxes import SandboxNode

    configure_dask()
    settings = config.pool("sandbox", index)
    node = node_id(f"s{index}")
    pool = Pool(settings, find_backend())
    served = SandboxNode(paths, config, pool, ahead(settings.sessions), node)
    local = paths.private() / f"dask-{node}"
    guest = Guest(paths, config, f"sandbox-{node}", served.call, nthreads=1, local=local)
    served.guest = guest
    within_s = max(1.0, config.slurm_of("sandbox", index).signal_s - CLOSING_S)
    leaving: list[asyncio.Task[None]] = []
    on_signal(guest.stop.set, lambda: leaving.append(asyncio.create_task(served.leave(within_s))))
    await served.start()
    try:
        await guest.serve()
    finally:
        await served.close()


# ---- learner ------------------------------------------------------------------------------------------------------


def learner(paths: RunPaths, config: Config, control_number: int, usage: Usage) -> None:
    """One rank. Its master's port is agreed on through a file of this job, so that no two runs meet."""
    from hpcrl.learner.train import run_learner

    stopping = False

    def stop(*_: object) -> None:
        nonlocal stopping
        stopping = True

    for number in (signal.SIGTERM, signal.SIGUSR2):
        signal.signal(number, stop)
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    rank, world = task_rank(), config.learner.ranks
    meeting = paths.control / f"learner-{job_life()}.json"
    host = host_of(config, config.learner.interface)
    for library in ("GLOO", "NCCL"):
        os.environ[f"{library}_SOCKET_IFNAME"] = interface_of(host)
    listener = None
    if rank == 0:
        listener = listener_of(config, host)
        publish_json(meeting, {"address": host, "port": listener.getsockname()[1]})
    row = _wait_for(meeting, 150)  # rank 0's node may be another: NFS shows a new file up to 60 s late
    watch = ControlWatch(paths, config)
    ends = ends_at(config, "learner", 0)
    stop_now = lambda needed_s: stopping or watch.gone() or time.time() + needed_s > ends  # noqa: E731
    meter = Meter()
    usage.units = [(config.learner.gpus, meter)]
    run_learner(paths, config, rank, world, row["address"], row["port"], stop_now, control_number, listener, meter)
    if rank == 0:
        meeting.unlink(missing_ok=True)


def _wait_for(path: Path, seconds: float) -> dict[str, Any]:
    until = time.monotonic() + seconds
    while time.monotonic() < until:
        row = read_json(path)
        if row is not None:
            return row
        time.sleep(0.05)
    raise HpcrlError(f"{path}: rank 0 did not write it within {seconds:g} s")


def main(what: str, root: str, name: str = "", *numbers: str) -> None:
    """`submit RUN ROLE INDEX CONTROL [AFTER]` hands a role's job to the executor, `run RUN ROLE INDEX CONTROL` is one
    that has no pickle, `control RUN` is control, `host RUN NODE INDEX NUMBER` a host."""
    paths = RunPaths.of(root)
    if what == "run":
        signal.signal(signal.SIGUSR2, signal.SIG_IGN)  # until the role knows what to do
        run_role(root, name, int(numbers[0]), int(numbers[1]))
    elif what == "control":
        die_with_parent()
        start_logging(paths.logs, "control-0", job_id())
        try:
            asyncio.run(control(paths, load_resolved(paths.config)))
        except ConfigError as error:  # as it is, no control can run
            logger.error("%s", error)
            publish_json(paths.stopped, {"outcome": f"failed: {error}", "wall": time.time()})
            sys.exit(FINAL)
    elif what == "submit":
        from hpcrl import roles

        # By the module's own name: as __main__ the job could not find it.
        index, control_number, after = int(numbers[0]), int(numbers[1]), "".join(numbers[2:])
        body = functools.partial(roles.run_role, root, name, index, control_number)
        try:
            launch.submit_here(paths, name, index, body, after)  # type: ignore[arg-type]
        except HpcrlError as error:
            sys.exit(str(error))
    else:
        start_logging(paths.logs, f"host-{name}-{numbers[1]}", job_id())
        asyncio.run(host(paths, load_resolved(paths.config), name, int(numbers[0]), int(numbers[1])))


if __name__ == "__main__":
    main(*sys.argv[1:])
