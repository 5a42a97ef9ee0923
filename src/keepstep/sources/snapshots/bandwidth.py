"""Bandwidth tests: nccl-tests, nvbandwidth, CUDA's p2pBandwidthLatencyTest.

What is low is not decided here: it shows beside other machines, other GPUs, or another run. Wrong results are a fault at once.
"""

from __future__ import annotations

import re
from collections.abc import Iterator

from keepstep.catalog.load import Catalog
from keepstep.records.event import Event
from keepstep.sources.documents import Document, Line
from keepstep.sources.snapshots.making import EVENTS_LIMIT, lines_of, make, mentions, node_of, number

WORDS = (
    "busbw",
    "bus bandwidth",
    "BUS BW",
    "nThread",
    "nvbandwidth",
    "bandwidth (GB/s)",
    "Matrix (GB/s)",
    "_memcpy_",
    "#wrong",
)

_AVERAGE = re.compile(r"#\s*Avg bus bandwidth\s*:\s*(?P<gbs>[\d.]+)")
_HOST = re.compile(r"#\s*Rank\s+\d+.*?\bon\s+(?P<node>[\w.-]+)\s+device")
_RESULT = re.compile(
    r"\s*(?P<size>\d{1,15})\s+\d+\s+\w+\s+\w+\s+-?\d+\s+(?P<time>[\d.]+)\s+(?P<alg>[\d.]+)\s+(?P<bus>[\d.]+)\s+(?P<wrong>\d+|N/A)"
    r"(?:\s+[\d.]+\s+[\d.]+\s+(?P<bus2>[\d.]+)\s+(?P<wrong2>\d+|N/A))?"
)
_WRONG = re.compile(r"#\s*Out of bounds values\s*:\s*(?P<count>\d+)\s*(?P<verdict>\w+)?")
_MATRIX = re.compile(r"bandwidth.{0,40}\(GB/s\)\s*\Z", re.IGNORECASE)
_CELLS = re.compile(r"\s*(?P<row>\d{1,3})\s+(?P<cells>(?:[\d.]++|N/A)(?:\s++(?:[\d.]++|N/A)){0,63})\s*\Z")


def parse(document: Document, catalog: Catalog) -> list[Event] | None:
    """Events of results; None when the document has none."""
    if not mentions(document, WORDS):
        return None
    events = [*_collectives(document, catalog), *_matrices(document, catalog)]
    return events[:EVENTS_LIMIT] or None


def _collectives(document: Document, catalog: Catalog) -> Iterator[Event]:
    """The average of each run of nccl-tests with its machines, and results that are wrong."""
    nodes: list[str] = []
    best: tuple[float, Line] | None = None
    reported = False
    for line in lines_of(document):
        if host := _HOST.match(line.text):
            if host["node"] not in nodes and len(nodes) < 1024:
                nodes.append(host["node"])
            continue
        if result := _RESULT.match(line.text):
            bus = max(number(result["bus"]) or 0.0, number(result["bus2"] or "") or 0.0)
            best = (bus, line) if best is None or bus > best[0] else best
            wrong = [result["wrong"], result["wrong2"] or "0"]
            if not reported and any(w.isdigit() and int(w[:18]) > 0 for w in wrong):
                reported = True
                yield make(
                    catalog, "collective.wrong_result", document, line, attrs={"wrong": wrong, "nodes": nodes[:64]}
                )
        if (bad := _WRONG.match(line.text)) and int(bad["count"][:18]) > 0 and not reported:
            reported = True
            yield make(
                catalog, "collective.wrong_result", document, line, attrs={"wrong": [bad["count"]], "nodes": nodes[:64]}
            )
        if average := _AVERAGE.match(line.text):
            yield _busbw(best[0] if best is not None else number(average["gbs"]) or 0.0, nodes, line, document, catalog)
            nodes, best, reported = [], None, False
    if best is not None:
        yield _busbw(best[0], nodes, best[1], document, catalog)


def _busbw(gbs: float, nodes: list[str], line: Line, document: Document, catalog: Catalog) -> Event:
    told = nodes or [n for n in [node_of(document, line)] if n]
    attrs = {"metric": "busbw", "gbs": gbs, "nodes": told[:64]}
    return make(catalog, "bandwidth.result", document, line, node=told[0] if len(told) == 1 else None, attrs=attrs)


def _matrices(document: Document, catalog: Catalog) -> Iterator[Event]:
    """Each matrix of nvbandwidth and p2pBandwidthLatencyTest: one event with its rows."""
    kind, head = "", None
    rows: list[list[float | None]] = []
    for line in lines_of(document):
        match = _MATRIX.search(line.text)
        if match is not None:
            if rows and head is not None:
                yield _matrix(kind, rows, head, document, catalog)
            kind, head, rows = line.text.strip()[:120], line, []
            continue
        cells = _CELLS.match(line.text) if head is not None else None
        # The line of column numbers counts 0, 1, 2 ... with its own first cell.
        if cells is not None and "." in line.text and len(rows) < 64:
            rows.append([number(cell) for cell in cells["cells"].split()])
        elif rows and head is not None and line.text.strip() and cells is None:
            yield _matrix(kind, rows, head, document, catalog)
            head, rows = None, []
    if rows and head is not None:
        yield _matrix(kind, rows, head, document, catalog)


def _matrix(kind: str, rows: list[list[float | None]], head: Line, document: Document, catalog: Catalog) -> Event:
    attrs = {"metric": kind, "rows": rows}
    return make(catalog, "bandwidth.matrix", document, head, attrs=attrs)
