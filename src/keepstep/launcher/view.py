"""What a run folder says about its run, for those who look at it from outside. Nothing here writes or waits.

The journal is read with `dict.get` throughout: a folder of an older or newer version is shown as far as it is understood.
"""

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

from keepstep.launcher.journal import Record, epoch_path, epochs
from keepstep.launcher.tailing import JournalTail
from keepstep.records.codec import from_json, rfc3339
from keepstep.records.cycle import Goodput, VerdictFile

NS_PER_S = 1_000_000_000
FRESH_S = 30.0
"""A run led from another host counts as running when its journal is not older than this."""
RATE_MARKS = 64
"""Step marks kept to measure the speed from."""

PHASE_AFTER = {
    "run_started": "forming",
    "cycle_started": "rendezvous",
    "assigned": "start",
    "attached": "restore",
    "restored": "first_step",
    "first_step": "training",
    "step": "training",
    "fault": "stopping",
    "captured": "teardown",
    "stopped": "decide",
    "decided": "restart",
    "drain": "drain",
    "cycle_ended": "forming",
    "run_ended": "ended",
}
"""What a run does after a mark."""


class NodeView(msgspec.Struct, kw_only=True):
    """`keepstep.node/1`: a node of the current attempt."""

    schema: str = "keepstep.node/1"
    node: str
    role: str = "waiting"
    """active, spare, waiting (not placed yet), lost or excluded."""
    host: str = ""
    reason: str = ""
    ranks: list[int] = []
    nproc: int = 0
    pid: int | None = None
    levels: list[str] = []
    joined: int = 0
    lost: int = 0


class CheckpointView(msgspec.Struct, kw_only=True):
    """`keepstep.checkpoint/1`: a commit that the journal knows of."""

    schema: str = "keepstep.checkpoint/1"
    checkpoint: str
    step: int | None
    state: str = "committed"
    """committed, rolled_back (a later cycle went on from an earlier step) or quarantined."""
    attempt: int
    cycle: int
    committed_at: str
    persist_s: float | None = None
    reason: str = ""


class RunState(msgspec.Struct, kw_only=True):
    """A run as its journal tells it; `take` moves it on. Times in UTC nanoseconds, 0 when not yet."""

    epoch: int = 0
    attempt: int = -1
    now_ns: int = 0
    """Time of the newest record that has one."""
    first_ns: int = 0
    started_ns: int = 0
    ended_ns: int = 0
    outcome: str | None = None
    exit_code: int | None = None
    cause: str = ""
    message: str = ""
    phase: str = "forming"
    cycle: int | None = None
    cycle_ns: int = 0
    layout: list[list[Any]] = []
    """[node, host, number of ranks] in rank order."""
    spares: list[str] = []
    pids: dict[int, int] = {}
    step: int | None = None
    committed_step: int | None = None
    restarts: int = 0
    counted: int = 0
    samples: list[tuple[int, int]] = []
    """(time, step) of the newest step marks of the current cycle."""
    nodes: dict[str, NodeView] = {}
    checkpoints: list[CheckpointView] = []
    faults: list[dict[str, Any]] = []


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


# ---- the journal, record by record


def read_state(run_dir: Path) -> RunState:
    """The run as its journal tells it now."""
    state = RunState()
    for epoch, record in JournalTail(run_dir).poll():
        take(state, epoch, record)
    return state


def take(state: RunState, epoch: int, record: Record) -> None:
    """Move `state` on by one record; what it does not know it leaves alone."""
    state.epoch = epoch
    kind = record.get("type")
    if kind == "mark":
        _take_mark(state, record.get("mark") or {})
        return
    state.now_ns = max(state.now_ns, record_time(record) or 0)
    node = record.get("node")
    if kind == "open":
        if record.get("attempt", state.attempt) != state.attempt:
            _new_attempt(state, record["attempt"])
    elif kind == "cycle":
        _take_cycle(state, record)
    elif kind == "started":
        state.pids |= {p["rank"]: p["pid"] for p in record.get("ranks") or [] if "rank" in p and "pid" in p}
    elif kind == "fault":
        state.phase = "stopping"
    elif kind == "decision":
        state.counted += bool((record.get("outcome") or {}).get("counted"))
    elif kind == "verdict":
        verdict = record.get("verdict") or {}
        state.cause, state.message = verdict.get("cause") or "", verdict.get("message") or ""
    elif isinstance(node, str) and kind in ("node", "node_lost", "excluded"):
        _take_node(state, kind, node, record)


def record_time(record: Record) -> int | None:
    """When a record that is no mark was made, as far as it says (UTC nanoseconds)."""
    inner = record.get(str(record.get("type")))
    times: list[Any] = [record.get("t_ns")]
    if isinstance(inner, dict):
        times += [inner.get("stopped_ns"), inner.get("detected_ns")]
    times.append(record.get("started_ns"))
    return next((t for t in times if isinstance(t, int) and t > 0), None)


def _new_attempt(state: RunState, attempt: int) -> None:
    state.attempt = attempt
    state.phase, state.outcome, state.exit_code = "forming", None, None
    state.cause, state.message, state.ended_ns, state.started_ns = "", "", 0, 0
    state.cycle, state.layout, state.spares, state.pids, state.samples = None, [], [], {}, []
    state.nodes, state.restarts, state.counted = {}, 0, 0


def _take_cycle(state: RunState, record: Record) -> None:
    state.restarts += state.cycle is not None
    state.cycle = record.get("cycle")
    state.layout, state.spares = list(record.get("layout") or []), list(record.get("spares") or [])
    state.pids, state.samples = {}, []
    active = {name for name, _, _ in state.layout}
    for name, node in state.nodes.items():
        if name in active:
            node.role, node.reason = "active", ""
        elif name in state.spares:
            node.role, node.reason = "spare", ""
        elif node.role in ("active", "spare"):
            node.role = "waiting"


def _take_node(state: RunState, kind: str, name: str, record: Record) -> None:
    node = state.nodes.setdefault(name, NodeView(node=name))
    if kind == "node":
        node.joined += 1
        node.host, node.pid = record.get("host") or node.host, record.get("pid", node.pid)
        node.nproc, node.levels = record.get("nproc") or node.nproc, list(record.get("levels") or node.levels)
        placed = any(name == active for active, _, _ in state.layout)
        if node.role in ("lost", "excluded") or not placed:
            # A node that comes back has no ranks before the next cycle gives it some.
            node.role = "waiting" if state.cycle is None else "spare"
        node.reason = ""
    else:
        node.lost += kind == "node_lost"
        node.role = "lost" if kind == "node_lost" else "excluded"
        node.reason = str(record.get("reason") or record.get("why") or record.get("detail") or "")


def _take_mark(state: RunState, mark: dict[str, Any]) -> None:
    kind, t_ns, attrs = str(mark.get("kind")), mark.get("t_ns") or 0, mark.get("attrs") or {}
    attempt, cycle = mark.get("attempt") or 0, mark.get("cycle") or 0
    if attempt > state.attempt:
        _new_attempt(state, attempt)
    state.now_ns = max(state.now_ns, t_ns)
    state.phase = PHASE_AFTER.get(kind, state.phase)
    step = attrs.get("step")
    if kind == "run_started":
        state.started_ns = t_ns
        state.first_ns = state.first_ns or t_ns
    elif kind == "cycle_started":
        if state.cycle is None or state.cycle < cycle:
            # The `cycle` record stands before it; a journal of marks alone has none.
            _take_cycle(state, {"cycle": cycle})
        state.cycle_ns = t_ns
    elif kind in ("first_step", "step") and isinstance(step, int):
        state.step = step
        state.samples = [*state.samples[1 - RATE_MARKS :], (t_ns, step)]
    elif kind == "restored":
        _take_restored(state, step, attrs)
    elif kind in ("fault", "drain"):
        state.step = attrs.get("completed_step") if attrs.get("completed_step") is not None else state.step
        if kind == "fault":
            state.faults.append({**attrs, "cycle": cycle, "attempt": attempt})
    elif kind == "committed":
        _take_commit(state, mark, attrs)
    elif kind == "quarantined":
        for one in state.checkpoints:
            if one.checkpoint == attrs.get("checkpoint"):
                one.state, one.reason = "quarantined", str(attrs.get("reason") or "")
    elif kind == "run_ended":
        state.outcome, state.exit_code, state.ended_ns = attrs.get("outcome"), attrs.get("exit_code"), t_ns


def _take_restored(state: RunState, step: int | None, attrs: dict[str, Any]) -> None:
    """Whatever was committed beyond the step that the cycle goes on from is no part of its history."""
    state.step = step
    if attrs.get("source", "none") == "none" or step is None:
        return
    state.committed_step = step
    for one in reversed(state.checkpoints):
        if one.step is not None and one.step > step and one.state == "committed":
            one.state = "rolled_back"


def _take_commit(state: RunState, mark: dict[str, Any], attrs: dict[str, Any]) -> None:
    state.committed_step = attrs.get("step")
    persist_ns = attrs.get("persist_ns")
    state.checkpoints.append(
        CheckpointView(
            checkpoint=str(attrs.get("checkpoint") or f"step-{attrs.get('step')}"),
            step=attrs.get("step"),
            attempt=mark.get("attempt") or 0,
            cycle=mark.get("cycle") or 0,
            committed_at=rfc3339(mark.get("t_ns") or 0),
            persist_s=persist_ns / NS_PER_S if isinstance(persist_ns, int) else None,
        )
    )


def node_views(state: RunState) -> list[NodeView]:
    """Nodes of the newest attempt in the order they joined, with the ranks they have in the current cycle."""
    ranks: dict[str, list[int]] = {}
    first = 0
    for name, _, count in state.layout:
        ranks[name] = list(range(first, first + count))
        first += count
    return [
        msgspec.structs.replace(node, ranks=ranks.get(name, []) if node.role == "active" else [])
        for name, node in state.nodes.items()
    ]


def steps_per_s(state: RunState) -> float | None:
    """Speed over the newest step marks of the current cycle; None before there are two."""
    if len(state.samples) < 2:
        return None
    (begin_ns, first), (end_ns, last) = state.samples[0], state.samples[-1]
    return (last - first) * NS_PER_S / (end_ns - begin_ns) if end_ns > begin_ns else None


# ---- files beside the journal


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


__all__ = [
    "CheckpointView", "JobView", "NodeView", "RunState", "is_led", "job_view", "leader", "node_views", "read_state",
    "run_dirs", "run_id_of", "run_started_ns", "steps_per_s", "take",
]  # fmt: skip
