"""Leases of nodes: how long a node may be out of touch before its ranks are dead, and may be given to another.

The node counts from the time it sent the last renewal that was acknowledged, on its own clock, and kills its ranks at the end
(`guard`). The coordinator counts from the time the renewal came, adds a tenth and the time a kill takes, and only then calls
the node lost. Clocks of different hosts are never compared.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable

KILL_S = 0.5
"""What ending a node's ranks by SIGKILL may take."""
MARGIN = 1.1
RTT_FACTOR = 10.0
MAX_STRETCH = 4.0
"""A lease grows with the time that renewals take, up to so many times its length."""
RENEWALS = 5
"""Renewals in the time of one lease."""


class LeaseBook:
    """The coordinator's side. Times of an injected monotonic clock, in seconds."""

    def __init__(self, base_s: float, clock: Callable[[], float] = time.monotonic) -> None:
        self.base_s = base_s
        self._clock = clock
        self._started = clock()
        self._heard: dict[str, float] = {}
        self._promised: dict[str, float] = {}

    def heard(self, node: str) -> None:
        """Anything came from `node`."""
        self._heard[node] = self._clock()

    def renew(self, node: str, rtt_s: float) -> float:
        """Renew a lease; returns its length in seconds, longer where renewals are slow to be answered."""
        self._heard[node] = self._clock()
        lease_s = min(max(self.base_s, RTT_FACTOR * rtt_s), MAX_STRETCH * self.base_s)
        # The longest that the node may still believe in: a shorter one may not have reached it.
        self._promised[node] = max(lease_s, min(self._promised.get(node, 0.0), 2 * lease_s))
        return lease_s

    def silence_s(self, node: str) -> float:
        """Seconds since `node` was last heard of; a coordinator that just started has heard of all of them then."""
        return self._clock() - max(self._heard.get(node, self._started), self._started)

    def expired(self, nodes: Iterable[str]) -> list[str]:
        """Those of `nodes` whose ranks are dead by now, one way or another."""
        return [n for n in nodes if self.silence_s(n) > MARGIN * self._promised.get(n, self.base_s) + KILL_S]

    def forgive(self, gap_s: float) -> None:
        """The coordinator itself stood still for `gap_s`: that much silence does not count."""
        self._started += gap_s
        self._heard = {n: t + gap_s for n, t in self._heard.items()}

    def forget(self, node: str) -> None:
        """The node was lost: should it come back, it starts anew."""
        self._heard.pop(node, None)
        self._promised.pop(node, None)
