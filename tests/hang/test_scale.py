"""Deciding takes time in proportion to ranks and groups, whatever the ranks wait in."""

from __future__ import annotations

import random
import time
from collections.abc import Callable

import pytest

from keepstep.attribution.hang import find_culprits
from keepstep.records.flightrecorder import UNKNOWN, Group, Operation, Part, RankState, Snapshot, Transfer, Wait

RANKS, NODE = 8192, 8
WORLD, TWIN = 0, 1
LIMIT_S = 8.0
"""Of processor time. It takes 0.1 to 1 s; what is quadratic takes minutes."""


def part(group: int, opened: int, done: int, operation: int) -> Part:
    return Part(group, opened, max(opened, done), done, False, False, opened, () if opened == UNKNOWN else (operation,))


def rank_of(rank: int, *waits: tuple[int, int, int], done: int = 0) -> RankState:
    """A rank that waits in (group, sequence, operation), the first of these first."""
    opened = {group: (sequence, operation) for group, sequence, operation in waits}
    groups = [WORLD, TWIN, 2 + rank // NODE]
    parts = [
        part(g, *(opened[g][0], opened[g][0] - 1, opened[g][1]) if g in opened else (UNKNOWN, done, 0)) for g in groups
    ]
    return RankState(rank, "", False, False, tuple(parts), tuple(Wait(*w, (), False, "") for w in waits), (), None)


def ring(rank: int) -> RankState:
    """A rank that receives from the next one, which waits in something else."""
    transfer = Transfer(WORLD, (rank + 1) % RANKS, False)
    return RankState(rank, "", False, False, (), (Wait(WORLD, 1, 0, (transfer,), False, ""),), (transfer,), None)


chance = random.Random(3)
JOBS: dict[str, Callable[[int], RankState]] = {
    "half have not come": lambda rank: rank_of(rank, (WORLD, 9, 0)) if rank % 2 else rank_of(rank, done=8),
    "each in another collective": lambda rank: rank_of(rank, (WORLD, 1 + rank, 0), (2 + rank // NODE, 1 + rank % 5, 0)),
    "at random": lambda rank: rank_of(
        rank, (chance.randrange(2), chance.randrange(1, 99), 0), (2 + rank // NODE, 3, 0)
    ),
    "two orders": lambda rank: rank_of(rank, (rank % 2, 5, 0), (1 - rank % 2, 5, 0), done=4),
    "two operations": lambda rank: rank_of(rank, (WORLD, 5, rank % 2)),
    "each another size": lambda rank: rank_of(rank, (WORLD, 5, rank)),
    "a ring of receives": ring,
}


@pytest.mark.parametrize("name", JOBS)
def test_many_ranks(name: str) -> None:
    world = tuple(range(RANKS))
    groups = [Group("0", "default_pg", world, True), Group("1", "twin", world, True)]
    groups += [Group(str(2 + n), "node", world[n * NODE : (n + 1) * NODE], True) for n in range(RANKS // NODE)]
    operations = [Operation("all_reduce", size, "Float") for size in range(RANKS)]
    snapshot = Snapshot(groups, operations, [JOBS[name](rank) for rank in world], frozenset(), [], [])
    begin = time.process_time()
    hang = find_culprits(snapshot)
    assert time.process_time() - begin < LIMIT_S
    assert hang.culprits
