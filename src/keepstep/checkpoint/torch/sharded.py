"""DTensor (FSDP2, tensor parallel) in the terms of checkpoint.format, and back. Loaded only once a DTensor was seen."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch

from keepstep.checkpoint.format.boxes import REPLICATE, Box, Mesh, local_box
from keepstep.records.errors import ConfigError


def is_dtensor(value: Any) -> bool:
    """True for a DTensor, without importing its module."""
    return any(kind.__name__ == "DTensor" for kind in type(value).__mro__)


def local_of(value: Any) -> torch.Tensor:
    """This rank's part of a DTensor, without autograd."""
    local: torch.Tensor = value._local_tensor  # what to_local() returns, without the cost of an autograd function
    if type(local).__name__ == "AsyncCollectiveTensor":
        local = local.wait()  # type: ignore[attr-defined]
    return local.detach()


def mesh_of(device_mesh: Any, world_size: int) -> Mesh:
    """A DeviceMesh as the index writes it; one that was sliced out of a larger mesh as that, its own dimensions first.

    A parameter on mesh["dp"] of a (dp, tp) mesh is on another slice in each tp rank, and the same parameter all the same: over the
    dimensions that the slice leaves out it is replicated.
    """
    grid = device_mesh.mesh
    root = device_mesh._get_root_mesh() if hasattr(device_mesh, "_get_root_mesh") else device_mesh
    names, all_names = device_mesh.mesh_dim_names or (), root.mesh_dim_names or ()
    if root is not device_mesh and names and set(names) <= set(all_names):
        dims = [all_names.index(name) for name in names]
        grid = root.mesh.permute(*dims, *(dim for dim in range(root.mesh.dim()) if dim not in dims))
    ranks = tuple(int(rank) for rank in grid.reshape(-1).tolist())
    plain = ranks == tuple(range(len(ranks))) and len(ranks) <= world_size
    return Mesh(tuple(int(size) for size in grid.shape), () if plain else ranks)


def placement_texts(value: Any, mesh: Mesh, path: str) -> tuple[str, ...]:
    """Placements of a DTensor on `mesh` as the index writes them. Raises ConfigError for one that has no saved form."""
    texts = texts_of(value.placements, value.dim(), path)
    return texts + (REPLICATE,) * (len(mesh.shape) - len(texts))


def texts_of(placements: Sequence[Any], dims: int, path: str) -> tuple[str, ...]:
    """Placements as the index writes them. Raises ConfigError naming `path`."""
    texts = []
    for placement in placements:
        kind = type(placement).__name__
        if kind == "Replicate":
            texts.append("replicate")
        elif kind == "Shard":
            texts.append(f"shard:{placement.dim % dims}")
        elif kind == "_StridedShard":
            texts.append(f"strided:{placement.dim % dims}:{placement.split_factor}")
        else:
            raise ConfigError(
                f"state {path!r}: placement {placement} cannot be saved; redistribute the tensor to Shard or Replicate first"
            )
    return tuple(texts)


def check_local(value: Any, mesh: Mesh, texts: tuple[str, ...], rank: int, path: str) -> Box:
    """The box of this rank, after a comparison with what torch itself says. Raises ConfigError when they differ."""
    coordinate = mesh.coordinate(rank)
    if coordinate is None:
        raise ConfigError(f"state {path!r}: lies on a mesh of which rank {rank} is no part; give it as per_rank")
    box = local_box(tuple(value.shape), mesh.shape, texts, coordinate)
    offsets, sizes = box.offsets, tuple(local_of(value).shape)
    if any(text.startswith("strided:") for text in texts):
        from torch.distributed.tensor._utils import compute_local_shape_and_global_offset

        _, found = compute_local_shape_and_global_offset(value.shape, value.device_mesh, value.placements)
        offsets = tuple(int(offset) for offset in found) if box.elements else box.offsets
    if sizes != box.sizes or offsets != box.offsets:
        raise ConfigError(
            f"state {path!r}: rank {rank} holds {list(sizes)} at {list(offsets)} of {list(value.shape)}, by its placements "
            f"{texts} it would hold {list(box.sizes)} at {list(box.offsets)}: uneven shards cannot be saved"
        )
    return box


def make(local: torch.Tensor, device_mesh: Any, placements: Sequence[Any], shape: tuple[int, ...]) -> Any:
    """A DTensor of global `shape` from this rank's part. It has the device of the mesh."""
    from torch.distributed.tensor import DTensor

    stride, size = [], 1
    for dim in reversed(shape):
        stride.append(size)
        size *= max(1, dim)
    if device_mesh.device_type != "cpu":
        local = local.to(device_mesh.device_type)
    return DTensor.from_local(
        local, device_mesh, placements, run_check=False, shape=torch.Size(shape), stride=tuple(reversed(stride))
    )


def placements_from(texts: Sequence[str]) -> list[Any]:
    """torch's placements for what the index says."""
    from torch.distributed.tensor import Replicate, Shard
    from torch.distributed.tensor.placement_types import _StridedShard

    made: list[Any] = []
    for text in texts:
        kind, _, rest = text.partition(":")
        if kind == "replicate":
            made.append(Replicate())
        elif kind == "shard":
            made.append(Shard(int(rest)))
        else:
            dim, split = rest.split(":")
            made.append(_StridedShard(int(dim), split_factor=int(split)))
    return made
