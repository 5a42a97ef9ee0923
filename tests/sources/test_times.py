"""Times as logs print them, and what they mean together."""

from __future__ import annotations

import datetime

import pytest
from hypothesis import given
from hypothesis import strategies as st

from keepstep.records.codec import rfc3339
from keepstep.sources.clocks import Clock, Said, near_time, zone_offset_ns
from keepstep.sources.documents import Line, Origin, split
from keepstep.sources.timestamps import DAY_NS, SECOND_NS, Kind, Stamp, of_year, stamp_at

NOON = int(datetime.datetime(2031, 6, 15, 12, tzinfo=datetime.UTC).timestamp()) * SECOND_NS

ABSOLUTE = [
    ("2031-05-22T10:00:01Z", "utc", "2031-05-22T10:00:01.000000000Z"),
    ("2031-05-22T10:00:01.123456789Z", "utc", "2031-05-22T10:00:01.123456789Z"),
    ("2031-05-22T10:00:01,283302+02:00", "utc", "2031-05-22T08:00:01.283302000Z"),
    ("2031-05-22T10:00:01-0730", "utc", "2031-05-22T17:30:01.000000000Z"),
    ("2031-05-22 10:00:01 +0000 UTC", "utc", "2031-05-22T10:00:01.000000000Z"),
    ("2031-05-22 10:00:01 UTC", "utc", "2031-05-22T10:00:01.000000000Z"),
    ("2031-05-22 10:00:01 PDT", "utc", "2031-05-22T17:00:01.000000000Z"),
    ("2031-05-22 10:00:01 CST", "local", "2031-05-22T10:00:01.000000000Z"),
    ("2031-05-22 10:00:01 INFO", "local", "2031-05-22T10:00:01.000000000Z"),
    ("2031-05-22_10:00:01", "local", "2031-05-22T10:00:01.000000000Z"),
    ("2031/05/22 10:00:01.5", "local", "2031-05-22T10:00:01.500000000Z"),
    ("Tue 2031-06-24 10:15:00 UTC", "utc", "2031-06-24T10:15:00.000000000Z"),
    ("Mon Mar 17 01:22:09 2031", "local", "2031-03-17T01:22:09.000000000Z"),
    ("Mon Mar 17 01:22:09 UTC 2031", "utc", "2031-03-17T01:22:09.000000000Z"),
    ("Feb 25 2031 13:59:45", "local", "2031-02-25T13:59:45.000000000Z"),
    ("25/Feb/2031:13:59:45 +0100", "utc", "2031-02-25T12:59:45.000000000Z"),
    ("12/03/2031 10:00:01 PM", "local", "2031-12-03T22:00:01.000000000Z"),
    ("12/03/31 10:00:01", "local", "2031-12-03T10:00:01.000000000Z"),
    ("1939200000", "utc", "2031-06-14T10:40:00.000000000Z"),
    ("1939200000.25", "utc", "2031-06-14T10:40:00.250000000Z"),
    ("1939200000123", "utc", "2031-06-14T10:40:00.123000000Z"),
    ("1939200000123456", "utc", "2031-06-14T10:40:00.123456000Z"),
    ("1939200000123456789", "utc", "2031-06-14T10:40:00.123456789Z"),
]
YEARLESS = ["Dec  6 19:25:33", "E1206 19:25:33", "W1206 19:25:33.000", "12-06 19:25:33", "Dec 06 19:25:33.000000"]


@pytest.mark.parametrize(("text", "kind", "expected"), ABSOLUTE)
def test_absolute(text: str, kind: Kind, expected: str) -> None:
    found = stamp_at(text)
    assert found is not None
    assert (found.stamp.kind, rfc3339(found.stamp.ns)) == (kind, expected)


@pytest.mark.parametrize("text", YEARLESS)
def test_without_a_year(text: str) -> None:
    found = stamp_at(text)
    assert found is not None and found.end == len(text)
    assert rfc3339(of_year(found.stamp.ns, 2031)) == "2031-12-06T19:25:33.000000000Z"


def test_torch_prints_months_without_a_zero() -> None:
    found = stamp_at("E317 07:39:53.792772442")
    assert found is not None and rfc3339(of_year(found.stamp.ns, 2031)).startswith("2031-03-17T07:39:53.792")


@pytest.mark.parametrize(
    "text",
    [
        "2031-13-22 10:00:01",
        "2031-02-30 10:00:01",
        "0000-01-01 00:00:00",
        "123456789",
        "25:00:00 x",
        "Xid 13",
        "Mon",
        "E99 1",
    ],
)
def test_what_is_no_time(text: str) -> None:
    assert stamp_at(text) is None


@given(st.text(max_size=40))
def test_any_text_is_a_time_or_not(text: str) -> None:
    found = stamp_at(text)
    assert found is None or (found.end <= len(text) and abs(found.stamp.ns) < 1 << 63)


def times(text: str, latest_ns: int | None = NOON) -> list[str]:
    """Time and quality of each line."""
    lines = [line for document in split("x.log", text, Origin(latest_ns=latest_ns)) for line in document.lines]
    return [shown(line) for line in lines]


def shown(line: Line) -> str:
    return f"{line.time_quality} {rfc3339(line.time_ns)[:19]}" if line.time_ns is not None else line.time_quality


class TestYears:
    def test_from_other_times_of_the_input(self) -> None:
        assert times("Apr  2 05:00:00 h1 kernel: x\n==> rank0.log <==\n2024-04-02T05:03:10Z y") == [
            "year_assumed 2024-04-02T05:00:00",
            "exact 2024-04-02T05:03:10",
        ]

    def test_from_the_file_and_never_in_its_future(self) -> None:
        assert times("Nov 30 10:00:00 h1 kernel: x\nJan  2 10:00:00 h1 kernel: y") == [
            "year_assumed 2030-11-30T10:00:00",
            "year_assumed 2031-01-02T10:00:00",
        ]

    def test_over_new_year(self) -> None:
        assert times("2030-12-31 23:59:58 a\nDec 31 23:59:59 h1 kernel: x\nJan  1 00:00:01 h1 kernel: y")[1:] == [
            "year_assumed 2030-12-31T23:59:59",
            "year_assumed 2031-01-01T00:00:01",
        ]

    def test_without_anything_to_go_by(self) -> None:
        assert times("Nov 30 10:00:00 h1 kernel: x", latest_ns=None) == ["none"]

    def test_a_leap_day_in_another_year(self) -> None:
        assert times("Feb 29 10:00:00 h1 kernel: x") == ["year_assumed 2031-03-01T10:00:00"]


class TestDays:
    def test_a_clock_takes_the_day_of_what_is_near_and_goes_over_midnight(self) -> None:
        text = "2031-05-22T23:59:00Z start\n23:59:59 a\n00:00:03 b"
        assert times(text)[1:] == ["year_assumed 2031-05-22T23:59:59", "year_assumed 2031-05-23T00:00:03"]

    def test_a_clock_alone_says_nothing_about_a_year(self) -> None:
        assert times("08:21:03 agent: x\n[rank7]:[W127 08:22:41.1 S.cpp:1] y") == [
            "year_assumed 2031-01-27T08:21:03",
            "year_assumed 2031-01-27T08:22:41",
        ]


class TestBoots:
    def test_from_lines_that_tell_both(self) -> None:
        text = "2031-05-22T10:00:00+00:00 h1 kernel: [100.000000] a\n[  160.500000] b"
        assert times(text) == ["exact 2031-05-22T10:00:00", "boot_relative 2031-05-22T10:01:00"]

    def test_from_uptime(self) -> None:
        text = "==> dmesg <==\n[  60.000000] b\n==> uptime -s <==\n2031-03-17 14:00:12"
        assert times(text)[0] == "boot_relative 2031-03-17T14:01:12"

    def test_unknown(self) -> None:
        line = split("x.log", "[  60.000000] b", Origin(latest_ns=NOON))[0].lines[0]
        assert (line.time_ns, line.time_quality, line.boot_ns) == (None, "none", 60 * SECOND_NS)

    def test_a_clock_that_begins_anew_is_of_another_boot(self) -> None:
        text = "2031-05-22T10:00:00+00:00 h1 kernel: [9000.000000] a\n[9001.0] b\n[    0.000000] Linux version 6.8"
        assert times(text)[1:] == ["boot_relative 2031-05-22T10:00:01", "none"]

    def test_differences_add_up(self) -> None:
        text = "[Mar17 13:40] a\n[  +0.500000] b\n[  +0.700000] c"
        lines = split("x.log", text, Origin(latest_ns=NOON))[0].lines
        assert [line.time_ns and line.time_ns % (60 * SECOND_NS) for line in lines] == [0, 500_000_000, 1_200_000_000]


class TestNeighbours:
    def test_a_line_without_a_time(self) -> None:
        assert times("before\n2031-05-22T10:00:01Z a\nb\nc") == [
            "none",
            "exact 2031-05-22T10:00:01",
            "neighbour 2031-05-22T10:00:01",
            "neighbour 2031-05-22T10:00:01",
        ]

    def test_a_time_in_the_title(self) -> None:
        assert times("==> kernel on h-12, 1939200000 <==\nNVRM: Xid (PCI:0000:a1:00): 62") == [
            "neighbour 2031-06-14T10:40:00"
        ]

    def test_another_section_begins_without_one(self) -> None:
        assert times("2031-05-22T10:00:01Z a\n==> b <==\nb")[1] == "none"


class TestZones:
    def test_two_clocks_in_turns(self) -> None:
        text = "2031-05-22T10:00:00Z a\n2031-05-22 19:00:02 b\n2031-05-22T10:00:04Z c\n2031-05-22 19:00:05 d"
        assert [t.split()[1] for t in times(text)] == [f"2031-05-22T10:00:0{s}" for s in (0, 2, 4, 5)]

    def test_a_pause_is_none(self) -> None:
        text = "2031-05-22T10:00:00Z a\n2031-05-22 10:30:00 b\n2031-05-22T10:30:04Z c"
        assert times(text)[1] == "zone_assumed 2031-05-22T10:30:00"

    @given(st.integers(-48, 56), st.lists(st.tuples(st.booleans(), st.integers(0, 20)), min_size=4, max_size=30))
    def test_the_offset_is_found_or_nothing_is_said(self, quarters: int, steps: list[tuple[bool, int]]) -> None:
        offset = quarters * 900 * SECOND_NS
        now, said = NOON, []
        for zoned, pause_s in steps:
            now += pause_s * SECOND_NS
            said.append(Said(Stamp("utc", now) if zoned else Stamp("local", now + offset)))
        assert zone_offset_ns(said) in (offset, 0)


@given(st.lists(st.integers(0, 180 * 86_400), min_size=1, max_size=30), st.integers(0, 400))
def test_years_of_a_log_that_goes_forward_do_not_go_back(gaps_s: list[int], start_day: int) -> None:
    """Whatever the first day: a syslog whose lines are less than half a year apart is resolved in order."""
    start = NOON - start_day * DAY_NS
    moments = [start]
    for gap in gaps_s:
        moments.append(moments[-1] + gap * SECOND_NS)
    stamps = [Stamp("yearless", yearless(ns)) for ns in moments]
    clock = Clock(near_ns=near_time([Said(stamps[0])], moments[0], None))
    found = [clock.resolve(Said(stamp)).time_ns for stamp in stamps]
    assert found == sorted(t for t in found if t is not None)


def yearless(ns: int) -> int:
    moment = datetime.datetime.fromtimestamp(ns // SECOND_NS, tz=datetime.UTC)
    return int(moment.replace(year=2000).timestamp()) * SECOND_NS


@given(st.integers(0, 24 * 3600 - 1), st.integers(0, 24 * 3600 - 1), st.integers(1, 10 * 3600))
def test_sections_with_times_of_day_alone_stay_in_order_whenever_the_file_was_written(
    written_s: int, begin_s: int, later_s: int
) -> None:
    """Two commands in one paste, the second some hours after the first: the day is taken for both together."""

    def clock(second: int) -> str:
        return f"{second // 3600 % 24:02d}:{second // 60 % 60:02d}:{second % 60:02d}"

    text = f"{clock(begin_s)} trainer: saving\n$ cat other.log\n{clock(begin_s + later_s)} trainer: timed out\n"
    latest = NOON - 12 * 3600 * SECOND_NS + written_s * SECOND_NS
    first, last = (
        line.time_ns
        for document in split("x.log", text, Origin(latest_ns=latest))
        for line in document.lines
        if line.time_quality == "year_assumed"
    )
    assert first is not None and last is not None and last - first == later_s * SECOND_NS
    assert first <= latest + 12 * 3600 * SECOND_NS
