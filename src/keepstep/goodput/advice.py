"""The checkpoint interval that measurements and a failure rate recommend, with everything it was computed from."""

from __future__ import annotations

import msgspec

from keepstep.goodput.interval import (
    Flatness,
    GoodputForms,
    Intervals,
    exact,
    flatness,
    goodput_forms,
    intervals,
    optimal_s,
)
from keepstep.goodput.rates import RateEstimate, mttf_s

MIN_BLOCKS = 4.0
"""An interval is at least so many times the blocking time: saving takes at most a fifth of the time, however bad the rate looks."""
MIN_INTERVAL_S = 10.0
MAX_INTERVAL_S = 4 * 3600.0
"""Default bounds: below, storage is written to all the time, which the formulas know nothing of; above, a failure nobody foresaw
costs half a working day."""


class IntervalAdvice(msgspec.Struct, frozen=True, kw_only=True):
    """`keepstep.interval/1`. Times in seconds; formulas and their sources are in `keepstep.goodput.interval`."""

    schema: str = "keepstep.interval/1"
    advised_s: float
    """Useful training between two saves: the exact optimum within the bounds."""
    bound: str
    """Which bound took effect: "", "min" or "max"."""
    min_s: float
    max_s: float
    block_s: float
    persist_lag_s: float
    restart_s: float
    nodes: int
    rate: RateEstimate
    mttf_s: float
    mttf_interval_s: tuple[float, float]
    """At the high and at the low end of the rate's interval."""
    interval_s: Intervals
    optimal_interval_s: tuple[float, float]
    """The exact optimum at the high and at the low end of the rate's interval."""
    goodput: GoodputForms
    """At `advised_s`."""
    goodput_at: dict[str, GoodputForms]
    """At the interval of each formula."""
    goodput_interval: tuple[float, float]
    """Exact goodput at `advised_s`, at the high and at the low end of the rate's interval."""
    flatness: list[Flatness]
    origins: dict[str, str] = {}
    """Input -> where its value is from, when somebody said so."""
    power_ramp_s: float = 0.0
    stagger_s: float = 0.0
    smoothing_cost_points: float = 0.0
    """What these two take off the exact goodput at `advised_s`, in points."""


def advise(
    rate: RateEstimate,
    nodes: int,
    block_s: float,
    persist_lag_s: float,
    *,
    restart_s: float = 0.0,
    min_s: float = MIN_INTERVAL_S,
    max_s: float = MAX_INTERVAL_S,
) -> IntervalAdvice:
    """Compute everything. `min_s` is raised to MIN_BLOCKS times `block_s`, and goes before `max_s`.

    Raises ValueError for negative times.
    """
    mttf = mttf_s(rate.rate_per_node_day, nodes)
    short, long = mttf_s(rate.high, nodes), mttf_s(rate.low, nodes)
    all_s = intervals(block_s, mttf, persist_lag_s)
    least_s = max(min_s, MIN_BLOCKS * block_s)
    advised_s = max(least_s, min(all_s.optimal, max_s))
    at = (block_s, mttf, restart_s, persist_lag_s)
    return IntervalAdvice(
        advised_s=advised_s,
        bound="" if advised_s == all_s.optimal else "min" if advised_s > all_s.optimal else "max",
        min_s=least_s,
        max_s=max_s,
        block_s=block_s,
        persist_lag_s=persist_lag_s,
        restart_s=restart_s,
        nodes=nodes,
        rate=rate,
        mttf_s=mttf,
        mttf_interval_s=(short, long),
        interval_s=all_s,
        optimal_interval_s=(optimal_s(block_s, short, persist_lag_s), optimal_s(block_s, long, persist_lag_s)),
        goodput=goodput_forms(advised_s, *at),
        goodput_at={name: goodput_forms(tau_s, *at) for name, tau_s in msgspec.structs.asdict(all_s).items()},
        goodput_interval=(
            exact(advised_s, block_s, short, restart_s, persist_lag_s),
            exact(advised_s, block_s, long, restart_s, persist_lag_s),
        ),
        flatness=flatness(*at),
    )
