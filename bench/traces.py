"""What public failure traces say of rates, bursts, repairs and spares, and what their faults in order leave of a job's time.

The control is a Poisson process: its closed forms beside every figure, and drawn traces with as many faults as InfiniteHBD's and
with its repair times. The traces are not part of the project: InfiniteHBD-Trace (stepfun-ai, Apache-2.0) and the failure records of
Los Alamos National Laboratory (LA-UR-05-7318) are read from data/traces in the folder that KEEPSTEP_SHARED names.
"""

from __future__ import annotations

import os
import random
import statistics
from pathlib import Path

from _common import Result, Target, argument_parser, emit, say
from keepstep.goodput.interval import young_s
from keepstep.goodput.spares import poisson_quantile
from keepstep.planner.replay import Replay, Rule, replay_goodput
from keepstep.planner.tracerepair import LEVELS, nodes_down, repair_tail, spares_needed
from keepstep.planner.traces import DAY_S, Fault, FaultTrace, only_levels, read_traces
from keepstep.planner.tracestats import (
    allocation_luck,
    concentration,
    dispersion,
    faults_by_node,
    gaps_s,
    incidents,
    lemons,
    per_1000_node_days,
    rates,
    rates_by_month,
    refaults,
    short_gaps,
    size_slope,
    weibull_fit,
)

INFINITEHBD, LANL = "infinitehbd-fault_trace.json", "lanl-failures-1996-2005.csv.xz"
SLOPES = {
    "nodes of 4 processors": (3, 4, 5, 18, 19, 20),
    "the same with system 6": (3, 4, 5, 6, 18, 19, 20),
    "the same with systems 6 and 21": (3, 4, 5, 6, 18, 19, 20, 21),
    "nodes of 2 processors": (8, 9, 10, 11, 12, 13, 14),
    "nodes of 2 processors without system 8": (9, 10, 11, 12, 13, 14),
    "all described systems": (),
}
"""LANL systems of one hardware: 6 has 32 nodes, 21 was in use for four months."""
REPLAYED = (3, 18, 19, 20)
MTTF_S = DAY_S / (6.5e-3 * 2048)
"""16,384 GPUs at 6.5 failures per 1000 node-days."""
JOBS = ((10.0, 120.0), (60.0, 120.0), (60.0, 900.0), (10.0, 900.0))
"""Seconds a save blocks, seconds of a restart; the interval is Young's."""
REFERENCE: dict[str, tuple[Rule, tuple[float | None, ...]]] = {
    "lanl-3": ("immune", (0.931, 0.858, 0.778, None)),
    "lanl-18": ("immune", (0.930, 0.857, 0.778, None)),
    "lanl-19": ("immune", (0.930, 0.857, 0.772, None)),
    "lanl-20": ("immune", (0.932, 0.865, 0.797, None)),
    "infinitehbd": ("exposed", (0.936, 0.869, 0.797, 0.855)),
}
"""Goodput by another program, written before this one and apart from it, for JOBS in their order; to three digits."""
CONTROLS = 100
RULES: tuple[Rule, ...] = ("immune", "exposed")


def row(name: str, system: str, unit: str, value: float, note: str | None = None) -> Result:
    return Result(name, system, unit, [value], note=note)


def beside(name: str, trace: FaultTrace, unit: str, value: float, poisson: float) -> Result:
    return row(name, trace.name, unit, value, note=f"Poisson {poisson:.3g}")


def poisson_trace(like: FaultTrace, seed: int) -> FaultTrace:
    """As many faults at uniform times on uniform nodes, each with the length of one of the trace's own."""
    chance = random.Random(seed)
    length_s = like.days * DAY_S
    faults = []
    for begin_s in sorted(chance.uniform(0.0, length_s) for _ in like.faults):
        end_s = begin_s + chance.choice(like.faults).down_s
        faults.append(
            Fault(
                node=str(chance.randrange(like.nodes)),
                begin_s=begin_s,
                end_s=min(end_s, length_s),
                returned=end_s <= length_s,
            )
        )
    return FaultTrace(name="control", nodes=like.nodes, days=like.days, faults=tuple(faults))


def rate_rows(trace: FaultTrace) -> list[Result]:
    found = [
        row("faults per 1000 node-days", trace.name, "1", per_1000_node_days(trace), f"{len(trace.faults)} faults")
    ]
    for one in rates(trace):
        found.append(row(f"... {one.name}", trace.name, "1", one.per_1000_node_days, f"{one.faults} faults"))
    by_month = rates_by_month(trace)
    note = "whole months of 30 days from the first fault"
    found.append(Result("... by month", trace.name, "1", by_month, note=note))
    return found


def clustering_rows(trace: FaultTrace) -> list[Result]:
    merged = incidents(trace)
    begins_s = [incident.begin_s for incident in merged]
    several = [incident for incident in merged if incident.nodes > 1]
    share = sum(incident.faults for incident in several) / len(trace.faults)
    most = max(incident.nodes for incident in merged)
    note = f"{len(several)} on two nodes or more, {sum(i.nodes > 2 for i in merged)} on three or more, at most {most}"
    found = [
        row("incidents (gaps below 10 min merged)", trace.name, "incidents", len(merged), note),
        row("share of faults in incidents of several nodes", trace.name, "1", share),
    ]
    for what, times_s in (("faults", trace.begins_s), ("incidents", begins_s)):
        for days, name in ((1, "daily"), (7, "weekly"), (30, "monthly")):
            found.append(
                beside(f"variance/mean of {name} {what}", trace, "ratio", dispersion(times_s, days), poisson=1.0)
            )
        gaps = gaps_s(times_s)
        fit = weibull_fit(gaps)
        note = f"+- {fit.shape_standard_error:.3f}, {fit.gaps} gaps above 0; exponential 1"
        found.append(row(f"Weibull shape, gaps of {what}", trace.name, "1", fit.shape, note))
        short = short_gaps(gaps)
        found.append(beside(f"share of gaps below 1 h, {what}", trace, "1", short.share, short.poisson))
    return found


def node_rows(trace: FaultTrace) -> list[Result]:
    found = []
    for top in (0.05, 0.1):
        worst = concentration(trace, top)
        found.append(
            beside(f"share of faults on the worst {top:.0%} of nodes", trace, "1", worst.faults_share, worst.poisson)
        )
    bad = lemons(trace)
    note = f"with {sum(lemon.faults for lemon in bad)} faults; 5 % false discoveries"
    found.append(row("lemons", trace.name, "nodes", len(bad), note))
    found.append(row("nodes without a fault", trace.name, "nodes", faults_by_node(trace).count(0)))
    for again in refaults(trace, (600.0, 3600.0, DAY_S, 7 * DAY_S)):
        name = f"returns that fail again within {again.within_s / 3600:.3g} h"
        found.append(beside(name, trace, "1", again.share, again.poisson))
    soon, same = failing_again(trace)
    found.append(row("... within 24 h in the same words", trace.name, "returns", same, f"of {soon}"))
    return found


def failing_again(trace: FaultTrace) -> tuple[int, int]:
    """Faults within a day after the node's last one ended, and those of them with the same cause in the same words."""
    last: dict[str, Fault] = {}
    soon = same = 0
    for fault in trace.faults:
        before = last.get(fault.node)
        if before is not None and 0.0 <= fault.begin_s - before.end_s < DAY_S:
            soon += 1
            same += (before.cause, before.detail) == (fault.cause, fault.detail)
        last[fault.node] = fault
    return soon, same


def repair_rows(trace: FaultTrace) -> list[Result]:
    tail = repair_tail(trace)
    times = (("median", tail.median_s), ("mean", tail.mean_s), ("p90", tail.p90_s), ("p99", tail.p99_s))
    found = [row(f"repair, {name}", trace.name, "h", time_s / 3600.0) for name, time_s in times]
    found.append(row("repair, sigma of the logarithm", trace.name, "1", tail.log_sigma))
    down = nodes_down(trace)
    found.append(row("nodes down, mean", trace.name, "nodes", down.mean, f"{down.mean / trace.nodes:.2%} of them"))
    found.append(beside("nodes down, variance/mean", trace, "ratio", down.peakedness, 1.0))
    for level in LEVELS:
        expected = poisson_quantile(level, down.mean)
        found.append(beside(f"nodes down, p{100 * level:g}", trace, "nodes", down.quantile(level), expected))
    need = spares_needed(down)
    if need.poisson:
        note = f"normal with the measured variance: {need.peaked:.3g}"
        found.append(row("spares at p99 over Poisson's", trace.name, "ratio", need.ratio, note))
    return found


def replay_row(trace: FaultTrace, job: tuple[float, float], rule: Rule, mttf_s: float | None) -> tuple[Result, Replay]:
    block_s, restart_s = job
    own_s = gaps_mean_s(trace) if mttf_s is None else mttf_s
    found = replay_goodput(
        trace.begins_s, young_s(block_s, own_s), block_s, restart_s, mttf_s=mttf_s, persist_lag_s=0.0, rule=rule
    )
    note = (
        f"{found.interruptions} of {found.faults} faults interrupt; exact at their MTTF {found.mttf_s / 3600:.3g} h "
        f"{found.predicted:.4f}, at that of faults {found.predicted_from_faults:.4f}; noise {found.noise:.4f}"
    )
    pace = "" if mttf_s is not None else ", own pace"
    name = f"goodput d={block_s:g} s R={restart_s / 60:g} min, {rule}{pace}"
    return row(name, trace.name, "1", found.goodput, note), found


def gaps_mean_s(trace: FaultTrace) -> float:
    return statistics.fmean(gaps_s(trace.begins_s))


def replay_rows(traces: list[FaultTrace]) -> tuple[list[Result], dict[tuple[str, int, Rule], Replay]]:
    results, found = [], {}
    for trace in traces:
        for place, job in enumerate(JOBS):
            for rule in RULES:
                result, replayed = replay_row(trace, job, rule, MTTF_S)
                results.append(result)
                found[trace.name, place, rule] = replayed
        results.append(replay_row(trace, JOBS[2], "exposed", None)[0])
    return results, found


def slope_rows(lanl: dict[str, FaultTrace]) -> list[Result]:
    rows = []
    for name, numbers in SLOPES.items():
        chosen = [lanl[f"lanl-{number}"] for number in numbers] or list(lanl.values())
        slope = size_slope(chosen)
        note = f"+- {slope.standard_error:.3f}, {slope.systems} systems"
        rows.append(row(f"log-log slope, {name}", "lanl", "1", slope.slope, note))
    for number in sorted(set(SLOPES["nodes of 4 processors"]) - set(REPLAYED)):
        trace = lanl[f"lanl-{number}"]
        rate = per_1000_node_days(trace)
        rows.append(
            row("faults per 1000 node-days", trace.name, "1", rate, f"{trace.nodes} nodes, {trace.days:.0f} days")
        )
    return rows


def replay_errors(found: dict[tuple[str, int, Rule], Replay]) -> tuple[float, float, float]:
    """Largest differences in points: to the other program; to the formula at interruptions; to that at faults."""
    reference = [
        abs(found[name, place, rule].goodput - value)
        for name, (rule, values) in REFERENCE.items()
        for place, value in enumerate(values)
        if value is not None
    ]
    real = [replayed for (name, _, _), replayed in found.items() if name != "control"]
    by_interruptions = [abs(r.goodput - r.predicted) for r in real]
    by_faults = [abs(r.goodput - r.predicted_from_faults) for r in real]
    return 100 * max(reference), 100 * max(by_interruptions), 100 * max(by_faults)


def measure(folder: Path, seed: int) -> tuple[list[Result], dict[str, float]]:
    """All rows, and the values of the targets."""
    hbd = read_traces(folder / INFINITEHBD)[0]
    lanl = {trace.name: trace for trace in read_traces(folder / LANL)}
    chosen = [lanl[f"lanl-{number}"] for number in REPLAYED]
    control = poisson_trace(hbd, seed)
    results = slope_rows(lanl)
    for trace in (hbd, *chosen, control):
        say(f"{trace.name}: {len(trace.faults)} faults of {trace.nodes} nodes in {trace.days:.0f} days")
        for rows in (rate_rows, clustering_rows, node_rows, repair_rows):
            results += rows(trace)
    hardware = nodes_down(only_levels(hbd, "hardware"))
    note = f"Poisson {poisson_quantile(0.99, hardware.mean)}, mean {hardware.mean:.2f}"
    results.append(row("nodes down by hardware alone, p99", hbd.name, "nodes", hardware.quantile(0.99), note))
    for nodes in (16, 128):
        luck = allocation_luck(hbd, nodes, seed=seed)
        note = f"5 % to 95 % of draws: {luck.p5_s / 3600:.3g} to {luck.p95_s / 3600:.3g}"
        results.append(row(f"MTTF of {nodes} nodes drawn at random", hbd.name, "h", luck.median_s / 3600, note))
    draws = [spares_needed(nodes_down(poisson_trace(hbd, seed + 1 + i))).ratio for i in range(CONTROLS)]
    results.append(Result("spares at p99 over Poisson's, other draws", "control", "ratio", draws))
    replays, found = replay_rows([*chosen, hbd, control])
    reference, by_interruptions, by_faults = replay_errors(found)
    results += replays
    results.append(row("largest error of the formula at the MTTF of faults", "all five traces", "points", by_faults))
    slope = next(r for r in results if r.name == "log-log slope, nodes of 4 processors").median or 0.0
    return results, {"slope": slope, "reference": reference, "interruptions": by_interruptions}


def main() -> None:
    args = argument_parser("Failure traces, measured and replayed.").parse_args()
    shared = os.environ.get("KEEPSTEP_SHARED")
    folder = Path(shared or "") / "data/traces"
    missing = [name for name in (INFINITEHBD, LANL) if not (folder / name).exists()]
    why = None
    if not shared:
        why = "KEEPSTEP_SHARED is not set: no traces"
    elif missing:
        why = f"KEEPSTEP_SHARED holds no data/traces/{missing[0]}"
    results: list[Result] = []
    values: dict[str, float] = {}
    if why is None:
        results, values = measure(folder, args.seed)
    else:
        say(f"traces: skipped, {why}")
    targets = [
        Target("lanl_slope_4proc", values.get("slope"), "1", ">=", 0.94, note=why),
        Target("lanl_slope_4proc", values.get("slope"), "1", "<=", 1.02, note=why),
        Target("replay_error_points", values.get("reference"), "points", "<=", 0.2, note=why or "to another program"),
        Target(
            "formula_error_points",
            values.get("interruptions"),
            "points",
            "<=",
            1.0,
            note=why or "exact at the replay's MTTF",
        ),
    ]
    if args.keep and results:
        args.keep.mkdir(parents=True, exist_ok=True)
        lines = [f"{r.system}\t{r.name}\t{r.median!r}\t{r.unit}\t{r.note or ''}" for r in results]
        (args.keep / "traces.tsv").write_text("\n".join(lines) + "\n")
    emit("traces", results, targets, output=args.output, packages=["keepstep"])


if __name__ == "__main__":
    main()
