"""Which bytes of which tensor go into which rank's file.

Replicated tensors are written once: in the order of their names they form one run of bytes, and rank r of W writes
[r*T/W, (r+1)*T/W), each bound moved down to an element. Writer and reader compute the same split; nothing about it is
stored.
"""

from __future__ import annotations

import hashlib
import math

import msgspec

from keepstep.checkpoint.format.dtypes import ITEM_BYTES, NATIVE_BYTES
from keepstep.records.codec import to_json


class TensorMeta(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """One tensor of the index: `dtype` is a code of keepstep.checkpoint.format.dtypes, `shape` the global shape.

    `owner` is the only rank that writes it, or None when it is split over all replicas.
    """

    dtype: str
    shape: tuple[int, ...]
    mesh: tuple[int, ...] | None = None
    placements: tuple[str, ...] = ("replicate",)
    owner: int | None = None

    @property
    def size_bytes(self) -> int:
        """Bytes of the whole tensor."""
        return math.prod(self.shape) * ITEM_BYTES[self.dtype]


class Piece(msgspec.Struct, frozen=True):
    """Bytes [begin, end) of tensor `name`."""

    name: str
    begin: int
    end: int


class StoredTensor(msgspec.Struct, frozen=True):
    """How a piece is spelled in a file's header: a code every reader knows, a shape, and its bytes."""

    dtype: str
    shape: tuple[int, ...]
    size_bytes: int


def pieces_by_rank(tensors: dict[str, TensorMeta], world_size: int) -> list[list[Piece]]:
    """Split `tensors` over `world_size` files. Each byte of each tensor is in exactly one piece."""
    result: list[list[Piece]] = [[] for _ in range(world_size)]
    split = []
    for name in sorted(tensors):
        meta = tensors[name]
        if meta.owner is None:
            split.append((name, meta))
        elif meta.size_bytes:
            result[meta.owner].append(Piece(name, 0, meta.size_bytes))
    total = sum(meta.size_bytes for _, meta in split)
    bounds = [rank * total // world_size for rank in range(world_size + 1)]
    rank, offset = 0, 0
    for name, meta in split:
        size, item = meta.size_bytes, ITEM_BYTES[meta.dtype]
        begin = 0
        while begin < size:
            while bounds[rank + 1] <= offset + begin:
                rank += 1
            end = min(size, bounds[rank + 1] - offset)
            if end < size:
                end -= end % item
            if end > begin:
                result[rank].append(Piece(name, begin, end))
            if end < size:
                rank += 1
            begin = max(begin, end)
        offset += size
    return result


def stored(piece: Piece, meta: TensorMeta) -> StoredTensor:
    """How `piece` of a tensor like `meta` is spelled in the header: whole tensors keep their shape, parts are flat."""
    size = piece.end - piece.begin
    if meta.dtype not in NATIVE_BYTES:
        return StoredTensor("U8", (size,), size)
    if size == meta.size_bytes:
        return StoredTensor(meta.dtype, meta.shape, size)
    return StoredTensor(meta.dtype, (size // NATIVE_BYTES[meta.dtype],), size)


def plan_digest(tensors: dict[str, TensorMeta], aliases: dict[str, str]) -> str:
    """A digest of what is to be saved; ranks whose digests differ do not hold replicas of one state."""
    return hashlib.sha256(to_json([tensors, aliases])).hexdigest()
