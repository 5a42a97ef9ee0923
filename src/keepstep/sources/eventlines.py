"""Recorded history: JSON lines of `keepstep.event/1`, as `keepstep scan -o jsonl` prints them, read back and put into one order.

The order depends on what the events say and on nothing else, so that files may be given in any order.
"""

from __future__ import annotations

import json
import re
import sys
from collections.abc import Iterator, Sequence
from typing import Any, BinaryIO, NamedTuple

import msgspec

from keepstep.records.codec import from_rfc3339, to_json
from keepstep.records.errors import ConfigError, KeepstepError
from keepstep.records.event import Event
from keepstep.sources.decoding import open_stream

SCHEMA = "keepstep.event/1"
STDIN = "-"
LONGEST_LINE_BYTES = 16 << 20
"""No event is as long; a file without line ends is no history."""
SHOWN = 60
"""Characters of a wrong value in a message."""
_TIMES = (("time", "time_ns"), ("last", "last_ns"))
_AT = re.compile(r" - at `\$\.?(?P<path>[^`]*)`\Z")


class EventLines(NamedTuple):
    """Events by time; of one time by what they say. Equal ones, and records of one (boot, sequence number, signature), are one.

    `bad`: what was wrong with each line that was left out.
    """

    events: list[Event]
    bad: list[str]


class _BadLine(Exception):
    """Raised for a line that is no event; says which key and value."""


def read_event_lines(paths: Sequence[str], *, skip_bad: bool = False) -> EventLines:
    """The events of all files, plain, gzip or zstd; "-" is standard input.

    Raises ConfigError naming file, line, key and value of the first line that is no event, unless `skip_bad`, and the package that
    a zstd file needs; KeepstepError naming a file that cannot be read.
    """
    events: list[Event] = []
    bad: list[str] = []
    for path in paths:
        try:
            if path == STDIN:
                _read(sys.stdin.buffer, "standard input", skip_bad, events, bad)
            else:
                with open(path, "rb") as file:
                    _read(file, path, skip_bad, events, bad)
        except ModuleNotFoundError as error:
            raise ConfigError(f"{path}: zstd needs {error.name}: pip install 'keepstep[diagnose]'") from error
        except OSError as error:
            raise KeepstepError(f"{path}: cannot be read: {error.strerror or error}") from error
    return EventLines(in_order(events), bad)


def in_order(events: Sequence[Event]) -> list[Event]:
    """The events in an order that does not depend on the given one, each once. Those without a time are the last."""
    keyed = sorted((e.time_ns is None, e.time_ns or 0, to_json(e), number) for number, e in enumerate(events))
    found: list[Event] = []
    seen: set[object] = set()
    for _, _, text, number in keyed:
        event = events[number]
        # A record that was delivered twice may have been read by another way the second time.
        numbered = event.boot_id is not None and event.seq is not None
        key: object = (event.boot_id, event.seq, event.signature) if numbered else text
        if key not in seen:
            seen.add(key)
            found.append(event)
    return found


def _read(stream: BinaryIO, name: str, skip_bad: bool, events: list[Event], bad: list[str]) -> None:
    opened = open_stream(stream)
    number = 0
    for number, line in enumerate(_lines(opened.blocks, name), 1):
        if not line.strip():
            continue
        try:
            events.append(_event(line))
        except _BadLine as error:
            _refuse(f"{name}:{number}: {error}", skip_bad, bad)
    for note in opened.notes:
        _refuse(f"{name}:{number}: {note}", skip_bad, bad)


def _refuse(message: str, skip_bad: bool, bad: list[str]) -> None:
    if not skip_bad:
        raise ConfigError(f"{message}; --skip-bad leaves such lines out")
    bad.append(message)


def _lines(blocks: Iterator[bytes], name: str) -> Iterator[bytes]:
    rest = b""
    for block in blocks:
        *whole, rest = (rest + block).split(b"\n")
        yield from whole
        if len(rest) > LONGEST_LINE_BYTES:
            raise ConfigError(
                f"{name}: a line of more than {LONGEST_LINE_BYTES >> 20} MiB; give JSON lines of {SCHEMA}"
            )
    if rest:
        yield rest


def _event(line: bytes) -> Event:
    """The event of a line. Raises _BadLine."""
    try:
        fields = json.loads(line)
    except (ValueError, RecursionError) as error:
        raise _BadLine(f"not JSON: {error}: {_shown(line.decode(errors='replace'))}") from error
    if not isinstance(fields, dict):
        raise _BadLine(f"not a JSON object: {_shown(fields)}")
    if fields.get("schema") != SCHEMA:
        raise _BadLine(
            f"schema {_shown(fields.get('schema'))}: must be {SCHEMA!r}, as `keepstep scan -o jsonl` prints it"
        )
    for text, nanos in _TIMES:
        if text in fields:
            _take_time(fields, text, nanos)
    try:
        event = msgspec.convert(fields, Event)
    except msgspec.ValidationError as error:
        raise _BadLine(_told(str(error), fields)) from error
    if event.last_ns is not None and (event.time_ns is None or event.last_ns < event.time_ns):
        raise _BadLine(f"last_ns {event.last_ns}: before time_ns {event.time_ns}")
    if event.count < 1:
        raise _BadLine(f"count {event.count}: at least 1")
    return event


def _take_time(fields: dict[str, Any], text: str, nanos: str) -> None:
    """Take a time in RFC 3339 for the nanoseconds. Raises _BadLine where it is none, or they differ."""
    value = fields.pop(text)
    try:
        at_ns = from_rfc3339(value) if isinstance(value, str) else None
    except ValueError:
        at_ns = None
    if at_ns is None:
        raise _BadLine(f"{text} {_shown(value)}: not a time of RFC 3339 with its zone, such as 2026-01-31T12:00:00Z")
    if fields.setdefault(nanos, at_ns) != at_ns:
        raise _BadLine(f"{text} {_shown(value)} and {nanos} {_shown(fields[nanos])}: not the same time")


def _told(message: str, fields: dict[str, Any]) -> str:
    """A message of the decoder with key and value in front."""
    match = _AT.search(message)
    if match is None:
        return message
    value: Any = fields
    for key in match["path"].split("."):
        value = value.get(key) if isinstance(value, dict) else value
    return f"{match['path']} {_shown(value)}: {message[: match.start()]}"


def _shown(value: Any) -> str:
    text = repr(value)
    return text if len(text) <= SHOWN else text[: SHOWN - 1] + "…"
