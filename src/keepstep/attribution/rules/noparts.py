"""Complaints of monitors about what a machine does not have, and about a node that was still being set up."""

from __future__ import annotations

import re
from collections.abc import Sequence

from keepstep.attribution.order import canonical
from keepstep.attribution.rules.deriving import derive
from keepstep.attribution.rules.jobfacts import FAILING, of
from keepstep.catalog.load import Catalog
from keepstep.records.event import Event

NVLINK_CLAIMS = ("dcgm.health_nvlink", "condition.dcgm.nvlink", "nvlink.check_down", "nvlink.all_inactive")
FABRIC_CLAIMS = ("fabricmanager.stopped", "fabricmanager.aborted", "fabricmanager.error")
FACTS = (
    "gpu.product_without_nvlink",
    "gpu.product_bridged",
    "nvlink.not_fitted",
    "nvswitch.none",
)
NOT_OWN = ("condition.", "monitor.", "k8s.node_", "check.", "fact.")
"""Beginnings of signatures of what others hold against a machine: never a reason to believe them."""
_NIC = re.compile(r"\b(?:mlx5_\d+|ib\d+|eth\d+|en[ps]\w{2,20}|rocep\w{2,20})\b")


def no_such_part(events: Sequence[Event], catalog: Catalog) -> list[Event]:
    """NVLinks that are called down on cards that have none, a fabric manager that fails where there is no fabric."""
    # Cards of both kinds in one text: which of them the claim is about is not known.
    if of(events, "gpu.product_linked", "nvlink.inactive", "nvlink.pair_missing"):
        return []
    claims, part = of(events, *NVLINK_CLAIMS, *FABRIC_CLAIMS), _missing_part(events)
    if not claims or part is None or any(_speaks(e, catalog) for e in events if e not in claims):
        return []
    facts = of(events, *FACTS)
    named, blamed = {e.node for e in facts if e.node}, {e.node for e in claims if e.node}
    if named and not blamed <= named:
        return []  # what is known of one machine says nothing about another
    last = max((*claims, *facts), key=lambda e: (e.evidence.line or 0, canonical(e)))
    return [derive(catalog, "derived.alarm.no_such_part", last, attrs={"part": part}, placed=False)]


def no_such_port(events: Sequence[Event], catalog: Catalog) -> list[Event]:
    """Ports that are down, each of which is known not to be used on this type of machine."""
    down, spare = of(events, "nic.port_down"), {str(e.attrs.get("nic")) for e in of(events, "nic.not_fitted")}
    if not down or not spare or any(_speaks(e, catalog) for e in events if e not in down):
        return []
    names = [e.nic or next((m for m in _NIC.findall(e.evidence.text)), "") for e in down]
    if not all(name in spare for name in names):
        return []
    last = max((*down, *of(events, "nic.not_fitted")), key=lambda e: (e.evidence.line or 0, canonical(e)))
    return [derive(catalog, "derived.alarm.no_such_part", last, attrs={"part": ", ".join(sorted(spare))}, placed=False)]


def _missing_part(events: Sequence[Event]) -> str | None:
    """What all claims are about and the machine does not have: by its product, or because none is fitted."""
    linkless, bridged = of(events, "gpu.product_without_nvlink"), of(events, "gpu.product_bridged")
    if of(events, *FABRIC_CLAIMS):
        return "NVSwitch" if (linkless or bridged) and of(events, "nvswitch.none") else None
    # A card that may have a bridge, none of whose links is up, has lost it or never had one: somebody has to say so.
    return "NVLink" if (linkless and not bridged) or of(events, "nvlink.not_fitted") else None


def _speaks(event: Event, catalog: Catalog) -> bool:
    """Whether the machine or the job itself says that something is wrong."""
    entry = catalog[event.signature]
    return entry.role in FAILING and entry.severity != "info" and not event.signature.startswith(NOT_OWN)


def settled(live: Sequence[Event], past: Sequence[Event], catalog: Catalog) -> list[Event]:
    """A condition of a new node that was bad and is good, with nothing else wrong."""
    new = of(live, "fact.node_new")
    bad = [e for e in past if e.stale == "cleared" and e.signature.startswith(("condition.", "monitor.cannot_look"))]
    good = of(live, "condition.good", "monitor.ok")
    if not new or not bad or not good or any(_speaks(e, catalog) for e in live):
        return []
    return [derive(catalog, "derived.monitor.settled", max(good, key=canonical), placed=False)]


NO_PART_RULES = (no_such_part, no_such_port)
"""Each: `(events, catalog) -> list[Event]`."""
