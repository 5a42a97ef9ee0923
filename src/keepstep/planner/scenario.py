"""What a simulated campaign consists of: the job, its nodes and spares, how they fail, how they are repaired, who decides."""

from __future__ import annotations

import math
from typing import Literal

import msgspec

from keepstep.goodput.job import Job
from keepstep.records.errors import ConfigError

DAY_S = 86_400.0
Process = Literal["exponential", "weibull", "trace"]


class Repair(msgspec.Struct, frozen=True, kw_only=True):
    """How long a node is away. Lognormal: mean and sigma of the logarithm; sigma 0 is a constant."""

    mean_s: float = DAY_S
    sigma: float = 0.0
    bad_return: float = 0.0
    """Probability that a node comes back broken and fails again."""
    refault_mean_s: float = 8 * 3600.0
    """Mean time (exponential) until a node that was kept or came back broken fails again."""
    gate_s: float = 0.0
    """Test before a node comes back; adds to every repair."""
    gate_catch: float = 0.0
    """Probability that the gate finds a node that is still broken; it is repaired again."""


class TraceFault(msgspec.Struct, frozen=True):
    """A fault of a trace: seconds since its begin, which node (0 ...), how long the node was down, index into the job's kinds."""

    t_s: float
    node: int
    down_s: float
    kind: int = 0


class Scenario(msgspec.Struct, frozen=True, kw_only=True):
    """A campaign. Rates are per wall-clock; `job.rate_per_node_day` is the mean over all nodes, whatever the process."""

    job: Job
    days: float = 54.0
    spares: int = 0
    spares_in: Literal["pool", "block"] = "pool"
    """A spare of the pool replaces any node; with "block" each block has spares / blocks of its own."""
    block_nodes: int = 0
    """Nodes of one topology block, and of what a common cause can hit; 0: the cluster is one block."""
    process: Process = "exponential"
    weibull_shape: float = 1.0
    """Of the gaps between failures of one node, started in equilibrium: the mean number of failures does not depend on it."""
    trace: tuple[TraceFault, ...] = ()
    trace_days: float = 0.0
    """Length of the trace; each run begins at a random time of it, and it is repeated."""
    dispersion: float = 1.0
    """Variance over mean of weekly failure counts of the whole cluster; above 1 the rate of each week is drawn from a Gamma."""
    lemon_share: float = 0.0
    lemon_factor: float = 1.0
    """So many of the nodes fail so many times as often as the others; the mean over all stays."""
    burst_per_day: float = 0.0
    burst_nodes: int = 8
    """Common causes on top of the rate: so many neighbouring nodes of one block fail at once."""
    burst_tier: int | None = None
    """Tier that survives a burst; None: the last one."""
    startup_failure: float = 0.0
    startup_window_s: float = 600.0
    """Probability that a (re)start fails, at a uniform time within the window; no node is at fault, nothing but time is lost."""
    restart_exposed: bool = True
    """Whether failures hit restarts too."""
    idle_hazard: float = 0.0
    """Failure rate of nodes that do not train, relative to that of the others: spares, and all while the job waits for one. Only
    kinds that take a node to repair happen to them."""
    repair: Repair = Repair()
    false_alarms_per_day: float = 0.0
    """Healthy nodes of the job taken out by mistake; each interrupts it like a failure of `false_alarm_tier` with detection 0."""
    false_alarm_tier: int = 0
    extra_evictions: int = 0
    """Healthy nodes taken out along with each one that is replaced."""
    verify_s: float = 6 * 3600.0
    """Until a healthy node that was taken out is found to be healthy and comes back."""
    retire_after: int = 0
    """A node is retired at its so many-th fault (0: never); another takes its place after `retire_s`, and is no lemon."""
    retire_s: float = 7 * DAY_S

    def check(self) -> None:
        """Raises ConfigError naming the field and its value where the record makes no sense."""
        self.job.check()
        total = self.job.nodes + self.spares
        at_least_0 = (
            *("spares", "block_nodes", "burst_per_day", "startup_window_s", "false_alarms_per_day", "verify_s"),
            *("extra_evictions", "retire_after", "retire_s", "trace_days"),
        )
        for name in at_least_0:
            if not 0 <= getattr(self, name) < math.inf:
                raise ConfigError(f"{name} {getattr(self, name)}: a number from 0")
        for name in ("lemon_share", "startup_failure", "idle_hazard"):
            if not 0.0 <= getattr(self, name) <= 1.0:
                raise ConfigError(f"{name} {getattr(self, name)}: from 0 to 1")
        for name in ("days", "weibull_shape", "lemon_factor"):
            if not 0.0 < getattr(self, name) < math.inf:
                raise ConfigError(f"{name} {getattr(self, name)}: above 0")
        if not self.dispersion >= 1.0:
            raise ConfigError(f"dispersion {self.dispersion}: at least 1, which is Poisson")
        if self.burst_per_day and not 1 <= self.burst_nodes <= (self.block_nodes or total):
            raise ConfigError(f"burst_nodes {self.burst_nodes}: from 1 to a block's {self.block_nodes or total}")
        for name in ("burst_tier", "false_alarm_tier"):
            tier = getattr(self, name)
            if tier is not None and not 0 <= tier < len(self.job.tiers):
                raise ConfigError(f"{name} {tier}: there are {len(self.job.tiers)} tiers")
        if self.block_nodes and self.job.nodes % self.block_nodes:
            raise ConfigError(f"block_nodes {self.block_nodes}: {self.job.nodes} nodes are not whole blocks")
        if self.spares_in == "block" and (not self.block_nodes or self.spares % (self.job.nodes // self.block_nodes)):
            raise ConfigError(f"spares {self.spares} in blocks of {self.block_nodes} nodes: as many in each block")
        if self.process == "trace":
            if not self.trace or not self.trace_days > 0.0:
                raise ConfigError("process trace: give the trace and its length in days")
            self._check_trace(total)
        for name in ("bad_return", "gate_catch"):
            if not 0.0 <= getattr(self.repair, name) <= 1.0:
                raise ConfigError(f"repair.{name} {getattr(self.repair, name)}: from 0 to 1")
        for name in ("mean_s", "sigma", "refault_mean_s", "gate_s"):
            if not 0.0 <= getattr(self.repair, name) < math.inf:
                raise ConfigError(f"repair.{name} {getattr(self.repair, name)}: from 0")

    def _check_trace(self, total: int) -> None:
        for i, fault in enumerate(self.trace):
            where = f"trace[{i}]"
            if not 0.0 <= fault.t_s <= self.trace_days * DAY_S:
                raise ConfigError(f"{where}: t_s {fault.t_s} is outside its {self.trace_days:g} days")
            if not 0 <= fault.kind < len(self.job.kinds):
                raise ConfigError(f"{where}: kind {fault.kind}, the job lists {len(self.job.kinds)}")
            if not 0 <= fault.node < total:
                raise ConfigError(
                    f"{where}: node {fault.node}, there are {total} nodes and spares; map it to fewer nodes"
                )
            if not 0.0 <= fault.down_s < math.inf:
                raise ConfigError(f"{where}: down_s {fault.down_s}, from 0")
        if self.dispersion != 1.0 or self.lemon_share:
            raise ConfigError("process trace: dispersion and lemons are those of the trace; leave both out")
