"""Conditions of nodes as monitors log them over time: "GpuHealthy=False reason=RowRemapPending".

The last word counts, but for one: a monitor that has just started says that all is well before it has looked.
"""

from __future__ import annotations

import re
from collections.abc import Iterable
from typing import NamedTuple

from keepstep.sources.documents import Line

_CONDITION = re.compile(
    r"(?:^|[\s\"'`])(?P<name>[A-Z][A-Za-z]{3,60})(?:[=:] ?\"?|\s+(?=\w+ reason=))(?P<status>True|False|Unknown)\b(?P<rest>.{0,600})"
)
_COLUMNS = re.compile(
    r"^\s*(?:\[?[\dT:.Z+-]{5,35}\]?\s+)(?:(?P<name>[A-Z][A-Za-z]{3,60})\s+)?(?P<status>True|False)\s+"
    r"(?P<reason>(?P<of>[A-Z][A-Za-z]{3,60}?)(?:Is(?:Not)?Healthy)?)(?:\s+(?P<rest>.{0,600}))?$"
)
"""A time, the condition, its status and reason in columns; without a condition where the reason is made of its name."""
_REASON = re.compile(r"reason[=:] ?\"?(?P<reason>[\w.-]{2,80})", re.IGNORECASE)
_POSITIVE = re.compile(r"(?:Ready|Healthy|OK|Ok|Available|Passed|Up|Complete)$")
_START = re.compile(r"\b(?:re)?start(?:ed|ing|up)?\b|start-?up|initiali[sz]|MonitorStarted|\bboot", re.IGNORECASE)
_NODE = re.compile(r"\bnode[ /=:]+(?P<node>[a-z0-9][\w.-]*\d[\w.-]*)")
MAX_CONDITIONS = 1000
"""Conditions of one document that are kept apart."""


class Change(NamedTuple):
    """A line that states a condition. `bad`: it says that something is wrong. `default`: said at a start, before any look."""

    line: Line
    node: str | None
    name: str
    bad: bool
    reason: str
    text: str
    default: bool


def change_in(line: Line) -> Change | None:
    """The condition that a line states. "Unknown" counts as nothing said."""
    text = line.text[:2000]
    match = _CONDITION.search(text) if "True" in text or "False" in text else None
    if match is None or _is_option(match["name"], match["rest"]):
        return _in_columns(line)
    reason, node = _REASON.search(match["rest"]), _NODE.search(text)
    good_status = "True" if _POSITIVE.search(match["name"]) else "False"
    return Change(
        line=line,
        node=node["node"] if node is not None else line.node,
        name=match["name"],
        bad=match["status"] != good_status,
        reason="" if reason is None else reason["reason"],
        text=match["rest"].strip(),
        default=bool(_START.search(match["rest"])),
    )


def _is_option(name: str, rest: str) -> bool:
    """Whether it looks like an option of a program ("FUSION: True"): one word in capitals, of which nothing more is said."""
    return name.isupper() and _POSITIVE.search(name) is None and _REASON.search(rest) is None


def _in_columns(line: Line) -> Change | None:
    match = _COLUMNS.match(line.raw[:2000]) if "True" in line.raw or "False" in line.raw else None
    if match is None or (match["name"] is None and not match["reason"].endswith("Healthy")):
        return None
    name = match["name"] or match["of"]
    good_status = "True" if _POSITIVE.search(name) else "False"
    return Change(
        line=line,
        node=line.node,
        name=name,
        bad=match["status"] != good_status,
        reason=match["reason"],
        text=(match["rest"] or "").strip(),
        default=False,
    )


def latest(changes: Iterable[Change]) -> list[Change]:
    """For each condition its last word: the last line that was not said at a start, of which the last bad one is the fault.

    A good word that a later bad one with the same reason follows was no recovery, and is not among them.
    """
    by_name: dict[tuple[str | None, str], list[Change]] = {}
    for change in changes:
        if len(by_name) < MAX_CONDITIONS or (change.node, change.name) in by_name:
            by_name.setdefault((change.node, change.name), []).append(change)
    found = []
    for states in by_name.values():
        said = [c for c in states if c.bad or not c.default] or states[-1:]
        first = next((c for c in states if c.bad), None)
        if first is not None:
            # Bad from its first bad word on; the text of the last has the newest message.
            found.append(first)
        if not said[-1].bad:
            found.append(said[-1])
    return found
