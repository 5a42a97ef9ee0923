"""System calls that `os` does not offer: room for a file, early write-back, I/O priority, the parent's death."""

from __future__ import annotations

import ctypes
import errno
import functools
import os
import platform
import signal

_FALLOC_FL_KEEP_SIZE = 1
_SYNC_FILE_RANGE_WRITE = 2
_IOPRIO_WHO_PROCESS = 1
_IOPRIO_CLASS_BEST_EFFORT = 2
_IOPRIO_CLASS_SHIFT = 13
_PR_SET_PDEATHSIG = 1
_SYS_IOPRIO_SET = {"x86_64": 251, "aarch64": 30}
_NOT_THERE = (errno.EOPNOTSUPP, errno.ENOSYS, errno.EINVAL, errno.ESPIPE)


@functools.cache
def _libc() -> ctypes.CDLL:
    return ctypes.CDLL(None, use_errno=True)


def reserve(fd: int, size_bytes: int) -> bool:
    """Take disk room for the first `size_bytes` of `fd` without changing its size; False where that is not possible.

    Not os.posix_fallocate: where the file system cannot do it, glibc writes into every block instead, and the size grows
    at once. Raises OSError, ENOSPC and EDQUOT above all.
    """
    while _libc().fallocate(fd, _FALLOC_FL_KEEP_SIZE, ctypes.c_long(0), ctypes.c_long(size_bytes)) != 0:
        number = ctypes.get_errno()
        if number == errno.EINTR:
            continue
        if number in _NOT_THERE:
            return False
        raise OSError(number, os.strerror(number))
    return True


def begin_write_back(fd: int, offset: int, size_bytes: int) -> None:
    """Ask the kernel to start writing these dirty pages now. Only a hint: errors show at fsync."""
    _libc().sync_file_range(fd, ctypes.c_long(offset), ctypes.c_long(size_bytes), _SYNC_FILE_RANGE_WRITE)


def set_io_level(level: int) -> None:
    """Best-effort class for this process's input and output, `level` 0 (first) to 7 (last). Does nothing where unknown.

    Only some I/O schedulers look at it (BFQ does; mq-deadline partly; "none" does not).
    """
    number = _SYS_IOPRIO_SET.get(platform.machine())
    if number is not None:
        _libc().syscall(number, _IOPRIO_WHO_PROCESS, 0, _IOPRIO_CLASS_BEST_EFFORT << _IOPRIO_CLASS_SHIFT | level)


def die_with_parent_thread() -> None:
    """SIGKILL for this process when the thread that started it ends (prctl PR_SET_PDEATHSIG). Raises OSError."""
    if _libc().prctl(_PR_SET_PDEATHSIG, int(signal.SIGKILL), 0, 0, 0) != 0:
        number = ctypes.get_errno()
        raise OSError(number, os.strerror(number))
