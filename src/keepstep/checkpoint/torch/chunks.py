"""Items of a plan of torch's distributed checkpoint as images and an index of ours: chunks of tensors, and values."""

from __future__ import annotations

import mmap
import os
from collections.abc import Callable, Sequence
from typing import Any

import msgspec
import torch
from torch.distributed.checkpoint.metadata import MetadataIndex
from torch.distributed.checkpoint.planner import SavePlan, SavePlanner, WriteItemType

from keepstep.checkpoint.format.blocks import fingerprint_blocks
from keepstep.checkpoint.format.dtypes import ITEM_BYTES
from keepstep.checkpoint.format.image import image_layout, tensor_table
from keepstep.checkpoint.format.index import RANK_PREFIX, RNG_ABSENT, Index, RankValues
from keepstep.checkpoint.format.layout import INDEX_NAME, FolderName, rank_file_name
from keepstep.checkpoint.format.plan import LARGE_SHARES, Chunk, Plan, TensorMeta
from keepstep.checkpoint.format.values import TAG, encode
from keepstep.checkpoint.restore.vote import Life
from keepstep.checkpoint.save.commit import commit, writer_facts
from keepstep.checkpoint.save.writerclient import ImageWriter
from keepstep.checkpoint.storage.posix import PosixRoot
from keepstep.checkpoint.storage.source import Root
from keepstep.checkpoint.storage.targets import PosixFile
from keepstep.checkpoint.storage.writer import FileFact
from keepstep.checkpoint.torch.codes import DTYPES, numpy_code, tensor_code
from keepstep.checkpoint.torch.nest import Keys, name_of, nest
from keepstep.checkpoint.torch.state import Room, copy_piece
from keepstep.checkpoint.trust.manifest import Manifest
from keepstep.checkpoint.trust.signers import Signer
from keepstep.records.errors import ConfigError, StorageError

_ROUND_BYTES = 2 << 20
_ABSENT = "saved by torch.distributed.checkpoint, which keeps no random state of ranks"


class TensorPart(msgspec.Struct, frozen=True):
    """A box of a tensor that this rank writes, and its live tensor."""

    name: str
    dtype: str
    shape: tuple[int, ...]
    offsets: tuple[int, ...]
    sizes: tuple[int, ...]
    source: Any

    def told(self) -> dict[str, Any]:
        """What the coordinator has to know of it."""
        return {
            "name": self.name,
            "dtype": self.dtype,
            "shape": self.shape,
            "offsets": self.offsets,
            "sizes": self.sizes,
        }


class Item(msgspec.Struct, frozen=True, kw_only=True):
    """One item of the plan. `form`: JSON form of a value (None for a tensor); `parts`: its tensors."""

    index: MetadataIndex
    path: Keys
    form: Any
    parts: tuple[TensorPart, ...]

    @property
    def size_bytes(self) -> int:
        """Bytes of its tensors."""
        return sum(torch.Size(part.sizes).numel() * ITEM_BYTES[part.dtype] for part in self.parts)

    def told(self) -> dict[str, Any]:
        """What the coordinator has to know of it; plain values only."""
        return {"path": self.path, "form": self.form, "parts": [part.told() for part in self.parts]}


def describe_items(plan: SavePlan, planner: SavePlanner) -> list[Item]:
    """The items this rank is to write. Raises ConfigError naming what cannot be saved."""
    if not callable(getattr(planner, "lookup_object", None)):
        raise ConfigError(
            f"{type(planner).__qualname__} has no lookup_object(index), by which values are fetched without pickling them; "
            "derive the planner from DefaultSavePlanner"
        )
    paths: dict[str, Keys] = plan.planner_data if isinstance(plan.planner_data, dict) else {}
    items = []
    for item in plan.items:
        path = paths.get(item.index.fqn, (item.index.fqn,))
        name = name_of(path)
        if name.startswith(f"{RANK_PREFIX}/"):
            raise ConfigError(f"state {item.index.fqn!r}: the name {RANK_PREFIX!r} is taken; choose another at the top")
        if item.type == WriteItemType.BYTE_IO:
            parts: list[TensorPart] = []
            value = planner.lookup_object(item.index)  # type: ignore[attr-defined]
            form = encode(value, name, lambda inner, at, parts=parts: _leaf(inner, at, parts))  # type: ignore[misc]
            items.append(Item(index=item.index, path=path, form=form, parts=tuple(parts)))
        else:
            items.append(Item(index=item.index, path=path, form=None, parts=(_part(item, name, planner),)))
    return items


def _part(item: Any, name: str, planner: SavePlanner) -> TensorPart:
    tensor, data = planner.resolve_data(item), item.tensor_data
    if not isinstance(tensor, torch.Tensor) or tuple(tensor.shape) != tuple(data.chunk.sizes):
        raise ConfigError(
            f"state {item.index.fqn!r}: the planner gave {type(tensor).__name__} for a chunk of {data.chunk.sizes}"
        )
    code = tensor_code(tensor, item.index.fqn)
    if DTYPES[code] != data.properties.dtype:
        raise ConfigError(
            f"state {item.index.fqn!r}: the planner gave {tensor.dtype}, its plan says {data.properties.dtype}"
        )
    return TensorPart(name, code, tuple(data.size), tuple(data.chunk.offsets), tuple(data.chunk.sizes), tensor.detach())


def _leaf(value: Any, path: str, parts: list[TensorPart]) -> dict[str, Any] | None:
    """Leaf rule for values in which tensors lie, as `encode` asks for."""
    if isinstance(value, torch.Size):
        return {TAG: "size", "v": list(value)}
    kind = type(value)
    if kind.__module__ == "numpy" and kind.__name__ != "ndarray" and hasattr(value, "dtype"):
        return {TAG: "scalar", "dtype": numpy_code(value, path), "v": value.tobytes().hex()}
    if isinstance(value, torch.Tensor):
        tag, code, source = "tensor", tensor_code(value, path), value.detach()
    elif kind.__module__ == "numpy" and kind.__name__ == "ndarray":
        tag, code, source = "array", numpy_code(value, path), value
    else:
        return None
    shape = tuple(value.shape)
    parts.append(TensorPart(path, code, shape, (0,) * len(shape), shape, source))
    return {TAG: tag, "v": path}


def metas_of(parts: Sequence[tuple[int, TensorPart | dict[str, Any]]]) -> dict[str, TensorMeta]:
    """Tensors of the index out of boxes and the rank that holds each."""
    found: dict[str, list[tuple[int, dict[str, Any]]]] = {}
    for rank, part in parts:
        told = part if isinstance(part, dict) else part.told()
        found.setdefault(told["name"], []).append((rank, told))
    metas = {}
    for name, boxes in found.items():
        first = boxes[0][1]
        shape = tuple(first["shape"])
        if any((told["dtype"], tuple(told["shape"])) != (first["dtype"], shape) for _, told in boxes):
            raise ConfigError(f"state {name!r} has another type or shape on another rank")
        if len(boxes) == 1 and tuple(first["sizes"]) == shape:
            metas[name] = TensorMeta(dtype=first["dtype"], shape=shape, owner=boxes[0][0])
            continue
        chunks = [Chunk(rank, tuple(told["offsets"]), tuple(told["sizes"])) for rank, told in boxes]
        chunks.sort(key=lambda chunk: (chunk.offsets, chunk.sizes))
        metas[name] = TensorMeta(dtype=first["dtype"], shape=shape, chunks=tuple(chunks))
    return metas


# ---- one rank's image


class Image:
    """Shared memory in which images are staged; used again, and made larger when it has to be."""

    def __init__(self) -> None:
        self.fd = -1
        self.room: Room | None = None

    def reserve(self, size_bytes: int) -> Room:
        """At least `size_bytes` of it. Raises StorageError."""
        if self.room is None or len(self.room.memory) < size_bytes:
            self.close()
            wanted = -(-(size_bytes + size_bytes // 8 + 1) // _ROUND_BYTES) * _ROUND_BYTES
            try:
                self.fd = os.memfd_create("keepstep-dcp", os.MFD_CLOEXEC)
                os.ftruncate(self.fd, wanted)
                self.room = Room(memoryview(mmap.mmap(self.fd, wanted)))
            except (OSError, ValueError) as error:
                raise StorageError(f"cannot stage an image of {size_bytes} bytes: {error}") from error
        return self.room

    def close(self) -> None:
        """Let go of the memory. Safe to call twice."""
        if self.room is not None:
            self.room.close()
            self.room = None
        if self.fd >= 0:
            os.close(self.fd)
            self.fd = -1

    def __del__(self) -> None:
        self.close()


def put_rank_image(
    root: Root,
    folder: str,
    rank: int,
    world_size: int,
    items: Sequence[Item],
    image: Image,
    writer: ImageWriter,
    timeout_s: float,
) -> FileFact:
    """Stage the tensors of `items` as this rank's image and write it; durable on return. Raises StorageError."""
    parts = [part for item in items for part in item.parts]
    metas = metas_of([(rank, part) for part in parts])
    sources = {(part.name, part.offsets, part.sizes): part.source for part in parts}
    if len(sources) != len(parts):
        raise ConfigError("the plan asks for the same chunk twice")
    table = tensor_table(Plan(metas, (), world_size), {}, rank)
    blob = msgspec.json.encode(RankValues(tensors={}, values={"rng": {RNG_ABSENT: _ABSENT}}))
    layout = image_layout(table, len(blob))
    room = image.reserve(layout.file_bytes)
    room.memory[: len(layout.header)] = layout.header
    devices = set()
    for key, piece in table.pieces.items():
        source = sources[piece.name, piece.box.offsets, piece.box.sizes]
        devices.add(copy_piece(source, piece, room, layout.offsets[key]))
    room.memory[layout.blob_begin : layout.blob_begin + len(blob)] = blob
    for device in devices - {None}:
        torch.accelerator.synchronize(device)
    return _write(root, folder, rank_file_name(rank, world_size), image, layout.file_bytes, writer, timeout_s)


def _write(
    root: Root, folder: str, name: str, image: Image, size_bytes: int, writer: ImageWriter, timeout_s: float
) -> FileFact:
    if isinstance(root, PosixRoot):
        target = PosixFile(path=str(root.path.absolute() / folder / name))
        return writer.write(image.fd, size_bytes, target, timeout_s)
    assert image.room is not None
    sealed = writer.seal(image.fd, size_bytes, timeout_s)
    view = image.room.memory[:size_bytes]
    fact = root.put_file(folder, name, [view])
    if fingerprint_blocks(view)[1] != sealed.fingerprints:
        raise StorageError(f"{name}: the staging buffer changed while it was written")
    return msgspec.structs.replace(fact, blocks=sealed.blocks)


# ---- the coordinator


def index_of(told: Sequence[Sequence[dict[str, Any]]]) -> tuple[Index, list[FileFact]]:
    """The index, and the files, out of what each rank told. Raises ConfigError, StorageError when a rank told no file."""
    leaves: dict[str, Any] = {}
    paths: dict[str, Keys] = {}
    parts: list[tuple[int, TensorPart | dict[str, Any]]] = []
    files = []
    for rank, of_rank in enumerate(told):
        for item in of_rank:
            if "fact" in item:
                files.append(msgspec.convert(item["fact"], FileFact))
                continue
            path = tuple(item["path"])
            name = name_of(path)
            parts += [(rank, part) for part in item["parts"]]
            leaves[name] = {TAG: "tensor", "v": name} if item["form"] is None and item["parts"] else item["form"]
            paths[name] = path
    if len(files) != len(told):
        raise StorageError(f"{len(files)} of {len(told)} ranks told which file they wrote")
    known = {name: form if form is None or _is_plain_list(form) else _Form(form) for name, form in leaves.items()}
    nested = nest(known, paths, "str", [])
    values = {name: encode(value, name, _formed) for name, value in nested.items()}
    return Index(world=len(told), tensors=metas_of(parts), aliases={}, values=values, split=LARGE_SHARES), files


class _Form:
    """A value that is in JSON form already."""

    def __init__(self, form: Any) -> None:
        self.form = form


def _formed(value: Any, _path: str) -> Any:
    return value.form if type(value) is _Form else None


def _is_plain_list(form: Any) -> bool:
    """True for the parameters of an optimizer's group, from which nest() learns what the keys of its state were."""
    return type(form) is list and all(type(item) in (int, str) for item in form)


def commit_all(
    root: Root,
    folder: str,
    name: FolderName,
    told: Sequence[Sequence[dict[str, Any]]],
    *,
    life: Life | None,
    parent: str | None,
    signer: Signer | None,
    may_publish: Callable[[], None],
) -> Manifest:
    """Write the index and commit. `life`: where the process went on from; None when it restored nothing here."""
    index, files = index_of(told)
    files.append(root.put_file(folder, INDEX_NAME, [msgspec.json.encode(index)]))
    facts = writer_facts(
        name,
        world=len(told),
        parent=parent,
        restored_step=name.step if life is None else life.restored_step,
        restored_from=None if life is None else life.checkpoint,
        # A script that restored nothing went back over nothing: it abandons no other checkpoint.
        scope=name.run_id if life is None else life.scope,
        life_started_ns=0 if life is None else life.started_ns,
    )
    return commit(root, folder, files, facts, signer, may_publish=may_publish)
