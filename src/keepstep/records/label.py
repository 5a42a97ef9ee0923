"""`keepstep.label/1`: what people found the cause of an incident to be, beside the verdict that was given."""

from __future__ import annotations

from pathlib import Path

import msgspec

from keepstep.records.codec import from_json
from keepstep.records.errors import KeepstepError
from keepstep.records.verdict import FaultClass

FOLDER = "labels"
"""Below a run's `incidents/`; a file for each incident that has one."""


class Label(msgspec.Struct, frozen=True, kw_only=True):
    """`fault_class`: the verified class; "unknown": looked into, and not found. `said`: the class of the verdict."""

    schema: str = "keepstep.label/1"
    incident: str
    run_id: str
    fault_class: FaultClass = msgspec.field(name="class")
    said: str
    reason: str
    by: str
    time: str


def label_path(run_dir: Path, incident: str) -> Path:
    """Where the label of an incident is kept."""
    return run_dir / "incidents" / FOLDER / f"{incident}.json"


def read_label(run_dir: Path, incident: str) -> Label | None:
    """The label of an incident, None without one. Raises KeepstepError naming a file that cannot be read."""
    path = label_path(run_dir, incident)
    try:
        return from_json(path.read_bytes(), Label)
    except FileNotFoundError:
        return None
    except (OSError, ValueError) as error:
        raise KeepstepError(f"{path}: not a label: {error}; label the incident anew, or remove the file") from error
