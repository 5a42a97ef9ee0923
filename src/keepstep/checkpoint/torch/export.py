"""From one of our checkpoints to files of others: torch's distributed checkpoint, or consolidated safetensors.

The signature is checked before and every byte is verified in the memory it is written from. One tensor is in memory at a time.
What is written goes to a folder that was not there before; when anything fails it is removed again.
"""

from __future__ import annotations

import contextlib
import dataclasses
import math
import shutil
import warnings
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import msgspec
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.checkpoint.default_planner import DefaultSavePlanner
from torch.distributed.checkpoint.filesystem import FileSystemWriter
from torch.distributed.checkpoint.metadata import Metadata, MetadataIndex
from torch.distributed.checkpoint.planner import SavePlan
from torch.distributed.checkpoint.state_dict_saver import save

from keepstep.checkpoint.format.dtypes import NATIVE_BYTES
from keepstep.checkpoint.format.index import RNG_ABSENT
from keepstep.checkpoint.format.plan import StoredTensor
from keepstep.checkpoint.format.shard import build_header, file_order
from keepstep.checkpoint.restore.contents import Contents
from keepstep.checkpoint.save.streamed import put_file
from keepstep.checkpoint.storage.writer import fsync_folder, storage_error, write_file
from keepstep.checkpoint.torch.flat import Flat, flatten, read_bytes, read_value, read_whole
from keepstep.records.codec import to_pretty_json
from keepstep.records.errors import ConfigError, StorageError

INDEX_FILE = "model.safetensors.index.json"


class Exported(msgspec.Struct, frozen=True, kw_only=True):
    """What was written: files, tensors, bytes of tensors, and notes about what is not in them."""

    files: list[str]
    tensors: int
    size_bytes: int
    notes: list[str]


def _own_note(contents: Contents) -> list[str]:
    own = contents.own_values(0).values
    names = sorted(name for name, form in own.items() if not (isinstance(form, dict) and RNG_ABSENT in form))
    return [f"state of each rank ({', '.join(names)}) has no place in this form and is left out"] if names else []


@contextlib.contextmanager
def _new_folder(out: Path) -> Iterator[None]:
    """Make folder `out`, durable at the end; gone again when the body fails. Raises ConfigError when it is there."""
    try:
        out.parent.mkdir(parents=True, exist_ok=True)
        out.mkdir()
    except FileExistsError:
        raise ConfigError(f"{out} is there already, and nothing is written over; give a folder that is not") from None
    except OSError as error:
        raise storage_error("create", out, error) from error
    try:
        yield
        fsync_folder(out)
        fsync_folder(out.parent)
    except BaseException:
        shutil.rmtree(out, ignore_errors=True)
        raise


# ---- torch's distributed checkpoint


class _ExportPlanner(DefaultSavePlanner):
    """Plans with tensors that have no memory, and reads each when it is to be written."""

    def __init__(self, contents: Contents, flat: Flat) -> None:
        super().__init__(flatten_state_dict=False)  # the state is flat already
        self._contents = contents
        self._flat = flat

    def create_global_plan(self, all_plans: list[SavePlan]) -> tuple[list[SavePlan], Metadata]:
        plans, metadata = super().create_global_plan(all_plans)
        return plans, dataclasses.replace(metadata, planner_data=self._flat.paths)

    def lookup_object(self, index: MetadataIndex) -> Any:
        name = self._flat.tensors.get(index.fqn)
        return read_value(self._contents, self._flat, index.fqn) if name is None else read_whole(self._contents, name)


def export_dcp(contents: Contents, out: Path) -> Exported:
    """Write what all ranks share as a DCP checkpoint in new folder `out`, as torch itself writes one.

    Raises ConfigError (`out` is there), VerificationError (damage; then `out` is gone again), StorageError.
    """
    flat = flatten(contents)
    with _new_folder(out), warnings.catch_warnings():
        warnings.simplefilter("ignore")  # torch says that nothing is distributed, which is meant
        writer = FileSystemWriter(out, overwrite=False)
        try:
            save(dict(flat.leaves), storage_writer=writer, planner=_ExportPlanner(contents, flat), no_dist=True)
        except CheckpointException as error:
            raise _cause(error) from error
    size = sum(contents.index.tensors[name].size_bytes for name in flat.tensors.values())
    files = sorted(path.name for path in out.iterdir())
    return Exported(files=files, tensors=len(flat.tensors), size_bytes=size, notes=_own_note(contents))


def _cause(error: CheckpointException) -> BaseException:
    """What went wrong inside of torch's save, which wraps the errors of ranks."""
    for inner, _ in error.failures.values():
        return StorageError(f"cannot write the export: {inner}") if isinstance(inner, OSError) else inner
    return error


# ---- safetensors


def export_safetensors(contents: Contents, out: Path, *, state: str | None, shard_bytes: int) -> Exported:
    """Write tensors as `model-0000k-of-n.safetensors` files and their index in new folder `out`.

    `state`: only the tensors of that state, under their names in it; None takes all, under their full names. A tensor with
    several names (tied weights) is written once; the others are noted in the metadata. Files hold up to `shard_bytes` of
    tensors, more only when one tensor is larger. Raises ConfigError (no such state, `out` is there, a type that
    safetensors does not know), VerificationError (damage; then `out` is gone again), StorageError.
    """
    chosen, notes = _chosen(contents, flatten(contents), state)
    first: dict[str, str] = {}
    aliases: dict[str, str] = {}
    for key, name in chosen.items():
        if first.setdefault(name, key) != key:
            aliases[key] = first[name]
    kept = {key: name for key, name in chosen.items() if key not in aliases}
    metas = {key: contents.index.tensors[name] for key, name in kept.items()}
    for key, meta in metas.items():
        if meta.dtype not in NATIVE_BYTES:
            raise ConfigError(f"{key!r} is {meta.dtype}, which safetensors does not know; choose --to dcp")
    shards = _packed({key: meta.size_bytes for key, meta in metas.items()}, shard_bytes)
    weight_map: dict[str, str] = {}
    with _new_folder(out):
        for number, keys in enumerate(shards):
            file = f"model-{number + 1:05d}-of-{len(shards):05d}.safetensors"
            unordered = {key: StoredTensor(metas[key].dtype, metas[key].shape, metas[key].size_bytes) for key in keys}
            entries = {key: unordered[key] for key in file_order(unordered)}
            here = {alias: key for alias, key in aliases.items() if key in entries}
            _write_shard(contents, out / file, entries, kept, {**here, "format": "pt"})
            weight_map.update(dict.fromkeys(keys, file))
        size = sum(meta.size_bytes for meta in metas.values())
        table = {"metadata": {"total_size": size, "aliases": aliases}, "weight_map": dict(sorted(weight_map.items()))}
        write_file(out / INDEX_FILE, [to_pretty_json(table)])
    files = sorted({*weight_map.values(), INDEX_FILE})
    return Exported(files=files, tensors=len(kept), size_bytes=size, notes=[*notes, *_own_note(contents)])


def _chosen(contents: Contents, flat: Flat, state: str | None) -> tuple[dict[str, str], list[str]]:
    """Names to write, each with its tensor in the index, and a note about values that are no tensors."""
    if state is not None and state not in contents.index.values:
        raise ConfigError(f"--state {state}: {contents.folder} holds {', '.join(sorted(contents.index.values))}")
    prefix = "" if state is None else f"{state}."
    keys = [key for key in flat.leaves if key == state or key.startswith(prefix)]
    tensors = {key.removeprefix(prefix): flat.tensors[key] for key in keys if key in flat.tensors}
    if not tensors:
        raise ConfigError(f"{contents.folder}: there is no tensor in {state or 'it'}")
    left = len(keys) - len(tensors)
    return tensors, [f"{left} values that are no tensors have no place in safetensors and are left out"] if left else []


def _packed(sizes: dict[str, int], limit: int) -> list[list[str]]:
    """Names in their order, cut into groups of at most `limit` bytes."""
    groups: list[list[str]] = []
    room = 0
    for key, size in sizes.items():
        if not groups or size > room:
            groups.append([])
            room = limit
        groups[-1].append(key)
        room -= size
    return groups


def _write_shard(
    contents: Contents, path: Path, entries: dict[str, StoredTensor], names: dict[str, str], metadata: dict[str, str]
) -> None:
    header = build_header(entries, metadata)

    def parts() -> Iterator[bytes | memoryview]:
        yield header
        for key in entries:
            yield read_bytes(contents, names[key])

    size = len(header) + sum(math.prod(entry.shape) * NATIVE_BYTES[entry.dtype] for entry in entries.values())
    put_file(path, parts(), size)
