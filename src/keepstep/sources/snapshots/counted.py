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
    # All that the vendor has in the machine: it counts only where the sum comes out.
    ("nvidia devices", re.compile(r"(?i)\blspci\b[^\n]{0,120}(?:nvidia|10de:|3d controller)")),
    (
        "jobs",
        re.compile(r"\bsqueue\b(?=[^|]*\s(?:-\w*w|--nodelist))(?=[^|]*\s(?:-\w*h\w*\b|--noheader))(?=[^|]*\|\s*wc)"),
    ),
)
_STATE = re.compile(r"\bsinfo\b(?=[^|]*\s(?:-n|--nodes?)[ =]?(?P<node>[\w.-]+))(?=[^|]*%\d*[tT]\b)")
_ONE_WORD = re.compile(r"\s*(?P<state>[a-z]{2,20})[*~#!%$@^+-]?\s*\Z")
_NUMBER = re.compile(r"\s*(?P<n>\d{1,6})\s*\Z")


def parse(document: Document, catalog: Catalog) -> list[Event] | None:
    """The number below a command that counts GPUs or jobs, the state of one machine; None for all else."""
    title = document.title
    if len(title) <= 400 and (asked := _STATE.search(title)) is not None:
        return _state(document, asked["node"], catalog)
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


def _state(document: Document, node: str, catalog: Catalog) -> list[Event] | None:
    """The only word below a question for one machine's state."""
    lines = [line for line in lines_of(document) if line.text.strip()]
    match = _ONE_WORD.match(lines[0].text) if len(lines) == 1 else None
    if match is None:
        return None
    attrs = {"node": node, "state": match["state"]}
    return [make(catalog, "command.node_state", document, lines[0], attrs=attrs)]
