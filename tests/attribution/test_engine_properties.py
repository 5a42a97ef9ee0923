"""What holds of every verdict, whatever was seen."""

from __future__ import annotations

import random

import msgspec
from hypothesis import given, settings
from hypothesis import strategies as st

from keepstep.attribution.act import STRENGTH
from keepstep.attribution.verdict import judge as judge_by_all_rules
from keepstep.catalog.load import shipped
from keepstep.records.event import Event, Evidence, Gpu
from keepstep.records.verdict import NODE_ACTIONS, Verdict
from tests.attribution.making import CATALOG, T0, S, attribute, event

FAULTS = sorted(s.id for s in CATALOG if s.role in ("root", "cascade", "symptom"))
NAMES = sorted(s.id for s in CATALOG)
BENIGN = sorted(s.id for s in CATALOG if s.role == "noise")


@st.composite
def some_event(draw: st.DrawFn, names: list[str] = NAMES) -> Event:
    return event(
        draw(st.sampled_from(names)),
        draw(st.one_of(st.none(), st.integers(0, 5000))),
        node=draw(st.sampled_from([None, "n1", "n2"])),
        gpu=draw(st.sampled_from([None, "0000:3b:00.0", "0000:9c:00.0"])),
        rank=draw(st.sampled_from([None, 0, 1, 7])),
        path=draw(st.sampled_from(["a.log", "b.log", "dmesg"])),
        line=draw(st.integers(1, 50)),
    )


def decided(verdict: Verdict) -> tuple[object, ...]:
    return (
        verdict.fault_class,
        verdict.signature,
        verdict.confidence,
        verdict.tier,
        verdict.action,
        verdict.no_current_fault,
        verdict.entity,
        verdict.first_cause,
    )


events_of = st.lists(some_event(), max_size=8)


@given(st.lists(some_event(FAULTS), min_size=1, max_size=6), some_event(), st.sampled_from(["replay", "previous_boot"]))
def test_what_is_stale_never_changes_the_verdict_on_a_current_fault(
    events: list[Event], other: Event, reason: str
) -> None:
    stale = msgspec.structs.replace(other, stale=reason)
    assert decided(attribute([*events, stale], CATALOG)) == decided(attribute(events, CATALOG))


@given(events_of, st.randoms(use_true_random=False))
def test_the_order_in_which_files_are_given_does_not_matter(events: list[Event], shuffle: random.Random) -> None:
    mixed = list(events)
    shuffle.shuffle(mixed)
    assert attribute(mixed, CATALOG) == attribute(events, CATALOG)


@given(events_of, some_event(BENIGN))
def test_what_is_benign_never_makes_an_action_stronger(events: list[Event], noise: Event) -> None:
    # It may name a node, and so complete a verdict: it names none here.
    noise = msgspec.structs.replace(noise, node=None, gpu=None, rank=None)
    before, after = attribute(events, CATALOG), attribute([*events, noise], CATALOG)
    assert STRENGTH.index(after.action) <= STRENGTH.index(before.action)


@given(events_of)
def test_unknown_never_acts_and_no_fault_never_acts(events: list[Event]) -> None:
    verdict = attribute(events, CATALOG)
    if verdict.fault_class == "unknown" or verdict.no_current_fault:
        assert verdict.action in ("none", "ask_human")


@given(events_of)
def test_hardware_is_taken_out_only_on_a_probable_verdict_that_does_not_blame_the_program(events: list[Event]) -> None:
    verdict = attribute(events, CATALOG)
    if verdict.action in NODE_ACTIONS:
        assert verdict.fault_class != "user_code" and verdict.tier != "unknown"
        assert verdict.first_cause is not None


@given(st.lists(some_event([n for n in NAMES if n.startswith(("xid.", "torch.cuda_oom", "nccl."))]), max_size=6))
def test_no_pile_of_application_signs_takes_hardware_out(events: list[Event]) -> None:
    assert attribute(events, CATALOG).action not in NODE_ACTIONS


@given(events_of)
def test_probabilities_are_probabilities(events: list[Event]) -> None:
    verdict = attribute(events, CATALOG)
    total = verdict.confidence + sum(a.confidence for a in verdict.alternatives)
    assert 0.85 < total <= 1.0 + 1e-9


@given(events_of)
@settings(max_examples=30)
def test_doubling_every_event_changes_no_class(events: list[Event]) -> None:
    once, twice = attribute(events, CATALOG), attribute([*events, *events], CATALOG)
    if once.tier == "certain":
        assert twice.fault_class == once.fault_class


SHIPPED = shipped()
SHIPPED_NAMES = sorted(s.id for s in SHIPPED if not s.id.startswith("derived."))
APPLICATION = [n for n in SHIPPED_NAMES if n in ("xid.13", "xid.31", "xid.43", "xid.45") or "cuda_oom" in n]


@st.composite
def shipped_event(draw: st.DrawFn, names: list[str] = SHIPPED_NAMES) -> Event:
    signature = SHIPPED[draw(st.sampled_from(names))]
    at = draw(st.one_of(st.none(), st.integers(0, 5000)))
    path, line = draw(st.sampled_from(["a.log", "dmesg"])), draw(st.integers(1, 50))
    gpu = draw(st.sampled_from([None, "0000:3b:00.0", "0000:9c:00.0"]))
    code = signature.id.rpartition(".")[2]
    return Event(
        kind=signature.kind,
        signature=signature.id,
        severity=signature.severity,
        source="text",
        time_ns=None if at is None else T0 + at * S,
        time_quality="none" if at is None else "exact",
        order=line,
        node=draw(st.sampled_from([None, "n1", "n2"])),
        gpu=Gpu(pci=gpu) if gpu else None,
        rank=draw(st.sampled_from([None, 0, 1, 7])),
        attrs={"xid": int(code)} if code.isdigit() else {},
        evidence=Evidence(path=path, line=line, text=signature.title),
        stale=draw(st.sampled_from([None, None, None, "replay", "previous_boot"])),
    )


@given(st.lists(shipped_event(), max_size=10), st.randoms(use_true_random=False))
@settings(max_examples=150)
def test_the_shipped_rules_take_any_events_in_any_order(events: list[Event], shuffle: random.Random) -> None:
    verdict = judge_by_all_rules(events, SHIPPED).verdict
    mixed = list(events)
    shuffle.shuffle(mixed)
    assert decided(judge_by_all_rules(mixed, SHIPPED).verdict) == decided(verdict)
    if verdict.fault_class in ("unknown", "user_code") or verdict.no_current_fault:
        assert verdict.action not in NODE_ACTIONS


@given(st.lists(shipped_event(APPLICATION), max_size=8))
@settings(max_examples=60)
def test_the_shipped_rules_take_no_hardware_out_for_the_programs_signs(events: list[Event]) -> None:
    assert judge_by_all_rules(events, SHIPPED).verdict.action not in NODE_ACTIONS
