"""Side records that decide what is kept: open suspicions, pins, rollback permits, releases, proofs, tombstones, tier notes.

Records are written once and, but by `prune`, never deleted: what ends one is another record. One that cannot be read holds
as far as its name tells, since keeping too much can be put right.
"""

from __future__ import annotations

import getpass
import os
import re
import socket
import time
from typing import Any, TypeVar

import msgspec

from keepstep.checkpoint.format.layout import (
    QUARANTINE_FOLDER,
    TOMBSTONE_FOLDER,
    noted_checkpoint,
    parse_folder_name,
)
from keepstep.checkpoint.keeping import pins
from keepstep.checkpoint.keeping.retention import Suspicion
from keepstep.checkpoint.storage.source import Sink, Source
from keepstep.checkpoint.trust import permits
from keepstep.checkpoint.trust.envelope import open_bundle
from keepstep.records.codec import from_rfc3339, rfc3339, to_pretty_json
from keepstep.records.errors import ConfigError, VerificationError

SUSPICION = "suspicion"
RELEASED = "released"
TOMBSTONES = TOMBSTONE_FOLDER
VERIFIED = "verified"
TIERS = "tiers"
QUARANTINE = QUARANTINE_FOLDER
OF_ONE_CHECKPOINT = (TIERS, VERIFIED, QUARANTINE, RELEASED)
"""Kinds whose record `<folder>` is about that folder alone and goes with it."""

_T = TypeVar("_T")
_NAME = re.compile(r"[A-Za-z0-9_][A-Za-z0-9._-]{0,127}")
_EVERY_STEP = 1 << 62


class Release(msgspec.Struct, frozen=True, kw_only=True):
    """`keepstep.release/1`: `name` (a quarantined checkpoint or a suspicion) no longer keeps anything from being deleted."""

    schema: str = "keepstep.release/1"
    name: str
    reason: str
    time: str
    by: str


class Tombstone(msgspec.Struct, frozen=True, kw_only=True):
    """`keepstep.tombstone/1`: checkpoint `checkpoint` is being deleted. Its presence counts, not its content."""

    schema: str = "keepstep.tombstone/1"
    checkpoint: str
    step: int
    reasons: list[str]
    policy: str
    reason: str | None
    time: str
    by: str
    action: str


class Verified(msgspec.Struct, frozen=True, kw_only=True):
    """`keepstep.verified/1`: every byte of `checkpoint`, whose marker has SHA-256 `digest`, was compared at `time`."""

    schema: str = "keepstep.verified/1"
    checkpoint: str
    digest: str
    time: str
    by: str


class Reached(msgspec.Struct, frozen=True, kw_only=True):
    """A tier that a save reached, and when."""

    tier: str
    time: str


class TierNote(msgspec.Struct, frozen=True, kw_only=True):
    """Which tiers a save reached."""

    checkpoint: str
    reached: list[Reached]


class Records(msgspec.Struct, frozen=True, kw_only=True):
    """The side records of a root that retention looks at."""

    suspicions: dict[str, Suspicion]
    """The open ones by name."""
    released: frozenset[str]
    tombstones: frozenset[str]
    pins: dict[str, str]
    """Reason of each pin by checkpoint."""
    permits: dict[str, str]
    """The checkpoint that each rollback permit names."""
    quarantined_ns: dict[str, int]
    """When each was quarantined; one whose record does not say so counts as quarantined this moment."""
    verified: dict[str, str]
    """Digest of the marker that was verified, by checkpoint."""
    tiers: dict[str, list[Reached]]
    """What each reached, in the order of time."""


def read_records(root: Source, now_ns: int) -> Records:
    """All of them. Raises StorageError when the root cannot be listed."""
    released = root.record_names(RELEASED)
    suspicions = {name: _suspicion(name, data) for name, data in root.records(SUSPICION).items()}
    verified = {name: _decode(data, Verified) for name, data in root.records(VERIFIED).items()}
    notes = {name: _decode(data, TierNote) for name, data in root.records(TIERS).items()}
    return Records(
        suspicions={name: found for name, found in suspicions.items() if name not in released},
        released=released,
        tombstones=root.record_names(TOMBSTONES),
        pins={name: _reason(data) for name, data in root.records(pins.RECORD_KIND).items()},
        permits={
            name: target
            for name, data in root.records(permits.RECORD_KIND).items()
            if (target := _named_by(data)) is not None
        },
        quarantined_ns={name: time_in(data, now_ns) for name, data in root.records(QUARANTINE).items()},
        verified={name: found.digest for name, found in verified.items() if found is not None},
        tiers=_by_checkpoint(notes),
    )


def new_suspicion(since_step: int, reason: str, now_ns: int, run: str | None = None) -> Suspicion:
    """A suspicion of this user, now."""
    return Suspicion(since_step=since_step, reason=reason, time=rfc3339(now_ns), by=whoami(), run=run)


def write_suspicion(root: Sink, name: str, suspicion: Suspicion) -> str:
    """Keep what is from before `suspicion.since_step` until `name` is released; where the record lies.

    Raises ConfigError (name) or StorageError.
    """
    if not _NAME.fullmatch(name) or parse_folder_name(name) is not None:
        raise ConfigError(f"{name!r} cannot name a suspicion; use 1 to 128 of A-Z a-z 0-9 . _ -")
    return root.put_record(SUSPICION, name, to_pretty_json(suspicion))


def release(root: Sink, name: str, reason: str, now_ns: int) -> str:
    """Let retention delete what suspicion or quarantine `name` kept. A quarantined checkpoint is still not restored.

    Raises StorageError.
    """
    record = Release(name=name, reason=reason, time=rfc3339(now_ns), by=whoami())
    return root.put_record(RELEASED, name, to_pretty_json(record))


def note_verified(root: Sink, folder: str, digest: str) -> None:
    """Write down that all bytes of `folder` were verified against the marker with SHA-256 `digest`. Raises StorageError."""
    record = Verified(checkpoint=folder, digest=digest, time=rfc3339(time.time_ns()), by=whoami())
    root.put_record(VERIFIED, folder, to_pretty_json(record))


def whoami() -> str:
    """user@host:pid of this process, for records."""
    try:
        user = getpass.getuser()
    except (KeyError, OSError):  # a container's uid without a name
        user = f"uid{os.getuid()}"
    return f"{user}@{socket.gethostname()}:{os.getpid()}"


def _by_checkpoint(notes: dict[str, TierNote | None]) -> dict[str, list[Reached]]:
    """The notes of each checkpoint together. Their names count, as for all side records, not what they say they are about."""
    result: dict[str, list[Reached]] = {}
    for name, note in notes.items():
        if note is not None:
            result.setdefault(noted_checkpoint(name), []).extend(note.reached)
    return {checkpoint: sorted(reached, key=lambda one: one.time) for checkpoint, reached in result.items()}


def _decode(data: bytes, kind: type[_T]) -> _T | None:
    try:
        return msgspec.json.decode(data, type=kind)
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError):
        return None


def _reason(pin: bytes) -> str:
    record = _decode(pin, pins.PinRecord)
    return "its record cannot be read" if record is None else record.reason or "no reason given"


def _suspicion(name: str, data: bytes) -> Suspicion:
    found = _decode(data, Suspicion)
    if found is not None:
        return found
    return Suspicion(since_step=_EVERY_STEP, reason=f"record {name} cannot be read", time="", by="")


def time_in(data: bytes, now_ns: int) -> int:
    """The time that a record says, in UTC nanoseconds; `now_ns` when it says none."""
    record: dict[str, Any] | None = _decode(data, dict[str, Any])
    try:
        return from_rfc3339(str((record or {}).get("time")))
    except (ValueError, OverflowError):
        return now_ns


def _named_by(data: bytes) -> str | None:
    """The checkpoint that a rollback permit names. Its signature is not checked: a permit only keeps, here."""
    try:
        permit = _decode(open_bundle(data, "permit", permits.PERMIT_TYPE).payload, permits.Permit)
    except VerificationError:
        return None
    return None if permit is None else permit.to_checkpoint
