"""What still counts: events that are neither stale nor taken back, and failures that the job did not survive."""

from __future__ import annotations

from collections.abc import Sequence
from typing import get_args

import msgspec

from keepstep.attribution.order import compare, same_text
from keepstep.attribution.places import Places, same
from keepstep.catalog.load import Catalog
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
    takers = _last_takers(events, catalog, places)
    if not takers:
        return list(events)
    return [
        msgspec.structs.replace(e, stale="cleared")
        if e.stale is None
        and any(
            _takes_back(taker, catalog[name], e, catalog, places)
            for name in catalog.cleared_by(e.signature)
            for taker in takers.get(name, ())
        )
        else e
        for e in events
    ]


def _last_takers(events: Sequence[Event], catalog: Catalog, places: Places) -> dict[str, list[Event]]:
    """Events that take others back, by signature: the last of each place, text and quality of time, which is as good as all."""
    last: dict[tuple[object, ...], Event] = {}
    for event in events:
        entry = catalog[event.signature]
        if event.stale is not None or not entry.clears:
            continue
        where = places.place(event, entry.scope)
        key = (event.signature, where, event.evidence.path, event.source, event.time_quality, event.time_ns is None)
        held = last.get(key)
        if held is None or _moment(event) >= _moment(held):
            last[key] = event
    found: dict[str, list[Event]] = {}
    for event in last.values():
        found.setdefault(event.signature, []).append(event)
    return found


def _moment(event: Event) -> tuple[int, int]:
    end = end_of(event)
    return (end.time_ns or 0, end.order)


def _takes_back(taker: Event, entry: Signature, event: Event, catalog: Catalog, places: Places) -> bool:
    if taker is event or of_another_condition(taker, event):
        return False
    scope = catalog[event.signature].scope
    if entry.scope == "node" and scope in ("gpu", "nic"):
        scope = "node"  # a recovery of a whole node takes back what was wrong with a part of it
    alike = same(places.place(taker, entry.scope), places.place(event, scope), scope)
    derived = taker.signature.startswith("derived.")
    if alike is False or (alike is None and not derived and not same_text(taker, event)):
        return False
    return begin_after(event, taker) or (derived and compare(event, taker) != "after")


def of_another_condition(taker: Event, event: Event) -> bool:
    """Whether both are conditions of a node, and not the same one: that the disk is well says nothing of the GPUs."""
    one, other = taker.attrs.get("condition"), event.attrs.get("condition")
    return bool(one and other) and taker.signature == "condition.good" and one != other


def stops(entry: Signature) -> bool:
    """Whether an event of this entry claims that the job stands still, and nothing more: steps do not heal a GPU."""
    failing = entry.severity in ("error", "fatal") and entry.role != "action"
    return failing and entry.kind in STOPPING_KINDS and entry.action not in NODE_ACTIONS


def goes_on(entry: Signature) -> bool:
    """Whether an event of this entry shows that the job works, or has ended well."""
    return entry.kind == PROGRESS or (entry.role == "recovery" and entry.scope == "job")


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
