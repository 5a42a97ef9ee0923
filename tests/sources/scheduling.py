"""Short ways to give a text to the parser of scheduler records and to look at what comes out."""

from __future__ import annotations

import functools
from typing import Any

from keepstep.catalog.load import Catalog, shipped
from keepstep.records.event import Event
from keepstep.sources.documents import Document, split
from keepstep.sources.scheduler.parse import parse


@functools.cache
def catalog() -> Catalog:
    return shipped()


def documents(text: str, title: str = "") -> list[Document]:
    """The documents of a text, which get this title where they have none."""
    return [d._replace(title=d.title or title) for d in split("input.log", text)]


def events(text: str, title: str = "") -> list[Event]:
    """What the parser makes of a text."""
    return [e for d in documents(text, title) for e in parse(d, catalog()) or []]


def signatures(text: str, title: str = "") -> list[str]:
    return [e.signature for e in events(text, title)]


def one(text: str, signature: str, title: str = "") -> Event:
    """The only event of a signature."""
    found = [e for e in events(text, title) if e.signature == signature]
    assert len(found) == 1, [e.signature for e in events(text, title)]
    return found[0]


def attrs(text: str, signature: str, title: str = "") -> dict[str, Any]:
    return one(text, signature, title).attrs
