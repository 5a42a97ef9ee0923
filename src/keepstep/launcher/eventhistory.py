"""What recorded events tell of the past: incidents, each judged by what was known at its end, and how often a job was interrupted.

No clock is read: time is the events'. What lies after the end of an incident does not change its verdict; earlier incidents count
as `attribution.history` has it.
"""

from __future__ import annotations

import hashlib
from bisect import bisect_right
from collections import Counter
from collections.abc import Sequence
from typing import NamedTuple

import msgspec

from keepstep.attribution.causes import FAILING
from keepstep.attribution.current import goes_on, stops
from keepstep.attribution.history import Past, compared
from keepstep.attribution.incident import LONGEST_WAIT_S, Incident, incidents
from keepstep.attribution.rules.common_cause import WINDOW_S
from keepstep.attribution.verdict import judge
from keepstep.catalog.load import Catalog
from keepstep.records.codec import rfc3339, to_json
from keepstep.records.event import Event, Stale
from keepstep.records.verdict import FaultClass, Verdict

NS_PER_S = 1_000_000_000
DAY_S = 86_400.0
MERGE_S = 600.0
"""Faults that begin within this after the last are one interruption: a job that lies is not interrupted again. Of 584 faults of a
public trace 387 to 478 were interruptions."""
MOST_PAST = 100
"""Earlier incidents that a verdict is compared with, the newest, as in a run."""
SEEN_LATER: tuple[Stale, ...] = ("previous_boot", "before_repair", "cleared", "too_old")
"""Marks that say that something is over by the time of reading, not that it was not so at its own time."""
_HANGS = ("collective.timeout", "rank.stall", "step.stall")
"""Kinds of signs that a job stood still without ending."""
_OF_LAST = frozenset({"last_order", "before_last_order", "last_quality", "last_step", "epoch"})
"""Attributes that tell of the last sighting of a burst."""
_RUNS_ON = ("none", "drain_at_checkpoint")
"""Actions for what a job trains through."""


class PastIncident(NamedTuple):
    """One incident with its verdict. `id` depends on its first sign alone. `node`: what the verdict names, else the only one seen.

    `interrupted`: it stopped a job, as far as its signs tell: an error or worse, and either a sign that the job stands still or a
    verdict that calls for more than to go on until the next checkpoint. `hang`: the job stood still without ending.
    """

    id: str
    begin_ns: int
    end_ns: int
    nodes: tuple[str, ...]
    node: str | None
    rank: int | None
    verdict: Verdict
    interrupted: bool
    hang: bool


class EventHistory(msgspec.Struct, frozen=True, kw_only=True):
    """How often a job was interrupted in a history. `interruptions`: incidents that interrupted it, those MERGE_S apart being one.

    `first`, `last`: RFC 3339 times of the first and last event, None without any with a time. `by_class`: of interruptions, by the
    class of their first incident. `multi_node`: interruptions that several nodes showed. `nodes_seen`: nodes with any event.
    """

    incidents: int
    interruptions: int
    first: str | None
    last: str | None
    span_days: float
    nodes_seen: int
    by_class: dict[FaultClass, int]
    multi_node: int


def as_of_then(events: Sequence[Event]) -> list[Event]:
    """The events without the marks that later events put on them (SEEN_LATER): each was current at its own time.

    What was delivered twice stays marked.
    """
    return [msgspec.structs.replace(e, stale=None) if e.stale in SEEN_LATER else e for e in events]


def past_incidents(events: Sequence[Event], catalog: Catalog) -> list[PastIncident]:
    """The incidents of a history, in the order of their ends, which is when each is judged.

    Stale events belong to none. Events without a time cannot be placed and are left out.
    """
    timed = [part for e in events if e.time_ns is not None for part in _ends_apart(e, catalog)]
    works = [e for e in timed if e.stale is None and e.signature in catalog and goes_on(catalog[e.signature])]
    steps = sorted(e.time_ns or 0 for e in works)
    found: list[PastIncident] = []
    for stretch in sorted(incidents(timed, catalog), key=_when):
        over = [i for i in found if _over(i.end_ns, stretch.end_ns or 0, steps)]
        found.append(_judged(stretch, over[-MOST_PAST:], catalog))
    return found


def count_interruptions(events: Sequence[Event], catalog: Catalog) -> EventHistory:
    """How often a job was interrupted: for the rate of failures that a plan needs."""
    return history_of(events, past_incidents(events, catalog))


def history_of(events: Sequence[Event], found: Sequence[PastIncident]) -> EventHistory:
    """The same of incidents that were judged already."""
    times = [t for e in events for t in (e.time_ns, e.last_ns) if t is not None]
    groups = _merged([i for i in found if i.interrupted])
    by_class = Counter(g[0].verdict.fault_class for g in groups)
    return EventHistory(
        incidents=len(found),
        interruptions=len(groups),
        first=rfc3339(min(times)) if times else None,
        last=rfc3339(max(times)) if times else None,
        span_days=(max(times) - min(times)) / NS_PER_S / DAY_S if times else 0.0,
        nodes_seen=len({e.node for e in events if e.node is not None}),
        by_class={name: by_class[name] for name in sorted(by_class)},
        multi_node=sum(1 for g in groups if len({n for i in g for n in i.nodes}) > 1),
    )


def _merged(found: Sequence[PastIncident]) -> list[list[PastIncident]]:
    """Incidents in groups: each begins within MERGE_S after the end of all before it in its group."""
    groups: list[list[PastIncident]] = []
    end_ns = 0
    for one in sorted(found, key=lambda i: (i.begin_ns, i.end_ns, i.id)):
        if groups and one.begin_ns - end_ns <= MERGE_S * NS_PER_S:
            groups[-1].append(one)
            end_ns = max(end_ns, one.end_ns)
        else:
            groups.append([one])
            end_ns = one.end_ns
    return groups


def _ends_apart(event: Event, catalog: Catalog) -> list[Event]:
    """Steps from the first to the last of a log as two events: the first was known while the last was still to come."""
    if event.last_ns is None or event.signature not in catalog or not goes_on(catalog[event.signature]):
        return [event]
    attrs = event.attrs
    order, quality = attrs.get("last_order", event.order), attrs.get("last_quality", event.time_quality)
    last = msgspec.structs.replace(
        event, time_ns=event.last_ns, last_ns=None, count=max(1, event.count - 1), order=order, time_quality=quality
    )
    return [_known_at(event, event.time_ns or 0), last]


def _over(end_ns: int, now_ns: int, steps: Sequence[int]) -> bool:
    """Whether it was known by `now_ns` that an incident had ended: whatever comes after that can belong to it no more."""
    gap_ns = now_ns - end_ns
    went_on = bisect_right(steps, now_ns) > bisect_right(steps, end_ns)
    return gap_ns > LONGEST_WAIT_S * NS_PER_S or (went_on and gap_ns > WINDOW_S * NS_PER_S)


def _when(stretch: Incident) -> tuple[int, int, bytes]:
    return (stretch.end_ns or 0, stretch.begin_ns or 0, to_json(stretch.events))


def _judged(stretch: Incident, before: Sequence[PastIncident], catalog: Catalog) -> PastIncident:
    end_ns = stretch.end_ns or 0
    known = [_known_at(e, end_ns) for e in stretch.events]
    judgement = judge(known, catalog)
    # Nobody records a repair in events: none of them counts as repaired.
    signs = compared(judgement.verdict, end_ns, [Past(i.verdict, i.end_ns) for i in before])
    if signs:
        judgement = judge([*known, *signs], catalog)
    verdict = judgement.verdict
    failing = [e for e in stretch.events if catalog[e.signature].role in FAILING and e.severity != "info"]
    nodes = tuple(sorted(stretch.nodes))
    ranks = sorted(stretch.ranks)
    return PastIncident(
        id=_id(failing[0]),
        begin_ns=stretch.begin_ns or 0,
        end_ns=end_ns,
        nodes=nodes,
        node=verdict.entity.node or (nodes[0] if len(nodes) == 1 else None),
        rank=verdict.entity.rank if verdict.entity.rank is not None else ranks[0] if len(ranks) == 1 else None,
        verdict=verdict,
        interrupted=_interrupted(failing, verdict, catalog),
        hang=verdict.signature.startswith("hang.") or any(e.kind in _HANGS for e in failing),
    )


def _known_at(event: Event, time_ns: int) -> Event:
    """What was known of an event at a time: of a burst that went on after it, the first sighting."""
    if event.last_ns is None or event.last_ns <= time_ns:
        return event
    attrs = {k: v for k, v in event.attrs.items() if k not in _OF_LAST}
    if "first_step" in attrs:
        attrs["step"] = attrs["first_step"]
    return msgspec.structs.replace(event, count=1, last_ns=None, attrs=attrs)


def _interrupted(failing: Sequence[Event], verdict: Verdict, catalog: Catalog) -> bool:
    if verdict.no_current_fault or not any(e.severity in ("error", "fatal") for e in failing):
        return False
    return verdict.action not in _RUNS_ON or any(stops(catalog[e.signature]) for e in failing)


def _id(first: Event) -> str:
    """Twelve hexadecimal digits of the SHA-256 of the first sign, as it was first seen: a burst's later sightings do not count."""
    return "RPL-" + hashlib.sha256(to_json(_known_at(first, first.time_ns or 0))).hexdigest()[:12]
