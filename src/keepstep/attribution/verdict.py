"""From the events around a failure to its verdict.

What is stale or taken back never counts. Rules add what follows from several events together. Roots that a deeper and earlier one
explains count for little. The rest is weighed; the likeliest class wins if it wins clearly; its earliest unexplained root is the
first cause; the action is what that calls for, within bounds.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import msgspec

from keepstep.attribution.act import Choice, choose
from keepstep.attribution.causes import FAILING, Seen, first_of, grouped, past_causes, with_explanations
from keepstep.attribution.current import cleared, stops
from keepstep.attribution.lean import with_lean
from keepstep.attribution.missing import missing
from keepstep.attribution.order import canonical
from keepstep.attribution.places import UNMAPPED, Places, RankMap
from keepstep.attribution.rules import PAST_RULES, RULES, PastRule, Rule
from keepstep.attribution.weigh import Scores, Term, weigh
from keepstep.attribution.wording import summary, title_of
from keepstep.attribution.worked import steps_after
from keepstep.catalog.load import Catalog
from keepstep.catalog.priors import Priors, shipped_priors
from keepstep.records.event import Event
from keepstep.records.verdict import CLASSES, Alternative, Bearing, Entity, FaultClass, Tier, Verdict, Weighed

LEAST_ALTERNATIVE = 0.02
"""Probability under which another class is not worth a line."""


class Judgement(NamedTuple):
    """A verdict with everything it came from. `seen`: groups that counted; `stale`: events that did not."""

    verdict: Verdict
    scores: Scores
    seen: tuple[Seen, ...]
    stale: tuple[Event, ...]
    choice: Choice


def attribute(events: Sequence[Event], catalog: Catalog, ranks: RankMap = UNMAPPED) -> Verdict:
    """The verdict on one incident, whose events these are. `ranks`: where ranks ran, if a cycle record tells."""
    return judge(events, catalog, ranks).verdict


def judge(
    events: Sequence[Event],
    catalog: Catalog,
    ranks: RankMap = UNMAPPED,
    priors: Priors | None = None,
    rules: Sequence[Rule] = RULES,
    past_rules: Sequence[PastRule] = PAST_RULES,
) -> Judgement:
    """The verdict with every term. `rules` conclude `derived.*` events; `past_rules` see what is stale besides."""
    priors = priors or shipped_priors()
    given = sorted((e for e in events if e.signature in catalog), key=canonical)
    places = Places([e for e in given if e.stale is None], ranks)
    marked = cleared(given, catalog, places)
    live = [e for e in marked if e.stale is None]
    past = [e for e in marked if e.stale is not None]
    for past_rule in past_rules:
        live += [e for e in past_rule(live, past, catalog) if e.signature in catalog]
    for rule in rules:
        live += [e for e in rule(live, catalog) if e.signature in catalog]
    marked = cleared([*(e for e in marked if e.stale is not None), *live], catalog, places)
    stale = [e for e in marked if e.stale is not None]
    live = sorted((e for e in marked if e.stale is None), key=canonical)
    current = grouped(live, steps_after(live, catalog), catalog, places)
    given_stale = {id(e) for e in given if e.stale is not None}
    taken_back = sorted((e for e in stale if id(e) not in given_stale), key=canonical)
    over = past_causes(taken_back, current, catalog, places)
    stale = [e for e in stale if not any(e.signature == s.entry.id and e in taken_back for s in over)]
    seen = with_explanations([*current, *over], places.ranks.nodes)
    if _all_survived(seen) or not any(s.entry.role in FAILING for s in seen):
        calm = _without_fault(seen, stale, catalog, priors)
        if calm is not None:
            return calm
    found = _with_fault(seen, stale, catalog, priors, live, places)
    return found._replace(verdict=with_lean(found.verdict, live))


def tier_of(chance: float, rooted: bool, priors: Priors) -> Tier:
    """The word for a probability. Nothing is certain without a cause that was seen."""
    tiers = priors.tiers
    if chance >= tiers.certain and rooted:
        return "certain"
    if chance >= tiers.probable:
        return "probable"
    return "possible" if chance >= tiers.possible else "unknown"


def _all_survived(seen: Sequence[Seen]) -> bool:
    """Whether the job works: steps were made after everything that claims that it does not, and there is nothing else."""
    failing = [s for s in seen if s.entry.role in FAILING]
    return bool(failing) and all(s.survived or (s.entry.role != "root" and not stops(s.entry)) for s in failing)


def _without_fault(seen: Sequence[Seen], stale: Sequence[Event], catalog: Catalog, priors: Priors) -> Judgement | None:
    """The verdict where nothing speaks of a current fault; None where nothing speaks of its absence either.

    The class is that of what was survived or taken back. Of what a repair or a reboot made stale only a fault of the program
    is still one: that of a machine says nothing about the machine as it is now.
    """
    failing = [s for s in seen if s.entry.role in FAILING]
    benign = any(s.entry.role in ("noise", "recovery") and s.entry.kind != "job.progress" for s in seen)
    if not failing and not stale and not benign:
        return None
    past = [_past(e, catalog) for e in stale]
    counted = [*seen, *(p for p in past if p is not None)]
    scores = weigh([s._replace(outlived=False) for s in counted], _calm(priors), benign=True)
    best, margin = scores.best, scores.margin(scores.best)
    clear = margin >= priors.tiers.margin or _one_sign(counted, scores)
    fault_class: FaultClass = best if clear else "unknown"
    cause = first_of([s for s in counted if s.entry.role in FAILING and s.weight(fault_class) > 0])
    if cause is None and not any(s.weight(fault_class) > 0 for s in counted if s.entry.role == "noise"):
        fault_class = "unknown"  # facts around nothing make no class
    entity = Entity() if cause is None else _entity(cause)
    chance = scores.chances[fault_class]
    # A record that nothing takes back has to be taken back by somebody.
    asks = any(s.entry.role == "recovery" and s.entry.action == "ask_human" for s in seen)
    verdict = Verdict(
        fault_class=fault_class,
        signature="none" if cause is None else cause.entry.id,
        confidence=chance,
        tier=tier_of(chance, cause is not None, priors),
        action="ask_human" if asks else "none",
        no_current_fault=True,
        entity=entity,
        first_cause=None if cause is None else cause.event,
        evidence=_evidence(seen, stale, catalog, fault_class, scores),
        alternatives=_alternatives(counted, scores, fault_class),
        summary=summary(fault_class, "possible", "none", True, cause, entity),
    )
    return Judgement(verdict, scores, tuple(seen), tuple(stale), Choice("none", cause, "no current fault"))


def _calm(priors: Priors) -> Priors:
    """Where nothing is wrong there is no cause to be kept for the unknown: what was seen says whose it is."""
    return msgspec.structs.replace(priors, log_odds=priors.log_odds | {"unknown": 0.0})


def _past(event: Event, catalog: Catalog) -> Seen | None:
    """A stale event as far as it still says something."""
    entry = catalog[event.signature]
    if event.stale != "cleared":
        weights = {name: w for name, w in entry.weights.items() if name == "user_code"}
        entry = msgspec.structs.replace(entry, weights=weights)
    place = Places([event], UNMAPPED).place(event, entry.scope)
    return Seen(event, entry, place, event.count) if entry.role in FAILING else None


def _with_fault(
    seen: Sequence[Seen],
    stale: Sequence[Event],
    catalog: Catalog,
    priors: Priors,
    live: Sequence[Event],
    places: Places,
) -> Judgement:
    scores = weigh(seen, priors)
    best = scores.best
    named = best != "unknown" and (scores.margin(best) >= priors.tiers.margin or _one_sign(seen, scores))
    fault_class: FaultClass = best if named else "unknown"
    supporters = _supporters(seen, fault_class)
    causes = [s for s in supporters if s.can_be_cause]
    strongest = max((s.weight(fault_class) for s in causes), default=0.0)
    # A hint that came first does not take the place of what nearly proves it.
    first = first_of([s for s in causes if 2 * s.weight(fault_class) >= strongest])
    chance = scores.chances[fault_class]
    tier = tier_of(chance, first is not None, priors) if named else "unknown"
    after = [] if first is None else [s for s in seen if s.explained is not None and seen[s.explained] is first]
    choice = choose(fault_class, first, supporters, after, scores.chances, priors.tiers)
    decisive = choice.rested_on or first or first_of([s for s in seen if s.entry.role in FAILING])
    calm = choice.action == "none"
    entity = _entity(first, choice.rested_on)
    verdict = Verdict(
        fault_class=fault_class,
        signature="unknown" if decisive is None else decisive.entry.id,
        confidence=chance,
        tier=tier,
        action=choice.action,
        no_current_fault=calm,
        entity=entity,
        first_cause=None if first is None else first.event,
        evidence=_evidence(seen, stale, catalog, fault_class, scores),
        alternatives=_alternatives(seen, scores, fault_class),
        missing=missing(fault_class, tier, seen, live, places.ranks),
        summary=summary(fault_class, tier, choice.action, calm, decisive, entity),
    )
    return Judgement(verdict, scores, tuple(seen), tuple(stale), choice)


def _one_sign(seen: Sequence[Seen], scores: Scores) -> bool:
    """Whether the two likeliest classes rest on the same signs: then it is known what happened, if not quite whose it is."""
    best, other = sorted((c for c in CLASSES if c != "unknown"), key=lambda c: -scores.chances[c])[:2]
    of_best, of_other = _supporters(seen, best), _supporters(seen, other)
    if not of_best or not of_other:
        return False
    return 2 * of_best[0].weight(other) >= of_other[0].weight(other) and 2 * of_other[0].weight(best) >= of_best[
        0
    ].weight(best)


def _supporters(seen: Sequence[Seen], fault_class: FaultClass) -> list[Seen]:
    """Unexplained signs for a class, strongest first."""
    found = [
        s for s in seen if s.explained is None and s.weight(fault_class) > 0 and s.entry.role not in ("noise", "action")
    ]
    return sorted(found, key=lambda s: -s.weight(fault_class))


def _entity(*signs: Seen | None) -> Entity:
    """What is at fault, completed from one sign by the next."""
    found = Entity()
    for sign in signs:
        if sign is not None:
            place = sign.place
            found = Entity(
                node=found.node or place.node,
                gpu=found.gpu or place.gpu,
                nic=found.nic or place.nic,
                rank=place.rank if found.rank is None else found.rank,
                job=found.job or place.job,
            )
    return found


def _evidence(
    seen: Sequence[Seen], stale: Sequence[Event], catalog: Catalog, fault_class: FaultClass, scores: Scores
) -> list[Weighed]:
    """Everything that was looked at, oldest first. A signature's weight stands at its first event."""
    term_of: dict[int, Term] = {t.seen[0]: t for t in scores.terms if t.seen}
    found = []
    for index, one in enumerate(seen):
        term = term_of.get(index)
        weight = 0.0 if term is None else term.adds(fault_class)
        bearing: Bearing = "symptom" if abs(weight) < 1e-9 else "supports" if weight > 0 else "contradicts"
        note = term.note if term is not None else ""
        if one.explained is not None:
            note = f"explained by: {title_of(seen[one.explained])}"
        found.append(Weighed(event=_counted(one), bearing=bearing, weight=weight, note=note))
    found += [Weighed(event=e, bearing="contradicts", note=f"does not count: {e.stale}") for e in stale]
    return sorted(found, key=lambda w: canonical(w.event))


def _counted(one: Seen) -> Event:
    """The first event of a group, with the number of all."""
    return msgspec.structs.replace(one.event, count=one.sightings) if one.sightings != one.event.count else one.event


def _alternatives(seen: Sequence[Seen], scores: Scores, fault_class: FaultClass) -> list[Alternative]:
    """The other classes, likeliest first, with what speaks against each."""
    others = sorted((c for c in CLASSES if c != fault_class), key=lambda c: -scores.chances[c])
    return [
        Alternative(fault_class=c, confidence=scores.chances[c], why_not=_why_not(c, seen, scores, fault_class))
        for c in others
        if scores.chances[c] >= LEAST_ALTERNATIVE
    ]


def _why_not(name: FaultClass, seen: Sequence[Seen], scores: Scores, winner: FaultClass) -> str:
    if name == "unknown":
        return "kept for a cause that the catalog does not know"
    signs = sorted((s for s in seen if s.weight(name) > 0), key=lambda s: -s.weight(name))
    if not signs:
        return "no sign of it was seen"
    sign = signs[0]
    if sign.explained is not None:
        return f"its strongest sign ({title_of(sign)}) is explained by: {title_of(seen[sign.explained])}"
    if sign.survived:
        return f"the job went on after its strongest sign ({title_of(sign)})"
    against = [s for s in seen if s.weight(name) < 0]
    if against:
        return f"{title_of(min(against, key=lambda s: s.weight(name)))} speaks against it"
    if winner == "unknown":
        return f"{title_of(sign)} is not enough"
    return f"less speaks for it ({title_of(sign)}) than for {winner}"
