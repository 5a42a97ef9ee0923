"""Which class the vocabulary of a short text leans to: what is left when no known sign is in it.

`data/words.csv` has natural log-odds for each word: how much more often it stands in the texts of a class than in all of them,
learned by naive Bayes from the recorded and re-created cases of tests/attribution/cases (bench/_words.py). Words are weak and not
independent: a lean is a hint for a person, never a reason to act.
"""

from __future__ import annotations

import csv
import functools
import io
import math
import re
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from importlib import resources
from typing import NamedTuple

from keepstep.records.verdict import CLASSES, FaultClass

LEAN_CLASSES: tuple[FaultClass, ...] = tuple(c for c in CLASSES if c != "unknown")
LEAST_TEXTS = 3
"""Texts in which a word must stand to be learned."""
MOST_SHARE = 0.4
"""Share of the texts above which a word says nothing."""
SHRINK = 6.0
"""Texts that a class is taken to have besides, with the word as often as everywhere."""
LEAST_LOG_ODDS = 0.2
"""Under which a word is left out of the table."""
TOP_WORDS = 6

_DIGITS = re.compile(r"0x[0-9a-fA-F]+|\d+")
_WORD = re.compile(r"[A-Za-z][A-Za-z_]{2,30}")
_PART = re.compile(r"[A-Z]?[a-z]{2,}|[A-Z]{2,}(?![a-z])")

Table = Mapping[str, tuple[float, ...]]
"""Log-odds of each word, in the order of LEAN_CLASSES."""


class Lean(NamedTuple):
    """`sums`: log-odds by class. `margin`: of the first class over the second. `words`: those that say most for the first."""

    fault_class: FaultClass
    margin: float
    sums: dict[FaultClass, float]
    words: tuple[str, ...]


def words_of(text: str) -> set[str]:
    """The words of a text in lower case, and the parts of names written together (OutOfMemory, store_based)."""
    found: set[str] = set()
    for word in _WORD.findall(_DIGITS.sub(" ", text)):
        found.add(word.lower())
        parts = _PART.findall(word)
        if len(parts) > 1:
            found.update(part.lower() for part in parts if len(part) > 2)
    return found


def learn(cases: Sequence[tuple[set[str], FaultClass]]) -> dict[str, tuple[float, ...]]:
    """The table from texts (as sets of words) whose class is known; texts of class "unknown" teach nothing."""
    known = [(words, name) for words, name in cases if name in LEAN_CLASSES]
    of_class = {name: Counter[str]() for name in LEAN_CLASSES}
    texts = Counter(name for _, name in known)
    everywhere: Counter[str] = Counter()
    for words, name in known:
        everywhere.update(words)
        of_class[name].update(words)
    table = {}
    for word, count in everywhere.items():
        if LEAST_TEXTS <= count <= MOST_SHARE * len(known):
            base = count / len(known)
            odds = [math.log((of_class[c][word] + SHRINK * base) / (texts[c] + SHRINK) / base) for c in LEAN_CLASSES]
            if max(map(abs, odds)) >= LEAST_LOG_ODDS:
                table[word] = tuple(round(o, 2) for o in odds)
    return table


def lean_of(words: Iterable[str], table: Table | None = None) -> Lean | None:
    """What the words lean to, None when the table knows none of them."""
    table = shipped_words() if table is None else table
    known = {word: table[word] for word in words if word in table}
    if not known:
        return None
    sums = {c: math.fsum(odds[i] for odds in known.values()) for i, c in enumerate(LEAN_CLASSES)}
    first, second = sorted(LEAN_CLASSES, key=lambda c: -sums[c])[:2]
    index = LEAN_CLASSES.index(first)
    top = sorted(known, key=lambda word: (-known[word][index], word))[:TOP_WORDS]
    return Lean(first, sums[first] - sums[second], sums, tuple(top))


@functools.cache
def shipped_words() -> dict[str, tuple[float, ...]]:
    """The table that comes with the package."""
    text = (resources.files("keepstep.catalog") / "data" / "words.csv").read_text(encoding="utf-8")
    rows = csv.reader(line for line in io.StringIO(text) if not line.startswith("#"))
    next(rows)
    return {row[0]: tuple(map(float, row[1:])) for row in rows}


def as_csv(table: Table, source: str) -> str:
    """The table as it is shipped."""
    out = io.StringIO()
    out.write(f"# {source}\n")
    writer = csv.writer(out, lineterminator="\n")
    writer.writerow(["word", *LEAN_CLASSES])
    for word in sorted(table):
        writer.writerow([word, *table[word]])
    return out.getvalue()
