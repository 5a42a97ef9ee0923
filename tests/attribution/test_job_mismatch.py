"""Ranks that took different ways through the program."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from keepstep.attribution.rules.mismatch import ALIKE, mismatches
from keepstep.catalog.load import shipped
from tests.attribution.jobtexts import conclusions, events_of, lines, status, timeout, verdict_of


def test_different_collectives_at_one_sequence_are_a_mismatch() -> None:
    text = lines(timeout(0, 9, "BROADCAST"), timeout(1, 9, "ALLREDUCE"), timeout(2, 9, "ALLREDUCE"))
    verdict = verdict_of(text)
    assert verdict.signature == "derived.collective_mismatch"
    assert (verdict.fault_class, verdict.action) == ("user_code", "fail_fast")


def test_different_sizes_of_a_collective_that_needs_equal_ones() -> None:
    text = lines(timeout(0, 9, "_ALLGATHER_BASE", size=512), timeout(1, 9, "_ALLGATHER_BASE", size=640))
    assert "derived.size_mismatch" in conclusions(text)


def test_sizes_of_all_to_all_may_differ() -> None:
    text = lines(timeout(0, 9, "ALLTOALL_BASE", size=512), timeout(1, 9, "ALLTOALL_BASE", size=640))
    assert conclusions(text) == {}


def test_a_send_and_a_receive_are_no_mismatch() -> None:
    assert conclusions(lines(timeout(0, 9, "SEND"), timeout(1, 9, "RECV"))) == {}


def test_counters_of_different_groups_are_not_compared() -> None:
    text = lines(
        timeout(0, 9, "ALLREDUCE"),
        status(0, 9, 9, 8, "1 PG GUID 5(tp)"),
        timeout(1, 900, "ALLGATHER"),
        status(1, 900, 900, 899, "2 PG GUID 6(dp)"),
    )
    assert conclusions(text) == {}


def test_different_counters_in_one_group_are_a_desync_and_name_who_is_behind() -> None:
    text = lines(
        timeout(0, 100, "ALLREDUCE"),
        status(0, 100, 100, 99),
        timeout(1, 101, "ALLREDUCE"),
        status(1, 101, 101, 100),
        timeout(2, 101, "ALLREDUCE"),
        status(2, 101, 101, 100),
    )
    found = conclusions(text)
    assert found["derived.sequence_desync"].attrs["behind"] == [0]


def test_counters_far_apart_without_a_group_are_of_different_groups() -> None:
    assert conclusions(lines(timeout(0, 96120, "ALLREDUCE"), timeout(1, 64088, "ALLREDUCE"))) == {}


def test_the_first_stuck_call_of_a_rank_counts_not_those_behind_it() -> None:
    text = lines(
        *[timeout(r, 100, "ALLREDUCE") for r in (0, 1, 2)], timeout(0, 101, "BROADCAST"), timeout(1, 102, "ALLGATHER")
    )
    assert conclusions(text) == {}


@given(
    st.lists(st.integers(0, 200), min_size=1, max_size=12, unique=True),
    st.integers(0, 10**9),
    st.sampled_from(sorted(ALIKE)),
    st.integers(1, 10**9),
)
def test_ranks_that_wait_in_the_same_call_never_disagree(ranks: list[int], seq: int, op: str, size: int) -> None:
    events = events_of(lines(*[timeout(r, seq, op, size=size) for r in ranks]))
    assert mismatches(events, shipped()) == []
