"""Events of the readers in this package: an entry of the catalog, at a line."""

from __future__ import annotations

from typing import Any

from keepstep.catalog.load import Catalog
from keepstep.records.event import Event, Evidence, bounded
from keepstep.sources.documents import Document, Line
from keepstep.sources.textlines import event_id

TEXT_LIMIT = 400
"""Characters of a message that are kept in `attrs`."""


def event_at(
    signature: str, line: Line, document: Document, catalog: Catalog, attrs: dict[str, Any], *, text: str = ""
) -> Event:
    """The event of an entry, seen at a line. `text`: evidence, where it is more than the line. `attrs["rank"]` is a rank."""
    entry = catalog[signature]
    kept = {k: v[:TEXT_LIMIT] if isinstance(v, str) else v for k, v in attrs.items() if v is not None}
    rank = kept.get("rank", line.rank)
    return Event(
        id=event_id(signature, line, document.path),
        kind=entry.kind,
        signature=entry.id,
        severity=entry.severity,
        source=document.title or "text",
        order=line.number,
        time_ns=line.time_ns,
        time_quality=line.time_quality,
        node=line.node,
        rank=rank if isinstance(rank, int) else line.rank,
        attrs=kept,
        evidence=Evidence(path=document.path, line=line.number, text=bounded(text or line.raw)),
    )
