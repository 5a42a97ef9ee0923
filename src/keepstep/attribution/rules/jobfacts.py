"""What the rules on a job's own log have in common: who waits, and who wrote what."""

from __future__ import annotations

import re
from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from typing import NamedTuple

from keepstep.attribution.order import SECOND_NS, compare
from keepstep.catalog.load import Catalog
from keepstep.records.event import Event

PROGRESS = "job.progress"
FAILING = ("root", "cascade", "symptom")
"""Roles of what tells that something failed."""
OUTSIDE = (
    "condition.",
    "check.",
    "monitor.",
    "dcgm.health",
    "probe.",
    "k8s.node_condition",
    "k8s.node_cordoned",
    "sched.lost_task",
)
"""Beginnings of signatures of what somebody says from outside."""

WAITS = frozenset(
    {
        "torch.watchdog_timeout",
        "torch.watchdog_timeout_unnumbered",
        "torch.blocking_wait_timeout",
        "torch.store_owner_late",
        "torch.store_timeout",
        "torch.monitored_barrier",
        "gloo.timeout",
        "stack.collective",
        "jax.barrier_timeout",
        "ncclras.mismatch",
        "fr.trace_missing",
        "torch.desync_report",
        "torch.rank_counters",
        "fr.call",
    }
)
"""Signatures whose rank waits for others."""

LISTED_LIMIT = 20_000
"""Ranks of one list in a line that are looked at."""


class Wait(NamedTuple):
    """A rank that waited in a collective. `group`: its process group, None where nothing tells. Times: UTC ns, None unknown."""

    event: Event
    rank: int | None
    seq: int | None
    op: str
    group: str | None
    numel: tuple[str, str]
    begin_ns: int | None


def failed_inside(events: Iterable[Event], catalog: Catalog, *but: str) -> list[Event]:
    """What failed by the word of the job, the kernel or a device itself. `but`: beginnings of further signatures to leave out."""
    return [
        e
        for e in events
        if catalog[e.signature].role in FAILING
        and e.severity != "info"
        and not e.signature.startswith((*OUTSIDE, *but))
    ]


def number(value: object) -> int | None:
    """An attribute as a number: groups of patterns are texts."""
    if isinstance(value, bool):
        return None
    if isinstance(value, int):
        return value
    text = str(value) if value is not None else ""
    return int(text) if re.fullmatch(r"-?\d{1,18}", text, re.ASCII) else None


def ranks_of(value: object) -> list[int]:
    """Ranks in a list of numbers: "5, 6"."""
    return [int(t) for t in re.findall(r"\d{1,9}", str(value or ""))[:LISTED_LIMIT]]


def of(events: Iterable[Event], *signatures: str) -> list[Event]:
    """Events of these signatures."""
    return [e for e in events if e.signature in signatures]


def waiting_rank(event: Event) -> int | None:
    """The rank that waits. torch prints the rank within the group, which is that of the job where nothing else is printed."""
    if event.rank is not None or event.attrs.get("pg") not in (None, "0"):
        return event.rank
    return number(event.attrs.get("group_rank"))


def waits(events: Sequence[Event]) -> list[Wait]:
    """All ranks that waited, each wait once; groups are taken from the watchdog's second line of the same rank and sequence."""
    groups: dict[tuple[int | None, int | None], str] = {}
    for event in of(events, "torch.watchdog_failure"):
        guid = event.attrs.get("guid") or event.attrs.get("pg")
        if guid is not None:
            groups[waiting_rank(event), number(event.attrs.get("seq"))] = str(guid)
    found: dict[tuple[object, ...], Wait] = {}
    for event in events:
        rank, attrs = waiting_rank(event), event.attrs
        if event.signature not in WAITS or "about_rank" in event.attrs:
            continue
        if event.signature == "torch.monitored_barrier" and rank is None:
            continue
        if event.signature == "torch.rank_counters" and attrs.get("enqueued") == attrs.get("completed"):
            continue
        if attrs.get("open") is False:
            continue
        seq, op = number(attrs.get("seq")), str(attrs.get("op", ""))
        ran_ms = number(attrs.get("ran_ms")) or number(attrs.get("timeout_ms"))
        begin = event.time_ns - ran_ms * 1_000_000 if event.time_ns is not None and ran_ms is not None else None
        numel = (str(attrs.get("numel_in", "")), str(attrs.get("numel_out", "")))
        key = (rank, seq, op, event.cycle) if rank is not None else (id(event),)
        if key not in found:
            group = groups.get((rank, seq)) or str(attrs.get("pg_name") or "") or None
            found[key] = Wait(event, rank, seq, op, group, numel, begin)
    return list(found.values())


def begin_of_wait(waiting: Sequence[Wait]) -> int | None:
    """When the first of them began to wait."""
    return min((w.begin_ns for w in waiting if w.begin_ns is not None), default=None)


def known_ranks(events: Iterable[Event]) -> set[int]:
    """Ranks that any event names as its writer."""
    return {e.rank for e in events if e.rank is not None}


def by_rank(events: Iterable[Event]) -> Mapping[int, list[Event]]:
    """Events by the rank that wrote them."""
    found: dict[int, list[Event]] = defaultdict(list)
    for event in events:
        if event.rank is not None:
            found[event.rank].append(event)
    return found


def before(one: Event, other: Event) -> bool:
    """Whether an event was before another, or stands before it in one text where times do not tell."""
    return compare(one, other) == "before"


def within_s(one: Event, other: Event, seconds: float) -> bool:
    """Whether `other` follows `one` within a time; True too where times are missing and the order is not against it."""
    if one.time_ns is not None and other.time_ns is not None:
        return -2.0 <= (other.time_ns - one.time_ns) / SECOND_NS <= seconds
    return compare(one, other) != "after"


def steps_before(events: Iterable[Event], event: Event) -> int:
    """Highest step that the job is known to have made before an event; -1 where nothing is known."""
    best = -1
    for one in events:
        if one.signature == PROGRESS and compare(one, event) == "before":
            for name in ("last_step", "step", "first_step", "iteration"):
                step = number(one.attrs.get(name))
                if step is not None:
                    best = max(best, step)
                    break
            else:
                best = max(best, 0)
    return best
