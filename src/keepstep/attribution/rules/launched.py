"""How a job was started, beside what it met: a device that its container was not given, a caller that is none of its machines."""

from __future__ import annotations

import re
from collections.abc import Sequence

from keepstep.attribution.rules.deriving import derive
from keepstep.attribution.rules.jobfacts import of
from keepstep.catalog.load import Catalog
from keepstep.records.event import Event

MOST = 128
LEAST_MEMBERS = 2
"""Machines of a job that have to be named before one is called a stranger."""
CLAIMS = (
    "nccl.ofi_no_provider",
    "nccl.no_ib_device",
    "nccl.ib_device_gone",
    "nccl.transport",
    "cuda.no_device",
)
"""What a job says that was not given a device."""
_INSIDE = re.compile(
    r"(?i)# in the (?:container|pod|docker)\b|\b(?:docker|podman|nerdctl|crictl|kubectl) (?:\S+ ){0,6}?exec\b"
)
_OUTSIDE = re.compile(r"(?i)# in the host\b|\b(?:lspci|ibstat|ibv_devices)\b")


def not_passed_in(events: Sequence[Event], catalog: Catalog) -> list[Event]:
    """A device that is not there in a container and is there on its host, and a job that found none."""
    claims = [e for e in of(events, *CLAIMS)[:MOST] if e.attrs.get("net") in (None, "Socket")]
    present = {str(e.attrs.get("device")) for e in of(events, "container.device_present")[:MOST] if _on_host(e)}
    for event in of(events, "container.device_absent")[:MOST]:
        device = str(event.attrs.get("device"))
        if _INSIDE.search(event.source) and device in present and claims:
            explains = ["nccl.ofi_no_provider", "cuda.no_device", "nccl.no_ib_device", "nccl.ib_device_gone"]
            attrs = {"device": device}
            return [derive(catalog, "derived.not_passed_in", claims[0], attrs=attrs, explains=explains, placed=False)]
    return []


def _on_host(event: Event) -> bool:
    return bool(_OUTSIDE.search(event.source)) and not _INSIDE.search(event.source)


def stranger_connected(events: Sequence[Event], catalog: Catalog) -> list[Event]:
    """Connections that were closed, all from an address whose name is none of the job's machines."""
    closed, rows = of(events, "nccl.peer_closed")[:MOST], of(events, "job.hostfile_row")[:MOST]
    members = {_short(str(e.attrs.get(name))) for e in rows for name in ("host", "alias") if e.attrs.get(name)}
    members |= {_short(e.node) for e in closed if e.node}
    if not closed or len(rows) < LEAST_MEMBERS:
        return []
    names: dict[str, set[str]] = {}
    for event in of(events, "command.host_name")[:MOST]:
        names.setdefault(str(event.attrs.get("address")), set()).add(str(event.attrs.get("name")))
    peers = {str(e.attrs.get("peer") or "").partition("<")[0].strip("[]") for e in closed}
    for peer in peers:
        known = names.get(peer, set())
        # A machine has a name for each of its networks: n1, n1-ib0, ib-n1.
        near = any(m in _short(n) for n in known for m in members)
        if not known or peer in members or near:
            return []
    attrs = {"peer": min(peers), "name": min(names[min(peers)])}
    explains = ["nccl.peer_closed"]
    return [derive(catalog, "derived.stranger_connected", closed[0], attrs=attrs, explains=explains, placed=False)]


def _short(name: str) -> str:
    """A host's name without its domain; an address as it is."""
    return name if re.fullmatch(r"[\d.:]+", name) else name.partition(".")[0].lower()


LAUNCHED_RULES = (not_passed_in, stranger_connected)
"""Each: `(events, catalog) -> list[Event]`."""
