"""How long to train between checkpoints, and the goodput that follows: the closed forms, each with its range of validity.

Symbols in every function, all in seconds: `tau_s` useful training between two saves (from the end of one save's blocking part to
the begin of the next save); `block_s` time that training stands still for a save; `mttf_s` mean time between failures of the whole
job; `restart_s` from a failure to training again (detection, decision, replacement, start, load); `persist_lag_s` from the end of
a save's blocking part until it is durable. Failures are a Poisson process.

Every function raises ValueError when a time is negative or not finite, or `mttf_s` is not positive and finite.
"""

from __future__ import annotations

import math

import msgspec

from keepstep.goodput.special import one_plus_w0

FLATNESS_FACTORS = (0.5, 1.5, 2.0, 4.0)


def _check(mttf_s: float, *times_s: float) -> None:
    if not 0.0 < mttf_s < math.inf or any(not 0.0 <= t < math.inf for t in times_s):
        raise ValueError(f"times {times_s} s and mean time to failure {mttf_s} s: need finite times >= 0 and MTTF > 0")


# ---- the interval


def young_s(block_s: float, mttf_s: float) -> float:
    """Young's interval sqrt(2 d M). First order: 1.5 % too long at d/M = 0.001, 17 % at 0.1, 68 % at 1.

    J. W. Young, "A first order approximation to the optimum checkpoint interval", CACM 17(9), 1974.
    """
    _check(mttf_s, block_s)
    return math.sqrt(2.0 * block_s * mttf_s)


def daly_s(block_s: float, mttf_s: float) -> float:
    """Daly's first order sqrt(2 d M) - d, at least 0. 0.8 % too short at d/M = 0.001, 9 % at 0.1, useless from 0.5 on.

    J. T. Daly, "A higher order estimate of the optimum checkpoint interval for restart dumps", FGCS 22(3), 2006.
    """
    return max(0.0, young_s(block_s, mttf_s) - block_s)


def daly_higher_order_s(block_s: float, mttf_s: float) -> float:
    """Daly's higher order sqrt(2dM) (1 + sqrt(d/2M)/3 + (d/2M)/9) - d, and M from d = 2M on. Same paper.

    Within 0.1 % of the optimum up to d/M = 0.1, 2 % at 1, 6 % at 2.
    """
    _check(mttf_s, block_s)
    if block_s >= 2.0 * mttf_s:
        return mttf_s
    half = block_s / (2.0 * mttf_s)
    return math.sqrt(2.0 * block_s * mttf_s) * (1.0 + math.sqrt(half) / 3.0 + half / 9.0) - block_s


def optimal_s(block_s: float, mttf_s: float, persist_lag_s: float = 0.0) -> float:
    """The exact optimum for Poisson failures, M (1 + W0(-exp(-1 - d/M))), for all d and M; the time of a restart does not move it.

    It maximises tau / (e^((tau + d) / M) - 1), hence `exact` and `exact_restart_immune` alike. A persist lag P takes the same
    factor e^(-P/M) off every interval and does not move it either, unless it is longer: with one save in flight the next one
    waits until the last is durable, and training longer is better than waiting, up to M. Form with Lambert's W: Bougeret,
    Casanova, Rabie, Robert, Vivien, "Checkpointing strategies for parallel jobs", SC 2011.
    """
    _check(mttf_s, block_s, persist_lag_s)
    # -exp(-1 - d/M) is (gap - 1) / e with this gap, which keeps its digits where d is small beside M.
    return max(mttf_s * one_plus_w0(-math.expm1(-block_s / mttf_s)), min(persist_lag_s, mttf_s))


# ---- goodput


def exact(tau_s: float, block_s: float, mttf_s: float, restart_s: float = 0.0, persist_lag_s: float = 0.0) -> float:
    """Expected share of wall-clock that becomes lasting training, failures also hitting restarts. Exact for Poisson failures.

    tau e^(-(R + P) / M) / (M (e^((tau + d) / M) - 1)) for tau >= P.

    Why: failures come M apart on average, and e^(-R/M) of them are followed by a restart that reaches training. A life that
    trains for X, exponential with mean M, leaves the work of its last durable save behind. The first save stops blocking at
    tau + d, each further one a period L = max(tau, P) + d later, since it waits for the one in flight; each is durable P after
    that. The sum over k of P(X >= tau + d + (k - 1) L + P) is e^(-(tau + d + P)/M) / (1 - e^(-L/M)). What is redone is thus the
    time since the last *durable* save. A failure ends the write of a save that is not durable yet; what outlives the ranks
    belongs into a shorter P.
    """
    return math.exp(-restart_s / mttf_s) * _kept(tau_s, block_s, mttf_s, restart_s, persist_lag_s) / mttf_s


def exact_restart_immune(
    tau_s: float, block_s: float, mttf_s: float, restart_s: float = 0.0, persist_lag_s: float = 0.0
) -> float:
    """The same when nothing fails during a restart: tau e^(-P/M) / ((M + R) (e^(L/M) - 1)). An upper bound of `exact`."""
    return _kept(tau_s, block_s, mttf_s, restart_s, persist_lag_s) / (mttf_s + restart_s)


def _kept(tau_s: float, block_s: float, mttf_s: float, restart_s: float, persist_lag_s: float) -> float:
    """Mean seconds of training that one life leaves behind in durable saves."""
    _check(mttf_s, tau_s, block_s, restart_s, persist_lag_s)
    period_s = max(tau_s, persist_lag_s) + block_s
    first = math.exp(-(tau_s + block_s + persist_lag_s) / mttf_s)
    if period_s == 0.0:  # saves that cost nothing, all the time: nothing is ever lost
        return mttf_s
    return tau_s * first / -math.expm1(-period_s / mttf_s)


def first_order(
    tau_s: float, block_s: float, mttf_s: float, restart_s: float = 0.0, persist_lag_s: float = 0.0
) -> float:
    """1 - d/tau - (tau/2 + R + P) / M: the sum of small losses. Within a point only for d/M <= 0.001 and R/M <= 0.1, or
    d/M <= 0.01 and R/M <= 0.02; too low elsewhere, below zero for large jobs. -inf at tau = 0 with d > 0."""
    _check(mttf_s, tau_s, block_s, restart_s, persist_lag_s)
    saving = 0.0 if block_s == 0.0 else block_s / tau_s if tau_s > 0.0 else math.inf
    return 1.0 - saving - (tau_s / 2.0 + restart_s + persist_lag_s) / mttf_s


def meta(tau_s: float, block_s: float, mttf_s: float, restart_s: float = 0.0, persist_lag_s: float = 0.0) -> float:
    """(1 - (tau/2 + R + P) / M) / (1 + d/tau): Meta's expected ETTR without queue. Within a point for d/M <= 0.03 and R/M <= 0.1.

    Kokolis et al., "Revisiting reliability in large-scale machine learning research clusters", arXiv 2410.21680; P is added here.
    """
    _check(mttf_s, tau_s, block_s, restart_s, persist_lag_s)
    if tau_s == 0.0 and block_s > 0.0:
        return 0.0
    alive = 1.0 - (tau_s / 2.0 + restart_s + persist_lag_s) / mttf_s
    return alive / (1.0 + (block_s / tau_s if block_s else 0.0))


class Intervals(msgspec.Struct, frozen=True, kw_only=True):
    """The interval by every formula, in seconds of training between saves."""

    young: float
    daly: float
    daly_higher_order: float
    optimal: float


class GoodputForms(msgspec.Struct, frozen=True, kw_only=True):
    """Expected goodput at one interval by every formula; `exact` is the one to believe, the others are cross-checks."""

    exact: float
    exact_restart_immune: float
    first_order: float
    meta: float


class Flatness(msgspec.Struct, frozen=True, kw_only=True):
    """What an interval of `factor` times the optimum costs, in points of goodput (hundredths), by `exact`."""

    factor: float
    interval_s: float
    cost_points: float


def intervals(block_s: float, mttf_s: float, persist_lag_s: float = 0.0) -> Intervals:
    """All formulas side by side; only `optimal` knows of the persist lag."""
    return Intervals(
        young=young_s(block_s, mttf_s),
        daly=daly_s(block_s, mttf_s),
        daly_higher_order=daly_higher_order_s(block_s, mttf_s),
        optimal=optimal_s(block_s, mttf_s, persist_lag_s),
    )


def goodput_forms(
    tau_s: float, block_s: float, mttf_s: float, restart_s: float = 0.0, persist_lag_s: float = 0.0
) -> GoodputForms:
    """All formulas at `tau_s` side by side."""
    at = (tau_s, block_s, mttf_s, restart_s, persist_lag_s)
    return GoodputForms(
        exact=exact(*at), exact_restart_immune=exact_restart_immune(*at), first_order=first_order(*at), meta=meta(*at)
    )


def flatness(block_s: float, mttf_s: float, restart_s: float = 0.0, persist_lag_s: float = 0.0) -> list[Flatness]:
    """How much is lost by half, one and a half, two and four times the optimal interval."""
    best_s = optimal_s(block_s, mttf_s, persist_lag_s)
    best = exact(best_s, block_s, mttf_s, restart_s, persist_lag_s)
    rows = []
    for factor in FLATNESS_FACTORS:
        there = exact(factor * best_s, block_s, mttf_s, restart_s, persist_lag_s)
        rows.append(Flatness(factor=factor, interval_s=factor * best_s, cost_points=100.0 * (best - there)))
    return rows
