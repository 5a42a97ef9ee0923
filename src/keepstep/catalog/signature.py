"""What the catalog says about one thing that can be seen: an entry of `data/signatures/*.toml`."""

from __future__ import annotations

from typing import Literal

import msgspec

from keepstep.records.event import Severity
from keepstep.records.verdict import Action, FaultClass

Role = Literal["root", "cascade", "symptom", "action", "recovery", "context", "noise"]
"""root: can be a first cause. cascade: an effect, on its own entity, of something that should be seen too. symptom: tells that
something failed, not what (the waiter's time-out). action: what a scheduler, driver or person did. recovery: a fault is over, or
work went on. context: a fact that decides between causes. noise: benign; seen, and explains nothing."""

Scope = Literal["gpu", "nic", "node", "rank", "job", "storage", "cluster"]
"""What the thing is about, which decides who is blamed."""

Stream = Literal["kernel", "job", "scheduler", "monitor", "any"]
"""Kind of text a pattern belongs to. "any" unless its words would mean something else in another stream."""


class Signature(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """One entry.

    `id`: stable, dotted: "nccl.ib_completion". `kind`: of the events (CONTRACT section 4). `title`: a short phrase for a summary,
    which may use {named groups} of the pattern. `weights`: natural log-odds that one sighting adds to a class, against "unknown";
    `why` argues them. `depth`: distance from the physical cause, 0 (silicon, cable) to 9 (the launcher's last words): of two events
    on one path the one with less depth explains the other. `action`: what it calls for as a first cause. `never`: actions it may
    not lead to even then. `clears`: ids of signatures it takes back on the same entity.
    `pattern`: RE2 syntax, any of them; none for events made by a parser or a rule. Named groups that become fields of the event:
    bdf, gpu, uuid, nic, rank, local_rank, node, job; all are in `attrs`. `by_code`: the group whose value picks the entry that is
    meant: "xid" with code 79 gives events of signature "xid.79" (or "xid.79.<variant>", catalog/coded.py).
    `ordinary`: lines of logs in which nothing is wrong have it too, so that long logs are not stopped at it; it counts in short
    documents, around faults, and at the end of a log.
    `examples` must match, `near_misses` must not. `applies`: driver branch, GPU generation or library versions, as text.
    """

    id: str
    kind: str
    title: str
    severity: Severity
    role: Role
    scope: Scope
    depth: int
    weights: dict[FaultClass, float] = {}
    action: Action | None = None
    never: tuple[Action, ...] = ()
    clears: tuple[str, ...] = ()
    by_code: str = ""
    ordinary: bool = False
    stream: Stream = "any"
    pattern: tuple[str, ...] = ()
    examples: tuple[str, ...] = ()
    near_misses: tuple[str, ...] = ()
    applies: dict[str, str] = {}
    source: str
    why: str = ""

    @property
    def fault_class(self) -> FaultClass | None:
        """The class that it speaks for most, None when it speaks for none."""
        best = max(self.weights.items(), key=lambda pair: pair[1], default=None)
        return None if best is None else best[0]
