"""GPU memory that somebody else holds."""

from __future__ import annotations

import math

from hypothesis import given
from hypothesis import strategies as st

from keepstep.attribution.rules.leftovers import gib, holders
from tests.attribution.jobtexts import conclusions, lines, verdict_of


def oom(holder: str, own: str, free: str = "0.50 GiB", capacity: str = "79.32 GiB") -> str:
    return (
        f"[rank0]: torch.OutOfMemoryError: CUDA out of memory. Tried to allocate 2.00 GiB. GPU 0 has a total "
        f"capacity of {capacity} of "
        f"which {free} is free. {holder}Including non-PyTorch memory, this process has {own} memory in use."
    )


def test_a_foreign_process_with_most_of_the_gpu_makes_it_no_fault_of_the_program() -> None:
    verdict = verdict_of(lines(oom("Process 991 has 70.10 GiB memory in use. ", "8.60 GiB")))
    assert verdict.signature == "derived.memory_held_by_other"
    assert (verdict.fault_class, verdict.action) == ("framework", "restart_job")


def test_a_program_that_fills_the_gpu_itself_is_to_blame() -> None:
    verdict = verdict_of(lines(oom("", "78.80 GiB")))
    assert (verdict.fault_class, verdict.action) == ("user_code", "fail_fast")


def test_small_contexts_of_neighbours_change_nothing() -> None:
    text = lines(oom("Process 11 has 512.00 MiB memory in use. Process 12 has 512.00 MiB memory in use. ", "77.00 GiB"))
    assert conclusions(text) == {}


def test_ranks_that_all_use_one_gpu_are_the_programs_doing() -> None:
    holder = "".join(f"Process {p} has 19.40 GiB memory in use. " for p in (11, 12, 13))
    assert verdict_of(lines(oom(holder, "19.40 GiB"))).fault_class == "user_code"


def test_a_worker_of_the_same_job_is_not_foreign() -> None:
    text = lines(
        "[ERROR] failed (exitcode: 1) local_rank: 1 (pid: 991) of binary: python",
        oom("Process 991 has 70.10 GiB memory in use. ", "8.60 GiB"),
    )
    assert "derived.memory_held_by_other" not in conclusions(text)


def test_memory_that_nobody_names_is_not_the_programs_either() -> None:
    assert "derived.memory_held_by_unknown" in conclusions(lines(oom("", "1.20 GiB", free="40.00 MiB")))


def test_the_same_low_memory_at_the_start_of_two_lives_was_never_given_back() -> None:
    text = lines("cycle=2 start cuda:0 free 11.2/79.3 GiB", "cycle=3 start cuda:0 free 11.2/79.3 GiB")
    assert "derived.memory_never_freed" in conclusions(text)


def test_memory_that_comes_back_is_no_leftover() -> None:
    text = lines("cycle=2 start cuda:0 free 11.2/79.3 GiB", "cycle=3 start cuda:0 free 78.9/79.3 GiB")
    assert conclusions(text) == {}


@given(st.text(max_size=300))
def test_any_text_names_holders_without_an_error(text: str) -> None:
    assert all(h.gib >= 0 for h in holders(text))
    assert holders(f"{text} Process 7 has 1.50 GiB memory in use.")[-1] == (7, 1.5)


@given(st.text(max_size=20), st.text(max_size=5))
def test_any_size_is_a_number(size: str, unit: str) -> None:
    assert math.isfinite(gib(size, unit))
