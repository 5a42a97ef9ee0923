"""What a person may ask a running coordinator, and what may be told to it."""

from __future__ import annotations

from collections.abc import Callable, Collection
from typing import Any

from keepstep.launcher import messages as m
from keepstep.launcher.coordination.admission import Admission
from keepstep.launcher.coordination.job import Job
from keepstep.launcher.coordination.leases import LeaseBook
from keepstep.launcher.coordination.state import Record

SHOWN_NODES = 8


def operate(
    job: Job, message: m.Operator, now_ns: int, tell_all: Callable[[m.FromCoordinator], None], status: dict[str, Any]
) -> tuple[list[Record], m.Reply]:
    """Records and reply of a person's command. `tell_all` sends to every node that is connected."""

    def reply(error: str | None = None, result: Any = None) -> m.Reply:
        return m.Reply(epoch=job.epoch, id=message.id, ok=error is None, error=error, result=result)

    if message.run_id != job.run_id:
        return [], reply(f"this is run {job.run_id!r}")
    match message.what:
        case "status":
            return [], reply(result=status)
        case "exclude":
            records = job.exclude(message.node, message.reason or "asked for by a person")
            shown = ", ".join(list(job.nodes)[:SHOWN_NODES]) + (", ..." if len(job.nodes) > SHOWN_NODES else "")
            return records, reply(None if records else f"no node {message.node!r} to leave out (nodes: {shown})")
        case "inject":
            if job.cycle is None or job.phase != "running":
                return [], reply(f"the job is {job.phase}")
            number = job.cycle.number
            tell_all(m.DoInjection(epoch=job.epoch, cycle=number, spec=message.spec))
            what = {"spec": message.spec, "reason": message.reason, "t_ns": now_ns}
            return [{"type": "injection", "cycle": number, **what}], reply(result={"cycle": number})
        case "stop" if job.stop is None and job.phase != "done":
            return [{"type": "stop_request", "signum": 15, "node": "operator"}], reply()
    return [], reply(f"cannot do {message.what!r} now")


def status_of(job: Job, connected: Collection[str], leases: LeaseBook, admission: Admission) -> dict[str, Any]:
    """Phase, nodes with their roles, what is waited for, and who was refused."""
    return {
        "phase": job.phase,
        "attempt": job.attempt,
        "cycle": job.last_cycle,
        "nodes": {n: job.role_of(n) for n in job.nodes},
        "connected": sorted(connected),
        "excluded": job.excluded,
        "waiting": job.waiting,
        "leases": {n: round(leases.silence_s(n), 3) for n in job.nodes},
        "refused": dict(admission.refused),
    }
