"""Checkpoints in folders of a file system.

Readers never follow a link and never wait for a pipe. Writers create and never overwrite; whatever is returned from is
durable. The marker is made beside the folder and renamed into it, so a committed folder holds the listed files only.
"""

from __future__ import annotations

import contextlib
import ctypes
import errno
import functools
import os
import shutil
import stat
import subprocess
import sys
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Literal

import msgspec

from keepstep.checkpoint.format.layout import (
    LATEST_NAME,
    MARKERS,
    MAX_MANIFEST_BYTES,
    SIDE_FOLDER,
    FolderName,
    is_plain_file_name,
    parse_folder_name,
)
from keepstep.checkpoint.storage.source import MAX_RECORD_BYTES, check_record_name
from keepstep.checkpoint.storage.targets import DIRECT_ALIGN_BYTES
from keepstep.checkpoint.storage.writer import (
    FileFact,
    fsync_folder,
    make_folders,
    replace_file,
    storage_error,
    write_file,
)
from keepstep.records.errors import StorageError, VerificationError

LUSTRE_MAGIC = 0x0BD00BD0
"""`f_type` of statfs(2) on Lustre (lustre_user.h: LL_SUPER_MAGIC)."""
STRIPE_HINT = ("-E", "1G", "-c", "1", "-S", "16M", "-E", "-1", "-c", "4", "-S", "16M")
"""Layout of `lfs setstripe`: one target for the first GiB of a file, four for what is beyond, 16 MiB at a time.

One file a rank already spreads over targets; only large files gain from several, and each more is one more to wait for.
"""

_MAX_TRIES = 1000
_DIRECT_MIN_BYTES = 1 << 20  # below this the page cache is no burden
_READ_BYTES = 1 << 30  # read(2) returns at most 0x7ffff000 bytes
_LFS_TIMEOUT_S = 10.0


class PosixFile:
    """An open regular file."""

    def __init__(self, fd: int, size_bytes: int, path: Path) -> None:
        """Takes over descriptor `fd`."""
        self._fd = fd
        self._path = path
        self._direct_fd = -1
        self.size_bytes = size_bytes

    def bypass_cache(self) -> None:
        """Read large aligned pieces past the page cache from now on, where that works and the cache does not hold them already.

        For a file that one process of this host reads, once: the disk is as fast without the kernel's copy, and the memory of the
        cache is counted to the job's cgroup.
        """
        if self._direct_fd >= 0:
            return
        with contextlib.suppress(OSError):  # not on every file system
            flags = os.O_RDONLY | os.O_DIRECT | os.O_NOFOLLOW | os.O_CLOEXEC | os.O_NONBLOCK
            self._direct_fd = os.open(self._path, flags)
            if not os.path.samestat(os.fstat(self._direct_fd), os.fstat(self._fd)):
                self._stop_bypassing()
            else:
                os.posix_fadvise(self._fd, 0, 0, os.POSIX_FADV_RANDOM)  # what is left for it are single pages

    def _stop_bypassing(self) -> None:
        fd, self._direct_fd = self._direct_fd, -1
        if fd >= 0:
            os.close(fd)

    def _is_cached(self, offset: int) -> bool:
        """Whether the page cache holds the page at `offset`, or cannot say."""
        try:
            return os.preadv(self._fd, [bytearray(1)], offset, os.RWF_NOWAIT) > 0
        except BlockingIOError:
            return False
        except OSError:  # a file system that cannot read without waiting
            return True

    def _read_past_cache(self, view: memoryview, offset: int) -> int:
        """Fill the begin of `view` past the page cache; number of bytes, 0 when that is no gain or does not work."""
        size, at = len(view) - len(view) % DIRECT_ALIGN_BYTES, 0
        misaligned = offset % DIRECT_ALIGN_BYTES or _address(view) % DIRECT_ALIGN_BYTES
        if size < _DIRECT_MIN_BYTES or misaligned or self._is_cached(offset):
            return 0
        while at < size:
            try:
                count = os.preadv(self._direct_fd, [view[at:size]], offset + at)
            except OSError as error:
                if error.errno != errno.EINVAL:
                    raise
                return at  # other rules of alignment; the page cache has none
            if count % DIRECT_ALIGN_BYTES:
                return at + count - count % DIRECT_ALIGN_BYTES
            if count == 0:
                return at
            at += count
        return at

    def read_into(self, view: memoryview, offset: int) -> None:
        """See source.Opened."""
        try:
            at = self._read_past_cache(view, offset) if self._direct_fd >= 0 else 0
            while at < len(view):
                count = os.preadv(self._fd, [view[at : at + _READ_BYTES]], offset + at)
                if count == 0:
                    name = self._path.name
                    raise VerificationError(f"{name}: ends at byte {offset + at}, expected {offset + len(view)}")
                at += count
        except OSError as error:
            raise storage_error("read", self._path, error) from error

    def close(self) -> None:
        """See source.Opened."""
        self._stop_bypassing()
        if self._fd >= 0:
            fd, self._fd = self._fd, -1
            os.close(fd)


def _address(view: memoryview) -> int:
    """Where the bytes of `view`, which may be written to, lie."""
    return ctypes.addressof(ctypes.c_char.from_buffer(view))


class _StatFs(ctypes.Structure):
    # f_type comes first on every Linux; the rest is room for the other fields (statfs(2), 120 bytes on 64 bit).
    _fields_ = [("f_type", ctypes.c_long), ("rest", ctypes.c_byte * 256)]


def filesystem_type(path: Path) -> int:
    """`f_type` of the file system that `path` lies on, 0 when it cannot be told."""
    libc = ctypes.CDLL(None, use_errno=True)
    result = _StatFs()
    if libc.statfs(os.fsencode(path), ctypes.byref(result)) != 0:
        return 0
    return int(result.f_type) & 0xFFFFFFFF


class PosixRoot(msgspec.Struct, frozen=True):
    """Source, Sink and Deleter over folder `path`. `fs_type` tells the file system of a path, as `filesystem_type`."""

    path: Path
    fs_type: Callable[[Path], int] = filesystem_type

    @property
    def tier(self) -> Literal["disk"]:
        """See source.Source."""
        return "disk"

    @property
    def where(self) -> str:
        """See source.Source."""
        return str(self.path)

    # ---- reading

    def folders(self) -> list[str]:
        """See source.Source."""
        try:
            with os.scandir(self.path) as entries:
                return [
                    entry.name
                    for entry in entries
                    if parse_folder_name(entry.name) is not None and entry.is_dir(follow_symlinks=False)
                ]
        except FileNotFoundError:
            return []
        except OSError as error:
            raise storage_error("list", self.path, error) from error

    def marker(self, folder: str) -> tuple[str, bytes] | None:
        """See source.Source."""
        for name in MARKERS:
            path = self._folder(folder) / name
            if os.path.lexists(path):
                return name, _read_small(path, MAX_MANIFEST_BYTES)
        return None

    def files(self, folder: str) -> dict[str, int] | None:
        """See source.Source."""
        path = self._folder(folder)
        found = {}
        try:
            with os.scandir(path) as entries:
                for entry in entries:
                    status = entry.stat(follow_symlinks=False)
                    found[entry.name] = status.st_size if stat.S_ISREG(status.st_mode) else -1
        except (FileNotFoundError, NotADirectoryError):
            return None
        except OSError as error:
            raise storage_error("list", path, error) from error
        marker = next((name for name in MARKERS if name in found), None)
        found.pop(marker or "", None)
        return found

    def open(self, folder: str, name: str) -> PosixFile:
        """See source.Source."""
        if not is_plain_file_name(name):
            raise VerificationError(f"{name!r} is not a plain file name")
        return _open(self._folder(folder) / name)

    def records(self, kind: str) -> dict[str, bytes]:
        """See source.Source."""
        result = {}
        for name in self.record_names(kind):
            try:
                result[name] = _read_small(self.path / SIDE_FOLDER / kind / f"{name}.json", MAX_RECORD_BYTES)
            except (VerificationError, StorageError):
                result[name] = b""
        return result

    def record_names(self, kind: str) -> frozenset[str]:
        """See source.Source."""
        folder = self.path / SIDE_FOLDER / kind
        try:
            names = os.listdir(folder)
        except FileNotFoundError:
            return frozenset()
        except OSError as error:
            raise storage_error("list", folder, error) from error
        return frozenset(name[: -len(".json")] for name in names if name.endswith(".json") and name[0] != ".")

    def committed_once(self) -> bool:
        """See source.Source."""
        return (self.path / LATEST_NAME).exists()

    # ---- writing

    def note_latest(self, step: int) -> None:
        """See source.Sink."""
        try:
            replace_file(self.path / LATEST_NAME, f"{step}\n".encode())
        except StorageError as error:
            print(f"keepstep: {error} (the checkpoint itself is committed)", file=sys.stderr, flush=True)

    def make_folder(self, name: FolderName) -> str:
        """See source.Sink."""
        root = self.path
        try:
            make_folders(root)
            for retry in range(_MAX_TRIES):
                text = FolderName(name.step, name.cycle, name.attempt, retry, name.run_id).text
                try:
                    (root / text).mkdir()
                except FileExistsError:
                    continue
                if self.fs_type(root) == LUSTRE_MAGIC:
                    _set_stripe(root / text)
                fsync_folder(root)
                return text
        except OSError as error:
            raise storage_error("create a checkpoint folder in", root, error) from error
        raise storage_error("create a checkpoint folder in", root, FileExistsError(17, f"{_MAX_TRIES} tries exist"))

    def put_file(
        self, folder: str, name: str, parts: Iterable[bytes | memoryview], *, sha256: str | None = None
    ) -> FileFact:
        """See source.Sink. The folder's own entry for it becomes durable with `publish`."""
        fact = write_file(self._folder(folder) / name, parts)
        if sha256 is not None and fact.sha256 != sha256:
            raise StorageError(f"{folder}/{name}: its bytes changed while they were written")
        return fact

    def publish(self, folder: str, marker: str, data: bytes, *, may_publish: Callable[[], None] = lambda: None) -> None:
        """See source.Sink."""
        path, side = self._folder(folder), self.path / SIDE_FOLDER
        try:
            side.mkdir(exist_ok=True)
            there = self.marker(folder)
        except OSError as error:
            raise storage_error("create", side, error) from error
        except VerificationError as error:
            raise StorageError(f"{folder}: cannot commit, another marker is there: {error}") from None
        if there is not None and there != (marker, data):
            raise StorageError(f"{folder}: another writer committed ({there[0]} is there with other content)")
        fsync_folder(path)
        may_publish()
        if there is None:
            # From here on the folder is complete but for its marker; a reader sees all of it or no checkpoint.
            replace_file(path / marker, data, temp=side / f"{folder}.{os.getpid()}.marker")
        fsync_folder(self.path)

    def put_record(self, kind: str, name: str, data: bytes) -> str:
        """See source.Sink."""
        path = self.path / SIDE_FOLDER / check_record_name(kind, name)
        make_folders(path.parent)
        if os.path.lexists(path):
            try:
                same = _read_small(path, MAX_RECORD_BYTES) == data
            except VerificationError:
                same = False
            if not same:
                raise StorageError(f"{path} is there with other content; a record is written once")
            return str(path)
        replace_file(path, data)
        fsync_folder(path.parent.parent)
        return str(path)

    # ---- deleting

    def delete_marker(self, folder: str) -> None:
        """See source.Deleter."""
        for name in MARKERS:
            _unlink(self._folder(folder) / name)

    def delete_file(self, folder: str, name: str) -> None:
        """See source.Deleter."""
        if not is_plain_file_name(name):
            raise StorageError(f"{name!r} is not a plain file name; it is not deleted")
        if self.marker(folder) is not None:
            raise StorageError(f"{folder} is committed; its files are not deleted before its marker")
        _unlink(self._folder(folder) / name)

    def remove_folder(self, folder: str) -> None:
        """See source.Deleter."""
        try:
            self._folder(folder).rmdir()
        except FileNotFoundError:
            return
        except OSError as error:
            raise storage_error("remove", self._folder(folder), error) from error
        fsync_folder(self.path)

    def delete_record(self, kind: str, name: str) -> None:
        """See source.Deleter."""
        _unlink(self.path / SIDE_FOLDER / check_record_name(kind, name))

    def _folder(self, folder: str) -> Path:
        if "/" in folder or folder in ("", ".", ".."):
            raise StorageError(f"{folder!r} is not the name of a folder under {self.path}")
        return self.path / folder


def _open(path: Path) -> PosixFile:
    """Open a regular file; never follows a link, never blocks on a pipe."""
    try:
        fd = os.open(path, os.O_RDONLY | os.O_NOFOLLOW | os.O_CLOEXEC | os.O_NONBLOCK)
    except (FileNotFoundError, NotADirectoryError):
        raise VerificationError(f"{path.name}: is missing") from None
    except OSError as error:
        if error.errno in (errno.ELOOP, errno.ENXIO):  # a link, a socket
            raise VerificationError(f"{path.name}: is not a regular file") from None
        raise storage_error("open", path, error) from error
    status = os.fstat(fd)
    if not stat.S_ISREG(status.st_mode):
        os.close(fd)
        raise VerificationError(f"{path.name}: is not a regular file")
    with contextlib.suppress(OSError):  # advice; some file systems take none
        os.posix_fadvise(fd, 0, 0, os.POSIX_FADV_SEQUENTIAL)
    return PosixFile(fd, status.st_size, path)


def _read_small(path: Path, limit_bytes: int) -> bytes:
    opened = _open(path)
    try:
        if opened.size_bytes > limit_bytes:
            raise VerificationError(f"{path.name}: {opened.size_bytes} bytes are over the limit of {limit_bytes}")
        buffer = bytearray(opened.size_bytes)
        opened.read_into(memoryview(buffer), 0)
        return bytes(buffer)
    finally:
        opened.close()


def _unlink(path: Path) -> None:
    try:
        path.unlink()
    except (FileNotFoundError, NotADirectoryError):
        return
    except OSError as error:
        raise storage_error("delete", path, error) from error
    fsync_folder(path.parent)


# ---- Lustre


def _set_stripe(folder: Path) -> None:
    """Give `folder` the layout that its files inherit. A hint: without it the file system's own default holds."""
    lfs = shutil.which("lfs")
    if lfs is None:
        _say_once(f"{folder.parent} is on Lustre, but there is no `lfs` to set a stripe layout with")
        return
    command = [lfs, "setstripe", *STRIPE_HINT, str(folder)]
    try:
        done = subprocess.run(
            command, stdin=subprocess.DEVNULL, capture_output=True, text=True, timeout=_LFS_TIMEOUT_S, check=False
        )
        problem = "" if done.returncode == 0 else (done.stderr.strip() or f"exit code {done.returncode}")
    except (OSError, subprocess.TimeoutExpired) as error:
        problem = str(error)
    layout = " ".join(STRIPE_HINT)
    _say_once(
        f"{folder.parent} is on Lustre: `lfs setstripe` failed and the default layout is used: {problem}"
        if problem
        else f"{folder.parent} is on Lustre: checkpoint folders get the stripe layout {layout}"
    )


@functools.lru_cache(maxsize=64)
def _say_once(message: str) -> None:
    print(f"keepstep: {message}", file=sys.stderr, flush=True)
