"""Which signatures a line matches: thousands of lines that match nothing are passed over at the speed of one automaton.

Three steps. All literals that patterns require (literals.py) are one automaton, which runs over a whole chunk and stops at lines
that have one of them. A second one tells which literals such a line has. Only the patterns that need them are tried on the line.
Automata of literals stay small whatever the patterns and the log are; one of all patterns does not: it outgrows its memory on
some logs and is then a thousand times slower. Everything is linear in the length of the line (RE2) and works on bytes.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterable, Iterator
from typing import BinaryIO, NamedTuple

import re2

from keepstep.catalog.coded import resolve
from keepstep.catalog.literals import required
from keepstep.catalog.signature import Signature

LINE_LIMIT = 16 * 1024
"""Bytes of a line that are looked at. No line of interest is longer; a dump without line ends may be."""
CHUNK_BYTES = 4 * 1024 * 1024
"""Bytes that `chunks` reads at once."""
_AUTOMATON_BYTES = 64 * 1024 * 1024
"""Most memory for the states of one automaton; it takes a few MB unless a log holds every literal there is."""
_SAME_LINE = 64
"""Most codes that are taken from one line: a report of many faults may be one line of JSON."""


class Match(NamedTuple):
    """A signature that a line has, the named groups of its pattern that took part, and what was decoded from them."""

    signature: Signature
    groups: dict[str, str]


class Hit(NamedTuple):
    """A line of a chunk, from `start` to `end` without its line end, and what it matches."""

    start: int
    end: int
    matches: list[Match]


class _Pattern(NamedTuple):
    """A pattern of a signature; `names` of its groups in the order of their numbers, None for one without name."""

    signature: Signature
    regexp: re2._Regexp
    names: tuple[str | None, ...]


def _options(**wanted: bool | int) -> re2.Options:
    options = re2.Options()
    options.encoding = re2.Options.Encoding.LATIN1
    options.log_errors = False
    for name, value in wanted.items():
        setattr(options, name, value)
    return options


class Matcher:
    """All patterns of some signatures, compiled. Lines end with "\\n" or "\\r"."""

    def __init__(self, signatures: Iterable[Signature]) -> None:
        self._by_id = {s.id: s for s in signatures}
        self._patterns = [_compiled(s, p) for s in self._by_id.values() for p in s.pattern]
        needed: dict[tuple[str, bool], list[int]] = {}
        self._loose: list[int] = []
        for index, text in enumerate(p for s in self._by_id.values() for p in s.pattern):
            literals = required(text)
            if literals is None:
                self._loose.append(index)
            else:
                for string in literals.strings:
                    needed.setdefault((string, literals.folded), []).append(index)
        self._needs = list(needed.values())
        self._literals = [string.encode() for string, _ in needed]
        options = _options(max_mem=_AUTOMATON_BYTES, never_capture=True)
        escaped = [(f"(?i:{re2.escape(s)})" if folded else re2.escape(s)).encode() for s, folded in needed]
        # (?:) in front of nothing at all would match everywhere.
        self._any = re2.compile(b"|".join(escaped) or rb"[^\x00-\xff]", options)
        self._which = re2.Set.SearchSet(options)
        for one in escaped:
            self._which.Add(one)
        self._which.Compile()

    @property
    def loose(self) -> list[Signature]:
        """Signatures with a pattern that has no literal: each makes the matcher look at every single line."""
        return [self._patterns[index].signature for index in self._loose]

    def match_line(self, line: str) -> list[Match]:
        """All signatures of a line, in the order of the catalog; one with several patterns at most once."""
        return self.match_bytes(line.encode("utf-8", "replace"))

    def match_bytes(self, line: bytes) -> list[Match]:
        """The same for a line as it is in the file. Only its first LINE_LIMIT bytes count."""
        line = line[:LINE_LIMIT]
        if not self._needs:
            return self._tried(line, self._loose)
        literals = self._which.Match(line)
        if not literals:
            return self._tried(line, self._loose) if self._loose else []
        return self._tried(line, sorted({i for literal in literals for i in self._needs[literal]} | {*self._loose}))

    def scan(self, chunk: bytes) -> Iterator[Hit]:
        """The lines of a chunk that match something, in order. A chunk should begin and end where lines do."""
        if self._loose:
            yield from self._every_line(chunk)
            return
        at, size = 0, len(chunk)
        while at < size:
            found = self._any.search(chunk, at)
            if found is None:
                return
            start, end = _line_around(chunk, at, found.start())
            matches = self.match_bytes(chunk[start:end])
            if matches:
                yield Hit(start, end, matches)
            at = end + 1

    def _every_line(self, chunk: bytes) -> Iterator[Hit]:
        at = 0
        while at < len(chunk):
            start, end = _line_around(chunk, at, at)
            matches = self.match_bytes(chunk[start:end])
            if matches:
                yield Hit(start, end, matches)
            at = end + 1

    def _tried(self, line: bytes, patterns: Iterable[int]) -> list[Match]:
        found: list[Match] = []
        seen: set[str] = set()
        for index in patterns:
            pattern = self._patterns[index]
            if pattern.signature.id in seen:
                continue
            for groups in _all_groups(pattern, line):
                seen.add(pattern.signature.id)
                meant = Match(*resolve(pattern.signature, groups, self._by_id))
                if meant not in found:
                    found.append(meant)
        return found


def _compiled(signature: Signature, text: str) -> _Pattern:
    regexp = re2.compile(text.encode(), _options())
    by_number = {number: name.decode() for name, number in regexp.groupindex.items()}
    return _Pattern(signature, regexp, tuple(by_number.get(n) for n in range(1, regexp.groups + 1)))


def _all_groups(pattern: _Pattern, line: bytes) -> list[dict[str, str]]:
    """Named groups of the first match; of all matches when they carry codes."""
    if not pattern.signature.by_code:
        match = pattern.regexp.search(line)
        return [] if match is None else [_named(pattern, match)]
    return [_named(pattern, match) for match in itertools.islice(pattern.regexp.finditer(line), _SAME_LINE)]


def _named(pattern: _Pattern, match: re2._Match) -> dict[str, str]:
    values = zip(pattern.names, match.groups(), strict=True)
    return {name: value.decode("utf-8", "replace") for name, value in values if name and value is not None}


def _line_around(chunk: bytes, low: int, at: int) -> tuple[int, int]:
    """Start and end of the line that the byte `at` is in; no line begins before `low`."""
    start = max(chunk.rfind(b"\n", low, at) + 1, low)
    start = max(chunk.rfind(b"\r", start, at) + 1, start)
    end = chunk.find(b"\n", at)
    end = len(chunk) if end < 0 else end
    carriage = chunk.find(b"\r", at, end)
    return start, end if carriage < 0 else carriage


def chunks(stream: BinaryIO, size: int = CHUNK_BYTES) -> Iterator[bytes]:
    """The stream in pieces that end where a line ends, the last one where the stream ends.

    A line longer than `size` is cut to its beginning, so that memory stays bounded whatever is read.
    """
    rest = b""
    dropping = False
    while block := stream.read(size):
        if dropping:
            cut = block.find(b"\n")
            if cut < 0:
                continue
            block, dropping = block[cut:], False
        block = rest + block if rest else block
        cut = block.rfind(b"\n") + 1
        if cut == 0 and len(block) > size:
            rest, dropping = block[:LINE_LIMIT], True
            continue
        if cut:
            yield block[:cut]
        rest = block[cut:]
    if rest:
        yield rest
