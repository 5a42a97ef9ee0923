"""`ncclras`: NCCL's own view of a job, with communicators whose ranks are missing, dead or apart."""

from __future__ import annotations

import re

from keepstep.catalog.load import Catalog
from keepstep.records.event import Event
from keepstep.sources.documents import Document
from keepstep.sources.snapshots.making import EVENTS_LIMIT, lines_of, make, mentions

WORDS = ("ncclras", "NCCL version", "job process", "Communicators...", "28028", "RAS network", "Communicator ranks")

_DEAD = re.compile(r"(?P<count>\d+) job process(?:es)? (?:is|are) considered dead", re.IGNORECASE)
_MISSING = re.compile(r"Missing communicator data from (?P<count>\d+) (?:job process|rank)", re.IGNORECASE)
_APART = re.compile(r"Communicator ranks have different (?P<what>[\w ]+)", re.IGNORECASE)
_PROCESS = re.compile(
    r"Process (?P<pid>\d{1,10}) on node (?P<node>[\w.:-]+?)(?: managing GPUs? (?P<gpu>\d{1,3}))?(?:\s|,|\.|\Z)"
)
_RANK = re.compile(r"\s*Rank (?P<rank>\d{1,7})\s*(?:--|:|has|is)")
_FEW = re.compile(r"(?P<count>\d+) ranks? (?:has|have) (?:launched up to operation|status) (?P<at>\w+)", re.IGNORECASE)


def parse(document: Document, catalog: Catalog) -> list[Event] | None:
    """Events of a report; None when the document is none."""
    if not mentions(document, WORDS):
        return None
    events: list[Event] = []
    kind: str | None = None
    for line in lines_of(document):
        for pattern, signature in (
            (_DEAD, "ncclras.dead"),
            (_MISSING, "ncclras.missing"),
            (_APART, "ncclras.mismatch"),
        ):
            match = pattern.search(line.text)
            if match is not None:
                kind = signature
                events.append(make(catalog, signature, document, line, attrs=dict(match.groupdict())))
        if kind is None:
            continue
        process, rank, few = _PROCESS.search(line.text), _RANK.match(line.text), _FEW.search(line.text)
        if process is not None or rank is not None:
            attrs = {"about_rank": int(rank["rank"])} if rank is not None else {}
            attrs |= {"pid": int(process["pid"])} if process is not None else {}
            node = process["node"] if process is not None else None
            events.append(make(catalog, kind, document, line, node=node, attrs=attrs))
        elif few is not None:
            events.append(make(catalog, kind, document, line, attrs={"ranks": int(few["count"][:9]), "at": few["at"]}))
    return events[:EVENTS_LIMIT] or None
