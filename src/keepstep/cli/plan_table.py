"""How `keepstep plan` draws a plan: the answer first, then why."""

from __future__ import annotations

from typing import TYPE_CHECKING

import msgspec

from keepstep.cli.output import format_duration_s
from keepstep.planner.plan import Plan

if TYPE_CHECKING:
    from rich.console import Console
    from rich.table import Table

BAR = 28
"""Columns of the longest bar of the tornado."""
SHOWN = 8
"""Recommendations and bars without -o wide."""
FORMULA = {"young": "Young", "daly": "Daly", "daly_higher_order": "Daly, higher order", "optimal": "exact optimum"}


def render(plan: Plan, console: Console, *, wide: bool = False) -> None:
    """Headline, recommendations, losses, spares, formulas, tornado, what one more measurement is worth."""
    from rich.text import Text

    for line in _headline(plan):
        console.print(Text(line), soft_wrap=True)
    console.print(_recommendation(plan, wide=wide))
    console.print(_lost(plan))
    if plan.spares is not None:
        console.print(_spares(plan))
    console.print(_formulas(plan))
    console.print(_tornado(plan, wide=wide))
    for line in _last_lines(plan):
        console.print(Text(line), soft_wrap=True)
    console.print(_inputs(plan, wide=wide))


def _headline(plan: Plan) -> list[str]:
    inputs, expected = plan.inputs, plan.expected
    low, high = expected.goodput_interval
    first, second = plan.optimal_interval_s
    lines = [
        f"{inputs['gpus']} GPUs on {inputs['nodes']} nodes: a failure every {format_duration_s(plan.mttf_s)} "
        f"(90 %: {' to '.join(format_duration_s(s) for s in plan.mttf_interval_s)})",
        f"save every {format_duration_s(plan.used_interval_s)} of training (optimum {format_duration_s(first)} to "
        f"{format_duration_s(second)} over that range); expected goodput {expected.goodput:.4f}, "
        f"90 % of campaigns of {inputs['days']:g} days from {low:.3f} to {high:.3f}",
    ]
    if len(plan.tiers) > 1:
        lines.append("tiers: " + ", ".join(f"{t.name} every {format_duration_s(t.interval_s)}" for t in plan.tiers))
    if expected.usd is not None and expected.lost_usd is not None:
        lines.append(
            f"{expected.gpu_hours:,.0f} GPU-hours, ${expected.usd:,.0f}; lost ${expected.lost_usd:,.0f}; "
            f"a point of goodput is ${expected.usd_per_point:,.0f}"
        )
    largest = "waiting for nodes: too few spares" if plan.dominant == "no_spare" else plan.dominant.replace("_", " ")
    lines.append(f"the largest loss is {largest}")
    return lines


def _table(title: str, *columns: str, left: int = 1) -> Table:
    from rich.table import Table

    table = Table(title=f"\n{title}", title_justify="left", box=None, pad_edge=False, padding=(0, 2, 0, 0))
    for index, column in enumerate(columns):
        table.add_column(column, justify="left" if index < left else "right", overflow="fold")
    return table


def _usd(value: float | None) -> str:
    return "-" if value is None else f"{value:,.0f}"


def _recommendation(plan: Plan, *, wide: bool) -> Table:
    table = _table("what to change, each alone", "change", "now", "to", "why", "points", "dollars", left=4)
    for row in plan.recommendation if wide else plan.recommendation[:SHOWN]:
        table.add_row(row.change, row.now, row.to, row.why, f"{row.gain_points:+.2f}", _usd(row.gain_usd))
    return table


def _lost(plan: Plan) -> Table:
    table = _table("where wall-clock goes", "", "share", "GPU-hours")
    hours = plan.expected.gpu_hours
    rows = [("goodput", plan.goodput.exact), *msgspec.structs.asdict(plan.lost).items()]
    for name, share in rows:
        table.add_row(name.replace("_", " "), f"{100.0 * share:.2f} %", f"{share * hours:,.0f}")
    return table


def _spares(plan: Plan) -> Table:
    spares = plan.spares
    assert spares is not None
    title = (
        f"spares: {spares.mean_down:.3g} nodes in repair on average; p99 {spares.p99} (Poisson {spares.p99_poisson}, "
        f"with the bursts of a public trace {spares.p99_bursts}), p99.9 {spares.p999}"
    )
    table = _table(title, "", "spares", "waits", "goodput", "paid goodput")
    rows = [("best by paid goodput", spares.best)]
    if spares.given is not None:
        rows.append(("given", spares.given))
    if spares.blocks is not None:
        each = spares.blocks
        rows.append((f"best in blocks: {each.spares_per_block} in each of {each.blocks}", each.choice))
    for label, choice in rows:
        cells = (f"{choice.goodput_job:.4f}", f"{choice.goodput_paid:.4f}")
        table.add_row(label, str(choice.spares), f"{100.0 * choice.stall_share:.2f} %", *cells)
    return table


def _formulas(plan: Plan) -> Table:
    table = _table("by formula (cross-checks beside the exact one)", "interval", "length", "goodput", "value", left=1)
    lengths = msgspec.structs.asdict(plan.interval_s).items()
    values = msgspec.structs.asdict(plan.goodput).items()
    for (name, seconds), (form, value) in zip(lengths, values, strict=True):
        table.add_row(FORMULA[name], format_duration_s(seconds), form.replace("_", " "), f"{value:.4f}")
    return table


def _tornado(plan: Plan, *, wide: bool) -> Table:
    table = _table("tornado: goodput when one input moves", "input", "from", "to", "", "swing", "dollars", left=4)
    rows = plan.sensitivity if wide else plan.sensitivity[:SHOWN]
    most = max((row.swing_points for row in rows), default=0.0)
    for row in rows:
        bar = "█" * max(1, round(BAR * row.swing_points / most)) if most > 0.0 else ""
        ends = f"{row.goodput_low:.3f}", f"{row.goodput_high:.3f}"
        unit = f" {row.unit}" if row.unit else ""
        table.add_row(
            row.input.replace("_", " "),
            f"{row.low:.4g}{unit}: {ends[0]}",
            f"{row.high:.4g}: {ends[1]}",
            bar,
            f"{row.swing_points:.2f}",
            _usd(row.swing_usd),
        )
    return table


def _last_lines(plan: Plan) -> list[str]:
    lines = [""]
    cross = plan.crossover
    if cross.restart_exceeds_both_gpus is not None:
        lines.append(
            f"restarts are the largest loss from {cross.restart_is_largest_gpus:,} GPUs on, and cost more than saving and "
            f"rework together from {cross.restart_exceeds_both_gpus:,} on"
        )
    for row in plan.measure:
        usd = "" if row.usd is None else f" (${row.usd:,.0f})"
        lines.append(f"knowing {row.input} exactly is worth {row.points:.2f} points{usd}: {row.why}")
    if plan.goal is not None:
        goal = plan.goal
        ways = [
            ("restart", goal.restart_s, " s"),
            ("blocking", goal.blocking_s, " s"),
            ("failures per 1000 node-days", goal.failures_per_1000_node_days, ""),
        ]
        takes = [f"{name} down to {value:.3g}{unit}" for name, value, unit in ways if value is not None]
        what = " or ".join(takes) if takes else "more than any one input can give"
        lines.append(f"goodput {goal.goodput:g} takes {what}, the others as they are")
    return lines


def _inputs(plan: Plan, *, wide: bool) -> Table:
    table = _table("inputs", "", "value", "from", left=3)
    origins: dict[str, str] = plan.inputs["origins"]
    names = {
        "failure_rate_per_1000_node_days": "failure_rate",
        "delta_s": "delta",
        "persist_lag_s": "persist_lag",
        "restart_s": "restart",
        "mttr_s": "mttr",
        "spares": "spares",
        "straggler_share": "straggler_share",
        "price_usd_per_gpu_hour": "price",
    }
    for name, flag in names.items():
        value = plan.inputs[name]
        if value is not None and (value or wide):
            shown = format_duration_s(value) if name.endswith("_s") else f"{value:.4g}"
            table.add_row(name.replace("_", " ").removesuffix(" s"), shown, origins.get(flag, "default"))
    derived = plan.inputs["derived"]
    if derived is not None:
        for label, text in (
            ("checkpoint", f"{derived['checkpoint_bytes'] / 1e9:,.1f} GB"),
            ("per node", f"{derived['bytes_per_node'] / 1e9:,.2f} GB"),
            (
                "host memory per node",
                f"{derived['host_ram_bytes_per_node'] / 1e9:,.2f} GB, {derived['host_ram_overlapped_bytes_per_node'] / 1e9:,.2f} "
                "GB if saves overlap",
            ),
            (
                "requests",
                f"{derived['put_requests']:,} a save, {derived['put_rate_per_s']:,.0f}/s; one prefix takes "
                f"{derived['put_limit_per_s']:,.0f}/s",
            ),
            ("if training waited for the write", format_duration_s(derived["block_synchronous_s"])),
        ):
            table.add_row(label, text, "derived from --params")
    return table
