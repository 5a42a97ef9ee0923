"""The rank's end of the writer process, and the interface it shares with the writer thread (writerthread.py).

The process keeps hashing and writing away from the training process's interpreter lock, and a file system that stops answering
blocks only it: every wait here has a deadline, after which the process is killed and the next request gets a new one. What
fails is that one save.
"""

from __future__ import annotations

import contextlib
import os
import select
import signal
import socket
import struct
import subprocess
import sys
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any, Protocol

import msgspec

import keepstep
from keepstep.checkpoint.save.sealing import Sealed
from keepstep.checkpoint.storage.targets import Fault, TargetSpec
from keepstep.checkpoint.storage.writer import FileFact
from keepstep.records.errors import ConfigError, KeepstepError, StorageError, VerificationError
from keepstep.records.frames import MAX_FRAME_BYTES, pack

# The very package this process runs, however its path came about; the working directory is never searched.
_BOOT = (
    "import sys; sys.path.insert(0, sys.argv[1]); import keepstep; sys.path.append(sys.path.pop(0)); "
    "from keepstep.checkpoint.save.writerproc import main; main(sys.argv[2:])"
)
_END_WAIT_S = 1.0
ERROR_KINDS: dict[str, type[KeepstepError]] = {"ConfigError": ConfigError, "VerificationError": VerificationError}


class ImageWriter(Protocol):
    """Seals and writes images, one request at a time. Every call ends within its time limit; all raise StorageError."""

    respawned: int
    """How often something dead or overdue was replaced."""

    def ready(self, timeout_s: float) -> None:
        """Start what is needed and load what the first save will use: call it before the first step."""

    def seal(self, fd: int, file_bytes: int, timeout_s: float) -> Sealed:
        """Take fingerprints and block digests of the image of `file_bytes` in shared memory `fd`; digests go to its end."""

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
        """Write the image in shared memory `fd` to `target`; durable on return.

        Without `sealed` it is sealed beside the write, which costs no time of its own; `on_sealed` is called as soon as that
        is done. The image must not change until this returns or raises.
        """

    def inject(self, fault: Fault, timeout_s: float) -> None:
        """Put a fault in the way of the next write."""

    def close(self) -> None:
        """Let go of everything; a request in flight fails. Safe to call twice."""


class _DeadError(Exception):
    """The process ended before it answered."""


class _OverdueError(Exception):
    """The deadline passed before it answered."""


class _GarbledError(Exception):
    """It sent what is no frame."""


def _left_ms(deadline: float) -> int:
    return max(0, int((deadline - time.monotonic()) * 1000 + 0.999))


class _Child:
    """A writer process and our end of its socket."""

    def __init__(self, nice: int, io_level: int | None) -> None:
        """Raises OSError."""
        ours, theirs = socket.socketpair()
        try:
            tie = threading.current_thread() is threading.main_thread()
            numbers = (theirs.fileno(), os.getpid(), int(tie), nice, -1 if io_level is None else io_level)
            process = subprocess.Popen(
                [sys.executable, "-P", "-c", _BOOT, str(Path(keepstep.__file__).parents[1]), *map(str, numbers)],
                stdin=subprocess.DEVNULL,
                stdout=subprocess.DEVNULL,
                pass_fds=[theirs.fileno()],
            )
        except BaseException:
            ours.close()
            raise
        finally:
            theirs.close()
        self.pid = process.pid
        self.owner = os.getpid()
        self._sock = ours
        self._received = bytearray()
        try:
            self._pidfd = os.pidfd_open(self.pid)
        except OSError:
            process.kill()
            process.wait()
            ours.close()
            raise
        # From here on the pidfd tells; Popen must neither collect the status nor complain about a process that lives on.
        process.returncode = 0

    def has_ended(self) -> bool:
        """True when the process is no more."""
        return self._wait_for(self._pidfd, select.POLLIN, time.monotonic(), death=False)

    def _wait_for(self, fd: int, events: int, deadline: float, *, death: bool = True) -> bool:
        """True when `fd` is ready, False when the deadline passed. Raises _DeadError when only death is left to see."""
        poll = select.poll()  # select.select cannot watch descriptors over 1023
        poll.register(fd, events)
        if death:
            poll.register(self._pidfd, select.POLLIN)
        found = {number for number, _ in poll.poll(_left_ms(deadline))}
        if fd in found:  # a reply sent just before the end still counts
            return True
        if found:
            raise _DeadError
        return False

    def send(self, message: dict[str, Any], fd: int | None, deadline: float) -> None:
        """Send a request. Raises _DeadError or _OverdueError."""
        data = memoryview(pack(message))
        fds = [] if fd is None else [fd]
        while data:
            if not self._wait_for(self._sock.fileno(), select.POLLOUT, deadline):
                raise _OverdueError
            try:
                count = socket.send_fds(self._sock, [data], fds, socket.MSG_DONTWAIT | socket.MSG_NOSIGNAL)
            except BlockingIOError:
                continue
            except ConnectionError:
                raise _DeadError from None
            data, fds = data[count:], []

    def receive(self, deadline: float) -> dict[str, Any]:
        """The next frame. Raises _DeadError, _OverdueError or _GarbledError."""
        while True:
            if len(self._received) >= 4:
                (length,) = struct.unpack_from(">I", self._received)
                if length > MAX_FRAME_BYTES:
                    raise _GarbledError
                if len(self._received) >= 4 + length:
                    body = bytes(self._received[4 : 4 + length])
                    del self._received[: 4 + length]
                    try:
                        return msgspec.json.decode(body, type=dict[str, Any])
                    except msgspec.DecodeError:
                        raise _GarbledError from None
            if not self._wait_for(self._sock.fileno(), select.POLLIN, deadline):
                raise _OverdueError
            try:
                chunk = self._sock.recv(1 << 16, socket.MSG_DONTWAIT)
            except BlockingIOError:
                continue
            except ConnectionError:
                raise _DeadError from None
            if not chunk:
                raise _DeadError
            self._received += chunk

    def end(self, *, kill: bool) -> str | None:
        """Close the socket and see the process end, killed when `kill` or when it takes long.

        Returns how it ended, or None when it cannot be killed at present (blocked in the kernel).
        """
        if os.getpid() != self.owner:  # a fork of the rank: the process is not its child
            self._sock.close()
            os.close(self._pidfd)
            return ""
        with contextlib.suppress(OSError):
            self._sock.shutdown(
                socket.SHUT_RDWR
            )  # forks of the rank hold the socket too: a close alone may not be seen
        self._sock.close()
        if kill or not self._ends_soon():
            with contextlib.suppress(ProcessLookupError):
                signal.pidfd_send_signal(self._pidfd, signal.SIGKILL)
            self._ends_soon()
        return self.reap()

    def _ends_soon(self) -> bool:
        return self._wait_for(self._pidfd, select.POLLIN, time.monotonic() + _END_WAIT_S, death=False)

    def reap(self) -> str | None:
        """Collect the status of a process that has ended: how it ended, or None while it runs."""
        try:
            info = os.waitid(os.P_PIDFD, self._pidfd, os.WEXITED | os.WNOHANG)
        except ChildProcessError:  # somebody waited for all children of this process
            how = "ended; its exit status was collected elsewhere in this process"
        else:
            if info is None:
                return None
            exited = info.si_code == os.CLD_EXITED
            name = "" if exited else signal.Signals(info.si_status).name
            how = f"ended with exit code {info.si_status}" if exited else f"was killed by {name}"
        os.close(self._pidfd)
        return how


class WriterClient:
    """Images are written by a process of its own (keepstep.checkpoint.save.writerproc), started by the first request."""

    def __init__(self, *, nice: int = 5, io_level: int | None = None) -> None:
        """`nice` is added to the process's niceness; `io_level` 0 to 7 is its best-effort I/O priority, None leaves it."""
        self._nice, self._io_level = nice, io_level
        self._one = threading.Lock()
        self._child: _Child | None = None
        self._abandoned: list[_Child] = []
        self._number = 0
        self._closed = False
        self.respawned = 0

    @property
    def pid(self) -> int | None:
        """The process that serves now; None before the first and after one was lost."""
        return self._child.pid if self._child is not None else None

    def start(self) -> None:
        """Start the process when none lives. Raises StorageError."""
        self._abandoned = [child for child in self._abandoned if child.reap() is None]
        if self._child is not None:
            if self._child.owner != os.getpid():
                raise StorageError("this writer process belongs to the process that was forked from")
            if not self._child.has_ended():
                return
            self._drop(self._child, kill=True)
        if self._closed:
            raise StorageError("the writer process was closed")
        try:
            self._child = _Child(self._nice, self._io_level)
        except OSError as error:
            raise StorageError(f"cannot start a writer process: {error.strerror or error}") from error

    def _drop(self, child: _Child, *, kill: bool) -> str:
        """Replace `child` at the next request; says how it ended."""
        self._child = None
        if not self._closed:
            self.respawned += 1
        how = child.end(kill=kill)
        if how is None:
            self._abandoned.append(child)
        return how or "cannot be killed at present"

    def ready(self, timeout_s: float) -> None:
        """Start the process and have it load what it needs. Raises StorageError."""
        self._call("warm", {}, None, timeout_s)

    def seal(self, fd: int, file_bytes: int, timeout_s: float) -> Sealed:
        """See ImageWriter."""
        reply = self._call("seal", {"file_bytes": file_bytes}, fd, timeout_s)
        return msgspec.convert(reply["sealed"], Sealed)

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
        """See ImageWriter."""
        fields = {"file_bytes": file_bytes, "target": target, "sealed": sealed}
        reply = self._call("write", fields, fd, timeout_s, on_sealed)
        return msgspec.convert(reply["file"], FileFact)

    def inject(self, fault: Fault, timeout_s: float) -> None:
        """See ImageWriter."""
        self._call("inject", {"fault": fault}, None, timeout_s)

    def close(self) -> None:
        """End the process; a request in flight fails. Safe to call twice."""
        self._closed = True
        if not self._one.acquire(blocking=False):
            child = self._child  # a request is in flight in another thread: it sees the death and cleans up
            if child is not None and child.owner == os.getpid():
                with contextlib.suppress(ProcessLookupError):
                    os.kill(child.pid, signal.SIGKILL)
            return
        try:
            if self._child is not None:
                self._drop(self._child, kill=False)
        finally:
            self._one.release()

    def _call(
        self,
        op: str,
        fields: dict[str, Any],
        fd: int | None,
        timeout_s: float,
        on_sealed: Callable[[Sealed], None] | None = None,
    ) -> dict[str, Any]:
        """One request and its reply. Raises StorageError, or the error that the process reports."""
        deadline = time.monotonic() + timeout_s
        if not self._one.acquire(timeout=timeout_s):
            raise StorageError(f"the writer process was busy with another request for {timeout_s:g} s")
        try:
            self.start()
            child = self._child
            assert child is not None
            self._number += 1
            request = {"id": self._number, "op": op, **msgspec.to_builtins(fields)}
            try:
                self._send(child, request, fd, deadline)
                reply = self._reply(child, self._number, deadline, on_sealed)
            except _OverdueError:
                how = self._drop(child, kill=True)
                text = f"writer process {child.pid}: no answer to {op} within {timeout_s:g} s; it {how}"
                raise StorageError(text) from None
            except _DeadError:
                raise StorageError(f"writer process {child.pid} {self._drop(child, kill=True)} during {op}") from None
            except _GarbledError:
                self._drop(child, kill=True)
                raise StorageError(f"writer process {child.pid} answered {op} with nonsense") from None
        finally:
            self._one.release()
        if not reply["ok"]:
            raise ERROR_KINDS.get(reply["kind"], StorageError)(reply["error"])
        return reply

    def _send(self, child: _Child, request: dict[str, Any], fd: int | None, deadline: float) -> None:
        try:
            child.send(request, fd, deadline)
        except (_DeadError, _OverdueError):
            raise
        except BaseException:  # half a frame may be on its way: nothing can follow it
            self._drop(child, kill=True)
            raise

    def _reply(
        self, child: _Child, number: int, deadline: float, on_sealed: Callable[[Sealed], None] | None
    ) -> dict[str, Any]:
        """The reply to request `number`. What belongs to a request that was given up is dropped."""
        while True:
            message = child.receive(deadline)
            if message["id"] != number:
                continue
            if "event" not in message:
                return message
            if on_sealed is not None:
                on_sealed(msgspec.convert(message["sealed"], Sealed))
