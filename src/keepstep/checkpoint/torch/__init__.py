"""The only package here that imports torch: states taken apart and put together, and the plug-in for torch's own checkpoints."""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from keepstep.checkpoint.torch.modelstate import ModelState

__all__ = ["ModelState"]

_WHERE = {"ModelState": "modelstate"}


def __getattr__(name: str) -> Any:
    # What is offered here imports torch.distributed.checkpoint, which takes a second and which a save does not need.
    if name in _WHERE:
        return getattr(importlib.import_module(f"{__name__}.{_WHERE[name]}"), name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
