"""A job as the formulas and the simulation see it: tiers of checkpoints, kinds of failures, phases of a restart.

All times are in seconds. Training saves after every `interval_s` of useful work. Every save goes to the first tier; of the saves of
a tier every `every`-th one goes to the next tier too. A failure names the nearest tier that survives it: a process that dies leaves
copies in memory alone, a node that is lost leaves those of its peers, a rack that is lost leaves the object store.
"""

from __future__ import annotations

import itertools
import math
import operator

import msgspec

from keepstep.records.errors import ConfigError


class Tier(msgspec.Struct, frozen=True, kw_only=True):
    """One place that checkpoints are kept in, nearest first."""

    name: str
    every: int = 1
    """Of the saves to the tier before it, every so many-th goes here too; 1 for the first tier."""
    block_s: float = 0.0
    """Training stands still for so long for a save to this tier, on top of what the tiers before it take."""
    persist_lag_s: float = 0.0
    """From the end of the blocking part until the copy can be restored from."""
    load_s: float = 0.0
    """To restore from it."""


class FailureKind(msgspec.Struct, frozen=True, kw_only=True):
    """A class of failures that interrupt a job."""

    name: str
    share: float
    """Of all failures."""
    detect_s: float = 0.0
    """From the failure until it is known: 0 for a process that exits, the limit for a hang."""
    tier: int = 0
    """Index of the nearest tier that survives it; nothing of nearer tiers is left after it."""
    replace: bool = False
    """Whether the node goes to repair and a spare takes its place."""
    persists: float = 0.0
    """Probability that the node fails again soon when it is kept or comes back unrepaired."""


class RestartPhases(msgspec.Struct, frozen=True, kw_only=True):
    """What follows the detection of a failure, up to the load of a checkpoint."""

    decide_s: float = 0.0
    replace_s: float = 0.0
    """Only of failures whose node is replaced, once a spare is there."""
    start_s: float = 0.0
    """Processes, rendezvous, first step."""


class Job(msgspec.Struct, frozen=True, kw_only=True):
    """A training job: its nodes, how often one of them interrupts it, and what happens then."""

    nodes: int
    gpus_per_node: int = 8
    rate_per_node_day: float
    """Failures that interrupt the job, per node and day."""
    interval_s: float
    tiers: tuple[Tier, ...] = (Tier(name="disk"),)
    kinds: tuple[FailureKind, ...] = (FailureKind(name="failure", share=1.0),)
    restart: RestartPhases = RestartPhases()
    straggler_share: float = 0.0
    """Share of training time that waits for slow ranks: 0.08 where steps take 1 / 0.92 of their time."""

    @property
    def mttf_s(self) -> float:
        """Mean time between failures of the job."""
        rate = self.rate_per_node_day * self.nodes
        return 86_400.0 / rate if rate > 0.0 else math.inf

    @property
    def periods(self) -> tuple[int, ...]:
        """Intervals between two saves to each tier."""
        return tuple(itertools.accumulate((tier.every for tier in self.tiers), operator.mul))

    def restart_s(self, kind: FailureKind) -> float:
        """From a failure of this kind to training again, with a spare at hand."""
        phases = self.restart
        replace_s = phases.replace_s if kind.replace else 0.0
        return kind.detect_s + phases.decide_s + replace_s + phases.start_s + self.tiers[kind.tier].load_s

    def mean_restart_s(self) -> float:
        """Mean over the kinds of failures."""
        return math.fsum(kind.share * self.restart_s(kind) for kind in self.kinds)

    def check(self) -> None:
        """Raises ConfigError naming the field and its value where the record makes no sense."""
        problems = [
            (self.nodes >= 1, f"nodes {self.nodes}: at least 1"),
            (self.gpus_per_node >= 1, f"gpus_per_node {self.gpus_per_node}: at least 1"),
            (0.0 <= self.rate_per_node_day < math.inf, f"rate_per_node_day {self.rate_per_node_day}: a number from 0"),
            (0.0 < self.interval_s < math.inf, f"interval_s {self.interval_s}: above 0 and finite"),
            (0.0 <= self.straggler_share < 1.0, f"straggler_share {self.straggler_share}: from 0 to below 1"),
            (len(self.tiers) >= 1, "tiers: at least one"),
            (not self.tiers or self.tiers[0].every == 1, "tiers[0].every: 1, every save goes to the first tier"),
            (abs(math.fsum(k.share for k in self.kinds) - 1.0) < 1e-9, "kinds: their shares must add up to 1"),
        ]
        for tier in self.tiers:
            times = (tier.block_s, tier.persist_lag_s, tier.load_s)
            problems.append((all(0.0 <= t < math.inf for t in times), f"tier {tier.name}: times {times} s from 0"))
            problems.append((tier.every >= 1, f"tier {tier.name}: every {tier.every}, at least 1"))
        for kind in self.kinds:
            fits = 0 <= kind.tier < len(self.tiers)
            problems.append((fits, f"failure {kind.name}: tier {kind.tier}, there are {len(self.tiers)}"))
            problems.append((0.0 <= kind.detect_s < math.inf, f"failure {kind.name}: detect_s {kind.detect_s}, from 0"))
            for field in ("share", "persists"):
                value = getattr(kind, field)
                problems.append((0.0 <= value <= 1.0, f"failure {kind.name}: {field} {value}, from 0 to 1"))
        for phase, value in msgspec.structs.asdict(self.restart).items():
            problems.append((0.0 <= value < math.inf, f"restart.{phase} {value}: from 0"))
        for fine, problem in problems:
            if not fine:
                raise ConfigError(problem)
