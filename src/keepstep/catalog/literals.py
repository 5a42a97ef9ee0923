"""Fixed text that every match of a pattern contains: what a log is searched for before any pattern is tried.

A pattern of RE2 syntax is read far enough to know its literal parts; what is not understood counts as "anything", which only makes
the answer weaker, never wrong. (The way is that of trigram indexes: possible beginnings, endings and inner parts, joined.)
"""

from __future__ import annotations

import re
from collections.abc import Iterable
from typing import NamedTuple

LIMIT = 24
"""Characters of a literal that are searched for; longer ones are cut to their end, to keep the automaton small."""
SHORTEST = 3
"""Characters that a useful literal has at least."""
BOUNDARY = "\0"
"""Stands for a word boundary (\\b) in a literal."""
_MANY = 32
"""Most strings that a set may have; where joining gives more, the parts are not joined."""
_FOLDED = re.compile(r"\(\?[a-zA-Z]*i")
_QUANTIFIER = re.compile(r"(?:[*+?]|\{(?P<low>\d+)(?:,\d*)?\})\??")
_GROUP = re.compile(r"\((?:\?P?<\w+>|\?[a-zA-Z]*(?:-[a-zA-Z]+)?:)?")
_RUN = re.compile(r"[^\\()\[\]{}|.^$*+?]+")
_FLAGS = re.compile(r"\(\?[a-zA-Z]*(?:-[a-zA-Z]+)?\)")
_PROPERTY = re.compile(r"\\[pP](?:\{[^}]*\}|.)|\\x(?:\{[^}]*\}|..)")
_ESCAPED = {"n": "\n", "t": "\t", "r": "\r", "f": "\f", "v": "\v", "a": "\a"}

Strings = frozenset[str]
_EMPTY: Strings = frozenset({""})


class Needs(NamedTuple):
    """Every match contains at least one string of each of `clauses`; none: nothing is known.

    With `folded` the strings are lower case and stand for either case of their ASCII letters.
    """

    clauses: tuple[Strings, ...]
    folded: bool


class _Part(NamedTuple):
    """What a part of a pattern can match: begins with one of `first`, ends with one of `last`, and has inside, of each of `inner`,
    one. `exact`: `first` is all there is."""

    first: Strings
    last: Strings
    inner: tuple[Strings, ...] = ()
    exact: bool = False


_ANYTHING = _Part(_EMPTY, _EMPTY)
_NOTHING = _Part(_EMPTY, _EMPTY, exact=True)


def needs(pattern: str) -> Needs:
    """What every match of a pattern contains."""
    folded = bool(_FOLDED.search(pattern))
    part, end = _alternation(pattern, 0)
    if end < len(pattern):
        return Needs((), folded)
    clauses = (frozenset(_cut(s.lower() if folded else s) for s in strings) for strings in _all(part))
    return Needs(tuple(dict.fromkeys(c for c in clauses if all(_usable(s, folded) for s in c))), folded)


def length(string: str) -> int:
    """Characters of a literal without its word boundaries."""
    return len(string) - string.count(BOUNDARY)


def _cut(string: str) -> str:
    return string if length(string) <= LIMIT else string[-LIMIT:]


def _usable(string: str, folded: bool) -> bool:
    """Folding of other letters than ASCII depends on the encoding that is searched."""
    return length(string) >= SHORTEST and (string.isascii() or not folded)


def _all(part: _Part) -> Iterable[Strings]:
    """All that a finished part is known to contain."""
    return (part.first,) if part.exact else (part.first, part.last, *part.inner)


def _best(part: _Part) -> Strings | None:
    """The set that filters best: by its shortest member, less when there are many."""
    known = [s for s in _all(part) if s and all(length(x) >= SHORTEST for x in s)]
    return max(known, key=lambda s: min(length(x) for x in s) - len(s) / 8, default=None)


def _exactly(strings: Iterable[str]) -> _Part:
    known = frozenset(strings)
    return _Part(known, known, exact=True)


def _product(a: Strings, b: Strings) -> Strings | None:
    return frozenset(x + y for x in a for y in b) if len(a) * len(b) <= _MANY else None


def _joined(a: _Part, b: _Part) -> _Part:
    """`a` followed by `b`."""
    middle = _product(a.last, b.first)
    if a.exact and b.exact:
        return _exactly(middle) if middle is not None else _Part(a.first, b.last)
    first = middle if a.exact and middle is not None else a.first
    last = middle if b.exact and middle is not None else b.last
    # What lies between two parts that are both open ends here; else it may still grow.
    ended: tuple[Strings, ...] = ()
    if middle is None:
        ended = (() if a.exact else (a.last,)) + (() if b.exact else (b.first,))
    elif not a.exact and not b.exact:
        ended = (middle,)
    return _Part(first, last, (*a.inner, *b.inner, *ended))


def _either(parts: list[_Part]) -> _Part:
    """One of `parts`."""
    first = frozenset[str]().union(*(p.first for p in parts))
    last = frozenset[str]().union(*(p.last for p in parts))
    small = len(first) <= _MANY and len(last) <= _MANY
    if small and all(p.exact for p in parts):
        return _exactly(first)
    each = [_best(p) for p in parts]
    inner = (frozenset[str]().union(*(s for s in each if s)),) if all(each) else ()
    return _Part(first if small else _EMPTY, last if small else _EMPTY, inner)


def _alternation(pattern: str, at: int) -> tuple[_Part, int]:
    """Branches up to the end or to the parenthesis that closes them; the position of that."""
    branches = []
    while True:
        part, at = _sequence(pattern, at)
        branches.append(part)
        if at >= len(pattern) or pattern[at] != "|":
            return (branches[0] if len(branches) == 1 else _either(branches)), at
        at += 1


def _sequence(pattern: str, at: int) -> tuple[_Part, int]:
    """Items up to "|", ")" or the end."""
    whole = _NOTHING
    while at < len(pattern) and pattern[at] not in "|)":
        item, at = _item(pattern, at)
        item, at = _quantified(item, pattern, at)
        whole = _joined(whole, item)
    return whole, at


def _quantified(item: _Part, pattern: str, at: int) -> tuple[_Part, int]:
    match = _QUANTIFIER.match(pattern, at)
    if match is None:
        return item, at
    if match[0][0] == "?":
        return (_exactly(item.first | _EMPTY) if item.exact else _ANYTHING), match.end()
    if match[0][0] == "*" or (match["low"] is not None and int(match["low"]) == 0):
        return _ANYTHING, match.end()
    return item._replace(exact=False), match.end()


def _item(pattern: str, at: int) -> tuple[_Part, int]:
    """A run of plain characters, a class, escape or group."""
    run = _RUN.match(pattern, at)
    if run is not None:
        # A quantifier belongs to the last character alone.
        end = run.end() - (len(run[0]) > 1 and pattern[run.end() : run.end() + 1] in tuple("*+?{"))
        return _exactly({pattern[at:end]}), end
    sign = pattern[at]
    if sign == "(":
        return _group(pattern, at)
    if sign == "[":
        return _bracket(pattern, at)
    if sign == "\\":
        return _escape(pattern, at)
    if sign == ".":
        return _ANYTHING, at + 1
    return _NOTHING if sign in "^$" else _exactly(sign), at + 1


def _group(pattern: str, at: int) -> tuple[_Part, int]:
    flags = _FLAGS.match(pattern, at)
    if flags is not None:
        return _NOTHING, flags.end()
    opening = _GROUP.match(pattern, at)
    part, at = _alternation(pattern, at + 1 if opening is None else opening.end())
    return part, min(at + 1, len(pattern))


def _bracket(pattern: str, at: int) -> tuple[_Part, int]:
    """A class. One of a few plain characters is known exactly."""
    start = at + 1
    at = start + (pattern[start : start + 1] == "^")
    at += pattern[at : at + 1] == "]"
    while at < len(pattern) and pattern[at] != "]":
        if pattern.startswith("[:", at):
            at = max(pattern.find(":]", at), at) + 1
        at += 2 if pattern[at : at + 1] == "\\" else 1
    inside = pattern[start:at]
    plain = inside.isascii() and inside.replace("_", "a").replace(" ", "a").isalnum() and len(inside) <= 6
    return (_exactly(inside) if plain else _ANYTHING), at + 1


def _escape(pattern: str, at: int) -> tuple[_Part, int]:
    sign = pattern[at + 1 : at + 2] or "\\"
    if sign in "BAz":
        return _NOTHING, at + 2
    if sign == "b":
        return _exactly(BOUNDARY), at + 2
    if sign in _ESCAPED:
        return _exactly(_ESCAPED[sign]), at + 2
    if sign == "Q":
        end = pattern.find("\\E", at)
        text = pattern[at + 2 : end if end >= 0 else len(pattern)]
        return _exactly({text}), len(pattern) if end < 0 else end + 2
    if sign in "pPx":
        match = _PROPERTY.match(pattern, at)
        return _ANYTHING, at + 2 if match is None else match.end()
    return (_ANYTHING if sign.isalnum() else _exactly(sign)), at + 2
