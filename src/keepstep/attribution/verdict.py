"""From the events around a failure to its verdict."""

from __future__ import annotations

import math
from collections.abc import Sequence

from keepstep.attribution.rules import RULES
from keepstep.catalog.load import Catalog
from keepstep.records.event import Event
from keepstep.records.verdict import CLASSES, Entity, FaultClass, Verdict, Weighed


def attribute(events: Sequence[Event], catalog: Catalog) -> Verdict:
    """The verdict on one incident, whose events these are."""
    found = list(events)
    for rule in RULES:
        found += rule(found, catalog)
    scores: dict[FaultClass, float] = dict.fromkeys(CLASSES, 0.0)
    weighed = []
    seen: set[str] = set()
    for event in found:
        signature = catalog[event.signature]
        if event.stale is not None or event.signature in seen:
            continue
        seen.add(event.signature)
        for name, weight in signature.weights.items():
            scores[name] += weight
        weighed.append((event, signature))
    scores["unknown"] += 1.0
    total = sum(math.exp(s) for s in scores.values())
    best = max(scores, key=lambda name: scores[name])
    roots = [(e, s) for e, s in weighed if s.role == "root" and best in s.weights]
    first, signature = min(roots, key=lambda p: (p[1].depth, p[0].order)) if roots else (None, None)
    return Verdict(
        fault_class=best,
        signature="unknown" if signature is None else signature.id,
        confidence=math.exp(scores[best]) / total,
        tier="possible",
        action="ask_human" if signature is None else signature.action or "ask_human",
        entity=Entity() if first is None else Entity(node=first.node, rank=first.rank),
        first_cause=first,
        evidence=[Weighed(event=e, bearing="supports", weight=s.weights.get(best, 0.0)) for e, s in weighed],
        summary="" if signature is None else signature.title,
    )
