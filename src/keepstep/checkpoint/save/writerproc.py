"""The writer process: one beside each rank, seals and writes the images that the rank stages in shared memory.

`main(["FD", "PARENT_PID", "TIE", "NICE", "IO_LEVEL"])`: requests come over socket FD and are answered one after the other. Frames
are those of keepstep.records.frames; every request and every reply carries `id`. `seal` and `write` bring the buffer's memfd as
SCM_RIGHTS with their first byte. No torch is imported.

  warm   {}                                     -> {pid, digest, fingerprint}   algorithms, loaded and tried
  seal   {file_bytes} + fd                      -> {sealed}
  write  {file_bytes, target, sealed?} + fd     -> {file}; without `sealed`, before that {event: "sealed", sealed}
  inject {fault}                                -> {}                           for the next write
Every reply but an event has `ok`; when false, `error` says why and `kind` is the class of the error.

The launcher stops a rank by signals to its whole process group while a last save may be in flight, so those are ignored here. The
process ends with its rank: at the end of the socket, and when the rank's process is gone, also in the middle of a write.
"""

from __future__ import annotations

import contextlib
import gc
import os
import select
import signal
import socket
import struct
import threading
from collections.abc import Sequence
from typing import Any

import msgspec

from keepstep.checkpoint.format.blocks import digest_algorithm, fingerprint_algorithm, hash_block
from keepstep.checkpoint.save.sealing import Sealed, seal_buffer, write_buffer
from keepstep.checkpoint.storage.syscalls import die_with_parent_thread, set_io_level
from keepstep.checkpoint.storage.targets import Fault, TargetSpec
from keepstep.records.errors import KeepstepError, StorageError
from keepstep.records.frames import MAX_FRAME_BYTES, pack, recv_exact

EXIT_PARENT_GONE = 3
# Schedulers send the last two to every process of a job step.
_IGNORED = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP, signal.SIGUSR1, signal.SIGUSR2)


class Request(msgspec.Struct, frozen=True, kw_only=True):
    """What the rank asks for."""

    id: int
    op: str
    file_bytes: int = 0
    target: TargetSpec | None = None
    sealed: Sealed | None = None
    fault: Fault | None = None


def warm_up() -> dict[str, Any]:
    """Load what the first save will need, and try it."""
    digest, fingerprint = digest_algorithm(), fingerprint_algorithm()
    hash_block(memoryview(bytes(4096)), digest, fingerprint)
    return {"pid": os.getpid(), "digest": digest, "fingerprint": fingerprint}


class Server:
    """Answers requests on `sock` until the other side closes it."""

    def __init__(self, sock: socket.socket) -> None:
        self._sock = sock
        self._sending = threading.Lock()
        self._fault: Fault | None = None

    def serve(self) -> None:
        """Until the end of the connection. Raises ConnectionError then, ValueError or msgspec errors on nonsense."""
        while True:
            message, fd = _receive(self._sock)
            request = msgspec.convert(message, Request)
            try:
                reply = {"ok": True, **self._answer(request, fd)}
            except Exception as error:
                kind = type(error).__name__
                text = str(error) if isinstance(error, KeepstepError) else f"{kind}: {error}"
                reply = {"ok": False, "kind": kind, "error": text or kind}
            finally:
                if fd is not None:
                    os.close(fd)
            if not reply["ok"]:
                gc.collect()  # the error's frames may hold the image mapped
            self._send({"id": request.id, **reply})

    def _send(self, message: dict[str, Any]) -> None:
        with self._sending:
            self._sock.sendall(pack(message))

    def _answer(self, request: Request, fd: int | None) -> dict[str, Any]:
        if request.op == "warm":
            return warm_up()
        if request.op == "inject":
            self._fault = request.fault
            return {}
        if fd is None:
            raise StorageError(f"request {request.op} came without a buffer")
        if request.op == "seal":
            return {"sealed": msgspec.to_builtins(seal_buffer(fd, request.file_bytes))}
        if request.op != "write" or request.target is None:
            raise StorageError(f"no such request: {request.op}")

        def on_sealed(sealed: Sealed) -> None:
            self._send({"id": request.id, "event": "sealed", "sealed": msgspec.to_builtins(sealed)})

        fault, self._fault = self._fault, None
        file = write_buffer(fd, request.file_bytes, request.target, request.sealed, fault, on_sealed)
        return {"file": msgspec.to_builtins(file)}


def _receive(sock: socket.socket) -> tuple[Any, int | None]:
    """One frame and the descriptor that came with it. Raises ConnectionError or ValueError."""
    data, fds, _flags, _address = socket.recv_fds(sock, 4, 1, socket.MSG_CMSG_CLOEXEC | socket.MSG_WAITALL)
    fd = fds[0] if fds else None
    if len(data) < 4:
        raise ConnectionError("peer closed the connection")
    (length,) = struct.unpack(">I", data)
    if length > MAX_FRAME_BYTES:
        raise ValueError(f"frame of {length} bytes is over the limit of {MAX_FRAME_BYTES}")
    return msgspec.json.decode(recv_exact(sock, length)), fd


def _end_with(parent: int, tie: bool) -> None:
    """Tie this process's life to that of process `parent`; exits at once when it is gone.

    PDEATHSIG fires when the *thread* that started us ends, so it is set only when that was the main thread. The watch on
    the parent's pidfd covers a start from any other.
    """
    if tie:
        die_with_parent_thread()
    try:
        pidfd = os.pidfd_open(parent)
    except ProcessLookupError:
        os._exit(EXIT_PARENT_GONE)
    if os.getppid() != parent:
        os._exit(EXIT_PARENT_GONE)

    def watch() -> None:
        poll = select.poll()
        poll.register(pidfd, select.POLLIN)
        poll.poll()
        os._exit(EXIT_PARENT_GONE)

    threading.Thread(target=watch, name="keepstep-parent", daemon=True).start()


def main(arguments: Sequence[str]) -> None:
    """Serve until the rank closes the socket or is gone."""
    for signum in _IGNORED:
        signal.signal(signum, signal.SIG_IGN)
    fd, parent, tie, nice, io_level = (int(argument) for argument in arguments)
    _end_with(parent, bool(tie))
    os.nice(nice)
    if io_level >= 0:
        set_io_level(io_level)
    with contextlib.suppress(ConnectionError):
        Server(socket.socket(fileno=fd)).serve()
    os._exit(0)
