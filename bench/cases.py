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
from collections import Counter
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from _calibration import Floats, binned, bootstrap, brier, diagram, leave_one_out, log_loss, wilson
from _common import Result, Target, argument_parser, emit, say
from _encodings import encoded
from keepstep.attribution.verdict import Judgement
from keepstep.catalog.load import shipped
from keepstep.catalog.matcher import Matcher
from keepstep.launcher.diagnosis import diagnose
from keepstep.records.codec import to_json
from keepstep.records.verdict import CLASSES, Verdict, verdict_fields

JUDGED_TIERS = ("A", "B")


class Scored(NamedTuple):
    """One case with its verdict. `action`: 1 right, 0.5 asked a person where acting was right, 0 wrong."""

    case: dict[str, Any]
    judgement: Judgement
    right_class: bool
    action: float
    forbidden: bool
    stale_violation: bool

    @property
    def verdict(self) -> Verdict:
        return self.judgement.verdict

    @property
    def truth(self) -> str:
        return str(self.case["expected"]["class"])

    @property
    def wholly_right(self) -> bool:
        return self.right_class and self.action == 1.0 and not self.forbidden and not self.stale_violation


def judge(case: dict[str, Any], folder: Path, matcher: Matcher) -> Scored:
    """Run one case through reading and attribution. Raises ValueError naming the case for an encoding that is not known."""
    path = folder / "input.log"
    try:
        path.write_bytes(encoded(str(case["input"]), str(case.get("input_encoding") or "utf-8")))
    except (ValueError, LookupError) as error:
        raise ValueError(f"case {case['id']}: {error}") from error
    catalog = shipped()
    judgement = diagnose([str(path)], catalog=catalog, matcher=matcher).judgement
    verdict, expected = judgement.verdict, case["expected"]
    wanted = expected["action"]
    if verdict.action == wanted or (verdict.action == "ask_human" and wanted == "none"):
        action = 1.0
    else:
        action = 0.5 if verdict.action == "ask_human" else 0.0
    stale = bool(expected["no_current_fault"])
    return Scored(
        case=case,
        judgement=judgement,
        right_class=verdict.fault_class == expected["class"],
        action=action,
        forbidden=verdict.action in (expected.get("must_not") or ()),
        stale_violation=stale and (not verdict.no_current_fault or verdict.action not in ("none", "ask_human")),
    )


def say_each(scored: Sequence[Scored]) -> None:
    """A line for every case that is not wholly right."""
    for one in scored:
        if one.wholly_right:
            continue
        expected, verdict = one.case["expected"], one.verdict
        flags = "".join((" FORBIDDEN" if one.forbidden else "", " STALE" if one.stale_violation else ""))
        say(
            f"{one.case['id']}: {expected['class']}/{expected['action']}"
            f"{'/no fault' if expected['no_current_fault'] else ''} expected, "
            f"{verdict.fault_class}/{verdict.action}{'/no fault' if verdict.no_current_fault else ''} "
            f"({verdict.signature}, {verdict.confidence:.2f}){flags} {one.case['tier']}"
        )


def shares(judged: Sequence[Scored], title: str, key: Callable[[Scored], str]) -> list[Result]:
    """Share of right classes in each group of cases, with its interval, and of right actions."""
    groups: dict[str, list[Scored]] = {}
    for one in judged:
        groups.setdefault(key(one), []).append(one)
    found = []
    for name, members in sorted(groups.items()):
        right = sum(s.right_class for s in members)
        low, high = wilson(right, len(members))
        acted = sum(s.action for s in members) / len(members)
        note = f"{right} of {len(members)}, 95 % {low:.2f} to {high:.2f}; action {acted:.2f}"
        found.append(Result(f"{title} {name}", "keepstep", "share", [right / len(members)], note))
    return found


def confusions(judged: Sequence[Scored]) -> list[Result]:
    """Which class was taken for which, commonest first."""
    wrong = Counter((s.truth, s.verdict.fault_class) for s in judged if not s.right_class)
    return [
        Result(f"{truth} taken for {given}", "keepstep", "cases", [count])
        for (truth, given), count in wrong.most_common()
    ]


def reliability(judged: Sequence[Scored], svg: Path | None) -> list[Result]:
    """How often verdicts of each range of confidence were right."""
    bins = binned([s.verdict.confidence for s in judged], [s.right_class for s in judged])
    if svg is not None:
        svg.write_text(diagram(bins, f"Reliability, {len(judged)} cases"))
    return [
        Result(
            f"confidence {b.low:.2f} to {b.high:.2f}",
            "keepstep",
            "share right",
            [b.right / b.size],
            f"{b.right} of {b.size}, mean confidence {b.confidence:.2f}",
        )
        for b in bins
    ]


def sums_of(judged: Sequence[Scored]) -> tuple[Floats, list[int]]:
    """Log-odds of all classes before calibration, and the index of the true one, of every case."""
    sums = np.array([[s.judgement.scores.sums[c] for c in CLASSES] for s in judged])
    return sums, [CLASSES.index(s.truth) for s in judged]  # type: ignore[arg-type]


def calibration(judged: Sequence[Scored], seed: int) -> list[Result]:
    """Scores of the probabilities as they are, and with temperature and bias fitted on all other cases."""
    sums, truth = sums_of(judged)
    as_is = np.array([[s.judgement.scores.chances[c] for c in CLASSES] for s in judged])
    fit = leave_one_out(sums, truth, CLASSES.index("unknown"))
    found = []
    for system, chances in (("as shipped", as_is), ("leave one out", fit.chances)):
        for name, values in (("Brier score", brier(chances, truth)), ("log loss", log_loss(chances, truth))):
            low, high = bootstrap(values, seed)
            found.append(Result(name, system, "", [float(values.mean())], f"95 % {low:.3f} to {high:.3f}"))
        right = int((chances.argmax(axis=1) == np.array(truth)).sum())
        low, high = wilson(right, len(truth))
        found.append(
            Result("likeliest class right", system, "share", [right / len(truth)], f"95 % {low:.2f} to {high:.2f}")
        )
    found.append(Result("temperature", "fit on all", "", [fit.temperature], f"bias of unknown {fit.bias:+.2f}"))
    return found


def read_cases(files: Sequence[Path], only: str) -> list[dict[str, Any]]:
    """All cases of the files. A line that is not JSON ends the program, naming file and line."""
    found = []
    for path in files:
        for number, line in enumerate(path.read_text().splitlines(), 1):
            if line.strip():
                try:
                    found.append(json.loads(line))
                except ValueError as error:
                    sys.exit(f"cases.py: {path}:{number}: {error}")
    return [c for c in found if str(c["id"]).startswith(only)]


def keep_verdicts(folder: Path, scored: Sequence[Scored]) -> None:
    """Leave every verdict, beside the id of its case."""
    folder.mkdir(parents=True, exist_ok=True)
    lines = [to_json({"id": s.case["id"], "verdict": verdict_fields(s.verdict)}) for s in scored]
    (folder / "verdicts.jsonl").write_bytes(b"\n".join(lines) + b"\n")


def options() -> argparse.Namespace:
    parser = argument_parser(__doc__ or "")
    parser.add_argument("file", nargs="*", type=Path)
    parser.add_argument("--only", default="", help="only cases whose id begins so")
    parser.add_argument("--loo", action="store_true", help="calibration by leaving one case out")
    parser.add_argument("--areas", action="store_true", help="shares by area too")
    parser.add_argument("--svg", type=Path, help="write the reliability diagram to this file")
    found: argparse.Namespace = parser.parse_args()
    if not found.file:
        shared = os.environ.get("KEEPSTEP_SHARED")
        if not shared:
            sys.exit("cases.py: give a FILE of cases, or set KEEPSTEP_SHARED")
        found.file = [Path(shared) / "cases/dev.jsonl"]
    return found


def main() -> None:
    given = options()
    cases = read_cases(given.file, given.only)
    if not cases:
        sys.exit(f"cases.py: no cases in {', '.join(map(str, given.file))}")
    matcher = Matcher(shipped())
    with tempfile.TemporaryDirectory() as folder:
        try:
            scored = [judge(case, Path(folder), matcher) for case in cases]
        except ValueError as error:
            sys.exit(f"cases.py: {error}")
    say_each(scored)
    if given.keep is not None:
        keep_verdicts(given.keep, scored)
    judged = [s for s in scored if s.case["tier"] in JUDGED_TIERS]
    results = shares(judged, "class", lambda s: s.truth)
    if given.areas:
        results += shares(judged, "area", lambda s: str(s.case["area"]))
    results += confusions(judged) + reliability(judged, given.svg)
    if given.loo or given.full:
        results += calibration(judged, given.seed)
    else:
        sums, truth = sums_of(judged)
        as_is = np.array([[s.judgement.scores.chances[c] for c in CLASSES] for s in judged]).reshape(sums.shape)
        results.append(Result("Brier score", "as shipped", "", [float(brier(as_is, truth).mean())] if judged else []))
    count = max(1, len(judged))
    targets = [
        Target("class_accuracy", sum(s.right_class for s in judged) / count, "", ">=", 0.9),
        Target("action_accuracy", sum(s.action for s in judged) / count, "", ">=", 0.85),
        Target("forbidden_actions", sum(s.forbidden for s in scored), "", "==", 0),
        Target("stale_violations", sum(s.stale_violation for s in scored), "", "==", 0),
    ]
    emit("cases", results, targets, output=given.output, packages=["keepstep", "google-re2"])


if __name__ == "__main__":
    main()
