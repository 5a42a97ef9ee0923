"""Slow ranks: one that is slow itself, one that others wait for, and slowness that moves about or is everywhere.

The rank that waits least is the one that the others wait for. A slowest rank that changes from step to step has no place: what
makes it slow is shared. Numbers that are missing or NaN say nothing, neither for nor against a rank.
"""

from __future__ import annotations

import math
import re
import statistics
from collections import Counter
from collections.abc import Mapping, Sequence
from typing import Any

from keepstep.attribution.rules.deriving import derive
from keepstep.attribution.rules.peers import (
    LEAST_PEERS,
    LEAST_POINTS,
    Sense,
    Standing,
    always,
    finite,
    outliers,
    rotates,
    worst_by_point,
)
from keepstep.catalog.load import Catalog
from keepstep.records.event import Event, Gpu

SLOW_RATIO = 1.1
"""Ten percent above the median of the peers; a healthy fleet varies by two or three."""
CLEAR_RATIO = 1.5
"""From this on two samples are enough: dlrover calls twice the median in two rounds a straggler."""
SCORE_LIMIT = 0.75
"""NVRx's own limit, for scores of which 1 is as fast as the fastest."""
WAIT_RATIO = 2.0
"""The one that is waited for waits less than half as long as the others."""
MORE_SAMPLES = 3
"""Times the peers' number of samples."""
DRIFT_RATIO = 1.3
"""All slower than they were by this: something that they share."""

_LOCAL = re.compile(r"h2d|d2h|pcie|memcpy|hbm|dram|host.?to|device.?to", re.IGNORECASE)
"""Bandwidths inside one machine."""
_WORSE: Mapping[str, Sense] = {
    "compute": "more",
    "host": "more",
    "step": "more",
    "wait": "less",
    "score": "less",
    "throughput": "less",
    "bandwidth": "less",
}


def stragglers(events: Sequence[Event], catalog: Catalog) -> list[Event]:
    """What series of measurements, and reports of who was slowest, say together."""
    found: list[Event] = []
    series = [e for e in events if e.signature == "straggler.series"]
    for event in series:
        found += _of_series(event, catalog)
    for event in events:
        if event.signature == "straggler.slowest":
            found += _of_slowest(event, catalog)
    found = _one_each(_agreed(found, catalog))
    if any(e.signature == "derived.straggler.rotating" for e in found):
        # Where the slowest one changes, whoever it was in one sample is no finding.
        found = [e for e in found if e.signature not in _PLACED]
    return found


_PLACED = frozenset(
    {"derived.straggler.constant", "derived.straggler.once", "derived.straggler.waits_least", "derived.straggler.host"}
)


def _agreed(found: Sequence[Event], catalog: Catalog) -> list[Event]:
    """What several series say of one place is more than a single sample: it is taken for lasting."""
    places = Counter((e.node, e.rank, e.gpu) for e in found if e.signature == "derived.straggler.once")
    return [
        derive(catalog, "derived.straggler.constant", e, attrs=e.attrs)
        if e.signature == "derived.straggler.once" and places[e.node, e.rank, e.gpu] > 1
        else e
        for e in found
    ]


def _one_each(found: Sequence[Event]) -> list[Event]:
    """The first event of each entry at each place."""
    kept: dict[tuple[Any, ...], Event] = {}
    for event in found:
        kept.setdefault((event.signature, event.node, event.rank, event.gpu), event)
    return list(kept.values())


def _of_series(event: Event, catalog: Catalog) -> list[Event]:
    kind = str(event.attrs.get("kind"))
    raw = event.attrs.get("values")
    if kind not in _WORSE or not isinstance(raw, dict) or event.attrs.get("by") == "pair":
        return []
    values = {str(name): finite(points) for name, points in raw.items() if isinstance(points, list)}
    measured = {name: points for name, points in values.items() if points}
    if not measured:
        return [derive(catalog, "derived.straggler.no_scores", event, placed=False)] if raw else []
    worst = worst_by_point(measured, _WORSE[kind], WAIT_RATIO if kind == "wait" else SLOW_RATIO)
    if rotates(worst):
        return [derive(catalog, "derived.straggler.rotating", event, attrs={"worst": worst[-20:]}, placed=False)]
    medians = {name: statistics.median(points) for name, points in measured.items()}
    usual = statistics.median(len(points) for points in measured.values())
    # Who has far more samples than its peers does, or reports, what they do not, and is no peer of theirs.
    bad = [one for one in _bad(kind, medians) if len(measured[one.name]) <= MORE_SAMPLES * usual]
    if not bad:
        return _drift(event, kind, measured, catalog)
    constant = always(worst)
    found = []
    for one in bad[:8]:
        points = len(measured[one.name])
        lasting = constant == one.name or points >= LEAST_POINTS or (points > 1 and one.ratio >= CLEAR_RATIO)
        signature = _signature(kind, lasting, str(event.attrs.get("by")), str(event.attrs.get("metric")))
        attrs = {
            "metric": event.attrs.get("metric"),
            "value": one.value,
            "peers": one.peers,
            "ratio": round(one.ratio, 3),
        }
        found.append(_placed(catalog, signature, event, one.name, attrs))
    return found


def _bad(kind: str, medians: Mapping[str, float]) -> list[Standing]:
    """Those far worse than their peers."""
    if kind == "score":
        # Scores are relative already: 1 is the fastest, or the own past.
        return [s for s in outliers(medians, "less", 1 / 0.9) if s.value < SCORE_LIMIT]
    if kind == "wait":
        bad = outliers(medians, "less", WAIT_RATIO)
        rest = [v for v in medians.values() if math.isfinite(v)]
        # Nobody waits where waits are all short; zero waits least of all.
        zero = [n for n, v in medians.items() if v == 0]
        if len(zero) == 1 and len(rest) >= LEAST_PEERS and statistics.median(rest) > 0:
            return [Standing(zero[0], 0.0, statistics.median(rest), math.inf)]
        return bad
    ratio = {"bandwidth": 1.25, "throughput": SLOW_RATIO}.get(kind, SLOW_RATIO)
    return outliers(medians, _WORSE[kind], ratio)


def _signature(kind: str, lasting: bool, by: str, metric: str) -> str:
    if kind == "wait":
        return "derived.straggler.waits_least"
    if kind == "host":
        return "derived.straggler.host"
    if kind == "bandwidth":
        inside = by in ("gpu", "rank") or _LOCAL.search(metric) is not None
        return "derived.gpu.bandwidth_low" if inside else "derived.node.bandwidth_low"
    return "derived.straggler.constant" if lasting else "derived.straggler.once"


def _placed(catalog: Catalog, signature: str, event: Event, name: str, attrs: Mapping[str, Any]) -> Event:
    """An event about one entity of a series."""
    by = event.attrs.get("by")
    nodes = event.attrs.get("nodes")
    node = str(nodes[name]) if isinstance(nodes, dict) and name in nodes else None
    rank = gpu = None
    if by == "rank" and name.isascii() and name.isdigit() and len(name) < 8:
        rank = int(name)
    elif by == "gpu":
        index = name.rpartition("/")[2]
        gpu = (
            Gpu(index=int(index))
            if index.isascii() and index.isdigit() and len(index) < 5
            else Gpu(uuid=index)
            if index.startswith("GPU-")
            else None
        )
    elif by == "node":
        node = name
    nic = name if by == "nic" else None
    return derive(catalog, signature, event, attrs=attrs, node=node, rank=rank, gpu=gpu, nic=nic)


def _drift(event: Event, kind: str, measured: Mapping[str, Sequence[float]], catalog: Catalog) -> list[Event]:
    """All became slower together, from the first half of the points to the second."""
    if kind not in ("step", "compute", "throughput", "host") or len(measured) < LEAST_PEERS:
        return []
    # Few points need a clearer change than many.
    least = CLEAR_RATIO if min(len(points) for points in measured.values()) < 4 else DRIFT_RATIO
    ratios = []
    for points in measured.values():
        half = len(points) // 2
        if half < 1:
            return []
        before, after = statistics.median(points[:half]), statistics.median(points[-half:])
        if before <= 0 or after <= 0:
            return []
        ratios.append(before / after if _WORSE[kind] == "less" else after / before)
    if min(ratios) < least:
        return []
    return [
        derive(
            catalog,
            "derived.straggler.all_data_slow" if kind == "host" else "derived.straggler.all_slow",
            event,
            attrs={"ratio": round(statistics.median(ratios), 2)},
            placed=False,
        )
    ]


def _of_slowest(event: Event, catalog: Catalog) -> list[Event]:
    """From who was slowest in each report."""
    slowest = [str(s) for s in event.attrs.get("slowest") or () if re.search(r"\d", str(s))]
    if rotates(slowest):
        return [derive(catalog, "derived.straggler.rotating", event, attrs={"worst": slowest[-20:]}, placed=False)]
    one = always(slowest)
    if one is None:
        return []
    attrs = {"share": round(slowest.count(one) / len(slowest), 2), "reports": len(slowest)}
    rank = int(one) if one.isascii() and one.isdigit() and len(one) < 8 else None
    node = None if rank is not None else one
    return [derive(catalog, "derived.straggler.constant", event, attrs=attrs, rank=rank, node=node)]
