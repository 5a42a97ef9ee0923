"""Many runs in a window: sums by hand, windows that add up, error budgets."""

from __future__ import annotations

import json
import random
from typing import Any

import msgspec
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tests.goodput.test_losses import Drawn

from keepstep.goodput import partition
from keepstep.goodput.fleet import FleetGoodput, LostRow, RunRecord, exposures_of, failures_of, fleet
from keepstep.goodput.losses import NS_PER_H, Size
from keepstep.goodput.pace import Pace
from keepstep.goodput.slo import check_objective
from keepstep.goodput.verified import FaultRecord
from keepstep.records.codec import from_json, to_json
from keepstep.records.errors import ConfigError
from keepstep.records.losses import KEPT_APART, LOSSES, PARTS, Amount
from keepstep.records.timeline import Mark, MarkKind

H = NS_PER_H


def mark(t_h: float, kind: MarkKind, cycle: int = 0, **attrs: Any) -> Mark:
    return Mark(t_ns=round(t_h * H), kind=kind, cycle=cycle, attrs=attrs)


def run(name: str, at_h: float, gpus: int, *, cause: str = "hardware", train_h: float = 6, **more: Any) -> RunRecord:
    """10 hours: start 1, train 4 (1 of it rolled back), detect 0.5, decide 0.5, restart 1, train the rest, drain."""
    marks = [
        mark(at_h, "run_started"),
        mark(at_h, "cycle_started"),
        mark(at_h, "attached"),
        mark(at_h, "restored", step=0, source="none"),
        mark(at_h + 1, "first_step", step=1),
        mark(at_h + 4, "committed", step=31, checkpoint="c"),
        mark(at_h + 4, "step", step=31),
        mark(at_h + 5, "step", step=41),
        mark(at_h + 5.5, "fault", occurred_ns=round((at_h + 5) * H), detected_ns=round((at_h + 5.5) * H), cause=cause),
        mark(at_h + 5.5, "captured"),
        mark(at_h + 5.5, "stopped"),
        mark(at_h + 6, "cycle_started", 1),
        mark(at_h + 6, "attached", 1),
        mark(at_h + 6.5, "restored", 1, step=31, source="disk"),
        mark(at_h + 7, "first_step", 1, step=32),
        mark(at_h + 10, "drain", 1, completed_step=62),
        mark(at_h + 10, "run_ended", 1, outcome="succeeded"),
    ]
    fields: dict[str, Any] = {
        "sizes": {
            (0, 0): Size(gpus=gpus, spare_gpus=2, nodes=("a", "b"), spares=("s",)),
            (0, 1): Size(gpus=gpus, spare_gpus=2, nodes=("a", "s")),
        },
        "faults": (fault(at_h + 5.5, fault_class=cause),),
    }
    return RunRecord(run_id=name, part=partition(marks, whole_history=True), **{**fields, **more})


def fault(t_h: float, **more: Any) -> FaultRecord:
    fields: dict[str, Any] = {"fault_class": "hardware", "cause": "exit", "node": "b", "said": "hardware"}
    return FaultRecord(key=(0, 0), incident="INC-0001", time_ns=round(t_h * H), **{**fields, **more})


def hours(part: Amount | None) -> float | None:
    return None if part is None else part.gpu_h


def table(rows: list[LostRow]) -> dict[str, tuple[float | None, int]]:
    return {row.key: (row.lost.gpu_h, row.incidents) for row in rows}


class TestTotals:
    RUNS = (run("one", 0, 8), run("two", 5, 2, cause="fabric"))

    def account(self, begin_h: float = 0, end_h: float = 20, **more: Any) -> FleetGoodput:
        return fleet(self.RUNS, round(begin_h * H), round(end_h * H), **more)

    def test_each_loss_in_gpu_hours(self) -> None:
        found = self.account(price=2.0)
        assert {name: hours(p) for name, p in found.totals.parts.items() if p is None or p.gpu_h} == {
            "detection": 5.0,
            "decision": 5.0,
            "replacement": 10.0,
            "rollback": 10.0,
            "straggler": None,
            "false_positive": None,
            "productive": 60.0,
            "startup": 10.0,
        }
        assert (found.wall.gpu_h, found.wall.usd, found.wall.time_s) == (100.0, 200.0, 72000.0)
        assert found.unknown_in == {"straggler": 2, "false_positive": 2}

    def test_shares_of_what_was_lost(self) -> None:
        found = self.account()
        assert found.loss_shares == pytest.approx(
            {"detection": 0.125, "decision": 0.125, "replacement": 0.25, "rollback": 0.25, "startup": 0.25}
        )
        assert found.explained == pytest.approx(0.75)

    def test_ratios_weigh_by_gpus(self) -> None:
        ratios = self.account().totals.ratios
        assert ratios.ettr_without_queue == ratios.ettr_with_queue == 0.6
        assert ratios.paid_gpu_goodput == pytest.approx(60 / 140)  # two spare GPUs each for 10 hours
        assert ratios.step_time_factor is None
        paced = [
            msgspec.structs.replace(r, pace=Pace(factor=f, spans=()))
            for r, f in zip(self.RUNS, (1.0, 1.5), strict=True)
        ]
        assert fleet(paced, 0, 20 * H).totals.ratios.step_time_factor == pytest.approx((1.0 * 48 + 1.5 * 12) / 60)

    def test_charged_to_class_cause_and_node(self) -> None:
        found = self.account()
        assert table(found.by_class) == {"hardware": (24.0, 1), "fabric": (6.0, 1), "startup": (10.0, 0)}
        assert table(found.by_cause) == {"exit": (30.0, 2), "startup": (10.0, 0)}
        assert table(found.by_node) == {"b": (30.0, 2)}
        assert [row.key for row in found.by_class] == ["hardware", "startup", "fabric"]
        assert sum(row.share or 0 for row in found.by_class) == pytest.approx(1)
        assert found.by_rack == []

    def test_racks_where_any_is_known(self) -> None:
        runs = [run("one", 0, 8, faults=(fault(5.5, rack="k7"),)), run("two", 0, 2)]
        assert table(fleet(runs, 0, 20 * H).by_rack) == {"k7": (24.0, 1), "unknown": (6.0, 1)}

    def test_incidents_the_dearest_first(self) -> None:
        found = self.account(price=1.5)
        assert [(i.run_id, i.cost.gpu_h, i.cost.usd) for i in found.incidents] == [
            ("one", 24.0, 36.0),
            ("two", 6.0, 9.0),
        ]
        assert {name: a.gpu_h for name, a in found.incidents[0].losses.items()} == {
            "decision": 4.0,
            "detection": 4.0,
            "replacement": 8.0,
            "rollback": 8.0,
        }

    def test_a_window_cuts_runs_at_its_edges(self) -> None:
        found = self.account(
            5.25, 7
        )  # of run one: detect 0.25, decide 0.5, restart 1; of run two: start 0.75, training 1
        assert {name: hours(p) for name, p in found.totals.parts.items() if p is not None and p.time_ns} == {
            "detection": 2.0,
            "decision": 4.0,
            "replacement": 8.0,
            "productive": 2.0,
            "startup": 1.5,
        }
        assert [(r.run_id, r.since, r.until) for r in found.runs] == [
            ("one", "1970-01-01T05:15:00.000000000Z", "1970-01-01T07:00:00.000000000Z"),
            ("two", "1970-01-01T05:15:00.000000000Z", "1970-01-01T07:00:00.000000000Z"),
        ]
        assert [i.run_id for i in found.incidents] == ["one"]

    def test_runs_outside_are_in_no_row(self) -> None:
        assert [r.run_id for r in self.account(11, 20).runs] == ["two"]
        assert self.account(16, 20).runs == []

    def test_the_record_survives_json(self) -> None:
        found = self.account(slo=0.9, price=1.0)
        assert from_json(to_json(found), FleetGoodput) == found
        assert found.schema == "keepstep.fleet_goodput/1"
        assert found.rates.schema == "keepstep.fleet_rates/1"


def test_names_that_others_rely_on() -> None:
    assert LOSSES == ("detection", "decision", "replacement", "rollback", "straggler", "false_positive")
    assert set(KEPT_APART) == {"productive", "ckpt_block", "queue", "startup", "drain", "other"}
    told = json.loads(to_json(fleet([run("one", 0, 8)], 0, 20 * H, slo=0.9)))
    assert set(told) >= {
        *(
            "schema",
            "since",
            "until",
            "price_usd_per_gpu_h",
            "wall",
            "totals",
            "unknown_in",
            "loss_shares",
            "explained",
        ),
        *("by_cause", "by_class", "by_node", "by_rack", "incidents", "slo", "rates", "runs", "left_out"),
    }
    assert set(told["totals"]) >= {
        "parts",
        "ratios",
        "paid",
        "slow_steps",
        "actions",
        "actions_verified",
        "actions_wrong",
    }
    assert set(told["totals"]["parts"]["rollback"]) == {"time_ns", "time_s", "gpu_ns", "gpu_h", "usd"}
    assert {"class", "cause", "node", "rack", "cost", "wrong"} <= set(told["incidents"][0])
    assert {"sku", "class", "per_1000_node_days", "low", "high"} <= set(told["rates"]["rates"][0])


class TestUnknown:
    def test_runs_without_steps_are_in_no_ratio_and_no_share(self) -> None:
        silent = RunRecord(
            run_id="s",
            part=partition([mark(0, "run_started"), mark(0, "cycle_started"), mark(9, "run_ended")]),
            sizes={(0, 0): Size(gpus=100)},
        )
        found = fleet([silent, run("one", 0, 8)], 0, 20 * H, slo=0.9)
        assert found.totals.ratios.ettr_without_queue == 0.6
        assert found.unknown_in["productive"] == 1
        assert found.slo is not None
        assert found.slo.runs_left_out == 1
        assert "other" not in found.loss_shares

    def test_false_positives_of_those_runs_that_know(self) -> None:
        wrong = fault(5.5, acted="evicted", verified="user_code")
        runs = [run("one", 0, 8, faults=(wrong,)), run("two", 0, 2)]
        found = fleet(runs, 0, 20 * H)
        assert hours(found.totals.parts["false_positive"]) == 24.0
        assert hours(found.totals.parts["rollback"]) == 2.0
        assert found.unknown_in["false_positive"] == 1
        assert (found.totals.actions, found.totals.actions_verified, found.totals.actions_wrong) == (1, 1, 1)
        assert [i.wrong for i in found.incidents] == [True, None]
        assert found.loss_shares["false_positive"] == pytest.approx(24 / 40)

    def test_a_run_of_unknown_size_makes_no_gpu_time_up(self) -> None:
        found = fleet([run("one", 0, 8), run("two", 0, 2, sizes={})], 0, 20 * H, slo=0.5)
        assert found.wall.gpu_h is None
        assert found.wall.time_s == 72000
        assert found.totals.ratios.ettr_without_queue == 0.6
        assert found.slo is not None
        assert (found.slo.total_gpu_h, found.slo.runs_left_out) == (80.0, 1)

    def test_nothing_at_all(self) -> None:
        found = fleet([], 0, H, slo=0.9)
        assert (found.runs, found.incidents, found.loss_shares, found.explained) == ([], [], {}, None)
        assert found.slo is not None
        assert (found.slo.attained, found.slo.burn_rate, found.slo.left_share) == (None, None, None)


class TestSlo:
    def test_budget_spent_left_and_burn_rate(self) -> None:
        slo = fleet([run("one", 0, 8)], 0, 14 * H, slo=0.5, price=3.0).slo
        assert slo is not None
        assert (slo.total_gpu_h, slo.budget_gpu_h, slo.spent_gpu_h, slo.left_gpu_h) == (80.0, 40.0, 32.0, 8.0)
        assert (slo.attained, slo.left_share, slo.burn_rate) == pytest.approx((0.6, 0.2, 0.8))
        assert (slo.budget_usd, slo.spent_usd) == (120.0, 96.0)
        assert slo.recent_burn_rate is None  # nothing ran in the last two hours
        assert slo.recent_since == "1970-01-01T12:00:00.000000000Z"

    def test_the_recent_rate_is_of_the_last_seventh(self) -> None:
        slo = fleet([run("one", 0, 8)], 0, 7 * H, slo=0.75).slo
        assert slo is not None
        assert slo.recent_burn_rate == pytest.approx(4.0)  # the restart from 6 to 7: all of it lost
        assert slo.burn_rate == pytest.approx(4 / 7 / 0.25)
        assert slo.left_gpu_h == pytest.approx(56 / 4 - 32)

    @pytest.mark.parametrize("objective", [0.0, 1.0, -1.0, 90.0, float("nan")])
    def test_an_objective_is_a_share(self, objective: float) -> None:
        with pytest.raises(ConfigError, match=r"--slo .*above 0 and below 1"):
            check_objective(objective)


class TestRatesInput:
    def test_active_nodes_are_exposed_from_the_begin_of_a_cycle_to_its_end(self) -> None:
        spans = {(e.node, e.begin_ns / H, e.end_ns / H) for e in exposures_of(run("one", 0, 8))}
        assert spans == {("a", 0, 10), ("b", 0, 6), ("s", 6, 10)}

    def test_models_of_nodes(self) -> None:
        record = run("one", 0, 8, skus={"b": "H100"}, sku="A100")
        assert {e.sku for e in exposures_of(record)} == {"H100"}  # the only one that is known speaks for all
        mixed = run("one", 0, 8, skus={"b": "H100", "s": "B200"}, sku="A100")
        assert {(e.node, e.sku) for e in exposures_of(mixed)} == {("a", "A100"), ("b", "H100"), ("s", "B200")}
        assert {e.sku for e in exposures_of(run("one", 0, 8))} == {"unknown"}

    def test_what_interrupts_counts(self) -> None:
        asked = run("one", 0, 8, faults=(fault(5.5, interrupts=False),), vanished_ns=(7 * H,))
        assert [(f.t_ns // H, f.fault_class, f.node) for f in failures_of(asked)] == [(7, "unknown", None)]
        found = fleet([asked, run("two", 0, 8)], 0, 20 * H).rates
        assert (found.failures, found.incidents) == (2, 2)


@given(seeds=st.lists(st.integers(0, 2**32), min_size=1, max_size=4), slo=st.floats(0.01, 0.99))
@settings(max_examples=60, deadline=None)
def test_windows_of_a_fleet_add_up(seeds: list[int], slo: float) -> None:
    records = []
    for seed in seeds:
        drawn = Drawn(seed, bool(seed % 2))
        faults = [fault(0, acted="evicted", verified="user_code")] if seed % 3 else []
        records.append(
            RunRecord(
                run_id=str(seed),
                part=drawn.part,
                sizes=drawn.sizes,
                faults=tuple(msgspec.structs.replace(f, key=key) for f in faults for key in sorted(drawn.wrong)),
                stragglers=tuple(drawn.spans) if seed % 5 else None,
            )
        )
    rng = random.Random(seeds[0])
    a, b, c = sorted(rng.sample(range(-5, 200), 3))
    one, other, both = (fleet(records, x, y, slo=slo) for x, y in ((a, b), (b, c), (a, c)))
    for name in PARTS:
        found = [f.totals.parts[name] for f in (one, other, both)]
        times = [0 if part is None else part.time_ns for part in found]
        gpu = [0 if part is None else part.gpu_ns or 0 for part in found]
        assert times[0] + times[1] == times[2]
        assert gpu[0] + gpu[1] == gpu[2]
    assert sum(p.time_ns for p in both.totals.parts.values() if p is not None) == both.wall.time_ns
    assert both.slo is not None
    assert one.slo is not None
    assert other.slo is not None
    assert one.slo.spent_gpu_h + other.slo.spent_gpu_h == pytest.approx(both.slo.spent_gpu_h)
    charged = sum(row.lost.gpu_ns or 0 for row in both.by_class)
    assert charged == sum(row.lost.gpu_ns or 0 for row in both.by_cause)
    by_incident = sum(i.cost.gpu_ns or 0 for i in both.incidents)
    assert by_incident <= charged
