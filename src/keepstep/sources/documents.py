"""What was given, taken apart into documents: a file, a section `==> name <==` of one, the output of a `$ command` in a transcript.

A document is small enough to be looked at as a whole by a parser; large logs are streamed instead.
"""

from __future__ import annotations

import re
from typing import NamedTuple

_SECTION = re.compile(r"^==> (?P<name>.+?) <==$")
_COMMAND = re.compile(r"^(?:\[[^\]]*\]|[\w.@:~/-]*)?[$#] (?P<name>[a-z][\w./-]*( .*)?)$")


class Line(NamedTuple):
    """A line with its prefixes taken off. `number` counts from 1 in the file as it was given; `raw` is the line there."""

    number: int
    text: str
    raw: str
    rank: int | None = None
    node: str | None = None
    time_ns: int | None = None


class Document(NamedTuple):
    """`path`: the file as it was given. `title`: name of the section, or the command; "" for a whole file."""

    path: str
    title: str
    lines: tuple[Line, ...]

    @property
    def text(self) -> str:
        return "\n".join(line.text for line in self.lines)


def split(path: str, text: str) -> list[Document]:
    """The documents of a file. Lines before the first section or command are a document of their own."""
    found: list[Document] = []
    title, lines = "", list[Line]()
    for number, raw in enumerate(text.splitlines(), 1):
        match = _SECTION.match(raw) or (_COMMAND.match(raw) if raw.startswith("$ ") else None)
        if match is None:
            lines.append(Line(number, raw, raw))
            continue
        if lines:
            found.append(Document(path, title, tuple(lines)))
        title, lines = match["name"], []
    if lines or not found:
        found.append(Document(path, title, tuple(lines)))
    return found
