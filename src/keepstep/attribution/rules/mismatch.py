"""Ranks that called different collectives at one point, or a different number of them: the program took different ways."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence

from keepstep.attribution.rules.deriving import derive
from keepstep.attribution.rules.jobfacts import Wait, waits
from keepstep.catalog.load import Catalog
from keepstep.records.event import Event

ALIKE = frozenset(
    {
        "ALLREDUCE",
        "BROADCAST",
        "REDUCE",
        "ALLGATHER",
        "_ALLGATHER_BASE",
        "REDUCE_SCATTER",
        "_REDUCE_SCATTER_BASE",
        "BARRIER",
    }
)
"""Collectives whose sizes are the same on all ranks of a group. Not all-to-all, gather and scatter, and nothing coalesced."""

GROUPED = frozenset({"COALESCED", "_COALESCED", "SEND", "RECV", "UNKNOWN"})
"""Entries that stand for several calls, or for one side of a pair: one rank's send is another's receive."""

NEAR = 8
"""Counters of one group differ by a few calls where ranks parted; further apart they are of different groups."""

FEW_RANKS = 16
"""Up to so many ranks that print no group a job has, as a rule, one group; above, groups of several kinds count alike."""


def mismatches(events: Sequence[Event], catalog: Catalog) -> list[Event]:
    """A conclusion where waiting ranks of one group do not wait in the same call."""
    by_group: dict[str | None, list[Wait]] = defaultdict(list)
    for wait in waits(events):
        if wait.rank is not None and wait.seq is not None and wait.op and wait.op not in GROUPED:
            by_group[wait.group].append(wait)
    found: list[Event] = _without_numbers(events, catalog) + _splits(events, catalog)
    for group, members in by_group.items():
        if group is not None or len({m.rank for m in members}) <= FEW_RANKS:
            found += _in_group(group, members, catalog)
    return found


def _without_numbers(events: Sequence[Event], catalog: Catalog) -> list[Event]:
    """Time-outs of versions that print no sequence: few ranks that all wait, in calls of different kinds."""
    waiting = [w for w in waits(events) if w.rank is not None and w.op and w.event.kind == "collective.timeout"]
    first: dict[int, Wait] = {}
    for wait in waiting:
        first.setdefault(wait.rank or 0, wait)
    ops = {w.op for w in first.values()}
    if any(w.seq is not None for w in waiting) or not 2 <= len(first) <= FEW_RANKS or len(ops) < 2 or ops & GROUPED:
        return []
    attrs = {"seq": "?", "ops": sorted(ops), "how": "likely"}
    return [derive(catalog, "derived.collective_mismatch", waiting[0].event, attrs=attrs)]


MOST_SPLIT = 256
"""Ranks whose lists of parts are compared pair by pair."""


def _splits(events: Sequence[Event], catalog: Catalog) -> list[Event]:
    """All-to-all calls in which a rank expects another number of rows than its peer sends."""
    calls: dict[tuple[object, object], dict[int, Event]] = defaultdict(dict)
    for event in events:
        if event.signature == "fr.call" and event.rank is not None and event.attrs.get("splits_out"):
            calls[event.attrs.get("pg_name"), event.attrs.get("seq")].setdefault(event.rank, event)
    for (_, seq), by_rank in calls.items():
        ranks = sorted(by_rank)[:MOST_SPLIT]
        for place, rank in enumerate(ranks):
            expected = by_rank[rank].attrs.get("splits_out")
            for peer_place, peer in enumerate(ranks):
                sent = by_rank[peer].attrs.get("splits_in")
                if not isinstance(sent, list) or not isinstance(expected, list):
                    continue
                if place < len(sent) == len(ranks) == len(expected) and sent[place] != expected[peer_place]:
                    sizes = [f"rank {peer} sends {sent[place]}", f"rank {rank} expects {expected[peer_place]}"]
                    attrs = {"seq": seq, "op": "ALLTOALL", "sizes": sizes, "how": "certain"}
                    return [derive(catalog, "derived.size_mismatch", by_rank[rank], attrs=attrs)]
    return []


def _in_group(group: str | None, members: Sequence[Wait], catalog: Catalog) -> list[Event]:
    first_of_rank: dict[int, Wait] = {}
    for wait in members:
        # A rank whose later works time out too: the first is where it is stuck.
        known = first_of_rank.get(wait.rank or 0)
        if known is None or (wait.seq or 0) < (known.seq or 0):
            first_of_rank[wait.rank or 0] = wait
    stuck = list(first_of_rank.values())
    by_seq: dict[int, list[Wait]] = defaultdict(list)
    for wait in stuck:
        by_seq[wait.seq or 0].append(wait)
    sure = "certain" if group is not None else "likely"
    for seq, same in sorted(by_seq.items()):
        ops = {w.op for w in same}
        if len(ops) > 1:
            attrs = {"seq": seq, "ops": sorted(ops), "how": sure}
            return [derive(catalog, "derived.collective_mismatch", same[0].event, attrs=attrs)]
        sizes = {w.numel for w in same if w.numel != ("", "")}
        if len(sizes) > 1 and ops <= ALIKE:
            attrs = {"seq": seq, "op": same[0].op, "sizes": sorted(sizes)[:8], "how": sure}
            return [derive(catalog, "derived.size_mismatch", same[0].event, attrs=attrs)]
    if len(by_seq) > 1 and (group is not None or len({w.op for w in stuck}) == 1):
        low, high = min(by_seq), max(by_seq)
        if group is None and high - low > NEAR:
            return []
        behind = sorted(w.rank for w in by_seq[low] if w.rank is not None)
        attrs = {"seq": low, "highest": high, "behind": behind[:16]}
        signature = "derived.sequence_desync" if group is not None else "derived.sequence_desync_likely"
        return [derive(catalog, signature, by_seq[low][0].event, attrs=attrs)]
    return []
