"""What the launcher that leads says and leaves behind when the coordinator cannot any more."""

from __future__ import annotations

import contextlib
import json
from collections.abc import Collection, Iterator
from pathlib import Path

from keepstep.launcher.coordination.incidents import FAILED_CYCLE, said
from keepstep.launcher.files import write_durable
from keepstep.records.codec import to_pretty_json
from keepstep.records.cycle import VerdictFile
from keepstep.records.errors import StorageError
from keepstep.records.exits import EXIT_FAILURE


def leave_verdict(run_dir: Path, run_id: str, attempt: int, message: str) -> None:
    """The launcher itself failed: a verdict file, unless there is one."""
    path = run_dir / "verdict.json"
    if path.exists():
        return
    verdict = VerdictFile(
        run_id=run_id,
        attempt=attempt,
        outcome="failed",
        exit_code=EXIT_FAILURE,
        cause="launcher_error",
        message=message,
    )
    with contextlib.suppress(StorageError):
        write_durable(path, to_pretty_json(verdict))


def untold(run_dir: Path, told: Collection[str], attempt: int) -> Iterator[str]:
    """A line for every failed cycle of this attempt whose verdict came when nobody was connected any more."""
    for path in sorted((run_dir / "incidents").glob("*.json")):
        with contextlib.suppress(OSError, ValueError, KeyError, TypeError):
            incident = json.loads(path.read_bytes())
            if path.stem not in told and incident["kind"] == FAILED_CYCLE and incident["attempt"] == attempt:
                yield f"{path.stem}: {said(incident['verdict'])}"
