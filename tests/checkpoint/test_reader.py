"""Reading a checkpoint's files: past the page cache, from memory, and into boxes that lie as the files have them."""

from __future__ import annotations

import ctypes
import hashlib
import mmap
import os
import random
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from keepstep.checkpoint.exchange import Fetched
from keepstep.checkpoint.format import plan as plan_rules
from keepstep.checkpoint.format.blocks import BLOCK_BYTES, digest_blocks
from keepstep.checkpoint.format.boxes import Mesh, local_box
from keepstep.checkpoint.format.dtypes import ITEM_BYTES
from keepstep.checkpoint.format.image import image_layout, tensor_table
from keepstep.checkpoint.format.plan import Plan, TensorMeta
from keepstep.checkpoint.format.shard import parse_header
from keepstep.checkpoint.restore.reader import Blocks, Take, VerifiedFile, allocate, land, merge, read_all
from keepstep.checkpoint.storage.memory import MemoryFile
from keepstep.checkpoint.storage.posix import PosixFile, PosixRoot
from keepstep.checkpoint.storage.writer import FileFact, write_file
from keepstep.records.errors import VerificationError

MIB = 1 << 20


@pytest.fixture(autouse=True)
def small_shares(monkeypatch: pytest.MonkeyPatch) -> None:
    """Tensors of a few bytes are split as large ones are."""
    monkeypatch.setattr(plan_rules, "MIN_SHARE_BYTES", 1)


def noise(size: int, seed: int = 0) -> bytes:
    return random.Random(seed).randbytes(size)


def address_of(view: memoryview) -> int:
    return ctypes.addressof(ctypes.c_char.from_buffer(view))


def cached_pages(path: Path) -> int:
    """Pages of the file in the page cache (mincore(2))."""
    size = path.stat().st_size
    with path.open("rb") as file, mmap.mmap(file.fileno(), size, access=mmap.ACCESS_COPY) as area:
        seen = (ctypes.c_ubyte * -(-size // mmap.PAGESIZE))()
        anchor = ctypes.c_char.from_buffer(area)
        address = ctypes.c_void_p(ctypes.addressof(anchor))
        assert ctypes.CDLL(None).mincore(address, ctypes.c_size_t(size), seen) == 0
        del anchor
        return sum(byte & 1 for byte in seen)


def drop_from_cache(path: Path) -> None:
    fd = os.open(path, os.O_RDONLY)
    os.fsync(fd)
    os.posix_fadvise(fd, 0, 0, os.POSIX_FADV_DONTNEED)
    os.close(fd)
    if cached_pages(path):
        pytest.skip("this file system keeps everything in memory")


@pytest.fixture
def big(tmp_path: Path) -> tuple[Path, bytes]:
    """A file that ends in the middle of a page."""
    folder = tmp_path / "run-step-00000001-c0000-a0000"
    folder.mkdir()
    data = noise(4 * MIB + 1234)
    write_file(folder / "big", [data])
    return folder / "big", data


def opened(path: Path) -> PosixFile:
    return PosixRoot(path.parent.parent).open(path.parent.name, path.name)


def test_bypassing_reads_the_same_and_leaves_the_cache_alone(big: tuple[Path, bytes]) -> None:
    path, data = big
    drop_from_cache(path)
    file = opened(path)
    file.bypass_cache()
    file.bypass_cache()  # again is no harm
    into = allocate(len(data))
    file.read_into(into, 0)
    assert into == data
    pages = cached_pages(path)
    if pages > 64:
        pytest.skip("this file system has no O_DIRECT")
    file.close()
    file.close()
    assert pages <= 2  # where it was looked for, and the last, partial one


@pytest.mark.parametrize(
    ("shift", "begin", "size"), [(0, 4096, 2 * MIB), (8, 0, 2 * MIB), (0, 100, 3 * MIB), (0, 0, 4096)]
)
def test_what_does_not_fit_is_read_through_the_cache(
    big: tuple[Path, bytes], shift: int, begin: int, size: int
) -> None:
    path, data = big
    drop_from_cache(path)
    file = opened(path)
    file.bypass_cache()
    into = allocate(shift + size)[shift:]
    file.read_into(into, begin)
    assert into == data[begin : begin + size]
    file.close()


def test_what_the_cache_holds_is_taken_from_it(big: tuple[Path, bytes], monkeypatch: pytest.MonkeyPatch) -> None:
    path, data = big
    assert path.read_bytes() == data
    file = opened(path)
    file.bypass_cache()
    used: list[int] = []
    real = os.preadv

    def watched(fd: int, buffers: list[memoryview], offset: int, flags: int = 0) -> int:
        used.append(fd)
        return real(fd, buffers, offset, flags)

    monkeypatch.setattr(os, "preadv", watched)
    into = allocate(4 * MIB)
    file.read_into(into, 0)
    assert into == data[: 4 * MIB] and len(set(used)) == 1
    file.close()


def test_a_file_that_ends_early_is_said_also_past_the_cache(big: tuple[Path, bytes]) -> None:
    path, data = big
    file = opened(path)
    file.bypass_cache()
    os.truncate(path, 3 * MIB)
    drop_from_cache(path)
    with pytest.raises(VerificationError, match=f"ends at byte {3 * MIB}, expected {4 * MIB}"):
        file.read_into(allocate(4 * MIB), 0)
    file.close()
    assert len(data) > 4 * MIB


def test_another_file_at_the_same_path_is_not_read(big: tuple[Path, bytes]) -> None:
    path, data = big
    file = opened(path)
    path.rename(path.with_name("moved"))
    path.write_bytes(noise(len(data), seed=1))
    file.bypass_cache()
    into = allocate(len(data))
    file.read_into(into, 0)
    assert into == data
    file.close()


def test_memory_is_read_and_its_end_is_seen() -> None:
    data = noise(3 * MIB + 5)
    fd = os.memfd_create("image")
    os.write(fd, data)
    file = MemoryFile(Fetched(fd=fd, size_bytes=len(data), tier="shm", facts={}), "rank-0")
    into = memoryview(bytearray(1000))
    file.read_into(into, 2 * MIB + 3)
    assert into == data[2 * MIB + 3 : 2 * MIB + 1003]
    with pytest.raises(VerificationError, match="rank-0: ends at byte"):
        file.read_into(into, len(data) - 999)
    os.truncate(fd, MIB)
    with pytest.raises(VerificationError, match="rank-0: ends at byte"):
        file.read_into(into, MIB - 10)
    file.close()
    file.close()


def test_landing_memory_belongs_to_this_process_alone() -> None:
    area = allocate(4 * MIB)
    area[0] = 1
    child = os.fork()
    if child == 0:
        area[0] = 2
        os._exit(0)
    os.waitpid(child, 0)
    assert area[0] == 1


TENSORS = st.dictionaries(
    st.text("abcdefgh", min_size=1, max_size=4).map(lambda name: f"model/{name}"),
    st.tuples(st.sampled_from(["F32", "BF16", "I64", "U8"]), st.integers(1, 9), st.integers(0, 40), st.booleans()),
    min_size=1,
    max_size=12,
)


@settings(max_examples=60, deadline=None)
@given(drawn=TENSORS, ranks=st.integers(1, 3), readers=st.integers(1, 4))
def test_every_byte_lands_where_it_belongs(
    drawn: dict[str, tuple[str, int, int, bool]], ranks: int, readers: int
) -> None:
    """Files as ranks write them, read back on the same and on other numbers of ranks."""
    tensors = {
        name: TensorMeta(dtype=code, shape=(rows, columns), mesh=0, placements=("shard:0",))
        if sharded
        else TensorMeta(dtype=code, shape=(rows, columns))
        for name, (code, rows, columns, sharded) in drawn.items()
    }
    plan = Plan(tensors, (Mesh((ranks,)),), ranks)
    whole = {name: noise(meta.size_bytes, seed=number) for number, (name, meta) in enumerate(sorted(tensors.items()))}
    images, spans = [], []
    for rank in range(ranks):
        table = tensor_table(plan, {}, rank)
        layout = image_layout(table, 0)
        image = bytearray(layout.file_bytes)
        image[: len(layout.header)] = layout.header
        for key, piece in table.pieces.items():
            row = tensors[piece.name].size_bytes // tensors[piece.name].shape[0]
            chunk = whole[piece.name][piece.box.offsets[0] * row : (piece.box.offsets[0] + piece.box.sizes[0]) * row]
            part = chunk[piece.begin : piece.end]
            image[layout.offsets[key] : layout.offsets[key] + len(part)] = part
        images.append(bytes(image))
        spans.append(parse_header(layout.header, len(image), "image"))
    for reader in range(readers):
        boxes = {
            name: local_box(meta.shape, (readers,), ("shard:0" if meta.mesh == 0 else "replicate",), (reader,))
            for name, meta in tensors.items()
        }
        landing, takes = land(plan, boxes, lambda rank: spans[rank], lambda rank: f"rank-{rank}")
        read_all([(in_memory(images[rank]), wanted) for rank, wanted in takes.items()], threads=1)
        assert not landing.strided
        for name, box in boxes.items():
            row = tensors[name].size_bytes // tensors[name].shape[0]
            buffer = landing.buffers[name]
            assert buffer == whole[name][box.offsets[0] * row : (box.offsets[0] + box.sizes[0]) * row]
            if len(buffer):
                assert address_of(buffer) % ITEM_BYTES[tensors[name].dtype] == 0


class HeldBytes:
    """An Opened over bytes."""

    def __init__(self, data: bytes, reads: list[int] | None = None) -> None:
        """`reads` gets the offset of each read."""
        self.data = data
        self.size_bytes = len(data)
        self.reads = [] if reads is None else reads

    def read_into(self, view: memoryview, offset: int) -> None:
        self.reads.append(offset)
        view[:] = self.data[offset : offset + len(view)]

    def close(self) -> None:
        pass


def in_memory(image: bytes) -> VerifiedFile:
    fact = FileFact(name="image", size_bytes=len(image), sha256=hashlib.sha256(image).hexdigest())
    return VerifiedFile.by_fact(HeldBytes(image), fact)


def test_the_same_layout_is_one_long_run_at_the_same_place_in_a_page() -> None:
    """Shards with replicated scalars among them, of which each rank's file has only some: what a sharded optimizer looks like."""
    tensors: dict[str, TensorMeta] = {}
    for number in range(8):
        tensors[f"optim/{number}/exp"] = TensorMeta(dtype="F32", shape=(8, 12345), mesh=0, placements=("shard:0",))
        tensors[f"optim/{number}/norm"] = TensorMeta(dtype="F32", shape=(6,), mesh=0, placements=("shard:0",))
        tensors[f"optim/{number}/step"] = TensorMeta(dtype="F32", shape=())
    plan = Plan(tensors, (Mesh((2,)),), 2)
    spans = []
    for rank in range(2):
        layout = image_layout(tensor_table(plan, {}, rank), 0)
        spans.append(parse_header(layout.header, layout.file_bytes, "image"))
    for rank in range(2):
        boxes = {name: local_box(meta.shape, (2,), meta.placements, (rank,)) for name, meta in tensors.items()}
        landing, takes = land(plan, boxes, lambda rank: spans[rank], lambda rank: f"rank-{rank}")
        (own,) = merge(takes[rank])
        assert own.end - own.begin == 8 * (4 * 12345 * 4 + 3 * 4) + 4 * 4
        assert (address_of(own.into) + own.at - own.begin) % 4096 == 0
        foreign = merge(takes[1 - rank])
        assert sum(take.end - take.begin for take in foreign) == 4 * 4
        assert all(take.end < 4096 + 1000 for take in foreign), "beside the header, not among the large ones"
        assert sum(len(buffer) for buffer in landing.buffers.values()) == 8 * (4 * 12345 * 4 + 3 * 4 + 4)


def test_a_block_of_which_little_was_asked_for_is_read_once() -> None:
    image = noise(40 * MIB)
    reads: list[int] = []
    digests = digest_blocks(memoryview(image), "sha256")
    source = HeldBytes(image, reads)
    blocks = Blocks(algorithm="sha256", block_bytes=BLOCK_BYTES, end=len(image), digests=digests)
    file = VerifiedFile(source, "image", blocks)
    assert file.read(5, 9) == image[5:9] and file.read(100, 200) == image[100:200]
    into = allocate(20 * MIB)
    read_all([(file, [Take(0, 20 * MIB, into, 0)])], threads=2)
    assert into == image[: 20 * MIB]
    assert sorted(reads) == [0, 16 * MIB]


def test_a_wanted_byte_without_a_digest_is_refused() -> None:
    image = noise(5000)
    with pytest.raises(VerificationError, match="bytes 4000 to 6000"):
        read_all([(in_memory(image), [Take(4000, 6000, allocate(2000), 0)])], threads=1)
