"""Closed forms of tiers, kinds, spread and spares beside simulated campaigns: two programs that share no formula."""

from __future__ import annotations

import math

import msgspec
import numpy as np
import pytest

from keepstep.goodput.campaign import RateKnowledge, goodput_interval
from keepstep.goodput.job import FailureKind, Job, RestartPhases, Tier
from keepstep.goodput.renewal import forecast
from keepstep.goodput.spares import mean_down, stall_share
from keepstep.planner.scenario import DAY_S, Repair, Scenario
from keepstep.planner.sim.campaign import simulate
from keepstep.planner.sim.model import LEDGER

JOB = Job(
    nodes=2048,
    rate_per_node_day=6.5e-3,
    interval_s=240.0,
    tiers=(
        Tier(name="memory", block_s=5.0, load_s=5.0),
        Tier(name="disk", every=5, block_s=8.0, persist_lag_s=60.0, load_s=60.0),
    ),
    kinds=(
        FailureKind(name="process", share=0.5, detect_s=5.0),
        FailureKind(name="hang", share=0.2, detect_s=300.0),
        FailureKind(name="node", share=0.3, tier=1, replace=True),
    ),
    restart=RestartPhases(decide_s=5.0, replace_s=20.0, start_s=60.0),
)


def test_two_tiers_and_three_kinds() -> None:
    found = simulate(Scenario(job=JOB, days=54.0, spares=60), 300, 3, jobs=1)
    there = forecast(JOB)
    assert there.exact == pytest.approx(found.goodput.mean, abs=4.0 * found.goodput.standard_error)
    days = 54.0 * DAY_S
    assert there.detection == pytest.approx(found.ledger_s["detection"] / days, rel=0.03)
    assert there.restart == pytest.approx(
        sum(found.ledger_s[name] for name in ("restart", "decision", "replacement")) / days, rel=0.03
    )
    # Blocking of intervals that were lost is part of rework here and of the simulation's checkpoint time.
    saving = (found.ledger_s["checkpoint"] + found.ledger_s["rollback"]) / days
    assert there.checkpoint + there.rework + there.persist_lag == pytest.approx(saving, rel=0.03)
    assert set(LEDGER) >= {"detection", "restart", "rollback"}


@pytest.mark.parametrize("restart_s", [120.0, 900.0])
def test_the_spread_of_campaigns(restart_s: float) -> None:
    tier = Tier(name="disk", block_s=10.0)
    job = msgspec.structs.replace(
        JOB, interval_s=354.0, tiers=(tier,), kinds=(FailureKind(name="all", share=1.0),), restart=RestartPhases(start_s=restart_s)
    )  # fmt: skip
    found = simulate(Scenario(job=job, days=54.0), 600, 5, jobs=1)
    sure = RateKnowledge(shape=1e7, node_days=1e7 / 6.5e-3, source="")
    low, high = goodput_interval(job, sure, 54.0)
    assert (low, high) == pytest.approx((found.goodput.p5, found.goodput.p95), abs=0.15 * (high - low))


def test_dispersed_failures_spread_campaigns_as_forecast() -> None:
    job = msgspec.structs.replace(
        JOB, interval_s=354.0, tiers=(Tier(name="d", block_s=10.0),), kinds=(FailureKind(name="a", share=1.0),)
    )
    found = simulate(Scenario(job=job, days=56.0, dispersion=6.0), 600, 5, jobs=1)
    sure = RateKnowledge(shape=1e7, node_days=1e7 / 6.5e-3, source="", dispersion=6.0)
    low, high = goodput_interval(job, sure, 56.0)
    assert high - low == pytest.approx(found.goodput.p95 - found.goodput.p5, rel=0.15)


@pytest.mark.parametrize("idle_hazard", [0.0, 1.0])
@pytest.mark.parametrize(("spares", "sigma"), [(6, 0.0), (10, 1.0), (14, 1.0)])
def test_waiting_for_nodes(spares: int, sigma: float, idle_hazard: float) -> None:
    """Erlang's loss system, whatever the distribution of repairs; with faults of waiting nodes the chain goes on."""
    job = Job(
        nodes=2048,
        rate_per_node_day=4e-3,
        interval_s=354.0,
        tiers=(Tier(name="disk", block_s=10.0),),
        kinds=(FailureKind(name="node", share=1.0, replace=True),),
    )
    repair = Repair(mean_s=DAY_S, sigma=sigma)
    found = simulate(
        Scenario(job=job, days=120.0, spares=spares, repair=repair, idle_hazard=idle_hazard), 60, 7, jobs=1
    )
    load = mean_down(2048, 4e-3, 1.0, DAY_S)
    waits = found.ledger_s["no_spare"] / (120.0 * DAY_S)
    # Campaigns begin with all nodes good, and idle spares fail too where waiting nodes do: a few hundredths of the share.
    assert stall_share(spares, load, idle_hazard=idle_hazard) == pytest.approx(waits, rel=0.12, abs=0.002)


def test_more_spares_never_hurt_the_job_and_cost_what_is_paid() -> None:
    goods = []
    for spares in (0, 4, 8, 16, 32):
        found = simulate(Scenario(job=JOB, days=30.0, spares=spares), 100, 11, jobs=1)
        goods.append((found.goodput.mean, found.paid.mean))
        assert found.paid.mean == pytest.approx(found.goodput.mean * 2048 / (2048 + spares))
    job, paid = np.array(goods).T
    assert (np.diff(job) > -3.0 * 1e-3).all()
    assert paid[-1] < paid.max()
    assert math.isfinite(float(job.sum()))
