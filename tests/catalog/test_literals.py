"""Literals that a pattern requires: every text that the pattern matches contains them."""

from __future__ import annotations

import re
from typing import Any

import pytest
import re2
from hypothesis import given
from hypothesis import strategies as st

from keepstep.catalog.literals import BOUNDARY, LIMIT, SHORTEST, length, needs
from keepstep.catalog.load import shipped

WORDS = st.text("abcXY1 _", min_size=1, max_size=6)


@st.composite
def patterns_with_texts(draw: st.DrawFn) -> tuple[str, str]:
    """A pattern, and a text that it matches."""
    kind = draw(st.sampled_from(["word", "dot", "class", "digits", "sequence", "either", "maybe", "many", "named"]))
    if kind == "word":
        word = draw(WORDS)
        return re.escape(word), word
    if kind == "dot":
        return draw(
            st.sampled_from([(".*", "zz"), (".{0,9}?", ""), (".", "q"), (r"\S+", "uv"), ("[^,]*", "k"), (r"\b", "")])
        )
    if kind == "class":
        return draw(
            st.sampled_from(
                [("[ab]", "b"), ("[a-f]", "c"), (r"[\]x]", "]"), ("[^a]", "b"), ("[[:digit:]]", "7"), ("[]a]", "]")]
            )
        )
    if kind == "digits":
        return r"\d{2,4}", draw(st.sampled_from(["12", "1234"]))
    inner = draw(patterns_with_texts())
    if kind == "maybe":
        return f"(?:{inner[0]})?", draw(st.sampled_from([inner[1], ""]))
    if kind == "many":
        times = draw(st.integers(1, 3))
        return f"(?:{inner[0]}){draw(st.sampled_from(['+', '{1,3}', '+?']))}", inner[1] * times
    if kind == "named":
        return f"(?P<n{draw(st.integers(0, 10**6))}>{inner[0]})", inner[1]
    other = draw(patterns_with_texts())
    if kind == "either":
        return f"(?:{inner[0]}|{other[0]})", draw(st.sampled_from([inner[1], other[1]]))
    return inner[0] + other[0], inner[1] + other[1]


def contains(text: str, clause: frozenset[str], folded: bool) -> bool:
    inside = text.lower() if folded else text
    return any(string.replace(BOUNDARY, "") in inside for string in clause)


@given(patterns_with_texts(), st.booleans())
def test_a_text_that_matches_has_one_of_every_clause(made: tuple[str, str], folded: bool) -> None:
    pattern, text = made
    pattern = f"(?i){pattern}" if folded else pattern
    found = needs(pattern)
    match = re2.compile(pattern).search(text)
    if match is not None:  # a word boundary may keep the text that was made from matching
        assert all(contains(match.group(), clause, found.folded) for clause in found.clauses), found


@given(st.text(max_size=60))
def test_any_text_is_read_to_an_end(text: str) -> None:
    found = needs(text)
    assert all(SHORTEST <= length(s) <= LIMIT for clause in found.clauses for s in clause)


def test_all_examples_of_the_catalog_have_what_their_patterns_need() -> None:
    for entry in shipped():
        for pattern in entry.pattern:
            found = needs(pattern)
            compiled = re2.compile(pattern)
            for text in (e for e in entry.examples if compiled.search(e)):
                assert all(contains(text, clause, found.folded) for clause in found.clauses), (entry.id, pattern)


@pytest.mark.parametrize(
    ("pattern", "clauses"),
    [
        ("plain text", [{"plain text"}]),
        (r"NVRM: Xid \(\d+\)", [{"NVRM: Xid ("}]),
        ("link (?:up|down) now", [{"link up now", "link down now"}]),
        (r"ib(?P<n>[01]): lost", [{"ib0: lost", "ib1: lost"}]),
        (r"first.{0,60}second", [{"first"}, {"second"}]),
        (r"(?i)\bNaN\b", [{f"{BOUNDARY}nan{BOUNDARY}"}]),
        ("(?:alpha.*|beta.*)", [{"alpha", "beta"}]),
        ("a*b?c{0,3}", []),
        ("(?:word)?", []),
        (r"\d+ of \d+", [{" of "}]),
        (r"\Qa.b(c\E", [{"a.b(c"}]),
        ("abc|", []),
        ("(unclosed", [{"unclosed"}]),
        ("closed)", []),
    ],
)
def test_known_patterns(pattern: str, clauses: list[Any]) -> None:
    assert sorted(map(sorted, needs(pattern).clauses)) == sorted(map(sorted, clauses))


def test_a_long_literal_is_cut_to_its_end() -> None:
    (clause,) = needs("x" * 50 + "the end").clauses
    assert clause == {("x" * 50 + "the end")[-LIMIT:]}
