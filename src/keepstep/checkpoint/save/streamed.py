"""A rank's file whose tensors come one after the other, so that never more than one of them is in memory.

For tools that make a checkpoint from other files. A rank that trains stages its whole image instead (trainer.staging).
"""

from __future__ import annotations

import mmap
import os
import tempfile
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path

import msgspec

from keepstep.checkpoint.format.blocks import BLOCK_BYTES, digest_algorithm, format_blocks_field, new_hash
from keepstep.checkpoint.format.image import TensorTable, image_layout
from keepstep.checkpoint.format.layout import rank_file_name
from keepstep.checkpoint.format.plan import Piece
from keepstep.checkpoint.storage.posix import PosixRoot
from keepstep.checkpoint.storage.source import Root
from keepstep.checkpoint.storage.writer import FileFact, Hasher, chunks, storage_error, write_all
from keepstep.records.errors import StorageError

Part = bytes | memoryview
BytesOf = Callable[[Piece], Iterator[Part]]
"""Gives the bytes of a piece, in order and in parts that are each made when they are asked for."""


def put_image(
    root: Root, folder: str, rank: int, world_size: int, table: TensorTable, blob: bytes, bytes_of: BytesOf
) -> FileFact:
    """Write the image of `rank` of `table`, with the values `blob` and block digests, as its file in `folder`.

    Durable on return. Raises StorageError, and what `bytes_of` raises.
    """
    layout = image_layout(table, len(blob))
    algorithm = digest_algorithm()
    digests: list[bytes] = []

    def body() -> Iterator[Part]:
        yield layout.header
        for key in table.entries:
            yield from bytes_of(table.pieces[key])
        yield blob

    def parts() -> Iterator[Part]:
        yield from _digested(body(), algorithm, digests)
        yield b"".join(digests)

    name = rank_file_name(rank, world_size)
    fact = put_streamed(root, folder, name, parts(), layout.file_bytes)
    return msgspec.structs.replace(fact, blocks=format_blocks_field(algorithm, b"".join(digests)))


def _digested(parts: Iterable[Part], algorithm: str, digests: list[bytes]) -> Iterator[Part]:
    """`parts`, unchanged; the digest of each block of them is added to `digests` on the way."""
    running, room = new_hash(algorithm), BLOCK_BYTES
    for part in parts:
        view = memoryview(part).cast("B")
        yield view
        while len(view):
            piece, view = view[:room], view[room:]
            running.update(piece)
            room -= len(piece)
            if room == 0:
                digests.append(running.digest())
                running, room = new_hash(algorithm), BLOCK_BYTES
    if room < BLOCK_BYTES:
        digests.append(running.digest())


def put_streamed(root: Root, folder: str, name: str, parts: Iterable[Part], size_bytes: int) -> FileFact:
    """Write `parts`, `size_bytes` together, as new file `name` of `folder`; durable on return.

    Each part is asked for when those before it are written; a part's bytes must not change afterwards. An object store gets
    the file from a temporary one on this machine. Raises StorageError, also when the parts are not of that size.
    """
    if isinstance(root, PosixRoot):
        return put_file(root.path / folder / name, parts, size_bytes)
    with tempfile.TemporaryDirectory(prefix="keepstep-") as spool:
        path = Path(spool) / name
        fact = put_file(path, parts, size_bytes)
        with (
            path.open("rb") as file,
            mmap.mmap(file.fileno(), 0, prot=mmap.PROT_READ) as area,
            memoryview(area) as view,
        ):
            return root.put_file(folder, name, [view], sha256=fact.sha256)


def put_file(path: Path, parts: Iterable[Part], size_bytes: int) -> FileFact:
    """`put_streamed` to new file `path`."""
    try:
        fd = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC | os.O_NOFOLLOW, 0o644)
    except OSError as error:
        raise storage_error("create", path, error) from error
    hasher = Hasher()
    try:
        done = 0
        for chunk in chunks(parts):
            hasher.update(chunk)
            _write(fd, chunk, path)
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


def _write(fd: int, chunk: memoryview, path: Path) -> None:
    try:
        write_all(fd, chunk)
    except OSError as error:
        raise storage_error("write", path, error) from error
