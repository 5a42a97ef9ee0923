"""What saving and restoring need of the side channel. `keepstep.trainer.channel` has the implementations."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, Protocol


class Exchange(Protocol):
    """Shared keys of one cycle; JSON values. Every method may raise ChannelError."""

    def set(self, key: str, value: Any) -> None:
        """Set `key`."""

    def wait(self, keys: Sequence[str], timeout_s: float) -> dict[str, Any]:
        """Values of `keys` once all are set."""

    def report(self, kind: str, fields: Mapping[str, Any]) -> None:
        """A mark for the timeline."""

    def grant(self, checkpoint: str, step: int) -> bool:
        """Whether a checkpoint may be published."""
