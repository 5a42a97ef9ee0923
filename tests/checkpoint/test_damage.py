"""A damaged file is named together with the blocks that are damaged, where it carries their digests."""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from msgspec import structs
from tests.checkpoint.support import flip_bit

from keepstep.checkpoint.format import blocks
from keepstep.checkpoint.format.blocks import digest_blocks, format_blocks_field
from keepstep.checkpoint.format.layout import INDEX_NAME, MARKER_UNSIGNED, FolderName
from keepstep.checkpoint.restore import damage
from keepstep.checkpoint.restore.verify import VerifyReport, verify_checkpoint
from keepstep.checkpoint.save.commit import writer_facts
from keepstep.checkpoint.storage.posix import PosixRoot
from keepstep.checkpoint.trust.manifest import build_statement

NAME = FolderName(1, 0, 1, 0, "job7")
FILE = "data.bin"


@pytest.fixture(autouse=True, scope="module")
def small_blocks() -> Iterator[int]:
    """Blocks of 1 KiB, so that a small file has many."""
    with pytest.MonkeyPatch.context() as patch:
        for module in (blocks, damage):
            patch.setattr(module, "BLOCK_BYTES", 1024)
        yield 1024


def committed(root: Path, body: bytes, *, algorithm: str = "blake3") -> Path:
    """An unsigned checkpoint whose one file ends in the digests of its blocks."""
    store = PosixRoot(root)
    digests = digest_blocks(memoryview(body), algorithm)
    folder = store.make_folder(NAME)
    fact = store.put_file(folder, FILE, [body, digests])
    blocks_field = format_blocks_field("blake3" if algorithm == "blake3" else "sha256", digests)
    files = [structs.replace(fact, blocks=blocks_field), store.put_file(folder, INDEX_NAME, [b"{}"])]
    facts = writer_facts(NAME, world=1, parent=None, restored_step=0, restored_from=None, scope=None, life_started_ns=5)
    store.publish(folder, MARKER_UNSIGNED, build_statement(folder, files, facts, marker=MARKER_UNSIGNED))
    return root / folder


def report_of(folder: Path, jobs: int = 3) -> VerifyReport:
    return verify_checkpoint(PosixRoot(folder.parent), folder.name, trusted_key=None, allow_unsigned=True, jobs=jobs)


@pytest.mark.parametrize("algorithm", ["blake3", "sha256"])
def test_flipped_bit_is_placed(root: Path, algorithm: str) -> None:
    folder = committed(root, os.urandom(10_300), algorithm=algorithm)
    assert report_of(folder).ok
    flip_bit(folder / FILE, 3 * 1024 + 17)
    report = report_of(folder)
    (error,) = report.errors
    assert error.startswith(f"{FILE}: SHA-256 is ") and error.endswith("; damaged: block 3 (bytes 3072 to 4095)")
    assert report.files[0].damaged == [3] and report.files[0].error == error
    flip_bit(folder / FILE, 3 * 1024 + 17)
    assert report_of(folder).ok


def test_many_places_are_put_into_ranges(root: Path) -> None:
    folder = committed(root, os.urandom(20_300))
    for block in (0, 1, 2, 5, 8, 10, 12, 19):
        flip_bit(folder / FILE, block * 1024 + 250)
    report = report_of(folder)
    assert report.files[0].damaged == [0, 1, 2, 5, 8, 10, 12, 19]
    assert report.errors[0].endswith(
        "damaged: blocks 0-2 (bytes 0 to 3071), block 5 (bytes 5120 to 6143), block 8 (bytes 8192 to 9215), "
        "block 10 (bytes 10240 to 11263) and 2 more places"
    )


def test_damaged_digests_are_not_believed(root: Path) -> None:
    folder = committed(root, os.urandom(10_300))
    flip_bit(folder / FILE, -5)
    report = report_of(folder)
    assert report.errors[0].endswith(
        "the digests of its blocks are damaged themselves: which blocks are cannot be told"
    )
    assert report.files[0].damaged == []


def test_package_that_is_missing_hides_the_place_but_not_the_damage(
    root: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = committed(root, os.urandom(10_300))
    flip_bit(folder / FILE, 5)
    monkeypatch.setattr(blocks, "_has", lambda package: False)
    (error,) = report_of(folder).errors
    assert error.startswith(f"{FILE}: SHA-256 is ") and "which blocks cannot be told" in error
    assert "pip install 'keepstep[checkpoint]'" in error


def test_file_of_another_size_is_not_looked_into(root: Path) -> None:
    folder = committed(root, os.urandom(10_300))
    size = (folder / FILE).stat().st_size
    os.truncate(folder / FILE, 4000)
    assert report_of(folder).errors == [f"{FILE}: has 4000 bytes, the manifest says {size}"]


@settings(max_examples=40, deadline=None)
@given(size=st.integers(1, 9000), data=st.data())
def test_exactly_the_changed_blocks_are_named(
    tmp_path_factory: pytest.TempPathFactory, size: int, data: st.DataObject
) -> None:
    body = bytes(index * 31 % 256 for index in range(size))
    folder = committed(tmp_path_factory.mktemp("r") / "root", body)
    places = data.draw(st.sets(st.integers(0, size - 1), min_size=1, max_size=6))
    for place in places:
        flip_bit(folder / FILE, place)
    report = report_of(folder)
    assert report.files[0].damaged == sorted({place // 1024 for place in places})
    assert not report.ok


def test_block_digests_are_no_substitute_for_the_whole_digest(root: Path) -> None:
    """A body that was replaced together with its digests is refused: the manifest names both."""
    folder = committed(root, os.urandom(10_300))
    other = os.urandom(10_300)
    (folder / FILE).write_bytes(other + digest_blocks(memoryview(other), "blake3"))
    report = report_of(folder)
    assert not report.ok and report.files[0].damaged == []
