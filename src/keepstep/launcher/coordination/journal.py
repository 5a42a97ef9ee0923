"""The coordinator's journal: `journal/<epoch>.jsonl`, one record a line, each durable before it has an effect.

An epoch is one life of a coordinator, claimed by exclusive create: of two coordinators on one folder only one gets the next
epoch, and the other's writes go to an older file that nobody reads as the newest. A line is a JSON object with `seq` and `crc`
(CRC-32 of the line's JSON without `crc`, in sorted compact form); recovery of an epoch stops at the first line that is torn,
out of sequence or fails its CRC: a crash can only have cut the end. What one `append` writes counts whole or not at all: every
line of it but the last says `more`, so that no transition is ever found half done.
"""

from __future__ import annotations

import os
import zlib
from pathlib import Path
from typing import Any

import msgspec

from keepstep.launcher.files import fsync_dir
from keepstep.records.codec import to_json
from keepstep.records.errors import StorageError
from keepstep.records.timeline import Mark

Record = dict[str, Any]


def _line(record: Record) -> bytes:
    return to_json({**record, "crc": zlib.crc32(to_json(record))}) + b"\n"


def parse_line(line: bytes, seq: int) -> Record | None:
    """A record from its line, None when it is torn, out of sequence or damaged."""
    try:
        record = msgspec.json.decode(line)
    except msgspec.DecodeError:
        return None
    if not isinstance(record, dict) or record.get("seq") != seq:
        return None
    crc = record.pop("crc", None)
    return record if crc == zlib.crc32(to_json(record)) else None


def epochs(run_dir: Path) -> list[int]:
    """Epoch numbers that exist in the run folder, oldest first."""
    return sorted(int(p.stem) for p in (run_dir / "journal").glob("*.jsonl") if p.stem.isdigit())


def epoch_path(run_dir: Path, epoch: int) -> Path:
    return run_dir / "journal" / f"{epoch:06d}.jsonl"


def read_epoch(path: Path) -> list[Record]:
    """Records of one epoch up to the first bad line, without an append that is not there whole."""
    records: list[Record] = []
    whole = 0
    with path.open("rb") as file:
        for line in file:
            if not line.endswith(b"\n"):
                break
            record = parse_line(line, len(records))
            if record is None:
                break
            records.append(record)
            if not record.pop("more", False):
                whole = len(records)
    return records[:whole]


def read_records(run_dir: Path) -> list[Record]:
    """All records of a run, epoch by epoch.

    A coordinator that was superseded may have written on for a moment. What its successor had not read when it opened (`read` in
    its first record) never had an effect and does not count.
    """
    records: list[Record] = []
    for epoch in epochs(run_dir):
        own = read_epoch(epoch_path(run_dir, epoch))
        if own and own[0].get("type") == "open" and "read" in own[0]:
            del records[own[0]["read"] :]
        records += own
    return records


def read_marks(run_dir: Path) -> list[Mark]:
    """The timeline of a run, for accounting. Raises StorageError when the folder has no journal."""
    if not epochs(run_dir):
        raise StorageError(f"{run_dir}: no journal there; is it the folder of a keepstep run?")
    return [msgspec.convert(r["mark"], Mark) for r in read_records(run_dir) if r.get("type") == "mark"]


class Journal:
    """An open epoch. `append` returns only when the records are on disk."""

    def __init__(self, fd: int, epoch: int, path: Path) -> None:
        self.epoch = epoch
        self.path = path
        self._fd = fd
        self._seq = 0

    @classmethod
    def claim(cls, run_dir: Path) -> Journal:
        """Claim the next epoch. Raises StorageError when the folder cannot be written."""
        folder = run_dir / "journal"
        try:
            folder.mkdir(parents=True, exist_ok=True, mode=0o700)
            while True:
                epoch = max(epochs(run_dir), default=0) + 1
                path = epoch_path(run_dir, epoch)
                try:
                    fd = os.open(path, os.O_CREAT | os.O_EXCL | os.O_WRONLY | os.O_APPEND | os.O_CLOEXEC, 0o600)
                except FileExistsError:
                    continue
                fsync_dir(folder)
                return cls(fd, epoch, path)
        except OSError as error:
            raise StorageError(f"{folder}: cannot write the journal: {error.strerror}") from error

    def superseded(self) -> bool:
        """True when a higher epoch exists: another coordinator took over and this one must stop."""
        return epoch_path(self.path.parent.parent, self.epoch + 1).exists()

    def append(self, records: list[Record]) -> None:
        """Write and fsync. Raises StorageError (disk full, gone) with the file's name."""
        if not records:
            return
        lines = bytearray()
        for left, record in zip(reversed(range(len(records))), records, strict=True):
            lines += _line({"seq": self._seq, **record, **({"more": True} if left else {})})
            self._seq += 1
        try:
            view = memoryview(lines)
            while view:
                view = view[os.write(self._fd, view) :]
            os.fdatasync(self._fd)
        except OSError as error:
            raise StorageError(f"{self.path}: cannot write the journal: {error.strerror}") from error

    def close(self) -> None:
        os.close(self._fd)


__all__ = ["Journal", "Record", "epochs", "parse_line", "read_epoch", "read_marks", "read_records"]
