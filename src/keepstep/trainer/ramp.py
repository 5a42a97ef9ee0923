"""The first steps of a cycle, with pauses between them so that power rises slowly (`--power-ramp`); off unless asked for."""

from __future__ import annotations

import sys
from collections.abc import Callable, Mapping
from time import monotonic_ns, sleep

from keepstep.goodput.ramp import check_ramp, delay_cost_points, ramp_loss_s, ramp_pause_s
from keepstep.records import frames
from keepstep.records import page as layout
from keepstep.records.errors import ChannelError
from keepstep.trainer.page import Words

SLICE_S = 1.0
"""A pause is a sign of life on the progress page at least so often: it is no hang."""


class Ramp:
    """The ramp of one cycle. It begins when the first step is complete, which is when collectives have brought all ranks
    together."""

    def __init__(self, ramp_s: float) -> None:
        self.ramp_s = ramp_s

    def pause(self, words: Words, share: Callable[[float], float]) -> bool:
        """Pause before the next step; False when the ramp is over.

        `share` makes the pause of the rank that comes first everybody's: ranks that paused differently would wait for one
        another in a collective, at full power. A side channel that fails ends the ramp: training matters more.
        """
        since_s = (monotonic_ns() - words[layout.W_FIRST_DONE_NS]) / 1e9
        busy_s = max(0, words[layout.W_COMPLETED_NS] - words[layout.W_BEAT_NS]) / 1e9
        try:
            pause_s = share(ramp_pause_s(since_s, busy_s, self.ramp_s))
        except ChannelError:
            return False
        end_ns = monotonic_ns() + round(pause_s * 1e9)
        while (left_s := (end_ns - monotonic_ns()) / 1e9) > 0:
            sleep(min(SLICE_S, left_s))
            words[layout.W_BEAT_NS] = monotonic_ns()
        return pause_s > 0


def ramp_from(env: Mapping[str, str]) -> Ramp | None:
    """The ramp that KEEPSTEP_POWER_RAMP_S asks for, None without one. Raises ConfigError for a bad value."""
    ramp_s = check_ramp(env.get(frames.ENV_POWER_RAMP_S) or "0", frames.ENV_POWER_RAMP_S)
    return Ramp(ramp_s) if ramp_s else None


def ramp_cost(ramp_s: float, mttf_s: float) -> str:
    """What a ramp costs, for the log."""
    loss_s = ramp_loss_s(ramp_s)
    return (
        f"power ramp over {ramp_s:g} s: every start of the ranks loses {loss_s:.3g} s of training, "
        f"{_points(loss_s, mttf_s)}"
    )


def stagger_cost(stagger_s: float, mttf_s: float) -> str:
    """What staggered writes cost, for the log: a checkpoint is durable when its last rank has written."""
    return (
        f"writes staggered over {stagger_s:g} s: checkpoints are durable that much later, {_points(stagger_s, mttf_s)}"
    )


def _points(delay_s: float, mttf_s: float) -> str:
    points = delay_cost_points(delay_s, mttf_s)
    return f"at most {points:.2g} points of goodput with a failure every {mttf_s / 3600:.3g} h"


def say_ramp_cost(ramp_s: float) -> None:
    """Print on stderr what the ramp costs at the failure rate known when the cycle begins. Raises ConfigError for a bad prior."""
    from keepstep.trainer.cadence import open_cadence

    print(f"keepstep: {ramp_cost(ramp_s, open_cadence(0.0).mttf_s(0.0))}", file=sys.stderr, flush=True)
