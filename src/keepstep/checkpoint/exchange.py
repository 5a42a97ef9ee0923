"""What saving and restoring need of the side channel. `keepstep.trainer.channel` has the implementations."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, Literal, Protocol

import msgspec

from keepstep.records.errors import ChannelError

MemoryTier = Literal["shm", "peer"]
"""Memory of this node, or of another node of the job."""


class KeptSet(msgspec.Struct, frozen=True, kw_only=True):
    """A checkpoint of which memories of the job hold something."""

    checkpoint: str
    files: int
    size_bytes: int
    copied: int = 0
    """Files that are in the memory of two nodes or more."""
    facts: dict[str, Any] = {}
    """What the facts of its files say alike, as far as the first of them were looked at."""


class KeptFile(msgspec.Struct, frozen=True, kw_only=True):
    """One file of a checkpoint in memory. `nodes`: some of those that hold it; [] without a launcher."""

    checkpoint: str
    file: str
    size_bytes: int
    tier: MemoryTier
    facts: dict[str, Any] = {}
    nodes: list[str] = []


class Fetched(msgspec.Struct, frozen=True, kw_only=True):
    """A file in memory: `fd` is read-only and the caller's to close. Its rank may overwrite it meanwhile: verify what was read."""

    fd: int
    size_bytes: int
    tier: MemoryTier
    facts: dict[str, Any]


class HighWater(msgspec.Struct, frozen=True, kw_only=True):
    """The newest committed checkpoint of a root: `digest` is the SHA-256 of its manifest in hex.

    `detail` is what else the rules of a restore remember (trust/rollback.py), as JSON; the launcher only keeps it.
    """

    step: int
    cycle: int
    digest: str
    detail: str = ""


class NoRoomError(ChannelError):
    """Raised when the host has no memory for a buffer."""


class NoStoreError(ChannelError):
    """Raised when there is no launcher whose journal keeps a high-water mark."""


class Exchange(Protocol):
    """Shared keys of one cycle; JSON values. Every method may raise ChannelError."""

    def set(self, key: str, value: Any) -> None:
        """Set `key`."""

    def get(self, key: str) -> Any:
        """The value of `key`; no JSON value when it was never set."""

    def cas(self, key: str, value: Any) -> Any:
        """Set `key` unless it is set; return the value that now holds."""

    def wait(self, keys: Sequence[str], timeout_s: float) -> dict[str, Any]:
        """Values of `keys` once all are set."""

    def report(self, kind: str, fields: Mapping[str, Any]) -> None:
        """A mark for the timeline."""

    def grant(self, checkpoint: str, step: int) -> bool:
        """Whether a checkpoint may be published."""

    def buffer(self, name: str, size_bytes: int) -> int:
        """A descriptor of shared memory of at least `size_bytes`, for the caller to close.

        With a launcher the same rank, name and size give the same memory in every cycle, with what it holds; without one each call
        gives fresh memory, and the name means the newest. Raises NoRoomError when there is no memory for it.
        """

    def keep(self, buffer: str, checkpoint: str, file: str, size_bytes: int, facts: Mapping[str, Any]) -> bool:
        """The first `size_bytes` of this buffer are this file of this checkpoint folder, and replace what it held.

        `facts`: small JSON. With `fingerprint` (keepstep.checkpoint.format.fingerprint) in it other nodes may copy and fetch the
        file. Called again it replaces the facts. False: nothing is kept in memory (--memory-tier off).
        """

    def unkeep(self, buffer: str) -> None:
        """This buffer is about to be overwritten: before that it must not be listed any more."""

    def kept(self) -> list[KeptSet]:
        """The newest checkpoints of which memories of the job hold something, newest first."""

    def kept_files(self, checkpoint: str) -> list[KeptFile]:
        """All files of one checkpoint in memory. Large for a large job: whoever knows the name of a file just fetches it."""

    def fetch(self, checkpoint: str, file: str) -> Fetched:
        """A file in memory, brought to this node when another one holds it. ChannelError when nobody does, or it is damaged."""

    def mark_get(self, root_id: str) -> HighWater | None:
        """The high-water mark of a root, None before the first. Raises NoStoreError without a launcher."""

    def mark_set(self, root_id: str, mark: HighWater, rebase: str = "") -> None:
        """Raise it; durable on return. A lower step is refused unless `rebase` gives the reason. Raises NoStoreError as above."""
