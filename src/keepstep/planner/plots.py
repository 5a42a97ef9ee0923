"""Pictures of plans, as PNG or SVG by the file's name. matplotlib is imported when one is drawn."""

from __future__ import annotations

from pathlib import Path

from keepstep.planner.plan import Plan
from keepstep.records.errors import ConfigError

SUFFIXES = (".png", ".svg")


def check_suffix(path: Path) -> None:
    """Raises ConfigError unless the file's name says PNG or SVG."""
    if path.suffix.lower() not in SUFFIXES:
        raise ConfigError(f"--plot {path}: a file that ends with .png or .svg")


def tornado(plan: Plan, path: Path) -> None:
    """The sensitivities of a plan, largest on top. Raises ConfigError for another suffix, OSError when it cannot be written."""
    check_suffix(path)
    from matplotlib.figure import Figure

    rows = list(reversed(plan.sensitivity))
    base = plan.goodput.exact
    figure = Figure(figsize=(9.0, 1.6 + 0.45 * len(rows)), layout="constrained")
    axes = figure.subplots()
    for index, row in enumerate(rows):
        for value, end, colour in ((row.low, row.goodput_low, "tab:blue"), (row.high, row.goodput_high, "tab:orange")):
            axes.barh(index, end - base, left=base, color=colour)
            axes.annotate(
                f"{value:.3g}",
                (end, index),
                xytext=(3 if end >= base else -3, 0),
                textcoords="offset points",
                ha="left" if end >= base else "right",
                va="center",
                fontsize=8,
            )
    axes.axvline(base, color="black", linewidth=0.8)
    axes.set_yticks(range(len(rows)), [f"{r.input.replace('_', ' ')}{f' ({r.unit})' if r.unit else ''}" for r in rows])
    axes.set_xlabel(f"expected goodput; {base:.4f} with the inputs as they are")
    axes.set_title(f"{plan.inputs['gpus']} GPUs: one input moved at a time (blue: low end, orange: high end)")
    axes.margins(x=0.12)
    figure.savefig(path)
