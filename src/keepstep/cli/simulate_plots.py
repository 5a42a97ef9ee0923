"""Pictures of simulated campaigns: one campaign's goodput and ledger, or how goodput goes along a sweep."""

from __future__ import annotations

import contextlib
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from keepstep.cli.plots import new_figure, save
from keepstep.planner.scenario import DAY_S

if TYPE_CHECKING:
    from keepstep.planner.sim.campaign import Campaign
    from keepstep.planner.sim.model import Floats

BLUE, ORANGE = "#3b6ea5", "#d9822b"


def draw_campaign(path: Path, campaign: Campaign, goodput: Floats) -> None:
    """How goodput spreads over runs, and what the rest of the time went into. Raises StorageError when it cannot be written."""
    figure = new_figure(10, 4)
    left, right = figure.subplots(1, 2)
    left.hist(goodput, bins=min(40, max(5, len(goodput) // 10)), color=BLUE)
    for value, style in ((campaign.goodput.p5, ":"), (campaign.goodput.mean, "-"), (campaign.goodput.p95, ":")):
        left.axvline(value, color=ORANGE, linestyle=style)
    left.set_xlabel("goodput of a run (lines: p5, mean, p95)")
    left.set_ylabel("runs")
    left.set_title(f"goodput {campaign.goodput.mean:.4f}, {campaign.runs} runs of {campaign.days:g} days")
    lost = {name: s for name, s in campaign.ledger_s.items() if name != "productive" and s > 0.0}
    shares = [100.0 * seconds / (campaign.days * DAY_S) for seconds in lost.values()]
    bars = right.barh([name.replace("_", " ") for name in lost], shares, color=BLUE)
    right.bar_label(bars, fmt="%.2f", padding=3)
    right.margins(x=0.12)
    right.invert_yaxis()
    right.set_xlabel("% of the time")
    right.set_title("what the rest went into")
    save(figure, path)


def draw_sweep(path: Path, campaigns: Sequence[Campaign]) -> None:
    """Goodput along the first key with p5 to p95, a line for each combination of the others. Raises StorageError."""
    figure = new_figure(8, 4.5)
    axes = figure.subplots()
    first, *others = campaigns[0].at
    lines: dict[str, list[Campaign]] = {}
    for campaign in campaigns:
        label = ", ".join(f"{key} {campaign.at[key]}" for key in others)
        lines.setdefault(label, []).append(campaign)
    for label, line in lines.items():
        places = _places([c.at[first] for c in line])
        drawn = axes.plot(places, [c.goodput.mean for c in line], marker="o", label=label)
        low, high = [c.goodput.p5 for c in line], [c.goodput.p95 for c in line]
        axes.fill_between(places, low, high, alpha=0.2, color=drawn[0].get_color(), linewidth=0)
    axes.set_xlabel(first)
    axes.set_ylabel("goodput (mean, p5 to p95)")
    if others:
        axes.legend()
    save(figure, path)


def _places(values: list[str]) -> list[Any]:
    """Where on the axis: numbers where all are, else one after the other by name."""
    with contextlib.suppress(ValueError):
        return [float(value) for value in values]
    return values
