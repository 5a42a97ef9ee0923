"""What earlier incidents say about a new one: whether a failure follows the job, the machine, or neither."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

from keepstep.records.event import Event
from keepstep.records.verdict import NODE_ACTIONS, Verdict

LEAST_ROTATION = 3
"""Different machines in a row that were the slow one, from which on the place says nothing."""

SLOW_KINDS = ("step.slow", "rank.slow", "straggler.")


class Past(NamedTuple):
    """One incident. `repaired`: the part or node of its verdict was reset, rebooted or replaced after it, before the next one."""

    verdict: Verdict
    time_ns: int
    repaired: bool = False


def place_of(verdict: Verdict) -> str | None:
    """The machine, or part of one, that a verdict names."""
    entity = verdict.entity
    if entity.node is None:
        return entity.gpu
    return "/".join(p for p in (entity.node, entity.gpu or entity.nic) if p is not None)


def compared(current: Verdict, time_ns: int, past: Sequence[Past]) -> list[Event]:
    """Signs (`derived.history.*`) that the incidents before `time_ns` add to one; judge its events again with them."""
    earlier = sorted((p for p in past if p.time_ns < time_ns), key=lambda p: p.time_ns)
    same = [p for p in earlier if p.verdict.signature == current.signature and not p.verdict.no_current_fault]
    if not same or current.signature == "unknown":
        return []
    place = place_of(current)
    places = [place_of(p.verdict) for p in same]
    if _is_slow(current):
        moved = [*(p for p in places if p is not None), *([place] if place else [])][-LEAST_ROTATION:]
        if len(moved) == LEAST_ROTATION and len(set(moved)) == LEAST_ROTATION:
            return [_sign("derived.history.rotating", current, time_ns, {"nodes": len(set(places) | {place})})]
        return []
    repaired = [p for p, at in zip(same, places, strict=True) if p.repaired and at is not None and at == place]
    if repaired and current.fault_class in ("hardware", "fabric"):
        return [_sign("derived.history.silicon", current, time_ns, {"repairs": len(repaired)})]
    elsewhere = {p for p in places if p is not None and p != place}
    if place is not None and elsewhere and place not in places and current.action not in NODE_ACTIONS:
        return [_sign("derived.history.software", current, time_ns, {"nodes": len(elsewhere)})]
    return []


def _is_slow(verdict: Verdict) -> bool:
    return verdict.first_cause is not None and verdict.first_cause.kind.startswith(SLOW_KINDS)


def _sign(signature: str, current: Verdict, time_ns: int, attrs: dict[str, Any]) -> Event:
    """A sign at the time and place of the incident. One of a common cause has no place."""
    entity = current.entity
    placed = signature == "derived.history.silicon"
    cause = current.first_cause
    return Event(
        kind="derived.history",
        signature=signature,
        severity="error" if placed else "warning",
        source="history",
        time_ns=time_ns,
        time_quality="exact",
        node=entity.node if placed else None,
        gpu=cause.gpu if placed and cause is not None else None,
        attrs=attrs,
    )
