"""Bytes as they come -> text: compression, encodings, and what is no text at all."""

from __future__ import annotations

import gzip
import io
import re
import zlib
from collections.abc import Iterator
from typing import BinaryIO, NamedTuple

GZIP = b"\x1f\x8b"
ZSTD = b"\x28\xb5\x2f\xfd"
BLOCK_BYTES = 1 << 20
ZSTD_WINDOW_BYTES = 1 << 27
"""What `zstd --long` writes; a file that asks for more memory than this is not read."""

SAMPLE_BYTES = 64 << 10
RECORDER_KEYS = (b"pg_config", b"nccl_version", b"comm_lib_version", b"pg_status")

SAMPLE_BYTES = 64 << 10
RECORDER_KEYS = (b"pg_config", b"nccl_version", b"comm_lib_version", b"pg_status")

BINARY_MAGIC: tuple[tuple[bytes, str], ...] = (
    (b"\x7fELF", "an ELF file (a program or a core)"),
    (b"PK\x03\x04", "a zip archive (torch checkpoints are some)"),
    (b"\x80\x02", "a pickle"),
    (b"\x80\x03", "a pickle"),
    (b"\x80\x04", "a pickle"),
    (b"\x80\x05", "a pickle"),
    (b"SQLite format 3\0", "an SQLite database"),
    (b"\x89PNG", "an image"),
    (b"\xfd7zXZ\0", "an xz file"),
    (b"BZh91AY&SY", "a bzip2 file"),
    (b"LPKSHHRH", "a systemd journal file; export it with journalctl -o json"),
    (b"\x89HDF", "an HDF5 file"),
    (b"PAR1", "a Parquet file"),
)
"""First bytes of files that are no text, and what they are."""

_WIDE = (
    (b"\xff\xfe\0\0", "utf-32-le"),
    (b"\0\0\xfe\xff", "utf-32-be"),
    (b"\xff\xfe", "utf-16-le"),
    (b"\xfe\xff", "utf-16-be"),
)
_TEXT_CONTROLS = frozenset(b"\t\n\r\x0b\x0c\x08\x1b\0")
_CONTROLS = bytes(b for b in range(32) if b not in _TEXT_CONTROLS) + b"\x7f"


class Opened(NamedTuple):
    """A byte stream that was looked into. `notes` grows while it is read: what was cut short or broken in it."""

    blocks: Iterator[bytes]
    compression: str
    notes: list[str]


def open_stream(stream: BinaryIO) -> Opened:
    """The bytes of a file, unpacked where it is gzip or zstd; several frames one after another are one file.

    What is there of a truncated or broken file is given, and a note says where it ends. Never raises but OSError of the stream
    itself, and ModuleNotFoundError where a zstd file comes and the package `zstandard` is not installed.
    """
    head = _read_exactly(stream, 4)
    rest = _Joined(head, stream)
    notes: list[str] = []
    if head.startswith(GZIP):
        return Opened(_gunzip(rest, notes), "gzip", notes)
    if head == ZSTD:
        return Opened(_unzstd(rest, notes), "zstd", notes)
    return Opened(_plain(rest), "", notes)


def what_binary(head: bytes) -> str | None:
    """What a file is whose first bytes are `head` (some KiB), None when it may be text."""
    for magic, name in BINARY_MAGIC:
        if head.startswith(magic):
            return name
    if any(head.startswith(mark) for mark, _ in _WIDE) or not head:
        return None
    # Blocks of NUL are what a crash leaves in a text file. Other control characters, in numbers, are in no text.
    told = head.replace(b"\0", b"")
    strange = len(told) - len(told.translate(None, _CONTROLS))
    if strange * 20 > len(told):
        return "binary data"
    return "nothing but NUL bytes" if not told else None


def is_flight_recorder(head: bytes) -> bool:
    """Whether a file that begins so is a dump of torch's flight recorder: a pickle or JSON with its keys. It is not parsed."""
    sample = head[:SAMPLE_BYTES]
    if sample.lstrip()[:1] == b"{":
        return b'"pg_config"' in sample or (b'"entries"' in sample and b'"profiling_name"' in sample)
    return head[:2] in (b"\x80\x02", b"\x80\x04") and any(key in sample for key in RECORDER_KEYS)


_YAML = re.compile(rb"(?:---\s*)?(?:- )?(?:apiVersion|kind|items):")
_JSON_LIST = re.compile(rb"\[\s*[{\[\"\]]")
_ACCOUNTS = re.compile(rb"\s*JobID[A-Za-z]*[|,\s]")


def is_record(head: bytes) -> bool:
    """Whether a text that begins so is one document of JSON or YAML, or a table of accounting, and no log.

    JSON with a whole object in its first line and another in the next is a log whose lines are JSON.
    """
    begin = head[:SAMPLE_BYTES].lstrip()
    if begin[:1] == b"{" or _JSON_LIST.match(begin) is not None:
        first, _, rest = begin.partition(b"\n")
        return not (first.rstrip().endswith(b"}") and rest.lstrip()[:1] == b"{")
    return _YAML.match(begin) is not None or _ACCOUNTS.match(begin) is not None


def wide_encoding(head: bytes) -> str | None:
    """UTF-16 or UTF-32 by its byte order mark, else None."""
    return next((name for mark, name in _WIDE if head.startswith(mark)), None)


def to_text(data: bytes) -> str:
    """Text of any bytes: by its byte order mark, else UTF-8, else Latin-1 where hardly anything of it is UTF-8."""
    wide = wide_encoding(data)
    if wide is not None:
        return data.decode(wide, errors="replace").removeprefix("\ufeff")
    data = data.removeprefix(b"\xef\xbb\xbf")
    try:
        return data.decode()
    except UnicodeDecodeError:
        text = data.decode(errors="replace")
    # Here a character and there one that is broken: UTF-8 that was cut. All of them broken: another encoding.
    broken = text.count("\ufffd")
    whole = sum(1 for c in text if ord(c) > 127) - broken
    return data.decode("latin-1") if broken > max(2, 2 * whole) else text


def _read_exactly(stream: BinaryIO, count: int) -> bytes:
    """The next `count` bytes; fewer only at the end (a pipe may give less at a time)."""
    found = b""
    while len(found) < count:
        piece = stream.read(count - len(found))
        if not piece:
            break
        found += piece
    return found


class _Joined(io.RawIOBase):
    """Bytes that were read ahead, and the stream they came from."""

    def __init__(self, head: bytes, stream: BinaryIO) -> None:
        self._head = head
        self._stream = stream

    def readable(self) -> bool:
        return True

    def read(self, size: int = -1, /) -> bytes:
        if self._head:
            given, self._head = self._head, b""
            return given
        return self._stream.read(size) or b""

    def readinto(self, buffer: memoryview, /) -> int:  # type: ignore[override]
        data = self.read(len(buffer))
        buffer[: len(data)] = data
        return len(data)


def _plain(stream: _Joined) -> Iterator[bytes]:
    while block := stream.read(BLOCK_BYTES):
        yield block


def _gunzip(stream: _Joined, notes: list[str]) -> Iterator[bytes]:
    done = 0
    try:
        with gzip.GzipFile(fileobj=io.BufferedReader(stream, BLOCK_BYTES)) as file:
            while block := file.read1(BLOCK_BYTES):
                done += len(block)
                yield block
    except (EOFError, gzip.BadGzipFile, zlib.error) as error:
        notes.append(f"gzip data end early, after {done} bytes of text ({error})")


def _unzstd(stream: _Joined, notes: list[str]) -> Iterator[bytes]:
    import zstandard

    done = 0
    decoder = zstandard.ZstdDecompressor(max_window_size=ZSTD_WINDOW_BYTES).decompressobj()
    between = False
    try:
        for packed in _pieces(stream):
            left = packed
            while left:
                if between:
                    decoder = zstandard.ZstdDecompressor(max_window_size=ZSTD_WINDOW_BYTES).decompressobj()
                block = decoder.decompress(left)
                done += len(block)
                if block:
                    yield block
                between = decoder.eof
                left = decoder.unused_data if between else b""
    except zstandard.ZstdError as error:
        notes.append(f"zstd data end early, after {done} bytes of text ({error})")
    else:
        if not between:
            notes.append(f"zstd data end early, after {done} bytes of text")


def _pieces(stream: _Joined) -> Iterator[bytes]:
    """Small pieces: four bytes of zstd can stand for 128 KiB, so that a piece gives 32 MiB at most."""
    while block := stream.read(BLOCK_BYTES):
        for start in range(0, len(block), 1024):
            yield block[start : start + 1024]
