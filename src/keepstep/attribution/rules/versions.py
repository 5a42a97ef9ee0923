"""Tables of a fleet by version: a fault that goes with one of them."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

from keepstep.attribution.order import canonical
from keepstep.attribution.rules.deriving import derive
from keepstep.attribution.rules.jobfacts import FAILING, of
from keepstep.catalog.load import Catalog
from keepstep.records.event import Event

LEAST_HIT = 3
"""Machines that show it, from which on it is no chance."""
LEAST_CLEAN = 5
"""Machines of another version that must have been looked at."""
HIT_SHARE, CLEAN_SHARE = 0.5, 0.02


class _Row(NamedTuple):
    version: str
    total: int
    hit: int


def version_table(events: Sequence[Event], catalog: Catalog) -> list[Event]:
    """Most machines of one version show a fault, and next to none of another: the version's doing, whatever the sign is."""
    for table in of(events, "ledger.versions")[:8]:
        rows = _rows(table)
        bad = max(rows, key=lambda r: r.hit / r.total, default=None)
        good = max((r for r in rows if r.hit <= CLEAN_SHARE * r.total), key=lambda r: r.total, default=None)
        if bad is None or good is None or bad.hit < max(LEAST_HIT, HIT_SHARE * bad.total) or good.total < LEAST_CLEAN:
            continue
        signs = [e for e in events if catalog[e.signature].role in FAILING and not _of_another_kind(e)]
        attrs = {"bad": bad.hit, "total": bad.total, "version": bad.version, "good": good.version}
        basis = min(signs, key=canonical) if signs else table
        explains = sorted({e.signature for e in signs})
        return [derive(catalog, "derived.version.of_table", basis, attrs=attrs, explains=explains, placed=False)]
    return []


def _rows(table: Event) -> list[_Row]:
    rows = table.attrs.get("versions")
    found = []
    for row in rows if isinstance(rows, list) else []:
        if isinstance(row, list) and len(row) == 3 and all(isinstance(n, int) for n in row[1:]) and row[1] > 0:
            found.append(_Row(str(row[0]), row[1], row[2]))
    return found


def _of_another_kind(event: Event) -> bool:
    """Whether a sign has nothing to do with a machine's own software: what the scheduler or storage did stays as it is."""
    return event.kind.startswith(("sched.", "storage.", "checkpoint."))


VERSION_RULES = (version_table,)
"""Each: `(events, catalog) -> list[Event]`."""
