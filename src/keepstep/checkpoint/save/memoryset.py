"""The memory tier's set: the same files as a folder on disk, kept in memory of the job's nodes.

The manifest of such a set lists fingerprints in place of files' digests (facts.memory names the algorithm): taken in the background
right after staging, they cost a fraction of SHA-256. It is signed all the same.
"""

from __future__ import annotations

import mmap
import os
from typing import Any

import msgspec

from keepstep.checkpoint.exchange import Exchange
from keepstep.checkpoint.format.blocks import fingerprint_blocks
from keepstep.checkpoint.format.fingerprint import of_blocks
from keepstep.checkpoint.format.layout import PRINTS_SUFFIX
from keepstep.checkpoint.storage.writer import FileFact
from keepstep.records.errors import ChannelError


class ImageFact(msgspec.Struct, frozen=True, kw_only=True):
    """What one rank says of its sealed image: size, algorithm and SHA-256 of its fingerprints, digest of the plan."""

    size_bytes: int
    algorithm: str
    prints_sha256: str
    plan: str


def fingerprint_fact(name: str, fact: ImageFact) -> FileFact:
    """The image as the manifest of a memory set lists it."""
    return FileFact(name=name, size_bytes=fact.size_bytes, sha256=fact.prints_sha256)


class MemorySet:
    """What this rank keeps in memory of one slot: its image and the fingerprints; on rank 0 the index and the marker."""

    def __init__(self, channel: Exchange, slot: str) -> None:
        self._channel = channel
        self._slot = slot
        self._small: dict[str, int] = {}
        self._inherited = True
        """The process that was this rank before may have kept something of this slot."""

    def forget(self) -> None:
        """Say that the slot is about to be overwritten; the marker goes first. Raises ChannelError."""
        for name in (f"{self._slot}-marker", f"{self._slot}-index", self._slot, f"{self._slot}-prints"):
            if name == self._slot or name in self._small or self._inherited:
                self._channel.unkeep(name)
        self._inherited = False

    def keep_image(
        self, checkpoint: str, file: str, size_bytes: int, algorithm: str, prints: bytes, facts: dict[str, Any]
    ) -> None:
        """Keep the image in the slot and its fingerprints. Raises ChannelError."""
        mark = {**facts, "fingerprint": of_blocks(algorithm, prints)}
        self.keep_bytes("prints", checkpoint, file + PRINTS_SUFFIX, prints, facts)
        self._channel.keep(self._slot, checkpoint, file, size_bytes, mark)

    def keep_bytes(self, part: str, checkpoint: str, file: str, data: bytes, facts: dict[str, Any]) -> None:
        """Keep a small file. Raises ChannelError."""
        name = f"{self._slot}-{part}"
        room = max(4096, self._small.get(name, 0))
        while room < len(data):
            room *= 2
        self._small[name] = room
        fd = self._channel.buffer(name, room)
        try:
            with mmap.mmap(fd, room) as area:
                area[: len(data)] = data
        except (OSError, ValueError) as error:
            raise ChannelError(f"cannot keep {file} in memory: {error}") from error
        finally:
            os.close(fd)
        algorithm, prints = fingerprint_blocks(memoryview(data))
        mark = {**facts, "fingerprint": of_blocks(algorithm, prints)}
        self._channel.keep(name, checkpoint, file, len(data), mark)
