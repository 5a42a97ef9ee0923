"""The coordinator is killed after each journal record in turn, in a run that also loses a rank: nothing may be lost."""

from __future__ import annotations

import os
import signal
from pathlib import Path

import pytest

from keepstep.launcher.coordination.journal import epochs, read_records
from tests.launcher.harness import Launch, run, training, wait_until

pytestmark = pytest.mark.slow

FLAGS = ("--standalone", "--nproc-per-node", "2", "--inject", "kill@step=15,rank=1")


@pytest.fixture(scope="module")
def reference(tmp_path_factory: pytest.TempPathFactory) -> tuple[str, int]:
    """Final digest of the same run with a living coordinator, and how many records its journal has."""
    code, launch = run(tmp_path_factory.mktemp("reference"), training(), *FLAGS)
    assert code == 0, launch.output
    return launch.wait_line(r"^end 30 (\S+)").group(1), len(list(read_records(launch.run_dir)))


@pytest.mark.parametrize("share", [i / 24 for i in range(24)])
def test_killed_after_a_record_nothing_is_lost(tmp_path: Path, reference: tuple[str, int], share: float) -> None:
    digest, records = reference
    # The last records come with the verdict: a coordinator that wrote it may be gone before it can be killed.
    wanted = 1 + int(share * (records - 4))
    launch = Launch(tmp_path, training(), *FLAGS)
    journal = launch.run_dir / "journal" / "000001.jsonl"
    wait_until(lambda: journal.read_bytes().count(b"\n") >= wanted)
    opened = next(r for r in read_records(launch.run_dir) if r["type"] == "open")
    os.kill(opened["pid"], signal.SIGKILL)
    assert launch.finish() == 0, launch.output
    assert launch.wait_line(r"^end 30 (\S+)").group(1) == digest
    assert launch.verdict["outcome"] == "succeeded" and launch.verdict["last_committed_step"] == 30
    # A save that was in flight when its coordinator died may not have been committed before the rank was killed.
    first, second = (c.restored_step for c in launch.cycles)
    assert first == 0 and second in (0, 10)
    assert launch.summary["steps"]["rolled_back"] == 15 - second
    assert len(epochs(launch.run_dir)) == 2
    launch.check_partition()
