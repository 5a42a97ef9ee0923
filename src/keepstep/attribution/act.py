"""What to do about a cause: what its entry calls for, within bounds that no weight can move."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import NamedTuple

from keepstep.attribution.causes import Seen
from keepstep.catalog.priors import Tiers
from keepstep.records.verdict import NODE_ACTIONS, Action, FaultClass

STRENGTH: tuple[Action, ...] = (
    "none",
    "ask_human",
    "restart_job",
    "fail_fast",
    "reset_gpu",
    "drain_at_checkpoint",
    "cordon_node",
)
"""From the least to the most that is taken out of service."""  # fmt: skip


class HardRule(NamedTuple):
    """Signs that never take hardware out of service, however they add up. `applies` to one sign."""

    name: str
    applies: Callable[[Seen], bool]
    forbids: frozenset[str]
    why: str


def _xid(*codes: int) -> Callable[[Seen], bool]:
    """Signs of one of the codes, by the entry or a variant of it, or by the code of an event that another entry was made for."""
    known = {str(code) for code in codes}
    return lambda one: (
        (one.entry.id.startswith("xid.") and one.entry.id.split(".")[1] in known)
        or (one.entry.kind == "gpu.xid" and str(one.event.attrs.get("xid")) in known)
    )


def _id_has(*words: str) -> Callable[[Seen], bool]:
    return lambda one: any(word in one.entry.id for word in words)


HARD_RULES: tuple[HardRule, ...] = (
    HardRule(
        "user_oom",
        _id_has("cuda_oom", "user_oom", "oom_user"),
        NODE_ACTIONS,
        "the program asked for more memory than there is; another node has no more",
    ),
    HardRule("desync", _id_has("desync"), NODE_ACTIONS, "ranks took different ways through the program"),
    HardRule(
        "mismatch",
        # Drivers and libraries of different versions are a machine's matter, or an image's.
        lambda one: "mismatch" in one.entry.id and "version" not in one.entry.id,
        NODE_ACTIONS,
        "ranks called different collectives, or with different shapes: a program's doing",
    ),
    HardRule("application_xid", _xid(13, 31, 43), NODE_ACTIONS, "the GPU reports what the program did"),
    HardRule("cleanup_xid", _xid(45), NODE_ACTIONS, "the driver cleans up after a process that ended"),
)
"""One table; each row has a test."""


class Choice(NamedTuple):
    """`rested_on`: the sign whose entry called for the action. `note`: what bounded it, empty when nothing did."""

    action: Action
    rested_on: Seen | None
    note: str


def choose(
    fault_class: FaultClass,
    first: Seen | None,
    supporters: Sequence[Seen],
    after: Sequence[Seen],
    chances: Mapping[FaultClass, float],
    tiers: Tiers,
) -> Choice:
    """The action for a class with its first cause, the unexplained signs that support it, strongest first, and `after`: those that
    the first cause explains.
    """
    if fault_class == "unknown" or first is None or chances[fault_class] < tiers.possible:
        return Choice("ask_human", None, "nothing is sure enough to act on")
    wanted = _wanted(fault_class, first, supporters, after)
    if wanted is None:
        return Choice("ask_human", None, "no entry of the catalog calls for an action")
    action = wanted.entry.action or "ask_human"
    bound = _bound(action, fault_class, wanted, supporters)
    if not bound and action in NODE_ACTIONS and cause_chance(wanted, chances) < tiers.probable:
        bound = f"{action} needs a cause that is at least probable"
    return Choice("ask_human", wanted, bound) if bound else Choice(action, wanted, "")


def cause_chance(sign: Seen, chances: Mapping[FaultClass, float]) -> float:
    """Probability that a sign tells the cause, whichever of the classes it mainly speaks for: silicon and firmware of one GPU get
    the same reset. What it says of the program does not count: that calls for something else.
    """
    return sum(chances[c] for c in chances if c not in ("unknown", "user_code") and 2 * sign.weight(c) >= sign.top)


def _wanted(fault_class: FaultClass, first: Seen, supporters: Sequence[Seen], after: Sequence[Seen]) -> Seen | None:
    """The sign that decides the action: a conclusion of rules that weighs most, else the first cause, else what supports it.

    Where the first cause takes something out of service, a sign of the same place that calls for more is heard too, also one that
    followed from it: memory that failed asks for a reset, no spare row left for it asks for the technician.
    """
    able = [s for s in supporters if s.entry.action is not None]
    concluded = [
        s for s in able if s.entry.id.startswith("derived.") and s.weight(fault_class) >= first.weight(fault_class)
    ]
    if concluded:
        return concluded[0]
    if first.entry.action is None:
        return able[0] if able else None
    if first.entry.action not in NODE_ACTIONS:
        return first
    least = first.weight(fault_class) / 2
    same_node = [s for s in able if s.place.node in (None, first.place.node)]
    same_part = [s for s in after if s.entry.role == "root" and s.place == first.place]
    more = [s for s in (*same_node, *same_part) if s.entry.action in NODE_ACTIONS and s.weight(fault_class) >= least]
    return max([first, *more], key=lambda s: STRENGTH.index(s.entry.action or "none"))


def _bound(action: Action, fault_class: FaultClass, wanted: Seen, supporters: Sequence[Seen]) -> str:
    """Why the action may not be taken; empty when it may."""
    # A weak sign beside a strong one does not bind it: an application Xid next to a GPU that is gone.
    least = wanted.weight(fault_class) / 2
    resting = [wanted, *(s for s in supporters if s.entry.role == "context" or s.weight(fault_class) >= least)]
    barred = next((s for s in resting if action in s.entry.never), None)
    if barred is not None:
        return f"{barred.entry.id} may never lead to {action}"
    if action not in NODE_ACTIONS:
        return ""
    if fault_class == "user_code":
        return f"a fault of the program never leads to {action}"
    for rule in HARD_RULES:
        if action in rule.forbids and any(rule.applies(s) for s in resting):
            return f"never {action} for {rule.name}: {rule.why}"
    named = wanted.place.node or wanted.place.gpu or wanted.place.nic
    if named is None and wanted.entry.scope not in ("gpu", "nic", "node"):
        return f"{action} needs a node, GPU or NIC that is named"
    return ""
