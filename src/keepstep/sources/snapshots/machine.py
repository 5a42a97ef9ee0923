"""What the machine around the GPUs looks like: driver version, processes that are left over, how ranks are bound to processors."""

from __future__ import annotations

import re
from collections.abc import Iterator
from typing import Any

from keepstep.catalog.load import Catalog
from keepstep.records.event import Event
from keepstep.sources.documents import Document, Line
from keepstep.sources.snapshots.gpu_health import driver_event
from keepstep.sources.snapshots.making import EVENTS_LIMIT, lines_of, make, mentions

WORDS = (
    "version", "Kernel Module", "/proc/", "PPID", "ppid", "cpu-bind", "NUMA node", "governor", "No such process", "cpubind",
    "policy:", "Kernel driver",
)  # fmt: skip

_MODULE = re.compile(
    r"\s*(?:version:\s+|NVRM version:.*?Kernel Module(?: for \S+)?\s+|Driver Version\s*[:=]\s*|driver_version\s*[:=]\s*)"
    r"(?P<version>\d{3}\.\d{1,3}(?:\.\d{1,3})?)\b"
)
_ABSENT = re.compile(
    r"/proc/(?P<pid>\d{1,10})(?:/\S*)?['’\"]?: No such file|kill: \(?(?P<killed>\d{1,10})\)?.*No such process"
    r"|no such process:? (?P<said>\d{1,10})",
    re.IGNORECASE,
)
_BIND = re.compile(
    r"cpu-bind(?:=|-)(?P<how>\w+)\s*-\s*(?P<node>[\w.-]+), task\s+(?P<task>\d{1,6})\s+\d+ \[\d+\]: "
    r"mask (?P<mask>0x[0-9A-Fa-f,x]+(?:\.\.\.[0-9a-fA-F]*)?)(?P<set> set)?"
)
_GOVERNOR = re.compile(
    r"(?:scaling_governor\S*\s*[:=]?\s*|The governor \"|current policy:?\s*.*?governor\s+\"?)"
    r"(?P<governor>powersave|conservative|ondemand|performance|schedutil)\b"
)
_PS_COLUMNS = re.compile(r"\bps\b.*?-\w*o\s*(?P<names>[a-z,%_]+)")


def parse(document: Document, catalog: Catalog) -> list[Event] | None:
    """Events of the driver's version, processes and binding; None when there is none of them."""
    if not mentions(document, WORDS):
        return None
    events = [*_drivers(document, catalog), *_processes(document, catalog), *_binding(document, catalog)]
    return events[:EVENTS_LIMIT] or None


def _drivers(document: Document, catalog: Catalog) -> Iterator[Event]:
    """The version that modinfo, /proc/driver/nvidia/version and nvidia-smi headers print."""
    seen: set[str] = set()
    module = "modinfo" in document.title
    for line in lines_of(document):
        match = _MODULE.match(line.text)
        if match is None or match["version"] in seen:
            continue
        # "version:" alone heads many files; a driver's has three digits and a branch that exists.
        if line.text.strip().startswith("version:") and not module and "nvidia" not in document.title:
            continue
        seen.add(match["version"])
        yield driver_event(match["version"], document, line, catalog)


def _processes(document: Document, catalog: Catalog) -> Iterator[Event]:
    """Processes that are gone, and those whose parent is 1."""
    asked = _PS_COLUMNS.search(document.title)
    columns = [c for c in asked["names"].upper().split(",") if c] if asked is not None else []
    for line in lines_of(document):
        gone = _ABSENT.search(line.text)
        if gone is not None:
            pid = int(gone["pid"] or gone["killed"] or gone["said"])
            yield make(catalog, "process.absent", document, line, attrs={"pid": pid})
            continue
        words = line.text.split()
        if "PID" in words and "PPID" in words:
            columns = words
            continue
        if columns and "PPID" in columns:
            yield from _orphan(line, columns, document, catalog)


def _orphan(line: Line, columns: list[str], document: Document, catalog: Catalog) -> Iterator[Event]:
    cells = line.text.split(None, len(columns) - 1)
    if len(cells) < len(columns):
        return
    row = dict(zip(columns, cells, strict=False))
    numbers = {
        name: int(row[name]) for name in ("PID", "PPID", "PGID") if row.get(name, "").isdigit() and len(row[name]) < 11
    }
    if numbers.get("PPID") != 1 or "PID" not in numbers:
        return
    command = row.get("COMMAND") or row.get("COMM") or row.get("CMD") or ""
    attrs: dict[str, Any] = {"pid": numbers["PID"], "group": numbers.get("PGID"), "command": command[:200]}
    yield make(catalog, "process.orphan", document, line, attrs=attrs)


def _binding(document: Document, catalog: Catalog) -> Iterator[Event]:
    """Ranks that are not bound, or that share one processor; a governor that saves power."""
    masks: dict[str, list[tuple[str, Line]]] = {}
    for line in lines_of(document):
        bound = _BIND.search(line.text)
        if bound is not None:
            if bound["how"].upper() == "NONE":
                yield make(catalog, "cpu.unbound", document, line, node=bound["node"], rank=int(bound["task"]))
            else:
                masks.setdefault(bound["node"], []).append((bound["mask"].lower(), line))
        governor = _GOVERNOR.search(line.text)
        if governor is not None and governor["governor"] in {"powersave", "conservative"}:
            yield make(catalog, "cpu.governor_saving", document, line, attrs={"governor": governor["governor"]})
    for node, found in masks.items():
        same = {mask for mask, _ in found}
        if len(found) > 1 and len(same) == 1 and _processors(found[0][0]) <= 2:
            attrs = {"tasks": len(found), "mask": found[0][0]}
            yield make(catalog, "cpu.shared", document, found[0][1], node=node, attrs=attrs)


def _processors(mask: str) -> int:
    """Processors in a mask; many where it is cut."""
    if "..." in mask:
        return 1 << 20
    digits = mask.replace("0x", "").replace(",", "")
    try:
        return int(digits, 16).bit_count() if len(digits) <= 1024 else 1 << 20
    except ValueError:
        return 1 << 20
