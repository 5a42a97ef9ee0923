"""Writing files: streamed in chunks while another thread hashes the same bytes, then fsynced."""

from __future__ import annotations

import errno
import hashlib
import os
import queue
import threading
from collections.abc import Iterable, Iterator
from pathlib import Path

import msgspec

from keepstep.records.errors import StorageError

CHUNK_BYTES = 16 << 20
_INLINE_BYTES = 1 << 20  # below this a thread costs more than it hides


class FileFact(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """A file as a manifest lists it: plain name, size in bytes, SHA-256 in hexadecimal.

    `blocks` names the digests at its end (see keepstep.checkpoint.format.blocks); None when it has none.
    """

    name: str
    size_bytes: int
    sha256: str
    blocks: str | None = None


class Hasher:
    """SHA-256 of the chunks handed to `update`, computed on a thread of its own.

    Chunks must not change before `hexdigest` returns. An error on the thread is raised by the next call here.
    """

    def __init__(self) -> None:
        self._digest = hashlib.sha256()
        self._queue: queue.Queue[memoryview | None] = queue.Queue(maxsize=4)
        self._error: BaseException | None = None
        self._thread = threading.Thread(target=self._work, name="keepstep-hash", daemon=True)
        self._thread.start()

    def _work(self) -> None:
        while (chunk := self._queue.get()) is not None:
            if self._error is not None:
                continue  # keep draining, so that the producer never blocks on a dead consumer
            try:
                self._digest.update(chunk)
            except BaseException as error:
                self._error = error
            del chunk  # a view held over the next wait would keep its buffer from being released

    def update(self, chunk: memoryview) -> None:
        """Add bytes; blocks while four chunks are waiting."""
        if self._error is not None:
            raise RuntimeError("hashing failed") from self._error
        self._queue.put(chunk)

    def close(self) -> None:
        """Stop the thread; safe to call twice."""
        if self._thread.is_alive():
            self._queue.put(None)
            self._thread.join()

    def hexdigest(self) -> str:
        """Wait for all chunks and return the digest."""
        self.close()
        if self._error is not None:
            raise RuntimeError("hashing failed") from self._error
        return self._digest.hexdigest()


def chunks(parts: Iterable[bytes | memoryview], chunk_bytes: int = CHUNK_BYTES) -> Iterator[memoryview]:
    """Cut `parts` into views of at most `chunk_bytes`."""
    for part in parts:
        view = memoryview(part).cast("B")
        for begin in range(0, len(view), chunk_bytes):
            yield view[begin : begin + chunk_bytes]


def write_all(fd: int, data: bytes | memoryview) -> None:
    """Write every byte of `data` to `fd`; raises OSError, also for a device that takes none."""
    view = memoryview(data)
    while view:
        count = os.write(fd, view)
        if count <= 0:
            raise OSError(errno.EIO, "write returned 0")
        view = view[count:]


def storage_error(action: str, path: Path, error: OSError) -> StorageError:
    """A StorageError that names the file, the system's reason, and for a full disk the next step."""
    hint = "; free space or choose another checkpoint root" if error.errno in (errno.ENOSPC, errno.EDQUOT) else ""
    return StorageError(
        f"cannot {action} {path}: {error.strerror or error} ({errno.errorcode.get(error.errno or 0, '?')}){hint}"
    )


def write_file(path: Path, parts: Iterable[bytes | memoryview], *, chunk_bytes: int = CHUNK_BYTES) -> FileFact:
    """Create `path` (never overwrite), write `parts`, fsync, and return size and SHA-256 of the bytes handed in.

    The digest is of the buffers in memory, not of what a later read returns, so a bad disk shows. Raises StorageError.
    """
    views = [memoryview(part).cast("B") for part in parts]
    size = sum(len(view) for view in views)
    try:
        fd = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC | os.O_NOFOLLOW, 0o644)
    except OSError as error:
        raise storage_error("create", path, error) from error
    try:
        if size <= _INLINE_BYTES:
            digest = hashlib.sha256()
            for chunk in chunks(views, chunk_bytes):
                digest.update(chunk)
                write_all(fd, chunk)
            text = digest.hexdigest()
        else:
            text = _write_hashed(fd, views, chunk_bytes)
        os.fsync(fd)
    except OSError as error:
        raise storage_error("write", path, error) from error
    finally:
        os.close(fd)
    return FileFact(name=path.name, size_bytes=size, sha256=text)


def _write_hashed(fd: int, parts: list[memoryview], chunk_bytes: int) -> str:
    hasher = Hasher()
    try:
        for chunk in chunks(parts, chunk_bytes):
            hasher.update(chunk)
            write_all(fd, chunk)
        return hasher.hexdigest()
    finally:
        hasher.close()


def fsync_folder(path: Path) -> None:
    """Make the entries of folder `path` durable. Raises StorageError."""
    try:
        fd = os.open(path, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
        try:
            os.fsync(fd)
        finally:
            os.close(fd)
    except OSError as error:
        raise storage_error("fsync", path, error) from error


def make_folders(path: Path, mode: int = 0o777) -> None:
    """Make folder `path` and those above it that are missing; durable on return. Raises StorageError.

    `mode` is for `path` alone. What lies in a folder can be lost with it when only its own entries were made durable.
    """
    missing = [folder for folder in (path, *path.parents) if not folder.exists()]
    try:
        path.mkdir(parents=True, exist_ok=True, mode=mode)
    except OSError as error:
        raise storage_error("create", path, error) from error
    for folder in reversed(missing):
        fsync_folder(folder.parent)


def replace_file(path: Path, data: bytes, *, temp: Path | None = None) -> None:
    """Put `data` at `path` so that a reader sees all of it or the old file; durable on return. Raises StorageError.

    `temp` is where the bytes are written first, on the same file system (default: a hidden file beside `path`).
    """
    temp = temp or path.with_name(f".{path.name}.{os.getpid()}.{threading.get_ident()}.tmp")
    try:
        temp.unlink(missing_ok=True)
        write_file(temp, [data])
        temp.replace(path)
    except OSError as error:
        raise storage_error("write", path, error) from error
    finally:
        temp.unlink(missing_ok=True)
    fsync_folder(path.parent)
