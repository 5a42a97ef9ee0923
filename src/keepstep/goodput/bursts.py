"""Failures that belong together, how much more their counts vary than chance, and nodes that fail more often than chance.

A switch that takes four nodes along, or a node that fails again before its job trains, is one incident: rates count incidents.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence

import msgspec

from keepstep.goodput.rates import DAY_S, PRIOR_SHAPE, TYPICAL_DISPERSION, Prior, predictive_tail
from keepstep.goodput.special import gamma_cdf

NS_PER_S = 1_000_000_000
DAY_NS = int(DAY_S) * NS_PER_S
BURST_NS = 600 * NS_PER_S
"""Failures less than ten minutes apart may be one incident."""
SHARED_CLASSES = frozenset({"fabric", "storage", "platform"})
"""Classes whose cause is shared by nodes and jobs."""
NODE_CLASSES = frozenset({"hardware", "fabric", "platform", "unknown"})
"""Classes in which a node may be at fault. For code, framework and shared storage the node that stopped first is chance."""
MIN_FAILURES = 10
MAX_ERROR = 0.5
"""A dispersion is measured from so many incidents at least, and with a standard error of at most this."""
MIN_EXPOSURE_SHARE = 0.25
"""A day or week with less than this share of the mean node time says next to nothing and is left out."""
LEAST_LEMON = 2
"""One failure is never more than chance, however short the node was there."""
FALSE_DISCOVERIES = 0.05
"""Expected share of nodes called lemons that are none."""


class Failure(msgspec.Struct, frozen=True, kw_only=True):
    """A failure that interrupted a job. `node`: the one that is blamed, None where nobody knows."""

    t_ns: int
    run_id: str
    fault_class: str
    sku: str = "unknown"
    node: str | None = None
    rack: str | None = None


class Exposure(msgspec.Struct, frozen=True, kw_only=True):
    """A node was part of a job's cycle during [begin_ns, end_ns)."""

    node: str
    run_id: str
    begin_ns: int
    end_ns: int
    sku: str = "unknown"


class Burst(msgspec.Struct, frozen=True, kw_only=True):
    """Failures that count as one incident, in time order. Most have one."""

    failures: tuple[Failure, ...]

    @property
    def first(self) -> Failure:
        """The first failure gives the incident its class, time and GPU model."""
        return self.failures[0]

    @property
    def nodes(self) -> list[str]:
        """Nodes that are blamed in it."""
        return sorted({f.node for f in self.failures if f.node is not None})


class Dispersion(msgspec.Struct, frozen=True, kw_only=True):
    """Variance over mean of counts of incidents: 1 for a Poisson process."""

    value: float
    source: str
    """"weekly", "daily" or "typical": measured from those counts, or taken from a published trace for want of data."""
    daily: float | None = None
    weekly: float | None = None
    """As counted, None where there was nothing to count."""
    daily_error: float | None = None
    weekly_error: float | None = None
    """Standard errors, were it a Poisson process."""
    p_value: float | None = None
    """Probability of counts as uneven as the ones it was measured from, were it a Poisson process."""


class Lemon(msgspec.Struct, frozen=True, kw_only=True):
    """A node that failed more often than the other nodes of its model make likely."""

    node: str
    sku: str
    failures: int
    node_days: float
    expected: float
    """Failures that a node like the others would have had."""
    p_value: float


def bursts(failures: Iterable[Failure]) -> list[Burst]:
    """Incidents in time order.

    Two failures less than BURST_NS apart are one when they hit the same job, node or rack, or when both have the same class of
    SHARED_CLASSES. Failures of unrelated jobs stay two: in a large fleet some fall together by chance.
    """
    ordered = sorted(failures, key=lambda f: (f.t_ns, f.run_id, f.node or "", f.fault_class))
    group = list(range(len(ordered)))

    def top(index: int) -> int:
        while group[index] != index:
            group[index] = group[group[index]]
            index = group[index]
        return index

    begin = 0
    for index, failure in enumerate(ordered):
        while failure.t_ns - ordered[begin].t_ns >= BURST_NS:
            begin += 1
        for earlier in range(begin, index):
            if _together(ordered[earlier], failure):
                # The earliest stays on top, so that incidents are found in time order.
                low, high = sorted((top(earlier), top(index)))
                group[high] = low
    members: dict[int, list[Failure]] = {}
    for index, failure in enumerate(ordered):
        members.setdefault(top(index), []).append(failure)
    return [Burst(failures=tuple(found)) for _, found in sorted(members.items())]


def _together(one: Failure, other: Failure) -> bool:
    same_place = (one.node is not None and one.node == other.node) or (one.rack is not None and one.rack == other.rack)
    shared = one.fault_class == other.fault_class and one.fault_class in SHARED_CLASSES
    return one.run_id == other.run_id or same_place or shared


# ---- over-dispersion


def dispersion_of(times_ns: Sequence[int], exposures: Sequence[Exposure], begin_ns: int, end_ns: int) -> Dispersion:
    """Pearson's statistic of daily and of weekly counts, each against the node time of its day or week.

    The larger of those with enough data counts, and never less than 1: bursts that last for days show in weekly counts only.
    Enough: MIN_FAILURES incidents and a standard error of at most MAX_ERROR, which for n periods with a mean count of m is
    sqrt((2 + 1/m) / n) in a Poisson process.
    """
    found = {
        name: _pearson(times_ns, exposures, begin_ns, end_ns, days * DAY_NS)
        for name, days in (("daily", 1), ("weekly", 7))
    }
    good = {
        name: told
        for name, told in found.items()
        if told is not None and told.error <= MAX_ERROR and len(times_ns) >= MIN_FAILURES
    }
    best = max(good, key=lambda name: good[name].value, default=None)
    daily, weekly = found["daily"], found["weekly"]
    return Dispersion(
        value=TYPICAL_DISPERSION if best is None else max(1.0, good[best].value),
        source=best or "typical",
        daily=None if daily is None else daily.value,
        weekly=None if weekly is None else weekly.value,
        daily_error=None if daily is None else daily.error,
        weekly_error=None if weekly is None else weekly.error,
        p_value=None if best is None else good[best].p_value,
    )


class _Pearson(msgspec.Struct, frozen=True):
    value: float
    error: float
    p_value: float


def _pearson(
    times_ns: Sequence[int], exposures: Sequence[Exposure], begin_ns: int, end_ns: int, period_ns: int
) -> _Pearson | None:
    count = -(-(end_ns - begin_ns) // period_ns)
    node_ns: dict[int, int] = {}
    for span in exposures:
        low_ns, high_ns = max(span.begin_ns, begin_ns), min(span.end_ns, end_ns)
        while low_ns < high_ns:
            period = (low_ns - begin_ns) // period_ns
            edge_ns = min(high_ns, begin_ns + (period + 1) * period_ns)
            node_ns[period] = node_ns.get(period, 0) + edge_ns - low_ns
            low_ns = edge_ns
    if not node_ns or count < 2:
        return None
    least = MIN_EXPOSURE_SHARE * sum(node_ns.values()) / len(node_ns)
    kept = {period: ns for period, ns in node_ns.items() if ns >= least}
    counts = dict.fromkeys(kept, 0)
    for t_ns in times_ns:
        period = (t_ns - begin_ns) // period_ns
        if period in counts:
            counts[period] += 1
    total, periods = sum(counts.values()), len(kept)
    if total == 0 or periods < 2:
        return None
    rate = total / sum(kept.values())
    squares = math.fsum((counts[p] - rate * ns) ** 2 / (rate * ns) for p, ns in kept.items())
    freedom = periods - 1
    return _Pearson(
        value=squares / freedom,
        error=math.sqrt((2.0 + periods / total) / periods),
        p_value=max(0.0, 1.0 - gamma_cdf(squares / 2.0, freedom / 2.0)),
    )


# ---- lemon nodes


def lemons(found: Sequence[Burst], node_days: Mapping[str, float], sku_of_node: Mapping[str, str]) -> list[Lemon]:
    """Nodes with more failures than chance, the least likely first.

    The test, for each node: the probability of at least as many failures were they Poisson at the rate of all other nodes of its
    model, whose own uncertainty is a Gamma posterior: a negative binomial tail. Only NODE_CLASSES count, and a node once an
    incident. Of all nodes tested those are named that Benjamini and Hochberg's procedure keeps at FALSE_DISCOVERIES.
    """
    hits: dict[str, int] = {}
    for burst in found:
        for node in {f.node for f in burst.failures if f.node is not None and f.fault_class in NODE_CLASSES}:
            hits[node] = hits.get(node, 0) + 1
    tested = []
    for sku in sorted(set(sku_of_node.values())):
        names = sorted(node for node in node_days if sku_of_node.get(node) == sku and node_days[node] > 0.0)
        all_days, all_hits = math.fsum(node_days[n] for n in names), sum(hits.get(n, 0) for n in names)
        for node in names:
            days, others = node_days[node], all_days - node_days[node]
            if len(names) > 1 and others > 0.0:
                tested.append(_tested(node, sku, hits.get(node, 0), days, all_hits - hits.get(node, 0), others))
    kept = discoveries([lemon.p_value for lemon in tested], FALSE_DISCOVERIES)
    named = [lemon for lemon, keep in zip(tested, kept, strict=True) if keep and lemon.failures >= LEAST_LEMON]
    return sorted(named, key=lambda lemon: (lemon.p_value, lemon.node))


def _tested(node: str, sku: str, failures: int, days: float, other_failures: int, other_days: float) -> Lemon:
    others = Prior(shape=other_failures + PRIOR_SHAPE, node_days=other_days, source="the other nodes")
    return Lemon(
        node=node,
        sku=sku,
        failures=failures,
        node_days=days,
        expected=others.rate_per_node_day * days,
        p_value=predictive_tail(others, failures, days),
    )


def discoveries(p_values: Sequence[float], share: float) -> list[bool]:
    """Which hypotheses Benjamini and Hochberg (1995) reject so that at most `share` of the rejections are expected to be false."""
    order = sorted(range(len(p_values)), key=lambda index: p_values[index])
    last = 0
    for rank, index in enumerate(order, 1):
        if p_values[index] <= share * rank / len(p_values):
            last = rank
    kept = set(order[:last])
    return [index in kept for index in range(len(p_values))]
