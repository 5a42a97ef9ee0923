"""Links and ports: counters that rise, ports that are down or slow where others are not, bandwidth beside that of peers."""

from __future__ import annotations

import re
import statistics
from collections import defaultdict
from collections.abc import Iterable, Sequence
from typing import Any, NamedTuple

from keepstep.attribution.rules.deriving import derive
from keepstep.attribution.rules.jobfacts import FAILING
from keepstep.attribution.rules.peers import finite, outliers
from keepstep.catalog.counters import Counter, counters
from keepstep.catalog.load import Catalog
from keepstep.records.event import Event, Gpu

COMMON_SHARE = 0.5
"""Share of at least COMMON_LEAST links that rise alike, from which on they have something in common."""
COMMON_LEAST = 4
SLOW_RATIO = 1.25
"""A port, pair or machine below 80 % of its peers is slow; a good one varies by a few percent."""
MATRIX_RATIO = 1.4

Key = tuple[str | None, str, str]


class Growth(NamedTuple):
    """A counter of one link between its first and last sample. `exceeded` None: the time between is not known."""

    counter: Counter
    key: Key
    grown: float
    elapsed_s: float | None
    exceeded: bool | None
    last: Event


def links(events: Sequence[Event], catalog: Catalog) -> list[Event]:
    """What counters, port states and bandwidths say together."""
    return [
        *_counters(events, catalog),
        *_ports_down(events, catalog),
        *_rates(events, catalog),
        *_results(events, catalog),
        *_matrices(events, catalog),
    ]


def growths(events: Iterable[Event]) -> list[Growth]:
    """Every counter that was read twice, or as a rate."""
    by_key: dict[tuple[str, Key], list[Event]] = defaultdict(list)
    found: list[Growth] = []
    for event in events:
        if event.signature != "counter.total":
            continue
        counter = counters().get(str(event.attrs.get("counter")))
        value = event.attrs.get("value")
        if counter is None or not isinstance(value, int | float):
            continue
        if event.attrs.get("rate"):
            if counter.per:
                found.append(
                    Growth(counter, key_of(event), float(value), 1.0, counter.exceeded(float(value), 1.0), event)
                )
            continue
        by_key[counter.counter, key_of(event)].append(event)
    for (name, key), readings in by_key.items():
        growth = _grown(counters()[name], key, readings)
        if growth is not None:
            found.append(growth)
    return found


def _grown(counter: Counter, key: Key, readings: Sequence[Event]) -> Growth | None:
    ordered = sorted(readings, key=_when)
    if len(ordered) < 2:
        return None
    first, last = ordered[0], ordered[-1]
    values = [float(e.attrs["value"]) for e in ordered]
    # A counter that went back was cleared in between: only what came after says how much it grew.
    begin = next((i for i in range(len(values) - 1, 0, -1) if values[i] < values[i - 1]), 0)
    if begin == len(values) - 1:
        return None
    grown = values[-1] - values[begin]
    elapsed_s = _elapsed_s(ordered[begin], last) if begin or first is not last else None
    return Growth(counter, key, grown, elapsed_s, counter.exceeded(grown, elapsed_s), last)


def _when(event: Event) -> tuple[int, int, str, int]:
    return (event.time_ns or 0, int(event.attrs.get("sample") or 0), event.evidence.path, event.order)


def _elapsed_s(first: Event, last: Event) -> float | None:
    if first.time_ns is not None and last.time_ns is not None and last.time_ns > first.time_ns:
        return (last.time_ns - first.time_ns) / 1e9
    begin, end = first.attrs.get("elapsed_s"), last.attrs.get("elapsed_s")
    if isinstance(begin, int | float) and isinstance(end, int | float) and end > begin:
        return float(end - begin)
    return None


def key_of(event: Event) -> Key:
    """The link or port that a counter is of."""
    gpu = event.gpu
    device = event.nic or ""
    if gpu is not None:
        device = gpu.pci or gpu.uuid or str(gpu.index)
    return event.node, device, str(event.attrs.get("port") or "")


def _counters(events: Sequence[Event], catalog: Catalog) -> list[Event]:
    """An event for each link whose counter rises above its limit; one for all where they rise alike."""
    by_counter: dict[str, list[Growth]] = defaultdict(list)
    for growth in growths(events):
        by_counter[growth.counter.counter].append(growth)
    found = []
    for name, members in sorted(by_counter.items()):
        bad = [g for g in members if g.exceeded] or _growing_alone(members)
        links_seen = {g.key for g in members}
        if not bad:
            continue
        if len(links_seen) >= COMMON_LEAST and len({g.key for g in bad}) >= COMMON_SHARE * len(links_seen):
            attrs = {"counter": name, "links": len({g.key for g in bad}), "of": len(links_seen)}
            found.append(derive(catalog, "derived.link.common", bad[0].last, attrs=attrs, placed=False))
            continue
        found += [_rising(g, catalog) for g in bad]
    return found


def _growing_alone(members: Sequence[Growth]) -> list[Growth]:
    """Where no time is known: the one link whose counter grew while those of its peers, three at least, stood still."""
    grown = [g for g in members if g.exceeded is None and g.counter.limit is not None and g.grown > 0]
    still = [g for g in members if g.grown == 0]
    return grown if len(grown) == 1 and len(still) >= 3 else []


def _rising(growth: Growth, catalog: Catalog) -> Event:
    family = growth.counter.family
    signature = {
        "memory": "derived.gpu.ecc_rising",
        "pcie": "derived.gpu.pcie_replays",
        "nvlink": "derived.nvlink.rising",
    }.get(family, "derived.link.rising")
    attrs = {
        "counter": growth.counter.counter,
        "grown": growth.grown,
        "elapsed_s": growth.elapsed_s,
        "link": growth.key[2],
        "limit": f"{growth.counter.limit:g} per {growth.counter.per}",
    }
    return derive(catalog, signature, growth.last, attrs=attrs)


def _ports_down(events: Sequence[Event], catalog: Catalog) -> list[Event]:
    """Ports that are down and that something else complains about."""
    down = [e for e in events if e.signature in {"nic.port_down", "nic.port_down_ethernet"} and e.nic]
    found = []
    for port in down:
        name = re.compile(rf"(?<![\w.]){re.escape(str(port.nic))}(?![\w])")
        complaint = next(
            (e for e in events if _complains(e, catalog) and (e.nic == port.nic or name.search(e.evidence.text))), None
        )
        if complaint is not None and (complaint.node is None or port.node is None or complaint.node == port.node):
            explains = [complaint.signature, port.signature]
            found.append(derive(catalog, "derived.nic.port_down_in_use", port, explains=explains))
    return found


def _complains(event: Event, catalog: Catalog) -> bool:
    """Whether an event is a failure of communication, other than a port's state itself."""
    entry = catalog[event.signature]
    if event.signature.startswith("nic.port"):
        return False
    return entry.role in FAILING and (entry.weights.get("fabric", 0.0) > 0 or entry.kind.startswith("collective."))


def _rates(events: Sequence[Event], catalog: Catalog) -> list[Event]:
    """Ports that run slower than the other active ports of their kind."""
    groups: dict[str, dict[str, float]] = defaultdict(dict)
    ports: dict[str, Event] = {}
    for event in events:
        rate = event.attrs.get("rate_gbps")
        if event.signature != "nic.port" or not isinstance(rate, int | float) or event.attrs.get("up") is False:
            continue
        # Bonds and Ethernet ports are of another kind than the ports of the compute fabric.
        kind = f"{str(event.attrs.get('layer', '')).lower()} {re.sub(r'[0-9]+', '', event.nic or '')}"
        name = f"{event.node or ''}/{event.nic}/{event.attrs.get('port')}"
        groups[kind][name] = float(rate)
        ports[name] = event
    found = []
    for rates in groups.values():
        for slow in outliers(rates, "less", SLOW_RATIO):
            attrs = {"gbps": slow.value, "peers_gbps": slow.peers}
            found.append(derive(catalog, "derived.nic.rate_low", ports[slow.name], attrs=attrs))
    return found


def _results(events: Sequence[Event], catalog: Catalog) -> list[Event]:
    """Bandwidth tests of several sets of machines: the machine that is in all slow ones and in no good one."""
    runs: list[tuple[tuple[str, ...], float, Event]] = []
    for event in events:
        if event.signature == "bandwidth.result":
            nodes = tuple(str(n) for n in event.attrs.get("nodes") or ())
            if nodes:
                runs.append((nodes, float(event.attrs.get("gbs") or 0.0), event))
        elif (
            event.signature == "straggler.series"
            and event.attrs.get("kind") == "bandwidth"
            and event.attrs.get("by") == "pair"
        ):
            for pair, points in dict(event.attrs.get("values") or {}).items():
                known = finite(points)
                if known:
                    runs.append((tuple(split_pair(pair)), statistics.fmean(known), event))
    common = common_low(runs)
    if common is None:
        return []
    node, low, good, event = common
    attrs = {"gbs": low, "peers_gbs": good}
    return [derive(catalog, "derived.node.bandwidth_low", event, node=node, attrs=attrs)]


def split_pair(text: str) -> list[str]:
    """The machines of a pair: "a,b", "a<->b", "a - b", "a:b"."""
    return [part for part in re.split(r"\s*(?:,|<?-+>|<->|\s-\s|:|\||/|\+|\s)\s*", text.strip()) if part]


def common_low(runs: Sequence[tuple[tuple[str, ...], float, Event]]) -> tuple[str, float, float, Event] | None:
    """The one machine that all slow runs share and no good run has: (name, slow, good, a slow run)."""
    if len(runs) < 3:
        return None
    good_level = max(gbs for _, gbs, _ in runs)
    low = [r for r in runs if r[1] * SLOW_RATIO <= good_level]
    good = [r for r in runs if r[1] * SLOW_RATIO > good_level]
    if not low or not good:
        return None
    shared = set(low[0][0]).intersection(*(r[0] for r in low[1:])) - {n for r in good for n in r[0]}
    if len(shared) != 1:
        return None
    return shared.pop(), statistics.fmean(r[1] for r in low), statistics.fmean(r[1] for r in good), low[0][2]


def _matrices(events: Sequence[Event], catalog: Catalog) -> list[Event]:
    """A GPU whose row and column of a bandwidth matrix are low."""
    found = []
    for event in events:
        if event.signature != "bandwidth.matrix":
            continue
        means = gpu_means(event.attrs.get("rows"))
        for slow in outliers(means, "less", MATRIX_RATIO):
            attrs = {"gbs": slow.value, "peers_gbs": slow.peers, "test": event.attrs.get("metric")}
            found.append(
                derive(catalog, "derived.gpu.bandwidth_low", event, gpu=Gpu(index=int(slow.name)), attrs=attrs)
            )
    return found


def gpu_means(rows: Any) -> dict[str, float]:
    """Mean bandwidth of each GPU with the others: of its column in a table of one row, of row and column in a square one."""
    if not isinstance(rows, list) or not rows:
        return {}
    if len(rows) == 1:
        return {str(i): v for i, v in enumerate(rows[0]) if isinstance(v, int | float)}
    size = len(rows)
    means = {}
    for at in range(size):
        cells = [rows[at][o] for o in range(size) if o != at and o < len(rows[at])]
        cells += [rows[o][at] for o in range(size) if o != at and at < len(rows[o])]
        known = [c for c in cells if isinstance(c, int | float)]
        if known:
            # The best half: one bad partner lowers a mean, only a bad GPU lowers everything.
            means[str(at)] = statistics.fmean(sorted(known)[len(known) // 2 :])
    return means
