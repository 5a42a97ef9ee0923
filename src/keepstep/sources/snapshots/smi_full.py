"""`nvidia-smi -q`, whole or with `-d SECTION`, and what grep leaves of it.

The listing is indented sections of "Label : value". A paste may have lost the indentation, the section or the GPU it belongs to, so
a label is looked up with as much of its path as there is.
"""

from __future__ import annotations

import re
from datetime import UTC, datetime
from typing import NamedTuple

from keepstep.catalog.load import Catalog
from keepstep.records.event import Event
from keepstep.sources.documents import Document, Line
from keepstep.sources.snapshots.fields import BY_LABEL, BY_NAME, Field
from keepstep.sources.snapshots.gpu_health import gpu_events, process_event
from keepstep.sources.snapshots.making import gpu_named, index_of, lines_of, mentions, yes_no
from keepstep.sources.snapshots.samples import Building, GpuSample

WORDS = (
    "nvidia-smi", "NVSMI LOG", "Clocks Event Reasons", "Clocks Throttle Reasons", "HW Slowdown", "HW Thermal", "HW Power Brake",
    "SW Power Cap", "SW Thermal", "Remapped Rows", "Remapping Failure", "GPU Recovery Action", "Reset Required",
    "Drain and Reset", "SRAM ", "DRAM ", "Retired Pages", "Pending Page", "PCIe Generation", "Replays Since Reset",
    "Performance State", "Bank Remap", "Fabric", "T.Limit", "GPU UUID", "ECC Errors", "Uncorrectable Error",
)  # fmt: skip
"""At least one of these stands in any listing or excerpt that tells something."""

_HEADER = re.compile(r"\s*GPU\s+(?P<pci>[0-9A-Fa-f]{4,8}:[0-9A-Fa-f]{2}:[0-9A-Fa-f]{2}\.[0-7])\s*\Z")
_ENTRY = re.compile(r"(?P<indent>\s*)(?P<label>[A-Za-z][A-Za-z0-9 ./()_-]{0,60}?)\s*:(?:\s+(?P<value>\S.*?))?\s*\Z")
_SECTION = re.compile(r"(?P<indent>\s*)(?P<label>[A-Z][A-Za-z0-9 ./()_-]{1,50}?)\s*\Z")
_IDENTITY = {"gpu uuid": "uuid", "uuid": "uuid", "bus id": "pci", "serial number": "serial"}
_OTHERS = frozenset({"module power readings", "workload power profiles", "power samples", "max customer boost clocks"})
"""Sections whose labels are those of the GPU's own, about something else."""
_REMAP_LABELS = {
    "correctable error": "remapped_corrected",
    "uncorrectable error": "remapped_uncorrected",
    "pending": "remap_pending",
    "remapping failure occurred": "remap_failed",
}


class _State(NamedTuple):
    """Where the reader is: sections by indentation, the last two sections as such, and what is taken as a row-remapper excerpt."""

    open: list[tuple[int, str]]
    recent: list[str]
    remapper: bool


def parse(document: Document, catalog: Catalog) -> list[Event] | None:
    """Events of a listing; None when nothing in the document is of one."""
    if not mentions(document, WORDS):
        return None
    samples, processes = read(document)
    if not samples and not processes:
        return None
    return gpu_events(samples, document, catalog) + [
        process_event(catalog, document, line, pid, used_mib, gpu_named(pci=pci or None))
        for line, pid, used_mib, pci in processes
    ]


def read(document: Document) -> tuple[list[GpuSample], list[tuple[Line, int, str, str]]]:
    """Samples, in the order of the listing, and processes as (line, pid, memory as printed, GPU)."""
    titled = document.title.lower()
    state = _State([], [], "remap" in titled or mentions(document, ("Remapp",)))
    samples: list[Building] = [Building()]
    processes: list[tuple[Line, int, str, str]] = []
    common: dict[str, tuple[Field, str, Line]] = {}
    seen: set[tuple[str, ...]] = set()
    headers = 0
    pid: int | None = None
    for line in lines_of(document):
        if not line.text or line.text.isspace():
            continue
        header = _HEADER.match(line.text)
        entry = None if header else _ENTRY.match(line.text)
        if header is not None:
            samples.append(Building())
            samples[-1].identity["pci"] = header["pci"]
            headers, seen = headers + 1, set()
            state.open.clear()
            continue
        if entry is None:
            _section(line, state)
            continue
        label, value = entry["label"].lower(), entry["value"] or ""
        if label == "process id" and value.isdigit():
            pid = int(value[:18])
        elif label == "used gpu memory" and pid is not None:
            processes.append((line, pid, value, samples[-1].identity.get("pci", "")))
        path, field = _field(entry, state, value)
        if label in _IDENTITY and value and "sub" not in label:
            samples[-1].identity.setdefault(_IDENTITY[label], value)
        elif label == "timestamp":
            samples[-1].time_ns = listing_time(value)
        if not value:
            _push(state, len(entry["indent"]), entry["label"])
        if field is None:
            continue
        if field.name == "driver":
            common["driver"] = (field, value, line)
            continue
        if path in seen and not headers:
            # The same label again without a GPU between: grep over several GPUs, which come in the order of their index.
            samples.append(Building())
            seen = set()
        seen.add(path)
        samples[-1].node = samples[-1].node or line.node
        samples[-1].set(field, value, line)
    return _finished(samples, common, index_of(document), headers), processes


def _finished(
    samples: list[Building], common: dict[str, tuple[Field, str, Line]], index: int | None, headers: int
) -> list[GpuSample]:
    """Samples with their place in the listing as index where the listing is of all GPUs, and what stands once for all."""
    told = [s for s in samples if s.levels or s.lost is not None]
    time_ns = next((s.time_ns for s in samples if s.time_ns is not None), None)
    finished = []
    for place, sample in enumerate(told):
        for field, value, line in common.values():
            sample.set(field, value, line)
        sample.time_ns = sample.time_ns or time_ns
        own = index if index is not None else place if not headers and len(told) > 1 else None
        done = sample.finish(own)
        if done is not None:
            finished.append(done)
    if not told and common:
        alone = Building()
        for field, value, line in common.values():
            alone.set(field, value, line)
        done = alone.finish(index)
        finished += [done] if done is not None else []
    return finished


def _push(state: _State, indent: int, label: str) -> None:
    while state.open and state.open[-1][0] >= indent:
        state.open.pop()
    state.open.append((indent, label))
    state.recent[:] = [*state.recent[-1:], label]


def _section(line: Line, state: _State) -> None:
    """A label without colon opens a section."""
    match = _SECTION.match(line.text)
    if match is not None:
        _push(state, len(match["indent"]), match["label"])


def _field(entry: re.Match[str], state: _State, value: str) -> tuple[tuple[str, ...], Field | None]:
    """The path that was found to mean something, and the field it means."""
    label, indent = entry["label"], len(entry["indent"])
    while state.open and state.open[-1][0] >= indent and value:
        # A sibling or an uncle: what was open at this depth is closed. Sections of a paste without indentation stay in `recent`.
        state.open.pop()
    nested = [name for _, name in state.open]
    if any(name.lower() in _OTHERS for name in (*nested, *state.recent[-1:])):
        return (label,), None
    for path in ((*nested, label), (*state.recent, label)):
        for start in range(max(0, len(path) - 3), len(path)):
            field = BY_LABEL.get(" > ".join(path[start:]).lower())
            if field is not None:
                return path[start:], field
    remap = _REMAP_LABELS.get(label.lower())
    if remap is not None and state.remapper and not nested and (remap != "remap_pending" or yes_no(value) is not None):
        if value.lower() in {"enabled", "disabled"}:
            return (label,), None
        return (label,), BY_NAME[remap]
    return (label,), None


def listing_time(text: str) -> int | None:
    """Nanoseconds of "Mon Mar  3 10:20:30 2025", taken as UTC; None for another form."""
    try:
        moment = datetime.strptime(" ".join(text.split()), "%a %b %d %H:%M:%S %Y").replace(tzinfo=UTC)
    except ValueError:
        return None
    return int(moment.timestamp()) * 1_000_000_000
