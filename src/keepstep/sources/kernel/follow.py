"""Follows the kernel's log: events as the lines are written, a position to save after each batch, and gaps that are said."""

from __future__ import annotations

import os
import select
import time
from collections.abc import Callable, Iterator
from typing import NamedTuple

from keepstep.catalog.load import Catalog
from keepstep.catalog.matcher import Matcher
from keepstep.records.event import Event, Evidence, TimeQuality, bounded
from keepstep.sources.clocks import Clock, Said
from keepstep.sources.documents import Document, Line, strip_line
from keepstep.sources.kernel.cursor import Position
from keepstep.sources.kernel.feeds import EndedError, Feed, Record
from keepstep.sources.prefixes import Habits
from keepstep.sources.terminal import clean
from keepstep.sources.textlines import event_id, fits, make_event

GAP = "monitor.gap"
IDLE_S = 5.0
REOPEN_S = 1.0
"""A source that has ended is opened again after this long."""
MAX_REOPENS = 5
"""In a row, without a record in between."""

Opener = Callable[[Position | None], Feed]


class Batch(NamedTuple):
    """Events of some records, perhaps none, and the position to save once they have been handed on."""

    events: list[Event]
    position: Position | None


def follow(
    opener: Opener, matcher: Matcher, catalog: Catalog, position: Position | None = None, stop: int | None = None
) -> Iterator[Batch]:
    """Batches for ever, or until the descriptor `stop` becomes readable. Opens the source, again when it ends.

    Records that were lost are an event `monitor.gap` in their place. Delivery is at least once: a batch whose position was not
    saved comes again, its events with the same ids. Raises StorageError when the source cannot be opened MAX_REOPENS times.
    """
    ended = 0
    while True:
        feed = opener(position)
        try:
            for batch in _batches(feed, matcher, catalog, stop):
                if batch.position is not None:
                    position, ended = batch.position, 0
                yield batch
            return
        except EndedError:
            ended += 1
            if ended > MAX_REOPENS:
                raise
        finally:
            feed.close()
        if _wait(stop, None, REOPEN_S):
            return


def _batches(feed: Feed, matcher: Matcher, catalog: Catalog, stop: int | None) -> Iterator[Batch]:
    clock = Clock(time.time_ns(), time.time_ns())
    node = os.uname().nodename
    while True:
        if _wait(stop, feed.fileno(), IDLE_S):
            return
        records = feed.read()
        if not records:
            continue
        events: list[Event] = []
        for record in records:
            events += record_events(record, feed.name, node, matcher, catalog, clock)
        yield Batch(events, records[-1].position)


def _wait(stop: int | None, fd: int | None, timeout_s: float) -> bool:
    """Wait for a descriptor, or for the time; whether to stop."""
    poll = select.poll()
    for one in (stop, fd):
        if one is not None:
            poll.register(one, select.POLLIN)
    ready = poll.poll(timeout_s * 1000)
    return any(one == stop for one, _ in ready)


def record_events(
    record: Record, name: str, node: str, matcher: Matcher, catalog: Catalog, clock: Clock
) -> list[Event]:
    """The events of a record: what it matches, and before it the gap that it shows."""
    prefixed = strip_line(clean(record.text)[-1], Habits())
    boot_ns = prefixed.said.boot_ns if record.boot_ns is None else record.boot_ns
    time_ns, quality = _time(record, prefixed.said, clock)
    line = Line(
        number=record.position.seq,
        text=prefixed.text,
        raw=record.text,
        node=record.node or prefixed.node or node,
        time_ns=time_ns,
        time_quality=quality,
        boot_ns=boot_ns,
        boot_id=record.boot,
        seq=record.position.seq or None,
        stream="kernel" if prefixed.stream is None else prefixed.stream,
    )
    # Entries of the journal have no numbers; their cursor makes ids that stay.
    path = f"{name} {record.position.cursor}".rstrip()
    events = [] if not record.lost else [_gap(record, line, path, catalog)]
    document = Document(path, "kmsg", ())
    return events + [make_event(m, line, document) for m in matcher.match_line(line.text) if fits(m, line)]


def _time(record: Record, said: Said, clock: Clock) -> tuple[int | None, TimeQuality]:
    if record.time_ns is not None:
        return record.time_ns, "boot_relative" if record.position.cursor == "" else "exact"
    if said.stamp is None:
        return time.time_ns(), "neighbour"
    timed = clock.resolve(said)
    return timed.time_ns, timed.quality


def _gap(record: Record, line: Line, name: str, catalog: Catalog) -> Event:
    entry = catalog[GAP]
    attrs: dict[str, object] = {"reason": record.reason}
    if record.lost > 0:
        attrs["lost"] = record.lost
    return Event(
        id=event_id(GAP, line, name),
        kind=entry.kind,
        signature=entry.id,
        severity=entry.severity,
        source="kmsg",
        order=line.number,
        time_ns=line.time_ns,
        time_quality=line.time_quality,
        boot_ns=line.boot_ns,
        node=line.node,
        boot_id=line.boot_id,
        seq=line.seq,
        attrs=attrs,
        evidence=Evidence(path=name, line=line.number, text=bounded(line.raw)),
    )
