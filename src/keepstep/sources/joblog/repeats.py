"""A check that measured too little, and the same check again: what the later passes measured, beside its limit."""

from __future__ import annotations

import re
from collections.abc import Iterator
from typing import Any

from keepstep.catalog.load import Catalog
from keepstep.records.event import Event
from keepstep.sources.documents import Document, Line
from keepstep.sources.joblog.making import event_at

TRIGGERS = ("/s", "FLOPS", "FLOP/s")
LINE_LIMIT = 1000
MOST_LINES = 5000
"""A report of checks is short."""

_UNIT = r"(?:[KMGT]i?[Bb](?:it|ps)?/s|[KMGT]bps|[GTP]FLOPS?(?:/s)?)"
_LESS = (
    r"(?:\s{0,2}<=?\s{0,2}|[ ,;(]{1,3}(?:is )?(?:below|under|less than|lower than|expected|expects|needs?|required?|limit|"
    r"threshold|minimum|min)\b[ =:]{0,3})"
)
_WORDS = r"(?:(?:is |of |at least |the |its |limit|minimum|threshold|expected|required|>=|value |= ?){0,4})"
_CLAIM = re.compile(
    rf"(?<![\w.])(?P<value>\d{{1,7}}(?:\.\d{{1,4}})?) ?{_UNIT}?(?i:{_LESS}{_WORDS})\s{{0,2}}"
    rf"(?P<limit>\d{{1,7}}(?:\.\d{{1,4}})?) ?{_UNIT}"
)
_BAD = re.compile(r"(?i)\b(?:error|fail\w*|warn\w*|alert|\w*check\w*|low|slow|drain\w*|taint\w*|held)\b")
_AGAIN = re.compile(
    r"(?i)\b(?:same (?:check|test|probe)|re-?runs?|re-?ran|re-?test\w*|repeat(?:ed|s)?|again|retr(?:y|ies)|"
    r"second (?:pass|run)|pass(?:es)? 2)\b"
)
_ELSEWHERE = re.compile(
    r"(?i)\b(?:neighbou?r\w*|others?|another|peers?|elsewhere|swapped|reference|spare|"
    r"after (?:a |the )?(?:reset|reboot|repair|replace\w*|swap\w*|restart))\b"
)
"""On another machine, or on one that is no more what it was."""
_NAMED = re.compile(r"(?i)\bGPU[ #:=]{0,2}\d{1,3}\b|\b[a-z][a-z0-9]{0,30}-[a-z0-9-]{0,40}\d\b")
_PASSED = re.compile(r"(?i)\b(?:pass(?:ed)?|ok)\b")
_FAILED = re.compile(r"(?i)\bfail(?:s|ed|ure)?\b")
_DECIMAL = re.compile(r"(?<![\w.])\d{1,7}\.\d{1,4}(?![\w.])|(?<![\w.])\d{1,7}(?= ?" + _UNIT + r")")
_INDEX = re.compile(r"^\s{0,8}(?:run|pass|iter\w*|#)?[ =:]{0,2}\d{1,4}[:.)]?\s{1,8}")
_ROW = re.compile(r"^[\d./,\s]{3,200}(?:" + _UNIT + r"[\d./,\s]{0,40}){0,4}$")


class _Passes:
    """What is known of one check so far."""

    def __init__(self) -> None:
        self.first: Line | None = None
        self.value = self.limit = 0.0
        self.named: set[str] = set()
        self.measured: list[float] = []
        self.passed = self.failed = 0
        self._rows = False

    def claim(self, line: Line, match: re.Match[str], text: str) -> None:
        """A complaint. Once more after it was done again: it did fail again."""
        self.failed += self.first is not None and (_AGAIN.search(text) is not None or self.runs > 0)
        self.limit, self.value = max(self.limit, float(match["limit"])), float(match["value"])
        self.named |= {n.lower() for n in _NAMED.findall(text)}
        self.first = self.first or line
        self._rows = False

    def again(self, text: str, at: int) -> None:
        """A line that says that the check was done again, with what it measured behind its last colon, or in lines below."""
        same = _ELSEWHERE.search(text) is None and {n.lower() for n in _NAMED.findall(text)} <= self.named
        values = _numbers(text[max(text.rfind(": "), at) :])
        self._rows = same and not values
        if not same:
            return
        self.measured += values
        failed, passed = _FAILED.search(text) is not None, _PASSED.search(text) is not None
        self.passed += passed and not failed and not values
        self.failed += failed and not passed

    def row(self, text: str) -> None:
        """A line of numbers below one that says so: each row is a pass, its first number counts them."""
        rest = _INDEX.sub("", text)
        self._rows = self._rows and _ROW.match(rest) is not None
        values = _numbers(rest) if self._rows else []
        self.measured += [min(values)] if values else []

    @property
    def runs(self) -> int:
        return len(self.measured) + self.passed


def read_repeats(document: Document, catalog: Catalog) -> Iterator[Event]:
    """One event where a claim was followed by passes of the same check: how many, the least of them, how many failed."""
    seen = _Passes()
    for line in document.lines[:MOST_LINES]:
        text = line.text[:LINE_LIMIT]
        claim = _CLAIM.search(text) if _BAD.search(text) is not None else None
        again = _AGAIN.search(text) if seen.first is not None else None
        if claim is not None and float(claim["value"]) < float(claim["limit"]):
            seen.claim(line, claim, text)
        elif again is not None:
            seen.again(text, again.end())
        elif seen.first is not None:
            seen.row(text)
    if seen.first is not None and seen.runs:
        attrs: dict[str, Any] = {
            "value": seen.value, "limit": seen.limit, "runs": seen.runs, "failed": seen.failed,
            "low": min(seen.measured, default=None), "high": max(seen.measured, default=None),
        }  # fmt: skip
        yield event_at("check.repeated", seen.first, document, catalog, attrs)


def _numbers(text: str) -> list[float]:
    return [float(m) for m in _DECIMAL.findall(text)[:64]]
