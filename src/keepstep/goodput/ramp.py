"""Power that rises slowly: how long to pause between the first steps, when ranks begin to write, and what both cost.

Where power follows the work of thousands of GPUs, training that starts everywhere at once is a step of many megawatts. A ramp
lets the share of time at work rise in a straight line, from RAMP_FLOOR when the first step is complete to 1 after `ramp_s` seconds.
"""

from __future__ import annotations

import math

from keepstep.goodput.interval import exact
from keepstep.records.errors import ConfigError

RAMP_FLOOR = 0.25
"""Share of time at work when the ramp begins: no pause is longer than three steps."""


def check_ramp(text: str, where: str) -> float:
    """Seconds of a ramp; 0: none. `where` names the flag or variable in errors. Raises ConfigError."""
    try:
        ramp_s = float(text)
    except ValueError:
        ramp_s = math.nan
    if not 0.0 <= ramp_s < math.inf:
        raise ConfigError(f"{where} {text!r}: give the seconds over which power rises, 0 for no ramp")
    return ramp_s


def ramp_pause_s(since_s: float, busy_s: float, ramp_s: float) -> float:
    """Pause before the next step, `since_s` after the first one was complete, when a step takes `busy_s`; 0 when the ramp is over.

    At most a quarter of what is left of the ramp: the first step, which compiles, says little about the others.
    """
    if since_s >= ramp_s:
        return 0.0
    share = RAMP_FLOOR + (1.0 - RAMP_FLOOR) * max(0.0, since_s) / ramp_s
    return min(busy_s * (1.0 / share - 1.0), (ramp_s - since_s) / 4.0)


def ramp_loss_s(ramp_s: float) -> float:
    """Seconds of training that one ramp costs: the area above the line, for steps short beside it."""
    return ramp_s * (1.0 - RAMP_FLOOR) / 2.0


def delay_cost_points(delay_s: float, mttf_s: float) -> float:
    """Points of goodput lost, at most, when every restart or every durable save is so much later: 100 (1 - e^(-delay / MTTF)).

    Restart time and persist lag are both a factor e^(-t / MTTF) of the exact goodput, which is at most 1.
    """
    return -100.0 * math.expm1(-delay_s / mttf_s)


def write_delay_s(rank: int, world_size: int, stagger_s: float) -> float:
    """When `rank` begins to write what it staged, in seconds after its staging: ranks are spread evenly over `stagger_s`."""
    return stagger_s * rank / world_size


def smoothing_cost_points(
    tau_s: float,
    block_s: float,
    mttf_s: float,
    restart_s: float,
    persist_lag_s: float,
    *,
    ramp_s: float = 0.0,
    stagger_s: float = 0.0,
) -> float:
    """Points of goodput that a ramp and staggered writes cost: the ramp's loss counts as restart time, the stagger as persist lag.

    Times as in `interval`. Good while the ramp is short beside the mean time to failure.
    """
    plain = exact(tau_s, block_s, mttf_s, restart_s, persist_lag_s)
    smooth = exact(tau_s, block_s, mttf_s, restart_s + ramp_loss_s(ramp_s), persist_lag_s + stagger_s)
    return 100.0 * (plain - smooth)
