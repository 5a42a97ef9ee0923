"""keepstep's own records as events: cycle records, and what agents found of ranks before they were stopped."""

from __future__ import annotations

import contextlib
import json
import re
from collections.abc import Iterator
from typing import Any

from keepstep.catalog.load import Catalog
from keepstep.records.codec import from_rfc3339
from keepstep.records.event import Event, Evidence, bounded
from keepstep.sources.documents import Document
from keepstep.sources.hostrecords import GPU_KEYS, PORT_KEYS, gpu_report_events, port_report_events

OWN_RECORD = "keepstep record"
"""What these documents are read as."""
CYCLE_SCHEMA = "keepstep.cycle/1"
RANK_KEYS = frozenset({"rank", "pid", "state", "page", "stacks", "in_collective"})
"""Of a rank's evidence (evidence/cycle-NNNN/rank-RRRRR.json)."""
MEMORY_KEYS = frozenset({"now", "since_cycle_began"})
REPORT_KEYS = frozenset({"rank", "time_mono_ns", "message", "traceback"})
"""Of a rank's own error report; torch's file beside it has the same and more."""
_FRAME = re.compile(r'File "(?P<file>[^"]+)", line (?P<line>\d+) in (?P<function>\S+)')
_LIBRARY = ("/site-packages/", "/dist-packages/", "/lib/python3", "/keepstep/", "<frozen")


def parse_own_records(document: Document, catalog: Catalog) -> list[Event] | None:
    """Events of a record that keepstep wrote; None for anything else."""
    text = document.text
    if not text.lstrip().startswith("{"):
        return None
    try:
        record = json.loads(text)
    except (ValueError, RecursionError):
        return None
    if not isinstance(record, dict):
        return None
    place = Evidence(path=document.path, line=1)
    with contextlib.suppress(KeyError, TypeError, ValueError, AttributeError):
        if record.get("schema") == CYCLE_SCHEMA:
            return [_complete(event, catalog, place) for event in _cycle_events(record)]
        if record.keys() >= RANK_KEYS:
            return [_complete(event, catalog, place) for event in _rank_events(record)]
        if record.keys() == MEMORY_KEYS:
            return [_complete(event, catalog, place) for event in _memory_events(record)]
        if record.keys() >= GPU_KEYS:
            return gpu_report_events(record, document, catalog)
        if record.keys() >= PORT_KEYS:
            return port_report_events(record, document, catalog)
        if record.keys() >= REPORT_KEYS or str(record.get("schema", "")).startswith("keepstep."):
            return []
    return None


def _complete(event: dict[str, Any], catalog: Catalog, place: Evidence) -> Event:
    signature = catalog[event["signature"]]
    evidence = Evidence(path=place.path, line=place.line, text=bounded(str(event.pop("text", ""))))
    return Event(kind=signature.kind, severity=signature.severity, source="keepstep", evidence=evidence, **event)


def _cycle_events(record: dict[str, Any]) -> Iterator[dict[str, Any]]:
    fault = record.get("fault")
    if not isinstance(fault, dict):
        return
    common: dict[str, Any] = {"cycle": int(record["cycle"]), "node": fault.get("node"), "job": record.get("run_id")}
    at = fault.get("occurred_at")
    common |= {"time_ns": from_rfc3339(at) if isinstance(at, str) else None, "time_quality": "exact"}
    common |= {"text": f"cycle {record['cycle']}: {fault.get('kind')}: {fault.get('detail')}"}
    rank = fault.get("rank")
    common["rank"] = rank if isinstance(rank, int) else None
    kind = fault.get("kind")
    if kind in ("node_lost", "node_excluded", "hang"):
        yield common | {"signature": f"keepstep.{kind}"}
        return
    ends = {r["rank"]: str(r["exit"]) for r in record.get("ranks", []) if r.get("exit")}
    end = ends.get(rank, "")
    name = "first_exit_signal" if end.startswith("SIG") else "first_exit_code"
    yield common | {"signature": f"keepstep.{name}", "attrs": {"exit": end or str(fault.get("detail"))}}


def _rank_events(record: dict[str, Any]) -> Iterator[dict[str, Any]]:
    frame = user_frame(str(record["stacks"]))
    attrs = {"frame": frame, "state": record["state"], "step": record["page"].get("completed")}
    common: dict[str, Any] = {"rank": int(record["rank"]), "cycle": record["page"].get("cycle"), "attrs": attrs}
    common["text"] = frame or f"state {record['state']}"
    if record["state"] in ("T", "t"):
        yield common | {"signature": "keepstep.rank_stopped"}
    elif record["state"] == "D":
        yield common | {"signature": "keepstep.rank_in_kernel", "text": str(record.get("kernel") or common["text"])}
    elif record["in_collective"] is not None:
        yield common | {"signature": "keepstep.rank_waits" if record["in_collective"] else "keepstep.rank_busy"}


def _memory_events(record: dict[str, Any]) -> Iterator[dict[str, Any]]:
    grown = record["since_cycle_began"]
    if grown.get("oom_kill"):
        yield {"signature": "keepstep.oom_kill", "attrs": dict(grown), "text": json.dumps(grown)}


def user_frame(stacks: str) -> str | None:
    """The innermost frame outside libraries in a faulthandler dump of the main thread, "FILE:LINE in FUNCTION"."""
    frames: list[str] = []
    for line in stacks.splitlines():
        if line.startswith(("Current thread", "Thread ")):
            frames = []
        elif (match := _FRAME.search(line)) and not any(part in match["file"] for part in _LIBRARY):
            frames.append(f"{match['file']}:{match['line']} in {match['function']}")
    return frames[0] if frames else None
