"""Quarantine: a record beside the checkpoints says which must not be restored. Nothing is deleted or moved."""

from __future__ import annotations

from pathlib import Path

import msgspec

from keepstep.checkpoint.format.layout import QUARANTINE_FOLDER, SIDE_FOLDER, quarantine_file
from keepstep.checkpoint.storage.writer import replace_file, storage_error
from keepstep.records.codec import to_pretty_json


class QuarantineRecord(msgspec.Struct, frozen=True, kw_only=True):
    """`keepstep.quarantine/1`: why checkpoint `checkpoint` was refused, by which rank, when (RFC 3339)."""

    schema: str = "keepstep.quarantine/1"
    checkpoint: str
    step: int
    reason: str
    file: str | None
    by_rank: int
    time: str


def write_quarantine(root: Path, record: QuarantineRecord) -> Path:
    """Write `record` durably; returns its path. Raises StorageError."""
    path = quarantine_file(root, record.checkpoint)
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise storage_error("create", path.parent, error) from error
    replace_file(path, to_pretty_json(record))
    return path


def quarantined(root: Path) -> frozenset[str]:
    """Names of the quarantined folders of `root`. A record's presence counts, not its content. Raises StorageError."""
    folder = root / SIDE_FOLDER / QUARANTINE_FOLDER
    try:
        return frozenset(path.name[: -len(".json")] for path in folder.iterdir() if path.name.endswith(".json"))
    except FileNotFoundError:
        return frozenset()
    except OSError as error:
        raise storage_error("list", folder, error) from error
