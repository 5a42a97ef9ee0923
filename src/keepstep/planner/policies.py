"""What to do about an incident, at the level of nodes: policies that a history is priced under. Pure.

A policy sees a verdict and what was there before on the same node, and names one action of `records.verdict`. `RulesPolicy`, with
its small file form (policyfile.py), stands in for the package `policy` and goes when that is written.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple, Protocol

import msgspec

from keepstep.records.verdict import NODE_ACTIONS, Action, FaultClass, Tier, Verdict

DAY_S = 86_400.0


class Decided(NamedTuple):
    """An earlier incident that a policy decided on. `time_s`: seconds since the Unix epoch."""

    time_s: float
    verdict: Verdict
    action: Action


class NodeHistory(NamedTuple):
    """What a policy knows of the node of an incident: `earlier` ones there that it met, oldest first. `node` None: not named."""

    node: str | None
    time_s: float
    earlier: tuple[Decided, ...] = ()

    def within(self, window_s: float) -> int:
        """Earlier incidents of the last `window_s` seconds."""
        return sum(1 for one in self.earlier if self.time_s - one.time_s <= window_s)


class Policy(Protocol):
    """`waits_for_failure`: it is asked only about what has stopped the job, as a launcher that sees processes end and no more."""

    @property
    def name(self) -> str: ...

    @property
    def waits_for_failure(self) -> bool: ...

    def decide(self, verdict: Verdict, history: NodeHistory) -> Action:
        """The action for an incident."""
        ...


class ByVerdict(NamedTuple):
    """Do what the verdict says; `ask_human` waits for a person."""

    name: str = "verdict"
    waits_for_failure: bool = False

    def decide(self, verdict: Verdict, history: NodeHistory) -> Action:
        return verdict.action


class RestartAlways(NamedTuple):
    """What plain torchrun does: start all ranks again on the same nodes."""

    name: str = "restart-always"
    waits_for_failure: bool = True

    def decide(self, verdict: Verdict, history: NodeHistory) -> Action:
        return "restart_job"


class EvictAlways(NamedTuple):
    """Every failure takes its node out, whatever the cause; where no node is named, the job is started again."""

    name: str = "evict-always"
    waits_for_failure: bool = True

    def decide(self, verdict: Verdict, history: NodeHistory) -> Action:
        return "restart_job" if history.node is None else "cordon_node"


class WaitForPerson(NamedTuple):
    """Nothing is done until a person comes."""

    name: str = "none"
    waits_for_failure: bool = True

    def decide(self, verdict: Verdict, history: NodeHistory) -> Action:
        return "none"


BUILT_IN: dict[str, Policy] = {p.name: p for p in (ByVerdict(), RestartAlways(), EvictAlways(), WaitForPerson())}
"""By name, in the order in which they are shown."""


class Rule(msgspec.Struct, frozen=True, kw_only=True):
    """One rule. An empty condition holds always."""

    action: Action
    classes: tuple[FaultClass, ...] = ()
    tiers: tuple[Tier, ...] = ()
    signature: str = ""
    """Begin of the signature: "xid." for all Xids."""
    min_confidence: float = 0.0
    min_incidents: int = 1
    """Of the node within a day, this one counted."""

    def holds(self, verdict: Verdict, history: NodeHistory) -> bool:
        """Whether all conditions are met."""
        return (
            (not self.classes or verdict.fault_class in self.classes)
            and (not self.tiers or verdict.tier in self.tiers)
            and verdict.signature.startswith(self.signature)
            and verdict.confidence >= self.min_confidence
            and history.within(DAY_S) + 1 >= self.min_incidents
        )


class RulesPolicy(NamedTuple):
    """The first rule that holds decides, else `default`. What there is no current fault of is left alone.

    An action on a node where none is named becomes `ask_human`.
    """

    name: str
    rules: Sequence[Rule]
    default: Action = "ask_human"
    waits_for_failure: bool = False

    def decide(self, verdict: Verdict, history: NodeHistory) -> Action:
        if verdict.no_current_fault:
            return "none"
        action = next((r.action for r in self.rules if r.holds(verdict, history)), self.default)
        return "ask_human" if action in NODE_ACTIONS and history.node is None else action
