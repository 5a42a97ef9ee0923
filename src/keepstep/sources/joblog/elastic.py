"""Which ranks failed, when and with what, as torch elastic reports it: its failure block and its error files.

Format: torch/distributed/elastic/multiprocessing/errors/__init__.py (ChildFailedError.format_msg) and error_handler.py; an error
file is {"message": {"message", "extraInfo": {"py_callstack", "timestamp"}}} or {"message": text, "timestamp"}.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from datetime import UTC, datetime
from typing import Any

import msgspec

from keepstep.catalog.load import Catalog
from keepstep.records.event import Event
from keepstep.records.exits import exit_status_name
from keepstep.sources.documents import Document, Line
from keepstep.sources.joblog.exceptions import read_exceptions
from keepstep.sources.joblog.making import event_at

TRIGGERS = ("exitcode", '"message"')
MAX_FAILURES = 20_000
_FIELD_SPAN = 12
"""Lines within which the fields of one failure stand."""

_NUMBER = re.compile(r"\s*\[(?P<index>\d{1,6})\]:\s*$")
_FIELD = re.compile(r"\s*(?P<name>time|host|rank|exitcode|error_file|traceback)\s*: (?P<value>.*)$")
_RANK = re.compile(r"(?P<rank>\d{1,7}) \(local_rank: (?P<local>-?\d{1,5})\)")
_EXIT = re.compile(r"(?P<code>-?\d{1,5}) \(pid: (?P<pid>\d{1,9})\)")
_ROOT = re.compile(r"Root Cause \(first observed failure\)")
_ATTEMPT = re.compile(r"attempt_(?P<attempt>\d+)/(?P<local>\d+)/error")


def read_failures(document: Document, catalog: Catalog) -> Iterator[Event]:
    """An event for each rank of a failure block, and for each error file that is in the text."""
    fields: dict[str, str] = {}
    begun: Line | None = None
    root = False
    count = 0
    for line in document.lines:
        text = line.text
        if "Root Cause" in text and _ROOT.search(text):
            root = True
        elif "[" in text and _NUMBER.match(text):
            fields, begun = {}, line
        elif begun is not None and ":" in text:
            match = _FIELD.match(text)
            if match is not None and line.number - begun.number <= _FIELD_SPAN:
                fields[match["name"]] = match["value"].strip()
                if match["name"] == "traceback":
                    event = _failure(fields, root, begun, document, catalog)
                    if event is not None and count < MAX_FAILURES:
                        count += 1
                        yield event
                    fields, begun, root = {}, None, False
        if text.startswith("{") and '"message"' in text[:40]:
            yield from _error_file(text, line, document, catalog)


def _failure(fields: dict[str, str], root: bool, line: Line, document: Document, catalog: Catalog) -> Event | None:
    rank = _RANK.match(fields.get("rank", ""))
    code = _EXIT.match(fields.get("exitcode", ""))
    if rank is None or code is None:
        return None
    exitcode = int(code["code"])
    host = fields.get("host", "")
    attrs: dict[str, Any] = {
        "rank": int(rank["rank"]),
        "local_rank": rank["local"],
        "exitcode": exitcode,
        "how": exit_status_name(exitcode),
        "pid": code["pid"],
        "host": host,
        "root": root,
        "error_file": None if fields.get("error_file") in (None, "<N/A>") else fields["error_file"],
        "traceback": fields["traceback"],
    }
    event = event_at(
        "elastic.rank_failed", line, document, catalog, attrs, text="; ".join(f"{k}: {v}" for k, v in fields.items())
    )
    when = _local_ns(fields.get("time", ""))
    changes: dict[str, Any] = {"node": host or line.node}
    if when is not None:
        changes |= {"time_ns": when, "time_quality": "zone_assumed"}
    return msgspec.structs.replace(event, **changes)


def _local_ns(text: str) -> int | None:
    """`2031-08-01_01:06:47`, in the zone of the host, which the block does not name; taken for UTC."""
    try:
        return int(datetime.strptime(text, "%Y-%m-%d_%H:%M:%S").replace(tzinfo=UTC).timestamp()) * 1_000_000_000
    except ValueError:
        return None


def _error_file(text: str, line: Line, document: Document, catalog: Catalog) -> Iterator[Event]:
    """The failure that an error file holds, and the exception in its call stack, at the time that the file gives."""
    try:
        data = msgspec.json.decode(text.encode(errors="replace"))
    except (msgspec.DecodeError, RecursionError):
        return
    message = data.get("message") if isinstance(data, dict) else None
    extra: Any = message.get("extraInfo") if isinstance(message, dict) else data if isinstance(data, dict) else None
    if not isinstance(extra, dict) or not ("timestamp" in extra or "py_callstack" in extra):
        return
    said = message.get("message") if isinstance(message, dict) else message
    when = _epoch_ns(extra.get("timestamp"))
    place = _ATTEMPT.search(document.path) or _ATTEMPT.search(document.title)
    local = int(place["local"]) if place is not None else line.local_rank
    attrs = {"how": "an exception", "message": str(said or ""), "local_rank": local, "root": False, "rank": line.rank}
    changes: dict[str, Any] = {} if when is None else {"time_ns": when, "time_quality": "exact"}
    yield msgspec.structs.replace(event_at("elastic.rank_failed", line, document, catalog, attrs), **changes)
    stack = extra.get("py_callstack")
    if isinstance(stack, str):
        lines = tuple(line._replace(text=t, raw=t) for t in stack[:200_000].split("\n"))
        for event in read_exceptions(document._replace(lines=lines), catalog):
            yield msgspec.structs.replace(event, **changes)


def _epoch_ns(value: object) -> int | None:
    """Seconds since the epoch, as number or text."""
    try:
        seconds = int(str(value))
    except ValueError:
        return None
    return seconds * 1_000_000_000 if 0 < seconds < 1 << 33 else None
