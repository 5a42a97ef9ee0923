"""The last resort: where known signs leave the class unknown, the vocabulary of a short text may lean to one.

It makes a class `possible` for a person to start from. The action stays what it was: to ask, or nothing.
"""

from __future__ import annotations

from collections.abc import Sequence

import msgspec

from keepstep.records.event import Event
from keepstep.records.verdict import CLASSES, Alternative, FaultClass, Verdict, Weighed

SIGNATURE = "text.words"
LEAST_MARGIN = 2.0
"""Log-odds over the next class. Under it one in three was right, leaving out the file that a case is from (bench/_words.py)."""
BEGIN, SLOPE, MOST = 0.25, 0.06, 0.75
"""Probability by margin: one in three at 2, one in two at 4, three in four from 8 on, as measured so."""


def with_lean(verdict: Verdict, live: Sequence[Event]) -> Verdict:
    """The verdict, its class that of the words where it was unknown and they are clear."""
    words = next((e for e in live if e.signature == SIGNATURE), None)
    if verdict.fault_class != "unknown" or verdict.no_current_fault or words is None:
        # That there is no fault was concluded from what was seen; of which class it would be is then no open question.
        return verdict
    leaning, margin = words.attrs.get("lean"), words.attrs.get("margin")
    if leaning not in CLASSES or not isinstance(margin, float) or margin < LEAST_MARGIN:
        return verdict
    chosen: FaultClass = leaning
    chance = min(MOST, BEGIN + SLOPE * margin)
    said = ", ".join(map(str, words.attrs.get("words", ())))
    others = [a for a in verdict.alternatives if a.fault_class != chosen]
    unknown = Alternative(
        fault_class="unknown",
        confidence=1.0 - chance,
        why_not="no known sign was seen, and words alone are a weak one",
    )
    # Of what is left "unknown" has the larger part; the other classes keep their proportions.
    rest = sum(a.confidence for a in others)
    share = (1.0 - chance) / 4 if rest else 0.0
    return msgspec.structs.replace(
        verdict,
        fault_class=chosen,
        confidence=chance,
        tier="possible",
        evidence=[*verdict.evidence, Weighed(event=words, bearing="supports", note=f"words of such cases: {said}")],
        alternatives=[
            msgspec.structs.replace(unknown, confidence=1.0 - chance - share),
            *(msgspec.structs.replace(a, confidence=share * a.confidence / (rest or 1.0)) for a in others),
        ],
        summary=f"{verdict.summary} Its words are those of {chosen.replace('_', ' ')} cases ({said}): possible, no more.",
    )
