"""Everything random of a block of runs, drawn up front: when nodes fail, which, of what kind, how long each is away.

A block is always BLOCK_RUNS runs with generators of its own, so that a run depends on the seed and on its index alone. Each thing
has a generator of its own and is drawn event by event over all runs of the block: a scenario that differs in one thing keeps the
draws of all others, which is what makes differences between scenarios small against their noise.

Arrays are flat; `first_event` and `first_mark` say where a run's part begins. An event of a run is a time and a mark; the mark
holds what there is to know of it. Faults that follow from others (a node that comes back broken) take their marks from a pool of
the run, which is used again from its start when it is used up.
"""

from __future__ import annotations

import math
from typing import NamedTuple

import numpy as np

from keepstep.planner.scenario import DAY_S, Repair, Scenario
from keepstep.planner.sim.model import BURST, FALSE_ALARM, Bools, Floats, Ints

BLOCK_RUNS = 64
WEEK_S = 7.0 * DAY_S
MOST_ROUNDS = 100
"""Repairs of one fault that a gate sends back, at most: a node that is always broken would never return."""

# Generators: one for each thing that is drawn, by position in SeedSequence's spawn key.
NODE_TIMES, SPARE_TIMES, BURST_TIMES, ALARM_TIMES, WEEKS, LEMONS, TRACE_START, STARTUPS, RENEWALS = range(9)
NODE_MARKS, SPARE_MARKS, BURST_MARKS, ALARM_MARKS, POOL_MARKS, BURST_NODE_MARKS = range(16, 22)
UNIFORMS, REPAIRS, RETURNS, GAPS = 0, 1, 2, 3


class Tape(NamedTuple):
    """A number of runs; the last event of each is at infinity."""

    time_s: Floats
    order: Ints
    """Mark of an event, counted from the run's first."""
    marks: Floats
    """A row each, with the columns below."""
    startup_s: Floats
    """From a start to its failure, infinite for those that do not fail."""
    of_run: Ints
    """Where a run's parts are, a row each, with the columns below."""


NODE, KIND, CHANCE, AWAY_S, BROKEN, GAP_S, AGAIN, EXTRA = range(8)
"""Columns of marks. Node: the first of a burst. Kind: index, or the number of kinds plus BURST or FALSE_ALARM. Chance, uniform:
does it hit the job, is an idle node's fault counted. Away: until the node is back, should it go to repair. Broken: whether it comes
back so. Gap: from then, or from when it was kept, until it fails again, should it do so. Again, uniform: does a kept node fail
again. Extra: only a lemon has this fault; it does not happen once the node is a new one."""

FIRST_EVENT, FIRST_MARK, POOL, POOL_SIZE, BURST_POOL, FIRST_STARTUP, STARTUPS_MADE = range(7)
"""Columns of of_run. Pool: its first mark, counted from the run's first, as is that of the pool for nodes of bursts, which has so
many for each burst as it has nodes, in order."""


class _Marks(NamedTuple):
    node: Ints
    kind: Ints
    chance: Floats
    away_s: Floats
    broken: Bools
    gap_s: Floats
    again: Floats
    extra: Bools


def draw(scenario: Scenario, seed: int, block: int) -> Tape:
    """The tape of one block of runs."""
    tape = _Drawing(scenario, seed, block)
    if scenario.process == "trace":
        streams = [tape.trace()]
    elif scenario.process == "weibull":
        streams = [tape.renewals()]
    else:
        streams = [tape.faults(NODE_TIMES, NODE_MARKS, scenario.job.nodes)]
        if scenario.spares:
            streams.append(tape.faults(SPARE_TIMES, SPARE_MARKS, scenario.spares))
    kinds = len(scenario.job.kinds)
    if scenario.burst_per_day:
        times_s = tape.arrivals(BURST_TIMES, scenario.burst_per_day / DAY_S)
        streams.append((times_s, tape.special(BURST_MARKS, len(times_s), kinds + BURST)))
    if scenario.false_alarms_per_day:
        times_s = tape.arrivals(ALARM_TIMES, scenario.false_alarms_per_day / DAY_S)
        streams.append((times_s, tape.special(ALARM_MARKS, len(times_s), kinds + FALSE_ALARM)))
    return tape.assemble(streams)


def join(tapes: list[Tape], runs: int) -> Tape:
    """Blocks one after the other, the first `runs` of their runs."""
    if len(tapes) == 1:
        return tapes[0]._replace(of_run=tapes[0].of_run[:runs])
    of_run = np.concatenate([t.of_run for t in tapes])
    for column, name in ((FIRST_EVENT, "time_s"), (FIRST_MARK, "marks"), (FIRST_STARTUP, "startup_s")):
        sizes = np.cumsum([0, *(len(getattr(t, name)) for t in tapes[:-1])])
        of_run[:, column] += np.repeat(sizes, BLOCK_RUNS)
    whole = {n: np.concatenate([getattr(t, n) for t in tapes]) for n in ("time_s", "order", "marks", "startup_s")}
    return Tape(**whole, of_run=of_run[:runs])


def expected_events(scenario: Scenario) -> float:
    """Mean number of events of a run on the tape."""
    total = scenario.job.nodes + scenario.spares
    per_day = scenario.job.rate_per_node_day * total + scenario.burst_per_day + scenario.false_alarms_per_day
    if scenario.process == "trace":
        per_day += len(scenario.trace) / scenario.trace_days - scenario.job.rate_per_node_day * total
    return per_day * scenario.days


class _Drawing:
    """One block while it is drawn. Two-dimensional arrays have an event a row and a run a column."""

    def __init__(self, scenario: Scenario, seed: int, block: int) -> None:
        self.scenario, self.seed, self.block = scenario, seed, block
        self.horizon_s = scenario.days * DAY_S
        self.total = scenario.job.nodes + scenario.spares
        share = np.cumsum([k.share for k in scenario.job.kinds])
        self.kind_ends = share / share[-1]
        self.lemons = round(scenario.lemon_share * self.total)
        # The mean over all nodes is that of the job.
        sum_of_factors = self.total + self.lemons * (scenario.lemon_factor - 1.0)
        self.lemon_weight = self.lemons * scenario.lemon_factor / sum_of_factors
        self.plain_rate = scenario.job.rate_per_node_day / DAY_S * self.total / sum_of_factors
        self.order_of_nodes = self._order_of_nodes()

    def rng(self, *what: int) -> np.random.Generator:
        """A generator for one thing."""
        return np.random.default_rng(np.random.SeedSequence(self.seed, spawn_key=(self.block, *what)))

    # ---- when

    def arrivals(self, what: int, rate_per_s: float, horizons_s: Floats | None = None) -> Floats:
        """Times of a Poisson process, one row more than any run needs."""
        horizons = np.full(BLOCK_RUNS, self.horizon_s) if horizons_s is None else horizons_s
        mean = float(horizons.max()) * rate_per_s
        if mean == 0.0:
            return np.full((1, BLOCK_RUNS), np.inf)
        rng = self.rng(what)
        times = np.zeros((1, BLOCK_RUNS))
        count = math.ceil(mean + 4.0 * math.sqrt(mean) + 16.0)
        while (times[-1] < horizons * rate_per_s).any():
            gaps = rng.standard_exponential((count, BLOCK_RUNS))
            times = np.concatenate([times, times[-1] + np.cumsum(gaps, axis=0)])
            count = math.ceil(2.0 * math.sqrt(mean) + 16.0)
        return times[1:] / rate_per_s

    def faults(self, what: int, marks: int, nodes: int) -> tuple[Floats, _Marks]:
        """Faults at so many nodes' rate; the node is any one."""
        weeks_s = self._weeks()
        horizons_s = None if weeks_s is None else weeks_s[-1]
        times_s = self.arrivals(what, nodes * self.scenario.job.rate_per_node_day / DAY_S, horizons_s)
        return self._in_weeks(times_s, weeks_s), self.marks(marks, len(times_s))

    def renewals(self) -> tuple[Floats, _Marks]:
        """Faults of nodes whose gaps are Weibull, each node in equilibrium at the begin."""
        rng, shape = self.rng(RENEWALS), self.scenario.weibull_shape
        weeks_s = self._weeks()
        ends_s = np.full(BLOCK_RUNS, self.horizon_s) if weeks_s is None else weeks_s[-1]
        rate = np.full((self.total, BLOCK_RUNS), self.plain_rate)
        if self.lemons:
            rate[self.order_of_nodes[: self.lemons], np.arange(BLOCK_RUNS)] *= self.scenario.lemon_factor
        if self.plain_rate == 0.0:
            return np.full((1, BLOCK_RUNS), np.inf), self.marks(NODE_MARKS, 1)
        scale_s = 1.0 / (rate * math.gamma(1.0 + 1.0 / shape))
        # The gap that a fixed moment falls into is longer than others, and the moment is anywhere in it.
        residual = rng.random(rate.shape) * rng.standard_gamma(1.0 + 1.0 / shape, rate.shape) ** (1.0 / shape)
        times_s = residual * scale_s
        at = np.nonzero(times_s < ends_s)
        found: list[tuple[Ints, Ints, Floats]] = []
        while at[0].size:
            found.append((at[0], at[1], times_s[at]))
            times_s[at] += scale_s[at] * rng.standard_exponential(at[0].size) ** (1.0 / shape)
            again = times_s[at] < ends_s[at[1]]
            at = (at[0][again], at[1][again])
        return self._rows_of(found, weeks_s)

    def _rows_of(self, found: list[tuple[Ints, Ints, Floats]], weeks_s: Floats | None) -> tuple[Floats, _Marks]:
        """Faults given as (node, run, time) as rows of events, each run's in order of time."""
        node, run, time_s = (
            (np.concatenate(part) for part in zip(*found, strict=True)) if found else [np.zeros(0, int)] * 3
        )
        order = np.lexsort((time_s, run))
        node, run, time_s = node[order], run[order], time_s[order]
        counts = np.bincount(run, minlength=BLOCK_RUNS)
        row = np.arange(len(run)) - np.repeat(np.cumsum(counts) - counts, counts)
        times_s, nodes = np.full((counts.max() + 1, BLOCK_RUNS), np.inf), np.zeros((counts.max() + 1, BLOCK_RUNS), int)
        times_s[row, run], nodes[row, run] = time_s, node
        return self._in_weeks(times_s, weeks_s), self.marks(NODE_MARKS, len(times_s))._replace(node=nodes)

    def trace(self) -> tuple[Floats, _Marks]:
        """The trace from a random time on, again and again."""
        length_s = self.scenario.trace_days * DAY_S
        faults = self.scenario.trace
        offsets_s = self.rng(TRACE_START).random(BLOCK_RUNS) * length_s
        rounds = math.ceil(self.horizon_s / length_s)
        count = len(faults)
        since_s = (np.array([f.t_s for f in faults])[:, None] - offsets_s) % length_s
        order = np.argsort(since_s, axis=0, kind="stable")
        since_s = np.take_along_axis(since_s, order, axis=0)
        times_s = np.concatenate([since_s + k * length_s for k in range(rounds)])
        index = np.tile(order, (rounds, 1))
        marks = self.marks(NODE_MARKS, rounds * count)
        return times_s, marks._replace(
            node=np.array([f.node for f in faults])[index],
            kind=np.array([f.kind for f in faults])[index],
            away_s=np.array([f.down_s for f in faults])[index],
            # What fails again is in the trace itself.
            broken=np.zeros(index.shape, dtype=bool),
            again=np.ones(index.shape),
            extra=np.zeros(index.shape, dtype=bool),
        )

    def _weeks(self) -> Floats | None:
        """Ends of weeks, in time that passes faster in weeks of many failures; row 0 is the begin. None: all weeks are alike."""
        excess = self.scenario.dispersion - 1.0
        weekly = self.scenario.job.rate_per_node_day * 7.0 * self.total
        if excess <= 0.0 or weekly == 0.0:
            return None
        weeks = math.ceil(self.horizon_s / WEEK_S)
        # A Gamma of mean 1 and variance v makes the variance of counts m + m^2 v.
        shape = weekly / excess
        speed = self.rng(WEEKS).standard_gamma(shape, (weeks, BLOCK_RUNS)) / shape
        return np.concatenate([np.zeros((1, BLOCK_RUNS)), np.cumsum(speed * WEEK_S, axis=0)])

    def _in_weeks(self, times_s: Floats, weeks_s: Floats | None) -> Floats:
        if weeks_s is None:
            return times_s
        ends_s = np.arange(len(weeks_s)) * WEEK_S
        columns = [np.interp(times_s[:, r], weeks_s[:, r], ends_s, right=np.inf) for r in range(BLOCK_RUNS)]
        return np.stack(columns, axis=1)

    # ---- what

    def marks(self, what: int, count: int) -> _Marks:
        """So many faults of each run."""
        uniform = self.rng(what, UNIFORMS).random((count, BLOCK_RUNS, 5))
        away_s, broken = _repairs(self.scenario.repair, self.rng(what, REPAIRS), self.rng(what, RETURNS), count)
        refaults = self.scenario.repair.bad_return > 0.0 or any(k.persists > 0.0 for k in self.scenario.job.kinds)
        gaps = self.rng(what, GAPS).standard_exponential((count, BLOCK_RUNS)) if refaults else np.zeros(away_s.shape)
        kind = np.searchsorted(self.kind_ends, uniform[:, :, 1], side="right")
        node, extra = self._nodes(uniform[:, :, 0], uniform[:, :, 4])
        return _Marks(
            node=node,
            kind=np.minimum(kind, len(self.kind_ends) - 1),
            chance=uniform[:, :, 2],
            away_s=away_s,
            broken=broken,
            gap_s=gaps * self.scenario.repair.refault_mean_s,
            again=uniform[:, :, 3],
            extra=extra,
        )

    def special(self, what: int, count: int, kind: int) -> _Marks:
        """Bursts, which begin at one of the places where all their nodes are in one block, or false alarms at any node."""
        uniform = self.rng(what, UNIFORMS).random((count, BLOCK_RUNS, 2))
        if kind == len(self.kind_ends) + BURST:
            size = self.scenario.block_nodes or self.total
            blocks = self.scenario.job.nodes // size if self.scenario.block_nodes else 1
            places = size - self.scenario.burst_nodes + 1
            node = (uniform[:, :, 0] * blocks).astype(int) * size + (uniform[:, :, 1] * places).astype(int)
        else:
            node = (uniform[:, :, 0] * self.total).astype(int)
        nothing = np.zeros((count, BLOCK_RUNS))
        no = np.zeros((count, BLOCK_RUNS), dtype=bool)
        return _Marks(node, np.full(node.shape, kind), uniform[:, :, 1], nothing, no, nothing, nothing, no)

    def _order_of_nodes(self) -> Ints:
        """A permutation of the nodes of each run, lemons first; empty where all nodes are alike."""
        if not self.lemons or self.scenario.lemon_factor == 1.0:
            self.lemons = 0
            return np.zeros((0, BLOCK_RUNS), dtype=int)
        return np.argsort(self.rng(LEMONS).random((self.total, BLOCK_RUNS)), axis=0)

    def _nodes(self, uniform: Floats, thinning: Floats) -> tuple[Ints, Bools]:
        """Nodes at fault, and whether it is one of the faults that only a lemon has."""
        if not self.lemons:
            return (uniform * self.total).astype(int), np.zeros(uniform.shape, dtype=bool)
        weight = self.lemon_weight
        is_lemon = uniform < weight
        as_lemon = uniform / weight * self.lemons
        as_other = self.lemons + (uniform - weight) / max(1.0 - weight, 1e-300) * (self.total - self.lemons)
        place = np.clip(np.where(is_lemon, as_lemon, as_other).astype(int), 0, self.total - 1)
        extra = is_lemon & (thinning * self.scenario.lemon_factor >= 1.0)
        return np.take_along_axis(self.order_of_nodes, place, axis=0), extra

    # ---- all of it

    def assemble(self, streams: list[tuple[Floats, _Marks]]) -> Tape:
        """All streams in order of time, with a pool for what follows."""
        never = np.full((1, BLOCK_RUNS), np.inf)
        times_s = np.concatenate([*(times_s for times_s, _ in streams), never])
        times_s = np.ascontiguousarray(np.where(times_s < self.horizon_s, times_s, np.inf).T)
        order = np.argsort(times_s, axis=1, kind="stable")
        kept = int(np.isfinite(times_s).sum(axis=1).max()) + 1
        order = order[:, :kept]
        times_s = np.take_along_axis(times_s, order, axis=1)
        pool_size = self._pool_size(kept)
        burst_nodes = sum(len(t) for t, m in streams if int(m.kind[0, 0]) == len(self.kind_ends) + BURST)
        burst_nodes *= self.scenario.burst_nodes
        parts = [marks for _, marks in streams]
        parts += [self.marks(POOL_MARKS, pool_size)] if pool_size else []
        parts += [self.marks(BURST_NODE_MARKS, burst_nodes)] if burst_nodes else []
        count = sum(len(p.node) for p in parts)
        marks = np.empty((BLOCK_RUNS, count, len(_Marks._fields)))
        for column, name in enumerate(_Marks._fields):
            marks[:, :, column] = np.concatenate([getattr(p, name) for p in parts]).T
        startup_s = self._startups(2 * kept + 64)
        index = np.arange(BLOCK_RUNS)
        of_run = np.empty((BLOCK_RUNS, 7), dtype=np.int64)
        of_run[:, FIRST_EVENT], of_run[:, FIRST_MARK] = index * kept, index * count
        of_run[:, POOL], of_run[:, POOL_SIZE] = count - burst_nodes - pool_size, max(1, pool_size)
        of_run[:, BURST_POOL] = count - burst_nodes
        of_run[:, FIRST_STARTUP], of_run[:, STARTUPS_MADE] = index * len(startup_s), len(startup_s)
        return Tape(
            time_s=times_s.ravel(),
            order=np.minimum(order, sum(len(t) for t, _ in streams) - 1).ravel(),
            marks=marks.reshape(-1, len(_Marks._fields)),
            startup_s=np.ascontiguousarray(startup_s.T).ravel(),
            of_run=of_run,
        )

    def _pool_size(self, events: int) -> int:
        """Marks for faults that follow from others: twice what is expected of them, at most a few times the events themselves."""
        follow = max([self.scenario.repair.bad_return, *(k.persists for k in self.scenario.job.kinds)])
        if follow == 0.0:
            return 0
        return 64 + math.ceil(2.0 * events * min(4.0, follow / max(1e-9, 1.0 - follow)))

    def _startups(self, count: int) -> Floats:
        share = self.scenario.startup_failure
        if share == 0.0:
            return np.full((1, BLOCK_RUNS), np.inf)
        uniform = self.rng(STARTUPS).random((count, BLOCK_RUNS, 2))
        return np.where(uniform[:, :, 0] < share, uniform[:, :, 1] * self.scenario.startup_window_s, np.inf)


def _repairs(
    repair: Repair, lengths: np.random.Generator, returns: np.random.Generator, count: int
) -> tuple[Floats, Bools]:
    """How long repairs take, those that the gate sends back included, and which nodes come back broken."""
    shape = (count, BLOCK_RUNS)
    away_s = _one_repair(repair, lengths, shape)
    if repair.bad_return == 0.0:
        return away_s, np.zeros(shape, dtype=bool)
    broken = returns.random(shape) < repair.bad_return
    caught = broken & (returns.random(shape) < repair.gate_catch)
    for _ in range(MOST_ROUNDS):
        again = np.nonzero(caught)
        if not again[0].size:
            break
        away_s[again] += _one_repair(repair, lengths, again[0].shape)
        broken[again] = returns.random(again[0].size) < repair.bad_return
        caught[again] = broken[again] & (returns.random(again[0].size) < repair.gate_catch)
    return away_s, broken


def _one_repair(repair: Repair, lengths: np.random.Generator, shape: tuple[int, ...]) -> Floats:
    if repair.sigma == 0.0:
        return np.full(shape, repair.mean_s + repair.gate_s)
    # A lognormal of this mean: its logarithm lies half its variance below.
    factor = np.exp(repair.sigma * lengths.standard_normal(shape) - 0.5 * repair.sigma**2)
    return repair.mean_s * factor + repair.gate_s
