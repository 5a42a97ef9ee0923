"""Who ended the job, and what several records of schedulers say together.

A scheduler that ends a job leaves a trail of errors in it: what the processes print while they die is not the cause. But a job that
had failed or hung before its end is not the scheduler's doing. Both are told apart by order.
"""

from __future__ import annotations

import re
from collections import defaultdict
from collections.abc import Iterable, Sequence
from typing import Any

from keepstep.attribution.current import begin_after
from keepstep.attribution.order import compare
from keepstep.attribution.rules.deriving import derive
from keepstep.catalog.load import Catalog
from keepstep.records.event import Event

ENDS = frozenset({"sched.preempt", "sched.time_limit", "sched.node_fail", "sched.evict"})
"""Kinds of events with which a scheduler ends a job."""

LAUNCHES = frozenset({"sched.launch_failed"})
HUNG = frozenset({"collective.timeout", "rank.stall"})

LEAST_PODS = 3
"""Pods that are taken away together from which on it is one decision about something that they share."""
LEAST_LAUNCHES = 2
"""Launches that fail on one node, of different jobs or again of one, from which on the node is the suspect."""
FULL = 0.9
"""Share of a memory limit from which on it counts as reached."""
SPARE = 0.75
"""Share of a limit under which the program's own memory was not what reached it."""

_POD = re.compile(r"\bpod/([\w.-]+)|\bPod ([\w.-]+/[\w.-]+)")
_LOCAL_STORAGE = frozenset(
    {
        "slurm.spool_failed",
        "k8s.runtime_storage",
        "fs.read_only",
        "fs.readonly",
        "fs.corrupt",
        "fs.error",
        "fs.io_error",
    }
    | {"fs.no_space", "block.io_error", "nvme.controller_down", "nvme.media_error"}
)


def _roots(events: Iterable[Event], catalog: Catalog) -> list[Event]:
    """Events that can be a cause, other than the ends themselves."""
    return [
        e
        for e in events
        if catalog[e.signature].role == "root" and e.severity in ("error", "fatal") and e.kind not in ENDS
    ]


def _progress_between(events: Iterable[Event], first: Event, last: Event) -> bool:
    """Whether steps were made between two events."""
    return any(e.kind == "job.progress" and begin_after(first, e) and compare(e, last) == "before" for e in events)


# ---- who ended the job


def ended_by_scheduler(events: Sequence[Event], catalog: Catalog) -> list[Event]:
    """An end by the scheduler that nothing else came before explains what the job printed while it died.

    Peers of a lost node fail before the scheduler has noticed that it is lost, by up to its own time-out: for that end, what came
    before counts as its effect too, unless it is of a machine.
    """
    ends = [e for e in events if e.kind in ENDS and catalog[e.signature].role == "root"]
    roots = _roots(events, catalog)
    found = []
    for end in ends[:8]:
        before = [r for r in roots if compare(r, end) == "before" and not _progress_between(events, r, end)]
        if end.kind == "sched.node_fail":
            before = [
                r for r in before if max(catalog[r.signature].weights.items(), key=_weight)[0] in ("hardware", "fabric")
            ]
        if before or not roots:
            continue
        after = sorted({r.signature for r in roots if compare(r, end) != "before" and _is_noise(r, catalog)})
        if after:
            found.append(
                derive(catalog, "derived.sched.ended", end, explains=after, attrs={"by": catalog[end.signature].title})
            )
    return found[:1]


def _weight(item: tuple[str, float]) -> float:
    return item[1]


def _is_noise(event: Event, catalog: Catalog) -> bool:
    """Whether a root can be what a process prints when it is killed. A fault of a machine or of a checkpoint is not."""
    weights = catalog[event.signature].weights
    blamed = max(weights, key=lambda name: weights[name], default="unknown")
    return blamed in ("user_code", "framework", "fabric") and not event.kind.startswith(
        ("checkpoint.", "resume.", "gpu.")
    )


def hung_until_limit(events: Sequence[Event], catalog: Catalog) -> list[Event]:
    """A job whose ranks waited for each other before its time limit, with no step between, was not ended by the limit."""
    for end in events:
        if end.kind != "sched.time_limit" or catalog[end.signature].role != "root":
            continue
        waits = [e for e in events if e.kind in HUNG and compare(e, end) == "before"]
        if waits and not any(_progress_between(events, w, end) for w in waits):
            return [derive(catalog, "derived.sched.hung_until_limit", waits[0])]
    return []


def cancelled(events: Sequence[Event], catalog: Catalog) -> list[Event]:
    """A job that somebody cancelled, with nothing wrong before: no fault at all."""
    cancels = [e for e in events if e.signature == "slurm.job_cancelled"]
    if not cancels or any(e.kind in ENDS and catalog[e.signature].role == "root" for e in events):
        return []
    timed = next((c for c in cancels if c.time_ns is not None), cancels[0])
    failing = [*_roots(events, catalog), *(e for e in events if e.kind in HUNG or e.kind == "job.failed")]
    if any(all(compare(f, c) not in ("after", "together") for c in cancels) for f in failing):
        return []
    noise = sorted({e.signature for e in events if catalog[e.signature].role in ("symptom", "cascade", "root")})
    return [
        derive(catalog, "derived.sched.cancelled", timed, explains=noise, attrs={"uid": timed.attrs.get("uid", "")})
    ]


def mass_eviction(events: Sequence[Event], catalog: Catalog) -> list[Event]:
    """Several pods that were evicted: one decision, about a node or a queue, not several failures."""
    pods: dict[str, Event] = {}
    for event in events:
        if event.kind in ("sched.evict", "sched.preempt") and catalog[event.signature].role == "root":
            match = _POD.search(event.evidence.text)
            name = str(event.attrs.get("pod") or "") or (match[1] or match[2] if match is not None else "")
            if name:
                pods.setdefault(name.rpartition("/")[2], event)
    if len(pods) < LEAST_PODS:
        return []
    return [derive(catalog, "derived.sched.mass_eviction", next(iter(pods.values())), attrs={"pods": len(pods)})]


# ---- memory


def memory_of_node(events: Sequence[Event], catalog: Catalog) -> list[Event]:
    """Where the node as a whole was out of memory, what was killed is not what was at fault."""
    for event in events:
        outside = event.signature in ("oom.global", "k8s.system_oom", "k8s.node_pressure_memory")
        limits = [
            e for e in events if e.signature in ("oom.cgroup", "k8s.oom_killed", "slurm.job_oom", "cgroup.oom_kill")
        ]
        if outside and not limits:
            noise = [s for s in ("dataloader.worker_killed", "exit.sigkill", "k8s.container_exit") if s in catalog]
            return [derive(catalog, "derived.sched.node_memory", event, explains=noise)]
    return []


def memory_counted(events: Sequence[Event], catalog: Catalog) -> list[Event]:
    """Whether a limit was reached by the program's memory, or by file cache that the kernel gives back when asked."""
    figures: dict[str, int] = {}
    facts = [e for e in events if e.signature == "cgroup.memory"]
    for event in facts:
        for key, value in event.attrs.items():
            if isinstance(value, int):
                figures[key] = max(value, figures.get(key, 0))
    limit, current = figures.get("max"), figures.get("current")
    if not facts or "anon" not in figures or not (limit or current):
        return []
    used = figures["anon"] + figures.get("shmem", 0) + figures.get("kernel", 0)
    bound = limit or current or 0
    attrs = {"used_bytes": used, "limit_bytes": bound, "cache_bytes": figures.get("file", 0)}
    full = current is None or current >= FULL * bound
    if used >= FULL * bound:
        return [derive(catalog, "derived.sched.limit_reached", facts[0], attrs=attrs)]
    if full and used <= SPARE * bound and not figures.get("oom_kill"):
        noise = ["batch.memory_policy", "slurm.job_oom", "k8s.oom_killed"]
        return [derive(catalog, "derived.sched.cache_counted", facts[0], attrs=attrs, explains=noise)]
    return []


# ---- nodes


def black_hole(events: Sequence[Event], catalog: Catalog) -> list[Event]:
    """A node on which starts fail again and again while others work; with a sign of its local storage, that is broken."""
    local = {e.node for e in events if e.signature in _LOCAL_STORAGE and e.node is not None}
    broken = any(e.signature in _LOCAL_STORAGE for e in events)
    launches: dict[str, list[Event]] = defaultdict(list)
    named = {e.node for e in events if e.node is not None}
    for event in events:
        if event.kind in LAUNCHES and catalog[event.signature].role in ("root", "symptom"):
            node = event.node or (next(iter(named)) if len(named) == 1 else None)
            if node is not None:
                launches[node].append(event)
    if len(launches) != 1:
        return []  # on several nodes it is what is started, not where
    node, failed = next(iter(launches.items()))
    if _attempts(failed) < LEAST_LAUNCHES or any(e.signature == "derived.sched.black_hole" for e in events):
        return []
    if any(max(catalog[e.signature].weights.get("user_code", 0.0), 0.0) > 2.0 for e in failed):
        return []  # an image or a command that is not there fails everywhere
    storage = node in local or (broken and not local)
    signature = "derived.sched.black_hole_storage" if storage else "derived.sched.black_hole"
    explains = sorted({e.signature for e in failed})
    return [derive(catalog, signature, failed[0], node=node, explains=explains, attrs={"launches": _attempts(failed)})]


def _attempts(failed: Sequence[Event]) -> int:
    """How many starts failed: lines, of which two about one pod or job at one time are one."""
    seen: set[Any] = set()
    for event in failed:
        about = event.attrs.get("pod") or event.job or event.attrs.get("job")
        seen.add((about, event.evidence.line if about is None else event.attrs.get("restarts"), event.evidence.path))
    repeats = sum(max(0, e.count - 1) for e in failed)
    return len(seen) + repeats


def drain_waits(events: Sequence[Event], catalog: Catalog) -> list[Event]:
    """A node that drains with a job on it is to be left alone until the job has reached a checkpoint or ended."""
    failed = [e for e in events if e.kind == "job.failed" or e.kind in ENDS or e.kind in HUNG]
    if failed or _roots(events, catalog):
        return []
    running = [e for e in events if e.signature == "slurm.job_running"]
    for event in events:
        if event.signature == "slurm.node_drain" and (
            event.attrs.get("busy") is True or (running and event.attrs.get("busy") is None)
        ):
            return [
                derive(catalog, "derived.sched.drain_waits", event, attrs={"reason": event.attrs.get("reason", "")})
            ]
    return []


SCHEDULER_RULES = (
    hung_until_limit,
    ended_by_scheduler,
    cancelled,
    mass_eviction,
    memory_of_node,
    memory_counted,
    black_hole,
    drain_waits,
)
"""In the order they run."""
