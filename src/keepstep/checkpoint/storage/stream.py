"""Writing a file whose parts come one after the other, so that never more than one of them is in memory."""

from __future__ import annotations

import os
from collections.abc import Iterable
from pathlib import Path

from keepstep.checkpoint.storage.writer import FileFact, Hasher, chunks, storage_error, write_all
from keepstep.records.errors import StorageError


def stream_file(path: Path, parts: Iterable[bytes | memoryview], size_bytes: int) -> FileFact:
    """Create `path` (never overwrite) from `parts`, which are `size_bytes` together, fsync; its size and SHA-256.

    Each part is asked for when those before it are written. A part's bytes must not change before the next but four is
    asked for (they are hashed on another thread). Raises StorageError, also when the parts are not of that size.
    """
    try:
        fd = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC | os.O_NOFOLLOW, 0o644)
    except OSError as error:
        raise storage_error("create", path, error) from error
    hasher = Hasher()
    done = 0
    try:
        for part in parts:
            for chunk in chunks([part]):
                hasher.update(chunk)
                try:
                    write_all(fd, chunk)
                except OSError as error:
                    raise storage_error("write", path, error) from error
                done += len(chunk)
        if done != size_bytes:
            raise StorageError(f"{path}: {done} bytes came, {size_bytes} were announced")
        try:
            os.fsync(fd)
        except OSError as error:
            raise storage_error("write", path, error) from error
        return FileFact(name=path.name, size_bytes=size_bytes, sha256=hasher.hexdigest())
    finally:
        hasher.close()
        os.close(fd)
