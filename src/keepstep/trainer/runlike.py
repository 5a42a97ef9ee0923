"""What the Checkpointer needs of the run object, so that it can be used and tested without one."""

from __future__ import annotations

import contextlib
from collections.abc import Callable
from typing import Any, Protocol

from keepstep.trainer.channel import Channel


class DecisionLike(Protocol):
    """What all ranks do at exactly one step."""

    @property
    def step(self) -> int:
        """The step it is for."""

    @property
    def save(self) -> bool:
        """Save now."""

    @property
    def stop(self) -> bool:
        """The job is asked to stop after this step; `save` then says whether it saves first."""

    @property
    def why(self) -> str:
        """Why the last save is left out."""

    @property
    def keep(self) -> bool:
        """Keep an image in memory now."""


class RunLike(Protocol):
    """What the Checkpointer needs of the run object."""

    run_id: str
    attempt: int
    cycle: int
    rank: int
    world_size: int
    propose_save: Callable[[int], bool] | None
    propose_keep: Callable[[int], bool] | None
    checkpointers: list[Any]

    @property
    def channel(self) -> Channel:
        """The side channel all ranks share."""

    def decision_at(self, step: int) -> DecisionLike | None:
        """The shared decision for exactly `step`, None when it is no decision step."""

    def agree(self, key: str, value: Any) -> Any:
        """What the first rank that asked said under `key`: the same on every rank."""

    def phase(self, name: str) -> contextlib.AbstractContextManager[None]:
        """Mark the progress page while in `name`."""

    def note_restored(self, step: int) -> None:
        """Training goes on from `step`."""

    def notice_left_s(self) -> float | None:
        """Seconds left of the notice once a stop was asked for."""

    def section(self, name: str) -> contextlib.AbstractContextManager[None]:
        """A section on the progress page, with a hang limit of its own."""

    def check_lease(self) -> None:
        """Raise StorageError when nothing may be committed from this node."""
