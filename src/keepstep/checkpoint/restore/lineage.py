"""Which checkpoint training should continue from: the head of the surviving lineage, read from the folders alone.

Each restore abandons what it went back over: when a life of a job starts at step s, every checkpoint beyond s that was
there is dead history. Within a run, lives are ordered by cycle; between runs, which have no common cycles, by time.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import TYPE_CHECKING, Literal

import msgspec

from keepstep.checkpoint.format.layout import TOMBSTONE_FOLDER, FolderName, parse_folder_name
from keepstep.checkpoint.restore.quarantine import quarantined
from keepstep.checkpoint.restore.verify import check_marker
from keepstep.checkpoint.storage.source import Source
from keepstep.checkpoint.trust.manifest import Facts, Manifest, UnsignedError, UntrustedKeyError
from keepstep.checkpoint.trust.policy import TrustPolicy
from keepstep.records.errors import StorageError, VerificationError

if TYPE_CHECKING:
    from cryptography.hazmat.primitives.asymmetric.ec import EllipticCurvePublicKey

_REQUESTS_AT_ONCE = 16

Distrust = Literal["key", "unsigned"]


class Listed(msgspec.Struct, frozen=True, kw_only=True):
    """One checkpoint folder of a root. `manifest` is None with `error` set when its marker does not verify.

    `distrust` says that policy and not damage is why: signed by another key, or not signed.

    `abandoned_by` names the life (run and cycle) that went back before it; None for the surviving lineage. `tombstoned`:
    its deletion was begun.
    """

    name: FolderName
    committed: bool
    quarantined: bool = False
    manifest: Manifest | None = None
    error: str | None = None
    distrust: Distrust | None = None
    abandoned_by: str | None = None
    tombstoned: bool = False
    size_bytes: int | None = None
    """Of all its files together, where the manifest says it."""
    marker_sha256: str | None = None
    """Of its marker as it is, verified or not; None when it could not be read."""

    @property
    def candidate(self) -> bool:
        """True when a restore may try it."""
        return self.committed and not self.quarantined and not self.tombstoned and self.abandoned_by is None


def list_checkpoints(
    source: Source,
    *,
    trusted_key: EllipticCurvePublicKey | None = None,
    allow_unsigned: bool = False,
    policy: TrustPolicy | None = None,
    run_id: str | None = None,
    known: dict[str, Listed] | None = None,
) -> list[Listed]:
    """Every checkpoint folder of `source` (of `run_id` only, if given), newest first; an absent root is empty.

    Markers are read and their signatures checked; data files are not. With `policy` that decides who is trusted, and not
    `trusted_key` and `allow_unsigned`. Markers never change: what verified is put into `known`, without its list of files,
    and who lists again and again with the same `known` reads each marker once. Raises StorageError when the root cannot be
    listed.
    """
    names = [name for text in source.folders() if (name := parse_folder_name(text)) is not None]
    names = [name for name in names if run_id is None or name.run_id == run_id]
    refused = quarantined(source)

    def check(name: FolderName, marker: tuple[str, bytes]) -> Manifest:
        return check_marker(name.text, *marker, trusted_key=trusted_key, allow_unsigned=allow_unsigned, policy=policy)

    def look(name: FolderName) -> Listed:
        seen = None if known is None else known.get(name.text)
        if seen is not None:
            return msgspec.structs.replace(seen, quarantined=name.text in refused)
        item = _look(source, name, name.text in refused, check)
        if known is not None and item.manifest is not None:
            item = msgspec.structs.replace(item, manifest=msgspec.structs.replace(item.manifest, files=()))
            known[name.text] = item
        return item

    # Each marker on an object store is a request of its own; on a disk it is a small file.
    workers = min(_REQUESTS_AT_ONCE, len(names)) if source.tier in ("object", "peer") else 1
    if workers > 1:
        with ThreadPoolExecutor(workers, thread_name_prefix="keepstep-list") as pool:
            found = list(pool.map(look, names))
    else:
        found = [look(name) for name in names]
    found.sort(key=lambda listed: listed.name, reverse=True)
    # After the folders: a deletion that begins in between is seen.
    buried = source.record_names(TOMBSTONE_FOLDER)
    found = [msgspec.structs.replace(item, tombstoned=True) if item.name.text in buried else item for item in found]
    return mark_abandoned(found)


def _look(
    source: Source,
    name: FolderName,
    refused: bool,
    check: Callable[[FolderName, tuple[str, bytes]], Manifest],
) -> Listed:
    """Read and check the marker of one folder; what is wrong with it is said in the entry."""
    manifest, problem, committed, digest = None, None, True, None
    distrust: Distrust | None = None
    try:
        marker = source.marker(name.text)
        if marker is None:
            committed = False
        else:
            digest = hashlib.sha256(marker[1]).hexdigest()
            manifest = check(name, marker)
    except (VerificationError, StorageError) as error:
        problem = str(error)
        if isinstance(error, UntrustedKeyError | UnsignedError):
            distrust = "key" if isinstance(error, UntrustedKeyError) else "unsigned"
    return Listed(
        name=name,
        committed=committed,
        quarantined=refused,
        manifest=manifest,
        error=problem,
        distrust=distrust,
        size_bytes=_size_bytes(manifest),
        marker_sha256=digest,
    )


def _size_bytes(manifest: Manifest | None) -> int | None:
    if manifest is None or any(file.size_bytes < 0 for file in manifest.files):
        return None
    return sum(file.size_bytes for file in manifest.files)


def mark_abandoned(listed: list[Listed]) -> list[Listed]:
    """Fill `abandoned_by` of each entry from the lives that the verified manifests tell of."""
    lives: dict[tuple[str, int, int, int], Facts] = {}
    for entry in listed:
        if entry.manifest is not None and entry.manifest.facts is not None:
            facts = entry.manifest.facts
            lives[(facts.run, facts.cycle, facts.attempt, facts.life_started_ns)] = facts
    result = []
    for entry in listed:
        abandoning = next((life for life in lives.values() if abandons(life, entry)), None)
        text = None if abandoning is None else f"run {abandoning.run} cycle {abandoning.cycle}"
        result.append(msgspec.structs.replace(entry, abandoned_by=text))
    return result


def abandons(life: Facts, entry: Listed) -> bool:
    """True when `life` began after `entry` was written and at an earlier step."""
    if entry.name.step <= life.restored_step or (life.scope is not None and life.scope != entry.name.run_id):
        return False
    facts = entry.manifest.facts if entry.manifest is not None else None
    if life.run == entry.name.run_id:
        mine, its = (life.cycle, life.attempt), (entry.name.cycle, entry.name.attempt)
        if mine != its:
            return mine > its
        # The same cycle number twice happens without a launcher that counts; the start of each life then tells them
        # apart.
        return facts is not None and facts.life_started_ns < life.life_started_ns
    return facts is not None and facts.created_ns < life.life_started_ns
