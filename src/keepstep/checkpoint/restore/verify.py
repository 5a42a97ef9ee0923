"""Verification of a checkpoint folder: signature, then presence and sizes, then the bytes, and only then parsing.

A reader parses the very buffer whose digest was compared, so nothing can change between check and use.
"""

from __future__ import annotations

import errno
import hashlib
import mmap
import os
import stat
from pathlib import Path
from typing import TYPE_CHECKING

import msgspec

from keepstep.checkpoint.format.layout import INDEX_NAME, MARKER_SIGNED, MARKERS, MAX_MANIFEST_BYTES, parse_folder_name
from keepstep.checkpoint.format.shard import parse_header
from keepstep.checkpoint.storage.writer import CHUNK_BYTES, FileFact, Hasher, storage_error
from keepstep.checkpoint.trust.manifest import Manifest, parse_manifest
from keepstep.records.errors import VerificationError

if TYPE_CHECKING:
    from cryptography.hazmat.primitives.asymmetric.ec import EllipticCurvePublicKey

_INLINE_BYTES = 1 << 20


class FileReport(msgspec.Struct, frozen=True, kw_only=True):
    """What verification found about one file; `error` is None when it is as the manifest says."""

    name: str
    size_bytes: int
    sha256: str
    error: str | None = None


class VerifyReport(msgspec.Struct, frozen=True, kw_only=True):
    """`keepstep.verify/1`: result of verifying one checkpoint folder. `ok` is True when nothing differed."""

    schema: str = "keepstep.verify/1"
    checkpoint: str
    ok: bool
    signed: bool
    step: int | None
    key_sha256: str | None
    digest: str | None
    errors: list[str]
    files: list[FileReport]


def find_marker(folder: Path) -> str | None:
    """Name of the commit marker in `folder`, None when the checkpoint is not committed. Signed wins over unsigned."""
    for marker in MARKERS:
        if (folder / marker).is_file():
            return marker
    return None


def read_manifest(
    folder: Path,
    *,
    trusted_key: EllipticCurvePublicKey | None,
    allow_unsigned: bool = False,
    expected_digest: str | None = None,
) -> Manifest:
    """Read and check the manifest of `folder`, and that it speaks of this folder. Raises VerificationError or
    StorageError.

    `expected_digest`: SHA-256 the marker file must have, from somebody who checked its signature.
    """
    marker = find_marker(folder)
    if marker is None:
        raise VerificationError(f"{folder.name}: no manifest, the checkpoint is not committed")
    data = bytes(_read_whole(folder, marker, None, MAX_MANIFEST_BYTES, expected_digest))
    manifest = parse_manifest(data, marker, trusted_key=trusted_key, allow_unsigned=allow_unsigned)
    name, facts = parse_folder_name(folder.name), manifest.facts
    if name is not None:
        if facts is None:
            raise VerificationError(f"{marker}: has no keepstep facts")
        if (facts.run, facts.step, facts.cycle, facts.attempt) != (name.run_id, name.step, name.cycle, name.attempt):
            raise VerificationError(
                f"{marker}: speaks of run {facts.run} step {facts.step} cycle {facts.cycle} attempt {facts.attempt}, "
                f"not of {folder.name}"
            )
    return manifest


def check_files(folder: Path, manifest: Manifest) -> None:
    """Every listed file is there with its size, as a regular file, and nothing else is. Raises VerificationError."""
    for problem in _file_problems(folder, manifest):
        raise VerificationError(problem)


def _file_problems(folder: Path, manifest: Manifest) -> list[str]:
    expected = {file.name: file for file in manifest.files}
    marker = find_marker(folder)
    problems = []
    try:
        with os.scandir(folder) as entries:
            found = {entry.name: entry.stat(follow_symlinks=False) for entry in entries}
    except FileNotFoundError:
        return [f"{folder.name}: the folder is gone"]
    except OSError as error:
        raise storage_error("list", folder, error) from error
    for name in sorted(set(found) - set(expected) - {marker}):
        problems.append(f"{name}: is not listed in the manifest")
    for name, file in expected.items():
        status = found.get(name)
        if status is None:
            problems.append(f"{name}: is missing")
        elif not stat.S_ISREG(status.st_mode):
            problems.append(f"{name}: is not a regular file")
        elif file.size_bytes >= 0 and status.st_size != file.size_bytes:
            problems.append(f"{name}: has {status.st_size} bytes, the manifest says {file.size_bytes}")
    return problems


def _open(folder: Path, name: str) -> tuple[int, int]:
    """Descriptor and size of a regular file in `folder`; never follows a link, never blocks on a pipe."""
    try:
        fd = os.open(folder / name, os.O_RDONLY | os.O_NOFOLLOW | os.O_CLOEXEC | os.O_NONBLOCK)
    except FileNotFoundError:
        raise VerificationError(f"{name}: is missing") from None
    except OSError as error:
        if error.errno in (errno.ELOOP, errno.ENXIO):  # a link, a socket
            raise VerificationError(f"{name}: is not a regular file") from None
        raise storage_error("open", folder / name, error) from error
    status = os.fstat(fd)
    if not stat.S_ISREG(status.st_mode):
        os.close(fd)
        raise VerificationError(f"{name}: is not a regular file")
    return fd, status.st_size


def _read_whole(
    folder: Path, name: str, size_bytes: int | None, limit_bytes: int, sha256: str | None = None
) -> memoryview:
    fd, actual = _open(folder, name)
    try:
        if size_bytes is not None and actual != size_bytes:
            raise VerificationError(f"{name}: has {actual} bytes, the manifest says {size_bytes}")
        if actual > limit_bytes:
            raise VerificationError(f"{name}: {actual} bytes are over the limit of {limit_bytes}")
        # An anonymous map is page-aligned and goes back to the system as soon as it is dropped.
        buffer = memoryview(mmap.mmap(-1, actual)) if actual else memoryview(b"")
        hasher = Hasher() if sha256 is not None and actual > _INLINE_BYTES else None
        at = 0
        try:
            while at < actual:
                count = os.preadv(fd, [buffer[at : at + CHUNK_BYTES]], at)
                if count == 0:
                    raise VerificationError(f"{name}: ends at byte {at}, the manifest says {actual}")
                if hasher is not None:
                    hasher.update(buffer[at : at + count])
                at += count
            if sha256 is not None:
                digest = hasher.hexdigest() if hasher is not None else hashlib.sha256(buffer).hexdigest()
                _compare(name, digest, sha256)
        finally:
            if hasher is not None:
                hasher.close()
        return buffer
    except OSError as error:
        raise storage_error("read", folder / name, error) from error
    finally:
        os.close(fd)


def _compare(name: str, digest: str, expected: str) -> None:
    if digest != expected:
        raise VerificationError(f"{name}: SHA-256 is {digest[:16]}..., the manifest says {expected[:16]}...")


def read_verified(folder: Path, file: FileFact) -> memoryview:
    """All bytes of `file`, in memory, after their SHA-256 was compared. Raises VerificationError or StorageError."""
    size = file.size_bytes if file.size_bytes >= 0 else None
    return _read_whole(folder, file.name, size, 1 << 62, file.sha256)


def check_file(folder: Path, file: FileFact) -> None:
    """Compare size and SHA-256 of `file` without holding it in memory; check a shard's header too.

    Raises VerificationError or StorageError.
    """
    fd, actual = _open(folder, file.name)
    try:
        if file.size_bytes >= 0 and actual != file.size_bytes:
            raise VerificationError(f"{file.name}: has {actual} bytes, the manifest says {file.size_bytes}")
        digest, at = hashlib.sha256(), 0
        buffer = bytearray(min(CHUNK_BYTES, max(actual, 1)))
        head = b""
        while count := os.preadv(fd, [buffer], at):
            digest.update(memoryview(buffer)[:count])
            if at == 0:
                head = bytes(buffer[:count])
            at += count
        _compare(file.name, digest.hexdigest(), file.sha256)
        if file.name.endswith(".safetensors"):
            _check_header(fd, file.name, head, actual)
    except OSError as error:
        raise storage_error("read", folder / file.name, error) from error
    finally:
        os.close(fd)


def _check_header(fd: int, name: str, head: bytes, size_bytes: int) -> None:
    need = 8 + int.from_bytes(head[:8], "little")
    if len(head) < need <= size_bytes and need <= 8 + 100_000_000:
        head = os.pread(fd, need, 0)  # a header longer than the first chunk; its bytes were hashed a moment ago
    parse_header(head, size_bytes, name)


def verify_checkpoint(
    folder: Path,
    *,
    trusted_key: EllipticCurvePublicKey | None,
    allow_unsigned: bool = False,
) -> VerifyReport:
    """Verify all of `folder` and say everything that differs; never raises VerificationError.

    `trusted_key` None skips the check of the signature (and `signed` then says only that there is one). Raises
    StorageError when something cannot be read at all.
    """
    try:
        manifest = read_manifest(folder, trusted_key=trusted_key, allow_unsigned=allow_unsigned)
    except VerificationError as error:
        return VerifyReport(
            checkpoint=folder.name,
            ok=False,
            signed=find_marker(folder) == MARKER_SIGNED,
            step=None,
            key_sha256=None,
            digest=None,
            errors=[str(error)],
            files=[],
        )
    errors = _file_problems(folder, manifest)
    if manifest.facts is not None and INDEX_NAME not in {file.name for file in manifest.files}:
        errors.append(f"{INDEX_NAME}: is not listed in the manifest")
    files = []
    for file in manifest.files:
        problem = None
        try:
            check_file(folder, file)
        except VerificationError as error:
            problem = str(error)
            if problem not in errors:
                errors.append(problem)
        files.append(FileReport(name=file.name, size_bytes=file.size_bytes, sha256=file.sha256, error=problem))
    return VerifyReport(
        checkpoint=folder.name,
        ok=not errors,
        signed=manifest.signed,
        step=manifest.facts.step if manifest.facts else None,
        key_sha256=manifest.key_sha256,
        digest=manifest.digest,
        errors=errors,
        files=files,
    )
