"""The six losses of a job by name (`keepstep.records.losses`), from its partition: time, GPU-time, money.

Phases become losses like this; what an action that was wrong made necessary is `false_positive` instead of the first four:

- detect: detection; capture, teardown, decide: decision; rolled_back: rollback
- replace, and rendezvous, start, restore, first_step of a cycle that follows another one of its attempt: replacement
- init, and the same four of the first cycle of an attempt: startup
- productive: productive, less what stragglers took where that is known; queue, ckpt_block, drain, other: themselves
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence

import msgspec

from keepstep.goodput.facts import CycleKey
from keepstep.goodput.pace import Pace, SlowSpan, apart
from keepstep.goodput.partition import CAUSE_STARTUP, START_PHASES, Interval, Partition
from keepstep.goodput.verified import Verified
from keepstep.records.cycle import Cycle
from keepstep.records.losses import PARTS, Amount, JobLosses, Ratios

NS_PER_S = 1_000_000_000
NS_PER_H = 3600 * NS_PER_S

_NAMES = {
    "detect": "detection",
    "capture": "decision",
    "teardown": "decision",
    "decide": "decision",
    "replace": "replacement",
    "rolled_back": "rollback",
    "init": "startup",
}
_AVOIDABLE = frozenset({"detection", "decision", "replacement", "rollback"})


class Size(msgspec.Struct, frozen=True, kw_only=True):
    """What a cycle held: its GPUs (ranks, where no rank has one), those of its spares, and the nodes by name."""

    gpus: int
    spare_gpus: int = 0
    nodes: tuple[str, ...] = ()
    spares: tuple[str, ...] = ()


class Piece(msgspec.Struct, frozen=True, kw_only=True):
    """A part of wall-clock under its name in PARTS (stragglers still in productive). `gpus`, `held`: None when unknown.

    `held` counts spares too, and is 0 in the queue, where nothing is held.
    """

    begin_ns: int
    end_ns: int
    name: str
    gpus: int | None
    held: int | None
    cause: str | None = None
    blamed: CycleKey | None = None

    @property
    def time_ns(self) -> int:
        """How long it is."""
        return self.end_ns - self.begin_ns


def size_of(cycle: Cycle) -> Size | None:
    """Size of a recorded cycle, None where the record names no rank. A spare is taken to be as large as the active nodes are."""
    if not cycle.ranks:
        return None
    # Ranks may share a GPU; it is paid once.
    devices = {(r.node, r.gpu_uuid or r.pci) for r in cycle.ranks if r.gpu_uuid or r.pci}
    gpus = len(devices) or len(cycle.ranks)
    nodes = tuple(cycle.active_nodes) or tuple(sorted({r.node for r in cycle.ranks}))
    spare_gpus = -(-gpus // len(nodes)) * len(cycle.spare_nodes)
    return Size(gpus=gpus, spare_gpus=spare_gpus, nodes=nodes, spares=tuple(cycle.spare_nodes))


def sizes_of(cycles: Iterable[Cycle]) -> dict[CycleKey, Size]:
    """Sizes of the cycles whose records name ranks."""
    found = {(cycle.attempt, cycle.cycle): size_of(cycle) for cycle in cycles}
    return {key: size for key, size in found.items() if size is not None}


def pieces(part: Partition, sizes: Mapping[CycleKey, Size], wrong: frozenset[CycleKey] | None = None) -> list[Piece]:
    """Wall-clock under the names of losses, in order. `wrong`: cycles whose end led to a wrong action."""
    known = sorted(sizes)
    result = []
    last: CycleKey | None = None
    for interval in part.intervals:
        if interval.cycle is not None:
            last = (interval.attempt, interval.cycle)
        elif last is not None and last[0] != interval.attempt:
            last = None
        size = _size_at(interval, last, known, sizes)
        held = None if size is None else 0 if interval.phase == "queue" else size.gpus + size.spare_gpus
        result.append(
            Piece(
                begin_ns=interval.begin_ns,
                end_ns=interval.end_ns,
                name=_name(interval, wrong or frozenset()),
                gpus=None if size is None else size.gpus,
                held=held,
                cause=interval.cause,
                blamed=interval.blamed,
            )
        )
    return result


def _name(interval: Interval, wrong: frozenset[CycleKey]) -> str:
    if interval.phase in START_PHASES:
        name = "startup" if interval.cause == CAUSE_STARTUP else "replacement"
    else:
        name = _NAMES.get(interval.phase, interval.phase)
    return "false_positive" if name in _AVOIDABLE and interval.blamed in wrong else name


def _size_at(
    interval: Interval, last: CycleKey | None, known: Sequence[CycleKey], sizes: Mapping[CycleKey, Size]
) -> Size | None:
    """The size of the cycle itself, of the one before a gap, or of the one that queue and init wait for.

    Where that cycle has no record, the nearest one before it speaks for it, else the nearest after it.
    """
    if last is not None:
        before = [key for key in known if key <= last]
        if before:
            return sizes[before[-1]]
    after = [key for key in known if key >= (last or (interval.attempt, -1))]
    nearest = after[0] if after else known[-1] if known else None
    return None if nearest is None else sizes[nearest]


def clip(found: Iterable[Piece], begin_ns: int, end_ns: int) -> list[Piece]:
    """The parts of pieces that lie in [begin_ns, end_ns)."""
    result = []
    for piece in found:
        low_ns, high_ns = max(piece.begin_ns, begin_ns), min(piece.end_ns, end_ns)
        if low_ns < high_ns:
            result.append(msgspec.structs.replace(piece, begin_ns=low_ns, end_ns=high_ns))
    return result


class Tally(msgspec.Struct, kw_only=True):
    """A running sum. `gpu_ns` is None once something of unknown size was added."""

    time_ns: int = 0
    gpu_ns: int | None = 0

    def add(self, time_ns: int, gpus: int | None) -> None:
        """Add time on so many GPUs."""
        self.time_ns += time_ns
        self.gpu_ns = None if gpus is None or self.gpu_ns is None else self.gpu_ns + time_ns * gpus

    def amount(self, price: float | None = None) -> Amount:
        """The sum as a record; `price` in dollars per GPU-hour."""
        return amount(self.time_ns, self.gpu_ns, price)


def amount(time_ns: int, gpu_ns: int | None, price: float | None = None) -> Amount:
    """A record of time and GPU-time; `price` in dollars per GPU-hour."""
    gpu_h = None if gpu_ns is None else gpu_ns / NS_PER_H
    return Amount(
        time_ns=time_ns,
        time_s=time_ns / NS_PER_S,
        gpu_ns=gpu_ns,
        gpu_h=gpu_h,
        usd=None if gpu_h is None or price is None else gpu_h * price,
    )


def tallies(found: Sequence[Piece], stragglers: Sequence[SlowSpan] | None = None) -> dict[str, Tally]:
    """Sums by name, with all names of PARTS. `stragglers`: what slow ranks took, None where nobody looked."""
    sums = {name: Tally() for name in PARTS}
    for piece in found:
        sums[piece.name].add(piece.time_ns, piece.gpus)
    if stragglers is not None:
        for lost_ns, gpus in slow_time(found, apart(stragglers)):
            sums["straggler"].add(lost_ns, gpus)
            sums["productive"].add(-lost_ns, gpus)
    return sums


def slow_time(found: Sequence[Piece], spans: Sequence[SlowSpan]) -> list[tuple[int, int | None]]:
    """(nanoseconds, GPUs) that slow spans took of productive time. Both must be in order, spans apart from each other."""
    result: list[tuple[int, int | None]] = []
    index = 0
    for piece in found:
        if piece.name != "productive":
            continue
        while index < len(spans) and spans[index].end_ns <= piece.begin_ns:
            index += 1
        at = index
        while at < len(spans) and spans[at].begin_ns < piece.end_ns:
            lost_ns = spans[at].lost_until(piece.end_ns) - spans[at].lost_until(piece.begin_ns)
            result.append((lost_ns, piece.gpus))
            at += 1
    return result


def job_losses(
    part: Partition,
    sizes: Mapping[CycleKey, Size],
    *,
    pace: Pace | None = None,
    verified: Verified | None = None,
    stragglers: Sequence[SlowSpan] | None = None,
    price: float | None = None,
) -> JobLosses:
    """The losses of a whole partition; `price` in dollars per GPU-hour."""
    verified = verified or Verified()
    return losses_of(
        pieces(part, sizes, verified.wrong),
        reports_steps=part.reports_steps,
        pace=pace,
        verified=verified,
        stragglers=stragglers,
        price=price,
    )


def losses_of(
    found: Sequence[Piece],
    *,
    reports_steps: bool,
    pace: Pace | None = None,
    verified: Verified | None = None,
    stragglers: Sequence[SlowSpan] | None = None,
    price: float | None = None,
) -> JobLosses:
    """The losses of pieces, of a whole run or of the window they were clipped to. `verified`: what `pieces` was told of."""
    verified = verified or Verified()
    sums = tallies(found, stragglers)
    unknown = {
        name
        for name, known in (
            ("straggler", stragglers is not None and reports_steps),
            ("false_positive", verified.wrong is not None),
            ("productive", reports_steps),
        )
        if not known
    }
    held = held_tally(found)
    slow = None
    if pace is not None:
        slow = Tally()
        for lost_ns, gpus in slow_time(found, pace.spans):
            slow.add(lost_ns, gpus)
    return JobLosses(
        parts={name: None if name in unknown else tally.amount(price) for name, tally in sums.items()},
        ratios=ratios(sums, held, reports_steps=reports_steps, factor=None if pace is None else pace.factor),
        paid=held.amount(price),
        slow_steps=None if slow is None else slow.amount(price),
        actions=verified.actions,
        actions_verified=verified.verified,
        actions_wrong=None if verified.wrong is None else len(verified.wrong),
    )


def held_tally(found: Iterable[Piece]) -> Tally:
    """All that was held, spares included; time in the queue is none of it."""
    held = Tally()
    for piece in found:
        if piece.name != "queue":
            held.add(piece.time_ns, piece.held)
    return held


def ratios(sums: Mapping[str, Tally], held: Tally, *, reports_steps: bool, factor: float | None = None) -> Ratios:
    """The four ratios of one job; straggler time is productive in the first three, which do not know of it."""
    if not reports_steps:
        return Ratios(step_time_factor=factor)
    productive = [sums["productive"], sums["straggler"]]
    productive_ns = sum(t.time_ns for t in productive)
    wall_ns = sum(t.time_ns for t in sums.values())
    gpu_ns = [t.gpu_ns for t in productive]
    known = [ns for ns in gpu_ns if ns is not None]
    return Ratios(
        ettr_without_queue=_ratio(productive_ns, wall_ns - sums["queue"].time_ns),
        ettr_with_queue=_ratio(productive_ns, wall_ns),
        paid_gpu_goodput=_ratio(sum(known), held.gpu_ns) if len(known) == len(gpu_ns) else None,
        step_time_factor=factor,
    )


def _ratio(part: int, whole: int | None) -> float | None:
    return part / whole if whole else None
