"""Which of two events was first, as far as their clocks and files allow to say."""

from __future__ import annotations

from typing import Literal

from keepstep.records.event import Event, TimeQuality

Sense = Literal["before", "after", "together"]

SECOND_NS = 1_000_000_000

_LOCAL: frozenset[TimeQuality] = frozenset({"zone_assumed", "year_assumed"})

SAME_CLOCK_S = 2.0
"""Hosts under NTP agree to milliseconds; two seconds leave room for a log that is flushed once a second."""
BOOT_CLOCK_S = 120.0
"""`dmesg -T` adds a boot time to a clock that stands still in suspend and is never slewed; minutes off after some weeks."""
NEIGHBOUR_S = 60.0
"""A line without a time takes that of the line before it."""
ZONE_S = 14 * 3600.0
"""Where one of two clocks names its zone and the other does not."""


def tolerance_s(one: TimeQuality, other: TimeQuality) -> float:
    """Seconds within which two times of these qualities say nothing about order."""
    if (one in _LOCAL) != (other in _LOCAL) and "neighbour" not in (one, other):
        return ZONE_S
    if "neighbour" in (one, other):
        return NEIGHBOUR_S
    return BOOT_CLOCK_S if "boot_relative" in (one, other) else SAME_CLOCK_S


def same_text(one: Event, other: Event) -> bool:
    """Whether two events come from one document, so that their lines are in order."""
    return (one.evidence.path, one.source) == (other.evidence.path, other.source)


def compare(one: Event, other: Event) -> Sense | None:
    """Whether `one` was before `other`. None: nothing says so.

    Within one document its order counts where times do not differ: writers flush late, so that a later line with an earlier
    time of the same clock happened earlier.
    """
    inside = same_text(one, other)
    if one.time_ns is not None and other.time_ns is not None:
        gap_s = (other.time_ns - one.time_ns) / SECOND_NS
        alike = inside and one.time_quality == other.time_quality
        if abs(gap_s) > (0.0 if alike else tolerance_s(one.time_quality, other.time_quality)):
            return "before" if gap_s > 0 else "after"
        if not inside:
            return "together"
    if not inside:
        return _by_boot(one, other)
    if one.order == other.order:
        return "together"
    return "before" if one.order < other.order else "after"


def _by_boot(one: Event, other: Event) -> Sense | None:
    """By the kernel's own clock, where both are of one boot of one node."""
    if one.boot_ns is None or other.boot_ns is None or one.boot_id is None or one.boot_id != other.boot_id:
        return None
    if one.boot_ns == other.boot_ns:
        return "together"
    return "before" if one.boot_ns < other.boot_ns else "after"


def gap_s(one: Event, other: Event) -> float | None:
    """Seconds from `one` to `other`, None where a time is missing."""
    if one.time_ns is None or other.time_ns is None:
        return None
    return (other.time_ns - one.time_ns) / SECOND_NS


def canonical(event: Event) -> tuple[bool, int, str, str, int, str, str, str]:
    """Key that orders events alike however their files were given: by time where there is one, then by where they stand."""
    return (
        event.time_ns is None,
        event.time_ns or 0,
        event.evidence.path,
        event.source,
        event.order,
        event.signature,
        event.evidence.text,
        f"{event.id} {event.node} {event.rank} {event.gpu} {event.nic}",
    )
