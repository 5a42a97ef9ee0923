"""`index.json` and the values of one rank: what the files of a checkpoint mean together.

The index has one entry a tensor and the replicated values; each rank's own tensors and values are described inside its
own file, in a tensor of bytes, so that a rank needs nothing but the index and the files.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Any, TypeAlias

import msgspec

from keepstep.checkpoint.format.dtypes import ITEM_BYTES
from keepstep.checkpoint.format.plan import Piece, StoredTensor, TensorMeta, pieces_by_rank, stored
from keepstep.checkpoint.format.shard import Span
from keepstep.records.errors import ConfigError, VerificationError

RANK_PREFIX = "rank"
BLOB_NAME = "rank/__values__"
MAX_WORLD = 1_000_000
_STATE_NAME = re.compile(r"[A-Za-z][A-Za-z0-9_.-]{0,63}")


class Index(msgspec.Struct, frozen=True, kw_only=True):
    """`keepstep.index/1`. `aliases`: name to the tensor that holds its bytes; `values`: forms of checkpoint.values."""

    schema: str = "keepstep.index/1"
    world: int
    tensors: dict[str, TensorMeta]
    aliases: dict[str, str]
    values: dict[str, Any]


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


class FileLayout(msgspec.Struct, frozen=True, kw_only=True):
    """What one rank writes: header entries, and for each the piece of the tensor it stands for."""

    entries: dict[str, StoredTensor]
    pieces: dict[str, Piece]


def file_layout(
    tensors: Mapping[str, TensorMeta], own: Mapping[str, TensorMeta], blob_bytes: int, rank: int, world_size: int
) -> FileLayout:
    """Layout of rank `rank`'s file: its pieces of the replicated tensors, its own tensors, and its values."""
    mine = pieces_by_rank(dict(tensors), world_size)[rank]
    entries = {piece.name: stored(piece, tensors[piece.name]) for piece in mine}
    pieces = {piece.name: piece for piece in mine}
    for name, meta in own.items():
        piece = Piece(name, 0, meta.size_bytes)
        entries[name], pieces[name] = stored(piece, meta), piece
    entries[BLOB_NAME] = StoredTensor("U8", (blob_bytes,), blob_bytes)
    return FileLayout(entries=entries, pieces=pieces)


def _parse(data: bytes | memoryview, kind: type[Any], what: str) -> Any:
    try:
        return msgspec.json.decode(data, type=kind)
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as error:
        raise VerificationError(f"{what}: {error}") from None


def _check_tensors(tensors: Mapping[str, TensorMeta], world: int, what: str) -> None:
    for name, meta in tensors.items():
        if meta.dtype not in ITEM_BYTES:
            raise VerificationError(f"{what}: tensor {name!r} has unknown dtype {meta.dtype!r}")
        if len(meta.shape) > 64 or any(not 0 <= dim < 1 << 62 for dim in meta.shape):
            raise VerificationError(f"{what}: tensor {name!r} has an impossible shape")
        if meta.owner is not None and not 0 <= meta.owner < world:
            raise VerificationError(f"{what}: tensor {name!r} belongs to rank {meta.owner} of {world}")
        if meta.placements != ("replicate",) or meta.mesh is not None:
            raise VerificationError(f"{what}: tensor {name!r} is sharded, which this version cannot read")


def parse_index(data: bytes | memoryview, what: str, *, data_bytes: int) -> Index:
    """Read an index whose bytes were verified. Raises VerificationError when it is malformed.

    `data_bytes` is the size of all data files together; tensors that claim more are refused before anything is
    allocated.
    """
    index: Index = _parse(data, Index, what)
    if index.schema != "keepstep.index/1" or not 0 < index.world <= MAX_WORLD:
        raise VerificationError(
            f"{what}: schema {index.schema!r} with world {index.world} is not one this version can read"
        )
    _check_tensors(index.tensors, index.world, what)
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
    _check_tensors(values.tensors, 1, what)
    if sum(meta.size_bytes for meta in values.tensors.values()) > data_bytes:
        raise VerificationError(f"{what}: tensors are larger than the file")
    return values


Buffer: TypeAlias = bytearray | memoryview
"""Bytes of one tensor: collected from several files, or a part of one verified file's buffer."""


class Assembly:
    """Puts tensors together from the verified files, one file at a time; every byte comes from one piece."""

    def __init__(self, index: Index) -> None:
        self.index = index
        self._pieces = pieces_by_rank(index.tensors, index.world)
        self.buffers: dict[str, Buffer] = {}

    def add(self, rank: int, data: memoryview, spans: dict[str, Span], what: str) -> None:
        """Take the replicated pieces of rank `rank`'s file. Raises VerificationError when its header is another."""
        expected = {piece.name: piece for piece in self._pieces[rank]}
        for name, piece in expected.items():
            _check_span(spans.get(name), stored(piece, self.index.tensors[name]), name, what)
            span, size = spans[name], self.index.tensors[name].size_bytes
            if span.end - span.begin == size:
                self.buffers[name] = data[span.begin : span.end]  # most tensors lie whole in one file: no copy
            else:
                if name not in self.buffers:
                    self.buffers[name] = bytearray(size)
                self.buffers[name][piece.begin : piece.end] = data[span.begin : span.end]
        for name in spans:
            if name not in expected and not name.startswith(f"{RANK_PREFIX}/"):
                raise VerificationError(f"{what}: tensor {name!r} does not belong here")


def own_buffers(data: memoryview, spans: dict[str, Span], what: str) -> tuple[RankValues, dict[str, Buffer]]:
    """Values and tensors that only this rank has, from its verified file. Raises VerificationError."""
    blob = spans.get(BLOB_NAME)
    if blob is None or blob.dtype != "U8":
        raise VerificationError(f"{what}: has no values of its rank")
    values = parse_rank_values(data[blob.begin : blob.end], what, data_bytes=len(data))
    buffers: dict[str, Buffer] = {}
    for name, meta in values.tensors.items():
        _check_span(spans.get(name), stored(Piece(name, 0, meta.size_bytes), meta), name, what)
        span = spans[name]
        buffers[name] = data[span.begin : span.end]
    return values, buffers


def _check_span(span: Span | None, expected: StoredTensor, name: str, what: str) -> None:
    if span is None:
        raise VerificationError(f"{what}: tensor {name!r} is missing")
    if (span.dtype, span.shape) != (expected.dtype, expected.shape):
        raise VerificationError(
            f"{what}: tensor {name!r} is {span.dtype}{list(span.shape)}, "
            f"expected {expected.dtype}{list(expected.shape)}"
        )
