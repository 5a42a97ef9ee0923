"""GPUs beside their peers and beside themselves: clocks, power, temperature, links, corrected errors; memory that nobody owns."""

from __future__ import annotations

import re
from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from keepstep.attribution.rules.deriving import derive
from keepstep.attribution.rules.peers import LEAST_PEERS, outliers
from keepstep.catalog.load import Catalog
from keepstep.records.event import Event

CLOCK_RATIO = 1.15
"""Clocks of GPUs under one load differ by a few percent; voltage of the silicon explains no more than ten."""
LIMIT_RATIO = 1.1
HOT_C = 85.0
HOT_RATIO = 1.1
HOT_ABOVE_PEERS = 12.0
"""Degrees. GPUs at the end of the air flow are up to ten hotter than those at its beginning."""
IDLE_WARM_C, IDLE_ABOVE_PEERS = 60.0, 25.0
"""Degrees. Idle cards lie between 25 and 45, those of one machine within ten of each other."""
IDLE_HOT_C, IDLE_S = 75.0, 300.0
"""A card that is so hot after so many seconds without work, and no cooler than at their beginning, cools no further."""
MANY_CORRECTED = 1000
CORRECTED_RATIO = 50
"""Corrected errors since the driver was loaded: this many, and this many times those of the median GPU."""
RISING_A_SECOND = 1.0
OTHERS = "others"
"""Name of what a text calls "the others": a level of all other GPUs."""
OOM = re.compile(r"cuda_oom|gpu_oom|out_of_memory")

Group = tuple[str | None, str]


def gpu_levels(events: Sequence[Event], catalog: Catalog) -> list[Event]:
    """What samples of GPUs say together."""
    samples = sorted((e for e in events if e.signature == "gpu.sample"), key=_when)
    found = []
    for group in _groups(samples).values():
        found += _slow_clocks(group, catalog)
        found += _odd(group, catalog, "power_limit", "less", LIMIT_RATIO, "derived.gpu.power_limit_odd")
        found += _odd(group, catalog, "pcie_gen", "less", 1.5, "derived.gpu.pcie_odd")
        found += _odd(group, catalog, "pcie_width", "less", 1.5, "derived.gpu.pcie_odd")
        found += _hot(group, catalog) + _hot_idle(group, catalog)
        found += _many_corrected(group, catalog)
    return [*found, *_rising(samples, catalog), *_held_memory(events, catalog), *_host_memory(events, catalog)]


def _when(sample: Event) -> tuple[int, str, int]:
    """The order of samples: by time where they have one, else as they stand in their file."""
    return sample.time_ns or 0, sample.evidence.path, sample.order


def _groups(samples: Iterable[Event]) -> dict[Group, list[Event]]:
    """Samples of GPUs that can be compared: of one product, on all machines that were looked at."""
    groups: dict[Group, list[Event]] = defaultdict(list)
    for sample in samples:
        groups[None, str(_levels(sample).get("product", ""))].append(sample)
    return groups


def _levels(sample: Event) -> Mapping[str, Any]:
    levels = sample.attrs.get("levels")
    return levels if isinstance(levels, dict) else {}


def _value(sample: Event, name: str) -> float | None:
    value = _levels(sample).get(name)
    return float(value) if isinstance(value, int | float) and not isinstance(value, bool) else None


def _who(sample: Event) -> str:
    gpu = sample.gpu
    if gpu is not None and gpu.uuid == OTHERS:
        return OTHERS
    name = "" if gpu is None else gpu.pci or gpu.uuid or str(gpu.index)
    return f"{sample.node or ''}/{name}"


def _busiest(samples: Iterable[Event], name: str, loaded_only: bool = True) -> dict[str, tuple[float, Event]]:
    """For each GPU its last sample under load that tells a level. Samples whose load is not known count as loaded only together
    with others of that kind."""
    known: dict[str, tuple[float, Event]] = {}
    unknown: dict[str, tuple[float, Event]] = {}
    for sample in samples:
        value = _value(sample, name)
        if value is None or (loaded_only and sample.attrs.get("loaded") is False):
            continue
        place = known if sample.attrs.get("loaded") is True or not loaded_only else unknown
        place[_who(sample)] = (value, sample)
    return known or unknown


def _slow_clocks(group: Sequence[Event], catalog: Catalog) -> list[Event]:
    """GPUs whose clock is far below that of their peers under load, by what the driver gives as the reason."""
    clocks = _busiest(group, "clock_sm")
    found = []
    for slow in outliers({who: v for who, (v, _) in clocks.items()}, "less", CLOCK_RATIO):
        sample = clocks[slow.name][1]
        attrs = {"mhz": slow.value, "peers_mhz": slow.peers}
        asked = _levels(sample).get("reason_app_clocks") is True
        if _capped(sample, group):
            continue
        found.append(
            derive(catalog, "derived.gpu.clock_locked" if asked else "derived.gpu.clock_low", sample, attrs=attrs)
        )
    return found


def _capped(sample: Event, group: Sequence[Event]) -> bool:
    """Whether a GPU has a power limit below its default or its peers': then its clock is low by intent."""
    own, usual = _value(sample, "power_limit"), _value(sample, "power_default")
    limits = sorted(v for s in group if (v := _value(s, "power_limit")) is not None)
    usual = usual if usual is not None else limits[len(limits) // 2] if limits else None
    return own is not None and usual is not None and own * LIMIT_RATIO < usual


def _odd(group: Sequence[Event], catalog: Catalog, name: str, worse: Any, ratio: float, signature: str) -> list[Event]:
    """GPUs whose level differs from that of all their peers."""
    values = _busiest(group, name, loaded_only=name.startswith("pcie"))
    if name.startswith("pcie") and any(s.attrs.get("loaded") is not True for _, s in values.values()):
        return []
    odd = outliers({who: v for who, (v, _) in values.items()}, worse, ratio)
    return [
        derive(catalog, signature, values[o.name][1], attrs={"level": name, "value": o.value, "peers": o.peers})
        for o in odd
    ]


def _hot(group: Sequence[Event], catalog: Catalog) -> list[Event]:
    temperatures = _busiest(group, "temperature")
    if len(temperatures) < LEAST_PEERS:
        return []
    odd = outliers({who: v for who, (v, _) in temperatures.items()}, "more", HOT_RATIO)
    return [
        derive(catalog, "derived.gpu.hot", temperatures[o.name][1], attrs={"celsius": o.value, "peers": o.peers})
        for o in odd
        if o.value >= HOT_C and o.value - o.peers >= HOT_ABOVE_PEERS
    ]


def _hot_idle(group: Sequence[Event], catalog: Catalog) -> list[Event]:
    """GPUs without work that are far warmer than idle peers, or that stay hot for minutes."""
    idle: dict[str, list[tuple[float, Event]]] = defaultdict(list)
    for sample in group:
        value = _value(sample, "temperature")
        if value is not None and _value(sample, "utilisation") == 0.0:
            idle[_who(sample)].append((value, sample))
    last = {who: own[-1] for who, own in idle.items()}
    usual = sorted(v for v, _ in last.values())[len(last) // 2] if len(last) >= LEAST_PEERS else None
    found = []
    for own in idle.values():
        value, sample = own[-1]
        above = usual is not None and value >= IDLE_WARM_C and value - usual >= IDLE_ABOVE_PEERS
        if above or (value >= IDLE_HOT_C and value >= own[0][0] and _seconds(own[0][1], sample) >= IDLE_S):
            found.append(derive(catalog, "derived.gpu.hot_idle", sample, attrs={"celsius": value, "peers": usual}))
    return found


def _seconds(first: Event, last: Event) -> float:
    """Time between two samples; 0 where it is not known."""
    return 0.0 if first.time_ns is None or last.time_ns is None else (last.time_ns - first.time_ns) / 1e9


def _many_corrected(group: Sequence[Event], catalog: Catalog) -> list[Event]:
    """A GPU with very many corrected errors where its peers have next to none. No rate: since when is not known."""
    found = []
    for name in ("ecc_corrected_volatile", "dram_corrected_volatile"):
        counts = _busiest(group, name, loaded_only=False)
        if len(counts) < LEAST_PEERS:
            continue
        usual = sorted(v for v, _ in counts.values())[len(counts) // 2]
        found += [
            derive(catalog, "derived.gpu.ecc_many", sample, attrs={"count": value, "peers": usual}, explains=["xid.92"])
            for value, sample in counts.values()
            if value >= MANY_CORRECTED and value >= CORRECTED_RATIO * max(1.0, usual)
        ]
    return found


def _rising(samples: Sequence[Event], catalog: Catalog) -> list[Event]:
    """Corrected errors and replays that grow between samples of one GPU and stand still, or nearly, on the others."""
    found = []
    limits = {
        "ecc_corrected_volatile": ("derived.gpu.ecc_rising", RISING_A_SECOND),
        "dram_corrected_volatile": ("derived.gpu.ecc_rising", RISING_A_SECOND),
        "pcie_replays": ("derived.gpu.pcie_replays", 8 / 60),
    }
    for name, (signature, limit) in limits.items():
        grown = {who: g for who, g in _growth(samples, name).items() if g[0] >= 0}
        usual = sorted(g[0] for g in grown.values())[len(grown) // 2] if len(grown) >= LEAST_PEERS else 0.0
        for amount, elapsed_s, last in grown.values():
            fast = amount / elapsed_s > limit if elapsed_s else amount >= MANY_CORRECTED
            if fast and amount > 10 * usual:
                attrs = {"counter": name, "grown": amount, "elapsed_s": elapsed_s, "peers": usual}
                found.append(derive(catalog, signature, last, attrs=attrs))
    return found


def _growth(samples: Sequence[Event], name: str) -> dict[str, tuple[float, float | None, Event]]:
    """How much a count grew from the first to the last sample of each GPU that has two."""
    by_gpu: dict[str, list[Event]] = defaultdict(list)
    for sample in samples:
        if _value(sample, name) is not None:
            by_gpu[_who(sample)].append(sample)
    found = {}
    for who, own in by_gpu.items():
        ordered = sorted(own, key=lambda e: (e.time_ns or 0, int(e.attrs.get("sample") or 0), e.order))
        first, last = ordered[0], ordered[-1]
        if first is last:
            continue
        elapsed_s = None
        if first.time_ns is not None and last.time_ns is not None and last.time_ns > first.time_ns:
            elapsed_s = (last.time_ns - first.time_ns) / 1e9
        found[who] = ((_value(last, name) or 0.0) - (_value(first, name) or 0.0), elapsed_s, last)
    return found


def _host_memory(events: Sequence[Event], catalog: Catalog) -> list[Event]:
    """Corrected errors of one memory module of the machine, whose reports count ever more."""
    by_place: dict[tuple[str | None, str], list[tuple[float, Event]]] = defaultdict(list)
    for event in events:
        count = str(event.attrs.get("count", ""))
        if event.signature == "edac.corrected" and count.isdigit() and len(count) < 12:
            by_place[event.node, str(event.attrs.get("location", ""))].append((float(count), event))
    found = []
    for reports in by_place.values():
        first, last = reports[0][0], reports[-1][0]
        if len(reports) > 1 and last >= MANY_CORRECTED and last > 2 * first:
            found.append(
                derive(catalog, "derived.host.memory_rising", reports[-1][1], attrs={"from": first, "to": last})
            )
    return found


def _held_memory(events: Sequence[Event], catalog: Catalog) -> list[Event]:
    """Memory of a GPU in the name of a process that is gone, or whose parent is."""
    holders = [e for e in events if e.signature == "gpu.process"]
    gone = {e.attrs.get("pid") for e in events if e.signature == "process.absent"}
    orphans = [e for e in events if e.signature == "process.orphan"]
    left = {e.attrs.get("pid") for e in orphans} | {e.attrs.get("group") for e in orphans if e.attrs.get("group")}
    ooms = sorted({e.signature for e in events if OOM.search(e.signature)})
    found = []
    for holder in holders:
        pid = holder.attrs.get("pid")
        if pid in gone or pid in left:
            attrs = {"pid": pid, "used_mib": holder.attrs.get("used_mib"), "process_exists": pid not in gone}
            found.append(derive(catalog, "derived.gpu.memory_held", holder, attrs=attrs, explains=ooms))
    return found[:64]
