"""Pins: records beside the checkpoints that say which are kept whatever the retention policy says.

A record is written once and never changed: a pin and its release are two records, of which the later counts. Pins are not
signed: whoever can write to the root can pin and release, as they could delete.
"""

from __future__ import annotations

import secrets
from collections.abc import Mapping

import msgspec

from keepstep.checkpoint.format.layout import parse_folder_name
from keepstep.checkpoint.storage.source import Sink
from keepstep.records.codec import rfc3339, to_pretty_json

RECORD_KIND = "pins"


class PinRecord(msgspec.Struct, frozen=True, kw_only=True):
    """`keepstep.pin/1`: `pinned` True keeps `checkpoint`, False releases it. `time` is RFC 3339, `time_ns` the same."""

    schema: str = "keepstep.pin/1"
    checkpoint: str
    step: int
    pinned: bool
    reason: str
    by: str
    time: str
    time_ns: int


def pin_record(checkpoint: str, *, pinned: bool, reason: str, by: str, now_ns: int) -> PinRecord:
    """The record that pins or releases the checkpoint folder `checkpoint` now."""
    name = parse_folder_name(checkpoint)
    assert name is not None, "checked by the caller"
    return PinRecord(
        checkpoint=checkpoint,
        step=name.step,
        pinned=pinned,
        reason=reason,
        by=by,
        time=rfc3339(now_ns),
        time_ns=now_ns,
    )


def write_pin(sink: Sink, record: PinRecord) -> str:
    """Write `record`; returns its id, the name of the side record. Raises StorageError."""
    name = f"{record.checkpoint}.{record.time_ns}.{secrets.token_hex(2)}"
    sink.put_record(RECORD_KIND, name, to_pretty_json(record))
    return name


def pins(records: Mapping[str, bytes]) -> dict[str, PinRecord]:
    """The pins that hold, by checkpoint folder, from the side records of kind `pins`.

    A record that cannot be read pins the checkpoint its name begins with: a damaged record never lets anything be deleted.
    """
    latest: dict[str, PinRecord] = {}
    unreadable = []
    for name, data in sorted(records.items()):
        try:
            record = msgspec.json.decode(data, type=PinRecord)
        except msgspec.DecodeError:
            unreadable.append(name)
            continue
        known = latest.get(record.checkpoint)
        if known is None or record.time_ns >= known.time_ns:
            latest[record.checkpoint] = record
    held = {checkpoint: record for checkpoint, record in latest.items() if record.pinned}
    for name in unreadable:
        checkpoint = _folder_of(name)
        if checkpoint is not None and checkpoint not in held:
            reason = f"the pin record {name} cannot be read"
            held[checkpoint] = pin_record(checkpoint, pinned=True, reason=reason, by="unknown", now_ns=0)
    return held


def _folder_of(name: str) -> str | None:
    """The folder that a record's name begins with. Run ids may have dots, so the last two are cut off."""
    for text in (name, name.rsplit(".", 2)[0]):
        if parse_folder_name(text) is not None:
            return text
    return None
