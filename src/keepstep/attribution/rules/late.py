"""Who is late when others wait, and with what.

A time-out is printed by those who wait. The one they wait for is a rank that prints none, is named by a barrier that knows, or has
nothing pending; what it is busy with meanwhile tells whose fault the wait is.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

from keepstep.attribution.current import end_of
from keepstep.attribution.order import SECOND_NS, compare
from keepstep.attribution.rules.deriving import derive
from keepstep.attribution.rules.jobfacts import (
    PROGRESS,
    Wait,
    begin_of_wait,
    by_rank,
    known_ranks,
    number,
    of,
    ranks_of,
    waiting_rank,
    waits,
)
from keepstep.catalog.load import Catalog
from keepstep.records.event import Event

CONCLUSION_OF = {
    "job.evaluating": "derived.late_in_evaluation",
    "job.preparing_data": "derived.late_in_data",
    "job.data_progress": "derived.late_in_data",
    "job.single_rank_work": "derived.late_in_data",
    "job.saving": "derived.late_in_checkpoint",
    "job.loading": "derived.late_in_loading",
    "job.compiling": "derived.late_in_compilation",
    "job.finished_rank": "derived.late_finished",
    "stack.download": "derived.late_in_download",
    PROGRESS: "derived.late_stepping",
}
"""What a late rank was seen to be busy with, and the conclusion."""

DOING_TO_ACTIVITY = {
    "saving": "job.saving",
    "evaluating": "job.evaluating",
    "data": "job.preparing_data",
    "compiling": "job.compiling",
    "loading": "job.loading",
    "download": "stack.download",
}
"""Words of sources/joblog/stacks.py."""

MOST_LATE_SHARE = 0.5
"""Of the known ranks: when more than half do not wait, those who wait are not held up by a few."""

STEPPING_SHARE = 0.25
"""Of the wait: a rank that makes steps for so long does not take part in it."""

SLACK_S = 120.0
"""A rank that logs once a minute or two and is busy is still busy."""


MOST_CONCLUSIONS = 64
"""Late ranks that are told of one by one; more of them say the same."""
MOST_PAIRS = 256
"""Events of one kind that are held against those of another."""


class Hold(NamedTuple):
    """A wait as a whole: its first and last sighting, when the first rank began to wait (UTC ns), and how many ranks wait."""

    first: Event
    last: Event
    begin_ns: int | None
    ranks: int
    op: str
    seq: int | None


def hold_of(waiting: Sequence[Wait]) -> Hold:
    """The wait that these make together; there is at least one."""
    ordered = sorted((w.event for w in waiting), key=lambda e: (e.time_ns or 0, e.order))
    count = len({w.rank for w in waiting})
    return Hold(ordered[0], ordered[-1], begin_of_wait(waiting), count, waiting[0].op or "a collective", waiting[0].seq)


class Late(NamedTuple):
    """A rank that others wait for. `named`: by a message that knows, not only by its absence."""

    rank: int
    named: bool


def who_is_late(events: Sequence[Event], catalog: Catalog) -> list[Event]:
    """A conclusion for each late rank: with what it is late, or only that it is absent."""
    waiting = waits(events)
    if not waiting:
        return []
    late = late_ranks(events, waiting)
    ranks = by_rank(events)
    hold = hold_of(waiting)
    found: list[Event] = []
    told = False
    for one in late:
        conclusion = _conclude(one, ranks.get(one.rank, []), hold, catalog)
        if conclusion is not None:
            found.append(conclusion)
            told = told or conclusion.signature != "derived.absent_rank"
        if len(found) >= MOST_CONCLUSIONS:
            break
    if not told and not any(_failed(e, catalog) for one in late for e in ranks.get(one.rank, [])):
        found += _anonymous(events, hold, catalog)
    return found


def late_ranks(events: Sequence[Event], waiting: Sequence[Wait]) -> list[Late]:
    """Ranks that the waiting wait for, those named by a message first."""
    waiters = {w.rank for w in waiting if w.rank is not None}
    named = _named(events, waiting) - waiters
    known = known_ranks(events) - waiters
    holes = _holes(waiters)
    silent = known | holes
    if len(silent) > MOST_LATE_SHARE * len(waiters | silent) and len(waiters) > 1:
        silent = set()
    return [Late(r, True) for r in sorted(named)] + [Late(r, False) for r in sorted(silent - named)]


def _named(events: Sequence[Event], waiting: Sequence[Wait]) -> set[int]:
    found: set[int] = set()
    for event in events:
        found.update(ranks_of(event.attrs.get("late_ranks")))
    for event in events:
        about = event.attrs.get("about_rank")
        # NCCL's RAS names the ranks that are behind.
        if event.signature.startswith("ncclras.") and isinstance(about, int):
            found.add(about)
    for event in of(events, "torch.store_owner_late"):
        owner = number(event.attrs.get("owner_rank"))
        # Within another group than the job's these are not ranks of the job.
        if owner is not None and event.rank in (None, number(event.attrs.get("group_rank"))):
            found.add(owner)
    counters = of(events, "torch.rank_counters")
    if any(_pending(e) for e in counters):
        found |= {e.rank for e in counters if e.rank is not None and not _pending(e)}
    stuck: dict[str, int] = {}
    for wait in waiting:
        if wait.group is not None and wait.seq is not None:
            stuck[wait.group] = max(wait.seq, stuck.get(wait.group, wait.seq))
    for event in of(events, "torch.dump_received", "torch.watchdog_failure"):
        group = str(event.attrs.get("guid") or event.attrs.get("pg") or "")
        enqueued = number(event.attrs.get("enqueued"))
        rank = waiting_rank(event)
        if rank is None or enqueued is None:
            continue
        # It never called the collective that others are stuck in.
        if enqueued < stuck.get(group, enqueued):
            found.add(rank)
    return found


def _pending(event: Event) -> bool:
    """Whether counters say that a rank has called something that is not complete."""
    enqueued, completed = number(event.attrs.get("enqueued")), number(event.attrs.get("completed"))
    return enqueued is not None and completed is not None and enqueued > completed


def _holes(waiters: set[int]) -> set[int]:
    """Ranks below the highest waiter that do not wait, when they are few."""
    if len(waiters) < 2:
        return set()
    top = max(waiters)
    if top >= 2 * len(waiters):
        return set()
    return {r for r in range(top) if r not in waiters}


def _conclude(late: Late, own: Sequence[Event], hold: Hold, catalog: Catalog) -> Event | None:
    """What the late rank's own output says. None when it failed: then its failure is the cause, and stands by itself."""
    if any(_failed(e, catalog) for e in own):
        return None
    activity = _activity(own, hold)
    attrs = {"about_rank": late.rank, "waiting": hold.ranks, "op": hold.op, "seq": hold.seq}
    if activity is None:
        return derive(catalog, "derived.absent_rank", hold.first, attrs=attrs, rank=late.rank)
    signature, basis = activity
    return derive(catalog, signature, basis, attrs=attrs | {"doing": basis.evidence.text[:200]}, rank=late.rank)


def _failed(event: Event, catalog: Catalog) -> bool:
    """Whether an event says that its rank failed of something that has an entry of its own."""
    if event.signature.startswith("derived."):
        return False
    entry = catalog[event.signature]
    if entry.role == "root" and entry.severity in ("error", "fatal"):
        return True
    return event.kind in ("storage.error", "checkpoint.failed", "rank.exception", "rank.exit") and entry.role != "noise"


def _activity(own: Sequence[Event], hold: Hold) -> tuple[str, Event] | None:
    """The conclusion and the event it rests on: what the rank was seen at during the wait, else the last thing before it."""
    begin_ns, last = hold.begin_ns, hold.last
    stacks = [e for e in own if e.signature == "stack.outside"]
    for event in stacks:
        doing = str(event.attrs.get("doing"))
        if doing in DOING_TO_ACTIVITY:
            return CONCLUSION_OF[DOING_TO_ACTIVITY[doing]], event
        if doing == "code":
            return "derived.late_in_code", event
    acts = [e for e in own if e.signature in CONCLUSION_OF]
    if not acts:
        return None
    during = [
        e for e in acts if _during(e, begin_ns, last) and (e.signature != PROGRESS or _went_on(e, begin_ns, last))
    ]
    telling = [e for e in during if e.signature != PROGRESS] or during
    if telling:
        # The first thing it was at when the others began to wait is what they waited for.
        return CONCLUSION_OF[telling[0].signature], telling[0]
    earlier = [e for e in acts if compare(e, last) != "after" and e.signature not in (PROGRESS,)]
    if not earlier:
        return None
    latest = earlier[-1]
    return CONCLUSION_OF[latest.signature], latest


def _during(event: Event, begin_ns: int | None, last: Event) -> bool:
    """Whether an activity overlaps the wait, by its first and last sighting."""
    if begin_ns is not None and event.time_ns is not None and last.time_ns is not None:
        first, end = event.time_ns, event.last_ns or event.time_ns
        return end >= begin_ns - SLACK_S * SECOND_NS and first <= last.time_ns + SLACK_S * SECOND_NS
    return compare(last, end_of(event)) == "before"


def _went_on(progress: Event, begin_ns: int | None, last: Event) -> bool:
    """Whether steps were made well into the wait, not only up to its begin."""
    end = end_of(progress)
    if begin_ns is not None and end.time_ns is not None and last.time_ns is not None:
        return end.time_ns > begin_ns + STEPPING_SHARE * (last.time_ns - begin_ns)
    return compare(last, end) == "before"


def _anonymous(events: Sequence[Event], hold: Hold, catalog: Catalog) -> list[Event]:
    """Work that began before the wait and ended after it, in a log without ranks: somebody did it alone."""
    groups: dict[str, list[Event]] = {}
    for event in events:
        if event.rank is None and event.signature in CONCLUSION_OF and event.signature != PROGRESS:
            groups.setdefault(event.signature, []).append(event)
    for signature, members in sorted(groups.items()):
        ended = [e for e in members if compare(hold.last, end_of(e)) == "before"]
        begun = [e for e in members if compare(e, hold.first) == "before"]
        spans = any(_during(e, hold.begin_ns, hold.last) and (e.last_ns or 0) > (e.time_ns or 0) for e in members)
        if (ended and begun) or spans:
            basis = (begun or members)[-1]
            attrs = {"waiting": hold.ranks, "op": hold.op, "seq": hold.seq, "doing": basis.evidence.text[:200]}
            return [derive(catalog, CONCLUSION_OF[signature], basis, attrs=attrs)]
    return []


def stuck_alone(events: Sequence[Event], catalog: Catalog) -> list[Event]:
    """A rank whose watchdog or heartbeat gave no sign, and whose stack shows what it is in: its own code keeps the interpreter."""
    stuck = of(events, "torch.heartbeat_timeout", "torch.gil_held", "nvrx.heartbeat_lost")
    if not stuck:
        return []
    ranks = {e.rank for e in stuck if e.rank is not None}
    for event in of(events, "stack.outside"):
        doing = str(event.attrs.get("doing"))
        if event.rank is not None and ranks and event.rank not in ranks:
            continue
        if doing in ("teardown", "loading", "download"):
            continue
        rank = event.rank if event.rank is not None else next(iter(ranks), None)
        signature = CONCLUSION_OF.get(DOING_TO_ACTIVITY.get(doing, ""), "derived.late_in_code")
        attrs = {"about_rank": rank, "waiting": "the", "doing": str(event.attrs.get("frame", ""))}
        return [derive(catalog, signature, event, attrs=attrs, rank=rank)]
    for event in of(events, "stack.cuda_runtime"):
        return [derive(catalog, "derived.stuck_in_cuda", event, attrs={"call": event.evidence.text[:120]})]
    return []


STEPS_APART = 3
"""Ranks of a synchronous job are at most a step apart, and their logs may lag another behind."""


def steps_apart(events: Sequence[Event], catalog: Catalog) -> list[Event]:
    """Waiting ranks that are not at one step: one has had other batches than another, or has left the epoch."""
    waiting = {w.rank for w in waits(events)}
    at: dict[int, tuple[int, int | None, Event]] = {}
    for event in of(events, PROGRESS):
        step = number(event.attrs.get("last_step", event.attrs.get("step")))
        if event.rank is not None and step is not None:
            at[event.rank] = (step, number(event.attrs.get("of")), event)
    if len(waiting) < 2 or len(at) < 2 or len({of_ for _, of_, _ in at.values()}) != 1:
        return []
    low, high = min(at, key=lambda r: at[r][0]), max(at, key=lambda r: at[r][0])
    gap = at[high][0] - at[low][0]
    ended = at[high][0] == at[high][1]
    if low not in waiting or gap < (1 if ended else STEPS_APART):
        return []
    signature = "derived.epoch_left" if ended else "derived.steps_apart"
    attrs = {"about_rank": high, "behind": low, "step": at[high][0], "behind_step": at[low][0]}
    return [derive(catalog, signature, at[low][2], attrs=attrs, rank=high)]


_SECTIONS = (
    ("derived.section_checkpoint", ("checkpoint", "ckpt", "save", "saving")),
    ("derived.section_user", ("eval", "valid", "test", "data", "infer", "generat", "setup", "load")),
)


def section_outlasted(events: Sequence[Event], catalog: Catalog) -> list[Event]:
    """A section that was open longer than its limit: by its name, whose time it was. A step says nothing: everybody waits in it."""
    for event in of(events, "nvrx.section_timeout"):
        name = str(event.attrs.get("section", "")).lower()
        for signature, words in _SECTIONS:
            if any(word in name for word in words):
                attrs = {k: event.attrs.get(k) for k in ("section", "seconds", "limit")}
                return [derive(catalog, signature, event, attrs=attrs)]
    return []


OWN_COLLECTIVES = {"job.monitor_collective": "derived.monitor_deadlock", "job.save_collective": "derived.save_deadlock"}
"""What a waiting rank may be in besides the training's own collectives, and the conclusion."""


PARTED = ("derived.collective_mismatch", "derived.size_mismatch")


def own_collectives(events: Sequence[Event], catalog: Catalog) -> list[Event]:
    """Ranks that wait in a collective of a monitor or of a save, where nothing that failed kept the others away."""
    waiting = waits(events)
    if not waiting or of(events, *PARTED) or any(_failed(e, catalog) for e in events):
        return []
    hold = hold_of(waiting)
    waiters = {w.rank for w in waiting}
    progress = by_rank(of(events, PROGRESS))
    for signature, conclusion in OWN_COLLECTIVES.items():
        for event in of(events, signature):
            if event.rank is not None and event.rank not in waiters:
                continue
            own = progress.get(event.rank, []) if event.rank is not None else []
            went_on = any(compare(event, end_of(e)) == "before" for e in own)
            if compare(hold.first, event) != "before" and not went_on:
                return [derive(catalog, conclusion, event, attrs={"waiting": hold.ranks})]
    return []


def limit_too_short(events: Sequence[Event], catalog: Catalog) -> list[Event]:
    """A heartbeat that a monitor missed while the rank was busy with what takes long and beats no heart."""
    lost = of(events, "nvrx.heartbeat_lost")[:MOST_PAIRS]
    busy = of(events, "job.compiling", "job.loading", "job.preparing_data", "job.saving", "job.evaluating")[:MOST_PAIRS]
    if not lost or not busy:
        return []
    failed = {e.rank for e in events if e.signature != "nvrx.heartbeat_lost" and _failed(e, catalog)}
    for event in lost:
        for act in busy:
            if (act.rank in (event.rank, None) or event.rank is None) and act.rank not in failed:
                attrs = {"seconds": event.attrs.get("seconds"), "doing": act.evidence.text[:160]}
                return [derive(catalog, "derived.limit_too_short", event, attrs=attrs)]
    return []
