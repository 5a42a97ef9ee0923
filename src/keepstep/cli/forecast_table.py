"""Forecasts of a run beside what became of it, for `keepstep goodput`."""

from __future__ import annotations

import time
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from keepstep.cli.output import format_duration_s, note
from keepstep.goodput.calibration import Calibration
from keepstep.launcher.views.forecasts import calibrations, telling
from keepstep.launcher.views.view import is_led
from keepstep.records.errors import StorageError

if TYPE_CHECKING:
    from rich.console import Console

WORDS = {
    "inside": "within the interval",
    "below": "below the interval",
    "above": "above the interval",
    "too_early": "too early to tell",
    "unknown": "no steps are reported",
}


def forecasts_of(folder: Path) -> list[Calibration]:
    """All forecasts kept of a run, oldest first; a run that is led counts up to now. Raises StorageError."""
    return calibrations(folder, time.time_ns() if is_led(folder) else None)


def telling_of(folder: Path) -> list[Calibration]:
    """The forecast of a run that says most, or none; one that cannot be read is said on stderr and is none."""
    try:
        found = telling(folder, time.time_ns() if is_led(folder) else None)
    except StorageError as error:
        note(f"no forecast is compared: {error}")
        return []
    return [] if found is None else [found]


def render_forecasts(rows: Sequence[Calibration], console: Console) -> None:
    """Two lines each."""
    from rich.text import Text

    for row in rows:
        low, high = row.goodput_interval
        measured = "-" if row.goodput_measured is None else f"{row.goodput_measured:.3f}"
        console.print(
            Text(
                f"\nforecast of {row.made_at} ({row.source}): goodput {row.goodput_forecast:.3f}, {low:.3f} to {high:.3f} over "
                f"{format_duration_s(row.wall_s)}; measured {measured}: {WORDS[row.verdict]}"
            ),
            soft_wrap=True,
        )
        inputs = ", ".join(
            f"{name.removesuffix('_s').replace('_', ' ')} {format_duration_s(assumed)} / {format_duration_s(seen)}"
            for name, (assumed, seen) in row.inputs.items()
        )
        console.print(
            Text(
                f"failures: {row.failures_forecast:.3g} expected, {row.failures_measured} seen (chance of that or farther off "
                f"{row.failures_chance:.2g}); assumed / measured: {inputs}"
            ),
            soft_wrap=True,
        )
