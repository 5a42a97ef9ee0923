"""How often the nodes of a fleet interrupt jobs: by GPU model and class, lately and before, with and without lemon nodes."""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence

import msgspec

from keepstep.goodput.bursts import (
    DAY_NS,
    Burst,
    Dispersion,
    Exposure,
    Failure,
    Lemon,
    bursts,
    dispersion_of,
    lemons,
)
from keepstep.goodput.rates import (
    PRIOR_SHAPE,
    Prior,
    PriorEntry,
    PriorFile,
    RateEstimate,
    estimate_rate,
    published_prior,
)
from keepstep.records.codec import rfc3339

ALL = "all"
"""Class of the rows that count every failure."""
JEFFREYS = Prior(shape=PRIOR_SHAPE, node_days=0.0, source="Jeffreys: no rate is published for this class alone")
RECENT_DAYS = (7, 30)
RECENT_ENOUGH = 20
"""The recent rate is that of the fewest days of RECENT_DAYS that have so many incidents, else of the most."""


class RateRow(msgspec.Struct, frozen=True, kw_only=True):
    """Failures per 1000 node-days with a `level` interval of the Gamma posterior. `failures` counts incidents."""

    sku: str
    fault_class: str = msgspec.field(name="class")
    failures: int
    node_days: float
    per_1000_node_days: float
    low: float
    high: float
    level: float
    dispersion: float
    shape: float
    """Of the posterior: as if so many failures had been seen."""
    prior: Prior
    prior_set_aside: bool = False


class BurstRow(msgspec.Struct, frozen=True, kw_only=True):
    """Several failures that count as one incident."""

    time: str
    failures: int
    nodes: list[str]
    runs: list[str]
    fault_class: str = msgspec.field(name="class")


class FleetRates(msgspec.Struct, frozen=True, kw_only=True):
    """`keepstep.fleet_rates/1`. Rates count incidents on the node time of active nodes, restarts included."""

    schema: str = "keepstep.fleet_rates/1"
    since: str
    until: str
    failures: int
    """As recorded."""
    incidents: int
    """After failures that belong together became one."""
    node_days: float
    nodes: int
    dispersion: Dispersion
    rates: list[RateRow]
    """Over the whole window: for each GPU model all classes first, then each class that was seen."""
    recent_days: int
    recent: list[RateRow]
    """All classes over the last `recent_days` days; the time before them is the prior where there is any, with at most their
    weight."""
    lemons: list[Lemon]
    without_lemons: list[RateRow]
    """All classes, without the failures and the time of lemon nodes; empty without lemons."""
    bursts: list[BurstRow]


def fleet_rates(
    failures: Iterable[Failure], exposures: Iterable[Exposure], begin_ns: int, end_ns: int, *, level: float = 0.9
) -> FleetRates:
    """Rates of a fleet in the window [begin_ns, end_ns); what lies outside does not count."""
    spans = clipped(exposures, begin_ns, end_ns)
    inside = [f for f in failures if begin_ns <= f.t_ns < end_ns]
    found = bursts(inside)
    dispersion = dispersion_of([b.first.t_ns for b in found], spans, begin_ns, end_ns)
    skus = sorted({span.sku for span in spans})
    days = _days_by_node(spans)
    sku_of_node = {span.node: span.sku for span in spans}
    sour = lemons(found, days, sku_of_node)
    bad = {lemon.node for lemon in sour}
    recent_days = _recent_days(found, end_ns)
    return FleetRates(
        since=rfc3339(begin_ns),
        until=rfc3339(end_ns),
        failures=len(inside),
        incidents=len(found),
        node_days=math.fsum(days.values()),
        nodes=len(days),
        dispersion=dispersion,
        rates=[row for sku in skus for row in _rows(sku, found, spans, dispersion.value, level)],
        recent_days=recent_days,
        recent=_recent(skus, found, spans, max(begin_ns, end_ns - recent_days * DAY_NS), dispersion.value, level),
        lemons=sour,
        without_lemons=_without(bad, skus, found, spans, dispersion.value, level) if bad else [],
        bursts=[_burst_row(burst) for burst in found if len(burst.failures) > 1],
    )


def prior_of_others(
    failures: Iterable[Failure], exposures: Iterable[Exposure], sku: str, *, without_run: str | None = None
) -> Prior:
    """What the fleet's other runs say about a GPU model, as a prior for one run; the published rate where they say nothing.

    It has the weight of what was seen, divided by the dispersion that was measured.
    """
    spans = [span for span in exposures if span.run_id != without_run]
    found = bursts(f for f in failures if f.run_id != without_run)
    own = [span for span in spans if span.sku == sku]
    if not own:
        return published_prior(sku)
    begin_ns, end_ns = min(s.begin_ns for s in spans), max(s.end_ns for s in spans)
    dispersion = dispersion_of([b.first.t_ns for b in found], spans, begin_ns, end_ns).value
    return _prior(sku, [b for b in found if b.first.sku == sku], _node_days(own), dispersion, "other runs of the fleet")


def prior_file(rates: FleetRates) -> PriorFile:
    """The rates as `keepstep.failure_prior/1`, which --failure-prior of runs takes; counts weigh by the dispersion measured."""
    return PriorFile(
        schema="keepstep.failure_prior/1",
        skus={
            row.sku: PriorEntry(failures=row.failures / row.dispersion, node_days=row.node_days / row.dispersion)
            for row in rates.rates
            if row.fault_class == ALL
        },
    )


def clipped(exposures: Iterable[Exposure], begin_ns: int, end_ns: int) -> list[Exposure]:
    """The parts of exposures that lie in the window."""
    result = []
    for span in exposures:
        low_ns, high_ns = max(span.begin_ns, begin_ns), min(span.end_ns, end_ns)
        if low_ns < high_ns:
            result.append(msgspec.structs.replace(span, begin_ns=low_ns, end_ns=high_ns))
    return result


def _node_days(spans: Iterable[Exposure]) -> float:
    return sum(span.end_ns - span.begin_ns for span in spans) / DAY_NS


def _days_by_node(spans: Sequence[Exposure]) -> dict[str, float]:
    node_ns: dict[str, int] = {}
    for span in spans:
        node_ns[span.node] = node_ns.get(span.node, 0) + span.end_ns - span.begin_ns
    return {node: ns / DAY_NS for node, ns in node_ns.items()}


def _prior(sku: str, found: Sequence[Burst], node_days: float, discount: float, whose: str) -> Prior:
    """A Gamma prior from what was seen, which weighs as much as a `discount`-th of it.

    Half a failure of the published prior stays in it, no failures being no rate of 0, unless what was seen denies that rate.
    """
    known = published_prior(sku)
    aside = estimate_rate(known, len(found), node_days).prior_set_aside
    base = JEFFREYS if aside else known
    also = "" if aside else f", and half a failure at {known.source}"
    return Prior(
        shape=base.shape + len(found) / discount,
        node_days=base.node_days + node_days / discount,
        source=f"{len(found)} failures in {node_days:.6g} node-days of {whose} (1/{discount:.3g} of their weight){also}",
    )


def _row(sku: str, name: str, estimate: RateEstimate) -> RateRow:
    return RateRow(
        sku=sku,
        fault_class=name,
        failures=round(estimate.failures),
        node_days=estimate.exposure_node_days,
        per_1000_node_days=estimate.rate_per_node_day * 1000.0,
        low=estimate.low * 1000.0,
        high=estimate.high * 1000.0,
        level=estimate.level,
        dispersion=estimate.dispersion,
        shape=estimate.shape,
        prior=estimate.prior,
        prior_set_aside=estimate.prior_set_aside,
    )


def _rows(
    sku: str, found: Sequence[Burst], spans: Sequence[Exposure], dispersion: float, level: float
) -> list[RateRow]:
    """All classes, then each class that was seen."""
    node_days = _node_days(s for s in spans if s.sku == sku)
    own = [b for b in found if b.first.sku == sku]
    rows = [
        _row(sku, ALL, estimate_rate(published_prior(sku), len(own), node_days, dispersion=dispersion, level=level))
    ]
    for name in sorted({b.first.fault_class for b in own}):
        count = sum(b.first.fault_class == name for b in own)
        rows.append(_row(sku, name, estimate_rate(JEFFREYS, count, node_days, dispersion=dispersion, level=level)))
    return rows


def _recent_days(found: Sequence[Burst], end_ns: int) -> int:
    least, most = RECENT_DAYS
    for days in range(least, most):
        if sum(b.first.t_ns >= end_ns - days * DAY_NS for b in found) >= RECENT_ENOUGH:
            return days
    return most


def _recent(
    skus: Sequence[str],
    found: Sequence[Burst],
    spans: Sequence[Exposure],
    edge_ns: int,
    dispersion: float,
    level: float,
) -> list[RateRow]:
    """Rates since `edge_ns`, with what the fleet saw before it as the prior.

    Rates change from month to month by more than chance. So the time before weighs at most as much as the recent time: years of
    it would leave nothing of the last week.
    """
    rows = []
    for sku in skus:
        own = [s for s in spans if s.sku == sku]
        before_days = _node_days(clipped(own, min(s.begin_ns for s in own), edge_ns))
        after_days = _node_days(clipped(own, edge_ns, max(s.end_ns for s in own)))
        mine = [b for b in found if b.first.sku == sku]
        old = [b for b in mine if b.first.t_ns < edge_ns]
        if after_days > 0.0:
            prior = published_prior(sku)
            if before_days > 0.0:
                discount = dispersion * max(1.0, before_days / after_days)
                prior = _prior(sku, old, before_days, discount, "the time before")
            estimate = estimate_rate(prior, len(mine) - len(old), after_days, dispersion=dispersion, level=level)
            rows.append(_row(sku, ALL, estimate))
    return rows


def _without(
    bad: set[str],
    skus: Sequence[str],
    found: Sequence[Burst],
    spans: Sequence[Exposure],
    dispersion: float,
    level: float,
) -> list[RateRow]:
    """Rates of the other nodes. An incident that took other nodes along stays."""
    kept = [b for b in found if not b.nodes or not set(b.nodes) <= bad]
    rest = [s for s in spans if s.node not in bad]
    return [_rows(sku, kept, rest, dispersion, level)[0] for sku in skus if any(s.sku == sku for s in rest)]


def _burst_row(burst: Burst) -> BurstRow:
    return BurstRow(
        time=rfc3339(burst.first.t_ns),
        failures=len(burst.failures),
        nodes=burst.nodes,
        runs=sorted({f.run_id for f in burst.failures}),
        fault_class=burst.first.fault_class,
    )
