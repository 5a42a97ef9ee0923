"""A run as its journal tells it, for those who look at it from outside: a fold over the records.

The coordinator's own state (`state.JobState`) decides and must understand every record; this one only shows. It reads records with
`dict.get` throughout, so that a folder of an older or newer version is shown as far as it is understood.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import msgspec

from keepstep.launcher.coordination.journal import Record
from keepstep.launcher.views.tailing import JournalTail
from keepstep.records.codec import rfc3339
from keepstep.records.cycle import DURABLE

NS_PER_S = 1_000_000_000
RATE_MARKS = 64
"""Step marks kept to measure the speed from."""
UNCOMMITTED = 64
"""Images in memory are many, and most are never committed: so many are remembered."""

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
    tiers: list[dict[str, str]] = []
    """Where it is whole, in the order in which that was reached: tier ("disk", "object", "shm", "peer") and time."""


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
    restored: dict[str, Any] | None = None
    """step, source and checkpoint that the current cycle went on from."""
    restarts: int = 0
    counted: int = 0
    samples: list[tuple[int, int]] = []
    """(time, step) of the newest step marks of the current cycle."""
    nodes: dict[str, NodeView] = {}
    checkpoints: list[CheckpointView] = []
    faults: list[dict[str, Any]] = []
    reached: dict[str, list[dict[str, str]]] = {}
    """Tiers that checkpoints reached before their commit, the newest UNCOMMITTED of them."""


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
    state.pids, state.samples, state.restored = {}, [], None
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
    elif kind == "tier_reached":
        _take_tier(state, str(attrs.get("checkpoint")), str(attrs.get("tier")), t_ns)
    elif kind == "quarantined":
        for one in state.checkpoints:
            if one.checkpoint == attrs.get("checkpoint"):
                one.state, one.reason = "quarantined", str(attrs.get("reason") or "")
    elif kind == "run_ended":
        state.outcome, state.exit_code, state.ended_ns = attrs.get("outcome"), attrs.get("exit_code"), t_ns


def _take_restored(state: RunState, step: int | None, attrs: dict[str, Any]) -> None:
    """Whatever was committed beyond the step that the cycle goes on from is no part of its history."""
    state.step = step
    state.restored = attrs
    if attrs.get("source", "none") == "none" or step is None:
        return
    if attrs["source"] in DURABLE:
        state.committed_step = step
    elif state.committed_step is not None and state.committed_step > step:
        state.committed_step = None
    for one in reversed(state.checkpoints):
        if one.step is not None and one.step > step and one.state == "committed":
            one.state = "rolled_back"


def _take_commit(state: RunState, mark: dict[str, Any], attrs: dict[str, Any]) -> None:
    state.committed_step = attrs.get("step")
    persist_ns = attrs.get("persist_ns")
    name = str(attrs.get("checkpoint") or f"step-{attrs.get('step')}")
    now = rfc3339(mark.get("t_ns") or 0)
    tiers = [{"tier": "shm", "time": now}] if attrs.get("kept") else []
    tiers += [*state.reached.pop(name, []), {"tier": str(attrs.get("tier") or "disk"), "time": now}]
    state.checkpoints.append(
        CheckpointView(
            checkpoint=name,
            tiers=sorted(tiers, key=lambda one: one["time"]),
            step=attrs.get("step"),
            attempt=mark.get("attempt") or 0,
            cycle=mark.get("cycle") or 0,
            committed_at=now,
            persist_s=persist_ns / NS_PER_S if isinstance(persist_ns, int) else None,
        )
    )


def _take_tier(state: RunState, checkpoint: str, tier: str, t_ns: int) -> None:
    reached = {"tier": tier, "time": rfc3339(t_ns)}
    known = next((one for one in reversed(state.checkpoints) if one.checkpoint == checkpoint), None)
    if known is not None:
        known.tiers = [*known.tiers, reached]
        return
    state.reached.setdefault(checkpoint, []).append(reached)
    while len(state.reached) > UNCOMMITTED:
        del state.reached[next(iter(state.reached))]


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
