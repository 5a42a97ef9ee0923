"""A scenario as both engines read it: arrays and numbers, and the arithmetic of saves that has no randomness in it."""

from __future__ import annotations

from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from keepstep.planner.scenario import DAY_S, Scenario

Floats = npt.NDArray[np.float64]
Ints = npt.NDArray[np.int64]
Bools = npt.NDArray[np.bool_]

LEDGER = (
    *("productive", "straggler", "checkpoint", "rollback", "detection", "decision"),
    *("replacement", "no_spare", "restart", "false_positive"),
)
"""Buckets of a run's time, in the order of the columns below."""
# The compiled engine has these numbers, and those of `tape`, built in, and its cache does not notice when they change: a change
# here needs one in the file of the engine.
PRODUCTIVE, STRAGGLER, CHECKPOINT, ROLLBACK, DETECTION, DECISION, REPLACEMENT, NO_SPARE, RESTART, FALSE_POSITIVE = (
    range(10)
)

BURST, STARTUP, FALSE_ALARM = 0, 1, 2
"""What interrupts a job besides the kinds of failures; their index is the number of kinds plus this."""
EXTRA_KINDS = ("burst", "startup", "false_alarm")

HOUR_S = 3600.0


PERIOD, STEP_S, SUPER_S, WAIT_S, LAG_S, LOAD_S = range(6)
"""Of a tier. A save of a count that is a multiple of the period goes to it. Step: what one save to it adds, blocking and waiting.
Super: from one save to it to the next, without what tiers further away add. Wait: the part of the step for which the save before
is still in flight; not for the first save of a life."""

DETECT_S, TIER, REPLACE, PERSISTS = range(4)
"""Of a kind; EXTRA_KINDS come after the job's."""

BLOCK, NEAR_FIRST, NEAR_COUNT, NEAR_PLACE = range(4)
"""Of a node: its block, and the group of its neighbours: first node, how many, place of this one."""


class Model(NamedTuple):
    """What both engines need of a scenario. Few arrays with many rows: the compiled engine passes them on at a price each."""

    horizon_s: float
    interval_s: float
    tiers: Floats
    """A row for each of the names below, a column for each tier."""
    kinds: int
    of_kind: Floats
    """A row for each of the names below, a column for each kind."""
    # restart
    decide_s: float
    replace_s: float
    start_s: float
    exposed: bool
    startups: bool
    # nodes
    nodes: int
    total: int
    by_block: bool
    block_nodes: int
    """Nodes that the job needs of each block; all of them where spares are a pool."""
    block_spares: int
    places: Ints
    """A row for each of the names below, a column for each node."""
    idle_hazard: float
    refaults: bool
    retire_after: int
    retire_s: float
    verify_s: float
    evictions: int
    burst_nodes: int


def model_of(scenario: Scenario) -> Model:
    """The scenario for the engines. It must have passed its check."""
    job, total = scenario.job, scenario.job.nodes + scenario.spares
    last = len(job.tiers) - 1
    burst_tier = last if scenario.burst_tier is None else scenario.burst_tier
    blocks = job.nodes // scenario.block_nodes if scenario.spares_in == "block" else 1
    return Model(
        horizon_s=scenario.days * DAY_S,
        interval_s=float(job.interval_s),
        tiers=_tiers_of(scenario),
        kinds=len(job.kinds),
        of_kind=np.array(
            [
                [*(k.detect_s for k in job.kinds), 0.0, 0.0, 0.0],
                [*(k.tier for k in job.kinds), burst_tier, 0, scenario.false_alarm_tier],
                [*(k.replace for k in job.kinds), True, False, True],
                [*(k.persists for k in job.kinds), 0.0, 0.0, 0.0],
            ]
        ),
        decide_s=float(job.restart.decide_s),
        replace_s=float(job.restart.replace_s),
        start_s=float(job.restart.start_s),
        exposed=scenario.restart_exposed,
        startups=scenario.startup_failure > 0.0,
        nodes=job.nodes,
        total=total,
        by_block=blocks > 1,
        block_nodes=job.nodes // blocks,
        block_spares=scenario.spares // blocks,
        places=_places_of(scenario, blocks),
        idle_hazard=float(scenario.idle_hazard),
        refaults=scenario.repair.bad_return > 0.0 or any(k.persists > 0.0 for k in job.kinds),
        retire_after=scenario.retire_after,
        retire_s=float(scenario.retire_s),
        verify_s=float(scenario.verify_s),
        evictions=scenario.extra_evictions,
        burst_nodes=scenario.burst_nodes,
    )


def _tiers_of(scenario: Scenario) -> Floats:
    tiers, interval_s = scenario.job.tiers, scenario.job.interval_s
    period = np.array(scenario.job.periods, dtype=np.int64)
    wait_s, super_s = np.zeros(len(tiers)), np.zeros(len(tiers))
    for i, tier in enumerate(tiers):
        inner = period[i] / period[:i]
        blocks = np.array([t.block_s for t in tiers[:i]])
        # From the end of one save to this tier to the begin of the next; the nearer tiers' saves in between pause training too.
        between_s = period[i] * interval_s + float(np.sum(wait_s[:i] * inner + blocks * (inner - 1.0)))
        wait_s[i] = max(0.0, tier.persist_lag_s - between_s)
        super_s[i] = between_s + float(np.sum(blocks)) + wait_s[i] + tier.block_s
    steps_s = np.array([t.block_s for t in tiers]) + wait_s
    lags_s, loads_s = [t.persist_lag_s for t in tiers], [t.load_s for t in tiers]
    return np.array([period, steps_s, super_s, wait_s, lags_s, loads_s])


def _places_of(scenario: Scenario, blocks: int) -> Ints:
    """Block of each node, and the group whose next node is taken out along with it. Spares come after the job's nodes."""
    nodes, spares, size = scenario.job.nodes, scenario.spares, scenario.block_nodes
    index = np.arange(nodes + spares)
    block_of = np.zeros(nodes + spares, dtype=np.int64)
    first, count = np.zeros_like(block_of), np.full_like(block_of, nodes + spares)
    if size:
        first[:nodes], count[:nodes] = index[:nodes] // size * size, size
        first[nodes:], count[nodes:] = nodes, max(1, spares)
    place = index - first
    if blocks > 1:
        block_of[:nodes] = index[:nodes] // size
        block_of[nodes:] = np.arange(spares) // max(1, spares // blocks)
        first[nodes:], count[nodes:], place[nodes:] = block_of[nodes:] * size, size, 0
    return np.array([block_of, first, count, place])


class Outcome(NamedTuple):
    """What happened, a row per run. Both engines fill it; `progress` and `hours` are differences, summed up below."""

    ledger_s: Floats
    counts: Ints
    """Columns as below, then failures by kind, those during a restart among them, EXTRA_KINDS last."""
    progress: Floats
    """By run, SLOPE or LEVEL, and day: progress at the end of day d is the sum of slopes times its time plus the sum of levels,
    both up to d."""
    hours: npt.NDArray[np.int32]
    """Change of the number of nodes that are away, at each full hour."""


INTERRUPTIONS, IDLE_FAULTS, EXHAUSTED, MOST_DOWN, FAILURES = range(5)
"""Times that training stopped; faults of nodes that did not train; restarts that waited for a node; most nodes away at once."""
SLOPE, LEVEL = range(2)


def blank_outcome(model: Model, runs: int) -> Outcome:
    """Zeros for so many runs."""
    days, hours = int(model.horizon_s // DAY_S), int(model.horizon_s // HOUR_S)
    return Outcome(
        ledger_s=np.zeros((runs, len(LEDGER))),
        counts=np.zeros((runs, FAILURES + model.kinds + len(EXTRA_KINDS)), dtype=np.int64),
        progress=np.zeros((runs, 2, days + 3)),
        hours=np.zeros((runs, hours + 2), dtype=np.int32),
    )


def worst_day(outcome: Outcome, model: Model) -> Floats:
    """Share of its worst whole day by which each run got on, below 0 where it lost more than it did; all of a shorter campaign."""
    days = int(model.horizon_s // DAY_S)
    if days == 0:
        return outcome.ledger_s[:, PRODUCTIVE] / model.horizon_s
    ends_s = np.arange(days + 1) * DAY_S
    slope = np.cumsum(outcome.progress[:, SLOPE, : days + 1], axis=1)
    level = np.cumsum(outcome.progress[:, LEVEL, : days + 1], axis=1)
    worst: Floats = np.diff(slope * ends_s + level, axis=1).min(axis=1) / DAY_S
    return worst


def nodes_down(outcome: Outcome) -> Ints:
    """How often so many nodes were away: counts over all full hours of all runs, by number of nodes."""
    down = np.cumsum(outcome.hours[:, :-1], axis=1)
    return np.bincount(down.ravel())
