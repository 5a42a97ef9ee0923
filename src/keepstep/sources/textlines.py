"""Events from lines of text, by the catalog's patterns."""

from __future__ import annotations

from collections.abc import Iterator

from keepstep.catalog.load import Catalog
from keepstep.catalog.matcher import Match, Matcher
from keepstep.records.event import Event, Evidence, Gpu, bounded
from keepstep.sources.documents import Document, Line


def line_events(document: Document, matcher: Matcher, catalog: Catalog) -> Iterator[Event]:
    """An event for every signature of every line."""
    for line in document.lines:
        for match in matcher.match_line(line.text):
            yield make_event(match, line, document)


def make_event(match: Match, line: Line, document: Document) -> Event:
    """The event of a matched line."""
    groups = match.groups
    gpu = Gpu(pci=groups.get("bdf"), uuid=groups.get("uuid"), index=_number(groups.get("gpu")))
    rank = _number(groups.get("rank"))
    return Event(
        kind=match.signature.kind,
        signature=match.signature.id,
        severity=match.signature.severity,
        source=document.title or "text",
        order=line.number,
        time_ns=line.time_ns,
        node=groups.get("node") or line.node,
        gpu=gpu if gpu != Gpu() else None,
        nic=groups.get("nic"),
        rank=line.rank if rank is None else rank,
        attrs=dict(groups),
        evidence=Evidence(path=document.path, line=line.number, text=bounded(line.raw)),
    )


def _number(text: str | None) -> int | None:
    return int(text) if text is not None and text.isdigit() else None
