"""Ended at any system call of a save or a restore, by SIGKILL or by a power cut: the old or the new step comes back, whole.

The same walk for pruning is test_prune.py: test_killed_before_every_call_nothing_half_deleted_is_a_candidate, random moments of
a training that saves all the time are test_save_failures.py: test_kill_at_any_moment_...
"""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
import tempfile
from pathlib import Path

import pytest


def walk(what: str, folder: Path, *points: str) -> tuple[list[str], list[tuple[int, str, int]]]:
    """The calls that were met, and what was restored after each end (crash_walk.py)."""
    shared_memory = Path("/dev/shm")  # no disk is needed: what an fsync is for is counted, not waited for
    if os.access(shared_memory, os.W_OK):
        folder = Path(tempfile.mkdtemp(prefix="keepstep-crash-", dir=shared_memory))
    try:
        return _walk(what, folder, *points)
    finally:
        shutil.rmtree(folder)


def _walk(what: str, folder: Path, *points: str) -> tuple[list[str], list[tuple[int, str, int]]]:
    command = [
        sys.executable,
        "-W",
        "error",
        str(Path(__file__).with_name("crash_walk.py")),
        what,
        str(folder),
        *points,
    ]
    env = {**os.environ, "PYTHONPATH": os.pathsep.join([str(Path(__file__).parents[2]), *(p for p in sys.path if p)])}
    done = subprocess.run(command, capture_output=True, text=True, check=False, timeout=500, env=env)
    assert done.returncode == 0, done.stderr[-3000:]
    found = json.loads(done.stdout)
    return found["calls"], [(number, way, step) for number, way, step in found["ends"]]


def check_commit(calls: list[str], ends: list[tuple[int, str, int]], old: int, new: int) -> None:
    """The new step is there from the rename of the marker on, and the old one before: no third state, and no error."""
    (commit,) = [
        number
        for number, call in enumerate(calls, start=1)
        if call.startswith("replace root/.keepstep/") and call.endswith(".marker")
    ]
    kinds = {call.split()[0] for call in calls}
    assert kinds >= {"mkdir", "open", "reserve", "write", "fsync", "replace", "unlink"}, kinds
    assert len(calls) > 30
    wrong = [
        (number, way, calls[number - 1], step)
        for number, way, step in ends
        if step != (new if number > commit or (number == commit and way == "after") else old)
    ]
    assert wrong == []


def check_complete(calls: list[str], ends: list[tuple[int, str, int]]) -> None:
    """No call was left out, and at many of them a power cut had something to take."""
    assert len(calls) > 20
    for way in ("before", "after"):
        assert [number for number, how, _ in ends if how == way] == list(range(1, len(calls) + 1))
    for way in ("data", "names"):
        assert len([number for number, how, _ in ends if how == way]) > 2


def test_a_dozen_ends_of_a_save(tmp_path: Path) -> None:
    calls, ends = walk("save", tmp_path, "12")
    check_commit(calls, ends, old=1, new=2)
    assert len(ends) == 12 and len({way for _, way, _ in ends}) > 2
    assert {step for _, _, step in ends} == {1, 2}


@pytest.mark.slow
@pytest.mark.parametrize(("what", "old", "new"), [("save", 1, 2), ("first", 0, 1)])
def test_every_end_of_a_save(what: str, old: int, new: int, tmp_path: Path) -> None:
    calls, ends = walk(what, tmp_path)
    check_commit(calls, ends, old, new)
    check_complete(calls, ends)


@pytest.mark.slow
def test_every_end_of_a_restore_that_quarantines(tmp_path: Path) -> None:
    calls, ends = walk("quarantine", tmp_path)
    assert any(call.startswith("replace root/.keepstep/quarantine/") for call in calls)
    assert any(call.startswith("replace home/marks/") for call in calls)
    check_complete(calls, ends)
    assert {step for _, _, step in ends} == {1}, ends
