"""The best interval to every tier: what maximises the exact goodput of a job."""

from __future__ import annotations

import math

import msgspec

from keepstep.goodput.interval import optimal_s
from keepstep.goodput.job import Job
from keepstep.goodput.renewal import goodput

LEAST_S = 1.0
MOST_S = 30 * 86_400.0
"""Bounds of an interval: a job that never fails need not save."""
_GOLDEN = (math.sqrt(5.0) - 1.0) / 2.0
MOST_SAVES = 4096
"""Of a tier for one of the next."""


def with_interval(job: Job, interval_s: float) -> Job:
    """The same job, saving so often."""
    return msgspec.structs.replace(job, interval_s=interval_s)


def best_interval_s(job: Job) -> float:
    """Training between two saves to the first tier that is best with the job's other settings."""
    if math.isinf(job.mttf_s):
        return MOST_S
    if len(job.tiers) == 1:
        tier = job.tiers[0]
        return min(MOST_S, max(LEAST_S, optimal_s(tier.block_s, job.mttf_s, tier.persist_lag_s)))
    low, high = math.log(LEAST_S), math.log(MOST_S)
    # Golden section: the goodput has one maximum in the interval.
    a, b = high - _GOLDEN * (high - low), low + _GOLDEN * (high - low)
    at_a, at_b = (goodput(with_interval(job, math.exp(x))) for x in (a, b))
    while high - low > 1e-4:
        if at_a >= at_b:
            high, b, at_b = b, a, at_a
            a = high - _GOLDEN * (high - low)
            at_a = goodput(with_interval(job, math.exp(a)))
        else:
            low, a, at_a = a, b, at_b
            b = low + _GOLDEN * (high - low)
            at_b = goodput(with_interval(job, math.exp(b)))
    return math.exp((low + high) / 2.0)


def best_job(job: Job, *, fixed_interval: bool = False) -> Job:
    """The job with the best interval to every tier, one setting after the other until none gets better.

    `fixed_interval`: that to the first tier stays.
    """
    best = job if fixed_interval else with_interval(job, best_interval_s(job))
    value = goodput(best)
    for _ in range(20):
        before = value
        for index in range(1, len(job.tiers)):
            best, value = _best_every(best, index, value)
        if not fixed_interval:
            tried = with_interval(best, best_interval_s(best))
            if goodput(tried) > value:
                best, value = tried, goodput(tried)
        if value <= before + 1e-7:
            break
    return best


def _best_every(job: Job, index: int, value: float) -> tuple[Job, float]:
    """The best `every` of one tier: double or halve, then ever smaller steps."""
    best, step = job, max(1, job.tiers[index].every // 2)
    while step:
        now = best.tiers[index].every
        better = False
        for every in (now + step, now - step):
            if not 1 <= every <= MOST_SAVES:
                continue
            tier = msgspec.structs.replace(best.tiers[index], every=every)
            tried = msgspec.structs.replace(best, tiers=(*best.tiers[:index], tier, *best.tiers[index + 1 :]))
            there = goodput(tried)
            if there > value + 1e-12:
                best, value, better = tried, there, True
                break
        step = step * 2 if better else step // 2
    return best, value
