"""All readers of blocks in a job's log. They run over every document beside the patterns of single lines.

A reader is a generator `(document, catalog)` of events that never raises, takes time linear in the text, and looks only at texts
that contain one of its triggers.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import NamedTuple

from keepstep.catalog.load import Catalog
from keepstep.records.event import Event
from keepstep.sources.documents import Document
from keepstep.sources.joblog import beats, calls, calltables, cycles, elastic, exceptions, repeats, stacks
from keepstep.sources.snapshots import looked

Reader = Callable[[Document, Catalog], Iterator[Event]]


class BlockReader(NamedTuple):
    """`triggers`: strings of which one is in any text that the reader finds anything in."""

    name: str
    triggers: tuple[str, ...]
    read: Reader


BLOCK_READERS: tuple[BlockReader, ...] = (
    BlockReader("Python exceptions", exceptions.TRIGGERS, exceptions.read_exceptions),
    BlockReader("elastic failures", elastic.TRIGGERS, elastic.read_failures),
    BlockReader("calls of ranks", calls.TRIGGERS, calls.read_calls),
    BlockReader("tables of calls", calltables.TRIGGERS, calltables.read_tables),
    BlockReader("late heartbeats", beats.TRIGGERS, beats.read_beats),
    BlockReader("repeated checks", repeats.TRIGGERS, repeats.read_repeats),
    BlockReader("stacks", stacks.TRIGGERS, stacks.read_stacks),
    BlockReader("cycle summaries", cycles.CYCLE_TRIGGERS, cycles.read_cycles),
    BlockReader("looks at links", looked.LOOK_TRIGGERS, looked.read_looks),
    BlockReader("dump listing", cycles.DUMP_TRIGGERS, cycles.read_dump_listing),
)


def block_events(document: Document, catalog: Catalog) -> Iterator[Event]:
    """What all readers find in a document. A stream of the kernel is no job's log."""
    if document.lines and all(line.stream == "kernel" for line in document.lines[:50]):
        return
    text = document.text
    for reader in BLOCK_READERS:
        if any(trigger in text for trigger in reader.triggers):
            yield from reader.read(document, catalog)
