"""The object tier behind a disk root: committed checkpoints are copied to an object store beside the training.

Every rank copies its own file on a thread of its own, never the save's: a slow or dead store delays no save. Rank 0 begins an
upload with the commit that it follows (its number travels with the save's result, so no rank asks for it), claims a folder,
adds the index, and when all ranks have reported publishes the very marker of the disk checkpoint, last of all. One upload at a
time: a commit that falls due meanwhile waits until `close`, or until a newer one takes its place.

While a file is read it is compared with the digest that was taken when it was saved, and its last bytes are handed over only when
all of it was right: what has rotted on disk is never uploaded.
"""

from __future__ import annotations

import contextlib
import hashlib
import threading
import time
from collections.abc import Callable, Iterator
from typing import Literal

import msgspec

from keepstep.checkpoint.exchange import Exchange
from keepstep.checkpoint.format.layout import INDEX_NAME, parse_folder_name, upload_note_name
from keepstep.checkpoint.save.commit import write_tier_note
from keepstep.checkpoint.save.gather import gather, tell_failure
from keepstep.checkpoint.storage.objects import ObjectRoot
from keepstep.checkpoint.storage.source import Root, Source
from keepstep.checkpoint.storage.writer import FileFact
from keepstep.checkpoint.trust.manifest import Manifest
from keepstep.records.errors import ChannelError, ConfigError, StorageError, VerificationError

UPLOAD_TIMEOUT_S = 3600.0
"""How long an upload may take before rank 0 gives it up."""

Order = int | Literal["later"] | None
"""What becomes of a committed checkpoint: upload of that number now, later when it is still the newest, or nothing."""

_LAST = "last"


class Upload(msgspec.Struct, frozen=True, kw_only=True):
    """A committed checkpoint as one rank uploads it: `file` is its own; `manifest` is there on rank 0."""

    step: int
    folder: str
    file: FileFact
    manifest: Manifest | None = None


def checked_chunks(source: Source, folder: str, file: FileFact, chunk_bytes: int) -> Iterator[bytearray]:
    """The bytes of `file` in chunks, the last only when all of them are those of its digest.

    Raises VerificationError (instead of that last chunk at the latest) or StorageError.
    """
    opened = source.open(folder, file.name)
    try:
        if opened.size_bytes != file.size_bytes:
            raise VerificationError(
                f"{file.name}: has {opened.size_bytes} bytes in {source.where}, was saved with {file.size_bytes}"
            )
        digest = hashlib.sha256()
        for begin in range(0, file.size_bytes, chunk_bytes):
            chunk = bytearray(min(chunk_bytes, file.size_bytes - begin))
            opened.read_into(memoryview(chunk), begin)
            digest.update(chunk)
            if begin + len(chunk) == file.size_bytes and digest.hexdigest() != file.sha256:
                raise VerificationError(
                    f"{file.name}: its bytes in {source.where}/{folder} are not those that were saved (SHA-256 "
                    f"{digest.hexdigest()[:16]}..., saved {file.sha256[:16]}...); damaged, so it is not uploaded"
                )
            yield chunk
    finally:
        opened.close()


class Uploader:
    """One rank's part of the uploads from `source` to `target`."""

    def __init__(
        self,
        channel: Exchange,
        source: Root,
        target: Root,
        *,
        rank: int,
        world_size: int,
        every_s: float = 0.0,
        timeout_s: float = UPLOAD_TIMEOUT_S,
        may_publish: Callable[[], None] = lambda: None,
        on_uploaded: Callable[[str, Manifest], None] = lambda _folder, _manifest: None,
    ) -> None:
        """`every_s`: at most one upload begins in that time; 0: with every commit.

        `may_publish` is asked right before the marker is written and raises StorageError when it must not be; `on_uploaded` is
        called on rank 0 with folder and manifest of what was published. Raises ConfigError unless `target` is an object store.
        """
        if not isinstance(target, ObjectRoot) or source.tier != "disk":
            raise ConfigError(
                f"Checkpointer(upload_root={target.where!r}): uploads go from a folder to an object store (s3://, gs://, az://); "
                f"root is {source.where}"
            )
        self._channel = channel
        self._source = source
        self._target = target
        self._rank = rank
        self._world_size = world_size
        self._every_s = every_s
        self._timeout_s = timeout_s
        self._may_publish = may_publish
        self._on_uploaded = on_uploaded
        self._lock = threading.Lock()
        self._thread: threading.Thread | None = None
        self._waiting: tuple[Upload, int] | None = None
        self._passed_over: Upload | None = None
        self._number = 0
        self._begun_s: float | None = None
        self._busy = False
        self.uploaded = 0
        """Uploads that were published (rank 0), or this rank's part of which is done."""
        self.failed = 0
        self.last_error: str | None = None

    # ---- the save's thread

    def order(self) -> Order:
        """Rank 0 has committed: what becomes of that checkpoint. The answer is for `take` on every rank."""
        with self._lock:
            now_s = time.monotonic()
            if self._begun_s is not None and now_s - self._begun_s < self._every_s:
                return None
            if self._busy:
                return "later"
            self._number += 1
            self._begun_s, self._busy = now_s, True
            return self._number

    def take(self, upload: Upload, order: Order) -> None:
        """`upload` is committed, and rank 0 ordered `order`."""
        if order is None:
            return
        if order == "later":
            self._passed_over = upload
            return
        self._passed_over = None
        with self._lock:
            waiting, self._waiting = self._waiting, (upload, order)
            if self._thread is None or not self._thread.is_alive():
                # A daemon: who does not call close() does not wait for a store.
                self._thread = threading.Thread(target=self._work, name="keepstep-upload", daemon=True)
                self._thread.start()
        if (
            waiting is not None
        ):  # rank 0 has given up the upload before; this rank is not even through with the one before that
            self._tell(f"upload/{waiting[1]}", f"passed over for step {upload.step}")

    def close(self, limit_s: float) -> bool:
        """Wait for the upload in flight, then upload the newest checkpoint that had to wait for it; False when that takes
        longer than `limit_s`, and the rest is left."""
        end_s = time.monotonic() + limit_s
        if not self._join(limit_s):
            return False
        last, self._passed_over = self._passed_over, None
        if last is None or limit_s <= 0:
            return last is None
        self._timeout_s = max(0.0, end_s - time.monotonic())
        self._thread = threading.Thread(target=self._upload, args=(last, _LAST), name="keepstep-upload", daemon=True)
        self._thread.start()
        return self._join(self._timeout_s)

    def _join(self, limit_s: float) -> bool:
        with self._lock:
            thread = self._thread
        if thread is None:
            return True
        thread.join(limit_s)
        return not thread.is_alive()

    # ---- this rank's lane

    def _work(self) -> None:
        while True:
            with self._lock:
                next_one, self._waiting = self._waiting, None
                if next_one is None:
                    self._thread = None  # under the lock: whoever adds one from now on starts another thread
                    return
            self._upload(*next_one)

    def _upload(self, upload: Upload, number: int | str) -> None:
        prefix = f"upload/{number}"
        try:
            if self._rank == 0:
                self._lead(upload, prefix)
            else:
                self._follow(upload, prefix)
        except Exception as error:  # whatever went wrong, no save and no training depends on it
            self._fail(upload, prefix, str(error) or type(error).__name__)
        else:
            self.uploaded += 1
        with self._lock:
            self._busy = False

    def _fail(self, upload: Upload, prefix: str, error: str) -> None:
        self.failed += 1
        self.last_error = error
        self._tell(prefix, error)
        if self._rank != 0:
            return  # rank 0 hears of it and says so for all
        with self._lock:
            self._begun_s = None  # the next commit tries again
        fields = {"step": upload.step, "checkpoint": upload.folder, "error": error, "failed": self.failed}
        with contextlib.suppress(ChannelError):
            self._channel.report("upload_failed", fields)

    def _tell(self, prefix: str, error: str) -> None:
        keys = ("folder",) if self._rank == 0 else (f"rank/{self._rank}", "failed")
        tell_failure(self._channel, prefix, keys, self._rank, error)

    def _copy(self, upload: Upload, file: FileFact, folder: str) -> None:
        """Copy one file to `folder` of the object store. Raises VerificationError or StorageError."""
        target = self._target
        assert isinstance(target, ObjectRoot)
        chunks = checked_chunks(self._source, upload.folder, file, target.client.options.part_bytes)
        with contextlib.closing(chunks):  # type: ignore[type-var]
            target.put_checked(folder, file.name, chunks, file.size_bytes)

    def _lead(self, upload: Upload, prefix: str) -> None:
        begin_ns = time.monotonic_ns()
        name, manifest = parse_folder_name(upload.folder), upload.manifest
        assert name is not None and manifest is not None
        folder = self._target.make_folder(name)
        self._channel.set(f"{prefix}/folder", {"name": folder})
        for file in manifest.files:
            if file.name in (upload.file.name, INDEX_NAME):
                self._copy(upload, file, folder)
        gather(self._channel, prefix, "rank", range(1, self._world_size), self._timeout_s)
        marker = self._source.marker(upload.folder)
        if marker is None or hashlib.sha256(marker[1]).hexdigest() != manifest.digest:
            raise VerificationError(f"{upload.folder}: its marker is not the one that was committed")
        self._target.publish(folder, *marker, may_publish=self._may_publish)
        write_tier_note(self._target, folder, ["object"])
        write_tier_note(self._source, upload.folder, ["object"], name=upload_note_name(upload.folder))
        fields = {
            "step": upload.step,
            "checkpoint": upload.folder,
            "tier": "object",
            "files": len(manifest.files),
            "took_ns": time.monotonic_ns() - begin_ns,
        }
        with contextlib.suppress(ChannelError):
            self._channel.report("tier_reached", fields)
        self._on_uploaded(folder, manifest)

    def _follow(self, upload: Upload, prefix: str) -> None:
        key = f"{prefix}/folder"
        place = self._channel.wait([key], self._timeout_s)[key]
        if "error" in place:
            raise StorageError(f"rank 0: {place['error']}")
        self._copy(upload, upload.file, place["name"])
        self._channel.set(f"{prefix}/rank/{self._rank}", {"bytes": upload.file.size_bytes})
