"""Measures of failure traces and their replay: known answers, independent faults, and what must hold for all."""

from __future__ import annotations

import math
import random
import statistics
import subprocess
import sys

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from keepstep.goodput.interval import exact, exact_restart_immune
from keepstep.goodput.job import FailureKind, Job, Tier
from keepstep.goodput.spares import poisson_quantile
from keepstep.planner.replay import Rule, replay_goodput, to_scenario_faults
from keepstep.planner.scenario import Scenario
from keepstep.planner.tracerepair import (
    LEVELS,
    nodes_down,
    quantile,
    repair_tail,
    spares_needed,
)
from keepstep.planner.traces import (
    DAY_S,
    Fault,
    FaultTrace,
    only_levels,
)
from keepstep.planner.tracestats import (
    allocation_luck,
    away,
    binned,
    concentration,
    dispersion,
    faults_by_node,
    gaps_s,
    incidents,
    lemons,
    per_1000_node_days,
    rates,
    rates_by_month,
    refaults,
    short_gaps,
    size_slope,
    weibull_fit,
)

HOUR_S = 3600.0


def trace_of(faults: list[tuple[str, float, float]], nodes: int, days: float) -> FaultTrace:
    made = sorted((Fault(node=node, begin_s=a, end_s=b) for node, a, b in faults), key=lambda fault: fault.begin_s)
    return FaultTrace(name="made", nodes=nodes, days=days, faults=tuple(made))


def poisson_trace(nodes: int, days: float, rate_per_node_day: float, repair_s: float, seed: int) -> FaultTrace:
    """Independent faults, exponential repairs."""
    chance = random.Random(seed)
    faults, at_s = [], 0.0
    while (at_s := at_s + chance.expovariate(nodes * rate_per_node_day / DAY_S)) < days * DAY_S:
        end_s = min(days * DAY_S, at_s + chance.expovariate(1.0 / repair_s))
        faults.append((str(chance.randrange(nodes)), at_s, end_s))
    return trace_of(faults, nodes, days)


POISSON = poisson_trace(nodes=400, days=2000, rate_per_node_day=4e-3, repair_s=DAY_S, seed=7)
"""About 3200 faults."""


class TestIndependentFaults:
    """Of a Poisson process every measure must give what is beside it."""

    def test_in_time(self) -> None:
        assert per_1000_node_days(POISSON) == pytest.approx(4.0, rel=0.04)
        for bin_days, tolerance in ((1, 0.1), (7, 0.25), (30, 0.5)):  # three standard errors, sqrt(2 / bins) each
            assert dispersion(POISSON.begins_s, bin_days) == pytest.approx(1.0, abs=tolerance)
        gaps = gaps_s(POISSON.begins_s)
        fit = weibull_fit(gaps)
        assert fit.shape == pytest.approx(1.0, abs=3 * fit.shape_standard_error)
        assert fit.scale_s == pytest.approx(statistics.fmean(gaps), rel=0.06)
        short = short_gaps(gaps)
        assert short.share == pytest.approx(short.poisson, abs=0.015)

    def test_on_nodes(self) -> None:
        for top in (0.05, 0.1, 1.0):
            found = concentration(POISSON, top)
            assert found.faults_share == pytest.approx(found.poisson, abs=0.01)
        assert lemons(POISSON) == []
        for again in refaults(POISSON):
            assert again.share == pytest.approx(again.poisson, abs=0.005)

    def test_away(self) -> None:
        down = nodes_down(POISSON)
        assert down.mean == pytest.approx(1.6, rel=0.1)
        assert down.peakedness == pytest.approx(1.0, abs=0.1)
        for level in LEVELS:
            assert abs(down.quantile(level) - poisson_quantile(level, down.mean)) <= 1
        spares = spares_needed(down)
        assert 0.75 <= spares.ratio <= 1.25
        tail = repair_tail(POISSON)
        assert tail.mean_s == pytest.approx(DAY_S, rel=0.06)
        assert tail.median_s == pytest.approx(math.log(2.0) * DAY_S, rel=0.06)
        assert tail.log_sigma == pytest.approx(math.pi / math.sqrt(6.0), rel=0.06)  # of an exponential time

    def test_replay_gives_the_exact_formulas(self) -> None:
        """Renewal with exponential gaps: both rules against the closed forms, persist lag included."""
        chance = random.Random(3)
        begins_s = [0.0]
        for _ in range(40_000):
            begins_s.append(begins_s[-1] + chance.expovariate(1.0))
        rules: tuple[Rule, ...] = ("exposed", "immune")
        for rule, formula in zip(rules, (exact, exact_restart_immune), strict=True):
            for tau_s, block_s, restart_s, lag_s in ((600, 60, 900, 0), (600, 60, 120, 300), (300, 60, 120, 500)):
                found = replay_goodput(
                    begins_s, tau_s, block_s, restart_s, mttf_s=6490.0, persist_lag_s=lag_s, rule=rule
                )
                assert found.goodput == pytest.approx(formula(tau_s, block_s, 6490.0, restart_s, lag_s), abs=0.006)
                assert found.goodput == pytest.approx(found.predicted, abs=0.003)
                assert found.goodput == pytest.approx(found.predicted_given_downtime, abs=0.003)
                assert found.mttf_faults_s == pytest.approx(6490.0)
                assert found.mttf_s == pytest.approx(6490.0, rel=0.02)

    def test_rate_goes_with_size(self) -> None:
        systems = [poisson_trace(nodes, 500, 4e-3, DAY_S, seed=nodes) for nodes in (128, 128, 256, 512, 1024)]
        slope = size_slope(systems)
        assert slope.slope == pytest.approx(1.0, abs=3 * slope.standard_error)
        assert slope.standard_error < 0.05


class TestMeasures:
    def test_size_slope_of_a_line(self) -> None:
        def system(nodes: int, faults: int) -> FaultTrace:
            return trace_of([("0", float(i), float(i)) for i in range(faults)], nodes, 10.0)

        line = size_slope([system(10, 100), system(100, 1000), system(1000, 10_000)])
        assert [line.slope, line.standard_error] == pytest.approx([1.0, 0.0], abs=1e-9)
        # By hand: x = 0, 1, 2 and y = 0, 1, 0 in decades: slope 0, residual sum of squares 2/3, spread 2.
        bent = size_slope([system(1, 10), system(10, 100), system(100, 10)])
        assert [bent.slope, bent.standard_error] == pytest.approx([0.0, math.sqrt(1 / 3)], abs=1e-9)
        for wrong in ([system(1, 1)] * 2, [system(1, 1)] * 3, [system(1, 1), system(2, 1), system(3, 0)]):
            with pytest.raises(ValueError, match="size_slope"):
                size_slope(wrong)

    def test_rates_by_level(self) -> None:
        faults = tuple(Fault(node="a", begin_s=0, end_s=1, level=level, cause=level[0]) for level in ("x", "y", "x"))
        trace = FaultTrace(name="t", nodes=10, days=5.0, faults=faults)
        assert [(r.name, r.faults, r.per_1000_node_days) for r in rates(trace)] == [("x", 2, 40.0), ("y", 1, 20.0)]
        assert [r.name for r in rates(trace, "cause")] == ["x", "y"]
        only = only_levels(trace, "y")
        assert (len(only.faults), only.node_days) == (1, 50.0)

    def test_incidents(self) -> None:
        trace = trace_of([("a", 0, 9), ("b", 599, 600), ("a", 1100, 1101), ("c", 1700, 1800)], 9, 1.0)
        assert [(i.begin_s, i.last_s, i.faults, i.nodes) for i in incidents(trace)] == [
            (0, 1100, 3, 2),
            (1700, 1700, 1, 1),
        ]
        assert len(incidents(trace, 0.0)) == 4
        assert incidents(trace_of([], 1, 1.0)) == []

    def test_bins_are_whole_and_begin_with_the_first_time(self) -> None:
        days = [0.5, 0.6, 1.4, 1.6, 3.6, 3.7]
        assert binned((day * DAY_S for day in days), 1.0) == [3, 1, 0]
        assert binned([], 1.0) == []
        assert dispersion((day * DAY_S for day in days), 1.0) == pytest.approx((7 / 3) / (4 / 3))
        with pytest.raises(ValueError, match="0 whole bins"):
            dispersion([], 1.0)
        trace = trace_of([("a", day * DAY_S, day * DAY_S) for day in days], 10, 4.0)
        assert rates_by_month(trace, 1.0) == [300.0, 100.0, 0.0]

    @pytest.mark.parametrize("shape", [0.3, 0.62, 1.0, 2.5])
    def test_weibull_shape(self, shape: float) -> None:
        chance = random.Random(11)
        fit = weibull_fit([0.0] + [chance.weibullvariate(5000.0, shape) for _ in range(4000)])
        assert fit.gaps == 4000
        assert fit.shape == pytest.approx(shape, abs=3.5 * fit.shape_standard_error)
        assert fit.scale_s == pytest.approx(5000.0, rel=0.06 / shape)

    def test_weibull_refuses_what_has_no_shape(self) -> None:
        for gaps in ([], [1.0], [0.0, 0.0], [5.0, 5.0]):
            with pytest.raises(ValueError, match="weibull_fit"):
                weibull_fit(gaps)
        with pytest.raises(ValueError, match="short_gaps"):
            short_gaps([0.0])

    def test_lemons(self) -> None:
        chance = random.Random(5)
        faults = [(str(chance.randrange(200)), t * HOUR_S, t * HOUR_S + 60) for t in range(300)]
        bad = [("7", t * DAY_S + 1800.0, t * DAY_S + 1900.0) for t in range(12)]
        found = lemons(trace_of(faults + bad, 200, 13.0))
        assert [lemon.node for lemon in found] == ["7"]
        assert found[0].faults >= 12
        flapping = [("7", t * 300.0, t * 300.0 + 60) for t in range(12)]
        assert lemons(trace_of(faults + flapping, 200, 13.0)) == []
        while_away = [("7", 0.0, 12.5 * DAY_S), *bad]
        assert lemons(trace_of(faults + while_away, 200, 13.0)) == []

    def test_overlapping_faults_of_a_node_are_one_absence(self) -> None:
        trace = trace_of([("a", 0, 100), ("a", 50, 80), ("a", 100, 110), ("b", 5, 5), ("b", 60, 160)], 3, 200 / DAY_S)
        assert away(trace) == {"a": [(0, 100, True), (100, 110, True)], "b": [(5, 5, True), (60, 160, True)]}
        down = nodes_down(trace)
        assert down.share_s == pytest.approx((0.2, 0.55, 0.25))
        assert down.mean == pytest.approx(1.05)
        assert [down.quantile(level) for level in (0.2, 0.5, 0.99)] == [0, 1, 2]

    def test_refaults(self) -> None:
        day = DAY_S
        trace = trace_of([("a", 0, day), ("a", 1.5 * day, 2 * day), ("a", 9 * day, 9.5 * day), ("b", 0, day)], 2, 10.0)
        one_day, week = refaults(trace, (day, 8 * day))
        assert (one_day.returns, week.returns) == (3, 3)
        assert one_day.share == pytest.approx(1 / 3)  # the last return has half a day left
        assert week.share == pytest.approx(2 / 3)
        assert one_day.poisson == pytest.approx(1 - math.exp(-0.2))
        open_end = Fault(node="a", begin_s=0, end_s=10 * day, returned=False)
        nothing = refaults(FaultTrace(name="t", nodes=1, days=10.0, faults=(open_end,)), (day,))[0]
        assert (nothing.returns, math.isnan(nothing.share)) == (0, True)

    def test_concentration_and_draws(self) -> None:
        trace = trace_of([("a", t * HOUR_S, t * HOUR_S) for t in range(6)] + [("b", 0, 0), ("c", 0, 0)], 10, 1.0)
        assert faults_by_node(trace) == [6, 1, 1, 0, 0, 0, 0, 0, 0, 0]
        assert concentration(trace, 0.1).faults_share == 0.75
        whole = allocation_luck(trace, 10, draws=50)
        assert (whole.p5_s, whole.median_s, whole.p95_s) == (DAY_S / 8, DAY_S / 8, DAY_S / 8)
        few = allocation_luck(trace, 1, draws=500)
        assert few.median_s == few.p95_s == math.inf
        for refused in (0, 11):
            with pytest.raises(ValueError, match="of 10 nodes"):
                allocation_luck(trace, refused)
        empty = trace_of([], 10, 1.0)
        for measure in (lemons, lambda t: concentration(t, 0.1)):
            with pytest.raises(ValueError, match="no faults"):
                measure(empty)

    def test_quantiles(self) -> None:
        assert [quantile([3.0, 1.0, 2.0], p) for p in (0.0, 0.25, 0.5, 1.0)] == [1.0, 1.5, 2.0, 3.0]
        with pytest.raises(ValueError, match="no values"):
            quantile([], 0.5)
        # Published tables of the Poisson distribution: P(N <= 4 | 1) = 0.9963, P(N <= 3 | 1) = 0.9810.
        assert [poisson_quantile(p, 1.0) for p in (0.0, 0.3, 0.5, 0.98, 0.99)] == [0, 0, 1, 3, 4]
        assert poisson_quantile(0.99, 0.0) == 0
        for level, mean in ((1.0, 1.0), (-0.1, 1.0), (0.5, -1.0), (0.5, math.inf)):
            with pytest.raises(ValueError, match="poisson_quantile"):
                poisson_quantile(level, mean)
        with pytest.raises(ValueError, match="repair_tail: 1"):
            repair_tail(trace_of([("a", 0, 1), ("a", 2, 2)], 1, 1.0))


class TestReplay:
    def test_by_hand(self) -> None:
        """Saves every 110 s, restart 50 s: lives of 350, 50 (a fault 20 s into the restart), 40 s."""
        begins_s = [0.0, 400.0, 420.0, 500.0, 590.0]
        immune = replay_goodput(begins_s, 100.0, 10.0, 50.0, rule="immune")
        # 350 s hold 3 saves; the next restart ends at 450, a life of 50 s; then one of 40 s.
        assert immune.goodput == pytest.approx(300 / 590)
        assert (immune.interruptions, immune.faults) == (3, 5)
        assert immune.mttf_s == pytest.approx((350 + 50 + 40) / 3)
        exposed = replay_goodput(begins_s, 100.0, 10.0, 50.0, rule="exposed")
        assert exposed.mttf_s == pytest.approx((350 + 30 + 40) / 3)
        assert exposed.mttf_faults_s == pytest.approx(590 / 4)
        lagging = replay_goodput(begins_s, 100.0, 10.0, 50.0, persist_lag_s=20.0, rule="immune")
        assert lagging.goodput == pytest.approx(300 / 590)  # durable at 130, 240, 350
        late = replay_goodput(begins_s, 100.0, 10.0, 50.0, persist_lag_s=150.0, rule="immune")
        assert late.goodput == pytest.approx(100 / 590)  # durable at 260, and 420
        doubled = replay_goodput(begins_s, 200.0, 20.0, 100.0, mttf_s=2 * 590 / 4, rule="immune")
        assert doubled.goodput == pytest.approx(immune.goodput)

    def test_no_training_at_all(self) -> None:
        found = replay_goodput([0.0, 1.0, 2.0], 10.0, 1.0, 5.0)
        assert (found.goodput, found.predicted, found.interruptions) == (0.0, 0.0, 0)
        assert math.isnan(found.mttf_s)

    @pytest.mark.parametrize(
        ("begins_s", "tau_s", "restart_s"),
        [([1.0], 1.0, 0.0), ([1.0, 1.0], 1.0, 0.0), ([0.0, 2.0, 1.0], 1.0, 0.0), ([0.0, 1.0], 0.0, 0.0), ([0.0, 1.0], 1.0, -1.0)],
    )  # fmt: skip
    def test_refusals(self, begins_s: list[float], tau_s: float, restart_s: float) -> None:
        with pytest.raises(ValueError, match="replay_goodput"):
            replay_goodput(begins_s, tau_s, 0.0, restart_s)

    def test_for_the_simulation(self) -> None:
        kinds = (FailureKind(name="process", share=0.5), FailureKind(name="node", share=0.5))
        job = Job(nodes=3, rate_per_node_day=1e-3, interval_s=60.0, kinds=kinds, tiers=(Tier(name="disk"),))
        numbered = trace_of([("2", 10.0, 40.0), ("0", DAY_S * 0.1, DAY_S * 0.1), ("1", 5.0, 7.0)], 3, 0.1)
        faults = to_scenario_faults(numbered, lambda fault: None if fault.node == "1" else int(fault.down_s > 0))
        assert [(f.t_s, f.node, f.down_s, f.kind) for f in faults] == [(10.0, 2, 30.0, 1), (DAY_S * 0.1, 0, 0.0, 0)]
        Scenario(job=job, process="trace", trace=faults, trace_days=numbered.days).check()
        assert [f.node for f in to_scenario_faults(numbered, nodes=2)] == [1, 0]
        with pytest.raises(ValueError, match="4 nodes; the trace watched 3"):
            to_scenario_faults(numbered, nodes=4)

    def test_names_are_spread_over_the_cluster(self) -> None:
        named = trace_of([(f"host{i}", float(i), float(i)) for i in range(50)], 400, 1.0)
        numbers = [fault.node for fault in to_scenario_faults(named)]
        assert len(set(numbers)) == 50
        assert max(numbers) > 300
        assert numbers == [fault.node for fault in to_scenario_faults(named)]
        assert numbers != [fault.node for fault in to_scenario_faults(named, seed=1)]
        half = sum(len(to_scenario_faults(named, nodes=200, seed=seed)) for seed in range(40)) / 40
        assert half == pytest.approx(25, abs=3)


SOME_FAULTS = st.lists(
    st.tuples(st.sampled_from("abcd"), st.floats(0.0, 1e6), st.floats(0.0, 1e5)), min_size=2, max_size=40
)


class TestInvariants:
    @given(SOME_FAULTS)
    def test_nodes_down(self, faults: list[tuple[str, float, float]]) -> None:
        trace = trace_of([(node, t, t + down) for node, t, down in faults], 4, 1.2e6 / DAY_S)
        down = nodes_down(trace)
        assert math.fsum(down.share_s) == pytest.approx(1.0)
        assert all(share >= 0.0 for share in down.share_s)
        spans = [span for own in away(trace).values() for span in own]
        assert down.mean == pytest.approx(sum(end_s - begin_s for begin_s, end_s, _ in spans) / 1.2e6)
        quantiles = [down.quantile(level) for level in (0.0, *LEVELS, 1.0)]
        assert quantiles == sorted(quantiles)
        assert quantiles[-1] <= 4
        assert sum(i.faults for i in incidents(trace)) == len(faults)
        assert len(incidents(trace, 1e9)) == 1
        assert all(0.0 <= again.share <= 1.0 or again.returns == 0 for again in refaults(trace))
        for top in (0.0, 0.25, 0.5, 1.0):
            found = concentration(trace, top)
            assert top - 1e-9 <= found.poisson <= 1.0 + 1e-9
            assert top - 1e-9 <= found.faults_share <= 1.0

    @given(st.lists(st.floats(1e-6, 1e9), min_size=2, max_size=60).filter(lambda gaps: max(gaps) > 1.001 * min(gaps)))
    def test_weibull_solves_its_equation(self, gaps: list[float]) -> None:
        fit = weibull_fit(gaps)
        scaled = [gap / fit.scale_s for gap in gaps]
        assert math.fsum(x**fit.shape for x in scaled) / len(gaps) == pytest.approx(1.0, rel=1e-6)
        slope = math.fsum((1.0 - x**fit.shape) * math.log(x) * fit.shape for x in scaled)
        assert slope + len(gaps) == pytest.approx(0.0, abs=1e-5 * len(gaps))  # the likelihood's derivative by shape
        assert weibull_fit([7.0 * gap for gap in gaps]).shape == pytest.approx(fit.shape, rel=1e-9)

    @given(st.floats(1e-3, 3e3), st.floats(0.0, 0.9999))
    def test_poisson_quantile_is_the_smallest(self, mean: float, level: float) -> None:
        def at_most(k: int) -> float:
            return math.fsum(math.exp(n * math.log(mean) - mean - math.lgamma(n + 1.0)) for n in range(k + 1))

        k = poisson_quantile(level, mean)
        assert at_most(k) >= level - 1e-9
        assert k == 0 or at_most(k - 1) < level + 1e-9

    @settings(max_examples=60)
    @given(
        st.lists(st.floats(0.0, 1e5), min_size=2, max_size=60),
        st.floats(1.0, 1e4), st.floats(0.0, 1e3), st.floats(0.0, 1e4), st.floats(0.0, 1e4),
    )  # fmt: skip
    def test_replay(self, gaps: list[float], tau_s: float, block_s: float, restart_s: float, lag_s: float) -> None:
        begins_s = [0.0, 1.0]
        for gap in gaps:
            begins_s.append(begins_s[-1] + gap)
        immune = replay_goodput(begins_s, tau_s, block_s, restart_s, rule="immune")
        exposed = replay_goodput(begins_s, tau_s, block_s, restart_s, rule="exposed")
        lagging = replay_goodput(begins_s, tau_s, block_s, restart_s, persist_lag_s=lag_s, rule="immune")
        assert 0.0 <= lagging.goodput <= immune.goodput <= 1.0
        for found in (immune, exposed):
            assert found.interruptions <= found.faults - 1
            up_s = found.interruptions * (found.mttf_s if found.interruptions else 0.0)
            assert found.goodput * begins_s[-1] <= up_s + 1e-6
        if restart_s == 0.0:
            assert immune.goodput == exposed.goodput


def test_nothing_here_needs_numpy() -> None:
    code = (
        "import sys; import keepstep.planner.replay, keepstep.planner.tracerepair; "
        "sys.exit('numpy' in sys.modules or 'scipy' in sys.modules)"
    )
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0
