"""The demo's sample check: a ledger that repeats, misses, reorders or misattributes samples must be noticed."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from keepstep.cli.demo import LedgerLine, check_samples, read_ledger

STEPS = 6
WORLD = 2


def samples_of(step: int, rank: int) -> list[int]:
    """Four samples a step and rank, all different over the run."""
    first = (step * WORLD + rank) * 4
    return [first + i for i in (2, 0, 3, 1)]


def cycle_lines(cycle: int, begin: int, end: int) -> list[LedgerLine]:
    return [
        LedgerLine(cycle, step, rank, samples_of(step, rank)) for step in range(begin, end) for rank in range(WORLD)
    ]


REFERENCE = cycle_lines(0, 0, STEPS)


def check(lines: list[LedgerLine], restored: dict[int, int]) -> list[str]:
    return check_samples(REFERENCE, lines, restored, STEPS, WORLD)


def test_undisturbed_run_holds() -> None:
    assert check(cycle_lines(0, 0, STEPS), {0: 0}) == []


def test_steps_redone_after_a_rollback_count_once() -> None:
    lines = cycle_lines(0, 0, 4) + cycle_lines(1, 2, 3) + cycle_lines(2, 2, STEPS)
    assert check(lines, {0: 0, 1: 2, 2: 2}) == []


def test_step_that_only_one_rank_completed_before_the_fault_is_no_problem() -> None:
    lines = [*cycle_lines(0, 0, 3), LedgerLine(0, 3, 0, samples_of(3, 0)), *cycle_lines(1, 2, STEPS)]
    assert check(lines, {0: 0, 1: 2}) == []


def test_cycle_that_died_before_restoring_leaves_no_trace() -> None:
    assert check(cycle_lines(0, 0, 4) + cycle_lines(2, 2, STEPS), {0: 0, 2: 2}) == []


def replaced(lines: list[LedgerLine], index: int, samples: list[int]) -> list[LedgerLine]:
    old = lines[index]
    return [*lines[:index], LedgerLine(old.cycle, old.step, old.rank, samples), *lines[index + 1 :]]


def test_duplicate_sample_is_noticed() -> None:
    lines = replaced(cycle_lines(0, 0, STEPS), 5, samples_of(0, 0))
    problems = check(lines, {0: 0})
    assert any("used more than once" in problem for problem in problems)
    assert any("step 2, rank 1" in problem for problem in problems)


def test_missing_sample_is_noticed() -> None:
    lines = replaced(cycle_lines(0, 0, STEPS), 5, samples_of(2, 1)[:-1])
    assert any("step 2, rank 1" in problem for problem in check(lines, {0: 0}))


def test_reordered_samples_are_noticed() -> None:
    lines = replaced(cycle_lines(0, 0, STEPS), 5, sorted(samples_of(2, 1)))
    assert any("step 2, rank 1" in problem for problem in check(lines, {0: 0}))


def test_samples_swapped_between_ranks_are_noticed() -> None:
    lines = cycle_lines(0, 0, STEPS)
    swapped = [LedgerLine(x.cycle, x.step, 1 - x.rank, x.samples) if x.step == 3 else x for x in lines]
    assert len(check(swapped, {0: 0})) == WORLD


def test_missing_step_of_a_rank_is_noticed() -> None:
    lines = [line for line in cycle_lines(0, 0, STEPS) if (line.step, line.rank) != (4, 1)]
    assert check(lines, {0: 0}) == ["faulted run: no record of step 4 on rank 1"]


def test_data_position_that_was_not_rolled_back_is_noticed() -> None:
    # Weights back at step 2, loader gone on from step 4: the samples of steps 2 and 3 are lost.
    skipping = [LedgerLine(1, s, r, samples_of(s + 2, r)) for s in range(2, STEPS) for r in range(WORLD)]
    assert any("step 2, rank 0" in problem for problem in check(cycle_lines(0, 0, 4) + skipping, {0: 0, 1: 2}))


def test_step_executed_by_a_cycle_that_began_later_is_noticed() -> None:
    # The record says cycle 1 began at step 3, but it executed step 2 as well.
    problems = check(cycle_lines(0, 0, 4) + cycle_lines(1, 2, STEPS), {0: 0, 1: 3})
    assert any("which its records do not explain" in problem for problem in problems)


def test_step_executed_twice_in_a_cycle_is_noticed() -> None:
    lines = [*cycle_lines(0, 0, STEPS), LedgerLine(0, 1, 0, samples_of(1, 0))]
    assert check(lines, {0: 0}) == ["rank 0 executed step 1 twice in cycle 0"]


def test_cycle_without_a_record_is_noticed() -> None:
    problems = check(cycle_lines(0, 0, STEPS) + cycle_lines(7, 2, 3), {0: 0})
    assert any(problem.startswith("cycle 7") for problem in problems)


def test_reference_that_repeats_a_sample_is_noticed() -> None:
    bad = replaced(REFERENCE, 4, samples_of(0, 0))
    problems = check_samples(bad, bad, {0: 0}, STEPS, WORLD)
    assert [problem for problem in problems if problem.startswith("reference run")]


@given(st.data())
def test_any_sequence_of_rollbacks_holds_and_any_changed_sample_does_not(data: st.DataObject) -> None:
    begins = [0, *data.draw(st.lists(st.integers(0, STEPS - 1), max_size=5))]
    lines: list[LedgerLine] = []
    for cycle, begin in enumerate(begins):
        last = cycle == len(begins) - 1
        end = STEPS if last else data.draw(st.integers(max(begin, *begins[cycle + 1 :]), STEPS))
        lines += cycle_lines(cycle, begin, end)
    restored = dict(enumerate(begins))
    assert check(lines, restored) == []
    owner = {step: max(c for c, begin in restored.items() if begin <= step) for step in range(STEPS)}
    survivors = [i for i, line in enumerate(lines) if line.cycle == owner[line.step]]
    victim = data.draw(st.sampled_from(survivors))
    position = data.draw(st.integers(0, 3))
    samples = list(lines[victim].samples)
    samples[position] += 1000
    assert check(replaced(lines, victim, samples), restored)


def write_ledger(path: Path, lines: list[LedgerLine], rest: str = "") -> None:
    fields = [{"cycle": x.cycle, "step": x.step, "rank": x.rank, "samples": x.samples} for x in lines]
    path.write_text("".join(json.dumps(line) + "\n" for line in fields) + rest)


def test_ledger_is_read_from_all_files_and_a_cut_last_line_is_left_out(tmp_path: Path) -> None:
    write_ledger(tmp_path / "ledger-c0000-rank0.jsonl", cycle_lines(0, 0, 2), '{"cycle": 0, "step": 2, "ra')
    write_ledger(tmp_path / "ledger-c0001-rank0.jsonl", cycle_lines(1, 2, 3))
    assert read_ledger(tmp_path) == cycle_lines(0, 0, 2) + cycle_lines(1, 2, 3)


def test_damaged_line_in_the_middle_of_a_ledger_is_an_error(tmp_path: Path) -> None:
    write_ledger(tmp_path / "ledger-c0000-rank0.jsonl", cycle_lines(0, 0, 1), '{"cycle": 0,\n{}\n')
    with pytest.raises(ValueError, match=r"JSON|truncated|malformed"):
        read_ledger(tmp_path)
