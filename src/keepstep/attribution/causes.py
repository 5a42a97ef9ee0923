"""Which events could be the cause, and which are explained by another."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence
from typing import NamedTuple

import msgspec

from keepstep.attribution.current import STOPPING_KINDS, stops
from keepstep.attribution.order import compare, gap_s
from keepstep.attribution.places import Place, Places, same
from keepstep.attribution.worked import worked
from keepstep.catalog.load import Catalog
from keepstep.catalog.signature import Signature
from keepstep.records.event import Event
from keepstep.records.verdict import NODE_ACTIONS, FaultClass

LONGEST_PATH_S = 24 * 3600.0
"""A cause further back than this explains nothing: longer than any time-out, shorter than the way back through a queue."""

GROUPS_PER_SIGNATURE = 256
"""Places of one signature that are looked at one by one; a failure that shows at more of them shows the same at each."""

FAILING = ("root", "cascade", "symptom")
"""Roles of signs that something failed."""

JOB_WIDE = frozenset({"job", "storage", "cluster"})


class Seen(NamedTuple):
    """One signature at one place: its earliest event, how many there were, and what became of it.

    `explained`: index of the group that explains it, among those returned together; None: nothing does. `over`: it was taken back
    after it had stopped the job; then nothing is to be taken out of service for it. `outlived`: the job made steps after it.
    """

    event: Event
    entry: Signature
    place: Place
    sightings: int
    outlived: bool = False
    explained: int | None = None
    later: bool = False
    over: bool = False

    @property
    def survived(self) -> bool:
        """Whether it claims that the job stands still, and steps were made after it."""
        return self.outlived and stops(self.entry)

    @property
    def can_be_cause(self) -> bool:
        """A root, or a cascade or somebody's action that nothing explains."""
        return self.entry.role == "root" or (self.entry.role in ("cascade", "action") and self.explained is None)

    def weight(self, name: FaultClass) -> float:
        """Log-odds that the catalog gives this sign for a class."""
        return self.entry.weights.get(name, 0.0)

    @property
    def top(self) -> float:
        """Strongest weight for any class."""
        return max(self.entry.weights.values(), default=0.0)


def grouped(events: Sequence[Event], outlived: Sequence[bool], catalog: Catalog, places: Places) -> list[Seen]:
    """Events of one signature at one place are one. `events` in canonical order. A group is outlived when all of it is."""
    groups: dict[tuple[str, Place], list[int]] = defaultdict(list)
    of_signature: dict[str, int] = defaultdict(int)
    first: dict[str, tuple[str, Place]] = {}
    for index, event in enumerate(events):
        place = places.place(event, catalog[event.signature].scope)
        key = (event.signature, place)
        if key not in groups:
            of_signature[event.signature] += 1
            first.setdefault(event.signature, key)
            if of_signature[event.signature] > GROUPS_PER_SIGNATURE:
                key = first[event.signature]
        groups[key].append(index)
    return [
        Seen(
            event=events[members[0]],
            entry=catalog[signature],
            place=place,
            sightings=sum(max(1, events[i].count) for i in members),
            outlived=all(outlived[i] for i in members),
        )
        for (signature, place), members in groups.items()
    ]


def past_causes(cleared: Sequence[Event], live: Sequence[Seen], catalog: Catalog, places: Places) -> list[Seen]:
    """Of conditions that were taken back, those after which something stopped that they explain, and no step was made between."""
    signs = worked([s.event for s in live], catalog)
    found = []
    for one in grouped(cleared, [False] * len(cleared), catalog, places):
        if one.entry.role != "root" or signs.after(one.event):
            continue
        action = "restart_job" if one.entry.action in NODE_ACTIONS else one.entry.action
        over = one._replace(entry=msgspec.structs.replace(one.entry, action=action), over=True)
        if any(_stopped_by(over, s, places.ranks.nodes) for s in live):
            found.append(over)
    return found


def _stopped_by(over: Seen, effect: Seen, job_nodes: frozenset[str]) -> bool:
    if effect.entry.role not in FAILING or effect.survived or effect.entry.kind not in STOPPING_KINDS:
        return False
    alike = effect.entry.role != "root" or any(w > 0 and over.weight(c) > 0 for c, w in effect.entry.weights.items())
    return alike and compare(over.event, effect.event) in ("before", "together") and explains(over, effect, job_nodes)


def covers(cause: Seen, effect: Seen, job_nodes: frozenset[str]) -> bool:
    """Whether what is wrong with the place of `cause` can be felt at that of `effect`.

    A failed rank is felt by every rank of a synchronous job, as cascades and symptoms. Another root needs the same thing, or a
    part of it, or a cause that is the whole job's. What is not known is not held against it.
    """
    if job_nodes and cause.entry.scope in ("gpu", "nic", "node") and cause.place.node not in {None, *job_nodes}:
        return False  # a node that had no part in the job
    if effect.entry.role != "root" or cause.entry.scope in JOB_WIDE:
        return True
    if cause.entry.scope == "rank":
        return same(cause.place, effect.place, "rank") is not False
    if effect.entry.scope in ("gpu", "nic") and cause.entry.scope == effect.entry.scope:
        return same(cause.place, effect.place, cause.entry.scope) is not False
    return same(cause.place, effect.place, "node") is not False


def explains(cause: Seen, effect: Seen, job_nodes: frozenset[str]) -> bool:
    """Whether `cause` makes `effect` no news: it lies deeper, was not later, reaches it, and is no weaker a sign by half."""
    if effect.entry.id in told_by(cause):
        return compare(cause.event, effect.event) != "after"
    if cause.entry.role not in ("root", "cascade") or cause.entry.depth >= effect.entry.depth:
        return False
    if effect.entry.role == "root" and (cause.entry.role != "root" or 2 * cause.top < effect.top):
        return False
    if cause.outlived and not effect.outlived:
        return False  # the job worked between the two
    gap = gap_s(cause.event, effect.event)
    if gap is not None and gap > LONGEST_PATH_S:
        return False
    return compare(cause.event, effect.event) != "after" and covers(cause, effect, job_nodes)


def told_by(cause: Seen) -> tuple[str, ...]:
    """Ids of signs that a rule says this one explains, whatever their depth: its attribute `explains`."""
    told = cause.event.attrs.get("explains") if cause.entry.id.startswith("derived.") else None
    return tuple(told) if isinstance(told, list | tuple) else ()


def with_explanations(seen: Sequence[Seen], job_nodes: frozenset[str] = frozenset()) -> list[Seen]:
    """Each group with the one that explains it: of several the deepest, then the earliest in the given order."""
    able = [i for i, s in enumerate(seen) if s.entry.role in ("root", "cascade") and s.top > 0]
    able.sort(key=lambda i: seen[i].entry.depth)
    found = []
    for index, one in enumerate(seen):
        by = None
        if one.entry.role in (*FAILING, "action"):
            by = next((i for i in able if i != index and explains(seen[i], one, job_nodes)), None)
        found.append(one._replace(explained=by))
    return [one._replace(later=_is_later(one, found)) for one in found]


def _is_later(one: Seen, seen: Sequence[Seen]) -> bool:
    """Whether the job had already been stopped, by another unexplained root, when this root of it began."""
    if one.entry.role != "root" or one.explained is not None or one.entry.scope not in ("rank", "job"):
        return False
    if one.entry.id.startswith("derived."):
        return False  # a conclusion has the time of what it rests on, not one of its own
    return any(
        other.entry.role == "root"
        and other.entry is not one.entry
        and other.explained is None
        and not other.survived
        and stops(other.entry)
        and 2 * other.top >= one.top
        and compare(other.event, one.event) == "before"
        for other in seen
    )


def first_of(candidates: Sequence[Seen]) -> Seen | None:
    """The earliest; of those whose order is not known the deepest, then the heaviest, then the first in the given order."""
    earliest = [
        c for c in candidates if not any(compare(o.event, c.event) == "before" for o in candidates if o is not c)
    ]
    # Clocks of different tolerance can leave nobody first; then depth decides over all.
    return min(earliest or candidates, key=lambda c: (c.entry.depth, -c.top), default=None)
