"""The numpy engine: all runs of a batch take their next event together.

`compiled` does the same for one run after the other, and gives the same numbers: a rule that changes here changes there.
"""

from __future__ import annotations

import numpy as np

from keepstep.planner.scenario import DAY_S
from keepstep.planner.sim.model import (
    BLOCK,
    BURST,
    CHECKPOINT,
    DECISION,
    DETECT_S,
    DETECTION,
    EXHAUSTED,
    FAILURES,
    FALSE_ALARM,
    FALSE_POSITIVE,
    IDLE_FAULTS,
    INTERRUPTIONS,
    LAG_S,
    LEVEL,
    LOAD_S,
    NO_SPARE,
    PERIOD,
    PERSISTS,
    PRODUCTIVE,
    REPLACE,
    REPLACEMENT,
    RESTART,
    ROLLBACK,
    SLOPE,
    STARTUP,
    STEP_S,
    SUPER_S,
    TIER,
    WAIT_S,
    Bools,
    Floats,
    Ints,
    Model,
    Outcome,
)
from keepstep.planner.sim.nodepolicy import KEEP, REPAIR, RETIRE, NodePolicy
from keepstep.planner.sim.nodes import Nodes
from keepstep.planner.sim.tape import (
    AGAIN,
    AWAY_S,
    BROKEN,
    BURST_POOL,
    CHANCE,
    EXTRA,
    FIRST_EVENT,
    FIRST_MARK,
    FIRST_STARTUP,
    GAP_S,
    KIND,
    NODE,
    POOL,
    POOL_SIZE,
    STARTUPS_MADE,
    Tape,
)


class Runs:
    """Where all runs of a batch are. Names as in `compiled`; arrays have an entry for each run."""

    def __init__(self, model: Model, tape: Tape) -> None:
        runs, tiers = len(tape.of_run), model.tiers.shape[1]
        self.failed, self.detected, self.ready, self.supplied = (np.zeros(runs) for _ in range(4))
        self.start, self.swap, self.load = (np.zeros(runs) for _ in range(3))
        self.start_fails = np.full(runs, np.inf)
        self.saves, self.needed, self.followed, self.bursts, self.startups = np.zeros((5, runs), dtype=np.int64)
        self.falsely = np.zeros(runs, dtype=bool)
        self.held = np.zeros((tiers, runs), dtype=np.int64)
        self.event = tape.of_run[:, FIRST_EVENT].copy()


class Batch:
    """One batch of runs with what it is simulated by."""

    def __init__(self, model: Model, tape: Tape, out: Outcome, policy: NodePolicy) -> None:
        self.model, self.tape, self.out, self.policy = model, tape, out, policy
        self.runs = Runs(model, tape)
        self.nodes = Nodes(model, out)


def run(model: Model, tape: Tape, out: Outcome, policy: NodePolicy) -> None:
    """Simulate all runs of the tape, a row of `out` each."""
    batch = Batch(model, tape, out, policy)
    _next_startup(batch, np.arange(len(tape.of_run)))
    while _step(batch):
        pass
    _finish(batch)


def _step(b: Batch) -> bool:
    """The next event of each run; false when no run has one."""
    s, m, tape = b.runs, b.model, b.tape
    times = tape.time_s[s.event]
    now = np.minimum(times, s.start_fails) if m.startups else times
    follows = None
    if m.refaults:
        soonest = b.nodes.soonest()
        follows, now = soonest < now, np.minimum(now, soonest)
    rows = np.flatnonzero(now < m.horizon_s)
    if not rows.size:
        return False
    b.nodes.look(now)
    t = now[rows]
    mark = tape.of_run[rows, FIRST_MARK] + tape.order[s.event[rows]]
    starting = s.start_fails[rows] < times[rows] if m.startups else np.zeros(len(rows), dtype=bool)
    node, sure = None, np.zeros(len(rows), dtype=bool)
    if follows is not None and (at := np.flatnonzero(follows[rows])).size:
        starting[at] = False
        mark[at] = tape.of_run[rows[at], FIRST_MARK] + tape.of_run[rows[at], POOL]
        mark[at] += s.followed[rows[at]] % tape.of_run[rows[at], POOL_SIZE]
        s.followed[rows[at]] += 1
        s.event[rows] += ~follows[rows] & ~starting
        node, sure[at] = b.nodes.take_pending(rows[at])
        nodes = tape.marks[mark, NODE].astype(np.int64)
        nodes[at] = node
    else:
        s.event[rows] += ~starting
        nodes = tape.marks[mark, NODE].astype(np.int64)
    _events(b, rows, t, mark, nodes, sure, starting)
    return True


def _events(b: Batch, rows: Ints, t: Floats, mark: Ints, nodes: Ints, sure: Bools, starting: Bools) -> None:
    """What the events come to: for each of these runs none or one interruption."""
    m, marks = b.model, b.tape.marks[mark]
    kind = marks[:, KIND].astype(np.int64)
    waits = (b.runs.ready[rows] <= t) & (t < b.runs.supplied[rows])
    restarts = t < b.runs.start[rows]
    kind[starting] = m.kinds + STARTUP
    hit, swap, idle = starting.copy(), np.zeros(len(rows), dtype=bool), np.zeros(len(rows), dtype=bool)
    at = np.flatnonzero(kind < m.kinds)
    if at.size:
        hit[at], swap[at], idle[at] = _node_faults(
            b, rows[at], t[at], marks[at], kind[at], nodes[at], sure[at], waits[at], restarts[at]
        )
    if at.size < len(rows):
        for i in np.flatnonzero(kind == m.kinds + BURST):
            hit[i], idle[i] = _burst(b, rows[i], t[i], marks[i], bool(waits[i]), bool(restarts[i]))
            swap[i] = hit[i]
        at = np.flatnonzero((kind == m.kinds + FALSE_ALARM) & ~waits & (~restarts | m.exposed))
        if at.size:
            _false_alarms(b, rows[at], t[at], nodes[at])
            hit[at], swap[at] = True, True
    at = np.flatnonzero(hit)
    if at.size == len(rows):
        _fail(b, rows, t, kind, swap)
    elif at.size:
        _fail(b, rows[at], t[at], kind[at], swap[at])
    at = np.flatnonzero(idle & (t < b.runs.supplied[rows]))
    if at.size:
        _wait_longer(b, rows[at])


# ---- events


def _node_faults(
    b: Batch,
    rows: Ints,
    t: Floats,
    marks: Floats,
    kind: Ints,
    node: Ints,
    sure: Bools,
    waits: Bools,
    restarts: Bools,
) -> tuple[Bools, Bools, Bools]:
    """Which of these faults hit the job, which of those replace the node, which are an idle node's."""
    m, nodes = b.model, b.nodes
    fine = nodes.is_there(rows, node, t)
    if m.retire_after:
        fine &= ~(nodes.is_fresh(rows, node) & (marks[:, EXTRA] > 0.0))
    there = m.block_nodes + m.block_spares - nodes.away_in(rows, m.places[BLOCK, node])
    chance = marks[:, CHANCE]
    share = np.minimum(1.0, m.block_nodes / np.maximum(there, 1))
    share[sure] = 1.0
    hit = (chance < share) & ~waits
    idle = np.where(waits, chance < m.idle_hazard, ~hit & (chance - share < m.idle_hazard * (1.0 - share)))
    idle &= fine & (m.of_kind[REPLACE, kind] > 0.0)
    hit &= fine
    if not m.exposed:
        hit &= ~restarts
    counted = np.flatnonzero(hit | idle)
    action = _actions(b, rows[counted], t[counted], kind[counted], node[counted], idle[counted])
    out = np.zeros(len(rows), dtype=bool)
    out[counted] = action != KEEP
    at = counted if out[counted].all() else counted[action != KEEP]
    end = t[at] + marks[at, AWAY_S]
    retired = None
    if b.policy.__class__ is not None and (action == RETIRE).any():
        retired = action[action != KEEP] == RETIRE
        end[retired] = t[at][retired] + m.retire_s
    nodes.send_out(rows[at], node[at], t[at], end)
    if m.refaults:
        broken = marks[at, BROKEN] > 0.0
        if retired is not None:
            broken &= ~retired
        when = np.where(broken, end + marks[at, GAP_S], np.inf)
        nodes.set_pending(rows[at], node[at], when, False)
        kept = counted[action == KEEP]
        kept = kept[marks[kept, AGAIN] < m.of_kind[PERSISTS, kind[kept]]]
        nodes.set_pending(rows[kept], node[kept], t[kept] + marks[kept, GAP_S], True)
    if m.evictions and (at := np.flatnonzero(out & hit)).size:
        nodes.take_neighbours(rows[at], node[at], t[at], m.evictions, m.verify_s)
    if idle.any():
        b.out.counts[rows[idle], IDLE_FAULTS] += 1
    return hit, out & hit, idle


def _actions(b: Batch, rows: Ints, t: Floats, kind: Ints, node: Ints, idle: Bools) -> Ints:
    """What the policy decides for faults that count."""
    faults = b.nodes.count_fault(rows, node)
    action = b.policy.decide(kind, faults, t)
    action = np.where(idle & (action == KEEP), REPAIR, action)
    retired = action == RETIRE
    if retired.any():
        b.nodes.renew(rows[retired], node[retired])
    return action


def _burst(b: Batch, row: int, t: float, mark: Floats, waits: bool, restarts: bool) -> tuple[bool, bool]:
    """A burst of one run: whether it hits the job, whether it is one of idle nodes."""
    m, nodes, tape = b.model, b.nodes, b.tape
    place = tape.of_run[row, FIRST_MARK] + tape.of_run[row, BURST_POOL] + b.runs.bursts[row] * m.burst_nodes
    b.runs.bursts[row] += 1
    struck = int(mark[NODE]) + np.arange(m.burst_nodes)
    healthy = np.flatnonzero(nodes.is_there(np.full(len(struck), row), struck, np.full(len(struck), t)))
    there = m.total - nodes.away_of(row)
    lost = np.arange(len(healthy))
    missed = float(np.prod(np.maximum(0.0, (there - m.nodes - lost) / (there - lost))))
    hit = len(healthy) > 0 and not waits and mark[CHANCE] >= missed
    if not len(healthy) or (hit and restarts and not m.exposed):
        return False, False
    marks = tape.marks[place + healthy]
    ends = t + marks[:, AWAY_S]
    nodes.send_group(row, struck[healthy], t, ends)
    if m.refaults:
        when = np.where(marks[:, BROKEN] > 0.0, ends + marks[:, GAP_S], np.inf)
        for k, node in enumerate(struck[healthy]):
            nodes.set_pending(np.array([row]), np.array([node]), when[k : k + 1], False)
    if not hit:
        b.out.counts[row, IDLE_FAULTS] += len(healthy)
    return hit, not hit


def _false_alarms(b: Batch, rows: Ints, t: Floats, node: Ints) -> None:
    there = b.nodes.is_there(rows, node, t)
    at = np.flatnonzero(there)
    b.nodes.send_out(rows[at], node[at], t[at], t[at] + b.model.verify_s)
    at = np.flatnonzero(~there)
    if at.size:
        b.nodes.take_neighbours(rows[at], node[at], t[at], 1, b.model.verify_s)


def _fail(b: Batch, rows: Ints, t: Floats, kind: Ints, swap: Bools) -> None:
    """The jobs are interrupted, or their restarts are: lose what the tiers do not hold, and begin restarts."""
    s, m, out = b.runs, b.model, b.out
    begun = s.start[rows]
    training = t >= begun
    tier = m.of_kind[TIER, kind].astype(np.int64)
    _close_outages(b, rows, np.minimum(t, begun))
    if training.all():
        saves, useful = _close_lives(b, rows, t)
        _hold(b, rows, saves, t)
        out.counts[rows, INTERRUPTIONS] += 1
    else:
        saves, useful = s.saves[rows], np.zeros(len(rows))
        at = np.flatnonzero(training)
        saves[at], useful[at] = _close_lives(b, rows[at], t[at])
        _hold(b, rows[at], saves[at], t[at])
        out.counts[rows[at], INTERRUPTIONS] += 1
        tier = np.where(training, tier, np.maximum(tier, s.needed[rows]))
    restored, source = _restore(s.held, rows, tier)
    falsely = kind == m.kinds + FALSE_ALARM
    lost = (saves - restored) * m.interval_s + useful
    out.ledger_s[rows, np.where(falsely, FALSE_POSITIVE, ROLLBACK)] += lost
    out.progress[rows, LEVEL, (t / DAY_S).astype(np.int64) + 1] -= lost
    out.counts[rows, FAILURES + kind] += 1
    s.saves[rows], s.needed[rows], s.falsely[rows] = restored, tier, falsely
    detected = t + m.of_kind[DETECT_S, kind]
    ready = detected + m.decide_s
    swaps = np.where(swap, m.replace_s, 0.0)
    loads = m.start_s + m.tiers[LOAD_S, source]
    supplied = b.nodes.supplied(rows, ready)
    s.failed[rows], s.detected[rows], s.ready[rows], s.supplied[rows] = t, detected, ready, supplied
    s.swap[rows], s.load[rows] = swaps, loads
    s.start[rows] = supplied + swaps + loads
    _next_startup(b, rows)


def _restore(held: Ints, rows: Ints, tier: Ints) -> tuple[Ints, Ints]:
    """The largest count that a tier from `tier` on holds, and the nearest of those that do; nearer ones hold it from now on."""
    if len(held) == 1:
        return held[0, rows], tier
    restored, source = held[tier, rows], tier.copy()
    for i in range(1, len(held)):
        more = (i > tier) & (held[i, rows] > restored)
        source[more] = i
        restored = np.where(more, held[i, rows], restored)
    for i in range(len(held)):
        at = rows[i <= tier]
        held[i, at] = restored[i <= tier]
    return restored, source


def _wait_longer(b: Batch, rows: Ints) -> None:
    """Nodes that did not train have failed: jobs that wait for one may have to wait for longer."""
    s = b.runs
    s.supplied[rows] = b.nodes.supplied(rows, s.ready[rows])
    start = s.supplied[rows] + s.swap[rows] + s.load[rows]
    s.start_fails[rows] += start - s.start[rows]
    s.start[rows] = start


def _next_startup(b: Batch, rows: Ints) -> None:
    s, of_run = b.runs, b.tape.of_run
    if b.model.startups:
        which = of_run[rows, FIRST_STARTUP] + s.startups[rows] % of_run[rows, STARTUPS_MADE]
        s.start_fails[rows] = s.start[rows] + b.tape.startup_s[which]
        s.startups[rows] += 1


def _finish(b: Batch) -> None:
    s, rows = b.runs, np.arange(len(b.tape.of_run))
    end_s = np.full(len(rows), b.model.horizon_s)
    _close_outages(b, rows, np.minimum(end_s, s.start))
    saves, useful = s.saves.copy(), np.zeros(len(rows))
    at = np.flatnonzero(end_s >= s.start)
    saves[at], useful[at] = _close_lives(b, at, end_s[at])
    b.out.ledger_s[:, PRODUCTIVE] = saves * b.model.interval_s + useful


# ---- time


def _time_of(m: Model, saves: Ints) -> Floats:
    """Training time from a count of 0 to this one, by the schedule."""
    total: Floats = saves.astype(np.float64) * m.interval_s
    for i in range(m.tiers.shape[1]):
        period = int(m.tiers[PERIOD, i])
        np.add(total, m.tiers[STEP_S, i] * (saves if period == 1 else saves // period), out=total)
    return total


def _elapsed(m: Model, saves: Ints, begun: Ints) -> Floats:
    """From the begin of a life at the count `begun` to the end of the pause for the save of the count `saves`."""
    total = _time_of(m, saves) - _time_of(m, begun)
    for i in np.flatnonzero(m.tiers[WAIT_S] > 0.0):
        period = int(m.tiers[PERIOD, i])
        total = total - (saves // period > begun // period) * float(m.tiers[WAIT_S, i])
    return total


def _saves_at(m: Model, age: Floats, begun: Ints) -> Ints:
    """Count of finished saves at an age of a life that began at the count `begun`."""
    left = age + _time_of(m, begun)
    last = m.tiers.shape[1] - 1
    saves = np.zeros(len(age), dtype=np.int64)
    for i in range(last, -1, -1):
        number = (left / m.tiers[SUPER_S, i] + 1e-9).astype(np.int64)
        if i < last:
            number = np.minimum(number, int(m.tiers[PERIOD, i + 1]) // int(m.tiers[PERIOD, i]) - 1)
        saves += number * int(m.tiers[PERIOD, i])
        left -= number * m.tiers[SUPER_S, i]
    saves = np.maximum(saves, begun)
    if (m.tiers[WAIT_S] > 0.0).any():
        while (more := _elapsed(m, saves + 1, begun) <= age).any():
            saves += more
    return saves


def _close_lives(b: Batch, rows: Ints, t: Floats) -> tuple[Ints, Floats]:
    """Account for training up to t: the counts of saves, and the useful seconds since the last one."""
    m, out = b.model, b.out
    start, begun = b.runs.start[rows], b.runs.saves[rows]
    age = t - start
    saves = _saves_at(m, age, begun)
    elapsed = _elapsed(m, saves, begun)
    since = np.maximum(0.0, age - elapsed)
    useful = np.minimum(since, m.interval_s)
    work = (saves - begun) * m.interval_s
    out.ledger_s[rows, CHECKPOINT] += (elapsed - work) + (since - useful)
    work += useful
    first, last = (start / DAY_S).astype(np.int64) + 1, (t / DAY_S).astype(np.int64) + 1
    slope = work / np.where(age > 0.0, age, np.inf)
    out.progress[rows, SLOPE, first] += slope
    out.progress[rows, LEVEL, first] -= slope * start
    out.progress[rows, SLOPE, last] -= slope
    out.progress[rows, LEVEL, last] += slope * start + work
    return saves, useful


def _hold(b: Batch, rows: Ints, saves: Ints, t: Floats) -> None:
    """What each tier has for certain when lives end at t."""
    m, begun = b.model, b.runs.saves[rows]
    age = t - b.runs.start[rows]
    for i in range(m.tiers.shape[1]):
        period, lag_s = int(m.tiers[PERIOD, i]), m.tiers[LAG_S, i]
        newest = saves if period == 1 else saves // period * period
        if lag_s > 0.0:
            newest = newest - period * (_elapsed(m, newest, begun) + lag_s > age)
        b.runs.held[i, rows] = np.where(newest > begun, newest, b.runs.held[i, rows])


def _close_outages(b: Batch, rows: Ints, t: Floats) -> None:
    s, ledger, counts = b.runs, b.out.ledger_s, b.out.counts
    failed, detected, ready, supplied = s.failed[rows], s.detected[rows], s.ready[rows], s.supplied[rows]
    waited = np.maximum(0.0, np.minimum(t, supplied) - ready)
    at = np.flatnonzero(waited > 0.0)
    counts[rows[at], EXHAUSTED] += 1
    swapped = supplied + s.swap[rows]
    falsely = s.falsely[rows]
    at = np.flatnonzero(falsely)
    if at.size:
        ledger[rows[at], FALSE_POSITIVE] += t[at] - failed[at]
    phases = (
        (DETECTION, np.minimum(t, detected) - failed),
        (DECISION, np.maximum(0.0, np.minimum(t, ready) - detected)),
        (NO_SPARE, waited),
        (REPLACEMENT, np.maximum(0.0, np.minimum(t, swapped) - supplied)),
        (RESTART, np.maximum(0.0, np.minimum(t, s.start[rows]) - swapped)),
    )
    for bucket, seconds in phases:
        if at.size:
            seconds[at] = 0.0
        ledger[rows, bucket] += seconds
