"""How long nodes stay away, how many are away at once, and the spares that takes: of a failure trace, pure."""

from __future__ import annotations

import math
import statistics
from collections.abc import Sequence

import msgspec

from keepstep.goodput.spares import poisson_quantile
from keepstep.planner.traces import DAY_S, FaultTrace
from keepstep.planner.tracestats import away

LEVELS = (0.5, 0.9, 0.95, 0.99, 0.999)


class RepairTail(msgspec.Struct, frozen=True, kw_only=True):
    """How long faults lasted, those alone that ended within the trace."""

    repairs: int
    mean_s: float
    median_s: float
    p90_s: float
    p99_s: float
    log_sigma: float
    """Standard deviation of the logarithm of times above 0: the sigma of a lognormal distribution. The mean of such a
    distribution is its median times exp(sigma^2 / 2)."""


class NodesDown(msgspec.Struct, frozen=True, kw_only=True):
    """How many nodes were away at once, weighted by time, from the trace's begin to its end."""

    mean: float
    variance: float
    share_s: tuple[float, ...]
    """Share of the time with exactly 0, 1, 2 ... nodes away."""

    @property
    def peakedness(self) -> float:
        """Variance over mean: 1 for independent faults, whatever the repair times (an M/G/infinity queue)."""
        return self.variance / self.mean if self.mean > 0.0 else math.nan

    def quantile(self, level: float) -> int:
        """The smallest number of nodes that was not exceeded for this share of the time."""
        below = 0.0
        for count, share in enumerate(self.share_s):
            below += share
            if below >= level - 1e-12:
                return count
        return len(self.share_s) - 1


class Spares(msgspec.Struct, frozen=True, kw_only=True):
    """Spares that would have been enough for a share of the time: as it was, and if faults had been independent."""

    level: float
    measured: int
    poisson: int
    peaked: float
    """Estimate from mean and peakedness z alone: mean + quantile of the normal distribution * sqrt(mean z)."""

    @property
    def ratio(self) -> float:
        """By how much Poisson is too small."""
        return self.measured / self.poisson if self.poisson else math.nan


def quantile(values: Sequence[float], level: float) -> float:
    """Quantile of a sample by linear interpolation between its order statistics. Raises ValueError when it is empty."""
    ordered = sorted(values)
    if not ordered:
        raise ValueError("quantile: no values")
    place = level * (len(ordered) - 1)
    below = math.floor(place)
    above = min(below + 1, len(ordered) - 1)
    return ordered[below] + (place - below) * (ordered[above] - ordered[below])


def repair_tail(trace: FaultTrace, cause: str | None = None) -> RepairTail:
    """Length of the faults, of one cause or of all. Each fault is one repair, even where two of a node overlap.

    Raises ValueError when fewer than two ended above 0.
    """
    chosen = [f.down_s for f in trace.faults if f.returned and cause in (None, f.cause)]
    logs = [math.log(time_s) for time_s in chosen if time_s > 0.0]
    if len(logs) < 2:
        raise ValueError(f"repair_tail: {len(logs)} repairs that took time")
    return RepairTail(
        repairs=len(chosen),
        mean_s=statistics.fmean(chosen),
        median_s=quantile(chosen, 0.5),
        p90_s=quantile(chosen, 0.9),
        p99_s=quantile(chosen, 0.99),
        log_sigma=statistics.stdev(logs),
    )


def nodes_down(trace: FaultTrace) -> NodesDown:
    """Nodes away over time; a node with two faults at once is away once."""
    changes: list[tuple[float, int]] = []
    for spans in away(trace).values():
        for begin_s, end_s, _ in spans:
            if end_s > begin_s:
                changes += [(begin_s, 1), (end_s, -1)]
    changes.sort()
    length_s = trace.days * DAY_S
    lasting = [0.0]
    now, before_s = 0, 0.0
    for at_s, change in [*changes, (length_s, 0)]:
        lasting[now] += at_s - before_s
        now, before_s = now + change, at_s
        if now == len(lasting):
            lasting.append(0.0)
    shares = [time_s / length_s for time_s in lasting]
    mean = math.fsum(k * share for k, share in enumerate(shares))
    variance = math.fsum((k - mean) ** 2 * share for k, share in enumerate(shares))
    return NodesDown(mean=mean, variance=variance, share_s=tuple(shares))


def spares_needed(down: NodesDown, level: float = 0.99) -> Spares:
    """Spares that cover the nodes away for `level` of the time."""
    return Spares(
        level=level,
        measured=down.quantile(level),
        poisson=poisson_quantile(level, down.mean),
        peaked=down.mean + statistics.NormalDist().inv_cdf(level) * math.sqrt(down.variance),
    )
