"""Verified bytes into a state: which boxes this process needs, values built over them, and `load_state_dict`."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from typing import Any

import msgspec
import torch

from keepstep.checkpoint.format.boxes import REPLICATE, Box, Mesh, local_box, whole
from keepstep.checkpoint.format.dtypes import ITEM_BYTES
from keepstep.checkpoint.format.index import Index, RankValues
from keepstep.checkpoint.format.layout import INDEX_NAME
from keepstep.checkpoint.format.plan import TensorMeta
from keepstep.checkpoint.format.values import TAG, decode, join
from keepstep.checkpoint.restore.reader import Strided
from keepstep.checkpoint.torch import sharded
from keepstep.checkpoint.torch.codes import DTYPES, NUMPY_TYPES
from keepstep.checkpoint.torch.rng import Reseed, reseed, set_rng_state
from keepstep.checkpoint.torch.state import Captured
from keepstep.records.errors import RefuseToStartError, VerificationError

Buffers = Mapping[str, memoryview]


class Target(msgspec.Struct, frozen=True):
    """What this rank needs of one tensor: a box, and how it lies when it is to be a DTensor (device mesh, placements)."""

    box: Box
    device_mesh: Any = None
    placements: tuple[Any, ...] = ()


class Restored(msgspec.Struct, kw_only=True):
    """Values ready to be loaded, by name of the state, and the random state of this rank."""

    values: dict[str, Any]
    rng: Any


# ---- what is needed


def targets(index: Index, state: Mapping[str, Any], live: Captured, rank: int, checkpoint: str) -> dict[str, Target]:
    """What this rank needs of each tensor of `index`, from how the script's own tensors lie now.

    Raises RefuseToStartError for a sharded tensor of which nothing in the script says how it is to lie.
    """
    ours = {**live.sources, **{alias: live.sources[name] for alias, name in live.aliases.items()}}
    ours.update(_optimizer_parameters(state, index))
    meshes: dict[int, Mesh] = {}
    return {
        name: _target(name, meta, ours.get(name), index, live, rank, checkpoint, meshes)
        for name, meta in index.tensors.items()
    }


def _target(
    name: str,
    meta: TensorMeta,
    ours: Any,
    index: Index,
    live: Captured,
    rank: int,
    checkpoint: str,
    meshes: dict[int, Mesh],
) -> Target:
    if ours is not None and sharded.is_dtensor(ours) and len(ours.shape) == len(meta.shape):
        return _sharded_target(meta, ours.device_mesh, tuple(ours.placements), rank, name, meshes)
    if ours is not None or meta.mesh is None:
        return Target(whole(meta.shape))
    mesh = index.meshes[meta.mesh]
    if mesh in live.meshes:
        device_mesh = live.device_meshes[live.meshes.index(mesh)]
        placements = sharded.placements_from(meta.placements[: device_mesh.mesh.dim()])
        return _sharded_target(meta, device_mesh, tuple(placements), rank, name, meshes)
    raise RefuseToStartError(
        f"{checkpoint}: {name!r} was saved sharded over {list(mesh.shape)} ranks, and nothing in the script says how it is to lie "
        "now; make that state before restore() (e.g. give optimizers as torch.optim.Optimizer objects)"
    )


def _sharded_target(
    meta: TensorMeta, device_mesh: Any, placements: tuple[Any, ...], rank: int, name: str, meshes: dict[int, Mesh]
) -> Target:
    """`meshes` are those met before, by identity: torch works a mesh out anew each time it is asked."""
    mesh = meshes.get(id(device_mesh))
    if mesh is None:
        mesh = meshes[id(device_mesh)] = sharded.mesh_of(device_mesh, rank + 1)
    coordinate = mesh.coordinate(rank)
    if coordinate is None:
        return Target(Box((0,) * len(meta.shape), (0,) * len(meta.shape)), device_mesh, placements)
    texts = sharded.texts_of(placements, max(1, len(meta.shape)), name)
    texts += (REPLICATE,) * (len(mesh.shape) - len(texts))
    return Target(local_box(meta.shape, mesh.shape, texts, coordinate), device_mesh, placements)


def _optimizer_parameters(state: Mapping[str, Any], index: Index) -> dict[str, Any]:
    """For saved optimizer tensors that a fresh optimizer does not have yet: the parameter each belongs to.

    torch numbers the parameters of all groups in order, and what has the shape of its parameter lies as the parameter does.
    """
    found: dict[str, Any] = {}
    for name, value in state.items():
        if not isinstance(value, torch.optim.Optimizer):
            continue
        parameters = [parameter for group in value.param_groups for parameter in group["params"]]
        base = join(join(name, "state"), 0)[:-1]
        for text, meta in index.tensors.items():
            number, _, rest = text.removeprefix(base).partition("/")
            if not text.startswith(base) or not rest or not number.isdecimal() or int(number) >= len(parameters):
                continue
            if tuple(parameters[int(number)].shape) == meta.shape:
                found[text] = parameters[int(number)]
    return found


# ---- values over verified bytes


def copy_strided(item: Strided) -> None:
    """Put a part of a chunk where it belongs, element by element."""
    size = ITEM_BYTES[item.dtype]
    strides, step = [], size
    for dim in reversed(item.chunk.sizes):
        strides.append(step)
        step *= dim
    source = torch.frombuffer(item.data, dtype=torch.uint8).as_strided((*item.part.sizes, size), (*strides[::-1], 1))
    target = torch.frombuffer(item.into, dtype=torch.uint8).view(*item.box.sizes, size)
    for dim, (begin, base, length) in enumerate(zip(item.part.offsets, item.box.offsets, item.part.sizes, strict=True)):
        target = target.narrow(dim, begin - base, length)
    target.copy_(source)


def _tensor(meta: TensorMeta, buffer: memoryview, target: Target | None) -> torch.Tensor:
    dtype, shape = DTYPES[meta.dtype], target.box.sizes if target is not None else meta.shape
    if not len(buffer):
        local = torch.empty(shape, dtype=dtype)
    else:
        local = torch.frombuffer(buffer, dtype=torch.uint8).view(dtype).reshape(shape)
    if target is None or target.device_mesh is None:
        return local
    made: torch.Tensor = sharded.make(local, target.device_mesh, target.placements, meta.shape)
    return made


def _array(meta: TensorMeta, buffer: memoryview) -> Any:
    import numpy

    return numpy.frombuffer(buffer, dtype=NUMPY_TYPES[meta.dtype]).reshape(meta.shape)


def make_lookup(
    tensors: Mapping[str, TensorMeta],
    aliases: Mapping[str, str],
    buffers: Buffers,
    wanted: Mapping[str, Target] | None = None,
) -> Callable[[dict[str, Any]], Any]:
    """A `decode` rule that turns references into tensors over `buffers`; the same tensor for each alias."""
    made: dict[tuple[str, str], Any] = {}

    def lookup(form: dict[str, Any]) -> Any:
        tag = form[TAG]
        if tag == "size":
            return torch.Size(form["v"])
        if tag == "scalar":
            import numpy

            return numpy.frombuffer(bytes.fromhex(form["v"]), dtype=NUMPY_TYPES[form["dtype"]])[0]
        name = aliases.get(form["v"], form["v"])
        if tag not in ("tensor", "array") or name not in tensors:
            raise VerificationError(f"a value refers to {tag} {name!r}, which is not there")
        if (tag, name) not in made:
            buffer = buffers.get(name, memoryview(b""))  # an empty tensor has no bytes
            if tag == "tensor":
                made[(tag, name)] = _tensor(tensors[name], buffer, None if wanted is None else wanted[name])
            else:
                made[(tag, name)] = _array(tensors[name], buffer)
        return made[(tag, name)]

    return lookup


def rebuild_shared(
    index: Index, buffers: Buffers, wanted: Mapping[str, Target], strided: Iterable[Strided]
) -> dict[str, Any]:
    """The values that all ranks share, by name of the state. Nothing of the training is touched. Raises VerificationError."""
    for item in strided:
        copy_strided(item)
    lookup = make_lookup(index.tensors, index.aliases, buffers, wanted)
    return {name: decode(form, lookup, INDEX_NAME) for name, form in index.values.items()}


def rebuild_own(own: RankValues, buffers: Buffers, what: str) -> dict[str, Any]:
    """The values of one rank, by name of the state; `rng` among them. Raises VerificationError."""
    lookup = make_lookup(own.tensors, {}, buffers)
    return {name: decode(form, lookup, what) for name, form in own.values.items()}


# ---- into the state


def check_names(state: Mapping[str, Any], names: Iterable[str], checkpoint: str) -> None:
    """Raises RefuseToStartError when the checkpoint holds other names than the state."""
    saved = set(names)
    missing, unknown = sorted(set(state) - saved), sorted(saved - set(state))
    if missing or unknown:
        raise RefuseToStartError(
            f"{checkpoint} does not hold the state asked for: missing there {missing}, not asked for {unknown}; "
            "give Checkpointer the same names, or start fresh"
        )


def load(state: dict[str, Any], restored: Restored, checkpoint: str, rank: int) -> None:
    """Put `restored` into `state`: load_state_dict where there is one, in place for a tensor, else the entry is replaced.

    The random state is set last, so that nothing done here shows in it. Raises RefuseToStartError when names differ.
    """
    check_names(state, restored.values, checkpoint)
    for name, value in restored.values.items():
        target = state[name]
        if callable(getattr(target, "load_state_dict", None)):
            target.load_state_dict(value)
        elif isinstance(target, torch.Tensor) and isinstance(value, torch.Tensor):
            if target.shape != value.shape or target.dtype != value.dtype:
                raise RefuseToStartError(
                    f"{checkpoint}: {name!r} is {value.dtype}{list(value.shape)}, the script has "
                    f"{target.dtype}{list(target.shape)}"
                )
            with torch.no_grad():
                target.copy_(value)
        else:
            state[name] = value
    if isinstance(restored.rng, Reseed):
        reseed(restored.rng, rank, checkpoint)
    else:
        set_rng_state(restored.rng, checkpoint)
