"""`keepstep label INC-0001 --class CLASS`: what the cause of an incident was found to be."""

from __future__ import annotations

import shlex
import time
from pathlib import Path
from typing import Any

import click

from keepstep.cli.acting import confirm, who
from keepstep.cli.output import NotFoundError, emit, output_option
from keepstep.cli.runs import resolve_run
from keepstep.launcher.files import write_durable
from keepstep.launcher.views.view import read_object, run_id_of
from keepstep.records.codec import rfc3339, to_pretty_json
from keepstep.records.errors import ConfigError
from keepstep.records.label import Label, label_path, read_label
from keepstep.records.verdict import CLASSES, FaultClass


@click.command(epilog="`keepstep learn` makes weights of a site from labelled incidents.")
@click.argument("incident")
@click.option("--run", help="The run that the incident is of; without it the one that changed last.")
@click.option(
    "--class",
    "fault_class",
    type=click.Choice(CLASSES),
    help='The verified class; "unknown": looked into, and not found.',
)
@click.option("--remove", is_flag=True, help="Take the label away.")
@click.option("--reason", default="", help="How it was found; needed with --class.")
@click.option("--dry-run", is_flag=True, help="Say what would be done, and do nothing.")
@click.option("-y", "--yes", is_flag=True, help="Do not ask.")
@output_option
def label(
    incident: str,
    run: str | None,
    fault_class: FaultClass | None,
    remove: bool,
    reason: str,
    dry_run: bool,
    yes: bool,
    output: str,
) -> None:
    """Write down what the cause of INCIDENT (INC-0001) was found to be. Its verdict stays as it was given.

    Label an incident after the cause was verified, by a diagnosis of the part, a fix that helped, or a test that shows it; what
    looks likely is what the verdict says already. JSON is `keepstep.action/1`.
    """
    if (fault_class is None) == (not remove):
        raise ConfigError("give one of --class CLASS, --remove")
    if fault_class is not None and not reason.strip():
        raise ConfigError("--class needs --reason TEXT: how the cause was verified")
    folder = resolve_run(run)
    said = _class_said(folder, incident)
    known = read_label(folder, incident)
    if remove and known is None:
        raise NotFoundError(f"{incident} of {folder.name} has no label")
    record: dict[str, Any] = {
        "schema": "keepstep.action/1",
        "id": f"labels/{incident}",
        "kind": "unlabel" if fault_class is None else "label",
        "run_id": run_id_of(folder),
        "class": fault_class,
        "said": said,
        "reason": reason,
        "by": who(),
        "dry_run": dry_run,
        "undo": _undo(folder, incident, known),
    }
    what = (
        f"take the label {known.fault_class} from {incident}" if known and remove else f"label {incident} {fault_class}"
    )
    what += "" if remove else f" (the verdict said {said})"
    if not dry_run:
        confirm(what, yes)
        _perform(folder, incident, record)
    text = f"{'would' if dry_run else record['id'] + ':'} {what}\nundo: {record['undo']}"
    emit(
        record,
        output,
        table=lambda console, _: console.print(text, markup=False, soft_wrap=True),
        name=lambda r: str(r["id"]),
    )


def _perform(folder: Path, incident: str, record: dict[str, Any]) -> None:
    """Write the label that the record of the action tells, or take it away."""
    path = label_path(folder, incident)
    if record["class"] is None:
        path.unlink()
        return
    path.parent.mkdir(exist_ok=True)
    made = Label(
        incident=incident,
        run_id=record["run_id"],
        fault_class=record["class"],
        said=record["said"],
        reason=record["reason"],
        by=record["by"],
        time=rfc3339(time.time_ns()),
    )
    write_durable(path, to_pretty_json(made))


def _class_said(folder: Path, incident: str) -> str:
    """The class of an incident's verdict. Raises NotFoundError naming the incidents there are."""
    record = read_object(folder / "incidents" / f"{incident}.json") if "/" not in incident else {}
    if not record:
        known = ", ".join(sorted(p.stem for p in (folder / "incidents").glob("*.json"))) or "no incidents"
        raise NotFoundError(f"{folder} has no {incident}; it has {known}")
    verdict = record.get("verdict")
    return str(verdict.get("class", "unknown")) if isinstance(verdict, dict) else "unknown"


def _undo(folder: Path, incident: str, known: Label | None) -> str:
    base = ["keepstep", "label", incident, "--run", str(folder)]
    if known is None:
        return shlex.join([*base, "--remove"])
    return shlex.join([*base, "--class", known.fault_class, "--reason", known.reason])
