"""What holds of every verdict, whatever was seen."""

from __future__ import annotations

import random

import msgspec
from hypothesis import given, settings
from hypothesis import strategies as st

from keepstep.attribution.act import STRENGTH
from keepstep.attribution.verdict import attribute
from keepstep.records.event import Event
from keepstep.records.verdict import NODE_ACTIONS, Verdict
from tests.attribution.making import CATALOG, event

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
        assert verdict.fault_class != "user_code" and verdict.tier in ("certain", "probable")
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
