"""Losses by step, of documents that hold one run each: what two runs are held against each other by."""

from __future__ import annotations

import re

from keepstep.catalog.load import Catalog
from keepstep.records.event import Event
from keepstep.sources.documents import Document, Line
from keepstep.sources.snapshots.making import lines_of, make

MOST = 512
"""Steps of a run that are kept; a comparison by hand has a few."""
LEAST = 2
_ROW = re.compile(
    r"(?i)\b(?:iteration|iter|(?:global[_ ]?)?step)[ =:]{1,12}(?P<step>\d{1,12})\b[^\n]{0,80}?\b(?:lm[ _]|train[ _])?loss[ =:]{1,3}"
    r"(?P<loss>\d{1,6}(?:\.\d{1,12})?(?:e[-+]?\d{1,3})?)(?![\w.])"
)


def parse(document: Document, catalog: Catalog) -> list[Event] | None:
    """One event with the losses of a titled document whose steps only grow; None for all else."""
    if not document.title or "loss" not in "".join(line.text for line in document.lines[:MOST]).lower():
        return None
    found: list[tuple[int, float]] = []
    first: Line | None = None
    for line in lines_of(document):
        match = _ROW.search(line.text)
        if match is None:
            continue
        step = int(match["step"])
        if found and step <= found[-1][0]:
            return None  # several ranks or lives: it is not told whose a loss is
        if len(found) >= MOST:
            return None
        found.append((step, float(match["loss"])))
        first = first or line
    if len(found) < LEAST:
        return None
    attrs = {"losses": [list(pair) for pair in found], "first": found[0][0], "last": found[-1][0]}
    return [make(catalog, "loss.series", document, first, attrs=attrs)]
