"""Whether the ranks that met in a collective called the same one."""

from __future__ import annotations

from bisect import bisect_right
from collections import Counter, defaultdict
from collections.abc import Mapping
from typing import NamedTuple

from keepstep.attribution.hang.waiting import Meeting
from keepstep.attribution.hang.world import World, next_of, operation_of
from keepstep.records.flightrecorder import UNKNOWN, Operation, Part


class Dispute(NamedTuple):
    """Ranks that called something else than most did; on a tie all of them. `called`: what each rank called, where it is known.

    `out_of_order`: one side's operation is one of the other's at another place: the ranks have lost step.
    """

    odd: dict[int, Operation]
    called: dict[int, Operation]
    out_of_order: bool


class Standing(NamedTuple):
    """How far the members of a group are. `nexts`: of each the first collective that it has not completed, in order of number.

    `calls`: by sequence number, what members are known to have called (number), by rank.
    """

    nexts: list[int]
    calls: dict[int, dict[int, int]]


def standing_of(world: World, group: int) -> Standing:
    """The standing of a group; made once for all its meetings, which may be as many as it has members."""
    calls: dict[int, dict[int, int]] = defaultdict(dict)
    members = world.snapshot.groups[group].ranks
    for rank in members:
        part = world.parts[group].get(rank)
        if part is not None:
            for place, number in enumerate(part.recent):
                calls[part.since + place][rank] = number
    return Standing(sorted(next_of(world, group, rank) for rank in members), calls)


def completed_by(standing: Standing, sequence: int) -> int:
    """How many members have completed a collective."""
    return len(standing.nexts) - bisect_right(standing.nexts, sequence)


def dispute(world: World, meeting: Meeting, standing: Standing) -> Dispute | None:
    """What the members of a meeting disagree about; None when they agree, as far as dumps tell."""
    numbers = standing.calls.get(meeting.sequence, {}) | {r: world.heads[r].operation for r in meeting.waiting}
    operations = {rank: operation_of(world, number) for rank, number in sorted(numbers.items())}
    called = {rank: operation for rank, operation in operations.items() if _is_comparable(operation)}
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
