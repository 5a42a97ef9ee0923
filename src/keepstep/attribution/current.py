"""What still counts: events that are neither stale nor taken back, and failures that the job did not survive."""

from __future__ import annotations

from collections.abc import Sequence
from typing import get_args

import msgspec

from keepstep.attribution.order import compare, gap_s, same_text
from keepstep.attribution.places import Places, same
from keepstep.catalog.load import Catalog, named
from keepstep.catalog.signature import Signature
from keepstep.records.event import Event, TimeQuality
from keepstep.records.verdict import NODE_ACTIONS

_QUALITIES = get_args(TimeQuality)

PROGRESS = "job.progress"

STOPPING_KINDS = frozenset(
    {"rank.exit", "rank.exception", "rank.stall", "rank.crash", "rank.missing", "collective.timeout", "collective.abort"}
    | {"nccl.error", "storage.error", "host.oom", "node.condition", "job.failed", "job.ended"}
    | {"sched.node_fail", "sched.preempt", "sched.oom", "sched.evict", "sched.time_limit", "sched.cancel"}
    | {"sched.launch_failed", "sched.unreachable"}
)  # fmt: skip
"""Kinds of events that claim that the job stands still. Steps made afterwards prove that it does not, any more.
Not among them: what goes wrong silently while steps go on (data that is repeated, saves that fail, a GPU that wears out)."""

LEAST_GAP_S = 5.0
"""A step that is printed so soon after a failure was under way when it came: ranks run ahead of each other and flush late."""


def end_of(event: Event) -> Event:
    """The last sighting of an event that stands for several, as an event of its own, to compare with."""
    attrs = event.attrs
    last_order, quality = attrs.get("last_order"), attrs.get("last_quality")
    return msgspec.structs.replace(
        event,
        time_ns=event.last_ns or event.time_ns,
        order=last_order if isinstance(last_order, int) else event.order,
        time_quality=quality if quality in _QUALITIES else event.time_quality,
    )


def begin_after(earlier: Event, later: Event) -> bool:
    """Whether `later` was seen, the last time, after the last sighting of `earlier`."""
    return compare(end_of(earlier), end_of(later)) == "before"


def cleared(events: Sequence[Event], catalog: Catalog, places: Places) -> list[Event]:
    """The events, those marked stale that a later one of the same thing takes back.

    Where the order is not known nothing is taken back, except by what a rule concluded: it has looked at the order itself.
    """
    takers = [(e, catalog[e.signature]) for e in events if e.stale is None and catalog[e.signature].clears]
    if not takers:
        return list(events)
    return [
        msgspec.structs.replace(e, stale="cleared")
        if e.stale is None and any(_takes_back(taker, entry, e, catalog, places) for taker, entry in takers)
        else e
        for e in events
    ]


def _takes_back(taker: Event, entry: Signature, event: Event, catalog: Catalog, places: Places) -> bool:
    if taker is event or not any(named(p, event.signature) for p in entry.clears):
        return False
    scope = catalog[event.signature].scope
    alike = same(places.place(taker, entry.scope), places.place(event, scope), scope)
    derived = taker.signature.startswith("derived.")
    if alike is False or (alike is None and not derived and not same_text(taker, event)):
        # A recovery of a whole node takes back what was wrong with a part of it.
        return False
    return begin_after(event, taker) or (derived and compare(event, taker) != "after")


def stops(entry: Signature) -> bool:
    """Whether an event of this entry claims that the job stands still, and nothing more: steps do not heal a GPU."""
    failing = entry.severity in ("error", "fatal") and entry.role != "action"
    return failing and entry.kind in STOPPING_KINDS and entry.action not in NODE_ACTIONS


def goes_on(entry: Signature) -> bool:
    """Whether an event of this entry shows that the job works, or has ended well."""
    return entry.kind == PROGRESS or (entry.role == "recovery" and entry.scope == "job")


PASSING_SCOPES = frozenset({"rank", "job", "storage", "cluster"})
"""What is wrong with these comes as it goes; what is wrong with a machine stays."""


def steps_after(events: Sequence[Event], catalog: Catalog) -> list[bool]:
    """For each event whether the job made steps, or ended well, after it, so that it cannot be why the job stopped later.

    Only for what passes by itself; the order must be known.
    """
    signs = [e for e in events if goes_on(catalog[e.signature])]
    return [bool(signs) and _passes(catalog[e.signature]) and any(outlived(e, sign) for sign in signs) for e in events]


def _passes(entry: Signature) -> bool:
    return stops(entry) or (entry.scope in PASSING_SCOPES and entry.action not in NODE_ACTIONS)


def outlived(event: Event, sign: Event) -> bool:
    """Whether a sign that the job works came so long after the event that it proves something."""
    if sign.kind != PROGRESS:
        return begin_after(event, sign)
    if event.kind.startswith("rank.") and None not in (event.rank, sign.rank) and event.rank != sign.rank:
        return False  # what stopped one rank is not disproved by another that ran ahead
    end, last = end_of(event), end_of(sign)
    gap = gap_s(end, last)
    if gap is not None and not {end.time_quality, last.time_quality} & {"neighbour", "none"}:
        return gap > LEAST_GAP_S and compare(end, last) == "before"
    # Lines without times of their own: one step may have been under way, two were made.
    before_last = sign.attrs.get("before_last_order")
    return same_text(event, sign) and isinstance(before_last, int) and before_last > end.order and sign.count > 1


def windowed(events: Sequence[Event], since_ns: int | None, until_ns: int | None) -> list[Event]:
    """The events seen until `until_ns`, those last seen before `since_ns` marked too old. One without a time stays as it is."""
    found = []
    for event in events:
        if event.time_ns is None:
            found.append(event)
        elif until_ns is None or event.time_ns <= until_ns:
            old = since_ns is not None and (event.last_ns or event.time_ns) < since_ns and event.stale is None
            found.append(msgspec.structs.replace(event, stale="too_old") if old else event)
    return found
