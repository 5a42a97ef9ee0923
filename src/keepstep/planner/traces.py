"""Failure traces: which node was away from when to when, and why. Three formats are read; the measures are in `tracestats`.

- `keepstep.faults/1`: JSON lines. The first names the fleet: {"schema": "keepstep.faults/1", "nodes": 512} and, where known,
  "name", "hardware", "days" (how long faults were recorded) and "begin" (RFC 3339, when that began). Each further line is a fault:
  {"node": "n17", "begin_s": 120.5, "end_s": 4000, "cause": "gpu", "level": "hardware"}, or "begin" and "end" in RFC 3339. Without
  an end the node was still away when the trace ended.
- the fault trace of InfiniteHBD-Trace (stepfun-ai, Apache-2.0): a JSON array of fault_start and fault_end events, times in days.
- the failure records of Los Alamos National Laboratory (LA-UR-05-7318): a table of 22 described systems, times to the minute.

Parsers are functions over text. They raise ConfigError that names the text (`where`), the line or key, and the value.
"""

from __future__ import annotations

import csv
import datetime
import gzip
import lzma
import math
import zlib
from collections import Counter, defaultdict
from collections.abc import Iterable
from pathlib import Path
from typing import Literal, TypeVar

import msgspec

from keepstep.records.errors import ConfigError, StorageError

DAY_S = 86_400.0
SCHEMA = "keepstep.faults/1"
INFINITEHBD_NODES = 400
"""The trace names only nodes that failed; its authors say how many were watched."""
INFINITEHBD_NAME = "infinitehbd"
UNSTATED = "unstated"
Format = Literal["keepstep", "infinitehbd", "lanl"]
T = TypeVar("T")


class Fault(msgspec.Struct, frozen=True, kw_only=True):
    """A node that was away. Times are seconds since the trace's begin."""

    node: str
    begin_s: float
    end_s: float
    """When it was back; the end of the trace where it never was."""
    cause: str = UNSTATED
    level: str = UNSTATED
    """Coarse class of the cause in the words of the trace: hardware, software, other ..."""
    detail: str = ""
    returned: bool = True
    """Whether the node came back within the trace."""

    @property
    def down_s(self) -> float:
        return self.end_s - self.begin_s


class FaultTrace(msgspec.Struct, frozen=True, kw_only=True):
    """Faults of one fleet of equal nodes, in the order of their begins."""

    name: str
    nodes: int
    """Watched, those that never failed included."""
    days: float
    """How long they were watched. Where a source does not say: from its first event to its last."""
    faults: tuple[Fault, ...]
    hardware: str = ""
    """What the nodes are. Rates of different hardware do not belong into one estimate."""

    @property
    def node_days(self) -> float:
        return self.nodes * self.days

    @property
    def begins_s(self) -> list[float]:
        return [fault.begin_s for fault in self.faults]


def only_levels(trace: FaultTrace, *levels: str) -> FaultTrace:
    """The trace with faults of these levels alone, watched as long as before."""
    kept = tuple(fault for fault in trace.faults if fault.level in levels)
    return msgspec.structs.replace(trace, name=f"{trace.name} ({', '.join(levels)})", faults=kept)


def looks_like_one(data: bytes) -> bool:
    """Whether the begin of a file is that of a failure trace, compressed or not."""
    head = data[:4096].lstrip()
    first = head.partition(b"\n")[0]
    packed = data.startswith((b"\xfd7zXZ\0", b"\x1f\x8b"))
    table = first.lower().startswith(b"system,") and b"Prob Started" in first
    return packed or table or SCHEMA.encode() in first or (head.startswith(b"[") and b'"event_type"' in head)


def detect_format(text: str, where: str = "trace") -> Format:
    """Which format a text is in, from its begin. Raises ConfigError when it is none of them."""
    head = text[:4096].lstrip()
    if head.startswith("["):
        return "infinitehbd"
    if head.startswith("{") and "schema" in head.partition("\n")[0]:
        return "keepstep"
    if head.partition(",")[0].strip().lower() == "system" and "Prob Started" in head.partition("\n")[0]:
        return "lanl"
    raise ConfigError(
        f"{where}: not a failure trace, begins with {head[:40]!r}; readable are {SCHEMA} (JSON lines), "
        "InfiniteHBD's fault_trace.json and LANL's failure table"
    )


def parse_traces(text: str, where: str = "trace", nodes: int | None = None) -> list[FaultTrace]:
    """The traces in a text of any format. `nodes` is for InfiniteHBD's, which does not say how many nodes were watched."""
    kind = detect_format(text, where)
    if kind == "lanl":
        return parse_lanl(text, where)
    if kind == "infinitehbd":
        return [parse_infinitehbd(text, where, INFINITEHBD_NODES if nodes is None else nodes)]
    return [parse_faults(text, where)]


def read_traces(path: Path, nodes: int | None = None) -> list[FaultTrace]:
    """The traces in a file: plain, or compressed by gzip or xz, whatever its name.

    Raises StorageError when it cannot be read and ConfigError when it is damaged or no trace.
    """
    try:
        raw = path.read_bytes()
    except OSError as error:
        raise StorageError(f"{path}: cannot read the failure trace: {error.strerror}") from None
    try:
        if raw.startswith(b"\xfd7zXZ\0"):
            raw = lzma.decompress(raw)
        elif raw.startswith(b"\x1f\x8b"):
            raw = gzip.decompress(raw)
        text = raw.decode("utf-8-sig")
    except (lzma.LZMAError, OSError, EOFError, zlib.error) as error:
        raise ConfigError(f"{path}: damaged compressed file: {error}") from None
    except UnicodeDecodeError as error:
        raise ConfigError(f"{path}: not UTF-8 text: byte {error.start} is {raw[error.start]:#04x}") from None
    return parse_traces(text, str(path), nodes)


# ---- keepstep.faults/1


class _Header(msgspec.Struct, kw_only=True, forbid_unknown_fields=True):
    schema: str
    nodes: int
    name: str = ""
    hardware: str = ""
    days: float | None = None
    begin: str | None = None


class _Line(msgspec.Struct, kw_only=True, forbid_unknown_fields=True):
    node: str | int
    begin_s: float | None = None
    begin: str | None = None
    end_s: float | None = None
    end: str | None = None
    cause: str = UNSTATED
    level: str = UNSTATED
    detail: str = ""


def parse_faults(text: str, where: str = "trace") -> FaultTrace:
    """The trace in a text of keepstep.faults/1. All faults give seconds, or all give dates; raises ConfigError."""
    lines = [(number, line) for number, line in enumerate(text.splitlines(), 1) if line.strip()]
    if not lines:
        raise ConfigError(f"{where}: empty; the first line of {SCHEMA} names the fleet")
    header = _decoded(lines[0][1], _Header, f"{where}: line {lines[0][0]}")
    if header.schema != SCHEMA:
        raise ConfigError(f"{where}: line {lines[0][0]}: schema {header.schema!r}; this version reads {SCHEMA}")
    origin_s = None if header.begin is None else _epoch_s(header.begin, f"{where}: line {lines[0][0]}: begin")
    rows: list[tuple[int, _Line, float, float | None]] = []
    dated: bool | None = None
    for number, line in lines[1:]:
        at = f"{where}: line {number}"
        row = _decoded(line, _Line, at)
        if (row.begin_s is None) == (row.begin is None) or (row.end_s is not None and row.end is not None):
            raise ConfigError(f"{at}: give begin_s or begin, and at most one of end_s and end")
        uses_dates = row.begin is not None
        if dated not in (None, uses_dates) or (row.end_s if uses_dates else row.end) is not None:
            raise ConfigError(f"{at}: seconds and dates are mixed; use begin_s and end_s, or begin and end, throughout")
        dated = uses_dates
        begin_s = _time_s(row.begin_s, row.begin, f"{at}: begin")
        end_s = None if row.end_s is None and row.end is None else _time_s(row.end_s, row.end, f"{at}: end")
        if end_s is not None and end_s < begin_s:
            raise ConfigError(f"{at}: node {row.node}: ends {begin_s - end_s:g} s before it begins")
        rows.append((number, row, begin_s, end_s))
    return _faults_of(header, rows, origin_s if dated else 0.0, where)


def _faults_of(
    header: _Header, rows: list[tuple[int, _Line, float, float | None]], origin_s: float | None, where: str
) -> FaultTrace:
    """Shift times to the trace's begin, close what is open, and check that all lies within its days."""
    zero_s = min((begin_s for _, _, begin_s, _ in rows), default=0.0) if origin_s is None else origin_s
    last_s = max((end_s if end_s is not None else begin_s for _, _, begin_s, end_s in rows), default=zero_s)
    length_s = last_s - zero_s if header.days is None else header.days * DAY_S
    faults = []
    for number, row, begin_s, end_s in rows:
        begin = begin_s - zero_s
        if begin < 0.0 or begin > length_s * (1.0 + 1e-12):
            raise ConfigError(f"{where}: line {number}: begins {begin:g} s after the trace's begin, outside its days")
        # A node that came back after the last day is one that did not come back within the trace.
        back = end_s is not None and end_s - zero_s <= length_s * (1.0 + 1e-12)
        end = end_s - zero_s if back and end_s is not None else max(length_s, begin)
        faults.append(
            Fault(
                node=str(row.node),
                begin_s=begin,
                end_s=end,
                cause=row.cause,
                level=row.level,
                detail=row.detail,
                returned=back,
            )
        )
    return _checked(header.name or where, header.nodes, length_s, faults, where, header.hardware)


def _decoded(text: str, kind: type[T], at: str) -> T:
    try:
        return msgspec.json.decode(text, type=kind)
    except msgspec.MsgspecError as error:
        raise ConfigError(f"{at}: {error}") from None


def _time_s(seconds: float | None, date: str | None, at: str) -> float:
    if seconds is None:
        return _epoch_s(date or "", at)
    if not 0.0 <= seconds < math.inf:
        raise ConfigError(f"{at}_s {seconds}: seconds since the trace's begin, from 0")
    return seconds


def _epoch_s(date: str, at: str) -> float:
    try:
        when = datetime.datetime.fromisoformat(date)
    except ValueError:
        when = None
    if when is None or when.tzinfo is None:
        raise ConfigError(f"{at} {date!r}: not a time of RFC 3339 with its zone, like 2026-03-01T12:00:00Z")
    return when.timestamp()


# ---- InfiniteHBD


class _FaultType(msgspec.Struct, frozen=True, kw_only=True):
    Level: str
    Class: str
    Desc: str


class _Event(msgspec.Struct, kw_only=True):
    node_id: str
    event_time: float
    event_type: Literal["fault_start", "fault_end"]
    fault_type: _FaultType


def parse_infinitehbd(text: str, where: str = "trace", nodes: int = INFINITEHBD_NODES) -> FaultTrace:
    """The trace of InfiniteHBD-Trace: event_time in days, each fault_start closed by a fault_end of the same node and fault type.

    `days` is the time from the first event to the last, since the recording's own begin and end are not given. `cause` is the
    Class, `level` the first word of the Level in lower case, `detail` the Desc.
    """
    events = _decoded(text, list[_Event], where)
    if not events:
        raise ConfigError(f"{where}: no events")
    for index, event in enumerate(events):
        if not 0.0 <= event.event_time < math.inf:
            raise ConfigError(f"{where}: $[{index}].event_time {event.event_time}: days, from 0")
    # A fault may begin and end at one time: begins sort first.
    order = sorted(range(len(events)), key=lambda i: (events[i].event_time, events[i].event_type == "fault_end"))
    zero_days, last_days = events[order[0]].event_time, events[order[-1]].event_time
    length_s = (last_days - zero_days) * DAY_S
    open_at: dict[tuple[str, _FaultType], list[float]] = defaultdict(list)
    faults: list[Fault] = []
    for index in order:
        event = events[index]
        begins = open_at[event.node_id, event.fault_type]
        at_s = (event.event_time - zero_days) * DAY_S
        if event.event_type == "fault_start":
            begins.append(at_s)
        elif begins:
            faults.append(_infinitehbd_fault(event.node_id, event.fault_type, begins.pop(0), at_s, returned=True))
        else:
            raise ConfigError(
                f"{where}: $[{index}]: fault_end of node {event.node_id} at day {event.event_time:g} without a fault_start"
            )
    for (node, fault_type), begins in open_at.items():
        faults.extend(_infinitehbd_fault(node, fault_type, begin_s, length_s, returned=False) for begin_s in begins)
    return _checked(INFINITEHBD_NAME, nodes, length_s, faults, where, "GPU nodes")


def _infinitehbd_fault(node: str, kind: _FaultType, begin_s: float, end_s: float, *, returned: bool) -> Fault:
    level = (kind.Level.split() or [UNSTATED])[0].lower()
    return Fault(
        node=node,
        begin_s=begin_s,
        end_s=end_s,
        cause=kind.Class or UNSTATED,
        level=level,
        detail=kind.Desc,
        returned=returned,
    )


# ---- LANL

_LANL_CAUSES = ("Facilities", "Hardware", "Human Error", "Network", "Undetermined", "Software")
_LANL_ZERO = datetime.datetime(1970, 1, 1)
_LANL_NEEDED = ("System", "machine type", "nodes", "procsinnode", "nodenum", "Prob Started", "Prob Fixed")


def parse_lanl(text: str | Iterable[str], where: str = "trace") -> list[FaultTrace]:
    """LANL's systems by number, each a trace of its own named "lanl-18"; 22 in the whole file.

    A system whose size the file leaves empty (17, with 126 records) is left out: it has no rate. Times are local and without a
    zone, so that they jump by an hour twice a year. `days` is the time from a system's first event to its last. `level` is the
    column of the cause in lower case, `cause` what it says.
    """
    rows = csv.reader(text.splitlines() if isinstance(text, str) else text)
    header = next(rows, [])
    missing = [name for name in (*_LANL_NEEDED, *_LANL_CAUSES) if name not in header]
    if missing:
        raise ConfigError(f"{where}: line 1: no column {missing[0]!r}; LANL's table has {', '.join(_LANL_NEEDED)} ...")
    column = {name: header.index(name) for name in (*_LANL_NEEDED, *_LANL_CAUSES)}
    systems: dict[int, list[Fault]] = defaultdict(list)
    sizes: dict[int, int] = {}
    hardware: dict[int, Counter[str]] = defaultdict(Counter)
    for row in rows:
        at = f"{where}: line {rows.line_num}"
        if not row:
            continue
        if len(row) < len(header):
            raise ConfigError(f"{at}: {len(row)} of {len(header)} columns")
        named = {name: row[place].strip() for name, place in column.items()}
        system = _whole(named["System"], f"{at}: System")
        if not named["nodes"]:
            continue
        size = _whole(named["nodes"], f"{at}: nodes")
        if sizes.setdefault(system, size) != size:
            raise ConfigError(f"{at}: nodes {size}: system {system} had {sizes[system]} before")
        hardware[system][f"{named['machine type']}, {named['procsinnode']} processors a node"] += 1
        systems[system].append(_lanl_fault(named, at))
    if not systems:
        raise ConfigError(f"{where}: no record of a system whose number of nodes is given")
    return [
        _lanl_trace(number, sizes[number], hardware[number].most_common(1)[0][0], systems[number], where)
        for number in sorted(systems)
    ]


def _lanl_fault(named: dict[str, str], at: str) -> Fault:
    """One record, its times still in seconds since 1970."""
    begin_s, end_s = (_lanl_time_s(named[name], f"{at}: {name}") for name in ("Prob Started", "Prob Fixed"))
    if end_s < begin_s:
        raise ConfigError(f"{at}: Prob Fixed {named['Prob Fixed']!r} is before Prob Started {named['Prob Started']!r}")
    level = next((name for name in _LANL_CAUSES if named[name]), None)
    cause = UNSTATED if level is None else named[level]
    return Fault(
        node=named["nodenum"],
        begin_s=begin_s,
        end_s=end_s,
        cause=cause,
        level=UNSTATED if level is None else level.lower(),
    )


def _lanl_trace(number: int, nodes: int, hardware: str, faults: list[Fault], where: str) -> FaultTrace:
    zero_s = min(fault.begin_s for fault in faults)
    length_s = max(fault.end_s for fault in faults) - zero_s
    shifted = [
        msgspec.structs.replace(fault, begin_s=fault.begin_s - zero_s, end_s=fault.end_s - zero_s) for fault in faults
    ]
    return _checked(f"lanl-{number}", nodes, length_s, shifted, f"{where}: system {number}", hardware)


def _lanl_time_s(value: str, at: str) -> float:
    try:
        date, _, clock = value.partition(" ")
        month, day, year = date.split("/")
        hour, minute = clock.split(":")
        when = datetime.datetime(int(year), int(month), int(day), int(hour), int(minute))
    except ValueError:
        raise ConfigError(f"{at} {value!r}: not a time like 6/21/2005 10:54") from None
    return (when - _LANL_ZERO).total_seconds()


def _whole(value: str, at: str) -> int:
    try:
        number = int(value)
    except ValueError:
        number = 0
    if number < 1:
        raise ConfigError(f"{at} {value!r}: not a whole number from 1")
    return number


# ---- what all parsers end with


def _checked(name: str, nodes: int, length_s: float, faults: list[Fault], where: str, hardware: str = "") -> FaultTrace:
    named = len({fault.node for fault in faults})
    if nodes < max(1, named):
        raise ConfigError(f"{where}: nodes {nodes}: {named} different nodes have faults")
    if not 0.0 < length_s < math.inf:
        raise ConfigError(f"{where}: it lasts {length_s:g} s; a trace needs a length above 0")
    ordered = tuple(sorted(faults, key=lambda fault: (fault.begin_s, fault.end_s, fault.node)))
    return FaultTrace(name=name, nodes=nodes, days=length_s / DAY_S, faults=ordered, hardware=hardware)
