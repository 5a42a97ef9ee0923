"""Which signatures a line matches: thousands of lines that match nothing are passed over at the speed of one automaton.

Three steps. Each pattern requires certain literals (literals.py); those that are rarest in ordinary logs are one automaton, which
runs over a whole chunk and stops at lines that have one. A second one tells which literals such a line has. Only patterns that
find all of theirs are tried on the line. Automata of literals stay small whatever the patterns and the log are; one of all
patterns does not: it outgrows its memory on some logs and is then a thousand times slower. Everything is linear in the length of
the line (RE2) and works on bytes.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator, Sequence
from typing import BinaryIO, NamedTuple

import re2

from keepstep.catalog.coded import DECODED, resolve
from keepstep.catalog.literals import BOUNDARY, Needs, length, needs
from keepstep.catalog.signature import Signature
from keepstep.catalog.tables import data_text

LINE_LIMIT = 16 * 1024
"""Bytes of a line that are looked at. No line of interest is longer; a dump without line ends may be."""
CHUNK_BYTES = 4 * 1024 * 1024
"""Bytes that `chunks` reads at once."""
_AUTOMATON_BYTES = 64 * 1024 * 1024
"""Most memory for the states of one automaton; it takes a few MB unless a log holds every literal there is."""
_SAME_LINE = 64
"""Most codes that are taken from one line: a report of many faults may be one line of JSON."""
_REMEMBERED = 4096
"""Sets of literals whose patterns are remembered; logs have a few hundred."""
_CLAUSES = 3
"""Requirements of a pattern that are checked before it is tried."""


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
    """A pattern of a signature; `names` of its groups in the order of their numbers, None for one without name.

    `final`: nothing is decoded from its groups.
    """

    signature: Signature
    regexp: re2._Regexp
    names: tuple[str | None, ...]
    final: bool


_Literal = tuple[str, bool]
"""Its text, with BOUNDARY for a word boundary; whether the case of letters does not matter."""


class Matcher:
    """All patterns of some signatures, compiled. Lines end with "\\n" or "\\r"."""

    def __init__(self, signatures: Iterable[Signature]) -> None:
        self._by_id = {s.id: s for s in signatures}
        self._patterns = [_compiled(s, p) for s in self._by_id.values() for p in s.pattern]
        ordinary = _Ordinary(data_text("ordinary.log"))
        numbers: dict[_Literal, int] = {}
        self._clauses: list[tuple[frozenset[int], ...]] = []
        self._started_by: dict[int, list[int]] = {}
        self._wanted: dict[tuple[tuple[int, ...], bool], tuple[int, ...]] = {}
        self._loose: list[int] = []
        loose: list[bytes] = []
        for index, text in enumerate(p for s in self._by_id.values() for p in s.pattern):
            clauses = ordinary.rarest(needs(text))
            known = tuple(frozenset(numbers.setdefault(x, len(numbers)) for x in clause) for clause in clauses)
            self._clauses.append(known[1:])
            if not known:
                self._loose.append(index)
                loose.append(_in_a_chunk(text))
            for number in known[0] if known else ():
                self._started_by.setdefault(number, []).append(index)
        rare = {number for number, started in self._started_by.items() if any(self._is_rare(i) for i in started)}
        expressions = [_expression(literal) for literal in numbers]
        options = _options(max_mem=_AUTOMATON_BYTES, never_capture=True)
        # In order, so that common beginnings are one path of the automaton.
        starting = sorted(expressions[number] for number in rare) + loose
        self._any = re2.compile(b"|".join(starting) or rb"[^\x00-\xff]", options)
        self._which = re2.Set.SearchSet(options)
        for expression in expressions:
            self._which.Add(expression)
        self._which.Compile()

    @property
    def loose(self) -> list[Signature]:
        """Signatures with a pattern that requires no literal: it is in the first automaton as it is, which makes that larger."""
        return [self._patterns[index].signature for index in self._loose]

    def match_line(self, line: str, ordinary: bool = True) -> list[Match]:
        """All signatures of a line, in the order of the catalog; one with several patterns at most once.

        `ordinary`: also those that are in lines of logs in which nothing is wrong (Signature.ordinary).
        """
        return self.match_bytes(line.encode("utf-8", "replace"), ordinary)

    def match_bytes(self, line: bytes, ordinary: bool = True) -> list[Match]:
        """The same for a line as it is in the file. Only its first LINE_LIMIT bytes count."""
        line = line[:LINE_LIMIT]
        literals = self._which.Match(line)
        if not literals:
            return self._tried(line, self._loose) if self._loose else []
        key = (tuple(literals), ordinary)
        wanted = self._wanted.get(key)
        if wanted is None:
            if len(self._wanted) >= _REMEMBERED:
                self._wanted.clear()
            wanted = self._wanted[key] = self._wanted_by(*key)
        return self._tried(line, wanted) if wanted else []

    def _is_rare(self, index: int) -> bool:
        return not self._patterns[index].signature.ordinary

    def _wanted_by(self, literals: Sequence[int], ordinary: bool) -> tuple[int, ...]:
        """Patterns to try on a line that has these literals, in the order of the catalog."""
        wanted = {*self._loose}
        for literal in literals:
            for index in self._started_by.get(literal, ()):
                if (ordinary or self._is_rare(index)) and all(
                    not clause.isdisjoint(literals) for clause in self._clauses[index]
                ):
                    wanted.add(index)
        return tuple(sorted(wanted))

    def scan(self, chunk: bytes) -> Iterator[Hit]:
        """The lines of a chunk that match something that is not ordinary, in order. A chunk should begin and end where lines do."""
        for start, end in self.candidates(chunk):
            matches = self.match_bytes(chunk[start : min(end, start + LINE_LIMIT)], ordinary=False)
            if matches:
                yield Hit(start, end, matches)

    def candidates(self, chunk: bytes) -> Iterator[tuple[int, int]]:
        """Start and end of the lines that may match something that is not ordinary, which no other line does; for callers that
        change lines before matching."""
        if b"\r" in chunk:
            chunk = chunk.replace(b"\r", b"\n")
        at, size = 0, len(chunk)
        while at < size:
            found = self._any.search(chunk, at)
            if found is None:
                return
            start = max(chunk.rfind(b"\n", at, found.start()) + 1, at)
            end = chunk.find(b"\n", found.start())
            end = size if end < 0 else end
            yield start, end
            at = end + 1

    def _tried(self, line: bytes, patterns: Sequence[int]) -> list[Match]:
        """What the patterns find, which are in the order of the catalog; one may be there twice."""
        found: list[Match] = []
        last: Signature | None = None
        for index in patterns:
            pattern = self._patterns[index]
            if pattern.signature is last:
                continue
            for groups in _all_groups(pattern, line):
                last = pattern.signature
                meant = Match(last, groups) if pattern.final else Match(*resolve(last, groups, self._by_id))
                if not found or meant not in found:
                    found.append(meant)
        return found


class _Ordinary:
    """Lines as logs have them when nothing is wrong: they tell which literals are rare."""

    def __init__(self, text: str) -> None:
        self._text = text
        self._folded = text.lower()
        self._lines = text.count("\n")

    def rarest(self, wanted: Needs) -> list[list[_Literal]]:
        """The clauses of a pattern, the one that is rarest first."""
        clauses = [[(string, wanted.folded) for string in clause] for clause in wanted.clauses]
        return sorted(clauses, key=lambda clause: sum(map(self._cost, clause)))[:_CLAUSES]

    def _cost(self, literal: _Literal) -> float:
        """Share of lines that have it: those of the sample, and what chance would give a string of its length."""
        string, folded = literal
        text = self._folded if folded else self._text
        bare = string.replace(BOUNDARY, "")
        count = 0
        at = text.find(bare)
        while at >= 0:
            count += _bounded(text, at, at + len(bare), string)
            at = text.find(bare, at + len(bare))
        return count / self._lines + 0.12 ** length(string)


def _bounded(text: str, start: int, end: int, string: str) -> bool:
    """Whether the word boundaries that a literal has at its ends are there."""
    before, after = text[max(start - 1, 0) : start] or "\n", text[end : end + 1] or "\n"
    return not (
        (string[0] == BOUNDARY and _word(before) == _word(text[start]))
        or (string[-1] == BOUNDARY and _word(after) == _word(text[end - 1]))
    )


def _word(sign: str) -> bool:
    return sign.isascii() and (sign.isalnum() or sign == "_")


def _expression(literal: _Literal) -> bytes:
    string, folded = literal
    text = r"\b".join(re2.escape(piece) for piece in string.split(BOUNDARY))
    return (f"(?i:{text})" if folded else text).encode()


def _in_a_chunk(pattern: str) -> bytes:
    """A pattern for one line, as it finds that line in a text of many."""
    ends = {r"\A": "^", r"\z": "$"}
    text = re.sub(r"\\.", lambda match: ends.get(match[0], match[0]), pattern)
    return f"(?m:{text})".encode()


def _options(**wanted: bool | int) -> re2.Options:
    options = re2.Options()
    options.encoding = re2.Options.Encoding.LATIN1
    options.log_errors = False
    for name, value in wanted.items():
        setattr(options, name, value)
    return options


def _compiled(signature: Signature, text: str) -> _Pattern:
    regexp = re2.compile(text.encode(), _options())
    by_number = {number: name.decode() for name, number in regexp.groupindex.items()}
    names = tuple(by_number.get(n) for n in range(1, regexp.groups + 1))
    return _Pattern(signature, regexp, names, final=not signature.by_code and DECODED.isdisjoint(names))


def _all_groups(pattern: _Pattern, line: bytes) -> list[dict[str, str]]:
    """Named groups of the first match; of all matches when they carry codes."""
    match = pattern.regexp.search(line)
    if match is None:
        return []
    found = [_named(pattern, match)]
    while pattern.signature.by_code and 0 < match.end() < len(line) and len(found) < _SAME_LINE:
        match = pattern.regexp.search(line, match.end())
        if match is None:
            break
        found.append(_named(pattern, match))
    return found


def _named(pattern: _Pattern, match: re2._Match) -> dict[str, str]:
    if not pattern.names:
        return {}
    values = zip(pattern.names, match.groups(), strict=True)
    return {name: value.decode("utf-8", "replace") for name, value in values if name and value is not None}


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
