"""The journal as a file: exclusive epochs, whole appends, and damage that never becomes a wrong record."""

from __future__ import annotations

import os
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from keepstep.launcher.coordination.journal import Journal, epoch_path, epochs, read_epoch, read_marks, read_records
from keepstep.records.errors import StorageError
from keepstep.records.timeline import Mark
from tests.disks import small_tmpfs

Record = dict[str, Any]
values = st.one_of(st.none(), st.booleans(), st.integers(-(2**63), 2**63 - 1), st.text(max_size=12), st.floats(0, 1))
record_lists = st.lists(
    st.dictionaries(st.sampled_from(["type", "node", "t_ns", "value", "ä"]), values, max_size=4), min_size=1, max_size=4
)
append_lists = st.lists(record_lists, min_size=1, max_size=5)


def without_seq(records: list[Record]) -> list[Record]:
    return [{k: v for k, v in r.items() if k != "seq"} for r in records]


def write(run_dir: Path, appends: list[list[Record]]) -> tuple[Path, list[int]]:
    """Write the appends; returns the file and its length after each of them."""
    journal = Journal.claim(run_dir)
    ends = []
    for records in appends:
        journal.append(records)
        ends.append(journal.path.stat().st_size)
    journal.close()
    return journal.path, ends


@pytest.fixture
def full_disk(tmp_path: Path) -> Iterator[Path]:
    """A real file system with one page left."""
    with small_tmpfs(tmp_path / "small", "size=64k,nr_inodes=64") as place:
        yield place


class TestClaim:
    def test_epochs_start_at_one_and_rise(self, tmp_path: Path) -> None:
        claimed = [Journal.claim(tmp_path) for _ in range(3)]
        assert [j.epoch for j in claimed] == epochs(tmp_path) == [1, 2, 3]
        for journal in claimed:
            journal.close()

    def test_of_many_claims_at_once_no_two_get_the_same_epoch(self, tmp_path: Path) -> None:
        code = (
            "import sys; from pathlib import Path; from keepstep.launcher.coordination.journal import Journal;"
            "sys.stdin.readline();"
            "print(*[Journal.claim(Path(sys.argv[1])).epoch for _ in range(40)])"
        )
        command = [sys.executable, "-c", code, str(tmp_path)]
        racers = [subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) for _ in range(3)]
        for racer in racers:
            assert racer.stdin is not None
            racer.stdin.write("go\n")
            racer.stdin.flush()
        got = [int(n) for racer in racers for n in racer.communicate(timeout=30)[0].split()]
        assert sorted(got) == list(range(1, 121))

    def test_only_the_newest_is_not_superseded(self, tmp_path: Path) -> None:
        first = Journal.claim(tmp_path)
        assert not first.superseded()
        second = Journal.claim(tmp_path)
        assert (first.superseded(), second.superseded()) == (True, False)
        first.close()
        second.close()

    def test_other_files_in_the_folder_are_no_epochs(self, tmp_path: Path) -> None:
        (tmp_path / "journal").mkdir()
        (tmp_path / "journal" / "notes.jsonl").write_text("x")
        (tmp_path / "journal" / "000007.jsonl.bak").write_text("x")
        journal = Journal.claim(tmp_path)
        assert journal.epoch == 1
        journal.close()

    def test_a_folder_that_cannot_be_made_is_named(self, tmp_path: Path) -> None:
        (tmp_path / "journal").write_text("a file where the folder should be")
        with pytest.raises(StorageError, match=r"journal: cannot write the journal: (File exists|Not a directory)"):
            Journal.claim(tmp_path)

    def test_what_a_superseded_one_writes_on_does_not_count(self, tmp_path: Path) -> None:
        old = Journal.claim(tmp_path)
        old.append([{"n": 0}, {"n": 1}])
        new = Journal.claim(tmp_path)
        read = len(read_records(tmp_path))
        old.append([{"n": "too late"}])
        new.append([{"type": "open", "read": read}, {"n": 2}])
        old.append([{"n": "later still"}])
        old.close()
        new.close()
        assert [r.get("n") for r in read_records(tmp_path)] == [0, 1, None, 2]


class TestRoundTrip:
    @given(append_lists)
    @settings(max_examples=40, deadline=None)
    def test_what_was_appended_is_read(self, appends: list[list[Record]]) -> None:
        with tempfile.TemporaryDirectory(dir="/dev/shm") as folder:
            path, _ = write(Path(folder), appends)
            flat = [r for records in appends for r in records]
            assert read_epoch(path) == [{"seq": i, **r} for i, r in enumerate(flat)]

    def test_epochs_are_read_oldest_first(self, tmp_path: Path) -> None:
        for n in range(12):
            write(tmp_path, [[{"n": n}]])
        assert [r["n"] for r in read_records(tmp_path)] == list(range(12))

    def test_nothing_appended_writes_nothing(self, tmp_path: Path) -> None:
        path, _ = write(tmp_path, [[]])
        assert path.read_bytes() == b""
        assert read_epoch(path) == []

    def test_marks_are_the_timeline(self, tmp_path: Path) -> None:
        marks = [
            {"t_ns": 5, "kind": "run_started", "cycle": 0, "attempt": 0, "attrs": {}},
            {"t_ns": 9, "kind": "step", "cycle": 1, "attempt": 0, "attrs": {"step": 3}},
        ]
        write(tmp_path, [[{"type": "open"}, {"type": "mark", "mark": marks[0]}]])
        write(tmp_path, [[{"type": "mark", "mark": marks[1]}, {"type": "kv"}]])
        assert read_marks(tmp_path) == [
            Mark(t_ns=5, kind="run_started"),
            Mark(t_ns=9, kind="step", cycle=1, attrs={"step": 3}),
        ]

    def test_a_folder_without_a_journal_is_named(self, tmp_path: Path) -> None:
        with pytest.raises(StorageError, match=f"{tmp_path}: no journal there"):
            read_marks(tmp_path)


class TestDamage:
    @given(append_lists, st.data())
    @settings(max_examples=60, deadline=None)
    def test_a_cut_file_yields_the_appends_that_are_there_whole(
        self, appends: list[list[Record]], data: st.DataObject
    ) -> None:
        with tempfile.TemporaryDirectory(dir="/dev/shm") as folder:
            path, ends = write(Path(folder), appends)
            cut = data.draw(st.integers(0, ends[-1]))
            os.truncate(path, cut)
            whole = [r for records, end in zip(appends, ends, strict=True) if end <= cut for r in records]
            assert without_seq(read_epoch(path)) == whole

    @given(append_lists, st.data())
    @settings(max_examples=150, deadline=None)
    def test_a_changed_byte_yields_a_prefix_and_never_a_wrong_record(
        self, appends: list[list[Record]], data: st.DataObject
    ) -> None:
        with tempfile.TemporaryDirectory(dir="/dev/shm") as folder:
            path, ends = write(Path(folder), appends)
            content = bytearray(path.read_bytes())
            at = data.draw(st.integers(0, len(content) - 1))
            content[at] ^= data.draw(st.integers(1, 255))
            path.write_bytes(content)
            intact = [r for records, end in zip(appends, ends, strict=True) if end <= at for r in records]
            everything = [r for records in appends for r in records]
            got = without_seq(read_epoch(path))
            assert got[: len(intact)] == intact
            assert got == everything[: len(got)]

    def test_a_line_out_of_sequence_ends_the_epoch(self, tmp_path: Path) -> None:
        path, _ = write(tmp_path, [[{"n": 0}], [{"n": 1}], [{"n": 2}]])
        lines = path.read_bytes().splitlines(keepends=True)
        path.write_bytes(lines[0] + lines[2] + lines[1])
        assert without_seq(read_epoch(path)) == [{"n": 0}]

    def test_a_torn_epoch_does_not_hide_the_next(self, tmp_path: Path) -> None:
        path, ends = write(tmp_path, [[{"n": 0}], [{"n": 1}]])
        os.truncate(path, ends[1] - 1)
        write(tmp_path, [[{"n": 2}]])
        assert [r["n"] for r in read_records(tmp_path)] == [0, 2]


class TestFullDisk:
    def test_the_file_is_named_and_what_was_durable_stays(self, full_disk: Path) -> None:
        journal = Journal.claim(full_disk)
        kept: list[Record] = []
        big = {"text": "x" * 5000}
        with pytest.raises(StorageError, match=f"{journal.path}: cannot write the journal: No space left on device"):
            for n in range(100):
                journal.append([{"n": n}, big])
                kept += [{"n": n}, big]
        journal.close()
        assert 2 <= len(kept) < 40
        assert without_seq(read_epoch(journal.path)) == kept

    def test_a_claim_on_a_full_disk_names_the_folder(self, full_disk: Path) -> None:
        (full_disk / "journal").mkdir()
        with pytest.raises(OSError, match="No space left on device"):
            for n in range(100):
                (full_disk / f"{n}").touch()
        with pytest.raises(StorageError, match=f"{full_disk}/journal: cannot write the journal: No space left"):
            Journal.claim(full_disk)
        assert not epoch_path(full_disk, 1).exists()
