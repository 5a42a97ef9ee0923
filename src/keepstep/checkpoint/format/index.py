"""`index.json` and the values of one rank: what the files of a checkpoint mean together.

The index has one entry a tensor and the shared values; each rank's own tensors and values are described inside its own file, in a
tensor of bytes, so that a rank needs nothing but the index and the files.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Any

import msgspec

from keepstep.checkpoint.format.boxes import Mesh, shard_dim
from keepstep.checkpoint.format.dtypes import ITEM_BYTES
from keepstep.checkpoint.format.plan import EVEN_SPLIT, LARGE_SHARES, TensorMeta
from keepstep.records.errors import ConfigError, VerificationError

RANK_PREFIX = "rank"
BLOB_NAME = "rank/__values__"
MAX_WORLD = 1_000_000
RNG_ABSENT = "absent"
"""Key that stands in place of a rank's random state when there never was one; its value says why."""
_STATE_NAME = re.compile(r"[A-Za-z][A-Za-z0-9_.-]{0,63}")
_MAX_DIMS = 64


class Index(msgspec.Struct, frozen=True, kw_only=True):
    """`keepstep.index/1`.

    `aliases`: name to the tensor that holds its bytes; `values`: forms of format.values; `meshes`: what tensors that are not plain
    lie on; `split`: the rule by which replicas share what they write (format.plan).
    """

    schema: str = "keepstep.index/1"
    world: int
    tensors: dict[str, TensorMeta]
    aliases: dict[str, str]
    values: dict[str, Any]
    meshes: tuple[Mesh, ...] = ()
    split: int = EVEN_SPLIT


class RankValues(msgspec.Struct, frozen=True, kw_only=True):
    """`keepstep.rank_values/1`: what only this rank has. Its tensors lie whole in its own file."""

    schema: str = "keepstep.rank_values/1"
    tensors: dict[str, TensorMeta]
    values: dict[str, Any]


def check_state_name(name: str) -> None:
    """Raises ConfigError when `name` cannot be a name of the state."""
    if not _STATE_NAME.fullmatch(name) or name in (RANK_PREFIX, "rng"):
        raise ConfigError(
            f"state name {name!r}: use letters, digits, '_', '.' and '-', beginning with a letter; "
            "'rank' and 'rng' are taken"
        )


def _parse(data: bytes | memoryview, kind: type[Any], what: str) -> Any:
    try:
        return msgspec.json.decode(data, type=kind)
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as error:
        raise VerificationError(f"{what}: {error}") from None


def _check_shape(shape: tuple[int, ...], what: str) -> None:
    if len(shape) > _MAX_DIMS or any(not 0 <= dim < 1 << 62 for dim in shape):
        raise VerificationError(f"{what} has an impossible shape")


def _check_tensors(tensors: Mapping[str, TensorMeta], meshes: tuple[Mesh, ...], world: int, what: str) -> None:
    for name, meta in tensors.items():
        here = f"{what}: tensor {name!r}"
        if meta.dtype not in ITEM_BYTES:
            raise VerificationError(f"{here} has unknown dtype {meta.dtype!r}")
        _check_shape(meta.shape, here)
        if meta.owner is not None and not 0 <= meta.owner < world:
            raise VerificationError(f"{here} belongs to rank {meta.owner} of {world}")
        _check_placements(meta, meshes, here)
        for chunk in meta.chunks or ():
            ends = [begin + size for begin, size in zip(chunk.offsets, chunk.sizes, strict=False)]
            if (
                not 0 <= chunk.rank < world
                or not len(chunk.offsets) == len(chunk.sizes) == len(meta.shape)
                or any(begin < 0 or size < 0 for begin, size in zip(chunk.offsets, chunk.sizes, strict=True))
                or any(end > size for end, size in zip(ends, meta.shape, strict=True))
            ):
                raise VerificationError(f"{here} has an impossible chunk of rank {chunk.rank}")


def _check_placements(meta: TensorMeta, meshes: tuple[Mesh, ...], what: str) -> None:
    if meta.mesh is not None and not 0 <= meta.mesh < len(meshes):
        raise VerificationError(f"{what} lies on mesh {meta.mesh} of {len(meshes)}")
    dims = 1 if meta.mesh is None else len(meshes[meta.mesh].shape)
    if len(meta.placements) != dims:
        raise VerificationError(f"{what} has {len(meta.placements)} placements for a mesh of {dims} dimensions")
    for text in meta.placements:
        try:
            dim = shard_dim(text)
        except ValueError as error:
            raise VerificationError(f"{what}: {error}") from None
        if dim is not None and (dim >= len(meta.shape) or meta.mesh is None):
            raise VerificationError(f"{what} cannot be sharded by {text!r}")


def parse_index(data: bytes | memoryview, what: str, *, data_bytes: int) -> Index:
    """Read an index whose bytes were verified. Raises VerificationError when it is malformed.

    `data_bytes` is the size of all data files together; tensors that claim more are refused before anything is allocated.
    """
    index: Index = _parse(data, Index, what)
    if index.schema != "keepstep.index/1" or not 0 < index.world <= MAX_WORLD:
        raise VerificationError(
            f"{what}: schema {index.schema!r} with world {index.world} is not one this version can read"
        )
    if index.split not in (EVEN_SPLIT, LARGE_SHARES):
        raise VerificationError(f"{what}: split {index.split} is not one this version can read")
    for number, mesh in enumerate(index.meshes):
        ranks = mesh.ranks or range(mesh.size)
        if (
            not mesh.shape
            or any(size < 1 for size in mesh.shape)
            or len(ranks) != mesh.size
            or mesh.size > index.world
            or len(set(ranks)) != mesh.size
            or not all(0 <= rank < index.world for rank in ranks)
        ):
            raise VerificationError(f"{what}: mesh {number} of shape {list(mesh.shape)} makes no sense")
    _check_tensors(index.tensors, index.meshes, index.world, what)
    if sum(meta.size_bytes for meta in index.tensors.values()) > data_bytes:
        raise VerificationError(f"{what}: tensors are larger than the files")
    for alias, name in index.aliases.items():
        if name not in index.tensors or alias in index.tensors:
            raise VerificationError(f"{what}: alias {alias!r} of {name!r} makes no sense")
    return index


def parse_rank_values(data: bytes | memoryview, what: str, *, data_bytes: int) -> RankValues:
    """Read the values of one rank. Raises VerificationError when they are malformed."""
    values: RankValues = _parse(data, RankValues, what)
    if values.schema != "keepstep.rank_values/1":
        raise VerificationError(f"{what}: schema {values.schema!r} is not one this version can read")
    _check_tensors(values.tensors, (), 1, what)
    if any(meta.chunks is not None or meta.mesh is not None for meta in values.tensors.values()):
        raise VerificationError(f"{what}: a tensor of one rank cannot be sharded")
    if sum(meta.size_bytes for meta in values.tensors.values()) > data_bytes:
        raise VerificationError(f"{what}: tensors are larger than the file")
    return values
