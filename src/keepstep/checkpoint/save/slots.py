"""Slots: shared memory in which images are staged, and kept as the memory tier.

A slot is used again and again: fresh pages cost several times the copy. With two of them one holds the newest complete image while
the other is filled.
"""

from __future__ import annotations

import mmap
import os
from collections.abc import Callable

from keepstep.records.errors import StorageError

_ROUND_BYTES = 2 << 20


class Slot:
    """One of this rank's staging buffers. `kept` is the step whose image the memory tier has of it, None for none."""

    def __init__(self, name: str) -> None:
        self.name = name
        self.fd = -1
        self.memory: memoryview | None = None
        self.room: object | None = None
        self.kept: int | None = None
        self.busy = False

    def __len__(self) -> int:
        return 0 if self.memory is None else len(self.memory)

    def view(self, size_bytes: int) -> memoryview:
        """Its first bytes."""
        assert self.memory is not None
        return self.memory[:size_bytes]

    def close(self) -> None:
        """Let go of the memory. The launcher keeps its own hold of it."""
        close = getattr(self.room, "close", None)
        if close is not None:
            close()
        self.room = self.memory = None
        if self.fd >= 0:
            os.close(self.fd)
            self.fd = -1


class Slots:
    """The slots of one Checkpointer in one rank."""

    def __init__(self, name: str, buffer: Callable[[str, int], int], count: int) -> None:
        """`buffer(name, size_bytes)` gives a descriptor of shared memory of that name, as the side channel does."""
        self._buffer = buffer
        self.all = [Slot(f"{name}-slot-{number}") for number in range(count)]

    def free(self) -> Slot | None:
        """The slot to stage in: one that no save uses, and not the newest complete image unless there is no other."""
        idle = [slot for slot in self.all if not slot.busy]
        newest = max((slot.kept for slot in self.all if slot.kept is not None), default=None)
        idle.sort(key=lambda slot: (slot.kept is not None and slot.kept == newest, slot.kept or -1))
        return idle[0] if idle else None

    def note_kept(self, name: str, step: int) -> None:
        """The memory tier has the image of `step` in slot `name`: it is spared while there is another."""
        for slot in self.all:
            if slot.name == name:
                slot.kept = step

    def other_than(self, slot: Slot) -> Slot | None:
        """An idle slot that is not `slot`."""
        return next((other for other in self.all if other is not slot and not other.busy), None)

    def grow(self, slot: Slot, size_bytes: int) -> None:
        """Make room for `size_bytes` in `slot`. Raises StorageError or ChannelError when there is no memory for it."""
        if len(slot) >= size_bytes:
            return
        wanted = -(-(size_bytes + size_bytes // 8 + 1) // _ROUND_BYTES) * _ROUND_BYTES
        slot.close()
        fd = self._buffer(slot.name, wanted)
        try:
            slot.memory = memoryview(mmap.mmap(fd, wanted))
        except (OSError, ValueError) as error:
            os.close(fd)
            raise StorageError(f"cannot map a staging buffer of {wanted} bytes: {error}") from error
        slot.fd = fd

    def close(self) -> None:
        """Let go of all of them."""
        for slot in self.all:
            slot.close()
