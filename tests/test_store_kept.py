"""Files of every version that the store's formats ever had open with today's reader; those of a later one don't."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import h5py
import pytest
from crc32c import crc32c
from keep import KEPT, told
from store_parts import run_folder

from hpcrl.store import records, segment, shard
from hpcrl.store.compact import compact
from hpcrl.store.index import Store
from hpcrl.store.records import NewerError
from hpcrl.store.segment import read_header
from hpcrl.store.shard import Shard
from hpcrl.store.verify import verify
from hpcrl.types import StoreError

FILES = sorted([*KEPT.glob("*.h5"), *KEPT.glob("*.seg")])


def test_the_present_versions_are_kept() -> None:
    names = {path.name for path in FILES}
    assert {f"schema-{shard.SCHEMA}.h5", f"format-{records.FORMAT}.seg"} <= names, "run `python tests/keep.py`"


@pytest.mark.parametrize("path", FILES, ids=lambda path: path.name)
def test_it_reads_as_it_was_written(path: Path, tmp_path: Path) -> None:
    expected = [json.loads(line) for line in path.with_name(f"{path.name}.jsonl").read_text().splitlines()]
    paths = run_folder(tmp_path / "run")
    where = paths.shards / "000001.h5" if path.suffix == ".h5" else paths.log / "n1-1.seg"
    shutil.copy(path, where)
    for _ in range(2):  # as it lies, and after today's compaction
        with Store(paths) as store:
            assert not store.damaged
            found = {row["hash"]: row for name in store.names() for row in map(told, store.records(name))}
            found |= {hash: told(store.record("", hash)) for hash in store.rows("")}
            assert found == {row["hash"]: row for row in expected}
            whole = store.trajectory("find-x.p1n0.1")
            assert (whole.ids.tolist(), whole.reward) == ([1, 2, 3, 7, 8, 9, 40, 41, 5], 0.0)
            assert whole.versions.tolist() == [-1, -1, -1, 2, 2, 2, -1, -1, 3]
            table = store.query().set_index("trajectory")
            assert table["status"].to_dict() == {
                "find-x.p1n0.0": "COMPLETED",
                "find-x.p1n0.1": "COMPLETED",
                "find-y.p1n0.0": "open",
            }
            assert table.loc["find-x.p1n0.0", "reward"] == 1.25
            assert set(store.rewards()["source"]) == {"outcome", "judge"}
        report = verify(paths, deep=True)
        assert report.ok, report
        compact(paths)
    if path.suffix == ".h5":
        with h5py.File(path) as file:  # plain h5py needs nothing of ours
            assert len(file["steps"]) == len(expected)


def test_a_later_version_is_refused_by_name(tmp_path: Path) -> None:
    later = tmp_path / "000001.h5"
    data = bytearray((KEPT / f"schema-{shard.SCHEMA}.h5").read_bytes())
    size = int.from_bytes(data[8:12], "little")
    old, new = f'"schema": {shard.SCHEMA}'.encode(), f'"schema": {shard.SCHEMA + 1}'.encode()
    assert data.count(old) >= 1 and len(old) == len(new)
    data[:size] = data[:size].replace(old, new)
    data[size - 4 : size] = crc32c(bytes(data[: size - 4])).to_bytes(4, "little")
    later.write_bytes(data)
    with pytest.raises(NewerError, match=rf"000001.h5: schema {shard.SCHEMA + 1}; .*up to {shard.SCHEMA}: use a newer"):
        Shard(later)
    later = tmp_path / "n1-1.seg"
    header, start = read_header(KEPT / f"format-{records.FORMAT}.seg")
    made = segment.Header(header.node, header.number, header.uid, header.owner, format=records.FORMAT + 1)
    later.write_bytes(made.encode() + (KEPT / f"format-{records.FORMAT}.seg").read_bytes()[start:])
    with pytest.raises(NewerError, match=f"format {records.FORMAT + 1}; .*up to {records.FORMAT}: use a newer one"):
        read_header(later)
    paths = run_folder(tmp_path / "run")
    shutil.copy(tmp_path / "000001.h5", paths.shards)
    with pytest.raises(StoreError, match="use a newer one"):
        compact(paths)  # not a word of damage, and nothing is moved or removed
    assert (paths.shards / "000001.h5").exists() and not list(paths.damaged_shards.glob("*"))
