"""Expected goodput of a job with kinds of failures, phases of restarts and tiers of checkpoints, by the renewal of its lives.

Failures are a Poisson process of rate 1/M. Three steps, each exact:

1. An *outage* begins with a failure that interrupts training and ends when training goes on. Failures within it begin the restart
   anew, with the detection of their own kind, and need the farthest of the tiers that were asked for. Its mean length D and the
   probability of each tier at its end do not depend on where training was: so wall-clock is training time times 1 + D/M.
2. In training time alone, failures that need tier m are a Poisson process of rate p_m / M. Traversing the intervals between two
   saves to tier i, with failures up to i that go back to its begin, has a Laplace transform that follows from tier i - 1's:
   G_i(s) = (s + r) H(s + r) / (s + r H(s + r)) with rate r of failures of tier i and H the product over what lies within.
3. What one stretch between two failures that need the last tier leaves behind is a geometric sum over its saves.

With one tier and one kind the result is `interval.exact`. Persist lags: exact for one tier; with several, a save to the last tier
that a failure overtakes counts as lost, whose effect on the time to the next save is left out, and lags of nearer tiers take
e^(-rate lag) each. `tests/planner` compares with simulation.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence

import msgspec

from keepstep.goodput.interval import first_order, meta
from keepstep.goodput.job import Job

DAY_S = 86_400.0
NEVER = 1e-12
"""Failures in one period of the last tier; below this none is expected, and the geometric sum would divide 0 by 0."""

HOPELESS = 1e-100
"""A restart that is never reached: its outage is longer than anything, and still a number."""


class Outage(msgspec.Struct, frozen=True):
    """Means of one outage, in seconds, and how it ends."""

    mean_s: float
    second_moment_s2: float
    detect_s: float
    """Part of `mean_s` before a failure was known."""
    tiers: tuple[float, ...]
    """Probability that training goes on from each tier."""


class JobForecast(msgspec.Struct, frozen=True, kw_only=True):
    """Expected shares of wall-clock of a job that is never short of nodes. `exact` and the losses add up to 1."""

    exact: float
    exact_restart_immune: float
    first_order: float
    meta: float
    checkpoint: float
    """Blocking of saves whose work lasted."""
    rework: float
    """Work that was lost since the last save, with the saves within it; without what the persist lag adds."""
    persist_lag: float
    """What rework grows by because saves are durable late."""
    detection: float
    restart: float
    straggler: float
    restarts_per_day: float


def outage(job: Job, rate_per_s: float) -> Outage:
    """What follows a failure that interrupts training, when failures hit restarts too. `rate_per_s`: of the whole job."""
    levels = len(job.tiers)
    ends: list[Outage] = [Outage(0.0, 0.0, 0.0, ())] * levels
    # From the farthest tier down: a failure within a restart never needs a nearer one.
    for need in range(levels - 1, -2, -1):
        found = _after_failure(job, rate_per_s, need, ends)
        if need >= 0:
            ends[need] = found
    return found


def _after_failure(job: Job, rate_per_s: float, need: int, later: Sequence[Outage]) -> Outage:
    """The rest of an outage after a failure while tier `need` was needed (-1: while training). `later`: of farther tiers."""
    levels = len(job.tiers)
    stay = 0.0  # probability that no other failure comes in the same state; summed, since 1 minus the rest would lose its digits
    mean = second = detect = 0.0
    cross = 0.0  # time before another failure in the same state
    tiers = [0.0] * levels
    for kind in job.kinds:
        tier = max(need, kind.tier)
        restart_s = job.restart_s(kind) - job.tiers[kind.tier].load_s + job.tiers[tier].load_s
        done, failed_s, failed_s2 = _attempt(restart_s, rate_per_s)
        mean += kind.share * (restart_s * done + failed_s)
        second += kind.share * (restart_s**2 * done + failed_s2)
        known, known_s, _ = _attempt(kind.detect_s, rate_per_s)
        detect += kind.share * (kind.detect_s * known + known_s)
        tiers[tier] += kind.share * done
        if tier == need:
            stay += kind.share * done
            cross += kind.share * failed_s
        else:
            stay += kind.share
            rest = later[tier]
            mean += kind.share * (1.0 - done) * rest.mean_s
            second += kind.share * ((1.0 - done) * rest.second_moment_s2 + 2.0 * failed_s * rest.mean_s)
            detect += kind.share * (1.0 - done) * rest.detect_s
            for index, share in enumerate(rest.tiers):
                tiers[index] += kind.share * (1.0 - done) * share
    stay = max(stay, HOPELESS)
    mean /= stay
    return Outage(
        mean_s=mean,
        second_moment_s2=(second + 2.0 * cross * mean) / stay,
        detect_s=detect / stay,
        tiers=tuple(share / stay for share in tiers),
    )


def _attempt(length_s: float, rate_per_s: float) -> tuple[float, float, float]:
    """An attempt of `length_s`: probability that no failure hits it; mean and mean square of the time until one that does,
    over all attempts (0 where none does)."""
    x = rate_per_s * length_s
    done = math.exp(-x)
    if rate_per_s <= 0.0:
        return 1.0, 0.0, 0.0
    if x < 1e-3:  # the differences below would lose their digits
        return done, length_s * x * (0.5 - x / 3.0 + x * x / 8.0), length_s**2 * x * (1 / 3 - x / 4.0 + x * x / 10.0)
    return done, (1.0 - done * (1.0 + x)) / rate_per_s, (2.0 - done * (2.0 + 2.0 * x + x * x)) / rate_per_s**2


def kept_share(job: Job, rates_per_s: Sequence[float], *, lags: bool = True) -> float:
    """Share of training time that becomes lasting work; failures that need tier i come at `rates_per_s[i]` in training time."""
    tau_s, top = job.interval_s, len(job.tiers) - 1
    periods = job.periods
    # One save in flight to each tier: where saves are durable later than the next is due, training waits.
    base_s = tau_s + job.tiers[0].block_s
    if lags:
        for tier, period in zip(job.tiers, periods, strict=True):
            base_s = max(base_s, tier.persist_lag_s / period + job.tiers[0].block_s)
    rate_top = rates_per_s[top]
    missed = _missed(job, rates_per_s, top, rate_top, base_s)
    within = 1.0 - missed
    work_s = periods[top] * tau_s
    if within <= 0.0:
        return 0.0
    if rate_top * work_s < NEVER:
        kept = work_s / _mean_s(job, rates_per_s, top, base_s)
    else:
        lag_s = job.tiers[top].persist_lag_s if lags else 0.0
        total = math.fsum(rates_per_s)
        durable = math.exp(-total * lag_s)
        late = within * (math.exp(-rate_top * lag_s) - durable)
        # A life leaves its last durable save behind: each boundary is reached with one factor more, and counts when it or a later
        # one before the end becomes durable.
        kept = rate_top * work_s * durable / (1.0 - late) * within / missed
    for index in range(top):
        if lags:
            # Where a farther tier gets every save too and has it sooner, its copy counts.
            same = [t.persist_lag_s for t, p in zip(job.tiers, periods, strict=True) if p == periods[index]]
            kept *= math.exp(-rates_per_s[index] * min(same))
    return kept


def _missed(
    job: Job, rates_per_s: Sequence[float], level: int, s_per_s: float, base_s: float, extra_s: float = 0.0
) -> float:
    """1 - E[exp(-s Y)], Y the training time to pass all intervals up to the next save to tier `level`, nearer failures included.

    Failures of `level` itself are not in it: they are what ends the stretch, or what the caller adds. `extra_s`: by so much the
    last interval is longer, for saves to farther tiers. The difference from 1 is what is computed throughout, since for rare
    failures the rest would lose its digits.
    """
    if level == 0:
        return -math.expm1(-s_per_s * (base_s + extra_s))
    tier, inner = job.tiers[level], level - 1

    def passed(extra: float) -> float:
        """With failures of the tier below, which go back to its last save: 1 - (s + r) H / (s + r H)."""
        rate = rates_per_s[inner]
        missed = _missed(job, rates_per_s, inner, s_per_s + rate, base_s, extra)
        if rate == 0.0:
            return missed
        whole = s_per_s + rate * (1.0 - missed)
        return s_per_s * missed / whole if whole > 0.0 else 1.0

    last = passed(tier.block_s + extra_s)
    if tier.every == 1 or last >= 1.0:
        return last
    first = passed(0.0)
    return 1.0 if first >= 1.0 else -math.expm1((tier.every - 1) * math.log1p(-first) + math.log1p(-last))


def _mean_s(job: Job, rates_per_s: Sequence[float], level: int, base_s: float, extra_s: float = 0.0) -> float:
    """Mean of the Y of `_missed`; infinite where no interval is ever passed."""
    if level == 0:
        return base_s + extra_s
    tier, inner = job.tiers[level], level - 1

    def passed(extra: float) -> float:
        rate = rates_per_s[inner]
        if rate == 0.0:
            return _mean_s(job, rates_per_s, inner, base_s, extra)
        missed = _missed(job, rates_per_s, inner, rate, base_s, extra)
        return missed / (rate * (1.0 - missed)) if missed < 1.0 else math.inf

    last = passed(tier.block_s + extra_s)
    return last if tier.every == 1 else (tier.every - 1) * passed(0.0) + last


def goodput(job: Job, *, exposed: bool = True) -> float:
    """Expected share of wall-clock that becomes lasting training of a job that is never short of nodes, stragglers taken off.

    `exposed`: failures hit restarts too. Raises ConfigError for a job that makes no sense.
    """
    rate = job.rate_per_node_day * job.nodes / DAY_S
    if exposed:
        gone = outage(job, rate)
        away, tiers = gone.mean_s, gone.tiers
    else:
        away = job.mean_restart_s()
        tiers = _shares(job)
    kept = kept_share(job, [rate * p for p in tiers])
    return kept * (1.0 - job.straggler_share) / (1.0 + rate * away)


def _shares(job: Job) -> tuple[float, ...]:
    shares = [0.0] * len(job.tiers)
    for kind in job.kinds:
        shares[kind.tier] += kind.share
    return tuple(shares)


def forecast(job: Job) -> JobForecast:
    """All forms of the goodput, and where the rest goes. Raises ConfigError for a job that makes no sense."""
    job.check()
    rate = job.rate_per_node_day * job.nodes / DAY_S
    gone = outage(job, rate)
    training = 1.0 / (1.0 + rate * gone.mean_s)
    rates = [rate * p for p in gone.tiers]
    kept = training * kept_share(job, rates)
    without_lag = training * kept_share(job, rates, lags=False)
    period = job.periods[-1]
    count_of = zip(job.tiers, job.periods, strict=True)
    block_s = math.fsum(tier.block_s * (period / each) for tier, each in count_of)
    checkpoint = kept * block_s / (period * job.interval_s)
    lag = max(0.0, without_lag - kept) * (1.0 + block_s / (period * job.interval_s))
    useful = kept * (1.0 - job.straggler_share)
    detection = training * rate * gone.detect_s
    return JobForecast(
        exact=useful,
        exact_restart_immune=goodput(job, exposed=False),
        first_order=_by_sums(job, first_order),
        meta=_by_sums(job, meta),
        checkpoint=checkpoint,
        rework=training - kept - checkpoint - lag,
        persist_lag=lag,
        detection=detection,
        restart=1.0 - training - detection,
        straggler=kept * job.straggler_share,
        restarts_per_day=training * rate * DAY_S,
    )


def _by_sums(job: Job, form: Callable[..., float]) -> float:
    """The older forms know one tier: each kind of failure is given interval, blocking time and lag of the tier that it needs."""
    tau_s = job.interval_s
    if math.isinf(job.mttf_s):
        return goodput(job)
    if len(job.tiers) == 1:
        tier = job.tiers[0]
        value = form(tau_s, tier.block_s, job.mttf_s, job.mean_restart_s(), tier.persist_lag_s)
        return value * (1.0 - job.straggler_share)
    rework = math.fsum(
        kind.share * (job.periods[kind.tier] * tau_s / 2.0 + job.restart_s(kind) + job.tiers[kind.tier].persist_lag_s)
        for kind in job.kinds
    )
    saving = math.fsum(t.block_s / (p * tau_s) for t, p in zip(job.tiers, job.periods, strict=True))
    alive = 1.0 - rework / job.mttf_s
    value = alive - saving if form is first_order else alive / (1.0 + saving)
    return value * (1.0 - job.straggler_share)


def variance_rate_s(job: Job, dispersion: float = 1.0) -> float:
    """Variance of a campaign's goodput times its length in seconds: over T seconds the standard deviation is sqrt(this / T).

    One tier: the central limit theorem of renewal rewards, E[(kept - g length)^2] / E[length] over lives. Several: a Poisson sum
    of losses, half a period of the tier that is needed and the restart, taken in training time. `dispersion` (variance over mean of
    failure counts) adds the square of the goodput's slope in the rate.
    """
    rate = job.rate_per_node_day * job.nodes / DAY_S
    if rate <= 0.0:
        return 0.0
    base = _variance_one_tier(job, rate) if len(job.tiers) == 1 else _variance_of_sums(job, rate)
    more = msgspec.structs.replace(job, rate_per_node_day=job.rate_per_node_day * 1.01)
    less = msgspec.structs.replace(job, rate_per_node_day=job.rate_per_node_day * 0.99)
    slope_s = (goodput(more) - goodput(less)) / (0.02 * rate)
    return base * (1.0 - job.straggler_share) ** 2 + (dispersion - 1.0) * slope_s**2 * rate


def _variance_one_tier(job: Job, rate: float) -> float:
    tier = job.tiers[0]
    gone = outage(job, rate)
    period_s = max(job.interval_s, tier.persist_lag_s) + tier.block_s
    first_s = job.interval_s + tier.block_s + tier.persist_lag_s
    r, q = math.exp(-rate * first_s), math.exp(-rate * period_s)
    mean = r / (1.0 - q)
    square = r * (1.0 + q) / (1.0 - q) ** 2
    with_life = (first_s + 1.0 / rate) * r / (1.0 - q) + period_s * r * q / (1.0 - q) ** 2
    tau_s = job.interval_s
    life_s = 1.0 / rate + gone.mean_s
    g = tau_s * mean / life_s
    var_kept = tau_s**2 * (square - mean**2)
    covariance = tau_s * (with_life - mean / rate)
    var_away = gone.second_moment_s2 - gone.mean_s**2
    return (var_kept + g**2 / rate**2 - 2.0 * g * covariance + g**2 * var_away) / life_s


def _variance_of_sums(job: Job, rate: float) -> float:
    g = goodput(job)
    total = 0.0
    for kind in job.kinds:
        span_s = job.periods[kind.tier] * (job.interval_s + job.tiers[0].block_s)
        mean_s = span_s / 2.0 + job.tiers[kind.tier].persist_lag_s + job.restart_s(kind)
        total += kind.share * (mean_s**2 + span_s**2 / 12.0)
    return rate * total * g**2
