"""Configuration: TOML to one frozen tree.

Owns every default, the file format (`include`, `--set`), and the errors that a wrong key or value gives. Nothing else
in hpcrl reads a TOML file; nothing here reads the environment.

    load(path, sets) -> Config -> dump() -> config.json in the run folder -> load_resolved()

Over 400 lines, since every key with its default stands here, and nowhere else.
"""

from __future__ import annotations

import copy
import difflib
import json
import math
import re
import tomllib
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Annotated, Any, Literal

from pydantic import (
    AfterValidator,
    BaseModel,
    BeforeValidator,
    ConfigDict,
    Field,
    ValidationError,
    field_validator,
    model_validator,
)

from hpcrl.types import ConfigError, is_number


class Table(BaseModel):
    model_config = ConfigDict(extra="forbid", frozen=True, strict=True, allow_inf_nan=False)


Positive = Annotated[int, Field(gt=0)]
Count = Annotated[int, Field(ge=0)]
# TOML writes whole floats as 1.0; we take 1 for them as well.
Number = Annotated[float, Field(strict=False, ge=0)]
PositiveNumber = Annotated[float, Field(strict=False, gt=0)]


def _text(pattern: str, what: str) -> AfterValidator:
    """Refuses what the pattern doesn't match in full, in words that say what is allowed."""

    def check(text: str) -> str:
        if not re.fullmatch(pattern, text):
            raise ValueError(f"must be {what}, found {text!r}")
        return text

    return AfterValidator(check)


Name = Annotated[str, _text(r"[A-Za-z][A-Za-z0-9_-]*", "letters, digits, _ and -, a letter first")]


class Model(Table):
    """Where the starting weights come from."""

    source: str = "tiny"  # "tiny" or "smollm2" (made by `hpcrl model`), or a Hugging Face folder
    dtype: Literal["float32", "bfloat16"] = "float32"


class EnvironmentTable(Table):
    name: str = "find"
    options: dict[str, Any] = Field(default_factory=dict)  # handed to the environment as they are


class Tools(Table):
    """What of a tool's output gets into the context."""

    output_bytes: Count = 0  # the most that the model sees of one result; 0: all of it
    cap: str = "head_tail"  # what cuts longer ones; or "package.module:function"
    keep_unseen: bool = False  # whether the store keeps the whole of what was cut

    @field_validator("cap")
    @classmethod
    def _cap(cls, cap: str) -> str:
        if cap != "head_tail" and not re.fullmatch(r"\w+(\.\w+)*:\w+(\.\w+)*", cap):
            raise ValueError(f"must be 'head_tail' or 'package.module:function', found {cap!r}")
        return cap

    @model_validator(mode="after")
    def _cuts(self) -> Tools:
        if not self.output_bytes and (self.cap != "head_tail" or self.keep_unseen):
            raise ValueError("cap and keep_unseen need output_bytes, beyond which output is cut; it is 0")
        return self


class SamplingTable(Table):
    temperature: PositiveNumber = 1.0
    max_tokens: Positive = 64  # per step
    max_steps: Positive = 8
    max_context: Positive = 2048  # tokens
    deadline_s: PositiveNumber = 600.0  # a trajectory's life


class Phase(Table):
    """One stretch of training. An update fires at whichever of its triggers is met first."""

    name: Name
    objective: Literal["sft", "grpo"] = "grpo"
    lr: Number = 1e-6
    updates: Positive = 1
    trajectories: Count = 0  # trigger: this many scored trajectories (0: not a trigger)
    steps: Count = 0  # trigger: this many steps
    tokens: Count = 0  # trigger: this many sampled tokens
    seconds: Number = 0.0  # trigger: this long since the last update, with at least one group
    group_size: Positive = 1  # sibling trajectories per task
    max_lag: Count = 1  # versions between sampling and training; older tokens are masked
    clip_low: Number = 0.2
    clip_high: Number = 0.28
    is_cap: PositiveNumber = 2.0  # truncated importance sampling: cap of the learner/engine ratio
    publish_every: Count = 1  # updates between published versions; 0: at the phase's end only

    @property
    def from_expert(self) -> bool:
        return self.objective == "sft"

    @model_validator(mode="after")
    def _has_trigger(self) -> Phase:
        if not (self.trajectories or self.steps or self.tokens or self.seconds):
            raise ValueError("set at least one trigger: trajectories, steps, tokens or seconds")
        if self.objective == "grpo" and self.group_size < 2:
            raise ValueError("group_size must be at least 2 for objective grpo (its baseline is the group's mean)")
        return self


class Evaluation(Table):
    """Held-out success at the start and after each phase."""

    tasks: Count = 400
    temperature: PositiveNumber = 1.0


def seconds_of(text: str) -> int:
    """Slurm's forms of a time: M, M:S, H:M:S, D-H, D-H:M, D-H:M:S. Raises ValueError for anything else."""
    found = re.fullmatch(r"(?:(\d+)-)?(\d+)(?::(\d+))?(?::(\d+))?", text, re.ASCII)
    if found is None:
        raise ValueError(f"{text!r} is no time that Slurm knows; write minutes, H:MM:SS or D-HH:MM:SS")
    days, *rest = found.groups()
    first, second, third = (int(part or 0) for part in rest)
    if days is not None:
        return ((int(days) * 24 + first) * 60 + second) * 60 + third
    if rest[2] is not None:
        return (first * 60 + second) * 60 + third
    return first * 60 + second


def _time(value: object) -> str:
    text = str(value) if isinstance(value, str | int) and not isinstance(value, bool) else repr(value)
    if not seconds_of(text):
        raise ValueError("must be more than nothing")
    return text


Memory = Annotated[str, _text(r"([0-9]+[KMGT]?)?", "a number and K, M, G or T, like 500M")]
Line = Annotated[str, _text(r"[^\x00-\x1f\x7f]*", "one line, without control characters")]
Directive = Annotated[str, _text(r"--[a-z][^\x00-\x1f\x7f]*", "an option of sbatch's, like --mail-type=END")]
OURS = ("array", "output", "error", "job-name", "wrap", "chdir", "dependency", "parsable", "test-only")  # of directives


class Slurm(Table):
    """What a job asks Slurm for. A pool's `slurm`, `learner.slurm` and `control.slurm` overrule it, key by key."""

    account: Line = ""
    partition: Line = ""
    qos: Line = ""
    constraint: Line = ""
    exclude: Line = ""  # nodes
    time: Annotated[str, BeforeValidator(_time)] = "1-00:00:00"  # the limit of each job, in any of Slurm's forms
    cpus: Count = 0  # per task; 0: what the role needs
    memory: Memory = ""  # per node, as "16G"; a site takes this or memory_per_cpu
    memory_per_cpu: Memory = ""
    exclusive: bool = False
    gres: Line = "gpu:{gpus}"  # of jobs that need GPUs
    signal_s: Positive = 120  # how long before its end a job is told of it
    lead_s: Count = 300  # how long before that a rollout or sandbox job's successor is submitted
    requeue: bool = True
    het_group: Count = 0  # with executor steps: the component of a heterogeneous job
    modules: tuple[Line, ...] = Field(default=(), strict=False)  # to load
    setup: tuple[Line, ...] = Field(default=(), strict=False)  # lines of the script, before Python starts
    directives: tuple[Directive, ...] = Field(default=(), strict=False)  # more of sbatch's options: "--key=value"
    container: Line = ""  # image in which Python runs
    container_runtime: Literal["apptainer", "singularity", "pyxis"] = "apptainer"
    container_python: Line = "python3"

    @model_validator(mode="after")
    def _one_memory(self) -> Slurm:
        if self.memory and self.memory_per_cpu:
            raise ValueError("memory and memory_per_cpu exclude each other")
        if self.signal_s >= min(seconds_of(self.time), 65536):
            raise ValueError(f"signal_s ({self.signal_s}) must be less than time ({self.time}), and than 65536")
        for line in self.directives:
            if line.removeprefix("--").partition("=")[0] in OURS:
                raise ValueError(f"directives: {line!r} can't be given, it is hpcrl's to set")
        return self

    def ahead_s(self, needed_s: float = 0.0) -> int:
        """How long before its end a job's successor is submitted; 0 where that would be nearly all the time.

        `needed_s`: how long before its end such a job leaves, where that is more than `signal_s`.
        """
        ahead_s = math.ceil(max(self.signal_s, needed_s)) + self.lead_s
        return ahead_s if 2 * ahead_s < seconds_of(self.time) else 0


SlurmHere = dict[str, Any]  # some keys of Slurm


class Rollout(Table):
    """A pool of rollout nodes."""

    name: Name = "rollout"
    jobs: Positive = 1
    engines: Count = 1  # per node; 0: for trajectories of the expert alone
    hosts: Positive = 1  # per node: processes that run agent loops
    gpus: Count = 0  # per engine; 0: a CPU engine
    tensor_parallel: Positive = 1
    concurrent: Positive = 64  # trajectories per host
    max_model_len: Positive = 2048
    max_num_seqs: Positive = 64
    memory_gib: PositiveNumber = 1.0  # KV cache of a CPU engine
    memory_share: Annotated[float, Field(gt=0, le=1)] = 0.9  # of a GPU's memory
    block_size: Count = 0  # 0: the engine's default
    threads: Count = 1  # CPU threads of a CPU engine; 0: the engine's choice
    start_timeout_s: PositiveNumber = 600.0
    probe_tolerance: PositiveNumber = 0.15  # mean |Δlogprob| between engine and learner on a version's probe
    slurm: SlurmHere = {}


class SandboxPool(Table):
    """A pool of sandbox nodes."""

    name: Name = "sandbox"
    jobs: Count = 1
    minimum_jobs: Positive = 1  # with maximum_jobs: control changes `jobs` between the two, by need
    maximum_jobs: Count = 0  # 0: jobs stays as it is
    sessions: Positive = 64  # sandboxes per node
    warm: Count = 4  # of these, started ahead
    memory_mib: Positive = 512  # per sandbox
    processes: Positive = 64
    disk_mib: Positive = 64
    command_timeout_s: PositiveNumber = 30.0
    slurm: SlurmHere = {}

    @model_validator(mode="after")
    def _bounds(self) -> SandboxPool:
        if self.maximum_jobs and not self.minimum_jobs <= self.jobs <= self.maximum_jobs:
            raise ValueError(
                f"jobs ({self.jobs}) must be within minimum_jobs ({self.minimum_jobs}) and maximum_jobs "
                f"({self.maximum_jobs})"
            )
        return self


class Learner(Table):
    ranks: Positive = 1
    nodes: Positive = 1  # that these are spread over, evenly
    interface: str = ""  # by which ranks reach each other; "": launch.interface
    gpus: Count = 0  # per rank; 0: CPU
    threads: Positive = 1  # CPU threads per rank
    micro_batch_tokens: Positive = 16384  # padded tokens per forward
    checkpoint_every: Positive = 10  # updates
    keep_checkpoints: Positive = 2
    keep_versions: Positive = 8
    grad_clip: PositiveNumber = 1.0
    betas: tuple[Number, Number] = Field(default=(0.9, 0.95), strict=False)
    weight_decay: Number = 0.0
    collective_timeout_s: PositiveNumber = 600.0
    idle_s: Number = 0.0  # with Slurm: after so long without anything to train its job is released; 0: never
    slurm: SlurmHere = {}

    @model_validator(mode="after")
    def _even(self) -> Learner:
        if self.ranks % self.nodes:
            raise ValueError(f"ranks ({self.ranks}) must be a multiple of nodes ({self.nodes})")
        return self


class Control(Table):
    """The job of scheduler and driver."""

    slurm: SlurmHere = {}


class Store(Table):
    durability: Literal["shared", "local"] = "shared"  # local: on the node's disk first; lost with the node
    local_dir: Annotated[str, Field(pattern=r"^/")] = "/tmp"  # where that is; an absolute path
    segment_mib: Positive = 64
    segment_age_s: PositiveNumber = 60.0
    commit_interval_s: Number = 0.5  # the least time between two syncs of a node's log; 0.02 does on a local disk
    full_patience_s: Number = 60.0  # how long a full disk holds the run up before it ends the run in order
    compact_every_s: PositiveNumber = 300.0
    poll_s: PositiveNumber = 5.0  # between two looks at files that another node writes


class Launch(Table):
    executor: Literal["local", "slurm", "steps"] = "local"
    fleet: Literal["live", "presubmitted"] = "live"  # with slurm: control submits jobs; or all are submitted ahead
    lives: Positive = 4  # how many of each, one after the other
    interface: str = ""  # by which nodes reach each other (`ip addr` names them); "": Slurm's address of the node
    look_s: PositiveNumber = 5.0  # between two questions to Slurm
    gpu_hours: Number = 0.0  # that all jobs may use in all, then the run stops; 0: no limit
    ports: Annotated[str, Field(pattern=r"^[0-9]+-[0-9]+$")] = "20000-20999"
    dashboard: bool = True
    restarts: Count = 5  # replacements of a role's job without an update in between
    status_s: PositiveNumber = 5.0  # between two writes of control's heartbeat
    control_timeout_s: PositiveNumber = 600.0  # how long roles carry on without control

    @model_validator(mode="after")
    def _ports(self) -> Launch:
        if self.fleet == "presubmitted" and self.executor != "slurm":
            raise ValueError(f"fleet 'presubmitted' needs executor 'slurm', found {self.executor!r}")
        low, high = self.port_range
        if not 1024 <= low < high <= 65535:
            raise ValueError(f"ports must be LOW-HIGH within 1024-65535, found {self.ports}")
        return self

    @property
    def port_range(self) -> tuple[int, int]:
        """Lowest and highest, both included."""
        low, _, high = self.ports.partition("-")
        return int(low), int(high)


class Retries(Table):
    """How often a trajectory is taken up again, by the cause of what ended its attempt."""

    environment: Count = 2
    tool: Count = 2
    engine: Count = 5
    platform: Count = 10


class Config(Table):
    name: Name = "run"
    seed: Annotated[int, Field(ge=0)] = 0
    model: Model = Model()
    environment: EnvironmentTable = EnvironmentTable()
    tools: Tools = Tools()
    sampling: SamplingTable = SamplingTable()
    phase: tuple[Phase, ...] = Field(default=(), strict=False)
    evaluation: Evaluation = Evaluation()
    rollout: tuple[Rollout, ...] = Field(default=(Rollout(),), strict=False, min_length=1)
    sandbox: tuple[SandboxPool, ...] = Field(default=(SandboxPool(),), strict=False)
    learner: Learner = Learner()
    control: Control = Control()
    store: Store = Store()
    launch: Launch = Launch()
    slurm: Slurm = Slurm()
    retries: Retries = Retries()

    @model_validator(mode="after")
    def _names(self) -> Config:
        for key in ("phase", "rollout", "sandbox"):
            names = [row.name for row in getattr(self, key)]
            twice = sorted({name for name in names if names.count(name) > 1})
            if twice:
                raise ValueError(f"[[{key}]] names must differ, found {twice[0]!r} twice")
        if not self.phase:
            raise ValueError("at least one [[phase]] table is needed")
        samples = self.evaluation.tasks or any(not phase.from_expert for phase in self.phase)
        if samples and not any(pool.engines for pool in self.rollout):
            raise ValueError("rollout: no pool has engines, which phases of objective grpo and evaluations need")
        for pool in self.rollout:
            if self.sampling.max_context > pool.max_model_len:
                raise ValueError(
                    f"sampling.max_context ({self.sampling.max_context}) exceeds max_model_len "
                    f"({pool.max_model_len}) of rollout pool {pool.name!r}"
                )
        return self

    @model_validator(mode="after")
    def _budget(self) -> Config:
        gpus = self.learner.gpus + sum(pool.gpus for pool in self.rollout)
        if self.learner.idle_s and self.launch.fleet == "presubmitted":
            raise ValueError("learner.idle_s: is of no use where launch.fleet is presubmitted")
        if self.launch.executor == "slurm" and gpus and not self.launch.gpu_hours:
            raise ValueError("launch.gpu_hours: is 0; jobs that follow one another need a budget of GPU-hours")
        if any(pool.maximum_jobs for pool in self.sandbox):
            if len(self.sandbox) > 1:
                raise ValueError("sandbox: maximum_jobs needs a single pool, there are several")
            if self.launch.fleet == "presubmitted" or self.launch.executor == "steps":
                raise ValueError(
                    "sandbox: maximum_jobs needs a live fleet of jobs; here all are submitted at the start"
                )
        return self

    @model_validator(mode="after")
    def _slurm_of_each(self) -> Config:
        own = {"control": self.control.slurm, "learner": self.learner.slurm}
        own |= {f"rollout.{pool.name}": pool.slurm for pool in self.rollout}
        own |= {f"sandbox.{pool.name}": pool.slurm for pool in self.sandbox}
        for name, keys in own.items():
            try:
                self._slurm(keys)
            except ValidationError as error:
                said = [_explain(keys, row, Slurm, f"{name}.slurm") for row in error.errors()]
                raise ValueError("; ".join(said)) from error
        return self

    def _slurm(self, own: Mapping[str, Any]) -> Slurm:
        return Slurm.model_validate({**self.slurm.model_dump(), **own})

    def slurm_of(self, role: str, index: int) -> Slurm:
        """What a role's job asks for."""
        table = getattr(self, role) if role in ("control", "learner") else self.pool(role, index)
        return self._slurm(table.slurm)

    def gpus_of(self, role: str, index: int) -> int:
        """GPUs that a role's job has, on all its nodes."""
        if role == "learner":
            return self.learner.ranks * self.learner.gpus
        if role != "rollout":
            return 0
        pool = self.pool(role, index)
        gpus: int = pool.engines * pool.gpus
        return gpus

    def pool(self, role: str, index: int) -> Any:
        """The pool that the `index`-th job of a role belongs to: the last, of one that is no longer wanted."""
        *pools, last = getattr(self, role)
        for pool in pools:
            if index < pool.jobs:
                return pool
            index -= pool.jobs
        return last

    def phase_named(self, name: str) -> Phase:
        return next(phase for phase in self.phase if phase.name == name)


# Tables that a resume may change: all about size and pace. The rest defines the run, and so do these keys within.
LIVE_KEYS = ("rollout", "sandbox", "store", "launch", "retries", "learner", "evaluation", "slurm", "control")
FIXED_WITHIN = {"learner": ("grad_clip", "betas", "weight_decay")}


def load(path: Path, sets: Iterable[str] = ()) -> Config:
    """Read a TOML file with its includes, apply `key=value` settings, and check it.

    Raises ConfigError: it names the file or setting, the key, what was found and what is allowed.
    """
    try:
        tree = _read(path, ())
    except RecursionError as error:
        raise ConfigError(f"{path}: nested too deep") from error
    return _validate(_with(tree, sets), str(path))


def load_resolved(path: Path) -> Config:
    """Read back what `dump` wrote."""
    try:
        return _validate(json.loads(path.read_text()), str(path))
    except (OSError, json.JSONDecodeError) as error:
        raise ConfigError(f"{path}: can't be read as a resolved config ({error})") from error


def dump(config: Config) -> str:
    return json.dumps(config.model_dump(mode="json"), indent=1) + "\n"


def check_resume(old: Config, new: Config) -> None:
    """Raise ConfigError when `new` changes what defines the run, naming the key and both values."""
    before, after = old.model_dump(mode="json"), new.model_dump(mode="json")
    for key, keys in FIXED_WITHIN.items():
        for tree in (before, after):
            tree[f"{key} "] = {name: tree[key][name] for name in keys}
    for key in before:
        if key not in LIVE_KEYS and before[key] != after[key]:
            name, was, now = _difference(key.strip(), before[key], after[key])
            raise ConfigError(f"{name} is fixed for this run: it was {was!r}, now {now!r}; start a new run for that")


def with_sets(config: Config, sets: Iterable[str]) -> Config:
    return _validate(_with(config.model_dump(mode="json"), sets), "--set")


def _with(tree: dict[str, Any], sets: Iterable[str]) -> dict[str, Any]:
    for text in sets:
        try:
            _apply(tree, text)
        except ConfigError:
            raise
        except (TypeError, AttributeError, ValueError, RecursionError) as error:  # a tree of no such shape
            raise ConfigError(f"--set {text[:200]}: can't be applied to this config ({error})") from error
    return tree


def _difference(name: str, was: Any, now: Any) -> tuple[str, Any, Any]:
    if isinstance(was, dict) and isinstance(now, dict):
        for key in {**was, **now}:
            if was.get(key) != now.get(key):
                return _difference(f"{name}.{key}", was.get(key), now.get(key))
    if isinstance(was, list) and isinstance(now, list) and len(was) == len(now):
        for index, (left, right) in enumerate(zip(was, now, strict=True)):
            if left != right:
                label = left.get("name", index) if isinstance(left, dict) else index
                return _difference(f"{name}.{label}", left, right)
    return name, was, now


def _read(path: Path, seen: tuple[Path, ...]) -> dict[str, Any]:
    if path.resolve() in seen:
        raise ConfigError(f"{path}: includes itself")
    try:
        text = path.read_bytes().decode("utf-8-sig")
        tree = tomllib.loads(text.replace("\r\n", "\n"))
    except FileNotFoundError as error:
        raise ConfigError(f"{path}: no such config file") from error
    except (OSError, UnicodeDecodeError, tomllib.TOMLDecodeError) as error:
        raise ConfigError(f"{path}: not a TOML file that can be read: {error}") from error
    includes = tree.pop("include", [])
    if isinstance(includes, str):
        includes = [includes]
    if not (isinstance(includes, list) and all(isinstance(name, str) for name in includes)):
        raise ConfigError(f"{path}: include must be a path or a list of paths, found {includes!r}")
    base: dict[str, Any] = {}
    for name in includes:
        base = _merge(base, _read(path.parent / name, (*seen, path.resolve())))
    return _merge(base, tree)


def _merge(base: Mapping[str, Any], over: Mapping[str, Any]) -> dict[str, Any]:
    """`over` wins; tables merge by key, lists of named tables by name, everything else is replaced."""
    merged = copy.deepcopy(dict(base))
    for key, value in over.items():
        old = merged.get(key)
        if isinstance(old, dict) and isinstance(value, dict):
            merged[key] = _merge(old, value)
        elif isinstance(old, list) and isinstance(value, list) and _named(old) and _named(value):
            rows = {row["name"]: row for row in old}
            for row in value:
                rows[row["name"]] = _merge(rows.get(row["name"], {}), row)
            merged[key] = list(rows.values())
        else:
            merged[key] = copy.deepcopy(value)
    return merged


def _named(rows: list[Any]) -> bool:
    return all(isinstance(row, dict) and isinstance(row.get("name"), str) for row in rows)


def _apply(tree: dict[str, Any], text: str) -> None:
    """Apply one `a.b.c=value`. A list of named tables is entered by name: `phase.rl.lr`, or `rl.lr` for short."""
    key, equals, raw = text.partition("=")
    path = [part.strip() for part in key.split(".")]
    if not equals or not all(path):
        raise ConfigError(f"--set {text}: must have the form key=value, like rl.lr=1e-4")
    try:
        value = tomllib.loads(f"v = {raw.strip()}")["v"]
    except tomllib.TOMLDecodeError:
        value = raw.strip()
    if path[0] not in Config.model_fields:
        for name in ("phase", "rollout", "sandbox"):
            if any(isinstance(row, dict) and row.get("name", name) == path[0] for row in tree.get(name, [])):
                path.insert(0, name)
                break
    where: Any = tree
    for depth, part in enumerate(path[:-1]):
        label = ".".join(path[: depth + 1])
        if isinstance(where, list):
            rows = [row for row in where if row.get("name") == part]
            if not rows and is_number(part) and int(part) < len(where):
                rows = [where[int(part)]]
            if not rows and len(where) == 1 and path[0] in ("rollout", "sandbox"):  # the only pool: rollout.slurm.qos
                where = where[0].setdefault(part, {})
                if not isinstance(where, dict):
                    raise ConfigError(f"--set {text}: {label} is a value, not a table")
                continue
            if not rows:
                names = ", ".join(str(row.get("name")) for row in where)
                raise ConfigError(f"--set {text}: there is no {label}; there are: {names}")
            where = rows[0]
        else:
            default = [{"name": part}] if part in ("rollout", "sandbox") and depth == 0 else {}
            where = where.setdefault(part, default)
        if isinstance(where, list) and len(where) == 1 and depth == len(path) - 2:
            where = where[0]  # the only pool: rollout.jobs
        if not isinstance(where, dict | list):
            raise ConfigError(f"--set {text}: {label} is a value, not a table")
    if isinstance(where, list):
        raise ConfigError(f"--set {text}: {'.'.join(path[:-1])} is a list; name one of its tables")
    where[path[-1]] = value


def _validate(tree: Mapping[str, Any], source: str) -> Config:
    try:
        return Config.model_validate(tree)
    except RecursionError as error:
        raise ConfigError(f"{source}: nested too deep") from error
    except ValidationError as error:
        raise ConfigError(f"{source}: " + "; ".join(_explain(tree, row) for row in error.errors()[:5])) from error


def _explain(tree: Mapping[str, Any], row: Any, root: type[Table] | None = None, name: str = "") -> str:
    labels = [name] if name else []
    where: Any = tree
    table: Any = root or Config
    for part in row["loc"]:
        there = part < len(where) if isinstance(where, list) else isinstance(where, dict) and part in where
        where = where[part] if there else None
        if isinstance(part, int):
            labels.append(str(where.get("name", part)) if isinstance(where, dict) else str(part))
        else:
            labels.append(part)
            table = _table_of(table, part) or table
    key = ".".join(labels)
    if row["type"] == "extra_forbidden":
        known = list(table.model_fields)
        near = difflib.get_close_matches(labels[-1].replace("-", "_"), known, n=1, cutoff=0.5)
        hint = f"did you mean {near[0]!r}?" if near else "known keys: " + ", ".join(known)
        return f"unknown key {key!r}; {hint}"
    message = row["msg"].removeprefix("Value error, ")
    if row["type"] == "tuple_type":
        message = 'must be a list, like ["…"]'
    if not key or row["type"] == "value_error":
        return f"{key}: {message}" if key else message
    return f"{key}: {message[0].lower()}{message[1:]}, found {row['input']!r}"


def _table_of(table: Any, key: str) -> type[Table] | None:
    """The table class that `key` of `table` holds, in a list or not."""
    info = table.model_fields.get(key)
    kinds: list[Any] = [info.annotation] if info else []
    while kinds:
        kind = kinds.pop()
        if isinstance(kind, type) and issubclass(kind, Table):
            return kind
        kinds.extend(getattr(kind, "__args__", ()))
    return None
