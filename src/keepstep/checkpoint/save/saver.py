"""The background half of a save: seal this rank's image, keep it, write it, tell rank 0, and let rank 0 commit for all."""

from __future__ import annotations

import contextlib
import hashlib
import statistics
import threading
import time
from collections import deque
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import msgspec

from keepstep.checkpoint.exchange import Exchange
from keepstep.checkpoint.format.blocks import fingerprint_blocks
from keepstep.checkpoint.format.index import Index
from keepstep.checkpoint.format.layout import INDEX_NAME, FolderName, rank_file_name
from keepstep.checkpoint.restore.vote import Life
from keepstep.checkpoint.save.commit import commit, memory_marker, write_tier_note, writer_facts
from keepstep.checkpoint.save.gather import gather, tell_failure
from keepstep.checkpoint.save.memoryset import ImageFact, MemorySet, fingerprint_fact
from keepstep.checkpoint.save.sealing import Sealed
from keepstep.checkpoint.save.slots import Slot
from keepstep.checkpoint.save.uploader import Upload, Uploader
from keepstep.checkpoint.save.writerclient import ImageWriter
from keepstep.checkpoint.storage.posix import PosixRoot
from keepstep.checkpoint.storage.source import Root
from keepstep.checkpoint.storage.targets import Fault, PosixFile, meet_fault
from keepstep.checkpoint.storage.writer import FileFact
from keepstep.checkpoint.trust.manifest import Facts, Manifest
from keepstep.checkpoint.trust.signers import Signer
from keepstep.records.errors import ChannelError, StorageError


class SaveJob(msgspec.Struct, kw_only=True):
    """One staged save of this rank. The slot is not touched again before the save is over.

    `stream` writes the image to a path from the training's own tensors when it could not be staged: then training waits
    for `written`.

    `durable`: written to the root; otherwise it is kept in memory only. `memory`: what keeps it there, None for not at all. `plan`
    is the digest of what all ranks are to save. `fault`: what this rank's write is to meet (`--inject`).
    """

    name: FolderName
    slot: Slot | None
    file_bytes: int
    index: Index
    plan: str
    life: Life
    signer: Signer | None
    begun_ns: int
    """When staging began (CLOCK_MONOTONIC)."""
    blocked_ns: int = 0
    """How long training stood still for the staging."""
    durable: bool = True
    memory: MemorySet | None = None
    metrics: Mapping[str, float] | None = None
    stream: Callable[[Path], FileFact] | None = None
    written: threading.Event | None = None
    fault: Fault | None = None


class Outcome(msgspec.Struct, frozen=True, kw_only=True):
    """How a save ended. Without `error`: as folder `checkpoint`, committed (its manifest has SHA-256 `digest`) when it was durable.

    `kept`: the memory tier holds all of it. `persist_ns`: time from the begin of the background half to the commit.
    """

    step: int
    durable: bool
    checkpoint: str | None = None
    digest: str | None = None
    error: str | None = None
    kept: bool = False
    persist_ns: int = 0


class Saver:
    """Carries out one save at a time on a thread of its own.

    The thread is not a daemon: a script that ends right after a save still commits it.
    """

    def __init__(
        self,
        channel: Exchange,
        root: Root,
        writer: ImageWriter,
        *,
        rank: int,
        world_size: int,
        timeout_s: float,
        may_commit: Callable[[], None] = lambda: None,
        on_commit: Callable[[str, Manifest], None] = lambda _folder, _manifest: None,
        on_done: Callable[[Outcome, float], None] = lambda _outcome, _block_s: None,
        delay_s: float = 0.0,
        uploader: Uploader | None = None,
    ) -> None:
        """`may_commit` is called right before the marker is written and raises StorageError when it must not be.

        `on_commit` is called on rank 0 with folder and manifest once they are committed, `on_done` on every rank at the end of a
        save with the seconds for which it blocked training. `delay_s` holds back this rank's write, never the staging, so that
        not all ranks of a large job write at once. `uploader` copies what was committed to a further place.
        """
        self._channel = channel
        self._root = root
        self._writer = writer
        self._rank = rank
        self._world_size = world_size
        self._timeout_s = timeout_s
        self._thread: threading.Thread | None = None
        self._outcome: Outcome | None = None
        self._number = 0
        self._may_commit = may_commit
        self._on_commit = on_commit
        self._on_done = on_done
        self._delay_s = delay_s
        self._uploader = uploader
        self._took_s: deque[float] = deque(maxlen=20)
        self._kept_s: deque[float] = deque(maxlen=20)
        self._durable = True
        """Whether the save in flight is."""
        self._begun_ns = 0
        self.parent: str | None = None
        self.newest: str | None = None
        self.committed_step: int | None = None
        self.failures_in_row = 0
        self.last_error: str | None = None
        self.fault: Fault | None = None
        """What the write of the next save is to meet."""

    def continue_from(self, step: int, checkpoint: str, digest: str | None, *, durable: bool) -> None:
        """`checkpoint`, whose manifest has SHA-256 `digest`, is the newest: the next one names it as parent."""
        self.parent = digest
        if durable:
            self.newest, self.committed_step = checkpoint, step

    def begin(self, job: SaveJob) -> None:
        """Start the save; the one before must have been waited for."""
        assert self._thread is None, "one save in flight"
        self._number += 1
        self._begun_ns, self._durable = job.begun_ns, job.durable
        if job.slot is not None:
            job.slot.busy, job.slot.kept = True, None
        if job.durable:
            job.fault, self.fault = self.fault, None
        self._thread = threading.Thread(target=self._work, args=(job, self._number), name="keepstep-save")
        self._thread.start()

    def refuse(self, step: int, error: str, *, durable: bool) -> None:
        """This rank cannot take part in the save of `step` that begins: tell the others, count it as failed."""
        self._number += 1
        outcome = Outcome(step=step, durable=durable, error=f"rank {self._rank}: {error}")
        self._tell_failure(self._number, error)
        if self._rank == 0:
            self._report(outcome)
        self._outcome = outcome

    def median_s(self) -> float | None:
        """Median time from staging to commit of the latest committed saves; None before the first."""
        took = list(self._took_s)
        return statistics.median(took) if took else None

    def in_flight(self) -> bool:
        """True while a save is being carried out."""
        return self._thread is not None and self._thread.is_alive()

    def in_flight_s(self, factor: float) -> float:
        """Seconds until the save in flight is over when it takes `factor` times the median of its kind; 0 when there is none."""
        took = list(self._took_s if self._durable or not self._kept_s else self._kept_s)
        if not self.in_flight() or not took:
            return 0.0
        expected_s = factor * statistics.median(took)
        return max(0.0, expected_s - (time.monotonic_ns() - self._begun_ns) / 1e9)

    def wait(self) -> Outcome | None:
        """Wait for the save in flight; its outcome, once, or None when there is none."""
        if self._thread is not None:
            self._thread.join()
            self._thread = None
        outcome, self._outcome = self._outcome, None
        if outcome is None or not outcome.durable:
            return outcome
        if outcome.error is None:
            self.failures_in_row, self.last_error = 0, None
        else:
            self.failures_in_row += 1
            self.last_error = outcome.error
        return outcome

    def _work(self, job: SaveJob, number: int) -> None:
        try:
            outcome = self._lead(job, number) if self._rank == 0 else self._follow(job, number)
        except Exception as error:  # whatever went wrong, training goes on and all ranks learn of it
            text = str(error) or type(error).__name__
            self._tell_failure(number, text)
            where = "" if self._rank == 0 else f"rank {self._rank}: "  # rank 0's error names the rank that failed
            outcome = Outcome(step=job.name.step, durable=job.durable, error=f"{where}{text}")
        if outcome.checkpoint is not None:
            took = self._took_s if job.durable else self._kept_s
            took.append((time.monotonic_ns() - job.begun_ns) / 1e9)
        if outcome.checkpoint is not None and job.durable:
            self.continue_from(outcome.step, outcome.checkpoint, outcome.digest, durable=True)
        if job.slot is not None:
            job.slot.busy, job.slot.kept = False, outcome.step if outcome.kept else None
        if job.written is not None:
            job.written.set()  # also when it failed before it came to writing
        if self._rank == 0:
            self._report(outcome)
        self._outcome = outcome
        self._on_done(outcome, job.blocked_ns / 1e9)

    def _tell_failure(self, number: int, error: str) -> None:
        """Tell the other ranks that this one failed, wherever they wait for it."""
        keys = ("folder", "result") if self._rank == 0 else (f"sealed/{self._rank}", f"rank/{self._rank}", "failed")
        tell_failure(self._channel, f"ckpt/{number}", keys, self._rank, error)

    def _report(self, outcome: Outcome) -> None:
        fields: dict[str, Any] = {"step": outcome.step}
        kind = "committed" if outcome.durable else "kept"
        if outcome.error is None:
            fields |= {"checkpoint": outcome.checkpoint, "persist_ns": outcome.persist_ns, "kept": outcome.kept}
            fields["tier"] = self._root.tier if outcome.durable else "shm"
        else:
            kind = "ckpt_failed"
            fields |= {"error": outcome.error, "tier": self._root.tier if outcome.durable else "shm"}
        with contextlib.suppress(ChannelError):
            self._channel.report(kind, fields)

    # ---- this rank's image

    def _store(self, job: SaveJob, folder: str, number: int) -> FileFact | None:
        """Seal the image, keep it, and write it when the save is durable. Raises StorageError."""
        if self._delay_s and job.durable:
            time.sleep(self._delay_s)
        name = rank_file_name(self._rank, self._world_size)
        if job.stream is not None:
            return self._stream(job.stream, job, folder, name, number)
        assert job.slot is not None

        def on_sealed(sealed: Sealed) -> None:
            self._keep_own(job, folder, name, sealed, number)

        slot, size = job.slot, job.file_bytes
        if job.durable and isinstance(self._root, PosixRoot):
            target = PosixFile(path=str(self._root.path.absolute() / folder / name))
            if job.fault is not None:
                self._writer.inject(job.fault, self._timeout_s)
            return self._writer.write(slot.fd, size, target, self._timeout_s, on_sealed=on_sealed)
        sealed = self._writer.seal(slot.fd, size, self._timeout_s)
        on_sealed(sealed)
        if not job.durable:
            return None
        if job.fault is not None:
            meet_fault(job.fault, f"{self._root.where}/{folder}/{name}")
        fact = self._root.put_file(folder, name, [slot.view(size)])
        if fingerprint_blocks(slot.view(size))[1] != sealed.fingerprints:
            raise StorageError(f"{name}: the staging buffer changed while it was written")
        return msgspec.structs.replace(fact, blocks=sealed.blocks)

    def _stream(
        self,
        stream: Callable[[Path], FileFact],
        job: SaveJob,
        folder: str,
        name: str,
        number: int,
    ) -> FileFact:
        assert isinstance(self._root, PosixRoot)
        with contextlib.suppress(ChannelError):
            self._channel.set(f"ckpt/{number}/sealed/{self._rank}", {"error": "the image could not be staged"})
        try:
            if job.fault is not None:
                meet_fault(job.fault, f"{self._root.where}/{folder}/{name}")
            return stream(self._root.path.absolute() / folder / name)
        finally:
            if job.written is not None:
                job.written.set()

    def _keep_own(self, job: SaveJob, folder: str, name: str, sealed: Sealed, number: int) -> None:
        """Keep the sealed image in memory and say so; that this fails is no failure of the save."""
        if job.memory is None or job.slot is None:
            return
        facts = {"run": job.name.run_id, "step": job.name.step, "cycle": job.name.cycle, "attempt": job.name.attempt}
        facts |= {"rank": self._rank, "slot": job.slot.name}
        said: dict[str, Any]
        try:
            job.memory.keep_image(folder, name, sealed.file_bytes, sealed.algorithm, sealed.fingerprints, facts)
        except (ChannelError, OSError) as error:
            said = {"error": str(error)}
        else:
            prints = hashlib.sha256(sealed.fingerprints).hexdigest()
            said = msgspec.to_builtins(
                ImageFact(size_bytes=sealed.file_bytes, algorithm=sealed.algorithm, prints_sha256=prints, plan=job.plan)
            )
        with contextlib.suppress(ChannelError):
            self._channel.set(f"ckpt/{number}/sealed/{self._rank}", said)

    # ---- rank 0

    def _lead(self, job: SaveJob, number: int) -> Outcome:
        begin_ns, step = time.monotonic_ns(), job.name.step
        folder = self._root.make_folder(job.name) if job.durable else job.name.text
        self._channel.set(f"ckpt/{number}/folder", {"name": folder})
        own = self._store(job, folder, number)
        kept = job.memory is not None and self._keep_set(job, folder, number)
        manifest = None
        if job.durable:
            assert own is not None
            manifest = self._publish(job, folder, number, own)
        elif not kept:
            raise StorageError("not all ranks could keep their image in memory")
        digest = None if manifest is None else manifest.digest
        order = self._uploader.order() if manifest is not None and self._uploader is not None else None
        # The commit is durable; a channel that fails now changes nothing about that.
        with contextlib.suppress(ChannelError):
            self._channel.set(f"ckpt/{number}/result", {"digest": digest, "kept": kept, "upload": order})
        if manifest is not None and own is not None:
            write_tier_note(self._root, folder, [self._root.tier, "shm"] if kept else [self._root.tier])
            self._root.note_latest(step)
            self._on_commit(folder, manifest)
            if self._uploader is not None:
                self._uploader.take(Upload(step=step, folder=folder, file=own, manifest=manifest), order)
        return Outcome(
            step=step,
            durable=job.durable,
            checkpoint=folder,
            digest=digest,
            kept=kept,
            persist_ns=time.monotonic_ns() - begin_ns,
        )

    def _facts(self, job: SaveJob) -> Facts:
        life = job.life
        return writer_facts(
            job.name,
            world=self._world_size,
            parent=self.parent,
            restored_step=life.restored_step,
            restored_from=life.checkpoint,
            scope=life.scope,
            life_started_ns=life.started_ns,
            metrics=job.metrics,
        )

    def _keep_set(self, job: SaveJob, folder: str, number: int) -> bool:
        """Make the memory tier's set whole: index and signed marker. False when some rank could not keep its image."""
        assert job.memory is not None
        try:
            sealed = self._collect(number, "sealed", range(self._world_size))
            facts = {rank: msgspec.convert(value, ImageFact) for rank, value in sealed.items()}
            if any(fact.plan != job.plan for fact in facts.values()):
                return False  # said by the commit, with the rank
            files = [fingerprint_fact(rank_file_name(rank, self._world_size), fact) for rank, fact in facts.items()]
            index = msgspec.json.encode(job.index)
            files.append(FileFact(name=INDEX_NAME, size_bytes=len(index), sha256=hashlib.sha256(index).hexdigest()))
            marker, data = memory_marker(folder, files, self._facts(job), facts[0].algorithm, job.signer)
            mark = {"run": job.name.run_id, "step": job.name.step, "cycle": job.name.cycle}
            job.memory.keep_bytes("index", folder, INDEX_NAME, index, mark)
            job.memory.keep_bytes("marker", folder, marker, data, mark)
        except (ChannelError, StorageError):
            return False
        return True

    def _publish(self, job: SaveJob, folder: str, number: int, own: FileFact) -> Manifest:
        others = self._collect(number, "rank", range(1, self._world_size))
        files = [own]
        for rank, value in others.items():
            if value["plan"] != job.plan:
                raise StorageError(
                    f"rank {rank} holds other tensors than rank 0 (names, shapes, types or meshes differ); "
                    "give the names of what differs as per_rank"
                )
            file, expected = msgspec.convert(value["file"], FileFact), rank_file_name(rank, self._world_size)
            if file.name != expected:
                raise StorageError(f"rank {rank} wrote {file.name}, expected {expected}")
            files.append(file)
        files.append(self._root.put_file(folder, INDEX_NAME, [msgspec.json.encode(job.index)]))
        if not self._channel.grant(folder, job.name.step):
            raise StorageError(f"{folder}: the launcher did not grant the commit (this cycle is over)")
        return commit(self._root, folder, files, self._facts(job), job.signer, may_publish=self._may_commit)

    def _collect(self, number: int, what: str, ranks: range) -> dict[int, dict[str, Any]]:
        return gather(self._channel, f"ckpt/{number}", what, ranks, self._timeout_s)

    # ---- the other ranks

    def _follow(self, job: SaveJob, number: int) -> Outcome:
        file: FileFact | None = None
        begin_ns, key = time.monotonic_ns(), f"ckpt/{number}/folder"
        place = self._channel.wait([key], self._timeout_s)[key]
        if "error" in place:
            return Outcome(step=job.name.step, durable=job.durable, error=place["error"])
        try:
            file = self._store(job, place["name"], number)
        except Exception as error:
            self._tell_failure(number, str(error) or type(error).__name__)
        else:
            if file is not None:
                said = {"file": msgspec.to_builtins(file), "plan": job.plan}
                self._channel.set(f"ckpt/{number}/rank/{self._rank}", said)
        result_key = f"ckpt/{number}/result"
        # Rank 0 gives up after its own time limit and then says so; wait a little longer than that.
        result = self._channel.wait([result_key], 2 * self._timeout_s)[result_key]
        if "error" in result:
            return Outcome(step=job.name.step, durable=job.durable, error=result["error"])
        if self._uploader is not None and file is not None:
            self._uploader.take(Upload(step=job.name.step, folder=place["name"], file=file), result["upload"])
        return Outcome(
            step=job.name.step,
            durable=job.durable,
            checkpoint=place["name"],
            digest=result["digest"],
            kept=bool(result["kept"]),
            persist_ns=time.monotonic_ns() - begin_ns,
        )


def folder_path(root: Root, folder: str) -> Path | None:
    """Where `folder` lies on a file system; None on an object store."""
    return root.path / folder if isinstance(root, PosixRoot) else None
