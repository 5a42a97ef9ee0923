"""Times as logs print them. Parsing only: which year, zone or boot they mean is settled by sources/clocks.py."""

from __future__ import annotations

import functools
import re
from collections.abc import Callable
from datetime import date
from typing import Literal, NamedTuple

SECOND_NS = 1_000_000_000
DAY_NS = 86_400 * SECOND_NS
MONTHS = {
    name: n
    for n, name in enumerate(["Jan", "Feb", "Mar", "Apr", "May", "Jun", "Jul", "Aug", "Sep", "Oct", "Nov", "Dec"], 1)
}
LEAP_YEAR = 2000
"""Times without a year are held as times of this one, so that 29 February has its place."""

_HOUR_NS = 3600 * SECOND_NS
ZONES = {
    "Z": 0.0, "UTC": 0.0, "GMT": 0.0, "EST": -5.0, "EDT": -4.0, "CDT": -5.0, "MST": -7.0, "MDT": -6.0, "PST": -8.0, "PDT": -7.0,
    "CET": 1.0, "CEST": 2.0, "EET": 2.0, "EEST": 3.0, "MSK": 3.0, "JST": 9.0, "KST": 9.0, "SGT": 8.0, "HKT": 8.0, "AEST": 10.0,
    "AEDT": 11.0,
}  # fmt: skip
"""Hours east of UTC. Names that mean several zones (CST, IST, BST) are not here: such a time counts as one without zone."""

Kind = Literal["utc", "local", "yearless", "clock", "boot", "delta"]


class Stamp(NamedTuple):
    """A time as it was printed.

    `kind`: utc: since the epoch, zone known. local: the same, zone taken for UTC. yearless: as of LEAP_YEAR. clock: since
    midnight. boot: since the boot of the machine. delta: since the line before.
    """

    kind: Kind
    ns: int


class Found(NamedTuple):
    """A stamp, and where it ends in the text."""

    stamp: Stamp
    end: int


_CLOCK = r"(?P<H>[01]\d|2[0-3]):(?P<M>[0-5]\d):(?P<S>[0-5]\d|60)(?:[.,](?P<f>\d{1,9})\d*)?"
_ZONE = r"(?: ?(?P<z>Z\b|[+-]\d\d:?[0-5]\d(?!\d)|(?:[A-Z]{3,4}(?=[\s\]|,:]|$)))(?: UTC)?)?"
_MON = r"(?P<b>Jan|Feb|Mar|Apr|May|Jun|Jul|Aug|Sep|Oct|Nov|Dec)"
_DAY = r"(?:Mon|Tue|Wed|Thu|Fri|Sat|Sun)"
_D = r"(?P<d>0?[1-9]|[12]\d|3[01])"

_ISO = re.compile(rf"(?:{_DAY} )?(?P<Y>\d{{4}})[-/.](?P<m>\d\d)[-/.](?P<d>\d\d)[T _:-]{_CLOCK}{_ZONE}")
_CTIME = re.compile(rf"(?:{_DAY},? )?{_MON} {{1,2}}{_D},? {_CLOCK} (?:(?P<z>[A-Z]{{3,4}}) )?(?P<Y>\d{{4}})\b")
_DATED = re.compile(rf"(?:{_DAY},? )?{_MON} {{1,2}}{_D},? (?P<Y>\d{{4}}) {_CLOCK}{_ZONE}")
_SYSLOG = re.compile(rf"(?:{_DAY} )?{_MON} {{1,2}}{_D} {_CLOCK}")
_MINUTE = re.compile(rf"{_MON} ?{_D} (?P<H>[01]\d|2[0-3]):(?P<M>[0-5]\d)(?=\])")
_DAY_FIRST = re.compile(rf"{_D}[/ -]{_MON}[/ -](?P<Y>\d{{4}})[: ]{_CLOCK}{_ZONE}")
_US = re.compile(rf"(?P<m>0[1-9]|1[0-2])/(?P<d>[0-3]\d)/(?P<Y>\d{{4}}|\d\d),? {_CLOCK}(?P<p> ?[AP]M)?")
_GLOG = re.compile(rf"[IWEFCDN](?P<m>1[0-2]|0?[1-9])(?P<d>[0-3]\d) {_CLOCK}")
_MONTH_DAY = re.compile(rf"(?P<m>0[1-9]|1[0-2])-(?P<d>[0-3]\d) {_CLOCK}")
_TIME = re.compile(rf"{_CLOCK}(?P<p> ?[AP]M)?(?=[\s\]|,:-]|$)")
_EPOCH = re.compile(r"(?P<n>\d{10})(?:\.(?P<f>\d{1,9}))?(?![\w.])|(?P<ms>\d{13}|\d{16}|\d{19})(?!\w)")
_EPOCH_RANGE = (946_684_800, 4_102_444_800)
"""2000 to 2100: numbers outside are no times."""
YEARS = (1970, 2200)
"""Dates outside are no times of logs."""


@functools.lru_cache(4096)
def _days(year: int, month: int, day: int) -> int | None:
    try:
        return date(year, month, day).toordinal() - 719_163
    except ValueError:
        return None


def _of_day(match: re.Match[str]) -> int:
    groups = match.groupdict()
    hour = int(groups["H"])
    half = groups.get("p")
    if half is not None:
        hour = hour % 12 + (12 if "P" in half else 0)
    fraction = groups.get("f")
    nanos = int(fraction.ljust(9, "0")) if fraction else 0
    return (hour * 3600 + int(groups["M"]) * 60 + int(groups.get("S") or 0)) * SECOND_NS + nanos


def _zone_hours(zone: str | None) -> float | None:
    if zone is None:
        return None
    if zone[0] in "+-":
        digits = zone[1:].replace(":", "")
        hours = int(digits[:2]) + int(digits[2:]) / 60
        return -hours if zone[0] == "-" else hours
    return ZONES.get(zone)


def _full(match: re.Match[str]) -> Found | None:
    groups = match.groupdict()
    month = MONTHS[groups["b"]] if groups.get("b") else int(groups["m"])
    year = int(groups["Y"])
    year += 2000 if len(groups["Y"]) == 2 else 0
    days = _days(year, month, int(groups["d"])) if YEARS[0] <= year <= YEARS[1] else None
    if days is None:
        return None
    ns = days * DAY_NS + _of_day(match)
    zone = groups.get("z")
    hours = _zone_hours(zone)
    end = match.end()
    if hours is None:
        if zone is not None and match.re is _ISO and not zone.startswith(("+", "-")):
            # "2031-05-22 10:00:01 INFO": a word, not a zone.
            end = match.start("z") - (match.string[match.start("z") - 1] == " ")
        return Found(Stamp("local", ns), end)
    return Found(Stamp("utc", ns - round(hours * _HOUR_NS)), end)


def _yearless(match: re.Match[str]) -> Found | None:
    groups = match.groupdict()
    month = MONTHS[groups["b"]] if groups.get("b") else int(groups["m"])
    days = _days(LEAP_YEAR, month, int(groups["d"]))
    return None if days is None else Found(Stamp("yearless", days * DAY_NS + _of_day(match)), match.end())


def _clock(match: re.Match[str]) -> Found:
    return Found(Stamp("clock", _of_day(match)), match.end())


def _epoch(match: re.Match[str]) -> Found | None:
    seconds, fraction = match["n"], match["f"] or ""
    ns = int(seconds + fraction.ljust(9, "0")) if seconds else int(match["ms"].ljust(19, "0"))
    low, high = _EPOCH_RANGE
    return Found(Stamp("utc", ns), match.end()) if low <= ns // SECOND_NS < high else None


_Form = tuple[re.Pattern[str], Callable[[re.Match[str]], Found | None]]
_BY_DIGIT: tuple[_Form, ...] = (
    (_ISO, _full),
    (_US, _full),
    (_MONTH_DAY, _yearless),
    (_TIME, _clock),
    (_DAY_FIRST, _full),
    (_EPOCH, _epoch),
)
_BY_LETTER: tuple[_Form, ...] = (
    (_CTIME, _full),
    (_DATED, _full),
    (_SYSLOG, _yearless),
    (_MINUTE, _yearless),
    (_ISO, _full),
)
_GLOG_FORM: _Form = (_GLOG, _yearless)


def stamp_at(text: str, start: int = 0) -> Found | None:
    """The time that stands at `start`, None when there is none. What follows it is not looked at."""
    first = text[start : start + 1]
    if first.isdigit():
        forms: tuple[_Form, ...] = _BY_DIGIT
    elif first.isalpha() and first.isascii() and first.isupper():
        forms = (_GLOG_FORM,) if text[start + 1 : start + 2].isdigit() else _BY_LETTER
    else:
        return None
    for pattern, make in forms:
        match = pattern.match(text, start)
        if match is not None:
            found = make(match)
            if found is not None:
                return found
    return None


_ANYWHERE = re.compile(r"\d{4}[-/]\d\d[-/]\d\d[T _]\d\d:\d\d:\d\d|\b\d{10}(?:\d{3}){0,3}\b")


def stamp_in(text: str) -> Stamp | None:
    """The first full time within a text: of a title, of a phrase such as "CANCELLED AT 2031-08-21T10:12:00"."""
    match = _ANYWHERE.search(text)
    found = stamp_at(text, match.start()) if match is not None else None
    return found.stamp if found is not None else None


def of_year(ns: int, year: int) -> int:
    """A `yearless` time in a year; 29 February becomes 1 March where there is none."""
    days, rest = divmod(ns, DAY_NS)
    day = date.fromordinal(days + 719_163)
    moved = _days(year, day.month, day.day)
    return (_days(year, 3, 1) or 0) * DAY_NS + rest if moved is None else moved * DAY_NS + rest


def year_of(ns: int) -> int:
    """The year of a time since the epoch, UTC. Any integer has one: those outside the calendar give its ends."""
    return date.fromordinal(min(max(ns // DAY_NS + 719_163, 1), date.max.toordinal())).year
