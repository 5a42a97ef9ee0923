"""Cases of jobs and monitors that were judged before anything was learned from them, and their relatives: none may get worse."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from tests.attribution.jobtexts import verdict_of
from tests.attribution.test_job_cases import right

FOLDER = Path(__file__).parent / "cases"
FILES = ("y-jobs", "y-jobs-relatives")

NOT_YET = frozenset(
    {
        "y09",  # a check that calls down what is not fitted: the check's fault here, the platform's in the label
        "yr25",  # as y09, of a monitor that came up late
        "yr26",  # a condition alone asks a person, whatever code of DCGM it quotes
        "yr28",  # nothing is wrong and nothing says so
        "yq12",  # as yr26: the reason names the driver, whose part is taken for the hardware
        "yr50",  # the fabric manager and 802 share three classes; a person is asked
    }
)
"""Cases whose verdict is not the established one; the reason beside each."""

CASES: list[dict[str, Any]] = [
    json.loads(line) for name in FILES for line in (FOLDER / f"{name}.jsonl").read_text().splitlines()
]


@pytest.mark.parametrize("case", CASES, ids=[c["id"] for c in CASES])
def test_a_case(case: dict[str, Any]) -> None:
    expected = case["expected"]
    verdict = verdict_of(case["input"])
    assert verdict.action not in (expected["must_not"] or ())
    if expected["no_current_fault"]:
        assert verdict.no_current_fault
        assert verdict.action in ("none", "ask_human")
    if case["id"] not in NOT_YET and case["tier"] in "AB":
        assert right(verdict, expected), (verdict.fault_class, verdict.action, verdict.signature)


def test_what_is_not_yet_right_is_in_the_files() -> None:
    assert {c["id"] for c in CASES} >= NOT_YET
