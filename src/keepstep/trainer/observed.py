"""What a script holds beside the state it saves, written down at each save for `keepstep doctor resume`.

State that is in no checkpoint cannot be compared there. So the check looks where the script keeps it: in the variables of the
functions that called the Checkpointer, and in the attributes of the script's own objects. Only names, values and bytes are
written; nothing of the script is called but `state_dict()`.
"""

from __future__ import annotations

import base64
import ctypes
import hashlib
import os
import random
import sys
import sysconfig
from collections.abc import Iterator, Mapping
from pathlib import Path
from types import FrameType, ModuleType
from typing import TYPE_CHECKING, Any

import msgspec

from keepstep.checkpoint.format.values import TAG, encode
from keepstep.records import frames
from keepstep.records.codec import from_json, to_json
from keepstep.records.errors import ConfigError, KeepstepError
from keepstep.records.resumecheck import CheckPlan, Observation, Observed, observation_name

if TYPE_CHECKING:
    from keepstep.trainer.checkpointer import Checkpointer

MAX_ITEMS = 64
"""Containers of the script with more items than this are data and are not looked into."""
MAX_TENSOR_BYTES = 16 << 20
"""Of a larger tensor only the digest is written: a frozen teacher model would fill the disk."""
_PACKAGE = Path(__file__).parents[1]
_LIBRARIES = tuple(
    {str(_PACKAGE), *(path for name, path in sysconfig.get_paths().items() if name.endswith(("lib", "stdlib")))}
)


def after_save(checkpointer: Checkpointer, step: int) -> None:
    """Write what the script holds beside the checkpointer's state; end this rank when the check has seen enough.

    Raises SystemExit then. Raises ConfigError when KEEPSTEP_RESUME_CHECK is malformed.
    """
    text = os.environ[frames.ENV_RESUME_CHECK]
    try:
        plan = from_json(text.encode(), CheckPlan)
    except msgspec.DecodeError as error:
        raise ConfigError(f"{frames.ENV_RESUME_CHECK}={text!r}: {error}") from None
    run = checkpointer._run
    held = observe(checkpointer.state, sys._getframe(1))
    observation = Observation(step=step, cycle=run.cycle, rank=run.rank, held=held)
    path = Path(plan.folder, observation_name(run.cycle, step, run.rank))
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_bytes(to_json(observation))
    if step >= plan.until_step:
        checkpointer.wait()
        raise SystemExit(0)


def observe(state: Mapping[str, Any], frame: FrameType | None) -> dict[str, Observed]:
    """What is reachable from the script's frames above `frame`, without what `state` saves already."""
    saved = list(state.values())
    known = {id(value) for value in saved}
    storages = {place for value in saved for place in _storages(value)}
    held: dict[str, Observed] = {}
    for name, value in _reachable(frame):
        if id(value) in known:
            continue
        known.add(id(value)) if not isinstance(value, int | float | str) else None
        found = _observed(name, value, storages)
        if found is not None:
            held.setdefault(name, found)
    return held


def _reachable(frame: FrameType | None) -> Iterator[tuple[str, Any]]:
    """Variables of the script's frames, attributes of its own objects, items of its small containers; innermost first."""
    while frame is not None:
        if _is_own_file(frame.f_code.co_filename):
            for name, value in list(frame.f_locals.items()):
                if not name.startswith("__"):
                    yield from _with_parts(name, value)
            if frame.f_code.co_name == "<module>":
                return  # the script itself; below it is whoever runs it
        frame = frame.f_back


def _with_parts(name: str, value: Any) -> Iterator[tuple[str, Any]]:
    yield name, value
    parts: list[tuple[Any, Any]] = []
    if isinstance(value, list | tuple) and len(value) <= MAX_ITEMS:
        parts = list(enumerate(value))
    elif type(value) is dict and len(value) <= MAX_ITEMS:
        parts = list(value.items())
    elif _is_own_object(value):
        parts = list(vars(value).items())
    for key, part in parts:
        yield f"{name}.{key}", part


def _is_own_file(path: str) -> bool:
    return not path.startswith(("<", *_LIBRARIES)) or path.startswith(str(_PACKAGE / "cli" / "examples"))


def _is_own_object(value: Any) -> bool:
    """An object of a class that the script, or a module beside it, defines."""
    if isinstance(value, type | ModuleType) or not hasattr(value, "__dict__"):
        return False
    module = sys.modules.get(type(value).__module__)
    path = getattr(module, "__file__", None)
    return path is not None and _is_own_file(path) and not _has_state(value)


def _has_state(value: Any) -> bool:
    kind = type(value)
    return callable(getattr(kind, "state_dict", None)) and callable(getattr(kind, "load_state_dict", None))


def _observed(name: str, value: Any, storages: set[int]) -> Observed | None:
    kind = type(value)
    text = f"{kind.__module__}.{kind.__qualname__}".removeprefix("builtins.").removeprefix("__main__.")
    try:
        if kind in (int, float, bool, str):
            return Observed(kind="variable", type=text, value=encode(value, name, _leaf))
        state = _own_state(value)
        if state is None or (storages and _only_saved(state, storages)):
            return None
        return Observed(kind="object", type=text, value=encode(state, name, _leaf))
    except (KeepstepError, RuntimeError, TypeError, ValueError, AttributeError):
        return None  # what it holds is nothing that could be saved: the check cannot speak of it


def _own_state(value: Any) -> Any:
    """The state of an object that has one: by state_dict(), or the place of a random generator."""
    if isinstance(value, type | ModuleType):
        return None
    if _has_state(value):
        return value.state_dict()
    if type(value) is random.Random:
        return list(value.getstate()[1])
    torch, numpy = sys.modules.get("torch"), sys.modules.get("numpy")
    if torch is not None and isinstance(value, torch.Generator):
        return value.get_state()
    if numpy is not None and isinstance(value, numpy.random.Generator):
        return repr(value.bit_generator.state)
    if numpy is not None and isinstance(value, numpy.random.RandomState):
        return repr(value.get_state())
    return None


def _storages(value: Any) -> Iterator[int]:
    """Where the tensors of a saved value lie in memory."""
    torch = sys.modules.get("torch")
    if torch is None:
        return
    if isinstance(value, torch.nn.Module):
        tensors = [*value.parameters(), *value.buffers()]
    else:
        tensors = list(_tensors(value.state_dict() if _has_state(value) else value, torch))
    for tensor in tensors:
        local = tensor.to_local() if hasattr(tensor, "to_local") else tensor
        if local.numel():
            yield local.untyped_storage().data_ptr()


def _tensors(value: Any, torch: Any) -> Iterator[Any]:
    if isinstance(value, torch.Tensor):
        yield value
    elif isinstance(value, Mapping):
        for item in value.values():
            yield from _tensors(item, torch)
    elif isinstance(value, list | tuple):
        for item in value:
            yield from _tensors(item, torch)


def _only_saved(state: Any, storages: set[int]) -> bool:
    """Whether all tensors of `state` are ones that are saved under another name (a module inside a wrapper)."""
    torch = sys.modules.get("torch")
    if torch is None or not (tensors := list(_tensors(state, torch))):
        return False
    local = [tensor.to_local() if hasattr(tensor, "to_local") else tensor for tensor in tensors]
    return all(not tensor.numel() or tensor.untyped_storage().data_ptr() in storages for tensor in local)


def _leaf(value: Any, path: str) -> dict[str, Any] | None:
    torch, numpy = sys.modules.get("torch"), sys.modules.get("numpy")
    if torch is not None and isinstance(value, torch.Tensor):
        local = value.detach()
        local = (local.to_local() if hasattr(local, "to_local") else local).cpu().contiguous()
        data = ctypes.string_at(local.data_ptr(), local.numel() * local.element_size()) if local.numel() else b""
        return _bytes_of(str(local.dtype).removeprefix("torch."), list(local.shape), data)
    if numpy is not None and isinstance(value, numpy.ndarray | numpy.generic):
        return _bytes_of(str(value.dtype), list(value.shape), value.tobytes())
    return {TAG: "bytes_of", "dtype": "text", "shape": [], "v": base64.b64encode(repr(value).encode()).decode()}


def _bytes_of(dtype: str, shape: list[int], data: bytes) -> dict[str, Any]:
    if len(data) > MAX_TENSOR_BYTES:
        dtype, data = f"SHA-256 of {dtype}", hashlib.sha256(data).digest()
    return {TAG: "bytes_of", "dtype": dtype, "shape": shape, "v": base64.b64encode(data).decode()}
