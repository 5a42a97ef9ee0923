"""Weights move with verified incidents, from the shipped ones and not farther than the incidents carry them."""

from __future__ import annotations

import tomllib

import msgspec
import pytest

from keepstep.attribution.learn import LARGEST, LEAST_OUTCOMES, Outcome, as_toml, outcome_of, relearned
from keepstep.catalog.load import Catalog
from keepstep.catalog.priors import shipped_priors
from keepstep.records.event import Event
from keepstep.records.verdict import FaultClass, verdict_fields
from tests.attribution.making import CATALOG, GPU, attribute, event

PRIORS = shipped_priors()


def outcomes(name: str, **counts: int) -> list[Outcome]:
    classes: dict[str, FaultClass] = {"hardware": "hardware", "framework": "framework", "user_code": "user_code"}
    return [Outcome({name: 1.0}, classes[c]) for c, n in counts.items() for _ in range(n)]


def weights(name: str, found: list[Outcome], **more: float) -> dict[FaultClass, float]:
    by_id = {o.id: o.weights for o in relearned(found, CATALOG, PRIORS, **more)}  # type: ignore[arg-type]
    return by_id.get(name) or dict(CATALOG[name].weights)


def test_a_sign_that_meant_something_else_here_says_so() -> None:
    moved = weights("gpu.dirty", outcomes("gpu.dirty", framework=30, hardware=2))
    assert moved["framework"] > moved["hardware"]


def test_few_incidents_move_little_and_many_move_more() -> None:
    few, many = (weights("gpu.dirty", outcomes("gpu.dirty", framework=n))["framework"] for n in (6, 60))
    assert 0 < few < many < LARGEST


def test_what_agrees_with_the_shipped_weights_changes_nothing_much() -> None:
    moved = weights("gpu.gone", outcomes("gpu.gone", hardware=20))
    assert moved["hardware"] == pytest.approx(5.0, abs=0.6)


def test_too_few_incidents_change_nothing() -> None:
    assert relearned(outcomes("gpu.dirty", framework=LEAST_OUTCOMES - 1), CATALOG, PRIORS) == []


def test_a_firm_prior_moves_less() -> None:
    found = outcomes("gpu.dirty", framework=20)
    assert weights("gpu.dirty", found, deviation=0.2)["framework"] < weights("gpu.dirty", found)["framework"]


def test_nothing_is_learned_of_what_was_not_verified() -> None:
    assert relearned([Outcome({"gpu.dirty": 1.0}, "unknown")] * 50, CATALOG, PRIORS) == []


def test_a_sign_that_comes_with_the_real_one_does_not_take_its_credit() -> None:
    # Both come together when it is the program; the hint comes alone when it is hardware.
    found = [Outcome({"script.error": 1.0, "cuda.error": 1.0}, "user_code")] * 30
    found += [Outcome({"cuda.error": 1.0}, "hardware")] * 30
    moved = weights("cuda.error", found)
    assert moved["hardware"] > moved.get("user_code", 0.0) + 1.0


def test_the_verdict_after_learning_is_the_verified_one() -> None:
    seen: list[Event] = [event("gpu.dirty", 0, node="a", gpu=GPU)]
    before = attribute(seen, CATALOG)
    found = [outcome_of(verdict_fields(before), "framework", CATALOG) for _ in range(25)]
    (override,) = relearned(found, CATALOG, PRIORS)
    learned = Catalog(
        msgspec.structs.replace(s, weights=override.weights) if s.id == override.id else s for s in CATALOG
    )
    assert before.fault_class == "hardware" and attribute(seen, learned).fault_class == "framework"


def test_an_outcome_takes_the_shares_that_counted() -> None:
    events = [
        event("gpu.gone", 0, node="a", gpu=GPU),
        event("cuda.error", 5, node="a"),
        event("gpu.hint", 1, stale="replay"),
    ]
    outcome = outcome_of(verdict_fields(attribute(events, CATALOG)), "hardware", CATALOG)
    assert outcome.signs["gpu.gone"] == pytest.approx(1.0)
    assert 0 < outcome.signs["cuda.error"] < 1.0 and "gpu.hint" not in outcome.signs


def test_the_file_has_a_reason_for_every_entry() -> None:
    table = tomllib.loads(as_toml(relearned(outcomes("gpu.dirty", framework=12, hardware=1), CATALOG, PRIORS)))
    (one,) = table["override"]
    assert one["id"] == "gpu.dirty" and one["reason"] == "learned from 13 verified incidents: framework 12, hardware 1"
    assert one["weights"]["framework"] > 0
