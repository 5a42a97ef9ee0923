"""Both engines give the same run by run, and every second of a run is in one bucket, whatever is switched on."""

from __future__ import annotations

import msgspec
import numpy as np
import pytest

from keepstep.planner.scenario import DAY_S
from keepstep.planner.sim.campaign import Results, pick_engine, simulate
from keepstep.planner.sim.model import EXHAUSTED, IDLE_FAULTS, MOST_DOWN, NO_SPARE, Floats, Ints
from keepstep.planner.sim.nodepolicy import KEEP, RETIRE, built_in
from keepstep.records.errors import ConfigError
from tests.planner.scenarios import any_scenario, results, simple

RUNS = 12
GROUP = 15


def same(one: Results, other: Results) -> bool:
    """Alike to a part in a billion, and in every count."""
    width = max(len(one.down_hours), len(other.down_hours))
    hours = [np.pad(r.down_hours, (0, width - len(r.down_hours))) for r in (one, other)]
    return (
        np.allclose(one.ledger_s, other.ledger_s, rtol=1e-9, atol=1e-6)
        and np.array_equal(one.counts, other.counts)
        and np.allclose(one.worst_day, other.worst_day, rtol=1e-9, atol=1e-9)
        and np.array_equal(hours[0], hours[1])
    )


@pytest.mark.parametrize("group", [*range(6), *(pytest.param(g, marks=pytest.mark.slow) for g in range(6, 60))])
def test_engines_agree(group: int) -> None:
    pytest.importorskip("numba")
    for seed in range(GROUP * group, GROUP * (group + 1)):
        scenario = any_scenario(seed)
        by_numpy = results(scenario, RUNS, engine="numpy")
        by_numba = results(scenario, RUNS, engine="numba")
        assert same(by_numpy, by_numba), f"scenario {seed}"
        np.testing.assert_allclose(by_numpy.ledger_s.sum(axis=1), scenario.days * DAY_S, rtol=1e-9)
        assert (by_numpy.ledger_s >= -1e-6).all(), f"scenario {seed}"


def test_scenarios_exercise_everything() -> None:
    """What the comparison above would be worth nothing without."""
    scenarios = [any_scenario(seed) for seed in range(6 * GROUP)]
    totals = np.zeros(10)
    idle = exhausted = 0.0
    for scenario in scenarios[:45]:
        found = results(scenario, 4)
        totals += found.ledger_s.sum(axis=0)
        idle += found.counts[:, 1].sum()
        exhausted += found.counts[:, 2].sum()
    assert (totals > 0.0).all() and idle > 0 and exhausted > 0
    for what in ("retire_after", "burst_per_day", "startup_failure", "false_alarms_per_day", "extra_evictions"):
        assert any(getattr(s, what) for s in scenarios)
    assert {s.process for s in scenarios} == {"exponential", "weibull", "trace"}
    assert {s.spares_in for s in scenarios} == {"pool", "block"}


class TestDeterminism:
    scenario = simple(nodes=32, rate=0.5, spares=4, replace=True, days=4.0)

    def test_same_seed_same_runs_other_seed_other_runs(self) -> None:
        assert same(results(self.scenario, 70), results(self.scenario, 70))
        assert not same(results(self.scenario, 70), results(self.scenario, 70, seed=2))

    @pytest.mark.parametrize("engine", ["numpy", "numba"])
    def test_cores_and_batches_change_nothing(self, engine: str, monkeypatch: pytest.MonkeyPatch) -> None:
        pytest.importorskip(engine)
        one = results(self.scenario, 200, engine=engine)
        if engine == "numba":  # threads; processes are the next test
            assert same(one, results(self.scenario, 200, engine=engine, jobs=2))
        monkeypatch.setattr("keepstep.planner.sim.campaign.BLOCKS_OF_BATCH", {"numpy": 1, "numba": 1})
        assert same(one, results(self.scenario, 200, engine=engine))

    def test_processes_change_nothing(self) -> None:
        done: list[int] = []
        assert same(results(self.scenario, 130), results(self.scenario, 130, jobs=2, progress=done.append))
        assert done[-1] == 130

    def test_a_run_does_not_depend_on_how_many_there_are(self) -> None:
        few, many = results(self.scenario, 10), results(self.scenario, 150)
        np.testing.assert_array_equal(few.ledger_s, many.ledger_s[:10])


class Always:
    """A policy that does one thing."""

    def __init__(self, action: int) -> None:
        self.action = action

    def decide(self, kind: Ints, faults_of_node: Ints, t_s: Floats) -> Ints:
        assert (faults_of_node >= 1).all() and (t_s >= 0.0).all()
        return np.full(len(kind), self.action)


def test_policies_decide() -> None:
    scenario = simple(nodes=32, rate=0.2, days=5.0, replace=True, retire_s=600.0)
    kept = results(scenario, 32, policy=Always(KEEP))
    assert kept.counts[:, MOST_DOWN].max() == 0
    retired = results(scenario, 32, policy=Always(RETIRE))
    waits = retired.ledger_s[:, NO_SPARE] / np.maximum(1, retired.counts[:, EXHAUSTED])
    np.testing.assert_allclose(waits[retired.counts[:, IDLE_FAULTS] == 0], 600.0, rtol=0.2)


class TestEngineChoice:
    def test_a_policy_means_numpy(self) -> None:
        scenario = simple(nodes=8, rate=0.5, days=2.0, spares=2, replace=True, retire_after=2)
        with pytest.raises(ConfigError, match="policy of one's own needs the engine numpy"):
            simulate(scenario, 4, engine="numba", policy=built_in(scenario))
        ours = simulate(scenario, 20, policy=built_in(scenario), jobs=1)
        theirs = simulate(scenario, 20, engine="numpy", jobs=1)
        assert ours.engine == "numpy"
        assert ours.goodput == theirs.goodput

    @pytest.mark.parametrize(
        ("change", "message"),
        [({"runs": 0}, "runs 0"), ({"seed": -1}, "seed -1"), ({"jobs": 0}, "jobs 0"), ({"engine": "c"}, "engine c")],
    )
    def test_bad_arguments_are_named(self, change: dict[str, object], message: str) -> None:
        with pytest.raises(ConfigError, match=message):
            simulate(simple(days=1.0), **change)  # type: ignore[arg-type]

    def test_the_scenario_is_checked(self) -> None:
        with pytest.raises(ConfigError, match="spares -1"):
            simulate(msgspec.structs.replace(simple(), spares=-1), 1)

    def test_campaigns_that_would_not_fit_into_memory(self) -> None:
        with pytest.raises(ConfigError, match=r"days 1e\+06: 3.2e\+06 faults in each run"):
            simulate(simple(days=1e6), 1)

    def test_few_events_are_not_worth_compiling(self) -> None:
        pytest.importorskip("numba")
        assert pick_engine("auto", events=1000.0) == "numpy"
        assert pick_engine("auto", events=1e8) == "numba"
        assert pick_engine("numba", events=1.0) == "numba"
        assert simulate(simple(days=1.0), 2).engine == "numpy"

    def test_without_numba(self, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
        assert simulate(simple(days=1.0), 2).engine == "numpy"
        with pytest.raises(ConfigError, match=r"pip install 'keepstep\[fast\]'"):
            simulate(simple(days=1.0), 2, engine="numba")
