"""`simulate`: many runs of a scenario on all cores, and what they come to.

The result of a run depends on the seed and on its index alone: not on the engine, on the cores, or on how many others there are.
"""

from __future__ import annotations

import importlib.util
import math
import os
import time
from collections.abc import Callable, Iterator
from concurrent.futures import Executor, ProcessPoolExecutor, ThreadPoolExecutor, as_completed
from multiprocessing import get_context
from typing import Literal, NamedTuple

import msgspec
import numpy as np

from keepstep.planner.scenario import Scenario
from keepstep.planner.sim import lockstep
from keepstep.planner.sim.model import (
    EXHAUSTED,
    EXTRA_KINDS,
    FAILURES,
    IDLE_FAULTS,
    INTERRUPTIONS,
    LEDGER,
    MOST_DOWN,
    NO_SPARE,
    PRODUCTIVE,
    STRAGGLER,
    Floats,
    Ints,
    blank_outcome,
    model_of,
    nodes_down,
    worst_day,
)
from keepstep.planner.sim.nodepolicy import NodePolicy, built_in
from keepstep.planner.sim.tape import BLOCK_RUNS, draw, expected_events, join
from keepstep.records.errors import ConfigError

Engine = Literal["auto", "numpy", "numba"]

EVENTS_OF_BATCH = 1_000_000
"""Events that a batch of the numpy engine has at most, which bounds its memory; a mark of an event takes 64 bytes."""
MOST_EVENTS = 200_000
"""Events of one run. A block of runs is drawn at once, and takes some hundred bytes for each event of each of its runs."""
BLOCKS_OF_BATCH = {"numpy": 16, "numba": 2}
"""Blocks of runs at most; many runs side by side are what makes numpy fast, the compiled engine gains nothing from them."""
WORTH_PROCESSES_S = 4.0
"""Work left that is worth the start of other processes, which takes about a second."""
WORTH_COMPILING = 2_000_000
"""Events in all that are worth the other engine: it loads for half a second, and compiles for six when it never did; numpy plays
these in about a second and a half. Which one it is shows in nothing but time."""
CLOSES_WITHIN = 1e-9


class Spread(msgspec.Struct, frozen=True, kw_only=True):
    """A figure over all runs."""

    mean: float
    standard_error: float
    p5: float
    p50: float
    p95: float


class SpareUse(msgspec.Struct, frozen=True, kw_only=True):
    """How far the spares went. Nodes that are away are counted at each full hour of each run."""

    exhausted_events: float
    """Restarts of a run that waited for a node, mean."""
    wait_s: float
    """How long a run waited for nodes in all, mean."""
    down_mean: float
    down_p50: int
    down_p95: int
    down_p99: int
    down_p999: int
    most_down: int
    """At any time of any run."""


class WorstDay(msgspec.Struct, frozen=True, kw_only=True):
    """Progress on the worst whole day of a run, as a share of the day; below 0 where it lost more than it gained."""

    mean: float
    p5: float


class Money(msgspec.Struct, frozen=True, kw_only=True):
    """What a run's lost time and its spares cost, in dollars, mean."""

    price_per_gpu_hour: float
    lost_usd: float
    spares_usd: float


class Campaign(msgspec.Struct, frozen=True, kw_only=True):
    """All runs of a scenario; means are over runs."""

    schema: str = "keepstep.simulation/1"
    at: dict[str, str] = {}
    """Where on the grid of a sweep this is: what was set to what."""
    days: float
    nodes: int
    gpus: int
    spares: int
    interval_s: float
    goodput: Spread
    """Share of wall-clock that became lasting training at full speed."""
    paid: Spread
    """The same with the spares in the denominator."""
    ledger_s: dict[str, float]
    """Seconds of a run by what they went into, mean; they add up to the length of the campaign."""
    interruptions: Spread
    failures: dict[str, float]
    """Of a run by kind, those during restarts among them, mean."""
    idle_faults: float
    spare_use: SpareUse
    worst_day: WorstDay
    money: Money | None = None
    engine: str
    runs: int
    seed: int
    wall_s: float
    runs_per_s: float


class Results(NamedTuple):
    """Runs in order of their index, a row or an entry each."""

    ledger_s: Floats
    counts: Ints
    worst_day: Floats
    down_hours: Ints
    """Over all runs: full hours at which so many nodes were away."""

    def goodput(self, scenario: Scenario) -> Floats:
        """Of each run."""
        goodput: Floats = self.ledger_s[:, PRODUCTIVE] / (scenario.days * 86_400.0)
        return goodput


class _Work(NamedTuple):
    scenario: Scenario
    seed: int
    first_block: int
    blocks: int
    runs: int
    engine: str
    policy: NodePolicy | None


def simulate(
    scenario: Scenario,
    runs: int = 1000,
    seed: int = 0,
    engine: Engine = "auto",
    jobs: int | None = None,
    progress: Callable[[int], None] | None = None,
    policy: NodePolicy | None = None,
) -> Campaign:
    """Simulate so many runs and sum them up.

    `jobs`: cores to use; None: all that help. `progress` is called with the number of runs that are done. `policy` decides what to
    do with nodes at fault instead of the scenario. The numpy engine starts processes when the work is worth it: a script that
    calls this needs the usual `if __name__ == "__main__"`. Raises ConfigError where the scenario makes no sense, or the engine is
    not there.
    """
    begin = time.perf_counter()
    scenario.check()
    engine = pick_engine(engine, policy, runs * expected_events(scenario))
    results = simulate_runs(scenario, runs, seed, engine, jobs, progress, policy)
    return sum_up(scenario, results, engine=engine, seed=seed, wall_s=time.perf_counter() - begin)


def pick_engine(engine: str, policy: NodePolicy | None = None, events: float = math.inf) -> Literal["numpy", "numba"]:
    """The engine to use for so many events of all runs together. Raises ConfigError where it cannot be had."""
    if engine not in ("auto", "numpy", "numba"):
        raise ConfigError(f"engine {engine}: auto, numpy or numba")
    there = importlib.util.find_spec("numba") is not None
    if engine == "numba" and policy is not None:
        raise ConfigError("engine numba: a policy of one's own needs the engine numpy")
    if engine == "numba" and not there:
        raise ConfigError("engine numba: numba is not installed: pip install 'keepstep[fast]'")
    worth = engine == "numba" or events >= WORTH_COMPILING
    return "numba" if engine != "numpy" and there and worth and policy is None else "numpy"


def simulate_runs(
    scenario: Scenario,
    runs: int,
    seed: int,
    engine: Literal["numpy", "numba"],
    jobs: int | None = None,
    progress: Callable[[int], None] | None = None,
    policy: NodePolicy | None = None,
) -> Results:
    """The runs one by one; arguments and errors as of `simulate`, with the engine picked."""
    scenario.check()
    for name, value, least in (("runs", runs, 1), ("seed", seed, 0), ("jobs", 1 if jobs is None else jobs, 1)):
        if value < least:
            raise ConfigError(f"{name} {value}: at least {least}")
    events = expected_events(scenario)
    if events > MOST_EVENTS:
        raise ConfigError(
            f"days {scenario.days:g}: {events:.3g} faults in each run, at most {MOST_EVENTS:,}; shorten it"
        )
    works = _works(scenario, runs, seed, engine, jobs, policy)
    parts: dict[int, Results] = {}
    done = 0
    for work, part in _done(works, engine, jobs):
        parts[work.first_block] = part
        done += work.runs
        if progress is not None:
            progress(done)
    ordered = [parts[key] for key in sorted(parts)]
    width = max(len(part.down_hours) for part in ordered)
    hours = [np.pad(part.down_hours, (0, width - len(part.down_hours))) for part in ordered]
    rows = [np.concatenate([part[i] for part in ordered]) for i in range(3)]
    return Results(rows[0], rows[1], rows[2], np.sum(hours, axis=0))


def _works(
    scenario: Scenario, runs: int, seed: int, engine: str, jobs: int | None, policy: NodePolicy | None
) -> list[_Work]:
    """Batches of whole blocks, so few runs in each that all cores have one."""
    blocks = -(-runs // BLOCK_RUNS)
    fit = int(EVENTS_OF_BATCH / (BLOCK_RUNS * (1.0 + expected_events(scenario))))
    size = max(1, min(BLOCKS_OF_BATCH[engine], fit, -(-blocks // (jobs or 1))))
    works = []
    for first in range(0, blocks, size):
        inside = min(runs - first * BLOCK_RUNS, size * BLOCK_RUNS)
        works.append(_Work(scenario, seed, first, min(size, blocks - first), inside, engine, policy))
    return works


def _done(works: list[_Work], engine: str, jobs: int | None) -> Iterator[tuple[_Work, Results]]:
    """Results as they come. The first batch is simulated here: it compiles what is to be compiled, and says how long one takes."""
    begin = time.perf_counter()
    if jobs is None or jobs == 1 or len(works) == 1 or engine == "numba":
        yield works[0], _simulate_batch(works[0])
        works = works[1:]
    left_s = (time.perf_counter() - begin) * len(works)
    workers = min(len(os.sched_getaffinity(0)) if jobs is None else jobs, len(works))
    if workers <= 1 or (jobs is None and engine == "numpy" and left_s < WORTH_PROCESSES_S):
        for work in works:
            yield work, _simulate_batch(work)
        return
    pool: Executor
    spawn = get_context("spawn")
    pool = ThreadPoolExecutor(workers) if engine == "numba" else ProcessPoolExecutor(workers, mp_context=spawn)
    try:
        futures = {pool.submit(_simulate_batch, work): work for work in works}
        for future in as_completed(futures):
            yield futures[future], future.result()
    finally:
        pool.shutdown(cancel_futures=True)


def _simulate_batch(work: _Work) -> Results:
    scenario = work.scenario
    model = model_of(scenario)
    tape = join([draw(scenario, work.seed, work.first_block + i) for i in range(work.blocks)], work.runs)
    out = blank_outcome(model, work.runs)
    if work.engine == "numba":
        from keepstep.planner.sim import compiled

        compiled.run(model, tape, out)
    else:
        lockstep.run(model, tape, out, work.policy or built_in(scenario))
    off = np.abs(out.ledger_s.sum(axis=1) / model.horizon_s - 1.0).max()
    if not off <= CLOSES_WITHIN:
        raise RuntimeError(
            f"the ledger of a simulated run is off by {off:.3g} of its time; please report this scenario"
        )
    slow = out.ledger_s[:, PRODUCTIVE] * scenario.job.straggler_share
    out.ledger_s[:, PRODUCTIVE] -= slow
    out.ledger_s[:, STRAGGLER] += slow
    worst = worst_day(out, model)
    if scenario.days >= 1.0:
        worst = worst * (1.0 - scenario.job.straggler_share)
    return Results(out.ledger_s, out.counts, worst, nodes_down(out))


# ---- summing up


def sum_up(scenario: Scenario, results: Results, *, engine: str, seed: int, wall_s: float) -> Campaign:
    """The record of a campaign from its runs."""
    job, runs = scenario.job, len(results.ledger_s)
    goodput = results.goodput(scenario)
    counts = results.counts.mean(axis=0)
    names = [*(k.name for k in job.kinds), *EXTRA_KINDS]
    ledger_s = results.ledger_s.mean(axis=0)
    down = results.down_hours
    return Campaign(
        days=float(scenario.days),
        nodes=job.nodes,
        gpus=job.nodes * job.gpus_per_node,
        spares=scenario.spares,
        interval_s=float(job.interval_s),
        goodput=spread(goodput),
        paid=spread(goodput * (job.nodes / (job.nodes + scenario.spares))),
        ledger_s={name: float(ledger_s[i]) for i, name in enumerate(LEDGER)},
        interruptions=spread(results.counts[:, INTERRUPTIONS]),
        failures={name: float(counts[FAILURES + i]) for i, name in enumerate(names)},
        idle_faults=float(counts[IDLE_FAULTS]),
        spare_use=SpareUse(
            exhausted_events=float(counts[EXHAUSTED]),
            wait_s=float(ledger_s[NO_SPARE]),
            down_mean=float(np.average(np.arange(len(down)), weights=down)),
            down_p50=_quantile(down, 0.5),
            down_p95=_quantile(down, 0.95),
            down_p99=_quantile(down, 0.99),
            down_p999=_quantile(down, 0.999),
            most_down=int(results.counts[:, MOST_DOWN].max()),
        ),
        worst_day=WorstDay(mean=float(results.worst_day.mean()), p5=float(np.quantile(results.worst_day, 0.05))),
        engine=engine,
        runs=runs,
        seed=seed,
        wall_s=wall_s,
        runs_per_s=runs / wall_s,
    )


def spread(values: Floats | Ints) -> Spread:
    """Mean, its standard error (0 for one value) and quantiles."""
    p5, p50, p95 = (float(q) for q in np.quantile(values, (0.05, 0.5, 0.95)))
    error = float(np.std(values, ddof=1) / np.sqrt(len(values))) if len(values) > 1 else 0.0
    return Spread(mean=float(np.mean(values)), standard_error=error, p5=p5, p50=p50, p95=p95)


def with_price(campaign: Campaign, price_per_gpu_hour: float) -> Campaign:
    """The record with what the lost time and the spares cost at this price, in dollars per GPU and hour."""
    hours = campaign.days * 24.0
    gpus_per_node = campaign.gpus // campaign.nodes
    money = Money(
        price_per_gpu_hour=price_per_gpu_hour,
        lost_usd=(1.0 - campaign.goodput.mean) * hours * campaign.gpus * price_per_gpu_hour,
        spares_usd=campaign.spares * gpus_per_node * hours * price_per_gpu_hour,
    )
    return msgspec.structs.replace(campaign, money=money)


def _quantile(histogram: Ints, share: float) -> int:
    """The smallest number that is not exceeded in this share of the hours."""
    return int(np.searchsorted(np.cumsum(histogram), share * histogram.sum()))
