"""How events combine into a verdict: what explains what, what counts, what is done."""

from __future__ import annotations

import msgspec
import pytest

from keepstep.attribution.act import HARD_RULES
from keepstep.attribution.places import RankMap
from keepstep.attribution.verdict import judge as judge_by_all_rules
from keepstep.catalog.load import shipped
from keepstep.catalog.priors import shipped_priors
from keepstep.records.event import Event, Gpu, Stale
from tests.attribution.making import CATALOG, GPU, T0, S, attribute, event, judge

NODE = "gpu-07"


class TestFirstCause:
    def test_a_deeper_cause_explains_what_came_after_it_on_the_same_node(self) -> None:
        verdict = attribute(
            [
                event("gpu.gone", 0, node=NODE, gpu=GPU),
                event("cuda.error", 3, node=NODE, rank=4),
                event("watchdog", 600),
            ],
            CATALOG,
        )
        assert (verdict.fault_class, verdict.action) == ("hardware", "cordon_node")
        assert verdict.first_cause is not None and verdict.first_cause.signature == "gpu.gone"
        assert (verdict.entity.node, verdict.entity.gpu) == (NODE, GPU)

    def test_what_came_before_is_not_explained_by_what_came_later(self) -> None:
        judged = judge(
            [event("script.error", 0, rank=4, node=NODE), event("gpu.hint", 100, node=NODE, gpu=GPU)], CATALOG
        )
        assert judged.verdict.fault_class == "user_code"
        assert all(s.explained is None for s in judged.seen if s.entry.id == "script.error")

    def test_without_times_the_deeper_one_is_first(self) -> None:
        verdict = attribute(
            [
                event("script.error", None, rank=1, path="rank.log", node=NODE),
                event("gpu.gone", None, node=NODE, gpu=GPU, path="dmesg"),
            ],
            CATALOG,
        )
        assert verdict.first_cause is not None and verdict.first_cause.signature == "gpu.gone"

    def test_lines_of_one_file_are_in_order_even_without_times(self) -> None:
        verdict = attribute(
            [event("lib.error", None, rank=1, line=20), event("script.error", None, rank=0, line=10)], CATALOG
        )
        assert verdict.first_cause is not None and verdict.first_cause.signature == "script.error"

    def test_a_fault_of_another_node_explains_no_root_of_this_one(self) -> None:
        judged = judge(
            [event("gpu.gone", 0, node="gpu-01", gpu=GPU), event("script.error", 5, node="gpu-02", rank=9)], CATALOG
        )
        assert [s.explained for s in judged.seen if s.entry.id == "script.error"] == [None]

    def test_a_node_that_had_no_part_in_the_job_explains_nothing(self) -> None:
        ranks = RankMap(node_of={0: "gpu-02"}, nodes=frozenset({"gpu-02"}))
        judged = judge([event("gpu.gone", 0, node="gpu-01", gpu=GPU), event("watchdog", 5, rank=0)], CATALOG, ranks)
        assert [s.explained for s in judged.seen if s.entry.id == "watchdog"] == [None]

    def test_the_rank_map_joins_a_rank_to_the_gpu_of_its_node(self) -> None:
        ranks = RankMap(node_of={4: NODE, 9: "gpu-08"}, nodes=frozenset({NODE, "gpu-08"}))
        events = [
            event("gpu.gone", 0, node=NODE, gpu=GPU),
            event("script.error", 5, rank=4),
            event("lib.error", 5, rank=9),
        ]
        judged = judge(events, CATALOG, ranks)
        explained = {s.entry.id: s.explained is not None for s in judged.seen}
        assert explained == {"gpu.gone": False, "script.error": True, "lib.error": False}

    def test_a_weak_hint_explains_no_strong_root(self) -> None:
        judged = judge([event("gpu.hint", 0, node=NODE, gpu=GPU), event("script.error", 5, node=NODE)], CATALOG)
        assert judged.verdict.fault_class == "user_code"

    def test_a_hint_that_came_first_does_not_take_the_place_of_a_proof(self) -> None:
        verdict = attribute(
            [event("gpu.hint", 0, node=NODE, gpu=GPU), event("gpu.gone", 60, node=NODE, gpu=GPU)], CATALOG
        )
        assert verdict.signature == "gpu.gone"
        assert verdict.action == "cordon_node"

    def test_a_cascade_is_a_cause_only_when_nothing_explains_it(self) -> None:
        alone = attribute([event("peer.gone", 0, rank=1)], CATALOG)
        assert alone.fault_class == "unknown" and alone.action == "ask_human"
        both = judge([event("peer.gone", 0, rank=1), event("script.error", 0, rank=2)], CATALOG)
        assert both.verdict.signature == "script.error"
        assert [s.explained is not None for s in both.seen if s.entry.id == "peer.gone"] == [True]

    def test_a_stop_long_ago_explains_nothing(self) -> None:
        judged = judge(
            [event("gpu.gone", 0, node=NODE, gpu=GPU), event("script.error", 200_000, node=NODE, rank=4)], CATALOG
        )
        assert [s.explained for s in judged.seen if s.entry.id == "script.error"] == [None]


class TestCurrency:
    def test_a_recovery_of_the_same_gpu_takes_its_fault_back(self) -> None:
        verdict = attribute(
            [event("gpu.gone", 0, node=NODE, gpu=GPU), event("gpu.gone_back", 50, node=NODE, gpu=GPU)], CATALOG
        )
        assert verdict.no_current_fault and verdict.action == "none"

    def test_a_recovery_of_another_gpu_takes_nothing_back(self) -> None:
        verdict = attribute(
            [event("gpu.gone", 0, node=NODE, gpu=GPU), event("gpu.gone_back", 50, node=NODE, gpu="0000:9c:00.0")],
            CATALOG,
        )
        assert not verdict.no_current_fault and verdict.action == "cordon_node"

    def test_a_recovery_of_the_node_takes_back_what_was_wrong_with_its_parts(self) -> None:
        fault = event("gpu.gone", 0, node=NODE, gpu=GPU, path="dmesg")
        back, other = (event("node.repaired", 50, node=n, path="ops.log") for n in (NODE, "gpu-08"))
        assert attribute([fault, back], CATALOG).no_current_fault
        assert not attribute([fault, other], CATALOG).no_current_fault

    def test_a_recovery_before_the_fault_takes_nothing_back(self) -> None:
        verdict = attribute(
            [event("gpu.gone_back", 0, node=NODE, gpu=GPU), event("gpu.gone", 50, node=NODE, gpu=GPU)], CATALOG
        )
        assert not verdict.no_current_fault

    def test_a_recovery_whose_order_is_not_known_takes_nothing_back(self) -> None:
        verdict = attribute(
            [
                event("gpu.gone", None, node=NODE, gpu=GPU, path="a"),
                event("gpu.gone_back", None, node=NODE, gpu=GPU, path="b"),
            ],
            CATALOG,
        )
        assert not verdict.no_current_fault

    def test_a_condition_that_is_over_is_still_the_cause_of_what_it_stopped(self) -> None:
        events = [
            event("gpu.gone", 0, node=NODE, gpu=GPU),
            event("watchdog", 30, rank=1),
            event("gpu.gone_back", 50, node=NODE, gpu=GPU),
        ]
        verdict = attribute(events, CATALOG)
        assert not verdict.no_current_fault
        # Nothing is taken out for what is over.
        assert (verdict.fault_class, verdict.signature, verdict.action) == ("hardware", "gpu.gone", "restart_job")

    def test_a_condition_that_was_over_before_the_last_step_is_not(self) -> None:
        events = [
            event("gpu.gone", 0, node=NODE, gpu=GPU),
            event("gpu.gone_back", 20, node=NODE, gpu=GPU),
            event("job.progress", 300, rank=1),
            event("watchdog", 600, rank=1),
        ]
        assert attribute(events, CATALOG).fault_class == "unknown"

    def test_steps_after_a_stop_show_that_there_is_none(self) -> None:
        verdict = attribute([event("node.lost", 0, node=NODE), event("job.progress", 60, rank=5)], CATALOG)
        assert verdict.no_current_fault and (verdict.fault_class, verdict.action) == ("platform", "none")

    def test_steps_before_a_stop_show_nothing(self) -> None:
        verdict = attribute([event("job.progress", 0, rank=5), event("node.lost", 60, node=NODE)], CATALOG)
        assert not verdict.no_current_fault and verdict.action == "restart_job"

    def test_the_last_of_many_steps_counts(self) -> None:
        steps = event("job.progress", 0, rank=5, last_ns=event("watchdog", 90).time_ns, count=40)
        assert attribute([event("node.lost", 60, node=NODE), steps], CATALOG).no_current_fault

    def test_steps_do_not_heal_a_gpu_that_wears_out(self) -> None:
        verdict = attribute([event("gpu.wearing", 0, node=NODE, gpu=GPU), event("job.progress", 600)], CATALOG)
        assert not verdict.no_current_fault and verdict.action == "drain_at_checkpoint"

    def test_a_failure_after_the_last_step_is_current(self) -> None:
        events = [event("store.slow", 0), event("job.progress", 60), event("script.error", 90, rank=1)]
        verdict = attribute(events, CATALOG)
        assert not verdict.no_current_fault and verdict.fault_class == "user_code"

    @pytest.mark.parametrize("reason", ["replay", "before_repair", "previous_boot", "too_old"])
    def test_stale_hardware_faults_alone_are_no_fault_of_anybody(self, reason: str) -> None:
        verdict = attribute([event("gpu.gone", 0, node=NODE, gpu=GPU, stale=reason)], CATALOG)
        assert verdict.no_current_fault
        assert (verdict.fault_class, verdict.action) == ("unknown", "none")

    def test_a_stale_fault_of_a_program_is_still_the_programs(self) -> None:
        verdict = attribute([event("script.error", 0, rank=1, stale="previous_boot")], CATALOG)
        assert verdict.no_current_fault and (verdict.fault_class, verdict.action) == ("user_code", "none")

    def test_benign_signs_alone_are_no_fault(self) -> None:
        verdict = attribute([event("idle.clock", 0, node=NODE, gpu=GPU)], CATALOG)
        assert verdict.no_current_fault and verdict.action == "none"

    def test_benign_signs_say_whose_they_are(self) -> None:
        assert attribute([event("probe.noise", 0)], CATALOG).fault_class == "framework"
        assert attribute([event("probe.noise", 0), event("script.error", 1)], CATALOG).fault_class == "user_code"

    def test_a_root_that_calls_for_nothing_is_no_current_fault(self) -> None:
        verdict = attribute([event("lib.benign", 0)], CATALOG)
        assert verdict.no_current_fault and (verdict.fault_class, verdict.action) == ("framework", "none")

    def test_steps_alone_do_not_say_that_all_is_well(self) -> None:
        verdict = attribute([event("job.progress", 0)], CATALOG)
        assert not verdict.no_current_fault and verdict.action == "ask_human"


class TestWeighing:
    def test_nothing_is_unknown(self) -> None:
        verdict = attribute([], CATALOG)
        assert (verdict.fault_class, verdict.tier, verdict.action) == ("unknown", "unknown", "ask_human")
        assert not verdict.no_current_fault and verdict.missing

    def test_two_classes_that_are_equally_likely_are_unknown(self) -> None:
        verdict = attribute([event("script.error", None, path="a"), event("lib.twin", None, path="b")], CATALOG)
        assert (verdict.fault_class, verdict.action) == ("unknown", "ask_human")
        assert {a.fault_class for a in verdict.alternatives} >= {"user_code", "framework"}

    def test_probabilities_add_up(self) -> None:
        scores = judge([event("script.error", 0, rank=1), event("gpu.hint", 9, node=NODE)], CATALOG).scores
        assert sum(scores.chances.values()) == pytest.approx(1.0)

    def test_the_sum_of_a_class_is_its_prior_and_its_terms(self) -> None:
        scores = judge([event("script.error", 0, rank=1), event("cuda.error", 9, rank=2)], CATALOG).scores
        prior = shipped_priors().log_odds["user_code"]
        assert scores.sums["user_code"] == pytest.approx(prior + sum(t.adds("user_code") for t in scores.terms))

    def test_repeats_add_little_and_not_without_bound(self) -> None:
        once, many, storm = (
            judge([event("gpu.wearing", 0, node=NODE, gpu=GPU, count=n)], CATALOG).scores.sums["hardware"]
            for n in (1, 10, 10**6)
        )
        assert once < many < storm <= 1.5 * 3.0 + shipped_priors().log_odds["hardware"]

    def test_the_same_sign_on_many_ranks_counts_once(self) -> None:
        few = judge([event("script.error", 0, rank=0)], CATALOG).scores.sums["user_code"]
        many = judge([event("script.error", 0, rank=r) for r in range(300)], CATALOG).scores.sums["user_code"]
        assert few < many <= 1.5 * few + 1

    def test_a_check_that_passed_afterwards_does_not_count_against_hardware(self) -> None:
        fault = event("gpu.gone", 0, node=NODE, gpu=GPU)
        with_check = attribute([fault, event("gpu.check.passed", 500, node=NODE)], CATALOG)
        assert with_check.confidence == attribute([fault], CATALOG).confidence

    def test_contradicting_evidence_is_marked(self) -> None:
        verdict = attribute([event("link.down", 0, node=NODE, nic="mlx5_0"), event("before_first_step", 0)], CATALOG)
        assert {w.event.signature: w.bearing for w in verdict.evidence} == {
            "link.down": "supports",
            "before_first_step": "contradicts",
        }

    def test_evidence_is_oldest_first_and_has_its_weight_once(self) -> None:
        verdict = attribute([event("script.error", s, rank=s) for s in (3, 1, 2)], CATALOG)
        times = [w.event.time_ns for w in verdict.evidence]
        assert times == sorted(times, key=lambda t: t or 0)
        assert [w.weight > 0 for w in verdict.evidence] == [True, False, False]


class TestActions:
    @pytest.mark.parametrize(
        "name",
        ["xid.13", "xid.31", "xid.43", "xid.45", "torch.cuda_oom", "nccl.desync", "nccl.mismatch", "never.cordons"],
    )
    def test_hard_rules_hold_against_a_catalog_that_says_otherwise(self, name: str) -> None:
        verdict = attribute([event(name, 0, node=NODE, gpu=GPU, count=100)], CATALOG)
        assert verdict.fault_class == "hardware" and verdict.tier == "certain"
        assert verdict.action == "ask_human"

    def test_every_hard_rule_is_among_those_tested(self) -> None:
        tested = ["xid.13", "xid.45", "torch.cuda_oom", "nccl.desync", "nccl.mismatch"]
        seen = [judge([event(name, 0, node=NODE, gpu=GPU)], CATALOG).seen[0] for name in tested]
        assert [r.name for r in HARD_RULES if not any(r.applies(s) for s in seen)] == []

    @pytest.mark.parametrize("code", [31, "31"], ids=["number", "text"])
    def test_an_application_xid_is_known_by_its_code_whatever_the_entry_and_the_type(self, code: object) -> None:
        seen = judge([event("gpu.gone", 0, node=NODE, gpu=GPU, attrs={"xid": code})], CATALOG).seen[0]
        assert [r.name for r in HARD_RULES if r.applies(seen)] == ["application_xid"]
        other = judge([event("gpu.gone", 0, node=NODE, gpu=GPU, attrs={"xid": 79})], CATALOG).seen[0]
        assert not any(r.applies(other) for r in HARD_RULES)

    def test_firmware_or_silicon_of_one_gpu_gets_its_reset_whichever_it_is(self) -> None:
        verdict = attribute([event("gpu.firmware", 0, node=NODE, gpu=GPU)], CATALOG)
        assert verdict.fault_class in ("hardware", "framework") and verdict.action == "reset_gpu"

    def test_what_followed_on_the_same_part_may_call_for_more(self) -> None:
        events = [event("gpu.dirty", 0, node=NODE, gpu=GPU), event("gpu.no_spare", 1, node=NODE, gpu=GPU)]
        verdict = attribute(events, CATALOG)
        assert verdict.first_cause is not None and verdict.first_cause.signature == "gpu.dirty"
        assert verdict.action == "cordon_node"

    def test_an_application_xid_does_not_hold_back_the_gpu_that_is_gone(self) -> None:
        events = [event("gpu.gone", 0, node=NODE, gpu=GPU), event("gpu.hint", 1, node=NODE, gpu=GPU)]
        assert attribute(events, CATALOG).action == "cordon_node"

    def test_a_fault_of_the_program_never_takes_a_node_out(self) -> None:
        assert attribute([event("script.cordons", 0, node=NODE)], CATALOG).action == "ask_human"

    def test_a_node_action_needs_a_node(self) -> None:
        assert attribute([event("anywhere.cordons", 0)], CATALOG).action == "ask_human"

    def test_a_node_action_needs_a_probable_verdict(self) -> None:
        verdict = attribute([event("gpu.maybe", 0, node=NODE, gpu=GPU)], CATALOG)
        assert (verdict.fault_class, verdict.tier, verdict.action) == ("hardware", "possible", "ask_human")

    def test_of_two_faults_of_one_gpu_the_one_that_calls_for_more_decides(self) -> None:
        events = [event("gpu.dirty", 0, node=NODE, gpu=GPU), event("gpu.gone", 60, node=NODE, gpu=GPU)]
        assert attribute(events, CATALOG).action == "cordon_node"

    def test_what_rules_concluded_decides_the_action(self) -> None:
        verdict = attribute([event("lib.error", 0, rank=0), event("derived.all_late", 0)], CATALOG)
        assert (verdict.signature, verdict.action) == ("derived.all_late", "ask_human")


class TestWords:
    def test_a_summary_is_one_sentence_with_the_place(self) -> None:
        verdict = attribute([event("gpu.gone", 0, node=NODE, gpu=GPU)], CATALOG)
        assert NODE in verdict.summary and GPU in verdict.summary and verdict.summary.count(". ") == 0

    def test_alternatives_say_what_speaks_against_them(self) -> None:
        verdict = attribute([event("gpu.hint", 0, node=NODE), event("cuda.error", 0, rank=2)], CATALOG)
        assert verdict.alternatives and all(a.why_not for a in verdict.alternatives)

    def test_names_of_one_gpu_are_one(self) -> None:
        inventory = event("idle.clock", 0, node=NODE)
        both = Gpu(uuid="GPU-1", pci=GPU, index=3)
        fault = event("gpu.gone", 1, node=NODE)
        events = [
            msgspec.structs.replace(inventory, gpu=both),
            msgspec.structs.replace(fault, gpu=Gpu(uuid="GPU-1")),
            msgspec.structs.replace(fault, gpu=Gpu(index=3), time_ns=(fault.time_ns or 0) + S),
        ]
        judged = judge(events, CATALOG)
        assert judged.verdict.entity.gpu == GPU
        assert len([s for s in judged.seen if s.entry.id == "gpu.gone"]) == 1


class TestShippedHistory:
    """The one way in which what is stale counts: the same part failed again after it was repaired."""

    @staticmethod
    def double_bit(at: float, stale: Stale | None = None) -> Event:
        return Event(
            kind="gpu.xid",
            signature="xid.48",
            severity="fatal",
            source="kernel",
            time_ns=T0 + round(at * S),
            time_quality="exact",
            node=NODE,
            gpu=Gpu(pci=GPU),
            attrs={"xid": 48},
            stale=stale,
        )

    def test_alone_it_is_reset(self) -> None:
        assert judge_by_all_rules([self.double_bit(9000)], shipped()).verdict.action == "reset_gpu"

    def test_after_a_repair_it_is_taken_out(self) -> None:
        events = [self.double_bit(0, "previous_boot"), self.double_bit(9000)]
        assert judge_by_all_rules(events, shipped()).verdict.action == "cordon_node"

    def test_without_a_current_one_there_is_none(self) -> None:
        verdict = judge_by_all_rules([self.double_bit(0, "previous_boot")], shipped()).verdict
        assert verdict.no_current_fault and verdict.action == "none"
