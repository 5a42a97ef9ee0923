"""Which actions were wrong, as far as people have verified causes: the ground of the false-positive tax.

Two actions rest on what keepstep believed, and only these can be false positives: a node is taken out, or a verdict ends the job.
A restart after a process died is none: it was dead. A hang that was none is one, but no record of today can say so.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Literal

import msgspec

from keepstep.goodput.facts import CycleKey

EVICTION_IS_RIGHT = frozenset({"hardware", "fabric", "platform"})
"""Classes whose cause may lie in the node that was taken out. Code, framework and shared storage fail on any node alike."""

Acted = Literal["", "evicted", "ended"]


class FaultRecord(msgspec.Struct, frozen=True, kw_only=True):
    """A failed cycle as the run folder tells of it."""

    key: CycleKey
    incident: str
    time_ns: int
    """When it was detected."""
    fault_class: str
    """The verdict's class where it is sure enough, else what the launcher said; lost time is charged to it."""
    cause: str
    """The verdict's signature where it is sure enough, else the kind of the fault: exit, hang, node_lost."""
    said: str = "unknown"
    """The verdict's class, sure or not."""
    node: str | None = None
    rack: str | None = None
    interrupts: bool = True
    """Whether it is a failure that may hit at any time (`history.FAILURE_RULES`), no stop on request and no planned check."""
    acted: Acted = ""
    verified: str | None = None
    """The class that a person found; None: nobody has, "unknown": looked into, and not found."""

    @property
    def is_verified(self) -> bool:
        """Whether a person found the cause."""
        return self.verified not in (None, "unknown")

    @property
    def wrong(self) -> bool | None:
        """Whether the action was wrong; None where there was none, or its cause is not verified."""
        if not self.acted or not self.is_verified:
            return None
        return self.verified not in EVICTION_IS_RIGHT if self.acted == "evicted" else self.verified != self.said


class Verified(msgspec.Struct, frozen=True, kw_only=True):
    """What is known of the actions of a run. `wrong` is None where nothing was verified that could tell."""

    actions: int = 0
    verified: int = 0
    wrong: frozenset[CycleKey] | None = None


def verified_of(faults: Iterable[FaultRecord]) -> Verified:
    """Count the actions. With actions none of which is verified, or without any verified incident, `wrong` is unknown."""
    faults = list(faults)
    acted = [fault for fault in faults if fault.acted]
    known = [fault for fault in acted if fault.is_verified]
    told = bool(known) if acted else any(fault.is_verified for fault in faults)
    return Verified(
        actions=len(acted),
        verified=len(known),
        wrong=frozenset(fault.key for fault in known if fault.wrong) if told else None,
    )
