"""What is known when a cycle or the job is over, as records: marks that need every node's word, and the verdict."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import msgspec

from keepstep.goodput.facts import ATTRIBUTED_TIERS
from keepstep.launcher.coordination.incidents import ATTRIBUTED, incident_id
from keepstep.launcher.coordination.noprogress import Progress, after_failed_cycle
from keepstep.launcher.coordination.rules import Ended, Outcome, cause_of, first_failure, says_code_bug
from keepstep.launcher.messages import Failure
from keepstep.records.cycle import VerdictFile
from keepstep.records.exits import exit_status_name
from keepstep.records.timeline import Mark

if TYPE_CHECKING:
    from keepstep.launcher.coordination.state import JobState

Record = dict[str, Any]


def ended_cycle(job: JobState, marker: int | None) -> Ended:
    """What is known about the current cycle once it stopped. `marker`: the no-progress marker now, None when unknown."""
    c = job.cycle
    assert c is not None
    failures = [f for s in c.stopped.values() for f in s.failures if not f.stopped_by_us]
    statuses = [status for s in c.stopped.values() for status in s.statuses.values()]
    step = completed_step(job)
    start = c.restored_step if c.restored_step is not None else (c.first_step_count or 1) - 1
    return Ended(
        failures=sorted(failures, key=lambda f: f.time_ns),
        fault_kind=c.fault.kind if c.fault else ("node_lost" if c.lost else None),
        stop_signum=job.stop["signum"] if job.stop else None,
        nodes_lost=c.lost,
        all_exited_zero=len(statuses) == c.world and not any(statuses),
        completed_step=step,
        steps_done=None if step is None else max(0, step - start),
        **_history(job),
        workload=c.workload["what"] if c.workload else None,
        workload_reason=c.workload["reason"] if c.workload else "",
        attribution_stop=job.attribution_stop,
        excluded=[n for n in c.nodes if n in job.excluded],
        probe=c.probe,
        never_stepped=not c.probe and _never_stepped(job, failures),
        progress=job.progress
        if c.probe
        else after_failed_cycle(job.progress, marker, job.shape.min_progress_iterations, c.rolled_back),
    )


def never_started(job: JobState) -> Ended:
    """The same for a job that is stopped while it has no cycle."""
    return Ended(
        failures=[],
        fault_kind=None,
        stop_signum=job.stop["signum"] if job.stop else None,
        nodes_lost=[],
        all_exited_zero=False,
        completed_step=None,
        steps_done=None,
        **_history(job),
        attribution_stop=job.attribution_stop,
        progress=Progress(),
    )


def _history(job: JobState) -> dict[str, Any]:
    """What earlier cycles left behind, and the job's own limits."""
    last = job.last_fingerprint
    return {
        "counted_restarts": job.counted,
        "max_restarts": job.shape.max_restarts,
        "port_retries": job.port_retries,
        "last_fingerprint": last[0] if last else None,
        "last_fingerprint_step": last[1] if last else None,
        "max_no_progress_cycles": job.shape.max_no_progress_cycles,
        "min_progress_iterations": job.shape.min_progress_iterations,
        "no_restart_exit_code": job.shape.no_restart_exit_code,
    }


def _never_stepped(job: JobState, failures: list[Failure]) -> bool:
    c = job.cycle
    assert c is not None
    if not any(r.get("expect_steps") for r in c.started.values()) or len({f.rank for f in failures}) < c.world:
        return False
    stepped = any(k.kind in ("first_step", "step") and k.attempt == job.attempt for k in job.marks)
    some = any(s.completed or s.notes.get("heartbeats") for s in c.stopped.values())
    return not stepped and not some and all(says_code_bug(f) for f in failures)


def completed_step(job: JobState) -> int | None:
    """Steps every rank completed in the current cycle, or None when none reported any."""
    assert job.cycle is not None
    counts = [v for s in job.cycle.stopped.values() for v in s.completed.values()]
    return min(counts) if len(counts) == job.cycle.world else None


def closing_marks(job: JobState, ended: Ended, outcome: Outcome) -> list[Record]:
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
                node=c.node_of(rank),
                kind=c.fault.kind,
                detail=_detail(rank, first.status if first and first.rank == rank else None, c.fault.detail),
                cause=cause_of(first, c.fault.kind),
                completed_step=ended.completed_step,
                rule=outcome.rule,
            )
        )
        records.append(job.mark("captured", max((s.captured_ns for s in stops), default=c.fault.detected_ns)))
    elif c.lost:
        what = {"rank": None, "node": c.lost[0], "kind": "node_lost", "detail": f"node lost: {', '.join(c.lost)}"}
        records.append(_outside_fault(job, c.lost_seen_ns or c.lost_ns, c.lost_ns, ended, outcome, what))
    elif c.workload is not None and c.workload["what"] == "exclude":
        rank, node, at_ns = c.workload["rank"], c.workload["node"], c.workload["t_ns"]
        what = {"rank": rank, "node": node, "kind": "node_excluded", "detail": c.workload["reason"]}
        records.append(_outside_fault(job, at_ns, at_ns, ended, outcome, what))
    if any(k["mark"]["kind"] == "fault" for k in records):
        records.append(job.mark("stopped", max((s.stopped_ns for s in stops), default=c.lost_ns)))
    elif not c.drained and stops:
        records.append(job.mark("drain", max(s.stopped_ns for s in stops), completed_step=ended.completed_step))
    return records


def _outside_fault(
    job: JobState, occurred_ns: int, detected_ns: int, ended: Ended, outcome: Outcome, what: dict[str, Any]
) -> Record:
    """The mark of a fault that no rank had: a node went away, or was taken out."""
    times = {"occurred_ns": occurred_ns, "detected_ns": detected_ns, "completed_step": ended.completed_step}
    return job.mark("fault", detected_ns, **times, **what, cause="unknown", rule=outcome.rule)


def _detail(rank: int, status: int | None, detail: str) -> str:
    return f"rank {rank}: {exit_status_name(status)}" if status is not None else detail


def incident_of_cycle(job: JobState, closing: list[Record]) -> str | None:
    """Name of the incident that the marks of an ending cycle make, None without a fault among them."""
    faults = sum(r["type"] == "mark" and r["mark"]["kind"] == "fault" for r in closing)
    return incident_id(len(job.incidents) + 1) if faults else None


def attributed_records(job: JobState, name: str, fault: Mark, verdict: dict[str, Any]) -> list[Record]:
    """The verdict on a failed cycle, and the end of the job where it calls for that."""
    record = job.mark("attributed", fault.t_ns, incident=name, **{k: verdict[k] for k in ATTRIBUTED if k in verdict})
    record["mark"] |= {"cycle": fault.cycle, "attempt": fault.attempt}
    records = [record]
    sure = verdict["tier"] in ATTRIBUTED_TIERS and verdict["action"] == "fail_fast"
    if sure and job.shape.stop_on_attribution and job.phase != "done" and fault.attempt == job.attempt:
        records.append({"type": "attribution_stop", "incident": name, "summary": f"{name}: {verdict['summary']}"})
    return records


def end_records(
    job: JobState, now_ns: int, outcome: Outcome, ended: Ended | None, incident: str | None = None
) -> list[Record]:
    """The records that end the job: last marks and the verdict. `incident`: the one that the last cycle ended with."""
    first = first_failure(ended) if ended is not None else None
    verdict = VerdictFile(
        run_id=job.run_id,
        attempt=job.attempt,
        outcome=outcome.verdict,
        exit_code=outcome.exit_code,
        cause=outcome.cause,
        incident=incident,
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
