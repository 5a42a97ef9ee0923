"""Saves that meet one in flight, and writes that are spread over time."""

from __future__ import annotations

import threading
import time
from pathlib import Path

import pytest
import torch
from tests.checkpoint.support import FakeRun, RecordingChannel, checkpointer, run_ranks

from keepstep.trainer.channel import Channel


class HeldChannel(RecordingChannel):
    """A launcher that takes its time to grant a commit."""

    def __init__(self) -> None:
        super().__init__()
        self.go_on = threading.Event()

    def grant(self, checkpoint: str, step: int) -> bool:
        return self.go_on.wait(20)


@pytest.mark.parametrize("by", ["argument", "environment"])
def test_a_save_that_falls_due_while_one_is_in_flight_is_left_out_and_counted(
    root: Path, by: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    if by == "environment":
        monkeypatch.setenv("KEEPSTEP_ON_BUSY", "skip")
    channel = HeldChannel()

    def body(rank: int) -> tuple[list[bool], int]:
        run = FakeRun(channel, rank=rank, world_size=2)
        ckpt = checkpointer(
            root, {"w": torch.zeros(10)}, run, every_steps=1, on_busy="skip" if by == "argument" else None
        )
        ckpt.restore()
        begun = [ckpt.maybe_save(step) for step in (1, 2, 3)]
        channel.go_on.set()
        ckpt.wait()
        begun.append(ckpt.maybe_save(4))
        ckpt.close()
        assert ckpt.last_committed_step == 4
        return begun, ckpt.skipped

    # The first rank that asks decides for all; the one that comes second may find the save over and still leaves it out.
    assert run_ranks(2, body) == [([True, False, False, True], 2)] * 2
    assert channel.of_kind("ckpt_skipped") == [{"step": 2, "skipped": 1}, {"step": 3, "skipped": 2}]


def test_writes_are_spread_and_training_is_not_held_up(root: Path, capfd: pytest.CaptureFixture[str]) -> None:
    channel: Channel = RecordingChannel()

    def body(rank: int) -> tuple[float, float]:
        run = FakeRun(channel, rank=rank, world_size=2)
        ckpt = checkpointer(root, {"w": torch.zeros(10)}, run, stagger_s=1.0)
        ckpt.restore()
        begin_s = time.monotonic()
        ckpt.save(1)
        blocked_s = time.monotonic() - begin_s
        ckpt.wait()
        ckpt.close()
        return blocked_s, time.monotonic() - begin_s

    results = run_ranks(2, body)
    assert all(saved_s >= 0.5 for _, saved_s in results)  # rank 1 begins half a second later
    assert all(blocked_s < 0.5 for blocked_s, _ in results)
    said = capfd.readouterr().err
    assert said.count("writes staggered over 1 s: checkpoints are durable that much later") == 1
