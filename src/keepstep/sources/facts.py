"""What texts say about machines as a whole: when they were booted or repaired, which records were handled before."""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator, Sequence
from typing import TYPE_CHECKING, NamedTuple

from keepstep.sources.clocks import Clock, Said
from keepstep.sources.timestamps import SECOND_NS, Stamp, stamp_at, stamp_in

if TYPE_CHECKING:
    from keepstep.sources.documents import Document, Line

_BOOT_PHRASE = re.compile(r"\b(?:system boot|boot(?:ed)?(?: time)?(?: at|:|=)|up since|uptime since)[ :=]+(?=[\dA-Z])")
_BTIME = re.compile(r"btime (?P<s>\d{9,10})$")
_MARKER = re.compile(
    r"Linux version \d|-- Boot (?P<boot_id>[0-9a-f]{8,32}) --|-- Reboot --|Command line: BOOT_IMAGE=|"
    r"\bBooting Linux on physical CPU"
)
"""The first words of a kernel, and what journalctl writes between two boots."""
_LAST_SEQ = re.compile(r"\blast[_ ](?:seq|sequence|kmsg_seq)(?:_?n(?:o|um|umber))?[ =:]+(?P<seq>\d{1,18})\b")
_BOOT_ID = re.compile(r"\bboot[_ ]?id[ =:\"]+(?P<boot_id>[0-9a-f-]{8,36})", re.IGNORECASE)
_REPAIR = re.compile(
    r"\b(?:repaired|replaced|reseated|serviced|rma(?:'?d)?(?: done)?|last[_ ]repair|repair(?:ed)?[_ ](?:at|time)|last[_ ]reset)\b"
    r"[^\n;]{0,40}?(?:[ =:]+(?:at[ =:]+)?)"
    r"(?:uptime_s[ =:]+(?P<uptime>\d{1,9}(?:\.\d+)?)|(?P<stamp>(?=\d{4}-|\d{10}|[A-Z][a-z]{2} )))",
    re.IGNORECASE,
)
_HINT = re.compile(
    r"boot|linux version|btime|up(?:time)? since|last[_ ]|repair|replaced|reseated|serviced|\brma", re.IGNORECASE
)
_MINUTE = re.compile(r"(?P<day>[A-Z][a-z]{2} {1,2}\d{1,2}|\d{4}-\d\d-\d\d)[ T](?P<time>\d\d:\d\d)(?!:?\d)")

Titled = tuple[str, "str | None", Sequence[str]]
"""Title, node and lines of a document."""


class Boot(NamedTuple):
    """A boot of a machine. `in_stream`: the kernel's own first words, at `line` of a document: what stands before is older."""

    node: str | None
    time_ns: int | None
    path: str
    title: str
    line: int
    in_stream: bool
    boot_id: str | None = None


class Repair(NamedTuple):
    """A repair, replacement or reset of a machine or one GPU (PCI address or UUID): by UTC, or by seconds since boot."""

    node: str | None
    time_ns: int | None
    boot_ns: int | None = None
    gpu: str | None = None


class Facts(NamedTuple):
    """What is known beside the events. `last_seq`: the last record that was handled, by boot id (None: not named)."""

    boots: tuple[Boot, ...] = ()
    repairs: tuple[Repair, ...] = ()
    last_seq: tuple[tuple[str | None, int], ...] = ()


def boots(documents: Iterable[Titled]) -> dict[str | None, int]:
    """The last known time of boot (UTC nanoseconds) by node; under None where the node is not named.

    From `uptime -s`, `who -b`, `btime` of /proc/stat, and phrases such as "boot at 2031-07-28 06:00:00".
    """
    found: dict[str | None, int] = {}
    for title, node, lines in documents:
        for text in lines:
            stamp = _boot_stamp(title, text)
            if stamp is not None and stamp.kind in ("utc", "local"):
                found[node] = max(stamp.ns, found.get(node, stamp.ns))
    return found


def _boot_stamp(title: str, text: str) -> Stamp | None:
    if "boot" not in text and "up" not in text and "btime" not in text and "uptime" not in title:
        return None
    match = _BTIME.match(text)
    if match is not None:
        return Stamp("utc", int(match["s"]) * SECOND_NS)
    if title.endswith("uptime -s"):
        return stamp_in(text)
    match = _BOOT_PHRASE.search(text)
    return _stamp(text, match.end()) if match is not None else None


def _stamp(text: str, start: int) -> Stamp | None:
    found = stamp_at(text, start)
    if found is not None and found.stamp.kind != "clock":
        return found.stamp
    match = _MINUTE.match(text, start)
    found = stamp_at(f"{match['day']} {match['time']}:00") if match is not None else None
    return found.stamp if found is not None else None


def facts_of(document: Document, near_ns: int | None = None) -> Facts:
    """What a document says about machines. Times without a year take that of their line, else that of `near_ns`."""
    found_boots = _changed_boots(document)
    if _HINT.search(document.text) is None and not document.title.endswith("uptime -s"):
        return Facts(tuple(found_boots))
    repairs: list[Repair] = []
    last_seq: list[tuple[str | None, int]] = []
    for line in document.lines:
        found_boots += _boots_in(document, line, near_ns)
        repairs += _repairs_in(line, near_ns)
        match = _LAST_SEQ.search(line.text)
        if match is not None:
            boot_id = _BOOT_ID.search(line.text)
            named = None if boot_id is None else boot_id["boot_id"]
            last_seq += [(named, int(match["seq"]))] + ([(None, int(match["seq"]))] if named is not None else [])
    return Facts(tuple(found_boots), tuple(repairs), tuple(last_seq))


def _changed_boots(document: Document) -> list[Boot]:
    """The last boot of each machine, where the records of a journal name several."""
    begun: dict[str | None, list[Line]] = {}
    for line in document.lines:
        if line.boot_id is not None:
            lines = begun.setdefault(line.node, [])
            if not lines or lines[-1].boot_id != line.boot_id:
                lines.append(line)
    title = document.title or "text"
    return [
        Boot(node, lines[-1].time_ns, document.path, title, lines[-1].number, True, lines[-1].boot_id)
        for node, lines in begun.items()
        if len(lines) > 1
    ]


def _boots_in(document: Document, line: Line, near_ns: int | None) -> Iterator[Boot]:
    node = line.node or document.node
    marker = _MARKER.search(line.text, 0, 400) if line.stream != "job" else None
    if marker is not None:
        yield Boot(node, None, document.path, document.title or "text", line.number, True, marker["boot_id"])
        return
    stamp = _boot_stamp(document.title, line.text)
    if stamp is not None:
        time_ns = _resolved(stamp, line.time_ns if line.time_ns is not None else near_ns)
        yield Boot(node, time_ns, document.path, document.title or "text", line.number, False)


def _repairs_in(line: Line, near_ns: int | None) -> Iterator[Repair]:
    for match in _REPAIR.finditer(line.text[:4000]):
        if match["uptime"] is not None:
            yield Repair(line.node, None, round(float(match["uptime"]) * SECOND_NS))
            continue
        stamp = _stamp(line.text, match.end())
        time_ns = None if stamp is None else _resolved(stamp, line.time_ns if line.time_ns is not None else near_ns)
        if time_ns is not None:
            yield Repair(line.node, time_ns)


def _resolved(stamp: Stamp, near_ns: int | None) -> int | None:
    return Clock(near_ns).resolve(Said(stamp)).time_ns
