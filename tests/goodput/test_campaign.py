"""What a campaign may come to, and forecasts that are compared with what happened."""

from __future__ import annotations

import math
import random
import statistics

import pytest
from hypothesis import given
from hypothesis import strategies as st

from keepstep.goodput.calibration import Happened, calibrate, count_chance, make_forecast, score
from keepstep.goodput.campaign import RateKnowledge, at_rate, given_rate, goodput_interval
from keepstep.goodput.job import Job, RestartPhases, Tier
from keepstep.goodput.renewal import goodput

JOB = Job(
    nodes=2048,
    rate_per_node_day=6.5e-3,
    interval_s=354.0,
    tiers=(Tier(name="disk", block_s=10.0),),
    restart=RestartPhases(start_s=120.0),
)
SURE = RateKnowledge(shape=1e7, node_days=1e7 / 6.5e-3, source="known")
DAY_S = 86_400.0


def test_a_known_rate_leaves_the_scatter_of_one_campaign() -> None:
    assert goodput_interval(JOB, SURE, 54.0) == pytest.approx((0.925, 0.931), abs=0.001)


def test_a_longer_campaign_scatters_less() -> None:
    short, long = (goodput_interval(JOB, SURE, days) for days in (5.0, 500.0))
    assert short[0] < long[0] < goodput(JOB) < long[1] < short[1]


def test_dispersion_widens() -> None:
    wide = goodput_interval(JOB, RateKnowledge(shape=1e7, node_days=1e7 / 6.5e-3, source="", dispersion=7.4), 54.0)
    plain = goodput_interval(JOB, SURE, 54.0)
    assert wide[1] - wide[0] > 1.5 * (plain[1] - plain[0])


def test_a_rate_that_is_only_a_number_is_taken_for_uncertain() -> None:
    low, high = goodput_interval(JOB, given_rate(6.5e-3, "given"), 54.0)
    assert low == pytest.approx(goodput(at_rate(JOB, given_rate(6.5e-3, "").quantile(0.95))), abs=0.003)
    assert high - low > 0.04


def test_few_failures_and_many() -> None:
    """Of Jeffreys' posterior after n failures, as multiples of n: 0.46 to 1.97 after 5, 0.92 to 1.08 after 419."""
    for n, low, high in ((5, 0.46, 1.97), (20, 0.68, 1.42), (419, 0.92, 1.08)):
        rate = RateKnowledge(shape=n + 0.5, node_days=float(n), source="")
        assert (rate.quantile(0.05), rate.quantile(0.95)) == pytest.approx((low, high), abs=0.01)


def test_the_chance_of_a_count_is_that_of_a_gamma_mixture() -> None:
    rng = random.Random(3)
    rate = RateKnowledge(shape=4.0, node_days=1000.0, source="")
    draws = [_poisson(rng, rng.gammavariate(4.0, 1.0 / 1000.0) * 3000.0) for _ in range(20_000)]
    for seen in (0, 3, 12, 20, 40):
        share = statistics.fmean((d >= seen) if seen > 12 else (d <= seen) for d in draws)
        assert count_chance(seen, rate, 3000.0) == pytest.approx(share, abs=0.012)


def _poisson(rng: random.Random, mean: float) -> int:
    limit, count, product = math.exp(-mean), 0, rng.random()
    while product > limit:
        product *= rng.random()
        count += 1
    return count


class TestCalibration:
    FORECAST = make_forecast(JOB, given_rate(6.5e-3, "given"), 54.0, made_at="2026-01-01T00:00:00Z", source="plan")

    def test_as_expected(self) -> None:
        row = calibrate(self.FORECAST, Happened(wall_s=10 * DAY_S, productive_s=9.2 * DAY_S, failures=130))
        assert row.verdict == "inside"
        assert row.failures_forecast == pytest.approx(133.1, abs=0.1)
        assert row.goodput_measured == pytest.approx(0.92)

    def test_worse_and_better(self) -> None:
        rows = [
            calibrate(self.FORECAST, Happened(wall_s=10 * DAY_S, productive_s=share * 10 * DAY_S, failures=130))
            for share in (0.5, 0.92, 0.999)
        ]
        assert [row.verdict for row in rows] == ["below", "inside", "above"]
        total = score(rows)
        assert (total.judged, total.inside, total.below, total.above) == (3, 1, 1, 1)
        assert total.mean_error_points == pytest.approx(100.0 * ((0.5 + 0.92 + 0.999) / 3 - 0.928), abs=0.1)

    def test_too_early_and_unknown(self) -> None:
        early = calibrate(self.FORECAST, Happened(wall_s=600.0, productive_s=500.0, failures=0))
        silent = calibrate(self.FORECAST, Happened(wall_s=10 * DAY_S, productive_s=None, failures=130))
        assert (early.verdict, silent.verdict) == ("too_early", "unknown")
        assert score([early, silent]).mean_error_points is None

    @given(st.floats(1.0, 1e7), st.floats(0.0, 1.0), st.integers(0, 3000))
    def test_any_run_can_be_compared(self, wall_s: float, share: float, failures: int) -> None:
        row = calibrate(self.FORECAST, Happened(wall_s=wall_s, productive_s=share * wall_s, failures=failures))
        assert 0.0 <= row.goodput_interval[0] <= row.goodput_interval[1] <= 1.0
        assert 0.0 <= row.failures_chance <= 1.0

    def test_campaigns_of_the_model_are_inside_nine_times_of_ten(self) -> None:
        """The forecast's own process, rate and all, played 400 times: the interval holds 90 % of it."""
        rng = random.Random(11)
        rate = given_rate(6.5e-3, "given")
        inside = 0
        for _ in range(400):
            true = rng.gammavariate(rate.shape, 1.0 / rate.node_days)
            inside += calibrate(self.FORECAST, _played(rng, true, 20.0)).verdict == "inside"
        assert 0.85 <= inside / 400 <= 0.95


def _played(rng: random.Random, per_node_day: float, days: float) -> Happened:
    rate = per_node_day * JOB.nodes / DAY_S
    clock, kept, failures = 0.0, 0.0, 0
    while clock < days * DAY_S:
        life = rng.expovariate(rate)
        kept += JOB.interval_s * int(life / (JOB.interval_s + 10.0))
        clock += life
        failures += 1
        while (again := rng.expovariate(rate)) < 120.0:
            clock += again
            failures += 1
        clock += 120.0
    return Happened(wall_s=clock, productive_s=kept, failures=failures)
