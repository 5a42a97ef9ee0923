"""From a checkpoint of torch.distributed.checkpoint to one of ours: verified as far as that format allows, then signed.

DCP writes a nested state as flat keys and records for each the keys that lead to it. What it does not record is whether a key
of a dict was a number or its text. The state of an optimizer tells (its groups list the numbers); elsewhere it has to be said.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, Literal, NamedTuple

import msgspec

from keepstep.checkpoint.format.index import (
    BLOB_NAME,
    FileLayout,
    Index,
    RankValues,
    check_state_name,
    file_layout,
)
from keepstep.checkpoint.format.layout import INDEX_NAME, FolderName, rank_file_name
from keepstep.checkpoint.format.plan import TensorMeta
from keepstep.checkpoint.format.shard import build_header, file_order
from keepstep.checkpoint.format.values import TAG, encode, join
from keepstep.checkpoint.save.commit import commit, make_folder, writer_facts
from keepstep.checkpoint.storage.stream import stream_file
from keepstep.checkpoint.storage.writer import write_file
from keepstep.checkpoint.torch.dcpread import (
    DcpCheckpoint,
    Keys,
    SavedMeta,
    read_dcp,
    read_item,
    read_tensor,
    tensor_bytes,
)
from keepstep.checkpoint.torch.saved import SavedArray, SavedScalar, SavedSize, SavedTensor
from keepstep.checkpoint.trust.manifest import Manifest
from keepstep.records.errors import ConfigError

RNG_ABSENT = "absent"
"""Key that stands in place of a rank's random state when there never was one; its value says why."""

DigitKeys = Literal["int", "str"]


class ImportOptions(msgspec.Struct, frozen=True, kw_only=True):
    """`wrap`: put the whole state under this name. `digit_keys`: what keys like "7" were. `check_crc`: compare CRC-32."""

    world: int = 1
    wrap: str | None = None
    digit_keys: DigitKeys | None = None
    check_crc: bool = True


class Imported(msgspec.Struct, frozen=True, kw_only=True):
    """A committed import: its folder, manifest, number of tensors, bytes of tensors, notes about what was decided."""

    path: Path
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
    sources: dict[str, Callable[[], Iterator[bytes | memoryview]]]


def import_dcp(source: Path, root: Path, name: FolderName, key: Any, options: ImportOptions) -> Imported:
    """Write the DCP checkpoint in folder `source` as checkpoint `name` under `root`, signed with `key` (None: unsigned).

    At most one saved chunk (or one tensor whose chunks are interleaved) is in memory at a time. Raises ConfigError for
    what cannot be kept, VerificationError for damage and for names that are not allowed, StorageError; then nothing is
    committed.
    """
    saved = read_dcp(source)
    state, notes = describe(saved, options)
    folder = make_folder(root, name)
    files = [_write_rank(folder, state, rank, options.world, source.name) for rank in range(options.world)]
    index = Index(world=options.world, tensors=state.tensors, aliases={}, values=state.values)
    files.append(write_file(folder / INDEX_NAME, [msgspec.json.encode(index)]))
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
    manifest = commit(folder, files, facts, key)
    size = sum(meta.size_bytes for meta in state.tensors.values())
    return Imported(path=folder, manifest=manifest, tensors=len(state.tensors), size_bytes=size, notes=tuple(notes))


def _write_rank(folder: Path, state: State, rank: int, world: int, source: str) -> Any:
    why = f"imported from {source}, which holds no random state of ranks"
    blob = msgspec.json.encode(RankValues(tensors={}, values={"rng": {RNG_ABSENT: why}}))
    layout = file_layout(state.tensors, {}, len(blob), rank, world)
    header = build_header(layout.entries, {"format": "pt"})
    size = len(header) + sum(entry.size_bytes for entry in layout.entries.values())
    return stream_file(folder / rank_file_name(rank, world), _parts(header, layout, blob, state), size)


def _parts(header: bytes, layout: FileLayout, blob: bytes, state: State) -> Iterator[bytes | memoryview]:
    yield header
    for name in file_order(layout.entries):
        if name == BLOB_NAME:
            yield blob
            continue
        piece, at = layout.pieces[name], 0
        for part in state.sources[name]():
            begin, end = max(piece.begin - at, 0), min(piece.end - at, len(part))
            if begin < end:
                yield part[begin:end]
            at += len(part)
            if at >= piece.end:
                break


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
    sources: dict[str, Callable[[], Iterator[bytes | memoryview]]] = {}

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
) -> tuple[TensorMeta, Callable[[], Iterator[bytes | memoryview]]]:
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


class _Branch(dict[Any, Any]):
    """A dict or list of the nested state that is being put together; its keys are those of DCP's paths."""


def nest(
    leaves: dict[str, Any], paths: dict[str, Keys], digit_keys: DigitKeys | None, notes: list[str]
) -> dict[str, Any]:
    """The nested state whose items are `leaves`, placed by `paths` (a key without one lies at the top).

    What had to be decided is added to `notes`. Raises ConfigError when two items claim one place, a list has holes, or
    keys look like numbers and neither the state nor `digit_keys` says whether they were.
    """
    root = _Branch()
    for key, value in leaves.items():
        path = paths.get(key, (key,))
        at: Any = root
        for part in path[:-1]:
            at = at.setdefault(part, _Branch()) if type(at) is _Branch else None
        if type(at) is not _Branch or path[-1] in at:
            raise ConfigError(f"{key!r}: its place {path!r} in the state is taken by another item")
        at[path[-1]] = value
    unclear: list[str] = []
    nested = _grown(root, "", {}, unclear, digit_keys, notes)
    if unclear:
        raise ConfigError(
            f"keys under {', '.join(sorted(unclear)[:5])} look like numbers, and DCP does not record whether they were; "
            "say --digit-keys int or --digit-keys str"
        )
    if type(nested) is not dict:
        raise ConfigError("the saved state is no dict with names")
    return nested


def _grown(
    branch: Any, path: str, known: dict[str, Any], unclear: list[str], digit_keys: DigitKeys | None, notes: list[str]
) -> Any:
    """The list or dict that `branch`, at `path`, stands for. `known`: what texts of its keys were."""
    if type(branch) is not _Branch:
        return branch
    if all(type(key) is int for key in branch):
        if sorted(branch) != list(range(len(branch))):
            raise ConfigError(f"list {path!r} has holes: DCP keeps no empty dict, so items of it are lost")
        return [_grown(branch[at], join(path, at), {}, unclear, digit_keys, notes) for at in range(len(branch))]
    result: dict[Any, Any] = {}
    numbers: dict[str, Any] = {}
    if "param_groups" in branch:
        groups = _grown(branch["param_groups"], join(path, "param_groups"), {}, unclear, digit_keys, notes)
        numbers = _parameters(groups)
        if numbers and "state" not in branch:
            branch = _Branch({"state": _Branch({}), **branch})
            notes.append(f"{path or 'the state'}: an optimizer without state (DCP keeps no empty dict)")
    if any(_is_number(key) and key not in known for key in branch) and digit_keys is None:
        unclear.append(path or "the top")
    for key, value in branch.items():
        name = known.get(key, int(key) if digit_keys == "int" and _is_number(key) else key)
        inner = numbers if key == "state" else {}
        place = join(path, key) if path else str(key)
        # An optimizer's state may be empty, which no other branch can be: nothing leads to an empty one.
        result[name] = {} if value == {} else _grown(value, place, inner, unclear, digit_keys, notes)
    return result


def _parameters(groups: Any) -> dict[str, Any]:
    """Keys of an optimizer's state by their text, from the groups that list them; empty when these are no such groups."""
    if type(groups) is not list or not all(
        type(group) is dict and type(group.get("params")) is list for group in groups
    ):
        return {}
    return {str(key): key for group in groups for key in group["params"] if type(key) in (int, str)}


def _is_number(key: Any) -> bool:
    """True for a text that an int key would have become."""
    return type(key) is str and key.lstrip("-").isdecimal() and str(int(key)) == key
