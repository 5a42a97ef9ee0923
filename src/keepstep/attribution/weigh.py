"""Sums of weights, and what probability they are. Every term is kept, so that a verdict can be checked by hand."""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Mapping, Sequence
from typing import NamedTuple

from keepstep.attribution.causes import Seen
from keepstep.catalog.priors import Priors
from keepstep.records.verdict import CLASSES, FaultClass

HARDWARE_SIDE: tuple[FaultClass, ...] = ("hardware", "fabric")


class Term(NamedTuple):
    """What one signature adds: `share` of the catalog's `weights`; `note`: why not all, or more. `seen`: indices of its groups."""

    signature: str
    share: float
    weights: Mapping[FaultClass, float]
    note: str
    seen: tuple[int, ...]

    def adds(self, name: FaultClass) -> float:
        """Log-odds that it adds to a class."""
        return self.share * self.weights.get(name, 0.0)


class Scores(NamedTuple):
    """`sums`: log-odds of each class, with the prior. `chances`: their softmax, calibrated."""

    terms: tuple[Term, ...]
    sums: Mapping[FaultClass, float]
    chances: Mapping[FaultClass, float]

    @property
    def best(self) -> FaultClass:
        """The likeliest class; of equals the first in the order of CLASSES."""
        return max(CLASSES, key=lambda name: self.chances[name])

    def margin(self, name: FaultClass) -> float:
        """Log-odds of a class over the likeliest of the others."""
        other = max(self.chances[c] for c in CLASSES if c != name)
        return math.log(max(self.chances[name], 1e-300) / max(other, 1e-300))


def term_of(signature: str, members: Sequence[tuple[int, Seen]], priors: Priors) -> Term:
    """The term of all groups of one signature: the best share of any, and a little for repeats."""
    shares = priors.shares
    best, note = 0.0, ""
    for _, one in members:
        share, why = 1.0, ""
        if one.explained is not None:
            share, why = shares.explained, "explained by another"
        elif one.survived:
            share, why = shares.survived, "the job went on after it"
        elif one.later:
            share, why = shares.later, "the job had stopped before it"
        if share > best:
            best, note = share, why
    count = sum(one.sightings for _, one in members)
    bonus = min(shares.repeat_limit, shares.repeat * math.log(count)) if count > 1 else 0.0
    if bonus:
        note = f"{note + ', ' if note else ''}seen {count} times"
    weights = members[0][1].entry.weights
    if members[0][1].entry.kind.endswith(".passed"):
        # A check that passes on an idle or repaired node does not prove that the fault was not there.
        weights = {k: w for k, w in weights.items() if not (k in HARDWARE_SIDE and w < 0)}
    return Term(signature, best * (1.0 + bonus), weights, note, tuple(i for i, _ in members))


def weigh(seen: Sequence[Seen], priors: Priors, extra: Sequence[Term] = ()) -> Scores:
    """Scores of all classes. Each signature counts once, whatever the number of places it shows at."""
    groups: dict[str, list[tuple[int, Seen]]] = defaultdict(list)
    for index, one in enumerate(seen):
        if one.entry.weights and one.entry.role not in ("noise", "action"):
            groups[one.entry.id].append((index, one))
    terms = [*(term_of(s, members, priors) for s, members in sorted(groups.items())), *extra]
    sums = {c: priors.log_odds[c] + math.fsum(t.adds(c) for t in terms) for c in CLASSES}
    return Scores(tuple(terms), sums, softmax(sums, priors))


def softmax(sums: Mapping[FaultClass, float], priors: Priors) -> dict[FaultClass, float]:
    """Sums of log-odds as probabilities, after the temperature and the bias of `unknown`."""
    calibration = priors.calibration
    scaled = {c: sums[c] / calibration.temperature for c in CLASSES}
    scaled["unknown"] += calibration.bias_unknown
    top = max(scaled.values())
    grown = {c: math.exp(s - top) for c, s in scaled.items()}
    total = math.fsum(grown.values())
    return {c: grown[c] / total for c in CLASSES}
