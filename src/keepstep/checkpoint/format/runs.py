"""Boxes of a tensor: an offset and a size in each dimension, and where their elements lie in row-major order."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from typing import NamedTuple


class Run(NamedTuple):
    """`length` elements that follow one another both in a box (from `inner`) and in what it lies in (from `outer`)."""

    inner: int
    outer: int
    length: int


def strides(shape: Sequence[int]) -> tuple[int, ...]:
    """Elements from one index to the next in each dimension, row-major."""
    result = [1] * len(shape)
    for dim in range(len(shape) - 2, -1, -1):
        result[dim] = result[dim + 1] * shape[dim + 1]
    return tuple(result)


def runs(shape: Sequence[int], offsets: Sequence[int], sizes: Sequence[int]) -> Iterator[Run]:
    """Runs of the box at `offsets` of `sizes` inside a tensor of `shape`, in order; none when the box is empty."""
    if math.prod(sizes) == 0:
        return
    # Dimensions that the box fills from the right, and one more, lie in one run.
    split = len(shape)
    count = 1
    while split > 0:
        split -= 1
        count *= sizes[split]
        if sizes[split] != shape[split]:
            break
    steps = strides(shape)
    first = sum(offset * step for offset, step in zip(offsets, steps, strict=True))
    index = [0] * split
    inner = 0
    while True:
        outer = first + sum(at * steps[dim] for dim, at in enumerate(index))
        yield Run(inner, outer, count)
        inner += count
        for dim in range(split - 1, -1, -1):
            index[dim] += 1
            if index[dim] < sizes[dim]:
                break
            index[dim] = 0
        else:
            return


def overlap(
    a_offsets: Sequence[int], a_sizes: Sequence[int], b_offsets: Sequence[int], b_sizes: Sequence[int]
) -> tuple[tuple[int, ...], tuple[int, ...]] | None:
    """Offsets and sizes of what two boxes share, None when that is nothing."""
    begin = tuple(max(a, b) for a, b in zip(a_offsets, b_offsets, strict=True))
    end = tuple(min(a + m, b + n) for a, m, b, n in zip(a_offsets, a_sizes, b_offsets, b_sizes, strict=True))
    if any(low >= high for low, high in zip(begin, end, strict=True)):
        return None
    return begin, tuple(high - low for low, high in zip(begin, end, strict=True))


def tiling_problem(shape: Sequence[int], boxes: Sequence[tuple[Sequence[int], Sequence[int]]]) -> str | None:
    """Why `boxes` (offsets, sizes) do not cover a tensor of `shape` exactly once; None when they do."""
    volume = 0
    for offsets, sizes in boxes:
        if len(offsets) != len(shape) or len(sizes) != len(shape):
            return f"a chunk has {len(offsets)} dimensions, the tensor {len(shape)}"
        for offset, size, dim in zip(offsets, sizes, shape, strict=True):
            if offset < 0 or size < 0 or offset + size > dim:
                return f"the chunk at {list(offsets)} of {list(sizes)} lies outside of {list(shape)}"
        volume += math.prod(sizes)
    if volume != math.prod(shape):
        return f"its chunks hold {volume} elements, the tensor has {math.prod(shape)}"
    if not shape:
        return None if len(boxes) == 1 else f"{len(boxes)} chunks of a scalar"
    # With the right volume inside the bounds, no overlap means that every element is covered. Sweep along dimension 0.
    active: list[tuple[Sequence[int], Sequence[int]]] = []
    for offsets, sizes in sorted((box for box in boxes if math.prod(box[1])), key=lambda box: tuple(box[0])):
        active = [box for box in active if box[0][0] + box[1][0] > offsets[0]]
        for other in active:
            if overlap(offsets, sizes, other[0], other[1]) is not None:
                return f"the chunks at {list(other[0])} and {list(offsets)} overlap"
        active.append((offsets, sizes))
    return None
