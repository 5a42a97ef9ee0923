"""Nodes of simulated campaigns by hand: spares that run out, repairs, blocks, bursts, false alarms, policies."""

from __future__ import annotations

from typing import Any

import msgspec
import numpy as np
import pytest

from keepstep.planner.scenario import DAY_S, Repair, Scenario, TraceFault
from keepstep.planner.sim.model import (
    DETECTION,
    EXHAUSTED,
    FAILURES,
    FALSE_POSITIVE,
    IDLE_FAULTS,
    INTERRUPTIONS,
    MOST_DOWN,
    NO_SPARE,
    PRODUCTIVE,
    REPLACEMENT,
    RESTART,
    Floats,
)
from keepstep.planner.sim.tape import draw
from keepstep.records.errors import ConfigError
from tests.planner.scenarios import results, simple, traced

ENGINES = ["numpy", "numba"]
pytestmark = pytest.mark.parametrize("engine", ENGINES)


@pytest.fixture(autouse=True)
def _there(engine: str) -> None:
    pytest.importorskip(engine)


def two_faults(down_s: float = 10_000.0, apart_s: float = 1_000.0, **scenario: Any) -> Scenario:
    """Two nodes of four fail, ten days apart but for the run in which one follows the other; replaced, never kept."""
    faults = (TraceFault(3 * DAY_S, 0, down_s), TraceFault(3 * DAY_S + apart_s, 3, down_s))
    return traced(simple(nodes=4, replace=True, **scenario), faults, 20.0, days=20.0)


def order(scenario: Scenario) -> Floats:
    """Time of the first fault of each run of the first block, and of the second."""
    return draw(scenario, 1, 0).time_s.reshape(64, -1)[:, :2]


class TestSpares:
    def test_none_means_waiting_for_the_repair(self, engine: str) -> None:
        scenario = two_faults(apart_s=200_000.0)
        times = order(scenario)
        inside = (times[:, 0] + 10_120 < times[:, 1]) & (times[:, 1] + 10_120 < 20 * DAY_S)
        found = results(scenario, 64, engine=engine)
        assert inside.sum() > 40
        np.testing.assert_allclose(found.ledger_s[inside, NO_SPARE], 20_000.0)
        np.testing.assert_allclose(found.ledger_s[inside, RESTART], 240.0)
        assert (found.counts[inside, EXHAUSTED] == 2).all()
        assert (found.counts[inside, MOST_DOWN] == 1).all()

    def test_a_node_that_fails_while_the_job_waits_prolongs_it(self, engine: str) -> None:
        scenario = msgspec.structs.replace(two_faults(), idle_hazard=1.0)
        times = order(scenario)
        inside = (times[:, 1] - times[:, 0] < 1_001) & (times[:, 1] + 10_120 < 20 * DAY_S)
        found = results(scenario, 64, engine=engine)
        # One outage, until the second node is back.
        np.testing.assert_allclose(found.ledger_s[inside, NO_SPARE], 11_000.0)
        assert (found.counts[inside, INTERRUPTIONS] == 1).all()
        assert (found.counts[inside, IDLE_FAULTS] == 1).all()
        assert (found.counts[inside, MOST_DOWN] == 2).all()
        never = results(msgspec.structs.replace(scenario, idle_hazard=0.0), 64, engine=engine)
        np.testing.assert_allclose(never.ledger_s[inside, NO_SPARE], 10_000.0)

    def test_the_second_fault_finds_no_spare(self, engine: str) -> None:
        scenario = two_faults(apart_s=1_000.0, spares=1)
        found = results(scenario, 64, engine=engine)
        times = order(scenario)
        close = (times[:, 1] - times[:, 0] < 1_001) & (times[:, 1] + 10_120 < 20 * DAY_S)
        both = close & (found.counts[:, FAILURES] == 2)
        # The second restart waits from the second fault until the first node is back.
        np.testing.assert_allclose(found.ledger_s[both, NO_SPARE], 9_000.0)
        assert 20 < both.sum() < close.sum()

    def test_detection_comes_first_and_counts_against_the_wait(self, engine: str) -> None:
        scenario = two_faults(apart_s=200_000.0)
        kind = msgspec.structs.replace(scenario.job.kinds[0], detect_s=600.0)
        restart = msgspec.structs.replace(scenario.job.restart, decide_s=0.0, replace_s=30.0)
        job = msgspec.structs.replace(scenario.job, kinds=(kind,), restart=restart)
        found = results(msgspec.structs.replace(scenario, job=job), 64, engine=engine)
        times = order(scenario)
        inside = (times[:, 0] + 10_150 < times[:, 1]) & (times[:, 1] + 10_150 < 20 * DAY_S)
        np.testing.assert_allclose(found.ledger_s[inside, NO_SPARE], 2 * 9_400.0)
        np.testing.assert_allclose(found.ledger_s[inside, DETECTION], 1_200.0)
        np.testing.assert_allclose(found.ledger_s[inside, REPLACEMENT], 60.0)

    def test_a_spare_of_another_block_is_of_no_use(self, engine: str) -> None:
        pool = simple(nodes=32, rate=0.5, days=5.0, spares=8, replace=True, repair=Repair(mean_s=20_000.0))
        blocks = msgspec.structs.replace(pool, block_nodes=4, spares_in="block")
        by_pool, by_block = results(pool, 128, engine=engine), results(blocks, 128, engine=engine)
        assert by_block.ledger_s[:, NO_SPARE].mean() > 2 * by_pool.ledger_s[:, NO_SPARE].mean()


class TestRepairs:
    def test_nodes_that_come_back_broken_fail_again(self, engine: str) -> None:
        plain = simple(nodes=64, rate=0.05, days=30.0, spares=40, replace=True, repair=Repair(mean_s=3_600.0))
        plain = msgspec.structs.replace(plain, idle_hazard=1.0)
        bad = msgspec.structs.replace(plain, repair=Repair(mean_s=3_600.0, bad_return=0.5, refault_mean_s=3_600.0))
        gated = msgspec.structs.replace(
            plain, repair=Repair(mean_s=3_600.0, bad_return=0.5, refault_mean_s=3_600.0, gate_s=60.0, gate_catch=1.0)
        )
        faults = [results(s, 64, engine=engine).counts[:, [FAILURES, IDLE_FAULTS]].sum() for s in (plain, bad, gated)]
        # Each fault brings half a fault, those too: twice as many.
        assert faults[1] / faults[0] == pytest.approx(2.0, abs=0.15)
        assert faults[2] / faults[0] == pytest.approx(1.0, abs=0.05)

    def test_nodes_that_are_kept_fail_again_and_hit_the_job(self, engine: str) -> None:
        plain = simple(nodes=64, rate=0.05, days=30.0)
        kind = msgspec.structs.replace(plain.job.kinds[0], persists=0.5)
        job = msgspec.structs.replace(plain.job, kinds=(kind,))
        stubborn = msgspec.structs.replace(plain, job=job, repair=Repair(refault_mean_s=3_600.0))
        one, other = (results(s, 64, engine=engine).counts[:, FAILURES].sum() for s in (plain, stubborn))
        assert other / one == pytest.approx(2.0, abs=0.15)

    def test_retired_lemons_are_no_lemons_any_more(self, engine: str) -> None:
        lemons = simple(nodes=100, rate=0.02, days=60.0, spares=60, replace=True, lemon_share=0.05, lemon_factor=50.0)
        retiring = msgspec.structs.replace(lemons, retire_after=2, retire_s=DAY_S)
        one, other = (results(s, 64, engine=engine).counts[:, FAILURES].mean() for s in (lemons, retiring))
        assert other < 0.55 * one


class TestCommonCauses:
    def test_a_burst_takes_its_nodes_and_stops_the_job_once(self, engine: str) -> None:
        scenario = simple(
            nodes=32, rate=0.0, days=10.0, spares=32, block_nodes=8, burst_per_day=0.5, burst_nodes=8, replace=True
        )
        found = results(scenario, 128, engine=engine)
        bursts = found.counts[:, FAILURES + 1]
        assert bursts.mean() == pytest.approx(5.0, abs=0.8)
        assert set(found.counts[bursts == 1, MOST_DOWN]) == {8}
        assert (found.counts[:, INTERRUPTIONS] <= bursts).all()

    def test_false_alarms_are_charged_with_all_they_cost(self, engine: str) -> None:
        scenario = simple(nodes=8, rate=0.0, days=10.0, spares=8, false_alarms_per_day=1.0, verify_s=3_600.0)
        found = results(scenario, 64, engine=engine)
        alarms = found.counts[:, FAILURES + 3]
        assert alarms.mean() == pytest.approx(10.0, abs=1.5)
        lost = found.ledger_s[:, FALSE_POSITIVE]
        # 120 s of restart, and on average half an interval.
        assert (lost / np.maximum(alarms, 1)).mean() == pytest.approx(120.0 + 310.0, rel=0.1)
        assert found.ledger_s[:, RESTART].max() == 0.0

    def test_healthy_nodes_go_along(self, engine: str) -> None:
        scenario = two_faults(apart_s=200_000.0, spares=4, extra_evictions=3, verify_s=500.0)
        found = results(scenario, 64, engine=engine)
        assert found.counts[:, MOST_DOWN].max() == 4

    def test_start_up_failures(self, engine: str) -> None:
        scenario = simple(nodes=8, rate=0.0, days=10.0, startup_failure=0.5, startup_window_s=600.0)
        found = results(scenario, 64, engine=engine)
        # Starts until the first that holds: one failure on average, of half a window and a restart.
        failures = found.counts[:, FAILURES + 2]
        assert failures.mean() == pytest.approx(1.0, abs=0.5)
        assert found.ledger_s[:, PRODUCTIVE].max() > 0.96 * 10 * DAY_S


@pytest.mark.parametrize(
    ("fault", "message"),
    [
        (TraceFault(-1.0, 0, 0.0), "t_s -1.0 is outside"),
        (TraceFault(1.0, 9, 0.0), "node 9, there are 4"),
        (TraceFault(1.0, 0, -5.0), "down_s -5.0"),
        (TraceFault(1.0, 0, 0.0, 3), "kind 3"),
    ],
)
def test_bad_traces_are_refused(engine: str, fault: TraceFault, message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        results(traced(simple(nodes=4), (fault,), 1.0), 1, engine=engine)


def test_a_trace_has_its_own_dispersion(engine: str) -> None:
    with pytest.raises(ConfigError, match="dispersion and lemons are those of the trace"):
        results(traced(simple(nodes=4), (TraceFault(1.0, 0, 0.0),), 1.0, dispersion=2.0), 1, engine=engine)
