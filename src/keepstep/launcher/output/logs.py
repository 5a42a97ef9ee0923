"""Output of ranks: one thread reads their pipes, hands it on line by line to the cycle's log, and to the terminal and rank files.

The log is a file of this node (a launcher alone), or the job's log writer behind a funnel (several nodes). A rank that prints
faster than the log takes it is slowed by its own full pipe, no other rank is, and memory stays bounded. A line over
MAX_LINE_BYTES is split into several.
"""

from __future__ import annotations

import contextlib
import os
import selectors
import threading
import time
from collections import deque
from pathlib import Path
from typing import BinaryIO

import msgspec

from keepstep.launcher.output.console import CONSOLE_HOLD_S, Console
from keepstep.launcher.output.logbuffer import SendBuffer
from keepstep.launcher.output.logsinks import FileSink, FunnelSink, Losses
from keepstep.launcher.output.logwire import LAUNCHER, LAUNCHER_RANK, STDERR, STDOUT, prefixed

MAX_LINE_BYTES = 1 << 20
READ_BYTES = 1 << 16
RECHECK_S = 0.1
EARLY_LINES = 1000
"""Lines of the launcher that are kept until it is known where they go."""


class Stream(msgspec.Struct, kw_only=True, eq=False):
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
    cycle: int = -1
    """Set by `LogThread.add`."""


class LogCounts(msgspec.Struct, frozen=True, kw_only=True):
    """What became of the output of this node since its launcher started. Lost: in no log."""

    size_bytes: int
    lines: int
    lost_bytes: dict[int, int]
    """By rank, of those that lost some; -1 is the launcher itself."""
    lost_lines: dict[int, int]
    console_lost_bytes: int
    reconnects: int
    """Connections to the log writer that broke."""
    held_bytes: int
    """Output that the log writer has not acknowledged yet."""


def wants(spec: str, local_rank: int, name: str) -> bool:
    """torchrun's `--tee`/`--redirects` value for one stream: "3", "1", "2", "0", or "0:1,1:2" by local rank."""
    bit = 1 if name == "stdout" else 2
    if ":" not in spec:
        return bool(int(spec) & bit)
    by_rank = dict(pair.split(":", 1) for pair in spec.split(","))
    return bool(int(by_rank.get(str(local_rank), "0")) & bit)


class LogThread:
    """The one reader of this node's rank output."""

    def __init__(self, node: str = "", console_hold_s: float = CONSOLE_HOLD_S) -> None:
        self._selector = selectors.DefaultSelector()
        self._wake_r, self._wake_w = os.pipe2(os.O_CLOEXEC | os.O_NONBLOCK)
        self._selector.register(self._wake_r, selectors.EVENT_READ, None)
        self._lock = threading.Lock()
        self._incoming: list[Stream] = []
        self._paused: list[Stream] = []
        self._open: list[Stream] = []
        self._losses = Losses()
        self._sink: FileSink | FunnelSink = FileSink(self._losses, node)
        self._cycle = 0
        self._early: deque[str] = deque(maxlen=EARLY_LINES)
        self._size_bytes = self._lines = 0
        self._console_hold_s = console_hold_s
        self._consoles: dict[int, Console] = {}
        self._idle = threading.Event()
        self._idle.set()
        self._ending = False
        self._thread = threading.Thread(target=self._loop, name="keepstep-logs", daemon=True)
        self._thread.start()

    # ---- where the log goes

    def use_funnel(
        self,
        address: str,
        run_id: str,
        node: str,
        token: bytes | None,
        tls: bool = True,
        buffer: SendBuffer | None = None,
    ) -> None:
        """Send this node's output to the job's log writer at `address` (host:port or unix:PATH) from now on.

        Called again, it goes on with another address; nothing that is held gets lost by that. Without a token the connection
        has neither TLS nor proof, which a log writer on a Unix socket accepts. `buffer`: with other bounds than usual.
        """
        with self._lock:
            if isinstance(self._sink, FunnelSink):
                self._sink.funnel.move(address)
                return
            self._sink.close()
            self._sink = FunnelSink(
                self._losses, address, run_id, node, token, tls, self._on_room, buffer or SendBuffer()
            )
        self._say_early()

    def start_cycle(self, path: Path, number: int = 0, copy: Path | None = None) -> None:
        """Streams added later belong to cycle `number`. Without a funnel it is written to `path`, and to `copy` if given."""
        with self._lock:
            self._cycle = number
            if isinstance(self._sink, FileSink):
                self._sink.start_cycle(path, copy)
        self._say_early()

    def say(self, text: str, console: int | None = None, shown: str | None = None) -> None:
        """Lines of the launcher itself: to launcher.log, and to a descriptor (as `shown`, if given) without waiting for it."""
        data = text.encode(errors="replace")[:MAX_LINE_BYTES] + b"\n"
        if console is not None:
            self._console(console).write((shown or text).encode(errors="replace")[:MAX_LINE_BYTES] + b"\n")
        with self._lock:
            if not self._sink.ready:
                self._early.append(text)
                return
            self._sink.write(self._cycle, LAUNCHER_RANK, LAUNCHER, data)

    def send_evidence(self, cycle: int, name: str, data: bytes) -> bool:
        """Send a file for evidence/cycle-NNNN/<node>/<name> to the log writer.

        False without a funnel, when `name` is no plain name, and when it is over the size bounds or no room is left for it.
        """
        with self._lock:
            return isinstance(self._sink, FunnelSink) and self._sink.put_evidence(cycle, name, data)

    def _say_early(self) -> None:
        while self._early and self._sink.ready:
            self.say(self._early.popleft())

    # ---- streams

    def add(self, stream: Stream) -> None:
        """Take over a pipe's read end (closed here at its end)."""
        if stream.console is not None:
            self._console(stream.console)
        with self._lock:
            stream.cycle = self._cycle
            self._incoming.append(stream)
            self._open.append(stream)
            self._sink.share(len({s.rank for s in self._open}) + 1)
            self._idle.clear()
        self.wake()

    def drain(self, timeout_s: float) -> bool:
        """Wait until every stream reached its end (its writers are gone) and the log has all of it. False when time ran out."""
        until = time.monotonic() + timeout_s
        if not self._idle.wait(timeout_s):
            return False
        for console in list(self._consoles.values()):
            console.flush(until - time.monotonic())
        return self._sink.flush(until)

    def counts(self) -> LogCounts:
        """May be called from any thread."""
        with self._lock:
            lost = {rank: n for rank, n in self._losses.total_bytes.items() if n}
            return LogCounts(
                size_bytes=self._size_bytes,
                lines=self._lines,
                lost_bytes=lost,
                lost_lines={rank: self._losses.total_lines[rank] for rank in lost},
                console_lost_bytes=sum(c.lost_bytes for c in self._consoles.values()),
                reconnects=self._sink.reconnects,
                held_bytes=self._sink.held_bytes,
            )

    def problem(self) -> str | None:
        """Why the log writer cannot be reached now, None when it can or there is none."""
        return self._sink.funnel.problem if isinstance(self._sink, FunnelSink) else None

    def close(self) -> None:
        """Stop the thread after what has been read is written. What a log writer has not got by now is lost: `drain` before."""
        self._ending = True
        self.wake()
        self._thread.join(5)
        for console in self._consoles.values():
            console.close(2 * self._console_hold_s)
        with self._lock:
            self._sink.close()

    def wake(self) -> None:
        """Let the thread look again: something came, or there may be room again."""
        with contextlib.suppress(BlockingIOError):
            os.write(self._wake_w, b"x")

    def _on_room(self) -> None:
        if self._paused or self._losses.pending:
            self.wake()

    def _console(self, fd: int) -> Console:
        with self._lock:
            if fd not in self._consoles:
                self._consoles[fd] = Console(fd, self._on_room, hold_s=self._console_hold_s)
            return self._consoles[fd]

    # ---- the thread

    def _loop(self) -> None:
        while not self._ending:
            waits = self._paused or self._losses.pending
            for key, _ in self._selector.select(RECHECK_S if waits else None):
                if key.data is None:
                    with contextlib.suppress(BlockingIOError):
                        os.read(self._wake_r, 4096)
                    self._register()
                elif self._may_read(key.data):
                    self._read(key.data)
                else:
                    self._selector.unregister(key.data.fd)
                    self._paused.append(key.data)
            self._resume()

    def _register(self) -> None:
        with self._lock:
            new, self._incoming = self._incoming, []
        for stream in new:
            self._selector.register(stream.fd, selectors.EVENT_READ, stream)

    def _may_read(self, stream: Stream) -> bool:
        return self._sink.has_room(stream.rank) and (
            stream.console is None or self._consoles[stream.console].has_room()
        )

    def _resume(self) -> None:
        """Read paused streams again for which there is room now, and put lines where output was lost."""
        if self._losses.pending:
            with self._lock:
                self._sink.settle()
        if self._paused:
            paused, self._paused = self._paused, []
            for stream in paused:
                if self._may_read(stream):
                    self._selector.register(stream.fd, selectors.EVENT_READ, stream)
                else:
                    self._paused.append(stream)

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
            self._open.remove(stream)
            self._sink.share(len({s.rank for s in self._open}) + 1)
            if not self._open:
                self._idle.set()

    def _emit(self, stream: Stream, data: bytes) -> None:
        if stream.console is not None:
            # A missing last newline is added only where the line has a prefix: without one these are the rank's bytes.
            out = prefixed(stream.console_prefix, data) if stream.console_prefix else data
            self._consoles[stream.console].write(out)
        if stream.extra is not None:
            with contextlib.suppress(OSError):
                stream.extra.write(data)
        whole = data if data.endswith(b"\n") else data + b"\n"
        with self._lock:
            self._size_bytes += len(whole)
            self._lines += whole.count(b"\n")
            self._sink.write(stream.cycle, stream.rank, STDOUT if stream.name == "stdout" else STDERR, whole)
