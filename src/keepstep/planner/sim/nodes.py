"""Nodes of a batch of runs for the numpy engine: which are away until when, which will fail again, what they went through."""

from __future__ import annotations

import math

import numpy as np

from keepstep.planner.sim.model import (
    BLOCK,
    HOUR_S,
    MOST_DOWN,
    NEAR_COUNT,
    NEAR_FIRST,
    NEAR_PLACE,
    Bools,
    Floats,
    Ints,
    Model,
    Outcome,
)

SLOTS = 32
PENDING = 8


class Nodes:
    """Slots hold the nodes that are away, a column a run; there are as many rows as the fullest run needs."""

    def __init__(self, model: Model, out: Outcome) -> None:
        self.model, self.out, runs = model, out, len(out.counts)
        self.runs = np.arange(runs)
        self.back = np.zeros((runs, model.total))
        self.end = np.zeros((SLOTS, runs))
        self.block = np.zeros((SLOTS if model.by_block else 0, runs), dtype=np.int64)
        self.next_slot = np.zeros(runs, dtype=np.int64)
        self.away = np.zeros(runs, dtype=np.int64)
        """How many are, at the time of the last look."""
        self.when = np.full((PENDING, runs), np.inf)
        self.which, self.kept = np.zeros((PENDING, runs), dtype=np.int64), np.zeros((PENDING, runs), dtype=bool)
        self.faults = np.zeros((runs, model.total), dtype=np.int32)
        self.fresh = np.zeros((runs, model.total), dtype=bool)
        self.now = np.zeros(runs)

    def look(self, now: Floats) -> None:
        """The time of each run is this now."""
        self.now = now
        self.away = np.add.reduce(self.end > now, axis=0, dtype=np.int16).astype(np.int64)

    def is_there(self, rows: Ints, node: Ints, t: Floats) -> Bools:
        """Whether these nodes are not away."""
        there: Bools = self.back[rows, node] <= t
        return there

    def is_fresh(self, rows: Ints, node: Ints) -> Bools:
        """Whether they came for retired ones."""
        return self.fresh[rows, node]

    def count_fault(self, rows: Ints, node: Ints) -> Ints:
        """One more fault of each; how many it has had."""
        faults = self.faults[rows, node] + 1
        self.faults[rows, node] = faults
        return faults.astype(np.int64)

    def renew(self, rows: Ints, node: Ints) -> None:
        """New ones take their places."""
        self.faults[rows, node], self.fresh[rows, node] = 0, True

    def away_of(self, row: int) -> int:
        """Nodes of one run that are away."""
        return int(self.away[row])

    def away_in(self, rows: Ints, block: Ints) -> Ints:
        """Nodes of a block that are away; of the pool without blocks."""
        if not self.model.by_block:
            return self.away[rows]
        number: Ints = ((self.end[:, rows] > self.now[rows]) & (self.block[:, rows] == block)).sum(axis=0)
        return number

    # ---- going and coming

    def send_out(self, rows: Ints, node: Ints, t: Floats, end: Floats) -> None:
        """One node of each of these runs is away from t until `end`."""
        self.back[rows, node] = end
        if not (end > t).all():
            at = end > t
            rows, node, t, end = rows[at], node[at], t[at], end[at]
        slot = self._free_slots(rows, t)
        self.end[slot, rows] = end
        if self.model.by_block:
            self.block[slot, rows] = self.model.places[BLOCK, node]
        away = self.away[rows] + 1
        self.away[rows] = away
        hours, last = self.out.hours, self.out.hours.shape[1] - 1
        hours[rows, np.minimum(last, np.ceil(t / HOUR_S).astype(np.int64))] += 1
        hours[rows, np.minimum(last, np.ceil(np.minimum(end / HOUR_S, last)).astype(np.int64))] -= 1
        most = self.out.counts[rows, MOST_DOWN]
        self.out.counts[rows, MOST_DOWN] = np.maximum(most, away)

    def send_group(self, row: int, node: Ints, t: float, end: Floats) -> None:
        """Several nodes of one run are away from t until their `end`."""
        self.back[row, node] = end
        node, end = node[end > t], end[end > t]
        while len(slot := np.flatnonzero(self.end[:, row] <= t)) < len(end):
            self._grow()
        slot = slot[: len(end)]
        self.end[slot, row] = end
        if self.model.by_block:
            self.block[slot, row] = self.model.places[BLOCK, node]
        self.away[row] += len(end)
        hours, last = self.out.hours[row], len(self.out.hours[row]) - 1
        hours[min(last, math.ceil(t / HOUR_S))] += len(end)
        np.subtract.at(hours, np.ceil(np.minimum(end / HOUR_S, last)).astype(np.int64), 1)
        self.out.counts[row, MOST_DOWN] = max(self.out.counts[row, MOST_DOWN], self.away[row])

    def _free_slots(self, rows: Ints, t: Floats) -> Ints:
        """A slot of each run whose node is back: the next one from where the last search ended."""
        if len(self.end) <= self.away[rows].max(initial=0) + SLOTS // 4:
            self._grow()
        slots = len(self.end)
        slot = self.next_slot[rows]
        taken = np.flatnonzero(self.end[slot, rows] > t)
        while taken.size:
            slot[taken] = (slot[taken] + 1) % slots
            taken = taken[self.end[slot[taken], rows[taken]] > t[taken]]
        self.next_slot[rows] = (slot + 1) % slots
        return slot

    def _grow(self) -> None:
        self.end = np.concatenate([self.end, np.zeros_like(self.end)])
        self.block = np.concatenate([self.block, np.zeros_like(self.block)])

    def take_neighbours(self, rows: Ints, node: Ints, t: Floats, wanted: int, away_s: float) -> None:
        """So many healthy nodes next to these go out for a time."""
        places = self.model.places
        first, number, place = places[NEAR_FIRST, node], places[NEAR_COUNT, node], places[NEAR_PLACE, node]
        left = np.full(len(rows), wanted)
        for i in range(1, int(number.max()) + 1):
            near = first + (place + i) % number
            at = np.flatnonzero((i <= number) & (left > 0) & (self.back[rows, near] <= t))
            if at.size:
                self.send_out(rows[at], near[at], t[at], t[at] + away_s)
                left[at] -= 1
            if not left.any():
                return

    def supplied(self, rows: Ints, ready: Floats) -> Floats:
        """When each block has the nodes that the job needs of it, `ready` at the earliest."""
        spares = self.model.block_spares
        when = ready.copy()
        short = np.flatnonzero(self.away[rows] > spares)
        if not short.size:
            return when
        end = np.where(self.end[:, rows[short]] > self.now[rows[short]], self.end[:, rows[short]], 0.0).T
        if self.model.by_block:
            # By block, the longest away first: the place of one in its block is then where it stands against its first.
            order = np.lexsort((-end, self.block[:, rows[short]].T), axis=1)
            end = np.take_along_axis(end, order, axis=1)
            block = np.take_along_axis(self.block[:, rows[short]].T, order, axis=1)
            # As many as there are spares may still be away when the next one of its block is back.
            last = np.where(block[:, spares:] == block[:, : block.shape[1] - spares], end[:, spares:], 0.0).max(axis=1)
        else:
            last = np.sort(end, axis=1)[:, -1 - spares]
        when[short] = np.maximum(when[short], last)
        return when

    # ---- faults that follow

    def soonest(self) -> Floats:
        """When the next one of each run is due."""
        soonest: Floats = self.when.min(axis=0)
        return soonest

    def take_pending(self, rows: Ints) -> tuple[Ints, Bools]:
        """The next one of each of these runs, which is due: its node, and whether that was kept."""
        slot = self.when[:, rows].argmin(axis=0)
        self.when[slot, rows] = np.inf
        return self.which[slot, rows], self.kept[slot, rows]

    def set_pending(self, rows: Ints, node: Ints, when: Floats, kept: bool) -> None:
        """These nodes, and no earlier plan for them, will fail at that time; never where it is infinite."""
        planned = np.isfinite(self.when[:, rows]) & (self.which[:, rows] == node)
        at = np.flatnonzero(planned.any(axis=0))
        if at.size:
            self.when[planned[:, at].argmax(axis=0), rows[at]] = np.inf
        at = np.flatnonzero(np.isfinite(when))
        if not at.size:
            return
        rows, node, when = rows[at], node[at], when[at]
        if np.isfinite(self.when[:, rows]).all(axis=0).any():
            self.when = np.concatenate([self.when, np.full_like(self.when, np.inf)])
            self.which = np.concatenate([self.which, np.zeros_like(self.which)])
            self.kept = np.concatenate([self.kept, np.zeros_like(self.kept)])
        slot = np.isinf(self.when[:, rows]).argmax(axis=0)
        self.when[slot, rows], self.which[slot, rows], self.kept[slot, rows] = when, node, kept
