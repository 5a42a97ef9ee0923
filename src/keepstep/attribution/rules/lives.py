"""What the lives of a job's worker group say: a good end, spares that were not needed, the same failure again and again."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence
from itertools import pairwise

from keepstep.attribution.current import end_of
from keepstep.attribution.order import canonical, compare
from keepstep.attribution.rules.deriving import derive
from keepstep.attribution.rules.jobfacts import PROGRESS, before, number, of
from keepstep.catalog.load import Catalog
from keepstep.records.event import Event

TEARDOWN = (
    "elastic.exit_barrier_failed",
    "torch.store_connection_lost",
    "python.peer_lost",
    "elastic.rendezvous_closed",
    "elastic.rendezvous_unreachable",
    "elastic.no_result",
    "python.launcher_exception",
    "gloo.connection_closed",
    "nccl.peer_closed",
    "nccl.remote_error",
    "torch.heartbeat_timeout",
    "ray.actor_died",
)
"""What a process may still say when the job has ended well."""

ENDED_BY = ("exit.sigterm", "exit.stopped_from_outside")

UNEVEN = ("torch.watchdog_timeout", "torch.blocking_wait_timeout", "gloo.timeout")
"""Ranks that still waited when one said that it had ended: it ended too early."""

RESTARTS = ("job.started", "elastic.restarting", "elastic.membership_changed")
FAILING_ROLES = ("root", "cascade")

FINGERPRINTED = (
    "python.user_exception",
    "python.user_runtime_error",
    "python.library_exception",
    "python.tensor_misuse",
    "python.file_missing",
    "cuda.device_assert",
    "cuda.illegal_address",
    "cuda.bad_kernel",
    "torch.cuda_oom",
    "loss.not_finite",
)
"""Failures of the program: the same one in two lives is in the program or its data."""

JOB_TASKS = ("python", "pt_", "torchrun", "ray::", "vllm", "VLLM", "train")
"""How the processes of training jobs are called in the kernel's table."""

MOST_PAIRS = 256
"""Events of one kind that are held against those of another; a job that was restarted more often says no more."""

LEAST_STALLS = 3
"""Time-outs at one step in so many lives are no chance; two may be one bad link."""


def teardown_after_success(events: Sequence[Event], catalog: Catalog) -> list[Event]:
    """Errors that came when the worker group had already finished: of taking down, not of the job."""
    ends = of(events, "elastic.succeeded", "job.train_ended", "job.ended_well")
    done = [e for e in ends if not any(before(e, r) for r in of(events, *RESTARTS))]
    if not done or (of(events, *UNEVEN) and not of(done, "elastic.succeeded")):
        return []
    success = min(done, key=canonical)
    late = [e for e in events if _of_teardown(e) and compare(e, success) in ("after", "together")]
    excused = {id(e) for e in late}
    if not late or any(_really_failed(e, catalog) for e in events if id(e) not in excused):
        return []
    return [
        derive(
            catalog, "derived.teardown_error", min(late, key=canonical), attrs={"after": success.evidence.text[:200]}
        )
    ]


def _of_teardown(event: Event) -> bool:
    """Whether an event is one of those that follow the end of a job: connections that go, a scheduler that clears up."""
    return (
        event.signature in TEARDOWN or event.signature in ENDED_BY or event.kind in ("sched.time_limit", "sched.cancel")
    )


def clean_end(events: Sequence[Event], catalog: Catalog) -> list[Event]:
    """A job that ended well, and monitors and launchers that say how they close: nothing else."""
    done = of(events, "elastic.succeeded", "job.train_ended")
    closing = of(events, "nvrx.monitor_closed", "elastic.rendezvous_graceful")
    failing = any(catalog[e.signature].severity in ("error", "fatal") for e in events)
    if not done or not closing or failing:
        return []
    return [derive(catalog, "derived.clean_end", min(done, key=canonical))]


def _really_failed(event: Event, catalog: Catalog) -> bool:
    entry = catalog[event.signature]
    if event.signature == "elastic.rank_failed" or event.signature.startswith("exit.sig"):
        return True
    return entry.role == "root" and entry.severity in ("error", "fatal") and event.signature not in TEARDOWN


def standby_left(events: Sequence[Event], catalog: Catalog) -> list[Event]:
    """A launcher that stumbles over its own graceful exit: a spare that was not needed."""
    graceful = of(events, "elastic.rendezvous_graceful")
    stumbles = of(events, "elastic.no_result", "python.launcher_exception")
    if any(_really_failed(e, catalog) for e in events):
        return []
    for stumble in sorted(stumbles, key=canonical):
        if any(compare(g, stumble) != "after" for g in graceful):
            return [derive(catalog, "derived.standby_exit", stumble)]
    return []


def seat_taken(events: Sequence[Event], catalog: Catalog) -> list[Event]:
    """A node that worked and came back to find its place given to a spare: an assignment, no fault of the node."""
    promoted = of(events, "launcher.spare_promoted")[:MOST_PAIRS]
    excluded = {str(e.attrs.get("member", "")) for e in of(events, "launcher.node_excluded")}
    for standby in of(events, "launcher.standby")[:MOST_PAIRS]:
        member = str(standby.attrs.get("member", ""))
        if member in excluded or "spare" in member:
            continue
        if member and any(compare(p, standby) != "after" for p in promoted):
            return [derive(catalog, "derived.seat_taken", standby, attrs={"member": member})]
    return []


def same_again(events: Sequence[Event], catalog: Catalog) -> list[Event]:
    """The same failure of the program in two lives with a restart between them: it will come again."""
    restarts = sorted(of(events, *RESTARTS), key=canonical)[:MOST_PAIRS]
    by_print: dict[tuple[str, str, str], list[Event]] = defaultdict(list)
    for event in of(events, *FINGERPRINTED):
        frame = str(event.attrs.get("user_frame") or event.attrs.get("frame") or "")
        by_print[event.signature, str(event.attrs.get("type", "")), frame].append(event)
    in_process = bool(restarts) and all(is_in_process(r) for r in restarts)
    for (signature, _, _), members in by_print.items():
        if in_process and signature.startswith("cuda."):
            continue  # what a process keeps says nothing of the program
        lives = _lives(sorted(members, key=canonical), restarts)
        if lives >= 2:
            return [derive(catalog, "derived.same_failure_again", members[0], attrs={"lives": lives})]
    return _same_outcomes(events, catalog) or _same_step(events, restarts, catalog)


def is_in_process(restart: Event) -> bool:
    """Whether a restart was one inside the processes, which keep their CUDA contexts."""
    return "process" in restart.evidence.text.lower()


def _lives(members: Sequence[Event], restarts: Sequence[Event]) -> int:
    """In how many lives the events are: a life ends where a restart stands between two."""
    cycles = {e.cycle for e in members if e.cycle is not None}
    if len(cycles) > 1:
        return len(cycles)
    lives = 1
    anchor = members[0]
    # A burst is one event from its first sighting to its last.
    few = [*members[:MOST_PAIRS], *members[-1:]]
    sightings = sorted((s for e in few for s in ((e, end_of(e)) if e.count > 1 else (e,))), key=canonical)
    for event in sightings[1:]:
        if any(before(anchor, r) and before(r, event) for r in restarts):
            lives += 1
            anchor = event
    return lives


def _same_outcomes(events: Sequence[Event], catalog: Catalog) -> list[Event]:
    """Summaries of cycles that end alike."""
    by_outcome: dict[tuple[str, str], list[Event]] = defaultdict(list)
    for event in of(events, "launcher.cycle"):
        if event.attrs.get("type"):
            by_outcome[str(event.attrs["type"]), str(event.attrs.get("message", ""))[:80]].append(event)
    for members in by_outcome.values():
        if len({e.cycle for e in members}) >= LEAST_STALLS:
            return [derive(catalog, "derived.cycles_end_alike", members[0], attrs={"lives": len(members)})]
    return []


def _same_step(events: Sequence[Event], restarts: Sequence[Event], catalog: Catalog) -> list[Event]:
    """Time-outs of several lives after the same last step."""
    stalls = sorted((e for e in events if e.kind in ("collective.timeout", "rank.stall")), key=canonical)[:MOST_PAIRS]
    progress = sorted(of(events, PROGRESS), key=canonical)[:MOST_PAIRS]
    if not stalls or not progress:
        return []
    last_steps = [step for life in _by_document(stalls, progress) for step in life]
    bounds: list[Event | None] = [None, *restarts, None]
    if len(last_steps) < LEAST_STALLS:
        last_steps = []
        for begin, end in pairwise(bounds):
            inside = [s for s in stalls if _between(s, begin, end)]
            made = [p for p in progress if _between(p, begin, end)]
            last_steps += _last_step(inside, made)
    if len(last_steps) >= LEAST_STALLS and len(set(last_steps)) == 1:
        return [
            derive(
                catalog,
                "derived.stalls_at_one_step",
                stalls[0],
                attrs={"step": last_steps[0], "lives": len(last_steps)},
            )
        ]
    return []


def _by_document(stalls: Sequence[Event], progress: Sequence[Event]) -> list[list[int]]:
    """The last step of each document that stalls: a log of its own for each life."""
    names = dict.fromkeys((e.evidence.path, e.source) for e in stalls)
    return [
        _last_step(
            [e for e in stalls if (e.evidence.path, e.source) == name],
            [p for p in progress if (p.evidence.path, p.source) == name],
        )
        for name in names
    ]


def _last_step(stalls: Sequence[Event], progress: Sequence[Event]) -> list[int]:
    """The last step of a life that stalled, where it is known."""
    steps = [number(p.attrs.get("last_step", p.attrs.get("step"))) for p in progress]
    known = [s for s in steps if s is not None]
    return [max(known)] if stalls and known else []


def _between(event: Event, begin: Event | None, end: Event | None) -> bool:
    return (begin is None or compare(begin, event) != "after") and (end is None or compare(event, end) == "before")


def no_restart_lost(events: Sequence[Event], catalog: Catalog) -> list[Event]:
    """The launcher asked not to be restarted, and what arrived is the exit status of the teardown."""
    asked = of(events, "exit.no_restart", "nvrx.no_progress")
    lost = [e for e in events if e.signature in ("exit.sigterm", "exit.stopped_from_outside") or _is_143(e)]
    if not asked or not lost:
        return []
    return [derive(catalog, "derived.no_restart_lost", asked[0], attrs={"arrived": lost[0].evidence.text[:120]})]


def _is_143(event: Event) -> bool:
    codes = {str(event.attrs.get(name, "")) for name in ("exit_code", "exitcode", "code", "exit")}
    return bool(codes & {"143", "143:0", "0:15"})


def stale_store(events: Sequence[Event], catalog: Catalog) -> list[Event]:
    """After a restart ranks cannot connect to each other: they read addresses of the life before from a store that was kept."""
    restarts = of(events, *RESTARTS)[:MOST_PAIRS]
    for event in sorted(of(events, "gloo.connect_failed", "torch.store_connect_failed"), key=canonical)[:MOST_PAIRS]:
        ends = (event, end_of(event))
        if any(before(r, e) for r in restarts if r.signature == "elastic.restarting" for e in ends):
            return [derive(catalog, "derived.stale_store", event)]
    return []


def outgrew_host(events: Sequence[Event], catalog: Catalog) -> list[Event]:
    """The kernel, short of memory, killed the process that a launcher reports killed: the job itself was what grew."""
    kills = [e for e in events if e.kind == "host.oom" and e.attrs.get("pid")]
    reported = of(events, "exit.sigkill", "elastic.rank_failed", "dataloader.worker_killed", "elastic.closing_workers")
    pids = {str(e.attrs.get("pid")) for e in reported}
    for kill in kills:
        if str(kill.attrs.get("pid")) in pids or (str(kill.attrs.get("task", "")).startswith(JOB_TASKS) and reported):
            return [derive(catalog, "derived.outgrew_host", kill, attrs={"task": kill.attrs.get("task")})]
    return []


def first_failure(events: Sequence[Event], catalog: Catalog) -> list[Event]:
    """Of several failed ranks the one that failed first by its own clock, whatever was printed first."""
    failed = [e for e in of(events, "elastic.rank_failed") if e.time_ns is not None and e.rank is not None]
    if len({e.rank for e in failed}) < 2:
        return []
    first = min(failed, key=lambda e: (e.time_ns or 0, not e.attrs.get("root"), e.order))
    attrs = {"how": first.attrs.get("how"), "failed": len(failed), "host": first.node or "its host"}
    return [derive(catalog, "derived.first_failure", first, attrs=attrs)]
