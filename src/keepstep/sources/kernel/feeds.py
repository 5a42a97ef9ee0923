"""Where records of the kernel's log come from, all alike to the reader: a descriptor to wait for, and what can be read now.

/dev/kmsg numbers its records and says when the ring went round under the reader. The journal has cursors. `dmesg --follow` has
neither; its records are told apart by their time. A FIFO stands for /dev/kmsg, or carries the lines of any tool.
"""

from __future__ import annotations

import contextlib
import os
import shutil
import signal
import stat
import subprocess
import uuid
from collections.abc import Sequence
from pathlib import Path
from typing import NamedTuple, Protocol

import msgspec

from keepstep.records.errors import StorageError
from keepstep.sources.kernel.cursor import Position
from keepstep.sources.kernel.records import KMSG, RECORD_BYTES, KmsgRecord, boot_id, parse_kmsg, utc_of
from keepstep.sources.prefixes import strip
from keepstep.sources.transports import journal_record

BATCH = 1000
"""Records that are taken at once."""
LINE_BYTES = 64 << 10
"""Of a line of a pipe that are kept."""


class Record(NamedTuple):
    """One record. `position`: to be saved once it was handled. `lost`: records missing before it: a number, -1: unknown how many.

    `text` is a line as the source has it, prefixes included where `boot_ns` and `time_ns` are not known from elsewhere.
    """

    text: str
    position: Position
    boot_ns: int | None = None
    time_ns: int | None = None
    node: str | None = None
    boot: str | None = None
    lost: int = 0
    reason: str = ""


class Feed(Protocol):
    """A source of records. `name`: for the evidence."""

    name: str

    def fileno(self) -> int:
        """Readable when `read` has something."""
        ...

    def read(self) -> list[Record]:
        """Records that are there, at most BATCH; never waits. Raises EndedError when the source has ended."""
        ...

    def close(self) -> None:
        """Give everything back."""
        ...


class EndedError(StorageError):
    """Raised when a source of records has ended and must be opened again."""


class KmsgFeed:
    """/dev/kmsg itself. After `position` of this boot; the oldest record that is left without one."""

    def __init__(self, position: Position | None, path: Path = KMSG) -> None:
        self.name = str(path)
        self._boot = boot_id()
        self._last: int | None = None
        self._begin = ""
        if position is not None and position.stream == self._boot:
            self._last = position.seq
        elif position is not None:
            self._begin = "another boot since then"
        self._overrun = False
        self._waiting: Record | None = None
        try:
            self._fd = os.open(path, os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC)
        except OSError as error:
            raise StorageError(
                f"{path}: cannot read: {error.strerror}; run as root, or with CAP_SYSLOG, or follow the journal"
            ) from error

    def fileno(self) -> int:
        return self._fd

    def read(self) -> list[Record]:
        found: list[Record] = []
        while len(found) < BATCH:
            try:
                data = os.read(self._fd, RECORD_BYTES)
            except BlockingIOError:
                break
            except BrokenPipeError:
                self._overrun = True
                continue
            if not data:
                raise EndedError(f"{self.name} has ended")
            record = self._record(data)
            if record is not None:
                found.append(record)
        return found

    def _record(self, data: bytes) -> Record | None:
        parsed = parse_kmsg(data)
        if parsed is None or (self._last is not None and parsed.seq <= self._last):
            return None
        lost, reason = _missing(self._last, parsed.seq, self._overrun, self._begin)
        self._last, self._overrun, self._begin = parsed.seq, False, ""
        return _numbered(parsed, Position(stream=self._boot, seq=parsed.seq), lost, reason)

    def close(self) -> None:
        os.close(self._fd)


def _numbered(parsed: KmsgRecord, position: Position, lost: int, reason: str) -> Record:
    """A record in the format of /dev/kmsg; `position.stream` is the boot that it is of."""
    return Record(
        text=("" if parsed.priority >> 3 else "kernel: ") + parsed.text,
        position=position,
        boot_ns=parsed.boot_ns,
        time_ns=utc_of(parsed.boot_ns),
        boot=position.stream,
        lost=lost,
        reason=reason,
    )


def _missing(last: int | None, seq: int, overrun: bool, begin: str) -> tuple[int, str]:
    if last is not None and seq > last + 1:
        return seq - last - 1, "the ring was overrun"
    if overrun or begin:
        return -1, begin or "the ring was overrun"
    return 0, ""


class PipeFeed:
    """Lines of a FIFO. Those in the format of /dev/kmsg keep their numbers, others are numbered as they come."""

    def __init__(self, position: Position | None, path: Path) -> None:
        self.name = str(path)
        self._stream = position.stream if position is not None else f"fifo-{uuid.uuid4().hex}"
        self._count = position.seq if position is not None else 0
        self._last = position.seq if position is not None and position.boot_ns else None
        self._lines = _Lines()
        try:
            # Opened for writing too, a FIFO does not end when its last writer leaves.
            self._fd = os.open(path, os.O_RDWR | os.O_NONBLOCK | os.O_CLOEXEC)
        except OSError as error:
            raise StorageError(f"{path}: cannot read: {error.strerror}") from error

    def fileno(self) -> int:
        return self._fd

    def read(self) -> list[Record]:
        return [r for r in map(self._record, self._lines.read(self._fd)) if r is not None]

    def _record(self, line: bytes) -> Record | None:
        parsed = parse_kmsg(line)
        if parsed is None:
            self._count += 1
            at = Position(stream=self._stream, seq=self._count)
            return Record(line.decode(errors="replace"), at, boot=self._stream)
        if self._last is not None and parsed.seq <= self._last:
            return None
        lost, reason = _missing(self._last, parsed.seq, False, "")
        self._last = parsed.seq
        at = Position(stream=self._stream, seq=parsed.seq, boot_ns=parsed.boot_ns)
        return _numbered(parsed, at, lost, reason)

    def close(self) -> None:
        os.close(self._fd)


class _Lines:
    """Whole lines from pieces of them."""

    def __init__(self) -> None:
        self._rest = b""

    def read(self, fd: int) -> list[bytes]:
        """Lines that are complete now. Raises EndedError at the end of the stream."""
        try:
            data = os.read(fd, 1 << 18)
        except BlockingIOError:
            return []
        if not data:
            raise EndedError("the stream has ended")
        *lines, self._rest = (self._rest + data).split(b"\n")
        self._rest = self._rest[:LINE_BYTES]
        return [line[:LINE_BYTES] for line in lines if line]


class _Command:
    """A tool whose output is followed."""

    def __init__(self, command: Sequence[str]) -> None:
        try:
            self.process = subprocess.Popen(
                command,
                stdin=subprocess.DEVNULL,
                stdout=subprocess.PIPE,
                stderr=subprocess.DEVNULL,
                start_new_session=True,
            )
        except OSError as error:
            raise StorageError(f"{command[0]}: cannot be started: {error.strerror}") from error
        assert self.process.stdout is not None
        self.fd = self.process.stdout.fileno()
        os.set_blocking(self.fd, False)

    def close(self) -> None:
        with contextlib.suppress(ProcessLookupError):
            os.killpg(self.process.pid, signal.SIGKILL)
        self.process.wait()
        if self.process.stdout is not None:
            self.process.stdout.close()


class JournalFeed:
    """The kernel's messages in the journal, also those of boots since `position`."""

    def __init__(self, position: Position | None, command: str = "journalctl") -> None:
        self.name = "journal"
        self._from = position.cursor if position is not None else ""
        # With --cursor the first entry is the one that was handled last; another one tells that it is gone.
        since = [f"--cursor={self._from}"] if self._from else ["--boot"]
        follow = ["--output=json", "--follow", "--no-tail", "--no-pager", "--quiet"]
        self._command = _Command([command, *follow, *since, "_TRANSPORT=kernel", "+", "SYSLOG_IDENTIFIER=kernel"])
        self._lines = _Lines()

    def fileno(self) -> int:
        return self._command.fd

    def read(self) -> list[Record]:
        return [r for r in map(self._record, self._lines.read(self._command.fd)) if r is not None]

    def _record(self, line: bytes) -> Record | None:
        try:
            fields = msgspec.json.decode(line)
        except msgspec.DecodeError:
            return None
        entry = journal_record(fields) if isinstance(fields, dict) else None
        cursor = fields.get("__CURSOR") if isinstance(fields, dict) else None
        if entry is None or not isinstance(cursor, str):
            return None
        expected, self._from = self._from, ""
        if expected == cursor:
            return None
        return Record(
            text=f"kernel: {entry.message}",
            position=Position(stream=entry.boot_id or "", cursor=cursor),
            boot_ns=entry.boot_ns,
            time_ns=None if entry.stamp is None else entry.stamp.ns,
            node=entry.node,
            boot=entry.boot_id,
            lost=-1 if expected else 0,
            reason="the journal does not hold the last entry any more" if expected else "",
        )

    def close(self) -> None:
        self._command.close()


class DmesgFeed:
    """`dmesg --follow`: everything in the ring, then what comes. Records up to the time of `position` are passed over."""

    def __init__(self, position: Position | None, command: str = "dmesg") -> None:
        self.name = "dmesg"
        self._boot = boot_id()
        self._last_ns = position.boot_ns if position is not None and position.stream == self._boot else -1
        self._begin = "another boot since then" if position is not None and position.stream != self._boot else ""
        self._seq = position.seq if position is not None and position.stream == self._boot else 0
        self._oldest = self._last_ns
        self._command = _Command([command, "--follow", "--raw"])
        self._lines = _Lines()

    def fileno(self) -> int:
        return self._command.fd

    def read(self) -> list[Record]:
        return [r for r in map(self._record, self._lines.read(self._command.fd)) if r is not None]

    def _record(self, line: bytes) -> Record | None:
        text = line.decode(errors="replace")
        boot_ns = _boot_ns(text)
        if boot_ns is not None and boot_ns <= self._last_ns:
            self._oldest = -1
            return None
        # The ring holds nothing that was handled before: what came in between may be gone.
        lost, reason = (-1, "the ring was overrun") if self._oldest >= 0 else (0, "")
        if self._begin:
            lost, reason = -1, self._begin
        self._oldest, self._begin = -1, ""
        self._seq += 1
        return Record(
            text=text,
            position=Position(stream=self._boot, seq=self._seq, boot_ns=boot_ns or 0),
            boot_ns=boot_ns,
            time_ns=None if boot_ns is None else utc_of(boot_ns),
            boot=self._boot,
            lost=lost,
            reason=reason,
        )

    def close(self) -> None:
        self._command.close()


def _boot_ns(text: str) -> int | None:
    return strip(text).said.boot_ns


def default_source() -> str:
    """The best source of this host: /dev/kmsg where it can be read, else the journal, else dmesg."""
    if os.access(KMSG, os.R_OK):
        return str(KMSG)
    return "journal" if shutil.which("journalctl") else "dmesg"


def open_feed(source: str, position: Position | None) -> Feed:
    """The feed that a word names: "journal", "dmesg", or a path: /dev/kmsg or a FIFO. Raises StorageError."""
    if source == "journal":
        return JournalFeed(position)
    if source == "dmesg":
        return DmesgFeed(position)
    path = Path(source)
    try:
        mode = path.stat().st_mode
    except OSError as error:
        raise StorageError(f"{path}: {error.strerror}; --follow takes /dev/kmsg, a FIFO, journal or dmesg") from error
    if stat.S_ISFIFO(mode):
        return PipeFeed(position, path)
    if stat.S_ISCHR(mode):
        return KmsgFeed(position, path)
    raise StorageError(f"{path}: neither a FIFO nor /dev/kmsg; --follow takes those, journal or dmesg")
