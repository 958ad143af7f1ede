"""The store's commands: query, seal, compact (by one process, by MPI ranks), and what each refuses."""

from __future__ import annotations

import asyncio
import csv
import io
import json
import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
from run_parts import hpcrl
from store_parts import assert_same_store, open_log, run_folder, trajectory, write

from hpcrl.layout import ProcessId, RunPaths
from hpcrl.store.compact import compact, shards
from hpcrl.store.index import Store
from hpcrl.store.query import moment
from hpcrl.store.records import Kind, Record
from hpcrl.store.seal import seal
from hpcrl.store.segment import CLOSED, OPEN, Header, segments
from hpcrl.store.shard import Shard
from hpcrl.store.verify import verify
from hpcrl.types import ConfigError, StoreError

MPIEXEC = Path(sys.executable).with_name("mpiexec")


# ---- query


@pytest.mark.parametrize(
    ("text", "seconds"),
    [
        ("0", 0.0),
        ("1700000000.5", 1700000000.5),
        ("2026-03-01T12:00:00Z", 1772366400.0),
        ("2026-03-01T14:00+02:00", 1772366400.0),
        ("2026-03-01 12:00:00.25+00:00", 1772366400.25),
    ],
)
def test_times(text: str, seconds: float) -> None:
    assert moment(text) == seconds


@pytest.mark.parametrize("text", ["yesterday", "", "nan", "inf", "2026-13-01", "12:00"])
def test_what_is_no_time(text: str) -> None:
    with pytest.raises(ConfigError, match="ISO 8601"):
        moment(text)


async def test_query(tmp_path: Path) -> None:
    paths = run_folder(tmp_path)
    await write(paths, "a", "b,\n")
    log = open_log(paths)
    await log.append([record.frame() for record in trajectory("open")[:-1]])
    late = Record(kind=Kind.REWARD, trajectory="a", step=1, meta={"source": "outcome", "value": 0.25, "wall": 5.0})
    await log.append([late.frame()])
    rows = json.loads(hpcrl("store", "query", paths.root, "--json").stdout)
    assert [(row["trajectory"], row["status"], row["reward"]) for row in rows] == [
        ("a", "COMPLETED", 0.25),
        ("b,\n", "COMPLETED", 1.0),
        ("open", "open", None),
    ]

    def found(*words: object) -> list[str]:
        done = hpcrl("store", "query", paths.root, "--csv", *words)
        assert done.returncode == 0, done.stderr
        return [row["trajectory"] for row in csv.DictReader(io.StringIO(done.stdout, newline=""))]

    assert found("--status", "open") == ["open"]
    assert found("--status", "open", "--status", "COMPLETED", "--reward-below", "0.5") == ["a"]
    assert found("--since", "1970-01-01T00:00:01Z", "--version", 4, "--kind", "train") == ["a", "b,\n", "open"]
    assert (
        found("--until", "1") == [] and found("--version", 5) == [] and found("--phase", "rl", "--kind", "eval") == []
    )
    for words in (("--status", "DONE"), ("--since", "yesterday")):
        done = hpcrl("store", "query", paths.root, *words)
        assert done.returncode == 2 and len(done.stderr.splitlines()) == 1
    assert "COMPLETED" in hpcrl("store", "query", paths.root).stdout
    await log.close()


# ---- seal


def left_open(paths: RunPaths, node: str, owner: ProcessId, name: str) -> Path:
    path = paths.log / f"{node}-1{OPEN}"
    frames = b"".join(record.frame() for record in trajectory(name))
    path.write_bytes(Header(node, 1, node, owner).encode() + frames + b"torn")
    return path


def test_seal_closes_what_dead_owners_left_and_refuses_the_others(tmp_path: Path) -> None:
    paths = run_folder(tmp_path)
    me = ProcessId.me()
    left_open(paths, "n1", ProcessId(me.pid, 1, me.boot), "a")  # a pid that came back
    (paths.log / f"n4-1{OPEN}").write_bytes(b"")  # its owner may be about to write
    alive = left_open(paths, "n2", me, "b")
    with pytest.raises(StoreError, match=f"process {me.pid} on node n2, lives"):
        seal(paths)
    assert len(segments(paths.log, OPEN)) == 3, "refused as a whole"
    alive.unlink()
    left_open(paths, "n-3", ProcessId(77, 1, "elsewhere"), "c")
    done = hpcrl("store", "seal", paths.root)
    assert done.returncode == 2 and "process 77 on node n-3, can't be seen from here" in done.stderr
    assert "--gone n-3" in done.stderr and len(segments(paths.log, OPEN)) == 3
    done = hpcrl("store", "seal", paths.root, "--gone", "n-3")
    assert done.returncode == 0 and done.stdout.count("closed ") == 2, done.stderr
    assert [path.name for path in segments(paths.log, OPEN)] == ["n4-1.open"]
    done = hpcrl("store", "compact", paths.root, "--json")
    assert done.returncode == 0 and json.loads(done.stdout)["segments"] == 2
    with Store(paths) as store:
        assert sorted(store.names()) == ["a", "c"]
    assert hpcrl("store", "seal", paths.root).stdout == "nothing was open\n"


async def test_a_run_that_runs_closes_what_lies_on_its_nodes_own_disks(tmp_path: Path) -> None:
    """There they are not listed as open, and neither is what was closed before to be told of."""
    paths = run_folder(tmp_path / "run")
    me = ProcessId.me()
    row = {"event": "submitted", "role": "control", "index": 0, "id": str(me.pid), "wall": 1.0}
    paths.jobs.write_text(json.dumps({**row, "start": me.start, "boot": me.boot}) + "\n")
    log = open_log(paths, scratch=tmp_path / "scratch")

    async def asked() -> str:
        """What the command says, while this process does as control: its nodes seal, then the command's file goes."""
        command = asyncio.create_task(run(sys.executable, "-m", "hpcrl.cli", "store", "seal", paths.root))
        while not command.done():
            for path in paths.inbox.glob("seal-*.json"):
                await log.seal()
                path.unlink()
            await asyncio.sleep(0.02)
        assert (await command).returncode == 0, (await command).stderr
        return (await command).stdout

    for number in (1, 2):
        await log.append([record.frame() for record in trajectory(f"t{number}")])
        assert not segments(paths.log, OPEN)
        assert await asked() == f"closed {paths.log}/n1-{number}.seg\n"
    assert await asked() == "nothing was open\n"
    await log.close()


# ---- compact


async def run(*words: object) -> subprocess.CompletedProcess[str]:
    command = [str(word) for word in words]
    return await asyncio.to_thread(subprocess.run, command, capture_output=True, text=True, timeout=120, check=False)


async def test_ranks_make_the_shards_that_one_makes(tmp_path: Path) -> None:
    if not MPIEXEC.exists():
        pytest.skip(f"{MPIEXEC} isn't there: pip install mpich mpi4py")
    one = run_folder(tmp_path / "one")
    await write(one, *(f"t{number}" for number in range(30)), segment_bytes=4000)
    for number in (3, 4):  # two segments that are damaged, of which one batch may consist
        path = segments(one.log, CLOSED)[number]
        path.write_bytes(path.read_bytes()[:-1])
    shutil.copytree(one.root, tmp_path / "many")
    many = RunPaths(tmp_path / "many")
    limit = 9000
    done = compact(one, shard_bytes=limit)
    code = (
        "import sys, json, dataclasses\n"
        "from hpcrl.layout import RunPaths\n"
        "from hpcrl.store.compact import compact, mpi\n"
        "comm = mpi()\n"
        "assert comm.size == 3\n"
        f"report = compact(RunPaths.of(sys.argv[1]), shard_bytes={limit}, comm=comm)\n"
        "open(f'{sys.argv[1]}/report-{comm.rank}', 'w').write(json.dumps(dataclasses.asdict(report)))\n"
    )
    await run(MPIEXEC, "-n", 3, sys.executable, "-c", code, many.root)
    reports = [json.loads((many.root / f"report-{rank}").read_text()) for rank in range(3)]
    assert reports[0] == reports[1] == reports[2]
    assert (reports[0]["shards"], reports[0]["records"]) == (done.shards, done.records) and done.shards > 4
    assert len(reports[0]["damaged"]) == len(done.damaged) == 2
    assert_same_store(one, many)


async def test_what_fails_on_one_rank_fails_on_all(tmp_path: Path) -> None:
    if not MPIEXEC.exists():
        pytest.skip(f"{MPIEXEC} isn't there: pip install mpich mpi4py")
    paths = run_folder(tmp_path)
    await write(paths, *(f"t{number}" for number in range(10)), segment_bytes=4000)
    (paths.shards / "000007.h5").write_bytes(b"damaged")  # rank 0 reads it, the others don't
    command = (MPIEXEC, "-n", 2, sys.executable, "-m", "hpcrl.cli", "store", "compact", paths.root, "--mpi")
    done = await run(*command)
    assert done.returncode == 2 and done.stderr.count("000007.h5: damaged") == 1, done.stderr
    (paths.shards / "000007.h5").unlink()
    done = await run(*command, "--json")
    assert done.returncode == 0 and json.loads(done.stdout)["segments"] >= 5, done.stderr
    assert verify(paths, deep=True).ok


@pytest.mark.parametrize("name", ["SLURM_NTASKS", "SLURM_STEP_NUM_TASKS"])
def test_ranks_that_came_up_alone_are_refused(tmp_path: Path, name: str) -> None:
    pytest.importorskip("mpi4py")
    paths = run_folder(tmp_path)
    command = [sys.executable, "-m", "hpcrl.cli", "store", "compact", paths.root, "--mpi"]
    environment = {**os.environ, name: "2"}
    done = subprocess.run(command, env=environment, capture_output=True, text=True, check=False)
    assert done.returncode == 2 and f"{name}=2" in done.stderr and len(done.stderr.splitlines()) == 1, done.stderr
    done = subprocess.run(command, env={**environment, name: "1"}, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr


# ---- a run that is running


def test_what_is_refused_while_the_run_runs(tmp_path: Path) -> None:
    paths = run_folder(tmp_path)
    me = ProcessId.me()
    row = {"event": "submitted", "role": "control", "index": 0, "id": str(me.pid), "wall": 1.0}
    paths.jobs.write_text(json.dumps({**row, "start": me.start, "boot": me.boot}) + "\n")
    for words in (("repair",), ("prune", "--keep", "1GiB")):
        done = hpcrl("store", words[0], paths.root, *words[1:])
        assert done.returncode == 2 and f"control-0 (job {me.pid})" in done.stderr, done.stderr
    paths.jobs.write_text(json.dumps({**row, "start": 1, "boot": me.boot}) + "\n")
    assert hpcrl("store", "repair", paths.root).stdout == "nothing is damaged\n"


async def test_repair_and_prune_as_commands(tmp_path: Path) -> None:
    paths = run_folder(tmp_path)
    await write(paths, "a")
    compact(paths)
    await write(paths, "b")
    (segment,) = segments(paths.log, CLOSED)
    data = bytearray(segment.read_bytes())
    data[-40] ^= 1
    segment.write_bytes(data)
    done = hpcrl("store", "repair", paths.root)
    assert done.returncode == 1 and "lost: END of b, attempt 1, step 1, hash" in done.stdout, done.stdout
    done = hpcrl("store", "prune", paths.root, "--keep", "1GiB", "--dry-run", "--json")
    assert json.loads(done.stdout)["removed"] == [] and len(json.loads(done.stdout)["kept"]) == 2
    done = hpcrl("store", "prune", paths.root, "--keep", "1 gig")
    assert done.returncode == 2 and "50GiB" in done.stderr


# ---- verify


async def test_plain_verify_reads_the_index_and_deep_every_byte(tmp_path: Path) -> None:
    paths = run_folder(tmp_path)
    await write(paths, "a", "b")
    compact(paths)
    (path,) = shards(paths)
    shard = Shard(path)
    places = {name: int(row[0]) for name, row in shard.directory["datasets"].items()}
    good = path.read_bytes()
    report = verify(paths)
    assert report.ok and report.records == 11 and report.records_read == 0
    assert verify(paths, deep=True).records_read == 11
    for name, plain in (("steps", True), ("trajectories", True), ("rewards", True), ("tokens/logprobs", False)):
        data = bytearray(good)
        data[places[name] + 5] ^= 1
        path.write_bytes(data)
        assert verify(paths).ok is not plain, name
        assert not verify(paths, deep=True).ok, name
    path.write_bytes(good)
    done = hpcrl("store", "verify", paths.root, "--deep", "--json")
    assert done.returncode == 0 and json.loads(done.stdout)["records_read"] == 11
