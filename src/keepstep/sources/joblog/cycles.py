"""Summaries of a job's lives, one line a cycle in key=value form, and listings of flight-recorder dumps.

A cycle line names a cycle, attempt or restart and what came of it: `cycle=2 start t+5s free 70/184 GiB -> RuntimeError: ...`.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from datetime import date
from typing import Any

import msgspec

from keepstep.catalog.load import Catalog
from keepstep.records.event import Event
from keepstep.sources.documents import Document
from keepstep.sources.joblog.making import event_at

MAX_CYCLES = 10_000
MAX_RANKS = 1_000_000

CYCLE_TRIGGERS = ("cycle", "attempt", "restart", "Cycle", "Attempt", "Restart")
DUMP_TRIGGERS = ("_rank_", "trace_", "rank")

_CYCLE = re.compile(r"(?i)(?:^|[\s\[(])(?:cycle|attempt|restart(?:_count)?)[ =:#]+(?P<cycle>\d{1,6})\b(?P<rest>.*)$")
_QUICK = re.compile("[Cc]ycle|[Aa]ttempt|[Rr]estart|CYCLE|ATTEMPT")
_PAIR = re.compile(r"(?<![\w.])(?P<key>[A-Za-z_][\w.]{0,40})=(?P<value>\"[^\"]{0,200}\"|[^\s,;]{1,200})")
_SIGNAL = re.compile(r"\b(?P<signal>SIG(?:KILL|TERM|SEGV|ABRT|BUS|INT|HUP|USR[12]))\b")
_OUTCOME = re.compile(r"(?P<type>(?:[a-z_]\w*\.)*[A-Z]\w*(?:Error|Exception))\b(?:: (?P<message>.*))?$")
_STEP = re.compile(r"(?i)\b(?:step|iter(?:ation)?)s?[ =:]+(?P<step>\d{1,12})\b")
_DUMP = re.compile(
    r"(?:nccl_trace_rank_|comm_lib_trace_rank_|(?:^|[/\s])(?:fr_)?(?:trace|dump)_(?:rank_?)?)(?P<rank>\d{1,7})(?:\.\w+)?(?=\s|$)"
)
_MONTHS = ("Jan", "Feb", "Mar", "Apr", "May", "Jun", "Jul", "Aug", "Sep", "Oct", "Nov", "Dec")
_LISTED_DAY = re.compile(
    rf"\b(?:20\d\d-(?P<month>\d\d)-(?P<day>\d\d)|(?P<name>{'|'.join(_MONTHS)}) +(?P<of_month>\d{{1,2}})) +(?:\d\d:\d\d|20\d\d)"
)
_LISTED = re.compile(r"^(?:ls|find|tree|du)\b|(?i:dump|trace)")


def read_cycles(document: Document, catalog: Catalog) -> Iterator[Event]:
    """An event for each line that says how a cycle began or ended."""
    count = 0
    for line in document.lines:
        text = line.text
        match = _CYCLE.search(text[:2000]) if _QUICK.search(text) is not None else None
        if match is None:
            continue
        pairs = {m["key"].lower(): m["value"].strip('"') for m in _PAIR.finditer(text[:2000])}
        outcome = _OUTCOME.search(match["rest"])
        signal = _SIGNAL.search(match["rest"])
        step = _STEP.search(match["rest"])
        if outcome is None and signal is None and step is None and len(pairs) < 2:
            continue
        attrs: dict[str, Any] = {k: v for k, v in pairs.items() if k not in ("cycle", "rank")}
        attrs |= {
            "cycle": int(match["cycle"]),
            "type": None if outcome is None else outcome["type"],
            "message": None if outcome is None else outcome["message"] or "",
            "signal": None if signal is None else signal["signal"],
            "step": None if step is None else int(step["step"]),
        }
        event = event_at("launcher.cycle", line, document, catalog, attrs)
        yield msgspec.structs.replace(event, cycle=int(match["cycle"]))
        count += 1
        if count >= MAX_CYCLES:
            return


def read_dump_listing(document: Document, catalog: Catalog) -> Iterator[Event]:
    """One event for a listing of flight-recorder dumps: of which ranks there are any."""
    if not _LISTED.search(document.title) and not any("trace_rank_" in line.text for line in document.lines[:200]):
        return
    ranks: set[int] = set()
    days: list[int] = []
    first = None
    for line in document.lines:
        if "rank" not in line.text and "trace" not in line.text and "dump" not in line.text:
            continue
        found = [int(m["rank"]) for m in _DUMP.finditer(line.text[:100_000])]
        if found and first is None:
            first = line
        ranks.update(found)
        day = _day_of_year(line.text) if found else None
        if day is not None:
            days.append(day)
        if len(ranks) > MAX_RANKS:
            break
    if first is None or not ranks or not _is_listing(document):
        return
    highest = max(ranks)
    missing = [r for r in range(min(highest, 100_000) + 1) if r not in ranks]
    # Files are of different years only around New Year; then nothing is said of their age.
    newest = max(days) if days and max(days) - min(days) < 180 else None
    attrs = {"ranks": sorted(ranks)[:5000], "missing": missing[:5000], "newest_day": newest}
    yield event_at("evidence.dumps_listed", first, document, catalog, attrs)


def _day_of_year(text: str) -> int | None:
    """The day of a listed file: `Feb 11 04:00`, `2031-02-11 04:00`. Without a year, so that the forms are alike."""
    match = _LISTED_DAY.search(text[:300])
    if match is None:
        return None
    month = int(match["month"]) if match["month"] else _MONTHS.index(match["name"]) + 1
    day = int(match["day"] or match["of_month"])
    try:
        return date(2000, month, day).timetuple().tm_yday
    except ValueError:
        return None


def _is_listing(document: Document) -> bool:
    """Whether most lines are names of files: a log that mentions where it wrote a dump is no listing."""
    texts = [line.text for line in document.lines if line.text.strip()]
    named = sum(1 for text in texts if _DUMP.search(text))
    return 2 * named >= len(texts)
