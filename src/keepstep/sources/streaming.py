"""Large logs: only lines that match something become lines, in memory that does not grow with the log.

Chunks go through the matcher as bytes. A line that matches is then read as in a document (prefixes, time); one without a time
takes that of a line before it, which is looked for a bounded way back. Pieces around what matters are cut out for the parsers of
whole documents (windows.py).
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from typing import NamedTuple

from keepstep.catalog.matcher import Match, Matcher
from keepstep.sources.clocks import Clock, near_time
from keepstep.sources.decoding import to_text
from keepstep.sources.documents import Line, Origin, make_line, section_title, starts_launchers, strip_line
from keepstep.sources.names import Hints
from keepstep.sources.prefixes import Habits, habits_of
from keepstep.sources.terminal import clean
from keepstep.sources.windows import Cutter

LOOK_BACK_LINES = 200
LOOK_BACK_BYTES = 64 << 10
LINE_BYTES = 16 << 10
"""Bytes of a line that are looked at."""
SAMPLE_BYTES = 256 << 10
"""From which the habits of a log and the first time in it are taken."""
SAMPLE_LINES = 400
_TRACES = (b"Traceback (most recent call last)", b"Root Cause (first observed failure)")
"""First words of blocks of lines that are read as a whole."""
MAX_TRACES = 256
"""Of one chunk, that are looked for."""
_MARKERS = re.compile(rb"^==> .{1,500}? <==\r?$", re.MULTILINE)
_SEVERE = ("error", "fatal")


class Hit(NamedTuple):
    """A line that matches, as it would be in a document. `title`: of its section."""

    line: Line
    title: str
    matches: list[Match]


class Scanner:
    """Reads one log chunk by chunk; `lines` and `size_bytes` count what went by. `sample`: the begin of the log."""

    def __init__(self, matcher: Matcher, origin: Origin, sample: bytes, cutter: Cutter | None = None) -> None:
        self.lines = 0
        self.size_bytes = 0
        self._matcher = matcher
        self._cutter = cutter
        self._outer = origin.outer or Hints()
        self._title, self._hints = "", self._outer
        self._habits, self._clock = _start(sample[:SAMPLE_BYTES], origin)
        self._before = b""

    @property
    def near_ns(self) -> int | None:
        """A time that is near to the lines that were read last."""
        return self._clock.near_ns

    def scan(self, chunk: bytes) -> Iterator[Hit]:
        """The hits of the next chunk, which ends where a line ends."""
        if b"\0" in chunk:
            chunk = chunk.replace(b"\0", b"")
        at = 0
        if b"==> " in chunk:
            for marker in _MARKERS.finditer(chunk):
                yield from self._section(chunk, at, marker.start())
                self._begin(to_text(marker[0]).rstrip("\r"))
                self.lines += 1
                at = marker.end() + 1
        yield from self._section(chunk, at, len(chunk))
        if self._cutter is not None:
            self._cutter.pass_on(chunk, self.size_bytes)
        self.size_bytes += len(chunk)
        self._before = chunk[-LOOK_BACK_BYTES:]

    def _begin(self, marker: str) -> None:
        """Another section: of its own name and time."""
        title = section_title(marker)
        if title is not None:
            self._title, self._hints = title[0], title[1].over(self._outer)
            self._clock.forget()
            self._before = b""
            if self._hints.stamp is not None:
                self._clock.start(self._hints.stamp)

    def _section(self, chunk: bytes, low: int, high: int) -> Iterator[Hit]:
        """The hits between two markers, or ends of the chunk."""
        if low >= high:
            return
        body = chunk[low:high] if low or high < len(chunk) else chunk
        first = self.lines + 1
        self.lines += body.count(b"\n") + (not body.endswith(b"\n"))
        number, counted, looked = first, 0, 0
        severe: list[tuple[int, int]] = []
        for hit in self._matcher.scan(body):
            number += body.count(b"\n", counted, hit.start)
            counted = hit.start
            line = self._line(body, hit.start, hit.end, number, looked)
            looked = hit.end
            matches = self._matcher.match_line(line.text)
            if any(m.signature.severity in _SEVERE for m in matches):
                severe.append((hit.start, number))
            if matches:
                yield Hit(line, self._title, matches)
            if len(severe) >= 1000:
                self._cut(chunk, low, body, first, severe)
        self._cut(chunk, low, body, first, severe)

    def _line(self, body: bytes, start: int, end: int, number: int, looked: int) -> Line:
        raw = to_text(body[start : min(end, start + LINE_BYTES)])
        prefixed = strip_line(clean(raw)[-1], self._habits)
        if prefixed.said.stamp is None and prefixed.said.boot_ns is None:
            self._look_back(body, start, looked)
        return make_line(number, raw, prefixed, self._clock.resolve(prefixed.said), self._hints)

    def _look_back(self, body: bytes, start: int, looked: int) -> None:
        """Let the clock see the nearest line before `start` that tells a time; lines before `looked` it has seen."""
        before = body[max(looked, start - LOOK_BACK_BYTES) : start]
        if not looked and len(before) < LOOK_BACK_BYTES:
            before = self._before[len(before) - LOOK_BACK_BYTES :] + before
        for raw in reversed(before.split(b"\n")[-LOOK_BACK_LINES:]):
            said = strip_line(clean(to_text(raw[:LINE_BYTES]))[-1], self._habits).said if raw else None
            if said is not None and (said.stamp is not None or said.boot_ns is not None):
                self._clock.resolve(said)
                return

    def _cut(self, chunk: bytes, low: int, body: bytes, first: int, severe: list[tuple[int, int]]) -> None:
        """Cut pieces around severe hits and tracebacks; `severe` (position in the body, line number) is emptied."""
        cutter = self._cutter
        if cutter is None or cutter.left <= 0:
            severe.clear()
            return
        wanted = list(severe)
        severe.clear()
        number, counted = first, 0
        for trace in sorted(_positions(body)):
            number += body.count(b"\n", counted, trace)
            counted = trace
            wanted.append((body.rfind(b"\n", 0, trace) + 1, number))
        for at, numbered in sorted(wanted):
            cutter.want(chunk, self.size_bytes, low + at, numbered, self._clock.near_ns)


def _positions(body: bytes) -> list[int]:
    found: list[int] = []
    for words in _TRACES:
        at = body.find(words)
        while at >= 0 and len(found) < MAX_TRACES:
            found.append(at)
            at = body.find(words, at + 1)
    return found


def _start(sample: bytes, origin: Origin) -> tuple[Habits, Clock]:
    """Habits and clock of a log, from its begin."""
    text = to_text(sample.replace(b"\0", b""))
    lines = [clean(raw)[-1] for raw in text.split("\n")[:SAMPLE_LINES]]
    habits = habits_of(lines)._replace(tasks_are_nodes=starts_launchers(text))
    near = near_time((strip_line(t, habits).said for t in lines), origin.near_ns, origin.latest_ns)
    return habits, Clock(near, origin.latest_ns, origin.boot_at_ns)
