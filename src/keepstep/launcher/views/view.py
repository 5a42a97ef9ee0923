"""What a run folder says about its run, for those who look at it from outside. Nothing here writes or waits."""

from __future__ import annotations

import contextlib
import fcntl
import json
import os
import socket
import time
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import msgspec

from keepstep.launcher.coordination.journal import epoch_path, epochs
from keepstep.launcher.views.runstate import RunState, read_state
from keepstep.records.codec import from_json, rfc3339
from keepstep.records.cycle import Cycle, Goodput, VerdictFile, restored_from

NS_PER_S = 1_000_000_000
FRESH_S = 30.0
"""A run led from another host counts as running when its journal is not older than this."""


class JobView(msgspec.Struct, frozen=True, kw_only=True):
    """`keepstep.job/1`: one run in one line."""

    schema: str = "keepstep.job/1"
    run_id: str
    state: str
    """running, succeeded, failed, no_restart, stopped, lost (its launcher is gone and left no verdict) or empty."""
    phase: str | None = None
    attempt: int | None = None
    cycle: int | None = None
    step: int | None = None
    committed_step: int | None = None
    restarts: int | None = None
    restarts_counted: int | None = None
    nodes: int | None = None
    ranks: int | None = None
    started_at: str | None = None
    ended_at: str | None = None
    age_s: float | None = None
    exit_code: int | None = None
    cause: str | None = None
    message: str | None = None
    script: str | None = None
    run_dir: str


def is_led(run_dir: Path) -> bool:
    """Whether a launcher leads this run now: it holds the lead's lock, which the kernel frees when it dies.

    The probe asks for a shared lock without waiting and gives it back at once. From another host the lock may be invisible:
    there a journal that grew within FRESH_S is taken for a living run.
    """
    path = run_dir / "lead.lock"
    try:
        fd = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
    except OSError:
        return False
    try:
        fcntl.flock(fd, fcntl.LOCK_SH | fcntl.LOCK_NB)
    except BlockingIOError:
        return True
    except OSError:
        pass
    finally:
        os.close(fd)
    host = leader(run_dir).get("host")
    if host in (None, socket.gethostname()):
        return False
    return time.time() - changed_s(run_dir) < FRESH_S


def leader(run_dir: Path) -> dict[str, Any]:
    """Host, pid and node of the launcher that leads or last led the run; empty when unknown."""
    return read_object(run_dir / "lead.lock")


def changed_s(run_dir: Path) -> float:
    """When the run folder last changed (Unix seconds): its newest journal file, else run.json, else 0."""
    newest = epochs(run_dir)[-1:]
    for path in [*(epoch_path(run_dir, e) for e in newest), run_dir / "run.json"]:
        with contextlib.suppress(OSError):
            return path.stat().st_mtime
    return 0.0


def read_object(path: Path) -> dict[str, Any]:
    """A JSON object from a file; empty when there is none or it cannot be understood."""
    try:
        value = json.loads(path.read_bytes())
    except (OSError, ValueError):
        return {}
    return value if isinstance(value, dict) else {}


def read_struct(path: Path, kind: type[Any]) -> Any:
    """A record from a file, None when there is none or it cannot be understood."""
    try:
        return from_json(path.read_bytes(), kind)
    except (OSError, msgspec.MsgspecError):
        return None


def run_started_ns(run_dir: Path) -> int:
    """When the run's first attempt began (UTC ns), 0 when the journal does not say. Reads the head of one file only."""
    for epoch in epochs(run_dir)[:1]:
        with epoch_path(run_dir, epoch).open("rb") as file:
            for line in (file.readline() for _ in range(8)):
                with contextlib.suppress(msgspec.MsgspecError, AttributeError):
                    mark = msgspec.json.decode(line).get("mark") or {}
                    if mark.get("kind") == "run_started":
                        return int(mark["t_ns"])
    return 0


def brought_up_to_date(cycles: list[Cycle], run_dir: Path) -> list[Cycle]:
    """Cycle records in which one that has not ended says what it went on from: its file gets that at its end only."""
    if not any(cycle.ended_at is None for cycle in cycles):
        return cycles
    state = read_state(run_dir)
    known = state.restored
    if known is None:
        return cycles
    fresh = {
        "restored_step": known.get("step"),
        "restored_from": restored_from(known.get("source", "none")),
        "restored_checkpoint": known.get("checkpoint"),
    }
    return [
        msgspec.structs.replace(c, **fresh)
        if c.ended_at is None and (c.attempt, c.cycle) == (state.attempt, state.cycle)
        else c
        for c in cycles
    ]


def job_view(run_dir: Path, now_ns: int, state: RunState | None = None) -> JobView:
    """One run in one line. A run that has ended is read from its verdict and summary, a living one from its journal."""
    led = is_led(run_dir)
    verdict = None if led else read_struct(run_dir / "verdict.json", VerdictFile)
    config = read_object(run_dir / "run.json")
    if state is None and verdict is not None:
        summary = read_struct(run_dir / "summary.json", Goodput)
        if summary is not None and summary.attempt == verdict.attempt:
            return _ended_job(run_dir, verdict, summary, config, now_ns)
    state = read_state(run_dir) if state is None else state
    outcome = None if led else verdict.outcome if verdict is not None else state.outcome
    started_ns = state.first_ns
    return JobView(
        run_id=run_id_of(run_dir, config),
        state=outcome or ("running" if led else "lost" if state.attempt >= 0 else "empty"),
        phase=state.phase if led else None,
        attempt=state.attempt if state.attempt >= 0 else None,
        cycle=state.cycle,
        step=state.step,
        committed_step=state.committed_step,
        restarts=state.restarts,
        restarts_counted=state.counted,
        nodes=len(state.layout) or None,
        ranks=sum(count for _, _, count in state.layout) or None,
        started_at=rfc3339(started_ns) if started_ns else None,
        ended_at=None if led else rfc3339(state.ended_ns or state.now_ns),
        age_s=(now_ns - started_ns) / NS_PER_S if started_ns else None,
        exit_code=None if led else verdict.exit_code if verdict is not None else state.exit_code,
        cause=(verdict.cause if verdict is not None else state.cause) or None,
        message=(verdict.message if verdict is not None else state.message) or None,
        script=_script(config),
        run_dir=str(run_dir.absolute()),
    )


def _ended_job(run_dir: Path, verdict: VerdictFile, summary: Goodput, config: dict[str, Any], now_ns: int) -> JobView:
    last = summary.cycles[-1] if summary.cycles else None
    started_ns = run_started_ns(run_dir)
    return JobView(
        run_id=verdict.run_id,
        state=verdict.outcome,
        attempt=verdict.attempt,
        cycle=last.cycle if last else None,
        step=summary.steps.final,
        committed_step=verdict.last_committed_step,
        restarts=summary.restarts.total,
        restarts_counted=summary.restarts.counted,
        nodes=len(last.active_nodes) or None if last else None,
        ranks=len(last.ranks) or None if last else None,
        started_at=rfc3339(started_ns) if started_ns else None,
        ended_at=last.ended_at if last else None,
        age_s=(now_ns - started_ns) / NS_PER_S if started_ns else None,
        exit_code=verdict.exit_code,
        cause=verdict.cause or None,
        message=verdict.message,
        script=_script(config),
        run_dir=str(run_dir.absolute()),
    )


def run_id_of(run_dir: Path, config: dict[str, Any] | None = None) -> str:
    """The run's id: from run.json, else the name of the folder."""
    given = (read_object(run_dir / "run.json") if config is None else config).get("run_id")
    return given if isinstance(given, str) else run_dir.absolute().name


def _script(config: dict[str, Any]) -> str | None:
    return " ".join([str(config["script"]), *map(str, config.get("args") or [])]) if config.get("script") else None


def run_dirs(roots: Iterable[Path]) -> list[Path]:
    """Run folders directly under `roots`, the one that changed last first."""
    found = []
    for root in roots:
        with contextlib.suppress(OSError):
            found += [p for p in root.iterdir() if (p / "journal").is_dir() or (p / "run.json").is_file()]
    return sorted(found, key=lambda p: (changed_s(p), p.name), reverse=True)
