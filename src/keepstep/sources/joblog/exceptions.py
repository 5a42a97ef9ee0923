"""Python tracebacks in a log: which exception, raised where in whose code, on which rank.

Formats: CPython's traceback.c (chains with "During handling" and "direct cause", ExceptionGroup with `|` and `+`), rich's framed
traceback, and the same behind a prefix of each line, with lines of several ranks interleaved.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from itertools import islice
from typing import NamedTuple

from keepstep.catalog.exceptions import communicates, exception_signature, raised_by, whose
from keepstep.catalog.load import Catalog
from keepstep.records.event import Event
from keepstep.sources.documents import Document, Line
from keepstep.sources.joblog.making import event_at
from keepstep.sources.joblog.tools import looks_on, raised_by_tool

MAX_EVENTS = 2000
"""Tracebacks of one document; what thousands of ranks say alike adds nothing."""
MAX_FRAMES = 400
HEADLESS_LINES = 6
"""Lines before an exception in which its frames are looked for, where no traceback began."""
MAX_BLOCK_LINES = 4000
"""Lines of one traceback. A longer one is given up: it is no traceback."""

NO_EXCEPTIONS = frozenset({"XidCriticalError"})
"""What ends like a name of an exception and is a message of a program that is not Python: NVIDIA's device plugin."""

TRIGGERS = ("Traceback (most recent call last)", "Error: ", "Exception: ", "Interrupt", "Error\n", "exit code")
"""One of these is in every text that this reader finds anything in."""

_START = re.compile(r"(?P<head>.*?)(?:Exception Group )?Traceback \(most recent call last\):?\s*(?P<rich>─*╮)?$")
_FRAME = re.compile(r'(?P<indent>\s*)File "(?P<path>[^"\n]{1,1000})", line (?P<line>\d{1,9})(?:, in (?P<name>.*))?$')
_RICH_FRAME = re.compile(r"│ (?P<path>[^\s│][^│]*?):(?P<line>\d+) in\s+(?P<name>[\w<>.]+)")
_RICH_PLAIN = re.compile(r"│ (?P<path>/[^\s│][^│]*?\.py):(?P<line>\d+)")
_TYPE = r"(?:[A-Za-z_]\w*\.)*[A-Za-z_]\w*"
_LAST = re.compile(rf"(?P<type>{_TYPE})(?:: (?P<message>.*)|:)?$")
_GROUP = re.compile(r"^(?P<bars>(?:\s*[|+](?: |$|-+ ?\d* ?-*))+)")
_CAUSE = re.compile(r"The above exception was the direct cause of the following exception:")
_DURING = re.compile(r"During handling of the above exception, another exception occurred:")
_BARE = re.compile(
    r"^(?:[\w.-]{1,63}: |[Rr]ank[ =_]?\d{1,7}:? |.{0,120}?(?:\b(?:ERROR|CRITICAL|FATAL|WARN(?:ING)?|Exception|Error)\b[\]:]? |"
    r"-> ?|\| |, failed: |\[\w+\] ))?"
    r"(?P<type>(?:[a-z_][\w]*\.)*_?[A-Z]\w*(?:Error|Exception|Interrupt|NotFound|Timeout)): (?P<message>\S.*)$"
)


class Frame(NamedTuple):
    path: str
    line: int
    name: str

    def __str__(self) -> str:
        return f"{self.path.rpartition('/')[2]}:{self.line} {self.name}".strip()


class Raised(NamedTuple):
    """One exception of a chain. `begun`, `ended`: its first and last line."""

    type: str
    message: str
    frames: tuple[Frame, ...]
    begun: Line
    ended: Line


def read_exceptions(document: Document, catalog: Catalog) -> Iterator[Event]:
    """An event for each chain of tracebacks, and for each line that names an exception of the program without a traceback."""
    for chain in islice(_chains(document), MAX_EVENTS):
        yield _event(chain, document, catalog)


class _Reading:
    """The traceback that one writer is in the middle of."""

    def __init__(self, begun: Line, indent: int, rich: bool, head: str) -> None:
        self.begun = begun
        self.head = head
        self.indent = indent
        self.rich = rich
        self.closed = False
        self.frames: list[Frame] = []
        self.lines = 0

    def frame(self, text: str) -> bool:
        """Whether the line is a frame; then it is kept."""
        match = (_RICH_FRAME.search(text) or _RICH_PLAIN.search(text)) if self.rich else _FRAME.match(text)
        if match is None:
            return False
        if not self.rich and not self.frames:
            self.indent = max(0, len(match["indent"]) - 2)
        if len(self.frames) < MAX_FRAMES:
            name = (match.groupdict().get("name") or "")[:200]
            self.frames.append(Frame(match["path"].strip(), int(match["line"]), name))
        return True


class _Writer:
    """What one rank or process has written so far."""

    def __init__(self) -> None:
        self.now: _Reading | None = None
        self.chain: list[Raised] = []
        self.linked: str = ""
        self.quiet = 0


def _chains(document: Document) -> Iterator[tuple[list[Raised], bool]]:
    """Chains of exceptions, oldest first, and whether the later were raised from the earlier ("direct cause")."""
    writers: dict[tuple[int | None, str], _Writer] = {}
    # Whose traceback has a prefix before its first line alone, as a logger writes a record of several lines.
    bare: _Writer | None = None
    for line in document.lines:
        key = (line.rank, line.tag)
        writer = writers.get(key)
        if writer is None:
            if len(writers) > 100_000:
                continue
            writer = writers.setdefault(key, _Writer())
        if bare is not None and bare.now is not None and writer.now is None and line.raw == line.text:
            writer = bare
        yield from _take(writer, line)
        begins = writer.now is not None and writer.now.begun is line and line.raw != line.text
        bare = writer if writer.now is not None and (begins or writer is bare) else None
    for writer in writers.values():
        yield from _flush(writer)


def _take(writer: _Writer, line: Line) -> Iterator[tuple[list[Raised], bool]]:
    text = line.text
    start = _START.match(text) if "Traceback (most" in text else None
    if start is not None:
        if writer.now is not None or (writer.chain and not writer.linked):
            yield from _flush(writer)
        inner = _GROUP.match(text)
        indent = len(start["head"]) if not start["head"].strip() and inner is None else 0
        rich = bool(start["rich"]) or start["head"].rstrip().endswith("─")
        # A logger that puts its header before every line of a traceback.
        head = "" if rich or inner is not None or not start["head"].strip() else start["head"]
        writer.now = _Reading(line, indent, rich, head)
        return
    now = writer.now
    if now is None:
        yield from _between(writer, line)
        return
    now.lines += 1
    if now.lines > MAX_BLOCK_LINES:
        writer.now = None
        return
    yield from _inside(writer, now, line)


def _inside(writer: _Writer, now: _Reading, line: Line) -> Iterator[tuple[list[Raised], bool]]:
    text = _without_bars(line.text.removeprefix(now.head))
    if now.frame(text):
        return
    if now.rich:
        now.closed = now.closed or text.lstrip().startswith("╰")
        if not now.closed or text.lstrip().startswith("╰"):
            return
    stripped = text.strip()
    if not stripped or (not now.rich and len(text) - len(text.lstrip()) > now.indent):
        return
    last = _LAST.match(stripped)
    writer.now = None
    if last is None or not (now.frames or _looks_raised(last["type"])):
        yield from _flush(writer)
        return
    if writer.chain and not writer.linked:
        yield from _flush(writer)
    writer.chain.append(Raised(last["type"], (last["message"] or "").strip(), tuple(now.frames), now.begun, line))
    writer.quiet = 0


def _between(writer: _Writer, line: Line) -> Iterator[tuple[list[Raised], bool]]:
    """Outside a traceback: a word that links two, else the end of the chain, and perhaps a bare exception."""
    text = line.text
    if writer.chain:
        stripped = _without_bars(text).strip()
        if _CAUSE.search(stripped):
            writer.linked = "cause"
            return
        if _DURING.search(stripped):
            writer.linked = writer.linked or "during"
            return
        if not stripped:
            return
        writer.quiet += 1
        if writer.quiet > 40:
            yield from _flush(writer)
    if "Error: " in text or "Exception: " in text or "Interrupt: " in text:
        match = _BARE.match(_without_bars(text)[:4000])
        if match is not None and match["type"] not in NO_EXCEPTIONS:
            yield from _flush(writer)
            yield [Raised(match["type"], match["message"].strip(), (), line, line)], False


def _flush(writer: _Writer) -> Iterator[tuple[list[Raised], bool]]:
    chain, cause = writer.chain, writer.linked == "cause"
    writer.chain, writer.linked, writer.quiet, writer.now = [], "", 0, None
    if chain:
        yield chain, cause


def _without_bars(text: str) -> str:
    """A line of an ExceptionGroup without its margin."""
    if "|" not in text[:40] and "+" not in text[:40]:
        return text
    match = _GROUP.match(text)
    return text[match.end() :] if match is not None else text


def _looks_raised(name: str) -> bool:
    last = name.rpartition(".")[2]
    return last.endswith(("Error", "Exception", "Interrupt", "Exit", "Warning", "Timeout", "NotFound", "Iteration"))


TOOL = "python.tool_exception"
OF_PROGRAM = frozenset(
    {"python.exception", "python.library_exception", "python.user_exception", "python.user_runtime_error"}
    | {"python.import_failed", "python.file_missing"}
)
"""What an exception says of whoever raised it, and of nothing else: a tool's own says nothing of the job. What a tool tells of a
device or of the network it tells of that."""

_WORTH = {"python.exception": 0, "python.peer_lost": 0, "python.interrupted": 0}


def _event(found: tuple[list[Raised], bool], document: Document, catalog: Catalog) -> Event:
    """The event of a chain. Of "direct cause" the first counts; else the last, unless only an earlier one says whose fault."""
    chain, cause = found
    judged = [(raised, _signature(raised)) for raised in chain]
    principal, signature = judged[0] if cause else judged[-1]
    if _WORTH.get(signature, 1) == 0:
        principal, signature = next((j for j in judged if _WORTH.get(j[1], 1)), (principal, signature))
    frames = principal.frames
    if signature in OF_PROGRAM and TOOL in catalog and looks_on(document.title):
        paths = [f.path for f in frames] or _paths_before(principal.begun, document)
        signature = TOOL if raised_by_tool(document.title, paths) else signature
    own = next((f for f in reversed(frames) if whose(f.path) == "user"), None)
    inner = frames[-1] if frames else None
    deepest = next((f for f in reversed(frames) if not communicates(f.path)), inner)
    shown = own or deepest
    attrs: dict[str, object] = {
        "type": principal.type.rpartition(".")[2],
        "message": principal.message,
        "frame": str(shown) if shown is not None else "",
        "innermost": None if inner is None else f"{inner.path}:{inner.line} {inner.name}",
        "user_frame": None if own is None else f"{own.path}:{own.line} {own.name}",
        "raised_by": raised_by([f.path for f in frames]) if frames else None,
        "raised_as": chain[-1].type.rpartition(".")[2] if len(chain) > 1 else None,
        "rank": principal.begun.rank,
    }
    if signature == TOOL:
        attrs["until"] = chain[-1].ended.number
    text = f"{principal.type}: {principal.message}".removesuffix(": ")
    if shown is not None:
        text += f" (in {shown})"
    return event_at(signature, principal.begun, document, catalog, attrs, text=text)


def _paths_before(line: Line, document: Document) -> list[str]:
    """Files of frames right before an exception whose traceback was shown without its head."""
    near = [one.text for one in document.lines if line.number - HEADLESS_LINES <= one.number < line.number]
    return [match["path"] for match in map(_FRAME.match, near) if match is not None]


def _signature(raised: Raised) -> str:
    paths = [f.path for f in raised.frames]
    if paths:
        return exception_signature(raised.type, raised.message, raised_by(paths))
    named = exception_signature(raised.type, raised.message, "user")
    # Without frames only a type that nothing but a program raises says whose it was.
    return "python.exception" if named == "python.user_runtime_error" else named
