"""Checkpoints of torch.distributed.checkpoint become ours: every value the same, nothing in them ever executed."""

from __future__ import annotations

import contextlib
import functools
import io
import math
import os
import pickle
import random
import subprocess
import sys
from collections import OrderedDict
from pathlib import Path
from typing import Any

import numpy
import pytest
import torch
from click.testing import CliRunner
from hypothesis import given, settings
from hypothesis import strategies as st
from tests.checkpoint.dcp_support import (
    Payload,
    ShardingPlanner,
    columns,
    edit_metadata,
    load_dcp,
    rows,
    same,
    save_dcp,
)
from tests.checkpoint.support import FakeRun, Training, checkpointer, flip_bit, report_of, run_ranks

from keepstep.checkpoint.format.boxes import Box
from keepstep.checkpoint.format.layout import FolderName
from keepstep.checkpoint.format.runs import runs, tiling_problem
from keepstep.checkpoint.storage.posix import PosixRoot
from keepstep.checkpoint.torch.dcpimport import Imported, ImportOptions, describe, import_dcp
from keepstep.checkpoint.torch.dcpread import METADATA_NAMES, read_dcp
from keepstep.checkpoint.torch.saved import ITEM_NAMES, read_record
from keepstep.checkpoint.trust.signers import local_signer
from keepstep.cli.main import main
from keepstep.records.errors import ConfigError, VerificationError
from keepstep.records.pickles import parse_pickle
from keepstep.trainer.channel import MemoryChannel

DTYPES = (
    torch.float64, torch.float32, torch.float16, torch.bfloat16, torch.int64, torch.int32, torch.int16, torch.int8,
    torch.uint8, torch.uint16, torch.uint32, torch.uint64, torch.complex64, torch.complex128,
    torch.float8_e4m3fn, torch.float8_e5m2,
)  # fmt: skip
PLAIN = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False) | st.text() | st.binary(),
    lambda inner: (
        st.lists(inner, max_size=4)
        | st.lists(inner, max_size=4).map(tuple)
        | st.dictionaries(st.text(max_size=5) | st.integers(), inner, max_size=4)
    ),
    max_leaves=20,
)


def run_import(source: Path, root: Path, **options: Any) -> Imported:
    """Import as step 7 of run "old"."""
    return import_dcp(source, PosixRoot(root), FolderName(7, 0, 1, 0, "old"), local_signer(), ImportOptions(**options))


def restored(root: Path, names: list[str], world_size: int = 1) -> list[dict[str, Any]]:
    """What `Checkpointer.restore` puts in place of each of `names`, by rank."""
    channel = MemoryChannel()

    def body(rank: int) -> dict[str, Any]:
        ckpt = checkpointer(root, dict.fromkeys(names), FakeRun(channel, rank=rank, world_size=world_size), per_rank=[])
        assert ckpt.restore() == 7
        ckpt.close()
        return ckpt.state

    results = run_ranks(world_size, body)
    for result in results:
        if isinstance(result, BaseException):
            raise result
    return results


def everything() -> dict[str, Any]:
    """A state with each kind of leaf DCP writes, in awkward memory layouts."""
    torch.manual_seed(1)
    bits = torch.randint(0, 256, (24, 16), dtype=torch.uint8)
    tensors = {str(dtype).removeprefix("torch."): bits.clone().reshape(-1).view(dtype) for dtype in DTYPES}
    base = torch.randn(4, 3, 5, 6)
    return {
        "types": tensors,
        "layouts": {
            "channels_last": base.to(memory_format=torch.channels_last),
            "transposed": torch.randn(7, 9).t(),
            "sliced": torch.randn(20, 6)[::2, 1:4],
            "expanded": torch.randn(5, 1).expand(5, 4),
            "complex": torch.randn(3, 4, dtype=torch.complex128).t(),
            "scalar": torch.tensor(2.5),
            "empty": torch.empty(0, 3),
            "parameter": torch.nn.Parameter(torch.randn(3)),
            "bools": torch.tensor([True, False, True]),
        },
        "plain": {
            "lr": 1e-3, "betas": (0.9, 0.999), "none": None, "flag": True, "big": 1 << 80, "text": "grün",
            "raw": b"\x00\xff", "list": [1, 2.5, "x"], "nan": float("inf"), "pair": (torch.arange(3), "mixed"),
            "of_dicts": [{"a": 1}, {"a": torch.ones(2)}], "size": torch.Size([2, 3]),
            "ordered": (OrderedDict(b=1, a=2),),
        },
        "rng": {"python": random.getstate(), "numpy": numpy.random.get_state(), "torch": torch.get_rng_state()},
        "numbers": {"scalar": numpy.float64(1.5), "array": numpy.arange(6, dtype=numpy.int16).reshape(2, 3)},
    }  # fmt: skip


def renamed(state: dict[str, Any]) -> dict[str, Any]:
    """`state` under names that a state may have ("rng" is taken)."""
    return {("random" if name == "rng" else name): value for name, value in state.items()}


@pytest.mark.parametrize("cut", [None, rows, columns])
def test_every_value_comes_back_the_same(tmp_path: Path, root: Path, cut: Any) -> None:
    state = renamed(everything())
    options = {} if cut is None else {"planner": ShardingPlanner(cut)}
    source = save_dcp(state, tmp_path / "dcp", **options)
    done = run_import(source, root)
    assert done.manifest.signed
    assert report_of(root / done.folder).ok
    same(state, restored(root, list(state))[0])


def test_split_over_ranks(tmp_path: Path, root: Path) -> None:
    state = renamed(everything())
    run_import(save_dcp(state, tmp_path / "dcp", planner=ShardingPlanner(rows)), root, world=3)
    for values in restored(root, list(state), world_size=3):
        same(state, values)


def test_training_goes_on_from_an_import(tmp_path: Path, root: Path, capsys: pytest.CaptureFixture[str]) -> None:
    torch.manual_seed(3)
    old = Training()
    for _ in range(4):
        old.step()
    parts: dict[str, Any] = {"model": old.model, "optim": old.optim, "sched": old.sched}
    source = save_dcp({name: part.state_dict() for name, part in parts.items()}, tmp_path / "run-step-000004")
    result = CliRunner().invoke(main, ["ckpt", "import", str(source), str(root), "-o", "json"], catch_exceptions=False)
    assert '"step": 4' in result.stdout
    torch.manual_seed(99)
    new = Training()
    ckpt = checkpointer(root, {"model": new.model, "optim": new.optim, "sched": new.sched}, FakeRun(MemoryChannel()))
    assert ckpt.restore() == 4
    ckpt.close()
    assert "no random state" in capsys.readouterr().err
    same(old.optim.state_dict(), new.optim.state_dict())
    losses = []
    for training in (old, new):
        training.loader.position = 0
        torch.manual_seed(5)
        losses.append([training.step() for _ in range(3)])
    assert losses[0] == losses[1]


def test_bare_state_dict_needs_a_name(tmp_path: Path, root: Path) -> None:
    model = torch.nn.Linear(3, 2)
    source = save_dcp(model.state_dict(), tmp_path / "dcp")
    run_import(source, root, wrap="model")
    same(dict(model.state_dict()), restored(root, ["model"])[0]["model"])


def test_optimizer_without_state(tmp_path: Path, root: Path) -> None:
    optim = torch.optim.SGD(torch.nn.Linear(2, 2).parameters(), lr=0.1)
    done = run_import(save_dcp({"optim": optim.state_dict()}, tmp_path / "dcp"), root)
    assert done.notes
    same(optim.state_dict(), restored(root, ["optim"])[0]["optim"])


def test_keys_that_look_like_numbers(tmp_path: Path, root: Path) -> None:
    source = save_dcp({"sched": {"milestones": {30: 1, 60: 1}}}, tmp_path / "dcp")
    with pytest.raises(ConfigError, match=r"sched/milestones look like numbers.*--digit-keys"):
        run_import(source, root)
    assert not root.exists()
    run_import(source, root, digit_keys="int")
    assert restored(root, ["sched"])[0]["sched"] == {"milestones": {30: 1, 60: 1}}


def test_saved_without_collectives(tmp_path: Path, root: Path) -> None:
    """One metadata file a rank, each with its own shards and its own copy of what is replicated."""
    full, replica = torch.randn(6, 4), torch.randn(3)
    source = tmp_path / "dcp"
    source.mkdir()
    for rank in range(2):
        part = save_dcp({"w": full, "r": replica}, tmp_path / f"r{rank}", planner=ShardingPlanner(rows))
        edit_metadata(part, functools.partial(_keep, rank))
        (part / ".metadata").rename(source / f"__{rank}.metadata")
        (part / "__0_0.distcp").rename(source / f"__{rank}_0.distcp")
    run_import(source, root)
    same({"w": full, "r": replica}, restored(root, ["w", "r"])[0])


def _keep(rank: int, metadata: Any) -> None:
    """Make `metadata` that of one of two ranks: half of the chunks of `w`, and its own file."""
    chunks = metadata.state_dict_metadata["w"].chunks
    metadata.state_dict_metadata["w"].chunks = chunks[:2] if rank == 0 else chunks[2:]
    for info in metadata.storage_data.values():
        info.relative_path = f"__{rank}_0.distcp"


@pytest.mark.slow
def test_memory_is_bounded_by_a_chunk(tmp_path: Path, root: Path) -> None:
    """320 MB in chunks of 20 MB, by a process of its own, whose memory is looked at."""
    state = {f"w{number}": torch.randn(5_000_000) for number in range(16)}
    source = save_dcp(state, tmp_path / "step-1")
    script = (
        "import resource, sys; from keepstep.cli.main import main\n"
        "from keepstep.checkpoint.torch import dcpimport\n"
        "before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss\n"
        "main(sys.argv[1:], standalone_mode=False)\n"
        "print(resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before, 'torch' in sys.modules, file=sys.stderr)"
    )
    command = [sys.executable, "-c", script, "ckpt", "import", str(source), str(root)]
    done = subprocess.run(command, check=True, timeout=100, capture_output=True, text=True)
    grown_kb, torch_loaded = done.stderr.split()[-2:]
    assert int(grown_kb) < 150_000, done.stderr
    assert torch_loaded == "False"


# ---- what must never run


def test_payload_in_metadata_is_refused(tmp_path: Path, root: Path) -> None:
    canary = tmp_path / "canary"
    source = save_dcp({"w": torch.ones(3)}, tmp_path / "dcp")
    edit_metadata(source, lambda metadata: setattr(metadata, "planner_data", Payload(canary)))
    with pytest.raises(VerificationError, match=r"refers to pathlib\.Path\.touch|refers to builtins\.getattr"):
        run_import(source, root)
    assert not canary.exists() and not root.exists()
    with contextlib.suppress(Exception):
        load_dcp({"w": torch.ones(3)}, source)
    assert canary.exists()  # the payload is a live one: torch's own reader runs it


def test_payload_in_a_value_is_refused(tmp_path: Path, root: Path) -> None:
    canary = tmp_path / "canary"
    source = save_dcp({"extra": {"lr": Payload(canary)}}, tmp_path / "dcp")
    canary.unlink(missing_ok=True)
    with pytest.raises(VerificationError, match=r"item 'extra\.lr': refers to"):
        run_import(source, root)
    assert not canary.exists() and not root.exists()
    load_dcp({"extra": {"lr": 0}}, source)
    assert canary.exists()


@pytest.mark.parametrize("zipped", [True, False])
def test_payload_in_a_tensor_is_refused(tmp_path: Path, root: Path, zipped: bool) -> None:
    canary = tmp_path / "canary"
    source = save_dcp({"w": torch.ones(3)}, tmp_path / "dcp")
    record = io.BytesIO()
    torch.save([Payload(canary), torch.ones(3)], record, _use_new_zipfile_serialization=zipped)
    (source / "__0_0.distcp").write_bytes(record.getvalue())

    def point(metadata: Any) -> None:
        for info in metadata.storage_data.values():
            info.offset, info.length = 0, len(record.getvalue())

    edit_metadata(source, point)
    with pytest.raises(VerificationError, match=r"item 'w': refers to"):
        run_import(source, root)
    assert not canary.exists()
    assert not list(root.glob("*/manifest*"))


def test_only_these_names_are_words_of_the_format() -> None:
    """Nothing that could be called with a consequence is among them, if they ever were looked up."""
    for name in METADATA_NAMES | ITEM_NAMES:
        assert name.startswith(
            ("torch.", "numpy.", "collections.", "pathlib.", "_codecs.encode", "__builtin__.bytes")
        ), name
    assert not {name for name in METADATA_NAMES | ITEM_NAMES if "eval" in name or "load" in name or "getattr" in name}


def test_a_value_that_shares_itself_out_of_all_bounds_is_refused(tmp_path: Path, root: Path) -> None:
    value: list[Any] = [0]
    for _ in range(60):
        value = [value, value]
    source = save_dcp({"extra": (value,)}, tmp_path / "dcp")
    with pytest.raises(VerificationError, match=r"'extra': values are nested"):
        run_import(source, root)


def test_a_tensor_that_claims_more_than_is_there_is_refused(tmp_path: Path, root: Path) -> None:
    """Before memory is taken for it."""
    source = save_dcp({"w": torch.ones(2)}, tmp_path / "dcp")

    def claim(metadata: Any) -> None:
        meta = metadata.state_dict_metadata["w"]
        meta.size = meta.chunks[0].sizes = torch.Size([1 << 50])

    edit_metadata(source, claim)
    with pytest.raises(VerificationError, match="far more than its records hold"):
        run_import(source, root)
    record = io.BytesIO()
    torch.save((torch.ones(1).expand(1 << 50),), record)
    path = tmp_path / "record"
    path.write_bytes(record.getvalue())
    with path.open("rb") as file, pytest.raises(VerificationError, match="in 4 bytes"):
        read_record(file.fileno(), 0, path.stat().st_size, "x")


# ---- damage


def test_a_flipped_bit_is_found(tmp_path: Path, root: Path) -> None:
    source = save_dcp({"w": torch.arange(5000.0)}, tmp_path / "dcp")
    flip_bit(source / "__0_0.distcp", 9000)
    with pytest.raises(VerificationError, match="CRC-32"):
        run_import(source, root)
    assert not list(root.glob("*/manifest*"))
    same(torch.arange(5000.0)[0], load_dcp({"w": torch.zeros(5000)}, source)["w"][0])  # torch does not look


def test_a_short_or_missing_or_linked_file_is_found(tmp_path: Path, root: Path) -> None:
    source = save_dcp({"w": torch.arange(5000.0)}, tmp_path / "dcp")
    data = source / "__0_0.distcp"
    os.truncate(data, data.stat().st_size - 1000)
    with pytest.raises(VerificationError, match="item 'w'"):
        run_import(source, root)
    data.rename(tmp_path / "elsewhere")
    with pytest.raises(VerificationError, match="missing"):
        run_import(source, root)
    data.symlink_to(tmp_path / "elsewhere")
    with pytest.raises(VerificationError, match="regular"):
        run_import(source, root)
    assert not list(root.glob("*/manifest*"))


def test_chunks_that_do_not_cover_a_tensor(tmp_path: Path, root: Path) -> None:
    source = save_dcp({"w": torch.randn(6, 4)}, tmp_path / "dcp", planner=ShardingPlanner(rows))
    edit_metadata(source, lambda metadata: metadata.state_dict_metadata["w"].chunks.pop())
    with pytest.raises(VerificationError, match="its chunks hold"):
        run_import(source, root)


def test_a_folder_that_is_no_checkpoint(tmp_path: Path, root: Path) -> None:
    with pytest.raises(ConfigError, match=r"\.metadata"):
        run_import(tmp_path, root)
    result = CliRunner().invoke(main, ["ckpt", "import", str(tmp_path), str(root)])
    assert result.exit_code == 2 and "--step" in result.stderr


def test_what_cannot_be_kept_is_named(tmp_path: Path, root: Path) -> None:
    source = save_dcp({"extra": {"dtype": torch.float32}}, tmp_path / "dcp")
    with pytest.raises(ConfigError, match=r"'extra\.dtype': torch\.float32"):
        run_import(source, root)
    source = save_dcp({"extra": {"numbers": {1, 2}}}, tmp_path / "set")
    with pytest.raises(VerificationError, match=r"'extra\.numbers': refers to .*set"):
        run_import(source, root)


# ---- properties


@functools.cache
def _record(zipped: bool) -> bytes:
    """A record in one of torch's two layouts. Made once: addresses of this process are in it."""
    record = io.BytesIO()
    torch.save({"w": torch.arange(6.0), "n": 3}, record, _use_new_zipfile_serialization=zipped)
    return record.getvalue()


@settings(max_examples=60, deadline=None)
@given(PLAIN, st.sampled_from([3, 4, 5]))
def test_plain_values_are_read_exactly(value: Any, protocol: int) -> None:
    data = pickle.dumps(value, protocol=protocol)
    seen, end = parse_pickle(memoryview(data), frozenset(), "x")
    assert end == len(data)
    same(value, seen)


@settings(max_examples=60, deadline=None)
@given(value=PLAIN, zipped=st.booleans())
def test_plain_values_of_torch_save_are_read_exactly(
    tmp_path_factory: pytest.TempPathFactory, value: Any, zipped: bool
) -> None:
    path = tmp_path_factory.getbasetemp() / "record"
    torch.save({"value": value, "w": torch.arange(5)}, path, _use_new_zipfile_serialization=zipped)
    with path.open("rb") as file:
        seen = read_record(file.fileno(), 0, path.stat().st_size, "x")
    same(value, seen["value"])
    assert seen["w"].shape == (5,) and seen["w"].dtype == "I64"


@settings(max_examples=150, deadline=None)
@given(st.data())
def test_a_damaged_stream_raises_only_what_is_promised(data: st.DataObject) -> None:
    stream = bytearray(pickle.dumps({"a": [1, 2.0, "x" * 300, (None, True)], "b": {"c": 1 << 70}}, protocol=4))
    for _ in range(data.draw(st.integers(1, 4))):
        stream[data.draw(st.integers(0, len(stream) - 1))] = data.draw(st.integers(0, 255))
    with contextlib.suppress(VerificationError):
        parse_pickle(memoryview(bytes(stream)), frozenset(), "x")


@settings(max_examples=60, deadline=None)
@given(st.data())
def test_a_damaged_record_raises_only_what_is_promised(tmp_path_factory: pytest.TempPathFactory, data: Any) -> None:
    content = bytearray(_record(data.draw(st.booleans())))
    for _ in range(data.draw(st.integers(1, 3))):
        content[data.draw(st.integers(0, len(content) - 1))] = data.draw(st.integers(0, 255))
    path = tmp_path_factory.mktemp("r") / "record"
    path.write_bytes(content)
    with path.open("rb") as file, contextlib.suppress(VerificationError, ConfigError):
        read_record(file.fileno(), 0, len(content), "x")


@settings(max_examples=60, deadline=None)
@given(st.data())
def test_damaged_metadata_raises_only_what_is_promised(tmp_path_factory: pytest.TempPathFactory, data: Any) -> None:
    source = tmp_path_factory.getbasetemp() / "damaged-dcp"
    if not source.exists():
        save_dcp(
            {"m": {"w": torch.randn(6, 4), "n": 1}, "l": [{"a": torch.ones(2)}]}, source, planner=ShardingPlanner(rows)
        )
        (source / ".metadata").rename(source / "whole")
    content = bytearray((source / "whole").read_bytes())
    for _ in range(data.draw(st.integers(1, 3))):
        content[data.draw(st.integers(0, len(content) - 1))] = data.draw(st.integers(0, 255))
    (source / ".metadata").write_bytes(content)
    with contextlib.suppress(VerificationError, ConfigError):
        describe(read_dcp(source), ImportOptions())


@given(st.data())
def test_runs_of_a_box_are_its_elements_in_order(data: Any) -> None:
    shape = data.draw(st.lists(st.integers(1, 5), max_size=4).map(tuple))
    offsets = tuple(data.draw(st.integers(0, dim - 1)) for dim in shape)
    sizes = tuple(data.draw(st.integers(0, dim - at)) for dim, at in zip(shape, offsets, strict=True))
    numbers = numpy.arange(math.prod(shape)).reshape(shape)
    box = numbers[tuple(slice(at, at + size) for at, size in zip(offsets, sizes, strict=True))]
    seen: list[int] = []
    for run in runs(shape, offsets, sizes):
        assert run.inner == len(seen)
        seen += range(run.outer, run.outer + run.length)
    assert seen == box.reshape(-1).tolist()


@given(st.data())
def test_a_tiling_is_told_from_an_overlap(data: Any) -> None:
    shape = data.draw(st.lists(st.integers(1, 4), min_size=1, max_size=3).map(tuple))
    boxes = []
    for _ in range(data.draw(st.integers(1, 4))):
        offsets = tuple(data.draw(st.integers(0, dim - 1)) for dim in shape)
        sizes = tuple(data.draw(st.integers(1, dim - at)) for dim, at in zip(shape, offsets, strict=True))
        boxes.append(Box(offsets, sizes))
    count = numpy.zeros(shape, dtype=int)
    for box in boxes:
        count[tuple(slice(at, at + size) for at, size in zip(box.offsets, box.sizes, strict=True))] += 1
    assert (tiling_problem(shape, boxes) is None) == bool((count == 1).all())


def test_metadata_of_a_real_checkpoint(tmp_path: Path) -> None:
    source = save_dcp({"m": {"w": torch.ones(2, 3)}, "lr": 0.1}, tmp_path / "dcp")
    saved = read_dcp(source)
    assert saved.tensors["m.w"].shape == (2, 3) and saved.tensors["m.w"].dtype == "F32"
    assert saved.paths["m.w"] == ("m", "w") and set(saved.values) == {"lr"}
