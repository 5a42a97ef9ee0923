"""Committing a checkpoint: its facts, the signed manifest over its files, and the marker, which is written last."""

from __future__ import annotations

import contextlib
import os
import socket
import time
from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING

import msgspec

from keepstep.checkpoint.format.layout import MARKER_SIGNED, MARKER_UNSIGNED, FolderName
from keepstep.checkpoint.storage.source import Root, Tier
from keepstep.checkpoint.storage.writer import FileFact
from keepstep.checkpoint.trust.manifest import (
    Facts,
    Manifest,
    Writer,
    build_statement,
    parse_manifest,
    plain_metrics,
    sign_statement,
)
from keepstep.checkpoint.trust.signers import Signer, as_signer
from keepstep.records.codec import rfc3339, to_json
from keepstep.records.errors import StorageError

if TYPE_CHECKING:
    from cryptography.hazmat.primitives.asymmetric.ec import EllipticCurvePrivateKey


def writer_facts(
    name: FolderName,
    *,
    world: int,
    parent: str | None,
    restored_step: int,
    restored_from: str | None,
    scope: str | None,
    life_started_ns: int,
    metrics: Mapping[str, float] | None = None,
) -> Facts:
    """Facts of a checkpoint that this process commits now."""
    now_ns = time.time_ns()
    return Facts(
        run=name.run_id,
        step=name.step,
        cycle=name.cycle,
        attempt=name.attempt,
        world=world,
        parent=parent,
        writer=Writer(host=socket.gethostname(), pid=os.getpid()),
        created_at=rfc3339(now_ns),
        created_ns=now_ns,
        restored_step=restored_step,
        restored_from=restored_from,
        scope=scope,
        life_started_ns=life_started_ns,
        metrics=plain_metrics(metrics),
    )


def _marker(
    folder: str, files: list[FileFact], facts: Facts, signer: EllipticCurvePrivateKey | Signer | None
) -> tuple[str, bytes]:
    """Name and content of the marker: signed unless `signer` is None."""
    name = MARKER_UNSIGNED if signer is None else MARKER_SIGNED
    statement = build_statement(folder, files, facts, marker=name)
    return name, statement if signer is None else sign_statement(statement, signer)


def commit(
    root: Root,
    folder: str,
    files: list[FileFact],
    facts: Facts,
    signer: EllipticCurvePrivateKey | Signer | None,
    *,
    may_publish: Callable[[], None] = lambda: None,
) -> Manifest:
    """Publish `folder` of `root`: sign with `key` (unless it is None) and put the marker in place, durably.

    All `files` must be durable already. `may_publish` is asked last and raises StorageError when it must not be. Raises
    StorageError; then nothing is published.
    """
    marker, data = _marker(folder, files, facts, signer)
    root.publish(folder, marker, data, may_publish=may_publish)
    trusted_key = None if signer is None else as_signer(signer).public_key
    return parse_manifest(data, marker, trusted_key=trusted_key, allow_unsigned=signer is None)


def memory_marker(
    folder: str, files: list[FileFact], facts: Facts, algorithm: str, signer: EllipticCurvePrivateKey | Signer | None
) -> tuple[str, bytes]:
    """Name and content of the marker of a set in memory, whose data files are listed by fingerprints of `algorithm`."""
    return _marker(folder, files, msgspec.structs.replace(facts, memory=algorithm), signer)


def write_tier_note(root: Root, folder: str, tiers: Sequence[Tier], *, name: str | None = None) -> None:
    """Note beside the checkpoint which tiers hold it from now on, for people and for pruning. A note that fails is no harm.

    Notes are written once: what is reached later is a note of its own, under another `name`.
    """
    now = rfc3339(time.time_ns())
    note = {
        "schema": "keepstep.tiers/1",
        "checkpoint": folder,
        "reached": [{"tier": tier, "time": now} for tier in tiers],
    }
    with contextlib.suppress(StorageError):
        root.put_record("tiers", name or folder, to_json(note))
