"""Quarantine: a record beside the checkpoints says which must not be restored. Nothing is deleted or moved."""

from __future__ import annotations

import msgspec

from keepstep.checkpoint.format.layout import QUARANTINE_FOLDER
from keepstep.checkpoint.storage.source import Root, Source
from keepstep.records.codec import to_pretty_json
from keepstep.records.errors import StorageError


class QuarantineRecord(msgspec.Struct, frozen=True, kw_only=True):
    """`keepstep.quarantine/1`: why checkpoint `checkpoint` was refused, by which rank, when (RFC 3339)."""

    schema: str = "keepstep.quarantine/1"
    checkpoint: str
    step: int
    reason: str
    file: str | None
    by_rank: int
    time: str


def write_quarantine(root: Root, record: QuarantineRecord) -> str:
    """Write `record` durably; returns where it lies. The first record about a checkpoint stays. Raises StorageError."""
    data = to_pretty_json(record)
    try:
        return root.put_record(QUARANTINE_FOLDER, record.checkpoint, data)
    except StorageError:
        if record.checkpoint in quarantined(root):
            return f"{root.where}: {QUARANTINE_FOLDER}/{record.checkpoint}"
        raise


def quarantined(source: Source) -> frozenset[str]:
    """Names of the quarantined folders. A record's presence counts, not its content. Raises StorageError."""
    return source.record_names(QUARANTINE_FOLDER)
