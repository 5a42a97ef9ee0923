"""The sharded example loses a node, goes on with fewer ranks, and uses every sample once."""

from __future__ import annotations

import json
import os
import shutil
import signal
import subprocess
import sys
from pathlib import Path

import pytest
from tests.launcher.harness import Launch

from keepstep.trainer.loader import make_order, mix

EXAMPLE = Path(__file__).resolve().parents[2] / "examples" / "train_fsdp.py"
BATCH, STEPS = 8, 60


def arguments(folder: Path) -> tuple[str, ...]:
    return (
        "--root",
        str(folder / "ckpt"),
        "--steps",
        str(STEPS),
        "--save-every",
        "15",
        "--ledger",
        str(folder / "ledger"),
    )


def test_example_is_short_enough_to_read() -> None:
    assert len(EXAMPLE.read_text().splitlines()) < 140


@pytest.mark.slow
def test_it_runs_under_torchrun(tmp_path: Path) -> None:
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2", str(EXAMPLE)]
    env = {k: v for k, v in os.environ.items() if not k.startswith(("KEEPSTEP_", "PET_", "TORCHELASTIC_"))}
    done = subprocess.run(
        [*command, *arguments(tmp_path)],
        capture_output=True,
        text=True,
        timeout=100,
        env=env | {"OMP_NUM_THREADS": "1"},
        check=False,
    )
    assert done.returncode == 0, done.stderr
    assert f"step {STEPS}/{STEPS} loss" in done.stdout


@pytest.mark.slow
def test_a_lost_node_is_done_without(tmp_path: Path) -> None:
    shutil.copy(EXAMPLE, tmp_path / "script.py")
    launches = [
        Launch(
            tmp_path,
            None,
            "--nnodes",
            "1:2",
            "--node-name",
            name,
            "--rdzv-id",
            "job",
            "script.py",
            args=arguments(tmp_path),
            OMP_NUM_THREADS="1",
        )
        for name in ("a", "b")
    ]
    try:
        launches[0].wait_line(r"^step 20/")
        launches[1].signal(signal.SIGKILL)
        assert launches[0].finish() == 0, launches[0].output
    finally:
        for launch in launches:
            launch.process.kill()
            launch.process.wait()
            Launch.started.remove(launch)
    first, second = launches[0].cycles
    assert (first.placement, second.placement) == ("first", "shrink")
    begin = second.restored_step
    assert begin is not None and begin >= 15
    steps: dict[int, list[int]] = {}
    for cycle, world in ((0, 2), (1, 1)):
        steps = {step: used for step, used in steps.items() if cycle == 0 or step <= begin}
        for rank in range(world):
            for line in map(json.loads, (tmp_path / "ledger" / f"c{cycle:04d}-r{rank}.jsonl").read_text().splitlines()):
                steps.setdefault(line["step"], []).extend(line["samples"])
    assert sorted(steps) == list(range(1, STEPS + 1))
    used = [sample for step in sorted(steps) for sample in steps[step]]
    assert len(used) == BATCH * (2 * begin + STEPS - begin)
    order = make_order(4096, mix(1, 0))
    assert used == [order(place) for place in range(len(used))]
