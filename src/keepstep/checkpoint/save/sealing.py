"""Sealing an image: its fingerprints and block digests are taken, and the digests written at its end.

It is done right after staging, beside the write: a block may be written as soon as its fingerprint is there.
"""

from __future__ import annotations

import contextlib
import itertools
import mmap
import os
import threading
from collections.abc import Callable, Iterator

import msgspec

from keepstep.checkpoint.format.blocks import (
    BLOCK_BYTES,
    FINGERPRINT_BYTES,
    body_bytes,
    digest_algorithm,
    fingerprint_algorithm,
    format_blocks_field,
    hash_block,
    span_of,
)
from keepstep.checkpoint.storage.engine import write_image
from keepstep.checkpoint.storage.targets import Fault, TargetSpec, open_target
from keepstep.checkpoint.storage.writer import FileFact
from keepstep.records.errors import StorageError

MAX_THREADS = 4


class Sealed(msgspec.Struct, frozen=True, kw_only=True):
    """A sealed image: `blocks` is the manifest's text about its digests, `fingerprints` those of its blocks in order."""

    file_bytes: int
    blocks: str
    algorithm: str
    fingerprints: bytes

    def fingerprint(self, number: int) -> bytes:
        """Fingerprint of block `number` of the file."""
        size = FINGERPRINT_BYTES[self.algorithm]
        return self.fingerprints[number * size : (number + 1) * size]


def check_sealed(sealed: Sealed, file_bytes: int) -> None:
    """Raises StorageError when `sealed` cannot be of an image of `file_bytes`."""
    count = -(-file_bytes // BLOCK_BYTES) * FINGERPRINT_BYTES.get(sealed.algorithm, 0)
    if sealed.file_bytes != file_bytes or len(sealed.fingerprints) != count:
        raise StorageError(f"an image of {file_bytes} bytes was given with the fingerprints of another")


class Sealing:
    """Seals `image` on threads of its own. `image` must not change from here on but by this."""

    def __init__(
        self, image: memoryview, *, threads: int | None = None, on_sealed: Callable[[Sealed], None] | None = None
    ) -> None:
        """`on_sealed` is called on such a thread. Raises VerificationError for a size no image has."""
        self._image = image
        self._body = body_bytes(len(image))
        self._on_sealed = on_sealed
        self.algorithm = fingerprint_algorithm()
        self._digest_algorithm = digest_algorithm()
        self._whole = self._body // BLOCK_BYTES  # blocks of the file that hold nothing but body
        self._prints: list[bytes] = [b""] * -(-len(image) // BLOCK_BYTES)
        self._digests: list[bytes] = [b""] * self._whole
        self._numbers = itertools.count()
        self._changed = threading.Condition()
        self._error: Exception | None = None
        self._sealed: Sealed | None = None
        count = threads or min(MAX_THREADS, max(1, len(os.sched_getaffinity(0)) // 4))
        helpers = [self._start(self._take) for _ in range(min(count, self._whole) - 1)]
        self._lead = self._start(lambda: self._run(helpers))

    def _start(self, work: Callable[[], None]) -> threading.Thread:
        thread = threading.Thread(target=work, name="keepstep-seal", daemon=True)
        thread.start()
        return thread

    def _take(self) -> None:
        """Take the next block, until none is left."""
        try:
            while self._error is None and (number := next(self._numbers)) < self._whole:
                block = self._image[slice(*span_of(number, self._body))]
                digest, mark = hash_block(block, self._digest_algorithm, self.algorithm)
                del block
                self._digests[number] = digest
                self._set_print(number, mark)
        except Exception as error:
            self._fail(error)

    def _run(self, helpers: list[threading.Thread]) -> None:
        self._take()
        for thread in helpers:
            thread.join()
        if self._error is not None:
            return
        try:
            rest = self._image[self._whole * BLOCK_BYTES : self._body]
            tail = hash_block(rest, self._digest_algorithm) if len(rest) else []
            del rest
            digests = b"".join([*self._digests, *tail])
            self._image[self._body :] = digests
            for number in range(self._whole, len(self._prints)):
                block = self._image[slice(*span_of(number, len(self._image)))]
                self._set_print(number, hash_block(block, self.algorithm)[0])
                del block
            sealed = Sealed(
                file_bytes=len(self._image),
                blocks=format_blocks_field(self._digest_algorithm, digests),
                algorithm=self.algorithm,
                fingerprints=b"".join(self._prints),
            )
            if self._on_sealed is not None:
                self._on_sealed(sealed)
        except Exception as error:
            self._fail(error)
        else:
            with self._changed:
                self._sealed = sealed
                self._changed.notify_all()

    def _set_print(self, number: int, mark: bytes) -> None:
        with self._changed:
            self._prints[number] = mark
            self._changed.notify_all()

    def _fail(self, error: Exception) -> None:
        with self._changed:
            self._error = error
            self._changed.notify_all()

    def fingerprint(self, number: int) -> bytes:
        """Fingerprint of block `number`; waits until it is taken. Raises what went wrong."""
        with self._changed:
            self._changed.wait_for(lambda: self._error is not None or self._prints[number])
            if self._error is not None:
                raise self._error
            return self._prints[number]

    def result(self) -> Sealed:
        """The sealed image, once it is. Raises what went wrong."""
        self._lead.join()
        if self._error is not None:
            raise self._error
        assert self._sealed is not None
        return self._sealed

    def stop(self) -> None:
        """Wait until no thread touches the image any more; they end early when it is not sealed yet. Call it last."""
        if self._sealed is None:
            self._fail(self._error or StorageError("sealing was given up"))
        self._lead.join()
        self._error = None  # its frames hold this object, and with it the image


@contextlib.contextmanager
def mapped(fd: int, file_bytes: int, *, writable: bool) -> Iterator[memoryview]:
    """The first `file_bytes` of shared memory `fd`. Raises StorageError when it is smaller than that."""
    try:
        size = os.fstat(fd).st_size
        if not 0 < file_bytes <= size:
            raise StorageError(f"an image of {file_bytes} bytes cannot lie in a buffer of {size} bytes")
        # Written to disk from a mapping: write(2) from the descriptor itself would have to copy.
        room = mmap.mmap(fd, file_bytes, prot=mmap.PROT_READ | (mmap.PROT_WRITE if writable else 0))
    except (OSError, ValueError) as error:
        raise StorageError(f"cannot map an image of {file_bytes} bytes: {error}") from error
    view = memoryview(room)
    try:
        yield view
    finally:
        view.release()
        with contextlib.suppress(BufferError):  # an exception's frames still hold a slice: it goes with them
            room.close()


def seal_buffer(fd: int, file_bytes: int) -> Sealed:
    """Seal the image in shared memory `fd`. Raises StorageError, or VerificationError for a size no image has."""
    with mapped(fd, file_bytes, writable=True) as image:
        sealing = Sealing(image)
        try:
            return sealing.result()
        finally:
            sealing.stop()


def write_buffer(
    fd: int,
    file_bytes: int,
    target: TargetSpec,
    sealed: Sealed | None,
    fault: Fault | None = None,
    on_sealed: Callable[[Sealed], None] | None = None,
) -> FileFact:
    """Write the image in shared memory `fd` to `target`; durable on return.

    `sealed` None seals it beside the write and then calls `on_sealed` from another thread. Raises StorageError and the
    errors of `seal_buffer`.
    """
    with mapped(fd, file_bytes, writable=sealed is None) as image:
        if sealed is not None:
            check_sealed(sealed, file_bytes)
            return write_image(
                open_target(target, file_bytes, fault),
                image,
                fingerprint=sealed.fingerprint,
                algorithm=sealed.algorithm,
                blocks=lambda: sealed.blocks,
            )
        sealing = Sealing(image, on_sealed=on_sealed)
        try:
            return write_image(
                open_target(target, file_bytes, fault),
                image,
                fingerprint=sealing.fingerprint,
                algorithm=sealing.algorithm,
                blocks=lambda: sealing.result().blocks,
            )
        finally:
            sealing.stop()
