"""A verdict in words, for a person who was woken by it."""

from __future__ import annotations

import re

from keepstep.attribution.causes import Seen
from keepstep.records.event import Event
from keepstep.records.verdict import Action, Entity, FaultClass, Tier

CLASS_WORDS: dict[FaultClass, str] = {
    "hardware": "hardware of one machine",
    "fabric": "the network between GPUs",
    "storage": "storage",
    "user_code": "the training program, its data or its settings",
    "framework": "a library, driver or tool",
    "platform": "the scheduler or platform",
    "unknown": "nobody's yet",
}

ACTION_WORDS: dict[Action, str] = {
    "none": "nothing to do",
    "restart_job": "start the job again from its last committed checkpoint; nodes may stay",
    "fail_fast": "do not retry: it will fail again until the program or its settings are changed",
    "cordon_node": "take the node out of service now",
    "drain_at_checkpoint": "let the job reach a checkpoint, then take the node out of service",
    "reset_gpu": "reset the GPU (no process may hold it), then check it under load before it gets work",
    "ask_human": "a person should look; the evidence does not carry an automatic action",
}

_FIELD = re.compile(r"\{(\w+)\}")
_DANGLING = re.compile(r" (?:in|of|on|at|by|for|from|to|with)$")
"""What led to a field that is not there."""


def fill(title: str, event: Event) -> str:
    """A catalog's phrase, its {fields} filled from the event; a field that is not there leaves no trace."""

    def field(match: re.Match[str]) -> str:
        value = event.attrs.get(match[1], getattr(event, match[1], None))
        return "" if value is None else str(value)

    return _DANGLING.sub("", " ".join(_FIELD.sub(field, title).split()).replace("()", "").strip())


def title_of(seen: Seen) -> str:
    """The catalog's phrase for a sign."""
    return fill(seen.entry.title, seen.event)


def place_words(entity: Entity) -> str:
    """Where, in words: 'GPU 0000:3b:00.0 of gpu-07 (rank 12)'; empty when nothing is known."""
    thing = entity.gpu or entity.nic
    if thing is not None and entity.gpu is not None and not thing.startswith("GPU"):
        thing = f"GPU {thing}"
    where = f"{thing} of {entity.node}" if thing and entity.node else thing or entity.node or ""
    if entity.rank is None:
        return where
    return f"{where} (rank {entity.rank})" if where else f"rank {entity.rank}"


def summary(
    fault_class: FaultClass, tier: Tier, action: Action, no_current_fault: bool, decisive: Seen | None, entity: Entity
) -> str:
    """The verdict in one sentence."""
    if decisive is None:
        if no_current_fault:
            return "Nothing that was found is a current fault."
        return "What was read does not say whose fault it was; a person should look."
    what = title_of(decisive)
    where = place_words(entity)
    said = f"{what[:1].upper()}{what[1:]}" + (f", on {where}" if where else "")
    if no_current_fault:
        return f"{said}: no current fault."
    if fault_class == "unknown":
        return f"{said}: this alone does not say whose fault it was."
    sure = {"certain": "certainly", "probable": "probably", "possible": "possibly", "unknown": "perhaps"}[tier]
    return f"{said}: {sure} {CLASS_WORDS[fault_class]}; {ACTION_WORDS[action]}."
