"""Ranks that wait for each other in different operations: which of them left the common order."""

from __future__ import annotations

from collections import Counter, defaultdict

from keepstep.attribution.hang.waiting import Graph, Node, is_circular
from keepstep.attribution.hang.world import NEVER, World, next_of

MAX_TRIED = 16
MAX_COMPARED = 8
"""Of the ranks that wait at one place."""
Place = tuple[int, int, int]
"""Group and sequence of the operation that a rank waits in; of a transfer the rank too, as ranks count transfers for themselves."""


def place_of(world: World, rank: int) -> Place:
    """Where a rank waits."""
    head = world.heads[rank]
    return head.group, head.sequence, rank if head.transfers else -1


def out_of_step(world: World, graph: Graph, circle: list[Node]) -> list[int]:
    """The ranks of a circle that left the common order: the fewest at one place without whom nobody would wait in a circle.

    Of several such places it is one whose ranks have done another number of collectives than the others who wait there, else not
    the one where most of the job waits. Where nothing tells, all of these places.
    """
    by_place: dict[Place, set[Node]] = defaultdict(set)
    for rank in circle:
        if rank >= 0:
            by_place[place_of(world, rank)].add(rank)
    waiting_for = Counter(other for node in circle for other in graph.edges.get(node, ()))
    places = sorted(by_place, key=lambda p: (len(by_place[p]), -sum(waiting_for[rank] for rank in by_place[p]), p))
    among = set(circle)
    breaking = [p for p in places[:MAX_TRIED] if not is_circular(graph.edges, among - by_place[p])]
    breaking = [p for p in breaking if len(by_place[p]) == len(by_place[breaking[0]])] or places
    if len(breaking) > 1:
        crowds: dict[Place, list[int]] = defaultdict(list)
        for rank in world.heads:
            crowds[place_of(world, rank)].append(rank)
        strange = [p for p in breaking if all(_is_strange(world, rank, crowds[p]) for rank in by_place[p])]
        small = [p for p in breaking if 2 * len(crowds[p]) <= len(world.heads)]
        breaking = strange or small or breaking
    return sorted(rank for p in breaking for rank in by_place[p])


def _is_strange(world: World, rank: int, crowd: list[int]) -> bool:
    """Whether all others who wait at a rank's place have done as many collectives of some kind as each other, but not as it has.

    A kind is all groups of one description: those that divide the ranks in the same way.
    """
    others = [other for other in crowd[: MAX_COMPARED + 1] if other != rank]
    if len(others) < 2:
        return False
    mine, first, *rest = (_done(world, who) for who in (rank, *others))
    return any(mine.get(kind) != count and all(r.get(kind) == count for r in rest) for kind, count in first.items())


def _done(world: World, rank: int) -> dict[str, int]:
    found: dict[str, int] = {}
    twice = set()
    for part in world.states[rank].parts:
        kind = world.snapshot.groups[part.group].desc
        twice.update({kind} & found.keys())
        found[kind] = next_of(world, part.group, rank)
    return {kind: count for kind, count in found.items() if kind not in twice and count != NEVER}
