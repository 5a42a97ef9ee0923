"""What came after a record of a failure: a new machine under the old name, a thing that works although its check says no, a drill
that is over, devices that are offered again.
"""

from __future__ import annotations

import re
from collections.abc import Sequence

from keepstep.attribution.current import PROGRESS, end_of
from keepstep.attribution.rules.deriving import derive
from keepstep.attribution.rules.jobfacts import number
from keepstep.attribution.rules.resumes import follows
from keepstep.catalog.load import Catalog
from keepstep.catalog.signature import Signature
from keepstep.records.event import Event

MOST = 200
"""Facts of one kind that are looked at."""
TIME_CHARS = 16
"""Of an ISO time, down to the minute: records are printed with different precision."""


_ISO = re.compile(r"20\d\d-\d\d-\d\d[T ]\d\d:\d\d")


def _of(events: Sequence[Event], *signatures: str) -> list[Event]:
    return [e for e in events if e.signature in signatures][:MOST]


def _fails(entry: Signature) -> bool:
    return entry.role in ("root", "symptom", "cascade") and entry.severity in ("error", "fatal", "warning")


def _failing(events: Sequence[Event], catalog: Catalog, *but: str) -> list[Event]:
    return [e for e in events if _fails(catalog[e.signature]) and e.signature not in but][:MOST]


def reason_outdated(events: Sequence[Event], catalog: Catalog) -> list[Event]:
    """A drain whose reason is older than the machine that has its node's name, with nothing wrong on that machine."""
    drains = [e for e in _of(events, "slurm.node_drain") if isinstance(e.attrs.get("since"), str)]
    if not drains or _failing(events, catalog):
        return []
    for drain in drains:
        since = str(drain.attrs["since"]).replace(" ", "T")[:TIME_CHARS]
        for made in _of(events, "sched.machine_created"):
            times = _ISO.findall(made.evidence.text)
            at = times[0].replace(" ", "T") if len(times) == 1 else ""
            named = drain.node is not None and drain.node in made.evidence.text
            if since < at and (named or len(drains) == 1):
                return [derive(catalog, "derived.sched.reason_outdated", drain, attrs={"since": since, "at": at})]
    return []


def check_contradicted(events: Sequence[Event], catalog: Catalog) -> list[Event]:
    """A check of status, mount or service that fails while the thing itself is seen to work afterwards."""
    claims = _of(events, "sched.check_claim")
    works = _of(events, "sched.thing_works")
    if not claims or not works or _failing(events, catalog, "check.failed"):
        return []
    last = max(works, key=lambda e: e.evidence.line)
    if not all(follows(claim, last) for claim in claims):
        return []
    return [derive(catalog, "derived.sched.check_contradicted", last)]


def drilled(events: Sequence[Event], catalog: Catalog) -> list[Event]:
    """Faults that somebody injected, after which the job made steps again; nothing of them need be seen."""
    facts = _of(events, "drill.fact")
    steps = [e for e in events if e.kind == PROGRESS][:MOST]
    failing = _failing(events, catalog)
    if not facts or not steps:
        return []
    begin = min(facts, key=lambda e: e.evidence.line)
    # The step counter stands for a series: where it ends counts.
    last = max(steps, key=lambda e: number(e.attrs.get("last_order")) or e.order)
    at = last.attrs.get("before_last_order", last.order)
    after = [f for f in failing if not _before_steps(f, last, at)]
    early = [f for f in failing if follows(f, begin) and f.evidence.line != begin.evidence.line]
    if after or early or last.count < 2 or not _before_steps(begin, last, at):
        return []
    return [derive(catalog, "derived.drill_over", end_of(last), placed=False)]


def _before_steps(failure: Event, last: Event, at: object) -> bool:
    """Whether two steps at least were made after a failure."""
    if follows(failure, last):
        return True
    same = (failure.evidence.path, failure.source) == (last.evidence.path, last.source)
    return same and isinstance(at, int) and failure.order < at


def devices_back(events: Sequence[Event], catalog: Catalog) -> list[Event]:
    """A node that offered no devices for a moment and offers them again, with nothing else wrong."""
    offers = [(n, e) for e in _of(events, "k8s.devices_offered") if (n := number(e.attrs.get("offered"))) is not None]
    none = [e for n, e in offers if n == 0]
    again = [e for n, e in offers if n > 0]
    if not none or _failing(events, catalog, "k8s.node_gpus_missing"):
        return []
    for back in [*again, *_of(events, "k8s.plugin_registered")]:
        if all(follows(e, back) for e in none):
            return [derive(catalog, "derived.sched.devices_back", back)]
    return []


def wrong_requeue(events: Sequence[Event], catalog: Catalog) -> list[Event]:
    """A program whose own requeue was refused, and jobs that were requeued besides: it asked for the wrong one."""
    refused, others = _of(events, "slurm.requeue_refused"), _of(events, "slurm.job_requeued", "derived.sched.cancelled")
    if not refused or not others:
        return []
    explains = ["derived.sched.cancelled", "slurm.requeue_refused", "slurm.job_time_limit", "slurm.job_requeued"]
    return [derive(catalog, "derived.sched.wrong_requeue", refused[0], explains=explains, placed=False)]


def maintenance_ahead(events: Sequence[Event], catalog: Catalog) -> list[Event]:
    """A machine that will be stopped, with a job on it that makes steps."""
    told = _of(events, "cloud.maintenance")
    steps = [e for e in events if e.kind == PROGRESS]
    if not told or not steps or _failing(events, catalog, "cloud.maintenance"):
        return []
    nodes = {e.node for e in events if e.node is not None}
    node = next(iter(nodes)) if len(nodes) == 1 else None
    return [derive(catalog, "derived.sched.maintenance_ahead", told[0], node=node, explains=["cloud.maintenance"])]


AFTERMATH_RULES = (
    reason_outdated,
    check_contradicted,
    drilled,
    devices_back,
    wrong_requeue,
    maintenance_ahead,
)
"""In the order they run, last of all but what machines have in common."""
