"""Reading a checkpoint of torch.distributed.checkpoint (DCP) as data: nothing in it is unpickled, torch is not needed.

A DCP folder holds `.metadata` (or `__N.metadata`, one a rank, when it was saved without collectives) and `.distcp` files,
in which each item is one `torch.save` record. The metadata is a pickle that needs the names in `METADATA_NAMES`; any other
refuses it. Layout: torch/distributed/checkpoint/filesystem.py and metadata.py of torch 2.4 to 2.13.
"""

from __future__ import annotations

import contextlib
import errno
import math
import mmap
import os
import re
import stat
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import msgspec

from keepstep.checkpoint.format.boxes import Box
from keepstep.checkpoint.format.dtypes import ITEM_BYTES
from keepstep.checkpoint.format.layout import is_plain_file_name
from keepstep.checkpoint.format.runs import runs, tiling_problem
from keepstep.checkpoint.storage.writer import storage_error
from keepstep.checkpoint.torch.nest import Keys
from keepstep.checkpoint.torch.saved import (
    DTYPE_NAMES,
    DTYPES,
    SavedTensor,
    load_storage,
    most_bytes,
    read_record,
    row_major,
)
from keepstep.records.errors import ConfigError, VerificationError
from keepstep.records.pickles import Global, Record, parse_pickle

_DCP = "torch.distributed.checkpoint"
_META = f"{_DCP}.metadata"
_CLASSES = (
    "Metadata", "MetadataIndex", "StorageMeta", "TensorProperties", "TensorStorageMetadata", "ChunkStorageMetadata",
    "BytesStorageMetadata", "_MEM_FORMAT_ENCODING",
)  # fmt: skip
_OTHERS = (
    f"{_DCP}.filesystem._StorageInfo", "torch.Size", "torch.serialization._get_layout",
    "pathlib.PosixPath", "pathlib._local.PosixPath",
)  # fmt: skip
METADATA_NAMES = DTYPE_NAMES.union((f"{_META}.{name}" for name in _CLASSES), _OTHERS)
"""Every name a DCP metadata file may refer to. None of them is looked up."""

MAX_METADATA_BYTES = 4 << 30
_RANK_METADATA = re.compile(r"__([0-9]{1,7})\.metadata")


class Item(msgspec.Struct, frozen=True):
    """Where one `torch.save` record lies."""

    file: str
    offset: int
    length: int


class SavedChunk(msgspec.Struct, frozen=True):
    """A box of a tensor and the record that holds it."""

    offsets: tuple[int, ...]
    sizes: tuple[int, ...]
    item: Item


class SavedMeta(msgspec.Struct, frozen=True):
    """A tensor of a DCP checkpoint: element type (a code of ours), global shape, chunks that cover it exactly once."""

    dtype: str
    shape: tuple[int, ...]
    chunks: tuple[SavedChunk, ...]

    @property
    def size_bytes(self) -> int:
        """Bytes of the whole tensor."""
        return math.prod(self.shape) * ITEM_BYTES[self.dtype]


class DcpCheckpoint(msgspec.Struct, frozen=True, kw_only=True):
    """What the metadata of a DCP folder says. `paths`: flat key to the keys that lead to it in the saved state."""

    folder: Path
    tensors: dict[str, SavedMeta]
    values: dict[str, Item]
    paths: dict[str, Keys]


def read_dcp(folder: Path) -> DcpCheckpoint:
    """Read the metadata of the DCP folder `folder`.

    Raises ConfigError when there is none, VerificationError when it refers to names that are not allowed, or its
    chunks do not cover a tensor exactly once, StorageError.
    """
    try:
        names = sorted(os.listdir(folder))
    except OSError as error:
        raise storage_error("list", folder, error) from error
    if ".metadata" in names:
        parts = [_read_metadata(folder, ".metadata")]
    else:
        ranks = sorted((int(match[1]), match[0]) for name in names if (match := _RANK_METADATA.fullmatch(name)))
        if not ranks:
            raise ConfigError(
                f"{folder}: has no .metadata, so it is no DCP checkpoint, or its save was not finished; "
                "give the folder that was the checkpoint_id"
            )
        parts = [_read_metadata(folder, name) for _, name in ranks]
    tensors: dict[str, SavedMeta] = {}
    values: dict[str, Item] = {}
    paths: dict[str, Keys] = {}
    for part in parts:
        _merge(folder, part, tensors, values, paths)
    for key, meta in tensors.items():
        problem = tiling_problem(meta.shape, [Box(chunk.offsets, chunk.sizes) for chunk in meta.chunks])
        if problem is None and meta.size_bytes > most_bytes(sum(chunk.item.length for chunk in meta.chunks)):
            problem = f"it claims {meta.size_bytes} bytes, far more than its records hold"
        if problem is not None:
            raise VerificationError(f"{folder.name}: tensor {key!r}: {problem}")
    return DcpCheckpoint(folder=folder, tensors=tensors, values=values, paths=paths)


def _merge(
    folder: Path, part: DcpCheckpoint, tensors: dict[str, SavedMeta], values: dict[str, Item], paths: dict[str, Keys]
) -> None:
    """Add what one rank's metadata says. Of replicas the lowest rank's is taken; values of several ranks are refused."""
    for key, item in part.values.items():
        if key in values or key in tensors:
            raise ConfigError(
                f"{folder.name}: value {key!r} was saved by several ranks (without collectives), and which of them counts "
                "is not recorded; save it again with use_collectives=True"
            )
        values[key] = item
    for key, meta in part.tensors.items():
        held = tensors.get(key)
        if key in values or (held is not None and (held.dtype, held.shape) != (meta.dtype, meta.shape)):
            raise VerificationError(f"{folder.name}: {key!r} is not the same tensor for all ranks")
        known = {(chunk.offsets, chunk.sizes) for chunk in held.chunks} if held is not None else set()
        more = tuple(chunk for chunk in meta.chunks if (chunk.offsets, chunk.sizes) not in known)
        tensors[key] = SavedMeta(meta.dtype, meta.shape, (held.chunks if held is not None else ()) + more)
    for key, path in part.paths.items():
        if paths.setdefault(key, path) != path:
            raise VerificationError(f"{folder.name}: {key!r} has two places in the state")


# ---- metadata


def _read_metadata(folder: Path, name: str) -> DcpCheckpoint:
    with open_regular(folder, name) as fd:
        size = os.fstat(fd).st_size
        if size > MAX_METADATA_BYTES:
            raise VerificationError(f"{name}: {size} bytes are over the limit of {MAX_METADATA_BYTES}")
        data = os.pread(fd, size, 0) if size < 1 << 30 else _read_large(fd, size)
    tree, _ = parse_pickle(memoryview(data), METADATA_NAMES, name)
    try:
        return _metadata(folder, tree, name)
    except (TypeError, ValueError, KeyError, AttributeError, IndexError) as error:
        raise VerificationError(f"{name}: not what DCP writes: {error!r}") from None


def _read_large(fd: int, size: int) -> memoryview:
    data = memoryview(bytearray(size))
    at = 0
    while at < size and (count := os.preadv(fd, [data[at:]], at)):
        at += count
    return data[:at]


def _state(node: Any, kind: str) -> Any:
    """State of a record of `kind`. Raises ValueError for anything else."""
    if type(node) is not Record or node.kind not in (f"{_META}.{kind}", f"{_DCP}.filesystem.{kind}"):
        raise ValueError(f"no {kind} where one should be")
    return node.state


def _metadata(folder: Path, tree: Any, name: str) -> DcpCheckpoint:
    state = _state(tree, "Metadata")
    places: dict[tuple[str, tuple[int, ...] | None], Item] = {}
    for index, info in state["storage_data"].items():
        places[_place(index)] = _item(info, name)
    tensors: dict[str, SavedMeta] = {}
    values: dict[str, Item] = {}
    for key, node in state["state_dict_metadata"].items():
        if type(key) is not str:
            raise ValueError(f"key {key!r}")
        if type(node) is Record and node.kind == f"{_META}.BytesStorageMetadata":
            values[key] = places[(key, None)]
        else:
            tensors[key] = _tensor(key, node, places, name)
    planner = state.get("planner_data") or {}
    paths = {key: _path(path) for key, path in planner.items() if key in tensors or key in values}
    return DcpCheckpoint(folder=folder, tensors=tensors, values=values, paths=paths)


def _path(node: Any) -> Keys:
    if type(node) is not tuple or not node or any(type(part) not in (str, int) for part in node):
        raise ValueError(f"{node!r} where keys of the state should be (was it saved with a planner of its own?)")
    if any(type(part) is int and not 0 <= part < 1 << 20 for part in node):
        raise ValueError(f"{node!r} is no place in a list")
    return node


def _size(node: Any) -> tuple[int, ...]:
    if type(node) is not Record or node.kind != "torch.Size":
        raise ValueError("no torch.Size where one should be")
    values = node.args[0]
    if len(values) > 64 or any(type(value) is not int or not 0 <= value < 1 << 62 for value in values):
        raise ValueError(f"{values!r} as a size")
    return tuple(values)


def _place(node: Any) -> tuple[str, tuple[int, ...] | None]:
    state = _state(node, "MetadataIndex")
    offset = state.get("offset")
    return str(state["fqn"]), None if offset is None else _size(offset)


def _item(node: Any, name: str) -> Item:
    state = _state(node, "_StorageInfo")
    file, offset, length = state["relative_path"], state["offset"], state["length"]
    if state.get("transform_descriptors"):
        raise ConfigError(
            f"{name}: items went through {list(state['transform_descriptors'])!r} when they were saved, which is not "
            "undone here; load it with torch and save it without extensions"
        )
    if type(file) is not str or not is_plain_file_name(file) or type(offset) is not int or type(length) is not int:
        raise ValueError(f"{file!r} as a place")
    if offset < 0 or length <= 0:
        raise ValueError(f"{length} bytes at {offset} of {file}")
    return Item(file, offset, length)


def _tensor(key: str, node: Any, places: dict[tuple[str, tuple[int, ...] | None], Item], name: str) -> SavedMeta:
    state = _state(node, "TensorStorageMetadata")
    properties = _state(state["properties"], "TensorProperties")
    dtype = properties[0]
    if type(dtype) is not Global or dtype.name not in DTYPE_NAMES:
        raise ValueError(f"element type of {key!r}")
    chunks = []
    for chunk in state["chunks"]:
        box = _state(chunk, "ChunkStorageMetadata")
        offsets, sizes = _size(box["offsets"]), _size(box["sizes"])
        item = places.get((key, offsets)) or places.get((key, None))
        if item is None:
            raise VerificationError(f"{name}: tensor {key!r}: no file holds the chunk at {list(offsets)}")
        chunks.append(SavedChunk(offsets, sizes, item))
    return SavedMeta(DTYPES[dtype.name.removeprefix("torch.")], _size(state["size"]), tuple(chunks))


# ---- items


@contextlib.contextmanager
def open_regular(folder: Path, name: str) -> Iterator[int]:
    """A descriptor of the regular file `name` in `folder`; never follows a link. Raises VerificationError, StorageError."""
    try:
        fd = os.open(folder / name, os.O_RDONLY | os.O_NOFOLLOW | os.O_CLOEXEC | os.O_NONBLOCK)
    except FileNotFoundError:
        raise VerificationError(f"{name}: is missing") from None
    except OSError as error:
        if error.errno in (errno.ELOOP, errno.ENXIO):
            raise VerificationError(f"{name}: is not a regular file") from None
        raise storage_error("open", folder / name, error) from error
    try:
        if not stat.S_ISREG(os.fstat(fd).st_mode):
            raise VerificationError(f"{name}: is not a regular file")
        yield fd
    finally:
        os.close(fd)


def read_item(folder: Path, key: str, item: Item) -> Any:
    """The value of a record; `key` names it in messages. Raises as `saved.read_record` does."""
    what = f"{item.file}: item {key!r}"
    with open_regular(folder, item.file) as fd:
        size = os.fstat(fd).st_size
        if item.offset + item.length > size:
            raise VerificationError(f"{what}: lies at [{item.offset}, {item.offset + item.length}) of {size} bytes")
        return read_record(fd, item.offset, item.length, what)


def _anonymous(size: int) -> memoryview:
    return memoryview(mmap.mmap(-1, size)) if size else memoryview(b"")


def read_tensor(folder: Path, name: str, file: str, tensor: SavedTensor, *, check_crc: bool = True) -> memoryview:
    """Bytes of one saved tensor in row-major order. Raises VerificationError or StorageError."""
    buffer = _anonymous(tensor.storage.size_bytes)
    with open_regular(folder, file) as fd:
        load_storage(fd, tensor.storage, buffer, f"{file}: item {name!r}", check_crc=check_crc)
    return row_major(tensor, buffer)


def read_chunk(folder: Path, key: str, meta: SavedMeta, chunk: SavedChunk, *, check_crc: bool = True) -> memoryview:
    """Bytes of `chunk` in row-major order, after its type and shape were compared. Raises as `read_item` does."""
    value = read_item(folder, key, chunk.item)
    if type(value) is not SavedTensor or (value.dtype, value.shape) != (meta.dtype, chunk.sizes):
        seen = f"{value.dtype}{list(value.shape)}" if type(value) is SavedTensor else type(value).__name__
        raise VerificationError(
            f"{chunk.item.file}: item {key!r} is {seen}, the metadata says {meta.dtype}{list(chunk.sizes)}"
        )
    return read_tensor(folder, key, chunk.item.file, value, check_crc=check_crc)


def tensor_bytes(folder: Path, key: str, meta: SavedMeta, *, check_crc: bool = True) -> Iterator[memoryview]:
    """Bytes of a whole tensor in row-major order, in parts that are each read when they are asked for.

    One chunk is in memory at a time when chunks follow one another (split along dimension 0), else the whole tensor.
    """
    item = ITEM_BYTES[meta.dtype]
    boxes = []
    for chunk in meta.chunks:
        first = list(_first_two(meta, chunk))
        boxes.append((first[0].outer if first else 0, len(first), chunk))
    if all(count <= 1 for _, count, _ in boxes):
        for _, count, chunk in sorted(boxes, key=lambda box: box[0]):
            if count:
                yield read_chunk(folder, key, meta, chunk, check_crc=check_crc)
        return
    whole = _anonymous(meta.size_bytes)
    for _, _, chunk in boxes:
        data = read_chunk(folder, key, meta, chunk, check_crc=check_crc)
        for run in runs(meta.shape, chunk.offsets, chunk.sizes):
            begin, end = run.inner * item, (run.inner + run.length) * item
            whole[run.outer * item : (run.outer + run.length) * item] = data[begin:end]
    yield whole


def _first_two(meta: SavedMeta, chunk: SavedChunk) -> Iterator[Any]:
    for number, run in enumerate(runs(meta.shape, chunk.offsets, chunk.sizes)):
        yield run
        if number == 1:
            return
