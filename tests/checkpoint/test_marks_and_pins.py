"""Marks outlive what they protect; pins are records that only somebody who may delete can take back."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import msgspec
import pytest

from keepstep.checkpoint.exchange import HighWater
from keepstep.checkpoint.format.layout import FolderName
from keepstep.checkpoint.keeping.pins import delete_pin, new_pin, read_pin, write_pin
from keepstep.checkpoint.restore.guard import JournalMarks
from keepstep.checkpoint.storage.posix import PosixRoot
from keepstep.checkpoint.trust.marks import (
    WHOLE_ROOT,
    file_marks,
    look_up_mark,
    marks_folder,
    root_id,
)
from keepstep.checkpoint.trust.rollback import Mark, Position
from keepstep.launcher import messages as m
from keepstep.launcher.coordination.highwater import raise_high_water
from keepstep.records.errors import ChannelError, StorageError
from keepstep.trainer.channel import MemoryChannel


def mark_at(step: int) -> Mark:
    at = Position(
        checkpoint=f"job7-step-{step:08d}-c0000-a0001",
        digest=f"{step:064x}",
        run="job7",
        step=step,
        cycle=0,
        attempt=1,
        life_started_ns=1,
        created_ns=step,
    )
    return Mark(at=at)


class JournalChannel(MemoryChannel):
    """Keeps marks by the coordinator's own rule and through its own messages, as JSON on the way."""

    def __init__(self) -> None:
        super().__init__()
        self.held: dict[str, m.HighWater] = {}
        self.records: list[dict[str, Any]] = []

    def mark_get(self, root_id: str) -> HighWater | None:
        held = self.held.get(root_id)
        return None if held is None else msgspec.json.decode(msgspec.json.encode(held), type=HighWater)

    def mark_set(self, root_id: str, mark: HighWater, rebase: str = "") -> None:
        sent = msgspec.json.decode(msgspec.json.encode(mark), type=m.HighWater)
        message = m.MarkSet(id=1, cycle=0, root_id=root_id, mark=sent, rebase=rebase)
        records, refused = raise_high_water(self.held, message, 1)
        if refused is not None:
            raise ChannelError(refused)
        self.records += records
        self.held |= {record["root_id"]: sent for record in records}


def id_file(root: Path) -> Path:
    return root / ".keepstep" / "root" / "id.json"


class TestMarks:
    def test_a_root_gets_one_id(self, root: Path) -> None:
        found = root_id(PosixRoot(root))
        assert len(found) == 32 and root_id(PosixRoot(root)) == found
        assert root_id(PosixRoot(root.with_name("other"))) != found

    def test_the_mark_is_kept_by_scope_and_may_move_back(self, root: Path) -> None:
        run, whole = (file_marks(PosixRoot(root), scope) for scope in ("job7", WHOLE_ROOT))
        assert run.get() is None
        run.put(mark_at(5))
        whole.put(mark_at(9))
        run.put(mark_at(3))
        assert (run.get(), whole.get()) == (mark_at(3), mark_at(9))
        assert file_marks(PosixRoot(root), "job7").get() == mark_at(3)
        assert [path.name for path in marks_folder().iterdir()] == [f"{root_id(PosixRoot(root))}.json"]

    def test_a_root_that_was_moved_is_known_by_its_id(self, root: Path) -> None:
        file_marks(PosixRoot(root), "job7").put(mark_at(5))
        moved = root.rename(root.with_name("moved"))
        assert file_marks(PosixRoot(moved), "job7").get() == mark_at(5)

    def test_a_root_that_was_replaced_is_known_by_its_place(self, root: Path) -> None:
        file_marks(PosixRoot(root), "job7").put(mark_at(5))
        id_file(root).unlink()
        marks = file_marks(PosixRoot(root), "job7")
        assert marks.get() == mark_at(5)
        # Once a mark is set again the place belongs to the new id alone.
        marks.put(mark_at(6))
        assert marks.get() == mark_at(6)
        texts = [path.read_text() for path in marks_folder().iterdir()]
        assert len(texts) == 2 and sum(str(root) in text for text in texts) == 1

    def test_the_id_of_another_root_does_not_hide_the_mark(self, root: Path) -> None:
        other = root.with_name("other")
        file_marks(PosixRoot(other), "job7").put(mark_at(1))
        file_marks(PosixRoot(root), "job7").put(mark_at(5))
        id_file(root).write_bytes(id_file(other).read_bytes())
        assert file_marks(PosixRoot(root), "job7").get() == mark_at(5)

    def test_a_copied_root_goes_its_own_way(self, root: Path) -> None:
        """Somebody branches off: what the original does from there on is no reason to refuse the copy."""
        file_marks(PosixRoot(root), "job7").put(mark_at(5))
        copy = root.with_name("copy")
        id_file(copy).parent.mkdir(parents=True)
        id_file(copy).write_bytes(id_file(root).read_bytes())
        marks = file_marks(PosixRoot(copy), "job7")
        assert marks.get() is None
        marks.put(mark_at(2))
        assert (marks.get(), file_marks(PosixRoot(root), "job7").get()) == (mark_at(2), mark_at(5))

    def test_a_link_to_the_root_is_the_same_place(self, root: Path) -> None:
        file_marks(PosixRoot(root), "job7").put(mark_at(5))
        id_file(root).unlink()
        link = root.with_name("link")
        link.symlink_to(root)
        assert look_up_mark(PosixRoot(link), "job7") == mark_at(5)

    def test_looking_writes_nothing(self, root: Path) -> None:
        assert look_up_mark(PosixRoot(root), "job7") is None
        assert not root.exists() and not marks_folder().exists()

    @pytest.mark.parametrize("content", [b"", b"{", b'{"root": "x"}'])
    def test_what_cannot_be_read_is_no_missing_mark(self, root: Path, content: bytes) -> None:
        marks = file_marks(PosixRoot(root), "job7")
        marks.put(mark_at(5))
        (path,) = marks_folder().iterdir()
        path.write_bytes(content)
        with pytest.raises(StorageError, match=r"\.json cannot be read .* not known which checkpoint is the newest"):
            marks.get()

    @pytest.mark.parametrize("content", [b"", b'{"id": "../../x"}', b'{"id": ""}', b'{"id": 5}'])
    def test_hostile_ids(self, root: Path, content: bytes) -> None:
        file_marks(PosixRoot(root), "job7").put(mark_at(5))
        id_file(root).write_bytes(content)
        with pytest.raises(StorageError, match=r"the root's id .*delete .keepstep/root/id.json"):
            root_id(PosixRoot(root))
        marks = file_marks(PosixRoot(root), "job7")
        assert marks.get() == mark_at(5)
        marks.put(mark_at(6))
        assert file_marks(PosixRoot(root), "job7").get() == mark_at(6)

    def test_a_root_that_takes_no_id_is_known_by_its_place(self, tmp_path: Path) -> None:
        blocked = tmp_path / "a-file"
        blocked.write_text("")
        marks = file_marks(PosixRoot(blocked / "root"), "job7")
        marks.put(mark_at(5))
        assert file_marks(PosixRoot(blocked / "root"), "job7").get() == mark_at(5)

    def test_the_journal_keeps_all_of_it(self, root: Path) -> None:
        channel = JournalChannel()
        marks = JournalMarks(channel, PosixRoot(root), "a-run-id-" + "x" * 119)
        assert marks.get() is None
        full = msgspec.structs.replace(mark_at(5), refused=("x",), used=("n",))
        marks.put(full)
        assert marks.get() == full
        assert JournalMarks(channel, PosixRoot(root), "job7").get() is None
        back = mark_at(3)
        marks.put(back)
        assert marks.get() == back
        assert channel.records[-1]["rebase"] == f"the job went back to {back.at.checkpoint}"

    def test_the_journal_goes_by_the_place_and_not_by_what_lies_in_it(self, root: Path) -> None:
        channel = JournalChannel()
        JournalMarks(channel, PosixRoot(root), "job7").put(mark_at(5))
        root_id(PosixRoot(root))
        id_file(root).unlink()
        assert JournalMarks(channel, PosixRoot(root), "job7").get() == mark_at(5)


class TestPins:
    NAME = FolderName(7, 0, 1, 0, "job7.v2")

    def test_a_pin_is_written_once_and_released(self, root: Path) -> None:
        place = PosixRoot(root)
        assert read_pin(place, self.NAME.text) is None
        pin = new_pin(self.NAME, reason="paper", by="me@host", now_ns=1_700_000_000_000_000_001)
        path = write_pin(place, pin)
        assert path == str(root / ".keepstep" / "pins" / f"{self.NAME.text}.json")
        assert read_pin(place, self.NAME.text) == pin and pin.time == "2023-11-14T22:13:20.000000001Z"
        with pytest.raises(StorageError, match="a record is written once"):
            write_pin(place, new_pin(self.NAME, reason="other", by="me@host", now_ns=2))
        delete_pin(place, self.NAME.text)
        delete_pin(place, self.NAME.text)
        assert read_pin(place, self.NAME.text) is None

    def test_a_record_that_cannot_be_read_still_pins(self, root: Path) -> None:
        PosixRoot(root).put_record("pins", self.NAME.text, b"{")
        pin = read_pin(PosixRoot(root), self.NAME.text)
        assert pin is not None and pin.reason == "its record cannot be read"
