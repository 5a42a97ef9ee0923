"""`keepstep plan`: what to expect of a job, what dominates, what to change first."""

from __future__ import annotations

import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import click
import msgspec
from click.core import ParameterSource

from keepstep.cli.goodput import find_run
from keepstep.cli.measured import measured, measured_phases, open_run, rate_prior
from keepstep.cli.model_flags import DURATION, SHARE, job_from_flags, job_options
from keepstep.cli.output import emit, note, output_option
from keepstep.cli.plan_history import Seen, from_events, from_fleet, from_trace, take
from keepstep.cli.plan_table import render
from keepstep.cli.plots import plot_path, tornado
from keepstep.cli.run_flags import Number
from keepstep.goodput.calibration import Forecast, make_forecast
from keepstep.goodput.campaign import GIVEN_SHAPE, RateKnowledge, given_rate
from keepstep.goodput.job import FailureKind, Job, RestartPhases
from keepstep.goodput.rates import TYPICAL_DISPERSION, Prior, estimate_rate
from keepstep.planner.params import BYTES_PER_PARAM, STAGE_GBPS, Derived, derive
from keepstep.planner.plan import Circumstances, Plan, make_plan, planned_job
from keepstep.records.codec import rfc3339
from keepstep.records.errors import ConfigError

SHORT_REPAIR_S = 600.0
"""No node is repaired in less: somebody meant hours."""
ABOVE_0 = Number(above=True, unit="")


@click.command("plan")
@click.argument("runs", metavar="[RUN]...", nargs=-1)
@job_options
@click.option("--nodes", type=click.IntRange(1), metavar="N", help="Nodes that train, instead of --gpus.")
@click.option("--sku", default="unknown", help="GPU model, for its published failure rate (A100, H100).")
@click.option(
    "--failure-prior",
    metavar="FILE|RATE|fleet",
    help="What is known of the rate from elsewhere, or from all other runs; counts outweigh it.",
)
@click.option("--failures", type=Number(unit="failures"), metavar="N", help="Interruptions seen, with --node-days.")
@click.option("--node-days", type=Number(above=True, unit="node-days"), metavar="N", help="In so much node time.")
@click.option("--fleet", is_flag=True, help="Failure rate of the fleet's runs (RUNs, or all there are), of --sku.")
@click.option("--since", metavar="TIME", help="With --fleet: runs from then on, such as 30d.")
@click.option("--events", multiple=True, metavar="FILE", help="Count interruptions in events (keepstep scan -o jsonl).")
@click.option("--trace", metavar="FILE[#NAME]", help="Rate, repair and bursts of a failure trace (docs/traces.md).")
@click.option(
    "--dispersion",
    type=Number(least=1.0, unit="times Poisson's variance"),
    default=TYPICAL_DISPERSION,
    show_default=True,
    help="Variance over mean of failure counts; 1: failures know nothing of one another.",
)
@click.option(
    "--peakedness",
    type=Number(least=1.0, unit="times Poisson's variance"),
    default=1.0,
    show_default=True,
    help="Variance over mean of the number of nodes in repair, for spares; docs/traces.md has measured ones.",
)
@click.option(
    "--idle-hazard",
    type=SHARE,
    default=0.0,
    show_default=True,
    help="Failure rate of nodes that do not train, over others'.",
)
@click.option("--block-nodes", type=click.IntRange(1), help="Nodes of a topology block that spares cannot leave.")
@click.option("--goal", type=SHARE, metavar="SHARE", help="Goodput that is wanted: say what it takes.")
@click.option("--params", type=ABOVE_0, metavar="N", help="Parameters of the model, such as 70e9: derives save costs.")
@click.option("--bytes-per-param", type=ABOVE_0, default=BYTES_PER_PARAM, show_default=True, metavar="N")
@click.option(
    "--storage-gbps", type=ABOVE_0, metavar="GB/S", help="Gigabytes a second that storage takes, all nodes together."
)
@click.option(
    "--stage-gbps", type=ABOVE_0, metavar="GB/S", help=f"From one GPU to host memory; {STAGE_GBPS:g} is assumed."
)
@click.option("--detect", type=DURATION, metavar="TIME", help="Until a failure that is no hang is known.")
@click.option("--decide", type=DURATION, metavar="TIME", help="From then until it is decided what to do.")
@click.option("--start", type=DURATION, metavar="TIME", help="Processes and rendezvous, instead of --restart.")
@click.option("--load", type=DURATION, metavar="TIME", help="Restore of a checkpoint, with --start.")
@click.option("--plot", type=click.Path(dir_okay=False), metavar="FILE", help="Draw the tornado: a .png or .svg file.")
@click.option("--store", is_flag=True, help="Keep the forecast with the RUN; goodput compares it with what happens.")
@output_option
def plan(runs: tuple[str, ...], output: str, plot: str | None, store: bool, **flags: Any) -> None:
    """Plan a job: interval, spares, expected goodput with its 90 % interval, what dominates, what to change first.

    Inputs are flags, and for what they leave out what RUNs measured (their folders or ids). Times are seconds or have a
    unit: 15m, 24h. JSON is `keepstep.plan/1`.
    """
    folders = [find_run(run) for run in runs]
    if store and not folders:
        raise ConfigError("--store keeps the forecast with a run; name the RUN")
    picture = plot_path(plot)
    context = click.get_current_context()
    origins = {
        name: "given" if context.get_parameter_source(name) is ParameterSource.COMMANDLINE else "default"
        for name, value in flags.items()
        if value is not None and value != ()
    }
    made, forecast = compute(folders, flags, origins)
    if picture is not None:
        tornado(made, picture)
        note(f"wrote {picture}")
    if store:
        from keepstep.launcher.views.forecasts import keep

        note(f"forecast kept in {keep(folders[-1], forecast)}")
    emit(
        made,
        output,
        table=lambda console, wide: render(made, console, wide=wide),
        name=lambda p: f"{p.used_interval_s:g}",
    )


def compute(folders: Sequence[Path], flags: dict[str, Any], origins: dict[str, str]) -> tuple[Plan, Forecast]:
    """The plan, and the forecast to keep, for what flags and run folders say; `origins`: where each flag's value is from.

    Raises ConfigError naming the flag that is missing, NotFoundError, StorageError.
    """
    flags, origins = dict(flags), dict(origins)
    fixed_interval = flags.get("interval") is not None
    _size(flags, origins)
    seen = _measure(folders, flags, origins)
    history = _history(flags, origins)
    derived = _derive(flags, origins)
    if flags.get("restart") is None and flags.get("start") is None:
        flags["restart"] = 0.0
        origins["restart"] = "default: restarts take no time; give --restart for a forecast that counts them"
    if flags["fleet"]:
        rate = from_fleet([str(folder) for folder in folders], flags["since"], flags["sku"])
        origins["failure_rate"] = rate.source
    else:
        rate = _rate(flags, folders, history or seen, origins)
    flags["failure_rate"] = 1000.0 * rate.mean
    one_number = flags["restart"] is not None
    job = _phases(job_from_flags(flags if one_number else {**flags, "replace_s": None}), flags)
    around = Circumstances(
        rate=rate,
        days=flags["days"],
        price_usd=flags["price"],
        spares=flags["spares"],
        repair_s=flags["mttr"],
        peakedness=flags["peakedness"],
        idle_hazard=flags["idle_hazard"],
        block_nodes=flags["block_nodes"] or 0,
        fixed_interval=fixed_interval,
        goal=flags["goal"],
    )
    if around.repair_s is not None and around.repair_s < SHORT_REPAIR_S:
        note(f"--mttr {around.repair_s:g} s is taken: a number without a unit is seconds, such as 24h for a day")
    if around.spares is not None and around.repair_s is None:
        note(f"--spares {around.spares} without --mttr: how often they run out depends on how long a repair takes")
    made = make_plan(job, around, _inputs(job, around, derived, origins))
    planned = planned_job(job, around)
    made_at = rfc3339(time.time_ns())
    return made, make_forecast(planned, rate, around.days, made_at=made_at, source="plan", origins=origins)


def _size(flags: dict[str, Any], origins: dict[str, str]) -> None:
    """--nodes and --gpus say the same thing."""
    nodes, gpus, per_node = flags["nodes"], flags["gpus"], flags["gpus_per_node"]
    if nodes is not None and gpus is not None:
        raise ConfigError(f"--nodes {nodes} and --gpus {gpus}: give one of them")
    if nodes is not None:
        flags["gpus"], origins["gpus"] = nodes * per_node, f"{nodes} nodes of {per_node} GPUs"


def _measure(folders: Sequence[Path], flags: dict[str, Any], origins: dict[str, str]) -> Seen:
    """Fill what flags leave open from the runs: costs from the newest that says them. Failures and node-days of all of them."""
    failures = node_days = 0.0
    for folder in folders:
        run = open_run(folder)
        found = measured(run)
        where = f"run {folder.name}"
        for name, flag in (("block_s", "delta"), ("persist_lag_s", "persist_lag"), ("restart_s", "restart")):
            if name in found and origins.get(flag) != "given" and not flags["tiers"]:
                flags[flag], origins[flag] = found[name].value, f"{where}: {found[name].origin}"
        if "nodes" in found and origins.get("gpus") in (None, "run"):
            if "ranks_per_node" in found and origins.get("gpus_per_node") != "given":
                flags["gpus_per_node"] = found["ranks_per_node"].value
            flags["gpus"], origins["gpus"] = found["nodes"].value * flags["gpus_per_node"], "run"
        if "failures" in found:
            failures += found["failures"].value
            node_days += found["exposure_node_days"].value
        phases = measured_phases(run)
        if phases and not {"restart", "start", "kinds"} & {n for n, o in origins.items() if o == "given"}:
            _take_phases(phases, flags, origins, where)
    return Seen(failures, node_days, f"{len(folders)} run(s)")


def _take_phases(phases: dict[str, float], flags: dict[str, Any], origins: dict[str, str], where: str) -> None:
    """Restart phases that a run measured, in place of one number for all of them."""
    flags["restart"] = None
    origins.pop("restart", None)
    names = {"detect_s": "detect", "decide_s": "decide", "replace_s": "replace_s", "start_s": "start", "load_s": "load"}
    for name, flag in names.items():
        if name in phases and origins.get(flag) != "given":
            flags[flag], origins[flag] = phases[name], f"{where}: median of its restarts"
    if "hang_share" in phases and "hang_share" not in origins:
        flags["hang_share"], flags["hang_timeout"] = phases["hang_share"], phases["hang_s"]
        origins["hang_share"] = origins["hang_timeout"] = f"{where}: its faults"


def _derive(flags: dict[str, Any], origins: dict[str, str]) -> Derived | None:
    """Costs of saves from the size of the model, where neither a flag nor a run says them."""
    if flags["params"] is None:
        for flag in ("storage_gbps", "stage_gbps"):
            if flags[flag] is not None:
                raise ConfigError(f"--{flag.replace('_', '-')} {flags[flag]:g} needs --params: the size of the model")
        return None
    if flags["storage_gbps"] is None:
        raise ConfigError(
            "--params needs --storage-gbps: gigabytes a second that storage takes from all nodes together"
        )
    if flags["gpus"] is None:
        raise ConfigError("--params needs --nodes or --gpus: over how many the state is spread")
    per_node = flags["gpus_per_node"]
    found = derive(
        flags["params"],
        -(-flags["gpus"] // per_node),
        per_node,
        bytes_per_param=flags["bytes_per_param"],
        storage_gbps=flags["storage_gbps"],
        stage_gbps=flags["stage_gbps"] or STAGE_GBPS,
    )
    stage = "given" if flags["stage_gbps"] else "assumed"
    if not flags["tiers"]:
        for flag, value, why in (
            (
                "delta",
                found.block_s,
                f"derived: copy to host memory at {found.stage_gbps:g} GB/s a GPU ({stage}): a floor",
            ),
            ("persist_lag", found.persist_lag_s, f"derived: write at {found.storage_gbps:g} GB/s"),
        ):
            if flags[flag] is None:
                flags[flag], origins[flag] = value, why
    if flags["load"] is None and flags["restart"] is None:
        flags["load"], origins["load"] = found.load_s, f"derived: read at {found.storage_gbps:g} GB/s"
        flags["start"] = flags["start"] or 0.0
    return found


def _history(flags: dict[str, Any], origins: dict[str, str]) -> Seen | None:
    """What --failures, --events or --trace say; None without any of them. Raises ConfigError."""
    given = [name for name in ("failures", "events", "trace", "fleet") if flags[name] not in (None, (), False)]
    if flags["since"] is not None and not flags["fleet"]:
        raise ConfigError(f"--since {flags['since']} needs --fleet")
    if (flags["failures"] is None) != (flags["node_days"] is None):
        raise ConfigError("--failures and --node-days belong together: so many interruptions in so much node time")
    if len(given) > 1:
        raise ConfigError(f"--{given[0]} and --{given[1]} both say how often nodes fail; give one of them")
    if not given or flags["fleet"]:
        return None
    if flags["failures"] is not None:
        return Seen(flags["failures"], flags["node_days"], "given")
    if flags["events"]:
        if flags["gpus"] is None:
            raise ConfigError("--events needs --nodes or --gpus: how many nodes the events are of")
        return from_events(flags["events"], -(-flags["gpus"] // flags["gpus_per_node"]))
    found = from_trace(flags["trace"])
    take(found, flags, origins)
    return found


def _rate(flags: dict[str, Any], folders: Sequence[Path], seen: Seen, origins: dict[str, str]) -> RateKnowledge:
    """A given rate alone weighs GIVEN_SHAPE failures; with counts it is a prior that they outweigh."""
    dispersion, rate = flags["dispersion"], flags["failure_rate"]
    if rate is not None and flags["failure_prior"] is not None:
        raise ConfigError(f"--failure-rate {rate:g} and --failure-prior {flags['failure_prior']}: give one of them")
    if seen.node_days <= 0.0:
        if rate is not None:
            return given_rate(rate / 1000.0, f"given, taken to rest on {GIVEN_SHAPE:g} failures", dispersion)
        prior = _prior(flags, folders)
        origins["failure_rate"] = prior.source
        if flags["failure_prior"] is not None:
            return RateKnowledge(
                shape=prior.shape, node_days=prior.node_days, source=prior.source, dispersion=dispersion
            )
        note(f"no failure rate is given: {1000.0 * prior.rate_per_node_day:g} per 1000 node-days, {prior.source}")
        return given_rate(prior.rate_per_node_day, prior.source, dispersion)
    origins["failures"] = f"{seen.origin}: {seen.failures:g} in {seen.node_days:.4g} node-days"
    found = estimate_rate(_prior(flags, folders), seen.failures, seen.node_days, dispersion=dispersion)
    source = f"{found.prior.source}; {origins['failures']}"
    origins["failure_rate"] = source
    return RateKnowledge(
        shape=found.shape, node_days=found.shape / found.rate_per_node_day, source=source, dispersion=dispersion
    )


def _prior(flags: dict[str, Any], folders: Sequence[Path]) -> Prior:
    """--failure-rate or --failure-prior, else what the newest run was started with, else the published rate."""
    folder = folders[-1] if folders else None
    if flags["failure_rate"] is not None:
        return rate_prior(f"{flags['failure_rate']:g}", flags["sku"], folder)
    if flags["failure_prior"] == "fleet":
        from keepstep.cli.goodput_fleet import fleet_prior
        from keepstep.launcher.views.view import run_id_of

        return fleet_prior(flags["sku"], None if folder is None else run_id_of(folder))
    return rate_prior(flags["failure_prior"], flags["sku"], folder, "--failure-prior")


def _phases(job: Job, flags: dict[str, Any]) -> Job:
    """The job with restart phases in place of one number, where they were given."""
    given = {name: flags[name] for name in ("detect", "decide", "start", "load") if flags[name] is not None}
    if flags["restart"] is not None and ("start" in given or "load" in given):
        raise ConfigError("--restart and --start or --load: give one number for all, or the phases")
    restart = RestartPhases(
        decide_s=given.get("decide", 0.0),
        replace_s=flags["replace_s"] or 0.0,
        start_s=given.get("start", job.restart.start_s),
    )
    tiers = job.tiers
    if "load" in given:
        tiers = (*tiers[:-1], msgspec.structs.replace(tiers[-1], load_s=given["load"]))
    kinds: tuple[FailureKind, ...] = job.kinds
    if "detect" in given and not flags["kinds"]:
        kinds = tuple(msgspec.structs.replace(k, detect_s=given["detect"]) if k.name == "crash" else k for k in kinds)
    return msgspec.structs.replace(job, restart=restart, tiers=tiers, kinds=kinds)


def _inputs(job: Job, around: Circumstances, derived: Derived | None, origins: dict[str, str]) -> dict[str, Any]:
    """Everything the plan was computed from, so that it can be computed again."""
    return {
        "gpus": job.nodes * job.gpus_per_node,
        "nodes": job.nodes,
        "gpus_per_node": job.gpus_per_node,
        "failure_rate_per_1000_node_days": 1000.0 * around.rate.mean,
        "rate": msgspec.to_builtins(around.rate),
        "delta_s": job.tiers[0].block_s,
        "persist_lag_s": job.tiers[0].persist_lag_s,
        "restart_s": job.mean_restart_s(),
        "tiers": msgspec.to_builtins(job.tiers),
        "kinds": msgspec.to_builtins(job.kinds),
        "restart_phases": msgspec.to_builtins(job.restart),
        "straggler_share": job.straggler_share,
        "interval_s": job.interval_s if around.fixed_interval else None,
        "days": around.days,
        "price_usd_per_gpu_hour": around.price_usd,
        "spares": around.spares,
        "mttr_s": around.repair_s,
        "peakedness": around.peakedness,
        "idle_hazard": around.idle_hazard,
        "block_nodes": around.block_nodes or None,
        "goal": around.goal,
        "derived": None if derived is None else msgspec.to_builtins(derived),
        "origins": origins,
    }
