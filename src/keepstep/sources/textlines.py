"""Events from lines of text, by the catalog's patterns."""

from __future__ import annotations

import hashlib
import re
from collections.abc import Iterator
from typing import Any

from keepstep.catalog.matcher import Match, Matcher
from keepstep.records.event import Event, Evidence, Gpu, bounded
from keepstep.sources.documents import Document, Line

MATCH_LIMIT = 1 << 16
"""Characters of a line that are matched; a line of a log is shorter, a document in one line is for its parser."""
KNOWN_LINES = 4096
"""Different lines whose matches are kept: a storm says the same again and again."""
GROUP_LIMIT = 400
"""Characters of a named group that are kept."""

NOTES = ("#", "(", "//")
"""How a line begins that a person wrote beside a log."""
FAILING_ROLES = ("root", "cascade", "symptom", "action")
_DENIED = re.compile(r"(?i)\b(?:no|not|never|without|neither|nor|none of|nothing)\b[^,.;\n]{0,200}")

_INDEX = re.compile(r"\d{1,3}\Z")


def line_events(document: Document, matcher: Matcher, ordinary: bool = True) -> Iterator[Event]:
    """An event for every signature of every line. `ordinary`: see Signature."""
    known: dict[str, list[Match]] = {}
    for line in document.lines:
        text = line.text[:MATCH_LIMIT]
        matches = known.get(text)
        if matches is None:
            matches = matcher.match_line(text, ordinary)
            if matches and text.startswith(NOTES):
                matches = _not_denied(matches, text, matcher)
            if len(known) < KNOWN_LINES:
                known[text] = matches
        for match in matches:
            if fits(match, line):
                yield make_event(match, line, document)


def _not_denied(matches: list[Match], text: str, matcher: Matcher) -> list[Match]:
    """Matches of a note without those of failures that it says were not seen: "# no Xid, no eviction"."""
    kept = {match.signature.id for match in matcher.match_line(_DENIED.sub(" ", text))}
    return [m for m in matches if m.signature.role not in FAILING_ROLES or m.signature.id in kept]


def fits(match: Match, line: Line) -> bool:
    """Whether the line is of the stream that the entry is about, as far as that is known."""
    wanted = match.signature.stream
    return not ((wanted == "kernel" and line.stream == "job") or (wanted == "job" and line.stream == "kernel"))


def make_event(match: Match, line: Line, document: Document, count: int = 1) -> Event:
    """The event of a matched line, or of `count` that said the same, the last of which it is."""
    groups = match.groups
    device = groups.get("gpu", "")
    index = int(device) if _INDEX.match(device) else line.device
    gpu = Gpu(pci=groups.get("bdf"), uuid=groups.get("uuid"), index=index)
    rank = _number(groups.get("rank"))
    attrs: dict[str, Any] = {name: value[:GROUP_LIMIT] for name, value in groups.items()}
    if line.local_rank is not None:
        attrs.setdefault("local_rank", str(line.local_rank))
    if line.pod:
        attrs.setdefault("pod", line.pod)
    return Event(
        id=event_id(match.signature.id, line, document.path),
        kind=match.signature.kind,
        signature=match.signature.id,
        severity=match.signature.severity,
        source=document.title or "text",
        order=line.number,
        time_ns=line.time_ns,
        time_quality=line.time_quality,
        boot_ns=line.boot_ns,
        node=groups.get("node") or line.node,
        boot_id=line.boot_id,
        seq=line.seq,
        gpu=gpu if gpu != Gpu() else None,
        nic=groups.get("nic"),
        rank=line.rank if rank is None else rank,
        job=groups.get("job"),
        attrs=attrs,
        evidence=Evidence(path=document.path, line=line.number, text=bounded(line.raw)),
        count=count,
    )


def event_id(signature: str, line: Line, path: str) -> str:
    """The same for the same record however often it is read: by boot and sequence number, else by file, line and text."""
    if line.boot_id is not None and line.seq is not None:
        key = f"{line.boot_id}/{line.seq}/{signature}"
    else:
        key = f"{path}/{line.number}/{signature}/{line.text[:GROUP_LIMIT]}"
    return "ev-" + hashlib.blake2b(key.encode(errors="replace"), digest_size=8).hexdigest()


def _number(text: str | None) -> int | None:
    return int(text) if text is not None and text.isascii() and text.isdigit() and len(text) < 10 else None
