"""Exact partition of wall-clock into the phases of `keepstep.records.cycle.PHASES`.

The phase at any nanosecond is the one opened by the latest mark in life order (attempt, cycle, place in the life of a
cycle) among those whose time has come. So a late, doubled or skewed mark can never lead back into an earlier phase,
and no interval can be negative. What each mark opens:

- run_started: init; cycle_started: rendezvous; assigned: start; attached: restore; restored: first_step; first_step:
  training.
- A cycle that completed a step without a `restored` mark has no checkpointer: attached opens first_step. One that was
  cut short before either counts as restore when any other cycle of the run restored, else as first_step.
- fault: detect from occurred_ns, capture from detected_ns; captured: teardown; stopped: decide; decided: replace when
  nodes were replaced, else decide goes on.
- drain: drain. Without a fault, what follows it (captured, stopped, decided, cycle_ended) is part of the drain at the
  end of an attempt, and opens its own phase when another cycle follows (cycle_ended: decide).
- Training is `ckpt_block` where a save held it up, else `rolled_back` where its steps did not survive, else
  `productive`.
- Within a gap (no coordinator), everything but training is `other`.
- When no mark of the whole list reports a step, what would be first_step and training is `other`, and productive is
  unknown.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence

import msgspec

from keepstep.goodput.facts import CycleFacts, CycleKey, canonical, cycle_facts, int_attr
from keepstep.goodput.lineage import Rollback, Training, lost_training, rollbacks
from keepstep.records.cycle import PHASES
from keepstep.records.timeline import Mark

CAUSE_STARTUP = "startup"
"""Cause given to the start of the first cycle of an attempt."""
CAUSE_NONE = "none"
"""Cause given to a restart or rollback with no recorded fault before it (planned drain, launcher that vanished)."""

RECOVERY_PHASES = ("detect", "capture", "teardown", "decide", "replace")
"""Lost phases that belong to the cycle that failed."""
START_PHASES = ("rendezvous", "start", "restore", "first_step")
"""Lost phases that belong to the cycle that is being started."""

_TRAINING = "training"  # never leaves this module: split into productive, rolled_back and ckpt_block
_SPAN_ORDER = {
    kind: order
    for order, kind in enumerate(
        (
            *("cycle_started", "assigned", "attached", "restored", "step", "drain", "cycle_ended"),
            *("occurred", "detected", "captured", "stopped", "decided", "replaced"),
        )
    )
}


class Interval(msgspec.Struct, frozen=True, kw_only=True):
    """A part of wall-clock, [begin_ns, end_ns) in UTC nanoseconds, in one phase.

    `cycle` is None outside cycles (queue, init, gaps). `cause` says what a lost interval is charged to, None for the
    others; `blamed` is the cycle whose end made it necessary, None for a start-up.
    """

    begin_ns: int
    end_ns: int
    phase: str
    attempt: int
    cycle: int | None = None
    cause: str | None = None
    blamed: CycleKey | None = None


class Partition(msgspec.Struct, frozen=True, kw_only=True):
    """Wall-clock of one attempt or of a whole run: intervals in order, without holes or overlaps.

    `phases_ns` has all names of PHASES and adds up to `wall_ns` exactly. `reports_steps` is False when no mark
    reported a step; productive time is then unknown (`phases_ns["productive"]` is 0).
    """

    begin_ns: int
    end_ns: int
    wall_ns: int
    phases_ns: dict[str, int]
    intervals: tuple[Interval, ...]
    reports_steps: bool

    @property
    def productive_ns(self) -> int | None:
        """Nanoseconds of training that survived; None when the script reports no steps."""
        return self.phases_ns["productive"] if self.reports_steps else None

    @property
    def ettr(self) -> float | None:
        """Productive time over wall-clock without queue (0..1); None when it is unknown or no time has passed."""
        used_ns = self.wall_ns - self.phases_ns["queue"]
        if self.productive_ns is None or used_ns == 0:
            return None
        return self.productive_ns / used_ns

    @property
    def lost_by_cause_ns(self) -> dict[str, int]:
        """Nanoseconds from detect to first_step and rolled back, by the cause they are charged to."""
        result: dict[str, int] = {}
        for interval in self.intervals:
            if interval.cause is not None:
                result[interval.cause] = result.get(interval.cause, 0) + interval.end_ns - interval.begin_ns
        return dict(sorted(result.items()))


class History(msgspec.Struct, frozen=True):
    """Marks in canonical order and what they say about cycles and rollbacks, over all attempts."""

    marks: list[Mark]
    cycles: list[CycleFacts]
    backs: list[Rollback]
    reports_steps: bool
    uses_checkpoints: bool


class _Opening(msgspec.Struct, frozen=True):
    t_ns: int
    order: tuple[int, int]
    phase: str
    cycle: int | None
    kind: str


def read_history(marks: Iterable[Mark]) -> History:
    """Put marks in order and work out what later cycles did to earlier ones."""
    ordered = canonical(marks)
    cycles = cycle_facts(ordered)
    last = max((mark.attempt for mark in ordered), default=0)
    failed = any(
        mark.kind == "run_ended" and mark.attempt == last and mark.attrs.get("outcome") != "succeeded"
        for mark in ordered
    )
    return History(
        marks=ordered,
        cycles=cycles,
        backs=rollbacks(cycles, ordered, failed=failed),
        reports_steps=any(mark.kind in ("first_step", "step") for mark in ordered),
        uses_checkpoints=any(mark.kind == "restored" for mark in ordered),
    )


def partition(
    marks: Sequence[Mark], *, now_ns: int | None = None, attempt: int | None = None, whole_history: bool = False
) -> Partition:
    """Partition the wall-clock of one attempt, by default the last one in `marks`, or of all (`whole_history`).

    Wall-clock runs from run_started to run_ended; while the last attempt runs, to `now_ns` or else to its last mark.
    An earlier attempt without run_ended (its launcher vanished) ends at its last mark. Over the whole history, time
    between two attempts is `queue`. `marks` may hold several attempts of one run and be in any order; later attempts
    decide what survived of earlier ones. Without any mark the partition is empty. Raises ValueError when `attempt`
    has no mark.
    """
    return partition_history(read_history(marks), now_ns=now_ns, attempt=attempt, whole_history=whole_history)


def partition_history(
    history: History, *, now_ns: int | None = None, attempt: int | None = None, whole_history: bool = False
) -> Partition:
    """`partition` of marks that were put in order already."""
    attempts = sorted({mark.attempt for mark in history.marks})
    if attempt is not None and attempt not in attempts:
        raise ValueError(f"no mark of attempt {attempt}; the timeline has attempts {attempts}")
    if not attempts:
        return _tiled([], 0, 0, history)
    walls = _walls(history.marks, attempts, now_ns)
    chosen = attempts if whole_history else [attempts[-1] if attempt is None else attempt]
    intervals: list[Interval] = []
    edge_ns = walls[chosen[0]][0]
    for number in chosen:
        begin_ns, end_ns = walls[number]
        if edge_ns < begin_ns:
            intervals.append(Interval(begin_ns=edge_ns, end_ns=begin_ns, phase="queue", attempt=number))
        intervals += _attempt_intervals(history, number, begin_ns, end_ns)
        edge_ns = end_ns
    return _tiled(intervals, walls[chosen[0]][0], walls[chosen[-1]][1], history)


def _walls(marks: Sequence[Mark], attempts: Sequence[int], now_ns: int | None) -> dict[int, tuple[int, int]]:
    """Begin and end of each attempt; they never overlap, whatever the clocks said."""
    result: dict[int, tuple[int, int]] = {}
    floor_ns: int | None = None
    for number in attempts:
        own = [mark for mark in marks if mark.attempt == number]
        started = [mark.t_ns for mark in own if mark.kind == "run_started"]
        ended = [mark.t_ns for mark in own if mark.kind == "run_ended"]
        begin_ns = min(started) if started else own[0].t_ns
        if ended:
            end_ns = max(ended)
        elif now_ns is not None and number == attempts[-1]:
            end_ns = now_ns
        else:
            end_ns = own[-1].t_ns
        begin_ns = begin_ns if floor_ns is None else max(begin_ns, floor_ns)
        end_ns = max(begin_ns, end_ns)
        result[number] = (begin_ns, end_ns)
        floor_ns = end_ns
    return result


def _tiled(intervals: Sequence[Interval], begin_ns: int, end_ns: int, history: History) -> Partition:
    phases_ns = dict.fromkeys(PHASES, 0)
    for interval in intervals:
        phases_ns[interval.phase] += interval.end_ns - interval.begin_ns
    return Partition(
        begin_ns=begin_ns,
        end_ns=end_ns,
        wall_ns=end_ns - begin_ns,
        phases_ns=phases_ns,
        intervals=tuple(_joined(intervals)),
        reports_steps=history.reports_steps,
    )


def _joined(intervals: Sequence[Interval]) -> list[Interval]:
    """Join neighbours that differ in nothing but their times."""
    result: list[Interval] = []
    for interval in intervals:
        last = result[-1] if result else None
        if last is not None and msgspec.structs.replace(last, begin_ns=0, end_ns=0) == msgspec.structs.replace(
            interval, begin_ns=0, end_ns=0
        ):
            result[-1] = msgspec.structs.replace(last, end_ns=interval.end_ns)
        else:
            result.append(interval)
    return result


def _attempt_intervals(history: History, attempt: int, begin_ns: int, end_ns: int) -> list[Interval]:
    """Intervals of one attempt: walk the openings in time, then cut gaps, blocks and lost training out."""
    cycles = {facts.cycle: facts for facts in history.cycles if facts.attempt == attempt}
    gaps = _gaps(history.marks, attempt)
    openings = [_Opening(begin_ns, (-1, 0), "init", None, "run_started")]
    last = max(cycles, default=-1)
    for facts in cycles.values():
        openings += _openings(facts, history, is_last=facts.cycle == last)
    reached: list[_Opening] = []
    for opening in sorted(openings, key=lambda o: (max(begin_ns, min(o.t_ns, end_ns)), o.order)):
        if not reached or opening.order > reached[-1].order:
            reached.append(opening)
    edges = [max(begin_ns, min(opening.t_ns, end_ns)) for opening in reached] + [end_ns]
    causes = {facts.key: facts.fault.cause for facts in history.cycles if facts.fault is not None}
    charged = _charged(list(cycles.values()))
    result: list[Interval] = []
    for index, opening in enumerate(reached):
        low_ns, high_ns = edges[index], edges[index + 1]
        if low_ns == high_ns:
            continue
        if opening.phase == _TRAINING and opening.cycle is not None:
            follower = reached[index + 1] if index + 1 < len(reached) else opening
            by_fault = follower.phase in RECOVERY_PHASES and follower.kind != "cycle_ended"
            training = Training(low_ns, high_ns, by_fault=by_fault)
            result += _training_intervals(cycles[opening.cycle], training, history.backs, causes)
        else:
            cause, blamed = charged.get((opening.cycle, opening.phase), (None, None))
            whole = Interval(
                begin_ns=low_ns,
                end_ns=high_ns,
                phase=opening.phase,
                attempt=attempt,
                cycle=opening.cycle,
                cause=cause,
                blamed=blamed,
            )
            result += _cut(whole, gaps)
    return result


def _openings(facts: CycleFacts, history: History, *, is_last: bool) -> list[_Opening]:
    """What the marks of one cycle open, with the place of each in the life of the cycle."""
    times = _life_times(facts)
    restores = "restored" in times or ("step" not in times and history.uses_checkpoints)
    waiting = "first_step" if history.reports_steps else "other"
    phases = {
        "cycle_started": "rendezvous",
        "assigned": "start",
        "attached": "restore" if restores else waiting,
        "restored": waiting,
        "step": _TRAINING,
        "drain": "drain",
        "cycle_ended": "decide",
        "occurred": "detect",
        "detected": "capture",
        "captured": "teardown",
        "stopped": "decide",
        "decided": "replace" if "replaced" in times else "decide",
        "replaced": "replace",
    }
    if facts.fault is None and is_last:
        phases.update(dict.fromkeys(("cycle_ended", "captured", "stopped", "decided", "replaced"), "drain"))
    return [
        _Opening(t_ns, (facts.cycle, _SPAN_ORDER[kind]), phases[kind], facts.cycle, kind)
        for kind, t_ns in times.items()
    ]


def _life_times(facts: CycleFacts) -> dict[str, int]:
    """When each mark of the life of a cycle counts, in UTC nanoseconds: none before the cycle began.

    The marks of a recovery count in their order, each not before the one before it: they are put together from
    reports of several hosts, some of them lost, and one without a usable time must not open its phase in the middle
    of training.
    """
    given, fault = facts.opened_ns, facts.fault
    start_kinds = ("cycle_started", "assigned", "attached", "restored", "first_step", "step")
    floor_ns = min((given[kind] for kind in start_kinds if kind in given), default=None)
    if floor_ns is None:
        floor_ns = min(given.values()) if fault is None else fault.detected_ns
    begun_ns = given.get("cycle_started", floor_ns)
    times = {kind: max(given[kind], begun_ns) for kind in (*start_kinds[:4], "drain") if kind in given}
    if facts.trained:
        times["step"] = max(begun_ns, min(given[kind] for kind in ("first_step", "step") if kind in given))
    if fault is not None:
        edge_ns = times["detected"] = max(fault.detected_ns, begun_ns)
        times["occurred"] = min(max(fault.occurred_ns, begun_ns), edge_ns)
    else:
        edge_ns = max([*times.values(), *facts.steps_ns.values()], default=begun_ns)
        if "cycle_ended" in given:
            times["cycle_ended"] = max(given["cycle_ended"], edge_ns)
    for kind in ("captured", "stopped", "decided", "replaced"):
        if kind in given:
            edge_ns = times[kind] = max(edge_ns, given[kind])
    return times


def _charged(cycles: Sequence[CycleFacts]) -> dict[tuple[int | None, str], tuple[str, CycleKey | None]]:
    """What each lost phase of each cycle of one attempt is charged to: cause and key of the cycle that failed."""
    result: dict[tuple[int | None, str], tuple[str, CycleKey | None]] = {}
    charge: tuple[str, CycleKey | None] = (CAUSE_STARTUP, None)
    for facts in cycles:
        result.update({(facts.cycle, phase): charge for phase in START_PHASES})
        charge = (CAUSE_NONE if facts.fault is None else facts.fault.cause, facts.key)
        result.update({(facts.cycle, phase): charge for phase in RECOVERY_PHASES})
    return result


def _training_intervals(
    facts: CycleFacts, training: Training, backs: Sequence[Rollback], causes: dict[CycleKey, str]
) -> list[Interval]:
    """Split training: blocks first, then what was lost, the rest is productive."""
    result: list[Interval] = []
    edge_ns = training.begin_ns

    def emit(end_ns: int, phase: str, cause: str | None = None, blamed: CycleKey | None = None) -> None:
        nonlocal edge_ns
        if edge_ns < end_ns:
            result.append(
                Interval(
                    begin_ns=edge_ns,
                    end_ns=end_ns,
                    phase=phase,
                    attempt=facts.attempt,
                    cycle=facts.cycle,
                    cause=cause,
                    blamed=blamed,
                )
            )
            edge_ns = end_ns

    lost = lost_training(facts, training, backs)  # latest first, touching each other up to the end of training
    kept_until_ns = lost[-1].begin_ns if lost else training.end_ns
    parts: list[tuple[int, str, str | None, CycleKey | None]] = [(kept_until_ns, "productive", None, None)]
    parts += [(p.end_ns, "rolled_back", causes.get(p.blamed, CAUSE_NONE), p.blamed) for p in reversed(lost)]
    blocks = _merged((block.begin_ns, block.end_ns) for block in facts.blocks)
    index = 0
    for part_end_ns, phase, cause, blamed in parts:
        while index < len(blocks) and blocks[index][0] < part_end_ns:
            block_begin_ns, block_end_ns = blocks[index]
            emit(block_begin_ns, phase, cause, blamed)
            emit(min(block_end_ns, training.end_ns), "ckpt_block")
            index += 1
        emit(part_end_ns, phase, cause, blamed)
    return result


def _gaps(marks: Sequence[Mark], attempt: int) -> list[tuple[int, int]]:
    spans = []
    for mark in marks:
        begin_ns, end_ns = int_attr(mark, "begin_ns"), int_attr(mark, "end_ns")
        if mark.kind == "gap" and mark.attempt == attempt and begin_ns is not None and end_ns is not None:
            spans.append((begin_ns, end_ns))
    return _merged(spans)


def _merged(spans: Iterable[tuple[int, int]]) -> list[tuple[int, int]]:
    """Union of spans as disjoint spans in order; empty and negative ones vanish."""
    result: list[tuple[int, int]] = []
    for begin_ns, end_ns in sorted(span for span in spans if span[0] < span[1]):
        if result and begin_ns <= result[-1][1]:
            result[-1] = (result[-1][0], max(end_ns, result[-1][1]))
        else:
            result.append((begin_ns, end_ns))
    return result


def _cut(whole: Interval, gaps: Sequence[tuple[int, int]]) -> list[Interval]:
    """Give the parts of `whole` that lie in a gap to `other`."""
    result: list[Interval] = []
    edge_ns = whole.begin_ns
    for gap_begin_ns, gap_end_ns in gaps:
        low_ns, high_ns = max(edge_ns, gap_begin_ns), min(whole.end_ns, gap_end_ns)
        if low_ns < high_ns:
            if edge_ns < low_ns:
                result.append(msgspec.structs.replace(whole, begin_ns=edge_ns, end_ns=low_ns))
            result.append(Interval(begin_ns=low_ns, end_ns=high_ns, phase="other", attempt=whole.attempt))
            edge_ns = high_ns
    if edge_ns < whole.end_ns:
        result.append(msgspec.structs.replace(whole, begin_ns=edge_ns))
    return result
