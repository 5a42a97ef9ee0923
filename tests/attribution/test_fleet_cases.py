"""Recorded cases of fleets, schedulers and monitors, and texts that say the same in other words."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from keepstep.catalog.load import shipped
from keepstep.launcher.diagnosis import diagnose
from tests.attribution.jobtexts import matcher

FOLDER = Path(__file__).parent / "cases"
NOT_YET = frozenset(
    {
        "z01",  # nothing is seen, and the words lean to a class
        "z16",  # who did not come is seen, not why; the words lean to a class, and what has no class asks a person
        "z23",  # a class has to be named where the trainer's wish is to be granted
        "z24",  # links that the board does not have: read as links that are down
        "z30",  # uncorrected errors ask for a reset first, for however long they have stood there
        "zr15",  # as z30: a link that grows worse is drained
        "zr17",  # firmware and board look the same
        "zr21",  # as z01
        "zr28",  # as z23
        "zr29",  # a second run that differs: taking the node out is left to a person
        "zr32",  # as z30
        "zs11",  # a series in words is read for standing still, not for growing
        "zs13",  # a server that does not answer: restarting is asked for
        "zt02",  # a monitor that could not ask the device once: what it says is not read
        "zt07",  # as z01
        "zs16",  # a prolog's own words are not read
    }
)
"""Cases whose verdict is not the established one; the reason beside each."""
CASES: list[dict[str, Any]] = [
    json.loads(line)
    for name in ("z-fleet", "z-fleet-relatives")
    for line in (FOLDER / f"{name}.jsonl").read_text().splitlines()
]


@pytest.mark.parametrize("case", CASES, ids=[c["id"] for c in CASES])
def test_a_case(case: dict[str, Any], tmp_path: Path) -> None:
    path = tmp_path / "input.log"
    path.write_text(case["input"])
    verdict = diagnose([str(path)], catalog=shipped(), matcher=matcher()).judgement.verdict
    expected = case["expected"]
    assert verdict.action not in expected["must_not"]
    if expected["no_current_fault"] and case["id"] not in NOT_YET:
        assert verdict.no_current_fault
        assert verdict.action in ("none", "ask_human")
    if not expected["no_current_fault"]:
        assert not verdict.no_current_fault
    if case["id"] not in NOT_YET:
        asks = verdict.action == "ask_human" and expected["action"] == "none"
        assert verdict.fault_class == expected["class"]
        assert verdict.action == expected["action"] or asks


def test_what_is_not_yet_right_is_in_the_files() -> None:
    assert {c["id"] for c in CASES} >= NOT_YET
