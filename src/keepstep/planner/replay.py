"""A failure trace replayed against one job: the goodput that its faults, in their order, would have left; and what formulas say.

Every fault is taken to interrupt the job, wherever in the fleet it was. When a trace is rescaled to a shorter mean time between
faults, its bursts shrink along with the gaps between them.
"""

from __future__ import annotations

import itertools
import math
import random
from collections.abc import Callable, Sequence
from typing import Literal

import msgspec

from keepstep.goodput.interval import exact, exact_restart_immune
from keepstep.planner.scenario import TraceFault
from keepstep.planner.traces import DAY_S, Fault, FaultTrace

Rule = Literal["immune", "exposed"]
"""What a fault during a restart does: nothing, or the restart begins anew."""


class Replay(msgspec.Struct, frozen=True, kw_only=True):
    """One trace under one job. Goodput is the share of wall-clock that became lasting training."""

    goodput: float
    noise: float
    """Standard error of `goodput` from where within an interval the interruptions happen to fall."""
    rule: Rule
    faults: int
    interruptions: int
    """Faults that ended training; the others fell into a restart."""
    mttf_faults_s: float
    """Wall-clock between faults."""
    mttf_s: float
    """Mean time that training lasted until a fault interrupted it: the M of the formulas. NaN when it never began."""
    predicted: float
    """By the exact formula of the rule at `mttf_s`."""
    predicted_from_faults: float
    """By the same formula at `mttf_faults_s`: what counting faults instead of interruptions gives."""
    predicted_given_downtime: float
    """At `mttf_s`, with the time in restarts as it was in the replay: what is left of its error is the shape of the gaps."""


def replay_goodput(
    begins_s: Sequence[float],
    tau_s: float,
    block_s: float,
    restart_s: float = 0.0,
    *,
    mttf_s: float | None = None,
    persist_lag_s: float = 0.0,
    rule: Rule = "exposed",
) -> Replay:
    """Replay faults that begin at these times, in order, from the first to the last.

    `mttf_s` rescales the mean gap between faults, those of gap 0 included; None leaves the trace as it is. The first fault opens
    the first restart and the last one closes the replay, so that the wall-clock is a whole number of gaps and no phase of the
    begin has to be drawn: a repetition of the trace would give the same. Training that lasts for X after a restart keeps
    `tau_s` for each save that became durable, in the order described at `goodput.interval.exact`.

    Raises ValueError for fewer than two times, an order that is not ascending, no time at all between the first and the last, an
    interval of 0 or a negative time.
    """
    if len(begins_s) < 2 or not tau_s > 0.0 or min(block_s, restart_s, persist_lag_s) < 0.0:
        raise ValueError(
            f"replay_goodput: {len(begins_s)} faults, tau {tau_s} s, other times "
            f"{(block_s, restart_s, persist_lag_s)} s: two faults, tau above 0, others from 0"
        )
    length_s = begins_s[-1] - begins_s[0]
    if not length_s > 0.0 or any(b < a for a, b in itertools.pairwise(begins_s)):
        raise ValueError(f"replay_goodput: times must ascend; the first and last are {length_s:g} s apart")
    scale = 1.0 if mttf_s is None else mttf_s * (len(begins_s) - 1) / length_s
    lives_s = _lives(begins_s, scale, restart_s, rule)
    period_s = max(tau_s, persist_lag_s) + block_s
    first_s = tau_s + block_s + persist_lag_s
    kept_s = tau_s * sum(_saves(life_s, first_s, period_s) for life_s in lives_s)
    wall_s = length_s * scale
    up_s = math.fsum(lives_s)
    # The place of a fault within an interval is as good as uniform: standard deviation 1 / sqrt(12) of an interval each.
    noise = tau_s * math.sqrt(len(lives_s) / 12.0) / wall_s
    faults_s = wall_s / (len(begins_s) - 1)
    lasted_s = up_s / len(lives_s) if lives_s else math.nan
    formula = exact if rule == "exposed" else exact_restart_immune
    job = (restart_s, persist_lag_s)
    alive = exact(tau_s, block_s, lasted_s, 0.0, persist_lag_s) if up_s > 0.0 else 0.0
    return Replay(
        goodput=kept_s / wall_s,
        noise=noise,
        rule=rule,
        faults=len(begins_s),
        interruptions=len(lives_s),
        mttf_faults_s=faults_s,
        mttf_s=lasted_s,
        predicted=formula(tau_s, block_s, lasted_s, *job) if up_s > 0.0 else 0.0,
        predicted_from_faults=formula(tau_s, block_s, faults_s, *job),
        predicted_given_downtime=alive * up_s / wall_s,
    )


def _lives(begins_s: Sequence[float], scale: float, restart_s: float, rule: Rule) -> list[float]:
    """How long training lasted each time: from the end of a restart to the fault that interrupts it."""
    lives_s: list[float] = []
    zero_s = begins_s[0]
    ready_s = restart_s
    for begin_s in begins_s[1:]:
        at_s = (begin_s - zero_s) * scale
        if at_s >= ready_s:
            lives_s.append(at_s - ready_s)
            ready_s = at_s + restart_s
        elif rule == "exposed":
            ready_s = at_s + restart_s
    return lives_s


def _saves(life_s: float, first_s: float, period_s: float) -> int:
    """Saves that are durable after training and saving for so long: the first at `first_s`, one each period after it."""
    return 0 if life_s < first_s else 1 + math.floor((life_s - first_s) / period_s)


def to_scenario_faults(
    trace: FaultTrace, kind_of: Callable[[Fault], int | None] | None = None, *, nodes: int | None = None, seed: int = 0
) -> tuple[TraceFault, ...]:
    """The trace as a simulation takes it; its length is `trace.days`.

    `kind_of` gives the index of a fault's kind among the job's, None to leave it out; without it all are of kind 0. Nodes are
    numbered from 0 to `nodes` (those of the trace): where the trace numbers them so itself it is kept, since neighbours may fail
    together; other names get numbers at random, so that healthy nodes are spread over the whole cluster. With fewer nodes than the
    trace watched, faults of the others are left out; the rate per node stays. Raises ValueError for more nodes than that.
    """
    wanted = trace.nodes if nodes is None else nodes
    if not 1 <= wanted <= trace.nodes:
        raise ValueError(f"to_scenario_faults: {wanted} nodes; the trace watched {trace.nodes}")
    number = _numbers(trace, seed)
    last_s = trace.days * DAY_S
    faults = []
    for fault in trace.faults:
        kind = 0 if kind_of is None else kind_of(fault)
        if kind is not None and number[fault.node] < wanted:
            begin_s = min(fault.begin_s, last_s)  # days are rounded: the last fault may begin a digit after them
            faults.append(TraceFault(t_s=begin_s, node=number[fault.node], down_s=fault.down_s, kind=kind))
    return tuple(faults)


def _numbers(trace: FaultTrace, seed: int) -> dict[str, int]:
    names = sorted({fault.node for fault in trace.faults})
    if all(name.isdecimal() and name == str(int(name)) and int(name) < trace.nodes for name in names):
        return {name: int(name) for name in names}
    return dict(zip(names, random.Random(seed).sample(range(trace.nodes), len(names)), strict=True))
