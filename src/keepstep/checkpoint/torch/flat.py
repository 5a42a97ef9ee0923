"""A checkpoint of ours as torch's distributed checkpoints see a state: flat keys, tensors, and values without tensors."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

import msgspec
import torch
from torch.distributed.checkpoint._nested_dict import flatten_state_dict

from keepstep.checkpoint.format.boxes import Box, whole
from keepstep.checkpoint.format.layout import INDEX_NAME
from keepstep.checkpoint.format.values import TAG, decode
from keepstep.checkpoint.restore.contents import Contents
from keepstep.checkpoint.restore.reader import allocate
from keepstep.checkpoint.torch.codes import DTYPES, NUMPY_TYPES
from keepstep.checkpoint.torch.load import copy_strided
from keepstep.records.errors import ConfigError, VerificationError


class _Array(NamedTuple):
    """Stands for a numpy array until its bytes are read."""

    name: str


class Flat(msgspec.Struct, frozen=True, kw_only=True):
    """`tensors`: flat key to the tensor's name in the index; `paths`: flat key to the keys that lead to it.

    `leaves` holds for each flat key a tensor without memory, or a value in which such tensors and arrays may lie; `names` tells
    by identity which tensor of the index one stands for.
    """

    tensors: dict[str, str]
    leaves: dict[str, Any]
    paths: dict[str, Any]
    names: dict[int, str]


def flatten(contents: Contents) -> Flat:
    """The flat view of what all ranks share. Reads no tensor. Raises VerificationError, ConfigError when keys collide."""
    index = contents.index
    made: dict[str, torch.Tensor] = {}
    names: dict[int, str] = {}

    def lookup(form: dict[str, Any]) -> Any:
        tag = form[TAG]
        if tag == "size":
            return torch.Size(form["v"])
        if tag == "scalar":
            import numpy

            return numpy.frombuffer(bytes.fromhex(form["v"]), dtype=NUMPY_TYPES[form["dtype"]])[0]
        name = index.aliases.get(form["v"], form["v"])
        if tag not in ("tensor", "array") or name not in index.tensors:
            raise VerificationError(f"a value refers to {tag} {name!r}, which is not there")
        if tag == "array":
            return _Array(name)
        if form["v"] not in made:
            meta = index.tensors[name]
            made[form["v"]] = torch.empty(meta.shape, dtype=DTYPES[meta.dtype], device="meta")
            names[id(made[form["v"]])] = name
        return made[form["v"]]

    nested = {name: decode(form, lookup, INDEX_NAME) for name, form in index.values.items()}
    try:
        leaves, paths = flatten_state_dict(nested)
    except ValueError as error:
        raise ConfigError(f"{contents.folder}: {error}; such a state has no flat form") from None
    tensors = {key: names[id(leaf)] for key, leaf in leaves.items() if isinstance(leaf, torch.Tensor)}
    return Flat(tensors=tensors, leaves=leaves, paths=paths, names=names)


def read_boxes(
    contents: Contents, wanted: Mapping[str, Box], room_for: Callable[[int], memoryview] = allocate
) -> dict[str, memoryview]:
    """Row-major bytes of boxes of tensors, verified, in what `room_for(n)` gives. Raises VerificationError or StorageError."""
    landing = contents.read(wanted, room_for=room_for)
    for item in landing.strided:
        copy_strided(item)
    return landing.buffers


def read_bytes(contents: Contents, name: str) -> memoryview:
    """Row-major bytes of a whole tensor. Raises as `read_boxes`."""
    return read_boxes(contents, {name: whole(contents.index.tensors[name].shape)})[name]


def as_tensor(buffer: memoryview, dtype: str, shape: tuple[int, ...]) -> torch.Tensor:
    """A tensor over `buffer`."""
    if not len(buffer):
        return torch.empty(shape, dtype=DTYPES[dtype])
    return torch.frombuffer(buffer, dtype=torch.uint8).view(DTYPES[dtype]).reshape(shape)


def read_whole(contents: Contents, name: str) -> torch.Tensor:
    """One whole tensor on the CPU. Raises as `read_boxes`."""
    meta = contents.index.tensors[name]
    return as_tensor(read_bytes(contents, name), meta.dtype, meta.shape)


def read_value(contents: Contents, flat: Flat, key: str) -> Any:
    """The value under flat `key`, tensors and arrays in it read. Raises VerificationError or StorageError."""
    return _filled(contents, flat, flat.leaves[key])


def _filled(contents: Contents, flat: Flat, value: Any) -> Any:
    if isinstance(value, torch.Tensor):
        return read_whole(contents, flat.names[id(value)])
    if type(value) is _Array:
        import numpy

        meta = contents.index.tensors[value.name]
        return numpy.frombuffer(read_bytes(contents, value.name), dtype=NUMPY_TYPES[meta.dtype]).reshape(meta.shape)
    if type(value) is list:
        return [_filled(contents, flat, item) for item in value]
    if type(value) is tuple:
        return tuple(_filled(contents, flat, item) for item in value)
    if isinstance(value, dict):
        for key in value:
            value[key] = _filled(contents, flat, value[key])
    return value
