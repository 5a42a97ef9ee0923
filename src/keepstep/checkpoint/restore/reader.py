"""Reading what one rank needs of a checkpoint: byte ranges of files, verified block by block in the memory they are used from.

A block that one range covers whole is read straight to where it is wanted and verified there; the rest goes through a buffer. Only
blocks in which something is wanted are read at all. Files of older versions have no block digests: they are one block, verified by
the SHA-256 of the whole.
"""

from __future__ import annotations

import contextlib
import functools
import hashlib
import mmap
import threading
from collections.abc import Callable, Iterable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor

import msgspec

from keepstep.checkpoint.format.blocks import (
    BLOCK_BYTES,
    FINGERPRINT_BYTES,
    body_bytes,
    check_digests,
    hash_into,
    new_hash,
    parse_blocks_field,
)
from keepstep.checkpoint.format.boxes import Box, covering_range, is_contiguous
from keepstep.checkpoint.format.dtypes import ITEM_BYTES
from keepstep.checkpoint.format.plan import Need, Plan, stored
from keepstep.checkpoint.format.shard import Span, header_end, parse_header
from keepstep.checkpoint.storage.source import Opened
from keepstep.checkpoint.storage.writer import FileFact
from keepstep.records.errors import VerificationError

_HUGE_PAGE_BYTES = 2 << 20
_PAGE_BYTES = 4096
_ALIGN_FROM_BYTES = 64 << 10  # a shorter run is not worth the gap
# From memory a block is read and hashed piece by piece, while the piece is in a core's second-level cache.
_MEMORY_PIECE_BYTES = 512 << 10


class Blocks(msgspec.Struct, frozen=True, kw_only=True):
    """How a file is verified: block k is bytes [k * block_bytes, ...) up to `end`; `digests` holds one after the other."""

    algorithm: str
    block_bytes: int
    end: int
    digests: bytes

    def digest(self, number: int) -> bytes:
        """The digest of block `number`."""
        size = len(self.digests) // max(1, -(-self.end // self.block_bytes))
        return self.digests[number * size : (number + 1) * size]


class Take(msgspec.Struct, frozen=True):
    """Bytes [begin, end) of a file go to `into`, from its byte `at` on."""

    begin: int
    end: int
    into: memoryview
    at: int


class Strided(msgspec.Struct, frozen=True, kw_only=True):
    """Bytes of a chunk that do not lie side by side where they go.

    `data` holds the row-major bytes of `chunk` from the first element of `part` on; `part` goes into box `box`, whose row-major
    bytes are `into`.
    """

    data: memoryview
    chunk: Box
    part: Box
    box: Box
    into: memoryview
    dtype: str


def allocate(size_bytes: int) -> memoryview:
    """Fresh memory on huge pages where the kernel gives them: touching it page by page costs several times the copy.

    It begins at a page and is this process's own: Python's default, shared memory, gets no huge pages and children would share it.
    """
    if size_bytes == 0:
        return memoryview(b"")
    area = mmap.mmap(-1, size_bytes, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    if size_bytes >= _HUGE_PAGE_BYTES and hasattr(mmap, "MADV_HUGEPAGE"):
        with contextlib.suppress(OSError):  # a kernel without huge pages
            area.madvise(mmap.MADV_HUGEPAGE)
    return memoryview(area)


class HeldBlocks:
    """The blocks verified last of which little was asked for: those with a file's header and values, wanted several times."""

    def __init__(self, limit: int = 8) -> None:
        self._limit = limit
        self._blocks: dict[tuple[str, int], memoryview] = {}

    def get(self, file: str, number: int) -> memoryview | None:
        """Block `number` of `file` when it is held."""
        return self._blocks.get((file, number))

    def put(self, file: str, number: int, block: memoryview) -> None:
        """Hold it in place of the oldest; not a file that is all one large block."""
        if len(block) > BLOCK_BYTES:
            return
        while len(self._blocks) >= self._limit:
            del self._blocks[next(iter(self._blocks))]
        self._blocks[file, number] = block


class VerifiedFile:
    """One file of a checkpoint. Whatever it hands out was verified in the memory that holds it."""

    def __init__(
        self,
        opened: Opened,
        name: str,
        blocks: Blocks,
        held: HeldBlocks | None = None,
        *,
        piece_bytes: int | None = None,
    ) -> None:
        """`held` keeps blocks of which only a part was asked for. `piece_bytes` are read at once; None: a whole block."""
        self.opened = opened
        self.name = name
        self._blocks = blocks
        self._held = held or HeldBlocks()
        self._piece_bytes = piece_bytes or max(1, blocks.block_bytes)

    @classmethod
    def by_fact(cls, opened: Opened, fact: FileFact, held: HeldBlocks | None = None) -> VerifiedFile:
        """A file as a manifest describes it. Raises VerificationError."""
        size = opened.size_bytes
        if fact.size_bytes >= 0 and size != fact.size_bytes:
            raise VerificationError(f"{fact.name}: has {size} bytes, the manifest says {fact.size_bytes}")
        if fact.blocks is None:
            whole = Blocks(algorithm="sha256", block_bytes=max(1, size), end=size, digests=bytes.fromhex(fact.sha256))
            return cls(opened, fact.name, whole, held)
        field = parse_blocks_field(fact.blocks, fact.name)
        begin = body_bytes(size)
        trailer = bytearray(size - begin)
        opened.read_into(memoryview(trailer), begin)
        check_digests(bytes(trailer), field, fact.name)
        blocks = Blocks(algorithm=field.algorithm, block_bytes=BLOCK_BYTES, end=begin, digests=bytes(trailer))
        return cls(opened, fact.name, blocks, held)

    @classmethod
    def by_fingerprints(
        cls, opened: Opened, fact: FileFact, algorithm: str, prints: bytes, held: HeldBlocks | None = None
    ) -> VerifiedFile:
        """An image in memory, by the fingerprints of its blocks; `fact` names their SHA-256. Raises VerificationError."""
        if opened.size_bytes != fact.size_bytes:
            raise VerificationError(f"{fact.name}: has {opened.size_bytes} bytes, the manifest says {fact.size_bytes}")
        count = -(-fact.size_bytes // BLOCK_BYTES)
        if hashlib.sha256(prints).hexdigest() != fact.sha256 or len(prints) != count * FINGERPRINT_BYTES.get(
            algorithm, 0
        ):
            raise VerificationError(f"{fact.name}: its fingerprints are not those the manifest names")
        blocks = Blocks(algorithm=algorithm, block_bytes=BLOCK_BYTES, end=fact.size_bytes, digests=prints)
        return cls(opened, fact.name, blocks, held, piece_bytes=_MEMORY_PIECE_BYTES)

    def wanted_blocks(self, takes: Sequence[Take]) -> dict[int, list[Take]]:
        """Number of each block in which something is wanted, with what. Raises VerificationError for what no digest covers."""
        size = self._blocks.block_bytes
        result: dict[int, list[Take]] = {}
        for take in takes:
            if not 0 <= take.begin <= take.end <= self._blocks.end:
                raise VerificationError(
                    f"{self.name}: bytes {take.begin} to {take.end} are not there or have no digest"
                )
            for number in range(take.begin // size, -(-take.end // size)):
                result.setdefault(number, []).append(take)
        return result

    def read_block(self, number: int, takes: Sequence[Take], scratch: Callable[[int], memoryview]) -> None:
        """Read and verify block `number`, and put into place what `takes` want of it."""
        begin, end = self._span(number)
        known = self._held.get(self.name, number)
        if known is not None:
            _put(takes, known, begin, end)
            return
        direct = next((take for take in takes if take.begin <= begin and take.end >= end), None)
        if direct is not None:
            target = direct.into[direct.at + begin - direct.begin : direct.at + end - direct.begin]
        else:
            target = scratch(end - begin)
        self._verify_into(number, target)
        _put([take for take in takes if take is not direct], target, begin, end)

    def _span(self, number: int) -> tuple[int, int]:
        begin = number * self._blocks.block_bytes
        return begin, min(begin + self._blocks.block_bytes, self._blocks.end)

    def _verify_into(self, number: int, target: memoryview) -> None:
        """Fill `target`, as large as block `number`, with it. Raises VerificationError."""
        begin, end = self._span(number)
        running = new_hash(self._blocks.algorithm)
        for at in range(0, len(target), self._piece_bytes):
            piece = target[at : at + self._piece_bytes]
            self.opened.read_into(piece, begin + at)
            hash_into(piece, (running,))
        digest, expected = running.digest(), self._blocks.digest(number)
        if digest != expected:
            raise VerificationError(
                f"{self.name}: bytes {begin} to {end} are not what was written: {self._blocks.algorithm} is "
                f"{digest.hex()[:16]}..., the manifest says {expected.hex()[:16]}..."
            )

    def read(self, begin: int, end: int) -> memoryview:
        """Bytes [begin, end), verified. Their blocks are held for whoever wants more of them next."""
        result = memoryview(bytearray(end - begin))
        for number, takes in self.wanted_blocks([Take(begin, end, result, 0)]).items():
            low, high = self._span(number)
            block = self._held.get(self.name, number)
            if block is None:
                block = allocate(high - low)
                self._verify_into(number, block)
                self._held.put(self.name, number, block)
            _put(takes, block, low, high)
        return result

    def header(self) -> dict[str, Span]:
        """Its tensors. Raises VerificationError."""
        size = self.opened.size_bytes
        if size < 8:
            raise VerificationError(f"{self.name}: {size} bytes are too few for a header")
        # The length is read unverified, to know how much to verify; only verified bytes are parsed.
        word = bytearray(8)
        self.opened.read_into(memoryview(word), 0)
        end = header_end(bytes(word), size, self.name)
        return parse_header(self.read(0, end), size, self.name)


def _put(takes: Iterable[Take], block: memoryview, begin: int, end: int) -> None:
    """Copy to where it belongs what `takes` want of `block`, which is bytes [begin, end) of their file."""
    for take in takes:
        low, high = max(take.begin, begin), min(take.end, end)
        take.into[take.at + low - take.begin : take.at + high - take.begin] = block[low - begin : high - begin]


class _Scratch(threading.local):
    """A buffer for each thread."""

    held: memoryview = memoryview(b"")

    def __call__(self, size: int) -> memoryview:
        if len(self.held) < size:
            self.held = allocate(size)
        return self.held[:size]


def merge(takes: Iterable[Take]) -> list[Take]:
    """`takes` of one file in its order, neighbours that also go to neighbouring places made one."""
    result: list[Take] = []
    for take in sorted(takes, key=lambda item: (item.begin, item.end)):
        last = result[-1] if result else None
        if (
            last is not None
            and last.end == take.begin
            and last.into is take.into
            and last.at + last.end - last.begin == take.at
        ):
            result[-1] = Take(last.begin, take.end, last.into, last.at)
        elif take.end > take.begin:
            result.append(take)
    return result


def read_all(jobs: Sequence[tuple[VerifiedFile, Sequence[Take]]], *, threads: int) -> None:
    """Carry out the takes of several files. Raises VerificationError or StorageError, the first one met."""
    scratch = _Scratch()
    work = [
        (file, number, wanted)
        for file, takes in jobs
        for number, wanted in sorted(file.wanted_blocks(merge(takes)).items())
    ]
    if threads <= 1 or len(work) <= 1:
        for file, number, wanted in work:
            file.read_block(number, wanted, scratch)
        return
    with ThreadPoolExecutor(threads, thread_name_prefix="keepstep-read") as pool:
        futures = [pool.submit(file.read_block, number, wanted, scratch) for file, number, wanted in work]
        try:
            for future in futures:
                future.result()
        except BaseException:
            for future in futures:
                future.cancel()
            raise


class Landing(msgspec.Struct, kw_only=True):
    """Memory for the boxes of one top-level part of the state, filled by `read_all`; `strided` is then left to copy."""

    buffers: dict[str, memoryview]
    strided: list[Strided]


def land(
    plan: Plan,
    wanted: Mapping[str, Box],
    spans_of: Callable[[int], Mapping[str, Span]],
    file_name: Callable[[int], str],
    *,
    room_for: Callable[[int], memoryview] = allocate,
) -> tuple[Landing, dict[int, list[Take]]]:
    """Memory for `wanted`, the boxes of tensors, and what to take from which rank's file to fill it.

    The boxes lie in the order in which the files have them, beginning with the file that has most, and long runs at the same place
    in a page, so that the same layout is read straight from the disk. `spans_of` gives the verified header of a rank's file,
    `room_for(n)` n bytes of memory. Raises VerificationError when a header is not what the index says, or bytes are missing.
    """
    spans_of = functools.cache(spans_of)
    needs = {name: list(plan.needs(name, box)) for name, box in wanted.items()}
    places = {name: _place(needs[name], spans_of) for name in wanted}
    sizes = {name: box.elements * ITEM_BYTES[plan.tensors[name].dtype] for name, box in wanted.items()}
    items = {name: ITEM_BYTES[plan.tensors[name].dtype] for name in wanted}
    offsets, end = _arrange(places, sizes, items)
    room = room_for(end)
    landing, takes = Landing(buffers={}, strided=[]), dict[int, list[Take]]()
    for name, at in offsets.items():
        landing.buffers[name] = room[at : at + sizes[name]]
        _take_tensor(plan, name, wanted[name], needs[name], room, at, landing, takes, spans_of, file_name)
    return landing, takes


def _arrange(
    places: Mapping[str, tuple[int, int]], sizes: Mapping[str, int], items: Mapping[str, int]
) -> tuple[dict[str, int], int]:
    """Where each box lies in the memory for all of them, and how large that is; see `land`.

    `places` are rank and offset of its bytes in the files, `items` bytes of an element.
    """
    weights: dict[int, int] = {}
    for name, (rank, _) in places.items():
        weights[rank] = weights.get(rank, 0) + sizes[name]
    runs: list[list[str]] = []
    after = None
    for name in sorted(places, key=lambda name: (-weights[places[name][0]], places[name], name)):
        rank, place = places[name]
        if (rank, place) != after:
            runs.append([])
        runs[-1].append(name)
        after = rank, place + sizes[name]
    offsets, end = {}, 0
    for run in runs:
        place = places[run[0]][1]
        if sum(sizes[name] for name in run) >= _ALIGN_FROM_BYTES:
            end += (place - end) % _PAGE_BYTES
        for name in run:
            # An element lies at a multiple of its size, as whoever computes with it expects.
            offsets[name] = end + -end % items[name]
            end = offsets[name] + sizes[name]
    return offsets, end


def _place(needs: Sequence[Need], spans_of: Callable[[int], Mapping[str, Span]]) -> tuple[int, int]:
    """Rank whose file has the first bytes of a tensor, and where in the file; (0, 0) when none has."""
    for need in needs:
        for rank, piece in need.pieces:
            span = spans_of(rank).get(piece.key)
            if span is not None:
                return rank, span.begin + max(piece.begin, need.begin) - piece.begin
    return 0, 0


def _take_tensor(
    plan: Plan,
    name: str,
    box: Box,
    needs: Sequence[Need],
    room: memoryview,
    at: int,
    landing: Landing,
    takes: dict[int, list[Take]],
    spans_of: Callable[[int], Mapping[str, Span]],
    file_name: Callable[[int], str],
) -> None:
    meta, item, found = plan.tensors[name], ITEM_BYTES[plan.tensors[name].dtype], 0
    for need in needs:
        found += need.part.elements
        if is_contiguous(need.chunk, need.part) and is_contiguous(box, need.part):
            into, base = room, at + covering_range(box, need.part)[0] * item
        else:
            into, base = allocate(need.end - need.begin), 0
            landing.strided.append(
                Strided(
                    data=into, chunk=need.chunk, part=need.part, box=box, into=landing.buffers[name], dtype=meta.dtype
                )
            )
        covered = 0
        for rank, piece in need.pieces:
            span = spans_of(rank).get(piece.key)
            expected = stored(piece, meta)
            if span is None or (span.dtype, span.shape) != (expected.dtype, expected.shape):
                said = "nothing" if span is None else f"{span.dtype}{list(span.shape)}"
                raise VerificationError(
                    f"{file_name(rank)}: tensor {piece.key!r} is {said}, expected {expected.dtype}{list(expected.shape)}"
                )
            low, high = max(piece.begin, need.begin), min(piece.end, need.end)
            covered += high - low
            begin = span.begin + low - piece.begin
            takes.setdefault(rank, []).append(Take(begin, begin + high - low, into, base + low - need.begin))
        if covered != need.end - need.begin:
            raise VerificationError(f"tensor {name!r}: {need.end - need.begin - covered} bytes of it are in no file")
    if found != box.elements:
        raise VerificationError(f"tensor {name!r}: {box.elements - found} elements of it are in no file")
