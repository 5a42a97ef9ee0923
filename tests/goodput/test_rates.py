"""Failure rates: quantiles of the Gamma distribution, posteriors, priors as people give them, and what a run's marks say."""

from __future__ import annotations

import json
import math
import os
import statistics
from collections import Counter
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from keepstep.goodput.advice import MIN_BLOCKS, advise
from keepstep.goodput.history import HistoryFold
from keepstep.goodput.ramp import (
    check_ramp,
    delay_cost_points,
    ramp_loss_s,
    ramp_pause_s,
    smoothing_cost_points,
    write_delay_s,
)
from keepstep.goodput.rates import (
    PRIOR_SHAPE,
    TYPICAL_DISPERSION,
    Prior,
    estimate_rate,
    mttf_s,
    parse_prior,
    predictive_tail,
    prior_from_rate,
    published_prior,
    sku_of,
)
from keepstep.goodput.special import gamma_cdf, gamma_quantile
from keepstep.records.errors import ConfigError

WEAK = Prior(shape=0.5, node_days=1e-9, source="Jeffreys")


class TestGamma:
    def test_known_distributions(self) -> None:
        for x in (1e-9, 0.3, 1.0, 5.0, 40.0):
            assert gamma_cdf(x, 1.0) == pytest.approx(-math.expm1(-x), rel=1e-13)
            assert gamma_cdf(x, 0.5) == pytest.approx(math.erf(math.sqrt(x)), rel=1e-13)
            poisson = math.fsum(math.exp(-x) * x**k / math.factorial(k) for k in range(7))
            assert 1 - gamma_cdf(x, 7.0) == pytest.approx(poisson, abs=1e-13)

    @pytest.mark.parametrize(
        ("degrees", "p", "chi_squared"),
        [
            (1, 0.05, 0.00393214),
            (1, 0.95, 3.841459),
            (10, 0.05, 3.940299),
            (10, 0.95, 18.30704),
            (100, 0.975, 129.5612),
        ],
    )
    def test_quantiles_of_chi_squared_tables(self, degrees: int, p: float, chi_squared: float) -> None:
        assert 2 * gamma_quantile(p, degrees / 2) == pytest.approx(chi_squared, rel=1e-6)

    @given(p=st.floats(1e-6, 0.999999), shape=st.floats(0.01, 3000))
    def test_quantile_inverts_the_distribution(self, p: float, shape: float) -> None:
        x = gamma_quantile(p, shape)
        if x > 1e-290:
            assert gamma_cdf(x, shape) == pytest.approx(p, rel=1e-8, abs=1e-12)

    def test_large_shapes(self) -> None:
        """Where the normal approximation takes over, both agree; far beyond, mean and spread are right."""
        x = gamma_quantile(0.95, 99_999.0)
        assert gamma_quantile(0.95, 100_001.0) == pytest.approx(x + 2, abs=0.03)
        assert gamma_cdf(x + 2, 100_001.0) == pytest.approx(0.95, abs=1e-5)
        assert gamma_quantile(0.95, 1e9) == pytest.approx(1e9 + 1.644854 * math.sqrt(1e9), rel=1e-8)

    def test_refusals(self) -> None:
        assert gamma_quantile(0.0, 2.0) == gamma_cdf(-1.0, 2.0) == 0.0
        for p, shape in ((1.0, 1.0), (0.5, 0.0), (0.5, math.nan)):
            with pytest.raises(ValueError, match="gamma"):
                gamma_quantile(p, shape)


class TestPosterior:
    @pytest.mark.parametrize(
        ("failures", "low", "high"),
        [(0, 0.00, 3.84), (1, 0.18, 3.91), (3, 0.36, 2.34), (5, 0.46, 1.97), (10, 0.58, 1.63), (20, 0.68, 1.42),
         (50, 0.79, 1.25), (419, 0.92, 1.08)],
    )  # fmt: skip
    def test_jeffreys_interval_as_multiples_of_what_was_seen(self, failures: int, low: float, high: float) -> None:
        rate = estimate_rate(WEAK, failures, 1000.0)
        unit = (failures or 0.5) / 1000
        assert [rate.low / unit, rate.high / unit] == pytest.approx([low, high], abs=0.006)

    def test_the_prior_rules_until_something_was_seen(self) -> None:
        prior = published_prior("H100")
        assert estimate_rate(prior, 0, 0.0).rate_per_node_day == pytest.approx(3.79e-3)
        seen = estimate_rate(prior, 419, 2048 * 54)
        assert 1000 * seen.rate_per_node_day == pytest.approx(3.79, abs=0.01)
        assert seen.mttf_s(2048) == pytest.approx(54 * 86_400 / 419, rel=0.01)

    def test_more_exposure_without_a_failure_lowers_the_rate(self) -> None:
        rates = [estimate_rate(published_prior("A100"), 0, days).rate_per_node_day for days in (0, 10, 100, 1000)]
        assert rates == sorted(rates, reverse=True)
        assert rates[-1] < rates[0] / 10

    def test_bursts_take_weight_and_widen(self) -> None:
        calm, bursty = (estimate_rate(WEAK, 20, 1000.0, dispersion=d) for d in (1.0, TYPICAL_DISPERSION))
        assert bursty.low < calm.low < calm.high < bursty.high
        spread = [(r.high - r.low) / r.rate_per_node_day for r in (calm, bursty)]
        assert spread[1] / spread[0] == pytest.approx(math.sqrt(TYPICAL_DISPERSION), rel=0.05)

    def test_a_prior_that_the_job_contradicts_is_set_aside(self) -> None:
        """Eight nodes that fail every hour for a day: 3 failures a node-day, 460 times the prior."""
        prior = published_prior("A100")
        rate = estimate_rate(prior, 24, 8.0)
        assert rate.prior_set_aside
        assert rate.rate_per_node_day == pytest.approx(3.06, abs=0.01)
        # Two failures say little, and as many as expected contradict nothing.
        assert not estimate_rate(prior, 2, 0.1).prior_set_aside
        assert not estimate_rate(prior, 13, 2000.0).prior_set_aside

    def test_the_predictive_distribution_adds_up(self) -> None:
        prior = Prior(shape=2.5, node_days=100.0, source="")
        tails = [predictive_tail(prior, n, 40.0) for n in range(200)]
        assert tails[0] == 1.0
        assert sum(tails[1:]) == pytest.approx(
            40.0 * prior.rate_per_node_day, rel=1e-9
        )  # the mean is the sum of the tails

    @pytest.mark.parametrize("bad", [(-1, 1.0, 1.0, 0.9), (1, -1.0, 1.0, 0.9), (1, 1.0, 0.5, 0.9), (1, 1.0, 1.0, 1.0)])
    def test_refusals(self, bad: tuple[int, float, float, float]) -> None:
        failures, exposure, dispersion, level = bad
        with pytest.raises(ValueError, match="at least"):
            estimate_rate(WEAK, failures, exposure, dispersion=dispersion, level=level)


class TestPriors:
    def test_by_gpu_model(self) -> None:
        assert [sku_of(n) for n in ("NVIDIA H100 80GB HBM3", "NVIDIA A100-SXM4-40GB", "NVIDIA H200")] == [
            "H100",
            "A100",
            "unknown",
        ]
        assert "RSC-1" in published_prior("a100").source
        assert "no rate is published" in published_prior("H200").source
        assert mttf_s(3.79e-3, 2048) / 3600 == pytest.approx(3.09, abs=0.01)
        assert mttf_s(0.0, 8) == math.inf

    def test_a_number(self) -> None:
        prior = parse_prior(" 4.2 ", "H100", "--failure-prior")
        assert prior.shape == PRIOR_SHAPE
        assert prior.rate_per_node_day == pytest.approx(4.2e-3)
        assert "--failure-prior" in prior.source

    def test_a_record(self) -> None:
        text = json.dumps(
            {
                "schema": "keepstep.failure_prior/1",
                "skus": {"h100": {"failures": 12, "node_days": 3000}, "default": {"failures": 0, "node_days": 50}},
            }
        )
        own = parse_prior(text, "H100", "f")
        assert (own.shape, own.node_days) == (12.5, 3000)
        assert parse_prior(text, "B200", "f").node_days == 50
        only = json.dumps({"schema": "keepstep.failure_prior/1", "skus": {"x": {"failures": 1, "node_days": 2}}})
        assert parse_prior(only, "H100", "f").rate_per_node_day == published_prior("H100").rate_per_node_day

    @pytest.mark.parametrize(
        "text",
        [
            "0", "-1", "inf", "nan", "many", "{", '{"schema": "other", "skus": {}}', '{"schema": "keepstep.failure_prior/1"}',
            '{"schema": "keepstep.failure_prior/1", "skus": {"H100": {"failures": -1, "node_days": 1}}}',
            '{"schema": "keepstep.failure_prior/1", "skus": {"H100": {"failures": 1, "node_days": 0}}}',
            '{"schema": "keepstep.failure_prior/1", "skus": {"H100": {"failures": 1, "days": 9}}}',
        ],
    )  # fmt: skip
    def test_refusals_name_where_it_is_from(self, text: str) -> None:
        with pytest.raises(ConfigError, match="--failure-prior"):
            parse_prior(text, "H100", "--failure-prior")

    def test_the_dispersion_is_that_of_the_trace(self) -> None:
        """Counted again from the public trace: incidents a day, faults less than ten minutes apart being one."""
        shared = os.environ.get("KEEPSTEP_SHARED")
        path = Path(shared or "") / "data/traces/infinitehbd-fault_trace.json"
        if not shared or not path.exists():
            pytest.skip("KEEPSTEP_SHARED does not hold the trace")
        times = sorted(e["event_time"] for e in json.loads(path.read_bytes()) if e["event_type"] == "fault_start")
        incidents = [t for before, t in zip([-1.0, *times], times, strict=False) if t - before > 10 / 1440]
        counts = Counter(int(t - times[0]) for t in incidents)
        daily = [counts[day] for day in range(int(times[-1] - times[0]))]
        assert (len(times), len(incidents)) == (584, 482)
        assert statistics.variance(daily) / statistics.mean(daily) == pytest.approx(TYPICAL_DISPERSION, abs=0.05)


class TestAdvice:
    def test_bounds(self) -> None:
        rate = estimate_rate(prior_from_rate(6.5, "x"), 0, 0.0)
        free = advise(rate, 2048, 10.0, 0.0, restart_s=120.0)
        assert free.bound == ""
        assert free.advised_s == free.interval_s.optimal == pytest.approx(353.7, abs=0.1)
        assert free.goodput.exact == pytest.approx(0.928, abs=0.0005)
        assert advise(rate, 1, 10.0, 0.0).bound == "max"
        assert advise(rate, 2048, 10.0, 600.0).advised_s == 600.0
        assert advise(rate, 2048, 10.0, 600.0).bound == ""  # the lag is part of the optimum
        slow = advise(rate, 1_000_000, 10.0, 0.0)  # fails every 13 s: saving would be all it does
        assert (slow.advised_s, slow.bound) == (MIN_BLOCKS * 10.0, "min")

    def test_the_interval_of_the_rate_is_one_of_goodput(self) -> None:
        advice = advise(estimate_rate(WEAK, 10, 1500.0), 2048, 10.0, 30.0, restart_s=300.0)
        assert advice.goodput_interval[0] < advice.goodput.exact < advice.goodput_interval[1]
        assert advice.optimal_interval_s[0] < advice.advised_s < advice.optimal_interval_s[1]
        assert set(advice.goodput_at) == {"young", "daly", "daly_higher_order", "optimal"}


def mark(fold: HistoryFold, kind: str, t_s: float, **attrs: object) -> None:
    fold.take_mark(kind, int(t_s * 1e9), attrs)


class TestHistory:
    def cycle(self, fold: HistoryFold, nodes: int, begin_s: float, end_s: float, rule: str | None) -> None:
        fold.take_cycle(nodes, probe=False)
        mark(fold, "cycle_started", begin_s)
        if rule is not None:
            mark(fold, "decided", end_s, rule=rule, counted=rule == "restart")
        mark(fold, "cycle_ended", end_s)

    def test_what_counts(self) -> None:
        fold = HistoryFold()
        assert fold.history() is None
        for i, rule in enumerate(("restart", "node_lost", "node_excluded", "gang_check", "address_in_use", None)):
            self.cycle(fold, 2, 100 + 10 * i, 109 + 10 * i, rule)
        history = fold.history()
        assert history is not None
        assert (history.failures, history.node_s, history.since) == (3, 6 * 2 * 9, "1970-01-01T00:01:40.000000000Z")

    def test_the_failure_that_ends_the_job(self) -> None:
        for rule, failures in (("budget_exhausted", 1), ("same_failure_twice", 0), ("config_or_code_bug", 0)):
            fold = HistoryFold()
            fold.take_cycle(4, probe=False)
            mark(fold, "cycle_started", 1)
            mark(fold, "fault", 2, rule=rule)
            mark(fold, "cycle_ended", 3)
            mark(fold, "run_ended", 3)
            fold.take_attempt()
            assert fold.failures == failures

    def test_launchers_that_died_lost_the_work_of_their_cycle(self) -> None:
        fold = HistoryFold()
        fold.take_cycle(4, probe=False)
        mark(fold, "cycle_started", 1)
        mark(fold, "step", 11)
        running = fold.history(21_000_000_000)
        assert running is not None
        assert (running.failures, running.node_s) == (0, 80)
        fold.take_attempt()
        gone = fold.history(10**15)
        assert gone is not None
        assert (gone.failures, gone.node_s) == (1, 40)

    def test_a_gang_check_is_no_training(self) -> None:
        fold = HistoryFold()
        fold.take_cycle(4, probe=True)
        mark(fold, "cycle_started", 1)
        mark(fold, "cycle_ended", 5)
        fold.take_attempt()
        assert fold.history() is None


class TestRamp:
    @pytest.mark.parametrize("step_s", [0.01, 0.1, 1.0])
    def test_training_lost_is_what_was_promised(self, step_s: float) -> None:
        ramp_s, now_s, steps, shares = 60.0, 0.0, 0, []
        while (pause_s := ramp_pause_s(now_s, step_s, ramp_s)) > 0:
            shares.append(step_s / (step_s + pause_s))
            now_s += pause_s + step_s
            steps += 1
        assert shares == sorted(shares)  # power only rises
        assert shares[0] == pytest.approx(0.25)
        assert now_s - steps * step_s == pytest.approx(ramp_loss_s(ramp_s), abs=3 * step_s)

    def test_one_long_step_does_not_stop_the_job_for_long(self) -> None:
        assert ramp_pause_s(0.0, 300.0, 60.0) == 15.0
        assert ramp_pause_s(60.0, 300.0, 60.0) == 0.0

    def test_costs(self) -> None:
        at = (354.0, 10.0, 6490.0, 120.0, 0.0)
        assert smoothing_cost_points(*at) == 0.0
        ramp, stagger = smoothing_cost_points(*at, ramp_s=60.0), smoothing_cost_points(*at, stagger_s=30.0)
        assert ramp == pytest.approx(92.8 * ramp_loss_s(60.0) / 6490, rel=0.01)
        assert stagger == pytest.approx(92.8 * 30.0 / 6490, rel=0.01)
        assert ramp < delay_cost_points(ramp_loss_s(60.0), 6490.0)
        assert [write_delay_s(r, 4, 8.0) for r in range(4)] == [0.0, 2.0, 4.0, 6.0]

    @pytest.mark.parametrize("text", ["-1", "soon", "inf", "nan"])
    def test_refusals(self, text: str) -> None:
        with pytest.raises(ConfigError, match=r"--power-ramp .*seconds"):
            check_ramp(text, "--power-ramp")
