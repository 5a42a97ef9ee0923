"""What an event is about: its node, GPU, NIC and rank in one spelling, completed from what other events and cycle records say."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from types import MappingProxyType
from typing import Any, NamedTuple

from keepstep.catalog.signature import Scope
from keepstep.records.cycle import Cycle
from keepstep.records.event import Event, Gpu


class Place(NamedTuple):
    """None: not known. `gpu` is one name for all names of one GPU."""

    node: str | None = None
    gpu: str | None = None
    nic: str | None = None
    rank: int | None = None
    job: str | None = None


class RankMap(NamedTuple):
    """Where ranks ran. `nodes`: all of the job, empty where that is not known. `gpus`: (node, PCI address, UUID) of a rank."""

    node_of: Mapping[int, str] = MappingProxyType({})
    gpus: Mapping[int, tuple[str, str | None, str | None]] = MappingProxyType({})
    nodes: frozenset[str] = frozenset()


def map_of_cycle(cycle: Cycle) -> RankMap:
    """Where the ranks of a recorded cycle ran."""
    return RankMap(
        node_of={p.rank: p.node for p in cycle.ranks},
        gpus={p.rank: (p.node, p.pci, p.gpu_uuid) for p in cycle.ranks if p.pci or p.gpu_uuid},
        nodes=frozenset(cycle.active_nodes) | {p.node for p in cycle.ranks},
    )


def map_of_events(events: Iterable[Event]) -> RankMap:
    """Where ranks ran by events that name both a rank and a node; a rank that is seen on two nodes is on none."""
    seen: dict[int, set[str]] = {}
    for event in events:
        if event.rank is not None and event.node is not None and "about_rank" not in event.attrs:
            seen.setdefault(event.rank, set()).add(event.node)
    return RankMap(node_of={rank: next(iter(nodes)) for rank, nodes in seen.items() if len(nodes) == 1})


def about_rank(event: Event) -> int | None:
    """The rank an event is about: the one it reports on, else the one that reports."""
    rank = event.attrs.get("about_rank")
    return rank if isinstance(rank, int) and not isinstance(rank, bool) else event.rank


_Name = tuple[str, str, str]


class Places:
    """Resolves events to places. All names of a GPU that occur together in any event are one GPU."""

    def __init__(self, events: Sequence[Event], ranks: RankMap) -> None:
        found = map_of_events(events)
        self.ranks = RankMap({**found.node_of, **ranks.node_of}, ranks.gpus, ranks.nodes)
        # An input that names one node only is about that node: `dmesg` prints no host name.
        nodes = {e.node for e in events if e.node is not None}
        self._sole = next(iter(nodes)) if len(nodes) == 1 else None
        self._parent: dict[_Name, _Name] = {}
        for event in events:
            self._join(self._names(self.node(event), event.gpu))
        for node, pci, uuid in ranks.gpus.values():
            self._join(self._names(node, Gpu(pci=pci, uuid=uuid)))

    def node(self, event: Event) -> str | None:
        """Node of an event: as it says, else where its rank ran, else the only node there is."""
        rank = about_rank(event)
        own = event.node if rank == event.rank or rank is None else None
        return own or (self.ranks.node_of.get(rank) if rank is not None else None) or self._sole

    def place(self, event: Event, scope: Scope) -> Place:
        """The place of an event of this scope. The node of a job-wide event is where it was seen, not what it is about."""
        rank = about_rank(event)
        node = self.node(event)
        if scope in ("job", "cluster", "storage") and event.node is None:
            node = None
        names = self._names(node, event.gpu)
        if not names and rank is not None and rank in self.ranks.gpus:
            at, pci, uuid = self.ranks.gpus[rank]
            names = self._names(at, Gpu(pci=pci, uuid=uuid))
        gpu = self._shown(names[0]) if names else None
        return Place(node, gpu, event.nic, rank, event.job)

    def _names(self, node: str | None, gpu: Gpu | None) -> list[_Name]:
        if gpu is None:
            return []
        where = node or ""
        # Best name first. A UUID is unique in the world, the others on their node.
        given: list[tuple[str, Any, str]] = [
            ("pci", gpu.pci, where), ("uuid", gpu.uuid, ""), ("index", gpu.index, where), ("serial", gpu.serial, "")
        ]  # fmt: skip
        return [(kind, at, str(value)) for kind, value, at in given if value is not None]

    def _root(self, name: _Name) -> _Name:
        while self._parent.setdefault(name, name) != name:
            name = self._parent[name]
        return name

    def _join(self, names: list[_Name]) -> None:
        for name in names[1:]:
            one, other = sorted((self._root(names[0]), self._root(name)), key=_worth)
            self._parent[other] = one

    def _shown(self, name: _Name) -> str:
        kind, _, value = self._root(name)
        return f"GPU {value}" if kind == "index" else value


def _worth(name: _Name) -> tuple[int, _Name]:
    """Order of names of one GPU: a PCI address is what a kernel log and a technician use."""
    return (("pci", "uuid", "index", "serial").index(name[0]), name)


def same(one: Place, other: Place, scope: Scope) -> bool | None:
    """Whether two places are one thing of this scope. None: one of them does not say."""
    if scope in ("cluster", "storage"):
        return True
    if scope == "job":
        return None if one.job is None or other.job is None else one.job == other.job
    if one.node is not None and other.node is not None and one.node != other.node and scope != "rank":
        return False
    if scope == "node":
        return None if one.node is None or other.node is None else True
    pairs: dict[str, tuple[object, object]] = {
        "gpu": (one.gpu, other.gpu), "nic": (one.nic, other.nic), "rank": (one.rank, other.rank)
    }  # fmt: skip
    mine, its = pairs[scope]
    return None if mine is None or its is None else mine == its


UNMAPPED = RankMap()
"""Nothing is known of where ranks ran."""
