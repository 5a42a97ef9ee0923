"""Times of day within a line: steps that somebody lists in one row."""

from __future__ import annotations

from datetime import UTC, datetime

from keepstep.catalog.load import shipped
from keepstep.records.event import Event
from keepstep.sources.reading import read_text
from tests.attribution.jobtexts import matcher


def steps_of(text: str) -> list[Event]:
    found = read_text("job.log", text, shipped(), matcher()).events
    return [e for e in found if e.signature == "job.progress"]


def clock(ns: int | None) -> str:
    assert ns is not None
    return datetime.fromtimestamp(ns / 1e9, UTC).strftime("%d %H:%M:%S")


def test_each_part_of_a_row_is_a_step_at_its_own_time() -> None:
    (event,) = steps_of(
        "2031-10-02 12:00:00 alarm\nrank 0: 11:46:10 iteration 20110 lm loss 2.204 | 11:51:22 iteration 20301 lm loss 2.2\n"
    )
    assert event.count == 2
    assert (clock(event.time_ns), clock(event.last_ns)) == ("02 11:46:10", "02 11:51:22")
    assert event.attrs["last_step"] == 20301


def test_the_first_part_may_stand_at_the_time_of_its_line_and_midnight_is_passed() -> None:
    (event,) = steps_of(
        "2031-10-02T23:59:40 step 7702 loss 1.911 ; 00:00:20 step 7703 loss 1.908 ; 00:10:00 step 7961 loss 1.9\n"
    )
    assert event.count == 3
    assert clock(event.last_ns) == "03 00:10:00"


def test_how_long_something_took_is_no_time_of_day() -> None:
    first = "2031-10-02 12:00:00 begin\n"
    for text in (
        "step 12 loss 2.1 | elapsed 00:10:00 | eta 01:00:00",
        "eta 01:00:00 step 12 loss 2.1",
        "elapsed: 00:10:00 step 12 loss 2.1",
        "took 00:10:00, step 12 loss 2.1",
    ):
        (event,) = steps_of(first + text + "\n")
        assert event.count == 1
        assert clock(event.last_ns) == "02 12:00:00"


def test_a_row_without_any_date_gives_steps_and_no_times() -> None:
    (event,) = steps_of("trainer: 06:05:02 step 18820 loss 2.01\n")
    assert event.count == 1
