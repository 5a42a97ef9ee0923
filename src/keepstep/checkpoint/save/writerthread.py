"""Writing images by a thread of this process: where no other can be started, and for short uses."""

from __future__ import annotations

import os
import threading
import time
from collections.abc import Callable
from typing import Generic, TypeVar

from keepstep.checkpoint.save.sealing import Sealed, seal_buffer, write_buffer
from keepstep.checkpoint.save.writerproc import warm_up
from keepstep.checkpoint.storage.targets import Fault, TargetSpec
from keepstep.checkpoint.storage.writer import FileFact
from keepstep.records.errors import KeepstepError, StorageError

T = TypeVar("T")


class ThreadWriter:
    """An ImageWriter (writerclient.py) without a process of its own.

    A thread cannot be killed. One whose time is over goes on until its system call returns, on a descriptor of its own, and
    what it still finds is dropped.
    """

    def __init__(self) -> None:
        self._one = threading.Lock()
        self._fault: Fault | None = None
        self._closed = False
        self.respawned = 0

    def ready(self, timeout_s: float) -> None:
        """Load what the first save will need."""
        self._run(warm_up, "warm", None, timeout_s)

    def seal(self, fd: int, file_bytes: int, timeout_s: float) -> Sealed:
        """See ImageWriter."""
        own = _duplicate(fd)
        return self._run(lambda: seal_buffer(own, file_bytes), "seal", own, timeout_s)

    def write(
        self,
        fd: int,
        file_bytes: int,
        target: TargetSpec,
        timeout_s: float,
        *,
        sealed: Sealed | None = None,
        on_sealed: Callable[[Sealed], None] | None = None,
    ) -> FileFact:
        """See ImageWriter. `on_sealed` is called from another thread here."""
        fault, self._fault = self._fault, None
        own = _duplicate(fd)
        return self._run(
            lambda: write_buffer(own, file_bytes, target, sealed, fault, on_sealed), "write", own, timeout_s
        )

    def inject(self, fault: Fault, timeout_s: float) -> None:
        """See ImageWriter."""
        self._fault = fault

    def close(self) -> None:
        """Later requests are refused."""
        self._closed = True

    def _run(self, work: Callable[[], T], op: str, fd: int | None, timeout_s: float) -> T:
        """Call `work` on a thread and wait for it; `fd` is closed when the thread is done with it."""
        deadline = time.monotonic() + timeout_s
        if self._closed or not self._one.acquire(timeout=timeout_s):
            if fd is not None:
                os.close(fd)
            why = "was closed" if self._closed else f"was busy with another request for {timeout_s:g} s"
            raise StorageError(f"the writer thread {why}")
        call = _Call(work, fd)
        try:
            thread = threading.Thread(target=call.run, name="keepstep-write", daemon=True)
            thread.start()
            thread.join(max(0.0, deadline - time.monotonic()))
            if thread.is_alive():
                self.respawned += 1
                raise StorageError(f"writer thread: no end of {op} within {timeout_s:g} s; it goes on unheeded")
        finally:
            self._one.release()
        return call.result()


class _Call(Generic[T]):
    """A call on another thread and what came of it."""

    def __init__(self, work: Callable[[], T], fd: int | None) -> None:
        self._work, self._fd = work, fd
        self._values: list[T] = []
        self._error: Exception | None = None

    def run(self) -> None:
        try:
            self._values.append(self._work())
        except Exception as error:
            self._error = error
        finally:
            if self._fd is not None:
                os.close(self._fd)

    def result(self) -> T:
        """Raises a KeepstepError as it is, any other error as StorageError."""
        error, self._error = self._error, None
        try:
            if isinstance(error, KeepstepError):
                raise error
            if error is not None:
                raise StorageError(f"{type(error).__name__}: {error}") from error
        finally:
            del error  # its frames hold this one: without this the image would stay mapped
        return self._values[0]


def _duplicate(fd: int) -> int:
    try:
        return os.dup(fd)
    except OSError as error:
        raise StorageError(f"cannot duplicate the buffer's descriptor: {error.strerror}") from error
