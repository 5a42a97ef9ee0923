"""Error budget of a goodput objective, as site reliability engineers count it: what may be lost, what was, and how fast.

The indicator is job ETTR without queue, weighted by GPUs. With an objective of 0.9 a tenth of the GPU-time may be lost. A burn rate
of 1 spends exactly the budget; 2 spends it twice as fast as the objective allows. The budget is that of the time accounted so far.
"""

from __future__ import annotations

from collections.abc import Sequence

import msgspec

from keepstep.goodput.losses import NS_PER_H, Piece
from keepstep.records.codec import rfc3339
from keepstep.records.errors import ConfigError

RECENT_SHARE = 7
"""The recent burn rate is that of the last seventh of the window: of the last day of a week."""


class SloReport(msgspec.Struct, frozen=True, kw_only=True):
    """GPU-hours and rates. `runs_left_out`: those that report no steps, or whose size is unknown."""

    objective: float
    attained: float | None
    total_gpu_h: float
    budget_gpu_h: float
    spent_gpu_h: float
    left_gpu_h: float
    """Negative when more was lost than the objective allows."""
    left_share: float | None
    """Of the budget."""
    burn_rate: float | None
    recent_since: str
    recent_burn_rate: float | None
    """None without GPU-time in the last seventh of the window."""
    budget_usd: float | None = None
    spent_usd: float | None = None
    runs_left_out: int = 0


def check_objective(objective: float, where: str = "--slo") -> float:
    """The objective. Raises ConfigError naming `where` unless it is above 0 and below 1."""
    if not 0.0 < objective < 1.0:
        raise ConfigError(f"{where} {objective:g}: give a share above 0 and below 1, such as 0.9")
    return objective


def slo_report(
    found: Sequence[Piece],
    begin_ns: int,
    end_ns: int,
    objective: float,
    *,
    price: float | None = None,
    runs_left_out: int = 0,
) -> SloReport:
    """The budget of the pieces of all runs that count, clipped to the window already. Raises ConfigError (objective)."""
    check_objective(objective)
    recent_ns = end_ns - (end_ns - begin_ns) // RECENT_SHARE
    total, spent = _gpu_ns(found, begin_ns)
    recent_total, recent_spent = _gpu_ns(found, recent_ns)
    allowed = 1.0 - objective
    total_h, spent_h = total / NS_PER_H, spent / NS_PER_H
    budget_h = allowed * total_h
    return SloReport(
        objective=objective,
        attained=1.0 - spent / total if total else None,
        total_gpu_h=total_h,
        budget_gpu_h=budget_h,
        spent_gpu_h=spent_h,
        left_gpu_h=budget_h - spent_h,
        left_share=(budget_h - spent_h) / budget_h if total else None,
        burn_rate=spent / total / allowed if total else None,
        recent_since=rfc3339(recent_ns),
        recent_burn_rate=recent_spent / recent_total / allowed if recent_total else None,
        budget_usd=None if price is None else budget_h * price,
        spent_usd=None if price is None else spent_h * price,
        runs_left_out=runs_left_out,
    )


def _gpu_ns(found: Sequence[Piece], from_ns: int) -> tuple[int, int]:
    """GPU-nanoseconds since then without queue, and those of them that were lost."""
    total = spent = 0
    for piece in found:
        gpu_ns = max(0, piece.end_ns - max(piece.begin_ns, from_ns)) * (piece.gpus or 0)
        if piece.name != "queue":
            total += gpu_ns
            spent += 0 if piece.name == "productive" else gpu_ns
    return total, spent
