"""Tables of samples over time in which a column is a counter of a port: what people and dashboards write of flapping links.

Columns are known by where they stand; tables whose rows have as many words as their header are read by tables.py.
"""

from __future__ import annotations

import re
from collections.abc import Iterator

from keepstep.catalog.counters import counter_named
from keepstep.catalog.load import Catalog
from keepstep.records.event import Event
from keepstep.sources.documents import Document
from keepstep.sources.snapshots.making import LINE_LIMIT, lines_of
from keepstep.sources.snapshots.ports import DEVICE
from keepstep.sources.snapshots.totals import Total, total_events

DAY_S = 86_400.0
_TIME = re.compile(
    r"^\W{0,3}(?:\d{4}-\d\d-\d\d[ T])?(?P<H>[01]\d|2[0-3]):(?P<M>[0-5]\d)(?::(?P<S>[0-5]\d))?(?:\.\d+)?Z?\b"
)
_DIGITS = re.compile(r"[0-9]{1,18}")
_WORD = re.compile(r"\S+")
_PORT = re.compile(rf"\b(?P<nic>{DEVICE})(?:[/: ](?:port ?)?(?P<port>\d{{1,3}})\b)?")
_HEAD = re.compile(r"(?i)^\W{0,3}(?:time|timestamp|at|date)\b")


def parse(document: Document, catalog: Catalog) -> list[Event] | None:
    """Events of the counters; None when the document has no such table."""
    totals = list(_read(document))
    return total_events(totals, document, catalog) if totals else None


def _read(document: Document) -> Iterator[Total]:
    columns: list[tuple[int, int, str]] = []
    width = 0
    nic = port = None
    samples: dict[tuple[str | None, str | None, str], int] = {}
    begin_s: float | None = None
    for line in lines_of(document):
        raw = line.raw[:LINE_LIMIT]
        if _HEAD.match(raw):
            columns = [
                (m.start(), m.end(), m[0]) for m in _WORD.finditer(raw) if counter_named(m[0], "nic") is not None
            ]
            width = len(raw.split())
            named = _PORT.search(raw)
            nic, port = (named["nic"], named["port"]) if named is not None else (None, None)
            begin_s = None
            continue
        time = _TIME.match(raw) if columns else None
        if time is None or len(raw.split()) == width:
            columns = []
            continue
        at_s = int(time["H"]) * 3600.0 + int(time["M"]) * 60 + int(time["S"] or 0)
        begin_s = at_s if begin_s is None else begin_s
        named = _PORT.search(raw)
        of = (named["nic"], named["port"]) if named is not None else (nic, port)
        for start, end, name in columns:
            value = next((m[0] for m in _WORD.finditer(raw) if m.start() < end and start < m.end()), "")
            if of[0] is None or not _DIGITS.fullmatch(value):
                continue
            sample = samples[*of, name] = samples.get((*of, name), -1) + 1
            yield Total(
                name, float(value), line, nic=of[0], port=of[1] or "", family="nic", sample=sample,
                elapsed_s=(at_s - begin_s) % DAY_S, node=line.node,
            )  # fmt: skip
