"""Writing an image that does not fit into memory a second time: block by block, straight from the training's own tensors.

Training stands still for as long as this takes. What is written is the same file.
"""

from __future__ import annotations

import hashlib
import os
from collections.abc import Callable
from pathlib import Path

from keepstep.checkpoint.format.blocks import (
    BLOCK_BYTES,
    DIGEST_BYTES,
    count_for_body,
    digest_algorithm,
    format_blocks_field,
    hash_into,
    new_hash,
)
from keepstep.checkpoint.storage.writer import FileFact, storage_error, write_all
from keepstep.records.errors import StorageError


def write_stream(path: Path, body_bytes: int, window: memoryview, fill: Callable[[int, int], None]) -> FileFact:
    """Create `path` with a body of `body_bytes` and the digests of its blocks; durable on return.

    `fill(begin, end)` puts that part of the body, one block, at the start of `window`. Raises StorageError, and then removes what
    it wrote.
    """
    algorithm = digest_algorithm()
    whole, digests = hashlib.sha256(), bytearray()
    try:
        fd = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC | os.O_NOFOLLOW, 0o644)
    except OSError as error:
        raise storage_error("create", path, error) from error
    try:
        for begin in range(0, body_bytes, BLOCK_BYTES):
            end = min(begin + BLOCK_BYTES, body_bytes)
            fill(begin, end)
            block, running = window[: end - begin], new_hash(algorithm)
            hash_into(block, [running, whole])
            digests += running.digest()
            write_all(fd, block)
        assert len(digests) == DIGEST_BYTES * count_for_body(body_bytes)
        whole.update(digests)
        write_all(fd, bytes(digests))
        os.fsync(fd)
    except BaseException as error:
        path.unlink(missing_ok=True)
        if isinstance(error, OSError):
            raise storage_error("write", path, error) from error
        raise
    finally:
        os.close(fd)
    return FileFact(
        name=path.name,
        size_bytes=body_bytes + len(digests),
        sha256=whole.hexdigest(),
        blocks=format_blocks_field(algorithm, bytes(digests)),
    )


def too_large(image_bytes: int, room_bytes: int, where: str) -> StorageError:
    """Why an image that cannot be staged cannot be written in any other way either."""
    return StorageError(
        f"an image of {image_bytes} bytes cannot be staged in the {room_bytes} bytes of memory that are free, and only a "
        f"checkpoint in a folder can be written block by block, not one in memory or in {where}"
    )
