"""Staging: this rank's part of a state copied into a slot, as the image that is then sealed, kept and written.

What follows from the structure of the state alone (which bytes this rank writes, where they lie) is worked out once and used again
until a name, shape, type or placement changes.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

import msgspec

from keepstep.checkpoint.format.image import ImageLayout, TensorTable, image_layout, tensor_table
from keepstep.checkpoint.format.index import Index
from keepstep.checkpoint.format.plan import Plan, plan_digest
from keepstep.checkpoint.save.slots import Slot, Slots

if TYPE_CHECKING:
    from keepstep.checkpoint.torch.state import Captured


class Staged(msgspec.Struct, kw_only=True):
    """A staged state: the first `file_bytes` of `slot` are the image, but for the block digests."""

    slot: Slot
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

    def stage(self, state: Mapping[str, Any], slot: Slot) -> Staged:
        """Copy this rank's part of `state` into `slot`; blocks until the copy is whole, and no longer.

        Raises ConfigError naming what cannot be saved, StorageError or ChannelError when there is no memory.
        """
        from keepstep.checkpoint.torch.state import Room, capture, stage

        captured = capture(state, self._per_rank, rank=self._rank, world_size=self._world_size, known=self._known)
        table = self._planned(captured)
        blob = msgspec.json.encode(captured.own)
        if self._layout is None or self._blob_bytes != len(blob):
            self._layout, self._blob_bytes = image_layout(table, len(blob)), len(blob)
        layout = self._layout
        if len(slot) < layout.file_bytes:
            self.slots.grow(slot, layout.file_bytes)
        if slot.room is None:
            assert slot.memory is not None
            slot.room = Room(slot.memory)
        assert isinstance(slot.room, Room)
        stage(captured, table, layout, blob, slot.room)
        index = Index(
            world=self._world_size,
            tensors=captured.tensors,
            aliases=captured.aliases,
            values=captured.values,
            meshes=captured.meshes,
        )
        captured.sources = {}  # the tensors are the script's; only their descriptions are kept
        return Staged(slot=slot, file_bytes=layout.file_bytes, index=index, plan=self._plan)

    def image_bytes(self, state: Mapping[str, Any]) -> int:
        """Size of this rank's image of `state`, before anything is staged. Raises ConfigError."""
        from keepstep.checkpoint.torch.state import capture

        captured = capture(state, self._per_rank, rank=self._rank, world_size=self._world_size, known=self._known)
        return image_layout(self._planned(captured), len(msgspec.json.encode(captured.own))).file_bytes

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
