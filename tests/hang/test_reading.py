"""Dumps in all their forms: names, spellings, compression, versions, places; and what is said of those that cannot be read."""

from __future__ import annotations

import gzip
import json
import os
import pickle
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import zstandard
from bench._dumps import torch_pickle

from keepstep.attribution.hang import find_culprits
from keepstep.records.flightrecorder import Snapshot
from keepstep.sources.flightrecorder import reading
from keepstep.sources.flightrecorder.dump import DumpError, NotADumpError, parse_dump
from keepstep.sources.flightrecorder.files import find_dumps, rank_of_name
from keepstep.sources.flightrecorder.reading import read_snapshot
from tests.hang.jobs import Groups, Op, Rank, as_json, dump, judge, megatron, play, ranks, write

ALL = Groups({"0": "default_pg"}, {"0": (0, 1, 2)})


def one(rank: int = 0, issued: int = 3, **more: Any) -> dict[str, Any]:
    return dump(ALL, [Op("0", "all_reduce")] * 3, rank, Rank(issued, 2)) | more


def snapshot(*paths: Path, jobs: int = 1) -> Snapshot:
    return read_snapshot(find_dumps([str(path) for path in paths]).sources, jobs=jobs)


@pytest.mark.parametrize(
    ("name", "rank"),
    [
        ("_dump_7", 7),
        ("nccl-trace-rank-00007", 7),
        ("nccl_trace_rank_7", 7),
        ("nccl_trace_rank_007.gz", 7),
        ("node-12_rank7.json", 7),
        ("rank7", 7),
        ("7.pkl", 7),
        ("7.pickle.zst", 7),
        ("comm_lib_trace_rank_16383", 16383),
        ("fr-host3-Rank_7_pid99.bin", 7),
        ("dump", None),
        ("trace.json", None),
    ],
)
def test_the_name_of_a_file_tells_its_rank(name: str, rank: int | None) -> None:
    assert rank_of_name(name) == rank


FORMS: dict[str, Callable[[dict[str, Any]], bytes]] = {
    "torch": torch_pickle,
    "pickle 2": lambda made: pickle.dumps(made, protocol=2),
    "pickle 4": lambda made: pickle.dumps(made, protocol=4),
    "pickle 5": lambda made: pickle.dumps(made, protocol=5),
    "json": as_json,
    "json, indented": lambda made: json.dumps(json.loads(as_json(made)), indent=1).encode(),
    "gzip": lambda made: gzip.compress(pickle.dumps(made, protocol=2)),
    "zstd": lambda made: zstandard.compress(as_json(made)),
}


@pytest.mark.parametrize("form", FORMS)
def test_every_form_says_the_same(tmp_path: Path, form: str) -> None:
    for rank in range(3):
        (tmp_path / f"_dump_{rank}").write_bytes(FORMS[form](one(rank, 2 if rank == 1 else 3)))
    hang = judge(tmp_path)
    assert (hang.kind, ranks(hang), hang.notes) == ("absent_rank", [1], [])


@pytest.mark.parametrize("minor", ["2.0", "2.9", "2.10"])
def test_known_minor_versions(minor: str) -> None:
    assert parse_dump(pickle.dumps(one(version=minor))).minor == int(minor[2:])


def test_a_later_minor_version_is_read_with_a_note(tmp_path: Path) -> None:
    write(tmp_path, {0: one(version="2.11"), 1: one(1, version="2.11")})
    assert snapshot(tmp_path).notes == ["dumps have version 2.11, newer than 2.10; fields added since are not read"]


@pytest.mark.parametrize("version", ["3.0", "1.5", "10.2"])
def test_another_major_version_is_refused_by_name(tmp_path: Path, version: str) -> None:
    write(tmp_path, {0: one(version=version), 1: one(1)})
    found = snapshot(tmp_path)
    assert [state.rank for state in found.ranks] == [1]
    assert "_dump_0" in found.unreadable[0] and f"version {version}" in found.unreadable[0]


@pytest.mark.parametrize("version", [None, 2.1, "", "two", "2", [["2.1"]]])
def test_a_dump_without_a_version_is_refused(version: Any) -> None:
    with pytest.raises(DumpError, match="no version"):
        parse_dump(pickle.dumps(one(version=version)))


def test_process_groups_tell_the_rank_when_the_name_does_not(tmp_path: Path) -> None:
    groups, programs = megatron(2, 2, 2)
    came = play(groups, programs, stop={5: 4})
    for rank in programs:
        made = dump(groups, programs[rank], rank, came[rank], eager=True)
        (tmp_path / f"{'abcdefgh'[rank]}.pkl").write_bytes(pickle.dumps(made, protocol=2))
    hang = judge(tmp_path)
    assert (ranks(hang), hang.ranks_seen) == ([5], list(range(8)))


def test_a_dump_whose_rank_nothing_tells_is_said(tmp_path: Path) -> None:
    (tmp_path / "some.pkl").write_bytes(pickle.dumps(one()))
    found = snapshot(tmp_path / "some.pkl")
    assert not found.ranks and "neither its name nor its process groups tell the rank" in found.unreadable[0]


def test_damaged_dumps_are_named_and_the_others_read(tmp_path: Path) -> None:
    write(tmp_path, {rank: one(rank) for rank in range(3)})
    (tmp_path / "_dump_0").write_bytes((tmp_path / "_dump_0").read_bytes()[:200])
    (tmp_path / "_dump_1").write_bytes(gzip.compress(pickle.dumps(one(1)))[:-9])
    (tmp_path / "_dump_4").write_bytes(b"\x28\xb5\x2f\xfd\x00")
    (tmp_path / "_dump_5").write_bytes(b'{"version": "2.10", ')
    found = snapshot(tmp_path)
    assert [state.rank for state in found.ranks] == [2]
    assert [line.partition(": ")[0][-7:] for line in found.unreadable] == ["_dump_0", "_dump_1", "_dump_4", "_dump_5"]


def test_other_files_beside_dumps_are_left_alone(tmp_path: Path) -> None:
    write(tmp_path, {rank: one(rank) for rank in range(3)})
    (tmp_path / "fault_injection.log").write_text("Rank 1 ...")
    (tmp_path / "rank-00001.json").write_text('{"rank": 1}')
    (tmp_path / ".dump_9").write_bytes(b"x")
    os.mkfifo(tmp_path / "_dump_8.pipe")
    os.mkfifo(tmp_path / "_dump_8")
    found = snapshot(tmp_path)
    assert ([state.rank for state in found.ranks], found.unreadable, found.notes) == ([0, 1, 2], [], [])


def test_without_a_dump_like_name_what_is_no_dump_is_a_note(tmp_path: Path) -> None:
    for rank in range(2):
        (tmp_path / f"{rank}.pkl").write_bytes(pickle.dumps(one(rank)))
    (tmp_path / "settings.json").write_text('{"ranks": 2}')
    found = snapshot(tmp_path)
    assert (len(found.ranks), found.unreadable) == (2, [])
    assert "1 files are no dumps" in found.notes[0]


def test_folders_of_nodes(tmp_path: Path) -> None:
    for rank in range(3):
        write(tmp_path / f"node{rank}" / "traces", {rank: one(rank)})
    assert [state.rank for state in snapshot(tmp_path).ranks] == [0, 1, 2]


def test_of_two_dumps_of_a_rank_the_fuller_one_counts(tmp_path: Path) -> None:
    write(tmp_path / "a", {0: one(0), 1: one(1)})
    (tmp_path / "a" / "_dump_1").write_bytes(b"")
    write(tmp_path / "b", {1: one(1)})
    found = snapshot(tmp_path)
    assert [state.empty for state in found.ranks] == [False, False]
    assert "rank 1 has two dumps" in found.notes[0]


def run_folder(top: Path) -> Path:
    """A run with dumps of cycles 0 and 2, and a later cycle without."""
    for cycle, late in ((0, 0), (2, 1)):
        folder = top / "evidence" / f"cycle-{cycle:04d}"
        folder.mkdir(parents=True)
        for rank in range(3):
            data = pickle.dumps(one(rank, 2 if rank == late else 3), protocol=2)
            (folder / f"nccl-trace-rank-{rank:05d}").write_bytes(data)
            (folder / f"rank-{rank:05d}.json").write_text("{}")
        (folder / "host.json").write_text("{}")
    (top / "evidence" / "cycle-0003").mkdir()
    (top / "cycles").mkdir()
    (top / "cycles" / "cycle-0002.json").write_text("{}")
    return top


@pytest.mark.parametrize("inside", ["", "evidence", "evidence/cycle-0002"])
def test_the_newest_cycle_with_dumps_of_a_run(tmp_path: Path, inside: str) -> None:
    run = run_folder(tmp_path / "run")
    found = find_dumps([str(run / inside)])
    assert found.cycle_record == run / "cycles" / "cycle-0002.json"
    assert ranks(judge(run / inside)) == [1]
    assert ranks(judge(run / "evidence" / "cycle-0000")) == [0]


def test_entries_that_make_no_sense_are_left_out_and_counted(tmp_path: Path) -> None:
    made = one()
    made["entries"] += [None, {}, {"pg_id": "x"}, made["entries"][0] | {"collective_seq_id": 2**70}]
    write(tmp_path, {0: made}, form="pickle")
    found = snapshot(tmp_path)
    assert "4 of 7 operations make no sense" in found.notes[0]
    assert found.ranks[0].parts[0].enqueued == 3


def test_several_processes_find_what_one_finds(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    groups, programs = megatron(2, 2, 3)
    came = play(groups, programs, stop={7: 9})
    write(tmp_path, {rank: dump(groups, programs[rank], rank, came[rank]) for rank in programs})
    (tmp_path / "_dump_3").write_bytes(b"\x80\x02damaged")
    alone = snapshot(tmp_path)
    monkeypatch.setattr(reading, "POOL_FROM_FILES", 2)
    counts: list[int] = []
    sources = find_dumps([str(tmp_path)]).sources
    together = read_snapshot(sources, jobs=2, progress=counts.append)
    assert find_culprits(together) == find_culprits(alone)
    assert [(state.rank, state.file) for state in together.ranks] == [(state.rank, state.file) for state in alone.ranks]
    assert together.unreadable == alone.unreadable != []
    assert sum(counts) == len(sources) == 12


@pytest.mark.parametrize(
    "data", [b"hello", b"[1]", b'{"a": 1}', b"\x00" * 50, pickle.dumps([1]), pickle.dumps({"a": 1})]
)
def test_what_was_never_a_dump(data: bytes) -> None:
    with pytest.raises(NotADumpError):
        parse_dump(data)
