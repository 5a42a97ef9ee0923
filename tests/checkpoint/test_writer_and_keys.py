"""The streaming writer on real full disks, and the signing key that several ranks make at once."""

from __future__ import annotations

import hashlib
import multiprocessing
import os
import resource
import stat
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest
from tests.disks import small_tmpfs

from keepstep.checkpoint.storage.writer import Hasher, replace_file, write_file
from keepstep.checkpoint.trust.keys import key_path, load_public_key, public_key_path, public_pem, signing_key
from keepstep.records.errors import ConfigError, StorageError


@contextmanager
def file_size_limit(size_bytes: int) -> Iterator[None]:
    """Writes beyond `size_bytes` of any file fail with EFBIG (Python ignores SIGXFSZ)."""
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (size_bytes, hard))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))


@pytest.fixture
def small_disk(tmp_path: Path) -> Iterator[Path]:
    """A file system of 1 MiB."""
    with small_tmpfs(tmp_path / "small", "size=1m") as place:
        yield place


@pytest.mark.parametrize("size", [0, 1, 4096, (1 << 20) + 1, 3_000_001])
def test_file_and_digest_are_of_the_bytes_handed_in(tmp_path: Path, size: int) -> None:
    data = os.urandom(size)
    fact = write_file(tmp_path / "f", [data[:10], memoryview(data)[10:]], chunk_bytes=1 << 16)
    assert (tmp_path / "f").read_bytes() == data
    assert (fact.name, fact.size_bytes, fact.sha256) == ("f", size, hashlib.sha256(data).hexdigest())


def test_nothing_is_ever_overwritten(tmp_path: Path) -> None:
    (tmp_path / "f").write_bytes(b"old")
    with pytest.raises(StorageError, match=r"cannot create .*/f: File exists"):
        write_file(tmp_path / "f", [b"new"])
    (tmp_path / "link").symlink_to(tmp_path / "elsewhere")
    with pytest.raises(StorageError):
        write_file(tmp_path / "link", [b"new"])
    assert (tmp_path / "f").read_bytes() == b"old"
    assert not (tmp_path / "elsewhere").exists()


@pytest.mark.parametrize("size", [900_000, 8_000_000])
def test_full_disk_names_the_file_and_the_reason(small_disk: Path, size: int) -> None:
    (small_disk / "filler").write_bytes(b"x" * 500_000)
    with pytest.raises(StorageError, match=r"cannot write .*/big: No space left on device \(ENOSPC\); free space"):
        write_file(small_disk / "big", [b"y" * size])


def test_write_cut_short_by_a_limit_is_an_error(tmp_path: Path) -> None:
    with file_size_limit(1 << 20), pytest.raises(StorageError, match=r"cannot write .*/big: File too large"):
        write_file(tmp_path / "big", [b"y" * (2 << 20)])


def test_replace_leaves_the_old_file_and_no_rubbish_on_a_full_disk(small_disk: Path) -> None:
    (small_disk / "f").write_bytes(b"old")
    with pytest.raises(StorageError):
        replace_file(small_disk / "f", b"n" * 2_000_000)
    assert [path.name for path in small_disk.iterdir()] == ["f"]
    assert (small_disk / "f").read_bytes() == b"old"
    replace_file(small_disk / "f", b"new")
    assert (small_disk / "f").read_bytes() == b"new"


def test_error_on_the_hashing_thread_surfaces() -> None:
    hasher = Hasher()
    view = memoryview(bytearray(10))
    hasher._digest.update(b"")
    hasher.update(view[::2])  # not contiguous: hashlib refuses it, on the other thread
    for _ in range(8):
        try:
            hasher.update(memoryview(b"more"))  # never blocks although the other side is broken
        except RuntimeError:
            break
    with pytest.raises(RuntimeError, match="hashing failed"):
        hasher.hexdigest()


def test_key_is_made_once_private_and_readable_as_pem(keepstep_home: Path) -> None:
    key = signing_key()
    assert key_path() == keepstep_home / "keys" / "ckpt-p256.pem"
    assert stat.S_IMODE(key_path().stat().st_mode) == 0o600
    assert public_pem(signing_key().public_key()) == public_pem(key.public_key())
    assert public_key_path().read_bytes() == public_pem(key.public_key())
    assert public_pem(load_public_key(public_key_path())) == public_pem(key.public_key())
    assert sorted(path.name for path in key_path().parent.iterdir()) == ["ckpt-p256.pem", "ckpt-p256.pub"]


def _make(home: str, answers: multiprocessing.queues.Queue[bytes]) -> None:
    os.environ["KEEPSTEP_HOME"] = home
    answers.put(public_pem(signing_key().public_key()))


def test_ranks_that_start_at_once_agree_on_one_key(keepstep_home: Path) -> None:
    context = multiprocessing.get_context("fork")
    answers: multiprocessing.queues.Queue[bytes] = context.Queue()
    ranks = [context.Process(target=_make, args=(str(keepstep_home), answers)) for _ in range(6)]
    for rank in ranks:
        rank.start()
    keys = {answers.get(timeout=20) for _ in ranks}
    for rank in ranks:
        rank.join(20)
        assert rank.exitcode == 0
    assert keys == {public_key_path().read_bytes()}


def test_other_keys_are_refused(keepstep_home: Path) -> None:
    from cryptography.hazmat.primitives import serialization
    from cryptography.hazmat.primitives.asymmetric import ec

    key_path().parent.mkdir(parents=True)
    key_path().write_bytes(b"not a key")
    with pytest.raises(ConfigError, match="not an unencrypted PEM"):
        signing_key()
    key_path().write_bytes(
        ec.generate_private_key(ec.SECP384R1()).private_bytes(
            serialization.Encoding.PEM, serialization.PrivateFormat.PKCS8, serialization.NoEncryption()
        )
    )
    with pytest.raises(ConfigError, match="not a P-256 key"):
        signing_key()
