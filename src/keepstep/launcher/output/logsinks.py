"""Where a node's output goes: a file of this node, or the funnel to the job's log writer; and the account of what was lost."""

from __future__ import annotations

import contextlib
import os
import time
from collections import Counter
from collections.abc import Callable
from pathlib import Path

from keepstep.launcher.output.logbuffer import SendBuffer
from keepstep.launcher.output.logfunnel import Funnel
from keepstep.launcher.output.logstore import LAUNCHER_LOG, append_whole
from keepstep.launcher.output.logwire import LAUNCHER, LAUNCHER_RANK, STDOUT, loss_line, prefixed

RETRY_FILE_S = 1.0


class Losses:
    """Output that is in no log. `pending`: (cycle, rank) -> bytes and lines for which the log has no line yet."""

    def __init__(self) -> None:
        self.total_bytes: Counter[int] = Counter()
        self.total_lines: Counter[int] = Counter()
        self.pending: dict[tuple[int, int], tuple[int, int]] = {}

    def add(self, cycle: int, rank: int, data: bytes) -> None:
        lines = data.count(b"\n")
        self.total_bytes[rank] += len(data)
        self.total_lines[rank] += lines
        lost_bytes, lost_lines = self.pending.get((cycle, rank), (0, 0))
        self.pending[cycle, rank] = lost_bytes + len(data), lost_lines + lines


class FileSink:
    """The log files of a launcher alone. A full disk costs output, which is counted, and never a broken line."""

    reconnects = 0
    held_bytes = 0

    def __init__(self, losses: Losses, node: str) -> None:
        self._losses = losses
        self._prefix = f"[{node}] ".encode() if node else b""
        self._files: dict[str, int] = {}
        self._failed_at = 0.0

    @property
    def ready(self) -> bool:
        return bool(self._files)

    def start_cycle(self, path: Path, copy: Path | None) -> None:
        """Raises OSError when a file cannot be opened."""
        opened = {"log": _open(path), "launcher": _open(path.parent / LAUNCHER_LOG)}
        if copy is not None:
            with contextlib.suppress(OSError):  # somebody else's folder costs no training
                opened["copy"] = _open(copy)
        self.close()
        self._files = opened

    def share(self, ranks: int) -> None:
        """A file has no shares."""

    def has_room(self, rank: int) -> bool:
        return True

    def write(self, cycle: int, rank: int, stream: int, data: bytes) -> None:
        """Whole lines. The caller has the lock."""
        if rank == LAUNCHER_RANK:
            append_whole(self._files["launcher"], prefixed(self._prefix, data))
            return
        if not self._files:
            self._losses.add(cycle, rank, data)
            return
        lost = self._losses.pending.get((cycle, rank))
        prefix = b"[rank %d] " % rank
        text = (prefix + loss_line(*lost) if lost else b"") + prefixed(prefix, data)
        if not append_whole(self._files["log"], text):
            self._failed_at = time.monotonic()
            self._losses.add(cycle, rank, data)
            return
        self._losses.pending.pop((cycle, rank), None)
        if "copy" in self._files:
            append_whole(self._files["copy"], text)

    def settle(self) -> None:
        """Say where output is missing, once the file takes it."""
        if time.monotonic() - self._failed_at < RETRY_FILE_S or not self._files:
            return
        for key, lost in list(self._losses.pending.items()):
            if not append_whole(self._files["log"], b"[rank %d] " % key[1] + loss_line(*lost)):
                self._failed_at = time.monotonic()
                return
            del self._losses.pending[key]

    def flush(self, until: float) -> bool:
        return True

    def close(self) -> None:
        for fd in self._files.values():
            os.close(fd)
        self._files = {}


class FunnelSink:
    """The funnel, with a decision on what no longer fits: wait while the writer is at work, drop once it is not."""

    ready = True

    def __init__(
        self,
        losses: Losses,
        address: str,
        run_id: str,
        node: str,
        token: bytes | None,
        tls: bool,
        on_room: Callable[[], None],
        buffer: SendBuffer,
    ) -> None:
        self._losses = losses
        self._buffer = buffer
        self.funnel = Funnel(address, run_id, node, token, tls, on_room, self._buffer)

    @property
    def reconnects(self) -> int:
        return self.funnel.reconnects

    @property
    def held_bytes(self) -> int:
        return self._buffer.held_bytes

    def share(self, ranks: int) -> None:
        self._buffer.shares = ranks

    def has_room(self, rank: int) -> bool:
        """Whether the rank's pipe may be read: there is room, or what it says would be dropped."""
        return self._buffer.has_room(rank) or self._buffer.stuck()

    def write(self, cycle: int, rank: int, stream: int, data: bytes) -> None:
        """Whole lines. The caller has the lock."""
        full = not self._buffer.has_room(rank)
        # Nobody asked for room before a line of the launcher, and it may not wait.
        if full and (rank == LAUNCHER_RANK or self._buffer.stuck()):
            self._losses.add(cycle, rank, data)
            return
        self._settle_one((cycle, rank))
        self._buffer.put(cycle, rank, stream, data)
        self.funnel.wake()

    def put_evidence(self, cycle: int, name: str, data: bytes) -> bool:
        taken = self._buffer.put_evidence(cycle, name, data)
        self.funnel.wake()
        return taken

    def settle(self) -> None:
        """Say where output is missing, for ranks that have room again."""
        for key in list(self._losses.pending):
            if self._buffer.has_room(key[1]):
                self._settle_one(key)
        self.funnel.wake()

    def _settle_one(self, key: tuple[int, int]) -> None:
        lost = self._losses.pending.pop(key, None)
        if lost is not None:
            stream = LAUNCHER if key[1] == LAUNCHER_RANK else STDOUT
            self._buffer.put(key[0], key[1], stream, loss_line(*lost))

    def flush(self, until: float) -> bool:
        """Wait until the log writer has everything."""
        while self._losses.pending and time.monotonic() < until:
            time.sleep(0.01)
        return self._buffer.empty.wait(max(0.0, until - time.monotonic()))

    def close(self) -> None:
        self.funnel.close()


def _open(path: Path) -> int:
    return os.open(path, os.O_WRONLY | os.O_CREAT | os.O_APPEND | os.O_CLOEXEC, 0o666)
