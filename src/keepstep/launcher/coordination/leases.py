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
STRETCHES = (1.0, 2.0, 4.0)
"""A lease grows with the time that renewals take, in these steps."""
RENEWALS = 5
"""Renewals in the time of one lease."""


class LeaseBook:
    """The coordinator's side. Times of an injected monotonic clock, in seconds."""

    def __init__(self, base_s: float, clock: Callable[[], float] = time.monotonic, longest_s: float = 0.0) -> None:
        """`longest_s`: the longest lease that any coordinator of this job may have given, as far as the journal says."""
        self.base_s = base_s
        self.longest_s = max(base_s, longest_s)
        """No longer lease is given: a successor that never heard of a node must know how long it may go on."""
        self.wanted_s = self.longest_s
        """What the slowest renewals ask for; becomes `longest_s` once that is journaled."""
        self._clock = clock
        self._started = clock()
        self._heard: dict[str, float] = {}
        self._until: dict[str, float] = {}
        """When the last of a node's leases is over here, whichever of them it heard of."""

    def begin(self) -> None:
        """From now on whoever asks finds a listener: a node that found none counts its lease from a time before this."""
        self._started = self._clock()

    def heard(self, node: str) -> None:
        """Anything came from `node`."""
        self._heard[node] = self._clock()

    def renew(self, node: str, rtt_s: float) -> float:
        """Renew a lease; returns its length in seconds, longer where renewals are slow to be answered."""
        now = self._heard[node] = self._clock()
        stretch = next((x for x in STRETCHES if RTT_FACTOR * rtt_s <= x * self.base_s), STRETCHES[-1])
        self.wanted_s = max(self.wanted_s, stretch * self.base_s)
        lease_s = min(stretch * self.base_s, self.longest_s)
        self._until[node] = max(self._until.get(node, now), now + MARGIN * lease_s)
        return lease_s

    def silence_s(self, node: str) -> float:
        """Seconds since `node` was last heard of; a coordinator that just started has heard of all of them then."""
        return self._clock() - max(self._heard.get(node, self._started), self._started)

    def expired(self, nodes: Iterable[str]) -> list[str]:
        """Those of `nodes` whose ranks are dead by now, one way or another."""
        now = self._clock()
        return [n for n in nodes if now > self._over_at(n) + KILL_S]

    def _over_at(self, node: str) -> float:
        if node not in self._until:
            # What a coordinator before this one gave it is not known.
            return max(self._heard.get(node, self._started), self._started) + MARGIN * self.longest_s
        return max(self._until[node], self._heard[node] + MARGIN * self.base_s)

    def hears(self, nodes: Iterable[str]) -> bool:
        """Whether any of `nodes` was heard lately: a node that lives says something several times in a lease."""
        return any(self.silence_s(n) < self.base_s / 2 for n in nodes)

    def forgive(self, gap_s: float) -> None:
        """The coordinator itself stood still for `gap_s`: that much silence does not count."""
        self._started += gap_s
        self._heard = {n: t + gap_s for n, t in self._heard.items()}
        self._until = {n: t + gap_s for n, t in self._until.items()}

    def forget(self, node: str) -> None:
        """The node was lost: should it come back, it starts anew."""
        self._heard.pop(node, None)
        self._until.pop(node, None)
