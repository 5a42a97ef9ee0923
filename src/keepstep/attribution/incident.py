"""Events of many machines and hours, taken apart into incidents: what failed together shared a job, a node or a cause."""

from __future__ import annotations

from bisect import bisect_left, bisect_right
from collections import Counter, defaultdict
from collections.abc import Sequence
from typing import NamedTuple

from keepstep.attribution.causes import FAILING
from keepstep.attribution.current import goes_on
from keepstep.attribution.order import SECOND_NS, canonical
from keepstep.attribution.places import UNMAPPED, RankMap, about_rank
from keepstep.attribution.rules.common_cause import LEAST_NODES, WINDOW_S
from keepstep.catalog.load import Catalog
from keepstep.records.event import Event

LONGEST_WAIT_S = 45 * 60.0
"""Between two signs of one incident: a peer notices after its collective time-out, by default 10 to 30 minutes."""


class Incident(NamedTuple):
    """`events`: from the last progress before its first sign, or LONGEST_WAIT_S before it, to its last; in canonical order."""

    events: tuple[Event, ...]
    nodes: frozenset[str]
    ranks: frozenset[int]
    begin_ns: int | None
    end_ns: int | None


class _Sets:
    """Disjoint sets of numbers."""

    def __init__(self, count: int) -> None:
        self._parent = list(range(count))

    def find(self, one: int) -> int:
        while self._parent[one] != one:
            self._parent[one] = self._parent[self._parent[one]]
            one = self._parent[one]
        return one

    def join(self, one: int, other: int) -> None:
        first, second = sorted((self.find(one), self.find(other)))
        self._parent[second] = first


def incidents(
    events: Sequence[Event], catalog: Catalog, ranks: RankMap = UNMAPPED, most: int | None = None
) -> list[Incident]:
    """The incidents in a stream of events, oldest first; `most`: only so many, the newest. Stale events belong to none.

    Two signs are of one incident when they are of one job or node, LONGEST_WAIT_S apart at most, and the job made no progress
    between them; or when several machines show the same within minutes. Signs without a time join the only incident there is.
    """
    live = sorted((e for e in events if e.stale is None and e.signature in catalog), key=canonical)
    signs = [e for e in live if catalog[e.signature].role in FAILING and e.severity != "info"]
    timed = [e for e in signs if e.time_ns is not None]
    untimed = [e for e in signs if e.time_ns is None]
    steps = sorted(_end_ns(e) for e in live if e.time_ns is not None and goes_on(catalog[e.signature]))
    sets = _Sets(len(timed))
    _chain(timed, ranks.nodes, steps, sets)
    _crowds(timed, sets)
    groups: dict[int, list[Event]] = defaultdict(list)
    for index, event in enumerate(timed):
        groups[sets.find(index)].append(event)
    if untimed and len(groups) <= 1:
        # Nothing says that they are of another incident, nor which of the other events belong to it.
        return [_incident([*timed, *untimed], live, ranks)]
    kept = list(groups.values())[-most:] if most is not None else groups.values()
    found = [_incident(members, _around(members, live, catalog, steps), ranks) for members in kept]
    return [*found, _incident(untimed, untimed, ranks)] if untimed else found


def _end_ns(event: Event) -> int:
    return event.last_ns or event.time_ns or 0


def _owners(event: Event, job_nodes: frozenset[str]) -> list[str]:
    """What an event belongs to. A rank, or a node of the job's, belongs to the job whose logs these are."""
    found = [] if event.node is None else [f"node {event.node}"]
    if event.job is not None:
        found.append(f"job {event.job}")
    elif event.node is None or event.node in job_nodes or about_rank(event) is not None:
        found.append("job")
    return found


def _chain(timed: Sequence[Event], job_nodes: frozenset[str], steps: Sequence[int], sets: _Sets) -> None:
    """Join each sign with the one before it of the same owner."""
    last: dict[str, int] = {}
    for index, event in enumerate(timed):
        for owner in _owners(event, job_nodes):
            before = last.get(owner)
            if before is not None and not _apart(timed[before], event, steps):
                sets.join(before, index)
            last[owner] = index


def _apart(one: Event, other: Event, steps: Sequence[int]) -> bool:
    """Whether two signs are too far apart, or the job worked between them."""
    begin, end = _end_ns(one), other.time_ns or 0
    return end - begin > LONGEST_WAIT_S * SECOND_NS or bisect_right(steps, begin) < bisect_left(steps, end)


def _crowds(timed: Sequence[Event], sets: _Sets) -> None:
    """Join the signs of one signature that LEAST_NODES nodes show within WINDOW_S."""
    by_signature: dict[str, list[int]] = defaultdict(list)
    for index, event in enumerate(timed):
        if event.node is not None:
            by_signature[event.signature].append(index)
    for members in by_signature.values():
        begin = joined = 0
        inside: Counter[str | None] = Counter()
        for end, index in enumerate(members):
            inside[timed[index].node] += 1
            while (timed[index].time_ns or 0) - (timed[members[begin]].time_ns or 0) > WINDOW_S * SECOND_NS:
                inside[timed[members[begin]].node] -= 1
                begin += 1
            if sum(1 for n in inside.values() if n) >= LEAST_NODES:
                for other in range(max(begin, joined), end):
                    sets.join(members[other], members[other + 1])
                joined = end


def _around(members: Sequence[Event], live: Sequence[Event], catalog: Catalog, steps: Sequence[int]) -> list[Event]:
    """The signs of an incident, and what else was seen of its nodes and ranks since the progress before its first sign."""
    first, last = members[0].time_ns or 0, max(_end_ns(e) for e in members)
    earliest = first - round(LONGEST_WAIT_S * SECOND_NS)
    before = bisect_left(steps, first)
    begin = max(earliest, steps[before - 1]) if before else earliest
    own = {id(e) for e in members}
    nodes = {e.node for e in members}
    return [
        e
        for e in live
        if id(e) in own
        or (
            e.time_ns is not None
            and begin <= _end_ns(e)
            and e.time_ns <= last
            and (e.node is None or e.node in nodes)
            and catalog[e.signature].role not in FAILING
        )
    ]


def _incident(members: Sequence[Event], events: Sequence[Event], ranks: RankMap) -> Incident:
    times = [e.time_ns for e in members if e.time_ns is not None]
    of_ranks = [(rank, ranks.node_of.get(rank)) for e in members if (rank := about_rank(e)) is not None]
    return Incident(
        events=tuple(sorted(events, key=canonical)),
        nodes=frozenset({e.node for e in members if e.node is not None} | {n for _, n in of_ranks if n is not None}),
        ranks=frozenset(rank for rank, _ in of_ranks),
        begin_ns=min(times, default=None),
        end_ns=max((_end_ns(e) for e in members if e.time_ns is not None), default=None),
    )
