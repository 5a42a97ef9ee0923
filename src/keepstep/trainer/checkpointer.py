"""`Checkpointer`: save, commit and restore the state of a training script.

Saving blocks the training thread only while this rank's bytes are copied into a staging buffer; a process beside it seals, writes
and hashes them in the background. Restoring is a vote: a checkpoint is loaded only when every rank has verified the bytes it reads.
"""

from __future__ import annotations

import contextlib
import os
import sys
import threading
import time
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any, Literal

from keepstep.checkpoint.format.layout import FolderName, check_run_id
from keepstep.checkpoint.restore.guard import Guard
from keepstep.checkpoint.restore.vote import Life, Restore, restore
from keepstep.checkpoint.save.saver import Outcome, SaveJob, Saver, folder_path
from keepstep.checkpoint.save.slots import Slots
from keepstep.checkpoint.save.writerclient import ImageWriter, WriterClient
from keepstep.checkpoint.save.writerthread import ThreadWriter
from keepstep.checkpoint.storage.memory import MemorySource
from keepstep.checkpoint.storage.posix import PosixRoot
from keepstep.checkpoint.storage.source import StoreOptions, open_root, store_options
from keepstep.checkpoint.storage.targets import Fault
from keepstep.checkpoint.trust.manifest import Manifest, plain_metrics
from keepstep.checkpoint.trust.policy import (
    TrustOptions,
    TrustPolicy,
    check_signer_is_trusted,
    load_policy,
    load_signer,
    merge_options,
    options_from_environment,
)
from keepstep.checkpoint.trust.signers import Signer
from keepstep.goodput.advice import MAX_INTERVAL_S, MIN_INTERVAL_S
from keepstep.records import frames
from keepstep.records.errors import ChannelError, ConfigError, StorageError
from keepstep.trainer.arguments import check_cadence, check_choice, memory_wanted, per_rank_names, steps_of
from keepstep.trainer.cadence import open_cadence
from keepstep.trainer.channel import AgentChannel, Channel, ScopedChannel, scoped
from keepstep.trainer.keeper import Keeper
from keepstep.trainer.runlike import DecisionLike, RunLike
from keepstep.trainer.staging import Stager, Staging
from keepstep.trainer.tiers import UploadLane, busy_policy, write_delay

SAVE_FACTOR = 1.5
"""A save is expected to take at most this times the median of the measured ones."""
MEMORY_SHARE = 0.005
"""Without a cadence of its own the memory tier may block training for this share of the time."""
WARM_UP_TIMEOUT_S = 60.0
PRUNE_TIMEOUT_S = 30.0


class Checkpointer:
    """Saves and restores `state`.

    Entries of `state` are objects with state_dict and load_state_dict (modules, optimizers, schedulers, scalers, loaders; the
    keys are those the object itself uses, so a module wrapped in DDP keeps its "module." prefix), or plain values: tensors,
    numpy arrays, numbers, bool, None, str, bytes, list, tuple, dict. A plain value's restored value is
    `checkpointer.state[name]`; assign there what the next save is to hold. Entries in `per_rank` (by default "loader") and the
    random state are saved for each rank; everything else belongs to all ranks together: plain tensors must be the same on all of
    them and are written once, DTensors (FSDP2, tensor parallel) are written shard by shard and may come back on another mesh or
    number of ranks.
    """

    def __init__(
        self,
        root: str | os.PathLike[str],
        state: dict[str, Any],
        *,
        every_steps: int | None = None,
        every_seconds: float | None = None,
        max_interval_s: float = MAX_INTERVAL_S,
        memory_every_steps: int | None = None,
        per_rank: Iterable[str] | None = None,
        on_busy: Literal["wait", "skip"] | None = None,
        rng_on_reshard: Literal["refuse", "reseed"] = "refuse",
        unsigned: bool = False,
        trust: TrustOptions | None = None,
        keep: str | None = None,
        run_id: str | None = None,
        timeout_s: float = 600.0,
        max_failures: int = 3,
        writer: Literal["process", "thread"] = "process",
        staging_bytes: int | None = None,
        memory: bool | None = None,
        store: StoreOptions | None = None,
        upload_root: str | None = None,
        upload_every: float | str | None = None,
        upload_close_s: float = 60.0,
        stagger_s: float = 0.0,
        run: RunLike | None = None,
    ) -> None:
        """`root`: a folder, or an object store (s3://bucket/prefix, gs://, az://) reached with `store`, and where that says
        nothing by the environment (KEEPSTEP_STORE_*, see keepstep.checkpoint.storage.source).

        `every_steps`: save at multiples of it, `every_seconds`: by time; with neither at the interval that the measured cost of a
        save and the failure rate recommend (`keepstep ckpt interval` explains it), never longer than `max_interval_s`.
        `memory_every_steps`: keep an image in the nodes' memory at multiples of it; by default as often as costs half a percent of
        the time, where a launcher keeps it (`memory` False: never). `on_busy`: what a save does that falls due while one is in
        flight (default: KEEPSTEP_ON_BUSY, else "wait"). `rng_on_reshard`: what becomes of the random state on another number of
        ranks. `trust`: who signs and whose checkpoints count, beside what the launcher's flags say. `keep`: delete what this policy
        does not keep, after each commit
        (`keepstep ckpt prune` has the rules; by default nothing is deleted here); in a folder only. `run_id`: restore only
        checkpoints of that run (default: of any run under `root`). `timeout_s` bounds how long ranks wait for one another in a
        save or a restore. `max_failures` failed saves in a row make the next one raise StorageError. `writer`: where images are
        written from. `staging_bytes`: memory a rank may take for staging buffers, beside what the host and its cgroup leave; an
        image that does not fit is written block by block while training waits.
        `upload_root`: an object store that committed checkpoints are copied to from the folder `root`, in the
        background, at most one in `upload_every` (seconds, "30m", "1h"; by default each); restores look there too. `close` waits
        `upload_close_s` for them. `stagger_s`: ranks begin to write spread over so long. Raises ConfigError for a bad argument.
        """
        if text := os.environ.get(frames.ENV_CKPT_EVERY_STEPS):
            every_steps, every_seconds = steps_of(text), None
        check_cadence(every_steps, every_seconds, memory_every_steps)
        check_choice("rng_on_reshard", rng_on_reshard, ("refuse", "reseed"))
        check_choice("writer", writer, ("process", "thread"))
        self._per_rank = per_rank_names(per_rank, state)
        if run is None:
            from keepstep.trainer.run import current

            run = current()
        if other := os.environ.get(frames.ENV_CKPT_ROOT):
            root, upload_root = f"{other}.{len(run.checkpointers)}" if run.checkpointers else other, None
        store = store_options(store)
        self._root = open_root(os.fspath(root), store)
        self.state = state
        self._run: RunLike = run
        self._every_steps = every_steps
        self._every_seconds = every_seconds
        self._cadence = open_cadence(max_s=max_interval_s, min_s=min(MIN_INTERVAL_S, max_interval_s))
        self._memory_every_steps = memory_every_steps
        self._on_busy = busy_policy(on_busy)
        self._rng_on_reshard = rng_on_reshard
        given = trust or TrustOptions(unsigned=unsigned)
        self._trust = merge_options(given, options_from_environment())
        self._only_run = None if run_id is None else check_run_id(run_id)
        self._timeout_s = timeout_s
        self._max_failures = max_failures
        self._life: Life | None = None
        self._keeper = None if keep is None else Keeper(self._root, keep)
        self._signer: Signer | None = None
        self._policy: TrustPolicy | None = None
        self._guard: Guard | None = None
        self._last_keep_s = time.monotonic()
        self._block_s = 0.0
        self._closed = self._warm = False
        self.skipped = 0
        """Saves that were left out because one was in flight."""
        check_run_id(run.run_id)
        self._memory = memory_wanted(memory, run.channel)
        self._join(run, staging_bytes)
        self._writer: ImageWriter = WriterClient() if writer == "process" else ThreadWriter()
        self._uploads: UploadLane | None = None
        if upload_root is not None:
            self._uploads = UploadLane(
                self._channel,
                self._root,
                open_root(upload_root, store),
                rank=run.rank,
                world_size=run.world_size,
                every=upload_every,
                close_s=upload_close_s,
                may_publish=run.check_lease,
            )
        self._saver = Saver(
            self._channel,
            self._root,
            self._writer,
            rank=run.rank,
            world_size=run.world_size,
            timeout_s=timeout_s,
            may_commit=run.check_lease,
            on_commit=self._note_commit,
            on_done=self._note_done,
            delay_s=write_delay(run.rank, run.world_size, stagger_s, timeout_s),
            uploader=self._uploads.uploader if self._uploads else None,
        )
        if self._trust.unsigned and run.rank == 0:
            print(
                f"keepstep: WARNING: checkpoints in {self._root.where} are NOT SIGNED (unsigned=True): "
                "whoever can write there can replace them",
                file=sys.stderr,
                flush=True,
            )

    def _join(self, run: RunLike, staging_bytes: int | None) -> None:
        """Take a place among the Checkpointers of this process: keys, buffers and proposals of its own."""
        number = len(run.checkpointers)
        run.checkpointers.append(self)
        self._propose_before, self._keep_before = run.propose_save, run.propose_keep
        run.propose_save, run.propose_keep = self._propose, self._propose_keep
        self._channel: Channel | ScopedChannel = scoped(run.channel, f"ckpt-{number}") if number else run.channel
        slots = Slots(f"ckpt-{number}", self._channel.buffer, 2 if self._memory else 1)
        self._stager = Stager(slots, self._per_rank, run.rank, run.world_size)
        held = isinstance(run.channel, AgentChannel)
        self._staging = Staging(self._channel, self._stager, memory=self._memory, held=held, limit_bytes=staging_bytes)

    @property
    def root(self) -> str:
        """Where checkpoints last: a path or a URL."""
        return self._root.where

    # ---- restore

    def restore(self, *, fresh_start: bool = False) -> int:
        """Load the newest checkpoint that every rank can verify; return its step, 0 on an empty root.

        One that cannot be verified is quarantined, and the next older one is tried. With `fresh_start` (or KEEPSTEP_FRESH_START=1)
        nothing is loaded and step 0 begins a new lineage, which later cycles of the same attempt then continue. Raises
        RefuseToStartError (exit 42) when the root holds checkpoints but none is valid, or what it holds does not fit this script
        or number of ranks; ChannelError when ranks do not answer in time.
        """
        if self._life is not None:
            raise ConfigError("Checkpointer: restore() was already called")
        fresh = fresh_start or os.environ.get(frames.ENV_FRESH_START) == "1"
        memory = MemorySource(self._channel) if self._memory else None
        with self._run.phase("restore"):
            task = Restore(
                roots=(self._root, self._uploads.root) if self._uploads else (self._root,),
                memory=memory,
                channel=self._channel,
                rank=self._run.rank,
                world_size=self._run.world_size,
                run_id=self._run.run_id,
                attempt=self._run.attempt,
                cycle=self._run.cycle,
                only_run=self._only_run,
                policy=self._open_trust() if self._run.rank == 0 else None,
                per_rank=self._per_rank,
                rng_on_reshard=self._rng_on_reshard,
                timeout_s=self._timeout_s,
            )
            outcome = restore(task, self.state, fresh_start=fresh)
            self._life, self._guard = outcome.life, task.guard
        life = outcome.life
        if self._uploads:
            self._uploads.guard, self._uploads.restored_step = task.upload_guard, life.restored_step
        if life.checkpoint is not None:
            durable = outcome.tier in ("disk", "object")
            self._saver.continue_from(life.restored_step, life.checkpoint, life.parent, durable=durable)
            if memory is not None and not durable and (slot := memory.slot_read(life.checkpoint, self._run.rank)):
                # The next image must not be staged over the only one there is.
                self._stager.slots.note_kept(slot, life.restored_step)
        self._begin_interval()
        self._run.note_restored(life.restored_step)
        return life.restored_step

    def _open_trust(self) -> TrustPolicy:
        """Rank 0's policy; who signs is kept: a key file that vanishes later must not start another key in the middle."""
        self._policy = policy = load_policy(self._trust)
        self._signer = load_signer(self._trust)
        if self._signer is not None:
            check_signer_is_trusted(self._signer, policy)
        return policy

    def _warm_up(self) -> None:
        """Have the writer ready before the first save; beside the second step, so that a restart is not the longer for it."""
        if self._warm or self._closed:
            return
        self._warm = True

        def get_ready() -> None:
            with contextlib.suppress(StorageError, ConfigError):  # then the first save says so
                self._writer.ready(WARM_UP_TIMEOUT_S)

        with contextlib.suppress(StorageError):
            if isinstance(self._writer, WriterClient):
                self._writer.start()  # from this thread: the process ends with the thread that started it
        threading.Thread(target=get_ready, name="keepstep-warm-up", daemon=True).start()

    # ---- save

    def maybe_save(self, step: int, *, metrics: Mapping[str, float] | None = None) -> bool:
        """Save when it is time, or when the job is asked to stop; return whether a save was begun, alike on every rank.

        `step` is the number of completed steps. A job that is asked to stop saves if the measured time from the begin of a save
        to its commit fits into what is left of the scheduler's notice; otherwise it says so and leaves the save out. Blocks for
        staging only (and, with on_busy="wait", for a save still in flight). A failed save is reported and training goes on.
        Between saves an image is kept in the nodes' memory when that is due. Raises StorageError after `max_failures` failed
        saves in a row, ConfigError when a value cannot be saved.
        """
        self._warm_up()
        decision = self._run.decision_at(step)
        if decision is not None and decision.stop:
            due = decision.save
            if not due and self._run.rank == 0:
                print(
                    f"keepstep: stopping after step {step} without a save: {decision.why}", file=sys.stderr, flush=True
                )
            return self.save(step, metrics=metrics) if due else False
        if self._every_steps is not None:
            due = step > 0 and step % self._every_steps == 0
        else:
            due = decision is not None and decision.save
        if due and not self._skips(step):
            return self.save(step, metrics=metrics)
        if self._memory and not due and self._keep_due(step, decision):
            self._keep(step)
        return False

    def _skips(self, step: int) -> bool:
        """With on_busy="skip", whether the save of `step` is left out; the first rank that asks says so for all."""
        if self._on_busy != "skip" or not self._run.agree(f"ckpt/busy/{step}", self._saver.in_flight()):
            return False
        self.skipped += 1
        if self._run.rank == 0:
            with contextlib.suppress(ChannelError):
                self._run.channel.report("ckpt_skipped", {"step": step, "skipped": self.skipped})
        return True

    def save(self, step: int, *, metrics: Mapping[str, float] | None = None) -> bool:
        """Save now, whatever the cadence; still in the background. Returns False when `step` is already saved.

        `metrics` are written into the manifest, for retention rules such as best:loss. Every rank must call it at the same step.
        Raises as `maybe_save` does.
        """
        if self._life is None:
            raise ConfigError(
                "Checkpointer: call restore() before the first save; it also tells an empty root from a lost one"
            )
        if self._closed:
            raise ConfigError("Checkpointer: closed")
        self._warm_up()
        with self._run.section("checkpoint"):
            begun = self._save(step, time.monotonic_ns(), metrics)
        if begun and frames.ENV_RESUME_CHECK in os.environ and self._run.checkpointers[0] is self:
            from keepstep.trainer.observed import after_save

            after_save(self, step)
        return begun

    def _save(self, step: int, begin_ns: int, metrics: Mapping[str, float] | None) -> bool:
        self.wait()
        if step == self.last_committed_step:
            return False
        if self._saver.failures_in_row >= self._max_failures:
            raise StorageError(
                f"{self._saver.failures_in_row} saves in a row failed under {self.root}; "
                f"the last one: {self._saver.last_error}"
            )
        self._start(step, metrics, durable=True)
        self._note_block(step, begin_ns)
        self._begin_interval()
        return True

    def _note_commit(self, checkpoint: str, manifest: Manifest) -> None:
        """Rank 0 has committed (called on the save's thread): the mark of the root moves."""
        if self._guard is not None and self._life is not None:
            self._guard.committed(checkpoint, manifest, self._life.restored_step)
        if self._keeper is not None and self._policy is not None:
            self._keeper.after_commit(self._policy)

    def _note_done(self, outcome: Outcome, block_s: float) -> None:
        """A save is over (called on its thread): what it cost moves the interval."""
        if outcome.error is not None or not outcome.durable or self._every_steps or self._every_seconds:
            return
        before_s = self._cadence.advised_s()
        if self._cadence.note_save(time.monotonic(), block_s, outcome.persist_ns / 1e9) and self._run.rank == 0:
            print(f"keepstep: {self._cadence.describe()}", file=sys.stderr, flush=True)
            self._run.channel.report("advised", self._cadence.advised_attrs(before_s))

    def _begin_interval(self) -> None:
        """Training goes on: the time to the next save counts from here."""
        self._last_save_s = self._last_keep_s = time.monotonic()
        self._cadence.begin(self._last_save_s)

    def _keep(self, step: int) -> None:
        """Keep an image of this step in memory; the save before must be over, which it is but for moments."""
        if self._life is None or self._closed:
            return
        begin_ns = time.monotonic_ns()
        with self._run.section("checkpoint"):
            self.wait()
            self._start(step, None, durable=False)
            self._last_keep_s = time.monotonic()
            self._note_block(step, begin_ns)

    def _note_block(self, step: int, begin_ns: int) -> None:
        end_ns = time.monotonic_ns()
        self._block_s = (end_ns - begin_ns) / 1e9
        with contextlib.suppress(ChannelError):  # a lost mark is no reason to lose the training
            self._run.channel.report("ckpt_block", {"step": step, "begin_ns": begin_ns, "end_ns": end_ns})

    def _start(self, step: int, metrics: Mapping[str, float] | None, *, durable: bool) -> None:
        try:
            job = self._stage(step, time.monotonic_ns(), metrics, durable=durable)
        except (ChannelError, StorageError, OSError) as error:
            # No room to stage: a failed save, which training outlives.
            self._saver.refuse(step, str(error), durable=durable)
        except Exception as error:  # a value that cannot be saved, or a state_dict() that fails: the script's own error
            self._saver.refuse(step, f"{type(error).__name__}: {error}", durable=durable)
            raise
        else:
            job.blocked_ns = time.monotonic_ns() - job.begun_ns
            self._saver.begin(job)
            if job.written is not None:
                job.written.wait()
                job.blocked_ns = time.monotonic_ns() - job.begun_ns

    def _stage(self, step: int, begun_ns: int, metrics: Mapping[str, float] | None, *, durable: bool) -> SaveJob:
        assert self._life is not None
        may_stream = durable and isinstance(self._root, PosixRoot)
        staged = self._staging.stage(self.state, self._root.where, may_stream=may_stream)
        run = self._run
        return SaveJob(
            name=FolderName(step, run.cycle, run.attempt, 0, run.run_id),
            slot=staged.slot,
            stream=staged.stream,
            written=None if staged.stream is None else threading.Event(),
            file_bytes=staged.file_bytes,
            index=staged.index,
            plan=staged.plan,
            life=self._life,
            signer=self._signer,
            begun_ns=begun_ns,
            durable=durable,
            memory=self._staging.memory_of(staged),
            metrics=plain_metrics(metrics),
        )

    @property
    def last_committed_step(self) -> int | None:
        """Step of the newest checkpoint that was committed or restored here; None before the first."""
        return self._saver.committed_step

    def wait(self) -> None:
        """Wait until the save in flight is committed or has failed; returns at once when there is none."""
        outcome = self._saver.wait()
        if outcome is not None and outcome.error is not None and self._run.rank == 0:
            what = "save" if outcome.durable else "image in memory"
            print(f"keepstep: {what} of step {outcome.step} failed: {outcome.error}", file=sys.stderr, flush=True)

    def close(self) -> None:
        """Wait for the save in flight, and some time for uploads; let the staging buffers go. Safe to call twice."""
        if self._closed:
            return
        self._closed = True
        with self._run.phase("close"):
            self.wait()
            if self._keeper is not None:
                self._keeper.wait(PRUNE_TIMEOUT_S)
            if self._uploads:
                self._uploads.close(self._run.notice_left_s(), self._run.rank == 0)
        self._writer.close()
        self._staging.slots.close()

    # ---- for the run object

    def _propose(self, step: int) -> bool:
        """Whether this rank, asked first, wants a save at `step`."""
        if self._propose_before is not None and self._propose_before(step):
            return True
        if self._every_steps is not None or self._life is None or self._closed:
            return False
        now_s = time.monotonic()
        if self._every_seconds is not None:
            return now_s - self._last_save_s >= self._every_seconds
        return self._cadence.due(now_s)

    def _propose_keep(self, step: int) -> bool:
        """Whether this rank, asked first, wants an image kept in memory at `step`."""
        if self._keep_before is not None and self._keep_before(step):
            return True
        if not self._memory or self._memory_every_steps is not None or self._life is None or self._closed:
            return False
        if self._saver.in_flight() or not self._block_s:  # what it costs is known from the first save on
            return False
        return time.monotonic() - self._last_keep_s >= self._block_s / MEMORY_SHARE

    def _keep_due(self, step: int, decision: DecisionLike | None) -> bool:
        if self._memory_every_steps is None:
            return decision is not None and decision.keep
        if step <= 0 or step % self._memory_every_steps:
            return False
        return not self._run.agree(f"ckpt/busy/{step}", self._saver.in_flight())

    def save_needs_s(self) -> float | None:
        """Seconds a save begun now may take to its commit, with what one in flight still needs; None before the first."""
        median_s = self._saver.median_s()
        if median_s is None:
            return None
        return SAVE_FACTOR * median_s + self._saver.in_flight_s(SAVE_FACTOR)

    def inject_fault(self, fault: Fault) -> None:
        """The write of this rank's next save meets `fault` (`--inject storage-error`, `storage-stall`)."""
        self._saver.fault = fault

    def damage_images(self) -> None:
        """Flip a bit in every image of this rank that is kept in memory (for the injection of that name)."""
        for slot in self._staging.slots.all:
            if slot.kept is not None and slot.memory is not None:
                slot.memory[100] ^= 0x10  # in the header: a buffer may be larger than the image in it

    def newest_committed_path(self) -> Path | None:
        """Folder of the newest checkpoint this object committed or restored; None before the first, or on an object store."""
        return None if self._saver.newest is None else folder_path(self._root, self._saver.newest)
