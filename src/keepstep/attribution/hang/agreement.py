"""Whether the ranks that met in a collective called the same one."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping
from typing import NamedTuple

from keepstep.attribution.hang.waiting import Meeting
from keepstep.attribution.hang.world import World, operation_of
from keepstep.records.flightrecorder import UNKNOWN, Operation, Part


class Dispute(NamedTuple):
    """Ranks that called something else than most did; on a tie all of them. `called`: what each rank called, where that is known.

    `out_of_order`: one side's operation is one of the other's at another place: the ranks have lost step.
    """

    odd: dict[int, Operation]
    called: dict[int, Operation]
    out_of_order: bool


def dispute(world: World, meeting: Meeting) -> Dispute | None:
    """What the members of a meeting disagree about; None when they agree, as far as dumps tell."""
    called = {rank: operation_of(world, number) for rank, number in _called(world, meeting).items()}
    called = {rank: operation for rank, operation in called.items() if _is_comparable(operation)}
    counts = Counter(called.values()).most_common()
    if len(counts) < 2 or all(agree(counts[0][0], other) for other, _ in counts[1:]):
        return None
    most = counts[0][1]
    leading = [operation for operation, count in counts if count == most]
    tied = any(not agree(leading[0], other) for other in leading[1:])
    odd = {rank: op for rank, op in called.items() if tied or not agree(op, leading[0])}
    return Dispute(odd, called, _out_of_order(world, meeting, odd, called))


def agree(one: Operation, other: Operation) -> bool:
    """Whether two ranks may be in one collective with these. What one of them does not tell is no difference."""
    return (
        one.name == other.name
        and (one.elements is None or other.elements is None or one.elements == other.elements)
        and (one.dtype is None or other.dtype is None or one.dtype == other.dtype)
    )


def _is_comparable(operation: Operation) -> bool:
    """Operations that were issued as one are recorded differently on ranks that do the same (pytorch issue 139280)."""
    return operation.name != "" and "coalesced" not in operation.name


def _called(world: World, meeting: Meeting) -> dict[int, int]:
    called: dict[int, int] = {}
    parts = world.parts[meeting.group]
    for rank in world.snapshot.groups[meeting.group].ranks:
        part = parts.get(rank)
        if part is not None:
            called[rank] = _at(part, meeting.sequence)
    called |= {rank: world.heads[rank].operation for rank in meeting.waiting}
    return {rank: number for rank, number in called.items() if number != UNKNOWN}


def _at(part: Part, sequence: int) -> int:
    place = sequence - part.since
    return part.recent[place] if 0 <= place < len(part.recent) else UNKNOWN


def _out_of_order(
    world: World, meeting: Meeting, odd: Mapping[int, Operation], called: Mapping[int, Operation]
) -> bool:
    """Whether a rank that differs is ahead of, or behind, another one, rather than wrong about this one operation."""
    parts, sequence = world.parts[meeting.group], meeting.sequence
    usual = sorted(called.keys() - odd.keys()) or sorted(odd)
    for rank, mine in odd.items():
        for other in [r for r in usual[:4] if r in parts and rank in parts and not agree(called[r], mine)]:
            following = _at(parts[rank], sequence + 1), _at(parts[other], sequence + 1)
            if UNKNOWN not in following and agree(*(operation_of(world, number) for number in following)):
                continue
            theirs = called[other]
            if mine in _after(world, parts[other], sequence) or theirs in _after(world, parts[rank], sequence):
                return True
            if mine in _before(world, parts[other], sequence) and theirs in _before(world, parts[rank], sequence):
                return True
    return False


def _before(world: World, part: Part, sequence: int) -> list[Operation]:
    return _recent(world, part, range(part.since, sequence))


def _after(world: World, part: Part, sequence: int) -> list[Operation]:
    return _recent(world, part, range(sequence + 1, part.since + len(part.recent)))


def _recent(world: World, part: Part, sequences: range) -> list[Operation]:
    numbers = [_at(part, sequence) for sequence in sequences]
    return [operation_of(world, number) for number in numbers if number != UNKNOWN]
