"""Flags of `keepstep simulate` beyond those of a job, and the scenario that all of them describe."""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, NamedTuple, TypeVar

import click
import msgspec

from keepstep.cli.model_flags import DURATION, SHARE, job_from_flags
from keepstep.cli.output import NotFoundError
from keepstep.cli.plan_history import one_trace
from keepstep.cli.run_flags import Number
from keepstep.goodput.job import Job
from keepstep.goodput.spares import poisson_quantile
from keepstep.planner.replay import to_scenario_faults
from keepstep.planner.scenario import DAY_S, Repair, Scenario, TraceFault
from keepstep.planner.traces import FaultTrace, looks_like_one
from keepstep.records.errors import ConfigError, StorageError

F = TypeVar("F", bound=Callable[..., Any])

SPARES_HOLD = 0.999
"""Share of time in which there are enough spares when nobody says how many."""

_TO_SCENARIO = (
    *("days", "spares", "process", "weibull_shape", "dispersion", "lemon_share", "lemon_factor", "burst_per_day"),
    *("burst_nodes", "startup_failure", "false_alarms_per_day", "block_nodes", "spares_in", "idle_hazard"),
    "retire_after",
)
"""Flags that are named as the scenario's keys."""
_TO_REPAIR = {
    "mttr": "mean_s",
    "repair_sigma": "sigma",
    "bad_return": "bad_return",
    "gate": "gate_s",
    "gate_catch": "gate_catch",
}
_TO_JOB = {"gpus_per_node": "gpus_per_node", "interval": "interval_s", "straggler_share": "straggler_share"}
_ONLY_WITHOUT_FILE = ("tiers", "kinds", "hang_share", "hang_timeout")
_COUNT = click.IntRange(0)

_OPTIONS = (
    click.option(
        "--scenario", "scenario_file", metavar="FILE", help="JSON of a scenario; flags override what it says."
    ),
    click.option(
        "--process",
        type=click.Choice(["exponential", "weibull", "trace"]),
        help="How failures follow one another; exponential if not said otherwise.",
    ),
    click.option("--weibull-shape", type=Number(above=True, unit="shape"), metavar="K", help="Below 1: they cluster."),
    click.option("--trace", "trace_file", metavar="FILE[#NAME]", help="Faults to replay (docs/traces.md)."),
    click.option("--trace-days", type=Number(above=True, unit="days"), metavar="N", help="Length of the trace."),
    click.option(
        "--dispersion",
        type=Number(least=1.0, unit="times Poisson's variance"),
        metavar="D",
        help="Variance over mean of weekly failure counts.",
    ),
    click.option("--lemon-share", type=SHARE, metavar="SHARE", help="Share of nodes that fail more often."),
    click.option("--lemon-factor", type=Number(above=True, unit="times"), metavar="X", help="How much more often."),
    click.option("--burst-per-day", type=Number(unit="bursts a day"), metavar="N", help="Common causes, on top."),
    click.option("--burst-nodes", type=click.IntRange(1), metavar="N", help="Neighbouring nodes that one hits."),
    click.option("--startup-failure", type=SHARE, metavar="SHARE", help="Probability that a start fails."),
    click.option(
        "--false-alarms-per-day", type=Number(unit="false alarms a day"), metavar="N", help="Healthy nodes taken out."
    ),
    click.option("--bad-return", type=SHARE, metavar="SHARE", help="Repaired nodes that come back broken."),
    click.option("--gate", type=DURATION, metavar="TIME", help="Test of a node before it comes back."),
    click.option("--gate-catch", type=SHARE, metavar="SHARE", help="Broken nodes that the test finds."),
    click.option("--repair-sigma", type=Number(unit="sigma"), metavar="S", help="Of a lognormal length of repairs."),
    click.option("--block-nodes", type=_COUNT, metavar="N", help="Nodes of one topology block."),
    click.option(
        "--spares-in", type=click.Choice(["pool", "block"]), help="A spare replaces any node, or its block's."
    ),
    click.option(
        "--idle-hazard", type=SHARE, metavar="X", help="Failure rate of nodes that do not train, over others'."
    ),
    click.option("--restart-immune", is_flag=True, help="Nothing fails during a restart."),
    click.option("--retire-after", type=_COUNT, metavar="N", help="A node is retired at its so many-th fault."),
)


def scenario_options(function: F) -> F:
    """Add the flags above to a command."""
    for option in reversed(_OPTIONS):
        function = option(function)
    return function


def scenario_from_flags(flags: Mapping[str, Any], given: frozenset[str]) -> tuple[Scenario, list[str]]:
    """The scenario that the flags describe, and what the user should know of it. `given`: flags that were set, not defaults.

    Raises ConfigError naming the flag or key that is missing or makes no sense, NotFoundError, StorageError.
    """
    notes: list[str] = []
    file = flags["scenario_file"]
    base = None if file is None else read_scenario(Path(file))
    replayed = None if flags["trace_file"] is None else read_trace(flags["trace_file"])
    if replayed is not None and base is None and flags["failure_rate"] is None:
        flags = {**flags, "failure_rate": replayed.per_1000_node_days}
    job = job_from_flags(flags) if base is None else _changed_job(base.job, flags, given)
    values = {name: flags[name] for name in _TO_SCENARIO if flags[name] is not None and (base is None or name in given)}
    repair = Repair() if base is None else base.repair
    repairs = {key: flags[name] for name, key in _TO_REPAIR.items() if flags[name] is not None}
    values["repair"] = msgspec.structs.replace(repair, **repairs)
    if flags["restart_immune"]:
        values["restart_exposed"] = False
    if replayed is not None:
        # What a trace calls a fault is a node that is away, whether it trained or not.
        values.setdefault("idle_hazard", 1.0)
        values.setdefault("process", "trace")
        values["trace_days"] = flags["trace_days"] or replayed.days
    elif flags["weibull_shape"] is not None:
        values.setdefault("process", "weibull")
    if base is None and "spares" not in values:
        mean = job.rate_per_node_day * job.nodes * values["repair"].mean_s / DAY_S
        values["spares"] = poisson_quantile(SPARES_HOLD, mean)
        if values.get("spares_in") == "block" and values.get("block_nodes"):
            blocks = job.nodes // values["block_nodes"]
            values["spares"] = -(-values["spares"] // blocks) * blocks
        notes.append(
            f"--spares {values['spares']}: enough in {100 * SPARES_HOLD:g} % of the time if nodes fail independently, with "
            f"{mean:.3g} in repair on average (--mttr {values['repair'].mean_s / 3600.0:g}h)"
        )
    if replayed is not None:
        nodes = job.nodes + (values.get("spares") or (base.spares if base is not None else 0))
        values["trace"] = replayed.faults_of(nodes)
        if replayed.nodes is not None and replayed.nodes < nodes:
            notes.append(f"the trace watched {replayed.nodes} of the {nodes} nodes and spares; the others never fail")
    scenario = Scenario(job=job, **values) if base is None else msgspec.structs.replace(base, job=job, **values)
    scenario.check()
    return scenario, notes


def _changed_job(job: Job, flags: Mapping[str, Any], given: frozenset[str]) -> Job:
    """The job of a scenario file with what flags say of it."""
    for name in _ONLY_WITHOUT_FILE:
        if flags[name]:
            flag = {"tiers": "--tier", "kinds": "--kind"}.get(name, f"--{name.replace('_', '-')}")
            raise ConfigError(f"{flag} and --scenario: the file lists the job's tiers and kinds; change them there")
    values = {key: flags[name] for name, key in _TO_JOB.items() if name in given}
    if flags["gpus"] is not None:
        values["nodes"] = -(-flags["gpus"] // values.get("gpus_per_node", job.gpus_per_node))
    if flags["failure_rate"] is not None:
        values["rate_per_node_day"] = flags["failure_rate"] / 1000.0
    first = {"block_s": flags["delta"], "persist_lag_s": flags["persist_lag"]}
    first = {key: value for key, value in first.items() if value is not None}
    values["tiers"] = (msgspec.structs.replace(job.tiers[0], **first), *job.tiers[1:]) if job.tiers else ()
    phases = job.restart
    replace_s = phases.replace_s if flags["replace_s"] is None else flags["replace_s"]
    restart_s = phases.start_s + phases.replace_s if flags["restart"] is None else flags["restart"]
    if replace_s > restart_s:
        raise ConfigError(f"--replace {replace_s:g} s is part of --restart {restart_s:g} s and cannot be longer")
    restart = msgspec.structs.replace(phases, start_s=restart_s - replace_s, replace_s=replace_s)
    return msgspec.structs.replace(job, restart=restart, **values)


def read_scenario(path: Path) -> Scenario:
    """A scenario as JSON. Raises ConfigError naming the key, NotFoundError, StorageError."""
    try:
        return msgspec.json.decode(_read(path, "--scenario"), type=Scenario)
    except msgspec.DecodeError as error:
        raise ConfigError(f"--scenario {path}: {error}") from None


class Replayed(NamedTuple):
    """Faults to replay. `nodes`: watched, None where the file does not say; `trace`: where it is a failure trace."""

    faults: tuple[TraceFault, ...]
    days: float
    nodes: int | None = None
    trace: FaultTrace | None = None

    @property
    def per_1000_node_days(self) -> float | None:
        """Failure rate of a trace; None where the nodes that never failed are not known."""
        return None if self.trace is None else 1000.0 * len(self.trace.faults) / self.trace.node_days

    def faults_of(self, nodes: int) -> tuple[TraceFault, ...]:
        """Those of at most so many nodes, numbered from 0."""
        if self.trace is None:
            return self.faults
        return to_scenario_faults(self.trace, nodes=min(nodes, self.trace.nodes))


def read_trace(spec: str) -> Replayed:
    """Faults, and the trace's length in days: that of its last fault in whole days where nobody says it.

    A failure trace that `planner.traces` reads (FILE, or FILE#NAME of several in it), or the simulation's own records: a JSON
    array of faults {"t_s", "node", "down_s", "kind"}, an object {"days", "faults"}, or one fault a line. Raises ConfigError,
    NotFoundError, StorageError.
    """
    path = Path(spec.rpartition("#")[0] or spec)
    data = _read(path, "--trace")
    if looks_like_one(data):
        trace = one_trace(spec)
        return Replayed((), trace.days, trace.nodes, trace)
    try:
        try:
            whole: Any = json.loads(data)
        except ValueError:
            whole = [msgspec.json.decode(line) for line in data.splitlines() if line.strip()]
        days = None
        if isinstance(whole, dict) and "faults" in whole:
            days, whole = whole.get("days"), whole["faults"]
        faults = msgspec.convert([whole] if isinstance(whole, dict) else whole, tuple[TraceFault, ...])
        length = None if days is None else msgspec.convert(days, float)
    except (msgspec.DecodeError, ValueError) as error:
        raise ConfigError(f"--trace {path}: {error}") from None
    if not faults:
        raise ConfigError(f"--trace {path}: there are no faults in it")
    if length is None:
        length = max(1.0, math.ceil(max(fault.t_s for fault in faults) / DAY_S))
    return Replayed(tuple(sorted(faults, key=lambda fault: fault.t_s)), length)


def _read(path: Path, flag: str) -> bytes:
    try:
        return path.read_bytes()
    except FileNotFoundError:
        raise NotFoundError(f"{flag} {path}: there is no such file") from None
    except OSError as error:
        raise StorageError(f"{flag} {path}: {error.strerror}") from error
