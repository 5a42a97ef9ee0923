"""Lines that are records of a log transport: journald's JSON and export formats, container runtimes, cloud log services.

Only records whose message is a line that some program wrote are opened. Other JSON (events, states, API objects) means something
as a whole and is left to its parsers.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from typing import Any, NamedTuple

import msgspec

from keepstep.sources.timestamps import SECOND_NS, Stamp, stamp_at


class Record(NamedTuple):
    """The line within a record, and what the record adds."""

    message: str
    stamp: Stamp | None = None
    boot_ns: int | None = None
    node: str | None = None
    pod: str | None = None
    boot_id: str | None = None
    seq: int | None = None
    kernel: bool = False
    rank: int | None = None


_HINTS = ('"MESSAGE"', '"log"', '"textPayload"', '"jsonPayload"', '"logStreamName"', '"kubernetes"')
_JSON_TIME = re.compile(
    r'"(?:timestamp|time|ts|@timestamp|lastTimestamp|eventTime|generatedTimestamp|created_at)" ?: ?"?(?=\d)'
)
_OPEN_LIMIT = 1 << 20
"""Characters of a record that is opened: journald cuts messages far below."""


def open_record(line: str) -> Record | None:
    """The record in a line of JSON, None when it is none of these. Never raises."""
    if not line.startswith("{") or len(line) > _OPEN_LIMIT or not any(hint in line for hint in _HINTS):
        return None
    try:
        fields = msgspec.json.decode(line.encode(errors="replace"))
    except (msgspec.DecodeError, RecursionError):
        return None
    if not isinstance(fields, dict):
        return None
    if "MESSAGE" in fields:
        return journal_record(fields)
    return _container_record(fields) or _cloud_record(fields)


def json_time(line: str) -> Stamp | None:
    """The time that a line of any JSON carries under one of the usual names."""
    match = _JSON_TIME.search(line, 0, 4000)
    found = stamp_at(line, match.end()) if match is not None else None
    return found.stamp if found is not None else None


def journal_record(fields: dict[str, Any]) -> Record | None:
    """A journal entry (`man systemd.journal-fields`): times in microseconds, a message that is text or a list of bytes."""
    message = fields.get("MESSAGE")
    if isinstance(message, list):
        message = bytes(b for b in message if isinstance(b, int) and 0 <= b < 256).decode(errors="replace")
    if not isinstance(message, str):
        return None
    kernel = fields.get("_TRANSPORT") == "kernel"
    micros = _number(fields.get("_SOURCE_REALTIME_TIMESTAMP")) or _number(fields.get("__REALTIME_TIMESTAMP"))
    boot = _number(fields.get("_SOURCE_MONOTONIC_TIMESTAMP")) if kernel else None
    program = _text(fields.get("SYSLOG_IDENTIFIER")) or _text(fields.get("_COMM"))
    if not kernel and program and program != "kernel":
        message = f"{program}: {message}"
    return Record(
        message=message,
        stamp=None if micros is None else Stamp("utc", micros * 1000),
        boot_ns=None if boot is None else boot * 1000,
        node=_text(fields.get("_HOSTNAME")),
        boot_id=_text(fields.get("_BOOT_ID")),
        seq=_number(fields.get("__SEQNUM")),
        kernel=kernel or program == "kernel",
    )


def _container_record(fields: dict[str, Any]) -> Record | None:
    """Docker's json-file {"log", "stream", "time"}; fluent-bit and others add {"kubernetes": {"host", "pod_name"}}."""
    message = fields.get("log")
    about = fields.get("kubernetes")
    if not isinstance(message, str) and isinstance(about, dict):
        message = fields.get("message", fields.get("msg"))
    if not isinstance(message, str) or not ("stream" in fields or "time" in fields or isinstance(about, dict)):
        return None
    about = about if isinstance(about, dict) else {}
    return Record(
        message=message.rstrip("\n"),
        stamp=_stamp(fields.get("time", fields.get("@timestamp", fields.get("timestamp", fields.get("date"))))),
        node=_text(about.get("host")) or _text(about.get("node_name")),
        pod=_text(about.get("pod_name")),
    )


def _cloud_record(fields: dict[str, Any]) -> Record | None:
    """Google Cloud Logging {"textPayload" or "jsonPayload", "timestamp", "resource"}; CloudWatch {"message", "logStreamName"}."""
    message = fields.get("textPayload")
    payload = fields.get("jsonPayload")
    if message is None and isinstance(payload, dict):
        message = payload.get("message", payload.get("MESSAGE", payload.get("log")))
    if message is None and "logStreamName" in fields:
        message = fields.get("message")
    if not isinstance(message, str):
        return None
    resource = fields.get("resource")
    labels = resource.get("labels") if isinstance(resource, dict) else None
    labels = labels if isinstance(labels, dict) else {}
    return Record(
        message=message.rstrip("\n"),
        stamp=_stamp(fields.get("timestamp")),
        node=_text(labels.get("node_name")) or _text(labels.get("instance_id")),
        pod=_text(labels.get("pod_name")) or _text(fields.get("logStreamName")),
    )


def is_export(lines: Sequence[str]) -> bool:
    """Whether a text is `journalctl -o export`: fields a line each, entries set apart by empty lines."""
    return any(t.startswith(("__CURSOR=", "__REALTIME_TIMESTAMP=")) for t in lines[:3])


def export_records(lines: Sequence[str]) -> dict[int, Record]:
    """The entries of an export, by the index of the line that holds the message. Binary fields are passed over."""
    found: dict[int, Record] = {}
    fields: dict[str, Any] = {}
    at: int | None = None
    for index, line in enumerate([*lines, ""]):
        if line:
            name, equals, value = line.partition("=")
            if equals and len(fields) < 200:
                fields[name] = value
                at = index if name == "MESSAGE" else at
            continue
        record = journal_record(fields) if at is not None else None
        if record is not None and at is not None:
            found[at] = record
        fields, at = {}, None
    return found


def _text(value: object) -> str | None:
    return value[:253] if isinstance(value, str) and value else None


def _number(value: object) -> int | None:
    if isinstance(value, int) and not isinstance(value, bool):
        return value if 0 <= value < 1 << 62 else None
    return int(value) if isinstance(value, str) and value.isascii() and value.isdigit() and len(value) < 19 else None


def _stamp(value: object) -> Stamp | None:
    if isinstance(value, float) and 0 < value < 1e11:
        return Stamp("utc", round(value * 1e6) * (SECOND_NS // 1_000_000))
    found = stamp_at(str(value)) if isinstance(value, str | int) and not isinstance(value, bool) else None
    return found.stamp if found is not None else None
