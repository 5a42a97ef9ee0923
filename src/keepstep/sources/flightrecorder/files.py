"""Where dumps are, which rank wrote each, and their bytes."""

from __future__ import annotations

import gzip
import io
import os
import re
import stat
import sys
import zlib
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import NamedTuple

from keepstep.records.errors import ConfigError
from keepstep.sources.flightrecorder.dump import MAX_DUMP_BYTES, DumpError

STDIN = "-"
MAX_FILES = 200_000
MAX_DEPTH = 6
OTHER_SUFFIXES = frozenset(
    {
        ".log",
        ".txt",
        ".out",
        ".err",
        ".md",
        ".py",
        ".sh",
        ".yaml",
        ".yml",
        ".toml",
        ".csv",
        ".tsv",
        ".html",
        ".pipe",
        ".pid",
    }
)
"""Of files in a folder that are not opened: no dump is called so."""

_COMPRESSED = re.compile(r"\.(?:gz|zst|zstd)\Z", re.IGNORECASE)
_KIND = re.compile(r"\.(?:pkl|pickle|json|bin|dump|trace|dat|fr|pt)\Z", re.IGNORECASE)
_AFTER_RANK = re.compile(r"rank[-_. ]?(\d{1,9})(?!\d)", re.IGNORECASE)
_AT_END = re.compile(r"(\d{1,9})\Z")
_LIKE_A_DUMP = re.compile(r"trace|dump|flight|(?:^|[-_.])fr[-_.]", re.IGNORECASE)
_CYCLE = re.compile(r"cycle-(\d{4,})\Z")
_GZIP, _ZSTD = b"\x1f\x8b", b"\x28\xb5\x2f\xfd"


class Source(NamedTuple):
    """A file that may be a dump. `rank`: what its name says, if anything. `sure`: it was named, or is called as dumps are."""

    path: str
    rank: int | None
    sure: bool
    size_bytes: int = 0


class Found(NamedTuple):
    """Dumps to read, and the cycle record that belongs to them when they lie in a run folder."""

    sources: list[Source]
    cycle_record: Path | None
    notes: list[str]


def rank_of_name(name: str) -> int | None:
    """Rank in a file name: 7 of "_dump_7", "nccl_trace_rank_7", "nccl-trace-rank-00007.gz", "host-3_rank7.json", "7.pkl"."""
    stem = _KIND.sub("", _COMPRESSED.sub("", name))
    after = _AFTER_RANK.findall(stem)
    if after:
        return int(after[-1])
    end = _AT_END.search(stem)
    return int(end[1]) if end else None


def shown(path: str) -> str:
    """A path for a message: names of files may hold bytes that are no text."""
    return os.fsencode(path).decode(errors="replace")


def find_dumps(paths: Sequence[str]) -> Found:
    """Dumps in files, folders and run folders (there the newest cycle that has some).

    A path that does not exist is said in `notes`, as is one without dumps.
    """
    found = Found([], None, [])
    for name in paths:
        path = Path(name)
        if name == STDIN:
            found.sources.append(Source(STDIN, None, True))
        elif path.is_dir():
            folder, record = _evidence_of(path)
            here = _in_folder(folder)
            if not here:
                found.notes.append(f"{folder}: no file here looks like a flight-recorder dump")
            found.sources.extend(here)
            found = found._replace(cycle_record=found.cycle_record or record)
        elif path.exists():
            found.sources.append(Source(name, rank_of_name(path.name), True, path.stat().st_size))
        else:
            found.notes.append(f"{name}: no such file or folder")
    return found


def _evidence_of(folder: Path) -> tuple[Path, Path | None]:
    """The folder that holds dumps and its cycle record: of a run the newest cycle with dumps, else `folder` itself."""
    for top in (folder, folder / "evidence"):
        cycles = [p for p in _folders(top) if _CYCLE.match(p.name) and any(_is_dump_of_ours(n) for n in os.listdir(p))]
        if cycles:
            folder = max(cycles, key=lambda p: int(p.name.rpartition("-")[2]))
            break
    # evidence/cycle-0003 belongs to cycles/cycle-0003.json
    record = folder.parent.parent / "cycles" / f"{folder.name}.json" if _CYCLE.match(folder.name) else None
    return folder, record if record is not None and record.is_file() else None


def _folders(top: Path) -> list[Path]:
    try:
        return [p for p in top.iterdir() if p.is_dir()]
    except OSError:
        return []


def _is_dump_of_ours(name: str) -> bool:
    return name.startswith("nccl-trace-rank-")


def _in_folder(folder: Path) -> list[Source]:
    """Files below `folder` that may be dumps; when some are called as dumps are, only those."""
    found = []
    for path in _walk(folder, MAX_DEPTH):
        if path.suffix.lower() in OTHER_SUFFIXES or path.name.startswith("."):
            continue
        rank = rank_of_name(path.name)
        like = rank is not None and _LIKE_A_DUMP.search(path.name) is not None
        found.append(Source(str(path), rank, like, path.stat().st_size))
        if len(found) >= MAX_FILES:
            break
    called_so = [source for source in found if source.sure]
    return called_so or found


def _walk(folder: Path, depth: int) -> Iterator[Path]:
    """Regular files below `folder`, in the order of their names, links to folders not followed."""
    try:
        entries = sorted(os.scandir(folder), key=lambda entry: entry.name)
    except OSError:
        return
    for entry in entries:
        try:
            if entry.is_dir(follow_symlinks=False):
                if depth > 0:
                    yield from _walk(Path(entry.path), depth - 1)
            elif stat.S_ISREG(entry.stat().st_mode):
                yield Path(entry.path)
        except OSError:
            continue


# ---- bytes


def read_bytes(path: str) -> bytes:
    """The content of a dump, decompressed. Raises DumpError, and ConfigError when zstandard is needed and not installed."""
    if path == STDIN:
        return _decompressed(sys.stdin.buffer.read(MAX_DUMP_BYTES + 1))
    try:
        with open(path, "rb") as file:
            status = os.fstat(file.fileno())
            expected = status.st_size if stat.S_ISREG(status.st_mode) else MAX_DUMP_BYTES
            return _decompressed(file.read(min(expected, MAX_DUMP_BYTES) + 1))
    except OSError as error:
        raise DumpError(f"cannot be read: {error.strerror or error}") from None


def _decompressed(head: bytes) -> bytes:
    if head.startswith(_GZIP):
        data = _gunzip(head)
    elif head.startswith(_ZSTD):
        data = _unzstd(head)
    else:
        data = head
    if len(data) > MAX_DUMP_BYTES:
        raise DumpError(f"larger than {MAX_DUMP_BYTES >> 20} MiB")
    return data


def _gunzip(data: bytes) -> bytes:
    try:
        with gzip.GzipFile(fileobj=io.BytesIO(data)) as file:
            return file.read(MAX_DUMP_BYTES + 1)
    except (OSError, EOFError, zlib.error) as error:
        raise DumpError(f"damaged gzip: {error}") from None


def _unzstd(data: bytes) -> bytes:
    try:
        import zstandard
    except ModuleNotFoundError as error:
        raise ConfigError(
            "a dump is compressed with zstd, which needs zstandard: pip install 'keepstep[diagnose]'"
        ) from error
    # A window is memory: no more of it than a dump may have bytes.
    reader = zstandard.ZstdDecompressor(max_window_size=MAX_DUMP_BYTES).stream_reader(data, read_across_frames=True)
    try:
        content = reader.read(MAX_DUMP_BYTES + 1)
    except zstandard.ZstdError as error:
        raise DumpError(f"damaged zstd: {error}") from None
    if not content:
        raise DumpError("damaged zstd: it ends early")  # the library takes that for the end of the content
    return content
