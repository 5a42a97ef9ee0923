"""`keepstep ckpt interval`: how long to train between checkpoints, what it was computed from, and how much it matters."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Any

import click
import msgspec

from keepstep.cli.goodput import find_run
from keepstep.cli.measured import Value, measured, open_run, rate_prior
from keepstep.cli.output import emit, format_duration_s, output_option
from keepstep.cli.run_flags import SECONDS, SECONDS_ABOVE_0, Number
from keepstep.goodput.advice import MAX_INTERVAL_S, MIN_INTERVAL_S, IntervalAdvice, advise
from keepstep.goodput.ramp import smoothing_cost_points
from keepstep.goodput.rates import TYPICAL_DISPERSION, estimate_rate
from keepstep.records.errors import ConfigError

if TYPE_CHECKING:
    from rich.console import Console
    from rich.table import Table

FORMULAS = {
    "young": "sqrt(2 d M)",
    "daly": "sqrt(2 d M) - d",
    "daly_higher_order": "sqrt(2dM) (1 + sqrt(d/2M)/3 + d/18M) - d",
    "optimal": "M (1 + W0(-exp(-1 - d/M)))",
}
GIVEN = "given"


@click.command("interval")
@click.option("--run", metavar="RUN", help="Take what a run measured: its folder or id. Other flags go before it.")
@click.option("--delta", type=SECONDS, metavar="S", help="Seconds that training stands still for a save.")
@click.option("--persist-lag", type=SECONDS, metavar="S", help="From the end of that until the save is durable.")
@click.option("--restart", type=SECONDS, metavar="S", help="From a failure to training again.")
@click.option("--nodes", type=click.IntRange(1), help="Nodes of the job.")
@click.option("--gpus", type=click.IntRange(1), help="GPUs of the job, instead of --nodes.")
@click.option("--gpus-per-node", type=click.IntRange(1), default=8, show_default=True, help="For --gpus.")
@click.option("--failure-rate", metavar="FILE|RATE", help="Failures per 1000 node-days, or a record of a fleet's.")
@click.option("--sku", default="unknown", help="GPU model, for the published rate (A100, H100).")
@click.option(
    "--dispersion",
    type=Number(least=1.0, unit="times Poisson's variance"),
    default=TYPICAL_DISPERSION,
    show_default=True,
    help="Variance over mean of failure counts; 1: failures know nothing of one another.",
)
@click.option("--min", "min_s", type=SECONDS_ABOVE_0, default=MIN_INTERVAL_S, show_default=True, help="Lower bound, s.")
@click.option("--max", "max_s", type=SECONDS_ABOVE_0, default=MAX_INTERVAL_S, show_default=True, help="Upper bound, s.")
@click.option("--power-ramp", type=SECONDS, default=0.0, metavar="S", help="As for keepstep run: show what it costs.")
@click.option("--stagger", type=SECONDS, default=0.0, metavar="S", help="Writes spread over so long: show the cost.")
@output_option
def interval(run: str | None, output: str, **flags: Any) -> None:
    """Say how long to train between checkpoints, and why.

    Inputs are what a run measured (--run), or flags. The advice is the exact optimum for random failures; Young's and Daly's
    intervals stand beside it. JSON is `keepstep.interval/1`.
    """
    advice = compute(None if run is None else find_run(run), flags)
    emit(
        advice,
        output,
        table=lambda console, wide: render(advice, console, wide=wide),
        name=lambda a: f"{a.advised_s:g}",
    )


def compute(run_dir: Path | None, flags: dict[str, Any]) -> IntervalAdvice:
    """The advice for what flags and run say. Raises ConfigError naming the flag that is missing, NotFoundError, StorageError."""
    if flags["nodes"] and flags["gpus"]:
        raise ConfigError(f"--nodes {flags['nodes']} and --gpus {flags['gpus']}: give one of them")
    if flags["min_s"] > flags["max_s"]:
        raise ConfigError(f"--min {flags['min_s']:g} is above --max {flags['max_s']:g}")
    of_run = {} if run_dir is None else measured(open_run(run_dir))
    values = {**_defaults(), **of_run, **_given(flags)}
    for name, flag in (("block_s", "--delta"), ("nodes", "--nodes or --gpus")):
        if name not in values:
            where = "" if run_dir is None else f": {run_dir} does not say"
            raise ConfigError(f"{flag} is needed{where}; give it, or --run RUN of a run that has saved")
    prior = rate_prior(flags["failure_rate"], flags["sku"], run_dir)
    failures, node_days = values["failures"], values["exposure_node_days"]
    rate = estimate_rate(prior, failures.value, node_days.value, dispersion=flags["dispersion"])
    advice = advise(
        rate,
        values["nodes"].value,
        values["block_s"].value,
        values["persist_lag_s"].value,
        restart_s=values["restart_s"].value,
        min_s=flags["min_s"],
        max_s=flags["max_s"],
    )
    at = (advice.advised_s, advice.block_s, advice.mttf_s, advice.restart_s, advice.persist_lag_s)
    cost = smoothing_cost_points(*at, ramp_s=flags["power_ramp"], stagger_s=flags["stagger"])
    return msgspec.structs.replace(
        advice,
        origins={**{name: v.origin for name, v in values.items()}, "prior": prior.source},
        power_ramp_s=flags["power_ramp"],
        stagger_s=flags["stagger"],
        smoothing_cost_points=cost,
    )


def _defaults() -> dict[str, Value]:
    return {
        "persist_lag_s": Value(0.0, "default: durable when training goes on"),
        "restart_s": Value(0.0, "default: restarts are left out of the goodput; the interval does not depend on them"),
        "failures": Value(0, "default: no history"),
        "exposure_node_days": Value(0.0, "default: no history"),
    }


def _given(flags: dict[str, Any]) -> dict[str, Value]:
    names = {"block_s": "delta", "persist_lag_s": "persist_lag", "restart_s": "restart", "nodes": "nodes"}
    given = {name: Value(flags[flag], GIVEN) for name, flag in names.items() if flags[flag] is not None}
    if flags["gpus"]:
        per_node = flags["gpus_per_node"]
        given["nodes"] = Value(-(-flags["gpus"] // per_node), f"{flags['gpus']} GPUs, {per_node} a node")
    return given


def render(advice: IntervalAdvice, console: Console, *, wide: bool = False) -> None:
    """Draw the advice: the answer first, then inputs, formulas, and how flat the optimum is."""
    from rich.text import Text

    low, high = (format_duration_s(s) for s in advice.optimal_interval_s)
    worst, best = advice.goodput_interval
    bound = {"min": " (held at the lower bound)", "max": " (held at the upper bound)"}.get(advice.bound, "")
    level = f"{100 * advice.rate.level:.0f} %"
    for line in (
        f"train {format_duration_s(advice.advised_s)} between checkpoints{bound}; expected goodput {advice.goodput.exact:.4f}",
        f"{level} interval of the failure rate: optimum from {low} to {high}, goodput from {worst:.4f} to {best:.4f}",
    ):
        console.print(Text(line), soft_wrap=True)
    console.print(_inputs(advice))
    console.print(_formulas(advice, wide=wide))
    console.print(_flatness(advice))
    if advice.power_ramp_s or advice.stagger_s:
        what = [f"power ramp over {advice.power_ramp_s:g} s"] if advice.power_ramp_s else []
        what += [f"writes staggered over {advice.stagger_s:g} s"] if advice.stagger_s else []
        text = f"\n{', '.join(what)}: costs {advice.smoothing_cost_points:.2f} points of goodput"
        console.print(Text(text), soft_wrap=True)


def _table(title: str, *columns: str, left: int = 1) -> Table:
    from rich.table import Table

    table = Table(title=f"\n{title}", title_justify="left", box=None, pad_edge=False, padding=(0, 2, 0, 0))
    for index, column in enumerate(columns):
        table.add_column(column, justify="left" if index < left else "right", overflow="fold")
    return table


def _inputs(advice: IntervalAdvice) -> Table:
    rate, origins = advice.rate, advice.origins
    table = _table("inputs", "", "value", "from", left=3)
    for label, value, origin in (
        ("d, blocking time of a save", format_duration_s(advice.block_s), origins["block_s"]),
        ("P, durable after", format_duration_s(advice.persist_lag_s), origins["persist_lag_s"]),
        ("R, restart", format_duration_s(advice.restart_s), origins["restart_s"]),
        ("nodes", str(advice.nodes), origins["nodes"]),
        ("failures seen", f"{rate.failures:g} in {rate.exposure_node_days:.3g} node-days", origins["failures"]),
        ("prior", f"{1000 * rate.prior.rate_per_node_day:.3g} per 1000 node-days", origins["prior"]),
        ("dispersion", f"{rate.dispersion:g}", "variance over mean of failure counts"),
        (
            "failure rate",
            f"{1000 * rate.rate_per_node_day:.3g} ({1000 * rate.low:.2g} to {1000 * rate.high:.3g})",
            "failures alone; they contradict the prior" if rate.prior_set_aside else "prior and failures",
        ),
        ("M, time to failure", format_duration_s(advice.mttf_s), "nodes times rate"),
        ("bounds", f"{format_duration_s(advice.min_s)} to {format_duration_s(advice.max_s)}", "--min, --max, 4 d"),
    ):
        table.add_row(label, value, origin)
    return table


def _formulas(advice: IntervalAdvice, *, wide: bool) -> Table:
    columns = ["interval by", "formula", "length", "goodput", "restart immune", "first order", "Meta"]
    table = _table(
        "formulas (goodput: exact, at that interval; the columns after it are cross-checks)", *columns, left=2
    )
    for name, tau_s in msgspec.structs.asdict(advice.interval_s).items():
        forms = advice.goodput_at[name]
        shown = (forms.exact, forms.exact_restart_immune, forms.first_order, forms.meta)
        digits = 6 if wide else 4
        cells = [f"{value:.{digits}f}" for value in shown]
        table.add_row(name.replace("_", " "), FORMULAS[name], format_duration_s(tau_s), *cells)
    return table


def _flatness(advice: IntervalAdvice) -> Table:
    table = _table("how flat the optimum is", "interval", "length", "costs", left=1)
    for row in advice.flatness:
        table.add_row(f"{row.factor:g} x optimal", format_duration_s(row.interval_s), f"{row.cost_points:.2f} points")
    return table
