"""What all pictures share, and the tornado of a plan: PNG or SVG by the file's name. matplotlib is imported when one is drawn."""

from __future__ import annotations

import importlib.util
from pathlib import Path
from typing import Any

from keepstep.planner.plan import Plan
from keepstep.records.errors import ConfigError, StorageError

SUFFIXES = (".png", ".svg")


def plot_path(value: str | None) -> Path | None:
    """What --plot names, checked before anything is computed: its suffix, its folder, matplotlib. Raises ConfigError."""
    if value is None:
        return None
    path = Path(value)
    if path.suffix.lower() not in SUFFIXES:
        raise ConfigError(f"--plot {value}: the name must end with {' or '.join(SUFFIXES)}")
    if importlib.util.find_spec("matplotlib") is None:
        raise ConfigError("--plot needs matplotlib, which is not installed: pip install 'keepstep[plots]'")
    if not path.parent.is_dir():
        raise ConfigError(f"--plot {value}: there is no folder {path.parent}")
    return path


def new_figure(width: float, height: float) -> Any:
    """An empty figure of so many inches."""
    from matplotlib.figure import Figure

    return Figure(figsize=(width, height), layout="constrained")


def save(figure: Any, path: Path) -> None:
    """Write it. Raises StorageError."""
    try:
        figure.savefig(path, dpi=150)
    except OSError as error:
        raise StorageError(f"--plot {path}: {error.strerror or error}") from error


def tornado(plan: Plan, path: Path) -> None:
    """The sensitivities of a plan, largest on top. Raises StorageError when it cannot be written."""
    rows = list(reversed(plan.sensitivity))
    base = plan.goodput.exact
    figure = new_figure(9.0, 1.6 + 0.45 * len(rows))
    axes = figure.subplots()
    for index, row in enumerate(rows):
        ends = [(row.low, row.goodput_low, "tab:blue"), (row.high, row.goodput_high, "tab:orange")]
        # Both ends of an interval are on one side: the longer bar first, and one label for both.
        same_side = (row.goodput_low - base) * (row.goodput_high - base) > 0.0
        ends.sort(key=lambda end: -abs(end[1] - base))
        for place, (value, end, colour) in enumerate(ends):
            axes.barh(index, end - base, left=base, color=colour)
            if same_side and place:
                continue
            axes.annotate(
                f"{row.low:.4g} or {row.high:.4g}" if same_side else f"{value:.4g}",
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
    save(figure, path)
