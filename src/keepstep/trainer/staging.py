"""Staging: this rank's part of a state copied into a slot, as the image that is then sealed, kept and written.

What follows from the structure of the state alone (which bytes this rank writes, where they lie) is worked out once and used again
until a name, shape, type or placement changes.
"""

from __future__ import annotations

import mmap
import socket
import sys
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

import msgspec

from keepstep.checkpoint.exchange import Exchange, NoRoomError
from keepstep.checkpoint.format.blocks import BLOCK_BYTES
from keepstep.checkpoint.format.image import ImageLayout, TensorTable, image_layout, tensor_table
from keepstep.checkpoint.format.index import Index
from keepstep.checkpoint.format.plan import LARGE_SHARES, Plan, plan_digest
from keepstep.checkpoint.save.memoryset import MemorySet
from keepstep.checkpoint.save.slots import Slot, Slots
from keepstep.checkpoint.save.stream import too_large, write_stream
from keepstep.checkpoint.storage.writer import FileFact
from keepstep.records.hostmemory import available_memory_bytes

if TYPE_CHECKING:
    from keepstep.checkpoint.torch.state import Captured


class Staged(msgspec.Struct, kw_only=True):
    """A staged state: the first `file_bytes` of `slot` are the image, but for the block digests.

    Without a slot there was no room: `stream` writes the image to a path from the state's own tensors, which must not change
    meanwhile.
    """

    slot: Slot | None
    stream: Callable[[Path], FileFact] | None = None
    file_bytes: int
    index: Index
    plan: str


class Stager:
    """Takes states apart and stages them, for one rank of one Checkpointer."""

    def __init__(self, slots: Slots, per_rank: frozenset[str], rank: int, world_size: int) -> None:
        self.slots = slots
        self.planned = 0
        """How often the split over ranks was worked out."""
        self._per_rank = per_rank
        self._rank = rank
        self._world_size = world_size
        self._known: Captured | None = None
        self._table: TensorTable | None = None
        self._plan = ""
        self._layout: ImageLayout | None = None
        self._blob_bytes = 0

    def stage(self, state: Mapping[str, Any], slot: Slot, room_bytes: Callable[[], int]) -> Staged:
        """Copy this rank's part of `state` into `slot`; blocks until the copy is whole, and no longer.

        A slot that is too small grows when `room_bytes()` allows it; else the state is left to be streamed. Raises ConfigError
        naming what cannot be saved, StorageError or ChannelError when there is no memory.
        """
        from keepstep.checkpoint.torch.state import Room, capture, stage

        captured = capture(state, self._per_rank, rank=self._rank, world_size=self._world_size, known=self._known)
        table = self._planned(captured)
        blob = msgspec.json.encode(captured.own)
        if self._layout is None or self._blob_bytes != len(blob):
            self._layout, self._blob_bytes = image_layout(table, len(blob)), len(blob)
        layout = self._layout
        index = Index(
            world=self._world_size,
            tensors=captured.tensors,
            aliases=captured.aliases,
            values=captured.values,
            meshes=captured.meshes,
            split=LARGE_SHARES,
        )
        fits = len(slot) >= layout.file_bytes
        if not fits and (layout.file_bytes > room_bytes() or not self._grow(slot, layout.file_bytes)):
            stream = _streaming(captured, table, layout, blob)
            return Staged(slot=None, stream=stream, file_bytes=layout.file_bytes, index=index, plan=self._plan)
        if slot.room is None:
            assert slot.memory is not None
            slot.room = Room(slot.memory)
        assert isinstance(slot.room, Room)
        stage(captured, table, layout, blob, slot.room)
        captured.sources = {}  # the tensors are the script's; only their descriptions are kept
        return Staged(slot=slot, file_bytes=layout.file_bytes, index=index, plan=self._plan)

    def _grow(self, slot: Slot, size_bytes: int) -> bool:
        """Make room in `slot`; False when a launcher, which keeps the buffers and knows which it has, finds no memory for it."""
        try:
            self.slots.grow(slot, size_bytes)
        except NoRoomError:
            return False
        return True

    def _planned(self, captured: Captured) -> TensorTable:
        known = self._known
        if (
            self._table is None
            or known is None
            or captured.tensors != known.tensors
            or captured.own.tensors != known.own.tensors
            or captured.aliases != known.aliases
            or captured.meshes != known.meshes
        ):
            plan = Plan(captured.tensors, captured.meshes, self._world_size)
            self._table = tensor_table(plan, captured.own.tensors, self._rank)
            self._plan = plan_digest(captured.tensors, captured.aliases, captured.meshes)
            self._layout = None
            self.planned += 1
        self._known = captured
        return self._table


def _streaming(captured: Captured, table: TensorTable, layout: ImageLayout, blob: bytes) -> Callable[[Path], FileFact]:
    """A function that writes the image to a path, one block at a time."""
    from keepstep.checkpoint.torch.state import Room, fill_window

    captured = msgspec.structs.replace(captured)  # with references to the tensors, for as long as the writing takes

    def write(path: Path) -> FileFact:
        window = Room(memoryview(mmap.mmap(-1, min(BLOCK_BYTES, layout.body_bytes))))
        try:
            return write_stream(
                path,
                layout.body_bytes,
                window.memory,
                lambda begin, end: fill_window(captured, table, layout, blob, window, begin, end),
            )
        finally:
            window.close()

    return write


class Staging:
    """The staging buffers of one Checkpointer in one rank: which one is used next, and what to do when memory is short."""

    def __init__(self, channel: Exchange, stager: Stager, *, memory: bool, held: bool, limit_bytes: int | None) -> None:
        """`memory`: complete images are kept in the buffers beyond this process. `held`: a launcher holds the buffers.

        `limit_bytes`: of all buffers together.
        """
        self.slots = stager.slots
        self._stager = stager
        self._sets = {slot.name: MemorySet(channel, slot.name) for slot in self.slots.all} if memory else {}
        self._limit_bytes = limit_bytes
        self._held = held
        self._said: set[str] = set()

    def memory_of(self, staged: Staged) -> MemorySet | None:
        """What keeps the staged image in memory; None when it is not kept."""
        return None if staged.slot is None else self._sets.get(staged.slot.name)

    def stage(self, state: Mapping[str, Any], where: str, *, may_stream: bool) -> Staged:
        """Stage `state` in the buffer that is free. `where` is the root, for messages.

        Raises StorageError with the numbers when it fits nowhere and `may_stream` does not allow it to be written block by block;
        and as `Stager.stage` does.
        """
        slot = self.slots.free()
        assert slot is not None, "one save in flight"
        if slot.name in self._sets:
            self._sets[slot.name].forget()
            slot.kept = None
        staged = self._stager.stage(state, slot, self._room_bytes)
        if staged.slot is not None:
            return staged
        image, other = staged.file_bytes, self.slots.other_than(slot)
        room = min(available_memory_bytes(), self._room_bytes())
        if other is not None and len(other) >= image:
            # One buffer instead of two: no complete image is in memory while the next one is staged.
            self._say(
                "one", f"a second image of {image} bytes does not fit into the {room} bytes that are free: one is kept"
            )
            self.slots.all.remove(slot)
            return self.stage(state, where, may_stream=may_stream)
        if not may_stream:
            raise too_large(image, room, where)
        self._say(
            "none",
            f"an image of {image} bytes does not fit into the {room} bytes that are free: it is written block by block, and "
            "training waits for it; give the job more memory, or more ranks",
        )
        return staged

    def _room_bytes(self) -> int:
        """Memory that a staging buffer may take now."""
        free = available_memory_bytes()
        if self._held:
            # The launcher may have the buffer from the cycle before: it looks itself before it takes memory.
            free = sys.maxsize
        if self._limit_bytes is None:
            return free
        return min(free, self._limit_bytes - sum(len(slot) for slot in self.slots.all))

    def _say(self, key: str, text: str) -> None:
        if key not in self._said:
            self._said.add(key)
            print(f"keepstep: {socket.gethostname()}: {text}", file=sys.stderr, flush=True)
