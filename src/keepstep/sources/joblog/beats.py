"""Heartbeats that a monitor of ranks calls late, with the phase that the rank is in and the limit of that phase.

As JSON, one finding a line, or in words: "rank 8 heartbeat is 75 s old (phase: checkpoint, checkpoint timeout 1800 s)".
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from typing import Any

from keepstep.catalog.load import Catalog
from keepstep.records.event import Event
from keepstep.sources.documents import Document, Line
from keepstep.sources.joblog.making import event_at

TRIGGERS = ("heartbeat", "Heartbeat")
LINE_LIMIT = 4000
MAX_RANKS = 20_000

_LATE = re.compile(r"(?i)timeout|timed.?out|stale|late|missed|overdue|expired|lost")
_AGE = re.compile(r"(?i)^(?:.*_)?(?:age|stale|silent|since|elapsed|idle|overdue)(?:_|$)")
_LIMIT = re.compile(r"(?i)timeout|limit|deadline|budget")
_PROSE = re.compile(
    r"(?i)\brank[ =_]?(?P<rank>\d{1,7})\b[^\n]{0,60}?\bheartbeat\b[^\n]{0,40}?"
    r"(?P<age>\d{1,7}(?:\.\d{1,3})?) ?s(?:ec\w*)? (?:old|ago|late|overdue)\b"
)
_PHASE = re.compile(r"(?i)\b(?:phase|section|stage)[ =:\"]{1,4}(?P<phase>[a-z_]{3,40})")
_OF_PHASE = re.compile(
    r"(?i)\b(?P<phase>[a-z_]{3,40}?)[ _](?:timeout|limit|deadline|budget)[ =:\"]{1,4}(?P<limit>\d{1,7}(?:\.\d{1,3})?) ?s?\b"
)
MOST_S = 1e9
STEM = 4
"""Letters that two forms of one word share: checkpoint, checkpointing; eval, evaluation."""


def read_beats(document: Document, catalog: Catalog) -> Iterator[Event]:
    """The last word on each rank whose heartbeat is called late."""
    last: dict[object, tuple[Line, dict[str, Any]]] = {}
    for line in document.lines:
        text = line.text[:LINE_LIMIT]
        if "eartbeat" not in text:
            continue
        raw = line.raw[:LINE_LIMIT].strip()
        attrs = _from_json(raw) if raw.startswith("{") else _from_words(text)
        if attrs is not None and (attrs["rank"] in last or len(last) < MAX_RANKS):
            last[attrs["rank"]] = (line, attrs)
    for line, attrs in last.values():
        yield event_at("monitor.beat_late", line, document, catalog, attrs)


def _from_words(text: str) -> dict[str, Any] | None:
    match = _PROSE.search(text)
    if match is None:
        return None
    phase = _PHASE.search(text)
    limits = {m["phase"].lower(): float(m["limit"]) for m in _OF_PHASE.finditer(text)}
    named = "" if phase is None else phase["phase"].lower()
    return {
        "rank": int(match["rank"]),
        "age": float(match["age"]),
        "phase": named,
        "phase_limit": _limit(named, limits),
    }


def _from_json(raw: str) -> dict[str, Any] | None:
    try:
        record = json.loads(raw)
    except (ValueError, RecursionError):
        return None
    if not isinstance(record, dict):
        return None
    words = [v for v in record.values() if isinstance(v, str)]
    if not any("heartbeat" in w.lower() and _LATE.search(w) for w in words):
        return None
    numbers = {k.lower(): float(v) for k, v in record.items() if _is_seconds(v)}
    ages = [v for k, v in numbers.items() if _AGE.search(k) and not _LIMIT.search(k)]
    phase = next((str(record[k]).lower() for k in ("phase", "section", "stage") if isinstance(record.get(k), str)), "")
    rank = record.get("rank")
    return {
        "rank": rank if isinstance(rank, int) and not isinstance(rank, bool) and 0 <= rank < 10**7 else None,
        "age": ages[0] if ages else None,
        "phase": phase[:40],
        "phase_limit": _limit(phase, {k: v for k, v in numbers.items() if _LIMIT.search(k)}),
    }


def _is_seconds(value: object) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool) and 0 <= value < MOST_S


def _limit(phase: str, limits: dict[str, float]) -> float | None:
    """The limit whose name begins like the phase."""
    if len(phase) < STEM:
        return None
    return next((v for k, v in limits.items() if k.startswith(phase[:STEM])), None)
