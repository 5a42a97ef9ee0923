"""Staging: planned once, in memory that is there, and written block by block when it is not."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from tests.checkpoint.support import (
    FakeRun,
    RecordingChannel,
    checkpointer,
    report_of,
    restore_value,
    run_ranks,
    save_steps,
)

from keepstep.records.errors import StorageError
from keepstep.records.hostmemory import available_memory_bytes
from keepstep.trainer.channel import MemoryChannel


def test_an_image_that_does_not_fit_is_written_block_by_block(root: Path, capfd: pytest.CaptureFixture[str]) -> None:
    """What is written is the same file, and it is the state at the time of the call: training waits for it."""
    channel, world_size = RecordingChannel(), 2

    def body(rank: int) -> Any:
        run = FakeRun(channel, rank=rank, world_size=world_size)
        # 40 MiB: three blocks a rank. Rank 1 has no room for its half, rank 0 has.
        weights = torch.arange(10 << 20, dtype=torch.float32)
        state = {"w": weights, "step": 7}
        limit = 1 << 20 if rank == 1 else None
        ckpt = checkpointer(root, state, run, staging_bytes=limit, memory=rank >= 0)
        ckpt.restore()
        assert ckpt.save(1)
        weights.zero_()
        ckpt.wait()
        path = ckpt.newest_committed_path()
        ckpt.close()
        return path

    paths = run_ranks(world_size, body)
    assert paths[0] is not None and paths[0] == paths[1], paths
    assert report_of(paths[0]).ok
    said = capfd.readouterr().err
    assert "does not fit into the 1048576 bytes that are free: it is written block by block" in said
    assert channel.of_kind("committed")[0]["kept"] is False, "the memory tier lacks the image of rank 1"

    def again(rank: int) -> tuple[int, torch.Tensor]:
        run = FakeRun(MemoryChannel() if world_size == 1 else second, rank=rank, world_size=world_size, cycle=1)
        ckpt = checkpointer(root, {"w": torch.zeros(10 << 20), "step": 0}, run)
        step = ckpt.restore()
        ckpt.close()
        return step, ckpt.state["w"]

    second = MemoryChannel()
    for step, value in run_ranks(world_size, again):
        assert step == 1 and torch.equal(value, torch.arange(10 << 20, dtype=torch.float32))


def test_only_one_buffer_is_kept_when_two_do_not_fit(root: Path, capfd: pytest.CaptureFixture[str]) -> None:
    channel = RecordingChannel()
    ckpt = checkpointer(root, {"w": torch.zeros(1 << 20)}, FakeRun(channel), memory=True, staging_bytes=9 << 20)
    ckpt.restore()
    for step in (1, 2, 3):
        assert ckpt.save(step)
        ckpt.wait()
        assert [kept.checkpoint for kept in channel.kept()] == [f"job7-step-0000000{step}-c0000-a0001"]
    assert len(ckpt._staging.slots.all) == 1
    ckpt.close()
    assert capfd.readouterr().err.count("a second image of") == 1


def test_with_two_buffers_the_older_image_stays_until_the_next_is_whole(root: Path) -> None:
    channel = RecordingChannel()
    ckpt = checkpointer(root, {"w": torch.zeros(1 << 18)}, FakeRun(channel), memory=True, memory_every_steps=1)
    ckpt.restore()
    for step in (1, 2, 3):
        assert ckpt.maybe_save(step) is False, "an image in memory is no save"
        ckpt.wait()
        kept = [one.checkpoint[10:23] for one in channel.kept()]
        assert kept == [f"0000000{at}".rjust(8, "0") + "-c000" for at in (step, step - 1) if at > 0]
    assert not list(root.glob("job7*"))
    ckpt.close()


def test_an_object_root_refuses_what_cannot_be_staged_with_the_numbers(root: Path) -> None:
    ckpt = checkpointer(root, {"w": torch.zeros(1 << 20)}, FakeRun(MemoryChannel()), staging_bytes=1 << 20)
    ckpt.restore()
    with pytest.raises(StorageError, match=r"an image of 42\d+ bytes cannot be staged in the 1048576 bytes"):
        ckpt._staging.stage(ckpt.state, "s3://bucket", may_stream=False)
    ckpt.close()


def test_the_split_is_planned_once_until_the_structure_changes(root: Path) -> None:
    ckpt = checkpointer(root, {"w": torch.zeros(10), "n": 1}, FakeRun(MemoryChannel()))
    ckpt.restore()
    for step in range(1, 5):
        ckpt.state["w"] = torch.full((10,), float(step))
        ckpt.state["n"] = 10**step
        ckpt.save(step)
    assert ckpt._stager.planned == 1
    ckpt.state["w"] = torch.zeros(11)
    ckpt.save(5)
    assert ckpt._stager.planned == 2
    ckpt.close()
    assert ckpt.last_committed_step == 5


def test_weights_may_change_as_soon_as_save_returns(root: Path) -> None:
    state = {f"t{n}": torch.full((300_000,), 1.0) for n in range(20)}
    ckpt = checkpointer(root, dict(state), FakeRun(MemoryChannel()))
    ckpt.restore()
    ckpt.save(1)
    for value in state.values():
        value.fill_(2.0)
    ckpt.close()
    again = checkpointer(root, {name: torch.zeros(300_000) for name in state}, FakeRun(MemoryChannel(), cycle=1))
    again.restore()
    assert all(bool((again.state[name] == 1.0).all()) for name in state)
    again.close()


def write(path: Path, text: str) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(text)


@pytest.mark.parametrize("version", [1, 2])
def test_the_tightest_cgroup_above_this_process_counts(tmp_path: Path, version: int) -> None:
    write(tmp_path / "proc/meminfo", "MemTotal: 100 kB\nMemAvailable:   64000000 kB\n")
    if version == 2:
        write(tmp_path / "proc/self/cgroup", "0::/job/step\n")
        base, limit, usage, cache = tmp_path / "sys/fs/cgroup", "memory.max", "memory.current", "inactive_file"
        write(base / "job/step/memory.max", "max\n")
    else:
        write(tmp_path / "proc/self/cgroup", "4:memory,cpu:/job/step\n0::/\n")
        base = tmp_path / "sys/fs/cgroup/memory"
        limit, usage, cache = "memory.limit_in_bytes", "memory.usage_in_bytes", "total_inactive_file"
        write(base / "job/step" / limit, f"{1 << 62}\n")
    for folder in (base / "job/step", base / "job"):
        write(folder / usage, "7000\n")
        write(folder / "memory.stat", f"other 1\n{cache} 2500\n")
    write(base / "job" / limit, "10000\n")
    assert available_memory_bytes(tmp_path) == 5500
    (tmp_path / "proc/self/cgroup").unlink()
    assert available_memory_bytes(tmp_path) == 64_000_000 * 1024


def test_state_of_a_save_in_steps(root: Path) -> None:
    """A plain round trip through the helper of other tests, so that a change of theirs shows here."""
    save_steps(root, [3], world_size=2)
    assert restore_value(root, world_size=2) == [(3, 3.0)] * 2
