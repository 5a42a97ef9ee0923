"""A check that measured too little, and the same check again: what the later passes measured, beside its limit."""

from __future__ import annotations

import re
from collections.abc import Iterator

from keepstep.catalog.load import Catalog
from keepstep.records.event import Event
from keepstep.sources.documents import Document, Line
from keepstep.sources.joblog.making import event_at

TRIGGERS = ("/s", "FLOPS", "FLOP/s")
LINE_LIMIT = 1000
MOST_LINES = 5000
"""A report of checks is short."""

_UNIT = r"(?:[KMGT]i?[Bb](?:it|ps)?/s|[KMGT]bps|[GTP]FLOPS?(?:/s)?)"
_CLAIM = re.compile(
    rf"(?<![\w.])(?P<value>\d{{1,7}}(?:\.\d{{1,4}})?) ?{_UNIT}?(?:\s{{0,2}}<=?\s{{0,2}}|[ ,;(]{{1,3}}(?i:is )?(?i:below|under|less than|lower than|"
    rf"expected|expects|needs?|required?|limit|threshold|minimum|min)\b[ =:]{{0,3}})(?i:(?:is |of |at least |the |its |limit|minimum|threshold|"
    rf"expected|required|>=|value |= ?){{0,4}})\s{{0,2}}(?P<limit>\d{{1,7}}(?:\.\d{{1,4}})?) ?{_UNIT}"
)
_BAD = re.compile(r"(?i)\b(?:error|fail\w*|warn\w*|alert|\w*check\w*|low|slow|drain\w*|taint\w*|held)\b")
_AGAIN = re.compile(
    r"(?i)\b(?:same (?:check|test|probe)|re-?runs?|re-?ran|re-?test\w*|repeat(?:ed|s)?|again|retr(?:y|ies)|second (?:pass|run)|pass(?:es)? 2)\b"
)
_PASSED = re.compile(r"(?i)\b(?:pass(?:ed)?|ok)\b")
_FAILED = re.compile(r"(?i)\bfail(?:s|ed|ure)?\b")
_DECIMAL = re.compile(r"(?<![\w.])\d{1,7}\.\d{1,4}(?![\w.])|(?<![\w.])\d{1,7}(?= ?" + _UNIT + r")")
_ROW = re.compile(
    r"^\s{0,8}(?:(?:run|pass|iter\w*|#)?[ =:]{0,2}\d{1,4}[:.)]?\s{1,8})?[\d./,\s]{3,200}(?:"
    + _UNIT
    + r"[\d./,\s]{0,40}){0,4}$"
)
_INDEX = re.compile(r"^\s{0,8}(?:run|pass|iter\w*|#)?[ =:]{0,2}\d{1,4}[:.)]?\s{1,8}")


def read_repeats(document: Document, catalog: Catalog) -> Iterator[Event]:
    """One event where a claim was followed by passes of the same check: how many, the least of them, how many failed."""
    limit = value = 0.0
    first: Line | None = None
    lows: list[float] = []
    passed = failed = 0
    rows = False
    for line in document.lines[:MOST_LINES]:
        text = line.text[:LINE_LIMIT]
        claim = _CLAIM.search(text) if _BAD.search(text) is not None else None
        if claim is not None and float(claim["value"]) >= float(claim["limit"]):
            claim = None
        again = _AGAIN.search(text) is not None
        if claim is not None:
            # The same words again after the repeats: it did fail again.
            failed += first is not None and (again or bool(lows) or passed > 0)
            limit, value = max(limit, float(claim["limit"])), float(claim["value"])
            first = first or line
            rows = False
            continue
        if first is None:
            continue
        if again:
            measured = _numbers(text[_end(text) :])
            lows += measured
            passed += not measured and _PASSED.search(text) is not None and _FAILED.search(text) is None
            failed += _FAILED.search(text) is not None and _PASSED.search(text) is None
            rows = not measured
        elif rows and _ROW.match(text):
            row = _numbers(_INDEX.sub("", text))
            lows += [min(row)] if row else []
        else:
            rows = False
    if first is not None and (lows or passed):
        attrs: dict[str, object] = {"value": value, "limit": limit, "runs": len(lows) + passed, "failed": failed}
        attrs |= {"low": min(lows), "high": max(lows)} if lows else {}
        yield event_at("check.repeated", first, document, catalog, attrs)


def _end(text: str) -> int:
    """Where the measured values of a line with a repeat begin: behind its last colon, or the word itself."""
    colon = text.rfind(": ")
    again = _AGAIN.search(text)
    return max(colon, 0 if again is None else again.end())


def _numbers(text: str) -> list[float]:
    return [float(m) for m in _DECIMAL.findall(text)[:64]]
