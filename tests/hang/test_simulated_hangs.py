"""Jobs with TP, PP and DP groups in which one or two ranks go wrong: exactly these are named, however far the wait has spread."""

from __future__ import annotations

import tempfile
from pathlib import Path
from typing import Any

from hypothesis import given, settings
from hypothesis import strategies as st

from keepstep.records.hang import Hang
from tests.hang.jobs import Groups, Op, Rank, dump, judge, megatron, play, ranks, waited_for, write

SHAPES = st.sampled_from([(2, 2, 2), (2, 3, 2), (1, 2, 4), (4, 1, 2), (2, 1, 1), (1, 1, 5), (2, 4, 2)])


def hang_of(
    groups: Groups,
    programs: dict[int, list[Op]],
    came: dict[int, Rank],
    data: Any,
    *,
    without: frozenset[int] = frozenset(),
) -> Hang:
    """The verdict on the dumps of a played job, in a form that chance picks."""
    only_active = data.draw(st.booleans())
    status = data.draw(st.booleans()) or only_active
    eager = not only_active and data.draw(st.booleans())
    made = {
        rank: dump(groups, programs[rank], rank, came[rank], only_active=only_active, status=status, eager=eager)
        for rank in programs
        if rank not in without
    }
    with tempfile.TemporaryDirectory() as folder:
        return judge(write(Path(folder), made, form=data.draw(st.sampled_from(["torch", "pickle", "json"]))))


@settings(max_examples=120, deadline=None)
@given(SHAPES, st.data())
def test_ranks_whose_host_stops_are_named(shape: tuple[int, int, int], data: Any) -> None:
    groups, programs = megatron(*shape)
    chosen = data.draw(st.sets(st.sampled_from(sorted(programs)), min_size=1, max_size=2))
    stop = {rank: data.draw(st.integers(0, len(programs[rank]) - 1)) for rank in chosen}
    came = play(groups, programs, stop=stop, ahead=data.draw(st.integers(1, 6)))
    # One that was blocked by the other before it came to its own fault is a victim; one that nobody waits for may be computing.
    idle = {r for r in stop if came[r].issued == stop[r] and came[r].completed == came[r].issued}
    guilty = sorted(idle & waited_for(groups, programs, came))
    # Of two without a dump each may be waiting for the other.
    hidden = frozenset(guilty if len(guilty) == 1 and data.draw(st.booleans()) else ())
    hang = hang_of(groups, programs, came, data, without=hidden)
    assert ranks(hang) == guilty
    assert hang.kind == ("absent_rank" if guilty else "no_fault")
    assert {*hang.ranks_missing} >= hidden


@settings(max_examples=120, deadline=None)
@given(SHAPES, st.data())
def test_a_rank_whose_gpu_is_stuck_is_named(shape: tuple[int, int, int], data: Any) -> None:
    groups, programs = megatron(*shape)
    rank = data.draw(st.sampled_from(sorted(programs)))
    # A transfer that the other end has completed is told from one that it has not issued by nothing in a dump.
    at = data.draw(st.sampled_from([i for i, op in enumerate(programs[rank]) if op.peer is None]))
    came = play(groups, programs, stuck={rank: at}, ahead=data.draw(st.integers(1, 6)))
    hang = hang_of(groups, programs, came, data)
    assert ranks(hang) == [rank]
    assert hang.kind in ("slow_rank", "absent_rank")


@settings(max_examples=60, deadline=None)
@given(SHAPES, st.data())
def test_a_job_that_is_done_has_no_culprit(shape: tuple[int, int, int], data: Any) -> None:
    groups, programs = megatron(*shape)
    hang = hang_of(groups, programs, play(groups, programs), data)
    assert (hang.kind, hang.culprits, hang.ranks_missing) == ("no_fault", [], [])


@settings(max_examples=120, deadline=None)
@given(SHAPES, st.data())
def test_a_rank_that_leaves_one_out_or_calls_another_is_named(shape: tuple[int, int, int], data: Any) -> None:
    groups, programs = megatron(*shape)
    rank = data.draw(st.sampled_from(sorted(programs)))
    at = data.draw(st.sampled_from([i for i, op in enumerate(programs[rank]) if op.peer is None]))
    op = programs[rank][at]
    how = data.draw(st.sampled_from(["skip", "size", "name"]))
    changed = {"skip": [], "size": [op._replace(elements=7)], "name": [op._replace(name="all_reduce_barrier")]}[how]
    programs[rank] = [*programs[rank][:at], *changed, *programs[rank][at + 1 :]]
    came = play(groups, programs, ahead=data.draw(st.integers(1, 6)))
    hang = hang_of(groups, programs, came, data)
    assert rank in ranks(hang)
    if len(groups.ranks[op.group]) > 2:
        assert ranks(hang) == [rank]
    else:
        # Of two ranks that disagree nobody can say which is wrong.
        assert {*ranks(hang)} <= {*groups.ranks[op.group]}
    assert hang.kind == "mismatch" or how == "skip"
    assert hang.kind != "no_fault"
