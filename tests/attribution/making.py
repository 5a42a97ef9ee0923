"""A small catalog of its own and short ways to make events, so that tests of the engine do not move with the shipped data."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from keepstep.attribution.places import UNMAPPED, RankMap
from keepstep.attribution.rules.common_cause import common_cause
from keepstep.attribution.verdict import Judgement
from keepstep.attribution.verdict import judge as judge_by_all_rules
from keepstep.catalog.load import Catalog
from keepstep.catalog.signature import Signature
from keepstep.records.event import Event, Evidence, Gpu
from keepstep.records.verdict import Action, FaultClass, Verdict

S = 1_000_000_000
T0 = 1_900_000_000 * S
GPU = "0000:3b:00.0"


def entry(
    name: str,
    role: Any = "root",
    scope: Any = "rank",
    depth: int = 5,
    weights: dict[FaultClass, float] | None = None,
    action: Action | None = None,
    **more: Any,
) -> Signature:
    """An entry with what a test cares about."""
    fields: dict[str, Any] = {"kind": "test.thing", "title": name, "severity": "error", "source": "made for a test"}
    return Signature(
        id=name, role=role, scope=scope, depth=depth, weights=weights or {}, action=action, **(fields | more)
    )


CATALOG = Catalog(
    [
        entry("gpu.gone", "root", "gpu", 0, {"hardware": 5.0}, "cordon_node", severity="fatal", kind="gpu.xid"),
        entry("gpu.gone_back", "recovery", "gpu", 1, clears=("gpu.gone",), severity="info"),
        entry("gpu.wearing", "root", "gpu", 1, {"hardware": 3.0}, "drain_at_checkpoint", kind="gpu.ecc"),
        entry("gpu.dirty", "root", "gpu", 1, {"hardware": 3.0}, "reset_gpu", kind="gpu.xid"),
        entry("gpu.no_spare", "root", "gpu", 2, {"hardware": 4.0}, "cordon_node", kind="gpu.row_remap"),
        entry("gpu.firmware", "root", "gpu", 3, {"hardware": 2.2, "framework": 2.0}, "reset_gpu", kind="gpu.xid"),
        entry("gpu.hint", "root", "gpu", 0, {"hardware": 0.8}, "ask_human", severity="warning"),
        entry("gpu.maybe", "root", "gpu", 1, {"hardware": 1.4}, "cordon_node"),
        entry("link.down", "root", "nic", 0, {"fabric": 4.0}, "cordon_node", kind="nic.link"),
        entry("store.slow", "root", "storage", 2, {"storage": 3.0}, "restart_job", kind="storage.error"),
        entry("node.lost", "root", "node", 2, {"platform": 3.0}, "restart_job", kind="sched.node_fail"),
        entry("node.repaired", "recovery", "node", 2, clears=("gpu.*",), severity="info"),
        entry("node.back", "recovery", "node", 2, clears=("node.*",), severity="info"),
        entry("cuda.error", "root", "rank", 4, {"hardware": 0.5, "user_code": 0.5}, "ask_human", kind="rank.exception"),
        entry("script.error", "root", "rank", 5, {"user_code": 4.0}, "fail_fast", kind="rank.exception"),
        entry("lib.error", "root", "rank", 5, {"framework": 4.0}, "restart_job", kind="rank.exception"),
        entry("lib.twin", "root", "rank", 5, {"framework": 4.2}, "restart_job", kind="rank.exception"),
        entry("lib.benign", "root", "job", 5, {"framework": 3.0}, "none", severity="warning"),
        entry("peer.gone", "cascade", "rank", 7, {"fabric": 0.3}, "restart_job", kind="collective.abort"),
        entry("watchdog", "symptom", "rank", 8, kind="collective.timeout"),
        entry("idle.clock", "noise", "gpu", 5, severity="info"),
        entry("probe.noise", "noise", "job", 5, {"framework": 1.0}, severity="warning"),
        entry("chatter", "noise", "rank", 5, severity="warning"),
        entry("job.progress", "recovery", "job", 9, kind="job.progress", severity="info"),
        entry("job.completed", "recovery", "job", 9, severity="info", kind="sched.completed"),
        entry("gpu.check.passed", "context", "node", 5, {"hardware": -3.0}, kind="check.passed", severity="info"),
        entry("before_first_step", "context", "job", 5, {"user_code": 1.0, "fabric": -1.0}, severity="info"),
        entry("derived.all_late", "root", "job", 4, {"framework": 4.5}, "ask_human"),
        *(
            entry(f"xid.{code}", "root", "gpu", 4, {"hardware": 6.0}, "cordon_node", kind="gpu.xid")
            for code in (13, 31, 43, 45)
        ),
        entry("torch.cuda_oom", "root", "node", 4, {"hardware": 6.0}, "cordon_node"),
        entry("nccl.desync", "root", "node", 4, {"hardware": 6.0}, "drain_at_checkpoint"),
        entry("nccl.mismatch", "root", "node", 4, {"hardware": 6.0}, "reset_gpu"),
        entry("never.cordons", "root", "node", 1, {"hardware": 6.0}, "cordon_node", never=("cordon_node",)),
        entry("script.cordons", "root", "node", 1, {"user_code": 6.0}, "cordon_node"),
        entry("anywhere.cordons", "root", "job", 1, {"hardware": 6.0}, "cordon_node"),
    ]
)


def event(
    name: str,
    at: float | None = 0.0,
    *,
    node: str | None = None,
    gpu: str | None = None,
    rank: int | None = None,
    path: str = "a.log",
    line: int = 1,
    **more: Any,
) -> Event:
    """An event of the small catalog, `at` seconds after T0 (None: without a time)."""
    signature = CATALOG[name]
    fields: dict[str, Any] = {"time_quality": "exact" if at is not None else "none"}
    return Event(
        kind=signature.kind,
        signature=name,
        severity=signature.severity,
        source="text",
        time_ns=None if at is None else T0 + round(at * S),
        order=line,
        node=node,
        gpu=Gpu(pci=gpu) if gpu else None,
        rank=rank,
        evidence=Evidence(path=path, line=line, text=f"{name} {at}"),
        **(fields | more),
    )


def judge(events: Sequence[Event], catalog: Catalog, ranks: RankMap = UNMAPPED) -> Judgement:
    """The engine without the rules of areas, which know the shipped catalog."""
    return judge_by_all_rules(events, catalog, ranks, rules=(common_cause,), past_rules=())


def attribute(events: Sequence[Event], catalog: Catalog, ranks: RankMap = UNMAPPED) -> Verdict:
    return judge(events, catalog, ranks).verdict
