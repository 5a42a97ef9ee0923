"""What the stacks of all ranks together say about a hang."""

from __future__ import annotations

from collections.abc import Sequence

from keepstep.attribution.rules.deriving import derive
from keepstep.catalog.load import Catalog
from keepstep.records.event import Event


def late_ranks(events: Sequence[Event], catalog: Catalog) -> list[Event]:
    """After a hang: ranks that were busy while others waited in a collective. All busy, or all waiting, says nothing."""
    by_signature: dict[str, list[Event]] = {}
    for event in events:
        by_signature.setdefault(event.signature, []).append(event)
    busy, waiting = by_signature.get("keepstep.rank_busy", []), by_signature.get("keepstep.rank_waits", [])
    if "keepstep.hang" not in by_signature or not busy or not waiting:
        return []
    return [derive(catalog, "derived.late_rank", event, attrs=event.attrs) for event in busy]
