"""Checkpoints in the memory of the job's nodes, seen as a Source: what the launcher's agents keep and hand out."""

from __future__ import annotations

import os
from typing import Literal

from keepstep.checkpoint.exchange import Exchange, Fetched, MemoryTier
from keepstep.checkpoint.format.layout import (
    IMAGE_SUFFIX,
    MARKERS,
    MAX_MANIFEST_BYTES,
    PRINTS_SUFFIX,
    parse_folder_name,
)
from keepstep.records.errors import ChannelError, StorageError, VerificationError


class MemoryFile:
    """A file in memory. Its rank may overwrite it at any time: what is read counts only once it is verified."""

    def __init__(self, fetched: Fetched, name: str) -> None:
        """Takes over the descriptor."""
        self.name = name
        self.size_bytes = fetched.size_bytes
        self._fd = fetched.fd

    def read_into(self, view: memoryview, offset: int) -> None:
        """See source.Opened."""
        end, at = offset + len(view), offset
        if end > self.size_bytes:
            raise VerificationError(f"{self.name}: ends at byte {self.size_bytes}, expected {end}")
        try:
            while at < end:
                # Read, not mapped: the kernel copies without a page table entry for each page, and without this interpreter's lock.
                count = os.preadv(self._fd, [view[at - offset :]], at)
                if count == 0:
                    raise VerificationError(f"{self.name}: ends at byte {at}, expected {end}")
                at += count
        except OSError as error:
            raise StorageError(f"{self.name}: cannot be read from memory: {error.strerror or error}") from error

    def close(self) -> None:
        """See source.Opened."""
        if self._fd >= 0:
            fd, self._fd = self._fd, -1
            os.close(fd)


class MemorySource:
    """What the job's nodes hold. A node that is lost, or an image that is overwritten meanwhile, makes a set incomplete."""

    tier: Literal["shm"] = "shm"
    where = "memory of the job's nodes"

    def __init__(self, channel: Exchange) -> None:
        self._channel = channel
        self.fetched: dict[tuple[str, str], Fetched] = {}
        """How each file came, by folder and name; the descriptors are closed."""

    def folders(self) -> list[str]:
        """See source.Source. None where no launcher keeps anything."""
        try:
            return [kept.checkpoint for kept in self._channel.kept() if parse_folder_name(kept.checkpoint) is not None]
        except ChannelError:
            return []

    def marker(self, folder: str) -> tuple[str, bytes] | None:
        """See source.Source."""
        for name in MARKERS:
            try:
                file = self._fetch(folder, name)
            except (ChannelError, VerificationError):
                continue
            try:
                if file.size_bytes > MAX_MANIFEST_BYTES:
                    raise VerificationError(
                        f"{name}: {file.size_bytes} bytes are over the limit of {MAX_MANIFEST_BYTES}"
                    )
                data = bytearray(file.size_bytes)
                file.read_into(memoryview(data), 0)
                return name, bytes(data)
            finally:
                file.close()
        return None

    def files(self, folder: str) -> dict[str, int] | None:
        """See source.Source. The fingerprints beside the images are no files of the checkpoint."""
        found = {file.file: file.size_bytes for file in self._channel.kept_files(folder)}
        shown = {name: size for name, size in found.items() if name not in MARKERS and not name.endswith(PRINTS_SUFFIX)}
        return shown or None

    def open(self, folder: str, name: str) -> MemoryFile:
        """See source.Source."""
        try:
            return self._fetch(folder, name)
        except ChannelError as error:
            raise VerificationError(f"{name}: is not in memory: {error}") from None

    def tier_read(self, folder: str) -> MemoryTier:
        """The farthest memory an image of `folder` was read from. Index and marker, which only one node writes, do not count."""
        far = any(
            read.tier == "peer"
            for (checkpoint, name), read in self.fetched.items()
            if checkpoint == folder and name.endswith(IMAGE_SUFFIX)
        )
        return "peer" if far else "shm"

    def slot_read(self, folder: str, rank: int) -> str | None:
        """The staging slot of `rank` on this node from which an image of `folder` was read."""
        for (checkpoint, _), read in self.fetched.items():
            if checkpoint == folder and read.tier == "shm" and read.facts.get("rank") == rank:
                return str(read.facts.get("slot"))
        return None

    def _fetch(self, folder: str, name: str) -> MemoryFile:
        fetched = self._channel.fetch(folder, name)
        self.fetched[folder, name] = fetched
        return MemoryFile(fetched, name)

    def records(self, kind: str) -> dict[str, bytes]:
        """See source.Source. There are none."""
        return {}

    def record_names(self, kind: str) -> frozenset[str]:
        """See source.Source."""
        return frozenset()

    def committed_once(self) -> bool:
        """See source.Source."""
        return False
