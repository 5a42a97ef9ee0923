"""The write engine on real files and full disks: the same bytes by either way, nothing half done, no changed buffer unseen."""

from __future__ import annotations

import contextlib
import hashlib
import os
import resource
import subprocess
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from tests.checkpoint.images import Image, check_written, image_of
from tests.disks import small_tmpfs

from keepstep.checkpoint.format.blocks import BLOCK_BYTES, fingerprint_blocks
from keepstep.checkpoint.save.sealing import Sealing, seal_buffer, write_buffer
from keepstep.checkpoint.storage.engine import write_image
from keepstep.checkpoint.storage.targets import Fault, PosixFile, PosixTarget, open_target
from keepstep.checkpoint.storage.writer import FileFact
from keepstep.records.errors import StorageError, VerificationError

MIB = 1 << 20


def write(image: Image, path: Path, *, direct: bool = True, fault: Fault | None = None) -> FileFact:
    """Seal and write."""
    return write_buffer(image.fd, image.file_bytes, PosixFile(path=str(path), direct=direct), None, fault)


@contextlib.contextmanager
def ramfs(place: Path) -> Iterator[Path]:
    """A file system that refuses O_DIRECT."""
    if os.geteuid() != 0:
        pytest.skip("mounting a ramfs needs root (run the tests as root)")
    place.mkdir()
    if subprocess.run(["mount", "-t", "ramfs", "ramfs", str(place)], check=False, capture_output=True).returncode:
        pytest.skip("cannot mount a ramfs here")
    try:
        yield place
    finally:
        subprocess.run(["umount", str(place)], check=True)


@pytest.mark.parametrize("body", [1, 4096, MIB, 2 * MIB + 1, BLOCK_BYTES, 2 * BLOCK_BYTES - 20, 2 * BLOCK_BYTES + 5000])
def test_both_ways_make_the_same_file(tmp_path: Path, body: int) -> None:
    with image_of(body) as image:
        direct = write(image, tmp_path / "direct")
        check_written(tmp_path / "direct", direct, image)
        buffered = write(image, tmp_path / "buffered", direct=False)
        check_written(tmp_path / "buffered", buffered, image)
        assert (direct.sha256, direct.blocks) == (buffered.sha256, buffered.blocks)


def test_large_file_goes_past_the_page_cache_where_the_file_system_can(tmp_path: Path) -> None:
    with image_of(2 * MIB) as image, image.view() as view:
        target = PosixTarget(PosixFile(path=str(tmp_path / "f")), len(view))
        if not target.direct:
            pytest.skip("no O_DIRECT here")
        target.write(view[: 2 * MIB], 0)
        target.write(view[2 * MIB :], 2 * MIB)
        assert [target.direct] == [False], "the tail of 32 bytes goes through the page cache"
        target.finish()
        assert (tmp_path / "f").read_bytes() == view


def test_file_system_without_direct_writes(tmp_path: Path) -> None:
    with ramfs(tmp_path / "ram") as place, image_of(2 * MIB) as image:
        target = PosixTarget(PosixFile(path=str(place / "try")), 2 * MIB)
        assert not target.direct
        target.abort()
        check_written(place / "f", write(image, place / "f"), image)


def test_buffer_that_direct_writes_cannot_take(tmp_path: Path) -> None:
    data = memoryview(os.urandom(2 * MIB + 1))[1:]
    algorithm, prints = fingerprint_blocks(data)
    target = PosixTarget(PosixFile(path=str(tmp_path / "f")), len(data))
    fact = write_image(target, data, fingerprint=lambda number: prints, algorithm=algorithm)
    assert (tmp_path / "f").read_bytes() == data
    assert fact == FileFact(name="f", size_bytes=2 * MIB, sha256=hashlib.sha256(data).hexdigest())


@pytest.mark.parametrize("threads", [1, 3])
def test_sealing_is_the_same_with_any_number_of_threads(threads: int) -> None:
    with image_of(3 * BLOCK_BYTES + 77) as image:
        alone = seal_buffer(image.fd, image.file_bytes)
        digests = image.room[-128:]
        image.room[-128:] = bytes(128)
        with image.view() as view:
            sealing = Sealing(view, threads=threads)
            assert sealing.result() == alone
            sealing.stop()
            assert (alone.algorithm, alone.fingerprints) == fingerprint_blocks(view)
        assert image.room[-128:] == digests


def test_full_disk_is_known_before_the_first_byte_and_stays_usable(tmp_path: Path) -> None:
    with small_tmpfs(tmp_path / "small", "size=4m") as place, image_of(8 * MIB) as image:
        with pytest.raises(StorageError, match=r"cannot write .*/big: No space left on device \(ENOSPC\); free space"):
            write(image, place / "big")
        assert list(place.iterdir()) == []
        with image_of(2 * MIB) as smaller:
            check_written(place / "f", write(smaller, place / "f"), smaller)


def test_write_cut_short_by_a_limit_is_an_error(tmp_path: Path) -> None:
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    with image_of(BLOCK_BYTES + MIB) as image:
        resource.setrlimit(resource.RLIMIT_FSIZE, (BLOCK_BYTES + 4096, hard))
        try:
            with pytest.raises(StorageError, match=r"cannot write .*/big: File too large \(EFBIG\)"):
                write(image, tmp_path / "big")
        finally:
            resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))
    assert not (tmp_path / "big").exists()


def test_nothing_is_ever_overwritten_or_removed(tmp_path: Path) -> None:
    (tmp_path / "f").write_bytes(b"old")
    (tmp_path / "link").symlink_to(tmp_path / "elsewhere")
    with image_of(MIB) as image:
        for name in ("f", "link"):
            with pytest.raises(StorageError, match=rf"cannot create .*/{name}: "):
                write(image, tmp_path / name)
        with pytest.raises(StorageError, match=r"cannot create .*No such file"):
            write(image, tmp_path / "nowhere" / "f")
    assert (tmp_path / "f").read_bytes() == b"old"
    assert (tmp_path / "link").is_symlink()
    assert not (tmp_path / "elsewhere").exists()


class Meddler:
    """A target during whose write of one block another thread changes a byte of the staging buffer."""

    def __init__(self, target: PosixTarget, at_block: int, change: Callable[[], None]) -> None:
        self.name = target.name
        self.sync, self.finish, self.abort = target.sync, target.finish, target.abort
        self._target, self._at_block, self._change = target, at_block, change

    def write(self, view: memoryview, offset: int) -> None:
        """Write; at the chosen block the buffer has changed when the write is over."""
        self._target.write(view, offset)
        if offset == self._at_block * BLOCK_BYTES:
            thread = threading.Thread(target=self._change)
            thread.start()
            thread.join()


@pytest.mark.parametrize(("at_block", "at_byte"), [(0, 5), (1, BLOCK_BYTES), (2, 2 * BLOCK_BYTES + 100)])
def test_buffer_that_changes_during_the_write_fails_the_save(tmp_path: Path, at_block: int, at_byte: int) -> None:
    with image_of(2 * BLOCK_BYTES + 4096) as image:
        sealed = seal_buffer(image.fd, image.file_bytes)
        target = PosixTarget(PosixFile(path=str(tmp_path / "f")), image.file_bytes)
        meddler = Meddler(target, at_block, lambda: image.change(at_byte))
        with image.view() as view, pytest.raises(StorageError, match=f"f: staging buffer changed.*: block {at_block}$"):
            write_image(meddler, view, fingerprint=sealed.fingerprint, algorithm=sealed.algorithm)
    assert not (tmp_path / "f").exists()


def test_buffer_that_changed_before_the_write_fails_the_save(tmp_path: Path) -> None:
    with image_of(BLOCK_BYTES + 4096) as image:
        sealed = seal_buffer(image.fd, image.file_bytes)
        image.change(BLOCK_BYTES + 9)
        with pytest.raises(StorageError, match="staging buffer changed while it was written: block 1"):
            write_buffer(image.fd, image.file_bytes, PosixFile(path=str(tmp_path / "f")), sealed)
        assert not (tmp_path / "f").exists()
        image.change(BLOCK_BYTES + 9)
        fact = write_buffer(image.fd, image.file_bytes, PosixFile(path=str(tmp_path / "f")), sealed)
        check_written(tmp_path / "f", fact, image)


def test_fingerprints_of_another_image_are_refused(tmp_path: Path) -> None:
    with image_of(5000) as one, image_of(6000) as other:
        sealed = seal_buffer(other.fd, other.file_bytes)
        with pytest.raises(StorageError, match="fingerprints of another"):
            write_buffer(one.fd, one.file_bytes, PosixFile(path=str(tmp_path / "f")), sealed)


def test_impossible_sizes_are_refused(tmp_path: Path) -> None:
    with image_of(5000) as image:
        with pytest.raises(VerificationError, match="20 bytes cannot end in digests"):
            seal_buffer(image.fd, 20)
        for size in (0, 1 << 30):
            with pytest.raises(StorageError, match=f"an image of {size} bytes cannot lie in a buffer of"):
                seal_buffer(image.fd, size)


@pytest.mark.parametrize("at_byte", [0, 10_000, BLOCK_BYTES + 5])
def test_injected_error_fails_at_its_byte(tmp_path: Path, at_byte: int) -> None:
    with image_of(BLOCK_BYTES + MIB) as image:
        with pytest.raises(StorageError, match=r"cannot write .*/f: Input/output error.*\(EIO\)"):
            write(image, tmp_path / "f", fault=Fault(kind="storage-error", at_byte=at_byte))
        assert not (tmp_path / "f").exists()
        target = open_target(
            PosixFile(path=str(tmp_path / "g")), image.file_bytes, Fault(kind="storage-error", at_byte=at_byte)
        )
        with image.view() as view, pytest.raises(StorageError):
            target.write(view, 0)
        assert (tmp_path / "g").stat().st_size == at_byte - at_byte % 4096


def test_injected_stall_delays_the_write(tmp_path: Path) -> None:
    with image_of(5000) as image:
        begin = time.monotonic()
        fact = write(image, tmp_path / "f", fault=Fault(kind="storage-stall", seconds=0.3))
        assert time.monotonic() - begin >= 0.3
        check_written(tmp_path / "f", fact, image)
