"""Which files to read: what a path names, and what of a folder is worth reading."""

from __future__ import annotations

import os
import re
import stat
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

FILES_LIMIT = 20_000
"""Files that are read of one folder, in the order of their names."""
DEPTH_LIMIT = 32

_SUFFIX_WORDS = """
.safetensors .pt .pth .bin .distcp .ckpt .npz .npy .pkl .pickle .so .o .a .pyc .whl .tar .tgz .zip .7z .xz .bz2
.parquet .arrow .h5 .hdf5 .png .jpg .jpeg .gif .mp4 .pdf .db .sqlite .sqlite3 .onnx .gguf .nsys-rep .qdrep .ncu-rep
.journal .tfevents .mmap .idx .deb .rpm .iso .img
"""
_BINARY_SUFFIXES = frozenset(_SUFFIX_WORDS.split())
_RECORDER = re.compile(r"nccl_trace|comm_lib_trace|flight.?recorder|(?:^|_)dump_")
"""Names of flight-recorder dumps, which are told from other pickles by their content."""
_CORE = re.compile(r"(?:core|vmcore)(?:\.[\w.-]+)?$|core-\S+-\d+$")
_OWN_STATE = ("incidents", "journal")
"""Of a run folder: what keepstep concluded itself, and its own bookkeeping."""


class Found(NamedTuple):
    """A file to read. `below`: its path below the folder that was given, or its own name."""

    path: Path
    below: str
    given: bool
    """Whether the user named it, rather than a folder above it."""


class Skipped(NamedTuple):
    """A file or folder that was left out, and why."""

    path: str
    why: str


def find(name: str) -> Iterator[Found | Skipped]:
    """The files that a path names, folders by their names in order. Each file once, whatever links lead to it.

    Raises nothing: a path that does not exist is given as it is, so that opening it tells.
    """
    top = Path(name)
    if not top.is_dir():
        yield Found(top, top.name, True)
        return
    seen: set[tuple[int, int]] = set()
    count = 0
    for one in _walk(top, top, 0):
        if isinstance(one, Skipped):
            yield one
            continue
        try:
            status = one.path.stat()
        except OSError as error:
            yield Skipped(str(one.path), f"cannot be read: {error.strerror}")
            continue
        if not stat.S_ISREG(status.st_mode):
            yield Skipped(str(one.path), "not a regular file")
        elif (status.st_dev, status.st_ino) not in seen:
            seen.add((status.st_dev, status.st_ino))
            count += 1
            if count > FILES_LIMIT:
                yield Skipped(str(top), f"more than {FILES_LIMIT} files; the rest were left out")
                return
            yield one


def _walk(top: Path, folder: Path, depth: int) -> Iterator[Found | Skipped]:
    try:
        entries = sorted(os.scandir(folder), key=lambda e: e.name)
    except OSError as error:
        yield Skipped(str(folder), f"cannot be read: {error.strerror}")
        return
    ours = is_run_folder(folder)
    for entry in entries:
        path = Path(entry.path)
        if entry.name.startswith("."):
            continue
        if entry.is_dir(follow_symlinks=False):
            if ours and entry.name in _OWN_STATE:
                yield Skipped(entry.path, "what keepstep itself concluded or keeps account of")
            elif depth >= DEPTH_LIMIT:
                yield Skipped(entry.path, f"deeper than {DEPTH_LIMIT} folders")
            else:
                yield from _walk(top, path, depth + 1)
        elif entry.is_symlink() and path.is_dir():
            yield Skipped(entry.path, "a link to a folder")
        else:
            why = not_worth(entry.name)
            yield Skipped(entry.path, why) if why else Found(path, str(path.relative_to(top)), False)


def not_worth(name: str) -> str | None:
    """Why a file is not read, judged by its name alone."""
    suffix = Path(name).suffix.lower()
    if _RECORDER.search(name) is not None:
        return None
    if suffix in _BINARY_SUFFIXES or ".tfevents." in name:
        return f"a binary file by its name ({suffix or name})"
    return "a core file by its name" if _CORE.match(name) else None


def is_run_folder(folder: Path) -> bool:
    """Whether a folder is one that `keepstep run` made (CONTRACT section 3)."""
    return (folder / "run.json").is_file() and (folder / "cycles").is_dir()
