"""Where a rank's image is written: targets described by data, opened here; and the faults that can be put in their way.

A target takes an image's bytes in order, in pieces that begin at multiples of 16 MiB. `sync` makes durable what was written
and may run while written bytes are still being compared; `finish` is called when all of them were found right.
"""

from __future__ import annotations

import contextlib
import errno
import fcntl
import os
import threading
from pathlib import Path
from typing import Literal, Protocol

import msgspec

from keepstep.checkpoint.storage.syscalls import begin_write_back, reserve
from keepstep.checkpoint.storage.writer import storage_error, write_all
from keepstep.records.errors import StorageError

DIRECT_ALIGN_BYTES = 4096
_DIRECT_MIN_BYTES = 1 << 20  # below this the page cache is no burden


class PosixFile(msgspec.Struct, frozen=True, kw_only=True, tag_field="kind", tag="posix"):
    """A new file at the absolute `path`. `direct` False: through the page cache even where O_DIRECT works."""

    path: str
    direct: bool = True


TargetSpec = PosixFile
"""What `open_target` takes. Another kind of target is another tagged struct in this union and a case in `open_target`."""


class Fault(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """A fault for the next write: it fails with EIO at byte `at_byte`, or nothing is written for `seconds`."""

    kind: Literal["storage-error", "storage-stall"]
    at_byte: int = 0
    seconds: float = 0.0


class Target(Protocol):
    """A file or object being written. Methods raise StorageError."""

    name: str
    """Plain name, as the manifest lists it."""

    def write(self, view: memoryview, offset: int) -> None:
        """Write all of `view` at `offset`, where the write before ended."""

    def sync(self) -> None:
        """Make what was written durable."""

    def finish(self) -> None:
        """The file is whole and right: let it be seen, let go of it."""

    def abort(self) -> None:
        """Let go of it and of the room it takes, as far as that works; never raises."""


class PosixTarget:
    """A new file. O_DIRECT where the file system takes it, else the page cache with early write-back.

    O_DIRECT keeps the image out of the page cache (the memory is counted to the job's cgroup) and needs no copy. The last
    bytes after a multiple of 4 KiB go through the page cache. The file's entry in its folder is durable after an fsync of that
    folder, which is the commit's.
    """

    def __init__(self, spec: PosixFile, size_bytes: int) -> None:
        """Create the file, never an existing one, and take its room. Raises StorageError."""
        self.path = Path(spec.path)
        self.name = self.path.name
        self.direct = spec.direct and size_bytes >= _DIRECT_MIN_BYTES
        flags = os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC | os.O_NOFOLLOW
        # O_DIRECT is switched on afterwards: an open that refuses it has already made the file.
        try:
            self._fd = os.open(self.path, flags, 0o644)
        except OSError as error:
            raise storage_error("create", self.path, error) from error
        try:
            if self.direct:
                self._set_direct(True)
            if size_bytes:
                reserve(self._fd, size_bytes)
        except OSError as error:
            self.abort()
            raise storage_error("write", self.path, error) from error

    def _set_direct(self, on: bool) -> None:
        flags = fcntl.fcntl(self._fd, fcntl.F_GETFL)
        try:
            fcntl.fcntl(self._fd, fcntl.F_SETFL, flags | os.O_DIRECT if on else flags & ~os.O_DIRECT)
        except OSError as error:
            if not on or error.errno != errno.EINVAL:
                raise
            on = False
        self.direct = on

    def write(self, view: memoryview, offset: int) -> None:
        """Write all of `view` at `offset`. Raises StorageError."""
        try:
            while view:
                count = self._write_some(view)
                if not self.direct:
                    begin_write_back(self._fd, offset, count)
                view, offset = view[count:], offset + count
        except OSError as error:
            raise storage_error("write", self.path, error) from error

    def _write_some(self, view: memoryview) -> int:
        whole = len(view) - len(view) % DIRECT_ALIGN_BYTES
        if self.direct and not whole:
            self._set_direct(False)
        if self.direct:
            try:
                count = os.write(self._fd, view[:whole])
            except OSError as error:
                # Some file systems accept the flag and then refuse the write, or this buffer or size does not suit them.
                if error.errno != errno.EINVAL:
                    raise
                self._set_direct(False)
            else:
                if count <= 0:
                    raise OSError(errno.EIO, "write returned 0")
                return count
        write_all(self._fd, view)
        return len(view)

    def sync(self) -> None:
        """fsync. Raises StorageError."""
        try:
            os.fsync(self._fd)
        except OSError as error:
            raise storage_error("write", self.path, error) from error

    def finish(self) -> None:
        """Close the file. Raises StorageError (a network file system may report a failed write only now)."""
        fd, self._fd = self._fd, -1
        try:
            os.close(fd)
        except OSError as error:
            raise storage_error("write", self.path, error) from error

    def abort(self) -> None:
        """Remove the file: a full disk must not stay full because of a save that failed."""
        fd, self._fd = self._fd, -1
        if fd >= 0:
            with contextlib.suppress(OSError):
                os.close(fd)
        with contextlib.suppress(OSError):  # where it cannot be removed it stays in a folder that nobody committed
            self.path.unlink()


def meet_fault(fault: Fault, where: str) -> None:
    """The fault in the way of an upload, which is whole or not there. Raises StorageError, or returns after the stall."""
    if fault.kind == "storage-error":
        raise StorageError(f"cannot write {where}: {os.strerror(errno.EIO)}, injected (EIO)")
    threading.Event().wait(fault.seconds)


class FaultyTarget:
    """A target whose next write meets `fault`."""

    def __init__(self, target: Target, path: Path, fault: Fault) -> None:
        self.name = target.name
        self._target, self._path, self._fault = target, path, fault
        self._stalled = False

    def write(self, view: memoryview, offset: int) -> None:
        """Write `view`, unless the fault comes first. Raises StorageError."""
        fault = self._fault
        if fault.kind == "storage-stall" and not self._stalled:
            self._stalled = True
            threading.Event().wait(fault.seconds)
        if fault.kind == "storage-error" and offset + len(view) > fault.at_byte:
            before = max(0, fault.at_byte - offset)
            self._target.write(view[: before - before % DIRECT_ALIGN_BYTES], offset)
            raise storage_error("write", self._path, OSError(errno.EIO, f"{os.strerror(errno.EIO)}, injected"))
        self._target.write(view, offset)

    def sync(self) -> None:
        """As the target's."""
        self._target.sync()

    def finish(self) -> None:
        """As the target's."""
        self._target.finish()

    def abort(self) -> None:
        """As the target's."""
        self._target.abort()


def open_target(spec: TargetSpec, size_bytes: int, fault: Fault | None = None) -> Target:
    """Open what `spec` describes for an image of `size_bytes`. Raises StorageError."""
    target = PosixTarget(spec, size_bytes)
    return target if fault is None else FaultyTarget(target, target.path, fault)
