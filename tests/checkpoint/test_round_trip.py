"""What is restored is what was saved, bit for bit, and training goes on as if nothing had happened."""

from __future__ import annotations

import random
import threading
import time
from collections import OrderedDict
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors import safe_open
from tests.checkpoint.support import (
    Decision,
    FakeRun,
    Loader,
    RecordingChannel,
    Training,
    checkpointer,
    report_of,
    restore_value,
    run_ranks,
    save_steps,
)

from keepstep.records.errors import ConfigError, RefuseToStartError
from keepstep.trainer.channel import MemoryChannel
from keepstep.trainer.checkpointer import SAVE_FACTOR


def _bits(tensor: torch.Tensor) -> bytes:
    return bytes(tensor.detach().contiguous().reshape(-1).view(torch.uint8).numpy().tobytes())


def _flat(value: Any, path: str = "") -> dict[str, Any]:
    """Every leaf of a state with its path, tensors as bits, so that states compare exactly."""
    if isinstance(value, dict):
        return {k: v for key, item in value.items() for k, v in _flat(item, f"{path}/{key!r}").items()}
    if isinstance(value, list | tuple):
        return {k: v for at, item in enumerate(value) for k, v in _flat(item, f"{path}/{at}").items()}
    if isinstance(value, torch.Tensor):
        return {path: (value.dtype, tuple(value.shape), _bits(value))}
    return {path: value}


def test_training_goes_on_bit_for_bit(root: Path) -> None:
    torch.manual_seed(3)
    random.seed(3)
    np.random.seed(3)
    first = Training()
    for _ in range(4):
        first.step()
    run = FakeRun(RecordingChannel())
    ckpt = checkpointer(root, first.state(), run)
    assert ckpt.restore() == 0
    assert ckpt.save(4)
    # The snapshot is a copy: training on while the save is in flight changes nothing in it.
    expected = [(first.step(), random.random(), float(np.random.rand())) for _ in range(5)]
    ckpt.close()
    final = _flat({name: part.state_dict() for name, part in first.state().items()})

    torch.manual_seed(99)
    second = Training()
    resumed = checkpointer(root, second.state(), FakeRun(MemoryChannel(), cycle=1))
    assert resumed.restore() == 4
    assert [(second.step(), random.random(), float(np.random.rand())) for _ in range(5)] == expected
    assert _flat({name: part.state_dict() for name, part in second.state().items()}) == final
    resumed.close()


@pytest.mark.parametrize("world_size", [1, 2, 3])
def test_replicas_write_once_and_ranks_keep_their_own(root: Path, world_size: int) -> None:
    channel = MemoryChannel()
    torch.manual_seed(5)
    trained = Training()
    for _ in range(3):
        trained.step()
    model, optim = trained.model.state_dict(), trained.optim.state_dict()

    def save(rank: int) -> None:
        training = Training(rank)
        training.model.load_state_dict(model)
        training.optim.load_state_dict(optim)
        for _ in range(rank + 1):
            training.loader.next()
        ckpt = checkpointer(root, training.state(), FakeRun(channel, rank=rank, world_size=world_size))
        ckpt.restore()
        ckpt.save(9)
        ckpt.close()
        assert ckpt.last_committed_step == 9

    assert run_ranks(world_size, save) == [None] * world_size
    (folder,) = root.glob("job7-*")
    assert report_of(folder).ok
    sizes = []
    for path in sorted(folder.glob("rank-*")):
        with safe_open(path, framework="pt") as file:
            names = [name for name in file.keys() if not name.startswith("rank/")]  # noqa: SIM118 (not a dict)
            tensors = [file.get_tensor(name) for name in names]
            sizes.append(sum(tensor.numel() * tensor.element_size() for tensor in tensors))
    state_bytes = sum(
        len(leaf[2]) for leaf in _flat([model, optim]).values() if isinstance(leaf, tuple) and len(leaf) == 3
    )
    assert sum(sizes) == state_bytes, "every replicated byte is on disk exactly once"

    second = MemoryChannel()

    def restore(rank: int) -> tuple[int, Any, Any]:
        training = Training(rank)
        ckpt = checkpointer(root, training.state(), FakeRun(second, rank=rank, world_size=world_size, cycle=1))
        assert ckpt.restore() == 9
        ckpt.close()
        return training.loader.position, _flat(training.model.state_dict()), _flat(training.optim.state_dict())

    for rank, result in enumerate(run_ranks(world_size, restore)):
        assert result == (rank + 1, _flat(model), _flat(optim))


def test_all_kinds_of_values(root: Path) -> None:
    shared = torch.arange(12.0).reshape(3, 4)
    values: dict[str, Any] = {
        "a": {
            "f8": torch.randn(7).to(torch.float8_e4m3fn),
            "bf16": torch.randn(3, 3).to(torch.bfloat16),
            "complex": torch.randn(4, 2, dtype=torch.complex64),
            "conj": torch.randn(4, dtype=torch.complex128).conj(),
            "bool": torch.tensor([True, False, True]),
            "u16": torch.tensor([1, 65535], dtype=torch.uint16),
            "scalar": torch.tensor(1.5),
            "empty": torch.empty(0, 4),
            "strided": torch.arange(20.0).reshape(4, 5).t()[1:4],
            "nan": torch.tensor([float("nan"), float("inf"), -0.0]),
            "tied": shared,
            "tied again": shared,
            "part of tied": shared[1],
        },
        "b": (1, 2.5, "x", b"\0\xff", None, True, {0: [np.float32(1.25), np.int64(7)], "0": 10**30}),
        "c": {
            "array": np.arange(6, dtype=np.int16).reshape(2, 3),
            "complex": np.array([1 + 2j]),
            "point": np.array(3.0),
            "fortran": np.asfortranarray(np.arange(6.0).reshape(2, 3)),
        },
        "d": torch.Size([2, 3]),
        "e": OrderedDict(z=1, a=2),
        "f": {"z": 1, "a": {"y": 2, "b": 3}},
    }
    ckpt = checkpointer(root, dict(values), FakeRun(MemoryChannel()), per_rank=("c",))
    ckpt.restore()
    ckpt.save(1)
    ckpt.close()
    assert ckpt.last_committed_step == 1
    back = checkpointer(root, dict.fromkeys(values), FakeRun(MemoryChannel(), cycle=1), per_rank=("c",))
    assert back.restore() == 1
    state = back.state
    assert state["a"].keys() == values["a"].keys()
    for name, tensor in values["a"].items():
        assert state["a"][name].dtype == tensor.dtype, name
        assert state["a"][name].shape == tensor.shape, name
        assert _bits(state["a"][name]) == _bits(tensor.resolve_conj()), name
    assert state["a"]["tied"] is state["a"]["tied again"]
    assert state["b"] == values["b"]
    assert [type(item) for item in state["b"][6][0]] == [np.float32, np.int64]
    for name, array in values["c"].items():
        assert state["c"][name].dtype == array.dtype
        assert np.array_equal(state["c"][name], array)
    assert state["c"]["point"].shape == ()
    state["c"]["array"][0, 0] = 5  # restored arrays can be written to
    assert type(state["d"]) is torch.Size and state["d"] == (2, 3)
    assert list(state["f"]) == ["z", "a"] and list(state["f"]["a"]) == ["y", "b"], "dicts keep their order"
    assert list(state["e"].items()) == [("z", 1), ("a", 2)] and type(state["e"]) is OrderedDict


def test_tied_weights_are_on_disk_once(root: Path) -> None:
    weight = torch.randn(1000, 100)
    ckpt = checkpointer(root, {"x": {"embed": weight, "head": weight}}, FakeRun(MemoryChannel()))
    ckpt.restore()
    ckpt.save(1)
    ckpt.close()
    (file,) = root.glob("*/rank-*")
    assert 400_000 < file.stat().st_size < 420_000


def test_buffers_of_a_module_come_whole_from_rank_0(root: Path) -> None:
    channel = MemoryChannel()

    def save(rank: int) -> None:
        torch.manual_seed(0)
        norm = torch.nn.BatchNorm1d(1000)
        assert norm.running_mean is not None
        norm.running_mean.fill_(float(rank))  # replicas differ here in real training
        ckpt = checkpointer(root, {"norm": norm}, FakeRun(channel, rank=rank, world_size=2))
        ckpt.restore()
        ckpt.save(1)
        ckpt.close()

    run_ranks(2, save)
    second = MemoryChannel()

    def restore(rank: int) -> set[float]:
        norm = torch.nn.BatchNorm1d(1000)
        checkpointer(root, {"norm": norm}, FakeRun(second, rank=rank, world_size=2, cycle=1)).restore()
        assert norm.running_mean is not None
        return set(norm.running_mean.tolist())

    assert run_ranks(2, restore) == [{0.0}, {0.0}]


@pytest.mark.parametrize(
    "bad",
    [
        torch.randn(3).to_sparse(),
        torch.empty(3, device="meta"),
        np.array([object()]),
        np.array(["text"]),
        np.zeros(2, dtype=">f4"),
        lambda: None,
    ],
    ids=["sparse", "meta", "object array", "text array", "big-endian", "function"],
)
def test_what_cannot_be_saved_is_named(root: Path, bad: Any) -> None:
    ckpt = checkpointer(root, {"extra": {"deep": [1, bad]}}, FakeRun(MemoryChannel()))
    ckpt.restore()
    with pytest.raises(ConfigError, match=r"extra/deep/1"):
        ckpt.save(1)
    ckpt.close()


def test_arguments_are_checked(root: Path) -> None:
    run = FakeRun(MemoryChannel())
    cases: list[tuple[dict[str, Any], str]] = [
        ({"every_steps": 0}, "every_steps=0"),
        ({"every_seconds": -1.0}, "every_seconds=-1.0"),
        ({"every_steps": 1, "every_seconds": 1.0}, "not both"),
        ({"per_rank": ("lodaer",)}, "lodaer"),
        ({"run_id": "../x"}, "run id"),
    ]
    for options, message in cases:
        with pytest.raises(ConfigError, match=message):
            checkpointer(root, {"w": 1}, run, **options)
    for name in ("rank", "rng", "a/b", "", "1x", "__metadata__"):
        with pytest.raises(ConfigError, match="state name"):
            checkpointer(root, {name: 1}, run)
    with pytest.raises(ConfigError, match="restore"):
        checkpointer(root, {"w": 1}, run).save(1)


def test_cadence_is_the_same_everywhere_and_a_stop_saves(root: Path) -> None:
    run = FakeRun(RecordingChannel())
    ckpt = checkpointer(root, {"w": torch.zeros(4)}, run, every_steps=3)
    ckpt.restore()
    run.decisions = {7: Decision(7, save=True, stop=True), 6: Decision(6, save=True, stop=True)}
    assert [step for step in range(9) if ckpt.maybe_save(step)] == [3, 6, 7]
    assert not ckpt.maybe_save(7), "already saved at this step"
    ckpt.close()
    assert ckpt.last_committed_step == 7

    timed = FakeRun(RecordingChannel(), cycle=1)
    other = checkpointer(root, {"w": torch.zeros(4)}, timed, every_seconds=1e-9)
    assert other.restore() == 7
    assert timed.propose_save is not None and timed.propose_save(8)
    timed.decisions = {9: Decision(9, save=True)}
    assert [step for step in (8, 9, 10) if other.maybe_save(step)] == [9]
    other.close()


def test_a_stop_whose_notice_is_too_short_for_a_save_says_so_on_rank_0(
    root: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    run = FakeRun(RecordingChannel())
    ckpt = checkpointer(root, {"w": torch.zeros(4)}, run, every_steps=3)
    ckpt.restore()
    run.decisions = {6: Decision(6, stop=True, why="a save may take 9.0 s and 4.0 s of the notice are left")}
    assert [step for step in range(7) if ckpt.maybe_save(step)] == [3], "not even at a multiple of every_steps"
    ckpt.close()
    assert ckpt.last_committed_step == 3
    assert "stopping after step 6 without a save: a save may take 9.0 s" in capsys.readouterr().err


def test_what_a_save_needs_is_measured_to_its_commit(root: Path) -> None:
    run = FakeRun(MemoryChannel())
    ckpt = checkpointer(root, {"w": torch.zeros(4)}, run)
    ckpt.restore()
    assert ckpt.save_needs_s() is None
    begin = time.monotonic()
    ckpt.save(1)
    ckpt.wait()
    took_s = time.monotonic() - begin
    needs_s = ckpt.save_needs_s()
    assert needs_s is not None and 0 < needs_s <= SAVE_FACTOR * took_s
    assert run.sections == ["checkpoint"]
    ckpt.close()


def test_a_save_in_flight_adds_to_what_the_next_one_needs(root: Path) -> None:
    begun, goes_on = threading.Event(), threading.Event()

    class Slow(MemoryChannel):
        def grant(self, checkpoint: str, step: int) -> bool:
            begun.set()
            return step == 1 or goes_on.wait(20)

    ckpt = checkpointer(root, {"w": torch.zeros(4)}, FakeRun(Slow()))
    ckpt.restore()
    ckpt.save(1)
    ckpt.wait()
    idle_s = ckpt.save_needs_s()
    begun.clear()
    ckpt._saver._took_s.append(1000.0)
    ckpt._saver._took_s.append(1000.0)
    ckpt.save(2)
    assert begun.wait(20)
    busy_s = ckpt.save_needs_s()
    goes_on.set()
    ckpt.close()
    assert idle_s is not None and busy_s is not None
    assert idle_s < 1000 < 2 * SAVE_FACTOR * 1000 - 100 < busy_s < 2 * SAVE_FACTOR * 1000


def test_nothing_is_committed_once_the_lease_has_run_out(root: Path) -> None:
    channel = RecordingChannel()
    run = FakeRun(channel)
    ckpt = checkpointer(root, {"w": torch.zeros(4)}, run)
    ckpt.restore()
    run.lease_error = "this node's lease ran out 1.0 s ago"
    assert ckpt.save(1)
    ckpt.wait()
    assert ckpt.last_committed_step is None
    assert "lease ran out" in channel.of_kind("ckpt_failed")[0]["error"]
    assert not list(root.glob("*/manifest*"))
    run.lease_error = None
    assert ckpt.save(2)
    ckpt.close()
    assert ckpt.last_committed_step == 2


def test_names_must_match_and_a_plain_tensor_is_filled_in_place(root: Path) -> None:
    save_steps(root, [3])
    tensor = torch.zeros(40_000)
    ckpt = checkpointer(root, {"w": tensor, "loader": Loader(0)}, FakeRun(MemoryChannel(), cycle=1))
    assert ckpt.restore() == 3
    assert ckpt.state["w"] is tensor and float(tensor[0]) == 3.0
    with pytest.raises(RefuseToStartError, match=r"missing there \['ema'\], not asked for \['loader'\]") as caught:
        checkpointer(root, {"w": tensor, "ema": 1}, FakeRun(MemoryChannel(), cycle=1)).restore()
    assert caught.value.code == 42
    with pytest.raises(RefuseToStartError, match=r"'w' is torch.float32\[40000\]"):
        checkpointer(root, {"w": torch.zeros(3), "loader": Loader(0)}, FakeRun(MemoryChannel(), cycle=1)).restore()


def test_marks_for_the_timeline(root: Path) -> None:
    channel = RecordingChannel()
    ckpt = checkpointer(root, {"w": torch.zeros(4)}, FakeRun(channel))
    ckpt.restore()
    ckpt.save(2)
    ckpt.close()
    (restored,) = channel.of_kind("restored")
    assert (restored["step"], restored["source"], restored["checkpoint"]) == (0, "none", None)
    (block,) = channel.of_kind("ckpt_block")
    assert block["step"] == 2 and 0 < block["begin_ns"] < block["end_ns"]
    (committed,) = channel.of_kind("committed")
    path = ckpt.newest_committed_path()
    assert path is not None
    assert (committed["step"], committed["checkpoint"]) == (2, path.name) and committed["persist_ns"] > 0
    assert (root / "latest_checkpointed_iteration.txt").read_text() == "2\n"


def test_parents_form_a_chain(root: Path) -> None:
    first, second = save_steps(root, [1, 2])
    (third,) = save_steps(root, [3], cycle=1)
    reports = [report_of(path) for path in (first, second, third)]
    from keepstep.checkpoint.restore.verify import read_manifest
    from keepstep.checkpoint.storage.source import open_root

    facts = [read_manifest(open_root(root), path.name, trusted_key=None).facts for path in (first, second, third)]
    assert [fact and fact.parent for fact in facts] == [None, reports[0].digest, reports[1].digest]
    assert facts[2] is not None and (facts[2].restored_step, facts[2].restored_from) == (2, second.name)


def test_other_runs_are_found_unless_one_is_named(root: Path) -> None:
    save_steps(root, [5])
    assert restore_value(root, run_id="job7") == [(5, 5.0)]
    assert restore_value(root, run_id="another") == [(0, -1.0)]
