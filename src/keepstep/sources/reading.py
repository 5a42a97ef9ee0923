"""Paths -> events: finds what is there, reads it as what it is, and says what it could not read."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import NamedTuple

from keepstep.catalog.load import Catalog
from keepstep.catalog.matcher import Matcher
from keepstep.records.event import Event
from keepstep.sources.decoding import open_stream, to_text, what_binary
from keepstep.sources.documents import split
from keepstep.sources.parsers import PARSERS
from keepstep.sources.textlines import line_events


class Used(NamedTuple):
    """A document that was read, as what, and how many events it gave."""

    path: str
    title: str
    read_as: str
    events: int


class Reading(NamedTuple):
    """Events in the order they were found; what they came from; what could not be read and why."""

    events: list[Event]
    used: list[Used]
    unreadable: list[str]


def read_text(
    path: str, text: str, catalog: Catalog, matcher: Matcher, *, name: str = "", latest_ns: int | None = None
) -> Reading:
    """Everything that one text tells. `name`, `latest_ns`: see `documents.split`."""
    events: list[Event] = []
    used: list[Used] = []
    for document in split(path, text, name=name, latest_ns=latest_ns):
        found = list(line_events(document, matcher, catalog))
        read_as = []
        # Every parser is asked: a paste without marks between its parts holds the output of several tools.
        for parser, parse in PARSERS:
            parsed = parse(document, catalog)
            if parsed is not None:
                found = parsed + found
                read_as.append(parser)
        events += found
        used.append(Used(path, document.title, ", ".join(read_as) or "log lines", len(found)))
    return Reading(events, used, [])


def read_paths(paths: Sequence[str], catalog: Catalog) -> Reading:
    """Everything that files and folders tell. A file that cannot be read is named in `unreadable`; the others are read."""
    matcher = Matcher(catalog)
    whole = Reading([], [], [])
    for name in paths:
        top = Path(name)
        for path in sorted(p for p in top.rglob("*") if p.is_file()) if top.is_dir() else [top]:
            try:
                with path.open("rb") as file:
                    opened = open_stream(file)
                    data = b"".join(opened.blocks)
                    latest_ns = path.stat().st_mtime_ns
            except OSError as error:
                whole.unreadable.append(f"{path}: {error.strerror}")
                continue
            whole.unreadable.extend(f"{path}: {n}" for n in opened.notes)
            binary = what_binary(data[:4096])
            if binary is not None:
                whole.unreadable.append(f"{path}: {binary}")
                continue
            below = str(path.relative_to(top)) if top.is_dir() else path.name
            one = read_text(str(path), to_text(data), catalog, matcher, name=below, latest_ns=latest_ns)
            whole.events.extend(one.events)
            whole.used.extend(one.used)
    return whole
