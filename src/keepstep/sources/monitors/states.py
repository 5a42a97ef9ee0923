"""States and health events that monitors print as JSON: gpud's component states, NVSentinel's health events.

A state is a level: it says how things stand, or stood once. One without a time is latched: nobody knows whether it still holds.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from typing import Any, NamedTuple

from keepstep.records.event import Gpu
from keepstep.sources.monitors.words import part_of
from keepstep.sources.timestamps import stamp_in

LINE_LIMIT = 1 << 16


class State(NamedTuple):
    """One thing that a monitor says about one part. `timed`: it says since when. `node`, `gpu`: as far as named."""

    part: str
    healthy: bool
    text: str
    timed: bool
    fatal: bool = False
    time_ns: int | None = None
    node: str | None = None
    gpu: Gpu | None = None
    actions: tuple[str, ...] = ()


def states_in(text: str) -> list[State]:
    """The states that a line of JSON holds; [] for anything else."""
    if not text.startswith("{") or len(text) > LINE_LIMIT or not any(k in text for k in ('"component"', '"checkName"')):
        return []
    try:
        record = json.loads(text)
    except (ValueError, RecursionError):
        return []
    if not isinstance(record, dict):
        return []
    if isinstance(record.get("checkName"), str):
        return [_health_event(record)]
    if isinstance(record.get("component"), str):
        return list(_component(record))
    return []


def _component(record: Mapping[str, Any]) -> Iterator[State]:
    """gpud: {component, states: [{time, name, health, reason, suggested_actions: {repair_actions}}]}, or one state flat."""
    component = str(record["component"])
    states = record.get("states")
    for state in states if isinstance(states, list) else [record]:
        if not isinstance(state, dict) or not isinstance(state.get("health"), str):
            continue
        reason = str(state.get("reason") or state.get("error") or "")
        stamp = stamp_in(str(state.get("time") or ""))
        suggested = state.get("suggested_actions")
        actions = suggested.get("repair_actions") if isinstance(suggested, dict) else None
        yield State(
            part=part_of(component, reason),
            healthy=state["health"].lower() in ("healthy", "ok", "initializing"),
            text=reason or component,
            timed=stamp is not None,
            time_ns=stamp.ns if stamp is not None and stamp.kind == "utc" else None,
            actions=tuple(str(a) for a in actions) if isinstance(actions, list) else (),
        )


def _health_event(record: Mapping[str, Any]) -> State:
    """NVSentinel: {agent, componentClass, checkName, isFatal, isHealthy, message, errorCode, entitiesImpacted, nodeName, ...}."""
    entities = record.get("entitiesImpacted")
    named = {
        str(e.get("entityType")).upper(): str(e.get("entityValue"))
        for e in (entities if isinstance(entities, list) else [])
        if isinstance(e, dict)
    }
    index = named.get("GPU", "")
    gpu = Gpu(
        index=int(index) if index.isdigit() and len(index) < 4 else None,
        uuid=named.get("GPU_UUID") or (index if index.startswith("GPU-") else None),
    )
    stamp = stamp_in(str(record.get("generatedTimestamp") or ""))
    words = [str(record.get(key) or "") for key in ("message", "checkName", "componentClass")]
    return State(
        part=part_of(" ".join(map(str, record.get("errorCode") or [])), *words),
        healthy=record.get("isHealthy") is True,
        text=words[0] or words[1],
        timed=True,
        fatal=record.get("isFatal") is True,
        time_ns=stamp.ns if stamp is not None and stamp.kind == "utc" else None,
        node=str(record["nodeName"]) if record.get("nodeName") else None,
        gpu=gpu if gpu != Gpu() else None,
    )
