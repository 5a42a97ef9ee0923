"""What the marks of a timeline say about each cycle, before any time is given to a phase.

Marks may be out of order, duplicated or missing, and their attributes may be damaged: everything here takes the first
usable statement in a canonical order, so that the same set of marks always gives the same facts.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any, get_args

import msgspec

from keepstep.records.codec import to_json
from keepstep.records.cycle import DURABLE
from keepstep.records.timeline import Mark, MarkKind

CycleKey = tuple[int, int]
"""(attempt, cycle). Cycle numbers rise over all attempts; with the attempt a damaged journal cannot mix two lives."""

_KIND_ORDER = {kind: index for index, kind in enumerate(get_args(MarkKind))}
LIFE_KINDS = frozenset(
    {
        *("cycle_started", "assigned", "attached", "restored", "first_step", "step"),
        *("fault", "captured", "stopped", "decided", "replaced", "drain", "cycle_ended"),
    }
)
"""Marks that tell where a cycle stands; the others are facts beside it."""

UNKNOWN_CAUSE = "unknown"


class Fault(msgspec.Struct, frozen=True):
    """The fault that ended a cycle. Times are UTC nanoseconds as reported, not yet clamped."""

    occurred_ns: int
    detected_ns: int
    cause: str
    completed_step: int | None


class Commit(msgspec.Struct, frozen=True):
    """A durable checkpoint. Its step was complete at `staged_ns` at the latest: durable time less the time it took."""

    step: int
    staged_ns: int
    checkpoint: str | None


class Block(msgspec.Struct, frozen=True):
    """Training stood still from `begin_ns` to `end_ns` to stage a checkpoint of `step` (None when not said)."""

    begin_ns: int
    end_ns: int
    step: int | None


class CycleFacts(msgspec.Struct, frozen=True, kw_only=True):
    """Everything the marks say about one cycle.

    `opened_ns` has the first time of each kind in LIFE_KINDS. `steps_ns` maps a count of completed steps to the time
    it was reached; `resumed_ns` maps a step to the end of the block that followed it. `completed` is the highest
    count known.
    """

    attempt: int
    cycle: int
    opened_ns: dict[str, int]
    restored_step: int | None
    durable_restore: bool
    first_count: int | None
    completed: int | None
    steps_ns: dict[int, int]
    resumed_ns: dict[int, int]
    blocks: tuple[Block, ...]
    commits: tuple[Commit, ...]
    fault: Fault | None
    counted: bool

    @property
    def key(self) -> CycleKey:
        """Place of the cycle in the history."""
        return (self.attempt, self.cycle)

    @property
    def trained(self) -> bool:
        """Whether a step of this cycle was completed."""
        return "first_step" in self.opened_ns or "step" in self.opened_ns

    @property
    def went_back_to(self) -> int | None:
        """Step the cycle began from: what `restored` says, else one before its `first_step`; None without either."""
        if self.restored_step is not None:
            return self.restored_step
        return None if self.first_count is None else self.first_count - 1

    @property
    def base_step(self) -> int | None:
        """Like `went_back_to`, else one before the lowest step known: good for counting, not for rolling back."""
        if self.went_back_to is not None or not self.steps_ns:
            return self.went_back_to
        return min(self.steps_ns) - 1


def int_attr(mark: Mark, name: str) -> int | None:
    """Integer attribute `name` of `mark`, or None when it is absent or something else."""
    value: Any = mark.attrs.get(name)
    return value if isinstance(value, int) and not isinstance(value, bool) else None


def canonical(marks: Iterable[Mark]) -> list[Mark]:
    """Sort by time, ties by attempt, cycle, kind and attributes: any order of the same marks gives the same list."""

    def order(mark: Mark) -> tuple[int, int, int, int, bytes]:
        return (mark.t_ns, mark.attempt, mark.cycle, _KIND_ORDER[mark.kind], to_json(mark.attrs))

    return sorted(marks, key=order)


def cycle_facts(marks: Sequence[Mark]) -> list[CycleFacts]:
    """Facts of every cycle named by a life mark, in the order of the history. `marks` must be canonical."""
    by_cycle: dict[CycleKey, list[Mark]] = {}
    for mark in marks:
        by_cycle.setdefault((mark.attempt, mark.cycle), []).append(mark)
    return [
        _facts_of(key, group)
        for key, group in sorted(by_cycle.items())
        if any(mark.kind in LIFE_KINDS for mark in group)
    ]


def _facts_of(key: CycleKey, marks: Sequence[Mark]) -> CycleFacts:
    opened: dict[str, int] = {}
    for mark in marks:
        if mark.kind in LIFE_KINDS:
            opened.setdefault(mark.kind, mark.t_ns)
    restored = next((m for m in marks if m.kind == "restored" and int_attr(m, "step") is not None), None)
    fault = _first_fault(marks, _attributed_class(marks))
    blocks = tuple(_blocks(marks))
    commits = tuple(_commits(marks))
    steps_ns, resumed_ns = _step_times(marks, blocks)
    first = next((int_attr(m, "step") for m in marks if m.kind == "first_step" and int_attr(m, "step")), None)
    said = [int_attr(m, "completed_step") for m in marks if m.kind in ("fault", "drain")]
    known = [*steps_ns, *(c.step for c in commits), *(s for s in said if s is not None)]
    trained = "first_step" in opened or "step" in opened
    return CycleFacts(
        attempt=key[0],
        cycle=key[1],
        opened_ns=opened,
        restored_step=None if restored is None else int_attr(restored, "step"),
        durable_restore=restored is not None and restored.attrs.get("source") in DURABLE,
        first_count=first,
        completed=max(known, default=None) if trained else None,
        steps_ns=steps_ns,
        resumed_ns=resumed_ns,
        blocks=blocks,
        commits=commits,
        fault=fault,
        counted=any(m.kind == "decided" and m.attrs.get("counted") is True for m in marks),
    )


ATTRIBUTED_TIERS = ("certain", "probable")
"""How sure a verdict must be for lost time to be charged to its class."""


def _attributed_class(marks: Sequence[Mark]) -> str | None:
    """Class of the verdict on the cycle's fault, None without one that is sure enough."""
    sure = [m for m in marks if m.kind == "attributed" and m.attrs.get("tier") in ATTRIBUTED_TIERS]
    found = sure[-1].attrs.get("class") if sure else None
    return found if isinstance(found, str) and found else None


def _first_fault(marks: Sequence[Mark], attributed: str | None) -> Fault | None:
    """The fault detected first: later ones in the same cycle are its consequences. `attributed`: its class by the verdict."""
    faults = []
    for mark in marks:
        if mark.kind == "fault":
            detected_ns = int_attr(mark, "detected_ns")
            detected_ns = mark.t_ns if detected_ns is None else detected_ns
            occurred_ns = int_attr(mark, "occurred_ns")
            cause = attributed or mark.attrs.get("cause")
            faults.append(
                Fault(
                    occurred_ns=detected_ns if occurred_ns is None else occurred_ns,
                    detected_ns=detected_ns,
                    cause=cause if isinstance(cause, str) and cause else UNKNOWN_CAUSE,
                    completed_step=int_attr(mark, "completed_step"),
                )
            )
    return min(faults, key=lambda fault: (fault.detected_ns, fault.occurred_ns, fault.cause), default=None)


def _blocks(marks: Sequence[Mark]) -> Iterable[Block]:
    for mark in marks:
        begin_ns, end_ns = int_attr(mark, "begin_ns"), int_attr(mark, "end_ns")
        if mark.kind == "ckpt_block" and begin_ns is not None and end_ns is not None and begin_ns < end_ns:
            yield Block(begin_ns, end_ns, int_attr(mark, "step"))


def _commits(marks: Sequence[Mark]) -> Iterable[Commit]:
    for mark in marks:
        step = int_attr(mark, "step")
        if mark.kind == "committed" and step is not None:
            name = mark.attrs.get("checkpoint")
            persist_ns = max(0, int_attr(mark, "persist_ns") or 0)
            yield Commit(step, mark.t_ns - persist_ns, name if isinstance(name, str) else None)


def _step_times(marks: Sequence[Mark], blocks: Sequence[Block]) -> tuple[dict[int, int], dict[int, int]]:
    """Earliest time each count of steps was seen complete, and when training went on after the block at that step."""
    reached: dict[int, int] = {}
    resumed: dict[int, int] = {}
    stated = [(int_attr(m, "step"), m.t_ns) for m in marks if m.kind in ("first_step", "step")]
    stated += [(int_attr(m, "completed_step"), m.t_ns) for m in marks if m.kind == "drain"]
    stated += [(block.step, block.begin_ns) for block in blocks]
    for step, t_ns in stated:
        if step is not None:
            reached[step] = min(t_ns, reached.get(step, t_ns))
    for block in blocks:
        if block.step is not None:
            resumed[block.step] = max(block.end_ns, resumed.get(block.step, block.end_ns))
    return reached, resumed
