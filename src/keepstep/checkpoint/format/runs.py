"""Where the elements of a box lie in the row-major bytes of its tensor, and whether boxes cover a tensor."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from typing import NamedTuple

from keepstep.checkpoint.format.boxes import Box, overlap


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


def tiling_problem(shape: tuple[int, ...], boxes: Sequence[Box]) -> str | None:
    """Why `boxes` do not cover a tensor of `shape` exactly once; None when they do."""
    for box in boxes:
        if len(box.offsets) != len(shape) or len(box.sizes) != len(shape):
            return f"a chunk has {len(box.offsets)} dimensions, the tensor {len(shape)}"
        for offset, size, dim in zip(box.offsets, box.sizes, shape, strict=True):
            if offset < 0 or size < 0 or offset + size > dim:
                return f"the chunk at {list(box.offsets)} of {list(box.sizes)} lies outside of {list(shape)}"
    volume = sum(box.elements for box in boxes)
    if volume != math.prod(shape):
        return f"its chunks hold {volume} elements, the tensor has {math.prod(shape)}"
    if not shape:
        return None if len(boxes) == 1 else f"{len(boxes)} chunks of a scalar"
    # With the right volume inside the bounds, no overlap means that every element is covered. Sweep along dimension 0.
    active: list[Box] = []
    for box in sorted((box for box in boxes if box.elements), key=lambda box: box.offsets):
        active = [other for other in active if other.offsets[0] + other.sizes[0] > box.offsets[0]]
        for other in active:
            if overlap(other, box) is not None:
                return f"the chunks at {list(other.offsets)} and {list(box.offsets)} overlap"
        active.append(box)
    return None
