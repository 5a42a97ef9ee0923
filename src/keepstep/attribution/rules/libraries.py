"""Empty libraries of the GPU driver, where programs find no driver: of one machine, or of an image."""

from __future__ import annotations

import re
from collections.abc import Sequence

from keepstep.attribution.current import PROGRESS
from keepstep.attribution.rules.deriving import derive
from keepstep.attribution.rules.jobfacts import of
from keepstep.catalog.load import Catalog
from keepstep.records.event import Event

WITHOUT_DRIVER = ("cuda.no_device", "driver.library_short", "cuda.driver_missing", "nvml.not_found")
"""How programs end that find no driver."""
_NAME = re.compile(r"[A-Za-z][\w-]{0,60}\d")


def library_empty(events: Sequence[Event], catalog: Catalog) -> list[Event]:
    """Empty driver libraries and programs without a driver; by what other machines have it is the machine's own."""
    empty, without = of(events, "driver.library_empty"), of(events, *WITHOUT_DRIVER)
    if not empty or not without:
        return []
    nodes = {node for e in empty if (node := _node(e)) is not None}
    elsewhere = of(events, "fact.file_whole_elsewhere", "derived.ledger.follows_node")
    works = [e for e in of(events, PROGRESS) if e.node is not None and nodes and e.node not in nodes]
    here = len(nodes) == 1 and (elsewhere or works)
    signature = "derived.driver.library_empty_here" if here else "derived.driver.library_empty"
    # That jobs fail there and nowhere else follows from it.
    explains = sorted({"derived.ledger.follows_node", *(e.signature for e in without)})
    first = next((e for e in empty if _node(e) in nodes), empty[0])
    return [derive(catalog, signature, first, explains=explains, node=_node(first))]


def _node(event: Event) -> str | None:
    """The machine of a listing: it is the machine's even where its name, in the title of the text, could be that of a role."""
    return event.node or (event.source if _NAME.fullmatch(event.source) is not None else None)
