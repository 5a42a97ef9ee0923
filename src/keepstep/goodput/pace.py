"""How fast steps were against the best pace of the run itself, from the samples of its timeline."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from itertools import pairwise
from typing import NamedTuple

import msgspec

from keepstep.goodput.facts import CycleFacts, CycleKey

WINDOW_STEPS = 10
"""Samples are taken together until they cover so many steps: a single step is mostly noise, and the best of them luck."""
MIN_SEGMENTS = 20
"""Stretches of that length on the same number of ranks, below which neither median nor best means anything."""
BEST_SHARE = 0.1
"""The best pace is the one that this share of the steps kept or beat: the minimum alone would be noise."""


class SlowSpan(msgspec.Struct, frozen=True, kw_only=True):
    """Of the time [begin_ns, end_ns) `lost_ns` was lost, evenly spread."""

    begin_ns: int
    end_ns: int
    lost_ns: int

    def lost_until(self, t_ns: int) -> int:
        """Of that, up to `t_ns`. Differences of it add up however time is cut."""
        inside_ns = max(self.begin_ns, min(t_ns, self.end_ns)) - self.begin_ns
        return self.lost_ns * inside_ns // (self.end_ns - self.begin_ns) if inside_ns else 0


class Pace(msgspec.Struct, frozen=True, kw_only=True):
    """`factor`: median step time over the best. `spans`: time above the best pace, in order and apart from each other."""

    factor: float
    spans: tuple[SlowSpan, ...]


class _Segment(NamedTuple):
    begin_ns: int
    end_ns: int
    steps: int

    @property
    def step_ns(self) -> float:
        return (self.end_ns - self.begin_ns) / self.steps


def pace_of(cycles: Sequence[CycleFacts], ranks: Mapping[CycleKey, int]) -> Pace | None:
    """Pace of a run; None with too few samples. Cycles with another number of ranks are compared among themselves only."""
    groups: dict[int | None, list[_Segment]] = {}
    for facts in cycles:
        groups.setdefault(ranks.get(facts.key), []).extend(_segments(facts))
    factors: list[tuple[float, int]] = []
    spans: list[SlowSpan] = []
    for segments in groups.values():
        if len(segments) < MIN_SEGMENTS:
            continue
        best_ns = _quantile([(s.step_ns, s.steps) for s in segments], BEST_SHARE)
        for s in segments:
            factors.append((s.step_ns / best_ns, s.steps))
            lost_ns = s.end_ns - s.begin_ns - round(s.steps * best_ns)
            if lost_ns > 0:
                spans.append(SlowSpan(begin_ns=s.begin_ns, end_ns=s.end_ns, lost_ns=lost_ns))
    if not factors:
        return None
    return Pace(factor=_quantile(factors, 0.5), spans=apart(spans))


def apart(spans: Sequence[SlowSpan]) -> tuple[SlowSpan, ...]:
    """Spans in order, without those that would count time twice: of two that overlap the one that begins first stays."""
    result: list[SlowSpan] = []
    for span in sorted(spans, key=lambda s: (s.begin_ns, s.end_ns)):
        if span.begin_ns < span.end_ns and (not result or span.begin_ns >= result[-1].end_ns):
            result.append(span)
    return tuple(result)


def _segments(facts: CycleFacts) -> list[_Segment]:
    """Stretches of at least WINDOW_STEPS steps from one sample to another, without blocks; what is left over is in none."""
    found: list[_Segment] = []
    # A block that names no step lies anywhere: a stretch with one measures saving too.
    unnamed = [block for block in facts.blocks if block.step is None]
    first: int | None = None
    begin_ns = 0
    for low, high in pairwise(sorted(facts.steps_ns)):
        resumed_ns = facts.resumed_ns.get(low, 0)
        if first is None or resumed_ns > facts.steps_ns[low]:
            first, begin_ns = low, max(facts.steps_ns[low], resumed_ns)
        end_ns = facts.steps_ns[high]
        if end_ns <= begin_ns or any(b.begin_ns < end_ns and begin_ns < b.end_ns for b in unnamed):
            first = None
        elif high - first >= WINDOW_STEPS:
            found.append(_Segment(begin_ns, end_ns, high - first))
            first = None
    return found


def _quantile(values: Sequence[tuple[float, int]], share: float) -> float:
    """The smallest value that `share` of the weight is not above."""
    ordered = sorted(values)
    need = share * sum(weight for _, weight in ordered)
    seen = 0
    for value, weight in ordered:
        seen += weight
        if seen >= need:
            return value
    return ordered[-1][0]
