"""What to do with a node at fault: keep it and restart in place, send it to repair, or retire it."""

from __future__ import annotations

from typing import Protocol

import numpy as np

from keepstep.planner.scenario import Scenario
from keepstep.planner.sim.model import Bools, Floats, Ints

KEEP, REPAIR, RETIRE = 0, 1, 2
"""Actions. A node that did not train, of which only faults of kinds that replace a node are known, is repaired where a policy says
to keep it; a retired one is away for the scenario's `retire_s` and comes back as a new one, without a past."""


class NodePolicy(Protocol):
    """Decides at each fault of a node; the compiled engine knows the built-in one only.

    To run on several cores it must be picklable.
    """

    def decide(self, kind: Ints, faults_of_node: Ints, t_s: Floats) -> Ints:
        """An action for each of many faults, each of another run: index of its kind, faults of the node so far with this one,
        seconds since the begin."""
        ...


class ByKind:
    """The built-in policy: as the kind of failure says, and retired at the so many-th fault."""

    def __init__(self, replace: Bools, retire_after: int) -> None:
        self.replace, self.retire_after = replace, retire_after

    def decide(self, kind: Ints, faults_of_node: Ints, t_s: Floats) -> Ints:
        """KEEP, REPAIR or RETIRE for each fault."""
        actions = np.where(self.replace[kind], REPAIR, KEEP)
        if self.retire_after:
            actions = np.where(faults_of_node >= self.retire_after, RETIRE, actions)
        return actions


def built_in(scenario: Scenario) -> ByKind:
    """The policy that the scenario's kinds and `retire_after` describe."""
    return ByKind(np.array([k.replace for k in scenario.job.kinds]), scenario.retire_after)
