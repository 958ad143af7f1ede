"""The commands that make, end, continue and resize a run."""

from __future__ import annotations

import contextlib
import itertools
import os
import re
import shutil
import signal
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Annotated

import typer

from hpcrl import config, launch
from hpcrl.cli.common import ConfigFile, RunFolder, Sets, fail, refuse_running
from hpcrl.cli.looks import heartbeat, print_summary, state_of
from hpcrl.config import Config
from hpcrl.layout import RunPaths, publish, publish_json, read_json
from hpcrl.types import ConfigError, HpcrlError, StoreError, is_number

WATCH_S = 0.5
STOP_S = 600.0  # that `hpcrl stop` waits for a control that winds down
HANG_S = 150.0  # without a heartbeat, after which a control is held to hang
ENDING_S = 90.0  # that Slurm may take to end a job that was cancelled
RESERVE_BYTES = 4 << 20  # kept aside in the run folder, so that a full disk can still be reported

app = typer.Typer()


@app.command()
def train(
    file: ConfigFile,
    sets: Sets = None,
    run: Annotated[Path | None, typer.Option("--run", help="The run folder to make. [default: runs/NAME-TIME]")] = None,
    detach: Annotated[bool, typer.Option("--detach", help="Submit the run to Slurm, don't watch it.")] = False,
    dry_run: Annotated[bool, typer.Option("--dry-run", help="Print what each job would be, and stop.")] = False,
) -> None:
    """Start a run and watch it to its end. Ctrl-C stops a local one in order, and leaves one of Slurm's jobs alone;
    `hpcrl resume` continues a stopped one."""
    settings = config.load(file, sets or ())
    check_detach(settings, detach)
    if settings.launch.executor != "local" and re.search(r"[%\x00-\x1f\x7f\\]", str((run or Path()).absolute())):
        raise ConfigError(
            f"{str(run)!r}: Slurm's file names can't have %, \\ or control characters; give another --run"
        )
    if dry_run:
        print_scripts(run or Path("runs") / settings.name, settings)
        return
    folder = run or Path("runs") / f"{settings.name}-{time.strftime('%Y%m%d-%H%M%S')}"
    if folder.exists():
        is_run = RunPaths(folder).config.exists()
        what = f"continue it with `hpcrl resume {folder}` or give another --run" if is_run else "give another --run"
        raise ConfigError(f"{folder}: this folder exists; {what}")
    check(settings)
    try:
        paths = make_run(folder, settings)
    except KeyboardInterrupt:
        sys.exit(f"hpcrl: interrupted before anything was started; {folder} is removed")
    begin(paths, settings, detach)


def begin(paths: RunPaths, settings: Config, detach: bool, prepare: Callable[[], None] = lambda: None) -> None:
    if not detach:
        sys.exit(watch_to_end(paths, settings, prepare))
    job = _start(paths, settings, prepare)
    print(f"job {job.id} is its control; `hpcrl watch {paths.root}` shows it, `hpcrl stop {paths.root}` ends it")


def _start(paths: RunPaths, settings: Config, prepare: Callable[[], None]) -> launch.Job:
    try:
        return launch.start(paths, settings, prepare)
    except ConfigError:
        raise
    except HpcrlError as error:
        raise HpcrlError(f"{error}; the run is made, `hpcrl resume {paths.root} --set …` goes on with it") from error


def check_detach(settings: Config, detach: bool) -> None:
    executor = settings.launch.executor
    if detach and executor != "slurm":
        raise ConfigError(f"launch.executor: is {executor!r}, whose jobs end with this command; --detach needs 'slurm'")


@app.command()
def resume(
    run: RunFolder,
    sets: Sets = None,
    detach: Annotated[bool, typer.Option("--detach", help="Submit the run to Slurm, don't watch it.")] = False,
) -> None:
    """Continue a run that was stopped or broke off: next update, nothing lost, nothing trained twice."""
    from hpcrl.learner.models import ensure_model

    paths = RunPaths.of(run)
    old = config.load_resolved(paths.config)
    settings = config.with_sets(old, sets or ())
    config.check_resume(old, settings)
    check_detach(settings, detach)
    refuse_control(paths)
    if settings.launch.fleet == "presubmitted":
        refuse_running(paths)  # they would be doubled
    stopped = read_json(paths.stopped)
    if stopped and stopped.get("outcome") == "done":
        print(f"{run}: is done; nothing to resume")
        return
    check(settings)
    paths.make()  # it may have been cut short while it was made
    ensure_model(settings.model, paths, settings.seed)
    launch.make_certificate(paths)

    def prepare() -> None:
        if settings != old:
            publish(paths.config, config.dump(settings))
        paths.stopped.unlink(missing_ok=True)
        for asked in (*paths.inbox.glob("stop-*.json"), *paths.inbox.glob("scale-*.json")):  # of the control before
            asked.unlink(missing_ok=True)
        reserve(paths)

    begin(paths, settings, detach, prepare)


def refuse_control(paths: RunPaths) -> None:
    """Raises ConfigError while control lives. One that was cancelled may take a while to end."""
    until, run = time.monotonic() + ENDING_S, paths.root
    while (job := launch.current(paths)) is not None:
        state = state_of(paths, job)
        if not state.alive:
            return
        if state.name not in ("COMPLETING", "UNKNOWN") or time.monotonic() > until:
            raise ConfigError(f"{run}: is running (job {job.id}); watch it with `hpcrl watch {run}`")
        time.sleep(look_s(paths))


@app.command()
def stop(run: RunFolder) -> None:
    """End all of a run's roles in order. What is open continues at the next `hpcrl resume`."""
    paths = RunPaths.of(run)
    if launch.at_rest(paths):
        print(f"{run}: has ended already; none of its jobs is left to stop")
        return
    ask_to_stop(paths)  # first: control needs no Slurm for it
    try:
        control = launch.current(paths)
        state = state_of(paths, control)
    except launch.SlurmError as error:
        raise launch.SlurmError(f"{error}; control, if it runs, has been asked to stop all the same") from error
    if control is not None and state.name == "SUSPENDED":
        print(f"{run}: control is suspended and can't do it: `scontrol resume {control.id}`", flush=True)
    if control is not None and state.name == "PENDING":
        launch.send([control], signal.SIGKILL)
    elif state.alive:
        print(f"{run}: stopping: trajectories in flight are parked, the store is sealed …", flush=True)
        until = time.monotonic() + STOP_S
        seen, moved = None, time.monotonic()  # of control's heartbeat
        while state_of(paths, control).alive and time.monotonic() < until and time.monotonic() - moved < HANG_S:
            time.sleep(look_s(paths))
            control = launch.current(paths)  # the next, where it was about to hand over
            if seen != (seen := (heartbeat(paths) or {}).get("wall")):
                moved = time.monotonic()
    if state_of(paths, control).alive and read_json(paths.stopped) is None:
        publish_json(paths.stopped, {"outcome": "stopped", "wall": time.time()})  # it hangs: not to be started again
    left = end_jobs(paths)
    shutil.rmtree(paths.private(), ignore_errors=True)
    if living := launch.living(paths):
        names = ", ".join(f"{job.role}-{job.index} (job {job.id})" for job in living)
        print(f"hpcrl: {run}: still there: {names}", file=sys.stderr)
        sys.exit(1)
    if strange := launch.complaints(paths):
        raise StoreError(f"{run}: stopped, as far as its jobs are known: {strange[0]}")
    print(f"{run}: stopped" + (f" ({left} jobs had to be ended by hand)" if left else ""))


@app.command()
def scale(
    run: RunFolder,
    sizes: Annotated[list[str], typer.Argument(help="How many jobs a pool is to have.", metavar="POOL=JOBS")],
) -> None:
    """Change how many rollout or sandbox jobs a running run has. Those that are too many move their trajectories."""
    paths = RunPaths.of(run)
    settings = config.load_resolved(paths.config)
    sets = [_sized(settings, size) for size in sizes]
    config.with_sets(settings, sets)
    if settings.launch.fleet == "presubmitted":
        raise ConfigError(f"launch.fleet: is presubmitted; stop it, then `hpcrl resume {run} --set {sets[0]}`")
    if not launch.alive(launch.current(paths)):
        raise ConfigError(f"{run}: is not running; `hpcrl resume {run} --set {sets[0]}` starts it with that")
    publish_json(paths.inbox / f"scale-{time.time_ns()}.json", {"command": "scale", "sets": sets})
    print(f"{run}: asked for {', '.join(sets)}; `hpcrl status {run}` shows the jobs")


def _sized(settings: Config, size: str) -> str:
    name, equals, count = size.partition("=")
    pools = [("rollout", pool) for pool in settings.rollout] + [("sandbox", pool) for pool in settings.sandbox]
    found = [(role, pool) for role, pool in pools if pool.name == name]
    if not equals or not is_number(count) or not found:
        names = ", ".join(pool.name for _, pool in pools)
        raise ConfigError(f"{size}: must be POOL=JOBS, with one of these pools: {names}")
    role, pool = found[0]
    if role == "rollout" and int(count) < 1:
        raise ConfigError(f"{size}: a pool of rollout jobs has at least 1; `hpcrl stop` ends the run")
    if pool is not getattr(settings, role)[-1]:  # jobs are numbered through a role's pools
        raise ConfigError(f"{size}: only the last pool of a role can change while it runs; stop, and resume with --set")
    return f"{role}.{name}.jobs={count}"


@app.command("config")
def show_config(file: ConfigFile, sets: Sets = None) -> None:
    """Print the resolved config, every default filled in, as JSON."""
    print(config.dump(config.load(file, sets or ())), end="")


# ---- helpers --------------------------------------------------------------------------------------------------------


def check(settings: Config) -> None:
    """Refuse at once what would fail later: devices, ports, environment, isolation."""
    from hpcrl.node import free_ports, ports_needed
    from hpcrl.rollout.caps import load_cap
    from hpcrl.rollout.environments import load_family

    local_run = settings.launch.executor == "local"
    if local_run:
        launch.local.check_devices(settings)
    if settings.launch.executor == "steps":
        for role, index in launch.wanted(settings):
            launch.steps.allocation_of(settings, role, index)
        if settings.slurm.modules or settings.slurm.setup:
            print("slurm.modules, slurm.setup: not for steps, which have what this shell has", file=sys.stderr)
    if settings.store.durability == "local":
        print("store.durability = local: the latest steps of a node that is lost are lost with it", file=sys.stderr)
    free, needed = free_ports(settings), ports_needed(settings)
    if local_run and free < needed:
        ports = settings.launch.ports
        raise ConfigError(f"launch.ports: {free} free ports in {ports}, this run needs {needed}; give a wider range")
    load_cap(settings.tools)
    family = load_family(settings.environment.name, settings.environment.options)
    wanted = settings.evaluation.tasks
    found = sum(1 for _ in itertools.islice(family.tasks("heldout", 0), wanted))
    if found < wanted:
        raise ConfigError(f"evaluation.tasks: {wanted} wanted, environment {family.name!r} has {found} held-out tasks")
    has_sandbox = any(pool.jobs for pool in settings.sandbox)
    if family.needs_sandbox and not has_sandbox:
        raise ConfigError(f"sandbox: environment {family.name!r} needs one, no pool has jobs; add a [[sandbox]] table")
    if has_sandbox and local_run:
        from hpcrl.sandbox.backend import find_backend

        find_backend()


def print_scripts(folder: Path, settings: Config) -> None:
    for job, script in launch.scripts(RunPaths(folder.expanduser().absolute()), settings):
        print(f"# ---- {job} ----\n{script}")


def make_run(folder: Path, settings: Config) -> RunPaths:
    """A new run folder with its config, model and certificate; nothing is left of it when that fails."""
    from hpcrl.learner.models import ensure_model

    paths = RunPaths(folder.expanduser().resolve())
    try:
        paths.root.parent.mkdir(parents=True, exist_ok=True)
        paths.root.mkdir()
    except FileExistsError as error:
        raise ConfigError(f"{folder}: another run has just made this folder") from error
    except OSError as error:
        raise ConfigError(f"{folder}: can't be made: {error.strerror or error}") from error
    try:
        paths.make()
        publish(paths.config, config.dump(settings))
        print(f"run folder: {paths.root}", flush=True)
        began = time.monotonic()
        print(f"making the model ({settings.model.source}) …", flush=True)
        ensure_model(settings.model, paths, settings.seed)
        print(f"model: {settings.model.source} ({time.monotonic() - began:.0f} s)", flush=True)
        launch.make_certificate(paths)
        reserve(paths)
    except OSError as error:
        shutil.rmtree(paths.root, ignore_errors=True)
        raise ConfigError(f"{folder}: can't be written: {error.strerror or error}") from error
    except BaseException:
        shutil.rmtree(paths.root, ignore_errors=True)
        raise
    return paths


def reserve(paths: RunPaths) -> None:
    with paths.reserve.open("wb") as file:
        os.posix_fallocate(file.fileno(), 0, RESERVE_BYTES)


def watch_to_end(paths: RunPaths, settings: Config, prepare: Callable[[], None]) -> int:
    """Keep control running and show the run until it came to rest; the exit code."""
    from hpcrl.observe.live import Watch

    stopping = leaving = False

    def interrupt(*_: object) -> None:
        nonlocal stopping, leaving
        if settings.launch.executor == "slurm":
            leaving = True
        elif not stopping:
            stopping = True
            ask_to_stop(paths)

    for number in (signal.SIGINT, signal.SIGTERM):
        signal.signal(number, interrupt)
    job = _start(paths, settings, prepare)
    restarts = updates = 0
    told, waiting = False, ""
    look = LookAt(job, settings)
    with Watch() as view:
        while look.alive:
            if not paths.config.exists():
                launch.send([job], signal.SIGKILL)
                print(f"hpcrl: {paths.root}: the run folder is gone; its jobs end by themselves", file=sys.stderr)
                return 1
            row = heartbeat(paths)
            if row is not None and row.get("incarnation"):
                try:
                    view.show(row)
                except BrokenPipeError:  # nobody reads on; the run is to go on all the same
                    os.dup2(os.open(os.devnull, os.O_WRONLY), 1)
                if row["updates"]["done"] > updates:  # the run moves: what died before is forgiven
                    restarts, updates = 0, row["updates"]["done"]
            elif (waits := look.waits()) != waiting:  # for its allocation
                waiting = waits
                view.say(waits)
            if leaving:
                print(f"\nthe run goes on: `hpcrl watch {paths.root}` shows it, `hpcrl stop {paths.root}` ends it")
                return 0
            if stopping and not told:
                told = True
                view.say("stopping: trajectories in flight are parked, the store is sealed …")
            time.sleep(WATCH_S)
            if not look.alive and read_json(paths.stopped) is None:
                if (later := launch.successor(paths, job)) is not None:  # it handed over
                    job, look = later, LookAt(later, settings)
                    continue
                if look.state is not None and look.state.name == "CANCELLED":
                    what = f"`hpcrl stop {paths.root}` ends the other jobs, `hpcrl resume {paths.root}` goes on"
                    print(f"hpcrl: job {job.id}, control, was cancelled; {what}", file=sys.stderr)
                    return 1
                if full := disk_full(paths):
                    end_jobs(paths)
                    return fail(full)
                if stopping or restarts >= settings.launch.restarts:
                    break
                restarts += 1
                view.say(f"control (job {job.id}) died; starting it again ({restarts} of {settings.launch.restarts})")
                job = launch.submit(paths, "control")
                look = LookAt(job, settings)
    end_jobs(paths)
    shutil.rmtree(paths.private(), ignore_errors=True)
    outcome = (read_json(paths.stopped) or {"outcome": "failed: control died; see logs/submitit/control-0"})["outcome"]
    print_summary(paths)
    state, _, reason = outcome.partition(": ")
    if state == "full":
        return fail(reason)
    if state == "failed":
        print(f"hpcrl: the run failed: {reason}", file=sys.stderr)
        return 1
    return 0


def disk_full(paths: RunPaths) -> str:
    free = shutil.disk_usage(paths.root).free
    if free > RESERVE_BYTES:
        return ""
    return f"{paths.root}: disk full ({free} bytes free); free some space, then `hpcrl resume {paths.root}`"


def ask_to_stop(paths: RunPaths) -> None:
    publish_json(paths.inbox / f"stop-{time.time_ns()}.json", {"command": "stop"})


def end_jobs(paths: RunPaths) -> int:
    """End whatever of a run still lives; how many jobs that were."""
    alive = launch.living(paths)
    settings = config.load_resolved(paths.config)
    if settings.launch.executor == "slurm":
        launch.slurm.cancel_strays(paths, settings)
    launch.send(alive, signal.SIGTERM)
    until = time.monotonic() + (15 if all(job.executor == "local" for job in alive) else 60)
    left = alive
    while left and time.monotonic() < until:
        time.sleep(look_s(paths))
        left = launch.living(paths)
    launch.send(left, signal.SIGKILL)
    until = time.monotonic() + 60
    while launch.living(paths) and time.monotonic() < until:  # Slurm's epilogs take a while
        time.sleep(look_s(paths))
    return len(alive)


def look_s(paths: RunPaths) -> float:
    """How often to ask after jobs while one waits for their end."""
    return 0.2 if config.load_resolved(paths.config).launch.executor == "local" else 2.0


class LookAt:
    """Whether a job lives: asked of the executor no more often than the config says; as before while it doesn't say."""

    def __init__(self, job: launch.Job, settings: Config) -> None:
        self._job, self._every_s = job, 0.0 if job.executor == "local" else settings.launch.look_s
        self._looked, self._listed = 0.0, time.monotonic()
        self.state: launch.State | None = None  # as the executor has it

    @property
    def alive(self) -> bool:
        if (self.state is None or self.state.alive) and time.monotonic() - self._looked > self._every_s:
            self._looked = time.monotonic()
            with contextlib.suppress(launch.SlurmError):
                found = launch.look([self._job])[self._job.key]
                if found.name != launch.GONE.name:
                    self._listed = time.monotonic()
                elif time.monotonic() - self._listed < launch.GONE_S.get(self._job.executor, 0.0):
                    return True  # an answer may be cut short
                self.state = found
        return self.state is None or self.state.alive

    def waits(self) -> str:
        """What a person who waits for Slurm wants to know; "" of a job that no queue holds."""
        if self.state is None or self._job.executor == "local":
            return ""
        why = f" ({self.state.reason})" if self.state.reason else ""
        return f"{self._job.role}-{self._job.index}: job {self._job.id}, {self.state.name.lower()}{why}"
