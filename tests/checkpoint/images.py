"""Images in shared memory, as a rank stages them."""

from __future__ import annotations

import contextlib
import hashlib
import mmap
import os
from collections.abc import Iterator
from pathlib import Path

from keepstep.checkpoint.format.blocks import (
    DIGEST_BYTES,
    blocks_count,
    body_bytes,
    check_block,
    check_digests,
    file_bytes_for,
    parse_blocks_field,
    split_blocks,
)
from keepstep.checkpoint.storage.writer import FileFact


class Image:
    """A memfd with a random body and room for its block digests."""

    def __init__(self, body_size: int) -> None:
        self.file_bytes = file_bytes_for(body_size)
        self.fd = os.memfd_create("image", os.MFD_CLOEXEC)
        os.ftruncate(self.fd, self.file_bytes + 4096)
        self.room = mmap.mmap(self.fd, self.file_bytes)
        self.room[:body_size] = os.urandom(body_size)

    def view(self) -> memoryview:
        """All bytes of the file to be."""
        return memoryview(self.room)

    def change(self, at: int) -> None:
        """Another value for one byte."""
        self.room[at] ^= 0x40


@contextlib.contextmanager
def image_of(body_size: int) -> Iterator[Image]:
    """An image whose memory is given back at the end."""
    image = Image(body_size)
    try:
        yield image
    finally:
        os.close(image.fd)


def check_written(path: Path, fact: FileFact, image: Image) -> None:
    """The file is the image, whole and without holes; its facts are true; its block digests verify."""
    data = path.read_bytes()
    assert data == image.room[:]
    assert (fact.name, fact.size_bytes, fact.sha256) == (path.name, len(data), hashlib.sha256(data).hexdigest())
    assert path.stat().st_blocks * 512 >= len(data)
    assert fact.blocks is not None
    field = parse_blocks_field(fact.blocks)
    body = body_bytes(len(data))
    digests = data[body:]
    assert len(digests) == blocks_count(len(data)) * DIGEST_BYTES
    check_digests(digests, field, path.name)
    for number, block in enumerate(split_blocks(memoryview(data)[:body])):
        check_block(block, number, digests, field.algorithm, path.name)
