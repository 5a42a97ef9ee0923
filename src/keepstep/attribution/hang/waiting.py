"""The graph of who waits for whom, and where it ends."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable
from typing import NamedTuple

from keepstep.attribution.hang.world import World, all_came, is_met, next_of
from keepstep.records.flightrecorder import Transfer, Wait

Node = int
"""A rank, or -1 - i for the i-th meeting."""


class Meeting(NamedTuple):
    """A collective that ranks wait in. `waiting`: those whose first open operation it is."""

    group: int
    sequence: int
    waiting: tuple[int, ...]
    wait: Wait


class Graph(NamedTuple):
    """`edges`: from a rank to the meeting it waits in or the ranks it waits for, from a meeting to ranks that have not come.

    A meeting leads to the one before it in its group too: who has not come to that has not come to this either.
    """

    meetings: list[Meeting]
    edges: dict[Node, list[Node]]


def meeting_node(index: int) -> Node:
    """The node of a meeting."""
    return -1 - index


def make_graph(world: World) -> Graph:
    """All edges, as many as ranks times groups at most."""
    by_group: dict[int, dict[int, list[int]]] = defaultdict(lambda: defaultdict(list))
    edges: dict[Node, list[Node]] = {}
    for rank, head in world.heads.items():
        if head.transfers:
            edges[rank] = sorted({t.peer for t in head.transfers if not is_met(world, rank, t)})
        else:
            by_group[head.group][head.sequence].append(rank)
    meetings: list[Meeting] = []
    for group, by_sequence in by_group.items():
        first = len(meetings)
        for sequence in sorted(by_sequence):
            waiting = tuple(by_sequence[sequence])
            meetings.append(Meeting(group, sequence, waiting, _clearest(world, waiting)))
            for rank in waiting:
                edges[rank] = [meeting_node(len(meetings) - 1)]
        _add_latecomers(world, meetings, first, edges)
    return Graph(meetings, edges)


def _clearest(world: World, waiting: Iterable[int]) -> Wait:
    """The wait of one of these ranks, if possible one that tells its operation."""
    return max((world.heads[rank] for rank in waiting), key=lambda wait: wait.operation >= 0)


def _add_latecomers(world: World, meetings: list[Meeting], first: int, edges: dict[Node, list[Node]]) -> None:
    """Edges from the meetings of one group, which begin at `first`, to members that have not come."""
    group = meetings[first].group
    everybody = world.snapshot.groups[group].ranks
    silent = [rank for rank in everybody if rank in world.silent]
    here_at = {rank: meeting.sequence for meeting in meetings[first:] for rank in meeting.waiting}
    members = sorted((here_at.get(r, next_of(world, group, r)), r) for r in everybody if r not in world.silent)
    at = 0
    before: Node | None = None
    for index in range(first, len(meetings)):
        meeting = meetings[index]
        late: list[Node] = [] if before is None else [before]
        if not all_came(world, meeting.wait):
            while at < len(members) and members[at][0] < meeting.sequence:
                late.append(members[at][1])
                at += 1
            # Those that come to it next and wait in something earlier of another group.
            here = at
            while here < len(members) and members[here][0] == meeting.sequence:
                rank = members[here][1]
                if not is_here(world, rank, meeting):
                    late.append(rank)
                here += 1
            # A rank that nothing is known of is blamed where nobody else can be.
            late = late or list(silent)
            before = meeting_node(index)
        else:
            late = []
        edges[meeting_node(index)] = late


def is_here(world: World, rank: int, meeting: Meeting) -> bool:
    """Whether a rank waits in a meeting."""
    head = world.heads.get(rank)
    return head is not None and not head.transfers and (head.group, head.sequence) == (meeting.group, meeting.sequence)


# ---- where it ends


def ends(world: World, graph: Graph) -> list[list[Node]]:
    """Sets of nodes that wait for nothing outside of themselves, each of one node or of a circle.

    A circle that only transfers close is opened: a send is seldom waited for, and a receive whose sender has gone on may be over.
    """
    edges = graph.edges
    for sends_only in (True, False):
        circles = [end for end in _sinks(edges) if len(end) > 1]
        for circle in circles:
            opened = edges | {node: _strong(world, edges, node, sends_only) for node in circle}
            if not is_circular(opened, set(circle)):
                edges = opened
    return _sinks(edges)


def _strong(world: World, edges: dict[Node, list[Node]], node: Node, sends_only: bool) -> list[Node]:
    """Where a node leads to, less the transfers that may not be waited for."""
    head = world.heads.get(node)
    if head is None or not head.transfers:
        return edges[node]
    return [peer for peer in edges[node] if not _is_weak(world, node, peer, head, sends_only)]


def _is_weak(world: World, rank: int, peer: int, head: Wait, sends_only: bool) -> bool:
    between = [t for t in head.transfers if t.peer == peer]
    if sends_only:
        return all(t.sends for t in between)
    state = world.states.get(peer)
    open_there = () if state is None else state.open_transfers
    return not any(Transfer(t.group, rank, not t.sends) in open_there for t in between)


def is_circular(edges: dict[Node, list[Node]], among: set[Node]) -> bool:
    """Whether some of these nodes wait for each other in a circle."""
    inside = {node: [other for other in edges.get(node, ()) if other in among] for node in among}
    return any(len(component) > 1 for component in _components(inside))


def _sinks(edges: dict[Node, list[Node]]) -> list[list[Node]]:
    """Components without an edge to another one."""
    components = _components(edges)
    number = {node: n for n, members in enumerate(components) for node in members}
    return [
        members
        for n, members in enumerate(components)
        if all(number[other] == n for node in members for other in edges.get(node, ()))
    ]


def _components(edges: dict[Node, list[Node]]) -> list[list[Node]]:
    """Strongly connected components (Tarjan's algorithm, without recursion)."""
    order: dict[Node, int] = {}
    low: dict[Node, int] = {}
    done: set[Node] = set()
    stack: list[Node] = []
    found: list[list[Node]] = []
    nothing: list[Node] = []
    for root in list(edges):
        work = [] if root in order else [(root, 0)]
        while work:
            node, at = work.pop()
            following = edges.get(node, nothing)
            if at == 0:
                order[node] = low[node] = len(order)
                stack.append(node)
            elif following[at - 1] not in done:
                low[node] = min(low[node], low[following[at - 1]])
            while at < len(following):
                other = following[at]
                at += 1
                if other not in order:
                    work += [(node, at), (other, 0)]
                    break
                if other not in done:
                    low[node] = min(low[node], order[other])
            else:
                if low[node] == order[node]:
                    members: list[Node] = []
                    while not members or members[-1] != node:
                        members.append(stack.pop())
                    done.update(members)
                    found.append(members)
    return found


def waiters_of(graph: Graph) -> dict[int, list[Node]]:
    """By rank, the meetings that wait for it directly, and the ranks that do in sends and receives."""
    found: dict[int, list[Node]] = defaultdict(list)
    for node, targets in graph.edges.items():
        for target in targets:
            if target >= 0:
                found[target].append(node)
    return found
