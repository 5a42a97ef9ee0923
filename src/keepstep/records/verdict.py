"""`keepstep.verdict/1`: whose fault it was, how sure that is, and what to do (CONTRACT section 4)."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Literal, get_args

import msgspec

from keepstep.records.event import Event, event_fields

FaultClass = Literal["hardware", "fabric", "storage", "user_code", "framework", "platform", "unknown"]
CLASSES: tuple[FaultClass, ...] = get_args(FaultClass)

Tier = Literal["certain", "probable", "possible", "unknown"]

Action = Literal["none", "restart_job", "fail_fast", "cordon_node", "drain_at_checkpoint", "reset_gpu", "ask_human"]
NODE_ACTIONS: frozenset[str] = frozenset({"cordon_node", "drain_at_checkpoint", "reset_gpu"})
"""Actions that take hardware out of service."""

Bearing = Literal["supports", "contradicts", "symptom"]


class Entity(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """What is at fault, as far as it is known. `gpu` and `nic` are printed names (PCI address, UUID, index, device)."""

    node: str | None = None
    gpu: str | None = None
    rank: int | None = None
    nic: str | None = None
    job: str | None = None


class Weighed(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """An event and what it says about the verdict's class. `weight`: natural log-odds it adds to that class; `note`: why."""

    event: Event
    bearing: Bearing
    weight: float = 0.0
    note: str = ""


class Alternative(msgspec.Struct, frozen=True, kw_only=True):
    """Another class that the evidence allows, and what speaks against it."""

    fault_class: FaultClass = msgspec.field(name="class")
    confidence: float
    why_not: str


class Verdict(msgspec.Struct, frozen=True, kw_only=True):
    """The verdict. `signature` is stable over incidents of one cause; `confidence` is the probability of the class, 0..1.

    `no_current_fault`: what was found is stale, benign or taken back; then `action` is none or ask_human.
    `evidence`: oldest first. `missing`: what would have decided it and was not there.
    """

    schema: Literal["keepstep.verdict/1"] = "keepstep.verdict/1"
    fault_class: FaultClass = msgspec.field(name="class")
    signature: str
    confidence: float
    tier: Tier
    action: Action
    no_current_fault: bool = False
    entity: Entity = Entity()
    first_cause: Event | None = None
    evidence: list[Weighed] = []
    alternatives: list[Alternative] = []
    missing: list[str] = []
    summary: str = ""


def verdict_fields(verdict: Verdict) -> dict[str, Any]:
    """The verdict as `keepstep.verdict/1`: each piece of evidence is an event with `bearing`, `weight` and `note`."""
    fields: dict[str, Any] = msgspec.to_builtins(verdict)
    fields["entity"] = {name: getattr(verdict.entity, name) for name in Entity.__struct_fields__}
    fields["first_cause"] = None if verdict.first_cause is None else event_fields(verdict.first_cause)
    fields["evidence"] = [
        event_fields(w.event) | {"bearing": w.bearing, "weight": round(w.weight, 3), "note": w.note}
        for w in verdict.evidence
    ]
    return fields


def verdict_of(fields: Mapping[str, Any]) -> Verdict:
    """What `verdict_fields` gave, as a verdict again, without its evidence. Raises msgspec.ValidationError for anything else."""
    # Whoever compares verdicts needs what they say; what they rest on is most of their size.
    kept = {name: value for name, value in fields.items() if name != "evidence"}
    return msgspec.convert({"schema": None} | kept, Verdict)
