"""Recorded relatives of real failures: what is right stays right, and nothing that would do harm is ever done."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from keepstep.records.verdict import Verdict
from tests.attribution.jobtexts import verdict_of

FOLDER = Path(__file__).parent / "cases"
FILES = ("a-nccl", "c-launcher", "g-recorder", "h-nvrx")

NOT_YET = frozenset(
    {
        "a-t06",  # whose two jobs it was that wanted one port stands in a remark
        "c-t04",  # a group that grew: that it was wanted is seen, the class is not
        "c-r19",  # the whole host was short of memory: whose process took most is not counted
        "c-r20",  # taking a node with two driver versions out is left to a person
        "c-u04",  # exclusive mode and an old process: seen apart, not joined
        "g-r14",  # a process that was stopped, in a listing of ps
        "g-r09",  # whether a dump is old is not read from a listing's dates
        "g-s06",  # a regular expression that keeps the interpreter, without a stack that shows it
        "h-r15",  # a node found unhealthy, and no spare left: both are said
        "h-s01",  # a quarter of the GPU held by the job's own checkpoint writer
        "h-u04",  # a replica with NaN that is restored again and again: the loss is all that is seen
    }
)
"""Cases whose verdict is not the established one; the reason beside each."""

CASES: list[dict[str, Any]] = [
    json.loads(line) for name in FILES for line in (FOLDER / f"{name}.jsonl").read_text().splitlines()
]


def right(verdict: Verdict, expected: dict[str, Any]) -> bool:
    calm = verdict.action == "ask_human" and expected["action"] == "none"
    return verdict.fault_class == expected["class"] and (verdict.action == expected["action"] or calm)


@pytest.mark.parametrize("case", CASES, ids=[c["id"] for c in CASES])
def test_a_case(case: dict[str, Any]) -> None:
    expected = case["expected"]
    verdict = verdict_of(case["input"])
    assert verdict.action not in (expected["must_not"] or ())
    if expected["no_current_fault"] and case["id"] not in NOT_YET:
        assert verdict.no_current_fault
        assert verdict.action in ("none", "ask_human")
    if case["id"] not in NOT_YET:
        assert right(verdict, expected), (verdict.fault_class, verdict.action, verdict.signature)


def test_what_is_not_yet_right_is_in_the_files() -> None:
    assert {c["id"] for c in CASES} >= NOT_YET
