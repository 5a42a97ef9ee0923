"""What is known when a cycle or the job is over, as records: marks that need every node's word, and the verdict."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import msgspec

from keepstep.launcher.rules import Ended, Outcome, cause_of, first_failure
from keepstep.records.cycle import VerdictFile
from keepstep.records.exits import exit_status_name

if TYPE_CHECKING:
    from keepstep.launcher.job import Job

Record = dict[str, Any]


def ended_cycle(job: Job) -> Ended:
    """What is known about the current cycle once it stopped."""
    assert job.cycle is not None
    c = job.cycle
    failures = [f for s in c.stopped.values() for f in s.failures if not f.stopped_by_us]
    statuses = [status for s in c.stopped.values() for status in s.statuses.values()]
    step = completed_step(job)
    start = c.restored_step if c.restored_step is not None else (c.first_step_count or 1) - 1
    return Ended(
        failures=sorted(failures, key=lambda f: f.time_ns),
        fault_kind=c.fault.kind if c.fault else ("node_lost" if c.lost else None),
        stop_signum=job.stop["signum"] if job.stop else None,
        nodes_lost=c.lost,
        all_exited_zero=len(statuses) == len(c.ranks) and not any(statuses),
        completed_step=step,
        steps_done=None if step is None else max(0, step - start),
        counted_restarts=job.counted,
        max_restarts=job.max_restarts,
        port_retries=job.port_retries,
        last_fingerprint=job.last_fingerprint[0] if job.last_fingerprint else None,
        last_fingerprint_step=job.last_fingerprint[1] if job.last_fingerprint else None,
    )


def never_started(job: Job) -> Ended:
    """The same for a job that is stopped while it has no cycle."""
    return Ended(
        failures=[],
        fault_kind=None,
        stop_signum=job.stop["signum"] if job.stop else None,
        nodes_lost=[],
        all_exited_zero=False,
        completed_step=None,
        steps_done=None,
        counted_restarts=job.counted,
        max_restarts=job.max_restarts,
        port_retries=0,
        last_fingerprint=None,
        last_fingerprint_step=None,
    )


def completed_step(job: Job) -> int | None:
    """Steps every rank completed in the current cycle, or None when none reported any."""
    assert job.cycle is not None
    counts = [v for s in job.cycle.stopped.values() for v in s.completed.values()]
    return min(counts) if len(counts) == len(job.cycle.ranks) else None


def closing_marks(job: Job, ended: Ended, outcome: Outcome) -> list[Record]:
    """Marks that are known only when every node has stopped."""
    assert job.cycle is not None
    c = job.cycle
    records: list[Record] = []
    if "attached" not in c.marked and len(c.started) == len(c.nodes):
        # Some rank never attached: its process was there, and that is all that is known.
        records.append(job.mark("attached", max(r["started_ns"] for r in c.started.values())))
    stops = list(c.stopped.values())
    last_ns = max((s.completed_ns for s in stops), default=0)
    if ended.completed_step is not None and last_ns:
        firsts = [s for s in stops if s.first_step is not None]
        if c.first_step_count is None and firsts:
            count = max(s.first_step or 0 for s in firsts)
            records.append(job.mark("first_step", max(s.first_step_ns for s in firsts), step=count))
        records.append(job.mark("step", last_ns, step=ended.completed_step))
    if c.fault is not None:
        first = first_failure(ended)
        culprits = [rank for s in stops for rank in s.culprits]
        rank = culprits[0] if culprits else (first.rank if first is not None else c.fault.rank)
        records.append(
            job.mark(
                "fault",
                c.fault.detected_ns,
                occurred_ns=c.fault.occurred_ns,
                detected_ns=c.fault.detected_ns,
                rank=rank,
                node=next((p["node"] for p in c.ranks if p["rank"] == rank), None),
                kind=c.fault.kind,
                detail=_detail(rank, first.status if first and first.rank == rank else None, c.fault.detail),
                cause=cause_of(first, c.fault.kind),
                completed_step=ended.completed_step,
                rule=outcome.rule,
            )
        )
        records.append(job.mark("captured", max((s.captured_ns for s in stops), default=c.fault.detected_ns)))
    elif c.lost:
        lost = ", ".join(c.lost)
        detected = {"occurred_ns": c.lost_ns, "detected_ns": c.lost_ns, "completed_step": ended.completed_step}
        what = {
            "rank": None,
            "node": c.lost[0],
            "kind": "node_lost",
            "detail": f"node lost: {lost}",
            "cause": "unknown",
        }
        records.append(job.mark("fault", c.lost_ns, **detected, **what, rule=outcome.rule))
    if c.fault is not None or c.lost:
        records.append(job.mark("stopped", max((s.stopped_ns for s in stops), default=c.lost_ns)))
    elif not c.drained and stops:
        records.append(job.mark("drain", max(s.stopped_ns for s in stops), completed_step=ended.completed_step))
    return records


def _detail(rank: int, status: int | None, detail: str) -> str:
    return f"rank {rank}: {exit_status_name(status)}" if status is not None else detail


def end_records(job: Job, now_ns: int, outcome: Outcome, ended: Ended | None) -> list[Record]:
    """The records that end the job: last marks and the verdict."""
    first = first_failure(ended) if ended is not None else None
    verdict = VerdictFile(
        run_id=job.run_id,
        attempt=job.attempt,
        outcome=outcome.verdict,
        exit_code=outcome.exit_code,
        cause=outcome.cause,
        last_committed_step=job.last_committed,
        first_failing_rank=first.rank if first else None,
        original_exit=exit_status_name(first.status) if first else None,
        traceback=first.traceback if first else None,
        message=outcome.message or None,
    )
    records = []
    if job.cycle is not None and "cycle_ended" not in job.cycle.marked:
        records.append(job.mark("cycle_ended", now_ns, reason=outcome.cause))
    records.append(job.mark("run_ended", now_ns, outcome=outcome.verdict, exit_code=outcome.exit_code))
    return [*records, {"type": "verdict", "verdict": msgspec.to_builtins(verdict)}]
