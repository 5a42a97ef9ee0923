"""The six losses of a job: they close with the rest of wall-clock to the nanosecond, and cases worked out by hand."""

from __future__ import annotations

import random
from collections.abc import Mapping
from typing import Any

import msgspec
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tests.goodput.test_partition_properties import Story

from keepstep.goodput import partition, summarise
from keepstep.goodput.facts import CycleKey
from keepstep.goodput.losses import Size, Tally, clip, job_losses, losses_of, pieces, size_of, tallies
from keepstep.goodput.pace import MIN_SEGMENTS, WINDOW_STEPS, SlowSpan, apart, pace_of
from keepstep.goodput.partition import read_history
from keepstep.goodput.verified import Acted, FaultRecord, Verified, verified_of
from keepstep.records.cycle import Cycle, RankPlace
from keepstep.records.losses import LOSSES, PARTS
from keepstep.records.timeline import Mark, MarkKind

S = 1_000_000_000
H = 3600 * S


def mark(t_s: float, kind: MarkKind, cycle: int = 0, attempt: int = 0, **attrs: Any) -> Mark:
    return Mark(t_ns=int(t_s * S), kind=kind, cycle=cycle, attempt=attempt, attrs=attrs)


MARKS = [
    mark(0, "run_started"),
    mark(1, "cycle_started"),
    mark(2, "assigned"),
    mark(3, "attached"),
    mark(4, "restored", step=0, source="none"),
    mark(5, "first_step", step=1),
    mark(9, "committed", step=3, checkpoint="c3"),
    mark(15, "step", step=11),
    mark(16, "fault", occurred_ns=15 * S, detected_ns=16 * S, cause="hardware", completed_step=11),
    mark(17, "stopped"),
    mark(18, "decided", counted=True),
    mark(19, "cycle_started", 1),
    mark(20, "attached", 1),
    mark(22, "restored", 1, step=3, source="disk"),
    mark(23, "first_step", 1, step=4),
    mark(30, "drain", 1, completed_step=11),
    mark(32, "run_ended", 1, outcome="succeeded"),
]
BY_HAND = {
    "detection": 1,  # 15 to 16
    "decision": 3,  # capture 16 to 17, decide 17 to 19
    "replacement": 4,  # cycle 1: 19 to 23
    "rollback": 6,  # steps 4 to 11 of cycle 0: 9 to 15
    "productive": 11,  # 5 to 9 and 23 to 30
    "startup": 5,  # init 0 to 1, cycle 0: 1 to 5
    "drain": 2,
}
SIZES = {
    (0, 0): Size(gpus=4, spare_gpus=2, nodes=("a", "b"), spares=("c",)),
    (0, 1): Size(gpus=4, nodes=("a", "c")),
}


def fault(acted: Acted = "", verified: str | None = None, said: str = "hardware", cycle: int = 0) -> FaultRecord:
    return FaultRecord(
        key=(0, cycle),
        incident=f"INC-{cycle + 1:04d}",
        time_ns=16 * S,
        fault_class=said,
        cause="exit",
        said=said,
        acted=acted,
        verified=verified,
    )


class TestByHand:
    def test_each_phase_has_its_loss(self) -> None:
        losses = job_losses(partition(MARKS), SIZES)
        known = {name: part.time_s for name, part in losses.parts.items() if part is not None}
        assert tuple(losses.parts) == PARTS
        assert {name: s for name, s in known.items() if s} == BY_HAND
        assert losses.parts["straggler"] is losses.parts["false_positive"] is None
        assert sum(known.values()) == 32

    def test_gpu_time_and_money(self) -> None:
        losses = job_losses(partition(MARKS), SIZES, price=9000.0)
        rollback = losses.parts["rollback"]
        assert rollback is not None
        assert (rollback.gpu_ns, rollback.gpu_h, rollback.usd) == (24 * S, 24 / 3600, 24 / 3600 * 9000.0)
        assert losses.paid is not None
        assert losses.paid.gpu_ns == (19 * 6 + 13 * 4) * S  # the spare is active in cycle 1

    def test_ratios_are_kept_apart(self) -> None:
        later = [mark(40, "run_started", 2, 1), mark(41, "cycle_started", 2, 1), mark(48, "run_ended", 2, 1)]
        part = partition([*MARKS, *later], whole_history=True)
        ratios = job_losses(part, {**SIZES, (1, 2): Size(gpus=8)}).ratios
        assert ratios.ettr_without_queue == part.ettr == 11 / 40
        assert ratios.ettr_with_queue == 11 / 48
        assert ratios.paid_gpu_goodput == 44 / (19 * 6 + 13 * 4 + 8 * 8)
        assert ratios.step_time_factor is None

    def test_what_waits_weighs_by_the_gpus_it_waits_for(self) -> None:
        later = [mark(40, "run_started", 2, 1), mark(41, "cycle_started", 2, 1), mark(48, "run_ended", 2, 1)]
        part = partition([*MARKS, *later], whole_history=True)
        found = pieces(part, {**SIZES, (1, 2): Size(gpus=8)})
        queue = next(p for p in found if p.name == "queue")
        assert (queue.gpus, queue.held, queue.time_ns) == (8, 0, 8 * S)
        assert found[0].gpus == 4

    def test_a_gap_weighs_as_the_cycle_before_it(self) -> None:
        gap = mark(18.5, "gap", 0, begin_ns=17 * S, end_ns=18 * S)
        found = pieces(partition([*MARKS, gap]), {**SIZES, (0, 1): Size(gpus=2)})
        assert [(p.gpus, p.time_ns) for p in found if p.name == "other"] == [(4, S)]

    def test_unknown_size_is_unknown_gpu_time(self) -> None:
        losses = job_losses(partition(MARKS), {}, price=1.0)
        rollback = losses.parts["rollback"]
        assert rollback is not None
        assert (rollback.time_s, rollback.gpu_ns, rollback.gpu_h, rollback.usd) == (6, None, None, None)
        assert losses.ratios.paid_gpu_goodput is None
        assert losses.ratios.ettr_without_queue == 11 / 32

    def test_without_steps_productive_is_unknown_and_its_time_other(self) -> None:
        losses = job_losses(partition([*MARKS[:4], mark(10, "run_ended")]), SIZES, stragglers=[])
        assert losses.parts["productive"] is losses.parts["straggler"] is None
        assert losses.ratios.ettr_without_queue is None
        assert sum(p.time_ns for p in losses.parts.values() if p is not None) == 10 * S


class TestFalsePositives:
    def test_all_time_of_a_wrong_action_is_the_tax(self) -> None:
        verified = verified_of([fault("evicted", "user_code")])
        losses = job_losses(partition(MARKS), SIZES, verified=verified)
        known = {name: part.time_s for name, part in losses.parts.items() if part is not None and part.time_s}
        assert known == {"false_positive": 14, "productive": 11, "startup": 5, "drain": 2}
        assert (losses.actions, losses.actions_verified, losses.actions_wrong) == (1, 1, 1)

    @pytest.mark.parametrize(
        ("acted", "said", "verified", "wrong"),
        [
            ("evicted", "hardware", "user_code", True),
            ("evicted", "hardware", "storage", True),
            ("evicted", "unknown", "framework", True),
            ("evicted", "fabric", "hardware", False),  # another class, and the node was to blame all the same
            ("ended", "user_code", "hardware", True),
            ("ended", "user_code", "user_code", False),
            ("ended", "user_code", "unknown", None),
            ("evicted", "hardware", None, None),
            ("", "hardware", "user_code", None),  # a restart is no action on a verdict
        ],
    )
    def test_which_actions_are_wrong(self, acted: Acted, said: str, verified: str | None, wrong: bool | None) -> None:
        assert fault(acted, verified, said).wrong is wrong

    @pytest.mark.parametrize(
        ("faults", "wrong"),
        [
            ([], None),
            ([fault()], None),
            ([fault("evicted")], None),
            ([fault("evicted", "unknown")], None),
            ([fault("evicted"), fault(verified="hardware", cycle=1)], None),  # what is verified is not what was done
            ([fault(verified="hardware")], frozenset()),  # verified, and nothing was done
            ([fault("evicted", "hardware"), fault("evicted", cycle=1)], frozenset()),
            ([fault("evicted", "hardware"), fault("evicted", "storage", cycle=1)], frozenset({(0, 1)})),
        ],
    )
    def test_nothing_verified_is_unknown_and_not_nothing(
        self, faults: list[FaultRecord], wrong: frozenset[CycleKey] | None
    ) -> None:
        assert verified_of(faults).wrong == wrong

    def test_the_goodput_record_has_both_taxes(self) -> None:
        record = summarise("r", 0, MARKS, [])
        assert (record.straggler_tax_s, record.false_positive_tax_s) == (None, None)
        record = summarise("r", 0, MARKS, [], verified=Verified(actions=1, verified=1, wrong=frozenset({(0, 0)})))
        assert record.false_positive_tax_s == 14
        assert record.losses is not None
        assert record.lost_by_cause == {"hardware": 14.0, "startup": 4.0}


class TestStragglers:
    def test_they_are_taken_out_of_productive_time_only(self) -> None:
        spans = [SlowSpan(begin_ns=7 * S, end_ns=15 * S, lost_ns=2 * S)]  # 7 to 9 is productive, 9 to 15 rolled back
        losses = job_losses(partition(MARKS), SIZES, stragglers=spans)
        straggler, productive = losses.parts["straggler"], losses.parts["productive"]
        assert straggler is not None
        assert productive is not None
        assert (straggler.time_ns, straggler.gpu_ns, productive.time_s) == (S // 2, 2 * S, 10.5)
        assert losses.ratios.ettr_without_queue == 11 / 32  # it does not know of them

    def test_looked_and_found_none_is_nothing(self) -> None:
        straggler = job_losses(partition(MARKS), SIZES, stragglers=[]).parts["straggler"]
        assert straggler is not None
        assert straggler.time_ns == 0

    def test_spans_that_overlap_count_once(self) -> None:
        one, other = SlowSpan(begin_ns=0, end_ns=10, lost_ns=5), SlowSpan(begin_ns=5, end_ns=20, lost_ns=9)
        assert apart([other, one, SlowSpan(begin_ns=3, end_ns=3, lost_ns=1)]) == (one,)


def paced(step_times_s: list[float], block_at: int | None = None, cycle: int = 0, begin_s: float = 0.0) -> list[Mark]:
    """A cycle whose step n took step_times_s[n - 1]; a block of 5 s follows step `block_at`."""
    marks = [mark(begin_s, "cycle_started", cycle)]
    now_s = begin_s
    for step, time_s in enumerate(step_times_s, 1):
        now_s += time_s
        marks.append(mark(now_s, "first_step" if step == 1 else "step", cycle, step=step))
        if step == block_at:
            marks.append(
                mark(now_s + 5, "ckpt_block", cycle, step=step, begin_ns=int(now_s * S), end_ns=int((now_s + 5) * S))
            )
            now_s += 5
    return marks


class TestPace:
    def test_median_over_best(self) -> None:
        times = [9.0] + [1.0] * 100 + [1.25] * 200
        pace = pace_of(read_history(paced(times)).cycles, {})
        assert pace is not None
        assert pace.factor == 1.25
        assert sum(span.lost_ns for span in pace.spans) == 50 * S

    def test_single_slow_steps_average_out(self) -> None:
        pace = pace_of(read_history(paced([1.0, 1.5] * 150)).cycles, {})
        assert pace is not None
        assert pace.factor == 1.0

    def test_sparse_samples_are_taken_as_they_are(self) -> None:
        marks = [mark(0, "cycle_started"), *(mark(100 * k, "step", step=50 * k) for k in range(1, 40))]
        pace = pace_of(read_history(marks).cycles, {})
        assert pace is not None
        assert (pace.factor, pace.spans) == (1.0, ())

    def test_blocks_are_no_steps(self) -> None:
        pace = pace_of(read_history(paced([1.0] * 250, block_at=17)).cycles, {})
        assert pace is not None
        assert (pace.factor, pace.spans) == (1.0, ())

    def test_a_block_that_names_no_step_makes_its_stretch_useless(self) -> None:
        block = mark(60, "ckpt_block", begin_ns=55 * S, end_ns=60 * S)
        marks = [
            *(m if m.t_ns < 55 * S else msgspec.structs.replace(m, t_ns=m.t_ns + 5 * S) for m in paced([1.0] * 300))
        ]
        pace = pace_of(read_history([*marks, block]).cycles, {})
        assert pace is not None
        assert pace.spans == ()

    def test_too_few_samples_say_nothing(self) -> None:
        most = MIN_SEGMENTS * WINDOW_STEPS
        assert pace_of(read_history(paced([1.0] * most)).cycles, {}) is None
        assert pace_of(read_history(paced([1.0] * (most + 1))).cycles, {}) is not None

    def test_another_number_of_ranks_has_another_pace(self) -> None:
        marks = paced([1.0] * 211) + paced([2.0] * 211, cycle=1, begin_s=1000)
        cycles = read_history(marks).cycles
        mixed, split = pace_of(cycles, {}), pace_of(cycles, {(0, 0): 8, (0, 1): 4})
        assert mixed is not None
        assert split is not None
        assert (split.factor, split.spans) == (1.0, ())
        assert sum(span.lost_ns for span in mixed.spans) == 210 * S

    def test_slow_steps_are_reported_beside_the_losses(self) -> None:
        marks = [mark(0, "run_started"), *paced([1.0] * 101 + [1.5] * 110), mark(300, "run_ended")]
        record = summarise("r", 0, marks, [])
        assert record.losses is not None
        assert record.losses.ratios.step_time_factor == 1.5
        assert record.losses.slow_steps is not None
        assert record.losses.slow_steps.time_s == 55
        assert record.straggler_tax_s is None


def places(*gpus: str | None) -> list[RankPlace]:
    return [
        RankPlace(rank=i, local_rank=i, node="n1" if i < 2 else "n2", host="h", gpu_uuid=gpu)
        for i, gpu in enumerate(gpus)
    ]


class TestSize:
    CYCLE = Cycle(run_id="r", attempt=0, cycle=0, started_at="t", spare_nodes=["s1", "s2"])

    def test_ranks_without_gpus_count_themselves(self) -> None:
        size = size_of(msgspec.structs.replace(self.CYCLE, ranks=places(None, None, None)))
        assert size == Size(gpus=3, spare_gpus=4, nodes=("n1", "n2"), spares=("s1", "s2"))

    def test_a_gpu_that_ranks_share_counts_once(self) -> None:
        size = size_of(msgspec.structs.replace(self.CYCLE, ranks=places("g1", "g1", "g1", "g2")))
        assert size is not None
        assert size.gpus == 3

    def test_no_ranks_no_size(self) -> None:
        assert size_of(self.CYCLE) is None


# ---- properties


def sums(found: Mapping[str, Tally]) -> dict[str, tuple[int, int | None]]:
    return {name: (tally.time_ns, tally.gpu_ns) for name, tally in found.items()}


class Drawn:
    """A random run, some of whose marks may be lost, with sizes, wrong actions and slow spans."""

    def __init__(self, seed: int, checkpointer: bool) -> None:
        rng = random.Random(seed)
        story = Story(rng, checkpointer)
        story.tell()
        marks = [m for m in story.marks if m.kind == "run_started" or rng.random() < 0.95]
        self.part = partition(marks, now_ns=story.now_ns)
        cycles = {(m.attempt, m.cycle) for m in marks}
        self.sizes = {
            key: Size(gpus=rng.randint(1, 9), spare_gpus=rng.randint(0, 3)) for key in cycles if rng.random() < 0.8
        } or {(0, 0): Size(gpus=1)}
        self.wrong = frozenset(key for key in cycles if rng.random() < 0.3)
        edges = sorted(rng.randint(0, max(1, story.now_ns)) for _ in range(8))
        self.spans = [
            SlowSpan(begin_ns=a, end_ns=b, lost_ns=rng.randint(0, b - a))
            for a, b in zip(edges[::2], edges[1::2], strict=True)
        ]
        low_ns, high_ns = self.part.begin_ns - 3, self.part.end_ns + 3
        self.cuts = sorted(rng.randint(low_ns, high_ns) for _ in range(3))


@given(seed=st.integers(0, 2**32), checkpointer=st.booleans())
@settings(max_examples=200, deadline=None)
def test_losses_and_the_rest_close_to_the_nanosecond(seed: int, checkpointer: bool) -> None:
    drawn = Drawn(seed, checkpointer)
    part = drawn.part
    for wrong in (None, drawn.wrong):
        for spans in (None, drawn.spans):
            losses = job_losses(part, drawn.sizes, verified=Verified(wrong=wrong), stragglers=spans)
            known = {name: p for name, p in losses.parts.items() if p is not None}
            assert sum(p.time_ns for p in known.values()) == part.wall_ns
            assert min(p.time_ns for p in known.values()) >= 0
            assert losses.ratios.ettr_without_queue == pytest.approx(part.ettr)
            assert (losses.parts["false_positive"] is None) == (wrong is None)
    plain = job_losses(part, drawn.sizes).parts
    first_four = [plain[name] for name in LOSSES[:4]]
    lost_ns = sum(p.time_ns for p in first_four if p is not None)
    startup_ns = sum(i.end_ns - i.begin_ns for i in part.intervals if i.cause == "startup")
    assert lost_ns == sum(part.lost_by_cause_ns.values()) - startup_ns


@given(seed=st.integers(0, 2**32), checkpointer=st.booleans())
@settings(max_examples=200, deadline=None)
def test_windows_add_up(seed: int, checkpointer: bool) -> None:
    drawn = Drawn(seed, checkpointer)
    found = pieces(drawn.part, drawn.sizes, drawn.wrong)
    a, b, c = drawn.cuts
    one, other, both = (sums(tallies(clip(found, x, y), drawn.spans)) for x, y in ((a, b), (b, c), (a, c)))
    for name in PARTS:
        assert one[name][0] + other[name][0] == both[name][0]
        assert (one[name][1] or 0) + (other[name][1] or 0) == both[name][1]
    every = clip(found, drawn.part.begin_ns, drawn.part.end_ns)
    whole = losses_of(every, reports_steps=True, verified=Verified(wrong=drawn.wrong), stragglers=drawn.spans)
    assert sum(p.time_ns for p in whole.parts.values() if p is not None) == drawn.part.wall_ns
