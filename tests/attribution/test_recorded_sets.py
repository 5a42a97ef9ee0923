"""Sets of recorded cases that were judged before anything was learned from them, and their relatives: which verdicts are not the
established ones is written down, so that none gets worse, or better, unseen."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from keepstep.catalog.load import shipped
from keepstep.launcher.diagnosis import diagnose
from tests.attribution.jobtexts import matcher
from tests.attribution.test_job_cases import right

FOLDER = Path(__file__).parent / "cases"
NEVER_LEARNED = "an older set of which little was learned"
LEANS = "nothing that is known is seen, and the words lean to a class"
WORN = "uncorrected errors and links that grow worse ask for a reset or a drain first"
ONE_SIGN = "firmware and board, or a check and a platform, look the same"
CALM = "calm, with another class or none"
WRONG: dict[str, dict[str, str]] = {
    "w-third": dict.fromkeys(
        (f"w{n:02d}" for n in (2, 3, 4, 5, 8, 13, 15, 16, 20, 24, 25, 26, 27, 28, 30, 31, 32, 36, 39, 40)),
        NEVER_LEARNED,
    ),
    "x-heldout": dict.fromkeys(("x03", "x16", "x17", "x27", "x28", "x32", "x40"), NEVER_LEARNED),
    "y-jobs": {
        "y09": "a check that calls down what is not fitted: the check's fault here, the platform's in the label"
    },
    "y-jobs-relatives": {
        "yr08": CALM,
        "yr23": ONE_SIGN,
        "yr25": "as y09, of a monitor that came up late",
        "yr28": "nothing is wrong and nothing says so",
        "yr33": ONE_SIGN,
        "yr50": "the fabric manager and 802 share three classes; a person is asked",
        "yq12": "the reason names the driver, whose part is taken for the hardware",
    },
    "z-fleet": {
        "z01": LEANS,
        "z16": "who did not come is seen, not why; what has no class asks a person",
        "z23": "a class has to be named where the trainer's wish is to be granted",
        "z30": WORN,
    },
    "z-fleet-relatives": {
        "zr15": WORN,
        "zr17": ONE_SIGN,
        "zr21": LEANS,
        "zr28": "as z23",
        "zr29": "a second run that differs: taking the node out is left to a person",
        "zr32": WORN,
        "zs11": "a series in words is read for standing still, not for growing",
        "zs13": "a server that does not answer: restarting is asked for",
        "zs16": "a prolog's own words are not read",
        "zt02": "a monitor that could not ask the device once: what it says is not read",
    },
    "v-fifth-a": {},
    "v-fifth-a-relatives": {"vr24": "a ping that fails is not read"},
    "v-fifth-b": {"v42": CALM},
    "v-fifth-b-relatives": {
        "vr02": CALM,
        "vr03": "a check that fails again has no class of its own",
        "vr10": CALM,
        "vr11": LEANS,
        "vr20": LEANS,
        "vr21": CALM,
        "vr25": "the machine is named in a section around a command's own",
        "vr36": "nobody complains: a table of a counter that stands still is no alarm",
        "vs11": CALM,
        "vs13": LEANS,
        "vs15": LEANS,
        "vt01": CALM,
        "vt12": LEANS,
    },
    "u-sixth-a": {"u30": CALM},
    "u-sixth-a-relatives": {"ur05": "Xid 69 asks for another start; the text says nothing of the program"},
    "u-sixth-b": {"u31": "ranks that are missing may be dead: a person is asked", "u43": CALM},
    "u-sixth-b-relatives": {},
}
"""By file: cases whose class or action is not the established one, and why."""
STILL_CURRENT = {
    "w-third": {"w08", "w20", "w32", "w33", "w34", "w36", "w40"},
    "x-heldout": {"x32", "x35"},
    "z-fleet-relatives": {"zt02"},
    "v-fifth-b-relatives": {"vr36"},
}
"""By file: cases that are over, or were nothing, and are called a fault."""


@pytest.mark.parametrize("name", WRONG)
def test_the_verdicts_of_a_set(name: str, tmp_path: Path) -> None:
    wrong, current = set(), set()
    for line in (FOLDER / f"{name}.jsonl").read_text().splitlines():
        case: dict[str, Any] = json.loads(line)
        path, expected = tmp_path / "input.log", case["expected"]
        path.write_bytes(case["input"].encode(case["input_encoding"], errors="surrogateescape"))
        verdict = diagnose([str(path)], catalog=shipped(), matcher=matcher()).judgement.verdict
        assert verdict.action not in (expected["must_not"] or ()), case["id"]
        if not right(verdict, expected):
            wrong.add(case["id"])
        if expected["no_current_fault"] and not verdict.no_current_fault:
            current.add(case["id"])
        assert verdict.action in ("none", "ask_human") or not verdict.no_current_fault
    assert wrong == set(WRONG[name])
    assert current == STILL_CURRENT.get(name, set())
