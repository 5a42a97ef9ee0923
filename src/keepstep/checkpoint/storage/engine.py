"""The write engine: one image from a staging buffer to a target, hashed and compared beside the write.

The disk never waits for a hash. While block k is written, another thread takes the SHA-256 of block k - 1 and compares its
fingerprint with the one taken when it was staged. Both read the buffer after the write did, so equal fingerprints mean that
what was written, and what the SHA-256 is of, are the bytes that were staged. A buffer that somebody reused too early fails the
save instead of becoming a checkpoint.
"""

from __future__ import annotations

import hashlib
import queue
import threading
from collections.abc import Callable

from keepstep.checkpoint.format.blocks import BLOCK_BYTES, hash_into, new_hash, split_blocks
from keepstep.checkpoint.storage.targets import Target
from keepstep.checkpoint.storage.writer import FileFact
from keepstep.records.errors import StorageError


class _Confirmer:
    """On a thread of its own: SHA-256 of the written blocks, and each one's fingerprint compared."""

    def __init__(self, where: str, fingerprint: Callable[[int], bytes], algorithm: str) -> None:
        self._where, self._fingerprint, self._algorithm = where, fingerprint, algorithm
        self._digest = hashlib.sha256()
        self._written: queue.SimpleQueue[tuple[int, memoryview] | None] = queue.SimpleQueue()
        self._error: Exception | None = None
        self._stopped = False
        self._thread = threading.Thread(target=self._work, name="keepstep-confirm", daemon=True)
        self._thread.start()

    def _work(self) -> None:
        while (item := self._written.get()) is not None:
            if self._error is None and not self._stopped:
                try:
                    self._confirm(*item)
                except Exception as error:
                    self._error = error
            del item  # a view held over the next wait would keep its buffer from being released

    def _confirm(self, number: int, block: memoryview) -> None:
        found = new_hash(self._algorithm)
        hash_into(block, (self._digest, found))
        if found.digest() != self._fingerprint(number):
            raise StorageError(f"{self._where}: staging buffer changed while it was written: block {number}")

    def put(self, number: int, block: memoryview) -> None:
        """Block `number` was written. Raises what was found wrong with an earlier one."""
        self._raise()
        self._written.put((number, block))

    def hexdigest(self) -> str:
        """The SHA-256 once all blocks are confirmed. Raises StorageError when one is not."""
        self._written.put(None)
        self._thread.join()
        self._raise()
        return self._digest.hexdigest()

    def stop(self) -> None:
        """Let the rest be and end the thread."""
        self._stopped = True
        self._written.put(None)
        self._thread.join()

    def _raise(self) -> None:
        if self._error is not None:
            error, self._error = self._error, None
            raise error


def write_image(
    target: Target,
    image: memoryview,
    *,
    fingerprint: Callable[[int], bytes],
    algorithm: str,
    blocks: Callable[[], str | None] = lambda: None,
) -> FileFact:
    """Write `image` to `target`; durable on return. On any error the target is removed again as far as that works.

    `fingerprint(k)` is the fingerprint of block k by `algorithm`, taken at staging time; it may wait for it. A block is
    not written before. `blocks()` is asked at the end for the manifest's text about block digests. Raises StorageError.
    """
    confirmer = _Confirmer(target.name, fingerprint, algorithm)
    try:
        for number, block in enumerate(split_blocks(image)):
            fingerprint(number)
            target.write(block, number * BLOCK_BYTES)
            confirmer.put(number, block)
            del block
        target.sync()
        sha256 = confirmer.hexdigest()
        fact = FileFact(name=target.name, size_bytes=len(image), sha256=sha256, blocks=blocks())
        target.finish()
    except BaseException:
        confirmer.stop()
        target.abort()
        raise
    return fact
