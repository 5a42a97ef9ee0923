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
        "ga10",  # nobody knows; its words are those of cases with a class
        "c-r16",  # nobody knows; its words are those of cases with a class
        "z34",  # nobody knows; its words are those of cases with a class
        "y34",  # nobody knows; its words are those of cases with a class
        "h-s02",  # nobody knows; its words are those of cases with a class
        "a-t06",  # whose two jobs it was that wanted one port stands in a remark
        "a-v04",  # a library that cannot read a checkpoint: whose fault that is, its frames do not tell
        "c-t04",  # a group that grew: that it was wanted is seen, the class is not
        "c-r19",  # the whole host was short of memory: whose process took most is not counted
        "c-r20",  # taking a node with two driver versions out is left to a person
        "c-u04",  # exclusive mode and an old process: seen apart, not joined
        "c-w03",  # a node's disk for images is full: storage by the words, the platform's by its use
        "g-r14",  # a process that was stopped, in a listing of ps
        "g-s06",  # a regular expression that keeps the interpreter, without a stack that shows it
        "h-r15",  # a node found unhealthy, and no spare left: both are said
        "h-s01",  # a quarter of the GPU held by the job's own checkpoint writer
        "h-w02",  # the same GPU in every cycle: a remark says so
        "h-w03",  # another straggler each time, in words that no reader of scores knows
        "h-v02",  # a rank's own request to leave: acting on it is left to a person
        "h-v04",  # an injected fault that was survived: the class is not seen
        "h-u04",  # a replica with NaN that is restored again and again: the loss is all that is seen
        "z04",  # a good end: whose its last warnings are is a matter of words
        "z33",  # entries with few fields are taken for whole dumps, which blame nobody
        "z39",  # a standby that stayed: the cancellation is seen, not why it was needed
        "z40",  # a port that stays down while the job runs on without it: drained, not cordoned
        "ga05",  # the same service down on all nodes: the answers of the command are not read
        "ga07",  # a drill: whose it was has no class
        "ga08",  # a plugin that fails at every start: restarting is asked for
        "gc01",  # the answer of getent is not read
        "gc06",  # a launcher that never leaves, in an error of another name
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
