"""Tables as command-line tools print them, whatever way their columns are kept apart."""

from __future__ import annotations

import re
import shlex
from collections.abc import Generator, Iterator, Sequence
from typing import NamedTuple

from keepstep.sources.documents import Document, Line

MAX_CELLS = 256
"""Columns of one table; more is no table."""

_DASHES = re.compile(r"\s*-{2,}(?: +-{2,})*\s*")
_WIDE = re.compile(r"\s{2,}|\t+")

_HEADERS = """
    jobid jobidraw jobname name state st exitcode derivedexitcode reason nodelist nodelist(reason) hostnames partition user
    timestamp time elapsed elapsedraw timelimit start start_time end nodes avail nnodes alloctres reqmem maxrss comment account
    job_id ready status restarts age ip node namespace type object message last_seen roles version nominated_node submit
    readiness_gates features gres cpus memory qos priority weight tmp_disk alloccpus allocnodes ntasks flags eligible
    admincomment systemcomment cluster workdir
"""
_KNOWN = frozenset(_HEADERS.split())
"""Words of headers. A line of which most words are among them is one."""

_SQUEUE = {"i": "jobid", "A": "jobid", "F": "jobid", "T": "state", "t": "st", "M": "time", "r": "reason", "j": "name"}
_SQUEUE |= {"R": "nodelist(reason)", "N": "nodelist", "u": "user", "P": "partition", "D": "nodes", "l": "timelimit"}
_SINFO = {"N": "nodelist", "n": "hostnames", "T": "state", "t": "state", "E": "reason", "u": "user", "U": "user"}
_SINFO |= {
    "H": "timestamp",
    "P": "partition",
    "D": "nodes",
    "G": "gres",
    "a": "avail",
    "l": "timelimit",
    "R": "partition",
}


class Row(NamedTuple):
    """One line of a table: cells by lower-case header, `_` in place of spaces."""

    cells: dict[str, str]
    line: Line


def header_word(text: str) -> str:
    """A header as key."""
    return "_".join(text.strip().lower().split())


def is_header(words: Sequence[str]) -> bool:
    """Whether these are the headers of a table of a scheduler: at least two, all but a few of them known."""
    keys = [header_word(w) for w in words]
    known = sum(k in _KNOWN for k in keys)
    return 2 <= len(keys) <= MAX_CELLS and known >= 2 and 3 * known >= 2 * len(keys)


def rows(document: Document) -> Iterator[Row]:
    """Rows of all tables in a document, in the order of its lines."""
    lines = document.lines
    columns = columns_of_command(document.title) or headless_columns(document)
    if columns is not None:
        yield from _headless(lines, columns)
        return
    index = 0
    while index < len(lines):
        text = lines[index].raw
        if "|" in text and is_header(text.rstrip("|\r\n ").split("|")):
            index = yield from _piped(lines, index)
        elif is_header(_header(text)):
            index = yield from _aligned(lines, index)
        else:
            index += 1


def _header(text: str) -> list[str]:
    """Words of a header. Two spaces part headers that have one inside ("LAST SEEN"); tables of Slurm have one only."""
    if not text[:1].isspace() and not text[:1].isupper():
        return []
    words, wide = text.split(), [w for w in _WIDE.split(text.strip()) if w]
    known = sum(header_word(w) in _KNOWN for w in words)
    return words if known == len(words) or not is_header(wide) else wide


def _piped(lines: Sequence[Line], index: int) -> Generator[Row, None, int]:
    """A table with `|`; returns (as generator) the index after it."""
    header = [header_word(h) for h in lines[index].raw.rstrip("|\r\n ").split("|")]
    index += 1
    while index < len(lines):
        text = lines[index].raw.rstrip("\r\n")
        cells = text.split("|", len(header))
        if len(cells) < min(2, len(header)):
            break
        yield Row({h: c.strip() for h, c in zip(header, cells, strict=False)}, lines[index])
        index += 1
    return index


def _aligned(lines: Sequence[Line], index: int) -> Generator[Row, None, int]:
    """A table in columns, with or without a line of dashes below its header; it ends at an empty line or another header."""
    text = lines[index].raw.rstrip()
    header = _header(text)
    spans = _spans(text, header)
    index += 1
    if index < len(lines) and _DASHES.fullmatch(lines[index].raw):
        spans = [m.span() for m in re.finditer(r"-+", lines[index].raw)]
        index += 1
    while index < len(lines):
        text = lines[index].raw.rstrip()
        if not text or is_header(_header(text)):
            break
        cells = cut(text, header, spans)
        if cells is None:
            break
        yield Row(cells, lines[index])
        index += 1
    return index


def _spans(text: str, header: Sequence[str]) -> list[tuple[int, int]]:
    """Where the columns stand: each begins with its header and ends before the next."""
    starts, at = [], 0
    for word in header:
        at = text.index(word, at)
        starts.append(at)
        at += len(word)
    return list(zip(starts, [*starts[1:], 10**6], strict=True))


def cut(text: str, header: Sequence[str], spans: Sequence[tuple[int, int]]) -> dict[str, str] | None:
    """Cells of a line below a header; None when it cannot be one. Pasted tables are often out of line: words decide then."""
    keys = [header_word(h) for h in header]
    wide = [w for w in _WIDE.split(text.strip()) if w]
    if len(wide) == len(keys):
        return dict(zip(keys, wide, strict=True))
    if len(spans) == len(keys) and _fits(text, spans):
        return dict(zip(keys, (text[a:b].strip() for a, b in spans), strict=True))
    words = text.split()
    if len(words) < len(keys):
        return dict(zip(keys, wide, strict=False)) if len(wide) >= 2 else None
    if keys[0] in ("reason", "message"):
        head = len(words) - len(keys) + 1
        return dict(zip(keys, [" ".join(words[:head]), *words[head:]], strict=True))
    return dict(zip(keys, [*words[: len(keys) - 1], " ".join(words[len(keys) - 1 :])], strict=True))


def _fits(text: str, spans: Sequence[tuple[int, int]]) -> bool:
    """Whether no word of the line crosses the border of a column."""
    return len(text) > spans[0][0] and all(
        a == 0 or a >= len(text) or text[a - 1].isspace() or text[a].isspace() for a, _ in spans
    )


def columns_of_command(title: str) -> list[str] | None:
    """Headers that a command without header line prints, from its own format option; None when it has a header line."""
    return _columns(title, asked=True)


def headless_columns(document: Document) -> list[str] | None:
    """The same for rows that were pasted without the header that the command printed above them."""
    columns = _columns(document.title, asked=False)
    first = next((line.raw for line in document.lines if line.raw.strip()), "")
    words = first.replace("|", " ").split()
    if columns is None or len(columns) < 3 or len(words) < len(columns) or is_header(_header(first)):
        return None
    return columns if words[0][:1].isdigit() and not _KNOWN.issuperset(w.lower() for w in words) else None


def _columns(title: str, asked: bool) -> list[str] | None:
    if not re.match(r"(?:\S*/)?(?:squeue|sinfo|sacct)\b", title):
        return None
    try:
        words = shlex.split(title)
    except ValueError:
        return None
    short = {flag for w in words if re.fullmatch(r"-[A-Za-z]+", w) for flag in w[1:]}
    if asked and not ("--noheader" in words or ("n" if "sacct" in words[0] else "h") in short):
        return None
    given = _option(words, "sinfo" in words[0] and "R" in short)
    if given is None:
        return None
    if "sacct" in words[0]:
        return [header_word(w.split("%")[0]) for w in given.split(",") if w]
    letters = _SINFO if "sinfo" in words[0] else _SQUEUE
    if "%" in given:
        return [letters.get(letter, f"%{letter}") for letter in re.findall(r"%[.0-9]*([A-Za-z])", given)]
    return [header_word(w.split(":")[0]) for w in re.split(r"[,|\s]+", given) if w]


def _option(words: Sequence[str], reasons: bool) -> str | None:
    """Value of the format option. `sinfo -R` has a format of its own."""
    for index, word in enumerate(words):
        for long in ("--format=", "--Format=", "-o", "-O"):
            if word.startswith(long) and len(word) > len(long):
                return word[len(long) :]
        if word in ("--format", "--Format", "-o", "-O") and index + 1 < len(words):
            return words[index + 1]
    return "%E %u %H %N" if reasons else None


def _headless(lines: Sequence[Line], columns: list[str]) -> Iterator[Row]:
    for line in lines:
        text = line.raw.strip()
        if not text:
            continue
        if "|" in text and len(columns) > 1:
            cells: dict[str, str] | None = dict(zip(columns, (c.strip() for c in text.split("|")), strict=False))
        else:
            cells = cut(text, columns, [])
        if cells is not None:
            yield Row(cells, line)
