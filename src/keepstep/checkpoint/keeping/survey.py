"""What a root holds, as retention sees it: the listing, its side records, and a look at what has no marker."""

from __future__ import annotations

import os
import re
from typing import TYPE_CHECKING

import msgspec

from keepstep.checkpoint.format.layout import INDEX_NAME, rank_file_name
from keepstep.checkpoint.format.shard import header_end, parse_header
from keepstep.checkpoint.keeping.policy import Policy
from keepstep.checkpoint.keeping.records import Records, is_pinned, read_records
from keepstep.checkpoint.keeping.retention import Entry, LifeKey, Limits, Line, decide
from keepstep.checkpoint.restore.lineage import Listed, abandons, list_checkpoints
from keepstep.checkpoint.storage.posix import PosixRoot
from keepstep.checkpoint.storage.source import Root, Source
from keepstep.checkpoint.trust.manifest import Facts
from keepstep.records.errors import VerificationError

if TYPE_CHECKING:
    from cryptography.hazmat.primitives.asymmetric.ec import EllipticCurvePublicKey

_RANK_FILE = re.compile(r"rank-\d{5,7}-of-\d{5,7}\.safetensors")
_MAX_INDEX_BYTES = 1 << 30


class Survey(msgspec.Struct, frozen=True, kw_only=True):
    """A root at one moment: its checkpoints newest first, with what the listing and the side records say of them."""

    entries: list[Entry]
    listed: dict[str, Listed]
    records: Records


class _World(msgspec.Struct, frozen=True):
    world: int


def survey(
    root: Root,
    *,
    trusted_key: EllipticCurvePublicKey | None,
    allow_unsigned: bool = False,
    now_ns: int,
    run_id: str | None = None,
) -> Survey:
    """List `root` (of `run_id` only, if given). Markers are read and checked as for a restore, data files are not read.

    Raises StorageError.
    """
    records = read_records(root, now_ns)
    listed = list_checkpoints(root, trusted_key=trusted_key, allow_unsigned=allow_unsigned, run_id=run_id)
    lives = {_life(facts): facts for entry in listed if (facts := _facts(entry)) is not None}
    restored = {facts.restored_from: facts for facts in lives.values() if facts.restored_from is not None}
    entries = [_entry(root, item, records, lives, restored, now_ns) for item in listed]
    return Survey(entries=entries, listed={item.name.text: item for item in listed}, records=records)


def plan(root: Root, found: Survey, policy: Policy, limits: Limits) -> list[Line]:
    """What `policy` does to each checkpoint. Reads the files of unfinished ones that would be deleted.

    The suspicions of `found` are added to those of `limits`. Raises StorageError.
    """
    limits = msgspec.structs.replace(limits, suspicions=(*limits.suspicions, *found.records.suspicions.values()))
    entries = found.entries
    lines = decide(entries, policy, limits)
    doubtful = {line.checkpoint for line in lines if not line.keep and line.state == "unfinished"}
    whole = {folder for folder in doubtful if is_whole(root, folder)}
    if not whole:
        return lines
    return decide(
        [msgspec.structs.replace(e, complete=True) if e.name.text in whole else e for e in entries], policy, limits
    )


def _facts(item: Listed) -> Facts | None:
    return item.manifest.facts if item.manifest is not None else None


def _life(facts: Facts) -> LifeKey:
    return (facts.run, facts.cycle, facts.attempt, facts.life_started_ns)


def _entry(
    root: Root,
    item: Listed,
    records: Records,
    lives: dict[LifeKey, Facts],
    restored: dict[str, Facts],
    now_ns: int,
) -> Entry:
    folder, facts = item.name.text, _facts(item)
    found = root.files(folder) or {}
    known = set() if item.manifest is None else {file.name for file in item.manifest.files}
    foreign = [n for n, size in found.items() if size < 0 or (n not in known and not _is_ours(n))]
    quarantined_ns = records.quarantined_ns.get(folder, now_ns) if item.quarantined else None
    return Entry(
        name=item.name,
        committed=item.committed,
        created_ns=facts.created_ns if facts is not None else _changed_ns(root, folder, found, now_ns),
        size_bytes=sum(size for size in found.values() if size > 0),
        scope=None if facts is None else facts.scope,
        metrics={} if facts is None else {k: v for k, v in (facts.metrics or {}).items() if v is not None},
        problem=None if item.manifest is not None or not item.committed else item.error or "unknown",
        quarantined_ns=quarantined_ns,
        released=folder in records.released,
        abandoned_by=item.abandoned_by,
        life=None if facts is None else _life(facts),
        abandoning=frozenset(key for key, life in lives.items() if abandons(life, item)),
        proven=_proof(item, records, restored),
        pins=tuple(is_pinned(records.pins, folder)),
        permits=tuple(
            name for step, to, name in records.permits if to == folder or (to is None and step == item.name.step)
        ),
        tombstoned=item.tombstoned,
        foreign=tuple(sorted(foreign)),
    )


def _is_ours(name: str) -> bool:
    return name == INDEX_NAME or _RANK_FILE.fullmatch(name) is not None


def _proof(item: Listed, records: Records, restored: dict[str, Facts]) -> str | None:
    if item.manifest is None:
        return None
    if records.verified.get(item.name.text) == item.manifest.digest:
        return "ckpt verify found every byte as the manifest says"
    life = restored.get(item.name.text)
    return None if life is None else f"run {life.run} cycle {life.cycle} restored from it"


def _changed_ns(root: Root, folder: str, found: dict[str, int], now_ns: int) -> int:
    """When anything in `folder` was last changed; now, where the storage does not say."""
    if not isinstance(root, PosixRoot):
        return now_ns
    path = root.path / folder
    try:
        return max(os.lstat(place).st_mtime_ns for place in (path, *(path / name for name in found)))
    except OSError:
        return now_ns  # it is changing right now


def is_whole(root: Source, folder: str) -> bool:
    """Whether all files of a save lie in `folder`: the index, and of each rank a file with all that its header announces.

    Without a marker there is no digest to compare with. Raises StorageError.
    """
    found = root.files(folder) or {}
    try:
        index = _read(root, folder, INDEX_NAME, 0, _MAX_INDEX_BYTES)
        world = msgspec.json.decode(index, type=_World).world
        if not 0 < world <= len(found):
            return False
        for name in (rank_file_name(rank, world) for rank in range(world)):
            size = found.get(name, 0)
            end = header_end(_read(root, folder, name, 0, 8), size, name)
            parse_header(_read(root, folder, name, 0, end), size, name)
    except (VerificationError, msgspec.DecodeError, UnicodeDecodeError, RecursionError):
        return False
    return True


def _read(root: Source, folder: str, name: str, offset: int, limit_bytes: int) -> bytes:
    opened = root.open(folder, name)
    try:
        buffer = bytearray(min(limit_bytes, max(opened.size_bytes - offset, 0)))
        opened.read_into(memoryview(buffer), offset)
        return bytes(buffer)
    finally:
        opened.close()
