"""Journal records as events: one line a thing that happened, for people and for tools that watch a run."""

from __future__ import annotations

import collections
from collections.abc import Iterable, Iterator
from typing import Any

import msgspec

from keepstep.launcher.coordination.journal import Record
from keepstep.launcher.views.runstate import record_time
from keepstep.records.codec import rfc3339
from keepstep.records.exits import exit_status_name

MARK_KINDS = {
    "run_started": "job.started",
    "run_ended": "job.ended",
    "gap": "coordinator.gap",
    "cycle_started": "cycle.started",
    "assigned": "cycle.assigned",
    "attached": "cycle.attached",
    "restored": "checkpoint.restored",
    "first_step": "step.first",
    "step": "step.completed",
    "ckpt_block": "checkpoint.staged",
    "committed": "checkpoint.committed",
    "kept": "checkpoint.kept",
    "tier_reached": "checkpoint.tier_reached",
    "ckpt_failed": "checkpoint.failed",
    "ckpt_skipped": "checkpoint.skipped",
    "upload_failed": "checkpoint.upload_failed",
    "quarantined": "checkpoint.quarantined",
    "image_refused": "checkpoint.image_refused",
    "fault": "cycle.fault",
    "captured": "cycle.captured",
    "stopped": "cycle.stopped",
    "decided": "cycle.decided",
    "replaced": "cycle.replaced",
    "drain": "cycle.drained",
    "cycle_ended": "cycle.ended",
    "advised": "advice.changed",
}
RECORD_KINDS = {
    "open": "coordinator.started",
    "node": "node.joined",
    "node_lost": "node.lost",
    "excluded": "node.excluded",
    "role": "node.role",
    "started": "node.started",
    "stopped": "node.stopped",
    "decision": "decision.made",
    "cycle": "cycle.placed",
    "workload": "rank.request",
    "high_water": "checkpoint.high_water",
    "stop_request": "job.stop_requested",
    "verdict": "job.verdict",
}
FAULT_KINDS = {"exit": "rank.exit", "hang": "rank.stall", "spawn": "rank.spawn"}
INTERNAL = frozenset({"kv", "reported", "grant"})
"""Records that only the coordinator needs."""
SEVERITIES = {
    "cycle.fault": "error",
    "rank.exit": "error",
    "rank.stall": "error",
    "rank.spawn": "error",
    "node.lost": "error",
    "node.excluded": "warning",
    "checkpoint.failed": "error",
    "checkpoint.quarantined": "warning",
    "checkpoint.image_refused": "warning",
    "checkpoint.skipped": "warning",
    "checkpoint.upload_failed": "error",
    "coordinator.gap": "warning",
    "job.stop_requested": "warning",
}
PLACES = ("node", "rank", "cycle")
BULKY = ("anchor", "layout", "statuses", "failures", "completed", "agent_store", "hosts_store", "detail")
"""Fields of records that grow with the number of ranks, or say nothing to people."""


class Event(msgspec.Struct, frozen=True, kw_only=True):
    """`keepstep.event/1`. `id` is unique in the run: epoch and place in the epoch's journal."""

    schema: str = "keepstep.event/1"
    id: str
    time: str
    source: str = "journal"
    kind: str
    severity: str = "info"
    node: str | None = None
    rank: int | None = None
    job: str
    attempt: int = 0
    cycle: int | None = None
    attrs: dict[str, Any] = {}


class _Place(msgspec.Struct):
    """What records do not repeat: time, attempt and cycle of the records around them."""

    now_ns: int = 0
    attempt: int = 0
    cycle: int | None = None


class EventReader:
    """Turns records into events, in order. A record without a time of its own gets that of the record before it."""

    def __init__(self, run_id: str) -> None:
        self._run_id = run_id
        self._at = _Place()
        self._waiting: list[tuple[int, Record]] = []

    def read(self, records: Iterable[tuple[int, Record]]) -> Iterator[Event]:
        """Events of the next records, given as (epoch, record)."""
        for epoch, record in records:
            if record.get("type") == "open" or (self._waiting and record.get("type") != "mark"):
                # A coordinator that begins has no time of its own: it began when its first mark was made.
                self._waiting.append((epoch, record))
                continue
            event = self._event(epoch, record)
            waiting, self._waiting = self._waiting, []
            yield from (e for e in (self._event(*one) for one in waiting) if e is not None)
            if event is not None:
                yield event

    def _event(self, epoch: int, record: Record) -> Event | None:
        kind = str(record.get("type"))
        identity = f"{epoch}.{record.get('seq', 0)}"
        if kind == "mark":
            return self._mark(identity, record.get("mark") or {})
        if kind == "open":
            self._at.attempt = record.get("attempt", self._at.attempt)
        self._at.now_ns = record_time(record) or self._at.now_ns
        if kind == "cycle":
            self._at.cycle = record.get("cycle", self._at.cycle)
        if kind in INTERNAL:
            return None
        return self._make(identity, *_described(kind, record), self._at.cycle, self._at.attempt)

    def _mark(self, identity: str, mark: dict[str, Any]) -> Event:
        self._at.now_ns = mark.get("t_ns") or self._at.now_ns
        self._at.attempt, self._at.cycle = mark.get("attempt") or 0, mark.get("cycle") or 0
        kind = str(mark.get("kind"))
        attrs = dict(mark.get("attrs") or {})
        name = MARK_KINDS.get(kind, f"job.{kind}")
        return self._make(identity, name, attrs, self._at.cycle, self._at.attempt)

    def _make(self, identity: str, kind: str, attrs: dict[str, Any], cycle: int | None, attempt: int) -> Event:
        node, rank, own_cycle = (attrs.pop(name, None) for name in PLACES)
        return Event(
            id=identity,
            time=rfc3339(self._at.now_ns),
            kind=kind,
            severity=_severity(kind, attrs),
            node=node if isinstance(node, str) else None,
            rank=rank if isinstance(rank, int) and rank >= 0 else None,
            job=self._run_id,
            attempt=attempt,
            cycle=own_cycle if isinstance(own_cycle, int) else cycle,
            attrs=attrs,
        )


def _described(kind: str, record: Record) -> tuple[str, dict[str, Any]]:
    """Kind of the event and its attributes, from a record that is no mark."""
    attrs = {k: v for k, v in record.items() if k not in ("type", "seq", "t_ns", *BULKY)}
    inner = attrs.get(kind)
    if isinstance(inner, dict):
        del attrs[kind]
        attrs |= {k: v for k, v in inner.items() if k not in ("type", "id", "schema", "run_id", *BULKY)}
    if kind == "fault":
        return FAULT_KINDS.get(str(attrs.get("kind")), f"rank.{attrs.get('kind')}"), attrs
    if kind == "decision":
        outcome = attrs.pop("outcome", None) or {}
        # A restart has no verdict: those fields stand at their defaults.
        attrs |= {
            k: v for k, v in outcome.items() if outcome.get("action") == "end" or k not in ("verdict", "exit_code")
        }
    if kind == "cycle":
        layout = record.get("layout") or []
        attrs |= {"nodes": len(layout), "ranks": sum(count for _, _, count in layout)}
    if kind == "started":
        attrs["ranks"] = [p.get("rank") for p in record.get("ranks") or []]
    if kind == "stopped":
        statuses = (record.get("stopped") or {}).get("statuses") or {}
        ended = collections.Counter(exit_status_name(status) for status in statuses.values())
        attrs["exits"] = [f"{count} x {name}" for name, count in sorted(ended.items())]
    name = RECORD_KINDS.get(kind, f"node.{kind}" if "node" in record else f"job.{kind}")
    return name, attrs


def _severity(kind: str, attrs: dict[str, Any]) -> str:
    if kind in ("job.ended", "job.verdict") and attrs.get("outcome") not in (None, "succeeded", "stopped"):
        return "fatal"
    return SEVERITIES.get(kind, "info")
