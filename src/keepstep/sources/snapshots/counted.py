"""Numbers that people let a shell count: `nvidia-smi -L | wc -l`, `lspci -d 10de: | grep -c ...`, `squeue -w NODE -h | wc -l`."""

from __future__ import annotations

import re

from keepstep.catalog.load import Catalog
from keepstep.records.event import Event
from keepstep.sources.documents import Document
from keepstep.sources.snapshots.making import lines_of, make

_COUNTS = re.compile(r"\|\s*(?:wc\s+-l|grep\s+(?:-\w+\s+)*-\w*c)\b")
_WHAT: tuple[tuple[str, re.Pattern[str]], ...] = (
    ("gpus", re.compile(r"\bnvidia-smi\s+(?:-L|--list-gpus)\b")),
    # Only one kind of device, or the class of GPUs: bridges and audio functions have the same vendor.
    ("devices", re.compile(r"\blspci\b[^|]{0,60}-d\s*[0-9a-fA-F]{4}:[0-9a-fA-F]{4}\b(?=\s*\|\s*wc)")),
    (
        "jobs",
        re.compile(r"\bsqueue\b(?=[^|]*\s(?:-\w*w|--nodelist))(?=[^|]*\s(?:-\w*h\w*\b|--noheader))(?=[^|]*\|\s*wc)"),
    ),
)
_NUMBER = re.compile(r"\s*(?P<n>\d{1,6})\s*\Z")


def parse(document: Document, catalog: Catalog) -> list[Event] | None:
    """The number below a command that counts GPUs or jobs; None for all else."""
    title = document.title
    if len(title) > 400 or _COUNTS.search(title) is None:
        return None
    what = next((name for name, command in _WHAT if command.search(title)), None)
    if what is None:
        return None
    for line in lines_of(document):
        if not line.text.strip():
            continue
        match = _NUMBER.match(line.text)
        if match is None:
            return None
        return [make(catalog, "command.count", document, line, attrs={"count": int(match["n"]), "what": what})]
    return None
