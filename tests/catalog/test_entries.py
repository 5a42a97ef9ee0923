"""Every entry of the shipped catalog does what it says: its patterns, its references, its bounds."""

from __future__ import annotations

import functools
import re
from importlib import resources

import pytest
import re2

from keepstep.catalog.load import entries, named, shipped
from keepstep.catalog.matcher import Matcher
from keepstep.catalog.signature import Signature
from keepstep.catalog.tables import data_text
from keepstep.records.verdict import NODE_ACTIONS


@functools.cache
def matcher() -> Matcher:
    return Matcher(shipped())


def with_patterns() -> list[Signature]:
    return [entry for entry in shipped() if entry.pattern]


def own(entry: Signature, text: str) -> bool:
    """Whether one of the entry's patterns is found in a text."""
    return any(re2.compile(pattern).search(text) is not None for pattern in entry.pattern)


def in_file(name: str) -> list[Signature]:
    text = data_text(f"signatures/{name}")
    return [entry for entry in entries(text, name) if entry.pattern]


FILES = sorted(
    file.name
    for file in (resources.files("keepstep.catalog") / "data" / "signatures").iterdir()
    if file.name.endswith(".toml")
)


@pytest.mark.parametrize("file", FILES)
def test_every_example_is_matched_by_its_entry_and_every_pattern_has_an_example(file: str) -> None:
    wrong = []
    for entry in in_file(file):
        wrong += [f"{entry.id}: not matched: {example}" for example in entry.examples if not own(entry, example)]
        for pattern in entry.pattern:
            compiled = re2.compile(pattern)
            if not any(compiled.search(example) for example in entry.examples):
                wrong.append(f"{entry.id}: no example for {pattern}")
    assert not wrong, "\n".join(wrong)


@pytest.mark.parametrize("file", FILES)
def test_every_entry_with_patterns_has_near_misses_and_matches_none(file: str) -> None:
    wrong = [f"{entry.id}: {text}" for entry in in_file(file) for text in entry.near_misses if own(entry, text)]
    wrong += [f"{entry.id}: no near miss" for entry in in_file(file) if not entry.near_misses]
    assert not wrong, "\n".join(wrong)


def test_all_entries_have_sources_and_weights_are_argued() -> None:
    assert not [entry.id for entry in shipped() if not entry.source]
    assert not [entry.id for entry in shipped() if entry.weights and not entry.why]


def test_what_an_example_matches_through_the_matcher_is_what_its_patterns_match() -> None:
    wrong = []
    for entry in with_patterns():
        for text in entry.examples:
            through = {match.signature.id for match in matcher().match_line(text)}
            expected = entry.by_code or entry.id
            if not any(one == expected or one.startswith(f"{expected}.") for one in through):
                wrong.append(f"{entry.id}: {through} for {text}")
    assert not wrong, "\n".join(wrong)


def test_literals_hide_no_match() -> None:
    """One text of every entry, tried with all patterns one by one, gives what the matcher gives."""
    compiled = [(entry, re2.compile(pattern)) for entry in with_patterns() for pattern in entry.pattern]
    texts = [entry.examples[0] for entry in with_patterns()]
    for text in texts[:: max(1, len(texts) * len(compiled) // 400_000)]:
        line = text.encode()
        one_by_one = {entry.by_code or entry.id for entry, pattern in compiled if pattern.search(line)}
        found = {match.signature.id for match in matcher().match_line(text)}
        assert {one.split(".")[0] if one.split(".")[0] in ("xid", "sxid") else one for one in found} == {
            one.split(".")[0] if one.split(".")[0] in ("xid", "sxid") else one for one in one_by_one
        }, text


def test_no_pattern_makes_the_matcher_look_at_every_line() -> None:
    assert [entry.id for entry in matcher().loose] == []


def test_ordinary_lines_are_no_root_and_call_for_nothing() -> None:
    for hit in matcher().scan(data_text("ordinary.log").encode()):
        for match in hit.matches:
            assert match.signature.role not in ("root", "cascade"), match.signature.id
            assert match.signature.action not in NODE_ACTIONS, match.signature.id


def test_clears_names_entries_that_exist_and_the_relation_reads_both_ways() -> None:
    catalog = shipped()
    for entry in catalog:
        for pattern in entry.clears:
            cleared = [other.id for other in catalog if named(pattern, other.id)]
            assert cleared, f"{entry.id} clears {pattern}, which is no entry"
            assert all(entry.id in catalog.cleared_by(one) for one in cleared)
    assert "xid.162" in catalog.cleared_by("xid.163")


def test_ids_are_dotted_words_and_numbers_are_in_their_ranges() -> None:
    for entry in shipped():
        assert re.fullmatch(r"[a-z][a-z0-9_]*(\.[a-z0-9_]+)*", entry.id), entry.id
        assert re.fullmatch(r"[a-z][a-z0-9_]*(\.[a-z0-9_]+)*", entry.kind), entry.kind
        assert 0 <= entry.depth <= 9, entry.id
        assert all(-5 <= weight <= 5 for weight in entry.weights.values()), entry.id


def test_titles_use_only_groups_that_the_patterns_can_give() -> None:
    for entry in with_patterns():
        groups = {name for pattern in entry.pattern for name in re2.compile(pattern).groupindex}
        assert set(re.findall(r"\{(\w+)\}", entry.title)) <= groups, entry.id


def test_fields_of_titles_have_no_format() -> None:
    # They are filled as they are: a rule gives what is to be read.
    assert [e.id for e in shipped() if re.search(r"\{\w*[^\w}]", e.title)] == []


def test_an_action_is_never_one_that_the_entry_rules_out() -> None:
    assert not [entry.id for entry in shipped() if entry.action in entry.never]


def test_out_of_memory_of_programs_never_takes_hardware_out() -> None:
    killed = [entry for entry in shipped() if entry.id.startswith("oom.") and entry.role == "root"]
    assert {"oom.cgroup", "oom.global"} <= {entry.id for entry in killed}
    assert all(entry.never and set(entry.never) >= NODE_ACTIONS for entry in killed)


def test_the_digest_names_the_content() -> None:
    from keepstep.catalog.load import Catalog

    every = list(shipped())
    assert Catalog(reversed(every)).digest == shipped().digest
    assert Catalog(every[1:]).digest != shipped().digest
