"""The agent's side of its lease: renewals, the guardian that outlives it, and what happens when the lease runs out."""

from __future__ import annotations

import asyncio
import contextlib
import json
import mmap
import os
import subprocess
import sys
import time
from collections.abc import Callable, Iterable
from typing import Any

from keepstep.launcher.node import guardian as g
from keepstep.launcher.procs import make_memfd


class Guard:
    """Holds the lease of this node. While ranks run, the guardian has their pids and the time until which they may."""

    def __init__(self, word: dict[str, Any], on_expired: Callable[[], None], say: Callable[[str], None]) -> None:
        """`word`: what the guardian tells the coordinator, see guardian.tell. `on_expired` is called once a lease that ran out."""
        self._word = word
        self._on_expired = on_expired
        self._say = say
        self._fd = make_memfd("keepstep-guard", g.PAGE_BYTES)
        self._page = memoryview(mmap.mmap(self._fd, g.PAGE_BYTES)).cast("Q")
        self._process: subprocess.Popen[bytes] | None = None
        self._closing = False
        self._timer: asyncio.TimerHandle | None = None
        self._expiry_ns = 0
        self.holds_ranks = False

    @property
    def pids(self) -> set[int]:
        """The guardian's pid: no leftover of ranks."""
        return {self._process.pid} if self._process is not None else set()

    @property
    def expiry_ns(self) -> int:
        """CLOCK_MONOTONIC until which ranks may run; 0 before the first renewal."""
        return self._expiry_ns

    def start(self) -> None:
        """Start the guardian, and again whenever it dies."""
        read_end, write_end = os.pipe()
        arguments = [str(self._fd), str(os.getpid()), str(read_end)]
        self._process = subprocess.Popen(
            [sys.executable, "-m", "keepstep.launcher.node.guardian", *arguments],
            pass_fds=[self._fd, read_end],
            stdin=subprocess.DEVNULL,
            start_new_session=True,
        )
        os.close(read_end)
        with os.fdopen(write_end, "wb") as pipe:
            pipe.write(json.dumps(self._word).encode() + b"\n")
        fd = os.pidfd_open(self._process.pid)
        asyncio.get_running_loop().add_reader(fd, self._on_exit, fd)

    def _on_exit(self, fd: int) -> None:
        asyncio.get_running_loop().remove_reader(fd)
        os.close(fd)
        assert self._process is not None
        status = self._process.wait()
        if not self._closing:
            self._say(f"the guardian ended (status {status}); starting it again")
            asyncio.get_running_loop().call_later(0.2, lambda: None if self._closing else self.start())

    def extend(self, expiry_ns: int) -> None:
        """The lease runs until `expiry_ns` (CLOCK_MONOTONIC) at least."""
        self._expiry_ns = max(self._expiry_ns, expiry_ns)
        if self.holds_ranks:
            self._page[g.W_EXPIRY_NS] = self._expiry_ns
            self._arm()

    def ranks_started(self, pids: Iterable[int]) -> None:
        """These processes live by the lease from now on."""
        numbers = list(pids)[: g.MAX_RANKS]
        self._page[g.W_COUNT] = 0
        for place, pid in enumerate(numbers):
            self._page[g.W_FIRST_PID + place] = pid
        self._page[g.W_COUNT] = len(numbers)
        self._page[g.W_FENCED_NS] = 0
        self.holds_ranks = True
        self._page[g.W_EXPIRY_NS] = self._expiry_ns
        self._arm()

    def ranks_gone(self) -> None:
        """No rank is left: there is nothing to guard."""
        self.holds_ranks = False
        self._page[g.W_EXPIRY_NS] = 0
        self._page[g.W_COUNT] = 0
        if self._timer is not None:
            self._timer.cancel()

    def _arm(self) -> None:
        if self._timer is not None:
            self._timer.cancel()
        if not self._expiry_ns:
            return
        left_s = max(0.0, (self._expiry_ns - time.monotonic_ns()) / 1e9)
        self._timer = asyncio.get_running_loop().call_later(left_s, self._look)

    def _look(self) -> None:
        if self.holds_ranks and time.monotonic_ns() >= self._expiry_ns:
            self._on_expired()

    def close(self) -> None:
        """End the guardian. Call when no rank is left."""
        self._closing = True
        if self._timer is not None:
            self._timer.cancel()
        if self._process is not None:
            self._process.kill()
            with contextlib.suppress(ChildProcessError):
                self._process.wait()
