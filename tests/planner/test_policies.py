"""Policies at node level, their file form, and what a history costs under them, against sums made by hand."""

from __future__ import annotations

from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from keepstep.goodput.job import FailureKind, Job, RestartPhases, Tier
from keepstep.goodput.spares import stall_share
from keepstep.planner.policies import BUILT_IN, Decided, NodeHistory
from keepstep.planner.policycost import Account, Case, Prices, price, rollback_s
from keepstep.planner.policyfile import parse_policy
from keepstep.records.errors import ConfigError
from keepstep.records.verdict import CLASSES, Action, Entity, FaultClass, Verdict
from keepstep.records.verdict import Tier as Sure

MINUTE, HOUR, DAY = 60.0, 3600.0, 86_400.0
JOB = Job(
    nodes=16,
    gpus_per_node=8,
    rate_per_node_day=0.01,
    interval_s=20 * MINUTE,
    tiers=(Tier(name="disk", block_s=10.0, persist_lag_s=30.0, load_s=40.0),),
    restart=RestartPhases(decide_s=5.0, replace_s=120.0, start_s=60.0),
)
"""A restart is 5 + 60 + 40 s, 225 s with a new node; a failure undoes 10 min and the lag of 30 s: 630 s."""
PRICES = Prices(job=JOB, gpus=128, span_s=30 * DAY, spares=4, usd_per_gpu_hour=2.0)
RESTART, REPLACED, ROLLBACK = 105.0, 225.0, 630.0


def verdict(
    fault_class: FaultClass = "hardware",
    action: Action = "cordon_node",
    *,
    signature: str = "xid.79",
    tier: Sure = "certain",
    confidence: float = 0.97,
    node: str | None = "n1",
    calm: bool = False,
) -> Verdict:
    return Verdict(
        fault_class=fault_class,
        signature=signature,
        confidence=confidence,
        tier=tier,
        action=action,
        no_current_fault=calm,
        entity=Entity(node=node),
    )


def case(number: int, at_s: float, said: Verdict | None = None, **more: Any) -> Case:
    said = said or verdict()
    fields: dict[str, Any] = {"node": said.entity.node, "rank": None, "interrupted": True}
    return Case(id=f"I{number}", time_s=at_s, verdict=said, **(fields | more))


def under(policy: str, *cases: Case, prices: Prices = PRICES) -> Account:
    return price(cases, BUILT_IN[policy], prices)


def costs(account: Account) -> list[float]:
    return [c.phases.cost_s for c in account.cases]


CRASH = verdict("user_code", "fail_fast", signature="torch.exception", node=None)


class TestActions:
    def test_built_in(self) -> None:
        here, nowhere = NodeHistory("n1", 0.0), NodeHistory(None, 0.0)
        for said in (verdict(), CRASH):
            history = here if said.entity.node else nowhere
            decided = {name: p.decide(said, history) for name, p in BUILT_IN.items()}
            assert decided == {
                "verdict": said.action,
                "restart-always": "restart_job",
                "evict-always": "cordon_node" if history.node else "restart_job",
                "none": "none",
            }

    def test_the_first_rule_that_holds_decides(self) -> None:
        text = """
            default = "restart_job"
            [[rule]]
            class = "user_code"
            action = "fail_fast"
            [[rule]]
            class = ["hardware", "fabric"]
            tier = ["certain", "probable"]
            signature = "xid."
            min_confidence = 0.9
            action = "cordon_node"
        """
        policy = parse_policy(text, "p.toml")
        here = NodeHistory("n1", 0.0)
        assert policy.name == "p.toml"
        assert policy.decide(CRASH, here) == "fail_fast"
        assert policy.decide(verdict(), here) == "cordon_node"
        assert policy.decide(verdict(confidence=0.89), here) == "restart_job"
        assert policy.decide(verdict(tier="possible"), here) == "restart_job"
        assert policy.decide(verdict(signature="sxid.1"), here) == "restart_job"
        assert policy.decide(verdict("storage"), here) == "restart_job"
        assert policy.decide(verdict(calm=True), here) == "none"
        # No rule takes a node out that nobody names.
        assert policy.decide(verdict(), NodeHistory(None, 0.0)) == "ask_human"

    def test_a_rule_may_ask_for_a_repeat_within_a_day(self) -> None:
        policy = parse_policy('{"rule": [{"min_incidents": 2, "action": "cordon_node"}]}', "p.json")
        before = Decided(0.0, verdict(), "ask_human")
        assert policy.decide(verdict(), NodeHistory("n1", 0.0)) == "ask_human"
        assert policy.decide(verdict(), NodeHistory("n1", DAY, (before,))) == "cordon_node"
        assert policy.decide(verdict(), NodeHistory("n1", DAY + 1, (before,))) == "ask_human"

    @pytest.mark.parametrize(
        ("text", "told"),
        [
            ("default = ", "p: neither TOML nor JSON"),
            ("{nonsense", "p: neither TOML nor JSON"),
            (
                'defualt = "none"',
                "p: defualt: no such key; it may hold default and [[rule]] tables; did you mean default?",
            ),
            ('default = "cordon"', "p: default 'cordon': one of none, restart_job"),
            ('default = "cordon"', "did you mean cordon_node"),
            ("rule = 3", "p: rule 3: write each rule as a [[rule]] table"),
            ("rule = [3]", "p: rule 1: 3: not a table"),
            ("[[rule]]", "p: rule 1: action is missing"),
            ('[[rule]]\naction = "none"\nclas = "hardware"', "rule 1: clas: no such key"),
            ('[[rule]]\naction = "none"\nclas = "hardware"', "did you mean class?"),
            ('[[rule]]\naction = "none"\nclass = "hardwear"', "rule 1: class 'hardwear': one of hardware, fabric"),
            ('[[rule]]\naction = "none"\nclass = []', "rule 1: class []: name at least one"),
            ('[[rule]]\naction = "none"\ntier = ["sure"]', "rule 1: tier 'sure': one of certain"),
            ('[[rule]]\naction = "none"\nsignature = 79', "rule 1: signature 79"),
            ('[[rule]]\naction = "none"\nmin_confidence = 90', "rule 1: min_confidence 90: a number from 0 to 1"),
            ('[[rule]]\naction = "none"\nmin_confidence = true', "rule 1: min_confidence True"),
            ('[[rule]]\naction = "none"\nmin_incidents = 0', "rule 1: min_incidents 0: a whole number from 1"),
        ],
    )
    def test_a_wrong_file_is_refused(self, text: str, told: str) -> None:
        with pytest.raises(ConfigError) as raised:
            parse_policy(text, "p")
        assert told in str(raised.value)

    def test_nothing_allowed_means_a_person(self) -> None:
        assert parse_policy("", "p").decide(verdict(), NodeHistory("n1", 0.0)) == "ask_human"


class TestPrices:
    def test_one_failure_of_a_machine(self) -> None:
        one = case(1, 0.0)
        assert costs(under("restart-always", one)) == [RESTART + ROLLBACK]
        assert costs(under("verdict", one)) == [REPLACED + ROLLBACK]
        assert costs(under("evict-always", one)) == [REPLACED + ROLLBACK]
        # A person comes after half an hour, and takes the node out.
        assert costs(under("none", one)) == [1800 + REPLACED + ROLLBACK]

    def test_a_failure_of_the_program(self) -> None:
        one = case(1, 0.0, CRASH)
        assert costs(under("restart-always", one)) == [RESTART + ROLLBACK]
        assert costs(under("verdict", one)) == costs(under("none", one)) == [1800 + RESTART + ROLLBACK]

    def test_gpu_hours_and_money(self) -> None:
        account = under("restart-always", case(1, 0.0))
        # 128 GPUs stand for 735 s; four spares of 8 GPUs are paid for thirty days.
        assert account.gpu_hours == pytest.approx(128 * 735 / 3600 + 32 * 30 * 24)
        assert account.usd == pytest.approx(2 * account.gpu_hours)
        assert (account.stall_s, account.evictions) == (0.0, 0)

    def test_a_reset_takes_its_time(self) -> None:
        account = price([case(1, 0.0, verdict(action="reset_gpu"))], BUILT_IN["verdict"], PRICES_WITH_RESET)
        assert costs(account) == [90.0 + RESTART + ROLLBACK]
        assert account.evictions == 0

    def test_the_kind_of_failure_says_detection_and_tier(self) -> None:
        tiers = (Tier(name="ram", load_s=2.0), Tier(name="disk", every=3, persist_lag_s=30.0, load_s=40.0))
        kinds = (
            FailureKind(name="crash", share=0.8, tier=0),
            FailureKind(name="hang", share=0.1, detect_s=300.0, tier=1),
            FailureKind(name="fabric", share=0.1, detect_s=7.0, tier=1),
        )
        job = Job(nodes=16, rate_per_node_day=0.01, interval_s=600.0, tiers=tiers, kinds=kinds)
        prices = Prices(job=job, gpus=128, span_s=DAY)
        far = rollback_s(job, kinds[1])
        assert (rollback_s(job, kinds[0]), far) == (300.0, 930.0)
        assert costs(under("restart-always", case(1, 0.0), prices=prices)) == [2.0 + 300.0]
        assert costs(under("restart-always", case(1, 0.0, hang=True), prices=prices)) == [300.0 + 40.0 + far]
        assert costs(under("restart-always", case(1, 0.0, verdict("fabric")), prices=prices)) == [7.0 + 40.0 + far]

    def test_an_outage_within_an_outage_is_counted_once(self) -> None:
        account = under("restart-always", case(1, 0.0), case(2, 45.0))
        # The second begins 60 s before the first is over, and undoes nothing.
        assert account.cases[1].phases.overlap_s == 60.0
        assert costs(account) == [RESTART + ROLLBACK, RESTART - 60.0]

    def test_no_more_is_undone_than_was_trained(self) -> None:
        account = under("restart-always", case(1, 0.0), case(2, RESTART + 200.0))
        assert account.cases[1].phases.rollback_s == 200.0

    def test_what_did_not_stop_the_job_costs_only_who_acts_on_it(self) -> None:
        worn = case(1, 0.0, verdict(action="drain_at_checkpoint"), interrupted=False)
        # A drain saves first: a save and a restart with a new node, and nothing is undone.
        assert costs(under("verdict", worn)) == [10.0 + REPLACED]
        assert costs(under("restart-always", worn)) == costs(under("none", worn)) == [0.0]
        assert under("restart-always", worn).interruptions == under("verdict", worn).interruptions == 0
        calm = case(1, 0.0, verdict(action="ask_human", calm=True), interrupted=False)
        assert costs(under("verdict", calm)) == [0.0]


PRICES_WITH_RESET = Prices(job=JOB, gpus=128, span_s=30 * DAY, spares=4, reset_s=90.0)


class TestWhatWouldNotHaveBeen:
    def test_a_fault_does_not_come_again_on_a_node_that_is_out(self) -> None:
        cases = [case(1, 0.0), case(2, 2 * HOUR), case(3, 23 * HOUR), case(4, 25 * HOUR)]
        kept = under("restart-always", *cases)
        assert costs(kept) == 4 * [RESTART + ROLLBACK]
        assert [c.again for c in kept.cases] == [None, "I1", "I2", "I3"]
        assert (kept.wasted_restarts, kept.wasted_s) == (3, 3 * (RESTART + ROLLBACK))
        out = under("evict-always", *cases)
        # One in a day is enough; after that the node is back and may fail again.
        assert [c.prevented_by for c in out.cases] == [None, "I1", "I1", None]
        assert costs(out)[:3] == [REPLACED + ROLLBACK, 0.0, 0.0]
        assert (out.interruptions, out.prevented, out.wasted_restarts, out.evictions) == (2, 2, 0, 2)

    def test_another_node_fails_all_the_same(self) -> None:
        out = under("evict-always", case(1, 0.0), case(2, HOUR, verdict(node="n2")))
        assert [c.prevented_by for c in out.cases] == [None, None]

    def test_a_program_fails_on_any_node(self) -> None:
        crash = verdict("user_code", "fail_fast", signature="torch.exception")
        cases = [case(n, n * HOUR, crash) for n in (1, 2)]
        out = under("evict-always", *cases)
        assert [(c.prevented_by, c.healthy) for c in out.cases] == [(None, True), (None, True)]
        assert (out.healthy_out, out.healthy_node_hours) == (2, 12.0)
        # A person mends it.
        assert [c.prevented_by for c in under("verdict", *cases).cases] == [None, "I1"]
        assert under("verdict", *cases).healthy_out == 0

    def test_a_label_overrules_the_verdict(self) -> None:
        wrong = case(1, 0.0, label="user_code")
        account = under("verdict", wrong)
        assert (account.healthy_out, account.cases[0].healthy) == (1, True)
        # Looked into and not found says nothing.
        assert under("verdict", case(1, 0.0, label="unknown")).healthy_out == 0
        again = [case(1, 0.0, label="user_code"), case(2, HOUR, label="user_code")]
        assert [c.prevented_by for c in under("verdict", *again).cases] == [None, None]

    def test_a_drain_prevents_the_failure_it_was_for(self) -> None:
        worn = case(1, 0.0, verdict(action="drain_at_checkpoint"), interrupted=False)
        assert [c.prevented_by for c in under("verdict", worn, case(2, HOUR)).cases] == [None, "I1"]

    def test_a_rank_is_a_place_too(self) -> None:
        lost = verdict(node=None)
        account = under(
            "restart-always", *(case(n, n * HOUR, lost, rank=3) for n in (1, 2)), case(3, 3 * HOUR, lost, rank=4)
        )
        assert [c.again for c in account.cases] == [None, "I1", None]


class TestSpares:
    def test_nodes_that_are_away_at_once(self) -> None:
        prices = Prices(job=JOB, gpus=128, span_s=30 * DAY, spares=1)
        cases = [case(n, n * DAY, verdict(node=f"n{n}")) for n in range(6)]
        account = under("evict-always", *cases, prices=prices)
        # Six nodes for a day each in thirty days: 0.2 away on average.
        assert account.stall_s == pytest.approx(stall_share(1, 0.2) * 30 * DAY)
        assert account.cost_s == pytest.approx(6 * (REPLACED + ROLLBACK) + account.stall_s)

    def test_without_a_number_paid_goodput_chooses(self) -> None:
        prices = Prices(job=JOB, gpus=128, span_s=30 * DAY)
        cases = [case(n, n * HOUR, verdict(node=f"n{n}")) for n in range(30)]
        account = under("evict-always", *cases, prices=prices)
        paid = [(1 - stall_share(k, 1.0)) * 16 / (16 + k) for k in range(10)]
        assert account.spares == paid.index(max(paid)) > 0
        assert account.gpu_hours == pytest.approx((account.cost_s * 128 + account.spares * 8 * 30 * DAY) / 3600)
        assert under("restart-always", *cases, prices=prices).spares == 0

    def test_a_short_history_is_one_repair_long(self) -> None:
        account = under("evict-always", case(1, 0.0), prices=Prices(job=JOB, gpus=128, span_s=0.0, spares=0))
        assert account.stall_s == pytest.approx(stall_share(0, 1.0) * DAY)


@st.composite
def histories(draw: st.DrawFn) -> list[Case]:
    found = []
    at_s = 0.0
    for number in range(draw(st.integers(0, 8))):
        at_s += draw(st.floats(0.0, 2 * DAY))
        said = verdict(
            draw(st.sampled_from(CLASSES)),
            draw(st.sampled_from(["none", "restart_job", "fail_fast", "cordon_node", "reset_gpu", "ask_human"])),
            node=draw(st.sampled_from(["n1", "n2", None])),
        )
        found.append(case(number, at_s, said, interrupted=draw(st.booleans())))
    return found


@given(histories(), st.sampled_from(sorted(BUILT_IN)))
def test_costs_add_up_and_never_pass_what_they_may(cases: list[Case], name: str) -> None:
    account = under(name, *cases)
    assert account.cost_s == pytest.approx(sum(costs(account)) + account.stall_s)
    assert all(c.phases.overlap_s >= 0.0 and c.phases.cost_s >= -1e-6 for c in account.cases)
    assert account.interruptions + sum(1 for c in account.cases if c.prevented_by) >= sum(c.interrupted for c in cases)
    assert account.wasted_s <= account.cost_s + 1e-6
    if name == "restart-always":
        assert account.evictions == account.prevented == 0


@given(histories(), st.integers(0, 8), st.sampled_from(sorted(BUILT_IN)))
def test_what_comes_later_changes_nothing_before(cases: list[Case], count: int, name: str) -> None:
    assert under(name, *cases[:count]).cases == under(name, *cases).cases[:count]
