"""Times of day within a line: a row of steps, `11:46:10 iteration 110 loss 2.2 | 11:51:22 iteration 301 loss 2.1`.

What stands before a line is read by sources/prefixes.py; here it is what stands in it.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from typing import NamedTuple

from keepstep.sources.documents import Line
from keepstep.sources.timestamps import DAY_NS, SECOND_NS

LINE_LIMIT = 2000
MOST = 64
"""Parts of one line."""
OWN = frozenset({"none", "neighbour"})
"""Qualities of a time that is not the line's own."""

_CLOCK = re.compile(
    r"(?i)(?<![\d:./-])(?P<H>[01]\d|2[0-3]):(?P<M>[0-5]\d):(?P<S>[0-5]\d)(?:[.,]\d{1,9})?\]?:?\s{1,3}"
    r"(?:\S{1,24}\s{1,3})?(?:\w{0,12}step|iter|epoch|update|batch)"
)
"""A clock right before the step: how long it took, or will take, stands behind it or has its own word."""
_SPAN = re.compile(r"(?i)(?:\beta|elapsed|remain\w*|left|spent|took|time|duration|uptime|\bin|[<\[])[\s=:]{0,3}\Z")
_BETWEEN = re.compile(r"\s[|;·]\s|;\s")


class Moment(NamedTuple):
    """A part of a line, with the line as it would be if the part stood alone at its time."""

    text: str
    line: Line


def moments_in(line: Line, near_ns: int | None) -> Iterator[Moment]:
    """The parts of a line, each with its own time of day; the line itself where it is one and has a time, or none is in it.

    `near_ns`: a time of the same text, from which the day is taken where the line has none.
    """
    text = line.text[:LINE_LIMIT]
    if _clock(text) is None:
        yield Moment(line.text, line)
        return
    parts = _BETWEEN.split(text)[:MOST]
    clocks = [_clock(part) for part in parts]
    own = line.time_quality not in OWN and line.time_ns is not None
    # The first part may stand at the time of the line; all others need one of their own.
    several = len(parts) > 1 and all(c is not None for c in clocks[1:]) and (own or clocks[0] is not None)
    if not several:
        first = _clock(text)
        yield Moment(line.text, line if own or first is None else _at(line, first, line.time_ns or near_ns))
        return
    last_ns = line.time_ns if line.time_ns is not None else near_ns
    for part, clock in zip(parts, clocks, strict=True):
        there = line if clock is None else _at(line, clock, last_ns)
        last_ns = there.time_ns if there.time_ns is not None else last_ns
        yield Moment(part, there)


def _clock(text: str) -> re.Match[str] | None:
    """A time of day that a step was made at; not how long something took."""
    match = _CLOCK.search(text)
    return None if match is None or _SPAN.search(text[: match.start()]) is not None else match


def _at(line: Line, clock: re.Match[str], near_ns: int | None) -> Line:
    """The line at a time of day, on the day that brings it nearest to a known time; as it is where nothing is known."""
    if near_ns is None:
        return line
    of_day = (int(clock["H"]) * 3600 + int(clock["M"]) * 60 + int(clock["S"])) * SECOND_NS
    day = near_ns // DAY_NS
    choices = [(day + shift) * DAY_NS + of_day for shift in (-1, 0, 1)]
    time_ns = min(choices, key=lambda t: abs(t - near_ns))
    quality = line.time_quality if line.time_quality not in OWN else "year_assumed"
    return line._replace(time_ns=time_ns, time_quality=quality)
