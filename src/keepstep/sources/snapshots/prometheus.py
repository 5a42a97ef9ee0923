"""Prometheus text: dcgm-exporter (`DCGM_FI_DEV_*`) and node_exporter (`node_infiniband_*`), scraped or pasted.

A gauge holds a level, not an event. Two scrapes of one series are two samples. Rates that somebody worked out and wrote down
("rate 12/s", `rate(NAME{...}[5m]) 12`) are taken as rates.
"""

from __future__ import annotations

import math
import re
from collections.abc import Iterator
from typing import NamedTuple

from keepstep.catalog.counters import counter_named
from keepstep.catalog.load import Catalog
from keepstep.records.event import Event
from keepstep.sources.documents import Document, Line
from keepstep.sources.snapshots.fields import dcgm_field
from keepstep.sources.snapshots.gpu_health import gpu_events
from keepstep.sources.snapshots.making import gpu_named, lines_of, mentions, number
from keepstep.sources.snapshots.samples import Building, GpuSample
from keepstep.sources.snapshots.totals import Total, total_events

WORDS = ("DCGM_FI_", "node_infiniband_", "node_network_carrier", "node_ethtool_")

_SERIES = re.compile(
    r"\s*(?:[\w.-]{1,60}: +)?(?:rate\(|increase\()?(?P<name>[A-Za-z_:][\w:]*)"
    r"\{(?P<labels>[^}]*)\}(?P<over>\[[^\]]*\]\))?\s*[=:]?>?\s*"
    r"(?P<value>[-+]?(?:\d[\d.]*(?:[eE][-+]?\d{1,3})?|NaN))(?:\s+@?\[?(?P<time>\d{9,13}(?:\.\d+)?)\]?)?"
)
_LABEL = re.compile(r'(?P<key>\w+)\s*=\s*"(?P<value>[^"]*)"')
_SAID = re.compile(r"(?P<name>DCGM_FI_\w+)\W+gpu\s*[=:#]?\s*\"?(?P<gpu>\d{1,3})", re.IGNORECASE)
_RATE = re.compile(
    r"(?:rate\D{0,12})?(?P<rate>\d[\d.]*(?:[eE][-+]?\d{1,3})?)\s*(?:/|per )\s*(?:s|sec|second)\b(?P<rest>[^;,|]{0,60})"
)
_NODE = ("hostname", "node", "instance", "kubernetes_node", "nodename")


class Series(NamedTuple):
    """One value of one series."""

    line: Line
    name: str
    labels: dict[str, str]
    value: str
    time_ns: int | None
    rate: bool

    @property
    def node(self) -> str | None:
        """The machine that the labels name, without the exporter's port."""
        told = next((self.labels[key] for key in _NODE if self.labels.get(key)), None)
        return None if told is None else told.rsplit(":", 1)[0] if told.rsplit(":", 1)[-1].isdigit() else told


def parse(document: Document, catalog: Catalog) -> list[Event] | None:
    """Events of DCGM and InfiniBand series; None when there is none."""
    if not mentions(document, WORDS):
        return None
    series = list(read(document))
    samples = _gpu_samples(series)
    totals = [*_totals(series), *_said(document)]
    if not samples and not totals:
        return None
    return gpu_events(samples, document, catalog) + total_events(totals, document, catalog)


def read(document: Document) -> Iterator[Series]:
    """All series of the document whose name is of DCGM or of a network device."""
    for line in lines_of(document):
        match = _SERIES.match(line.text)
        if match is None or not match["name"].startswith(WORDS):
            continue
        labels = {m["key"].lower(): m["value"] for m in _LABEL.finditer(match["labels"])}
        yield Series(line, match["name"], labels, match["value"], _time_ns(match["time"]), match["over"] is not None)


def _time_ns(text: str | None) -> int | None:
    """Milliseconds (as Prometheus writes them) or seconds since 1970."""
    if text is None:
        return None
    value = float(text)
    return int(value * (1_000_000 if value > 1e11 else 1_000_000_000))


def _gpu_samples(series: list[Series]) -> list[GpuSample]:
    """Samples by GPU; a metric that comes again for the same GPU begins the next sample."""
    done: list[Building] = []
    current: dict[tuple[str | None, str, str], Building] = {}
    for one in series:
        field = dcgm_field(one.name)
        if field is None or one.rate or one.labels.get("gpu_i_id"):
            continue
        key = (one.node, one.labels.get("gpu", ""), one.labels.get("uuid", ""))
        building = current.get(key)
        if building is None or field.name in building.levels:
            building = Building(number=0 if building is None else building.number + 1)
            building.identity = {
                "index": one.labels.get("gpu", ""),
                "uuid": one.labels.get("uuid", ""),
                "pci": one.labels.get("pci_bus_id", ""),
            }
            building.node, building.time_ns = one.node, one.time_ns
            current[key] = building
            done.append(building)
        building.set(field, one.value, one.line)
        version = one.labels.get("dcgm_fi_driver_version")
        if version:
            building.levels.setdefault("driver", version)
            building.lines.setdefault("driver", one.line)
    return [s for b in done if (s := b.finish()) is not None]


def _totals(series: list[Series]) -> Iterator[Total]:
    """Counters of network devices, and rates of DCGM's error counters."""
    seen: dict[tuple[str, str | None, str, str], int] = {}
    for one in series:
        try:
            value = float(one.value)
        except ValueError:
            continue
        if math.isnan(value):
            continue
        device = one.labels.get("device", "")
        port = one.labels.get("port", "")
        if one.name.startswith("DCGM_"):
            field = dcgm_field(one.name)
            counter = counter_named(field.name) if field is not None else None
            if counter is None or not (one.rate or counter.family == "nvlink"):
                continue
            name, family, nic = counter.counter, counter.family, None
            gpu = gpu_named(_index(one.labels.get("gpu")), one.labels.get("uuid"), one.labels.get("pci_bus_id"))
        else:
            name = one.name.removeprefix("node_infiniband_").removeprefix("node_network_").removeprefix("node_ethtool_")
            family, nic, gpu = "nic", device or None, None
        key = (one.name, one.node, device or str(one.labels.get("gpu")), port)
        seen[key] = seen.get(key, -1) + 1
        yield Total(
            name, value, one.line, nic=nic, gpu=gpu, node=one.node, port=port, family=family,
            sample=seen[key], time_ns=one.time_ns, rate=one.rate,
        )  # fmt: skip


def _said(document: Document) -> Iterator[Total]:
    """Rates that stand in a sentence: `DCGM_FI_DEV_ECC_SBE_VOL_TOTAL gpu0: rate 12/s (job running); rate 0/s (idle)`."""
    for line in lines_of(document):
        match = _SAID.search(line.text)
        field = dcgm_field(match["name"]) if match is not None else None
        counter = counter_named(field.name) if field is not None else None
        if match is None or counter is None:
            continue
        for sample, said in enumerate(_RATE.finditer(line.text, match.end())):
            rest = said["rest"].lower()
            busy = (
                False
                if "idle" in rest
                else True
                if any(w in rest for w in ("running", "load", "busy", "job"))
                else None
            )
            yield Total(
                counter.counter, number(said["rate"]) or 0.0, line, gpu=gpu_named(int(match["gpu"])),
                family=counter.family, sample=sample, rate=True, busy=busy,
            )  # fmt: skip


def _index(text: str | None) -> int | None:
    return int(text) if text is not None and text.isdigit() and len(text) < 5 else None
