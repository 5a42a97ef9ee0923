"""The goodput record and the cost of single cycles, on a run worked out by hand."""

from __future__ import annotations

from typing import Any

import msgspec
import pytest

from keepstep.goodput import cycle_phases, summarise
from keepstep.records.codec import from_json, to_json
from keepstep.records.cycle import CheckpointCounts, Cycle, CyclePhases, Goodput, RestartCounts, StepCounts
from keepstep.records.timeline import Mark, MarkKind

S = 1_000_000_000


def mark(t_s: float, kind: MarkKind, cycle: int = 0, attempt: int = 0, **attrs: Any) -> Mark:
    return Mark(t_ns=int(t_s * S), kind=kind, cycle=cycle, attempt=attempt, attrs=attrs)


def block(begin_s: float, end_s: float, step: int, cycle: int = 0) -> Mark:
    return mark(end_s, "ckpt_block", cycle, step=step, begin_ns=int(begin_s * S), end_ns=int(end_s * S))


MARKS = [
    mark(0, "run_started"),
    mark(1, "cycle_started"),
    mark(2, "assigned"),
    mark(3, "attached"),
    mark(5, "restored", step=0, source="none"),
    mark(6, "first_step", step=1),
    block(10, 10.5, 5),
    mark(12, "committed", step=5, checkpoint="c5"),
    block(15, 15.25, 10),
    mark(16, "ckpt_failed", step=10, error="disk full"),
    mark(18, "step", step=12),
    mark(21, "fault", occurred_ns=19 * S, detected_ns=21 * S, cause="hardware", completed_step=12),
    mark(22, "captured"),
    mark(23, "stopped"),
    mark(24, "decided", action="restart", counted=True),
    mark(24, "cycle_ended", reason="hardware"),
    mark(26, "cycle_started", 1),
    mark(27, "assigned", 1),
    mark(28, "attached", 1),
    mark(30, "restored", 1, step=5, source="disk", checkpoint="c5"),
    mark(31, "first_step", 1, step=6),
    mark(35, "step", 1, step=10),
    mark(36, "fault", 1, occurred_ns=35 * S, detected_ns=36 * S, cause="platform", completed_step=10),
    mark(37, "stopped", 1),
    mark(38, "decided", 1, action="restart", counted=False),
    mark(39, "replaced", 1),
    mark(40, "cycle_started", 2),
    mark(41, "assigned", 2),
    mark(42, "attached", 2),
    mark(43, "restored", 2, step=10, source="shm"),
    mark(44, "first_step", 2, step=11),
    block(50, 51, 16, 2),
    mark(52, "committed", 2, step=16, checkpoint="c16", persist_ns=S),
    mark(60, "drain", 2, completed_step=24),
    mark(62, "run_ended", 2, outcome="succeeded"),
]


def cycle(number: int, attempt: int = 0) -> Cycle:
    return Cycle(run_id="r", attempt=attempt, cycle=number, started_at="2026-01-01T00:00:00Z")


class TestSummarise:
    record = summarise("r", 0, MARKS, [cycle(2), cycle(0), cycle(1), cycle(7, attempt=3)])

    def test_seconds_follow_the_exact_nanoseconds(self) -> None:
        record = self.record
        assert record.wall_ns == 62 * S == sum(record.phases_ns.values())
        assert record.wall_s == 62.0
        assert record.phases == {name: ns / S for name, ns in record.phases_ns.items()}

    def test_where_the_time_went(self) -> None:
        # cycle 0 trained from 6 to 19, went back to step 5 at 10; cycle 1 from 31 to 35 survived; cycle 2 from 44 to 60
        assert {name: s for name, s in self.record.phases.items() if s} == {
            "init": 1.0,
            "rendezvous": 3.0,
            "start": 3.0,
            "restore": 2.0 + 2.0 + 1.0,
            "first_step": 3.0,
            "productive": 4.0 + 4.0 + 15.0,
            "ckpt_block": 0.5 + 0.25 + 1.0,
            "rolled_back": 8.25,
            "detect": 2.0 + 1.0,
            "capture": 1.0 + 1.0,
            "teardown": 1.0,
            "decide": 1.0 + 2.0 + 1.0,
            "replace": 2.0,
            "drain": 2.0,
        }
        assert self.record.productive_s == 23.0
        assert self.record.ettr == 23 / 62

    def test_losses_are_charged_to_the_fault_before_them(self) -> None:
        assert self.record.lost_by_cause == {"hardware": 8.25 + 7 + 5, "platform": 5 + 4, "startup": 5.0}

    def test_steps(self) -> None:
        assert self.record.steps == StepCounts(final=24, completed=12 + 5 + 14, committed=16, rolled_back=7)

    def test_restarts_take_the_decision_that_led_to_them(self) -> None:
        assert self.record.restarts == RestartCounts(total=2, counted=1, free=1)

    def test_checkpoints(self) -> None:
        assert self.record.checkpoints == CheckpointCounts(committed=2, failed=1, last_step=16, block_s_median=0.5)

    def test_cycles_of_the_attempt_in_order_with_their_cost(self) -> None:
        assert [c.cycle for c in self.record.cycles] == [0, 1, 2]
        assert self.record.cycles[1].phases == CyclePhases(
            detect_s=2, capture_s=1, teardown_s=1, decide_s=3, rendezvous_s=1, start_s=1, restore_s=2, first_step_s=1
        )
        assert self.record.cycles[2].phases == CyclePhases(
            detect_s=1, capture_s=1, decide_s=1, replace_s=2, rendezvous_s=1, start_s=1, restore_s=1, first_step_s=1
        )

    def test_it_survives_json(self) -> None:
        assert from_json(to_json(self.record), Goodput) == self.record

    def test_an_attempt_without_marks_is_an_error(self) -> None:
        with pytest.raises(ValueError, match="no mark of attempt 1"):
            summarise("r", 1, MARKS, [])


class TestCyclePhases:
    @pytest.mark.parametrize("number", [0, 1, 2])
    def test_same_as_in_the_summary(self, number: int) -> None:
        assert cycle_phases(MARKS, number) == TestSummarise.record.cycles[number].phases

    def test_a_cycle_that_is_starting_counts_up_to_now(self) -> None:
        marks = [m for m in MARKS if m.t_ns <= 28 * S]
        assert cycle_phases(marks, 1, now_ns=29 * S).restore_s == 1.0

    def test_a_cycle_nobody_mentions_cost_nothing(self) -> None:
        assert cycle_phases(MARKS, 9) == CyclePhases()


class TestStepsOfUnusualRuns:
    def test_a_script_without_steps_has_no_counts(self) -> None:
        marks = [m for m in MARKS if m.kind not in ("first_step", "step", "committed") and m.cycle == 0]
        record = summarise("r", 0, marks, [], 30 * S)
        assert record.steps == StepCounts()
        assert (record.productive_s, record.ettr, record.phases["productive"]) == (None, None, None)
        assert record.phases_ns["productive"] == 0
        assert sum(record.phases_ns.values()) == record.wall_ns

    def test_a_quarantined_checkpoint_is_not_committed(self) -> None:
        refused = mark(61, "quarantined", 2, checkpoint="c16", step=16, reason="checksum")
        record = summarise("r", 0, [*MARKS, refused], [])
        assert (record.steps.committed, record.checkpoints.last_step) == (5, 5)

    def test_an_earlier_attempt_ends_where_the_later_one_went_on(self) -> None:
        later = [
            mark(70, "run_started", attempt=1),
            mark(71, "cycle_started", 3, 1),
            mark(72, "attached", 3, 1),
            mark(73, "restored", 3, 1, step=16, source="disk"),
            mark(74, "first_step", 3, 1, step=17),
        ]
        before = summarise("r", 0, [*MARKS, *later], [])
        assert before.steps == StepCounts(final=16, completed=31, committed=16, rolled_back=7 + 8)
        after = summarise("r", 1, [*MARKS, *later], [])
        assert after.steps == StepCounts(final=17, completed=1, committed=16, rolled_back=0)
        assert after.restarts == RestartCounts()
        whole = summarise("r", 1, [*MARKS, *later], [cycle(0), cycle(3, 1)], whole_history=True)
        assert whole.steps == StepCounts(final=17, completed=32, committed=16, rolled_back=15)
        assert (whole.phases["queue"], whole.restarts.total, len(whole.cycles)) == (8.0, 2, 2)

    def test_several_ranks_telling_of_one_save_make_one_block(self) -> None:
        marks = [*MARKS, block(10, 10.75, 5), block(10.25, 10.5, 5)]
        assert summarise("r", 0, marks, []).checkpoints.block_s_median == 0.75

    def test_a_block_that_ends_before_it_begins_is_no_block(self) -> None:
        marks = [m for m in MARKS if m.kind != "ckpt_block"]
        assert summarise("r", 0, [*marks, block(11, 10, 5)], []).checkpoints.block_s_median is None


def test_records_of_a_caller_are_not_changed() -> None:
    given = cycle(0)
    record = summarise("r", 0, MARKS, [given])
    assert given.phases == CyclePhases()
    assert msgspec.structs.replace(record.cycles[0], phases=CyclePhases()) == given


def test_images_in_memory_are_no_checkpoints() -> None:
    """They commit nothing, their failures are none of a save, and a refused one says nothing about the disk's copy."""
    memory = [
        mark(13, "kept", step=7, checkpoint="c7"),
        mark(13, "tier_reached", step=7, checkpoint="c7", tier="peer"),
        mark(14, "ckpt_failed", step=8, error="no room", tier="shm"),
        mark(14, "ckpt_skipped", step=8, skipped=1),
        mark(14, "upload_failed", step=5, checkpoint="c5", error="no answer", failed=1),
        mark(24, "image_refused", step=5, checkpoint="c5", tier="peer", reason="differs"),
    ]
    marks = sorted([*MARKS, *memory], key=lambda one: one.t_ns)
    assert summarise("r", 0, marks, []).checkpoints == summarise("r", 0, MARKS, []).checkpoints
    assert summarise("r", 0, marks, []).steps == summarise("r", 0, MARKS, []).steps
