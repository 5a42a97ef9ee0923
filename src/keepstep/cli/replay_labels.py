"""Labels for a replay: what people found the cause of incidents to be, as `keepstep label` stores it."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import NamedTuple

import msgspec

from keepstep.cli.output import NotFoundError
from keepstep.launcher.eventhistory import NS_PER_S, PastIncident
from keepstep.records.codec import from_json, from_rfc3339
from keepstep.records.errors import ConfigError
from keepstep.records.label import Label
from keepstep.records.verdict import FaultClass

SLACK_S = 600.0
"""A run records the time at which its launcher knew of a failure; signs of it may be that much earlier or later."""


class Found(NamedTuple):
    """A label and where it is from. `time_ns`: of the run's incident, where its record lies beside."""

    label: Label
    where: str
    time_ns: int | None


class Labelled(NamedTuple):
    """Classes by id of the replay's incidents, and what was said of labels that are of none."""

    classes: dict[str, FaultClass]
    unmatched: list[str]


def labels_of(paths: Sequence[Path], incidents: Sequence[PastIncident]) -> Labelled:
    """The labels in files (one object, or JSON lines) and folders (`incidents/labels` of a run), for incidents of a replay.

    A label is of the incident that it names by its id here (RPL-...), or that holds the time of the run's incident it lies beside.
    Raises ConfigError naming file, line and what is wrong; two labels of one incident that differ are wrong.
    """
    classes: dict[str, FaultClass] = {}
    by: dict[str, str] = {}
    unmatched = []
    for found in sorted(_all(paths), key=lambda f: (f.where, f.label.incident)):
        meant = _meant(found, incidents)
        if meant is None:
            unmatched.append(f"{found.where}: {found.label.incident} is none of this history's incidents")
            continue
        if classes.setdefault(meant, found.label.fault_class) != found.label.fault_class:
            raise ConfigError(
                f"--labels {found.where}: {meant} is {found.label.fault_class}, and {classes[meant]} in {by[meant]}; keep one"
            )
        by.setdefault(meant, found.where)
    return Labelled(classes, unmatched)


def _all(paths: Sequence[Path]) -> Iterator[Found]:
    for path in paths:
        if not path.exists():
            raise NotFoundError(f"--labels {path}: no such file or folder")
        for file in sorted(path.glob("*.json")) if path.is_dir() else [path]:
            yield from _in_file(file)


def _in_file(file: Path) -> Iterator[Found]:
    try:
        text = file.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigError(f"--labels {file}: cannot be read: {error}") from error
    whole = _label(text)
    if isinstance(whole, Label):
        yield Found(whole, str(file), _time_of(file, whole))
        return
    for number, line in enumerate(text.splitlines(), 1):
        if line.strip():
            one = _label(line)
            if isinstance(one, str):
                raise ConfigError(f"--labels {file}:{number}: no keepstep.label/1: {one}")
            yield Found(one, f"{file}:{number}", None)


def _label(text: str) -> Label | str:
    try:
        found = from_json(text, Label)
    except (msgspec.MsgspecError, ValueError) as error:
        return str(error)
    return found if found.schema == "keepstep.label/1" else f"schema {found.schema!r}"


def _time_of(file: Path, label: Label) -> int | None:
    """Time of the run's incident: its record lies in the folder above."""
    try:
        record = msgspec.json.decode((file.parent.parent / f"{label.incident}.json").read_bytes())
        return from_rfc3339(record["time"])
    except (OSError, ValueError, KeyError, TypeError, msgspec.MsgspecError):
        return None


def _meant(found: Found, incidents: Sequence[PastIncident]) -> str | None:
    if any(i.id == found.label.incident for i in incidents):
        return found.label.incident
    if found.time_ns is None:
        return None
    time_ns = found.time_ns
    off = [(max(i.begin_ns - time_ns, time_ns - i.end_ns, 0), i.begin_ns, i.id) for i in incidents]
    nearest = min(off, default=None)
    return nearest[2] if nearest is not None and nearest[0] <= SLACK_S * NS_PER_S else None
