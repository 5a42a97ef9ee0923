"""A failure in relation to what else is known: asked for, finished before, resumed after, or passing by itself."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from keepstep.attribution.current import end_of, goes_on
from keepstep.attribution.order import SECOND_NS, canonical, compare
from keepstep.attribution.rules.deriving import derive
from keepstep.attribution.rules.jobfacts import PROGRESS, WAITS, before, begin_of_wait, of, waits
from keepstep.catalog.load import Catalog
from keepstep.records.event import Event

MOST_PAIRS = 64
"""Events of one kind that are held against those of another."""
FAILING_ROLES = ("root", "cascade")
LEAST_GONE_S = 1800.0
"""Heartbeats that fail for so long do not come back; a store that is started again is there within minutes."""
SLACK_S = 10.0
"""Ranks print the end of their work at about the same time."""

STOPPED = ("sched.", "slurm.", "kueue.", "k8s.", "exit.", "elastic.", "submitit.")
RESUMED = ("job.started", "ckpt.resumed", "job.loading")


def drill(events: Sequence[Event], catalog: Catalog) -> list[Event]:
    """A fault that was injected, and steps or a good end after everything that failed."""
    asked = sorted(of(events, "job.drill"), key=canonical)[:MOST_PAIRS]
    if not asked:
        return []
    last = _last_work(events, catalog)
    if last is None or not before(asked[0], last) or _fails_after(events, last, catalog):
        return []
    # What failed before the drill was announced is real: a drill that is planned for next week excuses nothing.
    failed = (
        e for e in events if catalog[e.signature].role == "root" and catalog[e.signature].severity in ("error", "fatal")
    )
    if any(e.evidence.line != asked[0].evidence.line and before(e, asked[0]) for e in failed):
        return []
    return [derive(catalog, "derived.drill", last, attrs={"asked": asked[0].evidence.text[:160]})]


def running_again(events: Sequence[Event], catalog: Catalog) -> list[Event]:
    """A job that was stopped by its scheduler or launcher, resumed, and makes steps: its end before is over."""
    stops = sorted((e for e in events if _stopped(e, catalog)), key=canonical)
    resumes = sorted((e for e in events if _resumes(e)), key=canonical)
    last = _last_work(events, catalog)
    if not stops or not resumes or last is None or last.kind != PROGRESS:
        return []
    resume = resumes[-1]
    if not before(stops[0], resume) or not before(resume, last) or _fails_after(events, resume, catalog):
        return []
    return [derive(catalog, "derived.running_again", last, attrs={"resumed": resume.evidence.text[:160]})]


def _stopped(event: Event, catalog: Catalog) -> bool:
    return event.signature.startswith(STOPPED) and catalog[event.signature].role != "noise"


def _resumes(event: Event) -> bool:
    text = event.evidence.text.lower()
    return event.signature == "ckpt.resumed" or (event.signature in RESUMED and "resum" in text)


def _last_work(events: Iterable[Event], catalog: Catalog) -> Event | None:
    """The last sighting of a step or a good end."""
    return max((end_of(e) for e in events if goes_on(catalog[e.signature])), key=canonical, default=None)


def _fails_after(events: Iterable[Event], moment: Event, catalog: Catalog) -> bool:
    for event in events:
        entry = catalog[event.signature]
        if entry.role not in FAILING_ROLES or entry.severity not in ("error", "fatal") or entry.action == "none":
            continue
        if not event.signature.startswith("derived.") and before(moment, event):
            return True
    return False


def user_cancelled(events: Sequence[Event], catalog: Catalog) -> list[Event]:
    """A cancellation by a person, and nothing that failed before it."""
    for event in sorted((e for e in events if e.kind == "sched.cancel"), key=canonical)[:MOST_PAIRS]:
        uid = str(event.attrs.get("uid") or "")
        if uid in ("", "0", "root"):
            continue
        failed = [e for e in events if catalog[e.signature].role in FAILING_ROLES and before(e, event)]
        if not any(catalog[e.signature].severity in ("error", "fatal") and not _stopped(e, catalog) for e in failed):
            return [derive(catalog, "derived.user_cancelled", event, attrs={"uid": uid})]
    return []


def session_closed(events: Sequence[Event], catalog: Catalog) -> list[Event]:
    """SIGHUP to a launcher that was started from a terminal."""
    hangups, terminals = of(events, "exit.hangup"), of(events, "job.terminal")
    if not hangups or not terminals or any(e.kind in ("sched.preempt", "sched.requeue") for e in events):
        return []
    attrs = {"terminal": terminals[0].evidence.text[:160]}
    return [derive(catalog, "derived.session_closed", min(hangups, key=canonical), attrs=attrs)]


def name_came_later(events: Sequence[Event], catalog: Catalog) -> list[Event]:
    """A name that could not be resolved at start, and could later."""
    missed = sorted(of(events, "net.host_not_found", "torch.store_name_unresolved"), key=canonical)
    found = of(events, "net.name_found")[:MOST_PAIRS]
    if missed and any(compare(missed[0], f) != "after" for f in found):
        return [derive(catalog, "derived.name_came_later", missed[0], attrs={})]
    return []


def finished_apart(events: Sequence[Event], catalog: Catalog) -> list[Event]:
    """A single rank that waits in a collective which it entered when training had ended."""
    waiting = waits(events)
    ranks = {w.rank for w in waiting if w.rank is not None}
    ended = sorted(of(events, "job.train_ended", "job.ended_well"), key=canonical)
    if len(ranks) != 1 or not ended:
        return []
    begin_ns, end = begin_of_wait(waiting), ended[0]
    if begin_ns is not None and end.time_ns is not None:
        if begin_ns < end.time_ns - SLACK_S * SECOND_NS:
            return []
    elif not before(end, waiting[0].event):
        return []
    rank = ranks.pop()
    return [derive(catalog, "derived.finished_apart", waiting[0].event, attrs={"about_rank": rank})]


def uneven_data(events: Sequence[Event], catalog: Catalog) -> list[Event]:
    """Ranks with different numbers of batches, and a wait."""
    uneven = of(events, "job.uneven_data")
    if not uneven or not waits(events):
        return []
    attrs = {name: uneven[0].attrs.get(name) for name in ("unit", "counts")}
    return [derive(catalog, "derived.uneven_data", uneven[0], attrs=attrs)]


NVLS = ("nccl.nvls_warning", "nccl.nvls_failed")


def multicast_lost(events: Sequence[Event], catalog: Catalog) -> list[Event]:
    """Multicast that fails on a host whose fabric manager was stopped before."""
    stopped = of(events, "fabricmanager.restarted")[:MOST_PAIRS]
    for event in of(events, *NVLS)[:MOST_PAIRS]:
        cause = next((s for s in stopped if s.node in (event.node, None) and compare(event, s) != "before"), None)
        if cause is not None:
            return [derive(catalog, "derived.multicast_lost", event, attrs={"restart": cause.evidence.text[:160]})]
    return []


def agent_never_left(events: Sequence[Event], catalog: Catalog) -> list[Event]:
    """Heartbeats to a rendezvous that fail for half an hour."""
    beats = [e for e in of(events, "elastic.keep_alive_failed") if e.time_ns is not None]
    if not beats:
        return []
    first = min(beats, key=canonical)
    last_ns = max(e.last_ns or e.time_ns or 0 for e in beats)
    gone_s = (last_ns - (first.time_ns or 0)) / SECOND_NS
    if gone_s < LEAST_GONE_S:
        return []
    return [derive(catalog, "derived.agent_never_left", first, attrs={"minutes": round(gone_s / 60)})]


TOOLS = (
    "flight_recorder",
    "fr_trace",
    "frtrace",
    "py-spy",
    "pyspy",
    "nsys",
    "dcgm",
    "/tools/",
    "monitor",
    "exporter",
    "dashboard",
)
"""Parts of paths of programs that look at a job and are none of it."""


def tool_failed(events: Sequence[Event], catalog: Catalog) -> list[Event]:
    """An exception in a tool that looks at a job, where the job works or has ended well."""
    raised = [e for e in events if e.kind == "rank.exception" and _in_tool(e)]
    if not raised or _last_work(events, catalog) is None:
        return []
    others = [e for e in events if not _in_tool(e) and not e.signature.startswith("derived.")]
    if any(
        catalog[e.signature].severity in ("error", "fatal") and catalog[e.signature].role != "noise" for e in others
    ):
        return []
    return [derive(catalog, "derived.tool_failed", min(raised, key=canonical), attrs={})]


def _in_tool(event: Event) -> bool:
    path = str(event.attrs.get("innermost") or "") if event.kind == "rank.exception" else ""
    return any(part in path for part in TOOLS)


DUMPS = ("evidence.dumps_listed", "fr.dump_by_hand", "fr.call")


def dumps_while_working(events: Sequence[Event], catalog: Catalog) -> list[Event]:
    """Flight records, and steps after them, with nothing that failed."""
    dumps = sorted(of(events, *DUMPS), key=canonical)
    last = _last_work(events, catalog)
    if not dumps or last is None or compare(dumps[0], last) == "after":
        return []
    if any(catalog[e.signature].severity in ("error", "fatal") for e in events):
        return []
    return [derive(catalog, "derived.dumps_while_working", dumps[0], attrs={})]


def other_version(events: Sequence[Event], catalog: Catalog) -> list[Event]:
    """Something failed, or waits, that does not with another version or another setting."""
    failing = [e for e in events if catalog[e.signature].severity in ("error", "fatal")]
    failing = failing or of(events, "job.culprit_moves", *WAITS)
    found = []
    for remark, conclusion, name in (
        ("job.other_version_works", "derived.library_version", "version"),
        ("job.setting_works", "derived.launcher_setting", "setting"),
    ):
        told = of(events, remark)
        if told and failing:
            attrs = {name: told[0].attrs.get(name)}
            found.append(derive(catalog, conclusion, min(failing, key=canonical), attrs=attrs))
    return found


RELATION_RULES = (
    tool_failed,
    dumps_while_working,
    other_version,
    drill,
    running_again,
    user_cancelled,
    session_closed,
    name_came_later,
    finished_apart,
    uneven_data,
    multicast_lost,
    agent_never_left,
)
"""Each: `(events, catalog) -> list[Event]`."""
