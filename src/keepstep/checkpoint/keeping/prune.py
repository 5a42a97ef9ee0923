"""Deletion of what retention does not keep.

One checkpoint goes in this order, each step durable before the next: tombstone record, marker, data files, the side records
about it, the tombstone, the folder. From the first step on no restore takes it, and what a kill leaves behind is finished
by the next prune. The tombstone goes before the folder: as long as the folder is there, no save can claim its name, so a
tombstone never meets another checkpoint than its own.
"""

from __future__ import annotations

import contextlib
import ctypes
import errno
import fcntl
import hashlib
import os
import platform
import secrets
import sys
import threading
import time
from collections.abc import Callable, Iterator

import msgspec

from keepstep.checkpoint.format.layout import SIDE_FOLDER, upload_note_name
from keepstep.checkpoint.keeping import pins
from keepstep.checkpoint.keeping.policy import Policy
from keepstep.checkpoint.keeping.records import (
    OF_ONE_CHECKPOINT,
    TIERS,
    TOMBSTONES,
    Tombstone,
    whoami,
)
from keepstep.checkpoint.keeping.retention import DEFAULT_GRACE_S, DEFAULT_QUARANTINE_S, Limits, Line, deletion_order
from keepstep.checkpoint.keeping.survey import Survey, plan, survey
from keepstep.checkpoint.restore.lineage import Listed
from keepstep.checkpoint.storage.posix import PosixRoot
from keepstep.checkpoint.storage.source import Deleter, Root
from keepstep.checkpoint.storage.writer import fsync_folder, storage_error
from keepstep.checkpoint.trust.policy import TrustPolicy
from keepstep.records.codec import rfc3339, to_pretty_json
from keepstep.records.errors import KeepstepError, StorageError, VerificationError

LOCK_NAME = "prune.lock"
_IOPRIO_SET = {"x86_64": 251, "aarch64": 30}
_IOPRIO_IDLE = 3 << 13  # class idle: served when nobody else wants the disk (ioprio_set(2))


class BusyError(StorageError):
    """Raised when another process is pruning the same root."""


class Pruned(msgspec.Struct, frozen=True, kw_only=True):
    """`keepstep.prune/1`: what a prune decided and did. `failed`: why a checkpoint that should go is still there."""

    schema: str = "keepstep.prune/1"
    action: str
    root: str
    policy: str
    dry_run: bool
    time: str
    lines: list[Line]
    deleted: list[str]
    freed_bytes: int
    failed: dict[str, str]


class Task(msgspec.Struct, frozen=True, kw_only=True):
    """One prune: of which root, by which policy, with whose right to delete (None: only say what would be done)."""

    root: Root
    policy: Policy
    deleter: Deleter | None
    trust: TrustPolicy
    ended_runs: frozenset[str] = frozenset()
    grace_s: float = DEFAULT_GRACE_S
    quarantine_s: float = DEFAULT_QUARANTINE_S
    reason: str | None = None
    known: dict[str, Listed] | None = None
    """Markers read before, see `list_checkpoints`: for who prunes again and again."""

    def with_right(self, deleter: Deleter) -> Task:
        """The same, to be carried out with `deleter`."""
        return msgspec.structs.replace(self, deleter=deleter)


def decide_now(task: Task, now_ns: int) -> list[Line]:
    """What `task` would do to each checkpoint, newest first. Raises StorageError."""
    return _decide(task, now_ns)[0]


def prune(task: Task, now_ns: int | None = None, *, said: Callable[[Line], None] = lambda _: None) -> Pruned:
    """Decide, then delete what is not kept (without a deleter: only decide).

    A checkpoint that cannot be deleted is named in the result and the others go on; `said` is told of each before its
    deletion. Raises StorageError (the root cannot be listed), BusyError.
    """
    now_ns = time.time_ns() if now_ns is None else now_ns
    action = f"prune-{secrets.token_hex(4)}"
    deleted: list[str] = []
    failed: dict[str, str] = {}
    freed = 0
    with contextlib.nullcontext() if task.deleter is None else _alone(task.root):
        lines, doomed = _decide(task, now_ns)
        for line in doomed if task.deleter is not None else []:
            assert task.deleter is not None
            said(line)
            try:
                _delete(task.root, task.deleter, line, _tombstone(task, line, action, now_ns))
            except (StorageError, VerificationError) as error:
                failed[line.checkpoint] = str(error)
            else:
                deleted.append(line.checkpoint)
                freed += line.size_bytes or 0
    return Pruned(
        action=action,
        root=task.root.where,
        policy=task.policy.text,
        dry_run=task.deleter is None,
        time=rfc3339(now_ns),
        lines=lines,
        deleted=deleted,
        freed_bytes=freed,
        failed=failed,
    )


def prune_after_commit(task: Task, *, done: Callable[[Pruned | str], None] = lambda _: None) -> threading.Thread:
    """Prune on a thread of its own, at the lowest priority for processor and disk; for rank 0, after a commit.

    An error is said on stderr and given to `done` as text; training never sees it. The thread is a daemon: a process that
    ends in the middle leaves the rest to the next prune. When another process prunes the root, nothing is done.
    """

    def work() -> None:
        lower_priority()
        try:
            result = prune(task)
        except BusyError as error:
            done(str(error))
            return
        except Exception as error:  # nothing that goes wrong here may reach the training
            text = str(error) if isinstance(error, KeepstepError) else f"{type(error).__name__}: {error}"
            print(f"keepstep: pruning {task.root.where} failed: {text}", file=sys.stderr, flush=True)
            done(text)
            return
        for checkpoint, why in result.failed.items():
            print(f"keepstep: {checkpoint} is not deleted: {why}", file=sys.stderr, flush=True)
        done(result)

    thread = threading.Thread(target=work, name="keepstep-prune", daemon=True)
    thread.start()
    return thread


def lower_priority() -> None:
    """Give the calling thread what others leave of processor and disk. What the kernel refuses is left out."""
    with contextlib.suppress(OSError):
        os.setpriority(os.PRIO_PROCESS, threading.get_native_id(), 19)
    number = _IOPRIO_SET.get(platform.machine())
    if number is not None:
        ctypes.CDLL(None).syscall(number, 1, 0, _IOPRIO_IDLE)  # IOPRIO_WHO_PROCESS, 0: this thread


def _decide(task: Task, now_ns: int) -> tuple[list[Line], list[Line]]:
    """All lines, and those to be deleted in their order."""
    found = survey(task.root, task.trust, now_ns=now_ns, known=task.known)
    limits = Limits(now_ns=now_ns, ended_runs=task.ended_runs, grace_s=task.grace_s, quarantine_s=task.quarantine_s)
    lines = plan(task.root, found, task.policy, limits)
    if task.deleter is not None:
        # Somebody deleted the folder by hand: its name may be used again, and must not be refused then.
        for name in found.records.tombstones - found.listed.keys():
            if task.root.files(name) is None:
                task.deleter.delete_record(TOMBSTONES, name)
    doomed = deletion_order(found.entries, lines)
    if doomed:
        _check_newest(task, found)
    return lines, doomed


def _check_newest(task: Task, found: Survey) -> None:
    """That the marker of what stays as the newest is still the one that was verified. Raises StorageError: nothing goes."""
    restorable = [entry for entry in found.entries if entry.state == "committed"]
    for scope in {entry.scope for entry in restorable}:
        folder = next(entry.name.text for entry in restorable if entry.scope == scope)
        manifest, marker = found.listed[folder].manifest, task.root.marker(folder)
        if manifest is None or marker is None or hashlib.sha256(marker[1]).hexdigest() != manifest.digest:
            if task.known is not None:
                task.known.pop(folder, None)
            raise StorageError(f"{folder}: its marker is not the one that was verified before; nothing is deleted")


def _tombstone(task: Task, line: Line, action: str, now_ns: int) -> bytes:
    return to_pretty_json(
        Tombstone(
            checkpoint=line.checkpoint,
            step=line.step,
            reasons=line.reasons,
            policy=task.policy.text,
            reason=task.reason,
            time=rfc3339(now_ns),
            by=whoami(),
            action=action,
        )
    )


def _delete(root: Root, deleter: Deleter, line: Line, tombstone: bytes) -> None:
    """Delete one checkpoint. Raises StorageError or VerificationError, also when it changed since the decision."""
    folder = line.checkpoint
    if folder in root.record_names(pins.RECORD_KIND):
        raise StorageError("it was pinned meanwhile, and stays")
    if line.state == "unfinished" and root.marker(folder) is not None:
        raise StorageError("it was committed meanwhile, and stays")
    if folder not in root.record_names(TOMBSTONES):
        _bury(root, folder, tombstone)
    deleter.delete_marker(folder)
    for name in sorted(root.files(folder) or {}):
        deleter.delete_file(folder, name)
    for kind in OF_ONE_CHECKPOINT:
        deleter.delete_record(kind, folder)
    deleter.delete_record(TIERS, upload_note_name(folder))
    deleter.delete_record(TOMBSTONES, folder)
    deleter.remove_folder(folder)


def _bury(root: Root, folder: str, tombstone: bytes) -> None:
    """Write the tombstone. A full disk, which pruning is to make room on, may still have place for an empty file."""
    try:
        root.put_record(TOMBSTONES, folder, tombstone)
    except StorageError as error:
        cause = error.__cause__
        full = isinstance(cause, OSError) and cause.errno in (errno.ENOSPC, errno.EDQUOT)
        if not full or not isinstance(root, PosixRoot):
            raise
        path = root.path / SIDE_FOLDER / TOMBSTONES / f"{folder}.json"
        try:
            path.parent.mkdir(parents=True, exist_ok=True)
            os.close(os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC | os.O_NOFOLLOW, 0o644))
        except OSError as second:
            raise storage_error("write", path, second) from error
        fsync_folder(path.parent)
        fsync_folder(path.parent.parent)


@contextlib.contextmanager
def _alone(root: Root) -> Iterator[None]:
    """Hold the root's prune lock, which the kernel gives back when its holder dies. Object stores have none: there two
    prunes at once delete the same things. Raises BusyError or StorageError.
    """
    if not isinstance(root, PosixRoot) or not root.path.is_dir():
        yield
        return
    path = root.path / SIDE_FOLDER / LOCK_NAME
    try:
        path.parent.mkdir(exist_ok=True)
        fd = os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC | os.O_NOFOLLOW, 0o644)
    except OSError as error:
        raise storage_error("open", path, error) from error
    try:
        try:
            fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            raise BusyError(f"{root.where}: another process is pruning it (it holds {path}); try again later") from None
        except OSError as error:  # a file system without locks: two prunes at once are safe, only wasteful
            if error.errno not in (errno.ENOLCK, errno.ENOTSUP, errno.ENOSYS):
                raise storage_error("lock", path, error) from error
        yield
    finally:
        os.close(fd)
