"""By how much the clocks of nodes differ, from what several of them report of one moment. Pure.

A difference is said only when at least three shared moments agree on it. It is reported, and noted on events for whoever orders
them; times themselves are never changed.
"""

from __future__ import annotations

import statistics
from collections.abc import Iterable, Sequence
from typing import NamedTuple

import msgspec

from keepstep.records.event import Event, TimeQuality

MIN_PAIRS = 3
MIN_SKEW_S = 1.0
"""Less is what flushing and scheduling do."""
SPREAD = 0.25
"""Shared moments must agree to this part of the difference, or to SPREAD_S."""
SPREAD_S = 1.0
MAX_SKEW_S = 15 * 3600.0
"""More than all zones together is no skew but other events."""
_CLOCKS: frozenset[TimeQuality] = frozenset({"exact", "zone_assumed", "year_assumed"})
_SHARED = ("seq", "seqnum", "seq_num", "work", "sequence", "collective_seq", "numel", "op", "pg", "cycle", "round")
"""Attributes that name one collective, cycle or round of all ranks."""


class Skew(NamedTuple):
    """The clock of `node` is ahead of that of `reference` by `seconds`, as `pairs` shared moments say."""

    node: str
    reference: str
    seconds: float
    pairs: int


def estimate(events: Sequence[Event]) -> list[Skew]:
    """Differences against the node that shares most moments with others; nodes whose clock agrees are not listed."""
    moments = _moments(events)
    shared: dict[str, int] = {}
    for by_node in moments:
        for node in by_node:
            shared[node] = shared.get(node, 0) + 1
    if len(shared) < 2:
        return []
    reference = max(sorted(shared), key=lambda n: shared[n])
    found = []
    for node in sorted(shared):
        gaps = [m[node] - m[reference] for m in moments if node in m and reference in m]
        seconds = _agreed([g / 1e9 for g in gaps]) if node != reference else None
        if seconds is not None:
            found.append(Skew(node, reference, round(seconds, 3), len(gaps)))
    return found


def _moments(events: Iterable[Event]) -> list[dict[str, int]]:
    """Times by node of each thing that several nodes report: one collective, or the begin of a burst of one signature."""
    first: dict[tuple[object, ...], dict[str, int]] = {}
    for event in events:
        if event.node is None or event.time_ns is None or event.time_quality not in _CLOCKS:
            continue
        names = tuple(event.attrs.get(name) for name in _SHARED)
        if event.cycle is None and not any(names):
            continue
        key = (event.signature, event.cycle, *names)
        by_node = first.setdefault(key, {})
        by_node[event.node] = min(by_node.get(event.node, event.time_ns), event.time_ns)
    return [by_node for by_node in first.values() if len(by_node) > 1]


def _agreed(gaps_s: Sequence[float]) -> float | None:
    if len(gaps_s) < MIN_PAIRS:
        return None
    middle = statistics.median(gaps_s)
    allowed = max(SPREAD_S, SPREAD * abs(middle)) if abs(middle) < 60 else 60 * SPREAD
    near = sum(1 for gap in gaps_s if abs(gap - middle) <= allowed)
    if not MIN_SKEW_S <= abs(middle) <= MAX_SKEW_S or near * 3 < len(gaps_s) * 2:
        return None
    return middle


def add_skew(events: Iterable[Event], skew: Sequence[Skew]) -> list[Event]:
    """The events; those of nodes whose clock differs say so in attrs["skew_s"] (to be subtracted from their time)."""
    by_node = {s.node: s.seconds for s in skew}
    if not by_node:
        return list(events)
    return [
        msgspec.structs.replace(e, attrs=e.attrs | {"skew_s": by_node[e.node]}) if e.node in by_node else e
        for e in events
    ]
