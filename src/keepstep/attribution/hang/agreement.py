"""Whether the ranks that met in a collective called the same one."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping
from typing import NamedTuple

from keepstep.attribution.hang.waiting import Meeting
from keepstep.attribution.hang.world import World, operation_of
from keepstep.records.flightrecorder import UNKNOWN, Operation, Part


class Dispute(NamedTuple):
    """Ranks that called something else than `others` did, which most ranks called; on a tie all ranks of both sides.

    `out_of_order`: one side's operation is one of the other's at another place: the ranks have lost step.
    """

    odd: dict[int, Operation]
    others: Operation
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
    return Dispute(odd, leading[0], _out_of_order(world, meeting, odd, leading[0], set(called) - set(odd)))


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
    world: World, meeting: Meeting, odd: Mapping[int, Operation], others: Operation, agreeing: set[int]
) -> bool:
    """Whether a rank that differs is ahead of, or behind, an agreeing one, rather than wrong about this one operation."""
    parts, sequence = world.parts[meeting.group], meeting.sequence
    for rank, operation in odd.items():
        part = parts.get(rank)
        for other in sorted(agreeing or odd.keys() - {rank})[:4]:
            if part is None or other not in parts:
                continue
            following = _at(part, sequence + 1), _at(parts[other], sequence + 1)
            if UNKNOWN not in following and agree(*(operation_of(world, number) for number in following)):
                continue
            if operation in _around(world, parts[other], sequence) or others in _around(
                world, part, sequence, later=True
            ):
                return True
    return False


def _around(world: World, part: Part, sequence: int, *, later: bool = False) -> list[Operation]:
    """What a rank called before and after a collective, or only after it."""
    places = [n for n, number in enumerate(part.recent) if number != UNKNOWN and part.since + n != sequence]
    return [operation_of(world, part.recent[n]) for n in places if not later or part.since + n > sequence]
