"""Incidents of a run: records for people in `incidents/`, made from the journal's marks and the verdicts on failed cycles.

A failed cycle is one, and a checkpoint that a restore refused, or an image of it in memory. Numbers go by the order in the journal:
the same file comes of it every time.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import msgspec

from keepstep.launcher.files import write_durable
from keepstep.records.codec import rfc3339, to_pretty_json
from keepstep.records.timeline import Mark

FAILED_CYCLE = "cycle.failed"
_KINDS = {
    "fault": FAILED_CYCLE,
    "quarantined": "checkpoint.quarantined",
    "image_refused": "checkpoint.image_refused",
}
ATTRIBUTED = ("class", "signature", "confidence", "tier", "action", "entity", "summary")
"""What the journal keeps of a verdict; all of it is in the incident."""


class Incident(msgspec.Struct, frozen=True, kw_only=True):
    """`keepstep.incident/1`. `verdict` has names of keepstep.verdict/1; what was not looked into is not in it."""

    schema: str = "keepstep.incident/1"
    id: str
    run_id: str
    attempt: int
    cycle: int
    time: str
    kind: str
    attrs: dict[str, Any]
    verdict: dict[str, Any]


def is_incident(mark: Mark) -> bool:
    """Whether a mark tells of an incident."""
    return mark.kind in _KINDS


def incident_id(number: int) -> str:
    """Name of the incident that is the `number`-th of the run, counted from 1."""
    return f"INC-{number:04d}"


def incident_of(run_id: str, name: str, mark: Mark, verdict: dict[str, Any] | None = None) -> Incident:
    """The record of a mark that tells of one. `verdict`: on a failed cycle, where there is one."""
    return Incident(
        id=name,
        run_id=run_id,
        attempt=mark.attempt,
        cycle=mark.cycle,
        time=rfc3339(mark.t_ns),
        kind=_KINDS[mark.kind],
        attrs=mark.attrs,
        verdict=verdict or own_verdict(mark),
    )


def own_verdict(mark: Mark) -> dict[str, Any]:
    """What the launcher knows by itself."""
    attrs = mark.attrs
    if mark.kind == "fault":
        summary = f"cycle {mark.cycle}: {attrs.get('detail') or attrs.get('kind')}"
        return {"class": attrs.get("cause", "unknown"), "tier": "unknown", "action": "ask_human", "summary": summary}
    where = attrs.get("tier", "disk")
    if attrs.get("distrust"):
        found = {"class": "unknown", "tier": "unknown", "action": "ask_human"}
    else:
        # Bytes that a memory gives back wrong, or a file system or an object store does.
        found = {
            "class": "hardware" if mark.kind == "image_refused" else "storage",
            "tier": "possible",
            "action": "none",
        }
    summary = f"checkpoint {attrs.get('checkpoint')} ({where}) was refused at restore: {attrs.get('reason')}"
    return {**found, "summary": summary}


def said(verdict: Mapping[str, Any]) -> str:
    """A verdict in one line."""
    sure = f", {verdict['tier']} ({verdict['confidence']:.2f})" if "confidence" in verdict else ""
    return f"{verdict['class']}{sure}: {verdict['summary']}; {verdict['action']}"


def incident_path(run_dir: Path, name: str) -> Path:
    return run_dir / "incidents" / f"{name}.json"


def write_incident(run_dir: Path, run_id: str, name: str, mark: Mark, verdict: dict[str, Any]) -> None:
    """Write a failed cycle's with all of its verdict. Raises StorageError."""
    write_durable(incident_path(run_dir, name), to_pretty_json(incident_of(run_id, name, mark, verdict)))


def write_incidents(
    run_dir: Path, run_id: str, found: list[tuple[str, Mark]], attributed: Mapping[str, Mark], wait: bool
) -> None:
    """Write those that are not there yet, as far as the journal tells. `attributed`: marks of the verdicts, by incident; `wait`:
    a failed cycle is written once it has one. Raises StorageError.
    """
    for name, mark in found:
        verdict = attributed.get(name)
        path = incident_path(run_dir, name)
        if path.exists() or (wait and mark.kind == "fault" and verdict is None):
            continue
        known = None if verdict is None else {key: verdict.attrs[key] for key in ATTRIBUTED if key in verdict.attrs}
        write_durable(path, to_pretty_json(incident_of(run_id, name, mark, known)))
