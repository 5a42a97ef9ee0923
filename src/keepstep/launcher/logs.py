"""Output of ranks: one thread reads their pipes, writes the cycle's log file line by line and passes it on to the terminal.

A rank that prints faster than the disk takes it is slowed by its own full pipe; no other rank is, and memory stays bounded.
"""

from __future__ import annotations

import contextlib
import os
import selectors
import threading
from pathlib import Path
from typing import BinaryIO

import msgspec

MAX_LINE_BYTES = 1 << 20
READ_BYTES = 1 << 16


class Stream(msgspec.Struct, kw_only=True):
    """One pipe of one rank. `name`: stdout or stderr."""

    fd: int
    rank: int
    local_rank: int
    name: str
    pending: bytearray
    console: int | None
    """Descriptor that gets the raw lines too, or None."""
    console_prefix: bytes
    extra: BinaryIO | None
    """Per-rank file (--redirects, --tee), or None."""


def wants(spec: str, local_rank: int, name: str) -> bool:
    """torchrun's `--tee`/`--redirects` value for one stream: "3", "1", "2", "0", or "0:1,1:2" by local rank."""
    bit = 1 if name == "stdout" else 2
    if ":" not in spec:
        return bool(int(spec) & bit)
    by_rank = dict(pair.split(":", 1) for pair in spec.split(","))
    return bool(int(by_rank.get(str(local_rank), "0")) & bit)


class LogThread:
    """The one writer of this node's rank output."""

    def __init__(self) -> None:
        self._selector = selectors.DefaultSelector()
        self._wake_r, self._wake_w = os.pipe2(os.O_CLOEXEC | os.O_NONBLOCK)
        self._selector.register(self._wake_r, selectors.EVENT_READ, None)
        self._lock = threading.Lock()
        self._incoming: list[Stream] = []
        self._file: BinaryIO | None = None
        self._open = 0
        self._idle = threading.Event()
        self._idle.set()
        self._ending = False
        self._thread = threading.Thread(target=self._loop, name="keepstep-logs", daemon=True)
        self._thread.start()

    def start_cycle(self, path: Path) -> None:
        """Open the file of a new cycle; streams added later write to it."""
        file = path.open("ab", buffering=0)
        with self._lock:
            self._file, old = file, self._file
        if old is not None:
            old.close()

    def add(self, stream: Stream) -> None:
        """Take over a pipe's read end (closed here at its end)."""
        with self._lock:
            self._incoming.append(stream)
            self._open += 1
            self._idle.clear()
        os.write(self._wake_w, b"x")

    def drain(self, timeout_s: float) -> bool:
        """Wait until every stream reached its end (its writers are gone). False when the time ran out."""
        return self._idle.wait(timeout_s)

    def close(self) -> None:
        """Stop the thread after what has been read is written."""
        self._ending = True
        os.write(self._wake_w, b"x")
        self._thread.join(5)
        if self._file is not None:
            self._file.close()

    def _loop(self) -> None:
        while not self._ending:
            for key, _ in self._selector.select():
                if key.data is None:
                    with contextlib.suppress(BlockingIOError):
                        os.read(self._wake_r, 4096)
                    self._register()
                else:
                    self._read(key.data)

    def _register(self) -> None:
        with self._lock:
            new, self._incoming = self._incoming, []
        for stream in new:
            self._selector.register(stream.fd, selectors.EVENT_READ, stream)

    def _read(self, stream: Stream) -> None:
        try:
            data = os.read(stream.fd, READ_BYTES)
        except OSError:
            data = b""
        if data:
            stream.pending += data
            end = stream.pending.rfind(b"\n") + 1
            if end == 0 and len(stream.pending) > MAX_LINE_BYTES:
                end = len(stream.pending)
            if end:
                self._emit(stream, bytes(stream.pending[:end]))
                del stream.pending[:end]
            return
        if stream.pending:
            self._emit(stream, bytes(stream.pending))
        self._selector.unregister(stream.fd)
        os.close(stream.fd)
        if stream.extra is not None:
            stream.extra.close()
        with self._lock:
            self._open -= 1
            if self._open == 0:
                self._idle.set()

    def _emit(self, stream: Stream, data: bytes) -> None:
        lines = data.split(b"\n")
        if not lines[-1]:
            lines.pop()
        prefix = b"[rank %d] " % stream.rank
        with contextlib.suppress(OSError), self._lock:
            if self._file is not None:
                self._file.write(b"".join(prefix + line + b"\n" for line in lines))
        if stream.console is not None:
            out = b"".join(stream.console_prefix + line + b"\n" for line in lines) if stream.console_prefix else data
            _write_all(stream.console, out)
        if stream.extra is not None:
            with contextlib.suppress(OSError):
                stream.extra.write(data)


def _write_all(fd: int, data: bytes) -> None:
    """Write to the terminal or pipe behind the launcher; a reader that went away costs nobody their training."""
    view = memoryview(data)
    while view:
        try:
            view = view[os.write(fd, view) :]
        except BlockingIOError:
            selectors_wait(fd)
        except OSError:
            return


def selectors_wait(fd: int) -> None:
    """Wait until a non-blocking descriptor takes data again."""
    with selectors.DefaultSelector() as selector:
        selector.register(fd, selectors.EVENT_WRITE)
        selector.select(1.0)
