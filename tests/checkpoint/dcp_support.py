"""Real checkpoints of torch.distributed.checkpoint, whole and sharded, and payloads that say when they ran."""

from __future__ import annotations

import dataclasses
import itertools
import pickle
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from torch.distributed.checkpoint.default_planner import DefaultSavePlanner
from torch.distributed.checkpoint.metadata import ChunkStorageMetadata, MetadataIndex
from torch.distributed.checkpoint.planner import SavePlan, TensorWriteData, WriteItem, WriteItemType
from torch.distributed.checkpoint.state_dict_loader import load
from torch.distributed.checkpoint.state_dict_saver import save
from torch.distributed.checkpoint.storage import StorageWriter


class Payload:
    """Unpickling this makes the file `canary`."""

    def __init__(self, canary: Path) -> None:
        self.canary = canary

    def __reduce__(self) -> tuple[Any, ...]:
        return Path.touch, (self.canary,)


def save_dcp(state: dict[str, Any], folder: Path, **options: Any) -> Path:
    """`dcp.save` to `folder`, as torch stores it, in one process."""
    save_with(None, state, folder, **options)
    return folder


def save_with(writer: StorageWriter | None, state: dict[str, Any], name: Path | None = None, **options: Any) -> None:
    """`dcp.save` through `writer` in one process."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # it says that nothing is distributed
        save(state, checkpoint_id=name, storage_writer=writer, no_dist=True, **options)


def load_dcp(state: dict[str, Any], folder: Path | None = None, **options: Any) -> dict[str, Any]:
    """`dcp.load` into `state` in one process."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        load(state, checkpoint_id=folder, no_dist=True, **options)
    return state


class ShardingPlanner(DefaultSavePlanner):
    """Writes each tensor of at least two elements in one dimension as several chunks, as ranks that share it would."""

    def __init__(self, cut: Callable[[torch.Size], list[tuple[tuple[int, ...], tuple[int, ...]]]]) -> None:
        super().__init__()
        self._cut = cut

    def create_local_plan(self) -> SavePlan:
        plan = super().create_local_plan()
        items: list[WriteItem] = []
        for item in plan.items:
            if item.tensor_data is None:
                items.append(item)
                continue
            for offsets, sizes in self._cut(item.tensor_data.size):
                chunk = ChunkStorageMetadata(torch.Size(offsets), torch.Size(sizes))
                data = TensorWriteData(chunk, item.tensor_data.properties, item.tensor_data.size)
                index = MetadataIndex(item.index.fqn, chunk.offsets)
                items.append(WriteItem(index, WriteItemType.SHARD, tensor_data=data))
        self.plan = dataclasses.replace(plan, items=items)
        return self.plan

    def resolve_data(self, write_item: WriteItem) -> Any:
        if write_item.tensor_data is None:
            return super().resolve_data(write_item)
        tensor = self.state_dict[write_item.index.fqn]
        for dim, (offset, size) in enumerate(
            zip(write_item.tensor_data.chunk.offsets, write_item.tensor_data.chunk.sizes, strict=True)
        ):
            tensor = tensor.narrow(dim, offset, size)
        return tensor


def rows(size: torch.Size) -> list[tuple[tuple[int, ...], tuple[int, ...]]]:
    """Three uneven chunks along dimension 0."""
    return _cut(size, 0)


def columns(size: torch.Size) -> list[tuple[tuple[int, ...], tuple[int, ...]]]:
    """Three uneven chunks along the last dimension."""
    return _cut(size, len(size) - 1)


def _cut(size: torch.Size, dim: int) -> list[tuple[tuple[int, ...], tuple[int, ...]]]:
    zero = (0,) * len(size)
    if not len(size) or size[dim] < 3:
        return [(zero, tuple(size))]
    bounds = [0, 1, size[dim] // 2 + 1, size[dim]]
    boxes = []
    for begin, end in itertools.pairwise(bounds):
        if end > begin:
            boxes.append(((*zero[:dim], begin, *zero[dim + 1 :]), (*size[:dim], end - begin, *size[dim + 1 :])))
    return boxes


def edit_metadata(folder: Path, change: Callable[[Any], Any]) -> None:
    """Rewrite `.metadata` as whoever can write there could."""
    path = folder / ".metadata"
    metadata = pickle.loads(path.read_bytes())
    change(metadata)
    path.write_bytes(pickle.dumps(metadata))


def same(a: Any, b: Any, path: str = "") -> None:
    """Assert that two values are the same to the bit, types included (a Parameter is a tensor)."""
    if isinstance(a, torch.Tensor):
        assert isinstance(b, torch.Tensor), path
        assert (a.dtype, a.shape) == (b.dtype, b.shape), path
        mine, its = a.detach().contiguous().reshape(-1), b.detach().contiguous().reshape(-1)
        if mine.numel():
            assert torch.equal(mine.view(torch.uint8), its.view(torch.uint8)), path
    elif isinstance(a, dict):
        assert isinstance(b, dict), path
        assert list(a) == list(b) or sorted(map(repr, a)) == sorted(map(repr, b)), f"{path}: {list(a)} {list(b)}"
        for key in a:
            same(a[key], b[key], f"{path}/{key}")
    elif isinstance(a, list | tuple):
        assert type(a) is type(b) and len(a) == len(b), path
        for at, (mine, its) in enumerate(zip(a, b, strict=True)):
            same(mine, its, f"{path}/{at}")
    elif type(a).__module__ == "numpy":
        assert type(a) is type(b) and a.dtype == b.dtype and a.tobytes() == b.tobytes(), path
    else:
        assert type(a) is type(b) and a == b, f"{path}: {a!r} {b!r}"
