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
    """What one signature adds: `share` of the catalog's weights, `confirming` of those for classes that its explanation speaks for
    too; `note`: why not all, or more. `seen`: indices of its groups.
    """

    signature: str
    share: float
    weights: Mapping[FaultClass, float]
    note: str = ""
    seen: tuple[int, ...] = ()
    confirming: float = 0.0
    confirms: frozenset[FaultClass] = frozenset()

    def adds(self, name: FaultClass) -> float:
        """Log-odds that it adds to a class."""
        return (self.confirming if name in self.confirms else self.share) * self.weights.get(name, 0.0)


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
        """Log-odds of a class over the likeliest other one that can be named."""
        other = max(self.chances[c] for c in CLASSES if c not in (name, "unknown"))
        return math.log(max(self.chances[name], 1e-300) / max(other, 1e-300))


def term_of(signature: str, members: Sequence[tuple[int, Seen]], seen: Sequence[Seen], priors: Priors) -> Term:
    """The term of all groups of one signature: the best share of any, and a little for repeats."""
    shares = priors.shares
    best, note, explanation = -1.0, "", None
    for _, one in members:
        share, why, by = 1.0, "", None
        if one.explained is not None:
            share, why, by = shares.explained, "explained by another", seen[one.explained]
        elif one.over:
            share, why = shares.over, "it is over, but it came before what failed"
        elif one.survived:
            share, why = shares.survived, "the job went on after it"
        elif one.later:
            share, why = shares.later, "the job had stopped before it"
        if share > best:
            best, note, explanation = share, why, by
    entry = members[0][1].entry
    # A conclusion about several places comes from the same measurements, and a circumstance does not get truer by repeating.
    once = entry.role == "context" or signature.startswith("derived.")
    count = 1 if once else sum(one.sightings for _, one in members)
    bonus = 1.0 + (min(shares.repeat_limit, shares.repeat * math.log(count)) if count > 1 else 0.0)
    if bonus > 1.0:
        note = f"{note + ', ' if note else ''}seen {count} times"
    weights = entry.weights
    if signature.endswith("passed"):
        # A check that passes on an idle or repaired node does not prove that the fault was not there.
        weights = {k: w for k, w in weights.items() if not (k in HARDWARE_SIDE and w < 0)}
    confirms = frozenset(
        c for c, w in weights.items() if w > 0 and explanation is not None and explanation.weight(c) > 0
    )
    return Term(
        signature, best * bonus, weights, note, tuple(i for i, _ in members), shares.confirming * bonus, confirms
    )


def absence(seen: Sequence[Seen], priors: Priors) -> Term | None:
    """What speaks against classes of which no sign was seen, where a root of another was."""
    if not any(s.entry.role == "root" and s.top >= 1.0 for s in seen):
        return None
    signs = {c for s in seen for c, w in s.entry.weights.items() if w > 0}
    weights: dict[FaultClass, float] = {c: -priors.shares.absence for c in CLASSES if c not in signs and c != "unknown"}
    return Term("no sign seen", 1.0, weights, "each class usually leaves one") if weights else None


def weigh(seen: Sequence[Seen], priors: Priors, *, benign: bool = False) -> Scores:
    """Scores of all classes. Each signature counts once, whatever the number of places it shows at.

    `benign`: what is benign counts too, to say whose it is where nothing else was seen.
    """
    groups: dict[str, list[tuple[int, Seen]]] = defaultdict(list)
    for index, one in enumerate(seen):
        if one.entry.weights and (benign or one.entry.role != "noise"):
            groups[one.entry.id].append((index, one))
    terms = [term_of(s, members, seen, priors) for s, members in sorted(groups.items())]
    against = absence(seen, priors)
    if against is not None:
        terms.append(against)
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
