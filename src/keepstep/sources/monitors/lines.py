"""Events of one document from what monitors wrote into it.

Lines that hold a latched state are claimed: what they quote is old news.
"""

from __future__ import annotations

import re
from collections import Counter
from typing import NamedTuple

from keepstep.catalog.load import Catalog
from keepstep.records.event import Event
from keepstep.sources.documents import Document, Line
from keepstep.sources.monitors.conditions import Change, change_in, latest
from keepstep.sources.monitors.states import State, states_in
from keepstep.sources.monitors.words import part_of
from keepstep.sources.snapshots.making import EVENTS_LIMIT, gpu_named, lines_of, make
from keepstep.sources.timestamps import SECOND_NS, stamp_in

REPLAY_S = 3600.0
"""An event that is handled this long after it happened comes from a backlog."""
LEAST_ATTEMPTS = 3
"""The same repair of the same machine this often, with nothing changed between, is a loop."""

_FAILING = re.compile(
    r"(?i)(?:nodes?|hosts?|machines?) (?:that )?(?:are )?(?:fail(?:ing|ed|s)?|unhealthy|not ok)\s*[:=]?\s*"
    r"(?P<failed>\d{1,6})\s*"
    r"(?:/|of|out of)\s*(?P<total>\d{1,6})"
)
_FAILING_AFTER = re.compile(
    r"(?i)\b(?P<failed>\d{1,6})\s*(?:/|of|out of)\s*(?P<total>\d{1,6})\s+(?:nodes?|hosts?|machines?)\s+"
    r"(?:are\s+)?(?:fail|unhealthy)"
)
_CHECK = re.compile(r"\b(?P<check>check_\w{2,60}|[\w-]{2,40}[_-](?:check|test))\b")
_ORIGIN = re.compile(
    r"(?i)(?:generated_?timestamp|event ?time|event_?timestamp|happened at|occurred at|generated at|created at)"
    r"[\"']?\s*[=:]?\s*[\"']?"
    r"(?P<at>\d{4}-\d\d-\d\d[T ][0-9:.]+(?:Z|[+-]\d\d:?\d\d)?)"
)
_REPAIR = re.compile(
    r"(?i)\b(?P<what>(?:gpu )?reset|reboot|power[- ]cycle|remediat\w+|drain|cordon|restart)\b.{0,120}?"
    r"\battempt[=: #]+(?P<n>\d{1,6})"
)
_CODE = re.compile(r"(?i)\bs?xid\b\W{0,3}(?:error)?\W{0,3}\d|NVRM: Xid")
_MACHINE = re.compile(r"\b(?:node|host)[ /=:]+(?P<node>[a-z0-9][\w.-]*)")
_RATE = re.compile(
    r"(?i)(?P<what>ECC_SBE|ECC_DBE|\bSBE\b|\bDBE\b|correctable|uncorrectable)\w*(?P<between>.{0,80}?)"
    r"\brate[ =:]+(?P<rate>[0-9.]+)\s*/\s*s"
)
_GPU = re.compile(r"(?i)\bgpu[ _=:\"]*(?P<gpu>\d{1,2})\b")


class MonitorReading(NamedTuple):
    """`claimed`: numbers of lines of which no other reader should take anything."""

    events: list[Event]
    claimed: frozenset[int]


def monitor_events(document: Document, catalog: Catalog) -> MonitorReading:
    """What monitors say in a document."""
    events: list[Event] = []
    claimed: set[int] = set()
    changes: list[Change] = []
    attempts: Counter[tuple[str, str]] = Counter()
    check = ""
    for line in lines_of(document):
        if len(events) >= EVENTS_LIMIT:
            break
        states = states_in(line.text)
        for state in states:
            # A code that is named is an event of its own, with an entry that knows what it means.
            if not (state.timed and not state.healthy and _CODE.search(line.text)):
                events.append(_state_event(state, document, line, catalog))
        if states and not any(s.timed and not s.healthy for s in states):
            claimed.add(line.number)
        change = change_in(line)
        if change is not None:
            changes.append(change)
        named = _CHECK.search(line.text)
        check = named["check"] if named is not None else check
        events += _counts(document, line, check, catalog)
        events += _replays(document, line, catalog)
        events += _rates(document, line, catalog)
        events += _loops(document, line, attempts, catalog)
    events += [_condition_event(change, document, catalog) for change in latest(changes)]
    return MonitorReading(events, frozenset(claimed))


def _state_event(state: State, document: Document, line: Line, catalog: Catalog) -> Event:
    if state.healthy:
        signature = "monitor.healthy"
    elif state.timed:
        signature = f"monitor.event_{_suffix(state.part)}"
    else:
        signature = f"monitor.state_{_suffix(state.part)}"
    attrs = {"reason": state.text[:400], "part": state.part, "fatal": state.fatal, "actions": list(state.actions)}
    return make(catalog, signature, document, line, node=state.node, gpu=state.gpu, time_ns=state.time_ns, attrs=attrs)


def _suffix(part: str) -> str:
    return {"remap": "gpu", "gpu": "gpu", "fabric": "fabric"}.get(part, "other")


def _condition_event(change: Change, document: Document, catalog: Catalog) -> Event:
    attrs = {"condition": change.name, "reason": change.reason, "text": change.text[:400]}
    part = part_of(change.reason, change.text, change.name)
    signature = f"condition.{part}" if change.bad else "condition.good"
    return make(catalog, signature, document, change.line, node=change.node, attrs=attrs)


def _counts(document: Document, line: Line, check: str, catalog: Catalog) -> list[Event]:
    """How many nodes fail a check, where the text counts them."""
    match = _FAILING.search(line.text) or _FAILING_AFTER.search(line.text)
    if match is None:
        return []
    attrs = {"nodes_failed": int(match["failed"]), "nodes_total": int(match["total"]), "check": check}
    return [make(catalog, "check.count", document, line, attrs=attrs)]


def _replays(document: Document, line: Line, catalog: Catalog) -> list[Event]:
    """A line that tells of something that happened long before the line was written."""
    match = _ORIGIN.search(line.text) if line.time_ns is not None else None
    stamp = stamp_in(match["at"]) if match is not None else None
    if stamp is None or stamp.kind not in ("utc", "local") or line.time_ns is None:
        return []
    if line.time_ns - stamp.ns < REPLAY_S * SECOND_NS:
        return []
    late_h = (line.time_ns - stamp.ns) / SECOND_NS / 3600
    return [make(catalog, "monitor.replayed", document, line, attrs={"late_h": round(late_h, 1)})]


def _rates(document: Document, line: Line, catalog: Catalog) -> list[Event]:
    """Rates of memory errors that a text states. One of zero says nothing of an idle GPU."""
    found = []
    for match in _RATE.finditer(line.text):
        try:
            rate = float(match["rate"])
        except ValueError:
            continue
        gpu = _GPU.search(match["between"]) or _GPU.search(line.text)
        if rate > 0:
            named = None if gpu is None else int(gpu["gpu"])
            attrs = {"rate_per_s": rate, "counter": match["what"]}
            found.append(make(catalog, "monitor.ecc_rate", document, line, gpu=gpu_named(index=named), attrs=attrs))
    return found


def _loops(document: Document, line: Line, attempts: Counter[tuple[str, str]], catalog: Catalog) -> list[Event]:
    """A repair that is tried again and again."""
    match = _REPAIR.search(line.text)
    if match is None:
        return []
    node = _MACHINE.search(line.text)
    key = (match["what"].lower(), "" if node is None else node["node"])
    attempts[key] = max(attempts[key] + 1, min(int(match["n"]), 1000))
    if attempts[key] != LEAST_ATTEMPTS:
        return []
    attrs = {"what": key[0], "attempts": attempts[key]}
    return [make(catalog, "monitor.action_loop", document, line, node=key[1] or None, attrs=attrs)]
