"""How far probabilities can be believed: scores, intervals, a fit of two numbers by leaving one out, and the diagram."""

from __future__ import annotations

import itertools
import math
from collections.abc import Sequence
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

Floats = npt.NDArray[np.float64]

BINS = (0.0, 0.5, 0.7, 0.85, 0.95, 1.0)
"""Edges of the bins of confidence: few cases are in each, so that there are few bins."""

TEMPERATURES = np.geomspace(0.5, 4.0, 25)
BIASES = np.linspace(-2.0, 2.0, 17)
PRIOR_LOG_T = 0.5
PRIOR_BIAS = 1.0
"""Standard deviations of what is believed of log(temperature) and bias before any case: near 0."""


class Fit(NamedTuple):
    """Calibration that makes given cases likeliest. `chances`: of every case under the fit on all others."""

    temperature: float
    bias: float
    chances: Floats


class Bin(NamedTuple):
    """Verdicts of one range of confidence: how sure they were, and how many were right."""

    low: float
    high: float
    size: int
    confidence: float
    right: int


def log_chances(sums: Floats, unknown: int, temperature: float, bias: float) -> Floats:
    """Log-probabilities of every class (columns) of every case (rows)."""
    scaled = sums / temperature
    scaled[:, unknown] += bias
    scaled -= scaled.max(axis=1, keepdims=True)
    found: Floats = scaled - np.log(np.exp(scaled).sum(axis=1, keepdims=True))
    return found


def leave_one_out(sums: Floats, truth: Sequence[int], unknown: int) -> Fit:
    """Fit temperature and bias on all cases, and for every case on the others, by search over a grid (maximum a posteriori)."""
    rows = np.arange(len(truth))
    grid = [(t, b) for t in TEMPERATURES for b in BIASES]
    tables = [log_chances(sums, unknown, t, b) for t, b in grid]
    own = np.array([table[rows, list(truth)] for table in tables])
    prior = np.array([-0.5 * ((math.log(t) / PRIOR_LOG_T) ** 2 + (b / PRIOR_BIAS) ** 2) for t, b in grid])
    total = own.sum(axis=1) + prior
    best = int(total.argmax())
    without = (total[:, None] - own).argmax(axis=0)
    chances = np.array([np.exp(tables[without[i]][i]) for i in rows])
    return Fit(float(grid[best][0]), float(grid[best][1]), chances)


def brier(chances: Floats, truth: Sequence[int]) -> Floats:
    """Squared error of the probabilities over all classes, of every case; 0 is perfect, 2 the worst."""
    hot = np.zeros_like(chances)
    hot[np.arange(len(truth)), list(truth)] = 1.0
    found: Floats = ((chances - hot) ** 2).sum(axis=1)
    return found


def log_loss(chances: Floats, truth: Sequence[int]) -> Floats:
    """Minus the log of the probability that the true class got, of every case."""
    found: Floats = -np.log(np.clip(chances[np.arange(len(truth)), list(truth)], 1e-12, 1.0))
    return found


def bootstrap(values: Floats, seed: int, rounds: int = 2000) -> tuple[float, float]:
    """95 % interval of a mean over cases."""
    generator = np.random.default_rng(seed)
    means = generator.choice(values, (rounds, len(values))).mean(axis=1)
    low, high = np.quantile(means, (0.025, 0.975))
    return float(low), float(high)


def wilson(right: float, count: int) -> tuple[float, float]:
    """95 % interval of a share (Wilson 1927), which is honest for few cases and shares near 1."""
    if count == 0:
        return 0.0, 1.0
    z, share = 1.959964, right / count
    middle = (share + z * z / (2 * count)) / (1 + z * z / count)
    half = z / (1 + z * z / count) * math.sqrt(share * (1 - share) / count + z * z / (4 * count * count))
    return max(0.0, middle - half), min(1.0, middle + half)


def binned(confidences: Sequence[float], right: Sequence[bool]) -> list[Bin]:
    """Verdicts by confidence; empty bins are left out."""
    found = []
    for low, high in itertools.pairwise(BINS):
        inside = [i for i, c in enumerate(confidences) if low <= c < high or (high == 1.0 and c == 1.0)]
        if inside:
            mean = sum(confidences[i] for i in inside) / len(inside)
            found.append(Bin(low, high, len(inside), mean, sum(right[i] for i in inside)))
    return found


def diagram(bins: Sequence[Bin], title: str) -> str:
    """Reliability diagram as SVG: confidence to the right, share that was right upwards, with 95 % intervals."""
    size, edge = 360, 44

    def x(value: float) -> float:
        return edge + value * size

    def y(value: float) -> float:
        return edge + (1 - value) * size

    parts = [
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {size + 2 * edge} {size + 2 * edge + 14}" '
        'font-family="sans-serif" font-size="11">',
        f'<text x="{edge}" y="20" font-size="13">{title}</text>',
        f'<rect x="{edge}" y="{edge}" width="{size}" height="{size}" fill="none" stroke="#888"/>',
        f'<line x1="{x(0)}" y1="{y(0)}" x2="{x(1)}" y2="{y(1)}" stroke="#bbb" stroke-dasharray="4 3"/>',
    ]
    for tick in (0.0, 0.25, 0.5, 0.75, 1.0):
        parts.append(f'<text x="{x(tick):.0f}" y="{y(0) + 16:.0f}" text-anchor="middle">{tick:g}</text>')
        parts.append(f'<text x="{x(0) - 6:.0f}" y="{y(tick) + 4:.0f}" text-anchor="end">{tick:g}</text>')
    for one in bins:
        low, high = wilson(one.right, one.size)
        at = x(one.confidence)
        parts.append(f'<line x1="{at:.1f}" y1="{y(low):.1f}" x2="{at:.1f}" y2="{y(high):.1f}" stroke="#36c"/>')
        parts.append(f'<circle cx="{at:.1f}" cy="{y(one.right / one.size):.1f}" r="4" fill="#36c"/>')
        parts.append(f'<text x="{at + 6:.1f}" y="{y(one.right / one.size) + 12:.1f}">{one.right}/{one.size}</text>')
    parts.append(f'<text x="{x(0.5):.0f}" y="{y(0) + 34:.0f}" text-anchor="middle">confidence of the verdict</text>')
    parts.append(
        f'<text x="12" y="{y(0.5):.0f}" transform="rotate(-90 12 {y(0.5):.0f})" text-anchor="middle">share right</text>'
    )
    return "\n".join([*parts, "</svg>"]) + "\n"
