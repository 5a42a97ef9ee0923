"""The one module here that knows torch and numpy: tensors out of a state and back into it, and random state."""

from __future__ import annotations

import os
import random
import sys
from collections.abc import Callable, Mapping
from typing import Any

import msgspec
import torch

from keepstep.checkpoint.format.index import RANK_PREFIX, Buffer, FileLayout, Index, RankValues
from keepstep.checkpoint.format.layout import INDEX_NAME
from keepstep.checkpoint.format.plan import TensorMeta
from keepstep.checkpoint.format.shard import file_order
from keepstep.checkpoint.format.values import TAG, decode, encode, join
from keepstep.checkpoint.torch.dcpimport import RNG_ABSENT
from keepstep.records.errors import ConfigError, RefuseToStartError, VerificationError

_CODES: dict[torch.dtype, str] = {
    torch.float64: "F64",
    torch.float32: "F32",
    torch.float16: "F16",
    torch.bfloat16: "BF16",
    torch.int64: "I64",
    torch.int32: "I32",
    torch.int16: "I16",
    torch.int8: "I8",
    torch.uint64: "U64",
    torch.uint32: "U32",
    torch.uint16: "U16",
    torch.uint8: "U8",
    torch.bool: "BOOL",
    torch.complex128: "C128",
    torch.complex64: "C64",
    torch.complex32: "C32",
    torch.float8_e4m3fn: "F8_E4M3",
    torch.float8_e5m2: "F8_E5M2",
    torch.float8_e4m3fnuz: "F8_E4M3FNUZ",
    torch.float8_e5m2fnuz: "F8_E5M2FNUZ",
    torch.float8_e8m0fnu: "F8_E8M0",
}
_DTYPES = {code: dtype for dtype, code in _CODES.items()}
_NUMPY_CODES = {
    "f8": "F64", "f4": "F32", "f2": "F16", "i8": "I64", "i4": "I32", "i2": "I16", "i1": "I8",
    "u8": "U64", "u4": "U32", "u2": "U16", "u1": "U8", "b1": "BOOL", "c16": "C128", "c8": "C64",
}  # fmt: skip
_NUMPY_TYPES = {code: text for text, code in _NUMPY_CODES.items()}


class Captured(msgspec.Struct, kw_only=True):
    """A state taken apart: descriptions and JSON forms, and references to the live tensors until they are staged."""

    tensors: dict[str, TensorMeta]
    aliases: dict[str, str]
    values: dict[str, Any]
    own: RankValues
    sources: dict[str, Any]


class _Collector:
    """Leaf rule for `encode`: notes each tensor under its path and writes a reference in its place."""

    def __init__(self, prefix: str, sources: dict[str, Any], *, find_aliases: bool, owned: frozenset[str]) -> None:
        self._prefix = prefix
        self._find_aliases = find_aliases
        self._owned = owned
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
            self._note(name, path, _numpy_code(value, path), tuple(value.shape), value)
            return {TAG: "array", "v": name}
        if numpy is not None and isinstance(value, numpy.generic):
            code = _numpy_code(value, path)
            return {TAG: "scalar", "dtype": code, "v": value.tobytes().hex()}
        if isinstance(value, torch.Size):
            return {TAG: "size", "v": list(value)}
        return None

    def _tensor(self, value: torch.Tensor, path: str, name: str) -> dict[str, Any]:
        if _is_dtensor(value):
            raise ConfigError(f"state {path!r}: sharded tensors (DTensor, FSDP) cannot be saved by this version")
        if type(value) not in (torch.Tensor, torch.nn.Parameter) and not isinstance(value, torch.nn.Buffer):
            raise ConfigError(f"state {path!r}: tensor subclass {type(value).__qualname__} cannot be saved")
        code = _CODES.get(value.dtype)
        if code is None or value.layout != torch.strided or value.is_quantized or value.device.type == "meta":
            raise ConfigError(
                f"state {path!r}: a {value.layout} tensor of {value.dtype} on {value.device} cannot be saved"
            )
        if self._find_aliases and value.numel():
            place = (
                value.untyped_storage().data_ptr(),
                value.storage_offset(),
                value.shape,
                value.stride(),
                code,
                value.device,
            )
            first = self._seen.setdefault((*place, value.is_conj(), value.is_neg()), name)
            if first != name:
                self.aliases[name] = first
                return {TAG: "tensor", "v": name}
        self._note(name, path, code, tuple(value.shape), value.detach())
        return {TAG: "tensor", "v": name}

    def _note(self, name: str, path: str, code: str, shape: tuple[int, ...], source: Any) -> None:
        self.tensors[name] = TensorMeta(dtype=code, shape=shape, owner=0 if path in self._owned else None)
        self.sources[name] = source


def _is_dtensor(value: torch.Tensor) -> bool:
    return any(kind.__name__ in ("DTensor", "ShardedTensor") for kind in type(value).__mro__)


def _numpy_code(value: Any, path: str) -> str:
    text = value.dtype.str.lstrip("<|=")
    code = _NUMPY_CODES.get(text)
    if code is None or not value.dtype.isnative:
        raise ConfigError(f"state {path!r}: numpy type {value.dtype} cannot be saved")
    return code


def capture(state: Mapping[str, Any], per_rank: frozenset[str]) -> Captured:
    """Take `state` apart. Names in `per_rank`, and the random state, are this rank's own; all else is replicated.

    Buffers of modules are written by rank 0 alone: replicas may differ there (batch norm), and one of them must be
    whole. Raises ConfigError naming the path of what cannot be saved.
    """
    plain: dict[str, Any] = {}
    owned: set[str] = set()
    for name, value in state.items():
        plain[name] = value.state_dict() if callable(getattr(value, "state_dict", None)) else value
        if callable(named_buffers := getattr(value, "named_buffers", None)):
            owned.update(join(name, key) for key, _ in named_buffers(remove_duplicate=False))
    sources: dict[str, Any] = {}
    shared = _Collector("", sources, find_aliases=True, owned=frozenset(owned))
    mine = _Collector(f"{RANK_PREFIX}/", sources, find_aliases=False, owned=frozenset())
    values = {name: encode(plain[name], name, shared) for name in plain if name not in per_rank}
    own = {name: encode(plain[name], name, mine) for name in plain if name in per_rank}
    own["rng"] = encode(rng_state(), "rng", mine)
    return Captured(
        tensors=shared.tensors,
        aliases=shared.aliases,
        values=values,
        own=RankValues(tensors=mine.tensors, values=own),
        sources=sources,
    )


def stage(captured: Captured, layout: FileLayout, blob: bytes, target: memoryview) -> None:
    """Copy this rank's bytes into `target`, laid out as the data of its file. Blocks until device copies are done."""
    room = torch.frombuffer(target, dtype=torch.uint8) if len(target) else torch.empty(0, dtype=torch.uint8)
    devices = set()
    at = 0
    for name in file_order(layout.entries):
        size = layout.entries[name].size_bytes
        piece = layout.pieces.get(name)
        if piece is None:
            target[at : at + size] = blob
        elif size:
            source = captured.sources[name]
            if not isinstance(source, torch.Tensor):
                target[at : at + size] = memoryview(source.tobytes())[piece.begin : piece.end]
            else:
                flat = source.resolve_conj().resolve_neg().contiguous().reshape(-1).view(torch.uint8)
                room[at : at + size].copy_(flat[piece.begin : piece.end], non_blocking=True)
                if source.device.type != "cpu":
                    devices.add(source.device)
        at += size
    for device in devices:
        torch.accelerator.synchronize(device)


def make_lookup(
    tensors: Mapping[str, TensorMeta], aliases: Mapping[str, str], buffers: Mapping[str, Buffer]
) -> Callable[[dict[str, Any]], Any]:
    """A `decode` rule that turns references into tensors over `buffers`; the same tensor for each alias."""
    made: dict[tuple[str, str], Any] = {}

    def lookup(form: dict[str, Any]) -> Any:
        tag = form[TAG]
        if tag == "size":
            return torch.Size(form["v"])
        if tag == "scalar":
            import numpy

            return numpy.frombuffer(bytes.fromhex(form["v"]), dtype=_NUMPY_TYPES[form["dtype"]])[0]
        name = aliases.get(form["v"], form["v"])
        if tag not in ("tensor", "array") or name not in tensors:
            raise VerificationError(f"a value refers to {tag} {name!r}, which is not there")
        if (tag, name) not in made:
            make = _tensor if tag == "tensor" else _array
            made[(tag, name)] = make(tensors[name], buffers.get(name, bytearray()))  # an empty tensor has no bytes
        return made[(tag, name)]

    return lookup


def _tensor(meta: TensorMeta, buffer: Buffer) -> torch.Tensor:
    dtype = _DTYPES[meta.dtype]
    if not buffer:
        return torch.empty(meta.shape, dtype=dtype)
    return torch.frombuffer(buffer, dtype=torch.uint8).view(dtype).reshape(meta.shape)


def _array(meta: TensorMeta, buffer: Buffer) -> Any:
    import numpy

    return numpy.frombuffer(buffer, dtype=_NUMPY_TYPES[meta.dtype]).reshape(meta.shape)


class Restored(msgspec.Struct, kw_only=True):
    """Values ready to be loaded, by name of the state, and the random state of this rank."""

    values: dict[str, Any]
    rng: Any


def rebuild(
    index: Index, shared: Mapping[str, Buffer], own: RankValues, mine: Mapping[str, Buffer], own_file: str
) -> Restored:
    """Turn verified bytes into values. Nothing of the training is touched. Raises VerificationError."""
    lookup = make_lookup(index.tensors, index.aliases, shared)
    values = {name: decode(form, lookup, INDEX_NAME) for name, form in index.values.items()}
    own_lookup = make_lookup(own.tensors, {}, mine)
    for name, form in own.values.items():
        if name in values:
            raise VerificationError(f"{own_file}: state {name!r} is both replicated and of one rank")
        values[name] = decode(form, own_lookup, own_file)
    return Restored(values=values, rng=values.pop("rng", None))


def load(state: dict[str, Any], restored: Restored, checkpoint: str) -> None:
    """Put `restored` into `state`: load_state_dict where there is one, in place for a tensor, else the entry is
    replaced.

    The random state is set last, so that nothing done here shows in it. Raises RefuseToStartError when names differ.
    """
    missing = sorted(set(state) - set(restored.values))
    unknown = sorted(set(restored.values) - set(state))
    if missing or unknown:
        raise RefuseToStartError(
            f"{checkpoint} does not hold the state asked for: missing there {missing}, not asked for {unknown}; "
            "give Checkpointer the same names, or start fresh"
        )
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
    set_rng_state(restored.rng, checkpoint)


def _cuda_in_use() -> bool:
    return bool(torch.cuda.is_initialized())  # type: ignore[no-untyped-call]


def rng_state() -> dict[str, Any]:
    """Random state of this process: torch on the CPU and, once CUDA is in use, on every device; numpy; Python."""
    state: dict[str, Any] = {"torch": torch.get_rng_state(), "python": random.getstate()}
    try:
        import numpy
    except ImportError:
        pass
    else:
        state["numpy"] = numpy.random.get_state()
    if _cuda_in_use():
        state["cuda"] = torch.cuda.get_rng_state_all()
    return state


def set_rng_state(state: Any, checkpoint: str) -> None:
    """Set what `rng_state` gave. Raises RefuseToStartError when a part is missing or does not fit this process.

    A checkpoint made from another tool's files says that there never was one; then this process keeps its own.
    """
    if isinstance(state, dict) and RNG_ABSENT in state:
        if os.environ.get("RANK", "0") == "0":
            print(
                f"keepstep: WARNING: {checkpoint}: {state[RNG_ABSENT]}; random numbers go on as the script seeded them",
                file=sys.stderr,
                flush=True,
            )
        return
    if not isinstance(state, dict) or "torch" not in state or "python" not in state:
        raise RefuseToStartError(f"{checkpoint} holds no random state for this rank")
    cuda = state.get("cuda")
    if cuda is None and _cuda_in_use():
        raise RefuseToStartError(f"{checkpoint} holds no CUDA random state, but this process uses CUDA")
    if cuda is not None and torch.cuda.device_count() != len(cuda):
        raise RefuseToStartError(
            f"{checkpoint} holds the random state of {len(cuda)} CUDA devices, "
            f"this process sees {torch.cuda.device_count()}"
        )
    try:
        if "numpy" in state:
            import numpy

            numpy.random.set_state(state["numpy"])
        random.setstate(state["python"])
        torch.set_rng_state(state["torch"])
        if cuda is not None:
            torch.cuda.set_rng_state_all(cuda)
    except (ImportError, TypeError, ValueError, RuntimeError) as error:
        raise RefuseToStartError(f"{checkpoint}: the random state does not fit this process: {error}") from error
