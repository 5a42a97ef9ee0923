"""Scenarios for the tests of the simulation, and how they are simulated there."""

from __future__ import annotations

import random
from typing import Any

import msgspec

from keepstep.goodput.job import FailureKind, Job, RestartPhases, Tier
from keepstep.planner.scenario import DAY_S, Repair, Scenario, TraceFault
from keepstep.planner.sim.campaign import Results, simulate_runs

HOUR_S = 3600.0


def simple(
    *,
    nodes: int = 64,
    rate: float = 0.05,
    interval_s: float = 600.0,
    block_s: float = 20.0,
    lag_s: float = 0.0,
    restart_s: float = 120.0,
    replace: bool = False,
    **scenario: Any,
) -> Scenario:
    """One tier and one kind of failure."""
    job = Job(
        nodes=nodes,
        rate_per_node_day=rate,
        interval_s=interval_s,
        tiers=(Tier(name="disk", block_s=block_s, persist_lag_s=lag_s),),
        kinds=(FailureKind(name="failure", share=1.0, replace=replace),),
        restart=RestartPhases(start_s=restart_s),
    )
    return Scenario(job=job, **scenario)


def traced(scenario: Scenario, faults: tuple[TraceFault, ...], trace_days: float, **changes: Any) -> Scenario:
    """The scenario with a trace instead of a rate."""
    return msgspec.structs.replace(scenario, process="trace", trace=faults, trace_days=trace_days, **changes)


def results(scenario: Scenario, runs: int = 64, seed: int = 1, engine: str = "numpy", **how: Any) -> Results:
    """Runs of it on one core."""
    return simulate_runs(scenario, runs, seed, engine, **{"jobs": 1, **how})  # type: ignore[arg-type]


def any_scenario(seed: int) -> Scenario:
    """A scenario in which anything may be switched on; the same seed gives the same."""
    rng = random.Random(seed)

    def maybe(value: Any, otherwise: Any, chance: float = 0.4) -> Any:
        return value if rng.random() < chance else otherwise

    block_nodes = rng.choice([0, 4, 8])
    blocks = rng.randint(2, 6)
    nodes = blocks * (block_nodes or 5)
    in_block = block_nodes > 0 and rng.random() < 0.5
    spares = blocks * rng.randint(0, 2) if in_block else rng.randint(0, 8)
    tiers = tuple(
        Tier(
            name=f"tier{i}",
            every=1 if i == 0 else rng.choice([1, 2, 3, 7]),
            block_s=rng.choice([0.0, 3.0, 45.5, 200.0]),
            persist_lag_s=maybe(rng.uniform(0, 3000), 0.0),
            load_s=rng.choice([0.0, 12.25, 300.0]),
        )
        for i in range(rng.randint(1, 3))
    )
    shares = [rng.random() for _ in range(rng.randint(1, 4))]
    kinds = tuple(
        FailureKind(
            name=f"kind{i}",
            share=share / sum(shares),
            detect_s=rng.choice([0.0, 30.0, 600.0]),
            tier=rng.randrange(len(tiers)),
            replace=rng.random() < 0.6,
            persists=maybe(rng.random(), 0.0),
        )
        for i, share in enumerate(shares)
    )
    job = Job(
        nodes=nodes,
        rate_per_node_day=rng.choice([0.0, 0.05, 0.5, 2.0]),
        interval_s=rng.choice([60.0, 333.3, 1800.0, 10_000.0]),
        tiers=tiers,
        kinds=kinds,
        restart=RestartPhases(
            decide_s=rng.choice([0.0, 20.0]), replace_s=maybe(90.0, 0.0), start_s=rng.choice([0.0, 240.0])
        ),
        straggler_share=maybe(0.08, 0.0),
    )
    process = rng.choice(["exponential", "exponential", "weibull", "trace"])
    trace_days = rng.choice([2.5, 9.0])
    faults = tuple(
        TraceFault(
            t_s=rng.uniform(0, trace_days * DAY_S),
            node=rng.randrange(nodes + spares),
            down_s=rng.choice([0.0, 600.0, 50_000.0]),
            kind=rng.randrange(len(kinds)),
        )
        for _ in range(60)
    )
    lemons = process != "trace" and rng.random() < 0.4
    return Scenario(
        job=job,
        days=rng.choice([0.4, 3.0, 10.7]),
        spares=spares,
        spares_in="block" if in_block else "pool",
        block_nodes=block_nodes,
        process=process,  # type: ignore[arg-type]
        weibull_shape=rng.choice([0.5, 0.8, 1.5]),
        trace=faults if process == "trace" else (),
        trace_days=trace_days if process == "trace" else 0.0,
        dispersion=maybe(5.0, 1.0) if process != "trace" else 1.0,
        lemon_share=0.1 if lemons else 0.0,
        lemon_factor=6.0 if lemons else 1.0,
        burst_per_day=maybe(0.5, 0.0),
        burst_nodes=rng.randint(1, 4),
        burst_tier=maybe(0, None),
        startup_failure=maybe(0.3, 0.0),
        restart_exposed=rng.random() < 0.6,
        idle_hazard=rng.choice([0.0, 0.3, 1.0]),
        repair=Repair(
            mean_s=rng.choice([0.0, 2000.0, 40_000.0]),
            sigma=maybe(1.2, 0.0),
            bad_return=maybe(0.4, 0.0),
            refault_mean_s=rng.choice([500.0, 20_000.0]),
            gate_s=maybe(900.0, 0.0),
            gate_catch=maybe(0.6, 0.0),
        ),
        false_alarms_per_day=maybe(1.0, 0.0),
        false_alarm_tier=rng.randrange(len(tiers)),
        extra_evictions=maybe(2, 0),
        verify_s=rng.choice([0.0, 9000.0]),
        retire_after=maybe(3, 0),
        retire_s=100_000.0,
    )
