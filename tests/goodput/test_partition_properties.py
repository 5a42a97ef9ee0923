"""The partition against two independent oracles, on random runs.

`Story` tells a run nanosecond by nanosecond and knows what each was spent on and which steps survived; its marks are
clean, so the partition must agree with it exactly. `phase_at` answers for one nanosecond at a time on damaged marks.
"""

from __future__ import annotations

import random
from collections import Counter
from collections.abc import Sequence
from typing import Any

import msgspec
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from keepstep.goodput import partition, summarise
from keepstep.records.cycle import PHASES
from keepstep.records.timeline import Mark, MarkKind

START_MARKS: tuple[tuple[MarkKind, str], ...] = (
    ("cycle_started", "rendezvous"),
    ("assigned", "start"),
    ("attached", "restore"),
    ("restored", "first_step"),
)


class Story:
    """A run told forward in time. `truth` has a label a nanosecond; ("step", cycle, n) is work on step n of a cycle."""

    def __init__(self, rng: random.Random, checkpointer: bool) -> None:
        self.rng = rng
        self.checkpointer = checkpointer
        self.now_ns = rng.randrange(50)
        self.begin_ns = self.now_ns
        self.marks: list[Mark] = []
        self.truth: list[str | tuple[str, int, int]] = []
        self.survived: dict[int, int] = {}  # cycle -> highest step that still counts
        self.lineage: list[int] = []  # durable steps of the surviving history
        self.done = 0
        self.completed = 0

    def mark(self, kind: MarkKind, cycle: int = 0, **attrs: Any) -> None:
        self.marks.append(Mark(t_ns=self.now_ns, kind=kind, cycle=cycle, attrs=attrs))

    def spend(self, label: str | tuple[str, int, int], most_ns: int = 6) -> None:
        span_ns = self.rng.randrange(most_ns)
        self.truth += [label] * span_ns
        self.now_ns += span_ns

    def go_back(self, step: int) -> None:
        self.survived = {cycle: min(kept, step) for cycle, kept in self.survived.items()}
        self.lineage = [durable for durable in self.lineage if durable <= step]
        self.done = step

    def tell(self) -> None:
        self.mark("run_started")
        self.spend("init")
        cycles = self.rng.randint(1, 5)
        for cycle in range(cycles):
            if self.cycle(cycle) and (cycle == cycles - 1 or self.rng.random() < 0.2):
                self.mark("drain", cycle, completed_step=self.done)
                self.spend("drain")
                self.mark("run_ended", outcome="succeeded")
                return
            self.recover(cycle, last=cycle == cycles - 1)
        if self.rng.random() < 0.5:
            self.mark("run_ended", outcome="failed")
            if self.checkpointer:
                self.go_back(max(self.lineage, default=0))

    def cycle(self, cycle: int) -> bool:
        """One life of the group up to a fault or to where it may drain. False when it broke before training."""
        self.survived[cycle] = self.done
        for kind, phase in START_MARKS:
            if kind == "restored":
                if not self.checkpointer:
                    break
                source = self.rng.choice(["disk", "shm"]) if self.done and cycle else "none"
                step = self.rng.choice([0, self.done, *self.lineage]) if cycle else 0
                self.go_back(step)
                if source == "disk":
                    self.lineage.append(step)
                self.mark(kind, cycle, step=step, source=source)
            else:
                self.mark(kind, cycle)
            self.spend(phase if self.checkpointer or phase != "restore" else "first_step")
            if self.rng.random() < 0.08:
                return False
        if not self.checkpointer and cycle:
            self.go_back(self.rng.randint(0, self.done))
        self.complete_step("first_step", cycle)
        for _ in range(self.rng.randrange(8)):
            self.spend(("step", cycle, self.done + 1))
            self.complete_step("step", cycle)
            if self.checkpointer and self.rng.random() < 0.3:
                begin_ns = self.now_ns
                self.spend("ckpt_block")
                self.mark("ckpt_block", cycle, step=self.done, begin_ns=begin_ns, end_ns=self.now_ns)
                if self.rng.random() < 0.7:
                    self.mark("committed", cycle, step=self.done, checkpoint=f"{cycle}-{self.done}")
                    self.lineage.append(self.done)
        return True

    def complete_step(self, kind: MarkKind, cycle: int) -> None:
        self.done += 1
        self.completed += 1
        self.survived[cycle] = self.done
        self.mark(kind, cycle, step=self.done)

    def recover(self, cycle: int, *, last: bool) -> None:
        if any(m.kind == "first_step" and m.cycle == cycle for m in self.marks):
            self.spend(("step", cycle, self.done + 1))
        occurred_ns = self.now_ns
        self.spend("detect")
        cause = self.rng.choice(["hardware", "user_code"])
        self.mark(
            "fault", cycle, occurred_ns=occurred_ns, detected_ns=self.now_ns, cause=cause, completed_step=self.done
        )
        self.spend("capture")
        self.mark("captured", cycle)
        self.spend("teardown")
        self.mark("stopped", cycle)
        self.spend("decide")
        self.mark("decided", cycle, counted=self.rng.random() < 0.5)
        replaced = not last and self.rng.random() < 0.3
        self.spend("replace" if replaced else "decide")
        if replaced:
            self.mark("replaced", cycle)
            self.spend("replace")

    def phases_ns(self) -> dict[str, int]:
        restores = any(m.kind == "restored" for m in self.marks)
        steps = any(m.kind == "first_step" for m in self.marks)
        result = Counter(dict.fromkeys(PHASES, 0))
        for label in self.truth:
            if isinstance(label, tuple):
                _, cycle, step = label
                result["productive" if step <= self.survived[cycle] else "rolled_back"] += 1
            elif label == "first_step" or (label == "restore" and not restores):
                # without any restored mark nothing says that this script would have restored
                result["first_step" if steps else "other"] += 1
            else:
                result[label] += 1
        return dict(result)


def check_tiling(marks: Sequence[Mark], **options: Any) -> None:
    part = partition(marks, **options)
    assert tuple(part.phases_ns) == PHASES
    assert min(part.phases_ns.values()) >= 0
    assert sum(part.phases_ns.values()) == part.wall_ns == part.end_ns - part.begin_ns >= 0
    at_ns = part.begin_ns
    sums = Counter(dict.fromkeys(PHASES, 0))
    for interval in part.intervals:
        assert interval.begin_ns == at_ns < interval.end_ns
        at_ns = interval.end_ns
        sums[interval.phase] += interval.end_ns - interval.begin_ns
    assert at_ns == part.end_ns
    assert dict(sums) == part.phases_ns
    assert sum(part.lost_by_cause_ns.values()) <= part.wall_ns


@given(seed=st.integers(0, 2**32), checkpointer=st.booleans())
@settings(max_examples=300, deadline=None)
def test_agrees_with_a_run_told_nanosecond_by_nanosecond(seed: int, checkpointer: bool) -> None:
    rng = random.Random(seed)
    story = Story(rng, checkpointer)
    story.tell()
    marks = story.marks[:]
    rng.shuffle(marks)
    part = partition(marks, now_ns=story.now_ns)
    assert part.wall_ns == len(story.truth) == story.now_ns - story.begin_ns
    assert part.phases_ns == story.phases_ns()
    check_tiling(marks, now_ns=story.now_ns)


@given(seed=st.integers(0, 2**32), checkpointer=st.booleans())
@settings(max_examples=200, deadline=None)
def test_step_counts_agree_with_the_story(seed: int, checkpointer: bool) -> None:
    story = Story(random.Random(seed), checkpointer)
    story.tell()
    record = summarise("r", 0, story.marks, [], story.now_ns)
    assert sum(record.phases_ns.values()) == record.wall_ns == len(story.truth)
    assert record.steps.committed == (max(story.lineage) if story.lineage else None)
    if any(m.kind == "first_step" for m in story.marks):
        assert record.steps.final == story.done
        assert record.steps.completed == story.completed
        assert record.steps.rolled_back == story.completed - story.done
    else:
        assert (record.steps.final, record.productive_s, record.ettr) == (None, None, None)
    counted = sum(m.attrs["counted"] for m in story.marks if m.kind == "decided" and m.cycle < record.restarts.total)
    assert record.restarts.counted == counted
    assert record.restarts.counted + record.restarts.free == record.restarts.total


KINDS: tuple[MarkKind, ...] = tuple(msgspec.inspect.type_info(Mark).fields[1].type.values)  # type: ignore[attr-defined]
times = st.integers(-20, 120)
steps = st.one_of(st.integers(-2, 12), st.none(), st.just("x"))
attrs = st.fixed_dictionaries(
    {},
    optional={
        "step": steps,
        "completed_step": steps,
        "begin_ns": times,
        "end_ns": times,
        "occurred_ns": times,
        "detected_ns": st.one_of(times, st.just(True)),
        "cause": st.sampled_from(["hardware", "", None]),
        "source": st.sampled_from(["disk", "none"]),
        "persist_ns": times,
        "counted": st.booleans(),
        "checkpoint": st.sampled_from(["a", "b", None]),
    },
)
any_marks = st.lists(
    st.builds(
        Mark,
        t_ns=times,
        kind=st.sampled_from(KINDS),
        cycle=st.integers(0, 3),
        attempt=st.integers(0, 1),
        attrs=attrs,
    ),
    max_size=25,
)
"""Arbitrary nonsense: the partition must hold whatever a journal says."""


@given(any_marks, st.one_of(st.none(), times), st.booleans())
@settings(max_examples=400, deadline=None, suppress_health_check=[HealthCheck.too_slow])
def test_any_marks_at_all_are_partitioned(marks: list[Mark], now_ns: int | None, whole_history: bool) -> None:
    check_tiling(marks, now_ns=now_ns, whole_history=whole_history)
    for attempt in {m.attempt for m in marks}:
        check_tiling(marks, now_ns=now_ns, attempt=attempt)
        record = summarise("r", attempt, marks, [], now_ns, whole_history=whole_history)
        assert sum(record.phases_ns.values()) == record.wall_ns


@given(any_marks, st.randoms(use_true_random=False))
@settings(max_examples=200, deadline=None)
def test_order_and_exact_duplicates_of_marks_change_nothing(marks: list[Mark], rng: random.Random) -> None:
    shuffled = marks + [mark for mark in marks if rng.random() < 0.5]
    rng.shuffle(shuffled)
    assert partition(shuffled, whole_history=True) == partition(marks, whole_history=True)


# --- damaged marks against an oracle that answers for one nanosecond

LIFE = ("cycle_started", "assigned", "attached", "restored", "training", "drain", "cycle_ended")
RECOVERY = ("captured", "stopped", "decided", "replaced")
LADDER = (*LIFE, "occurred", "detected", *RECOVERY)


def cycle_times(marks: Sequence[Mark], cycle: int) -> dict[str, int]:
    """When each rung of the ladder is reached in a cycle, after clamping; at most one fault a cycle in these tests."""
    own = sorted((m for m in marks if m.cycle == cycle), key=lambda m: m.t_ns)
    first = {m.kind: m.t_ns for m in reversed(own)}
    floor_ns = first["cycle_started"]
    rungs: dict[str, int] = {k: max(floor_ns, t) for k, t in first.items() if k in LIFE and k != "cycle_ended"}
    trained = [t for k, t in first.items() if k in ("first_step", "step")]
    if trained:
        rungs["training"] = max(floor_ns, min(trained))
    fault = next((m for m in own if m.kind == "fault"), None)
    if fault is None:
        counts: dict[int, int] = {}
        for m in own:
            step = m.attrs.get("completed_step" if m.kind == "drain" else "step")
            if m.kind in ("first_step", "step", "ckpt_block", "drain") and step is not None:
                t_ns = m.attrs["begin_ns"] if m.kind == "ckpt_block" else m.t_ns
                counts[step] = min(t_ns, counts.get(step, t_ns))
        edge_ns = max([*rungs.values(), *counts.values()])
    else:
        edge_ns = rungs["detected"] = max(floor_ns, fault.attrs["detected_ns"])
        rungs["occurred"] = min(edge_ns, max(floor_ns, fault.attrs["occurred_ns"]))
    for kind in RECOVERY:
        if kind in first:
            edge_ns = rungs[kind] = max(edge_ns, first[kind])
    return rungs


def phase_at(marks: Sequence[Mark], t_ns: int) -> str:
    """Phase of one nanosecond; "training" is not split. For clean kinds and attributes but any times and duplicates."""
    best = (-1, 0)
    cycles = sorted({m.cycle for m in marks if m.kind == "cycle_started"})
    rungs = {cycle: cycle_times(marks, cycle) for cycle in cycles}
    for cycle in cycles:
        for rung, at_ns in rungs[cycle].items():
            if at_ns <= t_ns:
                best = max(best, (cycle, LADDER.index(rung)))
    if best == (-1, 0):
        phase = "init"
    else:
        cycle, rung = best[0], LADDER[best[1]]
        faulty = "detected" in rungs[cycle]
        if rung in RECOVERY and not faulty and cycle == cycles[-1]:
            phase = "drain"
        elif rung == "decided":
            phase = "replace" if "replaced" in rungs[cycle] else "decide"
        elif rung == "attached":
            restores = "restored" in rungs[cycle] or (
                "training" not in rungs[cycle] and any(m.kind == "restored" for m in marks)
            )
            phase = "restore" if restores else "first_step"
        else:
            phase = {
                "cycle_started": "rendezvous",
                "assigned": "start",
                "restored": "first_step",
                "occurred": "detect",
                "detected": "capture",
                "captured": "teardown",
                "stopped": "decide",
                "replaced": "replace",
            }.get(rung, rung)
        if phase == "first_step" and not any(m.kind in ("first_step", "step") for m in marks):
            phase = "other"
    in_gap = any(m.kind == "gap" and m.attrs["begin_ns"] <= t_ns < m.attrs["end_ns"] for m in marks)
    return "other" if in_gap and phase != "training" else phase


@given(seed=st.integers(0, 2**32), checkpointer=st.booleans())
@settings(max_examples=200, deadline=None)
def test_damaged_marks_agree_with_an_oracle_for_each_nanosecond(seed: int, checkpointer: bool) -> None:
    rng = random.Random(seed)
    story = Story(rng, checkpointer)
    story.tell()
    marks: list[Mark] = []
    for mark in story.marks:
        kept = mark.kind in ("run_started", "run_ended", "cycle_started", "fault")
        if kept or rng.random() < 0.9:
            marks.append(mark)
        if mark.kind not in ("fault", "run_ended", "run_started") and rng.random() < 0.1:
            marks.append(msgspec.structs.replace(mark, t_ns=mark.t_ns + rng.randrange(-9, 10)))
    for _ in range(rng.randrange(3)):
        begin_ns = rng.randrange(story.begin_ns, story.now_ns + 1)
        gap = {"begin_ns": begin_ns, "end_ns": begin_ns + rng.randrange(20)}
        marks.append(Mark(t_ns=begin_ns, kind="gap", attrs=gap))
    rng.shuffle(marks)
    part = partition(marks, now_ns=story.now_ns)
    expected = Counter(phase_at(marks, t_ns) for t_ns in range(part.begin_ns, part.end_ns))
    found = Counter({name: ns for name, ns in part.phases_ns.items() if ns})
    for name in ("productive", "rolled_back", "ckpt_block"):
        found["training"] += found.pop(name, 0)
    assert +found == expected
    check_tiling(marks, now_ns=story.now_ns)
