"""Settings of a launcher that follow from the failure rate: the shortest hang limit, and how many spares to wait for.

Both have bounds that no rate moves. What a run saw of failures is weighed with its prior as everywhere (`rates.estimate_rate`).
"""

from __future__ import annotations

from functools import lru_cache
from typing import Any

import msgspec

from keepstep.goodput.rates import DAY_S, TYPICAL_DISPERSION, RateEstimate, estimate_rate, parse_prior, published_prior
from keepstep.goodput.spares import choose, mean_down
from keepstep.records.cycle import FailureHistory

HANG_SHARE = 0.13
"""Share of failures that are hangs: 5,948 implicit of 44,184 in 778,135 jobs (ByteRobust, arXiv 2509.16293)."""
HANG_COST = 0.001
"""A limit is not made shorter than what costs this share of time: the gain would be less than what one false alarm takes."""
HANG_LEAST_S = 60.0
HANG_MOST_S = 300.0
"""Bounds of the floor of a learned hang limit. The upper one holds without advice: an evaluation or a compilation between steps
looks like a hang to a limit that was learned from steps."""
REPAIR_S = DAY_S
"""Mean time to repair a node when nobody says."""


class Advised(msgspec.Struct, frozen=True, kw_only=True):
    """One setting that follows the plan: its name, the value, and why."""

    what: str
    value: float
    reason: str

    def attrs(self, before: float | None) -> dict[str, Any]:
        """As attributes of the mark `advised`."""
        return {"what": self.what, "value": self.value, "before": before, "reason": self.reason}


class Source(msgspec.Struct, frozen=True, kw_only=True):
    """What advice starts from before a run has seen anything."""

    prior: str | None = None
    """As `RunConfig.failure_prior`."""
    repair_s: float = REPAIR_S


def run_rate(source: Source, history: FailureHistory | None) -> RateEstimate:
    """Failure rate of a run by its prior and what it saw. Raises ConfigError for a bad prior."""
    prior = (
        published_prior("unknown") if source.prior is None else parse_prior(source.prior, "default", "--failure-prior")
    )
    failures, node_s = (history.failures, history.node_s) if history is not None else (0, 0.0)
    return estimate_rate(prior, failures, node_s / DAY_S, dispersion=TYPICAL_DISPERSION)


def hang_floor_s(mttf_s: float, share: float = HANG_SHARE) -> float:
    """How short a hang limit should be made at most: below, waiting costs less than HANG_COST of time; within the bounds.

    `share`: of failures that are hangs. Two digits, so that a rate that moves a little is no new advice.
    """
    wanted_s = HANG_COST * mttf_s / share if share > 0.0 else HANG_MOST_S
    return float(f"{min(HANG_MOST_S, max(HANG_LEAST_S, wanted_s)):.2g}")


@lru_cache(maxsize=32)
def hang_floor(source: Source, history: FailureHistory | None, nodes: int) -> Advised:
    """Floor of a learned hang limit, in seconds: `HANG_COST` of time is lost to waiting for hangs at limit x HANG_SHARE / MTTF."""
    rate = run_rate(source, history)
    mttf_s = rate.mttf_s(nodes)
    wanted_s = HANG_COST * mttf_s / HANG_SHARE
    return Advised(
        what="hang_floor_s",
        value=hang_floor_s(mttf_s),
        reason=(
            f"{nodes} nodes at {1000.0 * rate.rate_per_node_day:.3g} failures per 1000 node-days fail every {mttf_s:.3g} s; with "
            f"{100.0 * HANG_SHARE:.0f} % of them hangs, {wanted_s:.3g} s of waiting cost {100.0 * HANG_COST:g} % of time; "
            f"bounds {HANG_LEAST_S:g} and {HANG_MOST_S:g} s"
        ),
    )


@lru_cache(maxsize=32)
def spares_to_wait_for(source: Source, history: FailureHistory | None, nodes: int, most: int) -> Advised:
    """How many of at most `most` spares a job of so many nodes should begin with: the best by paid goodput."""
    rate = run_rate(source, history)
    may_be = [
        (1.0, mean_down(nodes, each, 1.0, source.repair_s)) for each in (rate.low, rate.rate_per_node_day, rate.high)
    ]
    best = choose(may_be, nodes, may_be[1][1], at_most=most).best.spares
    return Advised(
        what="spares",
        value=float(best),
        reason=(
            f"{nodes} nodes at {1000.0 * rate.rate_per_node_day:.3g} failures per 1000 node-days "
            f"({1000.0 * rate.low:.2g} to {1000.0 * rate.high:.3g}) and {source.repair_s / 3600.0:.3g} h of repair: "
            f"of at most {most} that were asked for {best} are best, by goodput of all nodes that are paid for"
        ),
    )
