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
from keepstep.sources.facts import boots
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


MANY = 16
"""Sightings of one line after which its repeats are only counted, as long as they follow close on each other."""
COUNTED = 256
CLOSE_BYTES = 64 << 10
KNOWN_LINES = 4096
PREFIX_BYTES = 120
"""Of a line in which its time stands."""
_TIMES = re.compile(rb"\d\d:\d\d:\d\d(?:[.,]\d+)?|\[ *\d+\.\d+\]|\d{4}-\d\d-\d\dT?")
"""Times, which differ between two lines that say the same."""


class Hit(NamedTuple):
    """A line that matches, as it would be in a document. `title`: of its section. `repeats`: lines that said the same, up to it."""

    line: Line
    title: str
    matches: list[Match]
    repeats: int = 1


class _Known:
    """A line that was seen before, apart from its time: what it matches; how often it was seen, and not yet told."""

    __slots__ = ("end", "matches", "number", "seen", "start", "untold")

    def __init__(self, matches: list[Match]) -> None:
        self.matches = matches
        self.seen = 0
        self.untold = 0
        self.start = self.end = self.number = 0


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
        self._looked = 0
        self._known: dict[tuple[bytes, bytes], _Known] = {}

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
        number, counted, self._looked = first, 0, 0
        severe: list[tuple[int, int]] = []
        for start, end in self._matcher.candidates(body):
            raw = body[start : min(end, start + LINE_BYTES)]
            key = (_TIMES.sub(b"", raw[:PREFIX_BYTES]), raw[PREFIX_BYTES:])
            known = self._known.get(key)
            if known is None and not self._matcher.match_bytes(raw, ordinary=False):
                continue
            number += body.count(b"\n", counted, start)
            counted = start
            if known is not None and known.seen >= MANY and start - known.end < CLOSE_BYTES and known.untold < COUNTED:
                known.start, known.end, known.number = start, end, number
                known.untold += 1
                continue
            if known is not None and known.untold:
                yield self._told(body, known)
            line = self._line(body, start, end, number)
            if known is None:
                known = self._learn(key, self._matcher.match_line(line.text, ordinary=False))
            known.seen += 1
            known.end = end
            if any(m.signature.severity in _SEVERE for m in known.matches) and known.seen < MANY:
                severe.append((start, number))
            if known.matches:
                yield Hit(line, self._title, known.matches)
            if len(severe) >= 1000:
                self._cut(chunk, low, body, first, severe)
        for known in self._known.values():
            if known.untold:
                yield self._told(body, known)
            known.end = -CLOSE_BYTES
        self._cut(chunk, low, body, first, severe)

    def _learn(self, key: tuple[bytes, bytes], matches: list[Match]) -> _Known:
        if len(self._known) >= KNOWN_LINES:
            # Those with sightings that are not told yet stay.
            self._known = {k: v for k, v in self._known.items() if v.untold}
        known = self._known[key] = _Known(matches)
        return known

    def _told(self, body: bytes, known: _Known) -> Hit:
        """The last of the repeats that were only counted, for all of them."""
        count, known.untold = known.untold, 0
        line = self._line(body, known.start, known.end, known.number)
        return Hit(line, self._title, known.matches, count)

    def _line(self, body: bytes, start: int, end: int, number: int) -> Line:
        raw = to_text(body[start : min(end, start + LINE_BYTES)])
        prefixed = strip_line(clean(raw)[-1], self._habits)
        if prefixed.said.stamp is None and prefixed.said.boot_ns is None:
            self._look_back(body, start)
        self._looked = max(self._looked, end)
        return make_line(number, raw, prefixed, self._clock.resolve(prefixed.said), self._hints)

    def _look_back(self, body: bytes, start: int) -> None:
        """Let the clock see the nearest line before `start` that tells a time, of those that it has not seen."""
        before = body[max(self._looked, start - LOOK_BACK_BYTES) : start]
        if not self._looked and len(before) < LOOK_BACK_BYTES:
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
    return habits, Clock(near, origin.latest_ns, boots([("", None, lines)]).get(None))
