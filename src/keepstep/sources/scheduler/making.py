"""Events of parsers: an entry of the catalog, the line it was read from, and what the record says beside it."""

from __future__ import annotations

import re
from collections.abc import Mapping
from datetime import UTC, datetime
from email.utils import parsedate_to_datetime
from typing import Any, Protocol

from keepstep.catalog.load import Catalog
from keepstep.records.event import Event, Evidence, TimeQuality, bounded
from keepstep.sources.documents import Document, Line

_ISO = re.compile(r"\d{4}-\d\d-\d\d[T ]\d\d:\d\d(?::\d\d(?:\.\d+)?)?(?:Z|[+-]\d\d:?\d\d)?")
_MAIL = re.compile(r"(?:[A-Z][a-z]{2}, )?\d{1,2} [A-Z][a-z]{2} \d{4} \d\d:\d\d:\d\d [+-]\d{4}")


class Maker(Protocol):
    """Makes an event of one record: `words` find its line, `at` is its time, the rest are attributes."""

    def __call__(self, signature: str, *words: str, at: object = None, **attrs: Any) -> Event: ...


def moment(text: object) -> tuple[int | None, TimeQuality]:
    """UTC nanoseconds of a time as schedulers print it; (None, "none") for anything else.

    ISO 8601 with or without zone (Slurm prints local time without one, taken for UTC), RFC 2822 (kubectl describe), or a number
    of seconds since 1970 (JSON of Slurm; 0 stands for "never").
    """
    if isinstance(text, (int, float)) and not isinstance(text, bool):
        return (int(text) * 1_000_000_000, "exact") if 0 < text < 1e11 else (None, "none")
    if not isinstance(text, str):
        return None, "none"
    try:
        found = _ISO.search(text)
        if found is not None:
            time = datetime.fromisoformat(found.group())
        elif (mail := _MAIL.search(text)) is not None:
            time = parsedate_to_datetime(mail.group())
        else:
            return None, "none"
        zoned = time.tzinfo is not None
        if not zoned:
            time = time.replace(tzinfo=UTC)
        seconds = int(time.timestamp()) * 1_000_000_000 + time.microsecond * 1000
    except (ValueError, OverflowError, TypeError):
        return None, "none"
    return seconds, "exact" if zoned else "zone_assumed"


def note(
    catalog: Catalog,
    signature_id: str,
    document: Document,
    line: Line,
    *,
    at: object = None,
    node: str | None = None,
    job: str | None = None,
    attrs: Mapping[str, Any] | None = None,
) -> Event:
    """An event of an entry without pattern. `at`: a time as `moment` reads it; without one the line's own time is taken."""
    entry = catalog[signature_id]
    time_ns, quality = moment(at)
    if time_ns is None and line.time_ns is not None:
        time_ns, quality = line.time_ns, "exact"
    return Event(
        kind=entry.kind,
        signature=entry.id,
        severity=entry.severity,
        source=document.title or "text",
        time_ns=time_ns,
        time_quality=quality,
        order=line.number,
        node=node or line.node,
        rank=line.rank,
        job=job,
        attrs={k: v for k, v in (attrs or {}).items() if v not in (None, "")},
        evidence=Evidence(path=document.path, line=line.number, text=bounded(line.raw)),
    )
