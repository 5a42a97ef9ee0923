"""Weights of a site, from incidents whose cause was verified: as far from the shipped ones as the evidence forces, no farther.

Maximum a posteriori: the weights of a signature are normal around the shipped ones, an outcome has the probability that the
engine gives its class. The function to maximise has one maximum; it is climbed until it is reached.
"""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from typing import Any, NamedTuple

from keepstep.catalog.load import Catalog
from keepstep.catalog.overrides import Override
from keepstep.catalog.priors import Priors
from keepstep.records.verdict import CLASSES, FaultClass

DEVIATION = 1.0
"""Standard deviation of a weight around the argued one, in log-odds: an argument is seldom off by more than a factor of seven."""
LEAST_OUTCOMES = 5
"""Verified outcomes with a signature, below which its weights stay as they are."""
LARGEST = 6.0
"""No weight grows beyond this: a site that has only seen one cause of a sign has not seen them all."""
LEAST_CHANGE = 0.1
"""Changes smaller than this are not worth a line in a file that people read."""

_ROUNDS = 400
_SMALL = 1e-4


class Outcome(NamedTuple):
    """An incident whose cause was verified. `signs`: signature and the share of its weights that counted (see weigh.Term)."""

    signs: Mapping[str, float]
    verified: FaultClass


def outcome_of(verdict: Mapping[str, Any], verified: FaultClass, catalog: Catalog) -> Outcome:
    """An outcome from a recorded verdict (fields of keepstep.verdict/1): each sign with the share that counted, as far as its
    weight for the class tells."""
    signs: dict[str, float] = {}
    for one in verdict.get("evidence", ()):
        name, weight = one["signature"], one.get("weight", 0.0)
        if one.get("stale") is not None or name not in catalog:
            continue
        given = catalog[name].weights.get(verdict["class"], 0.0)
        share = weight / given if given and weight else 1.0 if not one.get("note") else 0.0
        if share > 0:
            signs[name] = max(signs.get(name, 0.0), min(share, 1.5))
    return Outcome(signs, verified)


def relearned(
    outcomes: Sequence[Outcome],
    catalog: Catalog,
    priors: Priors,
    *,
    deviation: float = DEVIATION,
    least: int = LEAST_OUTCOMES,
) -> list[Override]:
    """Entries whose weights verified outcomes change, ordered by id. Outcomes that are verified as "unknown" teach nothing."""
    known = [o for o in outcomes if o.verified != "unknown"]
    seen = _counts(o.signs for o in known)
    ids = sorted(s for s, n in seen.items() if n >= least and s in catalog)
    if not ids:
        return []
    shipped = {
        s: {c: catalog[s].weights.get(c, 0.0) for c in CLASSES}
        for s in {i for o in known for i in o.signs}
        if s in catalog
    }
    weights = _climb(known, {s: dict(w) for s, w in shipped.items()}, ids, shipped, priors, deviation)
    found = []
    for signature in ids:
        moved = {c: w for c, w in weights[signature].items() if abs(w - shipped[signature][c]) >= LEAST_CHANGE}
        if moved:
            kept = {c: w for c, w in shipped[signature].items() if w}
            changed = {c: round(w, 2) for c, w in (kept | moved).items()}
            found.append(Override(id=signature, weights=changed, reason=_reason(signature, known)))
    return found


def _counts(found: Iterable[Mapping[str, float]]) -> dict[str, int]:
    counts: dict[str, int] = defaultdict(int)
    for signs in found:
        for name in signs:
            counts[name] += 1
    return counts


def _climb(
    outcomes: Sequence[Outcome],
    weights: dict[str, dict[FaultClass, float]],
    ids: Sequence[str],
    shipped: Mapping[str, Mapping[FaultClass, float]],
    priors: Priors,
    deviation: float,
) -> dict[str, dict[FaultClass, float]]:
    """Gradient ascent with a step for every signature that its curvature allows. "unknown" keeps its score: it is the measure."""
    precision = 1.0 / deviation**2
    most = max((sum(o.signs.values()) for o in outcomes), default=1.0)
    curvature: dict[str, float] = defaultdict(float)
    for outcome in outcomes:
        for name, share in outcome.signs.items():
            curvature[name] += 0.5 * share * max(most, 1.0)
    learned = [c for c in CLASSES if c != "unknown"]
    for _ in range(_ROUNDS):
        slopes = {s: dict.fromkeys(learned, 0.0) for s in ids}
        for outcome in outcomes:
            chances = _chances(outcome, weights, priors)
            for name, share in outcome.signs.items():
                if name in slopes:
                    for c in learned:
                        slopes[name][c] += share * ((c == outcome.verified) - chances[c])
        largest = 0.0
        for name in ids:
            step = 1.0 / (curvature[name] + precision)
            for c in learned:
                slope = slopes[name][c] - precision * (weights[name][c] - shipped[name][c])
                moved = max(-LARGEST, min(LARGEST, weights[name][c] + step * slope))
                largest = max(largest, abs(moved - weights[name][c]))
                weights[name][c] = moved
        if largest < _SMALL:
            break
    return weights


def _chances(
    outcome: Outcome, weights: Mapping[str, Mapping[FaultClass, float]], priors: Priors
) -> dict[FaultClass, float]:
    sums = {c: priors.log_odds[c] for c in CLASSES}
    for name, share in outcome.signs.items():
        for c, w in weights.get(name, {}).items():
            sums[c] += share * w
    top = max(sums.values())
    grown = {c: math.exp(s - top) for c, s in sums.items()}
    total = sum(grown.values())
    return {c: g / total for c, g in grown.items()}


def _reason(signature: str, outcomes: Sequence[Outcome]) -> str:
    """ "learned from 14 verified incidents: hardware 12, framework 2"."""
    counts: dict[str, int] = defaultdict(int)
    for outcome in outcomes:
        if signature in outcome.signs:
            counts[outcome.verified] += 1
    shown = ", ".join(f"{c} {n}" for c, n in sorted(counts.items(), key=lambda item: (-item[1], item[0])))
    return f"learned from {sum(counts.values())} verified incidents: {shown}"


def as_toml(overrides: Sequence[Override]) -> str:
    """The overrides as a site's catalog file, one table an entry."""
    parts = []
    for one in overrides:
        weights = ", ".join(f"{c} = {w:g}" for c, w in (one.weights or {}).items())
        parts.append(f'[[override]]\nid = "{one.id}"\nweights = {{ {weights} }}\nreason = "{one.reason}"\n')
    return "\n".join(parts)
