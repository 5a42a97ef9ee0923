"""What is kept of flight-recorder dumps: a few hundred bytes a rank and process group, however long the dumps are.

Sources make these from dumps, attribution compares them. Tables (`groups`, `operations`) hold what many ranks share; ranks refer to
them by index, so that a snapshot of 16,384 ranks stays small.
"""

from __future__ import annotations

from typing import NamedTuple

UNKNOWN = -1
"""A sequence number or operation that a dump does not tell."""


class Operation(NamedTuple):
    """A collective as far as all its ranks must agree on it.

    `name` is without the backend: "all_reduce". `elements`: of all tensors, on the side that is alike on every rank (input of a
    reduction, output of a gather); None where ranks may differ, as in an all-to-all, or where the dump does not say.
    `name` is "" for several operations that were issued as one.
    """

    name: str
    elements: int | None = None
    dtype: str | None = None


class Group(NamedTuple):
    """A process group. `ranks` are global, in the order of the group.

    `told`: a dump says who belongs to it, as NCCL's do and gloo's do not; else `ranks` are those that used it.
    """

    name: str
    desc: str
    ranks: tuple[int, ...]
    told: bool


class Part(NamedTuple):
    """How far a rank is with the collectives of a group. Sequence numbers count a group's collectives, the same on all ranks.

    `first_open`: lowest one that was enqueued and is not complete; `enqueued`, `completed`: highest ones; each UNKNOWN when there
    is none. `by_status`: the numbers rest on the recorder's summary, which does not tell collectives from transfers between two
    ranks. `recent`: operations (index) of the sequence numbers from `since` on, around the first open one; () when none is open.
    """

    group: int
    first_open: int
    enqueued: int
    completed: int
    by_status: bool
    has_transfers: bool
    since: int
    recent: tuple[int, ...]


class Transfer(NamedTuple):
    """A send or receive between this rank and the global rank `peer`."""

    group: int
    peer: int
    sends: bool


class Wait(NamedTuple):
    """An operation that is not complete and has none of its own stream before it: what the rank may be waiting in.

    `transfers` is () for a collective; a batch of sends and receives has several. `sequence` counts collectives or transfers.
    `started`: its kernel runs. `where`: the user's line that issued it, "" when the dump has no stacks.
    """

    group: int
    sequence: int
    operation: int
    transfers: tuple[Transfer, ...]
    started: bool
    where: str


class RankState(NamedTuple):
    """One rank's dump. `empty`: it holds no operation. `timed`: it tells when kernels start.

    `waits` in the order in which they were issued, at most a few. `open_transfers`: all that are not complete.
    `last`: the newest operation, complete or not; None when there is none.
    """

    rank: int
    file: str
    empty: bool
    timed: bool
    parts: tuple[Part, ...]
    waits: tuple[Wait, ...]
    open_transfers: tuple[Transfer, ...]
    last: Wait | None


class Snapshot(NamedTuple):
    """All dumps of one hang. `unreadable`: "file: reason". `expected`: ranks that must exist, from wherever that is known."""

    groups: list[Group]
    operations: list[Operation]
    ranks: list[RankState]
    expected: frozenset[int]
    unreadable: list[str]
    notes: list[str]
