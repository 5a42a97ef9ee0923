"""The background half of a save: write this rank's file, tell rank 0, and let rank 0 commit for all."""

from __future__ import annotations

import contextlib
import statistics
import threading
import time
from collections import deque
from collections.abc import Callable
from pathlib import Path
from typing import Any

import msgspec

from keepstep.checkpoint.exchange import Exchange
from keepstep.checkpoint.format.index import Index
from keepstep.checkpoint.format.layout import INDEX_NAME, FolderName, rank_file_name
from keepstep.checkpoint.format.plan import StoredTensor, plan_digest
from keepstep.checkpoint.format.shard import build_header
from keepstep.checkpoint.restore.vote import Life
from keepstep.checkpoint.save.commit import commit, make_folder, write_latest, writer_facts
from keepstep.checkpoint.storage.writer import FileFact, write_file
from keepstep.records.errors import ChannelError, StorageError


class SaveJob(msgspec.Struct, kw_only=True):
    """One staged save of this rank. `data` is the staging buffer: it is not touched again before the save is over.

    What costs time but needs no live tensor (header, index) is made from it on the saving thread.
    """

    root: Path
    name: FolderName
    entries: dict[str, StoredTensor]
    data: memoryview
    index: Index
    life: Life
    key: Any
    begun_ns: int
    """When staging began (CLOCK_MONOTONIC)."""


class Outcome(msgspec.Struct, frozen=True, kw_only=True):
    """How a save ended: `error` None means committed at `path`, whose manifest has SHA-256 `digest`."""

    step: int
    path: Path | None = None
    digest: str | None = None
    error: str | None = None
    persist_ns: int = 0


def _write_own(job: SaveJob, path: Path) -> FileFact:
    return write_file(path, [build_header(job.entries, {"format": "pt"}), job.data])


class Saver:
    """Carries out one save at a time on a thread of its own.

    The thread is not a daemon: a script that ends right after a save still commits it.
    """

    def __init__(
        self,
        channel: Exchange,
        *,
        rank: int,
        world_size: int,
        timeout_s: float,
        may_commit: Callable[[], None] = lambda: None,
    ) -> None:
        """`may_commit` is called right before the marker is written and raises StorageError when it must not be."""
        self._channel = channel
        self._rank = rank
        self._world_size = world_size
        self._timeout_s = timeout_s
        self._thread: threading.Thread | None = None
        self._outcome: Outcome | None = None
        self._number = 0
        self._may_commit = may_commit
        self._took_s: deque[float] = deque(maxlen=20)
        self._begun_ns = 0
        self.parent: str | None = None
        self.newest: Path | None = None
        self.committed_step: int | None = None
        self.failures_in_row = 0
        self.last_error: str | None = None

    def continue_from(self, step: int, path: Path, digest: str | None) -> None:
        """The checkpoint at `path`, whose manifest has SHA-256 `digest`, is the newest: the next one names it as parent."""
        self.parent, self.newest, self.committed_step = digest, path, step

    def begin(self, job: SaveJob) -> None:
        """Start the save; the one before must have been waited for."""
        assert self._thread is None, "one save in flight"
        self._number += 1
        self._begun_ns = job.begun_ns
        self._thread = threading.Thread(target=self._work, args=(job, self._number), name="keepstep-save")
        self._thread.start()

    def refuse(self, step: int, error: str) -> None:
        """This rank cannot take part in the save of `step` that begins: tell the others, count it as failed."""
        self._number += 1
        outcome = Outcome(step=step, error=f"rank {self._rank}: {error}")
        key = "folder" if self._rank == 0 else f"rank/{self._rank}"
        with contextlib.suppress(ChannelError):
            self._channel.set(f"ckpt/{self._number}/{key}", {"error": error})
        if self._rank == 0:
            self._report(outcome)
        self._outcome = outcome

    def median_s(self) -> float | None:
        """Median time from staging to commit of the latest committed saves; None before the first."""
        took = list(self._took_s)
        return statistics.median(took) if took else None

    def in_flight_s(self, expected_s: float) -> float:
        """Seconds until the save in flight is over when it takes `expected_s` in all; 0 when there is none."""
        if self._thread is None or not self._thread.is_alive():
            return 0.0
        return max(0.0, expected_s - (time.monotonic_ns() - self._begun_ns) / 1e9)

    def wait(self) -> Outcome | None:
        """Wait for the save in flight; its outcome, once, or None when there is none."""
        if self._thread is not None:
            self._thread.join()
            self._thread = None
        outcome, self._outcome = self._outcome, None
        if outcome is None:
            return None
        if outcome.error is None:
            self.failures_in_row, self.last_error = 0, None
        else:
            self.failures_in_row += 1
            self.last_error = outcome.error
        return outcome

    def _work(self, job: SaveJob, number: int) -> None:
        begin_ns = time.monotonic_ns()
        try:
            outcome = self._lead(job, number, begin_ns) if self._rank == 0 else self._follow(job, number)
        except Exception as error:  # whatever went wrong, training goes on and all ranks learn of it
            outcome = Outcome(step=job.name.step, error=f"rank {self._rank}: {type(error).__name__}: {error}")
        if outcome.path is not None:
            self._took_s.append((time.monotonic_ns() - job.begun_ns) / 1e9)
            self.continue_from(outcome.step, outcome.path, outcome.digest)
        if self._rank == 0:
            self._report(outcome)
        self._outcome = outcome

    def _report(self, outcome: Outcome) -> None:
        with contextlib.suppress(ChannelError):
            if outcome.error is None and outcome.path is not None:
                fields = {"step": outcome.step, "checkpoint": outcome.path.name, "persist_ns": outcome.persist_ns}
                self._channel.report("committed", fields)
            else:
                self._channel.report("ckpt_failed", {"step": outcome.step, "error": outcome.error})

    # ---- rank 0

    def _lead(self, job: SaveJob, number: int, begin_ns: int) -> Outcome:
        step = job.name.step
        try:
            folder = make_folder(job.root, job.name)
        except StorageError as error:
            self._channel.set(f"ckpt/{number}/folder", {"error": str(error)})
            return Outcome(step=step, error=str(error))
        self._channel.set(f"ckpt/{number}/folder", {"name": folder.name})
        try:
            digest = self._publish(job, folder, number)
        except Exception as error:
            text = str(error) or type(error).__name__
            self._channel.set(f"ckpt/{number}/result", {"error": text})
            return Outcome(step=step, error=text)
        # The commit is durable; a channel that fails now changes nothing about that.
        with contextlib.suppress(ChannelError):
            self._channel.set(f"ckpt/{number}/result", {"digest": digest})
        write_latest(job.root, step)
        return Outcome(step=step, path=folder, digest=digest, persist_ns=time.monotonic_ns() - begin_ns)

    def _publish(self, job: SaveJob, folder: Path, number: int) -> str:
        own = _write_own(job, folder / rank_file_name(0, self._world_size))
        files = [own, *self._collect(job, number)]
        files.append(write_file(folder / INDEX_NAME, [msgspec.json.encode(job.index)]))
        if not self._channel.grant(folder.name, job.name.step):
            raise StorageError(f"{folder.name}: the launcher did not grant the commit (this cycle is over)")
        life = job.life
        facts = writer_facts(
            job.name,
            world=self._world_size,
            parent=self.parent,
            restored_step=life.restored_step,
            restored_from=life.checkpoint,
            scope=life.scope,
            life_started_ns=life.started_ns,
        )
        return commit(folder, files, facts, job.key, may_publish=self._may_commit).digest

    def _collect(self, job: SaveJob, number: int) -> list[FileFact]:
        """The files of all other ranks. Raises StorageError as soon as one rank failed or holds another state."""
        deadline = time.monotonic() + self._timeout_s
        files = []
        plan = plan_digest(job.index.tensors, job.index.aliases)
        for rank in range(1, self._world_size):
            key = f"ckpt/{number}/rank/{rank}"
            value = self._channel.wait([key], max(0.0, deadline - time.monotonic()))[key]
            if "error" in value:
                raise StorageError(f"rank {rank}: {value['error']}")
            if value["plan"] != plan:
                raise StorageError(
                    f"rank {rank} holds other tensors than rank 0 (names, shapes or types differ); "
                    "give the names of what differs as per_rank"
                )
            expected = rank_file_name(rank, self._world_size)
            file = msgspec.convert(value, FileFact)
            if file.name != expected:
                raise StorageError(f"rank {rank} wrote {file.name}, expected {expected}")
            files.append(file)
        return files

    # ---- the other ranks

    def _follow(self, job: SaveJob, number: int) -> Outcome:
        step = job.name.step
        key = f"ckpt/{number}/folder"
        place = self._channel.wait([key], self._timeout_s)[key]
        if "error" in place:
            return Outcome(step=step, error=place["error"])
        folder = job.root / place["name"]
        report = f"ckpt/{number}/rank/{self._rank}"
        try:
            file = _write_own(job, folder / rank_file_name(self._rank, self._world_size))
        except Exception as error:
            self._channel.set(report, {"error": str(error) or type(error).__name__})
        else:
            self._channel.set(
                report, {**msgspec.to_builtins(file), "plan": plan_digest(job.index.tensors, job.index.aliases)}
            )
        result_key = f"ckpt/{number}/result"
        # Rank 0 gives up after its own time limit and then says so; wait a little longer than that.
        result = self._channel.wait([result_key], 2 * self._timeout_s)[result_key]
        if "error" in result:
            return Outcome(step=step, error=result["error"])
        return Outcome(step=step, path=folder, digest=result["digest"])
