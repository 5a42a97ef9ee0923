"""Look-ups over a snapshot: who belongs to a group, how far each of them is, what each waits in."""

from __future__ import annotations

import re
from typing import NamedTuple

from keepstep.records.flightrecorder import UNKNOWN, Group, Operation, Part, RankState, Snapshot, Transfer, Wait

NEVER = -1
"""Next operation of a rank that a dump tells nothing about: before all."""

_ONE_SIDED = re.compile(r"_?broadcast|_?reduce(?!_?scatter)|gather|scatter")
"""Collectives that a rank can complete although others have not come to it."""


class World(NamedTuple):
    """`states` by rank. `parts` by group, then rank. `heads`: what each rank waits in. `silent`: ranks nothing is known of."""

    snapshot: Snapshot
    states: dict[int, RankState]
    parts: list[dict[int, Part]]
    heads: dict[int, Wait]
    silent: frozenset[int]
    completed: list[int]
    """By group, the highest collective that some member has completed."""


def make_world(snapshot: Snapshot) -> World:
    """Arrange a snapshot for comparison."""
    states = {state.rank: state for state in snapshot.ranks}
    parts: list[dict[int, Part]] = [{} for _ in snapshot.groups]
    for state in snapshot.ranks:
        for part in state.parts:
            parts[part.group][state.rank] = part
    for number, by_rank in enumerate(parts):
        if any(part.has_transfers for part in by_rank.values()):
            # Numbers of the recorder's summary may count transfers here, which no two ranks have alike.
            parts[number] = {rank: part for rank, part in by_rank.items() if not part.by_status}
    heard = {state.rank for state in snapshot.ranks if state.parts or state.waits}
    everybody = snapshot.expected.union(states, *(group.ranks for group in snapshot.groups))
    completed = [max((part.completed for part in by_rank.values()), default=UNKNOWN) for by_rank in parts]
    return World(snapshot, states, parts, _heads(states), frozenset(everybody - heard), completed)


def group_of(world: World, wait: Wait) -> Group:
    """The group of an operation."""
    return world.snapshot.groups[wait.group]


def operation_of(world: World, number: int) -> Operation:
    """An operation by its number; nameless when the dump does not tell it."""
    return Operation("") if number == UNKNOWN else world.snapshot.operations[number]


def next_of(world: World, group: int, rank: int) -> int:
    """Sequence number of the first collective of a group that a rank has not completed; NEVER when unknown."""
    part = world.parts[group].get(rank)
    if part is None:
        return NEVER
    return part.first_open if part.first_open != UNKNOWN else part.enqueued + 1


def enqueued_of(world: World, group: int, rank: int) -> int:
    """Highest collective of a group that a rank has enqueued; UNKNOWN."""
    part = world.parts[group].get(rank)
    return UNKNOWN if part is None else part.enqueued


def all_came(world: World, wait: Wait) -> bool:
    """Whether all members have come to a collective, as one of them has completed it, and it cannot without all."""
    name = operation_of(world, wait.operation).name
    return world.completed[wait.group] >= wait.sequence and not _ONE_SIDED.match(name)


def is_met(world: World, rank: int, transfer: Transfer) -> bool:
    """Whether the other end of a transfer waits in it too."""
    head = world.heads.get(transfer.peer)
    return head is not None and Transfer(transfer.group, rank, not transfer.sends) in head.transfers


def _heads(states: dict[int, RankState]) -> dict[int, Wait]:
    """The first open operation of each rank.

    Transfers that both ends wait in say nothing, and may even be over (of a batch torch marks only its last entry as complete,
    pytorch issue 137969): both ends then wait in what comes next on another stream.
    """
    position = {rank: 0 for rank, state in states.items() if state.waits}
    heads = {rank: states[rank].waits[0] for rank in position}
    while True:
        met = [rank for rank, at in position.items() if at + 1 < len(states[rank].waits) and _all_met(rank, heads)]
        if not met:
            return heads
        for rank in met:
            position[rank] += 1
        heads |= {rank: states[rank].waits[position[rank]] for rank in met}


def _all_met(rank: int, heads: dict[int, Wait]) -> bool:
    transfers = heads[rank].transfers
    return bool(transfers) and all(
        t.peer in heads and Transfer(t.group, rank, not t.sends) in heads[t.peer].transfers for t in transfers
    )
