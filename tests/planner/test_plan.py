"""Plans: what they add up to, what they recommend, and their optimum against a search."""

from __future__ import annotations

import math

import msgspec
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from keepstep.goodput.campaign import RateKnowledge, given_rate
from keepstep.goodput.interval import optimal_s
from keepstep.goodput.job import FailureKind, Job, RestartPhases, Tier
from keepstep.goodput.renewal import goodput
from keepstep.planner.optimum import best_interval_s, best_job, with_interval
from keepstep.planner.params import derive
from keepstep.planner.plan import Circumstances, Plan, crossover, make_plan
from keepstep.records.errors import ConfigError

JOB = Job(
    nodes=2048,
    rate_per_node_day=6.5e-3,
    interval_s=600.0,
    tiers=(Tier(name="disk", block_s=10.0, persist_lag_s=60.0),),
    kinds=(
        FailureKind(name="crash", share=0.7, replace=True),
        FailureKind(name="hang", share=0.3, detect_s=600.0, replace=True),
    ),
    restart=RestartPhases(start_s=120.0),
)
TIERED = msgspec.structs.replace(
    JOB,
    tiers=(
        Tier(name="memory", block_s=5.0, load_s=5.0),
        Tier(name="object", every=8, block_s=2.0, persist_lag_s=200.0, load_s=120.0),
    ),
    kinds=(FailureKind(name="crash", share=0.8), FailureKind(name="node", share=0.2, tier=1, replace=True)),
)


def plan(job: Job = JOB, **around: object) -> Plan:
    known = {"rate": given_rate(job.rate_per_node_day, "given"), "price_usd": 2.5, "repair_s": 86_400.0}
    return make_plan(job, Circumstances(**{**known, **around}), {})  # type: ignore[arg-type]


@pytest.mark.parametrize("job", [JOB, TIERED])
def test_goodput_and_losses_add_up(job: Job) -> None:
    made = plan(job)
    lost = msgspec.structs.asdict(made.lost)
    assert made.goodput.exact + math.fsum(lost.values()) == pytest.approx(1.0)
    assert made.lost.__getattribute__(made.dominant) == max(lost.values())
    assert made.goodput_interval[0] < made.goodput.exact < made.goodput_interval[1]
    assert made.expected.lost_usd == pytest.approx(made.expected.lost_gpu_hours * 2.5)
    assert made.expected.usd_per_point == pytest.approx(16_384 * 54 * 24 * 2.5 / 100)


def test_a_point_of_goodput_at_16384_gpus() -> None:
    """0.53 million dollars in 54 days at 2.5 dollars per GPU-hour."""
    assert plan().expected.usd_per_point == pytest.approx(0.53e6, rel=0.01)


def test_recommendations_gain_what_they_say() -> None:
    made = plan()
    gains = {row.change: row for row in made.recommendation}
    base = goodput(with_interval(JOB, made.used_interval_s))
    kinds = (JOB.kinds[0], msgspec.structs.replace(JOB.kinds[1], detect_s=60.0))
    quick = best_job(msgspec.structs.replace(JOB, kinds=kinds))
    assert gains["detection of hang"].gain_points == pytest.approx(100.0 * (goodput(quick) - base))
    rows = [row.gain_points for row in made.recommendation if row.change != "interval"]
    assert rows == sorted(rows, reverse=True)
    assert all(row.gain_points >= 0.0 for row in made.recommendation)


def test_a_fixed_interval_is_kept_and_the_better_one_is_named() -> None:
    made = plan(with_interval(JOB, 3000.0), fixed_interval=True)
    assert made.used_interval_s == 3000.0
    row = next(r for r in made.recommendation if r.change == "interval")
    assert row.gain_points == pytest.approx(100.0 * (goodput(best_job(JOB)) - goodput(with_interval(JOB, 3000.0))))
    assert row.gain_points > 5.0


def test_few_spares_are_called_few() -> None:
    made = plan(spares=5)
    assert made.spares is not None
    assert made.spares.given is not None
    assert made.expected.goodput == made.spares.given.goodput_job
    assert made.expected.goodput == pytest.approx(made.goodput.exact * (1.0 - made.spares.given.stall_share), abs=0.01)
    assert made.dominant == "no_spare"
    row = next(r for r in made.recommendation if r.change == "spares")
    assert (row.now, row.gain_points > 10.0) == ("5", True)


def test_where_restarts_overtake() -> None:
    """R = 15 min: above 2.6k GPUs at d = 10 s, 7.9k at 30 s, 15.8k at 60 s, 79k at 300 s; R = 2 min: never before 148k at 10 s."""
    for block_s, restart_s, gpus in (
        (10, 900, 2.6e3),
        (30, 900, 7.9e3),
        (60, 900, 15.8e3),
        (300, 900, 79e3),
        (10, 120, 148e3),
    ):
        job = Job(
            nodes=1, rate_per_node_day=6.5e-3, interval_s=1.0, tiers=(Tier(name="d", block_s=block_s),),
            restart=RestartPhases(start_s=restart_s),
        )  # fmt: skip
        found = crossover(job)
        assert found.restart_exceeds_both_gpus == pytest.approx(gpus, rel=0.02)
        assert found.restart_is_largest_gpus == pytest.approx(gpus / 4, rel=0.02)
    assert (
        crossover(msgspec.structs.replace(JOB, restart=RestartPhases(), kinds=JOB.kinds[:1])).restart_exceeds_both_gpus
        is None
    )


def test_the_tornado_is_sorted_and_its_ends_are_right() -> None:
    made = plan()
    swings = [row.swing_points for row in made.sensitivity]
    assert swings == sorted(swings, reverse=True)
    row = next(r for r in made.sensitivity if r.input == "blocking")
    assert (row.low, row.high) == (5.0, 20.0)
    tier = msgspec.structs.replace(JOB.tiers[0], block_s=20.0)
    slow = msgspec.structs.replace(JOB, tiers=(tier,), interval_s=made.used_interval_s)
    assert row.goodput_high == pytest.approx(goodput(slow))


def test_what_a_goal_takes() -> None:
    made = plan(goal=0.93)
    assert made.goal is not None
    assert made.goal.restart_s is not None
    factor = made.goal.restart_s / JOB.mean_restart_s()
    kinds = tuple(msgspec.structs.replace(k, detect_s=k.detect_s * factor) for k in JOB.kinds)
    quick = msgspec.structs.replace(JOB, kinds=kinds, restart=RestartPhases(start_s=120.0 * factor))
    assert goodput(best_job(quick)) == pytest.approx(0.93, abs=1e-6)
    hopeless = plan(goal=0.99999).goal
    assert hopeless is not None
    assert hopeless.restart_s is None


def test_knowing_a_rate_that_is_known_is_worth_nothing() -> None:
    sure = plan(rate=RateKnowledge(shape=1e6, node_days=1e6 / 6.5e-3, source=""))
    unsure = plan(rate=RateKnowledge(shape=1.0, node_days=1.0 / 6.5e-3, source=""))
    worth = [next(m.points for m in made.measure if m.input == "failure_rate") for made in (sure, unsure)]
    assert worth[0] == pytest.approx(0.0, abs=1e-3)
    assert worth[1] > 0.1


def test_a_job_that_never_fails() -> None:
    made = plan(msgspec.structs.replace(JOB, nodes=1, rate_per_node_day=1e-12))
    assert made.goodput.exact == pytest.approx(1.0, abs=1e-3)


class TestOptimum:
    def test_one_tier_is_the_closed_form(self) -> None:
        assert best_interval_s(JOB) == optimal_s(10.0, JOB.mttf_s, 60.0)

    def test_tiers_against_a_grid(self) -> None:
        best = best_job(TIERED)
        values = []
        for interval_s in (60, 100, 150, 200, 250, 300, 400, 500, 700, 1000, 1500):
            for every in range(1, 40):
                tiers = (TIERED.tiers[0], msgspec.structs.replace(TIERED.tiers[1], every=every))
                values.append(goodput(msgspec.structs.replace(TIERED, interval_s=float(interval_s), tiers=tiers)))
        assert goodput(best) >= max(values) - 1e-5

    @settings(max_examples=30)
    @given(st.floats(0.01, 600.0), st.floats(0.0, 600.0), st.floats(1e-4, 3e-2), st.floats(0.3, 3.0))
    def test_no_other_interval_is_better(self, block_s: float, lag_s: float, rate: float, factor: float) -> None:
        job = msgspec.structs.replace(
            JOB, rate_per_node_day=rate, tiers=(Tier(name="d", block_s=block_s, persist_lag_s=lag_s),)
        )
        best_s = best_interval_s(job)
        assert goodput(with_interval(job, best_s * factor)) <= goodput(with_interval(job, best_s)) + 1e-9


class TestParams:
    def test_a_70b_model_on_2048_nodes(self) -> None:
        """1.1 TB; almost a minute at 20 GB/s; half a gigabyte a node, twice that if saves overlap."""
        found = derive(70e9, 2048, storage_gbps=20.0)
        assert found.checkpoint_bytes == pytest.approx(1.12e12)
        assert found.persist_lag_s == found.block_synchronous_s == pytest.approx(56.0)
        assert found.bytes_per_node == pytest.approx(0.547e9, rel=1e-3)
        assert found.host_ram_overlapped_bytes_per_node == 2 * found.host_ram_bytes_per_node
        assert found.put_requests == 2 * 16_384  # 68 MB a GPU: two parts of 64 MiB
        assert found.put_rate_per_s == pytest.approx(585, abs=1)
        assert found.prefixes_needed == 1
        assert derive(70e9, 2048, storage_gbps=400.0).prefixes_needed == 4

    @pytest.mark.parametrize("name", ["params", "nodes", "storage_gbps", "stage_gbps", "bytes_per_param"])
    def test_nonsense_names_its_flag(self, name: str) -> None:
        values = {"params": 1e9, "nodes": 1, "storage_gbps": 1.0, name: 0}
        with pytest.raises(ConfigError, match=f"--{name.replace('_', '-')} 0"):
            derive(**values)  # type: ignore[arg-type]
