"""The matcher: what it finds does not depend on how a log is cut, and its memory is bounded."""

from __future__ import annotations

import functools
import io
import random
import re
from typing import BinaryIO

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from keepstep.catalog.load import shipped
from keepstep.catalog.matcher import LINE_LIMIT, Hit, Matcher, chunks
from keepstep.catalog.signature import Signature
from keepstep.catalog.tables import data_text

ORDINARY = data_text("ordinary.log").encode().splitlines()
EXAMPLES = [text.encode() for entry in shipped() for text in entry.examples]
LINES = st.one_of(
    st.sampled_from(ORDINARY),
    st.sampled_from(EXAMPLES),
    st.binary(max_size=60).map(lambda b: b.replace(b"\n", b"").replace(b"\r", b"")),
    st.tuples(st.sampled_from(EXAMPLES), st.sampled_from(EXAMPLES)).map(b" ".join),
)


@functools.cache
def matcher() -> Matcher:
    return Matcher(shipped())


def entry(signature_id: str, *patterns: str, by_code: str = "") -> Signature:
    return Signature(
        id=signature_id,
        kind="test.kind",
        title="",
        severity="info",
        role="context",
        scope="node",
        depth=5,
        by_code=by_code,
        pattern=patterns,
        source="test",
    )


def line_by_line(text: bytes) -> list[tuple[bytes, list[str]]]:
    found = []
    for line in re.split(rb"[\n\r]", text):
        matches = matcher().match_bytes(line, ordinary=False)
        if matches:
            found.append((line, [m.signature.id for m in matches]))
    return found


def by_scan(parts: list[bytes]) -> list[tuple[bytes, list[str]]]:
    return [
        (part[h.start : h.end], [m.signature.id for m in h.matches]) for part in parts for h in matcher().scan(part)
    ]


@settings(deadline=None)
@given(st.lists(st.tuples(LINES, st.sampled_from([b"\n", b"\r\n", b"\r"])), max_size=12), st.integers(1, 200))
def test_scan_of_any_chunks_finds_what_line_by_line_finds(lines: list[tuple[bytes, bytes]], size: int) -> None:
    text = b"".join(line + end for line, end in lines)
    assert by_scan([text]) == line_by_line(text)
    assert by_scan(list(chunks(io.BytesIO(text), size + 70_000))) == line_by_line(text)


@given(st.lists(st.binary(max_size=30), max_size=20), st.integers(600, 5000))
def test_chunks_put_together_are_the_stream_and_end_at_line_ends(pieces: list[bytes], size: int) -> None:
    text = b"\n".join(pieces)
    parts = list(chunks(io.BytesIO(text), size))
    assert b"".join(parts) == text
    assert all(part.endswith(b"\n") for part in parts[:-1])


class _Endless(io.RawIOBase):
    """A stream of one line without an end, of `size` bytes, and a line after it."""

    def __init__(self, size: int, after: bytes) -> None:
        self.left = size
        self.after = after

    def readable(self) -> bool:
        return True

    def read(self, size: int = -1) -> bytes:
        if self.left > 0:
            given, self.left = min(size, self.left), self.left - size
            return b"x" * given
        given_bytes, self.after = self.after[:size], self.after[size:]
        return given_bytes


def test_a_line_that_never_ends_is_cut_and_what_follows_is_read() -> None:
    stream: BinaryIO = _Endless(50_000_000, b"\nNVRM: Xid (PCI:0000:4f:00): 79, GPU\n")  # type: ignore[assignment]
    sizes = []
    hits: list[Hit] = []
    for part in chunks(stream, 1 << 20):
        sizes.append(len(part))
        hits += matcher().scan(part)
    assert max(sizes) <= (1 << 20) + LINE_LIMIT
    assert [m.signature.id for h in hits for m in h.matches] == ["xid.79"]


def test_only_the_first_bytes_of_a_line_are_looked_at() -> None:
    line = b"NVRM: Xid (PCI:0000:4f:00): 79, GPU"
    assert matcher().match_bytes(b" " * (LINE_LIMIT - len(line)) + line)
    assert not matcher().match_bytes(b" " * LINE_LIMIT + line)
    assert not list(matcher().scan(b" " * LINE_LIMIT + line + b"\n"))


def test_bytes_that_are_no_text_are_matched_and_given_as_text() -> None:
    (match,) = matcher().match_bytes(b"\xff\xfe NVRM: Xid (PCI:0000:4f:00): 31, pid=7, name=\xe9\xff, Ch 00000001")
    assert match.signature.id == "xid.31" and match.groups["name"] == "��"
    assert matcher().match_line("\udcff NVRM: Xid (PCI:0000:4f:00): 79, GPU")


def test_an_entry_with_several_patterns_is_found_once_and_others_beside_it() -> None:
    one = Matcher([entry("a.one", "alpha", "alpha beta"), entry("b.two", "beta (?P<n>[0-9]+)")])
    matches = one.match_line("alpha beta 7")
    assert [(m.signature.id, m.groups) for m in matches] == [("a.one", {}), ("b.two", {"n": "7"})]


def test_a_code_picks_the_entry_and_its_absence_the_pattern_itself() -> None:
    made = Matcher([entry("fan", r"fan error (?P<fan>\d+)", by_code="fan"), entry("fan.7"), entry("fan.unknown")])
    assert [m.signature.id for m in made.match_line("fan error 7")] == ["fan.7"]
    assert [m.signature.id for m in made.match_line("fan error 8")] == ["fan.unknown"]


def test_a_pattern_without_any_literal_is_still_found_in_every_line() -> None:
    made = Matcher([entry("loose.one", r"^\d\d:\d\d$", r"\A\d-\d\z"), entry("tight.one", "fixed text")])
    assert [e.id for e in made.loose] == ["loose.one", "loose.one"]
    hits = list(made.scan(b"no\n12:30\r\nat 12:30\nfixed text\n1-2\n1-23\n7-8"))
    assert [[m.signature.id for m in h.matches] for h in hits] == [
        ["loose.one"],
        ["tight.one"],
        ["loose.one"],
        ["loose.one"],
    ]


def test_a_pattern_needs_all_its_literals_in_either_case() -> None:
    made = Matcher([entry("a.one", r"(?i)save.{0,60}\b(?:error|failed)\b")])
    assert made.match_line("SAVE of step 4 Failed") and made.match_line("save: error")
    assert not made.match_line("error rate 0.0") and not made.match_line("saved, no terrors")


def test_no_patterns_match_nothing() -> None:
    assert Matcher([]).match_line("anything") == [] == list(Matcher([entry("a.one")]).scan(b"anything\n"))


def test_candidates_are_all_lines_with_hits_and_few_others() -> None:
    text = b"\n".join([*ORDINARY, *EXAMPLES, b""])
    places = set(matcher().candidates(text))
    assert {(h.start, h.end) for h in matcher().scan(text)} <= places
    ordinary = b"\n".join([*ORDINARY, b""])
    assert len(list(matcher().candidates(ordinary))) <= len(ORDINARY) // 4


def test_what_ordinary_lines_have_is_found_line_by_line_and_stops_no_long_log() -> None:
    line = b"step 1200 loss 2.3817 grad_norm 0.412 lr 2.9e-04 tokens/s 48211 mfu 41.2 %"
    assert [m.signature.id for m in matcher().match_bytes(line)] == ["ckpt.rate"]
    assert shipped()["ckpt.rate"].ordinary
    assert matcher().match_bytes(line, ordinary=False) == []
    assert list(matcher().candidates(line)) == []


def test_a_line_of_every_literal_there_is_does_not_outgrow_the_automata() -> None:
    order = random.Random(7)
    texts = EXAMPLES * 3
    order.shuffle(texts)
    line = b" | ".join(texts)
    alone = {m.signature.id for text in EXAMPLES[:200] for m in matcher().match_bytes(text)}
    pieces = [line[at : at + LINE_LIMIT] for at in range(0, len(line), LINE_LIMIT)]
    assert alone & {m.signature.id for piece in pieces for m in matcher().match_bytes(piece)}


@pytest.mark.parametrize(
    "hostile", [b"Xid (" * 3000, b"a" * 16000 + b"!", b"pid=1, name=" * 1300, b"0x" * 8000, b"oom-kill:" * 1800]
)
def test_no_line_takes_long(hostile: bytes) -> None:
    """The timeout of the test is the judge: a pattern that backtracks would not end."""
    for _ in range(20):
        matcher().match_bytes(b"NVRM: Xid (PCI:0000:4f:00): 145, " + hostile)
        matcher().match_bytes(hostile)
