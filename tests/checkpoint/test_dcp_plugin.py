"""Scripts that call torch.distributed.checkpoint themselves: saves become checkpoints of ours, loads are verified first."""

from __future__ import annotations

import os
import pickle
import subprocess
import sys
from concurrent.futures import Future
from pathlib import Path
from typing import Any

import numpy
import pytest
import torch
from tests.checkpoint.dcp_support import (
    Payload,
    ShardingPlanner,
    columns,
    load_dcp,
    rows,
    same,
    save_with,
)
from tests.checkpoint.s3 import S3
from tests.checkpoint.support import FakeRun, Training, checkpointer, flip_bit, report_of
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.checkpoint.default_planner import DefaultLoadPlanner, DefaultSavePlanner
from torch.distributed.checkpoint.state_dict_saver import AsyncCheckpointerType, async_save

from keepstep.checkpoint.restore.contents import open_contents
from keepstep.checkpoint.storage.posix import PosixRoot
from keepstep.checkpoint.torch import Reader, Writer
from keepstep.checkpoint.torch.flat import flatten
from keepstep.checkpoint.trust.policy import policy_from_environment
from keepstep.records.errors import ConfigError, StorageError
from keepstep.trainer.channel import MemoryChannel


@pytest.fixture(autouse=True)
def no_launcher(monkeypatch: pytest.MonkeyPatch) -> None:
    """Run, attempt and cycle are the defaults."""
    for name in ("KEEPSTEP_RUN_ID", "KEEPSTEP_CYCLE", "KEEPSTEP_ATTEMPT", "TORCHELASTIC_RUN_ID"):
        monkeypatch.delenv(name, raising=False)


def training(seed: int) -> dict[str, Any]:
    """States of a model, its optimizer and schedule after a few steps, and plain values of all kinds."""
    torch.manual_seed(seed)
    part = Training()
    for _ in range(3):
        part.step()
    return {
        "model": part.model.state_dict(),
        "optim": part.optim.state_dict(),
        "sched": part.sched.state_dict(),
        "extra": {
            "seed": seed,
            "pair": (torch.full((2,), float(seed)), seed),
            "rng": numpy.random.RandomState(seed).get_state(),
            "raw": bytes([seed]) * 3,
            "none": None,
            "size": torch.Size([seed]),
            "scalar": numpy.float32(seed),
            "mixed": [{"a": torch.ones(2) * seed}, {"a": seed}],
        },
    }


def test_a_state_comes_back_the_same(root: Path) -> None:
    state, other = training(1), training(2)
    writer = Writer(root)
    save_with(writer, state, Path("run/step-7"))
    assert writer.checkpoint is not None
    assert writer.checkpoint.startswith("local-step-00000007-")
    assert report_of(root / writer.checkpoint).ok
    reader = Reader(root)
    load_dcp(other, storage_reader=reader)
    assert reader.checkpoint == writer.checkpoint
    same(state, other)


@pytest.mark.parametrize("cut", [rows, columns])
def test_chunks_as_ranks_would_write_them(root: Path, cut: Any) -> None:
    state, other = training(1), training(2)
    save_with(Writer(root, step=3), state, planner=ShardingPlanner(cut))
    load_dcp(other, storage_reader=Reader(root, step=3))
    same(state, other)


def test_nothing_on_disk_is_a_pickle(root: Path) -> None:
    save_with(Writer(root), training(1))
    for path in root.rglob("*"):
        if path.is_file():
            data = path.read_bytes()
            assert b"torch._utils" not in data and b"PK\x03\x04" not in data, path
            with pytest.raises((pickle.UnpicklingError, EOFError, ValueError, KeyError, IndexError, AttributeError)):
                pickle.loads(data)


def test_steps_are_counted_when_nobody_names_them(root: Path) -> None:
    writer = Writer(root)
    for value in (1.0, 2.0):
        save_with(writer, {"w": torch.full((4,), value)})
    assert writer.checkpoint == "local-step-00000002-c0000-a0000"
    for step, expected in ((None, 2.0), (1, 1.0)):
        state = {"w": torch.zeros(4)}
        load_dcp(state, storage_reader=Reader(root, step=step))
        assert state["w"].tolist() == [expected] * 4


def test_going_back_abandons_what_came_after(root: Path) -> None:
    writer = Writer(root)
    for step in (10, 20):
        save_with(writer, {"w": torch.full((4,), float(step))}, Path(str(step)))
    load_dcp({"w": torch.zeros(4)}, storage_reader=Reader(root, step=10))
    save_with(Writer(root), {"w": torch.full((4,), 15.0)}, Path("15"))
    state = {"w": torch.zeros(4)}
    load_dcp(state, storage_reader=Reader(root))
    assert state["w"].tolist() == [15.0] * 4  # not 20: that line was left


def test_async_save(root: Path) -> None:
    state, other = training(1), training(2)
    with pytest.warns(UserWarning, match="disabled"):
        future = async_save(state, storage_writer=Writer(root, step=5), no_dist=True)
        assert isinstance(future, Future)
        future.result(timeout=60)
    load_dcp(other, storage_reader=Reader(root))
    same(state, other)


@pytest.mark.slow
def test_async_save_in_a_process(root: Path) -> None:
    """torch starts a process of its own; where this process stands in the root goes there with the writer."""
    script = f"""
import warnings
warnings.simplefilter("ignore")
import torch, torch.distributed as dist, torch.distributed.checkpoint as dcp
from torch.distributed.checkpoint.state_dict_saver import AsyncCheckpointerType
from keepstep.checkpoint.torch import Writer, Reader
if __name__ == "__main__":
    dist.init_process_group("gloo", init_method="file://{root.parent}/rdzv", rank=0, world_size=1)
    for step in (1, 2):
        future = dcp.async_save({{"w": torch.full((4,), float(step))}}, storage_writer=Writer({str(root)!r}, step=step),
                                async_checkpointer_type=AsyncCheckpointerType.{AsyncCheckpointerType.PROCESS.name})
        future.result()
    state = {{"w": torch.zeros(4)}}
    dcp.load(state, storage_reader=Reader({str(root)!r}))
    assert state["w"].tolist() == [2.0] * 4
    dist.destroy_process_group()
"""
    path = root.parent / "script.py"
    path.write_text(script)
    subprocess.run([sys.executable, str(path)], check=True, timeout=110)
    assert len(list(root.glob("*/manifest.sigstore.json"))) == 2


def test_a_checkpointer_and_the_plug_in_read_one_another(root: Path) -> None:
    """Also where torch's flat keys lost what they were: the numbers in an optimizer's state."""
    torch.manual_seed(4)
    old, new = Training(), Training()
    for _ in range(2):
        old.step()
    parts: dict[str, Any] = {"model": old.model, "optim": old.optim, "sched": old.sched}
    save_with(Writer(root, step=2), {name: part.state_dict() for name, part in parts.items()})
    ckpt = checkpointer(root, {"model": new.model, "optim": new.optim, "sched": new.sched}, FakeRun(MemoryChannel()))
    assert ckpt.restore() == 2
    for name, part in (("model", new.model), ("optim", new.optim), ("sched", new.sched)):
        same(parts[name].state_dict(), part.state_dict())
    new.step()
    ckpt.save(3)
    ckpt.close()
    state = {"model": old.model.state_dict(), "optim": old.optim.state_dict(), "sched": old.sched.state_dict()}
    reader = Reader(root)
    load_dcp(state, storage_reader=reader)
    assert reader.checkpoint is not None and "step-00000003" in reader.checkpoint
    same(new.optim.state_dict(), state["optim"])


def test_through_an_object_store(s3: S3) -> None:
    state, other = training(1), training(2)
    where: dict[str, Any] = {"root": f"s3://{s3.bucket}/dcp", "store": s3.options()}
    writer = Writer(**where, step=4)
    save_with(pickle.loads(pickle.dumps(writer)), state)  # as it goes to a process of its own
    load_dcp(other, storage_reader=Reader(**where))
    same(state, other)


# ---- failures


def test_a_value_that_cannot_be_kept_fails_the_save(root: Path, tmp_path: Path) -> None:
    with pytest.raises(CheckpointException, match=r"extra/thing.*cannot be saved"):
        save_with(Writer(root), {"w": torch.ones(3), "extra": {"thing": Payload(tmp_path / "canary")}})
    assert not list(root.glob("*/manifest*"))
    assert not (tmp_path / "canary").exists()


def test_an_error_of_the_disk_fails_the_save(root: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    root.mkdir()
    (root / "local-step-00000001-c0000-a0000").mkdir()  # a try that was cut short; the next gets a folder of its own
    writer = Writer(root, step=1)
    save_with(writer, {"w": torch.ones(3)})
    assert writer.checkpoint == "local-step-00000001-c0000-a0000r1"
    import resource

    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (1 << 20, hard))  # the disk of this process is full at 1 MiB
    import signal

    monkeypatch.setattr(signal, "signal", signal.signal)
    before = signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
    try:
        with pytest.raises(CheckpointException, match=r"StorageError.*(File too large|No space)"):
            save_with(Writer(root, step=2), {"w": torch.ones(1 << 20)})
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))
        signal.signal(signal.SIGXFSZ, before)
    assert len(list(root.glob("*/manifest*"))) == 1


def test_a_commit_that_is_not_allowed(root: Path) -> None:
    def no() -> None:
        raise StorageError("this cycle is over")

    with pytest.raises(CheckpointException, match="this cycle is over"):
        save_with(Writer(root, may_commit=no), {"w": torch.ones(3)})
    assert not list(root.glob("*/manifest*"))


def test_damage_is_found_before_it_is_used(root: Path) -> None:
    writer = Writer(root)
    save_with(writer, {"w": torch.arange(5000.0)})
    assert writer.checkpoint is not None
    flip_bit(root / writer.checkpoint / "rank-00000-of-00001.safetensors", 9000)
    state = {"w": torch.zeros(5000)}
    with pytest.raises(CheckpointException, match=r"rank-00000.*not what was written"):
        load_dcp(state, storage_reader=Reader(root))
    assert not state["w"].any()


def test_a_foreign_signature_is_refused(root: Path, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    save_with(Writer(root), {"w": torch.ones(3)})
    monkeypatch.setenv("KEEPSTEP_HOME", str(tmp_path / "elsewhere"))
    with pytest.raises(CheckpointException, match="no committed checkpoint that can be trusted"):
        load_dcp({"w": torch.zeros(3)}, storage_reader=Reader(root))


def test_a_planner_that_caches_is_refused(root: Path) -> None:
    planner = type("Mine", (DefaultSavePlanner,), {})
    writer = Writer(root)
    save_with(writer, {"w": torch.ones(3)}, planner=planner(enable_plan_caching=True))
    with pytest.raises(CheckpointException, match="plan caching"):
        save_with(writer, {"w": torch.zeros(3)}, planner=planner(enable_plan_caching=True))
    assert len(list(root.glob("*/manifest*"))) == 1


def test_names_that_do_not_fit(root: Path) -> None:
    with pytest.raises(ConfigError, match="end in the number"):
        save_with(Writer(root), {"w": torch.ones(3)}, Path("final"))
    with pytest.raises(CheckpointException, match="'rank' is taken"):
        save_with(Writer(root), {"rank": {"w": torch.ones(3)}})
    with pytest.raises(CheckpointException, match=r"no committed checkpoint of step 4.*none"):
        load_dcp({"w": torch.zeros(3)}, storage_reader=Reader(root, step=4))


def test_part_of_a_state(root: Path) -> None:
    """Only what is asked for is read: the rest may even be damaged."""
    writer = Writer(root)
    state = {"a": torch.arange(8.0), "b": torch.randn(5 << 20)}
    save_with(writer, state)
    assert writer.checkpoint is not None
    flip_bit(root / writer.checkpoint / "rank-00000-of-00001.safetensors", 18 << 20)
    other = {"a": torch.zeros(8)}
    load_dcp(other, storage_reader=Reader(root), planner=DefaultLoadPlanner(allow_partial_load=True))
    same(state["a"], other["a"])


# ---- several ranks

RANKS = """
import os, sys, warnings
warnings.simplefilter("ignore")
import torch, torch.distributed as dist, torch.distributed.checkpoint as dcp
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Shard
from torch.distributed.checkpoint.api import CheckpointException
from keepstep.checkpoint.torch import Reader, Writer

root, rank = sys.argv[1], 0
other = os.fork()  # torch is imported once for both
if other == 0:
    rank = 1
dist.init_process_group("gloo", init_method=f"file://{root}.rdzv", rank=rank, world_size=2)
mesh = init_device_mesh("cpu", (2,))
full, bias = torch.arange(35.0).reshape(7, 5), torch.arange(3.0)

def state(value, bias_value, placement):
    local = value.chunk(2, dim=placement.dim)[rank]
    sharded = DTensor.from_local(local, mesh, [placement], run_check=False, shape=value.shape, stride=value.stride())
    return {"w": sharded, "b": bias_value, "n": rank * 0 + 4, f"own{rank}": rank}

saved = state(full, bias, Shard(0))
writer = Writer(root)
dcp.save(saved, storage_writer=writer, checkpoint_id="step-1")
loaded = state(torch.zeros(7, 5), torch.zeros(3), Shard(1))  # another layout: boxes of boxes
loaded["n"] = loaded[f"own{rank}"] = -1
dcp.load(loaded, storage_reader=Reader(root))
assert torch.equal(loaded["w"].to_local(), full.chunk(2, dim=1)[rank]) and torch.equal(loaded["b"], bias), loaded
assert loaded["n"] == 4 and loaded[f"own{rank}"] == rank

class Bad: pass
saved["alone" if rank == 1 else "mine"] = Bad() if rank == 1 else 1
try:
    dcp.save(saved, storage_writer=writer, checkpoint_id="step-2")
except CheckpointException as error:
    assert "alone" in str(error), error
else:
    raise AssertionError("rank 1 failed and nobody else was told")
dist.destroy_process_group()
if other:
    assert os.waitpid(other, 0)[1] == 0
"""


@pytest.mark.slow
def test_two_ranks(root: Path) -> None:
    """Shards of two processes, loaded in another layout; a save that one rank cannot write fails on both, uncommitted."""
    env = {**os.environ, "OMP_NUM_THREADS": "1", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "0"}
    subprocess.run([sys.executable, "-c", RANKS, str(root)], env=env, check=True, timeout=100)
    committed = [path.parent.name for path in root.glob("*/manifest.sigstore.json")]
    assert committed == ["local-step-00000001-c0000-a0000"]
    assert len(list((root / committed[0]).glob("rank-*"))) == 2
    contents = open_contents(PosixRoot(root), committed[0], policy_from_environment())
    try:
        assert {"w", "b", "n", "own0", "own1"} == set(flatten(contents).leaves)
        chunks = contents.index.tensors["w"].chunks
        assert chunks is not None and [chunk.rank for chunk in chunks] == [0, 1]
    finally:
        contents.close()
