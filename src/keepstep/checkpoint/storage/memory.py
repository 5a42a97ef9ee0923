"""Checkpoints in the memory of the job's nodes, seen as a Source: what the launcher's agents keep and hand out."""

from __future__ import annotations

import mmap
import os
from typing import Literal

from keepstep.checkpoint.exchange import Exchange, Fetched
from keepstep.checkpoint.format.layout import MARKERS, MAX_MANIFEST_BYTES, PRINTS_SUFFIX, parse_folder_name
from keepstep.records.errors import ChannelError, VerificationError


class MemoryFile:
    """A file in memory, mapped. Its rank may overwrite it at any time: what is read counts only once it is verified."""

    def __init__(self, fetched: Fetched, name: str) -> None:
        """Takes over the descriptor."""
        self.name = name
        self.size_bytes = fetched.size_bytes
        self._view: memoryview | None = memoryview(b"")
        try:
            if fetched.size_bytes:
                self._view = memoryview(mmap.mmap(fetched.fd, fetched.size_bytes, prot=mmap.PROT_READ))
        except (OSError, ValueError) as error:
            raise VerificationError(f"{name}: cannot map {fetched.size_bytes} bytes of memory: {error}") from error
        finally:
            os.close(fetched.fd)

    def read_into(self, view: memoryview, offset: int) -> None:
        """See source.Opened."""
        assert self._view is not None
        part = self._view[offset : offset + len(view)]
        if len(part) != len(view):
            raise VerificationError(f"{self.name}: ends at byte {self.size_bytes}, expected {offset + len(view)}")
        view[:] = part

    def close(self) -> None:
        """See source.Opened."""
        self._view = None


class MemorySource:
    """What the job's nodes hold. A node that is lost, or an image that is overwritten meanwhile, makes a set incomplete."""

    tier: Literal["shm"] = "shm"
    where = "memory of the job's nodes"

    def __init__(self, channel: Exchange) -> None:
        self._channel = channel
        self.fetched: dict[str, str] = {}
        """Tier each file came from."""

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

    def _fetch(self, folder: str, name: str) -> MemoryFile:
        fetched = self._channel.fetch(folder, name)
        self.fetched[name] = fetched.tier
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
