"""Parsers of whole documents: outputs of tools, records of schedulers. Each tells by itself whether a document is its own.

A parser is a function `(document, catalog) -> list[Event] | None`: None when the document is not its own. It never raises on any
input. It is listed here, in the order they are asked. Lines are still matched one by one afterwards, whatever a parser says.
"""

from __future__ import annotations

from collections.abc import Callable

from keepstep.catalog.load import Catalog
from keepstep.records.event import Event
from keepstep.sources.documents import Document
from keepstep.sources.ownrecords import OWN_RECORD, parse_own_records
from keepstep.sources.scheduler.parse import parse as scheduler_records
from keepstep.sources.snapshots import (
    answers,
    bandwidth,
    counted,
    counter_columns,
    dcgm,
    looked,
    losses,
    lspci,
    machine,
    ncclras,
    nvlink,
    pace,
    port_counters,
    ports,
    prometheus,
    smi_csv,
    smi_full,
    smi_table,
    tables,
)

Parser = Callable[[Document, Catalog], list[Event] | None]

PARSERS: tuple[tuple[str, Parser], ...] = (
    (OWN_RECORD, parse_own_records),
    ("nvidia-smi -q", smi_full.parse),
    ("nvidia-smi", smi_table.parse),
    ("nvidia-smi csv", smi_csv.parse),
    ("nvlink", nvlink.parse),
    ("dcgmi", dcgm.parse),
    ("metrics", prometheus.parse),
    ("ports", ports.parse),
    ("port counters", port_counters.parse),
    ("counter columns", counter_columns.parse),
    ("lspci", lspci.parse),
    ("ncclras", ncclras.parse),
    ("machine", machine.parse),
    ("bandwidth test", bandwidth.parse),
    ("scheduler records", scheduler_records),
    ("counted", counted.parse),
    ("looks at a monitor's claim", looked.parse),
    ("answers", answers.parse),
    ("losses", losses.parse),
    ("table", tables.parse),
    ("pace", pace.parse),
)
"""Name and function."""
