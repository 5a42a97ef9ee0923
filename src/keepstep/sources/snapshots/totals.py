"""Error counters as events: the total (or the rate, where a tool gives one) of one counter of one link or port, as context.

A total that is not zero is no fault: it counts from the last load or clear on. Rules compare totals of the same counter.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import NamedTuple

from keepstep.catalog.counters import counter_named
from keepstep.catalog.load import Catalog
from keepstep.records.event import Event, Gpu
from keepstep.sources.documents import Document, Line
from keepstep.sources.snapshots.making import EVENTS_LIMIT, make


class Total(NamedTuple):
    """One reading. `counter`: as the tool calls it. `port`: of a network device, or link of a GPU. `elapsed_s`: since the first
    sample of the document, where it says so. `rate`: `value` is already per second. `busy`: whether work ran, where it is said."""

    counter: str
    value: float
    line: Line | None
    nic: str | None = None
    gpu: Gpu | None = None
    node: str | None = None
    port: str = ""
    family: str = ""
    sample: int = 0
    elapsed_s: float | None = None
    time_ns: int | None = None
    rate: bool = False
    busy: bool | None = None


def total_events(totals: Iterable[Total], document: Document, catalog: Catalog) -> list[Event]:
    """Events of the totals whose counter is known; a zero counts too, because the next sample may differ."""
    events: list[Event] = []
    for total in totals:
        counter = counter_named(total.counter, total.family)
        if counter is None or len(events) >= EVENTS_LIMIT:
            continue
        attrs = {
            "counter": counter.counter,
            "family": counter.family,
            "value": total.value,
            "port": total.port,
            "sample": total.sample,
            "elapsed_s": total.elapsed_s,
            "rate": total.rate,
            "busy": total.busy,
        }
        events.append(
            make(
                catalog,
                "counter.total",
                document,
                total.line,
                gpu=total.gpu,
                nic=total.nic,
                node=total.node,
                time_ns=total.time_ns,
                attrs=attrs,
            )
        )
    return events
