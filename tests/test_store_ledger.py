"""Ledger and progress: what counts after restarts, zombies and torn lines."""

from __future__ import annotations

from pathlib import Path

import pytest
from io_faults import Fault, Io
from store_parts import run_folder

from hpcrl.store.ledger import (
    LedgerReader,
    LedgerWriter,
    ProgressReader,
    ProgressWriter,
    UpdateRow,
    entries,
    lineage,
    trained_twice,
)
from hpcrl.types import Entry, StoreError


def entry(name: str) -> Entry:
    return Entry(
        trajectory=name,
        attempt=1,
        head="0" * 32,
        group="g",
        phase="rl",
        reward=0.5,
        num_tokens=9,
        num_sampled=4,
        num_steps=2,
        min_version=-1,
        group_size=1,
    )


def update(number: int, *trajectories: str) -> UpdateRow:
    return UpdateRow(
        update=number,
        phase="rl",
        phase_update=number,
        version=number,
        parent_version=number - 1,
        positions=((1, number),),
        trajectories=trajectories,
        metrics={"loss": 0.5},
        wall=1.0,
    )


def names(found: list[tuple[tuple[int, int], Entry]]) -> list[str]:
    return [entry.trajectory for _, entry in found]


def test_what_continues_a_file_that_is_gone_is_no_new_beginning(tmp_path: Path) -> None:
    paths = run_folder(tmp_path)
    LedgerWriter(paths).close()
    LedgerWriter(paths).close()
    (paths.ledger / "000001.jsonl").unlink()
    with pytest.raises(StoreError, match=r"000001\.jsonl: missing or empty"):
        entries(paths)
    (paths.ledger / "000002.jsonl").write_text('{"follows": 5}\n')
    with pytest.raises(StoreError, match="damaged"):
        entries(paths)


def test_entries_come_once_in_order_with_their_positions(tmp_path: Path) -> None:
    paths = run_folder(tmp_path)
    reader = LedgerReader(paths)
    assert reader.read() == [] and reader.stopped is None
    writer = LedgerWriter(paths)
    assert writer.append([entry("a"), entry("b")]) == [(1, 1), (1, 2)] and writer.append([]) == []
    assert reader.read() == [((1, 1), entry("a")), ((1, 2), entry("b"))]
    assert writer.append([entry("c")]) == [(1, 3)]
    assert names(reader.read()) == ["c"] and reader.read() == []
    assert names(entries(paths)) == ["a", "b", "c"]


def test_a_lower_incarnation_writes_nothing_that_is_read(tmp_path: Path) -> None:
    paths = run_folder(tmp_path)
    old = LedgerWriter(paths)
    old.append([entry("a")])
    reader = LedgerReader(paths)
    assert names(reader.read()) == ["a"]
    new = LedgerWriter(paths)
    assert (old.incarnation, new.incarnation) == (1, 2)
    old.append([entry("zombie")])
    old.stop("zombie")
    assert new.append([entry("b")]) == [(2, 1)]
    assert names(reader.read()) == ["b"] and reader.stopped is None and reader.incarnation == 2
    assert names(entries(paths)) == ["a", "b"]
    (paths.ledger / "000003.jsonl").touch()  # died before its first line
    (paths.ledger / "000004.jsonl").write_text('{"follows": {"incarnation": 2, "li')  # died within it
    last = LedgerWriter(paths)
    last.append([entry("c")])
    new.append([entry("zombie")])
    assert last.incarnation == 5 and names(reader.read()) == ["c"] and names(entries(paths)) == ["a", "b", "c"]


def test_only_a_stop_at_the_end_of_the_newest_counts(tmp_path: Path) -> None:
    paths = run_folder(tmp_path)
    reader = LedgerReader(paths)
    writer = LedgerWriter(paths)
    writer.append([entry("a")])
    writer.stop("asked")
    assert names(reader.read()) == ["a"] and reader.stopped == "asked"
    reader.read()
    assert reader.stopped == "asked"  # still
    assert writer.append([entry("b")]) == [(1, 3)]
    reader.read()
    assert reader.stopped is None
    writer.stop("again")
    writer = LedgerWriter(paths)  # a resumed run
    fresh = LedgerReader(paths)
    assert names(reader.read()) == [] and names(fresh.read()) == ["a", "b"]
    assert reader.stopped is None and fresh.stopped is None


def test_a_torn_line_waits_and_garbage_is_named(tmp_path: Path) -> None:
    paths = run_folder(tmp_path)
    writer = LedgerWriter(paths)
    writer.append([entry("a")])
    path = paths.ledger / "000001.jsonl"
    whole = path.read_bytes()
    path.write_bytes(whole[:-10])
    reader = LedgerReader(paths)
    assert reader.read() == []
    path.write_bytes(whole)
    assert names(reader.read()) == ["a"]
    path.write_bytes(whole[:-10])
    LedgerWriter(paths).append([entry("b")])  # after a crash that tore a line
    assert names(entries(paths)) == ["b"]
    path = paths.ledger / "000002.jsonl"
    path.write_bytes(path.read_bytes() + b"not json\n")
    with pytest.raises(StoreError, match=r"000002\.jsonl"):
        entries(paths)


def test_a_failed_append_ends_its_writer(tmp_path: Path) -> None:
    paths = run_folder(tmp_path)
    writer = LedgerWriter(paths)
    writer.close()
    with pytest.raises(OSError, match="take a new incarnation"):
        writer.append([entry("a")])


def test_lineage_leaves_out_what_a_resume_undid(tmp_path: Path) -> None:
    paths = run_folder(tmp_path)
    reader = ProgressReader(paths)
    assert reader.read() == [] and lineage(paths) == []
    first = ProgressWriter(paths, None)
    for number in (1, 2, 3, 4):
        first.append(update(number, f"t{number}"))
    assert reader.read() == [update(number, f"t{number}") for number in (1, 2, 3, 4)]
    second = ProgressWriter(paths, {"incarnation": 1, "update": 2})
    second.append(update(3, "t3"))
    second.append(update(4, "u"))
    first.append(update(5, "zombie"))
    assert [row.trajectories for row in reader.read()] == [("t3",), ("u",)] and reader.incarnation == 2
    rows = lineage(paths)
    assert [(row.update, row.trajectories[0]) for row in rows] == [(1, "t1"), (2, "t2"), (3, "t3"), (4, "u")]
    assert trained_twice(rows) == []  # t3 was trained once in the weights that there are
    third = ProgressWriter(paths, {"incarnation": 2, "update": 1})  # from an older checkpoint than the second's
    third.append(update(2, "t1"))
    assert [(row.update, row.trajectories[0]) for row in lineage(paths)] == [(1, "t1"), (2, "t1")]
    assert trained_twice(lineage(paths)) == ["t1"]
    ProgressWriter(paths, None)  # from scratch
    assert lineage(paths) == []


def test_lines_that_count_are_durable_whoever_wrote_them(tmp_path: Path) -> None:
    paths = run_folder(tmp_path)
    with Io(tmp_path, Fault(frozenset()), 1) as io:
        old = LedgerWriter(paths)
        old.append([entry("a")])
        path = paths.ledger / "000001.jsonl"
        whole = path.stat().st_size
        assert io.synced_bytes(path) == whole
        with path.open("ab") as file:  # written, and its writer died before it synced
            file.write(path.read_bytes().splitlines(keepends=True)[-1].replace(b'"a"', b'"b"'))
        assert io.synced_bytes(path) == whole
        LedgerWriter(paths)
        assert io.synced_bytes(path) == path.stat().st_size > whole
    assert names(entries(paths)) == ["a", "b"]


def test_a_control_sees_that_another_has_begun_since(tmp_path: Path) -> None:
    paths = run_folder(tmp_path)
    first = LedgerWriter(paths)
    assert not first.is_superseded(paths)
    second = LedgerWriter(paths)
    assert first.is_superseded(paths) and not second.is_superseded(paths)
    first.close()
    second.close()
