"""Simulated goodput against closed forms, against answers worked out step by step, and against what must hold in any model."""

from __future__ import annotations

import itertools
import math
import random

import msgspec
import numpy as np
import pytest

from keepstep.goodput.interval import exact, exact_restart_immune, young_s
from keepstep.goodput.job import FailureKind, Job, RestartPhases, Tier
from keepstep.planner.scenario import DAY_S, Scenario, TraceFault
from keepstep.planner.sim.campaign import Results
from keepstep.planner.sim.model import (
    CHECKPOINT,
    FAILURES,
    INTERRUPTIONS,
    LEDGER,
    NO_SPARE,
    PRODUCTIVE,
    RESTART,
    ROLLBACK,
    STRAGGLER,
)
from keepstep.planner.sim.tape import draw
from tests.planner.scenarios import results, simple, traced


def fast() -> str:
    """The compiled engine where there is one: the other gives the same."""
    try:
        import numba  # noqa: F401
    except ImportError:
        return "numpy"
    return "numba"


def standard_errors(values: np.ndarray, expected: float) -> float:
    """How far the mean is off."""
    return float((values.mean() - expected) / (values.std(ddof=1) / math.sqrt(len(values))))


class TestClosedForms:
    """Cells of the published table: 6.5 failures per 1000 node-days, Young's interval."""

    @pytest.mark.parametrize(
        ("gpus", "block_s", "restart_s", "lag_s"),
        [
            (1024, 10, 120, 0),
            (4096, 300, 900, 0),
            (16384, 10, 120, 0),
            (16384, 10, 900, 0),
            (16384, 60, 120, 300),
            (16384, 60, 900, 0),
            (16384, 300, 900, 60),
            (16384, 10, 120, 900),  # longer than the interval: training waits for the save in flight
        ],
    )
    @pytest.mark.parametrize("exposed", [True, False])
    def test_mean_goodput(self, gpus: int, block_s: float, restart_s: float, lag_s: float, exposed: bool) -> None:
        mttf_s = DAY_S / (6.5e-3 * gpus / 8)
        interval_s = young_s(block_s, mttf_s)
        scenario = simple(
            nodes=gpus // 8,
            rate=6.5e-3,
            interval_s=interval_s,
            block_s=block_s,
            lag_s=lag_s,
            restart_s=restart_s,
            days=54.0,
            restart_exposed=exposed,
        )
        form = exact if exposed else exact_restart_immune
        expected = form(interval_s, block_s, mttf_s, restart_s, lag_s)
        goodput = results(scenario, 320, seed=5, engine=fast()).goodput(scenario)
        assert abs(standard_errors(goodput, expected)) < 3.5
        assert goodput.mean() == pytest.approx(expected, abs=0.003)

    def test_spares_do_not_change_the_hazard_of_the_job(self) -> None:
        scenario = simple(nodes=100, rate=0.05, spares=60, replace=True, days=20.0, restart_s=0.0)
        failures = results(scenario, 320, engine=fast()).counts[:, FAILURES]
        assert abs(standard_errors(failures, 100.0)) < 3.5


class TestArrivals:
    @pytest.mark.parametrize("shape", [0.5, 0.7, 1.5, 3.0])
    def test_weibull_shapes_keep_the_mean_number_of_failures(self, shape: float) -> None:
        scenario = simple(nodes=200, rate=0.02, days=30.0, process="weibull", weibull_shape=shape)
        failures = results(scenario, 512, engine=fast()).counts[:, FAILURES]
        assert abs(standard_errors(failures, 120.0)) < 3.5
        assert (failures.var() > 120.0) == (shape < 1.0)

    @pytest.mark.parametrize("dispersion", [1.0, 3.0, 7.4])
    def test_weekly_counts_are_as_dispersed_as_asked(self, dispersion: float) -> None:
        scenario = simple(nodes=400, rate=0.01, spares=100, days=70.0, dispersion=dispersion)
        weekly = []
        for block in range(4):
            times = draw(scenario, 3, block).time_s
            runs = np.split(times, np.flatnonzero(np.isinf(times)))
            rows = times.reshape(64, -1)
            weekly += [np.histogram(r[np.isfinite(r)], bins=np.arange(11) * 7 * DAY_S)[0] for r in rows]
            assert len(runs) >= 64
        counts = np.concatenate(weekly)
        assert counts.mean() == pytest.approx(35.0, rel=0.05)
        assert counts.var() / counts.mean() == pytest.approx(dispersion, rel=0.12)

    def test_lemons_keep_the_mean_and_concentrate_faults(self) -> None:
        scenario = simple(nodes=200, rate=0.05, days=20.0, lemon_share=0.05, lemon_factor=20.0)
        assert abs(standard_errors(results(scenario, 256, engine=fast()).counts[:, FAILURES], 200.0)) < 3.5
        tape = draw(scenario, 1, 0)
        nodes = tape.marks[: len(tape.marks) // 64, 0].astype(int)
        top = np.sort(np.bincount(nodes, minlength=200))[-10:].sum()
        assert top / len(nodes) == pytest.approx(10 * 20 / (190 + 10 * 20), abs=0.1)

    def test_other_features_leave_the_faults_of_nodes_as_they_are(self) -> None:
        plain = simple(nodes=50, rate=0.1, days=10.0)
        more = simple(nodes=50, rate=0.1, days=10.0, burst_per_day=0.5, false_alarms_per_day=1.0, startup_failure=0.1)
        one, other = draw(plain, 1, 0), draw(more, 1, 0)
        assert set(one.time_s[np.isfinite(one.time_s)]) < set(other.time_s)


class TestSchedule:
    def test_no_failures(self) -> None:
        found = results(simple(rate=0.0, days=1.0), 2)
        # 139 cycles of 620 s and 220 s of the next.
        np.testing.assert_allclose(found.ledger_s[:, PRODUCTIVE], 139 * 600 + 220)
        np.testing.assert_allclose(found.ledger_s[:, CHECKPOINT], 139 * 20)
        np.testing.assert_allclose(found.worst_day, (139 * 600 + 220) / DAY_S)

    def test_training_waits_for_the_save_in_flight(self) -> None:
        found = results(simple(rate=0.0, days=1.0, lag_s=900.0), 1)
        # The first save ends at 620 s, the 93 after it each 920 s later, at 86,180 s.
        np.testing.assert_allclose(found.ledger_s[:, PRODUCTIVE], 94 * 600 + 220)

    def test_slow_ranks_take_their_share(self) -> None:
        scenario = simple(rate=0.0, days=1.0)
        slow = msgspec.structs.replace(scenario, job=msgspec.structs.replace(scenario.job, straggler_share=0.25))
        found = results(slow, 1)
        np.testing.assert_allclose(found.ledger_s[0, STRAGGLER], (139 * 600 + 220) * 0.25)

    def test_two_faults(self) -> None:
        """One tier; the time of each fault is read from the tape, all else is worked out here."""
        faults = (TraceFault(10_000.0, 0, 0.0), TraceFault(47_000.0, 1, 0.0))
        scenario = traced(simple(nodes=2), faults, 1.0, days=1.0)
        tape = draw(scenario, 1, 0)
        found = results(scenario, 64)
        for run in range(64):
            first, second = tape.time_s[tape.of_run[run, 0] :][:2]
            saved = [int(first // 620)]
            start = first + 120
            saved.append(int((second - start) // 620) if second > start else 0)
            start = second + 120
            ends = DAY_S - start
            if first < second < first + 120 or ends < 0:
                continue
            lost = min(600.0, first % 620) + min(600.0, (second - first - 120) % 620)
            rest = int(ends // 620)
            productive = (sum(saved) + rest) * 600 + min(600.0, ends % 620)
            assert found.ledger_s[run, PRODUCTIVE] == pytest.approx(productive, abs=1e-6)
            assert found.ledger_s[run, ROLLBACK] == pytest.approx(lost, abs=1e-6)
            assert found.ledger_s[run, RESTART] == pytest.approx(240.0)
            assert found.counts[run, INTERRUPTIONS] == 2

    @pytest.mark.parametrize("seed", range(24))
    def test_tiers_step_by_step(self, seed: int) -> None:
        """Several tiers and kinds with lags, against a walk from save to save."""
        rng = random.Random(seed)
        tiers = tuple(
            Tier(
                name=f"tier{i}",
                every=1 if i == 0 else rng.choice([1, 2, 4]),
                block_s=rng.choice([0.0, 5.0, 40.0]),
                persist_lag_s=rng.choice([0.0, 100.0, 700.0, 2500.0]),
                load_s=rng.choice([0.0, 33.0]),
            )
            for i in range(rng.choice([1, 2, 3]))
        )
        kinds = tuple(
            FailureKind(name=f"kind{i}", share=1.0 if i == 0 else 0.0, detect_s=rng.choice([0.0, 50.0]), tier=i)
            for i in range(len(tiers))
        )
        job = Job(
            nodes=4,
            rate_per_node_day=0.0,
            interval_s=rng.choice([300.0, 777.0]),
            tiers=tiers,
            kinds=kinds,
            restart=RestartPhases(decide_s=5.0, start_s=100.0),
        )
        faults = tuple(
            TraceFault(rng.uniform(0, 3 * DAY_S), rng.randrange(4), 0.0, rng.randrange(len(kinds))) for _ in range(25)
        )
        scenario = traced(Scenario(job=job, days=2.0), faults, 3.0)
        tape, found = draw(scenario, 1, 0), results(scenario, 8)
        for run in range(8):
            first = tape.of_run[run, 0]
            events = []
            for i in range(first, len(tape.time_s)):
                if math.isinf(tape.time_s[i]):
                    break
                events.append((tape.time_s[i], int(tape.marks[tape.of_run[run, 1] + tape.order[i], 1])))
            productive, rollback = walk(scenario, events)
            assert found.ledger_s[run, PRODUCTIVE] == pytest.approx(productive, abs=1e-5)
            assert found.ledger_s[run, ROLLBACK] == pytest.approx(rollback, abs=1e-5)


def walk(scenario: Scenario, events: list[tuple[float, int]]) -> tuple[float, float]:
    """Productive and rolled-back seconds of one run, second by second as a person would: one save after the other."""
    job, end_s = scenario.job, scenario.days * DAY_S
    periods = list(np.cumprod([t.every for t in job.tiers]))
    held = [0] * len(periods)
    start, count, needed, rollback = 0.0, 0, 0, 0.0
    partial = 0.0
    for time, kind in [*events, (end_s, -1)]:
        partial = 0.0
        if time >= start:
            now, durable_at = start, [-math.inf] * len(periods)
            while True:
                due = [i for i, period in enumerate(periods) if (count + 1) % period == 0]
                trained = now + job.interval_s
                paused = max([trained, *(durable_at[i] for i in due)])
                done = paused + sum(job.tiers[i].block_s for i in due)
                if done > time:
                    partial = min(time, trained) - now
                    break
                for i in due:
                    durable_at[i] = done + job.tiers[i].persist_lag_s
                    if durable_at[i] <= time:
                        held[i] = count + 1
                now, count = done, count + 1
            needed = 0
        if kind < 0:
            break
        needed = max(needed, job.kinds[kind].tier)
        restored = max(held[needed:])
        source = needed + held[needed:].index(restored)
        rollback += (count - restored) * job.interval_s + partial
        count = restored
        held[: needed + 1] = [restored] * (needed + 1)
        start = time + job.kinds[kind].detect_s + job.restart.decide_s + job.restart.start_s + job.tiers[source].load_s
    return count * job.interval_s + partial, rollback


class TestWhatMustHold:
    base = simple(nodes=128, rate=0.05, spares=14, replace=True, days=20.0, restart_s=300.0)

    def goodput(self, **changes: object) -> np.ndarray:
        job = {k: v for k, v in changes.items() if k in Job.__struct_fields__}
        rest = {k: v for k, v in changes.items() if k not in job}
        scenario = msgspec.structs.replace(self.base, job=msgspec.structs.replace(self.base.job, **job), **rest)
        return results(scenario, 192, engine=fast()).goodput(scenario)

    def better(self, one: np.ndarray, other: np.ndarray) -> bool:
        """Not worse in the mean by more than the noise of the difference."""
        gain = one - other
        return float(gain.mean()) > -3.0 * float(gain.std(ddof=1)) / math.sqrt(len(gain))

    def test_more_failures_never_help(self) -> None:
        values = [self.goodput(rate_per_node_day=rate) for rate in (0.0, 0.01, 0.03, 0.05, 0.08)]
        assert all(self.better(*pair) for pair in itertools.pairwise(values))
        assert values[0].mean() > values[-1].mean() + 0.02

    def test_more_spares_never_hurt(self) -> None:
        values = [self.goodput(spares=n) for n in (30, 14, 10, 8, 6)]
        assert all(self.better(*pair) for pair in itertools.pairwise(values))
        assert values[0].mean() > values[-1].mean() + 0.1

    def test_shorter_blocking_never_hurts(self) -> None:
        values = [self.goodput(tiers=(Tier(name="disk", block_s=s),)) for s in (0.0, 10.0, 30.0, 60.0)]
        assert all(self.better(*pair) for pair in itertools.pairwise(values))

    def test_immunity_helps_and_start_up_failures_cost(self) -> None:
        base = self.goodput()
        assert self.better(self.goodput(restart_exposed=False), base)
        assert self.goodput(startup_failure=0.3).mean() < base.mean() - 0.005

    def test_shares_add_up(self) -> None:
        found: Results = results(self.base, 64)
        assert len(LEDGER) == found.ledger_s.shape[1]
        assert (found.worst_day <= found.goodput(self.base) + 1e-9).all()
        assert found.down_hours.sum() == 64 * (20 * 24 + 1)
        assert found.ledger_s[:, NO_SPARE].max() > 0.0
