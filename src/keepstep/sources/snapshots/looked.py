"""What a person let a shell count to refute or confirm a monitor: links that are inactive, lines that a watcher wrote.

The command is the title of its document, or stands in a line of a note behind a time and the name of a machine.
"""

from __future__ import annotations

import re
from collections.abc import Iterator

from keepstep.catalog.load import Catalog
from keepstep.records.event import Event
from keepstep.sources.documents import Document, Line
from keepstep.sources.snapshots.making import lines_of, make

LOOK_TRIGGERS = ("$ nvidia-smi nvlink",)
COMMAND_LIMIT = 400

_INACTIVE = re.compile(
    r"\bnvidia-smi\s+nvlink\s+(?:-s|--status)\b[^|\n]{0,40}\|\s*grep\s+(?:-\w+\s+)*-\w*c\w*\s+(?:-\w+\s+)*[\"']?(?i:in-?active)"
)
_WATCHER = re.compile(
    r"\bgrep\s+(?:-\w+\s+)*-\w*c\w*\s(?:'[^'\n]{0,100}'|\"[^\"\n]{0,100}\"|[^|\n'\"]){0,200}?(?P<log>[\w./-]*(?i:monitor|watchdog|watcher|hang|heartbeat)[\w.-]*\.(?:log|txt|out|err))\s*\Z"
)
_PROMPT = re.compile(r"(?:^|\s)(?:(?P<node>[a-zA-Z][\w.-]{0,80}) )?\$ (?P<command>nvidia-smi nvlink [^\n]{1,300})\Z")
_NUMBER = re.compile(r"\s*(?P<n>\d{1,6})\s*\Z")


def parse(document: Document, catalog: Catalog) -> list[Event] | None:
    """The number below a command that counts inactive links or what a watcher wrote; None for all else."""
    title = document.title
    if len(title) > COMMAND_LIMIT:
        return None
    watcher = _WATCHER.search(title)
    if watcher is None and _INACTIVE.search(title) is None:
        return None
    for line in lines_of(document):
        if not line.text.strip():
            continue
        match = _NUMBER.match(line.text)
        if match is None:
            return None
        return [_counted(document, line, catalog, int(match["n"]), watcher["log"] if watcher else "", document.node)]
    return None


def read_looks(document: Document, catalog: Catalog) -> Iterator[Event]:
    """The same where the command stands in a line of a note."""
    before: re.Match[str] | None = None
    for line in lines_of(document):
        number = _NUMBER.match(line.text) if before is not None else None
        if before is not None and number is not None and _INACTIVE.search(before["command"]):
            yield _counted(document, line, catalog, int(number["n"]), "", before["node"])
        before = _PROMPT.search(line.raw[:COMMAND_LIMIT].rstrip())


def _counted(document: Document, line: Line, catalog: Catalog, count: int, log: str, node: str | None) -> Event:
    if log:
        return make(catalog, "watcher.lines_counted", document, line, attrs={"count": count, "log": log})
    return make(catalog, "nvlink.inactive_counted", document, line, attrs={"count": count, "node": node})
