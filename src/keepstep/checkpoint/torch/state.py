"""Tensors out of a state: what there is to save, how it lies over the ranks, and the copy into an image."""

from __future__ import annotations

import contextlib
import ctypes
import sys
from collections.abc import Mapping
from typing import Any

import msgspec
import torch

from keepstep.checkpoint.format.boxes import REPLICATE, Mesh
from keepstep.checkpoint.format.image import ImageLayout, TensorTable
from keepstep.checkpoint.format.index import RANK_PREFIX, RankValues
from keepstep.checkpoint.format.plan import Piece, TensorMeta
from keepstep.checkpoint.format.values import TAG, encode, join
from keepstep.checkpoint.torch import sharded
from keepstep.checkpoint.torch.codes import numpy_code, tensor_code
from keepstep.checkpoint.torch.rng import rng_state
from keepstep.records.errors import ConfigError

_PLAIN = (REPLICATE,)


class Captured(msgspec.Struct, kw_only=True):
    """A state taken apart: descriptions and JSON forms, and references to the live tensors until they are staged."""

    tensors: dict[str, TensorMeta]
    aliases: dict[str, str]
    values: dict[str, Any]
    own: RankValues
    meshes: tuple[Mesh, ...]
    device_meshes: tuple[Any, ...]
    sources: dict[str, Any]


class Meshes:
    """The device meshes met in a state, each once."""

    def __init__(self, world_size: int) -> None:
        self._world_size = world_size
        self._places: dict[int, int] = {}
        self.found: list[Mesh] = []
        self.live: list[Any] = []

    def place(self, device_mesh: Any) -> int:
        """Number of `device_mesh`; equal ones share it."""
        known = self._places.get(id(device_mesh))
        if known is None:
            mesh = sharded.mesh_of(device_mesh, self._world_size)
            if mesh not in self.found:
                self.found.append(mesh)
                self.live.append(device_mesh)
            known = self._places[id(device_mesh)] = self.found.index(mesh)
        return known


class _Collector:
    """Leaf rule for `encode`: notes each tensor under its path and writes a reference in its place.

    `known` are the tensors of the save before: where nothing changed their description is taken over, which is most of the time.
    """

    def __init__(
        self,
        prefix: str,
        sources: dict[str, Any],
        *,
        find_aliases: bool,
        owned: frozenset[str] = frozenset(),
        meshes: Meshes | None = None,
        rank: int = 0,
        known: Mapping[str, TensorMeta] | None = None,
    ) -> None:
        self._prefix = prefix
        self._find_aliases = find_aliases
        self._owned = owned
        self._meshes = meshes
        self._rank = rank
        self._known = known or {}
        self._seen: dict[tuple[Any, ...], str] = {}
        self.tensors: dict[str, TensorMeta] = {}
        self.aliases: dict[str, str] = {}
        self.sources = sources

    def __call__(self, value: Any, path: str) -> dict[str, Any] | None:
        name = f"{self._prefix}{path}"
        if isinstance(value, torch.Tensor):
            return self._tensor(value, path, name)
        numpy = sys.modules.get("numpy")
        if numpy is not None and type(value) is numpy.ndarray:
            self._note(name, path, numpy_code(value, path), tuple(value.shape), value)
            return {TAG: "array", "v": name}
        if numpy is not None and isinstance(value, numpy.generic):
            return {TAG: "scalar", "dtype": numpy_code(value, path), "v": value.tobytes().hex()}
        if isinstance(value, torch.Size):
            return {TAG: "size", "v": list(value)}
        return None

    def _tensor(self, value: torch.Tensor, path: str, name: str) -> dict[str, Any]:
        dtensor = sharded.is_dtensor(value)
        plain = type(value) in (torch.Tensor, torch.nn.Parameter) or isinstance(value, torch.nn.Buffer)
        if not dtensor and not plain:
            raise ConfigError(f"state {path!r}: tensor subclass {type(value).__qualname__} cannot be saved")
        local = sharded.local_of(value) if dtensor else value
        code = tensor_code(local, path)
        if self._find_aliases and local.numel() and self._is_alias(value, local, code, name):
            return {TAG: "tensor", "v": name}
        if dtensor:
            self._note_sharded(name, path, code, value)
        else:
            self._note(name, path, code, tuple(value.shape), value.detach())
        return {TAG: "tensor", "v": name}

    def _is_alias(self, value: torch.Tensor, local: torch.Tensor, code: str, name: str) -> bool:
        """Whether the same memory was met under another name; notes it."""
        place = (
            local.untyped_storage().data_ptr(),
            local.storage_offset(),
            value.shape,
            local.stride(),
            code,
            local.device,
            local.is_conj(),
            local.is_neg(),
        )
        first = self._seen.setdefault(place, name)
        if first != name:
            self.aliases[name] = first
        return first != name

    def _note(self, name: str, path: str, code: str, shape: tuple[int, ...], source: Any) -> None:
        owner = 0 if path in self._owned else None
        known = self._known.get(name)
        if known is None or (known.dtype, known.shape, known.owner, known.mesh) != (code, shape, owner, None):
            known = TensorMeta(dtype=code, shape=shape, owner=owner)
        self.tensors[name] = known
        self.sources[name] = source

    def _note_sharded(self, name: str, path: str, code: str, value: Any) -> None:
        if self._meshes is None:
            raise ConfigError(f"state {path!r}: a sharded tensor belongs to all ranks; take it out of per_rank")
        place = self._meshes.place(value.device_mesh)
        texts, shape = sharded.placement_texts(value, path), tuple(value.shape)
        known = self._known.get(name)
        if known is None or (known.dtype, known.shape, known.mesh, known.placements) != (code, shape, place, texts):
            sharded.check_local(value, self._meshes.found[place], texts, self._rank, path)
            known = TensorMeta(dtype=code, shape=shape, mesh=place, placements=texts)
        self.tensors[name] = known
        self.sources[name] = value


def plain_values(state: Mapping[str, Any]) -> tuple[dict[str, Any], frozenset[str]]:
    """What the entries of `state` say of themselves, and the paths of buffers of modules.

    Buffers are written by rank 0 alone: replicas may differ there (batch norm), and one of them must be whole.
    """
    plain: dict[str, Any] = {}
    owned: set[str] = set()
    for name, value in state.items():
        plain[name] = value.state_dict() if callable(getattr(value, "state_dict", None)) else value
        if callable(named_buffers := getattr(value, "named_buffers", None)):
            owned.update(join(name, key) for key, _ in named_buffers(remove_duplicate=False))
        if callable(buffer_paths := getattr(value, "buffer_paths", None)):
            owned.update(join(join(name, part), key) for part, key in buffer_paths())
    return plain, frozenset(owned)


def capture(
    state: Mapping[str, Any],
    per_rank: frozenset[str],
    *,
    rank: int,
    world_size: int,
    known: Captured | None = None,
) -> Captured:
    """Take `state` apart. Names in `per_rank`, and the random state, are this rank's own; all else is shared by all ranks.

    `known`: what was captured before. Raises ConfigError naming the path of what cannot be saved.
    """
    plain, owned = plain_values(state)
    sources: dict[str, Any] = {}
    meshes = Meshes(world_size)
    shared = _Collector(
        "",
        sources,
        find_aliases=True,
        owned=owned,
        meshes=meshes,
        rank=rank,
        known=known.tensors if known else None,
    )
    mine = _Collector(f"{RANK_PREFIX}/", sources, find_aliases=False, known=known.own.tensors if known else None)
    values = {name: encode(plain[name], name, shared) for name in plain if name not in per_rank}
    own = {name: encode(plain[name], name, mine) for name in plain if name in per_rank}
    own["rng"] = encode(rng_state(), "rng", mine)
    return Captured(
        tensors=shared.tensors,
        aliases=shared.aliases,
        values=values,
        own=RankValues(tensors=mine.tensors, values=own),
        meshes=tuple(meshes.found),
        device_meshes=tuple(meshes.live),
        sources=sources,
    )


def survey(state: Mapping[str, Any], per_rank: frozenset[str], *, rank: int, world_size: int) -> Captured:
    """The tensors the script holds now, as far as they can be described: what a restore looks at to know how they lie."""
    plain, _ = plain_values({name: value for name, value in state.items() if name not in per_rank})
    sources: dict[str, Any] = {}
    meshes = Meshes(world_size)
    found = _Collector("", sources, find_aliases=True, meshes=meshes, rank=rank)
    for name, value in plain.items():
        with contextlib.suppress(ConfigError):  # what cannot be saved is refused when it is saved
            encode(value, name, found)
    return Captured(
        tensors=found.tensors,
        aliases=found.aliases,
        values={},
        own=RankValues(tensors={}, values={}),
        meshes=tuple(meshes.found),
        device_meshes=tuple(meshes.live),
        sources=sources,
    )


class Room:
    """The memory an image is staged in, as torch and as an address."""

    def __init__(self, memory: memoryview) -> None:
        self.memory = memory
        self.bytes = torch.frombuffer(memory, dtype=torch.uint8)
        self.address = self.bytes.data_ptr()
        self.pinned = _pin(self.address, len(memory))

    def close(self) -> None:
        """Give up the pages that were pinned."""
        if self.pinned:
            torch.cuda.cudart().cudaHostUnregister(self.address)  # type: ignore[no-untyped-call]
            self.pinned = False


def _pin(address: int, size_bytes: int) -> bool:
    """Pin shared memory for copies from a device, where CUDA is in use. Pageable memory works too, only slower."""
    if not torch.cuda.is_initialized():  # type: ignore[no-untyped-call]
        return False
    return int(torch.cuda.cudart().cudaHostRegister(address, size_bytes, 0)) == 0  # type: ignore[no-untyped-call]


def stage(captured: Captured, table: TensorTable, layout: ImageLayout, blob: bytes, room: Room) -> None:
    """Copy this rank's bytes into `room`, all but the block digests. Blocks until copies from devices are done."""
    memory = room.memory
    memory[: len(layout.header)] = layout.header
    devices = set()
    for key, piece in table.pieces.items():
        source = captured.sources[piece.name]
        device = copy_piece(source, piece, room, layout.offsets[key])
        if device is not None:
            devices.add(device)
    memory[layout.blob_begin : layout.blob_begin + len(blob)] = blob
    for device in devices:
        torch.accelerator.synchronize(device)


def fill_window(
    captured: Captured, table: TensorTable, layout: ImageLayout, blob: bytes, window: Room, begin: int, end: int
) -> None:
    """Copy bytes [begin, end) of the image's body to the start of `window`: a part of what `stage` copies."""
    memory, devices = window.memory, set()
    for at, data in ((0, layout.header), (layout.blob_begin, blob)):
        low, high = max(begin, at), min(end, at + len(data))
        if low < high:
            memory[low - begin : high - begin] = data[low - at : high - at]
    for key, piece in table.pieces.items():
        at = layout.offsets[key]
        low, high = max(begin, at), min(end, at + piece.end - piece.begin)
        if low < high:
            part = Piece(piece.name, piece.key, piece.box, piece.begin + low - at, piece.begin + high - at)
            device = copy_piece(captured.sources[piece.name], part, window, low - begin)
            if device is not None:
                devices.add(device)
    for device in devices:
        torch.accelerator.synchronize(device)


def copy_piece(source: Any, piece: Piece, room: Room, at: int) -> torch.device | None:
    """Copy bytes [piece.begin, piece.end) of this rank's part of `source` to `at`; the device when the copy may still run."""
    size = piece.end - piece.begin
    if not isinstance(source, torch.Tensor):
        room.memory[at : at + size] = memoryview(source.tobytes())[piece.begin : piece.end]
        return None
    local = sharded.local_of(source) if sharded.is_dtensor(source) else source
    if local.device.type == "cpu" and local.is_contiguous() and not local.is_conj() and not local.is_neg():
        # The C library's copy bypasses the cache for large sizes, which torch's own does not: about twice as fast.
        ctypes.memmove(room.address + at, local.data_ptr() + piece.begin, size)
        return None
    flat = local.resolve_conj().resolve_neg().contiguous().reshape(-1).view(torch.uint8)
    room.bytes[at : at + size].copy_(flat[piece.begin : piece.end], non_blocking=True)
    return local.device if local.device.type != "cpu" else None
