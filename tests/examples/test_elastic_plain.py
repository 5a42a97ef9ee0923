"""A peer's ordinary elastic script, which knows nothing of keepstep, survives a kill under `keepstep run`."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

EXAMPLE = Path(__file__).resolve().parents[2] / "examples" / "elastic_plain.py"


def launch(tmp_path: Path, *run_flags: str, script: Path = EXAMPLE) -> subprocess.CompletedProcess[str]:
    """`keepstep run` with two ranks; sixteen epochs of almost half a second each."""
    command = [sys.executable, "-m", "keepstep.cli.main", "run", "--standalone", "--nproc-per-node", "2"]
    command += ["--run-dir", str(tmp_path / "run"), *run_flags, str(script)]
    command += ["--snapshot", str(tmp_path / "snapshot.pt"), "--epochs", "16", "--step-seconds", "0.05"]
    env = {k: v for k, v in os.environ.items() if not k.startswith(("KEEPSTEP_", "PET_", "TORCHELASTIC_"))}
    return subprocess.run(command, capture_output=True, text=True, timeout=100, env=env, check=False)


def test_script_does_not_import_keepstep() -> None:
    assert not re.search(r"^\s*(import|from)\s+keepstep", EXAMPLE.read_text(), re.MULTILINE)


@pytest.mark.slow
def test_killed_rank_is_replaced_and_the_snapshot_is_used(tmp_path: Path) -> None:
    for name in ("disturbed", "quiet"):
        (tmp_path / name).mkdir()
    disturbed = launch(tmp_path / "disturbed", "--inject", "kill@seconds=3,rank=1")
    assert disturbed.returncode == 0, disturbed.stderr
    assert len(list((tmp_path / "disturbed" / "run" / "cycles").glob("cycle-*.json"))) == 2
    assert "resuming from the snapshot after epoch" in disturbed.stdout
    quiet = launch(tmp_path / "quiet")
    assert quiet.returncode == 0, quiet.stderr
    # The same epochs in the same order, one of them begun twice: the same weights to the last bit.
    snapshots = [(tmp_path / name / "snapshot.pt").read_bytes() for name in ("disturbed", "quiet")]
    assert snapshots[0] == snapshots[1]
