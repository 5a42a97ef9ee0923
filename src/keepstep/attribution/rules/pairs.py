"""Which machines could not talk to each other: one node that all failing pairs share, one pair, or all from the first moment."""

from __future__ import annotations

import re
from collections.abc import Sequence
from typing import NamedTuple

import msgspec

from keepstep.attribution.order import canonical
from keepstep.attribution.rules.deriving import derive
from keepstep.attribution.rules.jobfacts import before, number, of, steps_before
from keepstep.catalog.load import Catalog
from keepstep.records.event import Event

WIRE = (
    "nccl.ib_retry_exceeded",
    "nccl.ib_receiver_not_ready",
    "nccl.ib_modify_qp_timeout",
    "nccl.ib_modify_qp",
    "nccl.connect_unreachable",
    "nccl.ofi_error",
)
"""Failures of a node to reach another."""

START_S = 300
"""Seconds of a job's life in which no step is made; set-up of thousands of ranks takes minutes."""
LEAST_NODES_FOR_COMMON = 3
LEAST_WITNESSES = 2
"""Nodes that must name a node before it is taken out."""

_ADDRESS = re.compile(r"^\[?(?P<host>[0-9a-fA-F.:]+|[\w.-]+?)(?:%\w+)?\]?(?:<(?P<port>\d+)>)?$")
_OWN_ADDRESS = re.compile(
    r"OOB [\w.-]+:(?P<address>[0-9a-fA-F.:]+?)(?:%\w+)?<\d+>|NET/Socket : Using \[\d+\][\w.-]+:(?P<socket>[0-9.]+)<"
)


class Pair(NamedTuple):
    """A node and the one it could not reach; names where addresses are known, else addresses."""

    node: str
    peer: str
    event: Event


def node_pairs(events: Sequence[Event], catalog: Catalog) -> list[Event]:
    """Which machines are to blame, and whether they ever talked."""
    failures = sorted(of(events, *WIRE), key=canonical)
    if not failures:
        return []
    pairs = _pairs(failures, _names(events))
    common = _common(pairs)
    if common is not None:
        peers = sorted({p.peer if p.node == common else p.node for p in pairs})
        basis = next(p.event for p in pairs if common in (p.node, p.peer))
        conclusion = derive(catalog, "derived.node_unreachable", basis, attrs={"peers": peers[:16], "culprit": common})
        return [_on(conclusion, common)]
    first = failures[0]
    attrs = {"pairs": sorted({f"{p.node} - {p.peer}" for p in pairs})[:16]}
    if _from_the_start(events, first):
        return [derive(catalog, "derived.transport_never_worked", first, attrs=attrs)]
    worked = steps_before(events, first) > 0 or _told(events) == "worked"
    if worked and len({frozenset((p.node, p.peer)) for p in pairs}) == 1:
        return [derive(catalog, "derived.link_failed", first, attrs=attrs)]
    return []


def _on(event: Event, node: str) -> Event:
    return msgspec.structs.replace(event, node=node, rank=None, gpu=None)


def _names(events: Sequence[Event]) -> dict[str, str]:
    """Node names by the addresses that NCCL said they use."""
    found: dict[str, str] = {}
    for event in of(events, "nccl.transport"):
        match = _OWN_ADDRESS.search(event.evidence.text)
        if match is not None and event.node is not None:
            found[match["address"] or match["socket"]] = event.node
    return found


def _pairs(failures: Sequence[Event], names: dict[str, str]) -> list[Pair]:
    found = []
    for event in failures:
        match = _ADDRESS.match(str(event.attrs.get("peer", "")))
        if event.node is not None and match is not None:
            peer = names.get(match["host"], match["host"])
            if peer != event.node:
                found.append(Pair(event.node, peer, event))
    return found


def _common(pairs: Sequence[Pair]) -> str | None:
    """The one node that is in all of several pairs, and that at least two others name.

    What a node alone complains of is not enough: addresses of peers may be other names of nodes that are known.
    """
    distinct = {frozenset((p.node, p.peer)) for p in pairs}
    if len(distinct) < 2 or len(frozenset().union(*distinct)) < LEAST_NODES_FOR_COMMON:
        return None
    shared = frozenset.intersection(*distinct)
    if len(shared) != 1:
        return None
    culprit = next(iter(shared))
    return culprit if len({p.node for p in pairs if p.peer == culprit}) >= LEAST_WITNESSES else None


def _from_the_start(events: Sequence[Event], first: Event) -> bool:
    """Whether the job is known to have made no step before the first failure."""
    told = _told(events)
    if told is not None or steps_before(events, first) > 0:
        return told == "start"
    starts = [e for e in of(events, "nccl.transport", "nccl.ready", "job.started") if before(e, first)]
    if not starts:
        return False
    latest = max(starts, key=canonical)
    if latest.time_ns is not None and first.time_ns is not None:
        return (first.time_ns - latest.time_ns) / 1e9 <= START_S
    return any(e.signature == "nccl.transport" for e in starts)


def _told(events: Sequence[Event]) -> str | None:
    """What somebody wrote about the job's life: "start" when it made no step, "worked" when it had run."""
    for event in of(events, "job.elapsed"):
        attrs = event.attrs
        iterations = 0 if str(attrs.get("iterations", "")).lower() == "no" else number(attrs.get("iterations"))
        if (iterations is not None and iterations > 0) or attrs.get("unit"):
            return "worked"
        seconds = number(attrs.get("seconds"))
        if iterations == 0 or attrs.get("start") or (seconds is not None and seconds <= START_S):
            return "start"
    return None


def transport_changes(events: Sequence[Event], catalog: Catalog) -> list[Event]:
    """Nodes that talk over another net, or fewer NICs, than they did before or than the others do."""
    by_node: dict[str, list[tuple[Event, str, int]]] = {}
    for event in sorted(of(events, "nccl.transport"), key=canonical):
        net = str(event.attrs.get("net", "")).split("/")[0].strip()
        if event.node is None or not net:
            continue
        nics = str(event.attrs.get("hca", "")).count("[")
        by_node.setdefault(event.node, []).append((event, net, nics))
    found: list[Event] = []
    latest: dict[str, tuple[Event, str, int]] = {}
    for node, uses in by_node.items():
        nets = [net for _, net, _ in uses]
        if nets[-1] == "Socket" and any(n != "Socket" for n in nets[:-1]):
            attrs = {"before": nets[0], "now": nets[-1]}
            found.append(derive(catalog, "derived.transport_changed", uses[-1][0], attrs=attrs))
        with_nics = [u for u in uses if u[2]]
        latest[node] = with_nics[-1] if with_nics else uses[-1]
    return found or _odd_one(latest, catalog) or _odd_gpu_direct(events, catalog)


def _odd_one(latest: dict[str, tuple[Event, str, int]], catalog: Catalog) -> list[Event]:
    """The few nodes that differ from most of at least three."""
    if len(latest) < LEAST_NODES_FOR_COMMON:
        return []
    usual_net = max({net for _, net, _ in latest.values()}, key=lambda n: sum(1 for u in latest.values() if u[1] == n))
    counts = [n for _, net, n in latest.values() if net == usual_net]
    usual_nics = max(set(counts), key=lambda n: (counts.count(n), n))
    odd = {node: u for node, u in latest.items() if u[1] != usual_net or u[2] < usual_nics}
    if not odd or 2 * len(odd) >= len(latest):
        return []
    return [
        derive(
            catalog,
            "derived.transport_odd",
            event,
            attrs={"usual": f"{usual_net}, {usual_nics} NICs", "now": f"{net}, {nics} NICs"},
        )
        for _, (event, net, nics) in sorted(odd.items())
    ]


def _odd_gpu_direct(events: Sequence[Event], catalog: Catalog) -> list[Event]:
    """The few nodes whose NICs may not reach GPU memory, where those of most may."""
    state: dict[str, Event] = {}
    for event in of(events, "nccl.gpu_direct"):
        if event.node is not None:
            known = state.get(event.node)
            if known is None or event.attrs.get("state") == "Disabled":
                state[event.node] = event
    off = [e for _, e in sorted(state.items()) if e.attrs.get("state") == "Disabled"]
    if len(state) < LEAST_NODES_FOR_COMMON or not off or 2 * len(off) >= len(state):
        return []
    attrs = {"usual": "with GPUDirect", "now": "without it"}
    return [derive(catalog, "derived.transport_odd", e, attrs=attrs) for e in off]


_SETTING = re.compile(r"\b(?P<name>NCCL_[A-Z0-9_]+)=(?P<value>\w+)")
_OFF = {
    ("NCCL_P2P_DISABLE", "1"): "derived.works_without_p2p",
    ("NCCL_P2P_LEVEL", "LOC"): "derived.works_without_p2p",
    ("NCCL_NET_GDR_LEVEL", "0"): "derived.works_without_gpu_direct",
    ("NCCL_NET_GDR_LEVEL", "LOC"): "derived.works_without_gpu_direct",
    ("NCCL_NET_GDR_READ", "0"): "derived.works_without_gpu_direct",
    ("NCCL_DMABUF_ENABLE", "0"): "derived.works_without_gpu_direct",
    ("NCCL_IB_DISABLE", "1"): "derived.works_without_rdma",
    ("NCCL_NVLS_ENABLE", "0"): "derived.works_without_nvls",
    ("NCCL_CUMEM_ENABLE", "0"): "derived.works_without_feature",
    ("NCCL_MNNVL_ENABLE", "0"): "derived.works_without_feature",
    ("NCCL_RAS_ENABLE", "0"): "derived.works_without_feature",
    ("NCCL_NET_PLUGIN", "none"): "derived.works_without_feature",
    ("NCCL_SHM_DISABLE", "1"): "derived.works_without_shared_memory",
}
"""What is switched off by a setting with which a job works that does not work without."""
_WORKS = re.compile(
    r"(?i)\b(?:works?|worked|working|ok|okay|pass(?:es|ed)?|fixe[sd]|fixed|helps?|helped|resolve[sd]|succe\w+|"
    r"no (?:hang|error)s?|runs? fine|#wrong +0)\b"
)
_WORKS_NOT = re.compile(r"(?i)\b(?:not|n't|still|no longer|fails?|hangs?|without (?:effect|success))\b")


def workarounds(events: Sequence[Event], catalog: Catalog) -> list[Event]:
    """What a setting with which it works tells: the thing that was switched off is what does not."""
    failed = {e.source for e in events if catalog[e.signature].severity in ("error", "fatal")}
    for event in events:
        text = event.evidence.text if event.signature == "job.setting_tried" else ""
        titled = event.source if event.signature in ("job.progress", "nccl.test_passed") else ""
        if titled in failed or not failed:
            titled = ""
        for setting in _SETTING.finditer(f"{titled} {text}"[:2000]):
            signature = _OFF.get((setting["name"], setting["value"]))
            works = bool(titled) or (_WORKS.search(text) is not None and _WORKS_NOT.search(text) is None)
            if signature is not None and works:
                return [derive(catalog, signature, event, attrs={"setting": setting.group(0)})]
    return []
