"""What some ranks wrote, other ranks in another arrangement read: exactly, and no more blocks than they need."""

from __future__ import annotations

import functools
import itertools
import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from keepstep.checkpoint.format import blocks
from keepstep.checkpoint.format import plan as plan_rules
from keepstep.checkpoint.format.boxes import REPLICATE, Box, Mesh, local_box, overlap, whole
from keepstep.checkpoint.format.image import image_layout, tensor_table
from keepstep.checkpoint.format.plan import Chunk, Piece, Plan, TensorMeta
from keepstep.checkpoint.format.shard import parse_header
from keepstep.checkpoint.restore.reader import Take, VerifiedFile, land, read_all
from keepstep.checkpoint.storage.writer import FileFact
from keepstep.checkpoint.torch.codes import DTYPES
from keepstep.checkpoint.torch.load import copy_strided
from keepstep.records.errors import VerificationError

Tensors = dict[str, torch.Tensor]


@pytest.fixture(autouse=True)
def small_shares(monkeypatch: pytest.MonkeyPatch) -> None:
    """Tensors of a few bytes are split as large ones are."""
    monkeypatch.setattr(plan_rules, "MIN_SHARE_BYTES", 1)


class Bytes:
    """A file in memory that counts what is read of it."""

    def __init__(self, data: bytes) -> None:
        self.data = data
        self.size_bytes = len(data)
        self.read: list[tuple[int, int]] = []

    def read_into(self, view: memoryview, offset: int) -> None:
        self.read.append((offset, offset + len(view)))
        view[:] = self.data[offset : offset + len(view)]

    def close(self) -> None:
        pass


def part(value: torch.Tensor, box: Box) -> torch.Tensor:
    for dim, (begin, size) in enumerate(zip(box.offsets, box.sizes, strict=True)):
        value = value.narrow(dim, begin, size)
    return value.contiguous()


def raw(value: torch.Tensor) -> bytes:
    return bytes(value.reshape(-1).view(torch.uint8).tolist())


def image(plan: Plan, rank: int, values: Tensors) -> bytes:
    """The image `rank` would write."""
    table = tensor_table(plan, {}, rank)
    layout = image_layout(table, 5)
    body = bytearray(layout.header)
    for piece in table.pieces.values():
        body += raw(part(values[piece.name], piece.box))[piece.begin : piece.end]
    body += b"{}   "
    assert len(body) == layout.body_bytes
    return bytes(body) + blocks.digest_blocks(memoryview(body), "blake3")


def opened(data: bytes, name: str) -> tuple[VerifiedFile, Bytes]:
    file = Bytes(data)
    text = blocks.format_blocks_field("blake3", data[blocks.body_bytes(len(data)) :])
    fact = FileFact(name=name, size_bytes=len(data), sha256="00" * 32, blocks=text)
    return VerifiedFile.by_fact(file, fact), file


def read_boxes(plan: Plan, files: list[VerifiedFile], wanted: dict[str, Box]) -> Tensors:
    header = functools.cache(lambda rank: files[rank].header())
    landing, takes = land(plan, wanted, header, lambda rank: files[rank].name)
    read_all([(files[rank], of_rank) for rank, of_rank in takes.items()], threads=2)
    for item in landing.strided:
        copy_strided(item)
    result = {}
    for name, box in wanted.items():
        dtype = DTYPES[plan.tensors[name].dtype]
        data = landing.buffers[name]
        flat = torch.frombuffer(data, dtype=torch.uint8).view(dtype) if len(data) else torch.empty(0, dtype=dtype)
        result[name] = flat.reshape(box.sizes)
    return result


dtypes = st.sampled_from(["F32", "BF16", "I64", "U8", "F64"])
shapes = st.lists(st.integers(1, 9), min_size=0, max_size=3).map(tuple)


@st.composite
def arrangements(draw: st.DrawFn, dims: int) -> tuple[Mesh, tuple[str, ...]]:
    """A mesh, its ranks in any order, and placements of a tensor of `dims` dimensions on it."""
    shape = tuple(draw(st.lists(st.integers(1, 3), min_size=1, max_size=2)))
    ranks = draw(st.permutations(range(math.prod(shape))))
    options = [REPLICATE, *(f"shard:{dim}" for dim in range(dims))]
    texts = [draw(st.sampled_from(options)) for _ in shape]
    if len(shape) == 2 and texts[0] == texts[1] and texts[0] != REPLICATE and draw(st.booleans()):
        texts[0] = f"strided:{texts[0].partition(':')[2]}:{shape[1]}"
    return Mesh(shape, tuple(ranks)), tuple(texts)


@st.composite
def states(draw: st.DrawFn) -> tuple[dict[str, TensorMeta], list[Mesh], int, Tensors]:
    """Tensors of one state, the meshes they lie on, the number of ranks, and their values."""
    tensors: dict[str, TensorMeta] = {}
    meshes: list[Mesh] = []
    for number in range(draw(st.integers(1, 4))):
        shape, dtype = draw(shapes), draw(dtypes)
        if draw(st.booleans()):
            mesh, texts = draw(arrangements(len(shape)))
            meshes.append(mesh)
            tensors[f"t{number}"] = TensorMeta(dtype=dtype, shape=shape, mesh=len(meshes) - 1, placements=texts)
        else:
            tensors[f"t{number}"] = TensorMeta(dtype=dtype, shape=shape, owner=draw(st.sampled_from([None, 0])))
    world = max([mesh.size for mesh in meshes], default=draw(st.integers(1, 4)))
    values = {name: torch.randint(0, 200, meta.shape).to(DTYPES[meta.dtype]) for name, meta in tensors.items()}
    return tensors, meshes, world, values


@settings(deadline=None, max_examples=150)
@given(states(), st.data())
def test_any_box_of_any_arrangement_reads_back_exactly(
    state: tuple[dict[str, TensorMeta], list[Mesh], int, Tensors], data: st.DataObject
) -> None:
    tensors, meshes, world, values = state
    plan = Plan(tensors, meshes, world)
    files = [opened(image(plan, rank, values), f"rank-{rank}")[0] for rank in range(world)]
    wanted = {}
    for name, meta in tensors.items():
        begins = [data.draw(st.integers(0, size)) for size in meta.shape]
        wanted[name] = Box(
            tuple(begins),
            tuple(data.draw(st.integers(0, size - at)) for size, at in zip(meta.shape, begins, strict=True)),
        )
    got = read_boxes(Plan(tensors, meshes, world), files, wanted)
    for name, box in wanted.items():
        assert torch.equal(got[name], part(values[name], box)), (name, box)


@settings(deadline=None)
@given(states())
def test_every_byte_of_every_chunk_is_written_once(
    state: tuple[dict[str, TensorMeta], list[Mesh], int, Tensors],
) -> None:
    tensors, meshes, world, _ = state
    plan = Plan(tensors, meshes, world)
    written: dict[tuple[str, Box], list[Piece]] = {}
    for rank in range(world):
        for piece in plan.pieces(rank):
            written.setdefault((piece.name, piece.box), []).append(piece)
    for name, meta in tensors.items():
        if meta.mesh is None:
            boxes = {whole(meta.shape)}
        else:
            mesh = meshes[meta.mesh]
            grid = itertools.product(*(range(size) for size in mesh.shape))
            boxes = {local_box(meta.shape, mesh.shape, meta.placements, at) for at in grid}
        boxes = {box for box in boxes if box.elements}
        assert boxes == {box for other, box in written if other == name}
        assert sum(box.elements for box in boxes) == math.prod(meta.shape), "boxes cover the tensor"
        assert all(overlap(a, b) is None for a, b in itertools.combinations(boxes, 2)) or not meta.shape
        for box in boxes:
            at = 0
            for piece in sorted(written[name, box], key=lambda piece: piece.begin):
                assert piece.begin == at < piece.end
                at = piece.end
            assert at == box.elements * torch.empty(0, dtype=DTYPES[meta.dtype]).element_size()


def test_boxes_are_those_of_torch() -> None:
    """Against torch's own arithmetic, for all small cases of one and two mesh dimensions."""
    from torch.distributed.tensor import Replicate, Shard
    from torch.distributed.tensor._utils import _compute_local_shape_and_global_offset
    from torch.distributed.tensor.placement_types import _StridedShard

    for rows, columns, first, second in itertools.product((1, 5, 8), (3, 4), (1, 2, 3), (2, 4)):
        shape, mesh_shape = (rows, columns), (first, second)
        for ours, theirs in [
            (("shard:0", "shard:1"), (Shard(0), Shard(1))),
            (("shard:0", "shard:0"), (Shard(0), Shard(0))),
            (("replicate", "shard:1"), (Replicate(), Shard(1))),
            ((f"strided:0:{second}", "shard:0"), (_StridedShard(0, split_factor=second), Shard(0))),
        ]:
            if ours[0].startswith("strided") and rows % (first * second):
                continue  # torch itself gives no single box for uneven strided shards
            for at in itertools.product(range(first), range(second)):
                box = local_box(shape, mesh_shape, ours, at)
                size, offset = _compute_local_shape_and_global_offset(shape, mesh_shape, list(at), theirs)
                assert tuple(size) == box.sizes, (shape, mesh_shape, ours, at)
                if box.elements:
                    assert tuple(offset) == box.offsets, (shape, mesh_shape, ours, at)


def test_listed_chunks_may_lie_anywhere_and_twice_in_a_file() -> None:
    value = torch.arange(24, dtype=torch.float32).reshape(4, 6)
    chunks = (Chunk(1, (0, 0), (2, 6)), Chunk(0, (2, 0), (2, 3)), Chunk(1, (2, 3), (2, 3)))
    plan = Plan({"w": TensorMeta(dtype="F32", shape=(4, 6), chunks=chunks)}, (), 2)
    data = [image(plan, rank, {"w": value}) for rank in range(2)]
    assert {"w", "w#1"} <= set(parse_header(data[1], len(data[1]), "x"))
    files = [opened(one, f"rank-{rank}")[0] for rank, one in enumerate(data)]
    for box in (whole((4, 6)), Box((1, 2), (2, 3)), Box((3, 5), (1, 1))):
        assert torch.equal(read_boxes(plan, files, {"w": box})["w"], part(value, box))
    missing = Plan({"w": TensorMeta(dtype="F32", shape=(4, 6), chunks=chunks[:2])}, (), 2)
    with pytest.raises(VerificationError, match=r"'w': 6 elements of it are in no file"):
        read_boxes(missing, files, {"w": whole((4, 6))})


def test_only_blocks_that_hold_what_is_wanted_are_read() -> None:
    rows = 6 * (1 << 20)  # 24 MiB a rank: two blocks, and the digests in a third place
    value = torch.arange(2 * rows, dtype=torch.int32)
    tensors = {"w": TensorMeta(dtype="I32", shape=(2 * rows,), mesh=0, placements=("shard:0",))}
    plan = Plan(tensors, (Mesh((2,)),), 2)
    data = [image_large(plan, rank, value[rank * rows : (rank + 1) * rows]) for rank in range(2)]
    (one, counted), (two, untouched) = (opened(item, f"rank-{rank}") for rank, item in enumerate(data))
    untouched.read.clear()
    wanted = Box((5 * (1 << 20),), (1000,))
    assert torch.equal(read_boxes(plan, [one, two], {"w": wanted})["w"], value[wanted.offsets[0] :][:1000])
    assert not untouched.read, "the other rank's file holds nothing of it"
    large = [(begin, end) for begin, end in counted.read if end - begin > 4096]
    assert large[-1][0] == blocks.BLOCK_BYTES, "the second block alone, after the header's"
    assert len([item for item in large if item[0] == 0]) <= 1

    damaged = bytearray(data[0])
    damaged[5000] ^= 1
    file, _ = opened(bytes(damaged), "rank-0")
    read_all([(file, [Take(17 << 20, 18 << 20, memoryview(bytearray(1 << 20)), 0)])], threads=1)
    with pytest.raises(VerificationError, match=r"rank-0: bytes 0 to 16777216 are not what was written: blake3"):
        read_all([(file, [Take(5000, 5001, memoryview(bytearray(1)), 0)])], threads=1)


def image_large(plan: Plan, rank: int, value: torch.Tensor) -> bytes:
    """As `image`, for one tensor that is too large to be made a list of."""
    layout = image_layout(tensor_table(plan, {}, rank), 2)
    body = layout.header + value.numpy().tobytes() + b"{}"
    return body + blocks.digest_blocks(memoryview(body), "blake3")
