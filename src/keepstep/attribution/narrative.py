"""A verdict on one page of Markdown: for a person who joins late, or for a language model that shall word it."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from keepstep.attribution.wording import ACTION_WORDS, CLASS_WORDS

ROWS = 40
"""Lines of evidence on the page."""


def narrative(fields: dict[str, Any]) -> str:
    """The page for a verdict that has the fields of keepstep.verdict/1. Not redacted: it quotes what was read."""
    action, name = fields["action"], fields["class"]
    lines = [
        "# What happened",
        "",
        str(fields["summary"]),
        "",
        f"- Class: **{name}** ({CLASS_WORDS.get(name, '')}), {fields['tier']}, probability {fields['confidence']:.2f}",
        f"- Signature: `{fields['signature']}`",
        f"- Action: **{action}**: {ACTION_WORDS.get(action, '')}",
        f"- Current fault: {'no' if fields['no_current_fault'] else 'yes'}",
    ]
    at = [f"{k} {v}" for k, v in (fields.get("entity") or {}).items() if v is not None]
    if at:
        lines.append(f"- At fault: {', '.join(at)}")
    if fields.get("first_cause"):
        lines += ["", "## First cause", "", *_quoted([fields["first_cause"]])]
    if fields["evidence"]:
        lines += ["", "## Evidence, oldest first", "", *_quoted(_heaviest(fields["evidence"]))]
    if fields["alternatives"]:
        lines += ["", "## What else it could be", ""]
        lines += [f"- {a['class']} ({a['confidence']:.2f}): {a['why_not']}" for a in fields["alternatives"]]
    if fields.get("missing"):
        lines += ["", "## What would decide it", "", *(f"- {m}" for m in fields["missing"])]
    return "\n".join(lines) + "\n"


def _heaviest(evidence: Sequence[dict[str, Any]]) -> list[dict[str, Any]]:
    order = sorted(range(len(evidence)), key=lambda i: (-abs(evidence[i]["weight"]), i))[:ROWS]
    return [evidence[i] for i in sorted(order)]


def _quoted(events: Sequence[dict[str, Any]]) -> list[str]:
    """Events as list items; the text of a log is set as code, so that it cannot be read as Markdown."""
    found = []
    for event in events:
        evidence = event.get("evidence") or {}
        text = " ".join(str(evidence.get("text") or "").replace("`", "'").split())
        bearing = f" {event['bearing']}, {event['weight']:+.1f}" if "bearing" in event else ""
        place = f" ({evidence['path']}:{evidence.get('line', 0)})" if evidence.get("path") else ""
        time = f"{event['time'][:19]}Z " if event.get("time") else ""
        found.append(f"- {time}`{event['signature']}`{bearing}{place}" + (f": `{text}`" if text else ""))
    return found
