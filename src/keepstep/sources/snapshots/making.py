"""What all parsers of snapshots need: lines that are safe to match, where a document came from, numbers with units, events."""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping
from typing import Any

from keepstep.catalog.coded import pci_address
from keepstep.catalog.load import Catalog
from keepstep.records.event import Event, Evidence, Gpu, TimeQuality, bounded
from keepstep.sources.documents import Document, Line

LINE_LIMIT = 2000
"""Characters of a line that are looked at: no tool prints more in a line that matters here."""
LINES_LIMIT = 200_000
"""Lines of a document that are looked at. Outputs of tools are far below; a log of this length has its own readers."""
EVENTS_LIMIT = 4000
"""Events that one document gives at most, so that a crafted file cannot fill memory."""

_NODE = re.compile(
    r"(?:\b(?:on|node|host|from|ssh)[ =:]+|@|\A)(?P<node>[a-zA-Z][\w-]*\d[\w-]*)(?=\s*\Z|:? )(?!\s+[-\w./]*\s*=)"
)
_INDEX = re.compile(r"(?:\s-i|--id)[ =](?P<index>\d{1,3})\b")
_NUMBER = re.compile(r"[-+]?(?:\d+\.?\d*|\.\d+)(?:[eE][-+]?\d{1,3})?")
_UNKNOWN = frozenset({"", "-", "n/a", "[n/a]", "na", "nan", "none", "null", "unknown", "blank"})
_NOT_TOLD = re.compile(r"\[?(?:not supported|unknown error|insufficient permissions|not found|n/a)\]?\Z", re.IGNORECASE)


def lines_of(document: Document) -> Iterable[Line]:
    """The lines that parsers look at, cut to a length that is safe to match."""
    for line in document.lines[:LINES_LIMIT]:
        yield line if len(line.text) <= LINE_LIMIT else line._replace(text=line.text[:LINE_LIMIT])


def mentions(document: Document, words: Iterable[str]) -> bool:
    """Whether any of the words stands in the document or its title: the cheap question before a parser looks closer."""
    # One search in one string: asking each line for each word costs more than the parsers do.
    text = "\n".join([document.title, *(line.text for line in document.lines[:LINES_LIMIT])])
    return any(word in text for word in words)


def node_of(document: Document, line: Line | None = None) -> str | None:
    """The machine that a line is from: its own prefix, or a name with a digit after "on", "node" or "host" in the title."""
    if line is not None and line.node:
        return line.node
    if document.node:
        return document.node
    match = _NODE.search(document.title)
    return match["node"] if match is not None else None


def index_of(document: Document) -> int | None:
    """The GPU that a command was asked about (`-i 3`)."""
    match = _INDEX.search(document.title)
    return int(match["index"]) if match is not None else None


def number(text: str) -> float | None:
    """The number that a text begins with, without its unit: "97 %", "26.562 GB/s", "0x10". None where the tool told none."""
    text = text.strip().strip("'\"")
    if text.lower() in _UNKNOWN or _NOT_TOLD.match(text):
        return None
    if text[:2].lower() == "0x":
        try:
            return float(int(text.split()[0][:18], 16))
        except ValueError:
            return None
    match = _NUMBER.match(text.replace(",", "") if re.match(r"\d{1,3}(,\d{3})+\b", text) else text)
    return float(match.group()) if match is not None else None


def yes_no(text: str) -> bool | None:
    """True for "Yes", "Active", "Enabled"; None for anything that is neither yes nor no."""
    word = text.strip().lower()
    if word in {"yes", "active", "enabled", "true", "on"}:
        return True
    return False if word in {"no", "not active", "disabled", "false", "off", "inactive"} else None


def gpu_named(index: int | None = None, uuid: str | None = None, pci: str | None = None) -> Gpu | None:
    """The GPU, None when nothing names it."""
    gpu = Gpu(index=index, uuid=uuid or None, pci=pci_address(pci) if pci else None)
    return gpu if gpu != Gpu() else None


def make(
    catalog: Catalog,
    signature: str,
    document: Document,
    line: Line | None,
    *,
    gpu: Gpu | None = None,
    nic: str | None = None,
    node: str | None = None,
    rank: int | None = None,
    time_ns: int | None = None,
    attrs: Mapping[str, Any] | None = None,
) -> Event:
    """An event of an entry of the catalog, seen in a line (None: in the document as a whole)."""
    entry = catalog[signature]
    quality: TimeQuality = "zone_assumed"
    if time_ns is None:
        time_ns, quality = (None, "none") if line is None else (line.time_ns, line.time_quality)
    return Event(
        kind=entry.kind,
        signature=entry.id,
        severity=entry.severity,
        source=document.title or "snapshot",
        order=0 if line is None else line.number,
        time_ns=time_ns,
        time_quality=quality,
        node=node or node_of(document, line),
        gpu=gpu,
        nic=nic,
        rank=rank if rank is not None or line is None else line.rank,
        attrs=dict(attrs or {}),
        evidence=Evidence(
            path=document.path,
            line=0 if line is None else line.number,
            text="" if line is None else bounded(line.raw),
        ),
    )
