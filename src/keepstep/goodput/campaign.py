"""What a campaign of so many days may come to: the spread of its goodput around the expectation.

Two things spread it: the failure rate is not known exactly (a Gamma posterior), and even at a known rate a campaign has more or
fewer failures at better or worse moments (a normal distribution, by `renewal.variance_rate_s`). The interval is the mixture's.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from functools import lru_cache
from statistics import NormalDist

import msgspec

from keepstep.goodput.job import Job
from keepstep.goodput.renewal import goodput, variance_rate_s
from keepstep.goodput.special import gamma_quantile

DAY_S = 86_400.0
POINTS = 41
"""Rates that stand for the posterior, at equal steps of probability."""
GIVEN_SHAPE = 6.0
"""Weight, in failures, of a rate that is only a number. Four published or measured rates of GPU fleets (6.50 and 2.34: Meta RSC-1
and RSC-2; 3.79: Llama 3; 4.23: InfiniteHBD-Trace; per 1000 node-days) have a standard deviation of 0.41 of their mean: a Gamma
distribution of shape 1 / 0.41^2 = 6 is as wide."""


class RateKnowledge(msgspec.Struct, frozen=True, kw_only=True):
    """A Gamma distribution of failures per node and day: as if `shape` failures had been seen in `node_days`."""

    shape: float
    node_days: float
    source: str
    dispersion: float = 1.0
    """Variance over mean of failure counts in the campaign to come."""

    @property
    def mean(self) -> float:
        """Failures per node and day."""
        return self.shape / self.node_days

    def quantile(self, p: float) -> float:
        """The rate that is not exceeded with probability p."""
        return gamma_quantile(p, self.shape) / self.node_days

    def grid(self, points: int = POINTS) -> tuple[float, ...]:
        """Rates at the middle of so many equal steps of probability."""
        return tuple(each / self.node_days for each in _unit_grid(self.shape, points))


@lru_cache(maxsize=64)
def _unit_grid(shape: float, points: int) -> tuple[float, ...]:
    return tuple(gamma_quantile((i + 0.5) / points, shape) for i in range(points))


def given_rate(per_node_day: float, source: str, dispersion: float = 1.0) -> RateKnowledge:
    """A rate that somebody gave without saying what it rests on (GIVEN_SHAPE)."""
    return RateKnowledge(
        shape=GIVEN_SHAPE, node_days=GIVEN_SHAPE / per_node_day, source=source, dispersion=max(1.0, dispersion)
    )


def at_rate(job: Job, per_node_day: float) -> Job:
    """The same job with another failure rate."""
    return msgspec.structs.replace(job, rate_per_node_day=per_node_day)


def goodput_interval(
    job: Job, rate: RateKnowledge, days: float, *, level: float = 0.9, running: Callable[[float], float] | None = None
) -> tuple[float, float]:
    """Within what the goodput of a campaign of so many days lies with probability `level`.

    `running`: share of time, at a rate, that the job has enough nodes (see `spares`); always if it is None.
    """
    campaign_s = days * DAY_S
    parts = []
    for each in rate.grid():
        there = at_rate(job, each)
        share = 1.0 if running is None else running(each)
        deviation = math.sqrt(max(0.0, variance_rate_s(there, rate.dispersion)) / campaign_s)
        parts.append((goodput(there) * share, max(deviation * share, 1e-12)))
    tail = (1.0 - level) / 2.0
    return _mixture_quantile(parts, tail), _mixture_quantile(parts, 1.0 - tail)


def _mixture_quantile(parts: Sequence[tuple[float, float]], p: float) -> float:
    normal = NormalDist()
    low = min(mean - 9.0 * deviation for mean, deviation in parts)
    high = max(mean + 9.0 * deviation for mean, deviation in parts)
    for _ in range(60):
        middle = (low + high) / 2.0
        if math.fsum(normal.cdf((middle - mean) / deviation) for mean, deviation in parts) / len(parts) < p:
            low = middle
        else:
            high = middle
    return min(1.0, max(0.0, (low + high) / 2.0))


def expected_over(rate: RateKnowledge, value: Callable[[float], float]) -> float:
    """Mean of `value` over the distribution of the rate."""
    grid = rate.grid()
    return math.fsum(value(each) for each in grid) / len(grid)
