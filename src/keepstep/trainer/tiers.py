"""Settings of a Checkpointer: where checkpoints go beside its root, and when ranks write. Arguments go before the environment."""

from __future__ import annotations

import os
import sys
from collections.abc import Callable, Mapping
from typing import Literal

from keepstep.checkpoint.keeping.policy import parse_span
from keepstep.checkpoint.restore.guard import Guard
from keepstep.checkpoint.save.uploader import Uploader
from keepstep.checkpoint.storage.source import Root
from keepstep.checkpoint.trust.manifest import Manifest
from keepstep.goodput.ramp import write_delay_s
from keepstep.records import frames
from keepstep.records.errors import ConfigError
from keepstep.trainer.cadence import open_cadence
from keepstep.trainer.channel import Channel, ScopedChannel
from keepstep.trainer.ramp import stagger_cost

CLOSE_MARGIN_S = 5.0
"""What is left of a notice when the wait for an upload ends, for leaving the processes."""


def busy_policy(given: str | None, environ: Mapping[str, str] | None = None) -> Literal["wait", "skip"]:
    """What a save does that falls due while one is in flight. Raises ConfigError."""
    env = os.environ if environ is None else environ
    found, where = (
        (given, "Checkpointer: on_busy")
        if given is not None
        else (
            env.get(frames.ENV_ON_BUSY) or "wait",
            frames.ENV_ON_BUSY,
        )
    )
    if found == "wait":
        return "wait"
    if found == "skip":
        return "skip"
    raise ConfigError(f"{where}={found!r} is not one of wait, skip")


def upload_period_s(every: float | str | None) -> float:
    """Seconds of `upload_every`: a number, or text such as 30m and 1h; 0 for None or "each": every commit. Raises ConfigError."""
    if every is None or every == "each":
        return 0.0
    if isinstance(every, str):
        return float(parse_span(every, "Checkpointer(upload_every=)"))
    if not 0.0 <= every < float("inf"):
        raise ConfigError(f"Checkpointer: upload_every={every} is not a time; give seconds, 30m, 1h, or each")
    return float(every)


def write_delay(rank: int, world_size: int, stagger_s: float, timeout_s: float) -> float:
    """Seconds for which this rank holds back its writes; rank 0 says what that costs. Raises ConfigError."""
    if not 0.0 <= stagger_s < timeout_s:
        raise ConfigError(
            f"Checkpointer: stagger_s={stagger_s:g} must be at least 0 and below timeout_s={timeout_s:g}, "
            "for which ranks wait for one another"
        )
    if stagger_s and rank == 0:
        cost = stagger_cost(stagger_s, open_cadence(0.0).mttf_s(0.0))
        print(f"keepstep: {cost}", file=sys.stderr, flush=True)
    return write_delay_s(rank, world_size, stagger_s)


class UploadLane:
    """The uploads of one Checkpointer: the root they go to, the lane, and rank 0's guard of that root."""

    def __init__(
        self,
        channel: Channel | ScopedChannel,
        source: Root,
        target: Root,
        *,
        rank: int,
        world_size: int,
        every: float | str | None,
        close_s: float,
        may_publish: Callable[[], None],
    ) -> None:
        """Raises ConfigError: `target` is no object store, a bad time."""
        self.root = target
        self.guard: Guard | None = None
        self.restored_step = 0
        """Where this life of the job began."""
        self._close_s = close_s
        if not 0.0 <= close_s < float("inf"):
            raise ConfigError(f"Checkpointer: upload_close_s={close_s} is not a time in seconds")
        self.uploader = Uploader(
            channel,
            source,
            target,
            rank=rank,
            world_size=world_size,
            every_s=upload_period_s(every),
            may_publish=may_publish,
            on_uploaded=self._note_upload,
        )

    def _note_upload(self, folder: str, manifest: Manifest) -> None:
        if self.guard is not None:
            self.guard.committed(folder, manifest, self.restored_step)

    def close(self, notice_left_s: float | None, say: bool) -> None:
        """Wait for what is in flight, but no longer than a scheduler's notice allows. `say`: print when that was too short."""
        limit_s = self._close_s if notice_left_s is None else min(self._close_s, notice_left_s - CLOSE_MARGIN_S)
        if not self.uploader.close(max(0.0, limit_s)) and say:
            print(
                f"keepstep: an upload to {self.root.where} was not complete after {max(0.0, limit_s):.3g} s and is given up; "
                "the checkpoint itself is committed",
                file=sys.stderr,
                flush=True,
            )
