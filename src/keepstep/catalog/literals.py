"""Fixed text that every match of a pattern contains: what a log is searched for before any pattern is tried.

A pattern of RE2 syntax is read far enough to know its literal parts; what is not understood counts as "anything", which only makes
the answer weaker, never wrong. (The way is that of trigram indexes: possible beginnings, endings and inner parts, joined.)
"""

from __future__ import annotations

import re
from typing import NamedTuple

LIMIT = 24
"""Characters of a literal that are searched for; longer ones are cut to their end, to keep the automaton small."""
SHORTEST = 4
"""Characters that a useful literal has at least."""
_MANY = 24
"""Most strings that a set may have; where joining gives more, the parts are not joined."""
_FOLDED = re.compile(r"\(\?[a-zA-Z]*i")
_QUANTIFIER = re.compile(r"(?:[*+?]|\{(?P<low>\d+)(?:,\d*)?\})\??")
_GROUP = re.compile(r"\((?:\?P?<\w+>|\?[a-zA-Z]*(?:-[a-zA-Z]+)?:)?")
_FLAGS = re.compile(r"\(\?[a-zA-Z]*(?:-[a-zA-Z]+)?\)")
_PROPERTY = re.compile(r"\\[pP](?:\{[^}]*\}|.)|\\x(?:\{[^}]*\}|..)")
_ESCAPED = {"n": "\n", "t": "\t", "r": "\r", "f": "\f", "v": "\v", "a": "\a"}

Strings = frozenset[str]
_EMPTY: Strings = frozenset({""})


class Literals(NamedTuple):
    """Every match contains one of `strings`; with `folded` in either case of its ASCII letters. They are lower case then."""

    strings: Strings
    folded: bool


class _Part(NamedTuple):
    """What a part of a pattern can match: begins with one of `first`, ends with one of `last`, contains one of `inner` (None:
    nothing is known). `exact`: `first` is all there is."""

    first: Strings
    last: Strings
    inner: Strings | None
    exact: bool


_ANYTHING = _Part(_EMPTY, _EMPTY, None, False)
_NOTHING = _Part(_EMPTY, _EMPTY, None, True)


def required(pattern: str) -> Literals | None:
    """The literals of a pattern, None when it has none of at least SHORTEST characters."""
    folded = bool(_FOLDED.search(pattern))
    part, end = _alternation(pattern, 0)
    strings = _best(part)
    if end < len(pattern) or strings is None:
        return None
    strings = frozenset(s[-LIMIT:] for s in strings)
    if folded:
        strings = frozenset(s.lower() for s in strings)
    # Folding of other letters than ASCII depends on the encoding that is searched.
    usable = all(len(s) >= SHORTEST and (s.isascii() or not folded) for s in strings)
    return Literals(strings, folded) if usable else None


def _exactly(strings: Strings) -> _Part:
    return _Part(strings, strings, None, True)


def _score(strings: Strings) -> float:
    """How much a set of literals filters: by its shortest member, less when there are many."""
    return min(len(s) for s in strings) - len(strings) / 8


def _best(part: _Part, *others: Strings) -> Strings | None:
    """The set that filters best."""
    known = [s for s in (part.inner, part.first, part.last, *others) if s and "" not in s]
    return max(known, key=_score, default=None)


def _product(a: Strings, b: Strings) -> Strings | None:
    return frozenset(x + y for x in a for y in b) if len(a) * len(b) <= _MANY else None


def _joined(a: _Part, b: _Part) -> _Part:
    """`a` followed by `b`."""
    middle = _product(a.last, b.first)
    if a.exact and b.exact and middle is not None:
        return _exactly(middle)
    first = middle if a.exact and middle is not None else a.first
    last = middle if b.exact and middle is not None else b.last
    inner = _best(_Part(a.first, b.last, None, False), *(s for s in (a.inner, b.inner, a.last, b.first, middle) if s))
    return _Part(first, last, inner, False)


def _either(parts: list[_Part]) -> _Part:
    """One of `parts`."""
    first = frozenset[str]().union(*(p.first for p in parts))
    last = frozenset[str]().union(*(p.last for p in parts))
    each = [_best(p) for p in parts]
    inner = frozenset[str]().union(*(s for s in each if s)) if all(each) else None
    small = len(first) <= _MANY and len(last) <= _MANY
    if all(p.exact for p in parts) and small:
        return _exactly(first)
    return _Part(first if small else _EMPTY, last if small else _EMPTY, inner, False)


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
    return _Part(item.first, item.last, _best(item), False), match.end()


def _item(pattern: str, at: int) -> tuple[_Part, int]:
    """One character, class, escape or group."""
    sign = pattern[at]
    if sign == "(":
        return _group(pattern, at)
    if sign == "[":
        return _bracket(pattern, at)
    if sign == "\\":
        return _escape(pattern, at)
    if sign == ".":
        return _ANYTHING, at + 1
    return _NOTHING if sign in "^$" else _exactly(frozenset({sign})), at + 1


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
    plain = inside.isascii() and inside.isalnum() and len(inside) <= 6
    return (_exactly(frozenset(inside)) if plain else _ANYTHING), at + 1


def _escape(pattern: str, at: int) -> tuple[_Part, int]:
    sign = pattern[at + 1 : at + 2] or "\\"
    if sign in "bBAz":
        return _NOTHING, at + 2
    if sign in _ESCAPED:
        return _exactly(frozenset({_ESCAPED[sign]})), at + 2
    if sign == "Q":
        end = pattern.find("\\E", at)
        text = pattern[at + 2 : end if end >= 0 else len(pattern)]
        return _exactly(frozenset({text})), len(pattern) if end < 0 else end + 2
    if sign in "pPx":
        match = _PROPERTY.match(pattern, at)
        return _ANYTHING, at + 2 if match is None else match.end()
    return (_ANYTHING if sign.isalnum() else _exactly(frozenset({sign}))), at + 2
