"""What watching does to a job, and what its absence means."""

from __future__ import annotations

import pytest

from tests.attribution.jobtexts import conclusions, lines, timeout, verdict_of


@pytest.mark.parametrize(
    "probe",
    ['echo "VERBOSE STATUS" | nc localhost 28028', "gdb -p 8123 -batch", "py-spy dump --pid 8123", "strace -p 8123"],
)
def test_a_crash_right_after_a_probe_is_the_probes(probe: str) -> None:
    text = lines(f"2031-02-14T11:00:00Z ops: {probe}", "2031-02-14T11:00:40Z free(): invalid pointer")
    assert "derived.probe_crashed_it" in conclusions(text)
    assert verdict_of(text).fault_class == "framework"


def test_a_crash_hours_after_a_probe_is_not() -> None:
    text = lines("2031-02-14T11:00:00Z ops: py-spy dump --pid 8123", "2031-02-14T15:00:40Z free(): invalid pointer")
    assert "derived.probe_crashed_it" not in conclusions(text)


def test_a_crash_with_a_cause_of_its_own_is_not() -> None:
    text = lines(
        "2031-02-14T11:00:00Z ops: py-spy dump --pid 8123",
        "2031-02-14T11:00:05Z RuntimeError: CUDA error: uncorrectable ECC error encountered",
        "2031-02-14T11:00:06Z Aborted (core dumped)",
    )
    assert "derived.probe_crashed_it" not in conclusions(text)


def test_a_missing_dump_of_a_rank_that_raised_is_explained() -> None:
    text = lines(
        "$ ls dumps",
        "nccl_trace_rank_0  nccl_trace_rank_2",
        "==> rank1.log <==",
        "Traceback (most recent call last):",
        '  File "/w/train.py", line 8, in step',
        "ValueError: label 9",
        "==> rank0.log <==",
        timeout(0, 9, "ALLREDUCE"),
    )
    found = conclusions(text)
    assert found["derived.dump_missing_raised"].rank == 1
    assert verdict_of(text).signature == "python.user_exception"


def test_a_missing_dump_without_more_is_only_named() -> None:
    text = lines("$ ls dumps", "nccl_trace_rank_0  nccl_trace_rank_2", "==> rank0.log <==", timeout(0, 9, "ALLREDUCE"))
    assert conclusions(text)["derived.dump_missing"].rank == 1
    assert verdict_of(text).fault_class == "unknown"


def test_a_cuda_error_that_survives_a_restart_inside_the_process_needs_a_new_process() -> None:
    error = "[rank3]: RuntimeError: CUDA error: an illegal memory access was encountered"
    verdict = verdict_of(lines(error, "[in-process restart #1]", error))
    assert (verdict.signature, verdict.action) == ("derived.context_not_recovered", "restart_job")


def test_a_monitor_that_is_off_is_no_fault_of_a_job_that_works() -> None:
    text = lines(
        "Health checks disabled: GPU driver version r535 is older than required r570",
        "step 100 loss 2.0",
        "step 200 loss 1.9",
    )
    verdict = verdict_of(text)
    assert (verdict.fault_class, verdict.no_current_fault) == ("framework", True)


def test_a_monitor_that_is_off_beside_a_failure_excuses_nothing() -> None:
    text = lines(
        "Health checks disabled: GPU driver version r535 is older than required r570",
        "step 100 loss 2.0",
        "RuntimeError: CUDA error: uncorrectable ECC error encountered",
    )
    assert "derived.monitor_off" not in conclusions(text)


def test_a_hang_that_was_declared_while_steps_went_on_is_a_false_alarm() -> None:
    text = lines("2031-02-14 11:00:00 detector: hang detected", "2031-02-14 11:03:30 step 4001 loss 2.2")
    assert verdict_of(text).no_current_fault
    restarted = lines(
        "2031-02-14 11:00:00 detector: hang detected",
        "2031-02-14 11:01:00 [default] Starting worker group",
        "2031-02-14 11:03:30 step 4001 loss 2.2",
    )
    assert "derived.false_alarm" not in conclusions(restarted)


def test_dumps_of_days_before_the_last_steps_are_of_a_hang_that_is_over() -> None:
    listing = "$ ls -l /fr\n-rw-r--r-- 1 u u 450 {} nccl_trace_rank_0\n-rw-r--r-- 1 u u 450 {} nccl_trace_rank_1\n==> train.log <=="
    step = "2031-02-14 11:10:00 step 9100 loss 1.2"
    assert verdict_of(lines(listing.format("Feb 11 04:00", "Feb 11 04:00"), step)).no_current_fault
    assert "derived.old_dumps" not in conclusions(lines(listing.format("Feb 14 11:05", "Feb 14 11:05"), step))
