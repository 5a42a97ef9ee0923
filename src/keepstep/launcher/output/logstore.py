"""Files of the log writer: batches of whole lines, and what it needs to remember to write no frame twice.

Beside the logs stands `logs/.funnel-state`, one JSON line a batch, appended before the batch is written:

    {"files": {"cycle-0003.log": [before, after]}, "seqs": {"node-a": ["<life>", 4711]}}

`before` and `after` are the file's size in bytes; `seqs` are the highest frames in the batch. A writer that comes after a
SIGKILL reads all lines: only the last batch can be in doubt. It is on file when every file has reached `after`; else its files are
cut back to `before` and its agents send it again. So each frame is on file exactly once over any number of killed writers, as
long as the host's page cache survives (nothing is fsynced: after a power cut the last seconds may be missing or repeated).
launcher.log has other writers on this host, so it is only ever appended to: after a kill its last lines may be there twice. In the
copies under --log-prefix the last batch may be missing or twice after a kill, and missing on a full disk.
"""

from __future__ import annotations

import contextlib
import errno
import fcntl
import os
from collections import OrderedDict
from pathlib import Path

import msgspec

from keepstep.launcher.output.logwire import EVIDENCE_CYCLE_BYTES, EVIDENCE_FILE_BYTES, Evidence
from keepstep.records.errors import StorageError

OPEN_FILES = 16
JOIN_BYTES = 4 << 20
STATE_BYTES = 4 << 20
LAUNCHER_LOG = "launcher.log"


class Batch(msgspec.Struct, kw_only=True):
    """What is written together. `texts`: file name -> lines with their prefixes; `seqs`: node -> (life, last frame)."""

    texts: dict[str, list[bytes]] = msgspec.field(default_factory=dict)
    evidence: list[tuple[str, Evidence]] = msgspec.field(default_factory=list)
    seqs: dict[str, tuple[str, int]] = msgspec.field(default_factory=dict)
    size_bytes: int = 0


class _StateLine(msgspec.Struct, frozen=True):
    files: dict[str, tuple[int, int]]
    seqs: dict[str, tuple[str, int]]


class LogStore:
    """The open files of one log writer. Only one may exist for a run folder. All methods but `__init__` run in one thread."""

    def __init__(self, run_dir: Path, prefix: str | None) -> None:
        """Raises StorageError when another writer has this run folder or it cannot be written."""
        self.seqs: dict[str, tuple[str, int]] = {}
        self.evidence_refused = 0
        self.copy_lost_bytes = 0
        self._logs = run_dir / "logs"
        self._evidence = run_dir / "evidence"
        self._prefix = prefix
        self._open: OrderedDict[Path, int] = OrderedDict()
        self._evidence_bytes: dict[int, int] = {}
        self._state = -1
        self._state_bytes = 0
        self._state_path = self._logs / ".funnel-state"
        try:
            self._logs.mkdir(parents=True, exist_ok=True, mode=0o700)
            self._lock = os.open(self._logs / ".funnel-lock", os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
            try:
                fcntl.flock(self._lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except BlockingIOError:
                os.close(self._lock)
                raise StorageError(f"{self._logs}: another log writer of this run is alive on this host") from None
            self._recover()
            flags = os.O_WRONLY | os.O_CREAT | os.O_APPEND | os.O_CLOEXEC | os.O_NOFOLLOW
            self._launcher = os.open(self._logs / LAUNCHER_LOG, flags, 0o600)
        except OSError as error:
            raise StorageError(f"{self._logs}: cannot be written: {error.strerror}") from error

    def close(self) -> None:
        for fd in (*self._open.values(), self._launcher, self._state, self._lock):
            os.close(fd)

    # ---- batches

    def write(self, batch: Batch) -> None:
        """All of it. Raises OSError (a full disk) with nothing of it in the cycles' logs; try the same object again then."""
        launcher = batch.texts.pop(LAUNCHER_LOG, None)
        if launcher is not None and not append_whole(self._launcher, b"".join(launcher)):
            batch.texts[LAUNCHER_LOG] = launcher
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        fds = {name: self._fd(self._logs / name) for name in batch.texts}
        before = {name: os.fstat(fd).st_size for name, fd in fds.items()}
        files = {name: (before[name], before[name] + sum(map(len, batch.texts[name]))) for name in fds}
        try:
            self._append_state(_StateLine(files, batch.seqs))
            for name, fd in fds.items():
                _write_at(fd, batch.texts[name], before[name])
            for node, piece in batch.evidence:
                self._write_evidence(node, piece)
        except OSError:
            for name, fd in fds.items():
                with contextlib.suppress(OSError):
                    os.ftruncate(fd, before[name])
            with contextlib.suppress(OSError):
                os.ftruncate(self._state, self._state_bytes)
            raise
        self._state_bytes = os.fstat(self._state).st_size
        self.seqs.update(batch.seqs)
        if self._prefix is not None:
            for name, texts in batch.texts.items():
                self._copy(name, texts)
        if self._state_bytes > STATE_BYTES:
            with contextlib.suppress(OSError):
                self._compact()

    def _fd(self, path: Path) -> int:
        """No O_APPEND: writes go to a known offset, so that a second attempt replaces the first."""
        fd = self._open.pop(path, None)
        if fd is None:
            fd = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_CLOEXEC | os.O_NOFOLLOW, 0o600)
            if len(self._open) >= OPEN_FILES:
                os.close(self._open.popitem(last=False)[1])
        self._open[path] = fd
        return fd

    def _copy(self, name: str, texts: list[bytes]) -> None:
        """PREFIX_cycleN.log. Its disk may be another one: what it does not take is counted, nobody waits for it."""
        try:
            fd = self._fd(copy_path(str(self._prefix), int(name[6:-4])))
            _write_at(fd, texts, os.fstat(fd).st_size)
        except OSError:
            self.copy_lost_bytes += sum(map(len, texts))

    # ---- evidence

    def _write_evidence(self, node: str, piece: Evidence) -> None:
        """A piece at its offset; the same piece again changes nothing. Over a bound it is counted and left out."""
        folder = self._evidence / f"cycle-{piece.cycle:04d}" / node
        if piece.cycle not in self._evidence_bytes:
            files = [p for p in folder.parent.glob("*/*") if p.is_file()]
            self._evidence_bytes[piece.cycle] = sum(p.stat().st_size for p in files)
        try:
            folder.mkdir(parents=True, exist_ok=True, mode=0o700)
            fd = os.open(folder / piece.name, os.O_WRONLY | os.O_CREAT | os.O_CLOEXEC | os.O_NOFOLLOW, 0o600)
            try:
                self._write_piece(fd, piece)
            finally:
                os.close(fd)
        except OSError as error:
            if error.errno in (errno.ENOSPC, errno.EDQUOT):
                raise
            self.evidence_refused += 1

    def _write_piece(self, fd: int, piece: Evidence) -> None:
        size = os.fstat(fd).st_size
        if piece.offset_bytes == 0 and size:
            os.ftruncate(fd, 0)
            self._evidence_bytes[piece.cycle] -= size
            size = 0
        end = piece.offset_bytes + len(piece.data)
        grows = max(0, end - size)
        # A gap means that an earlier piece was refused.
        if (
            piece.offset_bytes > size
            or end > EVIDENCE_FILE_BYTES
            or self._evidence_bytes[piece.cycle] + grows > EVIDENCE_CYCLE_BYTES
        ):
            self.evidence_refused += 1
            return
        _write_at(fd, [piece.data], piece.offset_bytes)
        self._evidence_bytes[piece.cycle] += grows

    # ---- state

    def _append_state(self, line: _StateLine) -> None:
        _write_at(self._state, [msgspec.json.encode(line) + b"\n"], self._state_bytes)

    def _recover(self) -> None:
        """Read what earlier writers left, undo a batch of which only a part is on file."""
        lines: list[_StateLine] = []
        with contextlib.suppress(FileNotFoundError, msgspec.MsgspecError):
            for raw in self._state_path.read_bytes().splitlines(keepends=True):
                if raw.endswith(b"\n"):
                    lines.append(msgspec.json.decode(raw, type=_StateLine))
        if lines and not self._is_whole(lines[-1]):
            for name, (before, _after) in lines.pop().files.items():
                path = self._logs / name
                if path.exists() and path.stat().st_size > before:
                    os.truncate(path, before)
        for line in lines:
            self.seqs.update(line.seqs)
        self._compact()

    def _is_whole(self, line: _StateLine) -> bool:
        sizes = {name: (self._logs / name).stat().st_size if (self._logs / name).exists() else 0 for name in line.files}
        return all(sizes[name] >= after for name, (_before, after) in line.files.items())

    def _compact(self) -> None:
        """Replace the state by one line that says the same."""
        new = self._state_path.with_suffix(".new")
        fd = os.open(new, os.O_RDWR | os.O_CREAT | os.O_TRUNC | os.O_CLOEXEC, 0o600)
        line = msgspec.json.encode(_StateLine({}, self.seqs)) + b"\n"
        try:
            _write_at(fd, [line], 0)
            new.replace(self._state_path)
        except OSError:
            os.close(fd)
            raise
        if self._state >= 0:
            os.close(self._state)
        self._state, self._state_bytes = fd, len(line)


def copy_path(prefix: str, cycle: int) -> Path:
    """Where --log-prefix wants the copy of a cycle's log."""
    return Path(f"{prefix}_cycle{cycle}.log")


def append_whole(fd: int, data: bytes) -> bool:
    """Append all of it, or none of it; False when the file did not take it."""
    view = memoryview(data)
    try:
        while view:
            view = view[os.write(fd, view) :]
    except OSError:
        with contextlib.suppress(OSError):
            os.ftruncate(fd, os.fstat(fd).st_size - (len(data) - len(view)))
        return False
    return True


def _write_at(fd: int, parts: list[bytes], offset: int) -> None:
    """Write all parts one after another from `offset` on, in blocks that bound the memory of joining. Raises OSError."""
    block: list[bytes] = []
    size = 0
    for number, part in enumerate(parts, 1):
        block.append(part)
        size += len(part)
        if size >= JOIN_BYTES or number == len(parts):
            view = memoryview(b"".join(block))
            while view:
                written = os.pwrite(fd, view, offset)
                offset += written
                view = view[written:]
            block, size = [], 0
