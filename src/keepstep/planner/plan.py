"""`keepstep.plan/1`: what to expect of a job, what dominates, and what to change first, from closed forms alone."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import msgspec

from keepstep.goodput.campaign import RateKnowledge, at_rate, expected_over, goodput_interval
from keepstep.goodput.interval import GoodputForms, Intervals, intervals
from keepstep.goodput.job import Job
from keepstep.goodput.renewal import JobForecast, forecast, goodput
from keepstep.goodput.spares import SpareChoice, SparePlan, choose, mean_down, stall_share
from keepstep.planner.advice import Change, changes
from keepstep.planner.optimum import best_interval_s, best_job, with_interval
from keepstep.planner.sensitivity import Sensitivity, sensitivities

DAY_S = 86_400.0
RATES = 9
"""Failure rates over which the number of spares is chosen."""


class Circumstances(msgspec.Struct, frozen=True, kw_only=True):
    """What a plan needs beside the job."""

    rate: RateKnowledge
    days: float = 54.0
    price_usd: float | None = None
    """Per GPU and hour."""
    spares: int | None = None
    """None: as many as are best."""
    repair_s: float | None = None
    """Mean time to repair a node; None: unknown, spares are left out."""
    peakedness: float = 1.0
    idle_hazard: float = 0.0
    """Failure rate of nodes while the job waits, relative to that of nodes that train."""
    block_nodes: int = 0
    fixed_interval: bool = False
    goal: float | None = None
    """Goodput that is wanted; what it would take is said."""


class Lost(msgspec.Struct, frozen=True, kw_only=True):
    """Shares of wall-clock; with the exact goodput they add up to 1. What waiting for nodes takes is in `spares`."""

    checkpoint: float
    rework: float
    restart: float
    detection: float
    persist_lag: float
    straggler: float


class TierPlan(msgspec.Struct, frozen=True, kw_only=True):
    """How often to save to one tier: every `every`-th save of the tier before, every `interval_s` of training."""

    name: str
    every: int
    interval_s: float


class Expected(msgspec.Struct, frozen=True, kw_only=True):
    """What the campaign comes to, waiting for nodes included, with the spares that are given or recommended."""

    goodput: float
    """Mean over what the failure rate may be; `goodput.exact` of the plan is at its mean."""
    goodput_interval: tuple[float, float]
    paid_goodput: float
    """Spares in the denominator."""
    gpu_hours: float
    """Of the job, without spares."""
    lost_gpu_hours: float
    usd: float | None
    lost_usd: float | None
    usd_per_point: float | None
    """A hundredth of goodput over the campaign."""


class Crossover(msgspec.Struct, frozen=True, kw_only=True):
    """From how many GPUs on restarts cost more than saving and rework together, and than either of them: R > tau, R > tau / 2 with
    Young's tau (M below R^2 / 2d, R^2 / 8d). None where restarts or saves cost nothing."""

    restart_exceeds_both_gpus: int | None
    restart_is_largest_gpus: int | None


class Measurement(msgspec.Struct, frozen=True, kw_only=True):
    """What knowing one input exactly would be worth: the best interval for what is found, against the best for all of it."""

    input: str
    points: float
    usd: float | None
    why: str


class Goal(msgspec.Struct, frozen=True, kw_only=True):
    """What one input must come down to for the goal, the others as they are; None: not by this one alone."""

    goodput: float
    restart_s: float | None
    blocking_s: float | None
    failures_per_1000_node_days: float | None


class Plan(msgspec.Struct, frozen=True, kw_only=True):
    """`keepstep.plan/1`."""

    schema: str = "keepstep.plan/1"
    inputs: dict[str, Any]
    mttf_s: float
    mttf_interval_s: tuple[float, float]
    interval_s: Intervals
    """By every formula, for the first tier."""
    used_interval_s: float
    """The one that everything below is computed at: the given one, else the optimum."""
    optimal_interval_s: tuple[float, float]
    """The optimum at the ends of the rate's 90 % interval."""
    tiers: list[TierPlan]
    goodput: GoodputForms
    """Never short of nodes. `exact` is the one to believe."""
    goodput_interval: tuple[float, float]
    """Of `exact` in a campaign, 90 %."""
    lost: Lost
    dominant: str
    """The largest of `lost`, or "no_spare" when waiting for nodes takes more."""
    expected: Expected
    spares: SparePlan | None
    crossover: Crossover
    recommendation: list[Change]
    sensitivity: list[Sensitivity]
    measure: list[Measurement]
    goal: Goal | None = None


def make_plan(job: Job, around: Circumstances, inputs: dict[str, Any]) -> Plan:
    """Everything that closed forms say of `job`. `inputs` is stored as it is.

    The job's interval and the tiers' `every` are replaced by the best ones unless `around.fixed_interval`. Raises ConfigError.
    """
    job.check()
    given, job = job, planned_job(job, around)
    there = forecast(job)
    low, high = around.rate.quantile(0.05), around.rate.quantile(0.95)
    spares = _spares(job, around)
    expected = _expected(job, around, spares)
    tier = job.tiers[0]
    formulas = intervals(tier.block_s, job.mttf_s, tier.persist_lag_s)
    if len(job.tiers) > 1:
        formulas = msgspec.structs.replace(formulas, optimal=best_interval_s(job))
    lost = _lost(there)
    return Plan(
        inputs=inputs,
        mttf_s=job.mttf_s,
        mttf_interval_s=(at_rate(job, high).mttf_s, at_rate(job, low).mttf_s),
        interval_s=formulas,
        used_interval_s=job.interval_s,
        optimal_interval_s=(best_interval_s(at_rate(job, high)), best_interval_s(at_rate(job, low))),
        tiers=_tiers(job),
        goodput=GoodputForms(
            exact=there.exact,
            exact_restart_immune=there.exact_restart_immune,
            first_order=there.first_order,
            meta=there.meta,
        ),
        goodput_interval=goodput_interval(job, around.rate, around.days),
        lost=lost,
        dominant=_dominant(lost, spares),
        expected=expected,
        spares=spares,
        crossover=crossover(job),
        recommendation=changes(job, given, there.exact, around.fixed_interval, spares, expected.usd_per_point),
        sensitivity=sensitivities(job, around.rate, expected.usd_per_point),
        measure=_measurements(job, around, expected.usd_per_point),
        goal=None if around.goal is None else _goal(job, around),
    )


def _dominant(lost: Lost, spares: SparePlan | None) -> str:
    parts = msgspec.structs.asdict(lost)
    if spares is not None:
        parts["no_spare"] = (spares.given or spares.best).stall_share
    return max(parts.items(), key=lambda item: item[1])[0]


def planned_job(job: Job, around: Circumstances) -> Job:
    """The job at the mean of what is known of its rate, with the best intervals unless they are fixed."""
    job = at_rate(job, around.rate.mean)
    return job if around.fixed_interval else best_job(job)


def _lost(there: JobForecast) -> Lost:
    return Lost(**{name: getattr(there, name) for name in Lost.__struct_fields__})


def _tiers(job: Job) -> list[TierPlan]:
    return [
        TierPlan(name=tier.name, every=tier.every, interval_s=period * job.interval_s)
        for tier, period in zip(job.tiers, job.periods, strict=True)
    ]


def replaced_share(job: Job) -> float:
    """Share of failures that take a node out."""
    return math.fsum(kind.share for kind in job.kinds if kind.replace)


def _spares(job: Job, around: Circumstances) -> SparePlan | None:
    if around.repair_s is None:
        return None
    share, repair_s = replaced_share(job), around.repair_s
    # Few spares are cheap and a stall is not: the choice is over what the rate may be, not at its mean alone.
    may_be = [
        (goodput(at_rate(job, rate)), mean_down(job.nodes, rate, share, repair_s)) for rate in around.rate.grid(RATES)
    ]
    return choose(
        may_be,
        job.nodes,
        mean_down(job.nodes, job.rate_per_node_day, share, repair_s),
        around.peakedness,
        idle_hazard=around.idle_hazard,
        given=around.spares,
        block_nodes=around.block_nodes,
    )


def _expected(job: Job, around: Circumstances, spares: SparePlan | None) -> Expected:
    running: Callable[[float], float] | None = None
    chosen: SpareChoice | None = None
    count = around.spares or 0
    if spares is not None and around.repair_s is not None:
        chosen = spares.given or spares.best
        count, repair_s = chosen.spares, around.repair_s

        def running(rate: float) -> float:
            load = mean_down(job.nodes, rate, replaced_share(job), repair_s)
            return 1.0 - stall_share(count, load, around.peakedness, around.idle_hazard)

    hours = job.nodes * job.gpus_per_node * around.days * 24.0
    price = around.price_usd
    value = expected_over(around.rate, lambda r: goodput(at_rate(job, r))) if chosen is None else chosen.goodput_job
    return Expected(
        goodput=value,
        goodput_interval=goodput_interval(job, around.rate, around.days, running=running),
        paid_goodput=value * job.nodes / (job.nodes + count),
        gpu_hours=hours,
        lost_gpu_hours=hours * (1.0 - value),
        usd=None if price is None else hours * price,
        lost_usd=None if price is None else hours * price * (1.0 - value),
        usd_per_point=None if price is None else hours * price / 100.0,
    )


def crossover(job: Job) -> Crossover:
    """See Crossover."""
    restart_s, block_s = job.mean_restart_s(), job.tiers[0].block_s
    if restart_s <= 0.0 or block_s <= 0.0 or job.rate_per_node_day <= 0.0:
        return Crossover(restart_exceeds_both_gpus=None, restart_is_largest_gpus=None)
    both_s = restart_s**2 / (2.0 * block_s)
    per_gpu = job.rate_per_node_day / job.gpus_per_node / DAY_S
    return Crossover(
        restart_exceeds_both_gpus=math.ceil(1.0 / (per_gpu * both_s)),
        restart_is_largest_gpus=math.ceil(4.0**-1 / (per_gpu * both_s)),
    )


def _measurements(job: Job, around: Circumstances, usd_per_point: float | None) -> list[Measurement]:
    """Failure rate and blocking time move the interval; the length of a restart does not, but it moves the forecast."""

    def row(name: str, gain: float, why: str) -> Measurement:
        points = max(0.0, 100.0 * gain)
        return Measurement(
            input=name, points=points, usd=None if usd_per_point is None else points * usd_per_point, why=why
        )

    if around.fixed_interval or math.isinf(job.mttf_s):
        return []
    known = expected_over(around.rate, lambda r: goodput(_best_at(at_rate(job, r))))
    settled = expected_over(around.rate, lambda r: goodput(at_rate(job, r)))
    rows = [row("failure_rate", known - settled, "the interval that is best at the rate, against one for all rates")]
    factors = [2.0 ** ((i - 4) / 4.0) for i in range(9)]
    blocking = [_scaled_blocking(job, f) for f in factors]
    gain = math.fsum(goodput(_best_at(j)) - goodput(j) for j in blocking) / len(blocking)
    rows.append(
        row("delta", gain, "if it is only known within a factor of 2: the interval that is best for what it is")
    )
    rows.append(row("restart", 0.0, "it does not move the interval; measure it to know the goodput and what to build"))
    return rows


def _best_at(job: Job) -> Job:
    return with_interval(job, best_interval_s(job))


def _scaled_blocking(job: Job, factor: float) -> Job:
    tiers = tuple(msgspec.structs.replace(tier, block_s=tier.block_s * factor) for tier in job.tiers)
    return msgspec.structs.replace(job, tiers=tiers)


def _goal(job: Job, around: Circumstances) -> Goal:
    """Bisection of each input between nothing and what it is."""
    goal = around.goal or 0.0

    def largest(change: Callable[[float], Job]) -> float | None:
        """The largest factor up to 1 that reaches the goal."""

        def reaches(factor: float) -> bool:
            tried = change(factor)
            return goodput(tried if around.fixed_interval else _best_at(tried)) >= goal

        if reaches(1.0):
            return 1.0
        if not reaches(1e-9):
            return None
        low, high = 1e-9, 1.0
        for _ in range(40):
            middle = (low + high) / 2.0
            low, high = (middle, high) if reaches(middle) else (low, middle)
        return low

    def restarts(factor: float) -> Job:
        kinds = tuple(msgspec.structs.replace(k, detect_s=k.detect_s * factor) for k in job.kinds)
        tiers = tuple(msgspec.structs.replace(t, load_s=t.load_s * factor) for t in job.tiers)
        phases = {name: value * factor for name, value in msgspec.structs.asdict(job.restart).items()}
        return msgspec.structs.replace(job, kinds=kinds, tiers=tiers, restart=type(job.restart)(**phases))

    def times(factor: float | None, value: float) -> float | None:
        return None if factor is None else factor * value

    return Goal(
        goodput=goal,
        restart_s=times(largest(restarts), job.mean_restart_s()),
        blocking_s=times(largest(lambda f: _scaled_blocking(job, f)), job.tiers[0].block_s),
        failures_per_1000_node_days=times(
            largest(lambda f: at_rate(job, job.rate_per_node_day * f)), 1000.0 * job.rate_per_node_day
        ),
    )
