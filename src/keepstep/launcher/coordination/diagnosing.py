"""Verdicts on failed cycles, made beside the coordinator: no restart waits for them."""

from __future__ import annotations

import asyncio
import json
import subprocess
import sys
import time
from collections.abc import Callable, Collection
from pathlib import Path
from typing import Any, NamedTuple

from keepstep.launcher.bounded import run_tool
from keepstep.launcher.config import RunConfig
from keepstep.launcher.coordination.incidents import ATTRIBUTED, own_verdict, write_incident
from keepstep.launcher.coordination.state import JobState
from keepstep.records.errors import StorageError
from keepstep.records.timeline import Mark

EVIDENCE_WAIT_S = 8.0
"""How long evidence of the nodes is waited for: they give themselves 5 s, and some of it has to be sent."""
DIAGNOSIS_LIMIT_S = 60.0
END_WAIT_S = 20.0
"""How long the end of a job is held up for the verdict on its last cycle."""
POLL_S = 0.1


class Attributed(NamedTuple):
    """The verdict on an incident, as `keepstep.verdict/1`, or why there is none."""

    name: str
    fault: Mark
    verdict: dict[str, Any] | None
    problem: str = ""


class Diagnosing:
    """Failed cycles that wait for a verdict, one looked at after the other."""

    def __init__(self, run_dir: Path, config: RunConfig, report: Callable[[Attributed], None]) -> None:
        """`report` gets each verdict in the event loop, once its incident is written."""
        self._run_dir = run_dir
        self._config = config
        self._report = report
        self._wanted: asyncio.Queue[tuple[str, Mark, Collection[str]]] = asyncio.Queue()
        self.open: set[str] = set()
        """Incidents without a verdict so far."""

    def want_from(self, job: JobState, known: int) -> None:
        """Look at the failed cycles among the job's incidents after the first `known`; evidence of the nodes of the current
        cycle that have stopped is waited for."""
        if not self._config.attribution:
            return
        nodes = list(job.cycle.stopped) if job.cycle is not None else []
        for name, mark in job.incidents[known:]:
            if mark.kind == "fault" and name not in job.attributed:
                self.open.add(name)
                self._wanted.put_nowait((name, mark, nodes))

    async def serve(self) -> None:
        """Work until cancelled."""
        while True:
            name, fault, nodes = await self._wanted.get()
            result = await asyncio.to_thread(self._diagnose, name, fault, nodes)
            self.open.discard(name)
            self._report(result)

    def _diagnose(self, name: str, fault: Mark, nodes: Collection[str]) -> Attributed:
        folder = self._run_dir / "evidence" / f"cycle-{fault.cycle:04d}"
        deadline = time.monotonic() + EVIDENCE_WAIT_S
        # A node's manifest is the last of its evidence. It may never come: the node may be gone.
        while any(not (folder / node / "host.json").exists() for node in nodes) and time.monotonic() < deadline:
            time.sleep(POLL_S)
        command = [sys.executable, "-m", "keepstep.launcher.diagnosis", str(self._run_dir), str(fault.cycle)]
        try:
            done = run_tool(command, DIAGNOSIS_LIMIT_S)
            if done.returncode:
                return Attributed(name, fault, None, _last_line(done))
            # The last line; a library's warning may stand before it.
            verdict = json.loads(done.stdout.strip().rpartition(b"\n")[2])
            missing = [key for key in ATTRIBUTED if key not in verdict]
            if missing:
                return Attributed(name, fault, None, f"a verdict without {', '.join(missing)}")
            write_incident(self._run_dir, self._config.run_id, name, fault, verdict)
        except (OSError, TimeoutError, ValueError, TypeError, StorageError) as error:
            return Attributed(name, fault, None, str(error))
        return Attributed(name, fault, verdict)


def verdict_of(found: Attributed) -> dict[str, Any]:
    """The verdict; where there is none it says so, and it is the launcher's own word."""
    if found.verdict is not None:
        return found.verdict
    print(f"coordinator: {found.name}: no verdict: {found.problem}", file=sys.stderr, flush=True)
    return own_verdict(found.fault)


def _last_line(done: subprocess.CompletedProcess[bytes]) -> str:
    lines = done.stdout.decode(errors="replace").strip().splitlines()
    return f"exit {done.returncode}: {lines[-1] if lines else 'no output'}"
