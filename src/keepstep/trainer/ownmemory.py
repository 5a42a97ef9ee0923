"""Memory checkpoints without a launcher: what this process keeps of its own buffers, for as long as it lives."""

from __future__ import annotations

import os
import threading
from collections.abc import Mapping
from typing import Any

from keepstep.checkpoint.exchange import Exchange, Fetched, KeptFile, KeptSet
from keepstep.checkpoint.format.layout import FolderName, is_plain_file_name, parse_folder_name
from keepstep.records.errors import ChannelError

SHOWN_SETS = 16


def memory_buffer(name: str, size_bytes: int) -> int:
    """A fully sized memfd of this process. Raises ChannelError."""
    try:
        fd = os.memfd_create(f"keepstep-{name}"[:200], os.MFD_CLOEXEC)
        os.ftruncate(fd, size_bytes)
    except OSError as error:
        raise ChannelError(f"cannot make a shared buffer of {size_bytes} bytes: {error}") from error
    return fd


class MemoryCalls:
    """The part of a channel that is about memory, answered by `_memory`: another channel, or this process's own."""

    _memory: Exchange | OwnMemory

    def buffer(self, name: str, size_bytes: int) -> int:
        return self._memory.buffer(name, size_bytes)

    def keep(self, buffer: str, checkpoint: str, file: str, size_bytes: int, facts: Mapping[str, Any]) -> bool:
        return self._memory.keep(buffer, checkpoint, file, size_bytes, facts)

    def unkeep(self, buffer: str) -> None:
        self._memory.unkeep(buffer)

    def kept(self) -> list[KeptSet]:
        return self._memory.kept()

    def kept_files(self, checkpoint: str) -> list[KeptFile]:
        return self._memory.kept_files(checkpoint)

    def fetch(self, checkpoint: str, file: str) -> Fetched:
        return self._memory.fetch(checkpoint, file)


class OwnMemory:
    """Buffers by name and what they hold. Threads that play ranks share one object, so their buffers need names of their own."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._fds: dict[str, int] = {}
        self._held: dict[str, KeptFile] = {}

    def buffer(self, name: str, size_bytes: int) -> int:
        """Fresh memory, for the caller to close; the name means it from now on. Raises ChannelError."""
        fd = memory_buffer(name, size_bytes)
        with self._lock:
            self._held.pop(name, None)
            before, self._fds[name] = self._fds.get(name), os.dup(fd)
        if before is not None:
            os.close(before)
        return fd

    def keep(self, buffer: str, checkpoint: str, file: str, size_bytes: int, facts: Mapping[str, Any]) -> bool:
        """See Exchange.keep. Raises ChannelError."""
        if parse_folder_name(checkpoint) is None or not is_plain_file_name(file):
            raise ChannelError(f"{checkpoint[:200]!r}, {file[:200]!r}: not a file of a checkpoint folder")
        kept = KeptFile(checkpoint=checkpoint, file=file, size_bytes=size_bytes, tier="shm", facts=dict(facts))
        with self._lock:
            have = os.fstat(self._fds[buffer]).st_size if buffer in self._fds else 0
            if not 0 < size_bytes <= have:
                raise ChannelError(f"keep {size_bytes} bytes of buffer {buffer!r}: it has {have}")
            same = [name for name, held in self._held.items() if (held.checkpoint, held.file) == (checkpoint, file)]
            for name in same:
                del self._held[name]
            self._held[buffer] = kept
        return True

    def unkeep(self, buffer: str) -> None:
        """See Exchange.unkeep."""
        with self._lock:
            self._held.pop(buffer, None)

    def kept(self) -> list[KeptSet]:
        """See Exchange.kept."""
        sets: dict[str, list[KeptFile]] = {}
        with self._lock:
            for held in self._held.values():
                sets.setdefault(held.checkpoint, []).append(held)
        newest = sorted(sets, key=_order, reverse=True)[:SHOWN_SETS]
        return [_summary(name, sets[name]) for name in newest]

    def kept_files(self, checkpoint: str) -> list[KeptFile]:
        """See Exchange.kept_files."""
        with self._lock:
            return sorted((h for h in self._held.values() if h.checkpoint == checkpoint), key=lambda h: h.file)

    def fetch(self, checkpoint: str, file: str) -> Fetched:
        """See Exchange.fetch."""
        with self._lock:
            for name, held in self._held.items():
                if (held.checkpoint, held.file) == (checkpoint, file):
                    fd = os.open(f"/proc/self/fd/{self._fds[name]}", os.O_RDONLY | os.O_CLOEXEC)
                    return Fetched(fd=fd, size_bytes=held.size_bytes, tier="shm", facts=held.facts)
        raise ChannelError(
            f"{checkpoint}/{file}: not in the memory of this process, and there is no launcher that keeps more"
        )

    def close(self) -> None:
        """Give the memory back."""
        with self._lock:
            self._held.clear()
            fds, self._fds = self._fds, {}
        for fd in fds.values():
            os.close(fd)


def _order(checkpoint: str) -> FolderName:
    name = parse_folder_name(checkpoint)
    assert name is not None, "checked when it was kept"
    return name


def _summary(checkpoint: str, files: list[KeptFile]) -> KeptSet:
    first, *others = (held.facts for held in files)
    common = {k: v for k, v in first.items() if all(k in facts and facts[k] == v for facts in others)}
    size_bytes = sum(held.size_bytes for held in files)
    return KeptSet(checkpoint=checkpoint, files=len(files), size_bytes=size_bytes, facts=common)
