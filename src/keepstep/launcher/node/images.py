"""What this node's memory holds of checkpoints: staging buffers of its ranks, and copies of other nodes' images.

All of it is memfds of the agent, so it survives the ranks. An *image* is the bytes of one file of one checkpoint folder, with
facts that only ranks understand (`fingerprint` apart: records of keepstep.checkpoint.format.fingerprint). Nothing here judges
whether a set is complete; it lists what is there.

Memory is bounded: a rank has so many buffers; copies give way to buffers; images of ranks that moved away, and those that were
fetched from elsewhere, go once every rank of this node has kept KEPT_BEFORE_RELEASE newer checkpoints.
"""

from __future__ import annotations

import errno
import json
import os
import threading
from collections.abc import Callable, Collection
from typing import Any, Literal

import msgspec

from keepstep.checkpoint.format.layout import is_plain_file_name, parse_folder_name
from keepstep.launcher.procs import make_memfd
from keepstep.records.hostmemory import available_memory_bytes

MAX_BUFFERS = 64
"""Of one rank."""
MAX_FACTS_BYTES = 2048
"""JSON text of the facts of one image."""
MAX_COPIED_SETS = 2
"""Checkpoints of which copies for another node are held at once: the newest whole one, and the one being copied."""
KEPT_BEFORE_RELEASE = 2
"""With one checkpoint in flight the one before the second is complete in the whole job."""

Key = tuple[str, str]
"""(checkpoint folder, file)."""
Kind = Literal["peer", "fetched"]


class Image(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """One file of one checkpoint in this node's memory. `copy`: no rank of this node wrote it."""

    checkpoint: str
    file: str
    size_bytes: int
    facts: dict[str, Any] = {}
    copy: bool = False

    @property
    def key(self) -> Key:
        return self.checkpoint, self.file


class _Buffer:
    def __init__(self, fd: int, size_bytes: int) -> None:
        self.fd = fd
        self.size_bytes = size_bytes
        self.image: Image | None = None


class _Copy(msgspec.Struct, frozen=True):
    fd: int
    image: Image
    kind: Kind


def checked_image(checkpoint: str, file: str, size_bytes: int, facts: dict[str, Any], copy: bool = False) -> Image:
    """Raises ValueError for names that are none of ours, sizes that cannot be and facts that are too long."""
    if parse_folder_name(checkpoint) is None or not is_plain_file_name(file):
        raise ValueError(f"{checkpoint[:200]!r}, {file[:200]!r}: not a file of a checkpoint folder")
    if size_bytes <= 0:
        raise ValueError(f"image of {size_bytes} bytes")
    if len(json.dumps(facts, separators=(",", ":"))) > MAX_FACTS_BYTES:
        raise ValueError(f"facts of more than {MAX_FACTS_BYTES} bytes")
    return Image(checkpoint=checkpoint, file=file, size_bytes=size_bytes, facts=facts, copy=copy)


class NodeImages:
    """May be used from several threads. Calls that allocate may take seconds and are for threads; all others are short."""

    def __init__(
        self,
        *,
        enabled: bool = True,
        available: Callable[[], int] = available_memory_bytes,
        on_change: Callable[[], None] = lambda: None,
    ) -> None:
        """`enabled`: off keeps nothing (buffers work). `on_change` is called, in any thread, when `take_changes` has news."""
        self.enabled = enabled
        self._available = available
        self._on_change = on_change
        self._lock = threading.Lock()
        self._allocating = threading.Lock()
        """Held by whoever takes memory: of two at once each would believe in the same free bytes."""
        self._buffers: dict[tuple[int, str], _Buffer] = {}
        self._copies: dict[Key, _Copy] = {}
        """In the order in which they came."""
        self._kept_in: dict[Key, tuple[int, str]] = {}
        self._changed: set[Key] = set()
        self._dropped: list[int] = []
        """Descriptors to close. The kernel frees many gigabytes in no short time, so that threads do it."""
        self._freeing = threading.Lock()
        self._local: frozenset[int] | None = None
        self._kept_here: dict[int, set[str]] = {}
        """Rank of the present cycle -> checkpoints it kept in it."""

    # ---- buffers of ranks

    def buffer(self, rank: int, name: str, size_bytes: int) -> int:
        """A descriptor, for the caller to close, of the same memory for the same rank, name and size, in every cycle.

        Another size is fresh memory: what the old one held is listed no more. Raises OSError (no memory) or ValueError.
        """
        if size_bytes <= 0:
            raise ValueError(f"buffer {name!r}: size {size_bytes} bytes")
        with self._allocating:
            with self._lock:
                held = self._buffers.get((rank, name))
                if held is not None and held.size_bytes == size_bytes:
                    return os.dup(held.fd)
                if held is None and sum(k[0] == rank for k in self._buffers) >= MAX_BUFFERS:
                    raise ValueError(f"rank {rank} has {MAX_BUFFERS} buffers already")
                self._drop_buffer((rank, name))
            self._make_room(size_bytes)
            fd = _allocate(f"keepstep-{rank}-{name}", size_bytes, self._available())
            with self._lock:
                self._buffers[rank, name] = _Buffer(fd, size_bytes)
                copy = os.dup(fd)
        self._tell()
        return copy

    def keep(self, rank: int, name: str, image: Image) -> bool:
        """The first bytes of this buffer are `image`, which replaces what it held. False when nothing is kept here at all.

        Raises ValueError when there is no such buffer or it is too small.
        """
        with self._lock:
            held = self._buffers.get((rank, name))
            if held is None or image.size_bytes > held.size_bytes:
                have = "none" if held is None else f"{held.size_bytes} bytes"
                raise ValueError(f"keep {image.size_bytes} bytes of buffer {name!r} of rank {rank}: there is {have}")
            if not self.enabled:
                return False
            self._unkeep((rank, name))
            if image.key in self._kept_in:
                self._unkeep(self._kept_in[image.key])
            self._drop_copy(image.key)
            held.image = image
            self._kept_in[image.key] = (rank, name)
            self._changed.add(image.key)
            if self._local is not None and rank in self._local:
                self._kept_here.setdefault(rank, set()).add(image.checkpoint)
                self._release_superseded()
        self._tell()
        return True

    def unkeep(self, rank: int, name: str) -> None:
        """This buffer is about to be overwritten: what it held is listed no more. Nothing happens when it held nothing."""
        with self._lock:
            self._unkeep((rank, name))
        self._tell()

    def begin_cycle(self, ranks: Collection[int]) -> None:
        """A cycle begins in which this node has these ranks. Buffers of others that hold nothing are given back."""
        with self._lock:
            self._local = frozenset(ranks)
            self._kept_here = {}
            for key, held in list(self._buffers.items()):
                if key[0] not in self._local and held.image is None:
                    self._drop_buffer(key)
        self._tell()

    # ---- images

    def images(self) -> list[Image]:
        """Everything that is held."""
        with self._lock:
            return self._all()

    def take_changes(self) -> tuple[list[Image], list[Key]]:
        """(new or changed, gone) since the last call."""
        with self._lock:
            changed, self._changed = self._changed, set()
            now = {image.key: image for image in self._all() if image.key in changed}
            return list(now.values()), [key for key in changed if key not in now]

    def open(self, checkpoint: str, file: str) -> tuple[int, Image] | None:
        """A read-only descriptor, for the caller to close, and what it holds; None when it is not here.

        The memory may be dropped here meanwhile, or its rank may write the next image into it: whoever reads verifies.
        """
        key = (checkpoint, file)
        with self._lock:
            if key in self._kept_in:
                held = self._buffers[self._kept_in[key]]
                fd, image = held.fd, held.image
            elif key in self._copies:
                fd, image = self._copies[key].fd, self._copies[key].image
            else:
                return None
            assert image is not None
            return os.open(f"/proc/self/fd/{fd}", os.O_RDONLY | os.O_CLOEXEC), image

    # ---- copies

    def reserve(self, image: Image, kind: Kind) -> int:
        """Memory for a copy, for `add_copy`. Raises OSError.

        For a peer no more than half of what is available is taken, so that copies alone never exhaust a node; an image that a
        rank here waits for may take all of it. Older copies make room.
        """
        with self._allocating:
            if kind == "fetched":
                self._make_room(image.size_bytes, image.checkpoint)
                return _allocate("keepstep-copy", image.size_bytes, self._available())
            with self._lock:
                self._drop_older_sets(image.checkpoint, MAX_COPIED_SETS - 1)
            self._free()
            if 2 * image.size_bytes > self._available():
                with self._lock:
                    self._drop_older_sets(image.checkpoint, 0)
                self._free()
            self._tell()
            return _allocate("keepstep-copy", image.size_bytes, self._available() // 2)

    def add_copy(self, fd: int, image: Image, kind: Kind) -> None:
        """`fd`, owned by this from now on, holds a verified copy of `image`."""
        with self._lock:
            if image.key in self._kept_in or not self.enabled:
                os.close(fd)
                return
            self._drop_copy(image.key)
            self._copies[image.key] = _Copy(fd, msgspec.structs.replace(image, copy=True), kind)
            self._changed.add(image.key)
        self._tell()

    def forget(self, image: Image) -> None:
        """This image turned out damaged: a copy is dropped, one in a buffer is listed no more. Not when it was replaced since."""
        with self._lock:
            if image.key in self._kept_in:
                where = self._kept_in[image.key]
                if self._buffers[where].image is image:
                    self._unkeep(where)
            elif image.key in self._copies and self._copies[image.key].image is image:
                self._drop_copy(image.key)
        self._tell()

    def close(self) -> None:
        """Give all memory back."""
        with self._lock:
            for key in list(self._buffers):
                self._drop_buffer(key)
            for copied in list(self._copies):
                self._drop_copy(copied)
            self._changed.clear()
        self._free()

    # ---- with the lock held

    def _all(self) -> list[Image]:
        kept = [held.image for held in self._buffers.values() if held.image is not None]
        return kept + [copied.image for copied in self._copies.values()]

    def _unkeep(self, buffer: tuple[int, str]) -> None:
        held = self._buffers.get(buffer)
        if held is not None and held.image is not None:
            self._kept_in.pop(held.image.key, None)
            self._changed.add(held.image.key)
            held.image = None

    def _drop_buffer(self, buffer: tuple[int, str]) -> None:
        self._unkeep(buffer)
        held = self._buffers.pop(buffer, None)
        if held is not None:
            self._dropped.append(held.fd)

    def _drop_copy(self, key: Key) -> None:
        copied = self._copies.pop(key, None)
        if copied is not None:
            self._dropped.append(copied.fd)
            self._changed.add(key)

    def _drop_older_sets(self, coming: str, stay: int) -> None:
        """Of the sets copied for peers only the `stay` newest stay beside `coming`."""
        names = list(dict.fromkeys(c.image.checkpoint for c in self._copies.values() if c.kind == "peer"))
        others = [name for name in names if name != coming]
        for name in others[: max(0, len(others) - stay)]:
            for key in [k for k, c in self._copies.items() if k[0] == name and c.kind == "peer"]:
                self._drop_copy(key)

    def _release_superseded(self) -> None:
        assert self._local is not None
        if any(len(self._kept_here.get(rank, ())) < KEPT_BEFORE_RELEASE for rank in self._local):
            return
        for key in [k for k, c in self._copies.items() if c.kind == "fetched"]:
            self._drop_copy(key)
        for buffer in [b for b in self._buffers if b[0] not in self._local]:
            self._drop_buffer(buffer)

    # ---- without it

    def _make_room(self, size_bytes: int, spared: str | None = None) -> None:
        """Drop copies, oldest first, then images of ranks that moved away, until so much memory is free or nothing is left."""
        self._free()
        while self._available() < size_bytes:
            with self._lock:
                copied = next((k for k in self._copies if k[0] != spared), None)
                moved = [b for b in self._buffers if self._local is not None and b[0] not in self._local]
                if copied is not None:
                    self._drop_copy(copied)
                elif moved and spared is None:
                    self._drop_buffer(moved[0])
                else:
                    break
            self._free()
        self._tell()

    def _tell(self) -> None:
        if self._changed:
            self._on_change()
        if self._dropped:
            threading.Thread(target=self._free, name="keepstep-free", daemon=True).start()

    def _free(self) -> None:
        """Returns when all that was dropped so far is given back, also by another thread."""
        with self._freeing:
            with self._lock:
                dropped, self._dropped = self._dropped, []
            for fd in dropped:
                os.close(fd)


def _allocate(name: str, size_bytes: int, available: int) -> int:
    if size_bytes > available:
        # Asking the kernel instead would not fail: it would kill something.
        raise OSError(errno.ENOMEM, f"only {available} bytes of memory are available")
    return make_memfd(name[:200], size_bytes)
