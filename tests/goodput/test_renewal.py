"""Goodput of jobs with tiers and kinds of failures: against the one-tier form, a simulation written apart, and properties."""

from __future__ import annotations

import math
import random

import msgspec
import pytest
from hypothesis import assume, given
from hypothesis import strategies as st

from keepstep.goodput.interval import exact, exact_restart_immune, first_order, meta, optimal_s, young_s
from keepstep.goodput.job import FailureKind, Job, RestartPhases, Tier
from keepstep.goodput.renewal import forecast, goodput, outage, variance_rate_s
from keepstep.records.errors import ConfigError

DAY_S = 86_400.0
TWO_TIERS = Job(
    nodes=2048,
    rate_per_node_day=6.5e-3,
    interval_s=240.0,
    tiers=(
        Tier(name="memory", block_s=8.0, load_s=5.0),
        Tier(name="disk", every=4, block_s=6.0, persist_lag_s=90.0, load_s=60.0),
    ),
    kinds=(
        FailureKind(name="software", share=0.5, detect_s=10.0),
        FailureKind(name="hang", share=0.2, detect_s=600.0),
        FailureKind(name="node", share=0.3, tier=1, replace=True),
    ),
    restart=RestartPhases(decide_s=5.0, replace_s=40.0, start_s=60.0),
)


def one_tier(nodes: int, block_s: float, restart_s: float, lag_s: float = 0.0, interval_s: float | None = None) -> Job:
    mttf_s = DAY_S / (6.5e-3 * nodes)
    return Job(
        nodes=nodes,
        rate_per_node_day=6.5e-3,
        interval_s=interval_s or max(young_s(block_s, mttf_s), lag_s),
        tiers=(Tier(name="disk", block_s=block_s, persist_lag_s=lag_s),),
        restart=RestartPhases(start_s=restart_s),
    )


def simulated(job: Job, failures: int, seed: int) -> float:
    """Failure by failure, in plain Python: another program than the formulas and than planner.sim."""
    rng = random.Random(seed)
    rate = job.rate_per_node_day * job.nodes / DAY_S
    periods = [math.prod(t.every for t in job.tiers[: i + 1]) for i in range(len(job.tiers))]
    shares = [kind.share for kind in job.kinds]
    wall_s, base, durable = 0.0, 0, [0] * len(job.tiers)
    for _ in range(failures):
        life_s = rng.expovariate(rate)
        clock_s, count, saved = 0.0, base, list(durable)
        while True:  # interval after interval until the failure
            extra_s = sum(t.block_s for t, p in zip(job.tiers, periods, strict=True) if (count + 1) % p == 0)
            clock_s += job.interval_s + extra_s
            if clock_s > life_s:
                break
            count += 1
            for index, (tier, period) in enumerate(zip(job.tiers, periods, strict=True)):
                if count % period == 0 and clock_s + tier.persist_lag_s <= life_s:
                    saved[index] = count
        wall_s += life_s
        need = 0
        while True:  # restarts until one goes through
            kind = rng.choices(job.kinds, shares)[0]
            need = max(need, kind.tier)
            restart_s = job.restart_s(kind) - job.tiers[kind.tier].load_s + job.tiers[need].load_s
            next_s = rng.expovariate(rate)
            wall_s += min(restart_s, next_s)
            if next_s > restart_s:
                break
        base = max(saved[need:])
        durable = [base if index <= need else min(saved[index], base) for index in range(len(job.tiers))]
    return base * job.interval_s / wall_s


@pytest.mark.parametrize("nodes", [128, 512, 2048])
@pytest.mark.parametrize("block_s", [10.0, 300.0])
@pytest.mark.parametrize(("restart_s", "lag_s"), [(120.0, 0.0), (900.0, 0.0), (120.0, 60.0)])
def test_one_tier_and_kind_is_the_closed_form(nodes: int, block_s: float, restart_s: float, lag_s: float) -> None:
    job = one_tier(nodes, block_s, restart_s, lag_s)
    at = (job.interval_s, block_s, job.mttf_s, restart_s, lag_s)
    there = forecast(job)
    assert there.exact == pytest.approx(exact(*at), rel=1e-12)
    assert there.exact_restart_immune == pytest.approx(exact_restart_immune(*at), rel=1e-12)
    assert there.first_order == pytest.approx(first_order(*at), rel=1e-12)
    assert there.meta == pytest.approx(meta(*at), rel=1e-12)


@pytest.mark.parametrize("every", [1, 4])
@pytest.mark.parametrize("lag_s", [0.0, 90.0])
def test_two_tiers_against_simulation(every: int, lag_s: float) -> None:
    tiers = (TWO_TIERS.tiers[0], msgspec.structs.replace(TWO_TIERS.tiers[1], every=every, persist_lag_s=lag_s))
    job = msgspec.structs.replace(TWO_TIERS, tiers=tiers)
    values = [simulated(job, 4000, seed) for seed in range(8)]
    mean = math.fsum(values) / len(values)
    error = math.sqrt(math.fsum((v - mean) ** 2 for v in values) / (len(values) - 1) / len(values))
    assert goodput(job) == pytest.approx(mean, abs=4.0 * error)


def test_three_tiers_against_simulation() -> None:
    far = Tier(name="object", every=3, block_s=4.0, load_s=200.0)
    kinds = (
        *TWO_TIERS.kinds[:2],
        FailureKind(name="node", share=0.2, tier=1),
        FailureKind(name="rack", share=0.1, tier=2),
    )
    near = msgspec.structs.replace(TWO_TIERS.tiers[1], persist_lag_s=0.0)
    job = msgspec.structs.replace(TWO_TIERS, tiers=(TWO_TIERS.tiers[0], near, far), kinds=kinds)
    values = [simulated(job, 4000, seed) for seed in range(8)]
    mean = math.fsum(values) / len(values)
    error = math.sqrt(math.fsum((v - mean) ** 2 for v in values) / (len(values) - 1) / len(values))
    assert goodput(job) == pytest.approx(mean, abs=4.0 * error)


def test_hangs_cost_what_was_computed_for_them() -> None:
    """30 % of failures noticed after 600, 300 and 60 s, 16,384 GPUs, d = 10 s, R = 2 min: 0.904, 0.916, 0.926."""
    for limit_s, shown in ((600.0, 0.904), (300.0, 0.916), (60.0, 0.926)):
        kinds = (FailureKind(name="crash", share=0.7), FailureKind(name="hang", share=0.3, detect_s=limit_s))
        job = msgspec.structs.replace(one_tier(2048, 10.0, 120.0), kinds=kinds)
        assert goodput(job) == pytest.approx(shown, abs=0.0012)


def test_the_spread_of_a_campaign() -> None:
    """5 % and 95 % of campaigns of 54 days by Monte Carlo (4,000 runs a cell), 16,384 GPUs at Young's interval."""
    for block_s, restart_s, low, high in (
        (10.0, 120.0, 0.925, 0.931),
        (10.0, 900.0, 0.814, 0.831),
        (300.0, 120.0, 0.701, 0.722),
        (300.0, 900.0, 0.617, 0.645),
    ):
        job = one_tier(2048, block_s, restart_s)
        deviation = math.sqrt(variance_rate_s(job) / (54 * DAY_S))
        assert goodput(job) - 1.645 * deviation == pytest.approx(low, abs=0.001)
        assert goodput(job) + 1.645 * deviation == pytest.approx(high, abs=0.001)


def test_the_outage_of_one_kind_by_hand() -> None:
    job = one_tier(2048, 10.0, 900.0)
    gone = outage(job, 1.0 / job.mttf_s)
    assert gone.mean_s == pytest.approx(job.mttf_s * math.expm1(900.0 / job.mttf_s))
    assert gone.tiers == pytest.approx((1.0,))


def test_without_failures_only_saving_costs() -> None:
    job = msgspec.structs.replace(TWO_TIERS, rate_per_node_day=0.0)
    there = forecast(job)
    assert there.exact == pytest.approx(960.0 / (960.0 + 4 * 8.0 + 6.0))
    assert there.rework == pytest.approx(0.0, abs=1e-12)
    assert there.restart == there.detection == there.persist_lag == 0.0


@st.composite
def jobs(draw: st.DrawFn) -> Job:
    """Jobs whose tiers are durable before the next save falls due, from 8 to 131,072 GPUs."""
    times = st.floats(0.0, 600.0)
    interval_s = draw(st.floats(30.0, 20_000.0))
    count = draw(st.integers(1, 3))
    lags = sorted(draw(st.lists(st.floats(0.0, 1.0), min_size=count, max_size=count)))
    tiers = tuple(
        Tier(
            name=f"t{i}",
            every=1 if i == 0 else draw(st.integers(1, 12)),
            block_s=draw(st.floats(0.01, 300.0)),
            persist_lag_s=lags[i] * interval_s,
            load_s=draw(times),
        )
        for i in range(count)
    )
    parts = draw(st.lists(st.floats(0.05, 1.0), min_size=1, max_size=4))
    kinds = tuple(
        FailureKind(
            name=f"k{i}",
            share=part / math.fsum(parts),
            detect_s=draw(times),
            tier=draw(st.integers(0, count - 1)),
            replace=draw(st.booleans()),
        )
        for i, part in enumerate(parts)
    )
    phases = RestartPhases(decide_s=draw(times), replace_s=draw(times), start_s=draw(times))
    return Job(
        nodes=draw(st.sampled_from([1, 128, 2048, 16_384])),
        rate_per_node_day=draw(st.floats(1e-4, 3e-2)),
        interval_s=interval_s,
        tiers=tiers,
        kinds=kinds,
        restart=phases,
        straggler_share=draw(st.floats(0.0, 0.3)),
    )


@given(jobs())
def test_the_shares_add_up(job: Job) -> None:
    there = forecast(job)
    lost = (there.checkpoint, there.rework, there.persist_lag, there.detection, there.restart, there.straggler)
    assert there.exact + math.fsum(lost) == pytest.approx(1.0, abs=1e-9)
    assert min(there.exact, *lost) >= -1e-9
    if len({job.restart_s(kind) for kind in job.kinds}) == 1 and len(job.tiers) == 1:
        # Otherwise a failure may cut a long wait short, such as a crash the wait for a hang to be noticed.
        assert there.exact <= there.exact_restart_immune + 1e-9


@given(jobs(), st.floats(1.01, 10.0))
def test_more_failures_never_help(job: Job, factor: float) -> None:
    worse = msgspec.structs.replace(job, rate_per_node_day=job.rate_per_node_day * factor)
    assert goodput(worse) <= goodput(job) + 1e-9


@given(jobs(), st.floats(0.0, 0.99))
def test_shorter_times_never_hurt(job: Job, factor: float) -> None:
    quick = tuple(msgspec.structs.replace(t, block_s=t.block_s * factor) for t in job.tiers)
    assert goodput(msgspec.structs.replace(job, tiers=quick)) >= goodput(job) - 1e-9
    kinds = tuple(msgspec.structs.replace(k, detect_s=k.detect_s * factor) for k in job.kinds)
    assert goodput(msgspec.structs.replace(job, kinds=kinds)) >= goodput(job) - 1e-9


@given(st.floats(1.0, 3e5), st.floats(1e-6, 1e-2), st.floats(0.0, 0.1))
def test_first_order_agrees_within_its_range(mttf_s: float, d: float, r: float) -> None:
    assume((d <= 1e-3 and r <= 0.1) or (d <= 1e-2 and r <= 0.02))
    rate = DAY_S / mttf_s
    job = Job(
        nodes=1,
        rate_per_node_day=rate,
        interval_s=optimal_s(d * mttf_s, mttf_s),
        tiers=(Tier(name="disk", block_s=d * mttf_s),),
        restart=RestartPhases(start_s=r * mttf_s),
    )
    there = forecast(job)
    assert abs(there.first_order - there.exact) <= 0.0105  # one point, and what rounding of the published range leaves


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"nodes": 0}, "nodes 0"),
        ({"interval_s": 0.0}, "interval_s 0"),
        ({"rate_per_node_day": math.nan}, "rate_per_node_day nan"),
        ({"straggler_share": 1.0}, "straggler_share 1"),
        ({"tiers": ()}, "tiers"),
        ({"tiers": (Tier(name="a", every=2),)}, "every"),
        ({"tiers": (Tier(name="a", load_s=-1.0),)}, "tier a"),
        ({"kinds": (FailureKind(name="x", share=0.5),)}, "add up to 1"),
        ({"kinds": (FailureKind(name="x", share=1.0, tier=3),)}, "failure x: tier 3"),
        ({"restart": RestartPhases(start_s=-1.0)}, r"restart\.start_s -1"),
    ],
)
def test_a_job_that_makes_no_sense_is_refused(change: dict[str, object], words: str) -> None:
    with pytest.raises(ConfigError, match=words):
        forecast(msgspec.structs.replace(TWO_TIERS, **change))
