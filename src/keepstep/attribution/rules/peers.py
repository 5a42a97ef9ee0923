"""Comparing one with its peers: medians, who is worse, and whether it is always the same one."""

from __future__ import annotations

import math
from bisect import bisect_left
from collections import Counter
from collections.abc import Mapping, Sequence
from typing import Literal, NamedTuple

LEAST_PEERS = 3
"""With two, who is slow and who is fast cannot be told apart."""
CONSTANT_SHARE = 0.75
"""Share of the points at which the same one is worst, from which on it is the one."""
ROTATING_SHARE = 0.55
"""Share up to which the worst one has changed so often that the place says nothing."""
LEAST_POINTS = 3

Sense = Literal["more", "less"]
"""Which values are worse."""


class Standing(NamedTuple):
    """One entity beside its peers. `ratio`: how many times worse than the median of the others, 1 alike."""

    name: str
    value: float
    peers: float
    ratio: float


def finite(values: Sequence[float]) -> list[float]:
    """Without NaN and infinities: nothing was measured there."""
    return [v for v in values if math.isfinite(v)]


def standings(values: Mapping[str, float], worse: Sense) -> list[Standing]:
    """Every entity beside the median of the others, worst first. Entities that are not positive numbers are left out."""
    known = {name: v for name, v in values.items() if math.isfinite(v) and v > 0}
    ordered = sorted(known.values())
    found = []
    for name, value in known.items():
        peers = _median_without(ordered, value)
        if peers is None:
            continue
        found.append(Standing(name, value, peers, value / peers if worse == "more" else peers / value))
    return sorted(found, key=lambda s: (-s.ratio, s.name))


def _median_without(ordered: Sequence[float], value: float) -> float | None:
    """Median of a sorted list without one of its values."""
    left = len(ordered) - 1
    if left == 0:
        return None
    gap = bisect_left(ordered, value)
    low, high = (left - 1) // 2, left // 2
    return (ordered[low + (low >= gap)] + ordered[high + (high >= gap)]) / 2


def outliers(values: Mapping[str, float], worse: Sense, ratio: float, most_share: float = 0.34) -> list[Standing]:
    """Those that are worse than their peers by `ratio`; none when they are too many to be exceptions, or too few to compare."""
    found = standings(values, worse)
    if "others" not in values and len(found) < LEAST_PEERS:
        return []
    bad = [s for s in found if s.ratio >= ratio and s.name != "others"]
    most = max(1, math.floor(most_share * len(found)))
    return bad if len(bad) <= most or "others" in values else []


def always(worst: Sequence[str]) -> str | None:
    """The one that is worst nearly always; None when there is none or too little was seen."""
    if len(worst) < LEAST_POINTS:
        return None
    name, count = Counter(worst).most_common(1)[0]
    return name if count >= CONSTANT_SHARE * len(worst) else None


def rotates(worst: Sequence[str]) -> bool:
    """Whether the worst one keeps changing."""
    if len(worst) < LEAST_POINTS:
        return False
    counts = Counter(worst)
    return len(counts) >= 3 and counts.most_common(1)[0][1] <= ROTATING_SHARE * len(worst)


def worst_by_point(series: Mapping[str, Sequence[float]], worse: Sense, ratio: float) -> list[str]:
    """Who was worst at each point at which it was worse than its peers by `ratio`. Only as many points as everybody has."""
    length = min((len(points) for points in series.values()), default=0)
    found = []
    for at in range(length):
        ranking = standings({name: points[at] for name, points in series.items()}, worse)
        if len(ranking) >= LEAST_PEERS and ranking[0].ratio >= ratio:
            found.append(ranking[0].name)
    return found
