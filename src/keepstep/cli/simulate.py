"""`keepstep simulate`: thousands of runs of a training campaign, and where their time, their nodes and their money went."""

from __future__ import annotations

import contextlib
import functools
import importlib.util
import time
from collections.abc import Callable, Iterator, Sequence
from typing import TYPE_CHECKING, Any

import click
import msgspec
from click.core import ParameterSource

from keepstep.cli.model_flags import job_options
from keepstep.cli.output import emit, format_duration_s, format_share, make_console, note, output_option
from keepstep.cli.plots import plot_path
from keepstep.cli.simulate_flags import scenario_from_flags, scenario_options
from keepstep.planner.scenario import DAY_S, Scenario
from keepstep.records.errors import ConfigError

if TYPE_CHECKING:
    from rich.console import Console
    from rich.table import Table

    from keepstep.planner.sim.campaign import Campaign, Results

SLOW_S = 5.0
"""From here on it is worth saying how to be faster."""


@click.command("simulate")
@job_options
@scenario_options
@click.option("--runs", type=click.IntRange(1), default=1000, show_default=True, help="Campaigns to simulate.")
@click.option("--seed", type=click.IntRange(0), default=0, show_default=True, help="The same seed gives the same runs.")
@click.option("--engine", type=click.Choice(["auto", "numpy", "numba"]), default="auto", show_default=True)
@click.option("--jobs", type=click.IntRange(1), help="Cores to use; all that help if not given.")
@click.option(
    "--sweep",
    "sweeps",
    multiple=True,
    metavar="KEY=A,B,...",
    help="One campaign for each value: a flag without its dashes, or a key such as repair.sigma; repeatable, all combinations.",
)
@click.option("--plot", metavar="FILE", help="Draw a PNG or SVG.")
@output_option
@click.pass_context
def simulate(ctx: click.Context, /, output: str, **flags: Any) -> None:
    """Simulate a training campaign many times and say what to expect of it.

    Failures of nodes, hangs, bursts, repairs, spares that run out, saves to several tiers: event by event, with every second of a
    run in one bucket. JSON is `keepstep.simulation/1`, of a sweep a list of them. With the same seed, differences between two
    scenarios are those of the scenarios.
    """
    begin = time.perf_counter()
    plot = plot_path(flags["plot"])
    scenarios = _scenarios(ctx, flags)
    from keepstep.planner.sim.campaign import pick_engine, simulate_runs, sum_up, with_price
    from keepstep.planner.sim.tape import expected_events

    events = flags["runs"] * sum(expected_events(scenario) for _, scenario in scenarios)
    engine = pick_engine(flags["engine"], events=events)
    campaigns: list[Campaign] = []
    results: list[Results] = []
    with _progress(len(scenarios) * flags["runs"]) as advance:
        for at, scenario in scenarios:
            started, done = time.perf_counter(), len(campaigns) * flags["runs"]
            result = simulate_runs(
                scenario, flags["runs"], flags["seed"], engine, flags["jobs"], functools.partial(advance, done)
            )
            wall_s = time.perf_counter() - started
            campaign = sum_up(scenario, result, engine=engine, seed=flags["seed"], wall_s=wall_s)
            if flags["price"] is not None:
                campaign = with_price(campaign, flags["price"])
            campaigns.append(msgspec.structs.replace(campaign, at=at))
            results.append(result)
    if plot is not None:
        from keepstep.cli.simulate_plots import draw_campaign, draw_sweep

        if flags["sweeps"]:
            draw_sweep(plot, campaigns)
        else:
            draw_campaign(plot, campaigns[0], results[0].goodput(scenarios[0][1]))
    swept = bool(flags["sweeps"])
    emit(
        campaigns if swept else campaigns[0],
        output,
        table=lambda console, wide: _render(campaigns, console, swept=swept, wide=wide),
        name=lambda c: f"{c.goodput.mean:.4f}",
    )
    took_s = time.perf_counter() - begin
    if engine == "numpy" and took_s > SLOW_S and importlib.util.find_spec("numba") is None:
        note(f"this took {took_s:.0f} s; pip install 'keepstep[fast]' makes it several times faster")


def _scenarios(ctx: click.Context, flags: dict[str, Any]) -> list[tuple[dict[str, str], Scenario]]:
    """All points of the grid, one without a sweep. A key that is a flag's name is that flag, others are keys of the scenario."""
    from keepstep.planner.sim.sweep import parse_axes, points, set_key

    given = {name for name in flags if ctx.get_parameter_source(name) is ParameterSource.COMMANDLINE}
    by_name = {opt.lstrip("-"): p for p in ctx.command.params for opt in p.opts if not p.multiple}
    for name in ("scenario", "runs", "seed", "engine", "jobs", "plot", "output", "o", "price", "help"):
        by_name.pop(name, None)
    scenarios, said = [], set[str]()
    for at in points(parse_axes(flags["sweeps"])):
        values, keys, set_flags = dict(flags), {}, set(given)
        for key, text in at.items():
            parameter = by_name.get(key)
            if parameter is None or parameter.name is None:
                keys[key] = text
                continue
            try:
                values[parameter.name] = parameter.type_cast_value(ctx, text)
            except click.BadParameter as error:
                raise ConfigError(f"--sweep {key}={text}: {error.message}") from None
            set_flags.add(parameter.name)
        scenario, notes = scenario_from_flags(values, frozenset(set_flags))
        for key, text in keys.items():
            scenario = set_key(scenario, key, text)
        said.update({} if "spares" in keys else notes)
        scenarios.append((at, scenario))
    for text in sorted(said):
        note(text)
    return scenarios


@contextlib.contextmanager
def _progress(total: int) -> Iterator[Callable[[int, int], None]]:
    """A bar on standard error where that is a terminal; a function that does nothing elsewhere."""
    console = make_console(stderr=True)
    if not console.is_terminal:
        yield lambda before, done: None
        return
    from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn

    columns = (TextColumn("simulating"), BarColumn(), MofNCompleteColumn(), TimeRemainingColumn())
    with Progress(*columns, console=console, transient=True) as bar:
        task = bar.add_task("runs", total=total)
        yield lambda before, done: bar.update(task, completed=before + done)


# ---- tables


def _render(campaigns: Sequence[Campaign], console: Console, *, swept: bool, wide: bool) -> None:
    if swept:
        console.print(_sweep_table(campaigns, wide=wide))
        return
    from rich.text import Text

    c = campaigns[0]
    for line in (
        f"goodput {c.goodput.mean:.4f} (90 % of runs: {c.goodput.p5:.4f} to {c.goodput.p95:.4f}; "
        f"standard error {c.goodput.standard_error:.5f}), per paid node {c.paid.mean:.4f}",
        f"{c.gpus} GPUs on {c.nodes} nodes with {c.spares} spares, {c.days:g} days, a save every "
        f"{format_duration_s(c.interval_s)}; {c.runs} runs, seed {c.seed}, {c.engine}, {c.runs_per_s:.0f} runs/s",
    ):
        console.print(Text(line), soft_wrap=True)
    console.print(_ledger_table(c))
    console.print(_failure_table(c))
    console.print(_spare_table(c))


def _ledger_table(c: Campaign) -> Table:
    table = _table("where the time goes, mean of a run", "", "share", "time", *(["cost"] if c.money else []))
    for name, seconds in c.ledger_s.items():
        if seconds == 0.0:
            continue
        cells = [name.replace("_", " "), format_share(seconds, c.days * DAY_S), format_duration_s(seconds)]
        if c.money:
            cost = seconds / 3600.0 * c.gpus * c.money.price_per_gpu_hour
            cells.append("" if name == "productive" else f"${cost:,.0f}")
        table.add_row(*cells)
    if c.money:
        table.add_row("all that is lost", "", "", f"${c.money.lost_usd:,.0f}")
        table.add_row("spares", "", "", f"${c.money.spares_usd:,.0f}")
    return table


def _failure_table(c: Campaign) -> Table:
    table = _table("what happens, mean of a run", "", "times")
    low, high = c.interruptions.p5, c.interruptions.p95
    table.add_row("training stops", f"{c.interruptions.mean:.4g} ({low:.0f} to {high:.0f})")
    for name, number in c.failures.items():
        if number:
            table.add_row(f"  {name.replace('_', ' ')}", f"{number:.4g}")
    table.add_row("faults of idle nodes", f"{c.idle_faults:.3g}")
    worst = f"{c.worst_day.mean:.3f} (5 % of runs: below {c.worst_day.p5:.3f})"
    table.add_row("progress of the worst day", worst)
    return table


def _spare_table(c: Campaign) -> Table:
    use = c.spare_use
    table = _table("nodes that are away", "", "nodes")
    table.add_row("mean", f"{use.down_mean:.1f}")
    for label, number in (
        ("p50", use.down_p50),
        ("p95", use.down_p95),
        ("p99", use.down_p99),
        ("p99.9", use.down_p999),
    ):
        table.add_row(label, str(number))
    table.add_row("most", str(use.most_down))
    wait = f"{use.exhausted_events:.3g} times a run, {format_duration_s(use.wait_s)} in all"
    table.add_row("training waits for a node", wait)
    return table


def _sweep_table(campaigns: Sequence[Campaign], *, wide: bool) -> Table:
    keys = list(campaigns[0].at)
    columns = [*keys, "goodput", "p5", "p95", "paid", "stops", "no spare", "worst day"]
    money = campaigns[0].money is not None
    table = _table("", *columns, *(["lost", "spares"] if money else []), left=len(keys))
    digits = 6 if wide else 4
    for c in campaigns:
        cells = [c.at[key] for key in keys]
        figures = (c.goodput.mean, c.goodput.p5, c.goodput.p95, c.paid.mean)
        cells += [f"{figure:.{digits}f}" for figure in figures]
        cells += [f"{c.interruptions.mean:.4g}", format_duration_s(c.spare_use.wait_s), f"{c.worst_day.mean:.3f}"]
        if c.money is not None:
            cells += [f"${c.money.lost_usd:,.0f}", f"${c.money.spares_usd:,.0f}"]
        table.add_row(*cells)
    return table


def _table(title: str, *columns: str, left: int = 1) -> Table:
    from rich.table import Table

    table = Table(
        title=f"\n{title}" if title else None, title_justify="left", box=None, pad_edge=False, padding=(0, 2, 0, 0)
    )
    for index, column in enumerate(columns):
        table.add_column(column, justify="left" if index < left else "right", overflow="fold")
    return table
