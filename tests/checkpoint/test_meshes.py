"""Real FSDP2, HSDP and tensor parallelism: saved by some ranks, restored by others in another arrangement, every bit."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

SCRIPT = Path(__file__).with_name("mesh_script.py")


def launch(root: Path, kind: str, ranks: int, steps: int, tmp_path: Path) -> dict[str, str]:
    command = [sys.executable, "-m", "keepstep.cli.main", "run", "--standalone", f"--nproc-per-node={ranks}"]
    command += ["--run-dir", str(tmp_path / f"run-{kind}-{ranks}-{steps}"), str(SCRIPT), str(root), kind, str(steps)]
    done = subprocess.run(
        command, capture_output=True, text=True, timeout=300, check=False, env={**os.environ, "OMP_NUM_THREADS": "1"}
    )
    assert done.returncode == 0, done.stdout + done.stderr
    return dict(re.findall(r"DIGEST (\w+ \d+) ([0-9a-f]{64})", done.stdout))


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["tp-fsdp", "hsdp", "fsdp"])
def test_state_of_four_ranks_comes_back_on_two_and_on_one(kind: str, root: Path, tmp_path: Path) -> None:
    saved = launch(root, kind, 4, 3, tmp_path)["trained 3"]
    assert launch(root, kind, 4, 3, tmp_path / "again")["restored 3"] == saved
    assert launch(root, "fsdp", 2, 3, tmp_path)["restored 3"] == saved
    assert launch(root, "plain", 1, 3, tmp_path)["restored 3"] == saved
    grown = launch(root, "plain", 1, 4, tmp_path)["trained 4"]
    assert launch(root, kind, 4, 4, tmp_path)["restored 4"] == grown
