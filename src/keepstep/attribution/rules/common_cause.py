"""Common causes: what many machines show at once is one incident of something that they share, never one of each of them."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Mapping, Sequence
from typing import NamedTuple

from keepstep.attribution.order import SECOND_NS, canonical
from keepstep.attribution.rules.deriving import derive
from keepstep.attribution.wording import fill
from keepstep.catalog.load import Catalog
from keepstep.catalog.signature import Signature
from keepstep.records.event import Event
from keepstep.records.verdict import FaultClass

LEAST_NODES = 3
"""Two machines at once is a cable between them; three have something in common."""
WINDOW_S = 300.0
"""Sources report within this: monitors poll once a minute, schedulers notice a silent node after up to five."""
LEAST_SHARE_UNTIMED = 0.5
"""Share of the nodes that are named at all which must show it where no times say that it was at once."""
LEAST_SHARE_CHECK = 0.8
"""Share of nodes that fail a check from which on the check is the suspect, of at least CHECK_NODES."""
CHECK_NODES = 4

SHARED_KEYS = ("switch", "leaf", "rack", "pdu", "zone", "driver", "driver_version", "image", "nvlink_domain")
"""Attributes that name what machines share."""

_FABRIC_KINDS = ("nic.", "ib.", "nvlink.", "fabric.", "gpu.sxid")
_POWER_KINDS = (
    "sched.node_fail",
    "node.condition",
    "node.down",
    "gpu.thermal",
    "gpu.throttle",
    "gpu.power",
    "host.power",
    "host.thermal",
)
_LOCAL_KINDS = (*_FABRIC_KINDS, *_POWER_KINDS, "gpu.", "pcie.", "host.", "node.", "driver.")
"""Seen by the machine that it is about. What a job's ranks say of a peer is not: all of them see the one that died."""


class Crowd(NamedTuple):
    """Events of one signature on several nodes."""

    entry: Signature
    events: Sequence[Event]
    nodes: frozenset[str]


def common_cause(events: Sequence[Event], catalog: Catalog) -> list[Event]:
    """An event for every thing that several machines show at once, which then explains what each of them shows."""
    by_signature: dict[str, list[Event]] = defaultdict(list)
    known: set[str] = set()
    for event in events:
        if event.node is not None:
            known.add(event.node)
            by_signature[event.signature].append(event)
    found = []
    for signature, members in sorted(by_signature.items()):
        entry = catalog[signature]
        if entry.role in ("root", "cascade"):
            crowd = crowd_of(entry, members, known)
            if crowd is not None:
                found += _conclude(crowd, known, catalog)
    return found + _checks_by_count(events, catalog)


def crowd_of(entry: Signature, members: Sequence[Event], known: set[str]) -> Crowd | None:
    """The largest set of nodes that show a sign within WINDOW_S; None when it is smaller than LEAST_NODES."""
    timed = sorted((e for e in members if e.time_ns is not None), key=canonical)
    best: list[Event] = []
    begin = 0
    for end, last in enumerate(timed):
        while (last.time_ns or 0) - (timed[begin].time_ns or 0) > WINDOW_S * SECOND_NS:
            begin += 1
        inside = timed[begin : end + 1]
        if len({e.node for e in inside}) > len({e.node for e in best}):
            best = inside
    nodes = {e.node for e in best if e.node is not None}
    if len(nodes) >= LEAST_NODES:
        return Crowd(entry, best, frozenset(nodes))
    everywhere = {e.node for e in members if e.node is not None}
    if timed or len(everywhere) < max(LEAST_NODES, LEAST_SHARE_UNTIMED * len(known)):
        return None
    return Crowd(entry, sorted(members, key=canonical), frozenset(everywhere))


def _conclude(crowd: Crowd, known: set[str], catalog: Catalog) -> list[Event]:
    kind = crowd.entry.kind
    if kind.startswith("check."):
        if len(known) >= CHECK_NODES and len(crowd.nodes) >= LEAST_SHARE_CHECK * len(known):
            return [_event(catalog, "derived.common.check", crowd, {"of": len(known)})]
        return []
    if kind.startswith("storage.") or crowd.entry.scope == "storage":
        return [_event(catalog, "derived.common.storage", crowd, {})]
    if not kind.startswith(_LOCAL_KINDS) or not _takes_machines(crowd.entry):
        return []
    if kind.startswith(_FABRIC_KINDS) or _mainly(crowd.entry) == "fabric":
        return [_event(catalog, "derived.common.fabric", crowd, {})]
    if kind.startswith(_POWER_KINDS) or _mainly(crowd.entry) == "platform":
        return [_event(catalog, "derived.common.power", crowd, {})]
    return [_event(catalog, "derived.common.software", crowd, {})]


def _mainly(entry: Signature) -> FaultClass | None:
    """The class that a sign speaks for most."""
    return max(entry.weights, key=lambda c: entry.weights[c], default=None)


def _takes_machines(entry: Signature) -> bool:
    """Whether a sign blames a machine, its network or the platform. A program does the same on all machines by itself."""
    blamed = max(
        (w for name, w in entry.weights.items() if name in ("hardware", "fabric", "platform", "framework")), default=0.0
    )
    return blamed > 0 and blamed > entry.weights.get("user_code", 0.0)


def _event(catalog: Catalog, signature: str, crowd: Crowd, attrs: Mapping[str, object]) -> Event:
    first = crowd.events[0]
    shared = _shared(crowd.events)
    found = {
        "thing": str(first.attrs.get("check") or fill(crowd.entry.title, first)),
        "nodes": len(crowd.nodes),
        "names": sorted(crowd.nodes)[:64],
        "shared": f" ({shared})" if shared else "",
        **attrs,
    }
    return derive(catalog, signature, first, attrs=found, explains=[crowd.entry.id], placed=False)


def _shared(events: Sequence[Event]) -> str:
    """What all of them name alike, of what machines can share: "leaf sw-3"."""
    found = []
    for key in SHARED_KEYS:
        values = {str(e.attrs[key]) for e in events if key in e.attrs}
        if len(values) == 1 and all(key in e.attrs for e in events):
            found.append(f"{key.replace('_', ' ')} {values.pop()}")
    return ", ".join(found)


def _checks_by_count(events: Sequence[Event], catalog: Catalog) -> list[Event]:
    """Checks whose own report counts the nodes that fail: attributes `nodes_failed` and `nodes_total`."""
    found = []
    for event in events:
        failed, total = event.attrs.get("nodes_failed"), event.attrs.get("nodes_total")
        if not isinstance(failed, int) or not isinstance(total, int) or total < CHECK_NODES:
            continue
        if failed >= LEAST_SHARE_CHECK * total:
            attrs: dict[str, object] = {
                "thing": str(event.attrs.get("check", "")),
                "nodes": failed,
                "of": total,
                "shared": "",
            }
            found.append(
                derive(catalog, "derived.common.check", event, attrs=attrs, explains=[event.signature], placed=False)
            )
    return found
