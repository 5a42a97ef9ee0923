"""The only package here that imports torch: states taken apart and put together, and the plug-in for torch's own checkpoints.

`Writer` and `Reader` are loaded when they are first asked for.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from keepstep.checkpoint.torch.dcp import Reader as Reader
    from keepstep.checkpoint.torch.dcp import Writer as Writer

__all__ = ["Reader", "Writer"]


def __getattr__(name: str) -> Any:
    if name in __all__:
        from keepstep.checkpoint.torch import dcp

        return getattr(dcp, name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
