"""Reading a file in order while the next chunks are already under way, so that hashing hides behind reading."""

from __future__ import annotations

import mmap
from collections import deque
from collections.abc import Generator
from concurrent.futures import Future, ThreadPoolExecutor

from keepstep.checkpoint.storage.source import Opened

_INLINE_BYTES = 1 << 20  # below this a thread costs more than it hides


def room(size_bytes: int) -> memoryview:
    """`size_bytes` of anonymous memory: page-aligned, and back with the system as soon as it is dropped."""
    return memoryview(mmap.mmap(-1, size_bytes, flags=mmap.MAP_PRIVATE)) if size_bytes else memoryview(b"")


def read_ahead(opened: Opened, *, chunk_bytes: int, depth: int) -> Generator[memoryview, None, None]:
    """The bytes of `opened` in order, in views of at most `chunk_bytes`; up to `depth` more are being read meanwhile.

    A view is valid until the next one is asked for. Close the generator before `opened`: reads may be under way. Raises what
    `read_into` raises.
    """
    size = opened.size_bytes
    if size <= _INLINE_BYTES:
        if size:
            view = room(size)
            opened.read_into(view, 0)
            yield view
        return
    ring = [room(min(chunk_bytes, size)) for _ in range(depth + 1)]
    pending: deque[tuple[memoryview, Future[None]]] = deque()
    with ThreadPoolExecutor(depth, thread_name_prefix="keepstep-read") as pool:
        try:
            for number, offset in enumerate(range(0, size, chunk_bytes)):
                view = ring[number % len(ring)][: min(chunk_bytes, size - offset)]
                pending.append((view, pool.submit(opened.read_into, view, offset)))
                if len(pending) > depth:  # the caller holds one view and `depth` are under way: the whole ring
                    yield _finished(pending)
            while pending:
                yield _finished(pending)
        finally:
            for _, future in pending:
                future.cancel()


def _finished(pending: deque[tuple[memoryview, Future[None]]]) -> memoryview:
    view, future = pending.popleft()
    future.result()
    return view
