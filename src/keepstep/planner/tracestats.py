"""What a planner needs to know of a failure trace: rates, their dependence on size, clustering in time, and on which nodes.

Everything is a pure function of a FaultTrace and uses the standard library alone. The comparison is always the same: what
independent failures (a Poisson process) of the same mean would give.
"""

from __future__ import annotations

import itertools
import math
import random
import statistics
from collections import Counter, defaultdict
from collections.abc import Iterable, Sequence
from typing import Literal

import msgspec

from keepstep.goodput.bursts import discoveries
from keepstep.goodput.spares import poisson_quantile
from keepstep.goodput.special import gamma_cdf
from keepstep.planner.traces import DAY_S, Fault, FaultTrace

INCIDENT_GAP_S = 600.0
"""Faults that begin less than so long after the one before them belong to one incident."""


class Rate(msgspec.Struct, frozen=True, kw_only=True):
    """Faults of one cause, and how many that is per 1000 nodes and day."""

    name: str
    faults: int
    per_1000_node_days: float


class Slope(msgspec.Struct, frozen=True, kw_only=True):
    """Straight line through log(faults per day) over log(nodes): slope 1 is "twice the nodes fail twice as often"."""

    slope: float
    standard_error: float
    systems: int


class Incident(msgspec.Struct, frozen=True, kw_only=True):
    """Faults of the fleet that follow each other closely: what one job over all nodes would see as one interruption."""

    begin_s: float
    last_s: float
    """When its last fault began."""
    faults: int
    nodes: int
    """Different ones."""


class WeibullFit(msgspec.Struct, frozen=True, kw_only=True):
    """Weibull distribution of gaps. Shape 1 is the exponential one; below 1 a failure makes the next one more likely."""

    shape: float
    scale_s: float
    shape_standard_error: float
    gaps: int


class ShortGaps(msgspec.Struct, frozen=True, kw_only=True):
    """Share of gaps shorter than a limit, and what it would be for exponential gaps of the same mean."""

    limit_s: float
    share: float
    poisson: float


class Concentration(msgspec.Struct, frozen=True, kw_only=True):
    """Share of all faults on the worst nodes, and what it would be if each node had a Poisson number of the same mean."""

    top_share: float
    """Of the nodes."""
    faults_share: float
    poisson: float


class Lemon(msgspec.Struct, frozen=True, kw_only=True):
    """A node that fails too often to be chance: probability of so many faults or more at the fleet's rate."""

    node: str
    faults: int
    p_value: float


class Refault(msgspec.Struct, frozen=True, kw_only=True):
    """Share of returned nodes that fail again within a time, and what it would be at the fleet's rate by chance."""

    within_s: float
    share: float
    poisson: float
    returns: int
    """Those with so much of the trace left to look at."""


class Allocation(msgspec.Struct, frozen=True, kw_only=True):
    """Mean time between faults of a job on nodes drawn from the fleet: it depends on the draw."""

    nodes: int
    median_s: float
    p5_s: float
    p95_s: float


# ---- rates


def per_1000_node_days(trace: FaultTrace) -> float:
    """All faults per 1000 nodes and day."""
    return 1000.0 * len(trace.faults) / trace.node_days


def rates(trace: FaultTrace, by: Literal["level", "cause", "detail"] = "level") -> list[Rate]:
    """Rate of each level, cause or detail, the most frequent first."""
    counts = Counter(str(getattr(fault, by)) for fault in trace.faults)
    return [
        Rate(name=name, faults=count, per_1000_node_days=1000.0 * count / trace.node_days)
        for name, count in sorted(counts.items(), key=lambda item: (-item[1], item[0]))
    ]


def size_slope(traces: Sequence[FaultTrace]) -> Slope:
    """Slope of log(faults per day) over log(nodes) by least squares, every system with the same weight.

    The standard error is that of ordinary least squares with n - 2 degrees of freedom. Raises ValueError below three systems, for
    one without a fault, or when all are of one size.
    """
    if len(traces) < 3 or any(not trace.faults for trace in traces):
        raise ValueError(f"size_slope: {len(traces)} systems; needs three with faults")
    x = [math.log(trace.nodes) for trace in traces]
    y = [math.log(len(trace.faults) / trace.days) for trace in traces]
    middle_x, middle_y = statistics.fmean(x), statistics.fmean(y)
    spread = math.fsum((a - middle_x) ** 2 for a in x)
    if spread == 0.0:
        raise ValueError(f"size_slope: all systems have {traces[0].nodes} nodes")
    slope = math.fsum((a - middle_x) * (b - middle_y) for a, b in zip(x, y, strict=True)) / spread
    left = math.fsum((b - middle_y - slope * (a - middle_x)) ** 2 for a, b in zip(x, y, strict=True))
    return Slope(slope=slope, standard_error=math.sqrt(left / (len(x) - 2) / spread), systems=len(x))


# ---- clustering in time


def gaps_s(times_s: Sequence[float]) -> list[float]:
    """Differences of times in their order."""
    return [b - a for a, b in itertools.pairwise(times_s)]


def incidents(trace: FaultTrace, gap_s: float = INCIDENT_GAP_S) -> list[Incident]:
    """Faults merged while each begins less than `gap_s` after the one before it, wherever in the fleet."""
    groups: list[list[Fault]] = []
    for fault in trace.faults:
        if groups and fault.begin_s - groups[-1][-1].begin_s < gap_s:
            groups[-1].append(fault)
        else:
            groups.append([fault])
    return [
        Incident(begin_s=g[0].begin_s, last_s=g[-1].begin_s, faults=len(g), nodes=len({fault.node for fault in g}))
        for g in groups
    ]


def binned(times_s: Iterable[float], bin_days: float) -> list[int]:
    """Counts in whole bins from the first time to the last; what is left over at the end is dropped."""
    times = sorted(times_s)
    if not times:
        return []
    counts = Counter(int((time_s - times[0]) / (bin_days * DAY_S)) for time_s in times)
    return [counts[place] for place in range(int((times[-1] - times[0]) / (bin_days * DAY_S)))]


def dispersion(times_s: Iterable[float], bin_days: float) -> float:
    """Variance over mean of counts by bin: 1 for a Poisson process, more when failures come in bursts.

    Raises ValueError unless two whole bins lie between the first time and the last.
    """
    counts = binned(times_s, bin_days)
    if len(counts) < 2 or not any(counts):
        raise ValueError(f"dispersion: {len(counts)} whole bins of {bin_days:g} days with {sum(counts)} failures")
    return statistics.variance(counts) / statistics.fmean(counts)


def weibull_fit(gaps: Iterable[float]) -> WeibullFit:
    """Maximum likelihood fit of a Weibull distribution to the gaps above 0; gaps of 0 have no place in it and are left out.

    The shape k is the root of sum(x^k ln x) / sum(x^k) - 1/k - mean(ln x), which rises in k: Newton's step in a bracket, halved
    where it leaves it. Standard error from the observed information, k sqrt(6) / (pi sqrt(n)) for large n. Raises ValueError for
    fewer than two different gaps.
    """
    logs = [math.log(gap) for gap in gaps if gap > 0.0]
    if len(set(logs)) < 2:
        raise ValueError("weibull_fit: needs two different gaps above 0")
    middle = statistics.fmean(logs)
    x = [value - middle for value in logs]  # the shape does not depend on the unit; this one keeps powers small
    low, high, shape = 0.0, math.inf, 1.0
    for _ in range(200):
        top = max(shape * value for value in x)
        powers = [math.exp(shape * value - top) for value in x]
        total = math.fsum(powers)
        first = math.fsum(p * value for p, value in zip(powers, x, strict=True)) / total
        second = math.fsum(p * value * value for p, value in zip(powers, x, strict=True)) / total
        wrong = first - 1.0 / shape
        low, high = (low, shape) if wrong > 0.0 else (shape, high)
        step = shape - wrong / (second - first * first + 1.0 / shape**2)
        if abs(step - shape) <= 1e-12 * shape:
            break
        shape = step if low < step < high else (low + high) / 2.0 if high < math.inf else 2.0 * shape
    scale_s = math.exp(middle + (math.log(total / len(x)) + top) / shape)
    error = shape * math.sqrt(6.0 / len(x)) / math.pi
    return WeibullFit(shape=shape, scale_s=scale_s, shape_standard_error=error, gaps=len(x))


def short_gaps(gaps: Sequence[float], limit_s: float = 3600.0) -> ShortGaps:
    """Share of gaps below `limit_s`, those of 0 included. Raises ValueError without gaps or when all are 0."""
    mean_s = statistics.fmean(gaps) if gaps else 0.0
    if not mean_s > 0.0:
        raise ValueError(f"short_gaps: {len(gaps)} gaps of mean 0")
    share = sum(gap < limit_s for gap in gaps) / len(gaps)
    return ShortGaps(limit_s=limit_s, share=share, poisson=-math.expm1(-limit_s / mean_s))


# ---- which nodes


def faults_by_node(trace: FaultTrace) -> list[int]:
    """Number of faults of each node, the worst first, zeros included."""
    counts = sorted(Counter(fault.node for fault in trace.faults).values(), reverse=True)
    return counts + [0] * (trace.nodes - len(counts))


def concentration(trace: FaultTrace, top_share: float) -> Concentration:
    """How much of all faults the worst `top_share` of nodes have. Raises ValueError without faults."""
    counts = faults_by_node(trace)
    total = sum(counts)
    if not total:
        raise ValueError("concentration: no faults")
    worst = round(top_share * trace.nodes)
    mean = total / trace.nodes
    return Concentration(
        top_share=top_share,
        faults_share=sum(counts[:worst]) / total,
        poisson=_poisson_top(worst / trace.nodes, mean) / mean,
    )


def _poisson_top(share: float, mean: float) -> float:
    """Mean number of faults, per node of all, on the `share` of nodes with the most when each has a Poisson number."""
    if share <= 0.0:
        return 0.0
    k = poisson_quantile(1.0 - share, mean)  # nodes with more than k faults are at most `share`; some with k fill it up
    at_least = gamma_cdf(mean, k) if k else 1.0
    # Faults on nodes with more than k: mean * P(at least k).
    return mean * at_least + k * (share - gamma_cdf(mean, k + 1.0))


def lemons(trace: FaultTrace, false_discovery: float = 0.05) -> list[Lemon]:
    """Nodes with too many faults for chance, the worst first.

    Each node's count is tested against Poisson at the mean of all nodes, one-sided; Benjamini and Hochberg's procedure (1995)
    keeps the expected share of healthy nodes among those named below `false_discovery`. The mean includes the lemons, so that the
    test is on the careful side. Faults of a node that begin while it is away, or less than INCIDENT_GAP_S after its last one
    began, are one: a record that flaps is not many faults. Raises ValueError without faults.
    """
    counts = {node: len(times) for node, times in _separate_begins(trace).items()}
    if not counts:
        raise ValueError("lemons: no faults")
    mean = sum(counts.values()) / trace.nodes
    found = sorted((gamma_cdf(mean, k), node, k) for node, k in counts.items())
    healthy = [1.0] * (trace.nodes - len(found))
    named = discoveries([p for p, _, _ in found] + healthy, false_discovery)
    return [Lemon(node=node, faults=k, p_value=p) for (p, node, k), bad in zip(found, named, strict=False) if bad]


def _separate_begins(trace: FaultTrace) -> dict[str, list[float]]:
    begins: dict[str, list[float]] = defaultdict(list)
    until: dict[str, float] = {}
    for fault in trace.faults:
        if fault.begin_s >= until.get(fault.node, -math.inf):
            begins[fault.node].append(fault.begin_s)
        until[fault.node] = max(until.get(fault.node, 0.0), fault.end_s, fault.begin_s + INCIDENT_GAP_S)
    return begins


def away(trace: FaultTrace) -> dict[str, list[tuple[float, float, bool]]]:
    """Per node: when it was away, overlapping faults merged, as (begin, end, whether it returned), in order of time."""
    spans: dict[str, list[tuple[float, float, bool]]] = defaultdict(list)
    for fault in trace.faults:
        own = spans[fault.node]
        if own and fault.begin_s < own[-1][1]:
            begin_s, end_s, returned = own[-1]
            own[-1] = (begin_s, max(end_s, fault.end_s), returned and fault.returned)
        else:
            own.append((fault.begin_s, fault.end_s, fault.returned))
    return spans


def refaults(trace: FaultTrace, within_s: Sequence[float] = (3600.0, DAY_S, 7 * DAY_S)) -> list[Refault]:
    """How many of the nodes that come back fail again soon, for each time.

    Only returns with that much of the trace left count; what they have beside chance is 1 - exp(-rate * time) at the fleet's rate
    over all node-days.
    """
    length_s = trace.days * DAY_S
    waits: list[tuple[float, float]] = []
    for spans in away(trace).values():
        for (_, end_s, returned), after in zip(spans, [*spans[1:], None], strict=True):
            if returned:
                waits.append((length_s - end_s, math.inf if after is None else after[0] - end_s))
    rate_per_s = len(trace.faults) / trace.node_days / DAY_S
    rows = []
    for limit_s in within_s:
        seen = [wait_s <= limit_s for left_s, wait_s in waits if left_s >= limit_s]
        share = sum(seen) / len(seen) if seen else math.nan
        chance = -math.expm1(-rate_per_s * limit_s)
        rows.append(Refault(within_s=limit_s, share=share, poisson=chance, returns=len(seen)))
    return rows


def allocation_luck(trace: FaultTrace, nodes: int, draws: int = 2000, seed: int = 0) -> Allocation:
    """Mean time between faults of jobs on `nodes` nodes drawn at random from the fleet: its median and 5 % to 95 %.

    A draw without faults counts as infinite. Raises ValueError when there are not so many nodes.
    """
    counts = faults_by_node(trace)
    if not 1 <= nodes <= len(counts):
        raise ValueError(f"allocation_luck: {nodes} of {len(counts)} nodes")
    chance = random.Random(seed)
    drawn = sorted(sum(chance.sample(counts, nodes)) for _ in range(draws))
    at = [trace.days * DAY_S / k if k else math.inf for k in reversed(drawn)]
    p5_s, median_s, p95_s = (at[min(draws - 1, int(p * draws))] for p in (0.05, 0.5, 0.95))
    return Allocation(nodes=nodes, median_s=median_s, p5_s=p5_s, p95_s=p95_s)


def rates_by_month(trace: FaultTrace, bin_days: float = 30.0) -> list[float]:
    """Faults per 1000 nodes and day in each whole bin."""
    return [1000.0 * count / (trace.nodes * bin_days) for count in binned(trace.begins_s, bin_days)]
