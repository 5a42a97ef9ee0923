"""A forecast that was kept, and what became of it.

The interval of a forecast is computed anew for the time that the run has taken, since a short run scatters more than a long one.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any, Literal

import msgspec

from keepstep.goodput.campaign import RateKnowledge, at_rate, goodput_interval
from keepstep.goodput.job import Job
from keepstep.goodput.renewal import goodput

DAY_S = 86_400.0
FEW = 3.0
"""Below so many expected failures a run says little about a forecast: most of the time it just had none."""


class Forecast(msgspec.Struct, frozen=True, kw_only=True):
    """`keepstep.forecast/1`: what was expected of a run from `made_at` (RFC 3339) on, with all that it was computed from."""

    schema: str = "keepstep.forecast/1"
    made_at: str
    source: str
    """"plan" or "advice"."""
    job: Job
    rate: RateKnowledge
    days: float
    goodput: float
    goodput_interval: tuple[float, float]
    """90 %, over `days`."""
    failures: float
    """Expected interruptions in `days`."""
    inputs: dict[str, Any] = {}


class Happened(msgspec.Struct, frozen=True, kw_only=True):
    """What a run did since a forecast. `wall_s` without queue, start-up and drain, which forecasts leave out."""

    wall_s: float
    productive_s: float | None
    failures: int
    interval_s: float | None = None
    """Median training between saves."""
    block_s: float | None = None
    persist_lag_s: float | None = None
    restart_s: float | None = None


class Calibration(msgspec.Struct, frozen=True, kw_only=True):
    """`keepstep.calibration/1`: one forecast beside what happened; None where a run has not said it."""

    schema: str = "keepstep.calibration/1"
    source: str
    made_at: str
    wall_s: float
    goodput_forecast: float
    goodput_interval: tuple[float, float]
    """90 %, over the time that has passed."""
    goodput_measured: float | None
    verdict: Literal["inside", "below", "above", "too_early", "unknown"]
    """Where the measured goodput lies; too early while fewer than FEW failures were to be expected."""
    failures_forecast: float
    failures_measured: int
    failures_chance: float
    """Probability of a count at least as far from the expected one, on the same side, under the forecast."""
    inputs: dict[str, tuple[float, float | None]]
    """Input -> (assumed, measured), in seconds."""


class Score(msgspec.Struct, frozen=True, kw_only=True):
    """How good the forecasts of many runs were. A calibrated 90 % interval holds nine of ten."""

    forecasts: int
    judged: int
    """Without those that were too early or whose goodput is unknown."""
    inside: int
    below: int
    above: int
    mean_error_points: float | None
    """Measured minus forecast, in hundredths of goodput."""
    failures_forecast: float
    failures_measured: int


def make_forecast(job: Job, rate: RateKnowledge, days: float, *, made_at: str, source: str, **inputs: Any) -> Forecast:
    """The forecast for a job; its rate is replaced by the mean of what is known."""
    job = at_rate(job, rate.mean)
    return Forecast(
        made_at=made_at,
        source=source,
        job=job,
        rate=rate,
        days=days,
        goodput=goodput(job),
        goodput_interval=goodput_interval(job, rate, days),
        failures=rate.mean * job.nodes * days,
        inputs=inputs,
    )


def calibrate(forecast: Forecast, happened: Happened) -> Calibration:
    """Compare. A run of no time yet is too early."""
    days = max(happened.wall_s, 1e-9) / DAY_S
    expected = forecast.rate.mean * forecast.job.nodes * days
    interval = goodput_interval(forecast.job, forecast.rate, days)
    measured = None
    if happened.productive_s is not None and happened.wall_s > 0.0:
        measured = happened.productive_s / happened.wall_s
    verdict: Literal["inside", "below", "above", "too_early", "unknown"]
    if happened.productive_s is None:
        verdict = "unknown"
    elif measured is None or (expected < FEW and happened.failures < FEW):
        verdict = "too_early"
    else:
        verdict = "below" if measured < interval[0] else "above" if measured > interval[1] else "inside"
    tier = forecast.job.tiers[0]
    return Calibration(
        source=forecast.source,
        made_at=forecast.made_at,
        wall_s=happened.wall_s,
        goodput_forecast=forecast.goodput,
        goodput_interval=interval,
        goodput_measured=measured,
        verdict=verdict,
        failures_forecast=expected,
        failures_measured=happened.failures,
        failures_chance=count_chance(happened.failures, forecast.rate, forecast.job.nodes * days),
        inputs={
            "interval_s": (forecast.job.interval_s, happened.interval_s),
            "block_s": (tier.block_s, happened.block_s),
            "persist_lag_s": (tier.persist_lag_s, happened.persist_lag_s),
            "restart_s": (forecast.job.mean_restart_s(), happened.restart_s),
        },
    )


def count_chance(failures: int, rate: RateKnowledge, node_days: float) -> float:
    """Probability of at least (above the mean) or at most so many failures in `node_days`, before any was seen.

    Poisson counts with a Gamma rate: a negative binomial distribution.
    """
    share = node_days / (rate.node_days + node_days)
    mean = rate.mean * node_days
    log_term = rate.shape * math.log1p(-share) if share < 1.0 else -math.inf
    below = math.exp(log_term)
    at_most = below
    for k in range(1, failures + 1):
        below = at_most
        log_term += math.log(share * (rate.shape + k - 1.0) / k) if share > 0.0 else -math.inf
        at_most += math.exp(log_term)
    if failures > mean:
        return min(1.0, max(0.0, 1.0 - below)) if failures else 1.0
    return min(1.0, at_most)


def score(rows: Sequence[Calibration]) -> Score:
    """Over the forecasts of many runs."""
    judged = [row for row in rows if row.verdict in ("inside", "below", "above")]
    errors = [row.goodput_measured - row.goodput_forecast for row in judged if row.goodput_measured is not None]
    return Score(
        forecasts=len(rows),
        judged=len(judged),
        inside=sum(row.verdict == "inside" for row in judged),
        below=sum(row.verdict == "below" for row in judged),
        above=sum(row.verdict == "above" for row in judged),
        mean_error_points=100.0 * math.fsum(errors) / len(errors) if errors else None,
        failures_forecast=math.fsum(row.failures_forecast for row in rows),
        failures_measured=sum(row.failures_measured for row in rows),
    )
