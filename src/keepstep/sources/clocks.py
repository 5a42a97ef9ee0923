"""Stamps -> UTC: the year, the day, the zone and the boot that printed times leave out, from what else is known."""

from __future__ import annotations

import statistics
from collections.abc import Iterable, Sequence
from typing import NamedTuple

from keepstep.records.event import TimeQuality
from keepstep.sources.timestamps import DAY_NS, SECOND_NS, Stamp, of_year, year_of

QUARTER_NS = 900 * SECOND_NS
"""Zones differ by multiples of it."""
TURN_NS = 90 * SECOND_NS
"""Two lines that follow each other in one stream are seldom further apart, when the writer is busy."""

ZONES_NS = 12 * 3600 * SECOND_NS
"""A clock without day and zone may be ahead of UTC by so much; more would put yesterday evening's lines on tomorrow."""
RESTART_NS = 60 * SECOND_NS
"""The kernel's clock that goes back by more than this is the clock of another boot."""


class Timed(NamedTuple):
    """When a line was written: UTC, how well that is known, and seconds since boot where the line told those."""

    time_ns: int | None = None
    quality: TimeQuality = "none"
    boot_ns: int | None = None


class Said(NamedTuple):
    """What one line says about its time: at most one absolute stamp, and the kernel's clock beside it."""

    stamp: Stamp | None = None
    boot_ns: int | None = None
    delta_ns: int | None = None


class Clock:
    """Resolves the lines of one stream, in their order.

    `near_ns`: a time that is known to be close to the first line (year and day are taken from it). `latest_ns`: no line is later
    than this (when the file was last written), used where nothing is near. `boot_at_ns`: when the machine was booted.
    `zone_ns`: what times without zone are ahead of UTC.
    """

    def __init__(
        self, near_ns: int | None = None, latest_ns: int | None = None, boot_at_ns: int | None = None, zone_ns: int = 0
    ) -> None:
        self.near_ns = near_ns
        self.boot_at_ns = boot_at_ns
        self._latest_ns = latest_ns
        self._zone_ns = zone_ns
        self._seen = Timed()
        self._boot_ns = 0
        self._known_boot_ns = boot_at_ns

    def start(self, stamp: Stamp) -> None:
        """The lines begin about then: what a title says of all of them."""
        time_ns, _ = self._absolute(stamp)
        if time_ns is not None:
            self._seen = Timed(time_ns, "neighbour")
            self.near_ns = time_ns

    def forget(self) -> None:
        """Another text begins: its lines do not follow those before. What is known of the year and the zone stays."""
        self._seen = Timed()
        self._boot_ns = 0
        self.boot_at_ns = self._known_boot_ns

    def resolve(self, said: Said) -> Timed:
        """The time of the next line. One that says nothing has that of its predecessor."""
        stamp = said.stamp
        timed: Timed | None = None
        if said.boot_ns is not None:
            if said.boot_ns < self._boot_ns - RESTART_NS:
                self.boot_at_ns = None
            self._boot_ns = said.boot_ns
        if stamp is not None:
            time_ns, quality = self._absolute(stamp)
            if time_ns is not None:
                if said.boot_ns is not None and self.boot_at_ns is None:
                    self.boot_at_ns = time_ns - said.boot_ns
                timed = Timed(time_ns, quality, said.boot_ns)
        if timed is None and said.boot_ns is not None:
            time_ns = None if self.boot_at_ns is None else self.boot_at_ns + said.boot_ns
            timed = Timed(time_ns, "none" if time_ns is None else "boot_relative", said.boot_ns)
        if timed is None and said.delta_ns is not None and self._seen.time_ns is not None:
            timed = Timed(self._seen.time_ns + said.delta_ns, self._seen.quality, None)
        if timed is None:
            return Timed(self._seen.time_ns, "none" if self._seen.time_ns is None else "neighbour", None)
        if timed.time_ns is not None:
            self._seen = timed
            self.near_ns = timed.time_ns
        return timed

    def _absolute(self, stamp: Stamp) -> tuple[int | None, TimeQuality]:
        if stamp.kind == "utc":
            return stamp.ns, "exact"
        if stamp.kind == "local":
            return stamp.ns - self._zone_ns, "zone_assumed"
        if stamp.kind == "yearless":
            return self._with_year(stamp.ns), "year_assumed"
        if stamp.kind == "clock":
            return self._with_day(stamp.ns), "year_assumed"
        return None, "none"

    def _with_year(self, ns: int) -> int | None:
        known = self.near_ns if self.near_ns is not None else self._latest_ns
        if known is None:
            return None
        year = year_of(known)
        if self.near_ns is not None:
            same = of_year(ns, year) - self._zone_ns
            if abs(same - known) < 180 * DAY_NS:
                return same
        choices = [of_year(ns, y) - self._zone_ns for y in (year - 1, year, year + 1)]
        return self._choose(choices)

    def _with_day(self, ns: int) -> int | None:
        known = self.near_ns if self.near_ns is not None else self._latest_ns
        if known is None:
            return None
        day = (known + self._zone_ns) // DAY_NS
        return self._choose([(day + shift) * DAY_NS + ns - self._zone_ns for shift in (-1, 0, 1)], ZONES_NS)

    def _choose(self, choices: Sequence[int], slack_ns: int = DAY_NS) -> int:
        """The one nearest to a known time; else the last that is not later than the file, but for the zones."""
        if self.near_ns is not None:
            near = self.near_ns
            return min(choices, key=lambda t: abs(t - near))
        latest = self._latest_ns or 0
        return max((t for t in choices if t <= latest + slack_ns), default=choices[0])


def first_full(said_by_lines: Iterable[Said]) -> int | None:
    """The first time that needs nothing else to be known."""
    for said in said_by_lines:
        if said.stamp is not None and said.stamp.kind in ("utc", "local"):
            return said.stamp.ns
    return None


def near_time(said_by_lines: Iterable[Said], around_ns: int | None, latest_ns: int | None) -> int | None:
    """A time near to the lines: the first full one, else the first with a month and a day, in the year of `around_ns`."""
    dated: Stamp | None = None
    for said in said_by_lines:
        stamp = said.stamp
        if stamp is not None and stamp.kind in ("utc", "local"):
            return stamp.ns
        if dated is None and stamp is not None and stamp.kind == "yearless":
            dated = stamp
    return None if dated is None else Clock(around_ns, latest_ns).resolve(Said(dated)).time_ns


def first_clock(said_by_lines: Iterable[Said], around_ns: int | None, latest_ns: int | None) -> int | None:
    """The first time of day, on the day that it has next to a known time: the whole text is of about that day."""
    for said in said_by_lines:
        if said.stamp is not None and said.stamp.kind == "clock":
            return Clock(around_ns, latest_ns).resolve(Said(said.stamp)).time_ns
    return None


def zone_offset_ns(said_by_lines: Sequence[Said]) -> int:
    """What the times without zone of a stream are ahead of those with one; 0 when they agree or nothing says so.

    Two kinds of lines in turns: if each change to a time without zone jumps by the same multiple of a quarter of an hour, and
    each change back jumps back, then that is the zone. A pause of the job jumps forward only.
    """
    there: list[int] = []
    back: list[int] = []
    last: Stamp | None = None
    for said in said_by_lines:
        stamp = said.stamp
        if stamp is None or stamp.kind not in ("utc", "local"):
            continue
        if last is not None and last.kind != stamp.kind:
            (there if stamp.kind == "local" else back).append(stamp.ns - last.ns)
        last = stamp
    if not there or not back:
        return 0
    offset = round(statistics.median(there) / QUARTER_NS) * QUARTER_NS
    if offset == 0 or abs(offset) > 14 * 4 * QUARTER_NS:
        return 0
    jumps = [gap - offset for gap in there] + [gap + offset for gap in back]
    agreeing = sum(1 for rest in jumps if -TURN_NS <= rest <= TURN_NS)
    return offset if agreeing * 4 >= len(jumps) * 3 and -TURN_NS <= back[0] + offset <= TURN_NS else 0


def boot_times(said_by_lines: Iterable[Said]) -> int | None:
    """When the machine was booted, from lines that tell the time of day and the kernel's clock; the median of them."""
    found = []
    for said in said_by_lines:
        if said.boot_ns is not None and said.stamp is not None and said.stamp.kind in ("utc", "local"):
            found.append(said.stamp.ns - said.boot_ns)
            if len(found) >= 1000:
                break
    return round(statistics.median(found)) if found else None
