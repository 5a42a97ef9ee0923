"""Finding the slow members of a group from bandwidths of its parts. Pure: what is measured is given by the caller.

A collective is as fast as its slowest member, so a part without the slow ones is faster than one with them. Bandwidths are compared
between groups of the same size only: on shared links and cores a smaller group may be faster for no fault of anyone.
"""

from __future__ import annotations

from collections.abc import Callable

import msgspec

Measure = Callable[[list[int]], float]
MAX_ALIKE_PARTS = 8
"""When this many parts are equally fast, the cause is no single member."""


class Search(msgspec.Struct, kw_only=True):
    """What is known so far. `best`: size of a group -> the best bandwidth of any such group."""

    measure: Measure
    tolerance: float
    best: dict[int, float] = {}
    good: list[int] = []
    undecided: list[int] = []
    groups: list[tuple[list[int], float]] = []

    def rate(self, group: list[int]) -> float:
        """Bandwidth of a group, measured once."""
        group = sorted(group)
        for known, rate in self.groups:
            if known == group:
                return rate
        rate = self.measure(group)
        self.groups.append((group, rate))
        self.best[len(group)] = max(rate, self.best.get(len(group), 0.0))
        return rate

    def slow(self, group: list[int]) -> bool:
        """Whether a group misses more than the tolerance of the best one of its size."""
        return self.rate(group) < (1 - self.tolerance) * self.best[len(group)]


def find_slow(
    members: list[int], measure: Measure, tolerance: float
) -> tuple[list[int], list[tuple[list[int], float]]]:
    """Members that make the group slow, and every (group, bandwidth) that was measured.

    Parts that may hold a slow member are halved until they have two or three members; those are then judged one by one, each
    beside a member that is known to be good. One slow member among N costs about 3 log2(N) measurements. All members are returned
    when parts do not differ: then it is no single member (a switch, a wrong baseline). Of slow members of different speed only the
    slowest may be named: look again without them.
    """
    search = Search(measure=measure, tolerance=tolerance)
    parts = [sorted(members)]
    while len(parts[0]) >= 4:
        halves = _halve(parts, search)
        slow = [part for part in halves if search.slow(part)]
        if slow or search.good:
            search.good += [m for part in halves if part not in slow for m in part]
        elif len(halves) >= MAX_ALIKE_PARTS:
            parts = halves
            break
        parts = slow or ([] if search.good else halves)
        if not parts:
            break
    suspects = [m for part in parts for m in part]
    if not search.good and len(suspects) <= 3:
        return _by_pairs(suspects, search), search.groups
    if not search.good:
        found = _judge(search.undecided, max(parts, key=search.rate), search)
        return found or sorted(members), search.groups
    return _judge(suspects + search.undecided, search.good, search), search.groups


def _halve(parts: list[list[int]], search: Search) -> list[list[int]]:
    """Both halves of every part, measured, beside a control group of good members where there are enough. Odd members are judged
    later, so that all halves are of one size."""
    half = len(parts[0]) // 2
    halves = [part[i : i + half] for part in parts for i in (0, half)]
    search.undecided += [m for part in parts for m in part[2 * half :]]
    for group in halves:
        search.rate(group)
    if len(search.good) >= half:
        search.rate(search.good[:half])
    return halves


def _judge(suspects: list[int], good: list[int], search: Search) -> list[int]:
    """Those of `suspects` that are slow beside a good member, compared with two good ones."""
    search.rate(good[:2])
    pairs = {member: [good[0], member] for member in suspects if member not in good}
    for pair in pairs.values():
        search.rate(pair)
    return sorted(member for member, pair in pairs.items() if search.slow(pair))


def _by_pairs(suspects: list[int], search: Search) -> list[int]:
    """Two or three members and nobody known to be good: a member is good when any pair with it is."""
    pairs = [[a, b] for i, a in enumerate(suspects) for b in suspects[i + 1 :]]
    for pair in pairs:
        search.rate(pair)
    good = {m for pair in pairs if not search.slow(pair) for m in pair}
    return [m for m in suspects if m not in good] or suspects
