"""Records of /dev/kmsg (Documentation/ABI/testing/dev-kmsg)."""

from __future__ import annotations

import os
import re
import time
from pathlib import Path
from typing import NamedTuple

KMSG = Path("/dev/kmsg")
RECORD_BYTES = 8192
"""A record with its continuation never exceeds this (CONSOLE_EXT_LOG_MAX)."""
BOOT_ID = Path("/proc/sys/kernel/random/boot_id")
_ESCAPED = re.compile(r"\\x([0-9a-f]{2})")


class KmsgRecord(NamedTuple):
    """A record. `priority`: syslog facility * 8 + level. `boot_ns`: by the log's own clock, which stands still in suspend."""

    priority: int
    seq: int
    boot_ns: int
    text: str


def parse_kmsg(record: bytes) -> KmsgRecord | None:
    r"""A record, None for what is none.

    "priority,sequence,microseconds,flags[,...];text", then lines " KEY=value". Bytes that are not printable come as \xNN.
    """
    head, separator, rest = record.decode(errors="replace").partition(";")
    fields = head.split(",")
    if not separator or len(fields) < 4 or not all(f.isascii() and f.isdigit() and len(f) < 20 for f in fields[:3]):
        return None
    text = rest.partition("\n")[0]
    if "\\x" in text:
        text = _ESCAPED.sub(lambda match: chr(int(match[1], 16)), text)
    return KmsgRecord(int(fields[0]), int(fields[1]), int(fields[2]) * 1000, text)


def read_records(fd: int, deadline: float) -> list[bytes]:
    """All records that a non-blocking descriptor of /dev/kmsg gives until it has no more (one read is one record).

    `deadline`: of time.monotonic(). Where the ring went round under the reader, the next record is the oldest that is left.
    """
    records: list[bytes] = []
    while time.monotonic() < deadline:
        try:
            record = os.read(fd, RECORD_BYTES)
        except BlockingIOError:
            break
        except BrokenPipeError:
            continue
        except OSError:
            break
        if not record:
            break
        records.append(record)
    return records


def boot_id(path: Path = BOOT_ID) -> str:
    """This boot's id, without dashes, as the journal writes it; "" where it cannot be read."""
    try:
        return path.read_text().strip().replace("-", "")
    except OSError:
        return ""


def utc_of(boot_ns: int) -> int:
    """UTC of a time of the log's clock, as clocks stand now. Never later than now."""
    now = time.time_ns()
    return min(now, now - (time.monotonic_ns() - boot_ns))
