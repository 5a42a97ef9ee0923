"""Failure rates of a fleet: bursts, over-dispersion and lemon nodes on records whose answer is known."""

from __future__ import annotations

import json
import math
import os
import random
from pathlib import Path

import pytest

from keepstep.goodput.bursts import (
    BURST_NS,
    DAY_NS,
    FALSE_DISCOVERIES,
    Exposure,
    Failure,
    bursts,
    discoveries,
    dispersion_of,
    lemons,
)
from keepstep.goodput.fleetrates import ALL, RateRow, fleet_rates, prior_file, prior_of_others
from keepstep.goodput.rates import TYPICAL_DISPERSION, estimate_rate, parse_prior, published_prior
from keepstep.records.codec import to_json

MIN_NS = 60_000_000_000


def failure(t_ns: int, node: str | None = "n1", run: str = "r1", name: str = "hardware", **more: str) -> Failure:
    return Failure(t_ns=t_ns, run_id=run, fault_class=name, node=node, **more)


def nodes(count: int, days: float, run: str = "r1", sku: str = "H100", begin_ns: int = 0) -> list[Exposure]:
    return [
        Exposure(node=f"n{i}", run_id=run, begin_ns=begin_ns, end_ns=begin_ns + int(days * DAY_NS), sku=sku)
        for i in range(count)
    ]


def poisson(rng: random.Random, per_day: float, days: int) -> list[int]:
    times, at = [], 0.0
    while (at := at + rng.expovariate(per_day)) < days:
        times.append(int(at * DAY_NS))
    return times


class TestBursts:
    def counts(self, *failures: Failure) -> list[int]:
        return [len(burst.failures) for burst in bursts(failures)]

    def test_several_nodes_of_a_job_within_ten_minutes_are_one(self) -> None:
        found = bursts(
            [failure(0, "a"), failure(5 * MIN_NS, "b"), failure(14 * MIN_NS, "a"), failure(30 * MIN_NS, "a")]
        )
        assert [len(burst.failures) for burst in found] == [3, 1]
        assert (found[0].nodes, found[0].first.t_ns) == (["a", "b"], 0)

    def test_the_limit_is_open(self) -> None:
        assert self.counts(failure(0), failure(BURST_NS)) == [1, 1]
        assert self.counts(failure(0), failure(BURST_NS - 1)) == [2]

    def test_unrelated_jobs_stay_apart(self) -> None:
        assert self.counts(failure(0, "a", "r1"), failure(1, "b", "r2")) == [1, 1]

    @pytest.mark.parametrize(
        ("one", "other"),
        [
            (failure(0, "a", "r1"), failure(1, "a", "r2")),
            (failure(0, "a", "r1", rack="k"), failure(1, "b", "r2", rack="k")),
            (failure(0, "a", "r1", "fabric"), failure(1, "b", "r2", "fabric")),
        ],
    )
    def test_jobs_that_share_what_failed_do_not(self, one: Failure, other: Failure) -> None:
        assert self.counts(other, one) == [2]

    def test_a_third_failure_can_join_two(self) -> None:
        first, second = failure(0, "a", "r1", rack="k"), failure(MIN_NS, "b", "r2")
        joins = failure(2 * MIN_NS, "c", "r2", rack="k")
        assert self.counts(first, second) == [1, 1]
        assert self.counts(first, second, joins) == [3]

    def test_unknown_nodes_are_not_the_same_node(self) -> None:
        assert self.counts(failure(0, None, "r1"), failure(1, None, "r2")) == [1, 1]


class TestDispersion:
    def test_a_poisson_process_has_one(self) -> None:
        values = []
        for seed in range(20):
            found = dispersion_of(poisson(random.Random(seed), 2.0, 200), nodes(50, 200), 0, 200 * DAY_NS)
            assert found.source in ("daily", "weekly")
            values.append(found.value)
        assert 1.0 <= sum(values) / len(values) < 1.35  # the larger of two estimates, neither below 1

    def test_a_bursty_one_has_more_and_chance_does_not_explain_it(self) -> None:
        rng = random.Random(3)
        days = [day for day in range(200) if rng.random() < 0.2 for _ in range(10)]
        times = [day * DAY_NS + rng.randrange(DAY_NS) for day in days]
        found = dispersion_of(times, nodes(50, 200), 0, 200 * DAY_NS)
        assert found.value == max(found.daily or 0, found.weekly or 0) > 5
        assert found.p_value is not None
        assert found.p_value < 1e-6

    def test_by_hand(self) -> None:
        times = [day * DAY_NS for day in range(20) for _ in range(1 if day % 2 else 3)]
        found = dispersion_of(times, nodes(1, 20), 0, 20 * DAY_NS)
        assert found.daily == pytest.approx(20 * (1 / 2) / 19)  # each day is 1 off its mean of 2
        assert found.daily_error == pytest.approx(math.sqrt(2.5 / 20))

    @pytest.mark.parametrize(("per_day", "days"), [(0.02, 100), (3.0, 3), (0.0, 300)])
    def test_too_little_data_is_said_to_be(self, per_day: float, days: int) -> None:
        times = poisson(random.Random(1), per_day, days) if per_day else []
        found = dispersion_of(times, nodes(4, days), 0, days * DAY_NS)
        assert (found.value, found.source, found.p_value) == (TYPICAL_DISPERSION, "typical", None)

    def test_counts_are_held_against_the_node_time_of_their_day(self) -> None:
        """Ten times the nodes have ten times the failures: nothing that varies more than chance."""
        spans = nodes(1, 100) + nodes(10, 100, begin_ns=100 * DAY_NS)
        rng = random.Random(5)
        times = poisson(rng, 0.5, 100) + [100 * DAY_NS + t for t in poisson(rng, 5.0, 100)]
        found = dispersion_of(times, spans, 0, 200 * DAY_NS)
        assert found.daily is not None
        assert found.daily < 1.4


class TestLemons:
    DAYS = dict.fromkeys((f"n{i}" for i in range(100)), 30.0)
    SKUS = dict.fromkeys(DAYS, "H100")

    def test_a_node_that_fails_far_more_often_is_named(self) -> None:
        rng = random.Random(7)
        failures = [failure(rng.randrange(30 * DAY_NS), f"n{rng.randrange(100)}", f"r{i}") for i in range(20)]
        failures += [failure(day * DAY_NS, "n42", f"x{day}") for day in range(8)]
        found = lemons(bursts(failures), self.DAYS, self.SKUS)
        assert [(lemon.node, lemon.failures >= 8) for lemon in found] == [("n42", True)]
        assert found[0].expected < 0.3
        assert found[0].p_value < 1e-6

    def test_the_tail_is_that_of_a_negative_binomial(self) -> None:
        failures = [failure(day * DAY_NS, "n1", f"r{day}") for day in range(3)]
        (found,) = lemons(bursts(failures), {"n1": 10.0, "n2": 10.0 * 99}, {"n1": "x", "n2": "x"})
        share, shape = 10 / 1000, 0.5
        zero = (1 - share) ** shape
        below = zero * (1 + share * shape + share**2 * shape * (shape + 1) / 2)
        assert found.p_value == pytest.approx(1 - below, rel=1e-9)

    def test_chance_alone_names_few(self) -> None:
        named = 0
        for seed in range(60):
            rng = random.Random(seed)
            failures = [failure(rng.randrange(30 * DAY_NS), f"n{rng.randrange(100)}", f"r{i}") for i in range(25)]
            named += bool(lemons(bursts(failures), self.DAYS, self.SKUS))
        assert named / 60 <= 2 * FALSE_DISCOVERIES

    def test_one_failure_is_never_enough(self) -> None:
        days = {**self.DAYS, "n0": 1e-6}
        assert lemons(bursts([failure(0, "n0")]), days, self.SKUS) == []

    def test_a_burst_counts_a_node_once_and_code_counts_none(self) -> None:
        storm = [failure(t * MIN_NS, "n1") for t in range(12)]
        assert lemons(bursts(storm), self.DAYS, self.SKUS) == []
        bugs = [failure(day * DAY_NS, "n1", name="user_code") for day in range(12)]
        assert lemons(bursts(bugs), self.DAYS, self.SKUS) == []

    def test_models_are_compared_among_themselves(self) -> None:
        """Ten old nodes that all fail often are no lemons among new ones."""
        skus = {node: "old" if i < 10 else "new" for i, node in enumerate(self.DAYS)}
        failures = [failure(d * DAY_NS, f"n{i}", f"r{i}-{d}") for i in range(10) for d in range(5)]
        assert lemons(bursts(failures), self.DAYS, skus) == []

    def test_benjamini_and_hochberg(self) -> None:
        # The example of their paper (1995), section 4.1: 15 hypotheses, 4 rejected at 0.05.
        p = [0.0001, 0.0004, 0.0019, 0.0095, 0.0201, 0.0278, 0.0298, 0.0344]
        p += [0.0459, 0.3240, 0.4262, 0.5719, 0.6528, 0.7590, 1.0000]
        assert discoveries(p, 0.05) == [True] * 4 + [False] * 11
        assert discoveries(p[::-1], 0.05) == [False] * 11 + [True] * 4
        assert discoveries([0.04, 0.05], 0.05) == [True, True]  # the larger one carries the smaller
        assert discoveries([], 0.05) == []


def row(rows: list[RateRow], sku: str, name: str = ALL) -> RateRow:
    return next(r for r in rows if (r.sku, r.fault_class) == (sku, name))


class TestRates:
    def test_the_posterior_is_the_one_of_rates(self) -> None:
        failures = [failure(day * DAY_NS, f"n{day % 50}", sku="H100") for day in range(0, 40, 4)]
        found = fleet_rates(failures, nodes(50, 40), 0, 40 * DAY_NS)
        own = row(found.rates, "H100")
        expected = estimate_rate(published_prior("H100"), 10, 2000.0, dispersion=found.dispersion.value)
        assert (own.failures, own.node_days) == (10, 2000.0)
        assert own.per_1000_node_days == pytest.approx(expected.rate_per_node_day * 1000)
        assert (own.low, own.high) == pytest.approx((expected.low * 1000, expected.high * 1000))

    def test_by_class_and_model(self) -> None:
        failures = [failure(1, "n1", "r1", sku="H100"), failure(DAY_NS, "n2", "r1", "user_code", sku="H100")]
        spans = [*nodes(10, 10), Exposure(node="m", run_id="r2", begin_ns=0, end_ns=DAY_NS, sku="A100")]
        found = fleet_rates(failures, spans, 0, 10 * DAY_NS)
        assert [(r.sku, r.fault_class, r.failures) for r in found.rates] == [
            ("A100", "all", 0),
            ("H100", "all", 2),
            ("H100", "hardware", 1),
            ("H100", "user_code", 1),
        ]
        assert row(found.rates, "A100").prior == published_prior("A100")
        assert (found.nodes, found.node_days) == (11, 101.0)

    def test_bursts_count_as_one_and_are_reported(self) -> None:
        failures = [failure(t * MIN_NS, node, sku="H100") for t, node in ((0, "n1"), (1, "n2"), (2, "n3"))]
        found = fleet_rates(failures, nodes(10, 10), 0, 10 * DAY_NS)
        assert (found.failures, found.incidents, row(found.rates, "H100").failures) == (3, 1, 1)
        assert [(b.failures, b.nodes, b.runs) for b in found.bursts] == [(3, ["n1", "n2", "n3"], ["r1"])]

    def test_with_and_without_lemons(self) -> None:
        failures = [failure(day * DAY_NS, "n7", f"x{day}", sku="H100") for day in range(20)]
        failures += [failure(day * DAY_NS, f"n{day + 20}", f"y{day}", sku="H100") for day in range(3)]
        found = fleet_rates(failures, nodes(100, 30), 0, 30 * DAY_NS)
        assert [lemon.node for lemon in found.lemons] == ["n7"]
        assert (row(found.rates, "H100").failures, row(found.without_lemons, "H100").failures) == (23, 3)
        assert row(found.without_lemons, "H100").node_days == pytest.approx(99 * 30)
        assert fleet_rates([], nodes(3, 3), 0, 3 * DAY_NS).without_lemons == []

    def test_the_recent_rate_has_the_time_before_as_its_prior(self) -> None:
        old = [failure(i * DAY_NS // 3, f"n{i % 50}", sku="H100") for i in range(279)]
        new = [failure(93 * DAY_NS + i * 7 * 3600 * 10**9, f"n{i}", sku="H100") for i in range(24)]
        found = fleet_rates(old + new, nodes(50, 100), 0, 100 * DAY_NS)
        assert found.recent_days == 7
        recent = row(found.recent, "H100")
        assert (recent.failures, recent.node_days, recent.prior_set_aside) == (24, 350, False)
        assert "279 failures in 4650 node-days of the time before" in recent.prior.source
        # The time before weighs as much as the seven days, and both less where failures come in bursts.
        spread = found.dispersion.value
        assert recent.prior.node_days == pytest.approx(350 / spread)  # the published rate is denied by what was seen
        seen = 0.5 + (279 * 350 / 4650 + 24) / spread
        assert recent.per_1000_node_days == pytest.approx(seen / (700 / spread) * 1000)
        assert recent.per_1000_node_days > row(found.rates, "H100").per_1000_node_days

    def test_a_published_rate_that_is_not_denied_stays_in_the_prior(self) -> None:
        old = [failure(i * 10 * DAY_NS, f"n{i}", sku="H100") for i in range(8)]
        found = fleet_rates(old, nodes(50, 100), 0, 100 * DAY_NS)
        prior, known = row(found.recent, "H100").prior, published_prior("H100")
        weight = 1500 / 3500 / found.dispersion.value  # 30 days after 70
        assert prior.shape == pytest.approx(known.shape + 7 * weight)
        assert prior.node_days == pytest.approx(known.node_days + 3500 * weight)

    def test_a_recent_change_that_the_time_before_denies_stands_alone(self) -> None:
        new = [failure(93 * DAY_NS + i * 7 * 3600 * 10**9, f"n{i}", sku="H100") for i in range(24)]
        recent = row(fleet_rates(new, nodes(50, 100), 0, 100 * DAY_NS).recent, "H100")
        assert recent.prior_set_aside
        assert recent.low < 24 / 350 * 1000 < recent.high

    def test_few_failures_take_the_longest_recent_time(self) -> None:
        found = fleet_rates([], nodes(5, 100), 0, 100 * DAY_NS)
        assert found.recent_days == 30
        assert row(found.recent, "H100").node_days == 150
        early = fleet_rates([], nodes(5, 10), 0, 10 * DAY_NS)
        assert row(early.recent, "H100").prior == published_prior("H100")

    def test_nothing_at_all(self) -> None:
        found = fleet_rates([], [], 0, DAY_NS)
        assert (found.rates, found.recent, found.lemons, found.node_days) == ([], [], [], 0)

    def test_the_prior_of_a_run_is_what_the_others_saw(self) -> None:
        failures = [failure(day * DAY_NS, f"n{day}", f"r{day % 2}", sku="H100") for day in range(10)]
        spans = nodes(20, 10, "r0") + nodes(20, 10, "r1")
        prior = prior_of_others(failures, spans, "H100", without_run="r1")
        known = published_prior("H100")
        assert prior.shape == pytest.approx(known.shape + 5 / TYPICAL_DISPERSION)
        assert prior.node_days == pytest.approx(known.node_days + 200 / TYPICAL_DISPERSION)
        assert prior_of_others(failures, spans, "A100") == published_prior("A100")

    def test_rates_are_a_prior_that_runs_can_be_given(self) -> None:
        failures = [failure(day * DAY_NS, f"n{day}", sku="H100") for day in range(9)]
        found = fleet_rates(failures, nodes(20, 10), 0, 10 * DAY_NS)
        prior = parse_prior(to_json(prior_file(found)).decode(), "H100", "--failure-prior")
        assert prior.shape == pytest.approx(0.5 + 9 / TYPICAL_DISPERSION)
        assert prior.node_days == pytest.approx(200 / TYPICAL_DISPERSION)


def test_a_public_trace_is_counted_as_its_readers_did() -> None:
    """400 GPU nodes in 345 days: incidents, those on several nodes, and the spread of daily and weekly counts."""
    shared = os.environ.get("KEEPSTEP_SHARED")
    path = Path(shared or "") / "data/traces/infinitehbd-fault_trace.json"
    if not shared or not path.exists():
        pytest.skip("KEEPSTEP_SHARED does not hold the trace")
    trace = json.loads(path.read_bytes())
    begin = min(e["event_time"] for e in trace)
    end_ns = int((max(e["event_time"] for e in trace) - begin) * DAY_NS) + 1
    names = sorted({e["node_id"] for e in trace})
    failures = [
        failure(int((e["event_time"] - begin) * DAY_NS), e["node_id"], sku="A100")
        for e in trace
        if e["event_type"] == "fault_start"
    ]
    names += [f"never-{i}" for i in range(400 - len(names))]
    spans = [Exposure(node=node, run_id="r1", begin_ns=0, end_ns=end_ns, sku="A100") for node in names]
    found = fleet_rates(failures, spans, 0, end_ns)
    assert (found.failures, found.incidents) == (584, 482)
    sizes = [len(burst.nodes) for burst in found.bursts]
    assert (sum(size > 1 for size in sizes), max(sizes)) == (56, 14)
    assert found.dispersion.daily == pytest.approx(1.8, abs=0.05)
    assert found.dispersion.weekly == pytest.approx(4.1, abs=0.1)
    assert found.dispersion.source == "weekly"
    assert found.dispersion.p_value is not None
    assert found.dispersion.p_value < 1e-9
    assert 5 <= len(found.lemons) <= 20
    assert found.without_lemons[0].per_1000_node_days < 0.92 * found.rates[0].per_1000_node_days
