"""How many spare nodes: nodes in repair as a queue without waiting room, and goodput with the spares in the denominator.

A job of N nodes with k spares runs while at most k are in repair. While it stands still nothing fails, so the number in repair
never passes k + 1: Erlang's loss system with k + 1 servers and a load of (failures that take a node out) x (mean repair). Its
probability of being full, Erlang's B, is the share of time without enough nodes, whatever the distribution of repair times (A. K.
Erlang, 1917; insensitivity: B. A. Sevastyanov, 1957). Failures in bursts make the number in repair vary more than a Poisson one of
the same mean: its variance over mean z ("peakedness") enters by Hayward's approximation B((k + 1) / z, load / z) (Fredericks, Bell
System Technical Journal 59(6), 1980).
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from statistics import NormalDist

import msgspec

from keepstep.goodput.special import gamma_cdf

DAY_S = 86_400.0
TRACE_PEAKEDNESS = 5.7
"""Variance over mean of the nodes down at once in InfiniteHBD-Trace (400 GPU nodes, 345 days; docs/traces.md); LANL's have 1.1."""
MOST_PER_NODE = 4
LEAST_TRIED = 64
"""Spares that are tried at most: so many for each node, and some."""
CURVE_POINTS = 40
_LARGE = 1e5
"""Means above which quantiles are a normal distribution's: good to a thousandth there."""
_NO_LOAD = 1e-12
_STEPS = 2000
"""Of the integral for a fraction of a server."""


class SpareChoice(msgspec.Struct, frozen=True, kw_only=True):
    """What so many spares come to."""

    spares: int
    stall_share: float
    """Of wall-clock: the job waits for a node."""
    goodput_job: float
    """Lasting training over the job's wall-clock, waiting included."""
    goodput_paid: float
    """The same over all nodes that are paid for, spares included."""


class Blocks(msgspec.Struct, frozen=True, kw_only=True):
    """Spares that serve their own topology block only."""

    block_nodes: int
    blocks: int
    spares_per_block: int
    choice: SpareChoice
    """All of them together."""


class SparePlan(msgspec.Struct, frozen=True, kw_only=True):
    """Spares for a job: how many nodes are away, what holds at p99 and p99.9 of time, what is best by paid goodput."""

    mean_down: float
    """Nodes in repair on average."""
    peakedness: float
    p99: int
    p999: int
    """Spares that are enough in 99 and 99.9 % of time: quantiles of the number in repair."""
    p99_poisson: int
    """The same if failures knew nothing of one another."""
    p99_bursts: int
    """The same at TRACE_PEAKEDNESS, when that is more: failures in bursts, and some repairs that take months."""
    best: SpareChoice
    given: SpareChoice | None
    curve: list[SpareChoice]
    """At up to 41 counts, from none to twice the best."""
    blocks: Blocks | None = None


def mean_down(nodes: int, rate_per_node_day: float, replaced_share: float, repair_s: float) -> float:
    """Nodes in repair on average if the job never waited: arrivals times mean time (Little's law), at most MOST_PER_NODE a node."""
    return min(nodes * rate_per_node_day * replaced_share * repair_s / DAY_S, float(MOST_PER_NODE * nodes))


def poisson_quantile(level: float, mean: float) -> int:
    """The smallest k with P(Poisson(mean) <= k) >= level. Raises ValueError for a level outside [0, 1) or a negative mean."""
    if not 0.0 <= level < 1.0 or not 0.0 <= mean < math.inf:
        raise ValueError(f"poisson_quantile: level {level} from 0 to below 1, mean {mean} from 0")
    low, high = -1, max(1, math.ceil(mean))
    while 1.0 - gamma_cdf(mean, high + 1.0) < level:
        low, high = high, 2 * high
    while high - low > 1:  # P(N <= k) = 1 - gamma_cdf(mean, k + 1)
        middle = (low + high) // 2
        low, high = (middle, high) if 1.0 - gamma_cdf(mean, middle + 1.0) < level else (low, middle)
    return high


def _normal_quantile(p: float, mean: float, variance: float) -> int:
    return max(0, math.ceil(mean + NormalDist().inv_cdf(max(p, 1e-12)) * math.sqrt(variance) - 0.5))


def negative_binomial_quantile(p: float, mean: float, peakedness: float) -> int:
    """The same for a negative binomial distribution with variance `peakedness` times the mean; Poisson's at 1."""
    if peakedness <= 1.0 + 1e-9 or mean <= 0.0:
        return poisson_quantile(p, mean)
    if mean > _LARGE:
        return _normal_quantile(p, mean, mean * peakedness)
    shape = mean / (peakedness - 1.0)
    share = 1.0 - 1.0 / peakedness
    log_term = -shape * math.log(peakedness)
    total, k = 0.0, 0
    while True:
        total += math.exp(log_term)
        if total >= p * (1.0 - 1e-15) or k > mean + 200.0 * peakedness * math.sqrt(mean) + 1000.0:
            return k
        k += 1
        log_term += math.log(share * (shape + k - 1.0) / k)


def erlang_b(servers: float, load: float) -> float:
    """Erlang's B for any number of servers from 0, also a fraction of one.

    1 / B(x, a) is the integral of e^-u (1 + u / a)^x over u from 0; from the fraction on, B(x + 1) = a B(x) / (x + 1 + a B(x)).
    Raises ValueError for negative numbers.
    """
    if servers < 0.0 or load < 0.0 or not math.isfinite(servers + load):
        raise ValueError(f"erlang_b({servers}, {load}): needs finite numbers of at least 0")
    if load < _NO_LOAD:
        return 1.0 if servers == 0.0 else 0.0
    whole = math.floor(servers)
    x = servers - whole
    value = 1.0 / _inverse_b(x, load)
    while x < servers - 0.5:
        x += 1.0
        value = load * value / (x + load * value)
    return value


def _inverse_b(x: float, load: float) -> float:
    """The integral for 0 <= x < 1: u = -log(v) makes it one over v from 0 to 1, by the midpoint rule."""
    if x == 0.0:
        return 1.0
    return math.fsum((1.0 - math.log((i + 0.5) / _STEPS) / load) ** x for i in range(_STEPS)) / _STEPS


def stall_share(spares: int, load: float, peakedness: float = 1.0, idle_hazard: float = 0.0) -> float:
    """Share of time that a job with so many spares waits for a node. `load`: mean number in repair if it never waited.

    `idle_hazard`: failure rate of nodes while the job waits, relative to that of nodes that train. Above 0 more nodes than
    k + 1 may be in repair: the chain of states goes on beyond them, each weighing idle_hazard x load / state of the one before.
    """
    servers, offered = (spares + 1.0) / peakedness, load / peakedness
    full = erlang_b(servers, offered)
    if idle_hazard <= 0.0 or full <= 0.0:
        return full
    beyond = term = 1.0
    state = servers
    while term > beyond * 1e-12:
        state += 1.0
        term *= idle_hazard * offered / state
        beyond += term
    return full * beyond / (1.0 + full * (beyond - 1.0))


def choose(
    may_be: Sequence[tuple[float, float]],
    nodes: int,
    load: float,
    peakedness: float = 1.0,
    *,
    idle_hazard: float = 0.0,
    given: int | None = None,
    block_nodes: int = 0,
    at_most: int | None = None,
) -> SparePlan:
    """The spares that maximise paid goodput, beside the quantiles at the expected `load`.

    `may_be`: equally probable pairs of the job's goodput when it is never short, and the load; each choice is the mean over them.
    `at_most`: no more spares are tried.
    With `block_nodes` also the best number in each block, when spares cannot leave theirs. Raises ValueError for a load below 0.
    """

    def choice(spares: int) -> SpareChoice:
        return _choice(may_be, nodes, spares, lambda each: 1.0 - stall_share(spares, each, peakedness, idle_hazard))

    most = MOST_PER_NODE * nodes + LEAST_TRIED if at_most is None else at_most
    best = _best(choice, most)
    shown = max(1, min(most, max(2 * best.spares, negative_binomial_quantile(0.999, load, peakedness))))
    return SparePlan(
        mean_down=load,
        peakedness=peakedness,
        p99=negative_binomial_quantile(0.99, load, peakedness),
        p999=negative_binomial_quantile(0.999, load, peakedness),
        p99_poisson=poisson_quantile(0.99, load),
        p99_bursts=negative_binomial_quantile(0.99, load, max(peakedness, TRACE_PEAKEDNESS)),
        best=best,
        given=None if given is None else choice(given),
        curve=[choice(k) for k in sorted({round(i * shown / CURVE_POINTS) for i in range(CURVE_POINTS + 1)})],
        blocks=_in_blocks(may_be, nodes, peakedness, idle_hazard, block_nodes) if block_nodes else None,
    )


def _best(choice: Callable[[int], SpareChoice], most: int) -> SpareChoice:
    """The choice from 0 to `most` with the highest paid goodput.

    Waiting falls ever more slowly with each spare (Erlang's B is convex in the servers; Messerli, 1972), so goodput is concave in
    the spares and over a straight line has one maximum: bisection of the sign of its step finds it.
    """
    low, high = 0, most
    while low < high:
        middle = (low + high) // 2
        if choice(middle + 1).goodput_paid > choice(middle).goodput_paid:
            low = middle + 1
        else:
            high = middle
    return choice(low)


def _choice(
    may_be: Sequence[tuple[float, float]], nodes: int, spares: int, running: Callable[[float], float]
) -> SpareChoice:
    """`running`: share of time with enough nodes, at a load."""
    shares = [(goodput, running(load)) for goodput, load in may_be]
    of_job = math.fsum(goodput * share for goodput, share in shares) / len(shares)
    return SpareChoice(
        spares=spares,
        stall_share=1.0 - math.fsum(share for _, share in shares) / len(shares),
        goodput_job=of_job,
        goodput_paid=of_job * nodes / (nodes + spares),
    )


def _in_blocks(
    may_be: Sequence[tuple[float, float]], nodes: int, peakedness: float, idle_hazard: float, block_nodes: int
) -> Blocks:
    """Each block on its own: the job runs while none is short."""
    blocks = -(-nodes // block_nodes)

    def choice(each: int) -> SpareChoice:
        return _choice(
            may_be,
            nodes,
            each * blocks,
            lambda at: (1.0 - stall_share(each, at / blocks, peakedness, idle_hazard)) ** blocks,
        )

    best = _best(choice, MOST_PER_NODE * block_nodes + LEAST_TRIED)
    return Blocks(block_nodes=block_nodes, blocks=blocks, spares_per_block=best.spares // blocks, choice=best)
