"""Which bytes of which tensor go into which rank's file.

A rank holds one chunk (a box) of each tensor, row-major. Ranks that hold the same chunk, replicas, share the work of writing it:
the chunks of all tensors of one mesh and placements, in the order of their names, form one run of T bytes, and replica p of the
first n writes [p*T/n, (p+1)*T/n), each bound moved down to an element; n is as many as get 16 MiB each, at least one. Writer and
reader compute the same split for any rank without looking at the others; nothing about it is stored.
"""

from __future__ import annotations

import hashlib
import math
from collections.abc import Iterator, Mapping, Sequence

import msgspec

from keepstep.checkpoint.format.boxes import (
    REPLICATE,
    Box,
    Mesh,
    covering_range,
    local_box,
    overlap,
    part_of,
    shard_dim,
    whole,
)
from keepstep.checkpoint.format.dtypes import ITEM_BYTES, NATIVE_BYTES
from keepstep.records.codec import to_json


class Chunk(msgspec.Struct, frozen=True):
    """A box of a tensor, written whole by `rank`."""

    rank: int
    offsets: tuple[int, ...]
    sizes: tuple[int, ...]

    @property
    def box(self) -> Box:
        """Its box."""
        return Box(self.offsets, self.sizes)


class TensorMeta(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """One tensor of the index: `dtype` is a code of format.dtypes, `shape` the global shape.

    `mesh` is a place in the index's list of meshes and `placements` say how the tensor lies on it (format.boxes); None is a
    plain tensor that every rank holds. `owner` is the only rank that writes it, in place of a split over all replicas. `chunks`
    lists the boxes one by one where no rule gives them.
    """

    dtype: str
    shape: tuple[int, ...]
    mesh: int | None = None
    placements: tuple[str, ...] = (REPLICATE,)
    owner: int | None = None
    chunks: tuple[Chunk, ...] | None = None

    @property
    def size_bytes(self) -> int:
        """Bytes of the whole tensor."""
        return math.prod(self.shape) * ITEM_BYTES[self.dtype]


class Piece(msgspec.Struct, frozen=True):
    """Bytes [begin, end) of row-major chunk `box` of tensor `name`, in a file under `key`."""

    name: str
    key: str
    box: Box
    begin: int
    end: int


class StoredTensor(msgspec.Struct, frozen=True):
    """How a piece is spelled in a file's header: a code every reader knows, a shape, and its bytes."""

    dtype: str
    shape: tuple[int, ...]
    size_bytes: int


class Need(msgspec.Struct, frozen=True):
    """What a reader takes from one chunk: bytes [begin, end) of `chunk` hold `part`, the box asked for and others between.

    `pieces` are the ranks' pieces that hold those bytes, in order.
    """

    chunk: Box
    part: Box
    begin: int
    end: int
    pieces: tuple[tuple[int, Piece], ...]


def stored(piece: Piece, meta: TensorMeta) -> StoredTensor:
    """How `piece` of a tensor like `meta` is spelled in the header: whole chunks keep their shape, parts are flat."""
    size = piece.end - piece.begin
    if meta.dtype not in NATIVE_BYTES:
        return StoredTensor("U8", (size,), size)
    if size == piece.box.elements * ITEM_BYTES[meta.dtype]:
        return StoredTensor(meta.dtype, piece.box.sizes, size)
    return StoredTensor(meta.dtype, (size // NATIVE_BYTES[meta.dtype],), size)


def plan_digest(tensors: Mapping[str, TensorMeta], aliases: Mapping[str, str], meshes: Sequence[Mesh] = ()) -> str:
    """A digest of what is to be saved; ranks whose digests differ do not hold parts of one state."""
    return hashlib.sha256(to_json([tensors, aliases, *([list(meshes)] if meshes else [])])).hexdigest()


def whole_piece(name: str, meta: TensorMeta) -> Piece:
    """All of a tensor as one piece."""
    return Piece(name, name, whole(meta.shape), 0, meta.size_bytes)


MIN_SHARE_BYTES = 16 << 20
"""A smaller share is not worth a writer of its own: whoever reads it verifies a whole block of that writer's file.

Otherwise the step counts of an optimizer would be spread over all files, and every rank would read a block of each.
"""

EVEN_SPLIT, LARGE_SHARES = 0, 1
"""Rules of the split, as the index names them: every replica writes its share (the first files), or MIN_SHARE_BYTES holds."""

_Class = tuple[int | None, tuple[str, ...]]


class _Run(msgspec.Struct, frozen=True):
    """The chunks of one class at one shard coordinate, end to end: where each begins, bytes in all, how many write them."""

    begins: dict[str, int]
    total_bytes: int
    writers: int


class Plan:
    """The split of `tensors` over the files of `world_size` ranks, by rule `split`."""

    def __init__(
        self,
        tensors: Mapping[str, TensorMeta],
        meshes: Sequence[Mesh],
        world_size: int,
        split: int = LARGE_SHARES,
    ) -> None:
        self.tensors = tensors
        self.meshes = meshes
        self.world_size = world_size
        self._split = split
        self._everybody = Mesh((world_size,))
        self._names: dict[_Class, list[str]] = {}
        for name in sorted(tensors):
            meta = tensors[name]
            if meta.owner is None and meta.chunks is None:
                self._names.setdefault((meta.mesh, meta.placements), []).append(name)
        self._runs: dict[tuple[_Class, tuple[int, ...]], _Run] = {}

    def _mesh(self, mesh: int | None) -> Mesh:
        return self._everybody if mesh is None else self.meshes[mesh]

    def _shards(self, kind: _Class, coordinate: tuple[int, ...]) -> tuple[int, ...]:
        """`coordinate` with 0 on the dimensions that replicate: the same for all replicas."""
        return tuple(0 if text == REPLICATE else at for at, text in zip(coordinate, kind[1], strict=True))

    def _box(self, name: str, shards: tuple[int, ...]) -> Box:
        meta = self.tensors[name]
        return local_box(meta.shape, self._mesh(meta.mesh).shape, meta.placements, shards)

    def _run(self, kind: _Class, shards: tuple[int, ...]) -> _Run:
        held = self._runs.get((kind, shards))
        if held is None:
            begins, at = {}, 0
            for name in self._names[kind]:
                begins[name] = at
                at += self._box(name, shards).elements * ITEM_BYTES[self.tensors[name].dtype]
            writers = self._replicas(kind)[1]
            if self._split == LARGE_SHARES:
                writers = max(1, min(writers, at // MIN_SHARE_BYTES))
            held = self._runs[kind, shards] = _Run(begins, at, writers)
        return held

    def _replicas(self, kind: _Class) -> tuple[list[int], int]:
        """Mesh dimensions over which `kind` is replicated, and how many replicas that makes."""
        dims = [dim for dim, text in enumerate(kind[1]) if text == REPLICATE]
        return dims, math.prod(self._mesh(kind[0]).shape[dim] for dim in dims)

    def _cut(self, run: _Run, name: str, size: int, at: int) -> int:
        """Where in the chunk of `name` the share of replica `at` begins; at its end for one that writes nothing."""
        item = ITEM_BYTES[self.tensors[name].dtype]
        bound = at * run.total_bytes // run.writers - run.begins[name]
        return size if bound >= size else max(0, bound - bound % item)

    def pieces(self, rank: int) -> list[Piece]:
        """What `rank` writes, in the order of the names; each byte of each tensor is in one piece of one rank."""
        result = []
        for kind, names in self._names.items():
            mesh = self._mesh(kind[0])
            coordinate = mesh.coordinate(rank)
            if coordinate is None:
                continue
            dims, _ = self._replicas(kind)
            at = 0
            for dim in dims:
                at = at * mesh.shape[dim] + coordinate[dim]
            shards = self._shards(kind, coordinate)
            run = self._run(kind, shards)
            for name in names:
                box = self._box(name, shards)
                size = box.elements * ITEM_BYTES[self.tensors[name].dtype]
                begin, end = (self._cut(run, name, size, share) for share in (at, at + 1))
                if end > begin:
                    result.append(Piece(name, name, box, begin, end))
        for name, meta in self.tensors.items():
            if meta.chunks is not None:
                result += [piece for holder, piece in self._listed(name) if holder == rank]
            elif meta.owner == rank and meta.size_bytes:
                result.append(whole_piece(name, meta))
        result.sort(key=lambda piece: (piece.name, piece.key))
        return result

    def _listed(self, name: str) -> Iterator[tuple[int, Piece]]:
        """The listed chunks of `name`; a second one in the same file has the key `name#1`."""
        meta = self.tensors[name]
        seen: dict[int, int] = {}
        for chunk in meta.chunks or ():
            number = seen[chunk.rank] = seen.get(chunk.rank, -1) + 1
            size = chunk.box.elements * ITEM_BYTES[meta.dtype]
            if size:
                yield chunk.rank, Piece(name, f"{name}#{number}" if number else name, chunk.box, 0, size)

    def needs(self, name: str, wanted: Box) -> list[Need]:
        """Where the bytes of box `wanted` of tensor `name` lie. Together the parts are `wanted`, unless chunks are missing."""
        meta = self.tensors[name]
        if not wanted.elements:
            return []
        if meta.owner is not None:
            return [self._need(meta, whole(meta.shape), wanted, [(meta.owner, whole_piece(name, meta))])]
        if meta.chunks is not None:
            found = []
            for rank, piece in self._listed(name):
                part = overlap(piece.box, wanted)
                if part is not None:
                    found.append(self._need(meta, piece.box, part, [(rank, piece)]))
            return found
        return [
            self._need(meta, box, part, self._shares(name, shards, box))
            for shards, box, part in self._overlapping(name, wanted)
        ]

    def _need(self, meta: TensorMeta, chunk: Box, part: Box, pieces: list[tuple[int, Piece]]) -> Need:
        item = ITEM_BYTES[meta.dtype]
        begin, end = (element * item for element in covering_range(chunk, part))
        hit = tuple((rank, piece) for rank, piece in pieces if piece.begin < end and piece.end > begin)
        return Need(chunk, part, begin, end, hit)

    def _overlapping(self, name: str, wanted: Box) -> Iterator[tuple[tuple[int, ...], Box, Box]]:
        """Shard coordinates whose chunk of `name` meets `wanted`, without walking over all of them."""
        meta = self.tensors[name]
        mesh = self._mesh(meta.mesh)
        # Only the first cut of a dimension narrows the search exactly; later cuts of it are all looked at.
        ranges, cut = [range(1)] * len(mesh.shape), set()
        for mesh_dim, text in sorted(enumerate(meta.placements), key=lambda item: item[1].startswith("strided:")):
            dim = shard_dim(text)
            if dim is None:
                continue
            parts = mesh.shape[mesh_dim]
            if dim in cut or (text.startswith("strided:") and f"shard:{dim}" in meta.placements):
                ranges[mesh_dim] = range(parts)
                continue
            cut.add(dim)
            step = max(1, part_of(meta.shape[dim], parts, 0)[1])
            first = wanted.offsets[dim] // step
            last = (wanted.offsets[dim] + wanted.sizes[dim] - 1) // step
            ranges[mesh_dim] = range(first, min(last, parts - 1) + 1)
        coordinates: list[tuple[int, ...]] = [()]
        for values in ranges:
            coordinates = [(*before, value) for before in coordinates for value in values]
        for shards in coordinates:
            box = self._box(name, shards)
            part = overlap(box, wanted)
            if part is not None:
                yield shards, box, part

    def _shares(self, name: str, shards: tuple[int, ...], box: Box) -> list[tuple[int, Piece]]:
        """The pieces of all replicas of one chunk."""
        meta = self.tensors[name]
        kind = (meta.mesh, meta.placements)
        mesh = self._mesh(meta.mesh)
        dims, _ = self._replicas(kind)
        run = self._run(kind, shards)
        size = box.elements * ITEM_BYTES[meta.dtype]
        # The first replica whose share ends after the chunk begins, and on until its end: not all of thousands.
        total = max(1, run.total_bytes)
        at = max(0, run.begins[name] * run.writers // total - 1)
        result = []
        while at < run.writers:
            begin, end = (self._cut(run, name, size, share) for share in (at, at + 1))
            if end > begin:
                coordinate = list(shards)
                rest = at
                for dim in reversed(dims):
                    rest, coordinate[dim] = divmod(rest, mesh.shape[dim])
                result.append((mesh.rank_at(tuple(coordinate)), Piece(name, name, box, begin, end)))
            if end >= size:
                break
            at += 1
        return result
