"""Who ended the job, and what several records of schedulers say together.

A scheduler that ends a job leaves a trail of errors in it: what the processes print while they die is not the cause. But a job that
had failed or hung before its end is not the scheduler's doing. Both are told apart by order.
"""

from __future__ import annotations

import re
from collections import defaultdict
from collections.abc import Iterable, Sequence
from itertools import islice

from keepstep.attribution.current import begin_after, end_of
from keepstep.attribution.order import compare
from keepstep.attribution.rules.deriving import derive
from keepstep.attribution.rules.lives import JOB_TASKS
from keepstep.catalog.load import Catalog
from keepstep.records.event import Event

ENDS = frozenset({"sched.preempt", "sched.time_limit", "sched.node_fail", "sched.evict"})
"""Kinds of events with which a scheduler ends a job."""

ADMISSIONS = frozenset({"k8s.admission_devices", "k8s.admission_refused", "slurm.launch_unreachable"})
"""Refusals that pass: after a restart of the node's daemon, in a race."""
HUNG = frozenset({"collective.timeout", "rank.stall"})

_OUT_OF_SIGHT = frozenset({"k8s.node_not_ready", "slurm.node_not_responding", "slurm.controller_unreachable"})

MAX_COMPARED = 256
"""Events of one role that are compared with those of another; in a storm more of them say the same."""
RECORD = 2.5
"""Weight for platform from which on an entry is a record of what a scheduler did, not words that hint at it."""
NO_NOISE = ("checkpoint.", "resume.", "gpu.", "sched.", "host.", "rank.config")
"""Kinds of events that no process prints because it is killed."""
LEAST_PODS = 3
"""Pods that are taken away together from which on it is one decision about something that they share."""
MUCH_LARGER = 3
"""Times the memory of the job's own victim from which on another process is the one that filled the node."""
LEAST_NODE_FAILS = 3
"""Failures of one node under different jobs from which on it is the node, not chance."""
LEAST_REFUSED = 3
"""The same of refusals that usually pass."""
LEAST_LAUNCHES = 2
"""Launches that fail on one node, of different jobs or again of one, from which on the node is the suspect."""
FULL = 0.9
"""Share of a memory limit from which on it counts as reached."""
FREE = 0.5
"""Share of a limit under which memory cannot have been the reason."""
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
    found = (
        e
        for e in events
        if catalog[e.signature].role == "root" and e.severity in ("error", "fatal") and e.kind not in ENDS
    )
    return list(islice(found, MAX_COMPARED))


def _steps(events: Iterable[Event]) -> list[Event]:
    """Signs that steps were made. Ranks make them together: some of many say it for all."""
    return list(islice((e for e in events if e.kind == "job.progress"), MAX_COMPARED))


def _made_between(steps: Sequence[Event], first: Event, last: Event) -> bool:
    """Whether steps were made between two events."""
    return any(begin_after(first, e) and compare(e, last) == "before" for e in steps)


# ---- who ended the job


def ended_by_scheduler(events: Sequence[Event], catalog: Catalog) -> list[Event]:
    """An end by the scheduler that nothing else came before explains what the job printed while it died.

    Peers of a lost node fail before the scheduler has noticed that it is lost, by up to its own time-out: for that end, what came
    before counts as its effect too, unless it is of a machine.
    """
    ends = [e for e in events if e.kind in ENDS and _says_so(e, catalog)]
    roots, steps = _roots(events, catalog), _steps(events)
    if any(e.kind == "derived.ckpt" and catalog[e.signature].role == "root" for e in events):
        return []  # the end is past: what counts is what came of it
    found = []
    for end in ends[:8]:
        before = [r for r in roots if compare(r, end) == "before" and not _made_between(steps, r, end)]
        if end.kind == "sched.node_fail":
            before = [
                r for r in before if max(catalog[r.signature].weights.items(), key=_weight)[0] in ("hardware", "fabric")
            ]
        if before:
            continue
        after = sorted({r.signature for r in roots if compare(r, end) != "before" and _is_noise(r, catalog)})
        if after:
            found.append(
                derive(catalog, "derived.sched.ended", end, explains=after, attrs={"by": catalog[end.signature].title})
            )
    return found[:1]


def _says_so(event: Event, catalog: Catalog) -> bool:
    """Whether an event is a record of the end, and no hint of one."""
    entry = catalog[event.signature]
    return entry.role == "root" and entry.weights.get("platform", 0.0) >= RECORD


def _weight(item: tuple[str, float]) -> float:
    return item[1]


def _is_noise(event: Event, catalog: Catalog) -> bool:
    """Whether a root can be what a process prints when it is killed. A fault of a machine or of a checkpoint is not."""
    weights = catalog[event.signature].weights
    blamed = max(weights, key=lambda name: weights[name], default="unknown")
    return blamed in ("user_code", "framework", "fabric") and not event.kind.startswith(NO_NOISE)


def hung_until_limit(events: Sequence[Event], catalog: Catalog) -> list[Event]:
    """A job whose ranks waited for each other before its time limit, with no step between, was not ended by the limit."""
    steps, hung = _steps(events), [e for e in events if e.kind in HUNG][:MAX_COMPARED]
    for end in [e for e in events if e.kind == "sched.time_limit" and catalog[e.signature].role == "root"][:8]:
        waits = [e for e in hung if compare(e, end) == "before"]
        if waits and not any(_made_between(steps, w, end) for w in waits):
            return [derive(catalog, "derived.sched.hung_until_limit", waits[0])]
    return []


def cancelled(events: Sequence[Event], catalog: Catalog) -> list[Event]:
    """A job that somebody cancelled or requeued, with nothing wrong before: no fault at all."""
    cancels = [e for e in events if e.signature in ("slurm.job_cancelled", "slurm.job_requeued")][:8]
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


def done_since(events: Sequence[Event], catalog: Catalog) -> list[Event]:
    """A job that was ended and has since run again to its end, or runs: nothing is to be done any more."""
    last: dict[str, Event] = {}
    ended: set[str] = set()
    for event in events:
        if event.job is None or not event.signature.startswith("slurm.job_"):
            continue
        if event.kind in ENDS:
            ended.add(event.job)
        before = last.get(event.job)
        if before is None or compare(before, event) in ("before", "together"):
            last[event.job] = event
    for job in sorted(ended):
        event = last[job]
        if event.signature in ("slurm.job_completed", "slurm.job_running"):
            return [derive(catalog, "derived.sched.done_since", event, placed=False, attrs={"job": job})]
    return []


def lemon(events: Sequence[Event], catalog: Catalog) -> list[Event]:
    """A node that fails under job after job while others do not."""
    jobs: dict[str, list[Event]] = defaultdict(list)
    for event in events:
        if event.kind == "sched.node_fail" and event.node is not None and event.signature == "slurm.job_node_fail":
            jobs[event.node].append(event)
    for node, failed in jobs.items():
        if len({(e.job, e.time_ns, e.evidence.line) for e in failed}) >= LEAST_NODE_FAILS and len(jobs) == 1:
            return [derive(catalog, "derived.sched.lemon", failed[0], node=node, attrs={"times": len(failed)})]
    return []


def mounted_read_only(events: Sequence[Event], catalog: Catalog) -> list[Event]:
    """A file system that is read-only because the job mounts it so."""
    errors = [e for e in events if e.signature == "fs.read_only"]
    settings = [e for e in events if e.signature == "k8s.volume_read_only"]
    if not errors or not settings or any(e.signature in ("fs.readonly", "fs.error", "block.io_error") for e in events):
        return []
    return [derive(catalog, "derived.sched.mounted_read_only", errors[0], explains=["fs.read_only"], placed=False)]


def blip(events: Sequence[Event], catalog: Catalog) -> list[Event]:
    """A control plane that lost sight of a node or of itself while steps went on: nothing happened to the job."""
    lost = [e for e in events if e.signature in _OUT_OF_SIGHT][:MAX_COMPARED]
    steps = _steps(events)
    if not lost or not steps or any(e.kind in ENDS or e.kind in HUNG or e.kind == "job.failed" for e in events):
        return []
    back = any(e.signature in ("k8s.node_ready", "slurm.node_responding") for e in events)
    for step in reversed(steps):
        orders = [compare(e, end_of(step)) for e in lost]
        # Files without common times: a node that came back and steps are enough.
        if all(o == "before" or (o is None and back) for o in orders):
            return [derive(catalog, "derived.sched.blip", step, placed=False)]
    return []


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
    """Where the node as a whole was out of memory, what was killed is not what was at fault, unless it was the largest itself."""
    limits = [e for e in events if e.signature in ("oom.cgroup", "k8s.oom_killed", "slurm.job_oom", "cgroup.oom_kill")]
    outside = [e for e in events if e.signature in ("oom.global", "k8s.system_oom", "k8s.node_pressure_memory")]
    if limits or not outside:
        return []
    noise = [s for s in ("dataloader.worker_killed", "exit.sigkill", "k8s.container_exit") if s in catalog]
    killed = sorted(((_kilobytes(e), e) for e in outside), key=lambda pair: -pair[0])
    size, largest = killed[0]
    job = max((kb for kb, e in killed if _of_job(e)), default=0)
    if size >= MUCH_LARGER * job > 0:
        return [
            derive(
                catalog,
                "derived.sched.other_filled_node",
                largest,
                explains=noise,
                attrs={"task": largest.attrs.get("task", "")},
            )
        ]
    if any(e.signature == "derived.outgrew_host" for e in events):
        return []
    return [derive(catalog, "derived.sched.node_memory", outside[0], explains=noise)]


def _kilobytes(event: Event) -> int:
    text = str(event.attrs.get("anon_rss_kb", ""))
    return int(text) if text.isdigit() and len(text) < 16 else 0


def _of_job(event: Event) -> bool:
    """Whether a victim of the kernel is a process of a training job."""
    return str(event.attrs.get("task", "")).startswith(JOB_TASKS)


def not_memory(events: Sequence[Event], catalog: Catalog) -> list[Event]:
    """An end that is called out of memory but was none: by SIGTERM, or with memory far below the limit."""
    claims = [e for e in events if e.signature == "k8s.oom_killed"]
    figures = _figures(events)
    limit, used = figures.get("max"), _used(figures)
    free = limit is not None and used is not None and used <= FREE * limit and not figures.get("oom_kill")
    told = [e for e in claims if e.attrs.get("code") == 143]
    if not claims or not (free or told) or any(e.kind == "host.oom" for e in events):
        return []
    return [derive(catalog, "derived.sched.not_memory", (told or claims)[0], explains=["k8s.oom_killed"])]


def _figures(events: Iterable[Event]) -> dict[str, int]:
    """Figures of all cgroup files together: they come one file a document."""
    figures: dict[str, int] = {}
    for event in events:
        if event.signature == "cgroup.memory":
            for key, value in event.attrs.items():
                if isinstance(value, int):
                    figures[key] = max(value, figures.get(key, 0))
    return figures


def _used(figures: dict[str, int]) -> int | None:
    """Memory that the kernel cannot take back, in bytes; None where it is not known."""
    if "anon" not in figures:
        return None
    return figures["anon"] + figures.get("shmem", 0) + figures.get("kernel", 0)


def memory_counted(events: Sequence[Event], catalog: Catalog) -> list[Event]:
    """Whether a limit was reached by the program's memory, or by file cache that the kernel gives back when asked."""
    facts = [e for e in events if e.signature == "cgroup.memory"]
    figures = _figures(facts)
    current, used = figures.get("current"), _used(figures)
    bound = figures.get("max") or current or 0
    if not facts or used is None or not bound:
        return []
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
    passing = {(e.evidence.path, e.evidence.line) for e in events if e.signature in ADMISSIONS}
    for event in events:
        if event.signature not in ADMISSIONS and (event.evidence.path, event.evidence.line) in passing:
            continue
        if event.kind == "sched.launch_failed" and catalog[event.signature].role in ("root", "symptom"):
            node = event.node or (next(iter(named)) if len(named) == 1 else None)
            if node is not None:
                launches[node].append(event)
    if len(launches) != 1:
        return []  # on several nodes it is what is started, not where
    node, failed = next(iter(launches.items()))
    least = LEAST_REFUSED if all(e.signature in ADMISSIONS for e in failed) else LEAST_LAUNCHES
    if _attempts(failed) < least:
        return []
    if any(max(catalog[e.signature].weights.get("user_code", 0.0), 0.0) > 2.0 for e in failed):
        return []  # an image or a command that is not there fails everywhere
    storage = node in local or (broken and not local)
    signature = "derived.sched.black_hole_storage" if storage else "derived.sched.black_hole"
    explains = sorted({e.signature for e in failed})
    return [derive(catalog, signature, failed[0], node=node, explains=explains, attrs={"launches": _attempts(failed)})]


def _attempts(failed: Sequence[Event]) -> int:
    """How many starts failed: as many as pods or jobs that are named, else as one kind of line repeats."""
    named = {str(about) for e in failed if (about := e.attrs.get("pod") or e.job or e.attrs.get("job")) is not None}
    if named:
        return len(named)
    lines: dict[str, int] = defaultdict(int)
    for event in failed:
        if not event.signature.startswith("k8s."):
            lines[event.signature] += max(1, event.count)
    return max(lines.values(), default=1)


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
    done_since,
    blip,
    mass_eviction,
    memory_of_node,
    not_memory,
    memory_counted,
    black_hole,
    lemon,
    mounted_read_only,
    drain_waits,
)
"""In the order they run."""
