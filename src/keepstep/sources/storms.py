"""Many sightings, few events: duplicates dropped, bursts made one event. Pure.

One GPU has filled a kernel log with 800,000 lines of which 29 were distinct; memory stays bounded whatever comes.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import msgspec

from keepstep.records.event import Event
from keepstep.sources.documents import strip_line
from keepstep.sources.prefixes import Habits
from keepstep.sources.terminal import clean

BURST_NS = 300 * 1_000_000_000
"""Sightings of the same thing that are further apart are two bursts: a fault that came back is another fact."""
MAX_BURSTS = 16
"""Bursts of one thing that are told apart."""
MAX_VARIANTS = 16
"""Versions of one thing (with other numbers in the line) that are told apart."""
MAX_KEYS = 100_000
"""Different things that are held; sightings of further ones are counted as lost."""
SEEN_IDS = 1 << 20

_Key = tuple[object, ...]


class _Burst:
    __slots__ = ("count", "event", "first_ns", "last_ns", "last_order")

    def __init__(self, event: Event) -> None:
        self.event = event
        self.count = event.count
        self.first_ns = event.time_ns
        self.last_ns = event.last_ns or event.time_ns
        self.last_order = last_order(event)

    def add(self, event: Event) -> None:
        self.count += event.count
        self.last_order = max(self.last_order, last_order(event))
        if event.time_ns is not None:
            self.first_ns = event.time_ns if self.first_ns is None else min(self.first_ns, event.time_ns)
        end = event.last_ns or event.time_ns
        if end is not None:
            self.last_ns = end if self.last_ns is None else max(self.last_ns, end)

    def made(self) -> Event:
        if self.count == self.event.count:
            return self.event
        attrs = self.event.attrs | {"last_order": self.last_order}
        return msgspec.structs.replace(
            self.event, count=self.count, time_ns=self.first_ns, last_ns=self.last_ns, attrs=attrs
        )


class Collapser:
    """Takes events in any number, holds the few that they are.

    Sightings are one event when they are of one signature, document, machine, device, rank, job and cause, and no further apart
    than BURST_NS where their times are known. The first of a burst is its evidence; `count`, `last_ns` and attrs["last_order"] tell
    of the others.
    """

    def __init__(self) -> None:
        self._bursts: dict[_Key, list[_Burst]] = {}
        self._variants: dict[_Key, int] = {}
        self._ids: set[str] = set()
        self.lost = 0
        """Sightings of further things when MAX_KEYS were held."""

    def add(self, event: Event) -> bool:
        """Whether it was new: False for an id that was seen before, which changes nothing."""
        if event.id:
            if event.id in self._ids:
                return False
            if len(self._ids) < SEEN_IDS:
                self._ids.add(event.id)
        key = self._key(event)
        bursts = self._bursts.get(key)
        if bursts is None:
            if len(self._bursts) >= MAX_KEYS:
                self.lost += event.count
                return True
            self._bursts[key] = [_Burst(event)]
            return True
        last = bursts[-1]
        if len(bursts) < MAX_BURSTS and _apart(last, event):
            bursts.append(_Burst(event))
        else:
            last.add(event)
        return True

    def _key(self, event: Event) -> _Key:
        base = _base_key(event)
        variant = (*base, *sorted((k, str(v)) for k, v in event.attrs.items() if k not in _COUNTING))
        if variant in self._bursts:
            return variant
        count = self._variants.get(base, 0)
        if count < MAX_VARIANTS:
            if len(self._variants) < MAX_KEYS:
                self._variants[base] = count + 1
            return variant
        return base

    def events(self) -> list[Event]:
        """What is held, in the order of first sightings."""
        return [burst.made() for bursts in self._bursts.values() for burst in bursts]


_COUNTING = frozenset({"last_order", "pid", "tid", "detail"})
"""Attributes that differ between sightings of the same thing."""


def _base_key(event: Event) -> _Key:
    gpu = event.gpu
    device = None if gpu is None else gpu.pci or gpu.uuid or gpu.index
    return (
        event.signature, event.evidence.path, event.source, event.node, device, event.nic, event.rank, event.job, event.cycle,
        event.boot_id, event.stale, event.attrs.get("cause_xid"),
    )  # fmt: skip


def last_order(event: Event) -> int:
    """Position of the last sighting of an event."""
    order: Any = event.attrs.get("last_order", event.order)
    return order if isinstance(order, int) else event.order


def _apart(burst: _Burst, event: Event) -> bool:
    if event.time_ns is None or burst.last_ns is None or burst.first_ns is None:
        return False
    return event.time_ns - burst.last_ns > BURST_NS or burst.first_ns - event.time_ns > BURST_NS


def dedupe(events: Iterable[Event]) -> list[Event]:
    """Each event once: by (boot, sequence number, signature) where the source numbers its records, else by id."""
    seen: set[object] = set()
    kept = []
    for event in events:
        key: object = event.id or None
        if event.boot_id is not None and event.seq is not None:
            key = (event.boot_id, event.seq, event.signature)
        if key is not None and key in seen:
            continue
        seen.add(key)
        kept.append(event)
    return kept


COPY_NS = 2_000_000_000
"""Copies of a line have times that differ by less: by a second where one document tells no fractions."""
MAX_COPIES = 64


def drop_copies(events: Iterable[Event]) -> list[Event]:
    """One event where two documents hold the same line: the ring buffer and the journal, two syslog files.

    The same line is the same message of the same second of the same machine, as far as both tell it. The first one stays, with the
    machine that another one names.
    """
    kept: list[Event] = []
    by_message: dict[_Key, list[int]] = {}
    for event in events:
        gpu = event.gpu
        key = (event.signature, None if gpu is None else gpu.pci, event.rank, _message(event))
        others = by_message.setdefault(key, [])
        copied = next((at for at in others if _is_copy(kept[at], event)), None)
        if copied is not None:
            if kept[copied].node is None and event.node is not None:
                kept[copied] = msgspec.structs.replace(kept[copied], node=event.node)
            continue
        if len(others) < MAX_COPIES:
            others.append(len(kept))
        kept.append(event)
    return kept


def _message(event: Event) -> str:
    """The line without what each document puts before it."""
    return strip_line(clean(event.evidence.text)[-1], Habits()).text[-120:]


def _is_copy(one: Event, other: Event) -> bool:
    if (one.evidence.path, one.source) == (other.evidence.path, other.source):
        return False
    if one.node is not None and other.node is not None and one.node != other.node:
        return False
    if one.boot_ns is not None and other.boot_ns is not None:
        return abs(one.boot_ns - other.boot_ns) < 1_000_000
    if one.time_ns is None or other.time_ns is None or "neighbour" in (one.time_quality, other.time_quality):
        return False
    return abs(one.time_ns - other.time_ns) < COPY_NS
