"""What a history says of failures to `plan`: events of a fleet, or a failure trace."""

from __future__ import annotations

import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any, NamedTuple

from keepstep.goodput.campaign import RateKnowledge
from keepstep.goodput.fleetrates import ALL
from keepstep.planner.traces import FaultTrace, read_traces
from keepstep.records.errors import ConfigError

DAY_S = 86_400.0


class Seen(NamedTuple):
    """Interruptions in so much node time, and where that is from; the rest is None where a history does not say it."""

    failures: float
    node_days: float
    origin: str
    repair_s: float | None = None
    peakedness: float | None = None
    dispersion: float | None = None


def from_events(paths: Sequence[str], nodes: int) -> Seen:
    """Interruptions in events as `keepstep scan -o jsonl` prints them, of a job on so many nodes from the first event to the last.

    Raises ConfigError for a line that is none, and for events that span no time.
    """
    from keepstep.catalog.load import shipped
    from keepstep.launcher.eventhistory import as_of_then, count_interruptions
    from keepstep.sources.eventlines import read_event_lines

    found = count_interruptions(as_of_then(read_event_lines(paths).events), shipped())
    if found.span_days <= 0.0:
        raise ConfigError(
            f"--events {' '.join(paths)}: the events span no time; give --failures and --node-days instead"
        )
    node_days = nodes * found.span_days
    origin = f"--events: {found.interruptions} interruptions from {found.first} to {found.last}, {nodes} nodes"
    return Seen(found.interruptions, node_days, origin)


def one_trace(spec: str) -> FaultTrace:
    """The failure trace in FILE, or the one called NAME of FILE#NAME. Raises ConfigError naming those there are, StorageError."""
    path, mark, name = spec.rpartition("#")
    traces = read_traces(Path(path if mark else spec))
    chosen = [trace for trace in traces if not mark or trace.name == name]
    if len(chosen) != 1:
        names = ", ".join(trace.name for trace in traces)
        raise ConfigError(
            f"--trace {spec}: name one of {names}, as in --trace {path if mark else spec}#{traces[0].name}"
        )
    return chosen[0]


def from_trace(spec: str) -> Seen:
    """Rate, repair, peakedness and dispersion of a failure trace: FILE, or FILE#NAME of several in it. Raises ConfigError."""
    from keepstep.planner.tracerepair import nodes_down, repair_tail
    from keepstep.planner.tracestats import dispersion, incidents

    trace = one_trace(spec)
    merged = incidents(trace)
    begins = [incident.begin_s for incident in merged]
    down = nodes_down(trace)
    return Seen(
        len(merged),
        trace.nodes * trace.days,
        f"trace {trace.name}: {len(merged)} incidents in {trace.nodes} x {trace.days:.4g} node-days",
        repair_s=_repair_s(trace, repair_tail(trace).mean_s),
        peakedness=max(1.0, down.peakedness) if down.mean > 0.0 else None,
        dispersion=max(1.0, dispersion(begins, 1.0)) if len(begins) > 1 else None,
    )


def _repair_s(trace: FaultTrace, mean_s: float) -> float | None:
    """Mean repair; None when the trace knows no end of any fault."""
    return mean_s if trace.faults and mean_s > 0.0 else None


def take(seen: Seen, flags: dict[str, Any], origins: dict[str, str]) -> None:
    """Fill what flags leave open with what the history says beside the rate."""
    for value, flag in ((seen.repair_s, "mttr"), (seen.peakedness, "peakedness"), (seen.dispersion, "dispersion")):
        if value is not None and origins.get(flag) != "given":
            flags[flag], origins[flag] = value, seen.origin


def from_fleet(runs: Sequence[str], since: str | None, sku: str) -> RateKnowledge:
    """Recent failure rate of the fleet's nodes of one GPU model, from the folders of its runs (all there are without `runs`).

    Raises ConfigError where the model must be named, NotFoundError without a run.
    """
    from keepstep.cli.goodput_fleet import account, fleet_folders, read_fleet, since_ns

    now_ns = time.time_ns()
    records, left_out = read_fleet(fleet_folders(runs), now_ns)
    begin_ns = None if since is None else since_ns(since, now_ns)
    rates = account(records, left_out, begin_ns, now_ns).rates
    rows = [row for row in rates.recent or rates.rates if row.fault_class == ALL]
    chosen = [row for row in rows if row.sku == sku] or (rows if len(rows) == 1 else [])
    if not chosen:
        seen = ", ".join(row.sku for row in rows) or "no node time"
        raise ConfigError(f"--sku {sku}: the fleet's runs have {seen}; name one of them")
    row = chosen[0]
    days = f", last {rates.recent_days} days" if rates.recent else ""
    source = f"fleet, {row.sku}{days}: {row.failures} incidents in {row.node_days:.4g} node-days; before that {row.prior.source}"
    return RateKnowledge(
        shape=row.shape,
        node_days=1000.0 * row.shape / row.per_1000_node_days,
        source=source,
        dispersion=row.dispersion,
    )
