"""Faults that checkpoints of other systems are known to die of, caused here for real. The table is in test_failure_table.py."""

from __future__ import annotations

import copy
import gc
import os
import resource
import select
import shutil
import signal
import sys
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from tests.checkpoint.faults import EIO, SHARD, STALL, committed, writer_pid
from tests.checkpoint.s3 import wait_until
from tests.checkpoint.support import (
    FakeRun,
    Loader,
    RecordingChannel,
    Training,
    checkpointer,
    report_of,
    restore_value,
    save_steps,
)
from tests.disks import small_tmpfs

from keepstep.checkpoint.format.boxes import Mesh
from keepstep.checkpoint.format.image import tensor_table
from keepstep.checkpoint.format.plan import Plan, TensorMeta
from keepstep.checkpoint.storage.targets import PosixTarget
from keepstep.records.errors import ConfigError
from keepstep.trainer.channel import MemoryChannel
from keepstep.trainer.checkpointer import Checkpointer


@pytest.fixture
def one(root: Path) -> Iterator[Checkpointer]:
    """A Checkpointer of one rank with a writer process; w is 300,000 numbers."""
    ckpt = checkpointer(root, {"w": torch.zeros(300_000)}, FakeRun(RecordingChannel()), writer="process")
    ckpt.restore()
    yield ckpt
    ckpt.close()


# ---- the writer


def test_row_01_and_02_an_error_in_the_helper_is_this_saves_and_not_the_nexts(one: Checkpointer, root: Path) -> None:
    one.inject_fault(EIO)
    assert one.save(1)
    assert one.save(2)  # asked for at once: the reply to the first must not become the second's
    one.wait()
    assert one.last_committed_step == 2
    channel = one._run.channel
    assert isinstance(channel, RecordingChannel)
    (failed,) = channel.of_kind("ckpt_failed")
    assert failed["step"] == 1 and "Input/output error" in failed["error"]
    assert [fields["step"] for fields in channel.of_kind("committed")] == [2]
    assert report_of(root / committed(root)[0]).ok
    assert len(committed(root)) == 1


def test_row_01_a_full_disk_in_the_helper(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    with small_tmpfs(tmp_path / "small", "size=3m") as disk:
        run = FakeRun(RecordingChannel())
        ckpt = checkpointer(disk / "root", {"w": torch.zeros(900_000)}, run, writer="process")
        ckpt.restore()
        ckpt.save(1)
        ckpt.wait()
        assert "No space left on device (ENOSPC)" in (ckpt._saver.last_error or "")
        assert committed(disk / "root") == []
        ckpt.state["w"] = torch.zeros(300_000)
        ckpt.save(2)
        ckpt.close()
        assert [report_of(disk / "root" / name).ok for name in committed(disk / "root")] == [True]
    capfd.readouterr()


def test_row_02_saves_in_flight_at_the_same_time_keep_their_own_outcomes(root: Path) -> None:
    channel = RecordingChannel()
    run = FakeRun(channel)
    good, bad = (
        checkpointer(root.parent / name, {"w": torch.zeros(300_000)}, run, writer="process", max_failures=9)
        for name in ("model", "ema")
    )
    for ckpt in (good, bad):
        ckpt.restore()
    for step in range(1, 5):
        bad.inject_fault(EIO)
        for ckpt in (bad, good) if step % 2 else (good, bad):
            assert ckpt.save(step)
        good.wait()
        bad.wait()
        assert (good.last_committed_step, bad.last_committed_step) == (step, None)
        assert (good._saver.last_error, bad._saver.failures_in_row) == (None, step)
    for ckpt in (good, bad):
        ckpt.close()
    assert len(committed(root.parent / "model")) == 4 and committed(root.parent / "ema") == []


def test_row_03_a_killed_writer_process_costs_at_most_one_save(one: Checkpointer, root: Path) -> None:
    assert one.save(1)
    one.wait()
    first = writer_pid(one)
    ended = select.poll()
    ended.register(
        os.pidfd_open(first), select.POLLIN
    )  # a zombie's other threads may still be there: this is the end of all
    os.kill(first, signal.SIGKILL)
    assert ended.poll(20_000)
    assert one.save(2)
    one.wait()
    assert one.last_committed_step == 2, "one that died between saves is replaced unnoticed"
    one.inject_fault(STALL)
    assert one.save(3)
    wait_until(lambda: any(root.glob(f"*-step-00000003-*/{SHARD}")))
    os.kill(writer_pid(one), signal.SIGKILL)
    one.wait()
    assert "was killed by SIGKILL during write" in (one._saver.last_error or "")
    assert one.save(4)
    one.wait()
    assert (one.last_committed_step, one._writer.respawned) == (4, 2)


# ---- what is written


def test_row_04_shards_of_another_attempt_never_mix(root: Path, capfd: pytest.CaptureFixture[str]) -> None:
    (older,) = save_steps(root, [5])
    folders: list[Path] = []
    for cycle, attempt, grants in ((1, 1, False), (0, 2, True)):
        channel = RecordingChannel(grants=grants)  # the first ends between its shards and its marker
        state = {"w": torch.zeros(40_000), "loader": Loader(0)}
        ckpt = checkpointer(root, state, FakeRun(channel, cycle=cycle, attempt=attempt))
        assert ckpt.restore() == 5
        ckpt.state["w"] = torch.full((40_000,), 10.0 * attempt)
        ckpt.save(10)
        ckpt.close()
        (folder,) = {path.parent for path in root.glob(f"*-step-00000010-*/{SHARD}")} - set(folders)
        folders.append(folder)
    first, second = folders
    assert committed(root) == [second.name, older.name]
    assert restore_value(root, cycle=2) == [(10, 20.0)]
    # The same step's old shard under the new marker: the same size, and whole in itself.
    assert (first / SHARD).stat().st_size == (second / SHARD).stat().st_size
    shutil.copy(first / SHARD, second / SHARD)
    assert restore_value(root, cycle=3) == [(5, 5.0)]
    capfd.readouterr()


def tensors_of(training: Training) -> tuple[Any, ...]:
    """The live tensors of a training."""
    return training.model.state_dict(), training.optim.state_dict(), training.loader.seen


def test_row_09_what_changes_right_after_save_returns_is_not_in_the_checkpoint(
    root: Path, hold: Callable[[str], threading.Event]
) -> None:
    training = Training(width=40)
    training.step()
    ckpt = checkpointer(root, training.state(), FakeRun(MemoryChannel()))
    ckpt.restore()
    written = hold(SHARD)
    expected = copy.deepcopy(tensors_of(training))
    assert ckpt.save(1)
    with torch.no_grad():
        for entry in training.optim.state.values():
            for value in entry.values():
                value.fill_(-7.0)
        for value in (*training.model.parameters(), *training.model.buffers(), training.loader.seen):
            value.fill_(-7.0)
    training.loader.position = -7
    assert ckpt._saver.in_flight(), "not a byte is written yet"
    written.set()
    ckpt.close()
    other = Training(width=40)
    other.step()
    checkpointer(root, other.state(), FakeRun(MemoryChannel(), cycle=1)).restore()
    torch.testing.assert_close(tensors_of(other), expected, rtol=0, atol=0)
    assert other.loader.position == 1


def test_row_10_a_staging_buffer_that_is_reused_too_early_fails_the_save(
    root: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    real = PosixTarget.write
    ckpt = checkpointer(root, {"w": torch.zeros(300_000)}, FakeRun(MemoryChannel()))

    def reused(target: PosixTarget, view: memoryview, offset: int) -> None:
        memory = ckpt._staging.slots.all[0].memory
        assert memory is not None
        memory[900_000] ^= 1  # the next staging begins before this write has read the buffer
        real(target, view, offset)

    ckpt.restore()
    monkeypatch.setattr(PosixTarget, "write", reused)
    assert ckpt.save(1)
    ckpt.wait()
    assert f"{SHARD}: staging buffer changed while it was written: block 0" in (ckpt._saver.last_error or "")
    assert committed(root) == []
    monkeypatch.setattr(PosixTarget, "write", real)
    assert ckpt.save(2)
    ckpt.close()
    assert ckpt.last_committed_step == 2
    capfd.readouterr()


def resident_bytes() -> int:
    """Anonymous and shared memory this process has resident."""
    gc.collect()
    lines = dict(line.split(":", 1) for line in Path("/proc/self/status").read_text().splitlines())
    return sum(int(lines[name].split()[0]) << 10 for name in ("RssAnon", "RssShmem"))


@pytest.mark.slow
@pytest.mark.parametrize("memory", [False, True])
def test_row_11_memory_stays_flat_over_many_saves(root: Path, memory: bool) -> None:
    image_bytes = 4 << 20
    run = FakeRun(MemoryChannel())
    ckpt = checkpointer(root, {"w": torch.zeros(image_bytes // 4)}, run, memory=memory)
    ckpt.restore()
    before = 0
    for step in range(1, 31):
        assert ckpt.save(step)
        ckpt.wait()
        assert ckpt.last_committed_step == step
        path = ckpt.newest_committed_path()
        assert path is not None
        shutil.rmtree(path)
        if step == 6:
            before = resident_bytes()
    assert resident_bytes() - before < image_bytes, "24 saves leave less behind than one image is large"
    ckpt.close()


@pytest.mark.slow
def test_row_14_five_thousand_tensors_with_few_descriptors(root: Path) -> None:
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    tensors = {f"t{number}": torch.full((3,), float(number)) for number in range(5000)}
    resource.setrlimit(resource.RLIMIT_NOFILE, (1024, hard))
    try:
        ckpt = checkpointer(root, {"w": tensors}, FakeRun(MemoryChannel()), writer="process")
        ckpt.restore()
        for step in (1, 2):
            assert ckpt.save(step)
            ckpt.wait()
            assert ckpt.last_committed_step == step
            assert len(os.listdir("/proc/self/fd")) < 1000
        ckpt.close()
        again = {"w": {name: torch.zeros(3) for name in tensors}}
        assert checkpointer(root, again, FakeRun(MemoryChannel(), cycle=1)).restore() == 2
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))
    torch.testing.assert_close(again["w"], tensors, rtol=0, atol=0)


# ---- planning


def calls_of(work: Callable[[], object]) -> int:
    """Python functions that `work` calls."""
    count = 0

    def profile(_frame: object, event: str, _argument: object) -> None:
        nonlocal count
        count += event == "call"

    before = sys.getprofile()
    sys.setprofile(profile)
    try:
        work()
    finally:
        sys.setprofile(before)
    return count


def test_row_24_one_ranks_plan_costs_the_same_among_4096_ranks() -> None:
    def plan_of(world_size: int) -> Callable[[], object]:
        mesh = Mesh(shape=(world_size // 8, 8), ranks=tuple(range(world_size)))
        tensors = {
            f"layer{number}": TensorMeta(dtype="F32", shape=(8192, 64), mesh=0, placements=("shard:0", "replicate"))
            for number in range(300)
        }
        return lambda: tensor_table(Plan(tensors, (mesh,), world_size), {}, world_size // 2 + 5)

    few, many = calls_of(plan_of(64)), calls_of(plan_of(4096))
    assert few > 300
    assert many < 1.1 * few


# ---- values


@pytest.mark.parametrize("bad", [object(), {1.5: "x"}, {"f": print}, torch.zeros(2).to_sparse(), (n for n in "ab")])
def test_row_33_what_could_not_be_read_back_is_refused_at_save_time(root: Path, bad: Any) -> None:
    ckpt = checkpointer(root, {"w": torch.zeros(3), "extra": {"deep": bad}}, FakeRun(MemoryChannel()))
    ckpt.restore()
    with pytest.raises(ConfigError, match="extra/deep"):
        ckpt.save(1)
    ckpt.state["extra"] = {"deep": 1}
    assert ckpt.save(2)
    ckpt.close()
    (name,) = committed(root)
    assert "-step-00000002-" in name
