"""JSON codec and time formats of every record.

Inside, times are int64 nanoseconds since the Unix epoch; outside they are RFC 3339 in UTC with nine digits.
"""

from __future__ import annotations

import datetime
import re
from typing import Any, TypeVar

import msgspec

T = TypeVar("T")

_encoder = msgspec.json.Encoder(order="deterministic")


def to_json(value: Any) -> bytes:
    """Encode a record or plain value as compact JSON with a deterministic key order."""
    return _encoder.encode(value)


def to_pretty_json(value: Any) -> bytes:
    """Encode a record for people: two-space indentation and a final newline."""
    return msgspec.json.format(_encoder.encode(value), indent=2) + b"\n"


def from_json(data: bytes | str, kind: type[T]) -> T:
    """Decode and validate JSON as `kind`. Raises msgspec.ValidationError or msgspec.DecodeError."""
    return msgspec.json.decode(data, type=kind)


def rfc3339(time_ns: int) -> str:
    """UTC time with nine digits: 1_700_000_000_000_000_001 -> '2023-11-14T22:13:20.000000001Z'."""
    seconds, nanos = divmod(time_ns, 1_000_000_000)
    moment = datetime.datetime.fromtimestamp(seconds, tz=datetime.UTC)
    return f"{moment:%Y-%m-%dT%H:%M:%S}.{nanos:09d}Z"


def from_rfc3339(text: str) -> int:
    """RFC 3339 time, of up to nine digits, in UTC nanoseconds. Raises ValueError, also where it names no zone."""
    moment = datetime.datetime.fromisoformat(text)
    if moment.tzinfo is None:
        raise ValueError(f"{text!r} has no time zone")
    whole = int(moment.replace(microsecond=0).timestamp()) * 1_000_000_000
    fraction = re.search(r"\.(\d{1,9})", text)
    return whole + (int(fraction[1].ljust(9, "0")) if fraction else 0)
