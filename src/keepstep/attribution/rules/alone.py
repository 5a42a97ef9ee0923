"""Ranks that go different ways before a collective: one at work that it does alone, some with a compile cache that others lack."""

from __future__ import annotations

from collections.abc import Sequence

from keepstep.attribution.order import compare
from keepstep.attribution.rules.deriving import derive
from keepstep.attribution.rules.jobfacts import of, waits
from keepstep.attribution.rules.late import hold_of, late_ranks
from keepstep.catalog.load import Catalog
from keepstep.records.event import Event

STUCK = ("xla.rendezvous_stuck", "jax.barrier_timeout")
PARTED = (
    "derived.collective_mismatch",
    "derived.size_mismatch",
    "derived.sequence_desync_likely",
    "derived.absent_rank",
)
MOST = 256
"""Cache look-ups of one kind that are compared."""


def alone_at_work(events: Sequence[Event], catalog: Catalog) -> list[Event]:
    """Work of one process, in lines that name no rank, before the others waited for the one rank that is missing."""
    acts, waiting = of(events, "job.single_rank_work"), waits(events)
    if not acts or not waiting or of(events, "derived.late_in_data"):
        return []
    late = late_ranks(events, waiting)
    hold = hold_of(waiting)
    act = next((a for a in acts if a.rank is None and compare(a, hold.last) != "after"), None)
    if len(late) != 1 or act is None:
        return []
    attrs = {"about_rank": late[0].rank, "waiting": hold.ranks, "op": hold.op, "seq": hold.seq}
    attrs["doing"] = act.evidence.text[:200]
    return [derive(catalog, "derived.late_in_data", act, attrs=attrs, rank=late[0].rank)]


def cache_split(events: Sequence[Event], catalog: Catalog) -> list[Event]:
    """One thing that some ranks had in their compile cache and others had not, and ranks that wait for each other."""
    hits, misses = of(events, "compile.cache_hit")[:MOST], of(events, "compile.cache_miss")[:MOST]
    if not hits or not misses or not (waits(events) or of(events, *STUCK)):
        return []
    for hit in hits:
        key = hit.attrs.get("key")
        other = next((m for m in misses if m.attrs.get("key") == key and _who(m) != _who(hit)), None)
        # A rank that missed first and hit later has compiled in between, as all do.
        if other is None or any(m.attrs.get("key") == key and _who(m) == _who(hit) for m in misses):
            continue
        explains = sorted({e.signature for e in of(events, *PARTED, *STUCK)})
        return [
            derive(catalog, "derived.compile_cache_split", hit, attrs={"key": key}, explains=explains, placed=False)
        ]
    return []


def _who(event: Event) -> tuple[object, ...]:
    return event.rank, event.node, event.source


ALONE_RULES = (alone_at_work, cache_split)
"""Each: `(events, catalog) -> list[Event]`."""
