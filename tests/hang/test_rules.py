"""What each kind of hang looks like in dumps, and what looks like one and is none."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from keepstep.attribution.hang import find_culprits
from keepstep.records.cycle import RankPlace
from keepstep.records.hang import Hang
from keepstep.sources.flightrecorder.files import find_dumps
from keepstep.sources.flightrecorder.reading import read_snapshot
from tests.hang.jobs import Groups, Op, Rank, dump, judge, megatron, play, ranks, write

ALL = Groups({"0": "default_pg"}, {"0": (0, 1, 2, 3)})
REDUCE = Op("0", "all_reduce")


def dumps_of(programs: dict[int, list[Op]], came: dict[int, Rank], groups: Groups = ALL) -> dict[int, dict[str, Any]]:
    return {rank: dump(groups, programs[rank], rank, came[rank]) for rank in programs}


def same(program: list[Op], completed: int, **issued: int) -> dict[int, dict[str, Any]]:
    """Dumps of four ranks that have completed as much; `r2=1`: rank 2 has issued only one."""
    came = {rank: Rank(issued.get(f"r{rank}", len(program)), completed) for rank in range(4)}
    return dumps_of(dict.fromkeys(range(4), program), came)


def change(dumps: dict[int, dict[str, Any]], rank: int, at: int, **fields: Any) -> None:
    dumps[rank]["entries"][at].update(fields)


def test_a_rank_that_has_not_come_is_absent(tmp_path: Path) -> None:
    hang = judge(write(tmp_path, same([REDUCE] * 5, 4, r2=4)))
    assert hang.kind == "absent_rank"
    (culprit,) = hang.culprits
    assert (culprit.rank, culprit.process_group, culprit.collective, culprit.sequence) == (
        2,
        "0 (default_pg)",
        "all_reduce",
        5,
    )
    assert "3 other ranks wait in all_reduce 5" in culprit.why and "issued up to 4" in culprit.why
    assert "/job/train.py:104 in step" in culprit.why  # where the others are
    assert "/job/train.py:103 in step" in culprit.why  # the last that it did


@pytest.mark.parametrize("broken", ["missing", "empty", "damaged"])
def test_a_dump_that_is_not_there_is_evidence(tmp_path: Path, broken: str) -> None:
    write(tmp_path, same([REDUCE] * 5, 4))
    path = tmp_path / "_dump_2"
    if broken == "missing":
        path.unlink()
    else:
        path.write_bytes(b"" if broken == "empty" else path.read_bytes()[:-40])
    hang = judge(tmp_path)
    assert (hang.kind, ranks(hang), hang.ranks_missing) == ("absent_rank", [2], [2])
    assert any("_dump_2: damaged" in note for note in hang.notes) == (broken == "damaged")


def test_a_missing_dump_is_not_blamed_where_another_rank_explains_the_wait(tmp_path: Path) -> None:
    write(tmp_path, same([REDUCE] * 5, 4, r2=4))
    (tmp_path / "_dump_1").unlink()
    hang = judge(tmp_path)
    assert (ranks(hang), hang.ranks_missing) == ([2], [1])


def test_nothing_unfinished_is_no_fault(tmp_path: Path) -> None:
    hang = judge(write(tmp_path, same([REDUCE] * 5, 5)))
    assert (hang.kind, hang.culprits, hang.notes) == ("no_fault", [], ["no rank has an unfinished operation"])


def test_all_have_come_and_nobody_lags(tmp_path: Path) -> None:
    hang = judge(write(tmp_path, same([REDUCE] * 5, 4)))
    assert (hang.kind, hang.culprits) == ("no_fault", [])
    assert "all members have come and nobody lags" in hang.notes[0]


@pytest.mark.parametrize(
    ("fields", "said"),
    [
        ({"profiling_name": "nccl:broadcast"}, "broadcast"),
        ({"input_sizes": [[63]], "output_sizes": [[63]]}, "all_reduce of 63 Float"),
        ({"input_dtypes": ["BFloat16"], "output_dtypes": ["BFloat16"]}, "all_reduce of 64 BFloat16"),
    ],
)
def test_one_rank_calls_it_differently(tmp_path: Path, fields: dict[str, Any], said: str) -> None:
    dumps = same([REDUCE] * 5, 4)
    change(dumps, 1, 4, **fields)
    hang = judge(write(tmp_path, dumps))
    assert (hang.kind, ranks(hang)) == ("mismatch", [1])
    assert said in hang.culprits[0].why and "others, as rank 0, call all_reduce of 64 Float" in hang.culprits[0].why
    assert "/job/train.py:104 in step" in hang.culprits[0].why


def test_a_rank_that_left_one_out_has_lost_step(tmp_path: Path) -> None:
    program = [Op("0", "all_reduce", 10), Op("0", "_all_gather_base", 20), Op("0", "_reduce_scatter_base", 30)] * 4
    skipping = program[:9] + program[10:]
    programs = {0: program, 1: program, 2: skipping, 3: program}
    hang = judge(write(tmp_path, dumps_of(programs, play(ALL, programs))))
    assert (hang.kind, ranks(hang)) == ("desync", [2])
    assert "calls _all_gather_base of 20 Float" in hang.culprits[0].why and "lost step" in hang.culprits[0].why


def test_two_groups_in_two_orders(tmp_path: Path) -> None:
    groups = Groups({"0": "default_pg", "1": "A", "2": "B"}, {"0": (0, 1), "1": (0, 1), "2": (0, 1)})
    a, b = Op("1", "all_reduce", 5), Op("2", "all_reduce", 6)
    programs = {0: [a, b], 1: [b, a]}
    hang = judge(write(tmp_path, dumps_of(programs, play(groups, programs), groups)))
    assert (hang.kind, ranks(hang)) == ("desync", [0, 1])
    assert "this rank in all_reduce 1 of group 1 (A), at /job/train.py:100 in step" in hang.culprits[0].why
    assert "rank 1 in all_reduce 1 of group 2 (B)" in hang.culprits[0].why


def test_a_kernel_that_runs_elsewhere_and_not_here_is_slow(tmp_path: Path) -> None:
    dumps = same([REDUCE] * 5, 4)
    for rank in (0, 1, 3):
        change(dumps, rank, 4, state="started", time_discovered_started_ns=1)
    for rank in range(4):
        dumps[rank]["pg_status"]["0"]["last_started_collective"] = 4 if rank == 2 else 5
    hang = judge(write(tmp_path, dumps))
    assert (hang.kind, ranks(hang)) == ("slow_rank", [2])
    # Where that rank's dump does not tell when kernels start nothing can be said.
    dumps[2]["pg_status"]["0"]["last_started_collective"] = -1
    assert judge(write(tmp_path, dumps)).kind == "no_fault"
    # Without a summary the entries tell it.
    del dumps[2]["pg_status"]
    change(dumps, 2, 3, time_discovered_started_ns=1)
    assert ranks(judge(write(tmp_path, dumps))) == [2]


def test_what_all_others_have_completed_is_slow_here(tmp_path: Path) -> None:
    programs = dict.fromkeys(range(4), [REDUCE] * 5)
    came = {rank: Rank(5, 4 if rank == 3 else 5) for rank in range(4)}
    hang = judge(write(tmp_path, dumps_of(programs, came)))
    assert (hang.kind, ranks(hang)) == ("slow_rank", [3])
    assert "3 of 4 ranks have completed it" in hang.culprits[0].why


def test_a_root_that_is_done_early_says_nothing_about_the_others(tmp_path: Path) -> None:
    programs = dict.fromkeys(range(4), [Op("0", "broadcast")] * 5)
    came = {0: Rank(5, 5), 1: Rank(5, 4), 2: Rank(4, 4), 3: Rank(5, 4)}
    assert ranks(judge(write(tmp_path, dumps_of(programs, came)))) == [2]


@pytest.mark.parametrize("name", ["all_to_all", "gather", "scatter", "_broadcast_oop", "all_to_allv"])
def test_sizes_that_may_differ_are_no_mismatch(tmp_path: Path, name: str) -> None:
    dumps = same([Op("0", name)] * 3, 2)
    for rank in range(4):
        change(dumps, rank, 2, input_sizes=[[rank + 1, 8]], output_sizes=[[7 * rank + 3]])
    assert judge(write(tmp_path, dumps)).kind == "no_fault"


@pytest.mark.parametrize(
    ("name", "alike", "unlike"),
    [
        ("all_reduce", {"input_sizes": [[8, 8]]}, {"input_sizes": [[8, 9]]}),
        ("_all_gather_base", {"input_sizes": [[3]]}, {"output_sizes": [[65]]}),
        ("_reduce_scatter_base", {"output_sizes": [[3]]}, {"input_sizes": [[65]]}),
        ("all_gather", {"output_sizes": [[32], [32]], "input_sizes": [[5]]}, {"output_sizes": [[32], [31]]}),
    ],
)
def test_the_side_that_must_be_alike(tmp_path: Path, name: str, alike: dict[str, Any], unlike: dict[str, Any]) -> None:
    dumps = same([Op("0", name)] * 3, 2)
    change(dumps, 1, 2, **alike)
    assert judge(write(tmp_path, dumps)).kind == "no_fault"
    change(dumps, 1, 2, **unlike)
    assert ranks(judge(write(tmp_path, dumps))) == [1]


def coalesced(dumps: dict[int, dict[str, Any]], rank: int, names: list[str], **fields: Any) -> None:
    """Replace the last entry of a rank by several that were issued as one."""
    last = dumps[rank]["entries"].pop()
    dumps[rank]["entries"] += [last | {"profiling_name": f"nccl:{name}"} | fields for name in names]


def test_what_was_issued_as_one_is_no_mismatch(tmp_path: Path) -> None:
    dumps = same([REDUCE] * 5, 4)
    for rank in range(3):
        coalesced(dumps, rank, ["_reduce_oop", "_reduce_oop", "coalesced"][: rank + 1])
    coalesced(dumps, 3, ["reduce_scatter_tensor_coalesced"])
    assert judge(write(tmp_path, dumps)).kind == "no_fault"


def batch_of(dumps: dict[int, dict[str, Any]], rank: int, *names: str, closed: str | None) -> None:
    """A batch of sends and receives, of which torch marks only the closing entry."""
    for name in names:
        entry = dumps[rank]["entries"][-1]
        more = {
            "record_id": 90,
            "profiling_name": f"nccl:{name}",
            "is_p2p": True,
            "p2p_seq_id": 1,
            "state": "scheduled",
        }
        dumps[rank]["entries"].append(entry | more)
    if closed is not None:
        more = {"profiling_name": "nccl:coalesced", "is_p2p": False, "p2p_seq_id": 1, "state": closed}
        dumps[rank]["entries"].append(dumps[rank]["entries"][-1] | more)


def test_parts_of_a_batch_that_is_over_are_not_waited_for(tmp_path: Path) -> None:
    dumps = same([REDUCE] * 5, 5)
    batch_of(dumps, 0, "send 0->1", "recv 0<-1", closed="completed")
    batch_of(dumps, 1, "recv 1<-0", "send 1->0", closed="completed")
    hang = judge(write(tmp_path, dumps))
    assert (hang.kind, hang.notes) == ("no_fault", ["no rank has an unfinished operation"])


def test_who_does_not_take_part_in_a_batch_is_named(tmp_path: Path) -> None:
    dumps = same([REDUCE] * 5, 5)
    batch_of(dumps, 0, "send 0->1", "recv 0<-1", closed="scheduled")
    hang = judge(write(tmp_path, dumps))
    assert (hang.kind, ranks(hang)) == ("absent_rank", [1])
    assert "rank 0 waits in recv/send" in hang.culprits[0].why


def test_parts_of_batches_in_dumps_of_what_is_active_do_not_hide_the_wait(tmp_path: Path) -> None:
    """The closing entry of a batch that is over is not in such a dump; both ends still show its parts as open."""
    dumps = same([REDUCE] * 5, 4, r2=4)
    for rank, name in ((0, "send 0->1"), (1, "recv 1<-0")):
        dumps[rank]["entries"] = dumps[rank]["entries"][-1:]
        batch_of(dumps, rank, name, closed=None)
        dumps[rank]["entries"].reverse()
    assert ranks(judge(write(tmp_path, dumps))) == [2]


def test_the_recorders_summary_alone_is_enough(tmp_path: Path) -> None:
    groups, programs = megatron(2, 2, 2)
    programs = {rank: [op for op in program if op.peer is None] for rank, program in programs.items()}
    came = play(groups, programs, stop={5: 6})
    dumps = {rank: dump(groups, programs[rank], rank, came[rank]) | {"entries": []} for rank in programs}
    assert ranks(judge(write(tmp_path, dumps))) == [5]


def test_numbers_of_transfers_in_the_summary_are_not_taken_for_collectives(tmp_path: Path) -> None:
    dumps = same([REDUCE] * 5, 4, r2=4)
    for rank in range(4):
        dumps[rank]["pg_status"]["0"]["last_enqueued_collective"] = 1000 * (rank + 1)
        dumps[rank]["pg_status"]["0"]["last_completed_collective"] = 1000 * (rank + 1)
    batch_of(dumps, 0, "send 0->1", closed="completed")
    batch_of(dumps, 1, "recv 1<-0", closed="completed")
    batch_of(dumps, 2, "recv 2<-0", closed="completed")
    batch_of(dumps, 3, "recv 3<-0", closed="completed")
    assert ranks(judge(write(tmp_path, dumps))) == [2]


def test_clocks_of_hosts_do_not_matter(tmp_path: Path) -> None:
    dumps = same([REDUCE] * 5, 4, r2=4)
    for rank, made in dumps.items():
        for entry in made["entries"]:
            entry["time_created_ns"] += (-1) ** rank * 10**15
    assert ranks(judge(write(tmp_path, dumps))) == [2]


def test_a_backend_without_states(tmp_path: Path) -> None:
    """gloo tells neither states nor who belongs to a group; what is retired has ended."""
    dumps = same([REDUCE] * 5, 4, r2=4)
    for made in dumps.values():
        made["pg_config"] = {"": {"name": "", "desc": "", "ranks": "[]"}}
        for entry in made["entries"]:
            entry.update(profiling_name="gloo:all_reduce", retired=entry["state"] == "completed", state="scheduled")
    assert ranks(judge(write(tmp_path, dumps))) == [2]
    for made in dumps.values():
        del made["pg_status"]
    assert ranks(judge(write(tmp_path, dumps))) == [2]


def test_ranks_of_the_cycle_are_expected_and_placed(tmp_path: Path) -> None:
    dumps = same([REDUCE] * 5, 4)
    for made in dumps.values():
        made["pg_config"] = {}
    del dumps[2]
    write(tmp_path, dumps)
    places = {
        r: RankPlace(rank=r, local_rank=r % 2, node=f"n{r // 2}", host="h", gpu_uuid=f"GPU-{r}") for r in range(4)
    }
    snapshot = read_snapshot(find_dumps([str(tmp_path)]).sources, jobs=1, expected=frozenset(places))
    hang = find_culprits(snapshot, places)
    assert [(c.rank, c.node) for c in hang.culprits] == [(2, "n1")]
    assert hang.culprits[0].why.endswith("; GPU GPU-2")


def test_groups_of_one_name_on_different_ranks_are_different(tmp_path: Path) -> None:
    halves = [Groups({"9": "half"}, {"9": who}) for who in ((0, 1), (2, 3))]
    op = Op("9", "all_reduce")
    dumps = {r: dump(halves[r // 2], [op] * 3, r, Rank(3, 2)) for r in range(4)}
    dumps[2] = dump(halves[1], [op] * 3, 2, Rank(2, 2))
    assert ranks(judge(write(tmp_path, dumps))) == [2]


def test_few_dumps_of_many_ranks_are_said_to_be_few(tmp_path: Path) -> None:
    dumps = same([REDUCE] * 5, 4)
    hang = judge(write(tmp_path, {0: dumps[0]}))
    assert isinstance(hang, Hang)
    assert ranks(hang) == [1, 2, 3]
    assert any("3 ranks have no dump" in note for note in hang.notes)
