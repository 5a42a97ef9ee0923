"""Boxes: rectangular parts of a tensor, and which of them each rank of a mesh holds.

Placements mean what they mean in torch's DTensor: a dimension of n rows over k ranks gives each ceil(n/k) of them, the last
ones fewer or none; several mesh dimensions that shard one tensor dimension cut it one after the other.
"""

from __future__ import annotations

import math
import re

import msgspec

_PLACEMENT = re.compile(r"replicate|shard:(?P<dim>\d{1,2})|strided:(?P<sdim>\d{1,2}):(?P<split>\d{1,9})")

REPLICATE = "replicate"


class Box(msgspec.Struct, frozen=True):
    """Elements [offset, offset + size) of each dimension; a scalar has none and is one element."""

    offsets: tuple[int, ...]
    sizes: tuple[int, ...]

    @property
    def elements(self) -> int:
        """How many elements it has."""
        return math.prod(self.sizes)


class Mesh(msgspec.Struct, frozen=True, omit_defaults=True):
    """Ranks in a grid of `shape`, row-major; `ranks` empty means 0, 1, 2, ... in order."""

    shape: tuple[int, ...]
    ranks: tuple[int, ...] = ()

    @property
    def size(self) -> int:
        """How many ranks it has."""
        return math.prod(self.shape)

    def coordinate(self, rank: int) -> tuple[int, ...] | None:
        """Where `rank` lies in the grid; None when it is not in it."""
        if self.ranks:
            if rank not in self.ranks:
                return None
            flat = self.ranks.index(rank)
        elif 0 <= rank < self.size:
            flat = rank
        else:
            return None
        return unravel(flat, self.shape)

    def rank_at(self, coordinate: tuple[int, ...]) -> int:
        """The rank at `coordinate`."""
        flat = 0
        for at, size in zip(coordinate, self.shape, strict=True):
            flat = flat * size + at
        return self.ranks[flat] if self.ranks else flat


def unravel(flat: int, shape: tuple[int, ...]) -> tuple[int, ...]:
    """Coordinate of element `flat` of a row-major grid of `shape`."""
    result = []
    for size in reversed(shape):
        flat, at = divmod(flat, size)
        result.append(at)
    return tuple(reversed(result))


def shard_dim(placement: str) -> int | None:
    """The tensor dimension that `placement` shards, None for replicate. Raises ValueError for any other text."""
    match = _PLACEMENT.fullmatch(placement)
    if match is None:
        raise ValueError(f"placement {placement!r} is not replicate, shard:DIM or strided:DIM:SPLIT")
    text = match["dim"] or match["sdim"]
    return None if text is None else int(text)


def whole(shape: tuple[int, ...]) -> Box:
    """All of a tensor of `shape`."""
    return Box((0,) * len(shape), shape)


def part_of(size: int, parts: int, at: int) -> tuple[int, int]:
    """Begin and length of part `at` when `size` rows are dealt to `parts` ranks as torch.chunk does."""
    step = -(-size // parts)
    begin = min(at * step, size)
    return begin, min(step, size - begin)


def cutting_order(placements: tuple[str, ...]) -> list[int]:
    """Mesh dimensions in the order in which they cut the tensor.

    A strided shard (what FSDP makes of a tensor that is already sharded) is cut after the dimensions to its right.
    """
    plain = [dim for dim, text in enumerate(placements) if text.startswith("shard:")]
    strided = [dim for dim, text in enumerate(placements) if text.startswith("strided:")]
    return plain + strided[::-1]


def local_box(
    shape: tuple[int, ...], mesh_shape: tuple[int, ...], placements: tuple[str, ...], coordinate: tuple[int, ...]
) -> Box:
    """The part of a tensor of `shape` that the rank at `coordinate` of the mesh holds. It may be empty."""
    offsets, sizes = [0] * len(shape), list(shape)
    for mesh_dim in cutting_order(placements):
        dim = shard_dim(placements[mesh_dim])
        assert dim is not None
        begin, length = part_of(sizes[dim], mesh_shape[mesh_dim], coordinate[mesh_dim])
        offsets[dim] += begin
        sizes[dim] = length
    return Box(tuple(offsets), tuple(sizes))


def overlap(a: Box, b: Box) -> Box | None:
    """What `a` and `b` have in common; None when that is nothing."""
    offsets = tuple(max(x, y) for x, y in zip(a.offsets, b.offsets, strict=True))
    ends = [min(x + n, y + m) for x, n, y, m in zip(a.offsets, a.sizes, b.offsets, b.sizes, strict=True)]
    sizes = tuple(end - begin for begin, end in zip(offsets, ends, strict=True))
    return Box(offsets, sizes) if all(size > 0 for size in sizes) else None


def covering_range(outer: Box, inner: Box) -> tuple[int, int]:
    """Elements [begin, end) of row-major `outer` from the first to the last element of `inner`, which lies in it."""
    first = last = 0
    for begin, size, offset, length in zip(outer.offsets, outer.sizes, inner.offsets, inner.sizes, strict=True):
        first = first * size + (offset - begin)
        last = last * size + (offset - begin + length - 1)
    return first, last + 1


def is_contiguous(outer: Box, inner: Box) -> bool:
    """True when the elements of `inner` lie side by side in row-major `outer`."""
    begin, end = covering_range(outer, inner)
    return end - begin == inner.elements
