"""Checkpoints in folders: what is read, what is refused, who commits, what is deleted, and the hint for Lustre."""

from __future__ import annotations

import os
import socket
import threading
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tests.checkpoint.support import flip_bit, run_ranks, save_steps

from keepstep.checkpoint.format.layout import (
    INDEX_NAME,
    MARKER_SIGNED,
    MARKER_UNSIGNED,
    MAX_MANIFEST_BYTES,
    SIDE_FOLDER,
    FolderName,
)
from keepstep.checkpoint.restore.verify import verify_checkpoint
from keepstep.checkpoint.storage import posix, readahead
from keepstep.checkpoint.storage.posix import LUSTRE_MAGIC, STRIPE_HINT, PosixFile, PosixRoot, filesystem_type
from keepstep.checkpoint.storage.readahead import read_ahead
from keepstep.checkpoint.storage.source import MAX_RECORD_BYTES, Deleter, Opened, Root, open_deleter, open_root
from keepstep.checkpoint.trust.keys import trusted_public_key
from keepstep.records.errors import ConfigError, StorageError, VerificationError

NAME = FolderName(1200, 3, 1, 0, "job7")


@pytest.fixture
def store(root: Path) -> PosixRoot:
    return PosixRoot(root)


def listing(root: Path) -> list[str]:
    return sorted(str(path.relative_to(root)) for path in root.rglob("*") if not path.is_dir())


# ---- reading


def test_what_was_written_is_what_is_read(store: PosixRoot, root: Path) -> None:
    assert store.folders() == [] and store.files("x") is None and store.marker("x") is None
    folder = store.make_folder(NAME)
    fact = store.put_file(folder, "a.bin", [b"abc", memoryview(b"defg")])
    assert (fact.name, fact.size_bytes) == ("a.bin", 7)
    assert store.folders() == [folder] and store.files(folder) == {"a.bin": 7} and store.marker(folder) is None
    store.publish(folder, MARKER_UNSIGNED, b"{}")
    assert store.marker(folder) == (MARKER_UNSIGNED, b"{}") and store.files(folder) == {"a.bin": 7}
    assert listing(root) == [f"{folder}/a.bin", f"{folder}/{MARKER_UNSIGNED}"]
    opened = store.open(folder, "a.bin")
    part = bytearray(3)
    opened.read_into(memoryview(part), 2)
    assert part == b"cde" and opened.size_bytes == 7
    opened.close()
    opened.close()


def test_signed_marker_wins_and_the_other_is_a_file_too_many(store: PosixRoot, root: Path) -> None:
    folder = store.make_folder(NAME)
    for marker in (MARKER_UNSIGNED, MARKER_SIGNED):
        (root / folder / marker).write_text(marker)
    assert store.marker(folder) == (MARKER_SIGNED, MARKER_SIGNED.encode())
    assert store.files(folder) == {MARKER_UNSIGNED: len(MARKER_UNSIGNED)}


def test_only_regular_files_are_read_and_nothing_blocks(
    store: PosixRoot, root: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = store.make_folder(NAME)
    path = root / folder
    (tmp_path / "outside").write_bytes(b"secret")
    (path / "link").symlink_to(tmp_path / "outside")
    (path / "dangling").symlink_to(tmp_path / "nowhere")
    (path / "folder").mkdir()
    os.mkfifo(path / "pipe")
    with socket.socket(socket.AF_UNIX) as listener:
        monkeypatch.chdir(path)  # the full path is too long for a socket
        listener.bind("socket")
        for name in ("link", "dangling", "folder", "pipe", "socket"):
            with pytest.raises(VerificationError, match=f"{name}: is not a regular file"):
                store.open(folder, name)
    found = store.files(folder)
    assert found is not None and set(found.values()) == {-1} and len(found) == 5
    with pytest.raises(VerificationError, match="gone: is missing"):
        store.open(folder, "gone")
    with pytest.raises(VerificationError, match="is not a plain file name"):
        store.open(folder, "../other")
    with pytest.raises(StorageError, match="is not the name of a folder under"):
        store.open("..", "x")


def test_marker_that_cannot_be_one_is_damage(store: PosixRoot, root: Path) -> None:
    folder = store.make_folder(NAME)
    marker = root / folder / MARKER_SIGNED
    marker.touch()
    os.truncate(marker, MAX_MANIFEST_BYTES + 1)
    with pytest.raises(VerificationError, match=f"{MAX_MANIFEST_BYTES + 1} bytes are over the limit"):
        store.marker(folder)
    marker.unlink()
    marker.symlink_to("/dev/zero")
    with pytest.raises(VerificationError, match="is not a regular file"):
        store.marker(folder)
    with pytest.raises(StorageError, match="another marker is there"):
        store.publish(folder, MARKER_UNSIGNED, b"{}")


def test_links_and_strangers_are_no_checkpoint_folders(store: PosixRoot, root: Path) -> None:
    folder = store.make_folder(NAME)
    (root / FolderName(9, 1, 1, 0, "job7").text).symlink_to(root / folder)
    (root / FolderName(8, 1, 1, 0, "job7").text).write_text("a file")
    (root / "other").mkdir()
    assert store.folders() == [folder]


def test_file_that_was_cut_after_it_was_opened(store: PosixRoot, root: Path) -> None:
    folder = store.make_folder(NAME)
    store.put_file(folder, "a.bin", [b"x" * 100])
    opened = store.open(folder, "a.bin")
    os.truncate(root / folder / "a.bin", 60)
    with pytest.raises(VerificationError, match=r"a\.bin: ends at byte 60, expected 90"):
        opened.read_into(memoryview(bytearray(50)), 40)
    opened.close()
    with pytest.raises(StorageError, match="cannot read"):
        opened.read_into(memoryview(bytearray(50)), 0)


def test_many_threads_read_one_file(store: PosixRoot) -> None:
    folder = store.make_folder(NAME)
    data = os.urandom(1 << 20)
    store.put_file(folder, "a.bin", [data])
    opened = store.open(folder, "a.bin")
    buffer = memoryview(bytearray(len(data)))
    step = len(data) // 16

    def read(part: int) -> None:
        for _ in range(20):
            opened.read_into(buffer[part * step : (part + 1) * step], part * step)

    assert run_ranks(16, read) == [None] * 16
    assert buffer == data
    opened.close()


# ---- writing


def test_every_writer_gets_a_folder_of_its_own(store: PosixRoot) -> None:
    names = run_ranks(8, lambda rank: store.make_folder(NAME))
    assert sorted(names) == [FolderName(1200, 3, 1, retry, "job7").text for retry in range(8)]


def test_nothing_is_overwritten(store: PosixRoot) -> None:
    folder = store.make_folder(NAME)
    fact = store.put_file(folder, "a.bin", [b"one"])
    with pytest.raises(StorageError, match=r"cannot create .*a\.bin: File exists"):
        store.put_file(folder, "a.bin", [b"one"])
    with pytest.raises(StorageError, match="its bytes changed while they were written"):
        store.put_file(folder, "b.bin", [b"two"], sha256=fact.sha256)
    store.publish(folder, MARKER_SIGNED, b"mine")
    store.publish(folder, MARKER_SIGNED, b"mine")
    for marker, data in ((MARKER_SIGNED, b"theirs"), (MARKER_UNSIGNED, b"mine")):
        with pytest.raises(StorageError, match=rf"another writer committed \({MARKER_SIGNED} is there"):
            store.publish(folder, marker, data)
    assert store.marker(folder) == (MARKER_SIGNED, b"mine")


def test_publish_that_is_not_permitted_leaves_nothing(store: PosixRoot, root: Path) -> None:
    folder = store.make_folder(NAME)

    def lease() -> None:
        raise StorageError("the lease has run out")

    with pytest.raises(StorageError, match="the lease has run out"):
        store.publish(folder, MARKER_SIGNED, b"{}", may_publish=lease)
    assert store.marker(folder) is None and listing(root) == []


def test_records_are_written_once_and_their_presence_counts(store: PosixRoot, root: Path) -> None:
    assert store.records("pins") == {} and store.record_names("pins") == frozenset()
    path = store.put_record("pins", "a.b", b"one")
    assert store.put_record("pins", "a.b", b"one") == path == str(root / SIDE_FOLDER / "pins" / "a.b.json")
    with pytest.raises(StorageError, match="is there with other content; a record is written once"):
        store.put_record("pins", "a.b", b"two")
    folder = root / SIDE_FOLDER / "pins"
    (folder / "broken.json").symlink_to("/nowhere")
    (folder / "huge.json").touch()
    os.truncate(folder / "huge.json", MAX_RECORD_BYTES + 1)
    (folder / ".half.json").write_text("being written")
    assert store.records("pins") == {"a.b": b"one", "broken": b"", "huge": b""}
    for kind, name in (("pins", "../x"), ("..", "x"), ("pins", ""), (".hidden", "x")):
        with pytest.raises(ConfigError, match="cannot name a side record"):
            store.put_record(kind, name, b"")


# ---- deleting


def test_marker_goes_first(store: PosixRoot, root: Path) -> None:
    deleter: Deleter = open_deleter(root)
    folder = store.make_folder(NAME)
    store.put_file(folder, "a.bin", [b"one"])
    store.publish(folder, MARKER_SIGNED, b"{}")
    with pytest.raises(StorageError, match="is committed; its files are not deleted before its marker"):
        deleter.delete_file(folder, "a.bin")
    with pytest.raises(StorageError, match="cannot remove"):
        deleter.remove_folder(folder)
    store.put_record("tombstones", folder, b"{}")
    for _ in range(2):  # what is gone already is no error: a prune that was cut short goes on
        deleter.delete_marker(folder)
        deleter.delete_file(folder, "a.bin")
        deleter.remove_folder(folder)
        deleter.delete_record("tombstones", folder)
    assert store.folders() == [] and listing(root) == []
    with pytest.raises(StorageError, match="it is not deleted"):
        deleter.delete_file(folder, "../x")


# ---- Lustre


@pytest.fixture
def on_lustre(root: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> PosixRoot:
    """A root that says it lies on Lustre; nothing but an empty folder is on PATH."""
    (tmp_path / "bin").mkdir()
    monkeypatch.setenv("PATH", str(tmp_path / "bin"))
    posix._say_once.cache_clear()
    return PosixRoot(root, lambda path: LUSTRE_MAGIC)


def make_lfs(tmp_path: Path, *, exit_code: int = 0) -> Path:
    """A stand-in for Lustre's own tool, which writes down its arguments; their file."""
    tool, said = tmp_path / "bin" / "lfs", tmp_path / "said"
    tool.write_text(f'#!/bin/sh\necho "$@" >> {said}\necho "no such pool" >&2\nexit {exit_code}\n')
    tool.chmod(0o755)
    return said


def test_folders_on_lustre_get_a_stripe_layout(
    on_lustre: PosixRoot, root: Path, tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    said = make_lfs(tmp_path)
    folders = [on_lustre.make_folder(NAME) for _ in range(2)]
    expected = [f"setstripe {' '.join(STRIPE_HINT)} {root / folder}" for folder in folders]
    assert said.read_text().splitlines() == expected
    layout = " ".join(STRIPE_HINT)
    assert capfd.readouterr().err == (
        f"keepstep: {root} is on Lustre: checkpoint folders get the stripe layout {layout}\n"
    )


@pytest.mark.parametrize("tool", ["missing", "failing"])
def test_stripe_layout_is_only_a_hint(
    on_lustre: PosixRoot, tool: str, tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    if tool == "failing":
        make_lfs(tmp_path, exit_code=3)
    folders = [on_lustre.make_folder(NAME) for _ in range(2)]
    assert set(on_lustre.folders()) == set(folders)
    (line,) = capfd.readouterr().err.splitlines()
    expected = "there is no `lfs`" if tool == "missing" else "failed and the default layout is used: no such pool"
    assert expected in line


def test_file_system_type_is_the_kernels_word(tmp_path: Path) -> None:
    assert filesystem_type(Path("/proc")) == 0x9FA0  # PROC_SUPER_MAGIC
    assert filesystem_type(tmp_path) not in (0, LUSTRE_MAGIC)
    assert filesystem_type(tmp_path / "nothing") == 0


# ---- reading ahead


class Bytes:
    """An Opened over bytes, which notes reads that overlap with a view still in the caller's hands."""

    def __init__(self, data: bytes) -> None:
        self.data = data
        self.size_bytes = len(data)
        self.closed = False
        self.late: list[int] = []

    def read_into(self, view: memoryview, offset: int) -> None:
        if self.closed:
            self.late.append(offset)
        view[:] = self.data[offset : offset + len(view)]

    def close(self) -> None:
        self.closed = True


@settings(max_examples=50, deadline=None)
@given(size=st.integers(0, 3000), chunk=st.integers(1, 900), depth=st.integers(1, 5), inline=st.sampled_from([0, 1000]))
def test_reading_ahead_gives_the_bytes_in_order(size: int, chunk: int, depth: int, inline: int) -> None:
    data = bytes(index * 7 % 251 for index in range(size))
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(readahead, "_INLINE_BYTES", inline)
        got = b"".join(bytes(view) for view in read_ahead(Bytes(data), chunk_bytes=chunk, depth=depth))
    assert got == data


def test_reading_ahead_stops_when_it_is_closed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(readahead, "_INLINE_BYTES", 0)
    opened = Bytes(bytes(10_000))
    reading = read_ahead(opened, chunk_bytes=10, depth=4)
    next(reading)
    reading.close()
    opened.close()
    assert opened.late == []
    assert not [thread for thread in threading.enumerate() if thread.name.startswith("keepstep-read")]


# ---- verification


class Watched:
    """A root whose reads wait until `together` files are being read at once, or fail."""

    def __init__(self, root: Root, together: int) -> None:
        self._root = root
        self._gate = threading.Barrier(together)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._root, name)

    def open(self, folder: str, name: str) -> Opened:
        if name != INDEX_NAME:
            self._gate.wait(timeout=20)
        return self._root.open(folder, name)


def test_files_are_verified_side_by_side(root: Path) -> None:
    (folder,) = save_steps(root, [7], world_size=3)
    counted: list[int] = []
    report = verify_checkpoint(
        Watched(open_root(root), 3),
        folder.name,
        trusted_key=trusted_public_key(),
        jobs=3,
        progress=counted.append,
    )
    assert report.ok, report.errors
    assert sum(counted) == sum(file.size_bytes for file in report.files)
    assert [file.name for file in report.files] == sorted(file.name for file in report.files)


@pytest.mark.parametrize("jobs", [1, 4])
def test_every_damaged_file_is_named_however_many_are_verified_at_once(root: Path, jobs: int) -> None:
    (folder,) = save_steps(root, [7], world_size=3)
    names = [f"rank-0000{rank}-of-00003.safetensors" for rank in range(3)]
    flip_bit(folder / names[0], -1)
    (folder / names[1]).unlink()
    report = verify_checkpoint(open_root(root), folder.name, trusted_key=trusted_public_key(), jobs=jobs)
    assert [file.name for file in report.files if file.error] == names[:2]
    assert len(report.errors) == 2 and not report.ok
    assert report.errors[0] == f"{names[1]}: is missing" and report.errors[1].startswith(f"{names[0]}: SHA-256 is ")


def test_file_that_cannot_be_read_ends_the_verification(root: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (folder,) = save_steps(root, [7], world_size=2)
    real = os.preadv

    def failing(fd: int, buffers: Any, offset: int) -> int:
        if "rank-00001" in str(Path(f"/proc/self/fd/{fd}").readlink()):
            raise OSError(5, "Input/output error")
        return real(fd, buffers, offset)

    monkeypatch.setattr(os, "preadv", failing)
    with pytest.raises(StorageError, match=r"cannot read .*rank-00001.*Input/output error \(EIO\)"):
        verify_checkpoint(open_root(root), folder.name, trusted_key=trusted_public_key(), jobs=2)


def test_open_root_gives_the_posix_root_for_a_path(root: Path) -> None:
    opened = open_root(root)
    assert isinstance(opened, PosixRoot) and opened.tier == "disk" and opened.where == str(root)
    folder = opened.make_folder(NAME)
    opened.put_file(folder, "a.bin", [b""])
    empty = opened.open(folder, "a.bin")
    assert isinstance(empty, PosixFile) and empty.size_bytes == 0
    empty.close()
