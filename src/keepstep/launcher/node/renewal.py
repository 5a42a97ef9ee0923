"""Renewals of this node's lease, which also tell the coordinator how far its ranks are; and standing by to take over."""

from __future__ import annotations

import asyncio
import contextlib
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from keepstep.launcher import messages as m
from keepstep.launcher.clock import Anchor, boot_id, boot_ns
from keepstep.launcher.coordination.leases import RENEWALS
from keepstep.launcher.node.link import Link

SILENCE_SHARE = 0.4
"""Share of a lease without a sign of the coordinator after which another one is looked for, where there may be one."""

LOOKS = 4
"""Looks at the connection between two renewals."""
CLOCK_AGE_NS = 600 * 10**9
"""Clocks of hosts drift apart by some parts in a million: an older reading makes way for a slower one."""

Sample = tuple[int, int | None, int]
"""Cycle, steps completed by all local ranks, and when (UTC ns)."""


class Renewal:
    """Sends a Beat several times in a lease; every answer extends the lease from the time its Beat was sent."""

    def __init__(
        self,
        link: Link,
        lease_s: float,
        several: bool,
        sample: Callable[[], Sample],
        on_extended: Callable[[int], None],
    ) -> None:
        """`several`: there is more than one place where a coordinator may be. `on_extended` gets CLOCK_MONOTONIC ns."""
        self.lease_s = lease_s
        self._link = link
        self._several = several
        self._sample = sample
        self._on_extended = on_extended
        self.clock: Anchor | None = None
        """The coordinator's clock on this host, from the answer that took least time lately."""
        self._clock_rtt_ns = 0
        self._rtt_s = 0.0
        self._sent: dict[asyncio.Future[Any], int] = {}
        self.heard_s = time.monotonic()
        """When the coordinator last showed life on a connection (CLOCK_MONOTONIC)."""

    async def run(self) -> None:
        """Renew until cancelled."""
        while True:
            if self._link.connected:
                self._send()
            await self._look_on(self.lease_s / RENEWALS)

    async def _look_on(self, wait_s: float) -> None:
        """Wait for the time of the next renewal; give up a connection on which nothing comes, and renew at once on a new one.

        A connection across a cut is not closed by anybody.
        """
        limit_s = (SILENCE_SHARE if self._several else 1.0) * self.lease_s
        look_s = wait_s / LOOKS
        for _ in range(LOOKS):
            before = time.monotonic()
            connected = self._link.connected
            await asyncio.sleep(look_s)
            now = time.monotonic()
            if now - before > 2 * look_s:
                # This process did not run itself: what came meanwhile has not been read yet.
                self.heard_s = now
            if not self._link.connected:
                self._forget()
            elif not connected:
                self.heard_s = now
                return
            elif self._sent and now - self.heard_s > limit_s:
                self._forget()
                self._link.drop()

    def _forget(self) -> None:
        """Sent again on another connection, old renewals would renew nothing."""
        for future in self._sent:
            self._link.forget(future)
        self._sent.clear()

    def _send(self) -> None:
        cycle, completed, at_ns = self._sample()
        sent_ns, rtt_s = time.monotonic_ns(), self._rtt_s
        future = self._link.request(lambda i: m.Beat(id=i, cycle=cycle, completed=completed, at_ns=at_ns, rtt_s=rtt_s))
        self._sent[future] = sent_ns
        future.add_done_callback(self._on_answer)

    def _on_answer(self, future: asyncio.Future[Any]) -> None:
        sent_ns = self._sent.pop(future, None)
        if sent_ns is None or future.cancelled() or future.exception() is not None:
            return
        self.heard_s = time.monotonic()
        answer = future.result() or {}
        rtt_ns = time.monotonic_ns() - sent_ns
        self._rtt_s = rtt_ns / 1e9
        self.lease_s = float(answer.get("lease_s", self.lease_s))
        if "now_ns" in answer:
            self._note_clock(int(answer["now_ns"]), rtt_ns)
        self.extend(sent_ns)

    def _note_clock(self, utc_ns: int, rtt_ns: int) -> None:
        """The coordinator read its clock somewhere within the round trip: at its middle, give or take a half."""
        here = boot_ns()
        old = self.clock is None or here - self.clock.boot_ns > CLOCK_AGE_NS
        if old or rtt_ns < self._clock_rtt_ns:
            self.clock, self._clock_rtt_ns = Anchor(boot_id(), utc_ns, here - rtt_ns // 2), rtt_ns

    def extend(self, from_ns: int) -> None:
        """The coordinator knew of this node at `from_ns` (CLOCK_MONOTONIC), or was not up then."""
        self._on_extended(from_ns + int(self.lease_s * 1e9))


async def stand_by(
    run_dir: Path,
    patience_s: float,
    heard_s: Callable[[], float],
    leads: Callable[[], bool],
    take_over: Callable[[], None],
) -> None:
    """Call `take_over` whenever the coordinator shows no life for `patience_s`, neither to this launcher nor in the journal folder.

    The folder is what keeps a launcher that is merely cut off from taking a job that runs well: a coordinator counts up a file
    there (`Coordinator.show_life`). `heard_s`: when this launcher last heard of it. `leads`: whether it is this launcher's own.
    """
    alive = run_dir / "journal" / "alive"
    seen, since = b"", time.monotonic()
    while True:
        await asyncio.sleep(patience_s / 10)
        now = b""
        with contextlib.suppress(OSError):
            now = alive.read_bytes()
        if leads() or now != seen or not now:
            seen, since = now, time.monotonic()
        elif time.monotonic() - max(since, heard_s()) > patience_s:
            take_over()
            since = time.monotonic() + 5 * patience_s
