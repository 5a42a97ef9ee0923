"""Incidents of a run: records for people in `incidents/`, made from the journal's marks alone.

So far a checkpoint that a restore refused is one, or an image of it in memory. Numbers go by the order in the journal: the same
file comes of it every time.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import msgspec

from keepstep.launcher.files import write_durable
from keepstep.records.codec import rfc3339, to_pretty_json
from keepstep.records.timeline import Mark

_KINDS = {"quarantined": "checkpoint.quarantined", "image_refused": "checkpoint.image_refused"}


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


def incident_of(run_id: str, name: str, mark: Mark) -> Incident:
    """The record of a mark that tells of one."""
    attrs = mark.attrs
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
    return Incident(
        id=name,
        run_id=run_id,
        attempt=mark.attempt,
        cycle=mark.cycle,
        time=rfc3339(mark.t_ns),
        kind=_KINDS[mark.kind],
        attrs=attrs,
        verdict={**found, "summary": summary},
    )


def write_incidents(run_dir: Path, run_id: str, found: list[tuple[str, Mark]]) -> None:
    """Write those that are not there yet. Raises StorageError."""
    for name, mark in found:
        path = run_dir / "incidents" / f"{name}.json"
        if not path.exists():
            write_durable(path, to_pretty_json(incident_of(run_id, name, mark)))
