"""`Checkpointer`: save, commit and restore the state of a training script.

Saving blocks the training thread only while this rank's bytes are copied into a staging buffer; a background thread
writes, hashes and commits them. Restoring is a vote: a checkpoint is loaded only when every rank has verified the bytes
it reads.
"""

from __future__ import annotations

import contextlib
import mmap
import os
import sys
import time
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any, Protocol

import msgspec

from keepstep.checkpoint.format.index import Index, check_state_name, file_layout
from keepstep.checkpoint.format.layout import FolderName, check_run_id
from keepstep.checkpoint.restore.vote import Life, Restore, restore
from keepstep.checkpoint.save.saver import SaveJob, Saver
from keepstep.checkpoint.trust.keys import signing_key
from keepstep.records import frames
from keepstep.records.errors import ChannelError, ConfigError, StorageError
from keepstep.trainer.channel import Channel, ScopedChannel, scoped

DEFAULT_EVERY_S = 600.0
SAVE_FACTOR = 1.5
"""A save is expected to take at most this times the median of the measured ones."""
_ROUND_BYTES = 2 << 20


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


class RunLike(Protocol):
    """What the Checkpointer needs of the run object."""

    run_id: str
    attempt: int
    cycle: int
    rank: int
    world_size: int
    propose_save: Callable[[int], bool] | None
    checkpointers: list[Any]

    @property
    def channel(self) -> Channel:
        """The side channel all ranks share."""

    def decision_at(self, step: int) -> DecisionLike | None:
        """The shared decision for exactly `step`, None when it is no decision step."""

    def phase(self, name: str) -> contextlib.AbstractContextManager[None]:
        """Mark the progress page while in `name`."""

    def note_restored(self, step: int) -> None:
        """Training goes on from `step`."""

    def section(self, name: str) -> contextlib.AbstractContextManager[None]:
        """A section on the progress page, with a hang limit of its own."""

    def check_lease(self) -> None:
        """Raise StorageError when nothing may be committed from this node."""


def _check_cadence(every_steps: int | None, every_seconds: float | None) -> None:
    if every_steps is not None and every_seconds is not None:
        raise ConfigError("Checkpointer: give every_steps or every_seconds, not both")
    if every_steps is not None and every_steps < 1:
        raise ConfigError(f"Checkpointer: every_steps={every_steps} is not a positive number of steps")
    if every_seconds is not None and not every_seconds > 0:
        raise ConfigError(f"Checkpointer: every_seconds={every_seconds} is not a positive time")


def _steps_of(text: str) -> int:
    if not text.isdecimal():
        raise ConfigError(f"{frames.ENV_CKPT_EVERY_STEPS}={text!r} is not a number of steps")
    return int(text)


class Checkpointer:
    """Saves and restores `state`.

    Entries of `state` are objects with state_dict and load_state_dict (modules, optimizers, schedulers, scalers,
    loaders; the keys are those the object itself uses, so a module wrapped in DDP keeps its "module." prefix), or plain
    values: tensors, numpy arrays, numbers, bool, None, str, bytes, list, tuple, dict. A plain value's restored value is
    `checkpointer.state[name]`; assign there what the next save is to hold. Entries in `per_rank` (by default "loader")
    and the random state are saved for each rank; everything else must be the same on all ranks and is written once.
    """

    def __init__(
        self,
        root: str | os.PathLike[str],
        state: dict[str, Any],
        *,
        every_steps: int | None = None,
        every_seconds: float | None = None,
        per_rank: Iterable[str] | None = None,
        unsigned: bool = False,
        run_id: str | None = None,
        timeout_s: float = 600.0,
        max_failures: int = 3,
        run: RunLike | None = None,
    ) -> None:
        """`every_steps`: save at multiples of it; else by time, every `every_seconds` (600 s when neither is given).

        `run_id`: restore only checkpoints of that run (default: of any run under `root`). `timeout_s` bounds how long
        ranks wait for one another in a save or a restore. `max_failures` failed saves in a row make the next one raise
        StorageError. Raises ConfigError for a bad argument.
        """
        if text := os.environ.get(frames.ENV_CKPT_EVERY_STEPS):
            every_steps, every_seconds = _steps_of(text), None
        _check_cadence(every_steps, every_seconds)
        for name in state:
            check_state_name(name)
        wanted = frozenset(per_rank) if per_rank is not None else frozenset({"loader"} & set(state))
        if wanted - set(state):
            raise ConfigError(
                f"Checkpointer: per_rank names {sorted(wanted - set(state))} are not in state {sorted(state)}"
            )
        if run is None:
            from keepstep.trainer.run import current

            run = current()
        if other := os.environ.get(frames.ENV_CKPT_ROOT):
            root = f"{other}.{len(run.checkpointers)}" if run.checkpointers else other
        self.root = Path(root)
        self.state = state
        self._run: RunLike = run
        self._every_steps = every_steps
        self._every_seconds = every_seconds or DEFAULT_EVERY_S
        self._per_rank = wanted
        self._unsigned = unsigned
        self._only_run = None if run_id is None else check_run_id(run_id)
        self._timeout_s = timeout_s
        self._max_failures = max_failures
        self._life: Life | None = None
        self._staging: mmap.mmap | None = None
        self._key: Any = None
        self._last_save_s = time.monotonic()
        self._closed = False
        check_run_id(run.run_id)
        number = len(run.checkpointers)
        run.checkpointers.append(self)
        self._propose_before = run.propose_save
        run.propose_save = self._propose
        self._channel: Channel | ScopedChannel = scoped(run.channel, f"ckpt-{number}") if number else run.channel
        self._buffer_name = f"ckpt-{number}"
        self._saver = Saver(
            self._channel, rank=run.rank, world_size=run.world_size, timeout_s=timeout_s, may_commit=run.check_lease
        )
        if unsigned and run.rank == 0:
            print(
                f"keepstep: WARNING: checkpoints in {self.root} are NOT SIGNED (unsigned=True): "
                "whoever can write there can replace them",
                file=sys.stderr,
                flush=True,
            )

    # ---- restore

    def restore(self, *, fresh_start: bool = False) -> int:
        """Load the newest committed checkpoint that every rank can verify; return its step, 0 on an empty root.

        One that cannot be verified is quarantined, and the next older one is tried. With `fresh_start` (or
        KEEPSTEP_FRESH_START=1) nothing is loaded and step 0 begins a new lineage, which later cycles of the same attempt
        then continue. Raises RefuseToStartError (exit 42) when the root holds checkpoints but none is valid, or what it
        holds does not fit this script or number of ranks; ChannelError when ranks do not answer in time.
        """
        if self._life is not None:
            raise ConfigError("Checkpointer: restore() was already called")
        fresh = fresh_start or os.environ.get(frames.ENV_FRESH_START) == "1"
        with self._run.phase("restore"):
            task = Restore(
                root=self.root,
                channel=self._channel,
                rank=self._run.rank,
                world_size=self._run.world_size,
                run_id=self._run.run_id,
                attempt=self._run.attempt,
                cycle=self._run.cycle,
                only_run=self._only_run,
                unsigned=self._unsigned,
                timeout_s=self._timeout_s,
            )
            self._life = restore(task, self.state, fresh_start=fresh)
        life = self._life
        if life.checkpoint is not None:
            self._saver.continue_from(life.restored_step, self.root / life.checkpoint, life.parent)
        if not self._unsigned and self._run.rank == 0:
            self._key = signing_key()  # kept: a key file that vanishes later must not start another key in the middle
        self._last_save_s = time.monotonic()
        self._run.note_restored(life.restored_step)
        return life.restored_step

    # ---- save

    def maybe_save(self, step: int) -> bool:
        """Save when it is time, or when the job is asked to stop; return whether a save was begun, alike on every rank.

        `step` is the number of completed steps. A job that is asked to stop saves if the measured time from the begin of
        a save to its commit fits into what is left of the scheduler's notice; otherwise it says so and leaves the save
        out. Blocks for staging only (and for a save still in flight). A failed save
        is reported and training goes on. Raises StorageError after `max_failures` failed saves in a row, ConfigError
        when a value cannot be saved.
        """
        decision = self._run.decision_at(step)
        if decision is not None and decision.stop:
            due = decision.save
            if not due and self._run.rank == 0:
                print(
                    f"keepstep: stopping after step {step} without a save: {decision.why}", file=sys.stderr, flush=True
                )
        elif self._every_steps is not None:
            due = step > 0 and step % self._every_steps == 0
        else:
            due = decision is not None and decision.save
        return self.save(step) if due else False

    def save(self, step: int) -> bool:
        """Save now, whatever the cadence; still in the background. Returns False when `step` is already saved.

        Every rank must call it at the same step. Raises as `maybe_save` does.
        """
        if self._life is None:
            raise ConfigError(
                "Checkpointer: call restore() before the first save; it also tells an empty root from a lost one"
            )
        if self._closed:
            raise ConfigError("Checkpointer: closed")
        with self._run.section("checkpoint"):
            begun = self._save(step, time.monotonic_ns())
        if begun and frames.ENV_RESUME_CHECK in os.environ and self._run.checkpointers[0] is self:
            from keepstep.trainer.observed import after_save

            after_save(self, step)
        return begun

    def _save(self, step: int, begin_ns: int) -> bool:
        self.wait()
        if step == self.last_committed_step:
            return False
        if self._saver.failures_in_row >= self._max_failures:
            raise StorageError(
                f"{self._saver.failures_in_row} saves in a row failed under {self.root}; "
                f"the last one: {self._saver.last_error}"
            )
        try:
            job = self._stage(step, time.monotonic_ns())
        except (ChannelError, StorageError, OSError) as error:
            # No room to stage: a failed save, which training outlives.
            self._saver.refuse(step, str(error))
        except Exception as error:  # a value that cannot be saved, or a state_dict() that fails: the script's own error
            self._saver.refuse(step, f"{type(error).__name__}: {error}")
            raise
        else:
            self._saver.begin(job)
        self._last_save_s = time.monotonic()
        with contextlib.suppress(ChannelError):  # a lost mark is no reason to lose the training
            self._run.channel.report("ckpt_block", {"step": step, "begin_ns": begin_ns, "end_ns": time.monotonic_ns()})
        return True

    def _stage(self, step: int, begun_ns: int) -> SaveJob:
        assert self._life is not None
        from keepstep.checkpoint.torch.state import capture, stage

        run = self._run
        captured = capture(self.state, self._per_rank)
        blob = msgspec.json.encode(captured.own)
        layout = file_layout(captured.tensors, captured.own.tensors, len(blob), run.rank, run.world_size)
        room = self._room(sum(entry.size_bytes for entry in layout.entries.values()))
        stage(captured, layout, blob, room)
        index = Index(world=run.world_size, tensors=captured.tensors, aliases=captured.aliases, values=captured.values)
        return SaveJob(
            root=self.root,
            name=FolderName(step, run.cycle, run.attempt, 0, run.run_id),
            entries=layout.entries,
            data=room,
            index=index,
            life=self._life,
            key=self._key,
            begun_ns=begun_ns,
        )

    def _room(self, size: int) -> memoryview:
        """`size` bytes of the staging buffer. It is reused: fresh pages cost several times the copy itself."""
        held = self._staging
        if held is None or len(held) < size:
            wanted = -(-(size + size // 8 + 1) // _ROUND_BYTES) * _ROUND_BYTES
            fd = self._channel.buffer(self._buffer_name, wanted)
            try:
                self._staging = held = mmap.mmap(fd, wanted)
            finally:
                os.close(fd)
        return memoryview(held)[:size]

    @property
    def last_committed_step(self) -> int | None:
        """Step of the newest checkpoint that was committed or restored here; None before the first."""
        return self._saver.committed_step

    def wait(self) -> None:
        """Wait until the save in flight is committed or has failed; returns at once when there is none."""
        outcome = self._saver.wait()
        if outcome is not None and outcome.error is not None and self._run.rank == 0:
            print(f"keepstep: save of step {outcome.step} failed: {outcome.error}", file=sys.stderr, flush=True)

    def close(self) -> None:
        """Wait for the save in flight and let the staging buffer go. Safe to call twice."""
        if self._closed:
            return
        self._closed = True
        with self._run.phase("close"):
            self.wait()
        self._staging = None

    # ---- for the run object

    def _propose(self, step: int) -> bool:
        """Whether this rank, asked first, wants a save at `step`."""
        if self._propose_before is not None and self._propose_before(step):
            return True
        if self._every_steps is not None or self._life is None or self._closed:
            return False
        return time.monotonic() - self._last_save_s >= self._every_seconds

    def save_needs_s(self) -> float | None:
        """Seconds a save begun now may take to its commit, with what one in flight still needs; None before the first."""
        median_s = self._saver.median_s()
        if median_s is None:
            return None
        return SAVE_FACTOR * median_s + self._saver.in_flight_s(SAVE_FACTOR * median_s)

    def newest_committed_path(self) -> Path | None:
        """Folder of the newest checkpoint this object committed or restored; None before the first."""
        return self._saver.newest
