"""The table of Xids and what keepstep makes of it: nothing is forgotten, no bucket means two things by accident."""

from __future__ import annotations

from collections import defaultdict

import pytest

from keepstep.catalog.load import shipped
from keepstep.catalog.sxid import sxid_facts
from keepstep.catalog.xid import RECOVERY_ACTIONS, fields_of, policy, variants, xid_facts
from keepstep.records.verdict import NODE_ACTIONS

APPLICATION = {"app", "app_engine"}

ALLOWED = {
    "RESTART_APP": {"restart_job", "fail_fast"},
    "RESET_GPU": {"reset_gpu"},
    "RESTART_BM": {"cordon_node"},
    "RESTART_VM": {"ask_human"},
    "CHECK_MECHANICALS": {"cordon_node"},
    "UPDATE_SWFW": {"ask_human"},
    "CHECK_UVM": {"ask_human"},
    "CONTACT_SUPPORT": {"ask_human"},
    "IGNORE": {"none"},
    "WORKFLOW_XID_45": {"none"},
    "WORKFLOW_XID_48": {"reset_gpu"},
    "WORKFLOW_NVLINK_ERR": {"reset_gpu"},
    "WORKFLOW_NVLINK5_ERR": {"ask_human"},
    "XID_154": {"none"},
    "": {"ask_human", "none", "reset_gpu", "cordon_node", "drain_at_checkpoint"},
}
"""NVIDIA's bucket -> what keepstep does. "": no bucket is published; each of these codes is judged by itself."""

OTHERWISE = {
    63: "drain_at_checkpoint",  # until the reset the bad row stays in use
    92: "drain_at_checkpoint",  # memory that ages
    160: "drain_at_checkpoint",  # the older catalog said reboot
    157: "ask_human",  # a retirement that could not be recorded
    161: "ask_human",
    93: "ask_human",  # worn flash of the board
    64: "cordon_node",  # a reset cannot bring spare rows back
    37: "restart_job",  # the context is gone: going on means starting again
    38: "restart_job",
    44: "restart_job",
    66: "restart_job",
    67: "restart_job",
}
"""Codes whose action is not the bucket's. Their entries argue it."""


def test_every_code_has_an_entry_and_so_has_a_code_that_is_in_no_table() -> None:
    catalog = shipped()
    assert len(xid_facts()) == 173 and len(sxid_facts()) == 92
    assert all(f"xid.{code}" in catalog for code in xid_facts())
    assert all(f"sxid.{code}" in catalog for code in sxid_facts())
    assert catalog["xid.unknown"].action == "ask_human" and catalog["sxid.unknown"].action == "ask_human"


def test_every_family_is_judged_and_every_judgement_is_of_a_family_or_code() -> None:
    judged = policy()
    families = {fact.family for fact in xid_facts().values()}
    assert set(judged["family"]) == families | {"unknown"}
    assert {int(code) for code in judged["code"]} <= set(xid_facts())
    assert {name.split(".")[0] for name in judged["variant"]} <= {"nvlink", *judged["code"]}
    assert {int(code) for code in judged["sxid_code"]} <= set(sxid_facts())


def test_every_bucket_leads_to_an_action_that_is_allowed_for_it() -> None:
    for code, fact in xid_facts().items():
        action = shipped()[f"xid.{code}"].action
        allowed = {OTHERWISE[code]} if code in OTHERWISE else ALLOWED[fact.immediate]
        assert action in allowed, f"Xid {code}: bucket {fact.immediate!r} leads to {action}"


def test_every_action_of_a_code_comes_from_some_bucket_and_no_exception_is_left_over() -> None:
    reached = defaultdict(set)
    for code, fact in xid_facts().items():
        reached[shipped()[f"xid.{code}"].action].add(fact.immediate)
    assert set(reached) == {action for actions in ALLOWED.values() for action in actions}
    assert set(ALLOWED) == {fact.immediate for fact in xid_facts().values()}
    stale = [code for code, action in OTHERWISE.items() if action in ALLOWED[xid_facts()[code].immediate]]
    assert not stale, "these follow their bucket and are no exceptions"
    assert all(policy()["code"][str(code)].get("why") for code in OTHERWISE)


def test_a_bucket_without_meaning_is_told_from_a_real_call_for_support() -> None:
    unused, support = shipped()["xid.26"], shipped()["xid.142"]
    assert unused.weights == {"unknown": 1.0} and unused.role == "context"
    assert "unknown" not in support.weights


def test_application_xids_never_take_hardware_out() -> None:
    codes = [code for code, fact in xid_facts().items() if fact.family in APPLICATION] + [45]
    assert {13, 31, 43, 45, 69, 137} <= set(codes)
    for code in codes:
        for entry in [e for e in shipped() if e.id == f"xid.{code}" or e.id.startswith(f"xid.{code}.")]:
            assert set(entry.never) >= NODE_ACTIONS, entry.id
            assert entry.action not in NODE_ACTIONS, entry.id
            assert entry.fault_class != "hardware" or code in (80,), entry.id


@pytest.mark.parametrize(
    ("code", "fault_class", "action"),
    [
        (48, "hardware", "reset_gpu"),
        (62, "hardware", "reset_gpu"),
        (63, "hardware", "drain_at_checkpoint"),
        (64, "hardware", "cordon_node"),
        (79, "hardware", "cordon_node"),
        (94, "hardware", "restart_job"),
        (95, "hardware", "reset_gpu"),
        (119, "framework", "reset_gpu"),
        (13, "user_code", "fail_fast"),
        (31, "user_code", "fail_fast"),
        (74, "fabric", "reset_gpu"),
    ],
)
def test_well_known_codes(code: int, fault_class: str, action: str) -> None:
    entry = shipped()[f"xid.{code}"]
    assert (entry.fault_class, entry.action) == (fault_class, action)


def test_consequences_are_deeper_than_their_causes() -> None:
    depth = {code: shipped()[f"xid.{code}"].depth for code in (48, 63, 64, 79, 94, 95, 119, 13, 43, 45, 154)}
    assert depth[48] < depth[94] == depth[63] < depth[119] < depth[13] < depth[43] < depth[45] < depth[154]


def test_the_driver_may_ask_for_each_recovery_action() -> None:
    assert variants(154) == list(RECOVERY_ACTIONS)
    assert shipped()["xid.154.none"].role == "recovery"
    wants = [shipped()[f"xid.154.{name}"] for name in RECOVERY_ACTIONS[1:]]
    assert [w.action for w in wants] == ["reset_gpu", "cordon_node", "drain_at_checkpoint", "reset_gpu"]


def test_nvlink_codes_without_registers_ask_a_human_and_never_act() -> None:
    for code in range(144, 151):
        assert shipped()[f"xid.{code}"].role == "symptom"
        assert shipped()[f"xid.{code}.nonfatal"].action == "none"
        assert shipped()[f"xid.{code}.fatal"].action == "reset_gpu"


def test_a_code_in_no_table_is_unknown() -> None:
    assert fields_of(None)["weights"] == {"unknown": 1.0}
    assert fields_of(9999)["action"] == "ask_human"
