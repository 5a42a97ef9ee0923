"""What watching a job does to it, and what its absence means: probes that crash it, dumps that are missing."""

from __future__ import annotations

from collections.abc import Sequence
from datetime import UTC, datetime

from keepstep.attribution.current import end_of
from keepstep.attribution.order import SECOND_NS, canonical
from keepstep.attribution.rules.deriving import derive
from keepstep.attribution.rules.jobfacts import FAILING, WAITS, before, of, within_s
from keepstep.attribution.rules.lives import is_in_process
from keepstep.catalog.load import Catalog
from keepstep.records.event import Event

CRASHES = (
    "python.heap_corrupted",
    "python.fatal_error",
    "python.terminate_called",
    "exit.sigsegv",
    "exit.sigabrt",
    "exit.sigbus",
    "torch.store_connection_lost",
    "nccl.peer_closed",
    "nccl.remote_error",
)
AFTER_PROBE_S = 600.0
"""A probe that disturbs does so within minutes."""
MOST_PAIRS = 64
"""Events of one kind that are held against those of another."""
STRONG = 1.5
"""Weight of a root that makes a probe an innocent bystander."""

RAISED = (
    "python.user_exception",
    "python.user_runtime_error",
    "python.library_exception",
    "python.import_failed",
    "python.file_missing",
)


def probe_crashed_it(events: Sequence[Event], catalog: Catalog) -> list[Event]:
    """A process that crashed in native code right after a diagnostic tool was pointed at it."""
    probes = sorted(of(events, "diag.attached"), key=canonical)[:MOST_PAIRS]
    if not probes:
        return []
    crashes = sorted((e for e in events if e.signature in CRASHES or _aborted(e)), key=canonical)[:MOST_PAIRS]
    for crash in crashes:
        probe = next((p for p in probes if within_s(p, crash, AFTER_PROBE_S)), None)
        if probe is None or _has_own_cause(events, crash, catalog):
            continue
        return [
            derive(
                catalog,
                "derived.probe_crashed_it",
                probe,
                attrs={"tool": probe.attrs.get("tool"), "crash": crash.evidence.text[:120]},
            )
        ]
    return []


def _aborted(event: Event) -> bool:
    """An end by a signal that native code causes, as any scheduler reports it."""
    text = event.evidence.text
    return event.kind == "rank.exit" and any(
        word in text for word in ("Aborted", "core dumped", "Segmentation fault", "SIGABRT", "SIGSEGV")
    )


def _has_own_cause(events: Sequence[Event], crash: Event, catalog: Catalog) -> bool:
    for event in events:
        entry = catalog[event.signature]
        if entry.role != "root" or event.signature in CRASHES or event is crash or entry.depth > 6:
            continue
        if max(entry.weights.values(), default=0.0) >= STRONG and not event.signature.startswith("derived."):
            return True
    return False


def missing_dumps(events: Sequence[Event], catalog: Catalog) -> list[Event]:
    """Ranks without a flight record: one that raised an exception first leaves none and that is all; another was stuck or gone."""
    listed = of(events, "evidence.dumps_listed")
    if not listed:
        return []
    found = []
    raised = {e.rank: e for e in of(events, *RAISED)}
    waited = {e.rank for e in events if e.signature in WAITS}
    for rank in dict.fromkeys(r for e in listed for r in e.attrs.get("missing", ())):
        attrs = {"about_rank": rank}
        if rank in raised:
            found.append(derive(catalog, "derived.dump_missing_raised", raised[rank], attrs=attrs, rank=rank))
        elif rank not in waited:
            found.append(derive(catalog, "derived.dump_missing", listed[0], attrs=attrs, rank=rank))
        if len(found) >= 64:
            break
    return found


def context_not_recovered(events: Sequence[Event], catalog: Catalog) -> list[Event]:
    """A CUDA error that comes again after a restart inside the process: its context is lost, and only a new process gets one."""
    sticky = (
        "cuda.illegal_address",
        "cuda.launch_failure",
        "cuda.bad_kernel",
        "cuda.ecc",
        "cuda.device_assert",
        "cuda.contained",
    )
    restarts = sorted((e for e in of(events, "job.started") if is_in_process(e)), key=canonical)
    for restart in restarts:
        for signature in sticky:
            seen = sorted(of(events, signature), key=canonical)
            if seen and before(seen[0], restart) and any(before(restart, end_of(e)) for e in seen):
                return [derive(catalog, "derived.context_not_recovered", seen[0], attrs={"error": signature})]
    return []


MONITORS_OFF = (
    "torch.flight_recorder_off",
    "nvrx.health_check_off",
    "nvrx.log_funnel_off",
    "nvrx.attribution_off",
    "nvrx.straggler_off",
    "nvrx.straggler_scores_nan",
)


def monitor_off(events: Sequence[Event], catalog: Catalog) -> list[Event]:
    """A job that works, with a monitor that does not: the monitor's fault, and no news of health either."""
    off = sorted(of(events, *MONITORS_OFF), key=canonical)
    working = of(events, "job.progress", "elastic.succeeded", "job.train_ended")
    if not off or not working:
        return []
    failing = [e for e in events if catalog[e.signature].role in FAILING and e.signature not in MONITORS_OFF]
    if any(catalog[e.signature].severity in ("error", "fatal") for e in failing):
        return []
    return [derive(catalog, "derived.monitor_off", off[0], attrs={"monitor": off[0].evidence.text[:160]})]


def false_alarm(events: Sequence[Event], catalog: Catalog) -> list[Event]:
    """A hang that was declared, and steps of the same life after it."""
    restarts = of(events, "job.started", "elastic.restarting")[:MOST_PAIRS]
    for alarm in sorted(of(events, "monitor.hang_declared"), key=canonical)[:MOST_PAIRS]:
        for step in of(events, "job.progress")[:MOST_PAIRS]:
            last = end_of(step)
            if before(alarm, last) and not any(before(alarm, r) and before(r, last) for r in restarts):
                return [derive(catalog, "derived.false_alarm", alarm, attrs={"monitor": alarm.evidence.text[:160]})]
    return []


DAYS_OLD = 180
"""Listings carry no year: a file that seems older than half a year may be of tomorrow."""


def old_dumps(events: Sequence[Event], catalog: Catalog) -> list[Event]:
    """Dumps of a day before the steps that were made since: of a hang that is over."""
    times = [end_of(e).time_ns for e in of(events, "job.progress")]
    last = max((t for t in times if t is not None), default=None)
    for event in of(events, "evidence.dumps_listed"):
        day = event.attrs.get("newest_day")
        if last is None or not isinstance(day, int):
            continue
        today = datetime.fromtimestamp(last / SECOND_NS, UTC).timetuple().tm_yday
        if 1 <= (today - day) % 366 <= DAYS_OLD:
            return [derive(catalog, "derived.old_dumps", event)]
    return []
