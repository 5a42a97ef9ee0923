"""Verification of a checkpoint folder: signature, then presence and sizes, then the bytes, and only then parsing.

A reader parses the very buffer whose digest was compared, so nothing can change between check and use.
"""

from __future__ import annotations

import hashlib
import os
import threading
from collections.abc import Callable, Collection
from concurrent.futures import ThreadPoolExecutor
from contextlib import closing
from typing import TYPE_CHECKING

import msgspec

from keepstep.checkpoint.format.layout import INDEX_NAME, MARKER_SIGNED, parse_folder_name
from keepstep.checkpoint.format.shard import parse_header
from keepstep.checkpoint.restore.damage import find_damage
from keepstep.checkpoint.storage.posix import PosixFile
from keepstep.checkpoint.storage.readahead import read_ahead
from keepstep.checkpoint.storage.source import Opened, Source
from keepstep.checkpoint.storage.writer import FileFact
from keepstep.checkpoint.trust.manifest import Manifest, parse_manifest
from keepstep.checkpoint.trust.policy import TrustPolicy, check_manifest
from keepstep.records.errors import VerificationError

if TYPE_CHECKING:
    from cryptography.hazmat.primitives.asymmetric.ec import EllipticCurvePublicKey

CHUNK_BYTES = 8 << 20
_AHEAD = {"shm": 1, "disk": 2, "peer": 2, "object": 4}  # chunks being read while one is hashed


class DamagedError(VerificationError):
    """Raised when a file's bytes are not those of the manifest. `blocks`: numbers of the damaged ones, where they can be told."""

    def __init__(self, message: str, blocks: list[int]) -> None:
        super().__init__(message)
        self.blocks = blocks


class FileReport(msgspec.Struct, frozen=True, kw_only=True):
    """What verification found about one file; `error` is None when it is as the manifest says.

    `damaged`: numbers of the blocks that differ, where the file carries block digests and they could tell.
    """

    name: str
    size_bytes: int
    sha256: str
    error: str | None = None
    damaged: list[int] = []


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


def read_manifest(
    source: Source,
    folder: str,
    *,
    trusted_key: EllipticCurvePublicKey | None,
    allow_unsigned: bool = False,
    expected_digest: str | None = None,
) -> Manifest:
    """Read and check the manifest of `folder`, and that it speaks of this folder. Raises VerificationError or
    StorageError.

    `expected_digest`: SHA-256 the marker file must have, from somebody who checked its signature.
    """
    found = source.marker(folder)
    if found is None:
        raise VerificationError(f"{folder}: no manifest, the checkpoint is not committed")
    marker, data = found
    if expected_digest is not None:
        _compare(marker, hashlib.sha256(data).hexdigest(), expected_digest)
    return check_marker(folder, marker, data, trusted_key=trusted_key, allow_unsigned=allow_unsigned)


def check_marker(
    folder: str,
    marker: str,
    data: bytes,
    *,
    trusted_key: EllipticCurvePublicKey | None = None,
    allow_unsigned: bool = False,
    policy: TrustPolicy | None = None,
) -> Manifest:
    """The manifest in `data`, the content of `marker`, which must speak of `folder`. Raises VerificationError.

    With `policy` that decides who is trusted, and not `trusted_key` and `allow_unsigned`.
    """
    if policy is not None:
        manifest = check_manifest(data, marker, policy)
    else:
        manifest = parse_manifest(data, marker, trusted_key=trusted_key, allow_unsigned=allow_unsigned)
    name, facts = parse_folder_name(folder), manifest.facts
    if name is not None:
        if facts is None:
            raise VerificationError(f"{marker}: has no keepstep facts")
        if (facts.run, facts.step, facts.cycle, facts.attempt) != (name.run_id, name.step, name.cycle, name.attempt):
            raise VerificationError(
                f"{marker}: speaks of run {facts.run} step {facts.step} cycle {facts.cycle} attempt {facts.attempt}, "
                f"not of {folder}"
            )
    return manifest


def check_files(source: Source, folder: str, manifest: Manifest) -> None:
    """Every listed file is there with its size, as a regular file, and nothing else is. Raises VerificationError."""
    for problem in _file_problems(source, folder, manifest):
        raise VerificationError(problem)


def _file_problems(source: Source, folder: str, manifest: Manifest) -> list[str]:
    expected = {file.name: file for file in manifest.files}
    found = source.files(folder)
    if found is None:
        return [f"{folder}: the folder is gone"]
    problems = [f"{name}: is not listed in the manifest" for name in sorted(set(found) - set(expected))]
    for name, file in expected.items():
        size = found.get(name)
        if size is None:
            problems.append(f"{name}: is missing")
        elif size < 0:
            problems.append(f"{name}: is not a regular file")
        elif file.size_bytes >= 0 and size != file.size_bytes:
            problems.append(_size_problem(file, size))
    return problems


def _size_problem(file: FileFact, size_bytes: int) -> str:
    return f"{file.name}: has {size_bytes} bytes, the manifest says {file.size_bytes}"


def _check_size(file: FileFact, opened: Opened) -> None:
    if file.size_bytes >= 0 and opened.size_bytes != file.size_bytes:
        raise VerificationError(_size_problem(file, opened.size_bytes))


def _compare(name: str, digest: str, expected: str) -> None:
    if digest != expected:
        raise VerificationError(f"{name}: SHA-256 is {digest[:16]}..., the manifest says {expected[:16]}...")


def check_file(
    source: Source, folder: str, file: FileFact, *, jobs: int = 1, progress: Callable[[int], None] = lambda _: None
) -> None:
    """Compare size and SHA-256 of `file` without holding it in memory; check a shard's header too.

    `progress` is told the number of bytes of each chunk that was hashed. Raises VerificationError or StorageError; when the
    bytes differ and the file has block digests, the DamagedError says where (`jobs` blocks are looked at together).
    """
    opened = source.open(folder, file.name)
    try:
        _check_size(file, opened)
        if isinstance(opened, PosixFile):
            opened.bypass_cache()  # read once, and the cache is the training's
        digest, head = hashlib.sha256(), b""
        with closing(read_ahead(opened, chunk_bytes=CHUNK_BYTES, depth=_AHEAD[source.tier])) as chunks:
            for chunk in chunks:
                digest.update(chunk)
                if not head and file.name.endswith(".safetensors"):
                    head = bytes(chunk)
                progress(len(chunk))
        try:
            _compare(file.name, digest.hexdigest(), file.sha256)
        except VerificationError as error:
            if file.blocks is None:
                raise
            damage = find_damage(opened, file.blocks, file.name, jobs=jobs)
            raise DamagedError(f"{error}; {damage.text}", damage.blocks) from None
        if file.name.endswith(".safetensors"):
            _check_header(opened, file.name, head)
    finally:
        opened.close()


def _check_header(opened: Opened, name: str, head: bytes) -> None:
    need = 8 + int.from_bytes(head[:8], "little")
    if len(head) < need <= opened.size_bytes and need <= 8 + 100_000_000:
        longer = bytearray(need)  # a header longer than the first chunk; its bytes were hashed a moment ago
        opened.read_into(memoryview(longer), 0)
        head = bytes(longer)
    parse_header(head, opened.size_bytes, name)


def verify_checkpoint(
    source: Source,
    folder: str,
    *,
    trusted_key: EllipticCurvePublicKey | None = None,
    allow_unsigned: bool = False,
    policy: TrustPolicy | None = None,
    jobs: int | None = None,
    progress: Callable[[int], None] = lambda _: None,
) -> VerifyReport:
    """Verify all of `folder` and say everything that differs; never raises VerificationError.

    `trusted_key` None skips the check of the signature (and `signed` then says only that there is one); with `policy` that
    decides instead. `jobs` files are
    hashed at once (default: one for each usable core); `progress` is told the number of bytes of each chunk that was
    hashed, by one thread at a time. Raises StorageError when something cannot be read at all.
    """
    marker = None
    try:
        found = source.marker(folder)
        if found is None:
            raise VerificationError(f"{folder}: no manifest, the checkpoint is not committed")
        marker, data = found
        manifest = check_marker(
            folder, marker, data, trusted_key=trusted_key, allow_unsigned=allow_unsigned, policy=policy
        )
    except VerificationError as error:
        return VerifyReport(
            checkpoint=folder,
            ok=False,
            signed=marker == MARKER_SIGNED,
            step=None,
            key_sha256=None,
            digest=None,
            errors=[str(error)],
            files=[],
        )
    errors = _file_problems(source, folder, manifest)
    if manifest.facts is not None and INDEX_NAME not in {file.name for file in manifest.files}:
        errors.append(f"{INDEX_NAME}: is not listed in the manifest")
    files = _check_all(source, folder, manifest.files, jobs, progress)
    errors += [report.error for report in files if report.error is not None and report.error not in errors]
    return VerifyReport(
        checkpoint=folder,
        ok=not errors,
        signed=manifest.signed,
        step=manifest.facts.step if manifest.facts else None,
        key_sha256=manifest.key_sha256,
        digest=manifest.digest,
        errors=errors,
        files=files,
    )


def _check_all(
    source: Source, folder: str, files: Collection[FileFact], jobs: int | None, progress: Callable[[int], None]
) -> list[FileReport]:
    """A report on each of `files`, in their order. The largest begin first, so that none is left alone at the end."""
    lock = threading.Lock()

    def tell(count: int) -> None:
        with lock:
            progress(count)

    def check(file: FileFact) -> FileReport:
        problem, damaged = None, []
        try:
            check_file(source, folder, file, jobs=cores, progress=tell)
        except VerificationError as error:
            problem = str(error)
            damaged = error.blocks if isinstance(error, DamagedError) else []
        return FileReport(
            name=file.name, size_bytes=file.size_bytes, sha256=file.sha256, error=problem, damaged=damaged
        )

    cores = jobs or len(os.sched_getaffinity(0))
    workers = max(1, min(cores, len(files)))
    with ThreadPoolExecutor(workers, thread_name_prefix="keepstep-verify") as pool:
        futures = {
            file.name: pool.submit(check, file)
            for file in sorted(files, key=lambda file: file.size_bytes, reverse=True)
        }
        try:
            return [futures[file.name].result() for file in files]
        except BaseException:
            pool.shutdown(wait=False, cancel_futures=True)
            raise
