"""A failure in relation to what else is known: asked for, finished before, resumed after, in another version."""

from __future__ import annotations

import json

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tests.attribution.jobtexts import conclusions, lines, signatures_of, timeout, verdict_of

INJECTED = lines(
    "2031-01-02 10:00:00 ft_launcher --ft-simulate-failure-type=nic train.py",
    "2031-01-02 10:01:00 NIC health check failed - link down detected on mlx5_1",
)
AFTER = lines("2031-01-02 10:02:00 step 400 loss 2.1", "2031-01-02 10:09:00 step 900 loss 2.0")


def test_an_injected_fault_that_the_job_came_through_is_none() -> None:
    verdict = verdict_of(lines(INJECTED, AFTER))
    assert (verdict.action, verdict.no_current_fault) == ("none", True)


def test_an_injected_fault_with_no_step_after_it_is_no_drill_that_went_well() -> None:
    assert "derived.drill" not in conclusions(INJECTED)


def test_a_fault_before_a_drill_was_spoken_of_is_real() -> None:
    real = lines(
        "kernel: NVRM: Xid (PCI:0000:1b:00): 79, pid=0, GPU has fallen off the bus.",
        "# chaos experiment planned for next week",
        "step 100 loss 2.0",
        "step 101 loss 2.0",
    )
    assert verdict_of(real).action == "cordon_node"


STOPPED = lines(
    "2031-01-02 02:00:00 slurmstepd: error: *** JOB 77 ON n4 CANCELLED AT 2031-01-02T02:00:00 DUE TO PREEMPTION ***",
    "2031-01-02 02:00:01 torch.distributed.elastic.multiprocessing.api.SignalException: Process 88 got signal: 15",
)
RESUMED = lines("2031-01-02 02:07:10 resuming from /ckpt/step_8000", "2031-01-02 02:08:00 step 8010 loss 2.0")


def test_a_preempted_job_that_makes_steps_again_needs_nothing() -> None:
    assert verdict_of(lines(STOPPED, RESUMED)).no_current_fault


def test_a_resumed_job_that_fails_again_is_not_running() -> None:
    failed = lines(
        "2031-01-02 02:09:00 Traceback (most recent call last):", '  File "/w/a.py", line 1, in f', "KeyError: 'x'"
    )
    assert not verdict_of(lines(STOPPED, RESUMED, failed)).no_current_fault


@pytest.mark.parametrize(
    ("finished", "right"), [("final checkpoint written and verified: /c/9", True), ("step 9", False)]
)
def test_broken_connections_after_finished_work_are_of_taking_down(finished: str, right: bool) -> None:
    text = lines(
        f"2031-09-11 17:40:39 INFO {finished}",
        "[rank5]:[W911 17:40:41.2 TCPStore.cpp:125] [c10d] recvValue failed on SocketImpl(fd=7, addr=[a]:4, remote=[b]:2): x",
    )
    assert verdict_of(text).no_current_fault is right


def test_a_barrier_that_one_rank_calls_after_the_end_is_the_scripts() -> None:
    text = lines("2031-02-14 11:00:00 `Trainer.fit` stopped: `max_epochs=3` reached.", timeout(0, 40, "ALLREDUCE"))
    assert conclusions(text).keys() == {"derived.finished_apart"}
    assert verdict_of(text).fault_class == "user_code"


@pytest.mark.parametrize("remark", ["# no Xid 79 in any log", "# 8 hosts: no pod was evicted"])
def test_a_note_that_something_was_not_seen_is_no_sign_of_it(remark: str) -> None:
    assert not {"xid.79", "sched.taken_away"} & set(signatures_of(lines(remark)))


def test_a_note_that_something_was_seen_is_one() -> None:
    assert "sched.taken_away" in signatures_of(lines("# no Xid; the pod was evicted"))


def test_another_version_that_works_is_a_fault_of_the_library() -> None:
    text = lines(timeout(4, 40, "ALLREDUCE"), "# downgraded to torch 2.8.0: 30000 steps without a hang")
    verdict = verdict_of(text)
    assert (verdict.fault_class, verdict.action) == ("framework", "restart_job")


def test_calls_of_ranks_that_differ_are_a_mismatch() -> None:
    text = lines(
        "rank 0: seq 10 all_reduce [4] completed, seq 11 broadcast [16] scheduled",
        "rank 1: seq 10 all_reduce [4] completed, seq 11 all_reduce [64] scheduled",
    )
    assert "derived.collective_mismatch" in conclusions(text)
    assert "derived.collective_mismatch" not in conclusions(text.replace("broadcast [16]", "all_reduce [64]"))


def test_rows_that_are_expected_and_not_sent_are_a_mismatch() -> None:
    def entry(rank: int, expected: int) -> str:
        splits = {"input_split_sizes": [4, 4], "output_split_sizes": [expected, 4]}
        return json.dumps(
            {"rank": rank, "collective_seq_id": 3, "profiling_name": "nccl:all_to_all", "state": "started"} | splits
        )

    assert "derived.size_mismatch" in conclusions(lines(entry(0, 4), entry(1, 6)))
    assert "derived.size_mismatch" not in conclusions(lines(entry(0, 4), entry(1, 4)))


@pytest.mark.parametrize(("other", "uneven"), [(1250, True), (1251, False)])
def test_ranks_with_different_numbers_of_batches_part(other: int, uneven: bool) -> None:
    text = lines(
        f"rank 0: train epoch 0: 1251 batches   rank 1: train epoch 0: {other} batches", timeout(0, 40, "ALLREDUCE")
    )
    assert ("derived.uneven_data" in conclusions(text)) is uneven


@given(
    st.lists(st.one_of(st.text(max_size=60), st.just('{"rank": 1, "collective_seq_id": [], "entries": 3}')), max_size=8)
)
def test_no_text_makes_the_reader_of_calls_raise(parts: list[str]) -> None:
    signatures_of(lines(*(f"rank 1: seq {p} collective_seq_id" for p in parts), *parts))
