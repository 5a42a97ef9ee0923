"""What came again, and what was tried again: ports that flap, saves that meet the same left-over, addresses of a former attempt."""

from __future__ import annotations

import re
from collections import defaultdict
from collections.abc import Sequence

from keepstep.attribution.current import end_of
from keepstep.attribution.order import canonical, compare
from keepstep.attribution.rules.deriving import derive
from keepstep.attribution.rules.jobfacts import FAILING, before, number, of, waits
from keepstep.attribution.worked import worked
from keepstep.catalog.load import Catalog
from keepstep.records.event import Event

MOST = 64
TIMES = 2
"""A port that went down twice flaps; once is a cable that was touched."""
LIVES = ("ckpt.attempt", "launcher.cycle", "ckpt.resumed", "job.started", "elastic.restarting", "slurm.job_requeued")
LINK_KINDS = frozenset({"collective.abort", "collective.timeout", "nccl.error", "nic.link", "derived.transport"})
_ATTEMPT = re.compile(r"(?i)\b(?:attempt|restart|cycle|incarnation)[ =#:_]{0,2}(?P<number>\d{1,6})\b")
STRONG = 1.5
"""Weight from which on a root is a cause of its own."""


def port_flaps(events: Sequence[Event], catalog: Catalog) -> list[Event]:
    """The only port that went down, more than once, in a job that failed of it."""
    downs = [e for e in of(events, "nccl.ib_port_event") if str(e.attrs.get("what")) == "port error"]
    places: dict[tuple[str | None, str | None], list[Event]] = defaultdict(list)
    for event in downs:
        places[event.node, event.nic].append(event)
    if len(places) != 1:
        return []  # several ports at once have their switch, or its power, in common
    (seen,) = places.values()
    times = sum(e.count for e in seen)
    last = max((end_of(e) for e in seen), key=canonical)
    # What the program says of itself is not the port's doing.
    failed = [
        e
        for e in events
        if e.kind in LINK_KINDS
        and catalog[e.signature].role in FAILING
        and e not in downs
        and compare(e, seen[0]) != "before"
    ]
    if times < TIMES or not failed or worked(events, catalog).after(last):
        return []
    explains = ["nccl.ib_port_event", "nccl.ib_retry_exceeded", "derived.link_failed"]
    return [derive(catalog, "derived.port_flaps", seen[0], attrs={"times": times}, explains=explains)]


def port_came_back(events: Sequence[Event], catalog: Catalog) -> list[Event]:
    """A port that was down once or twice, is active again, and steps after that with nothing else that failed."""
    downs, ups = of(events, "nccl.ib_port_event")[:MOST], of(events, "nccl.ib_port_active")[:MOST]
    if not downs or not ups or sum(e.count for e in downs) > TIMES or of(events, "fact.hang_told"):
        return []
    signs = worked(events, catalog)
    last = max((end_of(e) for e in ups), key=canonical)
    back = all(any(u.nic == d.nic and before(end_of(d), end_of(u)) for u in ups) for d in downs)
    failed = (e for e in events if e not in downs and catalog[e.signature].role in FAILING and e.severity != "info")
    if not back or not signs.after(last) or any(failed):
        return []
    return [derive(catalog, "derived.port_came_back", last, placed=False)]


def exists_passed(events: Sequence[Event], catalog: Catalog) -> list[Event]:
    """A left-over of a save that stopped one attempt, and steps of a later attempt."""
    seen = of(events, "ckpt.exists_already")[:MOST]
    signs = worked(events, catalog)
    if not seen or not all(signs.after(e) for e in seen) or of(events, "fact.hang_told"):
        return []
    lives = [e for e in of(events, *LIVES) if any(_line(s) < _line(e) for s in seen)]
    return [derive(catalog, "derived.ckpt.exists_passed", max(seen, key=_line), placed=False)] if lives else []


def exists_again(events: Sequence[Event], catalog: Catalog) -> list[Event]:
    """The same left-over of a save in the way of several attempts, and no step after the last."""
    seen = sorted(of(events, "ckpt.exists_already"), key=_line)[:MOST]
    if not seen or sum(e.count for e in seen) < TIMES or worked(events, catalog).after(end_of(seen[-1])):
        return []
    titles = {e.source for e in seen}
    first, last = _line(seen[0]), (seen[-1].evidence.path, _last_line(seen[-1]))
    lives = [e for e in of(events, *LIVES) if first < _line(e) < last or any(first < x < last for x in _more(e))]
    if len(titles) < TIMES and not lives:
        return []  # the ranks of one attempt say the same
    explains = ["ckpt.exists_already", "ckpt.no_metadata", "torch.watchdog_timeout"]
    return [derive(catalog, "derived.ckpt.exists_again", seen[0], explains=explains, placed=False)]


def _line(event: Event) -> tuple[str, int]:
    return event.evidence.path, event.evidence.line or 0


def _last_line(event: Event) -> int:
    last = event.attrs.get("last_order")
    return last if isinstance(last, int) else event.evidence.line or 0


def _more(event: Event) -> list[tuple[str, int]]:
    """Where the last of several that one event stands for is."""
    return [(event.evidence.path, _last_line(event))]


def closed_by_restart(events: Sequence[Event], catalog: Catalog) -> list[Event]:
    """A rendezvous that is closed right after the agent said that it restarts its workers, where nobody was asked to leave."""
    closed = sorted(of(events, "elastic.rendezvous_closed"), key=canonical)[:MOST]
    restarts = [e for e in of(events, "elastic.restarting") if (number(e.attrs.get("left")) or 0) > 0][:MOST]
    left = of(events, "exit.stopped_from_outside", "exit.sigterm", "signal.stop_received", "sched.taken_away")
    if not closed or not restarts or left or any(e.kind.startswith("sched.") for e in events):
        return []
    causes = (catalog[e.signature] for e in events)
    if any(c.role == "root" and max(c.weights.values(), default=0.0) >= STRONG for c in causes):
        return []  # then it is known why the workers ended, and the rest follows
    late = next((c for c in closed if any(before(r, c) for r in restarts)), None)
    if late is None:
        return []
    explains = ["elastic.rendezvous_closed"]
    return [derive(catalog, "derived.rendezvous_closed_by_restart", late, explains=explains, placed=False)]


DIALS = ("nccl.connect_refused", "nccl.connect_unreachable")


def dialled_former(events: Sequence[Event], catalog: Catalog) -> list[Event]:
    """A connection to where the first rank of an earlier attempt listened, while that of this one listens elsewhere."""
    dials, roots = of(events, *DIALS)[:MOST], of(events, "nccl.bootstrap_listens")[:MOST]
    if not dials or len(roots) < TIMES:
        return []
    listens = {(str(e.attrs.get("host")), str(e.attrs.get("port"))): e for e in roots}
    for dial in dials:
        host, _, port = str(dial.attrs.get("peer") or "").rstrip(">").rpartition("<")
        former = listens.get((host, port))
        current = [e for (h, p), e in listens.items() if h == host and p != port]
        if former is None or not current:
            continue
        if all(_of_earlier(former, e) for e in current):
            attrs = {"peer": f"{host}<{port}>"}
            conclusion = "derived.dialled_former_attempt"
            return [derive(catalog, conclusion, dial, attrs=attrs, explains=list(DIALS), placed=False)]
    return []


def _of_earlier(former: Event, current: Event) -> bool:
    """Whether an address is of an earlier attempt than another: by the numbers that stand with them, else by their order."""
    one, other = _attempt(former), _attempt(current)
    if one is not None and other is not None and one != other:
        return one < other
    return one is not None if other is None and one is not None else before(former, current)


def _attempt(event: Event) -> int | None:
    match = _ATTEMPT.search(event.evidence.text) or _ATTEMPT.search(event.source)
    return None if match is None else int(match["number"])


def store_retried(events: Sequence[Event], catalog: Catalog) -> list[Event]:
    """Connections to the store that were tried again, with steps of the job after all of them."""
    tries = of(events, "torch.store_connect_failed")[:MOST]
    signs = worked(events, catalog)
    if not tries or not all(signs.after(e) for e in tries):
        return []
    return [derive(catalog, "derived.store_retried", tries[0], placed=False)]


def data_stalled(events: Sequence[Event], catalog: Catalog) -> list[Event]:
    """Reads of remote data that are tried again by a rank that the others wait for, or until no try is left."""
    tries = of(events, "data.remote_retry")[:MOST]
    signs = worked(events, catalog)
    open_ones = [e for e in tries if not signs.after(e)]
    if not open_ones:
        return []
    last = max(open_ones, key=_line)
    limit = number(last.attrs.get("of"))
    gave_up = limit is not None and number(last.attrs.get("attempt")) == limit
    waiting = waits(events)
    late = [w for w in waiting if w.rank is None or w.rank not in {e.rank for e in open_ones}]
    # Who waits in a collective does not wait for its data: the two have to be of different ranks.
    stalled = bool(late) and sum(e.count for e in open_ones) >= TIMES
    told = all(compare(open_ones[0], w.event) != "after" for w in late)
    if not gave_up and not (stalled and told):
        return []
    explains = ["data.remote_retry", "data.remote_gave_up", "torch.watchdog_timeout"]
    return [derive(catalog, "derived.data_stalled", open_ones[0], explains=explains)]


AGAIN_RULES = (
    port_flaps,
    port_came_back,
    exists_again,
    exists_passed,
    closed_by_restart,
    dialled_former,
    store_retried,
    data_stalled,
)
"""Each: `(events, catalog) -> list[Event]`."""
