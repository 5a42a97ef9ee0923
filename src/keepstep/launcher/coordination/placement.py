"""Which node gets which ranks in the next cycle. Pure: the same input gives the same result.

Terms: a seat is a place in the rank order with a number of ranks; a block is the least number of nodes with the same number of
ranks that holds whole replicas (one node when its ranks are a multiple of the replica size; two when a replica spans two).
A replica never spans nodes with different numbers of ranks, so a job can lose or gain whole blocks only.
"""

from __future__ import annotations

import math
from collections import Counter, deque
from collections.abc import Iterable, Mapping, Sequence
from typing import Any, Literal

import msgspec

from keepstep.launcher.coordination.topology import choose, distance, order, scatter

PlacementPath = Literal["first", "respawn", "spare", "shrink", "grow"]
Seats = Sequence[tuple[str, int]]
"""(node, ranks) in rank order."""


class Candidate(msgspec.Struct, frozen=True, kw_only=True):
    """A node that may take part."""

    name: str
    host: str
    nproc: int
    levels: list[str] = []
    joined: int = 0
    """Sequence number of joining; on a tie the lower goes first."""


class Shape(msgspec.Struct, frozen=True, kw_only=True):
    """The size of a job as the user asked for it."""

    nnodes: int
    """Nodes that train at most."""
    min_nodes: int
    """Nodes that train at least; equal to `nnodes`: the job never shrinks."""
    spares: int = 0
    replica_size: int = 1
    """Ranks of one model-parallel replica."""


class Placement(msgspec.Struct, frozen=True, kw_only=True):
    """The nodes of the next cycle."""

    nodes: list[Candidate]
    """In rank order: local rank 0 of a node follows the last rank of the node before."""
    spares: list[Candidate]
    """All other usable candidates, in the order in which they joined."""
    path: PlacementPath
    """"respawn": every node as before. "spare": as before, but for the substitutes. "shrink": fewer ranks. "grow": more ranks
    (or the same number on other nodes, when lost nodes were made up for by nodes with another number of ranks)."""
    substitutes: list[tuple[str, str]] = []
    """(lost node, the node that took its ranks)."""
    scatter: dict[str, Any]
    """See keepstep.launcher.coordination.topology.scatter."""

    @property
    def world_size(self) -> int:
        return sum(node.nproc for node in self.nodes)


class Waiting(msgspec.Struct, frozen=True, kw_only=True):
    """No placement yet."""

    reason: str
    missing: int
    """At least so many more nodes must come."""


def block_nodes(replica_size: int, nproc: int) -> int:
    """Least number of nodes with `nproc` ranks each whose ranks are a whole number of replicas."""
    return replica_size // math.gcd(replica_size, nproc)


def place(
    shape: Shape,
    candidates: Sequence[Candidate],
    previous: Seats | None,
    lost: frozenset[str] | set[str],
    *,
    places: Mapping[str, Sequence[str]] | None = None,
    wait_for_nodes: bool = True,
    wait_for_spares: bool = True,
) -> Placement | Waiting:
    """Place the next cycle, or say why that must wait.

    First cycle (`previous` is None or empty): the most nodes that fit, by the rule of `topology.choose`, in topology order. The
    caller's patience: `wait_for_nodes` while fewer than `nnodes` are there (without effect unless the job may be smaller),
    `wait_for_spares` while the spares are not all there.

    Later cycles, `previous` in rank order:
    1. A node that is still usable with the same number of ranks keeps its seat, also when it went away and came back.
    2. An empty seat, in rank order, goes to the nearest usable node without a seat and with the same number of ranks: least
       `distance` to the levels of the seat's last holder, then the one that joined first, then by name.
    3. When seats stay empty and the job may shrink, whole blocks are dropped: those with most empty seats, then the last ones.
       What is left moves up in the same order; whole nodes of a dropped block can fill seats of others, or become spares.
    4. When more nodes fit than before, up to `nnodes`, whole blocks of the nearest ones are added, and the rank order becomes
       topology order with earlier holders first. Where nodes differ in their ranks, the most may be a mix without some of those.

    `lost`: nodes that must not be used, lost or excluded. `places`: levels of nodes that are no candidates any more.
    Of two candidates with one name the one that joined first counts.
    """
    usable: dict[str, Candidate] = {}
    for candidate in sorted(candidates, key=lambda c: (c.joined, c.name)):
        if candidate.name not in lost and candidate.nproc > 0:
            usable.setdefault(candidate.name, candidate)
    if not previous:
        return _first(shape, usable, wait_for_nodes, wait_for_spares)
    levels_of = {**(places or {}), **{candidate.name: candidate.levels for candidate in candidates}}
    return _later(shape, usable, previous, levels_of)


# ---- first cycle


def _first(
    shape: Shape, usable: Mapping[str, Candidate], wait_for_nodes: bool, wait_for_spares: bool
) -> Placement | Waiting:
    here = len(usable)
    needed = shape.nnodes if wait_for_nodes else shape.min_nodes
    if here < needed:
        return Waiting(reason=f"{here} of {needed} nodes are here", missing=needed - here)
    blocks, total = _blocks(shape, usable.values(), Counter())
    if total < max(shape.min_nodes, 1):
        return _no_fit(shape, here, total)
    wanted = shape.nnodes + shape.spares
    if wait_for_spares and shape.nnodes <= here < wanted:
        reason = f"{here} of {shape.nnodes} nodes and {shape.spares} spares are here"
        return Waiting(reason=reason, missing=wanted - here)
    chosen: list[Candidate] = []
    for nproc, count in blocks.items():
        block = block_nodes(shape.replica_size, nproc)
        chosen += _choose([c for c in usable.values() if c.nproc == nproc], count * block, block)
    return _placement(shape, usable, _rank_order(shape, chosen, ()), "first", [])


def _no_fit(shape: Shape, here: int, total: int) -> Waiting:
    return Waiting(
        reason=f"of {here} usable nodes {total} hold whole replicas of {shape.replica_size} ranks; "
        f"the job needs {shape.min_nodes}",
        missing=max(shape.min_nodes - total, 1),
    )


def _choose(candidates: Sequence[Candidate], count: int, block: int) -> list[Candidate]:
    by_name = {c.name: c for c in candidates}
    ordered = [by_name[name] for name in order({c.name: c.levels for c in candidates})]
    return [ordered[index] for index in choose([c.levels for c in ordered], count, block)]


def _rank_order(shape: Shape, nodes: Sequence[Candidate], first: Sequence[str]) -> list[Candidate]:
    """Topology order; when replicas span nodes and numbers of ranks differ, those with most ranks go first as one part."""
    by_name = {c.name: c for c in nodes}
    names = order({c.name: c.levels for c in nodes}, first)
    kinds = {c.nproc for c in nodes}
    if len(kinds) > 1 and any(block_nodes(shape.replica_size, nproc) > 1 for nproc in kinds):
        names.sort(key=lambda name: -by_name[name].nproc)
    return [by_name[name] for name in names]


def _blocks(shape: Shape, usable: Iterable[Candidate], before: Counter[int]) -> tuple[dict[int, int], int]:
    """Blocks to use of each number of ranks, and the nodes they have: the most that fit in `nnodes`.

    Among equals, the kinds that had most nodes before (`before`: blocks of the last cycle) get as many as leave room for what
    the other kinds had.
    """
    there = Counter(c.nproc for c in usable)
    size = {nproc: block_nodes(shape.replica_size, nproc) for nproc in there}
    kinds = sorted(there, key=lambda nproc: (-before[nproc] * size[nproc], -there[nproc], nproc))
    # reach[i] has bit n set when the kinds from i on can make exactly n nodes of whole blocks.
    reach = [1]
    for nproc in reversed(kinds):
        reach.append(_reachable(reach[-1], size[nproc], there[nproc] // size[nproc], shape.nnodes))
    reach.reverse()
    total = left = reach[0].bit_length() - 1
    keep = {nproc: min(before[nproc], there[nproc] // size[nproc]) * size[nproc] for nproc in kinds}
    blocks: dict[int, int] = {}
    for at, nproc in enumerate(kinds):
        most = min(there[nproc], left) // size[nproc]
        others = sum(keep[other] for other in kinds[at + 1 :])
        rests = {count: left - count * size[nproc] for count in range(most + 1)}
        fits = [count for count, rest in rests.items() if reach[at + 1] >> rest & 1]
        blocks[nproc] = min(fits, key=lambda count: (max(0, others - rests[count]), -count))
        left -= blocks[nproc] * size[nproc]
    return blocks, total


def _reachable(bits: int, size: int, count: int, limit: int) -> int:
    step = 1
    while count > 0:
        bits |= bits << (min(step, count) * size)
        count -= step
        step *= 2
    return bits & ((1 << (limit + 1)) - 1)


# ---- later cycles


def _later(
    shape: Shape, usable: Mapping[str, Candidate], previous: Seats, levels_of: Mapping[str, Sequence[str]]
) -> Placement | Waiting:
    seats, substitutes = _fill(previous, usable, levels_of)
    empty = sum(holder is None for holder in seats)
    if empty and shape.min_nodes >= shape.nnodes:
        lost = [name for (name, _), holder in zip(previous, seats, strict=True) if holder is None]
        shown = ", ".join(lost[:8]) + (", ..." if len(lost) > 8 else "")
        return Waiting(reason=f"no spare with the same number of ranks for {shown}", missing=empty)
    parts = _split(shape, previous)
    before = Counter(previous[part[0]][1] for part in parts)
    blocks, total = _blocks(shape, usable.values(), before)
    if not empty and total <= len(previous):
        nodes = [holder for holder in seats if holder is not None]
        return _placement(shape, usable, nodes, "spare" if substitutes else "respawn", substitutes)
    if total < max(shape.min_nodes, 1):
        return _no_fit(shape, len(usable), total)
    return _reshape(shape, usable, previous, parts, blocks, levels_of)


def _reshape(
    shape: Shape,
    usable: Mapping[str, Candidate],
    previous: Seats,
    parts: Sequence[Sequence[int]],
    blocks: Mapping[int, int],
    levels_of: Mapping[str, Sequence[str]],
) -> Placement:
    """Drop or add blocks so that there are `blocks` of each number of ranks (nproc -> count)."""

    def gaps(part: Sequence[int]) -> int:
        return sum(_holder(usable, *previous[at]) is None for at in part)

    stay: list[int] = []
    missing = dict(blocks)
    for part in sorted(parts, key=lambda part: (gaps(part), part[0])):
        nproc = previous[part[0]][1]
        if missing.get(nproc, 0) > 0:
            missing[nproc] -= 1
            stay += part
    kept, substitutes = _fill([previous[at] for at in sorted(stay)], usable, levels_of)
    nodes = [holder for holder in kept if holder is not None]
    added: list[Candidate] = []
    for nproc, count in missing.items():
        seated = {c.name for c in nodes}
        free = [c for c in usable.values() if c.nproc == nproc and c.name not in seated]
        added += _nearest(free, nodes, count, block_nodes(shape.replica_size, nproc))
    if added:
        nodes = _rank_order(shape, [*nodes, *added], [c.name for c in nodes])
    shrinks = sum(c.nproc for c in nodes) < sum(nproc for _, nproc in previous)
    return _placement(shape, usable, nodes, "shrink" if shrinks else "grow", substitutes)


def _holder(usable: Mapping[str, Candidate], name: str, nproc: int) -> Candidate | None:
    candidate = usable.get(name)
    return candidate if candidate is not None and candidate.nproc == nproc else None


def _split(shape: Shape, previous: Seats) -> list[list[int]]:
    """Seats (indices) block by block. Seats that are no whole block, as after a change of the shape, are left out."""
    parts: list[list[int]] = []
    part: list[int] = []
    ranks = 0
    for at, (_, nproc) in enumerate(previous):
        part.append(at)
        ranks += nproc
        if ranks % shape.replica_size == 0:
            if len({previous[seat][1] for seat in part}) == 1:
                parts.append(part)
            part = []
    return parts


def _fill(
    seats: Seats, usable: Mapping[str, Candidate], levels_of: Mapping[str, Sequence[str]]
) -> tuple[list[Candidate | None], list[tuple[str, str]]]:
    """Holders of the seats by rules 1 and 2 of `place` (None: nobody), and the (lost, substitute) pairs."""
    holders = [_holder(usable, name, nproc) for name, nproc in seats]
    seated = {holder.name for holder in holders if holder is not None}
    # Free nodes of one place are alike but for who joined first, so only the first of each place is compared.
    free: dict[tuple[int, tuple[str, ...]], deque[Candidate]] = {}
    for candidate in usable.values():
        if candidate.name not in seated:
            free.setdefault((candidate.nproc, tuple(candidate.levels)), deque()).append(candidate)
    substitutes: list[tuple[str, str]] = []
    for at, (name, nproc) in enumerate(seats):
        if holders[at] is not None:
            continue
        near = levels_of.get(name, ())
        heads = [queue[0] for (ranks, _), queue in free.items() if ranks == nproc and queue]
        if heads:
            best = min(heads, key=lambda c: (distance(near, c.levels), c.joined, c.name))
            free[nproc, tuple(best.levels)].popleft()
            holders[at] = best
            substitutes.append((name, best.name))
    return holders, substitutes


def _nearest(free: Sequence[Candidate], nodes: Sequence[Candidate], blocks: int, block: int) -> list[Candidate]:
    """The `blocks * block` free nodes nearest to any of `nodes`, ties in topology order; the best ones when there are none."""
    if not nodes:
        return _choose(free, blocks * block, block)
    groups = {tuple(c.levels[:depth]) for c in nodes for depth in range(len(c.levels) + 1)}

    def outside(candidate: Candidate) -> int:
        levels = candidate.levels
        return sum(tuple(levels[: depth + 1]) not in groups for depth in range(len(levels)))

    by_name = {c.name: c for c in free}
    ordered = sorted((by_name[name] for name in order({c.name: c.levels for c in free})), key=outside)
    return ordered[: blocks * block]


def _placement(
    shape: Shape,
    usable: Mapping[str, Candidate],
    nodes: list[Candidate],
    path: PlacementPath,
    substitutes: list[tuple[str, str]],
) -> Placement:
    seated = {c.name for c in nodes}
    kinds = {c.nproc for c in nodes}
    block = block_nodes(shape.replica_size, kinds.pop()) if len(kinds) == 1 else 1
    return Placement(
        nodes=nodes,
        spares=[c for c in usable.values() if c.name not in seated],
        path=path,
        substitutes=substitutes,
        scatter=scatter([c.levels for c in nodes], [c.levels for c in usable.values()], block),
    )
