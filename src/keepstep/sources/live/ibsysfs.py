"""InfiniBand and RoCE devices of this machine: states of their ports, and error counters read twice.

Reading counters of restricted virtual functions makes the firmware log errors of its own (gpud #1164), so a device whose counters
cannot be read is not asked again.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any, NamedTuple

from keepstep.catalog.counters import counter_named
from keepstep.catalog.load import Catalog
from keepstep.records.event import Event
from keepstep.sources.documents import Document, Line
from keepstep.sources.snapshots.making import number
from keepstep.sources.snapshots.ports import Port, port_events
from keepstep.sources.snapshots.totals import Total, total_events

ROOT = Path("/sys/class/infiniband")
PORTS_LIMIT = 1024
VALUE_LIMIT = 256
"""Bytes of a sysfs file that are read."""

Key = tuple[str, str]


class Reading(NamedTuple):
    """`levels`: state, physical state, rate and link layer of each (device, port), as the kernel prints them. `counters`: totals.
    `denied`: ports whose counters cannot be read."""

    levels: Mapping[Key, Mapping[str, str]]
    counters: Mapping[Key, Mapping[str, int]]
    denied: tuple[Key, ...]


def available(root: Path = ROOT) -> bool:
    """Whether the kernel knows an InfiniBand or RoCE device."""
    return root.is_dir() and any(root.iterdir())


def read(root: Path = ROOT, skip: tuple[Key, ...] = ()) -> Reading:
    """All ports below `root` (/sys/class/infiniband, or a copy of it). `skip`: ports whose counters are not asked."""
    levels: dict[Key, dict[str, str]] = {}
    counters: dict[Key, dict[str, int]] = {}
    denied = list(skip)
    for port in sorted(root.glob("*/ports/*"), key=_natural)[:PORTS_LIMIT]:
        key = (port.parent.parent.name, port.name)
        levels[key] = {}
        for name, file in (("state", "state"), ("physical", "phys_state"), ("rate", "rate"), ("layer", "link_layer")):
            text = _value(port / file)
            if text:
                levels[key][name] = text
        if key in denied:
            continue
        try:
            counters[key] = _counters(port)
        except PermissionError:
            denied.append(key)
    return Reading(levels, counters, tuple(denied))


def fields_of(reading: Reading) -> dict[str, dict[str, dict[str, Any]]]:
    """A reading as it is written to a file: "device/port" -> levels and counters."""
    return {
        f"{nic}/{port}": {"levels": dict(levels), "counters": dict(reading.counters.get((nic, port), {}))}
        for (nic, port), levels in reading.levels.items()
    }


def key_of(name: str) -> Key:
    """Device and port of "device/port"."""
    nic, _, port = name.partition("/")
    return nic, port


def reading_of(fields: Mapping[str, Mapping[str, Mapping[str, Any]]]) -> Reading:
    """The reading that `fields_of` wrote. Raises KeyError, TypeError, AttributeError or ValueError where it is none."""
    levels: dict[Key, dict[str, str]] = {}
    counters: dict[Key, dict[str, int]] = {}
    for name, told in fields.items():
        key = key_of(name)
        levels[key] = {level: str(text) for level, text in told["levels"].items()}
        counters[key] = {counter: int(value) for counter, value in told["counters"].items()}
    return Reading(levels, counters, ())


def _counters(port: Path) -> dict[str, int]:
    """Error counters of a port that the catalog knows. Raises PermissionError for a port that may not be asked."""
    found = {}
    for folder in ("counters", "hw_counters"):
        place = port / folder
        for file in sorted(place.iterdir()) if place.is_dir() else []:
            if counter_named(file.name, "nic") is None:
                continue
            value = number(_value(file, strict=True) or "")
            if value is not None:
                found[file.name] = int(value)
    return found


def _value(file: Path, strict: bool = False) -> str | None:
    """First bytes of a file; None when it cannot be read. `strict`: raises PermissionError where reading is not allowed."""
    try:
        with file.open("rb") as opened:
            return opened.read(VALUE_LIMIT).decode(errors="replace").strip()
    except PermissionError:
        if strict:
            raise
        return None
    except OSError:
        return None


def _natural(path: Path) -> list[int | str]:
    return [
        int(part) if part.isdigit() else part for part in re.split(r"(\d+)", f"{path.parent.parent.name}/{path.name}")
    ]


def events_of(
    before: Reading, after: Reading, elapsed_s: float, catalog: Catalog, node: str | None = None
) -> list[Event]:
    """Events of two readings `elapsed_s` apart: every port as it is now, and its counters as two totals with their times."""
    document = Document(str(ROOT), "infiniband counters", (), node)
    ports = [
        Port(nic, port, Line(0, told.get("state", ""), told.get("state", "")), dict(told))
        for (nic, port), told in after.levels.items()
        if told
    ]
    totals = [
        Total(
            name, float(value), None, nic=key[0], node=node, port=key[1], family="nic", sample=sample, elapsed_s=elapsed,
        )
        for sample, elapsed, reading in ((0, 0.0, before), (1, elapsed_s, after))
        for key, values in reading.counters.items()
        for name, value in values.items()
    ]  # fmt: skip
    return port_events(ports, document, catalog) + total_events(totals, document, catalog)
