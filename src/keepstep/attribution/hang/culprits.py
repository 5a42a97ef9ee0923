"""Where the waiting ends, and what that means: the culprits of a hang."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import NamedTuple

from keepstep.attribution.hang.agreement import Standing, agree, completed_by, dispute, standing_of
from keepstep.attribution.hang.circles import out_of_step, place_of
from keepstep.attribution.hang.waiting import Graph, Meeting, Node, ends, is_here, make_graph, waiters_of
from keepstep.attribution.hang.wording import (
    count_text,
    group_name,
    operation_name,
    operation_text,
    ranks_text,
    wait_text,
)
from keepstep.attribution.hang.world import World, enqueued_of, make_world, next_of, operation_of
from keepstep.records.cycle import RankPlace
from keepstep.records.flightrecorder import UNKNOWN, Operation, Snapshot
from keepstep.records.hang import Culprit, Hang, HangKind

KINDS: tuple[HangKind, ...] = ("absent_rank", "desync", "mismatch", "slow_rank")
"""Strongest first: a hang has the kind of its first culprit."""
MAX_NOTES = 20


class Accused(NamedTuple):
    """A rank, why, and how many ranks wait for it directly. `meeting`: what they wait in."""

    kind: HangKind
    rank: int
    why: str
    group: int | None
    operation: str | None
    sequence: int | None
    waiting: int


def find_culprits(snapshot: Snapshot, places: Mapping[int, RankPlace] | None = None) -> Hang:
    """The ranks that a hang waits for. `places`: where ranks ran, from the cycle's record."""
    world = make_world(snapshot)
    graph = make_graph(world)
    notes: list[str] = []
    accused: dict[int, Accused] = {}
    for found in _accused(world, graph, notes):
        known = accused.get(found.rank)
        if known is None or _weight(found) < _weight(known):
            accused[found.rank] = found
    missing = _missing(world)
    ordered = sorted(accused.values(), key=_weight) or _quiet(world, missing)
    seen = [state.rank for state in snapshot.ranks]
    if not world.heads:
        notes = ["no rank has an unfinished operation"]
    elif ordered:
        notes = []
    if 2 * len(missing) > len(seen) + len(missing):
        notes.append(
            f"{len(missing)} ranks have no dump, or an empty one: who waits for whom is known of the others only"
        )
    return Hang(
        kind=ordered[0].kind if ordered else "no_fault",
        culprits=[_culprit(world, one, places or {}) for one in ordered],
        ranks_seen=seen,
        ranks_missing=missing,
        notes=[*snapshot.unreadable[:MAX_NOTES], *snapshot.notes[:MAX_NOTES], *notes[:MAX_NOTES]],
    )


def _weight(accused: Accused) -> tuple[int, int, int]:
    return KINDS.index(accused.kind), -accused.waiting, accused.rank


def _missing(world: World) -> list[int]:
    """Ranks without a dump, and with an empty one, unless all are: then the job had nothing open."""
    missing = world.silent - world.states.keys()
    empty = {rank for rank, state in world.states.items() if state.empty}
    return sorted(missing | (empty if len(empty) < len(world.states) else world.silent & empty))


def _quiet(world: World, missing: list[int]) -> list[Accused]:
    """Where waiting leads nowhere, as when dumps do not tell who belongs to a group: the few ranks that have nothing to tell."""
    others = len(world.heads)
    if 2 * len(missing) >= others:
        return []
    return [
        Accused(
            "absent_rank",
            rank,
            f"{count_text(others, 'rank')} wait, and {_nothing_from(world, rank)}",
            None,
            None,
            None,
            others,
        )
        for rank in missing
    ]


def _nothing_from(world: World, rank: int) -> str:
    return "there is no dump of this rank" if rank not in world.states else "the dump of this rank is empty"


def _culprit(world: World, accused: Accused, places: Mapping[int, RankPlace]) -> Culprit:
    place = places.get(accused.rank)
    gpu = None if place is None else place.gpu_uuid or place.pci
    return Culprit(
        rank=accused.rank,
        node=None if place is None else place.node,
        why=accused.why if gpu is None else f"{accused.why}; GPU {gpu}",
        process_group=None if accused.group is None else group_name(world.snapshot.groups[accused.group]),
        collective=accused.operation,
        sequence=accused.sequence,
    )


# ---- where the waiting ends


def _accused(world: World, graph: Graph, notes: list[str]) -> Iterator[Accused]:
    waiters = waiters_of(graph)
    standings: dict[int, Standing] = {}
    for end in ends(world, graph):
        if len(end) > 1:
            yield from _circle(world, graph, end)
        elif end[0] >= 0:
            if end[0] in waiters:
                yield _rank_at_the_end(world, graph, end[0], waiters[end[0]])
        else:
            meeting = graph.meetings[-1 - end[0]]
            standing = standings.get(meeting.group) or standing_of(world, meeting.group)
            standings[meeting.group] = standing
            yield from _meeting_at_the_end(world, graph, meeting, standing, waiters, notes)


def _largest(graph: Graph, waiters: list[Node]) -> Meeting | None:
    """Of the meetings among these the one in which most ranks wait, the earliest of those."""
    meetings = (graph.meetings[-1 - node] for node in waiters if node < 0)
    return max(meetings, key=lambda m: len(m.waiting), default=None)


def _rank_at_the_end(world: World, graph: Graph, rank: int, waiters: list[Node]) -> Accused:
    """A rank that others wait for and that waits for nobody."""
    state, head = world.states.get(rank), world.heads.get(rank)
    if state is None or (state.empty and not state.parts):
        what = _nothing_from(world, rank)
    elif head is not None:
        what = f"this rank is in {wait_text(world, head)}, which nobody else delays"
    else:
        what = "this rank has nothing unfinished"
        what += f"; the last it did was {wait_text(world, state.last)}" if state.last is not None else ""
        what += "; its dump holds no operation" if state.empty else ""
    meeting = _largest(graph, waiters)
    if meeting is None:
        return _sender_at_the_end(world, rank, waiters, what)
    return _absent(world, rank, meeting, what)


def _absent(world: World, rank: int, meeting: Meeting, what: str) -> Accused:
    """A rank that has not come to a meeting. When it has issued it, it is slow."""
    enqueued = enqueued_of(world, meeting.group, rank)
    operation = operation_of(world, meeting.wait.operation)
    who = count_text(len(meeting.waiting), "other rank")
    verb = "waits" if len(meeting.waiting) == 1 else "wait"
    if enqueued == UNKNOWN:
        far = "it has not come there"
    elif enqueued < meeting.sequence:
        far = f"it has issued up to {enqueued} there"
    else:
        far = f"it has issued that, but completed only up to {next_of(world, meeting.group, rank) - 1}"
    why = f"{who} {verb} in {wait_text(world, meeting.wait)}, and {far}; {what}"
    kind: HangKind = "slow_rank" if enqueued >= meeting.sequence else "absent_rank"
    named = operation.name or None
    return Accused(kind, rank, why, meeting.group, named, meeting.sequence, len(meeting.waiting))


def _sender_at_the_end(world: World, rank: int, waiters: list[Node], what: str) -> Accused:
    """A rank that others wait for only in sends and receives; who receives is the better witness."""

    def only_sends(other: int) -> bool:
        return all(t.sends for t in world.heads[other].transfers if t.peer == rank)

    other = min(waiters, key=lambda node: (only_sends(node), node))
    head = world.heads[other]
    why = f"rank {other} waits in {wait_text(world, head)}; {what}"
    operation = operation_of(world, head.operation).name or None
    return Accused("absent_rank", rank, why, head.group, operation, head.sequence, len(waiters))


def _meeting_at_the_end(
    world: World, graph: Graph, meeting: Meeting, standing: Standing, waiters: dict[int, list[Node]], notes: list[str]
) -> Iterator[Accused]:
    """A collective that all members have come to, which is not over for some of them."""
    disagree = dispute(world, meeting, standing)
    if disagree is not None:
        kind: HangKind = "desync" if disagree.out_of_order else "mismatch"
        examples = {theirs: other for other, theirs in reversed(disagree.called.items())}
        for rank, operation in sorted(disagree.odd.items()):
            theirs = next(one for one in examples if not agree(one, operation))
            yield _differs(world, meeting, kind, rank, operation, examples[theirs], theirs)
        return
    done = completed_by(standing, meeting.sequence)
    timed = all(rank in world.states and world.states[rank].timed for rank in meeting.waiting)
    unstarted = [rank for rank in meeting.waiting if not world.heads[rank].started]
    if done and len(meeting.waiting) <= done:
        for rank in meeting.waiting:
            yield _stuck(world, graph, meeting, rank, done, waiters)
    elif timed and not done and 0 < len(unstarted) < len(meeting.waiting):
        for rank in unstarted:
            yield _unstarted(world, meeting, rank, len(meeting.waiting) - len(unstarted))
    elif not world.snapshot.groups[meeting.group].told:
        for rank in meeting.waiting:
            ahead = _largest(graph, waiters.get(rank, []))
            if ahead is not None:
                what = (
                    f"it is in {wait_text(world, world.heads[rank])}, and no dump tells who else belongs to that group"
                )
                yield _absent(world, rank, ahead, what)
    else:
        here = count_text(len(meeting.waiting))
        notes.append(
            f"{here} in {wait_text(world, meeting.wait, line=False)}: all members have come and nobody lags. "
            "If this lasts, suspect the network between them, or a kernel before it that does not end"
        )


def _stuck(
    world: World, graph: Graph, meeting: Meeting, rank: int, done: int, waiters: dict[int, list[Node]]
) -> Accused:
    """A rank that has not completed what others have; it may have fallen behind in what it issues, too."""
    others = f"{done} of {count_text(done + len(meeting.waiting))} have completed it"
    what = f"it does not get over {wait_text(world, world.heads[rank])}, although {others}: its GPU or the process is stuck"
    ahead = _largest(graph, waiters.get(rank, []))
    if ahead is not None:
        return _absent(world, rank, ahead, what)
    operation = operation_of(world, meeting.wait.operation).name or None
    return Accused("slow_rank", rank, f"this rank: {what}", meeting.group, operation, meeting.sequence, 0)


def _unstarted(world: World, meeting: Meeting, rank: int, started: int) -> Accused:
    why = (
        f"the kernel of {wait_text(world, meeting.wait, line=False)} runs on {count_text(started, 'other rank')}; "
        "this rank has issued it, but its GPU has not come to it"
    )
    operation = operation_of(world, meeting.wait.operation).name or None
    return Accused("slow_rank", rank, why, meeting.group, operation, meeting.sequence, started)


def _differs(
    world: World, meeting: Meeting, kind: HangKind, rank: int, mine: Operation, other: int, theirs: Operation
) -> Accused:
    def at_line(who: int) -> str:
        head = world.heads.get(who)
        return f", at {head.where}" if head is not None and head.where and is_here(world, who, meeting) else ""

    why = (
        f"as collective {meeting.sequence} of group {group_name(world.snapshot.groups[meeting.group])} this rank calls "
        f"{operation_text(mine)}{at_line(rank)}; others, as rank {other}, call {operation_text(theirs)}{at_line(other)}"
    )
    why += ": they have lost step with each other" if kind == "desync" else ""
    return Accused(kind, rank, why, meeting.group, operation_name(mine), meeting.sequence, len(meeting.waiting))


def _circle(world: World, graph: Graph, end: list[Node]) -> Iterator[Accused]:
    """Ranks that wait for each other in different operations."""
    ranks = sorted(node for node in end if node >= 0)
    odd = out_of_step(world, graph, end)
    examples = {place_of(world, rank): rank for rank in reversed(ranks)}
    for rank in odd:
        head = world.heads[rank]
        across = next((r for place, r in examples.items() if place != place_of(world, rank)), rank)
        why = (
            f"ranks wait for each other: this rank in {wait_text(world, head)}; "
            f"rank {across} in {wait_text(world, world.heads[across])} (in the circle: {ranks_text(ranks)})"
        )
        operation = operation_of(world, head.operation).name or None
        yield Accused("desync", rank, why, head.group, operation, head.sequence, len(ranks) - len(odd))
