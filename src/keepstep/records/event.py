"""`keepstep.event/1`: one thing that was seen, wherever it was seen. Every source makes these; attribution reads only these."""

from __future__ import annotations

from typing import Any, Literal

import msgspec

from keepstep.records.codec import rfc3339

Severity = Literal["info", "warning", "error", "fatal"]

TimeQuality = Literal["exact", "zone_assumed", "year_assumed", "boot_relative", "neighbour", "none"]
"""How the time of an event is known: as printed with zone; zone taken for UTC; year taken from elsewhere; seconds since boot
mapped by a known boot time; the time of the nearest line before it in the same file; not at all."""

Stale = Literal["replay", "before_repair", "cleared", "previous_boot", "too_old"]
"""Why an event may never drive an action: delivered before (boot id, sequence), older than the last repair of what it is about,
taken back by a later event, from an earlier boot, or older than the window that is asked about."""

TEXT_LIMIT = 2000
"""Characters of a line that are kept as evidence."""


class Gpu(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """A GPU as far as the source names it. `pci`: "0000:9c:00.0", lower case, four-digit domain."""

    index: int | None = None
    uuid: str | None = None
    pci: str | None = None
    serial: str | None = None


class Evidence(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """Where it was seen. `line` counts from 1 within `path`; 0: the whole of it. `text` is at most TEXT_LIMIT characters."""

    path: str = ""
    line: int = 0
    text: str = ""


class Event(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """One event. `kind` is dotted (CONTRACT section 4); `signature` names the catalog entry that explains it.

    `time_ns`: UTC, None when the source gives none. `boot_ns`: since the boot of its node, where the source tells. `order`:
    position in its source, which orders events without times. `seq`: sequence number within `boot_id`, for deduplication.
    A storm is one event: `count` of them from `time_ns` to `last_ns`.
    `rank` is the rank that reports. A rank that is reported about is in `attrs["about_rank"]`.
    """

    id: str = ""
    kind: str
    signature: str
    severity: Severity = "info"
    source: str = ""
    time_ns: int | None = None
    time_quality: TimeQuality = "none"
    boot_ns: int | None = None
    order: int = 0
    node: str | None = None
    boot_id: str | None = None
    seq: int | None = None
    gpu: Gpu | None = None
    nic: str | None = None
    rank: int | None = None
    job: str | None = None
    cycle: int | None = None
    attrs: dict[str, Any] = {}
    evidence: Evidence = Evidence()
    count: int = 1
    last_ns: int | None = None
    stale: Stale | None = None


def event_fields(event: Event) -> dict[str, Any]:
    """The event as `keepstep.event/1`, with its times in RFC 3339 beside the nanoseconds.

    Fields that have their default are left out, but for severity and quality of the time, which every reader asks for.
    """
    fields: dict[str, Any] = {"schema": "keepstep.event/1", **msgspec.to_builtins(event)}
    # msgspec knows a default by identity, which a string that came from another process has lost.
    fields |= {"severity": event.severity, "time_quality": event.time_quality}
    if event.time_ns is not None:
        fields["time"] = rfc3339(event.time_ns)
    if event.last_ns is not None:
        fields["last"] = rfc3339(event.last_ns)
    return fields


def bounded(text: str, limit: int = TEXT_LIMIT) -> str:
    """`text` cut to `limit` characters, with a mark where it was cut."""
    return text if len(text) <= limit else text[: limit - 1] + "…"
