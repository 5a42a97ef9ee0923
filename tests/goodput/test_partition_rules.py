"""Each rule of the partition on a small timeline whose phases were worked out by hand."""

from __future__ import annotations

from typing import Any

import pytest

from keepstep.goodput import Partition, partition
from keepstep.records.cycle import PHASES
from keepstep.records.timeline import Mark, MarkKind


def mark(t_ns: int, kind: MarkKind, cycle: int = 0, attempt: int = 0, **attrs: Any) -> Mark:
    return Mark(t_ns=t_ns, kind=kind, cycle=cycle, attempt=attempt, attrs=attrs)


def spent(part: Partition) -> dict[str, int]:
    """Phases that took time; checks what every partition must fulfil."""
    assert tuple(part.phases_ns) == PHASES
    assert sum(part.phases_ns.values()) == part.wall_ns == part.end_ns - part.begin_ns
    edges = [part.begin_ns, *(i.end_ns for i in part.intervals)]
    assert [i.begin_ns for i in part.intervals] == edges[:-1]
    assert edges[-1] == part.end_ns
    return {name: ns for name, ns in part.phases_ns.items() if ns}


START = [
    mark(100, "run_started"),
    mark(105, "cycle_started"),
    mark(112, "assigned"),
    mark(125, "attached"),
    mark(145, "restored", step=0, source="none"),
    mark(175, "first_step", step=1),
]
STARTED = {"init": 5, "rendezvous": 7, "start": 13, "restore": 20, "first_step": 30}

FAULT = [
    mark(260, "fault", occurred_ns=255, detected_ns=260, cause="hardware", completed_step=9),
    mark(262, "captured"),
    mark(266, "stopped"),
    mark(274, "decided", action="restart", counted=True),
]
"""From step 9 complete at 255, the moment of the fault, to the decision at 274."""


def restart(begin_ns: int, cycle: int, step: int, source: str = "disk") -> list[Mark]:
    """A cycle that takes 1, 2, 3 and 4 ns to get to its first step."""
    return [
        mark(begin_ns, "cycle_started", cycle),
        mark(begin_ns + 1, "assigned", cycle),
        mark(begin_ns + 3, "attached", cycle),
        mark(begin_ns + 6, "restored", cycle, step=step, source=source),
        mark(begin_ns + 10, "first_step", cycle, step=step + 1),
    ]


class TestUndisturbedRun:
    def test_each_start_phase_ends_where_the_next_mark_is(self) -> None:
        part = partition([*START, mark(275, "drain", completed_step=11), mark(280, "run_ended")])
        assert spent(part) == {**STARTED, "productive": 100, "drain": 5}
        assert part.ettr == 100 / 180

    def test_after_the_drain_everything_belongs_to_the_drain(self) -> None:
        end = [mark(275, "drain"), mark(276, "stopped"), mark(277, "decided"), mark(278, "cycle_ended")]
        assert spent(partition([*START, *end, mark(280, "run_ended")])) == {**STARTED, "productive": 100, "drain": 5}

    def test_ranks_stopped_without_a_drain_mark_are_drained_too(self) -> None:
        part = partition([*START, mark(275, "stopped"), mark(280, "run_ended")])
        assert spent(part) == {**STARTED, "productive": 100, "drain": 5}

    def test_without_a_checkpointer_the_first_step_begins_when_ranks_attach(self) -> None:
        marks = [m for m in START if m.kind != "restored"]
        part = partition([*marks, mark(275, "drain"), mark(280, "run_ended")])
        assert spent(part) == {
            "init": 5,
            "rendezvous": 7,
            "start": 13,
            "first_step": 50,
            "productive": 100,
            "drain": 5,
        }

    def test_checkpoint_blocks_are_cut_out_of_training_once(self) -> None:
        blocks = [
            mark(210, "ckpt_block", step=4, begin_ns=200, end_ns=210),
            mark(214, "ckpt_block", step=4, begin_ns=205, end_ns=214),  # another rank's view of the same save
            mark(279, "ckpt_block", step=11, begin_ns=276, end_ns=279),  # in the drain
            mark(174, "ckpt_block", step=0, begin_ns=170, end_ns=174),  # before training
            mark(240, "ckpt_block", step=7, begin_ns=240, end_ns=230),  # negative: ignored
        ]
        part = partition([*START, *blocks, mark(275, "drain"), mark(280, "run_ended")])
        assert spent(part) == {**STARTED, "productive": 86, "ckpt_block": 14, "drain": 5}


class TestFault:
    def test_recovery_phases(self) -> None:
        marks = [*START, mark(255, "step", step=9), *FAULT, *restart(280, 1, 9), mark(300, "drain", 1)]
        part = partition([*marks, mark(303, "run_ended")])
        assert spent(part) == {
            "init": 5,
            "productive": 80 + 10,
            "detect": 5,
            "capture": 2,
            "teardown": 4,
            "decide": 14,
            "rendezvous": 8,
            "start": 15,
            "restore": 23,
            "first_step": 34,
            "drain": 3,
        }
        assert part.lost_by_cause_ns == {"hardware": 25 + 10, "startup": 70}

    def test_with_new_nodes_the_time_after_the_decision_is_replace(self) -> None:
        marks = [*START, mark(255, "step", step=9), *FAULT, mark(278, "replaced"), *restart(280, 1, 9)]
        phases = spent(partition([*marks, mark(300, "run_ended")]))
        assert (phases["decide"], phases["replace"]) == (8, 6)

    def test_the_step_that_was_cut_off_is_rolled_back(self) -> None:
        marks = [*START, mark(245, "step", step=9), *FAULT, *restart(280, 1, 9)]
        phases = spent(partition([*marks, mark(300, "run_ended")]))
        assert (phases["productive"], phases["rolled_back"]) == (70 + 10, 10)

    def test_a_cut_off_step_is_rolled_back_while_the_recovery_goes_on(self) -> None:
        phases = spent(partition([*START, mark(245, "step", step=9), *FAULT]))
        assert (phases["productive"], phases["rolled_back"], phases["decide"]) == (70, 10, 8)

    def test_occurred_is_clamped_to_the_cycle(self) -> None:
        early = mark(260, "fault", occurred_ns=3, detected_ns=260)
        part = partition([*START, early, mark(300, "run_ended")])
        assert spent(part) == {"init": 5, "detect": 155, "capture": 40}

    def test_occurred_after_detected_counts_as_detected(self) -> None:
        late = mark(260, "fault", occurred_ns=290, detected_ns=260)
        phases = spent(partition([*START, late, mark(300, "run_ended")]))
        assert "detect" not in phases
        assert phases["capture"] == 40

    def test_a_second_fault_of_a_cycle_is_its_consequence(self) -> None:
        second = mark(261, "fault", occurred_ns=240, detected_ns=261, cause="user_code")
        marks = [*START, mark(255, "step", step=9), *FAULT, *restart(280, 1, 9), mark(300, "run_ended")]
        assert partition([second, *marks]) == partition(marks)

    def test_a_stopped_mark_without_a_time_does_not_eat_the_cycle(self) -> None:
        marks = [m if m.kind != "stopped" else mark(0, "stopped") for m in FAULT]
        phases = spent(partition([*START, mark(255, "step", step=9), *marks], now_ns=300))
        assert (phases["productive"], phases["detect"], phases["capture"], phases["decide"]) == (80, 5, 2, 38)

    def test_a_lost_node_without_a_fault_mark_interrupts_training(self) -> None:
        marks = [*START, mark(245, "step", step=9), mark(0, "stopped"), *restart(280, 1, 9), mark(300, "run_ended")]
        phases = spent(partition(marks))
        assert (phases["productive"], phases["decide"]) == (70 + 10, 35)
        assert partition(marks).lost_by_cause_ns == {"none": 45, "startup": 70}

    def test_the_step_a_lost_node_cut_off_is_rolled_back(self) -> None:
        marks = [*START, mark(245, "step", step=9), mark(255, "stopped"), *restart(280, 1, 9), mark(300, "run_ended")]
        phases = spent(partition(marks))
        assert (phases["productive"], phases["rolled_back"], phases["decide"]) == (70 + 10, 10, 25)

    @pytest.mark.parametrize(
        ("reached", "elapsed"),
        [(1, {"rendezvous": 20}), (2, {"rendezvous": 7, "start": 13}), (3, {"rendezvous": 7, "start": 13})],
    )
    def test_a_cycle_cut_short_accounts_for_what_it_reached(self, reached: int, elapsed: dict[str, int]) -> None:
        fault = mark(126, "fault", occurred_ns=125, detected_ns=126)
        part = partition([*START[: reached + 1], fault, *restart(126, 1, 0), mark(140, "run_ended")])
        phases = spent(partition([*START[: reached + 1], fault, mark(140, "run_ended")]))
        assert phases == {"init": 5, **elapsed, "detect": 1, "capture": 14}
        assert spent(part)["productive"] == 4

    def test_cut_short_before_restored_is_restore_when_the_script_restores_elsewhere(self) -> None:
        fault = mark(140, "fault", occurred_ns=140, detected_ns=140)
        marks = [*START[:4], fault, *restart(150, 1, 0), mark(165, "run_ended")]
        assert spent(partition(marks))["restore"] == 15 + 3
        without = [m for m in marks if m.kind != "restored"]
        assert spent(partition(without))["first_step"] == 15 + 7


class TestRolledBack:
    def test_exact_where_a_mark_has_the_restored_step(self) -> None:
        steps = [mark(190, "step", step=4), mark(240, "step", step=8)]
        marks = [*START, *steps, *FAULT, *restart(280, 1, 4), mark(300, "run_ended")]
        phases = spent(partition(marks))
        assert (phases["productive"], phases["rolled_back"]) == (15 + 10, 65)

    def test_a_block_says_when_its_step_was_complete(self) -> None:
        block = mark(204, "ckpt_block", step=4, begin_ns=200, end_ns=204)
        marks = [*START, block, mark(240, "step", step=8), *FAULT, *restart(280, 1, 4), mark(300, "run_ended")]
        phases = spent(partition(marks))
        assert (phases["productive"], phases["ckpt_block"], phases["rolled_back"]) == (25 + 10, 4, 51)

    def test_between_two_marks_a_straight_line_from_the_end_of_the_block(self) -> None:
        # step 4 at 200, training goes on at 204; step 8 at 243: step 5 at 204 + 39 // 4
        block = mark(204, "ckpt_block", step=4, begin_ns=200, end_ns=204)
        marks = [*START, block, mark(243, "step", step=8), *FAULT, *restart(280, 1, 5), mark(300, "run_ended")]
        phases = spent(partition(marks))
        assert (phases["productive"], phases["ckpt_block"], phases["rolled_back"]) == (25 + 9 + 10, 4, 42)

    def test_after_the_last_mark_the_fault_stands_for_one_step_more(self) -> None:
        # steps 5 at 215, 9 complete somewhere before 255: the line from (5, 215) to (10, 255) gives 247
        marks = [*START, mark(215, "step", step=5), *FAULT, *restart(280, 1, 9), mark(300, "run_ended")]
        phases = spent(partition(marks))
        assert (phases["productive"], phases["rolled_back"]) == (72 + 10, 8)

    def test_a_commit_places_its_step_where_nothing_else_does(self) -> None:
        commit = mark(250, "committed", step=4, checkpoint="c4", persist_ns=55)
        steps = [mark(185, "step", step=2), mark(235, "step", step=8)]
        marks = [*START, *steps, commit, *FAULT, *restart(280, 1, 4), mark(300, "run_ended")]
        assert spent(partition(marks))["rolled_back"] == 255 - 195

    def test_without_restored_mark_the_first_step_says_where_it_went_on(self) -> None:
        steps = [mark(190, "step", step=4), mark(240, "step", step=8)]
        marks = [*START, *steps, *FAULT, *restart(280, 1, 4), mark(300, "run_ended")]
        without = [m for m in marks if m.kind != "restored"]
        assert spent(partition(without))["rolled_back"] == 65

    def test_starting_over_rolls_back_all_training_but_not_the_first_step(self) -> None:
        marks = [*START, mark(240, "step", step=8), *FAULT, *restart(280, 1, 0, "none"), mark(300, "run_ended")]
        phases = spent(partition(marks))
        assert (phases["rolled_back"], phases["first_step"], phases["productive"]) == (80, 34, 10)

    def test_a_later_and_deeper_rollback_takes_more_of_every_earlier_cycle(self) -> None:
        first = [*START, mark(195, "step", step=3), mark(215, "step", step=5), mark(255, "step", step=9), *FAULT]
        second = [
            *restart(280, 1, 5),  # first step at 290, step 6
            mark(300, "step", 1, step=8),
            mark(301, "fault", 1, occurred_ns=300, detected_ns=301, cause="storage", completed_step=8),
        ]
        third = [*restart(310, 2, 3), mark(330, "run_ended")]
        part = partition([*first, *second, *third])
        phases = spent(part)
        assert phases["rolled_back"] == (255 - 195) + 10
        assert phases["productive"] == 20 + 10
        # what the first rollback took is charged to the first fault, the deeper part to the second
        lost = {(i.cycle, i.cause): i.end_ns - i.begin_ns for i in part.intervals if i.phase == "rolled_back"}
        assert lost == {(0, "hardware"): 40, (0, "storage"): 20, (1, "storage"): 10}

    def test_a_job_that_failed_for_good_keeps_only_what_is_durable(self) -> None:
        commit = [mark(204, "ckpt_block", step=4, begin_ns=200, end_ns=204), mark(230, "committed", step=4)]
        marks = [*START, *commit, mark(255, "step", step=9), *FAULT, mark(290, "run_ended", outcome="failed")]
        phases = spent(partition(marks))
        assert (phases["productive"], phases["rolled_back"]) == (25, 51)
        running = spent(partition(marks[:-1]))
        assert (running["productive"], "rolled_back" in running) == (76, False)

    def test_a_failed_job_without_checkpoints_is_not_guessed_about(self) -> None:
        marks = [m for m in START if m.kind != "restored"]
        marks += [mark(255, "step", step=9), *FAULT, mark(290, "run_ended", outcome="failed")]
        phases = spent(partition(marks))
        assert (phases["productive"], "rolled_back" in phases) == (80, False)

    def test_a_fault_after_the_work_of_a_job_that_succeeded_takes_nothing(self) -> None:
        end = [mark(255, "drain", completed_step=9), *(m for m in FAULT if m.kind == "fault")]
        marks = [*START, *end, mark(290, "run_ended", outcome="succeeded")]
        # the fault occurred as ranks drained, at 255: detect goes on from there
        assert spent(partition(marks)) == {**STARTED, "productive": 80, "detect": 5, "capture": 30}
        failed = [*marks[:-1], mark(290, "run_ended", outcome="failed")]
        assert spent(partition(failed))["rolled_back"] == 80

    def test_a_planned_stop_between_cycles_loses_nothing(self) -> None:
        stop = [mark(245, "step", step=9), mark(255, "drain", completed_step=9), mark(260, "cycle_ended")]
        part = partition([*START, *stop, *restart(280, 1, 9), mark(300, "run_ended")])
        phases = spent(part)
        assert (phases["productive"], phases["drain"], phases["decide"]) == (80 + 10, 5, 20)
        assert "rolled_back" not in phases
        assert part.lost_by_cause_ns == {"none": 30, "startup": 70}


class TestGap:
    def test_training_goes_on_without_a_coordinator(self) -> None:
        gap = mark(240, "gap", begin_ns=180, end_ns=240)
        marks = [*START, mark(275, "drain"), mark(280, "run_ended")]
        assert partition([*marks, gap]) == partition(marks)

    def test_a_recovery_in_a_gap_is_one_interval_of_other(self) -> None:
        gap = mark(285, "gap", begin_ns=250, end_ns=285)
        marks = [*START, mark(255, "step", step=9), *FAULT, *restart(280, 1, 9), gap, mark(300, "run_ended")]
        part = partition(marks)
        assert [(i.begin_ns, i.end_ns) for i in part.intervals if i.phase == "other"] == [(255, 285)]
        assert spent(part) == {**STARTED, "productive": 90, "other": 30, "restore": 21, "first_step": 34}

    def test_doubled_and_overlapping_gaps_count_once(self) -> None:
        gaps = [mark(130, "gap", begin_ns=b, end_ns=e) for b, e in [(110, 130), (110, 130), (120, 128), (127, 131)]]
        phases = spent(partition([*START, *gaps, mark(275, "drain"), mark(280, "run_ended")]))
        assert (phases["rendezvous"], phases["other"], phases["restore"]) == (5, 21, 14)
        assert "start" not in phases


class TestScriptWithoutSteps:
    def test_productive_is_unknown_and_training_is_other(self) -> None:
        marks = [*START[:4], mark(275, "drain"), mark(280, "run_ended")]
        part = partition(marks)
        assert spent(part) == {"init": 5, "rendezvous": 7, "start": 13, "other": 150, "drain": 5}
        assert (part.productive_ns, part.ettr) == (None, None)

    def test_restore_is_known_even_then(self) -> None:
        part = partition([*START[:5], mark(275, "drain"), mark(280, "run_ended")])
        assert spent(part) == {"init": 5, "rendezvous": 7, "start": 13, "restore": 20, "other": 130, "drain": 5}


class TestWall:
    def test_while_running_it_goes_to_now_or_to_the_last_mark(self) -> None:
        assert spent(partition(START, now_ns=200)) == {**STARTED, "productive": 25}
        assert spent(partition(START)) == STARTED

    def test_an_ended_run_does_not_grow(self) -> None:
        marks = [*START, mark(275, "drain"), mark(280, "run_ended")]
        assert partition(marks, now_ns=10**6) == partition(marks)

    def test_marks_outside_are_clamped(self) -> None:
        marks = [*START, mark(10**9, "drain"), mark(-5, "assigned"), mark(200, "run_ended")]
        phases = {"init": 5, "start": 20, "restore": 20, "first_step": 30, "productive": 25}
        assert spent(partition(marks)) == phases

    def test_nothing_is_an_empty_partition(self) -> None:
        part = partition([])
        assert spent(part) == {}
        assert part.ettr is None

    def test_a_run_that_has_only_begun_has_no_ettr(self) -> None:
        assert partition([mark(5, "run_started")]).ettr is None


class TestAttempts:
    marks = (
        *START,
        mark(255, "step", step=9),
        *(m for m in FAULT if m.kind == "fault"),
        *(mark(m.t_ns, m.kind, 1, 1, **m.attrs) for m in restart(410, 1, 9)),
        mark(400, "run_started", 0, 1),
        mark(430, "drain", 1, 1),
        mark(433, "run_ended", 1, 1),
    )

    def test_the_last_attempt_is_the_default(self) -> None:
        part = partition(self.marks)
        assert spent(part) == {
            "init": 10,
            "rendezvous": 1,
            "start": 2,
            "restore": 3,
            "first_step": 4,
            "productive": 10,
            "drain": 3,
        }
        assert part.lost_by_cause_ns == {"startup": 10}

    def test_an_earlier_attempt_that_vanished_ends_at_its_last_mark(self) -> None:
        part = partition(self.marks, attempt=0, now_ns=10**6)
        assert spent(part) == {**STARTED, "productive": 80, "detect": 5}

    def test_later_attempts_decide_what_survived(self) -> None:
        deeper = [
            m if m.kind != "restored" or m.attempt == 0 else mark(416, "restored", 1, 1, step=5) for m in self.marks
        ]
        assert spent(partition(deeper, attempt=0))["rolled_back"] == 40

    def test_over_the_whole_history_time_between_attempts_is_queue(self) -> None:
        part = partition(self.marks, whole_history=True)
        phases = spent(part)
        assert (part.wall_ns, phases["queue"], phases["init"], phases["productive"]) == (333, 140, 15, 90)
        assert part.ettr == 90 / (333 - 140)

    def test_an_unknown_attempt_is_an_error_that_names_the_known_ones(self) -> None:
        with pytest.raises(ValueError, match=r"no mark of attempt 7; the timeline has attempts \[0, 1\]"):
            partition(self.marks, attempt=7)
