"""Writes to the terminal or pipe behind the launcher, in a thread of its own: one that nobody reads stops no training."""

from __future__ import annotations

import os
import selectors
import threading
import time
from collections import deque
from collections.abc import Callable

CONSOLE_BYTES = 1 << 20
CONSOLE_HOLD_S = 1.0
WRITE_BYTES = 1 << 16


class Console:
    """One descriptor. What it is slow to take is held up to `limit_bytes`, then its writers are slowed down.

    When it has taken nothing for `hold_s`, output for it is dropped and counted until it takes some again; one line then says
    how much is missing.
    """

    def __init__(
        self,
        fd: int,
        on_room: Callable[[], None],
        limit_bytes: int = CONSOLE_BYTES,
        hold_s: float = CONSOLE_HOLD_S,
    ) -> None:
        self.lost_bytes = 0
        self._fd = fd
        self._on_room = on_room
        self._limit_bytes = limit_bytes
        self._hold_s = hold_s
        self._queue: deque[bytes] = deque()
        self._held_bytes = 0
        self._missing_bytes = 0
        self._progress_at = time.monotonic()
        self._changed = threading.Condition()
        self._ending = False
        self._thread = threading.Thread(target=self._loop, name=f"keepstep-console-{fd}", daemon=True)
        self._thread.start()

    def has_room(self) -> bool:
        """Whether a writer may go on: there is room, or what it writes would be dropped."""
        with self._changed:
            return self._held_bytes < self._limit_bytes or self._stuck()

    def _stuck(self) -> bool:
        return self._held_bytes > 0 and time.monotonic() - self._progress_at > self._hold_s

    def write(self, data: bytes) -> None:
        """Take whole lines, or drop them when there is no room. Does not wait."""
        with self._changed:
            if self._held_bytes >= self._limit_bytes and self._stuck():
                self._missing_bytes += len(data)
                self.lost_bytes += len(data)
                return
            if self._missing_bytes:
                data = b"keepstep: %d bytes were not shown here; the log has them\n" % self._missing_bytes + data
                self._missing_bytes = 0
            if not self._held_bytes:
                self._progress_at = time.monotonic()
            self._queue.append(data)
            self._held_bytes += len(data)
            self._changed.notify_all()

    def flush(self, timeout_s: float) -> bool:
        """Wait until everything is out. False when the time ran out, or when the descriptor takes nothing."""
        until = time.monotonic() + timeout_s
        with self._changed:
            while self._held_bytes:
                left_s = until - time.monotonic()
                if left_s <= 0 or self._stuck():
                    return False
                self._changed.wait(min(left_s, self._hold_s / 4))
            return True

    def close(self, timeout_s: float) -> None:
        """Flush and end the thread; one that hangs in a write is left behind, the process can end without it."""
        self.flush(timeout_s)
        with self._changed:
            self._ending = True
            self._changed.notify_all()
        self._thread.join(0.2)

    def _loop(self) -> None:
        while True:
            with self._changed:
                while not self._queue and not self._ending:
                    self._changed.wait()
                if self._ending:
                    return
                data = self._queue.popleft()
            self._write(memoryview(data))
            self._on_room()

    def _write(self, view: memoryview) -> None:
        while view and not self._ending:
            try:
                written = os.write(self._fd, view[:WRITE_BYTES])
            except BlockingIOError:
                _wait_writable(self._fd)
                continue
            except OSError:  # a reader that went away costs nobody their training
                written = len(view)
            view = view[written:]
            with self._changed:
                self._held_bytes -= written
                self._progress_at = time.monotonic()
                self._changed.notify_all()


def _wait_writable(fd: int) -> None:
    with selectors.DefaultSelector() as selector:
        selector.register(fd, selectors.EVENT_WRITE)
        selector.select(1.0)
