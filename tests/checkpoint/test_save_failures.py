"""Saves that fail, on real faults: nothing is committed, all ranks learn of it, and training goes on."""

from __future__ import annotations

import contextlib
import os
import random
import subprocess
import sys
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from tests.checkpoint.support import (
    FakeRun,
    Loader,
    RecordingChannel,
    checkpointer,
    forget_marks,
    report_of,
    restore_value,
    run_ranks,
    save_steps,
)
from tests.checkpoint.test_writer_and_keys import file_size_limit
from tests.disks import small_tmpfs

from keepstep.checkpoint.restore.lineage import list_checkpoints
from keepstep.checkpoint.storage.source import open_root
from keepstep.checkpoint.trust.keys import key_path
from keepstep.records.errors import ConfigError, StorageError
from keepstep.trainer.channel import MemoryChannel


def committed(root: Path) -> list[str]:
    return [entry.name.text for entry in list_checkpoints(open_root(root), trusted_key=None) if entry.committed]


@pytest.fixture
def small_disk(tmp_path: Path) -> Iterator[Path]:
    """A file system of 3 MiB."""
    with small_tmpfs(tmp_path / "small", "size=3m") as place:
        yield place


def test_full_disk_fails_the_save_not_the_training(small_disk: Path, capfd: pytest.CaptureFixture[str]) -> None:
    channel = RecordingChannel()
    ckpt = checkpointer(small_disk / "root", {"w": torch.zeros(250_000)}, FakeRun(channel), max_failures=2)
    ckpt.restore()
    assert ckpt.save(1)
    ckpt.wait()
    assert ckpt.last_committed_step == 1
    ckpt.state["w"] = torch.zeros(600_000)  # does not fit beside the first one
    assert ckpt.save(2)
    ckpt.wait()
    assert ckpt.last_committed_step == 1
    (failed,) = channel.of_kind("ckpt_failed")
    assert failed["step"] == 2
    assert "rank-00000-of-00001.safetensors: No space left on device (ENOSPC)" in failed["error"]
    assert "save of step 2 failed" in capfd.readouterr().err
    assert len(committed(small_disk / "root")) == 1
    # Once there is room again, the next save is committed and the count of failures begins anew.
    for path in (small_disk / "root").glob("*step-00000002*/rank-*"):
        path.unlink()
    ckpt.state["w"] = torch.zeros(250_000)
    assert ckpt.save(3)
    ckpt.close()
    assert ckpt.last_committed_step == 3
    assert report_of(next((small_disk / "root").glob("*step-00000003*"))).ok


def test_failures_in_a_row_end_the_training_clearly(root: Path, capfd: pytest.CaptureFixture[str]) -> None:
    ckpt = checkpointer(root, {"w": torch.zeros(600_000)}, FakeRun(MemoryChannel()), max_failures=2, every_steps=1)
    ckpt.restore()
    ckpt._staging.slots.grow(
        ckpt._staging.slots.all[0], 3_000_000
    )  # the limit below would hit the staging buffer first
    with file_size_limit(1 << 20):
        assert ckpt.maybe_save(1)
        assert ckpt.maybe_save(2)
        with pytest.raises(StorageError, match=r"2 saves in a row failed under .*File too large"):
            ckpt.maybe_save(3)
        ckpt.close()
    assert committed(root) == []
    capfd.readouterr()


@pytest.mark.parametrize("bad_rank", [0, 1])
def test_one_rank_that_fails_is_known_to_all_and_nothing_is_committed(
    root: Path, bad_rank: int, capfd: pytest.CaptureFixture[str]
) -> None:
    channel = RecordingChannel()
    world_size = 3
    ready, limited = threading.Barrier(world_size), threading.Barrier(world_size)

    def body(rank: int) -> tuple[Any, ...]:
        run = FakeRun(channel, rank=rank, world_size=world_size)
        # Only this rank's own values are large enough to meet the limit.
        size = 500_000 if rank == bad_rank else 10
        ckpt = checkpointer(root, {"w": torch.zeros(100), "mine": torch.zeros(size)}, run, per_rank=("mine",))
        ckpt.restore()
        ckpt._staging.slots.grow(
            ckpt._staging.slots.all[0], 3_000_000
        )  # the limit below would hit the staging buffer first
        ready.wait(20)
        with file_size_limit(1 << 20) if rank == 0 else contextlib.nullcontext():
            limited.wait(20)
            ckpt.save(1)
            ckpt.wait()
            limited.wait(20)
        first = ckpt.last_committed_step, ckpt._saver.last_error
        ckpt.state["mine"] = torch.zeros(10)
        ckpt.save(2)
        ckpt.close()
        return *first, ckpt.last_committed_step

    results = run_ranks(world_size, body)
    for result in results:
        assert result[0] is None and result[2] == 2, results
        assert f"rank-{bad_rank:05d}-of-00003.safetensors" in result[1] and "File too large" in result[1]
    assert [fields["step"] for fields in channel.of_kind("ckpt_failed")] == [1]
    assert [fields["step"] for fields in channel.of_kind("committed")] == [2]
    assert len(committed(root)) == 1
    capfd.readouterr()


@pytest.mark.parametrize("bad_rank", [0, 1])
def test_value_that_only_one_rank_cannot_save_does_not_hang_the_others(
    root: Path, bad_rank: int, capfd: pytest.CaptureFixture[str]
) -> None:
    channel = RecordingChannel()

    def body(rank: int) -> Any:
        run = FakeRun(channel, rank=rank, world_size=2)
        extra: Any = object() if rank == bad_rank else 1
        ckpt = checkpointer(root, {"w": torch.zeros(100), "extra": extra}, run, timeout_s=600.0)
        ckpt.restore()
        ckpt.save(1)
        ckpt.wait()
        return ckpt._saver.last_error

    results = run_ranks(2, body, limit_s=20.0)
    assert isinstance(results[bad_rank], ConfigError)
    assert "extra" in results[1 - bad_rank]
    assert committed(root) == []
    capfd.readouterr()


def test_state_dict_that_raises_fails_its_own_rank_and_no_other_waits(
    root: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    class Broken(Loader):
        def state_dict(self) -> dict[str, Any]:
            raise RuntimeError("worker died")

    channel = RecordingChannel()

    def body(rank: int) -> Any:
        state = {"loader": Broken(rank) if rank else Loader(rank)}
        ckpt = checkpointer(root, state, FakeRun(channel, rank=rank, world_size=2), timeout_s=600.0)
        ckpt.restore()
        ckpt.save(1)
        ckpt.wait()
        return ckpt._saver.last_error

    results = run_ranks(2, body, limit_s=20.0)
    assert isinstance(results[1], RuntimeError)
    assert results[0] == "rank 1: RuntimeError: worker died"
    capfd.readouterr()


def test_lost_key_file_does_not_start_another_key_in_the_middle(root: Path) -> None:
    ckpt = checkpointer(root, {"w": torch.zeros(100)}, FakeRun(MemoryChannel()))
    ckpt.restore()
    key = key_path().read_bytes()
    key_path().unlink()
    ckpt.save(1)
    ckpt.close()
    assert not key_path().exists()
    key_path().write_bytes(key)
    path = ckpt.newest_committed_path()
    assert path is not None and report_of(path).ok


def test_replicas_that_differ_in_shape_are_not_mixed(root: Path, capfd: pytest.CaptureFixture[str]) -> None:
    channel = MemoryChannel()

    def body(rank: int) -> Any:
        ckpt = checkpointer(root, {"w": torch.zeros(100 + rank)}, FakeRun(channel, rank=rank, world_size=2))
        ckpt.restore()
        ckpt.save(1)
        ckpt.close()
        return ckpt._saver.last_error

    assert all("rank 1 holds other tensors than rank 0" in error for error in run_ranks(2, body))
    assert committed(root) == []
    capfd.readouterr()


def test_rank_that_is_gone_fails_the_save_in_bounded_time(root: Path, capfd: pytest.CaptureFixture[str]) -> None:
    channel = MemoryChannel()

    def body(rank: int) -> Any:
        run = FakeRun(channel, rank=rank, world_size=3)
        ckpt = checkpointer(root, {"w": torch.zeros(100)}, run, timeout_s=0.5)
        ckpt.restore()
        if rank == 2:
            return "gone"
        ckpt.save(1)
        ckpt.wait()
        return ckpt._saver.last_error

    results = run_ranks(3, body, limit_s=20.0)
    assert "ckpt/1/rank/2" in results[0] and "ckpt/1/rank/2" in results[1]
    assert committed(root) == []
    capfd.readouterr()


def test_no_room_to_stage_is_a_failed_save_like_any_other(root: Path, capfd: pytest.CaptureFixture[str]) -> None:
    channel = RecordingChannel()

    def body(rank: int) -> Any:
        ckpt = checkpointer(root, {"w": torch.zeros(1_000_000)}, FakeRun(channel, rank=rank, world_size=2))
        ckpt.restore()
        assert ckpt.save(1)
        ckpt.wait()
        return ckpt.last_committed_step, ckpt._saver.last_error

    with file_size_limit(1 << 20):
        results = run_ranks(2, body)
    assert all(step is None and "cannot make a shared buffer" in error for step, error in results), results
    assert [fields["step"] for fields in channel.of_kind("ckpt_failed")] == [1]
    capfd.readouterr()


def test_commit_needs_the_grant(root: Path, capfd: pytest.CaptureFixture[str]) -> None:
    channel = RecordingChannel(grants=False)
    ckpt = checkpointer(root, {"w": torch.zeros(100)}, FakeRun(channel))
    ckpt.restore()
    ckpt.save(1)
    ckpt.close()
    assert committed(root) == []
    assert "did not grant" in channel.of_kind("ckpt_failed")[0]["error"]
    capfd.readouterr()


def test_staging_buffer_is_not_touched_while_a_save_is_in_flight(root: Path) -> None:
    """A second save begins only after the first is over, however fast they come; each holds its own step."""
    ckpt = checkpointer(root, {"w": torch.zeros(2_000_000)}, FakeRun(MemoryChannel()))
    ckpt.restore()
    for step in range(1, 4):
        ckpt.state["w"].fill_(float(step))
        assert ckpt.save(step)
        ckpt.state["w"].fill_(-1.0)
    ckpt.close()
    for step in range(1, 4):
        (folder,) = root.glob(f"*-step-{step:08d}-*")
        assert report_of(folder).ok
        data = (folder / "rank-00000-of-00001.safetensors").read_bytes()
        assert data.count(bytes(torch.tensor(float(step)).view(1).view(torch.uint8).tolist()) * 1000) > 0
        assert bytes(torch.tensor(-1.0).view(1).view(torch.uint8).tolist()) * 1000 not in data


def test_state_may_grow_between_saves(root: Path) -> None:
    ckpt = checkpointer(root, {"w": torch.zeros(10)}, FakeRun(MemoryChannel()))
    ckpt.restore()
    for step, size in enumerate([10, 3_000_000, 20], start=1):
        ckpt.state["w"] = torch.ones(size)
        ckpt.save(step)
    ckpt.close()
    assert len(committed(root)) == 3


def test_older_try_of_the_same_save_is_left_alone(root: Path) -> None:
    """Without a launcher that counts, a second life writes the same step of the same cycle: a new folder, never the old."""
    (first,) = save_steps(root, [1])
    (first / "manifest.sigstore.json").rename(root.parent / "kept")
    (root / "latest_checkpointed_iteration.txt").unlink()
    forget_marks()
    before = {path.name: path.read_bytes() for path in first.iterdir()}
    (second,) = save_steps(root, [1])
    assert second.name == f"{first.name}r1"
    assert {path.name: path.read_bytes() for path in first.iterdir()} == before
    assert report_of(second).ok


def test_script_that_ends_without_close_still_commits(root: Path) -> None:
    script = (
        "import sys, torch\n"
        "from tests.checkpoint.support import FakeRun, MemoryChannel, checkpointer\n"
        "ckpt = checkpointer(sys.argv[1], {'w': torch.zeros(3_000_000)}, FakeRun(MemoryChannel()), every_steps=9)\n"
        "ckpt.restore()\n"
        "ckpt.save(1)\n"
    )
    done = subprocess.run(
        [sys.executable, "-W", "error", "-c", script, str(root)],
        capture_output=True,
        text=True,
        check=False,
        timeout=60,
        cwd=Path(__file__).parents[2],
    )
    assert (done.returncode, done.stderr) == (0, "")
    assert restore_like(root) == 1


def restore_like(root: Path) -> int:
    ckpt = checkpointer(root, {"w": torch.zeros(3_000_000)}, FakeRun(MemoryChannel(), cycle=1))
    return ckpt.restore()


@pytest.mark.slow
@pytest.mark.timeout(90)
def test_kill_at_any_moment_never_leaves_a_committed_folder_that_is_not_whole(root: Path) -> None:
    seed = random.randrange(1 << 30)
    command = [sys.executable, str(Path(__file__).with_name("kill_loop.py")), str(root), "15", str(seed)]
    env = {**os.environ, "PYTHONPATH": str(Path(__file__).parents[2])}
    done = subprocess.run(command, capture_output=True, text=True, check=False, timeout=80, env=env)
    assert done.returncode == 0, f"seed {seed}: {done.stdout}{done.stderr}"
    found = list_checkpoints(open_root(root), trusted_key=None)
    whole = [entry for entry in found if entry.committed]
    for entry in whole:
        report = report_of(root / entry.name.text)
        assert report.ok, f"seed {seed}: {report.errors}"
    assert whole, f"seed {seed}"
    assert not (root / ".keepstep" / "quarantine").exists()


def test_each_rank_reports_how_long_it_stood_still(root: Path) -> None:
    channel = RecordingChannel()

    def body(rank: int) -> None:
        state = {"w": torch.zeros(1000), "loader": Loader(rank)}
        ckpt = checkpointer(root, state, FakeRun(channel, rank=rank, world_size=2))
        ckpt.restore()
        ckpt.save(1)
        ckpt.close()

    run_ranks(2, body)
    assert len(channel.of_kind("ckpt_block")) == 2
    assert len(channel.of_kind("committed")) == 1
    assert len(channel.of_kind("restored")) == 1
    assert restore_value(root, world_size=2)[0] is not None
