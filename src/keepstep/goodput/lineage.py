"""The surviving history: which steps of each cycle still count after what later cycles restored."""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Sequence
from itertools import pairwise

import msgspec

from keepstep.goodput.facts import Commit, CycleFacts, CycleKey
from keepstep.records.timeline import Mark


class Rollback(msgspec.Struct, frozen=True):
    """The history went back to `step` after the cycle `blamed` ended; cycles up to and including it are concerned."""

    step: int
    blamed: CycleKey


class Lost(msgspec.Struct, frozen=True):
    """Training from `begin_ns` to `end_ns` whose steps did not survive; `blamed` is the cycle whose end took them."""

    begin_ns: int
    end_ns: int
    blamed: CycleKey


class Training(msgspec.Struct, frozen=True):
    """When a cycle trained, and whether a fault ended it (then the step it was in is lost too)."""

    begin_ns: int
    end_ns: int
    by_fault: bool


def rollbacks(cycles: Sequence[CycleFacts], marks: Sequence[Mark], *, failed: bool) -> list[Rollback]:
    """What the history went back to, oldest first.

    Every cycle but the first goes back to the step it began from. When the run failed with a fault and keeps
    checkpoints, nothing after its newest durable checkpoint can survive, so the end is one more way back, to that
    checkpoint.
    """
    result: list[Rollback] = []
    for before, cycle in pairwise(cycles):
        if cycle.went_back_to is not None:
            result.append(Rollback(cycle.went_back_to, before.key))
    keeps_checkpoints = any(cycle.commits or cycle.restored_step is not None for cycle in cycles)
    if failed and keeps_checkpoints and cycles[-1].fault is not None:
        result.append(Rollback(committed_step(cycles, marks, result) or 0, cycles[-1].key))
    return result


def surviving_step(cycle: CycleFacts, backs: Sequence[Rollback]) -> int | None:
    """Highest step of `cycle` that survives, or None when nothing after it went back."""
    return min((back.step for back in backs if back.blamed >= cycle.key), default=None)


def surviving_commits(cycles: Sequence[CycleFacts], marks: Sequence[Mark], backs: Sequence[Rollback]) -> list[Commit]:
    """Commits on the surviving lineage that no restore has refused."""
    refused = {m.attrs.get("checkpoint") or (m.cycle, m.attrs.get("step")) for m in marks if m.kind == "quarantined"}
    result = []
    for cycle in cycles:
        limit = surviving_step(cycle, backs)
        result += [
            commit
            for commit in cycle.commits
            if (limit is None or commit.step <= limit)
            and (commit.checkpoint or (cycle.cycle, commit.step)) not in refused
        ]
    return result


def committed_step(cycles: Sequence[CycleFacts], marks: Sequence[Mark], backs: Sequence[Rollback]) -> int | None:
    """Newest durable step of the surviving lineage: committed here, or restored from disk or an object store."""
    steps = [commit.step for commit in surviving_commits(cycles, marks, backs)]
    for cycle in cycles:
        limit = surviving_step(cycle, backs)
        if (
            cycle.durable_restore
            and cycle.restored_step is not None
            and (limit is None or cycle.restored_step <= limit)
        ):
            steps.append(cycle.restored_step)
    return max(steps, default=None)


def lost_training(cycle: CycleFacts, training: Training, backs: Sequence[Rollback]) -> list[Lost]:
    """Parts of the training of `cycle` that did not survive, each with the cycle whose end took it, latest part first.

    A part is given to the first rollback that passed it: what was lost already cannot be lost again.
    """
    kept = cycle.completed
    edge_ns = training.end_ns
    result: list[Lost] = []
    if training.by_fault and kept is not None:
        begin_ns = step_time(cycle, kept, training)
        result.append(Lost(begin_ns, edge_ns, cycle.key))
        edge_ns = begin_ns
    for back in backs:
        if back.blamed >= cycle.key and (kept is None or back.step < kept):
            begin_ns = min(edge_ns, step_time(cycle, back.step, training))
            result.append(Lost(begin_ns, edge_ns, back.blamed))
            kept, edge_ns = back.step, begin_ns
    return [lost for lost in result if lost.begin_ns < lost.end_ns]


def step_time(cycle: CycleFacts, step: int, training: Training) -> int:
    """When `step` steps were complete, in UTC nanoseconds within `training`.

    Exact where a mark says so; else on the straight line between the neighbours, rounded down. After the last mark
    the neighbour is the end of training, taken as the moment when one more step than the highest known would have
    been complete: productive time is then never overstated. With no mark of a lower step the answer is the begin of
    training.
    """
    begin_ns, end_ns = training.begin_ns, training.end_ns
    counts = sorted(cycle.steps_ns)
    reached_ns: list[int] = []
    floor_ns = begin_ns
    for count in counts:  # a later step is never complete before an earlier one, whatever the clocks said
        floor_ns = max(floor_ns, min(cycle.steps_ns[count], end_ns))
        reached_ns.append(floor_ns)
    index = bisect_left(counts, step)
    if index < len(counts) and counts[index] == step:
        return reached_ns[index]
    if index == 0:
        return begin_ns
    low = counts[index - 1]
    low_ns = reached_ns[index - 1]
    if index < len(counts):
        high, high_ns = counts[index], reached_ns[index]
    else:
        high, high_ns = max(step, cycle.completed or 0) + 1, end_ns
    staged_ns = min((commit.staged_ns for commit in cycle.commits if commit.step == step), default=None)
    if staged_ns is not None:
        return max(low_ns, min(staged_ns, high_ns))
    low_ns = max(low_ns, min(cycle.resumed_ns.get(low, low_ns), high_ns))
    return low_ns + (step - low) * (high_ns - low_ns) // (high - low)
