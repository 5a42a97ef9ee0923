"""Many machines at once are one incident; what came before tells whether a failure follows the job or the machine."""

from __future__ import annotations

from typing import Any

import msgspec
import pytest

from keepstep.attribution.history import Past, compared
from keepstep.attribution.incident import LONGEST_WAIT_S, incidents
from keepstep.attribution.places import RankMap
from keepstep.attribution.rules.common_cause import common_cause
from keepstep.catalog.load import Catalog, shipped
from keepstep.records.codec import from_json, to_json
from keepstep.records.event import Event
from keepstep.records.verdict import Verdict, verdict_fields, verdict_of
from tests.attribution.making import CATALOG, GPU, T0, S, attribute, entry, event

WITH_COMMON = Catalog(
    [
        *CATALOG,
        *(s for s in shipped() if s.kind in ("derived.common", "derived.history")),
        entry("check.nccl", "root", "node", 3, {"hardware": 2.0}, "drain_at_checkpoint", kind="check.failed"),
        entry("power.brake", "root", "gpu", 1, {"hardware": 2.0}, "drain_at_checkpoint", kind="gpu.throttle"),
        entry("gsp.timeout", "root", "gpu", 1, {"hardware": 1.0, "framework": 2.0}, "reset_gpu", kind="gpu.xid"),
        entry("peer.lost", "root", "node", 4, {"fabric": 2.0}, "restart_job", kind="nccl.error"),
        entry("link.fatal", "root", "gpu", 2, {"fabric": 2.6, "hardware": 1.4}, "reset_gpu", kind="gpu.xid"),
        entry("slow.rank", "root", "rank", 2, {"hardware": 3.0}, "drain_at_checkpoint", kind="step.slow"),
    ]
)


def on_nodes(name: str, count: int, apart_s: float = 1.0, **more: object) -> list[Event]:
    kind = WITH_COMMON[name].kind
    base = "gpu.hint" if name not in {s.id for s in CATALOG} else name
    made = []
    for number in range(count):
        one = event(base, number * apart_s, node=f"n{number:03d}", path=f"n{number}.log")
        fields = {f: getattr(one, f) for f in one.__struct_fields__}
        made.append(Event(**(fields | {"signature": name, "kind": kind} | more)))
    return made


class TestManyMachines:
    @pytest.mark.parametrize("count", [3, 40])
    def test_ports_that_go_down_together_are_one_switch(self, count: int) -> None:
        verdict = attribute(on_nodes("link.down", count), WITH_COMMON)
        assert (verdict.fault_class, verdict.action) == ("fabric", "ask_human")
        assert verdict.signature == "derived.common.fabric"
        assert verdict.entity.node is None

    def test_one_port_is_its_own(self) -> None:
        verdict = attribute(on_nodes("link.down", 1), WITH_COMMON)
        assert (verdict.signature, verdict.action) == ("link.down", "cordon_node")

    def test_ports_that_go_down_over_hours_are_each_their_own(self) -> None:
        assert common_cause(on_nodes("link.down", 5, apart_s=3600), WITH_COMMON) == []

    def test_what_they_share_is_named(self) -> None:
        derived = common_cause(on_nodes("link.down", 3, attrs={"leaf": "sw-17"}), WITH_COMMON)
        assert [e.attrs["shared"] for e in derived] == [" (leaf sw-17)"]

    def test_machines_that_throttle_together_share_power_or_cooling(self) -> None:
        verdict = attribute(on_nodes("power.brake", 6), WITH_COMMON)
        assert (verdict.signature, verdict.action) == ("derived.common.power", "ask_human")

    def test_one_driver_complaint_on_many_machines_is_software(self) -> None:
        verdict = attribute(on_nodes("gsp.timeout", 4), WITH_COMMON)
        assert (verdict.fault_class, verdict.action) == ("framework", "ask_human")

    def test_links_between_gpus_that_fail_on_many_machines_are_their_switch(self) -> None:
        verdict = attribute(on_nodes("link.fatal", 4), WITH_COMMON)
        assert (verdict.fault_class, verdict.action) == ("fabric", "ask_human")

    def test_a_check_that_nearly_all_fail_is_broken(self) -> None:
        verdict = attribute(on_nodes("check.nccl", 8), WITH_COMMON)
        assert (verdict.signature, verdict.action) == ("derived.common.check", "ask_human")

    def test_a_check_that_few_fail_is_not(self) -> None:
        healthy = [event("idle.clock", 0, node=f"ok{n}") for n in range(20)]
        assert common_cause([*on_nodes("check.nccl", 3), *healthy], WITH_COMMON) == []

    def test_a_report_that_counts_the_nodes_is_enough(self) -> None:
        report = on_nodes("check.nccl", 1, attrs={"check": "allreduce", "nodes_failed": 32, "nodes_total": 32})
        verdict = attribute(report, WITH_COMMON)
        assert verdict.signature == "derived.common.check" and "allreduce" in verdict.summary

    def test_the_programs_own_signs_need_no_other_cause(self) -> None:
        assert common_cause(on_nodes("script.error", 8), WITH_COMMON) == []

    def test_without_times_half_of_the_machines_must_show_it(self) -> None:
        untimed = on_nodes("link.down", 3, time_ns=None)
        assert [e.signature for e in common_cause(untimed, WITH_COMMON)] == ["derived.common.fabric"]
        healthy = [event("idle.clock", 0, node=f"ok{n}") for n in range(9)]
        assert common_cause([*untimed, *healthy], WITH_COMMON) == []

    @pytest.mark.parametrize("name", ["link.down", "power.brake", "gsp.timeout", "check.nccl", "gpu.gone", "node.lost"])
    def test_forty_machines_are_never_forty_cordons(self, name: str) -> None:
        events = on_nodes(name, 40)
        groups = incidents(events, WITH_COMMON)
        assert len(groups) == 1
        assert attribute(groups[0].events, WITH_COMMON).action == "ask_human"


class TestIncidents:
    def test_ranks_of_one_job_fail_together(self) -> None:
        ranks = RankMap(node_of={0: "a", 1: "b"}, nodes=frozenset({"a", "b"}))
        events = [
            event("gpu.gone", 0, node="a", gpu=GPU),
            event("watchdog", 1800, rank=1),
            event("peer.gone", 1801, rank=0),
        ]
        (found,) = incidents(events, CATALOG, ranks)
        assert found.nodes == {"a", "b"} and found.ranks == {0, 1}

    def test_progress_between_makes_two(self) -> None:
        events = [
            event("node.lost", 0, node="a", rank=0),
            event("job.progress", 300),
            event("script.error", 600, rank=0),
        ]
        assert [len(i.events) for i in incidents(events, CATALOG)] == [1, 2]

    def test_machines_without_a_job_fail_alone(self) -> None:
        events = [event("gpu.gone", 0, node="a", gpu=GPU), event("gpu.wearing", 5, node="b", gpu=GPU)]
        assert [i.nodes for i in incidents(events, CATALOG)] == [{"a"}, {"b"}]

    def test_a_long_gap_makes_two(self) -> None:
        events = [event("gpu.gone", t, node="a", gpu=GPU) for t in (0, LONGEST_WAIT_S + 1)]
        assert len(incidents(events, CATALOG)) == 2

    def test_signs_without_times_join_the_only_incident(self) -> None:
        events = [event("gpu.gone", 0, node="a", gpu=GPU), event("script.error", None, rank=1)]
        (found,) = incidents(events, CATALOG)
        assert len(found.events) == 2

    def test_nothing_failed_is_no_incident(self) -> None:
        assert incidents([event("job.progress", 0), event("gpu.gone", 0, stale="replay")], CATALOG) == []

    def test_the_window_begins_at_the_last_progress(self) -> None:
        events = [
            event("before_first_step", 0, rank=0),
            event("job.progress", 100),
            event("before_first_step", 150, rank=0),
            event("script.error", 200, rank=0),
        ]
        (found,) = incidents(events, CATALOG)
        assert [e.signature for e in found.events] == ["job.progress", "before_first_step", "script.error"]


def verdict_on(name: str, at: float, **more: object) -> Verdict:
    fields = {f: getattr(event("gpu.hint", at), f) for f in ("time_ns", "time_quality", "evidence")}
    entry_ = WITH_COMMON[name]
    return attribute([Event(kind=entry_.kind, signature=name, severity="error", **fields, **more)], WITH_COMMON)  # type: ignore[arg-type]


class TestHistory:
    def test_the_same_failure_on_another_machine_travels_with_the_job(self) -> None:
        past = [Past(verdict_on("script.error", 0, node="a"), T0)]
        signs = compared(verdict_on("script.error", 900, node="b"), T0 + 900 * S, past)
        assert [s.signature for s in signs] == ["derived.history.software"]

    def test_the_same_part_after_its_repair_is_silicon(self) -> None:
        past = [Past(verdict_on("gpu.wearing", 0, node="a"), T0, repaired=True)]
        current = verdict_on("gpu.wearing", 900, node="a")
        signs = compared(current, T0 + 900 * S, past)
        assert [s.signature for s in signs] == ["derived.history.silicon"]
        again = attribute([*(w.event for w in current.evidence), *signs], WITH_COMMON)
        assert again.action == "cordon_node" and again.entity.node == "a"

    def test_the_same_part_without_a_repair_is_the_same_incident_going_on(self) -> None:
        past = [Past(verdict_on("gpu.wearing", 0, node="a"), T0)]
        assert compared(verdict_on("gpu.wearing", 900, node="a"), T0 + 900 * S, past) == []

    def test_two_broken_gpus_are_not_software(self) -> None:
        past = [Past(verdict_on("gpu.gone", 0, node="a"), T0)]
        assert compared(verdict_on("gpu.gone", 900, node="b"), T0 + 900 * S, past) == []

    def test_a_slow_place_that_moves_is_a_shared_cause(self) -> None:
        past = [Past(verdict_on("slow.rank", t, node=n), T0 + t * S) for t, n in ((0, "a"), (100, "b"))]
        current = verdict_on("slow.rank", 900, node="c")
        signs = compared(current, T0 + 900 * S, past)
        assert [s.signature for s in signs] == ["derived.history.rotating"]
        assert attribute([*(w.event for w in current.evidence), *signs], WITH_COMMON).action == "ask_human"

    def test_a_slow_place_that_stays_is_its_own(self) -> None:
        past = [Past(verdict_on("slow.rank", t, node="a"), T0 + t * S) for t in (0, 100)]
        assert compared(verdict_on("slow.rank", 900, node="a"), T0 + 900 * S, past) == []

    def test_what_comes_later_is_no_history(self) -> None:
        past = [Past(verdict_on("script.error", 0, node="a"), T0 + 10_000 * S)]
        assert compared(verdict_on("script.error", 900, node="b"), T0 + 900 * S, past) == []

    def test_a_verdict_that_was_written_down_compares_like_the_one_it_was(self) -> None:
        verdict = verdict_on("script.error", 0, node="a")
        stored = from_json(to_json(verdict_fields(verdict)), dict[str, Any])
        assert verdict_of(stored) == msgspec.structs.replace(verdict, evidence=[])
        signs = compared(verdict_on("script.error", 900, node="b"), T0 + 900 * S, [Past(verdict_of(stored), T0)])
        assert [s.signature for s in signs] == ["derived.history.software"]

    @pytest.mark.parametrize("wrong", [{"schema": "keepstep.verdict/2"}, {"action": "panic"}, {"entity": 3}])
    def test_what_is_no_verdict_is_refused(self, wrong: dict[str, Any]) -> None:
        fields = verdict_fields(verdict_on("script.error", 0, node="a")) | wrong
        with pytest.raises(msgspec.ValidationError):
            verdict_of(fields)
        with pytest.raises(msgspec.ValidationError):
            verdict_of({k: v for k, v in fields.items() if k != "schema"})


def test_what_ranks_say_of_a_peer_is_no_common_cause() -> None:
    assert common_cause(on_nodes("peer.lost", 8), WITH_COMMON) == []
