"""Dumps that torch itself writes on this machine: three ranks over gloo of which one goes wrong. (NCCL needs GPUs.)"""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from tests.hang.jobs import judge, ranks

pytestmark = pytest.mark.slow

JOB = Path(__file__).with_name("gloo_job.py")
LIMIT_S = 100


def dumps_of_a_job(folder: Path, how: str, form: str) -> Path:
    """Start the job, wait for the dumps of all ranks, end it."""
    with open(folder / "output.log", "wb") as log:
        job = subprocess.Popen([sys.executable, JOB, folder, how, form], stdout=log, stderr=log, start_new_session=True)
        try:
            deadline = time.monotonic() + LIMIT_S
            while len(list(folder.glob("dump_rank_?"))) < 3:
                assert job.poll() is None and time.monotonic() < deadline, (folder / "output.log").read_text()
                time.sleep(0.02)
        finally:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(job.pid, signal.SIGKILL)
            job.wait(LIMIT_S)
    return folder


@pytest.mark.parametrize("form", ["pickle", "json"])
def test_a_rank_that_leaves_out_a_collective(tmp_path: Path, form: str) -> None:
    pytest.importorskip("torch")
    hang = judge(dumps_of_a_job(tmp_path, "absent", form))
    assert (hang.kind, ranks(hang), hang.ranks_seen) == ("absent_rank", [2], [0, 1, 2])
    assert (hang.culprits[0].collective, hang.culprits[0].sequence) == ("all_reduce", 3)
    if form == "pickle":
        assert "gloo_job.py" in hang.culprits[0].why and "in train" in hang.culprits[0].why


def test_a_rank_that_takes_groups_in_another_order(tmp_path: Path) -> None:
    pytest.importorskip("torch")
    hang = judge(dumps_of_a_job(tmp_path, "order", "pickle"))
    # gloo's dumps do not tell that all ranks belong to group 1.
    assert (hang.kind, ranks(hang)) == ("absent_rank", [2])
    assert "2 other ranks wait in all_reduce 3 of group 0 (default_pg)" in hang.culprits[0].why
    assert "it is in all_reduce 1 of group 1, at " in hang.culprits[0].why
