"""How often a run was interrupted so far, and over how much node time: a fold over its cycles and marks."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import msgspec

from keepstep.records.codec import rfc3339
from keepstep.records.cycle import FailureHistory

FAILURE_RULES = frozenset({"node_lost", "node_excluded", "restart", "budget_exhausted"})
"""Decisions (launcher's table) after which work since the last checkpoint was lost to something that may happen again at any time.
Not among them: stops on request, code and numerical errors (exit 42 and 43), gang checks, taken ports."""


def interrupts(kind: str, attrs: Mapping[str, Any]) -> bool:
    """Whether a mark says that work was lost to a failure. Of the last one the fault says it: the job ends, no decision follows."""
    rule = attrs.get("rule")
    if kind == "decided":
        return rule in FAILURE_RULES if rule is not None else attrs.get("counted") is True
    return kind == "fault" and rule == "budget_exhausted"


class HistoryFold(msgspec.Struct, kw_only=True):
    """Counts so far. Node time runs from the begin of each cycle to its end, restarts included: failures may hit those too."""

    failures: int = 0
    node_ns: int = 0
    since_ns: int = 0
    """Begin of the first cycle; 0 before it."""
    nodes: int = 0
    """Nodes of the cycle that runs; 0 between cycles and in a gang check."""
    began_ns: int = 0
    seen_ns: int = 0
    """Time of the newest mark of the cycle that runs."""

    def take_cycle(self, nodes: int, *, probe: bool) -> None:
        """A cycle on so many nodes was decided; its mark `cycle_started` follows. A gang check (`probe`) is no training."""
        self.nodes = 0 if probe else nodes
        self.began_ns = self.seen_ns = 0

    def take_attempt(self) -> None:
        """The launchers were started again. A cycle that was never closed lost its work, whoever ended them: that is a failure."""
        if self.nodes and self.began_ns:
            self.failures += 1
            self._close(self.seen_ns)
        self.nodes = 0

    def take_mark(self, kind: str, t_ns: int, attrs: Mapping[str, Any]) -> None:
        """A mark of the timeline, in the order of the journal."""
        if not self.nodes:
            return
        if kind == "cycle_started":
            self.began_ns = self.seen_ns = t_ns
            self.since_ns = self.since_ns or t_ns
        elif self.began_ns:
            self.seen_ns = max(self.seen_ns, t_ns)
            self.failures += interrupts(kind, attrs)
            if kind in ("cycle_ended", "run_ended"):
                self._close(t_ns)

    def _close(self, t_ns: int) -> None:
        self.node_ns += self.nodes * max(0, t_ns - self.began_ns)
        self.nodes = 0

    def history(self, now_ns: int | None = None) -> FailureHistory | None:
        """The counts as a record, None before the first cycle. With `now_ns` the running cycle counts up to then."""
        if not self.since_ns:
            return None
        running = self.nodes * max(0, now_ns - self.began_ns) if now_ns is not None and self.began_ns else 0
        return FailureHistory(
            failures=self.failures, node_s=(self.node_ns + running) / 1e9, since=rfc3339(self.since_ns)
        )
