"""Real dumps of NCCL jobs into which faults were injected, and what was injected: NVIDIA/nvidia-resiliency-ext's test data."""

from __future__ import annotations

import os
import re
from pathlib import Path

import pytest

from tests.hang.jobs import judge, ranks


def scenario(name: str) -> Path:
    shared = os.environ.get("KEEPSTEP_SHARED")
    folder = Path(shared or "", "data", "flight-recorder", name)
    if not shared or not folder.is_dir():
        pytest.skip("KEEPSTEP_SHARED does not lead to labelled flight-recorder dumps")
    return folder


@pytest.mark.parametrize("name", ["gpu_error_1st", "lock_gil_2nd"])
def test_exactly_the_injected_ranks_are_named(name: str) -> None:
    folder = scenario(name)
    log = (folder / "fault_injection.log").read_text()
    injected = sorted({int(rank) for rank in re.findall(r"^Rank (\d+), fault_type", log, re.MULTILINE)})
    hang = judge(folder)
    assert ranks(hang) == injected
    assert hang.kind == "absent_rank"
    assert hang.ranks_seen == list(range(16))


def test_the_first_to_fail_comes_first() -> None:
    hang = judge(scenario("gpu_error_1st"))
    first, second = hang.culprits
    # Rank 12 issued less than its peers before it stopped; rank 14 issued all, and its GPU completed nothing of it.
    assert (first.rank, second.rank) == (12, 14)
    assert "issued up to 20536" in first.why
    assert "stuck" in second.why


def test_a_locked_interpreter_leaves_an_empty_dump() -> None:
    hang = judge(scenario("lock_gil_2nd"))
    assert hang.ranks_missing == [10, 15]
    assert {culprit.sequence for culprit in hang.culprits} == {20947}
