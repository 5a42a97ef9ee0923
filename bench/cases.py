"""How often the verdict on recorded cases is the one that was established: class, action, and what must never happen.

A case is a text as a tool would get it, with the cause that people found in the end. FILE has one JSON object a line; without it,
cases/dev.jsonl under KEEPSTEP_SHARED is taken. The text goes through the same reading as `keepstep why FILE`.
"""

from __future__ import annotations

import argparse
import json
import os
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import Any, NamedTuple

from _common import Result, Target, argument_parser, emit, say
from keepstep.attribution.verdict import attribute
from keepstep.catalog.load import shipped
from keepstep.records.verdict import CLASSES, Verdict
from keepstep.sources.reading import read_paths

JUDGED_TIERS = ("A", "B")


class Scored(NamedTuple):
    """One case with its verdict. `action`: 1 right, 0.5 asked a person where acting was right, 0 wrong."""

    case: dict[str, Any]
    verdict: Verdict
    right_class: bool
    action: float
    forbidden: bool
    stale_violation: bool


def encoded(case: dict[str, Any]) -> bytes:
    """The bytes that the case describes."""
    return str(case["input"]).encode(case["input_encoding"], errors="surrogateescape")


def judge(case: dict[str, Any], folder: Path) -> Scored:
    """Run one case through reading and attribution."""
    path = folder / "input.log"
    path.write_bytes(encoded(case))
    catalog = shipped()
    verdict = attribute(read_paths([str(path)], catalog).events, catalog)
    expected = case["expected"]
    wanted = expected["action"]
    if verdict.action == wanted or (verdict.action == "ask_human" and wanted == "none"):
        action = 1.0
    else:
        action = 0.5 if verdict.action == "ask_human" else 0.0
    stale = bool(expected["no_current_fault"])
    return Scored(
        case=case,
        verdict=verdict,
        right_class=verdict.fault_class == expected["class"],
        action=action,
        forbidden=verdict.action in (expected["must_not"] or ()),
        stale_violation=stale and (not verdict.no_current_fault or verdict.action not in ("none", "ask_human")),
    )


def brier(scored: Sequence[Scored]) -> float:
    """Mean squared error of the probabilities over classes: what the verdict gives its class and its alternatives."""
    total = 0.0
    for one in scored:
        given = {a.fault_class: a.confidence for a in one.verdict.alternatives}
        given[one.verdict.fault_class] = one.verdict.confidence
        truth = one.case["expected"]["class"]
        total += sum((given.get(name, 0.0) - (name == truth)) ** 2 for name in CLASSES)
    return total / len(scored) if scored else 0.0


def say_each(scored: Sequence[Scored]) -> None:
    """A line for every case that is not wholly right."""
    for one in scored:
        expected, verdict = one.case["expected"], one.verdict
        if one.right_class and one.action == 1.0 and not one.forbidden and not one.stale_violation:
            continue
        flags = "".join(
            (" FORBIDDEN" if one.forbidden else "", " STALE" if one.stale_violation else "", f" {one.case['tier']}")
        )
        say(
            f"{one.case['id']}: {expected['class']}/{expected['action']}"
            f"{'/no fault' if expected['no_current_fault'] else ''} expected, "
            f"{verdict.fault_class}/{verdict.action}{'/no fault' if verdict.no_current_fault else ''} "
            f"({verdict.signature}, {verdict.confidence:.2f}){flags}"
        )


def main() -> None:
    parser: argparse.ArgumentParser = argument_parser(__doc__ or "")
    parser.add_argument("file", nargs="?", type=Path)
    parser.add_argument("--only", help="only cases whose id begins so")
    options = parser.parse_args()
    shared = os.environ.get("KEEPSTEP_SHARED")
    path = options.file or (Path(shared) / "cases/dev.jsonl" if shared else None)
    if path is None:
        sys.exit("cases.py: give a FILE of cases, or set KEEPSTEP_SHARED")
    cases = [json.loads(line) for line in path.read_text().splitlines() if line.strip()]
    cases = [c for c in cases if str(c["id"]).startswith(options.only or "")]
    with tempfile.TemporaryDirectory() as folder:
        scored = [judge(case, Path(folder)) for case in cases]
    say_each(scored)
    judged = [s for s in scored if s.case["tier"] in JUDGED_TIERS]
    classes = [float(s.right_class) for s in judged]
    actions = [s.action for s in judged]
    results = []
    for name in CLASSES:
        right = [s.right_class for s in judged if s.case["expected"]["class"] == name]
        if right:
            results.append(Result(f"class {name}", "keepstep", "share", [sum(right) / len(right)], f"of {len(right)}"))
    results.append(Result("Brier score", "keepstep", "", [brier(judged)]))
    forbidden, stale = sum(s.forbidden for s in scored), sum(s.stale_violation for s in scored)
    count = max(1, len(judged))
    targets = [
        Target("class_accuracy", sum(classes) / count, "", ">=", 0.9),
        Target("action_accuracy", sum(actions) / count, "", ">=", 0.85),
        Target("forbidden_actions", forbidden, "", "==", 0),
        Target("stale_violations", stale, "", "==", 0),
    ]
    emit("cases", results, targets, output=options.output, packages=["keepstep", "google-re2"])


if __name__ == "__main__":
    main()
