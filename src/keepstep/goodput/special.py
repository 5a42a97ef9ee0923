"""Special functions that the formulas of checkpointing and failure rates need: Lambert's W and the Gamma distribution."""

from __future__ import annotations

import math
from statistics import NormalDist

_SERIES_BELOW = 1e-4
"""Below this distance to the branch point the series is exact to the last digit; Halley's steps lose some there."""
_TINY = 1e-300
_TERMS = 10_000
"""Bound of every iteration; a hundred are usual."""
_NORMAL_ABOVE = 1e5
"""Gamma distributions of a larger shape are taken as Wilson and Hilferty's cube of a normal one: good to 1e-6 there."""


def one_plus_w0(gap: float) -> float:
    """1 + W0((gap - 1) / e) for 0 <= gap <= 1: W0 near its branch point -1/e, where W0 itself has lost its digits.

    Series in p = sqrt(2 gap) (Corless et al., "On the Lambert W function", 1996, section 4) close to the branch point, else
    `lambert_w0`. Raises ValueError outside the range.
    """
    if not 0.0 <= gap <= 1.0:
        raise ValueError(f"one_plus_w0({gap}): needs a number from 0 to 1")
    if gap < _SERIES_BELOW:
        return _branch_series(math.sqrt(2.0 * gap))
    return 1.0 + lambert_w0((gap - 1.0) / math.e)


def lambert_w0(z: float) -> float:
    """Principal branch of Lambert's W: the w >= -1 with w e^w = z, for z >= -1/e.

    Halley's iteration from the branch-point series (z < 0.5) or from log(1 + z). Raises ValueError below -1/e.
    """
    gap = math.e * z + 1.0
    if gap < -1e-15 or not math.isfinite(z):
        raise ValueError(f"lambert_w0({z}): needs a finite number of at least -1/e")
    if gap < _SERIES_BELOW:
        return _branch_series(math.sqrt(2.0 * max(gap, 0.0))) - 1.0
    w = _branch_series(math.sqrt(2.0 * gap)) - 1.0 if z < 0.5 else math.log1p(z)
    if z > math.e:
        w -= math.log(w)
    before = math.inf
    for _ in range(_TERMS):
        e = math.exp(w)
        f = w * e - z
        step = f / (e * (w + 1.0) - (w + 2.0) * f / (2.0 * w + 2.0))
        w -= step
        # Rounding may keep the last digit moving for ever: a step that is no smaller than the one before is such a one.
        if abs(step) <= 4e-16 * max(1.0, abs(w)) or before <= abs(step) < 1e-12:
            break
        before = abs(step)
    return w


def _branch_series(p: float) -> float:
    coefficients = (1.0, -1 / 3, 11 / 72, -43 / 540, 769 / 17280, -221 / 8505, 680863 / 43545600)
    total = 0.0
    for c in reversed(coefficients):
        total = (total + c) * p
    return total


def gamma_cdf(x: float, shape: float) -> float:
    """P(X <= x) for X of a Gamma distribution with `shape` > 0 and scale 1: the regularised lower incomplete gamma function.

    Power series below shape + 1, Legendre's continued fraction (evaluated by Lentz's method) above: Abramowitz and Stegun
    6.5.29 and 6.5.31. Raises ValueError for a shape that is not positive.
    """
    if not shape > 0.0:
        raise ValueError(f"gamma_cdf: shape {shape} is not positive")
    if x <= 0.0:
        return 0.0
    if shape > _NORMAL_ABOVE:
        return NormalDist().cdf(3.0 * math.sqrt(shape) * ((x / shape) ** (1 / 3) - 1.0 + 1.0 / (9.0 * shape)))
    front = math.exp(shape * math.log(x) - x - math.lgamma(shape))
    return front * _lower_series(x, shape) if x < shape + 1.0 else 1.0 - front * _upper_fraction(x, shape)


def _lower_series(x: float, shape: float) -> float:
    term = total = 1.0 / shape
    for n in range(1, _TERMS):
        term *= x / (shape + n)
        total += term
        if term < total * 1e-17:
            break
    return total


def _upper_fraction(x: float, shape: float) -> float:
    b = x + 1.0 - shape
    c, d = 1.0 / _TINY, 1.0 / b
    value = d
    for n in range(1, _TERMS):
        a = -n * (n - shape)
        b += 2.0
        d = 1.0 / (a * d + b or _TINY)
        c = b + a / c or _TINY
        value *= c * d
        if abs(c * d - 1.0) < 1e-16:
            break
    return value


def gamma_quantile(p: float, shape: float) -> float:
    """The x with gamma_cdf(x, shape) = p, for 0 <= p < 1: bisection of a bracket, in the logarithm where x is small.

    Raises ValueError for another p or a shape that is not positive.
    """
    if not 0.0 <= p < 1.0:
        raise ValueError(f"gamma_quantile: p {p} is not in [0, 1)")
    if p == 0.0:
        return 0.0
    if shape > _NORMAL_ABOVE:
        return float(shape * (1.0 - 1.0 / (9.0 * shape) + NormalDist().inv_cdf(p) / (3.0 * math.sqrt(shape))) ** 3)
    high = max(1.0, shape)
    while gamma_cdf(high, shape) < p:
        high *= 2.0
    # The power x^shape / Gamma(shape + 1) is an upper bound of the distribution: its inverse is below the quantile.
    low = max(_TINY, math.exp(max(-690.0, (math.log(p) + math.lgamma(shape + 1.0)) / shape)))
    low = min(low, high)
    while high > low * (1.0 + 1e-14):
        middle = math.sqrt(low * high)
        if not low < middle < high:
            break
        if gamma_cdf(middle, shape) < p:
            low = middle
        else:
            high = middle
    return math.sqrt(low * high)
