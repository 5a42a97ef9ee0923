"""The interval and its goodput: published optima, a worked table, Monte Carlo, and what must hold for all inputs."""

from __future__ import annotations

import math
import random

import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from keepstep.goodput.interval import (
    daly_higher_order_s,
    daly_s,
    exact,
    exact_restart_immune,
    first_order,
    flatness,
    meta,
    optimal_s,
    young_s,
)
from keepstep.goodput.special import lambert_w0, one_plus_w0

MINUTE = 60.0
MTTF_S = {gpus: 86_400.0 / (6.5e-3 * gpus / 8) for gpus in (1024, 4096, 16384)}
"""At 6.5 failures per 1000 node-days, 8 GPUs a node."""

# GPUs, d s: tau_Young min, tau_exact min, then for R = 2 min and 15 min: first order, Meta, exact exposed, exact immune.
TABLE = [
    (1024, 10, 24.0, 23.9, (0.985, 0.985, 0.985, 0.985), (0.978, 0.978, 0.978, 0.978)),
    (1024, 30, 41.6, 41.3, (0.975, 0.975, 0.975, 0.975), (0.967, 0.968, 0.968, 0.968)),
    (1024, 60, 58.8, 58.2, (0.965, 0.965, 0.965, 0.965), (0.957, 0.958, 0.958, 0.958)),
    (1024, 300, 131.6, 128.2, (0.923, 0.926, 0.925, 0.925), (0.915, 0.918, 0.918, 0.918)),
    (4096, 10, 12.0, 11.9, (0.968, 0.968, 0.968, 0.968), (0.938, 0.938, 0.939, 0.940)),
    (4096, 30, 20.8, 20.5, (0.947, 0.949, 0.948, 0.948), (0.917, 0.919, 0.920, 0.921)),
    (4096, 60, 29.4, 28.8, (0.927, 0.930, 0.929, 0.929), (0.897, 0.901, 0.902, 0.902)),
    (4096, 300, 65.8, 62.5, (0.843, 0.854, 0.852, 0.852), (0.813, 0.827, 0.826, 0.827)),
    (16384, 10, 6.0, 5.9, (0.926, 0.928, 0.928, 0.928), (0.806, 0.811, 0.823, 0.830)),
    (16384, 30, 10.4, 10.1, (0.885, 0.891, 0.890, 0.890), (0.765, 0.776, 0.789, 0.796)),
    (16384, 60, 14.7, 14.1, (0.846, 0.855, 0.854, 0.854), (0.725, 0.743, 0.757, 0.764)),
    (16384, 300, 32.9, 29.7, (0.678, 0.720, 0.712, 0.712), (0.557, 0.616, 0.631, 0.637)),
]


@pytest.mark.parametrize(("gpus", "block_s", "young", "best", "two", "fifteen"), TABLE)
def test_the_worked_table(
    gpus: int, block_s: float, young: float, best: float, two: tuple[float, ...], fifteen: tuple[float, ...]
) -> None:
    mttf_s = MTTF_S[gpus]
    tau_s = young_s(block_s, mttf_s)
    assert tau_s / MINUTE == pytest.approx(young, abs=0.06)
    assert optimal_s(block_s, mttf_s) / MINUTE == pytest.approx(best, abs=0.06)
    for restart_s, shown in ((2 * MINUTE, two), (15 * MINUTE, fifteen)):
        forms = (first_order, meta, exact, exact_restart_immune)
        # The table was rounded from four digits to three.
        assert [f(tau_s, block_s, mttf_s, restart_s) for f in forms] == pytest.approx(shown, abs=0.00056)


def test_daly_own_optima() -> None:
    """d = 5 min: the 2006 paper's optima, found there by search, for MTTF of 24 h, 6 h and 15 min."""
    for mttf_min, optimum_min in ((24 * 60, 117), (6 * 60, 57), (15, 9.1)):
        assert daly_higher_order_s(5, mttf_min) == pytest.approx(optimum_min, abs=0.5)
        assert optimal_s(5, mttf_min) == pytest.approx(optimum_min, abs=0.5)


def test_ranges_of_validity() -> None:
    """How far each formula is from the optimum, in percent, at d/M."""
    for ratio, young, daly, higher in (
        (0.001, 1.5, -0.8, 0.0), (0.01, 4.9, -2.5, 0.0), (0.05, 11.4, -6.2, -0.01), (0.1, 16.7, -9.4, -0.04),
        (0.5, 43, -28, -0.6), (1.0, 68, -51, -1.8), (2.0, 111, -100, 5.5),
    ):  # fmt: skip
        best = optimal_s(ratio, 1.0)
        off = [100 * (f(ratio, 1.0) / best - 1) for f in (young_s, daly_s, daly_higher_order_s)]
        assert off == pytest.approx([young, daly, higher], abs=0.5 if ratio >= 0.5 else 0.06)
    # The first order within its stated range, against the exact form.
    for ratio, restart in ((0.001, 0.1), (0.01, 0.02)):
        tau = young_s(ratio, 1.0)
        assert abs(first_order(tau, ratio, 1.0, restart) - exact(tau, ratio, 1.0, restart)) < 0.0102
    for restart in (0.0, 0.05, 0.1):
        tau = young_s(0.03, 1.0)
        assert abs(meta(tau, 0.03, 1.0, restart) - exact(tau, 0.03, 1.0, restart)) < 0.01
    assert first_order(young_s(10, 810), 10, 810, 900) < 0 < exact(young_s(10, 810), 10, 810, 900)  # 131,072 GPUs


def test_a_persist_lag_takes_its_share() -> None:
    """16,384 GPUs, d = 10 s, at Young's interval; the lag counts from the end of the blocking part."""
    mttf_s = MTTF_S[16384]
    tau_s = young_s(10, mttf_s)
    for restart_min, shown in ((2, (0.928, 0.920, 0.911, 0.886)), (15, (0.823, 0.816, 0.808, 0.786))):
        got = [exact(tau_s, 10, mttf_s, restart_min * MINUTE, lag_s) for lag_s in (0, 60, 120, 300)]
        assert got == pytest.approx(shown, abs=0.00051)


def simulate(
    rng: random.Random, tau_s: float, block_s: float, mttf_s: float, restart_s: float, lag_s: float, immune: bool
) -> tuple[float, float]:
    """(goodput, its standard error) of a job told as a story: it trains, waits for the save in flight, blocks, fails."""
    lives = 6000
    kept, spent = [], []
    for _ in range(lives):
        lost_s = 0.0
        to_failure_s = rng.expovariate(1 / mttf_s)
        if not immune:
            while to_failure_s < restart_s:  # a failure in the restart: from the start again
                lost_s += to_failure_s
                to_failure_s = rng.expovariate(1 / mttf_s)
            to_failure_s -= restart_s
        now_s, durable_at_s, work_s, safe_s, pending_s = 0.0, -1.0, 0.0, 0.0, 0.0
        while now_s <= to_failure_s:
            now_s, work_s = now_s + tau_s, work_s + tau_s
            now_s = max(now_s, durable_at_s)  # one save in flight
            if 0 <= durable_at_s <= min(now_s, to_failure_s):
                safe_s = pending_s
            now_s += block_s
            if now_s <= to_failure_s:
                durable_at_s, pending_s = now_s + lag_s, work_s
        if 0 <= durable_at_s <= to_failure_s:
            safe_s = pending_s
        kept.append(safe_s)
        spent.append(lost_s + restart_s + to_failure_s)
    goodput = sum(kept) / sum(spent)
    rest = [k - goodput * s for k, s in zip(kept, spent, strict=True)]
    return goodput, math.sqrt(sum(r * r for r in rest) / lives) / math.sqrt(lives) / (sum(spent) / lives)


@pytest.mark.parametrize("immune", [False, True])
@pytest.mark.parametrize(
    ("tau_s", "block_s", "restart_s", "lag_s"),
    [(360, 10, 900, 0), (360, 10, 120, 300), (600, 60, 900, 200), (100, 10, 120, 300), (1800, 300, 900, 1700)],
)
def test_monte_carlo(tau_s: float, block_s: float, restart_s: float, lag_s: float, immune: bool) -> None:
    """The closed form is within three standard errors of the story, also where saves wait for the one before (lag > tau)."""
    mttf_s = MTTF_S[16384]
    told, error = simulate(random.Random(7), tau_s, block_s, mttf_s, restart_s, lag_s, immune)
    form = exact_restart_immune if immune else exact
    assert error < 0.005
    assert abs(form(tau_s, block_s, mttf_s, restart_s, lag_s) - told) < 3 * error


TIMES = st.floats(0.001, 1e5)


@example(block_s=1.0, mttf_s=100.0, lag_s=74413.0, restart_s=0.0)
@given(block_s=TIMES, mttf_s=st.floats(10, 1e9), lag_s=st.floats(0, 1e5), restart_s=st.floats(0, 1e4))
def test_no_interval_beats_the_optimum(block_s: float, mttf_s: float, lag_s: float, restart_s: float) -> None:
    best_s = optimal_s(block_s, mttf_s, lag_s)
    best = exact(best_s, block_s, mttf_s, restart_s, lag_s)
    assert best_s >= min(lag_s, mttf_s)
    for factor in (0.01, 0.3, 0.9, 0.99, 1.01, 1.1, 3.0):
        # Where next to nothing is left, both are the smallest numbers there are.
        assert exact(factor * best_s, block_s, mttf_s, restart_s, lag_s) <= best * (1 + 1e-9) + 1e-300
    assert exact_restart_immune(best_s, block_s, mttf_s, restart_s, lag_s) >= best * (1 - 1e-12)
    assert all(row.cost_points >= -1e-7 for row in flatness(block_s, mttf_s, restart_s, lag_s))


@given(block_s=TIMES, mttf_s=st.floats(10, 1e8), lag_s=st.floats(0, 1e4), restart_s=st.floats(0, 1e4))
def test_worse_inputs_never_help(block_s: float, mttf_s: float, lag_s: float, restart_s: float) -> None:
    def best(d: float, m: float, r: float, p: float) -> float:
        return exact(optimal_s(d, m, p), d, m, r, p)

    at = best(block_s, mttf_s, restart_s, lag_s)
    slack = 1e-9
    assert 0 <= at <= 1
    assert best(block_s, 0.9 * mttf_s, restart_s, lag_s) <= at + slack
    assert best(1.1 * block_s, mttf_s, restart_s, lag_s) <= at + slack
    assert best(block_s, mttf_s, restart_s + 10, lag_s) <= at + slack
    assert best(block_s, mttf_s, restart_s, lag_s + 10) <= at + slack


def test_how_flat() -> None:
    """16,384 GPUs: half as long again costs under half a point at d = 10 s and under two at 300 s."""
    short = [row.cost_points for row in flatness(10, MTTF_S[16384], 120)]
    long = [row.cost_points for row in flatness(300, MTTF_S[16384], 120)]
    assert short == pytest.approx([1.24, 0.42, 1.27, 5.65], abs=0.05)
    assert long == pytest.approx([4.4, 1.7, 5.0, 20.8], abs=0.2)


def test_limits() -> None:
    assert optimal_s(0.0, 100.0) == 0.0
    assert optimal_s(1e6, 100.0) == pytest.approx(100.0)
    assert daly_higher_order_s(200.0, 100.0) == 100.0
    assert daly_s(200.0, 100.0) == 0.0
    assert exact(0.0, 0.0, 100.0) == pytest.approx(1.0)
    assert exact(1e6, 1.0, 100.0) == 0.0
    assert (first_order(0.0, 1.0, 100.0), meta(0.0, 1.0, 100.0)) == (-math.inf, 0.0)
    for bad in ((-1.0, 1.0), (1.0, 0.0), (math.nan, 1.0), (math.inf, 1.0), (1.0, math.inf)):
        with pytest.raises(ValueError, match="finite times"):
            optimal_s(*bad)


@given(st.floats(-1.0, 30.0))
@example(-1.0)
@example(0.0)
def test_lambert_undoes_its_definition(w: float) -> None:
    z = w * math.exp(w)
    # A rounding of z is worth 1 / (1 + w) roundings of w, at the branch point the square root of one.
    slack = min(3e-8, 2e-15 / (1 + w)) if w > -1 else 3e-8
    assert lambert_w0(max(z, -1 / math.e)) == pytest.approx(w, abs=slack + 1e-14 * abs(w))


@given(st.floats(1e-12, 0.999))
def test_near_the_branch_point_no_digits_are_lost(s: float) -> None:
    """With s = 1 + W0: (1 - s) e^s = 1 - gap, whose logarithm is -(s^2/2 + s^3/3 + ...)."""
    logarithm = s + math.log1p(-s) if s > 1e-3 else -sum(s**k / k for k in range(2, 8))
    assert one_plus_w0(-math.expm1(logarithm)) == pytest.approx(s, rel=1e-9)


def test_lambert_refuses() -> None:
    for z in (-0.4, math.nan, math.inf):
        with pytest.raises(ValueError, match="lambert_w0"):
            lambert_w0(z)
    with pytest.raises(ValueError, match="one_plus_w0"):
        one_plus_w0(1.5)
    assert lambert_w0(1.0) == pytest.approx(0.5671432904097838, abs=1e-15)  # the omega constant
    assert lambert_w0(math.e) == pytest.approx(1.0, abs=1e-15)
