"""What monitors hold against a machine, beside the machine's own signs of health."""

from __future__ import annotations

import re
from collections.abc import Sequence

from keepstep.attribution.current import of_another_condition
from keepstep.attribution.order import compare
from keepstep.attribution.rules.deriving import derive
from keepstep.catalog.load import Catalog
from keepstep.records.event import Event

HEALTH = frozenset({"monitor.ok", "monitor.healthy", "dcgm.diag_passed", "condition.good", "k8s.node_ready"})
"""Somebody looked at the devices and found them working."""
LATCHED = frozenset({"monitor.state_gpu", "monitor.state_other", "monitor.still_cordoned"})
"""States without a time, and those that are known to go on after health was seen: any sign of it will do."""
RECORDS = frozenset(
    {"condition.own", "condition.platform", "monitor.cannot_look", "monitor.replayed", "monitor.cancelled_as_done"}
    | {"k8s.node_condition", "k8s.node_cordoned"}
)
"""What a controller keeps of an earlier look: taken back by a sign of health that is not older."""


def latched(events: Sequence[Event], catalog: Catalog) -> list[Event]:
    """One event for what is held against machines although they have shown health since.

    It clears records of monitors and controllers only, never what the kernel, the driver or a counter said: checks on an idle
    machine pass whatever its memory does under load.
    """
    health = [e for e in events if e.signature in HEALTH]
    held = [e for e in events if e.signature in LATCHED | RECORDS and _outlived(e, health)]
    if not held:
        return []
    # Placed where the last of it was said: a record that goes on is cleared with what it quotes.
    newest = max((*health, *(e for e in held if e.signature in LATCHED)), key=lambda e: (e.time_ns or 0, e.order))
    return [derive(catalog, "derived.monitor.latched", newest)]


OF_MONITOR = re.compile(r"(?i)dcgm|exporter|health-?monitor|gpud|node-problem|\bnpd\b|device-plugin")
CAME_UP = ("monitor.ok", "monitor.healthy")


def came_up(events: Sequence[Event], catalog: Catalog) -> list[Event]:
    """A monitor that failed to start until what it asks was there, and then looked: nothing of the job, and over."""
    loops = [e for e in events if e.signature == "k8s.crash_loop"]
    first = [e for e in events if e.signature == "monitor.cannot_look"]
    good = [e for e in events if e.signature in CAME_UP]
    if not first or not good or not all(OF_MONITOR.search(e.evidence.text) for e in loops):
        return []
    last = max(good, key=lambda e: (e.time_ns or 0, e.order))
    if any(compare(e, last) != "before" for e in (*loops, *first)):
        return []
    return [derive(catalog, "derived.monitor.came_up", last, placed=False)]


def _outlived(event: Event, health: Sequence[Event]) -> bool:
    """Whether a sign of health of the same machine is there: a later one, or any for a state without a time."""
    near = [h for h in health if h.node is None or event.node is None or h.node == event.node]
    near = [h for h in near if not of_another_condition(h, event)]
    if event.signature in LATCHED:
        return bool(near)
    return any(compare(event, h) != "after" for h in near)
