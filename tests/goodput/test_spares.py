"""Spares: Erlang's B against its recursion and a queue that is simulated, quantiles against published tables, the paid optimum."""

from __future__ import annotations

import heapq
import random
from collections.abc import Callable
from fractions import Fraction

import pytest
from hypothesis import given
from hypothesis import strategies as st

from keepstep.goodput.spares import (
    choose,
    erlang_b,
    mean_down,
    negative_binomial_quantile,
    poisson_quantile,
    stall_share,
)


def test_erlang_b_by_exact_fractions() -> None:
    for load in (Fraction(1, 2), Fraction(8), Fraction(40)):
        term = total = Fraction(1)
        for servers in range(1, 60):
            term *= load / servers
            total += term
            assert erlang_b(servers, float(load)) == pytest.approx(float(term / total), rel=1e-10)


def test_a_fraction_of_a_server_lies_between() -> None:
    for servers in range(20):
        values = [erlang_b(servers + i / 4, 8.0) for i in range(5)]
        assert values == sorted(values, reverse=True)
        # The logarithm is close to a line between whole numbers.
        assert values[2] == pytest.approx((values[0] * values[4]) ** 0.5, rel=0.02)


@pytest.mark.parametrize("nonsense", [(-1.0, 1.0), (1.0, -1.0), (float("inf"), 1.0)])
def test_negative_numbers_are_refused(nonsense: tuple[float, float]) -> None:
    with pytest.raises(ValueError, match="erlang_b"):
        erlang_b(*nonsense)


@pytest.mark.parametrize("repair", ["constant", "exponential", "lognormal"])
def test_waiting_does_not_depend_on_the_distribution_of_repairs(repair: str) -> None:
    """A job that runs while at most k of its nodes are away, failure by failure."""
    rng = random.Random(7)
    draws: dict[str, Callable[[], float]] = {
        "constant": lambda: 1.0,
        "exponential": lambda: rng.expovariate(1.0),
        "lognormal": lambda: rng.lognormvariate(-0.72, 1.2),  # mean 1
    }
    draw = draws[repair]
    rate, spares, clock, waited = 8.0, 10, 0.0, 0.0
    away: list[float] = []
    while clock < 6000.0:
        clock += rng.expovariate(rate)
        while away and away[0] <= clock:
            heapq.heappop(away)
        heapq.heappush(away, clock + draw())
        if len(away) > spares:
            waited += away[0] - clock
            clock = away[0]
    assert stall_share(spares, rate) == pytest.approx(waited / clock, abs=0.006)


POISSON = [
    # Mean: failures a day (6.5 per 1000 node-days) times days of repair; p99 and p99.9.
    (128, 1.0, 4, 5), (128, 7.0, 12, 15), (512, 0.25, 4, 5), (512, 3.0, 18, 21),
    (2048, 0.25, 8, 10), (2048, 1.0, 22, 26), (2048, 3.0, 55, 61), (2048, 7.0, 116, 124),
]  # fmt: skip


@pytest.mark.parametrize(("nodes", "days", "p99", "p999"), POISSON)
def test_quantiles_of_nodes_in_repair(nodes: int, days: float, p99: int, p999: int) -> None:
    mean = mean_down(nodes, 6.5e-3, 1.0, days * 86_400.0)
    assert (poisson_quantile(0.99, mean), poisson_quantile(0.999, mean)) == (p99, p999)


def test_bursts_need_more() -> None:
    assert negative_binomial_quantile(0.99, 9.4, 1.0) == poisson_quantile(0.99, 9.4) == 17
    assert negative_binomial_quantile(0.99, 9.4, 3.0) > 22
    assert stall_share(12, 8.0, 2.0) > stall_share(12, 8.0)


def test_the_paid_optimum_of_an_example() -> None:
    """8 of 2,048 nodes in repair on average; simulated goodput of the job and of all paid nodes by number of spares."""
    plan = choose([(0.92, 8.0)], 2048, 8.0, given=12)
    assert 16 <= plan.best.spares <= 20
    assert plan.best.goodput_paid == pytest.approx(0.911, abs=0.001)
    assert plan.given is not None
    assert plan.given.goodput_job == pytest.approx(0.887, abs=0.006)
    by_count = {c.spares: c for c in plan.curve}
    assert by_count[16].goodput_job == pytest.approx(0.917, abs=0.002)


def test_an_uncertain_rate_asks_for_more_spares() -> None:
    sure = choose([(0.92, 8.0)], 2048, 8.0)
    unsure = choose([(0.93, 4.0), (0.92, 8.0), (0.90, 14.0)], 2048, 8.0)
    assert unsure.best.spares > sure.best.spares


def test_spares_that_cannot_leave_their_block() -> None:
    plan = choose([(0.92, 8.0)], 2048, 8.0, block_nodes=16)
    assert plan.blocks is not None
    assert plan.blocks.blocks == 128
    assert plan.blocks.choice.spares == 128 * plan.blocks.spares_per_block > plan.best.spares
    assert plan.blocks.choice.goodput_paid < plan.best.goodput_paid


@given(st.integers(0, 60), st.floats(0.0, 50.0), st.floats(1.0, 5.0))
def test_more_spares_never_make_the_job_wait_longer(spares: int, load: float, peakedness: float) -> None:
    now, more = (stall_share(k, load, peakedness) for k in (spares, spares + 1))
    assert 0.0 <= more <= now + 1e-12 <= 1.0 + 1e-12


@given(st.floats(0.001, 0.999), st.floats(0.0, 300.0), st.floats(1.0, 8.0))
def test_quantiles_rise_with_bursts_or_stay(p: float, mean: float, peakedness: float) -> None:
    k = negative_binomial_quantile(p, mean, peakedness)
    assert k >= 0
    if p >= 0.95:
        assert k >= poisson_quantile(p, mean) - 1
