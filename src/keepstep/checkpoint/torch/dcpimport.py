"""From a checkpoint of torch.distributed.checkpoint to one of ours: verified as far as that format allows, then signed.

DCP writes a nested state as flat keys and records for each the keys that lead to it. What it does not record is whether a key
of a dict was a number or its text. The state of an optimizer tells (its groups list the numbers); elsewhere it has to be said.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, NamedTuple

import msgspec

from keepstep.checkpoint.format.image import tensor_table
from keepstep.checkpoint.format.index import RNG_ABSENT, Index, RankValues, check_state_name
from keepstep.checkpoint.format.layout import INDEX_NAME, FolderName
from keepstep.checkpoint.format.plan import LARGE_SHARES, Piece, Plan, TensorMeta
from keepstep.checkpoint.format.values import TAG, encode
from keepstep.checkpoint.save.commit import commit, writer_facts
from keepstep.checkpoint.save.streamed import Part, put_image
from keepstep.checkpoint.storage.source import Root
from keepstep.checkpoint.torch.dcpread import (
    DcpCheckpoint,
    SavedMeta,
    read_dcp,
    read_item,
    read_tensor,
    tensor_bytes,
)
from keepstep.checkpoint.torch.nest import DigitKeys, nest
from keepstep.checkpoint.torch.saved import SavedArray, SavedScalar, SavedSize, SavedTensor
from keepstep.checkpoint.trust.manifest import Manifest
from keepstep.checkpoint.trust.signers import Signer
from keepstep.records.errors import ConfigError


class ImportOptions(msgspec.Struct, frozen=True, kw_only=True):
    """`wrap`: put the whole state under this name. `digit_keys`: what keys like "7" were. `check_crc`: compare CRC-32."""

    world: int = 1
    wrap: str | None = None
    digit_keys: DigitKeys | None = None
    check_crc: bool = True


class Imported(msgspec.Struct, frozen=True, kw_only=True):
    """A committed import: its folder, manifest, number of tensors, bytes of tensors, notes about what was decided."""

    folder: str
    manifest: Manifest
    tensors: int
    size_bytes: int
    notes: tuple[str, ...]


class _Whole(NamedTuple):
    """Stands for tensor `key` of the DCP checkpoint in the nested state."""

    key: str


class _Inner(NamedTuple):
    """Stands for a tensor or array inside a value, which lies in `file`."""

    file: str
    value: SavedTensor | SavedArray


class State(NamedTuple):
    """A state described: what the index says, and where the bytes of each tensor come from."""

    tensors: dict[str, TensorMeta]
    values: dict[str, Any]
    sources: dict[str, Callable[[], Iterator[Part]]]

    def bytes_of(self, piece: Piece) -> Iterator[Part]:
        """Bytes of a piece of a tensor."""
        at = 0
        for part in self.sources[piece.name]():
            begin, end = max(piece.begin - at, 0), min(piece.end - at, len(part))
            if begin < end:
                yield part[begin:end]
            at += len(part)
            if at >= piece.end:
                break


def import_dcp(source: Path, root: Root, name: FolderName, signer: Signer | None, options: ImportOptions) -> Imported:
    """Write the DCP checkpoint in folder `source` as checkpoint `name` under `root`, signed by `signer` (None: unsigned).

    At most one saved chunk (or one tensor whose chunks are interleaved) is in memory at a time. Raises ConfigError for
    what cannot be kept, VerificationError for damage and for names that are not allowed, StorageError; then nothing is
    committed.
    """
    saved = read_dcp(source)
    state, notes = describe(saved, options)
    why = f"imported from {source.name}, which holds no random state of ranks"
    blob = msgspec.json.encode(RankValues(tensors={}, values={"rng": {RNG_ABSENT: why}}))
    plan = Plan(state.tensors, (), options.world)
    folder = root.make_folder(name)
    files = [
        put_image(root, folder, rank, options.world, tensor_table(plan, {}, rank), blob, state.bytes_of)
        for rank in range(options.world)
    ]
    index = Index(world=options.world, tensors=state.tensors, aliases={}, values=state.values, split=LARGE_SHARES)
    files.append(root.put_file(folder, INDEX_NAME, [msgspec.json.encode(index)]))
    facts = writer_facts(
        name,
        world=options.world,
        parent=None,
        restored_step=name.step,
        restored_from=None,
        # A life that began with time: an import is never taken for a step back that abandons other checkpoints.
        scope=name.run_id,
        life_started_ns=0,
    )
    manifest = commit(root, folder, files, facts, signer)
    size = sum(meta.size_bytes for meta in state.tensors.values())
    return Imported(folder=folder, manifest=manifest, tensors=len(state.tensors), size_bytes=size, notes=tuple(notes))


# ---- the nested state


def describe(saved: DcpCheckpoint, options: ImportOptions) -> tuple[State, list[str]]:
    """The state that `saved` holds, as our index describes it, and notes about what was decided.

    Reads all values, no tensor. Raises ConfigError for what cannot be kept, VerificationError.
    """
    leaves: dict[str, Any] = {key: _Whole(key) for key in saved.tensors}
    for key, item in saved.values.items():
        leaves[key] = _with_file(read_item(saved.folder, key, item), item.file)
    notes: list[str] = []
    nested = nest(leaves, saved.paths, options.digit_keys, notes)
    if options.wrap is not None:
        nested = {options.wrap: nested}
    tensors: dict[str, TensorMeta] = {}
    sources: dict[str, Callable[[], Iterator[Part]]] = {}

    def leaf(value: Any, path: str) -> dict[str, Any] | None:
        if isinstance(value, SavedScalar):
            return {TAG: "scalar", "dtype": value.dtype, "v": value.data.hex()}
        if isinstance(value, SavedSize):
            return {TAG: "size", "v": list(value.dims)}
        if not isinstance(value, _Whole | _Inner):
            return None
        meta, source = _source(saved, value, path, options.check_crc)
        tensors[path], sources[path] = meta, source
        is_array = isinstance(value, _Inner) and isinstance(value.value, SavedArray)
        return {TAG: "array" if is_array else "tensor", "v": path}

    values = {}
    for name, value in nested.items():
        try:
            check_state_name(name)
        except ConfigError as error:
            raise ConfigError(f"{error}. --as NAME puts the whole state under one name") from None
        values[name] = encode(value, name, leaf)
    return State(tensors, values, sources), notes


def _with_file(value: Any, file: str) -> Any:
    """`value` with the file noted beside each tensor in it."""
    if isinstance(value, SavedTensor | SavedArray):
        return _Inner(file, value)
    if isinstance(value, SavedScalar | SavedSize):
        return value
    kind = type(value)
    if kind is list:
        return [_with_file(item, file) for item in value]
    if kind is tuple:
        return tuple(_with_file(item, file) for item in value)
    if isinstance(value, dict):
        for key in value:
            value[key] = _with_file(value[key], file)
    return value


def _source(
    saved: DcpCheckpoint, value: _Whole | _Inner, path: str, check_crc: bool
) -> tuple[TensorMeta, Callable[[], Iterator[Part]]]:
    if isinstance(value, _Whole):
        meta: SavedMeta = saved.tensors[value.key]
        return TensorMeta(dtype=meta.dtype, shape=meta.shape), lambda: tensor_bytes(
            saved.folder, value.key, meta, check_crc=check_crc
        )
    inner, file = value.value, value.file
    described = TensorMeta(dtype=inner.dtype, shape=inner.shape)
    if isinstance(inner, SavedArray):
        return described, lambda: iter([inner.data])
    return described, lambda: iter([read_tensor(saved.folder, path, file, inner, check_crc=check_crc)])
