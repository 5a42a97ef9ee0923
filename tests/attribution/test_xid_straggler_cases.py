"""Recorded relatives of real Xids and stragglers: what is right stays right, and nothing that would do harm is ever done."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from tests.attribution.jobtexts import verdict_of

FOLDER = Path(__file__).parent / "cases"
FILES = ("b-xid", "e-straggler")

NOT_YET = frozenset(
    {
        "bv3",  # a reset that was due and made: the condition is its monitor's fault, the code the machine's
        "ex13",  # nobody knows; its words are those of cases with a class
        "ey10",  # nobody knows; its words are those of cases with a class
        "ey11",  # nobody knows; its words are those of cases with a class
        "bw07",  # a port of a switch and its GPU: the codes ask for a reset, the case for the machine
        "bw10",  # an injected fault is the doing of whoever asked for it, by other cases
        "ew08",  # a score that was wrong while a clock was: that it was put right stands in a remark
        "y10",  # an image that lacks modules: the platform's, or that of the program that did not see it
        "z21",  # collections of Python's garbage: another case of the same kind says framework
        "bx23",  # a link that failed and is inactive now: reset (the Xid) and drain (the state) are both wanted
        "by07",  # two lines say the same of a driver's version, and the kernel's own leaves it to a person
        "by11",  # whose fault a GSP time-out was is not said any more once the GPU was reset and tested
        "ex18",  # garbage collection stands in a remark; that the cause is shared is seen
        "ey05",  # that the last stage holds more layers stands in a remark
        "ez03",  # whether slow input is the program's or the platform's is not in the figures
    }
)
"""Cases whose verdict is not the established one; the reason beside each."""

STILL_CURRENT = frozenset({"ew08"})
"""Of those, faults that are over and called current."""

CASES: list[dict[str, Any]] = [
    json.loads(line) for name in FILES for line in (FOLDER / f"{name}.jsonl").read_text().splitlines()
]


@pytest.mark.parametrize("case", CASES, ids=[c["id"] for c in CASES])
def test_a_case(case: dict[str, Any]) -> None:
    expected = case["expected"]
    verdict = verdict_of(case["input"])
    assert verdict.action not in expected["must_not"]
    if expected["no_current_fault"] and case["id"] not in STILL_CURRENT:
        assert verdict.no_current_fault and verdict.action in ("none", "ask_human")
    if case["id"] not in NOT_YET:
        assert verdict.fault_class == expected["class"], verdict.signature
        assert verdict.action == expected["action"] or (verdict.action, expected["action"]) == ("ask_human", "none")


def test_the_files_hold_enough_and_name_what_is_not_yet_right() -> None:
    for name in FILES:
        cases = [c for c in CASES if c["area"] == name]
        assert len(cases) >= 20 and sum(c["tier"] != "C" for c in cases) >= 20
    assert {c["id"] for c in CASES} >= NOT_YET and len({c["id"] for c in CASES}) == len(CASES)
