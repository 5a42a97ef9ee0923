"""Files of the run folder that people and tools read; all of them can be made again from the journal."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import msgspec

from keepstep.goodput import cycle_phases, summarise
from keepstep.launcher.coordination.state import CycleState, JobState
from keepstep.launcher.files import write_durable
from keepstep.records.codec import from_json, rfc3339, to_pretty_json
from keepstep.records.cycle import DURABLE, RECOVERY_TIMES, Cycle, Recovery, restored_from
from keepstep.records.timeline import Mark


def cycle_path(run_dir: Path, number: int) -> Path:
    return run_dir / "cycles" / f"cycle-{number:04d}.json"


def read_cycles(run_dir: Path) -> list[Cycle]:
    """All cycle records of a run, oldest first."""
    return [from_json(p.read_bytes(), Cycle) for p in sorted((run_dir / "cycles").glob("cycle-*.json"))]


def has_ended(run_dir: Path, number: int) -> bool:
    """Whether the cycle's file exists and says how the cycle ended."""
    try:
        return from_json(cycle_path(run_dir, number).read_bytes(), Cycle).ended_at is not None
    except (OSError, msgspec.MsgspecError):
        return False


def cycle_record(job: JobState, ended: bool) -> Cycle:
    """`keepstep.cycle/1` of the current cycle."""
    c = job.cycle
    assert c is not None
    # The fault that led here is in the cycle before. Older marks would make every restart of a long run slower.
    marks = [k for k in job.marks if k.attempt == job.attempt and k.cycle >= c.number - 1]
    mine = [k for k in marks if k.cycle == c.number]
    start = next((k.t_ns for k in mine if k.kind == "cycle_started"), 0)
    end = next((k for k in reversed(mine) if k.kind == "cycle_ended"), None)
    fault = next((_fault(k) for k in mine if k.kind == "fault"), None)
    is_first = all(k.cycle == c.number for k in marks if k.kind == "cycle_started")
    decided = next((k for k in mine if k.kind == "decided"), None)
    return Cycle(
        run_id=job.run_id,
        attempt=job.attempt,
        cycle=c.number,
        started_at=rfc3339(start),
        ended_at=rfc3339(end.t_ns) if ended and end is not None else None,
        end_reason=end.attrs.get("reason") if ended and end is not None else None,
        fault=fault,
        incident=next((name for name, k in job.incidents if (k.attempt, k.cycle) == (job.attempt, c.number)), None),
        restored_step=c.restored_step,
        restored_from=restored_from(c.restored_from),
        restored_checkpoint=c.restored_checkpoint,
        recovery=None if is_first else _recovery(c),
        phases=cycle_phases(marks, c.number),
        times=_times(mine),
        scatter=c.scatter,
        ranks=c.places(),
        active_nodes=c.nodes,
        spare_nodes=c.spares,
        placement=c.path,
        substituted=c.substituted,
        node_notes=_notes(c),
        counted=bool(decided is not None and decided.attrs.get("counted")),
        history=c.history,
        master_addr=c.master_addr,
        master_port=c.master_port,
    )


def _recovery(c: CycleState) -> Recovery:
    """The path this cycle was started by: swap of a spare, a durable checkpoint, or respawn with what memory had (or nothing)."""
    if c.path == "spare":
        return "spare"
    return "checkpoint" if c.restored_from in DURABLE else "respawn"


def _times(marks: list[Mark]) -> dict[str, str]:
    times: dict[str, int] = {}
    for mark in marks:
        name = RECOVERY_TIMES.get(mark.kind)
        if name is not None:
            times.setdefault(name, mark.t_ns)
        elif mark.kind == "fault":
            times.setdefault("fault", int(mark.attrs["occurred_ns"]))
            times.setdefault("detected", int(mark.attrs["detected_ns"]))
    return {name: rfc3339(t_ns) for name, t_ns in sorted(times.items(), key=lambda item: item[1])}


def _notes(c: CycleState) -> dict[str, dict[str, Any]]:
    notes: dict[str, dict[str, Any]] = {}
    for node in c.nodes:
        said = {**c.started.get(node, {}).get("notes", {}), **(c.stopped[node].notes if node in c.stopped else {})}
        said.pop("heartbeats", None)
        if said:
            notes[node] = said
    return notes


def _fault(mark: Mark) -> dict[str, Any]:
    attrs = dict(mark.attrs)
    occurred, detected = attrs.pop("occurred_ns"), attrs.pop("detected_ns")
    return {
        **attrs,
        "occurred_at": rfc3339(occurred),
        "detected_at": rfc3339(detected),
        "detect_s": max(0, detected - occurred) / 1e9,
    }


def write_cycle(run_dir: Path, record: Cycle) -> None:
    """Write a cycle record and point `cycles/current` at the newest."""
    path = cycle_path(run_dir, record.cycle)
    write_durable(path, to_pretty_json(record))
    current = run_dir / "cycles" / "current"
    if current.is_symlink() and current.readlink().name > path.name:
        return
    link = run_dir / "cycles" / ".current.new"
    link.unlink(missing_ok=True)
    link.symlink_to(path.name)
    link.replace(current)


def set_aside_verdict(run_dir: Path) -> bool:
    """An earlier attempt's verdict must not be taken for this one's. Returns whether there was one."""
    verdict = run_dir / "verdict.json"
    if not verdict.exists():
        return False
    number = len(list(run_dir.glob("verdict-*.json")))
    verdict.rename(run_dir / f"verdict-{number:04d}.json")
    return True


def write_summary(run_dir: Path, job: JobState) -> None:
    """summary.json: what `keepstep goodput RUN -o json` prints."""
    summary = summarise(job.run_id, job.attempt, job.marks, read_cycles(run_dir))
    write_durable(run_dir / "summary.json", to_pretty_json(summary))
