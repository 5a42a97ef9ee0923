"""The compiled engine: one run after the other, event by event. Importing it needs numba; compiling is done once and cached.

`lockstep` does the same for many runs side by side, and gives the same numbers: a rule that changes here changes there. All of it
is in one file because numba looks for changes in the file of a cached function only.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any, NamedTuple, TypeVar, cast

import numba
import numpy as np

from keepstep.planner.scenario import DAY_S
from keepstep.planner.sim import model as md
from keepstep.planner.sim import tape as tp
from keepstep.planner.sim.model import Floats, Ints, Model, Outcome
from keepstep.planner.sim.nodepolicy import KEEP, REPAIR, RETIRE
from keepstep.planner.sim.tape import Tape

F = TypeVar("F", bound=Callable[..., Any])

# Times of a run (`clock`): when it failed, was known to have, looked for nodes, had them, trains again; how long the swap and the
# rest of the restart take; when the start itself fails.
FAILED, DETECTED, READY, SUPPLIED, START, SWAP, LOAD, START_FAILS = range(8)
# Counts of a run (`count`): saves, the tier that the outage needs, whether a false alarm caused it, nodes that are away, faults
# that will follow, and how much of the tape is used.
SAVES, NEEDED, FALSELY, AWAY, PENDING, EVENT, FOLLOWED, BURSTS, STARTUPS = range(9)
# Of nodes that are away: until when, of which block. Of faults that will follow: when, which node, whether it was kept. Of all
# nodes: faults so far, whether it has replaced a retired one.
END, OF_BLOCK = range(2)
WHEN, WHICH, KEPT = range(3)
FAULTS, FRESH = range(2)

NOTHING, KEPT_NODE, SWAPPED = range(3)
"""What an event came to: no interruption, one that leaves the nodes in place, one that replaces a node."""


class Nodes(NamedTuple):
    """Nodes of the run at hand."""

    back: Floats
    """When each is back."""
    away: Floats
    pending: Floats
    past: Ints


OPTIONS: dict[str, Any] = {"nogil": True, "error_model": "numpy", "_nrt": False}
"""Nothing here allocates, so arrays need no reference counts; with counts and calls each event takes ten times as long."""
INNER: dict[str, Any] = {**OPTIONS, "no_cpython_wrapper": True, "no_cfunc_wrapper": True}
"""Not called from Python: without what that takes there is less to compile."""


def _hot(function: F) -> F:
    """A part of every event; compiled into what calls it."""
    return cast("F", numba.njit(**INNER, forceinline=True)(function))


def _cold(function: F) -> F:
    """A part of some events, or one that is too large to be copied."""
    return cast("F", numba.njit(**INNER)(function))


def _outer(function: F) -> F:
    """Called from Python; compiled on first use and cached with all that it calls, where there is a place for it."""
    try:
        return cast("F", numba.njit(**OPTIONS, cache=True)(function))
    except RuntimeError:
        return cast("F", numba.njit(**OPTIONS)(function))


def run(model: Model, tape: Tape, out: Outcome) -> None:
    """Simulate all runs of the tape, a row of `out` each."""
    state = (np.zeros(8), np.zeros(9, dtype=np.int64), np.zeros(model.tiers.shape[1], dtype=np.int64))
    total = model.total
    nodes = Nodes(np.zeros(total), np.zeros((2, total)), np.zeros((3, total)), np.zeros((2, total), dtype=np.int64))
    _run_all(model, tape, out, *state, nodes)


@_outer
def _run_all(m: Model, tape: Tape, out: Outcome, clock: Floats, count: Ints, held: Ints, nodes: Nodes) -> None:
    for r in range(len(tape.of_run)):
        clock[:], count[:], held[:], nodes.back[:] = 0.0, 0, 0, 0.0
        if m.retire_after:
            nodes.past[:] = 0
        _run_one(m, tape, out, r, clock, count, held, nodes)


@_cold
def _run_one(m: Model, tape: Tape, out: Outcome, r: int, clock: Floats, count: Ints, held: Ints, nodes: Nodes) -> None:
    first_event, first = tape.of_run[r, tp.FIRST_EVENT], tape.of_run[r, tp.FIRST_MARK]
    clock[START_FAILS] = np.inf
    _next_startup(m, tape, r, clock, count)
    while True:
        t, start_fails, which, node = tape.time_s[first_event + count[EVENT]], False, -1, 0
        if clock[START_FAILS] < t:
            t, start_fails = clock[START_FAILS], True
        if m.refaults:
            which = _soonest(nodes.pending, count[PENDING], t)
            if which >= 0:
                t = nodes.pending[WHEN, which]
        if t >= m.horizon_s:
            break
        _expire(nodes.away, count, t)
        row, kind, sure = first, m.kinds + md.STARTUP, False
        if which >= 0:
            node, sure = int(nodes.pending[WHICH, which]), nodes.pending[KEPT, which] > 0.0
            _drop_pending(nodes.pending, count, which)
            row += tape.of_run[r, tp.POOL] + count[FOLLOWED] % tape.of_run[r, tp.POOL_SIZE]
            count[FOLLOWED] += 1
        elif not start_fails:
            row += tape.order[first_event + count[EVENT]]
            node = int(tape.marks[row, tp.NODE])
            count[EVENT] += 1
        mark, came = tape.marks[row], KEPT_NODE
        if which >= 0 or not start_fails:
            kind = int(mark[tp.KIND])
            if kind < m.kinds:
                came = _node_fault(m, out, r, clock, count, nodes, t, mark, node, sure)
            elif kind == m.kinds + md.BURST:
                came = _burst(m, tape, out, r, clock, count, nodes, t, mark)
            else:
                came = _false_alarm(m, out, r, clock, count, nodes, t, node)
        if came != NOTHING:
            _fail(m, out, r, clock, count, held, nodes, t, kind, came == SWAPPED)
            _next_startup(m, tape, r, clock, count)
    _finish(m, out, r, clock, count)


# ---- events


@_hot
def _node_fault(
    m: Model,
    out: Outcome,
    r: int,
    clock: Floats,
    count: Ints,
    nodes: Nodes,
    t: float,
    mark: Floats,
    node: int,
    sure: bool,
) -> int:
    if nodes.back[node] > t or (m.retire_after and nodes.past[FRESH, node] and mark[tp.EXTRA]):
        return NOTHING
    there = m.block_nodes + m.block_spares - _away_in(m, nodes.away, count, m.places[md.BLOCK, node])
    chance, share = mark[tp.CHANCE], 1.0 if sure else min(1.0, m.block_nodes / there)
    if clock[READY] <= t < clock[SUPPLIED]:  # the job waits for a node and has none that trains
        hit, idle = False, chance < m.idle_hazard
    else:
        hit = chance < share
        idle = not hit and chance - share < m.idle_hazard * (1.0 - share)
    kind = int(mark[tp.KIND])
    if not (hit or (idle and m.of_kind[md.REPLACE, kind])) or (hit and t < clock[START] and not m.exposed):
        return NOTHING
    nodes.past[FAULTS, node] += 1
    action = REPAIR if m.of_kind[md.REPLACE, kind] else KEEP
    if m.retire_after and nodes.past[FAULTS, node] >= m.retire_after:
        action = RETIRE
        nodes.past[FAULTS, node], nodes.past[FRESH, node] = 0, 1
    if action == KEEP:
        if mark[tp.AGAIN] < m.of_kind[md.PERSISTS, kind]:
            _set_pending(nodes.pending, count, node, t + mark[tp.GAP_S], True)
    else:
        end = t + (mark[tp.AWAY_S] if action == REPAIR else m.retire_s)
        _send_out(m, out, r, nodes, count, t, node, end)
        if m.refaults:
            when = end + mark[tp.GAP_S] if action == REPAIR and mark[tp.BROKEN] else np.inf
            _set_pending(nodes.pending, count, node, when, False)
    if hit:
        if action != KEEP and m.evictions:
            _take_neighbours(m, out, r, nodes, count, t, node, m.evictions)
        return KEPT_NODE if action == KEEP else SWAPPED
    out.counts[r, md.IDLE_FAULTS] += 1
    _wait_longer(m, clock, count, nodes, t)
    return NOTHING


@_cold
def _burst(
    m: Model, tape: Tape, out: Outcome, r: int, clock: Floats, count: Ints, nodes: Nodes, t: float, mark: Floats
) -> int:
    first = int(mark[tp.NODE])
    pool = tape.of_run[r, tp.FIRST_MARK] + tape.of_run[r, tp.BURST_POOL] + count[BURSTS] * m.burst_nodes
    count[BURSTS] += 1
    there, idle = m.total - count[AWAY], m.total - count[AWAY] - m.nodes
    healthy, missed = 0, 1.0
    for node in range(first, first + m.burst_nodes):
        if nodes.back[node] <= t:
            # Any node may be one that does not train: the job is missed when all of these are.
            missed *= max(0.0, (idle - healthy) / (there - healthy))
            healthy += 1
    waits = clock[READY] <= t < clock[SUPPLIED]
    hit = healthy > 0 and not waits and mark[tp.CHANCE] >= missed
    if healthy == 0 or (hit and t < clock[START] and not m.exposed):
        return NOTHING
    for i in range(m.burst_nodes):
        node = first + i
        if nodes.back[node] <= t:
            end = t + tape.marks[pool + i, tp.AWAY_S]
            _send_out(m, out, r, nodes, count, t, node, end)
            if m.refaults:
                when = end + tape.marks[pool + i, tp.GAP_S] if tape.marks[pool + i, tp.BROKEN] else np.inf
                _set_pending(nodes.pending, count, node, when, False)
    if hit:
        return SWAPPED
    out.counts[r, md.IDLE_FAULTS] += healthy
    _wait_longer(m, clock, count, nodes, t)
    return NOTHING


@_cold
def _false_alarm(m: Model, out: Outcome, r: int, clock: Floats, count: Ints, nodes: Nodes, t: float, node: int) -> int:
    if clock[READY] <= t < clock[SUPPLIED] or (t < clock[START] and not m.exposed):
        return NOTHING
    if nodes.back[node] <= t:
        _send_out(m, out, r, nodes, count, t, node, t + m.verify_s)
    else:
        _take_neighbours(m, out, r, nodes, count, t, node, 1)
    return SWAPPED


@_hot
def _fail(
    m: Model,
    out: Outcome,
    r: int,
    clock: Floats,
    count: Ints,
    held: Ints,
    nodes: Nodes,
    t: float,
    kind: int,
    swap: bool,
) -> None:
    """The job is interrupted, or its restart is: lose what the tiers do not hold, and begin a restart."""
    saves, useful = count[SAVES], 0.0
    tier = int(m.of_kind[md.TIER, kind])
    _close_outage(out, r, clock, count, min(t, clock[START]))
    if t >= clock[START]:
        saves, useful = _close_life(m, out, r, clock, count, t)
        _hold(m, clock, count, held, saves, t)
        out.counts[r, md.INTERRUPTIONS] += 1
    else:
        tier = max(tier, count[NEEDED])
    source = tier
    for i in range(tier + 1, len(held)):
        if held[i] > held[source]:
            source = i
    restored = held[source]
    held[: tier + 1] = restored
    falsely = kind == m.kinds + md.FALSE_ALARM
    lost = (saves - restored) * m.interval_s + useful
    out.ledger_s[r, md.FALSE_POSITIVE if falsely else md.ROLLBACK] += lost
    out.progress[r, md.LEVEL, int(t / DAY_S) + 1] -= lost
    out.counts[r, md.FAILURES + kind] += 1
    count[SAVES], count[NEEDED], count[FALSELY] = restored, tier, falsely
    clock[FAILED], clock[DETECTED] = t, t + m.of_kind[md.DETECT_S, kind]
    clock[READY] = clock[DETECTED] + m.decide_s
    clock[SWAP] = m.replace_s if swap else 0.0
    clock[LOAD] = m.start_s + m.tiers[md.LOAD_S, source]
    clock[SUPPLIED] = _supplied(m, nodes.away, count, clock[READY])
    clock[START] = clock[SUPPLIED] + clock[SWAP] + clock[LOAD]


@_cold
def _next_startup(m: Model, tape: Tape, r: int, clock: Floats, count: Ints) -> None:
    if m.startups:
        which = tape.of_run[r, tp.FIRST_STARTUP] + count[STARTUPS] % tape.of_run[r, tp.STARTUPS_MADE]
        clock[START_FAILS] = clock[START] + tape.startup_s[which]
        count[STARTUPS] += 1


@_cold
def _finish(m: Model, out: Outcome, r: int, clock: Floats, count: Ints) -> None:
    saves, useful = count[SAVES], 0.0
    _close_outage(out, r, clock, count, min(m.horizon_s, clock[START]))
    if m.horizon_s >= clock[START]:
        saves, useful = _close_life(m, out, r, clock, count, m.horizon_s)
    out.ledger_s[r, md.PRODUCTIVE] = saves * m.interval_s + useful


# ---- time


@_hot
def _time_of(tiers: Floats, interval_s: float, saves: int) -> float:
    """Training time from a count of 0 to this one, by the schedule."""
    total = saves * interval_s
    for i in range(tiers.shape[1]):
        total += tiers[md.STEP_S, i] * (saves // int(tiers[md.PERIOD, i]))
    return total


@_hot
def _elapsed(tiers: Floats, interval_s: float, saves: int, begun: int) -> float:
    """From the begin of a life at the count `begun` to the end of the pause for the save of the count `saves`."""
    total = _time_of(tiers, interval_s, saves) - _time_of(tiers, interval_s, begun)
    for i in range(tiers.shape[1]):
        if tiers[md.WAIT_S, i] > 0.0:
            period = int(tiers[md.PERIOD, i])
            if saves // period > begun // period:
                total -= tiers[md.WAIT_S, i]
    return total


@_hot
def _saves_at(tiers: Floats, interval_s: float, age: float, begun: int) -> int:
    """Count of finished saves at an age of a life that began at the count `begun`."""
    left = age + _time_of(tiers, interval_s, begun)
    last = tiers.shape[1] - 1
    saves, waits = 0, False
    for i in range(last, -1, -1):
        number = int(left / tiers[md.SUPER_S, i] + 1e-9)
        if i < last:
            number = min(number, int(tiers[md.PERIOD, i + 1]) // int(tiers[md.PERIOD, i]) - 1)
        saves += number * int(tiers[md.PERIOD, i])
        left -= number * tiers[md.SUPER_S, i]
        waits = waits or tiers[md.WAIT_S, i] > 0.0
    saves = max(saves, begun)
    while waits and _elapsed(tiers, interval_s, saves + 1, begun) <= age:
        saves += 1
    return saves


@_hot
def _close_life(m: Model, out: Outcome, r: int, clock: Floats, count: Ints, t: float) -> tuple[int, float]:
    """Account for training up to t: the count of saves, and the useful seconds since the last one."""
    start, begun = clock[START], count[SAVES]
    age = t - start
    saves = _saves_at(m.tiers, m.interval_s, age, begun)
    elapsed = _elapsed(m.tiers, m.interval_s, saves, begun)
    since = max(0.0, age - elapsed)
    useful = min(since, m.interval_s)
    work = (saves - begun) * m.interval_s
    out.ledger_s[r, md.CHECKPOINT] += (elapsed - work) + (since - useful)
    work += useful
    first, last = int(start / DAY_S) + 1, int(t / DAY_S) + 1
    slope = work / age if age > 0.0 else 0.0
    out.progress[r, md.SLOPE, first] += slope
    out.progress[r, md.LEVEL, first] -= slope * start
    out.progress[r, md.SLOPE, last] -= slope
    out.progress[r, md.LEVEL, last] += slope * start + work
    return saves, useful


@_hot
def _hold(m: Model, clock: Floats, count: Ints, held: Ints, saves: int, t: float) -> None:
    """What each tier has for certain when a life ends at t."""
    age, begun = t - clock[START], count[SAVES]
    for i in range(len(held)):
        period, lag_s = int(m.tiers[md.PERIOD, i]), m.tiers[md.LAG_S, i]
        newest = saves // period * period
        if newest > begun and lag_s > 0.0 and _elapsed(m.tiers, m.interval_s, newest, begun) + lag_s > age:
            newest -= period
        if newest > begun:
            held[i] = newest


@_hot
def _close_outage(out: Outcome, r: int, clock: Floats, count: Ints, t: float) -> None:
    ledger = out.ledger_s[r]
    waited = max(0.0, min(t, clock[SUPPLIED]) - clock[READY])
    if waited > 0.0:
        out.counts[r, md.EXHAUSTED] += 1
    if count[FALSELY]:
        ledger[md.FALSE_POSITIVE] += t - clock[FAILED]
        return
    swapped = clock[SUPPLIED] + clock[SWAP]
    ledger[md.DETECTION] += min(t, clock[DETECTED]) - clock[FAILED]
    ledger[md.DECISION] += max(0.0, min(t, clock[READY]) - clock[DETECTED])
    ledger[md.NO_SPARE] += waited
    ledger[md.REPLACEMENT] += max(0.0, min(t, swapped) - clock[SUPPLIED])
    ledger[md.RESTART] += max(0.0, min(t, clock[START]) - swapped)


# ---- nodes


@_hot
def _expire(away: Floats, count: Ints, t: float) -> None:
    """Forget the nodes that are back."""
    i = 0
    while i < count[AWAY]:
        if away[END, i] <= t:
            count[AWAY] -= 1
            away[END, i], away[OF_BLOCK, i] = away[END, count[AWAY]], away[OF_BLOCK, count[AWAY]]
        else:
            i += 1


@_hot
def _away_in(m: Model, away: Floats, count: Ints, block: int) -> int:
    number = int(count[AWAY])
    if m.by_block:
        number = 0
        for i in range(count[AWAY]):
            if away[OF_BLOCK, i] == block:
                number += 1
    return number


@_hot
def _send_out(m: Model, out: Outcome, r: int, nodes: Nodes, count: Ints, t: float, node: int, end: float) -> None:
    nodes.back[node] = end
    if end > t:
        nodes.away[END, count[AWAY]] = end
        nodes.away[OF_BLOCK, count[AWAY]] = m.places[md.BLOCK, node]
        count[AWAY] += 1
        last = out.hours.shape[1] - 1
        out.hours[r, min(last, math.ceil(t / md.HOUR_S))] += 1
        out.hours[r, min(last, math.ceil(min(end, m.horizon_s + md.HOUR_S) / md.HOUR_S))] -= 1
    out.counts[r, md.MOST_DOWN] = max(out.counts[r, md.MOST_DOWN], count[AWAY])


@_cold
def _take_neighbours(
    m: Model, out: Outcome, r: int, nodes: Nodes, count: Ints, t: float, node: int, wanted: int
) -> None:
    """So many healthy nodes next to this one go out until they are found to be healthy."""
    first, number, place = m.places[md.NEAR_FIRST, node], m.places[md.NEAR_COUNT, node], m.places[md.NEAR_PLACE, node]
    for i in range(1, number + 1):
        near = first + (place + i) % number
        if wanted > 0 and nodes.back[near] <= t:
            _send_out(m, out, r, nodes, count, t, near, t + m.verify_s)
            wanted -= 1


@_cold
def _supplied(m: Model, away: Floats, count: Ints, ready: float) -> float:
    """When each block has the nodes that the job needs of it, `ready` at the earliest."""
    number = count[AWAY]
    if number <= m.block_spares:
        return ready
    when = ready
    for i in range(number):
        later = 0
        for j in range(number):
            if away[OF_BLOCK, j] == away[OF_BLOCK, i]:
                later += away[END, j] > away[END, i] or (away[END, j] == away[END, i] and j < i)
        # As many as there are spares may still be away when this one is back.
        if later == m.block_spares:
            when = max(when, away[END, i])
    return when


@_cold
def _wait_longer(m: Model, clock: Floats, count: Ints, nodes: Nodes, t: float) -> None:
    """A node that did not train has failed: a job that waits for one may have to wait for longer."""
    if t < clock[SUPPLIED]:
        clock[SUPPLIED] = _supplied(m, nodes.away, count, clock[READY])
        start = clock[SUPPLIED] + clock[SWAP] + clock[LOAD]
        clock[START_FAILS] += start - clock[START]
        clock[START] = start


# ---- faults that follow


@_hot
def _soonest(pending: Floats, number: int, before: float) -> int:
    """The first of them, -1 when none is before that time."""
    which = -1
    for i in range(number):
        if pending[WHEN, i] < before:
            which, before = i, pending[WHEN, i]
    return which


@_hot
def _drop_pending(pending: Floats, count: Ints, which: int) -> None:
    count[PENDING] -= 1
    for row in range(3):
        pending[row, which] = pending[row, count[PENDING]]


@_cold
def _set_pending(pending: Floats, count: Ints, node: int, time_s: float, kept: bool) -> None:
    """This node, and no earlier plan for it, will fail at that time; never where it is infinite."""
    for i in range(count[PENDING]):
        if pending[WHICH, i] == node:
            _drop_pending(pending, count, i)
            break
    if time_s < np.inf:
        last = count[PENDING]
        pending[WHEN, last], pending[WHICH, last], pending[KEPT, last] = time_s, node, kept
        count[PENDING] += 1
