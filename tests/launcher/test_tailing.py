"""Reading a journal that grows: every cut of the file, new epochs, superseded coordinators."""

from __future__ import annotations

import tempfile
from pathlib import Path
from typing import Any

from hypothesis import given, settings
from hypothesis import strategies as st

from keepstep.launcher.coordination.journal import Journal, epoch_path, read_records
from keepstep.launcher.views.tailing import JournalTail

Appends = list[list[int]]


def write(run_dir: Path, epochs: list[tuple[int, Appends]]) -> None:
    """Epochs of (records of the run that their coordinator had read, appends)."""
    for read, appends in epochs:
        journal = Journal.claim(run_dir)
        journal.append([{"type": "open", "read": read}])
        for numbers in appends:
            journal.append([{"type": "kv", "n": n} for n in numbers])
        journal.close()


def given_by(tail: JournalTail) -> list[dict[str, Any]]:
    return [record for _, record in tail.poll()]


APPENDS = st.lists(st.lists(st.integers(0, 99), min_size=1, max_size=4), max_size=5)


@settings(max_examples=40, deadline=None)
@given(
    appends=st.lists(APPENDS, min_size=1, max_size=3),
    missed=st.lists(st.integers(0, 6), min_size=3, max_size=3),
    data=st.data(),
)
def test_all_polls_together_are_what_the_whole_journal_says(
    appends: list[Appends], missed: list[int], data: Any
) -> None:
    """Whatever the cuts between polls, also in the middle of a line or of an append."""
    with tempfile.TemporaryDirectory() as folder:
        final = Path(folder) / "final"
        epochs: list[tuple[int, Appends]] = []
        for number, mine in enumerate(appends):
            have = 0
            if number:
                write_dir = Path(folder) / f"before-{number}"
                write(write_dir, epochs)
                # It may have missed records of the one before, never of an older one.
                own = len(epochs[-1][1]) and sum(map(len, epochs[-1][1]))
                missed[number] = min(missed[number], own)
                have = len(read_records(write_dir)) - missed[number]
            epochs.append((have, mine))
        write(final, epochs)
        expected = read_records(final)

        live = Path(folder) / "live"
        (live / "journal").mkdir(parents=True)
        tail = JournalTail(live)
        seen: list[dict[str, Any]] = []
        for number in range(1, len(epochs) + 1):
            whole = epoch_path(final, number).read_bytes()
            # What its successor missed is given when it is polled before the successor's first record: not polled here.
            last = number == len(epochs)
            least = whole.index(b"\n") + 1 if number > 1 and missed[number - 1] else 0
            cuts = (
                sorted(data.draw(st.lists(st.integers(least, len(whole)), max_size=4)))
                if last or not missed[number]
                else []
            )
            for cut in cuts:
                epoch_path(live, number).write_bytes(whole[:cut])
                seen += given_by(tail)
            epoch_path(live, number).write_bytes(whole)
            if last or not missed[number]:
                seen += given_by(tail)
        seen += given_by(tail)
        assert seen == expected
        assert given_by(tail) == []


def test_epochs_are_told_apart(tmp_path: Path) -> None:
    write(tmp_path, [(0, [[1]]), (2, [[2]])])
    assert [(e, r["type"]) for e, r in JournalTail(tmp_path).poll()] == [(1, "open"), (1, "kv"), (2, "open"), (2, "kv")]


def test_no_journal_yet_is_nothing_yet(tmp_path: Path) -> None:
    tail = JournalTail(tmp_path)
    assert tail.poll() == []
    write(tmp_path, [(0, [[1, 2]])])
    assert [r.get("n") for r in given_by(tail)] == [None, 1, 2]


def test_an_epoch_whose_coordinator_died_before_its_first_record_is_passed_over(tmp_path: Path) -> None:
    write(tmp_path, [(0, [[1]])])
    tail = JournalTail(tmp_path)
    assert len(tail.poll()) == 2
    epoch_path(tmp_path, 2).touch()
    assert tail.poll() == []
    whole = Journal.claim(tmp_path)
    whole.append([{"type": "open", "read": 2}])
    whole.close()
    assert [(e, r["type"]) for e, r in tail.poll()] == [(3, "open")]


def test_reading_takes_no_lock_and_writes_nothing(tmp_path: Path) -> None:
    write(tmp_path, [(0, [[1]])])
    before = {p: p.stat().st_mtime_ns for p in tmp_path.rglob("*")}
    JournalTail(tmp_path).poll()
    assert {p: p.stat().st_mtime_ns for p in tmp_path.rglob("*")} == before
