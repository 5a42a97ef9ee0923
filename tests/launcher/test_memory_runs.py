"""Real runs on one host: what a rank kept in memory survives it, and the coordinator; at the job's end it is given back."""

from __future__ import annotations

import os
import signal
from pathlib import Path

import pytest

from keepstep.launcher.coordination.journal import read_records
from tests.launcher.harness import Launch, wait_until
from tests.launcher.memory_script import SCRIPT


def opened(launch: Launch) -> list[int]:
    """pids of the coordinators so far."""
    return [r["pid"] for r in read_records(launch.run_dir) if r["type"] == "open"]


def memory_of(pid: int) -> list[str]:
    """Memory files that a process holds."""
    links = [str(path.readlink()) for path in Path(f"/proc/{pid}/fd").iterdir()]
    return sorted(
        link.removeprefix("/memfd:").removesuffix(" (deleted)") for link in links if "/memfd:keepstep-" in link
    )


@pytest.mark.slow
def test_what_ranks_kept_survives_them_and_the_coordinator(tmp_path: Path) -> None:
    gate = tmp_path / "gate"
    launch = Launch(
        tmp_path, SCRIPT, "--standalone", "--nproc-per-node", "2", GATE=str(gate), LOOK_AGAIN="1", OMP_NUM_THREADS="1"
    )
    launch.wait_line(r"kept manifest.json True")
    launch.wait_line(r"rank 1 cycle 0 waits")
    started = next(r for r in read_records(launch.run_dir) if r["type"] == "started")
    assert {"keepstep-0-slot-rank-0", "keepstep-1-slot-rank-1"} <= set(memory_of(launch.process.pid))
    os.kill(next(r["pid"] for r in started["ranks"] if r["rank"] == 1), signal.SIGKILL)
    for rank in (0, 1):
        launch.wait_line(rf"rank {rank} cycle 1 sees \[\(True, 3\)\]")
        launch.wait_line(rf"rank {rank} cycle 1 fetched shm equal True")
    launch.wait_line(r"rank 1 cycle 1 waits")
    (first,) = opened(launch)
    os.kill(first, signal.SIGKILL)
    wait_until(lambda: len(opened(launch)) == 2)
    Path(f"{gate}.1").touch()
    for rank in (0, 1):
        launch.wait_line(rf"rank {rank} cycle 1 sees \[\(True, 3\)\]", count=2)
        launch.wait_line(rf"rank {rank} cycle 1 fetched shm equal True", count=2)
    assert launch.finish() == 0
    assert (launch.cycles[1].restored_from, launch.cycles[1].restored_step) == ("shm", 5)
    assert launch.cycles[1].recovery == "respawn"
    assert launch.verdict["last_committed_step"] is None
    launch.check_partition()


@pytest.mark.slow
def test_the_tier_can_be_switched_off(tmp_path: Path) -> None:
    gate = tmp_path / "gate"
    Path(f"{gate}.0").touch()
    launch = Launch(tmp_path, SCRIPT, "--standalone", "--memory-tier", "off", GATE=str(gate), LOOK_AGAIN="1")
    launch.wait_line(r"kept rank-0 False")
    launch.wait_line(r"rank 0 cycle 0 sees \[\]")
    launch.wait_line(r"rank 0 cycle 0 refused: .*in the memory of no node")
    assert launch.finish() == 0
