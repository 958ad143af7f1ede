"""A run on the testbed's Slurm that things are done to: what it had acknowledged before is there after, it goes on."""

from __future__ import annotations

import contextlib
import json
import subprocess
import sys
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

from run_parts import HPCRL
from slurm_parts import Slurm, until

from hpcrl.layout import RunPaths, read_json
from hpcrl.store.index import Store
from hpcrl.store.verify import verify

CONFIG = """
name = "drill"
[model]
source = "{model}"
[environment]
name = "find"
[sampling]
max_tokens = 14
max_steps = 5
max_context = 200
deadline_s = 120
[[phase]]
{phase}
updates = {updates}
trajectories = 16
[evaluation]
tasks = 0
[[rollout]]
name = "rollout"
jobs = 2
{rollout}
concurrent = 12
max_model_len = 256
slurm = {{partition = "gpu"}}
[[sandbox]]
name = "sandbox"
jobs = 2
sessions = 24
warm = 4
memory_mib = 64
disk_mib = 2
[learner]
ranks = 2
nodes = 2
checkpoint_every = 2
collective_timeout_s = 60
[store]
segment_age_s = 1.0
commit_interval_s = 0.02
poll_s = 0.5
compact_every_s = 20
[launch]
executor = "slurm"
look_s = 2
status_s = 1
control_timeout_s = 300
restarts = 20
[slurm]
time = "{time}"
memory = "400M"
cpus = 1
signal_s = {signal_s}
lead_s = {lead_s}
"""


# Of a scripted expert: the jobs, nodes and processes are all there, but no engine.
EXPERT = {"phase": 'name = "warm_start"\nobjective = "sft"\nlr = 1e-3\npublish_every = 0', "rollout": "engines = 0"}
ENGINES = {
    "phase": 'name = "rl"\nobjective = "grpo"\nlr = 1e-4\ngroup_size = 4',
    "rollout": "max_num_seqs = 32\nblock_size = 32\nmemory_gib = 0.1",
}


ROLES = {"control": 1, "rollout": 2, "sandbox": 2, "learner": 1}


def config_of(**values: Any) -> str:
    given = {"model": "tiny", "updates": 4000, "time": "1:00:00", "signal_s": 60, "lead_s": 60, **EXPERT, **values}
    return CONFIG.format(**given)


class Drill:
    """A run that nobody watches: what is submitted goes on by itself."""

    def __init__(self, slurm: Slurm, folder: Path, *options: str, **values: Any) -> None:
        self.slurm, self.folder, self.run = slurm, folder, folder / "run"
        (folder / "drill.toml").write_text(config_of(**values))
        self.seconds: dict[str, float] = {}
        self.begin(*options)

    def begin(self, *options: str) -> None:
        self.sbatch("train.sbatch", "--wait", "--mem=500M", words=("--run", self.run, *options))

    def sbatch(self, script: str, *options: str, words: Sequence[object]) -> str:
        """Run one of our batch scripts; what sbatch said."""
        command = str(Path(sys.executable).with_name("hpcrl"))
        batch = ("sbatch", f"--chdir={self.folder}", *options, Path(__file__).parents[1] / "slurm" / script)
        said = self.slurm.run(*batch, self.folder / "drill.toml", *words, HPCRL=command)
        assert said.returncode == 0, (said.stderr, [path.read_text() for path in self.folder.glob("*.out")])
        return said.stdout

    def hpcrl(self, *words: object, timeout: float = 120) -> subprocess.CompletedProcess[str]:
        return self.slurm.run(*HPCRL, *words, timeout=timeout)

    @property
    def paths(self) -> RunPaths:
        return RunPaths(self.run)

    def status(self) -> dict[str, Any]:
        return read_json(self.paths.heartbeat) or {"updates": {"done": 0}, "incarnation": 0}

    @property
    def updates(self) -> int:
        return int(self.status()["updates"]["done"])

    def goes_on(self, updates: int = 3, limit_s: float = 240) -> None:
        """It makes so many updates more."""
        wanted = self.updates + updates
        until(lambda: self.updates >= wanted, limit_s)

    def jobs(self, role: str) -> list[dict[str, str]]:
        """Slurm's jobs of a role that run or wait, oldest first: id, state, node."""
        said = self.slurm.ask("squeue", "--noheader", "--format=%i|%T|%N|%j")
        rows = [dict(zip(("id", "state", "nodes", "name"), line.split("|"), strict=True)) for line in said.splitlines()]
        inode = f"{self.run.stat().st_ino:x}"
        mine = [row for row in rows if f".{role}-" in row["name"] and row["name"].endswith(inode)]
        mine = [row for row in mine if row["state"] in ("PENDING", "RUNNING")]
        return sorted(mine, key=lambda row: int(row["id"]))

    def is_whole(self) -> bool:
        """Every job runs, and control has heard of each node."""
        counts = {role: [row["state"] for row in self.jobs(role)] for role in ROLES}
        status = self.status()
        return counts == {role: ["RUNNING"] * count for role, count in ROLES.items()} and (
            len(status.get("nodes", ())) == 2 and time.time() - status["wall"] < 10
        )

    def acknowledged(self) -> set[str]:
        """Hashes of all records that the store has."""
        with Store(self.paths, open_segments=True) as store:
            return {hash for name in store.names() for hash in store.rows(name)}

    @contextlib.contextmanager
    def drill(self, name: str, limit_s: float = 240) -> Iterator[None]:
        """Around what is done to the run: nothing that it had acknowledged is lost, and it goes on."""
        before = self.acknowledged()
        yield
        began, seen = time.monotonic(), self._sizes()
        until(lambda: any(size > max(seen.get(path, 0), 400) for path, size in self._sizes().items()), limit_s)
        self.seconds[name] = time.monotonic() - began
        until(self.is_whole, limit_s)
        self.seconds[f"{name}, whole"] = time.monotonic() - began
        self.goes_on()
        lost = before - self.acknowledged()
        assert not lost, f"{name}: {len(lost)} of {len(before)} records lost"
        whole = self.seconds[f"{name}, whole"]
        print(f"{name}: {self.seconds[name]:.1f} s until the next record, {whole:.1f} s until all jobs run", flush=True)

    def _sizes(self) -> dict[str, int]:
        found = {}
        for path in self.paths.log.glob("*-*.*"):
            with contextlib.suppress(FileNotFoundError):
                found[path.stem] = path.stat().st_size
        return found

    def start_now(self, job: str) -> None:
        """What Slurm has requeued waits for two minutes; not in a drill."""
        until(lambda: self.slurm.job(job)["JobState"] == "PENDING", 60)
        self.slurm.run("scontrol", "update", f"JobId={job}", "StartTime=now")

    def stop(self) -> None:
        """In order, within a minute; nothing is left, nothing was trained twice."""
        began = time.monotonic()
        said = self.hpcrl("stop", self.run)
        assert said.returncode == 0, said.stderr
        print(f"stop: {time.monotonic() - began:.1f} s", flush=True)
        assert not any(self.jobs(role) for role in ROLES)
        report = verify(self.paths, deep=True)
        assert report.ok and not report.trained_twice, report

    def tail(self) -> str:
        rows = []
        for path in sorted(self.paths.logs.glob("*.jsonl")):
            for line in path.read_text(errors="replace").splitlines()[-8:]:
                row = json.loads(line)
                rows.append(f"{row['time']:.1f} {row['role']} {row['job']} {row['message'][:200]}")
        return "\n".join(sorted(rows)[-60:])


def pids(run: Path, *words: str) -> list[int]:
    """Here, of the Python processes of a run, on whatever node, whose command has all these words."""
    found = []
    for folder in Path("/proc").glob("[0-9]*"):
        with contextlib.suppress(OSError):
            command = (folder / "cmdline").read_bytes().decode(errors="replace").split("\0")
            if "python" in command[0] and str(run) in " ".join(command) and all(word in command for word in words):
                found.append(int(folder.name))
    return found
