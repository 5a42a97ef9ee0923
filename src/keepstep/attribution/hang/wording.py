"""Sentences about ranks and operations."""

from __future__ import annotations

from collections.abc import Sequence

from keepstep.attribution.hang.world import World, group_of, operation_of
from keepstep.records.flightrecorder import Group, Operation, Wait

SHOWN_RANKS = 8


def group_name(group: Group) -> str:
    """ "74 (EXPERT_MODEL_PARALLEL_GROUP)"; only the name where there is no description."""
    return f"{group.name} ({group.desc})" if group.desc not in ("", "undefined", group.name) else group.name


def operation_name(operation: Operation) -> str:
    """ "all_reduce"; a word for what has no name of its own."""
    return operation.name or "an operation"


def operation_text(operation: Operation) -> str:
    """ "all_reduce of 1,024 Float"."""
    name = operation_name(operation)
    if operation.elements is None:
        return f"{name} of {operation.dtype}" if operation.dtype else name
    return f"{name} of {operation.elements:,} {operation.dtype or 'elements'}"


def wait_text(world: World, wait: Wait, *, line: bool = True) -> str:
    """ "all_reduce 12 of group 0 (default_pg), at train.py:9 in step"."""
    name = operation_name(operation_of(world, wait.operation))
    if wait.transfers:
        ends = {f"{'to' if t.sends else 'from'} rank {t.peer}" for t in wait.transfers}
        name = f"{name} {ranks_text(sorted(ends))}"
    place = f", at {wait.where}" if wait.where and line else ""
    return f"{name} {wait.sequence} of group {group_name(group_of(world, wait))}{place}"


def ranks_text(ranks: Sequence[object]) -> str:
    """ "3, 5, 7", and how many more."""
    names = [str(rank) for rank in ranks[:SHOWN_RANKS]]
    if len(ranks) > SHOWN_RANKS:
        names.append(f"{len(ranks) - SHOWN_RANKS} more")
    return ", ".join(names)


def count_text(count: int, noun: str = "rank") -> str:
    """ "1 rank", "2 ranks"."""
    return f"{count} {noun}" if count == 1 else f"{count} {noun}s"
