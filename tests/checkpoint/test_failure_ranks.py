"""One rank that fails, stalls or is late, and cycles that overlap: the rows of the failure table about several ranks."""

from __future__ import annotations

import os
import subprocess
import sys
import threading
from collections.abc import Callable
from datetime import timedelta
from pathlib import Path
from typing import Any

import pytest
import torch
from tests.checkpoint.faults import STALL, committed
from tests.checkpoint.support import (
    FakeRun,
    Loader,
    RecordingChannel,
    Training,
    checkpointer,
    report_of,
    restore_value,
    run_ranks,
)
from torch.distributed import TCPStore  # type: ignore[attr-defined]

from keepstep.checkpoint.storage.targets import Fault
from keepstep.records.errors import StorageError
from keepstep.trainer.channel import ABSENT


class CycleChannel(RecordingChannel):
    """Grants commits to the cycle that runs now, as the coordinator does."""

    running = 0

    def __init__(self, cycle: int) -> None:
        super().__init__()
        self.cycle = cycle

    def grant(self, checkpoint: str, step: int) -> bool:
        return self.cycle == CycleChannel.running


def test_row_15_the_save_of_a_cycle_that_is_over_cannot_commit(
    root: Path,
    hold: Callable[[str], threading.Event],
    monkeypatch: pytest.MonkeyPatch,
    capfd: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.setattr(CycleChannel, "running", 0)
    lives = []
    for cycle in (0, 1):
        state = {"w": torch.full((40_000,), float(cycle)), "loader": Loader(0)}
        lives.append(checkpointer(root, state, FakeRun(CycleChannel(cycle), cycle=cycle)))
    old, new = lives
    old.restore()
    written = hold("-c0000-")
    assert old.save(1)
    CycleChannel.running = 1  # a fault elsewhere; this rank's process was not reached
    assert new.restore() == 0
    new.state["w"] = torch.full((40_000,), 1.0)
    assert new.save(1)
    new.close()
    written.set()
    old.close()
    assert "did not grant the commit (this cycle is over)" in (old._saver.last_error or "")
    (name,) = committed(root)
    assert "-c0001-" in name and report_of(root / name).ok
    assert restore_value(root, cycle=2) == [(1, 1.0)]
    capfd.readouterr()


@pytest.mark.parametrize("bad", [0, 1])
def test_row_21_one_rank_fails_and_nobody_waits_for_a_third_that_never_reports(
    root: Path, bad: int, hold: Callable[[str], threading.Event], capfd: pytest.CaptureFixture[str]
) -> None:
    channel = RecordingChannel()
    third = hold("rank-00002-of-00003")
    returned = [threading.Event() for _ in range(3)]

    def body(rank: int) -> Any:
        run = FakeRun(channel, rank=rank, world_size=3)
        state = {"w": torch.zeros(100), "loader": Loader(rank)}
        ckpt = checkpointer(root, state, run, timeout_s=600.0)
        ckpt.restore()
        if rank == bad:
            ckpt.inject_fault(Fault(kind="storage-error"))
        ckpt.save(1)
        if rank == 2:
            assert returned[0].wait(40) and returned[1].wait(40), "the others wait for this rank"
            assert channel.get("ckpt/1/rank/2") is ABSENT
            third.set()
        ckpt.wait()
        returned[rank].set()
        assert ckpt.save(2)
        ckpt.close()
        return ckpt._saver.last_error, ckpt.last_committed_step

    outcomes = run_ranks(3, body)
    assert outcomes == [(None, 2)] * 3, outcomes
    (failed,) = channel.of_kind("ckpt_failed")
    assert failed["step"] == 1 and f"rank-0000{bad}-of-00003" in failed["error"]
    assert len(committed(root)) == 1
    capfd.readouterr()


def test_row_22_storage_that_stalls_for_one_rank_costs_a_save_and_training_goes_on(
    root: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    channel = RecordingChannel()

    def body(rank: int) -> Any:
        torch.manual_seed(0)
        training = Training(rank)
        ckpt = checkpointer(root, training.state(), FakeRun(channel, rank=rank, world_size=2), writer="process")
        ckpt.restore()
        ckpt._writer.ready(20)
        if rank == 1:
            ckpt.inject_fault(STALL)
        ckpt._saver._timeout_s = 1.5
        assert ckpt.save(1)
        trained = 0
        while ckpt._saver.in_flight():
            training.step()
            trained += 1
        ckpt.wait()
        error = ckpt._saver.last_error
        ckpt._saver._timeout_s = 60.0  # only the stall was to be short
        assert ckpt.save(2)
        ckpt.close()
        return trained, error, ckpt.last_committed_step, ckpt._writer.respawned

    results = run_ranks(2, body)
    for trained, error, step, _ in results:
        assert trained > 0 and error is not None and step == 2, results
    assert "no answer to write within 1.5 s" in results[1][1] or "ckpt/1/rank/1" in results[1][1]
    assert [result[3] for result in results] == [0, 1], "what stalled was replaced"
    assert [fields["step"] for fields in channel.of_kind("ckpt_failed")] == [1]
    assert len(committed(root)) == 1
    capfd.readouterr()


@pytest.mark.parametrize("limit", [1, 3])
def test_row_23_failures_are_outlived_until_there_are_too_many_in_a_row(
    root: Path, limit: int, capfd: pytest.CaptureFixture[str]
) -> None:
    channel = RecordingChannel()
    ckpt = checkpointer(root, {"w": torch.zeros(10)}, FakeRun(channel), max_failures=limit, every_steps=1)
    ckpt.restore()
    step = 0
    for failures in (limit - 1, limit):  # one fewer is forgotten with the next that is committed
        for _ in range(failures):
            step += 1
            ckpt.inject_fault(Fault(kind="storage-error"))
            assert ckpt.maybe_save(step)
        step += 1
        if failures < limit:
            assert ckpt.maybe_save(step)
    with pytest.raises(StorageError, match=rf"{limit} saves in a row failed under .*Input/output error"):
        ckpt.maybe_save(step)
    ckpt.close()
    assert len(channel.of_kind("ckpt_failed")) == 2 * limit - 1
    assert [fields["step"] for fields in channel.of_kind("committed")] == [limit]
    capfd.readouterr()


_BESIDE_COLLECTIVES = """
import sys
from datetime import timedelta
import torch, torch.distributed as dist
from keepstep.trainer.channel import StoreChannel
from tests.checkpoint.support import FakeRun, Loader, checkpointer

rank, port, folder = int(sys.argv[1]), int(sys.argv[2]), sys.argv[3]
limit = timedelta(seconds=40)
store = dist.TCPStore("127.0.0.1", port, None, False, limit, wait_for_workers=False)
dist.init_process_group("gloo", store=dist.FileStore(f"{folder}/group", 2), rank=rank, world_size=2, timeout=limit)
run = FakeRun(StoreChannel(store, "keepstep/job7/0"), rank=rank, world_size=2)
ckpt = checkpointer(f"{folder}/root", {"w": torch.zeros(40_000), "loader": Loader(rank)}, run)
ckpt.restore()
for step in range(1, 9):
    total = torch.tensor(float(step))
    if (step + rank) % 2:
        ckpt.save(step)
    dist.all_reduce(total)
    if not (step + rank) % 2:
        ckpt.save(step)
    dist.barrier()  # with the save still in flight
    assert total == 2 * step
dist.destroy_process_group()
ckpt.save(9)
ckpt.close()
print(ckpt.last_committed_step, ckpt._saver.last_error)
"""


@pytest.mark.slow
def test_row_13_saves_cross_collectives_of_the_training_and_need_no_group(root: Path, tmp_path: Path) -> None:
    """One rank saves before a collective, the other after it; in one shared group that would be a deadlock."""
    host = TCPStore("127.0.0.1", 0, None, True, timedelta(seconds=40), wait_for_workers=False)
    env = {**os.environ, "PYTHONPATH": os.pathsep.join([str(Path(__file__).parents[2]), *(p for p in sys.path if p)])}
    ranks = [
        subprocess.Popen(
            [sys.executable, "-c", _BESIDE_COLLECTIVES, str(rank), str(host.port), str(tmp_path)],
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
            env=env,
        )
        for rank in range(2)
    ]
    ended = [(process.communicate(timeout=80), process.returncode) for process in ranks]
    assert [(out, code) for (out, _), code in ended] == [("9 None\n", 0)] * 2, ended
    assert len(committed(root)) == 9
