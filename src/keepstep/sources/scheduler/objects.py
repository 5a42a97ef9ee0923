"""Objects of YAML and JSON inside a text: whole dumps, several with `---` between, or excerpts of one.

YAML is read with every scalar as text, so that no constructor runs; size, depth and aliases are bounded before anything is built.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence
from typing import Any, NamedTuple

import msgspec

from keepstep.sources.documents import Document, Line

MAX_YAML = 8 << 20
"""Characters of one YAML text: 8 MiB are some thousand pods."""
MAX_EVENTS = 1_000_000
MAX_DEPTH = 64
MAX_ALIASES = 0
"""Kubernetes never prints aliases; a text with some is not from there, and could grow without bound."""
MAX_BLOCKS = 2000
"""Runs of lines of one document that are tried as YAML; a log with more of them is none."""
RETRIES = 4
"""Times a text is tried again without the lines at which YAML broke off."""

_OPEN = re.compile(
    r"^(?:- )?(?:apiVersion|kind|metadata|spec|status|items|conditions|containerStatuses|phase|restarts):(?:\s|$)"
)
_JSON_TOKEN = re.compile(r'"(?:[^"\\]|\\.)*"|["{}\[\]]')
_KEY = re.compile(r"""^(?:- |[\w./-]+:(?:\s|$)|["'][\w./-]+["']:(?:\s|$)|#|\s|$)""")


class Found(NamedTuple):
    """An object and the line it begins at. `lines`: of the text it was read from, to point at single facts."""

    value: dict[str, Any]
    line: Line
    lines: tuple[Line, ...]


def objects(document: Document) -> Iterator[Found]:
    """All objects of a document, lists taken apart into their items."""
    for value, line, lines in (*_json_values(document), *_yaml_values(document)):
        yield from _spread(value, line, lines, 0)


def _spread(value: object, line: Line, lines: tuple[Line, ...], depth: int) -> Iterator[Found]:
    if isinstance(value, list) and depth < 3:
        for item in value:
            yield from _spread(item, line, lines, depth + 1)
    elif isinstance(value, dict):
        items = value.get("items")
        if isinstance(items, list) and "status" not in value and depth < 3:
            for item in items:
                yield from _spread(item, line, lines, depth + 1)
        else:
            yield Found(value, line, lines)


# ---- JSON


def _json_values(document: Document) -> Iterator[tuple[object, Line, tuple[Line, ...]]]:
    """The document as one JSON text, or else each run of lines from one that begins with a brace to where it is closed."""
    lines = document.lines
    index = 0
    while index < len(lines):
        if not lines[index].raw.lstrip().startswith(("{", "[{")):
            index += 1
            continue
        end, closed = _json_end(lines, index)
        value = _decoded("\n".join(at.raw for at in lines[index:end])) if closed else None
        if value is not None:
            yield value, lines[index], lines[index:end]
        index = end


def _decoded(text: str) -> object:
    try:
        return msgspec.json.decode(text)
    except (msgspec.DecodeError, UnicodeEncodeError, RecursionError):
        return None


def _json_end(lines: Sequence[Line], begin: int) -> tuple[int, bool]:
    """Index after the line at which all brackets of a JSON text are closed, or at which it cannot go on; and which of both."""
    depth = 0
    for index in range(begin, len(lines)):
        for token in _JSON_TOKEN.finditer(lines[index].raw):
            mark = token.group()
            if mark == '"':
                return index + 1, False  # a string of JSON ends on its line
            depth += (mark in "{[") - (mark in "}]") if len(mark) == 1 else 0
        if depth <= 0:
            return index + 1, True
    return len(lines), False


# ---- YAML


def _yaml_values(document: Document) -> Iterator[tuple[object, Line, tuple[Line, ...]]]:
    lines = document.lines
    index = blocks = 0
    while index < len(lines) and blocks < MAX_BLOCKS:
        if not _OPEN.match(lines[index].raw):
            index += 1
            continue
        end = index + 1
        while end < len(lines) and _KEY.match(lines[end].raw) and not lines[end].raw.startswith("---"):
            end += 1
        yield from _yaml_block(lines[index:end])
        index, blocks = end, blocks + 1


def _yaml_block(lines: Sequence[Line]) -> Iterator[tuple[object, Line, tuple[Line, ...]]]:
    """The longest head of these lines that is YAML."""
    for _ in range(RETRIES):
        if not lines:
            return
        value, good = load_yaml("\n".join(line.raw for line in lines))
        if good < 0:
            if value is not None:
                yield value, lines[0], tuple(lines)
            return
        if good >= len(lines):
            good = len(lines) - 1
        lines = lines[:good]


def load_yaml(text: str) -> tuple[object, int]:
    """The value of a YAML text with every scalar as a string, and -1; or None and the line at which it breaks off (from 0).

    None and -1: more than is read of one text, or aliases.
    """
    import yaml

    if len(text) > MAX_YAML:
        return None, -1
    loader = getattr(yaml, "CBaseLoader", yaml.BaseLoader)
    depth = count = aliases = 0
    try:
        for event in yaml.parse(text, Loader=loader):
            count += 1
            depth += isinstance(event, yaml.CollectionStartEvent) - isinstance(event, yaml.CollectionEndEvent)
            aliases += isinstance(event, yaml.AliasEvent)
            if count > MAX_EVENTS or depth > MAX_DEPTH or aliases > MAX_ALIASES:
                return None, -1
        return yaml.load(text, Loader=loader), -1
    except yaml.MarkedYAMLError as error:
        mark = error.problem_mark or error.context_mark
        return None, max(0, mark.line) if mark is not None else 0
    except (yaml.YAMLError, UnicodeEncodeError, ValueError, RecursionError):
        return None, 0


# ---- reading what was found


def text_at(value: object, *path: str | int) -> str:
    """The scalar at a path as text, "" for none. YAML gives text, JSON numbers and booleans too."""
    found = get(value, *path)
    if isinstance(found, bool):
        return "True" if found else "False"
    return str(found) if isinstance(found, (str, int, float)) else ""


def number_at(value: object, *path: str | int) -> int | None:
    """The whole number at a path."""
    text = text_at(value, *path)
    return int(text) if re.fullmatch(r"-?\d{1,18}", text) else None


def list_at(value: object, *path: str | int) -> list[dict[str, Any]]:
    """The objects of the list at a path."""
    found = get(value, *path)
    return [v for v in found if isinstance(v, dict)] if isinstance(found, list) else []


def get(value: object, *path: str | int) -> object:
    """What is at a path of keys and indices; None where there is nothing."""
    for key in path:
        if isinstance(value, dict) and isinstance(key, str):
            value = value.get(key)
        elif isinstance(value, list) and isinstance(key, int) and -len(value) <= key < len(value):
            value = value[key]
        else:
            return None
    return value


def line_of(found: Found, *words: str) -> Line:
    """The first line of an object's text that has all these words; its first line when none has."""
    wanted = [w for w in words if w]
    if wanted:
        for line in found.lines:
            if all(w in line.raw for w in wanted):
                return line
    return found.line
