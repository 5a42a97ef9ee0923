"""Durable writes and the run folder's paths."""

from __future__ import annotations

import fcntl
import hashlib
import json
import os
import socket
import tempfile
import time
from pathlib import Path
from typing import Any

from keepstep.records.errors import KeepstepError, StorageError

MAX_SOCKET_PATH = 107
LOCK_TRIES = 10
LONGEST_SOCKET = "agent-4194304.sock"


def fsync_dir(path: Path) -> None:
    """Make a created or renamed name in `path` durable."""
    fd = os.open(path, os.O_RDONLY | os.O_DIRECTORY)
    try:
        os.fsync(fd)
    finally:
        os.close(fd)


def write_durable(path: Path, data: bytes, mode: int = 0o600) -> None:
    """Replace `path` by rename: readers see the old or the new content, also after a crash. Raises StorageError."""
    try:
        fd, name = tempfile.mkstemp(prefix=f".{path.name}.", dir=path.parent)
        try:
            with os.fdopen(fd, "wb") as file:
                file.write(data)
                file.flush()
                os.fchmod(file.fileno(), mode)
                os.fsync(file.fileno())
            Path(name).replace(path)
        except BaseException:
            Path(name).unlink(missing_ok=True)
            raise
        fsync_dir(path.parent)
    except OSError as error:
        raise StorageError(f"{path}: cannot write: {error.strerror}") from error


def write_atomic(path: Path, data: bytes) -> None:
    """Replace `path` by rename without waiting for the disk; for records that the journal can make again."""
    fd, name = tempfile.mkstemp(prefix=f".{path.name}.", dir=path.parent)
    try:
        with os.fdopen(fd, "wb") as file:
            file.write(data)
        Path(name).replace(path)
    except BaseException:
        Path(name).unlink(missing_ok=True)
        raise


def keepstep_home() -> Path:
    """`$KEEPSTEP_HOME`, default ~/.keepstep."""
    return Path(os.environ.get("KEEPSTEP_HOME") or Path.home() / ".keepstep")


def make_run_dir(run_dir: Path) -> None:
    """Create the run folder and its parts, mode 0700. Raises StorageError naming what cannot be written."""
    try:
        run_dir.mkdir(parents=True, exist_ok=True)
        for name in ("journal", "cycles", "logs", "evidence", "incidents", "nodes"):
            (run_dir / name).mkdir(exist_ok=True, mode=0o700)
        run_dir.chmod(0o700)
        with tempfile.TemporaryFile(dir=run_dir):
            pass
    except OSError as error:
        raise StorageError(
            f"{error.filename or run_dir}: the run folder cannot be written: {error.strerror}; "
            "choose another with --run-dir, or set KEEPSTEP_HOME"
        ) from error


def socket_dir(run_dir: Path) -> Path:
    """A 0700 folder with a short path for this run's Unix sockets (their paths are limited to 107 bytes).

    It is named after the run folder, so that every launcher of the run on this host finds it. Raises StorageError when the
    folder belongs to somebody else.
    """
    digest = hashlib.sha256(str(run_dir.resolve()).encode()).hexdigest()[:16]
    below = f"keepstep-{os.getuid()}/{digest}"
    runtime = os.environ.get("XDG_RUNTIME_DIR", "")
    fits = len(os.fsencode(f"{runtime}/{below}/{LONGEST_SOCKET}")) <= MAX_SOCKET_PATH
    path = (Path(runtime) if runtime and fits and Path(runtime).is_dir() else Path("/tmp")) / below
    for folder in (path.parent, path):
        folder.mkdir(mode=0o700, exist_ok=True)
        status = folder.lstat()
        if status.st_uid != os.getuid() or status.st_mode & 0o077:
            raise StorageError(
                f"{folder}: belongs to uid {status.st_uid} or is open to others; remove it and start again"
            )
    return path


class RunLockedError(KeepstepError):
    """Raised when a launcher of this run id is alive and leads it."""


def _lock(fd: int) -> None:
    """Take the lock. Whoever looks whether a run is led holds it for an instant, so it is asked for more than once."""
    for left in reversed(range(LOCK_TRIES)):
        try:
            fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            if not left:
                raise
            time.sleep(0.005)
        else:
            return


class RunLock:
    """The lead of a run on this host: an flock that the kernel releases when its holder dies, however it dies."""

    def __init__(self, fd: int) -> None:
        self._fd = fd

    @classmethod
    def acquire(cls, run_dir: Path, node: str) -> RunLock:
        """Take the lead. Raises RunLockedError naming host and pid of the launcher that has it."""
        path = run_dir / "lead.lock"
        fd = os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
        try:
            _lock(fd)
        except BlockingIOError:
            holder = os.pread(fd, 4096, 0)
            os.close(fd)
            who = json.loads(holder) if holder else {}
            raise RunLockedError(
                f"run {run_dir.name!r} is already running: host {who.get('host', '?')}, pid {who.get('pid', '?')} "
                f"(folder {run_dir}); wait for it, stop it, or use another --rdzv-id or --run-dir"
            ) from None
        os.ftruncate(fd, 0)
        body: dict[str, Any] = {"host": socket.gethostname(), "pid": os.getpid(), "node": node}
        os.pwrite(fd, json.dumps(body).encode(), 0)
        return cls(fd)

    def release(self) -> None:
        os.close(self._fd)
