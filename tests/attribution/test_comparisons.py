"""Two runs or lives held against each other, and texts in which that shows nothing or the other thing."""

from __future__ import annotations

import pytest

from tests.attribution.jobtexts import conclusions, lines, timeout, verdict_of

ALARM = "alert: resume-audit: printed loss differs by 0.0194 from the continuous run -> DIVERGED"
LATER = "resume-check: per-step loss of steps 101..140: identical in both runs"
WEIGHTS = "resume-check: parameters at step 140: max abs diff 0.0"
PAIR = "grad norm at 102: continuous 1.921, resumed 1.921"


@pytest.mark.parametrize("facts", [(LATER, WEIGHTS), (LATER, PAIR), (WEIGHTS, PAIR)])
def test_an_audit_is_wrong_where_all_that_is_measured_is_equal(facts: tuple[str, ...]) -> None:
    verdict = verdict_of(lines(ALARM, *facts))
    assert (verdict.action, verdict.no_current_fault, verdict.fault_class) == ("none", True, "framework")


@pytest.mark.parametrize(
    "facts",
    [
        (),
        (LATER,),
        (
            "resume-check: per-step loss of steps 1..100: identical in both runs",
            "resume-check: weights of steps 1..100 identical in both runs",
        ),
        (LATER, "resume-check: parameters at step 140: max abs diff 0.11"),
        (LATER, WEIGHTS, "per-step loss of steps 141..150: not identical"),
        (LATER, "grad norm at 102: continuous 1.921, resumed 1.733"),
        (LATER, WEIGHTS, "Traceback (most recent call last):", '  File "train.py", line 3, in f', "KeyError: 'x'"),
        (LATER, WEIGHTS, "# the job hangs since 12:00"),
        ("resuming from step 200", LATER, WEIGHTS),
    ],
)
def test_an_audit_stands_where_less_is_equal(facts: tuple[str, ...]) -> None:
    assert not verdict_of(lines(ALARM, *facts)).no_current_fault


COUNTS = (
    " iteration      499/ 10000 | consumed samples:       127744 | lm loss: 2.410E+00 |",
    " iteration      500/ 10000 | consumed samples:       128000 | lm loss: 2.409E+00 |",
)
LOADS = " loading checkpoint from /ckpt at iteration 500"


@pytest.mark.parametrize(("after", "jumps"), [(256256, True), (128256, False), (128512, False), (130000, False)])
def test_a_count_that_is_added_twice_at_a_resume(after: int, jumps: bool) -> None:
    last = f" iteration      501/ 10000 | consumed samples:       {after} | lm loss: 2.411E+00 |"
    found = conclusions(lines(*COUNTS, LOADS, last))
    assert ("derived.ckpt.count_jumps" in found) is jumps


def test_a_count_that_jumps_without_a_resume_is_of_another_run() -> None:
    last = " iteration      501/ 10000 | consumed samples:       956256 | lm loss: 2.411E+00 |"
    assert "derived.ckpt.count_jumps" not in conclusions(lines(*COUNTS, last))


RESUMED = (
    "Resuming from checkpoint step 400",
    "sampler restored at position 25600",
    "step 401 loss 2.31",
    "step 800 loss 2.12",
)


@pytest.mark.parametrize(
    ("saved", "frozen"),
    [
        ('saved checkpoint step 800, sampler state: {"position": 0}', True),
        ('saved checkpoint step 800, sampler state: {"position": 51200}', False),
        ('saved checkpoint step 800, epoch 2 begins, sampler state: {"position": 0}', False),
        ("", False),
    ],
)
def test_a_state_that_stands_at_its_begin_after_it_was_loaded(saved: str, frozen: bool) -> None:
    assert ("derived.ckpt.state_frozen" in conclusions(lines(*RESUMED, saved))) is frozen


REMARK = "# expert_parallel_size=4: 1000 steps ok; expert_parallel_size=8: hangs at step 3 every time"


def test_a_degree_of_parallelism_that_hangs_is_the_librarys() -> None:
    verdict = verdict_of(lines(timeout(4, 98, "ALLTOALL_BASE"), REMARK))
    assert (verdict.fault_class, verdict.action) == ("framework", "fail_fast")


@pytest.mark.parametrize(
    "other",
    [
        "kernel: NVRM: Xid (PCI:0000:1b:00): 79, pid=0, GPU has fallen off the bus.",
        "torch.cuda.OutOfMemoryError: CUDA out of memory. Tried to allocate 2.00 GiB",
    ],
)
def test_a_degree_says_nothing_beside_a_broken_machine_or_full_memory(other: str) -> None:
    assert "derived.parallel_degree" not in conclusions(lines(timeout(4, 98, "ALLTOALL_BASE"), REMARK, other))
