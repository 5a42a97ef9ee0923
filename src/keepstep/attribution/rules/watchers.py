"""Watchers that are wrong: one that ends a rank which works, and one that lets a job stand still."""

from __future__ import annotations

import re
from collections.abc import Sequence

from keepstep.attribution.current import PROGRESS, end_of
from keepstep.attribution.order import SECOND_NS, canonical
from keepstep.attribution.rules.deriving import derive
from keepstep.attribution.rules.jobfacts import FAILING, of
from keepstep.catalog.load import Catalog
from keepstep.records.event import Event

LATE = ("nvrx.section_timeout", "nvrx.heartbeat_lost")
LEAST_STEPS = 3
"""Steps whose pace is known: two ends and one between."""
MOST_PAUSE = 2.0
"""Times the usual time of a step after which the rank may have stopped."""
LEAST_PARTS = 2.0
"""Steps that fit into what the watcher waited; a step as long as that is what the limit is too short for."""
LATE_BY = 2.0
"""Times its limit by which a watcher should have acted."""
KILLED = ("exit.sigkill", "exit.sigterm", "exit.stopped_from_outside")
DAY_S = 24 * 3600
UNSURE = frozenset({"none", "neighbour"})
MOST = 64
_CLOCK = re.compile(r"(?<![\d:])(\d\d):(\d\d)(?::(\d\d))?(?![\d:])")


def blind(events: Sequence[Event], catalog: Catalog) -> list[Event]:
    """A rank that was ended for its silence and made steps at its usual pace until then; nothing else failed."""
    late = sorted(of(events, *LATE), key=canonical)[:MOST]
    known = {*LATE, *KILLED}
    if not late or any(e.signature not in known and _fails(e, catalog) for e in events):
        return []
    steps = of(events, PROGRESS)[:MOST]
    # Each rank that was called silent: one that is not cleared may be why the others would have waited.
    made = [max((_made(claim, s) for s in steps), default=0.0) for claim in late]
    if not all(made):
        return []
    attrs = {"steps": int(made[0]), "seconds": round(_seconds(late[0]))}
    explains = sorted(known & {e.signature for e in events})
    return [derive(catalog, "derived.watcher.blind", late[0], attrs=attrs, explains=explains, placed=False)]


def _made(claim: Event, step: Event) -> float:
    """How many steps a rank made in the time that the watcher waited for it; 0 where it may have stopped."""
    last, waited = end_of(step), _seconds(claim)
    if None not in (claim.rank, step.rank) and claim.rank != step.rank:
        return 0.0
    if claim.time_ns is None or step.time_ns is None or last.time_ns is None or step.count < LEAST_STEPS:
        return 0.0
    if {claim.time_quality, step.time_quality, last.time_quality} & UNSURE or waited <= 0:
        return 0.0
    usual = (last.time_ns - step.time_ns) / SECOND_NS / (step.count - 1)
    silent = (claim.time_ns - last.time_ns) / SECOND_NS
    if usual <= 0 or not 0 <= silent <= MOST_PAUSE * usual or waited < LEAST_PARTS * usual:
        return 0.0
    made = (waited - silent) / usual
    return made if made >= 1.0 else 0.0


def _seconds(event: Event) -> float:
    try:
        return float(str(event.attrs.get("seconds")))
    except ValueError:
        return 0.0


def silent(events: Sequence[Event], catalog: Catalog) -> list[Event]:
    """A job that stands still far longer than a watcher allows, which wrote nothing of it."""
    told, counted = of(events, "fact.silence_told")[:MOST], of(events, "watcher.lines_counted")
    limits = [limit for e in of(events, "watcher.limit")[:MOST] if (limit := _limit(e)) > 0]
    if not told or not limits or not counted or any(e.attrs.get("count") != 0 for e in counted):
        return []
    if any(_fails(e, catalog) for e in events) or of(events, "job.finished_rank", "job.train_ended", "job.ended_well"):
        return []
    still = _still_s(told[-1])
    if still is None or still < LATE_BY * max(limits) or not of(events, PROGRESS):
        return []
    attrs = {"seconds": round(still), "limit": round(max(limits))}
    return [derive(catalog, "derived.watcher.silent", told[-1], attrs=attrs, placed=False)]


def _still_s(told: Event) -> float | None:
    """Seconds between the time of a remark and the one that it names; both are of one clock and within a day."""
    times = [int(h) * 3600 + int(m) * 60 + int(s or 0) for h, m, s in _CLOCK.findall(told.evidence.text[:400])]
    since = _CLOCK.search(str(told.attrs.get("since")))
    if len(times) != 2 or since is None:
        return None
    return float((times[0] - times[1]) % DAY_S)


def _limit(event: Event) -> float:
    try:
        return float(str(event.attrs.get("limit")))
    except ValueError:
        return 0.0


def _fails(event: Event, catalog: Catalog) -> bool:
    return catalog[event.signature].role in FAILING and event.severity != "info"


WATCHER_RULES = (blind, silent)
"""Each: `(events, catalog) -> list[Event]`."""
