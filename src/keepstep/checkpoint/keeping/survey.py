"""What a root holds, as retention sees it: the listing, its side records, and a look at what has no marker."""

from __future__ import annotations

import os
import re

import msgspec

from keepstep.checkpoint.format.blocks import (
    BLOCKS_NAME,
    DIGEST_ALGORITHMS,
    blocks_count,
    body_bytes,
    check_block,
    hash_block,
    span_of,
)
from keepstep.checkpoint.format.layout import INDEX_NAME, rank_file_name
from keepstep.checkpoint.format.shard import header_end, parse_header
from keepstep.checkpoint.keeping.policy import Policy
from keepstep.checkpoint.keeping.records import Records, read_records, time_in
from keepstep.checkpoint.keeping.retention import Entry, LifeKey, Limits, Line, decide
from keepstep.checkpoint.restore.lineage import Listed, abandons, list_checkpoints
from keepstep.checkpoint.storage.objects import CLAIMS
from keepstep.checkpoint.storage.posix import PosixRoot
from keepstep.checkpoint.storage.source import Root, Source
from keepstep.checkpoint.trust.manifest import Facts
from keepstep.checkpoint.trust.policy import TrustPolicy
from keepstep.records.errors import VerificationError

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
    trust: TrustPolicy,
    *,
    now_ns: int,
    run_id: str | None = None,
    known: dict[str, Listed] | None = None,
) -> Survey:
    """List `root` (of `run_id` only, if given). Markers are read and checked as for a restore, data files are not read.

    `known`: as for `list_checkpoints`. Raises StorageError.
    """
    records = read_records(root, now_ns)
    listed = list_checkpoints(root, policy=trust, run_id=run_id, known=known)
    lives = {_life(facts): facts for entry in listed if (facts := _facts(entry)) is not None}
    restored = {facts.restored_from: facts for facts in lives.values() if facts.restored_from is not None}
    claimed = _claimed_ns(root, now_ns) if any(not item.committed for item in listed) else {}
    entries = [_entry(root, item, records, lives, restored, claimed, now_ns) for item in listed]
    return Survey(entries=entries, listed={item.name.text: item for item in listed}, records=records)


def plan(root: Root, found: Survey, policy: Policy, limits: Limits) -> list[Line]:
    """What `policy` does to each checkpoint. Looks into the folders of those that would be deleted only.

    The suspicions of `found` are added to those of `limits`. Raises StorageError.
    """
    limits = msgspec.structs.replace(limits, suspicions=(*limits.suspicions, *found.records.suspicions.values()))
    entries = found.entries
    lines = decide(entries, policy, limits)
    doomed = {line.checkpoint: line.state for line in lines if not line.keep}
    whole = {folder for folder, state in doomed.items() if state == "unfinished" and is_whole(root, folder)}
    foreign = {folder: names for folder in doomed if (names := _foreign(root, folder))}
    if not whole and not foreign:
        return lines
    looked = [
        msgspec.structs.replace(e, complete=e.name.text in whole, foreign=foreign.get(e.name.text, ())) for e in entries
    ]
    return decide(looked, policy, limits)


def _foreign(root: Source, folder: str) -> tuple[str, ...]:
    """Names in `folder` that no save writes, and what is no regular file."""
    return tuple(sorted(n for n, size in (root.files(folder) or {}).items() if size < 0 or not _is_ours(n)))


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
    claimed: dict[str, int],
    now_ns: int,
) -> Entry:
    folder, facts = item.name.text, _facts(item)
    # The files of many ranks are many: where the manifest tells their size, the folder is not listed.
    found = {} if item.size_bytes is not None else root.files(folder) or {}
    quarantined_ns = records.quarantined_ns.get(folder, now_ns) if item.quarantined else None
    return Entry(
        name=item.name,
        committed=item.committed,
        created_ns=facts.created_ns
        if facts is not None
        else claimed.get(folder) or _changed_ns(root, folder, found, now_ns),
        size_bytes=sum(size for size in found.values() if size > 0) if item.size_bytes is None else item.size_bytes,
        scope=None if facts is None else facts.scope,
        metrics={} if facts is None else facts.metrics,
        problem=None if item.manifest is not None or not item.committed else item.error or "unknown",
        quarantined_ns=quarantined_ns,
        released=folder in records.released,
        abandoned_by=item.abandoned_by,
        life=None if facts is None else _life(facts),
        abandoning=frozenset(key for key, life in lives.items() if abandons(life, item)),
        proven=_proof(item, records, restored),
        pins=(records.pins[folder],) if folder in records.pins else (),
        permits=tuple(permit for permit, target in records.permits.items() if target == folder),
        tombstoned=item.tombstoned,
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


def _claimed_ns(root: Root, now_ns: int) -> dict[str, int]:
    """When each folder of an object store was claimed: objects tell nothing of a folder's changes."""
    return {} if isinstance(root, PosixRoot) else {n: time_in(d, now_ns) for n, d in root.records(CLAIMS).items()}


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

    Where a file ends in digests of its blocks, each block is compared with its own. Raises StorageError.
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
            if BLOCKS_NAME in parse_header(_read(root, folder, name, 0, end), size, name):
                _check_blocks(root, folder, name, size)
    except (VerificationError, msgspec.DecodeError, UnicodeDecodeError, RecursionError):
        return False
    return True


def _check_blocks(root: Source, folder: str, name: str, size: int) -> None:
    """Compare every block with the digests at the file's end. Raises VerificationError, StorageError or ConfigError."""
    body = body_bytes(size)
    digests = _read(root, folder, name, body, size - body)
    algorithm = ""
    for number in range(blocks_count(size)):
        begin, end = span_of(number, body)
        block = memoryview(_read(root, folder, name, begin, end - begin))
        if not number:
            # Which algorithm it was stands in the manifest, which is what is missing here.
            algorithm = next(a for a in DIGEST_ALGORITHMS if a == "sha256" or hash_block(block, a)[0] == digests[:32])
        check_block(block, number, digests, algorithm, name)


def _read(root: Source, folder: str, name: str, offset: int, limit_bytes: int) -> bytes:
    opened = root.open(folder, name)
    try:
        buffer = bytearray(min(limit_bytes, max(opened.size_bytes - offset, 0)))
        opened.read_into(memoryview(buffer), offset)
        return bytes(buffer)
    finally:
        opened.close()
