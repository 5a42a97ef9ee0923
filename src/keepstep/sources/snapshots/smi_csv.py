"""`nvidia-smi --query-gpu=... --format=csv` with any columns, and `--query-compute-apps`.

Columns are known by their header. Without one (noheader) the command says them, where the transcript has it. The same GPU again is
the next sample, a comment between rows too.
"""

from __future__ import annotations

import re
from datetime import UTC, datetime
from typing import NamedTuple

from keepstep.catalog.load import Catalog
from keepstep.records.event import Event
from keepstep.sources.documents import Document, Line
from keepstep.sources.snapshots.fields import BY_QUERY, IDENTITY
from keepstep.sources.snapshots.gpu_health import gpu_events, process_event
from keepstep.sources.snapshots.making import LINE_LIMIT, gpu_named, index_of, lines_of, make
from keepstep.sources.snapshots.samples import Building, GpuSample, named

_UNIT = re.compile(r"\s*\[[^\]]*\]\s*\Z")
_QUERY = re.compile(r"--query-(?P<what>gpu|compute-apps)=(?P<columns>[\w.,]+)")
_APP_COLUMNS = frozenset({"pid", "process_name", "name", "used_memory", "used_gpu_memory", "gpu_name"})
_TIME = ("%Y/%m/%d %H:%M:%S.%f", "%Y/%m/%d %H:%M:%S")
COLUMNS_LIMIT = 200


class Row(NamedTuple):
    """A row with the header that it stands under. `sample`: counted up by comments between rows."""

    line: Line
    cells: dict[str, str]
    sample: int


def parse(document: Document, catalog: Catalog) -> list[Event] | None:
    """Events of all rows; None when no header of nvidia-smi was found."""
    if (idle := _no_process(document)) is not None:
        return [make(catalog, "gpu.no_process", document, idle, gpu=gpu_named(index=index_of(document)))]
    if "," not in document.title and not any("," in line.text for line in lines_of(document)):
        return None
    rows = read(document)
    if not rows:
        return None
    apps = [row for row in rows if "pid" in row.cells]
    events = gpu_events(_samples([row for row in rows if "pid" not in row.cells]), document, catalog)
    for row in apps:
        pid = row.cells["pid"]
        if pid.isdigit():
            used = row.cells.get("used_memory") or row.cells.get("used_gpu_memory") or ""
            gpu = named(None, _identity(row.cells))
            events.append(process_event(catalog, document, row.line, int(pid[:10]), used, gpu))
    return events


def _no_process(document: Document) -> Line | None:
    """The line that shows that a question for processes was answered with none: the header alone, or the next prompt."""
    asked = _QUERY.search(document.title)
    if asked is None or asked["what"] != "compute-apps" or "|" in document.title:
        return None
    lines = [line for line in lines_of(document) if line.text.strip()]
    said = [line for line in lines if line.text.strip() not in ("$", "#")]
    empty = not said or (len(said) == 1 and "pid" in _columns([c.strip() for c in said[0].text.split(",")]))
    return lines[0] if lines and empty else None


def read(document: Document) -> list[Row]:
    """All rows under a header, or under the columns that the command names."""
    rows: list[Row] = []
    asked = _QUERY.search(document.title)
    columns = _columns(asked["columns"].split(",")) if asked is not None else []
    sample = 0
    for line in lines_of(document):
        text = line.text.strip()
        if text.startswith("#"):
            # The comment between two samples; some pastes put one before the header too.
            header = _columns(text.lstrip("# ").split(","))
            columns = header or columns
            sample += bool(rows) and not header
            continue
        cells = [cell.strip() for cell in text.split(",")]
        if len(cells) > COLUMNS_LIMIT:
            continue
        if (header := _columns(cells)) and not any(cell.isdigit() for cell in cells):
            columns = header
            continue
        if columns and len(cells) != len(columns):
            # A time in the first column was taken for the prefix of a log.
            cells = [cell.strip() for cell in line.raw[:LINE_LIMIT].split(",")]
        if columns and len(cells) == len(columns):
            rows.append(Row(line, dict(zip(columns, cells, strict=True)), sample))
    return rows


def _columns(cells: list[str]) -> list[str]:
    """Names of a header, without units; empty when it is none of nvidia-smi's."""
    names = [_UNIT.sub("", cell.strip()).lower() for cell in cells]
    known = [n for n in names if n in BY_QUERY or n in IDENTITY or n in _APP_COLUMNS]
    if not known or len(known) * 2 < len(names):
        return []
    # "name", "index" or "pid" may head any table; names with a dot or underscore are nvidia-smi's own.
    return names if any(("." in n or "_" in n or n == "pstate") for n in known) else []


def _samples(rows: list[Row]) -> list[GpuSample]:
    found = []
    seen: dict[tuple[str | None, str], int] = {}
    for row in rows:
        identity = _identity(row.cells)
        key = (row.line.node, identity.get("uuid") or identity.get("pci") or identity.get("index") or "")
        seen[key] = seen.get(key, -1) + 1
        building = Building(number=max(row.sample, seen[key]))
        building.identity = identity
        building.node = row.line.node
        building.time_ns = row_time(row.cells.get("timestamp", ""))
        for name, cell in row.cells.items():
            if name in BY_QUERY:
                building.set(BY_QUERY[name], cell, row.line)
        sample = building.finish()
        if sample is not None:
            found.append(sample)
    return found


def _identity(cells: dict[str, str]) -> dict[str, str]:
    return {IDENTITY[name]: cell for name, cell in cells.items() if name in IDENTITY}


def row_time(text: str) -> int | None:
    """Nanoseconds of "2025/03/01 12:00:00.000", taken as UTC; None for another form."""
    for form in _TIME:
        try:
            moment = datetime.strptime(text, form).replace(tzinfo=UTC)
        except ValueError:
            continue
        return int(moment.timestamp()) * 1_000_000_000 + moment.microsecond * 1000
    return None
