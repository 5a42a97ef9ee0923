"""Words of a text: learned, leaned on only where nothing else is known, and never a reason to act."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from keepstep.attribution.lean import LEAST_MARGIN, with_lean
from keepstep.attribution.verdict import attribute
from keepstep.catalog.load import shipped
from keepstep.catalog.matcher import Matcher
from keepstep.catalog.words import LEAN_CLASSES, as_csv, lean_of, learn, shipped_words, words_of
from keepstep.records.event import Event
from keepstep.records.verdict import FaultClass, Verdict
from keepstep.sources.onefile import WORDS_LIMIT
from keepstep.sources.reading import read_text

CATALOG = shipped()
MATCHER = Matcher(CATALOG)


def lean_event(margin: float, fault_class: str = "storage") -> Event:
    attrs = {"lean": fault_class, "margin": margin, "words": ["mount"]}
    return Event(kind="text.words", signature="text.words", attrs=attrs)


def unknown(**changes: object) -> Verdict:
    fields: dict[str, object] = {"signature": "unknown", "confidence": 0.3, "tier": "unknown", "action": "ask_human"}
    return Verdict(fault_class="unknown", **(fields | changes))  # type: ignore[arg-type]


def test_words_and_parts_of_names() -> None:
    assert words_of("NCCL_SOCKET torch.OutOfMemoryError 0x1f step 12 ab") >= {
        "outofmemoryerror",
        "memory",
        "error",
        "step",
    }
    assert "ab" not in words_of("ab cd")


def test_a_word_of_one_class_leans_to_it() -> None:
    texts: list[tuple[set[str], FaultClass]] = []
    for number in range(20):
        texts.append(({"mount", "stale"} if number < 5 else {f"word{number}"}, "storage"))
        texts.append(({"port", "cable"} if number < 5 else {f"other{number}"}, "fabric"))
    table = learn([*texts, ({"port"}, "unknown")])
    lean = lean_of({"mount", "other"}, table)
    assert lean is not None and lean.fault_class == "storage" and lean.margin > 0
    assert lean.words == ("mount",)
    assert lean_of({"other"}, table) is None
    assert learn([]) == {}


def test_the_shipped_table_is_whole() -> None:
    table = shipped_words()
    assert len(table) > 500 and all(len(odds) == len(LEAN_CLASSES) for odds in table.values())
    assert as_csv({"a": (0.0,) * len(LEAN_CLASSES)}, "x").splitlines()[1].split(",")[0] == "word"


@pytest.mark.parametrize(
    ("margin", "expected"), [(LEAST_MARGIN - 0.1, "unknown"), (LEAST_MARGIN, "storage"), (50.0, "storage")]
)
def test_only_a_clear_lean_counts(margin: float, expected: str) -> None:
    verdict = with_lean(unknown(), [lean_event(margin)])
    assert verdict.fault_class == expected
    assert verdict.action == "ask_human" and verdict.confidence <= 0.75
    total = verdict.confidence + sum(a.confidence for a in verdict.alternatives)
    assert expected == "unknown" or total == pytest.approx(1.0)


def test_a_known_class_and_a_calm_verdict_stay() -> None:
    known = Verdict(fault_class="hardware", signature="xid.79", confidence=0.9, tier="probable", action="cordon_node")
    assert with_lean(known, [lean_event(50.0)]) is known
    calm = unknown(no_current_fault=True, action="none")
    assert with_lean(calm, [lean_event(50.0)]) is calm


def test_a_long_text_leans_to_nothing() -> None:
    line = "the lustre mount of the scratch filesystem is stale\n"
    short = read_text("a.log", line, CATALOG, MATCHER).events
    long = read_text("a.log", line * (2 * WORDS_LIMIT // len(line)), CATALOG, MATCHER).events
    assert len([e for e in short if e.signature == "text.words"]) == 1
    assert "text.words" not in {e.signature for e in long}


@given(st.lists(st.sampled_from(sorted(shipped_words())), max_size=30))
def test_words_alone_never_act(words: list[str]) -> None:
    events = read_text("a.log", " ".join(words), CATALOG, MATCHER).events
    only = [e for e in events if e.signature == "text.words"]
    verdict = attribute(only, CATALOG)
    assert verdict.action in ("none", "ask_human") and verdict.tier in ("unknown", "possible")
