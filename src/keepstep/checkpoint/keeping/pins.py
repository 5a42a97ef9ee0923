"""Pins: records beside the checkpoints that say which are kept whatever the retention policy says.

A pin is side record `pins/<checkpoint>`, written once. Releasing it deletes the record, which takes the right to delete: the
one that a pin withholds. Pins are not signed; who can delete in the root needs no forged ones.
"""

from __future__ import annotations

import msgspec

from keepstep.checkpoint.format.layout import FolderName
from keepstep.checkpoint.storage.source import Deleter, Sink, Source
from keepstep.records.codec import rfc3339, to_pretty_json

RECORD_KIND = "pins"


class PinRecord(msgspec.Struct, frozen=True, kw_only=True):
    """`keepstep.pin/1`: `checkpoint` is kept. `time` is RFC 3339; `by` is a person, as user@host."""

    schema: str = "keepstep.pin/1"
    checkpoint: str
    step: int
    reason: str
    by: str
    time: str


def new_pin(name: FolderName, *, reason: str, by: str, now_ns: int) -> PinRecord:
    """The record that pins checkpoint `name` now."""
    return PinRecord(checkpoint=name.text, step=name.step, reason=reason, by=by, time=rfc3339(now_ns))


def read_pin(source: Source, checkpoint: str) -> PinRecord | None:
    """The pin of `checkpoint`, None when it has none. One whose content cannot be read is still a pin."""
    data = source.records(RECORD_KIND).get(checkpoint)
    if data is None:
        return None
    try:
        return msgspec.json.decode(data, type=PinRecord)
    except msgspec.DecodeError:
        return PinRecord(checkpoint=checkpoint, step=-1, reason="its record cannot be read", by="", time="")


def write_pin(sink: Sink, pin: PinRecord) -> str:
    """Write `pin`; where it lies. Raises StorageError, also when another pin of that checkpoint is there."""
    return sink.put_record(RECORD_KIND, pin.checkpoint, to_pretty_json(pin))


def delete_pin(deleter: Deleter, checkpoint: str) -> None:
    """Release the pin of `checkpoint`; none is no error. Raises StorageError."""
    deleter.delete_record(RECORD_KIND, checkpoint)
