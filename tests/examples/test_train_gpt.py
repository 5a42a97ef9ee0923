"""The example runs unchanged under plain python and torchrun, and goes on where it was."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

EXAMPLE = Path(__file__).resolve().parents[2] / "examples" / "train_gpt.py"
TORCHRUN = ["-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2"]


class Folder:
    """Checkpoints, ledgers and weights of runs that continue one another."""

    def __init__(self, path: Path, steps: int, seed: int = 0, launcher: list[str] | None = None) -> None:
        path.mkdir()
        self.path = path
        self.command = [sys.executable, *(launcher or []), str(EXAMPLE), "--root", str(path / "checkpoints")]
        self.command += ["--steps", str(steps), "--save-every", "4", "--seed", str(seed)]
        self.command += ["--out", str(path / "weights.pt")]
        self.env = {k: v for k, v in os.environ.items() if not k.startswith(("KEEPSTEP_", "PET_", "TORCHELASTIC_"))}
        self.env |= {"OMP_NUM_THREADS": "1"}

    def start(self, ledger: str) -> subprocess.Popen[str]:
        command = [*self.command, "--ledger", str(self.path / ledger)]
        return subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, env=self.env)

    def finish(self, ledger: str) -> str:
        """Run to the end; returns the output."""
        child = self.start(ledger)
        output, _ = child.communicate(timeout=100)
        assert child.returncode == 0, output
        return output

    def interrupt(self, ledger: str, after_step: int, signum: int) -> int:
        """Send `signum` once `after_step` was executed; returns the exit status."""
        child = self.start(ledger)
        try:
            path = self.path / ledger / "ledger-c0000-rank0.jsonl"
            while child.poll() is None and (not path.exists() or path.read_text().count("\n") <= after_step):
                time.sleep(0.001)
            child.send_signal(signum)
            child.communicate(timeout=60)
        finally:
            child.kill()
        return child.returncode

    def used(self, ledger: str) -> dict[tuple[int, int], list[int]]:
        """Samples by (step, rank)."""
        lines = [x for path in (self.path / ledger).glob("*.jsonl") for x in path.read_text().splitlines()]
        records = [json.loads(line) for line in lines]
        return {(r["step"], r["rank"]): r["samples"] for r in records}


def test_example_is_short_enough_to_read() -> None:
    assert len(EXAMPLE.read_text().splitlines()) < 200


@pytest.mark.parametrize("signum", [signal.SIGKILL, pytest.param(signal.SIGTERM, marks=pytest.mark.slow)])
def test_plain_python_interrupted_and_continued_equals_an_uninterrupted_run(tmp_path: Path, signum: int) -> None:
    steps, stopped_after = 24, 9
    whole = Folder(tmp_path / "whole", steps, seed=3)
    whole.finish("ledger")
    parts = Folder(tmp_path / "parts", steps, seed=3)
    status = parts.interrupt("ledger-1", stopped_after, signum)
    assert status == (-signal.SIGKILL if signum == signal.SIGKILL else 0)
    parts.finish("ledger-2")
    first, second = parts.used("ledger-1"), parts.used("ledger-2")
    begin = min(step for step, _ in second)
    assert 0 < begin < steps, "the second run did not continue the first"
    if signum == signal.SIGTERM:  # asked to stop: saved at the last step, nothing is done twice
        assert begin == max(step for step, _ in first) + 1
    assert first | second == whole.used("ledger")
    assert (parts.path / "weights.pt").read_bytes() == (whole.path / "weights.pt").read_bytes()


@pytest.mark.slow
def test_other_seed_gives_other_samples(tmp_path: Path) -> None:
    one, two = Folder(tmp_path / "1", 2, seed=1), Folder(tmp_path / "2", 2, seed=2)
    one.finish("ledger")
    two.finish("ledger")
    assert one.used("ledger") != two.used("ledger")


@pytest.mark.slow
def test_torchrun_with_two_ranks_shares_the_samples(tmp_path: Path) -> None:
    steps = 8
    folder = Folder(tmp_path / "run", steps, launcher=TORCHRUN)
    assert f"step {steps}/{steps} loss" in folder.finish("ledger")
    used = folder.used("ledger")
    assert set(used) == {(step, rank) for step in range(steps) for rank in (0, 1)}
    samples = [sample for ids in used.values() for sample in ids]
    assert len(samples) == len(set(samples)) == steps * 2 * 8
    assert (folder.path / "weights.pt").is_file()
