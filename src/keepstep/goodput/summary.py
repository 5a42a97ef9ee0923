"""The goodput record of a run: the partition in seconds, counts, and the cost of each cycle."""

from __future__ import annotations

import statistics
from collections.abc import Sequence
from itertools import pairwise

import msgspec

from keepstep.goodput.facts import CycleFacts
from keepstep.goodput.lineage import committed_step, surviving_commits, surviving_step
from keepstep.goodput.losses import job_losses, sizes_of
from keepstep.goodput.pace import pace_of
from keepstep.goodput.partition import (
    RECOVERY_PHASES,
    START_PHASES,
    History,
    Partition,
    partition_history,
    read_history,
)
from keepstep.goodput.verified import Verified
from keepstep.records.cycle import (
    DURABLE,
    CheckpointCounts,
    Cycle,
    CyclePhases,
    Goodput,
    RestartCounts,
    StepCounts,
)
from keepstep.records.timeline import Mark

NS_PER_S = 1_000_000_000


def summarise(
    run_id: str,
    attempt: int,
    marks: Sequence[Mark],
    cycles: Sequence[Cycle],
    now_ns: int | None = None,
    *,
    whole_history: bool = False,
    verified: Verified | None = None,
    price: float | None = None,
) -> Goodput:
    """Build `keepstep.goodput/1` for `attempt`, or up to it over all attempts in `marks` with `whole_history`.

    `ettr` is productive time over wall-clock without `queue`. `lost_by_cause` has the seconds of every recovery
    (detect to the end of first_step) and of rolled-back training, charged to the cause of the fault of the cycle that
    failed; "startup" is the start of the first cycle of an attempt, "none" a restart without a recorded fault. init,
    drain, ckpt_block and other are charged to nothing. `cycles` are the cycle records; their phases are computed anew
    from `marks`. Time is counted to `now_ns` while the run has not ended, see `partition`. `verified`: what people found
    about its actions, for the false-positive tax; `price` in dollars per GPU-hour. Raises ValueError when `marks` has no
    mark of `attempt`.
    """
    history = read_history(marks)
    part = partition_history(history, now_ns=now_ns, attempt=attempt, whole_history=whole_history)
    own = [facts for facts in history.cycles if whole_history or facts.attempt == attempt]
    spent = _spent_ns(part)
    sizes = sizes_of(cycles)
    pace = pace_of(own, {key: size.gpus for key, size in sizes.items()})
    losses = job_losses(part, sizes, pace=pace, verified=verified, price=price)
    straggler, wrong = losses.parts["straggler"], losses.parts["false_positive"]
    seconds: dict[str, float | None] = {name: ns / NS_PER_S for name, ns in part.phases_ns.items()}
    if not part.reports_steps:
        seconds["productive"] = None
    return Goodput(
        run_id=run_id,
        attempt=attempt,
        wall_ns=part.wall_ns,
        phases_ns=part.phases_ns,
        wall_s=part.wall_ns / NS_PER_S,
        ettr=part.ettr,
        productive_s=seconds["productive"],
        phases=seconds,
        lost_by_cause={cause: ns / NS_PER_S for cause, ns in part.lost_by_cause_ns.items()},
        straggler_tax_s=None if straggler is None else straggler.time_s,
        false_positive_tax_s=None if wrong is None else wrong.time_s,
        losses=losses,
        steps=_steps(history, own),
        restarts=_restarts(own),
        checkpoints=_checkpoints(history, own, None if whole_history else attempt),
        cycles=[
            msgspec.structs.replace(cycle, phases=_phases_of(spent, cycle.attempt, cycle.cycle))
            for cycle in sorted(cycles, key=lambda c: (c.attempt, c.cycle))
            if whole_history or cycle.attempt == attempt
        ],
    )


def cycle_phases(marks: Sequence[Mark], cycle: int, *, now_ns: int | None = None) -> CyclePhases:
    """Seconds of the recovery that led into `cycle` (detect to replace, in the cycle before it) and of its own start.

    Only a recovery within the same attempt is counted. A cycle that `marks` do not mention has cost nothing.
    """
    history = read_history(marks)
    attempt = max((facts.attempt for facts in history.cycles if facts.cycle == cycle), default=None)
    if attempt is None:
        return CyclePhases()
    part = partition_history(history, now_ns=now_ns, attempt=attempt)
    return _phases_of(_spent_ns(part), attempt, cycle)


def _spent_ns(part: Partition) -> dict[tuple[int, int], dict[str, int]]:
    """Nanoseconds by (attempt, cycle) and phase."""
    spent: dict[tuple[int, int], dict[str, int]] = {}
    for interval in part.intervals:
        if interval.cycle is not None:
            phases = spent.setdefault((interval.attempt, interval.cycle), {})
            phases[interval.phase] = phases.get(interval.phase, 0) + interval.end_ns - interval.begin_ns
    return spent


def _phases_of(spent: dict[tuple[int, int], dict[str, int]], attempt: int, cycle: int) -> CyclePhases:
    before = max((key for key in spent if key[0] == attempt and key[1] < cycle), default=(attempt, -1))
    lead = {name: spent.get(before, {}).get(name, 0) for name in RECOVERY_PHASES}
    start = {name: spent.get((attempt, cycle), {}).get(name, 0) for name in START_PHASES}
    return CyclePhases(**{f"{name}_s": ns / NS_PER_S for name, ns in (lead | start).items()})


def _steps(history: History, own: Sequence[CycleFacts]) -> StepCounts:
    """Counts over `own`: `final` is where the surviving history stands; `completed` counts redone steps twice."""
    committed = committed_step(own, history.marks, history.backs)
    if not history.reports_steps:
        return StepCounts(committed=committed)
    final: int | None = None
    completed = 0
    rolled_back = 0
    for facts in own:
        base = facts.base_step
        reached = facts.completed
        if base is not None:
            final = base
        if reached is None:
            continue
        final = reached if base is None else max(base, reached)
        completed += final - (base or 0)
        limit = surviving_step(facts, history.backs)
        if limit is not None:
            rolled_back += max(0, final - max(limit, base or 0))
    limit = surviving_step(own[-1], history.backs) if own else None
    if final is not None and limit is not None:
        final = min(final, limit)
    return StepCounts(final=final, completed=completed, committed=committed, rolled_back=rolled_back)


def _restarts(own: Sequence[CycleFacts]) -> RestartCounts:
    """A restart is a cycle after another one of its attempt; the decision that led to it says whether it counts."""
    led = [before for before, after in pairwise(own) if before.attempt == after.attempt]
    counted = sum(facts.counted for facts in led)
    return RestartCounts(total=len(led), counted=counted, free=len(led) - counted)


def _checkpoints(history: History, own: Sequence[CycleFacts], attempt: int | None) -> CheckpointCounts:
    made = {(facts.cycle, commit.checkpoint or commit.step) for facts in own for commit in facts.commits}
    failed = {
        (mark.cycle, mark.attrs.get("step"), str(mark.attrs.get("error")))
        for mark in history.marks
        if mark.kind == "ckpt_failed"
        and mark.attrs.get("tier", "disk") in DURABLE
        and (attempt is None or mark.attempt == attempt)
    }
    blocks: dict[tuple[int, int], int] = {}
    for facts in own:
        for block in facts.blocks:  # several ranks may tell of one save: the longest is what training waited for
            key = (facts.cycle, block.begin_ns if block.step is None else block.step)
            blocks[key] = max(blocks.get(key, 0), block.end_ns - block.begin_ns)
    kept = [commit.step for commit in surviving_commits(own, history.marks, history.backs)]
    return CheckpointCounts(
        committed=len(made),
        failed=len(failed),
        last_step=max(kept, default=None),
        block_s_median=statistics.median(blocks.values()) / NS_PER_S if blocks else None,
    )
