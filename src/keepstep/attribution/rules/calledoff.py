"""What a controller goes on doing to a machine that is well: a repair that was called off, a GPU taken out for a program's code."""

from __future__ import annotations

from collections.abc import Sequence

from keepstep.attribution.current import end_of
from keepstep.attribution.order import canonical, gap_s
from keepstep.attribution.rules.deriving import derive
from keepstep.attribution.rules.jobfacts import FAILING, before, number, of
from keepstep.attribution.rules.monitors import HEALTH
from keepstep.attribution.rules.xid import APPLICATION, TEARDOWN, distinct_gpus, programs, read
from keepstep.catalog.load import Catalog
from keepstep.records.event import Event

MOST = 64
RECORDS = ("monitor.cancelled_as_done", "monitor.still_cordoned", "k8s.node_cordoned", "fact.alarm", "condition.")
"""Beginnings of signatures of what a controller notes."""
NEAR_S = 300.0
NEAR_LINES = 3
"""How far a cancellation may be from the health that it follows: later something else may have come between."""


def called_off(events: Sequence[Event], catalog: Catalog) -> list[Event]:
    """A repair that was cancelled after all checks of the machine had passed, and nothing that was held against it since."""
    cancelled = of(events, "monitor.cancelled_as_done")[:MOST]
    health = [e for e in events if e.signature in HEALTH][:MOST]
    if not cancelled or not health:
        return []
    failed = [e for e in events if catalog[e.signature].role in FAILING and e.severity != "info"]
    if any(not e.signature.startswith(RECORDS) for e in failed):
        return []  # what the kernel, a device or the job said is not called off
    if not all(any(_of_one(h, c) and _follows(h, c) for h in health) for c in cancelled):
        return []
    first = min(health, key=canonical)
    held = [e for e in events if e.signature.startswith(RECORDS) and e not in cancelled]
    if any(not before(e, first) and (e.evidence.path, e.evidence.line) not in _lines(health) for e in held):
        return []
    return [derive(catalog, "derived.monitor.called_off", max(cancelled, key=canonical), placed=False)]


def _of_one(one: Event, other: Event) -> bool:
    return one.node is None or other.node is None or one.node == other.node


def _follows(health: Event, cancelled: Event) -> bool:
    """Whether a cancellation came right after a sign of health."""
    gap = gap_s(end_of(health), cancelled)
    if gap is not None and gap > 0:
        return gap <= NEAR_S and before(health, cancelled)
    return before(health, cancelled) and 0 < cancelled.order - end_of(health).order <= NEAR_LINES


def _lines(events: Sequence[Event]) -> set[tuple[str, int]]:
    return {(e.evidence.path, e.evidence.line) for e in events}


def application_code(events: Sequence[Event], catalog: Catalog) -> list[Event]:
    """A GPU that a device plugin took out for a code of programs: one program on one GPU, and nothing else that failed.

    A job that says itself that it failed is another matter, and so is a second GPU or a second program.
    """
    taken = of(events, "plugin.xid_unhealthy")[:MOST]
    codes = {number(e.attrs.get("code")) for e in taken}
    found = read(events)
    if not taken or not codes <= APPLICATION or not {x.code for x in found} <= APPLICATION | TEARDOWN:
        return []
    own = {id(x.event) for x in found}
    said = _lines(taken)
    # The plugin's own line ends like an exception.
    others = (e for e in events if id(e) not in own and (e.evidence.path, e.evidence.line) not in said)
    if any(catalog[e.signature].role in FAILING and e.signature != "monitor.still_cordoned" for e in others):
        return []
    # One event stands for several sightings, which may be of several programs.
    many = len(programs(found)) > 1 or any(x.event.count > 1 for x in found)
    if many or distinct_gpus(x.event for x in found) > 1 or of(events, "fact.hang_told"):
        return []
    last = max((end_of(e) for e in (*taken, *(x.event for x in found))), key=lambda e: e.evidence.line or 0)
    return [derive(catalog, "derived.plugin.application_code", last, placed=False)]


CALLED_OFF_RULES = (called_off, application_code)
"""Each: `(events, catalog) -> list[Event]`."""
