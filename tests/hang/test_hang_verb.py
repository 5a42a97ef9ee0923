"""`keepstep hang`: what it prints, and how it ends."""

from __future__ import annotations

import json
import pickle
from pathlib import Path
from typing import get_args

import pytest
from click.testing import CliRunner, Result

from keepstep.cli.hang import HEADLINES
from keepstep.cli.main import main
from keepstep.records.codec import to_json
from keepstep.records.cycle import Cycle, RankPlace
from keepstep.records.hang import HangKind
from tests.hang.jobs import Groups, Op, Rank, dump, write

ALL = Groups({"0": "default_pg"}, {"0": (0, 1, 2)})


def hang(*args: object, stdin: bytes | None = None) -> Result:
    return CliRunner().invoke(main, ["hang", *map(str, args)], input=stdin)


@pytest.fixture
def dumps(tmp_path: Path) -> Path:
    """Dumps of a job in which rank 1 has not come."""
    program = [Op("0", "all_reduce")] * 3
    return write(tmp_path / "dumps", {r: dump(ALL, program, r, Rank(2 if r == 1 else 3, 2)) for r in range(3)})


def record(path: Path) -> Path:
    places = [RankPlace(rank=r, local_rank=0, node=f"node-{r}", host="h", pci=f"0000:0{r}:00.0") for r in range(4)]
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_bytes(to_json(Cycle(run_id="r", attempt=0, cycle=0, started_at="2026-01-01T00:00:00Z", ranks=places)))
    return path


def test_json_is_the_record(dumps: Path) -> None:
    done = hang(dumps, "-o", "json")
    assert done.exit_code == 3
    answer = json.loads(done.stdout)
    assert answer["schema"] == "keepstep.hang/1"
    assert (answer["kind"], answer["ranks_seen"], answer["ranks_missing"]) == ("absent_rank", [0, 1, 2], [])
    (culprit,) = answer["culprits"]
    assert culprit.keys() == {"rank", "why", "process_group", "collective", "sequence"}
    assert (culprit["rank"], culprit["sequence"]) == (1, 3)


def test_a_table_for_people(dumps: Path) -> None:
    done = hang(dumps, "-o", "table")
    assert done.exit_code == 3
    assert done.stdout.startswith("absent_rank: others wait for ranks that have not come to a collective")
    assert "rank 1: 2 other ranks wait in all_reduce 3 of group 0 (default_pg)" in done.stdout
    assert "ranks seen: 3" in done.stdout


def test_names(dumps: Path) -> None:
    assert hang(dumps, "-o", "name").stdout == "rank/1\n"


def test_nobody_lags(tmp_path: Path) -> None:
    program = [Op("0", "all_reduce")] * 3
    write(tmp_path, {rank: dump(ALL, program, rank, Rank(3, 3)) for rank in range(3)})
    done = hang(tmp_path, "-o", "name")
    assert (done.exit_code, done.stdout) == (0, "no_fault\n")


def test_the_cycles_record_tells_nodes_and_ranks(dumps: Path, tmp_path: Path) -> None:
    done = hang(dumps, "--cycle-record", record(tmp_path / "cycle.json"), "-o", "json")
    answer = json.loads(done.stdout)
    assert [c["node"] for c in answer["culprits"]] == ["node-1"]
    assert answer["culprits"][0]["why"].endswith("GPU 0000:01:00.0")
    assert answer["ranks_missing"] == [3]


def test_a_run_is_found_by_its_id(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("KEEPSTEP_HOME", str(tmp_path))
    run = tmp_path / "runs" / "job-7"
    folder = run / "evidence" / "cycle-0001"
    folder.mkdir(parents=True)
    program = [Op("0", "all_reduce")] * 3
    for rank in range(3):
        data = pickle.dumps(dump(ALL, program, rank, Rank(2 if rank == 1 else 3, 2)), protocol=2)
        (folder / f"nccl-trace-rank-{rank:05d}").write_bytes(data)
    record(run / "cycles" / "cycle-0001.json")
    answer = json.loads(hang("job-7", "-o", "json").stdout)
    assert [(c["rank"], c["node"]) for c in answer["culprits"]] == [(1, "node-1")]


def test_single_files_and_standard_input(dumps: Path) -> None:
    assert hang(dumps / "_dump_0", dumps / "_dump_1", dumps / "_dump_2", "-o", "name").stdout == "rank/1\n"
    groups = Groups({"0": "default_pg", "1": "A"}, {"0": (0, 1), "1": (0,)})
    made = dump(groups, [Op("0", "all_reduce")] * 3, 0, Rank(3, 2), eager=True)
    done = hang("-", "-o", "json", stdin=pickle.dumps(made, protocol=2))
    answer = json.loads(done.stdout)
    assert (answer["ranks_seen"], [c["rank"] for c in answer["culprits"]]) == ([0], [1])


@pytest.mark.parametrize(
    ("name", "code", "said"),
    [
        ("nowhere", 6, "nowhere: no such file or folder"),
        ("empty", 6, "no file here looks like a flight-recorder dump"),
        ("broken", 1, "none of 2 dumps could be read"),
    ],
)
def test_nothing_to_read(tmp_path: Path, name: str, code: int, said: str) -> None:
    (tmp_path / "empty").mkdir()
    (tmp_path / "broken").mkdir()
    for rank in range(2):
        (tmp_path / "broken" / f"_dump_{rank}").write_bytes(b"\x80\x02nonsense")
    done = hang(tmp_path / name, "-o", "json")
    assert (done.exit_code, done.stdout) == (code, "")
    assert said in done.stderr and "Traceback" not in done.stderr


def test_a_record_that_is_none(dumps: Path, tmp_path: Path) -> None:
    (tmp_path / "x.json").write_text('{"run_id": 1}')
    done = hang(dumps, "--cycle-record", tmp_path / "x.json")
    assert done.exit_code == 2
    assert "x.json is not a cycle record" in done.stderr


def test_many_culprits_are_cut_and_it_is_said(tmp_path: Path) -> None:
    groups = Groups({"0": "default_pg"}, {"0": tuple(range(60))})
    program = [Op("0", "all_reduce")] * 3
    write(tmp_path, {rank: dump(groups, program, rank, Rank(2 if rank < 25 else 3, 2)) for rank in range(60)})
    done = hang(tmp_path, "-o", "table")
    assert "showing 20 of 25 culprits" in done.stderr
    assert hang(tmp_path, "-o", "wide").stdout.count("35 other ranks wait") == 25


def test_the_kinds_that_scripts_may_rely_on() -> None:
    assert get_args(HangKind) == ("absent_rank", "desync", "mismatch", "slow_rank", "no_fault")
    assert set(HEADLINES) == set(get_args(HangKind))
