"""What would have decided a verdict and was not there."""

from __future__ import annotations

from collections.abc import Sequence

from keepstep.attribution.causes import Seen
from keepstep.attribution.places import RankMap
from keepstep.records.event import Event
from keepstep.records.verdict import FaultClass, Tier

_KERNEL_KINDS = ("gpu.xid", "gpu.sxid", "host.oom", "host.mce", "pcie.aer", "kernel.")
_WATCHER_KINDS = frozenset({"collective.timeout", "rank.stall"})


def missing(
    fault_class: FaultClass, tier: Tier, seen: Sequence[Seen], events: Sequence[Event], ranks: RankMap
) -> list[str]:
    """What to look for next, most useful first. Nothing for a verdict that is certain."""
    if tier == "certain":
        return []
    wanted = []
    failed = [s for s in seen if s.entry.role in ("root", "cascade", "symptom")]
    kernel = any(s.entry.stream == "kernel" or s.entry.kind.startswith(_KERNEL_KINDS) for s in seen)
    if failed and not kernel and fault_class in ("unknown", "hardware", "fabric", "framework"):
        nodes = sorted({s.place.node for s in failed if s.place.node is not None})
        of = (
            f" of {', '.join(nodes[:3])}{', ...' if len(nodes) > 3 else ''}" if nodes else " of the failed ranks' nodes"
        )
        wanted.append(f"no kernel log{of} for the time of the fault (journalctl -k, dmesg -T)")
    hung = any(s.entry.kind in _WATCHER_KINDS for s in seen)
    if hung and not any(s.entry.kind.startswith("hang.") or s.entry.id.startswith(("hang.", "fr.")) for s in seen):
        wanted.append(
            "no flight-recorder dumps (TORCH_NCCL_TRACE_BUFFER_SIZE, TORCH_NCCL_DUMP_ON_TIMEOUT): who did not come"
        )
    silent = silent_ranks(events, ranks)
    if silent and (hung or fault_class == "unknown"):
        wanted.append(f"no output of rank{'s' if len(silent) > 1 else ''} {_shown(silent)}")
    if fault_class in ("unknown", "platform") and not any(s.entry.kind.startswith("sched.") for s in seen):
        wanted.append("no record of the scheduler (sacct -j JOB, kubectl describe pod)")
    if fault_class == "fabric" and not any(s.entry.kind.startswith(("ib.", "nic.")) for s in seen):
        wanted.append("no port counters or link states of the NICs (ibstat, perfquery, ethtool -S)")
    return wanted


def silent_ranks(events: Sequence[Event], ranks: RankMap) -> list[int]:
    """Ranks between the known ones of which nothing was read; the ranks of the job where they are known."""
    heard = {e.rank for e in events if e.rank is not None}
    known = set(ranks.node_of) or (set(range(max(heard) + 1)) if len(heard) > 1 else set())
    return sorted(known - heard)


def _shown(ranks: Sequence[int]) -> str:
    shown = ", ".join(str(r) for r in ranks[:8])
    return shown if len(ranks) <= 8 else f"{shown} and {len(ranks) - 8} more"
