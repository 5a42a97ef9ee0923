"""A tornado: each input moved alone, what the goodput becomes at both ends, sorted by the swing."""

from __future__ import annotations

from collections.abc import Callable, Iterator

import msgspec

from keepstep.goodput.campaign import RateKnowledge, at_rate
from keepstep.goodput.job import Job, RestartPhases
from keepstep.goodput.renewal import goodput

FACTOR = 2.0
"""Inputs without an interval of their own are halved and doubled."""


class Sensitivity(msgspec.Struct, frozen=True, kw_only=True):
    """One input at a low and a high value, the rest and the interval as planned: exact goodput there, and the swing between."""

    input: str
    low: float
    high: float
    unit: str
    goodput_low: float
    goodput_high: float
    swing_points: float
    swing_usd: float | None


def sensitivities(job: Job, rate: RateKnowledge, usd_per_point: float | None) -> list[Sensitivity]:
    """Largest swing first. The failure rate moves over its 90 % interval, everything else between half and twice its value, at the
    interval as planned. Inputs that are 0 are left out."""
    rows = []
    for name, unit, low, high, make in _inputs(job, rate):
        at_low, at_high = (goodput(_not_waiting(make(value))) for value in (low, high))
        points = 100.0 * abs(at_high - at_low)
        if name == "interval":  # both ends are worse than the middle
            points = 100.0 * (goodput(job) - min(at_low, at_high))
        rows.append(
            Sensitivity(
                input=name,
                low=low,
                high=high,
                unit=unit,
                goodput_low=at_low,
                goodput_high=at_high,
                swing_points=points,
                swing_usd=None if usd_per_point is None else points * usd_per_point,
            )
        )
    return sorted(rows, key=lambda r: -r.swing_points)


def _inputs(job: Job, rate: RateKnowledge) -> Iterator[tuple[str, str, float, float, Callable[[float], Job]]]:
    """Name, unit, low, high, and the job at a value."""
    low, high = 1000.0 * rate.quantile(0.05), 1000.0 * rate.quantile(0.95)
    yield "failure_rate", "per 1000 node-days", low, high, lambda v: at_rate(job, v / 1000.0)
    yield "interval", "s", *_around(job.interval_s), lambda v: msgspec.structs.replace(job, interval_s=v)
    for index, tier in enumerate(job.tiers):
        for field, label in (("block_s", "blocking"), ("persist_lag_s", "persist_lag"), ("load_s", "load")):
            value = getattr(tier, field)
            if value > 0.0:
                name = label if len(job.tiers) == 1 else f"{label} of {tier.name}"
                yield name, "s", *_around(value), lambda v, i=index, f=field: _with_tier(job, i, f, v)  # type: ignore[misc]
    for field in RestartPhases.__struct_fields__:
        value = getattr(job.restart, field)
        if value > 0.0:
            yield f"restart {field.removesuffix('_s')}", "s", *_around(value), lambda v, f=field: _with_phase(job, f, v)  # type: ignore[misc]
    for index, kind in enumerate(job.kinds):
        if kind.detect_s > 0.0:
            name = f"detection of {kind.name}"
            yield name, "s", *_around(kind.detect_s), lambda v, i=index: _with_kind(job, i, v)  # type: ignore[misc]
    if job.straggler_share > 0.0:
        low, high = job.straggler_share / FACTOR, min(0.99, job.straggler_share * FACTOR)
        yield "straggler_share", "", low, high, lambda v: msgspec.structs.replace(job, straggler_share=v)


def _not_waiting(job: Job) -> Job:
    """A save that falls due while one is in flight is left out: no interval is shorter than what a save takes to be durable."""
    lags_s = (tier.persist_lag_s / period for tier, period in zip(job.tiers, job.periods, strict=True))
    return msgspec.structs.replace(job, interval_s=max(job.interval_s, *lags_s))


def _around(value: float) -> tuple[float, float]:
    return value / FACTOR, value * FACTOR


def _with_tier(job: Job, index: int, field: str, value: float) -> Job:
    tier = msgspec.structs.replace(job.tiers[index], **{field: value})
    return msgspec.structs.replace(job, tiers=(*job.tiers[:index], tier, *job.tiers[index + 1 :]))


def _with_phase(job: Job, field: str, value: float) -> Job:
    return msgspec.structs.replace(job, restart=msgspec.structs.replace(job.restart, **{field: value}))


def _with_kind(job: Job, index: int, detect_s: float) -> Job:
    kind = msgspec.structs.replace(job.kinds[index], detect_s=detect_s)
    return msgspec.structs.replace(job, kinds=(*job.kinds[:index], kind, *job.kinds[index + 1 :]))
